#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the command does when memory runs out at any of its allocations, and when it is ended in the middle: it says so, is not
# ended by a signal of its own making, and its files are all there or none is; nothing else is left.
# Called by ctest as  test_failures.sh <source> <build>.
# shellcheck disable=SC2086
set -u
source=$1
heddle=$2/heddle
[ -x "$heddle" ] || { echo "test_failures.sh: $heddle is not a program"; exit 1; }
heddle=$(cd "$(dirname "$heddle")" && pwd)/heddle
if nm -D "$heddle" | grep -q __asan_init; then
    echo "left out: under a sanitizer, memory is the sanitizer's"
    exit 77
fi
directory=$(mktemp -d) && cd "$directory" || exit 1
trap 'cd / && rm -rf "$directory"' EXIT
mkdir there
if ! ${CC:-cc} -O1 -shared -fPIC -o fail.so "$source/tests/preload/fail.c" -ldl 2>err; then
    echo "left out: no C library with __libc_malloc: $(head -n 1 err)"
    exit 77
fi
failures=0
export OMP_NUM_THREADS=2

wrong() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}

failing() { # N COMMAND...: its Nth allocation fails; the number of allocations goes to `count`
    local at=$1
    shift
    env HEDDLE_FAIL_AT="$at" HEDDLE_FAIL_COUNT="$directory/count" LD_PRELOAD="$directory/fail.so" "$heddle" "$@" >out 2>err
}

"$heddle" random --shape 1,2,40,16 --seed 1 --out x.npy || exit 1
"$heddle" random --shape 7,16 --seed 2 --out w.npy || exit 1

# ------------------------------------------------------------------------------------------------- out of memory
each_allocation() { # COMMAND...: writes into there/, if anything
    local n=1 status
    rm -f there/*
    failing 0 "$@" || wrong "heddle $*: status $? with all its memory: $(cat err)"
    rm -rf right
    cp -r there right
    cp out printed
    while :; do
        rm -f there/*
        failing $n "$@"
        status=$?
        [ $n -le "$(cat count)" ] || break
        if [ $status = 0 ]; then # what can be done without is done without
            diff -r there right >/dev/null || wrong "heddle $*: allocation $n failed unnoticed"
        else
            [ $status -lt 126 ] || wrong "heddle $*: allocation $n fails, and the status is $status"
            [ -s err ] || wrong "heddle $*: allocation $n fails, and nothing is said"
            [ -z "$(ls -A there)" ] || wrong "heddle $*: allocation $n fails, and $(ls -A there) is left"
        fi
        n=$((n + 1))
    done
    echo "heddle $1: $((n - 1)) allocations, each failed once"
}

each_allocation attention --q x.npy --k x.npy --v x.npy --mask causal-top-left --out there/o.npy --lse there/lse.npy \
    --dout x.npy --dq there/dq.npy
each_allocation norm-linear --x x.npy --w w.npy --out there/y.npy
each_allocation random --shape 3,4 --out there/r.npy
each_allocation info

# ---------------------------------------------------------------------------------------------- ended in the middle
# While it waits for somebody to read the pipe, its other file is written and has no name, or a temporary one.
mkfifo pipe
rm -f there/*
touch out err
before=$(ls -A . there)
ended_by() { # SIGNAL ENVIRONMENT...; bash's word of it is not wanted
    end_by "$@" 2>/dev/null
}
end_by() {
    local signal=$1 process
    shift
    env --default-signal=INT "$@" "$heddle" attention --q x.npy --k x.npy --v x.npy --out there/new.npy --lse pipe >out 2>err &
    process=$!
    for _ in $(seq 200); do
        compgen -G 'there/.heddle*' >/dev/null && break
        readlink /proc/$process/fd/* 2>/dev/null | grep -q 'there/#.*(deleted)' && break
        sleep 0.05
    done
    if [ $# -gt 0 ]; then
        compgen -G 'there/.heddle*' >/dev/null || wrong "no temporary file in ten seconds"
    fi
    kill -s "$signal" $process
    for _ in $(seq 200); do
        kill -0 $process 2>/dev/null || break
        sleep 0.05
    done
    kill -KILL $process 2>/dev/null && wrong "SIG$signal does not end the command"
    wait $process 2>/dev/null
    [ $? = $((128 + $(kill -l "$signal"))) ] || wrong "SIG$signal: another status"
    [ "$(ls -A . there)" = "$before" ] || wrong "SIG$signal $* left $(comm -13 <(echo "$before") <(ls -A . there) | tr '\n' ' ')"
}
if (cd there && python3 -c 'import os; os.close(os.open(".", os.O_TMPFILE | os.O_WRONLY))') 2>/dev/null; then
    for signal in TERM INT HUP KILL; do
        ended_by $signal
    done
fi
for signal in TERM INT HUP; do
    ended_by $signal HEDDLE_NO_UNNAMED=1 LD_PRELOAD="$directory/fail.so"
done

# The same results either way, and over what was there.
for unnamed in "" 1; do
    rm -f there/*
    echo old >there/o.npy
    chmod 600 there/o.npy
    for _ in 1 2; do
        env ${unnamed:+HEDDLE_NO_UNNAMED=1} LD_PRELOAD="$directory/fail.so" "$heddle" attention --q x.npy --k x.npy --v x.npy \
            --out there/o.npy --lse there/lse.npy || wrong "no results with files${unnamed:+ of a temporary name}"
    done
    [ "$(stat -c %a there/o.npy)" = 600 ] || wrong "the file's mode was not kept"
    [ "$(ls -A there)" = "lse.npy"$'\n'"o.npy" ] || wrong "$(ls -A there) is there"
    [ -z "$unnamed" ] || diff -r there first || wrong "files of a temporary name hold something else"
    rm -rf first
    cp -r there first
done

[ $failures = 0 ] && echo "ok"
[ $failures = 0 ]

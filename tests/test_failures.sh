#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the command does when memory runs out at an allocation, when its files cannot be changed, and when it is ended. Of memory and
# files it says so, is not ended by a signal of its own making, and its files are all there or none is; nothing else is left. The same
# holds for the signals that it can catch and for SIGKILL up to the moment when the files get their places. Killed amid that, each
# file is the old one or the new one, whole, and temporary files that are left are removed by the next that writes there.
# Called by ctest as  test_failures.sh <source> <build>; with HEDDLE_LONG every allocation of every command fails, else of the slower
# ones some.
# `a && b || wrong` is meant as it is, and no name here has spaces.
# shellcheck disable=SC2015,SC2086,SC2206
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
for library in fail files; do
    if ! ${CC:-cc} -O1 -shared -fPIC -o $library.so "$source/tests/preload/$library.c" -ldl 2>err; then
        echo "left out: not the C library that $library.c is for: $(head -n 1 err)"
        exit 77
    fi
done
failures=0
ulimit -c 0
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
each_allocation() { # EACH WHOLE COMMAND...: writes into there/, if anything, and WHOLE tells that it is; every EACH-th allocation
    local each=$1 whole=$2 n status
    shift 2
    n=$each
    rm -f there/*
    failing 0 "$@" || wrong "heddle $*: status $? with all its memory: $(cat err)"
    rm -rf right
    cp -r there right
    while :; do
        rm -f there/*
        failing $n "$@"
        status=$?
        [ $n -le "$(cat count)" ] || break
        if [ $status = 0 ]; then # what can be done without is done without
            $whole || wrong "heddle $*: allocation $n failed unnoticed"
        else
            [ $status -lt 126 ] || wrong "heddle $*: allocation $n fails, and the status is $status"
            [ -s err ] || wrong "heddle $*: allocation $n fails, and nothing is said"
            [ -z "$(ls -A there)" ] || wrong "heddle $*: allocation $n fails, and $(ls -A there) is left"
        fi
        n=$((n + each))
    done
    echo "heddle $1: of $(cat count) allocations each$([ $each = 1 ] || echo " ${each}th") failed once"
}
is_right() { diff -r there right >/dev/null; }
is_page() { # it has times
    tail -n 1 there/page.html | grep -q '</html>' && grep -q 'PEERS = .{"section": "the peer".*},$' there/page.html &&
        grep -q '^{"section": "another".*}\];$' there/page.html && [ "$(grep -c '"op": "attention"' there/page.html)" = 2 ]
}
is_checked() { grep -q 'overall: ok' out && is_right; }
is_shown() { grep -q 'once printed' out; }

each_allocation 1 is_right attention --q x.npy --k x.npy --v x.npy --mask causal-top-left --out there/o.npy --lse there/lse.npy \
    --dout x.npy --dq there/dq.npy
each_allocation 1 is_right norm-linear --x x.npy --w w.npy --out there/y.npy
each_allocation 1 is_right random --shape 3,4 --out there/r.npy
each_allocation 1 is_right info
some=7
[ -z "${HEDDLE_LONG:-}" ] || some=1
printf '{"section": "%s", "name": "n"}\n' "the peer" another >peers
bench=(bench --op attention --dtype f32 --filter "s64 " --seconds 0 --peers peers --html there/page.html)
verify=(verify --device cpu --case fa2-warps --json there/checks.json)
bins=(verify --device cpu --bins --random 1 --json there/bins.json)
each_allocation $some is_page "${bench[@]}"
each_allocation $some is_checked "${verify[@]}"
each_allocation $some is_checked "${bins[@]}"
each_allocation $some is_shown demo --quick

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
    env --default-signal=INT,QUIT "$@" "$heddle" attention --q x.npy --k x.npy --v x.npy --out there/new.npy --lse pipe >out 2>err &
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
unnamed_ones=no
if (cd there && python3 -c 'import os; os.close(os.open(".", os.O_TMPFILE | os.O_WRONLY))') 2>/dev/null; then
    unnamed_ones=yes
    for signal in TERM INT HUP QUIT XCPU USR1 KILL; do
        ended_by $signal
    done
fi
for signal in TERM INT HUP QUIT XCPU USR1; do
    ended_by $signal HEDDLE_NO_UNNAMED=1 LD_PRELOAD="$directory/files.so"
done

# The same results either way, and over what was there.
for unnamed in "" 1; do
    rm -f there/*
    echo old >there/o.npy
    chmod 600 there/o.npy
    for _ in 1 2; do
        env ${unnamed:+HEDDLE_NO_UNNAMED=1} LD_PRELOAD="$directory/files.so" "$heddle" attention --q x.npy --k x.npy --v x.npy \
            --out there/o.npy --lse there/lse.npy || wrong "no results with files${unnamed:+ of a temporary name}"
    done
    [ "$(stat -c %a there/o.npy)" = 600 ] || wrong "the file's mode was not kept"
    [ "$(ls -A there)" = "lse.npy"$'\n'"o.npy" ] || wrong "$(ls -A there) is there"
    [ -z "$unnamed" ] || diff -r there first || wrong "files of a temporary name hold something else"
    rm -rf first
    cp -r there first
done

# ------------------------------------------------------------------------------ killed, or refused, at every change of a file
outputs="o.npy lse.npy dq.npy"
command=(attention --q x.npy --k x.npy --v x.npy --out there/o.npy)
all=(--lse there/lse.npy --dout x.npy --dq there/dq.npy)
remake() { # what the command writes where nothing is there goes to new/
    rm -rf there new && mkdir there
    "$heddle" "${command[@]}" "${all[@]}" >out || wrong "heddle ${command[*]}: status $?"
    mv there new
}
is_new() { cmp -s "there/$1" "new/$1"; } # FILE WAS_THERE
remake

# at_change N WHAT OLD ENVIRONMENT...: a run of it in which the Nth change of a file is WHAT (KILL, REFUSE), where the OLD outputs were
# there before. Each file is then the old one, and there if it was, or the new one; how many are new goes to $changed, and how many
# others there are to $strays.
at_change() {
    local n=$1 what=$2 old=$3 x was file
    shift 3
    rm -rf there && mkdir there
    for x in $old; do echo "old $x" >there/$x; done
    { env "HEDDLE_${what}_AT=$n" "$@" LD_PRELOAD="$directory/files.so" "$heddle" "${command[@]}" "${all[@]}" >out 2>err; } 2>/dev/null
    status=$?
    changed=0
    strays=0
    for x in $outputs; do
        was=no
        [[ " $old " != *" $x "* ]] || was=yes
        if is_new $x $was; then
            changed=$((changed + 1))
        elif [ $was = yes ]; then
            [ "$(cat there/$x)" = "old $x" ] || wrong "$what at change $n${*:+, $*}: $x is neither the old one nor the new"
        else
            [ ! -e there/$x ] || wrong "$what at change $n${*:+, $*}: $x is there in part"
        fi
    done
    for file in there/.[!.]*; do
        [ -e "$file" ] || continue
        strays=$((strays + 1))
        [[ $file =~ ^there/\.heddle-[0-9]+-[0-9]+$ ]] || wrong "$what at change $n${*:+, $*} leaves $file"
    done
}

# each_kill OLD MOST ENVIRONMENT...: killed behind each change in turn; at no more than MOST of them something is left, which the next
# run removes.
each_kill() {
    local n=0 old=$1 most=$2 some=0
    shift 2
    while n=$((n + 1)) && at_change $n KILL "$old" "$@" && [ $status = 137 ]; do
        [ $strays = 0 ] || some=$((some + 1))
        "$heddle" random --shape 2 --out there/next.npy || wrong "the next run fails"
        ! compgen -G 'there/.[!.]*' >/dev/null || wrong "killed at change $n, then another: $(ls -A there) is there"
    done
    [ $n -gt "$(wc -w <<<"$outputs")" ] || wrong "heddle ${command[0]}: no file is changed before it ends"
    [ $status = 0 ] && [ $changed = "$(wc -w <<<"$outputs")" ] && [ $strays = 0 ] || wrong "status $status at change $n, which is none: $(cat err)"
    [ $some -le "$most" ] || wrong "killed over${old:+ $old}${*:+, $*}: something is left at $some moments"
    echo "heddle ${command[0]}: killed at each of $((n - 1)) changes of files${old:+, over $old}${*:+, $*}: something left for the next run at $some"
}

# each_refusal OLD ENVIRONMENT...: all are new or none, or it is said which.
each_refusal() {
    local n=0 old=$1 wanted
    wanted=$(wc -w <<<"$outputs")
    shift
    while n=$((n + 1)) && at_change $n REFUSE "$old" "$@" && [ $status != 0 ]; do
        [ $status = 2 ] && grep -q 'Input/output error' err || wrong "refused change $n: status $status: $(cat err)"
        [ $strays = 0 ] || wrong "refused change $n${*:+, $*} leaves $(ls -A there)"
        [ $changed = "$(grep -c 'is the new one all the same' err)" ] || wrong "refused change $n${*:+, $*}: $changed new: $(cat err)"
        [ $changed = 0 ] || [[ " $* " == *NO_EXCHANGE* ]] || wrong "refused change $n${*:+, $*}: $changed new: $(cat err)"
    done
    [ $changed = "$wanted" ] && [ $n -gt $((2 * wanted)) ] || wrong "no change after the ${n}th: $changed new"
}

named=HEDDLE_NO_UNNAMED=1
if [ "$unnamed_ones" = yes ]; then
    each_kill "" 0
    each_kill "lse.npy" 3
    each_kill "o.npy lse.npy" 6
    each_kill "o.npy lse.npy dq.npy" 10
    each_kill "o.npy dq.npy" 5 HEDDLE_NO_EXCHANGE=1
    for old in "" "lse.npy" "o.npy dq.npy" "o.npy lse.npy dq.npy"; do
        each_refusal "$old"
        each_refusal "$old" HEDDLE_NO_EXCHANGE=1
    done
fi
for old in "" "lse.npy" "o.npy lse.npy dq.npy"; do
    each_kill "$old" 99 $named
    each_refusal "$old" $named
done

each_end_of_one() { # the command has one output, $outputs
    if [ "$unnamed_ones" = yes ]; then
        each_kill "" 0
        each_kill "$outputs" 1
        each_refusal "$outputs"
    fi
    each_kill "$outputs" 99 $named
    each_refusal "$outputs" $named
}
all=()
outputs=o.npy
each_end_of_one

command=("${verify[@]}")
outputs=checks.json
remake
each_end_of_one

# Its lines come behind those that are there.
command=("${bins[@]}")
outputs=bins.json
remake
is_new() { { [ "$2" = no ] || echo "old $1"; cat "new/$1"; } | cmp -s - "there/$1"; }
each_end_of_one

command=("${bench[@]}")
outputs=page.html
is_new() { [ -e "there/$1" ] && head -n 1 "there/$1" | grep -q '^<!doctype' && is_page; } # it has times
each_end_of_one

# Where a file cannot come to be, that is found out before anything is computed.
for line in "${bench[*]/there/nowhere}" "${verify[*]/there/nowhere}" "${bins[*]/there/nowhere}"; do
    "$heddle" ${line/s64 /s64} >out 2>err && wrong "heddle $line: writes into a folder that is not there"
    grep -q 'nowhere/.*No such file' err && [ ! -s out ] || wrong "heddle $line: late: $(cat out err)"
done
rm -rf there && mkdir there
echo kept >there/bins.json
chmod 200 there/bins.json
if ! cat there/bins.json >err 2>&1; then # another than root
    "$heddle" "${bins[@]}" >out 2>err && wrong "bins: lines that cannot be read are lost"
    [ ! -s out ] || wrong "bins: late: $(cat out err)"
fi

# What is somebody's is left alone: a process that runs, a lock, another user's file, another kind of name or of file.
rm -rf there && mkdir there
dead=$(sh -c 'echo $$')
kept=(there/.heddle-$$-0 there/.heddle-0$dead-0 there/.heddle-$dead-0x there/.heddle-$dead there/heddle-$dead-0)
touch "${kept[@]}" there/.heddle-$dead-{0,1,4}
mkdir there/.heddle-$dead-2
ln -s ../x.npy there/.heddle-$dead-3
kept+=(there/.heddle-$dead-{2,3})
chown 65534 there/.heddle-$dead-4 2>/dev/null && kept+=(there/.heddle-$dead-4)
exec 9<there/.heddle-$dead-0
flock 9 2>/dev/null && kept+=(there/.heddle-$dead-0)
"$heddle" random --shape 2 --out there/next.npy || wrong "a run beside files of others fails"
exec 9<&-
for file in "${kept[@]}"; do
    [ -L "$file" ] || [ -e "$file" ] || wrong "$file was somebody's, and is gone"
done
[ ! -e there/.heddle-$dead-1 ] || wrong "what a dead process left is there still"
rm -rf there && mkdir there

[ $failures = 0 ] && echo "ok"
[ $failures = 0 ]

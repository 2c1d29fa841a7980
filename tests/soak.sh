#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# soak.sh <test_sweep> <seconds> [<heddle>]: random problems in one process for so long, half of the time of attention and half
# of norm-linear, and its memory stays flat: between two problems as much of the heap is in use in the last quarter of each as in
# the second, but for 16 kB, which is a block of 4 bytes in each problem. With the command, a sixth of the time is its
# `verify --bins`, whose resident memory between two cases stays flat but for 2 MB, and as many files are open.
set -u
program=$1 seconds=$2 heddle=${3:-}
if ! [[ $seconds =~ ^[0-9]+$ ]] || [ "$seconds" -lt 20 ]; then
    echo "soak.sh: the seconds are a number from 20 on"
    exit 2
fi
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
of_command=0
[ -z "$heddle" ] || of_command=$((seconds / 6))
seconds=$((seconds - of_command))
MALLOC_ARENA_MAX=1 HEDDLE_SEED=$((RANDOM * 32768 + RANDOM)) HEDDLE_SECONDS=$((seconds / 2)) HEDDLE_MEMORY=$directory/bytes \
    "$program" >"$directory/log" 2>&1
status=$? # a wrong result is no reason not to look at the memory
[ "$status" -eq 0 ] || tail -n 20 "$directory/log"

for operation in attention norm-linear; do
    mapfile -t bytes < <(sed -n "s/^$operation //p" "$directory/bytes")
    quarter=$((${#bytes[@]} / 4))
    [ "$quarter" -gt 10 ] || {
        echo "only ${#bytes[@]} problems of $operation"
        exit 1
    }
    before=$(printf '%s\n' "${bytes[@]:quarter:quarter}" | sort -n | head -n 1)
    after=$(printf '%s\n' "${bytes[@]:3*quarter:quarter}" | sort -n | head -n 1)
    echo "$operation: ${#bytes[@]} problems, $before bytes, then $after"
    [ $((after - before)) -le 16384 ] || status=1
done

# quarter N: of the samples, a line each, the least
quarter() {
    local n
    n=$(wc -l <"$directory/samples")
    sed -n "$(($1 * n / 4 + 1)),$((($1 + 1) * n / 4))p" "$directory/samples" | sort -n | head -n 1
}

# soak_command PROGRAM...: kB resident, and files, ten times a second
soak_command() {
    local process files
    "$@" >"$directory/log" 2>&1 &
    process=$!
    for ((i = 0; i < 10 * of_command; i++)); do
        sed -n 's/^VmRSS:[^0-9]*\([0-9]*\) kB/\1/p' "/proc/$process/status" || break
        sleep 0.1
    done >"$directory/samples" 2>"$directory/err"
    files=$(find "/proc/$process/fd" -type l | wc -l)
    if ! kill "$process" 2>"$directory/err" || grep -q FAILED "$directory/log"; then
        tail -n 20 "$directory/log"
        return 1
    fi
    wait "$process" 2>"$directory/err"
    echo "heddle: $(quarter 1) kB resident, then $(quarter 3), $files files open"
    [ $(($(quarter 3) - $(quarter 1))) -le 2048 ] && [ "$files" -le 8 ]
}

# Blocks of the heap are given back to the system at once, those of some kB and more as mappings of their own.
if [ "$of_command" -gt 0 ] && [ -d /proc/self/fd ]; then
    export MALLOC_ARENA_MAX=1 MALLOC_TRIM_THRESHOLD_=0 MALLOC_MMAP_THRESHOLD_=16384
    soak_command "$heddle" verify --device cpu --bins --random 2000000000 --seed $RANDOM || status=1
fi
exit "$status"

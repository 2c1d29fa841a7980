#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# soak.sh <test_sweep> <seconds>: random problems in one process for so long, half of the time of attention and half of
# norm-linear, and its memory stays flat: between two problems as much of the heap is in use in the last quarter of each as in
# the second, but for 16 kB, which is a block of 4 bytes in each problem.
set -u
program=$1 seconds=$2
if ! [[ $seconds =~ ^[0-9]+$ ]] || [ "$seconds" -lt 20 ]; then
    echo "soak.sh: the seconds are a number from 20 on"
    exit 2
fi
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
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
exit "$status"

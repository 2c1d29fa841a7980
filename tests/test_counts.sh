#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_counts.sh <source directory>: tests/sweep.sh, with programs that stand for test_sweep.
# shellcheck disable=SC2016 # the programs expand their variables themselves
set -euo pipefail
sweep=$1/tests/sweep.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset HEDDLE_SEED HEDDLE_SWEEP_KEEP HEDDLE_SWEEP_RECORD

fail() {
    printf 'FAILED: %s\n' "$1" >&2
    [ ! -f "$work/out" ] || cat "$work/out" >&2
    exit 1
}

# holds <pattern> <what>: the last output has a line like it.
holds() {
    grep -q -- "$1" "$work/out" || fail "$2"
}

# program <lines of bash>: stands for test_sweep.
program() {
    printf '#!/usr/bin/env bash\n%s\n' "$1" >"$work/program"
    chmod +x "$work/program"
}

# expect <status> <arguments>: runs sweep.sh.
expect() {
    local expected=$1 status=0
    shift
    "$sweep" "$@" >"$work/out" 2>&1 || status=$?
    [ "$status" -eq "$expected" ] || fail "sweep.sh $*: status $status in place of $expected"
}

# e^0.2 and e^0.1 on average of the processes, which have different numbers of cases.
program 'printf "device cpu none\ncases attention %s %s 0\ncases norm-linear %s %s 0\nworst 0.5 dq, f16\n" \
    "$HEDDLE_SEED" "$HEDDLE_CASES" "$HEDDLE_SEED" "$HEDDLE_CASES" >"$HEDDLE_COUNTS"
printf "bin attention f16 d 32 keys inf dq %s %s\n" "$HEDDLE_CASES" "$((HEDDLE_SEED == 7 ? 2 : 1))" >>"$HEDDLE_COUNTS"'
HEDDLE_SEED=7 expect 0 "$work/program" 25 2
holds '"attention": {"cases": 25, "failed": 0, "seeds": \[7, 31\]}' "the cases of two processes"
holds '"attention f16 d<=32 keys<=inf": {"dq": \[25, 1.127\]}' "the average of two processes"
holds '"backend": "cpu none"' "the backend"
holds '"ratio": 0.500, "tensor": "dq, f16"' "the worst comparison"
holds '^norm-linear: 25 cases, 0 failed' "the last lines"

# A GPU has one process at a time: there they are threads of one.
program 'printf "device cuda none\ncases attention %s %s 0\n" "$HEDDLE_SEED" "$((HEDDLE_CASES + HEDDLE_THREADS))" >"$HEDDLE_COUNTS"'
HEDDLE_TEST_DEVICE=cuda HEDDLE_SEED=7 expect 0 "$work/program" 25 3
holds '"attention": {"cases": 28, "failed": 0, "seeds": \[7, 34\]}' "threads in place of processes"

# Many cases are held to their average, few are not.
program 'printf "cases attention 0 %s 0\nbin attention f32 d 32 keys 16 o 100 %s\n" "$HEDDLE_CASES" "$AVERAGE" >"$HEDDLE_COUNTS"'
AVERAGE=9.5 expect 0 "$work/program" 100
AVERAGE=9.6 expect 1 "$work/program" 100
holds 'attention f32 d<=32 keys<=16, o: 1.101 times' "an average above 1.1"

# A case that fails, and a process that breaks off.
program 'echo "  case: that one"; echo "attention FAILED: HEDDLE_SEED=7 HEDDLE_CASES=1 runs this case alone"; printf "cases attention 0 10 1\n" >"$HEDDLE_COUNTS"; exit 1'
expect 1 "$work/program" 10
holds 'case: that one' "the case that failed"
holds '^attention: 10 cases, 1 failed' "the number of failures"
[ "$(tail -n 1 "$work/out")" = 'attention: seed 7 failed' ] || fail "the seed in the last line"
program 'printf "cases attention 0 3 0\n" >"$HEDDLE_COUNTS"; kill -SEGV $$'
expect 1 "$work/program" 10
holds 'process 0 ended with status 139: cases attention 0 3 0' "a process that broke off"
program 'echo "skipped: no GPU"; exit 77'
expect 77 "$work/program" 10
holds 'skipped: no GPU' "why it is skipped"
expect 2 "$work/program" many

# What is kept can be put together later.
program 'printf "device cpu %s\ncases attention %s 5 0\n" "$HEDDLE_CPU" "$HEDDLE_SEED" >"$HEDDLE_COUNTS"'
HEDDLE_CPU=one HEDDLE_SEED=5 HEDDLE_SWEEP_KEEP=$work/kept expect 0 "$work/program" 5
HEDDLE_CPU=two HEDDLE_SEED=10 HEDDLE_SWEEP_KEEP=$work/kept HEDDLE_SWEEP_RECORD=$work/record expect 0 "$work/program" 5
grep -q '"backend": "cpu two"' "$work/record" || fail "the record is in its file"
expect 0 --merge "$work"/kept/*
holds '"attention": {"cases": 10, "failed": 0, "seeds": \[5, 14\]}' "what was kept"
holds '"backend": "cpu one, cpu two"' "both backends"

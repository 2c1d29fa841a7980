#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh <directory of test programs> <record.json> [<directory of the Python package> <python>]: the C tests on the GPU, the
# tests in Python, the tools of compute-sanitizer on a small part of the C tests, and the record of what was run. Needs no
# network and builds nothing. Exit status 1 when something failed, 77 when there is no GPU. The last line counts.
set -uo pipefail
programs=$(cd "$1" && pwd)
record=$2
package=${3:+$(cd "$3" && pwd)}
python=${4:-python3}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
export HEDDLE_TEST_DEVICE=cuda HEDDLE_RATIOS=1

passed=0
failed=0
rows=()

# one <name> <seconds> <command>
one() {
    local name=$1 limit=$2 status=0 begin=$SECONDS ok broken
    shift 2
    timeout "$limit" "$@" >"$log/out" 2>&1 || status=$?
    if [ "$status" -eq 77 ]; then
        printf '%-28s skipped: %s\n' "$name" "$(grep -m 1 skipped "$log/out")"
        return
    fi
    ok=$(grep -c '\[       OK \]' "$log/out")
    broken=$(grep -c '^\[  FAILED  \] test_' "$log/out")
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        grep -vE '^\[ +(RUN|OK)|average of' "$log/out" | tail -n 40
    fi
    printf '%-28s %s  %d tests, %d s\n' "$name" "$([ "$status" -eq 0 ] && echo ok || echo FAILED)" "$ok" $((SECONDS - begin))
    local worst ratios
    worst=$(sed -n 's/^.*worst error \/ tolerance \([0-9.]*\) (\(.*\))$/{"ratio": \1, "tensor": "\2"}/p' "$log/out" | tail -n 1)
    ratios=$(sed -n 's/^ *\([a-z]*\) *\([a-z0-9]*\): error \/ plain.s error \([0-9.]*\) on average of \([0-9]*\)$/{"tensor": "\1", "dtype": "\2", "error_over_plain": \3, "count": \4}/p' "$log/out" |
        paste -sd, -)
    rows+=("{\"name\": \"$name\", \"status\": $status, \"passed\": $ok, \"failed\": $((broken / 2)), \"seconds\": $((SECONDS - begin)), \"worst_error_over_tolerance\": ${worst:-null}, \"average\": [${ratios}]}")
}

tests_in_python() {
    local status=0 begin=$SECONDS p f
    local processes=() # with pytest-xdist, as many as keep a GPU and its host busy
    ! "$python" -c 'import xdist' 2>/dev/null || processes=(-n 4)
    PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH} timeout 900 "$python" -m pytest -q -p no:cacheprovider "${processes[@]}" \
        --junitxml "$log/pytest.xml" "$here/../python" >"$log/out" 2>&1 || status=$?
    read -r p f < <("$python" "$here/../python/count.py" "$log/pytest.xml")
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        tail -n 60 "$log/out"
    fi
    printf '%-28s %s  %d tests, %d s\n' python "$([ "$status" -eq 0 ] && echo ok || echo FAILED)" "$p" $((SECONDS - begin))
    rows+=("{\"name\": \"python\", \"status\": $status, \"torch\": \"$("$python" -c 'import torch; print(torch.__version__)')\", \"passed\": $p, \"failed\": $f, \"seconds\": $((SECONDS - begin))}")
}

gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
[ -n "$gpu" ] || {
    echo "skipped: nvidia-smi shows no GPU"
    exit 77
}
for test in norm_linear attention sweep threads gpu large; do
    [ ! -x "$programs/test_$test" ] || one "$test" 900 "$programs/test_$test"
done
if [ -n "$package" ] && "$python" -c 'import sys, torch, numpy, pytest; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    tests_in_python
else
    echo "no Python with the package, pytest, and a torch that sees the GPU: the tests in Python are left out"
fi
# Each family of kernels on problems of all sizes, not only on those that the plan would give it.
families="sm80 small"
! nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -q '^9' || families="sm80 sm90 small"
for family in $families; do
    for test in attention sweep sm90; do
        [ "$test, $family" = "sm90, small" ] || [ ! -x "$programs/test_$test" ] ||
            one "$test, $family" 900 env HEDDLE_CUDA="$family" "$programs/test_$test"
    done
done
# A part of each program, by cmocka's filter: the checks cost a hundredfold.
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -n "$sanitizer" ] && [ -x "$programs/test_sanitize" ]; then
    for tool in memcheck racecheck initcheck synccheck; do
        for family in sm90 small; do
            one "$tool, $family" 600 env HEDDLE_CUDA=$family "$sanitizer" --tool "$tool" --error-exitcode 9 \
                "$programs/test_sanitize"
        done
    done
else
    echo "compute-sanitizer is not here: its tools are left out"
fi
{
    printf '{"commit": "%s", "gpu": "%s", "driver": "%s", "date": "%s", "passed": %d, "failed": %d,\n "runs": [\n  ' \
        "${HEDDLE_COMMIT:-$(git -C "$here" rev-parse HEAD 2>/dev/null)}" "${gpu%%,*}" "${gpu##*, }" "$(date -u +%F)" "$passed" "$failed"
    for ((x = 0; x < ${#rows[@]}; x++)); do
        [ "$x" -eq 0 ] || printf ',\n  '
        printf '%s' "${rows[x]}"
    done
    printf '\n ]}\n'
} >"$record"
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]

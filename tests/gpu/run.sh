#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh <directory of test programs> <record.json> [<directory of the Python package> <python>]: the C tests on the GPU, the
# tests in Python, the tools of compute-sanitizer on a small part of the C tests, and the record of what was run. Needs no
# network and builds nothing; what has ended is told on standard error, all of it at the end, also where SIGTERM ends it
# before (timeout): what has not ended has failed then. Exit status 1 when something failed, 77 when there is no GPU. The
# last line counts.
set -uo pipefail
programs=$(cd "$1" && pwd)
record=$2
package=${3:+$(cd "$3" && pwd)}
python=${4:-python3}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
export HEDDLE_TEST_DEVICE=cuda HEDDLE_RATIOS=1
seconds=${HEDDLE_GPU_SECONDS:-900} # that one program may take

gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | wc -l) # of several each takes every so many-th program
most=$(($(nproc) * 3 / 4)) # the float64 reference on the host takes longer than the GPU
((most > 0)) || most=1
passed=0
failed=0
stopped=
trap 'stopped=1; kill $(jobs -pr) 2>/dev/null' TERM INT
names=()
rows=()

# start <name> <seconds> <command>: beside the others, at most so many at a time.
start() {
    local at=${#names[@]} limit=$2
    names+=("$1")
    shift 2
    while [ -z "$stopped" ] && (($(jobs -pr | wc -l) >= most)); do
        wait -n
    done
    [ -z "$stopped" ] || return 0
    (
        trap 'kill $! 2>/dev/null; exit 143' TERM
        begin=$SECONDS status=0
        [ "$gpus" -le 1 ] || [ "${names[$at]}" = python ] || export CUDA_VISIBLE_DEVICES=$((at % gpus))
        timeout "$limit" "$@" >"$log/$at.out" 2>&1 &
        wait $! || status=$?
        echo "$status $((SECONDS - begin))" >"$log/$at.end"
        echo "${names[$at]}: status $status after $((SECONDS - begin)) s" >&2
    ) &
}

# What start's number $1 has come to: a line, the end of what it printed if it failed, and a row of the record.
tell() {
    local name=${names[$1]} out=$log/$1.out status took ok broken worst ratios torch=
    status=143 took=0
    [ ! -f "$log/$1.end" ] || read -r status took <"$log/$1.end"
    touch "$out" # of what was not begun
    if [ "$status" -eq 77 ]; then
        printf '%-28s skipped: %s\n' "$name" "$(grep -m 1 skipped "$out")"
        return
    fi
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        grep -vE '^\[ +(RUN|OK)|plain.s error [0-9.]+ on average of' "$out" | tail -n 60
    fi
    if [ "$name" = python ]; then
        torch="\"torch\": \"$("$python" -c 'import torch; print(torch.__version__)')\", "
        read -r ok broken < <("$python" "$here/../python/count.py" "$log/pytest.xml")
    else
        ok=$(grep -c '\[       OK \]' "$out")
        broken=$(($(grep -c '^\[  FAILED  \] test_' "$out") / 2))
    fi
    printf '%-28s %s  %d tests, %d s\n' "$name" "$([ "$status" -eq 0 ] && echo ok || echo FAILED)" "$ok" "$took"
    worst=$(sed -n 's/^.*worst error \/ tolerance \([0-9.]*\) (\(.*\))$/{"ratio": \1, "tensor": "\2"}/p' "$out" | tail -n 1)
    ratios=$(sed -n 's/^ *\([a-z]*\) *\([a-z0-9]*\): error \/ plain.s error \([0-9.]*\) on average of \([0-9]*\)$/{"tensor": "\1", "dtype": "\2", "error_over_plain": \3, "count": \4}/p' "$out" |
        paste -sd, -)
    rows+=("{\"name\": \"$name\", \"status\": $status, $torch\"passed\": $ok, \"failed\": $broken, \"seconds\": $took, \"worst_error_over_tolerance\": ${worst:-null}, \"average\": [${ratios}]}")
}

start_python() {
    local processes=() # with pytest-xdist, as many as keep a GPU and its host busy
    ! "$python" -c 'import xdist' 2>/dev/null || processes=(-n $((($(nproc) + 3) / 4)))
    start python "$seconds" env XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}" "$python" -m pytest -q -p no:cacheprovider "${processes[@]}" \
        --junitxml "$log/pytest.xml" "$here/../python"
}

gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
[ -n "$gpu" ] || {
    echo "skipped: nvidia-smi shows no GPU"
    exit 77
}
for test in norm_linear{,_tiles,_numbers} prepared attention attention_options accumulate append paged_keys e4m3 segments blocks dropout scores precision sweep threads gpu large order; do
    [ ! -x "$programs/test_$test" ] || start "$test" "$seconds" "$programs/test_$test"
done
if [ -n "$package" ] && "$python" -c 'import sys, torch, numpy, pytest; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    start_python
else
    echo "no Python with the package, pytest, and a torch that sees the GPU: the tests in Python are left out"
fi
families="sm80 small"
! nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -q '^9' || families="sm80 sm90 small"
# Small problems of every kind, in a program of their own: the checks cost a hundredfold, so they begin early.
sanitizer=$(command -v compute-sanitizer || compgen -G '/usr/local/cuda*/bin/compute-sanitizer' | tail -n 1)
if [ -n "$sanitizer" ] && [ -x "$programs/test_sanitize" ]; then
    for tool in memcheck racecheck initcheck synccheck; do
        for family in $families; do
            start "$tool, $family" "$seconds" env HEDDLE_CUDA_FAMILY="$family" "$sanitizer" --tool "$tool" --error-exitcode 9 \
                "$programs/test_sanitize"
        done
    done
else
    echo "compute-sanitizer is not here: its tools are left out"
fi
# Each family of kernels on problems of all sizes, not only on those that the plan would give it; what takes longest begins first.
for tests in "sm90 norm_linear_tiles precision norm_linear" "attention attention_options accumulate append paged_keys e4m3 segments blocks dropout scores norm_linear_numbers prepared sweep order"; do
    for family in $families; do
        for test in $tests; do
            # small has no kernels for Hopper alone, and no tiles: products as large as those take it minutes
            [ "$test, $family" = "sm90, small" ] || [ "$test, $family" = "norm_linear_tiles, small" ] || [ ! -x "$programs/test_$test" ] ||
                start "$test, $family" "$seconds" env HEDDLE_CUDA_FAMILY="$family" "$programs/test_$test"
        done
    done
done
wait
for ((x = 0; x < ${#names[@]}; x++)); do
    tell "$x"
done
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

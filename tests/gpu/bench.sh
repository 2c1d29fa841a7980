#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `heddle bench --device cuda` on the driver that computes nothing: its rows, its page, and what it says when a call of the
# driver fails: bench.sh <heddle>, with that driver on LD_LIBRARY_PATH
set -u
heddle=$1
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
failures=0

wrong() {
    echo "FAILED: $*"
    cat "$directory/out" "$directory/err"
    failures=$((failures + 1))
}

bench() {
    "$heddle" bench --device cuda --seconds 0 --no-error "$@" >"$directory/out" 2>"$directory/err"
}

# An event of that driver is 1 ms behind the one before.
bench --dtype bf16 --filter S128D64 --json --html "$directory/page" || wrong "it ends with $?"
[ "$(grep -c '"ms": 1, .*"gflops": .*"peak_gflops": .*"fraction": 0\.' "$directory/out")" = 2 ] || wrong "no row of each pass"
grep -q 'fwd_bf16_d64_lean_sm90' "$directory/page" || wrong "the page does not name the kernel"
bench --filter "m16 k768" --dtype f32 || wrong "norm-linear: it ends with $?"
[ "$(grep -c 'm16 k768 n3072 float32 .* GF/s ' "$directory/out")" = 3 ] || wrong "no row of each pass of norm-linear, and of prepared weights"
bench --dtype bf16 --filter append --json || wrong "append: it ends with $?"
[ "$(grep -c 'heddle_attention_append_bf16_d512_\(plain\|bytes\)_sm80' "$directory/out")" = 8 ] || wrong "it has not eight rows of append"
bench --filter merge --json || wrong "merge: it ends with $?"
[ "$(grep -c 'heddle_attention_merge_' "$directory/out")" = 3 ] || wrong "it has no row of merge for each type"
bench --dtype bf16 --filter "pages dropout" --json || wrong "pages with options: it ends with $?"
bench --dtype bf16 --filter "pages window" --json || wrong "pages with a window: it ends with $?"
grep -q '"sq": 1, .*"ms": 1, .*"gbytes": 67\.' "$directory/out" || wrong "keys outside the window are counted"
HEDDLE_CUDA_FAMILY=sm80 bench --filter m16 --json || wrong "sm80: it ends with $?"
grep -q '_sm80"' "$directory/out" || wrong "HEDDLE_CUDA_FAMILY asks for no family"
FAKE_CC=86 bench --filter m16 --json || wrong "on a GPU without wgmma it ends with $?"
for call in cuModuleLoadData cuEventCreate cuEventRecord cuEventSynchronize cuMemAlloc_v2 cuMemsetD32Async; do
    FAKE_FAIL=$call:700 bench --filter m16
    [ $? -eq 2 ] || wrong "$call fails, and it ends with another status"
    grep -q "^heddle: .*$call: CUDA error 700$" "$directory/err" || wrong "$call fails, and nobody says so"
done
[ "$failures" -eq 0 ] && echo ok
exit "$((failures > 0))"

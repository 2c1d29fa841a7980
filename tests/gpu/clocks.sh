#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A build with HEDDLE_CLOCKS, for bench/gpu_clocks.py: it is configured, and the kernel that is timed there compiles, to PTX, and reads
# the clock; needs no GPU: clocks.sh <cmake> <nvcc> <source> <C compiler>
set -eu
cmake=$1 nvcc=$2 source=$3 cc=$4
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"$cmake" -S "$source" -B "$directory/build" -DCMAKE_C_COMPILER="$cc" -DHEDDLE_NVCC="$nvcc" -DHEDDLE_BUILD_CUDA=ON -DHEDDLE_CLOCKS=ON \
    -DHEDDLE_BUILD_TESTS=OFF -DHEDDLE_BUILD_TOOLS=OFF -DHEDDLE_BUILD_EXAMPLES=OFF >"$directory/log" 2>&1 || {
    cat "$directory/log"
    exit 1
}
# Of its module the one kernel, as the bench names it.
row='^K\(fwd, bf16, 128, lean, sm90, '
module=$(grep -lE "$row" "$directory"/build/cuda/*.cu)
grep -vE '^K\(' "$module" >"$directory/one.cu"
grep -E "$row" "$module" >>"$directory/one.cu"
"$nvcc" --ptx -std=c++17 -arch=compute_90a -I "$source/include" -I "$source/src" -o "$directory/one.ptx" "$directory/one.cu"
notes=$(grep -c clock64 "$directory/one.ptx") || true
# Eight of a warpgroup's step, the steps of cut tiles and of whole ones, and three of the thread that sends.
if [ "$notes" -lt 19 ]; then
    echo "$(basename "$module" .cu) reads the clock $notes times where 19 notes are"
    exit 1
fi
echo "ok: $(basename "$module" .cu) reads the clock $notes times"

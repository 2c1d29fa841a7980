#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# other_gpus.sh <nvcc> <source tree> <folder of modules' .cu> <work folder> [jobs]: machine code of every kernel that is not Hopper's own
# for the GPUs that get it through PTX, as their driver would make it. Fails where ptxas does, and where it reports on fewer kernels than
# there are; tells what spills most. Takes some 20 minutes of one core.
set -euo pipefail
nvcc=$1 root=$2 modules=$3 work=$4 jobs=${5:-$(nproc)}
mkdir -p "$work"
rm -f "$work"/*.ptxas
export nvcc root work

compile() {
    local name
    name=$(basename "$1" .cu)
    "$nvcc" --ptx -O3 -std=c++17 -arch=compute_80 -I "$root/include" -I "$root/src" -o "$work/$name.ptx" "$1"
    for number in 86 87 89 100 120; do
        "$nvcc" --cubin -arch=sm_$number -Xptxas -v -o "$work/$name.cubin" "$work/$name.ptx" 2>"$work/$name.$number.ptxas" || {
            cat "$work/$name.$number.ptxas" >&2
            exit 1
        }
    done
    rm -f "$work/$name.ptx" "$work/$name.cubin"
}
export -f compile
# shellcheck disable=SC2016
find "$modules" -maxdepth 1 -name '*.cu' ! -name '*_sm90*' -print0 | xargs -0 -n 1 -P "$jobs" bash -c 'compile "$1"' -
for number in 86 87 89 100 120; do
    kernels=$(cat "$modules"/*.cu | grep -c '^K(' || true)
    hopper=$(cat "$modules"/*_sm90*.cu 2>/dev/null | grep -c '^K(' || true)
    made=$(cat "$work"/*."$number".ptxas | grep -c 'Compiling entry function')
    spills=$(cat "$work"/*."$number".ptxas | awk '/spill stores/ && $5 + $9 > 0 { n++; if ($5 + $9 > most) most = $5 + $9 } END { print n + 0, most + 0 }')
    echo "sm_$number: $made kernels; with spills, and the most bytes of one: $spills"
    [ "$made" -eq $((kernels - hopper)) ] || {
        echo "sm_$number: $((kernels - hopper)) kernels were to be made"
        exit 1
    }
done

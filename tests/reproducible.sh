#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A second build of the same sources, in another folder, of files of another date, under another locale, time zone, mask of files and clock
# for SOURCE_DATE_EPOCH, has the same bytes: all that is installed, and the Python extension: reproducible.sh <cmake> <source> <build>
#
# Of the kernels for GPUs those modules are compiled anew that take least, up to HEDDLE_REPRODUCE_CUDA seconds of a processor (default 15;
# all of them: some 900), and compared one by one; the others are taken from the first build.
set -eu
cmake=$1 source=$(cd "$2" && pwd) build=$(cd "$3" && pwd)
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT

cached() { # NAME: its value in the first build
    sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"
}

files=$(git -C "$source" ls-files -co --exclude-standard 2>/dev/null) || {
    echo "left out: no clone, which would tell the sources from what a build leaves"
    exit 77
}
# Where the command finds the tree that it was built from is told from where it lies itself.
below=$(realpath --relative-to "$source" "$build")
[[ $below != ..* ]] || {
    echo "left out: a build folder that is not in the tree"
    exit 77
}
copy=$directory/a/folder/of/another/length
second=$copy/$below
mkdir -p "$copy" "$directory/images"
tar -C "$source" --mtime=2001-02-03 --ignore-failed-read -cf - -T - <<<"$files" | tar -C "$copy" -xf -

options=()
for name in CMAKE_BUILD_TYPE CMAKE_C_COMPILER CMAKE_C_FLAGS CMAKE_INSTALL_PREFIX HEDDLE_BUILD_CUDA HEDDLE_HARDEN HEDDLE_OLD_GLIBC \
    HEDDLE_OPENMP HEDDLE_PYTHON HEDDLE_WERROR HEDDLE_NVCC HEDDLE_FATBINARY Python_EXECUTABLE _Python_EXECUTABLE; do
    value=$(cached "$name")
    [ -z "$value" ] || options+=("-D${name#_}=$value")
done
targets=(heddle heddle_static heddle_command train_gpt)
[ "$(cached HEDDLE_PYTHON)" != ON ] || targets+=(heddle_python heddle_torch)
modules=()
if compgen -G "$build/cuda/*.ptxas" >/dev/null; then
    mapfile -t modules < <(awk '/^seconds of a processor: / {
            name = FILENAME; gsub(/^.*\/|\.ptxas$/, "", name); print $NF, name }' "$build"/cuda/*.ptxas | sort -n |
        awk -v most="${HEDDLE_REPRODUCE_CUDA:-15}" '(sum += $1) <= most { print $2 }')
    for file in "$build"/cuda/*; do
        ln -s "$file" "$directory/images/"
    done
    for module in "${modules[@]}"; do
        rm "$directory/images/$module.fatbin"
    done
    options+=("-DHEDDLE_CUDA_IMAGES=$directory/images")
fi

if ! (
    umask 077
    export SOURCE_DATE_EPOCH=1 TZ=Pacific/Chatham LC_ALL=C HOME=$directory
    "$cmake" -S "$copy" -B "$second" -G "$(cached CMAKE_GENERATOR)" -DHEDDLE_BUILD_TESTS=OFF -DHEDDLE_BUILD_EXAMPLES=OFF "${options[@]}" &&
        "$cmake" --build "$second" -j "${HEDDLE_JOBS:-$(nproc)}" --target "${targets[@]}" &&
        "$cmake" --install "$second" --prefix "$directory/installed/second" &&
        "$cmake" --install "$build" --prefix "$directory/installed/first"
) >"$directory/log" 2>&1; then
    tail -n 40 "$directory/log"
    exit 1
fi

count=$(cd "$directory/installed/first" && find . -type f | wc -l)
diff -r --no-dereference "$directory/installed/first" "$directory/installed/second"
[ "$count" -gt 10 ]
echo "ok: all $count files that are installed, as $(cd "$directory/installed/first" && echo lib*/libheddle.so.*.* bin/*)"
for module in "${modules[@]}"; do
    cmp "$build/cuda/$module.fatbin" "$second/cuda/$module.fatbin"
done
[ ${#modules[@]} -eq 0 ] || echo "ok: ${#modules[@]} modules of kernels, compiled anew: ${modules[*]}"
if [ "$(cached HEDDLE_PYTHON)" = ON ]; then
    for file in _C.abi3.so _torch_ops.so; do
        cmp "$build/python/heddle/$file" "$second/python/heddle/$file"
        echo "ok: $file"
    done
fi

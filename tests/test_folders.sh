#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# No file that is handed on tells in which folder it was built, so that builds can be compared (reproducible.sh does):
#     test_folders.sh <source> <build>
set -eu
source=$(cd "$1" && pwd) build=$(cd "$2" && pwd)
if ! grep -qE '^CMAKE_BUILD_TYPE:[A-Z]+=(Release|MinSizeRel)$' "$build/CMakeCache.txt" || grep -q '^HEDDLE_SANITIZE:[^=]*=.' "$build/CMakeCache.txt"; then
    echo "left out: a debugger is told in which folder its sources are"
    exit 77
fi
failures=0 count=0
for file in libheddle.so libheddle.a heddle examples/train_gpt python/heddle/_C.abi3.so python/heddle/_torch_ops.so; do
    [ -e "$build/$file" ] || continue
    count=$((count + 1))
    found=$(grep -aoF -e "$source" -e "$build" "$build/$file" | sort -u)
    if [ -n "$found" ]; then
        echo "FAILED: $file has the name of a folder in it: $found"
        failures=$((failures + 1))
    fi
done
echo "$count files"
[ "$count" -ge 2 ] && [ "$failures" -eq 0 ]

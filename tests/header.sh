#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# heddle.h compiles on its own, without a warning, in every dialect that it promises: header.sh <source tree>
set -eu
header=$1/include/heddle.h
warnings=(-Wall -Wextra -Wpedantic -Werror)
cc=${CC:-cc}
cxx=${CXX:-c++}

# Not the header itself but a file that includes it twice: compilers warn of less in a main file, and guards get tried.
try() {
    local compiler=$1 language=$2 standard=$3
    printf '#include "%s"\n#include "%s"\nint main(void) { return heddle_version() == HEDDLE_VERSION ? 0 : 1; }\n' \
        "$header" "$header" | "$compiler" -x "$language" -std="$standard" "${warnings[@]}" -fsyntax-only -
    echo "ok: $compiler -std=$standard"
}

for standard in c99 c11 c17; do
    try "$cc" c "$standard"
done
if command -v "$cxx" >/dev/null; then
    for standard in c++98 c++11 c++17; do
        try "$cxx" c++ "$standard"
    done
else
    echo "left out: C++, no $cxx here"
fi

lines=$(wc -l <"$header")
if [ "$lines" -gt 500 ]; then
    echo "heddle.h has $lines lines, more than 500" >&2
    exit 1
fi

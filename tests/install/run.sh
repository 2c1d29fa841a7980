#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs into a fresh prefix, moves it, and builds and runs C and C++ programs against it, through the CMake package and
# through pkg-config: run.sh <cmake> <build tree> <libdir>
set -eu
cmake=$1 build=$2 libdir=$3
here=$(cd "$(dirname "$0")" && pwd)
cc=${CC:-cc}
cxx=${CXX:-c++}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

"$cmake" --install "$build" --prefix "$tmp/first" >"$tmp/log" || {
    cat "$tmp/log" >&2
    exit 1
}
mv "$tmp/first" "$tmp/prefix"
prefix=$tmp/prefix

if [ -x "$prefix/bin/heddle" ]; then
    "$prefix/bin/heddle" info >/dev/null
    echo "ok: the installed command runs"
fi
if [ -x "$prefix/bin/heddle" ]; then
    # From anywhere, with the program and the text that came with it.
    (cd / && "$prefix/bin/heddle" demo -- --seconds 1 --width 16 --layers 1) >"$tmp/log" || {
        cat "$tmp/log" >&2
        exit 1
    }
    job="$prefix/bin/../libexec/heddle/train_gpt --text $prefix/bin/../share/heddle/text "
    grep -qF "the real job: $job" "$tmp/log" || {
        echo "heddle demo does not take what is installed: $(grep "the real job" "$tmp/log")" >&2
        exit 1
    }
    grep -q "^validation loss" "$tmp/log"
    echo "ok: the installed demo trains"
fi

version=$(sed -n 's/^Version: //p' "$prefix/$libdir/pkgconfig/heddle.pc")
languages=(C)
if command -v "$cxx" >/dev/null; then
    languages+=(CXX)
else
    echo "left out: C++, no $cxx here"
fi

for language in "${languages[@]}"; do
    "$cmake" -S "$here" -B "$tmp/$language" -DLANGUAGE="$language" -DVERSION="$version" -DCMAKE_PREFIX_PATH="$prefix" \
        -DCMAKE_BUILD_TYPE=Release >"$tmp/log"
    "$cmake" --build "$tmp/$language" >>"$tmp/log" || {
        cat "$tmp/log" >&2
        exit 1
    }
    "$tmp/$language/with_heddle"
    "$tmp/$language/with_heddle_static"
    echo "ok: find_package(heddle $version), $language, shared and static"
done

if ! command -v pkg-config >/dev/null; then
    echo "left out: pkg-config, which is not here"
    exit 0
fi
export PKG_CONFIG_PATH=$prefix/$libdir/pkgconfig
read -ra cflags <<<"$(pkg-config --cflags heddle)"
read -ra libs <<<"$(pkg-config --libs heddle)"
read -ra static_libs <<<"$(pkg-config --static --libs heddle)"
for language in "${languages[@]}"; do
    if [ "$language" = C ]; then
        compile=("$cc" -std=c99 "$here/consumer.c")
    else
        compile=("$cxx" -std=c++98 "$here/consumer.cpp")
    fi
    "${compile[@]}" "${cflags[@]}" "${libs[@]}" -o "$tmp/shared"
    LD_LIBRARY_PATH=$prefix/$libdir "$tmp/shared"
    "${compile[@]}" "${cflags[@]}" "${static_libs[@]/#-lheddle/-l:libheddle.a}" -o "$tmp/static"
    "$tmp/static"
    if readelf -d "$tmp/static" | grep -q libheddle; then
        echo "the program linked with pkg-config --static still needs libheddle.so" >&2
        exit 1
    fi
    echo "ok: pkg-config, $language, shared and static"
done

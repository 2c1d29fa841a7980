#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What ./dev package makes of this tree works where nothing else of it is:
#     package.sh <folder with the packages> <source tree> <with|without: whether kernels for GPUs are in this machine's wheel>
#                <manylinux|linux: whom the wheels are for>
# The wheel in a virtual environment of its own with NumPy alone, the Debian packages unpacked, not installed.
set -u
dist=$(cd "$1" && pwd) source=$(cd "$2" && pwd) kernels=${3:-without} platform=${4:-manylinux}
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory" || exit 1
failures=0

wrong() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}

# is_for <wheel> <arch> <manylinux tag>: of this version, for every Linux as old as the tag says, or for this machine's kind.
is_for() {
    local tag=$3
    [ "$platform" = manylinux ] || tag=linux
    [[ $(basename "$1") =~ ^heddle-$version-cp310-abi3-(${tag})_$2.whl$ ]] || wrong "no wheel of $version for $tag, or several: $1"
}

version=$(sed -n 's/^#define HEDDLE_VERSION_\(MAJOR\|MINOR\|PATCH\) *//p' "$source/include/heddle.h" | paste -sd .)

# The newest version of glibc that the libraries in a wheel ask for.
newest_glibc() {
    rm -rf unpacked
    python3 -m zipfile -e "$1" unpacked
    find unpacked -name '*.so*' -exec objdump -T {} + | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1
}

if compgen -G "$dist/heddle-*_aarch64.whl" >/dev/null; then
    # No Python for aarch64 is here: what can be seen without running it.
    wheel=$(echo "$dist"/heddle-"$version"-cp310-abi3-*_aarch64.whl)
    is_for "$wheel" aarch64 'manylinux_2_(1[0-9]|2[0-8])'
    python3 -m zipfile -e "$wheel" arm
    for library in arm/heddle/libheddle.so.0 arm/heddle/_C.abi3.so arm/heddle/_torch_ops.so; do
        readelf -h "$library" | grep -q 'Machine: *AArch64' || wrong "$library is not for aarch64"
        readelf -V "$library" | grep -oE 'GLIBC_2\.(29|[3-9][0-9])' && wrong "$library needs a newer glibc than 2.28"
    done
    echo "ok: $(basename "$wheel")"
fi

native=$(compgen -G "$dist/heddle-*_$(uname -m).whl")
if [ -n "$native" ]; then
    is_for "$native" "$(uname -m)" manylinux_2_28
    newest=$(newest_glibc "$native")
    [ "$(printf '%s\n' "$newest" GLIBC_2.28 | sort -V | tail -n 1)" = GLIBC_2.28 ] || wrong "the wheel asks for $newest"
    # NumPy of the system where it has one: there may be no network.
    if ! { python3 -m venv --system-site-packages venv && venv/bin/pip install -q --no-deps "$native" &&
        { venv/bin/python -c 'import numpy' 2>/dev/null || venv/bin/pip install -q numpy; }; }; then
        wrong "the wheel cannot be installed"
    fi
    venv/bin/python - "$version" "$kernels" <<'PYTHON' || wrong "the wheel does not work"
import sys
import numpy as np
import heddle
assert heddle.__version__ == sys.argv[1], heddle.__version__
assert "venv" in heddle.__file__, heddle.__file__
x = np.random.default_rng(1).standard_normal((2, 5, 4)).astype("float32")
s = x @ x.transpose(0, 2, 1) / 2
p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
assert abs(heddle.attention(x, x, x) - p @ x).max() < 1e-5
# Without a driver the backend says so itself; a library without kernels has no backend that could.
(cuda,) = [line for line in heddle.info().splitlines() if line.startswith("cuda: ")]
assert ("not in this build" not in cuda) == (sys.argv[2] == "with"), cuda
print(cuda)
PYTHON
    # Nothing of CUDA is linked or carried along: the driver is opened when it is asked for.
    find unpacked -name '*.so*' -exec objdump -p {} + | grep -iE 'NEEDED.*(cuda|nv)' && wrong "the wheel wants a library of CUDA's"
    find unpacked -iname '*cuda*.so*' -o -iname '*nvrtc*' | grep . && wrong "the wheel carries a library of CUDA's"
    echo "ok: $(basename "$native"), $(du -h "$native" | cut -f 1), $kernels kernels for GPUs"
fi

# conan create has built a program with it and run it.
if [ -f "$dist/heddle-conan.tgz" ]; then
    tar -tzf "$dist/heddle-conan.tgz" | grep -q '/p/lib/libheddle[.]so' || wrong "the Conan package has no library"
    echo "ok: heddle-conan.tgz"
fi

if compgen -G "$dist/*.deb" >/dev/null; then
    for package in libheddle0 libheddle-dev heddle; do
        [ "$(dpkg-deb -f "$dist/${package}_${version}"_*.deb Version)" = "$version" ] || wrong "no $package of $version"
        dpkg-deb -x "$dist/${package}_${version}"_*.deb root || wrong "$package cannot be unpacked"
    done
    lib=$(dirname "$(find root -name libheddle.so)")
    PKG_CONFIG_PATH=$lib/pkgconfig
    export PKG_CONFIG_PATH LD_LIBRARY_PATH=$directory/$lib
    # Unpacked, not installed: what pkg-config finds lies below this folder, as heddle.pc counts from where it lies itself.
    # shellcheck disable=SC2046
    cc "$source/examples/smallest.c" -o smallest $(pkg-config --cflags --libs heddle) || wrong "no program can be built with the package"
    ./smallest | grep -q '^o\[0\] = -1,' || wrong "a program built with the package is wrong"
    root/usr/bin/heddle --version | grep -qF "$version" || wrong "the command does not run"
    root/usr/bin/heddle verify --device cpu --case p22 >/dev/null || wrong "the command is wrong"
    echo "ok: $(cd "$dist" && echo *.deb)"
fi
exit "$((failures > 0))"

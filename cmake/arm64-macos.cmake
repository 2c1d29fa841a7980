# SPDX-License-Identifier: Apache-2.0
# Cross-compiling for macOS on Apple's processors by the clang of zig, which has what it needs of macOS with it (PyPI: ziglang).
# There is no OpenMP with it, and nothing runs what it makes.
#   cmake -S . -B build/macos --toolchain cmake/arm64-macos.cmake -DHEDDLE_OPENMP=OFF
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_C_COMPILER zig cc -target aarch64-macos)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

# SPDX-License-Identifier: Apache-2.0
# Cross-compiling for 64-bit ARM on Debian (gcc-aarch64-linux-gnu, libc6-dev-arm64-cross); tests run in qemu-user.
#   cmake -S . -B build/aarch64 --toolchain cmake/aarch64-linux-gnu.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)

# CMAKE_PREFIX_PATH may add directories with libraries for it; what the host has is of no use.
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

find_program(HEDDLE_QEMU NAMES qemu-aarch64 qemu-aarch64-static)
if(HEDDLE_QEMU)
    # With vectors of 256 bits, and of no others, for the kernels that want these.
    set(CMAKE_CROSSCOMPILING_EMULATOR ${HEDDLE_QEMU} -cpu max,sve256=on -L /usr/aarch64-linux-gnu)
endif()

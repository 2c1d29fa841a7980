# SPDX-License-Identifier: Apache-2.0
# Cross-compiling for 64-bit Windows on Debian (gcc-mingw-w64-x86-64-posix); tests run in wine.
#   cmake -S . -B build/windows --toolchain cmake/x86_64-w64-mingw32.cmake
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)

set(CMAKE_FIND_ROOT_PATH /usr/x86_64-w64-mingw32)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

find_program(HEDDLE_WINE NAMES wine64 wine)
if(HEDDLE_WINE)
    set(CMAKE_CROSSCOMPILING_EMULATOR ${HEDDLE_WINE})
endif()

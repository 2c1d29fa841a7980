# SPDX-License-Identifier: Apache-2.0
# What every target of ours is compiled with.

include(CheckCCompilerFlag)

# All code is looked at, but only the targets have libFuzzer's main.
if(HEDDLE_FUZZ)
    set(HEDDLE_SANITIZE fuzzer-no-link,address,undefined)
endif()
if(HEDDLE_SANITIZE)
    set(sanitize_flags -fsanitize=${HEDDLE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
    add_compile_options(${sanitize_flags})
    add_link_options(-fsanitize=${HEDDLE_SANITIZE})
endif()

# Warnings are for those who work on heddle, not for those who build it as a part of something else.
set(HEDDLE_WARNINGS "")
if(top_level OR HEDDLE_WERROR)
    set(HEDDLE_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wvla -Wconversion -Wno-sign-conversion)
endif()
if(NOT HEDDLE_OPENMP)
    list(APPEND HEDDLE_WARNINGS -Wno-unknown-pragmas)
endif()
if(HEDDLE_WERROR)
    list(APPEND HEDDLE_WARNINGS -Werror)
endif()

function(heddle_compile target)
    set_target_properties(${target} PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
    target_compile_options(${target} PRIVATE ${HEDDLE_WARNINGS})
endfunction()

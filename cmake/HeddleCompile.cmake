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
    set(HEDDLE_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wvla -Wdate-time -Wconversion -Wno-sign-conversion)
endif()
if(NOT HEDDLE_OPENMP)
    list(APPEND HEDDLE_WARNINGS -Wno-unknown-pragmas)
endif()
# MinGW's isnan() has a cast to float in it, and its compiler takes a format for Microsoft's.
if(MINGW AND HEDDLE_WARNINGS)
    list(APPEND HEDDLE_WARNINGS -Wno-float-conversion -Wno-format)
endif()
if(HEDDLE_WERROR)
    list(APPEND HEDDLE_WARNINGS -Werror)
endif()

# What a distribution builds with: checked calls of the C library, guarded stack frames, nothing writable that the loader is done
# with. A sanitizer has its own checks, and a kernel no frame that a string could overflow. MinGW has all this in a library of its
# own, and its linker does by itself what there is of the last.
set(HEDDLE_HARDENING_COMPILE "")
set(HEDDLE_HARDENING_LINK "")
if(HEDDLE_HARDEN AND NOT HEDDLE_SANITIZE AND NOT MINGW)
    include(CheckLinkerFlag)
    check_c_compiler_flag(-fstack-protector-strong HEDDLE_COMPILER_HAS_STACK_PROTECTOR)
    if(HEDDLE_COMPILER_HAS_STACK_PROTECTOR)
        list(APPEND HEDDLE_HARDENING_COMPILE -fstack-protector-strong)
    endif()
    # Without optimisation the C library only warns of it.
    list(APPEND HEDDLE_HARDENING_COMPILE $<$<NOT:$<CONFIG:Debug>>:-U_FORTIFY_SOURCE> $<$<NOT:$<CONFIG:Debug>>:-D_FORTIFY_SOURCE=2>)
    foreach(flag relro now noexecstack)
        check_linker_flag(C -Wl,-z,${flag} HEDDLE_LINKER_HAS_${flag})
        if(HEDDLE_LINKER_HAS_${flag})
            list(APPEND HEDDLE_HARDENING_LINK -Wl,-z,${flag})
        endif()
    endforeach()
    include(CheckPIESupported)
    check_pie_supported(LANGUAGES C)
endif()

function(heddle_compile target)
    set_target_properties(${target} PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
    target_compile_options(${target} PRIVATE ${HEDDLE_WARNINGS} ${HEDDLE_HARDENING_COMPILE})
    get_target_property(type ${target} TYPE)
    if(MINGW) # C99's printf, not Microsoft's
        target_compile_definitions(${target} PRIVATE __USE_MINGW_ANSI_STDIO=1)
    endif()
    if(HEDDLE_OLD_GLIBC)
        target_compile_options(${target} PRIVATE "SHELL:-include ${PROJECT_SOURCE_DIR}/cmake/old_glibc.h")
    endif()
    if(type MATCHES "EXECUTABLE|SHARED_LIBRARY|MODULE_LIBRARY")
        target_link_options(${target} PRIVATE ${HEDDLE_HARDENING_LINK})
        if(HEDDLE_OLD_GLIBC) # where dlopen is not in libc itself
            target_link_options(${target} PRIVATE "LINKER:--push-state,--no-as-needed,-l:libdl.so.2,--pop-state")
        endif()
    endif()
    if(type STREQUAL "EXECUTABLE" AND HEDDLE_HARDENING_LINK)
        set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    endif()
endfunction()

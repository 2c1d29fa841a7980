# SPDX-License-Identifier: Apache-2.0
# The library: compiled once, linked twice (shared and static).

file(GLOB library_sources CONFIGURE_DEPENDS src/*.c src/ref/*.c src/cpu/*.c)
file(GLOB reference_sources CONFIGURE_DEPENDS src/ref/*.c)

# One file per instruction set, each compiled for it alone; the choice falls at run time.
# A fuzzer goes through the baseline's code alone: the others are the same source.
#   isa_row(<file> <macro for src/cpu> <processors> <flags...>)
set(isa_definitions "")
set(isas baseline)
macro(isa_row name macro processors)
    set(isa_file ${PROJECT_SOURCE_DIR}/src/cpu/isa_${name}.c)
    if(EXISTS ${isa_file})
        set(isa_flags ${ARGN})
        string(REPLACE ";" " " CMAKE_REQUIRED_FLAGS "${isa_flags}")
        check_c_compiler_flag("" HEDDLE_COMPILER_HAS_${macro})
        unset(CMAKE_REQUIRED_FLAGS)
        if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(${processors})$" AND HEDDLE_COMPILER_HAS_${macro} AND NOT HEDDLE_FUZZ)
            set_source_files_properties(${isa_file} PROPERTIES COMPILE_OPTIONS "${isa_flags}")
            list(APPEND isa_definitions HEDDLE_HAVE_${macro}=1)
            list(APPEND isas ${name})
        else()
            list(REMOVE_ITEM library_sources ${isa_file})
        endif()
    endif()
endmacro()

set(avx2 -mavx2 -mfma -mf16c)
set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
# gcc aligns the stack to 16 bytes on Windows, and may yet move wider vectors there as if they were aligned (its bug 54412; not
# seen here): the assembler makes moves of them that need no alignment.
if(WIN32 AND CMAKE_C_COMPILER_ID STREQUAL "GNU")
    list(APPEND avx2 -Wa,-muse-unaligned-vector-move)
    list(APPEND avx512 -Wa,-muse-unaligned-vector-move)
endif()
isa_row(avx2 AVX2 "x86_64|AMD64|amd64" ${avx2})
isa_row(avx512 AVX512 "x86_64|AMD64|amd64" ${avx512})
isa_row(avx512bf16 AVX512BF16 "x86_64|AMD64|amd64" ${avx512} -mavx512bf16)
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    isa_row(amx AMX "x86_64|AMD64|amd64" ${avx512} -mavx512bf16 -mamx-tile -mamx-bf16)
else()
    list(FILTER library_sources EXCLUDE REGEX "/isa_amx\\.c$")
endif()
# gcc's first scheduling moves all broadcasts of gemm.h's inner loop to its head, and then 32 registers are too few.
set(neon "")
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    set(neon -fno-schedule-insns)
endif()
isa_row(neon NEON "aarch64|arm64|ARM64" ${neon})
# Only gcc makes SVE's instructions of vector C; getauxval() is Linux's.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_C_COMPILER_ID STREQUAL "GNU")
    isa_row(sve256 SVE256 "aarch64|arm64|ARM64" -march=armv8.2-a+sve -msve-vector-bits=256)
else()
    list(FILTER library_sources EXCLUDE REGEX "/isa_sve256\\.c$")
endif()

add_library(heddle_objects OBJECT ${library_sources})
heddle_compile(heddle_objects)
set_target_properties(heddle_objects PROPERTIES POSITION_INDEPENDENT_CODE ON C_VISIBILITY_PRESET hidden)
target_include_directories(heddle_objects PRIVATE include src)
# Windows has no version script: there the declarations of heddle.h say what leaves the library.
target_compile_definitions(heddle_objects PRIVATE HEDDLE_BUILDING $<$<PLATFORM_ID:Windows>:HEDDLE_SHARED> ${isa_definitions})
target_link_libraries(heddle_objects PRIVATE ${openmp})

# NaN and infinity have to come out right, so no -ffast-math: only what does not change them. The reference stays as its
# formulas are written.
set(not_debug $<NOT:$<CONFIG:Debug>>)
set(reference_flags $<${not_debug}:-O2>)
if(HEDDLE_FUZZ) # for seconds of compiling, where the kernels would take minutes, the tests are done in half the time
    set(reference_flags -O1)
endif()
foreach(source IN LISTS library_sources)
    if(source IN_LIST reference_sources)
        set(flags ${reference_flags} -ffp-contract=off)
    elseif(source MATCHES "/src/cpu/")
        # psABI notes concern calls across files compiled for different vectors, and there are none.
        set(flags $<${not_debug}:-O3> -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wno-psabi)
    else()
        continue()
    endif()
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${flags})
endforeach()

# Only what heddle.h declares leaves the shared library, under a version that changes with the soname.
set(version_script ${PROJECT_BINARY_DIR}/heddle.map)
configure_file(${PROJECT_SOURCE_DIR}/cmake/heddle.map.in ${version_script} @ONLY)

add_library(heddle SHARED $<TARGET_OBJECTS:heddle_objects>)
set_target_properties(heddle PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}
    LINKER_LANGUAGE C
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}
    LINK_DEPENDS ${version_script})
include(CheckLinkerFlag)
check_linker_flag(C -Wl,--version-script=${version_script} HEDDLE_LINKER_HAS_VERSION_SCRIPT)
if(HEDDLE_LINKER_HAS_VERSION_SCRIPT)
    target_link_options(heddle PRIVATE -Wl,--version-script=${version_script})
endif()

add_library(heddle_static STATIC $<TARGET_OBJECTS:heddle_objects>)
set_target_properties(heddle_static PROPERTIES
    OUTPUT_NAME heddle
    LINKER_LANGUAGE C
    ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})

target_link_options(heddle PRIVATE ${HEDDLE_HARDENING_LINK})
foreach(target heddle heddle_static)
    target_include_directories(${target} INTERFACE
        $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
    target_link_libraries(${target} PRIVATE m)
    add_library(heddle::${target} ALIAS ${target})
endforeach()
target_link_libraries(heddle PRIVATE ${openmp})
# An installed heddle_static gets it from heddleConfig.cmake, in the language of the project that asks.
target_link_libraries(heddle_static PRIVATE $<BUILD_INTERFACE:${openmp}>)

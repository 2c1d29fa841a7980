# SPDX-License-Identifier: Apache-2.0
# The CUDA backend: each row of src/cuda/modules.def becomes a fatbin that lies in the library. No cudart, nothing of CUDA is
# linked: where there is no nvcc the backend is left out, where there is no driver the library still loads.

set(HEDDLE_HAVE_CUDA OFF)
if(DEFINED HEDDLE_CUDA)
    message(STATUS "heddle: HEDDLE_CUDA is called HEDDLE_BUILD_CUDA now")
    set(HEDDLE_BUILD_CUDA ${HEDDLE_CUDA} CACHE STRING "" FORCE)
    unset(HEDDLE_CUDA CACHE)
endif()
set(HEDDLE_BUILD_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO (when nvcc is found), ON, OFF")
set_property(CACHE HEDDLE_BUILD_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT HEDDLE_BUILD_CUDA)
    return()
endif()

find_program(HEDDLE_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT HEDDLE_NVCC OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
    if(HEDDLE_BUILD_CUDA STREQUAL "AUTO")
        message(STATUS "heddle: no nvcc, the CUDA backend is left out")
        return()
    endif()
    message(FATAL_ERROR "HEDDLE_BUILD_CUDA is ON, but nvcc was not found (or this is no Linux with gcc or clang): set HEDDLE_NVCC")
endif()

# fatbinary lies where nvcc is, which may be behind a link or a script.
execute_process(COMMAND ${HEDDLE_NVCC} --dryrun --ptx ${PROJECT_SOURCE_DIR}/src/cuda/norm_linear/finish.cu ERROR_VARIABLE nvcc_dryrun
    OUTPUT_QUIET)
string(REGEX MATCH "_HERE_=([^\n]+)" nvcc_dryrun "${nvcc_dryrun}")
find_program(HEDDLE_FATBINARY fatbinary HINTS ${CMAKE_MATCH_1})
if(NOT HEDDLE_FATBINARY)
    message(FATAL_ERROR "heddle: there is no fatbinary beside ${HEDDLE_NVCC}; set HEDDLE_FATBINARY, or build with -DHEDDLE_BUILD_CUDA=OFF")
endif()

# A line of archs.def that begins with a family is for the rooms whose names begin with it; the others are for the rest.
file(STRINGS ${PROJECT_SOURCE_DIR}/src/cuda/archs.def archs REGEX "^[a-z0-9 ]*arch=")
foreach(arch IN LISTS archs)
    string(REGEX MATCH "^([a-z0-9]+ )?arch=" family "${arch}")
    string(STRIP "${CMAKE_MATCH_1}" family)
    string(REGEX REPLACE "^.*arch=" "arch=" arch "${arch}")
    list(APPEND codes_${family} ${arch})
endforeach()

execute_process(COMMAND ${HEDDLE_NVCC} --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
string(REGEX MATCH "release ([0-9.]+)" nvcc_version "${nvcc_version}")
set(HEDDLE_NVCC_VERSION "${CMAKE_MATCH_1}")
message(STATUS "heddle: CUDA backend by nvcc ${HEDDLE_NVCC_VERSION}")

# A fifth of the size, from CUDA 12.8 on, for half a second for each MB. Machine code for one GPU is less than a fifth of it all, and a
# quarter larger where it is made smaller at once: that makes the library 4% larger.
execute_process(COMMAND ${HEDDLE_NVCC} --help OUTPUT_VARIABLE nvcc_help ERROR_QUIET)
set(compress "")
set(compress_one "")
if(nvcc_help MATCHES "--compress-mode")
    set(compress --compress-mode=size)
    set(compress_one --compress-all --compress-mode=balance)
endif()

set(HEDDLE_CUDA_IMAGES "" CACHE PATH "The folder cuda of another build: kernels made from just the same sources are taken from there")

option(HEDDLE_CLOCKS "Hopper's lean forward writes clocks in place of lse, for bench/gpu_clocks.py" OFF)

include(HeddleKernels)
file(GLOB_RECURSE cuda_host_sources CONFIGURE_DEPENDS ${cuda_dir}/*.c)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${cuda_dir}/archs.def)

set(HEDDLE_HAVE_CUDA ON)

# A module is compiled from a source of one line and a line for each of its kernels: a row that changes leaves other modules alone.
# The compiler's resource report goes to <module>.ptxas, for src/cuda/budget.txt.
set(image_dir ${PROJECT_BINARY_DIR}/cuda)
file(MAKE_DIRECTORY ${image_dir})
file(GLOB old_reports ${image_dir}/*.ptxas)
set(image_sources "")
set(has_clocks OFF)
set(of_bf16 "") # the modules that another is a twin of
foreach(row IN LISTS modules)
    if(row MATCHES ", ([a-z0-9_]+)\\)$")
        list(APPEND of_bf16 ${CMAKE_MATCH_1})
    endif()
endforeach()
foreach(row IN LISTS modules)
    if(NOT row MATCHES "^M\\(([a-z0-9_]+), ([a-z0-9_/]+)\\)$")
        message(FATAL_ERROR "modules.def: ${row} is not M(name, source)")
    endif()
    set(module ${CMAKE_MATCH_1})
    set(room ${CMAKE_MATCH_2})
    set(twin_of "")
    if(NOT room MATCHES "/")
        set(twin_of ${room})
        set(room "${room_of_${twin_of}}")
    endif()
    set(room_of_${module} "${room}")
    set(rows ${kernels})
    list(FILTER rows INCLUDE REGEX ", ${module}\\)$")
    if(NOT rows)
        message(FATAL_ERROR "modules.def: no kernel is in ${module}")
    endif()
    list(FILTER kernels EXCLUDE REGEX ", ${module}\\)$")
    list(REMOVE_ITEM old_reports ${image_dir}/${module}.ptxas)
    list(SORT rows)
    set(rows_of_${module} "${rows}")
    set(source ${image_dir}/${module}.cu)
    set(defines "")
    if(HEDDLE_CLOCKS AND module STREQUAL "attention_sm90_fwd_bf16")
        set(defines "#define HEDDLE_CLOCKS 1\n")
        set(has_clocks ON)
    endif()
    set(fatbin ${image_dir}/${module}.fatbin)
    string(REGEX REPLACE "^.*/([a-z0-9]+)(_[a-z0-9]+)?/[^/]*$" "\\1" family ${room})
    set(codes ${codes_${family}})
    if(NOT codes)
        set(codes ${codes_})
    endif()
    set(script ${PROJECT_SOURCE_DIR}/cmake/HeddleFatbin.cmake)
    set(command ${CMAKE_COMMAND} -DNVCC=${HEDDLE_NVCC} -DFATBINARY=${HEDDLE_FATBINARY} -DOUTPUT=${fatbin}
        -DREPORT=${image_dir}/${module}.ptxas -DROOT=${PROJECT_SOURCE_DIR} -DVERSION=${HEDDLE_NVCC_VERSION}
        -DIMAGES=${HEDDLE_CUDA_IMAGES})
    list(LENGTH codes count)
    if(count EQUAL 1)
        set(small "${compress_one}")
    else()
        set(small "${compress}")
    endif()
    set(ptx "") # that twins share
    string(REGEX MATCHALL "compute_[0-9]+[af]?" arches "${codes}")
    list(REMOVE_DUPLICATES arches)
    foreach(arch IN LISTS arches)
        list(APPEND ptx ${fatbin}.${arch}.ptx)
    endforeach()
    if(twin_of)
        string(REPLACE ", f16," ", bf16," as_bf16 "${rows}")
        string(REPLACE ", ${module})" ", ${twin_of})" as_bf16 "${as_bf16}")
        list(SORT as_bf16)
        if(NOT as_bf16 STREQUAL "${rows_of_${twin_of}}")
            message(FATAL_ERROR "modules.def: ${module} has to come after ${twin_of} and to have its kernels in f16, but has:\n${as_bf16}")
        endif()
        string(REPLACE "${fatbin}" "${image_dir}/${twin_of}.fatbin" ptx "${ptx}")
        add_custom_command(
            OUTPUT ${fatbin}
            COMMAND ${command} "-DCODES=${codes}" "-DCOMPRESS=${small}" -DTWIN_OF=${image_dir}/${twin_of}.fatbin -P ${script}
            DEPENDS ${ptx} ${script} ${cuda_dir}/archs.def
            COMMENT "nvcc ${module}"
            VERBATIM)
    else()
        list(JOIN rows "\n" rows)
        file(GENERATE OUTPUT ${source} CONTENT "${defines}#include \"cuda/${room}.cu\"\n${rows}\n")
        set(keep ON)
        if(NOT module IN_LIST of_bf16)
            set(keep OFF)
            set(ptx "")
        endif()
        add_custom_command(
            OUTPUT ${fatbin} ${ptx}
            COMMAND ${command} "-DCODES=${codes}" "-DCOMPRESS=${small}" -DSOURCE=${source} -DKEEP=${keep} -P ${script}
            DEPENDS ${source} ${script} ${cuda_dir}/archs.def
            DEPFILE ${fatbin}.d
            COMMENT "nvcc ${module}"
            VERBATIM)
    endif()
    set(image ${image_dir}/${module}.c)
    file(GENERATE OUTPUT ${image} CONTENT
"__asm__(\".section .rodata\\n\"
        \".balign 64\\n\"
        \".globl heddle__image_${module}\\n\"
        \".hidden heddle__image_${module}\\n\"
        \"heddle__image_${module}:\\n\"
        \".incbin \\\"${fatbin}\\\"\\n\"
        \".previous\\n\");
extern const unsigned char heddle__image_${module}[];
")
    set_source_files_properties(${image} PROPERTIES OBJECT_DEPENDS ${fatbin})
    list(APPEND image_sources ${image})
endforeach()
if(kernels)
    message(FATAL_ERROR "no module of modules.def for ${kernels}")
endif()
if(HEDDLE_CLOCKS AND NOT has_clocks)
    message(FATAL_ERROR "HEDDLE_CLOCKS: modules.def has no attention_sm90_fwd_bf16, whose kernels would note clocks")
endif()
# Of modules that are no more: the budget would count them.
if(old_reports)
    file(REMOVE ${old_reports})
endif()

# The images are objects of their own, so that nothing else waits for nvcc.
add_library(heddle_images OBJECT ${image_sources})
heddle_compile(heddle_images)
set_target_properties(heddle_images PROPERTIES POSITION_INDEPENDENT_CODE ON C_VISIBILITY_PRESET hidden)
target_sources(heddle_objects PRIVATE ${cuda_host_sources})
target_compile_definitions(heddle_objects PRIVATE HEDDLE_HAVE_CUDA=1)
foreach(target heddle heddle_static)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:heddle_images>)
    target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
endforeach()

# SPDX-License-Identifier: Apache-2.0
# The CUDA backend: each row of src/cuda/modules.def becomes a fatbin that lies in the library. No cudart, nothing of CUDA is
# linked: where there is no nvcc the backend is left out, where there is no driver the library still loads.

set(HEDDLE_HAVE_CUDA OFF)
set(HEDDLE_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO (when nvcc is found), ON, OFF")
set_property(CACHE HEDDLE_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT HEDDLE_CUDA)
    return()
endif()

find_program(HEDDLE_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT HEDDLE_NVCC OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
    if(HEDDLE_CUDA STREQUAL "AUTO")
        message(STATUS "heddle: no nvcc, the CUDA backend is left out")
        return()
    endif()
    message(FATAL_ERROR "HEDDLE_CUDA is ON, but nvcc was not found (or this is no Linux with gcc or clang): set HEDDLE_NVCC")
endif()

# A module whose name ends in _<family> is built for the lines of archs.def that begin with that family; where there are none, for
# those that begin with no family.
file(STRINGS ${PROJECT_SOURCE_DIR}/src/cuda/archs.def archs REGEX "^[a-z0-9 ]*arch=")
foreach(arch IN LISTS archs)
    string(REGEX MATCH "^([a-z0-9]+ )?arch=" family "${arch}")
    string(STRIP "${CMAKE_MATCH_1}" family)
    string(REGEX REPLACE "^.*arch=" "arch=" arch "${arch}")
    list(APPEND gencode_${family} -gencode ${arch})
endforeach()

execute_process(COMMAND ${HEDDLE_NVCC} --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
string(REGEX MATCH "release ([0-9.]+)" nvcc_version "${nvcc_version}")
set(HEDDLE_NVCC_VERSION "${CMAKE_MATCH_1}")
message(STATUS "heddle: CUDA backend by nvcc ${HEDDLE_NVCC_VERSION}")

# A fifth of the size, from CUDA 12.8 on.
execute_process(COMMAND ${HEDDLE_NVCC} --help OUTPUT_VARIABLE nvcc_help ERROR_QUIET)
set(compress "")
if(nvcc_help MATCHES "--compress-mode")
    set(compress --compress-mode=size)
endif()

file(GLOB_RECURSE cuda_host_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.c)
file(STRINGS ${PROJECT_SOURCE_DIR}/src/cuda/modules.def modules REGEX "^M\\(")
list(TRANSFORM modules REPLACE "^M\\(([^,]+), (.*)\\)$" "\\1=\\2")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/src/cuda/archs.def ${PROJECT_SOURCE_DIR}/src/cuda/modules.def)

set(HEDDLE_HAVE_CUDA ON)

# The compiler's resource report goes to <module>.ptxas, for src/cuda/budget.txt.
set(image_dir ${PROJECT_BINARY_DIR}/cuda)
file(MAKE_DIRECTORY ${image_dir})
set(image_sources "")
foreach(row IN LISTS modules)
    string(REGEX MATCH "^(.*)=(.*)$" row ${row})
    set(module ${CMAKE_MATCH_1})
    set(source ${PROJECT_SOURCE_DIR}/src/cuda/${CMAKE_MATCH_2}.cu)
    set(fatbin ${image_dir}/${module}.fatbin)
    string(REGEX REPLACE "^.*_" "" family ${module})
    set(gencode ${gencode_${family}})
    if(NOT gencode)
        set(gencode ${gencode_})
    endif()
    add_custom_command(
        OUTPUT ${fatbin}
        COMMAND ${CMAKE_COMMAND} -DNVCC=${HEDDLE_NVCC} "-DGENCODE=${gencode}" -DCOMPRESS=${compress} -DSOURCE=${source} -DOUTPUT=${fatbin}
            -DROOT=${PROJECT_SOURCE_DIR} -DREPORT=${image_dir}/${module}.ptxas
            -P ${PROJECT_SOURCE_DIR}/cmake/HeddleFatbin.cmake
        DEPENDS ${source} ${PROJECT_SOURCE_DIR}/cmake/HeddleFatbin.cmake ${PROJECT_SOURCE_DIR}/src/cuda/archs.def
        DEPFILE ${fatbin}.d
        COMMENT "nvcc ${module}"
        VERBATIM)
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

target_sources(heddle_objects PRIVATE ${cuda_host_sources} ${image_sources})
target_compile_definitions(heddle_objects PRIVATE HEDDLE_HAVE_CUDA=1)
foreach(target heddle heddle_static)
    target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
endforeach()

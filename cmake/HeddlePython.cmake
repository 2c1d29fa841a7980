# SPDX-License-Identifier: Apache-2.0
# What the Python package needs: heddle._C (limited API, so one binary for every Python from 3.10 on), the operators for
# PyTorch (no headers and no library of PyTorch), and libheddle beside them. Used by `pip install .` (pyproject.toml).

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

set(package heddle) # in the wheel
# build/python is the package as it will be installed, to run from the build tree (PYTHONPATH=build/python).
set(binaries ${PROJECT_BINARY_DIR}/python)
file(GLOB_RECURSE python_sources CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/python
    ${PROJECT_SOURCE_DIR}/python/heddle/*.py ${PROJECT_SOURCE_DIR}/python/heddle/*.pyi
    ${PROJECT_SOURCE_DIR}/python/heddle/py.typed)
foreach(source IN LISTS python_sources)
    get_filename_component(directory ${binaries}/${source} DIRECTORY)
    file(MAKE_DIRECTORY ${directory})
    # Relative, so that a tree with its build folder can be moved to another machine.
    file(RELATIVE_PATH target ${directory} ${PROJECT_SOURCE_DIR}/python/${source})
    file(CREATE_LINK ${target} ${binaries}/${source} SYMBOLIC)
endforeach()

function(heddle_python_module target)
    heddle_compile(${target})
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/python/src)
    target_link_libraries(${target} PRIVATE heddle)
    set_target_properties(${target} PROPERTIES
        PREFIX ""
        C_VISIBILITY_PRESET hidden
        LIBRARY_OUTPUT_DIRECTORY ${binaries}/${package}
        INSTALL_RPATH "$ORIGIN"
        BUILD_RPATH "$ORIGIN/../.."
        BUILD_RPATH_USE_ORIGIN ON)
    install(TARGETS ${target} LIBRARY DESTINATION ${package} COMPONENT python EXCLUDE_FROM_ALL)
endfunction()

add_library(heddle_python MODULE ${PROJECT_SOURCE_DIR}/python/src/module.c ${PROJECT_SOURCE_DIR}/python/src/cuda_memory.c
    ${PROJECT_SOURCE_DIR}/python/src/shortcut.c ${PROJECT_SOURCE_DIR}/python/src/proof.c ${PROJECT_SOURCE_DIR}/python/src/jax_call.c)
target_include_directories(heddle_python SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
heddle_python_module(heddle_python)
target_link_libraries(heddle_python PRIVATE ${CMAKE_DL_LIBS})
# CPython's own table of methods has function pointers of other types.
target_compile_options(heddle_python PRIVATE -Wno-pedantic)
set_target_properties(heddle_python PROPERTIES OUTPUT_NAME _C SUFFIX .abi3.so)

# A library of libtorch_cpu.so's name with nothing in it: the operators ask for that name, and get the one that
# `import torch` has loaded.
add_library(heddle_torch_stub SHARED ${PROJECT_SOURCE_DIR}/python/src/torch_stub.c)
set_target_properties(heddle_torch_stub PROPERTIES
    OUTPUT_NAME torch_cpu
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/torch-stub)

file(GLOB torch_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/src/torch_*.c)
list(FILTER torch_sources EXCLUDE REGEX "/torch_stub\\.c$")
add_library(heddle_torch MODULE ${torch_sources})
heddle_python_module(heddle_torch)
target_link_libraries(heddle_torch PRIVATE ${openmp} ${CMAKE_DL_LIBS})
# torch raises by a C++ exception that passes through our frames.
target_compile_options(heddle_torch PRIVATE -fexceptions)
target_link_options(heddle_torch PRIVATE -Wl,--no-as-needed -L${PROJECT_BINARY_DIR}/torch-stub -ltorch_cpu -Wl,--as-needed)
add_dependencies(heddle_torch heddle_torch_stub)
set_target_properties(heddle_torch PROPERTIES OUTPUT_NAME _torch_ops)

# Under its soname alone: a wheel knows no symbolic links, and two copies would be two libraries.
install(FILES $<TARGET_FILE:heddle> DESTINATION ${package} RENAME $<TARGET_SONAME_FILE_NAME:heddle> COMPONENT python EXCLUDE_FROM_ALL)

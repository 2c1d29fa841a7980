# SPDX-License-Identifier: Apache-2.0
# What the Python package needs: heddle._C (limited API, so one binary for every Python from 3.10 on), the operators for
# PyTorch (no headers and no library of PyTorch), and libheddle beside them. Used by `pip install .` (pyproject.toml).

# Cross-compiled for Windows or macOS the headers are this machine's, whose limited API is the same everywhere.
set(foreign OFF)
if(CMAKE_CROSSCOMPILING AND (WIN32 OR APPLE))
    set(foreign ON)
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('include'))"
        OUTPUT_VARIABLE Python_INCLUDE_DIRS OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
else()
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
endif()
if(foreign AND WIN32) # but for what they say of the machine
    file(COPY ${Python_INCLUDE_DIRS}/ DESTINATION ${PROJECT_BINARY_DIR}/python-headers)
    configure_file(${PROJECT_SOURCE_DIR}/python/src/windows_pyconfig.h ${PROJECT_BINARY_DIR}/python-headers/pyconfig.h COPYONLY)
    set(Python_INCLUDE_DIRS ${PROJECT_BINARY_DIR}/python-headers)
endif()

# An import library of a DLL by the names in a .def file: neither Python nor PyTorch for Windows is needed to link.
function(heddle_import_library target name)
    set(library ${PROJECT_BINARY_DIR}/lib${name}.dll.a)
    set(names ${PROJECT_SOURCE_DIR}/python/src/${name}.def)
    add_custom_command(OUTPUT ${library} DEPENDS ${names}
        COMMAND ${CMAKE_DLLTOOL} -d ${names} -l ${library} VERBATIM)
    add_custom_target(heddle_import_${name} DEPENDS ${library})
    add_dependencies(${target} heddle_import_${name})
    target_link_libraries(${target} PRIVATE ${library})
endfunction()

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

set(beside "$ORIGIN")
set(above "$ORIGIN/../..")
if(APPLE)
    set(beside "@loader_path;@loader_path/../torch/lib")
    set(above "@loader_path/../..;@loader_path/../torch/lib")
    set_target_properties(heddle PROPERTIES BUILD_WITH_INSTALL_NAME_DIR ON INSTALL_NAME_DIR @rpath)
    if(foreign) # zig's linker makes no bundles, and Python takes a library as well; CMake knows this machine's flags alone
        set(CMAKE_SHARED_MODULE_CREATE_C_FLAGS -shared)
        set(CMAKE_SHARED_LIBRARY_RUNTIME_C_FLAG "-Wl,-rpath,")
    endif()
endif()

function(heddle_python_module target)
    heddle_compile(${target})
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/python/src)
    target_link_libraries(${target} PRIVATE heddle)
    set_target_properties(${target} PROPERTIES
        PREFIX ""
        C_VISIBILITY_PRESET hidden
        LIBRARY_OUTPUT_DIRECTORY ${binaries}/${package}
        INSTALL_RPATH "${beside}"
        BUILD_RPATH "${above}"
        BUILD_RPATH_USE_ORIGIN ON)
    install(TARGETS ${target} LIBRARY DESTINATION ${package} COMPONENT python EXCLUDE_FROM_ALL)
endfunction()

add_library(heddle_python MODULE ${PROJECT_SOURCE_DIR}/python/src/module.c ${PROJECT_SOURCE_DIR}/python/src/cuda_memory.c
    ${PROJECT_SOURCE_DIR}/python/src/shortcut.c ${PROJECT_SOURCE_DIR}/python/src/proof.c ${PROJECT_SOURCE_DIR}/python/src/recall.c ${PROJECT_SOURCE_DIR}/python/src/jax_call.c
    ${PROJECT_SOURCE_DIR}/python/src/system.c)
target_include_directories(heddle_python SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
heddle_python_module(heddle_python)
target_link_libraries(heddle_python PRIVATE ${CMAKE_DL_LIBS})
# CPython's own table of methods has function pointers of other types.
target_compile_options(heddle_python PRIVATE -Wno-pedantic)
set_target_properties(heddle_python PROPERTIES OUTPUT_NAME _C SUFFIX .abi3.so)
if(WIN32)
    set_target_properties(heddle_python PROPERTIES SUFFIX .pyd)
    heddle_import_library(heddle_python python3)
elseif(APPLE) # the program that loads it has Python's symbols
    target_link_options(heddle_python PRIVATE -Wl,-undefined,dynamic_lookup)
endif()

file(GLOB torch_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/src/torch_*.c)
list(FILTER torch_sources EXCLUDE REGEX "/torch_stub\\.c$")
add_library(heddle_torch MODULE ${torch_sources} ${PROJECT_SOURCE_DIR}/python/src/system.c)
heddle_python_module(heddle_torch)
target_link_libraries(heddle_torch PRIVATE ${openmp} ${CMAKE_DL_LIBS})
# torch raises by a C++ exception that passes through our frames.
target_compile_options(heddle_torch PRIVATE -fexceptions)
set_target_properties(heddle_torch PROPERTIES OUTPUT_NAME _torch_ops SUFFIX .so) # by one name on every system
if(WIN32)
    heddle_import_library(heddle_torch torch_cpu)
else()
    # A library of libtorch_cpu.so's name with nothing in it: the operators ask for that name, and get the one that
    # `import torch` has loaded. macOS wants to know at link time which library has a symbol, so there it has their names.
    set(stub ${PROJECT_SOURCE_DIR}/python/src/torch_stub.c)
    if(APPLE)
        file(STRINGS ${PROJECT_SOURCE_DIR}/python/src/torch_cpu.def names REGEX "^ ")
        set(text "")
        foreach(name IN LISTS names ITEMS torch_delete_stable_ivalue torch_exception_get_what_without_backtrace
            _ZN2at13globalContextEv _ZNK2at7Context23deterministicAlgorithmsEv)
            string(STRIP ${name} name)
            string(APPEND text "int ${name}(void);\nint ${name}(void) {\n    return 0;\n}\n")
        endforeach()
        set(stub ${PROJECT_BINARY_DIR}/torch_stub.c)
        file(CONFIGURE OUTPUT ${stub} CONTENT "${text}")
    endif()
    add_library(heddle_torch_stub SHARED ${stub})
    set_target_properties(heddle_torch_stub PROPERTIES
        OUTPUT_NAME torch_cpu
        LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/torch-stub
        BUILD_WITH_INSTALL_NAME_DIR ON
        INSTALL_NAME_DIR @rpath) # on macOS @rpath/libtorch_cpu.dylib, as torch's own
    add_dependencies(heddle_torch heddle_torch_stub)
    if(APPLE) # operator delete is in C++'s library, which torch has
        target_link_options(heddle_torch PRIVATE -L${PROJECT_BINARY_DIR}/torch-stub -ltorch_cpu -Wl,-undefined,dynamic_lookup)
    else()
        target_link_options(heddle_torch PRIVATE -Wl,--no-as-needed -L${PROJECT_BINARY_DIR}/torch-stub -ltorch_cpu -Wl,--as-needed)
    endif()
endif()

# Under its soname alone: a wheel knows no symbolic links, and two copies would be two libraries.
if(WIN32)
    set(name $<TARGET_FILE_NAME:heddle>)
else()
    set(name $<TARGET_SONAME_FILE_NAME:heddle>)
endif()
install(FILES $<TARGET_FILE:heddle> DESTINATION ${package} RENAME ${name} COMPONENT python EXCLUDE_FROM_ALL)

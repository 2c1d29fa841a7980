# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/heddle)

install(TARGETS heddle heddle_static EXPORT heddleTargets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/heddle.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET heddle_command)
    install(TARGETS heddle_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    if(TARGET train_gpt)
        # `heddle demo` looks here for the program, and for the text that it learns.
        heddle_rpath(train_gpt ${demo_program_dir})
        install(TARGETS train_gpt RUNTIME DESTINATION ${demo_program_dir})
        install(DIRECTORY src include tools examples docs DESTINATION ${demo_text_dir}
            FILES_MATCHING REGEX "\\.(c|h|cu|cuh|def|md)$")
    endif()
endif()

install(EXPORT heddleTargets NAMESPACE heddle:: DESTINATION ${config_dir})
configure_package_config_file(cmake/heddleConfig.cmake.in ${PROJECT_BINARY_DIR}/heddleConfig.cmake
    INSTALL_DESTINATION ${config_dir})
# Before 1.0 a minor version may break what was there.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/heddleConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/heddleConfig.cmake ${PROJECT_BINARY_DIR}/heddleConfigVersion.cmake
    DESTINATION ${config_dir})

# The prefix is where the .pc file lies, so that `cmake --install --prefix` and moved trees stay right.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
    set(pc_prefix ${CMAKE_INSTALL_PREFIX})
    set(pc_libdir ${CMAKE_INSTALL_FULL_LIBDIR})
    set(pc_includedir ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
    file(RELATIVE_PATH up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
    string(REGEX REPLACE "/$" "" up "${up}")
    set(pc_prefix "\${pcfiledir}/${up}")
    set(pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
    set(pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
set(pc_libs_private "-lm")
if(HEDDLE_OPENMP)
    string(APPEND pc_libs_private " ${OpenMP_C_FLAGS}")
endif()
configure_file(cmake/heddle.pc.in ${PROJECT_BINARY_DIR}/heddle.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/heddle.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# SPDX-License-Identifier: Apache-2.0
# The lines of the kernels' tables: M(...) of each module in `modules`, K(...) of each kernel in `kernels`, from the files `kernel_tables`.

set(cuda_dir ${PROJECT_SOURCE_DIR}/src/cuda)
set(kernel_tables ${cuda_dir}/attention/attention.def ${cuda_dir}/norm_linear/norm_linear.def)
file(STRINGS ${cuda_dir}/modules.def modules REGEX "^M\\(")
set(kernels "")
foreach(table IN LISTS kernel_tables)
    file(STRINGS ${table} rows REGEX "^[KH]\\(")
    foreach(row IN LISTS rows)
        if(row MATCHES "^H\\(([a-z0-9_]+), (.*)\\)$") # of both 16-bit types
            list(APPEND kernels "K(${CMAKE_MATCH_1}, bf16, ${CMAKE_MATCH_2}_bf16)" "K(${CMAKE_MATCH_1}, f16, ${CMAKE_MATCH_2}_f16)")
        else()
            list(APPEND kernels "${row}")
        endif()
    endforeach()
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${cuda_dir}/modules.def ${kernel_tables})

# SPDX-License-Identifier: Apache-2.0
# cmake -P: SOURCE to the fatbin OUTPUT, with dependencies in OUTPUT.d and the report of ptxas in REPORT.
execute_process(
    COMMAND ${NVCC} --fatbin -O3 -std=c++17 ${COMPRESS} ${GENCODE} -I ${ROOT}/include -I ${ROOT}/src -Xptxas -v -MD -MF ${OUTPUT}.d
        -o ${OUTPUT} ${SOURCE}
    RESULT_VARIABLE failed
    ERROR_VARIABLE report
    OUTPUT_VARIABLE output)
file(WRITE ${REPORT} "${report}")
string(REGEX MATCHALL "[^\n]*(error|warning)[^\n]*" complaints "${output}${report}")
foreach(complaint IN LISTS complaints)
    message(NOTICE "${complaint}")
endforeach()
if(failed)
    file(REMOVE ${OUTPUT})
    message(FATAL_ERROR "nvcc failed on ${SOURCE}:\n${output}${report}")
endif()

/* SPDX-License-Identifier: Apache-2.0
 * Calls of libcuda by name: CALL("cuEventRecord", (void *, void *), (event, stream)) returns 0 from the function that it
 * stands in when the call fails, with the reason in device_memory_error(). */
#ifndef HEDDLE_TOOLS_DRIVER_CALL_H
#define HEDDLE_TOOLS_DRIVER_CALL_H

#include "device_memory.h"

#include <string.h>

void device_memory_failed(const char *symbol, bool found, int status);
/* Makes device 0's context current where there is none. */
bool device_memory_enter(void);

/* memcpy: C has no conversion from an object pointer to a function pointer. */
#define CALL(symbol, parameters, arguments)                                                                            \
    do {                                                                                                               \
        int(*function) parameters = NULL;                                                                              \
        void *found = device_memory_driver(symbol);                                                                    \
        int status = -1;                                                                                               \
        memcpy(&function, &found, sizeof found);                                                                       \
        if (function)                                                                                                  \
            status = function arguments;                                                                               \
        if (status) {                                                                                                  \
            device_memory_failed(symbol, function, status);                                                            \
            return 0;                                                                                                  \
        }                                                                                                              \
    } while (0)

#endif

/* SPDX-License-Identifier: Apache-2.0
 * A call of the driver that has to succeed: DRIVER("cuLaunchKernel", (parameter types), (arguments)). */
#ifndef HEDDLE_TESTS_GPU_DRIVER_H
#define HEDDLE_TESTS_GPU_DRIVER_H

#include "../../tools/device_memory.h"
#include "common.h"

#include <string.h>

/* memcpy: C has no conversion from an object pointer to a function pointer. */
#define DRIVER(symbol, parameters, arguments)                                                                          \
    do {                                                                                                               \
        int(*function_) parameters = NULL;                                                                             \
        void *found_ = device_memory_driver(symbol);                                                                   \
        assert_non_null(found_);                                                                                       \
        memcpy(&function_, &found_, sizeof found_);                                                                    \
        assert_int_equal(function_ arguments, 0);                                                                      \
    } while (0)

/* As cuLaunchKernel has them: function, grid, block, shared bytes, stream, parameters, extra. */
#define DRIVER_LAUNCH(...)                                                                                             \
    DRIVER("cuLaunchKernel",                                                                                           \
           (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **),   \
           (__VA_ARGS__))

#endif

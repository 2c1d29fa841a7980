/* SPDX-License-Identifier: Apache-2.0
 * What the tests of norm-linear share: a problem of a size, in both norms and three types, and which kernels are to take it. */
#ifndef HEDDLE_TESTS_NORM_LINEAR_CASES_H
#define HEDDLE_TESTS_NORM_LINEAR_CASES_H

#include "common.h"

#include <stdlib.h>
#include <string.h>

static inline void check_all(norm_linear_case c) {
    for (int norm = 0; norm < 2; norm++)
        for (size_t x = 0; x < TEST_DTYPES; x++) {
            c.a.norm = (heddle_norm)norm;
            c.a.dtype = test_dtypes[x];
            c.seed = c.seed * 3 + x + 1;
            check_norm_linear(&c);
        }
}

static inline norm_linear_case make_case(int64_t m, int64_t k, int64_t n) {
    return (norm_linear_case){.a = norm_linear_desc(HEDDLE_F32, HEDDLE_LAYER_NORM, m, k, n),
                              .seed = (uint64_t)(m * 5 + k + n)};
}

/* Are small problems, too, to go to the kernels for large ones? */
static inline bool tensor_cores_alone(void) {
    const char *wanted = getenv("HEDDLE_CUDA_FAMILY");
    return test_device() == HEDDLE_CUDA && wanted && (!strcmp(wanted, "sm80") || !strcmp(wanted, "sm90"));
}

#endif

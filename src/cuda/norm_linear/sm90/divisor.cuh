/* SPDX-License-Identifier: Apache-2.0
 * Division by what the host knows: three instructions, where code is to be short. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_DIVISOR_CUH
#define HEDDLE_CUDA_NORM_LINEAR_DIVISOR_CUH

#include "cuda/element.cuh"
#include "cuda/norm_linear/params.h"

INLINE uint32_t quotient(uint32_t x, const divisor &d) {
    return (__umulhi(x, d.factor) + x) >> d.shift;
}

#endif

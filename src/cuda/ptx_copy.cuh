/* SPDX-License-Identifier: Apache-2.0
 * ptx.cuh's copy of 16 bytes, by way of the L1 cache: for threads that copy every other 16 bytes. */
#ifndef HEDDLE_CUDA_PTX_COPY_CUH
#define HEDDLE_CUDA_PTX_COPY_CUH

#include "ptx.cuh"

PTX void cp_async16_cached(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

#endif

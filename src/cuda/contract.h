/* SPDX-License-Identifier: Apache-2.0
 * For the headers that the host side and the kernels have in common: what is counted there is counted nowhere else. C and CUDA C. */
#ifndef HEDDLE_CUDA_CONTRACT_H
#define HEDDLE_CUDA_CONTRACT_H

#include <stdint.h>

/* A function of integers that both sides call, and that a static_assert of a kernel can hold its layout to. */
#ifdef __CUDACC__
#define CONTRACT static constexpr __host__ __device__ __forceinline__
#else
#define CONTRACT static inline
#endif

#endif

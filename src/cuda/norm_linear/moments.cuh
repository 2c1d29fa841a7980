/* SPDX-License-Identifier: Apache-2.0
 * From the sums over a row to its deviation. */
#ifndef HEDDLE_CUDA_MOMENTS_CUH
#define HEDDLE_CUDA_MOMENTS_CUH

#include <math_constants.h>

#include "cuda/element.cuh"

/* 1/sqrt(squares/n - residual² + eps), rounded once: what each step loses, the approximations of 1/n and of the root, too, goes into a
 * last correction. With few columns these roundings would be most of rstd's error. */
static __device__ __forceinline__ float inverse_deviation(float squares, float n, float inverse, float residual,
                                                          float eps) {
    const float mean = squares * inverse, variance = fmaxf(fmaf(-residual, residual, mean), 0), v = variance + eps;
    const float part = v - variance, lost = fmaf(-mean, n, squares) * inverse +
                                            fmaf(-residual, residual, mean - variance) + (variance - (v - part)) +
                                            (eps - part);
    const float r = rsqrtf(v), h = v * r;
    if (!(r > 0 && r < CUDART_INF_F))
        return r;
    return fmaf(0.5f * r, fmaf(-h, r, 1) - fmaf(v, r, -h) * r - lost * r * r, r);
}

/* The mean for the caller, of a row of T. Of 16-bit numbers it is rounded once as it is, and what the differences from it sum up to is
 * their own rounding. */
template <typename T> static __device__ __forceinline__ float saved_mean(float mean, float residual) {
    return sizeof(T) == 2 ? mean : mean + residual;
}

#endif

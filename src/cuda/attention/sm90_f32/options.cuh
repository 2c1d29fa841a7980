/* SPDX-License-Identifier: Apache-2.0
 * What the full float32 kernels for Hopper have beside the scores that all share. */
#ifndef HEDDLE_CUDA_ATTENTION_SM90_F32_OPTIONS_CUH
#define HEDDLE_CUDA_ATTENTION_SM90_F32_OPTIONS_CUH

#include "cuda/attention/scores.cuh"
#include "cuda/attention/sm90/sm90.cuh"

/* The bias of a tile on its way to the second-level cache, by a warpgroup: queries i0 .., keys j0 .., as far as they are there. */
INLINE void prefetch_bias(const attention_params &p, const place &c, int64_t x, int i0, int j0) {
    const int thread = (int)threadIdx.x % WARPGROUP, i = i0 + thread / 2, j = j0 + thread % 2 * 32;
    if ((p.a.features & HEDDLE_BIAS) && i < c.sq && j < c.sk)
        prefetch_global((const float *)p.t.bias + row_at(p.a.bias_stride, c.n, x, i) + j);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * A piece of a row of a bias's gradient, from who has made dS, where that is a sum over nothing. */
#ifndef HEDDLE_CUDA_ATTENTION_GIVE_CUH
#define HEDDLE_CUDA_ATTENTION_GIVE_CUH

#include "cuda/attention/common.cuh"

/* Eight keys of a row, of which `left` are there. */
template <typename T> INLINE void give_chunk(T *to, int left, uint4 x) {
    if (left >= 8) {
        *(uint4 *)to = x;
        return;
    }
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 7; e++)
        if (e < left)
            ((uint16_t *)to)[e] = (uint16_t)(words[e / 2] >> e % 2 * 16);
}

#endif

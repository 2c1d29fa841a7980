/* SPDX-License-Identifier: Apache-2.0
 * What the full float32 kernels for Hopper have beside the scores that all share. */
#ifndef HEDDLE_CUDA_ATTENTION_SM90_F32_OPTIONS_CUH
#define HEDDLE_CUDA_ATTENTION_SM90_F32_OPTIONS_CUH

#include "cuda/attention/mask.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/sm90/sm90.cuh"

/* The bias of a tile on its way to the second-level cache, by a warpgroup: queries i0 .., keys j0 .., as far as they are there. */
INLINE void prefetch_bias(const attention_params &p, const place &c, int64_t x, int i0, int j0) {
    const int thread = (int)threadIdx.x % WARPGROUP, i = i0 + thread / 2, j = j0 + thread % 2 * 32;
    if ((p.a.features & HEDDLE_BIAS) && i < c.sq && j < c.sk)
        prefetch_global((const float *)p.t.bias + row_at(p.a.bias_stride, c.n, x, i) + j);
}

/* ------------------------------------------------------------------------------------------------------------ steps
 * What who fetches tells the others of a tile of 64 rows that streams by: its number, above the tile_kind for each of up to three sets of 64
 * of the block's own rows; is it the last? Tiles that no set sees do not come, but for one where there would be none. */
enum { STEP_LAST = 1, STEP_KIND = 1, STEP_SEEN = 0x7e, STEP_TILE = 8 };

INLINE uint32_t with_kind(uint32_t step, int set, int kind) {
    return step | (uint32_t)kind << (STEP_KIND + 2 * set);
}
INLINE int kind_in(uint32_t step, int set) {
    return (int)(step >> (STEP_KIND + 2 * set) & 3);
}
INLINE int tile_in(uint32_t step) {
    return (int)(step >> STEP_TILE);
}

#endif

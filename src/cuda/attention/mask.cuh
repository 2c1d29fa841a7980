/* SPDX-License-Identifier: Apache-2.0
 * What kernels read of a boolean mask's map (mask.cu). */
#ifndef HEDDLE_CUDA_ATTENTION_MASK_CUH
#define HEDDLE_CUDA_ATTENTION_MASK_CUH

#include "cuda/attention/common.cuh"

INLINE int64_t map_of(const mask_map &m, int64_t n, int64_t x) {
    return n * m.of_b + x * m.of_h;
}

/* The kinds of the tiles of a row of tiles; NULL: there is no mask. */
INLINE const uint8_t *find_kinds(const mask_map &m, int64_t n, int64_t x, int tile) {
    return m.kinds ? m.kinds + (map_of(m, n, x) * m.tiles_down + (m.tiles_down > 1 ? tile : 0)) * m.tiles_across : NULL;
}

INLINE const uint32_t *find_bits(const mask_map &m, int64_t n, int64_t x) {
    return m.bits + map_of(m, n, x) * m.lines * m.words;
}

/* Bits of N columns. */
template <int N> INLINE void load_bits(const uint32_t *from, uint32_t *bits) {
    if (N == 128) {
        const uint4 x = *(const uint4 *)from;
        bits[0] = x.x;
        bits[1] = x.y;
        bits[2 % (N / 32)] = x.z;
        bits[3 % (N / 32)] = x.w;
    } else {
        const uint2 x = *(const uint2 *)from;
        bits[0] = x.x;
        bits[1] = x.y;
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * What hides a key by its element: of a boolean mask, by its bytes or, where segments and lists of blocks have been made a map, by that;
 * of a bias, by its number. */
#ifndef HEDDLE_CUDA_ATTENTION_SHOWN_CUH
#define HEDDLE_CUDA_ATTENTION_SHOWN_CUH

#include "cuda/attention/dropout.cuh"

#include "mask.h"

/* Where what it has of query i begins: the bytes, or which map. */
INLINE int64_t mask_row(const attention_params &p, int64_t n, int64_t x, int i) {
    const mask_map &m = p.seen_by_queries.kinds ? p.seen_by_queries : p.seen_of_keys;
    const heddle_strides &s = p.a.bool_mask_stride;
    return p.t.bool_mask ? n * s.b + x * s.h + i * s.s : n * m.of_b + x * m.of_h;
}

/* Does it show key j to query i? */
INLINE bool mask_shows(const attention_params &p, int64_t row, int i, int j) {
    if (p.t.bool_mask)
        return p.t.bool_mask[row + j] != 0;
    const bool keys = !p.seen_by_queries.kinds;
    const mask_map &m = keys ? p.seen_of_keys : p.seen_by_queries;
    const int line = keys ? j : i, column = keys ? i : j;
    const int kind = m.kinds[(row * m.tiles_down + line / m.rows) * m.tiles_across + column / m.columns];
    if (kind != TILE_PARTIAL)
        return kind == TILE_FULL;
    return m.bits[(row * m.lines + line) * m.words + column / 32] >> column % 32 & 1;
}

/* A bias as it is added where something else hides the score beside -inf, of which +inf would make a NaN. */
INLINE float counted_bias(float bias) {
    return max_or_nan(bias, (float)LEAST_BIAS);
}

#endif

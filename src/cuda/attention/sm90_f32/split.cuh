/* SPDX-License-Identifier: Apache-2.0
 * float32 tensors as the kernels for Hopper take them: x·2^exponent = high + low, both float16, in tiles of 64 rows.
 *
 * A tile is D/64 strips of 64 columns, one behind the other: in a strip 64 rows of the high part, then 64 rows of the low part,
 * 128 bytes a row, swizzled as the tensor cores want it: a tile of 128 rows of attention/sm90/sm90.cuh. It is copied as it lies. Each tile
 * has an exponent of its own, so that its largest number is in [2^14, 2^15). What is not finite is held as 0, and the row is marked:
 * who sees it gets NaN. Rows that nobody sees are 0, and so are rows and columns that are not there. */
#ifndef HEDDLE_CUDA_ATTENTION_SPLIT_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_SPLIT_SM90_CUH

#include "cuda/attention/common.cuh"
#include "cuda/attention/sm90_f32/contract.h"

/* Where tile t of a sequence's head is among the tiles of a tensor of queries (Q, dO) or of keys (K, V). Packed sequences begin
 * a tile of their own. */
INLINE int64_t split_tile(const attention_params &p, const place &c, bool keys, int64_t head, int t) {
    const int64_t heads = keys ? p.a.hk : p.a.h, tiles = keys ? p.split_tiles_k : p.split_tiles_q;
    if (p.a.features & HEDDLE_VARLEN)
        return head * tiles + packed_tiles64(keys ? c.first_k : c.first_q, c.n) + t;
    return (c.n * heads + head) * tiles + t;
}

/* Rows that some query sees, or that see some key: begin .. end-1 of the sequence. */
INLINE void split_range(const place &c, bool keys, int *begin, int *end) {
    *begin = keys ? max(0, c.lo) : max(0, -c.hi);
    *end = keys ? (c.sq ? min(c.sk, c.sq + c.hi) : 0) : (c.sk ? min(c.sq, c.sk - c.lo) : 0);
}

/* ---------------------------------------------------------------------------------------------------- splitting */

/* Eight numbers of a row from column e on; 0 where there is none. */
INLINE void load_chunk(const float *row, int e, int columns, bool vectors, bool there, float x[8]) {
    if (vectors) {
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
            const float4 r = there && e + half < columns ? *(const float4 *)(row + e + half) : make_float4(0, 0, 0, 0);
            x[half] = r.x;
            x[half + 1] = r.y;
            x[half + 2] = r.z;
            x[half + 3] = r.w;
        }
        return;
    }
#pragma unroll
    for (int y = 0; y < 8; y++)
        x[y] = there && e + y < columns ? row[e + y] : 0.0f;
}

/* The largest magnitude, as bits; what is not finite becomes 0. True if there was any. */
INLINE bool clean_chunk(float x[8], uint32_t *most) {
    bool bad = false;
#pragma unroll
    for (int y = 0; y < 8; y++) {
        const uint32_t bits = __float_as_uint(x[y]) & 0x7fffffff;
        const bool finite = bits < 0x7f800000;
        x[y] = finite ? x[y] : 0.0f;
        *most = max(*most, finite ? bits : 0u);
        bad |= !finite;
    }
    return bad;
}

/* The e with most·2^e in [2^14, 2^15), but at most 100: what is smaller than 2^-86 loses bits, and no factor overflows. */
INLINE int split_exponent(uint32_t most) {
    return min(14 + 127 - (int)(most >> 23), 100);
}

/* high + low = x·by, stored 64 rows apart; the sum of squares. */
INLINE float store_chunk(char *at, const float x[8], float by) {
    uint32_t high[4], low[4];
    float sum = 0.0f;
#pragma unroll
    for (int y = 0; y < 4; y++) {
        const float a = x[2 * y] * by, b = x[2 * y + 1] * by;
        sum = fmaf(a, a, fmaf(b, b, sum));
        split_pair(a, b, &high[y], &low[y]);
    }
    *(uint4 *)at = make_uint4(high[0], high[1], high[2], high[3]);
    *(uint4 *)(at + SPLIT_ROWS * 128) = make_uint4(low[0], low[1], low[2], low[3]);
    return sum;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * float32 tensors as the kernels for Hopper take them: x·2^exponent = high + low, both float16, in tiles of 64 rows.
 *
 * A tile is D/64 strips of 64 columns, one behind the other: in a strip 64 rows of the high part, then 64 rows of the low part,
 * 128 bytes a row, swizzled as the tensor cores want it: a tile of 128 rows of attention_sm90.cuh. It is copied as it lies. Each tile
 * has an exponent of its own, so that its largest number is in [2^14, 2^15). What is not finite is held as 0, and the row is marked:
 * who sees it gets NaN. Rows that nobody sees are 0, and so are rows and columns that are not there. */
#ifndef HEDDLE_CUDA_ATTENTION_SPLIT_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_SPLIT_SM90_CUH

#include "attention_common.cuh"

#define SPLIT_ROWS 64 /* of a tile */

/* 2^e, |e| <= 126. */
INLINE float power_of_two(int e) {
    return __int_as_float((127 + e) << 23);
}

/* Where tile t of a sequence's head is among the tiles of a tensor of queries (Q, dO) or of keys (K, V). Packed sequences begin
 * a tile of their own: first/64 + n tiles are enough for those before. */
INLINE int64_t split_tile(const attention_params &p, const place &c, bool keys, int64_t head, int t) {
    const int64_t heads = keys ? p.a.hk : p.a.h, tiles = keys ? p.split_tiles_k : p.split_tiles_q;
    if (p.a.features & HEDDLE_VARLEN)
        return head * tiles + (keys ? c.first_k : c.first_q) / SPLIT_ROWS + c.n + t;
    return (c.n * heads + head) * tiles + t;
}

INLINE split_info load_info(const split_tensor &x, int64_t tile) {
    const int4 r = *(const int4 *)&x.info[tile];
    return {r.x, __int_as_float(r.y), {(uint32_t)r.z, (uint32_t)r.w}};
}

/* Rows that some query sees, or that see some key: begin .. end-1 of the sequence. */
INLINE void split_range(const place &c, bool keys, int *begin, int *end) {
    *begin = keys ? max(0, c.lo) : max(0, -c.hi);
    *end = keys ? (c.sq ? min(c.sk, c.sq + c.hi) : 0) : (c.sk ? min(c.sq, c.sk - c.lo) : 0);
}

#endif

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

/* The tensor cores cut off when they add to an accumulator: so much of itself a sum over so many columns or rows lacks on average, half a unit
 * of the last place of what there is by then at each step of 16, 0.72 of 2^-23 on average. o, dP and the gradients get it back where they
 * are multiplied with a factor anyway, scores in the low parts of K. */
INLINE constexpr float split_cut_off(int numbers) {
    return 0.36f * 0x1p-23f * (float)((numbers + 15) / 16 + 1) / 2;
}
#define SPLIT_GIVES_BACK (1.0f + split_cut_off(SPLIT_ROWS)) /* of sums over a tile's rows */

/* What scores lack, whose large products over d 128 are two sums. */
INLINE float score_cut_off(const attention_params &p) {
    return split_cut_off((int)min64(p.a.d, 128));
}

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

/* ------------------------------------------------------------------------------------------------------ hidden rows
 * What a mask or a bias hides from everybody may hold anything, and would take the bits of its neighbours in the tile if it were large. */
#define OUTLIER 0x1p12f

/* Does nobody see row r of keys, or does row r of queries see nothing? By a warp. */
INLINE bool is_hidden(const attention_params &p, const place &c, bool keys, int64_t head, int r) {
    const int64_t x0 = keys ? head * p.group : head, x1 = x0 + (keys ? p.group : 1);
    const int begin = keys ? max(0, r - c.hi) : max(0, r + c.lo);
    const int end = keys ? min(c.sq, r - c.lo + 1) : min(c.sk, r + c.hi + 1);
    for (int64_t x = x0; x < x1; x++)
        for (int t0 = begin; t0 < end; t0 += 32) {
            const int t = t0 + (int)threadIdx.x % 32;
            float slack;
            const bool seen = t < end && full_score<float>(p, c, make_score_row(p, c, x, keys ? t : r), keys ? r : t,
                                                           0.0f, &slack) != -CUDART_INF_F;
            if (__any_sync(ALL_LANES, seen))
                return false;
        }
    return true;
}

/* Of a tile of 64 rows from row0 on those rows become zero that are much larger than another and that nobody sees; marks of such rows go,
 * too. A thread has chunks of rows row, row + step ..; one of `warps` warps, all of which meet in sync. largest: of each row; hidden: two
 * words. */
template <int D, int CHUNKS, typename SYNC>
INLINE void drop_hidden(const attention_params &p, const place &c, bool keys, int64_t head, int row0, int row, int step,
                        int warp, int warps, float (*x)[8], float *largest, uint32_t *marks, uint32_t *hidden,
                        SYNC sync) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int z = 0; z < CHUNKS; z++) {
        float most = 0.0f;
#pragma unroll
        for (int y = 0; y < 8; y++)
            most = fmaxf(most, fabsf(x[z][y]));
#pragma unroll
        for (int other = D / 16; other; other /= 2)
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, other));
        if (lane % (D / 8) == 0)
            largest[row + z * step] = most;
    }
    if (warp == 0 && lane < 2)
        hidden[lane] = 0;
    sync();
    const float a = largest[lane], b = largest[lane + 32];
    const float most = warp_max(fmaxf(a, b));
    const float least = -warp_max(fmaxf(a > 0.0f ? -a : -CUDART_INF_F, b > 0.0f ? -b : -CUDART_INF_F));
    if (!(most > least * OUTLIER) && !(marks[0] | marks[1]))
        return;
    for (int r = warp; r < SPLIT_ROWS; r += warps)
        if ((largest[r] > least * OUTLIER || marks[r / 32] >> r % 32 & 1) && is_hidden(p, c, keys, head, row0 + r) &&
            lane == 0)
            atomicOr(&hidden[r / 32], 1u << r % 32);
    sync();
    if (warp == 0 && lane < 2)
        marks[lane] &= ~hidden[lane];
#pragma unroll
    for (int z = 0; z < CHUNKS; z++)
        if (hidden[(row + z * step) / 32] >> (row + z * step) % 32 & 1)
#pragma unroll
            for (int y = 0; y < 8; y++)
                x[z][y] = 0.0f;
}

/* The largest magnitude of a thread's chunks, as bits. */
template <int CHUNKS> INLINE uint32_t largest_of(const float (*x)[8]) {
    float most = 0.0f;
#pragma unroll
    for (int z = 0; z < CHUNKS; z++)
#pragma unroll
        for (int y = 0; y < 8; y++)
            most = fmaxf(most, fabsf(x[z][y]));
    return __float_as_uint(most);
}

/* The e with most·2^e in [2^14, 2^15), but at most 100: what is smaller than 2^-86 loses bits, and no factor overflows. */
INLINE int split_exponent(uint32_t most) {
    return min(14 + 127 - (int)(most >> 23), 100);
}

/* high + low = x·by, stored 64 rows apart; with MORE as much of itself beside that. */
template <bool MORE> INLINE void store_chunk(char *at, const float x[8], float by, float more) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int y = 0; y < 4; y++) {
        const float a = x[2 * y] * by, b = x[2 * y + 1] * by;
        high[y] = pack_f16(a, b);
        const float left_a = a - low_float(high[y], f16()), left_b = b - high_float(high[y], f16());
        low[y] = MORE ? pack_f16(fmaf(a, more, left_a), fmaf(b, more, left_b)) : pack_f16(left_a, left_b);
    }
    *(uint4 *)at = make_uint4(high[0], high[1], high[2], high[3]);
    *(uint4 *)(at + SPLIT_ROWS * 128) = make_uint4(low[0], low[1], low[2], low[3]);
}

#endif

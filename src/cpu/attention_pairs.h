/* SPDX-License-Identifier: Apache-2.0
 * Attention's products of bfloat16 by pairs (vdpbf16ps): two sum indices in each 32 bits, so twice as many products an instruction.
 * Scores, weights and sums stay in float32 and lie as tile.h has them; what the products read is bfloat16: K, V, Q and dO as they came,
 * P and dS rounded once. A pair that lacks its second element has a zero there.
 *
 *   Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ     A: rows of keys where they are   B: lanes, pairs along d
 *   Oᵀ += Vᵀ·P, dQᵀ += Kᵀ·dS   A: pairs of keys                 B: weights, pairs of keys
 *   dV += Pᵀ·dO, dK += dSᵀ·Q   A: weights, pairs of lanes       B: rows of lanes, pairs of lanes */
#ifndef HEDDLE_CPU_ATTENTION_PAIRS_H
#define HEDDLE_CPU_ATTENTION_PAIRS_H

#include "gemm.h"
#include "pack.h"

INLINE vu load_halves_as_int(const char *p, int64_t n) {
    if (n < VL)
        return __builtin_convertvector(load_halves(p, n), vu);
    return __builtin_convertvector(*(const vh_unaligned *)(const void *)p, vu);
}

/* out[e][lane] = elements 2e and 2e + 1 of the lane's row, times a power of two. */
static void pack_pairs(const void *const *rows, int64_t count, int64_t n, float factor, float *out, int64_t stride) {
    for (int64_t l0 = 0; l0 < count; l0 += VL)
        for (int64_t e0 = 0; e0 < n / 2; e0 += VL) {
            vf t[VL];
            for (int l = 0; l < VL; l++)
                t[l] = l0 + l < count ? load_some(HEDDLE_F32, (const float *)rows[l0 + l] + e0, n / 2 - e0) : splat(0);
            transpose(t);
            for (int e = 0; e < VL && e0 + e < n / 2; e++)
                store(out + (e0 + e) * stride + l0, scale_pair(t[e], factor));
        }
}

/* out[e] = element e of both rows; `odd` may be NULL. */
INLINE void pair_rows(const char *even, const char *odd, int64_t n, float *out) {
    for (int64_t e = 0; e < n; e += VL) {
        const vu low = load_halves_as_int(even + e * 2, n - e);
        store(out + e, (vf)(odd ? low | load_halves_as_int(odd + e * 2, n - e) << 16 : low));
    }
}

/* [row/2][pad] of rows that lie `bytes` apart. */
static void pair_keys(const char *in, int64_t bytes, int64_t rows, int64_t n, int64_t pad, float *out) {
    for (int64_t r = 0; r < rows; r += 2, in += 2 * bytes, out += pad) {
        for (int64_t x = 0; x < n * 2; x += 64) {
            __builtin_prefetch(in + 16 * bytes + x);
            __builtin_prefetch(in + 17 * bytes + x);
        }
        pair_rows(in, r + 1 < rows ? in + bytes : NULL, n, out);
    }
}

/* [lane/2][pad] of the lanes' rows. */
static void pair_lanes(const void *const *rows, int64_t count, int64_t n, int64_t pad, float *out) {
    for (int64_t l = 0; l < count; l += 2, out += pad)
        pair_rows(rows[l], l + 1 < count ? rows[l + 1] : NULL, n, out);
}

/* Weights [count][vectors·VL] as [count/2][vectors·VL] pairs of keys. */
static void pair_weights(const float *s, int64_t count, int64_t stride, float *out) {
    int64_t j = 0;
    for (; j + 2 <= count; j += 2, s += 2 * stride, out += stride)
        for (int64_t x = 0; x < stride; x += VL)
            store(out + x, narrow_pairs(load(s + x), load(s + stride + x)));
    for (int64_t x = 0; x < stride && j < count; x += VL)
        store(out + x, narrow_pairs(load(s + x), splat(0)));
}

/* Floats between two rows of pairs of lanes. */
INLINE int64_t lane_pairs_stride(int vectors) {
    return (vectors + 1) / 2 * VL;
}

/* Weights [count][vectors·VL] as [count] rows of pairs of lanes. */
static void narrow_weights(const float *s, int64_t count, int vectors, float *out) {
    for (int64_t j = 0; j < count; j++, s += vectors * VL, out += lane_pairs_stride(vectors))
        for (int v = 0; v < vectors; v += 2)
            store(out + v / 2 * VL, narrow_two(load(s + v * VL), v + 1 < vectors ? load(s + (v + 1) * VL) : splat(0)));
}

#endif

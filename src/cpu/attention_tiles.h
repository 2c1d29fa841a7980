/* SPDX-License-Identifier: Apache-2.0
 * Attention's products on AMX. Scores, weights and sums stay in float32 and lie as tile.h has them; only what the products read
 * is bfloat16: K, V, Q and dO as they came, P and dS rounded once. What pads an operand to whole tiles is zero.
 *
 *   Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ     A: rows of keys          B: lanes, pairs along d
 *   Oᵀ += Vᵀ·P, dQᵀ += Kᵀ·dS   A: columns of keys       B: weights, pairs of keys
 *   dV += Pᵀ·dO, dK += dSᵀ·Q   A: weights, rows         B: rows of lanes, pairs of lanes */
#ifndef HEDDLE_CPU_ATTENTION_TILES_H
#define HEDDLE_CPU_ATTENTION_TILES_H

#include "gemm_tiles.h"

/* Floats that n elements a row take, in whole steps of 32, for `rows` rows. */
INLINE int64_t tile_space(int64_t rows, int64_t n) {
    return (rows + 31) / 32 * 32 * ((n + 31) / 32 * 32) / 2;
}

/* 32 elements, as they are; zeros past n. */
INLINE vf load_32(const char *p, int64_t n) {
    typedef vf vf_of_pairs __attribute__((aligned(2), may_alias));
    if (n >= 32)
        return *(const vf_of_pairs *)(const void *)p;
    char copy[64] = {0};
    if (n > 0)
        memcpy(copy, p, (size_t)n * 2);
    return load((const float *)(const void *)copy);
}

INLINE vu load_16(const char *p, int64_t n) {
    vh_unaligned x = {0};
    if (n >= VL)
        x = *(const vh_unaligned *)(const void *)p;
    else if (n > 0)
        memcpy(&x, p, (size_t)n * 2);
    return __builtin_convertvector(x, vu);
}

/* Elements of two rows as pairs. */
INLINE vf zip(vu even, vu odd) {
    return (vf)(even | odd << 16);
}

/* A: [row/16][n/32][16][32 elements] of rows that lie `bytes` apart. */
static void tile_rows(const char *in, int64_t bytes, int64_t rows, int64_t n, float *out) {
    const int64_t down = (n + 31) / 32 * TILE_FLOATS;
    for (int64_t r = 0; r < (rows + 15) / 16 * 16; r++, in += bytes) {
        float *to = out + r / 16 * down + r % 16 * 16;
        for (int64_t e = 0; e < n; e += 32, to += TILE_FLOATS)
            store(to, load_32(in + e * 2, r < rows ? n - e : 0));
    }
}

/* A, of the transpose: [e/16][row/32][16 e][32 rows], `down` floats from 16 e to the next. */
static void tile_columns(const char *in, int64_t bytes, int64_t rows, int64_t n, float *out, int64_t down) {
    for (int64_t r = 0; r < rows; r += 32, in += 32 * bytes, out += TILE_FLOATS)
        for (int64_t e = 0; e < n; e += 16) {
            vf t[16];
            for (int x = 0; x < 16; x++) {
                const char *p = in + 2 * x * bytes + e * 2;
                t[x] =
                    zip(load_16(p, r + 2 * x < rows ? n - e : 0), load_16(p + bytes, r + 2 * x + 1 < rows ? n - e : 0));
            }
            transpose(t);
            for (int x = 0; x < 16; x++)
                store(out + e / 16 * down + x * 16, t[x]);
        }
}

/* B: lanes × n elements as [n/32][vectors][16 pairs along n][16 lanes], times a power of two. */
static void tile_lanes(const void *const *rows, int64_t lanes_used, int vectors, int64_t n, float factor, float *out) {
    for (int64_t e = 0; e < n; e += 32)
        for (int v = 0; v < vectors; v++, out += TILE_FLOATS) {
            vf t[16];
            for (int x = 0; x < 16; x++) {
                const int64_t lane = v * 16 + x;
                t[x] = lane < lanes_used ? load_32((const char *)rows[lane] + e * 2, n - e) : splat(0);
            }
            transpose(t);
            for (int x = 0; x < 16; x++)
                store(out + x * 16, scale_pair(t[x], factor));
        }
}

/* B: lanes × n elements as [lanes/32][n/16][16 pairs of lanes][16 elements]. */
static void tile_lane_pairs(const void *const *rows, int64_t lanes_used, int64_t n, float *out) {
    for (int64_t l = 0; l < lanes_used; l += 32)
        for (int64_t e = 0; e < n; e += 16)
            for (int x = 0; x < 16; x++, out += 16) {
                const int64_t lane = l + 2 * x;
                const vu even = lane < lanes_used ? load_16((const char *)rows[lane] + e * 2, n - e) : (vu){0};
                const vu odd = lane + 1 < lanes_used ? load_16((const char *)rows[lane + 1] + e * 2, n - e) : (vu){0};
                store(out, zip(even, odd));
            }
}

/* B: weights [count][vectors·16] as [count/32][vectors][16 pairs of keys][16 lanes]. */
static void tile_weight_pairs(const float *s, int64_t count, int vectors, float *out) {
    const int64_t stride = vectors * VL;
    for (int64_t j = 0; j < count; j += 32)
        for (int v = 0; v < vectors; v++)
            for (int x = 0; x < 16; x++, out += 16) {
                const float *p = s + (j + 2 * x) * stride + v * VL;
                const vf even = j + 2 * x < count ? load(p) : splat(0);
                store(out, narrow_pairs(even, j + 2 * x + 1 < count ? load(p + stride) : splat(0)));
            }
}

/* A: weights [count][vectors·16] as [count/16][vectors/2][16 keys][32 lanes]. */
static void tile_weight_rows(const float *s, int64_t count, int vectors, float *out) {
    const int64_t stride = vectors * VL, down = (vectors + 1) / 2 * TILE_FLOATS;
    for (int64_t j = 0; j < (count + 15) / 16 * 16; j++, s += stride) {
        float *to = out + j / 16 * down + j % 16 * 16;
        for (int v = 0; v < vectors; v += 2, to += TILE_FLOATS)
            store(to, j >= count ? splat(0)
                                 : narrow_two(load(s + v * VL), v + 1 < vectors ? load(s + (v + 1) * VL) : splat(0)));
    }
}

/* out[j][lane] = the product of keys and lanes over `depth` elements, in the parts that are seen. */
static void tile_scores(const lanes *l, const parts *r, const float *keys, int64_t depth, const float *columns,
                        float *out) {
    const int64_t steps = (depth + 31) / 32;
    for (const part *p = r->p; p < r->p + r->count; p++) {
        const tiles_a a = {keys + p->first / 16 * steps * TILE_FLOATS, 64, steps * 1024, 1024};
        const gemm_ahead none = {(const char *)a.p, 0};
        gemm_tiles((p->count + 15) / 16, p->end - p->begin, steps, &a, columns + p->begin * TILE_FLOATS,
                   l->vectors * TILE_FLOATS, out + p->first * l->stride + p->begin * VL, l->stride, false, &none);
    }
}

/* out[e][lane] += columns of keys times weights. Steps are of 32 keys, parts of 16: each pair of vectors gets the keys from the
 * first that it sees to the last, and what is hidden among them has a weight of zero. */
static void tile_add_columns(const lanes *l, const parts *r, const float *keys, int64_t down, int64_t width,
                             const float *weights, float *out) {
    for (int v = 0; v < l->vectors; v += 2) {
        int64_t begin = INT64_MAX, end = 0;
        for (const part *p = r->p; p < r->p + r->count; p++)
            if (p->begin < v + 2 && p->end > v && p->begin < p->end) {
                begin = min64(begin, p->first);
                end = max64(end, p->first + p->count);
            }
        if (begin >= end)
            continue;
        begin /= 32;
        const tiles_a a = {keys + begin * TILE_FLOATS, 64, down * 4, 1024};
        const gemm_ahead none = {(const char *)a.p, 0};
        gemm_tiles((width + 15) / 16, l->vectors - v < 2 ? 1 : 2, (end + 31) / 32 - begin, &a,
                   weights + (begin * l->vectors + v) * TILE_FLOATS, l->vectors * TILE_FLOATS, out + v * VL, l->stride,
                   true, &none);
    }
}

/* out[j][e] (+)= weights of key j times the lanes' rows of `pad` elements, in the parts that are seen. */
static void tile_add_rows(const lanes *l, const parts *r, const float *weights, const float *rows, int64_t pad,
                          float *out, bool add) {
    const int64_t steps = (l->vectors + 1) / 2;
    for (const part *p = r->p; p < r->p + r->count; p++) {
        if (p->begin >= p->end)
            continue;
        const int64_t first = p->begin / 2, last = (p->end + 1) / 2;
        const tiles_a a = {weights + (p->first / 16 * steps + first) * TILE_FLOATS, 64, steps * 1024, 1024};
        const gemm_ahead none = {(const char *)a.p, 0};
        gemm_tiles((p->count + 15) / 16, (int)(pad / 16), last - first, &a, rows + first * pad * 16, pad * 16,
                   out + p->first * pad, pad, add, &none);
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Few queries (decoding): too few to fill the lanes of vectors, so vectors run along the rows of K and V instead, straight from
 * memory in whatever type. K and V are used only a few times each: reading them is what takes the time, and the arithmetic must
 * hide behind it. Scores stand [lane][key] here, so that softmax has VL keys in a vector. */
#ifndef HEDDLE_CPU_FEW_H
#define HEDDLE_CPU_FEW_H

#include "pack.h"

#define FEW_LANES (VL == 16 ? 16 : 8) /* up to here this costs less than vectors that are mostly empty */
#define FEW_KEYS 128                  /* of a block, at most */

/* Sums, and so keys × lanes, in registers. */
#if VL == 16 || defined(__aarch64__)
#define FEW_SUMS 16
#else
#define FEW_SUMS 8
#endif

INLINE float max_of(vf x) {
#if VL == 16
    x = vmax(x, FLIP(x, 8));
#endif
#if VL >= 8
    x = vmax(x, FLIP(x, 4));
#endif
    x = vmax(x, FLIP(x, 2));
    x = vmax(x, FLIP(x, 1));
    return x[0];
}

/* Rows of n elements, `stride` bytes apart. */
typedef struct few_rows {
    const char *p;
    int64_t stride, n;
} few_rows;

/* Half `half` of 2·VL elements as floats. Of bfloat16 the even ones come first and then the odd ones, which costs a shift and a
 * mask instead of two widening moves. K and q, V and O all go through this order, and only writing O undoes it. */
INLINE vf few_half(int type, const char *p, int half) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (type == HEDDLE_BF16) {
        const vu both = *(const vu_unaligned *)p;
        return (vf)(half ? both & 0xffff0000u : both << 16);
    }
#endif
    return load_vector(type, p + half * VL * element_size(type));
}

INLINE void few_widen_as(int type, const char *in, int64_t n, float factor, float *out) {
    int64_t e = 0;
    for (; e + 2 * VL <= n; e += 2 * VL)
        for (int half = 0; half < 2; half++)
            store(out + e + half * VL, factor * few_half(type, in + e * element_size(type), half));
    for (; e < n; e += VL)
        store(out + e, factor * load_some(type, in + e * element_size(type), n - e));
}

/* A row in that order, with zeros up to a whole vector. */
static void few_widen(int type, const void *in, int64_t n, float factor, float *out) {
    switch (type) {
    case HEDDLE_F32: few_widen_as(HEDDLE_F32, in, n, factor, out); break;
    case HEDDLE_BF16: few_widen_as(HEDDLE_BF16, in, n, factor, out); break;
    default: few_widen_as(HEDDLE_F16, in, n, factor, out); break;
    }
}

/* Back into the order of memory, in place. */
static void few_order(int type, int64_t n, float *row) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (int64_t e = 0; type == HEDDLE_BF16 && e + 2 * VL <= n; e += 2 * VL) {
        const vf even = load(row + e), odd = load(row + e + VL);
        store(row + e, __builtin_shufflevector(even, odd, ZIP_LOW));
        store(row + e + VL, __builtin_shufflevector(even, odd, ZIP_HIGH));
    }
#endif
}

/* Asks for 2·VL elements from e on of a row that will be wanted soon. */
INLINE void few_prefetch(int type, few_rows r, int64_t row, int64_t e) {
    const char *p = r.p + row * r.stride + e * element_size(type);
#pragma GCC unroll 2
    for (int64_t x = 0; x < 2 * VL * element_size(type); x += 64)
        __builtin_prefetch(p + x);
}

/* s[lane][key] = rows[key]·q[lane]. The bits of a sum do not depend on which keys and lanes are formed with it. */
INLINE void few_dot_block(int type, int keys, int lanes, few_rows k, const float *q, int64_t pad, few_rows soon,
                          float *s) {
    vf sum[FEW_SUMS], y[4];
#pragma GCC unroll 16
    for (int x = 0; x < keys * lanes; x++)
        sum[x] = splat(0);
    const char *p = k.p;
    int64_t e = 0;
    for (; e + 2 * VL <= k.n; e += 2 * VL, p += 2 * VL * element_size(type))
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 4
            for (int b = 0; b < lanes; b++)
                y[b] = load(q + b * pad + e + half * VL);
#pragma GCC unroll 16
            for (int a = 0; a < keys; a++) {
                if (!half)
                    few_prefetch(type, soon, a, e);
                const vf x = few_half(type, p + a * k.stride, half);
#pragma GCC unroll 4
                for (int b = 0; b < lanes; b++)
                    sum[b * keys + a] += x * y[b];
            }
        }
    for (; e < k.n; e += VL, p += VL * element_size(type))
#pragma GCC unroll 16
        for (int a = 0; a < keys; a++) {
            const vf x = load_some(type, p + a * k.stride, k.n - e);
#pragma GCC unroll 4
            for (int b = 0; b < lanes; b++)
                sum[b * keys + a] += x * load(q + b * pad + e);
        }
    if (keys * lanes % VL) {
        for (int a = 0; a < keys; a++)
            for (int b = 0; b < lanes; b++)
                s[b * FEW_KEYS + a] = sum_of(sum[b * keys + a]);
        return;
    }
    float all[FEW_SUMS];
#pragma GCC unroll 4
    for (int x = 0; x < keys * lanes; x += VL)
        store(all + x, sum_each(sum + x));
#pragma GCC unroll 4
    for (int b = 0; b < lanes; b++)
        memcpy(s + b * FEW_KEYS, all + b * keys, sizeof(float) * (size_t)keys);
}

/* `lanes` is 1, 2 or 4. Along the way `soon`, a row for every key, is asked for. */
INLINE void few_dot_as(int type, int lanes, few_rows k, int64_t count, const float *q, int64_t pad, few_rows soon,
                       float *s) {
    const int keys = FEW_SUMS / lanes;
    int64_t j = 0;
    for (; j + keys <= count; j += keys, k.p += keys * k.stride, soon.p += keys * soon.stride)
        few_dot_block(type, keys, lanes, k, q, pad, soon, s + j);
    for (; j < count; j++, k.p += k.stride)
        few_dot_block(type, 1, lanes, k, q, pad, k, s + j);
}

/* o[lane] += sum over keys of s[lane][key]·rows[key], for `vectors` vectors of columns from e on. A chain is no longer than a block's keys:
 * of all keys it would have twice the roundings of a product in blocks. */
INLINE void few_add_block(int type, int lanes, int vectors, few_rows v, int64_t e, int64_t count, const float *s,
                          few_rows soon, float *o, int64_t pad) {
    vf sum[FEW_SUMS], y[4];
    o += e;
    v.p += e * element_size(type);
#pragma GCC unroll 4
    for (int b = 0; b < lanes; b++)
#pragma GCC unroll 8
        for (int x = 0; x < vectors; x++)
            sum[b * vectors + x] = splat(0);
    for (int64_t j = 0; j < count; j++, v.p += v.stride) {
#pragma GCC unroll 4
        for (int b = 0; b < lanes; b++)
            y[b] = splat(s[b * FEW_KEYS + j]);
#pragma GCC unroll 8
        for (int x = 0; x < vectors; x++) {
            if (x % 2 == 0)
                few_prefetch(type, soon, j, e + x * VL);
            const vf r = vectors == 1 ? load_some(type, v.p, v.n - e)
                                      : few_half(type, v.p + x / 2 * 2 * VL * element_size(type), x % 2);
#pragma GCC unroll 4
            for (int b = 0; b < lanes; b++)
                sum[b * vectors + x] += r * y[b];
        }
    }
#pragma GCC unroll 4
    for (int b = 0; b < lanes; b++)
#pragma GCC unroll 8
        for (int x = 0; x < vectors; x++)
            store(o + b * pad + x * VL, load(o + b * pad + x * VL) + sum[b * vectors + x]);
}

INLINE void few_add_as(int type, int lanes, few_rows v, int64_t count, const float *s, few_rows soon, float *o,
                       int64_t pad) {
    int64_t e = 0;
#define COLUMNS_OF(x)                                                                                                  \
    for (; (x)*lanes <= FEW_SUMS && e + ((x) > 1 ? (x)*VL : 1) <= v.n; e += (x)*VL)                                    \
    few_add_block(type, lanes, x, v, e, count, s, soon, o, pad)
    COLUMNS_OF(8);
    COLUMNS_OF(4);
    COLUMNS_OF(2);
    COLUMNS_OF(1);
#undef COLUMNS_OF
}

/* 1, 2 or 4 of n lanes at a time; three count as four, so q, s and o have a row more then. */
INLINE int few_step(int64_t n) {
    return n >= 3 ? 4 : (int)n;
}

INLINE void few_dot_lanes(int type, few_rows k, int64_t count, int64_t lanes, const float *q, int64_t pad,
                          few_rows soon, float *s) {
    for (; lanes > 0; q += 4 * pad, s += 4 * FEW_KEYS, lanes -= 4)
        switch (few_step(lanes)) {
        case 1: few_dot_as(type, 1, k, count, q, pad, soon, s); break;
        case 2: few_dot_as(type, 2, k, count, q, pad, soon, s); break;
        default: few_dot_as(type, 4, k, count, q, pad, soon, s); break;
        }
}

INLINE void few_add_lanes(int type, few_rows v, int64_t count, int64_t lanes, const float *s, few_rows soon, float *o,
                          int64_t pad) {
    for (; lanes > 0; o += 4 * pad, s += 4 * FEW_KEYS, lanes -= 4)
        switch (few_step(lanes)) {
        case 1: few_add_as(type, 1, v, count, s, soon, o, pad); break;
        case 2: few_add_as(type, 2, v, count, s, soon, o, pad); break;
        default: few_add_as(type, 4, v, count, s, soon, o, pad); break;
        }
}

static __attribute__((noinline)) void few_dot(int type, few_rows k, int64_t count, int64_t lanes, const float *q,
                                              int64_t pad, few_rows soon, float *s) {
    switch (type) {
    case HEDDLE_F32: few_dot_lanes(HEDDLE_F32, k, count, lanes, q, pad, soon, s); break;
    case HEDDLE_BF16: few_dot_lanes(HEDDLE_BF16, k, count, lanes, q, pad, soon, s); break;
    default: few_dot_lanes(HEDDLE_F16, k, count, lanes, q, pad, soon, s); break;
    }
}

static __attribute__((noinline)) void few_add(int type, few_rows v, int64_t count, int64_t lanes, const float *s,
                                              few_rows soon, float *o, int64_t pad) {
    switch (type) {
    case HEDDLE_F32: few_add_lanes(HEDDLE_F32, v, count, lanes, s, soon, o, pad); break;
    case HEDDLE_BF16: few_add_lanes(HEDDLE_BF16, v, count, lanes, s, soon, o, pad); break;
    default: few_add_lanes(HEDDLE_F16, v, count, lanes, s, soon, o, pad); break;
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Elements of any type to float and back, row by row or transposed. */
#ifndef HEDDLE_CPU_PACK_H
#define HEDDLE_CPU_PACK_H

#include "vec.h"

#include <string.h>

/* The type of a call's tensors. A table for bfloat16 alone knows it when it is compiled, and has no code for the others. */
#ifdef ISA_OTHERS
#define TYPE(call) ((void)(call), (int)HEDDLE_BF16)
#else
#define TYPE(call) ((call)->type)
#endif

INLINE int64_t element_size(int type) {
    return type == HEDDLE_F32 ? 4 : 2;
}

INLINE const char *element_at(const void *p, int64_t i, int type) {
    return (const char *)p + i * element_size(type);
}

INLINE vf widen_halves(int type, vh h) {
    return type == HEDDLE_BF16 ? bf16_widen(h) : f16_widen(h);
}

INLINE vh narrow_halves(int type, vf x) {
    return type == HEDDLE_BF16 ? bf16_narrow(x) : f16_narrow(x);
}

INLINE vf load_vector(int type, const void *p) {
    return type == HEDDLE_F32 ? load(p) : widen_halves(type, *(const vh_unaligned *)p);
}

INLINE void store_vector(int type, void *p, vf x) {
    if (type == HEDDLE_F32)
        store(p, x);
    else
        *(vh_unaligned *)p = narrow_halves(type, x);
}

/* The first n < VL elements at p, zeros behind them; nothing past them is touched. */
INLINE vf load_partial(int type, const void *p, int64_t n) {
    return type == HEDDLE_F32 ? load_floats(p, n) : widen_halves(type, load_halves(p, n));
}

INLINE void store_partial(int type, void *p, vf x, int64_t n) {
    if (type == HEDDLE_F32)
        store_floats(p, x, n);
    else
        store_halves(p, narrow_halves(type, x), n);
}

INLINE vf load_some(int type, const void *p, int64_t n) {
    return n >= VL ? load_vector(type, p) : load_partial(type, p, n);
}

INLINE void store_some(int type, void *p, vf x, int64_t n) {
    if (n >= VL)
        store_vector(type, p, x);
    else
        store_partial(type, p, x, n);
}

/* out[0..n) = in[0..n)·factor, and zeros up to a whole vector. */
INLINE void widen_row_as(int type, const void *in, int64_t n, float factor, float *out) {
    for (int64_t e = 0; e < n; e += VL)
        store(out + e, factor * load_some(type, element_at(in, e, type), n - e));
}

static void widen_row(int type, const void *in, int64_t n, float factor, float *out) {
    if (type == HEDDLE_F32)
        widen_row_as(HEDDLE_F32, in, n, factor, out);
    else if (type == HEDDLE_BF16)
        widen_row_as(HEDDLE_BF16, in, n, factor, out);
    else
        widen_row_as(HEDDLE_F16, in, n, factor, out);
}

/* Rows of n elements of a 16-bit type that lie `bytes` apart, each filled up with zeros to whole vectors: out[row][pad]. */
INLINE void widen_rows_as(int type, const char *in, int64_t bytes, int64_t rows, int64_t n, float *out, int64_t pad) {
    const int64_t whole = n / VL * VL;
    for (int64_t r = 0; r < rows; r++, in += bytes, out += pad) {
        for (int64_t x = 0; x < n * element_size(type); x += 64)
            __builtin_prefetch(in + 16 * bytes + x);
#pragma GCC unroll 4
        for (int64_t e = 0; e < whole; e += VL)
            store(out + e, load_vector(type, element_at(in, e, type)));
        if (whole < n)
            store(out + whole, load_partial(type, element_at(in, whole, type), n - whole));
    }
}

static void widen_rows(int type, const char *in, int64_t bytes, int64_t rows, int64_t n, float *out, int64_t pad) {
    if (type == HEDDLE_BF16)
        widen_rows_as(HEDDLE_BF16, in, bytes, rows, n, out, pad);
    else
        widen_rows_as(HEDDLE_F16, in, bytes, rows, n, out, pad);
}

/* n elements of e4m3 in another type, which holds each exactly. */
INLINE void widen_e4m3_as(int type, const uint8_t *in, int64_t n, void *out) {
    int64_t e = 0;
    for (; type != HEDDLE_F32 && e + 2 * VL <= n; e += 2 * VL) {
        vb_two bytes;
        memcpy(&bytes, in + e, sizeof bytes);
        const vh_two halves = type == HEDDLE_BF16 ? e4m3_halves(7, 127, bytes) : e4m3_halves(10, 15, bytes);
        memcpy((char *)out + e * 2, &halves, sizeof halves);
    }
    for (; e < n; e += VL) {
        vb bytes = {0};
        if (n - e >= VL)
            memcpy(&bytes, in + e, sizeof bytes);
        else
            memcpy(&bytes, in + e, (size_t)(n - e));
        store_some(type, (char *)out + e * element_size(type), e4m3_widen(bytes), n - e);
    }
}

static void widen_e4m3(int type, const uint8_t *in, int64_t n, void *out) {
    if (type == HEDDLE_F32)
        widen_e4m3_as(HEDDLE_F32, in, n, out);
    else if (type == HEDDLE_BF16)
        widen_e4m3_as(HEDDLE_BF16, in, n, out);
    else
        widen_e4m3_as(HEDDLE_F16, in, n, out);
}

INLINE void narrow_row_as(int type, const float *in, int64_t n, float factor, void *out) {
    for (int64_t e = 0; e < n; e += VL)
        store_some(type, (char *)out + e * element_size(type), factor * load_some(HEDDLE_F32, in + e, n - e), n - e);
}

static void narrow_row(int type, const float *in, int64_t n, float factor, void *out) {
    if (type == HEDDLE_F32)
        narrow_row_as(HEDDLE_F32, in, n, factor, out);
    else if (type == HEDDLE_BF16)
        narrow_row_as(HEDDLE_BF16, in, n, factor, out);
    else
        narrow_row_as(HEDDLE_F16, in, n, factor, out);
}

/* out[e·stride + lane] = rows[lane][first + e]·factor for e < n and lane < lanes; zeros up to a whole vector of lanes. */
INLINE void pack_transposed_as(int type, const void *const *rows, int64_t first, int64_t lanes, int64_t n, float factor,
                               float *out, int64_t stride) {
    for (int64_t l0 = 0; l0 < lanes; l0 += VL)
        for (int64_t e0 = 0; e0 < n; e0 += VL) {
            vf t[VL];
            for (int l = 0; l < VL; l++)
                t[l] = l0 + l < lanes ? load_some(type, element_at(rows[l0 + l], first + e0, type), n - e0) : splat(0);
            transpose(t);
            for (int e = 0; e < VL && e0 + e < n; e++)
                store(out + (e0 + e) * stride + l0, factor * t[e]);
        }
}

static void pack_transposed(int type, const void *const *rows, int64_t first, int64_t lanes, int64_t n, float factor,
                            float *out, int64_t stride) {
    switch (type) {
    case HEDDLE_F32: pack_transposed_as(HEDDLE_F32, rows, first, lanes, n, factor, out, stride); break;
    case HEDDLE_BF16: pack_transposed_as(HEDDLE_BF16, rows, first, lanes, n, factor, out, stride); break;
    default: pack_transposed_as(HEDDLE_F16, rows, first, lanes, n, factor, out, stride); break;
    }
}

/* rows[lane][first + e] (+)= in[e·stride + lane]·factor[lane] for e < n and lane < lanes. */
INLINE void unpack_transposed_as(int type, const float *in, int64_t stride, int64_t lanes, int64_t n,
                                 const float *factor, bool add, void *const *rows, int64_t first) {
    for (int64_t l0 = 0; l0 < lanes; l0 += VL)
        for (int64_t e0 = 0; e0 < n; e0 += VL) {
            vf t[VL];
            for (int e = 0; e < VL; e++)
                t[e] = e0 + e < n ? load(in + (e0 + e) * stride + l0) * load(factor + l0) : splat(0);
            transpose(t);
            for (int l = 0; l < VL && l0 + l < lanes; l++) {
                char *p = (char *)rows[l0 + l] + (first + e0) * element_size(type);
                store_some(type, p, add ? t[l] + load_some(type, p, n - e0) : t[l], n - e0);
            }
        }
}

static void unpack_transposed(int type, const float *in, int64_t stride, int64_t lanes, int64_t n, const float *factor,
                              bool add, void *const *rows, int64_t first) {
    if (type == HEDDLE_F32 && add)
        unpack_transposed_as(HEDDLE_F32, in, stride, lanes, n, factor, true, rows, first);
    else if (type == HEDDLE_F32)
        unpack_transposed_as(HEDDLE_F32, in, stride, lanes, n, factor, false, rows, first);
    else if (type == HEDDLE_BF16)
        unpack_transposed_as(HEDDLE_BF16, in, stride, lanes, n, factor, false, rows, first);
    else
        unpack_transposed_as(HEDDLE_F16, in, stride, lanes, n, factor, false, rows, first);
}

/* Whether all bfloat16 elements are finite, two in each 32 bits. */
INLINE bool halves_finite(const float *p, int64_t floats) {
    vi any = splat_int(0);
    for (int64_t x = 0; x < floats; x += VL) {
        const vu e = (vu)load(p + x);
        any |= ((e & 0x7f80u) == 0x7f80u) | ((e & 0x7f800000u) == 0x7f800000u);
    }
    return !any_lane(any);
}

#endif

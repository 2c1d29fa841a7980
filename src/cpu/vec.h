/* SPDX-License-Identifier: Apache-2.0
 * Vectors of VL floats in GNU C, and the few operations that the language has no words for.
 * Each isa_<name>.c sets VL and includes its own vec_<name>.h first; everything that follows is compiled once per ISA. */
#ifndef HEDDLE_CPU_VEC_H
#define HEDDLE_CPU_VEC_H

#include "../dtype.h"

#include <stdbool.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef uint8_t vb __attribute__((vector_size(VL)));
typedef uint8_t vb8 __attribute__((vector_size(8)));
typedef uint64_t vw __attribute__((vector_size(8 * VL)));
typedef uint64_t vl __attribute__((vector_size(4 * VL))); /* a lane for two of vu */

/* The same, for addresses that are only aligned to an element. */
typedef vf vf_unaligned __attribute__((aligned(4), may_alias));
typedef vh vh_unaligned __attribute__((aligned(2), may_alias));
typedef vu vu_unaligned __attribute__((aligned(2), may_alias));
typedef vi vi_unaligned __attribute__((aligned(4), may_alias));

INLINE vf load(const float *p) {
    return *(const vf_unaligned *)p;
}

INLINE vi load_int(const int32_t *p) {
    return *(const vi_unaligned *)p;
}

INLINE void store(float *p, vf x) {
    *(vf_unaligned *)p = x;
}

INLINE vf splat(float x) {
    return x - (vf){0};
}

INLINE vi splat_int(int32_t x) {
    return x - (vi){0};
}

INLINE vf select_float(vi mask, vf yes, vf no) {
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

/* Whether any lane has a bit set. */
#ifndef HAVE_ANY_LANE
INLINE bool any_lane(vi mask) {
    int32_t r = 0;
    for (int l = 0; l < VL; l++)
        r |= mask[l];
    return r != 0;
}
#endif

/* Bit j is set where byte j of 32 is not 0. The product collects the lowest bits of eight bytes in its highest. */
#ifndef HAVE_BYTE_BITS
INLINE uint32_t byte_bits(const uint8_t *p) {
    uint32_t r = 0;
    for (int x = 0; x < 4; x++) {
        vb8 bytes;
        uint64_t ones;
        memcpy(&bytes, p + 8 * x, sizeof bytes);
        bytes = (vb8)(bytes != 0) & 1;
        memcpy(&ones, &bytes, sizeof ones);
        r |= (uint32_t)(ones * UINT64_C(0x0102040810204080) >> 56) << 8 * x;
    }
    return r;
}
#endif

#ifndef HAVE_STREAM
INLINE void stream(void *line, vf x) {
    store((float *)line, x); /* never called */
}

INLINE void end_streams(void) {
}
#endif

/* max(a, b), and b when either is NaN: what maxps does, so that a NaN score is not lost. */
#ifndef HAVE_VMAX
INLINE vf vmax(vf a, vf b) {
    return select_float(a > b, a, b);
}
#endif

/* The whole products of the low halves of lanes with b. */
#ifndef HAVE_LONG_PRODUCT
INLINE vl long_product(vl a, uint32_t b) {
    return (a & 0xffffffff) * (uint64_t)b;
}
#endif

/* Lanes 0, 0', 1, 1', ... of the low and of the high halves of a and b. log2(VL) rounds of them transpose VL vectors. */
#if VL == 4
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#elif VL == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif VL == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif

INLINE void zip_round(const vf *in, vf *out) {
#pragma GCC unroll 16
    for (int r = 0; r < VL / 2; r++) {
        out[2 * r] = __builtin_shufflevector(in[r], in[r + VL / 2], ZIP_LOW);
        out[2 * r + 1] = __builtin_shufflevector(in[r], in[r + VL / 2], ZIP_HIGH);
    }
}

#if VL == 4
#define ZIP_ALL(round)                                                                                                 \
    round(rows, other);                                                                                                \
    round(other, rows)
#elif VL == 8
#define ZIP_ALL(round)                                                                                                 \
    round(rows, other);                                                                                                \
    round(other, rows);                                                                                                \
    round(rows, other);                                                                                                \
    for (int r = 0; r < VL; r++)                                                                                       \
    rows[r] = other[r]
#elif VL == 16
#define ZIP_ALL(round)                                                                                                 \
    round(rows, other);                                                                                                \
    round(other, rows);                                                                                                \
    round(rows, other);                                                                                                \
    round(other, rows)
#endif

#ifndef HAVE_TRANSPOSE
INLINE void transpose(vf *rows) {
    vf other[VL];
    ZIP_ALL(zip_round);
}
#endif

/* A list of lane numbers f(l, g), l = 0 .. VL-1, for __builtin_shufflevector. */
#if VL == 4
#define EACH_LANE(f, g) f(0, g), f(1, g), f(2, g), f(3, g)
#elif VL == 8
#define EACH_LANE(f, g) f(0, g), f(1, g), f(2, g), f(3, g), f(4, g), f(5, g), f(6, g), f(7, g)
#elif VL == 16
#define EACH_LANE(f, g)                                                                                                \
    f(0, g), f(1, g), f(2, g), f(3, g), f(4, g), f(5, g), f(6, g), f(7, g), f(8, g), f(9, g), f(10, g), f(11, g),      \
        f(12, g), f(13, g), f(14, g), f(15, g)
#endif
#define LANE_KEEP(l, g) ((l) & (g) ? VL + (l) : (l))
#define LANE_CROSS(l, g) ((l) & (g) ? VL + ((l) ^ (g)) : (l) ^ (g))
#define LANE_FLIP(l, g) ((l) ^ (g))
/* Lanes l and l ^ g of a added up where l has no bit g, those of b where it has. */
#define FOLD(a, b, g)                                                                                                  \
    (__builtin_shufflevector(a, b, EACH_LANE(LANE_KEEP, g)) + __builtin_shufflevector(a, b, EACH_LANE(LANE_CROSS, g)))
#define FLIP(a, g) __builtin_shufflevector(a, a, EACH_LANE(LANE_FLIP, g))

/* Lane i of the result is the sum of all lanes of in[i], i < VL; `in` is used up. The same bits as sum_of(in[i]). */
INLINE vf sum_each(vf *in) {
#if VL == 16
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        in[i] = FOLD(in[i], in[i + 8], 8);
#endif
#if VL >= 8
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        in[i] = FOLD(in[i], in[i + 4], 4);
#endif
    return FOLD(FOLD(in[0], in[2], 2), FOLD(in[1], in[3], 2), 1);
}

INLINE float sum_of(vf x) {
#if VL == 16
    x += FLIP(x, 8);
#endif
#if VL >= 8
    x += FLIP(x, 4);
#endif
    x += FLIP(x, 2);
    x += FLIP(x, 1);
    return x[0];
}

/* --------------------------------------------------------------------------------------------- 16-bit elements */

#ifndef HAVE_BF16_CONVERT
INLINE vf bf16_widen(vh h) {
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

INLINE vh bf16_narrow(vf x) {
    vu u = (vu)x;
    vu rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16, quiet = u >> 16 | 0x40;
    vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector((nan & quiet) | (~nan & rounded), vh);
}
#endif

#ifndef HAVE_F16_CONVERT
INLINE vf f16_widen(vh h) {
    vu u = __builtin_convertvector(h, vu), sign = (u & 0x8000u) << 16, magnitude = u & 0x7fffu;
    vf finite = (vf)(magnitude << 13) * 0x1p112f;
    vu special = magnitude << 13 | 0x7f800000u, is_special = (vu)(magnitude >= 0x7c00u);
    return (vf)(sign | (is_special & special) | (~is_special & (vu)finite));
}

/* Round to nearest even by letting the float adder do it: adding 2^k puts the binary16 ulp at the end of the mantissa. */
INLINE vh f16_narrow(vf x) {
    vu u = (vu)x, sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    vu small = (vu)((vf)a + 0.5f) - 0x3f000000u;                   /* below 2^-14: multiples of 2^-24 */
    vu normal = (a + 0xfffu + (a >> 13 & 1) - (112u << 23)) >> 13; /* rebias; a carry reaches infinity by itself */
    vu is_small = (vu)(a < (113u << 23)), is_big = (vu)(a >= 0x477ff000u), is_nan = (vu)(a > 0x7f800000u);
    vu r = (is_small & small) | (~is_small & normal);
    r = (is_big & 0x7c00u) | (~is_big & r);
    r = (is_nan & 0x7e00u) | (~is_nan & r);
    return __builtin_convertvector(sign | r, vh);
}
#endif

/* As e4m3_to_float(). */
INLINE vf e4m3_widen(vb bytes) {
    const vu u = __builtin_convertvector(bytes, vu), magnitude = u & 0x7fu;
    const vu normal = (magnitude << 20) + (120u << 23), nan = (vu)(magnitude == 0x7fu) & 0x7fc00000u;
    const vu small = (vu)((vf)(normal + (1u << 23)) - 0x1p-6f), is_small = (vu)(magnitude < 8);
    return (vf)((u & 0x80u) << 24 | (is_small & small) | (~is_small & normal) | nan);
}

/* The same in 16 bits of `mantissa` bits behind the point and this bias, which hold each exactly: two vectors' numbers. A number without an
 * exponent is one of seven, of which the leading bit becomes the exponent. */
typedef uint16_t vh_two __attribute__((vector_size(4 * VL)));
typedef uint8_t vb_two __attribute__((vector_size(2 * VL)));

INLINE vh_two e4m3_by_bits(int mantissa, int bias, vb_two bytes) {
    const vh_two u = __builtin_convertvector(bytes, vh_two), x = u & 0x7f;
    const vh_two two = (vh_two)(x >= 2), four = (vh_two)(x >= 4), some = (vh_two)(x != 0), low = (vh_two)(x < 8);
    const vh_two tail = (four & x << (mantissa - 2)) | (~four & two & x << (mantissa - 1)); /* of 1 nothing is left */
    const vh_two place = (uint16_t)((bias - 9) << mantissa) - ((two + four) << mantissa);   /* a mask is -1 */
    const vh_two small = some & (place | (tail & (uint16_t)((1 << mantissa) - 1)));
    const vh_two large = (x << (mantissa - 3)) + (uint16_t)((bias - 7) << mantissa);
    const vh_two nan = (vh_two)(x == 0x7f) & 0x7fff;
    return (u & 0x80) << 8 | (low & small) | (~low & large) | nan;
}

#ifndef HAVE_E4M3_TABLE
INLINE vh_two e4m3_halves(int mantissa, int bias, vb_two bytes) {
    return e4m3_by_bits(mantissa, bias, bytes);
}
#endif

/* ---------------------------------------------------------------------------------------------- parts of vectors */

#ifndef HAVE_PARTIAL
INLINE vf load_floats(const float *p, int64_t n) {
    float copy[VL] = {0};
    memcpy(copy, p, (size_t)n * sizeof *p);
    return load(copy);
}

INLINE vh load_halves(const void *p, int64_t n) {
    vh r = {0};
    memcpy(&r, p, (size_t)n * 2);
    return r;
}

INLINE void store_floats(float *p, vf x, int64_t n) {
    memcpy(p, &x, (size_t)n * sizeof *p);
}

INLINE void store_halves(void *p, vh x, int64_t n) {
    memcpy(p, &x, (size_t)n * 2);
}
#endif

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Scalar conversions between the element types and float or double: rounding to nearest, ties to even, NaN kept. */
#ifndef HEDDLE_DTYPE_H
#define HEDDLE_DTYPE_H

#include "heddle.h"

#include <math.h>
#include <string.h>

static inline uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float float_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float bf16_to_float(uint16_t h) {
    return float_from_bits((uint32_t)h << 16);
}

static inline uint16_t float_to_bf16(float x) {
    uint32_t u = float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40); /* rounding could carry a NaN into infinity */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

static inline float f16_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u)
        return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    float x = float_from_bits(magnitude << 13) * 0x1p112f; /* rebias the exponent; exact for subnormals too */
    return float_from_bits(sign | float_bits(x));
}

/* OCP's: 4 bits of exponent, whose bias is 7, and 3 behind the point; no infinity, and all bits but the sign's are NaN.
 * Its subnormals are what a number from 2^-6 on has above that, and not made of floats' own, which a caller's thread may
 * take for zeros (XLA's do). */
static inline float e4m3_to_float(uint8_t x) {
    const uint32_t sign = (uint32_t)(x & 0x80u) << 24, magnitude = x & 0x7fu;
    if (magnitude == 0x7fu)
        return float_from_bits(sign | 0x7fc00000u);
    if (magnitude < 8)
        return float_from_bits(sign | float_bits(float_from_bits((magnitude << 20) + (121u << 23)) - 0x1p-6f));
    return float_from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

/* To nearest, ties to even; what is larger than 448 becomes that. */
static inline uint8_t double_to_e4m3(double x) {
    const uint8_t sign = signbit(x) ? 0x80u : 0;
    const double a = fmin(fabs(x), 448);
    int exponent = -6; /* the least, which subnormals have, too */
    if (isnan(x))
        return sign | 0x7fu;
    while (a >= ldexp(2, exponent))
        exponent++;
    return sign | (uint8_t)((exponent + 6) * 8 + (int)nearbyint(ldexp(a, 3 - exponent)));
}

/* The same of a float, in a few steps. */
static inline uint8_t float_to_e4m3(float x) {
    const uint32_t u = float_bits(x), sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint8_t)(sign | 0x7fu);
    if (a >= float_bits(448.0f))
        return (uint8_t)(sign | 0x7eu);
    if (a < float_bits(0x1p-6f)) /* a multiple of 2^-9 */
        return (uint8_t)(sign | (float_bits(float_from_bits(a) * 512.0f + 0x1p23f) & 0xfu));
    return (uint8_t)(sign | (((a + 0x7ffffu + (a >> 20 & 1u)) >> 20) - (120u << 3)));
}

/* From double, so that the reference rounds once. */
static inline uint16_t double_to_f16(double x) {
    const uint16_t sign = signbit(x) ? 0x8000u : 0;
    const double a = fabs(x);
    uint64_t u;
    if (isnan(x))
        return sign | 0x7e00u;
    if (a >= 65520.0)
        return sign | 0x7c00u;
    if (a < 0x1p-14) /* subnormal; what rounds up to 2^-14 becomes that */
        return sign | (uint16_t)nearbyint(a * 0x1p24);
    /* 10 of 52 bits stay, to nearest even; a carry goes into the exponent, whose bias is 15 in place of 1023. */
    memcpy(&u, &a, sizeof u);
    u = (u + (UINT64_C(1) << 41) - 1 + (u >> 42 & 1)) >> 42;
    return sign | (uint16_t)(u - ((1023 - 15) << 10));
}

static inline uint16_t double_to_bf16(double x) {
    float f = (float)x;
    uint32_t u = float_bits(f);
    /* Round to odd at float32 first: a double rounded twice could go the wrong way at a tie. */
    if (isfinite(f) && (double)f != x && !(u & 1))
        u += fabs((double)f) < fabs(x) ? 1u : (u & 0x7fffffffu) ? UINT32_MAX : 0u;
    return float_to_bf16(float_from_bits(u));
}

static inline double load_element(heddle_dtype dtype, const void *p, int64_t i) {
    switch (dtype) {
    case HEDDLE_F32: return ((const float *)p)[i];
    case HEDDLE_BF16: return bf16_to_float(((const uint16_t *)p)[i]);
    case HEDDLE_F16: return f16_to_float(((const uint16_t *)p)[i]);
    case HEDDLE_F64: return ((const double *)p)[i];
    }
    return NAN;
}

static inline void store_element(heddle_dtype dtype, void *p, int64_t i, double x) {
    switch (dtype) {
    case HEDDLE_F32: ((float *)p)[i] = (float)x; break;
    case HEDDLE_BF16: ((uint16_t *)p)[i] = double_to_bf16(x); break;
    case HEDDLE_F16: ((uint16_t *)p)[i] = double_to_f16(x); break;
    case HEDDLE_F64: ((double *)p)[i] = x; break;
    }
}

#endif

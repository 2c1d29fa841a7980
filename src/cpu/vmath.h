/* SPDX-License-Identifier: Apache-2.0
 * exp2, tanh and Philox on vectors. */
#ifndef HEDDLE_CPU_VMATH_H
#define HEDDLE_CPU_VMATH_H

#include "../philox.h"
#include "vec.h"

/* The most vectors that vexp2_each() takes. */
#define EXP2_MOST 8

/* What vectors of lanes take from an exponent, c·x - rest - whole; the latter has no fraction. */
typedef struct exponent_rest {
    vf rest, least, bits;
} exponent_rest;

#define EXP2_BITS (0x1.8p23f + 127)

INLINE exponent_rest rest_of_exponent(vf rest, vf whole) {
    return (exponent_rest){rest, whole - 127, EXP2_BITS - whole};
}

/* x[i] = lift·2^(c·x[i] - lag) for c·x - lag <= 127 and c > 0, within 1 ulp above 2^-126; exactly 0 where that exponent is -127 or less,
 * -inf included; NaN stays NaN. `lag` is whole, `least` (lag - 127)/c, and `lift` a power of two, 1 or more. The product with c is never
 * rounded where there is FMA: it costs nothing, and no x is too large for it.
 * c·x = n + f with n whole and |f| <= 1/2. Adding 1.5·2^23 + 127 rounds to whole and leaves n + 127 in the low bits, which
 * shifted are the bits of 2^n; 2^f by a polynomial of degree 6 (minimax in the relative error 2.0e-9, coefficients fitted with
 * the constant fixed at 1). At c·x = -127 the bits of 2^n are 0: an exact zero, so masked scores breed no denormals, which would
 * cost 7 times as much. A product and no sum of bits at the end: it keeps every NaN.
 * With `less`, of vector i less[i % period], the exponent is what that leaves, and the result 0 from -127 down whatever `least` is; what
 * is rounded of the exponent is what it has behind its whole part.
 * The vectors go side by side from step to step: each is a chain of a dozen operations that wait for one another, and a core that
 * is handed one chain after the other has no room for as many of them as its pipes could work on. */
INLINE void vexp2_of(int count, float c, float least, float lift, float lag, int period, const exponent_rest *less,
                     vf *x) {
    const float bits = EXP2_BITS - lag;
    vf z[EXP2_MOST], p[EXP2_MOST];
#define EACH _Pragma("GCC unroll 8") for (int i = 0; i < count; i++)
    if (less) {
        EACH z[i] = vmax(less[i % period].least, x[i] * c - less[i % period].rest) + less[i % period].bits;
        EACH x[i] = x[i] * c - (z[i] - less[i % period].bits);
        EACH x[i] = vmax(splat(-1), x[i] - less[i % period].rest); /* of what becomes 0 */
    } else {
        EACH x[i] = vmax(splat(least), x[i]);
        EACH z[i] = x[i] * c + bits;
        EACH x[i] = x[i] * c - (z[i] - bits);
    }
    EACH p[i] = lift * 0x1.41fbbcp-13f * x[i] + lift * 0x1.5f3e54p-10f;
    EACH p[i] = p[i] * x[i] + lift * 0x1.3b2d4cp-7f;
    EACH p[i] = p[i] * x[i] + lift * 0x1.c6aee8p-5f;
    EACH p[i] = p[i] * x[i] + lift * 0x1.ebfbdcp-3f;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    EACH p[i] = p[i] * x[i] + lift * 0x1.62e430p-1f;
    EACH p[i] = p[i] * x[i] + lift;
#else
    /* Rounded products cost more than 1 ulp: the leading bits of f and of ln 2 are multiplied exactly. */
    EACH {
        vf head = (x[i] + 0x1.8p17f) - 0x1.8p17f;
        p[i] = (p[i] * x[i] + lift * 0x1.7f7d1cp-20f) * x[i] + lift * ((x[i] - head) * 0x1.62e4p-1f);
        p[i] = lift * (head * 0x1.62e4p-1f + 1.0f) + p[i];
    }
#endif
    EACH x[i] = p[i] * (vf)((vu)z[i] << 23);
#undef EACH
}

INLINE void vexp2_each(int count, float c, float least, vf *x) {
    vexp2_of(count, c, least, 1, 0, 1, NULL, x);
}

INLINE void vexp2_lifted(int count, float c, float least, float lift, float lag, vf *x) {
    vexp2_of(count, c, least, lift, lag, 1, NULL, x);
}

/* x[i] = 2·2^(c·x[i] - rest - whole), which is 0 or a normal number. */
INLINE void vexp2_twice(int count, float c, int period, const exponent_rest *less, vf *x) {
    vexp2_of(count, c, 0, 2, 0, period, less, x);
}

INLINE vf vexp2_times(float c, vf x) {
    vexp2_each(1, c, -127 / c, &x);
    return x;
}

INLINE vf vexp2(vf x) {
    return vexp2_times(1, x);
}

/* The most vectors that vtanh_each() takes. */
#define TANH_MOST 4

/* tanh of x[i]: an odd polynomial below 0.625 (relative error 4.4e-9), 1 - 2/(exp(2x) + 1) above: of what is taken from 1 the roundings
 * are small beside the last one, while (1 - e)/(1 + e) has three of full size. Where all lanes are below, which scores beside their cap
 * mostly are, nothing else is formed. */
INLINE void vtanh_each(int count, vf *x) {
    vf s[TANH_MOST], p[TANH_MOST];
    vi wide = splat_int(0);
#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < count; i++)
    EACH s[i] = x[i] * x[i];
    EACH wide |= ~(s[i] < 0.390625f);
    EACH p[i] = -0x1.75e1b2p-8f * s[i] + 0x1.522696p-6f;
    EACH p[i] = p[i] * s[i] - 0x1.b83c58p-5f;
    EACH p[i] = p[i] * s[i] + 0x1.110726p-3f;
    EACH p[i] = p[i] * s[i] - 0x1.555532p-2f;
    EACH p[i] = x[i] + x[i] * s[i] * p[i];
    if (any_lane(wide)) {
        vf e[TANH_MOST];
        EACH e[i] = 1 - 2.88539008177792681f * (vf)((vi)x[i] & INT32_MAX);
        vexp2_each(count, 1, -127, e); /* 2·exp(-2|x|) */
        EACH {
            const vf large = (vf)((vi)(1 - e[i] / (1 + 0.5f * e[i])) | ((vi)x[i] & INT32_MIN));
            p[i] = select_float(s[i] < 0.390625f, p[i], large);
        }
    }
    EACH x[i] = p[i];
#undef EACH
}

INLINE vf vtanh(vf x) {
    vtanh_each(1, &x);
    return x;
}

/* Of VL counters of Philox the even or the odd ones, in the low halves of lanes; what the high ones hold is not looked at. */
typedef struct philox_lanes {
    vl c[4];
} philox_lanes;

INLINE philox_lanes philox_rounds(philox_lanes x, uint32_t k0, uint32_t k1) {
#pragma GCC unroll 7
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        const vl p0 = long_product(x.c[0], PHILOX_M0), p1 = long_product(x.c[2], PHILOX_M1);
        x.c[0] = p1 >> 32 ^ x.c[1] ^ (uint64_t)k0;
        x.c[1] = p1;
        x.c[2] = p0 >> 32 ^ x.c[3] ^ (uint64_t)k1;
        x.c[3] = p0;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return x;
}

/* dropout_words() of philox.h for VL rows (bh, i) at once: keys 8*j8 .. 8*j8+7. */
INLINE void vdropout_words(uint64_t seed, uint64_t offset, vu bh, vu i, uint32_t j8, vu words[4]) {
    const vl none = {0}, row = (vl)(i ^ (uint32_t)(offset >> 32));
    philox_lanes even = {{none + j8, (vl)bh, row, none + (uint32_t)offset}},
                 odd = {{even.c[0], (vl)bh >> 32, row >> 32, even.c[3]}};
    even = philox_rounds(even, (uint32_t)seed, (uint32_t)(seed >> 32));
    odd = philox_rounds(odd, (uint32_t)seed, (uint32_t)(seed >> 32));
    for (int w = 0; w < 4; w++)
        words[w] = (vu)((even.c[w] & 0xffffffff) | odd.c[w] << 32);
}

#endif

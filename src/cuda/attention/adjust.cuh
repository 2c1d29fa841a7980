/* SPDX-License-Identifier: Apache-2.0
 * Softcap and ALiBi on accumulators of 16 rows and N columns, for the forwards and backwards of 16 bits. */
#ifndef HEDDLE_CUDA_ATTENTION_ADJUST_CUH
#define HEDDLE_CUDA_ATTENTION_ADJUST_CUH

#include "cuda/attention/common.cuh"
#include "cuda/attention/sm90/contract.h"

/* Right to 2^-22 of 1, of which little is left where a softcap is far above the scores. tanh.approx is to 2^-11 of itself, as the rounding of
 * bfloat16; in float16, for which that is half of its rounding, this is in its place, up to SM90_MOST_CAP. */
INLINE float tanh_of(float x) {
    return fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(x * (2.0f * LOG2E))), 1.0f);
}

/* Right to 2^-20 of itself: up to a quarter a polynomial, fitted to 2^-21. */
INLINE float tanh_of_small(float x) {
    const float square = x * x, near = fmaf(square * x, fmaf(square, 0x1.07b578p-3f, -0x1.553e5cp-2f), x);
    return square < 0.0625f ? near : tanh_of(x);
}

/* Of no more keys than this the log-sum-exp of a row shows tanh.approx; over many that averages out. */
#define FEW_SHOWN 16

/* q·k -> tanh(q·k·in). exact: a row may see few keys; small: the cap may be far above the scores. */
template <typename T, int N> INLINE void cap_scores(float in, float (*s)[4], bool exact = false, bool small = false) {
    if (!exact)
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[y][e] = tanh_approx(s[y][e] * in);
    else if (small)
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[y][e] = tanh_of_small(s[y][e] * in);
    else
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[y][e] = tanh_of(s[y][e] * in);
}

/* q·k -> tanh(q·k·in), right in every element: of log-sum-exps of 16 bits, too, of which tanh.approx would be seen wherever few keys have most
 * of a row's weight. small: as above. */
template <int N> INLINE void cap_scores_well(float in, bool small, float (*s)[4]) {
    const float twice = in * (2.0f * LOG2E);
    if (small)
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[y][e] = tanh_of_small(s[y][e] * in);
    else
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[y][e] = fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(s[y][e] * twice)), 1.0f);
}

/* S = S·by - slope·|distance|, which is that of the first row from column 0 of this lane on; in the second, 8 below, each column has what
 * the column 8 before it has in the first. left: it falls along a row by one from column to column, 1; it grows, -1; it does what it likes,
 * 0. */
template <int N> INLINE void add_slopes(float slope, float distance, int left, float by, float (*s)[4]) {
    const float step = left > 0 ? slope : -slope, first = -step * distance;
    if (left) {
        float before[2] = {fmaf(step, -8.0f, first), fmaf(step, -7.0f, first)};
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float now = fmaf(step, (float)(y * 8 + e), first);
                s[y][e] = fmaf(s[y][e], by, now);
                s[y][2 + e] = fmaf(s[y][2 + e], by, before[e]);
                before[e] = now;
            }
    } else {
        float before[2] = {-slope * fabsf(distance + 8.0f), -slope * fabsf(distance + 7.0f)};
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float now = -slope * fabsf(distance - (float)(y * 8 + e));
                s[y][e] = fmaf(s[y][e], by, now);
                s[y][2 + e] = fmaf(s[y][2 + e], by, before[e]);
                before[e] = now;
            }
    }
}

template <int N> INLINE void scale_scores(float by, float (*s)[4]) {
    if (by != 1.0f) /* the scale is no positive number */
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[y][e] *= by;
}

#endif

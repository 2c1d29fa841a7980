/* SPDX-License-Identifier: Apache-2.0
 * The online softmax of the forward for Hopper in float32: maximum and sum of a lane's two rows, and scores of any magnitude. */
#ifndef HEDDLE_CUDA_ATTENTION_FWD_SOFTMAX32_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_FWD_SOFTMAX32_SM90_CUH

#include "cuda/attention/sm90_f32/fwd.cuh"

/* Of the two rows that a lane has a part of. P = exp2(S·c + offset), where offset = SHIFT - the maximum so far, which is held in units
 * that all tiles share: c is power_of(c)·mantissa_of(c), and the mantissa is that of scale·log2(e). */
struct softmax_state {
    float max[2], offset[2], sum[2]; /* sum: this lane's part */
};

INLINE float shrink_far(float before, float offset, float top, float new_offset, float mantissa) {
    if (before == top)
        return 1.0f;
    if (is_far(before, mantissa))
        return exp2_approx(is_far(top, mantissa) ? (before - top) * mantissa
                                                 : fmaf(before, mantissa, new_offset) - SHIFT);
    return exp2_approx(SHIFT - fmaf(top, mantissa, offset));
}

/* Of a row whose maximum is far, or was: the maximum is subtracted from S. */
INLINE void subtract_far(float before, float old_offset, float top, float mantissa, float power, int half,
                         float (*s)[4], float *offset, float *shrink) {
    if (!is_far(top, mantissa) && !is_far(before, mantissa))
        return;
    if (before != -CUDART_INF_F)
        *shrink = shrink_far(before, old_offset, top, *offset, mantissa);
    if (!is_far(top, mantissa))
        return;
    *offset = SHIFT;
#pragma unroll
    for (int y = 0; y < SPLIT_ROWS / 8; y++) {
        s[y][2 * half] -= top / power;
        s[y][2 * half + 1] -= top / power;
    }
}

/* S -> P; what was summed before has to be multiplied by shrink, unless false is returned. */
INLINE bool online_softmax(softmax_state *state, float c, float (*s)[4], float shrink[2]) {
    bool grows = false, far = false;
    float before[2], offset[2];
    const float mantissa = mantissa_of(c);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
        for (int y = 1; y < SPLIT_ROWS / 8; y++)
            top = fmaxf(top, fmaxf(s[y][2 * half], s[y][2 * half + 1]));
        before[half] = state->max[half];
        top = fmaxf(before[half], quad_max(top) * power_of(c));
        const float base = __fmul_rn(top, mantissa);
        offset[half] = top == -CUDART_INF_F ? 0.0f : SHIFT - base;
        shrink[half] = before[half] == -CUDART_INF_F ? 0.0f : exp2_approx(offset[half] - state->offset[half]);
        far |= fabsf(offset[half]) >= FAR - SHIFT || state->offset[half] == SHIFT;
        grows |= top > before[half];
        state->max[half] = top;
    }
    if (__any_sync(ALL_LANES, far))
#pragma unroll
        for (int half = 0; half < 2; half++)
            subtract_far(before[half], state->offset[half], state->max[half], mantissa, power_of(c), half, s,
                         &offset[half], &shrink[half]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state->offset[half] = offset[half];
        state->sum[half] *= shrink[half];
    }
#pragma unroll
    for (int y = 0; y < SPLIT_ROWS / 8; y++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = exp2_approx(fmaf(s[y][e], c, state->offset[e / 2]));
        state->sum[0] += s[y][0] + s[y][1];
        state->sum[1] += s[y][2] + s[y][3];
    }
    return __any_sync(ALL_LANES, grows);
}

/* Scores of rows and keys that are not finite become NaN. rows: the marks of this thread's two, in bits 0 and 8. */
INLINE void mark_scores(uint32_t rows, const uint32_t keys[2], float (*s)[4]) {
    const int column = fragment_column();
#pragma unroll
    for (int y = 0; y < SPLIT_ROWS / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (rows >> e / 2 * 8 & 1 || keys[y / 4] >> (y % 4 * 8 + column + e % 2) & 1)
                s[y][e] = CUDART_NAN_F;
}

#endif

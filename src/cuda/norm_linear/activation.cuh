/* SPDX-License-Identifier: Apache-2.0
 * Activations on CUDA, in float32: by the numbers of src/activation.h. What is rounded to 16 bits has fewer terms. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_ACTIVATION_CUH
#define HEDDLE_CUDA_NORM_LINEAR_ACTIVATION_CUH

#include "activation.h"
#include "cuda/element.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/ptx.cuh"

INLINE float held_at(float u, float limit) {
    return u > limit ? limit : u < -limit ? -limit : u; /* NaN stays NaN */
}

/* act(u), and act'(u) to *slope, of numbers that stay in float32. GELU by its tail; the others by a sigmoid. */
INLINE float gelu(float u, float *slope, float) {
    const float c = held_at(u, GELU_LIMIT), a = fabsf(c), t = __fdividef(1, 1 + GELU_P * a);
    const float e = exp2_approx(-HALF_LOG2_E * (a * a));
    float p = 0;
#define P(term) p = p * t + term;
    GELU_TERMS(P)
#undef P
    const float tail = e * t * p, share = c > 0 ? 1 - tail : tail;
    *slope = share + c * e * NORMAL_AT_0;
    return u * share;
}

INLINE float by_sigmoid(float u, float limit, float linear, float cubic, float *slope, float) {
    const float c = held_at(u, limit), square = c * c;
    const float e = exp2_approx(-LOG2_E * c * (linear + cubic * square)), share = __fdividef(1, 1 + e);
    *slope = share + c * (linear + 3 * cubic * square) * (share * (e * share));
    return u * share;
}

/* The same of numbers on their way to 16 bits. What is held at a limit loses a NaN, which the tail, or the share, has. */
template <typename T> INLINE float gelu(float u, float *slope, T) {
    const float a = fabsf(u), held = fminf(a, GELU_LIMIT), t = reciprocal_approx(fmaf(GELU16_P, a, 1.0f));
    const float e = exp2_approx(-HALF_LOG2_E * held * a);
    float p = 0;
#define P(term) p = fmaf(p, t, term);
    GELU16_TERMS(P)
#undef P
    const float tail = e * t * p, bend = fmaf(held * e, NORMAL_AT_0, -tail);
    *slope = u > 0 ? 1 + bend : -bend;
    return fmaf(-held, tail, fmaxf(u, 0.0f));
}

template <typename T> INLINE float by_sigmoid(float u, float limit, float linear, float cubic, float *slope, T) {
    const float c = fminf(fmaxf(u, -limit), limit), square = c * c;
    const float e = exp2_approx(-LOG2_E * u * fmaf(cubic, square, linear)), share = reciprocal_approx(1.0f + e);
    *slope = fmaf(share * c * fmaf(3.0f * cubic, square, linear), 1.0f - share, share);
    return u * share;
}

/* v[N] = act of it, and the derivative to slope[N], of what becomes T; the activation is the same for all threads. */
template <typename T, int N> INLINE void activate_both(int activation, float v[N], float slope[N]) {
    const bool silu = activation == HEDDLE_SILU_NUMBER;
    const float limit = silu ? SILU_LIMIT : TANH_LIMIT, linear = silu ? 1 : TANH_LINEAR, cubic = silu ? 0 : TANH_CUBIC;
    if (activation == HEDDLE_GELU_NUMBER) {
#pragma unroll
        for (int x = 0; x < N; x++)
            v[x] = gelu(v[x], slope + x, T());
        return;
    }
#pragma unroll
    for (int x = 0; x < N; x++)
        v[x] = by_sigmoid(v[x], limit, linear, cubic, slope + x, T());
}

/* v[N] = act of it, or the derivative. */
template <typename T, int N, bool SLOPE> INLINE void activate(int activation, float v[N]) {
    float slope[N];
    activate_both<T, N>(activation, v, slope);
#pragma unroll
    for (int x = 0; x < N && SLOPE; x++)
        v[x] = slope[x];
}

#endif

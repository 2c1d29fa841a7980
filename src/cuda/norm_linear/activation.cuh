/* SPDX-License-Identifier: Apache-2.0
 * Activations on CUDA, in float32: by the numbers of src/activation.h. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_ACTIVATION_CUH
#define HEDDLE_CUDA_NORM_LINEAR_ACTIVATION_CUH

#include "activation.h"
#include "cuda/element.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/ptx.cuh"

INLINE float held_at(float u, float limit) {
    return u > limit ? limit : u < -limit ? -limit : u; /* NaN stays NaN */
}

/* act(u), and act'(u) to *slope. GELU by its tail; the others by a sigmoid. */
INLINE float gelu(float u, float *slope) {
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

INLINE float by_sigmoid(float u, float limit, float linear, float cubic, float *slope) {
    const float c = held_at(u, limit), square = c * c;
    const float e = exp2_approx(-LOG2_E * c * (linear + cubic * square)), share = __fdividef(1, 1 + e);
    *slope = share + c * (linear + 3 * cubic * square) * (share * (e * share));
    return u * share;
}

/* v[N] = act of it, or the derivative; the activation is the same for all threads. */
template <int N, bool SLOPE> INLINE void activate(int activation, float v[N]) {
    const bool silu = activation == HEDDLE_SILU_NUMBER;
    const float limit = silu ? SILU_LIMIT : TANH_LIMIT, linear = silu ? 1 : TANH_LINEAR, cubic = silu ? 0 : TANH_CUBIC;
    float slope;
    if (activation == HEDDLE_GELU_NUMBER) {
#pragma unroll
        for (int x = 0; x < N; x++) {
            const float y = gelu(v[x], &slope);
            v[x] = SLOPE ? slope : y;
        }
        return;
    }
#pragma unroll
    for (int x = 0; x < N; x++) {
        const float y = by_sigmoid(v[x], limit, linear, cubic, &slope);
        v[x] = SLOPE ? slope : y;
    }
}

/* v[N] = act of it, and the derivative to slope[N]. */
template <int N> INLINE void activate_both(int activation, float v[N], float slope[N]) {
    const bool silu = activation == HEDDLE_SILU_NUMBER;
    const float limit = silu ? SILU_LIMIT : TANH_LIMIT, linear = silu ? 1 : TANH_LINEAR, cubic = silu ? 0 : TANH_CUBIC;
    if (activation == HEDDLE_GELU_NUMBER) {
#pragma unroll
        for (int x = 0; x < N; x++)
            v[x] = gelu(v[x], slope + x);
        return;
    }
#pragma unroll
    for (int x = 0; x < N; x++)
        v[x] = by_sigmoid(v[x], limit, linear, cubic, slope + x);
}

#endif

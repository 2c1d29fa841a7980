/* SPDX-License-Identifier: Apache-2.0
 * What float32 rows lack to weights that sum to 1, by the sums of dq. */
#ifndef HEDDLE_CUDA_ATTENTION_SETTLE_CUH
#define HEDDLE_CUDA_ATTENTION_SETTLE_CUH

#include "cuda/attention/common.cuh"

/* The weight of the sink of head x in a row, as the row's numbers give weights; 0 where there is none. */
INLINE float sink_weight(const attention_params &p, int64_t x, float base, float rest) {
    const float sink = sink_of(p, x, true), high = sink * p.lse_factor;
    if (sink == -CUDART_INF_F)
        return 0.0f;
    const float low = fmaf(sink, p.lse_factor, -high) + sink * p.lse_factor_low;
    return exp2_approx(fmaf(-base, p.base_log2, high) + low) * rest;
}

/* What a row of dQ of head x is multiplied with, by what its P sums to. *rest takes it along, for whoever makes weights of the row behind it. */
INLINE float settle_row(const attention_params &p, int64_t x, float sum, float base, float *rest) {
    const float by = weights_to_one(p, sum + sink_weight(p, x, base, *rest));
    *rest *= by;
    return by;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * D = rowsum(P∘dP) is of the keys that a call has: whether these are all that the row's lse is of. */
#ifndef HEDDLE_CUDA_ATTENTION_WHOLE_ROW_CUH
#define HEDDLE_CUDA_ATTENTION_WHOLE_ROW_CUH

#include "cuda/attention/common.cuh"

/* Are a row's keys all that lse is of, by what their P and the sink's sum to? Where it is of more, in other calls, so is D. */
template <typename T> INLINE bool has_all_keys(const attention_params &p, int64_t x, float sum, float lse) {
    const float of_sink = exp2_approx((sink_of(p, x, true) - lse) * LOG2E);
    return fabsf(sum + of_sink - 1.0f) <=
           fmaf(fminf(fabsf(lse), 4096.0f), 0x1p-23f, sizeof(T) == 4 ? 0x1p-17f : 0x1p-12f);
}

#endif

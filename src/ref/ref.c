/* SPDX-License-Identifier: Apache-2.0
 * The reference backend: the formulas of heddle.h in float64, the specification and the oracle of all the others. */
#include "ref.h"

#include "../backend.h"
#include "../status.h"

const char *heddle__ref_variant(heddle_dtype dtype, heddle_pass pass) {
    int backward = pass == HEDDLE_BACKWARD;
    switch (dtype) {
    case HEDDLE_F32: return backward ? "bwd_f32" : "fwd_f32";
    case HEDDLE_BF16: return backward ? "bwd_bf16" : "fwd_bf16";
    case HEDDLE_F16: return backward ? "bwd_f16" : "fwd_f16";
    case HEDDLE_F64: return backward ? "bwd_f64" : "fwd_f64";
    }
    return "unknown";
}

static heddle_status available(void) {
    return HEDDLE_OK;
}

static void describe(char *text, size_t n) {
    heddle__copy_text(text, n, "float64, one thread");
}

const backend heddle_ref_backend = {
    .available = available,
    .describe = describe,
    .plan_attention = heddle__ref_plan_attention,
    .plan_norm_linear = heddle__ref_plan_norm_linear,
    .run_attention = heddle__ref_run_attention,
    .run_norm_linear = heddle__ref_run_norm_linear,
    .merge = heddle__ref_merge,
    .append = heddle__ref_append,
};

/* SPDX-License-Identifier: Apache-2.0
 * All kernels of one ISA, and its table. The including file has set VL, ISA_NAME and ISA_TABLE; one that is for bfloat16 alone,
 * also ISA_OTHERS, the table for the other types. */
#include "attention_sums.h"
#include "cpu.h"
#include "norm_linear.h"

const cpu_kernels ISA_TABLE = {
    .isa = ISA_NAME,
#ifdef ISA_OTHERS
    .others = &ISA_OTHERS,
#endif
#ifndef HAVE_BF16_TILES
    .widens = true,
#endif
    .plan_attention = plan_attention,
    .plan_norm_linear = plan_norm_linear,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
    .panel_bytes = panel_bytes,
    .goes_by_panels = goes_by_panels,
    .fill_panels = fill_panels,
    .norm_linear_forward = norm_linear_forward,
    .norm_linear_backward = norm_linear_backward,
};

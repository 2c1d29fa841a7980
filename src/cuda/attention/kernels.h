/* SPDX-License-Identifier: Apache-2.0
 * The table of attention's kernels, as attention.def lists them, for the plan to choose from. C only. */
#ifndef HEDDLE_CUDA_ATTENTION_KERNELS_H
#define HEDDLE_CUDA_ATTENTION_KERNELS_H

#include "cuda/attention/attention.h"

typedef enum kernel_pass {
    PASS_fwd,
    PASS_combine,
    PASS_weights,
    PASS_prep,
    PASS_dkdv,
    PASS_dq,
    PASS_dbias,
    PASS_dsinks,
    PASS_bwd,
    PASS_split,
    PASS_gather,
    PASS_light,
    PASS_mask,
    PASS_lse,
    PASS_merge,
    PASS_append,
    PASS_seen,
    PASS_collect,
    PASSES
} kernel_pass;

typedef enum kernel_variant {
    VARIANT_lean,
    VARIANT_full,
    VARIANT_decode,
    VARIANT_long,
    VARIANT_plain,
    VARIANT_capped,
    VARIANT_biased,
    VARIANT_dbiased,
    VARIANT_keyed,
    VARIANT_masked,
    VARIANT_narrow,
    VARIANT_dropped,
    VARIANT_maskdrop,
    VARIANT_undropped,
    VARIANT_adding,
    VARIANT_paged,
    VARIANT_cappages,
    VARIANT_least,
    VARIANT_rich,
    VARIANT_slim,
    VARIANT_slight,
    VARIANT_bytes,
    VARIANT_bytepages,
    VARIANT_bytefull,
    VARIANTS
} kernel_variant;

typedef enum kernel_family { FAMILY_sm80, FAMILY_sm90, FAMILY_small, FAMILY_short, KERNEL_FAMILIES } kernel_family;

typedef struct kernel_row {
    kernel_pass pass;
    heddle_dtype dtype;
    int dim;
    kernel_variant variant;
    kernel_family family;
    int warps, own, block;
} kernel_row;

/* By enum cuda_kernel. */
extern const kernel_row heddle__cuda_attention_kernels[ATTENTION_KERNELS];

/* Dynamic shared memory, as the contract of its family has it. */
size_t heddle__cuda_shared_bytes(const kernel_row *k);

#endif

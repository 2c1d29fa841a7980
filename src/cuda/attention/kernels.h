/* SPDX-License-Identifier: Apache-2.0
 * The table of attention's kernels, as attention/attention.def lists them, for the plan to choose from. C only. */
#ifndef HEDDLE_CUDA_ATTENTION_KERNELS_H
#define HEDDLE_CUDA_ATTENTION_KERNELS_H

#include "cuda/attention/params.h"

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
    PASS_finish,
    PASS_rows,
    PASSES
} kernel_pass;

typedef enum kernel_variant { VARIANT_lean, VARIANT_full, VARIANT_decode, VARIANT_long, VARIANT_plain } kernel_variant;

typedef enum kernel_family { FAMILY_sm80, FAMILY_sm90, FAMILY_small } kernel_family;

typedef struct kernel_row {
    kernel_pass pass;
    heddle_dtype dtype;
    int dim;
    kernel_variant variant;
    kernel_family family;
    int warps, tiles, block;
    const char *symbol;
} kernel_row;

/* By enum attention_kernel. */
extern const kernel_row heddle__cuda_attention_kernels[ATTENTION_KERNELS];

/* Warps of the family sm80 that own the same rows: share::count in attention_tile.cuh. */
static inline int warps_of_a_row(const kernel_row *k) {
    return k->dim <= 256 ? 1 : k->dtype == HEDDLE_F32 ? 4 : 2;
}

/* Rows of the operand that a block owns. */
static inline int rows_of(const kernel_row *k) {
    if (k->family == FAMILY_sm90)
        return k->tiles * 64;
    if (k->family == FAMILY_small)
        return k->tiles;
    if (k->variant == VARIANT_decode)
        return 16;
    return k->variant == VARIANT_plain ? 1 : k->warps / warps_of_a_row(k) * k->tiles * 16;
}

/* Dynamic shared memory, as the layouts in the .cu files have it. */
size_t heddle__cuda_shared_bytes(const kernel_row *k);

/* The kernel with the smallest head dim that will do; -1 if none does. */
int heddle__cuda_find_attention(const heddle_attention *a, const attention_device *device, kernel_pass pass,
                                kernel_variant variant, kernel_family family);

#endif

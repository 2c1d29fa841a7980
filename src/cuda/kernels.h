/* SPDX-License-Identifier: Apache-2.0
 * Every kernel by its number: those of attention, then those of norm-linear, as their tables list them. C only; pure. */
#ifndef HEDDLE_CUDA_KERNELS_H
#define HEDDLE_CUDA_KERNELS_H

/* ATTENTION_fwd_bf16_d64_lean_sm80, ..., NORM_LINEAR_fwd_bf16_sm80, ... */
enum cuda_kernel {
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    ATTENTION_##pass##_##dtype##_d##dim##_##variant##_##family,
#include "cuda/attention/attention.def"
#undef K
    ATTENTION_KERNELS,
    BEFORE_NORM_LINEAR = ATTENTION_KERNELS - 1,
#define K(pass, dtype, family, threads, module) NORM_LINEAR_##pass##_##dtype##_##family,
#include "cuda/norm_linear/norm_linear.def"
#undef K
    CUDA_KERNELS
};

enum cuda_module {
#define M(name, source) MODULE_##name,
#include "cuda/modules.def"
#undef M
    CUDA_MODULES
};

typedef struct cuda_kernel_row {
    const char *symbol;
    enum cuda_module module;
    unsigned threads;
} cuda_kernel_row;

extern const cuda_kernel_row heddle__cuda_kernels[CUDA_KERNELS];

#endif

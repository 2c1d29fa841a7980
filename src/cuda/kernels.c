/* SPDX-License-Identifier: Apache-2.0
 * The symbol of each kernel, the module that it lies in, the threads of a block. Pure. */
#include "cuda/kernels.h"

const cuda_kernel_row heddle__cuda_kernels[CUDA_KERNELS] = {
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    {"heddle_attention_" #pass "_" #dtype "_d" #dim "_" #variant "_" #family, MODULE_##module, 32 * warps},
#include "cuda/attention/attention.def"
#undef K
#define K(pass, dtype, family, threads, module)                                                                        \
    {"heddle_norm_linear_" #pass "_" #dtype "_" #family, MODULE_##module, threads},
#include "cuda/norm_linear/norm_linear.def"
#undef K
};

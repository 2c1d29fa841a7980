/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear in bfloat16 and float16; "any": for tensors that cp.async cannot read 16 bytes at a time. */
#include "cuda/norm_linear/sm80/gemm.cuh"

#define KERNELS(dtype)                                                                                                 \
    GEMM_KERNEL(fwd, fwd_##dtype, dtype, dtype, 1, true)                                                               \
    GEMM_KERNEL(dx, dx_##dtype, dtype, dtype, 1, true)                                                                 \
    GEMM_KERNEL(dw, dw_##dtype, dtype, dtype, 1, true)                                                                 \
    GEMM_KERNEL(fwd, fwd_any_##dtype, dtype, dtype, 1, false)                                                          \
    GEMM_KERNEL(dx, dx_any_##dtype, dtype, dtype, 1, false)                                                            \
    GEMM_KERNEL(dw, dw_any_##dtype, dtype, dtype, 1, false)

KERNELS(bf16)
KERNELS(f16)

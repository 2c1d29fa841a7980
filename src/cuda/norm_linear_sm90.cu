/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear in bfloat16 and float16 on Hopper: tiles of 128x256, and of 128x128 where that keeps more
 * multiprocessors busy. */
#include "norm_linear_gemm_sm90.cuh"

#define KERNELS(dtype)                                                                                                 \
    GEMM90_KERNEL(FWD, fwd_##dtype, dtype, 256)                                                                        \
    GEMM90_KERNEL(DX, dx_##dtype, dtype, 256)                                                                          \
    GEMM90_KERNEL(DW, dw_##dtype, dtype, 256)                                                                          \
    GEMM90_KERNEL(FWD, fwd_n128_##dtype, dtype, 128)                                                                   \
    GEMM90_KERNEL(DX, dx_n128_##dtype, dtype, 128)                                                                     \
    GEMM90_KERNEL(DW, dw_n128_##dtype, dtype, 128)

KERNELS(bf16)
KERNELS(f16)

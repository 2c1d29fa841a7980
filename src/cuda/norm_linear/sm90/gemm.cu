/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear in bfloat16 and float16 on Hopper: tiles of 128 rows and 256 columns, or of fewer where
 * that keeps more multiprocessors busy. */
#include "cuda/norm_linear/sm90/gemm.cuh"

#define WIDTH_KERNELS(dtype, width)                                                                                    \
    GEMM90_KERNEL(FWD, fwd_n##width##_##dtype, dtype, width)                                                           \
    GEMM90_KERNEL(DX, dx_n##width##_##dtype, dtype, width)                                                             \
    GEMM90_KERNEL(DW, dw_n##width##_##dtype, dtype, width)
#define KERNELS(dtype)                                                                                                 \
    WIDTH_KERNELS(dtype, 96)                                                                                           \
    WIDTH_KERNELS(dtype, 128)                                                                                          \
    WIDTH_KERNELS(dtype, 160)                                                                                          \
    WIDTH_KERNELS(dtype, 192)                                                                                          \
    WIDTH_KERNELS(dtype, 256)

KERNELS(bf16)
KERNELS(f16)

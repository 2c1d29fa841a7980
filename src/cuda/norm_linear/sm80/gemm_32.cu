/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear in float32: three float16 products of 22-bit operands, or with HEDDLE_TF32 one of 11-bit
 * operands, TF32's precision at twice its rate. */
#include "cuda/norm_linear/sm80/gemm.cuh"

GEMM_KERNEL(fwd, fwd_f32, float, f16, 3, true)
GEMM_KERNEL(dx, dx_f32, float, f16, 3, true)
GEMM_KERNEL(dw, dw_f32, float, f16, 3, true)
GEMM_KERNEL(fwd, fwd_tf32, float, f16, 1, true)
GEMM_KERNEL(dx, dx_tf32, float, f16, 1, true)
GEMM_KERNEL(dw, dw_tf32, float, f16, 1, true)

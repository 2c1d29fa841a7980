/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear by mma.sync. In bfloat16 and float16; "any": for tensors that cp.async cannot read 16 bytes at a time.
 * In float32: three float16 products of 22-bit operands, or with HEDDLE_TF32 one of 11-bit operands, TF32's precision at twice its
 * rate. */
#include "cuda/norm_linear/sm80/gemm.cuh"

/* The product; are its operands aligned? */
#define product_fwd fwd, true
#define product_dx dx, true
#define product_dw dw, true
#define product_fwd_any fwd, false
#define product_dx_any dx, false
#define product_dw_any dw, false
/* Of the tensors, of the operands; how many products. */
#define types_bf16 bf16, bf16, 1
#define types_f16 f16, f16, 1
#define types_f32 float, f16, 3
#define types_tf32 float, f16, 1
#define KERNEL(name, types, ...) KERNEL_OF(name, types, __VA_ARGS__)
#define KERNEL_OF(name, T, OPERAND, TERMS, product, ALIGNED) GEMM_KERNEL(product, name, T, OPERAND, TERMS, ALIGNED)
#define K(pass, dtype, family, threads, module) KERNEL(pass##_##dtype, types_##dtype, product_##pass)

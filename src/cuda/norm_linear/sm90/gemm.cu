/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear in bfloat16 and float16 on Hopper: tiles of 128 rows and 256 columns, or of fewer where
 * that keeps more multiprocessors busy. */
#include "cuda/norm_linear/sm90/gemm.cuh"

#define product_fwd_n96 FWD, 96
#define product_fwd_n128 FWD, 128
#define product_fwd_n160 FWD, 160
#define product_fwd_n192 FWD, 192
#define product_fwd_n256 FWD, 256
#define product_fwd_raw_n256 RAW, 256
#define product_fwd_gate_n96 GATE, 96
#define product_fwd_gate_n128 GATE, 128
#define product_fwd_gate_n160 GATE, 160
#define product_fwd_gate_n192 GATE, 192
#define product_fwd_gate_n256 GATE, 256
#define product_dx_n96 DX, 96
#define product_dx_n128 DX, 128
#define product_dx_n160 DX, 160
#define product_dx_n192 DX, 192
#define product_dx_n256 DX, 256
#define product_dw_n96 DW, 96
#define product_dw_n128 DW, 128
#define product_dw_n160 DW, 160
#define product_dw_n192 DW, 192
#define product_dw_n256 DW, 256
#define KERNEL(name, dtype, ...) GEMM90_KERNEL(name, dtype, __VA_ARGS__)
#define K(pass, dtype, family, threads, module) KERNEL(pass##_##dtype, dtype, product_##pass)

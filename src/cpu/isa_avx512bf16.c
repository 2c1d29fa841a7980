/* SPDX-License-Identifier: Apache-2.0
 * The kernels for AVX-512 with fast products of bfloat16 pairs. What is not bfloat16 is AVX-512's. */
#define VL 16
#define ISA_NAME "avx512bf16"
#define ISA_TABLE heddle__cpu_avx512bf16
#define ISA_OTHERS heddle__cpu_avx512
#include "vec_avx512bf16.h"

#include "kernels.h"

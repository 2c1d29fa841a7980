/* SPDX-License-Identifier: Apache-2.0
 * The kernels for AMX with bfloat16. What is not bfloat16 has nothing to gain from it: that is AVX-512's. */
#define VL 16
#define TILE_VECTORS 4
#define ISA_NAME "amx"
#define ISA_TABLE heddle__cpu_amx
#define ISA_OTHERS heddle__cpu_avx512
#include "vec_amx.h"

#include "kernels.h"

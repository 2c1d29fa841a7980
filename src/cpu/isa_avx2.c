/* SPDX-License-Identifier: Apache-2.0
 * The kernels for AVX2 with FMA and F16C. */
#define VL 8
#define ISA_NAME "avx2"
#define ISA_TABLE heddle__cpu_avx2
#include "vec_avx2.h"

#include "kernels.h"

/* SPDX-License-Identifier: Apache-2.0
 * The kernels for AVX-512. */
#define VL 16
#define ISA_NAME "avx512"
#define ISA_TABLE heddle__cpu_avx512
#include "vec_avx512.h"

#include "kernels.h"

/* SPDX-License-Identifier: Apache-2.0
 * The kernels for NEON, which every AArch64 processor has. */
#define VL 4
#define ISA_NAME "neon"
#define ISA_TABLE heddle__cpu_neon
#include "vec_neon.h"

#include "kernels.h"

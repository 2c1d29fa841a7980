/* SPDX-License-Identifier: Apache-2.0
 * The kernels for whatever the compiler targets by itself: SSE2 on x86-64. */
#define VL 4
#define ISA_NAME "baseline"
#define ISA_TABLE heddle__cpu_baseline
#include "vec.h"

#include "kernels.h"

/* SPDX-License-Identifier: Apache-2.0
 * The kernels for SVE with vectors of 256 bits, on which alone they run: the compiler is told the length. */
#define VL 8
#define ISA_NAME "sve256"
#define ISA_TABLE heddle__cpu_sve256
#include "vec_sve256.h"

#include "kernels.h"

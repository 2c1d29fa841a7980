/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of norm-linear's products for sm80 both count with. C and CUDA C. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_SM80_CONTRACT_H
#define HEDDLE_CUDA_NORM_LINEAR_SM80_CONTRACT_H

#include "cuda/norm_linear/contract.h"

#define GEMM80_STAGES 3

/* Terms of a stage, of operands in so many planes; bytes of both operands' planes. */
CONTRACT int gemm80_depth(int planes) {
    return 64 / planes;
}
#define GEMM80_STAGE_BYTES (2 * GEMM_TILE * 64 * 2)
#define GEMM80_BYTES (GEMM80_STAGES * GEMM80_STAGE_BYTES)

/* dw: sums over the rows of W∘G, of so many tiles of rows: of each half of a tile. */
CONTRACT int64_t gemm80_sums(int64_t row_tiles) {
    return 2 * row_tiles;
}

#endif

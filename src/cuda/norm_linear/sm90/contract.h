/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of norm-linear's products for Hopper both count with. C and CUDA C. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_SM90_CONTRACT_H
#define HEDDLE_CUDA_NORM_LINEAR_SM90_CONTRACT_H

#include "cuda/norm_linear/contract.h"

/* Columns that a tile may have, the most first: W(pass, columns) of each. */
#define GEMM90_WIDEST 256
#define GEMM90_WIDTHS(W, pass) W(pass, 256), W(pass, 192), W(pass, 160), W(pass, 128), W(pass, 96)

/* Terms of a stage; a box of 64 x 64 elements; warps that multiply, and bytes in which each lays its results down: 16 rows of 64. */
#define GEMM90_DEPTH 64
#define GEMM90_BOX_BYTES (64 * GEMM90_DEPTH * 2)
#define GEMM90_WARPS 8
#define GEMM90_STAGING_BYTES (16 * 128)
#define GEMM90_ALIGNMENT 1024

/* Boxes of B beside each other; where B is not transposed these are rows of one box. */
CONTRACT int gemm90_b_boxes(int width) {
    return (width + 63) / 64;
}
CONTRACT int gemm90_stage_bytes(int width) {
    return GEMM_TILE * GEMM90_DEPTH * 2 + gemm90_b_boxes(width) * GEMM90_BOX_BYTES;
}
CONTRACT int gemm90_stages(int width) {
    return 192 * 1024 / gemm90_stage_bytes(width);
}

/* What the helpers bring of the columns and rows of a tile: a pair of floats each. */
CONTRACT int gemm90_vector_bytes(int width) {
    return (width + GEMM_TILE) * 8;
}

/* Stages; results; two tiles' vectors; barriers: two for each stage and each tile. The widest tile takes the most. */
CONTRACT int gemm90_layout_bytes(int width) {
    return gemm90_stages(width) * (gemm90_stage_bytes(width) + 2 * 8) + GEMM90_WARPS * GEMM90_STAGING_BYTES +
           2 * (gemm90_vector_bytes(width) + 2 * 8);
}

/* Shared memory begins anywhere, boxes at multiples of 1024. */
CONTRACT int gemm90_bytes(int width) {
    return GEMM90_ALIGNMENT + gemm90_layout_bytes(width);
}

/* Rows of a box of B, half of which each block of a cluster fetches for both: of the terms, or of the columns. */
CONTRACT int gemm90_b_rows(int width, int transposed) {
    return transposed ? GEMM90_DEPTH / 2 : width / 2;
}

/* dw: sums over the rows of W∘G, of so many tiles of rows. */
CONTRACT int64_t gemm90_sums(int64_t row_tiles) {
    return row_tiles;
}

#endif

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
#define GEMM90_STORED_ROWS 16
#define GEMM90_STAGING_BYTES (GEMM90_STORED_ROWS * 128)
#define GEMM90_ALIGNMENT 1024

/* Shared memory that a block has. */
#define GEMM90_ROOM (227 * 1024)

/* Pairs of tiles, one below the other, that share the columns in the second-level cache: a panel's. */
#define GEMM90_PANEL 4

/* The products: forward, by raw x, with an activation of two halves; of dx; of dw. */
enum gemm90_pass { GEMM90_fwd, GEMM90_raw, GEMM90_gate, GEMM90_dx, GEMM90_dw };

/* Whether a warpgroup has a tile for itself, so that one stores while the other multiplies; else each has 64 rows of every tile. */
CONTRACT int gemm90_in_turn(int pass, int width) {
    return pass == GEMM90_fwd && width < GEMM90_WIDEST;
}

/* Whether an activation may be formed, and a residual added, where out is stored. Beside a tile's sums of 160 columns and more there are no
 * registers for it. */
CONTRACT int gemm90_adds(int pass, int width) {
    return pass <= GEMM90_gate && (width <= 128 || !gemm90_in_turn(pass, width));
}

/* Boxes of B beside each other; where B is not transposed these are rows of one box. */
CONTRACT int gemm90_b_boxes(int width) {
    return (width + 63) / 64;
}
CONTRACT int gemm90_stage_bytes(int width) {
    return GEMM_TILE * GEMM90_DEPTH * 2 + gemm90_b_boxes(width) * GEMM90_BOX_BYTES;
}

/* What the helpers bring of the columns and rows of a tile: a pair of floats each. */
CONTRACT int gemm90_vector_bytes(int width) {
    return (width + GEMM_TILE) * 8;
}

/* Results; two tiles' vectors; three barriers of each. */
CONTRACT int gemm90_other_bytes(int width) {
    return GEMM90_WARPS * GEMM90_STAGING_BYTES + 2 * (gemm90_vector_bytes(width) + 3 * 8);
}
CONTRACT int gemm90_stages(int width) {
    return (GEMM90_ROOM - GEMM90_ALIGNMENT - gemm90_other_bytes(width)) / (gemm90_stage_bytes(width) + 2 * 8);
}
CONTRACT int gemm90_layout_bytes(int width) {
    return gemm90_stages(width) * (gemm90_stage_bytes(width) + 2 * 8) + gemm90_other_bytes(width);
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

/* -------------------------------------------------------------------------------------------------- rows normalised */

/* `normalise`: threads of a block, such blocks on a multiprocessor, and elements of a row that a warp holds. A row has so many warps, a power
 * of two, that all together are on the GPU at once, if it has elements for them. */
#define NORMALISE_THREADS 256
#define NORMALISE_RESIDENT 4
#define NORMALISE_HELD 1024

#endif

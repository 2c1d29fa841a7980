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

/* dw: whether tiles may be taken in shares of their terms: beside the sums of the widest there are no registers for it. */
CONTRACT int gemm90_is_shared(int pass, int width) {
    return pass == GEMM90_dw && width < GEMM90_WIDEST;
}

/* Shares of a tile's terms at most, and where a share begins; floats that it leaves of a tile. */
#define GEMM90_SHARES 8
CONTRACT int64_t gemm90_share(int64_t depth, int shares, int share) {
    return (depth + GEMM90_DEPTH - 1) / GEMM90_DEPTH * share / shares * GEMM90_DEPTH;
}
CONTRACT int64_t gemm90_sums_of_tile(int width) {
    return GEMM_TILE * width;
}

/* dw: sums over the rows of W∘G, of so many tiles of rows. */
CONTRACT int64_t gemm90_sums(int64_t row_tiles) {
    return row_tiles;
}

/* -------------------------------------------------------------------------------------------------- rows normalised */

/* `normalise`: threads of a block, such blocks on a multiprocessor, and elements of rows that a warp holds. A row has so many warps, a power
 * of two, that all together are on the GPU at once, if it has elements for them. Of more rows than warps, one has as many lanes, from
 * NORMALISE_LEAST_LANES on, as hold it. */
#define NORMALISE_THREADS 256
#define NORMALISE_RESIDENT 4
#define NORMALISE_HELD 1024
#define NORMALISE_LEAST_LANES 8

CONTRACT int normalise_lanes(int64_t cols) {
    int lanes = 32;
    while (lanes > NORMALISE_LEAST_LANES && cols <= NORMALISE_HELD / 32 * (lanes / 2))
        lanes /= 2;
    return lanes;
}

/* ------------------------------------------------------------------------------------------------------ a few rows */

/* Forward of few rows, F(pass, rows of x, blocks of a cluster): a cluster has all these rows; its blocks share the terms. */
#define FEW90_KINDS(F) F(fwd_few_r32, 32, 2) F(fwd_few_r32_long, 32, 4) F(fwd_few_r64, 64, 4)

/* Columns of a tile: rows of W. Threads of a block, of which a warp fetches, four multiply and four store. */
#define FEW90_COLS 64
#define FEW90_THREADS 288

/* Stages of W that a block needs to keep the memory busy. */
#define FEW90_LEAST_STAGES 6

/* A block leaves room for one of `normalise`. */
#define FEW90_ROOM (GEMM90_ROOM - 2 * 1024)

/* Clusters that are on the device at once. An H200 has place for 66 of two blocks and 30 of four (cudaOccupancyMaxActiveClusters), since a
 * cluster's multiprocessors are neighbours. Of other numbers of multiprocessors it is a guess: where it is too high, some come in a second
 * round. */
CONTRACT int64_t few90_clusters(int64_t multiprocessors, int blocks) {
    return (multiprocessors - (blocks > 2 ? multiprocessors / 11 : 0)) / blocks;
}

/* Boxes of 64 terms, of which each block has every so many-th, so that together they read W's rows from left to right: of one block at
 * most, and of block `rank`. */
CONTRACT int64_t few90_most_boxes(int64_t depth, int blocks) {
    return (depth + blocks * GEMM90_DEPTH - 1) / (blocks * GEMM90_DEPTH);
}
CONTRACT int64_t few90_boxes(int64_t depth, int blocks, int rank) {
    return ((depth + GEMM90_DEPTH - 1) / GEMM90_DEPTH + blocks - 1 - rank) / blocks;
}

/* The rows' terms; sums of all blocks of a cluster; barriers beside two for each stage. */
CONTRACT int64_t few90_rows_bytes(int rows, int blocks, int64_t depth) {
    return few90_most_boxes(depth, blocks) * rows * GEMM90_DEPTH * 2;
}
CONTRACT int few90_sums_bytes(int rows) {
    return rows * FEW90_COLS * 4;
}
CONTRACT int few90_barriers_bytes(void) {
    return 3 * 8;
}
CONTRACT int few90_stages(int rows, int blocks, int64_t depth) {
    const int64_t room = FEW90_ROOM - GEMM90_ALIGNMENT - few90_rows_bytes(rows, blocks, depth) -
                         few90_sums_bytes(rows) - few90_barriers_bytes();
    return room < 0 ? 0 : (int)(room / (GEMM90_BOX_BYTES + 2 * 8));
}
CONTRACT int64_t few90_bytes(int rows, int blocks, int64_t depth) {
    return GEMM90_ALIGNMENT + few90_rows_bytes(rows, blocks, depth) + few90_sums_bytes(rows) + few90_barriers_bytes() +
           few90_stages(rows, blocks, depth) * (GEMM90_BOX_BYTES + 2 * 8);
}

#endif

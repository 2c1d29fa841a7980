/* SPDX-License-Identifier: Apache-2.0
 * Of the products of norm-linear on Hopper, what all warps of a block agree on: the places in shared memory, and the
 * order of the tiles. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_TILE_SM90_CUH
#define HEDDLE_CUDA_NORM_LINEAR_TILE_SM90_CUH

#include "cuda/element.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/norm_linear/sm90/contract.h"
#include "cuda/wgmma.cuh"

enum {
    DEPTH = GEMM90_DEPTH,
    BOX = GEMM90_BOX_BYTES,
    PANEL = 8, /* pairs of row tiles that share the columns in L2 */
    CONSUMERS = 32 * GEMM90_WARPS,
    HELPERS = 96,
    STAGING = GEMM90_STAGING_BYTES
};
enum gemm_pass { FWD, DX, DW, GATE /* forward of an activation of two halves */ };

template <int PASS> constexpr bool is_forward = PASS == FWD || PASS == GATE;

/* Raw x is multiplied in bfloat16 alone. */
template <typename T, int PASS> constexpr bool gathers_moments = false;
template <> constexpr bool gathers_moments<bf16, FWD> = true;
template <> constexpr bool gathers_moments<bf16, GATE> = true;

/* Columns of out that a tile has: of GATE its first half is the gate's, the other what is beside them in up. */
template <int WIDTH, int PASS> constexpr int out_width = PASS == GATE ? WIDTH / 2 : WIDTH;

template <int WIDTH> struct gemm90 {
    static constexpr int a_bytes = GEMM_TILE * DEPTH * 2;
    static constexpr int b_boxes = gemm90_b_boxes(WIDTH);
    static constexpr int stage = gemm90_stage_bytes(WIDTH), stages = gemm90_stages(WIDTH);
    static constexpr int staging = stages * stage;
    static constexpr int vectors = staging + CONSUMERS / 32 * STAGING; /* of two tiles: of the columns, of the rows */
    static constexpr int vector = gemm90_vector_bytes(WIDTH);
    static constexpr int full = vectors + 2 * vector;
    static constexpr int empty = full + 8 * stages;
    static constexpr int ready = empty + 8 * stages;
    static constexpr int taken = ready + 8 * 2;
    static constexpr int bytes = taken + 8 * 2;
    static_assert(bytes == gemm90_layout_bytes(WIDTH) && bytes <= gemm90_layout_bytes(GEMM90_WIDEST),
                  "as the plan counts");
    static_assert(stage == a_bytes + b_boxes * BOX, "the operands of a stage");
};

/* ------------------------------------------------------------------------------------------------- tiles and stages */

/* One tile of this block's; false: there are no more. */
struct gemm_tile {
    int64_t row_tile, row0, col0;
};

/* WIDTH: columns of out. */
template <int WIDTH> INLINE bool tile_of_turn(const norm_gemm &p, uint32_t turn, gemm_tile *t) {
    const uint32_t pairs = (uint32_t)(p.row_tiles + 1) / 2, cols = (uint32_t)p.col_tiles;
    const uint64_t unit = (uint64_t)turn * (gridDim.x / 2) + blockIdx.x / 2;
    if (unit >= (uint64_t)pairs * cols)
        return false;
    const uint32_t at = (uint32_t)unit, panel = at / (PANEL * cols), rest = at % (PANEL * cols);
    const uint32_t height = min(pairs - panel * PANEL, (uint32_t)PANEL), col_tile = rest / height;
    t->row_tile = (int64_t)(panel * PANEL + rest % height) * 2 + blockIdx.x % 2;
    t->row0 = t->row_tile * GEMM_TILE;
    t->col0 = (int64_t)col_tile * WIDTH;
    return true;
}

#endif

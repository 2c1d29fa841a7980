/* SPDX-License-Identifier: Apache-2.0
 * Of the products of norm-linear on Hopper, what all warps of a block agree on: the places in shared memory, and the
 * order of the tiles. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_TILE_SM90_CUH
#define HEDDLE_CUDA_NORM_LINEAR_TILE_SM90_CUH

#include "cuda/element.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/norm_linear/sm90/contract.h"
#include "cuda/norm_linear/sm90/divisor.cuh"
#include "cuda/wgmma.cuh"

enum {
    DEPTH = GEMM90_DEPTH,
    BOX = GEMM90_BOX_BYTES,
    PANEL = GEMM90_PANEL,
    CONSUMERS = 32 * GEMM90_WARPS,
    STAGING = GEMM90_STAGING_BYTES
};
enum { FWD = GEMM90_fwd, RAW = GEMM90_raw, GATE = GEMM90_gate, DX = GEMM90_dx, DW = GEMM90_dw };

template <int PASS> constexpr bool is_forward = PASS == FWD || PASS == RAW || PASS == GATE;

/* Columns of out that a tile has: of GATE its first half is the gate's, the other what is beside them in up. */
template <int WIDTH, int PASS> constexpr int out_width = PASS == GATE ? WIDTH / 2 : WIDTH;

template <int WIDTH, int PASS> struct gemm90 {
    static constexpr bool in_turn = gemm90_in_turn(PASS, WIDTH);
    static constexpr int halves = in_turn ? 2 : 1; /* of 64 rows, that a warpgroup has of a tile */
    static constexpr int takers = in_turn ? WARPGROUP : CONSUMERS;
    static constexpr int helpers = PASS == RAW ? 96 : 32;
    static constexpr bool adds = gemm90_adds(PASS, WIDTH);
    static constexpr bool shared = gemm90_is_shared(PASS, WIDTH);
    /* Of a thread that multiplies, and of the others: together those of 168 for each. */
    static constexpr int registers = PASS == RAW ? 216 : in_turn ? 232 : 224;
    static constexpr int helper_registers = 3 * 168 - 2 * registers;
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
    static constexpr int order = taken + 8 * 2;
    static constexpr int bytes = order + 8 * 2;
    static_assert(bytes == gemm90_layout_bytes(WIDTH) && bytes + GEMM90_ALIGNMENT <= GEMM90_ROOM, "as the plan counts");
    static_assert(stage == a_bytes + b_boxes * BOX, "the operands of a stage");
};

/* ------------------------------------------------------------------------------------------------- tiles and stages */

struct gemm_tile {
    int row_tile, row0, col0;
    int share; /* of dw */
};

INLINE uint32_t unit_of_turn(uint32_t turn) {
    return turn * (gridDim.x / 2) + blockIdx.x / 2;
}

/* Whether the cluster has a tile of this turn, or of dw a share of one. */
template <int WIDTH, int PASS> INLINE bool has_tile(const norm_gemm_sm90 &all, uint32_t turn) {
    return unit_of_turn(turn) < all.g.tiles.units * (gemm90<WIDTH, PASS>::shared ? (uint32_t)all.shares.count : 1);
}

/* The share alone. */
template <int WIDTH, int PASS> INLINE int share_of_turn(const norm_gemm_sm90 &all, uint32_t turn) {
    return gemm90<WIDTH, PASS>::shared && all.shares.count > 1 ? (int)quotient(unit_of_turn(turn), all.shares.units)
                                                               : 0;
}

/* Terms of the share: from `*begin` on. */
template <int WIDTH, int PASS> INLINE int terms_of_share(const norm_gemm_sm90 &all, int share, int *begin) {
    const int depth = (int)all.g.depth;
    *begin = 0;
    if (!gemm90<WIDTH, PASS>::shared || all.shares.count == 1)
        return depth;
    *begin = (int)gemm90_share(depth, all.shares.count, share);
    return min((int)gemm90_share(depth, all.shares.count, share + 1), depth) - *begin;
}

/* It. */
template <int WIDTH, int PASS> INLINE gemm_tile tile_of_turn(const norm_gemm_sm90 &all, uint32_t turn) {
    const tile_order &o = all.g.tiles;
    const int share = share_of_turn<WIDTH, PASS>(all, turn);
    const uint32_t unit = unit_of_turn(turn) - share * o.units;
    const uint32_t panel = quotient(unit, o.panel), rest = unit - panel * o.panel_units;
    const bool last = panel == o.panels - 1;
    const uint32_t col = last ? quotient(rest, o.last) : rest / PANEL,
                   row = rest - col * (last ? o.last_height : PANEL);
    const int row_tile = (int)((panel * PANEL + row) * 2 + blockIdx.x % 2);
    return {row_tile, row_tile * GEMM_TILE, (int)col * out_width<WIDTH, PASS>, share};
}

#endif

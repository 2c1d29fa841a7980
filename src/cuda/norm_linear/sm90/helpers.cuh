/* SPDX-License-Identifier: Apache-2.0
 * Of the products of norm-linear on Hopper, the helpers: what the epilogue needs of every row and column, and the
 * moments of the rows of raw x. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_HELPERS_SM90_CUH
#define HEDDLE_CUDA_NORM_LINEAR_HELPERS_SM90_CUH

#include "cuda/norm_linear/lanes.cuh"
#include "cuda/norm_linear/sm90/tile.cuh"

/* What the epilogue needs of a column, of up if it is so many behind the gate's, and of a row. */
template <typename T, int PASS> INLINE float2 column_pair(const norm_gemm &p, int64_t col, int64_t behind) {
    const T *gamma = (const T *)p.gamma, *beta = (const T *)p.beta, *bias = (const T *)p.bias;
    if (col >= p.cols)
        return make_float2(0, 0);
    col += behind;
    if (is_forward<PASS>)
        return make_float2(p.col_sum ? p.col_sum[col] : 0, p.col_add ? p.col_add[col] : bias ? to_float(bias[col]) : 0);
    return make_float2(gamma ? to_float(gamma[col]) : 1, beta ? to_float(beta[col]) : 0);
}

template <int PASS> INLINE float2 row_pair(const norm_gemm &p, int64_t row) {
    if (row >= p.rows)
        return make_float2(0, 0);
    if (is_forward<PASS>)
        return p.gathers ? make_float2(__ldcg(p.saved_mean + row), __ldcg(p.saved_rstd + row)) /* from another block */
               : p.mean  ? make_float2(p.mean[row], p.rstd[row])
                         : make_float2(0, 1);
    return make_float2(PASS == DW && p.row_bias ? p.row_bias[row] : 0, 0);
}

/* Rows whose moments a warp forms at a time; such slices of a tile; chunks of eight elements of a row that a lane has on
 * their way. */
enum {
    MOMENT_ROWS = 4,
    MOMENT_SLICES = GEMM_TILE / MOMENT_ROWS,
    MOMENT_CHUNKS = 4,
    MOMENT_GROUP = MOMENT_CHUNKS * 256
};

template <typename T> INLINE void load_group(const norm_gemm &p, int64_t row, int group, uint4 held[MOMENT_CHUNKS]) {
    const int lane = threadIdx.x % 32, depth = row < p.rows ? (int)p.depth : 0;
    const T *from = (const T *)p.a + row * p.lda;
#pragma unroll
    for (int c = 0; c < MOMENT_CHUNKS; c++) {
        const int e = group * MOMENT_GROUP + (c * 32 + lane) * 8;
        held[c] = e < depth ? *(const uint4 *)(from + e) : make_uint4(0, 0, 0, 0);
    }
}

INLINE void store_moments(const norm_gemm &p, int64_t row, const lane_moments &m) {
    const float2 all = moments_of_lanes(m, (int)p.depth, p.rms, p.inverse, p.eps);
    if (threadIdx.x % 32 == 0 && row < p.rows) {
        p.saved_mean[row] = all.x;
        p.saved_rstd[row] = all.y;
    }
}

/* The next rows, or the next part of this one, are on their way meanwhile. */
template <typename T> INLINE void slice_moments(const norm_gemm &p, int64_t row0) {
    const int lane = threadIdx.x % 32, groups = ((int)p.depth + MOMENT_GROUP - 1) / MOMENT_GROUP;
    uint4 next[MOMENT_CHUNKS];
    lane_moments m = {0, 0, 0};
    int row = 0, group = 0;
    load_group<T>(p, row0, 0, next);
#pragma unroll 1
    while (row < MOMENT_ROWS) {
        uint4 held[MOMENT_CHUNKS];
        const int e = group * MOMENT_GROUP + lane * 8;
        const bool first = group == 0;
        const int64_t now = row0 + row;
#pragma unroll
        for (int c = 0; c < MOMENT_CHUNKS; c++)
            held[c] = next[c];
        group = group + 1 == groups ? 0 : group + 1;
        row += group == 0;
        if (row < MOMENT_ROWS)
            load_group<T>(p, row0 + row, group, next);
        if (first)
            m = {0, 0, 0};
#pragma unroll
        for (int c = 0; c < MOMENT_CHUNKS; c++)
            if (e + c * 256 < (int)p.depth)
                add_chunk<T>(&m, held[c], c == 0 && first, !p.rms);
        if (group == 0)
            store_moments(p, now, m);
    }
}

/* The moments of a tile's rows are there when this returns. All warps of all blocks that come to the tile share the work,
 * a slice at a time, and then wait for slices that others have: a warp that has one is running, so this ends. */
template <typename T> INLINE void settle_moments(const norm_gemm &p, int64_t row_tile) {
    int32_t *begun = p.turns + row_tile, *done = begun + p.row_tiles + 1;
    const int lane = threadIdx.x % 32;
    int slice = *(volatile int32_t *)done < MOMENT_SLICES ? 0 : MOMENT_SLICES;
    while ((slice = __shfl_sync(~0u, lane == 0 && slice < MOMENT_SLICES ? atomicAdd(begun, 1) : slice, 0)) <
           MOMENT_SLICES) {
        slice_moments<T>(p, row_tile * GEMM_TILE + slice * MOMENT_ROWS);
        __threadfence();
        if (lane == 0)
            atomicAdd(done, 1);
    }
    while (*(volatile int32_t *)done < MOMENT_SLICES)
        __nanosleep(100);
    __threadfence();
}

/* A tile of the residual is asked for while its sums are formed, so that the epilogue finds it in the second-level cache. */
template <typename T, int WIDTH> INLINE void ask_for_residual(const norm_gemm &p, const gemm_tile &t, int thread) {
    constexpr int LINES = (WIDTH + 63) / 64; /* of 128 bytes, in a row */
    const int rows = (int)min(p.rows - t.row0, (int64_t)GEMM_TILE), cols = (int)min(p.cols - t.col0, (int64_t)WIDTH);
    const T *const from = (const T *)p.residual + t.row0 * p.ldr + t.col0;
#pragma unroll 1
    for (int x = thread; x < rows * LINES; x += HELPERS)
        if (x % LINES * 64 < cols)
            prefetch_global(from + x / LINES * p.ldr + x % LINES * 64);
}

template <typename T, int WIDTH, int PASS> INLINE void help(const norm_gemm &p, uint32_t smem, char *from) {
    typedef gemm90<WIDTH> layout;
    constexpr int OUT = out_width<WIDTH, PASS>;
    const int thread = (int)threadIdx.x - 32;
    gemm_tile t;
    for (uint32_t turn = 0; tile_of_turn<OUT>(p, turn, &t); turn++) {
        float2 *columns = (float2 *)(from + layout::vectors + turn % 2 * layout::vector), *rows = columns + WIDTH;
        if (is_forward<PASS> && p.residual)
            ask_for_residual<T, OUT>(p, t, thread);
        if (gathers_moments<T, PASS> && p.gathers)
            settle_moments<T>(p, t.row_tile);
        mbarrier_wait(smem + layout::taken + turn % 2 * 8, (turn / 2 & 1) ^ 1);
        for (int x = thread; x < WIDTH; x += HELPERS)
            columns[x] = PASS == GATE && x >= OUT ? column_pair<T, PASS>(p, t.col0 + x - OUT, p.cols)
                                                  : column_pair<T, PASS>(p, t.col0 + x, 0);
        for (int x = thread; x < GEMM_TILE; x += HELPERS)
            rows[x] = row_pair<PASS>(p, t.row0 + x);
        mbarrier_arrive(smem + layout::ready + turn % 2 * 8);
    }
}

#endif

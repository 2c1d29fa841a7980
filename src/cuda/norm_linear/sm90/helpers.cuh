/* SPDX-License-Identifier: Apache-2.0
 * Of the products of norm-linear on Hopper, the helpers: what the epilogue needs of every row and column, and the moments of
 * the rows of raw x. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_HELPERS_SM90_CUH
#define HEDDLE_CUDA_NORM_LINEAR_HELPERS_SM90_CUH

#include "cuda/norm_linear/lanes.cuh"
#include "cuda/norm_linear/sm90/tile.cuh"

/* Of a column, of up if it is so many behind the gate's: what is added; of dw gamma and beta. */
template <typename T> INLINE float column_bias(const norm_gemm &p, int col, int64_t behind) {
    return p.bias && col < p.cols ? to_float(((const T *)p.bias)[col + behind]) : 0;
}

template <typename T> INLINE float2 column_pair(const norm_gemm &p, int col) {
    const T *gamma = (const T *)p.gamma, *beta = (const T *)p.beta;
    const bool inside = col < p.cols;
    return make_float2(gamma && inside ? to_float(gamma[col]) : 1, beta && inside ? to_float(beta[col]) : 0);
}

INLINE float2 raw_column(const norm_gemm &p, int col) {
    return col < p.cols ? make_float2(p.col_sum[col], p.col_add[col]) : make_float2(0, 0);
}

/* From another block. */
INLINE float2 raw_row(const norm_gemm &p, int row) {
    return row < p.rows ? make_float2(__ldcg(p.saved_mean + row), __ldcg(p.saved_rstd + row)) : make_float2(0, 0);
}

/* A tile of the residual is asked for while its sums are formed, so that the epilogue finds it in the second-level cache. */
template <typename T, int WIDTH>
INLINE void ask_for_residual(const norm_gemm &p, const gemm_tile &t, int thread, int threads) {
    constexpr int LINES = (WIDTH + 63) / 64; /* of 128 bytes, in a row */
    const int rows = (int)min(p.rows - t.row0, (int64_t)GEMM_TILE), cols = (int)min(p.cols - t.col0, (int64_t)WIDTH);
    const T *const from = (const T *)p.residual + t.row0 * p.ldr + t.col0;
#pragma unroll 1
    for (int x = thread; x < rows * LINES; x += threads)
        if (x % LINES * 64 < cols)
            prefetch_global(from + x / LINES * p.ldr + x % LINES * 64);
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
    const float2 all = moments_of_lanes(m, (int)threadIdx.x % 32, 32, (int)p.depth, p.rms, p.inverse, p.eps, warp_sum);
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
template <typename T> INLINE void settle_moments(const norm_gemm &p, int row_tile) {
    int32_t *begun = p.turns + row_tile, *done = begun + p.row_tiles + 1;
    const int lane = threadIdx.x % 32;
    int slice = *(volatile int32_t *)done < MOMENT_SLICES ? 0 : MOMENT_SLICES;
    while ((slice = __shfl_sync(~0u, lane == 0 && slice < MOMENT_SLICES ? atomicAdd(begun, 1) : slice, 0)) <
           MOMENT_SLICES) {
        slice_moments<T>(p, (int64_t)row_tile * GEMM_TILE + slice * MOMENT_ROWS);
        __threadfence();
        if (lane == 0)
            atomicAdd(done, 1);
    }
    while (*(volatile int32_t *)done < MOMENT_SLICES)
        __nanosleep(100);
    __threadfence();
}

/* The helpers' threads: of each tile the numbers of its columns, and behind those of its rows. Of forward that is what is
 * added to a column, a float; of RAW s and t, mean and rstd; of dw gamma and beta, and dbias. */
template <typename T, int WIDTH, int PASS> INLINE void help(const norm_gemm_sm90 &all, uint32_t smem, char *from) {
    typedef gemm90<WIDTH, PASS> layout;
    constexpr int OUT = out_width<WIDTH, PASS>;
    const norm_gemm &p = all.g;
    const int thread = (int)threadIdx.x - 32;
#pragma unroll 1
    for (uint32_t turn = 0; has_tile<WIDTH, PASS>(all, turn); turn++) {
        const gemm_tile t = tile_of_turn<WIDTH, PASS>(all, turn);
        char *const columns = from + layout::vectors + turn % 2 * layout::vector, *const rows = columns + WIDTH * 8;
        if (layout::adds && p.residual)
            ask_for_residual<T, OUT>(p, t, thread, layout::helpers);
        if constexpr (PASS == RAW)
            settle_moments<T>(p, t.row_tile);
        mbarrier_wait(smem + layout::taken + turn % 2 * 8, (turn / 2 & 1) ^ 1);
#pragma unroll 1
        for (int x = thread; x < WIDTH; x += layout::helpers)
            if (PASS == RAW)
                ((float2 *)columns)[x] = raw_column(p, t.col0 + x);
            else if (PASS == DW)
                ((float2 *)columns)[x] = column_pair<T>(p, t.col0 + x);
            else
                ((float *)columns)[x] = PASS == GATE && x >= OUT ? column_bias<T>(p, t.col0 + x - OUT, p.cols)
                                                                 : column_bias<T>(p, t.col0 + x, 0);
#pragma unroll 1
        for (int x = thread; x < GEMM_TILE && (PASS == RAW || PASS == DW); x += layout::helpers)
            if (PASS == RAW)
                ((float2 *)rows)[x] = raw_row(p, t.row0 + x);
            else
                ((float *)rows)[x] = p.row_bias && t.row0 + x < p.rows ? p.row_bias[t.row0 + x] : 0;
        mbarrier_arrive(smem + layout::ready + turn % 2 * 8);
    }
}

#endif

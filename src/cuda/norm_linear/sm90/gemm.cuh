/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear on Hopper, in 16-bit types: wgmma, the copy engine, and clusters of two blocks.
 *
 * A block stays and takes one tile of 128 rows and WIDTH columns after the other (tile.cuh); the two blocks of a cluster
 * have tiles one below the other, and each fetches half of their common columns for both. One thread copies, two
 * warpgroups multiply (here) and store (epilogue.cuh): 64 rows each of every tile or, in forward but for the widest
 * tiles, a tile each in turn, so that one stores while the other multiplies. Others bring what the epilogue needs of every
 * row and column and, where raw x is multiplied, form the rows' moments, once for all blocks (helpers.cuh).
 *
 * A tile in shared memory is boxes of 64 x 64 elements, 128 bytes a row, swizzled by the copy engine, one behind the
 * other along its side. As such a box lies, tensor cores take it with its rows along the sum or over it.
 *
 * What a warp has in common is said to be so (`warp` by a shuffle): then addresses are the warp's, and a product takes
 * a third of the instructions. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_GEMM_SM90_CUH
#define HEDDLE_CUDA_NORM_LINEAR_GEMM_SM90_CUH

#include "cuda/norm_linear/coarse.cuh"
#include "cuda/norm_linear/sm90/epilogue.cuh"
#include "cuda/norm_linear/sm90/helpers.cuh"
#include "cuda/norm_linear/sm90/tile.cuh"

/* ----------------------------------------------------------------------------------------------------------- copies */

/* Of a step's columns each block of the cluster brings half for both: of their rows, and so half of the columns (of GATE
 * the gate's, or up's), or where B is transposed half of the terms. */
template <int WIDTH, int PASS>
INLINE void fetch_b(const norm_gemm_sm90 &all, uint32_t smem, int slot, int k, int col0) {
    typedef gemm90<WIDTH, PASS> layout;
    constexpr bool TRANSPOSED = !is_forward<PASS>;
    constexpr int ROWS = gemm90_b_rows(WIDTH, TRANSPOSED);
    const int rank = blockIdx.x % 2;
    const uint32_t full = smem + layout::full + slot * 8;
    const uint32_t to = smem + slot * layout::stage + layout::a_bytes + rank * ROWS * 128;
#pragma unroll
    for (int x = 0; x < layout::b_boxes && TRANSPOSED; x++)
        tma_load2_all(to + x * BOX, &all.b, full, col0 + x * 64, k + rank * ROWS, 3);
    if (!TRANSPOSED)
        tma_load2_all(to, &all.b, full, k, col0 + rank * (PASS == GATE ? (int)all.g.cols : ROWS), 3);
}

/* One thread: all tiles of this block, as far ahead as there are slots. */
template <int WIDTH, int PASS> INLINE void produce(const norm_gemm_sm90 &all, uint32_t smem) {
    typedef gemm90<WIDTH, PASS> layout;
    constexpr bool A_TRANSPOSED = PASS == DW;
    constexpr int BYTES = layout::a_bytes + (is_forward<PASS> ? WIDTH * DEPTH * 2 : layout::b_boxes * BOX);
    const int depth = (int)all.g.depth;
    ring r = {0, 0};
    int begun = 0; /* terms of the first tile, of which B may come before A is there */
    for (; all.b_is_there && begun < min(depth, layout::stages * DEPTH); begun += DEPTH) {
        mbarrier_expect(smem + layout::full + begun / DEPTH * 8, BYTES);
        fetch_b<WIDTH, PASS>(all, smem, begun / DEPTH, begun, tile_of_turn<WIDTH, PASS>(all, 0).col0);
    }
    wait_for_earlier_grid();
#pragma unroll 1
    for (uint32_t turn = 0; has_tile<WIDTH, PASS>(all, turn); turn++) {
        const gemm_tile t = tile_of_turn<WIDTH, PASS>(all, turn);
        int first;
        const int end = terms_of_share<WIDTH, PASS>(all, t.share, &first) + first;
#pragma unroll 1
        for (int k = first; k < end; k += DEPTH) {
            const uint32_t full = smem + layout::full + r.slot * 8, to = smem + r.slot * layout::stage;
            mbarrier_wait(smem + layout::empty + r.slot * 8, r.turn ^ 1);
            if (k >= begun)
                mbarrier_expect(full, BYTES);
#pragma unroll
            for (int x = 0; x < 2; x++)
                tma_load2(to + x * BOX, &all.a, full, A_TRANSPOSED ? t.row0 + x * 64 : k,
                          A_TRANSPOSED ? k : t.row0 + x * 64);
            if (k >= begun)
                fetch_b<WIDTH, PASS>(all, smem, r.slot, k, t.col0);
            advance<layout::stages>(&r);
        }
        begun = 0;
    }
}

/* --------------------------------------------------------------------------------------------------------- products */

/* Boxes from `at` on: a box from one to the next where their rows lie over the sum (else that is not looked at), 1024
 * bytes from 8 rows to 8 rows. */
INLINE uint64_t describe_boxes(uint32_t at) {
    return describe(at, BOX, 1024);
}

/* Sixteen terms further. */
INLINE constexpr int box_step(bool transposed) {
    return (transposed ? 16 * 128 : 32) >> 4;
}

/* A slot is free: of a warpgroup, whose warps read B in step, the first thread of warp x tells block x of the cluster.
 * Arrivals from another block are dear: one from every warp would cost more than the products. */
INLINE void release_slot(uint32_t empty_there, int slot) {
    if (threadIdx.x % WARPGROUP < 64 && threadIdx.x % 32 == 0)
        mbarrier_arrive_at(empty_there + slot * 8);
}

/* acc = A·B, or + it, of a step, which goes on. That the first one does not read acc is to be known when it is compiled: what
 * a warpgroup does between its tiles has these registers. */
template <typename T, int WIDTH, int PASS, bool FIRST>
INLINE void ask_for_step(uint32_t smem, int group, const ring &r, float (*acc)[WIDTH / 8][4]) {
    typedef gemm90<WIDTH, PASS> layout;
    constexpr int HALVES = layout::halves;
    constexpr bool A_TRANSPOSED = PASS == DW, B_TRANSPOSED = !is_forward<PASS>;
    const uint32_t at = smem + r.slot * layout::stage;
    const uint64_t a = describe_boxes(at + (HALVES == 1 ? group * BOX : 0)), b = describe_boxes(at + layout::a_bytes);
    mbarrier_wait(smem + layout::full + r.slot * 8, r.turn);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < DEPTH / 16 * HALVES; x++) {
        const int half = x % HALVES, terms = x / HALVES;
        const uint64_t from = a + terms * box_step(A_TRANSPOSED) + half * (BOX >> 4),
                       with = b + terms * box_step(B_TRANSPOSED);
        if (A_TRANSPOSED)
            wgmma<T, WIDTH, B_TRANSPOSED>::run_both(acc[half], from, with, !FIRST || terms > 0);
        else
            wgmma<T, WIDTH, B_TRANSPOSED>::run(acc[half], from, with, !FIRST || terms > 0);
    }
    wgmma_commit();
}

/* acc = A·B of a tile, or of the half that is this warpgroup's. The other one may go on once all of it has been asked for. */
template <typename T, int WIDTH, int PASS>
INLINE void product90(int depth, uint32_t smem, uint32_t empty_there, int group, ring *r, float (*acc)[WIDTH / 8][4]) {
    typedef gemm90<WIDTH, PASS> layout;
    constexpr int HALVES = layout::halves;
    int before = r->slot;
    ask_for_step<T, WIDTH, PASS, true>(smem, group, *r, acc);
    advance<layout::stages>(r);
#pragma unroll 1
    for (int k = DEPTH; k < depth; k += DEPTH) {
        ask_for_step<T, WIDTH, PASS, false>(smem, group, *r, acc);
        wgmma_wait<1>();
        release_slot(empty_there, before);
        before = r->slot;
        advance<layout::stages>(r);
    }
    if (layout::in_turn && threadIdx.x % 32 == 0)
        mbarrier_arrive(smem + layout::order + (group ^ 1) * 8);
    wgmma_wait<0>();
#pragma unroll
    for (int y = 0; y < HALVES * WIDTH / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            pin(acc[y % HALVES][y / HALVES][e]);
    release_slot(empty_there, before);
}

/* ---------------------------------------------------------------------------------------------------------- kernel */

/* By a warp: of its rows of a tile of raw x, which it has stored, those that are coarse. */
template <typename T, int WIDTH>
INLINE void remake_stored(const norm_gemm &p, const gemm_tile &t, int row0, const char *columns) {
    const float2 *const rows = (const float2 *)(columns + WIDTH * 8) + row0 + threadIdx.x % 32 / 4;
    const float2 row[2] = {rows[0], rows[8]};
    if (!any_coarse(row))
        return;
    if (threadIdx.x % 32 == 0)
        bulk_wait(); /* what the copy engine stores is in memory */
    __syncwarp();
    remake_coarse<T>(p, row, t.row0 + row0, t.col0, t.col0 + WIDTH, true);
}

/* A warpgroup. warp: of both, 0 to 7. */
template <typename T, int WIDTH, int PASS>
INLINE void consume(const norm_gemm_sm90 &all, uint32_t smem, char *from, int warp) {
    typedef gemm90<WIDTH, PASS> layout;
    constexpr int HALVES = layout::halves;
    const norm_gemm &p = all.g;
    const int depth = (int)p.depth, group = warp / 4, row0 = (layout::in_turn ? warp % 4 : warp) * 16;
    const uint32_t empty_there = cluster_address(smem + layout::empty, warp % 2);
    const uint32_t staging = smem + layout::staging + warp * STAGING, steps = (uint32_t)(depth + DEPTH - 1) / DEPTH;
    ring r = {0, 0};
    if (layout::in_turn && group)
        skip<layout::stages>(&r, steps);
#pragma unroll 1
    for (uint32_t turn = layout::in_turn ? group : 0; has_tile<WIDTH, PASS>(all, turn); turn += HALVES) {
        const char *const columns = from + layout::vectors + turn % 2 * layout::vector;
        float acc[HALVES][WIDTH / 8][4];
        if (layout::in_turn)
            mbarrier_wait(smem + layout::order + group * 8, (turn / 2 & 1) ^ !group);
        int first;
        const int terms = terms_of_share<WIDTH, PASS>(all, share_of_turn<WIDTH, PASS>(all, turn), &first);
        product90<T, WIDTH, PASS>(terms, smem, empty_there, group, &r, acc);
        if (layout::in_turn)
            skip<layout::stages>(&r, steps);
        const gemm_tile t = tile_of_turn<WIDTH, PASS>(all, turn);
        bool whole = true; /* else other shares of the tile are to come */
        if constexpr (layout::shared)
            whole = all.shares.count == 1 || add_shares<WIDTH>(all, t, from, acc[0]);
        if (PASS != DX)
            mbarrier_wait(smem + layout::ready + turn % 2 * 8, turn / 2 & 1);
        if (PASS == DW && p.part && whole)
            sum_columns<T, WIDTH>(p, t, from, acc[0]);
        if constexpr (PASS == GATE)
            store_gated<T, WIDTH>(p, t, row0, columns, staging, acc[0]);
        else if (PASS != DW || (p.out && whole))
            store_tile<T, WIDTH, PASS>(all, t, row0, columns, staging, acc);
        if constexpr (PASS == RAW)
            remake_stored<T, WIDTH>(p, t, row0, columns);
        if (PASS != DX)
            mbarrier_arrive(smem + layout::taken + turn % 2 * 8);
    }
    if (threadIdx.x % 32 == 0)
        bulk_wait_read();
    __syncwarp();
}

template <typename T, int WIDTH, int PASS> INLINE void gemm90_kernel(const norm_gemm_sm90 &all) {
    typedef gemm90<WIDTH, PASS> layout;
    extern __shared__ char shared[];
    const uint32_t smem = (shared_address(shared) + GEMM90_ALIGNMENT - 1) & ~(GEMM90_ALIGNMENT - 1u);
    char *const from = shared + (smem - shared_address(shared));
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&all.a);
        tma_prefetch_map(&all.b);
        for (int x = 0; x < layout::stages; x++) {
            mbarrier_init(smem + layout::full + x * 8, 1);
            mbarrier_init(smem + layout::empty + x * 8, 2 * layout::takers / WARPGROUP); /* of both blocks */
        }
        for (int x = 0; x < 2; x++) {
            mbarrier_init(smem + layout::ready + x * 8, layout::helpers);
            mbarrier_init(smem + layout::taken + x * 8, layout::takers);
            mbarrier_init(smem + layout::order + x * 8, WARPGROUP / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
    if (warp < 4) {
        registers_fewer<layout::helper_registers>();
        if (threadIdx.x == 0) {
            produce<WIDTH, PASS>(all, smem);
        } else if (warp > 0 && warp <= layout::helpers / 32 && PASS != DX) {
            wait_for_earlier_grid();
            help<T, WIDTH, PASS>(all, smem, from);
        }
        __syncwarp();
    } else {
        registers_more<layout::registers>();
        wait_for_earlier_grid();
        consume<T, WIDTH, PASS>(all, smem, from, warp - 4);
    }
    /* Nobody leaves while the other block may still write here. */
    cluster_arrive_relaxed();
    cluster_wait();
}

#define GEMM90_KERNEL(name, T, PRODUCT, WIDTH)                                                                         \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(WARPGROUP + CONSUMERS, 1)                   \
        heddle_norm_linear_##name##_sm90(const __grid_constant__ norm_gemm_sm90 all) {                                 \
        gemm90_kernel<T, WIDTH, PRODUCT>(all);                                                                         \
    }

#endif

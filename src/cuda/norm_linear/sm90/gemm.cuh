/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear on Hopper, in 16-bit types: wgmma, the copy engine, and clusters of two blocks.
 *
 * A block stays and takes one tile of 128 rows and WIDTH columns after the other (tile.cuh); the two blocks of a cluster
 * have tiles one below the other, and each fetches half of their common columns for both. One thread copies, two
 * warpgroups of 64 rows multiply (here) and store (epilogue.cuh), and three warps bring what the epilogue needs of every
 * row and column; where raw x is multiplied, they form the rows' moments, too, once for all blocks (helpers.cuh).
 *
 * A tile in shared memory is boxes of 64 x 64 elements, 128 bytes a row, swizzled by the copy engine, one behind the
 * other along its side. As such a box lies, tensor cores take it with its rows along the sum or over it. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_GEMM_SM90_CUH
#define HEDDLE_CUDA_NORM_LINEAR_GEMM_SM90_CUH

#include "cuda/norm_linear/coarse.cuh"
#include "cuda/norm_linear/sm90/epilogue.cuh"
#include "cuda/norm_linear/sm90/helpers.cuh"
#include "cuda/norm_linear/sm90/tile.cuh"

/* ----------------------------------------------------------------------------------------------------------- copies */

/* One thread: all tiles of this block, as far ahead as there are slots. Of the columns each block of the cluster brings
 * half for both: of their rows, and so half of the columns (of GATE the gate's, or up's), or where B is transposed half of
 * the terms. */
template <int WIDTH, int PASS> INLINE void produce(const norm_gemm_sm90 &all, uint32_t smem) {
    typedef gemm90<WIDTH> layout;
    constexpr bool A_TRANSPOSED = PASS == DW, B_TRANSPOSED = !is_forward<PASS>;
    constexpr int BYTES = layout::a_bytes + (B_TRANSPOSED ? layout::b_boxes * BOX : WIDTH * DEPTH * 2);
    const int depth = (int)all.g.depth, rank = blockIdx.x % 2;
    ring r = {0, 0};
    gemm_tile t;
    for (uint32_t turn = 0; tile_of_turn<out_width<WIDTH, PASS>>(all.g, turn, &t); turn++) {
        const int row0 = (int)t.row0, col0 = (int)t.col0;
#pragma unroll 1
        for (int k = 0; k < depth; k += DEPTH) {
            const uint32_t full = smem + layout::full + r.slot * 8, to = smem + r.slot * layout::stage;
            mbarrier_wait(smem + layout::empty + r.slot * 8, r.turn ^ 1);
            mbarrier_expect(full, BYTES);
#pragma unroll
            for (int x = 0; x < 2; x++)
                tma_load2(to + x * BOX, &all.a, full, A_TRANSPOSED ? row0 + x * 64 : k,
                          A_TRANSPOSED ? k : row0 + x * 64);
            const uint32_t b = to + layout::a_bytes + rank * gemm90_b_rows(WIDTH, B_TRANSPOSED) * 128;
#pragma unroll
            for (int x = 0; x < layout::b_boxes && B_TRANSPOSED; x++)
                tma_load2_all(b + x * BOX, &all.b, full, col0 + x * 64, k + rank * gemm90_b_rows(WIDTH, true), 3);
            if (!B_TRANSPOSED)
                tma_load2_all(b, &all.b, full, k,
                              col0 + rank * (PASS == GATE ? (int)all.g.cols : gemm90_b_rows(WIDTH, false)), 3);
            advance<gemm90<WIDTH>::stages>(&r);
        }
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

/* acc = A·B of a tile. */
template <typename T, int WIDTH, bool A_TRANSPOSED, bool B_TRANSPOSED>
INLINE void product90(int64_t depth, uint32_t smem, uint32_t empty_there, int group, ring *r, float (*acc)[4]) {
    typedef gemm90<WIDTH> layout;
    int before = 0;
#pragma unroll 1
    for (int64_t k = 0; k < depth; k += DEPTH) {
        const uint32_t at = smem + r->slot * layout::stage;
        const uint64_t a = describe_boxes(at + group * BOX), b = describe_boxes(at + layout::a_bytes);
        mbarrier_wait(smem + layout::full + r->slot * 8, r->turn);
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < DEPTH / 16; x++)
            if (A_TRANSPOSED)
                wgmma<T, WIDTH, B_TRANSPOSED>::run_both(acc, a + x * box_step(true), b + x * box_step(B_TRANSPOSED),
                                                        k + x > 0);
            else
                wgmma<T, WIDTH, B_TRANSPOSED>::run(acc, a + x * box_step(false), b + x * box_step(B_TRANSPOSED),
                                                   k + x > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0)
            release_slot(empty_there, before);
        before = r->slot;
        advance<layout::stages>(r);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int y = 0; y < WIDTH / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            pin(acc[y][e]);
    release_slot(empty_there, before);
}

/* ---------------------------------------------------------------------------------------------------------- kernel */

template <typename T, int WIDTH, int PASS> INLINE void consume(const norm_gemm &p, uint32_t smem, char *from) {
    typedef gemm90<WIDTH> layout;
    const int warp = (int)threadIdx.x / 32 - 4, lane = threadIdx.x % 32, row0 = warp * 16;
    const uint32_t empty_there = cluster_address(smem + layout::empty, warp % 2);
    ring r = {0, 0};
    gemm_tile t;
    for (uint32_t turn = 0; tile_of_turn<out_width<WIDTH, PASS>>(p, turn, &t); turn++) {
        const float2 *columns = (const float2 *)(from + layout::vectors + turn % 2 * layout::vector);
        float acc[WIDTH / 8][4];
        product90<T, WIDTH, PASS == DW, !is_forward<PASS>>(p.depth, smem, empty_there, warp / 4, &r, acc);
        mbarrier_wait(smem + layout::ready + turn % 2 * 8, turn / 2 & 1);
        const float2 row[2] = {columns[WIDTH + row0 + lane / 4], columns[WIDTH + row0 + lane / 4 + 8]};
        if (PASS == DW && p.part)
            sum_columns<T, WIDTH>(p, t, row0, from, acc);
        if constexpr (PASS == GATE)
            store_gated<T, WIDTH>(p, t, row0, columns, row, smem + layout::staging + warp * STAGING, acc);
        else if (PASS != DW || p.out)
            store_tile<T, WIDTH, PASS>(p, t, row0, columns, row, smem + layout::staging + warp * STAGING, acc);
        if (PASS == FWD && gathers_moments<T, PASS> && p.col_sum)
            remake_coarse<T>(p, row, t.row0 + row0, t.col0, t.col0 + WIDTH, true);
        mbarrier_arrive(smem + layout::taken + turn % 2 * 8);
    }
}

template <typename T, int WIDTH, int PASS> INLINE void gemm90_kernel(const norm_gemm_sm90 &all) {
    typedef gemm90<WIDTH> layout;
    extern __shared__ char shared[];
    const uint32_t smem = (shared_address(shared) + GEMM90_ALIGNMENT - 1) & ~(GEMM90_ALIGNMENT - 1u);
    char *const from = shared + (smem - shared_address(shared));
    if (threadIdx.x == 0) {
        tma_prefetch_map(&all.a);
        tma_prefetch_map(&all.b);
        for (int x = 0; x < layout::stages; x++) {
            mbarrier_init(smem + layout::full + x * 8, 1);
            mbarrier_init(smem + layout::empty + x * 8, 2 * CONSUMERS / WARPGROUP); /* of both blocks */
        }
        for (int x = 0; x < 2; x++) {
            mbarrier_init(smem + layout::ready + x * 8, HELPERS);
            mbarrier_init(smem + layout::taken + x * 8, CONSUMERS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();
    cluster_wait();
    wait_for_earlier_grid();
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    if (warp < 4) {
        registers_fewer<gathers_moments<T, PASS> ? 72 : 56>();
        if (threadIdx.x == 0)
            produce<WIDTH, PASS>(all, smem);
        else if (warp >= 1)
            help<T, WIDTH, PASS>(all.g, smem, from);
        __syncwarp();
    } else {
        registers_more<gathers_moments<T, PASS> ? 216 : 224>();
        consume<T, WIDTH, PASS>(all.g, smem, from);
    }
    /* Nobody leaves while the other block may still write here. */
    cluster_arrive();
    cluster_wait();
}

#define GEMM90_KERNEL(name, T, PRODUCT, WIDTH)                                                                         \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(WARPGROUP + CONSUMERS, 1)                   \
        heddle_norm_linear_##name##_sm90(const __grid_constant__ norm_gemm_sm90 all) {                                 \
        gemm90_kernel<T, WIDTH, PRODUCT>(all);                                                                         \
    }

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The product of forward for a few rows in 16-bit types on Hopper: W is read once, at the speed of memory.
 *
 * A cluster of two or four blocks stays and takes tile after tile of 64 rows of W. Its blocks share the terms: each has all rows of x in shared
 * memory, of its terms, and fetches its part of the tile, box after box of 64 terms, through a ring that runs on over the end of a tile. W
 * is the left operand, whose 64 rows are one product's; x is the right one. What the blocks have summed up meets in the block that stores it,
 * as many columns in each. Of more rows than a cluster has the next one has the others, and finds W in the second-level cache.
 *
 * Warps 0 to 3 multiply, 4 to 7 store, warp 8 fetches. */
#include "cuda/norm_linear/activation.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/norm_linear/sm90/contract.h"
#include "cuda/wgmma.cuh"

enum {
    BOX = GEMM90_BOX_BYTES,
    DEPTH = GEMM90_DEPTH,
    COLS = FEW90_COLS,
    PART = 32 * 16 /* bytes: of a warp, 16 of a lane */
};

/* Where what lies in shared memory, in every block alike, and what this block has. */
template <int ROWS, int BLOCKS> struct few_block {
    /* Eight columns of a tile and eight others are a pair: of two halves those of gate and up. A warp stores 16 rows of a pair. */
    static constexpr int pairs = COLS / 16 / BLOCKS, groups = ROWS / 16;
    static constexpr int x_box = ROWS * DEPTH * 2;
    static_assert(pairs * groups <= 4 && few90_sums_bytes(ROWS) == BLOCKS * pairs * 2 * groups * PART,
                  "as the plan counts");

    uint32_t rows, ring, sums, full, empty, x_there, sums_there, sums_taken;
    int rank, boxes;
    int row0, groups_inside; /* of x */
    int cols, width;         /* of y, and those of a tile */
    int col0, step;          /* this cluster's first tile, and from one to the next */

    __device__ few_block(const norm_gemm_sm90 &all, uint32_t smem) {
        const int cluster = (int)blockIdx.x / BLOCKS, depth = (int)all.g.depth;
        rank = (int)blockIdx.x % BLOCKS;
        boxes = (int)few90_boxes(depth, BLOCKS, rank);
        row0 = cluster % all.row_blocks * ROWS;
        groups_inside = (min(ROWS, (int)all.g.rows - row0) + 15) / 16;
        cols = (int)all.g.cols;
        width = all.gated ? COLS / 2 : COLS;
        col0 = cluster / all.row_blocks * width;
        step = (int)gridDim.x / BLOCKS / all.row_blocks * width;
        rows = smem;
        ring = rows + (uint32_t)few90_rows_bytes(ROWS, BLOCKS, depth);
        sums = ring + all.stages * BOX;
        full = sums + few90_sums_bytes(ROWS);
        empty = full + 8 * all.stages;
        x_there = empty + 8 * all.stages;
        sums_there = x_there + 8;
        sums_taken = sums_there + 8;
    }
};

INLINE void advance(ring *r, int stages) {
    if (++r->slot == stages) {
        r->slot = 0;
        r->turn ^= 1;
    }
}

/* ---------------------------------------------------------------------------------------------------------- copies */

template <int ROWS, int BLOCKS> INLINE void fetch_rows(const norm_gemm_sm90 &all, const few_block<ROWS, BLOCKS> &b) {
    wait_for_earlier_grid();
    mbarrier_expect(b.x_there, b.boxes * b.x_box);
    for (int x = 0; x < b.boxes; x++)
        tma_load2(b.rows + x * b.x_box, &all.a, b.x_there, (x * BLOCKS + b.rank) * DEPTH, b.row0);
}

/* One thread. A tile of two halves is half of it the gate's, half up's. As many boxes of W as there are stages may come before x is there. */
template <int ROWS, int BLOCKS> INLINE void fetch(const norm_gemm_sm90 &all, const few_block<ROWS, BLOCKS> &b) {
    ring r = {0, 0};
    int ahead = all.b_is_there ? all.stages : 0;
#pragma unroll 1
    for (int col = b.col0; col < b.cols; col += b.step)
#pragma unroll 1
        for (int box = 0; box < b.boxes; box++) {
            const uint32_t to = b.ring + r.slot * BOX, full = b.full + r.slot * 8;
            const int term = (box * BLOCKS + b.rank) * DEPTH;
            if (ahead-- == 0)
                fetch_rows(all, b);
            mbarrier_wait(b.empty + r.slot * 8, r.turn ^ 1);
            mbarrier_expect(full, BOX);
            tma_load2(to, &all.b, full, term, col);
            if (all.gated)
                tma_load2(to + BOX / 2, &all.b, full, term, b.cols + col);
            advance(&r, all.stages);
        }
    if (ahead >= 0)
        fetch_rows(all, b);
}

/* -------------------------------------------------------------------------------------------------------- products */

/* The sums of a tile of this block's terms, to the blocks that store them. A warp has 16 rows of W, two eights of columns. */
template <int ROWS, int BLOCKS>
INLINE void send_sums(const few_block<ROWS, BLOCKS> &b, bool gated, int warp, const float acc[ROWS / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int pair = gated ? warp % 2 * 2 + half : warp, of_pair = gated ? warp / 2 : half;
        const int block = pair / b.pairs, place = (b.rank * b.pairs + pair % b.pairs) * 2 + of_pair;
        const uint32_t from = b.sums + place * b.groups * PART + threadIdx.x % 32 * 16;
        const uint32_t to = cluster_address(from, block), barrier = cluster_address(b.sums_there, block);
#pragma unroll
        for (int y = 0; y < ROWS / 16; y++)
            if (y < b.groups_inside)
                store_async16(to + y * PART,
                              make_uint4(__float_as_uint(acc[2 * y][2 * half]),
                                         __float_as_uint(acc[2 * y][2 * half + 1]),
                                         __float_as_uint(acc[2 * y + 1][2 * half]),
                                         __float_as_uint(acc[2 * y + 1][2 * half + 1])),
                              barrier);
    }
}

template <typename T, int ROWS, int BLOCKS>
INLINE void multiply(const norm_gemm_sm90 &all, const few_block<ROWS, BLOCKS> &b, int warp) {
    const bool leads = threadIdx.x % 32 == 0;
    ring r = {0, 0};
    int turn = 0;
    mbarrier_wait(b.x_there, 0);
#pragma unroll 1
    for (int col = b.col0; col < b.cols; col += b.step, turn ^= 1) {
        float acc[ROWS / 8][4];
        int before = 0;
#pragma unroll 1
        for (int box = 0; box < b.boxes; box++) {
            const uint64_t w = describe(b.ring + r.slot * BOX, BOX, 1024),
                           x = describe(b.rows + box * b.x_box, BOX, 1024);
            mbarrier_wait(b.full + r.slot * 8, r.turn);
            wgmma_fence();
#pragma unroll
            for (int term = 0; term < DEPTH / 16; term++)
                wgmma<T, ROWS, 0>::run(acc, w + term * 2, x + term * 2, box + term > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (box > 0 && leads)
                mbarrier_arrive(b.empty + before * 8);
            before = r.slot;
            advance(&r, all.stages);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int y = 0; y < ROWS / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                pin(acc[y][e]);
        if (leads)
            mbarrier_arrive(b.empty + before * 8);
        mbarrier_wait(b.sums_taken, turn ^ 1);
        send_sums<ROWS>(b, all.gated, warp, acc);
    }
}

/* --------------------------------------------------------------------------------------------------------- results */

/* A lane's results of a pair: rows row0 + 0, 1, 8 and 9, and a column `at` of y and another, of up where there are two halves; where they
 * lie in u; what is added to them. */
struct few_results {
    int64_t at[2], in_u[2];
    bool inside[2];
    float bias[2], residual[2][4], v[2][4];
};

INLINE int64_t row_of(int row0, int e) {
    return row0 + e / 2 * 8 + e % 2;
}

/* Where they are, and what is read of memory for them, while their sums are formed. */
template <typename T> INLINE void prepare_results(const norm_gemm &p, bool gated, int row0, int col, few_results *r) {
#pragma unroll
    for (int x = 0; x < 2; x++) {
        r->at[x] = gated ? col : col + x * 8;
        r->inside[x] = r->at[x] < p.cols;
        r->in_u[x] = r->at[x] + (gated ? x * p.cols : 0);
        r->bias[x] = p.bias && r->inside[x] ? to_float(((const T *)p.bias)[r->in_u[x]]) : 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int64_t row = row_of(row0, e);
            const bool adds = p.residual && r->inside[x] && row < p.rows && !(gated && x);
            r->residual[x][e] = adds ? to_float(((const T *)p.residual)[row * p.ldr + r->at[x]]) : 0;
            r->v[x][e] = 0;
        }
    }
}

template <typename T> INLINE void store_results(const norm_gemm &p, bool gated, int row0, few_results *r) {
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int64_t row = row_of(row0, e);
            r->v[x][e] += r->bias[x];
            if (p.u && r->inside[x] && row < p.rows)
                from_float((T *)p.u + row * p.ldu + r->in_u[x], r->v[x][e]);
        }
    if (p.activation) {
#pragma unroll
        for (int x = 0; x < 8; x++)
            r->v[x / 4][x % 4] = to_float(from_float<T>(r->v[x / 4][x % 4]));
        activate<T, 4, false>(p.activation, r->v[0]);
        if (!gated)
            activate<T, 4, false>(p.activation, r->v[1]);
    }
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int64_t row = row_of(row0, e);
            const float y = gated ? fmaf(r->v[0][e], r->v[1][e], r->residual[0][e]) : r->v[x][e] + r->residual[x][e];
            if (r->inside[x] && row < p.rows && !(gated && x))
                from_float((T *)p.out + row * p.ldo + r->at[x], y);
        }
}

/* The number-th of the warps that store: 16 rows of a pair of this block's columns, of every tile. */
template <typename T, int ROWS, int BLOCKS>
INLINE void store(const norm_gemm_sm90 &all, const few_block<ROWS, BLOCKS> &b, int number) {
    const int lane = threadIdx.x % 32, group = number % b.groups, pair = number / b.groups;
    const int row0 = b.row0 + group * 16 + lane % 4 * 2;
    const int right = (b.rank * b.pairs + pair) * (all.gated ? 8 : 16) + lane / 4; /* from a tile's first column */
    const uint32_t taken = cluster_address(b.sums_taken, lane % BLOCKS);
    int turn = 0;
    if (group >= b.groups_inside || pair >= b.pairs)
        return;
#pragma unroll 1
    for (int col = b.col0; col < b.cols; col += b.step, turn ^= 1) {
        few_results r;
        prepare_results<T>(all.g, all.gated, row0, col + right, &r);
        if (number == 0 && lane == 0)
            mbarrier_expect(b.sums_there, b.groups_inside * BLOCKS * b.pairs * 2 * PART);
        mbarrier_wait(b.sums_there, turn);
#pragma unroll
        for (int x = 0; x < BLOCKS; x++)
#pragma unroll
            for (int of_pair = 0; of_pair < 2; of_pair++) {
                const int place = (x * b.pairs + pair) * 2 + of_pair;
                const uint4 from = load_shared16(b.sums + (place * b.groups + group) * PART + lane * 16);
                r.v[of_pair][0] += __uint_as_float(from.x);
                r.v[of_pair][1] += __uint_as_float(from.y);
                r.v[of_pair][2] += __uint_as_float(from.z);
                r.v[of_pair][3] += __uint_as_float(from.w);
            }
        __syncwarp();
        if (lane < BLOCKS)
            mbarrier_arrive_at(taken);
        store_results<T>(all.g, all.gated, row0, &r);
    }
}

/* ---------------------------------------------------------------------------------------------------------- kernel */

template <typename T, int ROWS, int BLOCKS> INLINE void few_kernel(const norm_gemm_sm90 &all) {
    extern __shared__ char shared[];
    const few_block<ROWS, BLOCKS> b(all, (shared_address(shared) + GEMM90_ALIGNMENT - 1) & ~(GEMM90_ALIGNMENT - 1u));
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&all.a);
        tma_prefetch_map(&all.b);
        for (int x = 0; x < all.stages; x++) {
            mbarrier_init(b.full + x * 8, 1);
            mbarrier_init(b.empty + x * 8, WARPGROUP / 32);
        }
        mbarrier_init(b.x_there, 1);
        mbarrier_init(b.sums_there, 1);
        mbarrier_init(b.sums_taken, BLOCKS * b.groups_inside * b.pairs);
        mbarrier_init_fence();
    }
    __syncthreads();
    cluster_arrive_relaxed();
    if (warp == 8 && threadIdx.x % 32 == 0)
        fetch(all, b);
    cluster_wait(); /* nobody sends before all have their barriers */
    if (warp < 4) {
        multiply<T>(all, b, warp);
    } else if (warp < 8) {
        wait_for_earlier_grid();
        store<T>(all, b, warp - 4);
    }
    __syncwarp();
    /* Nobody leaves while others may still write here. */
    cluster_arrive_relaxed();
    cluster_wait();
}

#define F(pass, rows, blocks) enum { rows_##pass = rows, blocks_##pass = blocks };
FEW90_KINDS(F)
#undef F
#define blocks_of_fwd_few_r32 2
#define blocks_of_fwd_few_r32_long 4
#define blocks_of_fwd_few_r64 4
#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == FEW90_THREADS && blocks_of_##pass == blocks_##pass, "as the plan counts");                \
    extern "C" __global__ void __cluster_dims__(blocks_of_##pass, 1, 1) __launch_bounds__(threads, 1)                  \
        heddle_norm_linear_##pass##_##dtype##_##family(const __grid_constant__ norm_gemm_sm90 all) {                   \
        few_kernel<dtype, rows_##pass, blocks_##pass>(all);                                                            \
    }

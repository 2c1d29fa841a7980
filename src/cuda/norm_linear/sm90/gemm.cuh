/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear on Hopper, in 16-bit types: wgmma, the copy engine, and clusters of two blocks.
 *
 * A block stays and takes one tile of 128 rows and WIDTH columns after the other; the two blocks of a cluster have tiles one
 * below the other, and each fetches half of their common columns for both. One thread copies, two warpgroups of 64 rows
 * multiply, and three warps (the helpers) bring what the epilogue needs of every row and column; where raw x is multiplied,
 * they form the rows' moments, too, once for all blocks.
 *
 * A tile in shared memory is boxes of 64 x 64 elements, 128 bytes a row, swizzled by the copy engine, one behind the other
 * along its side. As such a box lies, tensor cores take it with its rows along the sum or over it. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_GEMM_SM90_CUH
#define HEDDLE_CUDA_NORM_LINEAR_GEMM_SM90_CUH

#include "cuda/element.cuh"
#include "cuda/norm_linear/activation.cuh"
#include "cuda/norm_linear/lanes.cuh"
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
enum gemm_pass { FWD, DX, DW };

/* Raw x is multiplied in bfloat16 alone. */
template <typename T, int PASS> constexpr bool gathers_moments = false;
template <> constexpr bool gathers_moments<bf16, FWD> = true;

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

/* ----------------------------------------------------------------------------------------------------------- copies */

/* One thread: all tiles of this block, as far ahead as there are slots. Of the columns each block of the cluster brings half for both:
 * of their rows, and so half of the columns, or where B is transposed half of the terms. */
template <int WIDTH, bool A_TRANSPOSED, bool B_TRANSPOSED>
INLINE void produce(const norm_gemm_sm90 &all, uint32_t smem) {
    typedef gemm90<WIDTH> layout;
    constexpr int BYTES = layout::a_bytes + (B_TRANSPOSED ? layout::b_boxes * BOX : WIDTH * DEPTH * 2);
    const int depth = (int)all.g.depth, rank = blockIdx.x % 2;
    ring r = {0, 0};
    gemm_tile t;
    for (uint32_t turn = 0; tile_of_turn<WIDTH>(all.g, turn, &t); turn++) {
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
                tma_load2_all(b, &all.b, full, k, col0 + rank * gemm90_b_rows(WIDTH, false), 3);
            advance<gemm90<WIDTH>::stages>(&r);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------- helpers */

/* What the epilogue needs of a column, and of a row. */
template <typename T, int PASS> INLINE float2 column_pair(const norm_gemm &p, int64_t col) {
    const T *gamma = (const T *)p.gamma, *beta = (const T *)p.beta, *bias = (const T *)p.bias;
    if (col >= p.cols)
        return make_float2(0, 0);
    if (PASS == FWD)
        return make_float2(p.col_sum ? p.col_sum[col] : 0, p.col_add ? p.col_add[col] : bias ? to_float(bias[col]) : 0);
    return make_float2(gamma ? to_float(gamma[col]) : 1, beta ? to_float(beta[col]) : 0);
}

template <int PASS> INLINE float2 row_pair(const norm_gemm &p, int64_t row) {
    if (row >= p.rows)
        return make_float2(0, 0);
    if (PASS == FWD)
        return p.gathers ? make_float2(__ldcg(p.saved_mean + row), __ldcg(p.saved_rstd + row)) /* from another block */
               : p.mean  ? make_float2(p.mean[row], p.rstd[row])
                         : make_float2(0, 1);
    return make_float2(PASS == DW && p.row_bias ? p.row_bias[row] : 0, 0);
}

/* Rows whose moments a warp forms at a time; such slices of a tile; chunks of eight elements of a row that a lane has on their way. */
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

/* The moments of a tile's rows are there when this returns. All warps of all blocks that come to the tile share the work, a slice at a time, and
 * then wait for slices that others have: a warp that has one is running, so this ends. */
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

template <typename T, int WIDTH, int PASS> INLINE void help(const norm_gemm &p, uint32_t smem, char *from) {
    typedef gemm90<WIDTH> layout;
    const int thread = (int)threadIdx.x - 32;
    gemm_tile t;
    for (uint32_t turn = 0; tile_of_turn<WIDTH>(p, turn, &t); turn++) {
        float2 *columns = (float2 *)(from + layout::vectors + turn % 2 * layout::vector), *rows = columns + WIDTH;
        if (gathers_moments<T, PASS> && p.gathers)
            settle_moments<T>(p, t.row_tile);
        mbarrier_wait(smem + layout::taken + turn % 2 * 8, (turn / 2 & 1) ^ 1);
        for (int x = thread; x < WIDTH; x += HELPERS)
            columns[x] = column_pair<T, PASS>(p, t.col0 + x);
        for (int x = thread; x < GEMM_TILE; x += HELPERS)
            rows[x] = row_pair<PASS>(p, t.row0 + x);
        mbarrier_arrive(smem + layout::ready + turn % 2 * 8);
    }
}

/* --------------------------------------------------------------------------------------------------------- products */

/* Boxes from `at` on: a box from one to the next where their rows lie over the sum (else that is not looked at), 1024 bytes from 8 rows
 * to 8 rows. */
INLINE uint64_t describe_boxes(uint32_t at) {
    return describe(at, BOX, 1024);
}

/* Sixteen terms further. */
INLINE constexpr int box_step(bool transposed) {
    return (transposed ? 16 * 128 : 32) >> 4;
}

/* A slot is free: of a warpgroup, whose warps read B in step, the first thread of warp x tells block x of the cluster. Arrivals
 * from another block are dear: one from every warp would cost more than the products. */
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

/* -------------------------------------------------------------------------------------------------------- epilogues */

/* Two neighbouring results of one row. c: both columns' pairs. */
template <int PASS> INLINE void epilogue_pair(const float4 &c, const float2 &row, float *v0, float *v1) {
    if (PASS == FWD) {
        *v0 = row.y * (*v0 - row.x * c.x) + c.y;
        *v1 = row.y * (*v1 - row.x * c.z) + c.w;
    } else if (PASS == DW) {
        *v0 = *v0 * c.x + row.x * c.y;
        *v1 = *v1 * c.z + row.x * c.w;
    }
}

/* Eight results side by side, of which so many are inside. One instruction: the compiler would rather make four. */
INLINE void store_eight(void *to, int64_t inside, const uint4 &eight) {
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
    if (inside >= 8) {
        store_global16(to, eight);
        return;
    }
#pragma unroll
    for (int x = 0; x < 8; x++)
        if (x < inside)
            ((uint16_t *)to)[x] = (uint16_t)(words[x / 2] >> x % 2 * 16);
}

/* What of a row of a warp's results is another lane's. */
INLINE uint4 staged_eight(uint32_t staging, int line) {
    return load_shared16(staging + line * 128 + ((threadIdx.x % 8 ^ line) & 7) * 16);
}

/* Rows that are staged as u: those to u, act of them to out. */
template <typename T>
INLINE void store_activated(const norm_gemm &p, int64_t row, int64_t col, int chunks, uint32_t staging) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int line = lane / 8; line < 16; line += 4) {
        const int64_t at = row + line;
        if (lane % 8 >= chunks || at >= p.rows)
            continue;
        const uint4 u = staged_eight(staging, line);
        const uint32_t words[4] = {u.x, u.y, u.z, u.w};
        float v[8];
        if (p.u)
            store_eight((T *)p.u + at * p.ldu + col, p.cols - col, u);
#pragma unroll
        for (int x = 0; x < 8; x++)
            v[x] = x % 2 ? high_float(words[x / 2], T()) : low_float(words[x / 2], T());
        activate8<false>(p.activation, v);
        store_eight((T *)p.out + at * p.ldo + col, p.cols - col,
                    make_uint4(pack_pair(v[0], v[1], T()), pack_pair(v[2], v[3], T()), pack_pair(v[4], v[5], T()),
                               pack_pair(v[6], v[7], T())));
    }
}

/* Results of a warp, 16 rows, 64 columns at a time: through shared memory, so that whole rows of 128 bytes are written. */
template <typename T, int WIDTH, int PASS>
INLINE void store_tile(const norm_gemm &p, const gemm_tile &t, int row0, const float2 *columns, const float2 row[2],
                       uint32_t staging, float (*acc)[4]) {
    const int lane = threadIdx.x % 32;
    const int64_t first = t.row0 + row0 + lane / 8;
    const bool whole = t.row0 + GEMM_TILE <= p.rows && t.col0 + WIDTH <= p.cols;
#pragma unroll
    for (int y = 0; y < WIDTH / 8; y += 8) {
        const int chunks = WIDTH / 8 - y < 8 ? WIDTH / 8 - y : 8;
        float4 c[8] = {};
#pragma unroll
        for (int x = 0; x < 8; x++)
            if (x < chunks && PASS != DX)
                c[x] = *(const float4 *)(columns + (y + x) * 8 + lane % 4 * 2);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            if (2 * x >= chunks)
                continue;
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float *v = acc[y + 2 * x + e];
                epilogue_pair<PASS>(c[2 * x + e], row[0], v, v + 1);
                epilogue_pair<PASS>(c[2 * x + e], row[1], v + 2, v + 3);
                r[2 * e] = pack_pair(v[0], v[1], T());
                r[2 * e + 1] = pack_pair(v[2], v[3], T());
            }
            stmatrix4(staging + (lane & 15) * 128 + ((2 * x + (lane >> 4)) ^ (lane & 7)) * 16, r);
        }
        __syncwarp();
        const int64_t col = t.col0 + y * 8 + lane % 8 * 8;
        if (PASS == FWD && p.activation) {
            store_activated<T>(p, t.row0 + row0, col, chunks, staging);
            __syncwarp();
            continue;
        }
        uint4 eight[4];
#pragma unroll
        for (int x = 0; x < 4; x++)
            eight[x] = staged_eight(staging, x * 4 + lane / 8);
        __syncwarp();
        T *const to = (T *)p.out + first * p.ldo + col;
#pragma unroll
        for (int x = 0; x < 4; x++)
            if (whole && lane % 8 < chunks)
                store_global16(to + x * 4 * p.ldo, eight[x]);
#pragma unroll
        for (int x = 0; x < 4; x++)
            if (!whole && lane % 8 < chunks && first + x * 4 < p.rows)
                store_eight(to + x * 4 * p.ldo, p.cols - col, eight[x]);
    }
}

/* The eight sums over the eight lanes that differ in lane/4; this lane gets that of v[lane/4]. */
INLINE float scatter_sums(float v[8]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        const bool upper = lane & 4 * half;
#pragma unroll
        for (int x = 0; x < half; x++) {
            const float mine = upper ? v[x + half] : v[x], other = upper ? v[x] : v[x + half];
            v[x] = mine + __shfl_xor_sync(~0u, other, 4 * half);
        }
    }
    return v[0];
}

/* Columns y·8 + lane%4·2 + 0, 1 of W, in two rows; zeros outside. */
INLINE void load_w(const norm_gemm &p, const gemm_tile &t, int64_t row, int y, uint32_t two[2]) {
    const int64_t col = t.col0 + y * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++, row += 8) {
        const uint16_t *w = (const uint16_t *)p.w + row * p.ldx + col;
        two[half] = 0;
        if (row < p.rows && col + 1 < p.cols)
            two[half] = *(const uint32_t *)w;
        else if (row < p.rows && col < p.cols)
            two[half] = *w;
    }
}

/* dw: the sums over the tile's rows of W∘G to part; by way of the staging area. The next columns of W are on their way meanwhile. */
template <typename T, int WIDTH>
INLINE void sum_columns(const norm_gemm &p, const gemm_tile &t, int row0, char *from, const float (*acc)[4]) {
    typedef gemm90<WIDTH> layout;
    const int lane = threadIdx.x % 32, thread = (int)threadIdx.x - WARPGROUP;
    constexpr int OWN = STAGING / 4; /* floats: where the warp's own results are staged; another's may not be out yet */
    float *sums = (float *)(from + layout::staging);
    const int64_t row = t.row0 + row0 + lane / 4;
    uint32_t w[2][4][2];
#pragma unroll
    for (int y = -4; y < WIDTH / 8; y += 4) {
        const int now = y / 4 & 1;
#pragma unroll
        for (int x = 0; x < 4 && y + 4 < WIDTH / 8; x++)
            load_w(p, t, row, y + 4 + x, w[now ^ 1][x]);
        if (y < 0)
            continue;
        float v[8];
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const uint32_t upper = w[now][x][0], lower = w[now][x][1];
            v[2 * x] = low_float(upper, T()) * acc[y + x][0] + low_float(lower, T()) * acc[y + x][2];
            v[2 * x + 1] = high_float(upper, T()) * acc[y + x][1] + high_float(lower, T()) * acc[y + x][3];
        }
        const int value = lane / 4;
        sums[thread / 32 * OWN + (y + value / 2) * 8 + lane % 4 * 2 + value % 2] = scatter_sums(v);
    }
    barrier_sync(1, CONSUMERS);
    if (thread < WIDTH && t.row0 < p.rows && t.col0 + thread < p.cols) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < CONSUMERS / 32; warp++)
            sum += sums[warp * OWN + thread];
        p.part[t.row_tile * p.cols + t.col0 + thread] = sum;
    }
    barrier_sync(1, CONSUMERS);
}

template <typename T, int WIDTH, int PASS> INLINE void consume(const norm_gemm &p, uint32_t smem, char *from) {
    typedef gemm90<WIDTH> layout;
    const int warp = (int)threadIdx.x / 32 - 4, lane = threadIdx.x % 32, row0 = warp * 16;
    const uint32_t empty_there = cluster_address(smem + layout::empty, warp % 2);
    ring r = {0, 0};
    gemm_tile t;
    for (uint32_t turn = 0; tile_of_turn<WIDTH>(p, turn, &t); turn++) {
        const float2 *columns = (const float2 *)(from + layout::vectors + turn % 2 * layout::vector);
        float acc[WIDTH / 8][4];
        product90<T, WIDTH, PASS == DW, PASS != FWD>(p.depth, smem, empty_there, warp / 4, &r, acc);
        mbarrier_wait(smem + layout::ready + turn % 2 * 8, turn / 2 & 1);
        const float2 row[2] = {columns[WIDTH + row0 + lane / 4], columns[WIDTH + row0 + lane / 4 + 8]};
        if (PASS == DW && p.part)
            sum_columns<T, WIDTH>(p, t, row0, from, acc);
        if (PASS != DW || p.out)
            store_tile<T, WIDTH, PASS>(p, t, row0, columns, row, smem + layout::staging + warp * STAGING, acc);
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
            produce<WIDTH, PASS == DW, PASS != FWD>(all, smem);
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

/* SPDX-License-Identifier: Apache-2.0
 * Forward of a few rows in 16-bit types, in one launch: W is read once, at the speed of memory, and does not touch shared memory.
 *
 * A block stays on its multiprocessor and has up to 16 rows of x, normalised, in shared memory; of more rows the next block has the rest, and
 * finds the same rows of W in the second-level cache. It takes 16 rows of W at a time, whose terms its warps
 * share; what they sum up to meets in shared memory. The tensor cores' left operand is W as a lane reads it, 16 bytes of a row: which
 * of its terms are neighbours does not matter to a sum, as long as x lies the same way. */
#include "cuda/norm_linear/activation.cuh"
#include "cuda/norm_linear/contract.h"
#include "cuda/norm_linear/lanes.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/ptx.cuh"

enum { WARPS = FEW_THREADS / 32, AHEAD = 4 /* pieces of 64 terms that a lane has on their way */, PART = FEW_PART };

INLINE void mma(float c[4], const uint32_t a[4], const uint32_t b[2], bf16) {
    mma_bf16(c, a, b);
}
INLINE void mma(float c[4], const uint32_t a[4], const uint32_t b[2], f16) {
    mma_f16(c, a, b);
}

/* The warps that share a row, 2^log2 of them, among which this thread is number `lane`; teams are numbered. */
typedef struct row_team {
    int log2, number, lane;
} row_team;

/* As many as there are for so many rows. */
INLINE row_team team_for(int rows) {
    int log2 = 0;
    while (WARPS >> (log2 + 1) >= rows)
        log2++;
    const int number = (int)threadIdx.x / 32 >> log2;
    return {log2, number, (int)threadIdx.x - (number << log2) * 32};
}

/* Over the team, to all of it. slots: [2][WARPS], of which *turn is next. */
INLINE float team_sum(const row_team &t, float x, float *slots, int *turn) {
    x = warp_sum(x);
    if (t.log2 == 0)
        return x;
    float *const own = slots + *turn * WARPS + (t.number << t.log2);
    *turn ^= 1;
    if (t.lane % 32 == 0)
        own[t.lane / 32] = x;
    barrier_sync(1 + t.number, 32 << t.log2);
    x = own[0];
    for (int warp = 1; warp < 1 << t.log2; warp++)
        x += own[warp];
    return x;
}

/* xhat∘gamma + beta of the rows to z, in shared memory, where lane l of a warp finds its part of the right operand of 32 terms in the l-th 16 bytes. */
template <typename T, int ROWS>
INLINE void normalise_rows(const norm_few &p, int row0, bool stores, char *z, float *slots) {
    const int padded = few_padded(p.k);
    const row_team t = team_for(min(ROWS, p.m - row0));
    const int step = 256 << t.log2;
    int turn = 0;
    for (int row = t.number; row < ROWS; row += WARPS >> t.log2) {
        const T *const x = (const T *)p.x + (row0 + row) * p.x_stride;
        const int inside = row0 + row < p.m ? p.k : 0;
        float2 all = make_float2(0, 1);
        if (!p.plain && inside) {
            lane_moments m = {0, 0, 0};
#pragma unroll 4
            for (int e = t.lane * 8; e < inside; e += step)
                add_chunk<T>(&m, __ldg((const uint4 *)(x + e)), e < step, !p.rms);
            all = moments_of_lanes(m, t.lane, 32 << t.log2, p.k, p.rms, p.inverse, p.eps,
                                   [&](float sum) { return team_sum(t, sum, slots, &turn); });
        }
        if (t.lane == 0 && stores && inside) {
            if (p.mean)
                p.mean[row0 + row] = all.x;
            if (p.rstd)
                p.rstd[row0 + row] = all.y;
        }
#pragma unroll 4
        for (int e = t.lane * 8; e < padded; e += step) {
            float v[8], other[8];
            chunk8<T>(x, e, inside, v);
#pragma unroll
            for (int i = 0; i < 8; i++)
                v[i] = (v[i] - all.x) * all.y;
            if (p.gamma) {
                chunk8<T>(p.gamma, e, p.k, other);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    v[i] *= other[i];
            }
            if (p.beta) {
                chunk8<T>(p.beta, e, p.k, other);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    v[i] += other[i];
            }
            uint4 four = make_uint4(0, 0, 0, 0);
            if (e < inside)
                four = make_uint4(pack_pair(v[0], v[1], T()), pack_pair(v[2], v[3], T()), pack_pair(v[4], v[5], T()),
                                  pack_pair(v[6], v[7], T()));
            *(uint4 *)(z + ((e / 32 * (ROWS / 8) + row / 8) * 32 + row % 8 * 4 + e / 8 % 4) * 16) = four;
        }
    }
}

/* Of each piece both halves, and of 16 rows of W two. */
template <typename T> INLINE void load_w(const norm_few &p, int tile, int group, uint4 w[AHEAD][2][2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int x = 0; x < AHEAD; x++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const int64_t col = (int64_t)tile * FEW_COLS + lane / 4 + 8 * y;
                const int e = ((group * AHEAD + x) * WARPS + warp) * 64 + half * 32 + lane % 4 * 8;
                w[x][half][y] = col < p.n && e < p.k ? __ldg((const uint4 *)((const T *)p.w + col * p.w_stride + e))
                                                     : make_uint4(0, 0, 0, 0);
            }
}

template <typename T, int ROWS>
INLINE void multiply(const norm_few &p, int group, const char *z, const uint4 w[AHEAD][2][2], float acc[ROWS / 8][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, padded = few_padded(p.k);
#pragma unroll
    for (int x = 0; x < AHEAD; x++) {
        const int e = ((group * AHEAD + x) * WARPS + warp) * 64;
        if (e >= padded)
            continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 a = w[x][half][0], c = w[x][half][1];
            const uint32_t first[4] = {a.x, c.x, a.y, c.y}, second[4] = {a.z, c.z, a.w, c.w};
#pragma unroll
            for (int y = 0; y < ROWS / 8; y++) {
                const uint4 b = *(const uint4 *)(z + (((e / 32 + half) * (ROWS / 8) + y) * 32 + lane) * 16);
                const uint32_t low[2] = {b.x, b.y}, high[2] = {b.z, b.w};
                mma(acc[y], first, low, T());
                mma(acc[y], second, high, T());
            }
        }
    }
}

/* A lane stores eight columns of a row of y. */
template <typename T, int ROWS> INLINE void store_sums(const norm_few &p, int row0, int tile, const float *parts) {
    const int lane = threadIdx.x % 32, own = lane / 2, row = row0 + own;
    const int64_t col = (int64_t)tile * FEW_COLS + lane % 2 * 8;
    float v[8] = {};
    if (own >= ROWS || row >= p.m || col >= p.n)
        return;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
#pragma unroll
        for (int x = 0; x < 8; x += 4) {
            const float4 four = *(const float4 *)(parts + (warp * ROWS + own) * PART + lane % 2 * 8 + x);
            v[x] += four.x;
            v[x + 1] += four.y;
            v[x + 2] += four.z;
            v[x + 3] += four.w;
        }
#pragma unroll
    for (int x = 0; x < 8; x++)
        if (p.bias && col + x < p.n)
            v[x] += to_float(((const T *)p.bias)[col + x]);
    if (p.activation) {
        if (p.u)
            store8((T *)p.u + row * p.u_stride, col, p.n, p.vector, v);
#pragma unroll
        for (int x = 0; x < 8; x++)
            v[x] = to_float(from_float<T>(v[x]));
        activate<float, 8, false>(p.activation, v); /* the shorter polynomial takes more registers here */
    }
    if (p.residual) {
        float more[8];
        load8((const T *)p.residual + row * p.residual_stride, col, p.n, p.vector, more);
#pragma unroll
        for (int x = 0; x < 8; x++)
            v[x] += more[x];
    }
    store8((T *)p.y + row * p.y_stride, col, p.n, p.vector, v);
}

template <typename T, int ROWS> INLINE void few_kernel(const norm_few &p) {
    extern __shared__ __align__(16) char z[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = few_groups(p.k), tiles = few_tiles(p.n);
    float *const parts = (float *)(z + few_rows_bytes(ROWS, p.k));
    const int first = (int)blockIdx.x / p.row_blocks, step = (int)gridDim.x / p.row_blocks;
    const int row0 = (int)blockIdx.x % p.row_blocks * ROWS;
    uint4 w[AHEAD][2][2];
    load_w<T>(p, first, 0, w);
    normalise_rows<T, ROWS>(p, row0, first == 0, z, parts);
    __syncthreads();
    int turn = 0;
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += step, turn ^= 1) {
        float acc[ROWS / 8][4] = {};
#pragma unroll 1
        for (int group = 0; group < groups; group++) {
            const bool last = group + 1 == groups;
            multiply<T, ROWS>(p, group, z, w, acc);
            load_w<T>(p, last ? tile + step : tile, last ? 0 : group + 1, w);
        }
        float *const own = parts + (turn * WARPS + warp) * ROWS * PART + lane % 4 * 2 * PART + lane / 4;
#pragma unroll
        for (int y = 0; y < ROWS / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                own[(y * 8 + e % 2) * PART + e / 2 * 8] = acc[y][e];
        __syncthreads();
        if (warp == tile / step % WARPS)
            store_sums<T, ROWS>(p, row0, tile, parts + turn * WARPS * ROWS * PART);
    }
}

#define rows_few_r8 8
#define rows_few_r16 16
#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == FEW_THREADS, "as the kernel counts");                                                     \
    extern "C" __global__ void __launch_bounds__(threads, 1)                                                           \
        heddle_norm_linear_##pass##_##dtype##_##family(const __grid_constant__ norm_few p) {                           \
        wait_for_earlier_grid();                                                                                       \
        few_kernel<dtype, rows_##pass>(p);                                                                             \
    }

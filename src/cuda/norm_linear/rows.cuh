/* SPDX-License-Identifier: Apache-2.0
 * Rows of matrices, one after the other at the speed of memory: who has which, and how it comes in. Part of norm_linear/prepare.cu and
 * norm_linear/finish.cu. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_ROWS_CUH
#define HEDDLE_CUDA_NORM_LINEAR_ROWS_CUH

#include "cuda/element.cuh"
#include "cuda/norm_linear/contract.h"
#include "cuda/norm_linear/params.h"
#include "cuda/ptx.cuh"

/* A row is a team's: a few warps, one if it is short. A thread has every TEAM-th chunk of eight elements; the first HELD of them wait in
 * shared memory, of the row at hand and of the next ones. Each thread copies and reads its own alone, so that nobody waits for others. */

/* Where warps meet: two turns, so that one barrier a sum is enough. */
struct meeting {
    float2 slots[2][ROW_THREADS / 32];
    int least[ROW_THREADS / 32];
};
static_assert(sizeof(meeting) <= MEETING_BYTES, "as the plan counts");

/* A row of one tensor, and where this thread's chunks of it lie in shared memory. */
template <typename T, int HELD> struct row_of {
    enum { PIECES = sizeof(T) / 2, BYTES = HELD * PIECES * ROW_THREADS * 16 }; /* 16 bytes each */
    const T *p;
    const char *at;
    int cols;
    bool vector; /* p is aligned to 16 bytes; else nothing lies in shared memory */
};

INLINE void unpack8(const uint4 *from, float v[8], float) {
    *(uint4 *)v = from[0];
    *(uint4 *)(v + 4) = from[ROW_THREADS];
}

template <typename T> INLINE void unpack8(const uint4 *from, float v[8], T) {
    T h[8];
    *(uint4 *)h = from[0];
#pragma unroll
    for (int x = 0; x < 8; x++)
        v[x] = to_float(h[x]);
}

/* The c-th chunk, at column e. */
template <typename T, int HELD> INLINE void get(const row_of<T, HELD> &r, int c, int e, float v[8]) {
    if (c < HELD && r.vector)
        unpack8((const uint4 *)r.at + c * row_of<T, HELD>::PIECES * ROW_THREADS, v, T());
    else
        load8(r.p, e, r.cols, r.vector, v);
}

/* This thread's chunks are on their way. */
template <int TEAM, typename T, int HELD> INLINE void fetch(const row_of<T, HELD> &r) {
    const uint32_t to = shared_address(r.at);
#pragma unroll
    for (int c = 0; c < HELD && r.vector; c++) {
        const int e = (int)(threadIdx.x % TEAM + c * TEAM) * 8;
#pragma unroll
        for (int x = 0; x < row_of<T, HELD>::PIECES; x++) {
            const int left = (r.cols - e) * (int)sizeof(T) - 16 * x, bytes = left < 0 ? 0 : left < 16 ? left : 16;
            const uint32_t at = to + (c * row_of<T, HELD>::PIECES + x) * ROW_THREADS * 16;
            if (e < r.cols && sizeof(T) == 2) /* what is past the end becomes zero */
                cp_async16(at, r.p + e, bytes);
            else if (e < r.cols)
                cp_async16_cached(at, (const char *)(r.p + e) + 16 * x, bytes);
        }
    }
}

/* Of a list of rows whose first units (of as many rows as a block has teams) are others', this block's from its `unit` on. fetch_row(row,
 * stage) begins copies to one of so many stages, work(row, stage) finds them done. Counts `unit` past the list. */
template <int TEAM, int STAGES, typename FETCH, typename WORK>
INLINE void each_row(uint32_t *unit, int64_t rows, const FETCH &fetch_row, const WORK &work) {
    constexpr int TEAMS = ROW_THREADS / TEAM, AHEAD = STAGES - 1;
    const uint32_t units = (uint32_t)((rows + TEAMS - 1) / TEAMS);
    const int64_t step = (int64_t)gridDim.x * TEAMS;
    int64_t row = (int64_t)*unit * TEAMS + threadIdx.x / TEAM - AHEAD * step;
    int stage = 0, next = 0;
#pragma unroll 1
    for (int x = -AHEAD; row < rows; x++, row += step) {
        if (row + AHEAD * step < rows)
            fetch_row(row + AHEAD * step, next);
        next = next + 1 == STAGES ? 0 : next + 1;
        cp_async_commit();
        if (x < 0)
            continue;
        cp_async_wait<AHEAD>();
        work(row, stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    if (*unit < units)
        *unit += (units - *unit + gridDim.x - 1) / gridDim.x * gridDim.x;
    *unit -= units;
}

/* The same to every thread of the team. `turn` flips with every call. EXACT: x has a low part, and no warp rounds its sum but once. */
template <int TEAM, bool EXACT = false> INLINE float2 team_sum(float x, float y, meeting *m, int *turn, float low = 0) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(~0u, x, step);
        if (EXACT)
            x = add_low(x, other, low + __shfl_xor_sync(~0u, low, step), &low);
        else
            x += other;
        y += __shfl_xor_sync(~0u, y, step);
    }
    x += low;
    if constexpr (TEAM > 32) {
        float2 *slots = m->slots[ *turn ^= 1] + threadIdx.x / TEAM * (TEAM / 32);
        if (threadIdx.x % 32 == 0)
            slots[threadIdx.x % TEAM / 32] = make_float2(x, y);
        barrier_sync(1 + threadIdx.x / TEAM, TEAM);
        x = y = 0;
#pragma unroll
        for (int w = 0; w < TEAM / 32; w++) {
            x += slots[w].x;
            y += slots[w].y;
        }
    }
    return make_float2(x, y);
}

#define ROW_KERNEL(pass, dtype, params, threads, blocks)                                                               \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                      \
        heddle_norm_linear_##pass##_##dtype##_sm80(const __grid_constant__ params p) {                                 \
        wait_for_earlier_grid();                                                                                       \
        pass##_kernel<dtype>(p);                                                                                       \
    }

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Rows of x normalised in front of a product on Hopper. A row is one warp's, which needs no other, or where rows are few a team's of several;
 * short ones share a warp. Its elements stay in registers if they are few enough, and are read from the first-level cache once more if not. The
 * product may start beside. */
#include "cuda/norm_linear/lanes.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/norm_linear/sm90/contract.h"

/* Chunks of eight elements that a lane has of a row at a time. LANES below: those of a warp that a row has. */
enum { CHUNKS = NORMALISE_HELD / 256, WARPS = NORMALISE_THREADS / 32 };

/* A team, by one of its warps; and its row. */
typedef struct row_team {
    int warps, warp, number; /* number: among the block's */
    int turn;                /* of two places to add up in */
    const void *from;        /* T [cols] */
    int cols, held_at_once;
    uint4 held[CHUNKS];
} row_team;

/* The first column of a lane's c-th chunk from column `first` on. */
template <int LANES> INLINE int column_of(const row_team &t, int first, int c) {
    return first + ((c * t.warps + t.warp) * LANES + (int)threadIdx.x % LANES) * 8;
}

/* Zeros past the end. */
template <typename T, int LANES> INLINE void load_row(row_team *t, int first) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int e = column_of<LANES>(*t, first, c);
        t->held[c] = e < t->cols ? *(const uint4 *)((const T *)t->from + e) : make_uint4(0, 0, 0, 0);
    }
}

/* Sums over the team, to all of it. */
template <int LANES> INLINE float2 team_sum(row_team *t, float2 sums) {
    __shared__ float2 slots[2][WARPS];
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        sums.x += __shfl_xor_sync(~0u, sums.x, step);
        sums.y += __shfl_xor_sync(~0u, sums.y, step);
    }
    if (LANES < 32 || t->warps == 1)
        return sums;
    float2 *const own = slots[t->turn] + t->number * t->warps;
    t->turn ^= 1;
    if (threadIdx.x % 32 == 0)
        own[t->warp] = sums;
    barrier_sync(t->number, t->warps * 32);
    sums = own[0];
#pragma unroll 1
    for (int x = 1; x < t->warps; x++) {
        sums.x += own[x].x;
        sums.y += own[x].y;
    }
    return sums;
}

template <typename T> INLINE float chunk_sum(const uint4 &held) {
    float v[8];
    unpack_chunk<T>(held, v);
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* Of the distances from the mean: their squares, and their sum, which is what rounding left in it. */
template <typename T> INLINE void add_squares(const uint4 &held, float mean, float2 *sums) {
    float v[8];
    unpack_chunk<T>(held, v);
#pragma unroll
    for (int x = 0; x < 8; x++) {
        v[x] -= mean;
        sums->x = fmaf(v[x], v[x], sums->x);
    }
    sums->y += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* Of the row's sum, as if it were divided. */
INLINE float mean_of(const norm_rows &p, float sum) {
    const float mean = sum * p.inverse;
    return fmaf(fmaf(-mean, (float)p.cols, sum), p.inverse, mean);
}

/* A row whose first elements are held: its mean and rstd, which one lane keeps if it is `there`. */
template <typename T, int LANES> INLINE float2 find_moments(const norm_rows &p, int64_t row, bool there, row_team *t) {
    float mean = 0;
    float2 sums = make_float2(0, 0);
#pragma unroll 1
    for (int first = 0; first < t->cols && !p.rms; first += t->held_at_once) {
        if (first > 0)
            load_row<T, LANES>(t, first);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            sums.x += chunk_sum<T>(t->held[c]);
    }
    if (!p.rms)
        mean = mean_of(p, team_sum<LANES>(t, sums).x);
    sums = make_float2(0, 0);
#pragma unroll 1
    for (int first = 0; first < t->cols; first += t->held_at_once) {
        if (t->cols > t->held_at_once)
            load_row<T, LANES>(t, first);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if (column_of<LANES>(*t, first, c) < t->cols)
                add_squares<T>(t->held[c], mean, &sums);
    }
    sums = team_sum<LANES>(t, sums);
    const float left = p.rms ? 0 : sums.y * p.inverse;
    const float rstd = inverse_deviation(sums.x, (float)p.cols, p.inverse, left, p.eps);
    if (there && t->warp == 0 && threadIdx.x % LANES == 0) {
        p.mean[row] = mean;
        p.rstd[row] = rstd;
    }
    return make_float2(mean + left, rstd);
}

/* (x - mean)·rstd∘gamma + beta, to column e. */
template <typename T>
INLINE void store_normalised(const norm_rows &p, int64_t row, int e, const uint4 &held, const float2 &moments) {
    float v[8], g[8], b[8] = {};
    unpack_chunk<T>(held, v);
    if (p.gamma)
        chunk8<T>(p.gamma, e, p.cols, g);
    if (p.beta)
        chunk8<T>(p.beta, e, p.cols, b);
#pragma unroll
    for (int x = 0; x < 8; x++) {
        v[x] = (v[x] - moments.x) * moments.y;
        v[x] = fmaf(v[x], p.gamma ? g[x] : 1, b[x]);
    }
    store_global16((T *)p.high + row * p.ldp + e, make_uint4(pack_pair(v[0], v[1], T()), pack_pair(v[2], v[3], T()),
                                                             pack_pair(v[4], v[5], T()), pack_pair(v[6], v[7], T())));
}

template <typename T, int LANES> INLINE void normalise_rows(const norm_normalise &all) {
    constexpr int ROWS = 32 / LANES; /* of a warp at a time */
    const norm_rows &p = all.job;
    const int warp = threadIdx.x / 32, number = warp >> all.warps_log2, teams = WARPS >> all.warps_log2;
    row_team t = {1 << all.warps_log2, warp - (number << all.warps_log2), number, 0};
    t.cols = p.cols;
    t.held_at_once = LANES * CHUNKS * 8 << all.warps_log2;
#pragma unroll 1
    for (int64_t row0 = ((int64_t)blockIdx.x * teams + number) * ROWS; row0 < p.rows;
         row0 += (int64_t)gridDim.x * teams * ROWS) {
        const int64_t row = row0 + (int)threadIdx.x % 32 / LANES;
        const bool there = ROWS == 1 || row < p.rows; /* all lanes of the warp add up */
        t.from = (const T *)p.in + (there ? row : row0) * p.ld;
        load_row<T, LANES>(&t, 0);
        const float2 moments = find_moments<T, LANES>(p, row, there, &t);
#pragma unroll 1
        for (int first = 0; first < t.cols; first += t.held_at_once) {
            if (t.cols > t.held_at_once)
                load_row<T, LANES>(&t, first);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                if (there && column_of<LANES>(t, first, c) < t.cols)
                    store_normalised<T>(p, row, column_of<LANES>(t, first, c), t.held[c], moments);
        }
    }
}

template <typename T> INLINE void normalise_kernel(const norm_normalise &p) {
    switch (p.lanes) {
    case NORMALISE_LEAST_LANES: normalise_rows<T, NORMALISE_LEAST_LANES>(p); break;
    case 2 * NORMALISE_LEAST_LANES: normalise_rows<T, 2 * NORMALISE_LEAST_LANES>(p); break;
    default: normalise_rows<T, 32>(p);
    }
}

#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == NORMALISE_THREADS, "as the kernel counts");                                               \
    extern "C" __global__ void __launch_bounds__(threads, NORMALISE_RESIDENT)                                          \
        heddle_norm_linear_##pass##_##dtype##_##family(const __grid_constant__ norm_normalise p) {                     \
        wait_for_earlier_grid();                                                                                       \
        let_next_grid_start();                                                                                         \
        pass##_kernel<dtype>(p);                                                                                       \
    }

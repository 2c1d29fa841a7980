/* SPDX-License-Identifier: Apache-2.0
 * Rows of x normalised in front of a product on Hopper. Each thread has eight elements of a row, for a kernel as short as this one takes as
 * long as one of its threads; and the product may start beside. */
#include "cuda/norm_linear/lanes.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/norm_linear/sm90/contract.h"
#include "cuda/norm_linear/sm90/divisor.cuh"

/* Eight elements of a row; zeros past its end, and where there is no row. */
template <typename T> INLINE uint4 load_chunk(const void *row, int e, int cols) {
    return row && e < cols ? *(const uint4 *)((const T *)row + e) : make_uint4(0, 0, 0, 0);
}

template <typename T> INLINE float chunk_sum(const uint4 &held) {
    float v[8];
    unpack_chunk<T>(held, v);
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* Of the distances from the mean: their squares, and their sum, which is what rounding left in it. */
template <typename T> INLINE float2 chunk_squares(const uint4 &held, float mean) {
    float v[8];
    float2 sums = make_float2(0, 0);
    unpack_chunk<T>(held, v);
#pragma unroll
    for (int x = 0; x < 8; x++) {
        v[x] -= mean;
        sums.x = fmaf(v[x], v[x], sums.x);
    }
    sums.y = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    return sums;
}

/* Of the row's sum, as if it were divided. */
INLINE float mean_of(const norm_rows &p, float sum) {
    const float mean = sum * p.inverse;
    return fmaf(fmaf(-mean, (float)p.cols, sum), p.inverse, mean);
}

/* The row's mean and rstd, of what the parts came to; kept by one thread. */
INLINE float2 finish_moments(const norm_rows &p, int64_t row, float mean, float squares, float left, bool keeps) {
    left = p.rms ? 0 : left * p.inverse;
    const float rstd = inverse_deviation(squares, (float)p.cols, p.inverse, left, p.eps);
    if (keeps) {
        p.mean[row] = mean;
        p.rstd[row] = rstd;
    }
    return make_float2(mean + left, rstd);
}

/* (x - mean)·rstd∘gamma + beta, to column e. */
template <typename T>
INLINE void store_normalised(const norm_rows &p, int64_t row, int e, const uint4 &held, const uint4 &gamma,
                             const uint4 &beta, const float2 &moments) {
    float v[8], g[8], b[8];
    unpack_chunk<T>(held, v);
    unpack_chunk<T>(gamma, g);
    unpack_chunk<T>(beta, b);
#pragma unroll
    for (int x = 0; x < 8; x++) {
        v[x] = (v[x] - moments.x) * moments.y;
        v[x] = fmaf(v[x], p.gamma ? g[x] : 1, b[x]);
    }
    store_global16((T *)p.high + row * p.ldp + e, make_uint4(pack_pair(v[0], v[1], T()), pack_pair(v[2], v[3], T()),
                                                             pack_pair(v[4], v[5], T()), pack_pair(v[6], v[7], T())));
}

/* A team, and what its threads have in turn: every so many-th part of the row. */
struct team_of_row {
    int number, threads, warp, warps, parts;
};

/* Sums of each part of the row to its slot, and of all to every thread. */
template <typename F> INLINE float2 team_total(const team_of_row &t, float2 *slots, const F &sums_of) {
#pragma unroll 1
    for (int part = t.warp; part < t.parts; part += t.warps) {
        const float2 sums = sums_of(part);
        const float x = warp_sum(sums.x), y = warp_sum(sums.y);
        if (threadIdx.x % 32 == 0)
            slots[part] = make_float2(x, y);
    }
    barrier_sync(t.number, t.threads);
    float2 all = make_float2(0, 0);
#pragma unroll 1
    for (int part = 0; part < t.parts; part++) {
        all.x += slots[part].x;
        all.y += slots[part].y;
    }
    return all;
}

template <typename T> INLINE void normalise_kernel(const norm_normalise &p) {
    __shared__ float2 slots[2][NORMALISE_PARTS];
    const norm_rows &job = p.job;
    const int warp = threadIdx.x / 32, number = (int)quotient((uint32_t)warp, p.team);
    const team_of_row t = {number, p.warps * 32, warp - number * p.warps, p.warps, p.parts};
    const int64_t row = (int64_t)blockIdx.x * p.teams + number;
    if (number >= p.teams || row >= job.rows)
        return;
    const bool more = p.parts > p.warps; /* than stay in registers */
    const void *const in = (const T *)job.in + row * job.ld;
    const auto column = [&](int part) { return part * NORMALISE_PART + (int)threadIdx.x % 32 * 8; };
    uint4 held = load_chunk<T>(in, column(t.warp), job.cols);
    uint4 gamma = load_chunk<T>(job.gamma, column(t.warp), job.cols);
    uint4 beta = load_chunk<T>(job.beta, column(t.warp), job.cols);
    float mean = 0;
    if (!job.rms)
        mean = mean_of(job, team_total(t, slots[0] + number * p.parts, [&](int part) {
                                if (more)
                                    held = load_chunk<T>(in, column(part), job.cols);
                                return make_float2(chunk_sum<T>(held), 0);
                            }).x);
    const float2 sums = team_total(t, slots[1] + number * p.parts, [&](int part) {
        if (more)
            held = load_chunk<T>(in, column(part), job.cols);
        return column(part) < job.cols ? chunk_squares<T>(held, mean) : make_float2(0, 0);
    });
    const float2 moments = finish_moments(job, row, mean, sums.x, sums.y, t.warp == 0 && threadIdx.x % 32 == 0);
#pragma unroll 1
    for (int part = t.warp; part < t.parts; part += t.warps) {
        if (more) {
            held = load_chunk<T>(in, column(part), job.cols);
            gamma = load_chunk<T>(job.gamma, column(part), job.cols);
            beta = load_chunk<T>(job.beta, column(part), job.cols);
        }
        if (column(part) < job.cols)
            store_normalised<T>(job, row, column(part), held, gamma, beta, moments);
    }
}

#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == NORMALISE_THREADS, "as the kernel counts");                                               \
    extern "C" __global__ void __launch_bounds__(threads, 3)                                                           \
        heddle_norm_linear_##pass##_##dtype##_##family(const __grid_constant__ norm_normalise p) {                     \
        wait_for_earlier_grid();                                                                                       \
        let_next_grid_start();                                                                                         \
        pass##_kernel<dtype>(p);                                                                                       \
    }

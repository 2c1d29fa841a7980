/* SPDX-License-Identifier: Apache-2.0
 * What norm-linear does besides its products: all of it at the speed of memory, all sums in a fixed order. */
#include <math_constants.h>

#include "element.cuh"
#include "norm_linear_params.h"

enum { ROW_THREADS = 128, SUM_WARPS = 8, HELD = 4 };

/* A row is a warp's, or a block's if it is long (is_short). TEAM: the threads that share it. A thread has every TEAM-th chunk of
 * eight elements; the first HELD of them stay in its registers, and all of those are on their way before the first is used. */
template <typename T, int TEAM> struct team_row {
    const T *p;
    int64_t cols;
    bool vector;
    T held[HELD][8];

    __device__ __forceinline__ team_row(const T *p, int64_t cols, bool vector) : p(p), cols(cols), vector(vector) {
#pragma unroll
        for (int c = 0; c < HELD; c++) {
            const int64_t e = (threadIdx.x % TEAM + c * TEAM) * 8;
            if (vector && e + 8 <= cols) {
#pragma unroll
                for (int x = 0; x < (int)sizeof held[c]; x += 16)
                    *(uint4 *)((char *)held[c] + x) = *(const uint4 *)((const char *)(p + e) + x);
            } else {
#pragma unroll
                for (int x = 0; x < 8; x++)
                    held[c][x] = e + x < cols ? p[e + x] : T{};
            }
        }
    }

    /* The c-th chunk, at column e. */
    __device__ __forceinline__ void get(int c, int64_t e, float v[8]) const {
        if (c >= HELD)
            load8(p, e, cols, vector, v);
#pragma unroll
        for (int x = 0; x < 8 && c < HELD; x++)
            v[x] = to_float(held[c][x]);
    }
};

/* f(c, e) for each of this thread's chunks; c is known to the compiler, and HELD for all that are not held. */
template <int TEAM, typename F> static __device__ __forceinline__ void each_chunk(int64_t cols, const F &f) {
    int64_t e = threadIdx.x % TEAM * 8;
#pragma unroll
    for (int c = 0; c < HELD; c++, e += TEAM * 8)
        if (e < cols)
            f(c, e);
    for (; e < cols; e += TEAM * 8)
        f(HELD, e);
}

static __device__ __forceinline__ bool is_short(int64_t cols) {
    return cols <= SHORT_ROW;
}

/* This thread's row, of those that `block` is the first block of. */
static __device__ __forceinline__ int64_t row_of(int64_t block, int64_t cols) {
    return is_short(cols) ? block * SHORT_ROWS + threadIdx.x / 32 : block;
}

template <int TEAM> static __device__ __forceinline__ float team_sum(float x, float *slots) {
    if constexpr (TEAM > 32) {
        return block_sum<TEAM / 32>(x, slots);
    } else {
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            x += __shfl_xor_sync(~0u, x, step);
        return x;
    }
}

template <int TEAM> static __device__ __forceinline__ float team_max(float x, float *slots) {
    if constexpr (TEAM > 32) {
        return block_max<TEAM / 32>(x, slots);
    } else {
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
        return x;
    }
}

/* v[8] to the planes at column e: one of T, or for float32 high and, where it is wanted, low of float16. Columns from cols
 * to ldp become zero. */
static __device__ __forceinline__ void store_planes(const norm_rows &p, int64_t row, int64_t e, const float v[8],
                                                    float) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int x = 0; x < 4; x++) {
        high[x] = pack_f16(v[2 * x], v[2 * x + 1]);
        float rest0 = v[2 * x] - f16_to_float((uint16_t)high[x]);
        float rest1 = v[2 * x + 1] - f16_to_float((uint16_t)(high[x] >> 16));
        low[x] = pack_f16(rest0, rest1);
    }
    *(uint4 *)((uint16_t *)p.high + row * p.ldp + e) = *(uint4 *)high;
    if (p.low)
        *(uint4 *)((uint16_t *)p.low + row * p.ldp + e) = *(uint4 *)low;
}

template <typename T>
static __device__ __forceinline__ void store_planes(const norm_rows &p, int64_t row, int64_t e, const float v[8], T) {
    store8((T *)p.high, row * p.ldp + e, row * p.ldp + p.ldp, true, v);
}

/* 1/sqrt(squares/n - residual² + eps), rounded once: what each step loses goes into a last correction. With few columns these
 * roundings would be most of rstd's error. */
static __device__ __forceinline__ float inverse_deviation(float squares, float n, float residual, float eps) {
    const float mean = squares / n, variance = fmaxf(fmaf(-residual, residual, mean), 0), v = variance + eps;
    const float part = v - variance, lost = fmaf(-mean, n, squares) / n + fmaf(-residual, residual, mean - variance) +
                                            (variance - (v - part)) + (eps - part);
    const float r = 1 / sqrtf(v), h = v * r;
    if (!(r > 0 && r < CUDART_INF_F))
        return r;
    return fmaf(0.5f * r, fmaf(-h, r, 1) - fmaf(v, r, -h) * r - lost * r * r, r);
}

/* Mean and rstd of a row: the mean of what is left after its first element, then the squares around the mean, corrected for
 * what rounding left in it. *residual is that: xhat = (x - mean - residual)·rstd. */
template <typename T, int TEAM>
static __device__ __forceinline__ void moments(const norm_rows &p, const team_row<T, TEAM> &in, float *slots,
                                               float *mean, float *rstd, float *residual) {
    float first = p.rms ? 0 : to_float(in.p[0]), sum = 0, squares = 0, n = (float)p.cols;
    if (!p.rms) {
        each_chunk<TEAM>(p.cols, [&](int c, int64_t e) {
            float v[8];
            in.get(c, e, v);
#pragma unroll
            for (int x = 0; x < 8; x++)
                sum += e + x < p.cols ? v[x] - first : 0;
        });
        *mean = first + team_sum<TEAM>(sum, slots) / n;
        sum = 0;
    } else {
        *mean = 0;
    }
    each_chunk<TEAM>(p.cols, [&](int c, int64_t e) {
        float v[8];
        in.get(c, e, v);
#pragma unroll
        for (int x = 0; x < 8; x++) {
            float d = e + x < p.cols ? v[x] - *mean : 0;
            sum += d;
            squares += d * d;
        }
    });
    *residual = p.rms ? 0 : team_sum<TEAM>(sum, slots) / n;
    *rstd = inverse_deviation(team_sum<TEAM>(squares, slots), n, *residual, p.eps);
}

/* Mean, rstd, and xhat∘gamma + beta to planes. */
template <typename T, int TEAM>
static __device__ __forceinline__ void normalise_row(const norm_rows &p, int64_t row, float *slots) {
    const T *gamma = (const T *)p.gamma, *beta = (const T *)p.beta;
    const team_row<T, TEAM> in((const T *)p.in + row * p.ld, p.cols, p.vector);
    float mean, rstd, residual = 0;
    if (p.given) {
        mean = p.rms ? 0 : p.mean[row];
        rstd = p.rstd[row];
    } else {
        moments<T, TEAM>(p, in, slots, &mean, &rstd, &residual);
        if (threadIdx.x % TEAM == 0) {
            p.mean[row] = mean + residual;
            p.rstd[row] = rstd;
        }
    }
    if (!p.high)
        return;
    int exponent =
        p.exponent + (p.shared_exponent ? *p.shared_exponent : 0) - (p.row_exponent ? p.row_exponent[row] : 0);
    /* A row of tiny dy counts for as little as its weight here. */
    const float weight = power_of_two(exponent < -LARGEST_EXPONENT ? -LARGEST_EXPONENT : exponent);
    each_chunk<TEAM>(p.ldp, [&](int c, int64_t e) {
        float v[8], g[8], b[8];
        in.get(c, e, v);
        if (gamma)
            load8(gamma, e, p.cols, p.vector, g);
        if (beta)
            load8(beta, e, p.cols, p.vector, b);
#pragma unroll
        for (int x = 0; x < 8; x++) {
            v[x] = (v[x] - mean - residual) * rstd;
            v[x] = gamma ? v[x] * g[x] : v[x];
            v[x] = beta ? v[x] + b[x] : v[x];
            v[x] = e + x < p.cols ? v[x] * weight : 0;
        }
        store_planes(p, row, e, v, T());
    });
}

/* The e with largest·2^e in [2^14, 2^15), as far as 2^e is a normal float. */
static __device__ __forceinline__ int exponent_for(float largest) {
    if (largest == 0)
        return LARGEST_EXPONENT;
    int biased = __float_as_int(largest) >> 23 & 255;
    if (biased == 255)
        return 0; /* infinite or NaN: it comes out as that */
    int e = 14 - (biased - 127);
    return e > LARGEST_EXPONENT ? LARGEST_EXPONENT : e;
}

static __device__ __forceinline__ float rounded(float x, float) {
    return x;
}

template <typename T> static __device__ __forceinline__ float rounded(float x, T) {
    return to_float(from_float<T>(x));
}

/* in∘gamma to planes, with the sums that the epilogue of forward needs. */
template <typename T, int TEAM>
static __device__ __forceinline__ void pack_row(const norm_rows &p, int64_t row, float *slots) {
    const T *gamma = (const T *)p.gamma, *beta = (const T *)p.beta;
    const team_row<T, TEAM> in((const T *)p.in + row * p.ld, p.cols, p.vector);
    float scale = 1;
    if (p.row_exponent && !p.shared_exponent) {
        float largest = 0;
        each_chunk<TEAM>(p.cols, [&](int c, int64_t e) {
            float v[8], other[8];
            in.get(c, e, v);
            if (gamma)
                load8(gamma, e, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                largest = fmaxf(largest, fabsf(gamma ? v[x] * other[x] : v[x]));
        });
        int exponent = exponent_for(team_max<TEAM>(largest, slots));
        if (threadIdx.x % TEAM == 0)
            p.row_exponent[row] = exponent;
        scale = power_of_two(exponent);
    } else if (p.shared_exponent) {
        scale = power_of_two(*p.shared_exponent);
    }
    float sum = 0, dot = 0;
    each_chunk<TEAM>(p.high ? p.ldp : p.cols, [&](int c, int64_t e) {
        float v[8], other[8];
        in.get(c, e, v);
        if (beta) {
            load8(beta, e, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                dot += v[x] * other[x];
        }
        if (gamma) {
            load8(gamma, e, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                v[x] *= other[x];
        }
#pragma unroll
        for (int x = 0; x < 8; x++) {
            sum += rounded(v[x], T());
            v[x] *= scale;
        }
        if (p.high)
            store_planes(p, row, e, v, T());
    });
    if (p.sum) {
        sum = team_sum<TEAM>(sum, slots);
        if (threadIdx.x % TEAM == 0)
            p.sum[row] = sum;
    }
    if (p.add) {
        dot = beta ? team_sum<TEAM>(dot, slots) : 0;
        if (threadIdx.x % TEAM == 0)
            p.add[row] = dot + (p.bias ? to_float(((const T *)p.bias)[row]) : 0);
    }
}

/* prepare: the blocks of the one job, then those of the other. */
template <typename T, int TEAM>
static __device__ __forceinline__ void prepare_row(const norm_rows &p, int64_t row, float *slots) {
    if (row >= p.rows)
        return;
    if (p.packs)
        pack_row<T, TEAM>(p, row, slots);
    else
        normalise_row<T, TEAM>(p, row, slots);
}

template <typename T> static __device__ __forceinline__ void prepare_kernel(const norm_prepare &p) {
    __shared__ float slots[ROW_THREADS / 32];
    const int which = blockIdx.x >= p.first_blocks;
    const norm_rows &job = p.job[which];
    const int64_t row = row_of(blockIdx.x - (which ? p.first_blocks : 0), job.cols);
    if (is_short(job.cols))
        prepare_row<T, 32>(job, row, slots);
    else
        prepare_row<T, ROW_THREADS>(job, row, slots);
}

/* finish: in place. */
template <typename T, int TEAM>
static __device__ __forceinline__ void finish_row(const norm_finish &p, int64_t row, float *slots) {
    if (row >= p.rows)
        return;
    const float n = (float)p.cols, shift = p.centred ? p.mean[row] : 0, rstd = p.rstd[row];
    T *dx = (T *)p.dx + row * p.ldd;
    const team_row<T, TEAM> g(dx, p.cols, p.vector), in((const T *)p.x + row * p.ldx, p.cols, p.vector);
    float sum = 0, dot = 0;
    for (int64_t x = threadIdx.x % TEAM; x < p.parts; x += TEAM) {
        sum += p.part[2 * x * p.rows + row];
        dot += p.part[(2 * x + 1) * p.rows + row];
    }
    if (p.parts == 0)
        each_chunk<TEAM>(p.cols, [&](int c, int64_t e) {
            float u[8], v[8];
            g.get(c, e, u);
            in.get(c, e, v);
#pragma unroll
            for (int x = 0; x < 8; x++) {
                sum += u[x]; /* zeros past the end */
                dot += u[x] * ((v[x] - shift) * rstd);
            }
        });
    const float c1 = p.centred ? team_sum<TEAM>(sum, slots) / n : 0, c2 = team_sum<TEAM>(dot, slots) / n;
    each_chunk<TEAM>(p.cols, [&](int c, int64_t e) {
        float u[8], v[8];
        g.get(c, e, u);
        in.get(c, e, v);
#pragma unroll
        for (int x = 0; x < 8; x++) {
            v[x] = (v[x] - shift) * rstd;
            u[x] = rstd * (u[x] - c1 - v[x] * c2);
        }
        store8(dx, e, p.cols, p.vector, u);
        if (p.z)
            store8((T *)p.z + row * p.ldz, e, p.cols, true, v);
    });
}

template <typename T> static __device__ __forceinline__ void finish_kernel(const norm_finish &p) {
    __shared__ float slots[ROW_THREADS / 32];
    const int64_t row = row_of(blockIdx.x, p.cols);
    if (is_short(p.cols))
        finish_row<T, 32>(p, row, slots);
    else
        finish_row<T, ROW_THREADS>(p, row, slots);
}

/* partial: a block has SUM_COLS columns and one share of the rows; its warps take rows in turn. */
template <typename T> static __device__ __forceinline__ void partial_kernel(const norm_sums &p) {
    __shared__ float sums[SUM_WARPS][SUM_COLS];
    const int64_t blocks = (p.cols + SUM_COLS - 1) / SUM_COLS, part = blockIdx.x / blocks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t col0 = blockIdx.x % blocks * SUM_COLS, col = col0 + lane * 8;
    const int64_t begin = p.rows * part / p.parts, end = p.rows * (part + 1) / p.parts;
    float sum[8] = {};
    for (int64_t row = begin + warp; row < end; row += SUM_WARPS) {
        float v[8], factor = p.factor ? p.factor[row] : 1;
        load8((const T *)p.a + row * p.ld, col, p.cols, p.vector, v);
#pragma unroll
        for (int x = 0; x < 8; x++)
            sum[x] += factor * v[x];
    }
#pragma unroll
    for (int x = 0; x < 8; x++)
        sums[warp][lane * 8 + x] = sum[x];
    __syncthreads();
    const int64_t mine = col0 + threadIdx.x;
    float all = 0;
#pragma unroll
    for (int w = 0; w < SUM_WARPS; w++)
        all += sums[w][threadIdx.x];
    if (mine < p.cols)
        p.part[part * p.cols + mine] = all;
}

/* total: the blocks of the one job, then those of the other. */
template <typename T> static __device__ __forceinline__ void total_kernel(const norm_totals &all) {
    const int64_t blocks = (all.job[0].cols + ROW_THREADS - 1) / ROW_THREADS, second = blockIdx.x >= blocks;
    const norm_sums &p = all.job[second];
    const int64_t col = (blockIdx.x - second * blocks) * ROW_THREADS + threadIdx.x;
    if (col >= p.cols)
        return;
    float sum = 0;
    for (int part = 0; part < p.parts; part++)
        sum += p.part[part * p.cols + col];
    if (p.out)
        ((T *)p.out)[col] = from_float<T>(sum);
    if (p.sum)
        p.sum[col] = sum;
}

/* exponents: one block for each of the two. */
extern "C" __global__ void __launch_bounds__(1024)
    heddle_norm_linear_exponents_f32_sm80(const __grid_constant__ norm_exponents p) {
    __shared__ int slots[32];
    wait_for_earlier_grid();
    int least = LARGEST_EXPONENT;
    for (int64_t x = threadIdx.x; x < p.count[blockIdx.x]; x += 1024)
        least = min(least, p.of[blockIdx.x][x]);
    least = __reduce_min_sync(~0u, least);
    if (threadIdx.x % 32 == 0)
        slots[threadIdx.x / 32] = least;
    __syncthreads();
    if (threadIdx.x < 32) {
        least = __reduce_min_sync(~0u, slots[threadIdx.x]);
        if (threadIdx.x == 0)
            p.shared[blockIdx.x] = least;
    }
}

#define ROW_KERNEL(pass, dtype, T, params, threads)                                                                    \
    extern "C" __global__ void __launch_bounds__(threads)                                                              \
        heddle_norm_linear_##pass##_##dtype##_sm80(const __grid_constant__ params p) {                                 \
        wait_for_earlier_grid();                                                                                       \
        pass##_kernel<T>(p);                                                                                           \
    }
#define ROW_KERNELS(dtype, T)                                                                                          \
    ROW_KERNEL(prepare, dtype, T, norm_prepare, ROW_THREADS)                                                           \
    ROW_KERNEL(finish, dtype, T, norm_finish, ROW_THREADS)                                                             \
    ROW_KERNEL(partial, dtype, T, norm_sums, SUM_WARPS * 32)                                                           \
    ROW_KERNEL(total, dtype, T, norm_totals, ROW_THREADS)

ROW_KERNELS(bf16, bf16)
ROW_KERNELS(f16, f16)
ROW_KERNELS(f32, float)

/* SPDX-License-Identifier: Apache-2.0
 * What norm-linear does besides its products: all of it at the speed of memory, all sums in a fixed order. */
#include "element.cuh"
#include "norm_linear_params.h"

enum { ROW_THREADS = 128, ROW_WARPS = 4, SUM_WARPS = 8 };

#define FOR_CHUNKS_OF_ROW(e, cols) for (int64_t e = threadIdx.x * 8; e < (cols); e += ROW_THREADS * 8)

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

/* Mean and rstd of a row: the mean of what is left after its first element, then the squares around the mean, corrected for
 * what rounding left in it. *residual is that: xhat = (x - mean - residual)·rstd. */
template <typename T>
static __device__ __forceinline__ void moments(const norm_rows &p, const T *in, float *slots, float *mean, float *rstd,
                                               float *residual) {
    float first = p.rms ? 0 : to_float(in[0]), sum = 0, squares = 0, v[8], n = (float)p.cols;
    if (!p.rms) {
        FOR_CHUNKS_OF_ROW(e, p.cols) {
            load8(in, e, p.cols, p.vector, v);
#pragma unroll
            for (int x = 0; x < 8; x++)
                sum += e + x < p.cols ? v[x] - first : 0;
        }
        *mean = first + block_sum<ROW_WARPS>(sum, slots) / n;
        sum = 0;
    } else {
        *mean = 0;
    }
    FOR_CHUNKS_OF_ROW(e, p.cols) {
        load8(in, e, p.cols, p.vector, v);
#pragma unroll
        for (int x = 0; x < 8; x++) {
            float d = e + x < p.cols ? v[x] - *mean : 0;
            sum += d;
            squares += d * d;
        }
    }
    *residual = p.rms ? 0 : block_sum<ROW_WARPS>(sum, slots) / n;
    float variance = block_sum<ROW_WARPS>(squares, slots) / n - *residual * *residual;
    *rstd = 1 / sqrtf(fmaxf(variance, 0) + p.eps);
}

/* Mean, rstd, and xhat∘gamma + beta to planes. */
template <typename T>
static __device__ __forceinline__ void normalise_row(const norm_rows &p, int64_t row, float *slots) {
    const T *in = (const T *)p.in + row * p.ld, *gamma = (const T *)p.gamma, *beta = (const T *)p.beta;
    float mean, rstd, residual = 0;
    if (p.given) {
        mean = p.rms ? 0 : p.mean[row];
        rstd = p.rstd[row];
    } else {
        moments(p, in, slots, &mean, &rstd, &residual);
        if (threadIdx.x == 0) {
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
    FOR_CHUNKS_OF_ROW(e, p.ldp) {
        float v[8], g[8], b[8];
        load8(in, e, p.cols, p.vector, v);
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
    }
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
template <typename T> static __device__ __forceinline__ void pack_row(const norm_rows &p, int64_t row, float *slots) {
    const T *in = (const T *)p.in + row * p.ld, *gamma = (const T *)p.gamma, *beta = (const T *)p.beta;
    float v[8], other[8], scale = 1;
    if (p.row_exponent && !p.shared_exponent) {
        float largest = 0;
        FOR_CHUNKS_OF_ROW(e, p.cols) {
            load8(in, e, p.cols, p.vector, v);
            if (gamma)
                load8(gamma, e, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                largest = fmaxf(largest, fabsf(gamma ? v[x] * other[x] : v[x]));
        }
        int exponent = exponent_for(block_max<ROW_WARPS>(largest, slots));
        if (threadIdx.x == 0)
            p.row_exponent[row] = exponent;
        scale = power_of_two(exponent);
    } else if (p.shared_exponent) {
        scale = power_of_two(*p.shared_exponent);
    }
    float sum = 0, dot = 0;
    FOR_CHUNKS_OF_ROW(e, p.high ? p.ldp : p.cols) {
        load8(in, e, p.cols, p.vector, v);
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
    }
    if (p.sum) {
        sum = block_sum<ROW_WARPS>(sum, slots);
        if (threadIdx.x == 0)
            p.sum[row] = sum;
    }
    if (p.add) {
        dot = beta ? block_sum<ROW_WARPS>(dot, slots) : 0;
        if (threadIdx.x == 0)
            p.add[row] = dot + (p.bias ? to_float(((const T *)p.bias)[row]) : 0);
    }
}

/* prepare: a block per row of the one or the other job. */
template <typename T> static __device__ __forceinline__ void prepare_kernel(const norm_prepare &p) {
    __shared__ float slots[ROW_WARPS];
    const int which = blockIdx.x < p.job[0].rows ? 0 : 1;
    const norm_rows &job = p.job[which];
    const int64_t row = blockIdx.x - (which ? p.job[0].rows : 0);
    if (job.packs)
        pack_row<T>(job, row, slots);
    else
        normalise_row<T>(job, row, slots);
}

/* finish: in place. */
template <typename T> static __device__ __forceinline__ void finish_kernel(const norm_finish &p) {
    __shared__ float slots[ROW_WARPS];
    const int64_t row = blockIdx.x;
    float sum = 0, dot = 0;
    for (int64_t x = threadIdx.x; x < p.parts; x += ROW_THREADS) {
        sum += p.part[2 * x * p.rows + row];
        dot += p.part[(2 * x + 1) * p.rows + row];
    }
    const float n = (float)p.cols, mean = p.centred ? p.mean[row] : 0, rstd = p.rstd[row];
    const float c1 = p.centred ? block_sum<ROW_WARPS>(sum, slots) / n : 0, c2 = block_sum<ROW_WARPS>(dot, slots) / n;
    const T *in = (const T *)p.x + row * p.ldx;
    T *dx = (T *)p.dx + row * p.ldd;
    FOR_CHUNKS_OF_ROW(e, p.cols) {
        float g[8], v[8];
        load8(dx, e, p.cols, p.vector, g);
        load8(in, e, p.cols, p.vector, v);
#pragma unroll
        for (int x = 0; x < 8; x++)
            v[x] = rstd * (g[x] - c1 - (v[x] - mean) * rstd * c2);
        store8(dx, e, p.cols, p.vector, v);
    }
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

/* total */
template <typename T> static __device__ __forceinline__ void total_kernel(const norm_sums &p) {
    const int64_t col = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
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
        pass##_kernel<T>(p);                                                                                           \
    }
#define ROW_KERNELS(dtype, T)                                                                                          \
    ROW_KERNEL(prepare, dtype, T, norm_prepare, ROW_THREADS)                                                           \
    ROW_KERNEL(finish, dtype, T, norm_finish, ROW_THREADS)                                                             \
    ROW_KERNEL(partial, dtype, T, norm_sums, SUM_WARPS * 32)                                                           \
    ROW_KERNEL(total, dtype, T, norm_sums, ROW_THREADS)

ROW_KERNELS(bf16, bf16)
ROW_KERNELS(f16, f16)
ROW_KERNELS(f32, float)

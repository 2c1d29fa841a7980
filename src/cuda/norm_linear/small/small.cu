/* SPDX-License-Identifier: Apache-2.0
 * norm-linear for problems that cannot fill the device: the whole forward in one launch, the backward in one and, where there are many
 * rows, a second for the sums. No tensor cores; float32 throughout, and sums in short chains. */
#include "cuda/norm_linear/moments.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/norm_linear/small/contract.h"

enum { THREADS = 256, WARPS = THREADS / 32, CHUNK = SMALL_CHUNK, PADDED = SMALL_PADDED_CHUNK };

INLINE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* Of a row of T, by a warp that finds element e at x[e]: its mean, what rounding left in it, and 1/deviation. As in prepare.cu; what is
 * left is summed by fours in float32, where a lane's chain would lose more than the plain computation's tree does. */
template <typename T, typename STORED> INLINE float3 row_moments(const norm_small &p, const STORED *x) {
    constexpr int AT_ONCE = sizeof(T) == 4 ? 4 : 1;
    const int lane = threadIdx.x % 32;
    const float first = p.rms || sizeof(T) == 2 ? 0 : to_float(x[0]), n = (float)p.k;
    float sum = 0, low = 0, squares = 0, mean = 0;
    if (!p.rms) {
#pragma unroll 4
        for (int e = lane; e < p.k; e += 32)
            sum += to_float(x[e]) - first;
        mean = first + warp_sum(sum) / n;
        sum = 0;
    }
#pragma unroll(4 / AT_ONCE)
    for (int e = lane; e < p.k; e += 32 * AT_ONCE) {
        float d[AT_ONCE];
#pragma unroll
        for (int z = 0; z < AT_ONCE; z++) {
            float rest = 0;
            d[z] = e + 32 * z >= p.k ? 0
                   : sizeof(T) == 4  ? add_exactly(to_float(x[e + 32 * z]), -mean, &rest)
                                     : to_float(x[e + 32 * z]) - mean;
            low += rest;
            squares += d[z] * d[z];
        }
        if constexpr (AT_ONCE == 4)
            sum = add_low(sum, (d[0] + d[1]) + (d[2] + d[3]), low, &low);
        else
            sum += d[0];
    }
    if constexpr (AT_ONCE == 4)
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            sum = add_low(sum, __shfl_xor_sync(~0u, sum, step), low + __shfl_xor_sync(~0u, low, step), &low);
    else
        sum = warp_sum(sum);
    const float residual = p.rms ? 0 : (sum + low) / n;
    return make_float3(mean, residual, inverse_deviation(warp_sum(squares), n, 1 / n, residual, p.eps));
}

/* ----------------------------------------------------------------------------------------------------------- forward */

/* SMALL_ROWS rows of x to shared memory, zeros past their end. */
template <typename T> INLINE void load_rows(const norm_small &p, int64_t row0, int padded, float *z) {
    for (int r = 0; r < SMALL_ROWS; r++)
        for (int e = threadIdx.x; e < padded; e += THREADS)
            z[r * padded + e] = row0 + r < p.m && e < p.k ? to_float(((const T *)p.x)[(row0 + r) * p.x_stride + e]) : 0;
}

/* z = xhat∘gamma + beta in their place; a warp has every WARPS-th row. The first column of blocks stores the moments. */
template <typename T> INLINE void normalise(const norm_small &p, int64_t row0, int padded, bool stores, float *z) {
    const int lane = threadIdx.x % 32;
    const T *gamma = (const T *)p.gamma, *beta = (const T *)p.beta;
    for (int r = threadIdx.x / 32; r < SMALL_ROWS && row0 + r < p.m; r += WARPS) {
        float *to = z + r * padded;
        const float3 moments = p.plain ? make_float3(0, 0, 1) : row_moments<T>(p, to);
        __syncwarp();
#pragma unroll 4
        for (int e = lane; e < p.k; e += 32) {
            float v = (to[e] - moments.x - moments.y) * moments.z;
            v = gamma ? v * to_float(gamma[e]) : v;
            to[e] = beta ? v + to_float(beta[e]) : v;
        }
        if (stores && lane == 0) {
            if (p.mean)
                p.mean[row0 + r] = saved_mean<T>(moments.x, moments.y);
            if (p.rstd)
                p.rstd[row0 + r] = moments.z;
        }
    }
}

/* CHUNK columns of SMALL_COLS rows of W, from column e0 on, on their way to registers. */
template <typename T>
INLINE void fetch_w(const norm_small &p, int64_t col0, int e0, float v[SMALL_COLS * CHUNK / THREADS]) {
    const int e = e0 + threadIdx.x % CHUNK;
#pragma unroll
    for (int x = 0; x < SMALL_COLS * CHUNK / THREADS; x++) {
        const int64_t col = col0 + threadIdx.x / CHUNK + x * (THREADS / CHUNK);
        v[x] = col < p.n && e < p.k ? to_float(((const T *)p.w)[col * p.w_stride + e]) : 0;
    }
}

/* SMALL_ROWS rows and SMALL_COLS columns of y: a lane has a column, a warp two rows. */
template <typename T> INLINE void fwd_kernel(const norm_small &p) {
    extern __shared__ __align__(16) float z[];
    const int tiles = norm_small_tiles(p.n), padded = norm_small_padded(p.k);
    const int64_t row0 = (int64_t)(blockIdx.x / tiles) * SMALL_ROWS, col0 = (int64_t)(blockIdx.x % tiles) * SMALL_COLS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *w = z + SMALL_ROWS * padded, next[SMALL_COLS * CHUNK / THREADS], y[2] = {};
    load_rows<T>(p, row0, padded, z);
    fetch_w<T>(p, col0, 0, next);
    __syncthreads();
    normalise<T>(p, row0, padded, col0 == 0, z);
    for (int e0 = 0; e0 < p.k; e0 += CHUNK) {
        __syncthreads();
#pragma unroll
        for (int x = 0; x < SMALL_COLS * CHUNK / THREADS; x++)
            w[(threadIdx.x / CHUNK + x * (THREADS / CHUNK)) * PADDED + threadIdx.x % CHUNK] = next[x];
        __syncthreads();
        if (e0 + CHUNK < p.k)
            fetch_w<T>(p, col0, e0 + CHUNK, next);
        const float *a = z + 2 * warp * padded + e0, *b = w + lane * PADDED;
        const int count = min(CHUNK, padded - e0);
        float part[2][4] = {};
#pragma unroll 8
        for (int e = 0; e < count; e += 4) {
            const float4 u = *(const float4 *)(b + e), v0 = *(const float4 *)(a + e),
                         v1 = *(const float4 *)(a + padded + e);
            part[0][0] += u.x * v0.x;
            part[0][1] += u.y * v0.y;
            part[0][2] += u.z * v0.z;
            part[0][3] += u.w * v0.w;
            part[1][0] += u.x * v1.x;
            part[1][1] += u.y * v1.y;
            part[1][2] += u.z * v1.z;
            part[1][3] += u.w * v1.w;
        }
#pragma unroll
        for (int x = 0; x < 2; x++)
            y[x] += (part[x][0] + part[x][1]) + (part[x][2] + part[x][3]);
    }
    const int64_t col = col0 + lane;
#pragma unroll
    for (int x = 0; x < 2; x++) {
        const int64_t row = row0 + 2 * warp + x;
        if (row >= p.m || col >= p.n)
            continue;
        const float bias = p.bias ? to_float(((const T *)p.bias)[col]) : 0;
        const float more = p.residual ? to_float(((const T *)p.residual)[row * p.residual_stride + col]) : 0;
        ((T *)p.y)[row * p.y_stride + col] = from_float<T>(y[x] + bias + more);
    }
}

/* ---------------------------------------------------------------------------------------------------------- backward */

/* The moments of `count` rows from row0 on: given, or found by the warps, one after the other; without a norm those that change nothing. */
template <typename T> INLINE void find_moments(const norm_small &p, int64_t row0, int count, float2 *moments) {
    for (int r = threadIdx.x; r < count && p.given; r += THREADS)
        moments[r] = row0 + r < p.m ? make_float2(p.rms ? 0 : p.mean[row0 + r], p.rstd[row0 + r]) : make_float2(0, 0);
    for (int r = threadIdx.x / 32; r < count && !p.given; r += WARPS) {
        float3 all = make_float3(0, 0, p.plain);
        if (row0 + r < p.m && !p.plain)
            all = row_moments<T>(p, (const T *)p.x + (row0 + r) * p.x_stride);
        if (threadIdx.x % 32 == 0)
            moments[r] = make_float2(all.x + all.y, all.z);
    }
}

enum { OWN = SMALL_K / THREADS, /* columns of a thread, THREADS apart */ AT_ONCE = 16 /* rows of W on their way */ };

/* h = dy·W of SMALL_GRADS rows, in registers. */
template <typename T> INLINE void product_h(const norm_small &p, int64_t row0, float *dy, float h[SMALL_GRADS][OWN]) {
    const T *w = (const T *)p.w;
    for (int f0 = 0; f0 < p.n; f0 += CHUNK) {
        const int count = min(CHUNK, p.n - f0);
        __syncthreads();
        for (int x = threadIdx.x; x < SMALL_GRADS * CHUNK; x += THREADS) {
            const int r = x / CHUNK, f = x % CHUNK;
            dy[f * SMALL_GRADS + r] =
                row0 + r < p.m && f < count ? to_float(((const T *)p.dy)[(row0 + r) * p.dy_stride + f0 + f]) : 0;
        }
        __syncthreads();
        float part[SMALL_GRADS][OWN] = {};
#pragma unroll 1
        for (int f1 = 0; f1 < count; f1 += AT_ONCE)
#pragma unroll
            for (int c = 0; c < OWN; c++) {
                const int e = (int)threadIdx.x + c * THREADS;
                if (c * THREADS >= p.k)
                    continue;
                T v[AT_ONCE];
#pragma unroll
                for (int f = 0; f < AT_ONCE; f++)
                    v[f] = e < p.k && f1 + f < count ? w[(f0 + f1 + f) * p.w_stride + e] : T{};
#pragma unroll
                for (int f = 0; f < AT_ONCE; f++) {
                    float d[SMALL_GRADS];
#pragma unroll
                    for (int r = 0; r < SMALL_GRADS; r += 4)
                        *(float4 *)(d + r) = *(const float4 *)(dy + (f1 + f) * SMALL_GRADS + r);
#pragma unroll
                    for (int r = 0; r < SMALL_GRADS; r++)
                        part[r][c] += d[r] * to_float(v[f]);
                }
            }
#pragma unroll
        for (int r = 0; r < SMALL_GRADS; r++)
#pragma unroll
            for (int c = 0; c < OWN; c++)
                h[r][c] += part[r][c];
    }
}

/* dx of SMALL_GRADS rows, and their share of dgamma and dbeta. */
template <typename T> INLINE void rows_kernel(const norm_small &p, int block) {
    __shared__ float dy[SMALL_GRADS * CHUNK];
    __shared__ float2 moments[SMALL_GRADS], sums[SMALL_GRADS][WARPS];
    const int64_t row0 = (int64_t)block * SMALL_GRADS;
    const T *gamma = (const T *)p.gamma;
    float h[SMALL_GRADS][OWN] = {};
    find_moments<T>(p, row0, SMALL_GRADS, moments);
    product_h<T>(p, row0, dy, h);
    float xhat[SMALL_GRADS][OWN];
#pragma unroll
    for (int r = 0; r < SMALL_GRADS; r++) {
        float sum = 0, dot = 0;
#pragma unroll
        for (int c = 0; c < OWN; c++) {
            const int e = (int)threadIdx.x + c * THREADS;
            const bool inside = e < p.k && row0 + r < p.m;
            xhat[r][c] = /* without a norm nothing is taken off */
                inside && !p.plain
                    ? (to_float(((const T *)p.x)[(row0 + r) * p.x_stride + e]) - moments[r].x) * moments[r].y
                    : 0;
            const float g = inside && gamma ? h[r][c] * to_float(gamma[e]) : h[r][c];
            sum += g;
            dot += g * xhat[r][c];
        }
        sum = warp_sum(sum);
        dot = warp_sum(dot);
        if (threadIdx.x % 32 == 0)
            sums[r][threadIdx.x / 32] = make_float2(sum, dot);
    }
    __syncthreads();
    float beta[OWN] = {}, scale[OWN] = {};
#pragma unroll
    for (int r = 0; r < SMALL_GRADS; r++) {
        float c1 = 0, c2 = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            c1 += sums[r][w].x;
            c2 += sums[r][w].y;
        }
        c1 = p.rms || p.plain ? 0 : c1 / (float)p.k;
        c2 /= (float)p.k;
#pragma unroll
        for (int c = 0; c < OWN; c++) {
            const int e = (int)threadIdx.x + c * THREADS;
            if (e >= p.k || row0 + r >= p.m)
                continue;
            const float g = gamma ? h[r][c] * to_float(gamma[e]) : h[r][c];
            if (p.dx)
                ((T *)p.dx)[(row0 + r) * p.dx_stride + e] = from_float<T>(moments[r].y * (g - c1 - xhat[r][c] * c2));
            beta[c] += h[r][c];
            scale[c] += h[r][c] * xhat[r][c];
        }
    }
#pragma unroll
    for (int c = 0; c < OWN; c++) {
        const int e = (int)threadIdx.x + c * THREADS;
        if (e < p.k && p.part) {
            p.part[(int64_t)block * 2 * p.k + e] = scale[c];
            p.part[(int64_t)block * 2 * p.k + p.k + e] = beta[c];
        } else if (e < p.k) {
            if (p.dgamma)
                ((T *)p.dgamma)[e] = from_float<T>(scale[c]);
            if (p.dbeta)
                ((T *)p.dbeta)[e] = from_float<T>(beta[c]);
        }
    }
}

enum { SIDE = SMALL_SIDE, DEPTH = 64, EACH = SIDE / WARPS };

/* dw = dyᵀ·(xhat∘gamma + beta), 32 rows and columns of it, and dbias. A lane has a column, a warp four rows. */
template <typename T> INLINE void weights_kernel(const norm_small &p, int block) {
    __shared__ float z[DEPTH][SIDE], dy[DEPTH][SIDE];
    __shared__ float2 moments[DEPTH];
    const int strips = p.dw ? norm_small_strips(p.k) : 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int col = block % strips * SIDE + lane, row = block / strips * SIDE;
    const float gamma = p.gamma && col < p.k ? to_float(((const T *)p.gamma)[col]) : 1;
    const float beta = p.beta && col < p.k ? to_float(((const T *)p.beta)[col]) : 0;
    float g[EACH] = {}, bias[EACH] = {};
    for (int64_t i0 = 0; i0 < p.m; i0 += DEPTH) {
        __syncthreads();
        if (p.dw)
            find_moments<T>(p, i0, DEPTH, moments);
        T u[DEPTH / WARPS], v[DEPTH / WARPS];
#pragma unroll
        for (int x = 0; x < DEPTH / WARPS; x++) {
            const int64_t i = i0 + warp + x * WARPS;
            u[x] = i < p.m && row + lane < p.n ? ((const T *)p.dy)[i * p.dy_stride + row + lane] : T{};
            v[x] = p.dw && i < p.m && col < p.k ? ((const T *)p.x)[i * p.x_stride + col] : T{};
        }
        __syncthreads();
#pragma unroll
        for (int x = 0; x < DEPTH / WARPS; x++) {
            const int r = warp + x * WARPS;
            const bool inside = p.dw && i0 + r < p.m && col < p.k;
            dy[r][lane] = to_float(u[x]);
            z[r][lane] = inside ? (to_float(v[x]) - moments[r].x) * moments[r].y * gamma + beta : 0;
        }
        __syncthreads();
        float part[EACH] = {}, sum[EACH] = {};
#pragma unroll 8
        for (int r = 0; r < DEPTH; r++) {
            const float4 d = *(const float4 *)&dy[r][warp * EACH];
            const float v = z[r][lane], u[EACH] = {d.x, d.y, d.z, d.w};
#pragma unroll
            for (int x = 0; x < EACH; x++) {
                part[x] += u[x] * v;
                sum[x] += u[x];
            }
        }
#pragma unroll
        for (int x = 0; x < EACH; x++) {
            g[x] += part[x];
            bias[x] += sum[x];
        }
    }
#pragma unroll
    for (int x = 0; x < EACH; x++) {
        const int f = row + warp * EACH + x;
        if (p.dw && f < p.n && col < p.k)
            ((T *)p.dw)[f * p.dw_stride + col] = from_float<T>(g[x]);
        if (p.dbias && block % strips == 0 && lane == 0 && f < p.n)
            ((T *)p.dbias)[f] = from_float<T>(bias[x]);
    }
}

/* Blocks of rows, then blocks of weights. */
template <typename T> INLINE void bwd_kernel(const norm_small &p) {
    if ((int)blockIdx.x < p.row_blocks)
        rows_kernel<T>(p, (int)blockIdx.x);
    else
        weights_kernel<T>(p, (int)blockIdx.x - p.row_blocks);
}

#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == THREADS, "as the kernel counts");                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        heddle_norm_linear_##pass##_##dtype##_small(const __grid_constant__ norm_small p) {                            \
        wait_for_earlier_grid();                                                                                       \
        pass##_kernel<dtype>(p);                                                                                       \
    }

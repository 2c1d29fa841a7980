/* SPDX-License-Identifier: Apache-2.0
 * z = norm(x) as a result, and what its gradient dz adds to others, as passes of their own: z where no launch in front of a product leaves it
 * as it is wanted; dz to h = dy·W before dx is made of it; and its sums over rows, which are parts of dgamma and dbeta. */
#include "cuda/norm_linear/contract.h"
#include "cuda/norm_linear/rows.cuh"

/* A thread has eight elements of a row at a time. */
template <typename T> INLINE void z_kernel(const norm_z &p) {
    const int64_t chunks = (p.cols + 7) / 8, step = (int64_t)gridDim.x * Z_THREADS;
    for (int64_t at = (int64_t)blockIdx.x * Z_THREADS + threadIdx.x; at < p.rows * chunks; at += step) {
        const int64_t row = at / chunks, col = at % chunks * 8;
        T *const out = (T *)p.out + row * p.ldo;
        float v[8], other[8];
        if (p.dz) {
            load8(out, col, p.cols, p.vector, v);
            load8((const T *)p.dz + row * p.ldz, col, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                v[x] += other[x];
            store8(out, col, p.cols, p.vector, v);
            continue;
        }
        const float mean = p.centred ? p.mean[row] : 0, rstd = p.rstd[row];
        load8((const T *)p.x + row * p.ldx, col, p.cols, p.vector, v);
#pragma unroll
        for (int x = 0; x < 8; x++)
            v[x] = (v[x] - mean) * rstd;
        if (p.gamma) {
            load8((const T *)p.gamma, col, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                v[x] *= other[x];
        }
        if (p.beta) {
            load8((const T *)p.beta, col, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                v[x] += other[x];
        }
        store8(out, col, p.cols, p.vector, v);
    }
}

/* A block has SUM_COLS columns and one share of the rows; its warps take rows in turn. */
template <typename T> INLINE void z_sums_kernel(const norm_z_sums &p) {
    __shared__ float sums[2][Z_THREADS / 32][SUM_COLS];
    const uint32_t tiles = (uint32_t)sum_units(p.cols);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t part = blockIdx.x / tiles, col0 = (int64_t)(blockIdx.x % tiles) * SUM_COLS, col = col0 + lane * 8;
    const int64_t begin = p.rows * part / p.parts, end = p.rows * (part + 1) / p.parts;
    float gamma[8] = {}, beta[8] = {};
#pragma unroll 4
    for (int64_t row = begin + warp; row < end; row += Z_THREADS / 32) {
        float dz[8], x[8];
        load8((const T *)p.dz + row * p.ldz, col, p.cols, p.vector, dz);
        load8((const T *)p.x + row * p.ldx, col, p.cols, p.vector, x);
        const float mean = p.centred ? p.mean[row] : 0, rstd = p.rstd[row];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            gamma[e] += dz[e] * ((x[e] - mean) * rstd);
            beta[e] += dz[e];
        }
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
        sums[0][warp][lane * 8 + e] = gamma[e];
        sums[1][warp][lane * 8 + e] = beta[e];
    }
    __syncthreads();
    const int64_t mine = col0 + threadIdx.x;
    float of_gamma = 0, of_beta = 0;
#pragma unroll
    for (int w = 0; w < Z_THREADS / 32; w++) {
        of_gamma += sums[0][w][threadIdx.x];
        of_beta += sums[1][w][threadIdx.x];
    }
    if (mine < p.cols && p.gamma_part)
        p.gamma_part[part * p.cols + mine] = of_gamma;
    if (mine < p.cols && p.beta_part)
        p.beta_part[part * p.cols + mine] = of_beta;
}

#define parameter_z norm_z
#define parameter_z_sums norm_z_sums
#define blocks_z Z_RESIDENT
#define blocks_z_sums 2
#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == Z_THREADS && threads == SUM_COLS, "as the kernels count");                                \
    ROW_KERNEL(pass, dtype, parameter_##pass, threads, blocks_##pass)

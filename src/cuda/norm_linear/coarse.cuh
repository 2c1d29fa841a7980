/* SPDX-License-Identifier: Apache-2.0
 * Where raw x is multiplied, rows whose mean is so many deviations that what float32 rounds of x·Wᵀ, and of the mean's share of that, would
 * be seen: they are made anew, of x less the mean as T has it. What T has near a large mean is apart from that by so few of its units that
 * it is no rounding. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_COARSE_CUH
#define HEDDLE_CUDA_NORM_LINEAR_COARSE_CUH

#include "cuda/norm_linear/activation.cuh"

/* Deviations; in bfloat16 such a row has but a few different numbers. */
#define COARSE_MEAN 128.0f

/* row: its mean, 1/deviation. */
INLINE bool is_coarse(float2 row) {
    return fabsf(row.x) * row.y > COARSE_MEAN;
}

INLINE void multiply_pairs(float c[4], const uint32_t a[4], const uint32_t b[2], bf16) {
    mma_bf16(c, a, b);
}
INLINE void multiply_pairs(float c[4], const uint32_t a[4], const uint32_t b[2], f16) {
    mma_f16(c, a, b);
}

/* Eight elements of a row from e on, less shift; zeros past the end. */
template <typename T>
INLINE void load_shifted(const T *row, int64_t e, int64_t depth, bool vector, float shift, float v[8]) {
    load8(row, e, depth, vector, v);
#pragma unroll
    for (int x = 0; x < 8; x++)
        v[x] = e + x < depth ? v[x] - shift : 0;
}

template <typename T> INLINE void pack8(const float v[8], uint32_t pairs[4]) {
#pragma unroll
    for (int x = 0; x < 4; x++)
        pairs[x] = pack_pair(v[2 * x], v[2 * x + 1], T());
}

/* Two neighbours of a row: u, and out of that. */
template <typename T> INLINE void store_again(const norm_gemm &p, int64_t row, int64_t col, const float u[2]) {
    float v[8] = {};
    for (int x = 0; x < 2; x++) {
        const T rounded = from_float<T>(u[x]);
        if (p.u && col + x < p.cols)
            ((T *)p.u)[row * p.ldu + col + x] = rounded;
        v[x] = p.activation ? to_float(rounded) : u[x];
    }
    if (p.activation)
        activate8<false>(p.activation, v);
    for (int x = 0; x < 2; x++) {
        if (col + x >= p.cols)
            continue;
        if (p.residual)
            v[x] += to_float(((const T *)p.residual)[row * p.ldr + col + x]);
        ((T *)p.out)[row * p.ldo + col + x] = from_float<T>(v[x]);
    }
}

/* By a warp: of its 16 rows from row0 on, of which this lane is told of rows lane/4 and lane/4 + 8, those that are coarse, columns col0 to
 * col1 - 1; they have been stored by this warp. A lane has eight terms of 32 at a time, which the tensor cores take in any order. vector: A
 * and B may be read 16 bytes at a time. */
template <typename T>
INLINE void remake_coarse(const norm_gemm &p, const float2 row[2], int64_t row0, int64_t col0, int64_t col1,
                          bool vector) {
    const bool coarse[2] = {is_coarse(row[0]), is_coarse(row[1])};
    if (!__any_sync(~0u, coarse[0] || coarse[1]))
        return;
    const int lane = threadIdx.x % 32, first = lane % 4 * 8;
    const T *a[2];
    float shift[2], mean[2] = {0, 0};
    bool apart = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t at = row0 + lane / 4 + half * 8;
        a[half] = (const T *)p.a + (at < p.rows ? at : p.rows - 1) * p.lda;
        shift[half] = coarse[half] ? to_float(from_float<T>(row[half].x)) : 0;
    }
#pragma unroll 1
    for (int64_t e = first; e < p.depth; e += 32)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float v[8];
            load_shifted(a[half], e, p.depth, vector, shift[half], v);
#pragma unroll
            for (int x = 0; x < 8; x++) {
                mean[half] += v[x];
                apart |= coarse[half] && v[x] != 0;
            }
        }
    apart = __any_sync(~0u, apart); /* else there is nothing but the columns' own share */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mean[half] += __shfl_xor_sync(~0u, mean[half], 1);
        mean[half] += __shfl_xor_sync(~0u, mean[half], 2);
        mean[half] /= (float)p.depth;
    }
    __syncwarp(); /* what was stored is stored */
#pragma unroll 1
    for (int64_t col = col0; col < col1; col += 8) {
        const int64_t of_b = col + lane / 4, to = col + lane % 4 * 2;
        const T *b = (const T *)p.b + (of_b < p.cols ? of_b : p.cols - 1) * p.ldb;
        float sum[4] = {};
#pragma unroll 1
        for (int64_t e0 = 0; apart && e0 < p.depth; e0 += 32) {
            uint32_t of_a[2][4], pairs[4];
            float v[8];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                load_shifted(a[half], e0 + first, p.depth, vector, shift[half], v);
                pack8<T>(v, of_a[half]);
            }
            load8(b, e0 + first, p.depth, vector, v);
            pack8<T>(v, pairs);
#pragma unroll
            for (int x = 0; x < 4; x += 2) {
                const uint32_t both[4] = {of_a[0][x], of_a[1][x], of_a[0][x + 1], of_a[1][x + 1]};
                multiply_pairs(sum, both, pairs + x, T());
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float u[2];
            for (int x = 0; x < 2; x++) {
                const int64_t at = to + x < p.cols ? to + x : p.cols - 1;
                u[x] = row[half].y * (sum[2 * half + x] - mean[half] * p.col_sum[at]) + p.col_add[at];
            }
            if (coarse[half] && to < p.cols)
                store_again<T>(p, row0 + lane / 4 + half * 8, to, u);
        }
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Where raw x is multiplied, rows whose mean is so many deviations that what float32 rounds of x·Wᵀ, and of the mean's share of that, would
 * be seen: they are made anew, of x less the mean as T has it. What T has near a large mean is apart from that by so few of its units that
 * it is no rounding. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_COARSE_CUH
#define HEDDLE_CUDA_NORM_LINEAR_COARSE_CUH

#include "cuda/norm_linear/activation.cuh"
#include "cuda/ptx90.cuh"

/* Deviations; in bfloat16 such a row has but a few different numbers. */
#define COARSE_MEAN 128.0f

/* row: its mean, 1/deviation. */
INLINE bool is_coarse(float2 row) {
    return fabsf(row.x) * row.y > COARSE_MEAN;
}

/* Of a warp's rows, of each lane's two. */
INLINE bool any_coarse(const float2 row[2]) {
    return __any_sync(~0u, is_coarse(row[0]) || is_coarse(row[1]));
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

/* Which row and column has number x of those that a lane has of two eights of columns from col on: as accumulators lie. */
INLINE int64_t row_of_eight(int64_t row0, int lane, int x) {
    return row0 + lane / 4 + x / 2 % 2 * 8;
}
INLINE int64_t column_of_eight(int64_t col, int lane, int x) {
    return col + x / 4 * 8 + lane % 4 * 2 + x % 2;
}

/* u, and out of that, of a lane's numbers in rows that are coarse. */
template <typename T>
INLINE void store_again(const norm_gemm &p, int64_t row0, int64_t col, int lane, const bool coarse[2], float v[8]) {
    if (p.activation) { /* of u as it is stored */
#pragma unroll
        for (int x = 0; x < 8; x++) {
            const T u = from_float<T>(v[x]);
            const int64_t row = row_of_eight(row0, lane, x), at = column_of_eight(col, lane, x);
            if (p.u && coarse[x / 2 % 2] && at < p.cols)
                ((T *)p.u)[row * p.ldu + at] = u;
            v[x] = to_float(u);
        }
        activate<T, 8, false>(p.activation, v);
    }
#pragma unroll
    for (int x = 0; x < 8; x++) {
        const int64_t row = row_of_eight(row0, lane, x), at = column_of_eight(col, lane, x);
        if (!coarse[x / 2 % 2] || at >= p.cols)
            continue;
        if (p.residual)
            v[x] += to_float(((const T *)p.residual)[row * p.ldr + at]);
        ((T *)p.out)[row * p.ldo + at] = from_float<T>(v[x]);
    }
}

/* Eights of columns that are worked on together, so that many loads are on their way. */
enum { COARSE_EIGHTS = 2 };

/* sums = (A - shift)·Bᵀ of a warp's 16 rows and such columns from col on. A lane has eight terms of 32 at a time, which the tensor cores take in
 * any order. vector: A and B may be read 16 bytes at a time. */
template <typename T>
INLINE void multiply_coarse(const norm_gemm &p, const T *const a[2], const float shift[2], int64_t col, int lane,
                            bool vector, float (*sums)[4]) {
#pragma unroll 1
    for (int64_t e = lane % 4 * 8; e < (p.depth + 31) / 32 * 32; e += 32) {
        uint32_t of_a[2][4], of_b[COARSE_EIGHTS][4];
        float v[8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            load_shifted(a[half], e, p.depth, vector, shift[half], v);
            pack8<T>(v, of_a[half]);
        }
#pragma unroll
        for (int y = 0; y < COARSE_EIGHTS; y++) {
            const int64_t row = col + y * 8 + lane / 4;
            load8((const T *)p.b + (row < p.cols ? row : p.cols - 1) * p.ldb, e, p.depth, vector, v);
            pack8<T>(v, of_b[y]);
        }
#pragma unroll
        for (int x = 0; x < 4; x += 2) {
            const uint32_t both[4] = {of_a[0][x], of_a[1][x], of_a[0][x + 1], of_a[1][x + 1]};
#pragma unroll
            for (int y = 0; y < COARSE_EIGHTS; y++)
                multiply_pairs(sums[y], both, of_b[y] + x, T());
        }
    }
}

/* The mean of a lane's two rows less shift. Is one of them, that is coarse, more than one number? By a warp. */
template <typename T>
INLINE bool find_means(const norm_gemm &p, const T *const a[2], const float shift[2], const bool coarse[2], int lane,
                       bool vector, float mean[2]) {
    bool apart = false;
#pragma unroll 2
    for (int64_t e = lane % 4 * 8; e < p.depth; e += 32)
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
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mean[half] += __shfl_xor_sync(~0u, mean[half], 1);
        mean[half] += __shfl_xor_sync(~0u, mean[half], 2);
        mean[half] /= (float)p.depth;
    }
    return __any_sync(~0u, apart);
}

/* By a warp: of its 16 rows from row0 on, of which this lane is told of rows lane/4 and lane/4 + 8, those that are coarse, columns col0 to
 * col1 - 1, which this warp has stored before. */
template <typename T>
INLINE void remake_coarse(const norm_gemm &p, const float2 row[2], int64_t row0, int64_t col0, int64_t col1,
                          bool vector) {
    const bool coarse[2] = {is_coarse(row[0]), is_coarse(row[1])};
    uint32_t thread = threadIdx.x;
    pin(thread); /* or what depends on it would wait in registers while the sums are formed */
    const int lane = thread % 32;
    const T *a[2];
    float shift[2], mean[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t at = row0 + lane / 4 + half * 8;
        a[half] = (const T *)p.a + (at < p.rows ? at : p.rows - 1) * p.lda;
        shift[half] = coarse[half] ? to_float(from_float<T>(row[half].x)) : 0;
    }
    const bool apart = find_means(p, a, shift, coarse, lane, vector, mean);
    __syncwarp(); /* what was stored is stored */
#pragma unroll 1
    for (int64_t col = col0; col < col1; col += 8 * COARSE_EIGHTS) {
        float sums[COARSE_EIGHTS][4] = {};
        if (apart) /* else there is nothing but the columns' own share */
            multiply_coarse(p, a, shift, col, lane, vector, sums);
#pragma unroll
        for (int y = 0; y < COARSE_EIGHTS; y += 2) {
            float v[8];
#pragma unroll
            for (int x = 0; x < 8; x++) {
                const int half = x / 2 % 2;
                const int64_t to = column_of_eight(col + y * 8, lane, x), at = to < p.cols ? to : p.cols - 1;
                v[x] = row[half].y * (sums[y + x / 4][x % 4] - mean[half] * p.col_sum[at]) + p.col_add[at];
            }
            store_again<T>(p, row0, col + y * 8, lane, coarse, v);
        }
    }
}

#endif

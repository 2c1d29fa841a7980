/* SPDX-License-Identifier: Apache-2.0
 * Accumulators of the tensor cores to rows in memory. */
#ifndef HEDDLE_CUDA_ATTENTION_STORE_CUH
#define HEDDLE_CUDA_ATTENTION_STORE_CUH

#include "cuda/attention/common.cuh"

/* Two neighbours of a row of `width`, times `by`. */
template <typename T> INLINE void store_pair(T *row, int e, int width, float x, float y) {
    if (e < width)
        from_float(&row[e], x);
    if (e + 1 < width)
        from_float(&row[e + 1], y);
}

template <typename T> struct pair_store {
    static __device__ __forceinline__ void run(T *row, int e, int width, float x, float y, bool aligned) {
        if (aligned && e + 1 < width)
            *(uint32_t *)(row + e) = pack_pair(x, y, T());
        else
            store_pair(row, e, width, x, y);
    }
};
template <> struct pair_store<float> {
    static __device__ __forceinline__ void run(float *row, int e, int width, float x, float y, bool aligned) {
        if (aligned && e + 1 < width)
            *(float2 *)(row + e) = make_float2(x, y);
        else
            store_pair(row, e, width, x, y);
    }
};

/* One row's part of accumulators (half 0: row lane/4, half 1: row lane/4 + 8), times `by`: N columns. */
template <typename T, int N> INLINE void store_row(T *row, const float (*c)[4], int half, int width, float by) {
    const bool aligned = (size_t)row % (2 * sizeof(T)) == 0;
#pragma unroll
    for (int y = 0; y < N / 8; y++)
        pair_store<T>::run(row, y * 8 + threadIdx.x % 4 * 2, width, c[y][2 * half] * by, c[y][2 * half + 1] * by,
                           aligned);
}

/* The same added to float32 sums, by the only one who does. Nothing is read, so that no register waits; two numbers at a time would
 * take 128 bytes of spills more in the backward for Hopper. */
template <int N> INLINE void add_sums(float *row, const float (*c)[4], int half, int width, float by) {
    row += threadIdx.x % 4 * 2;
    width -= (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int y = 0; y < N / 8; y++) {
        if (y * 8 < width)
            add_global(row + y * 8, c[y][2 * half] * by);
        if (y * 8 + 1 < width)
            add_global(row + y * 8 + 1, c[y][2 * half + 1] * by);
    }
}

/* Stored, where there is something: `keep` of it stays, or if that is negative it is not even read. PAIRS: two numbers at a time, which
 * then are in their place. */
template <int N, bool PAIRS>
INLINE void add_row(float *row, const float (*c)[4], int half, int width, float by, float keep) {
    row += threadIdx.x % 4 * 2;
    width -= (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int y = 0; y < N / 8; y++) {
        float2 sum = make_float2(0.0f, 0.0f);
        if (PAIRS && y * 8 < width) {
            if (keep >= 0.0f)
                sum = *(const float2 *)(row + y * 8);
            *(float2 *)(row + y * 8) =
                make_float2(fmaf(sum.x, keep, c[y][2 * half] * by), fmaf(sum.y, keep, c[y][2 * half + 1] * by));
        }
#pragma unroll
        for (int e = 0; !PAIRS && e < 2; e++)
            if (y * 8 + e < width)
                row[y * 8 + e] = fmaf(keep >= 0.0f ? row[y * 8 + e] : 0.0f, keep, c[y][2 * half + e] * by);
    }
}

/* Of four lanes side by side each has the same pair of four chunks of 16 bytes; it is given the four pairs of one of them. */
INLINE uint4 swap_pairs(uint32_t v[4]) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1, upper = lane & 2;
    uint32_t t;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
        t = __shfl_xor_sync(ALL_LANES, odd ? v[e] : v[e + 1], 1);
        v[e] = odd ? t : v[e];
        v[e + 1] = odd ? v[e + 1] : t;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        t = __shfl_xor_sync(ALL_LANES, upper ? v[e] : v[e + 2], 2);
        v[e] = upper ? t : v[e];
        v[e + 2] = upper ? v[e + 2] : t;
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
}

/* The 16 rows of a warp, of which `rows` from the block's first on are there, times `by`. adds: to what is there. */
template <typename T, int D>
INLINE void store_tile(bool adds, void *to, int64_t at, int64_t stride, int warp_row, int rows, int width, float by,
                       const float (*c)[4]) {
    if (!to)
        return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp_row + half * 8 + lane / 4;
        const bool there = row < rows;
        if (adds) {
            if (there)
                add_sums<D>((float *)to + at + row * stride, c, half, width, by);
            continue;
        }
        T *line = (T *)to + at + row * stride;
        if (!__all_sync(ALL_LANES, ((size_t)line | (size_t)(width * 2)) % 16 == 0)) {
            if (there)
                store_row<T, D>(line, c, half, width, by);
            continue;
        }
#pragma unroll
        for (int y = 0; y < D / 8; y += 4) { /* of four chunks of 16 bytes, each of four lanes is given one */
            uint32_t v[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                v[e] = pack_pair(c[y + e][2 * half] * by, c[y + e][2 * half + 1] * by, T());
            const uint4 chunk = swap_pairs(v);
            const int column = (y + lane % 4) * 8;
            if (there && column < width)
                store_global16(line + column, chunk);
        }
    }
}

#endif

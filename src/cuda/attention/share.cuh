/* SPDX-License-Identifier: Apache-2.0
 * Rows that several warps share, of which each has some of the columns. */
#ifndef HEDDLE_CUDA_ATTENTION_SHARE_CUH
#define HEDDLE_CUDA_ATTENTION_SHARE_CUH

#include "cuda/attention/common.cuh"
#include "cuda/attention/sm80/contract.h"

/* The accumulators of 16 rows of more than 256 elements do not fit into a warp's registers: `count` warps side by side own the same
 * rows. Each forms the part of their scores that its columns give, the parts are added up (join_parts), and each keeps its columns of
 * what the weights are multiplied with. */
template <typename T, int D> struct share {
    static constexpr int count = sm80_warps_of_a_row(sizeof(T), D);
    static constexpr int width = D / count; /* columns */
    static constexpr int steps = width * (int)sizeof(T) / 32;
    static __device__ __forceinline__ int part(void) {
        return count > 1 ? (int)threadIdx.x / 32 % count : 0;
    }
    static __device__ __forceinline__ int group(void) { /* of warps that own the same rows */
        return (int)threadIdx.x / 32 / count;
    }
    /* Shared memory for one product of `tiles` times 16 rows and `columns` columns that `warps` warps join. */
    static constexpr int bytes(int warps, int tiles, int columns) {
        return count > 1 ? warps * 32 * tiles * columns / 8 * 16 : 0;
    }
};

/* Parts of scores of the warps that own the same rows -> their sums, the same bits for all of them. `at` is free again when all of the
 * block have met. */
template <int COUNT, int TILES, int COLUMNS> INLINE void join_parts(float (*c)[COLUMNS / 8][4], uint32_t at) {
    constexpr int EACH = TILES * COLUMNS / 8 * 32 * 16; /* bytes of a warp */
    const int warp = threadIdx.x / 32, part = warp % COUNT;
    at += warp / COUNT * COUNT * EACH + threadIdx.x % 32 * 16;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int y = 0; y < COLUMNS / 8; y++)
            store_shared16(at + part * EACH + (x * (COLUMNS / 8) + y) * 512, *(const uint4 *)c[x][y]);
    barrier_sync(1 + warp / COUNT, COUNT * 32);
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int y = 0; y < COLUMNS / 8; y++) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int z = 0; z < COUNT; z++) {
                const uint4 other = load_shared16(at + z * EACH + (x * (COLUMNS / 8) + y) * 512);
                sum[0] += __uint_as_float(other.x);
                sum[1] += __uint_as_float(other.y);
                sum[2] += __uint_as_float(other.z);
                sum[3] += __uint_as_float(other.w);
            }
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[x][y][e] = sum[e];
        }
}

#endif

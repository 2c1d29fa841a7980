/* SPDX-License-Identifier: Apache-2.0
 * What the two kernels of the backward for Hopper share: shared memory, barriers, storing. */
#ifndef HEDDLE_CUDA_ATTENTION_BWD_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_BWD_SM90_CUH

#include "attention_sm90.cuh"

#define OWN_ROWS 128
#define CONSUMERS 256

/* ------------------------------------------------------------------------------------------------ shared memory */

/* Rows of two tensors stay (OWN times, so that the next tile's are fetched in time), BLOCK rows of two others stream.
 * NUMBERS: floats per streamed row, three in dkdv, one in dq. */
template <int D, int OWN, int BLOCK, int STAGES, int NUMBERS> struct backward90 {
    static constexpr int own_bytes = OWN_ROWS * D * 2, block_bytes = BLOCK * D * 2;
    static constexpr int stages = 2 * OWN * own_bytes;
    static constexpr int numbers = stages + 2 * STAGES * block_bytes;
    static constexpr int barriers = numbers + STAGES * NUMBERS * BLOCK * 4;
    static constexpr int full = barriers, empty = full + STAGES * 8, own_full = empty + STAGES * 8,
                         own_empty = own_full + OWN * 8;
    static constexpr int bytes = own_empty + OWN * 8;
    static_assert(bytes <= 227 * 1024, "more than a multiprocessor has");
};

/* LANES: threads that copy into a stage beside the copy engine. */
template <typename layout, int OWN, int STAGES, int LANES> INLINE void make_barriers(uint32_t shared) {
    if (threadIdx.x == 0) {
        for (int x = 0; x < STAGES; x++) {
            mbarrier_init(shared + layout::full + x * 8, 1 + LANES);
            mbarrier_init(shared + layout::empty + x * 8, CONSUMERS / 32);
        }
        for (int x = 0; x < OWN; x++) {
            mbarrier_init(shared + layout::own_full + x * 8, 1);
            mbarrier_init(shared + layout::own_empty + x * 8, CONSUMERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

/* x, of which the compiler knows nothing. */
INLINE int64_t opaque(int64_t x) {
    asm volatile("" : "+l"(x));
    return x;
}

/* This warp has read all that it wanted. */
INLINE void release(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barrier);
}

/* Of four chunks of 16 bytes, each of the four lanes that hold a part of all is given one whole. */
INLINE void gather_chunk(uint32_t v[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
        const uint32_t t = __shfl_xor_sync(ALL_LANES, odd ? v[e] : v[e + 1], 1);
        v[e] = odd ? t : v[e];
        v[e + 1] = odd ? v[e + 1] : t;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const uint32_t t = __shfl_xor_sync(ALL_LANES, upper ? v[e] : v[e + 2], 2);
        v[e] = upper ? t : v[e];
        v[e + 2] = upper ? v[e + 2] : t;
    }
}

/* The 16 rows of a warp, of which `rows` from the block's first on are there, times `by`. */
template <typename T, int D>
INLINE void store_tile(void *to, int64_t at, int64_t stride, int warp_row, int rows, int width, float by,
                       const float (*c)[4]) {
    if (!to)
        return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp_row + half * 8 + lane / 4;
        T *line = (T *)to + at + row * stride;
        const bool vector = ((size_t)line | (size_t)(width * 2)) % 16 == 0, there = row < rows;
#pragma unroll
        for (int y = 0; y < D / 8; y += 4) {
            uint32_t v[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                v[e] = pack_pair(c[y + e][2 * half] * by, c[y + e][2 * half + 1] * by, T());
            if (__all_sync(ALL_LANES, vector || !there)) {
                gather_chunk(v);
                const int column = (y + lane % 4) * 8;
                if (there && column < width)
                    *(uint4 *)(line + column) = make_uint4(v[0], v[1], v[2], v[3]);
            } else {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int column = (y + e) * 8 + lane % 4 * 2;
                    if (there && column < width)
                        line[column].bits = (uint16_t)v[e];
                    if (there && column + 1 < width)
                        line[column + 1].bits = (uint16_t)(v[e] >> 16);
                }
            }
        }
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * As faults.cpp, of what Hopper alone has: a tile is copied into the same place twice, and each time multiplied by ones. */
#include "cuda/wgmma.cuh"

#define N 64
#define DEPTH 64
#define TILE (N * DEPTH * 2)

struct fault90_params {
    const uint16_t *from; /* bfloat16 [2][N][DEPTH], as the copy engine lays tiles down */
    float *to;            /* [64][N] */
};

enum fault90 { NONE, NO_PHASE, OTHER_PHASE, MORE_BYTES, NO_PRODUCTS, SOON };

template <fault90 FAULT> static __device__ void add_products(const fault90_params &p) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t tile = shared_address(shared), there = tile + TILE;
    const uint32_t ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    float c[N / 8][4];
    if (threadIdx.x == 0)
        mbarrier_init(there, 1);
    __syncthreads();
    for (int step = 0; step < 2; step++) {
        if (threadIdx.x == 0) {
            mbarrier_expect(there, FAULT == MORE_BYTES ? TILE + 16 : TILE);
            copy_bulk(tile, p.from + step * N * DEPTH, TILE, there);
        }
        if (FAULT != NO_PHASE)
            mbarrier_wait(there, FAULT == OTHER_PHASE ? step ^ 1 : step);
        wgmma_fence();
        for (int k = 0; k < DEPTH / 16; k++)
            wgmma<bf16, N, 0>::run(c, ones, describe(tile, 16, 1024) + k * 2, step + k > 0);
        wgmma_commit();
        if (FAULT != NO_PRODUCTS && !(FAULT == SOON && step == 0))
            wgmma_wait<0>();
        __syncthreads();
    }
    for (int y = 0; y < N / 8; y++)
        for (int e = 0; e < 4; e++)
            p.to[(row + e / 2 * 8) * N + y * 8 + lane % 4 * 2 + e % 2] = c[y][e];
}

/* Each thread's number is added to the first sums; then, where it was staged, the next number to the second ones, beside what the first have
 * become. */
enum added90 { ADDED, TOO_SOON, NOT_THERE, LEFT };

template <added90 FAULT> static __device__ void add_numbers(const fault90_params &p) {
    extern __shared__ __align__(1024) char shared[];
    float *const staged = (float *)shared;
    staged[threadIdx.x] = (float)(threadIdx.x + 1);
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        add_bulk(p.to, shared_address(shared), WARPGROUP * 4);
        bulk_commit();
        if (FAULT == NOT_THERE)
            bulk_wait_read();
        else if (FAULT != TOO_SOON)
            bulk_wait();
    }
    __syncthreads();
    staged[threadIdx.x] = p.to[threadIdx.x] + 1;
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        add_bulk(p.to + WARPGROUP, shared_address(shared), WARPGROUP * 4);
        bulk_commit();
        if (FAULT != LEFT)
            bulk_wait_read();
    }
}

#define ADDS F(ADDED) F(TOO_SOON) F(NOT_THERE) F(LEFT)
#define F(name)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPGROUP) name##_kernel(const __grid_constant__ fault90_params p) {  \
        add_numbers<name>(p);                                                                                          \
    }
ADDS
#undef F

#define FAULTS F(NONE) F(NO_PHASE) F(OTHER_PHASE) F(MORE_BYTES) F(NO_PRODUCTS) F(SOON)
#define F(name)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPGROUP) name##_kernel(const __grid_constant__ fault90_params p) {  \
        add_products<name>(p);                                                                                         \
    }
    FAULTS
#undef F

    extern "C" __attribute__((visibility("default"))) const emulator_kernel emulator_kernels[] = {
#define F(name) EMULATOR_KERNEL(#name "_90", name##_kernel),
        FAULTS ADDS
#undef F
            EMULATOR_LAST};

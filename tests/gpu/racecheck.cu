/* SPDX-License-Identifier: Apache-2.0
 * Which orders does racecheck follow? One warp fills slots of a ring, another one reads them; every way is right but for the
 * last, in which the reader does not wait. No part of the build or of gpu-test:
 *
 *     nvcc -gencode arch=compute_90a,code=sm_90a -I src -o racecheck tests/gpu/racecheck.cu
 *     for way in 0 1 2 3 4 5 6 7 8 9; do compute-sanitizer --tool racecheck ./racecheck $way; done */
#include "cuda/ptx90.cuh"

#include <stdio.h>
#include <stdlib.h>

#define ROWS 64
#define SLOTS 2
#define TILES 20

enum { ASYNC, BULK, STORES };        /* how a slot is filled */
enum { ONE_LANE, EACH_LANE, NAMED }; /* how it is released: __syncwarp() and one arrival, 32 of them, a named barrier */
static const char *const fills[] = {"cp.async, arrive.noinc", "cp.async.bulk", "ld, st, arrive"};
static const char *const releases[] = {"one lane", "each lane", "a named barrier"};

template <int FILL, int RELEASE, bool WAITS> __global__ void ring(const float *from, float *to) {
    __shared__ __align__(128) float slots[SLOTS][ROWS];
    __shared__ __align__(8) uint64_t barriers[2 * SLOTS];
    const uint32_t full = shared_address(barriers), empty = full + SLOTS * 8, at = shared_address(slots);
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int x = 0; x < SLOTS; x++) {
            mbarrier_init(full + x * 8, FILL == BULK ? 1 : 32);
            mbarrier_init(empty + x * 8, RELEASE == EACH_LANE ? 32 : 1);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < TILES; i++) {
        const int slot = i % SLOTS, turn = i / SLOTS % 2;
        if (threadIdx.x >= 32) { /* the reader */
            if (WAITS)
                mbarrier_wait(full + slot * 8, turn);
            sum += slots[slot][lane * 2] + slots[slot][lane * 2 + 1];
            if (RELEASE == NAMED) {
                if (i + SLOTS < TILES)
                    barrier_arrive(1 + slot, 64);
                continue;
            }
            __syncwarp();
            if (lane == 0 || RELEASE == EACH_LANE)
                mbarrier_arrive(empty + slot * 8);
            continue;
        }
        if (RELEASE != NAMED)
            mbarrier_wait(empty + slot * 8, turn ^ 1);
        else if (i >= SLOTS)
            barrier_sync(1 + slot, 64);
        for (int x = lane; FILL != BULK && x < ROWS; x += 32)
            if (FILL == ASYNC)
                cp_async4(at + (slot * ROWS + x) * 4, from + i * ROWS + x, 4);
            else
                slots[slot][x] = from[i * ROWS + x];
        if (FILL == ASYNC)
            cp_async_arrive(full + slot * 8);
        else if (FILL == STORES)
            mbarrier_arrive(full + slot * 8);
        else if (lane == 0) {
            mbarrier_expect(full + slot * 8, ROWS * 4);
            copy_bulk(at + slot * ROWS * 4, from + i * ROWS, ROWS * 4, full + slot * 8);
        }
    }
    if (threadIdx.x >= 32)
        to[lane] = sum;
}

template <int FILL, int RELEASE, bool WAITS> static void run(const float *from, float *to) {
    float got[32], sum = 0;
    ring<FILL, RELEASE, WAITS><<<1, 64>>>(from, to);
    const cudaError_t status = cudaMemcpy(got, to, sizeof got, cudaMemcpyDeviceToHost);
    for (int x = 0; x < 32; x++)
        sum += got[x];
    printf("%s; %s releases%s: %s, sum %.0f of %d\n", fills[FILL], releases[RELEASE], WAITS ? "" : "; nobody waits",
           cudaGetErrorString(status), sum, TILES * ROWS);
}

int main(int count, char **words) {
    static float ones[TILES * ROWS];
    float *from, *to;
    for (int x = 0; x < TILES * ROWS; x++)
        ones[x] = 1;
    if (cudaMalloc(&from, sizeof ones) || cudaMalloc(&to, 32 * sizeof(float)) ||
        cudaMemcpy(from, ones, sizeof ones, cudaMemcpyHostToDevice))
        return 1;
    static void (*const ways[])(const float *, float *) = {run<ASYNC, ONE_LANE, true>,  run<ASYNC, EACH_LANE, true>,
                                                           run<ASYNC, NAMED, true>,     run<BULK, ONE_LANE, true>,
                                                           run<BULK, EACH_LANE, true>,  run<BULK, NAMED, true>,
                                                           run<STORES, ONE_LANE, true>, run<STORES, EACH_LANE, true>,
                                                           run<STORES, NAMED, true>,    run<STORES, EACH_LANE, false>};
    ways[count > 1 ? atoi(words[1]) % 10 : 0](from, to);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0
 * Kernels with a mistake each, and one without, for test_emulator.c. A block turns the 256 numbers of its part of `from` round. */
#include "cuda/ptx.cuh"

#include <math_constants.h>

#define THREADS 256

struct fault_params {
    const float *from;
    float *to;
};

enum fault {
    NONE,
    NO_BARRIER,
    NO_WAIT,
    SHORT_WAIT,
    NO_COPY,
    OVERRUN,
    WRONG_ADDRESS,
    ODD_SOURCE,
    LONELY_LANE,
    TWO_PLACES,
    LONELY_WARP
};

template <fault FAULT> static __device__ void turn_round(const fault_params &p) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float last;
    const int x = threadIdx.x, lane = x % 32;
    const float *from = p.from + blockIdx.x * THREADS;
    if (FAULT == ODD_SOURCE && x == 0) /* which nobody reads */
        cp_async4(shared_address(shared), (const char *)from + 2, 0);
    if (FAULT != NO_COPY || x != 0)
        cp_async4(shared_address(shared + x), from + x, 4);
    cp_async_commit();
    cp_async_commit(); /* a group of nothing */
    if (FAULT != NO_WAIT)
        cp_async_wait<FAULT == SHORT_WAIT ? 2 : 1>();
    if (FAULT != NO_BARRIER)
        __syncthreads();
    if (x == THREADS - 1)
        last = shared[0];
    if (FAULT == OVERRUN && x == 0)
        shared[THREADS] = 1.0f;
    if (FAULT == WRONG_ADDRESS)
        store_shared4(shared_address(shared + x) + 2, 0);
    if (FAULT == LONELY_LANE && lane == 3)
        return;
    float sum = lane < 16 && FAULT == TWO_PLACES ? (float)__popc(__ballot_sync(~0u, 1)) : __shfl_sync(~0u, 1.0f, 0);
    if (FAULT != LONELY_WARP || x >= 32)
        barrier_sync(1, THREADS);
    p.to[blockIdx.x * THREADS + x] = (x == 0             ? shared[THREADS - 1]
                                      : x == THREADS - 1 ? last
                                                         : shared[THREADS - 1 - x]) *
                                     (sum > 0.0f ? 1.0f : 0.0f);
}

#define FAULTS                                                                                                         \
    F(NONE)                                                                                                            \
    F(NO_BARRIER)                                                                                                      \
    F(NO_WAIT)                                                                                                         \
    F(SHORT_WAIT) F(NO_COPY) F(OVERRUN) F(WRONG_ADDRESS) F(ODD_SOURCE) F(LONELY_LANE) F(TWO_PLACES) F(LONELY_WARP)
#define F(name)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_kernel(const __grid_constant__ fault_params p) {      \
        turn_round<name>(p);                                                                                           \
    }
FAULTS
#undef F

extern "C" __attribute__((visibility("default"))) const emulator_kernel emulator_kernels[] = {
#define F(name) EMULATOR_KERNEL(#name, name##_kernel),
    FAULTS
#undef F
        EMULATOR_LAST};

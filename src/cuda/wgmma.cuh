/* SPDX-License-Identifier: Apache-2.0
 * What all kernels for Hopper share: products of a warpgroup by their types and sizes, their operands in shared memory, rings. */
#ifndef HEDDLE_CUDA_WGMMA_CUH
#define HEDDLE_CUDA_WGMMA_CUH

#include "cuda/element.cuh"
#include "cuda/ptx90.cuh"

#define WARPGROUP 128

/* The tensor cores' description of an operand in shared memory: address and the two strides, all in units of 16 bytes, and the
 * swizzle of 128 bytes. `leading` is not looked at where the contiguous dimension is the one that is summed over. */
INLINE uint64_t describe(uint32_t at, int leading, int stride) {
    return (uint64_t)((at & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           UINT64_C(1) << 62;
}

/* run: A in registers or, with its rows along the sum, in shared memory; run_both: A's rows, too, lie over the sum. TRANSPOSED: so do
 * B's. */
template <typename T, int N, int TRANSPOSED> struct wgmma;
#define WGMMA(type, N)                                                                                                 \
    template <int TRANSPOSED> struct wgmma<type, N, TRANSPOSED> {                                                      \
        template <typename A>                                                                                          \
        static __device__ __forceinline__ void run(float (*c)[4], const A &a, uint64_t b, int add) {                   \
            wgmma_##type##_n##N<TRANSPOSED>(c, a, b, add);                                                             \
        }                                                                                                              \
        static __device__ __forceinline__ void run_both(float (*c)[4], uint64_t a, uint64_t b, int add) {              \
            wgmma_##type##_n##N<TRANSPOSED, 1>(c, a, b, add);                                                          \
        }                                                                                                              \
    };
#define WGMMA_OF(type)                                                                                                 \
    WGMMA(type, 32)                                                                                                    \
    WGMMA(type, 64)                                                                                                    \
    WGMMA(type, 96)                                                                                                    \
    WGMMA(type, 128)                                                                                                   \
    WGMMA(type, 160)                                                                                                   \
    WGMMA(type, 192)                                                                                                   \
    WGMMA(type, 256)
WGMMA_OF(bf16)
WGMMA_OF(f16)
#undef WGMMA_OF
#undef WGMMA

/* Where one stands in a ring of STAGES tiles: a slot, and how often one has been round. A consumer waits for parity `turn`, a
 * producer, for the slot to be empty, for turn ^ 1 (of which the first is over from the start). */
struct ring {
    int slot, turn;
};

template <int STAGES> INLINE void advance(ring *r) {
    if (++r->slot == STAGES) {
        r->slot = 0;
        r->turn ^= 1;
    }
}

/* So many further. */
template <int STAGES> INLINE void skip(ring *r, uint32_t slots) {
    const uint32_t to = (uint32_t)r->slot + slots;
    r->slot = (int)(to % STAGES);
    r->turn ^= (int)(to / STAGES & 1);
}

#endif

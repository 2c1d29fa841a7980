/* SPDX-License-Identifier: Apache-2.0
 * Philox4x32-10, the counter-based generator of Salmon et al., SC11, table 2 and section 3.3, and the dropout rule of
 * heddle.h on top of it. Compiled by C and by nvcc; the tests compare it with Random123. */
#ifndef HEDDLE_PHILOX_H
#define HEDDLE_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define HEDDLE_SHARED_INLINE static inline __host__ __device__
#else
#define HEDDLE_SHARED_INLINE static inline
#endif

typedef struct philox4 {
    uint32_t w[4];
} philox4;

HEDDLE_SHARED_INLINE philox4 heddle_philox4x32(philox4 c, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = UINT64_C(0xD2511F53) * c.w[0], p1 = UINT64_C(0xCD9E8D57) * c.w[2];
        philox4 next = {
            {(uint32_t)(p1 >> 32) ^ c.w[1] ^ key0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c.w[3] ^ key1, (uint32_t)p0}};
        c = next;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

/* The four words that decide elements (i, 4*j4 .. 4*j4+3) of row block `bh` = n*h + x. */
HEDDLE_SHARED_INLINE philox4 dropout_words(uint64_t seed, uint64_t offset, uint32_t bh, uint32_t i, uint32_t j4) {
    philox4 counter = {{j4, i ^ (uint32_t)(offset >> 32), bh, (uint32_t)offset}};
    return heddle_philox4x32(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
}

/* An element is kept when its word is not below this. */
HEDDLE_SHARED_INLINE uint32_t dropout_threshold(double p) {
    return (uint32_t)(p * 4294967296.0);
}

#endif

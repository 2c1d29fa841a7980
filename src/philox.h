/* SPDX-License-Identifier: Apache-2.0
 * Philox4x32-7, the counter-based generator of Salmon et al., SC11, section 3.3; seven rounds pass BigCrush (table 2).
 * And the dropout rule of heddle.h on top of it. Compiled by C and by nvcc; the tests compare it with Random123. */
#ifndef HEDDLE_PHILOX_H
#define HEDDLE_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define HEDDLE_SHARED_INLINE static inline __host__ __device__
#else
#define HEDDLE_SHARED_INLINE static inline
#endif

#define PHILOX_ROUNDS 7
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

typedef struct philox4 {
    uint32_t w[4];
} philox4;

HEDDLE_SHARED_INLINE philox4 philox_round(philox4 c, uint32_t key0, uint32_t key1) {
    uint64_t p0 = (uint64_t)PHILOX_M0 * c.w[0], p1 = (uint64_t)PHILOX_M1 * c.w[2];
    philox4 next = {
        {(uint32_t)(p1 >> 32) ^ c.w[1] ^ key0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c.w[3] ^ key1, (uint32_t)p0}};
    return next;
}

HEDDLE_SHARED_INLINE philox4 heddle_philox4x32(philox4 c, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < PHILOX_ROUNDS; round++)
        c = philox_round(c, key0 + (uint32_t)round * PHILOX_W0, key1 + (uint32_t)round * PHILOX_W1);
    return c;
}

/* The keys that a call decides. */
#define DROPOUT_KEYS 8

/* Of row i of block `bh` = n*h + x and keys 8*j8 .. 8*j8+7. */
HEDDLE_SHARED_INLINE philox4 dropout_counter(uint64_t offset, uint32_t bh, uint32_t i, uint32_t j8) {
    philox4 c = {{j8, bh, i ^ (uint32_t)(offset >> 32), (uint32_t)offset}};
    return c;
}

/* Their numbers: two to a word, the lower half first. */
HEDDLE_SHARED_INLINE philox4 dropout_words(uint64_t seed, uint64_t offset, uint32_t bh, uint32_t i, uint32_t j8) {
    return heddle_philox4x32(dropout_counter(offset, bh, i, j8), (uint32_t)seed, (uint32_t)(seed >> 32));
}

/* Of element j % 8. */
HEDDLE_SHARED_INLINE uint32_t dropout_number(philox4 words, uint32_t j) {
    return words.w[j / 2 % 4] >> j % 2 * 16 & 0xffffu;
}

/* An element is kept when its number is not below this: 0 to 65536. */
HEDDLE_SHARED_INLINE uint32_t dropout_threshold(double p) {
    return (uint32_t)(p * 65536.0 + 0.5);
}

/* One over the probability that it is. */
HEDDLE_SHARED_INLINE double dropout_scale(double p) {
    return 65536.0 / (65536.0 - dropout_threshold(p));
}

#endif

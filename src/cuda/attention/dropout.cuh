/* SPDX-License-Identifier: Apache-2.0
 * Dropout on a GPU: the rule of heddle.h for an element, for eight keys, and for a warp's part of S in accumulators. */
#ifndef HEDDLE_CUDA_ATTENTION_DROPOUT_CUH
#define HEDDLE_CUDA_ATTENTION_DROPOUT_CUH

#include "cuda/attention/params.h"
#include "cuda/element.cuh"

#include "philox.h"

struct dropout_state {
    uint64_t seed, offset;
};

INLINE dropout_state make_dropout(const attention_params &p) {
    dropout_state s = {p.a.seed, p.a.offset};
    if (p.t.rng_state && p.drops) {
        s.seed = p.t.rng_state[0];
        s.offset = p.t.rng_state[1];
    }
    return s;
}

INLINE uint32_t dropout_head(const attention_params &p, int64_t n, int64_t x) {
    return (uint32_t)(p.a.h_offset + n * p.a.whole_h + x);
}

/* Z of element (i, j) of head x: 0 or dropout_scale. */
INLINE float dropout_factor(const attention_params &p, const dropout_state &s, int64_t n, int64_t x, int i, int key) {
    const int64_t j = p.a.k_offset + key; /* part of an eight or not */
    const philox4 w =
        dropout_words(s.seed, s.offset, dropout_head(p, n, x), p.drop_row + (uint32_t)i, (uint32_t)(j / DROPOUT_KEYS));
    const uint32_t word = j & 4 ? (j & 2 ? w.w[3] : w.w[2]) : (j & 2 ? w.w[1] : w.w[0]);
    return (word >> j % 2 * 16 & 0xffffu) >= p.drop_threshold ? p.keep_scale : 0.0f;
}

/* Bits 31 and 15: is the upper, the lower number of a word not below the threshold? Of numbers and threshold without their top bits
 * the difference tells, with that bit lent to each number; their top bits decide where they differ. */
INLINE uint32_t keeps(uint32_t word, uint32_t threshold) {
    const uint32_t both = threshold * 0x10001u, away = ~both, more = (word | 0x80008000u) - (both & 0x7fff7fffu);
    return (word & more) | (away & (word | more));
}

/* Bits 0 to 7: which keys of a call are kept? */
INLINE uint32_t kept_keys(const philox4 &w, uint32_t threshold) {
    uint32_t r = 0;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        const uint32_t k = keeps(w.w[x], threshold);
        r |= (k >> 15 & 1u) << 2 * x | k >> 31 << (2 * x + 1);
    }
    return r;
}

/* ------------------------------------------------------------------------------------------------------ fragments */

/* Which elements of 16 rows and N columns of S a warp keeps, as accumulators lie in its lanes. */
template <int N> struct kept_bits {
    static constexpr int calls = N / 16, words = calls > 4 ? 2 : 1;
    uint32_t bits[words];
};

/* Element e of the y-th eight columns; both known to the compiler. */
template <int N> INLINE bool is_kept(const kept_bits<N> &k, int y, int e) {
    typedef kept_bits<N> bits;
    const int shift = bits::words == 1 && y % 2 ? 4 : 8;
    return k.bits[y % bits::words] >> (e % 2 * 16 + e / 2 * 8 + shift - bits::calls + y / 2) & 1u;
}

template <int N> INLINE kept_bits<N> keep_all(void) {
    kept_bits<N> r;
#pragma unroll
    for (int x = 0; x < kept_bits<N>::words; x++)
        r.bits[x] = 0xffffffffu;
    return r;
}

/* Byte c of lane s of a row's four to byte s of lane c. */
INLINE uint32_t swap_bytes(uint32_t x) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    x = __byte_perm(x, __shfl_xor_sync(0xffffffffu, x, 1), odd ? 0x3715 : 0x6240);
    return __byte_perm(x, __shfl_xor_sync(0xffffffffu, x, 2), upper ? 0x3276 : 0x5410);
}

/* Of a call's words 2x, 2x+1 the bits into bit `at` of the bytes of `bits`, from above: even keys, then odd ones, or in the ORDER of
 * __byte_perm. */
template <uint32_t ORDER>
INLINE uint32_t push_bits(uint32_t bits, uint32_t first, uint32_t second, uint32_t threshold, int at) {
    return bits | (spread_signs(keeps(first, threshold), keeps(second, threshold), ORDER | 0x8888) & 0x01010101u << at);
}

/* The bits of COUNT calls side by side, which share the keys of the rounds: rows i, i + i_step .., eights of keys j8, j8 + j8_step .., into
 * bits `at`, at + 1 .. */
template <int COUNT, uint32_t ORDER = 0x7351>
INLINE void push_calls(const attention_params &p, const dropout_state &s, uint32_t bh, uint32_t i, uint32_t i_step,
                       uint32_t j8, uint32_t j8_step, int at, uint32_t *low, uint32_t *high) {
    const uint32_t seed[2] = {(uint32_t)s.seed, (uint32_t)(s.seed >> 32)};
    philox4 w[COUNT];
#pragma unroll
    for (int x = 0; x < COUNT; x++)
        w[x] = dropout_counter(s.offset, bh, i + x * i_step, j8 + x * j8_step);
#pragma unroll
    for (int round = 0; round < PHILOX_ROUNDS; round++)
#pragma unroll
        for (int x = 0; x < COUNT; x++)
            w[x] = philox_round(w[x], seed[0] + round * PHILOX_W0, seed[1] + round * PHILOX_W1);
#pragma unroll
    for (int x = 0; x < COUNT; x++) {
        *low = push_bits<ORDER>(*low, w[x].w[0], w[x].w[1], p.drop_threshold, at + x);
        *high = push_bits<ORDER>(*high, w[x].w[2], w[x].w[3], p.drop_threshold, at + x);
    }
}

/* The row of its own for which a lane makes calls, where rows are queries. */
INLINE int duty_row(void) {
    return (int)(threadIdx.x % 2 * 8 + threadIdx.x % 32 / 4);
}

/* A call's eight keys lie in the four lanes of a row, two in each: each lane makes the calls of every fourth eight keys of a row, and
 * gives the bits to whom they belong. BATCH of them at a time.
 * KEYS false: bh, row: of query duty_row(); column: the first key, a multiple of 8.
 * KEYS true: rows are keys. It makes the bits as if they were not, and turns them. row: the warp's first key, a multiple of 8; column:
 * the first query. */
template <bool KEYS, int N, int BATCH = 4>
INLINE kept_bits<N> find_kept(const attention_params &p, const dropout_state &s, uint32_t bh, int row, int column) {
    typedef kept_bits<N> kept;
    constexpr int COUNT = kept::calls < BATCH ? kept::calls : BATCH;
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    const uint32_t step = KEYS ? 0 : 2, i_step = KEYS ? 16 : 0;
    const uint32_t j8 = p.drop_eight + (KEYS ? (uint32_t)row / 8 + quarter % 2 : (uint32_t)column / 8 + quarter / 2);
    const uint32_t i = p.drop_row + (uint32_t)(KEYS ? column + quarter / 2 * 8 + lane / 4 : row);
    uint32_t low = 0, high = 0;
    kept r;
#pragma unroll
    for (int first = 0; first < kept::calls; first += COUNT)
        push_calls<COUNT>(p, s, bh, i + first * i_step, i_step, j8 + first * step, step, 8 - kept::calls + first, &low,
                          &high);
    const uint32_t even = swap_bytes(__byte_perm(low, high, 0x5410)), odd = swap_bytes(__byte_perm(low, high, 0x7632));
    r.bits[0] = __byte_perm(even, odd, 0x5410);
    if (kept::words == 1)
        r.bits[0] |= __byte_perm(even, odd, 0x7632) >> 4;
    else
        r.bits[kept::words - 1] = __byte_perm(even, odd, 0x7632);
#pragma unroll
    for (int x = 0; KEYS && x < kept::words; x++)
        r.bits[x] = transpose8x8(r.bits[x]);
    return r;
}

/* What is dropped becomes 0, the rest grows. COUNT eights of columns from the y0-th on. */
template <int N, int COUNT = N / 8>
INLINE void drop_elements(const kept_bits<N> &k, float by, float (*s)[4], int y0 = 0) {
#pragma unroll
    for (int y = 0; y < COUNT; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = is_kept(k, y0 + y, e) ? s[y][e] * by : 0.0f;
}

#endif

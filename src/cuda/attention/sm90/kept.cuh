/* SPDX-License-Identifier: Apache-2.0
 * Dropout for Hopper where it is the only option: warps that have nothing else to do make the bits of a tile ahead, while those that
 * compute wait for the tensor cores, and leave them in shared memory. */
#ifndef HEDDLE_CUDA_ATTENTION_SM90_KEPT_CUH
#define HEDDLE_CUDA_ATTENTION_SM90_KEPT_CUH

#include "cuda/attention/sm90/options.cuh"

/* Warps that make them: in forward a warpgroup, in backward those beside the one that fetches. */
#define FORWARD_KEPT_WARPS 4
#define KEPT_WARPS 3

/* Of 64 keys and a query, eights of keys one after the other: byte x of both words: the x-th key of each eight, a bit for each.
 * BATCH calls at a time. */
template <int BATCH>
INLINE uint2 make_kept(const attention_params &p, const dropout_state &s, uint32_t head, int query, int key) {
    uint32_t low = 0, high = 0;
#pragma unroll
    for (int first = 0; first < 8; first += BATCH)
        push_calls<BATCH, 0x7531>(p, s, head, p.drop_row + (uint32_t)query, 0,
                                  p.drop_eight + (uint32_t)key / DROPOUT_KEYS + first, 1, first, &low, &high);
    return make_uint2(low, high);
}

/* -------------------------------------------------------------------------------------------------- rows are queries */

/* The bits of ROWS queries and BLOCK keys: eight bytes for each query, 64 keys after the other. */
template <int ROWS, int BLOCK> struct kept_rows { static constexpr int bytes = ROWS * BLOCK / 8; };

/* By so many warps, which take units of 32 queries and 64 keys in turn, from tile to tile. *unit: the next of this warp's, counted from this
 * tile's first. What all lanes share the compiler has to see to be the same: a round and a half and the keys of all are then made once. */
template <int ROWS, int BLOCK>
INLINE void put_kept_rows(const attention_params &p, const dropout_state &s, uint32_t head, int query, int key,
                          char *to, int *unit) {
    constexpr int UNITS = ROWS / 32 * (BLOCK / 64);
    const int lane = threadIdx.x % 32;
    key = __shfl_sync(ALL_LANES, key, 0);
    head = __shfl_sync(ALL_LANES, head, 0);
    int which = __shfl_sync(ALL_LANES, *unit, 0);
#pragma unroll 1
    for (; which < UNITS; which += FORWARD_KEPT_WARPS) {
        const int row = which % (ROWS / 32) * 32 + lane, part = which / (ROWS / 32);
        *(uint2 *)(to + (part * ROWS + row) * 8) = make_kept<4>(p, s, head, query + row, key + part * 64);
    }
    *unit = which - UNITS;
}

/* Of this lane's two rows: byte 2x + e: of columns e of the eights 8x ..., a bit for each. */
struct kept_pair {
    uint32_t bits[2];
};

template <int ROWS, int BLOCK> INLINE kept_pair take_kept_rows(const char *from, int row) {
    static_assert(BLOCK == 64 || BLOCK == 128, "a half of a word or two");
    kept_pair r;
    from += (row + fragment_row()) * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        r.bits[half] = *(const uint16_t *)(from + half * 64);
        if (BLOCK > 64)
            r.bits[half] |= (uint32_t) * (const uint16_t *)(from + half * 64 + ROWS * 8) << 16;
    }
    return r;
}

/* What is dropped becomes 0. A byte at a time, which ptxas turns into predicates at once. */
template <int N> INLINE void drop_rows(const kept_pair &k, float (*s)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int x = 0; x < N / 8; x += 8)
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int y = 0; y < 8; y++)
                    if (!(k.bits[half] & 1u << (x * 2 + e * 8 + y)))
                        s[x + y][2 * half + e] = 0.0f;
}

/* ----------------------------------------------------------------------------------------------------- rows are keys */

/* Of BLOCK queries and OWN keys, as lanes want them: 64 keys, the key of an eight, the quarter of a row of lanes; then a byte for each query
 * that this lane has, in which a bit for each eight. */
template <int BLOCK, int OWN> struct kept_columns { static constexpr int bytes = OWN * BLOCK / 8; };

/* By KEPT_WARPS warps, as put_kept_rows; BATCH calls at a time. */
template <int BLOCK, int OWN, int BATCH>
INLINE void put_kept_columns(const attention_params &p, const dropout_state &s, uint32_t head, int query, int key,
                             char *to, int *unit) {
    constexpr int ACROSS = OWN / 64, UNITS = BLOCK / 32 * ACROSS;
    const int lane = threadIdx.x % 32;
    key = __shfl_sync(ALL_LANES, key, 0);
    head = __shfl_sync(ALL_LANES, head, 0);
    int which = __shfl_sync(ALL_LANES, *unit, 0);
#pragma unroll 1
    for (; which < UNITS; which += KEPT_WARPS) {
        const int row = which / ACROSS * 32 + lane, group = which % ACROSS;
        /* opaque: what is made of it alone would be kept from step to step, in memory */
        const uint2 kept = make_kept<BATCH>(p, s, head, query + row, (int)opaque((uint32_t)(key + group * 64)));
        char *at = to + group * 8 * BLOCK + row % 8 / 2 * (BLOCK / 4) + row / 8 * 2 + row % 2;
#pragma unroll
        for (int x = 0; x < 8; x++)
            at[x * BLOCK] = (char)((x < 4 ? kept.x : kept.y) >> x % 4 * 8);
    }
    *unit = which - UNITS;
}

/* Of this lane's keys and its queries among the 16 from column x on: bits 2y and 2y + 1 of query y. A byte for each query has them at the same
 * place, which one product brings together. */
template <int BLOCK> INLINE uint32_t take_kept_columns(const char *from, int group, int x) {
    const int lane = threadIdx.x % 32;
    const uint32_t bytes =
        *(const uint32_t *)(from + (group * 8 + lane / 4) * BLOCK + lane % 4 * (BLOCK / 4) + x / 4) >>
        threadIdx.x % WARPGROUP / 32 * 2;
    return (bytes & 0x03030303u) * (1u << 24 | 1u << 18 | 1u << 12 | 1u << 6) >> 24;
}

/* Was an element of 16 queries kept? y and e are known to the compiler, and ptxas makes predicates of the byte at once. */
INLINE bool was_kept(uint32_t kept, int y, int e) {
    return kept & 1u << (2 * (2 * y + e % 2) + e / 2);
}

#endif

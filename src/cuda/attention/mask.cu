/* SPDX-License-Identifier: Apache-2.0
 * A boolean mask -> what kernels read of it: of each tile whether it is empty, full or cut, and a bit for each element. At the speed of
 * memory, once a pass; a mask that is repeated over heads, batches or queries is read once. */
#include "cuda/attention/common.cuh"

#define MASK_THREADS 256
#define MOST_ROWS 192 /* of queries in a tile */
#define MOST_READS 6  /* of 16 keys, of a thread */

/* Bit e: byte e of 16 is not 0. */
INLINE uint32_t bits_of(uint4 x) {
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
    uint32_t bits = 0;
#pragma unroll
    for (int z = 0; z < 4; z++)
        bits |= (((__vcmpne4(w[z], 0) & 0x01010101u) * 0x01020408u) >> 24 & 0xf) << 4 * z;
    return bits;
}

/* 16 keys, of which `count` are there; of what is not there zeros. */
INLINE uint4 read_keys(const uint8_t *from, int count, bool aligned) {
    if (count <= 0)
        return make_uint4(0, 0, 0, 0);
    if (aligned && count >= 16)
        return *(const uint4 *)from;
    uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < 16; e++)
        w[e / 4] |= e < count ? (uint32_t)(from[e] != 0) << e % 4 * 8 : 0;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* The word of 32 queries of this lane's key, from those of 32 keys of this lane's query. */
INLINE uint32_t transpose_bits(uint32_t of_query) {
    uint32_t of_key = 0;
#pragma unroll
    for (int key = 0; key < 32; key++) {
        const uint32_t all = __ballot_sync(ALL_LANES, of_query >> key & 1);
        of_key = (int)threadIdx.x % 32 == key ? all : of_key;
    }
    return of_key;
}

/* One tile. KEYS: its rows are keys. */
template <bool KEYS> INLINE void map_tile(const attention_params &p, const mask_map &m, unsigned id) {
    __shared__ uint32_t words[MOST_ROWS][4]; /* of a query, bits of up to 128 keys */
    const unsigned across = id % (unsigned)m.tiles_across,
                   down = id / (unsigned)m.tiles_across % (unsigned)m.tiles_down;
    const unsigned map = id / (unsigned)(m.tiles_across * m.tiles_down), heads = m.of_h ? (unsigned)p.a.h : 1;
    const int i0 = (int)(KEYS ? across : down) * (KEYS ? m.columns : m.rows);
    const int j0 = (int)(KEYS ? down : across) * (KEYS ? m.rows : m.columns);
    const bool alike = p.a.bool_mask_stride.s == 0;                                  /* all queries */
    const int shift = (KEYS ? m.rows : m.columns) > 64 ? 3 : 2, chunks = 1 << shift; /* of 16 keys: 64 or 128 */
    const int rows = alike ? 1 : KEYS ? m.columns : m.rows;
    const int there = alike ? 1 : min(rows, (int)p.a.sq - i0), keys = (int)p.a.sk - j0;
    const uint8_t *from = p.t.bool_mask + row_at(p.a.bool_mask_stride, map / heads, map % heads, i0) + j0;
    const bool aligned = ((size_t)from | (size_t)p.a.bool_mask_stride.s) % 16 == 0;
    bool any = false, all = true;
    const auto note = [&](int x, uint4 keys_of) {
        const int row = x >> shift, chunk = x & (chunks - 1), count = row < there ? keys - chunk * 16 : 0;
        const uint32_t bits = bits_of(keys_of);
        any |= bits != 0;
        all &= (bits | (count >= 16 ? 0 : count <= 0 ? 0xffffu : 0xffffu << count)) % 65536 == 0xffff;
        ((uint16_t *)words[row])[chunk] = (uint16_t)bits;
    };
    if (aligned && keys >= chunks * 16 && rows * chunks >= MASK_THREADS) {
        uint4 keys_of[MOST_READS]; /* all are asked for before one is waited for */
#pragma unroll
        for (int z = 0; z < MOST_READS; z++) {
            const int row = (int)threadIdx.x + z * MASK_THREADS >> shift, chunk = (int)threadIdx.x & (chunks - 1);
            keys_of[z] = row < there ? *(const uint4 *)(from + row * p.a.bool_mask_stride.s + chunk * 16)
                                     : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int z = 0; z < MOST_READS; z++)
            if (z * MASK_THREADS < rows * chunks)
                note((int)threadIdx.x + z * MASK_THREADS, keys_of[z]);
    } else {
        for (int x = threadIdx.x; x < rows * chunks; x += MASK_THREADS) {
            const int row = x >> shift, chunk = x & (chunks - 1);
            note(x, read_keys(from + row * p.a.bool_mask_stride.s + chunk * 16, row < there ? keys - chunk * 16 : 0,
                              aligned));
        }
    }
    any = __syncthreads_or(any);
    all = __syncthreads_and(all);
    if (threadIdx.x == 0)
        m.kinds[id] = (uint8_t)(all ? TILE_FULL : any ? TILE_PARTIAL : TILE_EMPTY);
    if (all)
        return;
    uint32_t *const to = m.bits + (int64_t)map * m.lines * m.words;
    if (!KEYS) {
        for (int x = threadIdx.x; x < there * chunks / 2; x += MASK_THREADS) {
            const int row = x >> (shift - 1), word = x & (chunks / 2 - 1);
            to[(int64_t)(i0 + row) * m.line_step + j0 / 32 + word] = words[row][word];
        }
        return;
    }
    const int lane = threadIdx.x % 32, across_words = alike ? 4 : rows / 32;
    for (int x = (int)threadIdx.x / 32; x < chunks / 2 * across_words; x += MASK_THREADS / 32) {
        const int key_word = x / across_words, word = x % across_words, key = j0 + key_word * 32 + lane;
        const uint32_t bits = alike ? (words[0][key_word] >> lane & 1 ? ALL_LANES : 0)
                                    : transpose_bits(words[word * 32 + lane][key_word]);
        if (key < p.a.sk)
            to[(int64_t)key * m.line_step + (alike ? word : i0 / 32 + word)] = bits;
    }
}

INLINE unsigned tiles_of(const attention_params &p, const mask_map &m) {
    const unsigned maps = (unsigned)((p.a.bool_mask_stride.b ? p.a.b : 1) * (p.a.bool_mask_stride.h ? p.a.h : 1));
    return m.kinds ? maps * (unsigned)(m.tiles_down * m.tiles_across) : 0;
}

/* A block has a tile of one of the maps. */
INLINE void attention_mask(const attention_params &p) {
    const unsigned tiles = tiles_of(p, p.seen_by_queries);
    if (p.seen_by_queries.taken && blockIdx.x == 0 && threadIdx.x == 0)
        *p.seen_by_queries.taken = 0;
    if (blockIdx.x < tiles)
        map_tile<false>(p, p.seen_by_queries, blockIdx.x);
    else
        map_tile<true>(p, p.seen_of_keys, blockIdx.x - tiles);
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        wait_for_earlier_grid();                                                                                       \
        let_next_grid_start();                                                                                         \
        attention_mask(p);                                                                                             \
    }

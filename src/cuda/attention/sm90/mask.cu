/* SPDX-License-Identifier: Apache-2.0
 * A boolean mask -> what the kernels for Hopper read of it: of each tile whether it is empty, full or cut, and a bit for each element.
 * At the speed of memory, once a pass; a mask that is repeated over heads, batches or queries is read once. */
#include "cuda/attention/sm90/sm90.cuh"

#define MASK_THREADS 256
#define MOST_ROWS 192 /* of queries in a tile */

/* Bit e: byte e of 16 is not 0. */
INLINE uint32_t bits_of(uint4 x) {
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
    uint32_t bits = 0;
#pragma unroll
    for (int z = 0; z < 4; z++)
        bits |= (((__vcmpne4(w[z], 0) & 0x01010101u) * 0x01020408u) >> 24 & 0xf) << 4 * z;
    return bits;
}

/* Of 16 keys from j on, of which `count` are there. */
INLINE uint32_t read_bits(const uint8_t *from, int count, bool aligned) {
    if (aligned && count >= 16)
        return bits_of(*(const uint4 *)from);
    uint32_t bits = 0;
    for (int e = 0; e < min(count, 16); e++)
        bits |= (uint32_t)(from[e] != 0) << e;
    return bits;
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
    const bool alike = p.a.bool_mask_stride.s == 0; /* all queries */
    const int chunks = (KEYS ? m.rows : m.columns) / 16, rows = alike ? 1 : KEYS ? m.columns : m.rows;
    const int there = alike ? 1 : min(rows, (int)p.a.sq - i0), keys = (int)p.a.sk - j0;
    const uint8_t *from = p.t.bool_mask + row_at(p.a.bool_mask_stride, map / heads, map % heads, i0) + j0;
    const bool aligned = ((size_t)from | (size_t)p.a.bool_mask_stride.s) % 16 == 0;
    bool any = false, all = true;
    for (int x = threadIdx.x; x < rows * chunks; x += MASK_THREADS) {
        const int row = x / chunks, chunk = x % chunks, count = row < there ? keys - chunk * 16 : 0;
        const uint32_t bits = read_bits(from + row * p.a.bool_mask_stride.s + chunk * 16, count, aligned);
        any |= bits != 0;
        all &= (bits | (count >= 16 ? 0 : count <= 0 ? 0xffffu : 0xffffu << count)) % 65536 == 0xffff;
        ((uint16_t *)words[row])[chunk] = (uint16_t)bits;
    }
    any = __syncthreads_or(any);
    all = __syncthreads_and(all);
    if (threadIdx.x == 0)
        m.kinds[id] = (uint8_t)(all ? TILE_FULL : any ? TILE_PARTIAL : TILE_EMPTY);
    if (all)
        return;
    uint32_t *const to = m.bits + (int64_t)map * m.lines * m.words;
    if (!KEYS) {
        for (int x = threadIdx.x; x < there * chunks / 2; x += MASK_THREADS)
            to[(int64_t)(i0 + x / (chunks / 2)) * m.line_step + j0 / 32 + x % (chunks / 2)] =
                words[x / (chunks / 2)][x % (chunks / 2)];
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
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        wait_for_earlier_grid();                                                                                       \
        attention_mask(all.p);                                                                                         \
    }

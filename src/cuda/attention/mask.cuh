/* SPDX-License-Identifier: Apache-2.0
 * What kernels read of a boolean mask's map (mask.cu). */
#ifndef HEDDLE_CUDA_ATTENTION_MASK_CUH
#define HEDDLE_CUDA_ATTENTION_MASK_CUH

#include "cuda/attention/common.cuh"

INLINE int64_t map_of(const mask_map &m, int64_t n, int64_t x) {
    return n * m.of_b + x * m.of_h;
}

/* The kinds of the tiles of a row of tiles; NULL: there is no mask. */
INLINE const uint8_t *find_kinds(const mask_map &m, int64_t n, int64_t x, int tile) {
    return m.kinds ? m.kinds + (map_of(m, n, x) * m.tiles_down + (m.tiles_down > 1 ? tile : 0)) * m.tiles_across : NULL;
}

INLINE const uint32_t *find_bits(const mask_map &m, int64_t n, int64_t x) {
    return m.bits + map_of(m, n, x) * m.lines * m.words;
}

/* Bits of N columns. */
template <int N> INLINE void load_bits(const uint32_t *from, uint32_t *bits) {
    if (N == 128) {
        const uint4 x = *(const uint4 *)from;
        bits[0] = x.x;
        bits[1] = x.y;
        bits[2 % (N / 32)] = x.z;
        bits[3 % (N / 32)] = x.w;
    } else {
        const uint2 x = *(const uint2 *)from;
        bits[0] = x.x;
        bits[1] = x.y;
    }
}

/* ------------------------------------------------------------------------------------------------ tiles of MASK_TILE */

/* Are the boolean mask's own bytes read, as there is no map? */
INLINE bool reads_bytes(const attention_params &p, const mask_map &m) {
    return (p.a.features & HEDDLE_BOOL_MASK) && !m.kinds;
}

/* Does more than the band and the map decide whether a key is seen, or whether its weight is left out? */
INLINE bool hides_elements(const attention_params &p, const mask_map &m) {
    return (p.a.features & HEDDLE_BIAS) || p.drops || reads_bytes(p, m);
}

/* The first column from `at` on that these kinds do not empty, which `at` or a tile of theirs begins with; at least `end`: none. */
INLINE int seek_column(const uint8_t *kinds, int at, int end) {
    while (kinds && at < end && kinds[at / MASK_TILE] == TILE_EMPTY)
        at = at / MASK_TILE * MASK_TILE + MASK_TILE;
    return at;
}

/* Of a row whose bits begin at `from`, N columns (16, 32, 64) from column `at` on, a multiple of N: this lane's two in each eight at bits 4·y. */
template <int N> INLINE uint32_t read_shown(const uint32_t *from, int at) {
    const int column = threadIdx.x % 4 * 2;
    uint32_t low, high = 0;
    if (N == 64) {
        const uint2 both = *(const uint2 *)from;
        low = both.x >> column & 0x03030303u;
        high = both.y >> column & 0x03030303u;
    } else {
        low = *from >> (at % 32 + column) & 0x03030303u;
    }
    return __byte_perm(low | low >> 4, high | high >> 4, 0x6420);
}

/* What the map shows of the lane's two rows, the second of which is 8 below the first, and N columns: as make_scores takes it. last: the
 * last row that there is. bits: find_bits. */
template <int N> INLINE uint32_t find_shown(const mask_map &m, const uint32_t *bits, int row, int last, int at) {
    const uint32_t *const from = bits + at / 32 * m.word_step;
    return read_shown<N>(from + (int64_t)min(row, last) * m.line_step, at) |
           read_shown<N>(from + (int64_t)min(row + 8, last) * m.line_step, at) << 2;
}

/* Do rows row0 .. row1-1 of head x each see more than FEW_KEYS keys, by tiles that map and band show whole? By a warp, to which it is worth as
 * much as looking at an element or two. */
INLINE bool map_shows_many(const attention_params &p, const place &c, int64_t x, int row0, int row1) {
    if (!p.seen_by_queries.kinds || (p.a.features & HEDDLE_BIAS))
        return false;
    for (int i0 = row0; i0 < row1; i0 = (i0 / MASK_TILE + 1) * MASK_TILE) {
        const uint8_t *const kinds = find_kinds(p.seen_by_queries, c.n, x, i0 / MASK_TILE);
        const int first = min((i0 / MASK_TILE + 1) * MASK_TILE, row1) - 1 + c.lo, last = min(i0 + c.hi, c.sk - 1);
        int count = 0;
        for (int t = 0; t * MASK_TILE < c.sk && count * MASK_TILE <= FEW_KEYS; t += 32) {
            const int j = (t + (int)threadIdx.x % 32) * MASK_TILE;
            const bool whole = j >= first && j + MASK_TILE - 1 <= last;
            count += __popc(__ballot_sync(ALL_LANES, whole && kinds[whole ? j / MASK_TILE : 0] == TILE_FULL));
        }
        if (count * MASK_TILE <= FEW_KEYS)
            return false;
    }
    return true;
}

#endif

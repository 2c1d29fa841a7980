/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_SEGMENTS and HEDDLE_BLOCKS, with the boolean mask that is there beside them -> what kernels read of a boolean mask: its map
 * (mask.cuh), or its bytes. A warp has a tile. The least and the most of its ids, and what its lists name, tell what it is where ids lie
 * in a row; elsewhere it is asked element by element. Where keys have been collected from pages, those hide that are in none. */
#include "cuda/attention/mask.cuh"
#include "cuda/attention/seen.h"

/* Lines are queries, or keys; or queries of a mask in bytes. */
enum { TO_QUERIES, TO_KEYS, TO_BYTES };

/* A tile of what map `map` says of batch n and head x. */
struct seen_tile {
    int64_t map, n, x;
    int line0, column0, i0, j0;
    int there;                         /* lines that the tensor has */
    int lines, columns, queries, keys; /* that count */
    int bits_q, bits_k;                /* log2 of the rows of a block */
    int block_q, block_k;              /* the first that it meets */
    uint32_t names;                    /* bit 8r + y: the list of its r-th block of queries names its y-th of keys */
    uint32_t pages;                    /* bit r: its r-th PAGE_ROWS keys are in a page */
};

template <int TO> INLINE seen_tile find_tile(const attention_params &p, const mask_map &m, sequence *s, unsigned id) {
    const unsigned across = id % (unsigned)m.tiles_across,
                   down = id / (unsigned)m.tiles_across % (unsigned)m.tiles_down;
    const unsigned heads = m.of_h ? (unsigned)p.a.h : 1;
    const bool keys = TO == TO_KEYS;
    seen_tile t;
    t.map = id / (unsigned)(m.tiles_across * m.tiles_down);
    t.n = t.map / heads;
    t.x = t.map % heads;
    *s = {0, p.a.sq, 0, p.a.sk};
    if (m.of_b || p.a.b == 1)
        *s = sequence_of(&p.a, p.t.cu_seqlens_q, p.t.cu_seqlens_k, p.t.seqlens_q, p.t.seqlens_k, t.n);
    t.line0 = (int)down * m.rows;
    t.column0 = (int)across * m.columns;
    t.i0 = keys ? t.column0 : t.line0;
    t.j0 = keys ? t.line0 : t.column0;
    t.there = min(m.rows, m.lines - t.line0);
    t.lines = (int)clamp64((keys ? s->sk : s->sq) - t.line0, 0, m.rows);
    t.columns = (int)clamp64((keys ? s->sq : s->sk) - t.column0, 0, m.columns);
    t.queries = keys ? t.columns : t.lines;
    t.keys = keys ? t.lines : t.columns;
    t.bits_q = p.a.block_q > 64 ? 7 : 6;
    t.bits_k = p.a.block_k > 64 ? 7 : 6;
    t.block_q = t.i0 >> t.bits_q;
    t.block_k = t.j0 >> t.bits_k;
    t.names = ALL_LANES;
    return t;
}

/* How many blocks of queries, or of keys, it meets: up to four. */
INLINE int count_q(const seen_tile &t) {
    return (t.i0 + t.queries - 1 >> t.bits_q) - t.block_q + 1;
}
INLINE int count_k(const seen_tile &t) {
    return (t.j0 + t.keys - 1 >> t.bits_k) - t.block_k + 1;
}

INLINE uint32_t find_names(const attention_params &p, const seen_tile &t) {
    uint32_t names = 0;
    for (int r = 0; r < count_q(t); r++) {
        const range list = blocks_of(&p.a, p.from.block_rows, p.from.block_columns, t.n, t.x, t.block_q + r);
        for (int64_t y = list.begin + threadIdx.x % 32; y < list.end; y += 32) {
            const int64_t at = (int64_t)p.from.block_columns[y] - t.block_k;
            names |= at >= 0 && at < count_k(t) ? 1u << (8 * r + at) : 0;
        }
    }
    for (int step = 16; step; step >>= 1)
        names |= __shfl_xor_sync(ALL_LANES, names, step);
    return names;
}

INLINE bool is_named(const seen_tile &t, int i, int j) {
    return t.names >> (8 * ((i >> t.bits_q) - t.block_q) + ((j >> t.bits_k) - t.block_k)) & 1;
}

/* Of its groups of PAGE_ROWS keys that count, a bit each: all; those that are in a page. */
INLINE uint32_t all_pages(const seen_tile &t) {
    return (1u << (t.keys + PAGE_ROWS - 1) / PAGE_ROWS) - 1;
}
INLINE uint32_t find_pages(const attention_params &p, const seen_tile &t) {
    if (!p.t.block_table || p.page_bits) /* kernels look there themselves */
        return all_pages(t);
    const int group = (int)threadIdx.x % 32, j = t.j0 + group * PAGE_ROWS;
    const bool there = group * PAGE_ROWS < t.keys && page_of(&p.a, p.t.block_table, t.n, j) >= 0;
    return __ballot_sync(ALL_LANES, there);
}
INLINE bool is_in_page(const seen_tile &t, int j) {
    return t.pages >> (j - t.j0) / PAGE_ROWS & 1;
}

/* What the names alone say. */
INLINE tile_kind kind_of_names(const seen_tile &t) {
    const uint32_t of_list = (1u << count_k(t)) - 1;
    uint32_t all = 0;
    for (int r = 0; r < count_q(t); r++)
        all |= of_list << 8 * r;
    return !(t.names & all) ? TILE_EMPTY : (t.names & all) == all ? TILE_FULL : TILE_PARTIAL;
}

/* And what the least and the most of the ids do; NULL: there are none. */
INLINE tile_kind kind_of_ids(const int32_t *lines, const int32_t *columns, const seen_tile &t) {
    if (!lines)
        return TILE_FULL;
    int32_t least[2] = {INT32_MAX, INT32_MAX}, most[2] = {INT32_MIN, INT32_MIN};
    for (int of = 0; of < 2; of++) {
        for (int at = (int)threadIdx.x % 32; at < (of ? t.columns : t.lines); at += 32) {
            const int32_t id = of ? columns[t.column0 + at] : lines[t.line0 + at];
            least[of] = min(least[of], id);
            most[of] = max(most[of], id);
        }
        least[of] = __reduce_min_sync(ALL_LANES, least[of]);
        most[of] = __reduce_max_sync(ALL_LANES, most[of]);
    }
    if (most[0] < least[1] || most[1] < least[0])
        return TILE_EMPTY;
    return least[0] == most[1] && most[0] == least[1] ? TILE_FULL : TILE_PARTIAL;
}

/* A line's bits of a tile. */
INLINE void put_words(const mask_map &m, const seen_tile &t, int line, const uint32_t *words) {
    uint32_t *const to = m.bits + (t.map * m.lines + t.line0 + line) * m.words + t.column0 / 32;
    if (m.columns > 64)
        *(uint4 *)to = make_uint4(words[0], words[1], words[2], words[3]);
    else
        *(uint2 *)to = make_uint2(words[0], words[1]);
}

/* Bits where names alone say what is seen: a line a lane. (All of an empty tile: where all of a row's are, kernels work on one of them.) */
template <int TO> INLINE void write_names(const mask_map &m, const seen_tile &t, bool empty) {
    for (int line = (int)threadIdx.x % 32; line < t.there; line += 32) {
        uint32_t words[4];
        for (int z = 0; z < 4; z++) { /* none of which lies in two blocks */
            const int i = t.i0 + (TO == TO_KEYS ? z * 32 : line), j = t.j0 + (TO == TO_KEYS ? line : z * 32);
            words[z] = !empty && line < t.lines && z * 32 < t.columns && is_named(t, i, j) ? ALL_LANES : 0;
        }
        put_words(m, t, line, words);
    }
}

/* All elements, asked one by one unless `known` says what all are; the rest of the tensor's lines is not seen. What are those that count? */
template <int TO>
INLINE tile_kind write_tile(const attention_params &p, const mask_map &m, const seen_tile &t, tile_kind known,
                            const int32_t *lines, const int32_t *columns) {
    const int lane = (int)threadIdx.x % 32;
    bool counts[4], any = false, all = true;
    int32_t ids[4];
    uint32_t within[4];
#pragma unroll
    for (int z = 0; z < 4; z++) {
        const int column = TO == TO_BYTES ? lane * 4 + z : z * 32 + lane;
        counts[z] = column < t.columns;
        ids[z] = lines && counts[z] ? columns[t.column0 + column] : 0;
        within[z] = __ballot_sync(ALL_LANES, counts[z]);
    }
    for (int line = 0; line < t.there; line++) {
        const int32_t id = lines && line < t.lines ? lines[t.line0 + line] : 0;
        uint32_t words[4];
#pragma unroll
        for (int z = 0; z < 4; z++) {
            const int column = TO == TO_BYTES ? lane * 4 + z : z * 32 + lane;
            const int i = t.i0 + (TO == TO_KEYS ? column : line), j = t.j0 + (TO == TO_KEYS ? line : column);
            bool seen = known != TILE_EMPTY && line < t.lines && counts[z];
            if (seen && known == TILE_PARTIAL)
                seen = ids[z] == id && is_named(t, i, j) && is_in_page(t, j) &&
                       (!p.from.bool_mask || p.from.bool_mask[row_at(p.from.bool_mask_stride, t.n, t.x, i) + j]);
            words[z] = TO == TO_BYTES ? seen : __ballot_sync(ALL_LANES, seen);
            any |= words[z] != 0;
            all &= line >= t.lines || words[z] == within[z];
        }
        if (TO != TO_BYTES) {
            if (lane == 0)
                put_words(m, t, line, words);
        } else if (t.column0 + lane * 4 < m.line_step) {
            *(uint32_t *)(p.from.bytes + (t.map * m.lines + t.line0 + line) * m.line_step + t.column0 + lane * 4) =
                words[0] | words[1] << 8 | words[2] << 16 | words[3] << 24;
        }
    }
    return !any ? TILE_EMPTY : all ? TILE_FULL : TILE_PARTIAL;
}

template <int TO> INLINE void make_tile(const attention_params &p, const mask_map &m, unsigned id) {
    sequence s;
    seen_tile t = find_tile<TO>(p, m, &s, id);
    const int32_t *of_queries = query_segments(&p.a, p.from.q_segments, s, t.n),
                  *of_keys = key_segments(&p.a, p.from.k_segments, s, t.n);
    const int32_t *lines = TO == TO_KEYS ? of_keys : of_queries, *columns = TO == TO_KEYS ? of_queries : of_keys;
    tile_kind kind = TILE_EMPTY, names = TILE_FULL;
    if (t.queries && t.keys) {
        kind = kind_of_ids(lines, columns, t);
        if (p.from.block_rows && kind != TILE_EMPTY) {
            t.names = find_names(p, t);
            names = kind_of_names(t);
        }
    }
    t.pages = find_pages(p, t);
    if (names == TILE_EMPTY || !t.pages)
        kind = TILE_EMPTY;
    const bool asks = p.from.bool_mask || t.pages != all_pages(t), by_names = kind == TILE_FULL && !asks;
    if (kind == TILE_FULL && (names == TILE_PARTIAL || asks))
        kind = TILE_PARTIAL;
    if (TO == TO_BYTES)
        write_tile<TO>(p, m, t, kind, lines, columns);
    else if (kind == TILE_EMPTY || (kind == TILE_PARTIAL && by_names))
        write_names<TO>(m, t, kind == TILE_EMPTY);
    else if (kind == TILE_PARTIAL)
        kind = write_tile<TO>(p, m, t, kind, lines, columns);
    if (TO != TO_BYTES && threadIdx.x % 32 == 0)
        m.kinds[id] = (uint8_t)kind;
}

/* A warp has a tile of one of the maps, or of the bytes. */
INLINE void attention_seen(const attention_params &p) {
    const mask_map &q = p.seen_by_queries, &k = p.seen_of_keys, &bytes = p.from.shape;
    const unsigned maps = (unsigned)p.from.maps, id = blockIdx.x * SEEN_WARPS + threadIdx.x / 32;
    const unsigned tiles_q = q.kinds ? maps * (unsigned)(q.tiles_down * q.tiles_across) : 0;
    const unsigned tiles_k = k.kinds ? maps * (unsigned)(k.tiles_down * k.tiles_across) : 0;
    const unsigned tiles_bytes = p.from.bytes ? maps * (unsigned)(bytes.tiles_down * bytes.tiles_across) : 0;
    if (q.taken && blockIdx.x == 0 && threadIdx.x == 0)
        *q.taken = 0;
    if (id < tiles_q)
        make_tile<TO_QUERIES>(p, q, id);
    else if (id < tiles_q + tiles_k)
        make_tile<TO_KEYS>(p, k, id - tiles_q);
    else if (id < tiles_q + tiles_k + tiles_bytes)
        make_tile<TO_BYTES>(p, bytes, id - tiles_q - tiles_k);
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(warps == SEEN_WARPS && own == SEEN_QUERIES && block == SEEN_KEYS, "as the host counts");             \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        wait_for_earlier_grid();                                                                                       \
        let_next_grid_start();                                                                                         \
        attention_seen(p);                                                                                             \
    }

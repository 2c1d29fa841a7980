/* SPDX-License-Identifier: Apache-2.0
 * Which rows a sequence has, which keys a query sees, and which tiles are empty, full or partial.
 * Everything here is a pure function of integers; compiled by C and by nvcc. */
#ifndef HEDDLE_MASK_H
#define HEDDLE_MASK_H

#include "heddle.h"
#include "philox.h" /* HEDDLE_SHARED_INLINE */

/* One sequence: rows first_q .. first_q+sq-1 of the packed (or batch n's own) query tensor, likewise the keys. */
typedef struct sequence {
    int64_t first_q, sq, first_k, sk;
} sequence;

/* Query i sees key j when i + lo <= j <= i + hi. */
typedef struct band {
    int64_t lo, hi;
} band;

typedef struct range {
    int64_t begin, end;
} range;

typedef enum tile_kind { TILE_EMPTY, TILE_FULL, TILE_PARTIAL } tile_kind;

#define BAND_INFINITE (INT64_C(1) << 61)

/* float32's least number: a bias under it is -inf, and masks. */
#define LEAST_BIAS (-0x1.fffffep127)

/* Beside a key of a usual score, one with a bias under this (-1e9, say) has no weight. */
#define FAINT_BIAS (-0x1p24)

HEDDLE_SHARED_INLINE int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

HEDDLE_SHARED_INLINE int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

HEDDLE_SHARED_INLINE int64_t clamp64(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

/* Sequence n, from lengths that may be anything: clamped so that no row outside the tensors is reached. */
HEDDLE_SHARED_INLINE sequence sequence_of(const heddle_attention *a, const int32_t *cu_q, const int32_t *cu_k,
                                          const int32_t *len_q, const int32_t *len_k, int64_t n) {
    sequence s = {0, a->sq, 0, a->sk};
    if (a->features & HEDDLE_VARLEN) {
        s.first_q = clamp64(cu_q[n], 0, a->total_q);
        s.sq = clamp64(cu_q[n + 1] - s.first_q, 0, min64(a->sq, a->total_q - s.first_q));
        if (!(a->features & HEDDLE_PAGES)) {
            s.first_k = clamp64(cu_k[n], 0, a->total_k);
            s.sk = clamp64(cu_k[n + 1] - s.first_k, 0, min64(a->sk, a->total_k - s.first_k));
        }
    }
    if (len_q)
        s.sq = clamp64(len_q[n], 0, s.sq);
    if (len_k)
        s.sk = clamp64(len_k[n], 0, s.sk);
    return s;
}

/* HEDDLE_PAGES: the page that has key j of sequence n; -1: there is none, and the key is hidden. */
HEDDLE_SHARED_INLINE int64_t page_of(const heddle_attention *a, const int32_t *table, int64_t n, int64_t j) {
    const int64_t page = table[n * a->table + j / a->page];
    return page < a->pages ? max64(page, -1) : -1;
}

/* HEDDLE_SEGMENTS: the ids of the queries, or of the keys, of sequence n, from its first on. */
HEDDLE_SHARED_INLINE const int32_t *query_segments(const heddle_attention *a, const int32_t *ids, sequence s,
                                                   int64_t n) {
    return ids ? ids + (a->features & HEDDLE_VARLEN ? s.first_q : n * a->sq) : ids;
}

HEDDLE_SHARED_INLINE const int32_t *key_segments(const heddle_attention *a, const int32_t *ids, sequence s, int64_t n) {
    const int packed = (a->features & HEDDLE_VARLEN) && !(a->features & HEDDLE_PAGES);
    return ids ? ids + (packed ? s.first_k : n * a->sk) : ids;
}

/* HEDDLE_BLOCKS: the columns first .. end-1 that block r of the queries of batch n and head x has, whatever the numbers are. */
HEDDLE_SHARED_INLINE range blocks_of(const heddle_attention *a, const int32_t *rows, const int32_t *columns, int64_t n,
                                     int64_t x, int64_t r) {
    const int64_t heads = a->blocks_of_h ? a->h : 1, lists = (a->sq + a->block_q - 1) / a->block_q + 1;
    const int64_t last = (a->blocks_of_b ? a->b : 1) * heads * lists - 1, most = columns ? max64(0, rows[last]) : 0;
    const int32_t *own = rows + ((a->blocks_of_b ? n : 0) * heads + (a->blocks_of_h ? x : 0)) * lists + r;
    range s;
    s.begin = clamp64(own[0], 0, most);
    s.end = clamp64(own[1], s.begin, most);
    return s;
}

/* The offset of the diagonal: `off` in heddle.h. */
HEDDLE_SHARED_INLINE int64_t diagonal_offset(const heddle_attention *a, sequence s) {
    const int64_t whole_sq = a->whole_sq ? a->whole_sq : a->q_offset + s.sq,
                  whole_sk = a->whole_sk ? a->whole_sk : a->k_offset + s.sk;
    return a->q_offset - a->k_offset + (a->mask == HEDDLE_CAUSAL_TOP_LEFT ? 0 : whole_sk - whole_sq);
}

/* What a sequence's own lengths give of it; the rest, which the place of a part gives, is the same for all of a call's. */
HEDDLE_SHARED_INLINE int64_t own_offset(const heddle_attention *a, sequence s) {
    return a->mask == HEDDLE_CAUSAL_TOP_LEFT ? 0 : s.sk - s.sq;
}

HEDDLE_SHARED_INLINE band band_along(const heddle_attention *a, int64_t off) {
    band r = {-BAND_INFINITE, BAND_INFINITE};
    if (a->mask != HEDDLE_MASK_NONE)
        r.hi = off;
    if (a->features & HEDDLE_WINDOW) {
        if (a->window_left >= 0)
            r.lo = off - a->window_left;
        if (a->window_right >= 0)
            r.hi = min64(r.hi, off + a->window_right);
    }
    return r;
}

HEDDLE_SHARED_INLINE band band_of(const heddle_attention *a, sequence s) {
    return band_along(a, diagonal_offset(a, s));
}

HEDDLE_SHARED_INLINE int band_sees(band m, int64_t i, int64_t j) {
    return i + m.lo <= j && j <= i + m.hi;
}

/* The keys that at least one query of i0 .. i1-1 sees; empty when begin >= end. */
HEDDLE_SHARED_INLINE range keys_of_queries(band m, int64_t i0, int64_t i1, int64_t sk) {
    range r = {clamp64(i0 + m.lo, 0, sk), clamp64(i1 + m.hi, 0, sk)};
    return r;
}

/* The queries that see at least one key of j0 .. j1-1. */
HEDDLE_SHARED_INLINE range queries_of_keys(band m, int64_t j0, int64_t j1, int64_t sq) {
    range r = {clamp64(j0 - m.hi, 0, sq), clamp64(j1 - m.lo, 0, sq)};
    return r;
}

/* Queries i0 .. i1-1 against keys j0 .. j1-1, neither range empty. */
HEDDLE_SHARED_INLINE tile_kind tile_of(band m, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    if (j0 > i1 - 1 + m.hi || j1 - 1 < i0 + m.lo)
        return TILE_EMPTY;
    if (j1 - 1 <= i0 + m.hi && j0 >= i1 - 1 + m.lo)
        return TILE_FULL;
    return TILE_PARTIAL;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Where heddle_attention_append's rows come from and go to. Pure functions of a resolved description and of integers that are read
 * where the work is done, whatever these are; compiled by C and by nvcc. */
#ifndef HEDDLE_TOKENS_H
#define HEDDLE_TOKENS_H

#include "mask.h"

#include <stdbool.h>

/* A token is what has a new row, a query or both: row i of sequence n. */
HEDDLE_SHARED_INLINE int64_t append_tokens(const heddle_append *a) {
    if (a->b == 0)
        return 0;
    return a->features & HEDDLE_VARLEN ? a->total : a->b * max64(a->s, a->h ? a->sq : 0);
}

/* Rows that sequence n has in the cache before. */
HEDDLE_SHARED_INLINE int64_t append_length(const heddle_append *a, const heddle_append_data *t, int64_t n) {
    return clamp64(t->seqlens_k[n], 0, a->sk);
}

/* Packed rows of it, from its first one. */
HEDDLE_SHARED_INLINE int64_t append_packed(const heddle_append *a, const heddle_append_data *t, int64_t n,
                                           int64_t *first) {
    *first = clamp64(t->cu_seqlens[n], 0, a->total);
    return clamp64(clamp64(t->cu_seqlens[n + 1], 0, a->total) - *first, 0, a->s);
}

/* Rows that it has afterwards. */
HEDDLE_SHARED_INLINE int64_t append_length_after(const heddle_append *a, const heddle_append_data *t, int64_t n) {
    int64_t first, rows = a->features & HEDDLE_VARLEN ? append_packed(a, t, n, &first) : a->s;
    return min64(append_length(a, t, n) + rows, a->sk);
}

/* Where row j of sequence n lies in the cache: row *row of part (page or sequence) *part. False: nowhere. */
HEDDLE_SHARED_INLINE bool append_place(const heddle_append *a, const heddle_append_data *t, int64_t n, int64_t j,
                                       int64_t *part, int64_t *row) {
    if (j >= a->sk)
        return false;
    if (a->features & HEDDLE_PAGES) {
        *part = t->block_table[n * a->table + j / a->page];
        *row = j % a->page;
        return *part >= 0 && *part < a->pages;
    }
    *part = a->caches ? t->cache_index[n] : n;
    *row = j;
    return *part >= 0 && (!a->caches || *part < a->caches);
}

#endif

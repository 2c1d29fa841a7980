/* SPDX-License-Identifier: Apache-2.0
 * Lists of blocks on the CPU, where they can be read: what is wrong with them. On a GPU the kernels clamp. */
#ifndef HEDDLE_BLOCK_LISTS_H
#define HEDDLE_BLOCK_LISTS_H

#include "heddle.h"

#include <stdint.h>
#include <stdio.h>

/* 1, and why, where a number is out of order or out of range; `given`: how many columns there are to read. */
static inline int find_wrong_list(const heddle_attention *a, const int32_t *rows, const int32_t *columns, int64_t given,
                                  char *why, size_t n) {
    if (!a->block_q || !a->block_k)
        return 0;
    const int64_t each = (a->sq + a->block_q - 1) / a->block_q + 1, blocks = (a->sk + a->block_k - 1) / a->block_k;
    const int64_t all = (a->blocks_of_b ? a->b : 1) * (a->blocks_of_h ? a->h : 1) * each;
    const int32_t named = all ? rows[all - 1] : 0;
    if (named < 0 || named > given)
        return snprintf(why, n, "block_rows ends with %d, but there are %lld block_columns", named, (long long)given) >
               0;
    for (int64_t x = 0; x < all; x++) {
        const int32_t before = x % each ? rows[x - 1] : 0;
        if (rows[x] < before || rows[x] > named)
            return snprintf(why, n,
                            "block_rows has %d behind %d, at %lld: it must not fall within a head, or exceed its last "
                            "number, %d",
                            rows[x], before, (long long)x, named) > 0;
    }
    for (int64_t x = 0; x < named; x++)
        if (columns[x] < 0 || columns[x] >= blocks)
            return snprintf(why, n, "block_columns[%lld] = %d is none of the %lld blocks of keys", (long long)x,
                            columns[x], (long long)blocks) > 0;
    return 0;
}

#endif

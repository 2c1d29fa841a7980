/* SPDX-License-Identifier: Apache-2.0
 * Memory that will be wanted soon, asked for a little at a time between the products of what is at hand: a core can wait for some
 * dozen lines at once, and while it waits for more than that it computes nothing. What is asked for never changes a result. */
#ifndef HEDDLE_CPU_AHEAD_H
#define HEDDLE_CPU_AHEAD_H

#include <stdint.h>

#define AHEAD_MOST 16 /* ranges of rows at once; what does not fit is not asked for */
#define AHEAD_ROWS 64 /* no fewer than a tile has */

typedef struct ahead {
    int count;
    int64_t quota; /* lines at a time */
    struct {
        const char *p;
        int64_t stride, bytes, rows;
    } range[AHEAD_MOST];
    struct { /* to be written: the same bytes of each of some rows */
        int64_t count, at, bytes, quota;
        char *p[AHEAD_ROWS];
    } written;
} ahead;

static inline void ahead_begin(ahead *a) {
    a->count = 0;
    a->quota = 0;
    a->written.count = a->written.at = 0;
}

/* Rows of `bytes` bytes, `stride` bytes apart, in about `steps` steps. */
static inline void ahead_add(ahead *a, const void *p, int64_t stride, int64_t bytes, int64_t rows, int64_t steps) {
    if (!p || rows <= 0 || a->count == AHEAD_MOST)
        return;
    a->range[a->count].p = p;
    a->range[a->count].stride = stride;
    a->range[a->count].bytes = bytes;
    a->range[a->count++].rows = rows;
    a->quota += rows * ((bytes + 63) / 64) / steps + 1;
}

/* `bytes` bytes from `offset` on of each of `count` rows, in about `steps` steps, in place of what was asked for so. A line that is not there
 * when all of it is written is read all the same. */
static inline void ahead_write(ahead *a, void *const *rows, int64_t count, int64_t offset, int64_t bytes,
                               int64_t steps) {
    a->written.count = count;
    a->written.at = 0;
    a->written.bytes = bytes;
    a->written.quota = count * ((bytes + 63) / 64) / steps + 1;
    for (int64_t x = 0; x < count; x++)
        a->written.p[x] = (char *)rows[x] + offset;
}

/* The next few rows, into the second-level cache. */
static inline void ahead_step(ahead *a) {
    for (int64_t n = a->written.quota; n > 0 && a->written.at < a->written.count; a->written.at++)
        for (int64_t e = 0; e < a->written.bytes; e += 64, n--)
            __builtin_prefetch(a->written.p[a->written.at] + e, 1, 2);
    int64_t lines = a->quota;
    while (lines > 0 && a->count > 0) {
        const int x = a->count - 1;
        const char *p = a->range[x].p;
        for (int64_t e = 0; e < a->range[x].bytes; e += 64, lines--)
            __builtin_prefetch(p + e, 0, 2);
        a->range[x].p = p + a->range[x].stride;
        if (--a->range[x].rows == 0)
            a->count--;
    }
}

#endif

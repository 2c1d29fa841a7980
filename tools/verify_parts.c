/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_ACCUMULATE: an attention problem's keys in two parts, one call after the other, both passes. */
#include "verify.h"

#include "../src/dtype.h"

#include <math.h>
#include <string.h>

/* What dq, dk and dv begin with: a number that no sum cancels. */
#define THERE 0.25

bool fits_parts(const heddle_attention *a) {
    return a->sk > 0 && !(a->features & (HEDDLE_VARLEN | HEDDLE_SEQLENS | HEDDLE_PAGES | HEDDLE_E4M3 | HEDDLE_WEIGHTS |
                                         HEDDLE_BLOCKS));
}

/* What is added to: contiguous, in float. */
static const int sums[] = {O, LSE, DQ, DK, DV};
enum { SUMS = sizeof sums / sizeof *sums };

static bool is_sum(int f) {
    for (int x = 0; x < SUMS; x++)
        if (sums[x] == f)
            return true;
    return false;
}

static heddle_strides contiguous(const job *j, int f) {
    const char *shape = field_shape(j, f);
    const int64_t h = job_extent(j, shape[1]), rows = job_extent(j, shape[2]),
                  last = shape[3] ? job_extent(j, shape[3]) : 1;
    return (heddle_strides){h * rows * last, rows * last, last};
}

/* The whole with every stride as it is, since those of a part are those of the whole. */
static job literal(const job *whole) {
    job j = *whole;
    for (int f = 0; attention_fields[f].name; f++) {
        if (!attention_fields[f].stride)
            continue;
        heddle_strides s = is_sum(f) ? contiguous(whole, f) : field_strides(whole, f);
        if (!s.b && !s.h && !s.s)
            s.b = HEDDLE_BROADCAST;
        memcpy((char *)&j.a + attention_fields[f].stride, &s, sizeof s);
    }
    j.a.features |= HEDDLE_ACCUMULATE;
    j.a.whole_sq = whole->a.whole_sq ? whole->a.whole_sq : whole->a.q_offset + whole->a.sq;
    j.a.whole_sk = whole->a.whole_sk ? whole->a.whole_sk : whole->a.k_offset + whole->a.sk;
    return j;
}

/* Of field f, whose keys are rows or columns, those from `first` on. */
static void skip(job *j, int f, int64_t elements) {
    if (j->data[f])
        j->data[f] = (char *)j->data[f] + elements * (int64_t)field_bytes(j, f);
}

/* Of keys first .. end-1 of each sequence. */
static void take_segments(job *j, const job *all, arena *m, int64_t first) {
    const int32_t *from = all->data[K_SEGMENTS];
    int32_t *to = from ? arena_array(m, j->a.b * j->a.sk, sizeof *to) : NULL;
    for (int64_t n = 0; to && n < j->a.b; n++)
        memcpy(to + n * j->a.sk, from + n * all->a.sk + first, (size_t)j->a.sk * sizeof *to);
    j->data[K_SEGMENTS] = to;
}

/* Keys first .. end-1 of the problem; the sinks go with the first. */
static job part_of(const job *all, arena *m, int64_t first, int64_t end) {
    job j = *all;
    j.a.k_offset += first;
    j.a.sk = end - first;
    take_segments(&j, all, m, first);
    skip(&j, K, first * j.a.k_stride.s);
    skip(&j, V, first * j.a.v_stride.s);
    skip(&j, DK, first * j.a.dk_stride.s);
    skip(&j, DV, first * j.a.dv_stride.s);
    skip(&j, BIAS, first);
    skip(&j, DBIAS, first);
    skip(&j, BOOL_MASK, first);
    if (first) {
        j.a.features &= ~HEDDLE_SINKS;
        j.data[SINKS] = j.data[DSINKS] = NULL;
    }
    return j;
}

static void fill(job *j, int f, double x) {
    for (int64_t i = 0, n = j->data[f] ? field_count(j, f) : 0; i < n; i++)
        store_value(j, f, j->data[f], i, x);
}

/* The sums as the whole has them, in its type. */
static void take(const job *whole, const job *all, int f, double there) {
    const char *shape = field_shape(whole, f);
    const heddle_strides to = attention_fields[f].stride ? field_strides(whole, f) : contiguous(whole, f),
                         from = contiguous(whole, f);
    const int64_t h = job_extent(whole, shape[1]), rows = job_extent(whole, shape[2]),
                  last = shape[3] ? job_extent(whole, shape[3]) : 1;
    for (int64_t n = 0; n < whole->a.b; n++)
        for (int64_t x = 0; x < h; x++)
            for (int64_t i = 0; i < rows; i++)
                for (int64_t e = 0; e < last; e++) {
                    const double sum = load_value(all, f, all->data[f], n * from.b + x * from.h + i * from.s + e);
                    store_value(whole, f, whole->data[f], n * to.b + x * to.h + i * to.s + e, sum - there);
                }
}

bool run_parts(const job *whole, arena *m, int64_t first, bool backward) {
    job all = literal(whole);
    for (int x = 0; x < SUMS; x++)
        if (whole->data[sums[x]])
            all.data[sums[x]] = arena_array(m, field_count(&all, sums[x]), field_bytes(&all, sums[x]));
    fill(&all, LSE, -(double)INFINITY);
    for (int x = 2; x < SUMS; x++)
        fill(&all, sums[x], THERE);
    for (int pass = HEDDLE_FORWARD; pass <= (backward ? HEDDLE_BACKWARD : HEDDLE_FORWARD); pass++)
        for (int x = 0; x < 2; x++) {
            job j = part_of(&all, m, x ? first : 0, x ? all.a.sk : first);
            if (j.a.sk > 0 && (!job_prepare(&j, m, backward) || !job_run(&j, (heddle_pass)pass)))
                return false;
        }
    for (int x = 0; x < SUMS; x++)
        if (whole->data[sums[x]])
            take(whole, &all, sums[x], x < 2 ? 0 : THERE);
    return true;
}

/* SPDX-License-Identifier: Apache-2.0
 * heddle_attention_merge on the CPU: a row at a time, at the speed of memory. */
#include "../dtype.h"
#include "cpu.h"

/* Of rows of float32; else another's are widened as they are read. */
static void merge_values(heddle_dtype type, int64_t n, float keep, float take, const void *other, int64_t from,
                         float *o) {
    if (type == HEDDLE_F32) {
        const float *x = (const float *)other + from;
        for (int64_t e = 0; e < n; e++)
            o[e] = o[e] * keep + x[e] * take;
        return;
    }
    for (int64_t e = 0; e < n; e++)
        o[e] = o[e] * keep + (float)load_element(type, other, from + e) * take;
}

static void merge_row(const heddle_merge *m, int64_t row, float *o, float *lse, const void *other, float other_lse) {
    const int64_t n = row / m->s / m->h, x = row / m->s % m->h, i = row % m->s;
    const int64_t from = n * m->other_stride.b + x * m->other_stride.h + i * m->other_stride.s;
    o += n * m->o_stride.b + x * m->o_stride.h + i * m->o_stride.s;
    if (*lse == -INFINITY) /* what is there is worth nothing, and may be NaN */
        for (int64_t e = 0; e < m->dv; e++)
            o[e] = 0;
    if (other_lse == -INFINITY)
        return;
    const double there = (double)*lse, top = *lse > other_lse ? there : (double)other_lse;
    const double before = exp(there - top), now = exp((double)other_lse - top), all = before + now;
    *lse = (float)(top + log(all));
    merge_values(m->dtype, m->dv, (float)(before / all), (float)(now / all), other, from, o);
}

void heddle__cpu_merge(const heddle_merge *m, void *o, void *lse, const void *other_o, const void *other_lse,
                       int threads) {
    const int64_t rows = m->b * m->h * m->s;
    float *const l = lse;
    const float *const other = other_lse;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        merge_row(m, row, o, l + row, other_o, other[row]);
    (void)threads;
}

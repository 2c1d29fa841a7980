/* SPDX-License-Identifier: Apache-2.0
 * What the parts of norm-linear share: the call, its tensors' rows, and what is asked for ahead. */
#ifndef HEDDLE_CPU_NORM_LINEAR_CALL_H
#define HEDDLE_CPU_NORM_LINEAR_CALL_H

#include "threads.h"
#include "tile.h"

/* Columns of a panel of B. */
#ifdef HAVE_BF16_TILES
#define PANEL_VECTORS 2
#else
#define PANEL_VECTORS TILE_VECTORS
#endif
#define PANEL (PANEL_VECTORS * VL)

typedef struct norm_call {
    const heddle_norm_linear *a;
    const heddle_norm_linear_data *t;
    int type;
    bool widens;                       /* bfloat16 does not go by pairs */
    bool streams;                      /* y is so large that it goes to memory past the caches */
    int64_t chain;                     /* sum indices whose products are added up one after the other */
    int64_t halves;                    /* of W's rows: 2 behind an activation that has a gate */
    int64_t k_panels, n_panels, k_pad; /* panels of PANEL columns; n_panels of each half */
    int64_t row_panels;                /* of n in panels of VL */
    int64_t strip_panels;              /* backward in strips: k_panels of a task; or 0 */
    float *mean, *rstd, *gamma, *beta; /* float copies; gamma and beta padded with zeros */
    float *w;                          /* panels of W or Wᵀ; in strips of dy */
    const float *prepared;             /* forward: panels of Wᵀ that the caller has kept; or NULL */
    float *sums, *dbias; /* backward: G in panels [n][PANEL], in strips [m][k_pad] of dx; [row_panels·VL] */
    float *x_panels;     /* backward: a chunk of rows */
} norm_call;

/* Of a thread. */
typedef struct norm_space {
    float *a; /* panels of z or dy; strips of W */
    float *c; /* forward: [BLOCK_ROWS][GROUP·PANEL]; backward: [tile_m][k_pad] */
    float *row;
    float *w; /* forward of one block of rows: the panels of Wᵀ that it meets next */
} norm_space;

#define STRIP 32 /* rows of W in backward of few rows */

#define SHORT_CHAIN 128 /* where there are few results, and in float32 */
#define SHORT_BACK 64   /* the same backward, where few rows' sums are all of the error of dgamma */

/* Of so many numbers those that are added up one after the other; then such sums are. What both round is least at about
 * the root. */
INLINE int64_t sum_rows(int64_t count) {
    int64_t n = 4;
    while (n * n < count)
        n *= 2;
    return n;
}

INLINE const char *row_of(const void *p, int64_t row, int64_t stride, int type) {
    return element_at(p, row * stride, type);
}

/* The first of the `*count` rows of W in a panel of its transpose: panels of the second half begin with its first row. */
INLINE int64_t first_of_panel(const norm_call *c, int64_t panel, int64_t *count) {
    const int64_t half = panel / c->n_panels, first = (panel - half * c->n_panels) * PANEL;
    *count = min64(PANEL, c->a->n - first);
    return half * c->a->n + first;
}

INLINE int vectors_of(int64_t columns) {
    return (int)((min64(PANEL, columns) + VL - 1) / VL);
}

/* Rows that lie far apart are asked for some rows ahead: no hardware prefetcher follows them. */
INLINE void prefetch_ahead(const char *row, int64_t row_bytes, int64_t bytes) {
    for (int64_t x = 0; x < bytes; x += 64)
        __builtin_prefetch(row + 8 * row_bytes + x);
}

/* Part `share` of `shares` of the panel that is needed next, to be asked for during `steps` steps of a product. A panel that there is
 * not may be asked for: that has no effect. */
INLINE gemm_ahead share_of(const float *next, int64_t floats, int64_t share, int64_t shares, int64_t steps) {
    const int64_t bytes = (floats * 4 + shares - 1) / shares;
    return (gemm_ahead){(const char *)next + share * bytes, (bytes + steps - 1) / steps};
}

/* The first n <= 2·VL bfloat16 at p as pairs, zeros behind them. */
INLINE vf load_pairs(const char *p, int64_t n) {
    if (n >= 2 * VL)
        return (vf) * (const vu_unaligned *)p;
    uint16_t copy[2 * VL] = {0};
    memcpy(copy, p, (size_t)n * 2);
    vf r;
    memcpy(&r, copy, sizeof r);
    return r;
}

/* In double: the deviation of a short row is a few additions, and each float of them would be seen. */
INLINE double sum_lanes(vf x) {
    double r[4] = {0}; /* so that additions need not wait for each other */
    for (int l = 0; l < VL; l += 4)
        for (int i = 0; i < 4; i++)
            r[i] += (double)x[l + i];
    return (r[0] + r[1]) + (r[2] + r[3]);
}

/* Half a vector's floats. */
typedef double vd __attribute__((vector_size(4 * VL)));

INLINE vd doubles_of(vf x, int half) {
    float floats __attribute__((vector_size(2 * VL)));
    memcpy(&floats, (const char *)&x + 2 * VL * half, sizeof floats);
    return __builtin_convertvector(floats, vd);
}

/* Mean, then the mean square of what is left: nothing cancels. The mean is summed in double, so that it has no rounding but its own. In
 * float32 a sum of what is left would not do, either: a mean's low bits are lost alike in all x of a power of two. The row itself goes to
 * `buffer`. */
static void row_statistics(const norm_call *c, int64_t row, float *buffer) {
    const int64_t k = c->a->k;
    widen_row(TYPE(c), row_of(c->t->x, row, c->a->x_stride, TYPE(c)), k, 1, buffer);
    if (c->a->norm == HEDDLE_NO_NORM) {
        c->mean[row] = 0;
        c->rstd[row] = 1;
        return;
    }
    const double inverse = 1 / (double)k;
    double exact = 0;
    vd sum = {0};
    for (int64_t e = 0; e < k && c->a->norm == HEDDLE_LAYER_NORM; e += VL) {
        vf x = load(buffer + e);
        if (k - e < VL)
            for (int l = (int)(k - e); l < VL; l++)
                x[l] = 0;
        sum += doubles_of(x, 0) + doubles_of(x, 1);
    }
    for (int l = 0; l < VL / 2; l++)
        exact += sum[l];
    exact *= inverse;
    const float mean = (float)exact;
    const double rest = exact - (double)mean;
    vf squares = splat(0);
    for (int64_t e = 0; e < k; e += VL) {
        vf x = load(buffer + e) - mean;
        if (k - e < VL)
            for (int l = (int)(k - e); l < VL; l++)
                x[l] = 0;
        squares += x * x;
    }
    c->mean[row] = mean;
    c->rstd[row] = (float)(1 / sqrt(sum_lanes(squares) * inverse - rest * rest + c->a->eps));
}

/* Two-level sums of one panel's columns: rounding then grows with the square root of the rows at most. */
typedef struct column_sums {
    float part[PANEL], all[PANEL];
} column_sums;

INLINE void flush_sums(column_sums *s) {
    for (int64_t x = 0; x < PANEL; x += VL) {
        store(s->all + x, load(s->all + x) + load(s->part + x));
        store(s->part + x, splat(0));
    }
}

/* What dz adds to dgamma and dbeta of up to PANEL columns from k0 on. */
static void sum_dz(const norm_call *c, int64_t k0, int64_t columns, column_sums *dgamma, column_sums *dbeta) {
    const int64_t bytes = element_size(TYPE(c));
    const int64_t together = sum_rows(c->a->m);
    float dz[PANEL] = {0}, xhat[PANEL] = {0};
    for (int64_t row = 0; row < c->a->m; row++) {
        widen_row(TYPE(c), row_of(c->t->dz, row, c->a->dz_stride, TYPE(c)) + k0 * bytes, columns, 1, dz);
        widen_row(TYPE(c), row_of(c->t->x, row, c->a->x_stride, TYPE(c)) + k0 * bytes, columns, 1, xhat);
        for (int64_t x = 0; x < columns; x += VL) {
            const vf of_x = (load(xhat + x) - c->mean[row]) * c->rstd[row];
            store(dgamma->part + x, load(dgamma->part + x) + load(dz + x) * of_x);
            store(dbeta->part + x, load(dbeta->part + x) + load(dz + x));
        }
        if (row % together == together - 1) {
            flush_sums(dgamma);
            flush_sums(dbeta);
        }
    }
    flush_sums(dgamma);
    flush_sums(dbeta);
}

#endif

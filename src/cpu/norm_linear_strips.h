/* SPDX-License-Identifier: Apache-2.0
 * norm-linear backward for a few rows, where it is memory that takes the time: W is read once and dw written once, a strip of rows after
 * the other, and all that a strip of W is needed for happens while it is near. A task owns some columns. */
#ifndef HEDDLE_CPU_NORM_LINEAR_STRIPS_H
#define HEDDLE_CPU_NORM_LINEAR_STRIPS_H

#ifdef HAVE_BF16_TILES
#include "norm_linear_tiles.h"
#define STRIP_ROWS 256 /* of x, at most: more of them pay for packing W */
#else
#include "norm_linear_panels.h"
#define STRIP_ROWS 64
#endif

/* Tasks are of columns, so there must be some. (The choice may not depend on the number of threads, as no sum may.) */
INLINE bool goes_in_strips(const heddle_norm_linear *a) {
    return a->m > 0 && a->m <= min64(STRIP_ROWS, a->n / 2) && a->k >= 4 * PANEL;
}

/* Floats of dy packed twice for a strip: for sums over m, and for sums over n. */
INLINE int64_t strip_of_dy(int64_t m) {
    return STRIP / VL * a_panel(m) + (m + VL - 1) / VL * a_panel(STRIP);
}

/* Panels of a task: what it keeps of x, dx and a strip fits into half of a second-level cache. */
INLINE int64_t strip_panels(const heddle_norm_linear *a, int64_t threads) {
    const int64_t panels = (a->k + PANEL - 1) / PANEL;
    return clamp64(131072 / ((2 * a->m + STRIP) * PANEL), 1, (panels + threads - 1) / threads);
}

/* dw of a strip in one panel, and its part of the sums of dgamma and dbeta. */
INLINE void strip_weights_as(const norm_call *c, int type, int64_t panel, int64_t n0, int64_t rows, const float *w,
                             const float *g, float *dgamma, float *dbeta) {
    const heddle_norm_linear *a = c->a;
    const int64_t k0 = panel * PANEL, columns = min64(PANEL, a->k - k0), row_bytes = a->dw_stride * element_size(type);
    for (int64_t x = 0; x < columns; x += VL) {
        const vf gamma = load(c->gamma + k0 + x), beta = load(c->beta + k0 + x);
        char *out = c->t->dw ? (char *)c->t->dw + n0 * row_bytes + (k0 + x) * element_size(type) : NULL;
        const char *soon = row_of(c->t->w, n0 + STRIP, a->w_stride, type) + (k0 + x) * element_size(type);
        vf sum_gamma = splat(0), sum_beta = splat(0);
        for (int64_t r = 0; r < rows; r++, soon += a->w_stride * element_size(type)) {
            if (n0 + STRIP + r < a->n) {
                __builtin_prefetch(soon, 0, 2);
                if (out)
                    __builtin_prefetch(out + (r + STRIP) * row_bytes, 1, 2);
            }
            const float dbias = c->dbias[n0 + r];
            const vf wr = row_of_w(c, w, r, x), gr = load(g + r * PANEL + x);
            sum_gamma += wr * gr;
            sum_beta += wr * dbias;
            if (out)
                store_some(type, out + r * row_bytes, gr * gamma + dbias * beta, columns - x);
        }
        store(dgamma + x, n0 ? load(dgamma + x) + sum_gamma : sum_gamma);
        store(dbeta + x, n0 ? load(dbeta + x) + sum_beta : sum_beta);
    }
}

static void strip_weights(const norm_call *c, int64_t panel, int64_t n0, int64_t rows, const float *w, const float *g,
                          float *dgamma, float *dbeta) {
    if (TYPE(c) == HEDDLE_F32)
        strip_weights_as(c, HEDDLE_F32, panel, n0, rows, w, g, dgamma, dbeta);
    else if (TYPE(c) == HEDDLE_BF16)
        strip_weights_as(c, HEDDLE_BF16, panel, n0, rows, w, g, dgamma, dbeta);
    else
        strip_weights_as(c, HEDDLE_F16, panel, n0, rows, w, g, dgamma, dbeta);
}

/* C (+)= A·B, B one panel. */
static void strip_product(const norm_call *c, int vectors, int64_t rows, int64_t depth, const float *a, const float *b,
                          float *out, int64_t stride, bool add) {
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS)
        multiply_panels(c, vectors, min64(BLOCK_ROWS, rows - r), 0, depth, a + r / VL * a_panel(depth), a_panel(depth),
                        b, out + r * stride, stride, add, (gemm_ahead){(const char *)b, 0});
}

/* What rows n0 .. of W add to dx before its norm (in c->sums, [m][k_pad]), and their rows of dw, in panels p0 .. p1-1. */
static void strip_task(const norm_call *c, int64_t p0, int64_t p1, int64_t n0, bool weights, float *w, float *g,
                       float *dgamma, float *dbeta) {
    const heddle_norm_linear *a = c->a;
    const int64_t rows = min64(STRIP, a->n - n0), m = a->m, each = strip_of_dy(m);
    const float *along_m = c->w + n0 / STRIP * each, *along_n = along_m + STRIP / VL * a_panel(m);
    pack_strip(c, p0, p1, n0, rows, w);
    for (int64_t p = p0; p < p1; p++, w += b_panel(STRIP)) {
        const int vectors = vectors_of(a->k - p * PANEL);
        if (c->t->dx)
            strip_product(c, vectors, m, rows, along_n, w, c->sums + p * PANEL, c->k_pad, n0 > 0);
        if (!weights)
            continue;
        strip_product(c, vectors, rows, m, along_m, c->x_panels + p * b_panel(m), g, PANEL, false);
        strip_weights(c, p, n0, rows, w, g, dgamma + (p - p0) * PANEL, dbeta + (p - p0) * PANEL);
    }
}

/* What dz adds to a panel's dgamma and dbeta. */
static void add_dz_sums(const norm_call *c, int64_t panel, float *dgamma, float *dbeta) {
    column_sums of_gamma = {{0}, {0}}, of_beta = {{0}, {0}};
    sum_dz(c, panel * PANEL, min64(PANEL, c->a->k - panel * PANEL), &of_gamma, &of_beta);
    for (int64_t x = 0; x < PANEL; x += VL) {
        store(dgamma + x, load(dgamma + x) + load(of_gamma.all + x));
        store(dbeta + x, load(dbeta + x) + load(of_beta.all + x));
    }
}

/* All but dx's norm and dbias. Every thread of the team calls it. */
static void add_strips(const norm_call *c, bool weights, const norm_space *s) {
    const heddle_norm_linear *a = c->a;
    const int64_t each = strip_of_dy(a->m), per_task = c->strip_panels;
#pragma omp for schedule(static)
    for (int64_t x = 0; x < (a->n + STRIP - 1) / STRIP; x++) {
        float *dy = c->w + x * each;
        const int64_t rows = min64(STRIP, a->n - x * STRIP);
        for (int64_t r = 0; r < rows; r += DY_TOGETHER * VL)
            pack_dy(c, 0, a->m, (x * STRIP + r) / VL, min64(DY_TOGETHER, (rows - r + VL - 1) / VL), true,
                    dy + r / VL * a_panel(a->m));
        pack_dy_slice(c, 0, a->m, x * STRIP, rows, dy + STRIP / VL * a_panel(a->m));
    }
#pragma omp for schedule(static)
    for (int64_t p = 0; p < c->k_panels; p++)
        pack_xhat(c, 0, a->m, p);
#pragma omp for schedule(dynamic)
    for (int64_t p0 = 0; p0 < c->k_panels; p0 += per_task) {
        const int64_t p1 = min64(c->k_panels, p0 + per_task), k0 = p0 * PANEL, columns = min64(p1 * PANEL, a->k) - k0;
        float *dgamma = s->c, *dbeta = s->c + per_task * PANEL, *g = dbeta + per_task * PANEL;
        for (int64_t n0 = 0; n0 < a->n; n0 += STRIP)
            strip_task(c, p0, p1, n0, weights, s->a, g, dgamma, dbeta);
        for (int64_t p = p0; p < p1 && c->t->dz && (c->t->dgamma || c->t->dbeta); p++)
            add_dz_sums(c, p, dgamma + (p - p0) * PANEL, dbeta + (p - p0) * PANEL);
        if (c->t->dgamma)
            narrow_row(TYPE(c), dgamma, columns, 1, (char *)c->t->dgamma + k0 * element_size(TYPE(c)));
        if (c->t->dbeta)
            narrow_row(TYPE(c), dbeta, columns, 1, (char *)c->t->dbeta + k0 * element_size(TYPE(c)));
    }
}

#endif

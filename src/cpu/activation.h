/* SPDX-License-Identifier: Apache-2.0
 * Activations of norm-linear on vectors: where u lies as floats, and du of a whole tensor. */
#ifndef HEDDLE_CPU_ACTIVATION_H
#define HEDDLE_CPU_ACTIVATION_H

#include "../activation.h"
#include "../fields.h"
#include "norm_linear_call.h"

/* act(u), and act'(u) to *slope; `kind` is known to the compiler. NaN stays NaN. */
INLINE vf vactivate(heddle_activation kind, vf u, vf *slope) {
    const float most = kind == HEDDLE_GELU ? GELU_LIMIT : kind == HEDDLE_SILU ? SILU_LIMIT : TANH_LIMIT;
    const vf c = vmax(splat(-most), select_float(u > most, splat(most), u));
    if (kind == HEDDLE_GELU) {
        const vf a = (vf)((vi)c & 0x7fffffff), t = 1 / (1 + GELU_P * a);
        const vf e = vexp2_times(HALF_LOG2_E, -(a * a));
        vf p = splat(0);
#define P(term) p = p * t + term;
        GELU_TERMS(P)
#undef P
        const vf tail = e * t * p, share = select_float(c > 0, 1 - tail, tail);
        *slope = share + c * e * NORMAL_AT_0;
        return u * share;
    }
    const float linear = kind == HEDDLE_SILU ? 1 : TANH_LINEAR, cubic = kind == HEDDLE_SILU ? 0 : TANH_CUBIC;
    const vf e = vexp2_times(LOG2_E, -c * (linear + cubic * (c * c))), share = 1 / (1 + e);
    *slope = share + c * (linear + 3 * cubic * (c * c)) * (share * (e * share));
    return u * share;
}

/* row[columns] = act of it, in place, times `up` where that is not NULL; u, rounded, to where the caller wants it. There is room for a
 * whole last vector. */
INLINE void activate_as(heddle_activation kind, const norm_call *c, int64_t i, int64_t n0, float *row, const float *up,
                        int64_t columns) {
    const int64_t size = element_size(c->type);
    char *u = c->t->u ? (char *)c->t->u + (i * c->a->u_stride + n0) * size : NULL;
    for (int64_t x = 0; x < columns; x += VL) {
        const vf v = load(row + x);
        vf slope, y = vactivate(kind, v, &slope);
        if (u)
            store_some(c->type, u + x * size, v, columns - x);
        if (u && up)
            store_some(c->type, u + (c->a->n + x) * size, load(up + x), columns - x);
        store(row + x, up ? y * load(up + x) : y);
    }
}

static void activate(const norm_call *c, int64_t i, int64_t n0, float *row, const float *up, int64_t columns) {
    switch (c->a->activation) {
    case HEDDLE_NO_ACTIVATION: break;
    case HEDDLE_GELU: activate_as(HEDDLE_GELU, c, i, n0, row, NULL, columns); break;
    case HEDDLE_GELU_TANH: activate_as(HEDDLE_GELU_TANH, c, i, n0, row, NULL, columns); break;
    case HEDDLE_SILU: activate_as(HEDDLE_SILU, c, i, n0, row, NULL, columns); break;
    case HEDDLE_GEGLU: activate_as(HEDDLE_GELU, c, i, n0, row, up, columns); break;
    case HEDDLE_GEGLU_TANH: activate_as(HEDDLE_GELU_TANH, c, i, n0, row, up, columns); break;
    case HEDDLE_SWIGLU: activate_as(HEDDLE_SILU, c, i, n0, row, up, columns); break;
    }
}

/* row[columns] += the residual's, in place; room as above. */
INLINE void add_residual(const norm_call *c, int64_t i, int64_t n0, float *row, int64_t columns) {
    const int64_t size = element_size(c->type);
    const char *from = (const char *)c->t->residual + (i * c->a->residual_stride + n0) * size;
    for (int64_t x = 0; x < columns; x += VL)
        store(row + x, load(row + x) + load_some(c->type, from + x * size, columns - x));
}

/* dy[columns] *= act'(u); where `up` is not NULL dy *= up∘act'(u), and up = dy∘act(u). */
INLINE void weigh_as(heddle_activation kind, float *dy, const float *u, float *up, int64_t columns) {
    for (int64_t x = 0; x < columns; x += VL) {
        const vf in = load(dy + x);
        vf slope, act = vactivate(kind, load(u + x), &slope);
        if (up) {
            slope *= load(up + x);
            store(up + x, in * act);
        }
        store(dy + x, in * slope);
    }
}

#define DU_COLUMNS 256

/* du of up to DU_COLUMNS columns of y in row i, from n0 on. */
static void du_columns(const heddle_norm_linear *a, const heddle_norm_linear_data *t, int64_t i, int64_t n0, void *du) {
    const int type = (int)a->dtype;
    const int64_t columns = min64(DU_COLUMNS, a->n - n0), size = element_size(type);
    float dy[DU_COLUMNS + VL] = {0}, u[DU_COLUMNS + VL] = {0}, up[DU_COLUMNS + VL] = {0};
    const char *from = element_at(t->u, i * a->u_stride + n0, type);
    char *to = (char *)du + (i * norm_linear_extent(a, 'N') + n0) * size;
    widen_row(type, element_at(t->dy, i * a->dy_stride + n0, type), columns, 1, dy);
    widen_row(type, from, columns, 1, u);
    if (is_gated(a->activation))
        widen_row(type, from + a->n * size, columns, 1, up);
    switch (a->activation) {
    case HEDDLE_NO_ACTIVATION: break;
    case HEDDLE_GELU: weigh_as(HEDDLE_GELU, dy, u, NULL, columns); break;
    case HEDDLE_GELU_TANH: weigh_as(HEDDLE_GELU_TANH, dy, u, NULL, columns); break;
    case HEDDLE_SILU: weigh_as(HEDDLE_SILU, dy, u, NULL, columns); break;
    case HEDDLE_GEGLU: weigh_as(HEDDLE_GELU, dy, u, up, columns); break;
    case HEDDLE_GEGLU_TANH: weigh_as(HEDDLE_GELU_TANH, dy, u, up, columns); break;
    case HEDDLE_SWIGLU: weigh_as(HEDDLE_SILU, dy, u, up, columns); break;
    }
    narrow_row(type, dy, columns, 1, to);
    if (is_gated(a->activation))
        narrow_row(type, up, columns, 1, to + a->n * size);
}

/* du, [m, features of u] contiguous. */
static void form_du(const heddle_norm_linear *a, const heddle_norm_linear_data *t, int threads, void *du) {
    (void)threads; /* without OpenMP */
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < a->m; i++)
        for (int64_t n0 = 0; n0 < a->n; n0 += DU_COLUMNS)
            du_columns(a, t, i, n0, du);
}

#endif

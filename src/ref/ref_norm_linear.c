/* SPDX-License-Identifier: Apache-2.0
 * norm-linear by the formulas of heddle.h. Rows are worked on ROWS at a time only so that each row of W or of z is
 * widened once for all of them. */
#include "ref.h"

#include "fields.h"

#include <stdio.h>

enum { ROWS = 16 };

#define PI 3.14159265358979323846

/* One call: what it is given, and its arrays in the workspace. */
typedef struct work {
    const heddle_norm_linear *a;
    const heddle_norm_linear_data *data;
    double *block;          /* [ROWS, k] */
    double *row;            /* [k]: a row of W */
    double *xhat;           /* [k] */
    double *gamma, *beta;   /* [k] */
    double *dgamma, *dbeta; /* [k] */
} work;

static int64_t lay_out(work *w, const heddle_norm_linear *a, heddle_pass pass, double *base) {
    int64_t used = 0;
    w->a = a;
    w->block = take(base, &used, ROWS * a->k);
    w->row = take(base, &used, a->k);
    w->xhat = take(base, &used, a->k);
    w->gamma = take(base, &used, a->k);
    w->beta = take(base, &used, a->k);
    if (pass == HEDDLE_FORWARD)
        return used;
    w->dgamma = take(base, &used, a->k);
    w->dbeta = take(base, &used, a->k);
    return used;
}

heddle_status heddle__ref_plan_norm_linear(norm_linear_plan *plan) {
    const heddle_norm_linear *a = &plan->a;
    work w;
    plan->workspace = (size_t)lay_out(&w, a, plan->pass, NULL) * sizeof(double);
    plan->threads = 1;
    plan->tile_m = ROWS;
    plan->tile_n = 1;
    plan->tile_k = a->k;
    snprintf(plan->kernel, sizeof plan->kernel, "heddle_norm_linear_%s_ref", heddle__ref_variant(a->dtype, plan->pass));
    return HEDDLE_OK;
}

static int64_t rows_from(int64_t begin, int64_t end) {
    return end - begin < ROWS ? end - begin : ROWS;
}

static void load_or_fill(heddle_dtype dtype, const void *p, int64_t n, double value, double *row) {
    if (p)
        load_row(dtype, p, 0, n, row);
    else
        fill(row, n, value);
}

typedef struct moments {
    double mean, rstd;
} moments;

/* Of one row: the mean first, then the squares around it, so that a large mean does not cancel. Without a norm those that change nothing. */
static moments moments_of(const heddle_norm_linear *a, const double *x) {
    if (a->norm == HEDDLE_NO_NORM)
        return (moments){0, 1};
    double sum = 0, squares = 0;
    for (int64_t e = 0; a->norm == HEDDLE_LAYER_NORM && e < a->k; e++)
        sum += x[e];
    double mean = sum / (double)a->k;
    for (int64_t e = 0; e < a->k; e++)
        squares += (x[e] - mean) * (x[e] - mean);
    return (moments){mean, 1 / sqrt(squares / (double)a->k + a->eps)};
}

/* Row i of xhat. Backward takes the moments that it is given, forward never does. */
static moments normalise(const work *w, heddle_pass pass, int64_t i, double *xhat) {
    const heddle_norm_linear *a = w->a;
    const heddle_norm_linear_data *data = w->data;
    load_row(a->dtype, data->x, i * a->x_stride, a->k, xhat);
    moments r;
    if (pass == HEDDLE_BACKWARD && data->mean && data->rstd) {
        r.mean = a->norm == HEDDLE_LAYER_NORM ? load_element(float_type(a->dtype), data->mean, i) : 0;
        r.rstd = load_element(float_type(a->dtype), data->rstd, i);
    } else {
        r = moments_of(a, xhat);
    }
    for (int64_t e = 0; e < a->k; e++)
        xhat[e] = (xhat[e] - r.mean) * r.rstd;
    return r;
}

/* z = xhat∘gamma + beta */
static void scale_and_shift(const work *w, const double *xhat, double *z) {
    for (int64_t e = 0; e < w->a->k; e++)
        z[e] = xhat[e] * w->gamma[e] + w->beta[e];
}

/* act(u) and its derivative. */
static double activated(heddle_activation activation, double u, double *slope) {
    const double root = sqrt(2 / PI), cube = 0.044715;
    double share = 1, of_share = 0; /* act(u) = u·share */
    if (activation == HEDDLE_GELU) {
        share = 0.5 * erfc(-u / sqrt(2));
        of_share = exp(-0.5 * u * u) / sqrt(2 * PI);
    } else if (activation == HEDDLE_GELU_TANH) {
        share = 1 / (1 + exp(-2 * root * (u + cube * u * u * u)));
        of_share = share * (1 - share);
        of_share *= of_share == 0 ? 0 : 2 * root * (1 + 3 * cube * u * u);
    } else if (activation == HEDDLE_SILU) {
        share = 1 / (1 + exp(-u));
        of_share = share * (1 - share);
    }
    *slope = share + (of_share == 0 ? 0 : u * of_share);
    return u * share;
}

/* dy[i, j], or du, which of two halves has those of the gate in front. */
static double gradient(const work *w, int64_t i, int64_t j) {
    const heddle_norm_linear *a = w->a;
    const int64_t column = j < a->n ? j : j - a->n;
    const double dy = load_element(a->dtype, w->data->dy, i * a->dy_stride + column);
    double slope;
    if (!a->activation)
        return dy;
    const double act =
        activated(gate_activation(a->activation), load_element(a->dtype, w->data->u, i * a->u_stride + column), &slope);
    if (!is_gated(a->activation))
        return dy * slope;
    return j < a->n ? dy * load_element(a->dtype, w->data->u, i * a->u_stride + a->n + j) * slope : dy * act;
}

/* Column j of u: of the rows of z in the block, into u[rows]. */
static void product(const work *w, int64_t i0, int64_t rows, int64_t j, double *u) {
    const heddle_norm_linear *a = w->a;
    const double bias = w->data->bias ? load_element(a->dtype, w->data->bias, j) : 0;
    load_row(a->dtype, w->data->w, j * a->w_stride, a->k, w->row);
    for (int64_t r = 0; r < rows; r++) {
        u[r] = dot(w->block + r * a->k, w->row, a->k) + bias;
        if (w->data->u)
            store_element(a->dtype, w->data->u, (i0 + r) * a->u_stride + j, u[r]);
    }
}

static void forward(const work *w) {
    const heddle_norm_linear *a = w->a;
    const heddle_norm_linear_data *data = w->data;
    for (int64_t i0 = 0; i0 < a->m; i0 += ROWS) {
        int64_t rows = rows_from(i0, a->m);
        for (int64_t r = 0; r < rows; r++) {
            moments s = normalise(w, HEDDLE_FORWARD, i0 + r, w->xhat);
            scale_and_shift(w, w->xhat, w->block + r * a->k);
            if (data->z)
                store_row(a->dtype, data->z, (i0 + r) * a->z_stride, a->k, w->block + r * a->k);
            if (data->mean)
                store_element(float_type(a->dtype), data->mean, i0 + r, s.mean);
            if (data->rstd)
                store_element(float_type(a->dtype), data->rstd, i0 + r, s.rstd);
        }
        for (int64_t j = 0; j < a->n; j++) {
            double u[ROWS], up[ROWS], slope;
            product(w, i0, rows, j, u);
            if (is_gated(a->activation))
                product(w, i0, rows, a->n + j, up);
            for (int64_t r = 0; r < rows; r++) {
                double y = activated(gate_activation(a->activation), u[r], &slope);
                if (is_gated(a->activation))
                    y *= up[r];
                if (data->residual)
                    y += load_element(a->dtype, data->residual, (i0 + r) * a->residual_stride + j);
                store_element(a->dtype, data->y, (i0 + r) * a->y_stride + j, y);
            }
        }
    }
}

/* dx of row i from its h, and what the row adds to dgamma and dbeta. */
static void backward_row(const work *w, int64_t i, double *h) {
    const heddle_norm_linear *a = w->a;
    double mean_g = 0, mean_gx = 0, *g = h;
    moments s = normalise(w, HEDDLE_BACKWARD, i, w->xhat);
    for (int64_t e = 0; e < a->k; e++) {
        w->dgamma[e] += h[e] * w->xhat[e];
        w->dbeta[e] += h[e];
        g[e] = h[e] * w->gamma[e];
        mean_g += g[e] / (double)a->k;
        mean_gx += g[e] * w->xhat[e] / (double)a->k;
    }
    if (!w->data->dx)
        return;
    if (a->norm != HEDDLE_LAYER_NORM)
        mean_g = 0;
    for (int64_t e = 0; e < a->k; e++)
        store_element(a->dtype, w->data->dx, i * a->dx_stride + e,
                      a->norm == HEDDLE_NO_NORM ? g[e] : s.rstd * (g[e] - mean_g - w->xhat[e] * mean_gx));
}

/* dx, dgamma and dbeta, by way of h = dy·W + dz. */
static void backward_x(const work *w) {
    const heddle_norm_linear *a = w->a;
    const heddle_norm_linear_data *data = w->data;
    fill(w->dgamma, a->k, 0);
    fill(w->dbeta, a->k, 0);
    for (int64_t i0 = 0; i0 < a->m; i0 += ROWS) {
        int64_t rows = rows_from(i0, a->m);
        fill(w->block, rows * a->k, 0);
        for (int64_t r = 0; r < rows && data->dz; r++)
            load_row(a->dtype, data->dz, (i0 + r) * a->dz_stride, a->k, w->block + r * a->k);
        for (int64_t j = 0; j < norm_linear_extent(a, 'N'); j++) {
            load_row(a->dtype, data->w, j * a->w_stride, a->k, w->row);
            for (int64_t r = 0; r < rows; r++)
                add_scaled(w->block + r * a->k, gradient(w, i0 + r, j), w->row, a->k);
        }
        for (int64_t r = 0; r < rows; r++)
            backward_row(w, i0 + r, w->block + r * a->k);
    }
    if (data->dgamma)
        store_row(a->dtype, data->dgamma, 0, a->k, w->dgamma);
    if (data->dbeta)
        store_row(a->dtype, data->dbeta, 0, a->k, w->dbeta);
}

/* dw = duᵀ·z */
static void backward_w(const work *w) {
    const heddle_norm_linear *a = w->a;
    const heddle_norm_linear_data *data = w->data;
    double *z = w->row;
    const int64_t n = norm_linear_extent(a, 'N');
    for (int64_t j0 = 0; j0 < n; j0 += ROWS) {
        int64_t rows = rows_from(j0, n);
        fill(w->block, rows * a->k, 0);
        for (int64_t i = 0; i < a->m; i++) {
            normalise(w, HEDDLE_BACKWARD, i, w->xhat);
            scale_and_shift(w, w->xhat, z);
            for (int64_t r = 0; r < rows; r++)
                add_scaled(w->block + r * a->k, gradient(w, i, j0 + r), z, a->k);
        }
        for (int64_t r = 0; r < rows; r++)
            store_row(a->dtype, data->dw, (j0 + r) * a->dw_stride, a->k, w->block + r * a->k);
    }
}

/* dbias = sum_m du */
static void backward_bias(const work *w) {
    const heddle_norm_linear *a = w->a;
    for (int64_t j = 0; j < norm_linear_extent(a, 'N'); j++) {
        double sum = 0;
        for (int64_t i = 0; i < a->m; i++)
            sum += gradient(w, i, j);
        store_element(a->dtype, w->data->dbias, j, sum);
    }
}

heddle_status heddle__ref_run_norm_linear(const norm_linear_plan *plan, const heddle_norm_linear_data *data,
                                          void *workspace, void *stream) {
    (void)stream;
    work w = {.data = data};
    lay_out(&w, &plan->a, plan->pass, workspace);
    load_or_fill(w.a->dtype, data->gamma, w.a->k, 1, w.gamma);
    load_or_fill(w.a->dtype, data->beta, w.a->k, 0, w.beta);
    if (plan->pass == HEDDLE_FORWARD) {
        forward(&w);
        return HEDDLE_OK;
    }
    if (data->dx || data->dgamma || data->dbeta)
        backward_x(&w);
    if (data->dw)
        backward_w(&w);
    if (data->dbias)
        backward_bias(&w);
    return HEDDLE_OK;
}

/* SPDX-License-Identifier: Apache-2.0
 * Plain norm-linear: the norm, rounded to the dtype, then the product; every sum in float32 and in order. */
#include "plain_norm_linear.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A row of what may not be there. */
static void read_row(const tensor *t, int64_t i, int64_t n, float none, float *x) {
    for (int64_t e = 0; e < n && !t->host; e++)
        x[e] = none;
    if (t->host)
        tensor_read_floats(t, tensor_at(t, 0, 0, i, 0), n, x);
}

/* Pairwise, so that a large mean is as exact as PyTorch's. */
static float pairwise_sum(const norm_work *o, int64_t begin, int64_t end) {
    float sum = 0;
    if (end - begin > 8) {
        int64_t middle = begin + (end - begin) / 2;
        return pairwise_sum(o, begin, middle) + pairwise_sum(o, middle, end);
    }
    for (int64_t e = begin; e < end; e++)
        sum += o->x[plain_term(e, o->k, o->order)];
    return sum;
}

static void row_statistics(const norm_linear_problem *p, const norm_work *o, float *mean, float *rstd) {
    const heddle_norm_linear *a = &p->a;
    float squares = 0;
    *mean = a->norm == HEDDLE_LAYER_NORM ? pairwise_sum(o, 0, a->k) / (float)a->k : 0;
    *rstd = 1;
    if (a->norm == HEDDLE_NO_NORM)
        return;
    for (int64_t e = 0; e < a->k; e++) {
        float centred = o->x[plain_term(e, a->k, o->order)] - *mean;
        squares += centred * centred;
    }
    *rstd = 1 / sqrtf(squares / (float)a->k + (float)a->eps);
}

/* The input's gradient of row i: of the norm from dz, all in float32. */
static void row_backward(norm_linear_problem *p, const norm_work *o, int64_t i, float rstd, double natural[N_COUNT]) {
    const heddle_norm_linear *a = &p->a;
    const float *xhat = o->xhat + i * o->k, *dz = o->dz + i * o->k;
    float mean_g = 0, mean_gx = 0, *dx = o->sum;
    double most = 0, most_gx = 0;
    for (int64_t e = 0; e < a->k; e++) {
        float g = dz[e] * o->gamma[e];
        mean_g += g / (float)a->k;
        mean_gx += g * xhat[e] / (float)a->k;
        most = plain_larger(most, fabs((double)g));
        most_gx += fabs((double)(g * xhat[e])) / (double)a->k;
    }
    if (a->norm != HEDDLE_LAYER_NORM)
        mean_g = 0;
    if (a->norm == HEDDLE_NO_NORM)
        mean_gx = 0, most_gx = 0;
    for (int64_t e = 0; e < a->k; e++) {
        float g = dz[e] * o->gamma[e];
        dx[e] = rstd * (g - mean_g - xhat[e] * mean_gx);
        natural[N_DX] = plain_larger(natural[N_DX], (double)rstd * (2 * most + fabs((double)xhat[e]) * most_gx));
    }
    if (p->t[N_DX].host)
        tensor_write_floats(&p->t[N_DX], tensor_at(&p->t[N_DX], 0, 0, i, 0), a->k, dx);
}

static double largest_norm(const float *rows, int64_t count, int64_t width) {
    double most = 0;
    for (int64_t x = 0; x < count; x++)
        most = fmax(most, plain_norm(rows + x * width, width));
    return most;
}

/* sum_x weight[x * step]·rows[x, ...] into sum, and the largest sum of the terms' magnitudes; NULL: not wanted. */
static void sum_rows(const norm_work *o, const float *weight, int64_t step, const float *rows, int64_t count,
                     int64_t width, float *sum, double *largest) {
    const plain_terms terms = {count, step, weight, NULL, rows, width};
    plain_sum(&terms, width, o->order, o->part, sum);
    if (!largest || o->order != PLAIN_FORWARD)
        return;
    plain_sizes(&terms, NULL, width, o->sums);
    *largest = plain_larger(*largest, plain_largest(o->sums, width));
}

/* As PyTorch has it: act(u) in float32, its derivative to *slope. */
static float activated(heddle_activation activation, float u, float *slope) {
    const float root = 0.79788456f, cube = 0.044715f;
    if (activation == HEDDLE_GELU) {
        const float share = 0.5f * (1 + erff(u * 0.70710678f));
        *slope = share + u * (expf(-0.5f * u * u) * 0.39894228f);
        return u * share;
    }
    if (activation == HEDDLE_GELU_TANH) {
        const float t = tanhf(root * (u + cube * u * u * u));
        *slope = 0.5f * (1 + t) + 0.5f * u * (1 - t * t) * root * (1 + 3 * cube * u * u);
        return 0.5f * u * (1 + t);
    }
    const float share = 1 / (1 + expf(-u));
    *slope = activation == HEDDLE_SILU ? share * (1 + u * (1 - share)) : 1;
    return activation == HEDDLE_SILU ? u * share : u;
}

/* In 16 bits z was rounded, or W∘gamma, before u was made of it: squares of u's terms, [n]. Without a norm neither was. */
static void squares_of_terms(const norm_work *o, const float *z) {
    for (int64_t f = 0; f < o->n; f++) {
        o->sums[f] = 0;
        for (int64_t e = 0; e < o->k && o->rounds_xhat; e++)
            o->sums[f] += pow((double)z[e] * (double)o->w[f * o->k + e], 2);
    }
}

/* float32: squares of u's terms and of its sums as they grow; of what z was rounded from, x̂∘gamma and z itself; and twice that of their sum,
 * by which u is off with the row's rstd, the root and the quotient. [n]. */
static void squares_of_sums(const norm_work *o, heddle_norm norm, const float *xhat, const float *z) {
    plain_squares(&(plain_terms){o->k, 1, z, NULL, o->wt, o->n}, NULL, o->n, o->part, 1, o->sums);
    for (int64_t f = 0; f < o->n && norm != HEDDLE_NO_NORM; f++) {
        double sum = 0;
        for (int64_t e = 0; e < o->k; e++) {
            const double w = (double)o->w[f * o->k + e], x = (double)xhat[e] * (double)o->gamma[e] * w;
            o->sums[f] += x * x + (double)z[e] * (double)z[e] * w * w;
            sum += x;
        }
        o->sums[f] += 2 * sum * sum;
    }
}

/* By how much more than its own rounding u[f] of row i is uncertain: in float32 by its sum's, in 16 bits by those of its terms. */
static float times_rounding(const norm_work *o, int64_t i, int64_t f, float u) {
    const double of_u = (double)u;
    const double shift = o->precision == HEDDLE_F32 ? (double)o->shift[i] * (double)o->wg[f] : 0;
    if (!o->spreads || of_u == 0)
        return 1;
    return (float)sqrt(1 + (o->sums[f] + shift * shift) / (of_u * of_u));
}

/* float32: what the terms of act'(u) are uncertain by, in roundings, or act(u) alone: (6)^½ each, for a function that is right to its
 * last place, two roundings, and two products. */
static float of_function(const norm_work *o, float term, float other) {
    return o->spreads && o->precision == HEDDLE_F32 ? hypotf(term, other) * 2.4494897f : 0;
}

/* The same of u and dy at f, where the other half is `up`. `bent`: what act' of the gate is uncertain by, in roundings. */
static float gate_element(norm_work *o, int64_t i, int64_t f, float *u, float *dy, float act, float slope, float bent) {
    const int64_t other = o->of_y + f;
    const float gate = u[f], up = u[other], of_gate = times_rounding(o, i, f, gate);
    const float of_up = times_rounding(o, i, other, up), in = dy[f];
    o->most_dy = plain_larger(o->most_dy, fabs((double)in * (double)up));
    o->slope_1[i * o->n + f] = in * up;
    o->slope_1[i * o->n + other] = in * gate;
    o->du_error[i * o->n + f] = hypotf(in * up * bent, in * up * slope * of_up);
    o->du_error[i * o->n + other] = in * hypotf(slope * gate * of_gate, of_function(o, act, 0));
    o->bend[i * o->n + f] *= up;
    o->cross[i * o->of_y + f] = in * slope;
    o->most_y = plain_larger(o->most_y, hypot((double)(slope * gate * of_gate * up), (double)(act * up * of_up)));
    dy[f] = in * up * slope;
    dy[other] = in * act;
    return act * up;
}

/* u of row i to where it is wanted, dy to du; y = act(u) in place. */
static void activate_row(norm_linear_problem *p, norm_work *o, int64_t i, float *u, float *dy) {
    const heddle_activation activation = gate_activation(p->a.activation);
    tensor *to = &p->t[N_U];
    round_all(o->precision, o->n, u);
    if (to->host)
        tensor_write_floats(to, tensor_at(to, 0, 0, i, 0), o->n, u);
    for (int64_t f = 0; f < o->of_y; f++) {
        const float step = 0x1p-8f;
        float slope, next;
        o->most_dy = plain_larger(o->most_dy, fabs((double)dy[f]));
        activated(activation, u[f] * (1 + step), &next);
        const float act = activated(activation, u[f], &slope), of_u = times_rounding(o, i, f, u[f]);
        const float share = u[f] != 0 ? act / u[f] : 0.5f, own = of_function(o, share, slope - share);
        const float bent = hypotf((next - slope) / step * of_u, own);
        o->bend[i * o->n + f] = u[f] != 0 ? dy[f] * (next - slope) / (step * u[f]) : 0;
        if (is_gated(p->a.activation)) {
            u[f] = gate_element(o, i, f, u, dy, act, slope, bent);
            continue;
        }
        o->slope_1[i * o->n + f] = dy[f];
        o->du_error[i * o->n + f] = dy[f] * bent;
        o->most_y = plain_larger(o->most_y, fabs((double)(slope * u[f] * of_u)));
        u[f] = act;
        dy[f] *= slope;
    }
    round_all(o->precision, o->n, dy);
}

/* To y of row i, which is rounded, as it is where the sum is another operation. */
static void add_residual(norm_linear_problem *p, norm_work *o, int64_t i) {
    if (!p->t[N_RESIDUAL].host)
        return;
    round_all(o->precision, o->of_y, o->sum);
    read_row(&p->t[N_RESIDUAL], i, o->of_y, 0, o->part);
    for (int64_t f = 0; f < o->of_y; f++)
        o->sum[f] += o->part[f];
}

/* z's other gradient, which is rounded as it is added. */
static void add_dz(const norm_linear_problem *p, const norm_work *o, int64_t i, float *dz) {
    if (!p->t[N_DZ].host)
        return;
    read_row(&p->t[N_DZ], i, o->k, 0, o->x);
    for (int64_t e = 0; e < o->k; e++)
        dz[e] += o->x[e];
    round_all(o->precision, o->k, dz);
}

static void forward_row(norm_linear_problem *p, norm_work *o, int64_t i, double natural[N_COUNT]) {
    const int t = o->precision;
    float mean, rstd, *xhat = o->xhat + i * o->k, *z = o->z + i * o->k, *dy = o->dy + i * o->n, *dz = o->dz + i * o->k;
    tensor *y = &p->t[N_Y];
    read_row(&p->t[N_X], i, o->k, 0, o->x);
    row_statistics(p, o, &mean, &rstd);
    if (p->t[N_MEAN].host)
        tensor_raw_set(&p->t[N_MEAN], i, (double)mean);
    if (p->t[N_RSTD].host)
        tensor_raw_set(&p->t[N_RSTD], i, (double)rstd);
    o->shift[i] = mean * rstd;
    o->rstd[i] = rstd;
    for (int64_t e = 0; e < o->k; e++) {
        const double size = p->a.norm == HEDDLE_LAYER_NORM ? fabs((double)o->x[e]) : 0;
        natural[N_MEAN] = plain_larger(natural[N_MEAN], size);
        natural[N_X] = plain_larger(natural[N_X], size * (double)rstd);
        xhat[e] = (o->x[e] - mean) * rstd;
        z[e] = xhat[e] * o->gamma[e] + o->beta[e];
    }
    round_all(t, o->k, z);
    if (p->t[N_Z].host)
        tensor_write_floats(&p->t[N_Z], tensor_at(&p->t[N_Z], 0, 0, i, 0), o->k, z);
    sum_rows(o, z, 1, o->wt, o->k, o->n, o->sum, NULL);
    for (int64_t f = 0; f < o->n; f++)
        o->sum[f] += o->c[f];
    read_row(&p->t[N_DY], i, o->of_y, 0, dy);
    round_all(t, o->of_y, dy);
    if (o->spreads && t != HEDDLE_F32)
        squares_of_terms(o, z);
    else if (p->a.activation && o->spreads)
        squares_of_sums(o, p->a.norm, xhat, z);
    for (int64_t f = 0; f < o->n && o->spreads && t != HEDDLE_F32; f++)
        o->most_u = plain_larger(o->most_u, fabs((double)(o->sum[f] * times_rounding(o, i, f, o->sum[f]))));
    if (p->a.activation)
        activate_row(p, o, i, o->sum, dy);
    add_residual(p, o, i);
    tensor_write_floats(y, tensor_at(y, 0, 0, i, 0), o->of_y, o->sum);
    round_all(t, o->n, dy);
    sum_rows(o, dy, 1, o->w, o->n, o->k, dz, NULL);
    round_all(t, o->k, dz);
    add_dz(p, o, i, dz);
    row_backward(p, o, i, rstd, natural);
}

/* A sum over the rows, [width], and the largest sum of its terms' magnitudes. */
static void store_sum(norm_linear_problem *p, int which, const norm_work *o, const float *rows, int64_t width,
                      double natural[N_COUNT]) {
    sum_rows(o, o->ones, 1, rows, o->m, width, o->sum, &natural[which]);
    if (p->t[which].host)
        tensor_write_floats(&p->t[which], 0, width, o->sum);
}

static void backward_parameters(norm_linear_problem *p, const norm_work *o, double natural[N_COUNT]) {
    float *products = plain_zeros(o->m * o->k, sizeof *products);
    tensor *dw = &p->t[N_DW];
    for (int64_t x = 0; x < o->m * o->k; x++)
        products[x] = o->dz[x] * o->xhat[x];
    store_sum(p, N_DGAMMA, o, products, o->k, natural);
    store_sum(p, N_DBETA, o, o->dz, o->k, natural);
    store_sum(p, N_DC, o, o->dy, o->n, natural);
    for (int64_t f = 0; f < o->n && dw->host; f++) {
        sum_rows(o, o->dy + f, o->n, o->z, o->m, o->k, o->sum, &natural[N_DW]);
        tensor_write_floats(dw, tensor_at(dw, 0, 0, f, 0), o->k, o->sum);
    }
    free(products);
}

/* An activation's derivative is a difference of numbers about 1, in float32: where it is next to nothing its roundings are what natural
 * magnitudes are of. `most`: of dy. */
static void count_slopes(const norm_work *o, double most, double natural[N_COUNT]) {
    const double of_du = 0x1p-20 * most * (double)o->m,
                 of_dz = of_du * sqrt((double)o->n) * largest_norm(o->wt, o->k, o->n);
    natural[N_DC] = plain_larger(natural[N_DC], of_du);
    natural[N_DW] = plain_larger(natural[N_DW], of_du * largest_norm(o->z, o->m, o->k));
    natural[N_DBETA] = plain_larger(natural[N_DBETA], of_dz);
    natural[N_DGAMMA] = plain_larger(natural[N_DGAMMA], of_dz * largest_norm(o->xhat, o->m, o->k));
}

/* float32: the derivative is a difference of numbers about 1, whose roundings are what `slopes` is of: the largest sums of the terms'
 * magnitudes of each gradient, were it 1. */
static void measure_slopes(const norm_work *o, heddle_norm norm, double slopes[N_COUNT]) {
    double *row = plain_zeros(o->k, sizeof *row), *dbeta = plain_zeros(o->k, sizeof *dbeta);
    double *dgamma = plain_zeros(o->k, sizeof *dgamma), *dw = plain_zeros(o->k, sizeof *dw);
    for (int64_t i = 0; i < o->m; i++) {
        const float *xhat = o->xhat + i * o->k;
        double most = 0, most_gx = 0;
        plain_sizes(&(plain_terms){o->n, 1, o->slope_1 + i * o->n, NULL, o->w, o->k}, NULL, o->k, row);
        for (int64_t e = 0; e < o->k; e++) {
            const double size = fabs((double)xhat[e]), g = row[e] * fabs((double)o->gamma[e]);
            dbeta[e] += row[e];
            dgamma[e] += row[e] * size;
            most = plain_larger(most, g);
            most_gx += norm == HEDDLE_NO_NORM ? 0 : g * size / (double)o->k;
        }
        for (int64_t e = 0; e < o->k; e++)
            slopes[N_DX] =
                plain_larger(slopes[N_DX], (double)o->rstd[i] * (2 * most + fabs((double)xhat[e]) * most_gx));
    }
    slopes[N_DBETA] = plain_largest(dbeta, o->k);
    slopes[N_DGAMMA] = plain_largest(dgamma, o->k);
    for (int64_t f = 0; f < o->n; f++) {
        const plain_terms of_f = {o->m, o->n, o->slope_1 + f, NULL, o->z, o->k};
        double dbias = 0;
        for (int64_t i = 0; i < o->m; i++)
            dbias += fabs((double)o->slope_1[i * o->n + f]);
        slopes[N_DC] = plain_larger(slopes[N_DC], dbias);
        plain_sizes(&of_f, NULL, o->k, dw);
        slopes[N_DW] = plain_larger(slopes[N_DW], plain_largest(dw, o->k));
    }
    double *all[] = {row, dbeta, dgamma, dw};
    for (size_t x = 0; x < COUNT(all); x++)
        free(all[x]);
}

void plain_norm_linear(norm_linear_problem *p, plain_order order, double natural[N_COUNT], double slopes[N_COUNT],
                       double spread[N_COUNT]) {
    const int64_t m = p->a.m, k = p->a.k, n = norm_linear_extent(&p->a, 'N'), longest = k > n ? k : n;
    const int t = precision_of(p->a.dtype, p->a.features);
    norm_work o = {.m = m, .k = k, .n = n, .of_y = p->a.n, .precision = t, .order = order, .spreads = spread != NULL};
    o.rounds_du = p->a.activation != 0;
    o.rounds_xhat = t != HEDDLE_F32 && p->a.norm != HEDDLE_NO_NORM;
    o.rounds_wg = o.rounds_xhat && p->t[N_GAMMA].host;
    o.raw = t == HEDDLE_BF16 && o.rounds_wg && test_device() == HEDDLE_CUDA;
    float **const arrays[] = {&o.xhat, &o.z,        &o.dz,   &o.w,       &o.wt,   &o.dy,   &o.ones,
                              &o.x,    &o.gamma,    &o.beta, &o.c,       &o.sum,  &o.part, &o.shift,
                              &o.rstd, &o.du_error, &o.wg,   &o.slope_1, &o.bend, &o.cross};
    const int64_t sizes[] = {m * k, m * k,   m * k,   n * k, n * k, m * n, m, k,     k,     k,
                             n,     longest, longest, m,     m,     m * n, n, m * n, m * n, m * p->a.n};
    for (size_t x = 0; x < COUNT(arrays); x++)
        *arrays[x] = plain_zeros(sizes[x], sizeof(float));
    o.sums = plain_zeros(longest, sizeof *o.sums);
    memset(natural, 0, N_COUNT * sizeof *natural);
    read_row(&p->t[N_GAMMA], 0, k, 1, o.gamma);
    read_row(&p->t[N_BETA], 0, k, 0, o.beta);
    read_row(&p->t[N_C], 0, n, 0, o.c);
    for (int64_t f = 0; f < n; f++)
        read_row(&p->t[N_W], f, k, 0, o.w + f * k);
    round_all(t, n * k, o.w);
    for (int64_t f = 0; f < n; f++)
        for (int64_t e = 0; e < k; e++)
            o.wt[e * n + f] = o.w[f * k + e], o.wg[f] += o.gamma[e] * o.w[f * k + e];
    for (int64_t i = 0; i < m; i++) {
        o.ones[i] = 1;
        forward_row(p, &o, i, natural);
    }
    natural[N_Y] = natural[N_U] = largest_norm(o.z, m, k) * largest_norm(o.w, n, k);
    if (is_gated(p->a.activation)) /* a product of two of them */
        natural[N_Y] *= natural[N_Y];
    backward_parameters(p, &o, natural);
    if (p->a.activation)
        count_slopes(&o, o.most_dy, natural);
    if (slopes)
        memset(slopes, 0, N_COUNT * sizeof *slopes);
    if (slopes && p->a.activation && t == HEDDLE_F32)
        measure_slopes(&o, p->a.norm, slopes);
    if (spread) {
        memset(spread, 0, N_COUNT * sizeof *spread);
        spread[N_U] = o.raw ? o.most_u : 0;
        if (is_gated(p->a.activation)) /* a product of two that were rounded, and sums of what was */
            spread[N_Y] = t == HEDDLE_F32 ? 0 : o.most_y;
        else
            spread[N_Y] = !o.raw ? 0 : p->a.activation ? o.most_y : o.most_u;
        plain_norm_linear_spread(&o, p->a.norm, spread);
    }
    for (size_t x = 0; x < COUNT(arrays); x++)
        free(*arrays[x]);
    free(o.sums);
}

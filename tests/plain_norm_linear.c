/* SPDX-License-Identifier: Apache-2.0
 * Plain norm-linear: the norm, rounded to the dtype, then the product; every sum in float32 and in order. */
#include "plain_sums.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double larger(double a, double b) {
    return b > a ? b : a;
}

/* xhat, z and dz of all rows, and what lies on the way. */
typedef struct work {
    int64_t m, k, n; /* n: rows of W */
    int64_t of_y;    /* columns of y: half of n where an activation is of two halves */
    int precision;
    plain_order order;
    float *xhat, *z, *dz; /* [m, k] */
    float *w, *wt;        /* [n, k], [k, n] */
    float *dy;            /* [m, n]: dy, or du */
    float *
        du_error; /* [m, n]: what a rounding of u comes to in du, over the rounding's share of u; in float32 its sums, too */
    float *wg;      /* [n]: sums over W∘gamma, which is what a row's mean is multiplied with */
    float *slope_1; /* [m, n]: what du would be if act' were 1 */
    bool spreads;   /* are squares wanted? */
    bool rounds_du; /* behind an activation: u and du */
    bool rounds_xhat,
        rounds_wg;         /* in 16 bits, which kernels do that take gamma and beta out of dw's sum, and gamma into W */
    double most_dy;        /* the largest of dy */
    double most_y, most_u; /* of what roundings of u and of its terms do to y and to u */
    float *ones;           /* [m] */
    float *shift, *rstd;   /* [m]; shift: the mean, in deviations */
    float *x, *gamma, *beta, *c; /* a row of x; the parameters, or what stands for none */
    float *sum, *part;           /* [max(k, n)] */
    double *sums;                /* [max(k, n)] */
} work;

/* A row of what may not be there. */
static void read_row(const tensor *t, int64_t i, int64_t n, float none, float *x) {
    for (int64_t e = 0; e < n && !t->host; e++)
        x[e] = none;
    if (t->host)
        tensor_read_floats(t, tensor_at(t, 0, 0, i, 0), n, x);
}

/* Pairwise, so that a large mean is as exact as PyTorch's. */
static float pairwise_sum(const work *o, int64_t begin, int64_t end) {
    float sum = 0;
    if (end - begin > 8) {
        int64_t middle = begin + (end - begin) / 2;
        return pairwise_sum(o, begin, middle) + pairwise_sum(o, middle, end);
    }
    for (int64_t e = begin; e < end; e++)
        sum += o->x[plain_term(e, o->k, o->order)];
    return sum;
}

static void row_statistics(const norm_linear_problem *p, const work *o, float *mean, float *rstd) {
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
static void row_backward(norm_linear_problem *p, const work *o, int64_t i, float rstd, double natural[N_COUNT]) {
    const heddle_norm_linear *a = &p->a;
    const float *xhat = o->xhat + i * o->k, *dz = o->dz + i * o->k;
    float mean_g = 0, mean_gx = 0, *dx = o->sum;
    double most = 0, most_gx = 0;
    for (int64_t e = 0; e < a->k; e++) {
        float g = dz[e] * o->gamma[e];
        mean_g += g / (float)a->k;
        mean_gx += g * xhat[e] / (float)a->k;
        most = larger(most, fabs((double)g));
        most_gx += fabs((double)(g * xhat[e])) / (double)a->k;
    }
    if (a->norm != HEDDLE_LAYER_NORM)
        mean_g = 0;
    if (a->norm == HEDDLE_NO_NORM)
        mean_gx = 0, most_gx = 0;
    for (int64_t e = 0; e < a->k; e++) {
        float g = dz[e] * o->gamma[e];
        dx[e] = rstd * (g - mean_g - xhat[e] * mean_gx);
        natural[N_DX] = larger(natural[N_DX], (double)rstd * (2 * most + fabs((double)xhat[e]) * most_gx));
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
static void sum_rows(const work *o, const float *weight, int64_t step, const float *rows, int64_t count, int64_t width,
                     float *sum, double *largest) {
    const plain_terms terms = {count, step, weight, NULL, rows, width};
    plain_sum(&terms, width, o->order, o->part, sum);
    if (!largest || o->order != PLAIN_FORWARD)
        return;
    plain_sizes(&terms, NULL, width, o->sums);
    *largest = larger(*largest, plain_largest(o->sums, width));
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
static void squares_of_terms(const work *o, const float *z) {
    for (int64_t f = 0; f < o->n; f++) {
        o->sums[f] = 0;
        for (int64_t e = 0; e < o->k && o->rounds_xhat; e++)
            o->sums[f] += pow((double)z[e] * (double)o->w[f * o->k + e], 2);
    }
}

/* float32: squares of u's terms and of its sums as they grow; of what z was rounded from, x̂∘gamma and z itself; and twice that of their sum,
 * by which u is off with the row's rstd, the root and the quotient. [n]. */
static void squares_of_sums(const work *o, heddle_norm norm, const float *xhat, const float *z) {
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
static float times_rounding(const work *o, int64_t i, int64_t f, float u) {
    const double of_u = (double)u;
    const double shift = o->precision == HEDDLE_F32 ? (double)o->shift[i] * (double)o->wg[f] : 0;
    if (!o->spreads || of_u == 0)
        return 1;
    return (float)sqrt(1 + (o->sums[f] + shift * shift) / (of_u * of_u));
}

/* float32: what the terms of act'(u) are uncertain by, in roundings, or act(u) alone: (6)^½ each, for a function that is right to its
 * last place, two roundings, and two products. */
static float of_function(const work *o, float term, float other) {
    return o->spreads && o->precision == HEDDLE_F32 ? hypotf(term, other) * 2.4494897f : 0;
}

/* The same of u and dy at f, where the other half is `up`. `bent`: what act' of the gate is uncertain by, in roundings. */
static float gate_element(work *o, int64_t i, int64_t f, float *u, float *dy, float act, float slope, float bent) {
    const int64_t other = o->of_y + f;
    const float gate = u[f], up = u[other], of_gate = times_rounding(o, i, f, gate);
    const float of_up = times_rounding(o, i, other, up), in = dy[f];
    o->most_dy = larger(o->most_dy, fabs((double)in * (double)up));
    o->slope_1[i * o->n + f] = in * up;
    o->slope_1[i * o->n + other] = in * gate;
    o->du_error[i * o->n + f] = hypotf(in * up * bent, in * up * slope * of_up);
    o->du_error[i * o->n + other] = in * hypotf(slope * gate * of_gate, of_function(o, act, 0));
    o->most_y = larger(o->most_y, hypot((double)(slope * gate * of_gate * up), (double)(act * up * of_up)));
    dy[f] = in * up * slope;
    dy[other] = in * act;
    return act * up;
}

/* u of row i to where it is wanted, dy to du; y = act(u) in place. */
static void activate_row(norm_linear_problem *p, work *o, int64_t i, float *u, float *dy) {
    const heddle_activation activation = gate_activation(p->a.activation);
    tensor *to = &p->t[N_U];
    round_all(o->precision, o->n, u);
    if (to->host)
        tensor_write_floats(to, tensor_at(to, 0, 0, i, 0), o->n, u);
    for (int64_t f = 0; f < o->of_y; f++) {
        const float step = 0x1p-8f;
        float slope, next;
        o->most_dy = larger(o->most_dy, fabs((double)dy[f]));
        activated(activation, u[f] * (1 + step), &next);
        const float act = activated(activation, u[f], &slope), of_u = times_rounding(o, i, f, u[f]);
        const float share = u[f] != 0 ? act / u[f] : 0.5f, own = of_function(o, share, slope - share);
        const float bent = hypotf((next - slope) / step * of_u, own);
        if (is_gated(p->a.activation)) {
            u[f] = gate_element(o, i, f, u, dy, act, slope, bent);
            continue;
        }
        o->slope_1[i * o->n + f] = dy[f];
        o->du_error[i * o->n + f] = dy[f] * bent;
        o->most_y = larger(o->most_y, fabs((double)(slope * u[f] * of_u)));
        u[f] = act;
        dy[f] *= slope;
    }
    round_all(o->precision, o->n, dy);
}

/* To y of row i, which is rounded, as it is where the sum is another operation. */
static void add_residual(norm_linear_problem *p, work *o, int64_t i) {
    if (!p->t[N_RESIDUAL].host)
        return;
    round_all(o->precision, o->of_y, o->sum);
    read_row(&p->t[N_RESIDUAL], i, o->of_y, 0, o->part);
    for (int64_t f = 0; f < o->of_y; f++)
        o->sum[f] += o->part[f];
}

/* z's other gradient, which is rounded as it is added. */
static void add_dz(const norm_linear_problem *p, const work *o, int64_t i, float *dz) {
    if (!p->t[N_DZ].host)
        return;
    read_row(&p->t[N_DZ], i, o->k, 0, o->x);
    for (int64_t e = 0; e < o->k; e++)
        dz[e] += o->x[e];
    round_all(o->precision, o->k, dz);
}

static void forward_row(norm_linear_problem *p, work *o, int64_t i, double natural[N_COUNT]) {
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
        natural[N_MEAN] = larger(natural[N_MEAN], size);
        natural[N_X] = larger(natural[N_X], size * (double)rstd);
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
        o->most_u = larger(o->most_u, fabs((double)(o->sum[f] * times_rounding(o, i, f, o->sum[f]))));
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
static void store_sum(norm_linear_problem *p, int which, const work *o, const float *rows, int64_t width,
                      double natural[N_COUNT]) {
    sum_rows(o, o->ones, 1, rows, o->m, width, o->sum, &natural[which]);
    if (p->t[which].host)
        tensor_write_floats(&p->t[which], 0, width, o->sum);
}

static void backward_parameters(norm_linear_problem *p, const work *o, double natural[N_COUNT]) {
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
static void count_slopes(const work *o, double most, double natural[N_COUNT]) {
    const double of_du = 0x1p-20 * most * (double)o->m,
                 of_dz = of_du * sqrt((double)o->n) * largest_norm(o->wt, o->k, o->n);
    natural[N_DC] = larger(natural[N_DC], of_du);
    natural[N_DW] = larger(natural[N_DW], of_du * largest_norm(o->z, o->m, o->k));
    natural[N_DBETA] = larger(natural[N_DBETA], of_dz);
    natural[N_DGAMMA] = larger(natural[N_DGAMMA], of_dz * largest_norm(o->xhat, o->m, o->k));
}

/* float32: the derivative is a difference of numbers about 1, whose roundings are what `slopes` is of: the largest sums of the terms'
 * magnitudes of each gradient, were it 1. */
static void measure_slopes(const work *o, heddle_norm norm, double slopes[N_COUNT]) {
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
            most = larger(most, g);
            most_gx += norm == HEDDLE_NO_NORM ? 0 : g * size / (double)o->k;
        }
        for (int64_t e = 0; e < o->k; e++)
            slopes[N_DX] = larger(slopes[N_DX], (double)o->rstd[i] * (2 * most + fabs((double)xhat[e]) * most_gx));
    }
    slopes[N_DBETA] = plain_largest(dbeta, o->k);
    slopes[N_DGAMMA] = plain_largest(dgamma, o->k);
    for (int64_t f = 0; f < o->n; f++) {
        const plain_terms of_f = {o->m, o->n, o->slope_1 + f, NULL, o->z, o->k};
        double dbias = 0;
        for (int64_t i = 0; i < o->m; i++)
            dbias += fabs((double)o->slope_1[i * o->n + f]);
        slopes[N_DC] = larger(slopes[N_DC], dbias);
        plain_sizes(&of_f, NULL, o->k, dw);
        slopes[N_DW] = larger(slopes[N_DW], plain_largest(dw, o->k));
    }
    double *all[] = {row, dbeta, dgamma, dw};
    for (size_t x = 0; x < COUNT(all); x++)
        free(all[x]);
}

/* Of dz of row i, [k]: squares of the terms and of the sums as they grow, times gamma's. */
static void squares_of_row(const work *o, int64_t i, double *squares) {
    memset(squares, 0, (size_t)o->k * sizeof *squares);
    memset(o->part, 0, (size_t)o->k * sizeof *o->part);
    for (int64_t f = 0; f < o->n; f++)
        for (int64_t e = 0; e < o->k; e++) {
            const float term = o->dy[i * o->n + f] * o->w[f * o->k + e];
            o->part[e] += term;
            squares[e] += (double)term * (double)term + (double)o->part[e] * (double)o->part[e];
        }
}

/* Of the roundings of u and du. */
static double square_of_du(const work *o, int64_t i, int64_t f) {
    const double du = (double)o->dy[i * o->n + f], error = (double)o->du_error[i * o->n + f];
    return o->rounds_du ? du * du + error * error : 0;
}

/* Of dz of row i, [k], squares of those; and of those of `products` of du and W. */
static void squares_of_du(const work *o, int64_t i, bool products, double *squares) {
    memset(squares, 0, (size_t)o->k * sizeof *squares);
    for (int64_t f = 0; f < o->n; f++) {
        const double du = (double)o->dy[i * o->n + f], both = square_of_du(o, i, f) + (products ? du * du : 0);
        for (int64_t e = 0; e < o->k; e++)
            squares[e] += both * (double)o->w[f * o->k + e] * (double)o->w[f * o->k + e];
    }
}

/* What roundings of those squares come to in dx of row i, which is rstd times what g is apart from its mean and from xhat, or without a norm
 * g. */
static double spread_of_dx(const work *o, int64_t i, heddle_norm norm, const double *squares) {
    const float *xhat = o->xhat + i * o->k;
    const double k = (double)o->k, one = norm == HEDDLE_LAYER_NORM ? 1 : 0;
    double none = 0, once = 0, twice = 0, most = 0;
    if (norm == HEDDLE_NO_NORM)
        return sqrt(plain_largest(squares, o->k));
    for (int64_t e = 0; e < o->k; e++) {
        const double x = (double)xhat[e];
        none += squares[e];
        once += squares[e] * x;
        twice += squares[e] * x * x;
    }
    for (int64_t e = 0; e < o->k; e++) {
        const double x = (double)xhat[e], own = (one + x * x) / k;
        const double others = (one * none + 2 * one * x * once + x * x * twice) / (k * k) - own * own * squares[e];
        most = larger(most, others + (1 - own) * (1 - own) * squares[e]);
    }
    return (double)o->rstd[i] * sqrt(larger(0, most));
}

/* The rounding of a row's float32 mean shifts all of its xhat alike: to what is summed over rows it is one term a row. In 16 bits it is dz
 * that is rounded, to dgamma and dbeta, and behind an activation, where so much else is, these sums themselves. Squares of each column. */
static void measure_means(const work *o, double *dgamma, double *dbeta, double spread[N_COUNT]) {
    const bool f32 = o->precision == HEDDLE_F32;
    double gamma = 0, of_dw = 0;
    for (int64_t e = 0; e < o->k; e++) {
        double of_gamma = 0, of_beta = 0;
        for (int64_t i = 0; i < o->m; i++) {
            const double dz = (double)o->dz[i * o->k + e], xhat = (double)o->xhat[i * o->k + e];
            dgamma[e] += pow(dz * (f32 ? (double)o->shift[i] : xhat), 2);
            dbeta[e] += f32 ? 0 : dz * dz;
            of_gamma += dz * xhat;
            of_beta += dz;
        }
        dgamma[e] += f32 || !o->rounds_du ? 0 : of_gamma * of_gamma;
        dbeta[e] += f32 || !o->rounds_du ? 0 : of_beta * of_beta;
        gamma = larger(gamma, fabs((double)o->gamma[e]));
    }
    for (int64_t f = 0; f < o->n; f++) {
        double sum = 0;
        for (int64_t i = 0; i < o->m; i++)
            sum += pow((double)o->dy[i * o->n + f] * (double)o->shift[i], 2);
        of_dw = larger(of_dw, sum);
    }
    spread[N_DW] = f32 ? gamma * sqrt(of_dw) : 0;
}

/* Roundings of u and du, and of what kernels round beside them: of dx, in 16 bits those of dz, too, and of what is summed over rows, whose
 * columns' squares are added to. */
static void measure_du(const work *o, heddle_norm norm, double *dgamma, double *dbeta, double spread[N_COUNT]) {
    double *squares = plain_zeros(o->k, sizeof *squares);
    for (int64_t i = 0; i < o->m; i++) {
        squares_of_du(o, i, false, squares);
        for (int64_t e = 0; e < o->k; e++) {
            dbeta[e] += squares[e];
            dgamma[e] += squares[e] * pow((double)o->xhat[i * o->k + e], 2);
        }
        squares_of_du(o, i, o->rounds_wg, squares);
        for (int64_t e = 0; e < o->k; e++) {
            const double dz = o->rounds_xhat ? (double)o->dz[i * o->k + e] : 0;
            squares[e] = (squares[e] + dz * dz) * pow((double)o->gamma[e], 2);
        }
        spread[N_DX] = larger(spread[N_DX], spread_of_dx(o, i, norm, squares));
    }
    for (int64_t f = 0; f < o->n; f++) {
        double dbias = 0;
        memset(squares, 0, (size_t)o->k * sizeof *squares);
        for (int64_t i = 0; i < o->m; i++) {
            const double both = square_of_du(o, i, f);
            const double of_xhat = o->rounds_xhat ? pow((double)o->dy[i * o->n + f], 2) : 0;
            dbias += both;
            for (int64_t e = 0; e < o->k; e++)
                squares[e] += both * (double)o->z[i * o->k + e] * (double)o->z[i * o->k + e] +
                              of_xhat * pow((double)o->xhat[i * o->k + e] * (double)o->gamma[e], 2);
        }
        spread[N_DC] = larger(spread[N_DC], sqrt(dbias));
        spread[N_DW] = larger(spread[N_DW], sqrt(plain_largest(squares, o->k)));
    }
    free(squares);
}

/* float32: roundings of dz's terms and sums, in dx and in what is summed over rows; and of those sums, in blocks. */
static void measure_dz(const work *o, heddle_norm norm, double *dgamma, double *dbeta, double spread[N_COUNT]) {
    double *of_beta = plain_zeros(o->k, sizeof *of_beta), *of_gamma = plain_zeros(o->k, sizeof *of_gamma);
    for (int64_t i = 0; i < o->m; i++) {
        if (i % PLAIN_BLOCK == 0) {
            memset(of_beta, 0, (size_t)o->k * sizeof *of_beta);
            memset(of_gamma, 0, (size_t)o->k * sizeof *of_gamma);
        }
        squares_of_row(o, i, o->sums);
        for (int64_t e = 0; e < o->k; e++) {
            const double x = (double)o->xhat[i * o->k + e], dz = (double)o->dz[i * o->k + e];
            of_beta[e] += dz;
            of_gamma[e] += dz * x;
            dbeta[e] += o->sums[e] + of_beta[e] * of_beta[e];
            dgamma[e] += o->sums[e] * x * x + of_gamma[e] * of_gamma[e];
            dgamma[e] += norm == HEDDLE_NO_NORM ? 0 : 2 * dz * x * dz * x; /* of rstd, as in dw */
            o->sums[e] *= (double)o->gamma[e] * (double)o->gamma[e];
        }
        spread[N_DX] = larger(spread[N_DX], spread_of_dx(o, i, norm, o->sums));
    }
    free(of_beta);
    free(of_gamma);
}

/* float32: roundings of dw's terms and of their sums as they grow; and twice those of x̂∘gamma and beta, which kernels sum apart where z is
 * little beside them: of each row's rstd, by which its x̂ are off alike, the root and the quotient. */
static void measure_dw(const work *o, heddle_norm norm, double spread[N_COUNT]) {
    double most = 0;
    for (int64_t f = 0; f < o->n; f++) {
        const plain_terms of_f = {o->m, o->n, o->dy + f, NULL, o->z, o->k};
        plain_squares(&of_f, NULL, o->k, o->part, 1, o->sums);
        for (int64_t i = 0; i < o->m && norm != HEDDLE_NO_NORM; i++) {
            const double dy = (double)o->dy[i * o->n + f];
            for (int64_t e = 0; e < o->k; e++) {
                const double x = (double)o->xhat[i * o->k + e] * (double)o->gamma[e], beta = (double)o->beta[e];
                o->sums[e] += 2 * dy * dy * (x * x + beta * beta);
            }
        }
        most = larger(most, plain_largest(o->sums, o->k));
    }
    spread[N_DW] = hypot(spread[N_DW], sqrt(most));
}

/* What is rounded on the way to the gradients. */
static void measure_gradients(const work *o, heddle_norm norm, double spread[N_COUNT]) {
    double *dgamma = plain_zeros(o->k, sizeof *dgamma), *dbeta = plain_zeros(o->k, sizeof *dbeta);
    measure_means(o, dgamma, dbeta, spread);
    if (o->rounds_du || o->rounds_xhat)
        measure_du(o, norm, dgamma, dbeta, spread);
    if (o->precision == HEDDLE_F32) {
        measure_dz(o, norm, dgamma, dbeta, spread);
        measure_dw(o, norm, spread);
    }
    spread[N_DGAMMA] = sqrt(plain_largest(dgamma, o->k));
    spread[N_DBETA] = sqrt(plain_largest(dbeta, o->k));
    free(dgamma);
    free(dbeta);
}

void plain_norm_linear(norm_linear_problem *p, plain_order order, double natural[N_COUNT], double slopes[N_COUNT],
                       double spread[N_COUNT]) {
    const int64_t m = p->a.m, k = p->a.k, n = norm_linear_extent(&p->a, 'N'), longest = k > n ? k : n;
    const int t = precision_of(p->a.dtype, p->a.features);
    work o = {.m = m, .k = k, .n = n, .of_y = p->a.n, .precision = t, .order = order, .spreads = spread != NULL};
    o.rounds_du = p->a.activation != 0;
    o.rounds_xhat = t != HEDDLE_F32 && p->a.norm != HEDDLE_NO_NORM;
    o.rounds_wg = o.rounds_xhat && p->t[N_GAMMA].host;
    float **const arrays[] = {&o.xhat, &o.z, &o.dz,  &o.w,    &o.wt,    &o.dy,   &o.ones,     &o.x,  &o.gamma,
                              &o.beta, &o.c, &o.sum, &o.part, &o.shift, &o.rstd, &o.du_error, &o.wg, &o.slope_1};
    const int64_t sizes[] = {m * k, m * k, m * k,   n * k,   n * k, m * n, m,     k, k,
                             k,     n,     longest, longest, m,     m,     m * n, n, m * n};
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
        const bool raw = t == HEDDLE_BF16 && o.rounds_wg && test_device() == HEDDLE_CUDA; /* W∘gamma, with x as it is */
        spread[N_U] = raw ? o.most_u : 0;
        if (is_gated(p->a.activation)) /* a product of two that were rounded, and sums of what was */
            spread[N_Y] = t == HEDDLE_F32 ? 0 : o.most_y;
        else
            spread[N_Y] = !raw ? 0 : p->a.activation ? o.most_y : o.most_u;
        measure_gradients(&o, p->a.norm, spread);
    }
    for (size_t x = 0; x < COUNT(arrays); x++)
        free(*arrays[x]);
    free(o.sums);
}

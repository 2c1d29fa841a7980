/* SPDX-License-Identifier: Apache-2.0
 * Plain norm-linear: the norm, rounded to the dtype, then the product; every sum in float32 and in order. */
#include "common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *zeros(int64_t n, size_t size) {
    void *p = calloc((size_t)n + 1, size);
    assert_non_null(p);
    return p;
}

static double larger(double a, double b) {
    return b > a ? b : a;
}

static int64_t order(int64_t x, int64_t n, bool backwards) {
    return backwards ? n - 1 - x : x;
}

static double norm_of(const float *a, int64_t n) {
    double sum = 0;
    for (int64_t e = 0; e < n; e++)
        sum += (double)a[e] * (double)a[e];
    return sqrt(sum);
}

/* xhat, z and dz of all rows, and what lies on the way. */
typedef struct work {
    int64_t m, k, n;
    int precision;
    bool backwards;
    float *xhat, *z, *dz;        /* [m, k] */
    float *w, *wt;               /* [n, k], [k, n] */
    float *dy;                   /* [m, n] */
    float *ones;                 /* [m] */
    float *x, *gamma, *beta, *c; /* a row of x; the parameters, or what stands for none */
    float *sum;                  /* [max(k, n)] */
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
        sum += o->x[order(e, o->k, o->backwards)];
    return sum;
}

static void row_statistics(const norm_linear_problem *p, const work *o, float *mean, float *rstd) {
    const heddle_norm_linear *a = &p->a;
    float squares = 0;
    *mean = a->norm == HEDDLE_RMS_NORM ? 0 : pairwise_sum(o, 0, a->k) / (float)a->k;
    for (int64_t e = 0; e < a->k; e++) {
        float centred = o->x[order(e, a->k, o->backwards)] - *mean;
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
    if (a->norm == HEDDLE_RMS_NORM)
        mean_g = 0;
    for (int64_t e = 0; e < a->k; e++) {
        float g = dz[e] * o->gamma[e];
        dx[e] = rstd * (g - mean_g - xhat[e] * mean_gx);
        natural[N_DX] = larger(natural[N_DX], (double)rstd * (2 * most + fabs((double)xhat[e]) * most_gx));
    }
    if (p->t[N_DX].host)
        tensor_write_floats(&p->t[N_DX], tensor_at(&p->t[N_DX], 0, 0, i, 0), a->k, dx);
}

/* sum[e] = sum_x weight[x * step] * rows[x, e] for x in order, each sum by itself as written: the terms of one are added
 * one by one. */
FOR_WIDE_VECTORS static void sum_rows(const float *weight, int64_t step, const float *rows, int64_t count,
                                      int64_t width, bool backwards, float *restrict sum) {
    memset(sum, 0, (size_t)width * sizeof *sum);
    int64_t y = 0;
    for (; y + 4 <= count; y += 4) {
        const int64_t x = order(y, count, backwards), next = backwards ? -1 : 1;
        const float *at = weight + x * step, w0 = at[0], w1 = at[next * step], w2 = at[2 * next * step],
                    w3 = at[3 * next * step];
        const float *restrict r0 = rows + x * width, *restrict r1 = r0 + next * width, *restrict r2 = r1 + next * width,
                              *restrict r3 = r2 + next * width;
        for (int64_t e = 0; e < width; e++)
            sum[e] = (((sum[e] + w0 * r0[e]) + w1 * r1[e]) + w2 * r2[e]) + w3 * r3[e];
    }
    for (; y < count; y++) {
        const int64_t x = order(y, count, backwards);
        for (int64_t e = 0; e < width; e++)
            sum[e] += weight[x * step] * rows[x * width + e];
    }
}

/* The largest sum_x |weight[x * step] * rows[x, e]|. */
FOR_WIDE_VECTORS static double largest_sum(const float *weight, int64_t step, const float *rows, int64_t count,
                                           int64_t width, double *restrict sums) {
    double most = 0;
    memset(sums, 0, (size_t)width * sizeof *sums);
    for (int64_t x = 0; x < count; x++) {
        const float w = weight[x * step];
        for (int64_t e = 0; e < width; e++)
            sums[e] += (double)fabsf(w * rows[x * width + e]);
    }
    for (int64_t e = 0; e < width; e++)
        most = larger(most, sums[e]);
    return most;
}

static double largest_norm(const float *rows, int64_t count, int64_t width) {
    double most = 0;
    for (int64_t x = 0; x < count; x++)
        most = fmax(most, norm_of(rows + x * width, width));
    return most;
}

static void forward_row(norm_linear_problem *p, const work *o, int64_t i, double natural[N_COUNT]) {
    const int t = o->precision;
    float mean, rstd, *xhat = o->xhat + i * o->k, *z = o->z + i * o->k, *dy = o->dy + i * o->n, *dz = o->dz + i * o->k;
    tensor *y = &p->t[N_Y];
    read_row(&p->t[N_X], i, o->k, 0, o->x);
    row_statistics(p, o, &mean, &rstd);
    if (p->t[N_MEAN].host)
        tensor_raw_set(&p->t[N_MEAN], i, (double)mean);
    if (p->t[N_RSTD].host)
        tensor_raw_set(&p->t[N_RSTD], i, (double)rstd);
    for (int64_t e = 0; e < o->k; e++) {
        natural[N_MEAN] = larger(natural[N_MEAN], p->a.norm == HEDDLE_RMS_NORM ? 0 : fabs((double)o->x[e]));
        xhat[e] = (o->x[e] - mean) * rstd;
        z[e] = xhat[e] * o->gamma[e] + o->beta[e];
    }
    round_all(t, o->k, z);
    sum_rows(z, 1, o->wt, o->k, o->n, o->backwards, o->sum);
    for (int64_t f = 0; f < o->n; f++)
        o->sum[f] += o->c[f];
    tensor_write_floats(y, tensor_at(y, 0, 0, i, 0), o->n, o->sum);
    read_row(&p->t[N_DY], i, o->n, 0, dy);
    round_all(t, o->n, dy);
    sum_rows(dy, 1, o->w, o->n, o->k, o->backwards, dz);
    round_all(t, o->k, dz);
    row_backward(p, o, i, rstd, natural);
}

/* A sum over the rows, [width], and the largest sum of its terms' magnitudes. */
static void store_sum(norm_linear_problem *p, int which, const work *o, const float *rows, int64_t width,
                      double natural[N_COUNT]) {
    sum_rows(o->ones, 1, rows, o->m, width, o->backwards, o->sum);
    if (p->t[which].host)
        tensor_write_floats(&p->t[which], 0, width, o->sum);
    natural[which] = largest_sum(o->ones, 1, rows, o->m, width, o->sums);
}

static void backward_parameters(norm_linear_problem *p, const work *o, bool measure, double natural[N_COUNT]) {
    float *products = zeros(o->m * o->k, sizeof *products);
    tensor *dw = &p->t[N_DW];
    for (int64_t x = 0; x < o->m * o->k; x++)
        products[x] = o->dz[x] * o->xhat[x];
    store_sum(p, N_DGAMMA, o, products, o->k, natural);
    store_sum(p, N_DBETA, o, o->dz, o->k, natural);
    store_sum(p, N_DC, o, o->dy, o->n, natural);
    for (int64_t f = 0; f < o->n && dw->host; f++) {
        sum_rows(o->dy + f, o->n, o->z, o->m, o->k, o->backwards, o->sum);
        tensor_write_floats(dw, tensor_at(dw, 0, 0, f, 0), o->k, o->sum);
        if (measure)
            natural[N_DW] = larger(natural[N_DW], largest_sum(o->dy + f, o->n, o->z, o->m, o->k, o->sums));
    }
    free(products);
}

void plain_norm_linear(norm_linear_problem *p, bool backwards, double natural[N_COUNT]) {
    const int64_t m = p->a.m, k = p->a.k, n = p->a.n, longest = k > n ? k : n;
    const int t = precision_of(p->a.dtype, p->a.features);
    double unused[N_COUNT], *const measured = natural ? natural : unused;
    work o = {.m = m, .k = k, .n = n, .precision = t, .backwards = backwards};
    float **const arrays[] = {&o.xhat, &o.z, &o.dz, &o.w, &o.wt, &o.dy, &o.ones, &o.x, &o.gamma, &o.beta, &o.c, &o.sum};
    const int64_t sizes[] = {m * k, m * k, m * k, n * k, n * k, m * n, m, k, k, k, n, longest};
    for (size_t x = 0; x < COUNT(arrays); x++)
        *arrays[x] = zeros(sizes[x], sizeof(float));
    o.sums = zeros(longest, sizeof *o.sums);
    memset(measured, 0, N_COUNT * sizeof *measured);
    read_row(&p->t[N_GAMMA], 0, k, 1, o.gamma);
    read_row(&p->t[N_BETA], 0, k, 0, o.beta);
    read_row(&p->t[N_C], 0, n, 0, o.c);
    for (int64_t f = 0; f < n; f++)
        read_row(&p->t[N_W], f, k, 0, o.w + f * k);
    round_all(t, n * k, o.w);
    for (int64_t f = 0; f < n; f++)
        for (int64_t e = 0; e < k; e++)
            o.wt[e * n + f] = o.w[f * k + e];
    for (int64_t i = 0; i < m; i++) {
        o.ones[i] = 1;
        forward_row(p, &o, i, measured);
    }
    measured[N_Y] = largest_norm(o.z, m, k) * largest_norm(o.w, n, k);
    backward_parameters(p, &o, natural != NULL, measured);
    for (size_t x = 0; x < COUNT(arrays); x++)
        free(*arrays[x]);
    free(o.sums);
}

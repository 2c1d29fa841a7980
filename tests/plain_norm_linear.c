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

static int64_t order(int64_t x, int64_t n, bool backwards) {
    return backwards ? n - 1 - x : x;
}

static double norm_of(const float *a, int64_t n) {
    double sum = 0;
    for (int64_t e = 0; e < n; e++)
        sum += (double)a[e] * (double)a[e];
    return sqrt(sum);
}

static float element(const tensor *t, int64_t i, int64_t e, float none) {
    return t->host ? (float)tensor_get(t, 0, 0, i, e) : none;
}

/* Of row i, pairwise, so that a large mean is as exact as PyTorch's. */
static float pairwise_sum(const norm_linear_problem *p, int64_t i, int64_t begin, int64_t end, bool backwards) {
    float sum = 0;
    if (end - begin > 8) {
        int64_t middle = begin + (end - begin) / 2;
        return pairwise_sum(p, i, begin, middle, backwards) + pairwise_sum(p, i, middle, end, backwards);
    }
    for (int64_t e = begin; e < end; e++)
        sum += element(&p->t[N_X], i, order(e, p->a.k, backwards), 0);
    return sum;
}

static void row_statistics(const norm_linear_problem *p, int64_t i, bool backwards, float *mean, float *rstd) {
    const heddle_norm_linear *a = &p->a;
    float squares = 0;
    *mean = a->norm == HEDDLE_RMS_NORM ? 0 : pairwise_sum(p, i, 0, a->k, backwards) / (float)a->k;
    for (int64_t e = 0; e < a->k; e++) {
        float centred = element(&p->t[N_X], i, order(e, a->k, backwards), 0) - *mean;
        squares += centred * centred;
    }
    *rstd = 1 / sqrtf(squares / (float)a->k + (float)a->eps);
}

/* The input's gradient of one row: of the norm from dz, all in float32. */
static void row_backward(norm_linear_problem *p, int64_t i, const float *xhat, const float *dz, float rstd,
                         double natural[N_COUNT]) {
    const heddle_norm_linear *a = &p->a;
    float mean_g = 0, mean_gx = 0;
    double most = 0, most_gx = 0;
    for (int64_t e = 0; e < a->k; e++) {
        float g = dz[e] * element(&p->t[N_GAMMA], 0, e, 1);
        mean_g += g / (float)a->k;
        mean_gx += g * xhat[e] / (float)a->k;
        most = fmax(most, fabs((double)g));
        most_gx += fabs((double)(g * xhat[e])) / (double)a->k;
    }
    if (a->norm == HEDDLE_RMS_NORM)
        mean_g = 0;
    for (int64_t e = 0; e < a->k; e++) {
        float g = dz[e] * element(&p->t[N_GAMMA], 0, e, 1);
        if (p->t[N_DX].host)
            tensor_set(&p->t[N_DX], 0, 0, i, e, (double)(rstd * (g - mean_g - xhat[e] * mean_gx)));
        natural[N_DX] = fmax(natural[N_DX], (double)rstd * (2 * most + fabs((double)xhat[e]) * most_gx));
    }
}

/* sum[e] = sum_x weight[x * step] * rows[x, e] for x in order, each sum by itself as written: the terms of one are added one by one. */
static void sum_rows(const float *weight, int64_t step, const float *rows, int64_t count, int64_t width, bool backwards,
                     float *sum) {
    memset(sum, 0, (size_t)width * sizeof *sum);
    for (int64_t y = 0; y < count; y++) {
        const int64_t x = order(y, count, backwards);
        const float w = weight[x * step], *row = rows + x * width;
        for (int64_t e = 0; e < width; e++)
            sum[e] += w * row[e];
    }
}

/* The largest sum_x |weight[x * step] * rows[x, e]|. */
static double largest_sum(const float *weight, int64_t step, const float *rows, int64_t count, int64_t width,
                          double *sums) {
    double most = 0;
    memset(sums, 0, (size_t)width * sizeof *sums);
    for (int64_t x = 0; x < count; x++)
        for (int64_t e = 0; e < width; e++)
            sums[e] += (double)fabsf(weight[x * step] * rows[x * width + e]);
    for (int64_t e = 0; e < width; e++)
        most = fmax(most, sums[e]);
    return most;
}

static double largest_norm(const float *rows, int64_t count, int64_t width) {
    double most = 0;
    for (int64_t x = 0; x < count; x++)
        most = fmax(most, norm_of(rows + x * width, width));
    return most;
}

/* xhat, z and dz of all rows, and what lies on the way. */
typedef struct work {
    int64_t m, k, n;
    bool backwards;
    float *xhat, *z, *dz; /* [m, k] */
    float *w, *wt;        /* [n, k], [k, n] */
    float *dy;            /* [m, n] */
    float *ones;          /* [m] */
    float *sum;           /* [max(k, n)] */
    double *sums;         /* [max(k, n)] */
} work;

static void forward_row(norm_linear_problem *p, const work *o, int64_t i, double natural[N_COUNT]) {
    const heddle_norm_linear *a = &p->a;
    const int t = precision_of(a->dtype, a->features);
    float mean, rstd, *xhat = o->xhat + i * o->k, *z = o->z + i * o->k;
    row_statistics(p, i, o->backwards, &mean, &rstd);
    if (p->t[N_MEAN].host)
        tensor_raw_set(&p->t[N_MEAN], i, (double)mean);
    if (p->t[N_RSTD].host)
        tensor_raw_set(&p->t[N_RSTD], i, (double)rstd);
    for (int64_t e = 0; e < o->k; e++) {
        float x = element(&p->t[N_X], i, e, 0);
        natural[N_MEAN] = fmax(natural[N_MEAN], a->norm == HEDDLE_RMS_NORM ? 0 : fabs((double)x));
        xhat[e] = (x - mean) * rstd;
        z[e] = round_to(t, xhat[e] * element(&p->t[N_GAMMA], 0, e, 1) + element(&p->t[N_BETA], 0, e, 0));
    }
    sum_rows(z, 1, o->wt, o->k, o->n, o->backwards, o->sum);
    for (int64_t f = 0; f < o->n; f++) {
        tensor_set(&p->t[N_Y], 0, 0, i, f, (double)(o->sum[f] + element(&p->t[N_C], 0, f, 0)));
        o->dy[i * o->n + f] = round_to(t, element(&p->t[N_DY], i, f, 0));
    }
    sum_rows(o->dy + i * o->n, 1, o->w, o->n, o->k, o->backwards, o->sum);
    for (int64_t e = 0; e < o->k; e++)
        o->dz[i * o->k + e] = round_to(t, o->sum[e]);
    row_backward(p, i, xhat, o->dz + i * o->k, rstd, natural);
}

/* A sum over the rows, [width], and the largest sum of its terms' magnitudes. */
static void store_sum(norm_linear_problem *p, int which, const work *o, const float *weight, const float *rows,
                      int64_t width, double natural[N_COUNT]) {
    sum_rows(weight, 1, rows, o->m, width, o->backwards, o->sum);
    for (int64_t e = 0; e < width && p->t[which].host; e++)
        tensor_raw_set(&p->t[which], e, (double)o->sum[e]);
    natural[which] = largest_sum(weight, 1, rows, o->m, width, o->sums);
}

static void backward_parameters(norm_linear_problem *p, const work *o, double natural[N_COUNT]) {
    float *products = zeros(o->m * o->k, sizeof *products);
    for (int64_t x = 0; x < o->m * o->k; x++)
        products[x] = o->dz[x] * o->xhat[x];
    store_sum(p, N_DGAMMA, o, o->ones, products, o->k, natural);
    store_sum(p, N_DBETA, o, o->ones, o->dz, o->k, natural);
    store_sum(p, N_DC, o, o->ones, o->dy, o->n, natural);
    for (int64_t f = 0; f < o->n && p->t[N_DW].host; f++) {
        sum_rows(o->dy + f, o->n, o->z, o->m, o->k, o->backwards, o->sum);
        for (int64_t e = 0; e < o->k; e++)
            tensor_set(&p->t[N_DW], 0, 0, f, e, (double)o->sum[e]);
        natural[N_DW] = fmax(natural[N_DW], largest_sum(o->dy + f, o->n, o->z, o->m, o->k, o->sums));
    }
    free(products);
}

void plain_norm_linear(norm_linear_problem *p, bool backwards, double natural[N_COUNT]) {
    const int64_t m = p->a.m, k = p->a.k, n = p->a.n, longest = k > n ? k : n;
    const int t = precision_of(p->a.dtype, p->a.features);
    work o = {.m = m, .k = k, .n = n, .backwards = backwards};
    float **const arrays[] = {&o.xhat, &o.z, &o.dz, &o.w, &o.wt, &o.dy, &o.ones, &o.sum};
    const int64_t sizes[] = {m * k, m * k, m * k, n * k, n * k, m * n, m, longest};
    for (size_t x = 0; x < COUNT(arrays); x++)
        *arrays[x] = zeros(sizes[x], sizeof(float));
    o.sums = zeros(longest, sizeof *o.sums);
    memset(natural, 0, N_COUNT * sizeof *natural);
    for (int64_t f = 0; f < n; f++)
        for (int64_t e = 0; e < k; e++)
            o.w[f * k + e] = o.wt[e * n + f] = round_to(t, element(&p->t[N_W], f, e, 0));
    for (int64_t i = 0; i < m; i++) {
        o.ones[i] = 1;
        forward_row(p, &o, i, natural);
    }
    natural[N_Y] = largest_norm(o.z, m, k) * largest_norm(o.w, n, k);
    backward_parameters(p, &o, natural);
    for (size_t x = 0; x < COUNT(arrays); x++)
        free(*arrays[x]);
    free(o.sums);
}

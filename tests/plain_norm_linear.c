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

/* Pairwise, so that a large mean is as exact as PyTorch's. */
static float pairwise_sum(const tensor *t, int64_t i, int64_t begin, int64_t end) {
    float sum = 0;
    if (end - begin > 8) {
        int64_t middle = begin + (end - begin) / 2;
        return pairwise_sum(t, i, begin, middle) + pairwise_sum(t, i, middle, end);
    }
    for (int64_t e = begin; e < end; e++)
        sum += element(t, i, e, 0);
    return sum;
}

static void row_statistics(const norm_linear_problem *p, int64_t i, float *mean, float *rstd) {
    const heddle_norm_linear *a = &p->a;
    float squares = 0;
    *mean = a->norm == HEDDLE_RMS_NORM ? 0 : pairwise_sum(&p->t[N_X], i, 0, a->k) / (float)a->k;
    for (int64_t e = 0; e < a->k; e++) {
        float centred = element(&p->t[N_X], i, e, 0) - *mean;
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

void plain_norm_linear(norm_linear_problem *p, bool backwards, double natural[N_COUNT]) {
    const heddle_norm_linear *a = &p->a;
    int64_t m = a->m, k = a->k, n = a->n;
    const int t = precision_of(a->dtype, a->features);
    memset(natural, 0, N_COUNT * sizeof *natural);
    float *xhat = zeros(m * k, sizeof *xhat), *z = zeros(m * k, sizeof *z), *dz = zeros(m * k, sizeof *dz);
    float *w = zeros(n * k, sizeof *w), *dy = zeros(m * n, sizeof *dy), *rstd = zeros(m, sizeof *rstd);
    for (int64_t f = 0; f < n; f++)
        for (int64_t e = 0; e < k; e++)
            w[f * k + e] = round_to(t, element(&p->t[N_W], f, e, 0));
    for (int64_t i = 0; i < m; i++) {
        float mean;
        row_statistics(p, i, &mean, &rstd[i]);
        if (p->t[N_MEAN].host)
            tensor_raw_set(&p->t[N_MEAN], i, (double)mean);
        if (p->t[N_RSTD].host)
            tensor_raw_set(&p->t[N_RSTD], i, (double)rstd[i]);
        for (int64_t e = 0; e < k; e++) {
            float x = element(&p->t[N_X], i, e, 0);
            natural[N_MEAN] = fmax(natural[N_MEAN], a->norm == HEDDLE_RMS_NORM ? 0 : fabs((double)x));
            xhat[i * k + e] = (x - mean) * rstd[i];
            z[i * k + e] =
                round_to(t, xhat[i * k + e] * element(&p->t[N_GAMMA], 0, e, 1) + element(&p->t[N_BETA], 0, e, 0));
        }
        for (int64_t f = 0; f < n; f++) {
            float sum = 0;
            for (int64_t e = 0; e < k; e++)
                sum += z[i * k + order(e, k, backwards)] * w[f * k + order(e, k, backwards)];
            tensor_set(&p->t[N_Y], 0, 0, i, f, (double)(sum + element(&p->t[N_BIAS], 0, f, 0)));
            natural[N_Y] = fmax(natural[N_Y], norm_of(z + i * k, k) * norm_of(w + f * k, k));
            dy[i * n + f] = round_to(t, element(&p->t[N_DY], i, f, 0));
        }
        for (int64_t e = 0; e < k; e++) {
            float sum = 0;
            for (int64_t f = 0; f < n; f++)
                sum += dy[i * n + order(f, n, backwards)] * w[order(f, n, backwards) * k + e];
            dz[i * k + e] = round_to(t, sum);
        }
        row_backward(p, i, xhat + i * k, dz + i * k, rstd[i], natural);
    }
    for (int64_t e = 0; e < k; e++) {
        float dgamma = 0, dbeta = 0;
        double most = 0, most_beta = 0;
        for (int64_t y = 0; y < m; y++) {
            int64_t i = order(y, m, backwards);
            dgamma += dz[i * k + e] * xhat[i * k + e];
            dbeta += dz[i * k + e];
            most += fabs((double)(dz[i * k + e] * xhat[i * k + e]));
            most_beta += fabs((double)dz[i * k + e]);
        }
        if (p->t[N_DGAMMA].host)
            tensor_raw_set(&p->t[N_DGAMMA], e, (double)dgamma);
        if (p->t[N_DBETA].host)
            tensor_raw_set(&p->t[N_DBETA], e, (double)dbeta);
        natural[N_DGAMMA] = fmax(natural[N_DGAMMA], most);
        natural[N_DBETA] = fmax(natural[N_DBETA], most_beta);
    }
    for (int64_t f = 0; f < n; f++) {
        float dbias = 0;
        double most = 0;
        for (int64_t y = 0; y < m; y++) {
            int64_t i = order(y, m, backwards);
            dbias += dy[i * n + f];
            most += fabs((double)dy[i * n + f]);
        }
        if (p->t[N_DBIAS].host)
            tensor_raw_set(&p->t[N_DBIAS], f, (double)dbias);
        natural[N_DBIAS] = fmax(natural[N_DBIAS], most);
        for (int64_t e = 0; e < k && p->t[N_DW].host; e++) {
            float sum = 0;
            most = 0;
            for (int64_t y = 0; y < m; y++) {
                int64_t i = order(y, m, backwards);
                sum += dy[i * n + f] * z[i * k + e];
                most += fabs((double)(dy[i * n + f] * z[i * k + e]));
            }
            tensor_set(&p->t[N_DW], 0, 0, f, e, (double)sum);
            natural[N_DW] = fmax(natural[N_DW], most);
        }
    }
    float *all[] = {xhat, z, dz, w, dy, rstd};
    for (size_t x = 0; x < COUNT(all); x++)
        free(all[x]);
}

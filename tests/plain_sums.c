/* SPDX-License-Identifier: Apache-2.0
 * The sums of the plain computations. */
#include "plain_sums.h"

#include <stdlib.h>

void *plain_zeros(int64_t n, size_t size) {
    void *p = calloc((size_t)n + 1, size);
    assert_non_null(p);
    return p;
}

double plain_norm(const float *a, int64_t n) {
    double sum = 0;
    for (int64_t e = 0; e < n; e++)
        sum += (double)a[e] * (double)a[e];
    return sqrt(sum);
}

int64_t plain_term(int64_t x, int64_t n, plain_order order) {
    switch (order) {
    case PLAIN_REVERSED: return n - 1 - x;
    case PLAIN_ENDS: return x % 2 ? n - 1 - x / 2 : x / 2;
    default: return x;
    }
}

/* sum[e] += weight·row[e], of one or of four rows one after the other: the result is the same, with fewer loads. */
FOR_WIDE_VECTORS static void add_rows(const float *const row[4], const float weight[4], int count, int64_t width,
                                      float *restrict sum) {
    const float *restrict a = row[0], *restrict b = row[1], *restrict c = row[2], *restrict d = row[3];
    if (count == 4) {
        for (int64_t e = 0; e < width; e++)
            sum[e] = (((sum[e] + weight[0] * a[e]) + weight[1] * b[e]) + weight[2] * c[e]) + weight[3] * d[e];
        return;
    }
    for (int x = 0; x < count; x++)
        for (int64_t e = 0; e < width; e++)
            sum[e] += weight[x] * row[x][e];
}

/* The terms from place `begin` to `end`, added to sum. */
static void add_terms(const plain_terms *t, int64_t begin, int64_t end, int64_t width, plain_order order, float *sum) {
    const float *row[4] = {0};
    float weight[4] = {0};
    int count = 0;
    for (int64_t y = begin; y < end; y++) {
        const int64_t x = plain_term(y, t->count, order);
        if (t->sees && !t->sees[x * t->step])
            continue;
        row[count] = t->rows + x * t->pitch;
        weight[count++] = t->weight[x * t->step];
        if (count == 4) {
            add_rows(row, weight, 4, width, sum);
            count = 0;
        }
    }
    add_rows(row, weight, count, width, sum);
}

void plain_sum(const plain_terms *t, int64_t width, plain_order order, float *part, float *sum) {
    memset(sum, 0, (size_t)width * sizeof *sum);
    if (order != PLAIN_BLOCKED) {
        add_terms(t, 0, t->count, width, order, sum);
        return;
    }
    for (int64_t begin = 0; begin < t->count; begin += PLAIN_BLOCK) {
        const int64_t end = begin + PLAIN_BLOCK < t->count ? begin + PLAIN_BLOCK : t->count;
        memset(part, 0, (size_t)width * sizeof *part);
        add_terms(t, begin, end, width, order, part);
        for (int64_t e = 0; e < width; e++)
            sum[e] += part[e];
    }
}

FOR_WIDE_VECTORS void plain_sizes(const plain_terms *t, const double *size, int64_t width, double *restrict most) {
    memset(most, 0, (size_t)width * sizeof *most);
    for (int64_t x = 0; x < t->count; x++) {
        const float *restrict row = t->rows + x * t->pitch;
        const double of = size ? size[x * t->step] : fabs((double)t->weight[x * t->step]);
        if (!t->sees || t->sees[x * t->step])
            for (int64_t e = 0; e < width; e++)
                most[e] += of * fabs((double)row[e]);
    }
}

FOR_WIDE_VECTORS void plain_squares(const plain_terms *t, const double *of, int64_t width, float *restrict part,
                                    double share, double *restrict most) {
    memset(most, 0, (size_t)width * sizeof *most);
    for (int64_t x = 0; x < t->count; x++) {
        if (part && x % PLAIN_BLOCK == 0)
            memset(part, 0, (size_t)width * sizeof *part);
        const float *restrict row = t->rows + x * t->pitch;
        const double weight = of ? of[x * t->step] : (double)t->weight[x * t->step];
        if (t->sees && !t->sees[x * t->step])
            continue;
        for (int64_t e = 0; e < width; e++)
            most[e] += weight * weight * (double)row[e] * (double)row[e];
        for (int64_t e = 0; e < width && part; e++) {
            part[e] += t->weight[x * t->step] * row[e];
            most[e] += share * (double)part[e] * (double)part[e];
        }
    }
}

double plain_largest(const double *x, int64_t n) {
    double most = 0;
    for (int64_t e = 0; e < n; e++)
        most = x[e] > most ? x[e] : most;
    return most;
}

void plain_add(plain_row *r, int64_t at, float x) {
    r->chain += x;
    r->lane[at % (int64_t)COUNT(r->lane)] += x;
}

float plain_total(const plain_row *r, plain_order order) {
    float lane[COUNT(r->lane)];
    memcpy(lane, r->lane, sizeof lane);
    for (size_t half = COUNT(lane) / 2; half > 0; half /= 2)
        for (size_t x = 0; x < half; x++)
            lane[x] += lane[x + half];
    return order == PLAIN_BLOCKED ? lane[0] : r->chain;
}

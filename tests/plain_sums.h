/* SPDX-License-Identifier: Apache-2.0
 * The sums of the plain computations: in float32, each rounded after every product and every term, in one of the orders
 * of plain_order. They run along rows, so that the compiler makes vectors of them: each element is a sum by itself. */
#ifndef HEDDLE_TESTS_PLAIN_SUMS_H
#define HEDDLE_TESTS_PLAIN_SUMS_H

#include "common.h"

/* The term that comes at place x of n. */
int64_t plain_term(int64_t x, int64_t n, plain_order order);

/* The terms weight[x * step]·rows[x, ...] for those x of count whose sees[x * step] is true; NULL: for all. */
typedef struct plain_terms {
    int64_t count, step;
    const float *weight;
    const bool *sees;
    const float *rows;
    int64_t pitch;
} plain_terms;

/* Their sum, [width]; `part` is room for as much. */
void plain_sum(const plain_terms *t, int64_t width, plain_order order, float *part, float *sum);
/* Sums of magnitudes, size[x * step]·|rows[x]|; without sizes the weights'. */
void plain_sizes(const plain_terms *t, const double *size, int64_t width, double *most);

/* Sums of squares of the terms, with weights `of` in place of theirs; with room for a row in `part` also `share` of those of what is
 * rounded in adding them up, in blocks. */
void plain_squares(const plain_terms *t, const double *of, int64_t width, float *part, double share, double *most);

double plain_norm(const float *a, int64_t n);
double plain_largest(const double *x, int64_t n);
/* n elements and one, so that there is always something. */
void *plain_zeros(int64_t n, size_t size);

/* The sum of a row's weights, or of what they are multiplied with: one chain, or, where sums are in blocks, in the lanes of a vector. */
typedef struct plain_row {
    float chain, lane[16];
} plain_row;
void plain_add(plain_row *r, int64_t at, float x);
float plain_total(const plain_row *r, plain_order order);

#endif

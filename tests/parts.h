/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_ACCUMULATE: a problem's keys in parts, one call after another. */
#ifndef HEDDLE_TESTS_PARTS_H
#define HEDDLE_TESTS_PARTS_H

#include "common.h"

/* What is added to lies there before: a number that no sum cancels. */
#define THERE 0.25

/* Numbers as the test sees them, and where the library does, which without a GPU is the same. */
typedef struct numbers {
    heddle_device device;
    size_t bytes;
    void *host, *block;
} numbers;

numbers numbers_new(heddle_device device, heddle_dtype type, int64_t n, double value);
void numbers_free(numbers *x);
void numbers_upload(const numbers *x);
void numbers_download(const numbers *x);

/* The sums of a problem in float (float64's double), contiguous but for `gap` numbers behind each row of gradients. */
typedef struct sums {
    heddle_dtype real;
    int64_t gap;
    numbers o, lse, dq, dk, dv;
} sums;

sums sums_new(const heddle_attention *a, int64_t gap);
/* Has nobody written behind the rows of `columns` of a gradient that has been downloaded? */
bool sums_gaps_unchanged(const sums *s, const numbers *of, int64_t columns);
void sums_free(sums *s);

/* Keys first .. end-1 of the problem; the sinks go with the keys at 0. Prints what went wrong and returns false. */
bool run_part(const attention_problem *p, const sums *s, heddle_pass pass, int64_t first, int64_t end);

/* Backward of the first `end` keys without HEDDLE_ACCUMULATE, to p's own dq, dk and dv; its o and lse are of all keys. As run_part. */
bool run_share(const attention_problem *p, int64_t end);

#endif

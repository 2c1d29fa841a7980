/* SPDX-License-Identifier: Apache-2.0
 * Both operations as a textbook has them: whole matrices, sums in float32, each intermediate tensor rounded to the type. Its
 * error is what the kernels' error is measured by. Attention's sums come in several orders, since a largest error is a matter of
 * luck, too.
 *
 * Where the result is small because terms cancel, any order of summation but one loses more than that. So each element
 * also gets `terms`: the root of the sum of the squares of what was added up for it, an estimate of the noise that
 * roundings leave, in units of one rounding. During the run these arrays hold the squares. */
#ifndef VERIFY_PLAIN_H
#define VERIFY_PLAIN_H

#include "verify.h"

/* x in the type and back. */
float plain_rounded(heddle_dtype dtype, double x);

static inline double square(double x) {
    return x * x;
}

void plain_attention(const problem *p, arena *m, heddle_dtype dtype, plain_order order, outcome *out, outcome *terms);
void plain_norm_linear(const problem *p, arena *m, heddle_dtype dtype, outcome *out, outcome *terms);

#endif

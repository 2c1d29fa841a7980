/* SPDX-License-Identifier: Apache-2.0
 * What plain norm-linear leaves of a problem for those that ask how far roundings may go. */
#ifndef HEDDLE_PLAIN_NORM_LINEAR_H
#define HEDDLE_PLAIN_NORM_LINEAR_H

#include "plain_sums.h"

/* xhat, z and dz of all rows, and what lies on the way. */
typedef struct norm_work {
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
    float *bend;    /* [m, n]: du over what changes u by little */
    float *cross;   /* [m, of_y]: of a half of u and the du of the other, either way */
    float *slope_1; /* [m, n]: what du would be if act' were 1 */
    bool spreads;   /* are squares wanted? */
    bool rounds_du; /* behind an activation: u and du */
    bool raw;       /* in bfloat16 on a GPU, which multiplies x as it is: W∘gamma is rounded once for all rows */
    bool rounds_xhat,
        rounds_wg;         /* in 16 bits, which kernels do that take gamma and beta out of dw's sum, and gamma into W */
    double most_dy;        /* the largest of dy */
    double most_y, most_u; /* of what roundings of u and of its terms do to y and to u */
    float *ones;           /* [m] */
    float *shift, *rstd;   /* [m]; shift: the mean, in deviations */
    float *x, *gamma, *beta, *c; /* a row of x; the parameters, or what stands for none */
    float *sum, *part;           /* [max(k, n)] */
    double *sums;                /* [max(k, n)] */
} norm_work;

static inline double plain_larger(double a, double b) {
    return b > a ? b : a;
}

/* Of the gradients: the root of the sum of squares of what is rounded on the way (docs/design.md, section 4); 0: nothing is. */
void plain_norm_linear_spread(const norm_work *o, heddle_norm norm, double spread[N_COUNT]);

#endif

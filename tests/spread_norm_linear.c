/* SPDX-License-Identifier: Apache-2.0
 * How far roundings on the way may go in the gradients of norm-linear: sums of squares of what is rounded. */
#include "plain_norm_linear.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Of dz of row i, [k]: squares of the terms and of the sums as they grow, times gamma's. */
static void squares_of_row(const norm_work *o, int64_t i, double *squares) {
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
static double square_of_du(const norm_work *o, int64_t i, int64_t f) {
    const double du = (double)o->dy[i * o->n + f], error = (double)o->du_error[i * o->n + f];
    return o->rounds_du ? du * du + error * error : 0;
}

/* Of dz of row i, [k], squares of those; and of those of `products` of du and W. */
static void squares_of_du(const norm_work *o, int64_t i, bool products, double *squares) {
    memset(squares, 0, (size_t)o->k * sizeof *squares);
    for (int64_t f = 0; f < o->n; f++) {
        const double du = (double)o->dy[i * o->n + f], both = square_of_du(o, i, f) + (products ? du * du : 0);
        for (int64_t e = 0; e < o->k; e++)
            squares[e] += both * (double)o->w[f * o->k + e] * (double)o->w[f * o->k + e];
    }
}

/* What roundings of those squares come to in dx of row i, which is rstd times what g is apart from its mean and from xhat, or without a norm
 * g. */
static double spread_of_dx(const norm_work *o, int64_t i, heddle_norm norm, const double *squares) {
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
        most = plain_larger(most, others + (1 - own) * (1 - own) * squares[e]);
    }
    return (double)o->rstd[i] * sqrt(plain_larger(0, most));
}

/* The rounding of a row's float32 mean shifts all of its xhat alike: to what is summed over rows it is one term a row. In 16 bits it is dz
 * that is rounded, to dgamma and dbeta, and behind an activation, where so much else is, these sums themselves. Squares of each column. */
static void measure_means(const norm_work *o, double *dgamma, double *dbeta, double spread[N_COUNT]) {
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
        gamma = plain_larger(gamma, fabs((double)o->gamma[e]));
    }
    for (int64_t f = 0; f < o->n; f++) {
        double sum = 0;
        for (int64_t i = 0; i < o->m; i++)
            sum += pow((double)o->dy[i * o->n + f] * (double)o->shift[i], 2);
        of_dw = plain_larger(of_dw, sum);
    }
    spread[N_DW] = f32 ? gamma * sqrt(of_dw) : 0;
}

/* The direction that most rows' x̂ have in common, [k], and each row's share of it, [m]: x̂[i, e] is about share[i]·common[e]. */
static void common_xhat(const norm_work *o, double *common, double *share) {
    for (int64_t e = 0; e < o->k; e++)
        common[e] = (double)o->xhat[e];
    for (int round = 0; round < 3; round++) {
        double square = 0, shares = 0;
        for (int64_t e = 0; e < o->k; e++)
            square += common[e] * common[e];
        for (int64_t i = 0; i < o->m; i++) {
            share[i] = 0;
            for (int64_t e = 0; e < o->k && square > 0; e++)
                share[i] += (double)o->xhat[i * o->k + e] * common[e] / square;
            shares += share[i] * share[i];
        }
        for (int64_t e = 0; e < o->k; e++) {
            common[e] = 0;
            for (int64_t i = 0; i < o->m && shares > 0; i++)
                common[e] += share[i] * (double)o->xhat[i * o->k + e] / shares;
        }
    }
}

/* By how much the square of a sum of such roundings is larger than the sum of their squares, as which they are counted elsewhere. */
static double squares_together(double sum, double squares) {
    return plain_larger(0, sum * sum - squares);
}

/* What a rounding of W∘gamma's row s, of this square, does by way of u[s] of all rows, which it changes alike, to du[t]: to dbias, in dw's
 * row [k], in dbeta and dgamma. `of` [step·m]: du[t] over u[s]. */
static void add_shared(const norm_work *o, const float *of, int64_t step, const double *share, double square, int64_t t,
                       double *dbias, double *dw, double *dbeta, double *dgamma) {
    double all = 0, alone = 0;
    for (int64_t i = 0; i < o->m; i++) {
        const double du = (double)of[i * step] * share[i];
        all += du;
        alone += du * du;
    }
    *dbias += square * squares_together(all, alone);
    for (int64_t e = 0; e < o->k; e++) {
        double of_z = 0, of_z_alone = 0, of_x = 0, of_x_alone = 0;
        for (int64_t i = 0; i < o->m; i++) {
            const double du = (double)of[i * step] * share[i], z = du * (double)o->z[i * o->k + e];
            const double x = du * (double)o->xhat[i * o->k + e];
            of_z += z;
            of_z_alone += z * z;
            of_x += x;
            of_x_alone += x * x;
        }
        const double w = pow((double)o->w[t * o->k + e], 2) * square;
        dw[e] += square * squares_together(of_z, of_z_alone);
        dbeta[e] += w * squares_together(all, alone);
        dgamma[e] += w * squares_together(of_x, of_x_alone);
    }
}

/* Where rows are alike W∘gamma, which is rounded once, shifts their u alike. Squares: dbias [n], dw [n, k]; dbeta's and dgamma's, [k], are
 * added to. */
static void measure_shared(const norm_work *o, bool gated, double *dbias, double *dw, double *dbeta, double *dgamma) {
    double *common = plain_zeros(o->k, sizeof *common), *share = plain_zeros(o->m, sizeof *share);
    common_xhat(o, common, share);
    for (int64_t s = 0; s < o->n; s++) {
        const int64_t other = !gated ? s : s < o->of_y ? s + o->of_y : s - o->of_y, f = s < o->of_y ? s : other;
        double square = 0;
        for (int64_t e = 0; e < o->k; e++)
            square += pow((double)o->gamma[e] * (double)o->w[s * o->k + e] * common[e], 2);
        if (s < o->of_y)
            add_shared(o, o->bend + s, o->n, share, square, s, dbias + s, dw + s * o->k, dbeta, dgamma);
        if (gated)
            add_shared(o, o->cross + f, o->of_y, share, square, other, dbias + other, dw + other * o->k, dbeta, dgamma);
    }
    free(common);
    free(share);
}

/* Roundings of u and du, and of what kernels round beside them: of dx, in 16 bits those of dz, too, and of what is summed over rows, whose
 * columns' squares are added to. */
static void measure_du(const norm_work *o, heddle_norm norm, double *dgamma, double *dbeta, double spread[N_COUNT]) {
    double *squares = plain_zeros(o->k, sizeof *squares), *shared = plain_zeros(o->n, sizeof *shared);
    double *shared_dw = plain_zeros(o->n * o->k, sizeof *shared_dw);
    if (o->raw && o->rounds_du)
        measure_shared(o, o->of_y < o->n, shared, shared_dw, dbeta, dgamma);
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
        spread[N_DX] = plain_larger(spread[N_DX], spread_of_dx(o, i, norm, squares));
    }
    for (int64_t f = 0; f < o->n; f++) {
        double dbias = shared[f];
        memcpy(squares, shared_dw + f * o->k, (size_t)o->k * sizeof *squares);
        for (int64_t i = 0; i < o->m; i++) {
            const double both = square_of_du(o, i, f);
            const double of_xhat = o->rounds_xhat ? pow((double)o->dy[i * o->n + f], 2) : 0;
            dbias += both;
            for (int64_t e = 0; e < o->k; e++)
                squares[e] += both * (double)o->z[i * o->k + e] * (double)o->z[i * o->k + e] +
                              of_xhat * pow((double)o->xhat[i * o->k + e] * (double)o->gamma[e], 2);
        }
        spread[N_DC] = plain_larger(spread[N_DC], sqrt(dbias));
        spread[N_DW] = plain_larger(spread[N_DW], sqrt(plain_largest(squares, o->k)));
    }
    free(squares);
    free(shared);
    free(shared_dw);
}

/* float32: roundings of dz's terms and sums, in dx and in what is summed over rows; and of those sums, in blocks. */
static void measure_dz(const norm_work *o, heddle_norm norm, double *dgamma, double *dbeta, double spread[N_COUNT]) {
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
        spread[N_DX] = plain_larger(spread[N_DX], spread_of_dx(o, i, norm, o->sums));
    }
    free(of_beta);
    free(of_gamma);
}

/* float32: roundings of dw's terms and of their sums as they grow; and twice those of x̂∘gamma and beta, which kernels sum apart where z is
 * little beside them: of each row's rstd, by which its x̂ are off alike, the root and the quotient. */
static void measure_dw(const norm_work *o, heddle_norm norm, double spread[N_COUNT]) {
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
        most = plain_larger(most, plain_largest(o->sums, o->k));
    }
    spread[N_DW] = hypot(spread[N_DW], sqrt(most));
}

void plain_norm_linear_spread(const norm_work *o, heddle_norm norm, double spread[N_COUNT]) {
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

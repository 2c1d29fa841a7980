/* SPDX-License-Identifier: Apache-2.0
 * Norm-linear by the formulas of docs/math.md: as they are derived, folded into the Linear, and by heddle. Sections N1
 * and on. */
#include "derivation.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { M = 3, K = 4, N = 3 };
#define EPS 1e-5

typedef struct inputs {
    double x[M * K], gamma[K], beta[K], w[N * K], bias[N], dy[M * N];
} inputs;

typedef struct outputs {
    double y[M * N], mean[M], rstd[M];
    double dx[M * K], dgamma[K], dbeta[K], dw[N * K], dbias[N];
} outputs;

/* ------------------------------------------------------------------------------------------------- the formulas */

static void moments(heddle_norm norm, const double *x, double *mean, double *rstd) {
    double sum = 0, squares = 0;
    for (int e = 0; e < K; e++)
        sum += x[e];
    *mean = norm == HEDDLE_LAYER_NORM ? sum / K : 0;
    for (int e = 0; e < K; e++)
        squares += (x[e] - *mean) * (x[e] - *mean);
    *rstd = 1 / sqrt(squares / K + EPS);
}

static void forward(heddle_norm norm, const inputs *in, outputs *out, double *xhat, double *z) {
    for (int i = 0; i < M; i++) {
        moments(norm, in->x + i * K, &out->mean[i], &out->rstd[i]);
        for (int e = 0; e < K; e++) {
            xhat[i * K + e] = (in->x[i * K + e] - out->mean[i]) * out->rstd[i];
            z[i * K + e] = xhat[i * K + e] * in->gamma[e] + in->beta[e];
        }
        for (int f = 0; f < N; f++) {
            out->y[i * N + f] = in->bias[f];
            for (int e = 0; e < K; e++)
                out->y[i * N + f] += z[i * K + e] * in->w[f * K + e];
        }
    }
}

/* dx of a row is the Jacobian of its LayerNorm times g: rstd·(δ - 1/k - xhat·xhatᵀ/k). */
static void jacobian_row(heddle_norm norm, double rstd, const double *xhat, const double *g, double *dx) {
    for (int e = 0; e < K; e++) {
        dx[e] = 0;
        for (int other = 0; other < K; other++) {
            const double mean_part = norm == HEDDLE_LAYER_NORM ? 1.0 / K : 0;
            dx[e] += rstd * ((e == other) - mean_part - xhat[e] * xhat[other] / K) * g[other];
        }
    }
}

static void backward(heddle_norm norm, const inputs *in, const double *xhat, const double *z, outputs *out) {
    memset(out->dgamma, 0, sizeof out->dgamma);
    memset(out->dbeta, 0, sizeof out->dbeta);
    memset(out->dw, 0, sizeof out->dw);
    memset(out->dbias, 0, sizeof out->dbias);
    for (int i = 0; i < M; i++) {
        double g[K] = {0};
        for (int f = 0; f < N; f++) {
            out->dbias[f] += in->dy[i * N + f];
            for (int e = 0; e < K; e++)
                out->dw[f * K + e] += in->dy[i * N + f] * z[i * K + e];
        }
        for (int e = 0; e < K; e++) {
            double dz = 0;
            for (int f = 0; f < N; f++)
                dz += in->dy[i * N + f] * in->w[f * K + e];
            out->dgamma[e] += dz * xhat[i * K + e];
            out->dbeta[e] += dz;
            g[e] = dz * in->gamma[e];
        }
        jacobian_row(norm, out->rstd[i], xhat + i * K, g, out->dx + i * K);
    }
}

/* The same without xhat and z in any product: the raw x goes through them. `rounded` may be Wg as a type has it. */
static void fold(const inputs *in, const double *rounded, const double *s, const outputs *right, outputs *out) {
    double t[N];
    memset(out, 0, sizeof *out);
    for (int f = 0; f < N; f++) {
        t[f] = in->bias[f];
        for (int e = 0; e < K; e++)
            t[f] += in->w[f * K + e] * in->beta[e];
        for (int i = 0; i < M; i++) {
            double sum = 0;
            for (int e = 0; e < K; e++)
                sum += in->x[i * K + e] * rounded[f * K + e];
            out->y[i * N + f] = right->rstd[i] * (sum - right->mean[i] * s[f]) + t[f];
            out->dbias[f] += in->dy[i * N + f];
        }
    }
    for (int f = 0; f < N; f++)
        for (int e = 0; e < K; e++) {
            double g = 0; /* G = (r·dy)ᵀ·x - (sum of r·mean·dy)·1ᵀ */
            for (int i = 0; i < M; i++)
                g += right->rstd[i] * in->dy[i * N + f] * (in->x[i * K + e] - right->mean[i]);
            out->dw[f * K + e] = g * in->gamma[e] + out->dbias[f] * in->beta[e];
            out->dgamma[e] += in->w[f * K + e] * g;
            out->dbeta[e] += in->w[f * K + e] * out->dbias[f];
        }
    for (int i = 0; i < M; i++) {
        double c1 = 0, c2 = 0;
        for (int f = 0; f < N; f++) {
            c1 += in->dy[i * N + f] * s[f] / K;
            c2 += in->dy[i * N + f] * (out->y[i * N + f] - t[f]) / K;
        }
        for (int e = 0; e < K; e++) {
            const double xhat = (in->x[i * K + e] - right->mean[i]) * right->rstd[i];
            double g = 0;
            for (int f = 0; f < N; f++)
                g += in->dy[i * N + f] * rounded[f * K + e];
            out->dx[i * K + e] = right->rstd[i] * (g - c1 - xhat * c2);
        }
    }
}

/* Wg = W∘gamma and s, the sums of its rows; of an RMSNorm there is no mean to take s times, nor a c1. */
static void weigh(heddle_norm norm, const inputs *in, double *wg, double *s) {
    for (int f = 0; f < N; f++) {
        s[f] = 0;
        for (int e = 0; e < K; e++) {
            wg[f * K + e] = in->w[f * K + e] * in->gamma[e];
            s[f] += norm == HEDDLE_LAYER_NORM ? wg[f * K + e] : 0;
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- heddle */

static void run_heddle(heddle_norm norm, const inputs *in, outputs *out) {
    const heddle_norm_linear a = {
        .size = sizeof a, .dtype = HEDDLE_F64, .device = HEDDLE_REF, .norm = norm, .m = M, .k = K, .n = N};
    const heddle_norm_linear_data t = {.size = sizeof t,
                                       .x = in->x,
                                       .gamma = in->gamma,
                                       .beta = in->beta,
                                       .w = in->w,
                                       .bias = in->bias,
                                       .y = out->y,
                                       .mean = out->mean,
                                       .rstd = out->rstd,
                                       .dy = in->dy,
                                       .dx = out->dx,
                                       .dgamma = out->dgamma,
                                       .dbeta = out->dbeta,
                                       .dw = out->dw,
                                       .dbias = out->dbias};
    run_norm_linear(&a, &t, HEDDLE_FORWARD);
    run_norm_linear(&a, &t, HEDDLE_BACKWARD);
}

static void narrow(const double *from, float *to, int64_t n) {
    for (int64_t at = 0; at < n; at++)
        to[at] = (float)from[at];
}

static void widen(const float *from, double *to, int64_t n) {
    for (int64_t at = 0; at < n; at++)
        to[at] = (double)from[at];
}

/* The CPU's results in float32. */
static void run_float32(heddle_norm norm, const inputs *in, outputs *out) {
    float x[M * K], gamma[K], beta[K], w[N * K], bias[N], dy[M * N], y[M * N], dx[M * K], dw[N * K];
    float dgamma[K], dbeta[K], dbias[N];
    narrow(in->x, x, M * K), narrow(in->gamma, gamma, K), narrow(in->beta, beta, K);
    narrow(in->w, w, N * K), narrow(in->bias, bias, N), narrow(in->dy, dy, M * N);
    const heddle_norm_linear a = {.size = sizeof a, .norm = norm, .m = M, .k = K, .n = N};
    const heddle_norm_linear_data t = {.size = sizeof t,
                                       .x = x,
                                       .gamma = gamma,
                                       .beta = beta,
                                       .w = w,
                                       .bias = bias,
                                       .y = y,
                                       .dy = dy,
                                       .dx = dx,
                                       .dgamma = dgamma,
                                       .dbeta = dbeta,
                                       .dw = dw,
                                       .dbias = dbias};
    run_norm_linear(&a, &t, HEDDLE_FORWARD);
    run_norm_linear(&a, &t, HEDDLE_BACKWARD);
    widen(y, out->y, M * N), widen(dx, out->dx, M * K), widen(dw, out->dw, N * K);
    widen(dgamma, out->dgamma, K), widen(dbeta, out->dbeta, K), widen(dbias, out->dbias, N);
}

static void differences_of(heddle_norm norm, inputs *in, double *x, int64_t n, double *gradient) {
    const double step = 1e-5;
    for (int64_t at = 0; at < n; at++) {
        const double here = x[at];
        double side[2] = {0, 0};
        for (int s = 0; s < 2; s++) {
            outputs out;
            x[at] = here + (s ? step : -step);
            run_heddle(norm, in, &out);
            for (int64_t f = 0; f < COUNT(out.y); f++)
                side[s] += in->dy[f] * out.y[f];
        }
        x[at] = here;
        gradient[at] = (side[1] - side[0]) / (2 * step);
    }
}

/* ------------------------------------------------------------------------------------------------- the sections */

typedef struct solved {
    outputs formula, folded, differences, heddle;
    double xhat[M * K], s[N];
    double product, t; /* of row 1 and column 0 */
} solved;

static inputs make_inputs(void) {
    inputs in;
    double *const all[] = {in.x, in.gamma, in.beta, in.w, in.bias, in.dy};
    const int64_t counts[] = {COUNT(in.x), K, K, COUNT(in.w), N, COUNT(in.dy)};
    for (int t = 0; t < 6; t++)
        for (int64_t at = 0; at < counts[t]; at++)
            all[t][at] = (double)((at * 31 + t * 7 + 5) % 17 - 8) / 8;
    return in;
}

static solved solve(heddle_norm norm, inputs *in) {
    solved r;
    outputs single;
    double z[M * K], wg[N * K];
    forward(norm, in, &r.formula, r.xhat, z);
    backward(norm, in, r.xhat, z, &r.formula);
    weigh(norm, in, wg, r.s);
    r.product = 0;
    r.t = in->bias[0];
    for (int e = 0; e < K; e++) {
        r.product += in->x[K + e] * wg[e];
        r.t += in->beta[e] * in->w[e];
    }
    fold(in, wg, r.s, &r.formula, &r.folded);
    run_heddle(norm, in, &r.heddle);
    run_float32(norm, in, &single);
    differences_of(norm, in, in->x, COUNT(in->x), r.differences.dx);
    differences_of(norm, in, in->gamma, K, r.differences.dgamma);
    differences_of(norm, in, in->beta, K, r.differences.dbeta);
    differences_of(norm, in, in->w, COUNT(in->w), r.differences.dw);
    differences_of(norm, in, in->bias, N, r.differences.dbias);
#define ALIKE_FORMS(x)                                                                                                 \
    expect(#x, r.formula.x, r.heddle.x, COUNT(r.formula.x), ALIKE);                                                    \
    expect(#x ", folded", r.folded.x, r.heddle.x, COUNT(r.formula.x), ALIKE);                                          \
    expect(#x " in float32", single.x, r.formula.x, COUNT(r.formula.x), ALIKE_FLOAT32)
#define ALIKE_GRADIENT(x)                                                                                              \
    ALIKE_FORMS(x);                                                                                                    \
    expect(#x " by differences", r.differences.x, r.formula.x, COUNT(r.formula.x), ALIKE_DIFFERENCES)
    ALIKE_FORMS(y);
    ALIKE_GRADIENT(dx);
    ALIKE_GRADIENT(dgamma);
    ALIKE_GRADIENT(dbeta);
    ALIKE_GRADIENT(dw);
    ALIKE_GRADIENT(dbias);
    expect("mean", r.formula.mean, r.heddle.mean, M, ALIKE);
    expect("rstd", r.formula.rstd, r.heddle.rstd, M, ALIKE);
    return r;
}

static double sum_of(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t at = 0; at < n; at++)
        sum += x[at];
    return fabs(sum) < 1e-14 ? 0 : sum;
}

static void layer_norm(void) {
    inputs in = make_inputs();
    const solved r = solve(HEDDLE_LAYER_NORM, &in);
    section("N1", "the norm of row 1");
    line("mean[1]", r.formula.mean[1], NAN, r.heddle.mean[1]);
    line("rstd[1]", r.formula.rstd[1], NAN, r.heddle.rstd[1]);
    number("sum of row xhat[1,:]", sum_of(r.xhat + K, K));
    double squares = 0;
    for (int e = 0; e < K; e++)
        squares += r.xhat[K + e] * r.xhat[K + e] / K;
    number("mean square of row xhat[1,:]", squares);
    number("1 - eps rstd rstd", 1 - EPS * r.formula.rstd[1] * r.formula.rstd[1]);
    section("N2", "y as it is defined, and folded: r (x Wg - mean s) + t");
    number("x Wg[1,0], the product", r.product);
    number("mean[1]", r.formula.mean[1]);
    number("s[0]", r.s[0]);
    number("rstd[1]", r.formula.rstd[1]);
    number("t[0]", r.t);
    forms("y[1,0]", r.formula.y[N], r.folded.y[N], r.heddle.y[N]);
    forms("y[2,1]", r.formula.y[2 * N + 1], r.folded.y[2 * N + 1], r.heddle.y[2 * N + 1]);
    section("N3", "gradients of the Linear");
    line("dbias[1]", r.formula.dbias[1], r.differences.dbias[1], r.heddle.dbias[1]);
    line("dw[1,2]", r.formula.dw[K + 2], r.differences.dw[K + 2], r.heddle.dw[K + 2]);
    forms("dw[1,2]", r.formula.dw[K + 2], r.folded.dw[K + 2], r.heddle.dw[K + 2]);
    section("N4", "gradients of gamma and beta");
    line("dgamma[2]", r.formula.dgamma[2], r.differences.dgamma[2], r.heddle.dgamma[2]);
    forms("dgamma[2]", r.formula.dgamma[2], r.folded.dgamma[2], r.heddle.dgamma[2]);
    line("dbeta[2]", r.formula.dbeta[2], r.differences.dbeta[2], r.heddle.dbeta[2]);
    forms("dbeta[2]", r.formula.dbeta[2], r.folded.dbeta[2], r.heddle.dbeta[2]);
    section("N5", "gradient of x");
    line("dx[1,0]", r.formula.dx[K], r.differences.dx[K], r.heddle.dx[K]);
    forms("dx[1,0]", r.formula.dx[K], r.folded.dx[K], r.heddle.dx[K]);
    line("sum of row dx[1,:]", 0, NAN, sum_of(r.heddle.dx + K, K));
}

static void rms_norm(void) {
    inputs in = make_inputs();
    const solved r = solve(HEDDLE_RMS_NORM, &in);
    section("N6", "RMSNorm");
    line("rstd[1]", r.formula.rstd[1], NAN, r.heddle.rstd[1]);
    forms("y[1,0]", r.formula.y[N], r.folded.y[N], r.heddle.y[N]);
    line("dx[1,0]", r.formula.dx[K], r.differences.dx[K], r.heddle.dx[K]);
    forms("dx[1,0]", r.formula.dx[K], r.folded.dx[K], r.heddle.dx[K]);
    number("sum of row dx[1,:], not 0", sum_of(r.heddle.dx + K, K));
}

/* To 8 significant bits, as bfloat16 has them; of ties the number away from zero. */
static double to_bfloat16(double x) {
    int exponent;
    const double mantissa = frexp(x, &exponent);
    return ldexp(round(mantissa * 256) / 256, exponent);
}

/* A mean of a hundred deviations: which s goes with a Wg that has been rounded? */
static void rounded_weights(void) {
    inputs in = make_inputs();
    outputs right, folded;
    double xhat[M * K], z[M * K], wg[N * K], s[N], s_rounded[N];
    for (int at = 0; at < M * K; at++)
        in.x[at] += 64; /* bfloat16 does not have these; the weights alone are rounded here */
    for (int at = 0; at < N * K; at++)
        in.w[at] += 0.01;
    forward(HEDDLE_LAYER_NORM, &in, &right, xhat, z);
    weigh(HEDDLE_LAYER_NORM, &in, wg, s);
    for (int f = 0; f < N; f++) {
        s_rounded[f] = 0;
        for (int e = 0; e < K; e++)
            s_rounded[f] += wg[f * K + e] = to_bfloat16(wg[f * K + e]);
    }
    section("N7", "Wg rounded to bfloat16, rows of x with a mean of 64");
    number("y[1,0]", right.y[N]);
    fold(&in, wg, s_rounded, &right, &folded);
    number("folded, s of the rounded Wg", folded.y[N]);
    number("  relative error of y", relative_error(folded.y, right.y, COUNT(folded.y)));
    fold(&in, wg, s, &right, &folded);
    number("folded, s of Wg before it is rounded", folded.y[N]);
    number("  relative error of y", relative_error(folded.y, right.y, COUNT(folded.y)));
}

void derive_norm_linear(void) {
    layer_norm();
    rms_norm();
    rounded_weights();
}

/* SPDX-License-Identifier: Apache-2.0
 * The options of norm-linear by the formulas of docs/math.md: activations, also of two halves, a residual, z and its
 * gradient, and no norm. Sections N8 and on. */
#include "derivation.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { M = 3, K = 4, N = 3 };
#define EPS 1e-5

/* Of an activation of two halves W and u have 2·N, the gate's in front. */
typedef struct inputs {
    double x[M * K], gamma[K], beta[K], w[2 * N * K], bias[2 * N], residual[M * N], dy[M * N], dz[M * K];
} inputs;

typedef struct outputs {
    double y[M * N], u[M * 2 * N], z[M * K];
    double dx[M * K], dgamma[K], dbeta[K], dw[2 * N * K], dbias[2 * N];
} outputs;

typedef struct problem {
    heddle_norm norm;
    heddle_activation activation;
    bool residual, z;
} problem;

static bool is_gated(const problem *p) {
    return p->activation >= HEDDLE_GEGLU;
}

static int columns_of(const problem *p) {
    return is_gated(p) ? 2 * N : N;
}

/* ------------------------------------------------------------------------------------------------- the formulas */

/* act(u) = u g(u), and *derivative = g(u) + u g'(u). */
static double act(heddle_activation activation, double u, double *derivative) {
    const double root = sqrt(2 / 3.14159265358979323846);
    double g = 1, rate = 0;
    if (activation == HEDDLE_GELU || activation == HEDDLE_GEGLU) {
        g = (1 + erf(u / sqrt(2))) / 2;
        rate = exp(-u * u / 2) * root / 2;
    } else if (activation == HEDDLE_GELU_TANH || activation == HEDDLE_GEGLU_TANH) {
        const double t = tanh(root * (u + 0.044715 * u * u * u));
        g = (1 + t) / 2;
        rate = (1 - t * t) / 2 * root * (1 + 3 * 0.044715 * u * u);
    } else if (activation != HEDDLE_NO_ACTIVATION) {
        g = 1 / (1 + exp(-u));
        rate = g * (1 - g);
    }
    *derivative = g + u * rate;
    return u * g;
}

/* xhat and rstd of a row; without a norm they are x and 1. */
static double normalise(heddle_norm norm, const double *x, double *xhat) {
    double mean = 0, squares = 0;
    for (int e = 0; norm == HEDDLE_LAYER_NORM && e < K; e++)
        mean += x[e] / K;
    for (int e = 0; e < K; e++)
        squares += (x[e] - mean) * (x[e] - mean) / K;
    const double rstd = norm == HEDDLE_NO_NORM ? 1 : 1 / sqrt(squares + EPS);
    for (int e = 0; e < K; e++)
        xhat[e] = (x[e] - mean) * rstd;
    return rstd;
}

/* y of a row, and what comes back: du of dy. */
static void activate_row(const problem *p, const double *u, const double *residual, const double *dy, double *y,
                         double *du) {
    for (int f = 0; f < N; f++) {
        double derivative;
        const double value = act(p->activation, u[f], &derivative), up = is_gated(p) ? u[N + f] : 1;
        y[f] = value * up + (p->residual ? residual[f] : 0);
        du[f] = dy[f] * up * derivative;
        if (is_gated(p))
            du[N + f] = dy[f] * value;
    }
}

static void solve_row(const problem *p, const inputs *in, int i, outputs *out) {
    const int n = columns_of(p);
    const bool normed = p->norm != HEDDLE_NO_NORM;
    double xhat[K], h[K], du[2 * N], *z = out->z + i * K, *u = out->u + i * n, *dx = out->dx + i * K;
    double mean_g = 0, mean_gx = 0;
    const double rstd = normalise(p->norm, in->x + i * K, xhat);
    for (int e = 0; e < K; e++)
        z[e] = normed ? xhat[e] * in->gamma[e] + in->beta[e] : xhat[e];
    for (int f = 0; f < n; f++) {
        u[f] = in->bias[f];
        for (int e = 0; e < K; e++)
            u[f] += z[e] * in->w[f * K + e];
    }
    activate_row(p, u, in->residual + i * N, in->dy + i * N, out->y + i * N, du);
    for (int e = 0; e < K; e++) {
        h[e] = p->z ? in->dz[i * K + e] : 0;
        for (int f = 0; f < n; f++) {
            h[e] += du[f] * in->w[f * K + e];
            out->dw[f * K + e] += du[f] * z[e];
            out->dbias[f] += e == 0 ? du[f] : 0;
        }
        out->dgamma[e] += h[e] * xhat[e];
        out->dbeta[e] += h[e];
        mean_g += h[e] * in->gamma[e] / K;
        mean_gx += h[e] * in->gamma[e] * xhat[e] / K;
    }
    for (int e = 0; e < K; e++)
        dx[e] = !normed
                    ? h[e]
                    : rstd * (h[e] * in->gamma[e] - (p->norm == HEDDLE_LAYER_NORM ? mean_g : 0) - xhat[e] * mean_gx);
}

/* ------------------------------------------------------------------------------------------------------- heddle */

/* Both structures as arrays of numbers, in float64 for the reference and in float32 for the CPU. */
enum { GIVEN = sizeof(inputs) / sizeof(double), MADE = sizeof(outputs) / sizeof(double) };

static void run_heddle(const problem *p, heddle_device device, const inputs *in, outputs *out, bool both) {
    const bool wide = device == HEDDLE_REF, normed = p->norm != HEDDLE_NO_NORM;
    double given[GIVEN], made[MADE];
    float given32[GIVEN], made32[MADE];
    memcpy(given, in, sizeof given);
    for (int at = 0; at < GIVEN; at++)
        given32[at] = (float)given[at];
    memset(made, 0, sizeof made);
    memset(made32, 0, sizeof made32);
#define IN(x) (wide ? (void *)&given[offsetof(inputs, x) / 8] : (void *)&given32[offsetof(inputs, x) / 8])
#define OUT(x) (wide ? (void *)&made[offsetof(outputs, x) / 8] : (void *)&made32[offsetof(outputs, x) / 8])
    const heddle_norm_linear a = {.size = sizeof a,
                                  .dtype = wide ? HEDDLE_F64 : HEDDLE_F32,
                                  .device = device,
                                  .norm = p->norm,
                                  .activation = p->activation,
                                  .features = (p->activation ? HEDDLE_ACTIVATION : 0) |
                                              (p->residual ? HEDDLE_RESIDUAL : 0) | (p->z ? HEDDLE_Z : 0),
                                  .m = M,
                                  .k = K,
                                  .n = N};
    const heddle_norm_linear_data t = {.size = sizeof t,
                                       .x = IN(x),
                                       .gamma = normed ? IN(gamma) : NULL,
                                       .beta = normed ? IN(beta) : NULL,
                                       .w = IN(w),
                                       .bias = IN(bias),
                                       .residual = p->residual ? IN(residual) : NULL,
                                       .y = OUT(y),
                                       .u = p->activation ? OUT(u) : NULL,
                                       .z = p->z ? OUT(z) : NULL,
                                       .dy = IN(dy),
                                       .dz = p->z ? IN(dz) : NULL,
                                       .dx = OUT(dx),
                                       .dgamma = normed ? OUT(dgamma) : NULL,
                                       .dbeta = normed ? OUT(dbeta) : NULL,
                                       .dw = OUT(dw),
                                       .dbias = OUT(dbias)};
    run_norm_linear(&a, &t, HEDDLE_FORWARD);
    if (both)
        run_norm_linear(&a, &t, HEDDLE_BACKWARD);
    for (int at = 0; !wide && at < MADE; at++)
        made[at] = (double)made32[at];
    memcpy(out, made, sizeof made);
}

/* The derivative of Σ dy∘y + Σ dz∘z by each of n numbers. */
static void differences_of(const problem *p, inputs *in, double *x, int64_t n, double *gradient) {
    for (int64_t at = 0; at < n; at++) {
        const double here = x[at], step = 1e-5;
        double side[2] = {0, 0};
        for (int s = 0; s < 2; s++) {
            outputs out;
            x[at] = here + (s ? step : -step);
            run_heddle(p, HEDDLE_REF, in, &out, false);
            for (int f = 0; f < M * N; f++)
                side[s] += in->dy[f] * out.y[f];
            for (int e = 0; p->z && e < M * K; e++)
                side[s] += in->dz[e] * out.z[e];
        }
        x[at] = here;
        gradient[at] = (side[1] - side[0]) / (2 * step);
    }
}

/* ------------------------------------------------------------------------------------------------- the sections */

typedef struct solved {
    outputs formula, differences, heddle;
    double dresidual[M * N];
} solved;

static inputs make_inputs(void) {
    inputs in;
    double numbers[GIVEN];
    for (int at = 0; at < GIVEN; at++)
        numbers[at] = (double)((at * 31 + 5) % 17 - 8) / 8;
    memcpy(&in, numbers, sizeof in);
    return in;
}

static solved solve(const problem *p, inputs *in) {
    static const outputs nothing;
    solved r = {.formula = nothing, .differences = nothing};
    outputs single;
    const int n = columns_of(p);
    const bool normed = p->norm != HEDDLE_NO_NORM;
    for (int i = 0; i < M; i++)
        solve_row(p, in, i, &r.formula);
    run_heddle(p, HEDDLE_REF, in, &r.heddle, true);
    run_heddle(p, HEDDLE_CPU, in, &single, true);
#define ALIKE_ALL(x, n)                                                                                                \
    expect(#x, r.formula.x, r.heddle.x, n, ALIKE);                                                                     \
    expect(#x " in float32", single.x, r.formula.x, n, ALIKE_FLOAT32)
#define ALIKE_GRADIENT(x, of, n)                                                                                       \
    ALIKE_ALL(x, n);                                                                                                   \
    differences_of(p, in, of, n, r.differences.x);                                                                     \
    expect(#x " by differences", r.differences.x, r.formula.x, n, ALIKE_DIFFERENCES)
    ALIKE_ALL(y, M * N);
    ALIKE_GRADIENT(dx, in->x, M * K);
    ALIKE_GRADIENT(dw, in->w, n * K);
    ALIKE_GRADIENT(dbias, in->bias, n);
    if (normed) {
        ALIKE_GRADIENT(dgamma, in->gamma, K);
        ALIKE_GRADIENT(dbeta, in->beta, K);
    }
    if (p->activation) {
        ALIKE_ALL(u, M * n);
    }
    if (p->z) {
        ALIKE_ALL(z, M * K);
    }
    if (p->residual) {
        differences_of(p, in, in->residual, M * N, r.dresidual);
        expect("gradient of the residual", r.dresidual, in->dy, M * N, ALIKE_DIFFERENCES);
    }
    return r;
}

static void whole_activations(void) {
    static const struct {
        heddle_activation activation;
        const char *y, *dbias, *dx;
    } kinds[] = {{HEDDLE_GELU, "y[1,0], GELU", "dbias[0]", "dx[1,0]"},
                 {HEDDLE_GELU_TANH, "y[1,0], GELU by tanh", "dbias[0]", "dx[1,0]"},
                 {HEDDLE_SILU, "y[1,0], SiLU", "dbias[0]", "dx[1,0]"}};
    section("N8", "activations");
    for (int64_t x = 0; x < COUNT(kinds); x++) {
        inputs in = make_inputs();
        const problem p = {.activation = kinds[x].activation};
        const solved r = solve(&p, &in);
        if (x == 0)
            line("u[1,0]", r.formula.u[N], NAN, r.heddle.u[N]);
        line(kinds[x].y, r.formula.y[N], NAN, r.heddle.y[N]);
        line(kinds[x].dbias, r.formula.dbias[0], r.differences.dbias[0], r.heddle.dbias[0]);
        line(kinds[x].dx, r.formula.dx[K], r.differences.dx[K], r.heddle.dx[K]);
    }
}

static void two_halves(void) {
    static const struct {
        heddle_activation activation;
        const char *y;
    } kinds[] = {{HEDDLE_SWIGLU, "y[1,0], SwiGLU"},
                 {HEDDLE_GEGLU, "y[1,0], GEGLU"},
                 {HEDDLE_GEGLU_TANH, "y[1,0], GEGLU by tanh"}};
    section("N9", "activations of two halves: W has six rows, the gate's three in front");
    for (int64_t x = 0; x < COUNT(kinds); x++) {
        inputs in = make_inputs();
        const problem p = {.activation = kinds[x].activation};
        const solved r = solve(&p, &in);
        line(kinds[x].y, r.formula.y[N], NAN, r.heddle.y[N]);
        line("dw[0,1], of the gate", r.formula.dw[1], r.differences.dw[1], r.heddle.dw[1]);
        line("dw[3,1], of up", r.formula.dw[3 * K + 1], r.differences.dw[3 * K + 1], r.heddle.dw[3 * K + 1]);
        line("dx[1,0]", r.formula.dx[K], r.differences.dx[K], r.heddle.dx[K]);
    }
}

static void residual(void) {
    inputs in = make_inputs();
    problem p = {.activation = HEDDLE_SILU, .residual = true};
    const solved r = solve(&p, &in);
    p.residual = false;
    const solved without = solve(&p, &in);
    section("N10", "SiLU and a residual");
    line("y[1,0]", r.formula.y[N], NAN, r.heddle.y[N]);
    slope("dresidual[1,0] = dy[1,0]", in.dy[N], r.dresidual[N]);
    line("dx[1,0], as without", without.formula.dx[K], r.differences.dx[K], r.heddle.dx[K]);
    expect("dx, as without", without.heddle.dx, r.heddle.dx, COUNT(r.heddle.dx), 0);
    expect("dw, as without", without.heddle.dw, r.heddle.dw, N * K, 0);
}

static void given_z(void) {
    inputs in = make_inputs();
    problem p = {.z = true};
    const solved r = solve(&p, &in);
    p.z = false;
    const solved without = solve(&p, &in);
    section("N11", "z as a result, with a gradient of its own");
    line("z[1,2]", r.formula.z[K + 2], NAN, r.heddle.z[K + 2]);
    line("dx[1,0]", r.formula.dx[K], r.differences.dx[K], r.heddle.dx[K]);
    line("dgamma[2]", r.formula.dgamma[2], r.differences.dgamma[2], r.heddle.dgamma[2]);
    line("dbeta[2]", r.formula.dbeta[2], r.differences.dbeta[2], r.heddle.dbeta[2]);
    line("dw[1,2], as without", without.formula.dw[K + 2], r.differences.dw[K + 2], r.heddle.dw[K + 2]);
    expect("dw, as without", without.heddle.dw, r.heddle.dw, N * K, 0);
}

static void no_norm(void) {
    inputs in = make_inputs();
    const problem p = {.norm = HEDDLE_NO_NORM};
    const solved r = solve(&p, &in);
    section("N12", "no norm");
    line("y[1,0]", r.formula.y[N], NAN, r.heddle.y[N]);
    line("dx[1,0]", r.formula.dx[K], r.differences.dx[K], r.heddle.dx[K]);
    line("dw[1,2]", r.formula.dw[K + 2], r.differences.dw[K + 2], r.heddle.dw[K + 2]);
}

static void everything(void) {
    inputs in = make_inputs();
    const problem p = {.norm = HEDDLE_RMS_NORM, .activation = HEDDLE_SWIGLU, .residual = true, .z = true};
    const solved r = solve(&p, &in);
    section("N13", "RMSNorm, SwiGLU, a residual, z and its gradient at once");
    line("y[1,0]", r.formula.y[N], NAN, r.heddle.y[N]);
    line("dx[1,0]", r.formula.dx[K], r.differences.dx[K], r.heddle.dx[K]);
    line("dgamma[2]", r.formula.dgamma[2], r.differences.dgamma[2], r.heddle.dgamma[2]);
    line("dbeta[2]", r.formula.dbeta[2], r.differences.dbeta[2], r.heddle.dbeta[2]);
    line("dw[4,2]", r.formula.dw[4 * K + 2], r.differences.dw[4 * K + 2], r.heddle.dw[4 * K + 2]);
    line("dbias[4]", r.formula.dbias[4], r.differences.dbias[4], r.heddle.dbias[4]);
}

void derive_activations(void) {
    whole_activations();
    two_halves();
    residual();
    given_z();
    no_norm();
    everything();
}

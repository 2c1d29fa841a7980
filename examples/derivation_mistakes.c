/* SPDX-License-Identifier: Apache-2.0
 * Mistakes that well-known programs made, each on the program's own data, beside the true value. Sections M1 and on. */
#include "derivation.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------------- the programs' random numbers */

/* glibc's rand(), so that the data are the same everywhere. */
typedef struct additive {
    uint32_t last[31];
    int at;
} additive;

static uint32_t next_additive(additive *r) {
    const int at = r->at;
    r->last[at] += r->last[(at + 28) % 31]; /* 31 back and 3 back */
    r->at = (at + 1) % 31;
    return r->last[at] >> 1;
}

static additive seed_additive(uint32_t seed) {
    additive r = {.at = 3}; /* the first three come as they are */
    int64_t x = seed;
    for (int at = 0; at < 31; at++) {
        r.last[at] = (uint32_t)x;
        x = x * 16807 % 2147483647;
    }
    for (int skipped = 0; skipped < 310; skipped++)
        next_additive(&r);
    return r;
}

/* PyTorch's randn on the CPU: MT19937, then pairs of a block of 16 by Box and Muller. */
typedef struct mersenne {
    uint32_t state[624];
    int at;
} mersenne;

static mersenne seed_mersenne(uint32_t seed) {
    mersenne m = {.at = 624};
    m.state[0] = seed;
    for (uint32_t x = 1; x < 624; x++)
        m.state[x] = 1812433253u * (m.state[x - 1] ^ m.state[x - 1] >> 30) + x;
    return m;
}

static uint32_t next_mersenne(mersenne *m) {
    for (int x = 0; m->at == 624 && x < 624; x++) {
        const uint32_t y = (m->state[x] & 0x80000000u) | (m->state[(x + 1) % 624] & 0x7fffffffu);
        m->state[x] = m->state[(x + 397) % 624] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
    }
    m->at %= 624;
    uint32_t y = m->state[m->at++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

static void randn(mersenne *m, double *x, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        float uniform[16];
        for (int j = 0; j < 16; j++)
            uniform[j] = (float)(next_mersenne(m) & 0xffffff) * 0x1p-24f;
        for (int j = 0; j < 8; j++) {
            const float radius = sqrtf(-2 * logf(1 - uniform[j])), angle = 6.2831855f * uniform[j + 8];
            x[i + j] = (double)(radius * cosf(angle));
            x[i + j + 8] = (double)(radius * sinf(angle));
        }
    }
}

/* ---------------------------------------------------------------------------------------------- one attention head */

enum { MOST = 128 * 64 };

typedef struct single_head {
    int s, d;
    double scale;
    double q[MOST], k[MOST], v[MOST], dout[MOST];
    double o[MOST], lse[128], dq[MOST], dk[MOST], dv[MOST];
} single_head;

static void solve(single_head *p, heddle_pass last) {
    const heddle_attention a = {.size = sizeof a,
                                .dtype = HEDDLE_F64,
                                .device = HEDDLE_REF,
                                .b = 1,
                                .h = 1,
                                .sq = p->s,
                                .sk = p->s,
                                .d = p->d,
                                .scale = p->scale};
    const heddle_attention_data t = {.size = sizeof t,
                                     .q = p->q,
                                     .k = p->k,
                                     .v = p->v,
                                     .o = p->o,
                                     .lse = p->lse,
                                     .dout = p->dout,
                                     .dq = p->dq,
                                     .dk = p->dk,
                                     .dv = p->dv};
    run_attention(&a, &t, HEDDLE_FORWARD);
    if (last == HEDDLE_BACKWARD)
        run_attention(&a, &t, HEDDLE_BACKWARD);
}

static double score(const single_head *p, int i, int j) {
    double sum = 0;
    for (int e = 0; e < p->d; e++)
        sum += p->q[i * p->d + e] * p->k[j * p->d + e];
    return sum * p->scale;
}

/* ------------------------------------------------------------------------------------------------- M1: a factor */

/* A row of O by tiles of keys; `right`: what is taken over from the tiles before is multiplied by their sum, since it has
 * been divided by it. */
static void tiled_row(const single_head *p, int i, int tile, bool right, double *o) {
    double max = -INFINITY, sum = 0;
    memset(o, 0, sizeof(double) * (size_t)p->d);
    for (int first = 0; first < p->s; first += tile) {
        double top = max, weights = 0;
        for (int j = first; j < first + tile; j++)
            top = fmax(top, score(p, i, j));
        const double c = exp(max - top);
        for (int e = 0; e < p->d; e++)
            o[e] *= right ? c * sum : c;
        for (int j = first; j < first + tile; j++) {
            const double weight = exp(score(p, i, j) - top);
            weights += weight;
            for (int e = 0; e < p->d; e++)
                o[e] += weight * p->v[j * p->d + e];
        }
        sum = c * sum + weights;
        max = top;
        for (int e = 0; e < p->d; e++)
            o[e] /= sum;
    }
}

/* dq and dk from a D of this o. */
static void gradients_of(const single_head *p, const double *o, double *dq, double *dk) {
    memset(dq, 0, sizeof(double) * (size_t)(p->s * p->d));
    memset(dk, 0, sizeof(double) * (size_t)(p->s * p->d));
    for (int i = 0; i < p->s; i++) {
        double d = 0;
        for (int e = 0; e < p->d; e++)
            d += p->dout[i * p->d + e] * o[i * p->d + e];
        for (int j = 0; j < p->s; j++) {
            double dp = 0;
            for (int e = 0; e < p->d; e++)
                dp += p->dout[i * p->d + e] * p->v[j * p->d + e];
            const double ds = exp(score(p, i, j) - p->lse[i]) * (dp - d) * p->scale;
            for (int e = 0; e < p->d; e++) {
                dq[i * p->d + e] += ds * p->k[j * p->d + e];
                dk[j * p->d + e] += ds * p->q[i * p->d + e];
            }
        }
    }
}

static void beside(const char *what, double right, double wrong) {
    printf("    %-28s true %14.6g    mistaken %14.6g\n", what, right, wrong);
}

static void missing_factor(single_head *p) {
    static double o[MOST], dq[MOST], dk[MOST];
    additive r = seed_additive(1);
    p->s = 128;
    p->d = 32;
    p->scale = 1 / sqrt(32);
    double *const order[] = {p->q, p->k, p->v, p->dout};
    for (int at = 0; at < 128 * 32; at++)
        for (int t = 0; t < 4; t++)
            order[t][at] = (double)(2 * (float)next_additive(&r) / 2147483647.0f - 1);
    solve(p, HEDDLE_BACKWARD);
    const int n = p->s * p->d;
    section("M1", "the missing factor: tiles of 32 of 128 keys");
    for (int i = 0; i < p->s; i++)
        tiled_row(p, i, 32, true, o + i * p->d);
    expect("O by tiles", o, p->o, n, ALIKE);
    for (int i = 0; i < p->s; i++)
        tiled_row(p, i, 32, false, o + i * p->d);
    gradients_of(p, o, dq, dk);
    beside("O[0,0]", p->o[0], o[0]);
    beside("O[0,1]", p->o[1], o[1]);
    beside("dQ[0,0]", p->dq[0], dq[0]);
    beside("dK[0,0]", p->dk[0], dk[0]);
    number("relative error of O", relative_error(o, p->o, n));
    number("relative error of dQ", relative_error(dq, p->dq, n));
    number("relative error of dK", relative_error(dk, p->dk, n));
    for (int i = 0; i < p->s; i++)
        tiled_row(p, i, 128, false, o + i * p->d);
    expect("O of one tile", o, p->o, n, ALIKE);
    printf("    with one tile of 128 keys O is right without the factor, too\n");
}

/* ------------------------------------------------------------------------------------------ M2, M3: LayerNorm */

enum { ROWS = 16, FEATURES = 8, OUT = 16 };

typedef struct layer {
    double x[ROWS * FEATURES], w[OUT * FEATURES], dy[ROWS * OUT], y[ROWS * OUT], mean[ROWS], rstd[ROWS];
    double dx[ROWS * FEATURES], dw[OUT * FEATURES];
} layer;

static void solve_layer(layer *p) {
    const heddle_norm_linear a = {
        .size = sizeof a, .dtype = HEDDLE_F64, .device = HEDDLE_REF, .m = ROWS, .k = FEATURES, .n = OUT};
    const heddle_norm_linear_data t = {.size = sizeof t,
                                       .x = p->x,
                                       .w = p->w,
                                       .y = p->y,
                                       .mean = p->mean,
                                       .rstd = p->rstd,
                                       .dy = p->dy,
                                       .dx = p->dx,
                                       .dw = p->dw};
    run_norm_linear(&a, &t, HEDDLE_FORWARD);
    run_norm_linear(&a, &t, HEDDLE_BACKWARD);
}

/* Sums in float32, each of them rounded. */
static double one_pass_rstd(const double *x, double shift) {
    volatile float sum = 0, squares = 0;
    for (int e = 0; e < FEATURES; e++) {
        const volatile float value = (float)(x[e] + shift), square = value * value;
        sum += value;
        squares += square;
    }
    const volatile float mean = sum / FEATURES, mean_square = squares / FEATURES, square_mean = mean * mean;
    const volatile float variance = mean_square - square_mean;
    return 1 / sqrt((double)variance + 1e-5);
}

static void layer_norm(void) {
    layer p = {.mean = {0}};
    mersenne m = seed_mersenne(42);
    double diagonal[ROWS * FEATURES], of_x[OUT * FEATURES] = {0};
    randn(&m, p.x, COUNT(p.x));
    randn(&m, p.w, COUNT(p.w));
    for (int at = 0; at < OUT * FEATURES; at++)
        p.w[at] = (double)(0.02f * (float)p.w[at]);
    for (int at = 0; at < ROWS * OUT; at++)
        p.dy[at] = 1;
    solve_layer(&p);
    for (int i = 0; i < ROWS; i++)
        for (int e = 0; e < FEATURES; e++) {
            const double xhat = (p.x[i * FEATURES + e] - p.mean[i]) * p.rstd[i];
            double g = 0;
            for (int f = 0; f < OUT; f++) {
                g += p.w[f * FEATURES + e];
                of_x[f * FEATURES + e] += p.x[i * FEATURES + e];
            }
            diagonal[i * FEATURES + e] = p.rstd[i] * (1 - 1.0 / FEATURES - xhat * xhat / FEATURES) * g;
        }
    section("M2", "the LayerNorm's gradient: the diagonal of its Jacobian alone, and dW of x in place of z");
    beside("dx[0,0]", p.dx[0], diagonal[0]);
    beside("dx[0,1]", p.dx[1], diagonal[1]);
    number("relative error of dx", relative_error(diagonal, p.dx, COUNT(p.dx)));
    beside("dW[0,0]", p.dw[0], of_x[0]);
    double sum = 0;
    for (int e = 0; e < FEATURES; e++)
        sum += diagonal[e];
    number("sum of row dx[0,:] by the diagonal, not 0", sum);
    layer other = p;
    randn(&m, other.dy, COUNT(other.dy));
    solve_layer(&other);
    number("error of dx, a random dy taken for ones", relative_error(p.dx, other.dx, COUNT(p.dx)));

    section("M3", "the variance in one pass, in float32");
    static const double added[] = {1, 10, 100, 1000};
    for (int64_t x = 0; x < COUNT(added); x++) {
        const double mean = added[x];
        char what[48];
        layer shifted = p;
        for (int at = 0; at < ROWS * FEATURES; at++)
            shifted.x[at] += mean;
        solve_layer(&shifted);
        snprintf(what, sizeof what, "rstd[0], %g added to x", mean);
        beside(what, shifted.rstd[0], one_pass_rstd(p.x, mean));
    }
}

/* --------------------------------------------------------------------------------- M4: a test that zeros pass */

static void zeros_pass(single_head *p) {
    additive r = seed_additive(42);
    p->s = 128;
    p->d = 64;
    p->scale = 0.125;
    double *const order[] = {p->q, p->k, p->v, p->dout};
    for (int at = 0; at < 128 * 64; at++)
        for (int t = 0; t < 4; t++)
            order[t][at] = (double)(((float)(next_additive(&r) % 2000) / 1000.0f - 1.0f) * (t == 3 ? 0.2f : 0.5f));
    solve(p, HEDDLE_BACKWARD);
    const int n = p->s * p->d;
    section("M4", "the test that zeros pass: the largest difference may be 0.005");
    number("largest of dQ, so a dQ of zeros is off by", largest(p->dq, n));
    number("largest of dK, so a dK of zeros is off by", largest(p->dk, n));
    number("largest of dV", largest(p->dv, n));
}

/* -------------------------------------------------------- M5, M6: differences, and drawings without arithmetic */

/* Q = K = dO = I, every element of row i of V is i + 1. */
static void small_example(single_head *p) {
    p->s = p->d = 4;
    p->scale = 1;
    for (int at = 0; at < 16; at++) {
        p->q[at] = p->k[at] = p->dout[at] = at / 4 == at % 4;
        const int row = at / 4;
        p->v[at] = row + 1;
    }
    solve(p, HEDDLE_BACKWARD);
}

static double loss(single_head *p, double q) {
    const double here = p->q[0];
    double sum = 0;
    p->q[0] = q;
    solve(p, HEDDLE_FORWARD);
    p->q[0] = here;
    for (int at = 0; at < 16; at++)
        sum += p->dout[at] * p->o[at];
    return sum;
}

static void differences(single_head *p) {
    small_example(p);
    section("M5", "one-sided differences: how far they are from dQ[0,0] of the 4 x 4 example");
    const double dq = p->dq[0], here = loss(p, 1);
    number("dQ[0,0]", dq);
    static const double steps[] = {0.1, 0.01, 0.001};
    for (int64_t x = 0; x < COUNT(steps); x++) {
        const double step = steps[x];
        const double above = loss(p, 1 + step), below = loss(p, 1 - step);
        printf("    step %-8g one-sided %.2e    central %.2e\n", step, fabs((above - here) / step - dq),
               fabs((above - below) / (2 * step) - dq));
    }
}

static void no_derivation(single_head *p) {
    double product[16] = {0}, weights[16];
    small_example(p);
    for (int at = 0; at < 16; at++)
        weights[at] = exp(score(p, at / 4, at % 4) - p->lse[at / 4]);
    for (int i = 0; i < 4; i++)
        for (int e = 0; e < 4; e++)
            for (int j = 0; j < 4; j++)
                product[i * 4 + e] += weights[i * 4 + j] * p->dv[j * 4 + e];
    section("M6", "the 4 x 4 example, drawn and derived wrongly");
    beside("P[0,0]", weights[0], exp(1) / (exp(1) + 1));
    beside("P[0,1]", weights[1], 1 / (exp(1) + 1));
    beside("dO[0,0], and (P dV)[0,0]", p->dout[0], product[0]);
}

void show_mistakes(void) {
    single_head *p = calloc(1, sizeof *p);
    if (!p)
        return;
    missing_factor(p);
    layer_norm();
    zeros_pass(p);
    differences(p);
    no_derivation(p);
    free(p);
}

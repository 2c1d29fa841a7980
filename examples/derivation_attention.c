/* SPDX-License-Identifier: Apache-2.0
 * Attention by the formulas of docs/math.md, one option after the other: sections A1 and on. */
#include "derivation.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Two query heads share one head of keys and values. */
enum { H = 2, SQ = 3, SK = 4, D = 2, DV = 3, SCORES = H * SQ * SK };

/* All that a gradient is asked of, and the gradients of the outputs. */
typedef struct inputs {
    double q[H * SQ * D], k[SK * D], v[SK * DV], bias[SCORES], sinks[H];
    double slopes[H];
    double dout[H * SQ * DV], dlse[H * SQ], dweights[SCORES];
    uint8_t mask[SCORES];
} inputs;

typedef struct outputs {
    double o[H * SQ * DV], lse[H * SQ], p[SCORES];
    double dq[H * SQ * D], dk[SK * D], dv[SK * DV], ds[SCORES], dsinks[H];
} outputs;

/* Between the two: T, S, Z, dP, and D in its two forms. */
typedef struct between {
    double t[SCORES], s[SCORES], z[SCORES], dp[SCORES], d[H * SQ], d_of_o[H * SQ];
} between;

static bool has(const heddle_attention *a, uint64_t feature) {
    return (a->features & feature) != 0;
}

/* ------------------------------------------------------------------------------------------------- the formulas */

/* Of element (x, i, j): Philox4x32-7, half j % 2 of word j % 8 / 2. */
static double dropout_factor(const heddle_attention *a, uint32_t x, uint32_t i, uint32_t j) {
    const uint32_t t = (uint32_t)floor(65536 * a->dropout + 0.5);
    uint32_t c[4] = {j / 8, x, i ^ (uint32_t)(a->offset >> 32), (uint32_t)a->offset};
    uint32_t key[2] = {(uint32_t)a->seed, (uint32_t)(a->seed >> 32)};
    for (int round = 0; round < 7; round++) {
        const uint64_t left = UINT64_C(0xD2511F53) * c[0], right = UINT64_C(0xCD9E8D57) * c[2];
        const uint32_t next[4] = {(uint32_t)(right >> 32) ^ c[1] ^ key[0], (uint32_t)right,
                                  (uint32_t)(left >> 32) ^ c[3] ^ key[1], (uint32_t)left};
        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    const uint32_t half = c[j % 8 / 2] >> j % 2 * 16 & 0xffff;
    return half >= t ? 65536.0 / (65536.0 - t) : 0;
}

static int offset_of(const heddle_attention *a) {
    return a->mask == HEDDLE_CAUSAL_TOP_LEFT ? 0 : SK - SQ;
}

static bool sees(const heddle_attention *a, const inputs *in, int x, int i, int j) {
    const int at = (x * SQ + i) * SK + j, off = offset_of(a);
    if (a->mask != HEDDLE_MASK_NONE && j > i + off)
        return false;
    if (has(a, HEDDLE_WINDOW) && a->window_left >= 0 && j < i + off - a->window_left)
        return false;
    if (has(a, HEDDLE_WINDOW) && a->window_right >= 0 && j > i + off + a->window_right)
        return false;
    return !has(a, HEDDLE_BOOL_MASK) || in->mask[at];
}

/* (1) to (6) of the page. */
static void forward(const heddle_attention *a, const inputs *in, outputs *out, between *b) {
    memset(out->o, 0, sizeof out->o);
    for (int x = 0; x < H; x++)
        for (int i = 0; i < SQ; i++) {
            const int row = x * SQ + i;
            double sum = has(a, HEDDLE_SINKS) ? exp(in->sinks[x]) : 0;
            for (int j = 0; j < SK; j++) {
                const int at = row * SK + j;
                double t = 0;
                for (int e = 0; e < D; e++)
                    t += in->q[row * D + e] * in->k[j * D + e];
                t *= a->scale;
                double s = a->softcap > 0 ? a->softcap * tanh(t / a->softcap) : t;
                if (has(a, HEDDLE_ALIBI))
                    s -= in->slopes[x] * abs(i + offset_of(a) - j);
                if (has(a, HEDDLE_BIAS))
                    s += in->bias[at];
                b->t[at] = t;
                b->s[at] = sees(a, in, x, i, j) ? s : -INFINITY;
                sum += exp(b->s[at]);
            }
            out->lse[row] = log(sum);
            for (int j = 0; j < SK; j++) {
                const int at = row * SK + j;
                const bool seen = b->s[at] != -INFINITY;
                out->p[at] = seen ? exp(b->s[at] - out->lse[row]) : 0;
                b->z[at] = a->dropout > 0 ? dropout_factor(a, (uint32_t)x, (uint32_t)i, (uint32_t)j) : 1;
                for (int e = 0; seen && e < DV; e++)
                    out->o[row * DV + e] += out->p[at] * b->z[at] * in->v[j * DV + e];
            }
        }
}

/* (7) to (15) of the page. */
static void backward(const heddle_attention *a, const inputs *in, outputs *out, between *b) {
    memset(out->dq, 0, sizeof out->dq);
    memset(out->dk, 0, sizeof out->dk);
    memset(out->dv, 0, sizeof out->dv);
    memset(out->dsinks, 0, sizeof out->dsinks);
    for (int row = 0; row < H * SQ; row++) {
        b->d[row] = b->d_of_o[row] = -in->dlse[row];
        for (int e = 0; e < DV; e++)
            b->d_of_o[row] += in->dout[row * DV + e] * out->o[row * DV + e];
        for (int j = 0; j < SK; j++) {
            const int at = row * SK + j;
            b->dp[at] = has(a, HEDDLE_WEIGHTS) ? in->dweights[at] : 0;
            for (int e = 0; e < DV; e++) {
                b->dp[at] += b->z[at] * in->dout[row * DV + e] * in->v[j * DV + e];
                out->dv[j * DV + e] += b->z[at] * out->p[at] * in->dout[row * DV + e];
            }
            b->d[row] += out->p[at] * b->dp[at];
        }
        if (has(a, HEDDLE_SINKS))
            out->dsinks[row / SQ] -= exp(in->sinks[row / SQ] - out->lse[row]) * b->d[row];
        for (int j = 0; j < SK; j++) {
            const int at = row * SK + j;
            const double tanh_t = a->softcap > 0 ? tanh(b->t[at] / a->softcap) : 0;
            out->ds[at] = out->p[at] * (b->dp[at] - b->d[row]);
            const double dt = out->ds[at] * (1 - tanh_t * tanh_t);
            for (int e = 0; e < D; e++) {
                out->dq[row * D + e] += a->scale * dt * in->k[j * D + e];
                out->dk[j * D + e] += a->scale * dt * in->q[row * D + e];
            }
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- heddle */

/* Numbers in memory as heddle wants them: float64 for the reference, float32 for the CPU. */
typedef struct buffer {
    double wide[SCORES];
    float narrow[SCORES];
} buffer;

static void *give(buffer *to, bool wide, const double *from, int64_t n) {
    for (int64_t at = 0; at < n; at++) {
        to->wide[at] = from ? from[at] : 0;
        to->narrow[at] = (float)to->wide[at];
    }
    return wide ? (void *)to->wide : (void *)to->narrow;
}

static void take(const buffer *from, bool wide, double *to, int64_t n) {
    for (int64_t at = 0; at < n; at++)
        to[at] = wide ? from->wide[at] : (double)from->narrow[at];
}

static void run_heddle(const heddle_attention *described, heddle_device device, const inputs *in, outputs *out,
                       bool both) {
    heddle_attention a = *described;
    const bool wide = device == HEDDLE_REF, biased = has(&a, HEDDLE_BIAS), sunk = has(&a, HEDDLE_SINKS);
    buffer q, k, v, bias, slopes, sinks, dout, dlse, dweights, o, lse, p, dq, dk, dv, ds, dsinks;
    a.device = device;
    a.dtype = wide ? HEDDLE_F64 : HEDDLE_F32;
    heddle_attention_data t = {.size = sizeof t,
                               .q = give(&q, wide, in->q, COUNT(in->q)),
                               .k = give(&k, wide, in->k, COUNT(in->k)),
                               .v = give(&v, wide, in->v, COUNT(in->v)),
                               .o = give(&o, wide, NULL, COUNT(in->dout)),
                               .lse = give(&lse, wide, NULL, COUNT(in->dlse)),
                               .dout = give(&dout, wide, in->dout, COUNT(in->dout)),
                               .dlse = give(&dlse, wide, in->dlse, COUNT(in->dlse)),
                               .dq = give(&dq, wide, NULL, COUNT(in->q)),
                               .dk = give(&dk, wide, NULL, COUNT(in->k)),
                               .dv = give(&dv, wide, NULL, COUNT(in->v))};
    if (biased)
        t.bias = give(&bias, wide, in->bias, SCORES), t.dbias = give(&ds, wide, NULL, SCORES);
    if (sunk)
        t.sinks = give(&sinks, wide, in->sinks, H), t.dsinks = give(&dsinks, wide, NULL, H);
    if (has(&a, HEDDLE_ALIBI))
        t.alibi_slopes = give(&slopes, wide, in->slopes, H);
    if (has(&a, HEDDLE_BOOL_MASK))
        t.bool_mask = in->mask;
    if (has(&a, HEDDLE_WEIGHTS))
        t.weights = give(&p, wide, NULL, SCORES), t.dweights = give(&dweights, wide, in->dweights, SCORES);
    run_attention(&a, &t, HEDDLE_FORWARD);
    if (both)
        run_attention(&a, &t, HEDDLE_BACKWARD);
    take(&o, wide, out->o, COUNT(out->o));
    take(&lse, wide, out->lse, COUNT(out->lse));
    take(&dq, wide, out->dq, COUNT(out->dq));
    take(&dk, wide, out->dk, COUNT(out->dk));
    take(&dv, wide, out->dv, COUNT(out->dv));
    if (has(&a, HEDDLE_WEIGHTS))
        take(&p, wide, out->p, SCORES);
    if (biased)
        take(&ds, wide, out->ds, SCORES);
    if (sunk)
        take(&dsinks, wide, out->dsinks, H);
}

/* The number whose gradients these are. */
static double loss(const heddle_attention *a, const inputs *in) {
    outputs out;
    double sum = 0;
    run_heddle(a, HEDDLE_REF, in, &out, false);
    for (int64_t at = 0; at < COUNT(out.o); at++)
        sum += in->dout[at] * out.o[at];
    for (int64_t at = 0; at < COUNT(out.lse); at++)
        sum += out.lse[at] == -INFINITY ? 0 : in->dlse[at] * out.lse[at];
    for (int64_t at = 0; has(a, HEDDLE_WEIGHTS) && at < SCORES; at++)
        sum += in->dweights[at] * out.p[at];
    return sum;
}

static void differences_of(const heddle_attention *a, inputs *in, double *x, int64_t n, double *gradient) {
    const double step = 1e-5;
    for (int64_t at = 0; at < n; at++) {
        const double here = x[at];
        x[at] = here + step;
        const double above = loss(a, in);
        x[at] = here - step;
        gradient[at] = (above - loss(a, in)) / (2 * step);
        x[at] = here;
    }
}

/* ------------------------------------------------------------------------------------------------- the sections */

static double element(int n, int salt) {
    return ((n * 37 + salt * 11) % 19 - 9) / 8.0; /* float32 has it exactly */
}

static void fill(double *x, int64_t n, int salt) {
    for (int64_t at = 0; at < n; at++)
        x[at] = element((int)at, salt);
}

static inputs make_inputs(void) {
    inputs in = {.sinks = {0.5, -1}, .slopes = {0.25, 0.5}};
    fill(in.q, COUNT(in.q), 1);
    fill(in.k, COUNT(in.k), 2);
    fill(in.v, COUNT(in.v), 3);
    fill(in.bias, SCORES, 4);
    fill(in.dout, COUNT(in.dout), 5);
    fill(in.dweights, SCORES, 6);
    for (int at = 0; at < SCORES; at++)
        in.mask[at] = at % 5 != 1 && at / SK != 2; /* row 2 of head 0 sees nothing */
    return in;
}

static heddle_attention make_problem(uint64_t features) {
    return (heddle_attention){.size = sizeof(heddle_attention),
                              .b = 1,
                              .h = H,
                              .hk = 1,
                              .sq = SQ,
                              .sk = SK,
                              .d = D,
                              .dv = DV,
                              .scale = 1 / sqrt(D),
                              .features = features};
}

/* A problem computed in all ways, after every element of every tensor has been compared. */
typedef struct solved {
    outputs formula, differences, heddle;
    between b;
} solved;

static solved solve(const heddle_attention *a, inputs *in) {
    solved r = {.b = {.t = {0}}};
    outputs single = {.o = {0}};
    forward(a, in, &r.formula, &r.b);
    backward(a, in, &r.formula, &r.b);
    run_heddle(a, HEDDLE_REF, in, &r.heddle, true);
    run_heddle(a, HEDDLE_CPU, in, &single, true);
    differences_of(a, in, in->q, COUNT(in->q), r.differences.dq);
    differences_of(a, in, in->k, COUNT(in->k), r.differences.dk);
    differences_of(a, in, in->v, COUNT(in->v), r.differences.dv);
#define ALIKE_ALL(x)                                                                                                   \
    expect(#x, r.formula.x, r.heddle.x, COUNT(r.formula.x), ALIKE);                                                    \
    expect(#x " in float32", single.x, r.formula.x, COUNT(r.formula.x), ALIKE_FLOAT32)
#define ALIKE_GRADIENT(x)                                                                                              \
    ALIKE_ALL(x);                                                                                                      \
    expect(#x " by differences", r.differences.x, r.formula.x, COUNT(r.formula.x), ALIKE_DIFFERENCES)
    ALIKE_ALL(o);
    ALIKE_ALL(lse);
    ALIKE_GRADIENT(dq);
    ALIKE_GRADIENT(dk);
    ALIKE_GRADIENT(dv);
    if (has(a, HEDDLE_WEIGHTS)) {
        ALIKE_ALL(p);
    }
    if (has(a, HEDDLE_BIAS)) {
        differences_of(a, in, in->bias, SCORES, r.differences.ds);
        ALIKE_GRADIENT(ds);
    }
    if (has(a, HEDDLE_SINKS)) {
        differences_of(a, in, in->sinks, H, r.differences.dsinks);
        ALIKE_GRADIENT(dsinks);
    }
    return r;
}

/* Row i of head x begins here in a tensor of rows of n. */
static int at_row(int x, int i, int n) {
    return (x * SQ + i) * n;
}

static void plain_forward(void) {
    inputs in = make_inputs();
    const heddle_attention a = make_problem(HEDDLE_WEIGHTS);
    const solved r = solve(&a, &in);
    const int row = at_row(1, 2, 1), at = row * SK;
    section("A1", "scores; heddle's are log(weights) + lse");
    for (int j = 0; j < SK; j++) {
        char what[32];
        snprintf(what, sizeof what, "S[1,2,%d]", j);
        line(what, r.b.s[at + j], NAN, log(r.heddle.p[at + j]) + r.heddle.lse[row]);
    }
    section("A2", "softmax and output");
    line("lse[1,2]", r.formula.lse[row], NAN, r.heddle.lse[row]);
    line("P[1,2,0]", r.formula.p[at], NAN, r.heddle.p[at]);
    double sum = 0;
    for (int j = 0; j < SK; j++)
        sum += r.heddle.p[at + j];
    line("sum of row P[1,2,:]", 1, NAN, sum);
    line("o[1,2,0]", r.formula.o[row * DV], NAN, r.heddle.o[row * DV]);
}

static void plain_backward(void) {
    inputs in = make_inputs();
    memset(in.bias, 0, sizeof in.bias); /* a bias of zeros changes nothing, and its gradient is dS */
    const heddle_attention a = make_problem(HEDDLE_BIAS);
    const solved r = solve(&a, &in);
    const int row = at_row(1, 2, 1), at = row * SK;
    section("A3", "gradient of V");
    line("dv[2,1]", r.formula.dv[2 * DV + 1], r.differences.dv[2 * DV + 1], r.heddle.dv[2 * DV + 1]);
    section("A4", "gradient of the scores; heddle's is dbias of a bias of zeros");
    number("D[1,2] = sum of P dP", r.b.d[row]);
    number("D[1,2] = sum of dO O", r.b.d_of_o[row]);
    double sum = 0, by_formula = 0;
    for (int j = 0; j < SK; j++) {
        char what[32];
        snprintf(what, sizeof what, "dS[1,2,%d]", j);
        line(what, r.formula.ds[at + j], r.differences.ds[at + j], r.heddle.ds[at + j]);
        sum += r.heddle.ds[at + j];
        by_formula += r.formula.ds[at + j];
    }
    line("sum of row dS[1,2,:]", fabs(by_formula) < 1e-15 ? 0 : by_formula, NAN, fabs(sum) < 1e-15 ? 0 : sum);
    section("A5", "gradients of Q and K");
    line("dq[1,2,0]", r.formula.dq[row * D], r.differences.dq[row * D], r.heddle.dq[row * D]);
    line("dk[3,1], of both heads", r.formula.dk[3 * D + 1], r.differences.dk[3 * D + 1], r.heddle.dk[3 * D + 1]);
}

static void score_options(void) {
    inputs in = make_inputs();
    heddle_attention a = make_problem(HEDDLE_WEIGHTS);
    const int row = at_row(1, 2, 1), at = row * SK + 1;
    a.scale = -1.5;
    solved r = solve(&a, &in);
    section("A6", "scale of -1.5, then softcap of 0.75 besides");
    line("S[1,2,1]", r.b.s[at], NAN, log(r.heddle.p[at]) + r.heddle.lse[row]);
    line("dq[1,2,0]", r.formula.dq[row * D], r.differences.dq[row * D], r.heddle.dq[row * D]);
    a.softcap = 0.75;
    r = solve(&a, &in);
    line("S[1,2,1], capped", r.b.s[at], NAN, log(r.heddle.p[at]) + r.heddle.lse[row]);
    line("dq[1,2,0], capped", r.formula.dq[row * D], r.differences.dq[row * D], r.heddle.dq[row * D]);

    a = make_problem(HEDDLE_WEIGHTS | HEDDLE_BIAS);
    r = solve(&a, &in);
    section("A7", "additive bias");
    line("S[1,2,1]", r.b.s[at], NAN, log(r.heddle.p[at]) + r.heddle.lse[row]);
    line("dbias[1,2,1] = dS", r.formula.ds[at], r.differences.ds[at], r.heddle.ds[at]);

    a = make_problem(HEDDLE_WEIGHTS | HEDDLE_ALIBI);
    r = solve(&a, &in);
    section("A8", "ALiBi: slope 0.5, distance |2 + 1 - 1| = 2");
    line("S[1,2,1]", r.b.s[at], NAN, log(r.heddle.p[at]) + r.heddle.lse[row]);
}

static void masks(void) {
    static const struct {
        const char *name;
        heddle_mask mask;
        uint64_t features;
    } kinds[] = {{"causal top left", HEDDLE_CAUSAL_TOP_LEFT, 0},
                 {"causal bottom right", HEDDLE_CAUSAL_BOTTOM_RIGHT, 0},
                 {"the same, window_left 1", HEDDLE_CAUSAL_BOTTOM_RIGHT, HEDDLE_WINDOW},
                 {"a boolean mask", HEDDLE_MASK_NONE, HEDDLE_BOOL_MASK}};
    section("A9", "masks: what the three queries of head 0 see of the four keys (by heddle's weights)");
    for (int64_t x = 0; x < COUNT(kinds); x++) {
        inputs in = make_inputs();
        heddle_attention a = make_problem(HEDDLE_WEIGHTS | kinds[x].features);
        a.mask = kinds[x].mask;
        a.window_left = kinds[x].features & HEDDLE_WINDOW ? 1 : 0;
        a.window_right = kinds[x].features & HEDDLE_WINDOW ? -1 : 0;
        const solved r = solve(&a, &in);
        printf("    %-26s", kinds[x].name);
        for (int at = 0; at < SQ * SK; at++)
            printf("%s%c", at % SK ? "" : "  ", r.heddle.p[at] > 0 ? 'x' : '.');
        printf("   lse[0,2] %.9f\n", r.heddle.lse[2]);
    }
}

static void outer_options(void) {
    inputs in = make_inputs();
    const int row = at_row(1, 2, 1), at = row * SK + 1;
    heddle_attention a = make_problem(HEDDLE_WEIGHTS | HEDDLE_SINKS | HEDDLE_BIAS);
    solved r = solve(&a, &in);
    section("A10", "sinks of 0.5 and -1");
    double seen = 0;
    for (int j = 0; j < SK; j++)
        seen += r.heddle.p[row * SK + j];
    line("lse[1,2]", r.formula.lse[row], NAN, r.heddle.lse[row]);
    line("sum of row P[1,2,:]", 1 - exp(in.sinks[1] - r.formula.lse[row]), NAN, seen);
    line("dsinks[1]", r.formula.dsinks[1], r.differences.dsinks[1], r.heddle.dsinks[1]);

    in = make_inputs();
    fill(in.dlse, COUNT(in.dlse), 7);
    a = make_problem(HEDDLE_BIAS);
    r = solve(&a, &in);
    section("A11", "the gradient of lse");
    double sum = 0;
    for (int j = 0; j < SK; j++)
        sum += r.heddle.ds[row * SK + j];
    line("dS[1,2,1]", r.formula.ds[at], r.differences.ds[at], r.heddle.ds[at]);
    line("sum of row dS = dlse[1,2]", in.dlse[row], NAN, sum);

    in = make_inputs();
    a = make_problem(HEDDLE_WEIGHTS);
    r = solve(&a, &in);
    section("A12", "the gradient of the weights");
    number("D[1,2] = sum of P dP", r.b.d[row]);
    number("sum of dO O, which is not D here", r.b.d_of_o[row]);
    line("dq[1,2,0]", r.formula.dq[row * D], r.differences.dq[row * D], r.heddle.dq[row * D]);
}

static void dropout(void) {
    inputs in = make_inputs();
    memset(in.dweights, 0, sizeof in.dweights);
    heddle_attention a = make_problem(HEDDLE_WEIGHTS);
    const int row = at_row(1, 2, 1);
    a.dropout = 0.5;
    a.seed = 2026;
    const solved r = solve(&a, &in);
    section("A13", "dropout of 0.5, seed 2026");
    printf("    %-26s", "Z[1,2,:]");
    for (int j = 0; j < SK; j++)
        printf(" %g", r.b.z[row * SK + j]);
    printf("\n");
    line("o[1,2,0]", r.formula.o[row * DV], NAN, r.heddle.o[row * DV]);
    number("D[1,2] = sum of P dP", r.b.d[row]);
    number("D[1,2] = sum of dO O", r.b.d_of_o[row]);
    line("dv[2,1]", r.formula.dv[2 * DV + 1], r.differences.dv[2 * DV + 1], r.heddle.dv[2 * DV + 1]);
}

static void everything(void) {
    inputs in = make_inputs();
    fill(in.dlse, COUNT(in.dlse), 7);
    heddle_attention a =
        make_problem(HEDDLE_WEIGHTS | HEDDLE_SINKS | HEDDLE_BIAS | HEDDLE_ALIBI | HEDDLE_BOOL_MASK | HEDDLE_WINDOW);
    a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
    a.window_left = 2;
    a.softcap = 1.5;
    a.dropout = 0.25;
    a.seed = 7;
    const solved r = solve(&a, &in);
    const int row = at_row(1, 2, 1), at = row * SK + 3;
    section("A14", "all of them at once");
    line("o[1,2,0]", r.formula.o[row * DV], NAN, r.heddle.o[row * DV]);
    line("dq[1,2,0]", r.formula.dq[row * D], r.differences.dq[row * D], r.heddle.dq[row * D]);
    line("dk[3,1]", r.formula.dk[3 * D + 1], r.differences.dk[3 * D + 1], r.heddle.dk[3 * D + 1]);
    line("dv[2,1]", r.formula.dv[2 * DV + 1], r.differences.dv[2 * DV + 1], r.heddle.dv[2 * DV + 1]);
    line("dbias[1,2,3]", r.formula.ds[at], r.differences.ds[at], r.heddle.ds[at]);
    line("dsinks[1]", r.formula.dsinks[1], r.differences.dsinks[1], r.heddle.dsinks[1]);
}

void derive_attention(void) {
    plain_forward();
    plain_backward();
    score_options();
    masks();
    outer_options();
    dropout();
    everything();
}

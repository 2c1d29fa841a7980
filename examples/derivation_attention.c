/* SPDX-License-Identifier: Apache-2.0
 * Attention by the formulas of docs/math.md, one option after the other: sections A1 and on. */
#include "derivation_attention.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* Two sequences, of one and of two queries, and of two keys each. */
static const int32_t packed_queries[] = {0, 1, SQ}, packed_keys[] = {0, 2, SK};

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
    if (has(&a, HEDDLE_VARLEN))
        t.cu_seqlens_q = packed_queries, t.cu_seqlens_k = packed_keys;
    if (has(&a, HEDDLE_SEGMENTS))
        t.q_segments = in->q_segments, t.k_segments = in->k_segments;
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

inputs make_inputs(void) {
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

heddle_attention make_problem(uint64_t features) {
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

solved solve(const heddle_attention *a, inputs *in) {
    solved r = {.b = {.t = {0}}};
    outputs single = {.o = {0}};
    formula_forward(a, in, &r.formula, &r.b);
    formula_backward(a, in, &r.formula, &r.b);
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

    outputs shared = {.o = {0}};
    double by_head[SQ * SK];
    a.dbias_stride = (heddle_strides){0, 0, SK}; /* as of a bias that both heads share */
    run_heddle(&a, HEDDLE_REF, &in, &shared, true);
    for (int n = 0; n < SQ * SK; n++)
        by_head[n] = r.formula.ds[n] + r.formula.ds[SQ * SK + n];
    expect("dbias of both heads", by_head, shared.ds, SQ * SK, ALIKE);
    line("dbias[2,1] of both heads", by_head[2 * SK + 1], NAN, shared.ds[2 * SK + 1]);

    a = make_problem(HEDDLE_WEIGHTS | HEDDLE_ALIBI);
    r = solve(&a, &in);
    section("A8", "ALiBi: slope 0.5, distance |2 + 1 - 1| = 2");
    line("S[1,2,1]", r.b.s[at], NAN, log(r.heddle.p[at]) + r.heddle.lse[row]);
    double by_differences[H], by_formula[H] = {0};
    differences_of(&a, &in, in.slopes, H, by_differences);
    for (int n = 0; n < SCORES; n++)
        by_formula[n / (SQ * SK)] -= abs(n / SK % SQ + SK - SQ - n % SK) * r.formula.ds[n];
    expect("gradient of the slopes", by_differences, by_formula, H, ALIKE_DIFFERENCES);
    slope("gradient of slope[1]", by_formula[1], by_differences[1]);
}

static void show_sight(const char *name, const outputs *heddle) {
    printf("    %-26s", name);
    for (int at = 0; at < SQ * SK; at++)
        printf("%s%c", at % SK ? "" : "  ", heddle->p[at] > 0 ? 'x' : '.');
    printf("   lse[0,2] %.9f\n", heddle->lse[2]);
}

/* A key that a mask hides from everybody may be NaN, and a bias of -inf is a mask. */
static void masked_otherwise(void) {
    inputs in = make_inputs();
    heddle_attention a = make_problem(HEDDLE_WEIGHTS);
    outputs right = {.o = {0}}, heddle = {.o = {0}};
    a.mask = HEDDLE_CAUSAL_TOP_LEFT;
    run_heddle(&a, HEDDLE_REF, &in, &right, true);
    for (int e = 0; e < D; e++)
        in.k[3 * D + e] = NAN;
    for (int e = 0; e < DV; e++)
        in.v[3 * DV + e] = NAN;
    for (int64_t device = HEDDLE_CPU; device <= HEDDLE_REF; device++) {
        run_heddle(&a, (heddle_device)device, &in, &heddle, true);
        expect("o beside a NaN", heddle.o, right.o, COUNT(right.o), ALIKE_FLOAT32);
        expect("dq beside a NaN", heddle.dq, right.dq, COUNT(right.dq), ALIKE_FLOAT32);
        expect("dk beside a NaN", heddle.dk, right.dk, COUNT(right.dk), ALIKE_FLOAT32);
        expect("dv beside a NaN", heddle.dv, right.dv, COUNT(right.dv), ALIKE_FLOAT32);
    }
    show_sight("causal top left, key 3 NaN", &heddle);

    in = make_inputs();
    a = make_problem(HEDDLE_WEIGHTS | HEDDLE_BIAS);
    for (int at = 0; at < SCORES; at++)
        in.bias[at] = at % SK == 1 ? -INFINITY : 0;
    const solved r = solve(&a, &in);
    show_sight("a bias of -inf for key 1", &r.heddle);
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
        show_sight(kinds[x].name, &r.heddle);
    }
    masked_otherwise();
}

/* Two sequences in a row are one problem in which nobody sees the other's keys. */
static void packed(void) {
    inputs in = make_inputs();
    heddle_attention a = make_problem(HEDDLE_BOOL_MASK);
    for (int at = 0; at < SCORES; at++)
        in.mask[at] = (at / SK % SQ < packed_queries[1]) == (at % SK < packed_keys[1]);
    const solved r = solve(&a, &in);
    outputs packed = {.o = {0}};
    a.features = HEDDLE_VARLEN;
    a.b = a.sq = a.sk = 2; /* sequences; the most queries and keys of one */
    a.total_q = SQ;
    a.total_k = SK;
    a.q_stride = a.dq_stride = (heddle_strides){0, SQ * D, D};
    a.o_stride = a.do_stride = (heddle_strides){0, SQ * DV, DV};
    run_heddle(&a, HEDDLE_REF, &in, &packed, true);
    section("A10", "packed sequences: formula with a mask of blocks, heddle with cu_seqlens");
    line("lse[1,2]", r.formula.lse[at_row(1, 2, 1)], NAN, packed.lse[at_row(1, 2, 1)]);
    line("dq[1,2,0]", r.formula.dq[at_row(1, 2, D)], NAN, packed.dq[at_row(1, 2, D)]);
    line("dk[3,1]", r.formula.dk[3 * D + 1], NAN, packed.dk[3 * D + 1]);
    expect("o, packed", r.formula.o, packed.o, COUNT(packed.o), ALIKE);
    expect("lse, packed", r.formula.lse, packed.lse, COUNT(packed.lse), ALIKE);
    expect("dq, packed", r.formula.dq, packed.dq, COUNT(packed.dq), ALIKE);
    expect("dk, packed", r.formula.dk, packed.dk, COUNT(packed.dk), ALIKE);
    expect("dv, packed", r.formula.dv, packed.dv, COUNT(packed.dv), ALIKE);
}

/* A query sees the keys whose number is its own. */
static void segments(void) {
    inputs in = make_inputs();
    const int32_t of_queries[SQ] = {7, 3, 7}, of_keys[SK] = {7, 3, 3, 7};
    heddle_attention a = make_problem(HEDDLE_WEIGHTS | HEDDLE_BOOL_MASK);
    for (int at = 0; at < SCORES; at++)
        in.mask[at] = of_queries[at / SK % SQ] == of_keys[at % SK];
    const solved r = solve(&a, &in);
    outputs heddle = {.o = {0}};
    memcpy(in.q_segments, of_queries, sizeof of_queries);
    memcpy(in.k_segments, of_keys, sizeof of_keys);
    a.features = HEDDLE_WEIGHTS | HEDDLE_SEGMENTS;
    run_heddle(&a, HEDDLE_REF, &in, &heddle, true);
    section("A16", "segments 7, 3, 7 of the queries and 7, 3, 3, 7 of the keys: formula with that mask");
    show_sight("segments", &heddle);
    line("lse[1,2]", r.formula.lse[at_row(1, 2, 1)], NAN, heddle.lse[at_row(1, 2, 1)]);
    line("dq[1,2,0]", r.formula.dq[at_row(1, 2, D)], r.differences.dq[at_row(1, 2, D)], heddle.dq[at_row(1, 2, D)]);
    line("dk[3,1]", r.formula.dk[3 * D + 1], r.differences.dk[3 * D + 1], heddle.dk[3 * D + 1]);
    expect("o by segments", r.formula.o, heddle.o, COUNT(heddle.o), ALIKE);
    expect("lse by segments", r.formula.lse, heddle.lse, COUNT(heddle.lse), ALIKE);
    expect("dq by segments", r.formula.dq, heddle.dq, COUNT(heddle.dq), ALIKE);
    expect("dk by segments", r.formula.dk, heddle.dk, COUNT(heddle.dk), ALIKE);
    expect("dv by segments", r.formula.dv, heddle.dv, COUNT(heddle.dv), ALIKE);
}

static void outer_options(void) {
    inputs in = make_inputs();
    const int row = at_row(1, 2, 1), at = row * SK + 1;
    heddle_attention a = make_problem(HEDDLE_WEIGHTS | HEDDLE_SINKS | HEDDLE_BIAS);
    solved r = solve(&a, &in);
    section("A11", "sinks of 0.5 and -1");
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
    section("A12", "the gradient of lse");
    double sum = 0;
    for (int j = 0; j < SK; j++)
        sum += r.heddle.ds[row * SK + j];
    line("dS[1,2,1]", r.formula.ds[at], r.differences.ds[at], r.heddle.ds[at]);
    line("sum of row dS = dlse[1,2]", in.dlse[row], NAN, sum);
    a = make_problem(HEDDLE_BIAS | HEDDLE_SINKS);
    r = solve(&a, &in);
    const double of_sink = -exp(in.sinks[1] - r.heddle.lse[row]) * r.b.d[row];
    sum = 0;
    for (int j = 0; j < SK; j++)
        sum += r.heddle.ds[row * SK + j];
    number("with sinks: sum of row dS", sum);
    number("the sink's part, p_sink (0 - D)", of_sink);
    line("both = dlse[1,2]", in.dlse[row], NAN, sum + of_sink);

    in = make_inputs();
    a = make_problem(HEDDLE_WEIGHTS);
    r = solve(&a, &in);
    section("A13", "the gradient of the weights");
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
    section("A14", "dropout of 0.5, seed 2026");
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
    section("A15", "all of them at once");
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
    packed();
    outer_options();
    dropout();
    everything();
    segments();
}

/* SPDX-License-Identifier: Apache-2.0
 * Keys by the formulas of docs/math.md: in lists of blocks and in pages, in parts that are merged, of 8 bits, and rotated.
 * Sections A17 and on. */
#include "derivation_attention.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double element(int n, int salt) {
    return ((n * 37 + salt * 11) % 19 - 9) / 8.0; /* float32 has it exactly */
}

/* ------------------------------------------------------------------------------------------------------- many keys */

/* One head that is long enough for blocks and pages: two blocks of 64 queries, three of keys. */
enum { LONG_Q = 70, LONG_K = 130, PAGE = 16, PAGES = 10 };

typedef struct long_head {
    double q[LONG_Q * D], k[LONG_K * D], v[LONG_K * DV], dout[LONG_Q * DV];
    double o[LONG_Q * DV], lse[LONG_Q], dq[LONG_Q * D], dk[LONG_K * D], dv[LONG_K * DV];
    bool seen[LONG_Q][LONG_K];
} long_head;

static void fill_head(long_head *p) {
    for (int at = 0; at < LONG_K * DV; at++) {
        p->v[at] = element(at, 3);
        if (at < LONG_K * D)
            p->k[at] = element(at, 2);
        if (at < LONG_Q * D)
            p->q[at] = element(at, 1);
        if (at < LONG_Q * DV)
            p->dout[at] = element(at, 5);
    }
}

/* (1) to (4), (7), (9) and (11) of the keys that are seen. */
static void formula_head(long_head *p) {
    const double scale = 1 / sqrt(D);
    memset(p->o, 0, sizeof p->o), memset(p->dq, 0, sizeof p->dq);
    memset(p->dk, 0, sizeof p->dk), memset(p->dv, 0, sizeof p->dv);
    for (int i = 0; i < LONG_Q; i++) {
        double s[LONG_K], sum = 0, d = 0;
        for (int j = 0; j < LONG_K; j++) {
            s[j] = 0;
            for (int e = 0; e < D; e++)
                s[j] += scale * p->q[i * D + e] * p->k[j * D + e];
            sum += p->seen[i][j] ? exp(s[j]) : 0;
        }
        p->lse[i] = log(sum);
        for (int j = 0; j < LONG_K; j++)
            for (int e = 0; p->seen[i][j] && e < DV; e++)
                p->o[i * DV + e] += exp(s[j] - p->lse[i]) * p->v[j * DV + e];
        for (int e = 0; e < DV; e++)
            d += p->dout[i * DV + e] * p->o[i * DV + e];
        for (int j = 0; j < LONG_K; j++) {
            const double weight = p->seen[i][j] ? exp(s[j] - p->lse[i]) : 0;
            double dp = 0;
            for (int e = 0; e < DV; e++) {
                dp += p->dout[i * DV + e] * p->v[j * DV + e];
                p->dv[j * DV + e] += weight * p->dout[i * DV + e];
            }
            for (int e = 0; e < D; e++) {
                p->dq[i * D + e] += scale * weight * (dp - d) * p->k[j * D + e];
                p->dk[j * D + e] += scale * weight * (dp - d) * p->q[i * D + e];
            }
        }
    }
}

static heddle_attention long_problem(uint64_t features) {
    return (heddle_attention){.size = sizeof(heddle_attention),
                              .dtype = HEDDLE_F64,
                              .device = HEDDLE_REF,
                              .b = 1,
                              .h = 1,
                              .sq = LONG_Q,
                              .sk = LONG_K,
                              .d = D,
                              .dv = DV,
                              .features = features};
}

static heddle_attention_data long_data(long_head *p) {
    return (heddle_attention_data){.size = sizeof(heddle_attention_data),
                                   .q = p->q,
                                   .k = p->k,
                                   .v = p->v,
                                   .o = p->o,
                                   .lse = p->lse,
                                   .dout = p->dout,
                                   .dq = p->dq,
                                   .dk = p->dk,
                                   .dv = p->dv};
}

/* The derivative of Σ dout∘o by *x. */
static double difference(const heddle_attention *a, const heddle_attention_data *t, const long_head *p, double *x) {
    const double step = 1e-5, here = *x;
    double side[2] = {0, 0};
    for (int s = 0; s < 2; s++) {
        *x = here + (s ? step : -step);
        run_attention(a, t, HEDDLE_FORWARD);
        for (int at = 0; at < LONG_Q * DV; at++)
            side[s] += p->dout[at] * p->o[at];
    }
    *x = here;
    return (side[1] - side[0]) / (2 * step);
}

static void alike_head(const char *what, const long_head *formula, const long_head *heddle) {
    char text[64];
#define ALIKE_HEAD(x)                                                                                                  \
    snprintf(text, sizeof text, #x " %s", what);                                                                       \
    expect(text, formula->x, heddle->x, COUNT(formula->x), ALIKE)
    ALIKE_HEAD(o);
    ALIKE_HEAD(lse);
    ALIKE_HEAD(dq);
    ALIKE_HEAD(dk);
    ALIKE_HEAD(dv);
}

static void lists(long_head *formula, long_head *heddle) {
    /* Queries 0 to 63 see the third and the first block of keys, queries 64 to 69 the second. */
    static const int32_t rows[] = {0, 2, 3}, columns[] = {2, 0, 1};
    heddle_attention a = long_problem(HEDDLE_BLOCKS);
    heddle_attention_data t = long_data(heddle);
    double by_differences[LONG_Q * D];
    a.block_q = a.block_k = 64;
    t.block_rows = rows;
    t.block_columns = columns;
    for (int i = 0; i < LONG_Q; i++)
        for (int j = 0; j < LONG_K; j++)
            formula->seen[i][j] = (i / 64 == 1) == (j / 64 == 1);
    formula_head(formula);
    for (int at = 0; at < LONG_Q * D; at++)
        by_differences[at] = difference(&a, &t, heddle, &heddle->q[at]);
    const double of_k = difference(&a, &t, heddle, &heddle->k[129 * D]);
    run_attention(&a, &t, HEDDLE_FORWARD);
    run_attention(&a, &t, HEDDLE_BACKWARD);
    alike_head("by lists", formula, heddle);
    expect("dq by differences", by_differences, formula->dq, COUNT(by_differences), ALIKE_DIFFERENCES);
    line("lse[5], blocks 0 and 2", formula->lse[5], NAN, heddle->lse[5]);
    line("lse[69], block 1", formula->lse[69], NAN, heddle->lse[69]);
    line("dq[69,0]", formula->dq[69 * D], by_differences[69 * D], heddle->dq[69 * D]);
    line("dk[129,0]", formula->dk[129 * D], of_k, heddle->dk[129 * D]);
}

/* The first 40 queries and 100 keys; what is behind them is no part of anything. */
static void lengths(long_head *formula, long_head *heddle) {
    static const int32_t queries[] = {40}, keys[] = {100};
    const heddle_attention a = long_problem(HEDDLE_SEQLENS);
    heddle_attention_data t = long_data(heddle);
    t.seqlens_q = queries;
    t.seqlens_k = keys;
    for (int i = 0; i < LONG_Q; i++)
        for (int j = 0; j < LONG_K; j++)
            formula->seen[i][j] = i < queries[0] && j < keys[0];
    formula_head(formula);
    const double of_q = difference(&a, &t, heddle, &heddle->q[39 * D]);
    run_attention(&a, &t, HEDDLE_FORWARD);
    run_attention(&a, &t, HEDDLE_BACKWARD);
    alike_head("by lengths", formula, heddle);
    line("lse[39] of 100 keys", formula->lse[39], NAN, heddle->lse[39]);
    line("dq[39,0]", formula->dq[39 * D], of_q, heddle->dq[39 * D]);
}

/* The same keys, in pages of 16 that lie in no order; of two that belong to nobody all is NaN. */
static void pages(long_head *formula, long_head *heddle) {
    static const int32_t table[] = {7, 2, 9, 0, 4, 1, 8, 3, 6};
    static double k[(PAGES + 1) * PAGE * D], v[(PAGES + 1) * PAGE * DV];
    heddle_attention a = long_problem(HEDDLE_PAGES);
    heddle_attention_data t = long_data(heddle);
    for (int at = 0; at < COUNT(k); at++)
        k[at] = NAN;
    for (int at = 0; at < COUNT(v); at++)
        v[at] = NAN;
    for (int j = 0; j < LONG_K; j++) {
        const int row = table[j / PAGE] * PAGE + j % PAGE;
        memcpy(k + row * D, formula->k + j * D, D * sizeof *k);
        memcpy(v + row * DV, formula->v + j * DV, DV * sizeof *v);
    }
    a.page = PAGE;
    a.pages = PAGES + 1;
    t.block_table = table;
    t.k = k;
    t.v = v;
    t.dout = t.dq = t.dk = t.dv = NULL;
    for (int i = 0; i < LONG_Q; i++)
        for (int j = 0; j < LONG_K; j++)
            formula->seen[i][j] = true;
    formula_head(formula);
    run_attention(&a, &t, HEDDLE_FORWARD);
    expect("o by pages", formula->o, heddle->o, COUNT(formula->o), ALIKE);
    expect("lse by pages", formula->lse, heddle->lse, COUNT(formula->lse), ALIKE);
    line("lse[69], keys in pages", formula->lse[69], NAN, heddle->lse[69]);
    line("o[69,0]", formula->o[69 * DV], NAN, heddle->o[69 * DV]);
}

static void where_keys_are(void) {
    static long_head formula, heddle;
    fill_head(&formula);
    fill_head(&heddle);
    section("A17", "70 queries and 130 keys of one head: lists of blocks, lengths, pages");
    lists(&formula, &heddle);
    lengths(&formula, &heddle);
    pages(&formula, &heddle);
}

/* ------------------------------------------------------------------------------------------------------------ parts */

/* Keys 0 and 1, then keys 2 and 3, of a problem with a causal mask, ALiBi and a gradient of lse. */
static void parts(void) {
    inputs in = make_inputs();
    for (int at = 0; at < H * SQ; at++)
        in.dlse[at] = element(at, 7);
    heddle_attention a = make_problem(HEDDLE_ALIBI);
    a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
    const solved r = solve(&a, &in);
    outputs each[2] = {{.o = {0}}, {.o = {0}}}, merged, added = {.o = {0}};
    a.dtype = HEDDLE_F64;
    a.device = HEDDLE_REF;
    a.sk = SK / 2;
    a.whole_sq = SQ;
    a.whole_sk = SK;
    for (int at = 0; at < H * SQ; at++)
        added.lse[at] = -INFINITY;
    for (int pass = HEDDLE_FORWARD; pass <= HEDDLE_BACKWARD; pass++)
        for (int part = 0; part < 2; part++) {
            a.k_offset = part * SK / 2;
            heddle_attention_data t = {.size = sizeof t,
                                       .q = in.q,
                                       .k = in.k + a.k_offset * D,
                                       .v = in.v + a.k_offset * DV,
                                       .alibi_slopes = in.slopes,
                                       .o = each[part].o,
                                       .lse = each[part].lse,
                                       .dout = in.dout,
                                       .dlse = in.dlse,
                                       .dq = added.dq,
                                       .dk = added.dk + a.k_offset * D,
                                       .dv = added.dv + a.k_offset * DV};
            a.features = HEDDLE_ALIBI;
            if (pass == HEDDLE_FORWARD)
                run_attention(&a, &t, HEDDLE_FORWARD);
            a.features |= HEDDLE_ACCUMULATE;
            t.o = added.o;
            t.lse = added.lse;
            run_attention(&a, &t, (heddle_pass)pass);
        }
    merged = each[0];
    const heddle_merge m = {
        .size = sizeof m, .dtype = HEDDLE_F64, .device = HEDDLE_REF, .b = 1, .h = H, .s = SQ, .dv = DV};
    must_be_ok(heddle_attention_merge(&m, merged.o, merged.lse, each[1].o, each[1].lse, NULL));
    section("A18", "keys 0 and 1, then 2 and 3: merged by lse, or added to what is there");
    const int row = at_row(1, 2, 1);
    number("lse[1,2] of keys 0 and 1", each[0].lse[row]);
    number("lse[1,2] of keys 2 and 3", each[1].lse[row]);
    double by_formula = exp(each[0].lse[row] - merged.lse[row]) * each[0].o[row * DV];
    by_formula += exp(each[1].lse[row] - merged.lse[row]) * each[1].o[row * DV];
    line("lse[1,2], merged", log(exp(each[0].lse[row]) + exp(each[1].lse[row])), NAN, merged.lse[row]);
    line("lse[1,2] of all, and added", r.formula.lse[row], NAN, added.lse[row]);
    line("o[1,2,0], merged", by_formula, NAN, merged.o[row * DV]);
    line("o[1,2,0] of all, and added", r.formula.o[row * DV], NAN, added.o[row * DV]);
    line("dq[1,2,0], added", r.formula.dq[row * D], r.differences.dq[row * D], added.dq[row * D]);
    line("dk[3,1], of its part", r.formula.dk[3 * D + 1], r.differences.dk[3 * D + 1], added.dk[3 * D + 1]);
    expect("o, merged", r.formula.o, merged.o, COUNT(merged.o), ALIKE);
    expect("lse, merged", r.formula.lse, merged.lse, COUNT(merged.lse), ALIKE);
    expect("o, added", r.formula.o, added.o, COUNT(added.o), ALIKE);
    expect("lse, added", r.formula.lse, added.lse, COUNT(added.lse), ALIKE);
    expect("dq, added", r.formula.dq, added.dq, COUNT(added.dq), ALIKE);
    expect("dk, of parts", r.formula.dk, added.dk, COUNT(added.dk), ALIKE);
    expect("dv, of parts", r.formula.dv, added.dv, COUNT(added.dv), ALIKE);
}

/* ----------------------------------------------------------------------------------------------------------- 8 bits */

/* A byte by the words of the specification: a sign, four bits of exponent, three of what is behind the point. */
static double e4m3_value(uint8_t byte) {
    const int exponent = byte >> 3 & 15, rest = byte & 7;
    const double size = exponent ? ldexp(8 + rest, exponent - 10) : ldexp(rest, -9);
    return byte & 128 ? -size : size;
}

static void eight_bits(void) {
    inputs in = make_inputs();
    uint8_t k[SK * D], v[SK * DV];
    const double k_scale = 0.75, v_scale = 1.5;
    double o[H * SQ * DV], lse[H * SQ];
    heddle_attention a = make_problem(0);
    for (int at = 0; at < SK * D; at++)
        in.k[at] = k_scale * e4m3_value(k[at] = (uint8_t)(at * 45 % 256 & 0xbf)); /* below 2 */
    for (int at = 0; at < SK * DV; at++)
        in.v[at] = v_scale * e4m3_value(v[at] = (uint8_t)(at * 53 % 256 & 0xbf));
    const solved r = solve(&a, &in);
    const heddle_attention_data t = {
        .size = sizeof t, .q = in.q, .k = k, .v = v, .k_scale = &k_scale, .v_scale = &v_scale, .o = o, .lse = lse};
    a.dtype = HEDDLE_F64;
    a.device = HEDDLE_REF;
    a.features = HEDDLE_E4M3;
    run_attention(&a, &t, HEDDLE_FORWARD);
    section("A19", "keys of 8 bits, scaled by 0.75, values by 1.5");
    printf("    %-26s 0x%02x, %g\n", "k[3,1], and what it says", k[3 * D + 1], e4m3_value(k[3 * D + 1]));
    line("lse[1,2]", r.formula.lse[at_row(1, 2, 1)], NAN, lse[at_row(1, 2, 1)]);
    line("o[1,2,0]", r.formula.o[at_row(1, 2, DV)], NAN, o[at_row(1, 2, DV)]);
    expect("o of 8 bits", r.formula.o, o, COUNT(o), ALIKE);
    expect("lse of 8 bits", r.formula.lse, lse, COUNT(lse), ALIKE);
}

/* --------------------------------------------------------------------------------------------------------- rotation */

/* Rows of four numbers, two pairs of which turn by 1 and by 0.01 from position to position. */
enum { NEW = 3, WIDE = 4, PAIRS = WIDE / 2, ROOM = 12 };

typedef struct turned {
    double q[NEW * WIDE], k[ROOM * WIDE], v[ROOM * WIDE];
} turned;

/* R(position) of a row, or with sign -1 its transpose, which turns back. */
static void rotate(int position, double sign, const double *from, double *to) {
    for (int e = 0; e < PAIRS; e++) {
        const double angle = position * pow(10000, -(double)e / PAIRS);
        const double y = from[e], z = from[e + PAIRS];
        to[e] = y * cos(angle) - sign * z * sin(angle);
        to[e + PAIRS] = sign * y * sin(angle) + z * cos(angle);
    }
}

/* New rows behind `before` others, and queries of the same positions, by heddle. */
static turned append_rows(int before, double sign, const double *q, const double *k) {
    turned to = {.q = {0}};
    double cosines[ROOM * PAIRS], sines[ROOM * PAIRS];
    const int32_t length = before;
    for (int at = 0; at < ROOM * PAIRS; at++) {
        const double angle = at / PAIRS * pow(10000, -(double)(at % PAIRS) / PAIRS);
        cosines[at] = cos(angle);
        sines[at] = sign * sin(angle);
    }
    const heddle_append a = {.size = sizeof a,
                             .dtype = HEDDLE_F64,
                             .device = HEDDLE_REF,
                             .table_dtype = HEDDLE_F64,
                             .b = 1,
                             .h = 1,
                             .hk = 1,
                             .s = NEW,
                             .sq = NEW,
                             .sk = ROOM,
                             .d = WIDE,
                             .rotary = WIDE,
                             .positions = ROOM};
    const heddle_append_data t = {.size = sizeof t,
                                  .k_new = k,
                                  .v_new = k,
                                  .k = to.k,
                                  .v = to.v,
                                  .q = q,
                                  .q_out = to.q,
                                  .cos = cosines,
                                  .sin = sines,
                                  .seqlens_k = &length};
    must_be_ok(heddle_attention_append(&a, &t, NULL));
    return to;
}

static double product(const double *x, const double *y) {
    double sum = 0;
    for (int e = 0; e < WIDE; e++)
        sum += x[e] * y[e];
    return sum;
}

static void rotation(void) {
    double q[NEW * WIDE], k[NEW * WIDE], dout[NEW * WIDE], turned_q[NEW * WIDE], turned_k[NEW * WIDE];
    double gradient[NEW * WIDE], by_differences[NEW * WIDE], ahead[WIDE];
    for (int at = 0; at < NEW * WIDE; at++) {
        q[at] = element(at, 1);
        k[at] = element(at, 2);
        dout[at] = element(at, 5);
    }
    const turned here = append_rows(2, 1, q, k), later = append_rows(7, 1, q, k);
    const turned back = append_rows(2, -1, dout, k);
    for (int i = 0; i < NEW; i++) {
        rotate(2 + i, 1, q + i * WIDE, turned_q + i * WIDE);
        rotate(2 + i, 1, k + i * WIDE, turned_k + i * WIDE);
        rotate(2 + i, -1, dout + i * WIDE, gradient + i * WIDE);
    }
    for (int at = 0; at < NEW * WIDE; at++) {
        double side[2] = {0, 0};
        const double x = q[at];
        for (int s = 0; s < 2; s++) {
            q[at] = x + (s ? 1e-5 : -1e-5);
            const turned r = append_rows(2, 1, q, k);
            for (int e = 0; e < NEW * WIDE; e++)
                side[s] += dout[e] * r.q[e];
        }
        q[at] = x;
        by_differences[at] = (side[1] - side[0]) / 2e-5;
    }
    section("A20", "new keys at positions 2 to 4, and their queries, rotated");
    line("k[4,0] of the cache", turned_k[2 * WIDE], NAN, here.k[4 * WIDE]);
    line("q[2,0], rotated", turned_q[2 * WIDE], NAN, here.q[2 * WIDE]);
    rotate(2 - 4, 1, k, ahead);
    line("their score, 4 and 2", product(q + 2 * WIDE, ahead), NAN, product(here.q + 2 * WIDE, here.k + 2 * WIDE));
    line("the same at 9 and 7", product(q + 2 * WIDE, ahead), NAN, product(later.q + 2 * WIDE, later.k + 7 * WIDE));
    line("dq[2,0], rotated back", gradient[2 * WIDE], by_differences[2 * WIDE], back.q[2 * WIDE]);
    expect("k, rotated", turned_k, here.k + 2 * WIDE, NEW * WIDE, ALIKE);
    expect("v, copied", k, here.v + 2 * WIDE, NEW * WIDE, ALIKE);
    expect("q, rotated", turned_q, here.q, NEW * WIDE, ALIKE);
    expect("dq, rotated back", gradient, back.q, NEW * WIDE, ALIKE);
    expect("dq by differences", by_differences, gradient, NEW * WIDE, ALIKE_DIFFERENCES);
}

void derive_keys(void) {
    where_keys_are();
    parts();
    eight_bits();
    rotation();
}

/* SPDX-License-Identifier: Apache-2.0
 * Every option alone and combined, and odd sizes, in three types, forward and backward: a table of cases, a line for
 * each. */
#include "verify.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define TOP_LEFT HEDDLE_CAUSAL_TOP_LEFT
#define BOTTOM_RIGHT HEDDLE_CAUSAL_BOTTOM_RIGHT
#define NOWHERE HEDDLE_BROADCAST /* a stride of 0 */

/* Sizes that are left out: b 2, h 4, hk 4, sq 31, sk 45, d 40. HEDDLE_ACCUMULATE: the keys come in two parts. */
typedef struct attention_case {
    const char *name;
    heddle_attention a;
} attention_case;

static const attention_case attention_cases[] = {
    {"no option", {0}},
    {"scale", {.scale = 0.3}},
    {"causal top-left", {.mask = TOP_LEFT}},
    {"causal bottom-right", {.mask = BOTTOM_RIGHT}},
    {"causal, fully masked rows", {.mask = BOTTOM_RIGHT, .sq = 61, .sk = 17}},
    {"window", {.features = HEDDLE_WINDOW, .window_left = 5, .window_right = 3}},
    {"window, left open", {.features = HEDDLE_WINDOW, .window_left = -1, .window_right = 2}},
    {"window of one key", {.features = HEDDLE_WINDOW}},
    {"window, causal top-left", {.features = HEDDLE_WINDOW, .mask = TOP_LEFT, .window_left = 7, .window_right = -1}},
    {"softcap", {.softcap = 2}},
    {"alibi", {.features = HEDDLE_ALIBI}},
    {"alibi per batch", {.features = HEDDLE_ALIBI, .alibi_stride_b = 4, .mask = TOP_LEFT}},
    {"bias", {.features = HEDDLE_BIAS}},
    {"bias over b", {.features = HEDDLE_BIAS, .bias_stride = {0, 31 * 45, 45}, .dbias_stride = {0, 31 * 45, 45}}},
    {"bias over h", {.features = HEDDLE_BIAS, .bias_stride = {31 * 45, 0, 45}, .dbias_stride = {31 * 45, 0, 45}}},
    {"bias over b and h", {.features = HEDDLE_BIAS, .bias_stride = {0, 0, 45}, .dbias_stride = {0, 0, 45}}},
    {"bias over b, h and sq",
     {.features = HEDDLE_BIAS, .bias_stride = {NOWHERE, 0, 0}, .dbias_stride = {NOWHERE, 0, 0}}},
    {"bool mask", {.features = HEDDLE_BOOL_MASK}},
    {"bool mask of keys", {.features = HEDDLE_BOOL_MASK, .bool_mask_stride = {45, 0, 0}}},
    {"sinks", {.features = HEDDLE_SINKS}},
    {"sinks, fully masked rows", {.features = HEDDLE_SINKS, .mask = BOTTOM_RIGHT, .sq = 45, .sk = 31}},
    {"dropout", {.dropout = 0.3, .seed = 12345, .offset = 678}},
    {"dropout, rng_state", {.dropout = 0.5, .features = HEDDLE_RNG_STATE}},
    {"weights", {.features = HEDDLE_WEIGHTS}},
    {"weights, dropout, causal", {.features = HEDDLE_WEIGHTS, .dropout = 0.2, .seed = 9, .mask = TOP_LEFT}},
    {"gqa", {.hk = 2}},
    {"mqa", {.hk = 1, .mask = TOP_LEFT}},
    {"dv > d", {.d = 24, .dv = 56}},
    {"dv < d", {.d = 72, .dv = 17}},
    {"varlen", {.features = HEDDLE_VARLEN, .b = 5, .hk = 2}},
    {"varlen, causal top-left", {.features = HEDDLE_VARLEN, .b = 5, .mask = TOP_LEFT}},
    {"varlen, causal bottom-right", {.features = HEDDLE_VARLEN, .b = 5, .mask = BOTTOM_RIGHT}},
    {"seqlens", {.features = HEDDLE_SEQLENS, .b = 3}},
    {"seqlens, causal bottom-right", {.features = HEDDLE_SEQLENS, .b = 3, .mask = BOTTOM_RIGHT}},
    {"deterministic", {.features = HEDDLE_DETERMINISTIC, .hk = 2}},
    {"strides [b, s, h, d]",
     {.d = 40,
      .q_stride = {31 * 160, 40, 160},
      .k_stride = {45 * 160, 40, 160},
      .v_stride = {45 * 160, 40, 160},
      .o_stride = {31 * 160, 40, 160},
      .do_stride = {31 * 160, 40, 160},
      .dq_stride = {31 * 160, 40, 160},
      .dk_stride = {45 * 160, 40, 160},
      .dv_stride = {45 * 160, 40, 160}}},
    {"strides with gaps",
     {.d = 40,
      .q_stride = {31 * 4 * 48 + 8, 31 * 48, 48},
      .o_stride = {31 * 4 * 41 + 3, 31 * 41, 41},
      .dk_stride = {45 * 4 * 64, 45 * 64, 64}}},
    {"k and v shared by the batch", {.d = 40, .k_stride = {0, 45 * 40, 40}, .v_stride = {0, 45 * 40, 40}}},
    {"sq 1 (decoding)", {.sq = 1, .sk = 113, .hk = 1, .mask = BOTTOM_RIGHT}},
    {"sq 1, sk 1, d 1", {.sq = 1, .sk = 1, .d = 1}},
    {"sq 2, sk 3, d 3", {.sq = 2, .sk = 3, .d = 3, .mask = TOP_LEFT}},
    {"sq 3, sk 2, d 7", {.sq = 3, .sk = 2, .d = 7, .mask = BOTTOM_RIGHT}},
    {"sq 7, sk 31, d 31", {.sq = 7, .sk = 31, .d = 31}},
    {"sq 33, sk 7, d 33", {.sq = 33, .sk = 7, .d = 33}},
    {"sq 113, sk 203, d 16", {.b = 1, .sq = 113, .sk = 203, .d = 16, .mask = BOTTOM_RIGHT}},
    {"sq 203, sk 113, d 113", {.b = 1, .h = 2, .sq = 203, .sk = 113, .d = 113}},
    {"s 1023", {.b = 1, .h = 1, .sq = 1023, .sk = 1023, .d = 16, .mask = TOP_LEFT}},
    {"d 512", {.b = 1, .h = 2, .d = 512, .dv = 512}},
    {"d 203, dv 511", {.b = 1, .h = 2, .d = 203, .dv = 511}},
    {"no query", {.sq = -1}}, /* -1 stands for 0 here */
    {"no key", {.sk = -1}},
    {"many together",
     {.hk = 2,
      .dv = 24,
      .mask = BOTTOM_RIGHT,
      .window_left = 20,
      .window_right = -1,
      .softcap = 3,
      .dropout = 0.1,
      .seed = 7,
      .features = HEDDLE_WINDOW | HEDDLE_ALIBI | HEDDLE_BIAS | HEDDLE_BOOL_MASK | HEDDLE_SINKS | HEDDLE_WEIGHTS}},
    {"part, causal top-left", {.mask = TOP_LEFT, .q_offset = 40, .k_offset = 13}},
    {"part, keys in the future", {.mask = TOP_LEFT, .q_offset = 3, .k_offset = 30}},
    {"part, window",
     {.features = HEDDLE_WINDOW, .window_left = 9, .window_right = 4, .q_offset = 20, .k_offset = 5, .whole_sq = 90}},
    {"part, alibi, bottom-right",
     {.features = HEDDLE_ALIBI, .mask = BOTTOM_RIGHT, .q_offset = 64, .k_offset = 7, .whole_sq = 100, .whole_sk = 81}},
    {"pages of 16, one in five hidden", {.features = HEDDLE_PAGES, .page = 16}},
    {"pages of 64, seqlens, gqa, causal",
     {.features = HEDDLE_PAGES | HEDDLE_SEQLENS, .page = 64, .sk = 203, .hk = 2, .mask = BOTTOM_RIGHT}},
    {"pages, sq 1 (decoding)", {.features = HEDDLE_PAGES, .page = 32, .sq = 1, .sk = 203, .hk = 1, .d = 64}},
    {"pages, packed queries",
     {.features = HEDDLE_PAGES | HEDDLE_VARLEN | HEDDLE_SEQLENS, .page = 16, .b = 5, .hk = 2, .mask = BOTTOM_RIGHT}},
    {"pages, bias, many queries",
     {.features = HEDDLE_PAGES | HEDDLE_BIAS, .page = 64, .sq = 203, .sk = 300, .hk = 2, .mask = BOTTOM_RIGHT}},
    {"segments", {.features = HEDDLE_SEGMENTS, .sq = 203, .sk = 203}},
    {"segments, causal, window, gqa",
     {.features = HEDDLE_SEGMENTS | HEDDLE_WINDOW,
      .sq = 203,
      .sk = 203,
      .hk = 2,
      .mask = TOP_LEFT,
      .window_left = 90,
      .window_right = -1}},
    {"segments, packed, sinks", {.features = HEDDLE_SEGMENTS | HEDDLE_VARLEN | HEDDLE_SINKS, .b = 5, .sk = 203}},
    {"segments, two parts", {.features = HEDDLE_SEGMENTS | HEDDLE_ACCUMULATE, .sk = 203}},
    {"blocks of 64", {.features = HEDDLE_BLOCKS, .block_q = 64, .block_k = 64, .sq = 203, .sk = 300}},
    {"blocks of 128, of each head, causal",
     {.features = HEDDLE_BLOCKS,
      .block_q = 128,
      .block_k = 128,
      .blocks_of_b = 1,
      .blocks_of_h = 1,
      .hk = 2,
      .mask = TOP_LEFT,
      .sq = 300,
      .sk = 300}},
    {"segments, pages", {.features = HEDDLE_SEGMENTS | HEDDLE_PAGES, .page = 16}},
    {"e4m3", {.features = HEDDLE_E4M3, .hk = 2, .mask = BOTTOM_RIGHT}},
    {"e4m3, packed, alibi", {.features = HEDDLE_E4M3 | HEDDLE_VARLEN | HEDDLE_ALIBI, .b = 5, .sk = 203}},
    {"e4m3, pages, sq 1 (decoding)",
     {.features = HEDDLE_E4M3 | HEDDLE_PAGES, .page = 16, .sq = 1, .sk = 203, .hk = 1, .d = 64}},
    {"e4m3, pages, many queries",
     {.features = HEDDLE_E4M3 | HEDDLE_PAGES, .page = 32, .sq = 203, .sk = 300, .hk = 2, .mask = BOTTOM_RIGHT}},
    {"e4m3, pages of 64, gqa, sinks, weights",
     {.features = HEDDLE_E4M3 | HEDDLE_PAGES | HEDDLE_SINKS | HEDDLE_WEIGHTS, .page = 64, .hk = 2, .sk = 203}},
    {"two parts, added up", {.features = HEDDLE_ACCUMULATE}},
    {"one multiprocessor", {.multiprocessors = 1, .d = 64, .hk = 2}},
    {"five multiprocessors, packed",
     {.multiprocessors = 5, .features = HEDDLE_VARLEN, .b = 5, .sk = 203, .d = 64, .mask = BOTTOM_RIGHT}},
    {"two parts, causal, gqa, sinks",
     {.features = HEDDLE_ACCUMULATE | HEDDLE_SINKS, .mask = BOTTOM_RIGHT, .hk = 2, .sk = 203}},
    {"part, dropout",
     {.dropout = 0.4, .seed = 5, .q_offset = 1000, .k_offset = 1005, .h_offset = 8, .whole_h = 16, .hk = 2}},
};

/* `absent`: bits of inputs that are left out. `mean` is added to x. */
typedef struct norm_linear_case {
    const char *name;
    heddle_norm_linear l;
    uint64_t absent;
    double mean;
} norm_linear_case;

#define WITHOUT(f) (UINT64_C(1) << (f))

static const norm_linear_case norm_linear_cases[] = {
    {"layer norm", {.m = 37, .k = 48, .n = 29}, 0, 0},
    {"rms norm", {.m = 37, .k = 48, .n = 29, .norm = HEDDLE_RMS_NORM}, 0, 0},
    {"without gamma", {.m = 37, .k = 48, .n = 29}, WITHOUT(GAMMA), 0},
    {"without beta", {.m = 37, .k = 48, .n = 29}, WITHOUT(BETA), 0},
    {"without bias", {.m = 37, .k = 48, .n = 29}, WITHOUT(C), 0},
    {"without all three", {.m = 37, .k = 48, .n = 29}, WITHOUT(GAMMA) | WITHOUT(BETA) | WITHOUT(C), 0},
    {"rms without all three",
     {.m = 9, .k = 31, .n = 7, .norm = HEDDLE_RMS_NORM},
     WITHOUT(GAMMA) | WITHOUT(BETA) | WITHOUT(C),
     0},
    {"no norm", {.m = 37, .k = 48, .n = 29, .norm = HEDDLE_NO_NORM}, 0, 0},
    {"no norm, mean 100, silu",
     {.m = 21,
      .k = 33,
      .n = 17,
      .x_stride = 40,
      .norm = HEDDLE_NO_NORM,
      .features = HEDDLE_ACTIVATION,
      .activation = HEDDLE_SILU},
     WITHOUT(C),
     100},
    {"eps 0.5", {.m = 37, .k = 48, .n = 29, .eps = 0.5}, 0, 0},
    {"mean 100", {.m = 37, .k = 48, .n = 29}, 0, 100},
    {"row strides",
     {.m = 21,
      .k = 33,
      .n = 17,
      .x_stride = 40,
      .w_stride = 35,
      .y_stride = 19,
      .dy_stride = 18,
      .dx_stride = 34,
      .dw_stride = 64},
     0,
     0},
    {"deterministic", {.m = 33, .k = 31, .n = 33, .features = HEDDLE_DETERMINISTIC}, 0, 0},
    {"gelu", {.m = 37, .k = 48, .n = 29, .features = HEDDLE_ACTIVATION, .activation = HEDDLE_GELU}, 0, 0},
    {"gelu by tanh", {.m = 5, .k = 200, .n = 35, .features = HEDDLE_ACTIVATION, .activation = HEDDLE_GELU_TANH}, 0, 0},
    {"swiglu", {.m = 37, .k = 48, .n = 29, .features = HEDDLE_ACTIVATION, .activation = HEDDLE_SWIGLU}, 0, 0},
    {"geglu by tanh, few rows",
     {.m = 5, .k = 200, .n = 35, .features = HEDDLE_ACTIVATION, .activation = HEDDLE_GEGLU_TANH},
     0,
     0},
    {"geglu, residual, u apart",
     {.m = 70,
      .k = 33,
      .n = 17,
      .u_stride = 37,
      .norm = HEDDLE_NO_NORM,
      .features = HEDDLE_ACTIVATION | HEDDLE_RESIDUAL,
      .activation = HEDDLE_GEGLU},
     WITHOUT(C),
     0},
    {"silu, row strides",
     {.m = 21,
      .k = 33,
      .n = 17,
      .y_stride = 19,
      .u_stride = 24,
      .features = HEDDLE_ACTIVATION,
      .activation = HEDDLE_SILU},
     0,
     0},
    {"residual", {.m = 37, .k = 48, .n = 29, .features = HEDDLE_RESIDUAL}, 0, 0},
    {"z", {.m = 37, .k = 48, .n = 29, .features = HEDDLE_Z}, 0, 0},
    {"z, rms, silu, rows apart",
     {.m = 70,
      .k = 33,
      .n = 17,
      .z_stride = 37,
      .dz_stride = 40,
      .norm = HEDDLE_RMS_NORM,
      .features = HEDDLE_ACTIVATION | HEDDLE_Z,
      .activation = HEDDLE_SILU},
     0,
     0},
    {"no norm, gelu, residual apart",
     {.m = 21,
      .k = 33,
      .n = 17,
      .residual_stride = 23,
      .norm = HEDDLE_NO_NORM,
      .features = HEDDLE_ACTIVATION | HEDDLE_RESIDUAL,
      .activation = HEDDLE_GELU},
     0,
     0},
    {"one multiprocessor", {.multiprocessors = 1, .m = 203, .k = 48, .n = 29}, 0, 0},
    {"m 1, k 1, n 1", {.m = 1, .k = 1, .n = 1}, 0, 0},
    {"m 2, k 3, n 7", {.m = 2, .k = 3, .n = 7}, 0, 0},
    {"m 203, k 113, n 31", {.m = 203, .k = 113, .n = 31}, 0, 0},
    {"m 3, k 1023, n 113", {.m = 3, .k = 1023, .n = 113}, 0, 0},
    {"m 1023, k 7, n 2", {.m = 1023, .k = 7, .n = 2}, 0, 0},
    {"m 31, k 33, n 203", {.m = 31, .k = 33, .n = 203}, 0, 0},
    {"no rows", {.m = 0, .k = 8, .n = 5}, 0, 0},
};

/* --------------------------------------------------------------------------------------------------- the inputs */

static int64_t size_or(int64_t given, int64_t usual) {
    return given == 0 ? usual : given < 0 ? 0 : given;
}

/* Random lengths, one of them zero, packed behind two rows and before one that belong to nobody. */
static int64_t pack(problem *p, arena *m, int f, int64_t longest, random_state *r) {
    double *cu = problem_input(p, m, f);
    cu[0] = 2;
    for (int64_t n = 0; n < p->j.a.b; n++)
        cu[n + 1] = cu[n] + (n == 1 ? 0 : (double)random_between(r, 1, longest));
    return (int64_t)cu[p->j.a.b] + 1;
}

static void fill_lengths(problem *p, arena *m, int f, int64_t longest, random_state *r) {
    double *length = problem_input(p, m, f);
    for (int64_t n = 0; n < p->j.a.b; n++)
        length[n] = (double)random_between(r, n == 0 ? 0 : 1, longest);
}

/* A table of pages at random, so that some are shared; some numbers are no page. */
static void fill_pages(problem *p, arena *m, random_state *r) {
    heddle_attention *a = &p->j.a;
    a->table = (a->sk + a->page - 1) / a->page + 1;
    a->pages = a->b * a->table;
    double *table = problem_input(p, m, TABLE);
    for (int64_t i = 0; i < a->b * a->table; i++)
        table[i] = random_between(r, 0, 4) ? (double)random_between(r, 0, a->pages - 1) : i % 2 ? -1 : (double)a->pages;
}

/* Documents in a row, of some 60 rows each. */
static void fill_segments(problem *p, arena *m, int f, random_state *r) {
    double *ids = problem_input(p, m, f);
    for (int64_t i = 0, id = -2, n = field_count(&p->j, f); i < n; i++)
        ids[i] = (double)(id += random_between(r, 0, 59) == 0);
}

/* Half of the blocks of keys for each block of queries. */
static void fill_blocks(problem *p, arena *m, random_state *r) {
    const int64_t numbers = field_count(&p->j, BLOCK_ROWS), each = job_extent(&p->j, 'r'),
                  blocks = (p->j.a.sk + p->j.a.block_k - 1) / p->j.a.block_k;
    double *rows = problem_input(p, m, BLOCK_ROWS);
    p->j.columns = numbers * blocks;
    double *columns = problem_input(p, m, BLOCK_COLUMNS);
    int64_t y = 0;
    for (int64_t at = 0; at < numbers; at++) {
        rows[at] = (double)y;
        for (int64_t x = 0; x < blocks && at % each != each - 1; x++)
            if (random_between(r, 0, 1))
                columns[y++] = (double)x;
    }
    p->j.columns = y;
}

problem make_attention(const heddle_attention *a, arena *m, random_state *r) {
    problem p = attention_problem();
    size_t size = p.j.a.size;
    p.j.a = *a;
    p.j.a.size = size;
    p.j.a.b = size_or(a->b, 2);
    p.j.a.h = size_or(a->h, 4);
    p.j.a.sq = size_or(a->sq, 31);
    p.j.a.sk = size_or(a->sk, 45);
    p.j.a.d = size_or(a->d, 40);
    if (a->features & HEDDLE_VARLEN) {
        p.j.a.total_q = pack(&p, m, CU_Q, p.j.a.sq, r);
        if (!(a->features & HEDDLE_PAGES))
            p.j.a.total_k = pack(&p, m, CU_K, p.j.a.sk, r);
    }
    if (a->features & HEDDLE_PAGES)
        fill_pages(&p, m, r);
    if (a->features & HEDDLE_BLOCKS)
        fill_blocks(&p, m, r);
    if (a->features & HEDDLE_SEGMENTS) {
        fill_segments(&p, m, Q_SEGMENTS, r);
        fill_segments(&p, m, K_SEGMENTS, r);
    }
    if (a->features & HEDDLE_SEQLENS) {
        fill_lengths(&p, m, LEN_Q, p.j.a.sq, r);
        fill_lengths(&p, m, LEN_K, p.j.a.sk, r);
    }
    if (a->features & HEDDLE_RNG_STATE) {
        double *state = problem_input(&p, m, RNG);
        state[0] = 4242;
        state[1] = (double)(UINT64_C(3) << 40 | 17);
    }
    problem_fill(&p, m, r);
    if (p.j.a.features & HEDDLE_ACCUMULATE) {
        p.j.a.features &= ~HEDDLE_ACCUMULATE;
        p.first_part = random_between(r, 1, p.j.a.sk);
    }
    return p;
}

static problem make_norm_linear(const norm_linear_case *c, arena *m, random_state *r) {
    problem p = norm_linear_problem();
    size_t size = p.j.l.size;
    p.j.l = c->l;
    p.j.l.size = size;
    problem_fill(&p, m, r);
    for (int64_t i = 0; i < field_count(&p.j, X); i++)
        p.x[X][i] += c->mean;
    for (int f = 0; f < NORM_LINEAR_FIELDS; f++)
        if (c->absent >> f & 1)
            p.x[f] = NULL;
    return p;
}

/* ----------------------------------------------------------------------------------------------------- one line */

/* The tensor that comes nearest to what is allowed. */
typedef struct worst {
    const char *name;
    judgement of;
    bool ran, ok;
} worst;

static worst find_worst(const problem *p, heddle_dtype dtype, const trial *t) {
    worst w = {"-", {.ratio = -1}, true, true};
    for (int f = 0; job_fields(&p->j)[f].name; f++) {
        if (!t->ours.x[f])
            continue;
        judgement g = judge(p, f, dtype, t);
        w.ok &= g.ok;
        if (g.ratio > w.of.ratio) {
            w.of = g;
            w.name = job_fields(&p->j)[f].name;
        }
    }
    return w;
}

static void print_shape(const char *name, const problem *p) {
    const heddle_attention *a = &p->j.a;
    char text[96];
    if (p->j.linear)
        snprintf(text, sizeof text, "%lld %lld %lld", (long long)p->j.l.m, (long long)p->j.l.k, (long long)p->j.l.n);
    else
        snprintf(text, sizeof text, "%lld %lld/%lld %lld×%lld %lld/%lld", (long long)a->b, (long long)a->h,
                 (long long)job_extent(&p->j, 'g'), (long long)a->sq, (long long)a->sk, (long long)a->d,
                 (long long)job_extent(&p->j, 'v'));
    printf("  %-29s %-*s", name, strstr(text, "×") ? 25 : 24, text);
}

/* A case: one of the two operations, and the seed that its inputs are drawn from anew for each type. */
typedef struct sweep_case {
    const char *name;
    const heddle_attention *a;
    const norm_linear_case *l;
    uint64_t seed;
} sweep_case;

static problem make_case(const sweep_case *c, arena *m) {
    random_state r = {c->seed};
    return c->a ? make_attention(c->a, m, &r) : make_norm_linear(c->l, m, &r);
}

/* What comes of a case in one type; as a table of all tensors, if that is asked for. */
static worst sweep_type(verify *v, const sweep_case *c, heddle_dtype dtype, bool prints) {
    arena m = {0};
    trial t;
    worst w = {"-", {.ours.relative = INFINITY}, false, false};
    problem p = make_case(c, &m);
    problem_round(&p, dtype);
    if (trial_run(&p, &m, v->device, dtype, &t))
        w = find_worst(&p, dtype, &t);
    if (w.ran && prints) {
        verify count = {0}; /* the case counts as one check, on its line */
        printf("  %s\n", dtype_name(dtype));
        report_tensors(&count, &p, dtype, &t, NULL);
    } else if (!prints) {
        about_problem(v, &p, dtype);
        record(v, w.name, w.of.ours.broken ? INFINITY : w.of.ours.relative, w.of.plain.relative, w.ok);
    }
    arena_free(&m);
    return w;
}

static void sweep_line(verify *v, sweep_case c) {
    static const heddle_dtype dtypes[] = {HEDDLE_F32, HEDDLE_BF16, HEDDLE_F16};
    arena m = {0};
    worst w[3];
    if (!begin_problem(v, "%s, %s", c.a ? "attention" : "norm-linear", c.name))
        return;
    for (int d = 0; d < 3; d++)
        w[d] = sweep_type(v, &c, dtypes[d], false);
    const problem p = make_case(&c, &m);
    begin_lines(v);
    print_shape(c.name, &p);
    arena_free(&m);
    for (int d = 0; d < 3; d++)
        if (w[d].ran)
            printf("  %-8s %6.2f", w[d].name, w[d].of.ratio);
        else
            printf("  %-15s", "refused");
    printf("  %s\n", verdict(v, w[0].ok && w[1].ok && w[2].ok));
    for (int d = 0; d < 3; d++)
        if (v->verbose || !w[d].ok)
            sweep_type(v, &c, dtypes[d], true);
    fflush(stdout);
}

/* ------------------------------------------------------------------------------------------------------- random */

static int64_t pick(random_state *r, const int64_t *from, int n) {
    return from[random_between(r, 0, n - 1)];
}

heddle_attention random_attention(random_state *r) {
    static const int64_t lengths[] = {1, 2, 3, 7, 16, 31, 33, 64, 65, 97, 140, 300},
                         dims[] = {1, 3, 8, 16, 20, 33, 64, 80, 96, 128, 192, 256, 512};
    static const int64_t groups[][2] = {{1, 1}, {2, 2}, {2, 1}, {4, 2}, {6, 3}, {4, 1}};
    static const uint64_t features[] = {HEDDLE_WINDOW,        HEDDLE_ALIBI,    HEDDLE_BIAS,    HEDDLE_BOOL_MASK,
                                        HEDDLE_SINKS,         HEDDLE_VARLEN,   HEDDLE_SEQLENS, HEDDLE_WEIGHTS,
                                        HEDDLE_DETERMINISTIC, HEDDLE_SEGMENTS, HEDDLE_BLOCKS};
    const int64_t *group = groups[random_between(r, 0, 5)];
    heddle_attention a = {.b = random_between(r, 1, 4), .h = group[0], .hk = group[1]};
    a.sq = pick(r, lengths, random_between(r, 0, 7) ? 10 : 12); /* long ones and wide ones take long */
    a.sk = pick(r, lengths, random_between(r, 0, 3) ? 10 : 12);
    a.d = pick(r, dims, a.sq * a.sk < 10000 ? 13 : 10);
    a.dv = random_between(r, 0, 1) ? a.d : pick(r, dims, 10);
    a.mask = (heddle_mask)random_between(r, 0, LAST_MASK);
    for (int i = 0; i < 11; i++)
        a.features |= random_between(r, 0, 2) ? 0 : features[i];
    if (a.features & HEDDLE_WINDOW) {
        const int64_t most = random_between(r, 0, 1) ? 40 : 2;
        a.window_left = random_between(r, -1, most);
        a.window_right = random_between(r, -1, most);
    }
    a.softcap = random_between(r, 0, 2) ? 0 : 1 + 4 * random_uniform(r);
    a.scale = random_between(r, 0, 2) ? 0 : 0.05 + 0.5 * random_uniform(r);
    if (random_between(r, 0, 2) == 0) {
        a.dropout = 0.9 * random_uniform(r);
        a.seed = random_bits(r);
        a.offset = random_bits(r);
        a.features |= random_between(r, 0, 1) ? HEDDLE_RNG_STATE : 0;
    }
    if (a.features & HEDDLE_BLOCKS) {
        a.block_q = (uint8_t)(64 << random_between(r, 0, 1));
        a.block_k = (uint8_t)(64 << random_between(r, 0, 1));
        a.blocks_of_b = (uint8_t)random_between(r, 0, 1);
        a.blocks_of_h = (uint8_t)random_between(r, 0, 1);
    }
    if (random_between(r, 0, 7) == 0) {
        a.features |= HEDDLE_PAGES | (random_between(r, 0, 1) ? HEDDLE_E4M3 : 0);
        a.page = INT64_C(16) << random_between(r, 0, 4);
    }
    if (a.features & HEDDLE_BIAS && random_between(r, 0, 1)) {
        a.bias_stride = (heddle_strides){random_between(r, 0, 1) ? a.sq * a.sk : 0, 0, a.sk};
        a.dbias_stride = a.bias_stride;
    }
    if (fits_parts(&a) && random_between(r, 0, 3) == 0)
        a.features |= HEDDLE_ACCUMULATE;
    a.multiprocessors = random_between(r, 0, 5) ? 0 : random_between(r, 1, 20);
    return a;
}

#define HEAD "  %-29s %-24s  %-15s  %-15s  %-15s\n"

bool verify_sweep(verify *v) {
    begin_report(v, "sweep",
                 "\nsweep: the largest error of all tensors, as a fraction of what is allowed, and whose it is\n" HEAD,
                 "attention", "b h/hk sq×sk d/dv", "f32", "bf16", "f16");
    for (size_t i = 0; i < sizeof attention_cases / sizeof *attention_cases; i++)
        sweep_line(v, (sweep_case){attention_cases[i].name, &attention_cases[i].a, NULL, v->seed + i});
    for (int64_t i = 0; i < v->random_cases; i++) {
        char name[64];
        random_state r = {v->seed + (uint64_t)i};
        heddle_attention a = random_attention(&r);
        snprintf(name, sizeof name, "random, --seed %llu%s", (unsigned long long)(v->seed + (uint64_t)i),
                 a.features & HEDDLE_ACCUMULATE ? ", parts" : "");
        sweep_line(v, (sweep_case){name, &a, NULL, v->seed + (uint64_t)i});
    }
    begin_report(v, "sweep", "\n" HEAD, "norm-linear", "m k n", "f32", "bf16", "f16");
    for (size_t i = 0; i < sizeof norm_linear_cases / sizeof *norm_linear_cases; i++)
        sweep_line(v, (sweep_case){norm_linear_cases[i].name, NULL, &norm_linear_cases[i], v->seed + i});
    return true;
}

/* SPDX-License-Identifier: Apache-2.0
 * Dropout, bit by bit: with rows of zeros and ones the results of both passes say of each weight whether it was dropped,
 * and Random123 whether it should have been. And what a random rule has to be: as often as it says, and independent. */
#include "common.h"

#include "random123.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------------------------------------------- the truth */

/* heddle.h's rule: the number of an element. */
static uint32_t number_of(uint64_t seed, uint64_t offset, int64_t bh, int64_t i, int64_t j) {
    const philox4x32_ctr_t counter = {
        {(uint32_t)(j / 8), (uint32_t)bh, (uint32_t)i ^ (uint32_t)(offset >> 32), (uint32_t)offset}};
    const philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    return philox4x32_R(7, counter, key).v[j % 8 / 2] >> j % 2 * 16 & 0xffff;
}

/* Of each element of [b, h, sq, sk] whether it is seen, and kept; of each row how many are seen, and kept. */
typedef struct truth {
    int64_t h, sq, sk;
    double scale; /* of what is kept */
    bool *seen, *kept;
    int64_t *row_seen, *row_kept;
} truth;

static int64_t row_of(const truth *t, int64_t n, int64_t x, int64_t i) {
    return (n * t->h + x) * t->sq + i;
}

static truth truth_of(const attention_problem *p) {
    const heddle_attention *a = &p->a;
    const double dropped = floor(65536 * a->dropout + 0.5);
    const int64_t heads = a->whole_h ? a->whole_h : a->h;
    const size_t rows = (size_t)(a->b * a->h * a->sq);
    truth t = {.h = a->h,
               .sq = a->sq,
               .sk = a->sk,
               .scale = 65536 / (65536 - dropped),
               .seen = calloc(rows * (size_t)a->sk, sizeof(bool)),
               .kept = calloc(rows * (size_t)a->sk, sizeof(bool)),
               .row_seen = calloc(rows, sizeof(int64_t)),
               .row_kept = calloc(rows, sizeof(int64_t))};
    uint64_t state[2] = {a->seed, a->offset};
    if (p->t[T_RNG].host)
        memcpy(state, p->t[T_RNG].host + (size_t)p->t[T_RNG].guard * 8, sizeof state);
    for (int64_t n = 0; n < a->b; n++) {
        int64_t length[4];
        attention_lengths(p, n, length);
        for (int64_t x = 0; x < a->h; x++)
            for (int64_t i = 0; i < length[1]; i++) {
                const int64_t row = row_of(&t, n, x, i);
                const seen_keys keys = attention_sees(p, length, n, x, i, t.seen + row * t.sk);
                for (int64_t j = keys.from; j < keys.to; j++) {
                    const int64_t at = row * t.sk + j;
                    t.kept[at] = t.seen[at] && number_of(state[0], state[1], n * heads + a->h_offset + x,
                                                         a->q_offset + i, a->k_offset + j) >= dropped;
                    t.row_seen[row] += t.seen[at];
                    t.row_kept[row] += t.kept[at];
                }
            }
    }
    return t;
}

static void truth_free(truth *t) {
    free(t->seen);
    free(t->kept);
    free(t->row_seen);
    free(t->row_kept);
}

/* ------------------------------------------------------------------------------------------------- what is there */

/* A tensor of zeros but for ones where row (as the tensor has it, of every batch and head) and column agree: column = row - first +
 * shift; and ones in column 0 if `column0`. */
static void set_ones(tensor *t, int64_t heads, int64_t first, int64_t shift, bool column0) {
    for (int64_t n = 0; n < t->dim[0]; n++)
        for (int64_t x = 0; x < t->dim[1]; x++)
            for (int64_t i = 0; i < t->dim[2]; i++)
                for (int64_t e = 0; e < t->dim[3]; e++) {
                    const int64_t row = heads ? i * heads + x % heads : i;
                    tensor_set(t, n, x, i, e, (column0 && e == 0) || (e >= shift && row - first + shift == e));
                }
    tensor_upload(t);
}

static void set_zero(tensor *t) {
    set_ones(t, 0, INT64_MAX / 2, 0, false);
}

typedef struct job {
    attention_problem p;
    truth t;
    int64_t wrong, looked;
} job;

static void expect(job *k, bool right, const char *what, int64_t n, int64_t x, int64_t i, int64_t j, double got) {
    k->looked++;
    if (right)
        return;
    if (k->wrong++ < 5)
        printf("  %s: element %lld %lld %lld %lld: %g\n", what, (long long)n, (long long)x, (long long)i, (long long)j,
               got);
}

/* f(n, x, i, j) for every element of the sequences; first[0], first[1]: its rows of queries and of keys. */
typedef void element_check(job *k, int64_t n, int64_t x, int64_t i, int64_t j, const int64_t first[2], int64_t from);

static void for_each(job *k, element_check *f, int64_t from) {
    const heddle_attention *a = &k->p.a;
    for (int64_t n = 0; n < a->b; n++) {
        int64_t length[4];
        attention_lengths(&k->p, n, length);
        for (int64_t x = 0; x < a->h; x++)
            for (int64_t i = 0; i < length[1]; i++)
                for (int64_t j = 0; j < length[3]; j++)
                    f(k, n, x, i, j, (int64_t[]){length[0], length[2]}, from);
    }
}

static int64_t batch_of(const job *k, int64_t n) {
    return k->p.a.features & HEDDLE_VARLEN ? 0 : n;
}

/* V has ones for the keys from `from` on, and all weights of a row are alike: o is Z there, times a weight. */
static void check_o(job *k, int64_t n, int64_t x, int64_t i, int64_t j, const int64_t first[2], int64_t from) {
    const int64_t e = first[1] + j - from, row = row_of(&k->t, n, x, i), at = row * k->t.sk + j;
    if (e < 0 || e >= k->p.a.dv)
        return;
    const double o = tensor_get(&k->p.t[T_O], batch_of(k, n), x, first[0] + i, e);
    const double right = k->t.kept[at] ? k->t.scale / (double)k->t.row_seen[row] : 0;
    expect(k, k->t.kept[at] ? fabs(o / right - 1) < 0.01 : o == 0, "o", n, x, i, j, o);
}

/* dO has ones in columns 1 .. for the rows (query, head of the group) from `from` on: dV is Z there, times a weight. */
static void check_dv(job *k, int64_t n, int64_t x, int64_t i, int64_t j, const int64_t first[2], int64_t from) {
    const int64_t group = k->p.a.h / k->p.a.hk, e = (first[0] + i) * group + x % group - from + 1;
    const int64_t row = row_of(&k->t, n, x, i), at = row * k->t.sk + j;
    if (e < 1 || e >= k->p.a.dv)
        return;
    const double dv = tensor_get(&k->p.t[T_DV], batch_of(k, n), x / group, first[1] + j, e);
    const double right = k->t.kept[at] ? k->t.scale / (double)k->t.row_seen[row] : 0;
    expect(k, k->t.kept[at] ? fabs(dv / right - 1) < 0.01 : dv == 0, "dv", n, x, i, j, dv);
}

/* dS = P(Z·dP - D), where dP is 1: is it nearer to that of Z = 0 or to that of what is kept? */
static void check_ds(job *k, const char *what, int64_t n, int64_t x, int64_t i, int64_t j, double gradient) {
    const int64_t row = row_of(&k->t, n, x, i), at = row * k->t.sk + j;
    const double seen = (double)k->t.row_seen[row], d = k->t.scale * (double)k->t.row_kept[row] / seen;
    const double z = gradient / k->p.a.scale * seen + d;
    expect(k, k->t.seen[at] ? (k->t.kept[at] ? fabs(z / k->t.scale - 1) : fabs(z / k->t.scale)) < 0.1 : gradient == 0,
           what, n, x, i, j, gradient);
}

static void check_dq(job *k, int64_t n, int64_t x, int64_t i, int64_t j, const int64_t first[2], int64_t from) {
    const int64_t e = first[1] + j - from;
    if (e >= 0 && e < k->p.a.d)
        check_ds(k, "dq", n, x, i, j, tensor_get(&k->p.t[T_DQ], batch_of(k, n), x, first[0] + i, e));
}

static void check_dk(job *k, int64_t n, int64_t x, int64_t i, int64_t j, const int64_t first[2], int64_t from) {
    const int64_t group = k->p.a.h / k->p.a.hk, e = (first[0] + i) * group + x % group - from;
    if (e >= 0 && e < k->p.a.d)
        check_ds(k, "dk", n, x, i, j, tensor_get(&k->p.t[T_DK], batch_of(k, n), x / group, first[1] + j, e));
}

/* All elements of o, dv, dq and dk of a case. */
static void check_bits(attention_case c) {
    c.skip |= UINT32_C(1) << T_DLSE;
    job k = {.p = attention_new(&c)};
    k.t = truth_of(&k.p);
    tensor *t = k.p.t;
    const heddle_attention *a = &k.p.a;
    const int64_t group = a->h / a->hk, rows_k = t[T_K].dim[2], rows_q = t[T_Q].dim[2] * group;
    set_zero(&t[T_Q]);
    set_zero(&t[T_K]);
    for (int64_t from = 0; from < rows_k; from += a->dv) {
        set_ones(&t[T_V], 0, from, 0, false);
        attention_run(&k.p, HEDDLE_FORWARD);
        for_each(&k, check_o, from);
    }
    set_ones(&t[T_V], 0, INT64_MAX / 2, 0, true);
    attention_run(&k.p, HEDDLE_FORWARD);
    for (int64_t from = 0; from < rows_q; from += a->dv - 1) {
        set_ones(&t[T_DOUT], group, from, 1, true);
        attention_run(&k.p, HEDDLE_BACKWARD);
        for_each(&k, check_dv, from);
    }
    for (int64_t from = 0; from < rows_k; from += a->d) {
        set_ones(&t[T_K], 0, from, 0, false);
        attention_run(&k.p, HEDDLE_BACKWARD);
        for_each(&k, check_dq, from);
    }
    set_zero(&t[T_K]);
    for (int64_t from = 0; from < rows_q; from += a->d) {
        set_ones(&t[T_Q], group, from, 0, false);
        attention_run(&k.p, HEDDLE_BACKWARD);
        for_each(&k, check_dk, from);
    }
    if (k.wrong || !k.looked) {
        attention_print(&c);
        fail_msg("%lld of %lld elements are wrong", (long long)k.wrong, (long long)k.looked);
    }
    truth_free(&k.t);
    attention_free(&k.p);
}

/* A seed that three divides would move the tensors off their alignment, and the problem off the fastest kernels. */
static attention_case case_of(size_t x, int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d) {
    attention_case c = attention_case_of(b, h, hk, sq, sk, d, 0);
    c.seed = 3 * c.seed + 1;
    c.a.dtype = test_dtypes[x % TEST_DTYPES];
    c.a.dropout = 0.3;
    c.a.seed = UINT64_C(0x9e3779b97f4a7c15) * (x + 1);
    c.a.offset = x % 2 ? UINT64_C(0xd1b54a32d192ed03) * x : x;
    return c;
}

/* ---------------------------------------------------------------------------------------------------------- tests */

static void test_rates(void **state) {
    (void)state;
    static const double rates[] = {0, 0x1p-18, 0x1p-17, 0x1p-16, 0.001, 0.1, 0.5, 0.9, 0.999};
    for (size_t x = 0; x < COUNT(rates); x++)
        for (size_t type = 0; type < TEST_DTYPES; type++) {
            attention_case c = case_of(x + type, 1, 2, 1, 41, 83, 32);
            c.a.dtype = test_dtypes[type];
            c.a.dropout = rates[x];
            check_bits(c);
        }
}

/* Rates at which one element is just kept, or just dropped: each of a call's numbers. */
static void test_edges(void **state) {
    (void)state;
    for (int64_t j = 0; j < 16; j++) {
        attention_case c = case_of((size_t)j, 1, 2, 1, 19, 43, 32);
        const uint32_t number = number_of(c.a.seed, c.a.offset, j % 2, j, 16 + j);
        for (uint32_t t = number; t <= number + 1 && t < 65536; t++) {
            c.a.dropout = t / 65536.0;
            check_bits(c);
        }
    }
}

static void test_odd_sizes(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 1, 8},  {1, 200, 64}, {3, 9, 16},    {7, 31, 24},    {16, 64, 64},
                                       {17, 8, 8}, {65, 33, 64}, {130, 70, 64}, {33, 150, 128}, {129, 131, 128}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (int mask = 0; mask <= LAST_MASK; mask += test_emulated() ? 3 : 1) {
            attention_case c = case_of(x + (size_t)mask, 1, 2, 2, sizes[x][0], sizes[x][1], sizes[x][2]);
            c.a.mask = (heddle_mask)mask;
            if (x % 2)
                c.a.features |= HEDDLE_DETERMINISTIC;
            check_bits(c);
        }
}

/* Several tiles of each kernel of a GPU, and a part of one. */
static void test_tiles(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{270, 300, 64}, {300, 290, 128}, {150, 210, 256}, {200, 270, 96}, {40, 60, 320}};
    for (size_t x = 0; x < COUNT(sizes) && !test_emulated(); x++)
        for (size_t type = 0; type < TEST_DTYPES; type++)
            for (int sure = 0; sure < 2; sure++) {
                if (test_device() == HEDDLE_CPU && (sure || (type + x) % TEST_DTYPES))
                    continue;
                attention_case c = case_of(x + type, 1, 2, 1, sizes[x][0], sizes[x][1], sizes[x][2]);
                c.a.dtype = test_dtypes[type];
                c.a.features = HEDDLE_RNG_STATE | (sure ? HEDDLE_DETERMINISTIC : 0);
                c.a.mask = x % 2 ? HEDDLE_CAUSAL_TOP_LEFT : HEDDLE_MASK_NONE;
                check_bits(c);
            }
}

static void test_windows(void **state) {
    (void)state;
    static const int64_t windows[][2] = {{0, 0}, {21, 3}, {-1, 5}, {40, -1}, {77, 77}};
    for (size_t x = 0; x < COUNT(windows); x++) {
        attention_case c = case_of(x + 1, 1, 2, 1, 150, 137, 64);
        c.a.features = HEDDLE_WINDOW;
        c.a.window_left = windows[x][0];
        c.a.window_right = windows[x][1];
        check_bits(c);
    }
}

static void test_groups(void **state) {
    (void)state;
    static const int64_t heads[][3] = {{6, 2, 1}, {8, 1, 2}, {5, 1, 9}, {4, 4, 40}, {6, 3, 37}};
    for (size_t x = 0; x < COUNT(heads); x++) {
        attention_case c = case_of(x, 2, heads[x][0], heads[x][1], heads[x][2], 75, 64);
        c.a.features = x % 2 ? HEDDLE_RNG_STATE : 0;
        c.a.mask = x % 2 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        check_bits(c);
    }
}

static void test_packed(void **state) {
    (void)state;
    static const int32_t cu_q[] = {0, 3, 3, 40, 141}, cu_k[] = {0, 5, 14, 50, 163};
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        attention_case c = case_of(x, 4, 4, 2, 101, 113, 64);
        c.a.features = HEDDLE_VARLEN | HEDDLE_RNG_STATE;
        c.a.total_q = 141;
        c.a.total_k = 163;
        c.cu_q = cu_q;
        c.cu_k = cu_k;
        c.a.mask = (heddle_mask)x;
        check_bits(c);
    }
}

static void test_lengths(void **state) {
    (void)state;
    static const int32_t len_q[] = {70, 0, 33}, len_k[] = {90, 12, 41};
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        attention_case c = case_of(x, 3, 2, 1, 70, 90, 64);
        c.a.features = HEDDLE_SEQLENS;
        c.len_q = len_q;
        c.len_k = len_k;
        check_bits(c);
    }
}

static void test_masks(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        attention_case c = case_of(x, 1, 2, 2, 140, 200, 64);
        c.a.features = HEDDLE_BOOL_MASK;
        c.mask_density = 0.8;
        c.mask_tiles = x == 1 ? 64 : 0;
        check_bits(c);
    }
}

/* Parts of a whole have its bits: eights of keys that begin in the middle, rows and heads behind others. */
static void test_parts(void **state) {
    (void)state;
    static const struct {
        int64_t sq, q0, k0, h0, whole_h;
    } parts[] = {
        {70, 0, 8, 0, 0}, {70, 3, 5, 2, 6}, {1, 1000, 77, 1, 3}, {140, INT64_C(1) << 31, (INT64_C(1) << 33) + 3, 0, 0}};
    for (size_t y = 0; y < COUNT(parts); y++)
        for (size_t x = 0; x < TEST_DTYPES; x++) {
            attention_case c = case_of(x, 2, 2, 1, parts[y].sq, 90, 32);
            c.a.q_offset = parts[y].q0;
            c.a.k_offset = parts[y].k0;
            c.a.h_offset = parts[y].h0;
            c.a.whole_h = parts[y].whole_h;
            c.a.mask = y == 1 ? HEDDLE_CAUSAL_TOP_LEFT : HEDDLE_MASK_NONE;
            check_bits(c);
        }
}

/* ------------------------------------------------------------------------------------------------------ statistics */

/* Every kept element of the rule, as 0 or 1, less the probability that heddle.h states. */
static double *centred(double rate, int64_t heads, int64_t sq, int64_t sk) {
    const double dropped = floor(65536 * rate + 0.5);
    double *x = malloc(sizeof *x * (size_t)(heads * sq * sk));
    for (int64_t at = 0; at < heads * sq * sk; at++)
        x[at] = (number_of(test_seed(5), 77, at / sk / sq, at / sk % sq, at % sk) >= dropped) - (1 - dropped / 65536);
    return x;
}

/* The mean of x[at]·x[at + step] over the elements for which both are inside, in its own standard deviations. */
static double correlation(const double *x, int64_t heads, int64_t sq, int64_t sk, const int64_t step[3],
                          double variance) {
    double sum = 0, count = 0;
    for (int64_t n = 0; n + step[0] < heads; n++)
        for (int64_t i = 0; i + step[1] < sq; i++)
            for (int64_t j = 0; j + step[2] < sk; j++, count++)
                sum += x[(n * sq + i) * sk + j] * x[((n + step[0]) * sq + i + step[1]) * sk + j + step[2]];
    return sum / variance / sqrt(count);
}

/* The kept are as many as stated; and rows, columns, heads and neighbours know nothing of each other. */
static void test_statistics(void **state) {
    (void)state;
    enum { HEADS = 4, SQ = 256, SK = 512 };
    static const double rates[] = {0.001, 0.1, 0.25, 0.5, 0.9};
    static const int64_t steps[][3] = {{0, 0, 1}, {0, 0, 2}, {0, 0, 4},  {0, 0, 8}, {0, 0, 64},
                                       {0, 1, 0}, {0, 8, 0}, {0, 64, 0}, {1, 0, 0}, {0, 1, 1},
                                       {0, 1, 8}, {0, 8, 8}, {1, 1, 1},  {2, 0, 8}, {0, 2, 7}};
    for (size_t r = 0; r < COUNT(rates); r++) {
        double *x = centred(rates[r], HEADS, SQ, SK), sum = 0;
        const double kept = 1 - floor(65536 * rates[r] + 0.5) / 65536, variance = kept * (1 - kept);
        for (int64_t at = 0; at < HEADS * SQ * SK; at++)
            sum += x[at];
        assert_true(fabs(sum) < 4 * sqrt(variance * HEADS * SQ * SK));
        for (size_t s = 0; s < COUNT(steps); s++)
            assert_true(fabs(correlation(x, HEADS, SQ, SK, steps[s], variance)) < 4);
        double rows = 0, columns = 0; /* chi squares of their counts */
        for (int64_t row = 0; row < HEADS * SQ; row++) {
            sum = 0;
            for (int64_t j = 0; j < SK; j++)
                sum += x[row * SK + j];
            rows += sum * sum / variance / SK;
        }
        for (int64_t j = 0; j < SK; j++) {
            sum = 0;
            for (int64_t row = 0; row < HEADS * SQ; row++)
                sum += x[row * SK + j];
            columns += sum * sum / variance / (HEADS * SQ);
        }
        /* Of a sum of n elements the fourth moment adds (1/variance - 6)/n to the variance 2 of a square. */
        assert_true(fabs(rows / (HEADS * SQ) - 1) < 4 * sqrt((2 + 1 / variance / SK) / (HEADS * SQ)));
        assert_true(fabs(columns / SK - 1) < 4 * sqrt((2 + 1 / variance / (HEADS * SQ)) / SK));
        free(x);
    }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rates),  cmocka_unit_test(test_edges),      cmocka_unit_test(test_odd_sizes),
        cmocka_unit_test(test_tiles),  cmocka_unit_test(test_windows),    cmocka_unit_test(test_groups),
        cmocka_unit_test(test_packed), cmocka_unit_test(test_lengths),    cmocka_unit_test(test_masks),
        cmocka_unit_test(test_parts),  cmocka_unit_test(test_statistics),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

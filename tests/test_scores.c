/* SPDX-License-Identifier: Apache-2.0
 * Attention with large scores, of both signs, up to 1e30. Every score is a float32 number whatever the order of its sum: q and k hold
 * small whole numbers times powers of two, and a constant. So float64 has the same scores and the same ties among them, and all that
 * is left to differ is the ordinary rounding of P and of sums. */
#include "common.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* S = sign·(2^constant·step[j] + 2^unit·(whole numbers up to 24)) + 2^bias·step[j]; sinks and slopes are as large. An exponent
 * of NONE: there is none. */
enum { NONE = -1000 };
typedef struct scores {
    const char *what;
    int unit, constant, bias;
    int sign, bias_sign;
    int ramp;  /* step[j]: 0: 1, else whole numbers that rise (1) or fall (-1) from one end of the keys to the other */
    bool soft; /* several keys have a weight, and gradients are not all zero */
} scores;

typedef struct shape {
    int64_t b, h, hk, sq, sk, d;
    heddle_mask mask;
    int64_t left; /* the window, to the right 0; negative: none */
} shape;

static const shape shapes[] = {
    {1, 1, 1, 1, 1, 1, HEDDLE_MASK_NONE, -1},          {1, 1, 1, 1, 2, 8, HEDDLE_MASK_NONE, -1},
    {1, 1, 1, 37, 37, 1, HEDDLE_MASK_NONE, -1},        {2, 2, 1, 3, 37, 64, HEDDLE_MASK_NONE, -1},
    {1, 1, 1, 37, 37, 64, HEDDLE_CAUSAL_TOP_LEFT, -1}, {1, 2, 2, 70, 300, 128, HEDDLE_CAUSAL_BOTTOM_RIGHT, -1},
    {1, 1, 1, 150, 150, 64, HEDDLE_MASK_NONE, 1},      {1, 1, 1, 140, 300, 64, HEDDLE_MASK_NONE, -1},
    {1, 4, 1, 1, 3000, 64, HEDDLE_MASK_NONE, -1},      {1, 8, 2, 1, 300, 128, HEDDLE_MASK_NONE, -1},
    {1, 1, 1, 37, 1000, 256, HEDDLE_MASK_NONE, -1},    {1, 1, 1, 300, 37, 16, HEDDLE_CAUSAL_TOP_LEFT, -1},
    {1, 2, 1, 20, 33, 320, HEDDLE_MASK_NONE, -1},
};

static const scores kinds[] = {
    {"units of 2^7", 7, NONE, NONE, 1, 1, 0, false},
    {"units of 2^13", 13, NONE, NONE, 1, 1, 0, false},
    {"units of 2^20", 20, NONE, NONE, -1, 1, 0, false},
    {"units of 2^27", 27, NONE, NONE, 1, 1, 0, false},
    {"units of 2^30", 30, NONE, NONE, 1, 1, 0, false},
    {"units of 2^33", 33, NONE, NONE, -1, 1, 0, false},
    {"units of 2^40", 40, NONE, NONE, 1, 1, 0, false},
    {"units of 2^66", 66, NONE, NONE, 1, 1, 0, false},
    {"units of 2^94", 94, NONE, NONE, 1, 1, 0, false},
    {"units of 2^115", 115, NONE, NONE, 1, 1, 0, false},
    {"units of 2^123, up to 1.5*2^127", 123, NONE, NONE, -1, 1, 0, false},
    {"1e3, soft", -1, 10, NONE, 1, 1, 0, true},
    {"-1e4, soft", -1, 14, NONE, -1, 1, 0, true},
    {"2e5, soft", -1, 18, NONE, 1, 1, 0, true},
    {"-1e6, soft", -1, 20, NONE, -1, 1, 0, true},
    {"2^24 and whole numbers of 8", 3, 24, NONE, 1, 1, 0, false},
    {"-2^27 and whole numbers of 64", 6, 27, NONE, -1, 1, 0, false},
    {"2^30 and whole numbers of 512", 9, 30, NONE, 1, 1, 0, false},
    {"-2^40 and whole numbers of 2^20", 20, 40, NONE, -1, 1, 0, false},
    {"-1e30 and ties", 80, 100, NONE, -1, 1, 0, false},
    {"from -2^20 up to 2^20, soft", -1, 18, NONE, 1, 1, 1, true},
    {"from 2^26 down", 4, 24, NONE, 1, 1, -1, false},
    {"from -2^32 up to 2^32", 10, 30, NONE, 1, 1, 1, false},
    {"from 2^102 down", 80, 100, NONE, 1, 1, -1, false},
    {"bias of 1e4, soft", -1, NONE, 13, 1, 1, 0, true},
    {"bias of -1e4, soft", -1, NONE, 13, 1, -1, 0, true},
    {"bias of 1e6, soft", -1, NONE, 20, -1, 1, 0, true},
    {"bias of -2^24", 4, NONE, 24, 1, -1, 0, false},
    {"bias of -2^25", 7, NONE, 25, 1, -1, 0, false},
    {"bias of 2^29", 11, NONE, 29, 1, 1, 0, false},
    {"bias of 1e10", 15, NONE, 33, -1, 1, 0, false},
    {"bias of -1e10", 15, NONE, 33, 1, -1, 0, false},
    {"bias of 1e20", 46, NONE, 66, 1, 1, 0, false},
    {"biases that rise to 2^126", 118, NONE, 124, 1, 1, 1, false},
    {"products and biases of 1.5*2^127", 118, 127, 126, 1, 1, 0, false},
    {"products and biases of -1.5*2^127", 118, 127, 126, -1, -1, 0, false},
    {"biases that fall to -2^126", 118, NONE, 124, 1, -1, 1, false},
    {"bias of 1e30", 80, NONE, 100, 1, 1, 0, false},
    {"biases that rise to 1e30", 80, NONE, 98, 1, 1, 1, false},
    {"bias of -1e30", 80, NONE, 100, -1, -1, 0, false},
    {"biases that fall to -1e30", 80, NONE, 98, 1, -1, 1, false},
    {"bias of -2^126", 106, NONE, 126, 1, -1, 0, false},
    {"bias of -2^127", 107, NONE, 127, 1, -1, 0, false},
    {"biases that fall to -2^127", 119, NONE, 125, 1, -1, 1, false},
    {"biases that rise to 2^127", 119, NONE, 125, 1, 1, 1, false},
};

/* What is not in range for float16 comes from the scale, which is then a power of two, or is left out. */
static int shift_of(const scores *s, heddle_dtype dtype) {
    const int most = s->constant > s->unit ? s->constant : s->unit;
    return dtype == HEDDLE_F16 && most > 24 ? most - 24 : 0;
}

static double power(int exponent) {
    return exponent <= NONE / 2 ? 0 : ldexp(1, exponent);
}

/* 1, or a whole number of -4 .. 4 that grows by one every ninth of the keys. */
static double step_of(const scores *s, int64_t j, int64_t sk) {
    return s->ramp ? (double)(s->ramp * (j * 9 / sk - 4)) : 1;
}

/* Half of an exponent, so that q and k share it. */
static double half_power(int exponent, bool first) {
    return exponent <= NONE / 2 ? 0 : power(first ? exponent / 2 : exponent - exponent / 2);
}

/* A row's element 0 is for the constant, if there is one, and up to six others hold the whole numbers. */
static void fill_rows(tensor *t, const scores *s, int shift, bool is_q, rng *r) {
    const int64_t d = t->dim[3], first = s->constant != NONE;
    const int unit = s->unit - shift, constant = s->constant == NONE ? NONE : s->constant - shift;
    for (int64_t n = 0; n < t->dim[0]; n++)
        for (int64_t x = 0; x < t->dim[1]; x++)
            for (int64_t i = 0; i < t->dim[2]; i++) {
                for (int64_t e = 0; e < d; e++)
                    tensor_set(t, n, x, i, e, 0);
                const double step = is_q ? s->sign : step_of(s, i, t->dim[2]);
                if (first)
                    tensor_set(t, n, x, i, 0, step * half_power(constant, is_q));
                for (int64_t z = 0; z < 6 && d > first; z++)
                    tensor_set(t, n, x, i, first + (d > 8 ? z * ((d - 1) / 6) : z % (d - first)),
                               (double)rng_between(r, -2, 2) * half_power(unit, is_q));
            }
}

static void fill_scores(attention_problem *p, const scores *s, int shift, rng *r) {
    tensor *bias = &p->t[T_BIAS];
    fill_rows(&p->t[T_Q], s, shift, true, r);
    fill_rows(&p->t[T_K], s, shift, false, r);
    for (int64_t n = 0; bias->host && n < bias->dim[0]; n++)
        for (int64_t x = 0; x < bias->dim[1]; x++)
            for (int64_t i = 0; i < bias->dim[2]; i++)
                for (int64_t j = 0; j < bias->dim[3]; j++)
                    tensor_set(bias, n, x, i, j, s->bias_sign * step_of(s, j, bias->dim[3]) * power(s->bias));
    const int most = s->constant > s->bias ? s->constant : s->bias > s->unit ? s->bias : s->unit;
    for (int64_t x = 0; p->t[T_ALIBI].host && x < p->t[T_ALIBI].span; x++)
        tensor_raw_set(&p->t[T_ALIBI], x, power(s->unit + (x % 2 ? 1 : 0)));
    for (int64_t x = 0; p->t[T_SINKS].host && x < p->t[T_SINKS].span;
         x++) /* the largest score may well be equal to it */
        tensor_raw_set(&p->t[T_SINKS], x,
                       (x % 2 ? -1 : s->sign) * power(most) + (most == s->unit ? power(most + 1) : 0));
    for (int x = 0; x < T_O; x++)
        tensor_upload(&p->t[x]);
}

static double largest(const tensor *t) {
    double most = 0;
    for (int64_t at = 0; t->host && at < t->span; at++)
        if (isfinite(tensor_raw(t, at)))
            most = fmax(most, fabs(tensor_raw(t, at)));
    return most;
}

static double largest_norm(const tensor *t) {
    double most = 0;
    for (int64_t n = 0; n < t->dim[0]; n++)
        for (int64_t x = 0; x < t->dim[1]; x++)
            for (int64_t i = 0; i < t->dim[2]; i++) {
                double sum = 0;
                for (int64_t e = 0; e < t->dim[3]; e++)
                    sum += tensor_get(t, n, x, i, e) * tensor_get(t, n, x, i, e);
                most = fmax(most, sqrt(sum));
            }
    return most;
}

static bool is_near(const char *name, const tensor *x, const tensor *ref, double noise) {
    const double rounding = x->element == HEDDLE_BF16 ? 0x1p-8 : x->element == HEDDLE_F16 ? 0x1p-11 : 0x1p-24;
    bool right = true;
    for (int64_t at = 0; right && at < x->span; at++) {
        const double y = tensor_raw(x, at), r = tensor_raw(ref, at);
        right = !x->reached[at] || tensor_is_poison(x, at) || y == r || fabs(y - r) <= noise + 2 * rounding * fabs(r);
        right = right && (!x->reached[at] || tensor_is_poison(x, at) == tensor_is_poison(ref, at));
        if (!right)
            printf("  %s: %.9g at element %lld of the span, ref %.9g, tolerance %.3g\n", name, y, (long long)at, r,
                   noise);
    }
    return right;
}

/* Both passes of p against float64; every error in roundings of the terms that its tensor is a sum of. */
static bool is_right(attention_problem *p, bool soft) {
    attention_problem ref = attention_copy(p, HEDDLE_F64, HEDDLE_REF);
    attention_run(p, HEDDLE_FORWARD);
    attention_run(&ref, HEDDLE_FORWARD);
    attention_run(p, HEDDLE_BACKWARD);
    attention_run(&ref, HEDDLE_BACKWARD);
    const heddle_attention *a = &p->a;
    const double rows = sqrt((double)(a->sq * a->h / a->hk)),
                 norms = largest_norm(&p->t[T_DOUT]) * largest_norm(&p->t[T_V]);
    const double dp = 4 + (a->dtype == HEDDLE_F32 ? norms : 4 * norms / sqrt((double)a->dv));
    const double terms[T_COUNT] = {[T_O] = largest(&p->t[T_V]),
                                   [T_LSE] = largest(&ref.t[T_LSE]),
                                   [T_WEIGHTS] = 1,
                                   [T_DQ] = fabs(a->scale) * largest(&p->t[T_K]) * dp,
                                   [T_DK] = fabs(a->scale) * largest(&p->t[T_Q]) * dp * rows,
                                   [T_DV] = largest(&p->t[T_DOUT]) * rows,
                                   [T_DBIAS] = dp * (a->dbias_stride.s ? 1 : rows),
                                   [T_DSINKS] = dp * sqrt((double)(a->b * a->sq))};
    const double rounding = a->dtype == HEDDLE_BF16 ? 0x1p-8 : a->dtype == HEDDLE_F16 ? 0x1p-11 : 0x1p-23;
    bool right = true;
    for (int x = T_O; x < T_COUNT; x++) {
        if (!(terms[x] > 0) || !p->t[x].host || (a->dtype == HEDDLE_F16 && largest(&ref.t[x]) > 65504))
            continue; /* some gradients are out of float16's range */
        const double noise = (x == T_LSE ? 0x1p-23 : 4 * rounding) * terms[x];
        right = is_near(attention_tensor_name[x], &p->t[x], &ref.t[x], noise) && right;
        const bool tells = x == T_O || a->dtype == HEDDLE_F32 ||
                           (x == T_DV && a->sk < 20 * a->sq); /* of many keys to a query each has a little of dO */
        if (soft && tells && largest(&ref.t[x]) < 2 * noise) {
            printf("  %s: %g is so small that zeros would pass\n", attention_tensor_name[x], largest(&ref.t[x]));
            right = false;
        }
    }
    attention_free(&ref);
    return right;
}

/* The scale is 2^shift, and products of q and k are 2^-shift times the scores. */
static void check(const shape *h, const scores *s, int shift, heddle_dtype dtype, uint64_t features, uint64_t seed) {
    attention_case c = attention_case_of(h->b, h->h, h->hk, h->sq, h->sk, h->d, 0);
    rng r = {seed * 0x9E3779B97F4A7C15u + 5};
    c.seed = seed;
    c.a.dtype = dtype;
    c.a.mask = h->mask;
    c.a.features = features | (h->left >= 0 ? HEDDLE_WINDOW : 0) | (s->bias != NONE ? HEDDLE_BIAS : 0);
    c.a.window_left = h->left >= 0 ? h->left : 0;
    c.a.scale = ldexp(1, shift);
    if ((s->constant != NONE && h->d < 2) || (dtype == HEDDLE_F16 && s->bias != NONE && s->bias > 13))
        return;
    attention_problem p = attention_new(&c);
    fill_scores(&p, s, shift, &r);
    const bool right = is_right(&p, s->soft && h->sk > 30 && h->d > 8 && h->left < 0);
    attention_free(&p);
    if (right)
        return;
    attention_print(&c);
    fail_msg("attention is wrong with %s", s->what);
}

static void test_sizes(void **state) {
    (void)state;
    for (size_t x = 0; x < COUNT(kinds); x++)
        for (size_t y = 0; y < COUNT(shapes); y++)
            if (test_long() || shapes[y].sq * shapes[y].sk < 2000 || (x + y) % (test_emulated() ? 9 : 3) == 0) {
                const heddle_dtype dtype = test_dtypes[(x + y / 3) % 3];
                check(&shapes[y], &kinds[x], shift_of(&kinds[x], dtype), dtype, 0, 100 * x + y);
            }
}

static void test_options(void **state) {
    (void)state;
    static const uint64_t options[] = {HEDDLE_SINKS,   HEDDLE_ALIBI,
                                       HEDDLE_WEIGHTS, HEDDLE_ALIBI | HEDDLE_SINKS | HEDDLE_WEIGHTS,
                                       HEDDLE_BIAS,    HEDDLE_BOOL_MASK | HEDDLE_SINKS};
    for (size_t x = 0; x < COUNT(kinds); x++)
        for (size_t y = 0; y < COUNT(shapes); y++) {
            const uint64_t option = options[(x + y) % COUNT(options)];
            if (kinds[x].soft && option & HEDDLE_ALIBI && shapes[y].sk > 1000)
                continue; /* a slope of 1/2 and 2^20: whole numbers of 24 bits and no more */
            if (test_long() || shapes[y].sq * shapes[y].sk < 2000 || (x + y) % (test_emulated() ? 11 : 4) == 0) {
                scores s = kinds[x];
                s.soft = false;
                if (option & HEDDLE_BIAS && s.bias == NONE)
                    s.bias = s.unit + 1;
                const heddle_dtype dtype = test_dtypes[(x + y / 4) % 3];
                check(&shapes[y], &s, shift_of(&s, dtype), dtype, option, 1000 + 100 * x + y);
            }
        }
}

/* Products of q and k beyond float32's range, whose scores have a place in it: on the CPU (docs/limits.md). */
static void test_products(void **state) {
    (void)state;
    static const scores beyond[] = {
        {"products of 1.5*2^129", 123, NONE, NONE, -1, 1, 0, false},
        {"products of -1.5*2^129 and biases", 122, 127, 126, -1, 1, 0, false},
        {"products from -1.5*2^129 up to 1.5*2^129", 119, 125, NONE, 1, 1, 1, false},
    };
    if (test_device() != HEDDLE_CPU || test_emulated())
        skip();
    for (size_t x = 0; x < COUNT(beyond); x++)
        for (size_t y = 0; y < COUNT(shapes); y++)
            for (size_t type = 0; type < 2; type++)
                check(&shapes[y], &beyond[x], -2, test_dtypes[type], 0, 3000 + 100 * x + 2 * y + type);
}

/* Any numbers: scores of 1e10 so far apart that one key has all the weight. */
static void test_random(void **state) {
    (void)state;
    static const double magnitudes[] = {3e4, 1e5, 1e7, 1e12};
    for (size_t x = 0; x < COUNT(magnitudes); x++)
        for (size_t y = 0; y < 4; y++)
            for (size_t type = 0; type < 2; type++) {
                static const int64_t keys[] = {1, 2, 37, 300};
                attention_case c = attention_case_of(1, 2, 1, 37, keys[y], 1, 0);
                c.a.dtype = test_dtypes[type];
                c.a.scale = y % 2 ? 1 : -3;
                c.q_magnitude = c.k_magnitude = magnitudes[x];
                attention_problem p = attention_new(&c);
                const bool right = is_right(&p, false);
                attention_free(&p);
                if (right)
                    continue;
                attention_print(&c);
                fail_msg("attention is wrong with random scores of %g", magnitudes[x] * magnitudes[x]);
            }
}

/* A bias of 1e10 or -1e10 leaves nothing of scores of about 1 in float32: all keys have the same weight. */
static void test_constant_bias(void **state) {
    (void)state;
    static const double biases[] = {1e10, 1e20, 1e30, 3e38, -1e10, -1e20, -1e30, -8e37, -3.38e38};
    for (size_t x = 0; x < COUNT(biases) * 6; x++) {
        const bool zero_q = x / COUNT(biases) % 2;
        attention_case c = attention_case_of(1, 2, 1, 37, x % 2 ? 300 : 37, 64, 0);
        c.a.dtype = test_dtypes[x % 2];
        c.a.features = HEDDLE_BIAS;
        c.a.bias_stride = c.a.dbias_stride = (heddle_strides){0, 0, HEDDLE_BROADCAST};
        c.a.mask = (heddle_mask)(x / COUNT(biases) / 2);
        attention_problem p = attention_new(&c);
        tensor *none = &p.t[zero_q ? T_Q : T_K], *bias = &p.t[T_BIAS];
        for (int64_t at = 0; at < none->span; at++)
            tensor_raw_set(none, at, 0);
        for (int64_t at = 0; at < bias->span; at++)
            tensor_raw_set(bias, at, biases[x % COUNT(biases)]);
        tensor_upload(none);
        tensor_upload(bias);
        const bool right = is_right(&p, false);
        attention_free(&p);
        if (right)
            continue;
        attention_print(&c);
        fail_msg("attention is wrong with a bias of %g", biases[x % COUNT(biases)]);
    }
}

/* The ends of what scale and softcap may be. */
static void test_factors(void **state) {
    (void)state;
    static const struct {
        double scale, softcap, magnitude;
    } factors[] = {{0x1p-100, 0, 1},
                   {0x1p100, 0, 0x1p-50},
                   {-0x1p100, 0, 0x1p-50},
                   {-0x1p-100, 0, 0x1p40},
                   {1e-30, 0, 1e15},
                   {0, 0x1p-97, 1},
                   {0, 1e-10, 1},
                   {0, 1e10, 1},
                   {0, 0x1p97, 1},
                   {0x1p50, 0x1p-50, 0x1p-50},
                   {0x1p-50, 0x1p50, 0x1p25}};
    for (size_t x = 0; x < COUNT(factors); x++)
        for (size_t type = 0; type < 2; type++) {
            attention_case c = attention_case_of(1, 2, 1, 37, 50, 16, 0);
            c.a.dtype = test_dtypes[type];
            c.a.scale = factors[x].scale;
            c.a.softcap = factors[x].softcap;
            c.q_magnitude = c.k_magnitude = factors[x].magnitude;
            check_attention(&c);
        }
}

/* Usual scores of inputs that are not far from the largest numbers, which a kernel may have to divide into parts. */
static void test_large_inputs(void **state) {
    (void)state;
    static const struct {
        double q, k, v, scale;
    } inputs[] = {{1e-6, 1e36, 1, 1e-30}, {2e36, 1e-6, 1, 1e-30}, {1, 1, 1e36, 0}};
    for (size_t x = 0; x < COUNT(inputs); x++)
        for (size_t type = 0; type < 2; type++) {
            attention_case c = attention_case_of(1, 2, 1, 37, 150, 16, 0);
            c.a.dtype = test_dtypes[type];
            c.a.scale = inputs[x].scale;
            c.q_magnitude = inputs[x].q;
            c.k_magnitude = inputs[x].k;
            c.v_magnitude = inputs[x].v;
            check_attention(&c);
        }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),         cmocka_unit_test(test_options), cmocka_unit_test(test_random),
        cmocka_unit_test(test_constant_bias), cmocka_unit_test(test_factors), cmocka_unit_test(test_large_inputs),
        cmocka_unit_test(test_products),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_ACCUMULATE and heddle_attention_merge: keys in parts, one call after another, against all keys at once in float64; the error
 * may be twice that of one call in the same type. */
#include "parts.h"

#include "dtype.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The largest error of a result, of sums or of one call, and the largest magnitude of what it should be. */
static double error_of(const tensor *ref, const tensor *one, heddle_dtype real, const void *sum, double there,
                       int64_t gap, double *magnitude) {
    double worst = 0;
    int64_t at = 0;
    for (int64_t n = 0; n < ref->dim[0]; n++)
        for (int64_t x = 0; x < ref->dim[1]; x++)
            for (int64_t i = 0; i < ref->dim[2]; i++, at += gap)
                for (int64_t e = 0; e < ref->dim[3]; e++, at++) {
                    const double right = tensor_get(ref, n, x, i, e);
                    const double got = one ? tensor_get(one, n, x, i, e) : load_element(real, sum, at) - there;
                    if (isinf(right)) {
                        assert_true(got == right);
                        continue;
                    }
                    *magnitude = fmax(*magnitude, fabs(right));
                    worst = fmax(worst, isnan(got) ? INFINITY : fabs(got - right));
                }
    return worst;
}

static void compare(const char *name, const tensor *ref, const tensor *one, const sums *s, const numbers *sum,
                    double there) {
    double magnitude = 0;
    numbers_download(sum);
    const int64_t gap = there != 0 ? s->gap : 0; /* of gradients */
    const double mine = error_of(ref, NULL, s->real, sum->host, there, gap, &magnitude);
    const double its = error_of(ref, one, s->real, NULL, 0, 0, &magnitude);
    if (gap && !sums_gaps_unchanged(s, sum, ref->dim[3]))
        fail_msg("%s: written between its rows", name);
    const double unit = s->real == HEDDLE_F64 ? 0x1p-48 : 0x1p-23; /* one call of float64 is the reference itself */
    if (!(mine <= 2 * its + 4 * unit * (magnitude + there)))
        fail_msg("%s: error %g, of one call %g, of magnitude %g", name, mine, its, magnitude);
}

static void check_gaps(const attention_case *c, heddle_dtype dtype, heddle_device device, const int64_t *ends,
                       int64_t gap) {
    attention_problem first = attention_new(c), p = attention_copy(&first, dtype, device),
                      ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
    attention_problem *const both[] = {&p, &ref};
    for (size_t x = 0; x < COUNT(both); x++) {
        attention_run(both[x], HEDDLE_FORWARD);
        attention_run(both[x], HEDDLE_BACKWARD);
    }
    sums s = sums_new(&p.a, gap);
    for (int pass = 0; pass < 2; pass++)
        for (int64_t from = 0, x = 0; from < p.a.sk; from = ends[x++])
            assert_true(run_part(&p, &s, (heddle_pass)pass, from, ends[x]));
    compare("o", &ref.t[T_O], &p.t[T_O], &s, &s.o, 0);
    compare("lse", &ref.t[T_LSE], &p.t[T_LSE], &s, &s.lse, 0);
    compare("dq", &ref.t[T_DQ], &p.t[T_DQ], &s, &s.dq, THERE);
    compare("dk", &ref.t[T_DK], &p.t[T_DK], &s, &s.dk, THERE);
    compare("dv", &ref.t[T_DV], &p.t[T_DV], &s, &s.dv, THERE);
    for (int x = T_DBIAS; x <= T_DSINKS; x++) /* the parts have written them over what the one call left */
        if (p.t[x].host) {
            double magnitude = 0;
            tensor_download(&p.t[x]);
            const double error = tensor_error(&p.t[x], &ref.t[x], &magnitude);
            const double unit = dtype == HEDDLE_BF16 ? 0x1p-8 : dtype == HEDDLE_F16 ? 0x1p-11 : 0x1p-20;
            assert_true(error <= 4 * unit * magnitude);
        }
    sums_free(&s);
    attention_free(&ref);
    attention_free(&p);
    attention_free(&first);
}

static void check_parts(const attention_case *c, heddle_dtype dtype, heddle_device device, const int64_t *ends) {
    check_gaps(c, dtype, device, ends, 0);
}

/* In halves, in odd parts, and key by key at their head. */
static void check_all(attention_case c) {
    const int64_t sk = c.a.sk, halves[] = {sk / 2, sk}, odd[] = {1, 2, sk / 3 + 2, sk - 1, sk}, all[] = {sk};
    for (int x = 0; x < TEST_DTYPES; x++) {
        check_parts(&c, test_dtypes[x], test_device(), odd);
        check_parts(&c, test_dtypes[x], test_device(), x == 0 ? halves : all);
    }
    if (test_device() == HEDDLE_CUDA)
        return;
    check_parts(&c, HEDDLE_F64, HEDDLE_REF, odd);
    check_parts(&c, HEDDLE_BF16, HEDDLE_REF, halves);
}

static void test_sizes(void **state) {
    (void)state;
    static const int64_t sizes[][7] = {{2, 4, 2, 31, 45, 40, 24},
                                       {1, 2, 1, 1, 300, 64, 64},
                                       {1, 1, 1, 130, 700, 16, 16},
                                       {2, 2, 2, 3, 17, 5, 9},
                                       {1, 8, 1, 70, 129, 32, 48}};
    for (size_t x = 0; x < COUNT(sizes); x++) {
        const int64_t *n = sizes[x];
        check_all(attention_case_of(n[0], n[1], n[2], n[3], n[4], n[5], n[6]));
    }
}

/* A head dim for each family of kernels for a GPU's tensor cores, in order and not, and the kernels with all options. */
static void test_tensor_cores(void **state) {
    (void)state;
    if (test_device() != HEDDLE_CUDA)
        skip();
    static const int64_t dims[] = {64, 96, 128, 192, 256, 320};
    static const uint64_t features[] = {0, HEDDLE_DETERMINISTIC, HEDDLE_ALIBI, HEDDLE_ALIBI | HEDDLE_DETERMINISTIC};
    for (size_t x = 0; x < COUNT(dims); x++)
        for (size_t y = 0; y < COUNT(features); y++)
            for (int z = 0; z < TEST_DTYPES; z++) {
                attention_case c = attention_case_of(1, 2, y % 2 ? 1 : 2, 140, 300, dims[x], dims[x]);
                c.a.features = features[y];
                c.a.mask = y > 1 ? HEDDLE_CAUSAL_TOP_LEFT : HEDDLE_MASK_NONE;
                check_parts(&c, test_dtypes[z], HEDDLE_CUDA, (const int64_t[]){1, 130, 299, 300});
            }
}

/* Gradients whose rows do not begin at whole 16 bytes, and some that do: kernels add to either in a way of its own. */
static void test_rows_apart(void **state) {
    (void)state;
    static const int64_t dims[] = {64, 128, 192, 256, 40}, gaps[] = {1, 4};
    for (size_t x = 0; x < COUNT(dims); x++)
        for (int y = 0; y < 4; y++)
            for (int z = 0; z < TEST_DTYPES; z++) {
                attention_case c = attention_case_of(1, 2, 1, 70, 140, dims[x], dims[x]);
                c.a.features = y % 2 ? HEDDLE_DETERMINISTIC : 0;
                check_gaps(&c, test_dtypes[z], test_device(), (const int64_t[]){64, 140}, gaps[y / 2]);
            }
}

/* The gradient of the first keys by a call that is given o and lse of all, as a ring of processes makes it. */
static void check_share(const attention_case *c, heddle_dtype dtype, heddle_device device, int64_t end) {
    static const int results[] = {T_DQ, T_DK, T_DV};
    attention_problem first = attention_new(c), p = attention_copy(&first, dtype, device),
                      ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
    sums s = sums_new(&ref.a, 0);
    const numbers *const sum[] = {&s.dq, &s.dk, &s.dv};
    assert_true(run_part(&ref, &s, HEDDLE_FORWARD, 0, c->a.sk) && run_part(&ref, &s, HEDDLE_BACKWARD, 0, end));
    attention_run(&p, HEDDLE_FORWARD);
    assert_true(run_share(&p, end));
    for (size_t x = 0; x < COUNT(results); x++) {
        const tensor *t = &p.t[results[x]];
        double worst = 0, magnitude = 0;
        tensor_download(&p.t[results[x]]);
        numbers_download(sum[x]);
        for (int64_t at = 0, rows = t->dim[2], last = x ? end : rows; at < t->dim[0] * t->dim[1] * last; at++)
            for (int64_t e = 0; e < t->dim[3]; e++) {
                const int64_t n = at / last / t->dim[1], h = at / last % t->dim[1], i = at % last;
                const int64_t place = ((n * t->dim[1] + h) * rows + i) * t->dim[3] + e;
                const double right = load_element(s.real, sum[x]->host, place) - THERE,
                             error = fabs(tensor_get(t, n, h, i, e) - right);
                magnitude = fmax(magnitude, fabs(right));
                worst = error <= worst ? worst : error;
            }
        const double unit = dtype == HEDDLE_BF16  ? 0x1p-6
                            : dtype == HEDDLE_F16 ? 0x1p-9
                            : dtype == HEDDLE_F32 ? 0x1p-18
                                                  : 0x1p-40;
        if (!(worst <= unit * magnitude))
            fail_msg("%s, type %d: error %g of %g", attention_tensor_name[results[x]], dtype, worst, magnitude);
    }
    sums_free(&s);
    attention_free(&ref);
    attention_free(&p);
    attention_free(&first);
}

static void test_shares(void **state) {
    (void)state;
    static const int64_t sizes[][5] = {{70, 200, 100, 64, 64}, {130, 256, 128, 128, 128}, {33, 90, 40, 32, 16},
                                       {40, 300, 3, 96, 96},   {20, 20, 8, 256, 256},     {66, 160, 128, 320, 320}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (int y = 0; y < 5; y++) {
            const int64_t *n = sizes[x];
            attention_case c = attention_case_of(1, 4, y == 1 ? 2 : 4, n[0], n[1], n[3], n[4]);
            c.a.mask = y == 1 ? HEDDLE_CAUSAL_TOP_LEFT : HEDDLE_MASK_NONE;
            c.a.softcap = y == 2 ? 5 : 0;
            c.a.features = y == 2 ? HEDDLE_SINKS : y == 3 ? HEDDLE_BIAS | HEDDLE_BOOL_MASK : 0;
            c.a.dropout = y == 4 ? 0.2 : 0;
            c.skip = UINT32_C(1) << T_DSINKS | UINT32_C(1) << T_DBIAS;
            for (int z = 0; z < TEST_DTYPES; z++)
                check_share(&c, test_dtypes[z], test_device(), n[2]);
            if (test_device() != HEDDLE_CUDA)
                check_share(&c, HEDDLE_F64, HEDDLE_REF, n[2]);
        }
}

static attention_case usual(void) {
    return attention_case_of(2, 4, 2, 37, 70, 24, 16);
}

static void test_masks(void **state) {
    (void)state;
    for (int mask = 0; mask <= LAST_MASK; mask++)
        for (int window = 0; window < 2; window++) {
            attention_case c = usual();
            c.a.mask = (heddle_mask)mask;
            c.a.features = window ? HEDDLE_WINDOW | HEDDLE_ALIBI : 0;
            c.a.window_left = window ? 11 : 0;
            c.a.window_right = window ? 4 : 0;
            c.poison_masked = true; /* parts that nobody sees are NaN altogether */
            if (mask || window)
                check_all(c);
        }
}

static void test_options(void **state) {
    (void)state;
    static const uint64_t features[] = {HEDDLE_SINKS, HEDDLE_BIAS, HEDDLE_BOOL_MASK | HEDDLE_SINKS, HEDDLE_RNG_STATE};
    for (size_t x = 0; x < COUNT(features); x++) {
        attention_case c = usual();
        c.a.features = features[x];
        c.a.mask = x % 2 ? HEDDLE_CAUSAL_TOP_LEFT : HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.a.softcap = x == 1 ? 3 : 0;
        c.a.dropout = x == 3 ? 0.3 : 0;
        c.mask_rows = true;
        check_all(c);
    }
}

/* Rows that do not count, in every part. */
static void test_lengths(void **state) {
    (void)state;
    static const int32_t len_q[] = {20, 0};
    attention_case c = usual();
    c.a.features = HEDDLE_SEQLENS;
    c.len_q = len_q;
    check_all(c);
}

/* --------------------------------------------------------------------------------------------------------- merge */

static void merge_case(heddle_dtype type, heddle_device device, int64_t dv, bool strided) {
    enum { B = 2, H = 3, S = 5, ROWS = B * H * S, MOST = 160 };
    const heddle_dtype real = type == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    const int64_t row = strided ? dv + (dv % 4 ? 2 : 4) : dv;
    heddle_merge m = {.size = sizeof m, .dtype = type, .device = device, .b = B, .h = H, .s = S, .dv = dv};
    if (strided) /* [b, s, h, dv], with gaps */
        m.o_stride = (heddle_strides){S * H * row, row, H * row};
    rng r = {test_seed(7)};
    numbers all[] = {numbers_new(device, real, ROWS * row, 77), numbers_new(device, real, ROWS, 0),
                     numbers_new(device, type, ROWS * dv, 0), numbers_new(device, real, ROWS, 0)};
    void *o = all[0].host, *lse = all[1].host, *other = all[2].host, *other_lse = all[3].host;
    static double right[ROWS][MOST + 1];
    for (int64_t x = 0; x < ROWS; x++) {
        const int64_t at = strided ? (x / S / H * S * H + x % S * H + x / S % H) * row : x * row;
        const double a = x % 4 == 1 ? -(double)INFINITY : 40 * rng_uniform(&r) - 20,
                     b = x % 5 == 2 || x % 4 == 1 * (x > 20) ? -(double)INFINITY : 40 * rng_uniform(&r) - 20;
        store_element(real, lse, x, a);
        store_element(real, other_lse, x, b);
        const double la = load_element(real, lse, x), lb = load_element(real, other_lse, x);
        const double sum = exp(la) + exp(lb);
        for (int64_t e = 0; e < dv; e++) {
            store_element(real, o, at + e, la == -(double)INFINITY ? (double)NAN : rng_uniform(&r) - 0.5);
            store_element(type, other, x * dv + e, lb == -(double)INFINITY ? (double)NAN : rng_uniform(&r) - 0.5);
            const double va = exp(la) > 0 ? exp(la) * load_element(real, o, at + e) : 0,
                         vb = exp(lb) > 0 ? exp(lb) * load_element(type, other, x * dv + e) : 0;
            right[x][e] = sum > 0 ? (va + vb) / sum : 0;
        }
        right[x][MOST] = log(sum);
    }
    for (size_t x = 0; x < COUNT(all); x++)
        numbers_upload(&all[x]);
    assert_int_equal(heddle_attention_merge(&m, all[0].block, all[1].block, all[2].block, all[3].block, NULL),
                     HEDDLE_OK);
    numbers_download(&all[0]);
    numbers_download(&all[1]);
    const double unit = real == HEDDLE_F64 ? 0x1p-50 : 0x1p-21;
    for (int64_t x = 0; x < ROWS; x++) {
        const int64_t at = strided ? (x / S / H * S * H + x % S * H + x / S % H) * row : x * row;
        const double l = load_element(real, lse, x);
        assert_true(l == right[x][MOST] || fabs(l - right[x][MOST]) <= unit * fabs(right[x][MOST]));
        for (int64_t e = 0; e < dv; e++)
            assert_true(fabs(load_element(real, o, at + e) - right[x][e]) <= unit);
        for (int64_t e = dv; e < row; e++)
            assert_true(load_element(real, o, at + e) == 77);
    }
    for (size_t x = 0; x < COUNT(all); x++)
        numbers_free(&all[x]);
}

/* Rows of whole fours, and not. */
static void test_merge(void **state) {
    (void)state;
    static const int64_t widths[] = {11, 140};
    for (int strided = 0; strided < 4; strided++) {
        const int64_t dv = widths[strided / 2];
        for (int x = 0; x < TEST_DTYPES; x++) {
            merge_case(test_dtypes[x], test_device(), dv, strided % 2);
            merge_case(test_dtypes[x], HEDDLE_REF, dv, strided % 2);
        }
        merge_case(HEDDLE_F64, HEDDLE_REF, dv, strided % 2);
    }
}

static void refuse(const heddle_merge *m, void *const pointers[4], heddle_status status, const char *part) {
    assert_int_equal(heddle_attention_merge(m, pointers[0], pointers[1], pointers[2], pointers[3], NULL), status);
    if (!strstr(heddle_last_message(), part))
        fail_msg("'%s' is not in '%s'", part, heddle_last_message());
}

static void test_merge_refuses(void **state) {
    (void)state;
    float o[32] = {0}, lse[4] = {0}, other[32] = {0}, other_lse[4] = {0};
    void *p[] = {o, lse, other, other_lse};
    static const char *const names[] = {"o is NULL", "lse is NULL", "other_o is NULL", "other_lse is NULL"};
    const heddle_merge m = {.size = sizeof m, .b = 1, .h = 2, .s = 2, .dv = 4};
    heddle_merge x = m;
    refuse(NULL, p, HEDDLE_NULL_POINTER, "NULL");
#define REFUSE(change, status, part)                                                                                   \
    x = m;                                                                                                             \
    change;                                                                                                            \
    refuse(&x, p, status, part)
    REFUSE(x.size -= 8, HEDDLE_BAD_DESCRIPTOR_SIZE, "size");
    REFUSE(x.dtype = (heddle_dtype)9, HEDDLE_BAD_ENUM, "dtype = 9");
    REFUSE(x.device = (heddle_device)9, HEDDLE_BAD_ENUM, "device = 9");
    REFUSE(x.dtype = HEDDLE_F64, HEDDLE_UNSUPPORTED, "float64");
    REFUSE(x.b = -1, HEDDLE_BAD_SIZE, "b = -1");
    REFUSE(x.h = 0, HEDDLE_BAD_SIZE, "h = 0");
    REFUSE(x.dv = 513, HEDDLE_BAD_SIZE, "dv = 513");
    REFUSE(x.s = INT64_MAX, HEDDLE_BAD_SIZE, "s = 9223372036854775807");
    REFUSE((x.b = INT64_C(1) << 39, x.s = INT64_C(1) << 39), HEDDLE_OVERFLOW, "o");
    REFUSE(x.o_stride = ((heddle_strides){0, 1, 4}), HEDDLE_BAD_STRIDE, "overlaps itself");
    REFUSE(x.other_stride.s = -4, HEDDLE_BAD_STRIDE, "other_stride.s = -4");
#undef REFUSE
    for (int y = 0; y < 4; y++) {
        void *const kept = p[y];
        p[y] = NULL;
        refuse(&m, p, HEDDLE_NULL_POINTER, names[y]);
        p[y] = (char *)kept + 2;
        refuse(&m, p, HEDDLE_MISALIGNED, "not a multiple");
        p[y] = kept;
    }
    for (size_t y = 0; y < COUNT(o); y++)
        assert_true(o[y] == 0);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),   cmocka_unit_test(test_tensor_cores), cmocka_unit_test(test_rows_apart),
        cmocka_unit_test(test_masks),   cmocka_unit_test(test_shares),       cmocka_unit_test(test_options),
        cmocka_unit_test(test_lengths), cmocka_unit_test(test_merge),        cmocka_unit_test(test_merge_refuses),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

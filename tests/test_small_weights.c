/* SPDX-License-Identifier: Apache-2.0
 * Weights down to 2^-126, as ALiBi's slopes and large scores make them. Beside values and gradients of common size they breed no denormals,
 * which cost some cores a hundred times as much; they count for what they are; and where numbers are small or large otherwise, results
 * are the same, bit by bit, but for the power of two. */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <xmmintrin.h>
#define HAVE_FLAGS
#endif

/* So few multiply-adds that one thread, whose flags these are, does them. */
static attention_case far_keys(heddle_dtype dtype, int64_t sk) {
    attention_case c = attention_case_of(1, 1, 1, 64, sk, 64, 0);
    c.a.dtype = dtype;
    c.a.features = HEDDLE_ALIBI;
    return c;
}

static attention_problem new_problem(const attention_case *c, double slope) {
    attention_problem p = attention_new(c);
    tensor_raw_set(&p.t[T_ALIBI], 0, slope);
    tensor_upload(&p.t[T_ALIBI]);
    return p;
}

enum { NONE = -1000 };

/* By 2^exponent, or NONE: by 0. */
static void multiply(tensor *t, int exponent) {
    for (int64_t at = 0; at < t->span; at++)
        if (t->reached[at])
            tensor_raw_set(t, at, exponent == NONE ? 0 : ldexp(tensor_raw(t, at), exponent));
}

#ifdef HAVE_FLAGS
enum { DENORMAL_OPERAND = 0x02, UNDERFLOW = 0x10 };

static heddle_status run_flagged(attention_problem *p, heddle_pass pass, unsigned *flags) {
    size_t bytes = SIZE_MAX;
    heddle_status status = heddle_attention_workspace(&p->a, pass, &bytes);
    void *workspace = workspace_new(p->a.device, bytes);
    const heddle_attention_data data = attention_data(p, pass == HEDDLE_BACKWARD);
    _mm_setcsr(_mm_getcsr() & ~0x3fu);
    if (status == HEDDLE_OK)
        status = pass == HEDDLE_FORWARD ? heddle_attention_forward(&p->a, &data, workspace, bytes, NULL)
                                        : heddle_attention_backward(&p->a, &data, workspace, bytes, NULL);
    *flags = _mm_getcsr() & (DENORMAL_OPERAND | UNDERFLOW);
    workspace_free(p->a.device, workspace, bytes);
    return status;
}
#endif

/* q is 0 and the mask causal, so that a weight is 2^(-slope·log2(e)·distance) but for a factor that all rows share; some are near 2^-126. */
static void test_no_denormals(void **state) {
    (void)state;
#ifdef HAVE_FLAGS
    static const double slopes[] = {0.93, 1.02, 1.12};
    if (test_device() != HEDDLE_CPU || test_emulated())
        skip();
    for (size_t x = 0; x < COUNT(slopes); x++) {
        attention_case c =
            far_keys(HEDDLE_F32, 120); /* one block of the CPU's: rows of several may be surveyed before */
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        attention_problem p = new_problem(&c, slopes[x]);
        multiply(&p.t[T_Q], NONE);
        tensor_upload(&p.t[T_Q]);
        double least = INFINITY;
        for (int64_t away = 0; away < 120; away++) {
            const double exponent = (double)away * slopes[x] * 1.4426950408889634 - log2(1 - exp(-slopes[x]));
            least = exponent < 127 ? exponent : least;
        }
        assert_true(least > 125);
        unsigned forward = 0, backward = 0;
        assert_int_equal(run_flagged(&p, HEDDLE_FORWARD, &forward), HEDDLE_OK);
        assert_int_equal(run_flagged(&p, HEDDLE_BACKWARD, &backward), HEDDLE_OK);
        if (forward | backward)
            printf("  slope %g: flags %#x forward, %#x backward\n", slopes[x], forward, backward);
        assert_int_equal(forward | backward, 0);
        attention_free(&p);
    }
#else
    skip();
#endif
}

/* q is 0, so that the weights are what the slope makes them, and dO is positive, so that nothing cancels: dv of the first key is some
 * 2^-90. */
static void test_far_keys(void **state) {
    (void)state;
    attention_case c = far_keys(HEDDLE_F32, 200);
    attention_problem p = new_problem(&c, 0.5);
    tensor *dout = &p.t[T_DOUT], *dv = &p.t[T_DV];
    multiply(&p.t[T_Q], NONE);
    for (int64_t i = 0; i < dout->dim[2]; i++)
        for (int64_t e = 0; e < dout->dim[3]; e++)
            tensor_set(dout, 0, 0, i, e, 1 + fabs(tensor_get(dout, 0, 0, i, e)));
    tensor_upload(&p.t[T_Q]);
    tensor_upload(dout);
    attention_problem ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
    attention_run(&p, HEDDLE_FORWARD);
    attention_run(&p, HEDDLE_BACKWARD);
    attention_run(&ref, HEDDLE_FORWARD);
    attention_run(&ref, HEDDLE_BACKWARD);
    double least = INFINITY;
    for (int64_t j = 0; j < dv->dim[2]; j++)
        for (int64_t e = 0; e < dv->dim[3]; e++) {
            const double is = tensor_get(dv, 0, 0, j, e), right = tensor_get(&ref.t[T_DV], 0, 0, j, e);
            least = fmin(least, right);
            if (fabs(is - right) > 1e-5 * right)
                printf("  key %d: %g in place of %g\n", (int)j, is, right);
            assert_true(fabs(is - right) <= 1e-5 * right);
        }
    assert_true(least < 0x1p-84);
    attention_free(&p);
    attention_free(&ref);
}

/* A sink that has nearly all of the weight, as far as a key's may be something beside it. */
static void test_far_sinks(void **state) {
    (void)state;
    static const int64_t sizes[][2] = {{64, 31}, {9, 31}, {100, 300}, {1, 40}};
    static const double above[] = {20, 45, 55, 65, 72, 75, 80};
    for (size_t x = 0; x < COUNT(sizes) * COUNT(above); x++)
        for (size_t type = 0; type < TEST_DTYPES; type++) {
            attention_case c = far_keys(test_dtypes[type], sizes[x % COUNT(sizes)][1]);
            c.a.sq = sizes[x % COUNT(sizes)][0];
            c.a.features = HEDDLE_SINKS;
            c.skip = 1u << T_DLSE | 1u << T_DSINKS;
            attention_problem p = attention_new(&c);
            tensor_raw_set(&p.t[T_SINKS], 0, above[x / COUNT(sizes)]);
            multiply(&p.t[T_Q], NONE);
            tensor_upload(&p.t[T_SINKS]);
            tensor_upload(&p.t[T_Q]);
            attention_problem ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
            attention_run(&p, HEDDLE_FORWARD);
            attention_run(&p, HEDDLE_BACKWARD);
            attention_run(&ref, HEDDLE_FORWARD);
            attention_run(&ref, HEDDLE_BACKWARD);
            static const int tensors[] = {T_O, T_DV};
            for (size_t t = 0; t < COUNT(tensors); t++) {
                double size = 0, error = tensor_error(&p.t[tensors[t]], &ref.t[tensors[t]], &size);
                const bool ends = c.a.dtype == HEDDLE_F16 && size < 0x1p-14; /* float16 ends at 2^-24 */
                if (error > (ends ? 0x1p-24 : 0.02 * size))
                    printf("  a sink of %g, %s: off by %g of %g\n", above[x / COUNT(sizes)],
                           attention_tensor_name[tensors[t]], error, size);
                assert_true(error <= (ends ? 0x1p-24 : 0.02 * size));
            }
            attention_free(&p);
            attention_free(&ref);
        }
}

/* What is linear in a tensor is, bit by bit, times 2^exponent if the tensor is; nothing of it is near the ends of float32's range. */
static bool multiples(const attention_problem *of, const attention_problem *p, enum attention_tensor x, int exponent) {
    bool right = true, some = false;
    const tensor *is = &p->t[x], *was = &of->t[x];
    for (int64_t at = 0; at < is->span; at++)
        if (is->reached[at]) {
            right &= tensor_raw(is, at) == ldexp(tensor_raw(was, at), exponent);
            some |= tensor_raw(was, at) != 0; /* zeros are any multiple of each other */
        }
    right &= some;
    if (!right)
        printf("  %s is not 2^%d times what it was\n", attention_tensor_name[x], exponent);
    return right;
}

static void test_powers_of_two(void **state) {
    (void)state;
    static const int exponents[] = {-60, -30, 20, 23, 24, 25, 30, 60, 90};
    static const int64_t sizes[][2] = {{64, 200}, {100, 500}, {7, 300}};
    bool right = true;
    for (size_t size = 0; size < COUNT(sizes); size++)
        for (int drops = 0; drops < 2; drops++) {
            attention_case c = attention_case_of(2, 4, 2, sizes[size][0], sizes[size][1], 64, 0);
            c.skip = 1u << T_DLSE;
            c.a.dropout = drops ? 0.2 : 0;
            attention_problem p = attention_new(&c);
            attention_run(&p, HEDDLE_FORWARD);
            attention_run(&p, HEDDLE_BACKWARD);
            for (size_t x = 0; x < COUNT(exponents); x++) {
                const int by = exponents[x];
                attention_problem values = attention_copy(&p, c.a.dtype, c.a.device),
                                  gradients = attention_copy(&p, c.a.dtype, c.a.device);
                multiply(&values.t[T_V], by);
                multiply(&gradients.t[T_DOUT], by);
                tensor_upload(&values.t[T_V]);
                tensor_upload(&gradients.t[T_DOUT]);
                attention_run(&values, HEDDLE_FORWARD);
                attention_run(&gradients, HEDDLE_FORWARD);
                attention_run(&gradients, HEDDLE_BACKWARD);
                right &= multiples(&p, &values, T_O, by);
                right &= multiples(&p, &gradients, T_DQ, by) && multiples(&p, &gradients, T_DK, by) &&
                         multiples(&p, &gradients, T_DV, by);
                attention_free(&values);
                attention_free(&gradients);
            }
            attention_free(&p);
        }
    assert_true(right);
}

/* Peaked rows, with values and gradients that leave no room for a power of two, and with little. */
static void test_large_values(void **state) {
    (void)state;
    static const double magnitudes[] = {1, 0x1p20, 0x1p24, 1e10, 1e20, 1e30};
    for (size_t x = 0; x < COUNT(magnitudes); x++)
        for (int options = 0; options < 3; options++) {
            attention_case c = attention_case_of(2, 4, 2, 70, 300, 64, 0);
            c.q_magnitude = 8;
            c.v_magnitude = magnitudes[x];
            c.a.features = options == 1 ? HEDDLE_SINKS | HEDDLE_ALIBI : options == 2 ? HEDDLE_BIAS : 0;
            check_attention(&c);
        }
}

/* The last key has a weight of 12 times the others', and a value near the end of float32's range: no weight may be over 1 before they
 * are divided by their sum. */
static void test_largest_values(void **state) {
    (void)state;
    static const int64_t sizes[][2] = {{70, 1000}, {1, 3000}, {5, 40}};
    for (size_t x = 0; x < 2 * COUNT(sizes); x++) {
        attention_case c = attention_case_of(2, 4, 2, sizes[x / 2][0], sizes[x / 2][1], 64, 0);
        c.a.dtype = test_dtypes[x % 2];
        attention_problem p = attention_new(&c);
        tensor *q = &p.t[T_Q], *k = &p.t[T_K], *v = &p.t[T_V];
        for (int64_t at = 0; at < q->span; at++)
            tensor_raw_set(q, at, 20);
        for (int64_t y = 0; y < c.a.b * c.a.hk * c.a.sk * c.a.d; y++) {
            const int64_t e = y % c.a.d, j = y / c.a.d % c.a.sk, head = y / c.a.d / c.a.sk;
            const double last = j == c.a.sk - 1;
            tensor_set(k, head / c.a.hk, head % c.a.hk, j, e, e == 0 ? last : 0);
            tensor_set(v, head / c.a.hk, head % c.a.hk, j, e, last * 0x1p127);
        }
        tensor_upload(q);
        tensor_upload(k);
        tensor_upload(v);
        attention_problem ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&ref, HEDDLE_FORWARD);
        double size = 0, error = tensor_error(&p.t[T_O], &ref.t[T_O], &size);
        if (!(error <= (x % 2 ? 0x1p-7 : 1e-5) * size))
            printf("  %d queries, %d keys: off by %g of %g\n", (int)c.a.sq, (int)c.a.sk, error, size);
        assert_true(error <= (x % 2 ? 0x1p-7 : 1e-5) * size);
        attention_free(&p);
        attention_free(&ref);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_denormals), cmocka_unit_test(test_far_keys),
        cmocka_unit_test(test_far_sinks),    cmocka_unit_test(test_powers_of_two),
        cmocka_unit_test(test_large_values), cmocka_unit_test(test_largest_values),
    };
    test_begin();
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

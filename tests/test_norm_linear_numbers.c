/* SPDX-License-Identifier: Apache-2.0
 * Norm-linear against the reference where numbers are hard: large means, rows of any size, constant ones, few results. */
#include "norm_linear_cases.h"

#include <math.h>

/* Adds the squares of the errors of one problem to ours[] and plain[], a tensor each. */
static void add_errors(const norm_linear_case *c, double ours[N_COUNT], double plain[N_COUNT]) {
    double natural[N_COUNT];
    norm_linear_problem p = norm_linear_new(c);
    norm_linear_problem ref = norm_linear_copy(&p, HEDDLE_F64, HEDDLE_REF),
                        textbook = norm_linear_copy(&p, p.a.dtype, HEDDLE_REF);
    for (int pass = HEDDLE_FORWARD; pass <= HEDDLE_BACKWARD; pass++) {
        norm_linear_run(&p, (heddle_pass)pass);
        norm_linear_run(&ref, (heddle_pass)pass);
    }
    plain_norm_linear(&textbook, PLAIN_FORWARD, natural, NULL, NULL);
    for (int x = N_Y; x < N_COUNT; x++)
        for (int64_t at = 0; x != N_DY && at < p.t[x].span; at++) {
            const double truth = tensor_raw(&ref.t[x], at);
            ours[x] += pow(tensor_raw(&p.t[x], at) - truth, 2);
            plain[x] += pow(tensor_raw(&textbook.t[x], at) - truth, 2);
        }
    norm_linear_free(&p);
    norm_linear_free(&ref);
    norm_linear_free(&textbook);
}

/* Where there are few results, the largest error is a matter of luck, and a kernel that is as good as the plain computation on average
 * is now and then twice as far off. So over many problems its errors have to be well below; not of the kernels for large problems, which
 * round to 16 bits where the plain computation does. */
static void test_few_results(void **state) {
    (void)state;
    static const int checked[] = {N_DGAMMA, N_DBETA, N_DW, N_DC, N_RSTD};
    static const double most[][5] = {{0.5, 0.4, 0.5, 0.75, 0.8}, {0.8, 0.8, 0.8, 1, 0.8}, {0.8, 0.8, 0.8, 1, 0.8}};
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        double ours[N_COUNT] = {0}, plain[N_COUNT] = {0};
        norm_linear_case c = make_case(1023, 7, 2);
        c.a.dtype = test_dtypes[x];
        for (c.seed = 0; c.seed < 50; c.seed++)
            add_errors(&c, ours, plain);
        for (size_t y = 0; y < COUNT(checked); y++) {
            const double ratio = sqrt(ours[checked[y]] / plain[checked[y]]);
            const double limit = x > 0 && tensor_cores_alone() ? 1.05 : most[x][y];
            if (!(ratio <= limit))
                fail_msg("%s, type %d: root mean square error %.2f of the plain computation's, more than %.2f",
                         norm_linear_tensor_name[checked[y]], (int)c.a.dtype, ratio, limit);
        }
    }
}

static void test_means(void **state) {
    (void)state;
    static const double means[] = {-1, 8, 100};
    for (size_t x = 0; x < COUNT(means); x++) {
        norm_linear_case c = make_case(24, 203, 33);
        c.mean = means[x];
        check_all(c);
    }
    for (int norm = 0; norm < 2; norm++) {
        norm_linear_case c = make_case(24, 203, 33);
        c.a.norm = (heddle_norm)norm;
        c.mean = 1000;
        check_norm_linear(&c);
    }
}

/* bfloat16 has few numbers where a mean is a thousand deviations: rows have two or three of them, or one, whose deviation is eps. What is
 * rounded of x·Wᵀ and of its mean's share before the one is taken from the other must not be seen. */
static void test_coarse_rows(void **state) {
    (void)state;
    static const double means[] = {120, 300, 1000, 30000};
    static const int64_t sizes[][3] = {{300, 64, 64}, {270, 1000, 120}, {129, 40, 7}};
    const int64_t fewer = test_emulated() ? 4 : 1; /* rows and features; all of them take an emulator minutes */
    for (size_t x = 0; x < COUNT(means) * COUNT(sizes); x++) {
        const int64_t *size = sizes[x / COUNT(means)];
        norm_linear_case c = make_case(size[0] / fewer, size[1], (size[2] + fewer - 1) / fewer);
        c.a.dtype = HEDDLE_BF16;
        c.mean = means[x % COUNT(means)];
        c.seed = 31 + x;
        check_norm_linear(&c);
        c.a.features |= HEDDLE_ACTIVATION | HEDDLE_RESIDUAL;
        c.a.activation = x % 2 ? HEDDLE_SILU : HEDDLE_GELU;
        check_norm_linear(&c);
    }
}

static void test_spread(void **state) {
    (void)state;
    norm_linear_case c = make_case(24, 113, 33);
    c.scale_spread = 1000;
    check_all(c);
    c.scale_spread = 0;
    c.w_magnitude = 20;
    check_all(c);
}

static void test_eps(void **state) {
    (void)state;
    static const double eps[] = {1e-12, 1e-3, 10};
    for (size_t x = 0; x < COUNT(eps); x++) {
        norm_linear_case c = make_case(9, 33, 17);
        c.a.eps = eps[x];
        check_all(c);
    }
}

/* Rows of x and of dy of sizes of their own: dw's largest products may be of any of them, and results below 2^-126 are right, too. */
static void test_no_norm_of_any_size(void **state) {
    (void)state;
    static const double of_x[] = {1, 0x1p60, 0x1p-60, 0x1p20, 0x1p-100},
                        of_dy[] = {1, 0x1p-60, 0x1p60, 0x1p-20, 0x1p-30};
    for (int spread = 0; spread < 2; spread++) {
        norm_linear_case c = make_case(45, 24, 17);
        c.a.norm = HEDDLE_NO_NORM;
        norm_linear_problem p = norm_linear_new(&c);
        for (int64_t i = 0; i < 45; i++) {
            const int64_t at = spread ? i % 4 : 4;
            for (int64_t e = 0; e < 24; e++)
                tensor_set(&p.t[N_X], 0, 0, i, e, of_x[at] * tensor_get(&p.t[N_X], 0, 0, i, e));
            for (int64_t f = 0; f < 17; f++)
                tensor_set(&p.t[N_DY], 0, 0, i, f, of_dy[at] * tensor_get(&p.t[N_DY], 0, 0, i, f));
        }
        tensor_upload(&p.t[N_X]);
        tensor_upload(&p.t[N_DY]);
        norm_linear_problem ref = norm_linear_copy(&p, HEDDLE_F64, HEDDLE_REF);
        for (int pass = HEDDLE_FORWARD; pass <= HEDDLE_BACKWARD; pass++) {
            norm_linear_run(&p, (heddle_pass)pass);
            norm_linear_run(&ref, (heddle_pass)pass);
        }
        static const int rows[] = {N_Y, N_DX};
        for (size_t x = 0; x < COUNT(rows); x++)
            for (int64_t i = 0; i < 45; i++) {
                const tensor *ours = &p.t[rows[x]], *truth = &ref.t[rows[x]];
                double most = 0, far = 0;
                for (int64_t e = 0; e < ours->dim[3]; e++) {
                    const double t = tensor_get(truth, 0, 0, i, e);
                    most = fmax(most, fabs(t));
                    far = fmax(far, fabs(tensor_get(ours, 0, 0, i, e) - t));
                }
                assert_true(far <= 2e-6 * most);
            }
        double magnitude;
        const double far = tensor_error(&p.t[N_DW], &ref.t[N_DW], &magnitude);
        if (!(far <= 4e-6 * magnitude + 0x1p-143))
            fail_msg("dw: %g of %g", far, magnitude);
        norm_linear_free(&p);
        norm_linear_free(&ref);
    }
}

/* Rows that do not vary: rstd = 1/sqrt(eps), xhat = 0, and nothing is NaN. */
static void test_constant_rows(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        norm_linear_case c = make_case(3, 32, 5);
        c.a.dtype = test_dtypes[x];
        norm_linear_problem p = norm_linear_new(&c);
        for (int64_t i = 0; i < 3; i++)
            for (int64_t e = 0; e < 32; e++)
                tensor_set(&p.t[N_X], 0, 0, i, e, i == 0 ? 0 : i == 1 ? 3 : -100);
        tensor_upload(&p.t[N_X]);
        norm_linear_problem ref = norm_linear_copy(&p, HEDDLE_F64, HEDDLE_REF);
        norm_linear_run(&p, HEDDLE_FORWARD);
        norm_linear_run(&p, HEDDLE_BACKWARD);
        norm_linear_run(&ref, HEDDLE_FORWARD);
        norm_linear_run(&ref, HEDDLE_BACKWARD);
        for (int which = N_Y; which < N_COUNT; which++)
            for (int64_t at = 0; which != N_DY && at < p.t[which].span; at++) {
                double r = tensor_raw(&ref.t[which], at), y = tensor_raw(&p.t[which], at);
                assert_false(isnan(y));
                assert_true(fabs(y - r) <= 0.02 * fabs(r) + 0.02 * (which == N_DX ? 316 : 1));
            }
        norm_linear_free(&p);
        norm_linear_free(&ref);
    }
}

/* TF32 where it is asked for: on a GPU with an error like TF32's, on a CPU without. */
static void test_tf32(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{33, 64, 48}, {130, 257, 129}, {300, 512, 384}};
    for (size_t x = 0; x < (test_emulated() ? 2 : COUNT(sizes)); x++)
        for (int norm = 0; norm < 2; norm++) {
            norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
            c.a.norm = (heddle_norm)norm;
            c.a.features = HEDDLE_TF32;
            check_norm_linear(&c);
        }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_few_results), cmocka_unit_test(test_means),
        cmocka_unit_test(test_coarse_rows), cmocka_unit_test(test_spread),
        cmocka_unit_test(test_eps),         cmocka_unit_test(test_constant_rows),
        cmocka_unit_test(test_tf32),        cmocka_unit_test(test_no_norm_of_any_size),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

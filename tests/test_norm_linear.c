/* SPDX-License-Identifier: Apache-2.0
 * Norm-linear, forward and backward, against the reference in three types: every size, route and option. */
#include "norm_linear_cases.h"

#include <math.h>

static void test_sizes(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 2, 3, 7, 31, 33, 113};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (size_t y = 0; y < COUNT(sizes); y++)
            for (size_t z = 0; z < COUNT(sizes); z++) {
                norm_linear_case c = make_case(sizes[x], sizes[y], sizes[z]);
                c.a.norm = (heddle_norm)((x + y + z) % 4 % 3);
                c.a.dtype = test_dtypes[(x + 2 * y + z) % 3];
                check_norm_linear(&c);
            }
}

static void test_larger_sizes(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{203, 203, 203}, {1023, 33, 31}, {31, 1023, 33}, {33, 31, 1023},
                                       {1, 1023, 203},  {203, 1, 113},  {64, 256, 192}, {7, 203, 1023}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (size_t y = 0; y < TEST_DTYPES; y++) {
            norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
            c.a.norm = (heddle_norm)((x + y) % 3);
            c.a.dtype = test_dtypes[y];
            check_norm_linear(&c);
        }
}

/* Each m, k, n with its rows side by side, and then apart. */
static void check_sizes(const int64_t (*sizes)[3], size_t n) {
    for (size_t x = 0; x < n; x++) {
        norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
        check_all(c);
        c.a.x_stride = c.a.dx_stride = c.a.k + 3;
        c.a.w_stride = c.a.k + 1;
        c.a.dw_stride = c.a.k + 2;
        c.a.y_stride = c.a.dy_stride = c.a.n + 1;
        check_all(c);
    }
}

/* Few rows of x: forward reads W where it lies, in parts of 1024 or 2048 sum indices, backward a strip of 32 rows of W after the other; and
 * the neighbours of both that do not. */
static void test_few_rows(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{2, 2100, 41}, {9, 1031, 19},  {48, 392, 97},  {49, 392, 98}, {24, 199, 17},
                                       {25, 193, 50}, {64, 200, 128}, {65, 200, 130}, {31, 192, 61}, {1, 192, 33}};
    check_sizes(sizes, COUNT(sizes));
    static const int results[] = {N_DX, N_DGAMMA, N_DBETA, N_DW, N_DC};
    for (unsigned bits = 0; bits < 1u << COUNT(results); bits++) {
        norm_linear_case c = make_case(5, 200, 35);
        for (size_t x = 0; x < COUNT(results); x++)
            c.skip |= (bits >> x & 1) << results[x];
        c.a.dtype = test_dtypes[bits % 3];
        check_norm_linear(&c);
    }
}

/* Up to four features out: forward normalises four rows of x at a time and multiplies them at once; and the neighbours that do not. */
static void test_few_columns(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{50, 392, 1}, {51, 100, 3},  {129, 64, 4},
                                       {130, 63, 4}, {61, 2050, 2}, {52, 200, 5}};
    check_sizes(sizes, COUNT(sizes));
}

/* Every subset of what may be NULL. */
static void test_optional_tensors(void **state) {
    (void)state;
    static const int optional[] = {N_GAMMA, N_BETA, N_C, N_MEAN, N_RSTD, N_DX, N_DGAMMA, N_DBETA, N_DW, N_DC};
    for (unsigned bits = 0; bits < 1u << COUNT(optional); bits++) {
        norm_linear_case c = make_case(9, 21, 18);
        for (size_t x = 0; x < COUNT(optional); x++)
            c.skip |= (bits >> x & 1) << optional[x];
        c.a.norm = (heddle_norm)(bits / 3 % 2);
        c.a.dtype = test_dtypes[bits % 3];
        check_norm_linear(&c);
    }
}

static void test_strides(void **state) {
    (void)state;
    norm_linear_case c = make_case(35, 50, 41);
    c.a.x_stride = 61;
    c.a.w_stride = 53;
    c.a.y_stride = 48;
    c.a.dy_stride = 45;
    c.a.dx_stride = 51;
    c.a.dw_stride = 64;
    check_all(c);
    c = make_case(35, 50, 41);
    c.a.y_stride = 42;
    check_all(c);
    c = make_case(70, 64, 48);
    c.a.x_stride = c.a.dx_stride = 128;
    c.a.dy_stride = 96;
    check_all(c);
}

/* The routes of forward and backward that activations take: few rows, few columns, strips, panels, tiles; u in narrow rows and in rows of
 * its own distance; large u, so that act is 0 or u. */
static void test_activations(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 40, 33},   {5, 200, 35},  {50, 392, 3},  {70, 96, 130},
                                       {131, 64, 72}, {24, 520, 64}, {70, 72, 520}, {1000, 24, 300}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (int activation = HEDDLE_GELU; activation <= LAST_ACTIVATION; activation++)
            for (size_t y = 0; y < TEST_DTYPES; y++) {
                const int64_t *s = sizes[x];
                norm_linear_case c = make_case(s[0], s[1], s[2]);
                c.a.dtype = test_dtypes[y];
                c.a.norm = (heddle_norm)((x + y) % 2);
                c.a.features = HEDDLE_ACTIVATION;
                c.a.activation = (heddle_activation)activation;
                c.a.u_stride = (x + y) % 3 ? 0 : (norm_linear_extent(&c.a, 'N') + 7) / 8 * 8 + 8;
                c.w_magnitude = (x + (size_t)activation) % 4 ? 0 : 1;
                c.seed = 7 * x + 3 * y + (size_t)activation;
                check_norm_linear(&c);
            }
}

/* act and act' where nothing else is added (of two halves, up is 1): k 1 of an RMSNorm whose x is ±1 gives u = ±w. From 1e-30 to 1e38,
 * infinity and NaN: what float64 says, within some roundings of it, in the tail of the left, too; NaN from NaN alone (of -infinity nothing is
 * asked: -infinity times 0). */
static void check_activation_values(heddle_activation activation, heddle_dtype dtype) {
    static const float values[] = {0,  1e-30f, 1e-5f, 0.01f, 0.3f, 0.5f,  1,     1.5f,  2,        2.9f,
                                   3,  4,      5.5f,  7,     8,    9.5f,  10,    12,    13,       14,
                                   30, 86,     88,    1e3f,  1e9f, 1e19f, 1e20f, 1e38f, INFINITY, NAN};
    enum { N = 2 * COUNT(values) };
    const double half = dtype == HEDDLE_BF16  ? 0x1.01p-8
                        : dtype == HEDDLE_F16 ? 0x1.01p-11
                                              : 0,
                 least = dtype == HEDDLE_F16 ? 0x1.01p-25 : 1e-35;
    norm_linear_case c = make_case(1, 1, N);
    c.a.norm = HEDDLE_RMS_NORM;
    c.a.features = HEDDLE_ACTIVATION;
    c.a.activation = activation;
    c.a.dtype = dtype;
    c.a.eps = 1e-30;
    c.skip = UINT32_C(1) << N_GAMMA | UINT32_C(1) << N_BETA | UINT32_C(1) << N_C;
    norm_linear_problem p = norm_linear_new(&c), ref = norm_linear_copy(&p, HEDDLE_F64, HEDDLE_REF);
    norm_linear_problem *both[] = {&p, &ref};
    for (size_t b = 0; b < 2; b++) {
        tensor_set(&both[b]->t[N_X], 0, 0, 0, 0, 1);
        for (int64_t f = 0; f < N; f++) {
            tensor_set(&both[b]->t[N_W], 0, 0, f, 0, (double)values[f / 2] * (f % 2 ? -1 : 1));
            tensor_set(&both[b]->t[N_W], 0, 0, f, 0, tensor_get(&p.t[N_W], 0, 0, f, 0)); /* as it is rounded */
            tensor_set(&both[b]->t[N_DY], 0, 0, 0, f, 1);
        }
        for (int64_t f = N; f < norm_linear_extent(&c.a, 'N'); f++)
            tensor_set(&both[b]->t[N_W], 0, 0, f, 0, 1);
        tensor_upload(&both[b]->t[N_X]);
        tensor_upload(&both[b]->t[N_W]);
        tensor_upload(&both[b]->t[N_DY]);
        norm_linear_run(both[b], HEDDLE_FORWARD);
        norm_linear_run(both[b], HEDDLE_BACKWARD);
    }
    for (int64_t f = 0; f < N; f++)
        for (int which = 0; which < 2; which++) {
            const int t = which ? N_DC : N_Y; /* dbias of one row is du */
            const double u = tensor_raw(&ref.t[N_U], f), truth = tensor_raw(&ref.t[t], f),
                         ours = tensor_raw(&p.t[t], f);
            const double allowed = fabs(truth) * (half + (half > 0 ? 5e-6 : 0) + 0x1p-20 * (1 + fmin(u * u, 200) / 8)) +
                                   least * (which || dtype == HEDDLE_F16 ? 1 : fabs(u));
            if (isinf(u) && (isnan(tensor_raw(&p.t[N_U], f)) || (!which && u < 0)))
                continue; /* an infinite w in two planes is infinity - infinity */
            if (isnan(truth) != isnan(ours) ||
                (isfinite(truth) && !(dtype == HEDDLE_F16 && fabs(truth) > 65504) &&
                 !(fabs(ours - truth) <= fmax(allowed, which ? (half > 0 ? 5e-6 : 4e-7) * (fabs(u) < 6) : 0))))
                fail_msg("activation %d of %g: %s = %.9g, not %.9g", activation, u, which ? "act'" : "act", ours,
                         truth);
        }
    norm_linear_free(&p);
    norm_linear_free(&ref);
}

static void test_activation_values(void **state) {
    (void)state;
    for (int activation = HEDDLE_GELU; activation <= LAST_ACTIVATION; activation++)
        for (size_t y = 0; y < TEST_DTYPES; y++)
            check_activation_values((heddle_activation)activation, test_dtypes[y]);
}

/* u is not asked for: y is what it is with it. */
static void check_without_u(const norm_linear_case *with) {
    norm_linear_case without = *with;
    without.skip |= UINT32_C(1) << N_U;
    norm_linear_problem p = norm_linear_new(with), q = norm_linear_new(&without);
    norm_linear_run(&p, HEDDLE_FORWARD);
    norm_linear_run(&q, HEDDLE_FORWARD);
    for (int64_t at = 0; at < p.t[N_Y].span; at++) /* NaN is between the rows */
        if (!(tensor_raw(&p.t[N_Y], at) == tensor_raw(&q.t[N_Y], at)) &&
            !(at % (with->a.y_stride ? with->a.y_stride : with->a.n) >= with->a.n &&
              isnan(tensor_raw(&q.t[N_Y], at)))) {
            norm_linear_print(with);
            fail_msg("y[%d] = %g without u, %g with it", (int)at, tensor_raw(&q.t[N_Y], at), tensor_raw(&p.t[N_Y], at));
        }
    norm_linear_free(&p);
    norm_linear_free(&q);
}

/* A residual on every route, with and without an activation and a norm, next to y, apart, and of no alignment. */
static void test_residuals(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 40, 33},   {5, 264, 40},    {24, 520, 64},   {50, 392, 3},   {70, 96, 130},
                                       {131, 64, 72}, {300, 136, 264}, {129, 392, 520}, {20, 400, 1030}};
    const size_t count = test_emulated() ? 6 : COUNT(sizes); /* the others take minutes there */
    for (size_t x = 0; x < count; x++)
        for (size_t y = 0; y < TEST_DTYPES; y++)
            for (int odd = 0; odd < 2; odd++) {
                norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
                c.a.dtype = test_dtypes[y];
                c.a.norm = (heddle_norm)((x + y) % 3);
                c.a.activation = (heddle_activation)((x + 2 * y + (size_t)odd) % (1 + LAST_ACTIVATION));
                c.a.features = HEDDLE_RESIDUAL | (c.a.activation ? HEDDLE_ACTIVATION : 0);
                c.a.residual_stride = odd ? c.a.n + 1 + (int64_t)x % 2 : x % 2 ? 0 : (c.a.n + 15) / 8 * 8;
                c.seed = 3 * (x + y) + (uint64_t)odd;
                check_norm_linear(&c);
                if (c.a.activation)
                    check_without_u(&c);
            }
}

/* Activations of two halves where Hopper forms them in its products: rows of y and u at 16 bytes, halves that are none of a tile's (columns
 * behind the gate's are up's) and that begin where nothing is aligned, more tiles than one, residuals, large u. */
static void test_halves(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{40, 64, 20},  {70, 96, 48},  {33, 40, 100},  {130, 64, 64},
                                       {130, 72, 80}, {257, 64, 96}, {200, 64, 124}, {300, 64, 76}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (size_t y = 0; y < TEST_DTYPES; y++)
            for (int residual = 0; residual < 2; residual++) {
                norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
                c.a.dtype = test_dtypes[y];
                c.a.norm = (heddle_norm)((x + y + (size_t)residual) % 3);
                c.a.activation = (heddle_activation)(HEDDLE_GEGLU + (x + 2 * y + (size_t)residual) % 3);
                c.a.features = HEDDLE_ACTIVATION | (residual ? HEDDLE_RESIDUAL : 0);
                c.a.y_stride = c.a.residual_stride = (c.a.n + 7) / 8 * 8 + 8 * residual;
                if (!residual)
                    c.a.residual_stride = 0;
                c.a.u_stride = 2 * c.a.n + 8;
                c.mean = x % 3 == 1 ? 20 : 0;
                c.skip = (x + y) % 2 ? UINT32_C(1) << N_C : 0;
                c.seed = 5 * x + 3 * y + (uint64_t)residual;
                check_norm_linear(&c);
                check_without_u(&c);
            }
}

/* z and its gradient on every route: with rows apart and of no alignment, where dx is not asked for, so that dgamma and dbeta are sums of
 * their own, and where there is no dz. */
static void test_z(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 40, 33},   {5, 264, 40},  {24, 520, 64},   {50, 392, 3},  {70, 96, 130},
                                       {131, 64, 72}, {300, 136, 8}, {129, 392, 520}, {9, 5000, 16}, {520, 72, 40}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (size_t y = 0; y < TEST_DTYPES; y++)
            for (int odd = 0; odd < 2; odd++) {
                norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
                c.a.dtype = test_dtypes[y];
                c.a.norm = (x + y) % 2 ? HEDDLE_RMS_NORM : HEDDLE_LAYER_NORM;
                c.a.activation = x % 3 == 2 ? HEDDLE_SILU : x % 6 == 4 ? LAST_ACTIVATION : HEDDLE_NO_ACTIVATION;
                c.a.features = HEDDLE_Z | (c.a.activation ? HEDDLE_ACTIVATION : 0);
                c.a.z_stride = odd ? c.a.k + 1 + (int64_t)x % 2 : x % 2 ? 0 : (c.a.k + 15) / 8 * 8;
                c.a.dz_stride = odd ? c.a.k + (int64_t)y : 0;
                c.mean = x % 4 == 1 ? 20 : 0;
                c.skip = (x + (size_t)odd) % 3 == 1 ? UINT32_C(1) << N_DX : 0;
                c.skip |= (x + y) % 4 == 3 ? UINT32_C(1) << N_MEAN | UINT32_C(1) << N_RSTD : 0;
                c.skip |= x == 3 && odd ? UINT32_C(1) << N_DZ : 0;
                c.seed = 3 * (x + y) + (uint64_t)odd;
                check_norm_linear(&c);
            }
}

/* Without a norm, on every route: few rows, few columns, strips, panels, tiles of every alignment; rows apart; x and dy whose rows have sizes
 * of their own, so that what a row of x is large by its row of dy is small by, and tiny ones. */
static void test_no_norm(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 40, 33},   {5, 264, 35},  {24, 520, 64},   {50, 392, 3},
                                       {70, 96, 130}, {131, 64, 72}, {300, 136, 264}, {40, 1031, 19}};
    static const int results[] = {N_C, N_DX, N_DW, N_DC};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (size_t y = 0; y < TEST_DTYPES; y++) {
            norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
            c.a.norm = HEDDLE_NO_NORM;
            c.a.dtype = test_dtypes[y];
            c.a.features = HEDDLE_TF32 * ((x + y) % 4 == 3);
            c.mean = x % 2 ? 100 : 0;
            c.scale_spread = x % 3 == 2 ? 1000 : 0;
            c.skip = (x + y) % 5 == 4 ? UINT32_C(1) << results[y] | UINT32_C(1) << results[3] : 0;
            c.seed = 3 * (x + y) + 1;
            check_norm_linear(&c);
            c.a.x_stride = c.a.w_stride = c.a.dx_stride = c.a.k + 3;
            c.a.dy_stride = c.a.n + 1;
            check_norm_linear(&c);
        }
}

static void check_no_rows(heddle_dtype dtype, heddle_norm norm, heddle_activation activation) {
    static const int zero[] = {N_DGAMMA, N_DBETA, N_DW, N_DC, N_RSTD};
    norm_linear_case c = make_case(0, 9, 4);
    c.a.dtype = dtype;
    c.a.norm = norm;
    c.a.activation = activation;
    c.a.features = activation ? HEDDLE_ACTIVATION : 0;
    if (norm == HEDDLE_NO_NORM)
        c.skip = UINT32_C(1) << N_GAMMA | UINT32_C(1) << N_BETA | UINT32_C(1) << N_DGAMMA | UINT32_C(1) << N_DBETA |
                 UINT32_C(1) << N_MEAN | UINT32_C(1) << N_RSTD;
    norm_linear_problem p = norm_linear_new(&c);
    norm_linear_run(&p, HEDDLE_FORWARD);
    norm_linear_run(&p, HEDDLE_BACKWARD);
    for (size_t y = 0; y < COUNT(zero); y++)
        for (int64_t at = 0; p.t[zero[y]].host && at < p.t[zero[y]].span; at++)
            assert_true(tensor_raw(&p.t[zero[y]], at) == 0);
    norm_linear_free(&p);
}

/* m = 0: y and dx have no elements, the parameters' gradients are zeros. */
static void test_no_rows(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++)
        for (int norm = 0; norm <= LAST_NORM; norm++)
            for (int activation = 0; activation <= LAST_ACTIVATION; activation++)
                check_no_rows(test_dtypes[x], (heddle_norm)norm, (heddle_activation)activation);
}

/* A processor's passes without panels of W in memory: sums and rows of W that end anywhere, several blocks of rows, halves, a residual; as
 * many rows as are packed once, for panels that are packed as they are met; and as many as AMX alone has in strips, backward. */
static void test_weights_in_place(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{3, 33, 40},    {9, 64, 33},     {40, 4130, 70},  {270, 2052, 97},
                                       {60, 96, 1100}, {30, 200, 1030}, {150, 200, 333}, {514, 40, 1100}};
#ifdef __x86_64__ /* elsewhere nothing goes so, and an emulator would take long */
    const size_t count = test_device() == HEDDLE_CPU ? 2 * COUNT(sizes) : 0;
#else
    const size_t count = 0;
#endif
    for (size_t x = 0; x < count; x++)
        for (size_t y = 0; y < TEST_DTYPES; y++) {
            const int64_t *s = sizes[x % COUNT(sizes)];
            if (s[1] > 2048 &&
                test_dtypes[y] != HEDDLE_BF16) /* it is tiles of AMX that long sums are another matter to */
                continue;
            norm_linear_case c = make_case(s[0], s[1], s[2]);
            c.a.dtype = test_dtypes[y];
            c.a.norm = (heddle_norm)(x % 2);
            c.a.w_stride = s[1] + 3;
            if (x >= COUNT(sizes)) {
                c.a.features = HEDDLE_ACTIVATION | HEDDLE_RESIDUAL;
                c.a.activation = HEDDLE_SWIGLU;
            }
            c.skip = s[1] > 2048 ? UINT32_C(1) << N_DX | UINT32_C(1) << N_DW : 0;
            c.seed = 3 * x + y;
            check_norm_linear(&c);
        }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights_in_place),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_larger_sizes),
        cmocka_unit_test(test_few_rows),
        cmocka_unit_test(test_few_columns),
        cmocka_unit_test(test_optional_tensors),
        cmocka_unit_test(test_strides),
        UNIT_TEST_OF_EACH_ISA(test_no_rows),
        cmocka_unit_test(test_activations),
        UNIT_TEST_OF_EACH_ISA(test_activation_values),
        UNIT_TEST_OF_EACH_ISA(test_residuals),
        UNIT_TEST_OF_EACH_ISA(test_halves),
        cmocka_unit_test(test_z),
        cmocka_unit_test(test_no_norm),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

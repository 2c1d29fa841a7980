/* SPDX-License-Identifier: Apache-2.0
 * Norm-linear, forward and backward, against the reference in three types. */
#include "common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void check_all(norm_linear_case c) {
    for (int norm = 0; norm < 2; norm++)
        for (size_t x = 0; x < TEST_DTYPES; x++) {
            c.a.norm = (heddle_norm)norm;
            c.a.dtype = test_dtypes[x];
            c.seed = c.seed * 3 + x + 1;
            check_norm_linear(&c);
        }
}

static norm_linear_case make_case(int64_t m, int64_t k, int64_t n) {
    return (norm_linear_case){.a = norm_linear_desc(HEDDLE_F32, HEDDLE_LAYER_NORM, m, k, n),
                              .seed = (uint64_t)(m * 5 + k + n)};
}

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

/* Are small problems, too, to go to the kernels for large ones? */
static bool tensor_cores_alone(void) {
    const char *wanted = getenv("HEDDLE_CUDA_FAMILY");
    return test_device() == HEDDLE_CUDA && wanted && (!strcmp(wanted, "sm80") || !strcmp(wanted, "sm90"));
}

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
    plain_norm_linear(&textbook, PLAIN_FORWARD, natural, NULL);
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

/* On a Hopper GPU, unless the problem is small, 16-bit tensors whose rows begin at multiples of 16 bytes go to its own kernels. */
static void expect_family(const norm_linear_case *c, bool aligned) {
    char device[160] = "", name[128] = "";
    const char *wanted = getenv("HEDDLE_CUDA_FAMILY");
    if (test_device() != HEDDLE_CUDA)
        return;
    heddle_device_describe(HEDDLE_CUDA, device, sizeof device);
    const bool hopper = strstr(device, "sm_90") && !(wanted && strcmp(wanted, "sm80") == 0);
    for (int pass = HEDDLE_FORWARD; pass <= HEDDLE_BACKWARD; pass++) {
        assert_int_equal(heddle_norm_linear_kernel(&c->a, (heddle_pass)pass, name, sizeof name), HEDDLE_OK);
        if ((strstr(name, "_small") || strstr(name, "_few_")) && !tensor_cores_alone())
            continue;
        assert_non_null(strstr(name, hopper && aligned && c->a.dtype != HEDDLE_F32 ? "_sm90" : "_sm80"));
    }
}

/* Several tiles of 128 rows and 256 or 128 columns, that end anywhere; seeds that three divides move the tensors off their
 * alignment. */
static void test_tiles(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{300, 136, 264}, {257, 200, 136}, {129, 392, 520}, {1, 8, 8}};
    for (size_t x = 0; x < COUNT(sizes) && !test_emulated(); x++)
        for (int norm = 0; norm < 2; norm++)
            for (size_t y = 1; y < TEST_DTYPES; y++) {
                norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
                c.a.norm = (heddle_norm)norm;
                c.a.dtype = test_dtypes[y];
                /* The tiles are a GPU's; elsewhere once is enough. */
                const uint64_t end = test_device() == HEDDLE_CUDA || test_long() ? 10 : 8;
                for (c.seed = 7; c.seed < end; c.seed++) {
                    expect_family(&c, true);
                    check_norm_linear(&c);
                }
            }
}

/* Columns for which the plan takes tiles of 96, 128, 160, 192 and 256 of them, where there are 2040 rows: of fwd, dx and dw in turn. */
static void test_widths_of_tiles(void **state) {
    (void)state;
    static const int64_t cols[] = {744, 1000, 1272, 1480, 1992};
    for (size_t x = 0; x < 2 * 3 * COUNT(cols) && test_device() == HEDDLE_CUDA; x++) {
        const int64_t c = cols[x % COUNT(cols)], depth = x % 2 ? 24 : 8;
        const size_t product = x / COUNT(cols) % 3;
        norm_linear_case p = product == 0   ? make_case(2040, depth, c)
                             : product == 1 ? make_case(2040, c, depth)
                                            : make_case(depth, c, 2040);
        p.a.dtype = test_dtypes[1 + x / (3 * COUNT(cols))];
        p.seed = 3 * x + 1;
        check_norm_linear(&p);
    }
}

/* bfloat16 with more rows than columns: Hopper's product forms the rows' moments from x as it multiplies
 * it. Means of up to a hundred deviations, features that are a thousand times the others, and rows that do not fill a tile. */
static void test_gathered_moments(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{300, 64, 136}, {257, 192, 40}, {129, 1024, 72}, {700, 128, 8}};
    static const double means[] = {0, 100, 30}, spreads[] = {0, 1000};
    for (size_t x = 0; x < 2 * 3 * 2 * COUNT(sizes) && (test_device() == HEDDLE_CUDA || x < 1); x++) {
        const int64_t *s = sizes[x % COUNT(sizes)];
        const size_t y = x / COUNT(sizes);
        norm_linear_case c = make_case(s[0], s[1], s[2]);
        c.a.dtype = HEDDLE_BF16;
        c.a.norm = (heddle_norm)(y % 2);
        c.mean = means[y / 2 % 3];
        c.scale_spread = spreads[y / 6];
        c.skip = y == 1 ? UINT32_C(1) << N_GAMMA : y == 2 ? UINT32_C(1) << N_MEAN | UINT32_C(1) << N_RSTD : 0;
        c.seed = 3 * x + 1;
        expect_family(&c, true);
        check_norm_linear(&c);
    }
}

/* The one launch of a few rows: one block's and two blocks', more terms than its warps load at once, ends of every kind. */
static void test_one_launch(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 264, 40},   {8, 4104, 24}, {9, 1032, 100},
                                       {16, 72, 2200}, {17, 520, 64}, {32, 2056, 33}};
    for (size_t x = 0; x < 12 * COUNT(sizes) && (test_device() == HEDDLE_CUDA || x < 1); x++) {
        const int64_t *s = sizes[x % COUNT(sizes)];
        const size_t y = x / COUNT(sizes);
        norm_linear_case c = make_case(s[0], s[1], s[2]);
        c.a.dtype = test_dtypes[1 + y % 2];
        c.a.norm = (heddle_norm)(y / 2 % 2);
        c.mean = y % 3 ? 0 : 100;
        c.skip = y == 1 ? UINT32_C(1) << N_GAMMA : y == 2 ? UINT32_C(1) << N_MEAN | UINT32_C(1) << N_RSTD : 0;
        if (y > 7) {
            c.a.features = HEDDLE_ACTIVATION;
            c.a.activation = (heddle_activation)(HEDDLE_GELU + y % 3);
        }
        c.seed = 3 * x + 1;
        check_norm_linear(&c);
    }
}

/* A block has tile after tile, each with a short sum: one half of it may be a tile ahead of the other. */
static void test_many_short_tiles(void **state) {
    (void)state;
    norm_linear_case c = make_case(8, 2304, test_emulated() ? 96 : 2304);
    c.a.dtype = HEDDLE_BF16;
    c.seed = 1;
    expect_family(&c, true);
    check_norm_linear(&c);
}

/* Odd numbers of columns in aligned rows; every subset of the results. */
static void test_tiles_with_odd_columns(void **state) {
    (void)state;
    static const int results[] = {N_GAMMA, N_BETA, N_DX, N_DGAMMA, N_DBETA, N_DW, N_DC};
    for (unsigned bits = 0; bits < 1u << COUNT(results); bits += test_emulated() ? 9 : 1) {
        norm_linear_case c = make_case(140, 67, 139);
        for (size_t x = 0; x < COUNT(results); x++)
            c.skip |= (bits >> x & 1) << results[x];
        c.a.x_stride = c.a.w_stride = 72;
        c.a.dx_stride = c.a.dw_stride = 80;
        c.a.y_stride = c.a.dy_stride = 144;
        c.a.norm = (heddle_norm)(bits / 2 % 4 % 3);
        c.a.dtype = bits % 2 ? HEDDLE_BF16 : HEDDLE_F16;
        c.seed = 3 * bits + 1;
        expect_family(&c, true);
        check_norm_linear(&c);
    }
    norm_linear_case c = make_case(140, 67, 139);
    c.a.dtype = HEDDLE_BF16;
    expect_family(&c, false);
}

/* The routes of forward and backward that activations take: few rows, few columns, strips, panels, tiles; u in narrow rows and in rows of
 * its own distance; large u, so that act is 0 or u. */
static void test_activations(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 40, 33}, {5, 200, 35}, {50, 392, 3}, {70, 96, 130}, {131, 64, 72}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (int activation = HEDDLE_GELU; activation <= LAST_ACTIVATION; activation++)
            for (size_t y = 0; y < TEST_DTYPES; y++) {
                const int64_t *s = sizes[x];
                norm_linear_case c = make_case(s[0], s[1], s[2]);
                c.a.dtype = test_dtypes[y];
                c.a.norm = (heddle_norm)((x + y) % 2);
                c.a.features = HEDDLE_ACTIVATION;
                c.a.activation = (heddle_activation)activation;
                c.a.u_stride = (x + y) % 3 ? 0 : (s[2] + 7) / 8 * 8 + 8;
                c.w_magnitude = (x + (size_t)activation) % 4 ? 0 : 1;
                c.seed = 7 * x + 3 * y + (size_t)activation;
                check_norm_linear(&c);
            }
}

/* act and act' where nothing else is added: k 1 of a float32 RMSNorm whose x is ±1 gives u = ±w. From 1e-30 to 1e38, infinity and NaN:
 * what float64 says, within some roundings of it, in the tail of the left, too; NaN from NaN alone (of -infinity nothing is asked: -infinity times 0). */
static void test_activation_values(void **state) {
    (void)state;
    static const float values[] = {0,  1e-30f, 1e-5f, 0.01f, 0.3f, 0.5f,  1,     1.5f,  2,        2.9f,
                                   3,  4,      5.5f,  7,     8,    9.5f,  10,    12,    13,       14,
                                   30, 86,     88,    1e3f,  1e9f, 1e19f, 1e20f, 1e38f, INFINITY, NAN};
    enum { N = 2 * COUNT(values) };
    for (int activation = HEDDLE_GELU; activation <= LAST_ACTIVATION; activation++) {
        norm_linear_case c = make_case(1, 1, N);
        c.a.norm = HEDDLE_RMS_NORM;
        c.a.features = HEDDLE_ACTIVATION;
        c.a.activation = (heddle_activation)activation;
        c.a.eps = 1e-30;
        c.skip = UINT32_C(1) << N_GAMMA | UINT32_C(1) << N_BETA | UINT32_C(1) << N_C;
        norm_linear_problem p = norm_linear_new(&c), ref = norm_linear_copy(&p, HEDDLE_F64, HEDDLE_REF);
        norm_linear_problem *both[] = {&p, &ref};
        for (size_t b = 0; b < 2; b++) {
            tensor_set(&both[b]->t[N_X], 0, 0, 0, 0, 1);
            for (int64_t f = 0; f < N; f++) {
                tensor_set(&both[b]->t[N_W], 0, 0, f, 0, (double)values[f / 2] * (f % 2 ? -1 : 1));
                tensor_set(&both[b]->t[N_DY], 0, 0, 0, f, 1);
            }
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
                const double allowed =
                    0x1p-20 * fabs(truth) * (1 + fmin(u * u, 200) / 8) + 1e-35 * (which ? 1 : fabs(u));
                if (isinf(u) && (isnan(tensor_raw(&p.t[N_U], f)) || (!which && u < 0)))
                    continue; /* an infinite w in two planes is infinity - infinity */
                if (isnan(truth) != isnan(ours) ||
                    (isfinite(truth) && !(fabs(ours - truth) <= fmax(allowed, which ? 4e-7 * (fabs(u) < 6) : 0))))
                    fail_msg("activation %d of %g: %s = %.9g, not %.9g", activation, u, which ? "act'" : "act", ours,
                             truth);
            }
        norm_linear_free(&p);
        norm_linear_free(&ref);
    }
}

/* u is not asked for: y is what it is with it. */
static void check_without_u(const norm_linear_case *with) {
    norm_linear_case without = *with;
    without.skip |= UINT32_C(1) << N_U;
    norm_linear_problem p = norm_linear_new(with), q = norm_linear_new(&without);
    norm_linear_run(&p, HEDDLE_FORWARD);
    norm_linear_run(&q, HEDDLE_FORWARD);
    for (int64_t at = 0; at < p.t[N_Y].span; at++)
        if (!(tensor_raw(&p.t[N_Y], at) == tensor_raw(&q.t[N_Y], at))) {
            norm_linear_print(with);
            fail_msg("y[%d] = %g without u, %g with it", (int)at, tensor_raw(&q.t[N_Y], at), tensor_raw(&p.t[N_Y], at));
        }
    norm_linear_free(&p);
    norm_linear_free(&q);
}

/* A residual on every route, with and without an activation and a norm, next to y, apart, and of no alignment. */
static void test_residuals(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 40, 33},   {5, 264, 40},  {24, 520, 64},   {50, 392, 3},
                                       {70, 96, 130}, {131, 64, 72}, {300, 136, 264}, {129, 392, 520}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (size_t y = 0; y < TEST_DTYPES; y++)
            for (int odd = 0; odd < 2; odd++) {
                norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
                c.a.dtype = test_dtypes[y];
                c.a.norm = (heddle_norm)((x + y) % 3);
                c.a.activation = (heddle_activation)((x + 2 * y + (size_t)odd) % 4);
                c.a.features = HEDDLE_RESIDUAL | (c.a.activation ? HEDDLE_ACTIVATION : 0);
                c.a.residual_stride = odd ? c.a.n + 1 + (int64_t)x % 2 : x % 2 ? 0 : (c.a.n + 15) / 8 * 8;
                c.seed = 3 * (x + y) + (uint64_t)odd;
                check_norm_linear(&c);
                if (c.a.activation)
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
                c.a.activation = x % 3 == 2 ? HEDDLE_SILU : HEDDLE_NO_ACTIVATION;
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

/* m = 0: y and dx have no elements, the parameters' gradients are zeros. */
static void test_no_rows(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        norm_linear_case c = make_case(0, 9, 4);
        c.a.dtype = test_dtypes[x];
        norm_linear_problem p = norm_linear_new(&c);
        norm_linear_run(&p, HEDDLE_FORWARD);
        norm_linear_run(&p, HEDDLE_BACKWARD);
        static const int zero[] = {N_DGAMMA, N_DBETA, N_DW, N_DC, N_RSTD};
        for (size_t y = 0; y < COUNT(zero); y++)
            for (int64_t at = 0; at < p.t[zero[y]].span; at++)
                assert_true(tensor_raw(&p.t[zero[y]], at) == 0);
        norm_linear_free(&p);
    }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_larger_sizes),
        cmocka_unit_test(test_few_rows),
        cmocka_unit_test(test_few_columns),
        cmocka_unit_test(test_few_results),
        cmocka_unit_test(test_optional_tensors),
        cmocka_unit_test(test_strides),
        cmocka_unit_test(test_means),
        cmocka_unit_test(test_spread),
        cmocka_unit_test(test_eps),
        cmocka_unit_test(test_constant_rows),
        cmocka_unit_test(test_tf32),
        cmocka_unit_test(test_no_rows),
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_tiles_with_odd_columns),
        cmocka_unit_test(test_activations),
        cmocka_unit_test(test_activation_values),
        cmocka_unit_test(test_residuals),
        cmocka_unit_test(test_z),
        cmocka_unit_test(test_no_norm),
        cmocka_unit_test(test_no_norm_of_any_size),
        cmocka_unit_test(test_gathered_moments),
        cmocka_unit_test(test_one_launch),
        cmocka_unit_test(test_many_short_tiles),
        cmocka_unit_test(test_widths_of_tiles),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

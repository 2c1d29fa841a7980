/* SPDX-License-Identifier: Apache-2.0
 * Norm-linear against the reference where a GPU takes tiles and single launches: sizes that end anywhere in them. */
#include "norm_linear_cases.h"

#include <string.h>

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

/* Forward for which the plan takes tiles of 192, 160, 128 and 96 columns, a warpgroup each, on a GPU of 132 multiprocessors (one
 * for each cluster, and some more) or, in the emulator, of four (up to five for each). */
static void test_tiles_in_turn(void **state) {
    (void)state;
    static const int64_t widths[] = {192, 160, 128, 96}, depths[] = {1416, 1416, 704, 2952};
    for (size_t x = 0; x < 3 * COUNT(widths) && test_device() == HEDDLE_CUDA; x++) {
        const int64_t width = widths[x % COUNT(widths)], k = depths[x % COUNT(widths)], tiles = x / COUNT(widths);
        const int64_t cols = width == 96 ? 1 : test_emulated() ? 2 + 4 * tiles : 66 + tiles;
        norm_linear_case c = make_case(130, k, cols * width - 8 * tiles);
        c.a.dtype = test_dtypes[1 + (x + tiles) % 2];
        c.skip = UINT32_C(1) << N_DX | UINT32_C(1) << N_DW;
        c.seed = 3 * x + 1;
        check_norm_linear(&c);
    }
}

/* dW of a weight that has too few tiles for a GPU's multiprocessors, of many rows: its terms go to several blocks, and the last of each tile
 * adds up what they leave. One tile, pairs of which the lower is not there, tiles that end anywhere; with dgamma from it and without. */
static void test_shares_of_dw(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{3000, 72, 136}, {4700, 200, 40}, {2100, 264, 392}};
    const bool emulated = test_emulated();
    for (size_t x = 0; x < (emulated ? 2 : COUNT(sizes)) && test_device() == HEDDLE_CUDA; x++)
        for (int norm = 0; norm < 3; norm++) {
            norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
            c.a.norm = (heddle_norm)norm;
            c.a.dtype = test_dtypes[1 + (x + (size_t)norm) % 2];
            c.skip = x % 2 == 0 ? UINT32_C(1) << N_DX : 0;
            c.seed = 3 * x + 1;
            check_norm_linear(&c);
        }
}

/* Hopper's product for few rows is what forward takes there, unless another family is asked for, or an emulated GPU has no room for the two
 * clusters of rows in two parts. */
static void expect_few(const norm_linear_case *c) {
    char device[160] = "", name[128] = "";
    const char *wanted = getenv("HEDDLE_CUDA_FAMILY"), *room = getenv("FAKE_MULTIPROCESSORS");
    if (room && atoi(room) < 16 && c->a.m > 32)
        return;
    heddle_device_describe(HEDDLE_CUDA, device, sizeof device);
    if (!strstr(device, "sm_90") || (wanted && strcmp(wanted, "sm90")))
        return;
    assert_int_equal(heddle_norm_linear_kernel(&c->a, HEDDLE_FORWARD, name, sizeof name), HEDDLE_OK);
    assert_non_null(strstr(name, "_fwd_few_"));
}

/* Hopper's product for few rows: all rows in one cluster, in two, of long sums; tiles of which clusters have several, and the ring of stages
 * goes round; blocks of a cluster whose last terms are missing; columns and rows that end anywhere, halves, too. */
static void test_few_rows_of_many_columns(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{3, 1416, 8712}, {32, 136, 8461}, {64, 712, 4104},  {40, 2056, 520},
                                       {33, 6200, 264}, {17, 8136, 72},  {100, 2120, 392}, {1, 72, 65}},
                         fewer[][3] = {{3, 1416, 200}, {32, 136, 333}, {64, 456, 264},   {40, 2056, 72},
                                       {33, 6200, 72}, {17, 8136, 72}, {100, 2120, 136}, {1, 72, 65}};
    static const heddle_activation activations[] = {HEDDLE_NO_ACTIVATION, HEDDLE_GELU, HEDDLE_SWIGLU};
    const bool emulated = test_emulated();
    for (size_t x = 0; x < (emulated ? 2 : 6) * COUNT(sizes) && test_device() == HEDDLE_CUDA; x++) {
        const int64_t *s = emulated ? fewer[x % COUNT(sizes)] : sizes[x % COUNT(sizes)];
        const size_t y = x / COUNT(sizes) + x;
        norm_linear_case c = make_case(s[0], s[1], s[2]);
        c.a.dtype = test_dtypes[1 + x / COUNT(sizes) % 2];
        c.a.norm = (heddle_norm)(y % 3);
        c.a.activation = activations[y % COUNT(activations)];
        c.a.features = (c.a.activation ? HEDDLE_ACTIVATION : 0) | (y % 4 == 1 ? HEDDLE_RESIDUAL : 0);
        c.skip = UINT32_C(1) << N_DX | UINT32_C(1) << N_DW;
        c.seed = 3 * x + 1;
        expect_few(&c);
        check_norm_linear(&c);
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

/* The y-th of cases with means of up to a hundred deviations, features that are a thousand times the others, and tensors that
 * are not there. */
static norm_linear_case hard_case(const int64_t sizes[3], heddle_dtype dtype, size_t y) {
    static const double means[] = {0, 100, 30}, spreads[] = {0, 1000};
    norm_linear_case c = make_case(sizes[0], sizes[1], sizes[2]);
    c.a.dtype = dtype;
    c.a.norm = (heddle_norm)(y % 2);
    c.mean = means[y / 2 % 3];
    c.scale_spread = spreads[y / 6];
    c.skip = y == 1   ? UINT32_C(1) << N_GAMMA
             : y == 2 ? UINT32_C(1) << N_MEAN | UINT32_C(1) << N_RSTD
             : y == 3 ? UINT32_C(1) << N_BETA
                      : 0;
    return c;
}

/* Rows that Hopper normalises in front of its product: of one warp's elements, of a part of it, where rows are many for so few
 * multiprocessors, of several warps', and of more than their threads have at once. */
static void test_rows_normalised(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{300, 64, 136}, {257, 768, 40}, {129, 1024, 72}, {50, 4104, 24},
                                       {35, 8192, 8},  {35, 8200, 8},  {2200, 1096, 8}, {299, 256, 40},
                                       {301, 264, 16}, {290, 512, 24}};
    for (size_t x = 0; x < 2 * 12 * COUNT(sizes) && (test_device() == HEDDLE_CUDA || x < 1); x++) {
        const size_t y = x / COUNT(sizes) / 2;
        norm_linear_case c = hard_case(sizes[x % COUNT(sizes)], test_dtypes[1 + x / COUNT(sizes) % 2], y);
        c.seed = 3 * x + 1;
        c.a.multiprocessors = x % 4 < 2 ? 2 : 0;
        expect_family(&c, true);
        check_norm_linear(&c);
    }
}

/* Hopper's forward multiplies raw x. */
static void expect_raw(const norm_linear_case *c) {
    char name[128] = "";
    expect_family(c, true);
    assert_int_equal(heddle_norm_linear_kernel(&c->a, HEDDLE_FORWARD, name, sizeof name), HEDDLE_OK);
    assert_true(strstr(name, "_raw_") || !strstr(name, "_sm90"));
}

/* bfloat16 with more rows than columns, long sums and work for the whole GPU: Hopper's product forms the rows' moments from x
 * as it multiplies it. So many rows are for a GPU, and the reference takes seconds for them; the emulator is asked for one of few
 * multiprocessors. Rows that do not fill a tile. */
static void test_gathered_moments(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{16900, 1032, 40}, {17100, 2048, 8}, {8500, 1088, 304}},
                         fewer[] = {8210, 1032, 8};
    const bool emulated = test_emulated();
    for (size_t x = 0; x < (emulated ? 2 : 12) && test_device() == HEDDLE_CUDA; x++) {
        const int64_t *s = emulated ? fewer : sizes[x % COUNT(sizes)];
        norm_linear_case c = hard_case(s, HEDDLE_BF16, emulated ? 2 + x : x);
        c.skip |= UINT32_C(1) << N_DX | UINT32_C(1) << N_DW;
        c.seed = 3 * x + 1;
        expect_raw(&c);
        check_norm_linear(&c);
    }
}

/* The same where rows are made anew after they have been stored. */
static void test_gathered_coarse_rows(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{16900, 1032, 40}, {8500, 1088, 304}}, fewer[] = {8210, 1032, 8};
    static const double means[] = {300, 30000, 120};
    const bool emulated = test_emulated();
    for (size_t x = 0; x < (emulated ? 2 : COUNT(means) * COUNT(sizes)) && test_device() == HEDDLE_CUDA; x++) {
        const int64_t *s = emulated ? fewer : sizes[x % COUNT(sizes)];
        norm_linear_case c = make_case(s[0], s[1], s[2]);
        c.a.dtype = HEDDLE_BF16;
        c.mean = means[x / (emulated ? 1 : COUNT(sizes))];
        c.skip = UINT32_C(1) << N_DX | UINT32_C(1) << N_DW;
        c.seed = 3 * x + 1;
        expect_raw(&c);
        check_norm_linear(&c);
    }
}

/* More rows than twice the columns, of which sm80's product takes raw x, with a row's end that Hopper's cannot gather moments to; and
 * moments that could be gathered, but the residual does not lie as Hopper stores, so that the activation is formed apart. */
static void test_raw_or_not(void **state) {
    (void)state;
    static const int64_t odd[][3] = {{300, 67, 40}, {77, 147, 24}, {132, 11, 32}}, fewer[] = {8210, 1032, 8},
                         many[] = {16900, 1032, 40};
    for (size_t x = 0; x < 2 * COUNT(odd); x++) {
        norm_linear_case c = make_case(odd[x / 2][0], odd[x / 2][1], odd[x / 2][2]);
        c.a.x_stride = c.a.w_stride = c.a.dx_stride = c.a.dw_stride = (c.a.k + 7) / 8 * 8;
        c.a.norm = (heddle_norm)(x % 2);
        c.a.dtype = HEDDLE_BF16;
        c.mean = 10;
        c.seed = 3 * x + 1;
        expect_family(&c, true);
        check_norm_linear(&c);
    }
    if (test_device() != HEDDLE_CUDA)
        return;
    const int64_t *s = test_emulated() ? fewer : many;
    norm_linear_case c = make_case(s[0], s[1], s[2]);
    c.a.features = HEDDLE_ACTIVATION | HEDDLE_RESIDUAL;
    c.a.activation = HEDDLE_GELU;
    c.a.residual_stride = c.a.n + 1;
    c.a.dtype = HEDDLE_BF16;
    c.mean = 10;
    c.skip = UINT32_C(1) << N_DX | UINT32_C(1) << N_DW;
    c.seed = 1;
    expect_raw(&c);
    check_norm_linear(&c);
}

/* The one launch of a few rows, which have 16 warps, 4, 2 and one each: one block's and two blocks', more terms than its warps load
 * at once, ends of every kind. */
static void test_one_launch(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 264, 40},   {3, 4104, 24},  {6, 520, 16},  {8, 4104, 24},
                                       {9, 1032, 100}, {16, 72, 2200}, {17, 520, 64}, {32, 2056, 33}};
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

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_tiles_with_odd_columns),
        cmocka_unit_test(test_rows_normalised),
        cmocka_unit_test(test_gathered_moments),
        cmocka_unit_test(test_gathered_coarse_rows),
        cmocka_unit_test(test_raw_or_not),
        cmocka_unit_test(test_one_launch),
        cmocka_unit_test(test_tiles_in_turn),
        cmocka_unit_test(test_shares_of_dw),
        cmocka_unit_test(test_few_rows_of_many_columns),
        cmocka_unit_test(test_many_short_tiles),
        cmocka_unit_test(test_widths_of_tiles),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

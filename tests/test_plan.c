/* SPDX-License-Identifier: Apache-2.0
 * The pure functions of mask.h against brute force, and what plans promise: workspaces that grow with s, kernels
 * with names. */
#include "common.h"

#include "mask.h"

#include <string.h>

#define N 9

static bool sees(band m, int64_t i, int64_t j) {
    return j >= i + m.lo && j <= i + m.hi;
}

/* Bands of all kinds: finite, half-open, open, empty. */
static band band_number(int x) {
    static const int64_t edge[] = {-BAND_INFINITE, -12, -9, -5, -3, -2, -1, 0, 1, 2, 3, 5, 9, 12, BAND_INFINITE};
    return (band){edge[x / (int)COUNT(edge)], edge[x % (int)COUNT(edge)]};
}
#define BANDS 225

static void test_tiles(void **state) {
    (void)state;
    for (int x = 0; x < BANDS; x++)
        for (int64_t i0 = 0; i0 < N; i0++)
            for (int64_t i1 = i0 + 1; i1 <= N; i1++)
                for (int64_t j0 = 0; j0 < N; j0++)
                    for (int64_t j1 = j0 + 1; j1 <= N; j1++) {
                        band m = band_number(x);
                        int64_t count = 0;
                        for (int64_t i = i0; i < i1; i++)
                            for (int64_t j = j0; j < j1; j++)
                                count += sees(m, i, j);
                        tile_kind kind = tile_of(m, i0, i1, j0, j1);
                        if (kind == TILE_EMPTY)
                            assert_int_equal(count, 0);
                        else if (kind == TILE_FULL)
                            assert_int_equal(count, (i1 - i0) * (j1 - j0));
                        else if (m.lo <= m.hi) /* a partial tile is never worth nothing or everything */
                            assert_true(count > 0 && count < (i1 - i0) * (j1 - j0));
                    }
}

static void test_ranges(void **state) {
    (void)state;
    for (int x = 0; x < BANDS; x++)
        for (int64_t a = 0; a < N; a++)
            for (int64_t b = a + 1; b <= N; b++)
                for (int64_t other = 0; other <= N; other++) {
                    band m = band_number(x);
                    range keys = keys_of_queries(m, a, b, other), queries = queries_of_keys(m, a, b, other);
                    assert_true(keys.begin >= 0 && keys.end <= other && queries.begin >= 0 && queries.end <= other);
                    int64_t first_k = other, last_k = -1, first_q = other, last_q = -1;
                    for (int64_t y = a; y < b; y++)
                        for (int64_t z = 0; z < other; z++) {
                            if (sees(m, y, z)) {
                                first_k = min64(first_k, z);
                                last_k = max64(last_k, z);
                            }
                            if (sees(m, z, y)) {
                                first_q = min64(first_q, z);
                                last_q = max64(last_q, z);
                            }
                        }
                    if (m.lo > m.hi)
                        continue; /* nothing is seen; any range will do, since every tile is looked at */
                    if (last_k >= 0)
                        assert_true(keys.begin == first_k && keys.end == last_k + 1);
                    else
                        assert_true(keys.begin >= keys.end);
                    if (last_q >= 0)
                        assert_true(queries.begin == first_q && queries.end == last_q + 1);
                    else
                        assert_true(queries.begin >= queries.end);
                }
}

/* The rule of heddle.h, word by word. */
static bool rule(const heddle_attention *a, int64_t sq, int64_t sk, int64_t i, int64_t j) {
    const int64_t whole_sq = a->whole_sq ? a->whole_sq : a->q_offset + sq,
                  whole_sk = a->whole_sk ? a->whole_sk : a->k_offset + sk;
    int64_t off = a->q_offset - a->k_offset + (a->mask == HEDDLE_CAUSAL_TOP_LEFT ? 0 : whole_sk - whole_sq);
    if (a->mask != HEDDLE_MASK_NONE && !(j <= i + off))
        return false;
    if (!(a->features & HEDDLE_WINDOW))
        return true;
    if (a->window_left >= 0 && !(i + off - a->window_left <= j))
        return false;
    return a->window_right < 0 || j <= i + off + a->window_right;
}

static void test_bands(void **state) {
    (void)state;
    for (int mask = 0; mask <= LAST_MASK; mask++)
        for (int window = 0; window < 2; window++)
            for (int64_t left = -1; left < N; left++)
                for (int64_t right = -1; right < N; right++)
                    for (int64_t sq = 0; sq < N; sq++)
                        for (int64_t sk = 0; sk < N; sk++) {
                            heddle_attention a = {.mask = (heddle_mask)mask,
                                                  .features = window ? HEDDLE_WINDOW : 0,
                                                  .window_left = left,
                                                  .window_right = right};
                            sequence s = {3, sq, 5, sk};
                            band m = band_of(&a, s);
                            for (int64_t i = 0; i < sq; i++)
                                for (int64_t j = 0; j < sk; j++) {
                                    assert_int_equal(!!band_sees(m, i, j), rule(&a, sq, sk, i, j));
                                    assert_int_equal(sees(m, i, j), rule(&a, sq, sk, i, j));
                                }
                        }
}

/* Every part of a whole sees what the whole sees of it. */
static void test_bands_of_parts(void **state) {
    (void)state;
    enum { WHOLE = 5 };
    for (int mask = 0; mask <= LAST_MASK; mask++)
        for (int64_t left = -1; left < 3; left++)
            for (int64_t sizes = 0; sizes < WHOLE * WHOLE * WHOLE * WHOLE; sizes++) {
                const int64_t q0 = sizes % WHOLE, k0 = sizes / WHOLE % WHOLE, sq = sizes / WHOLE / WHOLE % WHOLE,
                              sk = sizes / WHOLE / WHOLE / WHOLE;
                for (int64_t longer = 0; longer < 3; longer++) {
                    heddle_attention whole = {
                        .mask = (heddle_mask)mask, .features = HEDDLE_WINDOW, .window_left = left, .window_right = 1};
                    const int64_t whole_sq = q0 + sq + longer, whole_sk = k0 + sk + 2 * longer;
                    heddle_attention a = whole;
                    a.q_offset = q0;
                    a.k_offset = k0;
                    if (longer) { /* else the defaults say it */
                        a.whole_sq = whole_sq;
                        a.whole_sk = whole_sk;
                    }
                    const band m = band_of(&a, (sequence){0, sq, 0, sk});
                    for (int64_t i = 0; i < sq; i++)
                        for (int64_t j = 0; j < sk; j++) {
                            assert_int_equal(!!band_sees(m, i, j), rule(&whole, whole_sq, whole_sk, q0 + i, k0 + j));
                            assert_int_equal(!!band_sees(m, i, j), rule(&a, sq, sk, i, j));
                        }
                }
            }
}

static void test_sequences(void **state) {
    (void)state;
    static const int32_t odd[] = {INT32_MIN, -7, -1, 0, 1, 2, 5, 9, 10, 11, 12, 13, 1000, INT32_MAX};
    heddle_attention a = {.b = 1, .sq = 6, .sk = 7, .total_q = 10, .total_k = 12, .features = HEDDLE_VARLEN};
    for (size_t x = 0; x < COUNT(odd); x++)
        for (size_t y = 0; y < COUNT(odd); y++)
            for (size_t z = 0; z < COUNT(odd); z++) {
                const int32_t cu[] = {odd[x], odd[y]};
                sequence s = sequence_of(&a, cu, cu, &odd[z], &odd[z], 0);
                assert_true(s.first_q >= 0 && s.sq >= 0 && s.sq <= a.sq && s.first_q + s.sq <= a.total_q);
                assert_true(s.first_k >= 0 && s.sk >= 0 && s.sk <= a.sk && s.first_k + s.sk <= a.total_k);
                sequence free_length = sequence_of(&a, cu, cu, NULL, NULL, 0);
                assert_true(s.sq <= free_length.sq && s.sk <= free_length.sk);
                if (odd[x] >= 0 && odd[y] >= odd[x] && odd[y] <= 10 && odd[y] - odd[x] <= 6) { /* right lengths stay */
                    assert_true(free_length.first_q == odd[x] && free_length.sq == odd[y] - odd[x]);
                    assert_true(free_length.first_k == odd[x] && free_length.sk == odd[y] - odd[x]);
                    if (odd[z] >= 0 && odd[z] <= free_length.sq)
                        assert_int_equal(s.sq, odd[z]);
                }
            }
    a.features = 0;
    sequence whole = sequence_of(&a, NULL, NULL, NULL, NULL, 3);
    assert_true(whole.first_q == 0 && whole.sq == 6 && whole.first_k == 0 && whole.sk == 7);
}

static size_t workspace_of(const heddle_attention *a, heddle_pass pass) {
    size_t bytes = SIZE_MAX;
    assert_int_equal(heddle_attention_workspace(a, pass, &bytes), HEDDLE_OK);
    return bytes;
}

static void test_workspace_is_linear(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++)
        for (int pass = 0; pass < 2; pass++)
            for (int mask = 0; mask <= LAST_MASK; mask++)
                for (int grouped = 0; grouped < 2; grouped++) {
                    heddle_attention a = attention_desc(test_dtypes[x], 1, 16, grouped ? 2 : 0, 65536, 65536, 128, 0);
                    a.mask = (heddle_mask)mask;
                    size_t one = workspace_of(&a, (heddle_pass)pass);
                    assert_true(one < (size_t)(grouped ? 300 : 64) << 20); /* q has 256 MB in 16 bits */
                    a.sq = a.sk = 131072;
                    assert_true(workspace_of(&a, (heddle_pass)pass) <= 2 * one + 4096);
                    a.features = HEDDLE_DETERMINISTIC;
                    assert_true(workspace_of(&a, (heddle_pass)pass) <= 2 * one + 4096);
                }
    heddle_attention a = attention_desc(HEDDLE_F32, 1, 1, 0, 65536, 65536, 64, 0);
    a.features = HEDDLE_BIAS; /* dbias summed over b and h would otherwise tempt a plan into s² */
    a.bias_stride = a.dbias_stride = (heddle_strides){0, 0, 65536};
    assert_true(workspace_of(&a, HEDDLE_BACKWARD) < (size_t)64 << 20);
}

static void test_norm_linear_workspace(void **state) {
    (void)state;
    for (int pass = 0; pass < 2; pass++) {
        heddle_norm_linear a = norm_linear_desc(HEDDLE_BF16, HEDDLE_LAYER_NORM, 1 << 20, 1024, 4096);
        size_t one = SIZE_MAX, two = SIZE_MAX;
        assert_int_equal(heddle_norm_linear_workspace(&a, (heddle_pass)pass, &one), HEDDLE_OK);
        a.m *= 2;
        assert_int_equal(heddle_norm_linear_workspace(&a, (heddle_pass)pass, &two), HEDDLE_OK);
        assert_true(one < (size_t)256 << 20); /* the inputs have 2 GB */
        assert_true(two <= 2 * one + 4096);
    }
}

static void test_kernel_names(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++)
        for (int pass = 0; pass < 2; pass++) {
            char name[64] = "", other[64] = "", cut[5] = "....";
            heddle_attention a = attention_desc(test_dtypes[x], 1, 2, 0, 64, 64, 64, 0);
            heddle_norm_linear b = norm_linear_desc(test_dtypes[x], HEDDLE_LAYER_NORM, 8, 64, 24);
            assert_int_equal(heddle_attention_kernel(&a, (heddle_pass)pass, name, sizeof name), HEDDLE_OK);
            assert_int_equal(heddle_norm_linear_kernel(&b, (heddle_pass)pass, other, sizeof other), HEDDLE_OK);
            assert_int_equal(strncmp(name, "heddle_attention_", 17), 0);
            assert_int_equal(strncmp(other, "heddle_norm_linear_", 19), 0);
            if (test_device() == HEDDLE_CPU) {
                /* Two are for bfloat16; the other types, and norm-linear with few results, have AVX-512's kernels. */
                const char *isa = heddle_cpu_isa();
                const bool of_bf16 = !strcmp(isa, "amx") || !strcmp(isa, "avx512bf16");
                const char *plain = of_bf16 ? "_avx512" : isa;
                if (test_dtypes[x] != HEDDLE_BF16)
                    isa = plain;
                assert_non_null(strstr(name, isa));
                assert_non_null(strstr(other, isa));
                b.m = 2;
                b.k = 63;
                assert_int_equal(heddle_norm_linear_kernel(&b, (heddle_pass)pass, other, sizeof other), HEDDLE_OK);
                /* With pairs alone, backward knows by itself which of its sums few results would show rounded. */
                if (pass == HEDDLE_BACKWARD && !strcmp(isa, "avx512bf16"))
                    plain = isa;
                assert_string_equal(other + strlen(other) - strlen(plain), plain);
            }
            assert_int_equal(heddle_attention_kernel(&a, (heddle_pass)pass, cut, sizeof cut), HEDDLE_OK);
            assert_string_equal(cut, "hedd");
            assert_int_equal(heddle_attention_kernel(&a, (heddle_pass)pass, NULL, 0), HEDDLE_OK);
        }
}

/* A byte less than the query said is refused, and nothing is written; exactly as many are enough (every other test). */
static void test_query_agrees(void **state) {
    (void)state;
    static const int64_t sizes[][4] = {{1, 1, 1, 1}, {1, 3, 33, 70}, {2, 8, 256, 300}, {1, 1, 1, 1000}, {5, 2, 300, 3}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (int pass = 0; pass < 2; pass++) {
            attention_case c = {
                .a = attention_desc(HEDDLE_BF16, sizes[x][0], sizes[x][1], 1, sizes[x][2], sizes[x][3], 40, 0),
                .seed = x};
            attention_problem p = attention_new(&c);
            size_t bytes = workspace_of(&p.a, (heddle_pass)pass);
            heddle_attention_data data = attention_data(&p, pass);
            void *workspace = workspace_new(p.a.device, bytes);
            if (bytes) {
                heddle_status status = pass ? heddle_attention_backward(&p.a, &data, workspace, bytes - 1, NULL)
                                            : heddle_attention_forward(&p.a, &data, workspace, bytes - 1, NULL);
                assert_int_equal(status, HEDDLE_WORKSPACE_TOO_SMALL);
            }
            for (int t = 0; t < T_COUNT; t++) {
                tensor_download(&p.t[t]);
                assert_true(tensor_unchanged(&p.t[t]));
            }
            workspace_free(p.a.device, workspace, bytes);
            attention_free(&p);
        }
}

/* A sequence has no more rows than there are: a limit far above that changes nothing, not the workspace and not a bit. */
static void test_loose_limits(void **state) {
    (void)state;
    const int64_t far = INT64_C(1) << 40;
    const int32_t cu_q[] = {0, 7, 7, 20}, cu_k[] = {0, 30, 31, 40};
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        attention_case c = {
            .a = attention_desc(test_dtypes[x], 3, 4, 2, 20, 40, 16, 24), .seed = x, .cu_q = cu_q, .cu_k = cu_k};
        c.a.features = HEDDLE_VARLEN | HEDDLE_BOOL_MASK;
        c.a.bool_mask_stride = (heddle_strides){0, 0, 40};
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.a.total_q = 20, c.a.total_k = 40;
        attention_problem p = attention_new(&c), q = attention_new(&c);
        q.a.sq = q.a.sk = far;
        for (int pass = 0; pass < 2; pass++) {
            assert_int_equal(workspace_of(&p.a, (heddle_pass)pass), workspace_of(&q.a, (heddle_pass)pass));
            attention_run(&p, (heddle_pass)pass);
            attention_run(&q, (heddle_pass)pass);
        }
        for (int t = T_O; t < T_COUNT; t++)
            assert_true(tensor_equal(&p.t[t], &q.t[t]));
        attention_free(&p);
        attention_free(&q);
    }
    heddle_attention a = attention_desc(HEDDLE_BF16, 1, 1 << 24, 0, 1, 1, 1, 0), b = a;
    a.features = b.features = HEDDLE_VARLEN;
    a.total_q = a.total_k = b.total_q = b.total_k = 1;
    b.sq = b.sk = far;
    for (int pass = 0; pass < 2; pass++)
        assert_int_equal(workspace_of(&a, (heddle_pass)pass), workspace_of(&b, (heddle_pass)pass));
}

/* Products that do not fit are refused with their numbers; what is accepted has a workspace that can be true. */
static void test_absurd_sizes(void **state) {
    (void)state;
    rng r = {20};
    int accepted = 0;
    for (int x = 0; x < 20000; x++) {
        const int64_t most = INT64_C(1) << 40;
        int64_t size[6];
        for (int i = 0; i < 6; i++)
            size[i] = rng_chance(&r, 0.3) ? rng_between(&r, 0, 3)
                                          : (INT64_C(1) << rng_between(&r, 0, 40)) - rng_between(&r, 0, 1);
        heddle_attention a = attention_desc(test_dtypes[x % TEST_DTYPES], size[0], max64(1, size[1]), 0, size[2],
                                            size[3], max64(1, size[1] % 512), 1 + x % 512);
        a.device = x % 5 ? HEDDLE_CPU : HEDDLE_REF;
        if (rng_chance(&r, 0.5)) {
            a.features = HEDDLE_VARLEN | (rng_chance(&r, 0.5) ? HEDDLE_BIAS : 0);
            a.bias_stride = a.dbias_stride = (heddle_strides){HEDDLE_BROADCAST, 0, 0};
            a.total_q = min64(most, size[4]), a.total_k = min64(most, size[5]);
        }
        for (int pass = 0; pass < 2; pass++) {
            size_t bytes = SIZE_MAX;
            const heddle_status status = heddle_attention_workspace(&a, (heddle_pass)pass, &bytes);
            if (status != HEDDLE_OK) {
                assert_int_equal(status, HEDDLE_OVERFLOW);
                continue;
            }
            const double rows = (double)a.h * (double)(a.features & HEDDLE_VARLEN ? a.total_q : a.b * a.sq);
            assert_true(bytes < INT64_MAX);
            if (pass && a.device == HEDDLE_CPU) /* D and the log-sum-exp in two parts */
                assert_true((double)bytes >= 12 * rows);
            accepted++;
        }
        heddle_norm_linear l = norm_linear_desc(test_dtypes[x % TEST_DTYPES], HEDDLE_LAYER_NORM, size[0],
                                                max64(1, size[1]), max64(1, size[2]));
        l.device = a.device;
        l.x_stride = size[3];
        for (int pass = 0; pass < 2; pass++) {
            size_t bytes = SIZE_MAX;
            const heddle_status status = heddle_norm_linear_workspace(&l, (heddle_pass)pass, &bytes);
            assert_true(status == HEDDLE_OVERFLOW || (status == HEDDLE_OK && bytes < INT64_MAX));
            if (status == HEDDLE_OK && pass && l.device == HEDDLE_CPU)
                assert_true((double)bytes >= 8 * (double)l.m);
        }
    }
    assert_true(accepted > 4000);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_bands),
        cmocka_unit_test(test_bands_of_parts),
        cmocka_unit_test(test_sequences),
        cmocka_unit_test(test_workspace_is_linear),
        cmocka_unit_test(test_norm_linear_workspace),
        cmocka_unit_test(test_kernel_names),
        cmocka_unit_test(test_query_agrees),
        cmocka_unit_test(test_loose_limits),
        cmocka_unit_test(test_absurd_sizes),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_E4M3: keys and values of 8 bits with a scale for each head. The tests' conversions go by the words of the specification (tensor.h),
 * the library's by bits (dtype.h). */
#include "api.h"

#include "../tools/device_memory.h"

#include <math.h>
#include <string.h>

static attention_case e4m3_case(int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d) {
    attention_case c = attention_case_of(b, h, hk, sq, sk, d, d);
    c.a.features = HEDDLE_E4M3;
    c.a.dtype = HEDDLE_BF16;
    c.poison_masked = true;
    return c;
}

static void in_pages(attention_case *c, int64_t page) {
    c->a.features |= HEDDLE_PAGES;
    c->a.page = page;
    c->a.pages = c->a.b * ((c->a.sk + page - 1) / page);
}

/* Rows of a page side by side, as [pages, page, hk, d]. */
static void row_by_row(attention_case *c) {
    heddle_attention *a = &c->a;
    a->k_stride = (heddle_strides){a->page * a->hk * a->d, a->d, a->hk * a->d};
    a->v_stride = (heddle_strides){a->page * a->hk * a->dv, a->dv, a->hk * a->dv};
}

/* In each type. */
static void check(attention_case c) {
    for (int dtype = HEDDLE_F32; dtype <= HEDDLE_F16; dtype++) {
        c.a.dtype = (heddle_dtype)dtype;
        check_attention(&c);
    }
}

/* From here on the thread takes subnormal floats for zeros, or makes them again what they are. */
static void flush_subnormals(bool flush) {
#if defined __SSE2__
    const unsigned both = 0x8040; /* MXCSR's: what goes in, what comes out */
    __builtin_ia32_ldmxcsr(flush ? __builtin_ia32_stmxcsr() | both : __builtin_ia32_stmxcsr() & ~both);
#else
    (void)flush;
#endif
}

/* Of a float in a few steps as of a double by the words: all bits of the first 16 with some of the last. */
static void test_conversion_of_floats(void **state) {
    (void)state;
    static const uint32_t last[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    for (uint32_t x = 0; x < UINT32_C(1) << 16; x++)
        for (size_t y = 0; y < COUNT(last); y++) {
            const float value = float_from_bits(x << 16 | last[y]);
            const uint8_t found = float_to_e4m3(value);
            if (isnan(value))
                assert_int_equal(found & 0x7f, 0x7f);
            else
                assert_int_equal(found, double_to_e4m3((double)value));
        }
}

/* All 256 of them, what lies between two, and what is too large. */
static void test_conversion(void **state) {
    (void)state;
    for (int x = 0; x < 256; x++) {
        const double value = e4m3_value((uint8_t)x);
        const float widened = e4m3_to_float((uint8_t)x);
        volatile uint8_t byte = (uint8_t)x; /* so that the compiler does not take the number above */
        flush_subnormals(true);
        volatile float found = e4m3_to_float(byte);
        flush_subnormals(false);
        const float without = found;
        assert_true(isnan(value) ? isnan(widened) : (double)widened == value && !signbit(widened) == (x < 128));
        assert_memory_equal(&widened, &without, sizeof widened);
        assert_int_equal(double_to_e4m3(value), isnan(value) ? 0x7f : x);
        if ((x & 127) >= 126)
            continue;
        const double middle = (value + e4m3_value((uint8_t)(x + 1))) / 2;
        for (int side = -1; side <= 1; side++) {
            const double near = middle * (1 + side * 0x1p-40);
            assert_int_equal(double_to_e4m3(near), e4m3_nearest(near));
        }
    }
    assert_int_equal(double_to_e4m3(449), 0x7e);
    assert_int_equal(double_to_e4m3(-INFINITY), 0xfe);
    assert_int_equal(double_to_e4m3((double)NAN) & 0x7f, 0x7f);
}

static void test_decode(void **state) {
    (void)state;
    static const int32_t len_k[] = {1, 203, 0, 130};
    for (int64_t page = 8; page <= 256; page *= 2) /* 8: none */
        for (int x = 0; x < 4; x++) {
            attention_case c = e4m3_case(4, 8, 2, x & 1 ? 1 : 3, 203, x & 2 ? 128 : 40);
            c.a.features |= HEDDLE_SEQLENS;
            c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
            c.len_k = len_k;
            if (page >= 16) {
                in_pages(&c, page);
                c.hidden_pages = x & 1 ? 0.2 : 0;
                if (x & 2)
                    row_by_row(&c);
            }
            check(c);
        }
}

/* Many keys, which several blocks share. */
static void test_long_decode(void **state) {
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        attention_case c = e4m3_case(2, 4, 1, 1, 4100, kind ? 128 : 64);
        if (kind)
            in_pages(&c, kind == 1 ? 16 : 64);
        c.hidden_pages = kind == 2 ? 0.3 : 0;
        check(c);
    }
}

/* More queries than a row of lanes. */
static void test_prefill(void **state) {
    (void)state;
    static const int32_t len_k[] = {300, 161};
    static const int64_t dims[] = {33, 64, 128, 192};
    for (size_t x = 0; x < 2 * COUNT(dims); x++) {
        attention_case c = e4m3_case(2, 4, 2, x % 4 == 2 ? 150 : 37, 300, dims[x / 2]);
        c.a.features |= HEDDLE_SEQLENS;
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.len_k = len_k;
        if (x % 2) {
            in_pages(&c, INT64_C(16) << x / 2);
            c.hidden_pages = x == 1 ? 0.2 : 0;
        }
        check(c);
    }
}

/* So many queries that tiles are whole, that blocks share keys, and that heads of a group share a tile; and what each width begins with. */
static void test_prompts(void **state) {
    (void)state;
    static const int64_t dims[] = {64, 128, 136, 256};
    for (size_t x = 0; x < COUNT(dims); x++)
        for (int kind = 0; kind < 4; kind++) {
            attention_case c = e4m3_case(1, 4, kind == 3 ? 1 : 2, kind == 3 ? 17 : 150, kind == 2 ? 70 : 330, dims[x]);
            c.a.mask = kind ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
            c.a.dtype = x % 2 ? HEDDLE_F16 : HEDDLE_BF16;
            c.a.features |= kind == 1 ? HEDDLE_WINDOW | HEDDLE_SINKS : 0;
            c.a.window_left = kind == 1 ? 90 : 0;
            if (kind == 1) {
                in_pages(&c, 16);
                c.hidden_pages = 0.2;
            } else if (kind == 2) {
                in_pages(&c, 64);
                row_by_row(&c);
            }
            check_attention(&c);
        }
}

/* What Hopper's kernels take once the keys have been collected: every width, page and option that they have for pages. Rows of bytes that no
 * address is aligned to, pages that are shared, and numbers that are none. */
static void test_collected(void **state) {
    (void)state;
    static const int32_t len_k[] = {390, 0, 161};
    static const int64_t dims[] = {64, 80, 128, 160, 256, 33};
    for (int x = 0; x < 24; x++) {
        const int options = x / 6;
        attention_case c = e4m3_case(3, 4, x % 3 ? 2 : 4, x % 4 ? 70 : 150, 390, dims[x % 6]);
        c.seed += (uint64_t)x;
        c.a.dtype = x % 2 ? HEDDLE_F16 : HEDDLE_BF16;
        c.a.dv = x == 5 || x == 14 ? 48 : c.a.d;
        c.a.mask = x % 5 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        c.a.softcap = options & 1 ? 3 : 0;
        c.a.features |= (options & 2 ? HEDDLE_ALIBI : 0) | (x % 4 == 1 ? HEDDLE_SINKS : 0) |
                        (x % 3 ? HEDDLE_SEQLENS : 0) | (x % 7 == 3 ? HEDDLE_WINDOW : 0);
        c.a.window_left = c.a.features & HEDDLE_WINDOW ? 100 : 0;
        c.len_k = x % 3 ? len_k : NULL;
        if (x % 4 == 0) {
            c.a.k_stride = (heddle_strides){390 * 2 * 333 + 7, 333, 2 * 333};
            if (c.a.hk == 4)
                c.a.k_stride = (heddle_strides){0, 390 * 331, 331};
        } else if (x % 4 != 1) {
            in_pages(&c, INT64_C(16) << x % 5);
            c.hidden_pages = x % 4 == 2 ? 0.3 : 0;
            if (x % 2)
                row_by_row(&c);
        }
        check_attention(&c);
    }
}

/* Packed queries, with keys that are packed, too, or in pages, of lengths of their own or not. */
static void test_collected_packed(void **state) {
    (void)state;
    static const int32_t cu_q[] = {1, 71, 71, 160, 161, 161}, cu_k[] = {3, 93, 94, 300, 300, 301},
                         len_k[] = {90, 40, 175, 1, 0};
    for (int x = 0; x < 8; x++) {
        attention_case c = e4m3_case(5, 4, 2, 89, 206, x % 3 ? 64 : 128);
        c.a.dtype = x % 2 ? HEDDLE_F16 : HEDDLE_BF16;
        c.a.features |= HEDDLE_VARLEN | (x & 2 ? HEDDLE_SEQLENS : 0) | (x == 5 ? HEDDLE_ALIBI | HEDDLE_SINKS : 0);
        c.a.total_q = 163;
        c.a.mask = x % 3 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_CAUSAL_TOP_LEFT;
        c.cu_q = cu_q;
        c.len_k = x & 2 ? len_k : NULL;
        if (x & 4) {
            in_pages(&c, 32);
            c.hidden_pages = 0.2;
        } else {
            c.a.total_k = 305;
            c.cu_k = cu_k;
        }
        check_attention(&c);
    }
}

/* As many numbers that are near those of the reference, or NaN where those are. */
static void expect_near(const tensor *found, const tensor *ref, double tolerance) {
    int checked = 0;
    for (int64_t n = 0; n < ref->dim[0]; n++)
        for (int64_t x = 0; x < ref->dim[1]; x++)
            for (int64_t i = 0; i < ref->dim[2]; i++)
                for (int64_t e = 0; e < ref->dim[3]; e++, checked++) {
                    const double a = tensor_get(found, n, x, i, e), b = tensor_get(ref, n, x, i, e);
                    assert_true(isnan(a) == isnan(b));
                    assert_true(isnan(b) || a == b || fabs(a - b) <= tolerance * fmax(1, fabs(b)));
                }
    assert_true(checked > 0);
}

/* Scales of which there is no factor of the exponent, by which scores have to be multiplied one by one; under a softcap all are such. */
static void test_extreme_scales(void **state) {
    (void)state;
    static const double scales[][2] = {{1, 1},           {-1, 1},           {0, 2},           {-0x1p70, 1},
                                       {0x1p70, -3},     {0x1p-70, 1},      {1, 0},           {(double)NAN, 1},
                                       {1, (double)NAN}, {0x1p-20, 0x1p20}, {0x1p30, 0x1p-30}};
    for (size_t x = 0; x < 2 * COUNT(scales); x++) {
        const double k = scales[x / 2][0], v = scales[x / 2][1], size = isnan(k) || k == 0 ? 1 : fabs(k);
        attention_case c = e4m3_case(2, 4, 2, 70, 300, 64);
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.a.scale = 0.125 / size;
        c.a.softcap = x % 2 ? 4 : 0;
        c.poison_masked = false;
        attention_problem p = attention_new(&c);
        for (int64_t y = 0; y < c.a.b * c.a.hk; y++) {
            tensor_raw_set(&p.t[T_K_SCALE], y, y % 2 ? k : size);
            tensor_raw_set(&p.t[T_V_SCALE], y, y % 2 ? v : 1);
        }
        tensor_upload(&p.t[T_K_SCALE]);
        tensor_upload(&p.t[T_V_SCALE]);
        attention_problem ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&ref, HEDDLE_FORWARD);
        expect_near(&p.t[T_O], &ref.t[T_O], 0.03 * (isnan(v) ? 1 : fmax(1, fabs(v))));
        expect_near(&p.t[T_LSE], &ref.t[T_LSE], 2e-3);
        attention_free(&ref);
        attention_free(&p);
    }
}

static void test_packed(void **state) {
    (void)state;
    static const int32_t cu_q[] = {1, 8, 8, 70, 71}, cu_k[] = {0, 90, 91, 150, 150}, len_k[] = {90, 40, 75, 0};
    for (int paged = 0; paged < 2; paged++) {
        attention_case c = e4m3_case(4, 4, 2, 64, 90, 64);
        c.a.features |= HEDDLE_VARLEN;
        c.a.total_q = 73;
        c.a.total_k = paged ? 0 : 153;
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.cu_q = cu_q;
        if (paged) {
            in_pages(&c, 32);
            c.a.features |= HEDDLE_SEQLENS;
            c.len_k = len_k;
            c.hidden_pages = 0.2;
        } else {
            c.cu_k = cu_k;
        }
        check(c);
    }
}

/* A negative scale of scores goes with a softmax from the other end, and so may one of keys. */
static void test_options(void **state) {
    (void)state;
    static const uint64_t features[] = {HEDDLE_WINDOW, HEDDLE_ALIBI,   HEDDLE_BIAS,     HEDDLE_BOOL_MASK,
                                        HEDDLE_SINKS,  HEDDLE_WEIGHTS, HEDDLE_SEGMENTS, HEDDLE_BLOCKS};
    for (int few = 0; few < 2; few++)
        for (size_t x = 0; x < COUNT(features) + 3; x++) {
            attention_case c = e4m3_case(2, 4, 2, few ? 2 : 70, 150, 64);
            c.a.features |= x < COUNT(features) ? features[x] : 0;
            c.a.window_left = x == 0 ? 50 : 0;
            c.a.window_right = x == 0 ? 5 : 0;
            if (c.a.features & HEDDLE_BLOCKS)
                c.a.block_q = c.a.block_k = 64;
            c.a.softcap = x == COUNT(features) ? 3 : 0;
            c.a.dropout = x == COUNT(features) + 1 ? 0.3 : 0;
            c.a.scale = x > COUNT(features) + 1 ? -0.2 : 0;
            check(c);
            in_pages(&c, 16);
            c.hidden_pages = 0.3;
            check(c);
        }
}

/* d and dv that no kernel's width is, and more than tensor cores take; rows of bytes that no address is aligned to. */
static void test_wide(void **state) {
    (void)state;
    for (int few = 0; few < 2; few++) {
        attention_case c = e4m3_case(1, 2, 1, few ? 1 : 20, 77, 320);
        c.a.dv = 130;
        check(c);
        c.a.k_stride = (heddle_strides){77 * 333, 77 * 333, 333};
        c.a.v_stride = (heddle_strides){77 * 131, 77 * 131, 131};
        check(c);
    }
}

/* Without scales; all of them 0, where every key weighs the same and o is 0. */
static void test_scales(void **state) {
    (void)state;
    for (int few = 0; few < 2; few++) {
        attention_case c = e4m3_case(2, 2, 2, few ? 1 : 40, 70, 64);
        c.skip = UINT32_C(1) << T_K_SCALE | UINT32_C(1) << T_V_SCALE;
        check(c);
        c.skip = 0;
        attention_problem p = attention_new(&c);
        for (int64_t y = 0; y < c.a.b * c.a.hk; y++) {
            tensor_raw_set(&p.t[T_K_SCALE], y, 0);
            tensor_raw_set(&p.t[T_V_SCALE], y, 0);
        }
        tensor_upload(&p.t[T_K_SCALE]);
        tensor_upload(&p.t[T_V_SCALE]);
        attention_run(&p, HEDDLE_FORWARD);
        for (int64_t n = 0; n < c.a.b; n++)
            for (int64_t x = 0; x < c.a.h; x++)
                for (int64_t i = 0; i < c.a.sq; i++) {
                    assert_true(fabs(tensor_get(&p.t[T_LSE], n, x, i, 0) - log((double)c.a.sk)) < 1e-5);
                    for (int64_t e = 0; e < c.a.dv; e++)
                        assert_true(tensor_get(&p.t[T_O], n, x, i, e) == 0);
                }
        attention_free(&p);
    }
}

/* NaN among the bytes comes out; of a tile that a mask cuts, CUDA's kernels make a row of it. */
static void test_nan(void **state) {
    (void)state;
    const bool cuda = test_device() == HEDDLE_CUDA;
    for (int few = 0; few < 2; few++) {
        attention_case c = e4m3_case(1, 1, 1, few ? 1 : 40, 40, 64);
        attention_problem p = attention_new(&c);
        tensor_set(&p.t[T_V], 0, 0, 7, 3, (double)NAN);
        tensor_upload(&p.t[T_V]);
        attention_run(&p, HEDDLE_FORWARD);
        for (int64_t i = 0; i < c.a.sq; i++)
            for (int64_t e = 0; e < c.a.dv; e++)
                assert_true(isnan(tensor_get(&p.t[T_O], 0, 0, i, e)) == (e == 3) || (cuda && e != 3));
        attention_free(&p);
    }
}

/* Two calls that have the keys among them, the second of which adds to what the first has found, against one. */
static void test_parts(void **state) {
    (void)state;
    for (int few = 0; few < 2; few++) {
        attention_case c = e4m3_case(1, 2, 1, few ? 1 : 40, 300, 64);
        c.poison_masked = false;
        c.a.dtype = HEDDLE_F32;
        attention_problem all = attention_new(&c);
        c.a.features |= HEDDLE_ACCUMULATE;
        attention_problem p = attention_new(&c);
        attention_run(&all, HEDDLE_FORWARD);
        for (int64_t at = 0; at < p.t[T_O].span; at++)
            tensor_raw_set(&p.t[T_O], at, 0);
        for (int64_t at = 0; at < p.t[T_LSE].span; at++)
            tensor_raw_set(&p.t[T_LSE], at, -INFINITY);
        tensor_upload(&p.t[T_O]);
        tensor_upload(&p.t[T_LSE]);
        heddle_attention a = p.a;
        a.sk = 130;
        a.k_stride = (heddle_strides){0, 300 * 64, 64};
        a.v_stride = a.k_stride;
        for (int part = 0; part < 2; part++) {
            heddle_attention_data data = attention_data(&p, false);
            data.k = (const char *)data.k + (part ? 130 * 64 : 0);
            data.v = (const char *)data.v + (part ? 130 * 64 : 0);
            a.sk = part ? 170 : 130;
            size_t bytes;
            assert_int_equal(heddle_attention_workspace(&a, HEDDLE_FORWARD, &bytes), HEDDLE_OK);
            void *workspace = workspace_new(a.device, bytes);
            assert_int_equal(heddle_attention_forward(&a, &data, workspace, bytes, device_memory_stream()), HEDDLE_OK);
            tensor_download(&p.t[T_O]);
            tensor_download(&p.t[T_LSE]);
            workspace_free(a.device, workspace, bytes);
        }
        for (int64_t at = 0; at < p.t[T_O].span; at++)
            assert_true(fabs(tensor_raw(&p.t[T_O], at) - tensor_raw(&all.t[T_O], at)) < 1e-5);
        attention_free(&p);
        attention_free(&all);
    }
}

static void test_refusals(void **state) {
    (void)state;
    attention_case c = e4m3_case(2, 2, 1, 2, 40, 16);
    attention_problem p = attention_new(&c);
    size_t bytes;
    expect_status(heddle_attention_workspace(&p.a, HEDDLE_BACKWARD, &bytes), HEDDLE_UNSUPPORTED,
                  "HEDDLE_E4M3 has no backward");
    assert_int_equal(heddle_attention_supported(&p.a, NULL, 0), HEDDLE_OK);
    assert_int_equal(heddle_attention_workspace(&p.a, HEDDLE_FORWARD, &bytes), HEDDLE_OK);
    void *workspace = workspace_new(p.a.device, bytes), *stream = device_memory_stream();
    heddle_attention_data data = attention_data(&p, false);
    data.k_scale = (const char *)data.k_scale + 1;
    expect_status(heddle_attention_forward(&p.a, &data, workspace, bytes, stream), HEDDLE_MISALIGNED, "k_scale");
    data = attention_data(&p, false);
    data.v = NULL;
    expect_status(heddle_attention_forward(&p.a, &data, workspace, bytes, stream), HEDDLE_NULL_POINTER, "v is NULL");
    data = attention_data(&p, false);
    heddle_attention plain = p.a;
    plain.features = 0;
    expect_status(heddle_attention_forward(&plain, &data, workspace, ENOUGH, stream), HEDDLE_BAD_COMBINATION,
                  "k_scale is given, but HEDDLE_E4M3 is not set");
    workspace_free(p.a.device, workspace, bytes);
    attention_free(&p);
}

/* A structure that ends where it did before there were scales. */
static void test_older(void **state) {
    (void)state;
    attention_case c = attention_case_of(1, 2, 2, 5, 9, 16, 16);
    attention_problem p = attention_new(&c);
    heddle_attention_data data = attention_data(&p, false);
    size_t bytes;
    data.size = offsetof(heddle_attention_data, k_scale);
    assert_int_equal(heddle_attention_workspace(&p.a, HEDDLE_FORWARD, &bytes), HEDDLE_OK);
    void *workspace = workspace_new(p.a.device, bytes);
    assert_int_equal(heddle_attention_forward(&p.a, &data, workspace, bytes, device_memory_stream()), HEDDLE_OK);
    workspace_free(p.a.device, workspace, bytes);
    attention_free(&p);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conversion_of_floats),
        cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_conversion),
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_long_decode),
        cmocka_unit_test(test_prefill),
        cmocka_unit_test(test_collected),
        cmocka_unit_test(test_collected_packed),
        UNIT_TEST_OF_EACH_ISA(test_extreme_scales),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_wide),
        UNIT_TEST_OF_EACH_ISA(test_scales),
        UNIT_TEST_OF_EACH_ISA(test_nan),
        UNIT_TEST_OF_EACH_ISA(test_parts),
        UNIT_TEST_OF_EACH_ISA(test_refusals),
        UNIT_TEST_OF_EACH_ISA(test_older),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

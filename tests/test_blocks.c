/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_BLOCKS: lists of blocks of keys, of both sizes, of all heads or each, with numbers that are none; in both passes. */
#include "api.h"

static attention_case blocks_case(int64_t h, int64_t hk, int64_t sq, int64_t sk, int sizes, int of) {
    attention_case c = attention_case_of(2, h, hk, sq, sk, 32, 32);
    c.a.features = HEDDLE_BLOCKS;
    c.a.block_q = sizes & 1 ? 128 : 64;
    c.a.block_k = sizes & 2 ? 128 : 64;
    c.a.blocks_of_b = (uint8_t)(of & 1);
    c.a.blocks_of_h = (uint8_t)(of >> 1);
    c.poison_masked = true;
    return c;
}

static void test_sizes_and_lists(void **state) {
    (void)state;
    for (int x = 0; x < 8; x++) {
        attention_case c = blocks_case(2, x < 4 ? 2 : 1, 150, 270, x % 4, (x + x / 4) % 4);
        c.a.mask = (heddle_mask)(x % (LAST_MASK + 1));
        c.block_density = x % 2 ? 0.25 : 0.6;
        check_attention_dtypes(c);
    }
}

static void test_many_keys(void **state) {
    (void)state;
    attention_case c = blocks_case(2, 1, 200, 1500, 0, 2);
    c.a.d = c.a.dv = 64;
    c.block_density = 0.15;
    check_attention_dtypes(c);
}

static void test_few_queries(void **state) {
    (void)state;
    for (int of = 0; of < 4; of++) {
        attention_case c = blocks_case(4, 1, 1, 3000, of, of);
        c.a.features |= of % 2 ? HEDDLE_SINKS : 0;
        check_attention_dtypes(c);
    }
}

static void test_with_options(void **state) {
    (void)state;
    static const uint64_t features[] = {HEDDLE_WINDOW,    HEDDLE_ALIBI | HEDDLE_SEGMENTS, HEDDLE_BIAS,
                                        HEDDLE_BOOL_MASK, HEDDLE_SINKS | HEDDLE_WEIGHTS,  HEDDLE_SEQLENS};
    static const int32_t lengths[] = {150, 97};
    for (size_t x = 0; x < COUNT(features); x++) {
        attention_case c = blocks_case(4, 2, 150, 270, (int)x % 4, (int)x % 4);
        c.a.features |= features[x];
        c.a.window_left = features[x] & HEDDLE_WINDOW ? 90 : 0;
        c.a.window_right = features[x] & HEDDLE_WINDOW ? 30 : 0;
        c.a.dropout = x % 2 ? 0.25 : 0;
        c.len_q = c.len_k = features[x] & HEDDLE_SEQLENS ? lengths : NULL;
        check_attention_dtypes(c);
    }
}

static void test_packed_and_pages(void **state) {
    (void)state;
    static const int32_t cu_q[] = {2, 152, 190}, cu_k[] = {1, 201, 250};
    for (int pages = 0; pages < 2; pages++) {
        attention_case c = blocks_case(4, 2, 150, 200, pages, 3);
        c.a.features |= HEDDLE_VARLEN | (pages ? HEDDLE_PAGES : 0);
        c.a.total_q = 191;
        c.cu_q = cu_q;
        c.cu_k = pages ? NULL : cu_k;
        c.a.total_k = pages ? 0 : 252;
        c.a.page = pages ? 16 : 0;
        c.a.pages = pages ? 20 : 0;
        check_attention_dtypes(c);
    }
}

/* Lists keep the limit of a sequence's queries, of which there are none. */
static void test_packed_without_queries(void **state) {
    (void)state;
    static const int32_t cu_q[] = {0, 0, 0}, cu_k[] = {0, 7, 20};
    attention_case c = blocks_case(2, 1, 65, 29, 0, 3);
    c.a.features |= HEDDLE_VARLEN;
    c.a.total_k = 20;
    c.cu_q = cu_q;
    c.cu_k = cu_k;
    check_attention_dtypes(c);
}

static void test_nothing(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{0, 5, 7}, {2, 0, 7}, {2, 5, 0}, {2, 0, 0}, {1, 1, 1}};
    for (size_t x = 0; x < COUNT(sizes); x++) {
        attention_case c = blocks_case(2, 1, sizes[x][1], sizes[x][2], 0, 3);
        c.a.b = sizes[x][0];
        check_attention(&c);
    }
}

/* Without columns nothing is seen, whatever the rows say; an older structure has no lists. */
static void test_no_columns(void **state) {
    (void)state;
    attention_case c = blocks_case(1, 1, 70, 80, 0, 0);
    attention_problem p = attention_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    heddle_attention_data data = attention_data(&p, false);
    data.block_columns = NULL;
    assert_int_equal(heddle_attention_forward(&p.a, &data, workspace, ENOUGH, NULL), HEDDLE_OK);
    tensor_download(&p.t[T_O]);
    for (int64_t i = 0; i < 70; i++)
        assert_true(tensor_raw(&p.t[T_O], i * 32) == 0);
    data.size = offsetof(heddle_attention_data, block_rows);
    expect_status(heddle_attention_forward(&p.a, &data, workspace, ENOUGH, NULL), HEDDLE_NULL_POINTER, "block_rows");
    workspace_free(p.a.device, workspace, ENOUGH);
    attention_free(&p);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes_and_lists),  cmocka_unit_test(test_many_keys),
        cmocka_unit_test(test_few_queries),      cmocka_unit_test(test_with_options),
        cmocka_unit_test(test_packed_and_pages), cmocka_unit_test(test_nothing),
        UNIT_TEST_OF_EACH_ISA(test_no_columns),  cmocka_unit_test(test_packed_without_queries),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

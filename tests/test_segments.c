/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_SEGMENTS: documents in a row and ids in any order, beside every other option, in both passes. */
#include "api.h"

#include <math.h>
#include <stdio.h>

/* Self-attention of documents, and of whatever else the ids may be. */
static void test_ids_in_any_order(void **state) {
    (void)state;
    for (int kind = 1; kind <= 4; kind++)
        for (int causal = 0; causal < 2; causal++) {
            attention_case c = attention_case_of(2, 2, 2, 300, 300, 40, 40);
            c.a.features = HEDDLE_SEGMENTS;
            c.a.mask = causal ? HEDDLE_CAUSAL_TOP_LEFT : HEDDLE_MASK_NONE;
            c.segments = kind;
            c.poison_masked = true;
            c.first_part = kind % 2 ? 0 : 130;
            check_attention_dtypes(c);
        }
}

/* Few queries, whose keys are divided among tasks; queries that see nothing, with a sink and without. */
static void test_few_queries(void **state) {
    (void)state;
    for (int kind = 1; kind <= 4; kind++)
        for (int sinks = 0; sinks < 2; sinks++) {
            attention_case c = attention_case_of(2, 4, 1, 1 + sinks, 3000, 32, 24);
            c.a.features = HEDDLE_SEGMENTS | (sinks ? HEDDLE_SINKS : 0);
            c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
            c.segments = kind;
            c.poison_masked = true;
            check_attention_dtypes(c);
        }
}

/* Several chunks of keys, between which there are such that a tile does not see. */
static void test_many_keys(void **state) {
    (void)state;
    for (int kind = 1; kind <= 3; kind++) {
        attention_case c = attention_case_of(1, 2, 1, 400, 1500, 64, 64);
        c.a.features = HEDDLE_SEGMENTS;
        c.segments = kind;
        c.poison_masked = true;
        check_attention_dtypes(c);
    }
}

static void test_with_options(void **state) {
    (void)state;
    static const uint64_t features[] = {HEDDLE_WINDOW,
                                        HEDDLE_ALIBI,
                                        HEDDLE_BIAS,
                                        HEDDLE_BOOL_MASK,
                                        HEDDLE_SINKS | HEDDLE_WEIGHTS,
                                        HEDDLE_SEQLENS,
                                        HEDDLE_WINDOW | HEDDLE_ALIBI | HEDDLE_BIAS | HEDDLE_BOOL_MASK | HEDDLE_SINKS};
    static const int32_t lengths[] = {150, 0, 97};
    for (size_t x = 0; x < COUNT(features); x++) {
        attention_case c = attention_case_of(3, 4, 2, 150, 170, 24, 40);
        c.a.features = HEDDLE_SEGMENTS | features[x];
        c.a.window_left = features[x] & HEDDLE_WINDOW ? 40 : 0;
        c.a.window_right = features[x] & HEDDLE_WINDOW ? 3 : 0;
        c.a.mask = (heddle_mask)(x % (LAST_MASK + 1));
        c.a.dropout = x % 2 ? 0.25 : 0;
        c.a.softcap = x % 3 ? 0 : 5;
        c.len_q = c.len_k = features[x] & HEDDLE_SEQLENS ? lengths : NULL;
        c.segments = 1 + (int)(x % 3);
        c.poison_masked = true;
        check_attention_dtypes(c);
    }
}

/* Ids lie as packed rows do; those of keys in pages as a sequence's keys are numbered. */
static void test_packed_and_pages(void **state) {
    (void)state;
    static const int32_t cu_q[] = {2, 92, 92, 190}, cu_k[] = {1, 131, 140, 250};
    for (int kind = 1; kind <= 3; kind++)
        for (int pages = 0; pages < 3; pages++) {
            attention_case c = attention_case_of(3, 4, 2, 98, 130, 32, 32);
            c.a.features = HEDDLE_SEGMENTS | (pages < 2 ? HEDDLE_VARLEN : 0) | (pages ? HEDDLE_PAGES : 0);
            c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
            if (pages < 2) {
                c.a.total_q = 191;
                c.cu_q = cu_q;
            }
            if (pages == 0) {
                c.a.total_k = 252;
                c.cu_k = cu_k;
            } else {
                c.a.page = 16;
                c.a.pages = 20;
                c.hidden_pages = 0.1;
            }
            c.segments = kind;
            c.poison_masked = true;
            check_attention_dtypes(c);
        }
}

/* Bits of dropout and masks of a part are those of the whole, whose ids are the part's own. */
static void test_part(void **state) {
    (void)state;
    attention_case c = attention_case_of(2, 4, 2, 90, 140, 32, 32);
    c.a.features = HEDDLE_SEGMENTS;
    c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
    c.a.q_offset = 1000;
    c.a.k_offset = 930;
    c.a.dropout = 0.5;
    c.segments = 1;
    c.first_part = 61;
    check_attention_dtypes(c);
}

static void test_nothing(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{0, 5, 7}, {2, 0, 7}, {2, 5, 0}, {2, 0, 0}, {1, 1, 1}};
    for (size_t x = 0; x < COUNT(sizes); x++) {
        attention_case c = attention_case_of(sizes[x][0], 2, 1, sizes[x][1], sizes[x][2], 16, 16);
        c.a.features = HEDDLE_SEGMENTS;
        check_attention(&c);
    }
}

/* Documents by their ids and packed are one problem: the same o. */
static void test_like_packed(void **state) {
    (void)state;
    enum { DOCUMENTS = 4, ROWS = 331 };
    static const int32_t cu[DOCUMENTS + 1] = {0, 100, 101, 230, ROWS};
    attention_case c = attention_case_of(1, 2, 2, ROWS, ROWS, 32, 32);
    c.a.features = HEDDLE_SEGMENTS;
    c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
    attention_problem p = attention_new(&c);
    for (int n = 0; n < DOCUMENTS; n++)
        for (int64_t i = cu[n]; i < cu[n + 1]; i++) {
            tensor_set(&p.t[T_Q_SEGMENTS], 0, 0, 0, i, 7 - n);
            tensor_set(&p.t[T_K_SEGMENTS], 0, 0, 0, i, 7 - n);
        }
    tensor_upload(&p.t[T_Q_SEGMENTS]);
    tensor_upload(&p.t[T_K_SEGMENTS]);
    attention_run(&p, HEDDLE_FORWARD);
    attention_case packed = c;
    packed.a.features = HEDDLE_VARLEN;
    packed.a.b = DOCUMENTS;
    packed.a.total_q = packed.a.total_k = ROWS;
    packed.a.q_stride = packed.a.k_stride = packed.a.v_stride = packed.a.o_stride = (heddle_strides){0, ROWS * 32, 32};
    packed.cu_q = packed.cu_k = cu;
    attention_problem q = attention_new(&packed);
    for (int x = T_Q; x <= T_V; x++)
        for (int64_t h = 0; h < 2; h++)
            for (int64_t i = 0; i < ROWS; i++)
                for (int64_t e = 0; e < 32; e++)
                    tensor_set(&q.t[x], 0, h, i, e, tensor_get(&p.t[x], 0, h, i, e));
    for (int x = T_Q; x <= T_V; x++)
        tensor_upload(&q.t[x]);
    attention_run(&q, HEDDLE_FORWARD);
    for (int64_t h = 0; h < 2; h++)
        for (int64_t i = 0; i < ROWS; i++)
            for (int64_t e = 0; e < 32; e++)
                assert_true(fabs(tensor_get(&p.t[T_O], 0, h, i, e) - tensor_get(&q.t[T_O], 0, h, i, e)) < 2e-6);
    attention_free(&p);
    attention_free(&q);
}

/* A program that was built before there were segments has a structure that ends in front of them. */
static void test_older_structure(void **state) {
    (void)state;
    attention_case c = attention_case_of(1, 1, 1, 5, 6, 8, 8);
    attention_problem p = attention_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    heddle_attention_data data = attention_data(&p, false);
    data.q_segments = (const int32_t *)(const void *)"not to be looked at";
    expect_status(heddle_attention_forward(&p.a, &data, workspace, ENOUGH, NULL), HEDDLE_BAD_COMBINATION, "q_segments");
    data.size = offsetof(heddle_attention_data, q_segments);
    assert_int_equal(heddle_attention_forward(&p.a, &data, workspace, ENOUGH, NULL), HEDDLE_OK);
    p.a.features = HEDDLE_SEGMENTS;
    expect_status(heddle_attention_forward(&p.a, &data, workspace, ENOUGH, NULL), HEDDLE_NULL_POINTER, "q_segments");
    workspace_free(p.a.device, workspace, ENOUGH);
    attention_free(&p);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ids_in_any_order),
        cmocka_unit_test(test_few_queries),
        cmocka_unit_test(test_many_keys),
        cmocka_unit_test(test_with_options),
        cmocka_unit_test(test_packed_and_pages),
        cmocka_unit_test(test_part),
        cmocka_unit_test(test_nothing),
        UNIT_TEST_OF_EACH_ISA(test_like_packed),
        UNIT_TEST_OF_EACH_ISA(test_older_structure),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

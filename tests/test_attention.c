/* SPDX-License-Identifier: Apache-2.0
 * Attention, forward and backward, against the reference in three types: sizes, head dims, layouts, values. */
#include "common.h"

static void test_sizes(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 2, 3, 7, 31, 33, 65, 113, 129, 203};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (size_t y = 0; y < COUNT(sizes); y++) {
            attention_case c = attention_case_of(1, 2, 0, sizes[x], sizes[y], 16, 0);
            c.a.mask = (heddle_mask)((x + 2 * y) % 3);
            c.a.dtype = test_dtypes[(x + y) % 3];
            check_attention(&c);
        }
}

static void test_thousand(void **state) {
    (void)state;
    attention_case c = attention_case_of(1, 1, 0, 1023, 1023, 16, 0);
    check_attention(&c);
    c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
    c.a.dtype = HEDDLE_BF16;
    check_attention(&c);
    c = attention_case_of(1, 2, 1, 33, 1023, 64, 0);
    c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
    c.a.dtype = HEDDLE_F16;
    check_attention(&c);
    c = attention_case_of(1, 1, 1, 1023, 7, 32, 40);
    check_attention(&c);
}

static void test_head_dims(void **state) {
    (void)state;
    static const int64_t dims[] = {1, 2, 3, 8, 16, 31, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 511, 512};
    for (size_t x = 0; x < COUNT(dims); x++) {
        attention_case c = attention_case_of(1, 1, 0, 35, 41, dims[x], dims[x]);
        check_attention_dtypes(c);
        c.a.dv = dims[(x * 5 + 7) % COUNT(dims)];
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.a.dtype = test_dtypes[x % 3];
        check_attention(&c);
    }
    check_attention_dtypes(attention_case_of(1, 2, 0, 9, 70, 192, 128)); /* the head dims of latent attention */
}

/* Decoding and its neighbours: up to 16 rows of a group go another way than more of them, in steps of 4, 2 and 1, and the rows
 * of K and V are read 2 vectors, 1 and a part of one at a time. */
static void test_few_queries(void **state) {
    (void)state;
    static const int64_t heads[][3] = {{1, 1, 1}, {2, 1, 1}, {3, 1, 1}, {4, 1, 1},  {5, 1, 1}, {2, 2, 7},
                                       {8, 1, 1}, {4, 2, 4}, {3, 1, 3}, {1, 1, 15}, {4, 1, 4}, {17, 1, 1}};
    static const int64_t keys[] = {1, 37, 300, 131}, dims[][2] = {{64, 64}, {128, 128}, {72, 40}, {33, 16}, {8, 80}};
    for (size_t x = 0; x < COUNT(heads); x++)
        for (size_t y = 0; y < 3; y++) {
            const int64_t *d = dims[(x + y) % COUNT(dims)];
            attention_case c =
                attention_case_of(2, heads[x][0], heads[x][1], heads[x][2], keys[(x + y) % COUNT(keys)], d[0], d[1]);
            c.a.mask = (heddle_mask)(y % 3);
            c.poison_masked = true;
            check_attention_dtypes(c);
            c.a.features |= HEDDLE_BOOL_MASK | HEDDLE_SINKS | HEDDLE_WEIGHTS;
            c.mask_density = 0.5;
            c.a.softcap = y == 1 ? 5 : 0;
            c.a.dropout = y == 2 ? 0.2 : 0;
            c.a.dtype = test_dtypes[(x + y) % 3];
            check_attention(&c);
        }
}

/* Few queries against many keys: several tasks share a row, some of which see none of their keys. */
static void test_many_keys(void **state) {
    (void)state;
    attention_case c = attention_case_of(1, 4, 2, 1, 2500, 64, 0);
    c.a.dtype = HEDDLE_BF16;
    check_attention(&c);
    c = attention_case_of(2, 3, 1, 2, 2049, 40, 24);
    c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
    c.a.features = HEDDLE_SINKS | HEDDLE_WEIGHTS;
    check_attention(&c);
    c = attention_case_of(1, 2, 1, 3, 3100, 16, 0);
    c.a.dtype = HEDDLE_F16;
    c.a.features = HEDDLE_WINDOW | HEDDLE_BOOL_MASK;
    c.a.window_left = 1500;
    c.a.window_right = -1;
    c.mask_rows = true;
    c.poison_masked = true;
    check_attention(&c);
    static const int32_t lengths[] = {0, 900, 2300};
    c = attention_case_of(3, 2, 2, 1, 2300, 32, 0);
    c.a.features = HEDDLE_SEQLENS;
    c.len_k = lengths;
    check_attention(&c);
}

/* As test_many_keys, of all widths and types: shares of keys that end anywhere, a value that is not finite in the last of them, sequences
 * that leave some shares without keys, and rows of one group on both sides of a mask's edge. */
static void test_decode(void **state) {
    (void)state;
    static const int64_t shapes[][7] = {{1, 8, 2, 1, 1531, 128, 0},
                                        {2, 4, 1, 4, 770, 64, 0},
                                        {1, 6, 2, 5, 1029, 256, 0},
                                        {1, 16, 1, 1, 905, 120, 72},
                                        {1, 4, 2, 3, 2049, 33, 130}};
    static const int32_t lengths[] = {0, 701};
    for (size_t x = 0; x < COUNT(shapes); x++) {
        const int64_t *s = shapes[x];
        attention_case c = attention_case_of(s[0], s[1], s[2], s[3], s[4], s[5], s[6]);
        c.poison_masked = true;
        check_attention_dtypes(c);
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.a.features = HEDDLE_WINDOW | HEDDLE_SINKS;
        c.a.window_left = 600;
        check_attention_dtypes(c);
        c.a.features |= HEDDLE_ALIBI | HEDDLE_BOOL_MASK;
        c.mask_density = 0.7;
        c.a.dropout = x % 2 ? 0.1 : 0;
        c.a.dtype = test_dtypes[x % 3];
        check_attention(&c);
    }
    attention_case c = attention_case_of(2, 8, 2, 2, 1300, 128, 0);
    c.a.features = HEDDLE_SEQLENS;
    c.len_k = lengths;
    c.poison_masked = true;
    check_attention_dtypes(c);
    static const int32_t cu_q[] = {0, 1, 1, 4}, cu_k[] = {0, 1100, 1400, 1417};
    c = attention_case_of(3, 8, 2, 3, 1100, 128, 0);
    c.a.features = HEDDLE_VARLEN;
    c.a.total_q = 4;
    c.a.total_k = 1417;
    c.cu_q = cu_q;
    c.cu_k = cu_k;
    c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
    check_attention_dtypes(c);
}

/* Wide heads have few keys to a backward task: sums of dq go through several, and batch entries share their place. */
static void test_many_chunks(void **state) {
    (void)state;
    for (int x = 0; x < 9; x++) {
        attention_case c =
            x < 6 ? attention_case_of(3, 2, 1, 40, 290, 256, 256) : attention_case_of(1, 1, 1, 50, 200, 512, 300);
        c.a.mask = (heddle_mask)(x / 3 % 3);
        c.a.features = x % 2 ? HEDDLE_WINDOW : 0;
        c.a.window_left = x % 2 ? 90 : 0;
        c.a.window_right = x % 2 ? 70 : 0;
        c.a.dtype = test_dtypes[x % 3];
        c.poison_masked = true;
        check_attention(&c);
    }
}

static void test_scale(void **state) {
    (void)state;
    static const double scales[] = {1, 0.25, -0.5, 3, 1e-3};
    for (size_t x = 0; x < COUNT(scales); x++) {
        attention_case c = attention_case_of(2, 1, 0, 33, 31, 24, 0);
        c.a.scale = scales[x];
        check_attention_dtypes(c);
    }
}

static void test_grouped_heads(void **state) {
    (void)state;
    static const int64_t heads[][2] = {{4, 1}, {6, 2}, {6, 3}, {8, 8}, {5, 1}, {32, 4}};
    for (size_t x = 0; x < COUNT(heads); x++) {
        attention_case c = attention_case_of(2, heads[x][0], heads[x][1], 19, 34, 16, 24);
        c.a.mask = (heddle_mask)(x % 3);
        check_attention_dtypes(c);
    }
}

static void test_layouts(void **state) {
    (void)state;
    const int64_t b = 2, h = 4, hk = 2, sq = 23, sk = 39, d = 16;
    attention_case c = attention_case_of(b, h, hk, sq, sk, d, 0);
    heddle_strides bshd_q = {sq * h * d, d, h * d}, bshd_k = {sk * hk * d, d, hk * d};
    c.a.q_stride = c.a.o_stride = c.a.do_stride = c.a.dq_stride = bshd_q;
    c.a.k_stride = c.a.v_stride = c.a.dk_stride = c.a.dv_stride = bshd_k;
    check_attention_dtypes(c);
    c = attention_case_of(b, h, h, sq, sq, d, 0); /* rows of a packed [b, s, 3, h, d] */
    heddle_strides packed = {sq * 3 * h * d, d, 3 * h * d};
    c.a.q_stride = c.a.k_stride = c.a.v_stride = c.a.dq_stride = c.a.dk_stride = c.a.dv_stride = packed;
    check_attention_dtypes(c);
    c = attention_case_of(b, h, hk, sq, sk, d, 0); /* padded rows, each tensor differently */
    c.a.q_stride = (heddle_strides){h * sq * 17 + 5, sq * 17, 17};
    c.a.k_stride = (heddle_strides){hk * sk * 19, sk * 19, 19};
    c.a.v_stride = (heddle_strides){hk * sk * 33, sk * 33, 33};
    c.a.o_stride = (heddle_strides){h * sq * 24, sq * 24, 24};
    c.a.do_stride = (heddle_strides){h * sq * 21, sq * 21, 21};
    c.a.dq_stride = (heddle_strides){h * sq * 18 + 1, sq * 18, 18};
    c.a.dk_stride = (heddle_strides){20, b * 20, b * hk * 20};
    c.a.dv_stride = (heddle_strides){hk * sk * 16, 16, hk * 16};
    check_attention_dtypes(c);
    c = attention_case_of(3, h, hk, sq, sk, d, 0); /* one key/value set for all */
    c.a.k_stride = (heddle_strides){0, 0, d};
    c.a.v_stride = (heddle_strides){0, sk * d, d};
    check_attention_dtypes(c);
    c.a.k_stride = (heddle_strides){HEDDLE_BROADCAST, HEDDLE_BROADCAST, HEDDLE_BROADCAST};  /* and one key */
    c.a.do_stride = (heddle_strides){HEDDLE_BROADCAST, HEDDLE_BROADCAST, HEDDLE_BROADCAST}; /* as of a sum */
    check_attention_dtypes(c);
}

static void test_varlen(void **state) {
    (void)state;
    static const int32_t cu[][2][7] = {{{0, 5, 38, 38, 50, 51, 90}, {0, 7, 7, 20, 61, 62, 100}},
                                       {{0, 0, 0, 33, 33, 66, 66}, {0, 3, 40, 73, 73, 74, 74}},
                                       {{3, 9, 20, 30, 40, 41, 80}, {2, 13, 24, 25, 60, 90, 95}}};
    for (size_t x = 0; x < COUNT(cu); x++)
        for (heddle_mask mask = HEDDLE_MASK_NONE; (int)mask <= LAST_MASK; mask++) {
            attention_case c = attention_case_of(6, 4, 2, 41, 45, 16, 8);
            c.a.features = HEDDLE_VARLEN;
            c.a.total_q = 93; /* rows past the last sequence belong to none */
            c.a.total_k = 104;
            c.cu_q = cu[x][0];
            c.cu_k = cu[x][1];
            c.a.mask = mask;
            c.poison_masked = true;
            check_attention_dtypes(c);
            c.a.features |= HEDDLE_ALIBI | HEDDLE_SINKS | HEDDLE_WINDOW;
            c.a.window_left = 12;
            c.a.window_right = 6;
            c.a.q_stride = (heddle_strides){0, 93 * 20, 20};
            c.a.dk_stride = (heddle_strides){0, 16, 40};
            check_attention_dtypes(c);
        }
}

/* Queries are none at all, but a bias keeps the limit of their sequences, and gradients of keys are zero. */
static void test_varlen_without_queries(void **state) {
    (void)state;
    static const int32_t cu_q[] = {0, 0, 0}, cu_k[] = {0, 7, 20};
    attention_case c = attention_case_of(2, 2, 1, 65, 29, 64, 0);
    c.a.features = HEDDLE_VARLEN | HEDDLE_BIAS;
    c.a.total_k = 20;
    c.cu_q = cu_q;
    c.cu_k = cu_k;
    check_attention_dtypes(c);
}

static void test_varlen_square_tensors(void **state) {
    (void)state;
    static const int32_t cu_q[] = {0, 5, 5, 38}, cu_k[] = {0, 7, 20, 47};
    attention_case c = attention_case_of(3, 2, 1, 35, 29, 16, 0);
    c.a.features = HEDDLE_VARLEN | HEDDLE_BIAS | HEDDLE_BOOL_MASK | HEDDLE_WEIGHTS;
    c.a.total_q = 38;
    c.a.total_k = 47;
    c.cu_q = cu_q;
    c.cu_k = cu_k;
    c.poison_masked = true;
    check_attention_dtypes(c);
    c.a.dropout = 0.3;
    c.a.dbias_stride = (heddle_strides){0, 35 * 29, 29};
    check_attention_dtypes(c);
}

static void test_seqlens(void **state) {
    (void)state;
    static const int32_t len_q[] = {0, 17, 40, 1}, len_k[] = {30, 0, 51, 7};
    for (int which = 1; which < 4; which++)
        for (heddle_mask mask = HEDDLE_MASK_NONE; (int)mask <= LAST_MASK; mask++) {
            attention_case c = attention_case_of(4, 4, 2, 40, 51, 16, 0);
            c.a.features = HEDDLE_SEQLENS;
            c.len_q = which & 1 ? len_q : NULL;
            c.len_k = which & 2 ? len_k : NULL;
            c.a.mask = mask;
            c.poison_masked = true;
            check_attention_dtypes(c);
            c.a.features |= HEDDLE_WEIGHTS | HEDDLE_BIAS | HEDDLE_SINKS;
            check_attention_dtypes(c);
        }
    static const int32_t cu[] = {0, 20, 40, 51, 60}, lens[] = {7, 20, 0, 30};
    attention_case c = attention_case_of(4, 2, 1, 20, 20, 16, 0); /* a packed cache that is not full */
    c.a.features = HEDDLE_SEQLENS | HEDDLE_VARLEN;
    c.a.total_q = c.a.total_k = 60;
    c.cu_q = c.cu_k = cu;
    c.len_k = lens;
    c.poison_masked = true;
    check_attention_dtypes(c);
    c.len_q = lens;
    check_attention_dtypes(c);
}

static void test_large_values(void **state) {
    (void)state;
    attention_case c = attention_case_of(1, 2, 0, 32, 32, 64, 0);
    c.same_input = true;
    c.q_magnitude = 1000;
    c.ill_conditioned = true;
    check_attention_dtypes(c);
    c.same_input = false;
    c.q_magnitude = 0;
    c.v_magnitude = 1000;
    check_attention_dtypes(c);
    c.v_magnitude = 0;
    c.q_magnitude = 1000; /* logits of thousands, the largest far ahead */
    check_attention_dtypes(c);
    c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
    check_attention_dtypes(c);
    c.q_magnitude = 1e-3;
    c.ill_conditioned = false;
    check_attention_dtypes(c);
    for (int mask = 0; mask <= LAST_MASK; mask++) { /* few keys share a row: both passes must round the scores alike */
        c = attention_case_of(2, 2, 1, 140, 260, 128, mask == 1 ? 3 : 0);
        c.q_magnitude = c.k_magnitude = 3;
        c.ill_conditioned = true;
        c.a.mask = (heddle_mask)mask;
        for (c.seed = 4114; c.seed < 4122; c.seed++)
            check_attention(&c);
    }
}

/* A textbook's float32 finds P = exp(S - lse) next to exactly where few keys are seen: nobody else may lose much then. */
static void test_few_keys(void **state) {
    (void)state;
    static const int sq[] = {1, 7, 64, 3, 97, 31, 2}, sk[] = {1, 3, 2, 16, 33}, d[] = {96, 128, 64, 80};
    for (int x = 0; x < 240; x++) {
        attention_case c = attention_case_of(1 + x % 3, 4, x % 2 ? 4 : 2, sq[x % 7], sk[x % 5], d[x % 4], d[x % 4]);
        c.q_magnitude = 1 + x % 3;
        c.k_magnitude = 2;
        c.a.mask = (heddle_mask)(x % 3);
        c.a.features = x % 5 == 4 ? HEDDLE_WEIGHTS : 0;
        if (x % 4 == 3) {
            c.a.features |= HEDDLE_WINDOW;
            c.a.window_left = x % 8 / 4;
            c.a.sk += 100;
        }
        c.seed = (uint64_t)x + 1;
        check_attention(&c);
    }
}

/* TF32 where it is asked for: on a GPU with an error like TF32's, on a CPU without. */
static void test_tf32(void **state) {
    (void)state;
    static const int64_t dims[][2] = {{64, 64}, {128, 128}, {40, 72}, {256, 200}, {300, 20}};
    for (size_t x = 0; x < COUNT(dims); x++) {
        attention_case c = attention_case_of(2, 4, 2, 129, 200, dims[x][0], dims[x][1]);
        c.a.features = HEDDLE_TF32;
        c.a.mask = (heddle_mask)(x % 3);
        check_attention(&c);
        c.a.features |= HEDDLE_SINKS | HEDDLE_DETERMINISTIC;
        c.a.softcap = 20;
        check_attention(&c);
    }
    attention_case c = attention_case_of(1, 8, 2, 1, 700, 128, 0);
    c.a.features = HEDDLE_TF32;
    check_attention(&c);
}

/* Maxima that grow from one block of keys to the next, by a little and by more than exp2 reaches. */
static void test_growing_maximum(void **state) {
    (void)state;
    static const double magnitudes[] = {2, 8, 40, 1000};
    for (size_t x = 0; x < COUNT(magnitudes); x++)
        for (int64_t sq = 3; sq < 60; sq += 50) {
            attention_case c = attention_case_of(1, 1, 0, sq, 1200, 16, 0);
            c.q_magnitude = magnitudes[x];
            c.ill_conditioned = magnitudes[x] > 10;
            check_attention_dtypes(c);
        }
}

static void test_empty(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{0, 4, 4}, {2, 0, 4}, {2, 4, 0}, {2, 0, 0}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (int sinks = 0; sinks < 2; sinks++) {
            attention_case c = attention_case_of(sizes[x][0], 2, 1, sizes[x][1], sizes[x][2], 8, 0);
            c.a.features = HEDDLE_BIAS | (sinks ? HEDDLE_SINKS : 0);
            c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
            check_attention_dtypes(c);
        }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_thousand),
        cmocka_unit_test(test_head_dims),
        cmocka_unit_test(test_few_queries),
        cmocka_unit_test(test_many_keys),
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_many_chunks),
        cmocka_unit_test(test_scale),
        cmocka_unit_test(test_grouped_heads),
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_varlen),
        cmocka_unit_test(test_varlen_without_queries),
        cmocka_unit_test(test_varlen_square_tensors),
        cmocka_unit_test(test_seqlens),
        cmocka_unit_test(test_large_values),
        cmocka_unit_test(test_tf32),
        cmocka_unit_test(test_growing_maximum),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_few_keys),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

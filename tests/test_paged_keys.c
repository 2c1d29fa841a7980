/* SPDX-License-Identifier: Apache-2.0
 * Keys and values in pages. The tests' tables have shared pages, hidden ones and garbage behind the last key; what no query sees, unused
 * pages too, is NaN (tests/common_attention.c). */
#include "api.h"

#include <math.h>
#include <string.h>

static attention_case paged_case(int64_t page, int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d) {
    attention_case c = attention_case_of(b, h, hk, sq, sk, d, d);
    c.a.features = HEDDLE_PAGES;
    c.a.page = page;
    c.a.pages = b * ((sk + page - 1) / page);
    c.poison_masked = true;
    c.seed += (uint64_t)page;
    return c;
}

/* Rows of a page side by side, as [pages, page, hk, d]. */
static void row_by_row(attention_case *c) {
    heddle_attention *a = &c->a;
    a->k_stride = (heddle_strides){a->page * a->hk * a->d, a->d, a->hk * a->d};
    a->v_stride = (heddle_strides){a->page * a->hk * a->dv, a->dv, a->hk * a->dv};
}

static void test_decode(void **state) {
    (void)state;
    static const int32_t len_k[] = {1, 203, 0, 130};
    for (int64_t page = 16; page <= 256; page *= 2)
        for (int x = 0; x < 4; x++) {
            attention_case c = paged_case(page, 4, 8, 2, x & 1 ? 1 : 3, 203, x & 2 ? 64 : 40);
            c.a.features |= HEDDLE_SEQLENS;
            c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
            c.len_k = len_k;
            c.hidden_pages = x & 1 ? 0.2 : 0;
            if (x & 2)
                row_by_row(&c);
            check_attention_dtypes(c);
        }
}

/* Many keys, which several blocks share. */
static void test_long_decode(void **state) {
    (void)state;
    for (int hidden = 0; hidden < 2; hidden++) {
        attention_case c = paged_case(hidden ? 64 : 16, 2, 4, 1, 1, 4100, 128);
        c.hidden_pages = hidden ? 0.3 : 0;
        row_by_row(&c);
        check_attention_dtypes(c);
    }
}

/* A chunk of a prompt: its queries are the last. */
static void test_prefill(void **state) {
    (void)state;
    static const int32_t len_k[] = {300, 161};
    static const int64_t dims[] = {33, 64, 128, 192};
    for (int64_t page = 16; page <= 256; page *= 4)
        for (size_t x = 0; x < COUNT(dims); x++) {
            attention_case c = paged_case(page, 2, 4, 2, x == 2 ? 150 : 37, 300, dims[x]);
            c.a.features |= HEDDLE_SEQLENS;
            c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
            c.a.table = x % 2 ? 0 : (300 + page - 1) / page + 3;
            c.len_k = len_k;
            c.hidden_pages = x == 1 ? 0.2 : 0;
            if (x % 2)
                row_by_row(&c);
            check_attention_dtypes(c);
        }
}

/* More queries, and more keys than two tiles have: what Hopper's own kernels take. Bands that begin and end within a page. */
static void test_chunks(void **state) {
    (void)state;
    static const int32_t len_k[] = {430, 290};
    static const int64_t dims[] = {64, 128, 200};
    for (int x = 0; x < 6; x++) {
        attention_case c = paged_case(INT64_C(16) << x % 5, 2, 2, 1, x % 2 ? 130 : 70, 430, dims[x % 3]);
        c.a.features |= HEDDLE_SEQLENS | (x == 2 ? HEDDLE_SINKS : 0) | (x > 2 ? HEDDLE_WINDOW : 0);
        c.a.mask = x == 1 ? HEDDLE_MASK_NONE : HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.a.window_left = x > 2 ? 40 + 55 * x : 0;
        c.a.window_right = x > 2 ? -1 : 0;
        c.len_k = len_k;
        c.hidden_pages = x % 2 ? 0.3 : 0;
        if (x < 3)
            row_by_row(&c);
        check_attention_dtypes(c);
    }
}

/* The same under a softcap, ALiBi, and both, of every width. */
static void test_capped_chunks(void **state) {
    (void)state;
    static const int32_t len_k[] = {430, 290};
    static const int64_t dims[] = {64, 128, 200};
    for (int x = 0; x < 9; x++) {
        const int options = x / 3 + 1;
        attention_case c = paged_case(INT64_C(16) << x % 5, 2, 4, 2, x % 2 ? 130 : 70, 430, dims[x % 3]);
        c.a.features |=
            (options & 2 ? HEDDLE_ALIBI : 0) | (x % 2 ? HEDDLE_SEQLENS : 0) | (x % 4 == 3 ? HEDDLE_SINKS : 0);
        c.a.softcap = options & 1 ? 3 : 0;
        c.a.mask = x == 4 ? HEDDLE_MASK_NONE : HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.len_k = x % 2 ? len_k : NULL;
        c.hidden_pages = x % 3 == 1 ? 0 : 0.3;
        if (x % 4 < 2)
            row_by_row(&c);
        check_attention_dtypes(c);
    }
}

static void test_packed_queries(void **state) {
    (void)state;
    static const int32_t cu_q[] = {1, 8, 8, 70, 71}, len_k[] = {90, 40, 75, 0};
    for (int64_t page = 16; page <= 64; page *= 2) {
        attention_case c = paged_case(page, 4, 4, 2, 64, 90, 64);
        c.a.features |= HEDDLE_VARLEN | HEDDLE_SEQLENS;
        c.a.total_q = 73;
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.cu_q = cu_q;
        c.len_k = len_k;
        c.hidden_pages = page == 32 ? 0.2 : 0;
        check_attention_dtypes(c);
        c.a.features &= ~HEDDLE_SEQLENS; /* all of sk */
        c.len_k = NULL;
        check_attention_dtypes(c);
    }
}

static void test_options(void **state) {
    (void)state;
    static const uint64_t features[] = {HEDDLE_WINDOW,    HEDDLE_ALIBI, HEDDLE_BIAS,
                                        HEDDLE_BOOL_MASK, HEDDLE_SINKS, HEDDLE_WEIGHTS};
    for (int few = 0; few < 2; few++)
        for (size_t x = 0; x < COUNT(features) + 2; x++) {
            attention_case c = paged_case(16, 2, 4, 2, few ? 2 : 70, 150, 64);
            c.a.features |= x < COUNT(features) ? features[x] : 0;
            c.a.window_left = x == 0 ? 50 : 0;
            c.a.window_right = x == 0 ? 5 : 0;
            c.a.softcap = x == COUNT(features) ? 3 : 0;
            c.a.dropout = x > COUNT(features) ? 0.3 : 0;
            c.hidden_pages = 0.3;
            check_attention_dtypes(c);
        }
}

/* The bias and the mask that differ, and for whom, by the bits of `which`: batches, heads, queries. */
static heddle_strides alike(const heddle_attention *a, int which) {
    const int64_t row = which & 1 ? a->sk + 5 : 0, head = which & 2 ? (row ? a->sq * row : a->sk) : 0,
                  batch = which & 4 ? a->h * a->sq * (a->sk + 5) : 0;
    return which ? (heddle_strides){batch, head, row}
                 : (heddle_strides){HEDDLE_BROADCAST, HEDDLE_BROADCAST, HEDDLE_BROADCAST};
}

/* Of these options Hopper has no kernel for pages, so that keys are collected first: every mask's broadcast, rows of bias that the copy engine
 * can fetch and that it cannot, dropout, several of them, what adds to o, the weights, segments and lists. */
static void test_collected(void **state) {
    (void)state;
    static const int32_t len_k[] = {330, 0, 131};
    static const int64_t dims[] = {64, 80, 128, 160, 256};
    static const uint64_t options[] = {HEDDLE_BOOL_MASK, HEDDLE_BIAS,    0,
                                       HEDDLE_ALIBI,     HEDDLE_WEIGHTS, HEDDLE_BOOL_MASK | HEDDLE_BIAS,
                                       HEDDLE_SEGMENTS,  HEDDLE_BLOCKS,  HEDDLE_SEGMENTS | HEDDLE_BOOL_MASK};
    for (int x = 0; x < 45; x++) {
        const uint64_t of = options[x % 9];
        const int which = x / 2 % 8;
        attention_case c = paged_case(INT64_C(16) << x % 5, 3, 4, x % 4 ? 2 : 4, x % 3 ? 70 : 150, 330, dims[x / 9]);
        c.seed += (uint64_t)x;
        c.a.dtype = x % 2 ? HEDDLE_F16 : HEDDLE_BF16;
        c.a.features |=
            of | (x % 3 == 1 ? HEDDLE_SEQLENS : 0) | (x % 5 == 1 ? HEDDLE_SINKS : 0) | (x % 7 == 3 ? HEDDLE_WINDOW : 0);
        c.a.window_left = c.a.features & HEDDLE_WINDOW ? 120 : 0;
        c.a.mask = x % 4 == 1 ? HEDDLE_MASK_NONE : HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.len_k = x % 3 == 1 ? len_k : NULL;
        c.a.dropout = x % 9 == 2 || x % 9 == 3 || x == 23 ? 0.3 : 0;
        c.a.softcap = x % 9 == 5 ? 3 : 0;
        c.a.scale = x == 41 ? -0.2 : 0;
        if (of & HEDDLE_BLOCKS)
            c.a.block_q = c.a.block_k = 64;
        if (of & HEDDLE_BOOL_MASK)
            c.a.bool_mask_stride = alike(&c.a, which);
        if (of & HEDDLE_BIAS && x % 2)
            c.a.bias_stride = alike(&c.a, which);
        else if (of & HEDDLE_BIAS)
            c.a.bias_stride = (heddle_strides){0, 150 * 336, 336};
        c.hidden_pages = x % 6 == 5 ? 0 : 0.3;
        if (x % 3)
            row_by_row(&c);
        check_attention(&c);
    }
}

/* The same with packed queries, of which some sequences have none. */
static void test_collected_packed(void **state) {
    (void)state;
    static const int32_t cu_q[] = {1, 71, 71, 160, 161}, len_k[] = {190, 40, 175, 0};
    static const uint64_t options[] = {HEDDLE_BOOL_MASK, HEDDLE_BIAS, HEDDLE_SEGMENTS, 0, HEDDLE_WEIGHTS};
    for (int x = 0; x < 10; x++) {
        attention_case c = paged_case(INT64_C(16) << x % 3, 4, 4, 2, 89, 190, x % 3 ? 64 : 128);
        c.a.dtype = x % 2 ? HEDDLE_F16 : HEDDLE_BF16;
        c.a.features |= HEDDLE_VARLEN | options[x % 5] | (x > 4 ? HEDDLE_SEQLENS : 0);
        c.a.dropout = x % 5 == 3 ? 0.2 : 0;
        c.a.total_q = 163;
        c.a.mask = x % 4 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        c.cu_q = cu_q;
        c.len_k = x > 4 ? len_k : NULL;
        c.hidden_pages = x % 2 ? 0.3 : 0;
        check_attention(&c);
    }
}

/* d and dv that no kernel's width is, and more than tensor cores take. */
static void test_wide(void **state) {
    (void)state;
    for (int few = 0; few < 2; few++) {
        attention_case c = paged_case(32, 1, 2, 1, few ? 1 : 20, 77, 320);
        c.a.dv = 130;
        c.hidden_pages = 0.3;
        check_attention_dtypes(c);
    }
}

/* No page at all; no key. */
static void test_nothing(void **state) {
    (void)state;
    attention_case c = paged_case(16, 2, 2, 2, 5, 40, 16);
    c.a.pages = 0;
    check_attention_dtypes(c);
    c = paged_case(16, 2, 2, 2, 5, 0, 16);
    check_attention_dtypes(c);
    c.a.table = 3;
    check_attention_dtypes(c);
}

/* The same keys without pages, from those of a problem in pages without hidden ones. */
static attention_problem without_pages(const attention_problem *p, uint64_t seed) {
    attention_problem q;
    attention_case c = {.a = p->a, .seed = seed}; /* the seed says how memory is aligned */
    c.a.features &= ~HEDDLE_PAGES;
    c.a.page = c.a.pages = c.a.table = 0;
    c.a.k_stride = c.a.v_stride = (heddle_strides){0};
    q = attention_new(&c);
    tensor_convert(&q.t[T_Q], &p->t[T_Q]);
    for (int t = T_K; t <= T_V; t++)
        for (int64_t n = 0; n < p->a.b; n++)
            for (int64_t x = 0; x < p->a.hk; x++)
                for (int64_t j = 0; j < p->a.sk; j++)
                    for (int64_t e = 0; e < p->t[t].dim[3]; e++)
                        tensor_set(&q.t[t], n, x, j, e,
                                   tensor_get(&p->t[t], attention_page(p, n, j), x, j % p->a.page, e));
    for (int t = 0; t < T_COUNT; t++)
        tensor_upload(&q.t[t]);
    return q;
}

/* On the CPU pages change no bit. */
static void test_bits(void **state) {
    (void)state;
    if (test_device() != HEDDLE_CPU)
        skip();
    for (int64_t page = 16; page <= 256; page *= 2)
        for (int x = 0; x < 2 * TEST_DTYPES; x++) {
            attention_case c = paged_case(page, 2, 4, 2, x % 2 ? 2 : 40, 333, 64);
            c.a.dtype = test_dtypes[x / 2];
            c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
            if (page % 64)
                row_by_row(&c);
            attention_problem p = attention_new(&c), q = without_pages(&p, c.seed);
            attention_run(&p, HEDDLE_FORWARD);
            attention_run(&q, HEDDLE_FORWARD);
            for (int t = T_O; t <= T_LSE; t++)
                for (int64_t at = 0; at < p.t[t].span; at++)
                    assert_true(tensor_raw(&p.t[t], at) == tensor_raw(&q.t[t], at));
            attention_free(&p);
            attention_free(&q);
        }
}

/* HEDDLE_ACCUMULATE: the second half of the keys joins what the first has left. */
static void accumulate(heddle_dtype dtype, int64_t sq, double tolerance) {
    attention_case c = paged_case(16, 1, 4, 2, sq, 128, 64);
    c.a.dtype = dtype;
    attention_problem p = attention_new(&c), sum;
    c.a.features |= HEDDLE_ACCUMULATE;
    c.a.sk = 64;
    c.a.table = 8;
    sum = attention_new(&c);
    tensor_free(&sum.t[T_O]);
    sum.t[T_O] = tensor_new(sum.a.device, HEDDLE_F32, p.t[T_O].dim, p.t[T_O].stride, false);
    tensor_upload(&sum.t[T_O]);
    for (int t = T_Q; t <= T_V; t++)
        tensor_convert(&sum.t[t], &p.t[t]);
    attention_run(&p, HEDDLE_FORWARD);
    for (int64_t at = 0; at < sum.t[T_LSE].span; at++)
        tensor_raw_set(&sum.t[T_LSE], at, -INFINITY);
    tensor_upload(&sum.t[T_LSE]);
    for (int part = 0; part < 2; part++) {
        for (int64_t x = 0; x < 8; x++)
            tensor_set(&sum.t[T_TABLE], 0, 0, 0, x, tensor_get(&p.t[T_TABLE], 0, 0, 0, (x + 4 * part) % 8));
        for (int t = 0; t < T_COUNT; t++)
            if (t != T_O && t != T_LSE)
                tensor_upload(&sum.t[t]);
        attention_run(&sum, HEDDLE_FORWARD);
    }
    for (int64_t at = 0; at < p.t[T_O].span; at++)
        assert_true(fabs(tensor_raw(&p.t[T_O], at) - tensor_raw(&sum.t[T_O], at)) < tolerance);
    for (int64_t at = 0; at < p.t[T_LSE].span; at++)
        assert_true(fabs(tensor_raw(&p.t[T_LSE], at) - tensor_raw(&sum.t[T_LSE], at)) < 1e-5);
    attention_free(&p);
    attention_free(&sum);
}

static void test_accumulate(void **state) {
    (void)state;
    accumulate(HEDDLE_F32, 2, 1e-5);
    accumulate(HEDDLE_F32, 40, 1e-5);
    accumulate(HEDDLE_BF16, 70, 2e-2);
    accumulate(HEDDLE_F16, 130, 3e-3);
}

static void refuse(const heddle_attention *a, heddle_status expected, const char *part) {
    size_t bytes;
    expect_status(heddle_attention_supported(a, NULL, 0), expected, part);
    expect_status(heddle_attention_workspace(a, HEDDLE_FORWARD, &bytes), expected, part);
}

#define REFUSE(change, status, part)                                                                                   \
    do {                                                                                                               \
        attention_case c_ = paged_case(32, 2, 4, 2, 5, 70, 16);                                                        \
        heddle_attention *a = &c_.a;                                                                                   \
        change;                                                                                                        \
        refuse(a, status, part);                                                                                       \
    } while (0)

static void test_refused(void **state) {
    (void)state;
    REFUSE(a->page = 0, HEDDLE_BAD_SIZE, "page = 0 is not 16, 32, 64, 128 or 256");
    REFUSE(a->page = 8, HEDDLE_BAD_SIZE, "page = 8");
    REFUSE(a->page = 48, HEDDLE_BAD_SIZE, "page = 48");
    REFUSE(a->page = 512, HEDDLE_BAD_SIZE, "page = 512");
    REFUSE(a->page = -16, HEDDLE_BAD_SIZE, "page = -16");
    REFUSE(a->pages = -1, HEDDLE_BAD_SIZE, "pages = -1");
    REFUSE(a->pages = INT64_C(1) << 31, HEDDLE_BAD_SIZE, "pages = 2147483648");
    REFUSE(a->table = -1, HEDDLE_BAD_SIZE, "table = -1");
    REFUSE(a->table = 2, HEDDLE_BAD_SIZE, "table = 2: sk = 70 keys in pages of 32 need 3");
    REFUSE(a->k_stride.s = -1, HEDDLE_BAD_STRIDE, "k_stride.s = -1");
    REFUSE((a->b = INT64_C(1) << 40, a->sk = 1, a->table = INT64_C(1) << 40), HEDDLE_OVERFLOW, "block_table");
    REFUSE((a->features |= HEDDLE_VARLEN, a->total_q = 5, a->total_k = 9), HEDDLE_BAD_COMBINATION, "total_k = 9");
    REFUSE(a->features = 0, HEDDLE_BAD_COMBINATION, "page = 32, pages = 6, table = 0, but HEDDLE_PAGES is not set");
}

static void test_pointers(void **state) {
    (void)state;
    static const int32_t cu_q[] = {0, 2, 5}, len_k[] = {7, 70};
    attention_case c = paged_case(32, 2, 4, 2, 5, 70, 16);
    c.a.features |= HEDDLE_VARLEN | HEDDLE_SEQLENS;
    c.a.total_q = 5;
    c.cu_q = cu_q;
    c.len_k = len_k;
    attention_problem p = attention_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    heddle_attention_data data = attention_data(&p, false), other = data;
    other.block_table = NULL;
    expect_status(heddle_attention_forward(&p.a, &other, workspace, ENOUGH, NULL), HEDDLE_NULL_POINTER, "block_table");
    other = data;
    other.block_table = (const int32_t *)(const void *)((const char *)data.block_table + 1);
    expect_status(heddle_attention_forward(&p.a, &other, workspace, ENOUGH, NULL), HEDDLE_MISALIGNED, "block_table");
    other = data;
    other.cu_seqlens_k = data.cu_seqlens_q;
    expect_status(heddle_attention_forward(&p.a, &other, workspace, ENOUGH, NULL), HEDDLE_BAD_COMBINATION,
                  "cu_seqlens_k is given, but with HEDDLE_PAGES");
    expect_status(heddle_attention_backward(&p.a, &data, workspace, ENOUGH, NULL), HEDDLE_UNSUPPORTED,
                  "HEDDLE_PAGES has no backward");
    heddle_attention a = p.a; /* a table without its bit */
    a.features &= ~(HEDDLE_PAGES | HEDDLE_VARLEN);
    a.page = a.pages = a.table = a.total_q = 0;
    other = data;
    other.cu_seqlens_q = NULL;
    expect_status(heddle_attention_forward(&a, &other, workspace, ENOUGH, NULL), HEDDLE_BAD_COMBINATION, "block_table");
    /* A program that was built before there were pages. */
    other.block_table = (const int32_t *)(const void *)"not to be looked at";
    other.size = offsetof(heddle_attention_data, block_table);
    a.size = offsetof(heddle_attention, page);
    a.features = HEDDLE_SEQLENS;
    a.b = 1;
    a.sq = 1;
    a.sk = 16;
    expect_status(heddle_attention_forward(&a, &other, workspace, ENOUGH, NULL), HEDDLE_OK, "");
    workspace_free(p.a.device, workspace, ENOUGH);
    attention_free(&p);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode),           cmocka_unit_test(test_long_decode),
        cmocka_unit_test(test_prefill),          cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_capped_chunks),    cmocka_unit_test(test_packed_queries),
        cmocka_unit_test(test_options),          cmocka_unit_test(test_wide),
        cmocka_unit_test(test_nothing),          UNIT_TEST_OF_EACH_ISA(test_bits),
        UNIT_TEST_OF_EACH_ISA(test_accumulate),  UNIT_TEST_OF_EACH_ISA(test_refused),
        UNIT_TEST_OF_EACH_ISA(test_pointers),    cmocka_unit_test(test_collected),
        cmocka_unit_test(test_collected_packed),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

/* SPDX-License-Identifier: Apache-2.0
 * Tensors of more than 2^31 elements through attention, both passes: some 35 GB in 16-bit types, 70 GB in float32; what does
 * not fit is left out. A narrow window keeps the work small. */
#define _POSIX_C_SOURCE 200809L
#include "../../tools/device_memory.h"
#include "common.h"

#include "dtype.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 64, TAIL = 640, SURE = 400, WINDOW = 100 }; /* SURE rows of TAIL see all that they see in the whole */
static const int64_t long_rows = (INT64_C(1) << 25) + TAIL;

enum { Q, K, V, DOUT, O, DQ, DK, DV, TENSORS };

typedef struct sequence {
    heddle_attention a;
    int64_t rows;
    size_t width; /* bytes of a row */
    unsigned char *t[TENSORS], *lse, *slopes, *workspace;
} sequence;

/* Inputs are zeros, and what is to be written is NaN before. */
static unsigned char *filled(size_t bytes, unsigned char value) {
    unsigned char *p = device_memory_new(bytes);
    int (*set)(uint64_t, unsigned char, size_t) = NULL;
    void *found = device_memory_driver("cuMemsetD8_v2");
    memcpy(&set, &found, sizeof set);
    assert_non_null(found);
    if (p)
        assert_int_equal(set((uintptr_t)p, value, bytes), 0);
    return p;
}

static void sequence_free(sequence *s) {
    for (int x = 0; x < TENSORS; x++)
        device_memory_free(s->t[x]);
    device_memory_free(s->lse);
    device_memory_free(s->slopes);
    device_memory_free(s->workspace);
}

/* False when it does not fit. */
static bool sequence_new(sequence *s, heddle_dtype dtype, uint64_t features, int64_t rows) {
    *s = (sequence){
        .a = attention_desc(dtype, 1, 1, 1, rows, rows, D, D), .rows = rows, .width = D * element_size((int)dtype)};
    s->a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
    s->a.features = features | HEDDLE_WINDOW;
    s->a.window_left = WINDOW;
    s->a.window_right = -1;
    size_t most = 0;
    for (int pass = 0; pass < 2; pass++) {
        size_t bytes;
        assert_int_equal(heddle_attention_workspace(&s->a, (heddle_pass)pass, &bytes), HEDDLE_OK);
        most = bytes > most ? bytes : most;
    }
    bool fits =
        (s->workspace = filled(most, 0xff)) && (s->lse = filled((size_t)rows * 4, 0xff)) && (s->slopes = filled(4, 0));
    for (int x = 0; x < TENSORS; x++)
        fits = fits && (s->t[x] = filled((size_t)rows * s->width, x < O ? 0 : 0xff));
    return fits;
}

static void sequence_run(const sequence *s) {
    heddle_attention_data t = {.size = sizeof t, .q = s->t[Q], .k = s->t[K], .v = s->t[V], .o = s->t[O], .lse = s->lse};
    if (s->a.features & HEDDLE_ALIBI)
        t.alibi_slopes = (const void *)s->slopes;
    size_t bytes[2];
    for (int pass = 0; pass < 2; pass++)
        assert_int_equal(heddle_attention_workspace(&s->a, (heddle_pass)pass, &bytes[pass]), HEDDLE_OK);
    assert_int_equal(heddle_attention_forward(&s->a, &t, s->workspace, bytes[0], NULL), HEDDLE_OK);
    t.dout = s->t[DOUT];
    t.dq = s->t[DQ];
    t.dk = s->t[DK];
    t.dv = s->t[DV];
    assert_int_equal(heddle_attention_backward(&s->a, &t, s->workspace, bytes[1], NULL), HEDDLE_OK);
    assert_true(device_memory_wait());
}

static double value(heddle_dtype dtype, const unsigned char *p, size_t at) {
    uint16_t half;
    float x = 0;
    memcpy(&half, p + at * 2, 2);
    if (dtype == HEDDLE_F32)
        memcpy(&x, p + at * 4, 4);
    return dtype == HEDDLE_F32 ? (double)x : (double)(dtype == HEDDLE_BF16 ? bf16_to_float(half) : f16_to_float(half));
}

/* count rows from `from` on, of the long sequence at `far` more. */
static void expect_same(const sequence *whole, const sequence *part, int64_t far, int64_t from, int64_t count) {
    const heddle_dtype dtype = whole->a.dtype;
    const size_t bytes = (size_t)count * whole->width, n = (size_t)count * D;
    unsigned char *x = malloc(bytes), *y = malloc(bytes);
    for (int t = O; t < TENSORS; t++) {
        assert_true(device_memory_copy(x, whole->t[t] + (size_t)(far + from) * whole->width, bytes));
        assert_true(device_memory_copy(y, part->t[t] + (size_t)from * whole->width, bytes));
        double most = 0, error = 0;
        for (size_t at = 0; at < n; at++) {
            most = fmax(most, fabs(value(dtype, y, at)));
            error = fmax(error, fabs(value(dtype, x, at) - value(dtype, y, at)));
        }
        /* Other tiles, another order of the sums. */
        const double unit = dtype == HEDDLE_BF16 ? 0x1p-7 : dtype == HEDDLE_F16 ? 0x1p-10 : 0x1p-19;
        if (!(most > 0 && error <= unit * most))
            fail_msg("tensor %d from row %lld on: error %g of %g", t, (long long)(far + from), error, most);
    }
    free(x);
    free(y);
}

/* Between the first and the last rows, where all inputs are zero: written, and zero. */
static void expect_zeros(const sequence *whole, int64_t from) {
    enum { ROWS = 64 };
    unsigned char rows[ROWS * D * 4];
    for (int t = O; t < TENSORS; t++) {
        assert_true(device_memory_copy(rows, whole->t[t] + (size_t)from * whole->width, ROWS * whole->width));
        for (size_t at = 0; at < ROWS * D; at++)
            if (value(whole->a.dtype, rows, at) != 0)
                fail_msg("tensor %d, row %lld: %g", t, (long long)(from + (int64_t)at / D),
                         value(whole->a.dtype, rows, at));
    }
}

static void check_long(heddle_dtype dtype, uint64_t features) {
    sequence whole, part;
    assert_true(sequence_new(&part, dtype, features, TAIL));
    if (!sequence_new(&whole, dtype, features, long_rows)) {
        printf("left out, dtype %d: %s\n", (int)dtype, device_memory_error());
        sequence_free(&whole);
        sequence_free(&part);
        return;
    }
    char name[128];
    for (int pass = 0; pass < 2; pass++) {
        assert_int_equal(heddle_attention_kernel(&whole.a, (heddle_pass)pass, name, sizeof name), HEDDLE_OK);
        printf("%s\n", name);
    }
    const int64_t far = long_rows - TAIL;
    attention_case c = {.a = attention_desc(dtype, 1, 1, 1, TAIL, TAIL, D, D), .seed = 11};
    attention_problem random = attention_new(&c);
    static const int from[] = {T_Q, T_K, T_V, T_DOUT};
    for (int x = Q; x <= DOUT; x++) { /* the same rows first and last, zeros between */
        const tensor *t = &random.t[from[x]];
        const unsigned char *rows = t->host + (size_t)t->guard * element_size(t->element);
        assert_true(device_memory_copy(part.t[x], rows, TAIL * part.width));
        assert_true(device_memory_copy(whole.t[x], rows, TAIL * part.width));
        assert_true(device_memory_copy(whole.t[x] + (size_t)far * part.width, rows, TAIL * part.width));
    }
    sequence_run(&whole);
    sequence_run(&part);
    expect_same(&whole, &part, 0, 0, SURE); /* keys at the end of the first rows get more from those that follow */
    expect_same(&whole, &part, far, TAIL - SURE, SURE);
    expect_zeros(&whole, far / 2);
    expect_zeros(&whole, far - 500);
    attention_free(&random);
    sequence_free(&whole);
    sequence_free(&part);
}

static void test_bf16(void **state) {
    (void)state;
    check_long(HEDDLE_BF16, 0);
    check_long(HEDDLE_BF16, HEDDLE_ALIBI); /* the kernels with all options */
}

static void test_f16(void **state) {
    (void)state;
    check_long(HEDDLE_F16, HEDDLE_DETERMINISTIC);
}

static void test_f32(void **state) {
    (void)state;
    check_long(HEDDLE_F32, 0);
    check_long(HEDDLE_F32, HEDDLE_ALIBI);
}

int main(void) {
    setenv("HEDDLE_TEST_DEVICE", "cuda", 1);
    test_begin();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bf16), cmocka_unit_test(test_f16),
                                       cmocka_unit_test(test_f32)};
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

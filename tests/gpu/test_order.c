/* SPDX-License-Identifier: Apache-2.0
 * What kernels in front of a call may not change. Calls in a row that nobody waits for, each with the results of those before it: the
 * same bits come out as when every call is waited for (on Hopper a launch may overlap the one in front, wait_for_earlier_grid). And
 * what others left in shared memory, which no tool of compute-sanitizer sees read. */
#define _POSIX_C_SOURCE 200809L
#include "driver.h"
#include "dtype.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { Q, K, V, DOUT, O, DQ, DK, DV, LSE, W, BIAS, DX, DW, TENSORS };

typedef struct chain {
    heddle_attention a;
    int64_t elements[TENSORS];
    void *t[TENSORS], *workspace;
    void *first[TENSORS]; /* what they hold at the begin */
    size_t bytes;
} chain;

static heddle_norm_linear linear(const chain *c, int64_t elements) {
    return (heddle_norm_linear){.size = sizeof(heddle_norm_linear),
                                .dtype = c->a.dtype,
                                .device = HEDDLE_CUDA,
                                .features = c->a.features,
                                .m = elements / c->a.d,
                                .k = c->a.d,
                                .n = c->a.d,
                                .eps = 1e-12};
}

static void need(chain *c, heddle_status status, const size_t *bytes) {
    assert_int_equal(status, HEDDLE_OK);
    c->bytes = *bytes > c->bytes ? *bytes : c->bytes;
}

static chain chain_new(heddle_attention a) {
    chain c = {.a = a};
    rng r = {17};
    const int64_t of_q = a.b * a.h * a.sq * a.d, of_k = a.b * a.hk * a.sk * a.d;
    const int64_t elements[TENSORS] = {of_q, of_k, of_k,      of_q, of_q, of_q,     of_k,
                                       of_k, of_q, a.d * a.d, a.d,  of_q, a.d * a.d};
    for (int x = 0; x < TENSORS; x++) {
        c.elements[x] = elements[x];
        c.t[x] = device_memory_new((size_t)elements[x] * 4);
        c.first[x] = malloc((size_t)elements[x] * 4);
        assert_true(c.t[x] && c.first[x]);
        for (int64_t y = 0; y < elements[x]; y++)
            store_element(a.dtype, c.first[x], y, rng_normal(&r) * (x == W ? 2 / sqrt((double)a.d) : 1));
    }
    size_t bytes = 0;
    for (int pass = 0; pass < 2; pass++) {
        const heddle_norm_linear q = linear(&c, of_q), k = linear(&c, of_k);
        need(&c, heddle_attention_workspace(&a, (heddle_pass)pass, &bytes), &bytes);
        need(&c, heddle_norm_linear_workspace(&q, (heddle_pass)pass, &bytes), &bytes);
        need(&c, heddle_norm_linear_workspace(&k, (heddle_pass)pass, &bytes), &bytes);
    }
    c.workspace = device_memory_new(c.bytes);
    assert_non_null(c.workspace);
    return c;
}

static void chain_free(chain *c) {
    for (int x = 0; x < TENSORS; x++) {
        device_memory_free(c->t[x]);
        free(c->first[x]);
    }
    device_memory_free(c->workspace);
}

static void chain_fill(chain *c) {
    for (int x = 0; x < TENSORS; x++)
        assert_true(device_memory_copy(c->t[x], c->first[x], (size_t)c->elements[x] * heddle_dtype_size(c->a.dtype)));
}

static void ended(heddle_status status, bool wait) {
    assert_int_equal(status, HEDDLE_OK);
    assert_true(!wait || device_memory_wait());
}

static void run_linear(chain *c, int from, int to, bool wait) {
    const heddle_norm_linear l = linear(c, c->elements[from]);
    heddle_norm_linear_data t = {.size = sizeof t, .x = c->t[from], .w = c->t[W], .bias = c->t[BIAS], .y = c->t[to]};
    ended(heddle_norm_linear_forward(&l, &t, c->workspace, c->bytes, NULL), wait);
}

/* All that comes out goes in again, by way of norm-linear, which keeps its magnitude. */
static void run_chain(chain *c, int steps, bool wait) {
    for (int x = 0; x < steps; x++) {
        heddle_attention_data t = {
            .size = sizeof t, .q = c->t[Q], .k = c->t[K], .v = c->t[V], .o = c->t[O], .lse = c->t[LSE]};
        ended(heddle_attention_forward(&c->a, &t, c->workspace, c->bytes, NULL), wait);
        t.dout = c->t[DOUT], t.dq = c->t[DQ], t.dk = c->t[DK], t.dv = c->t[DV];
        ended(heddle_attention_backward(&c->a, &t, c->workspace, c->bytes, NULL), wait);
        const heddle_norm_linear l = linear(c, c->elements[O]);
        heddle_norm_linear_data lt = {.size = sizeof lt,
                                      .x = c->t[O],
                                      .w = c->t[W],
                                      .dy = c->t[DOUT],
                                      .y = c->t[Q],
                                      .dx = c->t[DX],
                                      .dw = c->t[DW]};
        run_linear(c, O, Q, wait);
        ended(heddle_norm_linear_backward(&l, &lt, c->workspace, c->bytes, NULL), wait);
        run_linear(c, DX, DOUT, wait);
        run_linear(c, DQ, Q, wait);
        run_linear(c, DK, K, wait);
        run_linear(c, DV, V, wait);
    }
    assert_true(device_memory_wait());
}

/* The largest difference of two images of a tensor, in units of the largest value. */
static double difference(const void *a, const void *b, heddle_dtype dtype, int64_t n) {
    double most = 0, largest = 0;
    for (int64_t x = 0; x < n; x++) {
        const double v = load_element(dtype, a, x), d = fabs(v - load_element(dtype, b, x));
        if (!(d <= most))
            most = d;
        largest = fabs(v) > largest ? fabs(v) : largest;
    }
    return memcmp(a, b, (size_t)n * heddle_dtype_size(dtype)) ? most / largest : 0;
}

static void in_a_row(heddle_attention a) {
    chain c = chain_new(a);
    const bool exact = a.features & HEDDLE_DETERMINISTIC;
    const int steps = exact ? 8 : 1;
    void *image[TENSORS], *other = malloc((size_t)(c.elements[Q] + c.elements[K]) * 4);
    chain_fill(&c);
    run_chain(&c, steps, true);
    for (int x = 0; x <= DV; x++) {
        image[x] = malloc((size_t)c.elements[x] * 4);
        assert_true(device_memory_copy(image[x], c.t[x], (size_t)c.elements[x] * heddle_dtype_size(a.dtype)));
    }
    for (int times = 0; times < 4; times++) {
        chain_fill(&c);
        run_chain(&c, steps, false);
        for (int x = 0; x <= DV; x++) {
            assert_true(device_memory_copy(other, c.t[x], (size_t)c.elements[x] * heddle_dtype_size(a.dtype)));
            const double d = difference(image[x], other, a.dtype, c.elements[x]);
            if (!(d <= (exact ? 0 : 0.05)))
                fail_msg("b%d h%d hk%d sq%d sk%d d%d dtype %d: tensor %d differs by %g", (int)a.b, (int)a.h, (int)a.hk,
                         (int)a.sq, (int)a.sk, (int)a.d, (int)a.dtype, x, d);
        }
    }
    for (int x = 0; x <= DV; x++)
        free(image[x]);
    free(other);
    chain_free(&c);
}

static void test_calls_in_a_row(void **state) {
    (void)state;
    static const int sizes[][6] = {{1, 1, 1, 32, 32, 32},    {2, 2, 1, 128, 128, 64}, {1, 4, 2, 300, 300, 64},
                                   {2, 4, 4, 512, 512, 128}, {1, 8, 2, 1, 2000, 128}, {1, 4, 4, 16, 1000, 64},
                                   {1, 2, 2, 200, 200, 256}};
    static const heddle_dtype dtypes[] = {HEDDLE_BF16, HEDDLE_F32, HEDDLE_F16};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (size_t y = 0; y < COUNT(dtypes); y++)
            for (int exact = 0; exact < 2; exact++) {
                heddle_attention a = {.size = sizeof a,
                                      .dtype = dtypes[y],
                                      .device = HEDDLE_CUDA,
                                      .b = sizes[x][0],
                                      .h = sizes[x][1],
                                      .hk = sizes[x][2],
                                      .sq = sizes[x][3],
                                      .sk = sizes[x][4],
                                      .d = sizes[x][5],
                                      .features = exact ? HEDDLE_DETERMINISTIC : 0};
                in_a_row(a);
            }
}

/* ----------------------------------------------------------------------------------- what lies in shared memory */

typedef struct painter {
    void *function;
    int processors, bytes; /* of shared memory that one block can have */
} painter;

/* Fills a block's shared memory with whole numbers of -2048 to 2047, which as floats are denormals and NaN. */
static painter painter_new(void) {
    static const char ptx[] = ".version 7.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 all[];\n"
                              ".visible .entry paint(.param .u32 bytes, .param .u32 seed) {\n"
                              ".reg .pred %end;\n.reg .u32 %at, %bytes, %seed, %x, %y;\nmov.u32 %at, %tid.x;\n"
                              "shl.b32 %at, %at, 2;\nld.param.u32 %bytes, [bytes];\nld.param.u32 %seed, [seed];\n"
                              "NEXT:\nsetp.ge.u32 %end, %at, %bytes;\n@%end ret;\n"
                              "add.u32 %x, %at, %seed;\nmul.lo.u32 %x, %x, 2654435769;\nshr.u32 %seed, %x, 15;\n"
                              "xor.b32 %x, %x, %seed;\nmul.lo.u32 %x, %x, 739982445;\nshr.s32 %x, %x, 20;\n"
                              "ld.param.u32 %seed, [seed];\nmov.u32 %y, all;\nadd.u32 %y, %y, %at;\n"
                              "st.volatile.shared.u32 [%y], %x;\nadd.u32 %at, %at, 1024;\nbra NEXT;\n}\n";
    enum { MULTIPROCESSOR_COUNT = 16, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97, MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
    painter p = {0};
    void *module = NULL, *any = device_memory_new(4); /* which enters the device's context */
    device_memory_free(any);
    DRIVER("cuDeviceGetAttribute", (int *, int, int), (&p.processors, MULTIPROCESSOR_COUNT, 0));
    DRIVER("cuDeviceGetAttribute", (int *, int, int), (&p.bytes, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0));
    DRIVER("cuModuleLoadData", (void **, const void *), (&module, ptx));
    DRIVER("cuModuleGetFunction", (void **, void *, const char *), (&p.function, module, "paint"));
    DRIVER("cuFuncSetAttribute", (void *, int, int), (p.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, p.bytes));
    return p;
}

/* A multiprocessor holds one such block; several times as many as there are reach every one. */
static void paint(const painter *p, unsigned seed) {
    unsigned bytes = (unsigned)p->bytes;
    void *parameters[] = {&bytes, &seed};
    DRIVER_LAUNCH(p->function, 8 * (unsigned)p->processors, 1, 1, 256, 1, 1, bytes, NULL, parameters, NULL);
}

/* Runs of one problem behind other leftovers each; the first run's results are what the others' have to be. */
static void painted_attention(const painter *brush, const attention_case *c) {
    attention_problem first = attention_new(c), p = attention_new(c);
    for (unsigned seed = 0; seed < 12; seed++)
        for (int pass = 0; pass < 2; pass++) {
            attention_problem *now = seed ? &p : &first;
            paint(brush, seed * 7919);
            attention_run(now, (heddle_pass)pass);
            for (int x = 0; x < T_COUNT && pass; x++)
                if (now->t[x].host && !tensor_equal(&now->t[x], &first.t[x])) {
                    attention_print(c);
                    fail_msg("%s depends on what lay in shared memory", attention_tensor_name[x]);
                }
        }
    attention_free(&first);
    attention_free(&p);
}

static void painted_norm_linear(const painter *brush, const norm_linear_case *c) {
    norm_linear_problem first = norm_linear_new(c), p = norm_linear_new(c);
    for (unsigned seed = 0; seed < 12; seed++)
        for (int pass = 0; pass < 2; pass++) {
            norm_linear_problem *now = seed ? &p : &first;
            paint(brush, seed * 7919);
            norm_linear_run(now, (heddle_pass)pass);
            for (int x = 0; x < N_COUNT && pass; x++)
                if (now->t[x].host && !tensor_equal(&now->t[x], &first.t[x])) {
                    norm_linear_print(c);
                    fail_msg("%s depends on what lay in shared memory", norm_linear_tensor_name[x]);
                }
        }
    norm_linear_free(&first);
    norm_linear_free(&p);
}

static void test_leftovers(void **state) {
    (void)state;
    static const int tiles[][2] = {{1, 1}, {100, 100}, {7, 300}, {300, 7}, {260, 260}},
                     dims[] = {32, 64, 128, 256, 320};
    static const int shapes[][3] = {{3, 40, 24}, {130, 200, 136}, {300, 64, 1000}};
    painter brush = painter_new();
    for (size_t x = 0; x < COUNT(tiles) * COUNT(dims) * TEST_DTYPES; x++) {
        const int *tile = tiles[x % COUNT(tiles)], d = dims[x / COUNT(tiles) % COUNT(dims)];
        attention_case c = attention_case_of(2, 4, 2, tile[0], tile[1], d, d);
        c.a.dtype = test_dtypes[x / (COUNT(tiles) * COUNT(dims))];
        c.a.mask = x % 2 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        c.a.features = HEDDLE_DETERMINISTIC;
        c.seed = x + 1;
        painted_attention(&brush, &c);
    }
    for (size_t x = 0; x < COUNT(shapes) * TEST_DTYPES; x++) {
        const int *s = shapes[x % COUNT(shapes)];
        norm_linear_case c = {
            .a = norm_linear_desc(test_dtypes[x / COUNT(shapes)], HEDDLE_LAYER_NORM, s[0], s[1], s[2]), .seed = x + 1};
        painted_norm_linear(&brush, &c);
    }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_leftovers), cmocka_unit_test(test_calls_in_a_row)};
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

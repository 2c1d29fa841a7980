/* SPDX-License-Identifier: Apache-2.0
 * What only a GPU has: contexts, streams, graphs, foreign memory, errors of others, tensors of more than 2^31 elements. The
 * results themselves are tested by the programs of every device, with HEDDLE_TEST_DEVICE=cuda. */
#define _POSIX_C_SOURCE 200809L
#include "driver.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --------------------------------------------------------------------------------------- one problem of each kind */

static norm_linear_case linear_case(heddle_dtype dtype, uint64_t seed) {
    return (norm_linear_case){.a = norm_linear_desc(dtype, HEDDLE_LAYER_NORM, 300, 136, 264), .seed = seed};
}

static attention_case causal_case(heddle_dtype dtype, uint64_t seed) {
    attention_case c = {.a = attention_desc(dtype, 2, 4, 2, 150, 150, 64, 64), .seed = seed};
    c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
    c.a.features = HEDDLE_DETERMINISTIC;
    return c;
}

typedef struct space {
    size_t bytes[2];
    void *p[2];
} space;

static space space_new(const norm_linear_problem *l, const attention_problem *a) {
    space s;
    for (int pass = 0; pass < 2; pass++) {
        assert_int_equal(l ? heddle_norm_linear_workspace(&l->a, (heddle_pass)pass, &s.bytes[pass])
                           : heddle_attention_workspace(&a->a, (heddle_pass)pass, &s.bytes[pass]),
                         HEDDLE_OK);
        s.p[pass] = device_memory_new(s.bytes[pass]);
        assert_non_null(s.p[pass]);
    }
    return s;
}

static void space_free(space *s) {
    device_memory_free(s->p[0]);
    device_memory_free(s->p[1]);
}

/* Both passes on a stream. */
static void linear_both(const norm_linear_problem *p, const space *s, void *stream) {
    heddle_norm_linear_data forward = norm_linear_data(p, false), backward = norm_linear_data(p, true);
    assert_int_equal(heddle_norm_linear_forward(&p->a, &forward, s->p[0], s->bytes[0], stream), HEDDLE_OK);
    assert_int_equal(heddle_norm_linear_backward(&p->a, &backward, s->p[1], s->bytes[1], stream), HEDDLE_OK);
}

static void attention_both(const attention_problem *p, const space *s, void *stream) {
    heddle_attention_data forward = attention_data(p, false), backward = attention_data(p, true);
    assert_int_equal(heddle_attention_forward(&p->a, &forward, s->p[0], s->bytes[0], stream), HEDDLE_OK);
    assert_int_equal(heddle_attention_backward(&p->a, &backward, s->p[1], s->bytes[1], stream), HEDDLE_OK);
}

/* ------------------------------------------------------------------------------------------------------- graphs */

typedef struct graph {
    void *stream, *graph, *ready;
} graph;

static graph graph_begin(void) {
    graph g;
    DRIVER("cuStreamCreate", (void **, unsigned), (&g.stream, 1));
    DRIVER("cuStreamBeginCapture_v2", (void *, int), (g.stream, 0));
    return g;
}

static void graph_end(graph *g) {
    DRIVER("cuStreamEndCapture", (void *, void **), (g->stream, &g->graph));
    DRIVER("cuGraphInstantiateWithFlags", (void **, void *, unsigned long long), (&g->ready, g->graph, 0));
}

/* After what was uploaded has arrived: a copy from pageable memory may be on its way yet, and this stream does not wait for it. */
static void graph_run(const graph *g) {
    assert_true(device_memory_wait());
    DRIVER("cuGraphLaunch", (void *, void *), (g->ready, g->stream));
    assert_true(device_memory_wait());
}

static void graph_free(graph *g) {
    DRIVER("cuGraphExecDestroy", (void *), (g->ready));
    DRIVER("cuGraphDestroy", (void *), (g->graph));
    DRIVER("cuStreamDestroy_v2", (void *), (g->stream));
}

/* Captured with one set of data, replayed with another: the same bits as plain calls give for that. */
static void test_graph_norm_linear(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        norm_linear_case first = linear_case(test_dtypes[x], 1), second = linear_case(test_dtypes[x], 2);
        norm_linear_problem p = norm_linear_new(&first), q = norm_linear_new(&second);
        space s = space_new(&p, NULL);
        graph g = graph_begin();
        linear_both(&p, &s, g.stream);
        graph_end(&g);
        for (int i = 0; i < N_COUNT; i++)
            if (is_input(&norm_linear_fields[i])) {
                tensor_convert(&p.t[i], &q.t[i]);
                tensor_upload(&p.t[i]);
            }
        graph_run(&g);
        linear_both(&q, &s, NULL);
        assert_true(device_memory_wait());
        for (int i = 0; i < N_COUNT; i++) {
            tensor_download(&p.t[i]);
            tensor_download(&q.t[i]);
            assert_true(tensor_equal(&p.t[i], &q.t[i]));
        }
        graph_free(&g);
        space_free(&s);
        norm_linear_free(&p);
        norm_linear_free(&q);
    }
}

static void test_graph_attention(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        attention_case first = causal_case(test_dtypes[x], 1), second = causal_case(test_dtypes[x], 2);
        attention_problem p = attention_new(&first), q = attention_new(&second);
        space s = space_new(NULL, &p);
        graph g = graph_begin();
        attention_both(&p, &s, g.stream);
        graph_end(&g);
        for (int i = 0; i < T_COUNT; i++)
            if (p.t[i].host && is_input(&attention_fields[i])) {
                tensor_convert(&p.t[i], &q.t[i]);
                tensor_upload(&p.t[i]);
            }
        graph_run(&g);
        attention_both(&q, &s, NULL);
        assert_true(device_memory_wait());
        for (int i = 0; i < T_COUNT; i++) {
            tensor_download(&p.t[i]);
            tensor_download(&q.t[i]);
            assert_true(tensor_equal(&p.t[i], &q.t[i]));
        }
        graph_free(&g);
        space_free(&s);
        attention_free(&p);
        attention_free(&q);
    }
}

/* ------------------------------------------------------------------------------------------------------- misuse */

static void test_host_pointer(void **state) {
    (void)state;
    norm_linear_case c = linear_case(HEDDLE_BF16, 3);
    norm_linear_problem p = norm_linear_new(&c);
    space s = space_new(&p, NULL);
    heddle_norm_linear_data data = norm_linear_data(&p, false);
    data.w = p.t[N_W].host;
    assert_int_equal(heddle_norm_linear_forward(&p.a, &data, s.p[0], s.bytes[0], NULL), HEDDLE_WRONG_DEVICE);
    assert_non_null(strstr(heddle_last_message(), "w = "));
    assert_non_null(strstr(heddle_last_message(), "device 0"));
    norm_linear_run(&p, HEDDLE_FORWARD); /* and the next call works */
    attention_case ac = causal_case(HEDDLE_BF16, 3);
    attention_problem a = attention_new(&ac);
    space as = space_new(NULL, &a);
    heddle_attention_data ad = attention_data(&a, false);
    ad.k = a.t[T_K].host;
    assert_int_equal(heddle_attention_forward(&a.a, &ad, as.p[0], as.bytes[0], NULL), HEDDLE_WRONG_DEVICE);
    assert_non_null(strstr(heddle_last_message(), "k = "));
    attention_run(&a, HEDDLE_FORWARD);
    space_free(&as);
    attention_free(&a);
    space_free(&s);
    norm_linear_free(&p);
}

/* A stream of another context. */
static void test_foreign_stream(void **state) {
    (void)state;
    norm_linear_case c = linear_case(HEDDLE_F32, 4);
    norm_linear_problem p = norm_linear_new(&c);
    space s = space_new(&p, NULL);
    void *context = NULL, *stream = NULL;
    DRIVER("cuCtxCreate_v2", (void **, unsigned, int), (&context, 0, 0));
    DRIVER("cuStreamCreate", (void **, unsigned), (&stream, 1));
    DRIVER("cuCtxPopCurrent_v2", (void **), (&(void *){NULL}));
    heddle_norm_linear_data data = norm_linear_data(&p, false);
    assert_int_equal(heddle_norm_linear_forward(&p.a, &data, s.p[0], s.bytes[0], stream), HEDDLE_WRONG_DEVICE);
    assert_non_null(strstr(heddle_last_message(), "stream"));
    DRIVER("cuCtxDestroy_v2", (void *), (context));
    norm_linear_run(&p, HEDDLE_FORWARD);
    space_free(&s);
    norm_linear_free(&p);
}

/* A thread that has no context uses device 0's primary one, and is left without one. */
static void *without_context(void *argument) {
    norm_linear_problem *p = argument;
    void *context = NULL;
    heddle_norm_linear_data data = norm_linear_data(p, false);
    size_t bytes = 0;
    heddle_norm_linear_workspace(&p->a, HEDDLE_FORWARD, &bytes);
    void *workspace = (void *)p->t[N_DW].block; /* large enough: nothing reads it in forward */
    bool fits = bytes <= (size_t)p->t[N_DW].span * element_size(p->t[N_DW].element);
    heddle_status status = fits ? heddle_norm_linear_forward(&p->a, &data, workspace, bytes, NULL) : HEDDLE_BAD_SIZE;
    DRIVER("cuCtxGetCurrent", (void **), (&context));
    return status == HEDDLE_OK && !context ? NULL : (void *)heddle_last_message();
}

static void test_thread_without_context(void **state) {
    (void)state;
    norm_linear_case c = {.a = norm_linear_desc(HEDDLE_BF16, HEDDLE_LAYER_NORM, 8, 64, 4096), .seed = 7};
    c.a.dw_stride = 128;
    norm_linear_problem p = norm_linear_new(&c), q = norm_linear_new(&c);
    pthread_t thread;
    void *result;
    assert_int_equal(pthread_create(&thread, NULL, without_context, &p), 0);
    pthread_join(thread, &result);
    assert_null(result);
    assert_true(device_memory_wait());
    norm_linear_run(&q, HEDDLE_FORWARD);
    tensor_download(&p.t[N_Y]);
    assert_true(tensor_equal(&p.t[N_Y], &q.t[N_Y]));
    norm_linear_free(&p);
    norm_linear_free(&q);
}

/* ----------------------------------------------------------------------------------------------- several devices */

typedef struct other_device {
    pthread_t thread;
    int ordinal;
    bool right;
} other_device;

/* The device's primary context, current in this thread from now on. */
static void enter_device(int ordinal) {
    void *context = NULL;
    DRIVER("cuDevicePrimaryCtxRetain", (void **, int), (&context, ordinal));
    DRIVER("cuCtxSetCurrent", (void *), (context));
}

static void *on_device(void *argument) {
    other_device *o = argument;
    enter_device(o->ordinal);
    o->right = true;
    for (size_t x = 0; x < TEST_DTYPES && o->right; x++) {
        attention_case ac = causal_case(test_dtypes[x], 20 + x);
        norm_linear_case lc = linear_case(test_dtypes[x], 30 + x);
        o->right = attention_is_right(&ac) && norm_linear_is_right(&lc);
    }
    return NULL;
}

/* Every device from a thread of its own, all at once: each has its own modules and limits. */
static void test_several_devices(void **state) {
    (void)state;
    int count = 0;
    DRIVER("cuDeviceGetCount", (int *), (&count));
    if (count < 2) {
        printf("skipped: one GPU\n");
        skip();
    }
    other_device all[16] = {0};
    count = count < 16 ? count : 16;
    for (int x = 0; x < count; x++) {
        all[x].ordinal = x;
        assert_int_equal(pthread_create(&all[x].thread, NULL, on_device, &all[x]), 0);
    }
    for (int x = 0; x < count; x++)
        pthread_join(all[x].thread, NULL);
    for (int x = 0; x < count; x++)
        assert_true(all[x].right);
    /* A pointer of the other device. */
    norm_linear_case c = linear_case(HEDDLE_BF16, 3);
    norm_linear_problem far = norm_linear_new(&c);
    enter_device(1);
    norm_linear_problem p = norm_linear_new(&c);
    space s = space_new(&p, NULL);
    heddle_norm_linear_data data = norm_linear_data(&p, false);
    data.w = far.t[N_W].block;
    assert_int_equal(heddle_norm_linear_forward(&p.a, &data, s.p[0], s.bytes[0], NULL), HEDDLE_WRONG_DEVICE);
    assert_non_null(strstr(heddle_last_message(), "device 1"));
    norm_linear_run(&p, HEDDLE_FORWARD);
    space_free(&s);
    norm_linear_free(&p);
    enter_device(0);
    norm_linear_free(&far);
}

/* In a process of its own: somebody else's kernel writes where it must not; from then on the context is lost. */
static int broken_context(void) {
    static const char ptx[] = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry astray() {\n"
                              ".reg .u64 %a;\nmov.u64 %a, 64;\nst.global.u32 [%a], 1;\nret;\n}\n";
    norm_linear_case c = linear_case(HEDDLE_BF16, 5);
    norm_linear_problem p = norm_linear_new(&c);
    space s = space_new(&p, NULL);
    heddle_norm_linear_data data = norm_linear_data(&p, false);
    void *module = NULL, *function = NULL;
    DRIVER("cuModuleLoadData", (void **, const void *), (&module, ptx));
    DRIVER("cuModuleGetFunction", (void **, void *, const char *), (&function, module, "astray"));
    DRIVER_LAUNCH(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    device_memory_wait();
    heddle_status status = heddle_norm_linear_forward(&p.a, &data, s.p[0], s.bytes[0], NULL);
    printf("%s: %s\n", heddle_status_string(status), heddle_last_message());
    return status == HEDDLE_EARLIER_CUDA_ERROR ? 0 : 1;
}

static char own_name[4096];

static void test_broken_context(void **state) {
    (void)state;
    char command[4200];
    snprintf(command, sizeof command, "'%s' broken", own_name);
    assert_int_equal(system(command), 0);
}

/* -------------------------------------------------------------------------------------------------- large tensors */

/* Rows so far apart that the last ones lie beyond 2^31 elements give what they give side by side. */
static void test_large_strides(void **state) {
    (void)state;
    const int64_t m = 70000, k = 8, n = 8, far = 32768;
    const size_t span = (size_t)((m - 1) * far + 8) * 2, check = 1000;
    uint16_t *small = calloc((size_t)m, 16), *y = calloc(check, 16);
    rng r = {9};
    for (int64_t i = 0; i < m * k; i++)
        small[i] = (uint16_t)(0x3f00 + rng_next(&r) % 256 + (rng_next(&r) & 0x8000));
    unsigned char *x = device_memory_new(span), *out = device_memory_new(span), *w = device_memory_new(128);
    unsigned char *near_x = device_memory_new((size_t)m * 16), *near_y = device_memory_new((size_t)m * 16);
    if (!x || !out) {
        printf("skipped: %s\n", device_memory_error());
        skip();
    }
    assert_true(device_memory_copy(w, small, 128) && device_memory_copy(near_x, small, (size_t)m * 16));
    for (int64_t i = 0; i < m; i++)
        if (i >= m - (int64_t)check || i < 8)
            assert_true(device_memory_copy(x + (size_t)(i * far) * 2, small + i * k, 16));
    heddle_norm_linear a = norm_linear_desc(HEDDLE_BF16, HEDDLE_LAYER_NORM, m, k, n), b = a;
    b.x_stride = b.y_stride = far;
    size_t bytes;
    assert_int_equal(heddle_norm_linear_workspace(&b, HEDDLE_FORWARD, &bytes), HEDDLE_OK);
    void *workspace = device_memory_new(bytes);
    heddle_norm_linear_data t = {.size = sizeof t, .x = near_x, .w = w, .y = near_y};
    assert_int_equal(heddle_norm_linear_forward(&a, &t, workspace, bytes, NULL), HEDDLE_OK);
    t.x = x;
    t.y = out;
    assert_int_equal(heddle_norm_linear_forward(&b, &t, workspace, bytes, NULL), HEDDLE_OK);
    assert_true(device_memory_copy(y, near_y + ((size_t)m - check) * 16, check * 16));
    for (size_t i = 0; i < check; i++) {
        uint16_t row[8];
        assert_true(device_memory_copy(row, out + ((size_t)m - check + i) * (size_t)far * 2, 16));
        assert_memory_equal(row, y + i * 8, 16);
    }
    void *const all[] = {x, out, w, near_x, near_y, workspace};
    for (size_t i = 0; i < COUNT(all); i++)
        device_memory_free(all[i]);
    free(small);
    free(y);
}

/* --------------------------------------------------------------------------------------------------------- cost */

/* What a call costs the host. Only told: it depends on the machine. */
static void test_host_cost(void **state) {
    (void)state;
    norm_linear_case lc = {.a = norm_linear_desc(HEDDLE_BF16, HEDDLE_LAYER_NORM, 16, 64, 64), .seed = 1};
    attention_case ac = {.a = attention_desc(HEDDLE_BF16, 1, 1, 1, 64, 64, 64, 64), .seed = 1};
    norm_linear_problem l = norm_linear_new(&lc);
    attention_problem a = attention_new(&ac);
    space ls = space_new(&l, NULL), as = space_new(NULL, &a);
    heddle_norm_linear_data ld[2] = {norm_linear_data(&l, false), norm_linear_data(&l, true)};
    heddle_attention_data ad[2] = {attention_data(&a, false), attention_data(&a, true)};
    for (int which = 0; which < 5; which++) {
        double best = 1;
        for (int turn = 0; turn < 30; turn++) {
            assert_true(device_memory_wait());
            double begin = seconds();
            for (int x = 0; x < 40; x++) {
                heddle_status status = HEDDLE_OK;
                size_t bytes;
                switch (which) {
                case 0: status = heddle_attention_workspace(&a.a, HEDDLE_FORWARD, &bytes); break;
                case 1: status = heddle_attention_forward(&a.a, &ad[0], as.p[0], as.bytes[0], NULL); break;
                case 2: status = heddle_attention_backward(&a.a, &ad[1], as.p[1], as.bytes[1], NULL); break;
                case 3: status = heddle_norm_linear_forward(&l.a, &ld[0], ls.p[0], ls.bytes[0], NULL); break;
                default: status = heddle_norm_linear_backward(&l.a, &ld[1], ls.p[1], ls.bytes[1], NULL);
                }
                assert_int_equal(status, HEDDLE_OK);
            }
            best = fmin(best, (seconds() - begin) / 40);
        }
        static const char *const what[] = {"plan alone", "attention forward", "attention backward",
                                           "norm-linear forward", "norm-linear backward"};
        printf("host cost, %s: %.2f us\n", what[which], best * 1e6);
    }
    space_free(&ls);
    space_free(&as);
    norm_linear_free(&l);
    attention_free(&a);
}

int main(int argc, char **argv) {
    setenv("HEDDLE_TEST_DEVICE", "cuda", 1);
    test_begin();
    snprintf(own_name, sizeof own_name, "%s", argv[0]);
    if (argc > 1 && !strcmp(argv[1], "broken"))
        return broken_context();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_graph_norm_linear),
        cmocka_unit_test(test_graph_attention),
        cmocka_unit_test(test_host_pointer),
        cmocka_unit_test(test_foreign_stream),
        cmocka_unit_test(test_thread_without_context),
        cmocka_unit_test(test_several_devices),
        cmocka_unit_test(test_broken_context),
        cmocka_unit_test(test_large_strides),
        cmocka_unit_test(test_host_cost),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

/* SPDX-License-Identifier: Apache-2.0
 * The same bits from any number of threads; calls from several threads at once, and from within a parallel region. */
#include "common.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static const int thread_counts[] = {1, 2, 7};

static void set_threads(int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}

/* No cmocka in these: they run on threads that it knows nothing of. */
static bool attention_both(attention_problem *p) {
    return attention_pass(p, HEDDLE_FORWARD) && attention_pass(p, HEDDLE_BACKWARD);
}

static bool norm_linear_both(norm_linear_problem *p) {
    for (int pass = 0; pass < 2; pass++) {
        size_t bytes = 0;
        if (heddle_norm_linear_workspace(&p->a, (heddle_pass)pass, &bytes) != HEDDLE_OK)
            return false;
        void *workspace = workspace_new(p->a.device, bytes);
        heddle_norm_linear_data data = norm_linear_data(p, pass);
        heddle_status status = pass ? heddle_norm_linear_backward(&p->a, &data, workspace, bytes, NULL)
                                    : heddle_norm_linear_forward(&p->a, &data, workspace, bytes, NULL);
        bool right = status == HEDDLE_OK && workspace_intact(p->a.device, workspace, bytes);
        workspace_free(p->a.device, workspace, bytes);
        if (!right)
            return false;
    }
    for (int x = 0; x < N_COUNT; x++)
        tensor_download(&p->t[x]);
    return true;
}

static const int32_t cu[] = {0, 3, 3, 90, 220, 221, 260};

static attention_case attention_number(int x) {
    static const int64_t shape[][7] = {
        /* over 2^21 multiply-adds, where the work is divided, but for one */
        {1, 1, 1, 300, 310, 32, 32}, {2, 8, 2, 97, 130, 24, 40},  {1, 4, 1, 35, 700, 32, 32},
        {4, 2, 1, 700, 15, 64, 64},  {5, 7, 1, 33, 65, 16, 16},   {1, 1, 1, 1, 1, 3, 3},
        {90, 8, 4, 14, 14, 8, 8},    {6, 4, 2, 130, 130, 16, 16}, {3, 2, 1, 40, 290, 256, 256},
        {1, 8, 1, 2, 4100, 64, 64},  {230, 1, 1, 50, 20, 8, 8}};
    const int64_t *s = shape[x % (int)COUNT(shape)];
    attention_case c = {.a = attention_desc((heddle_dtype)(x % 3), s[0], s[1], s[2], s[3], s[4], s[5], s[6]),
                        .seed = (uint64_t)x * 3 + 1}; /* no multiple of 3: aligned */
    c.a.mask = (heddle_mask)(x / 3 % 3);
    c.a.features = HEDDLE_BIAS | HEDDLE_SINKS | HEDDLE_DETERMINISTIC;
    c.a.bias_stride = c.a.dbias_stride = (heddle_strides){0, 0, s[4]}; /* dbias: a sum over all heads */
    c.a.dropout = x % 4 == 1 ? 0.2 : 0;
    if (x % (int)COUNT(shape) == 7) {
        c.a.features |= HEDDLE_VARLEN;
        c.a.total_q = c.a.total_k = 260;
        c.cu_q = c.cu_k = cu;
    }
    return c;
}
#define ATTENTIONS 33

static norm_linear_case norm_linear_number(int x) {
    static const int64_t shape[][3] = {{11, 500, 400}, {1100, 40, 50}, {333, 203, 37},
                                       {70, 67, 500},  {7, 7, 5},      {30, 300, 1100}};
    const int64_t *s = shape[x % (int)COUNT(shape)];
    return (norm_linear_case){.a = norm_linear_desc((heddle_dtype)(x % 3), (heddle_norm)(x % 2), s[0], s[1], s[2]),
                              .seed = (uint64_t)x * 3 + 1};
}
#define NORM_LINEARS 18

static bool attention_same(const attention_problem *p, const attention_problem *q) {
    for (int x = 0; x < T_COUNT; x++)
        if (!tensor_equal(&p->t[x], &q->t[x]))
            return false;
    return true;
}

static bool norm_linear_same(const norm_linear_problem *p, const norm_linear_problem *q) {
    for (int x = 0; x < N_COUNT; x++)
        if (!tensor_equal(&p->t[x], &q->t[x]))
            return false;
    return true;
}

/* Float32's backward: with some numbers of threads a task has all chunks of a unit, with others one of them; eight units, of two or three
 * chunks, are divided by 1 and 2, and enough for both. */
static attention_case unit_of_chunks(int x) {
    attention_case c =
        attention_case_of(2, 8, 4, x % 8 == 7 ? 270 : 101, x % 3 == 0 ? 700 : 1100, x % 3 == 2 ? 40 : 64, 64);
    c.seed = (uint64_t)x * 3 + 1;
    c.a.features = HEDDLE_DETERMINISTIC;
    c.a.mask = (heddle_mask)(x % 3);
    c.q_magnitude = x % 2 ? 20 : 1; /* its log-sum-exps are formed anew */
    if (x & 1)
        c.a.features |= HEDDLE_SINKS;
    if (x & 2)
        c.a.dropout = 0.2;
    if (x & 4) {
        c.a.features |= HEDDLE_WINDOW;
        c.a.window_left = 277;
        c.a.window_right = 150;
    }
    if (x % 5 == 1)
        c.a.softcap = 5;
    if (x % 5 == 2)
        c.a.features |= HEDDLE_BOOL_MASK;
    if (x % 5 == 3)
        c.a.features |= HEDDLE_ALIBI;
    if (x % 5 == 4) {
        c.a.features |= HEDDLE_BIAS;
        c.a.bias_stride = c.a.dbias_stride = (heddle_strides){0, 0, c.a.sk};
    }
    return c;
}

/* With gradients so small that they are lifted by what a whole unit allows, and one so large that its unit's cannot be. */
static attention_problem with_gradients(const attention_case *c, double magnitude) {
    attention_problem p = attention_new(c);
    const heddle_attention *a = &c->a;
    for (int64_t n = 0; n < a->b && magnitude != 1; n++)
        for (int64_t x = 0; x < a->h; x++)
            for (int64_t i = 0; i < a->sq; i++)
                for (int64_t e = 0; e < a->dv; e++) {
                    const bool large = magnitude < 1 && n == 1 && x == 3 && i == 50;
                    const double value = tensor_get(&p.t[T_DOUT], n, x, i, e);
                    tensor_set(&p.t[T_DOUT], n, x, i, e, large ? value * 0x1p60 : value * magnitude);
                }
    tensor_upload(&p.t[T_DOUT]);
    return p;
}

/* The same bits with each of so many numbers of threads. */
static void check_threads(const attention_case *c, double magnitude, const int *counts, size_t n) {
    attention_problem one = {0};
    for (size_t t = 0; t < n; t++) {
        set_threads(counts[t]);
        attention_problem p = with_gradients(c, magnitude);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&p, HEDDLE_BACKWARD);
        if (t == 0) {
            one = p;
            continue;
        }
        if (!attention_same(&one, &p)) {
            attention_print(c);
            fail_msg("%d threads give other bits than one", counts[t]);
        }
        attention_free(&p);
    }
    attention_free(&one);
}

static void test_attention_thread_counts(void **state) {
    (void)state;
    for (int x = 0; x < ATTENTIONS; x++) {
        const attention_case c = attention_number(x);
        check_threads(&c, 1, thread_counts, COUNT(thread_counts));
    }
}

static void test_chunks_of_a_task(void **state) {
    (void)state;
    static const int counts[] = {1, 2, 3, 5};
    for (int x = 0; x < 24; x++) {
        const attention_case c = unit_of_chunks(x);
        check_threads(&c, x % 4 < 2 ? 1 : 0x1p-110, counts, COUNT(counts));
        if (x < 6) /* and right, by each way */
            for (size_t t = 0; t < COUNT(counts); t += 2) {
                set_threads(counts[t]);
                check_attention(&c);
            }
    }
}

/* Backward in 16 bits has room for dq of a few sequences at once: short ones wait for the long one in front of them. */
static void test_long_before_short(void **state) {
    (void)state;
    static int32_t queries[14] = {0, 600}, keys[14] = {0, 600};
    for (int x = 2; x < 14; x++) {
        queries[x] = queries[x - 1] + 3;
        keys[x] = keys[x - 1] + 300; /* several chunks of them, or nothing would be added up */
    }
    attention_case c = {.a = attention_desc(HEDDLE_BF16, 13, 1, 1, 600, 600, 128, 128), .seed = 5};
    c.a.features = HEDDLE_VARLEN | HEDDLE_DETERMINISTIC;
    c.a.total_q = queries[13];
    c.a.total_k = keys[13];
    c.cu_q = queries;
    c.cu_k = keys;
    attention_problem one = {0};
    for (int round = 0; round < 9; round++) { /* the first alone; two of three tell of one that does not wait */
        set_threads(round == 0 ? 1 : 2);
        attention_problem p = attention_new(&c);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&p, HEDDLE_BACKWARD);
        if (round == 0) {
            one = p;
            continue;
        }
        assert_true(attention_same(&one, &p));
        attention_free(&p);
    }
    attention_free(&one);
}

static void test_norm_linear_thread_counts(void **state) {
    (void)state;
    for (int x = 0; x < NORM_LINEARS; x++) {
        norm_linear_case c = norm_linear_number(x);
        norm_linear_problem one = {0};
        for (size_t t = 0; t < COUNT(thread_counts); t++) {
            set_threads(thread_counts[t]);
            norm_linear_problem p = norm_linear_new(&c);
            norm_linear_run(&p, HEDDLE_FORWARD);
            norm_linear_run(&p, HEDDLE_BACKWARD);
            if (t == 0) {
                one = p;
                continue;
            }
            if (!norm_linear_same(&one, &p)) {
                norm_linear_print(&c);
                fail_msg("%d threads give other bits than one", thread_counts[t]);
            }
            norm_linear_free(&p);
        }
        norm_linear_free(&one);
    }
}

/* What the kernels for two and for seven threads compute is right, too. */
static void test_right_with_threads(void **state) {
    (void)state;
    for (size_t t = 1; t < COUNT(thread_counts); t++) {
        set_threads(thread_counts[t]);
        for (int x = (int)t; x < ATTENTIONS; x += 2) {
            attention_case c = attention_number(x);
            check_attention(&c);
        }
        for (int x = 0; x < NORM_LINEARS; x++) {
            norm_linear_case c = norm_linear_number(x);
            check_norm_linear(&c);
        }
    }
}

/* The number of threads between the query and the call may shrink; more than planned for must not be used. */
static void test_threads_change(void **state) {
    (void)state;
    attention_case c = attention_number(0);
    set_threads(7);
    attention_problem p = attention_new(&c), q = attention_new(&c);
    attention_run(&p, HEDDLE_FORWARD);
    size_t bytes = 0;
    assert_int_equal(heddle_attention_workspace(&q.a, HEDDLE_FORWARD, &bytes), HEDDLE_OK);
    void *workspace = workspace_new(q.a.device, bytes);
    heddle_attention_data data = attention_data(&q, false);
    set_threads(2);
    assert_int_equal(heddle_attention_forward(&q.a, &data, workspace, bytes, NULL), HEDDLE_OK);
    tensor_download(&q.t[T_O]);
    assert_true(tensor_equal(&p.t[T_O], &q.t[T_O]));
    workspace_free(q.a.device, workspace, bytes);
    attention_free(&p);
    attention_free(&q);
}

/* Backward alike, where fewer threads have larger tasks. */
static void test_threads_change_backward(void **state) {
    (void)state;
    static const int counts[][2] = {{7, 1}, {5, 2}, {3, 1}, {3, 2}, {7, 5}, {2, 1}};
    const attention_case c = unit_of_chunks(3);
    for (size_t x = 0; x < COUNT(counts); x++) {
        attention_problem p = attention_new(&c), q = attention_new(&c);
        set_threads(counts[x][0]);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&p, HEDDLE_BACKWARD);
        attention_run(&q, HEDDLE_FORWARD);
        size_t bytes = 0;
        assert_int_equal(heddle_attention_workspace(&q.a, HEDDLE_BACKWARD, &bytes), HEDDLE_OK);
        void *workspace = workspace_new(q.a.device, bytes);
        heddle_attention_data data = attention_data(&q, true);
        set_threads(counts[x][1]);
        assert_int_equal(heddle_attention_backward(&q.a, &data, workspace, bytes, NULL), HEDDLE_OK);
        assert_true(workspace_intact(q.a.device, workspace, bytes));
        for (int y = 0; y < T_COUNT; y++)
            tensor_download(&q.t[y]);
        assert_true(attention_same(&p, &q));
        workspace_free(q.a.device, workspace, bytes);
        attention_free(&p);
        attention_free(&q);
    }
}

typedef struct job {
    int first;
    attention_problem *attention; /* expected results */
    norm_linear_problem *norm_linear;
    bool right;
} job;

static void *work(void *argument) {
    job *j = argument;
    j->right = true;
    for (int round = 0; round < 2; round++)
        for (int x = 0; x < 8; x++) {
            int which = (x + j->first) % 8;
            attention_case c = attention_number(which);
            attention_problem p = attention_new(&c);
            j->right = attention_both(&p) && attention_same(&p, &j->attention[which]) && j->right;
            attention_free(&p);
            norm_linear_case d = norm_linear_number(which);
            norm_linear_problem q = norm_linear_new(&d);
            j->right = norm_linear_both(&q) && norm_linear_same(&q, &j->norm_linear[which]) && j->right;
            norm_linear_free(&q);
        }
    return NULL;
}

static void expect_results(attention_problem attention[8], norm_linear_problem norm_linear[8]) {
    set_threads(1);
    for (int x = 0; x < 8; x++) {
        attention_case c = attention_number(x);
        attention[x] = attention_new(&c);
        assert_true(attention_both(&attention[x]));
        norm_linear_case d = norm_linear_number(x);
        norm_linear[x] = norm_linear_new(&d);
        assert_true(norm_linear_both(&norm_linear[x]));
    }
}

static void free_results(attention_problem attention[8], norm_linear_problem norm_linear[8]) {
    for (int x = 0; x < 8; x++) {
        attention_free(&attention[x]);
        norm_linear_free(&norm_linear[x]);
    }
}

static void test_concurrent_calls(void **state) {
    (void)state;
    attention_problem attention[8];
    norm_linear_problem norm_linear[8];
    expect_results(attention, norm_linear);
    set_threads(2);
    job jobs[4];
    pthread_t threads[4];
    for (int x = 0; x < 4; x++) {
        jobs[x] = (job){.first = x * 2, .attention = attention, .norm_linear = norm_linear};
        assert_int_equal(pthread_create(&threads[x], NULL, work, &jobs[x]), 0);
    }
    for (int x = 0; x < 4; x++) {
        pthread_join(threads[x], NULL);
        assert_true(jobs[x].right);
    }
    free_results(attention, norm_linear);
}

/* 64 at once, each with a problem of its own: attention in the first ones, norm-linear in the others. */
enum { MANY = 64, MANY_ATTENTIONS = 44 };
typedef struct one_of_many {
    int x;
    attention_problem attention, attention_alone;
    norm_linear_problem norm_linear, norm_linear_alone;
    bool right;
} one_of_many;

static bool run_one(one_of_many *m, bool alone) {
    if (m->x < MANY_ATTENTIONS) {
        attention_case c = attention_number(m->x);
        attention_problem *p = alone ? &m->attention_alone : &m->attention;
        *p = attention_new(&c);
        return attention_both(p);
    }
    norm_linear_case c = norm_linear_number(m->x - MANY_ATTENTIONS);
    norm_linear_problem *p = alone ? &m->norm_linear_alone : &m->norm_linear;
    *p = norm_linear_new(&c);
    return norm_linear_both(p);
}

/* The message of a call that fails is the thread's, whatever the others do. */
static bool refused_by_name(int x) {
    heddle_attention a = attention_desc(HEDDLE_F32, 1, 7, 1000 + x, 1, 1, 1, 1);
    return heddle_attention_supported(&a, NULL, 0) == HEDDLE_BAD_HEADS;
}
static bool still_says(int x) {
    char text[64];
    snprintf(text, sizeof text, "hk = %d does not divide h = 7", 1000 + x);
    return strcmp(heddle_last_message(), text) == 0;
}

static void *work_as_one(void *argument) {
    one_of_many *m = argument;
    set_threads(1 + m->x % 3);
    const bool refused = refused_by_name(m->x);
    m->right = run_one(m, false) && refused && still_says(m->x);
    return NULL;
}

static void test_many_threads(void **state) {
    (void)state;
    static one_of_many jobs[MANY];
    pthread_t threads[MANY];
    set_threads(1);
    for (int x = 0; x < MANY; x++) {
        jobs[x].x = x;
        assert_true(run_one(&jobs[x], true));
    }
    for (int x = 0; x < MANY; x++)
        assert_int_equal(pthread_create(&threads[x], NULL, work_as_one, &jobs[x]), 0);
    for (int x = 0; x < MANY; x++)
        pthread_join(threads[x], NULL);
    for (int x = 0; x < MANY; x++) {
        one_of_many *m = &jobs[x];
        assert_true(m->right);
        if (x < MANY_ATTENTIONS) {
            assert_true(attention_same(&m->attention, &m->attention_alone));
            attention_free(&m->attention);
            attention_free(&m->attention_alone);
        } else {
            assert_true(norm_linear_same(&m->norm_linear, &m->norm_linear_alone));
            norm_linear_free(&m->norm_linear);
            norm_linear_free(&m->norm_linear_alone);
        }
    }
}

/* The first calls of a process: nobody has chosen the kernels yet, and all choose the same. */
static const char *first_isas[MANY];
static bool first_calls_made;
static _Atomic int first_waiting;
static void *call_first(void *isa) {
    atomic_fetch_add(&first_waiting, 1);
    while (atomic_load(&first_waiting) < MANY)
        sched_yield();
    *(const char **)isa = heddle_cpu_isa();
    return NULL;
}
static bool call_first_at_once(void) {
    pthread_t threads[MANY];
    for (int x = 0; x < MANY; x++)
        if (pthread_create(&threads[x], NULL, call_first, &first_isas[x]) != 0)
            return false;
    for (int x = 0; x < MANY; x++)
        pthread_join(threads[x], NULL);
    return true;
}

static void test_first_calls(void **state) {
    (void)state;
    assert_true(first_calls_made);
    for (int x = 0; x < MANY; x++)
        assert_string_equal(first_isas[x], heddle_cpu_isa());
}

static void test_inside_parallel_region(void **state) {
    (void)state;
#ifdef _OPENMP
    attention_problem attention[8];
    norm_linear_problem norm_linear[8];
    expect_results(attention, norm_linear);
    job jobs[3];
    set_threads(3);
#pragma omp parallel for schedule(static, 1)
    for (int x = 0; x < 3; x++) {
        jobs[x] = (job){.first = x, .attention = attention, .norm_linear = norm_linear};
        work(&jobs[x]);
    }
    for (int x = 0; x < 3; x++)
        assert_true(jobs[x].right);
    free_results(attention, norm_linear);
#endif
}

int main(void) {
    first_calls_made = call_first_at_once(); /* before anything else has asked */
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_calls),
        cmocka_unit_test(test_attention_thread_counts),
        cmocka_unit_test(test_chunks_of_a_task),
        cmocka_unit_test(test_long_before_short),
        cmocka_unit_test(test_norm_linear_thread_counts),
        cmocka_unit_test(test_right_with_threads),
        cmocka_unit_test(test_threads_change),
        cmocka_unit_test(test_threads_change_backward),
        cmocka_unit_test(test_concurrent_calls),
        cmocka_unit_test(test_many_threads),
        cmocka_unit_test(test_inside_parallel_region),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

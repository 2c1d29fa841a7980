/* SPDX-License-Identifier: Apache-2.0
 * Norm-linear forward with what it makes of the weight kept by the caller: the same bits as without, one buffer for every m; and what is no
 * such buffer is refused. */
#include "norm_linear_cases.h"

#include "../tools/device_memory.h"

typedef struct kept_weight {
    heddle_device device;
    size_t bytes;
    void *memory;
} kept_weight;

static kept_weight prepare(const norm_linear_problem *p) {
    kept_weight kept = {.device = p->a.device};
    heddle_norm_linear_data data = norm_linear_data(p, false);
    assert_int_equal(heddle_norm_linear_prepared_size(&p->a, &kept.bytes), HEDDLE_OK);
    kept.memory = workspace_new(kept.device, kept.bytes);
    data.x = data.y = NULL; /* not looked at */
    assert_int_equal(heddle_norm_linear_prepare(&p->a, &data, kept.memory, kept.bytes, device_memory_stream()),
                     HEDDLE_OK);
    tensor scratch = p->t[N_W];
    tensor_download(&scratch); /* waits for the stream */
    assert_true(workspace_intact(kept.device, kept.memory, kept.bytes));
    return kept;
}

static void let_go(kept_weight *kept) {
    workspace_free(kept->device, kept->memory, kept->bytes);
}

static heddle_status run(norm_linear_problem *p, const void *prepared) {
    size_t bytes;
    const heddle_status status = heddle_norm_linear_workspace(&p->a, HEDDLE_FORWARD, &bytes);
    if (status != HEDDLE_OK)
        return status;
    bytes = (bytes + 63) / 64 * 64; /* the emulator's memory ends where it is asked to */
    void *workspace = workspace_new(p->a.device, bytes);
    heddle_norm_linear_data data = norm_linear_data(p, false);
    data.prepared = prepared;
    const heddle_status ran = heddle_norm_linear_forward(&p->a, &data, workspace, bytes, device_memory_stream());
    for (int x = 0; x < N_COUNT; x++)
        if (p->t[x].host)
            tensor_download(&p->t[x]);
    assert_true(workspace_intact(p->a.device, workspace, bytes));
    workspace_free(p->a.device, workspace, bytes);
    return ran;
}

static bool same_results(const norm_linear_problem *p, const norm_linear_problem *q) {
    for (int x = 0; x < N_COUNT; x++)
        if (p->t[x].host && is_output_of(&norm_linear_fields[x], HEDDLE_FORWARD) && !tensor_equal(&p->t[x], &q->t[x]))
            return false;
    return true;
}

/* Whether this forward, of more than twice as many rows as columns, takes from the buffer what it else makes of W: where it goes by
 * panels; on a GPU by raw x, which on Hopper a kernel of its own multiplies, or in float32. */
static bool reads_it(const heddle_norm_linear *a) {
    const char *family = getenv("HEDDLE_CUDA_FAMILY");
    char name[128] = "";
    if (a->device == HEDDLE_CPU)
        return true;
    assert_int_equal(heddle_norm_linear_kernel(a, HEDDLE_FORWARD, name, sizeof name), HEDDLE_OK);
    if (a->dtype == HEDDLE_BF16 && strstr(name, "_sm90") && !strstr(name, "_raw_"))
        return false;
    return a->dtype != HEDDLE_F16 && !(family && strcmp(family, "small") == 0 && a->k <= 256);
}

/* The elements of W by which the CPU finds that a buffer is older than the weight. */
static bool is_sampled(const heddle_norm_linear *a, int64_t j, int64_t e) {
    const uint64_t all = (uint64_t)(norm_linear_extent(a, 'N') * a->k);
    for (uint64_t x = 1; x <= 64; x++)
        if (x * UINT64_C(0x9E3779B97F4A7C15) % all == (uint64_t)(j * a->k + e))
            return true;
    return false;
}

/* Forward with the buffer that was made of another m, and without it. `many`: rows enough for every way that reads it; then it is read, for W
 * itself may be zeros. */
static void check_case(norm_linear_case c, bool many) {
    const int64_t m = c.a.m;
    norm_linear_problem p = norm_linear_new(&c), q = norm_linear_new(&c);
    p.a.m = 3;
    kept_weight kept = prepare(&p);
    p.a.m = m;
    if (run(&p, NULL) != HEDDLE_OK) {
        norm_linear_print(&c);
        fail_msg("without the buffer: %s", heddle_last_message());
    }
    q.a.features |= HEDDLE_PREPARED;
    q.a.prepared_bytes = (int64_t)kept.bytes;
    if (many && reads_it(&q.a)) {
        assert_true(kept.bytes > 0);
        for (int64_t j = 0; j < q.t[N_W].dim[2]; j++)
            for (int64_t e = 0; e < c.a.k; e++)
                if (c.a.device != HEDDLE_CPU || !is_sampled(&c.a, j, e))
                    tensor_set(&q.t[N_W], 0, 0, j, e, 0);
        tensor_upload(&q.t[N_W]);
    }
    const heddle_status status = run(&q, kept.bytes ? kept.memory : NULL);
    if (status != HEDDLE_OK)
        fail_msg("%s: %s", heddle_status_string(status), heddle_last_message());
    if (!same_results(&p, &q)) {
        norm_linear_print(&c);
        fail_msg("the bits are others than without the buffer");
    }
    let_go(&kept);
    norm_linear_free(&p);
    norm_linear_free(&q);
}

static void test_the_same_bits(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 72, 40},    {7, 200, 100}, {24, 1031, 41}, {33, 64, 1600},
                                       {129, 64, 130}, {50, 392, 3},  {70, 40, 4},    {61, 17, 1}};
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (size_t y = 0; y < TEST_DTYPES; y++)
            for (int norm = 0; norm <= LAST_NORM; norm++) {
                norm_linear_case c = make_case(sizes[x][0], sizes[x][1], sizes[x][2]);
                const int activation = (int)(x + y + (size_t)norm) % (LAST_ACTIVATION + 1);
                c.a.dtype = test_dtypes[y];
                c.a.norm = (heddle_norm)norm;
                c.a.activation = (heddle_activation)activation;
                c.a.features = (activation ? HEDDLE_ACTIVATION : 0) | (x % 2 ? HEDDLE_RESIDUAL : 0) |
                               (norm != HEDDLE_NO_NORM && x % 3 == 1 ? HEDDLE_Z : 0);
                c.a.w_stride = x % 2 ? c.a.k + 8 : 0;
                c.skip = (x + y) % 4 == 3 ? 1u << N_GAMMA : (x + y) % 4 == 1 ? 1u << N_BETA | 1u << N_C : 0;
                check_case(c, false);
            }
}

/* With many rows the buffer is all that is read of the weight. */
static void test_it_is_read(void **state) {
    (void)state;
    for (size_t y = 0; y < TEST_DTYPES; y++)
        for (int norm = 0; norm < HEDDLE_NO_NORM; norm++) {
            norm_linear_case c = make_case(600, 72, 256);
            c.a.dtype = test_dtypes[y];
            c.a.norm = (heddle_norm)norm;
            check_case(c, true);
            c.a.features = HEDDLE_ACTIVATION;
            c.a.activation = HEDDLE_GELU;
            c.a.m = 530;
            check_case(c, true);
        }
    /* Raw x on Hopper: long rows, and work for all multiprocessors. */
    norm_linear_case c = make_case(17000, 1032, 8);
    c.a.dtype = HEDDLE_BF16;
    c.seed = 1;
    if (c.a.device == HEDDLE_CUDA && !test_emulated())
        check_case(c, true);
}

static void test_sizes(void **state) {
    (void)state;
    norm_linear_case c = make_case(5, 96, 80);
    for (size_t y = 0; y < TEST_DTYPES; y++) {
        size_t first = 1, bytes = 2;
        heddle_norm_linear a = c.a;
        a.dtype = test_dtypes[y];
        assert_int_equal(heddle_norm_linear_prepared_size(&a, &first), HEDDLE_OK);
        static const int64_t rows[] = {0, 1, 16, 64, 1000, 100000};
        for (size_t x = 0; x < COUNT(rows); x++) {
            a.m = rows[x];
            a.x_stride = 96 + (int64_t)x;
            a.features = (x % 2 ? HEDDLE_RESIDUAL : 0) | HEDDLE_DETERMINISTIC;
            assert_int_equal(heddle_norm_linear_prepared_size(&a, &bytes), HEDDLE_OK);
            assert_int_equal(bytes, first);
        }
        a.device = HEDDLE_REF; /* keeps nothing */
        assert_int_equal(heddle_norm_linear_prepared_size(&a, &bytes), HEDDLE_OK);
        assert_int_equal(bytes, 0);
    }
    assert_int_equal(heddle_norm_linear_prepared_size(&c.a, NULL), HEDDLE_NULL_POINTER);
}

static void expect(heddle_status status, heddle_status wanted, const char *words) {
    if (status != wanted || !strstr(heddle_last_message(), words))
        fail_msg("%s, \"%s\", not %s with \"%s\"", heddle_status_string(status), heddle_last_message(),
                 heddle_status_string(wanted), words);
}

static void test_what_is_refused(void **state) {
    (void)state;
    norm_linear_case c = make_case(600, 72, 256);
    norm_linear_problem p = norm_linear_new(&c);
    kept_weight kept = prepare(&p);
    assert_true(kept.bytes > 0);
    expect(run(&p, kept.memory), HEDDLE_BAD_COMBINATION, "prepared is given, but HEDDLE_PREPARED is not set");
    p.a.features = HEDDLE_PREPARED;
    p.a.prepared_bytes = (int64_t)kept.bytes - 1;
    expect(run(&p, kept.memory), HEDDLE_BAD_SIZE, "are prepared");
    p.a.prepared_bytes = 0;
    expect(run(&p, NULL), HEDDLE_BAD_SIZE, "prepared_bytes = 0");
    p.a.prepared_bytes = (int64_t)kept.bytes;
    expect(run(&p, NULL), HEDDLE_NULL_POINTER, "prepared is NULL");
    expect(run(&p, (char *)kept.memory + 32), HEDDLE_MISALIGNED, "prepared");
    heddle_norm_linear_data data = norm_linear_data(&p, false);
    expect(heddle_norm_linear_prepare(&p.a, &data, kept.memory, kept.bytes - 64, NULL), HEDDLE_BAD_SIZE,
           "prepared has");
    expect(heddle_norm_linear_prepare(&p.a, &data, NULL, kept.bytes, NULL), HEDDLE_NULL_POINTER, "NULL");
    data.w = NULL;
    expect(heddle_norm_linear_prepare(&p.a, &data, kept.memory, kept.bytes, NULL), HEDDLE_NULL_POINTER, "w is NULL");
    for (int x = 0; x < N_COUNT; x++)
        assert_true(!p.t[x].host || tensor_unchanged(&p.t[x]));
    let_go(&kept);
    norm_linear_free(&p);
}

/* What the first bytes tell, on the CPU. */
static void test_foreign_buffers(void **state) {
    (void)state;
    if (test_device() != HEDDLE_CPU)
        return;
    norm_linear_case c = make_case(600, 72, 256), other = c;
    other.a.dtype = HEDDLE_F16; /* as many bytes */
    norm_linear_problem p = norm_linear_new(&c), q = norm_linear_new(&other);
    kept_weight kept = prepare(&q);
    p.a.features = HEDDLE_PREPARED;
    p.a.prepared_bytes = (int64_t)kept.bytes;
    expect(run(&p, kept.memory), HEDDLE_BAD_VALUE, "prepared is of k = 72, n = 256, dtype 2");
    p.a.m = 1; /* nor where it would not be read */
    expect(run(&p, kept.memory), HEDDLE_BAD_VALUE, "dtype 2");
    let_go(&kept);
    kept = prepare(&p);
    p.a.m = 600;
    tensor_fill_normal(&p.t[N_W], &(rng){5}, 1);
    tensor_upload(&p.t[N_W]);
    expect(run(&p, kept.memory), HEDDLE_BAD_VALUE, "prepared is of another weight than w");
    memset(kept.memory, 1, 64);
    expect(run(&p, kept.memory), HEDDLE_BAD_VALUE, "nothing that heddle_norm_linear_prepare has written");
    for (int x = 0; x < N_COUNT; x++)
        assert_true(!p.t[x].host || x == N_W || tensor_unchanged(&p.t[x]));
    let_go(&kept);
    norm_linear_free(&p);
    norm_linear_free(&q);
}

/* On the CPU every byte of it is written, whatever was there: of panels also the columns that W has not. */
static void test_all_is_written(void **state) {
    (void)state;
    norm_linear_case c = make_case(70, 40, 17);
    if (c.a.device != HEDDLE_CPU)
        return;
    c.a.features = HEDDLE_ACTIVATION;
    c.a.activation = HEDDLE_SWIGLU;
    norm_linear_problem p = norm_linear_new(&c);
    size_t bytes;
    assert_int_equal(heddle_norm_linear_prepared_size(&p.a, &bytes), HEDDLE_OK);
    void *both[2];
    for (int x = 0; x < 2; x++) {
        both[x] = workspace_new(HEDDLE_CPU, bytes);
        memset(both[x], x ? 0x5a : 0xa5, bytes);
        const heddle_norm_linear_data data = norm_linear_data(&p, false);
        assert_int_equal(heddle_norm_linear_prepare(&p.a, &data, both[x], bytes, NULL), HEDDLE_OK);
    }
    assert_memory_equal(both[0], both[1], bytes);
    for (int x = 0; x < 2; x++)
        workspace_free(HEDDLE_CPU, both[x], bytes);
    norm_linear_free(&p);
}

/* Backward does not look at it. */
static void test_backward(void **state) {
    (void)state;
    norm_linear_case c = make_case(70, 72, 40);
    norm_linear_problem p = norm_linear_new(&c), q = norm_linear_new(&c);
    norm_linear_run(&p, HEDDLE_FORWARD);
    norm_linear_run(&q, HEDDLE_FORWARD);
    q.a.features = HEDDLE_PREPARED | HEDDLE_DETERMINISTIC;
    p.a.features = HEDDLE_DETERMINISTIC;
    norm_linear_run(&p, HEDDLE_BACKWARD);
    norm_linear_run(&q, HEDDLE_BACKWARD);
    for (int x = 0; x < N_COUNT; x++)
        assert_true(!p.t[x].host || tensor_equal(&p.t[x], &q.t[x]));
    norm_linear_free(&p);
    norm_linear_free(&q);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_same_bits),   cmocka_unit_test(test_it_is_read),      cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_what_is_refused), cmocka_unit_test(test_foreign_buffers), cmocka_unit_test(test_backward),
        cmocka_unit_test(test_all_is_written),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

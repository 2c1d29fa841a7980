/* SPDX-License-Identifier: Apache-2.0
 * Bad input to norm-linear: every rule has its status and a message with the numbers, and no output byte is touched. */
#include "api.h"

#include <math.h>

static norm_linear_case linear_case(void) {
    norm_linear_case c = {.a = norm_linear_desc(HEDDLE_F32, HEDDLE_LAYER_NORM, 6, 10, 14), .seed = 5};
    c.a.features = HEDDLE_ACTIVATION | HEDDLE_RESIDUAL | HEDDLE_Z;
    c.a.activation = HEDDLE_GELU;
    return c;
}

static void expect_untouched_linear(norm_linear_problem *p) {
    for (int x = 0; x < N_COUNT; x++) {
        tensor_download(&p->t[x]);
        assert_true(tensor_unchanged(&p->t[x]));
    }
}

static heddle_status call_linear(const heddle_norm_linear *a, const heddle_norm_linear_data *data, int pass,
                                 void *workspace, size_t bytes) {
    return pass ? heddle_norm_linear_backward(a, data, workspace, bytes, NULL)
                : heddle_norm_linear_forward(a, data, workspace, bytes, NULL);
}

static void refuse_linear(const heddle_norm_linear *a, heddle_status expected, const char *part) {
    norm_linear_case c = linear_case();
    norm_linear_problem p = norm_linear_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    char why[256] = "", name[64];
    for (int pass = 0; pass < 2; pass++) {
        heddle_norm_linear_data data = norm_linear_data(&p, pass);
        size_t bytes = 12345;
        expect_status(call_linear(a, &data, pass, workspace, ENOUGH), expected, part);
        expect_status(heddle_norm_linear_workspace(a, (heddle_pass)pass, &bytes), expected, part);
        assert_int_equal(bytes, 12345);
        expect_status(heddle_norm_linear_kernel(a, (heddle_pass)pass, name, sizeof name), expected, part);
    }
    expect_status(heddle_norm_linear_supported(a, why, sizeof why), expected, part);
    assert_non_null(strstr(why, part));
    expect_untouched_linear(&p);
    workspace_free(p.a.device, workspace, ENOUGH);
    norm_linear_free(&p);
}

#define REFUSE_LINEAR(change, status, part)                                                                            \
    do {                                                                                                               \
        norm_linear_case c_ = linear_case();                                                                           \
        heddle_norm_linear *a = &c_.a;                                                                                 \
        change;                                                                                                        \
        refuse_linear(a, status, part);                                                                                \
    } while (0)

static void test_norm_linear_descriptor(void **state) {
    (void)state;
    refuse_linear(NULL, HEDDLE_NULL_POINTER, "NULL");
    REFUSE_LINEAR(a->size = 4, HEDDLE_BAD_DESCRIPTOR_SIZE, "size = 4");
    REFUSE_LINEAR(a->size += 8, HEDDLE_BAD_DESCRIPTOR_SIZE, "size");
    REFUSE_LINEAR(a->dtype = (heddle_dtype)4, HEDDLE_BAD_ENUM, "dtype = 4");
    REFUSE_LINEAR(a->device = (heddle_device)4, HEDDLE_BAD_ENUM, "device = 4");
    REFUSE_LINEAR(a->norm = (heddle_norm)3, HEDDLE_BAD_ENUM, "norm = 3");
    REFUSE_LINEAR((a->norm = HEDDLE_NO_NORM, a->eps = 1e-6), HEDDLE_BAD_COMBINATION, "eps = 1e-06");
    REFUSE_LINEAR(a->norm = HEDDLE_NO_NORM, HEDDLE_BAD_COMBINATION, "with HEDDLE_NO_NORM z is x");
    REFUSE_LINEAR(a->features = HEDDLE_BIAS, HEDDLE_BAD_ENUM, "0x4");
    REFUSE_LINEAR(a->features = UINT64_C(1) << 36, HEDDLE_BAD_ENUM, "0x1000000000");
    REFUSE_LINEAR(a->prepared_bytes = 64, HEDDLE_BAD_COMBINATION, "prepared_bytes = 64");
    REFUSE_LINEAR((a->features |= HEDDLE_PREPARED, a->prepared_bytes = -1), HEDDLE_BAD_SIZE, "prepared_bytes = -1");
    REFUSE_LINEAR(a->multiprocessors = -1, HEDDLE_BAD_SIZE, "multiprocessors = -1");
    REFUSE_LINEAR(a->multiprocessors = INT64_C(1) << 31, HEDDLE_BAD_SIZE, "multiprocessors = 2147483648");
    REFUSE_LINEAR(a->reserved0 = 7, HEDDLE_BAD_ENUM, "reserved0");
    REFUSE_LINEAR(a->reserved1 = 7, HEDDLE_BAD_ENUM, "reserved1");
    REFUSE_LINEAR(a->activation = (heddle_activation)7, HEDDLE_BAD_ENUM, "activation = 7");
    REFUSE_LINEAR(a->activation = (heddle_activation)-1, HEDDLE_BAD_ENUM, "activation = -1");
    REFUSE_LINEAR((a->activation = HEDDLE_SWIGLU, a->u_stride = 27), HEDDLE_BAD_STRIDE, "less than a row's 28");
    REFUSE_LINEAR((a->activation = HEDDLE_GEGLU, a->features = 0), HEDDLE_BAD_COMBINATION, "activation = 4");
    REFUSE_LINEAR(a->activation = HEDDLE_NO_ACTIVATION, HEDDLE_BAD_COMBINATION, "HEDDLE_ACTIVATION is set");
    REFUSE_LINEAR(a->features = 0, HEDDLE_BAD_COMBINATION, "HEDDLE_ACTIVATION is not set");
    REFUSE_LINEAR(a->m = -1, HEDDLE_BAD_SIZE, "m = -1");
    REFUSE_LINEAR(a->k = 0, HEDDLE_BAD_SIZE, "k = 0");
    REFUSE_LINEAR(a->n = 0, HEDDLE_BAD_SIZE, "n = 0");
    REFUSE_LINEAR(a->n = INT64_MAX, HEDDLE_BAD_SIZE, "9223372036854775807");
    REFUSE_LINEAR(a->eps = -1, HEDDLE_BAD_VALUE, "eps = -1");
    REFUSE_LINEAR(a->eps = (double)NAN, HEDDLE_BAD_VALUE, "eps = ");
    REFUSE_LINEAR(a->eps = (double)INFINITY, HEDDLE_BAD_VALUE, "eps = inf");
    REFUSE_LINEAR(a->x_stride = -1, HEDDLE_BAD_STRIDE, "x_stride = -1");
    REFUSE_LINEAR(a->w_stride = -1, HEDDLE_BAD_STRIDE, "w_stride = -1");
    REFUSE_LINEAR(a->dy_stride = -1, HEDDLE_BAD_STRIDE, "dy_stride = -1");
    REFUSE_LINEAR(a->y_stride = 13, HEDDLE_BAD_STRIDE, "y_stride = 13");
    REFUSE_LINEAR(a->dx_stride = 9, HEDDLE_BAD_STRIDE, "dx_stride = 9");
    REFUSE_LINEAR(a->u_stride = 13, HEDDLE_BAD_STRIDE, "u_stride = 13");
    REFUSE_LINEAR(a->dw_stride = 9, HEDDLE_BAD_STRIDE, "dw_stride = 9");
    REFUSE_LINEAR(a->residual_stride = -1, HEDDLE_BAD_STRIDE, "residual_stride = -1");
    REFUSE_LINEAR(a->x_stride = INT64_MAX, HEDDLE_OVERFLOW, "x");
    REFUSE_LINEAR(a->dw_stride = INT64_MAX / 4, HEDDLE_OVERFLOW, "dw");
    REFUSE_LINEAR((a->m = INT64_C(1) << 40, a->k = INT64_C(1) << 40), HEDDLE_OVERFLOW, "x");
    REFUSE_LINEAR(a->dtype = HEDDLE_F64, HEDDLE_UNSUPPORTED, "float64");
    if (heddle_device_available(HEDDLE_CUDA, NULL, 0) != HEDDLE_OK)
        REFUSE_LINEAR(a->device = HEDDLE_CUDA, HEDDLE_NO_DEVICE, "cuda");
}

#define LINEAR_FAULT(field, ...)                                                                                       \
    { #field, offsetof(heddle_norm_linear_data, field), 0, __VA_ARGS__, false }
static const pointer_fault linear_faults[] = {
    LINEAR_FAULT(x, true, true),          LINEAR_FAULT(gamma, false, false),  LINEAR_FAULT(beta, false, false),
    LINEAR_FAULT(w, true, true),          LINEAR_FAULT(bias, false, false),   LINEAR_FAULT(y, true, false),
    LINEAR_FAULT(mean, false, false),     LINEAR_FAULT(rstd, false, false),   LINEAR_FAULT(dy, false, true),
    LINEAR_FAULT(dx, false, false),       LINEAR_FAULT(dgamma, false, false), LINEAR_FAULT(dbeta, false, false),
    LINEAR_FAULT(dw, false, false),       LINEAR_FAULT(dbias, false, false),  LINEAR_FAULT(u, false, true),
    LINEAR_FAULT(residual, true, false),  LINEAR_FAULT(z, true, false),       LINEAR_FAULT(dz, false, false),
    LINEAR_FAULT(prepared, false, false),
};
_Static_assert(COUNT(linear_faults) == N_COUNT, "a tensor is tested by nobody");

static void test_norm_linear_pointers(void **state) {
    (void)state;
    norm_linear_case c = linear_case();
    norm_linear_problem p = norm_linear_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    for (int pass = 0; pass < 2; pass++) {
        heddle_norm_linear_data data = norm_linear_data(&p, pass), whole = data;
        expect_status(call_linear(&p.a, NULL, pass, workspace, ENOUGH), HEDDLE_NULL_POINTER, "NULL");
        data.size++;
        expect_status(call_linear(&p.a, &data, pass, workspace, ENOUGH), HEDDLE_BAD_DESCRIPTOR_SIZE, "size");
        for (size_t x = 0; x < COUNT(linear_faults); x++) {
            const pointer_fault *f = &linear_faults[x];
            char *pointer = pointer_in(&whole, f);
            if (!pointer)
                continue;
            data = whole;
            set_pointer(&data, f, NULL);
            if (pass ? f->needed_backward : f->needed_forward)
                expect_status(call_linear(&p.a, &data, pass, workspace, ENOUGH), HEDDLE_NULL_POINTER, f->name);
            set_pointer(&data, f, pointer + 2);
            expect_status(call_linear(&p.a, &data, pass, workspace, ENOUGH), HEDDLE_MISALIGNED, f->name);
        }
        size_t bytes = 0;
        assert_int_equal(heddle_norm_linear_workspace(&p.a, (heddle_pass)pass, &bytes), HEDDLE_OK);
        if (bytes) {
            expect_status(call_linear(&p.a, &whole, pass, workspace, bytes - 1), HEDDLE_WORKSPACE_TOO_SMALL, "bytes");
            expect_status(call_linear(&p.a, &whole, pass, NULL, bytes), HEDDLE_NULL_POINTER, "workspace");
            expect_status(call_linear(&p.a, &whole, pass, (char *)workspace + 4, ENOUGH), HEDDLE_MISALIGNED,
                          "workspace");
        }
    }
    heddle_norm_linear_data data = norm_linear_data(&p, true);
    data.mean = NULL;
    expect_status(call_linear(&p.a, &data, 1, workspace, ENOUGH), HEDDLE_BAD_COMBINATION, "mean");
    data = norm_linear_data(&p, true);
    data.rstd = NULL;
    expect_status(call_linear(&p.a, &data, 1, workspace, ENOUGH), HEDDLE_BAD_COMBINATION, "rstd");
    expect_untouched_linear(&p);
    workspace_free(p.a.device, workspace, ENOUGH);
    norm_linear_free(&p);
}

/* Programs of an earlier heddle.h: their structures end in front of the activation and of u, and what lies behind them is not read. u
 * without an activation is refused. */
static void test_before_activations(void **state) {
    (void)state;
    norm_linear_case c = linear_case();
    c.a.features = 0;
    c.a.activation = HEDDLE_NO_ACTIVATION;
    norm_linear_problem now = norm_linear_new(&c), then = norm_linear_new(&c);
    then.a.size = offsetof(heddle_norm_linear, activation);
    then.a.activation = (heddle_activation)77;
    then.a.reserved1 = 5;
    then.a.u_stride = -1;
    void *workspace = workspace_new(now.a.device, ENOUGH);
    for (int pass = 0; pass < 2; pass++) {
        heddle_norm_linear_data data = norm_linear_data(&now, pass), old = norm_linear_data(&then, pass);
        old.size = offsetof(heddle_norm_linear_data, u);
        old.u = old.y;
        data.u = data.y;
        expect_status(call_linear(&now.a, &data, pass, workspace, ENOUGH), HEDDLE_BAD_COMBINATION, "HEDDLE_ACTIVATION");
        data.u = NULL;
        data.residual = data.x;
        expect_status(call_linear(&now.a, &data, pass, workspace, ENOUGH), pass ? HEDDLE_OK : HEDDLE_BAD_COMBINATION,
                      pass ? "" : "HEDDLE_RESIDUAL");
        data.residual = NULL;
        expect_status(call_linear(&now.a, &data, pass, workspace, ENOUGH), HEDDLE_OK, "");
        expect_status(call_linear(&then.a, &old, pass, workspace, ENOUGH), HEDDLE_OK, "");
    }
    for (int x = N_Y; x < N_COUNT; x++) {
        tensor_download(&now.t[x]);
        tensor_download(&then.t[x]);
        for (int64_t at = 0; now.t[x].host && at < now.t[x].dim[2] * now.t[x].dim[3]; at++)
            assert_true(tensor_raw(&now.t[x], at) == tensor_raw(&then.t[x], at));
    }
    workspace_free(now.a.device, workspace, ENOUGH);
    norm_linear_free(&now);
    norm_linear_free(&then);
}

/* Without a norm its tensors are refused by their names, those alone that the pass would look at. */
static void test_no_norm(void **state) {
    (void)state;
    norm_linear_case c = linear_case();
    c.a.norm = HEDDLE_NO_NORM;
    c.a.features &= ~HEDDLE_Z;
    norm_linear_problem p = norm_linear_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    static const int of_norm[] = {N_GAMMA, N_BETA, N_MEAN, N_RSTD, N_DGAMMA, N_DBETA};
    for (int pass = 0; pass < 2; pass++)
        for (size_t x = 0; x < COUNT(of_norm); x++) {
            const tensor_field *f = &norm_linear_fields[of_norm[x]];
            heddle_norm_linear_data data = norm_linear_data(&p, pass);
            void *const pointer = tensor_pointer(&p.t[N_X]);
            assert_null(p.t[of_norm[x]].host);
            memcpy((char *)&data + f->offset, &pointer, sizeof pointer);
            if (f->need[pass] == NEED_UNUSED)
                continue;
            expect_status(call_linear(&p.a, &data, pass, workspace, ENOUGH), HEDDLE_BAD_COMBINATION, "HEDDLE_NO_NORM");
            expect_status(call_linear(&p.a, &data, pass, workspace, ENOUGH), HEDDLE_BAD_COMBINATION, f->name);
        }
    expect_untouched_linear(&p);
    workspace_free(p.a.device, workspace, ENOUGH);
    norm_linear_free(&p);
}

/* The same of those that end in front of the residual, of z, of what is prepared or of the limit, with all that is in front of it. */
static void check_before(uint64_t features, size_t described, size_t given) {
    norm_linear_case c = linear_case();
    c.a.features = features;
    norm_linear_problem now = norm_linear_new(&c), then = norm_linear_new(&c);
    then.a.size = described;
    memset((char *)&then.a + described, 0xff, sizeof then.a - described);
    void *workspace = workspace_new(now.a.device, ENOUGH);
    for (int pass = 0; pass < 2; pass++) {
        heddle_norm_linear_data data = norm_linear_data(&now, pass), old = norm_linear_data(&then, pass);
        old.size = given;
        for (size_t at = given; at < sizeof old; at += sizeof old.x)
            memcpy((char *)&old + at, &old.x, sizeof old.x);
        expect_status(call_linear(&now.a, &data, pass, workspace, ENOUGH), HEDDLE_OK, "");
        expect_status(call_linear(&then.a, &old, pass, workspace, ENOUGH), HEDDLE_OK, "");
        if (pass == HEDDLE_FORWARD)
            for (int64_t at = 0; at < now.t[N_Y].span; at++) {
                tensor_download(&now.t[N_Y]);
                tensor_download(&then.t[N_Y]);
                assert_true(tensor_raw(&now.t[N_Y], at) == tensor_raw(&then.t[N_Y], at));
            }
    }
    workspace_free(now.a.device, workspace, ENOUGH);
    norm_linear_free(&now);
    norm_linear_free(&then);
}

static void test_before_residuals_and_z(void **state) {
    (void)state;
    check_before(HEDDLE_ACTIVATION, offsetof(heddle_norm_linear, residual_stride),
                 offsetof(heddle_norm_linear_data, residual));
    check_before(HEDDLE_ACTIVATION | HEDDLE_RESIDUAL, offsetof(heddle_norm_linear, z_stride),
                 offsetof(heddle_norm_linear_data, z));
    check_before(HEDDLE_ACTIVATION | HEDDLE_RESIDUAL | HEDDLE_Z, offsetof(heddle_norm_linear, prepared_bytes),
                 offsetof(heddle_norm_linear_data, prepared));
    check_before(HEDDLE_ACTIVATION | HEDDLE_RESIDUAL | HEDDLE_Z, offsetof(heddle_norm_linear, multiprocessors),
                 sizeof(heddle_norm_linear_data));
}

/* Forward does not look at what only backward uses. */
static void test_the_other_pass(void **state) {
    (void)state;
    norm_linear_case c = linear_case();
    norm_linear_problem p = norm_linear_new(&c);
    void *const wrong = (char *)p.t[N_X].host + 1, *workspace = workspace_new(p.a.device, ENOUGH);
    heddle_norm_linear_data data = norm_linear_data(&p, false);
    data.dy = data.dx = data.dgamma = data.dbeta = data.dw = data.dbias = wrong;
    expect_status(call_linear(&p.a, &data, HEDDLE_FORWARD, workspace, ENOUGH), HEDDLE_OK, "");
    workspace_free(p.a.device, workspace, ENOUGH);
    norm_linear_free(&p);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm_linear_descriptor),
        cmocka_unit_test(test_norm_linear_pointers),
        cmocka_unit_test(test_before_activations),
        cmocka_unit_test(test_the_other_pass),
        cmocka_unit_test(test_no_norm),
        cmocka_unit_test(test_before_residuals_and_z),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

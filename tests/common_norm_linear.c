/* SPDX-License-Identifier: Apache-2.0
 * Norm-linear problems: build the tensors that a description asks for, run, compare. */
#include "common.h"

#include "../tools/device_memory.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define DENSE(id, name, ...) #name,
#define STRIDED(id, name, ...) #name,
const char *const norm_linear_tensor_name[N_COUNT] = {
#include "norm_linear_fields.def"
};

heddle_norm_linear norm_linear_desc(heddle_dtype dtype, heddle_norm norm, int64_t m, int64_t k, int64_t n) {
    return (heddle_norm_linear){.size = sizeof(heddle_norm_linear),
                                .dtype = dtype,
                                .device = test_device(),
                                .norm = norm,
                                .m = m,
                                .k = k,
                                .n = n};
}

static void make_tensors(norm_linear_problem *p, uint32_t skip, bool skew) {
    for (int x = 0; x < N_COUNT; x++) {
        const tensor_field *f = &norm_linear_fields[x];
        const bool vector = !f->shape[1];
        const int64_t rows = vector ? 1 : norm_linear_extent(&p->a, f->shape[0]);
        const int64_t last = norm_linear_extent(&p->a, f->shape[!vector]);
        int64_t stride = 0;
        if (f->stride)
            memcpy(&stride, (const char *)&p->a + f->stride, sizeof stride);
        if (!(skip >> x & 1) && norm_linear_has(&p->a, f))
            p->t[x] = tensor_new(p->a.device, element_of(f, p->a.dtype, 0), (int64_t[]){1, 1, rows, last},
                                 (int64_t[]){0, 0, stride ? stride : last, 1}, skew);
    }
}

static void fill_inputs(norm_linear_problem *p, const norm_linear_case *c) {
    rng r = {c->seed * 0x9E3779B97F4A7C15u + 29};
    double w = c->w_magnitude > 0 ? c->w_magnitude : 1 / sqrt((double)p->a.k);
    for (int x = 0; x < N_COUNT; x++)
        if (p->t[x].host && is_input(&norm_linear_fields[x]))
            tensor_fill_normal(&p->t[x], &r, x == N_W ? w : 1);
    tensor *t = &p->t[N_X];
    for (int64_t e = 0; e < p->a.k; e++) {
        double spread = c->scale_spread > 0 && e % 5 == 2 ? c->scale_spread : 1;
        for (int64_t i = 0; i < p->a.m; i++) {
            double row = c->mean * (i % 2 ? -1 : 1) * (i % 3 == 2 ? 0.5 : 1);
            tensor_set(t, 0, 0, i, e, row + spread * tensor_get(t, 0, 0, i, e));
        }
    }
}

static void upload_all(norm_linear_problem *p) {
    for (int x = 0; x < N_COUNT; x++)
        tensor_upload(&p->t[x]);
}

norm_linear_problem norm_linear_new(const norm_linear_case *c) {
    norm_linear_problem p = {.a = c->a};
    p.a.size = sizeof p.a;
    p.a.device = test_device();
    p.a.eps = p.a.eps > 0 || p.a.norm == HEDDLE_NO_NORM ? p.a.eps : 1e-5;
    make_tensors(&p, c->skip, c->seed % 3 == 0);
    fill_inputs(&p, c);
    upload_all(&p);
    return p;
}

norm_linear_problem norm_linear_copy(const norm_linear_problem *p, heddle_dtype dtype, heddle_device device) {
    norm_linear_problem q = {.a = p->a};
    q.a.dtype = dtype;
    q.a.device = device;
    uint32_t skip = 0;
    for (int x = 0; x < N_COUNT; x++)
        skip |= p->t[x].host ? 0 : UINT32_C(1) << x;
    make_tensors(&q, skip, p->t[N_X].guard != 64);
    for (int x = 0; x < N_COUNT; x++)
        if (is_input(&norm_linear_fields[x]) && p->t[x].host)
            tensor_convert(&q.t[x], &p->t[x]);
    upload_all(&q);
    return q;
}

norm_linear_problem norm_linear_borrow(const norm_linear_problem *p) {
    norm_linear_problem q = {.a = p->a};
    q.a.device = HEDDLE_REF;
    for (int x = 0; x < N_COUNT; x++) {
        q.t[x] = p->t[x];
        q.t[x].borrowed = true;
        if (is_output(&norm_linear_fields[x]) && p->t[x].host)
            q.t[x] = tensor_new(HEDDLE_REF, p->t[x].element, p->t[x].dim, p->t[x].stride, p->t[x].guard != 64);
    }
    return q;
}

void norm_linear_free(norm_linear_problem *p) {
    for (int x = 0; x < N_COUNT; x++)
        tensor_free(&p->t[x]);
}

heddle_norm_linear_data norm_linear_data(const norm_linear_problem *p, bool backward) {
    heddle_norm_linear_data data = {.size = sizeof data};
    for (int x = 0; x < N_COUNT; x++) {
        void *pointer = tensor_pointer(&p->t[x]);
        if (norm_linear_fields[x].need[backward] != NEED_UNUSED)
            memcpy((char *)&data + norm_linear_fields[x].offset, &pointer, sizeof pointer);
    }
    if (backward && (!data.mean || !data.rstd))
        data.mean = data.rstd = NULL;
    return data;
}

static bool run_pass(norm_linear_problem *p, heddle_pass pass) {
    const char *side = p->a.device == HEDDLE_REF ? "ref" : "device",
               *name = pass == HEDDLE_FORWARD ? "forward" : "backward";
    size_t bytes = SIZE_MAX;
    heddle_status status = heddle_norm_linear_workspace(&p->a, pass, &bytes);
    if (status != HEDDLE_OK) {
        printf("  %s %s: workspace query: %s: %s\n", side, name, heddle_status_string(status), heddle_last_message());
        return false;
    }
    void *workspace = workspace_new(p->a.device, bytes), *stream = device_memory_stream();
    heddle_norm_linear_data data = norm_linear_data(p, pass == HEDDLE_BACKWARD);
    status = pass == HEDDLE_FORWARD ? heddle_norm_linear_forward(&p->a, &data, workspace, bytes, stream)
                                    : heddle_norm_linear_backward(&p->a, &data, workspace, bytes, stream);
    bool right = status == HEDDLE_OK;
    if (!right)
        printf("  %s %s: %s: %s\n", side, name, heddle_status_string(status), heddle_last_message());
    for (int x = 0; x < N_COUNT; x++)
        tensor_fetch(&p->t[x]); /* which workspace_intact waits for */
    if (!workspace_intact(p->a.device, workspace, bytes)) {
        printf("  %s %s: wrote outside its workspace of %zu bytes\n", side, name, bytes);
        right = false;
    }
    workspace_free(p->a.device, workspace, bytes);
    for (int x = 0; x < N_COUNT; x++) {
        if (!is_output_of(&norm_linear_fields[x], pass) && !tensor_unchanged(&p->t[x])) {
            printf("  %s %s: changed %s, which it does not write\n", side, name, norm_linear_tensor_name[x]);
            right = false;
        }
        if (is_output_of(&norm_linear_fields[x], pass) && !tensor_gaps_unchanged(&p->t[x])) {
            printf("  %s %s: wrote around %s or between its rows\n", side, name, norm_linear_tensor_name[x]);
            right = false;
        }
    }
    for (int x = 0; x < N_COUNT; x++)
        if (is_output_of(&norm_linear_fields[x], pass))
            tensor_accept(&p->t[x]);
    return right;
}

void norm_linear_run(norm_linear_problem *p, heddle_pass pass) {
    assert_true(run_pass(p, pass));
}

/* Is one of p's errors beyond what the plain computation's error alone allows it, or so large beside the tensor that what no order of sums
 * changes has to tell whether the tensor says anything at all? */
static bool is_far(const norm_linear_problem *p, const norm_linear_problem *ref, const norm_linear_problem *plain) {
    for (int x = N_Y; x < N_COUNT; x++) {
        double magnitude;
        if (!p->t[x].host || !is_output(&norm_linear_fields[x]))
            continue;
        const double ours = tensor_error(&p->t[x], &ref->t[x], &magnitude);
        const double theirs = tensor_error(&plain->t[x], &ref->t[x], &magnitude);
        if (ours > 2 * theirs || ours > 0.25 * magnitude)
            return true;
    }
    return false;
}

/* Adds the errors of a case to its bin; the plain computation's sums are those of a BLAS. */
static void count_errors(const norm_linear_problem *p, const norm_linear_problem *ref,
                         const norm_linear_problem *blocked, const double natural[N_COUNT], error_bin bin[N_COUNT]) {
    for (int x = N_Y; x < N_COUNT; x++)
        if (p->t[x].host && is_output(&norm_linear_fields[x]))
            bin_count(&bin[x], &p->t[x], &ref->t[x], &blocked->t[x], natural[x]);
}

/* What the plain computation comes to, as of attention. */
typedef struct plain_results {
    norm_linear_problem worst;
    int orders; /* asked until now, and, last of all, the spread */
    double natural[N_COUNT], slopes[N_COUNT], spread[N_COUNT];
} plain_results;

static void ask_order(const norm_linear_problem *p, const norm_linear_problem *ref, plain_results *plain,
                      error_bin *bin) {
    static const plain_order orders[] = {PLAIN_FORWARD, PLAIN_BLOCKED, PLAIN_REVERSED, PLAIN_ENDS, PLAIN_FORWARD};
    const plain_order order = orders[plain->orders];
    const bool first = plain->orders == 0, last = plain->orders == PLAIN_ORDERS;
    double unused[N_COUNT];
    norm_linear_problem other = norm_linear_borrow(p);
    plain_norm_linear(&other, order, first ? plain->natural : unused, first ? plain->slopes : NULL,
                      last ? plain->spread : NULL);
    plain->orders++;
    if (first) {
        plain->worst = other;
        return;
    }
    if (bin && order == PLAIN_BLOCKED)
        count_errors(p, ref, &other, plain->natural, bin);
    for (int x = N_Y; x < N_COUNT && !last; x++)
        if (p->t[x].host && is_output(&norm_linear_fields[x]))
            tensor_keep_worse(&plain->worst.t[x], &other.t[x], &ref->t[x]);
    norm_linear_free(&other);
}

/* As of attention: only where one of our errors is more than twice those of two orders the others are asked, too. */
static void ask_plain(const norm_linear_problem *p, const norm_linear_problem *ref, plain_results *plain,
                      error_bin *bin) {
    while (plain->orders < 2 || (plain->orders <= PLAIN_ORDERS && is_far(p, ref, &plain->worst)))
        ask_order(p, ref, plain, bin);
}

static bool run_both(norm_linear_problem *p) {
    return run_pass(p, HEDDLE_FORWARD) && run_pass(p, HEDDLE_BACKWARD);
}

/* Of a problem that has been run, by the instruction set that is taken. */
static bool judge_problem(const norm_linear_problem *p, const norm_linear_problem *ref, plain_results *plain,
                          error_bin *bin) {
    bool right = true;
    ask_plain(p, ref, plain, bin);
    for (int x = N_Y; right && x < N_COUNT; x++) {
        if (is_input(&norm_linear_fields[x]))
            continue;
        /* A row of features that are nearly equal loses in x - mean what x is larger than that. */
        const int precision = precision_of(p->a.dtype, p->a.features);
        const double u = precision == PRECISION_TF32 ? 0 : unit_roundoff(precision);
        double size;
        tensor_error(&plain->worst.t[x], &ref->t[x], &size);
        const double slope = plain->slopes[x] > 0 ? plain->slopes[x] / fmax(size, plain->natural[x]) : 0;
        right = compare_tensor(norm_linear_tensor_name[x], precision, &p->t[x], &ref->t[x], &plain->worst.t[x],
                               plain->natural[x], ROUNDINGS * u * plain->spread[x],
                               fmax(fmax(1, plain->natural[N_X]), slope));
    }
    return right;
}

bool norm_linear_judge(const norm_linear_case *c, error_bin bin[N_COUNT]) {
    norm_linear_problem inputs = norm_linear_new(c);
    norm_linear_problem ref = norm_linear_copy(&inputs, HEDDLE_F64, HEDDLE_REF);
    plain_results plain = {.orders = 0};
    bool right = run_both(&ref);
    for (int x = 0; x < test_isas() && right; x++) {
        const char *isa = test_take_isa(x);
        norm_linear_problem copy, *p = &inputs;
        if (x) {
            copy = norm_linear_copy(&inputs, inputs.a.dtype, inputs.a.device);
            p = &copy;
        }
        right = run_both(p) && judge_problem(p, &ref, &plain, bin);
        if (!right && *isa)
            printf("  this was %s\n", isa);
        if (x)
            norm_linear_free(&copy);
    }
    norm_linear_free(&plain.worst);
    norm_linear_free(&ref);
    norm_linear_free(&inputs);
    return right;
}

void norm_linear_count(const norm_linear_case *c, error_bin bin[TEST_ISAS][N_COUNT]) {
    norm_linear_problem inputs = norm_linear_new(c), ref = norm_linear_copy(&inputs, HEDDLE_F64, HEDDLE_REF);
    double natural[N_COUNT], unused[N_COUNT];
    assert_true(run_both(&ref));
    norm_linear_problem plain = norm_linear_borrow(&inputs);
    plain_norm_linear(&plain, PLAIN_FORWARD, natural, NULL, NULL);
    norm_linear_free(&plain);
    plain = norm_linear_borrow(&inputs);
    plain_norm_linear(&plain, PLAIN_BLOCKED, unused, NULL, NULL);
    for (int x = 0; x < test_isas(); x++) {
        test_take_isa(x);
        norm_linear_problem copy, *p = &inputs;
        if (x) {
            copy = norm_linear_copy(&inputs, inputs.a.dtype, inputs.a.device);
            p = &copy;
        }
        assert_true(run_both(p));
        count_errors(p, &ref, &plain, natural, bin[x]);
        if (x)
            norm_linear_free(&copy);
    }
    norm_linear_free(&plain);
    norm_linear_free(&ref);
    norm_linear_free(&inputs);
}

bool norm_linear_is_right(const norm_linear_case *c) {
    return norm_linear_judge(c, NULL);
}

void norm_linear_print(const norm_linear_case *c) {
    static const char *const dtype[] = {"f32", "bf16", "f16", "f64"}, *const norm[] = {"layer", "rms", "none"};
    const heddle_norm_linear *a = &c->a;
    printf("  case: %s %s m %" PRId64 " k %" PRId64 " n %" PRId64 " strides x %" PRId64 " w %" PRId64 " y %" PRId64
           " dy %" PRId64 " dx %" PRId64 " dw %" PRId64 " u %" PRId64 " residual %" PRId64 " z %" PRId64 " dz %" PRId64
           " activation %d features 0x%" PRIx64 " multiprocessors %" PRId64 " mean %g spread %g eps %g seed %" PRIu64
           " skip 0x%x\n",
           dtype[a->dtype & 3], norm[a->norm], a->m, a->k, a->n, a->x_stride, a->w_stride, a->y_stride, a->dy_stride,
           a->dx_stride, a->dw_stride, a->u_stride, a->residual_stride, a->z_stride, a->dz_stride, (int)a->activation,
           a->features, a->multiprocessors, c->mean, c->scale_spread, a->eps, c->seed, (unsigned)c->skip);
}

void check_norm_linear(const norm_linear_case *c) {
    if (norm_linear_is_right(c))
        return;
    norm_linear_print(c);
    fail_msg("norm-linear is wrong, see above");
}

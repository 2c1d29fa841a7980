/* SPDX-License-Identifier: Apache-2.0
 * torch.ops.heddle.norm_linear and norm_linear_backward: tensors to a description and back. */
#include "torch_call.h"

#include "../../src/fields.h"

typedef struct problem {
    heddle_norm_linear a;
    heddle_norm_linear_data t;
    const tensor *x;
} problem;

/* x and dy are [..., last]: rows at one distance, whatever the leading dimensions. False if they have no such distance. */
static bool row_stride(call *c, const tensor *t, const char *name, int64_t *stride) {
    int64_t rows = 1;
    *stride = t->size[t->rank - 1];
    for (int64_t x = t->rank - 1; x-- > 0;) {
        if (t->size[x] == 0) {
            *stride = t->size[t->rank - 1];
            return true;
        }
        if (t->size[x] == 1)
            continue;
        if (rows > 1 && t->stride[x] != *stride * rows)
            return call_fail(c, "ValueError",
                             "the rows of %s do not lie at one distance (dimension %lld has stride "
                             "%lld, not %lld): make it contiguous",
                             name, (long long)x, (long long)t->stride[x], (long long)(*stride * rows));
        if (rows == 1)
            *stride = t->stride[x];
        rows *= t->size[x];
    }
    if (*stride == 0 && rows > 1) /* in the description, 0 means contiguous */
        return call_fail(c, "ValueError", "the rows of %s lie on top of each other (stride 0): make it contiguous",
                         name);
    return true;
}

static bool check_vector(call *c, const tensor *t, const char *name, int64_t size, int32_t dtype) {
    return !t->handle || (call_check_shape(c, t, name, 1, &size) && call_check(c, t, name, dtype));
}

static bool describe(call *c, problem *p, int x, int w, int gamma, int beta) {
    *p = (problem){.a.size = sizeof p->a, .t.size = sizeof p->t, .x = &c->tensor[x]};
    heddle_norm_linear *a = &p->a;
    const tensor *in = c->tensor;
    if (!call_device(c, x, "x"))
        return false;
    if (in[x].rank < 1 || in[x].rank > MAX_RANK)
        return call_fail(c, "ValueError", "x has %lld dimensions, but must have 1 to %d", (long long)in[x].rank,
                         MAX_RANK);
    if (in[w].rank != 2)
        return call_fail(c, "ValueError", "weight has %lld dimensions, but must have 2 ([n, k])",
                         (long long)in[w].rank);
    a->dtype = c->dtype;
    a->device = c->device;
    a->k = in[x].size[in[x].rank - 1];
    a->n = in[w].size[0];
    a->m = 1;
    for (int64_t r = 0; r < in[x].rank - 1; r++)
        a->m *= in[x].size[r];
    if (in[w].size[1] != a->k)
        return call_fail(c, "ValueError", "x has %lld features, but weight is [%lld, %lld]", (long long)a->k,
                         (long long)a->n, (long long)in[w].size[1]);
    if (!call_check(c, &in[x], "x", call_dtype(c)) || !call_check(c, &in[w], "weight", call_dtype(c)) ||
        !check_vector(c, &in[gamma], "gamma", a->k, call_dtype(c)) ||
        !check_vector(c, &in[beta], "beta", a->k, call_dtype(c)) || !row_stride(c, &in[x], "x", &a->x_stride))
        return false;
    a->w_stride = a->n > 1 ? in[w].stride[0] : a->k;
    if (a->w_stride == 0)
        return call_fail(c, "ValueError", "the rows of weight lie on top of each other (stride 0)");
    p->t.x = in[x].data;
    p->t.w = in[w].data;
    p->t.gamma = in[gamma].data;
    p->t.beta = in[beta].data;
    return true;
}

/* What describes the weight alone. */
static bool describe_weight(call *c, problem *p, int w, int gamma, int beta, int bias) {
    *p = (problem){.a.size = sizeof p->a, .t.size = sizeof p->t};
    heddle_norm_linear *a = &p->a;
    const tensor *in = c->tensor;
    if (!call_device(c, w, "weight"))
        return false;
    if (in[w].rank != 2)
        return call_fail(c, "ValueError", "weight has %lld dimensions, but must have 2 ([n, k])",
                         (long long)in[w].rank);
    a->dtype = c->dtype;
    a->device = c->device;
    a->n = in[w].size[0];
    a->k = in[w].size[1];
    a->w_stride = a->n > 1 ? in[w].stride[0] : a->k;
    if (a->w_stride == 0)
        return call_fail(c, "ValueError", "the rows of weight lie on top of each other (stride 0)");
    p->t.w = in[w].data;
    p->t.gamma = in[gamma].data;
    p->t.beta = in[beta].data;
    p->t.bias = in[bias].data;
    return call_check(c, &in[w], "weight", call_dtype(c)) &&
           check_vector(c, &in[gamma], "gamma", a->k, call_dtype(c)) &&
           check_vector(c, &in[beta], "beta", a->k, call_dtype(c)) &&
           check_vector(c, &in[bias], "bias", a->n, call_dtype(c));
}

static bool take_norm(call *c, problem *p, double eps, int64_t norm) {
    if (norm < 0 || norm > LAST_NORM)
        return call_fail(c, "ValueError", "norm = %lld is none of heddle_norm, 0 to %d", (long long)norm, LAST_NORM);
    if (norm != HEDDLE_NO_NORM && !(eps > 0))
        return call_fail(c, "ValueError", "eps = %g is not > 0", eps);
    p->a.norm = (heddle_norm)norm;
    p->a.eps = eps;
    return true;
}

/* What the activation takes of the rows of weight, which `describe` has counted, is n's. */
static bool take_activation(call *c, problem *p, int64_t activation, bool tf32) {
    if (activation < 0 || activation > LAST_ACTIVATION)
        return call_fail(c, "ValueError", "activation = %lld is none of heddle_activation, 0 to %d",
                         (long long)activation, LAST_ACTIVATION);
    p->a.activation = (heddle_activation)activation;
    if (is_gated(p->a.activation) && p->a.n % 2)
        return call_fail(c, "ValueError", "weight has %lld rows, but a gate and what it gates have as many each",
                         (long long)p->a.n);
    p->a.n /= is_gated(p->a.activation) ? 2 : 1;
    p->a.features = (activation ? HEDDLE_ACTIVATION : 0) | (tf32 ? HEDDLE_TF32 : 0);
    return true;
}

/* A contiguous result of x's leading dimensions, and `last` after them unless it is negative. */
static void *make_rows(call *c, const problem *p, int at, int64_t last, int32_t dtype) {
    int64_t size[MAX_RANK], stride[MAX_RANK], rank = p->x->rank - 1;
    for (int64_t r = 0; r < rank; r++)
        size[r] = p->x->size[r];
    if (last >= 0)
        size[rank++] = last;
    contiguous_strides(rank, size, stride);
    return call_make(c, at, rank, size, stride, dtype);
}

/* In the place of a result that there is not. */
static void *make_none(call *c, int at) {
    call_make_empty(c, at);
    return NULL;
}

/* Has an input x's rows, `last` elements in each, and its type? Then the distance of its rows. */
static bool has_rows(call *c, const problem *p, const tensor *t, const char *name, int64_t last, int64_t *stride) {
    int64_t shape[MAX_RANK];
    for (int64_t r = 0; r < p->x->rank - 1; r++)
        shape[r] = p->x->size[r];
    shape[p->x->rank - 1] = last;
    return call_check_shape(c, t, name, p->x->rank, shape) && call_check(c, t, name, call_dtype(c)) &&
           row_stride(c, t, name, stride);
}

/* ---------------------------------------------------------------------------------------------------- forward */

static bool take_residual(call *c, problem *p, const tensor *t) {
    if (!t->handle)
        return true;
    p->a.features |= HEDDLE_RESIDUAL;
    p->t.residual = t->data;
    return has_rows(c, p, t, "residual", p->a.n, &p->a.residual_stride);
}

static bool take_prepared(call *c, problem *p, const tensor *t) {
    if (!t->handle)
        return true;
    p->a.features |= HEDDLE_PREPARED;
    p->a.prepared_bytes = t->rank == 1 ? t->size[0] : -1;
    p->t.prepared = t->data;
    return call_check_shape(c, t, "prepared", 1, t->size) && call_check(c, t, "prepared", aoti_torch_dtype_uint8());
}

void heddle_torch_norm_linear(stable_value *stack, uint64_t arguments, uint64_t results) {
    enum {
        X,
        WEIGHT,
        BIAS,
        GAMMA,
        BETA,
        EPS,
        NORM,
        TF32,
        ACTIVATION,
        KEEP_U,
        RESIDUAL,
        RETURN_NORM,
        PREPARED,
        MULTIPROCESSORS
    };
    enum { Y, MEAN, RSTD, U, Z };
    call c;
    problem p;
    size_t bytes = 0;
    void *workspace;
    call_begin(&c, stack, arguments, results, "TTOOODIBIBOBOI");
    if (describe(&c, &p, X, WEIGHT, GAMMA, BETA) && take_norm(&c, &p, c.number[EPS], c.integer[NORM]) &&
        check_vector(&c, &c.tensor[BIAS], "bias", p.a.n, call_dtype(&c)) &&
        take_activation(&c, &p, c.integer[ACTIVATION], c.integer[TF32]) && take_residual(&c, &p, &c.tensor[RESIDUAL]) &&
        take_prepared(&c, &p, &c.tensor[PREPARED])) {
        p.t.bias = c.tensor[BIAS].data;
        p.a.multiprocessors = c.integer[MULTIPROCESSORS];
        p.a.features |= c.integer[RETURN_NORM] ? HEDDLE_Z : 0;
        p.t.y = make_rows(&c, &p, Y, p.a.n, call_dtype(&c));
        const bool plain = p.a.norm == HEDDLE_NO_NORM, keeps_u = p.a.activation && c.integer[KEEP_U];
        p.t.z = c.integer[RETURN_NORM] ? make_rows(&c, &p, Z, p.a.k, call_dtype(&c)) : make_none(&c, Z);
        p.t.mean = plain ? make_none(&c, MEAN) : make_rows(&c, &p, MEAN, -1, call_real(&c));
        p.t.rstd = plain ? make_none(&c, RSTD) : make_rows(&c, &p, RSTD, -1, call_real(&c));
        p.t.u = keeps_u ? make_rows(&c, &p, U, norm_linear_extent(&p.a, 'N'), call_dtype(&c)) : make_none(&c, U);
        if (!c.message[0] && call_norm_linear_bytes(&c, &p.a, HEDDLE_FORWARD, &bytes) &&
            call_workspace(&c, bytes, &workspace))
            call_status(&c, heddle_norm_linear_forward(&p.a, &p.t, workspace, bytes, c.stream));
    }
    call_end(&c, stack);
}

void heddle_torch_norm_linear_prepare(stable_value *stack, uint64_t arguments, uint64_t results) {
    enum { WEIGHT, BIAS, GAMMA, BETA, NORM, TF32, ACTIVATION, RETURN_NORM };
    call c;
    problem p;
    size_t bytes = 0;
    call_begin(&c, stack, arguments, results, "TOOOIBIB");
    if (describe_weight(&c, &p, WEIGHT, GAMMA, BETA, BIAS) && take_norm(&c, &p, 1, c.integer[NORM]) &&
        take_activation(&c, &p, c.integer[ACTIVATION], c.integer[TF32])) {
        p.a.eps = 0;
        p.a.features |= c.integer[RETURN_NORM] ? HEDDLE_Z : 0;
        if (call_status(&c, heddle_norm_linear_prepared_size(&p.a, &bytes))) {
            const int64_t size = (int64_t)bytes, stride = 1;
            void *prepared = call_make(&c, 0, 1, &size, &stride, aoti_torch_dtype_uint8());
            if (!c.message[0])
                call_status(&c, heddle_norm_linear_prepare(&p.a, &p.t, prepared, bytes, c.stream));
        }
    }
    call_end(&c, stack);
}

/* --------------------------------------------------------------------------------------------------- backward */

enum { NEEDS_DX = 1, NEEDS_DWEIGHT = 2, NEEDS_DBIAS = 4, NEEDS_DGAMMA = 8, NEEDS_DBETA = 16 };
enum {
    B_DY,
    B_MEAN,
    B_RSTD,
    B_X,
    B_WEIGHT,
    B_GAMMA,
    B_BETA,
    B_EPS,
    B_NORM,
    B_DETERMINISTIC,
    B_TF32,
    B_NEEDS,
    B_ACTIVATION,
    B_U,
    B_BIAS, /* not looked at: it is there for derivatives of this operator, as u goes by it */
    B_MULTIPROCESSORS,
    B_DZ
};

static bool take_gradient(call *c, problem *p) {
    const tensor *dy = &c->tensor[B_DY], *u = &c->tensor[B_U];
    if (!has_rows(c, p, dy, "dy", p->a.n, &p->a.dy_stride) ||
        (u->handle && !has_rows(c, p, u, "u", norm_linear_extent(&p->a, 'N'), &p->a.u_stride)))
        return false;
    p->t.dy = dy->data;
    p->t.u = u->data;
    const tensor *dz = &c->tensor[B_DZ];
    if (dz->handle && (!call_check_shape(c, dz, "dz", p->x->rank, p->x->size) ||
                       !call_check(c, dz, "dz", call_dtype(c)) || !row_stride(c, dz, "dz", &p->a.dz_stride)))
        return false;
    p->t.dz = dz->data;
    const char *const names[] = {"mean", "rstd"};
    for (int x = 0; x < 2; x++) {
        const tensor *t = &c->tensor[B_MEAN + x];
        if (!t->handle)
            continue;
        if (!call_check_shape(c, t, names[x], p->x->rank - 1, p->x->size) ||
            !call_check(c, t, names[x], call_real(c)) || !call_check_contiguous(c, t, names[x]))
            return false;
        *(x ? &p->t.rstd : &p->t.mean) = t->data;
    }
    return true;
}

static void backward_results(call *c, problem *p, int64_t needs) {
    const int64_t weight[2] = {norm_linear_extent(&p->a, 'N'), p->a.k}, weight_stride[2] = {p->a.k, 1}, one = 1;
    const int32_t dtype = call_dtype(c);
    p->t.dx = needs & NEEDS_DX ? make_rows(c, p, 0, p->a.k, dtype) : NULL;
    p->t.dw = needs & NEEDS_DWEIGHT ? call_make(c, 1, 2, weight, weight_stride, dtype) : NULL;
    p->t.dbias = needs & NEEDS_DBIAS ? call_make(c, 2, 1, weight, &one, dtype) : NULL;
    p->t.dgamma = needs & NEEDS_DGAMMA ? call_make(c, 3, 1, &p->a.k, &one, dtype) : NULL;
    p->t.dbeta = needs & NEEDS_DBETA ? call_make(c, 4, 1, &p->a.k, &one, dtype) : NULL;
    for (int x = 0; x < 5; x++)
        if (!(needs >> x & 1))
            call_make_none(c, x);
}

void heddle_torch_norm_linear_backward(stable_value *stack, uint64_t arguments, uint64_t results) {
    call c;
    problem p;
    size_t bytes = 0;
    void *workspace;
    call_begin(&c, stack, arguments, results, "TOOTTOODIBBIIOOIO");
    if (describe(&c, &p, B_X, B_WEIGHT, B_GAMMA, B_BETA) && take_norm(&c, &p, c.number[B_EPS], c.integer[B_NORM]) &&
        take_activation(&c, &p, c.integer[B_ACTIVATION], c.integer[B_TF32]) && take_gradient(&c, &p)) {
        p.a.features |= (c.integer[B_DETERMINISTIC] ? HEDDLE_DETERMINISTIC : 0) | (p.t.dz ? HEDDLE_Z : 0);
        p.a.multiprocessors = c.integer[B_MULTIPROCESSORS];
        backward_results(&c, &p, c.integer[B_NEEDS]);
        if (!c.message[0] && call_norm_linear_bytes(&c, &p.a, HEDDLE_BACKWARD, &bytes) &&
            call_workspace(&c, bytes, &workspace))
            call_status(&c, heddle_norm_linear_backward(&p.a, &p.t, workspace, bytes, c.stream));
    }
    call_end(&c, stack);
}

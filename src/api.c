/* SPDX-License-Identifier: Apache-2.0
 * The public functions: validate, plan, run. No arithmetic. */
#include "backend.h"
#include "status.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

int heddle_version(void) {
    return HEDDLE_VERSION;
}

const char *heddle_version_string(void) {
    return TEXT(HEDDLE_VERSION_MAJOR) "." TEXT(HEDDLE_VERSION_MINOR) "." TEXT(HEDDLE_VERSION_PATCH);
}

size_t heddle_dtype_size(heddle_dtype dtype) {
    switch (dtype) {
    case HEDDLE_F32: return 4;
    case HEDDLE_BF16:
    case HEDDLE_F16: return 2;
    case HEDDLE_F64: return 8;
    }
    return 0;
}

/* --------------------------------------------------------------------------------------------------- backends */

static heddle_status find_backend(heddle_device device, const backend **found) {
    switch (device) {
    case HEDDLE_CPU: *found = &heddle_cpu_backend; break;
    case HEDDLE_REF: *found = &heddle_ref_backend; break;
    case HEDDLE_CUDA:
#ifdef HEDDLE_HAVE_CUDA
        *found = &heddle_cuda_backend;
        break;
#else
        fail(HEDDLE_NO_DEVICE, "the cuda backend is not in this build");
        return HEDDLE_NO_DEVICE;
#endif
    default: fail(HEDDLE_BAD_ENUM, "device = %d is no heddle_device (0 to 2)", (int)device); return HEDDLE_BAD_ENUM;
    }
    return HEDDLE_OK;
}

/* A query's status, its reason copied to the caller's text. */
static heddle_status report(heddle_status status, char *why, size_t n) {
    heddle__copy_text(why, n, status == HEDDLE_OK ? "" : heddle_last_message());
    return status;
}

heddle_status heddle_device_available(heddle_device device, char *why, size_t n) {
    const backend *be = NULL;
    heddle_status status = find_backend(device, &be);
    return report(status == HEDDLE_OK ? be->available() : status, why, n);
}

heddle_status heddle_device_describe(heddle_device device, char *text, size_t n) {
    const backend *be = NULL;
    heddle_status status = find_backend(device, &be);
    if (status == HEDDLE_OK)
        status = be->available();
    if (status != HEDDLE_OK)
        return report(status, text, n);
    if (text && n)
        be->describe(text, n);
    return HEDDLE_OK;
}

/* ---------------------------------------------------------------------------------------------- data pointers */

/* What a pointer's elements are, for its alignment, and when it must be there. */
typedef enum element { OF_DTYPE, OF_FLOATS, OF_BYTES, OF_INT32, OF_INT64, ELEMENTS } element;
typedef enum need {
    OPTIONAL,
    ALWAYS,
    WITH_B, /* attention: sequences, queries, keys, scores, no lengths of queries */
    WITH_Q,
    WITH_K,
    WITH_S,
    WITH_SEQLENS,
    WITH_ROWS, /* norm-linear: rows at all, in forward, in backward */
    WITH_OUTPUT,
    WITH_GRADIENT,
    NEEDS
} need;

typedef struct pointer_rule {
    const char *name;
    size_t at; /* in the struct of the data */
    element of;
    need needed;
    uint64_t feature; /* without which it has no use; 0: it always has */
    const char *reason;
} pointer_rule;

/* The pointers of one call: alignments of elements; whether there is anything to point to. */
typedef struct pointer_facts {
    uint64_t features;
    uint8_t alignment[ELEMENTS];
    bool needed[NEEDS];
} pointer_facts;

static heddle_status check_pointers(const pointer_rule *rules, size_t count, const void *data, const pointer_facts *f) {
    for (const pointer_rule *r = rules; r < rules + count; r++) {
        const char *pointer;
        memcpy(&pointer, (const char *)data + r->at, sizeof pointer);
        const bool allowed = !r->feature || (f->features & r->feature);
        const size_t alignment = f->alignment[r->of];
        if (pointer && !allowed)
            return fail(HEDDLE_BAD_COMBINATION, "%s is given, but %s is not set", r->name, r->reason);
        if (!pointer && allowed && f->needed[r->needed])
            return fail(HEDDLE_NULL_POINTER, "%s is NULL", r->name);
        if ((uintptr_t)pointer & (alignment - 1))
            return fail(HEDDLE_MISALIGNED, "%s = %p is not a multiple of its element's %zu bytes", r->name, pointer,
                        alignment);
    }
    return HEDDLE_OK;
}
#define ALIGNMENTS(dtype)                                                                                              \
    { (uint8_t) heddle_dtype_size(dtype), (dtype) == HEDDLE_F64 ? 8 : 4, 1, 4, 8 }
#define CHECK(rules, data, facts) check_pointers(rules, sizeof(rules) / sizeof *(rules), data, facts)

static heddle_status check_data_size(const char *name, const void *data, size_t size, size_t known) {
    if (!data)
        return fail(HEDDLE_NULL_POINTER, "the pointer to %s is NULL", name);
    if (size != known)
        return fail(HEDDLE_BAD_DESCRIPTOR_SIZE, "%s.size = %zu, but this library (%s) knows %zu bytes: %s", name, size,
                    heddle_version_string(), known,
                    size < known ? "was size set to sizeof?" : "it is older than the header you compiled with");
    return HEDDLE_OK;
}

static heddle_status check_workspace(const void *workspace, size_t bytes, size_t needed) {
    if (bytes < needed)
        return fail(HEDDLE_WORKSPACE_TOO_SMALL, "the workspace has %zu bytes, this plan needs %zu", bytes, needed);
    if (needed && !workspace)
        return fail(HEDDLE_NULL_POINTER, "workspace is NULL, this plan needs %zu bytes", needed);
    if (needed && (uintptr_t)workspace % 64)
        return fail(HEDDLE_MISALIGNED, "workspace = %p is not a multiple of 64 bytes", workspace);
    return HEDDLE_OK;
}

#define P(name, of, needed)                                                                                            \
    { #name, offsetof(heddle_attention_data, name), of, needed, 0, "" }
#define WITH(feature, name, of, needed)                                                                                \
    { #name, offsetof(heddle_attention_data, name), of, needed, feature, #feature }
static const pointer_rule attention_inputs[] = {
    P(q, OF_DTYPE, WITH_Q),
    P(k, OF_DTYPE, WITH_K),
    P(v, OF_DTYPE, WITH_K),
    WITH(HEDDLE_ALIBI, alibi_slopes, OF_FLOATS, WITH_B),
    WITH(HEDDLE_BIAS, bias, OF_DTYPE, WITH_S),
    WITH(HEDDLE_BOOL_MASK, bool_mask, OF_BYTES, WITH_S),
    WITH(HEDDLE_SINKS, sinks, OF_FLOATS, WITH_B),
    WITH(HEDDLE_VARLEN, cu_seqlens_q, OF_INT32, WITH_B),
    WITH(HEDDLE_VARLEN, cu_seqlens_k, OF_INT32, WITH_B),
    WITH(HEDDLE_SEQLENS, seqlens_q, OF_INT32, OPTIONAL),
    WITH(HEDDLE_SEQLENS, seqlens_k, OF_INT32, WITH_SEQLENS),
    WITH(HEDDLE_RNG_STATE, rng_state, OF_INT64, ALWAYS),
};
static const pointer_rule attention_forward_pointers[] = {
    P(o, OF_DTYPE, WITH_Q),
    P(lse, OF_FLOATS, OPTIONAL),
    WITH(HEDDLE_WEIGHTS, weights, OF_DTYPE, WITH_S),
};
static const pointer_rule attention_backward_pointers[] = {
    P(o, OF_DTYPE, WITH_Q),
    P(lse, OF_FLOATS, WITH_Q),
    P(dout, OF_DTYPE, OPTIONAL),
    P(dlse, OF_FLOATS, OPTIONAL),
    WITH(HEDDLE_WEIGHTS, dweights, OF_DTYPE, OPTIONAL),
    P(dq, OF_DTYPE, OPTIONAL),
    P(dk, OF_DTYPE, OPTIONAL),
    P(dv, OF_DTYPE, OPTIONAL),
    WITH(HEDDLE_BIAS, dbias, OF_DTYPE, OPTIONAL),
    WITH(HEDDLE_SINKS, dsinks, OF_FLOATS, OPTIONAL),
};
#undef P
#undef WITH

static heddle_status check_attention_data(const attention_plan *plan, const heddle_attention_data *t) {
    const heddle_attention *a = &plan->a;
    const bool varlen = a->features & HEDDLE_VARLEN, any = a->b > 0;
    const pointer_facts facts = {
        .features = a->features,
        .alignment = ALIGNMENTS(a->dtype),
        .needed = {[WITH_B] = any,
                   [WITH_Q] = any && (varlen ? a->total_q : a->sq) > 0,
                   [WITH_K] = any && (varlen ? a->total_k : a->sk) > 0,
                   [WITH_S] = any && a->sq > 0 && a->sk > 0,
                   [WITH_SEQLENS] = any && !t->seqlens_q,
                   [ALWAYS] = true},
    };
    TRY(CHECK(attention_inputs, t, &facts));
    return plan->pass == HEDDLE_FORWARD ? CHECK(attention_forward_pointers, t, &facts)
                                        : CHECK(attention_backward_pointers, t, &facts);
}

#define P(name, of, needed)                                                                                            \
    { #name, offsetof(heddle_norm_linear_data, name), of, needed, 0, "" }
static const pointer_rule norm_linear_pointers[] = {
    P(x, OF_DTYPE, WITH_ROWS),    P(gamma, OF_DTYPE, OPTIONAL),  P(beta, OF_DTYPE, OPTIONAL),
    P(w, OF_DTYPE, ALWAYS),       P(bias, OF_DTYPE, OPTIONAL),   P(y, OF_DTYPE, WITH_OUTPUT),
    P(mean, OF_FLOATS, OPTIONAL), P(rstd, OF_FLOATS, OPTIONAL),  P(dy, OF_DTYPE, WITH_GRADIENT),
    P(dx, OF_DTYPE, OPTIONAL),    P(dgamma, OF_DTYPE, OPTIONAL), P(dbeta, OF_DTYPE, OPTIONAL),
    P(dw, OF_DTYPE, OPTIONAL),    P(dbias, OF_DTYPE, OPTIONAL),
};
#undef P

static heddle_status check_norm_linear_data(const norm_linear_plan *plan, const heddle_norm_linear_data *t) {
    const heddle_norm_linear *a = &plan->a;
    const bool backward = plan->pass == HEDDLE_BACKWARD, rows = a->m > 0;
    const pointer_facts facts = {
        .alignment = ALIGNMENTS(a->dtype),
        .needed = {[WITH_ROWS] = rows,
                   [WITH_OUTPUT] = rows && !backward,
                   [WITH_GRADIENT] = rows && backward,
                   [ALWAYS] = true},
    };
    TRY(CHECK(norm_linear_pointers, t, &facts));
    if (backward && !t->mean != !t->rstd)
        return fail(HEDDLE_BAD_COMBINATION, "%s is given without %s: backward takes both or neither",
                    t->mean ? "mean" : "rstd", t->mean ? "rstd" : "mean");
    return HEDDLE_OK;
}

/* -------------------------------------------------------------------------------------------------- attention */

static heddle_status make_attention_plan(const heddle_attention *desc, heddle_pass pass, attention_plan *plan,
                                         const backend **be) {
    TRY(heddle__resolve_attention(desc, pass, plan));
    TRY(find_backend(plan->a.device, be));
    return (*be)->plan_attention(plan);
}

static heddle_status run_attention(const heddle_attention *desc, const heddle_attention_data *data, void *workspace,
                                   size_t workspace_bytes, void *stream, heddle_pass pass) {
    attention_plan plan;
    const backend *be = NULL;
    TRY(make_attention_plan(desc, pass, &plan, &be));
    TRY(check_data_size("heddle_attention_data", data, data ? data->size : 0, sizeof *data));
    TRY(check_attention_data(&plan, data));
    TRY(check_workspace(workspace, workspace_bytes, plan.workspace));
    return be->run_attention(&plan, data, workspace, stream);
}

heddle_status heddle_attention_forward(const heddle_attention *desc, const heddle_attention_data *data, void *workspace,
                                       size_t workspace_bytes, void *stream) {
    return run_attention(desc, data, workspace, workspace_bytes, stream, HEDDLE_FORWARD);
}

heddle_status heddle_attention_backward(const heddle_attention *desc, const heddle_attention_data *data,
                                        void *workspace, size_t workspace_bytes, void *stream) {
    return run_attention(desc, data, workspace, workspace_bytes, stream, HEDDLE_BACKWARD);
}

heddle_status heddle_attention_supported(const heddle_attention *desc, char *why, size_t n) {
    attention_plan plan;
    const backend *be = NULL;
    heddle_status status = make_attention_plan(desc, HEDDLE_FORWARD, &plan, &be);
    if (status == HEDDLE_OK)
        status = make_attention_plan(desc, HEDDLE_BACKWARD, &plan, &be);
    return report(status, why, n);
}

heddle_status heddle_attention_workspace(const heddle_attention *desc, heddle_pass pass, size_t *bytes) {
    attention_plan plan;
    const backend *be = NULL;
    if (!bytes)
        return fail(HEDDLE_NULL_POINTER, "the pointer to bytes is NULL");
    TRY(make_attention_plan(desc, pass, &plan, &be));
    *bytes = plan.workspace;
    return HEDDLE_OK;
}

heddle_status heddle_attention_kernel(const heddle_attention *desc, heddle_pass pass, char *name, size_t n) {
    attention_plan plan;
    const backend *be = NULL;
    heddle_status status = make_attention_plan(desc, pass, &plan, &be);
    if (status != HEDDLE_OK)
        return report(status, name, n);
    heddle__copy_text(name, n, plan.kernel);
    return HEDDLE_OK;
}

/* ------------------------------------------------------------------------------------------------ norm-linear */

static heddle_status make_norm_linear_plan(const heddle_norm_linear *desc, heddle_pass pass, norm_linear_plan *plan,
                                           const backend **be) {
    TRY(heddle__resolve_norm_linear(desc, pass, plan));
    TRY(find_backend(plan->a.device, be));
    return (*be)->plan_norm_linear(plan);
}

static heddle_status run_norm_linear(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                     void *workspace, size_t workspace_bytes, void *stream, heddle_pass pass) {
    norm_linear_plan plan;
    const backend *be = NULL;
    TRY(make_norm_linear_plan(desc, pass, &plan, &be));
    TRY(check_data_size("heddle_norm_linear_data", data, data ? data->size : 0, sizeof *data));
    TRY(check_norm_linear_data(&plan, data));
    TRY(check_workspace(workspace, workspace_bytes, plan.workspace));
    return be->run_norm_linear(&plan, data, workspace, stream);
}

heddle_status heddle_norm_linear_forward(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                         void *workspace, size_t workspace_bytes, void *stream) {
    return run_norm_linear(desc, data, workspace, workspace_bytes, stream, HEDDLE_FORWARD);
}

heddle_status heddle_norm_linear_backward(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                          void *workspace, size_t workspace_bytes, void *stream) {
    return run_norm_linear(desc, data, workspace, workspace_bytes, stream, HEDDLE_BACKWARD);
}

heddle_status heddle_norm_linear_supported(const heddle_norm_linear *desc, char *why, size_t n) {
    norm_linear_plan plan;
    const backend *be = NULL;
    heddle_status status = make_norm_linear_plan(desc, HEDDLE_FORWARD, &plan, &be);
    if (status == HEDDLE_OK)
        status = make_norm_linear_plan(desc, HEDDLE_BACKWARD, &plan, &be);
    return report(status, why, n);
}

heddle_status heddle_norm_linear_workspace(const heddle_norm_linear *desc, heddle_pass pass, size_t *bytes) {
    norm_linear_plan plan;
    const backend *be = NULL;
    if (!bytes)
        return fail(HEDDLE_NULL_POINTER, "the pointer to bytes is NULL");
    TRY(make_norm_linear_plan(desc, pass, &plan, &be));
    *bytes = plan.workspace;
    return HEDDLE_OK;
}

heddle_status heddle_norm_linear_kernel(const heddle_norm_linear *desc, heddle_pass pass, char *name, size_t n) {
    norm_linear_plan plan;
    const backend *be = NULL;
    heddle_status status = make_norm_linear_plan(desc, pass, &plan, &be);
    if (status != HEDDLE_OK)
        return report(status, name, n);
    heddle__copy_text(name, n, plan.kernel);
    return HEDDLE_OK;
}

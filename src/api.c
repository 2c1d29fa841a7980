/* SPDX-License-Identifier: Apache-2.0
 * The public functions: validate, plan, run. No arithmetic. */
#include "backend.h"
#include "status.h"

#include <stdbool.h>
#include <stdio.h>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

#define FORWARD_OK(call)                                                                                               \
    do {                                                                                                               \
        heddle_status status_ = (call);                                                                                \
        if (status_ != HEDDLE_OK)                                                                                      \
            return status_;                                                                                            \
    } while (0)

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

typedef struct pointer_rule {
    const char *name;
    const void *pointer;
    bool allowed;     /* the features have a use for it */
    bool required;    /* given that the tensor has elements */
    size_t alignment; /* of an element */
    const char *reason;
} pointer_rule;

static heddle_status check_pointers(const pointer_rule *rules, size_t count) {
    for (const pointer_rule *r = rules; r < rules + count; r++) {
        if (r->pointer && !r->allowed)
            return fail(HEDDLE_BAD_COMBINATION, "%s is given, but %s", r->name, r->reason);
        if (!r->pointer && r->allowed && r->required)
            return fail(HEDDLE_NULL_POINTER, "%s is NULL", r->name);
        if ((uintptr_t)r->pointer % r->alignment)
            return fail(HEDDLE_MISALIGNED, "%s = %p is not a multiple of its element's %zu bytes", r->name, r->pointer,
                        r->alignment);
    }
    return HEDDLE_OK;
}

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

static heddle_status check_attention_inputs(const attention_plan *plan, const heddle_attention_data *t) {
    const heddle_attention *a = &plan->a;
    const uint64_t f = a->features;
    const bool varlen = f & HEDDLE_VARLEN;
    const size_t e = heddle_dtype_size(a->dtype), r = a->dtype == HEDDLE_F64 ? 8 : 4;
    const bool any = a->b > 0, has_q = any && (varlen ? a->total_q : a->sq) > 0;
    const bool has_k = any && (varlen ? a->total_k : a->sk) > 0, has_s = any && a->sq > 0 && a->sk > 0;
    const pointer_rule rules[] = {
        {"q", t->q, true, has_q, e, ""},
        {"k", t->k, true, has_k, e, ""},
        {"v", t->v, true, has_k, e, ""},
        {"alibi_slopes", t->alibi_slopes, f & HEDDLE_ALIBI, any, r, "HEDDLE_ALIBI is not set"},
        {"bias", t->bias, f & HEDDLE_BIAS, has_s, e, "HEDDLE_BIAS is not set"},
        {"bool_mask", t->bool_mask, f & HEDDLE_BOOL_MASK, has_s, 1, "HEDDLE_BOOL_MASK is not set"},
        {"sinks", t->sinks, f & HEDDLE_SINKS, any, r, "HEDDLE_SINKS is not set"},
        {"cu_seqlens_q", t->cu_seqlens_q, varlen, any, 4, "HEDDLE_VARLEN is not set"},
        {"cu_seqlens_k", t->cu_seqlens_k, varlen, any, 4, "HEDDLE_VARLEN is not set"},
        {"seqlens_q", t->seqlens_q, f & HEDDLE_SEQLENS, false, 4, "HEDDLE_SEQLENS is not set"},
        {"seqlens_k", t->seqlens_k, f & HEDDLE_SEQLENS, any && !t->seqlens_q, 4, "HEDDLE_SEQLENS is not set"},
        {"rng_state", t->rng_state, f & HEDDLE_RNG_STATE, true, 8, "HEDDLE_RNG_STATE is not set"},
    };
    return check_pointers(rules, sizeof rules / sizeof *rules);
}

static heddle_status check_attention_outputs(const attention_plan *plan, const heddle_attention_data *t) {
    const heddle_attention *a = &plan->a;
    const bool varlen = a->features & HEDDLE_VARLEN, weights = a->features & HEDDLE_WEIGHTS;
    const bool backward = plan->pass == HEDDLE_BACKWARD;
    const size_t e = heddle_dtype_size(a->dtype), r = a->dtype == HEDDLE_F64 ? 8 : 4;
    const bool has_q = a->b > 0 && (varlen ? a->total_q : a->sq) > 0, has_s = a->b > 0 && a->sq > 0 && a->sk > 0;
    if (!backward) {
        const pointer_rule rules[] = {
            {"o", t->o, true, has_q, e, ""},
            {"lse", t->lse, true, false, r, ""},
            {"weights", t->weights, weights, has_s, e, "HEDDLE_WEIGHTS is not set"},
        };
        return check_pointers(rules, sizeof rules / sizeof *rules);
    }
    const pointer_rule rules[] = {
        {"o", t->o, true, has_q, e, ""},
        {"lse", t->lse, true, has_q, r, ""},
        {"dout", t->dout, true, false, e, ""},
        {"dlse", t->dlse, true, false, r, ""},
        {"dweights", t->dweights, weights, false, e, "HEDDLE_WEIGHTS is not set"},
        {"dq", t->dq, true, false, e, ""},
        {"dk", t->dk, true, false, e, ""},
        {"dv", t->dv, true, false, e, ""},
        {"dbias", t->dbias, a->features & HEDDLE_BIAS, false, e, "HEDDLE_BIAS is not set"},
        {"dsinks", t->dsinks, a->features & HEDDLE_SINKS, false, r, "HEDDLE_SINKS is not set"},
    };
    return check_pointers(rules, sizeof rules / sizeof *rules);
}

static heddle_status check_norm_linear_data(const norm_linear_plan *plan, const heddle_norm_linear_data *t) {
    const heddle_norm_linear *a = &plan->a;
    const size_t e = heddle_dtype_size(a->dtype), r = a->dtype == HEDDLE_F64 ? 8 : 4;
    const bool backward = plan->pass == HEDDLE_BACKWARD, rows = a->m > 0;
    const pointer_rule rules[] = {
        {"x", t->x, true, rows, e, ""},
        {"gamma", t->gamma, true, false, e, ""},
        {"beta", t->beta, true, false, e, ""},
        {"w", t->w, true, true, e, ""},
        {"bias", t->bias, true, false, e, ""},
        {"y", t->y, true, rows && !backward, e, ""},
        {"mean", t->mean, true, false, r, ""},
        {"rstd", t->rstd, true, false, r, ""},
        {"dy", t->dy, true, rows && backward, e, ""},
        {"dx", t->dx, true, false, e, ""},
        {"dgamma", t->dgamma, true, false, e, ""},
        {"dbeta", t->dbeta, true, false, e, ""},
        {"dw", t->dw, true, false, e, ""},
        {"dbias", t->dbias, true, false, e, ""},
    };
    FORWARD_OK(check_pointers(rules, sizeof rules / sizeof *rules));
    if (backward && !t->mean != !t->rstd)
        return fail(HEDDLE_BAD_COMBINATION, "%s is given without %s: backward takes both or neither",
                    t->mean ? "mean" : "rstd", t->mean ? "rstd" : "mean");
    return HEDDLE_OK;
}

/* -------------------------------------------------------------------------------------------------- attention */

static heddle_status make_attention_plan(const heddle_attention *desc, heddle_pass pass, attention_plan *plan,
                                         const backend **be) {
    FORWARD_OK(heddle__resolve_attention(desc, pass, plan));
    FORWARD_OK(find_backend(plan->a.device, be));
    return (*be)->plan_attention(plan);
}

static heddle_status run_attention(const heddle_attention *desc, const heddle_attention_data *data, void *workspace,
                                   size_t workspace_bytes, void *stream, heddle_pass pass) {
    attention_plan plan;
    const backend *be = NULL;
    FORWARD_OK(make_attention_plan(desc, pass, &plan, &be));
    FORWARD_OK(check_data_size("heddle_attention_data", data, data ? data->size : 0, sizeof *data));
    FORWARD_OK(check_attention_inputs(&plan, data));
    FORWARD_OK(check_attention_outputs(&plan, data));
    FORWARD_OK(check_workspace(workspace, workspace_bytes, plan.workspace));
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
    FORWARD_OK(make_attention_plan(desc, pass, &plan, &be));
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
    FORWARD_OK(heddle__resolve_norm_linear(desc, pass, plan));
    FORWARD_OK(find_backend(plan->a.device, be));
    return (*be)->plan_norm_linear(plan);
}

static heddle_status run_norm_linear(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                     void *workspace, size_t workspace_bytes, void *stream, heddle_pass pass) {
    norm_linear_plan plan;
    const backend *be = NULL;
    FORWARD_OK(make_norm_linear_plan(desc, pass, &plan, &be));
    FORWARD_OK(check_data_size("heddle_norm_linear_data", data, data ? data->size : 0, sizeof *data));
    FORWARD_OK(check_norm_linear_data(&plan, data));
    FORWARD_OK(check_workspace(workspace, workspace_bytes, plan.workspace));
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
    FORWARD_OK(make_norm_linear_plan(desc, pass, &plan, &be));
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

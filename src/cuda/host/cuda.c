/* SPDX-License-Identifier: Apache-2.0
 * The CUDA backend: plans for the current device, pointers and streams checked, launches. No call synchronises or allocates, so that CUDA
 * graphs can capture them. */
#include "backend.h"
#include "cuda/attention/append.h"
#include "cuda/attention/attention.h"
#include "cuda/attention/merge.h"
#include "cuda/host/launch.h"
#include "cuda/norm_linear/norm_linear.h"
#include "fields.h"
#include "status.h"
#include "tokens.h"

#include <stdio.h>
#include <string.h>

/* ---------------------------------------------------------------------------------------------------- pointers */

static atomic_uint_least64_t *known_block(device_record *r, const void *p, uint64_t *block) {
    *block = ((uint64_t)(uintptr_t)p >> 21) + 1;
    return &r->known[(*block ^ *block >> 8) % KNOWN_BLOCKS];
}

/* Every pointer must be memory of this device (or managed memory); the host's would fault in the kernel. */
static heddle_status ask_for_pointer(const cuda_driver *cu, device_record *r, const char *name, const void *p) {
    int attributes[] = {CU_POINTER_MEMORY_TYPE, CU_POINTER_DEVICE_ORDINAL};
    unsigned type = 0;
    int ordinal = -1;
    void *values[] = {&type, &ordinal};
    cu_result error = cu->cuPointerGetAttributes(2, attributes, values, (uintptr_t)p);
    if (error != CU_SUCCESS)
        return heddle__cuda_fail(cu, r->name, "cuPointerGetAttributes", error);
    if (type == 0 || type == CU_MEMORY_TYPE_HOST)
        return fail(HEDDLE_WRONG_DEVICE, "%s = %p is host memory, not memory of %s", name, p, r->name);
    if (ordinal != r->ordinal)
        return fail(HEDDLE_WRONG_DEVICE, "%s = %p is memory of device %d, the current context is on %s", name, p,
                    ordinal, r->name);
    uint64_t block;
    atomic_uint_least64_t *known = known_block(r, p, &block);
    atomic_store_explicit(known, block, memory_order_relaxed);
    return HEDDLE_OK;
}

/* Addresses that are freed may come back as another device's: what was seen before holds only where there is no other. */
static heddle_status check_pointer(const cuda_driver *cu, device_record *r, const char *name, const void *p) {
    uint64_t block;
    const atomic_uint_least64_t *known = known_block(r, p, &block);
    if (!p || (cu->devices == 1 && atomic_load_explicit(known, memory_order_relaxed) == block))
        return HEDDLE_OK;
    return ask_for_pointer(cu, r, name, p);
}

/* All that the pass looks at. */
static heddle_status check_pointers(const cuda_driver *cu, device_record *r, const tensor_field *fields,
                                    heddle_pass pass, const void *data, const char *workspace_name,
                                    const void *workspace) {
    for (const tensor_field *t = fields; t->name; t++) {
        const void *p;
        memcpy(&p, (const char *)data + t->offset, sizeof p);
        heddle_status status = t->need[pass] == NEED_UNUSED ? HEDDLE_OK : check_pointer(cu, r, t->name, p);
        if (status != HEDDLE_OK)
            return status;
    }
    return check_pointer(cu, r, workspace_name, workspace);
}

/* The default streams (NULL, 1 and 2) belong to every context. */
static heddle_status check_stream(const cuda_driver *cu, const device_record *r, cu_context current, void *stream) {
    if ((uintptr_t)stream <= 2)
        return HEDDLE_OK;
    cu_context of = NULL;
    cu_result error = cu->cuStreamGetCtx(stream, &of);
    if (error == CU_ERROR_INVALID_HANDLE || error == CU_ERROR_INVALID_CONTEXT)
        return heddle__cuda_fail(cu, r->name, "cuStreamGetCtx", error);
    if (error == CU_SUCCESS && of != current)
        return fail(HEDDLE_WRONG_DEVICE, "%s: stream = %p belongs to another context than the current one", r->name,
                    stream);
    return HEDDLE_OK;
}

/* ------------------------------------------------------------------------------------------------ the backend */

static heddle_status available(void) {
    const cuda_driver *cu = NULL;
    device_record *r = NULL;
    cu_context context = NULL;
    return heddle__cuda_current_device(&cu, &r, &context);
}

static void describe(char *text, size_t n) {
    const cuda_driver *cu = NULL;
    device_record *r = NULL;
    cu_context context = NULL;
    if (heddle__cuda_current_device(&cu, &r, &context) == HEDDLE_OK)
        snprintf(text, n, "%s, %d multiprocessors, driver for CUDA %d.%d, %s%s kernels%s", r->name, r->multiprocessors,
                 cu->version / 1000, cu->version % 1000 / 10, r->small == SMALL_NEVER ? "" : "small, ",
                 r->sm90 ? "sm90 and sm80" : "sm80", r->note);
}

/* The current device, and what a plan must know of it. */
static heddle_status find_device(device_record **r, cu_context *context, cuda_facts *facts) {
    const cuda_driver *cu = NULL;
    heddle_status status = heddle__cuda_current_device(&cu, r, context);
    if (status == HEDDLE_OK)
        *facts = heddle__cuda_facts_of(*r);
    return status;
}

static heddle_status plan_attention(attention_plan *plan) {
    device_record *r = NULL;
    cu_context context = NULL;
    cuda_facts facts;
    heddle_status status = find_device(&r, &context, &facts);
    if (status != HEDDLE_OK)
        return status;
    status = heddle__cuda_plan_attention(plan, &facts);
    heddle__cuda_set_attention_device(plan, r, context);
    return status;
}

static heddle_status plan_norm_linear(norm_linear_plan *plan) {
    device_record *r = NULL;
    cu_context context = NULL;
    cuda_facts facts;
    heddle_status status = find_device(&r, &context, &facts);
    if (status != HEDDLE_OK)
        return status;
    status = heddle__cuda_plan_norm_linear(plan, &facts);
    heddle__cuda_set_norm_linear_device(plan, r, context);
    return status;
}

/* What the launches of a pass need beside its plan. */
typedef struct cuda_call {
    const cuda_driver *cu;
    device_record *r;
    cu_context context;
    const void *data;           /* of the operation, */
    const tensor_field *fields; /* and what is in it */
    void *workspace, *stream;
    const char *workspace_name;
} cuda_call;

static heddle_status launch_attention(const cuda_call *c, const void *planned) {
    const attention_plan *plan = planned;
    const cuda_facts facts = heddle__cuda_facts_of(c->r);
    attention_job job;
    heddle__cuda_attention_job(plan, &facts, c->data, c->workspace, &job);
    tensor_map *const maps[] = {&job.params.q, &job.params.k, &job.params.v, &job.params.dout, &job.params.bias};
    heddle_status status = HEDDLE_OK;
    if (job.count)
        status = heddle__cuda_encode_maps(c->cu, c->r, plan->a.dtype, 4, job.maps, job.shapes, maps);
    for (int x = 0; x < job.count && status == HEDDLE_OK; x++) {
        const attention_launch *l = &job.launches[x];
        const void *const params = l->collects ? (const void *)&job.collect
                                   : l->sm90   ? (const void *)&job.params
                                               : &job.params.p;
        status = heddle__cuda_launch(c->cu, c->r, l->kernel, l->grid, l->shared_bytes, params, c->stream);
    }
    return status;
}

static heddle_status launch_in_order(const cuda_call *c, const norm_linear_plan *plan, norm_linear_launch *launches,
                                     int n) {
    heddle_status status = HEDDLE_OK;
    for (int x = 0; x < n && status == HEDDLE_OK; x++) {
        norm_linear_launch *l = &launches[x];
        norm_gemm_sm90 *const g = &l->params.gemm90;
        tensor_map *const maps[] = {&g->a, &g->b, &g->out, &g->u};
        if (l->sm90)
            status = heddle__cuda_encode_maps(c->cu, c->r, plan->a.dtype, 2, 4, l->shapes, maps);
        if (status == HEDDLE_OK)
            status = heddle__cuda_launch(c->cu, c->r, l->kernel, l->grid, l->shared, &l->params, c->stream);
    }
    return status;
}

static heddle_status launch_norm_linear(const cuda_call *c, const void *planned) {
    const norm_linear_plan *plan = planned;
    const cuda_facts facts = heddle__cuda_facts_of(c->r);
    norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES];
    return launch_in_order(c, plan, launches,
                           heddle__cuda_norm_linear_launches(plan, &facts, c->data, c->workspace, launches));
}

/* What is prepared lies where other calls have their workspace. */
static heddle_status launch_prepare(const cuda_call *c, const void *planned) {
    const norm_linear_plan *plan = planned;
    const cuda_facts facts = heddle__cuda_facts_of(c->r);
    norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES];
    return launch_in_order(c, plan, launches,
                           heddle__cuda_prepare_launches(plan, &facts, c->data, c->workspace, launches));
}

/* The checks of a call, and its launches. Where the caller has no context, the primary one is entered, and left again at the end. */
static heddle_status run(cuda_call *c, cu_context planned, heddle_pass pass, const void *plan,
                         heddle_status (*launch)(const cuda_call *c, const void *plan)) {
    heddle_status status = HEDDLE_OK;
    cu_context left;
    c->context = planned;
    if (!c->cu) /* it was there when the plan was made */
        return HEDDLE_NO_DEVICE;
    if (!planned)
        status = heddle__cuda_enter_primary(c->cu, c->r, &c->context);
    if (status != HEDDLE_OK)
        return status;
    status = check_pointers(c->cu, c->r, c->fields, pass, c->data, c->workspace_name, c->workspace);
    if (status == HEDDLE_OK)
        status = check_stream(c->cu, c->r, c->context, c->stream);
    if (status == HEDDLE_OK)
        status = launch(c, plan);
    if (!planned)
        c->cu->cuCtxPopCurrent_v2(&left);
    return status;
}

static heddle_status run_attention(const attention_plan *plan, const heddle_attention_data *data, void *workspace,
                                   void *stream) {
    cuda_call c = {heddle__cuda_driver(), NULL, NULL, data, attention_fields, workspace, stream, "workspace"};
    void *context = NULL;
    c.r = heddle__cuda_attention_device(plan, &context);
    return run(&c, context, plan->pass, plan, launch_attention);
}

static heddle_status run_norm_linear(const norm_linear_plan *plan, const heddle_norm_linear_data *data, void *workspace,
                                     void *stream) {
    cuda_call c = {heddle__cuda_driver(), NULL, NULL, data, norm_linear_fields, workspace, stream, "workspace"};
    void *context = NULL;
    c.r = heddle__cuda_norm_linear_device(plan, &context);
    return run(&c, context, plan->pass, plan, launch_norm_linear);
}

static heddle_status prepare_norm_linear(const norm_linear_plan *plan, const heddle_norm_linear_data *data,
                                         void *prepared, void *stream) {
    cuda_call c = {heddle__cuda_driver(), NULL, NULL, data, norm_linear_fields, prepared, stream, "prepared"};
    void *context = NULL;
    c.r = heddle__cuda_norm_linear_device(plan, &context);
    return run(&c, context, HEDDLE_FORWARD, plan, launch_prepare);
}

/* ------------------------------------------------------------------------------------------- merge and append */

/* Enters a context as `run` does, checks the stream, and launches. */
static heddle_status run_alone(heddle_status (*launch)(const cuda_driver *cu, device_record *r, const void *params,
                                                       void *stream),
                               const void *params, void *stream) {
    const cuda_driver *cu = NULL;
    device_record *r = NULL;
    cu_context found = NULL, context = NULL, left;
    heddle_status status = heddle__cuda_current_device(&cu, &r, &found);
    if (status != HEDDLE_OK)
        return status;
    context = found;
    if (!found)
        status = heddle__cuda_enter_primary(cu, r, &context);
    if (status != HEDDLE_OK)
        return status;
    status = check_stream(cu, r, context, stream);
    if (status == HEDDLE_OK)
        status = launch(cu, r, params, stream);
    if (!found)
        cu->cuCtxPopCurrent_v2(&left);
    return status;
}

static heddle_status check_all_pointers(const cuda_driver *cu, device_record *r, int count, const char *const *names,
                                        const void *const *pointers) {
    heddle_status status = HEDDLE_OK;
    for (int x = 0; x < count && status == HEDDLE_OK; x++)
        status = check_pointer(cu, r, names[x], pointers[x]);
    return status;
}

/* May a tensor be read `unit` elements of so many bytes, or 16 bytes of them, at a time? */
static bool is_in_units(const void *p, heddle_strides s, int64_t last, size_t size, int64_t unit) {
    const size_t bytes = (size_t)unit * size;
    return (uintptr_t)p % (bytes < 16 ? bytes : 16) == 0 && (s.b | s.h | s.s | last) % unit == 0;
}

static heddle_status launch_merge(const cuda_driver *cu, device_record *r, const void *params, void *stream) {
    static const enum cuda_kernel kernels[] = {[HEDDLE_F32] = ATTENTION_merge_f32_d512_plain_sm80,
                                               [HEDDLE_BF16] = ATTENTION_merge_bf16_d512_plain_sm80,
                                               [HEDDLE_F16] = ATTENTION_merge_f16_d512_plain_sm80};
    const merge_params *p = params;
    const void *const pointers[] = {p->o, p->lse, p->other_o, p->other_lse};
    static const char *const names[] = {"o", "lse", "other_o", "other_lse"};
    const int64_t each = MERGE_WARPS * MERGE_ROWS, blocks = (p->rows + each - 1) / each;
    if (blocks > INT32_MAX)
        return fail(HEDDLE_UNSUPPORTED, "b·h·s = %lld: over 2^31 blocks of %lld rows", (long long)p->rows,
                    (long long)each);
    heddle_status status = check_all_pointers(cu, r, 4, names, pointers);
    if (status == HEDDLE_OK)
        status = heddle__cuda_launch(cu, r, kernels[p->m.dtype], (uint32_t)blocks, 0, p, stream);
    return status;
}

static heddle_status merge(const heddle_merge *m, void *o, void *lse, const void *other_o, const void *other_lse,
                           void *stream) {
    const merge_params p = {*m,
                            o,
                            lse,
                            other_o,
                            other_lse,
                            m->b * m->h * m->s,
                            is_in_units(o, m->o_stride, m->dv, sizeof(float), 4) &&
                                is_in_units(other_o, m->other_stride, m->dv, heddle_dtype_size(m->dtype), 4)};
    return p.rows == 0 ? available() : run_alone(launch_merge, &p, stream);
}

static heddle_status launch_append(const cuda_driver *cu, device_record *r, const void *params, void *stream) {
    static const enum cuda_kernel kernels[][2] = {
        [HEDDLE_F32] = {ATTENTION_append_f32_d512_plain_sm80, ATTENTION_append_f32_d512_bytes_sm80},
        [HEDDLE_BF16] = {ATTENTION_append_bf16_d512_plain_sm80, ATTENTION_append_bf16_d512_bytes_sm80},
        [HEDDLE_F16] = {ATTENTION_append_f16_d512_plain_sm80, ATTENTION_append_f16_d512_bytes_sm80}};
    const append_params *p = params;
    const heddle_append_data *t = &p->t;
    const void *const pointers[] = {t->k_new,       t->v_new,       t->k,           t->v,         t->q,
                                    t->q_out,       t->cos,         t->sin,         t->seqlens_k, t->cu_seqlens,
                                    t->block_table, t->cache_index, t->seqlens_out, t->k_scale,   t->v_scale};
    static const char *const names[] = {"k_new",       "v_new",       "k",           "v",         "q",
                                        "q_out",       "cos",         "sin",         "seqlens_k", "cu_seqlens",
                                        "block_table", "cache_index", "seqlens_out", "k_scale",   "v_scale"};
    const int64_t blocks = p->tokens ? p->tokens * p->parts : 1; /* lengths alone */
    if (blocks > INT32_MAX)
        return fail(HEDDLE_UNSUPPORTED, "%lld tokens of %d blocks each: over 2^31 blocks", (long long)p->tokens,
                    p->parts);
    heddle_status status = check_all_pointers(cu, r, sizeof names / sizeof *names, names, pointers);
    if (status == HEDDLE_OK)
        status = heddle__cuda_launch(cu, r, kernels[p->a.dtype][(p->a.features & HEDDLE_E4M3) != 0], (uint32_t)blocks,
                                     0, p, stream);
    return status;
}

/* May all of it be read and written a unit at a time? */
static bool is_appended_in_units(const heddle_append *a, const heddle_append_data *t) {
    const size_t size = heddle_dtype_size(a->dtype), angle = heddle_dtype_size(a->table_dtype);
    const size_t cached = a->features & HEDDLE_E4M3 ? 1 : size;
    const int64_t pairs = a->rotary / 2, d = a->d | (a->interleaved ? a->rotary : pairs), unit = APPEND_UNIT;
    const heddle_strides table = {0, 0, a->table_stride};
    const int64_t of_table = a->interleaved ? unit / 2 : unit;
    return is_in_units(t->k_new, a->k_new_stride, d, size, unit) && is_in_units(t->k, a->k_stride, d, cached, unit) &&
           is_in_units(t->v_new, a->v_new_stride, a->dv, size, unit) &&
           is_in_units(t->v, a->v_stride, a->dv, cached, unit) && is_in_units(t->q, a->q_stride, d, size, unit) &&
           is_in_units(t->q_out, a->q_out_stride, d, size, unit) &&
           is_in_units(t->cos, table, pairs, angle, of_table) && is_in_units(t->sin, table, pairs, angle, of_table);
}

static heddle_status append(const heddle_append *a, const heddle_append_data *t, void *stream) {
    const double units =
        (double)a->h * (double)append_units(a->d, a->rotary, a->interleaved) +
        (double)a->hk * ((double)append_units(a->d, a->rotary, a->interleaved) + (double)append_units_of(a->dv));
    append_params p = {.a = *a, .t = *t, .tokens = append_tokens(a), .vector = is_appended_in_units(a, t)};
    if (units > INT32_MAX - APPEND_UNITS)
        return fail(HEDDLE_UNSUPPORTED, "h = %lld, hk = %lld: over 2^31 pieces of %d elements in a token",
                    (long long)a->h, (long long)a->hk, APPEND_UNIT);
    p.parts = (int32_t)(((int64_t)units + APPEND_UNITS - 1) / APPEND_UNITS);
    if (p.tokens == 0 && (!t->seqlens_out || a->b == 0))
        return available();
    return run_alone(launch_append, &p, stream);
}

const backend heddle_cuda_backend = {
    available,           describe, plan_attention, plan_norm_linear, run_attention, run_norm_linear,
    prepare_norm_linear, merge,    append,
};

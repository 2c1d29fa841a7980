/* SPDX-License-Identifier: Apache-2.0
 * The public functions: validate, plan, run. No arithmetic. */
#include "backend.h"
#include "fields.h"
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

/* fields.h's lists are those of heddle.h: every pointer, in its order, at its place. */
#define DENSE(id, name, ...) const void *name;
#define STRIDED(id, name, ...) const void *name;
typedef struct listed_attention_data {
    size_t size;
#include "attention_fields.def"
} listed_attention_data;
#define DENSE(id, name, ...) const void *name;
#define STRIDED(id, name, ...) const void *name;
typedef struct listed_norm_linear_data {
    size_t size;
#include "norm_linear_fields.def"
} listed_norm_linear_data;

#define IN_PLACE(operation, name)                                                                                      \
    _Static_assert(offsetof(listed_##operation##_data, name) == offsetof(heddle_##operation##_data, name),             \
                   #name " is not in the order of heddle.h");
#define DENSE(id, name, ...) IN_PLACE(attention, name)
#define STRIDED(id, name, ...) IN_PLACE(attention, name)
#include "attention_fields.def"
#define DENSE(id, name, ...) IN_PLACE(norm_linear, name)
#define STRIDED(id, name, ...) IN_PLACE(norm_linear, name)
#include "norm_linear_fields.def"
#undef IN_PLACE
_Static_assert(sizeof(listed_attention_data) == sizeof(heddle_attention_data) &&
                   sizeof(listed_norm_linear_data) == sizeof(heddle_norm_linear_data),
               "a pointer of heddle.h is in no list");

/* The pointers of one call: alignments of elements; whether there is anything to point to. */
typedef struct pointer_facts {
    uint64_t features;
    uint8_t alignment[FIELD_ELEMENTS];
    bool needed[FIELD_NEEDS];
} pointer_facts;

/* Where the lists are unrolled, all of *t is constant and a comparison or two are left. */
__attribute__((always_inline)) static inline heddle_status check_pointer(const void *pointer, const tensor_field *t,
                                                                         const pointer_facts *f, heddle_pass pass) {
    const bool allowed = !t->feature || (f->features & t->feature);
    const size_t alignment = f->alignment[element_in(t, f->features)];
    if (t->need[pass] == NEED_UNUSED)
        return HEDDLE_OK;
    if (pointer && !allowed)
        return fail(HEDDLE_BAD_COMBINATION, "%s is given, but %s is not set", t->name, t->feature_name);
    if (!pointer && allowed && f->needed[t->need[pass]])
        return fail(HEDDLE_NULL_POINTER, "%s is NULL", t->name);
    if ((uintptr_t)pointer & (alignment - 1))
        return fail(HEDDLE_MISALIGNED, "%s = %p is not a multiple of its element's %zu bytes", t->name, pointer,
                    alignment);
    return HEDDLE_OK;
}
#define ALIGNMENTS(dtype)                                                                                              \
    {                                                                                                                  \
        [OF_DTYPE] = (uint8_t)heddle_dtype_size(dtype), [OF_FLOAT] = (dtype) == HEDDLE_F64 ? 8 : 4, [OF_BOOL] = 1,     \
        [OF_INT32] = 4, [OF_UINT64] = 8, [OF_E4M3] = 1, [OF_BYTES] = 64                                                \
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

__attribute__((always_inline)) static inline heddle_status
check_attention_pointers(const heddle_attention_data *t, const pointer_facts *f, heddle_pass pass) {
#define DENSE(id, name, ...) TRY(check_pointer(t->name, &attention_fields[FIELD_##id], f, pass));
#define STRIDED(id, name, ...) TRY(check_pointer(t->name, &attention_fields[FIELD_##id], f, pass));
#include "attention_fields.def"
    return HEDDLE_OK;
}

static heddle_status check_attention_data(const attention_plan *plan, const heddle_attention_data *t) {
    const heddle_attention *a = &plan->a;
    const bool varlen = a->features & HEDDLE_VARLEN, paged = a->features & HEDDLE_PAGES, any = a->b > 0;
    const pointer_facts facts = {
        .features = a->features,
        .alignment = ALIGNMENTS(a->dtype),
        .needed = {[NEED_ALWAYS] = true,
                   [NEED_BATCH] = any,
                   [NEED_QUERIES] = any && (varlen ? a->total_q : a->sq) > 0,
                   [NEED_KEYS] = any && (varlen && !paged ? a->total_k : a->sk) > 0,
                   [NEED_SCORES] = any && a->sq > 0 && a->sk > 0,
                   [NEED_LENGTHS] = any && !t->seqlens_q,
                   [NEED_PACKED_KEYS] = any && !paged},
    };
    if (paged && t->cu_seqlens_k)
        return fail(HEDDLE_BAD_COMBINATION, "cu_seqlens_k is given, but with HEDDLE_PAGES keys are not packed");
    if (plan->pass == HEDDLE_FORWARD && (a->features & HEDDLE_ACCUMULATE) && !t->lse && facts.needed[NEED_QUERIES])
        return fail(HEDDLE_NULL_POINTER, "lse is NULL, but HEDDLE_ACCUMULATE goes by it");
    return plan->pass == HEDDLE_FORWARD ? check_attention_pointers(t, &facts, HEDDLE_FORWARD)
                                        : check_attention_pointers(t, &facts, HEDDLE_BACKWARD);
}

__attribute__((always_inline)) static inline heddle_status
check_norm_linear_pointers(const heddle_norm_linear_data *t, const pointer_facts *f, heddle_pass pass) {
#define DENSE(id, name, ...) TRY(check_pointer(t->name, &norm_linear_fields[FIELD_N_##id], f, pass));
#define STRIDED(id, name, ...) TRY(check_pointer(t->name, &norm_linear_fields[FIELD_N_##id], f, pass));
#include "norm_linear_fields.def"
    return HEDDLE_OK;
}

/* Without a norm nobody would look at what is one's. */
static heddle_status check_no_norm(const norm_linear_plan *plan, const heddle_norm_linear_data *t) {
    for (const tensor_field *f = norm_linear_fields; f->name; f++) {
        const void *pointer;
        memcpy(&pointer, (const char *)t + f->offset, sizeof pointer);
        if (pointer && f->need[plan->pass] != NEED_UNUSED && !norm_linear_has(&plan->a, f))
            return fail(HEDDLE_BAD_COMBINATION, "%s is given, but norm is HEDDLE_NO_NORM", f->name);
    }
    return HEDDLE_OK;
}

static heddle_status check_norm_linear_data(const norm_linear_plan *plan, const heddle_norm_linear_data *t) {
    const heddle_norm_linear *a = &plan->a;
    const pointer_facts facts = {
        .features = a->features,
        .alignment = ALIGNMENTS(a->dtype),
        .needed = {[NEED_ALWAYS] = true, [NEED_ROWS] = a->m > 0, [NEED_PREPARED] = a->prepared_bytes > 0},
    };
    TRY(plan->pass == HEDDLE_FORWARD ? check_norm_linear_pointers(t, &facts, HEDDLE_FORWARD)
                                     : check_norm_linear_pointers(t, &facts, HEDDLE_BACKWARD));
    if (a->norm == HEDDLE_NO_NORM)
        TRY(check_no_norm(plan, t));
    if (plan->pass == HEDDLE_BACKWARD && !t->mean != !t->rstd)
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

/* Also of programs that were built when it ended in front of block_table, of the segments, blocks or scales: what is behind is NULL then. */
static heddle_status take_data(const heddle_attention_data *data, heddle_attention_data *whole,
                               const heddle_attention_data **taken) {
    const size_t before_pages = offsetof(heddle_attention_data, block_table),
                 before_segments = offsetof(heddle_attention_data, q_segments),
                 before_blocks = offsetof(heddle_attention_data, block_rows),
                 before_scales = offsetof(heddle_attention_data, k_scale);
    *taken = data;
    if (!data || (data->size != before_pages && data->size != before_segments && data->size != before_blocks &&
                  data->size != before_scales))
        return check_data_size("heddle_attention_data", data, data ? data->size : 0, sizeof *data);
    memset(whole, 0, sizeof *whole);
    memcpy(whole, data, data->size);
    whole->size = sizeof *whole;
    *taken = whole;
    return HEDDLE_OK;
}

static heddle_status run_attention(const heddle_attention *desc, const heddle_attention_data *data, void *workspace,
                                   size_t workspace_bytes, void *stream, heddle_pass pass) {
    attention_plan plan;
    heddle_attention_data whole;
    const backend *be = NULL;
    TRY(make_attention_plan(desc, pass, &plan, &be));
    TRY(take_data(data, &whole, &data));
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
    if (status == HEDDLE_OK && !(desc->features & (HEDDLE_PAGES | HEDDLE_E4M3)))
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

/* ------------------------------------------------------------------------------------------------------ merge */

static heddle_status check_merged(const char *name, const void *pointer, size_t alignment) {
    if (!pointer)
        return fail(HEDDLE_NULL_POINTER, "%s is NULL", name);
    if ((uintptr_t)pointer % alignment)
        return fail(HEDDLE_MISALIGNED, "%s = %p is not a multiple of its element's %zu bytes", name, pointer,
                    alignment);
    return HEDDLE_OK;
}

heddle_status heddle_attention_merge(const heddle_merge *desc, void *o, void *lse, const void *other_o,
                                     const void *other_lse, void *stream) {
    heddle_merge m;
    const backend *be = NULL;
    TRY(heddle__resolve_merge(desc, &m));
    TRY(find_backend(m.device, &be));
    TRY(be->available());
    const size_t real = m.dtype == HEDDLE_F64 ? 8 : 4;
    if (m.b && m.s) {
        TRY(check_merged("o", o, real));
        TRY(check_merged("lse", lse, real));
        TRY(check_merged("other_o", other_o, heddle_dtype_size(m.dtype)));
        TRY(check_merged("other_lse", other_lse, real));
    }
    return be->merge(&m, o, lse, other_o, other_lse, stream);
}

/* ----------------------------------------------------------------------------------------------------- append */

/* A pointer that belongs to something, which is `there` or not; `why` says what. */
static heddle_status check_belongs(const char *name, const void *pointer, bool there, const char *why,
                                   size_t alignment) {
    if (pointer && !there)
        return fail(HEDDLE_BAD_COMBINATION, "%s is given, but %s", name, why);
    return there ? check_merged(name, pointer, alignment) : HEDDLE_OK;
}

static heddle_status check_append_pointers(const heddle_append *a, const heddle_append_data *t) {
    const size_t each = heddle_dtype_size(a->dtype), angle = heddle_dtype_size(a->table_dtype);
    const bool packed = a->features & HEDDLE_VARLEN, some = packed ? a->total > 0 : a->b && a->s;
    const bool bytes = a->features & HEDDLE_E4M3;
    const size_t cached = bytes ? 1 : each, real = a->dtype == HEDDLE_F64 ? 8 : 4;
    const bool queries = a->h && (packed ? a->total > 0 : a->b && a->sq);
    const struct {
        const char *name, *why;
        const void *pointer;
        bool given, needed;
        size_t alignment;
    } all[] = {{"k_new", "", t->k_new, true, some, each},
               {"v_new", "", t->v_new, true, some, each},
               {"k", "", t->k, true, some, cached},
               {"v", "", t->v, true, some, cached},
               {"q", "h is 0", t->q, a->h > 0, queries, each},
               {"q_out", "h is 0", t->q_out, a->h > 0, queries, each},
               {"cos", "rotary is 0", t->cos, a->rotary > 0, some || queries, angle},
               {"sin", "rotary is 0", t->sin, a->rotary > 0, some || queries, angle},
               {"seqlens_k", "", t->seqlens_k, true, a->b > 0, 4},
               {"cu_seqlens", "HEDDLE_VARLEN is not set", t->cu_seqlens, packed, a->b > 0, 4},
               {"block_table", "HEDDLE_PAGES is not set", t->block_table, a->features & HEDDLE_PAGES, some, 4},
               {"cache_index", "caches is 0", t->cache_index, a->caches > 0, some, 4},
               {"seqlens_out", "", t->seqlens_out, true, false, 4},
               {"k_scale", "HEDDLE_E4M3 is not set", t->k_scale, bytes, false, real},
               {"v_scale", "HEDDLE_E4M3 is not set", t->v_scale, bytes, false, real}};
    for (size_t x = 0; x < sizeof all / sizeof *all; x++)
        if (!all[x].given || all[x].needed || all[x].pointer)
            TRY(check_belongs(all[x].name, all[x].pointer, all[x].given, all[x].why, all[x].alignment));
    return HEDDLE_OK;
}

/* Also of programs that were built when it ended in front of the scales. */
static heddle_status take_append_data(const heddle_append_data *data, heddle_append_data *t) {
    const size_t size = data ? data->size : 0;
    if (size != offsetof(heddle_append_data, k_scale))
        TRY(check_data_size("heddle_append_data", data, size, sizeof *data));
    *t = (heddle_append_data){0};
    memcpy(t, data, size);
    t->size = sizeof *t;
    return HEDDLE_OK;
}

heddle_status heddle_attention_append(const heddle_append *desc, const heddle_append_data *data, void *stream) {
    heddle_append a;
    heddle_append_data t;
    const backend *be = NULL;
    TRY(heddle__resolve_append(desc, &a));
    TRY(find_backend(a.device, &be));
    TRY(be->available());
    TRY(take_append_data(data, &t));
    TRY(check_append_pointers(&a, &t));
    if (t.q == t.q_out && t.q && memcmp(&a.q_stride, &a.q_out_stride, sizeof a.q_stride) != 0)
        return fail(HEDDLE_BAD_STRIDE, "q_out is q, but their strides differ");
    return be->append(&a, &t, stream);
}

/* ------------------------------------------------------------------------------------------------ norm-linear */

static heddle_status make_norm_linear_plan(const heddle_norm_linear *desc, heddle_pass pass, norm_linear_plan *plan,
                                           const backend **be) {
    TRY(heddle__resolve_norm_linear(desc, pass, plan));
    TRY(find_backend(plan->a.device, be));
    TRY((*be)->plan_norm_linear(plan));
    if (pass == HEDDLE_FORWARD && (plan->a.features & HEDDLE_PREPARED) &&
        (uint64_t)plan->a.prepared_bytes != plan->prepared)
        return fail(HEDDLE_BAD_SIZE, "prepared_bytes = %lld, but of this problem %zu are prepared",
                    (long long)plan->a.prepared_bytes, plan->prepared);
    return HEDDLE_OK;
}

/* The plan of what forward does with the weight alone: that of no rows. */
static heddle_status make_weight_plan(const heddle_norm_linear *desc, norm_linear_plan *plan, const backend **be) {
    TRY(heddle__resolve_norm_linear(desc, HEDDLE_FORWARD, plan));
    plan->a.m = plan->a.prepared_bytes = 0;
    plan->a.features &= ~HEDDLE_PREPARED;
    TRY(find_backend(plan->a.device, be));
    return (*be)->plan_norm_linear(plan);
}

/* Also of programs that were built when it ended in front of u, of the residual, of z or of what is prepared. */
static heddle_status take_norm_linear_data(const heddle_norm_linear_data *data, heddle_norm_linear_data *t) {
    const size_t size = data ? data->size : 0;
    if (size != offsetof(heddle_norm_linear_data, u) && size != offsetof(heddle_norm_linear_data, residual) &&
        size != offsetof(heddle_norm_linear_data, z) && size != offsetof(heddle_norm_linear_data, prepared))
        TRY(check_data_size("heddle_norm_linear_data", data, size, sizeof *data));
    memset(t, 0, sizeof *t);
    memcpy(t, data, size);
    t->size = sizeof *t;
    return HEDDLE_OK;
}

static heddle_status run_norm_linear(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                     void *workspace, size_t workspace_bytes, void *stream, heddle_pass pass) {
    norm_linear_plan plan;
    heddle_norm_linear_data t;
    const backend *be = NULL;
    TRY(make_norm_linear_plan(desc, pass, &plan, &be));
    TRY(take_norm_linear_data(data, &t));
    TRY(check_norm_linear_data(&plan, &t));
    TRY(check_workspace(workspace, workspace_bytes, plan.workspace));
    return be->run_norm_linear(&plan, &t, workspace, stream);
}

heddle_status heddle_norm_linear_forward(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                         void *workspace, size_t workspace_bytes, void *stream) {
    return run_norm_linear(desc, data, workspace, workspace_bytes, stream, HEDDLE_FORWARD);
}

heddle_status heddle_norm_linear_backward(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                          void *workspace, size_t workspace_bytes, void *stream) {
    return run_norm_linear(desc, data, workspace, workspace_bytes, stream, HEDDLE_BACKWARD);
}

heddle_status heddle_norm_linear_prepared_size(const heddle_norm_linear *desc, size_t *bytes) {
    norm_linear_plan plan;
    const backend *be = NULL;
    if (!bytes)
        return fail(HEDDLE_NULL_POINTER, "the pointer to bytes is NULL");
    TRY(make_weight_plan(desc, &plan, &be));
    *bytes = plan.prepared;
    return HEDDLE_OK;
}

heddle_status heddle_norm_linear_prepare(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                         void *prepared, size_t bytes, void *stream) {
    norm_linear_plan plan;
    heddle_norm_linear_data t;
    const backend *be = NULL;
    TRY(make_weight_plan(desc, &plan, &be));
    TRY(take_norm_linear_data(data, &t));
    t = (heddle_norm_linear_data){.size = sizeof t, .gamma = t.gamma, .beta = t.beta, .w = t.w, .bias = t.bias};
    TRY(check_norm_linear_data(&plan, &t));
    if (bytes != plan.prepared)
        return fail(HEDDLE_BAD_SIZE, "prepared has %zu bytes, but of this problem %zu are prepared", bytes,
                    plan.prepared);
    TRY(check_workspace(prepared, bytes, plan.prepared));
    return plan.prepared ? be->prepare_norm_linear(&plan, &t, prepared, stream) : HEDDLE_OK;
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

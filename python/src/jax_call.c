/* SPDX-License-Identifier: Apache-2.0
 * heddle.jax's handlers: XLA's buffers and attributes to a description, and the pass. Two attributes say what a call is: `description`, the
 * bytes of heddle_attention or heddle_norm_linear as heddle.jax made them when it traced (the device is filled in here), and `fields`: the
 * pass, then the place in src/<operation>_fields.def of each argument and of each result. Buffers are taken where they lie, row-major.
 * A third pass of norm-linear makes of the weight what its forward takes as `prepared`. */
#include "jax_call.h"

#include "block_lists.h"
#include "status_kind.h"

#include "cuda_memory.h"
#include "heddle.h"
#include "system.h"
#include "xla_ffi.h"

#include "../../src/fields.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PREPARE = 2 }; /* the third pass */

typedef struct call {
    xla_frame *frame;
    bool attention, cuda, prepare;
    heddle_pass pass; /* with prepare: forward */
    union {
        heddle_attention attention;
        heddle_norm_linear norm_linear;
    } d;
    union {
        heddle_attention_data attention;
        heddle_norm_linear_data norm_linear;
    } t;
    int64_t columns; /* of block_columns, which the data tell */
    int64_t bytes;   /* of what is prepared, the same */
    void *prepared;  /* with prepare */
    void *stream;
} call;

/* ----------------------------------------------------------------------------------------------------- errors */

static xla_error *fail(const call *c, int code, const char *format, ...) {
    char text[640];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    xla_error_create error = {.size = sizeof error, .message = text, .code = code};
    return c->frame->api->error_create(&error);
}

static xla_error *fail_status(const call *c, heddle_status status) {
    static const int codes[] = {[KIND_RUNTIME_ERROR] = XLA_INTERNAL,
                                [KIND_VALUE_ERROR] = XLA_INVALID_ARGUMENT,
                                [KIND_NOT_IMPLEMENTED] = XLA_UNIMPLEMENTED};
    if (status == HEDDLE_OK)
        return NULL;
    const int code = status == HEDDLE_NO_DEVICE ? XLA_UNAVAILABLE : codes[kind_of_status(status)];
    return fail(c, code, "heddle: %s (%s)", heddle_last_message(), heddle_status_string(status));
}

/* ------------------------------------------------------------------------------------------------- attributes */

/* The array of 64-bit numbers of that name; NULL if there is none. */
static const xla_array *find_numbers(const xla_frame *frame, const char *name) {
    const xla_attributes *all = &frame->attributes;
    for (int64_t x = 0; x < all->count; x++)
        if (all->types[x] == XLA_ATTRIBUTE_ARRAY && all->names[x]->length == strlen(name) &&
            memcmp(all->names[x]->text, name, strlen(name)) == 0) {
            const xla_array *array = all->values[x];
            return array->dtype == XLA_S64 ? array : NULL;
        }
    return NULL;
}

/* Its first field is its size, by which the library knows one that was written for an older heddle.h, and shorter. */
static xla_error *take_description(call *c) {
    const xla_array *numbers = find_numbers(c->frame, "description");
    const size_t bytes = numbers ? numbers->count * sizeof(int64_t) : 0;
    if (bytes < 2 * sizeof(int64_t) || bytes > (c->attention ? sizeof c->d.attention : sizeof c->d.norm_linear) ||
        (size_t)((const int64_t *)numbers->data)[0] != bytes)
        return fail(c, XLA_INVALID_ARGUMENT, "heddle: the call has no description that this version (%s) knows",
                    heddle_version_string());
    memcpy(&c->d, numbers->data, bytes);
    heddle_dtype *dtype = c->attention ? &c->d.attention.dtype : &c->d.norm_linear.dtype;
    heddle_device *device = c->attention ? &c->d.attention.device : &c->d.norm_linear.device;
    *device = c->cuda ? HEDDLE_CUDA : *dtype == HEDDLE_F64 ? HEDDLE_REF : HEDDLE_CPU;
    if (c->attention)
        c->t.attention.size = sizeof c->t.attention;
    else
        c->t.norm_linear.size = sizeof c->t.norm_linear;
    return NULL;
}

/* ---------------------------------------------------------------------------------------------------- buffers */

static int64_t times(int64_t a, int64_t b) {
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static int64_t plus(int64_t a, int64_t b) {
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

/* How many elements from the first one on the library may touch of a tensor, by the description. */
static int64_t reach(const call *c, const tensor_field *f) {
    const heddle_attention *a = &c->d.attention;
    const char *letters = c->attention ? attention_shape(f, a->features) : f->shape;
    const bool packed = letters == f->packed;
    int64_t size[4], all = 1, last = 0;
    int rank = 0;
    for (; letters[rank]; rank++) {
        size[rank] =
            c->attention ? attention_extent(a, letters[rank]) : norm_linear_extent(&c->d.norm_linear, letters[rank]);
        all = times(all, size[rank]);
    }
    if (all == 0)
        return 0;
    if (!c->attention) {
        int64_t step = 0;
        if (f->stride)
            memcpy(&step, (const char *)&c->d.norm_linear + f->stride, sizeof step);
        return step ? plus(times(size[0] - 1, step), size[1]) : all;
    }
    if (f == &attention_fields[FIELD_ALIBI])
        return plus(times(a->b - 1, a->alibi_stride_b), a->h);
    heddle_strides s = {0, 0, 0};
    if (f->stride)
        memcpy(&s, (const char *)a + f->stride, sizeof s);
    if (!s.b && !s.h && !s.s)
        return all;
    const int64_t step[3] = {packed ? s.s : s.b, s.h, s.s};
    for (int x = 0; x < rank - 1; x++)
        last = plus(last, times(size[x] - 1, step[x] == HEDDLE_BROADCAST ? 0 : step[x]));
    return plus(last, size[rank - 1]);
}

static int type_of(const call *c, const tensor_field *f) {
    static const int types[] = {
        [HEDDLE_F32] = XLA_F32, [HEDDLE_BF16] = XLA_BF16, [HEDDLE_F16] = XLA_F16, [HEDDLE_F64] = XLA_F64};
    const unsigned dtype = (unsigned)(c->attention ? c->d.attention.dtype : c->d.norm_linear.dtype);
    switch (c->attention ? element_in(f, c->d.attention.features) : (field_element)f->element) {
    case OF_DTYPE: return dtype < sizeof types / sizeof *types ? types[dtype] : 0;
    case OF_FLOAT: return dtype == HEDDLE_F64 ? XLA_F64 : XLA_F32;
    case OF_BOOL: return XLA_PRED;
    case OF_BYTES: return XLA_U8;
    case OF_INT32: return XLA_S32;
    case OF_E4M3: return XLA_F8E4M3FN;
    default: return XLA_U32; /* JAX has 64-bit integers only if asked: a number is two of these, the low one first */
    }
}

static xla_error *take_buffer(call *c, const xla_buffer *buffer, int64_t field, bool result) {
    const int64_t count = c->attention ? ATTENTION_FIELDS : NORM_LINEAR_FIELDS;
    if (field < 0 || field >= count)
        return fail(c, XLA_INVALID_ARGUMENT, "heddle: there is no tensor number %lld", (long long)field);
    const tensor_field *f = (c->attention ? attention_fields : norm_linear_fields) + field;
    const bool of_weight = !c->attention && field == FIELD_N_PREPARED;
    if (result != (c->prepare ? of_weight : is_output_of(f, c->pass)))
        return fail(c, XLA_INVALID_ARGUMENT, "heddle: %s is no %s of this pass", f->name,
                    result ? "result" : "argument");
    int64_t elements = 1, needed = times(reach(c, f), f->element == OF_UINT64 ? 2 : 1);
    for (int64_t x = 0; x < buffer->rank; x++)
        elements = times(elements, buffer->dims[x]);
    if (buffer->dtype != type_of(c, f) || elements < needed)
        return fail(c, XLA_INVALID_ARGUMENT,
                    "heddle: %s has %lld elements of XLA's type %d, but must have %lld of type %d", f->name,
                    (long long)elements, buffer->dtype, (long long)needed, type_of(c, f));
    if (of_weight && elements == 0)
        return NULL;
    memcpy((char *)&c->t + f->offset, &buffer->data, sizeof buffer->data);
    if (f == &attention_fields[FIELD_BLOCK_COLUMNS])
        c->columns = elements;
    if (of_weight) {
        c->bytes = elements;
        c->prepared = buffer->data;
    }
    return NULL;
}

static heddle_status query_workspace(const call *c, size_t *bytes) {
    if (c->prepare)
        return heddle_norm_linear_prepared_size(&c->d.norm_linear, bytes);
    return c->attention ? heddle_attention_workspace(&c->d.attention, c->pass, bytes)
                        : heddle_norm_linear_workspace(&c->d.norm_linear, c->pass, bytes);
}

/* The plan is asked first, so that no extent below is negative, and no wrong problem is called a wrong buffer. */
static xla_error *take_buffers(call *c, size_t *workspace) {
    const xla_array *fields = find_numbers(c->frame, "fields");
    const xla_values *in = &c->frame->arguments, *out = &c->frame->results;
    if (!fields || (int64_t)fields->count != 1 + in->count + out->count)
        return fail(c, XLA_INVALID_ARGUMENT, "heddle: the call does not say what its buffers are");
    const int64_t *place = fields->data;
    c->prepare = !c->attention && place[0] == PREPARE;
    if (place[0] < HEDDLE_FORWARD || (place[0] > HEDDLE_BACKWARD && !c->prepare))
        return fail(c, XLA_INVALID_ARGUMENT, "heddle: there is no pass number %lld", (long long)place[0]);
    c->pass = place[0] == HEDDLE_BACKWARD ? HEDDLE_BACKWARD : HEDDLE_FORWARD;
    xla_error *error = fail_status(c, query_workspace(c, workspace));
    for (int64_t x = 0; !error && x < in->count; x++)
        error = take_buffer(c, in->values[x], place[1 + x], false);
    for (int64_t x = 0; !error && x < out->count; x++)
        error = take_buffer(c, out->values[x], place[1 + in->count + x], true);
    return error;
}

/* ---------------------------------------------------------------------------------------------------- lengths */

/* On the CPU the lengths can be read, so that a wrong one is an error; on a GPU it is clamped. */
static xla_error *check_packing(const call *c, const char *name, const int32_t *cu, int64_t longest, int64_t total) {
    for (int64_t x = 0; x <= c->d.attention.b; x++)
        if (cu[x] < (x ? cu[x - 1] : 0) || cu[x] > total || (x && cu[x] - cu[x - 1] > longest))
            return fail(c, XLA_INVALID_ARGUMENT,
                        "heddle: cu_seqlens_%s[%lld] = %d after %d: must not fall, exceed the %lld rows, or make a "
                        "sequence longer than max_seqlen_%s = %lld",
                        name, (long long)x, cu[x], x ? cu[x - 1] : 0, (long long)total, name, (long long)longest);
    return NULL;
}

static xla_error *check_lengths(const call *c, const char *name, const int32_t *lengths, int64_t longest) {
    for (int64_t x = 0; lengths && x < c->d.attention.b; x++)
        if (lengths[x] < 0 || lengths[x] > longest)
            return fail(c, XLA_INVALID_ARGUMENT, "heddle: seqlens_%s[%lld] = %d is outside 0 to %lld", name,
                        (long long)x, lengths[x], (long long)longest);
    return NULL;
}

static xla_error *check_blocks(const call *c) {
    const heddle_attention_data *t = &c->t.attention;
    char why[160];
    if (!t->block_rows ||
        !find_wrong_list(&c->d.attention, t->block_rows, t->block_columns, c->columns, why, sizeof why))
        return NULL;
    return fail(c, XLA_INVALID_ARGUMENT, "heddle: %s", why);
}

/* Rows of no sequence are written by no kernel. The CPU knows which those are, and clears no others; of a GPU only the device
 * knows, and all rows are cleared before it writes. Rows are contiguous, `repeats` of them `total` apart. */
static bool clear_rows(const call *c, void *rows, const int32_t *cu, int64_t total, int64_t row, int64_t repeats) {
    char *at = rows;
    if (!at || total == 0)
        return true;
    if (c->cuda)
        return heddle_cuda_clear((uintptr_t)rows, (size_t)(total * row * repeats), c->stream) == 0;
    for (int64_t x = 0; x < repeats; x++, at += total * row) {
        memset(at, 0, (size_t)(cu[0] * row));
        memset(at + cu[c->d.attention.b] * row, 0, (size_t)((total - cu[c->d.attention.b]) * row));
    }
    return true;
}

static xla_error *take_lengths(call *c) {
    const heddle_attention *a = &c->d.attention;
    const heddle_attention_data *t = &c->t.attention;
    const bool packed = a->features & HEDDLE_VARLEN;
    xla_error *error = NULL;
    if (a->features & HEDDLE_PAGES)
        return fail(c, XLA_UNIMPLEMENTED, "heddle: keys in pages have no handler");
    if (packed && (!t->cu_seqlens_q || !t->cu_seqlens_k))
        return fail(c, XLA_INVALID_ARGUMENT, "heddle: packed sequences without cu_seqlens_q and cu_seqlens_k");
    if (!c->cuda) {
        error = packed ? check_packing(c, "q", t->cu_seqlens_q, a->sq, a->total_q) : NULL;
        error = packed && !error ? check_packing(c, "k", t->cu_seqlens_k, a->sk, a->total_k) : error;
        error = error ? error : check_lengths(c, "q", t->seqlens_q, a->sq);
        error = error ? error : check_lengths(c, "k", t->seqlens_k, a->sk);
        error = error ? error : check_blocks(c);
    }
    if (error || !packed)
        return error;
    const int64_t element = (int64_t)heddle_dtype_size(a->dtype), real = a->dtype == HEDDLE_F64 ? 8 : 4;
    const int64_t hk = a->hk ? a->hk : a->h, d = element * a->d, dv = element * (a->dv ? a->dv : a->d);
    bool done;
    if (c->pass == HEDDLE_FORWARD)
        done = clear_rows(c, t->o, t->cu_seqlens_q, a->total_q, a->h * dv, 1) &&
               clear_rows(c, t->lse, t->cu_seqlens_q, a->total_q, real, a->h);
    else
        done = clear_rows(c, t->dq, t->cu_seqlens_q, a->total_q, a->h * d, 1) &&
               clear_rows(c, t->dk, t->cu_seqlens_k, a->total_k, hk * d, 1) &&
               clear_rows(c, t->dv, t->cu_seqlens_k, a->total_k, hk * dv, 1);
    return done ? NULL : fail(c, XLA_INTERNAL, "heddle: the rows of no sequence could not be cleared");
}

/* ------------------------------------------------------------------------------------------------------- runs */

static heddle_status run_pass(const call *c, void *space, size_t bytes) {
    const bool forward = c->pass == HEDDLE_FORWARD;
    if (c->attention)
        return (forward ? heddle_attention_forward : heddle_attention_backward)(&c->d.attention, &c->t.attention, space,
                                                                                bytes, c->stream);
    return (forward ? heddle_norm_linear_forward : heddle_norm_linear_backward)(&c->d.norm_linear, &c->t.norm_linear,
                                                                                space, bytes, c->stream);
}

/* The library compares the bytes with those of the device: who traced may have thought of another. */
static xla_error *run_prepare(const call *c) {
    return fail_status(
        c, heddle_norm_linear_prepare(&c->d.norm_linear, &c->t.norm_linear, c->prepared, (size_t)c->bytes, c->stream));
}

/* XLA has memory for the time of a call on a GPU alone; for the CPU it says to use the system's. How much is needed depends on the
 * number of threads of the moment, so a result whose size was fixed when the program was compiled would not do. */
static xla_error *run_on_cpu(const call *c, size_t bytes) {
    void *space = bytes ? heddle_system_memory(bytes) : NULL;
    if (bytes && !space)
        return fail(c, XLA_RESOURCE_EXHAUSTED, "heddle: no memory for a workspace of %zu bytes", bytes);
    const heddle_status status = run_pass(c, space, bytes);
    heddle_system_free(space);
    return fail_status(c, status);
}

/* XLA's memory belongs to the stream: freed when the work is queued, it is used again by what is queued later. It promises an alignment
 * of 16 at most, hence the 64 more. */
static xla_error *run_on_cuda(call *c, size_t bytes) {
    const xla_api *api = c->frame->api;
    xla_memory_allocate taken = {
        .size = sizeof taken, .context = c->frame->context, .bytes = bytes + 64, .alignment = 16};
    xla_error *error = bytes ? api->memory_allocate(&taken) : NULL;
    if (error)
        return error;
    const uintptr_t at = (uintptr_t)taken.data;
    error = fail_status(c, run_pass(c, bytes ? (char *)taken.data + (64 - at % 64) % 64 : NULL, bytes));
    if (bytes) {
        xla_memory_free freed = {
            .size = sizeof freed, .context = c->frame->context, .bytes = bytes + 64, .data = taken.data};
        xla_error *second = api->memory_free(&freed);
        if (second && error) {
            xla_error_destroy ended = {.size = sizeof ended, .error = second};
            api->error_destroy(&ended);
        }
        error = error ? error : second;
    }
    return error;
}

static xla_error *take_stream(call *c) {
    xla_stream_get asked = {.size = sizeof asked, .context = c->frame->context};
    xla_error *error = c->cuda ? c->frame->api->stream_get(&asked) : NULL;
    c->stream = asked.stream;
    return error;
}

/* A call that asks for the version is answered with XLA's own where the structures here are those of that version, else with the
 * newest one known here, and XLA decides. To 0.2 such a call has no table of functions, which has the version; 0.1's record is the
 * shorter. No trait: a workspace comes from XLA's allocator, which no recorded graph may hold on to. */
static void answer(const xla_frame *frame, xla_metadata *metadata) {
    int minor = metadata->size > sizeof *metadata ? 2 : XLA_OLDEST_MINOR;
    if (frame->api) {
        const xla_version *theirs = &frame->api->version;
        const bool known =
            theirs->major == XLA_MAJOR && theirs->minor >= XLA_OLDEST_MINOR && theirs->minor <= XLA_MINOR;
        minor = known ? theirs->minor : XLA_MINOR;
    }
    metadata->version.major = XLA_MAJOR;
    metadata->version.minor = minor;
    metadata->traits = 0;
}

static xla_error *handle(xla_frame *frame, bool attention, bool cuda) {
    for (xla_extension *x = frame->extension; x; x = x->next)
        if (x->type == XLA_METADATA) {
            answer(frame, ((xla_metadata_extension *)(void *)x)->metadata);
            return NULL;
        }
    call c = {.frame = frame, .attention = attention, .cuda = cuda};
    if (frame->size < sizeof *frame || frame->api->size < sizeof *frame->api)
        return fail(&c, XLA_UNIMPLEMENTED, "heddle: this jaxlib's foreign functions are older than 0.%d",
                    XLA_OLDEST_MINOR);
    if (frame->stage != XLA_EXECUTE)
        return NULL;
    size_t bytes = 0;
    xla_error *error = take_description(&c);
    error = error ? error : take_buffers(&c, &bytes);
    error = error ? error : take_stream(&c);
    error = error || !attention ? error : take_lengths(&c);
    if (error)
        return error;
    if (c.prepare)
        return run_prepare(&c);
    return cuda ? run_on_cuda(&c, bytes) : run_on_cpu(&c, bytes);
}

static xla_error *attention_cpu(xla_frame *frame) {
    return handle(frame, true, false);
}

static xla_error *attention_cuda(xla_frame *frame) {
    return handle(frame, true, true);
}

static xla_error *norm_linear_cpu(xla_frame *frame) {
    return handle(frame, false, false);
}

static xla_error *norm_linear_cuda(xla_frame *frame) {
    return handle(frame, false, true);
}

/* {(operation, platform): capsule}, as jax.ffi.register_ffi_target wants them. */
PyObject *heddle_jax_handlers(PyObject *self, PyObject *unused) {
    static const struct {
        const char *operation, *platform;
        xla_error *(*handler)(xla_frame *);
    } all[] = {{"attention", "cpu", attention_cpu},
               {"attention", "CUDA", attention_cuda},
               {"norm_linear", "cpu", norm_linear_cpu},
               {"norm_linear", "CUDA", norm_linear_cuda}};
    (void)self;
    (void)unused;
    heddle_cuda_prepare();
    PyObject *list = PyList_New(0);
    for (size_t x = 0; list && x < sizeof all / sizeof *all; x++) {
        void *handler;
        memcpy(&handler, &all[x].handler, sizeof handler);
        PyObject *row = Py_BuildValue("ssN", all[x].operation, all[x].platform, PyCapsule_New(handler, NULL, NULL));
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

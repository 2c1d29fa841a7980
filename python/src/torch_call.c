/* SPDX-License-Identifier: Apache-2.0
 * See torch_call.h. */
#define _GNU_SOURCE
#include "torch_call.h"

#include "status_kind.h"
#include "system.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* --------------------------------------------------------------------------------------------------- messages */

bool call_fail(call *c, const char *kind, const char *format, ...) {
    if (c->message[0])
        return false; /* the first is the one that tells */
    int n = snprintf(c->message, sizeof c->message, "heddle %s: ", kind);
    va_list list;
    va_start(list, format);
    vsnprintf(c->message + n, sizeof c->message - (size_t)n, format, list);
    va_end(list);
    return false;
}

bool call_status(call *c, heddle_status status) {
    if (status == HEDDLE_OK)
        return true;
    static const char *const kinds[] = {[KIND_RUNTIME_ERROR] = "RuntimeError",
                                        [KIND_VALUE_ERROR] = "ValueError",
                                        [KIND_NOT_IMPLEMENTED] = "NotImplementedError"};
    return call_fail(c, kinds[kind_of_status(status)], "%s (%s)", heddle_last_message(), heddle_status_string(status));
}

static bool torch_ok(call *c, int32_t code, const char *what) {
    if (code == 0)
        return true;
    const char *why = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : NULL;
    return call_fail(c, "RuntimeError", "torch could not %s%s%s", what, why ? ": " : "", why ? why : "");
}

#ifdef _WIN32
int32_t (*torch_delete_stable_ivalue)(stable_value *value);
const char *(*torch_exception_get_what_without_backtrace)(void);
void *(*torch_global_context)(void);
bool (*torch_deterministic_algorithms)(const void *context);

static void look_up(void *function, const char *name) {
    void *symbol = heddle_system_symbol(heddle_system_library("torch_cpu.dll", true), name);
    memcpy(function, &symbol, sizeof symbol);
}

/* torch_cpu.dll is there: this library could not have been loaded without. */
__attribute__((constructor)) static void look_all_up(void) {
    look_up(&torch_delete_stable_ivalue, "torch_delete_stable_ivalue");
    look_up(&torch_exception_get_what_without_backtrace, "torch_exception_get_what_without_backtrace");
    look_up(&torch_global_context, "?globalContext@at@@YAAEAVContext@1@XZ");
    look_up(&torch_deterministic_algorithms, "?deterministicAlgorithms@Context@at@@QEBA_NXZ");
}
#endif

/* -------------------------------------------------------------------------------------------------- arguments */

static void free_box(stable_value *box) {
    if (torch_delete_stable_ivalue)
        torch_delete_stable_ivalue(box);
#ifndef _WIN32 /* there heddle._ops wants a torch that has it */
    else
        heddle_cxx_delete(box);
#endif
}

static void look_at(call *c, tensor *t, stable_value value) {
    int64_t *size = NULL, *stride = NULL;
    t->handle = (tensor_handle)(uintptr_t)value;
    bool ok = aoti_torch_get_data_ptr(t->handle, &t->data) == 0 && aoti_torch_get_dim(t->handle, &t->rank) == 0 &&
              aoti_torch_get_sizes(t->handle, &size) == 0 && aoti_torch_get_strides(t->handle, &stride) == 0 &&
              aoti_torch_get_dtype(t->handle, &t->dtype) == 0 &&
              aoti_torch_get_device_type(t->handle, &t->device_type) == 0 &&
              aoti_torch_get_device_index(t->handle, &t->device_index) == 0;
    torch_ok(c, !ok, "tell about a tensor");
    t->size = size;
    t->stride = stride;
}

static void look_at_defined(call *c, tensor *t, stable_value value) {
    tensor_handle handle = (tensor_handle)(uintptr_t)value;
    bool defined = true;
    if (aoti_torch_is_defined(handle, &defined) != 0 || defined)
        look_at(c, t, value);
    else
        aoti_torch_delete_tensor_object(handle);
}

static stable_value unbox(stable_value value) {
    stable_value *box = (stable_value *)(uintptr_t)value;
    value = *box;
    free_box(box);
    return value;
}

/* 0 means 1/sqrt(d) to the library, so a real 0 becomes the least that it takes (heddle._options.scale_of). */
static double scale_of(stable_value value) {
    double scale;
    memcpy(&scale, &value, sizeof scale);
    return scale == 0 ? 0x1p-100 : scale;
}

void call_begin_at(call *c, stable_value *stack, uint64_t arguments, uint64_t results, const char *signature,
                   const int *place) {
    memset(c, 0, offsetof(call, message) + 1);
    c->saved_threads = -1;
    c->results = results;
    uint64_t x = 0;
    for (; x < arguments && signature[x]; x++) {
        const int at = place ? place[x] : (int)x;
        stable_value value = stack[x];
        stack[x] = 0;
        switch (signature[x]) {
        case 'O':
            if (value) /* autograd, too, gives an undefined tensor for None */
                look_at_defined(c, &c->tensor[at], unbox(value));
            break;
        case 'T': look_at(c, &c->tensor[at], value); break;
        case 'U': look_at_defined(c, &c->tensor[at], value); break;
        case 'N': c->integer[at] = value ? (int64_t)unbox(value) : -1; break;
        case 'S': c->number[at] = value ? scale_of(unbox(value)) : 0; break;
        case 'D': memcpy(&c->number[at], &value, sizeof value); break;
        case 'B': c->integer[at] = (value & 0xff) != 0; break;
        default: memcpy(&c->integer[at], &value, sizeof value); break;
        }
    }
    if (x != arguments || signature[x])
        call_fail(c, "RuntimeError", "%llu arguments came, not those of \"%s\"", (unsigned long long)arguments,
                  signature);
}

void call_begin(call *c, stable_value *stack, uint64_t arguments, uint64_t results, const char *signature) {
    call_begin_at(c, stack, arguments, results, signature, NULL);
}

static void release(tensor_handle *handle) {
    if (*handle)
        aoti_torch_delete_tensor_object(*handle);
    *handle = NULL;
}

void call_end(call *c, stable_value *stack) {
    for (int x = 0; x < MAX_ARGUMENTS; x++)
        release(&c->tensor[x].handle);
    release(&c->workspace);
    if (c->guard)
        aoti_torch_delete_device_guard(c->guard);
#ifdef _OPENMP
    if (c->saved_threads > 0)
        omp_set_num_threads(c->saved_threads);
#endif
    if (c->message[0]) {
        for (int x = 0; x < MAX_RESULTS; x++)
            release(&c->result[x]);
        aoti_torch_check(false, __func__, "heddle", 0, c->message);
    }
    for (uint64_t x = 0; x < c->results && x < MAX_RESULTS; x++)
        stack[x] = (stable_value)(uintptr_t)c->result[x];
}

/* ----------------------------------------------------------------------------------------------------- device */

static bool find_stream(call *c) {
    static current_cuda_stream lookup; /* the same for every caller, so a race does no harm */
    if (!lookup) {
        void *library = heddle_system_library("libtorch_cuda.so", true);
        void *symbol = library ? heddle_system_symbol(library, "aoti_torch_get_current_cuda_stream") : NULL;
        if (!symbol)
            return call_fail(c, "RuntimeError",
                             "this torch has no CUDA stream: aoti_torch_get_current_cuda_stream is "
                             "not in libtorch_cuda.so");
        memcpy(&lookup, &symbol, sizeof lookup);
    }
    /* A guard costs ten times what the look at the current device does. */
    int32_t current = -1;
    if (aoti_torch_get_current_device_index(&current) != 0 || current != c->device_index) {
        if (!torch_ok(c, aoti_torch_create_device_guard(c->device_index, &c->guard), "set the device"))
            return false;
    }
    return torch_ok(c, lookup(c->device_index, &c->stream), "tell the current CUDA stream");
}

/* The CPU backend counts its threads by the OpenMP library that it is linked with. torch may have brought another one, and
 * keeps its number per thread: so it is set for the time of the call. */
static void follow_threads(call *c) {
#ifdef _OPENMP
    uint32_t threads = 0;
    if (torch_get_num_threads(&threads) == 0 && threads > 0 && !omp_in_parallel() &&
        (int)threads != omp_get_max_threads()) {
        c->saved_threads = omp_get_max_threads();
        omp_set_num_threads((int)threads);
    }
#else
    (void)c;
#endif
}

/* As messages call it. */
static const char *dtype_name(int32_t dtype) {
    static const struct {
        int32_t (*number)(void);
        const char *name;
    } known[] = {{aoti_torch_dtype_float32, "float32"},
                 {aoti_torch_dtype_bfloat16, "bfloat16"},
                 {aoti_torch_dtype_float16, "float16"},
                 {aoti_torch_dtype_float64, "float64"},
                 {aoti_torch_dtype_float8_e4m3fn, "torch.float8_e4m3fn"},
                 {aoti_torch_dtype_float8_e4m3fnuz, "torch.float8_e4m3fnuz"},
                 {aoti_torch_dtype_float8_e5m2, "torch.float8_e5m2"},
                 {aoti_torch_dtype_bool, "bool"},
                 {aoti_torch_dtype_uint8, "uint8"},
                 {aoti_torch_dtype_int8, "int8"},
                 {aoti_torch_dtype_int16, "int16"},
                 {aoti_torch_dtype_int32, "int32"},
                 {aoti_torch_dtype_int64, "int64"},
                 {aoti_torch_dtype_uint64, "uint64"},
                 {aoti_torch_dtype_complex64, "complex64"},
                 {aoti_torch_dtype_complex128, "complex128"}};
    for (size_t x = 0; x < sizeof known / sizeof *known; x++)
        if (known[x].number() == dtype)
            return known[x].name;
    return "of another dtype";
}

bool call_device(call *c, int lead, const char *name) {
    if (c->message[0])
        return false;
    const tensor *t = &c->tensor[lead];
    c->device_type = t->device_type;
    c->device_index = t->device_index;
    if (t->dtype == aoti_torch_dtype_float32())
        c->dtype = HEDDLE_F32;
    else if (t->dtype == aoti_torch_dtype_bfloat16())
        c->dtype = HEDDLE_BF16;
    else if (t->dtype == aoti_torch_dtype_float16())
        c->dtype = HEDDLE_F16;
    else if (t->dtype == aoti_torch_dtype_float64())
        c->dtype = HEDDLE_F64;
    else
        return call_fail(c, "TypeError", "%s is %s, but must be float32, bfloat16, float16 or float64", name,
                         dtype_name(t->dtype));
    if (t->device_type == aoti_torch_device_type_cuda()) {
        c->device = HEDDLE_CUDA;
        return find_stream(c);
    }
    c->device = c->dtype == HEDDLE_F64 ? HEDDLE_REF : HEDDLE_CPU;
    if (c->device == HEDDLE_CPU)
        follow_threads(c);
    return true;
}

int32_t call_dtype(const call *c) {
    switch (c->dtype) {
    case HEDDLE_F32: return aoti_torch_dtype_float32();
    case HEDDLE_BF16: return aoti_torch_dtype_bfloat16();
    case HEDDLE_F16: return aoti_torch_dtype_float16();
    case HEDDLE_F64: break;
    }
    return aoti_torch_dtype_float64();
}

int32_t call_real(const call *c) {
    return c->dtype == HEDDLE_F64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

/* ----------------------------------------------------------------------------------------------------- checks */

bool call_check(call *c, const tensor *t, const char *name, int32_t dtype) {
    if (t->dtype != dtype)
        return call_fail(c, "TypeError", "%s is %s, but must be %s here", name, dtype_name(t->dtype),
                         dtype_name(dtype));
    if (t->device_type != c->device_type || t->device_index != c->device_index)
        return call_fail(c, "ValueError", "%s is on device %d:%d, the first tensor on %d:%d (torch's numbers)", name,
                         t->device_type, t->device_index, c->device_type, c->device_index);
    bool empty = false;
    for (int64_t x = 0; x < t->rank; x++)
        empty = empty || t->size[x] == 0;
    if (!empty && t->rank > 0 && t->size[t->rank - 1] > 1 && t->stride[t->rank - 1] != 1)
        return call_fail(c, "ValueError", "%s has stride %lld in its last dimension, which must be contiguous", name,
                         (long long)t->stride[t->rank - 1]);
    return true;
}

bool call_check_contiguous(call *c, const tensor *t, const char *name) {
    int64_t step = 1;
    for (int64_t x = 0; t->handle && x < t->rank; x++)
        if (t->size[x] == 0)
            return true;
    for (int64_t x = t->rank; t->handle && x-- > 0; step *= t->size[x])
        if (t->size[x] > 1 && t->stride[x] != step)
            return call_fail(c, "ValueError", "%s must be contiguous, but has stride %lld in dimension %lld", name,
                             (long long)t->stride[x], (long long)x);
    return true;
}

static int print_shape(char *text, size_t n, int64_t rank, const int64_t *size) {
    int at = snprintf(text, n, "[");
    for (int64_t x = 0; x < rank && at < (int)n - 24; x++)
        at += snprintf(text + at, n - (size_t)at, x ? ", %lld" : "%lld", (long long)size[x]);
    return at + snprintf(text + at, n - (size_t)at, "]");
}

bool call_check_shape(call *c, const tensor *t, const char *name, int64_t rank, const int64_t *size) {
    if (t->rank == rank && (rank == 0 || memcmp(t->size, size, (size_t)rank * sizeof *size) == 0))
        return true;
    char is[200], must[200];
    print_shape(is, sizeof is, t->rank, t->size);
    print_shape(must, sizeof must, rank, size);
    return call_fail(c, "ValueError", "%s has shape %s, but must have %s", name, is, must);
}

/* ---------------------------------------------------------------------------------------------------- results */

void contiguous_strides(int64_t rank, const int64_t *size, int64_t *stride) {
    int64_t step = 1;
    for (int64_t x = rank; x-- > 0;) {
        stride[x] = step;
        step *= size[x] > 1 ? size[x] : 1;
    }
}

void *call_make(call *c, int x, int64_t rank, const int64_t *size, const int64_t *stride, int32_t dtype) {
    void *data = NULL;
    if (c->message[0])
        return NULL;
    if (torch_ok(c, aoti_torch_empty_strided(rank, size, stride, dtype, c->device_type, c->device_index, &c->result[x]),
                 "allocate a result"))
        torch_ok(c, aoti_torch_get_data_ptr(c->result[x], &data), "tell where a result lies");
    return data;
}

bool call_make_none(call *c, int x) {
    if ((uint64_t)x >= c->results)
        return true;
    return !c->message[0] && torch_ok(c, aoti_torch_new_uninitialized_tensor(&c->result[x]),
                                      "allocate what stands for a result that is not wanted");
}

bool call_make_empty(call *c, int x) {
    static const int64_t size = 0, stride = 1;
    if ((uint64_t)x < c->results)
        call_make(c, x, 1, &size, &stride, call_dtype(c));
    return !c->message[0];
}

bool call_zero(call *c, int x) {
    return !c->message[0] && torch_ok(c, aoti_torch_zero_(c->result[x]), "fill a result with zeros");
}

/* What a plan depends on beside its description. */
typedef struct place {
    int32_t device_index;
    int threads;
} place;

static place place_of(const call *c) {
    place p = {c->device_index, 0};
#ifdef _OPENMP
    if (c->device == HEDDLE_CPU)
        p.threads = omp_get_max_threads();
#endif
    return p;
}

static bool same_place(place a, place b) {
    return a.device_index == b.device_index && a.threads == b.threads;
}

bool call_attention_bytes(call *c, const heddle_attention *a, heddle_pass pass, size_t *bytes) {
    static _Thread_local struct {
        heddle_attention a; /* size 0: nothing yet */
        place at;
        size_t bytes;
    } kept[2];
    const place here = place_of(c);
    if (memcmp(a, &kept[pass].a, sizeof *a) != 0 || !same_place(here, kept[pass].at)) {
        if (!call_status(c, heddle_attention_workspace(a, pass, bytes)))
            return false;
        memcpy(&kept[pass].a, a, sizeof *a); /* the padding, too */
        kept[pass].at = here;
        kept[pass].bytes = *bytes;
    }
    *bytes = kept[pass].bytes;
    return true;
}

bool call_norm_linear_bytes(call *c, const heddle_norm_linear *a, heddle_pass pass, size_t *bytes) {
    static _Thread_local struct {
        heddle_norm_linear a;
        place at;
        size_t bytes;
    } kept[2];
    const place here = place_of(c);
    if (memcmp(a, &kept[pass].a, sizeof *a) != 0 || !same_place(here, kept[pass].at)) {
        if (!call_status(c, heddle_norm_linear_workspace(a, pass, bytes)))
            return false;
        memcpy(&kept[pass].a, a, sizeof *a);
        kept[pass].at = here;
        kept[pass].bytes = *bytes;
    }
    *bytes = kept[pass].bytes;
    return true;
}

bool call_workspace(call *c, size_t bytes, void **workspace) {
    *workspace = NULL;
    if (c->message[0])
        return false;
    if (bytes == 0)
        return true;
    const int64_t size = (int64_t)bytes, stride = 1;
    if (!torch_ok(c,
                  aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(), c->device_type, c->device_index,
                                           &c->workspace),
                  "allocate the workspace"))
        return false;
    return torch_ok(c, aoti_torch_get_data_ptr(c->workspace, workspace), "tell where the workspace lies");
}

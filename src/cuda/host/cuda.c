/* SPDX-License-Identifier: Apache-2.0
 * The CUDA backend: a record per device, images loaded when first used, launches in the current context on the caller's
 * stream. No call synchronises or allocates, so that CUDA graphs can capture them. */
#define _POSIX_C_SOURCE 200809L
#include "backend.h"
#include "cuda/attention/params.h"
#include "cuda/host/driver.h"
#include "cuda/norm_linear/device.h"
#include "fields.h"
#include "status.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEVICES 64
#define KNOWN_BLOCKS 256
#define LEAST_SHARED (48 * 1024) /* that a kernel may have without being asked for */

/* ------------------------------------------------------------------------------------------------------ kernels */

#define M(name, source) extern const unsigned char heddle__image_##name[];
#include "cuda/modules.def"
#undef M

static const struct {
    const char *name;
    const unsigned char *image;
} modules[] = {
#define M(name, source) {#name, heddle__image_##name},
#include "cuda/modules.def"
#undef M
};

enum { MODULES = sizeof modules / sizeof *modules, KERNELS = ATTENTION_KERNELS + NORM_LINEAR_KERNELS };

static const struct {
    const char *symbol, *module;
    uint32_t threads;
} norm_linear_rows[] = {
#define K(pass, dtype, family, module, threads) {"heddle_norm_linear_" #pass "_" #dtype "_" #family, #module, threads},
#include "cuda/norm_linear/norm_linear.def"
#undef K
};

/* Kernels are numbered: attention's, then norm-linear's. */
static const char *symbol_of(int kernel) {
    return kernel < ATTENTION_KERNELS ? heddle__cuda_attention_symbol((enum attention_kernel)kernel)
                                      : norm_linear_rows[kernel - ATTENTION_KERNELS].symbol;
}

static const char *module_of(int kernel) {
    return kernel < ATTENTION_KERNELS ? heddle__cuda_attention_module((enum attention_kernel)kernel)
                                      : norm_linear_rows[kernel - ATTENTION_KERNELS].module;
}

/* --------------------------------------------------------------------------------------------- what is remembered */

/* A device's facts: filled once, read-only afterwards. */
typedef struct device_record {
    atomic_int state; /* 0: nobody has asked, 1: somebody is at it, 2: done */
    char name[96];    /* "NVIDIA H200 (device 0, sm_90)" */
    int ordinal, major, minor, multiprocessors, shared_optin;
    int sm90;  /* Hopper, and HEDDLE_CUDA does not ask for less */
    int small; /* SMALL_CHOSEN, or what HEDDLE_CUDA asks for */
    /* A launch may overlap the one in front: it costs the host less, too. Every kernel of Hopper's machine code begins with waiting for
     * the one in front; PTX for older GPUs does not. */
    bool overlaps;
    cu_result error; /* of the query */
    _Atomic(cu_context) primary;
    /* Blocks of 2 MiB of addresses that were seen to be this device's memory (the driver maps no smaller ones), plus one. */
    atomic_uint_least64_t known[KNOWN_BLOCKS];
    atomic_uchar prepared[KERNELS]; /* loaded; 2: with its limit of shared memory raised on this device */
} device_record;

static device_record records[MAX_DEVICES];
/* Loaded images and their kernels hold for every device and context. */
static _Atomic(cu_library) libraries[MODULES];
static _Atomic(cu_kernel) kernels[KERNELS];

static void query_device(const cuda_driver *cu, device_record *r, int ordinal) {
    cu_device device;
    char name[64] = "GPU";
    r->ordinal = ordinal;
    r->error = cu->cuDeviceGet(&device, ordinal);
    const struct {
        int attribute, *value;
    } facts[] = {{CU_ATTRIBUTE_MAJOR, &r->major},
                 {CU_ATTRIBUTE_MINOR, &r->minor},
                 {CU_ATTRIBUTE_MULTIPROCESSORS, &r->multiprocessors},
                 {CU_ATTRIBUTE_SHARED_OPTIN, &r->shared_optin}};
    for (size_t x = 0; x < sizeof facts / sizeof *facts && r->error == CU_SUCCESS; x++)
        r->error = cu->cuDeviceGetAttribute(facts[x].value, facts[x].attribute, device);
    if (r->error == CU_SUCCESS)
        r->error = cu->cuDeviceGetName(name, sizeof name, device);
    const char *wanted = getenv("HEDDLE_CUDA");
    if (!wanted)
        wanted = "";
    /* As with HEDDLE_CPU, a name that nobody knows changes nothing. */
    const bool sm80 = !strcmp(wanted, "sm80"), sm90 = !strcmp(wanted, "sm90"), small = !strcmp(wanted, "small");
    r->sm90 = r->major == 9 && !sm80;
    /* Graphs take such launches since CUDA 12.3. */
    r->overlaps = r->major == 9 && cu->version >= 12030 && !getenv("CUDA_FORCE_PTX_JIT");
    r->small = small ? SMALL_ALWAYS : sm80 || sm90 ? SMALL_NEVER : SMALL_CHOSEN;
    snprintf(r->name, sizeof r->name, "%s (device %d, sm_%d%d)", name, ordinal, r->major, r->minor);
}

/* The record of the current context's device, or of device 0 when no context is current. */
static heddle_status current_device(const cuda_driver **driver, device_record **found, cu_context *context) {
    const cuda_driver *cu = heddle__cuda_driver();
    if (!cu)
        return HEDDLE_NO_DEVICE;
    cu_device device = 0;
    cu_result error = cu->cuCtxGetCurrent(context);
    if (error == CU_SUCCESS && *context)
        error = cu->cuCtxGetDevice(&device);
    if (error != CU_SUCCESS)
        return heddle__cuda_fail(cu, "CUDA", "cuCtxGetCurrent", error);
    if (device < 0 || device >= MAX_DEVICES)
        return fail(HEDDLE_NO_DEVICE, "CUDA device %d: heddle knows devices 0 to %d", device, MAX_DEVICES - 1);
    device_record *r = &records[device];
    int seen = 0;
    if (atomic_load_explicit(&r->state, memory_order_acquire) != 2) {
        if (atomic_compare_exchange_strong(&r->state, &seen, 1)) {
            query_device(cu, r, device);
            atomic_store_explicit(&r->state, 2, memory_order_release);
        }
        while (atomic_load_explicit(&r->state, memory_order_acquire) != 2)
            sched_yield();
    }
    if (r->error != CU_SUCCESS)
        return heddle__cuda_fail(cu, r->name, "cuDeviceGetAttribute", r->error);
    if (r->major < 8)
        return fail(HEDDLE_NO_DEVICE, "%s is older than Ampere: heddle needs compute capability 8.0", r->name);
    *driver = cu;
    *found = r;
    return HEDDLE_OK;
}

/* ---------------------------------------------------------------------------------------------- lazy loading */

/* Two threads may both load an image; the first to say so wins, and what the other loaded stays unused. */
static heddle_status load_kernel(const cuda_driver *cu, const device_record *r, int index) {
    const char *module = module_of(index);
    int m = 0;
    while (m < MODULES && strcmp(modules[m].name, module))
        m++;
    if (m == MODULES)
        return fail(HEDDLE_UNSUPPORTED, "%s: this build of heddle has no image %s", r->name, module);
    cu_library library = atomic_load_explicit(&libraries[m], memory_order_acquire), none = NULL;
    if (!library) {
        cu_result error = cu->cuLibraryLoadData(&library, modules[m].image, NULL, NULL, 0, NULL, NULL, 0);
        if (error != CU_SUCCESS)
            return heddle__cuda_fail(cu, r->name, "cuLibraryLoadData", error);
        if (!atomic_compare_exchange_strong(&libraries[m], &none, library))
            library = none;
    }
    cu_kernel kernel;
    cu_result error = cu->cuLibraryGetKernel(&kernel, library, symbol_of(index));
    if (error != CU_SUCCESS)
        return heddle__cuda_fail(cu, r->name, "cuLibraryGetKernel", error);
    atomic_store_explicit(&kernels[index], kernel, memory_order_release);
    return HEDDLE_OK;
}

static heddle_status prepare_kernel(const cuda_driver *cu, device_record *r, int index, uint32_t shared) {
    /* Loading is no part of a graph that the caller may be capturing. */
    int mode = CU_CAPTURE_MODE_RELAXED;
    cu->cuThreadExchangeStreamCaptureMode(&mode);
    heddle_status status = HEDDLE_OK;
    if (!atomic_load_explicit(&kernels[index], memory_order_acquire))
        status = load_kernel(cu, r, index);
    if (status == HEDDLE_OK && shared > LEAST_SHARED) {
        cu_kernel kernel = atomic_load_explicit(&kernels[index], memory_order_acquire);
        cu_result error = cu->cuKernelSetAttribute(CU_KERNEL_MAX_DYNAMIC_SHARED, r->shared_optin, kernel, r->ordinal);
        if (error != CU_SUCCESS)
            status = (int)shared > r->shared_optin
                         ? fail(HEDDLE_UNSUPPORTED, "%s: %s needs %u bytes of shared memory, a block can have %d",
                                r->name, symbol_of(index), shared, r->shared_optin)
                         : heddle__cuda_fail(cu, r->name, "cuKernelSetAttribute", error);
    }
    if (status == HEDDLE_OK)
        atomic_store_explicit(&r->prepared[index], shared > LEAST_SHARED ? 2 : 1, memory_order_release);
    cu->cuThreadExchangeStreamCaptureMode(&mode);
    return status;
}

static heddle_status launch(const cuda_driver *cu, device_record *r, int index, uint32_t threads, uint32_t grid,
                            uint32_t shared, const void *params, void *stream) {
    if (atomic_load_explicit(&r->prepared[index], memory_order_acquire) < (shared > LEAST_SHARED ? 2 : 1)) {
        heddle_status status = prepare_kernel(cu, r, index, shared);
        if (status != HEDDLE_OK)
            return status;
    }
    cu_kernel kernel = atomic_load_explicit(&kernels[index], memory_order_acquire);
    void *parameters[] = {(void *)(uintptr_t)params};
    static const cu_launch_attribute overlaps = {CU_LAUNCH_OVERLAPS, {1}};
    const cu_launch l = {{grid, 1, 1}, {threads, 1, 1}, shared, stream, &overlaps, r->overlaps};
    cu_result error = cu->cuLaunchKernelEx(&l, kernel, parameters, NULL);
    return error == CU_SUCCESS ? HEDDLE_OK : heddle__cuda_fail(cu, r->name, "cuLaunchKernelEx", error);
}

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
                                    heddle_pass pass, const void *data, const void *workspace) {
    for (const tensor_field *t = fields; t->name; t++) {
        const void *p;
        memcpy(&p, (const char *)data + t->offset, sizeof p);
        heddle_status status = t->need[pass] == NEED_UNUSED ? HEDDLE_OK : check_pointer(cu, r, t->name, p);
        if (status != HEDDLE_OK)
            return status;
    }
    return check_pointer(cu, r, "workspace", workspace);
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
    return current_device(&cu, &r, &context);
}

static void describe(char *text, size_t n) {
    const cuda_driver *cu = NULL;
    device_record *r = NULL;
    cu_context context = NULL;
    if (current_device(&cu, &r, &context) == HEDDLE_OK)
        snprintf(text, n, "%s, %d multiprocessors, driver for CUDA %d.%d, %s%s kernels", r->name, r->multiprocessors,
                 cu->version / 1000, cu->version % 1000 / 10, r->small == SMALL_NEVER ? "" : "small, ",
                 r->sm90 ? "sm90 and sm80" : "sm80");
}

static attention_device facts_of(const device_record *r) {
    return (attention_device){
        .multiprocessors = r->multiprocessors,
        .shared_bytes = (size_t)r->shared_optin,
        .sm90 = r->sm90,
        .small = r->small,
    };
}

static heddle_status plan_attention(attention_plan *plan) {
    const cuda_driver *cu = NULL;
    device_record *r = NULL;
    cu_context context = NULL;
    heddle_status status = current_device(&cu, &r, &context);
    if (status != HEDDLE_OK || !r)
        return status;
    const attention_device facts = facts_of(r);
    plan->on = (plan_device){r, context};
    return heddle__cuda_plan_attention(plan, &facts);
}

static heddle_status plan_norm_linear(norm_linear_plan *plan) {
    const cuda_driver *cu = NULL;
    device_record *r = NULL;
    cu_context context = NULL;
    heddle_status status = current_device(&cu, &r, &context);
    if (status != HEDDLE_OK || !r)
        return status;
    const norm_linear_device facts = {r->name, r->multiprocessors, (size_t)r->shared_optin, r->sm90, r->small};
    plan->on = (plan_device){r, context};
    return heddle__cuda_plan_norm_linear(plan, &facts);
}

/* For a caller without a context of its own: the one that cudart uses too. */
static heddle_status enter_primary(const cuda_driver *cu, device_record *r, cu_context *context) {
    cu_context primary = atomic_load_explicit(&r->primary, memory_order_acquire);
    cu_result error = CU_SUCCESS;
    if (!primary) {
        error = cu->cuDevicePrimaryCtxRetain(&primary, r->ordinal);
        if (error != CU_SUCCESS)
            return heddle__cuda_fail(cu, r->name, "cuDevicePrimaryCtxRetain", error);
        atomic_store_explicit(&r->primary, primary, memory_order_release);
    }
    error = cu->cuCtxPushCurrent_v2(primary);
    *context = primary;
    return error == CU_SUCCESS ? HEDDLE_OK : heddle__cuda_fail(cu, r->name, "cuCtxPushCurrent", error);
}

/* Boxes of 64 columns, as the kernels for Hopper lay their tiles down. */
static heddle_status encode_map(const cuda_driver *cu, const device_record *r, heddle_dtype dtype, unsigned rank,
                                const tensor_shape *shape, tensor_map *map) {
    static const uint32_t steps[] = {1, 1, 1, 1};
    const int type = dtype == HEDDLE_BF16 ? CU_TENSOR_MAP_BFLOAT16 : CU_TENSOR_MAP_FLOAT16;
    const uint32_t box[] = {64, shape->rows, 1, 1};
    cu_result error =
        cu->cuTensorMapEncodeTiled(map, type, rank, (void *)(uintptr_t)shape->base, shape->extent, shape->stride, box,
                                   steps, 0, CU_TENSOR_MAP_SWIZZLE_128, CU_TENSOR_MAP_PROMOTE_256, 0);
    return error == CU_SUCCESS ? HEDDLE_OK : heddle__cuda_fail(cu, r->name, "cuTensorMapEncodeTiled", error);
}

static bool have_same_shape(const tensor_shape *a, const tensor_shape *b) {
    return !memcmp(a->extent, b->extent, sizeof a->extent) && !memcmp(a->stride, b->stride, sizeof a->stride) &&
           a->rows == b->rows;
}

/* The map of a tensor that lies elsewhere, as another one does: a quarter of the time. */
static heddle_status move_map(const cuda_driver *cu, const device_record *r, const tensor_map *like,
                              const tensor_shape *shape, tensor_map *map) {
    *map = *like;
    cu_result error = cu->cuTensorMapReplaceAddress(map, (void *)(uintptr_t)shape->base);
    return error == CU_SUCCESS ? HEDDLE_OK : heddle__cuda_fail(cu, r->name, "cuTensorMapReplaceAddress", error);
}

static heddle_status encode_maps(const cuda_driver *cu, const device_record *r, const attention_plan *plan,
                                 const heddle_attention_data *data, attention_params_sm90 *params) {
    tensor_map *maps[] = {&params->q, &params->k, &params->v, &params->dout};
    tensor_shape shapes[4];
    heddle__cuda_attention_shapes(plan, data, shapes);
    heddle_status status = HEDDLE_OK;
    for (int x = 0; x < 4 && status == HEDDLE_OK; x++) {
        int like = 0;
        while (like < x && !(shapes[like].base && have_same_shape(&shapes[like], &shapes[x])))
            like++;
        if (shapes[x].base)
            status = like < x ? move_map(cu, r, maps[like], &shapes[x], maps[x])
                              : encode_map(cu, r, plan->a.dtype, 4, &shapes[x], maps[x]);
    }
    return status;
}

static heddle_status launch_attention(const cuda_driver *cu, device_record *r, cu_context context,
                                      const attention_plan *plan, const heddle_attention_data *data, void *workspace,
                                      void *stream) {
    heddle_status status = check_pointers(cu, r, attention_fields, plan->pass, data, workspace);
    if (status == HEDDLE_OK)
        status = check_stream(cu, r, context, stream);
    if (status != HEDDLE_OK)
        return status;
    const attention_device facts = facts_of(r);
    attention_params_sm90 params;
    attention_launch launches[ATTENTION_MAX_LAUNCHES];
    int n = heddle__cuda_attention_launches(plan, &facts, data, workspace, &params.p, launches), sm90 = 0;
    for (int x = 0; x < n; x++)
        sm90 |= launches[x].sm90;
    if (sm90)
        status = encode_maps(cu, r, plan, data, &params);
    for (int x = 0; x < n && status == HEDDLE_OK; x++) {
        const attention_launch *l = &launches[x];
        status = launch(cu, r, (int)l->kernel, l->threads, l->grid, l->shared_bytes,
                        l->sm90 ? (const void *)&params : &params.p, stream);
    }
    return status;
}

static heddle_status launch_norm_linear(const cuda_driver *cu, device_record *r, cu_context context,
                                        const norm_linear_plan *plan, const heddle_norm_linear_data *data,
                                        void *workspace, void *stream) {
    heddle_status status = check_pointers(cu, r, norm_linear_fields, plan->pass, data, workspace);
    if (status == HEDDLE_OK)
        status = check_stream(cu, r, context, stream);
    if (status != HEDDLE_OK)
        return status;
    const norm_linear_device facts = {r->name, r->multiprocessors, (size_t)r->shared_optin, r->sm90, r->small};
    norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES];
    int n = heddle__cuda_norm_linear_launches(plan, &facts, data, workspace, launches);
    for (int x = 0; x < n && status == HEDDLE_OK; x++) {
        norm_linear_launch *l = &launches[x];
        tensor_map *maps[] = {&l->params.gemm90.a, &l->params.gemm90.b};
        for (int y = 0; l->sm90 && y < 2 && status == HEDDLE_OK; y++)
            status = encode_map(cu, r, plan->a.dtype, 2, &l->shapes[y], maps[y]);
        if (status == HEDDLE_OK)
            status = launch(cu, r, ATTENTION_KERNELS + (int)l->kernel, norm_linear_rows[l->kernel].threads, l->grid,
                            l->shared, &l->params, stream);
    }
    return status;
}

static heddle_status run_attention(const attention_plan *plan, const heddle_attention_data *data, void *workspace,
                                   void *stream) {
    const cuda_driver *cu = heddle__cuda_driver();
    device_record *r = plan->on.record;
    cu_context context = plan->on.context;
    if (!cu) /* it was there when the plan was made */
        return HEDDLE_NO_DEVICE;
    heddle_status status = context ? HEDDLE_OK : enter_primary(cu, r, &context);
    if (status != HEDDLE_OK)
        return status;
    status = launch_attention(cu, r, context, plan, data, workspace, stream);
    if (!plan->on.context)
        cu->cuCtxPopCurrent_v2(&context);
    return status;
}

static heddle_status run_norm_linear(const norm_linear_plan *plan, const heddle_norm_linear_data *data, void *workspace,
                                     void *stream) {
    const cuda_driver *cu = heddle__cuda_driver();
    device_record *r = plan->on.record;
    cu_context context = plan->on.context;
    if (!cu) /* it was there when the plan was made */
        return HEDDLE_NO_DEVICE;
    heddle_status status = context ? HEDDLE_OK : enter_primary(cu, r, &context);
    if (status != HEDDLE_OK)
        return status;
    status = launch_norm_linear(cu, r, context, plan, data, workspace, stream);
    if (!plan->on.context)
        cu->cuCtxPopCurrent_v2(&context);
    return status;
}

const backend heddle_cuda_backend = {available,        describe,      plan_attention,
                                     plan_norm_linear, run_attention, run_norm_linear};

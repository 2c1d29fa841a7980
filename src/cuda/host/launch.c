/* SPDX-License-Identifier: Apache-2.0
 * Images of kernels loaded when first used, tensor maps, launches in the current context on the caller's stream. */
#include "cuda/host/launch.h"

#include "status.h"

#include <assert.h>
#include <string.h>

#define LEAST_SHARED (48 * 1024) /* that a kernel may have without being asked for */

#define M(name, source) extern const unsigned char heddle__image_##name[];
#include "cuda/modules.def"
#undef M

static const unsigned char *const modules[] = {
#define M(name, source) heddle__image_##name,
#include "cuda/modules.def"
#undef M
};

static_assert(sizeof modules / sizeof *modules == CUDA_MODULES, "each by its number");

/* Loaded images and their kernels hold for every device and context. */
static _Atomic(cu_library) libraries[CUDA_MODULES];
static _Atomic(cu_kernel) kernels[CUDA_KERNELS];

/* ------------------------------------------------------------------------------------------------------ kernels */

/* Two threads may both load an image; the first to say so wins, and what the other loaded stays unused. */
static heddle_status load_kernel(const cuda_driver *cu, const device_record *r, enum cuda_kernel index) {
    const enum cuda_module m = heddle__cuda_kernels[index].module;
    cu_library library = atomic_load_explicit(&libraries[m], memory_order_acquire), none = NULL;
    if (!library) {
        cu_result error = cu->cuLibraryLoadData(&library, modules[m], NULL, NULL, 0, NULL, NULL, 0);
        if (error != CU_SUCCESS)
            return heddle__cuda_fail(cu, r->name, "cuLibraryLoadData", error);
        if (!atomic_compare_exchange_strong(&libraries[m], &none, library))
            library = none;
    }
    cu_kernel kernel;
    cu_result error = cu->cuLibraryGetKernel(&kernel, library, heddle__cuda_kernels[index].symbol);
    if (error != CU_SUCCESS)
        return heddle__cuda_fail(cu, r->name, "cuLibraryGetKernel", error);
    atomic_store_explicit(&kernels[index], kernel, memory_order_release);
    return HEDDLE_OK;
}

static heddle_status prepare_kernel(const cuda_driver *cu, device_record *r, enum cuda_kernel index, uint32_t shared) {
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
                                r->name, heddle__cuda_kernels[index].symbol, shared, r->shared_optin)
                         : heddle__cuda_fail(cu, r->name, "cuKernelSetAttribute", error);
    }
    if (status == HEDDLE_OK)
        atomic_store_explicit(&r->prepared[index], shared > LEAST_SHARED ? 2 : 1, memory_order_release);
    cu->cuThreadExchangeStreamCaptureMode(&mode);
    return status;
}

heddle_status heddle__cuda_launch(const cuda_driver *cu, device_record *r, enum cuda_kernel index, uint32_t grid,
                                  uint32_t shared, const void *params, void *stream) {
    if (atomic_load_explicit(&r->prepared[index], memory_order_acquire) < (shared > LEAST_SHARED ? 2 : 1)) {
        heddle_status status = prepare_kernel(cu, r, index, shared);
        if (status != HEDDLE_OK)
            return status;
    }
    cu_kernel kernel = atomic_load_explicit(&kernels[index], memory_order_acquire);
    void *parameters[] = {(void *)(uintptr_t)params};
    static const cu_launch_attribute overlaps = {CU_LAUNCH_OVERLAPS, {1}};
    const cu_launch l = {{grid, 1, 1}, {heddle__cuda_kernels[index].threads, 1, 1}, shared, stream, &overlaps,
                         r->overlaps};
    cu_result error = cu->cuLaunchKernelEx(&l, kernel, parameters, NULL);
    return error == CU_SUCCESS ? HEDDLE_OK : heddle__cuda_fail(cu, r->name, "cuLaunchKernelEx", error);
}

/* -------------------------------------------------------------------------------------------------- tensor maps */

/* Boxes of 64 columns, as the kernels for Hopper lay their tiles down. */
static heddle_status encode_map(const cuda_driver *cu, const device_record *r, heddle_dtype dtype, unsigned rank,
                                const tensor_shape *shape, tensor_map *map) {
    static const uint32_t steps[] = {1, 1, 1, 1};
    const int type = dtype == HEDDLE_BF16 ? CU_TENSOR_MAP_BFLOAT16 : CU_TENSOR_MAP_FLOAT16;
    const uint32_t box[] = {64, shape->rows, 1, 1};
    cu_result error =
        cu->cuTensorMapEncodeTiled(map, type, rank, (void *)(uintptr_t)shape->at, shape->extent, shape->stride, box,
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
    cu_result error = cu->cuTensorMapReplaceAddress(map, (void *)(uintptr_t)shape->at);
    return error == CU_SUCCESS ? HEDDLE_OK : heddle__cuda_fail(cu, r->name, "cuTensorMapReplaceAddress", error);
}

heddle_status heddle__cuda_encode_maps(const cuda_driver *cu, const device_record *r, heddle_dtype dtype, unsigned rank,
                                       int count, const tensor_shape *shapes, tensor_map *const *maps) {
    heddle_status status = HEDDLE_OK;
    for (int x = 0; x < count && status == HEDDLE_OK; x++) {
        int like = 0;
        while (like < x && !(shapes[like].at && have_same_shape(&shapes[like], &shapes[x])))
            like++;
        if (shapes[x].at)
            status = like < x ? move_map(cu, r, maps[like], &shapes[x], maps[x])
                              : encode_map(cu, r, dtype, rank, &shapes[x], maps[x]);
    }
    return status;
}

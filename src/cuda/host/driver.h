/* SPDX-License-Identifier: Apache-2.0
 * libcuda, opened at run time: the library has no link-time CUDA, and loads on machines without it. */
#ifndef HEDDLE_CUDA_DRIVER_H
#define HEDDLE_CUDA_DRIVER_H

#include "heddle.h"

/* The driver's types, by its ABI. */
typedef int cu_result;
typedef int cu_device;
typedef struct cu_context_ *cu_context;
typedef struct cu_stream_ *cu_stream;
typedef struct cu_library_ *cu_library;
typedef struct cu_kernel_ *cu_kernel;
typedef uint64_t cu_pointer;

/* CUlaunchAttribute and CUlaunchConfig. */
typedef struct cu_launch_attribute {
    uint64_t id;
    int32_t value[16];
} cu_launch_attribute;

typedef struct cu_launch {
    unsigned grid[3], block[3], shared;
    cu_stream stream;
    const cu_launch_attribute *attributes;
    unsigned count;
} cu_launch;

/* Every driver call that heddle uses: D(symbol, parameters). All are in drivers since CUDA 12.0. */
#define CUDA_DRIVER_CALLS                                                                                              \
    D(cuInit, (unsigned flags))                                                                                        \
    D(cuDriverGetVersion, (int *version))                                                                              \
    D(cuGetErrorName, (cu_result error, const char **name))                                                            \
    D(cuDeviceGetCount, (int *count))                                                                                  \
    D(cuDeviceGet, (cu_device * device, int ordinal))                                                                  \
    D(cuDeviceGetName, (char *name, int n, cu_device device))                                                          \
    D(cuDeviceGetAttribute, (int *value, int attribute, cu_device device))                                             \
    D(cuDevicePrimaryCtxRetain, (cu_context * context, cu_device device))                                              \
    D(cuCtxGetCurrent, (cu_context * context))                                                                         \
    D(cuCtxGetDevice, (cu_device * device))                                                                            \
    D(cuCtxPushCurrent_v2, (cu_context context))                                                                       \
    D(cuCtxPopCurrent_v2, (cu_context * context))                                                                      \
    D(cuStreamGetCtx, (cu_stream stream, cu_context * context))                                                        \
    D(cuPointerGetAttributes, (unsigned count, int *attributes, void **values, cu_pointer pointer))                    \
    D(cuThreadExchangeStreamCaptureMode, (int *mode))                                                                  \
    D(cuLibraryLoadData, (cu_library * library, const void *code, void *jit, void *jit_values, unsigned jit_count,     \
                          void *options, void *option_values, unsigned option_count))                                  \
    D(cuLibraryGetKernel, (cu_kernel * kernel, cu_library library, const char *name))                                  \
    D(cuKernelSetAttribute, (int attribute, int value, cu_kernel kernel, cu_device device))                            \
    D(cuTensorMapEncodeTiled,                                                                                          \
      (void *map, int type, unsigned rank, void *base, const uint64_t *extents, const uint64_t *strides,               \
       const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill))              \
    D(cuTensorMapReplaceAddress, (void *map, void *base))                                                              \
    D(cuLaunchKernelEx, (const cu_launch *launch, cu_kernel kernel, void **parameters, void **extra))

typedef struct cuda_driver {
#define D(symbol, parameters) cu_result(*symbol) parameters;
    CUDA_DRIVER_CALLS
#undef D
    int version; /* 12080 */
    int devices;
} cuda_driver;

enum {
    CU_SUCCESS = 0,
    CU_ERROR_NO_BINARY_FOR_GPU = 209,
    CU_ERROR_INVALID_CONTEXT = 201,
    CU_ERROR_INVALID_HANDLE = 400,
    CU_ERROR_NOT_FOUND = 500,
    CU_ATTRIBUTE_MULTIPROCESSORS = 16,
    CU_ATTRIBUTE_MAJOR = 75,
    CU_ATTRIBUTE_MINOR = 76,
    CU_ATTRIBUTE_SHARED_OPTIN = 97,
    CU_KERNEL_MAX_DYNAMIC_SHARED = 8,
    CU_POINTER_MEMORY_TYPE = 2,
    CU_POINTER_DEVICE_ORDINAL = 9,
    CU_MEMORY_TYPE_HOST = 1,
    CU_CAPTURE_MODE_RELAXED = 2,
    CU_LAUNCH_OVERLAPS = 6,
    CU_TENSOR_MAP_FLOAT16 = 6,
    CU_TENSOR_MAP_BFLOAT16 = 9,
    CU_TENSOR_MAP_SWIZZLE_128 = 3,
    CU_TENSOR_MAP_PROMOTE_256 = 3
};

/* The driver, opened and initialised at the first call; NULL and a message when there is none or no GPU. */
const cuda_driver *heddle__cuda_driver(void);

/* "cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE (1)" as a status. Errors that only a kernel gone wrong leaves behind are
 * somebody else's: nothing of ours that is under way is waited for. */
heddle_status heddle__cuda_fail(const cuda_driver *cu, const char *device, const char *call, cu_result error);

#endif

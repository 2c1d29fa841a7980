/* SPDX-License-Identifier: Apache-2.0
 * A libcuda.so.1 without a GPU: devices, failures and limits as the environment has them, and a record of what was launched. It
 * lets the host side of the CUDA backend be tested anywhere (test_driver.c); it computes nothing.
 *
 * FAKE_VERSION=13000 FAKE_DEVICES=1 FAKE_CC=90 FAKE_SHARED=232448 FAKE_MULTIPROCESSORS=132 FAKE_CONTEXT=1 (0: none is current)
 * FAKE_OWNER=n (the device of all memory, whatever its address) FAKE_FAIL=cuLaunchKernelEx:700 (that call returns this). Addresses
 * from 2^36·(n + 1) on are memory of device n; all others are the host's. Stream 0x1000 belongs to the current context, 0x2000 to
 * another one, all others are none. */
#include "fake_driver.h"
#include "cuda/host/driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_KERNELS 1024

struct cu_kernel_ {
    char name[96];
    int limit; /* of dynamic shared memory */
    int launches;
};
static struct cu_kernel_ kernels[MAX_KERNELS];
static int depth; /* of contexts pushed */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static cu_result failure(const char *call) {
    const char *text = getenv("FAKE_FAIL");
    const size_t n = strlen(call);
    return text && !strncmp(text, call, n) && text[n] == ':' ? atoi(text + n + 1) : CU_SUCCESS;
}
#define FAIL_IF_TOLD                                                                                                   \
    do {                                                                                                               \
        cu_result told_ = failure(__func__);                                                                           \
        if (told_)                                                                                                     \
            return told_;                                                                                              \
    } while (0)

/* Every call of the library's list, with its very prototype. */
#define D(symbol, parameters) EXPORT cu_result symbol parameters;
CUDA_DRIVER_CALLS
#undef D

static bool has_context(void) {
    return depth > 0 || setting("FAKE_CONTEXT", 1);
}

static cu_context own_context(void) {
    return (cu_context)(uintptr_t)0x100;
}

cu_result cuInit(unsigned flags) {
    FAIL_IF_TOLD;
    return (int)flags;
}
cu_result cuDriverGetVersion(int *version) {
    *version = setting("FAKE_VERSION", 13000);
    return CU_SUCCESS;
}
cu_result cuGetErrorName(cu_result error, const char **name) {
    *name = error == 999 ? NULL : "FAKE_ERROR";
    return error == 999 ? 1 : CU_SUCCESS;
}
cu_result cuDeviceGetCount(int *count) {
    FAIL_IF_TOLD;
    *count = setting("FAKE_DEVICES", 1);
    return CU_SUCCESS;
}
cu_result cuDeviceGet(cu_device *device, int ordinal) {
    *device = ordinal;
    return CU_SUCCESS;
}
cu_result cuDeviceGetName(char *name, int n, cu_device device) {
    snprintf(name, (size_t)n, "Fake GPU %d", device);
    return CU_SUCCESS;
}
cu_result cuDeviceGetAttribute(int *value, int attribute, cu_device device) {
    FAIL_IF_TOLD;
    (void)device;
    const int cc = setting("FAKE_CC", 90);
    *value = attribute == CU_ATTRIBUTE_MAJOR             ? cc / 10
             : attribute == CU_ATTRIBUTE_MINOR           ? cc % 10
             : attribute == CU_ATTRIBUTE_MULTIPROCESSORS ? setting("FAKE_MULTIPROCESSORS", 132)
                                                         : setting("FAKE_SHARED", 232448);
    return CU_SUCCESS;
}
cu_result cuDevicePrimaryCtxRetain(cu_context *context, cu_device device) {
    FAIL_IF_TOLD;
    (void)device;
    *context = own_context();
    return CU_SUCCESS;
}
cu_result cuCtxGetCurrent(cu_context *context) {
    FAIL_IF_TOLD;
    *context = has_context() ? own_context() : NULL;
    return CU_SUCCESS;
}
cu_result cuCtxGetDevice(cu_device *device) {
    *device = setting("FAKE_DEVICE", 0);
    return CU_SUCCESS;
}
cu_result cuCtxPushCurrent_v2(cu_context context) {
    FAIL_IF_TOLD;
    depth++;
    return context == own_context() ? CU_SUCCESS : CU_ERROR_INVALID_CONTEXT;
}
cu_result cuCtxPopCurrent_v2(cu_context *context) {
    depth--;
    *context = own_context();
    return CU_SUCCESS;
}
cu_result cuStreamGetCtx(cu_stream stream, cu_context *context) {
    FAIL_IF_TOLD;
    if ((uintptr_t)stream != 0x1000 && (uintptr_t)stream != 0x2000)
        return CU_ERROR_INVALID_HANDLE;
    *context = (uintptr_t)stream == 0x1000 ? own_context() : (cu_context)(uintptr_t)0x200;
    return CU_SUCCESS;
}
cu_result cuPointerGetAttributes(unsigned count, int *attributes, void **values, cu_pointer pointer) {
    FAIL_IF_TOLD;
    const int device = setting("FAKE_OWNER", (int)(pointer >> 36) - 1);
    for (unsigned x = 0; x < count; x++)
        if (attributes[x] == CU_POINTER_MEMORY_TYPE)
            *(unsigned *)values[x] = device >= 0 && device < 16 ? 2 : CU_MEMORY_TYPE_HOST;
        else
            *(int *)values[x] = device;
    return CU_SUCCESS;
}
cu_result cuThreadExchangeStreamCaptureMode(int *mode) {
    static _Thread_local int current;
    const int was = current;
    current = *mode;
    *mode = was;
    return CU_SUCCESS;
}
cu_result cuLibraryLoadData(cu_library *library, const void *code, void *jit, void *jit_values, unsigned jit_count,
                            void *options, void *option_values, unsigned option_count) {
    FAIL_IF_TOLD;
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)option_values, (void)option_count;
    *library = (cu_library)(uintptr_t)code;
    return CU_SUCCESS;
}
cu_result cuLibraryGetKernel(cu_kernel *kernel, cu_library library, const char *name) {
    FAIL_IF_TOLD;
    (void)library;
    int x = 0;
    pthread_mutex_lock(&lock);
    while (x < MAX_KERNELS && kernels[x].name[0] && strcmp(kernels[x].name, name))
        x++;
    if (x < MAX_KERNELS && !kernels[x].name[0]) {
        snprintf(kernels[x].name, sizeof kernels[x].name, "%s", name);
        kernels[x].limit = 48 * 1024;
    }
    pthread_mutex_unlock(&lock);
    *kernel = x < MAX_KERNELS ? &kernels[x] : NULL;
    return x < MAX_KERNELS ? CU_SUCCESS : CU_ERROR_NOT_FOUND;
}
cu_result cuKernelSetAttribute(int attribute, int value, cu_kernel kernel, cu_device device) {
    FAIL_IF_TOLD;
    (void)device;
    if (attribute != CU_KERNEL_MAX_DYNAMIC_SHARED || value > setting("FAKE_SHARED", 232448))
        return 1;
    pthread_mutex_lock(&lock);
    kernel->limit = value;
    pthread_mutex_unlock(&lock);
    return CU_SUCCESS;
}
cu_result cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *base, const uint64_t *extents,
                                 const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                                 int swizzle, int promotion, int fill) {
    FAIL_IF_TOLD;
    (void)type, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    if ((uintptr_t)map % 64 || (uintptr_t)base % 16 || rank < 1 || rank > 5)
        return 1;
    /* The driver's own rules. */
    for (unsigned x = 0; x < rank; x++)
        if (extents[x] < 1 || extents[x] > UINT64_C(1) << 32 || box[x] < 1 || box[x] > 256 || steps[x] != 1 ||
            (x + 1 < rank && (strides[x] % 16 || strides[x] >= UINT64_C(1) << 40)))
            return 1;
    memset(map, 0, 128);
    return CU_SUCCESS;
}
cu_result cuTensorMapReplaceAddress(void *map, void *base) {
    FAIL_IF_TOLD;
    return (uintptr_t)map % 64 || (uintptr_t)base % 16;
}
cu_result cuLaunchKernelEx(const cu_launch *launch, cu_kernel kernel, void **parameters, void **extra) {
    FAIL_IF_TOLD;
    (void)extra;
    for (unsigned x = 0; x < launch->count; x++)
        if (launch->attributes[x].id != CU_LAUNCH_OVERLAPS || launch->attributes[x].value[0] != 1 ||
            setting("FAKE_CC", 90) / 10 != 9 || setting("FAKE_VERSION", 13000) < 12030)
            return 1;
    const unsigned threads = launch->block[0] * launch->block[1] * launch->block[2];
    pthread_mutex_lock(&lock);
    const bool fits = has_context() && parameters && launch->grid[0] > 0 && launch->grid[0] <= INT32_MAX &&
                      launch->grid[1] == 1 && launch->grid[2] == 1 && threads > 0 && threads <= 1024 &&
                      (int)launch->shared <= kernel->limit;
    kernel->launches += fits;
    pthread_mutex_unlock(&lock);
    return fits ? CU_SUCCESS : 1;
}

EXPORT int fake_launches(const char *symbol) {
    int n = 0;
    for (int x = 0; x < MAX_KERNELS && kernels[x].name[0]; x++)
        if (!symbol || !strcmp(kernels[x].name, symbol))
            n += kernels[x].launches;
    return n;
}

EXPORT int fake_depth(void) {
    return depth;
}

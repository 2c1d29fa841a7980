/* SPDX-License-Identifier: Apache-2.0
 * A libcuda.so.1 without a GPU: devices, failures and limits as the environment has them, and a record of what was launched. It
 * lets the host side of the CUDA backend be tested anywhere (test_driver.c). It computes nothing, unless it is linked with tests/emulator:
 * then kernels run, and memory is filled and copied.
 *
 * FAKE_VERSION=13000 FAKE_DEVICES=1 FAKE_CC=90 FAKE_SHARED=232448 FAKE_MULTIPROCESSORS=132 FAKE_CONTEXT=1 (0: none is current)
 * FAKE_OWNER=n (the device of all memory, whatever its address) FAKE_FAIL=cuLaunchKernelEx:700 (that call returns this). Addresses
 * from 2^36·(n + 1) on are memory of device n; all others are the host's. Stream 0x1000 belongs to the current context, 0x2000 to
 * another one, all others are none. Memory that it gives out is the host's, at such addresses; every event is 1 ms behind the one
 * before, and modules of a user's own have kernels that do nothing. A block of memory ends with a page, and none lies behind it. */
#define _GNU_SOURCE
#include "fake_driver.h"
#include "cuda/host/driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_KERNELS 1024
#define LAUNCH_FAILED 719

struct cu_kernel_ {
    char name[96];
    int limit; /* of dynamic shared memory */
    int launches;
    unsigned blocks;   /* of the largest */
    const void *found; /* by the emulator */
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
    const void *found = emulator_find ? emulator_find(library, name) : NULL;
    int x = 0;
    if (emulator_find && !found)
        return CU_ERROR_NOT_FOUND;
    pthread_mutex_lock(&lock);
    while (x < MAX_KERNELS && kernels[x].name[0] && strcmp(kernels[x].name, name))
        x++;
    if (x < MAX_KERNELS && !kernels[x].name[0]) {
        snprintf(kernels[x].name, sizeof kernels[x].name, "%s", name);
        kernels[x].limit = 48 * 1024;
        kernels[x].found = found;
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
    if (emulator_encode)
        emulator_encode(map, rank, base, extents, strides, box);
    return CU_SUCCESS;
}
cu_result cuTensorMapReplaceAddress(void *map, void *base) {
    FAIL_IF_TOLD;
    if ((uintptr_t)map % 64 || (uintptr_t)base % 16)
        return 1;
    if (emulator_move)
        emulator_move(map, base);
    return CU_SUCCESS;
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
    if (fits && launch->grid[0] > kernel->blocks)
        kernel->blocks = launch->grid[0];
    const bool right = !fits || !emulator_run || emulator_run(kernel->found, launch, parameters[0]);
    pthread_mutex_unlock(&lock);
    return !fits ? 1 : right ? CU_SUCCESS : LAUNCH_FAILED;
}

EXPORT int fake_launches(const char *symbol) {
    int n = 0;
    for (int x = 0; x < MAX_KERNELS && kernels[x].name[0]; x++)
        if (!symbol || !strcmp(kernels[x].name, symbol))
            n += kernels[x].launches;
    return n;
}

EXPORT int fake_blocks(const char *symbol) {
    int most = 0;
    for (int x = 0; x < MAX_KERNELS && kernels[x].name[0]; x++)
        if (!strcmp(kernels[x].name, symbol))
            most = (int)kernels[x].blocks;
    return most;
}

EXPORT int fake_depth(void) {
    return depth;
}

/* ------------------------------------------------------------------------------- what the command asks for, beside */

#define OTHER(symbol, parameters)                                                                                      \
    EXPORT cu_result symbol parameters;                                                                                \
    cu_result symbol parameters

#define PAGE ((size_t)4096)

/* The size lies in a page of its own in front, and a page that nobody may touch behind. */
OTHER(cuMemAlloc_v2, (cu_pointer * p, size_t bytes)) {
    FAIL_IF_TOLD;
    static uintptr_t next = (uintptr_t)1 << 36;
    const size_t used = (bytes + 15) / 16 * 16, all = (used + PAGE - 1) / PAGE * PAGE + 2 * PAGE;
    pthread_mutex_lock(&lock);
    char *at = mmap((void *)next, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    next += all;
    if (next > (uintptr_t)3 << 35) /* in device 0's part */
        next = (uintptr_t)1 << 36;
    pthread_mutex_unlock(&lock);
    if (at == MAP_FAILED)
        return 2;
    memcpy(at, &all, sizeof all);
    char *const begin = at + all - PAGE - used;
    if (mprotect(at + all - PAGE, PAGE, PROT_NONE))
        return 1;
    if (emulator_run)
        memset(begin, 0xff, used);
    *p = (uintptr_t)begin;
    return CU_SUCCESS;
}
OTHER(cuMemFree_v2, (cu_pointer p)) {
    char *at = (char *)(uintptr_t)(p / PAGE * PAGE) - PAGE;
    size_t all = 0;
    memcpy(&all, at, sizeof all);
    return munmap(at, all) ? 1 : CU_SUCCESS;
}
OTHER(cuMemcpy, (cu_pointer to, cu_pointer from, size_t bytes)) {
    FAIL_IF_TOLD;
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return CU_SUCCESS;
}
OTHER(cuMemcpyDtoDAsync_v2, (cu_pointer to, cu_pointer from, size_t bytes, cu_stream stream)) {
    FAIL_IF_TOLD;
    (void)stream;
    if (emulator_run)
        memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return CU_SUCCESS;
}
OTHER(cuMemsetD32Async, (cu_pointer p, unsigned value, size_t n, cu_stream stream)) {
    FAIL_IF_TOLD;
    (void)stream;
    for (size_t x = 0; emulator_run && x < n; x++)
        ((unsigned *)(uintptr_t)p)[x] = value;
    return CU_SUCCESS;
}
OTHER(cuMemsetD8_v2, (cu_pointer p, unsigned char value, size_t n)) {
    FAIL_IF_TOLD;
    if (emulator_run)
        memset((void *)(uintptr_t)p, value, n);
    return CU_SUCCESS;
}
OTHER(cuMemHostAlloc, (void **p, size_t bytes, unsigned flags)) {
    FAIL_IF_TOLD;
    (void)flags;
    *p = malloc(bytes);
    return *p ? CU_SUCCESS : 2;
}
OTHER(cuMemcpyDtoHAsync_v2, (void *to, cu_pointer from, size_t bytes, cu_stream stream)) {
    FAIL_IF_TOLD;
    (void)stream;
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return CU_SUCCESS;
}
OTHER(cuCtxSetCurrent, (cu_context context)) {
    return context == own_context() ? CU_SUCCESS : CU_ERROR_INVALID_CONTEXT;
}
OTHER(cuCtxSynchronize, (void)) {
    FAIL_IF_TOLD;
    return CU_SUCCESS;
}
OTHER(cuEventCreate, (void **event, unsigned flags)) {
    FAIL_IF_TOLD;
    (void)flags;
    *event = calloc(1, sizeof(long));
    return *event ? CU_SUCCESS : 2;
}
OTHER(cuEventDestroy_v2, (void *event)) {
    free(event);
    return CU_SUCCESS;
}
OTHER(cuEventRecord, (void *event, cu_stream stream)) {
    FAIL_IF_TOLD;
    static long ticks;
    (void)stream;
    *(long *)event = ++ticks;
    return CU_SUCCESS;
}
OTHER(cuEventSynchronize, (void *event)) {
    FAIL_IF_TOLD;
    (void)event;
    return CU_SUCCESS;
}
OTHER(cuEventElapsedTime, (float *milliseconds, void *begin, void *end)) {
    *milliseconds = (float)(*(long *)end - *(long *)begin);
    return CU_SUCCESS;
}
OTHER(cuModuleLoadData, (void **module, const void *image)) {
    FAIL_IF_TOLD;
    *module = strstr(image, ".entry") ? (void *)(uintptr_t)image : NULL;
    return *module ? CU_SUCCESS : 218;
}
OTHER(cuModuleGetFunction, (void **function, void *module, const char *name)) {
    char entry[96];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    *function = strstr(module, entry) ? module : NULL;
    return *function ? CU_SUCCESS : CU_ERROR_NOT_FOUND;
}
OTHER(cuModuleUnload, (void *module)) {
    return module ? CU_SUCCESS : 1;
}
OTHER(cuLaunchKernel, (void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                       unsigned threads_z, unsigned shared, cu_stream stream, void **parameters, void **extra)) {
    FAIL_IF_TOLD;
    (void)y, (void)z, (void)threads_y, (void)threads_z, (void)shared, (void)stream, (void)parameters, (void)extra;
    return function && x > 0 && threads > 0 && threads <= 1024 ? CU_SUCCESS : 1;
}

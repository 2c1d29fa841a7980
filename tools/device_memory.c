/* SPDX-License-Identifier: Apache-2.0 */
#include "driver_call.h"

#ifndef _WIN32
#include <dlfcn.h>
#endif
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char error_text[160];
static _Thread_local void *own_stream;

void *device_memory_driver(const char *symbol) {
#ifdef _WIN32
    (void)symbol; /* there the library is built without CUDA */
    return NULL;
#else
    static _Thread_local void *library;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, symbol) : NULL;
#endif
}

void device_memory_failed(const char *symbol, bool found, int status) {
    snprintf(error_text, sizeof error_text, "%s: %s %d", symbol, found ? "CUDA error" : "not in libcuda", status);
}

bool device_memory_enter(void) {
    void *context = NULL;
    CALL("cuInit", (unsigned), (0));
    CALL("cuCtxGetCurrent", (void **), (&context));
    if (!context) {
        CALL("cuDevicePrimaryCtxRetain", (void **, int), (&context, 0));
        CALL("cuCtxSetCurrent", (void *), (context));
    }
    return true;
}

void *device_memory_new(size_t bytes) {
    uint64_t p = 0;
    if (!device_memory_enter())
        return NULL;
    CALL("cuMemAlloc_v2", (uint64_t *, size_t), (&p, bytes ? bytes : 1));
    return (void *)(uintptr_t)p;
}

static bool release(void *p) {
    if (!device_memory_enter())
        return false;
    CALL("cuMemFree_v2", (uint64_t), ((uintptr_t)p));
    return true;
}

void device_memory_free(void *p) {
    if (p)
        release(p);
}

bool device_memory_copy(void *to, const void *from, size_t bytes) {
    if (!device_memory_enter())
        return false;
    if (bytes && own_stream) {
        CALL("cuMemcpyAsync", (uint64_t, uint64_t, size_t, void *),
             ((uintptr_t)to, (uintptr_t)from, bytes, own_stream));
        CALL("cuStreamSynchronize", (void *), (own_stream));
    } else if (bytes) {
        CALL("cuMemcpy", (uint64_t, uint64_t, size_t), ((uintptr_t)to, (uintptr_t)from, bytes));
    }
    return true;
}

bool device_memory_fill(void *p, unsigned char byte, size_t bytes) {
    if (!device_memory_enter())
        return false;
    if (bytes && own_stream)
        CALL("cuMemsetD8Async", (uint64_t, unsigned char, size_t, void *), ((uintptr_t)p, byte, bytes, own_stream));
    else if (bytes)
        CALL("cuMemsetD8_v2", (uint64_t, unsigned char, size_t), ((uintptr_t)p, byte, bytes));
    return true;
}

void *device_memory_staging(size_t bytes) {
    void *p = NULL;
    if (!device_memory_enter())
        return NULL;
    CALL("cuMemHostAlloc", (void **, size_t, unsigned), (&p, bytes, 0));
    return p;
}

bool device_memory_fetch(void *staging, const void *from, size_t bytes) {
    if (!device_memory_enter())
        return false;
    if (bytes)
        CALL("cuMemcpyDtoHAsync_v2", (void *, uint64_t, size_t, void *), (staging, (uintptr_t)from, bytes, own_stream));
    return true;
}

bool device_memory_wait(void) {
    if (!device_memory_enter())
        return false;
    if (own_stream)
        CALL("cuStreamSynchronize", (void *), (own_stream));
    else
        CALL("cuCtxSynchronize", (void), ());
    return true;
}

void *device_memory_own_stream(void) {
    const unsigned beside_the_default_one = 1;
    if (!own_stream && device_memory_enter())
        CALL("cuStreamCreate", (void **, unsigned), (&own_stream, beside_the_default_one));
    return own_stream;
}

void *device_memory_stream(void) {
    return own_stream;
}

const char *device_memory_error(void) {
    return error_text;
}

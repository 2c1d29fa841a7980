/* SPDX-License-Identifier: Apache-2.0 */
#include "device_memory.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char error_text[160];

void *device_memory_driver(const char *symbol) {
    /* dlopen counts its openings and gives the same library every time. */
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, symbol) : NULL;
}

/* memcpy: C has no conversion from an object pointer to a function pointer. */
#define CALL(symbol, parameters, arguments)                                                                            \
    do {                                                                                                               \
        int(*function) parameters = NULL;                                                                              \
        void *found = device_memory_driver(symbol);                                                                    \
        int status = -1;                                                                                               \
        memcpy(&function, &found, sizeof found);                                                                       \
        if (function)                                                                                                  \
            status = function arguments;                                                                               \
        if (status)                                                                                                    \
            snprintf(error_text, sizeof error_text, "%s: %s %d", symbol, function ? "CUDA error" : "not in libcuda",   \
                     status);                                                                                          \
        if (status)                                                                                                    \
            return 0;                                                                                                  \
    } while (0)

static bool enter(void) {
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
    if (!enter())
        return NULL;
    CALL("cuMemAlloc_v2", (uint64_t *, size_t), (&p, bytes ? bytes : 1));
    return (void *)(uintptr_t)p;
}

static bool release(void *p) {
    if (!enter())
        return false;
    CALL("cuMemFree_v2", (uint64_t), ((uintptr_t)p));
    return true;
}

void device_memory_free(void *p) {
    if (p)
        release(p);
}

bool device_memory_copy(void *to, const void *from, size_t bytes) {
    if (!enter())
        return false;
    if (bytes)
        CALL("cuMemcpy", (uint64_t, uint64_t, size_t), ((uintptr_t)to, (uintptr_t)from, bytes));
    return true;
}

bool device_memory_wait(void) {
    if (!enter())
        return false;
    CALL("cuCtxSynchronize", (void), ());
    return true;
}

const char *device_memory_error(void) {
    return error_text;
}

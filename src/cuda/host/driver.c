/* SPDX-License-Identifier: Apache-2.0
 * Opens libcuda once. */
#define _POSIX_C_SOURCE 200809L
#include "cuda/host/driver.h"
#include "status.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define MINIMUM_VERSION 12000

static const char *error_name(const cuda_driver *cu, cu_result error) {
    const char *name = NULL;
    if (cu->cuGetErrorName(error, &name) != CU_SUCCESS || !name)
        return "an unknown error";
    return name;
}

/* What is wrong with this machine's CUDA, or an empty text. */
static void open_driver(cuda_driver *cu, char *why, size_t n) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, n, "no CUDA driver on this machine: %s", dlerror());
        return;
    }
    const char *absent = NULL;
    void *at;
    /* memcpy: C has no conversion from an object pointer to a function pointer. */
#define D(symbol, parameters)                                                                                          \
    at = dlsym(library, #symbol);                                                                                      \
    memcpy(&cu->symbol, &at, sizeof at);                                                                               \
    if (!at && !absent)                                                                                                \
        absent = #symbol;
    CUDA_DRIVER_CALLS
#undef D
    if (absent) {
        snprintf(why, n, "the CUDA driver is older than CUDA 12.0: libcuda.so.1 has no %s", absent);
        return;
    }
    cu_result error = cu->cuInit(0);
    if (error == CU_SUCCESS)
        error = cu->cuDriverGetVersion(&cu->version);
    if (error == CU_SUCCESS)
        error = cu->cuDeviceGetCount(&cu->devices);
    if (error != CU_SUCCESS)
        snprintf(why, n, "the CUDA driver does not start: %s (%d)", error_name(cu, error), error);
    else if (cu->version < MINIMUM_VERSION)
        snprintf(why, n, "the CUDA driver is for CUDA %d.%d, heddle needs 12.0", cu->version / 1000,
                 cu->version % 1000 / 10);
    else if (cu->devices == 0)
        snprintf(why, n, "the CUDA driver sees no GPU");
}

const cuda_driver *heddle__cuda_driver(void) {
    static cuda_driver driver;
    static char why[256];
    static atomic_int state; /* 0: not tried, 1: somebody is at it, 2: done */
    int seen = 0;
    if (atomic_load_explicit(&state, memory_order_acquire) != 2) {
        if (atomic_compare_exchange_strong(&state, &seen, 1)) {
            open_driver(&driver, why, sizeof why);
            atomic_store_explicit(&state, 2, memory_order_release);
        }
        while (atomic_load_explicit(&state, memory_order_acquire) != 2)
            sched_yield();
    }
    if (why[0]) {
        fail(HEDDLE_NO_DEVICE, "%s", why);
        return NULL;
    }
    return &driver;
}

/* ECC, illegal address, launch failed, timeout, assert, hardware stack, illegal instruction, misaligned address, ...: the
 * context is lost, and was before this call, which has started nothing yet. */
static int is_sticky(cu_result error) {
    return error == 214 || error == 700 || error == 702 || error == 709 || error == 710 ||
           (error >= 714 && error <= 719) || error == 721;
}

heddle_status heddle__cuda_fail(const cuda_driver *cu, const char *device, const char *call, cu_result error) {
    const char *name = error_name(cu, error);
    if (is_sticky(error))
        return fail(HEDDLE_EARLIER_CUDA_ERROR,
                    "%s: earlier work on this GPU failed, its context is lost: %s (%d) from %s", device, name, error,
                    call);
    if (error == CU_ERROR_NO_BINARY_FOR_GPU || error == CU_ERROR_NOT_FOUND)
        return fail(HEDDLE_UNSUPPORTED, "%s: this build of heddle has no kernel image for this GPU: %s (%d) from %s",
                    device, name, error, call);
    if (error == CU_ERROR_INVALID_HANDLE || error == CU_ERROR_INVALID_CONTEXT)
        return fail(HEDDLE_WRONG_DEVICE, "%s: stream is not a stream of the current context: %s (%d) from %s", device,
                    name, error, call);
    return fail(HEDDLE_CUDA_ERROR, "%s: %s: %s (%d)", device, call, name, error);
}

/* SPDX-License-Identifier: Apache-2.0
 * A record for each device: filled once, when somebody first asks, and read-only afterwards but for what was seen and loaded. */
#define _POSIX_C_SOURCE 200809L
#include "cuda/host/device.h"

#include "status.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEVICES 64

static device_record records[MAX_DEVICES];

/* HEDDLE_CUDA_SHARED: so many KiB of a block's shared memory, as a smaller GPU has them, where this one has more. */
static void limit_shared(device_record *r) {
    const char *text = getenv("HEDDLE_CUDA_SHARED");
    char *end = NULL;
    const long wanted = text ? strtol(text, &end, 10) : 0;
    if (!text || !*text)
        return;
    const size_t used = strlen(r->note);
    if (*end || wanted < 16 || wanted > 1024)
        snprintf(r->note + used, sizeof r->note - used,
                 "; HEDDLE_CUDA_SHARED=%.32s is no number of KiB from 16 to 1024, and changes nothing", text);
    else if (wanted * 1024 < r->shared_optin) {
        r->shared_optin = (int)wanted * 1024;
        snprintf(r->note + used, sizeof r->note - used, "; HEDDLE_CUDA_SHARED: %ld KiB of shared memory a block",
                 wanted);
    }
}

/* What of the environment is not heeded, to go behind a description: a name that nobody knows, as with HEDDLE_CPU; or the name that
 * the variable once had. */
static void note_unheeded(const char *wanted, bool known, char *note, size_t n) {
    const char *old = getenv("HEDDLE_CUDA");
    if (*wanted && !known)
        snprintf(note, n, "; HEDDLE_CUDA_FAMILY=%.32s is no family of kernels, and changes nothing", wanted);
    else if (old)
        snprintf(note, n, "; HEDDLE_CUDA=%.32s changes nothing, the variable is HEDDLE_CUDA_FAMILY", old);
}

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
    const char *wanted = getenv("HEDDLE_CUDA_FAMILY");
    if (!wanted)
        wanted = "";
    const bool sm80 = !strcmp(wanted, "sm80"), sm90 = !strcmp(wanted, "sm90"), small = !strcmp(wanted, "small");
    note_unheeded(wanted, sm80 || sm90 || small, r->note, sizeof r->note);
    limit_shared(r);
    r->sm90 = r->major == 9 && !sm80;
    /* Graphs take such launches since CUDA 12.3. */
    r->overlaps = r->major == 9 && cu->version >= 12030 && !getenv("CUDA_FORCE_PTX_JIT");
    r->small = small ? SMALL_ALWAYS : sm80 || sm90 ? SMALL_NEVER : SMALL_CHOSEN;
    snprintf(r->name, sizeof r->name, "%s (device %d, sm_%d%d)", name, ordinal, r->major, r->minor);
}

heddle_status heddle__cuda_current_device(const cuda_driver **driver, device_record **found, cu_context *context) {
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

heddle_status heddle__cuda_enter_primary(const cuda_driver *cu, device_record *r, cu_context *context) {
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

cuda_facts heddle__cuda_facts_of(const device_record *r) {
    return (cuda_facts){
        .name = r->name,
        .multiprocessors = r->multiprocessors,
        .shared_bytes = (size_t)r->shared_optin,
        .sm90 = r->sm90,
        .small = r->small,
    };
}

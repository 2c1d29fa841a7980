/* SPDX-License-Identifier: Apache-2.0
 * Preloaded into a program: its HEDDLE_FAIL_AT-th allocation fails; where HEDDLE_FAIL_IN is set, of those that an object
 * with that in its path asks for, itself or by what it calls, but not by libgomp, which ends the program then.
 * HEDDLE_FAIL_COUNT=FILE: how many allocations there were is written there at the end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);

extern atomic_long heddle_allocations; /* of those that count: a program may look at it */
atomic_long heddle_allocations;

/* What object an address lies in: the one that is asked about, libgomp, or another. Kept, as dladdr searches all symbols. */
enum { UNKNOWN, ASKED, GOMP, OTHER };
static int object_of(const void *address, const char *asked) {
    static __thread struct {
        const void *address;
        int object;
    } known[4096];
    const size_t at = (uintptr_t)address * UINT64_C(0x9E3779B97F4A7C15) >> 52;
    if (known[at].address == address && known[at].object)
        return known[at].object;
    Dl_info from;
    const char *path = dladdr(address, &from) && from.dli_fname ? from.dli_fname : "";
    known[at].address = address;
    return known[at].object = strstr(path, "libgomp") ? GOMP : strstr(path, asked) ? ASKED : OTHER;
}

static int is_below(const char *object) {
    static __thread int inside; /* backtrace() loads a library when it is first called */
    void *frames[32];
    int found = OTHER;
    if (inside)
        return 0;
    inside = 1;
    for (int n = backtrace(frames, 32), i = 0; i < n && found == OTHER; i++)
        found = object_of(frames[i], object);
    inside = 0;
    return found == ASKED;
}

static int fails(void) {
    const char *at = getenv("HEDDLE_FAIL_AT"), *in = getenv("HEDDLE_FAIL_IN");
    if (!at || (in && !is_below(in)))
        return 0;
    if (atomic_fetch_add(&heddle_allocations, 1) + 1 != strtol(at, NULL, 10))
        return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t n) {
    return fails() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size) {
    return fails() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n) {
    return fails() ? NULL : __libc_realloc(p, n);
}

void *aligned_alloc(size_t alignment, size_t n) {
    return fails() ? NULL : __libc_memalign(alignment, n);
}

int posix_memalign(void **p, size_t alignment, size_t n) {
    void *got = fails() ? NULL : __libc_memalign(alignment, n);
    if (!got)
        return ENOMEM;
    *p = got;
    return 0;
}

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("HEDDLE_FAIL_COUNT");
    unsetenv("HEDDLE_FAIL_AT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%ld\n", atomic_load(&heddle_allocations));
        fclose(file);
    }
}

/* SPDX-License-Identifier: Apache-2.0
 * Preloaded into a program: its HEDDLE_FAIL_AT-th allocation fails, of those that HEDDLE_FAIL_IN (a part of an object's path, if
 * set) asks for; HEDDLE_NO_UNNAMED: no file system has files without a name. HEDDLE_FAIL_COUNT=FILE: how many there were is
 * written there at the end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);

static atomic_long allocations;

static int fails(const void *caller) {
    const char *at = getenv("HEDDLE_FAIL_AT"), *in = getenv("HEDDLE_FAIL_IN");
    Dl_info from;
    if (!at || (in && !(dladdr(caller, &from) && from.dli_fname && strstr(from.dli_fname, in))))
        return 0;
    if (atomic_fetch_add(&allocations, 1) + 1 != strtol(at, NULL, 10))
        return 0;
    errno = ENOMEM;
    return 1;
}

#define CALLER __builtin_return_address(0)

void *malloc(size_t n) {
    return fails(CALLER) ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size) {
    return fails(CALLER) ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n) {
    return fails(CALLER) ? NULL : __libc_realloc(p, n);
}

void *aligned_alloc(size_t alignment, size_t n) {
    return fails(CALLER) ? NULL : __libc_memalign(alignment, n);
}

int posix_memalign(void **p, size_t alignment, size_t n) {
    void *got = fails(CALLER) ? NULL : __libc_memalign(alignment, n);
    if (!got)
        return ENOMEM;
    *p = got;
    return 0;
}

int open(const char *path, int flags, ...) {
    static int (*next)(const char *, int, ...);
    va_list rest;
    va_start(rest, flags);
    const unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, unsigned) : 0;
    va_end(rest);
    if ((flags & O_TMPFILE) == O_TMPFILE && getenv("HEDDLE_NO_UNNAMED")) {
        errno = EOPNOTSUPP;
        return -1;
    }
    if (!next)
        next = (int (*)(const char *, int, ...))(intptr_t)dlsym(RTLD_NEXT, "open");
    return next(path, flags, mode);
}

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("HEDDLE_FAIL_COUNT");
    unsetenv("HEDDLE_FAIL_AT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%ld\n", atomic_load(&allocations));
        fclose(file);
    }
}

/* SPDX-License-Identifier: Apache-2.0
 * Preloaded into a program: what can happen to its files. Its changes of files are counted (a file made or given a name,
 * written to, renamed, removed): behind the HEDDLE_KILL_AT-th it is killed, and the HEDDLE_REFUSE_AT-th fails, among
 * which removals do not count. HEDDLE_NO_UNNAMED: no file system has files without a name; HEDDLE_NO_EXCHANGE: none
 * exchanges two. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static long changes, refusable;

static int is_now(const char *variable, long count) {
    const char *at = getenv(variable);
    return at && strtol(at, NULL, 10) == count;
}

/* Whether the change that comes is refused. */
static int is_refused(void) {
    changes++;
    if (!is_now("HEDDLE_REFUSE_AT", ++refusable))
        return 0;
    errno = EIO;
    return 1;
}

/* Behind a change. */
static long over(long result) {
    const int error = errno;
    if (is_now("HEDDLE_KILL_AT", changes))
        kill(getpid(), SIGKILL);
    errno = error;
    return result;
}

/* The function that is called so in the C library. */
#define NEXT(name) ((__typeof__(&name))(intptr_t)dlsym(RTLD_NEXT, #name))

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, unsigned) : 0;
    va_end(rest);
    if ((flags & O_TMPFILE) == O_TMPFILE && getenv("HEDDLE_NO_UNNAMED")) {
        errno = EOPNOTSUPP;
        return -1;
    }
    if (!(flags & O_CREAT))
        return NEXT(open)(path, flags, mode);
    return is_refused() ? -1 : (int)over(NEXT(open)(path, flags, mode));
}

ssize_t write(int fd, const void *p, size_t n) {
    if (fd <= STDERR_FILENO)
        return NEXT(write)(fd, p, n);
    return is_refused() ? -1 : over(NEXT(write)(fd, p, n));
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    return is_refused() ? -1 : (int)over(NEXT(linkat)(from, old, to, new, flags));
}

int rename(const char *old, const char *new) {
    return is_refused() ? -1 : (int)over(NEXT(rename)(old, new));
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    if ((flags & RENAME_EXCHANGE) && getenv("HEDDLE_NO_EXCHANGE")) {
        errno = EINVAL;
        return -1;
    }
    return is_refused() ? -1 : (int)over(NEXT(renameat2)(from, old, to, new, flags));
}

int unlink(const char *path) {
    changes++;
    return (int)over(NEXT(unlink)(path));
}

int unlinkat(int from, const char *path, int flags) {
    changes++;
    return (int)over(NEXT(unlinkat)(from, path, flags));
}

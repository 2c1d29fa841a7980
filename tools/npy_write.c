/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "npy.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool write_all(int fd, const void *data, size_t n) {
    const char *p = data;
    while (n > 0) {
        ssize_t wrote = write(fd, p, n > (1 << 30) ? 1 << 30 : n);
        if (wrote < 0 && errno != EINTR)
            return false;
        if (wrote > 0) {
            p += wrote;
            n -= (size_t)wrote;
        }
    }
    return true;
}

/* Version 1.0, padded so that the data starts at a multiple of 64 bytes, as NumPy does. */
static bool write_array(int fd, const npy_array *a) {
    static const char *const descr[] = {"<f2", "<f4", "<f8", "|b1", "<i4"};
    char header[512] = "\x93NUMPY\x01";
    int used = 10;
    used += snprintf(header + used, 64, "{'descr': '%s', 'fortran_order': False, 'shape': (", descr[a->type]);
    for (int i = 0; i < a->rank; i++)
        used += snprintf(header + used, 32, "%s%lld", i ? ", " : "", (long long)a->shape[i]);
    used += snprintf(header + used, 8, "%s), }", a->rank == 1 ? "," : "");
    while ((used + 1) % 64)
        header[used++] = ' ';
    header[used++] = '\n';
    header[8] = (char)((used - 10) & 255);
    header[9] = (char)((used - 10) >> 8);
    return write_all(fd, header, (size_t)used) && write_all(fd, a->data, (size_t)a->count * npy_type_size(a->type));
}

/* Signals wait while files are half-written; a full disk and a limit on file sizes come as errors, not as signals. */
static void block_signals(npy_outputs *all) {
    _Static_assert(sizeof(sigset_t) <= sizeof all->signals, "room for the signal mask");
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGXFSZ, SIGPIPE};
    sigset_t set, before;
    if (all->blocked)
        return;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaddset(&set, signals[i]);
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_BLOCK, &set, &before);
    memcpy(all->signals, &before, sizeof before);
    all->blocked = true;
}

static void release(npy_outputs *all) {
    for (int i = 0; i < all->count; i++) {
        struct npy_output *f = &all->file[i];
        if (f->temporary)
            unlink(f->temporary);
        if (f->backup)
            unlink(f->backup);
        free(f->temporary);
        free(f->backup);
        free(f->target);
    }
    all->count = 0;
    if (all->blocked) {
        sigset_t before;
        memcpy(&before, all->signals, sizeof before);
        sigprocmask(SIG_SETMASK, &before, NULL);
    }
    all->blocked = false;
}

/* A name in the directory of `target` that does not exist yet; made by `make`, which fails with EEXIST if it does. */
static char *make_beside(const char *target, int (*make)(const char *target, const char *name), int *result) {
    const char *slash = strrchr(target, '/');
    int directory = slash ? (int)(slash - target) + 1 : 0;
    char *name = NULL;
    for (int i = 0; i < 1000; i++) {
        if (asprintf(&name, "%.*s.heddle-%ld-%d", directory, target, (long)getpid(), i) < 0)
            exit(complain("out of memory"));
        *result = make(target, name);
        if (*result >= 0)
            return name;
        int error = errno;
        free(name);
        errno = error;
        if (error != EEXIST)
            return NULL;
    }
    return NULL;
}

static int make_file(const char *target, const char *name) {
    struct stat st;
    int fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0 && stat(target, &st) == 0)
        (void)!fchmod(fd, st.st_mode & 0777);
    return fd;
}

static int make_link(const char *target, const char *name) {
    return link(target, name);
}

static bool trouble(const char *path) {
    complain("%s: %s", path, strerror(errno));
    return false;
}

static bool write_directly(const char *path, const npy_array *array) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return trouble(path);
    bool ok = write_array(fd, array) || trouble(path);
    return (close(fd) == 0 || (ok && trouble(path))) && ok;
}

/* One spelling for one file: the file that a symbolic link names, or the name that a new file would get. */
static char *resolve(const char *path) {
    char *target = realpath(path, NULL);
    if (target)
        return target;
    const char *slash = strrchr(path, '/');
    char *parent = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    char *real = parent ? realpath(parent, NULL) : NULL;
    if (asprintf(&target, "%s/%s", real ? real : ".", real && slash ? slash + 1 : path) < 0 || !parent)
        exit(complain("out of memory"));
    free(parent);
    free(real);
    return target;
}

bool npy_stage(npy_outputs *all, const char *path, const npy_array *array) {
    struct stat st;
    int fd;
    block_signals(all);
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        errno = EISDIR;
        return trouble(path);
    }
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return write_directly(path, array);
    if (path[0] == 0 || path[strlen(path) - 1] == '/') {
        errno = *path ? EISDIR : ENOENT;
        return trouble(path);
    }
    if (all->count == NPY_MAX_OUTPUTS)
        exit(complain("more than %d output files", NPY_MAX_OUTPUTS));
    struct npy_output *f = &all->file[all->count++];
    *f = (struct npy_output){resolve(path), NULL, NULL};
    for (int i = 0; i + 1 < all->count; i++)
        if (!strcmp(all->file[i].target, f->target)) {
            complain("%s: two outputs go to this one file", path);
            return false;
        }
    if (access(f->target, F_OK) == 0 && access(f->target, W_OK) != 0)
        return trouble(path);
    f->temporary = make_beside(f->target, make_file, &fd);
    if (!f->temporary)
        return trouble(path);
    bool ok = write_array(fd, array) && (fsync(fd) == 0 || errno == EINVAL || errno == EROFS);
    ok = ok || trouble(path);
    return (close(fd) == 0 || (ok && trouble(path))) && ok;
}

/* Puts back what the first n renames replaced. */
static void roll_back(npy_outputs *all, int n) {
    for (int i = 0; i < n; i++) {
        struct npy_output *f = &all->file[i];
        if (!f->backup)
            unlink(f->target);
        else if (rename(f->backup, f->target) == 0) {
            free(f->backup);
            f->backup = NULL;
        }
    }
}

bool npy_commit(npy_outputs *all) {
    for (int i = 0; i < all->count; i++) {
        struct npy_output *f = &all->file[i];
        int linked;
        if (all->count > 1 && access(f->target, F_OK) == 0) /* one rename alone cannot be half-done */
            f->backup = make_beside(f->target, make_link, &linked);
        if (rename(f->temporary, f->target) != 0) {
            trouble(f->target);
            roll_back(all, i);
            release(all);
            return false;
        }
        free(f->temporary);
        f->temporary = NULL;
    }
    release(all);
    return true;
}

void npy_abandon(npy_outputs *all) {
    release(all);
}

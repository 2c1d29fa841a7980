/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "npy.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
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

/* ------------------------------------------------------------------------------------------------------- signals */

/* Who ends the command by a signal of `ends` leaves no half-written file behind. The handler may run in any of
 * OpenMP's threads, so blocking signals would keep nothing off: the outputs have a lock that it asks for without
 * waiting. */
enum { FREE, IN_USE, ENDING };
static atomic_int lock, caught, cleans_at_exit;
static npy_outputs *_Atomic half_written;

static void remove_half_written(void) {
    const npy_outputs *all = atomic_load(&half_written);
    for (int i = 0; all && i < all->count; i++)
        if (all->file[i].temporary)
            unlink(all->file[i].temporary);
}

/* Where the outputs are in use, who uses them ends the command. */
static void end_by_signal(int number) {
    int expected = FREE;
    atomic_store(&caught, number);
    if (!atomic_compare_exchange_strong(&lock, &expected, ENDING))
        return;
    remove_half_written();
    signal(number, SIG_DFL);
    raise(number); /* comes through when this returns */
}

static void begin_use(void) {
    int expected = FREE;
    while (!atomic_compare_exchange_strong(&lock, &expected, IN_USE)) {
        expected = FREE;
        pause(); /* another thread is ending the command */
    }
}

static void end_use(void) {
    atomic_store(&lock, FREE);
    if (atomic_load(&caught))
        raise(atomic_load(&caught));
}

/* A full disk and a limit on file sizes come as errors, not as signals. What is ignored (nohup), or has a handler, stays as it is. */
static void catch_signals(npy_outputs *all) {
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGXCPU, SIGUSR1, SIGUSR2};
    struct sigaction before, act = {.sa_handler = end_by_signal, .sa_flags = SA_RESTART};
    if (atomic_load(&half_written) == all)
        return;
    if (!atomic_exchange(&cleans_at_exit, 1)) /* out of memory */
        atexit(remove_half_written);
    sigemptyset(&act.sa_mask);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        sigaddset(&act.sa_mask, ends[i]);
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    atomic_store(&half_written, all);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (sigaction(ends[i], NULL, &before) == 0 && before.sa_handler == SIG_DFL)
            sigaction(ends[i], &act, NULL);
}

/* ------------------------------------------------------------------------------------------------------- outputs */

/* In use; afterwards there are no outputs. */
static void release(npy_outputs *all) {
    for (int i = 0; i < all->count; i++) {
        struct npy_output *f = &all->file[i];
        if (f->temporary)
            unlink(f->temporary);
        if (f->fd >= 0)
            close(f->fd);
        free(f->temporary);
        free(f->target);
    }
    all->count = 0;
    atomic_store(&half_written, NULL);
}

/* The first n bytes of a, and b. */
static char *joined(const char *a, size_t n, const char *b) {
    char *result = malloc(n + strlen(b) + 1);
    if (!result)
        exit(complain("out of memory"));
    memcpy(result, a, n);
    strcpy(result + n, b);
    return result;
}

/* Of the path's directory, with its slash; 0 if it names none. */
static int directory_length(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? (int)(slash - path) + 1 : 0;
}

/* A temporary name tells whose it is. */
#define OWN_NAME ".heddle-%ld-%d"

/* A name in the directory of `target` that does not exist yet; made of `from` by `make`, which fails with EEXIST if
 * it does. */
static char *make_beside(const char *target, const char *from, int (*make)(const char *from, const char *name),
                         int *result) {
    char *name = NULL;
    for (int i = 0; i < 1000; i++) {
        if (asprintf(&name, "%.*s" OWN_NAME, directory_length(target), target, (long)getpid(), i) < 0) {
            errno = ENOMEM;
            return NULL;
        }
        *result = make(from, name);
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

/* The lock lasts as long as the process: it tells others, in containers of their own, too, that the file is in use. */
static int hold(int fd, const char *target) {
    struct stat st;
    if (fd >= 0)
        (void)!flock(fd, LOCK_EX | LOCK_NB);
    if (fd >= 0 && stat(target, &st) == 0)
        (void)!fchmod(fd, st.st_mode & 0777);
    return fd;
}

static int make_file(const char *target, const char *name) {
    return hold(open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), target);
}

static int make_link(const char *from, const char *name) {
    return linkat(AT_FDCWD, from, AT_FDCWD, name, AT_SYMLINK_FOLLOW);
}

#define BY_DESCRIPTOR "/proc/self/fd/"

/* A file in the directory of `target` that has no name yet, so that nothing is left of it however the command ends;
 * -1 where the file system has none. */
static int open_unnamed(const char *target) {
    int fd = -1;
    (void)target;
#ifdef O_TMPFILE
    if (access(BY_DESCRIPTOR, X_OK) == 0) {
        char *directory = joined(target, (size_t)directory_length(target), "");
        fd = hold(open(directory, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666), target);
        free(directory);
    }
#endif
    return fd;
}

/* What a process left behind that was killed: a temporary name of one that is gone, our own user's file, and nobody's
 * lock. */
static bool is_left(int directory, const char *name) {
    char again[64];
    long process;
    int number;
    struct stat st;
    if (sscanf(name, OWN_NAME, &process, &number) != 2 || process < 1 || process > INT_MAX)
        return false;
    snprintf(again, sizeof again, OWN_NAME, process, number);
    if (strcmp(name, again) != 0 || kill((pid_t)process, 0) == 0 || errno != ESRCH)
        return false;
    const int fd = openat(directory, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    const bool left = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
                      flock(fd, LOCK_EX | LOCK_NB) == 0;
    if (fd >= 0)
        close(fd);
    return left;
}

static void remove_left(const char *target) {
    char *path = joined(target, (size_t)directory_length(target), "");
    DIR *directory = opendir(path);
    free(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (is_left(dirfd(directory), entry->d_name))
            unlinkat(dirfd(directory), entry->d_name, 0);
    if (directory)
        closedir(directory);
}

static bool trouble(const char *path) {
    complain("%s: %s", path, strerror(errno));
    return false;
}

/* What goes into a file: an array, or bytes as they are. */
typedef struct content {
    const npy_array *array;
    const void *bytes;
    size_t n;
} content;

static bool write_content(int fd, content what) {
    return what.array ? write_array(fd, what.array) : write_all(fd, what.bytes, what.n);
}

static bool write_directly(const char *path, content what) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return trouble(path);
    bool ok = write_content(fd, what) || trouble(path);
    return (close(fd) == 0 || (ok && trouble(path))) && ok;
}

/* `name` as it is meant in the directory of `path`, which has a slash. */
static char *beside(const char *path, const char *name) {
    return joined(path, *name == '/' ? 0 : (size_t)directory_length(path), name);
}

/* What the symbolic link `path` names, in its place; false if it is none. */
static bool follow(char **path) {
    char link[PATH_MAX];
    ssize_t length = readlink(*path, link, sizeof link - 1);
    if (length < 0)
        return false;
    link[length] = 0;
    char *next = beside(*path, link);
    free(*path);
    *path = next;
    return true;
}

/* One spelling for one file: the file that a symbolic link names, be it there or not, or the name that a new file will have.
 * NULL, with errno, where there can be none. */
static char *resolve(const char *path) {
    char *at = strchr(path, '/') ? joined("", 0, path) : joined("./", 2, path), *target;
    while (!(target = realpath(at, NULL)) && errno == ENOENT && follow(&at)) {
    }
    if (!target && errno == ENOENT) {
        char *parent = beside(at, ""), *real = realpath(parent, NULL);
        if (real)
            target = joined(real, strlen(real), strrchr(at, '/'));
        free(parent);
        free(real);
    }
    free(at);
    return target;
}

static bool one_directory(const char *a, const char *b) {
    const int n = directory_length(a);
    return n == directory_length(b) && memcmp(a, b, (size_t)n) == 0;
}

/* A new entry of the outputs with its file. False after a complaint. */
static bool open_output(npy_outputs *all, const char *path) {
    char *target = resolve(path);
    if (!target)
        return trouble(path);
    struct npy_output *f = &all->file[all->count++];
    *f = (struct npy_output){target, NULL, -1, NPY_STAGED};
    bool another_directory = true;
    for (int i = 0; i + 1 < all->count; i++) {
        if (!strcmp(all->file[i].target, target)) {
            complain("%s: two outputs go to this one file", path);
            return false;
        }
        another_directory &= !one_directory(all->file[i].target, target);
    }
    if (another_directory)
        remove_left(target);
    const bool locked = access(target, F_OK) == 0 && access(target, W_OK) != 0;
    if (!locked)
        f->fd = open_unnamed(target);
    if (!locked && f->fd < 0)
        f->temporary = make_beside(target, target, make_file, &f->fd);
    return f->fd >= 0 || trouble(path);
}

static bool stage(npy_outputs *all, const char *path, content what) {
    struct stat st;
    catch_signals(all);
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        errno = EISDIR;
        return trouble(path);
    }
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return write_directly(path, what);
    if (path[0] == 0 || path[strlen(path) - 1] == '/') {
        errno = *path ? EISDIR : ENOENT;
        return trouble(path);
    }
    if (all->count == NPY_MAX_OUTPUTS)
        exit(complain("more than %d output files", NPY_MAX_OUTPUTS));
    begin_use();
    const bool opened = open_output(all, path);
    end_use();
    if (!opened)
        return false;
    const int fd = all->file[all->count - 1].fd;
    return (write_content(fd, what) && (fsync(fd) == 0 || errno == EINVAL || errno == EROFS)) || trouble(path);
}

bool npy_stage(npy_outputs *all, const char *path, const npy_array *array) {
    return stage(all, path, (content){.array = array});
}

bool npy_stage_bytes(npy_outputs *all, const char *path, const void *bytes, size_t n) {
    return stage(all, path, (content){.bytes = bytes, .n = n});
}

static bool name_temporarily(struct npy_output *f) {
    char from[sizeof BY_DESCRIPTOR + 12];
    int linked;
    snprintf(from, sizeof from, BY_DESCRIPTOR "%d", f->fd);
    f->temporary = make_beside(f->target, from, make_link, &linked);
    return f->temporary;
}

/* The target and the temporary file change places: at no moment either name has no whole file. */
static bool exchange(const struct npy_output *f) {
#ifdef RENAME_EXCHANGE
    return renameat2(AT_FDCWD, f->temporary, AT_FDCWD, f->target, RENAME_EXCHANGE) == 0;
#else
    (void)f;
    return false;
#endif
}

/* A new file gets its name, one that was there before is replaced; where another output may fail yet, so that it can
 * be put back. */
static bool put_in_place(struct npy_output *f, bool is_last) {
    char from[sizeof BY_DESCRIPTOR + 12];
    snprintf(from, sizeof from, BY_DESCRIPTOR "%d", f->fd);
    if (!f->temporary && make_link(from, f->target) == 0) {
        f->state = NPY_CREATED;
        return true;
    }
    if (!f->temporary && (errno != EEXIST || !name_temporarily(f))) /* it has come in between */
        return false;
    const bool is_new = access(f->target, F_OK) != 0;
    if (!is_new && !is_last && exchange(f)) {
        f->state = NPY_EXCHANGED;
        return true;
    }
    if (rename(f->temporary, f->target) != 0)
        return false;
    f->state = is_new ? NPY_CREATED : NPY_REPLACED;
    free(f->temporary);
    f->temporary = NULL;
    return true;
}

static void put_back(const struct npy_output *f) {
    if (f->state == NPY_CREATED)
        unlink(f->target);
    else if (f->state == NPY_REPLACED || (f->state == NPY_EXCHANGED && !exchange(f)))
        complain("%s: is the new one all the same", f->target);
}

/* The temporary names come first: where there is no room for them nothing has changed, and the time in which some
 * outputs are new and others old is as short as can be. Then the new files, then those that replace others. */
static bool put_all_in_place(npy_outputs *all) {
    int placed = 0;
    for (int i = 0; i < all->count; i++) {
        struct npy_output *f = &all->file[i];
        if (!f->temporary && access(f->target, F_OK) == 0 && !name_temporarily(f))
            return trouble(f->target);
    }
    for (int replaces = 0; replaces < 2; replaces++)
        for (int i = 0; i < all->count; i++) {
            struct npy_output *f = &all->file[i];
            if (f->state != NPY_STAGED || (!replaces && access(f->target, F_OK) == 0))
                continue;
            if (!put_in_place(f, ++placed == all->count))
                return trouble(f->target);
        }
    return true;
}

bool npy_commit(npy_outputs *all) {
    begin_use();
    const bool ok = put_all_in_place(all);
    for (int i = 0; i < all->count && !ok; i++)
        put_back(&all->file[i]);
    release(all);
    end_use();
    return ok;
}

void npy_abandon(npy_outputs *all) {
    begin_use();
    release(all);
    end_use();
}

bool npy_can_write(const char *path) {
    npy_outputs none = {0};
    struct stat st;
    const bool other = stat(path, &st) == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode),
               good = other || npy_stage_bytes(&none, path, "", 0);
    npy_abandon(&none);
    return good;
}

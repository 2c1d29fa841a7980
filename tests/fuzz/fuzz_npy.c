/* SPDX-License-Identifier: Apache-2.0
 * Bytes as a .npy file: tools/npy_read.c refuses it in words or reads what its header says, all of it and no more. */
#define _GNU_SOURCE
#include "bytes.h"

#include "../../tools/npy.h"

#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int file = -1;
static char path[64];
static int complaints;

/* In place of tools/common.c's, which prints (linked with --wrap). */
int __wrap_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
int __wrap_complain(const char *format, ...) {
    char text[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    MUST(!strchr(text, '\n')); /* one line */
    complaints++;
    return EXIT_TROUBLE;
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    file = memfd_create("input.npy", 0);
    MUST(file >= 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    arena m = {0};
    npy_array a;
    char shape[64];
    MUST(ftruncate(file, 0) == 0 && pwrite(file, data, size, 0) == (ssize_t)size);
    complaints = 0;
    if (npy_read(&m, path, &a)) {
        const size_t length = (size_t)a.count * npy_type_size(a.type);
        int64_t count = 1;
        MUST(complaints == 0 && a.rank >= 0 && a.rank <= NPY_MAX_RANK && a.data && length <= size);
        for (int i = 0; i < a.rank; i++)
            count *= a.shape[i];
        MUST(count == a.count && memcmp(data + size - length, a.data, length) == 0);
        npy_shape_text(a.rank, a.shape, shape, sizeof shape);
        MUST(shape[0] == '[' && strlen(shape) < sizeof shape && npy_type_name(a.type));
    } else {
        MUST(complaints == 1);
    }
    arena_free(&m);
    return 0;
}

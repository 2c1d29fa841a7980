/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "memory_file.h"
#include "common.h"

#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#if defined(__APPLE__)
static FILE *open_stream(memory_file *m) {
    return open_memstream(&m->text, &m->n);
}
#else
/* glibc's open_memstream leaves out what finds no memory, and neither ferror nor fclose tells of it. */
static ssize_t grow(void *to, const char *bytes, size_t n) {
    memory_file *m = to;
    if (n > SIZE_MAX / 2 - m->n)
        return 0;
    if (m->n + n >= m->room) {
        const size_t room = 2 * (m->n + n) + 4096;
        char *text = realloc(m->text, room);
        if (!text)
            return 0; /* which is its error */
        m->text = text;
        m->room = room;
    }
    memcpy(m->text + m->n, bytes, n);
    m->n += n;
    m->text[m->n] = 0;
    return (ssize_t)n;
}

static FILE *open_stream(memory_file *m) {
    m->text = calloc(1, 1);
    return m->text ? fopencookie(m, "w", (cookie_io_functions_t){.write = grow}) : NULL;
}
#endif

bool memory_open(memory_file *m) {
    *m = (memory_file){0};
    m->file = open_stream(m);
    return m->file || (complain("no memory"), false);
}

bool memory_flush(memory_file *m) {
    return (fflush(m->file) == 0 && !ferror(m->file)) || (complain("no memory"), false);
}

void memory_close(memory_file *m) {
    if (m->file)
        fclose(m->file);
    free(m->text);
    *m = (memory_file){0};
}

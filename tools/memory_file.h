/* SPDX-License-Identifier: Apache-2.0
 * A text that is written like a file, into memory. */
#ifndef HEDDLE_TOOLS_MEMORY_FILE_H
#define HEDDLE_TOOLS_MEMORY_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* At a fixed place from memory_open to memory_close. Up to the last fflush the text is `text`, of n bytes and a zero. */
typedef struct memory_file {
    FILE *file;
    char *text;
    size_t n, room;
} memory_file;

/* Complains and returns false where there is no memory. */
bool memory_open(memory_file *m);
/* The same, where any byte since then has found none. */
bool memory_flush(memory_file *m);
void memory_close(memory_file *m);

#endif

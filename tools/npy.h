/* SPDX-License-Identifier: Apache-2.0
 * NumPy's .npy files: versions 1 to 3, little-endian, C order. The format is numpy.lib.format's. */
#ifndef HEDDLE_TOOLS_NPY_H
#define HEDDLE_TOOLS_NPY_H

#include "common.h"

typedef enum npy_type { NPY_F16, NPY_F32, NPY_F64, NPY_BOOL, NPY_I32 } npy_type;

#define NPY_MAX_RANK 8

typedef struct npy_array {
    npy_type type;
    int rank;
    int64_t shape[NPY_MAX_RANK];
    int64_t count; /* elements */
    void *data;
} npy_array;

const char *npy_type_name(npy_type type); /* "float32" */
size_t npy_type_size(npy_type type);
bool npy_is_float(npy_type type);
heddle_dtype npy_dtype(npy_type type); /* of a float */

/* "[2, 3]" into text[n], cut if longer. */
void npy_shape_text(int rank, const int64_t *shape, char *text, size_t n);

/* Reads all of the file, or complains in one line and returns false. */
bool npy_read(arena *m, const char *path, npy_array *out);

/* Files that appear together or not at all: each is written to one without a name in the directory of its target, and
 * takes the target's place in npy_commit, by one step of the file system, so that it is the old one or the new one,
 * whole, at every moment. Whatever fails, everything stays as it was, as it does when a signal ends the program that it
 * can catch. SIGKILL amid npy_commit may leave some outputs new and others old, and the temporary names by which old
 * files are replaced (".heddle-<process>-<number>"); the next outputs into the directory remove those. On a file system
 * that knows only files with names they have such names from the start, and where it cannot exchange two files, what was
 * replaced before another failed is not put back, which is complained of. Where the path is a symbolic link, the target
 * is what that names, be it there or not. What is not a regular file (a pipe, /dev/null) is written straight away. */
#define NPY_MAX_OUTPUTS 16
typedef struct npy_outputs {
    int count;
    struct npy_output {
        char *target, *temporary; /* a name beside it, or NULL: none yet, or no more */
        int fd;                   /* open and locked until all have their places */
        enum { NPY_STAGED, NPY_CREATED, NPY_EXCHANGED, NPY_REPLACED } state;
    } file[NPY_MAX_OUTPUTS];
} npy_outputs;

bool npy_stage(npy_outputs *all, const char *path, const npy_array *array);
/* The same of a file of any other kind. */
bool npy_stage_bytes(npy_outputs *all, const char *path, const void *bytes, size_t n);
bool npy_commit(npy_outputs *all);
void npy_abandon(npy_outputs *all);

/* What cannot be written is found out before anything takes its time: complains of it and returns false. Nothing is
 * changed, and a pipe or the like is left alone until then. */
bool npy_can_write(const char *path);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * A job whose tensors are .npy files: what `heddle attention` and `heddle norm-linear` share. */
#ifndef HEDDLE_TOOLS_FILE_JOB_H
#define HEDDLE_TOOLS_FILE_JOB_H

#include "job.h"
#include "npy.h"

#include <getopt.h>

typedef struct file_job {
    job j;
    arena m;
    bool dtype_given, timed;
    heddle_dtype dtype;
    heddle_device device;
    const char *path[JOB_FIELDS];
    npy_array file[JOB_FIELDS];
} file_job;

/* Values of struct option: a tensor's is OPTION_FIELD plus its index. */
enum {
    OPTION_DTYPE = 256,
    OPTION_DEVICE,
    OPTION_DETERMINISTIC,
    OPTION_MULTIPROCESSORS,
    OPTION_TIME,
    OPTION_OWN = 300,
    OPTION_FIELD = 400
};

/* What a command has of its own. */
typedef struct file_command {
    const char *name, *usage;
    const struct option *own;                                 /* ends with a name of NULL */
    bool (*set_option)(job *j, int option, const char *text); /* complains, or getopt_long has */
    int (*run)(file_job *w);
} file_command;

/* The whole command: the shared options, the tensors' ones from the table, its own; then its run. The exit status. */
int file_job_main(const file_command *command, file_job *w, int argc, char **argv);

/* The feature bits of all tensors that were named. */
uint64_t file_job_features(const file_job *w);

/* Reads every input that was named and complains about types: floats, bool masks, int32 lengths; the inputs of the
 * compute type have the type of the first, `main`. */
bool file_job_read(file_job *w, int main);

/* Chooses the compute type: --dtype, or the files' own. */
bool file_job_choose_dtype(file_job *w, int main);

/* The shape that tensor f has as a file: as described, but without the leading ones that the main input has not either,
 * and for norm-linear with the leading dimensions of x. Returns the rank. */
int file_job_shape(const file_job *w, int f, int main, int64_t shape[NPY_MAX_RANK]);

/* Checks the shapes of all inputs, but for the fields whose bit is set in `skip`. */
bool file_job_check_shapes(const file_job *w, int main, uint64_t skip);

/* Converts, runs, measures if asked, and writes the outputs. The command's exit status. */
int file_job_finish(file_job *w, int main);

#endif

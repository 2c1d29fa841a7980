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
    OPTION_TIME,
    OPTION_HELP,
    OPTION_OWN = 300,
    OPTION_FIELD = 400
};

#define FILE_JOB_MAX_OPTIONS 64

/* The options of both commands, the tensors' ones from the table, and then own[], which ends with a name of NULL. */
void file_job_options(const job *j, const struct option *own, struct option out[FILE_JOB_MAX_OPTIONS]);

/* Takes one of the shared options: 1 if it was one, 0 if it is the command's own, -1 after a complaint. */
int file_job_option(file_job *w, int value, const char *argument);

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

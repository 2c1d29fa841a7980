/* SPDX-License-Identifier: Apache-2.0
 * One call of the library with its data, whichever operation it is. The tensors of both operations are listed in
 * tables, so that reading files, converting, comparing and printing are loops over them. */
#ifndef HEDDLE_TOOLS_JOB_H
#define HEDDLE_TOOLS_JOB_H

#include "common.h"

#include "../src/fields.h"

/* The tensors by name: Q, K, ..., and norm-linear's X, GAMMA, ... */
#define DENSE(id, ...) id = FIELD_##id,
#define STRIDED(id, ...) id = FIELD_##id,
enum {
#include "../src/attention_fields.def"
};
#define DENSE(id, ...) id = FIELD_N_##id,
#define STRIDED(id, ...) id = FIELD_N_##id,
enum {
#include "../src/norm_linear_fields.def"
};

#define JOB_FIELDS ATTENTION_FIELDS

typedef struct job {
    bool linear;     /* norm-linear, else attention */
    int64_t columns; /* of HEDDLE_BLOCKS's lists in all */
    bool drops;      /* a dropout was given, be it 0 */
    bool seeds;      /* and a seed of it */
    heddle_attention a;
    heddle_norm_linear l;
    void *data[JOB_FIELDS]; /* NULL: absent */
    void *workspace;
    size_t workspace_bytes[2]; /* by pass */
} job;

/* The table, ended by a field without a name. */
const tensor_field *job_fields(const job *j);

void job_set_dtype(job *j, heddle_dtype dtype);
void job_set_device(job *j, heddle_device device);
heddle_dtype job_dtype(const job *j);
/* Of the operation that it is. */
uint64_t job_features(const job *j);
/* Whether it has tensor f, by its features and its norm. */
bool job_has(const job *j, int f);

/* The type of one element in memory; OF_BOOL and OF_INT32 fields have none and are moved by store_value and load_value. */
size_t field_bytes(const job *j, int f);
void store_value(const job *j, int f, void *p, int64_t i, double x);
double load_value(const job *j, int f, const void *p, int64_t i);

/* The extent of a letter of a shape. */
int64_t job_extent(const job *j, char letter);
const char *field_shape(const job *j, int f);
/* The strides of [b, h, s, last] with the defaults filled in and 0 where it repeats. */
heddle_strides field_strides(const job *j, int f);
/* Elements from the first to the last, gaps included. */
int64_t field_count(const job *j, int f);

/* Asks for the sizes of the workspaces. Complains and returns false if the library refuses the job. */
bool job_sizes(job *j, bool backward);
/* The same, and allocates the larger one. Complains and returns false if the library refuses the job. */
bool job_prepare(job *j, arena *m, bool backward);
/* The call alone, on data and a workspace of workspace_bytes[pass], wherever they are; a GPU has not ended when it returns. */
bool job_call(const job *j, heddle_pass pass, void *const data[JOB_FIELDS], void *workspace);
/* Runs a pass; complains and returns false if the library refuses. */
bool job_run(const job *j, heddle_pass pass);

/* Floating-point operations by the usual count: 2·(d + dv) a score, halved if causal; backward 2.5 times forward.
 * norm-linear: 2·m·n·k, backward twice. */
double job_flops(const job *j, heddle_pass pass);

/* Median seconds of a call, after a warm-up. Runs forward first if asked for backward. Negative after a complaint. */
double job_seconds(const job *j, heddle_pass pass);

#endif

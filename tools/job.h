/* SPDX-License-Identifier: Apache-2.0
 * One call of the library with its data, whichever operation it is. The tensors of both operations are listed in
 * tables, so that reading files, converting, comparing and printing are loops over them. */
#ifndef HEDDLE_TOOLS_JOB_H
#define HEDDLE_TOOLS_JOB_H

#include "common.h"

/* attention's tensors: indices into attention_fields */
enum {
    Q,
    K,
    V,
    ALIBI,
    BIAS,
    BOOL_MASK,
    SINKS,
    CU_Q,
    CU_K,
    LEN_Q,
    LEN_K,
    RNG,
    O,
    LSE,
    WEIGHTS,
    DOUT,
    DLSE,
    DWEIGHTS,
    DQ,
    DK,
    DV,
    DBIAS,
    DSINKS,
    ATTENTION_FIELDS
};

/* norm-linear's */
enum { X, GAMMA, BETA, W, C, Y, MEAN, RSTD, DY, DX, DGAMMA, DBETA, DW, DC, NORM_LINEAR_FIELDS };

#define JOB_FIELDS ATTENTION_FIELDS

typedef enum field_kind { KIND_DTYPE, KIND_FLOAT, KIND_BOOL, KIND_INT32, KIND_UINT64 } field_kind;
typedef enum field_role { ROLE_INPUT, ROLE_OUTPUT, ROLE_GRADIENT_IN, ROLE_GRADIENT_OUT } field_role;

/* `shape` is in the letters of the descriptor: attention b h, g (hk), q (sq), k (sk), d, v (dv), Q (total_q), K
 * (total_k), n (b + 1), 2 (two); norm-linear m k n. `packed` is the shape with HEDDLE_VARLEN, if another. */
typedef struct field {
    const char *name, *option; /* `option` of the command line; NULL: has none */
    size_t offset;             /* in heddle_attention_data or heddle_norm_linear_data */
    field_kind kind;
    field_role role;
    const char *shape, *packed;
    size_t stride;    /* offset of its stride in the descriptor; 0: has none */
    uint64_t feature; /* the bit that an input or output needs; 0: none */
} field;

typedef struct job {
    bool linear; /* norm-linear, else attention */
    heddle_attention a;
    heddle_norm_linear l;
    void *data[JOB_FIELDS]; /* NULL: absent */
    void *workspace;
    size_t workspace_bytes[2]; /* by pass */
} job;

/* The table, ended by a field without a name. */
const field *job_fields(const job *j);

void job_set_dtype(job *j, heddle_dtype dtype);
void job_set_device(job *j, heddle_device device);
heddle_dtype job_dtype(const job *j);

/* The type of one element in memory; BOOL and INT32 fields have none and are moved by store_value and load_value. */
size_t field_bytes(const job *j, int f);
void store_value(const job *j, int f, void *p, int64_t i, double x);
double load_value(const job *j, int f, const void *p, int64_t i);

/* The extent of a letter of field.shape. */
int64_t job_extent(const job *j, char letter);
const char *field_shape(const job *j, int f);
/* The strides of [b, h, s, last] with the defaults filled in and 0 where it repeats. */
heddle_strides field_strides(const job *j, int f);
/* Elements from the first to the last, gaps included. */
int64_t field_count(const job *j, int f);

/* Asks for the workspaces and allocates the larger one. Complains and returns false if the library refuses the job. */
bool job_prepare(job *j, arena *m, bool backward);
/* Runs a pass; complains and returns false if the library refuses. */
bool job_run(const job *j, heddle_pass pass);

/* Floating-point operations by the usual count: 2·(d + dv) a score, halved if causal; backward 2.5 times forward.
 * norm-linear: 2·m·n·k, backward twice. */
double job_flops(const job *j, heddle_pass pass);

/* Median seconds of a call, after a warm-up. Runs forward first if asked for backward. Negative after a complaint. */
double job_seconds(const job *j, heddle_pass pass);

#endif

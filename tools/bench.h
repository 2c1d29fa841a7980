/* SPDX-License-Identifier: Apache-2.0
 * What `heddle bench` is made of: problems, their data on a device, what one pass took, and a report of it all. */
#ifndef HEDDLE_TOOLS_BENCH_H
#define HEDDLE_TOOLS_BENCH_H

#include "gpu_clock.h"
#include "job.h"
#include "memory_file.h"

#include <stdio.h>

/* A shape of attention, or of norm-linear as m, k, n when h is 0. */
typedef struct bench_case {
    heddle_dtype dtype;
    int64_t b, h, hk, sq, sk, d;
    heddle_mask mask;
    int64_t m, k, n;
    bool forward_only;
    const char *option; /* NULL: none; else one of bench_options */
} bench_case;

/* The problems of a device, bench_count of them; those of the GPU are made of its head dims, types and options. */
enum { BENCH_MOST_CASES = 500 };
int bench_cases(heddle_device device, bench_case out[BENCH_MOST_CASES]);
/* On a GPU as bench/results calls it: "B4H16/16S4096D128c-bfloat16 softcap". */
void bench_name(const bench_case *c, heddle_device device, char *text, size_t n);
job bench_job(const bench_case *c, heddle_device device);
/* By the usual count, with what a window, documents and lists of blocks hide left out. */
double bench_flops(const bench_case *c, const job *j, heddle_pass pass);

/* heddle_attention_append or heddle_attention_merge by itself, on a GPU, counted in bytes: of a case whose option begins with its name. */
enum { BENCH_ALONE_TENSORS = 12 };
typedef struct bench_alone {
    bool merges, failed;
    heddle_append append;
    heddle_append_data data;
    heddle_merge merge;
    void *merged[4], *memory[BENCH_ALONE_TENSORS];
    int count;
    double bytes; /* read and written */
} bench_alone;

bool bench_is_alone(const bench_case *c);
void bench_alone_kernel(const bench_case *c, char *name, size_t n);
/* Each complains where it fails. */
bool bench_alone_open(const bench_case *c, bench_alone *x);
bool bench_alone_call(const bench_alone *x);
void bench_alone_close(bench_alone *x);

/* The inputs and outputs of a job where its device computes. Complains and returns false if there is no memory. */
typedef struct bench_data {
    void *data[JOB_FIELDS], *workspace;
    bool on_gpu;
    const bench_alone *alone; /* in place of all that */
} bench_data;

bool bench_fill(job *j, arena *m, bool backward, uint64_t seed, bench_data *out);
/* Of an option "prepared", with the inputs there: what forward makes of the weight, and says that it is there. */
bool bench_prepare(const bench_case *c, job *j, arena *m, bench_data *data);
void bench_release(const job *j, bench_data *data);

/* By pass: the largest error of a small problem of this kind over that of the plain computation in the same type, where one
 * takes the kernel of that pass; negative: none does. */
void bench_errors(const bench_case *c, heddle_device device, char kernels[2][128], uint64_t seed, double errors[2]);

/* What one pass of a problem gave. */
typedef struct bench_row {
    const bench_case *c;
    heddle_pass pass;
    bool decode;               /* counted in bytes, not in operations */
    double seconds, low, high; /* the median, and the quartiles around it */
    int64_t prepared_bytes;    /* of norm-linear's weight, kept */
    double work;               /* FLOP, or bytes when decoding */
    double peak, fraction;     /* of FLOP/s, or of bytes/s when decoding */
    const char *peak_of;       /* what it was measured with */
    double error;              /* over the plain computation's; negative: not known */
    char name[96], kernel[128];
} bench_row;

typedef struct bench_machine {
    heddle_device device;
    char text[256], cpu[128], os[128], date[32];
    const char *isa;
    int threads;
    long cores;
    double memory; /* bytes */
    double copy;   /* bytes/s; of each of the three 0: not known */
} bench_machine;

/* All of it but the device, which it has, and `copy`. */
void bench_describe(bench_machine *machine);

/* One line of JSON, without its end. */
void bench_row_json(FILE *to, const bench_row *row, const bench_machine *machine);
/* The i-th of the kernels that a plan can name, NULL behind the last. */
const char *bench_kernel(int i);
/* Prints which kernels of the lists are in none of these rows. */
void bench_untaken(const char *rows);
/* The rows of a file of bench/results, as JSON separated by commas, behind what is there. False after a complaint. */
bool bench_peers(memory_file *to, const char *path);
/* One page with everything in it: rows and peers as JSON, separated by commas. */
bool bench_report(const char *path, const bench_machine *machine, const char *rows, const char *peers);

#endif

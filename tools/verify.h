/* SPDX-License-Identifier: Apache-2.0
 * What `heddle verify` is made of: problems with their inputs in float64, runs of them, and comparisons. */
#ifndef HEDDLE_TOOLS_VERIFY_H
#define HEDDLE_TOOLS_VERIFY_H

#include "job.h"

#include <stdio.h>

typedef struct verify {
    heddle_device device;
    bool verbose; /* the sweep prints every tensor */
    bool bins;    /* random cases alone, by bins */
    uint64_t seed;
    int64_t random_cases;
    const char *filter; /* only problems that are called so */
    FILE *json;         /* each check goes there, or with bins each average */
    int checked, failed;
    bool counts; /* no problem is run, all are counted */
    int64_t problems, done;
    double begin;
    /* What is at hand: its report, with what stands over that until it is printed, and its problem. */
    const char *report;
    char heading[320], name[96];
    heddle_dtype dtype;
    char family[2][24]; /* by pass */
} verify;

/* A job whose inputs are kept as float64 in the layout of its description; NULL: absent. */
typedef struct problem {
    job j;
    double *x[JOB_FIELDS];
    int64_t first_part; /* with HEDDLE_ACCUMULATE, so many keys first and then the others; 0: all at once */
} problem;

/* The tensors of one run, likewise. */
typedef struct outcome {
    double *x[JOB_FIELDS];
} outcome;

typedef struct difference {
    double largest;  /* absolute difference */
    double relative; /* the same over the largest magnitude of the truth */
    bool broken;     /* a NaN or an infinity where there is none in the truth, or the other way round */
} difference;

problem attention_problem(void);
problem norm_linear_problem(void);

/* Memory for input f. */
double *problem_input(problem *p, arena *m, int f);
/* Fills each input that the features call for, and the incoming gradients, with normal numbers, if it is not there yet.
 * */
void problem_fill(problem *p, arena *m, random_state *r);
/* Rounds the inputs to what `dtype` can hold, so that every run sees the same numbers. */
void problem_round(problem *p, heddle_dtype dtype);

/* Forward, and backward if it has an incoming gradient, with outputs and workspace full of NaN. */
bool problem_run(const problem *p, arena *m, heddle_device device, heddle_dtype dtype, outcome *out);
/* Both passes of a job that is ready to run, its keys in two parts (verify_parts.c); whether a problem can be had so. */
bool run_parts(const job *whole, arena *m, int64_t first, bool backward);
bool fits_parts(const heddle_attention *a);
/* Attention's sums from the first term on, in blocks of 128 as BLAS has them, from the last, from both ends in turn. */
typedef enum plain_order { PLAIN_FORWARD, PLAIN_BLOCKED, PLAIN_REVERSED, PLAIN_ENDS, PLAIN_ORDERS } plain_order;

/* The textbook computation: whole matrices, sums in float32, every intermediate tensor rounded to dtype. The measure of
 * what error is to be expected. `terms` gets what its noise is made of: see verify_plain.h. */
void plain_run(const problem *p, arena *m, heddle_dtype dtype, plain_order order, outcome *out, outcome *terms);

/* How many keys a query of an attention problem sees that sees any, on average. */
double keys_seen(const problem *p);

difference compare(const double *x, const double *truth, int64_t n);

/* A device's run beside those that it is measured by. */
typedef struct trial {
    outcome ours, terms, truth;
    outcome plain
        [PLAIN_ORDERS]; /* as many as were asked for: the later ones only where the first two do not excuse an error */
    int orders;
} trial;

bool trial_run(const problem *p, arena *m, heddle_device device, heddle_dtype dtype, trial *t);

/* One tensor of a trial. */
typedef struct judgement {
    difference ours, plain; /* plain: the largest over the orders */
    double allowed;         /* relative */
    double ratio;           /* of our error to what is allowed; 999 if it cannot be told */
    bool doubtful;          /* the plain computation is too far off to judge by */
    bool ok;
} judgement;

judgement judge(const problem *p, int f, heddle_dtype dtype, const trial *t);
/* What one result of a trial adds to the average of log(our error / plain's error in blocks); errors below one rounding of the
 * tensor's largest magnitude count as that. */
double log_ratio(const problem *p, int f, heddle_dtype dtype, const trial *t);

/* A report by its name, and the lines that stand over the first problem of it that is run. */
__attribute__((format(printf, 3, 4))) void begin_report(verify *v, const char *name, const char *heading, ...);
/* Whether the next problem, of that name, is to be run. */
__attribute__((format(printf, 2, 3))) bool begin_problem(verify *v, const char *format, ...);
/* Before its first line is printed: what stands over it. */
void begin_lines(verify *v);
/* What record() tells of the problem. */
void about_problem(verify *v, const problem *p, heddle_dtype dtype);
/* A line of JSON, if there is a file for it: a check, its error and that of the plain computation (0: there is none). */
void record(verify *v, const char *what, double error, double plain, bool passed);
/* trial_run on v's device, and on success the problem's first line, its name. */
bool verify_trial(verify *v, const problem *p, arena *m, heddle_dtype dtype, trial *t);

/* Counts a check and gives "ok" or "FAILED" for the report. */
const char *verdict(verify *v, bool ok);
/* A report's table: a line per result of the trial. `once`, if there, is the largest difference that the origin printed
 * of each field; negative: none. */
void report_tensors(verify *v, const problem *p, heddle_dtype dtype, const trial *t, const double *once);
/* One line: what, the value, the most it may be. */
void report_bound(verify *v, const char *what, double value, double most);
/* n values of a float32 computation, in rows, beside those known to be true, which were printed with so many decimals
 * (negative: so many significant digits); they may differ by `slack` on top of that. */
void report_known(verify *v, const char *what, const double *x, const double *known, int n, int columns, int digits,
                  double slack);
/* What the rule allows tensor f of a float32 trial, as an absolute difference. */
double known_slack(const problem *p, int f, const trial *t);

/* One head of attention, [sq, d] against [sk, d], with room for q, k, v and the gradient of o. */
problem one_head(arena *m, int64_t sq, int64_t sk, int64_t d);
/* The inputs of the FlashAttention program. */
problem day55_problem(arena *m);

/* The reports. Each returns false if it could not be carried out. */
bool verify_day19(verify *v);
bool verify_day50(verify *v);
bool verify_day55(verify *v);
bool verify_p22(verify *v);
bool verify_fa2_warps(verify *v);
bool verify_sweep(verify *v);
/* Random cases of attention without a line each, and the averages over them: verify_bins.c. */
bool verify_bins(verify *v);
/* The description of a random case, and its problem. */
heddle_attention random_attention(random_state *r);
problem make_attention(const heddle_attention *a, arena *m, random_state *r);

/* glibc's rand(), whatever the C library: the additive feedback generator of degree 31. */
typedef struct glibc_random {
    uint32_t r[31];
    int at;
} glibc_random;

glibc_random glibc_srand(uint32_t seed);
int32_t glibc_rand(glibc_random *g);
#define GLIBC_RAND_MAX 2147483647

/* torch.manual_seed and torch.randn on the CPU, for 16 numbers or more. */
typedef struct torch_random {
    uint32_t state[624];
    int at;
} torch_random;

torch_random torch_manual_seed(uint32_t seed);
void torch_randn(torch_random *t, double *x, int64_t n);

#endif

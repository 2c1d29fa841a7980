/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests share: the two "problems" and what judges them. A problem is a description with every
 * tensor it needs (tensor.h); check_attention and check_norm_linear run it three times: on the device under test, on HEDDLE_REF in
 * float64 from the very same rounded inputs, and by a plain computation in the same dtype, which sets the tolerance
 * (docs/design.md, section 4).
 *
 * Environment: HEDDLE_CPU (instruction set, skip if it is not to be had), HEDDLE_TEST_DEVICE=cpu|cuda, HEDDLE_LONG=1,
 * HEDDLE_EMULATED=1, HEDDLE_SEED, HEDDLE_ONLY (a pattern of the names of the tests that are run). */
#ifndef HEDDLE_TESTS_COMMON_H
#define HEDDLE_TESTS_COMMON_H

#include "heddle.h"
#include "tensor.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* ------------------------------------------------------------------------------------------------- environment */

/* The first line of every main: exits with 77 (skipped) when the machine has not what the environment asks for. */
void test_begin(void);
/* The last line: prints the worst ratio of error to tolerance of this binary and gives `failed` back. */
int test_end(int failed);
heddle_device test_device(void);
/* The instruction sets of HEDDLE_CPU, one but for `all`, by which the judges try each that this processor has on the same problem: what
 * the results are held against is computed once. test_take_isa takes the i-th, and says its name; on a GPU there is one without. */
enum { TEST_ISAS = 8 };
int test_isas(void);
const char *test_take_isa(int i);
/* In place of cmocka_unit_test, of a test that does not leave all to the judges: it runs with each of them. */
typedef struct test_body {
    void (*run)(void **state);
} test_body;
void test_by_each_isa(void **state);
#define UNIT_TEST_OF_EACH_ISA(test)                                                                                    \
    {                                                                                                                  \
#test, test_by_each_isa, NULL, NULL, &(test_body) {                                                            \
            test                                                                                                       \
        }                                                                                                              \
    }
bool test_long(void);
/* Each operation takes some twenty times as long: shapes that are there for a GPU's tiles are left out. */
bool test_emulated(void);
/* HEDDLE_SEED if that is set, else `standard`. */
uint64_t test_seed(uint64_t standard);
/* Those that every kernel has: float32, bfloat16, float16. */
enum { TEST_DTYPES = 3 };
extern const heddle_dtype test_dtypes[TEST_DTYPES];

/* -------------------------------------------------------------------------------------------------- comparison */

/* The order of the plain computation's sums: from their first term, from their last, from both ends in turn; or, as BLAS does,
 * blocks of PLAIN_BLOCK terms that are added up; then sums of a row's weights are in the lanes of a vector, as PyTorch has them. */
typedef enum plain_order { PLAIN_FORWARD, PLAIN_REVERSED, PLAIN_BLOCKED, PLAIN_ENDS, PLAIN_ORDERS } plain_order;
enum { PLAIN_BLOCK = 128 };

/* Half a unit in the last place of 1 in a type, or in PRECISION_TF32: the relative error of one rounding. */
double unit_roundoff(int element);

/* So many u·(Σ t²)^½ of the terms t that were rounded to a type of unit roundoff u are held against nobody: 6.5 deviations of roundings that
 * know nothing of each other, which one of 10^10 numbers exceeds; a million cases have as many. docs/design.md, section 4. */
#define ROUNDINGS 2.75

/* `natural` is the magnitude of the terms that cancel in the result (0: unknown); noise of a few float32 roundings
 * of it is always allowed; so is an error of `noise`. `condition`: how many times more than its own rounding the plain
 * computation may lose before ref is in doubt; INFINITY: anything. Says what is wrong with `name` on stdout and returns
 * false. */
bool compare_tensor(const char *name, int precision, const tensor *x, const tensor *ref, const tensor *plain,
                    double natural, double noise, double condition);

/* Largest error of x and largest magnitude of ref, over what is finite in ref and was written. */
double tensor_error(const tensor *x, const tensor *ref, double *magnitude);
/* Of all comparisons until now: how many, how many of them said nothing (of a tensor that roundings alone make what it is, zeros would
 * pass), and the largest error over its tolerance, with where that was. */
enum { WORST_NAME = 64 };
typedef struct comparisons {
    long count, silent;
    double worst;
    char where[WORST_NAME];
} comparisons;
comparisons all_comparisons(void);

/* The systematic part of the rule: over the cases of a bin, the mean of log(error / plain's error), the plain
 * computation's sums in blocks as BLAS has them. */
typedef struct error_bin {
    double log_ratio;
    int64_t count;
} error_bin;
/* Adds a tensor of one case; `natural` as above. */
void bin_count(error_bin *bin, const tensor *x, const tensor *ref, const tensor *plain, double natural);
/* The (geometric) average of error / plain's error. */
double bin_ratio(const error_bin *bin);

/* What the plain computation rounds to. */
int precision_of(heddle_dtype dtype, uint64_t features);

/* --------------------------------------------------------------------------------------------------- attention */

/* T_Q, T_K, ...: the tensors of src/attention_fields.def. */
#define DENSE(id, ...) T_##id,
#define STRIDED(id, ...) T_##id,
enum attention_tensor {
#include "attention_fields.def"
    T_COUNT
};
extern const char *const attention_tensor_name[T_COUNT];

typedef struct attention_case {
    heddle_attention a; /* size and device are filled in */
    const int32_t *cu_q, *cu_k, *len_q, *len_k;
    double q_magnitude, k_magnitude, v_magnitude; /* 0 means 1 */
    uint64_t seed;
    uint32_t skip;        /* bit T_x: that optional tensor is NULL */
    bool same_input;      /* k = v = q */
    bool poison_masked;   /* NaN and 1e30 in all that no query sees, and in the bias where it is masked out */
    bool ill_conditioned; /* the plain computation may overflow or be far off */
    double mask_density;  /* of the boolean mask; 0 means 0.7 */
    double huge_bias;     /* the bias of some whole rows, and of some keys of the others; 0: of none */
    int64_t huge_from;    /* and in every second head of all keys from this one on; 0: of none more */
    bool mask_rows;       /* some rows of the boolean mask are empty */
    int64_t mask_tiles;   /* tiles of so many rows and columns are empty, full or as they were; 0: no tile is */
    double hidden_pages;  /* of the numbers in block_table that are no page */
    int segments; /* how ids are drawn: 1 documents in a row, 2 at random, 3 runs in any order, 4 nearly one; 0: one of these */
    double block_density; /* of the lists of HEDDLE_BLOCKS; 0 means 0.5 */
    int64_t first_part;   /* once more with HEDDLE_ACCUMULATE, so many keys first and then the others; 0: not */
} attention_case;

typedef struct attention_problem {
    heddle_attention a;
    tensor t[T_COUNT];
} attention_problem;

/* A description with size, dtype and the test's device set; hk, sk and dv may be 0. */
heddle_attention attention_desc(heddle_dtype dtype, int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d,
                                int64_t dv);
/* A case of these sizes in float32 without any option; its seed follows from them. */
attention_case attention_case_of(int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d, int64_t dv);
/* The problem of a case with random inputs and poisoned outputs, uploaded. */
attention_problem attention_new(const attention_case *c);
/* The same in other types or on another device: inputs converted, outputs poisoned. */
attention_problem attention_copy(const attention_problem *p, heddle_dtype dtype, heddle_device device);
/* For the plain computation, on the host alone: p's own inputs, and poisoned outputs. To be freed before p. */
attention_problem attention_borrow(const attention_problem *p);
void attention_free(attention_problem *p);
heddle_attention_data attention_data(const attention_problem *p, bool backward);
/* Runs a pass with a poisoned workspace and downloads the outputs. An error or damage is printed, and makes it false: or fails the test. */
bool attention_pass(attention_problem *p, heddle_pass pass);
void attention_run(attention_problem *p, heddle_pass pass);
/* One line that says which problem it is. */
void attention_print(const attention_case *c);
/* The whole check; prints the case and fails the test when something is wrong. */
void check_attention(const attention_case *c);
/* In each of the three types, with other data each time. */
void check_attention_dtypes(attention_case c);
/* The same as check_attention, as an answer. */
bool attention_is_right(const attention_case *c);

/* The same, and what the case adds to the averages of its bin (see error_bin). `keys`: how many keys a row that sees any
 * sees on average. */
bool attention_judge(const attention_case *c, error_bin bin[T_COUNT], double *keys);
/* Only what it adds: for a bin of nothing but such cases, of each instruction set. */
void attention_count(const attention_case *c, error_bin bin[TEST_ISAS][T_COUNT]);

/* HEDDLE_ACCUMULATE: whether a case can be had in two parts; and what both passes of a problem that has been run come to, its first keys
 * in one call and the others in another, as `to` has its outputs (attention_borrow). Prints what went wrong and returns false. */
bool attention_fits_parts(const attention_case *c);
bool attention_in_parts(attention_problem *p, int64_t first, attention_problem *to);

/* {first_q, sq, first_k, sk} of sequence n. */
void attention_lengths(const attention_problem *p, int64_t n, int64_t length[4]);
/* Which page has key j of sequence n; -1: none. */
int64_t attention_page(const attention_problem *p, int64_t n, int64_t j);
/* The key on the diagonal of query 0: `off` of a sequence of so many rows. */
int64_t attention_diagonal(const heddle_attention *a, int64_t sq, int64_t sk);
/* By the formulas of heddle.h, independent of src/: which keys of sequence n, [sk], does query i of head x see? Those
 * from seen.from up to seen.to, of which some may be left out; `length` is from attention_lengths. */
typedef struct seen_keys {
    int64_t from, to;
} seen_keys;
seen_keys attention_sees(const attention_problem *p, const int64_t length[4], int64_t n, int64_t x, int64_t i,
                         bool *sees);
/* On average of the rows that see any. */
double attention_keys_seen(const attention_problem *p);

/* Both passes in the problem's dtype, as PyTorch's math path does them: every intermediate rounded to it. Fills the
 * outputs' host images, and with PLAIN_FORWARD of each the natural magnitude, a sum of magnitudes, and its spread, the root of a sum
 * of squares of what is rounded before it is summed (P, dS, o in D; in float32 the scores and dP, too): what roundings that know
 * nothing of each other go with; NULL: not wanted. The
 * orders are equally plain; PLAIN_BLOCKED keeps P of the forward; PLAIN_REVERSED has D from dout and the rounded o, as
 * docs/design.md has it, the others from P and dP. */
void plain_attention(attention_problem *p, plain_order order, double natural[T_COUNT], double spread[T_COUNT]);

/* ------------------------------------------------------------------------------------------------- norm-linear */

#define DENSE(id, ...) N_##id,
#define STRIDED(id, ...) N_##id,
enum norm_linear_tensor {
#include "norm_linear_fields.def"
    N_COUNT
};
extern const char *const norm_linear_tensor_name[N_COUNT];

typedef struct norm_linear_case {
    heddle_norm_linear a;
    uint64_t seed;
    uint32_t skip;       /* bit N_x */
    double mean;         /* of x, in deviations */
    double scale_spread; /* some features of x are this many times the others; 0 means 1 */
    double w_magnitude;  /* 0 means 1/sqrt(k) */
} norm_linear_case;

typedef struct norm_linear_problem {
    heddle_norm_linear a;
    tensor t[N_COUNT];
} norm_linear_problem;

heddle_norm_linear norm_linear_desc(heddle_dtype dtype, heddle_norm norm, int64_t m, int64_t k, int64_t n);
norm_linear_problem norm_linear_new(const norm_linear_case *c);
norm_linear_problem norm_linear_copy(const norm_linear_problem *p, heddle_dtype dtype, heddle_device device);
norm_linear_problem norm_linear_borrow(const norm_linear_problem *p);
void norm_linear_free(norm_linear_problem *p);
heddle_norm_linear_data norm_linear_data(const norm_linear_problem *p, bool backward);
void norm_linear_run(norm_linear_problem *p, heddle_pass pass);
void norm_linear_print(const norm_linear_case *c);
void check_norm_linear(const norm_linear_case *c);
bool norm_linear_is_right(const norm_linear_case *c);
bool norm_linear_judge(const norm_linear_case *c, error_bin bin[N_COUNT]);
void norm_linear_count(const norm_linear_case *c, error_bin bin[TEST_ISAS][N_COUNT]);
/* The plain order of operations. `natural` is measured with PLAIN_FORWARD; natural[N_X] is then the largest magnitude of
 * x in its row's deviations, which is how many times its own rounding x loses where the mean is taken off. `spread` (NULL: not
 * wanted), as of attention, is of dw and dgamma what the roundings of the rows' means come to, of dx those of dz, of y and u those of their
 * terms, where kernels have terms of their own (bfloat16 on a GPU) and of two halves. `slopes` (NULL: not wanted): what the gradients' terms would sum to if the activation's derivative were 1. */
void plain_norm_linear(norm_linear_problem *p, plain_order order, double natural[N_COUNT], double slopes[N_COUNT],
                       double spread[N_COUNT]);

#endif

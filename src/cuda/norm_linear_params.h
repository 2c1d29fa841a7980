/* SPDX-License-Identifier: Apache-2.0
 * The parameters of the norm-linear kernels. C and CUDA C. Element type T is the problem's dtype.
 *
 * float32 goes through the tensor cores as two planes of float16, high + low, 22 bits of significand, after scaling by powers
 * of two that are kept as exponents and taken out again in the epilogue. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_PARAMS_H
#define HEDDLE_CUDA_NORM_LINEAR_PARAMS_H

#include "tensor_map.h"

/* out[rows, cols] = epilogue(A·B). A and B are 16-bit planes whose leading dimension is a multiple of 8 elements. */
typedef struct norm_gemm {
    const void *a, *a_low; /* fwd, dx: [rows, depth]; dw: [depth, rows] */
    const void *b, *b_low; /* fwd: [cols, depth]; dx, dw: [depth, cols] */
    int64_t lda, ldb;
    int64_t rows, cols, depth;
    int64_t row_tiles, col_tiles;
    /* The product is worth 2^-(exponent + *shared_exponent + row_exponent[row] + col_exponent[col]); each may be NULL. */
    const int32_t *row_exponent, *col_exponent, *shared_exponent;
    int32_t exponent;
    int32_t pairs;            /* two neighbours of out may be stored at once */
    void *out;                /* T [rows, cols]; dw: NULL if not wanted */
    int64_t ldo;              /* of out */
    const float *mean, *rstd; /* per row. fwd: NULL when A is normalised already */
    const float *col_sum;     /* fwd: s */
    const float *col_add;     /* fwd: t, or NULL; then bias, or NULL */
    const void *bias;         /* fwd: T [cols] */
    const void *gamma;        /* dx, dw: T [cols] or NULL */
    const void *beta;         /* dw: T [cols] or NULL */
    const float *row_bias;    /* dw: dbias [rows], where beta is not NULL; sm90: or part_beta */
    const void *x;            /* dx: T [rows, cols] */
    const void *w;            /* dw: T [rows, cols], for part */
    int64_t ldx;              /* of x or w */
    int32_t centred;          /* dx: mean_k(g) is wanted (LayerNorm) */
    /* dx: [2·col_tiles][2][rows], sums over the columns of g and of g·xhat; dw: [2·row_tiles][cols], sums over the rows of
     * W∘G, or NULL */
    float *part;
    float *part_beta; /* sm90, dw: part is [row_tiles][cols], and this the same of W∘dbias; each may be NULL */
} norm_gemm;

/* On Hopper A and B come by the copy engine, in boxes of 64 rows. */
typedef struct norm_gemm_sm90 {
    tensor_map a, b;
    norm_gemm g;
} norm_gemm_sm90;

/* A row of `in` at a time: its moments, and xhat into planes; or, where it `packs`, in∘gamma into planes. */
typedef struct norm_rows {
    const void *in; /* T [rows, cols] */
    int64_t ld, rows, cols;
    const void *gamma, *beta; /* T [cols] or NULL. rows: out = xhat∘gamma + beta; pack: the sums below */
    const void *bias;         /* pack: T [rows] or NULL */
    void *high, *low;         /* [rows, ldp] or NULL */
    int64_t ldp;
    float *mean, *rstd;             /* rows: written, unless `given` */
    float *sum, *add;               /* pack: rowsum of what was rounded; in·beta + bias; each may be NULL */
    int32_t *row_exponent;          /* pack: written where shared_exponent is NULL. rows: subtracted */
    const int32_t *shared_exponent; /* pack: used. rows: added */
    int32_t exponent;               /* rows: added */
    int32_t packs, given, rms;
    int32_t vector; /* in, gamma and beta may be read 16 bytes at a time */
    float eps;
} norm_rows;

/* prepare: two jobs in one launch; one of them may have no rows. */
typedef struct norm_prepare {
    norm_rows job[2];
    int64_t first_blocks; /* of job[0] */
} norm_prepare;

/* finish: dx = rstd·(g - mean_k(g) - xhat·mean_k(g∘xhat)), in place, and xhat to z, if not NULL. parts 0: the means
 * are formed here */
typedef struct norm_finish {
    void *dx, *z;
    const void *x;
    int64_t ldd, ldz, ldx, rows, cols;
    const float *mean, *rstd, *part; /* of norm_gemm */
    int32_t parts, centred, vector;
} norm_finish;

/* partial: part[p][col] = the sum over the p-th share of the rows of a[row, col]·factor[row].
 * total: out[col] and sum[col] = the sum over p of part[p][col]. */
typedef struct norm_sums {
    const void *a; /* T [rows, cols] */
    int64_t ld, rows, cols;
    const float *factor; /* NULL: ones */
    float *part;
    int32_t parts, vector;
    void *out;  /* T [cols] or NULL */
    float *sum; /* [cols] or NULL */
} norm_sums;

/* total: two jobs in one launch; one of them may have no columns. */
typedef struct norm_totals {
    norm_sums job[2];
} norm_totals;

/* shared[x] = the least of of[x][0 .. count[x]-1], at most LARGEST_EXPONENT */
typedef struct norm_exponents {
    const int32_t *of[2];
    int64_t count[2];
    int32_t *shared;
} norm_exponents;

typedef union norm_linear_params {
    norm_gemm gemm;
    norm_gemm_sm90 gemm90;
    norm_prepare prepare;
    norm_finish finish;
    norm_sums sums;
    norm_totals totals;
    norm_exponents exponents;
} norm_linear_params;

enum {
    GEMM_TILE = 128, /* rows and columns of a block */
    GEMM_STAGE_BYTES = 32768,
    GEMM_SHARED = 3 * GEMM_STAGE_BYTES,
    GEMM90_SHARED = 220672,
    SHORT_ROW = 1024,      /* elements of a row that one warp takes; a longer one is a block's */
    SHORT_ROWS = 4,        /* of a block */
    SUM_COLS = 256,        /* columns of a block of `partial` */
    TOTAL_COLS = 128,      /* of `total` */
    LARGEST_EXPONENT = 126 /* 2^126 is a normal float */
};

#endif

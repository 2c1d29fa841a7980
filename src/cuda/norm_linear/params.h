/* SPDX-License-Identifier: Apache-2.0
 * The parameters of the norm-linear kernels. C and CUDA C. Element type T is the problem's dtype.
 *
 * float32 goes through the tensor cores as two planes of float16, high + low, 22 bits of significand, after scaling by powers
 * of two that are kept as exponents and taken out again in the epilogue. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_PARAMS_H
#define HEDDLE_CUDA_NORM_LINEAR_PARAMS_H

#include "cuda/tensor_map.h"

/* x / d for x under 2^31 is (x·factor / 2^32 + x) / 2^shift. */
typedef struct divisor {
    uint32_t factor, shift;
} divisor;

/* sm90: pairs of tiles one below the other, `units` of them; PANEL rows of those, the last panel last_height, have all their columns before the
 * next. */
typedef struct tile_order {
    uint32_t units, panels, panel_units, last_height;
    divisor panel, last; /* by panel_units, last_height */
} tile_order;

/* out[rows, cols] = epilogue(A·B). A and B are 16-bit planes whose leading dimension is a multiple of 8 elements. */
typedef struct norm_gemm {
    const void *a, *a_low; /* fwd, dx: [rows, depth]; dw: [depth, rows] */
    const void *b, *b_low; /* fwd: [cols, depth]; dx, dw: [depth, cols] */
    int64_t lda, ldb;
    int64_t rows, cols, depth;
    int64_t row_tiles, col_tiles;
    tile_order tiles; /* sm90 */
    /* The product is worth 2^-(exponent + *shared_exponent + row_exponent[row] + col_exponent[col]); each may be NULL. */
    const int32_t *row_exponent, *col_exponent, *shared_exponent;
    int32_t exponent;
    int32_t pairs;            /* two neighbours of out may be stored at once */
    void *out;                /* T [rows, cols]; dw: NULL if not wanted */
    int64_t ldo;              /* of out */
    const float *mean, *rstd; /* fwd of sm80: per row; NULL when A is normalised already */
    const float *col_sum;     /* fwd: s, or NULL when A is normalised already */
    const float *col_add;     /* fwd: t, or NULL; then bias, or NULL */
    const void *bias;         /* fwd: T [cols] */
    const void *gamma;        /* dw: T [cols] or NULL */
    const void *beta;         /* dw: T [cols] or NULL */
    const float *row_bias;    /* dw: dbias [rows], for beta; or NULL */
    const void *w;            /* dw: T [rows, cols], for part */
    int64_t ldx;              /* of w */
    /* dw: sums over the rows of W∘G, or NULL: [gemm80_sums or gemm90_sums][cols] */
    float *part;
    /* fwd_raw of sm90: mean and rstd of A's rows are formed beside the product, and written here; turns[2][row_tiles + 1], zeros at first,
     * counts their slices. */
    float *saved_mean, *saved_rstd;
    int32_t *turns;
    int32_t rms;
    float eps, inverse; /* 1/depth */
    /* fwd of sm90: out = act of what would be there, and that to u [rows, cols], unless NULL. */
    int32_t activation;
    int32_t residual_pairs; /* sm80: two neighbours of it may be loaded at once */
    void *u;                /* T */
    int64_t ldu;
    const void *residual; /* fwd: T [rows, cols], added to out; or NULL */
    int64_t ldr;
} norm_gemm;

/* A row of `in` at a time: its moments, and xhat into planes; or, where it `packs`, in∘gamma into planes. */
typedef struct norm_rows {
    const void *in; /* T [rows, cols] */
    int64_t ld, rows;
    int32_t cols, ldp;
    const void *gamma, *beta;          /* T [cols] or NULL. rows: out = xhat∘gamma + beta; pack: the sums below */
    const void *bias;                  /* pack: T [rows] or NULL */
    void *high, *low;                  /* [rows, ldp] or NULL */
    float *mean, *rstd;                /* rows: written, unless `given`; rstd NULL then means ones */
    float *sum, *add;                  /* pack: rowsum of what was rounded; in·beta + bias; each may be NULL */
    int32_t *row_exponent;             /* or NULL. pack: found and written. rows: subtracted */
    const int32_t *with;               /* pack: another matrix's, added to what the least is of; or NULL */
    int32_t exponent;                  /* rows: added, with the shared one */
    int32_t packs, given, rms, shares; /* pack: scaled by the shared exponent */
    int32_t vector;                    /* in, gamma and beta may be read 16 bytes at a time */
    float eps, inverse;                /* 1/cols */
} norm_rows;

/* normalise, sm90: rows in 16 bits, each by so many warps, or by so many lanes of one. */
typedef struct norm_normalise {
    norm_rows job;
    int32_t warps_log2, lanes;
} norm_normalise;

/* dw of sm90, where the weight has too few tiles for all multiprocessors: each has so many shares of the terms. A share leaves its sums in
 * sums[row_tiles, even][col_tiles][count][gemm90_sums_of_tile]; the last of a tile to come, by arrived[row_tiles, even][col_tiles], zeros at
 * first, adds all of them in their order. */
typedef struct norm_shares {
    int32_t count; /* 1: the others are of no use */
    divisor units; /* by tiles.units */
    float *sums;
    int32_t *arrived;
} norm_shares;

/* On Hopper A and B come by the copy engine, in boxes of 64 rows, and out and u go by it, in boxes of 16. */
typedef struct norm_gemm_sm90 {
    tensor_map a, b, out, u;
    norm_gemm g;
    int32_t b_is_there; /* no kernel that may still run writes it */
    int32_t gated;      /* few rows: as fwd_gate */
    int32_t row_blocks, stages;
    norm_shares shares; /* dw */
} norm_gemm_sm90;

/* prepare: two jobs in one launch; one of them may have no rows. The least exponents of each job's packed rows go from one launch to
 * the next: to least[2][blocks], and from of[x][of_blocks[x]], where what they come to goes to shared[2], too. Each may be NULL. */
typedef struct norm_prepare {
    norm_rows job[2];
    int32_t *least, *shared;
    const int32_t *of[2];
    int32_t of_blocks[2];
    int32_t *clear; /* [zeros]: becomes 0 */
    int32_t zeros;
} norm_prepare;

/* A sum over rows, of columns. finish: part[p][col] = the sum over the p-th share of the rows of a[row, col].
 * total: out[col] and sum[col] = the sum over p of part[p·ld + col]; or, where there is an a, over its rows of a[row, col]·factor[row], and
 * over p of part[p·cols + col] if there is a part, too. */
typedef struct norm_sums {
    const void *a; /* T [rows, cols] */
    int64_t ld, rows, cols;
    const float *factor; /* NULL: ones */
    float *part;
    int32_t parts, vector;
    void *out;  /* T [cols] or NULL */
    float *sum; /* [cols] or NULL */
} norm_sums;

/* finish: with h = dy·W where dx is to be, and g = h∘gamma, dx = rstd·(g - mean_k(g) - xhat·mean_k(g∘xhat)); xhat to z, if not NULL;
 * each block's sums over its rows of h∘xhat and h, which are dgamma and dbeta, to part[blocks][2][cols], if not NULL (16 bits, up to
 * SUMMED_ROW columns); and sums of another matrix. One of the two may have no rows. */
typedef struct norm_finish {
    void *dx, *z;
    const void *x, *gamma;
    int64_t ldd, ldz, ldx, rows;
    const float *mean, *rstd;
    float *part;
    int32_t cols, centred, vector;
    int32_t whole; /* finish_is_whole */
    norm_sums sums;
} norm_finish;

/* total: up to three jobs in one launch; the others have no columns. */
typedef struct norm_totals {
    norm_sums job[3];
} norm_totals;

/* activate: out = act(u) + residual, or dy∘act'(u) where there is a dy. out may be u, or dy. gate: u = [gate, up] has twice as many columns,
 * as out has where there is a dy: out = act(gate)∘up + residual, or [dy∘up∘act'(gate), dy∘act(gate)]. out may be u there, or dy itself.
 * part[p] = the sum over the p-th of `parts` shares of the rows of du, if not NULL. */
typedef struct norm_activate {
    const void *u, *dy; /* T [rows, cols] */
    void *out;
    const void *residual; /* NULL: none */
    float *part;          /* [parts][cols, of two halves twice as many] */
    int64_t ldu, ldd, ldo, ldr, rows;
    int32_t cols, activation, vector;
    int32_t parts, lanes_log2; /* threads that have a row */
} norm_activate;

/* z: out = (x - mean)·rstd∘gamma + beta; or, where there is a dz, out + dz. */
typedef struct norm_z {
    const void *x, *gamma, *beta, *dz; /* T [rows, cols], [cols] or NULL */
    const float *mean, *rstd;
    void *out; /* T */
    int64_t ldx, ldz, ldo, rows;
    int32_t cols, centred, vector;
} norm_z;

/* z_sums: gamma_part[p][col] = the sum over the p-th share of the rows of dz∘xhat, beta_part of dz; each may be NULL. */
typedef struct norm_z_sums {
    const void *x, *dz; /* T [rows, cols] */
    const float *mean, *rstd;
    float *gamma_part, *beta_part;
    int64_t ldx, ldz, rows, cols;
    int32_t parts, centred, vector;
} norm_z_sums;

/* heddle_activation, for kernels. */
enum { HEDDLE_GELU_NUMBER = 1, HEDDLE_GELU_TANH_NUMBER, HEDDLE_SILU_NUMBER };

/* The family `small`: a whole pass. */
typedef struct norm_small {
    const void *x, *gamma, *beta, *w, *bias, *dy; /* T */
    const void *residual;                         /* T; forward: added to y, or NULL */
    void *y, *dx, *dgamma, *dbeta, *dw, *dbias;   /* T; each of the gradients may be NULL */
    float *mean, *rstd;                           /* forward: written, or NULL; backward: read where `given` */
    int64_t x_stride, w_stride, y_stride, dy_stride, dx_stride, dw_stride, residual_stride;
    int64_t m;
    int32_t k, n, rms, given, plain; /* plain: no norm */
    float eps;
    int32_t row_blocks; /* backward: the first blocks have rows of dx, the others parts of dw */
    float *part;        /* [row_blocks][2][k]: shares of dgamma and dbeta; NULL: the one block's are all */
} norm_small;

/* few: a whole forward of up to FEW_ROWS rows. */
typedef struct norm_few {
    const void *x, *gamma, *beta, *w, *bias; /* T */
    const void *residual;                    /* T [m, n], added to y; NULL: none */
    void *y, *u;                             /* T [m, n]; u NULL: not wanted */
    float *mean, *rstd;                      /* [m] or NULL */
    int64_t x_stride, w_stride, y_stride, u_stride, residual_stride;
    int32_t m, k, n, rms, plain, activation; /* plain: no norm */
    int32_t row_blocks;                      /* divides the blocks: each has some of the rows */
    int32_t vector;                          /* y, u and residual may be read and written 16 bytes at a time */
    float eps, inverse;
} norm_few;

typedef union norm_linear_params {
    norm_gemm gemm;
    norm_gemm_sm90 gemm90;
    norm_prepare prepare;
    norm_normalise normalise;
    norm_finish finish;
    norm_totals totals;
    norm_activate activate;
    norm_z z;
    norm_z_sums z_sums;
    norm_small small;
    norm_few few;
} norm_linear_params;

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Between the files that list the launches of norm-linear. Pure. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_LAUNCHES_H
#define HEDDLE_CUDA_NORM_LINEAR_LAUNCHES_H

#include "cuda/norm_linear/device.h"

#include <stdbool.h>

/* What the workspace holds; of those that a pass does not need nothing. */
typedef struct norm_linear_arrays {
    uint16_t *z, *z_low;   /* [m, kp]: xhat (or z) for a product */
    uint16_t *w, *w_low;   /* [n, kp] */
    uint16_t *dy, *dy_low; /* [m, np] */
    float *mean, *rstd;    /* [m] */
    float *s, *t;          /* [n] */
    int32_t *dy_exponent, *w_exponent, *least, *shared;
    float *dgamma_part, *finish_part, *dbias_part, *dbias;
} norm_linear_arrays;

typedef struct norm_linear_call {
    const heddle_norm_linear *a;
    const norm_linear_device *device;
    const heddle_norm_linear_data *t;
    norm_linear_arrays at;
    int64_t kp, np;
    bool wide, tf32; /* float32; one product */
    int dtype;       /* 0 bf16, 1 f16, 2 f32 */
    bool raw;        /* forward multiplies x itself */
    bool sm90;       /* the products are Hopper's, as far as the pointers allow */
    norm_linear_launch *launches;
    int count;
} norm_linear_call;

enum { DY_SHARED, W_SHARED }; /* places in arrays.shared, and jobs that find them */

static inline int64_t blocks(int64_t n, int64_t each) {
    return (n + each - 1) / each;
}

/* In how many shares the rows of a column sum are taken: by the size alone, so that the bits are always the same. */
static inline int32_t parts_of(int64_t rows) {
    int64_t parts = (rows + 63) / 64;
    return parts < 1 ? 1 : parts > 64 ? 64 : (int32_t)parts;
}

static inline size_t size_of(const norm_linear_call *c) {
    return c->wide ? 4 : 2;
}

/* The blocks of `prepare` and `finish` stay on their multiprocessors. */
static inline int64_t prepare_blocks(const norm_linear_call *c) {
    return c->device->multiprocessors * PREPARE_BLOCKS(size_of(c));
}

static inline int64_t finish_blocks(const norm_linear_call *c) {
    return c->device->multiprocessors * FINISH_BLOCKS;
}

static inline bool aligned16(const void *p, int64_t ld, size_t size) {
    return (uintptr_t)p % 16 == 0 && (size_t)ld * size % 16 == 0;
}

/* xhat is at most sqrt(k): with this exponent it stays below 2^15, and every power of two is exact. */
static inline int32_t xhat_exponent(int64_t k) {
    int e = 0;
    while (e < 31 && INT64_C(1) << 2 * e < k)
        e++;
    return 14 - e;
}

/* What a block does at a time: rows of so many columns, of which a team of so many threads has one. */
static inline int64_t row_units(int64_t rows, int64_t cols, int short_team, int team) {
    return blocks(rows, ROW_THREADS / (cols <= SHORT_ROW ? short_team : team));
}

static inline int64_t least_of(int64_t x, int64_t y) {
    return x < y ? x : y;
}

/* Columns of a tile on Hopper. */
enum { WIDTHS = 5 };

/* The kernels of one product. */
typedef struct gemm_kernels {
    enum norm_linear_kernel sm80[3], any[2], tf32, sm90[WIDTHS][2];
} gemm_kernels;

#define WIDTH_KERNELS(pass, width)                                                                                     \
    { NORM_LINEAR_##pass##_n##width##_bf16_sm90, NORM_LINEAR_##pass##_n##width##_f16_sm90 }
#define GEMMS(pass)                                                                                                    \
    (&(const gemm_kernels){                                                                                            \
        {NORM_LINEAR_##pass##_bf16_sm80, NORM_LINEAR_##pass##_f16_sm80, NORM_LINEAR_##pass##_f32_sm80},                \
        {NORM_LINEAR_##pass##_any_bf16_sm80, NORM_LINEAR_##pass##_any_f16_sm80},                                       \
        NORM_LINEAR_##pass##_tf32_sm80,                                                                                \
        {WIDTH_KERNELS(pass, 256), WIDTH_KERNELS(pass, 192), WIDTH_KERNELS(pass, 160), WIDTH_KERNELS(pass, 128),       \
         WIDTH_KERNELS(pass, 96)}})

/* The same kernel of each dtype. */
#define OF_DTYPE(pass)                                                                                                 \
    ((const enum norm_linear_kernel[]){NORM_LINEAR_##pass##_bf16_sm80, NORM_LINEAR_##pass##_f16_sm80,                  \
                                       NORM_LINEAR_##pass##_f32_sm80})

/* A launch, unless it has no blocks. */
void heddle__cuda_add(norm_linear_call *c, enum norm_linear_kernel kernel, int64_t grid, uint32_t shared,
                      const norm_linear_params *params);

/* The job of normalising x, with what differs from one use to the other in p. */
norm_rows heddle__cuda_rows_of_x(const norm_linear_call *c, norm_rows p);

/* Returns the blocks. */
int64_t heddle__cuda_add_prepare(norm_linear_call *c, norm_prepare p);

/* Hopper's kernel for a product, and the columns of its tiles. */
enum norm_linear_kernel heddle__cuda_gemm90(const norm_linear_call *c, const gemm_kernels *kernels, int64_t rows,
                                            int64_t cols, int64_t depth, int64_t *width);

/* A product. Returns whether it is Hopper's. */
bool heddle__cuda_add_gemm(norm_linear_call *c, const gemm_kernels *kernels, const norm_gemm *p, bool a_transposed,
                           bool b_transposed);

void heddle__cuda_add_totals(norm_linear_call *c, norm_totals p);

/* All launches of a backward pass whose workspace is laid out. */
void heddle__cuda_norm_linear_backward(norm_linear_call *c);

/* The family small: is it taken? Its kernel, its workspace, its launches. */
bool heddle__cuda_norm_linear_is_small(const heddle_norm_linear *a, const norm_linear_device *device, heddle_pass pass);
enum norm_linear_kernel heddle__cuda_norm_linear_small_kernel(const norm_linear_call *c, heddle_pass pass);
size_t heddle__cuda_norm_linear_small_workspace(const heddle_norm_linear *a, heddle_pass pass);
void heddle__cuda_norm_linear_small(norm_linear_call *c, heddle_pass pass, void *workspace);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * norm-linear forward for a few rows. Packing W would cost more than using it, so W is read once, where it lies: its rows run along the
 * sum, as those of z do, and a sum has a part in each lane until its end. */
#ifndef HEDDLE_CPU_NORM_LINEAR_FEW_H
#define HEDDLE_CPU_NORM_LINEAR_FEW_H

#include "norm_linear_call.h"

#define FEW_Z (VL == 16 ? 4 : 2) /* rows of z and of W whose sums stay in registers */
#define FEW_W 4

/* More rows are worth the packing; fewer are, where bfloat16 needs no widening once it is packed. */
INLINE bool has_few_rows(const heddle_norm_linear *a) {
#if defined(HAVE_BF16_DOT) || defined(HAVE_BF16_TILES)
    if (a->dtype == HEDDLE_BF16)
        return a->m <= 8;
#endif
    return a->m <= 16;
}

/* sums[r·VL + w] = the parts of z row r times W row w, of up to FEW_Z and FEW_W rows. */
INLINE void few_rows_products(int type, int rows, const float *z, int64_t z_stride, const char *w, int64_t w_bytes,
                              int64_t k, vf *sums) {
    vf s[FEW_Z][FEW_W];
    const int64_t size = element_size(type);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int x = 0; x < FEW_W; x++)
            s[r][x] = splat(0);
    for (int64_t e = 0; e < k; e += VL) { /* z is 0 past k */
        vf b[FEW_W];
#pragma GCC unroll 4
        for (int x = 0; x < FEW_W; x++)
            b[x] = load_some(type, w + x * w_bytes + e * size, k - e);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vf a = load(z + r * z_stride + e);
#pragma GCC unroll 4
            for (int x = 0; x < FEW_W; x++)
                s[r][x] += a * b[x];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int x = 0; x < FEW_W; x++)
            sums[r * VL + x] = s[r][x];
}

/* Rows r .. r+rows-1 of y in the columns n0 .. n0+VL-1. A row of W that there is not is the last one again. */
INLINE void few_rows_columns(const norm_call *c, int type, int rows, const float *z, int64_t r, int64_t n0) {
    const heddle_norm_linear *a = c->a;
    const int64_t columns = min64(VL, a->n - n0), size = element_size(type);
    vf sums[FEW_Z * VL];
    for (int64_t x = 0; x < VL; x += FEW_W) {
        const int64_t at = n0 + x;
        if (at + FEW_W <= a->n)
            few_rows_products(type, rows, z, c->k_pad, row_of(c->t->w, at, a->w_stride, type), a->w_stride * size, a->k,
                              sums + x);
        else
            for (int64_t y = 0; y < FEW_W; y++) /* one row four times: rare, so simple */
                for (int i = 0; i < rows; i++) {
                    vf four[FEW_Z * VL];
                    few_rows_products(type, 1, z + i * c->k_pad, c->k_pad,
                                      row_of(c->t->w, min64(at + y, a->n - 1), a->w_stride, type), 0, a->k, four);
                    sums[i * VL + x + y] = four[0];
                }
    }
    const vf bias = c->t->bias ? load_some(type, element_at(c->t->bias, n0, type), columns) : splat(0);
    for (int i = 0; i < rows; i++)
        store_some(type, (char *)c->t->y + ((r + i) * a->y_stride + n0) * size, sum_each(sums + i * VL) + bias,
                   columns);
}

INLINE void few_rows_block_as(const norm_call *c, int type, int64_t n0) {
    const float *z = c->w;
    int64_t r = 0;
    for (; r + FEW_Z <= c->a->m; r += FEW_Z)
        few_rows_columns(c, type, FEW_Z, z + r * c->k_pad, r, n0);
    for (; FEW_Z > 2 && r + 2 <= c->a->m; r += 2)
        few_rows_columns(c, type, 2, z + r * c->k_pad, r, n0);
    for (; r < c->a->m; r++)
        few_rows_columns(c, type, 1, z + r * c->k_pad, r, n0);
}

/* All rows of y in the columns n0 .. n0+VL-1. */
static void few_rows_block(const norm_call *c, int64_t n0) {
    if (c->type == HEDDLE_F32)
        few_rows_block_as(c, HEDDLE_F32, n0);
    else if (c->type == HEDDLE_BF16)
        few_rows_block_as(c, HEDDLE_BF16, n0);
    else
        few_rows_block_as(c, HEDDLE_F16, n0);
}

/* A row of z, zeros past k. gamma and beta are 0 there. */
static void few_rows_z(const norm_call *c, int64_t row) {
    float *z = c->w + row * c->k_pad;
    widen_row(c->type, row_of(c->t->x, row, c->a->x_stride, c->type), c->a->k, 1, z);
    for (int64_t e = 0; e < c->a->k; e += VL)
        store(z + e, (load(z + e) - c->mean[row]) * c->rstd[row] * load(c->gamma + e) + load(c->beta + e));
}

/* Every thread of the team calls it. */
static void few_rows_forward(const norm_call *c) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < c->a->m; row++)
        few_rows_z(c, row);
#pragma omp for schedule(dynamic, 4)
    for (int64_t n0 = 0; n0 < c->a->n; n0 += VL)
        few_rows_block(c, n0);
}

#endif

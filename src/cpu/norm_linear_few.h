/* SPDX-License-Identifier: Apache-2.0
 * norm-linear forward for a few rows, and for a few features out. Packing W would cost more than using it, so W is read where it lies: its rows run along the
 * sum, as those of z do, and a sum has a part in each lane until its end. Where the ISA multiplies pairs of bfloat16, z is rounded to
 * bfloat16, as it is where it is packed, and W goes into the products as it came. */
#ifndef HEDDLE_CPU_NORM_LINEAR_FEW_H
#define HEDDLE_CPU_NORM_LINEAR_FEW_H

#include "activation.h"

#define FEW_Z 8 /* rows of z and of W whose sums stay in registers, at most */
#define FEW_W(rows) ((rows) == FEW_Z ? 2 : 4)
#define FEW_DEPTH 4096 /* bytes of a row of z at a time, so that FEW_Z of them are in the first-level cache */

#if defined(HAVE_BF16_DOT) && !defined(HAVE_BF16_TILES)
#define FEW_PAIRS(type) ((type) == HEDDLE_BF16)
#else
#define FEW_PAIRS(type) false
#endif

/* More rows are worth the packing, and so are more where sums are short: each ends with the sum of its lanes. Where a panel is packed just
 * before it is met few rows are not, the fewer with AVX2's 16 registers; float16 is dear to pack. */
INLINE bool has_few_rows(const heddle_norm_linear *a) {
#ifdef HAVE_BF16_TILES
    if (a->dtype == HEDDLE_BF16)
        return a->m <= (a->n < 2 * TILE_ROWS ? 8 : 2); /* norm_linear_direct.h */
#endif
#if defined(__AVX2__) && VL == 8
    if (a->dtype != HEDDLE_F16 && a->n >= 1024)
        return a->m <= 8;
#endif
#if VL == 16
    const int64_t most = a->n < 1024 || a->dtype == HEDDLE_BF16 ? 48 : a->dtype == HEDDLE_F16 ? 36 : 28;
#else
    const int64_t most = 48;
#endif
    return a->m <= clamp64(a->k / 8, 8, most);
}

/* A vector of W, of which there are n elements more: as floats, or as pairs. */
INLINE vf few_w_vector(int type, const char *p, int64_t n) {
    return FEW_PAIRS(type) ? load_pairs(p, n) : load_some(type, p, n);
}

INLINE void few_rows_step(int type, int rows, int ws, const float *z, int64_t z_stride, const char *w, int64_t w_bytes,
                          int64_t n, vf s[FEW_Z][4]) {
    vf b[4];
#pragma GCC unroll 4
    for (int x = 0; x < ws; x++)
        b[x] = few_w_vector(type, w + x * w_bytes, n);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vf a = load(z + r * z_stride);
#pragma GCC unroll 4
        for (int x = 0; x < ws; x++)
            s[r][x] = FEW_PAIRS(type) ? dot_pairs(s[r][x], a, b[x]) : s[r][x] + a * b[x];
    }
}

/* sums[r·VL + x] (+)= the parts of z row r times W row x, over `depth` sum indices. Rows of W after these are asked for. */
INLINE void few_rows_products(int type, int rows, int ws, const float *z, int64_t z_stride, const char *w,
                              int64_t w_bytes, int64_t depth, bool add, vf *sums) {
    vf s[FEW_Z][4];
    const int64_t size = element_size(type), step = FEW_PAIRS(type) ? 2 * VL : VL;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int x = 0; x < ws; x++)
            s[r][x] = add ? sums[r * VL + x] : splat(0);
    int64_t e = 0;
    for (; e + step <= depth; e += step, z += VL, w += step * size) {
#pragma GCC unroll 4
        for (int x = 0; x < ws; x++)
            __builtin_prefetch(w + (ws + x) * w_bytes);
        few_rows_step(type, rows, ws, z, z_stride, w, w_bytes, step, s);
    }
    if (e < depth) /* z is 0 past k */
        few_rows_step(type, rows, ws, z, z_stride, w, w_bytes, depth - e, s);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int x = 0; x < ws; x++)
            sums[r * VL + x] = s[r][x];
}

/* Row i of y in the columns n0 .. n0+columns-1, of one vector; and of another, where an activation is of two halves. */
INLINE void store_few(const norm_call *c, int type, int64_t i, int64_t n0, vf u, vf gated, int64_t columns) {
    if (c->a->activation || c->t->residual) {
        float row[VL], up[VL];
        store(row, u);
        store(up, gated);
        activate(c, i, n0, row, up, columns);
        if (c->t->residual)
            add_residual(c, i, n0, row, columns);
        u = load(row);
    }
    store_some(type, (char *)c->t->y + (i * c->a->y_stride + n0) * element_size(type), u, columns);
}

/* u[rows] = of rows of z their products with up to VL rows of W from n0 on, and the bias. A row of W that there is not is left out. */
INLINE void few_rows_sums(const norm_call *c, int type, int rows, const float *z, int64_t n0, int64_t columns, vf *u) {
    const heddle_norm_linear *a = c->a;
    const int64_t size = element_size(type), w_bytes = a->w_stride * size;
    const int64_t depth = FEW_DEPTH / (FEW_PAIRS(type) ? 2 : 4);
    const int ws = FEW_W(rows);
    vf sums[FEW_Z * VL];
    for (int64_t i = columns; i < VL; i++)
        for (int y = 0; y < rows; y++)
            sums[y * VL + i] = splat(0);
    for (int64_t e = 0; e < a->k; e += depth) {
        const float *ze = z + (FEW_PAIRS(type) ? e / 2 : e);
        const char *w = row_of(c->t->w, n0, a->w_stride, type) + e * size;
        int64_t x = 0;
        for (; x + ws <= columns; x += ws)
            few_rows_products(type, rows, ws, ze, c->k_pad, w + x * w_bytes, w_bytes, min64(depth, a->k - e), e > 0,
                              sums + x);
        for (; x < columns; x++)
            few_rows_products(type, rows, 1, ze, c->k_pad, w + x * w_bytes, w_bytes, min64(depth, a->k - e), e > 0,
                              sums + x);
    }
    const vf bias = c->t->bias ? load_some(type, element_at(c->t->bias, n0, type), columns) : splat(0);
    for (int i = 0; i < rows; i++)
        u[i] = sum_each(sums + i * VL) + bias;
}

/* Rows r .. r+rows-1 of y in the columns n0 .. n0+VL-1. */
INLINE void few_rows_columns(const norm_call *c, int type, int rows, const float *z, int64_t r, int64_t n0) {
    const int64_t columns = min64(VL, c->a->n - n0);
    vf u[FEW_Z], up[FEW_Z];
    few_rows_sums(c, type, rows, z, n0, columns, u);
    if (c->halves == 2)
        few_rows_sums(c, type, rows, z, c->a->n + n0, columns, up);
    for (int i = 0; i < rows; i++)
        store_few(c, type, r + i, n0, u[i], c->halves == 2 ? up[i] : splat(0), columns);
}

INLINE void few_rows_block_as(const norm_call *c, int type, int64_t n0) {
    const float *z = c->w;
    int64_t r = 0;
#define ROWS_OF(n)                                                                                                     \
    for (; r + (n) <= c->a->m; r += (n))                                                                               \
    few_rows_columns(c, type, n, z + r * c->k_pad, r, n0)
    if (FEW_PAIRS(type)) /* more of them fit into the first-level cache */
        ROWS_OF(8);
#if VL == 16 || defined(__aarch64__)
    ROWS_OF(4);
#endif
    ROWS_OF(2);
    ROWS_OF(1);
#undef ROWS_OF
}

/* All rows of y in the columns n0 .. n0+VL-1. */
static void few_rows_block(const norm_call *c, int64_t n0) {
    if (TYPE(c) == HEDDLE_F32)
        few_rows_block_as(c, HEDDLE_F32, n0);
    else if (TYPE(c) == HEDDLE_BF16)
        few_rows_block_as(c, HEDDLE_BF16, n0);
    else
        few_rows_block_as(c, HEDDLE_F16, n0);
}

/* A row of z, zeros past k, where gamma and beta are 0. */
static void few_rows_z(const norm_call *c, int64_t row) {
    const int64_t k = c->a->k;
    float *z = c->w + row * c->k_pad;
    widen_row(TYPE(c), row_of(c->t->x, row, c->a->x_stride, TYPE(c)), k, 1, z);
    for (int64_t e = 0; e < k; e += VL)
        store(z + e, (load(z + e) - c->mean[row]) * c->rstd[row] * load(c->gamma + e) + load(c->beta + e));
    if (!FEW_PAIRS(TYPE(c)))
        return;
    narrow_row(HEDDLE_BF16, z, k, 1, z); /* in place: it writes behind where it reads */
    memset((char *)z + k * 2, 0, (size_t)((k + 2 * VL - 1) / (2 * VL) * (2 * VL) - k) * 2);
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

/* ------------------------------------------------------------------------------------------- a few features out */

#define FEW_COLUMNS 4 /* no more than VL */
#define FEW_Z_ROWS 4  /* of z at a time */

INLINE bool has_few_columns(const heddle_norm_linear *a) {
    return a->n <= FEW_COLUMNS && !is_gated(a->activation) && a->k >= 64 &&
           !has_few_rows(a); /* below, the sums of lanes are dearer than packing */
}

/* A few rows of y: their statistics, z and its products while the rows of x are near. */
INLINE void few_columns_rows(const norm_call *c, int rows, int64_t first, float *z) {
    const heddle_norm_linear *a = c->a;
    vf sums[FEW_Z_ROWS * VL];
    for (int i = 0; i < rows; i++) {
        float *x = z + i * c->k_pad;
        row_statistics(c, first + i, x);
        for (int64_t e = 0; e < a->k; e += VL)
            store(x + e,
                  (load(x + e) - c->mean[first + i]) * c->rstd[first + i] * load(c->gamma + e) + load(c->beta + e));
    }
    for (int64_t x = 0; x < VL; x++)
        if (x < a->n)
            few_rows_products(HEDDLE_F32, rows, 1, z, c->k_pad, (const char *)(c->w + x * c->k_pad), 0, a->k, false,
                              sums + x);
        else
            for (int i = 0; i < rows; i++)
                sums[i * VL + x] = splat(0);
    const vf bias = c->t->bias ? load_some(TYPE(c), c->t->bias, a->n) : splat(0);
    for (int i = 0; i < rows; i++)
        store_few(c, TYPE(c), first + i, 0, sum_each(sums + i * VL) + bias, splat(0), a->n);
}

/* Every thread of the team calls it; statistics have not been formed. */
static void few_columns_forward(const norm_call *c, float *z) {
    const int64_t m = c->a->m;
#pragma omp for schedule(static)
    for (int64_t x = 0; x < c->a->n; x++)
        widen_row(TYPE(c), row_of(c->t->w, x, c->a->w_stride, TYPE(c)), c->a->k, 1, c->w + x * c->k_pad);
#pragma omp for schedule(static)
    for (int64_t first = 0; first < m; first += FEW_Z_ROWS)
        if (m - first >= FEW_Z_ROWS)
            few_columns_rows(c, FEW_Z_ROWS, first, z);
        else
            for (int64_t row = first; row < m; row++)
                few_columns_rows(c, 1, row, z);
}

#endif

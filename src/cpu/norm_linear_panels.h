/* SPDX-License-Identifier: Apache-2.0
 * norm-linear's operands as panels of floats, [sum index][VL or PANEL], in the order in which the product reads them; or, in
 * bfloat16 on an ISA that multiplies pairs, [sum index / 2][VL or PANEL]. Each of these functions has a twin in norm_linear_tiles.h. */
#ifndef HEDDLE_CPU_NORM_LINEAR_PANELS_H
#define HEDDLE_CPU_NORM_LINEAR_PANELS_H

#include "norm_linear_call.h"

#define DEPTH 1024     /* sum indices per product: a panel of B then stays in the second-level cache */
#define SLICE 512      /* the same for dx, where a slice of dy for a whole block of rows stays there, too */
#define CHUNK_M 512    /* rows of x and dy that are packed at a time for dw */
#define BLOCK_ROWS VL  /* that a product takes at a time */
#define DY_TOGETHER 16 /* panels of dy that stay in the second-level cache while xhat streams past them */
#define GROUP 1        /* panels of W that a block of rows meets before its y is written */

/* Floats that VL rows of A and PANEL columns of B take. */
INLINE int64_t a_panel(int64_t depth) {
    return VL * depth;
}

INLINE int64_t b_panel(int64_t depth) {
    return PANEL * depth;
}

/* Rows of a block that stays in the second-level cache. */
INLINE int64_t rows_that_fit(int64_t k, bool backward) {
    (void)backward;
    return min64(262144 / k, 192);
}

/* Around the products of every thread. */
INLINE void begin_products(void) {
}

INLINE void end_products(void) {
}

/* Where the ISA multiplies pairs of bfloat16 (twice as many a second), panels are turned into pairs of sum indices. */
#ifdef HAVE_BF16_DOT
INLINE bool uses_pairs(const norm_call *c) {
    return c->type == HEDDLE_BF16;
}
#else
INLINE bool uses_pairs(const norm_call *c) {
    (void)c;
    return false;
}
#define gemm_pairs gemm_streaming /* never called */
#endif

/* [depth][width] floats -> [(depth + 1)/2][width] pairs of bfloat16, the even index in the low half; in place. */
static void make_pairs(const norm_call *c, float *panel, int64_t depth, int64_t width) {
    if (!uses_pairs(c))
        return;
    for (int64_t x = 0; x < depth; x += 2)
        for (int64_t w = 0; w < width; w += VL) {
            const float *p = panel + x * width + w;
            const vu low = __builtin_convertvector(bf16_narrow(load(p)), vu);
            const vu high = __builtin_convertvector(bf16_narrow(x + 1 < depth ? load(p + width) : splat(0)), vu);
            store(panel + x / 2 * width + w, (vf)(low | high << 16));
        }
}

/* C (+)= A·B over sum indices first .. first+depth-1 of two panels, up to BLOCK_ROWS rows; `first` is a multiple of 32. Panels of
 * A are a_next floats apart. */
static void multiply_panels(const norm_call *c, int vectors, int64_t rows, int64_t first, int64_t depth, const float *a,
                            int64_t a_next, const float *b, float *out, int64_t out_stride, bool add,
                            gemm_ahead later) {
    (void)a_next;
    if (uses_pairs(c))
        gemm_pairs(vectors, rows, (depth + 1) / 2, (gemm_a){a + first / 2 * VL, 1, VL}, b + first / 2 * PANEL, PANEL,
                   out, out_stride, add, later);
    else
        gemm_streaming(vectors, rows, depth, (gemm_a){a + first * VL, 1, VL}, b + first * PANEL, PANEL, out, out_stride,
                       add, later);
}

/* For the products of rows r .. r+BLOCK_ROWS-1 of a block with c->chain of a panel's `depth` sum indices, from x on: their share of
 * the next panel. */
INLINE gemm_ahead next_share(const norm_call *c, const float *next, int64_t depth, int64_t x, int64_t r, int64_t rows) {
    const int64_t at = PANEL * (uses_pairs(c) ? x / 2 : x), now = min64(c->chain, depth - x);
    const int64_t floats = PANEL * (uses_pairs(c) ? (now + 1) / 2 : now);
    return share_of(next + at, floats, r / VL, (rows + VL - 1) / VL,
                    floats / PANEL * ((VL + GEMM_ROWS_3 - 1) / GEMM_ROWS_3));
}

/* From so many bytes on, y goes past the caches: what reads it next gains less than its lines cost that are read before they are
 * written. Below, it may find y in a third-level cache. */
#define STREAM_BYTES (1 << 24)
#ifdef HAVE_STREAM
#define STREAMS(type) ((type) == HEDDLE_F32)
#else
#define STREAMS(type) false
#endif

INLINE void store_y_as(int type, bool streams, void *y, const float *sums, const float *bias, int64_t columns) {
    for (int64_t x = 0; x < columns; x += VL) {
        const vf r = load(sums + x) + load(bias + x);
        if (streams)
            stream((char *)y + x * 4, r);
        else
            store_some(type, (char *)y + x * element_size(type), r, columns - x);
    }
}

/* A row of y: sums + bias. */
static void store_y(const norm_call *c, void *y, const float *sums, const float *bias, int64_t columns) {
    if (c->streams && ((uintptr_t)y & 63) == 0 && columns % VL == 0) {
        store_y_as(HEDDLE_F32, true, y, sums, bias, columns);
        return;
    }
    if (c->type == HEDDLE_F32)
        store_y_as(HEDDLE_F32, false, y, sums, bias, columns);
    else if (c->type == HEDDLE_BF16)
        store_y_as(HEDDLE_BF16, false, y, sums, bias, columns);
    else
        store_y_as(HEDDLE_F16, false, y, sums, bias, columns);
}

static void pack_w_transposed(const norm_call *c, int64_t panel) {
    const void *rows[PANEL];
    int64_t count = min64(PANEL, c->a->n - panel * PANEL);
    for (int64_t x = 0; x < count; x++)
        rows[x] = row_of(c->t->w, panel * PANEL + x, c->a->w_stride, c->type);
    pack_transposed(c->type, rows, 0, count, c->a->k, 1, c->w + panel * PANEL * c->a->k, PANEL);
    make_pairs(c, c->w + panel * PANEL * c->a->k, c->a->k, PANEL);
}

/* Rows first .. first+count-1 of x, normalised, as panels [k][VL]. */
static void pack_z(const norm_call *c, int64_t first, int64_t count, float *out) {
    const int64_t k = c->a->k;
    for (int64_t p = 0; p < count; p += VL, out += k * VL) {
        const void *rows[VL];
        int64_t lanes_used = min64(VL, count - p);
        for (int64_t x = 0; x < lanes_used; x++)
            rows[x] = row_of(c->t->x, first + p + x, c->a->x_stride, c->type);
        pack_transposed(c->type, rows, 0, lanes_used, k, 1, out, VL);
        const vf mean = load(c->mean + first + p), rstd = load(c->rstd + first + p);
        for (int64_t e = 0; e < k; e++)
            store(out + e * VL, (load(out + e * VL) - mean) * rstd * c->gamma[e] + c->beta[e]);
        make_pairs(c, out, k, VL);
    }
}

/* Panel of PANEL columns of W: [n][PANEL]. */
static void pack_w(const norm_call *c, int64_t panel) {
    int64_t columns = min64(PANEL, c->a->k - panel * PANEL);
    for (int64_t r = 0; r < c->a->n; r++)
        widen_row(c->type, element_at(c->t->w, r * c->a->w_stride + panel * PANEL, c->type), columns, 1,
                  c->w + (panel * c->a->n + r) * PANEL);
    make_pairs(c, c->w + panel * c->a->n * PANEL, c->a->n, PANEL);
}

/* Panel p of W from row x on; x is even. */
INLINE const float *slice_of_w(const norm_call *c, int64_t p, int64_t x) {
    return c->w + p * c->a->n * PANEL + (uses_pairs(c) ? x / 2 : x) * PANEL;
}

/* Elements of row r of W in panel p. */
INLINE vf load_w(const norm_call *c, int64_t p, int64_t r, int64_t column) {
    const vf x = load(slice_of_w(c, p, uses_pairs(c) ? r / 2 * 2 : r) + column);
    if (!uses_pairs(c))
        return x;
    return r % 2 ? (vf)((vu)x & 0xffff0000u) : (vf)((vu)x << 16);
}

/* Columns x .. x+depth-1 of a block of rows of dy. */
static void pack_dy_slice(const norm_call *c, int64_t first, int64_t rows, int64_t x, int64_t depth, float *out) {
    for (int64_t r = 0; r < rows; r += VL) {
        const void *p[VL];
        int64_t count = min64(VL, rows - r);
        for (int64_t y = 0; y < count; y++)
            p[y] = row_of(c->t->dy, first + r + y, c->a->dy_stride, c->type);
        pack_transposed(c->type, p, x, count, depth, 1, out + r * depth, VL);
        make_pairs(c, out + r * depth, depth, VL);
    }
}

/* xhat of a chunk of rows, panels [rows][PANEL] */
static void pack_xhat(const norm_call *c, int64_t first, int64_t rows, int64_t panel) {
    const int64_t k0 = panel * PANEL, columns = min64(PANEL, c->a->k - k0), bytes = element_size(c->type);
    for (int64_t r = 0; r < rows; r++) {
        float *out = c->x_panels + (panel * rows + r) * PANEL;
        const char *in = element_at(c->t->x, (first + r) * c->a->x_stride + k0, c->type);
        prefetch_ahead(in, c->a->x_stride * bytes, columns * bytes);
        widen_row(c->type, in, columns, 1, out);
        for (int64_t x = 0; x < columns; x += VL)
            store(out + x, (load(out + x) - c->mean[first + r]) * c->rstd[first + r]);
    }
    make_pairs(c, c->x_panels + panel * rows * PANEL, rows, PANEL);
}

#define DY_PANELS 8 /* packed together, so that more than one line of a row is read */

/* dy of a chunk of rows, panels [rows][VL], and its column sums into dbias. */
static void pack_dy(const norm_call *c, int64_t first, int64_t rows, int64_t panel) {
    const int64_t n0 = panel * VL, columns = min64(DY_PANELS * VL, c->a->n - n0), bytes = element_size(c->type);
    vf sum[DY_PANELS];
    for (int64_t r = 0; r < rows; r++) {
        if (r % SUM_ROWS == 0)
            for (int64_t x = 0; x * VL < columns; x++)
                sum[x] = splat(0);
        const char *in = element_at(c->t->dy, (first + r) * c->a->dy_stride + n0, c->type);
        prefetch_ahead(in, c->a->dy_stride * bytes, columns * bytes);
        for (int64_t x = 0; x * VL < columns; x++) {
            float *out = c->dy_panels + ((panel + x) * rows + r) * VL;
            widen_row(c->type, in + x * VL * bytes, min64(VL, columns - x * VL), 1, out);
            sum[x] += load(out);
        }
        if (r % SUM_ROWS == SUM_ROWS - 1 || r + 1 == rows)
            for (int64_t x = 0; x * VL < columns; x++) {
                float *dbias = c->dbias + n0 + x * VL;
                store(dbias, first + r < SUM_ROWS ? sum[x] : load(dbias) + sum[x]);
            }
    }
    for (int64_t x = 0; x * VL < columns; x++)
        make_pairs(c, c->dy_panels + (panel + x) * rows * VL, rows, VL);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * norm-linear's operands as panels of floats, [sum index][VL or PANEL], in the order in which the product reads them; or, in
 * bfloat16 on an ISA that multiplies pairs, [sum index / 2][VL or PANEL]. Each of these functions has a twin in norm_linear_tiles.h. */
#ifndef HEDDLE_CPU_NORM_LINEAR_PANELS_H
#define HEDDLE_CPU_NORM_LINEAR_PANELS_H

#include "norm_linear_call.h"

#define DEPTH 1024     /* sum indices per product: a panel of B then stays in the second-level cache */
#define DEPTH_BACK 512 /* the same backward, where shorter sums, which round less, cost only 0.3% of the time */
#define SLICE 1536 /* the same for dx, where a slice of dy for a whole block of rows stays in the second-level cache */
#define CHUNK_M 1024  /* rows of x and dy that are packed at a time for dw */
#define BLOCK_ROWS VL /* that a product takes at a time */
#define DY_TOGETHER 6 /* panels of dy that stay in the second-level cache while xhat streams past them */
#define GROUP 1       /* panels of W that a block of rows meets before its y is written */

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
    return TYPE(c) == HEDDLE_BF16 && !c->widens;
}
#else
INLINE bool uses_pairs(const norm_call *c) {
    (void)c;
    return false;
}
#define gemm_pairs gemm_streaming /* never called */
#endif

/* The first n <= VL bfloat16 at p in the low halves, zeros behind them. */
INLINE vu load_low(const char *p, int64_t n) {
    const vh halves = n >= VL ? (vh) * (const vh_unaligned *)p : load_halves(p, n);
    return __builtin_convertvector(halves, vu);
}

/* pack_transposed() that makes pairs: each 32 bits of a row are one already. `count` is at most VL. */
INLINE void pack_pairs_transposed(const void *const *rows, int64_t first, int64_t count, int64_t n, float *out,
                                  int64_t stride) {
    for (int64_t e0 = 0; e0 < n; e0 += 2 * VL) {
        vf t[VL];
        for (int l = 0; l < VL; l++)
            t[l] = l < count ? load_pairs((const char *)rows[l] + (first + e0) * 2, n - e0) : splat(0);
        transpose(t);
        for (int e = 0; e < VL && e0 + 2 * e < n; e++)
            store(out + (e0 / 2 + e) * stride, t[e]);
    }
}

/* `count` rows of `n` elements, from element `first` on: [n][width] floats, or pairs of them. */
static void pack_columns(const norm_call *c, const void *const *rows, int64_t first, int64_t count, int64_t n,
                         float *out, int64_t width) {
    if (!uses_pairs(c)) {
        pack_transposed(TYPE(c), rows, first, count, n, 1, out, width);
        return;
    }
    for (int64_t l = 0; l < count; l += VL)
        pack_pairs_transposed(rows + l, first, count - l, n, out + l, width);
}

/* even[l] | odd[l] << 16, both rounded to bfloat16. */
INLINE vf pair_of(vf even, vf odd) {
    const vu low = __builtin_convertvector(bf16_narrow(even), vu), high = __builtin_convertvector(bf16_narrow(odd), vu);
    return (vf)(low | high << 16);
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
    if (TYPE(c) == HEDDLE_F32)
        store_y_as(HEDDLE_F32, false, y, sums, bias, columns);
    else if (TYPE(c) == HEDDLE_BF16)
        store_y_as(HEDDLE_BF16, false, y, sums, bias, columns);
    else
        store_y_as(HEDDLE_F16, false, y, sums, bias, columns);
}

static void pack_w_transposed(const norm_call *c, int64_t panel, float *out) {
    const void *rows[PANEL];
    int64_t count;
    const int64_t first = first_of_panel(c, panel, &count);
    for (int64_t x = 0; x < count; x++)
        rows[x] = row_of(c->t->w, first + x, c->a->w_stride, TYPE(c));
    pack_columns(c, rows, 0, count, c->a->k, out, PANEL);
}

INLINE vf z_of(const norm_call *c, vf mean, vf rstd, const float *x, int64_t e) {
    return (load(x + e * VL) - mean) * rstd * c->gamma[e] + c->beta[e];
}

/* VL rows of x, [k][VL], to z, in place; or to pairs of it. */
static void normalise(const norm_call *c, vf mean, vf rstd, float *x) {
    const int64_t k = c->a->k;
    if (uses_pairs(c))
        for (int64_t e = 0; e < k; e += 2)
            store(x + e / 2 * VL,
                  pair_of(z_of(c, mean, rstd, x, e), e + 1 < k ? z_of(c, mean, rstd, x, e + 1) : splat(0)));
    else
        for (int64_t e = 0; e < k; e++)
            store(x + e * VL, z_of(c, mean, rstd, x, e));
}

/* Rows first .. first+count-1 of x, normalised, as panels [k][VL]. */
static void pack_z(const norm_call *c, int64_t first, int64_t count, float *out) {
    const int64_t k = c->a->k;
    for (int64_t p = 0; p < count; p += VL, out += k * VL) {
        const void *rows[VL];
        int64_t lanes_used = min64(VL, count - p);
        for (int64_t x = 0; x < lanes_used; x++)
            rows[x] = row_of(c->t->x, first + p + x, c->a->x_stride, TYPE(c));
        pack_transposed(TYPE(c), rows, 0, lanes_used, k, 1, out, VL);
        normalise(c, load(c->mean + first + p), load(c->rstd + first + p), out);
    }
}

/* `columns` <= PANEL elements of a row of W as floats; or as pairs with those of the next row, if there is one. */
INLINE void pack_w_row(const norm_call *c, const char *in, bool two, int64_t columns, float *out) {
    if (!uses_pairs(c)) {
        widen_row(TYPE(c), in, columns, 1, out);
        return;
    }
    for (int64_t x = 0; x < columns; x += VL) {
        const vu odd = two ? load_low(in + c->a->w_stride * 2 + x * 2, columns - x) : (vu){0};
        store(out + x, (vf)(load_low(in + x * 2, columns - x) | odd << 16));
    }
}

/* Panel of PANEL columns of W: [n][PANEL]. */
static void pack_w(const norm_call *c, int64_t panel) {
    const int64_t n = c->a->n, k0 = panel * PANEL, columns = min64(PANEL, c->a->k - k0);
    const int64_t step = uses_pairs(c) ? 2 : 1;
    for (int64_t r = 0; r < n; r += step)
        pack_w_row(c, element_at(c->t->w, r * c->a->w_stride + k0, TYPE(c)), r + 1 < n, columns,
                   c->w + (panel * n + r / step) * PANEL);
}

/* Rows n0 .. n0+rows-1 of W in panels p0 .. p1-1: [panel][STRIP rows, or pairs of them][PANEL]. */
static void pack_strip(const norm_call *c, int64_t p0, int64_t p1, int64_t n0, int64_t rows, float *out) {
    const int64_t bytes = element_size(TYPE(c)), row_bytes = c->a->w_stride * bytes, step = uses_pairs(c) ? 2 : 1;
    for (int64_t r = 0; r < rows; r += step) {
        const char *in = (const char *)c->t->w + (n0 + r) * row_bytes;
        for (int64_t p = p0; p < p1; p++) {
            const int64_t columns = min64(PANEL, c->a->k - p * PANEL);
            pack_w_row(c, in + p * PANEL * bytes, r + 1 < rows, columns, out + ((p - p0) * STRIP + r / step) * PANEL);
        }
    }
}

/* Panel p of W from row x on; x is even. */
INLINE const float *slice_of_w(const norm_call *c, int64_t p, int64_t x) {
    return c->w + p * c->a->n * PANEL + (uses_pairs(c) ? x / 2 : x) * PANEL;
}

/* Elements of row r of W in a panel that begins with an even row. */
INLINE vf row_of_w(const norm_call *c, const float *panel, int64_t r, int64_t column) {
    if (!uses_pairs(c))
        return load(panel + r * PANEL + column);
    const vf x = load(panel + r / 2 * PANEL + column);
    return r % 2 ? (vf)((vu)x & 0xffff0000u) : (vf)((vu)x << 16);
}

/* Elements of row r of W in panel p. */
INLINE vf load_w(const norm_call *c, int64_t p, int64_t r, int64_t column) {
    return row_of_w(c, slice_of_w(c, p, 0), r, column);
}

/* Columns x .. x+depth-1 of a block of rows of dy. */
static void pack_dy_slice(const norm_call *c, int64_t first, int64_t rows, int64_t x, int64_t depth, float *out) {
    for (int64_t r = 0; r < rows; r += VL) {
        const void *p[VL];
        int64_t count = min64(VL, rows - r);
        for (int64_t y = 0; y < count; y++)
            p[y] = row_of(c->t->dy, first + r + y, c->a->dy_stride, TYPE(c));
        pack_columns(c, p, x, count, depth, out + r * depth, VL);
    }
}

/* Rows r and r+1 of a chunk's xhat, as pairs. */
INLINE void pack_xhat_pairs(const norm_call *c, int64_t row, bool two, const char *in, int64_t columns, float *out) {
    const int64_t bytes = c->a->x_stride * 2;
    for (int64_t x = 0; x < columns; x += VL) {
        const vf even = (vf)(load_low(in + x * 2, columns - x) << 16);
        const vf odd = two ? (vf)(load_low(in + bytes + x * 2, columns - x) << 16) : splat(0);
        store(out + x,
              pair_of((even - c->mean[row]) * c->rstd[row], two ? (odd - c->mean[row + 1]) * c->rstd[row + 1] : odd));
    }
}

/* xhat of a chunk of rows, panels [rows][PANEL] */
static void pack_xhat(const norm_call *c, int64_t first, int64_t rows, int64_t panel) {
    const int64_t k0 = panel * PANEL, columns = min64(PANEL, c->a->k - k0), bytes = element_size(TYPE(c));
    const int64_t step = uses_pairs(c) ? 2 : 1;
    for (int64_t r = 0; r < rows; r += step) {
        float *out = c->x_panels + (panel * rows + r / step) * PANEL;
        const char *in = element_at(c->t->x, (first + r) * c->a->x_stride + k0, TYPE(c));
        for (int64_t y = 0; y < step; y++)
            prefetch_ahead(in + y * c->a->x_stride * bytes, c->a->x_stride * bytes, columns * bytes);
        if (uses_pairs(c)) {
            pack_xhat_pairs(c, first + r, r + 1 < rows, in, columns, out);
            continue;
        }
        widen_row(TYPE(c), in, columns, 1, out);
        for (int64_t x = 0; x < columns; x += VL)
            store(out + x, (load(out + x) - c->mean[first + r]) * c->rstd[first + r]);
    }
}

/* Row r of columns n0 .. n0+VL-1 of the chunk's dy, and in pairs the next one, to `out`; sum and their elements. */
INLINE vf pack_dy_vector(const norm_call *c, const char *in, int64_t rows_left, int64_t columns, vf sum, float *out) {
    if (uses_pairs(c)) {
        const vu even = load_low(in, columns);
        const vu odd = rows_left > 1 ? load_low(in + c->a->dy_stride * 2, columns) : (vu){0};
        store(out, (vf)(even | odd << 16));
        return sum + (vf)(even << 16) + (vf)(odd << 16);
    }
    const vf x = TYPE(c) == HEDDLE_F32    ? load_some(HEDDLE_F32, in, columns)
                 : TYPE(c) == HEDDLE_BF16 ? load_some(HEDDLE_BF16, in, columns)
                                          : load_some(HEDDLE_F16, in, columns);
    store(out, x);
    return sum + x;
}

/* Up to DY_TOGETHER panels [rows][VL] of dy, a chunk of rows; with `sums` their column sums are added to dbias. */
static void pack_dy(const norm_call *c, int64_t first, int64_t rows, int64_t panel, int64_t panels, bool sums,
                    float *out) {
    const int64_t n0 = panel * VL, columns = min64(panels * VL, c->a->n - n0), bytes = element_size(TYPE(c));
    const int64_t row_bytes = c->a->dy_stride * bytes, step = uses_pairs(c) ? 2 : 1, together = sum_rows(c->a->m);
    vf sum[DY_TOGETHER];
    for (int64_t r = 0; r < rows; r += step) {
        if (r % together == 0)
            for (int64_t x = 0; x < panels; x++)
                sum[x] = splat(0);
        const char *in = element_at(c->t->dy, (first + r) * c->a->dy_stride + n0, TYPE(c));
        for (int64_t y = 0; y < step; y++)
            prefetch_ahead(in + y * row_bytes, row_bytes, columns * bytes);
        for (int64_t x = 0; x < panels; x++)
            sum[x] = pack_dy_vector(c, in + x * VL * bytes, rows - r, columns - x * VL, sum[x],
                                    out + (x * rows + r / step) * VL);
        if (sums && ((r + step) % together == 0 || r + step >= rows))
            for (int64_t x = 0; x < panels; x++) {
                float *dbias = c->dbias + n0 + x * VL;
                store(dbias, first == 0 && r < together ? sum[x] : load(dbias) + sum[x]);
            }
    }
}

#endif

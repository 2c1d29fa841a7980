/* SPDX-License-Identifier: Apache-2.0
 * norm-linear's operands for AMX, all of bfloat16. A is [sum index / 32][VL rows][32 sum indices], a tile after the other; B is
 * [sum index / 32][PANEL / 16][16 pairs of sum indices][16 columns]. Both are filled up with zeros to 32 sum indices. The functions are those of norm_linear_panels.h. */
#ifndef HEDDLE_CPU_NORM_LINEAR_TILES_H
#define HEDDLE_CPU_NORM_LINEAR_TILES_H

#include "norm_linear_call.h"

#define DEPTH 256 /* of A and B beside each other in the first-level cache */
#define DEPTH_BACK DEPTH
#define SLICE 512
#define CHUNK_M 2048
#define BLOCK_ROWS (2 * TILE_ROWS)
#define GROUP 4
#define DY_TOGETHER 12

/* Where in a panel of B the pairs of sum indices x and x+1 are, from column `column` (a multiple of 16) on. */
INLINE int64_t in_b(int64_t x, int64_t column) {
    return x / TILE_DEPTH * (TILE_DEPTH / 2 * PANEL) + column * TILE_ROWS + x % TILE_DEPTH / 2 * 16;
}

INLINE int64_t tile_depths(int64_t depth) {
    return (depth + TILE_DEPTH - 1) / TILE_DEPTH;
}

INLINE int64_t a_panel(int64_t depth) {
    return tile_depths(depth) * TILE_DEPTH / 2 * VL;
}

INLINE int64_t b_panel(int64_t depth) {
    return tile_depths(depth) * TILE_DEPTH / 2 * PANEL;
}

/* The block of rows, what is kept of C and the panel of B fit into a second-level cache of 2 MB, which all cores with AMX have. */
INLINE int64_t rows_that_fit(int64_t k, bool backward) {
    return min64(backward ? 327680 / (k + SLICE / 2) : 524288 / k, 512);
}

INLINE void begin_products(void) {
    begin_tiles();
}

INLINE void end_products(void) {
    end_tiles();
}

INLINE void multiply_panels(const norm_call *c, int vectors, int64_t rows, int64_t first, int64_t depth, const float *a,
                            int64_t a_next, const float *b, float *out, int64_t out_stride, bool add,
                            gemm_ahead later) {
    (void)c;
    const tiles_a tiles = {a + first / 2 * VL, 64, a_next * 4, 64 * TILE_ROWS};
    gemm_tiles((rows + TILE_ROWS - 1) / TILE_ROWS, vectors, tile_depths(depth), &tiles, b + first / 2 * PANEL,
               PANEL * TILE_DEPTH / 2, out, out_stride, add, &later);
}

INLINE gemm_ahead next_share(const norm_call *c, const float *next, int64_t depth, int64_t x, int64_t r, int64_t rows) {
    const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, now = min64(c->chain, depth - x);
    return share_of(next + x / 2 * PANEL, b_panel(now), r / BLOCK_ROWS, blocks, tile_depths(now));
}

#define STREAMS(type) true
#define STREAM_BYTES (1 << 22)

/* A row of y: sums + bias. */
static void store_y(const norm_call *c, void *y, const float *sums, const float *bias, int64_t columns) {
    int64_t x = 0;
    if (c->streams && ((uintptr_t)y & 63) == 0)
        for (; x + 2 * VL <= columns; x += 2 * VL)
            stream((char *)y + x * 2,
                   narrow_two(load(sums + x) + load(bias + x), load(sums + x + VL) + load(bias + x + VL)));
    for (; x < columns; x += VL)
        store_some(HEDDLE_BF16, (char *)y + x * 2, load(sums + x) + load(bias + x), columns - x);
}

static void pack_w_transposed(const norm_call *c, int64_t panel, float *out) {
    int64_t count;
    const int64_t k = c->a->k, n0 = first_of_panel(c, panel, &count);
    for (int64_t e = 0; e < k; e += TILE_DEPTH)
        for (int64_t l0 = 0; l0 < PANEL; l0 += VL) {
            vf t[VL];
            for (int l = 0; l < VL; l++)
                t[l] = l0 + l < count
                           ? load_32(row_of(c->t->w, n0 + l0 + l, c->a->w_stride, HEDDLE_BF16) + e * 2, k - e)
                           : splat(0);
            transpose(t);
            for (int x = 0; x < VL; x++)
                store(out + in_b(e + 2 * x, l0), t[x]);
        }
}

static void pack_z(const norm_call *c, int64_t first, int64_t count, float *out) {
    const int64_t k = c->a->k;
    for (int64_t r = 0; r < count; r++) {
        const char *in = row_of(c->t->x, first + r, c->a->x_stride, HEDDLE_BF16);
        float *to = out + r / VL * a_panel(k) + r % VL * 16;
        const float mean = c->mean[first + r], rstd = c->rstd[first + r];
        for (int64_t e = 0; e < k; e += TILE_DEPTH, to += TILE_DEPTH / 2 * VL) {
            vf z[2];
            for (int x = 0; x < 2; x++)
                z[x] = ((vf)(load_16(in + (e + x * VL) * 2, k - e - x * VL) << 16) - mean) * rstd *
                           load(c->gamma + e + x * VL) +
                       load(c->beta + e + x * VL);
            store(to, narrow_two(z[0], z[1]));
        }
    }
}

static void pack_w(const norm_call *c, int64_t panel) {
    const int64_t n = c->a->n, k0 = panel * PANEL, bytes = c->a->w_stride * 2;
    float *out = c->w + panel * b_panel(n);
    for (int64_t r = 0; r < tile_depths(n) * TILE_DEPTH; r += 2)
        for (int64_t x = 0; x < PANEL; x += VL) {
            const char *in = (const char *)c->t->w + r * bytes + (k0 + x) * 2;
            const int64_t columns = c->a->k - k0 - x;
            store(out + in_b(r, x),
                  zip(load_16(in, r < n ? columns : 0), load_16(in + bytes, r + 1 < n ? columns : 0)));
        }
}

/* Rows n0 .. n0+rows-1 of W, as B, in panels p0 .. p1-1. */
static void pack_strip(const norm_call *c, int64_t p0, int64_t p1, int64_t n0, int64_t rows, float *out) {
    const int64_t bytes = c->a->w_stride * 2;
    for (int64_t r = 0; r < STRIP; r += 2)
        for (int64_t x = p0 * PANEL; x < p1 * PANEL; x += VL) {
            const char *in = (const char *)c->t->w + (n0 + r) * bytes + x * 2;
            const int64_t columns = c->a->k - x;
            store(out + (x / PANEL - p0) * b_panel(STRIP) + in_b(r, x % PANEL),
                  zip(load_16(in, r < rows ? columns : 0), load_16(in + bytes, r + 1 < rows ? columns : 0)));
        }
}

INLINE const float *slice_of_w(const norm_call *c, int64_t p, int64_t x) {
    return c->w + p * b_panel(c->a->n) + x / 2 * PANEL;
}

/* Elements of row r of what a panel of B has of W. */
INLINE vf row_of_w(const norm_call *c, const float *panel, int64_t r, int64_t column) {
    (void)c;
    const vu x = (vu)load(panel + in_b(r, column));
    return (vf)(r % 2 ? x & 0xffff0000u : x << 16);
}

INLINE vf load_w(const norm_call *c, int64_t p, int64_t r, int64_t column) {
    return row_of_w(c, slice_of_w(c, p, 0), r, column);
}

static void pack_dy_slice(const norm_call *c, int64_t first, int64_t rows, int64_t x, int64_t depth, float *out) {
    for (int64_t r = 0; r < rows; r++) {
        const char *in = row_of(c->t->dy, first + r, c->a->dy_stride, HEDDLE_BF16) + x * 2;
        float *to = out + r / VL * a_panel(depth) + r % VL * 16;
        prefetch_ahead(in, c->a->dy_stride * 2, depth * 2);
        for (int64_t e = 0; e < depth; e += TILE_DEPTH, to += TILE_DEPTH / 2 * VL)
            store(to, load_32(in + e * 2, depth - e));
    }
}

static void pack_xhat(const norm_call *c, int64_t first, int64_t rows, int64_t panel) {
    const int64_t k0 = panel * PANEL, bytes = c->a->x_stride * 2;
    float *out = c->x_panels + panel * b_panel(rows);
    for (int64_t r = 0; r < tile_depths(rows) * TILE_DEPTH; r += 2) {
        const char *in = (const char *)c->t->x + (first + r) * bytes + k0 * 2;
        prefetch_ahead(in, bytes, 2 * PANEL);
        prefetch_ahead(in + bytes, bytes, 2 * PANEL);
        for (int64_t x = 0; x < PANEL; x += VL) {
            vf pair[2] = {splat(0), splat(0)};
            for (int y = 0; y < 2 && r + y < rows; y++)
                pair[y] = ((vf)(load_16(in + y * bytes + x * 2, c->a->k - k0 - x) << 16) - c->mean[first + r + y]) *
                          c->rstd[first + r + y];
            store(out + in_b(r, x), narrow_pairs(pair[0], pair[1]));
        }
    }
}

/* A few panels of dyᵀ: 32 rows become pairs, 16 of them are transposed. With `sums` the column sums are added to dbias. */
static void pack_few_dy(const norm_call *c, int64_t first, int64_t rows, int64_t panel, int64_t panels, bool sums,
                        float *out) {
    const int64_t n0 = panel * VL, columns = min64(panels * VL, c->a->n - n0), bytes = c->a->dy_stride * 2;
    for (int64_t r = 0; r < rows; r += TILE_DEPTH) {
        const char *in = (const char *)c->t->dy + (first + r) * bytes + n0 * 2;
        for (int64_t y = 0; y < TILE_DEPTH; y++)
            for (int64_t x = 0; x < columns * 2; x += 64)
                __builtin_prefetch(in + (TILE_DEPTH + y) * bytes + x);
        for (int64_t x = 0; x < panels; x++) {
            float *dbias = c->dbias + n0 + x * VL;
            vf sum = splat(0), t[VL];
            for (int y = 0; y < VL; y++) {
                const char *p = in + 2 * y * bytes + x * VL * 2;
                const vu even = load_16(p, r + 2 * y < rows ? columns - x * VL : 0);
                const vu odd = load_16(p + bytes, r + 2 * y + 1 < rows ? columns - x * VL : 0);
                t[y] = zip(even, odd);
                sum += (vf)(even << 16);
                sum += (vf)(odd << 16);
            }
            if (sums)
                store(dbias, first + r ? load(dbias) + sum : sum);
            transpose(t);
            for (int y = 0; y < VL; y++)
                store(out + x * a_panel(rows) + r / 2 * VL + y * 16, t[y]);
        }
    }
}

/* Four panels together, so that more than one line of a row is read. */
static void pack_dy(const norm_call *c, int64_t first, int64_t rows, int64_t panel, int64_t panels, bool sums,
                    float *out) {
    for (int64_t p = 0; p < panels; p += 4)
        pack_few_dy(c, first, rows, panel + p, min64(4, panels - p), sums, out + p * a_panel(rows));
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * norm-linear forward on AMX without panels of W: yᵀ = W·zᵀ. Rows of W are tiles of A as they lie in memory, and it is z that is
 * packed as B is. With few rows packing W would cost more than the product; with long sums its panels leave the second-level cache. Every
 * sum has the terms, in the order, of the product of panels. */
#ifndef HEDDLE_CPU_NORM_LINEAR_DIRECT_H
#define HEDDLE_CPU_NORM_LINEAR_DIRECT_H

#include "activation.h"
#include "norm_linear_few.h"

#ifdef HAVE_BF16_TILES

#define DIRECT_ROWS 384          /* of x, at most, where sums are short: then panels come from the second-level cache */
#define DIRECT_LONG 2048         /* longer sums go this way whatever m is */
#define DIRECT_W (2 * TILE_ROWS) /* rows of W at a time */
#define DIRECT_AHEAD 512         /* bytes of each that are asked for ahead */
#define DIRECT_DEPTH 256         /* sum indices at a time where z has several panels, so that W stays near for them */

INLINE bool goes_direct(const heddle_norm_linear *a) {
    return (a->m <= DIRECT_ROWS || a->k > DIRECT_LONG) && a->n >= DIRECT_W && !has_few_rows(a) && !has_few_columns(a);
}

/* Rows of x whose z stays in the second-level cache while W passes. */
INLINE int64_t direct_rows(const heddle_norm_linear *a) {
    return min64(clamp64(524288 / a->k / PANEL * PANEL, PANEL, 512), (a->m + PANEL - 1) / PANEL * PANEL);
}

/* Floats of all of z; of the products of a block of W with it. */
INLINE int64_t direct_z(const heddle_norm_linear *a) {
    return (a->m + PANEL - 1) / PANEL * b_panel(a->k);
}

INLINE int64_t direct_sums(const heddle_norm_linear *a) {
    return DIRECT_W * direct_rows(a);
}

/* 32 columns of 16 rows of z, from row `first` and column e on. */
static void direct_pack_z(const norm_call *c, int64_t first, int64_t e) {
    const int64_t k = c->a->k;
    vf t[VL];
    for (int l = 0; l < VL; l++) {
        vf z[2] = {splat(0), splat(0)};
        for (int x = 0; x < 2 && first + l < c->a->m; x++)
            z[x] = ((vf)(load_16(row_of(c->t->x, first + l, c->a->x_stride, HEDDLE_BF16) + (e + x * VL) * 2,
                                 k - e - x * VL)
                         << 16) -
                    c->mean[first + l]) *
                       c->rstd[first + l] * load(c->gamma + e + x * VL) +
                   load(c->beta + e + x * VL);
        t[l] = narrow_two(z[0], z[1]);
    }
    transpose(t);
    float *out = c->w + first / PANEL * b_panel(k);
    for (int x = 0; x < VL; x++)
        store(out + in_b(e + 2 * x, first % PANEL), t[x]);
}

/* C [DIRECT_W][direct_rows()] = the rows of W at w times those columns of zᵀ. */
static void direct_products(const norm_call *c, const char *w, int64_t first, int64_t rows, float *out) {
    const heddle_norm_linear *a = c->a;
    const int64_t bytes = a->w_stride * 2, whole = a->k / TILE_DEPTH, stride = direct_rows(a);
    const int64_t depth = rows > PANEL ? DIRECT_DEPTH / TILE_DEPTH : whole, rest = a->k - whole * TILE_DEPTH;
    const float *z = c->w + first / PANEL * b_panel(a->k);
    float last[DIRECT_W * TILE_DEPTH / 2];
    for (int r = 0; r < DIRECT_W && rest; r++)
        store(last + r * (TILE_DEPTH / 2), load_32(w + r * bytes + whole * 64, rest));
    for (int64_t x0 = 0; x0 < whole; x0 += depth)
        for (int64_t p = 0; p < rows; p += PANEL) {
            const int columns = rows - p > TILE_ROWS ? 2 : 1;
            const char *ap = w + x0 * 64;
            const char *bp = (const char *)(z + p / PANEL * b_panel(a->k) + x0 * (PANEL * TILE_DEPTH / 2));
            load_sums(2, columns, out + p, stride, x0 > 0);
            for (int64_t x = x0; x < min64(whole, x0 + depth); x++, ap += 64, bp += PANEL * TILE_DEPTH * 2) {
                multiply_tiles(2, columns, ap, bytes, TILE_ROWS * bytes, bp);
                for (int r = 0; r < DIRECT_W && p == 0; r++)
                    __builtin_prefetch(ap + r * bytes + DIRECT_AHEAD, 0, 2);
            }
            store_sums(2, columns, out + p, stride);
        }
    for (int64_t p = 0; p < rows && rest; p += PANEL) {
        const int columns = rows - p > TILE_ROWS ? 2 : 1;
        load_sums(2, columns, out + p, stride, whole > 0);
        multiply_tiles(2, columns, (const char *)last, 64, 64 * TILE_ROWS,
                       (const char *)(z + p / PANEL * b_panel(a->k) + whole * (PANEL * TILE_DEPTH / 2)));
        store_sums(2, columns, out + p, stride);
    }
}

/* Of up to 16 rows of y, from `first` on: sums[row][DIRECT_W columns], `apart` floats from row to row. */
INLINE void direct_turn(const float *products, int64_t stride, float *sums, int64_t apart) {
    for (int64_t g = 0; g < DIRECT_W; g += VL) {
        vf t[VL];
        for (int l = 0; l < VL; l++)
            t[l] = load(products + (g + l) * stride);
        transpose(t);
        for (int l = 0; l < VL; l++)
            store(sums + l * apart + g, t[l]);
    }
}

#else

INLINE bool goes_direct(const heddle_norm_linear *a) {
    (void)a;
    return false;
}

INLINE int64_t direct_z(const heddle_norm_linear *a) {
    (void)a;
    return 0;
}

INLINE int64_t direct_sums(const heddle_norm_linear *a) {
    (void)a;
    return 0;
}

#endif
#endif

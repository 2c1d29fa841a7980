/* SPDX-License-Identifier: Apache-2.0
 * The product of gemm.h on AMX: operands in bfloat16, sums in float32.
 *
 *   A   tiles of 16 rows of 32 sum indices (64 bytes), with any strides: packed, or rows of a tensor where they are
 *   B   tiles of 16 pairs of sum indices (32 bits each) by 16 columns: [depth/32][columns/16][16][16]
 *
 * C is whole tiles of 16 × 16; what pads A and B to whole tiles must be zero (or finite against a zero). */
#ifndef HEDDLE_CPU_GEMM_TILES_H
#define HEDDLE_CPU_GEMM_TILES_H

#include "gemm.h"

#define TILE_ROWS 16
#define TILE_DEPTH 32   /* sum indices */
#define TILE_FLOATS 256 /* 1 KB */

typedef struct tiles_a {
    const void *p;
    int64_t row, down, step; /* bytes to the next row of a tile, to the next 16 rows, to the next 32 sum indices */
} tiles_a;

INLINE void tiles_block(int rows, int columns, int64_t steps, const char *ap, const tiles_a *a, const float *b,
                        int64_t b_step, float *c, int64_t c_stride, bool add, gemm_ahead *later) {
    load_sums(rows, columns, c, c_stride, add);
    const char *bp = (const char *)b;
    const int64_t a_row = a->row, a_down = a->down, a_step = a->step;
    for (int64_t x = 0; x < steps; x++) {
        multiply_tiles(rows, columns, ap, a_row, a_down, bp);
        ap += a_step;
        bp += b_step * 4;
        for (int i = 0; i < 4; i++)
            __builtin_prefetch(later->p + 64 * i, 0, 2);
        later->p += later->step;
    }
    store_sums(rows, columns, c, c_stride);
}

INLINE void tiles_columns(int rows, int columns, int64_t steps, const char *ap, const tiles_a *a, const float *b,
                          int64_t b_step, float *c, int64_t c_stride, bool add, gemm_ahead *later) {
    for (; columns >= 2; columns -= 2, b += 2 * TILE_FLOATS, c += 32)
        tiles_block(rows, 2, steps, ap, a, b, b_step, c, c_stride, add, later);
    if (columns)
        tiles_block(rows, 1, steps, ap, a, b, b_step, c, c_stride, add, later);
}

/* C (+)= A·B for `rows` × `columns` tiles over 32·steps sum indices, which are b_step floats of B apart. With every step of a
 * block up to 256 bytes of later->p are asked for; it moves on by later->step. (Structures by pointer: gcc copies one on the stack
 * with a vector load, which has to wait until all stores before it, and that is C, have left the store buffer. That cost 17% of
 * norm-linear.) */
static __attribute__((noinline)) void gemm_tiles(int64_t rows, int columns, int64_t steps, const tiles_a *a,
                                                 const float *b, int64_t b_step, float *c, int64_t c_stride, bool add,
                                                 const gemm_ahead *next) {
    gemm_ahead later = {next->p, next->step};
    const char *ap = a->p;
    for (; rows >= 2; rows -= 2, c += 2 * TILE_ROWS * c_stride, ap += 2 * a->down)
        tiles_columns(2, columns, steps, ap, a, b, b_step, c, c_stride, add, &later);
    if (rows)
        tiles_columns(1, columns, steps, ap, a, b, b_step, c, c_stride, add, &later);
}

#endif

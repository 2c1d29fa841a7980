/* SPDX-License-Identifier: Apache-2.0
 * The one product that everything is made of, for operands that are in cache:
 *
 *     C[r, :] (+)= sum over x of A[r, x] · B[x, :]
 *
 * B and C have rows of whole vectors; A is read one element at a time and broadcast, with any two strides, so that a row-major
 * and a transposed A are the same to it. A block of rows × vectors of C stays in registers over the whole sum. */
#ifndef HEDDLE_CPU_GEMM_H
#define HEDDLE_CPU_GEMM_H

#include "vec.h"

#include <string.h>

typedef struct gemm_a {
    const float *p;
    int64_t row, x; /* strides in elements */
} gemm_a;

/* With `pairs`, A and B hold two bfloat16 sum indices in each 32 bits, and the ISA has an instruction for that. */
#ifndef HAVE_BF16_DOT
INLINE vf dot_pairs(vf sum, vf a, vf b) {
    (void)a;
    (void)b;
    return sum;
}
#endif

INLINE vf multiply_add(bool pairs, vf sum, const float *a, vf b) {
    if (!pairs)
        return sum + *a * b;
    uint32_t bits;
    memcpy(&bits, a, sizeof bits);
    return dot_pairs(sum, (vf)(bits - (vu){0}), b);
}

/* What the next product will stream: asked for, into the second-level cache, a little with every sum index. A burst of
 * prefetches would fill the line buffers and stall the products instead of hiding behind them. */
typedef struct gemm_ahead {
    const char *p; /* or NULL */
    int64_t step;  /* bytes a sum index and block of rows; below 64 the same line is asked for again, which is cheap */
} gemm_ahead;

INLINE void gemm_block(bool pairs, int rows, int vectors, int64_t count, gemm_a a, const float *b, int64_t b_stride,
                       float *c, int64_t c_stride, bool add, gemm_ahead *later) {
    vf sum[16][4];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[r][v] = splat(0);
    const float *ap = a.p;
    for (int64_t x = 0; x < count; x++) {
        vf bx[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            bx[v] = load(b + v * VL);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[r][v] = multiply_add(pairs, sum[r][v], ap + r * a.row, bx[v]);
        b += b_stride;
        ap += a.x;
        if (later) {
            __builtin_prefetch(later->p, 0, 2);
            later->p += later->step;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            store(c + r * c_stride + v * VL, add ? load(c + r * c_stride + v * VL) + sum[r][v] : sum[r][v]);
}

/* The sum indices of one chain of additions, where they are divided evenly into chains of so many at most. */
INLINE int64_t even_chain(int64_t count, int64_t most) {
    const int64_t chains = count > most ? (count + most - 1) / most : 1;
    return (count + chains - 1) / chains;
}

/* A chain's rounding error grows with its length, so longer sums than those of common head dims are divided, and their parts added up. */
INLINE int64_t chain_of(bool pairs, int64_t count) {
    return pairs || count <= 128 ? count : even_chain(count, 64);
}

/* gemm_block() in chains of so many sum indices. */
INLINE void gemm_chains(bool pairs, int rows, int vectors, int64_t count, int64_t chain, gemm_a a, const float *b,
                        int64_t b_stride, float *c, int64_t c_stride, bool add, gemm_ahead *later) {
    do {
        gemm_block(pairs, rows, vectors, chain < count ? chain : count, a, b, b_stride, c, c_stride, add, later);
        a.p += chain * a.x;
        b += chain * b_stride;
        add = true;
    } while ((count -= chain) > 0);
}

INLINE void gemm_rows(bool pairs, int block, int vectors, int64_t rows, int64_t count, gemm_a a, const float *b,
                      int64_t b_stride, float *c, int64_t c_stride, bool add, gemm_ahead *later) {
#define BLOCK_OF(n)                                                                                                    \
    for (; rows >= (n); rows -= (n), a.p += (n)*a.row, c += (n)*c_stride)                                              \
    gemm_block(pairs, n, vectors, count, a, b, b_stride, c, c_stride, add, later)
    BLOCK_OF(block);
    if (block > 4)
        BLOCK_OF(4);
    BLOCK_OF(2);
    BLOCK_OF(1);
#undef BLOCK_OF
}

/* Rows of a register block for each number of vectors: enough sums to cover the FMA latency, few enough for the registers. */
#if VL == 16 || defined(__aarch64__)
#define GEMM_ROWS_4 6
#define GEMM_ROWS_3 8
#define GEMM_ROWS_2 8
#define GEMM_ROWS_1 8
#else
#define GEMM_ROWS_4 2
#define GEMM_ROWS_3 4
#define GEMM_ROWS_2 6
#define GEMM_ROWS_1 8
#endif
/* The widest block to use: four vectors need 32 registers. */
#define GEMM_VECTORS (GEMM_ROWS_4 >= 6 ? 4 : 3)

INLINE void gemm_columns(bool pairs, int vectors, int64_t rows, int64_t count, gemm_a a, const float *b,
                         int64_t b_stride, float *c, int64_t c_stride, bool add, gemm_ahead *later) {
    while (vectors > 0) {
        int now = vectors <= GEMM_VECTORS ? vectors : vectors == GEMM_VECTORS + 1 ? 2 : GEMM_VECTORS;
        switch (now) {
        case 4: gemm_rows(pairs, GEMM_ROWS_4, 4, rows, count, a, b, b_stride, c, c_stride, add, later); break;
        case 3: gemm_rows(pairs, GEMM_ROWS_3, 3, rows, count, a, b, b_stride, c, c_stride, add, later); break;
        case 2: gemm_rows(pairs, GEMM_ROWS_2, 2, rows, count, a, b, b_stride, c, c_stride, add, later); break;
        default: gemm_rows(pairs, GEMM_ROWS_1, 1, rows, count, a, b, b_stride, c, c_stride, add, later); break;
        }
        vectors -= now;
        b += now * VL;
        c += now * VL;
    }
}

static __attribute__((noinline)) void gemm(int vectors, int64_t rows, int64_t count, gemm_a a, const float *b,
                                           int64_t b_stride, float *c, int64_t c_stride, bool add) {
    gemm_columns(false, vectors, rows, count, a, b, b_stride, c, c_stride, add, NULL);
}

/* With something to ask for: for operands that come from the second-level cache or farther away. */
static __attribute__((noinline, unused)) void gemm_streaming(int vectors, int64_t rows, int64_t count, gemm_a a,
                                                             const float *b, int64_t b_stride, float *c,
                                                             int64_t c_stride, bool add, gemm_ahead later) {
    gemm_columns(false, vectors, rows, count, a, b, b_stride, c, c_stride, add, &later);
}

#ifdef HAVE_BF16_DOT
static __attribute__((noinline)) void gemm_pairs(int vectors, int64_t rows, int64_t count, gemm_a a, const float *b,
                                                 int64_t b_stride, float *c, int64_t c_stride, bool add,
                                                 gemm_ahead later) {
    gemm_columns(true, vectors, rows, count, a, b, b_stride, c, c_stride, add, &later);
}
#endif

/* The same, added to c, for operands that hold infinities or NaN which a mask has cut off: a term whose factor from the masked side (A,
 * or else B) is 0 is left out instead of adding 0·NaN. Rare, so simple; but in chains of so many sum indices, too, of which none goes on
 * from c. */
static __attribute__((noinline)) void gemm_careful(bool masked_a, int vectors, int64_t rows, int64_t count,
                                                   int64_t chain, gemm_a a, const float *b, int64_t b_stride, float *c,
                                                   int64_t c_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            for (int64_t begin = 0; begin < count; begin += chain) {
                const int64_t end = begin + chain < count ? begin + chain : count;
                float *p = c + r * c_stride + v * VL;
                vf sum = splat(0);
                for (int64_t x = begin; x < end; x++) {
                    vf ax = splat(a.p[r * a.row + x * a.x]), bx = load(b + x * b_stride + v * VL);
                    sum += select_float((masked_a ? ax : bx) == 0, splat(0), ax * bx);
                }
                store(p, load(p) + sum);
            }
}

/* Rows of `columns` elements; what pads a row to whole vectors is not looked at. */
static bool all_finite(const float *p, int64_t rows, int64_t stride, int64_t columns) {
    vf zero = splat(0), zeros[4] = {splat(0), splat(0), splat(0), splat(0)}; /* x·0 is 0, or NaN */
    float rest = 0;
    for (int64_t r = 0; r < rows; r++, p += stride) {
        int64_t x = 0;
        for (; x + 4 * VL <= columns; x += 4 * VL) /* four chains: a sum waits for the one before */
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                zeros[i] += load(p + x + i * VL) * 0;
        for (; x + VL <= columns; x += VL)
            zero += load(p + x) * 0;
        for (; x < columns; x++)
            rest += p[x] * 0;
    }
    zero += (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]);
    for (int l = 0; l < VL; l++)
        rest += zero[l];
    return rest == 0;
}

#endif

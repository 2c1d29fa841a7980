/* SPDX-License-Identifier: Apache-2.0
 * What the fuzz targets of problems share: memory without a byte to spare, numbers, sizes and strides. */
#ifndef HEDDLE_FUZZ_PROBLEMS_H
#define HEDDLE_FUZZ_PROBLEMS_H

#include "bytes.h"
#include "heddle.h"

#include <math.h>
#include <string.h>

enum { MOST_BYTES = 1 << 16, MOST_WORKSPACE = 1 << 23, MOST_BLOCKS = 32 };

void fuzz_append(bytes *b);
void fuzz_merge(bytes *b);

/* ------------------------------------------------------------------------------------------------- exact memory */

typedef struct memory {
    void *block[MOST_BLOCKS];
    int count;
    bytes *source;
} memory;

static inline void *new_block(memory *m, size_t size) {
    void *p = NULL;
    MUST(m->count < MOST_BLOCKS && posix_memalign(&p, 64, size ? size : 1) == 0);
    memset(p, 0xff, size ? size : 1); /* NaN */
    return m->block[m->count++] = p;
}

static inline void free_blocks(memory *m) {
    while (m->count)
        free(m->block[--m->count]);
}

/* Numbers of every kind: mostly tame, some huge, some not finite. */
static inline double value_of(uint64_t x) {
    static const double odd[] = {0, -0.0, 1e30, -1e30, 1e-30, INFINITY, -INFINITY, NAN, 65504, -1e9, 1e10, 1e38};
    return x % 61 < sizeof odd / sizeof *odd ? odd[x % 61] : (double)(int64_t)(x >> 6 & 1023) / 256 - 2;
}

static inline void store(heddle_dtype dtype, void *p, int64_t at, double x) {
    const float single = (float)x;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    switch (dtype) {
    case HEDDLE_F32: ((float *)p)[at] = single; break;
    case HEDDLE_F64: ((double *)p)[at] = x; break;
    case HEDDLE_BF16: ((uint16_t *)p)[at] = (uint16_t)(bits >> 16); break;
    case HEDDLE_F16: ((uint16_t *)p)[at] = (uint16_t)(bits >> 11 ^ bits); break; /* any bits are some number */
    }
}

static inline void *new_floats(memory *m, heddle_dtype dtype, int64_t count) {
    void *p = new_block(m, (size_t)count * heddle_dtype_size(dtype));
    uint64_t state = take_number(m->source, 2) | 1;
    const int tame = !(state & 2);
    for (int64_t i = 0; i < count; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        store(dtype, p, i, tame ? (double)(int64_t)(state >> 40 & 1023) / 512 - 1 : value_of(state >> 33));
    }
    return p;
}

static inline int32_t *new_lengths(memory *m, int64_t count, int64_t most) {
    int32_t *p = new_block(m, (size_t)count * sizeof *p);
    const int wild = take_bit(m->source);
    for (int64_t i = 0; i < count; i++)
        p[i] = wild ? (int32_t)take_number(m->source, 4) : (int32_t)take_between(m->source, 0, most);
    return p;
}

/* Bytes, of which each is something. */
static inline uint8_t *new_bytes(memory *m, int64_t count) {
    uint8_t *p = new_block(m, (size_t)count);
    uint64_t state = take_number(m->source, 2);
    for (int64_t i = 0; i < count; i++)
        p[i] = (uint8_t)((state = state * UINT64_C(6364136223846793005) + 1) >> 33);
    return p;
}

/* ---------------------------------------------------------------------------------------------- sizes and strides */

static inline int64_t any_size(bytes *b) {
    const uint64_t kind = take_number(b, 1);
    if (kind < 96)
        return (int64_t)kind % 6;
    return kind < 224 ? (INT64_C(1) << kind % 42) + take_between(b, -1, 1) : (int64_t)take_number(b, 8);
}

/* Elements from the first to the last; 0 where there are none. */
static inline int64_t span(heddle_strides s, int64_t b, int64_t h, int64_t rows, int64_t last) {
    return b && h && rows && last ? (b - 1) * s.b + (h - 1) * s.h + (rows - 1) * s.s + last : 0;
}

/* As heddle.h says: the default, literal ones with gaps, or repeated. */
static inline heddle_strides small_strides(bytes *b, int input, int packed, int64_t h, int64_t rows, int64_t last) {
    const int64_t gap = take_between(b, 0, 3), wide = last + gap;
    switch (take_between(b, 0, 4)) {
    case 1: return packed ? (heddle_strides){0, wide, h * wide} : (heddle_strides){h * rows * wide, rows * wide, wide};
    case 2: return packed ? (heddle_strides){7, rows * wide, wide} : (heddle_strides){rows * h * wide, wide, h * wide};
    case 3:
        if (input)
            return (heddle_strides){HEDDLE_BROADCAST, take_bit(b) ? wide : HEDDLE_BROADCAST, HEDDLE_BROADCAST};
        break;
    default: break;
    }
    return (heddle_strides){0, 0, 0};
}

static inline heddle_strides literal(heddle_strides s, int packed, int64_t h, int64_t rows, int64_t last) {
    if (!s.b && !s.h && !s.s)
        return packed ? (heddle_strides){0, last, h * last} : (heddle_strides){h * rows * last, rows * last, last};
    return (heddle_strides){s.b < 0 || packed ? 0 : s.b, s.h < 0 ? 0 : s.h, s.s < 0 ? 0 : s.s};
}

#endif

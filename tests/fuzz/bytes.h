/* SPDX-License-Identifier: Apache-2.0
 * What the fuzz targets share: an input is read from its begin, and zeros follow its end. */
#ifndef HEDDLE_FUZZ_BYTES_H
#define HEDDLE_FUZZ_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

typedef struct bytes {
    const uint8_t *at, *end;
} bytes;

static inline uint64_t take_number(bytes *b, int count) {
    uint64_t x = 0;
    for (int i = 0; i < count; i++)
        x |= (uint64_t)(b->at < b->end ? *b->at++ : 0) << 8 * i;
    return x;
}

/* From low to high, both included, by as few bytes as that takes. */
static inline int64_t take_between(bytes *b, int64_t low, int64_t high) {
    const uint64_t count = (uint64_t)(high - low) + 1;
    return low + (int64_t)(take_number(b, count <= 256 ? 1 : count <= 65536 ? 2 : 8) % count);
}

static inline int take_bit(bytes *b) {
    return (int)(take_number(b, 1) & 1);
}

/* What must hold, whatever the input. */
#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The parameter of the kernel of heddle_attention_append, and how a token's rows are divided among blocks. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_APPEND_H
#define HEDDLE_CUDA_ATTENTION_APPEND_H

#include "heddle.h"

#include "cuda/contract.h"

#define APPEND_WARPS 4
#define APPEND_UNIT 8    /* elements that a thread takes at a time, of both halves as many */
#define APPEND_UNITS 512 /* of a block: four of each thread */

typedef struct append_params {
    heddle_append a; /* resolved */
    heddle_append_data t;
    int64_t tokens;
    int32_t parts;  /* blocks of a token */
    int32_t vector; /* a unit at a time: all of them begin where it may be read at once, and there are whole ones */
} append_params;

/* Units of `width` elements. */
CONTRACT int32_t append_units_of(int64_t width) {
    return (int32_t)((width + APPEND_UNIT - 1) / APPEND_UNIT);
}

/* Units of a row that are rotated: pairs lie in a unit, or in one and its fellow half a rotation further. */
CONTRACT int32_t append_turned(int64_t rotary, int interleaved) {
    return append_units_of(interleaved ? rotary : rotary / 2);
}

/* Units of a row of d elements. */
CONTRACT int32_t append_units(int64_t d, int64_t rotary, int interleaved) {
    return append_turned(rotary, interleaved) + append_units_of(d - rotary);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The parameter of the kernel of heddle_attention_merge, and how many rows a block has. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_MERGE_H
#define HEDDLE_CUDA_ATTENTION_MERGE_H

#include "heddle.h"

#include "cuda/contract.h"

#define MERGE_WARPS 4
#define MERGE_ROWS 8 /* of a warp */

typedef struct merge_params {
    heddle_merge m; /* resolved */
    float *o, *lse;
    const void *other_o;
    const float *other_lse;
    int64_t rows;
    int32_t vector; /* four numbers at a time: all rows begin where four may be read, and there are whole fours */
} merge_params;

#endif

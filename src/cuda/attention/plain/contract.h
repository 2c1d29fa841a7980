/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of the family plain both count with. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_PLAIN_CONTRACT_H
#define HEDDLE_CUDA_ATTENTION_PLAIN_CONTRACT_H

#include "cuda/contract.h"

#define PLAIN_THREADS 128
#define PLAIN_MAX_DIM 512

/* Rows that a block of prep has: one a warp. */
#define PLAIN_PREP_ROWS (PLAIN_THREADS / 32)

/* Blocks over the keys of a row of dbias: a thread a key. */
CONTRACT int64_t plain_key_blocks(int64_t sk) {
    return (sk + PLAIN_THREADS - 1) / PLAIN_THREADS;
}

#endif

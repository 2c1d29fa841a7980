/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of the family small both count with. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_SMALL_CONTRACT_H
#define HEDDLE_CUDA_ATTENTION_SMALL_CONTRACT_H

#include "cuda/contract.h"

/* Rows that a block owns; rows of the other operand that it takes at a time, half as many as it has threads. */
#define SMALL_OWN_ROWS 8
#define SMALL_BLOCK 128

/* Floats from row to row in shared memory: 16 bytes more, so that eight rows meet no bank conflict. */
CONTRACT int small_pitch(int dim) {
    return dim + 4;
}

/* Two tiles of the block's own rows, two that stream, their weights, and four numbers a row that streams; in float32. */
CONTRACT int small_bytes(int dim) {
    return (2 * (SMALL_OWN_ROWS + SMALL_BLOCK) * small_pitch(dim) + 2 * SMALL_BLOCK * SMALL_OWN_ROWS +
            4 * SMALL_BLOCK) *
           4;
}

#endif

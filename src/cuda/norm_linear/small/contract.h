/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of norm-linear's family small both count with. C and CUDA C. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_SMALL_CONTRACT_H
#define HEDDLE_CUDA_NORM_LINEAR_SMALL_CONTRACT_H

#include "cuda/contract.h"

/* Forward: rows and columns of a block. Both passes: terms of a sum at a time; features in, as far as the family goes. */
#define SMALL_ROWS 16
#define SMALL_COLS 32
#define SMALL_CHUNK 128
#define SMALL_K 1024

/* Backward: rows of dx of a block; rows and columns of a block's part of dw. */
#define SMALL_GRADS 8
#define SMALL_SIDE 32

/* The family takes no problem whose sizes are not ints. Forward: blocks beside each other over the columns of y; floats of a row, and of a column of W; bytes of a block. */
CONTRACT int norm_small_tiles(int n) {
    return (n + SMALL_COLS - 1) / SMALL_COLS;
}
CONTRACT int norm_small_padded(int k) {
    return (k + 3) / 4 * 4;
}
#define SMALL_PADDED_CHUNK (SMALL_CHUNK + 4)
CONTRACT int norm_small_bytes(int k) {
    return (SMALL_ROWS * norm_small_padded(k) + SMALL_COLS * SMALL_PADDED_CHUNK) * 4;
}

/* Backward: blocks beside each other over the columns of dw; where dbias alone is wanted there is one. */
CONTRACT int norm_small_strips(int k) {
    return (k + SMALL_SIDE - 1) / SMALL_SIDE;
}

#endif

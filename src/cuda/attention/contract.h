/* SPDX-License-Identifier: Apache-2.0
 * What the families of attention share of what host and kernels both count with. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_CONTRACT_H
#define HEDDLE_CUDA_ATTENTION_CONTRACT_H

#include "cuda/contract.h"

/* The most blocks that share the keys of a tile of queries. */
#define MAX_KEY_SHARES 256

/* Up to so many keys, D of 16-bit types is rowsum(P∘dP): o is rounded, and few keys do not average that out. */
#define FEW_KEYS 128

/* HEDDLE_PAGES: a page is a whole number of so many rows. */
#define PAGE_ROWS 16

/* Rows and columns of a tile of a boolean mask's map for kernels whose tiles are parts of one, or it. */
#define MASK_TILE 64

/* Tiles of 64 rows: of one sequence; and of all packed ones before the n-th, of which each begins a tile of its own. */
CONTRACT int64_t tiles64(int64_t rows) {
    return (rows + 63) / 64;
}
CONTRACT int64_t packed_tiles64(int64_t first_row, int64_t n) {
    return first_row / 64 + n;
}

#endif

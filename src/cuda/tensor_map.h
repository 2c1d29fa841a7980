/* SPDX-License-Identifier: Apache-2.0
 * What the copy engine knows of a tensor. C and CUDA C. */
#ifndef HEDDLE_CUDA_TENSOR_MAP_H
#define HEDDLE_CUDA_TENSOR_MAP_H

#include <stdint.h>

/* CUtensorMap, filled by the driver. Boxes of 64 columns, swizzled by 128 bytes. */
typedef struct tensor_map {
    uint64_t words[16];
} __attribute__((aligned(64))) tensor_map;

/* What a map is made of: columns, rows and up to two dimensions more, and bytes from one to the next; rows of a box. at
 * NULL: there is none. */
typedef struct tensor_shape {
    const void *at;
    uint64_t extent[4], stride[3];
    uint32_t rows;
} tensor_shape;

#endif

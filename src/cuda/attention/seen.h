/* SPDX-License-Identifier: Apache-2.0
 * What host and kernel both count with where the map of segments and lists of blocks is made. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_SEEN_H
#define HEDDLE_CUDA_ATTENTION_SEEN_H

/* Tiles that a block makes: one a warp. */
#define SEEN_WARPS 8

/* Queries and keys of a tile of bytes, and of the map of those who ask for one element at a time. */
#define SEEN_QUERIES 64
#define SEEN_KEYS 128

#endif

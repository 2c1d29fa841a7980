/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of the family sm90 in float32 both count with: split tiles, shared memory. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_SM90_F32_CONTRACT_H
#define HEDDLE_CUDA_ATTENTION_SM90_F32_CONTRACT_H

#include "cuda/attention/params.h"
#include "cuda/contract.h"

/* Rows of a split tile, of the high and of the low part. */
#define SPLIT_ROWS 64

CONTRACT int split_tile_bytes(int dim) {
    return SPLIT_ROWS * dim * 4;
}

/* A slot of shared memory has a part of a tile, of up to 128 columns. Where a tile has two, two warpgroups share their rows: each makes
 * all scores, and sums of the columns of one part. */
CONTRACT int split_parts(int dim) {
    return dim > 128 ? 2 : 1;
}
CONTRACT int split_part_bytes(int dim) {
    return split_tile_bytes(dim) / split_parts(dim);
}

/* Columns of a row that a thread of the splitting kernel has, in chunks of 8. */
#define SPLIT_CHUNKS 4

CONTRACT int split_threads(int dim) {
    return SPLIT_ROWS * (dim / 8) / SPLIT_CHUNKS;
}

/* ------------------------------------------------------------------------------------------------------ forward */

#define FORWARD32_BARRIERS 16

/* Slots for parts of tiles of K and V in turn. */
CONTRACT int forward32_slots(int dim) {
    return dim > 64 ? 5 : 8;
}

/* Q; K and V; what is known of these, twice; two words for each 64 of Q's rows and four for each warpgroup; barriers. */
CONTRACT int forward32_layout_bytes(int dim, int own) {
    const int sets = own / SPLIT_ROWS, slots = forward32_slots(dim);
    return sets * split_tile_bytes(dim) + slots * split_part_bytes(dim) + 2 * slots * (int)sizeof(split_info) +
           sets * (2 + 4 * split_parts(dim)) * 4 + 8 * FORWARD32_BARRIERS;
}

/* Shared memory begins anywhere, tiles at multiples of 1024; with options a word for each slot. */
CONTRACT int forward32_bytes(int dim, int own, int full) {
    return 1024 + forward32_layout_bytes(dim, own) + (full ? forward32_slots(dim) * 4 : 0);
}

/* ----------------------------------------------------------------------------------------------------- backward */

/* Rows that a block owns. */
CONTRACT int backward32_own(int dim) {
    return 2 / split_parts(dim) * SPLIT_ROWS;
}

/* Numbers that come with a tile that streams: three a row, the exponents of two tiles, and with options which tile it is. */
#define BACKWARD32_NUMBERS (3 * SPLIT_ROWS + 4)

CONTRACT int backward32_slots(int dim) {
    return dim > 64 ? 3 : 8;
}

/* `tensors` of the block's own rows; slots with their numbers; barriers: two for each slot, one of the own. */
CONTRACT int backward32_bytes(int dim, int tensors) {
    const int slots = backward32_slots(dim);
    return tensors * backward32_own(dim) / SPLIT_ROWS * split_tile_bytes(dim) +
           slots * (split_part_bytes(dim) + BACKWARD32_NUMBERS * 4) + 8 * (2 * slots + 1);
}

/* dbias: slots for a part of two tiles of queries and of one of keys with what is known of them, barriers: two for each; sums of eight
 * warps. A block owns 128 queries at any dim. */
#define DBIAS32_OWN_ROWS 128
CONTRACT int dbias32_slots(int dim) {
    return dim > 64 ? 2 : 4;
}
CONTRACT int dbias32_bytes(int dim) {
    return dbias32_slots(dim) * (3 * (split_part_bytes(dim) + (int)sizeof(split_info)) + 2 * 8) + 8 * SPLIT_ROWS * 4;
}

#endif

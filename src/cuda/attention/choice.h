/* SPDX-License-Identifier: Apache-2.0
 * What a plan of attention on CUDA comes to: kernels (by their numbers), blocks, and what lies where in the workspace. Part of the plan, so that
 * a call chooses once. */
#ifndef HEDDLE_CUDA_ATTENTION_CHOICE_H
#define HEDDLE_CUDA_ATTENTION_CHOICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct attention_choice {
    int fwd, dkdv, dq, bwd; /* bwd: dkdv and dq in one; -1: they are not */
    int finish;             /* after bwd for Hopper */
    int rows_first;         /* before prep for Hopper */
    int64_t rows;           /* of lse */
    int64_t pack, splits, tiles_q, tiles_k;
    int64_t blocks; /* of fwd or of dq */
    int64_t blocks_dkdv;
    size_t part_lse, base, rest, flags, sum, bytes; /* offsets in the workspace, and its size; 0: there is none */
    int split;                                      /* float32 on Hopper: the kernel that splits; -1: none */
    int64_t split_tiles_q, split_tiles_k;           /* of a head */
    size_t split_tiles[4], split_info[4];           /* offsets; of Q, K, V, dO */
    bool splits_queries;
} attention_choice;

#endif

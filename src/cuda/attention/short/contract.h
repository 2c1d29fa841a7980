/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of the family short both count with. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_SHORT_CONTRACT_H
#define HEDDLE_CUDA_ATTENTION_SHORT_CONTRACT_H

#include "cuda/attention/contract.h"
#include "cuda/attention/sm80/contract.h"

/* A block has so many warps, all keys of a head, and so many queries a step: two warps side by side have the same 16 queries, and half of
 * the keys each. */
#define SHORT_WARPS 8
#define SHORT_KEYS FEW_KEYS
#define SHORT_QUERIES 64

/* K and V; two stages of Q and dO; P and dS; four numbers a row and half of the keys; marks of queries of two steps, and of keys. */
CONTRACT int short_bytes(int dim) {
    return 2 * (SHORT_KEYS + 2 * SHORT_QUERIES) * sm80_pitch(2, dim) + 2 * SHORT_QUERIES * sm80_pitch(2, SHORT_KEYS) +
           4 * 2 * SHORT_QUERIES * 4 + 2 * SHORT_QUERIES * 4 + SHORT_KEYS * 4;
}

#endif

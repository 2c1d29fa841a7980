/* SPDX-License-Identifier: Apache-2.0
 * How the gradient of a bias is divided among blocks: what the plan and the kernels count alike. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_DBIAS_H
#define HEDDLE_CUDA_ATTENTION_DBIAS_H

#include "cuda/contract.h"
#include "heddle.h"

/* Tiles of `own` queries and `block` keys of it: one row of tiles, head, batch where it is a sum over them. */
CONTRACT int64_t dbias_tiles(const heddle_attention *a, int own, int block) {
    const heddle_strides s = a->dbias_stride;
    return (a->sk + block - 1) / block * (s.s ? (a->sq + own - 1) / own : 1) * (s.h ? a->h : 1) * (s.b ? a->b : 1);
}

#endif

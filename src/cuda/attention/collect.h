/* SPDX-License-Identifier: Apache-2.0
 * The parameter of the kernel `collect`, and what host and kernel both count with. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_COLLECT_H
#define HEDDLE_CUDA_ATTENTION_COLLECT_H

#include "heddle.h"

#include "cuda/attention/contract.h"

/* A warp has the rows of a head that lie in one page for sure; a thread so many elements of one at a time, 16 bytes of what it writes. */
#define COLLECT_WARPS 8
#define COLLECT_ROWS PAGE_ROWS
#define COLLECT_UNIT 8

/* Keys are collected (collect.c) from so many rows of queries to a head of keys on. Writing them takes as long as Hopper's kernels gain by 70
 * to 85 rows: predicted, of 4 TB/s, the 125 TFLOP/s that sm80's full kernel has on an H100 and 450 in its place, or of bytes 160 and 600. And
 * they are where they take no more bytes of the workspace, which has room for the longest sequences there may be. */
#define COLLECTED_QUERIES 128
#define MOST_COLLECTED (INT64_C(2) << 30)

typedef struct collect_tensor {
    const void *from; /* the caller's, by the description's strides */
    void *to;         /* [hk][b][rows][units of 16 bytes] */
    int32_t units;    /* of a row */
    int32_t vector;   /* units are whole, and begin where they may be read at once */
} collect_tensor;

typedef struct collect_params {
    heddle_attention a; /* as the caller has it, resolved */
    collect_tensor k, v;
    const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqlens_k, *block_table;
    int32_t *pages;   /* out, [b][rows / page]: a table of the pages that are written; NULL: they are none */
    int32_t *starts;  /* out, [b + 1]: cu_seqlens_k of what is written; NULL: nobody asks */
    int32_t *lengths; /* out, [b]: seqlens_k of it; NULL: the caller's */
    int64_t rows;     /* that a sequence has room for */
    int32_t page;     /* rows of a page that is written */
    int32_t chunks;   /* blocks for the rows of a head of a sequence */
} collect_params;

CONTRACT int32_t collect_units(int64_t width) {
    return (int32_t)((width + COLLECT_UNIT - 1) / COLLECT_UNIT);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * description -> plan. A plan is a value: made on the stack for each call, used once, nothing to free. */
#ifndef HEDDLE_PLAN_H
#define HEDDLE_PLAN_H

#include "heddle.h"

#include <stdbool.h>
#include <stddef.h>

/* What a backend has planned, and found out about its device: for its run, and for nobody else. */
typedef union plan_own {
    unsigned char bytes[512];
    max_align_t aligned;
} plan_own;

typedef struct attention_plan {
    heddle_attention a; /* as described, with every default filled in and every stride literal */
    heddle_pass pass;
    char kernel[64];
    int threads;
    int64_t tile_q, tile_k; /* queries and keys that are worked on together */
    int64_t chunk_k;        /* backward: keys that one task owns */
    size_t workspace;       /* bytes */
    plan_own own;
} attention_plan;

typedef struct norm_linear_plan {
    heddle_norm_linear a;
    heddle_pass pass;
    char kernel[64];
    int threads;
    int64_t tile_m, tile_n, tile_k;
    size_t workspace;
    size_t prepared;     /* forward: bytes that heddle_norm_linear_prepare writes, for every m */
    bool reads_prepared; /* this forward takes them from the caller */
    plan_own own;
} norm_linear_plan;

/* Check a description by every rule of heddle.h and write it, resolved, to plan->a, and the pass to plan->pass; the rest is for the
 * backend to fill in. Pure. */
heddle_status heddle__resolve_attention(const heddle_attention *desc, heddle_pass pass, attention_plan *plan);
heddle_status heddle__resolve_norm_linear(const heddle_norm_linear *desc, heddle_pass pass, norm_linear_plan *plan);

heddle_status heddle__resolve_merge(const heddle_merge *desc, heddle_merge *resolved);
heddle_status heddle__resolve_append(const heddle_append *desc, heddle_append *resolved);

/* Elements from the tensor's first to one past its last: what it spans in memory. 0 if it has none. */
int64_t heddle__span(heddle_strides stride, int64_t b, int64_t h, int64_t s, int64_t last);

#endif

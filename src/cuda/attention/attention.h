/* SPDX-License-Identifier: Apache-2.0
 * Between the host side, which talks to the driver, and the plans of attention, which are pure. C only. */
#ifndef HEDDLE_CUDA_ATTENTION_H
#define HEDDLE_CUDA_ATTENTION_H

#include "cuda/attention/collect.h"
#include "cuda/attention/params.h"
#include "cuda/facts.h"
#include "cuda/kernels.h"
#include "plan.h"

typedef struct attention_launch {
    enum cuda_kernel kernel;
    uint32_t grid, shared_bytes; /* grid: x only; shared_bytes: dynamic */
    bool sm90, collects;         /* the parameter is attention_params_sm90, collect_params */
} attention_launch;

#define ATTENTION_MAX_LAUNCHES 10

/* A pass: launches in order, all but `collect` with the same parameters, into which the tensor maps are to be made of their shapes first. */
typedef struct attention_job {
    attention_params_sm90 params;
    collect_params collect;
    int maps; /* 5 or 0: q, k, v, dout, bias */
    tensor_shape shapes[5];
    int count;
    attention_launch launches[ATTENTION_MAX_LAUNCHES];
} attention_job;

/* Fills kernel, tiles, workspace and the own part of a resolved plan. Pure. */
heddle_status heddle__cuda_plan_attention(attention_plan *plan, const cuda_facts *device);

/* The device of a plan, for run. */
void heddle__cuda_set_attention_device(attention_plan *plan, void *record, void *context);
void *heddle__cuda_attention_device(const attention_plan *plan, void **context);

/* What a planned pass comes to (no launches: nothing to do). Pure. */
void heddle__cuda_attention_job(const attention_plan *plan, const cuda_facts *device, const heddle_attention_data *data,
                                void *workspace, attention_job *job);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Between the host side, which talks to the driver, and the plans of norm-linear, which are pure. C only. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_H
#define HEDDLE_CUDA_NORM_LINEAR_H

#include "cuda/facts.h"
#include "cuda/kernels.h"
#include "cuda/norm_linear/params.h"
#include "plan.h"

typedef struct norm_linear_launch {
    enum cuda_kernel kernel;
    uint32_t grid, shared; /* blocks; dynamic shared memory */
    bool sm90;             /* params.gemm90, whose maps are to be made of these shapes: a, b, out, u */
    tensor_shape shapes[4];
    norm_linear_params params;
} norm_linear_launch;

#define NORM_LINEAR_MAX_LAUNCHES 16

/* Fills kernel, tiles, workspace and the own part of a resolved plan. Pure. */
heddle_status heddle__cuda_plan_norm_linear(norm_linear_plan *plan, const cuda_facts *device);

/* The device of a plan, for run. */
void heddle__cuda_set_norm_linear_device(norm_linear_plan *plan, void *record, void *context);
void *heddle__cuda_norm_linear_device(const norm_linear_plan *plan, void **context);

/* The launches of a planned pass, in order. Returns how many (0: nothing to do). Pure. */
int heddle__cuda_norm_linear_launches(const norm_linear_plan *plan, const cuda_facts *device,
                                      const heddle_norm_linear_data *data, void *workspace,
                                      norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES]);

/* What heddle_norm_linear_prepare launches, as above. Pure. */
int heddle__cuda_prepare_launches(const norm_linear_plan *plan, const cuda_facts *device,
                                  const heddle_norm_linear_data *data, void *prepared,
                                  norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES]);

#endif

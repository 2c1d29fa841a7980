/* SPDX-License-Identifier: Apache-2.0
 * Between cuda.c, which talks to the driver, and the plans, which are pure. */
#ifndef HEDDLE_CUDA_DEVICE_H
#define HEDDLE_CUDA_DEVICE_H

#include "../plan.h"
#include "norm_linear_params.h"

/* What the plan must know of the device. */
typedef struct norm_linear_device {
    const char *name;
    int multiprocessors;
    size_t shared_bytes; /* that a block can have, opted in */
} norm_linear_device;

/* Every kernel of norm-linear: NORM_LINEAR_fwd_bf16, ... */
enum norm_linear_kernel {
#define K(pass, dtype, module, threads) NORM_LINEAR_##pass##_##dtype,
#include "norm_linear.def"
#undef K
    NORM_LINEAR_KERNELS
};

typedef struct norm_linear_launch {
    enum norm_linear_kernel kernel;
    uint32_t grid, shared; /* blocks; dynamic shared memory */
    norm_linear_params params;
} norm_linear_launch;

#define NORM_LINEAR_MAX_LAUNCHES 16

/* Fills kernel, tiles and workspace of a resolved plan. Pure. */
heddle_status heddle__cuda_plan_norm_linear(norm_linear_plan *plan, const norm_linear_device *device);

/* The launches of a planned pass, in order. Returns how many (0: nothing to do). Pure. */
int heddle__cuda_norm_linear_launches(const norm_linear_plan *plan, const heddle_norm_linear_data *data,
                                      void *workspace, norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES]);

#endif

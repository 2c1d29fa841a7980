/* SPDX-License-Identifier: Apache-2.0
 * Between host/cuda.c, which talks to the driver, and the plans, which are pure. */
#ifndef HEDDLE_CUDA_DEVICE_H
#define HEDDLE_CUDA_DEVICE_H

#include "cuda/norm_linear/params.h"
#include "plan.h"

/* What the plan must know of the device. */
typedef struct norm_linear_device {
    const char *name;
    int multiprocessors;
    size_t shared_bytes; /* that a block can have, opted in */
    int sm90;            /* has Hopper's instructions, and they are to be used */
    int small;           /* SMALL_CHOSEN, unless somebody asks for a family */
} norm_linear_device;

/* Every kernel of norm-linear: NORM_LINEAR_fwd_bf16_sm80, ... */
enum norm_linear_kernel {
#define K(pass, dtype, family, module, threads) NORM_LINEAR_##pass##_##dtype##_##family,
#include "cuda/norm_linear/norm_linear.def"
#undef K
    NORM_LINEAR_KERNELS
};

typedef struct norm_linear_launch {
    enum norm_linear_kernel kernel;
    uint32_t grid, shared; /* blocks; dynamic shared memory */
    int sm90;              /* params.gemm90, whose maps are to be made of these shapes: a, b */
    tensor_shape shapes[2];
    norm_linear_params params;
} norm_linear_launch;

#define NORM_LINEAR_MAX_LAUNCHES 16

/* Fills kernel, tiles and workspace of a resolved plan. Pure. */
heddle_status heddle__cuda_plan_norm_linear(norm_linear_plan *plan, const norm_linear_device *device);

/* The launches of a planned pass, in order. Returns how many (0: nothing to do). Pure. */
int heddle__cuda_norm_linear_launches(const norm_linear_plan *plan, const norm_linear_device *device,
                                      const heddle_norm_linear_data *data, void *workspace,
                                      norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES]);

#endif

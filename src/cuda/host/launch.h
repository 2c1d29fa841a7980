/* SPDX-License-Identifier: Apache-2.0
 * Kernels, loaded when first used, and their launches. */
#ifndef HEDDLE_CUDA_HOST_LAUNCH_H
#define HEDDLE_CUDA_HOST_LAUNCH_H

#include "cuda/host/device.h"
#include "cuda/tensor_map.h"

/* shared: bytes of dynamic shared memory. */
heddle_status heddle__cuda_launch(const cuda_driver *cu, device_record *r, enum cuda_kernel kernel, uint32_t grid,
                                  uint32_t shared, const void *params, void *stream);

/* The tensor maps of `count` shapes; those that lie nowhere are left as they are. */
heddle_status heddle__cuda_encode_maps(const cuda_driver *cu, const device_record *r, heddle_dtype dtype, unsigned rank,
                                       int count, const tensor_shape *shapes, tensor_map *const *maps);

#endif

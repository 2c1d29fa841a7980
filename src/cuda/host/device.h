/* SPDX-License-Identifier: Apache-2.0
 * What is remembered of each device. */
#ifndef HEDDLE_CUDA_HOST_DEVICE_H
#define HEDDLE_CUDA_HOST_DEVICE_H

#include "cuda/facts.h"
#include "cuda/host/driver.h"
#include "cuda/kernels.h"

#include <stdatomic.h>

#define KNOWN_BLOCKS 256

/* A device's facts: filled once, read-only afterwards. */
typedef struct device_record {
    atomic_int state; /* 0: nobody has asked, 1: somebody is at it, 2: done */
    char name[96];    /* "NVIDIA H200 (device 0, sm_90)" */
    char note[256];   /* what of the environment is not heeded, and its limit of shared memory; or nothing */
    int ordinal, major, minor, multiprocessors, shared_optin;
    int sm90;  /* Hopper, and HEDDLE_CUDA_FAMILY does not ask for less */
    int small; /* SMALL_CHOSEN, or what HEDDLE_CUDA_FAMILY asks for */
    /* A launch may overlap the one in front: it costs the host less, too. Every kernel of Hopper's machine code begins with waiting for
     * the one in front; PTX for older GPUs does not. */
    bool overlaps;
    cu_result error; /* of the query */
    _Atomic(cu_context) primary;
    /* Blocks of 2 MiB of addresses that were seen to be this device's memory (the driver maps no smaller ones), plus one. */
    atomic_uint_least64_t known[KNOWN_BLOCKS];
    atomic_uchar prepared[CUDA_KERNELS]; /* loaded; 2: with its limit of shared memory raised on this device */
} device_record;

/* The record of the current context's device, or of device 0 when no context is current. */
heddle_status heddle__cuda_current_device(const cuda_driver **driver, device_record **found, cu_context *context);

/* For a caller without a context of its own: the one that cudart uses too becomes the current one. */
heddle_status heddle__cuda_enter_primary(const cuda_driver *cu, device_record *r, cu_context *context);

/* What the plans must know. */
cuda_facts heddle__cuda_facts_of(const device_record *r);

#endif

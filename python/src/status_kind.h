/* SPDX-License-Identifier: Apache-2.0
 * Which exception of Python a status becomes, whoever raises it: the module, PyTorch's operators, JAX's handlers. */
#ifndef HEDDLE_STATUS_KIND_H
#define HEDDLE_STATUS_KIND_H

#include "heddle.h"

typedef enum status_kind { KIND_RUNTIME_ERROR, KIND_VALUE_ERROR, KIND_NOT_IMPLEMENTED } status_kind;

static inline status_kind kind_of_status(heddle_status status) {
    switch (status) {
    case HEDDLE_NULL_POINTER:
    case HEDDLE_BAD_ENUM:
    case HEDDLE_BAD_SIZE:
    case HEDDLE_BAD_HEADS:
    case HEDDLE_BAD_STRIDE:
    case HEDDLE_OVERFLOW:
    case HEDDLE_BAD_VALUE:
    case HEDDLE_MISALIGNED:
    case HEDDLE_BAD_COMBINATION:
    case HEDDLE_WRONG_DEVICE: return KIND_VALUE_ERROR;
    case HEDDLE_UNSUPPORTED: return KIND_NOT_IMPLEMENTED;
    default: return KIND_RUNTIME_ERROR;
    }
}

#endif

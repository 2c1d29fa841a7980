/* SPDX-License-Identifier: Apache-2.0
 * Memory of our own on a GPU, for results of libraries whose arrays cannot be written to (JAX), and copies by a copy engine. */
#ifndef HEDDLE_CUDA_MEMORY_H
#define HEDDLE_CUDA_MEMORY_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stdint.h>

/* The layout that https://dmlc.github.io/dlpack fixes. */
typedef struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t type_code, type_bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

PyObject *heddle_cuda_enter(PyObject *self, PyObject *args);
PyObject *heddle_cuda_leave(PyObject *self, PyObject *unused);
PyObject *heddle_cuda_wait(PyObject *self, PyObject *args);
PyObject *heddle_cuda_memory(PyObject *self, PyObject *args);
PyObject *heddle_cuda_address(PyObject *self, PyObject *memory);
PyObject *heddle_cuda_copy(PyObject *self, PyObject *args);
PyObject *heddle_cuda_lend(PyObject *self, PyObject *args);

/* For XLA's threads, which do not hold the GIL: opens the driver, if there is one, so that heddle_cuda_clear has it. */
void heddle_cuda_prepare(void);

/* Zeros, on the stream, in the current context; CUDA's error, or -1 where no driver was opened. */
int heddle_cuda_clear(uint64_t address, size_t bytes, void *stream);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The handlers that XLA calls for heddle.jax. */
#ifndef HEDDLE_JAX_CALL_H
#define HEDDLE_JAX_CALL_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

PyObject *heddle_jax_handlers(PyObject *self, PyObject *unused);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The second and every later call of heddle.flex_attention. */
#ifndef HEDDLE_RECALL_H
#define HEDDLE_RECALL_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

PyObject *heddle_recaller(PyObject *self, PyObject *parts);

#endif

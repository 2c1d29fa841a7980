/* SPDX-License-Identifier: Apache-2.0
 * The way of a plain call of attention from Python to PyTorch's dispatcher, in C: what it costs is the price of a call. */
#ifndef HEDDLE_SHORTCUT_H
#define HEDDLE_SHORTCUT_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

PyObject *heddle_shortcut(PyObject *self, PyObject *parts);

#endif

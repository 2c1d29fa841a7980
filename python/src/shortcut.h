/* SPDX-License-Identifier: Apache-2.0
 * The way of a plain call of attention from Python to PyTorch's dispatcher, in C: what it costs is the price of a call. */
#ifndef HEDDLE_SHORTCUT_H
#define HEDDLE_SHORTCUT_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

PyObject *heddle_shortcut(PyObject *self, PyObject *parts);

int heddle_is_tensor(PyObject *parts, PyObject *value);

/* out, or (out, lse), of options that prepare() made ready for a q of this dtype, with another bias unless it is None; `plain`: of which
 * only the corner and the scale are not the defaults. NotImplemented where the long way must be gone. */
PyObject *heddle_attend(PyObject *parts, PyObject *const *qkv, PyObject *prepared, PyObject *bias, int plain, int lse);

#endif

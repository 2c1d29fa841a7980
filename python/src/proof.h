/* SPDX-License-Identifier: Apache-2.0
 * Whether functions and a BlockMask are what they were, for heddle.flex_attention. */
#ifndef HEDDLE_PROOF_H
#define HEDDLE_PROOF_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

PyObject *heddle_prover(PyObject *self, PyObject *names);

#endif

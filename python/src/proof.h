/* SPDX-License-Identifier: Apache-2.0
 * Whether functions and a BlockMask are what they were, for heddle.flex_attention. */
#ifndef HEDDLE_PROOF_H
#define HEDDLE_PROOF_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

PyObject *heddle_prover(PyObject *self, PyObject *names);

/* What a descriptor of its class gives: PyObject_GetAttr() without the search. */
PyObject *heddle_get(PyObject *descriptor, PyObject *of);

/* prove() itself, with the names that heddle_prover() is given: 1, 0, or -1 with what is no Exception of Python. */
int heddle_proven(PyObject *names, PyObject *proof, PyObject *score_mod, PyObject *block_mask);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * What a function is and reads, written down by heddle/_flex_kept.py, compared with a function: nothing of it may be another.
 * A state is a tuple that begins with its kind, or else the very object that has to be there. */
#include "proof.h"

#include <string.h>

/* What heddle._flex_kept gives, in this order: descriptors of classes, names of attributes, the class of functions. */
enum part {
    CODE,
    DEFAULTS,
    CLOSURE,
    GLOBALS,
    CONTENTS,
    VERSION,
    REQUIRES_GRAD,
    DATA_PTR, /* "data_ptr" */
    MASK_MOD,
    LISTS,             /* the four of a BlockMask, */
    SIZES = LISTS + 4, /* and its two sizes */
    FUNCTION = SIZES + 2,
    ABSENT, /* what stands for a global that there is not */
    PARTS
};

static PyObject *part(PyObject *parts, int x) {
    return PyTuple_GetItem(parts, x);
}

PyObject *heddle_get(PyObject *descriptor, PyObject *of) {
    const descrgetfunc get = (descrgetfunc)PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get);
    return get(descriptor, of, (PyObject *)Py_TYPE(of));
}

/* Every function here that returns int: 1 the same, 0 not, -1 with an exception. */
static int same(PyObject *parts, PyObject *state, PyObject *value);

/* Is it this object? Equal is enough for integers, which `by_value` says. */
static int attribute(PyObject *parts, PyObject *of, int name, PyObject *expected, int by_value) {
    PyObject *value = heddle_get(part(parts, name), of);
    if (!value)
        return -1;
    const int is = value == expected || (by_value && PyObject_RichCompareBool(value, expected, Py_EQ) > 0);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : is;
}

/* (kind, weak reference, _version or None where its numbers are not kept, data_ptr(), requires_grad or None of what can
 * have no gradient) */
static int same_tensor(PyObject *parts, PyObject *state, PyObject *value) {
    if (PyWeakref_GetObject(PyTuple_GetItem(state, 1)) != value)
        return 0;
    PyObject *version = PyTuple_GetItem(state, 2);
    int is = version == Py_None ? 1 : attribute(parts, value, VERSION, version, 1);
    if (is > 0 && PyTuple_GetItem(state, 4) != Py_None)
        is = attribute(parts, value, REQUIRES_GRAD, PyTuple_GetItem(state, 4), 0);
    if (is <= 0)
        return is;
    PyObject *pointer = PyObject_CallMethodObjArgs(value, part(parts, DATA_PTR), NULL);
    is = pointer ? PyObject_RichCompareBool(pointer, PyTuple_GetItem(state, 3), Py_EQ) : -1;
    Py_XDECREF(pointer);
    return is;
}

/* (kind, number): of the same class, and of the same bits, since 0.0 is not -0.0. */
static int same_number(PyObject *state, PyObject *value) {
    PyObject *known = PyTuple_GetItem(state, 1);
    if (Py_TYPE(known) != Py_TYPE(value))
        return 0;
    if (!PyFloat_CheckExact(known))
        return PyObject_RichCompareBool(known, value, Py_EQ);
    const double a = PyFloat_AsDouble(known), b = PyFloat_AsDouble(value);
    return memcmp(&a, &b, sizeof a) == 0;
}

/* (kind, states) */
static int same_tuple(PyObject *parts, PyObject *state, PyObject *value) {
    PyObject *known = PyTuple_GetItem(state, 1);
    int is = PyTuple_CheckExact(value) && PyTuple_Size(value) == PyTuple_Size(known);
    for (Py_ssize_t x = 0; is > 0 && x < PyTuple_Size(known); x++)
        is = same(parts, PyTuple_GetItem(known, x), PyTuple_GetItem(value, x));
    return is;
}

static int same_cells(PyObject *parts, PyObject *known, PyObject *function) {
    PyObject *cells = heddle_get(part(parts, CLOSURE), function);
    int is = cells ? PyTuple_CheckExact(cells) && PyTuple_Size(cells) == PyTuple_Size(known) : -1;
    for (Py_ssize_t x = 0; is > 0 && x < PyTuple_Size(known); x++) {
        PyObject *value = heddle_get(part(parts, CONTENTS), PyTuple_GetItem(cells, x));
        is = value ? same(parts, PyTuple_GetItem(known, x), value) : -1;
        Py_XDECREF(value);
    }
    Py_XDECREF(cells);
    return is;
}

/* names: name, state, name, state, ... */
static int same_globals(PyObject *parts, PyObject *globals, PyObject *names, PyObject *function) {
    int is = attribute(parts, function, GLOBALS, globals, 0);
    for (Py_ssize_t x = 0; is > 0 && x < PyTuple_Size(names); x += 2) {
        PyObject *value = PyDict_GetItemWithError(globals, PyTuple_GetItem(names, x));
        if (!value && PyErr_Occurred())
            return -1;
        value = Py_NewRef(value ? value : part(parts, ABSENT));
        is = same(parts, PyTuple_GetItem(names, x + 1), value);
        Py_DECREF(value);
    }
    return is;
}

/* (kind, code, state of the defaults, states of the cells, globals, names and states); no arguments by keyword alone */
static int same_function(PyObject *parts, PyObject *state, PyObject *value) {
    if ((PyObject *)Py_TYPE(value) != part(parts, FUNCTION))
        return 0;
    int is = attribute(parts, value, CODE, PyTuple_GetItem(state, 1), 0);
    if (is > 0) {
        PyObject *defaults = heddle_get(part(parts, DEFAULTS), value);
        is = defaults ? same(parts, PyTuple_GetItem(state, 2), defaults) : -1;
        Py_XDECREF(defaults);
    }
    if (is > 0 && PyTuple_Size(PyTuple_GetItem(state, 3)))
        is = same_cells(parts, PyTuple_GetItem(state, 3), value);
    if (is > 0 && PyTuple_Size(PyTuple_GetItem(state, 5)))
        is = same_globals(parts, PyTuple_GetItem(state, 4), PyTuple_GetItem(state, 5), value);
    return is;
}

static int same(PyObject *parts, PyObject *state, PyObject *value) {
    if (state == value || !PyTuple_CheckExact(state))
        return state == value;
    switch (PyLong_AsLong(PyTuple_GetItem(state, 0))) {
    case 1: return same_tensor(parts, state, value);
    case 2: return same_number(state, value);
    case 3: return same_tuple(parts, state, value);
    case 4: return same_function(parts, state, value);
    default: return 0;
    }
}

/* (weak reference, its four tensors, their versions, its sizes): nothing was written into them. */
static int same_lists(PyObject *parts, PyObject *state, PyObject *mask) {
    if (PyWeakref_GetObject(PyTuple_GetItem(state, 0)) != mask)
        return 0;
    int is = 1;
    for (int x = 0; is > 0 && x < 4; x++) {
        PyObject *tensor = PyTuple_GetItem(PyTuple_GetItem(state, 1), x);
        PyObject *list = PyObject_GetAttr(mask, part(parts, LISTS + x));
        is = list ? list == tensor : -1;
        Py_XDECREF(list);
        if (is > 0 && tensor != Py_None)
            is = attribute(parts, tensor, VERSION, PyTuple_GetItem(PyTuple_GetItem(state, 2), x), 1);
    }
    for (int x = 0; is > 0 && x < 2; x++) {
        PyObject *size = PyObject_GetAttr(mask, part(parts, SIZES + x));
        is = size ? size == PyTuple_GetItem(PyTuple_GetItem(state, 3), x) : -1;
        Py_XDECREF(size);
    }
    return is;
}

int heddle_proven(PyObject *parts, PyObject *proof, PyObject *score_mod, PyObject *block_mask) {
    PyObject *lists = PyTuple_GetItem(proof, 1);
    int is = same(parts, PyTuple_GetItem(proof, 0), score_mod);
    if (is > 0)
        is = lists == Py_None ? block_mask == Py_None : same_lists(parts, lists, block_mask);
    if (is > 0 && lists != Py_None) {
        PyObject *mod = PyObject_GetAttr(block_mask, part(parts, MASK_MOD));
        is = mod ? same(parts, PyTuple_GetItem(proof, 2), mod) : -1;
        Py_XDECREF(mod);
    }
    if (is < 0 && !PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Clear(); /* what cannot be looked at any more is not the same */
    return is > 0;
}

static PyObject *prove(PyObject *parts, PyObject *const *given, Py_ssize_t count) {
    if (count != 3 || !PyTuple_Check(given[0]) || PyTuple_Size(given[0]) != 3)
        return PyErr_Format(PyExc_TypeError, "a proof, a score_mod and a block_mask are wanted");
    const int is = heddle_proven(parts, given[0], given[1], given[2]);
    return is < 0 ? NULL : PyBool_FromLong(is);
}

static PyMethodDef prove_method = {"prove", (PyCFunction)(void (*)(void))prove, METH_FASTCALL,
                                   "prove((state, lists, state), score_mod, block_mask) -> bool"};

PyObject *heddle_prover(PyObject *self, PyObject *names) {
    (void)self;
    if (!PyTuple_Check(names) || PyTuple_Size(names) != PARTS)
        return PyErr_Format(PyExc_TypeError, "a tuple of %d parts is wanted", (int)PARTS);
    return PyCFunction_New(&prove_method, names);
}

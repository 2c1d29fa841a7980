/* SPDX-License-Identifier: Apache-2.0
 * A call is plain when q, k and v are tensors of PyTorch's own class, there is no option but the causal corner and the
 * scale, and nobody stands between the caller and the kernel: no mode, no functorch transform, no forward-mode level. Such a
 * call goes to heddle::attention_plain, an operator of few arguments that is below autograd, or, where a gradient is
 * wanted, to the autograd.Function around it. Every other call goes the long way through heddle::attention. */
#include "shortcut.h"

/* What heddle._plain gives, in this order. */
enum part {
    SLOW,          /* torch.ops.heddle.attention as PyTorch made it */
    CALL,          /* CALL(HANDLE, ...) is torch.ops.heddle.attention_plain(...) */
    HANDLE,        /* */
    RECORD,        /* apply of the autograd.Function that returns out and lse */
    RECORD_OUT,    /* and of the one that returns out */
    NOT_PLAIN,     /* the exception by which these two say that the long way must be gone */
    TENSOR,        /* the two classes that are plain */
    PARAMETER,     /* */
    GRAD_ENABLED,  /* torch.is_grad_enabled */
    DETERMINISTIC, /* torch.are_deterministic_algorithms_enabled */
    FORWARD_AD,    /* the dict in which _current_level is -1 without forward mode */
    AUTOCAST,      /* says whether autocast is on: then the dtypes of what is recorded and of the result differ */
    OTHERS,        /* functions without arguments that return what is false as long as nobody else takes part */
    UNWRAP,        /* torch._C._functorch.unwrap_if_dead */
    LEVEL,         /* "_current_level" */
    REQUIRES_GRAD, /* "requires_grad" */
    SHAPE,         /* "shape" */
    NDIM,          /* "ndim" */
    NUMBERS,       /* (0, 1, 2) */
    ZERO,          /* 0.0 */
    PARTS
};

static PyObject *part(PyObject *parts, enum part x) {
    return PyTuple_GetItem(parts, x);
}

/* Like all functions here that return int: 1 yes, 0 no, -1 with an exception. */
static int is_true(PyObject *value) {
    int truth = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return truth;
}

static int are_tensors(PyObject *parts, PyObject *const *qkv) {
    for (int x = 0; x < 3; x++) {
        PyObject *type = (PyObject *)Py_TYPE(qkv[x]);
        if (type != part(parts, TENSOR) && type != part(parts, PARAMETER))
            return 0;
    }
    return 1;
}

/* Nobody between the caller and the kernel. */
static int is_alone(PyObject *parts) {
    PyObject *others = part(parts, OTHERS);
    for (Py_ssize_t x = 0; x < PyTuple_Size(others); x++) {
        int taking_part = is_true(PyObject_CallNoArgs(PyTuple_GetItem(others, x)));
        if (taking_part)
            return taking_part < 0 ? -1 : 0;
    }
    PyObject *level = PyDict_GetItemWithError(part(parts, FORWARD_AD), part(parts, LEVEL));
    if (!level)
        return PyErr_Occurred() ? -1 : 0;
    const long value = PyLong_AsLong(level);
    return value == -1 && PyErr_Occurred() ? -1 : value < 0;
}

static int wants_gradient(PyObject *parts, PyObject *const *qkv) {
    int wanted = is_true(PyObject_CallNoArgs(part(parts, GRAD_ENABLED)));
    if (wanted <= 0)
        return wanted;
    wanted = 0;
    for (int x = 0; x < 3 && !wanted; x++)
        wanted = is_true(PyObject_GetAttr(qkv[x], part(parts, REQUIRES_GRAD)));
    return wanted;
}

static PyObject *record(PyObject *parts, PyObject *const *qkv, PyObject *causal, PyObject *scale, int out_only) {
    PyObject *deterministic = out_only ? PyObject_CallNoArgs(part(parts, DETERMINISTIC)) : PyBool_FromLong(0);
    PyObject *options = deterministic ? PyTuple_Pack(3, causal, scale, deterministic) : NULL;
    PyObject *given[3] = {NULL, NULL, NULL}, *result = NULL;
    int there = options != NULL;
    for (int x = 0; x < 3 && there; x++) {
        /* A tensor that a functorch transform left behind; autograd.Function does the same. */
        given[x] = PyObject_CallFunctionObjArgs(part(parts, UNWRAP), qkv[x], NULL);
        there = given[x] != NULL;
    }
    if (there)
        result = PyObject_CallFunctionObjArgs(part(parts, out_only ? RECORD_OUT : RECORD), given[0], given[1], given[2],
                                              options, NULL);
    for (int x = 0; x < 3; x++)
        Py_XDECREF(given[x]);
    Py_XDECREF(options);
    Py_XDECREF(deterministic);
    if (!result && PyErr_ExceptionMatches(part(parts, NOT_PLAIN))) {
        PyErr_Clear();
        return Py_NewRef(Py_NotImplemented);
    }
    return result;
}

/* (out, lse), or out alone; NotImplemented for a call that is not plain, or that the kernel refuses: the long way says why. */
static PyObject *attempt(PyObject *parts, PyObject *const *qkv, PyObject *causal, PyObject *scale, int out_only) {
    int fits = is_alone(parts);
    const int recording = fits > 0 ? wants_gradient(parts, qkv) : fits;
    if (recording > 0) {
        const int casts = is_true(PyObject_CallNoArgs(part(parts, AUTOCAST)));
        fits = casts < 0 ? -1 : !casts;
    }
    if (fits < 0 || recording < 0)
        return NULL;
    if (!fits)
        return Py_NewRef(Py_NotImplemented);
    if (recording)
        return record(parts, qkv, causal, scale, out_only);
    PyObject *pair = PyObject_CallFunctionObjArgs(part(parts, CALL), part(parts, HANDLE), qkv[0], qkv[1], qkv[2],
                                                  causal, scale, out_only ? Py_False : Py_True, NULL);
    if (!pair) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear();
        return Py_NewRef(Py_NotImplemented);
    }
    if (!out_only)
        return pair;
    PyObject *out = PyTuple_GetItem(pair, 0);
    Py_XINCREF(out);
    Py_DECREF(pair);
    return out;
}

/* ---------------------------------------------------------------------------------- torch.ops.heddle.attention */

/* causal and scale by name, of the very types that the schema wants. */
static int take_names(PyObject *names, PyObject **causal, PyObject **scale) {
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(names, &at, &name, &value)) {
        if (PyUnicode_CompareWithASCIIString(name, "causal") == 0 && PyLong_CheckExact(value))
            *causal = value;
        else if (PyUnicode_CompareWithASCIIString(name, "scale") == 0 && PyFloat_CheckExact(value))
            *scale = value;
        else
            return 0;
    }
    return 1;
}

static PyObject *call_operator(PyObject *parts, PyObject *args, PyObject *names) {
    PyObject *causal = PyTuple_GetItem(part(parts, NUMBERS), 0), *scale = part(parts, ZERO), *result = NULL;
    if (PyTuple_Size(args) == 3 && (!names || take_names(names, &causal, &scale))) {
        PyObject *qkv[3];
        for (int x = 0; x < 3; x++)
            qkv[x] = PyTuple_GetItem(args, x);
        if (are_tensors(parts, qkv)) {
            PyObject *pair = attempt(parts, qkv, causal, scale, 0);
            if (!pair)
                return NULL;
            if (pair != Py_NotImplemented)
                result = PyTuple_Pack(3, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1), Py_None);
            Py_DECREF(pair);
            if (pair != Py_NotImplemented)
                return result;
        }
    }
    return PyObject_Call(part(parts, SLOW), args, names);
}

/* ------------------------------------------------------------------------------------------- heddle.attention */

static PyObject *number(PyObject *parts, Py_ssize_t x) {
    return PyTuple_GetItem(part(parts, NUMBERS), x);
}

/* Fewer than four dimensions are heddle.attention's own matter. */
static int has_four(PyObject *parts, PyObject *tensor) {
    PyObject *ndim = PyObject_GetAttr(tensor, part(parts, NDIM));
    const long n = ndim ? PyLong_AsLong(ndim) : -1;
    Py_XDECREF(ndim);
    return n < 0 ? -1 : n == 4;
}

/* Do two tensors of four dimensions have the same size in dimension x? */
static int same_size(PyObject *parts, PyObject *a, PyObject *b, Py_ssize_t x) {
    PyObject *shapes[2] = {PyObject_GetAttr(a, part(parts, SHAPE)), PyObject_GetAttr(b, part(parts, SHAPE))};
    int same = shapes[0] && shapes[1] ? 1 : -1;
    for (int i = 0; i < 2 && same > 0; i++)
        same = PyTuple_Check(shapes[i]) && PyTuple_Size(shapes[i]) == 4;
    if (same > 0)
        same = PyObject_RichCompareBool(PyTuple_GetItem(shapes[0], x), PyTuple_GetItem(shapes[1], x), Py_EQ);
    Py_XDECREF(shapes[0]);
    Py_XDECREF(shapes[1]);
    return same;
}

/* The operator's number of a corner; NULL for what has to be looked at more closely (or with an exception). */
static PyObject *corner(PyObject *parts, PyObject *const *qkv, PyObject *causal) {
    if (causal == Py_None || causal == Py_False)
        return number(parts, 0);
    if (causal == Py_True)
        return same_size(parts, qkv[0], qkv[1], 2) > 0 ? number(parts, 1) : NULL;
    if (!PyUnicode_CheckExact(causal))
        return NULL;
    if (PyUnicode_CompareWithASCIIString(causal, "top_left") == 0)
        return number(parts, 1);
    return PyUnicode_CompareWithASCIIString(causal, "bottom_right") == 0 ? number(parts, 2) : NULL;
}

static PyObject *call_attention(PyObject *parts, PyObject *args) {
    PyObject *qkv[3], *causal, *scale, *same_heads = Py_False, *which = NULL;
    if (!PyArg_UnpackTuple(args, "attention", 5, 6, &qkv[0], &qkv[1], &qkv[2], &causal, &scale, &same_heads))
        return NULL;
    if (scale == Py_None)
        scale = part(parts, ZERO);
    else if (!PyFloat_CheckExact(scale) || !(PyFloat_AsDouble(scale) > 0 && PyFloat_AsDouble(scale) < 1e300))
        return Py_NewRef(Py_NotImplemented);
    if (are_tensors(parts, qkv) && has_four(parts, qkv[0]) > 0 &&
        (same_heads == Py_False || same_size(parts, qkv[0], qkv[1], 1) > 0))
        which = corner(parts, qkv, causal);
    if (which)
        return attempt(parts, qkv, which, scale, 1);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Clear(); /* a nested tensor has no shape */
    return Py_NewRef(Py_NotImplemented);
}

/* ------------------------------------------------------------------------------------------------------- both */

static PyMethodDef operator_method = {
    "attention", (PyCFunction)(void (*)(void))call_operator, METH_VARARGS | METH_KEYWORDS,
    "torch.ops.heddle.attention: plain calls the short way, all others as PyTorch does."};
static PyMethodDef attention_method = {
    "attention", call_attention, METH_VARARGS,
    "attention(q, k, v, causal, scale, same_heads=False) -> out, or NotImplemented where the long way must be gone."};

PyObject *heddle_shortcut(PyObject *self, PyObject *parts) {
    (void)self;
    if (!PyTuple_Check(parts) || PyTuple_Size(parts) != PARTS)
        return PyErr_Format(PyExc_TypeError, "a tuple of %d parts is wanted", (int)PARTS);
    PyObject *operation = PyCFunction_New(&operator_method, parts);
    PyObject *attention = operation ? PyCFunction_New(&attention_method, parts) : NULL;
    PyObject *both = attention ? PyTuple_Pack(2, operation, attention) : NULL;
    Py_XDECREF(operation);
    Py_XDECREF(attention);
    return both;
}

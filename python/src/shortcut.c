/* SPDX-License-Identifier: Apache-2.0
 * A call is plain when q, k and v are tensors of PyTorch's own class, there is no option but the causal corner and the
 * scale, and nobody stands between the caller and the kernel: no mode, no functorch transform, no forward-mode level. Such a
 * call goes to heddle::attention_plain, an operator of few arguments that is below autograd, or, where a gradient is
 * wanted, to the autograd.Function around it. A call of heddle.attention with options that need no work before the kernel
 * has them (tensors of PyTorch's own class and of the right dtype; numbers) goes to heddle::attention_options in the same
 * way. Every other call goes the long way. */
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
    FULL,          /* CALL(FULL, ...) is torch.ops.heddle.attention_options(...) */
    OPTIONS,       /* apply of the autograd.Function that takes options and returns out and lse */
    OPTIONS_OUT,   /* and of the one that returns out */
    NEW_RNG,       /* heddle._plain.new_rng_state */
    DTYPE,         /* "dtype" */
    DEVICE,        /* "device" */
    INT32,         /* torch.int32 */
    REAL,          /* torch.float32 */
    DTYPES,        /* those of q: three */
    NEW_EMPTY,     /* "new_empty" */
    PARTS
};

static PyObject *part(PyObject *parts, enum part x) {
    return PyTuple_GetItem(parts, x);
}

static PyObject *number(PyObject *parts, Py_ssize_t x) {
    return PyTuple_GetItem(part(parts, NUMBERS), x);
}

/* Like all functions here that return int: 1 yes, 0 no, -1 with an exception. */
static int is_true(PyObject *value) {
    int truth = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return truth;
}

int heddle_is_tensor(PyObject *parts, PyObject *value) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    return type == part(parts, TENSOR) || type == part(parts, PARAMETER);
}

static int are_tensors(PyObject *parts, PyObject *const *qkv) {
    return heddle_is_tensor(parts, qkv[0]) && heddle_is_tensor(parts, qkv[1]) && heddle_is_tensor(parts, qkv[2]);
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

/* out, lse and, in the place of weights, which are not asked for, a tensor of no elements, as the operator itself has it. */
static PyObject *with_empty(PyObject *parts, PyObject *pair) {
    PyObject *out = PyTuple_GetItem(pair, 0);
    PyObject *empty = PyObject_CallMethodObjArgs(out, part(parts, NEW_EMPTY), number(parts, 0), NULL);
    PyObject *result = empty ? PyTuple_Pack(3, out, PyTuple_GetItem(pair, 1), empty) : NULL;
    Py_XDECREF(empty);
    return result;
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
                result = with_empty(parts, pair);
            Py_DECREF(pair);
            if (pair != Py_NotImplemented)
                return result;
        }
    }
    return PyObject_Call(part(parts, SLOW), args, names);
}

/* ------------------------------------------------------------------------------------------- heddle.attention */

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

/* The operator's scale; NULL as above. */
static PyObject *scale_of(PyObject *parts, PyObject *scale) {
    if (scale == Py_None)
        return part(parts, ZERO);
    return PyFloat_CheckExact(scale) && PyFloat_AsDouble(scale) > 0 && PyFloat_AsDouble(scale) < 1e300 ? scale : NULL;
}

/* NotImplemented, also after an exception that the long way will have in its own words; NULL for what is no error. */
static PyObject *go_long(void) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Clear();
    return Py_NewRef(Py_NotImplemented);
}

static PyObject *call_attention(PyObject *parts, PyObject *args) {
    PyObject *qkv[3], *causal, *scale, *same_heads = Py_False, *which = NULL;
    if (!PyArg_UnpackTuple(args, "attention", 5, 6, &qkv[0], &qkv[1], &qkv[2], &causal, &scale, &same_heads))
        return NULL;
    scale = scale_of(parts, scale);
    if (scale && are_tensors(parts, qkv) && has_four(parts, qkv[0]) > 0 &&
        (same_heads == Py_False || same_size(parts, qkv[0], qkv[1], 1) > 0))
        which = corner(parts, qkv, causal);
    if (which)
        return attempt(parts, qkv, which, scale, 1);
    return go_long(); /* a nested tensor has no shape */
}

/* ---------------------------------------------------------------------------------- heddle.attention with options */

/* The operator's arguments behind q, k and v. */
#define TENSOR(id, name, field) A_##id,
#define NUMBER(id, schema, letter) A_##id,
enum {
#include "attention_arguments.def"
    ARGUMENTS
};

_Static_assert(ARGUMENTS - A_MAX_SEQLEN_Q == 20, "put_options() has a value for each number");

/* What call_options() takes, in this order. */
enum {
    G_Q,
    G_K,
    G_V,
    G_CAUSAL,
    G_WINDOW,
    G_SCALE,
    G_SOFTCAP,
    G_BIAS,
    G_MASK,
    G_ALIBI_SLOPES,
    G_SINKS,
    G_DROPOUT,
    G_RNG_STATE,
    G_SEQLENS_Q,
    G_SEQLENS_K,
    G_RETURN_LSE,
    G_DETERMINISTIC,
    G_TF32,
    G_SAME_HEADS,
    GIVEN
};

/* to[at] = value, which is stolen; false for NULL. */
static int put(PyObject **to, int at, PyObject *value) {
    to[at] = value;
    return value != NULL;
}

static int put_window(PyObject **to, PyObject *window) {
    const long long farthest = 1LL << 62;
    if (window == Py_None)
        return put(to, A_WINDOW_LEFT, PyLong_FromLong(-1)) && put(to, A_WINDOW_RIGHT, PyLong_FromLong(-1));
    if (!PyTuple_CheckExact(window) || PyTuple_Size(window) != 2)
        return 0;
    for (int x = 0; x < 2; x++) {
        PyObject *side = PyTuple_GetItem(window, x);
        int far = 0;
        long long value = -1;
        if (side != Py_None && !PyLong_CheckExact(side))
            return 0;
        if (side != Py_None)
            value = PyLong_AsLongLongAndOverflow(side, &far);
        if (far || value > farthest || !put(to, A_WINDOW_LEFT + x, PyLong_FromLongLong(value < 0 ? -1 : value)))
            return 0;
    }
    return 1;
}

static int put_float(PyObject **to, int at, PyObject *value) {
    if (PyFloat_CheckExact(value))
        return put(to, at, Py_NewRef(value));
    return PyLong_CheckExact(value) && put(to, at, PyNumber_Float(value));
}

static int put_bool(PyObject **to, int at, PyObject *value) {
    return PyBool_Check(value) && put(to, at, Py_NewRef(value));
}

/* An optional tensor; dtype NULL: the kernel looks at it. */
static int put_tensor(PyObject *parts, PyObject **to, int at, PyObject *value, PyObject *dtype) {
    if (value != Py_None) {
        if (!heddle_is_tensor(parts, value))
            return 0;
        PyObject *its = dtype ? PyObject_GetAttr(value, part(parts, DTYPE)) : NULL;
        Py_XDECREF(its);
        if (its != dtype) /* they are objects that stay */
            return 0;
    }
    return put(to, at, Py_NewRef(value));
}

/* None for the tensors that no call on this way has. */
static int put_nones(PyObject **to) {
    for (int x = 0; x < A_MAX_SEQLEN_Q; x++)
        if (!to[x])
            put(to, x, Py_NewRef(Py_None));
    return 1;
}

/* The operator's arguments behind v, for a q of this dtype; to[] begins as NULLs. */
static int put_options(PyObject *parts, PyObject *const *given, PyObject *dtype, PyObject **to) {
    PyObject *scale = scale_of(parts, given[G_SCALE]), *which = corner(parts, given, given[G_CAUSAL]);
    if (!scale || !which)
        return 0;
    for (int x = A_Q_OFFSET; x < ARGUMENTS; x++) /* a whole problem, without lists of blocks, on all of a device */
        put(to, x, Py_NewRef(number(parts, 0)));
    PyObject *deterministic = given[G_DETERMINISTIC] == Py_None ? PyObject_CallNoArgs(part(parts, DETERMINISTIC))
                                                                : Py_NewRef(given[G_DETERMINISTIC]);
    const int is_bool = deterministic && put_bool(to, A_DETERMINISTIC, deterministic);
    Py_XDECREF(deterministic);
    return is_bool && put(to, A_CAUSAL, Py_NewRef(which)) && put(to, A_SCALE, Py_NewRef(scale)) &&
           put(to, A_MAX_SEQLEN_Q, Py_NewRef(number(parts, 0))) &&
           put(to, A_MAX_SEQLEN_K, Py_NewRef(number(parts, 0))) && put_window(to, given[G_WINDOW]) &&
           put_float(to, A_SOFTCAP, given[G_SOFTCAP]) && put_float(to, A_DROPOUT, given[G_DROPOUT]) &&
           put(to, A_RETURN_WEIGHTS, Py_NewRef(Py_False)) && put_bool(to, A_TF32, given[G_TF32]) &&
           put_tensor(parts, to, A_ALIBI_SLOPES, given[G_ALIBI_SLOPES], part(parts, REAL)) &&
           put_tensor(parts, to, A_SINKS, given[G_SINKS], part(parts, REAL)) &&
           put_tensor(parts, to, A_SEQLENS_Q, given[G_SEQLENS_Q], part(parts, INT32)) &&
           put_tensor(parts, to, A_SEQLENS_K, given[G_SEQLENS_K], part(parts, INT32)) &&
           put_tensor(parts, to, A_RNG_STATE, given[G_RNG_STATE], NULL) &&
           put_tensor(parts, to, A_BIAS, given[G_BIAS], dtype) && put_tensor(parts, to, A_MASK, given[G_MASK], NULL) &&
           put_nones(to);
}

/* The dtype of q if it is one of the three of the kernels (borrowed: dtypes stay), else NULL. */
static PyObject *dtype_of(PyObject *parts, PyObject *q) {
    PyObject *dtype = PyObject_GetAttr(q, part(parts, DTYPE)), *found = NULL;
    for (Py_ssize_t x = 0; dtype && x < PyTuple_Size(part(parts, DTYPES)); x++)
        if (dtype == PyTuple_GetItem(part(parts, DTYPES), x))
            found = dtype;
    Py_XDECREF(dtype);
    return found;
}

static int requires_gradient(PyObject *parts, PyObject *tensor) {
    return tensor == Py_None ? 0 : is_true(PyObject_GetAttr(tensor, part(parts, REQUIRES_GRAD)));
}

/* 1: a gradient is wanted that there is; 0: none; -1: the long way. */
static int records(PyObject *parts, PyObject *const *qkv, PyObject *const *to) {
    PyObject *const from[] = {qkv[0], qkv[1], qkv[2], to[A_BIAS], to[A_SINKS]};
    const int enabled = is_true(PyObject_CallNoArgs(part(parts, GRAD_ENABLED)));
    if (enabled <= 0)
        return enabled;
    if (requires_gradient(parts, to[A_ALIBI_SLOPES]) != 0)
        return -1; /* there is none: the long way says so */
    for (size_t x = 0; x < sizeof from / sizeof *from; x++) {
        const int wanted = requires_gradient(parts, from[x]);
        if (wanted)
            return wanted;
    }
    return 0;
}

/* out or (out, lse). */
static PyObject *call_full(PyObject *parts, PyObject *const *qkv, PyObject *const *to, int lse) {
    PyObject *args = PyTuple_New(5 + ARGUMENTS);
    if (!args)
        return NULL;
    PyTuple_SetItem(args, 0, Py_NewRef(part(parts, FULL)));
    for (int x = 0; x < 3 + ARGUMENTS; x++)
        PyTuple_SetItem(args, 1 + x, Py_NewRef(x < 3 ? qkv[x] : to[x - 3]));
    PyTuple_SetItem(args, 4 + ARGUMENTS, PyBool_FromLong(lse));
    PyObject *pair = PyObject_CallObject(part(parts, CALL), args);
    Py_DECREF(args);
    if (!pair || lse)
        return pair;
    PyObject *out = PyTuple_GetItem(pair, 0);
    Py_XINCREF(out);
    Py_DECREF(pair);
    return out;
}

/* apply(q, k, v, bias, sinks, options): out, or (out, lse). */
static PyObject *record_options(PyObject *parts, PyObject *const *qkv, PyObject **to, int lse) {
    PyObject *all[6] = {NULL, NULL, NULL, NULL, NULL, NULL}, *result = NULL;
    int there = 1;
    for (int x = 0; x < A_MAX_SEQLEN_Q && there; x++)
        if (to[x] != Py_None) { /* as in record() */
            PyObject *tensor = PyObject_CallFunctionObjArgs(part(parts, UNWRAP), to[x], NULL);
            Py_DECREF(to[x]);
            there = put(to, x, tensor);
        }
    for (int x = 0; x < 3 && there; x++)
        there = put(all, x, PyObject_CallFunctionObjArgs(part(parts, UNWRAP), qkv[x], NULL));
    PyObject *options = there ? PyTuple_New(ARGUMENTS) : NULL;
    if (options) {
        for (int x = 0; x < ARGUMENTS; x++)
            PyTuple_SetItem(options, x, Py_NewRef(to[x]));
        all[3] = Py_NewRef(to[A_BIAS]);
        all[4] = Py_NewRef(to[A_SINKS]);
        all[5] = options;
        result = PyObject_CallFunctionObjArgs(part(parts, lse ? OPTIONS : OPTIONS_OUT), all[0], all[1], all[2], all[3],
                                              all[4], all[5], NULL);
    }
    for (int x = 0; x < 6; x++)
        Py_XDECREF(all[x]);
    return result;
}

/* int64 [2] for dropout without a state of its own. */
static PyObject *draw_state(PyObject *parts, PyObject *q) {
    PyObject *device = PyObject_GetAttr(q, part(parts, DEVICE));
    PyObject *drawn = device ? PyObject_CallFunctionObjArgs(part(parts, NEW_RNG), device, NULL) : NULL;
    Py_XDECREF(device);
    return drawn;
}

/* records(), where nobody else takes part. */
static int is_ready(PyObject *parts, PyObject *const *qkv, PyObject *const *to) {
    const int recording = records(parts, qkv, to);
    if (recording < 0 || is_true(PyObject_CallNoArgs(part(parts, AUTOCAST))) || is_alone(parts) <= 0)
        return -1;
    return recording;
}

/* NotImplemented where the kernel refuses. */
static PyObject *run(PyObject *parts, PyObject *const *qkv, PyObject **to, int lse, int recording) {
    PyObject *result = recording ? record_options(parts, qkv, to, lse) : call_full(parts, qkv, to, lse);
    if (result || !PyErr_ExceptionMatches(recording ? part(parts, NOT_PLAIN) : PyExc_Exception))
        return result;
    PyErr_Clear();
    return Py_NewRef(Py_NotImplemented);
}

/* With dropout and no state of a generator one is drawn here. If the kernel then refuses, the answer is a tuple of that state
 * alone: the long way must not draw another. */
static PyObject *attempt_options(PyObject *parts, PyObject *const *given, PyObject **to) {
    const int lse = given[G_RETURN_LSE] == Py_True;
    PyObject *dtype = dtype_of(parts, given[G_Q]), *drawn = NULL;
    if (!dtype || !PyBool_Check(given[G_RETURN_LSE]) || !put_options(parts, given, dtype, to))
        return go_long();
    const int recording = is_ready(parts, given, to);
    if (recording < 0)
        return go_long();
    if (PyFloat_AsDouble(to[A_DROPOUT]) != 0 && to[A_RNG_STATE] == Py_None) {
        drawn = draw_state(parts, given[G_Q]);
        if (!drawn)
            return go_long();
        Py_DECREF(to[A_RNG_STATE]);
        to[A_RNG_STATE] = drawn;
    }
    PyObject *result = run(parts, given, to, lse, recording);
    if (!drawn || result != Py_NotImplemented)
        return result;
    Py_DECREF(result);
    return PyTuple_Pack(1, to[A_RNG_STATE]);
}

static PyObject *call_options(PyObject *parts, PyObject *const *given, Py_ssize_t count) {
    PyObject *to[ARGUMENTS] = {NULL}, *result;
    if (count != GIVEN)
        return PyErr_Format(PyExc_TypeError, "%d arguments are wanted", (int)GIVEN);
    if (are_tensors(parts, given) && has_four(parts, given[G_Q]) > 0 &&
        (given[G_SAME_HEADS] == Py_False || same_size(parts, given[G_Q], given[G_K], 1) > 0))
        result = attempt_options(parts, given, to);
    else
        result = go_long();
    for (int x = 0; x < ARGUMENTS; x++)
        Py_XDECREF(to[x]);
    return result;
}

/* ------------------------------------------------------------------------- options that are the same many times */

/* The operator's arguments behind v as a tuple. */
static PyObject *prepare(PyObject *parts, PyObject *const *given, Py_ssize_t count) {
    PyObject *to[ARGUMENTS] = {NULL}, *prepared = NULL;
    if (count != GIVEN)
        return PyErr_Format(PyExc_TypeError, "%d arguments are wanted", (int)GIVEN);
    PyObject *dtype = are_tensors(parts, given) && has_four(parts, given[G_Q]) > 0 ? dtype_of(parts, given[G_Q]) : NULL;
    if (dtype && put_options(parts, given, dtype, to))
        prepared = PyTuple_New(ARGUMENTS);
    for (int x = 0; prepared && x < ARGUMENTS; x++)
        PyTuple_SetItem(prepared, x, Py_NewRef(to[x]));
    for (int x = 0; x < ARGUMENTS; x++)
        Py_XDECREF(to[x]);
    return prepared ? prepared : go_long();
}

static PyObject *attend(PyObject *parts, PyObject *const *qkv, PyObject *prepared, PyObject *bias, PyObject **to,
                        int lse) {
    if (bias != Py_None && !heddle_is_tensor(parts, bias))
        return go_long();
    for (int x = 0; x < ARGUMENTS; x++)
        if (x != A_DETERMINISTIC)
            put(to, x, Py_NewRef(x == A_BIAS && bias != Py_None ? bias : PyTuple_GetItem(prepared, x)));
    if (!put(to, A_DETERMINISTIC, PyObject_CallNoArgs(part(parts, DETERMINISTIC))))
        return go_long();
    const int recording = is_ready(parts, qkv, to);
    return recording < 0 ? go_long() : run(parts, qkv, to, lse, recording);
}

PyObject *heddle_attend(PyObject *parts, PyObject *const *qkv, PyObject *prepared, PyObject *bias, int plain, int lse) {
    if (!are_tensors(parts, qkv))
        return go_long();
    if (plain && !lse)
        return attempt(parts, qkv, PyTuple_GetItem(prepared, A_CAUSAL), PyTuple_GetItem(prepared, A_SCALE), 1);
    PyObject *to[ARGUMENTS] = {NULL};
    PyObject *result = attend(parts, qkv, prepared, bias, to, lse);
    for (int x = 0; x < ARGUMENTS; x++)
        Py_XDECREF(to[x]);
    return result;
}

/* -------------------------------------------------------------------------------------------------------- all */

static PyMethodDef operator_method = {
    "attention", (PyCFunction)(void (*)(void))call_operator, METH_VARARGS | METH_KEYWORDS,
    "torch.ops.heddle.attention: plain calls the short way, all others as PyTorch does."};
static PyMethodDef attention_method = {
    "attention", call_attention, METH_VARARGS,
    "attention(q, k, v, causal, scale, same_heads=False) -> out, or NotImplemented where the long way must be gone."};
static PyMethodDef options_method = {"attention_options", (PyCFunction)(void (*)(void))call_options, METH_FASTCALL,
                                     "attention_options(q, k, v, causal, window, scale, softcap, bias, mask, "
                                     "alibi_slopes, sinks, dropout, rng_state, seqlens_q,\n"
                                     "seqlens_k, return_lse, deterministic, tf32, same_heads) -> out or (out, lse); "
                                     "NotImplemented where the long way must be\n"
                                     "gone; (rng_state,) where it must be gone with the state that was drawn."};

static PyMethodDef prepare_method = {"prepare", (PyCFunction)(void (*)(void))prepare, METH_FASTCALL,
                                     "prepare(what attention_options is given) -> the operator's arguments behind v, "
                                     "or NotImplemented where the long way must be gone"};

PyObject *heddle_shortcut(PyObject *self, PyObject *parts) {
    (void)self;
    if (!PyTuple_Check(parts) || PyTuple_Size(parts) != PARTS)
        return PyErr_Format(PyExc_TypeError, "a tuple of %d parts is wanted", (int)PARTS);
    PyObject *operation = PyCFunction_New(&operator_method, parts);
    PyObject *attention = operation ? PyCFunction_New(&attention_method, parts) : NULL;
    PyObject *options = attention ? PyCFunction_New(&options_method, parts) : NULL;
    PyObject *preparing = options ? PyCFunction_New(&prepare_method, parts) : NULL;
    PyObject *all = preparing ? PyTuple_Pack(4, operation, attention, options, preparing) : NULL;
    Py_XDECREF(operation);
    Py_XDECREF(attention);
    Py_XDECREF(options);
    Py_XDECREF(preparing);
    return all;
}

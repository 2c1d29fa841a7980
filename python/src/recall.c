/* SPDX-License-Identifier: Apache-2.0
 * heddle.flex_attention once more: what an earlier call found out (heddle/_flex_kept.py) is looked up, proven to be what would be
 * found now, and used. NotImplemented is the answer where there is nothing of that kind. */
#include "recall.h"

#include "proof.h"
#include "shortcut.h"

/* What heddle._flex_kept gives, in this order. */
enum part {
    KNOWN,        /* what has `shelf`, by a BlockMask's id */
    FUNCTIONS,    /* the shelf of calls without a BlockMask */
    LATEST,       /* what was used last, by a BlockMask's id, or by None */
    SHORT,        /* what shortcut.c works with, or None: no call goes a short way */
    REFUSED,      /* REFUSED(kept, q, k, v, bias, return_lse) where that leaves a call to others */
    NAMES,        /* what proof.c works with */
    GRAD_ENABLED, /* torch.is_grad_enabled */
    STREAM,       /* of a device's number: PyTorch's current stream */
    CAPTURING,    /* whether a CUDA graph is captured on it */
    SHELF,        /* "shelf" */
    CODE,         /* "__code__" */
    SHAPE,        /* descriptors of tensors */
    DTYPE,
    DEVICE,
    READY, /* "ready" */
    OTHER, /* "other" */
    PARTS
};

/* What a call is given, in this order. */
enum { G_Q, G_K, G_V, G_SCORE_MOD, G_BLOCK_MASK, G_SCALE, G_GQA, G_RETURN_LSE, GIVEN };

/* Kept.ready, and its place, in their order. */
enum { R_PROOF, R_GRADED, R_DEVICE, R_STREAM, R_RECIPE, R_PLACE, R_PLAIN, R_PREPARED };
enum { P_QUERY, P_KEY, P_DTYPE, P_DEVICE, P_SCALE, P_GQA, PLACE };

static PyObject *part(PyObject *parts, enum part x) {
    return PyTuple_GetItem(parts, x);
}

/* A BlockMask's id, as Python has it, or None. */
static PyObject *id_of(PyObject *value) {
    return value == Py_None ? Py_NewRef(Py_None) : PyLong_FromVoidPtr(value);
}

static PyObject *id_of_code(PyObject *parts, PyObject *score_mod) {
    PyObject *code = score_mod == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(score_mod, part(parts, CODE));
    PyObject *id = code ? id_of(code) : NULL;
    Py_XDECREF(code);
    return id;
}

/* What a place is made of, of this call; false with an exception. */
static int read_place(PyObject *parts, PyObject *const *given, PyObject **place) {
    place[P_QUERY] = heddle_get(part(parts, SHAPE), given[G_Q]);
    place[P_KEY] = heddle_get(part(parts, SHAPE), given[G_K]);
    place[P_DTYPE] = heddle_get(part(parts, DTYPE), given[G_Q]);
    place[P_DEVICE] = heddle_get(part(parts, DEVICE), given[G_Q]);
    place[P_SCALE] = Py_NewRef(given[G_SCALE]);
    place[P_GQA] = Py_NewRef(given[G_GQA]);
    return place[P_QUERY] && place[P_KEY] && place[P_DTYPE] && place[P_DEVICE];
}

static int is_of(PyObject *known, PyObject *const *place) {
    for (int x = 0; x < PLACE; x++) {
        PyObject *its = PyTuple_GetItem(known, x);
        if (its == place[x])
            continue;
        const int number = PyFloat_CheckExact(its) && PyFloat_CheckExact(place[x]);
        if ((x == P_SCALE && !number) || x == P_GQA || PyObject_RichCompareBool(its, place[x], Py_EQ) <= 0) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* New references all, or NULL, with an exception or without. */
static PyObject *latest(PyObject *parts, PyObject *mask, PyObject *const *place) {
    PyObject *kept = PyDict_GetItemWithError(part(parts, LATEST), mask);
    PyObject *ready = kept ? PyObject_GetAttr(kept, part(parts, READY)) : NULL;
    const int is = ready && is_of(PyTuple_GetItem(ready, R_PLACE), place);
    Py_XDECREF(ready);
    return is ? Py_NewRef(kept) : NULL;
}

static PyObject *on_shelf(PyObject *parts, PyObject *const *given, PyObject *mask, PyObject *const *place) {
    PyObject *known = mask == Py_None ? NULL : PyDict_GetItemWithError(part(parts, KNOWN), mask), *kept = NULL;
    PyObject *shelf = mask == Py_None ? Py_NewRef(part(parts, FUNCTIONS))
                      : known         ? PyObject_GetAttr(known, part(parts, SHELF))
                                      : NULL;
    PyObject *code = shelf ? id_of_code(parts, given[G_SCORE_MOD]) : NULL;
    PyObject *key =
        code ? PyTuple_Pack(1 + PLACE, code, place[0], place[1], place[2], place[3], place[4], place[5]) : NULL;
    if (key)
        kept = PyDict_GetItemWithError(shelf, key);
    Py_XINCREF(kept);
    Py_XDECREF(key);
    Py_XDECREF(code);
    Py_XDECREF(shelf);
    return kept;
}

/* The GPU has made the tensors before it uses them, and no CUDA graph goes on using what may be freed. None is ever captured on
 * the default stream, which is 0. 1, 0, or -1 with an exception. */
static int on_its_stream(PyObject *parts, PyObject *ready) {
    PyObject *device = PyTuple_GetItem(ready, R_DEVICE);
    if (device == Py_None)
        return 1;
    PyObject *stream = PyObject_CallFunctionObjArgs(part(parts, STREAM), device, NULL);
    int is = stream ? PyObject_RichCompareBool(stream, PyTuple_GetItem(ready, R_STREAM), Py_EQ) : -1;
    if (is > 0 && PyObject_IsTrue(stream)) {
        PyObject *capturing = PyObject_CallNoArgs(part(parts, CAPTURING));
        is = capturing ? !PyObject_IsTrue(capturing) : -1;
        Py_XDECREF(capturing);
    }
    Py_XDECREF(stream);
    return is;
}

/* Whether it is of calls with gradients, where that matters, as this one. */
static int is_of_kind(PyObject *parts, PyObject *ready) {
    PyObject *graded = PyTuple_GetItem(ready, R_GRADED);
    if (graded == Py_None)
        return 1;
    PyObject *enabled = PyObject_CallNoArgs(part(parts, GRAD_ENABLED));
    Py_XDECREF(enabled); /* one of two objects that stay */
    return enabled ? enabled == graded : -1;
}

/* kept, which is stolen, or the one beside it; *ready is its record. NULL: neither can be used here and now. */
static PyObject *usable(PyObject *parts, PyObject *kept, PyObject **ready) {
    for (;;) {
        *ready = kept ? PyObject_GetAttr(kept, part(parts, READY)) : NULL;
        const int is = *ready && PyTuple_CheckExact(*ready) ? is_of_kind(parts, *ready) : -1;
        if (is > 0 && on_its_stream(parts, *ready) > 0)
            return kept;
        PyObject *other = is ? NULL : PyObject_GetAttr(kept, part(parts, OTHER));
        Py_XDECREF(*ready);
        Py_XDECREF(kept);
        if (!other || other == Py_None) {
            Py_XDECREF(other);
            return NULL;
        }
        kept = other;
    }
}

static PyObject *use(PyObject *parts, PyObject *kept, PyObject *ready, PyObject *const *given) {
    PyObject *recipe = PyTuple_GetItem(ready, R_RECIPE), *prepared = PyTuple_GetItem(ready, R_PREPARED);
    PyObject *bias = recipe == Py_None ? Py_NewRef(Py_None) : PyObject_CallNoArgs(recipe), *out = NULL;
    if (!bias)
        return NULL;
    if (part(parts, SHORT) == Py_None || prepared == Py_None || !PyBool_Check(given[G_RETURN_LSE]))
        out = Py_NewRef(Py_NotImplemented);
    else
        out = heddle_attend(part(parts, SHORT), given, prepared, bias, PyTuple_GetItem(ready, R_PLAIN) == Py_True,
                            given[G_RETURN_LSE] == Py_True);
    if (out == Py_NotImplemented) {
        Py_DECREF(out);
        out = PyObject_CallFunctionObjArgs(part(parts, REFUSED), kept, given[G_Q], given[G_K], given[G_V], bias,
                                           given[G_RETURN_LSE], NULL);
    }
    Py_DECREF(bias);
    return out;
}

/* 1: *out is the result, or NULL with an exception; 0: there is nothing for this call; -1: an exception on the way to that. */
static int attempt(PyObject *parts, PyObject *kept, PyObject *const *given, PyObject **out) {
    PyObject *ready = NULL;
    kept = usable(parts, kept, &ready);
    if (!kept)
        return PyErr_Occurred() ? -1 : 0;
    const int proven =
        heddle_proven(part(parts, NAMES), PyTuple_GetItem(ready, R_PROOF), given[G_SCORE_MOD], given[G_BLOCK_MASK]);
    if (proven > 0)
        *out = use(parts, kept, ready, given);
    Py_DECREF(ready);
    Py_DECREF(kept);
    return proven;
}

static PyObject *recall(PyObject *parts, PyObject *const *given, Py_ssize_t count) {
    PyObject *place[PLACE] = {NULL}, *mask = NULL, *kept, *out = NULL;
    int found = 0;
    if (count != GIVEN)
        return PyErr_Format(PyExc_TypeError, "%d arguments are wanted", (int)GIVEN);
    if (PyTuple_Check(part(parts, SHORT)) && !heddle_is_tensor(part(parts, SHORT), given[G_Q]))
        return Py_NewRef(Py_NotImplemented);
    mask = id_of(given[G_BLOCK_MASK]);
    const int told = mask && read_place(parts, given, place);
    if (told && (kept = latest(parts, mask, place)))
        found = attempt(parts, kept, given, &out);
    if (told && !found && (kept = on_shelf(parts, given, mask, place))) {
        Py_INCREF(kept);
        found = attempt(parts, kept, given, &out);
        if (out)
            PyDict_SetItem(part(parts, LATEST), mask, kept);
        Py_DECREF(kept);
    }
    for (int x = 0; x < PLACE; x++)
        Py_XDECREF(place[x]);
    Py_XDECREF(mask);
    if (found > 0)
        return out;
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Clear(); /* of what is no tensor, or no function of Python */
    return Py_NewRef(Py_NotImplemented);
}

static PyMethodDef recall_method = {
    "recall", (PyCFunction)(void (*)(void))recall, METH_FASTCALL,
    "recall(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse) -> "
    "the result of an earlier call's options, or NotImplemented"};

PyObject *heddle_recaller(PyObject *self, PyObject *parts) {
    (void)self;
    if (!PyTuple_Check(parts) || PyTuple_Size(parts) != PARTS)
        return PyErr_Format(PyExc_TypeError, "a tuple of %d parts is wanted", (int)PARTS);
    return PyCFunction_New(&recall_method, parts);
}

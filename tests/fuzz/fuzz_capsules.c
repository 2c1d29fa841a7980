/* SPDX-License-Identifier: Apache-2.0
 * Bytes to what Python hands to heddle._C, in an embedded interpreter: DLPack capsules of every shape, type and version,
 * tensors that are lent, and descriptions as dicts. What comes back says what went in, or an exception is set. */
#include "../../python/src/cuda_memory.c"

#include "bytes.h"

#include <string.h>

PyMODINIT_FUNC PyInit__C(void);

static PyObject *module;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    MUST(PyImport_AppendInittab("_C", PyInit__C) == 0);
    Py_InitializeEx(0);
    module = PyImport_ImportModule("_C");
    MUST(module);
    return 0;
}

/* Either a result or an exception, never both or neither; the exception is forgotten. */
static PyObject *checked(PyObject *result) {
    MUST(!result == (PyErr_Occurred() != NULL));
    MUST(result || !PyErr_ExceptionMatches(PyExc_SystemError)); /* Python's word for a wrong use of its API */
    PyErr_Clear();
    return result;
}

static PyObject *call(const char *name, PyObject *arguments) {
    PyObject *method = PyObject_GetAttrString(module, name);
    MUST(method && arguments);
    PyObject *result = checked(PyObject_CallObject(method, arguments));
    Py_DECREF(method);
    Py_DECREF(arguments);
    return result;
}

/* ----------------------------------------------------------------------------------------------------------- view */

/* As python/src/module.c has it, from https://dmlc.github.io/dlpack. */
typedef struct versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct versioned *);
    uint64_t flags;
    dl_tensor tensor;
} versioned;

enum { MOST_DIMENSIONS = 12 };

static dl_tensor read_tensor(bytes *b, int64_t *numbers) {
    dl_tensor t = {.data = (void *)(uintptr_t)take_number(b, 6),
                   .device_type = (int32_t)take_number(b, 1),
                   .device_id = (int32_t)take_between(b, -1, 2),
                   .ndim = (int32_t)take_between(b, -2, MOST_DIMENSIONS),
                   .type_code = (uint8_t)take_number(b, 1),
                   .type_bits = (uint8_t)take_number(b, 1),
                   .lanes = (uint16_t)take_between(b, 0, 3),
                   .byte_offset = take_bit(b) ? take_number(b, 8) : 0};
    t.lanes = t.lanes > 1 ? (uint16_t)take_number(b, 2) : 1;
    for (int i = 0; i < 2 * MOST_DIMENSIONS; i++)
        numbers[i] = take_bit(b) ? (int64_t)take_number(b, 8) : take_between(b, 0, 5);
    return t;
}

static void check_numbers(PyObject *tuple, const int64_t *numbers, Py_ssize_t n) {
    MUST(PyTuple_Size(tuple) == n);
    for (Py_ssize_t i = 0; i < n; i++)
        MUST(PyLong_AsLongLong(PyTuple_GetItem(tuple, i)) == numbers[i]);
}

static void fuzz_view(bytes *b) {
    static const char *const names[] = {"dltensor", "dltensor_versioned", "used_dltensor", "other"};
    int64_t numbers[2 * MOST_DIMENSIONS];
    const dl_tensor read = read_tensor(b, numbers);
    const Py_ssize_t n = read.ndim > 0 ? read.ndim : 0;
    versioned *v = calloc(1, sizeof *v);
    int64_t *shape = malloc(n ? (size_t)n * sizeof *shape : 1), *strides = malloc(n ? (size_t)n * sizeof *strides : 1);
    MUST(v && shape && strides);
    memcpy(shape, numbers, (size_t)n * sizeof *shape);
    memcpy(strides, numbers + n, (size_t)n * sizeof *strides);
    const int64_t which = take_between(b, 0, 3), strided = take_bit(b);
    v->major = (uint32_t)take_between(b, 0, 2);
    v->flags = take_number(b, 1);
    v->tensor = read;
    v->tensor.shape = n || take_bit(b) ? shape : NULL;
    v->tensor.strides = strided ? strides : NULL;
    dl_tensor *plain = malloc(sizeof *plain); /* the older struct begins with the tensor */
    MUST(plain);
    *plain = v->tensor;
    PyObject *capsule = PyCapsule_New(which == 1 ? (void *)v : (void *)plain, names[which], NULL);
    PyObject *result = call("view", PyTuple_Pack(1, capsule));
    if (result) {
        const unsigned long long address = PyLong_AsUnsignedLongLong(PyTuple_GetItem(result, 0));
        MUST(which < 2 && read.ndim >= 0 && read.lanes == 1 && (which == 0 || v->major == 1));
        MUST(address == (uint64_t)(uintptr_t)read.data + read.byte_offset);
        check_numbers(PyTuple_GetItem(result, 5), numbers, n);
        if (strided)
            check_numbers(PyTuple_GetItem(result, 6), numbers + n, n);
        else
            MUST(PyTuple_GetItem(result, 6) == Py_None);
        Py_DECREF(result);
    }
    Py_DECREF(capsule);
    free(plain);
    free(shape);
    free(strides);
    free(v);
}

/* ----------------------------------------------------------------------------------------------------------- lend */

static PyObject *read_integer(bytes *b) {
    switch (take_between(b, 0, 4)) {
    case 0: return PyLong_FromLongLong((long long)take_number(b, 8));
    case 1: return PyLong_FromUnsignedLongLong(take_number(b, 8));
    case 2: return PyLong_FromString("99999999999999999999999", NULL, 10);
    default: return PyLong_FromLongLong(take_between(b, 0, 9));
    }
}

static PyObject *read_value(bytes *b) {
    switch (take_between(b, 0, 7)) {
    case 0: return Py_BuildValue("(NNN)", read_integer(b), read_integer(b), read_integer(b));
    case 1: return PyFloat_FromDouble((double)take_between(b, -3, 3) / 2);
    case 2: return Py_NewRef(Py_None);
    case 3: return PyUnicode_FromString("text");
    default: return read_integer(b);
    }
}

static void fuzz_lend(bytes *b) {
    block *memory = calloc(1, sizeof *memory); /* of no bytes: no driver is asked */
    MUST(memory);
    memory->holders = 1;
    PyObject *capsule = PyCapsule_New(memory, block_name, end_of_block);
    PyObject *shape = PyTuple_New(take_between(b, 0, 6));
    for (Py_ssize_t i = 0; i < PyTuple_Size(shape); i++)
        PyTuple_SetItem(shape, i, take_bit(b) ? read_integer(b) : read_value(b));
    const int lends = take_bit(b);
    PyObject *tensor = call("cuda_lend", Py_BuildValue("(OOii)", lends ? capsule : Py_None, shape,
                                                       (int)take_number(b, 1), (int)take_number(b, 1)));
    if (tensor) {
        MUST(lends);
        PyObject *seen = call("view", PyTuple_Pack(1, tensor));
        MUST(seen && PyObject_RichCompareBool(PyTuple_GetItem(seen, 5), shape, Py_EQ) == 1);
        Py_DECREF(seen);
        if (take_bit(b)) { /* somebody takes it */
            struct managed *m = PyCapsule_GetPointer(tensor, "dltensor");
            MUST(PyCapsule_SetName(tensor, "used_dltensor") == 0);
            m->deleter(m);
        }
        Py_DECREF(tensor);
    }
    Py_DECREF(shape);
    Py_DECREF(capsule);
}

/* --------------------------------------------------------------------------------------------------- descriptions */

static void fuzz_description(bytes *b) {
    static const char *const names[] = {
        "dtype",    "device",         "b",        "h",        "hk",          "sq",      "sk",       "d",
        "dv",       "mask",           "scale",    "features", "window_left", "softcap", "dropout",  "seed",
        "total_q",  "norm",           "m",        "k",        "n",           "eps",     "x_stride", "q_stride",
        "o_stride", "alibi_stride_b", "q_offset", "k_offset", "whole_sk",    "unknown"};
    PyObject *dict = PyDict_New();
    for (int n = (int)take_between(b, 0, 16); n > 0; n--) {
        PyObject *value = read_value(b);
        MUST(value &&
             PyDict_SetItemString(dict, names[take_between(b, 0, sizeof names / sizeof *names - 1)], value) == 0);
        Py_DECREF(value);
    }
    const char *operation = take_bit(b) ? "attention" : "norm_linear";
    const int pass = (int)take_between(b, -1, 2), asks = take_bit(b);
    PyObject *result = call(asks ? "workspace" : "kernel", Py_BuildValue("(siO)", operation, pass, dict));
    for (int i = 0; result && i < 2; i++) { /* a number that is accepted is the number that was given */
        PyObject *given = PyDict_GetItemString(dict, i ? "mask" : "dtype");
        MUST(!given || PyLong_AsLongLong(given) <= 3);
    }
    Py_XDECREF(result);
    Py_DECREF(dict);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bytes b = {data, data + size};
    switch (take_between(&b, 0, 2)) {
    case 0: fuzz_view(&b); break;
    case 1: fuzz_lend(&b); break;
    default: fuzz_description(&b); break;
    }
    return 0;
}

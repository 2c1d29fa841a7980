/* SPDX-License-Identifier: Apache-2.0
 * heddle._C: the library for Python without torch. A description is a dict of heddle.h's field names, data is a dict of
 * addresses; memory that speaks DLPack tells its address here. Limited API: one binary for every Python from 3.10 on. */
#include "block_lists.h"
#include "cuda_memory.h"
#include "heddle.h"
#include "jax_call.h"
#include "proof.h"
#include "recall.h"
#include "shortcut.h"
#include "status_kind.h"
#include "system.h"

#include "../../src/fields.h"

#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------------------------------------------- statuses */

static PyObject *raise_status(heddle_status status) {
    PyObject *const kinds[] = {[KIND_RUNTIME_ERROR] = PyExc_RuntimeError,
                               [KIND_VALUE_ERROR] = PyExc_ValueError,
                               [KIND_NOT_IMPLEMENTED] = PyExc_NotImplementedError};
    return PyErr_Format(kinds[kind_of_status(status)], "%s (%s)", heddle_last_message(), heddle_status_string(status));
}

/* ----------------------------------------------------------------------------------------------- descriptions */

typedef enum kind { UINT8, INT32, INT64, UINT64, DOUBLE, STRIDES, POINTER } kind;

typedef struct field {
    const char *name;
    kind kind;
    size_t offset;
} field;

#define FIELD(type, name, kind)                                                                                        \
    { #name, kind, offsetof(type, name) }

_Static_assert(sizeof(heddle_dtype) == 4 && sizeof(heddle_mask) == 4, "enums are written as int32");

#define A(name, kind) FIELD(heddle_attention, name, kind)
#define STRIDED(id, name, stride, ...) A(stride##_stride, STRIDES),
static const field attention_description[] = {A(dtype, INT32),
                                              A(device, INT32),
                                              A(b, INT64),
                                              A(h, INT64),
                                              A(hk, INT64),
                                              A(sq, INT64),
                                              A(sk, INT64),
                                              A(d, INT64),
                                              A(dv, INT64),
                                              A(mask, INT32),
                                              A(features, UINT64),
                                              A(window_left, INT64),
                                              A(window_right, INT64),
                                              A(scale, DOUBLE),
                                              A(softcap, DOUBLE),
                                              A(dropout, DOUBLE),
                                              A(seed, UINT64),
                                              A(offset, UINT64),
                                              A(total_q, INT64),
                                              A(total_k, INT64),
                                              A(alibi_stride_b, INT64),
                                              A(q_offset, INT64),
                                              A(k_offset, INT64),
                                              A(h_offset, INT64),
                                              A(whole_sq, INT64),
                                              A(whole_sk, INT64),
                                              A(whole_h, INT64),
                                              A(page, INT64),
                                              A(pages, INT64),
                                              A(table, INT64),
                                              A(multiprocessors, INT64),
                                              A(block_q, UINT8),
                                              A(block_k, UINT8),
                                              A(blocks_of_b, UINT8),
                                              A(blocks_of_h, UINT8),
#include "../../src/attention_fields.def"
                                              {NULL, INT32, 0}};
#undef A

#define A(name, kind) FIELD(heddle_norm_linear, name, kind)
#define STRIDED(id, name, stride, ...) A(stride##_stride, INT64),
static const field norm_linear_description[] = {A(dtype, INT32),
                                                A(device, INT32),
                                                A(norm, INT32),
                                                A(features, UINT64),
                                                A(m, INT64),
                                                A(k, INT64),
                                                A(n, INT64),
                                                A(eps, DOUBLE),
                                                A(activation, INT32),
                                                A(prepared_bytes, INT64),
                                                A(multiprocessors, INT64),
#include "../../src/norm_linear_fields.def"
                                                {NULL, INT32, 0}};
#undef A

#define DENSE(id, name, ...) FIELD(heddle_attention_data, name, POINTER),
#define STRIDED(id, name, ...) FIELD(heddle_attention_data, name, POINTER),
static const field attention_addresses[] = {
#include "../../src/attention_fields.def"
    {NULL, POINTER, 0}};
#define DENSE(id, name, ...) FIELD(heddle_norm_linear_data, name, POINTER),
#define STRIDED(id, name, ...) FIELD(heddle_norm_linear_data, name, POINTER),
static const field norm_linear_addresses[] = {
#include "../../src/norm_linear_fields.def"
    {NULL, POINTER, 0}};

static int set_strides(int64_t *target, PyObject *value) {
    for (Py_ssize_t x = 0; x < 3; x++) {
        PyObject *item = PySequence_GetItem(value, x);
        if (!item)
            return -1;
        target[x] = PyLong_AsLongLong(item);
        Py_DECREF(item);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int set_field(const field *f, void *record, PyObject *value) {
    char *at = (char *)record + f->offset;
    switch (f->kind) {
    case INT32: {
        const long given = PyLong_AsLong(value);
        const int32_t number = (int32_t)given;
        if (number != given)
            PyErr_Format(PyExc_OverflowError, "%s = %ld does not fit into 32 bits", f->name, given);
        memcpy(at, &number, sizeof number);
        break;
    }
    case UINT8: {
        const long given = PyLong_AsLong(value);
        const uint8_t number = (uint8_t)given;
        if (number != given)
            PyErr_Format(PyExc_OverflowError, "%s = %ld does not fit into 8 bits", f->name, given);
        memcpy(at, &number, sizeof number);
        break;
    }
    case INT64: {
        int64_t number = PyLong_AsLongLong(value);
        memcpy(at, &number, sizeof number);
        break;
    }
    case UINT64: {
        uint64_t number = PyLong_AsUnsignedLongLong(value);
        memcpy(at, &number, sizeof number);
        break;
    }
    case DOUBLE: {
        double number = PyFloat_AsDouble(value);
        memcpy(at, &number, sizeof number);
        break;
    }
    case POINTER: {
        void *pointer = value == Py_None ? NULL : PyLong_AsVoidPtr(value);
        memcpy(at, &pointer, sizeof pointer);
        break;
    }
    case STRIDES: return set_strides((int64_t *)(void *)at, value);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Writes what the dict has into the record; a key that no field has is a TypeError. */
static int set_fields(const field *fields, void *record, PyObject *dict) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
        const char *name = PyUnicode_AsUTF8AndSize(key, NULL);
        if (!name)
            return -1;
        const field *f = fields;
        while (f->name && strcmp(f->name, name) != 0)
            f++;
        if (!f->name) {
            PyErr_Format(PyExc_TypeError, "heddle.h has no field %s here", name);
            return -1;
        }
        if (set_field(f, record, value) < 0)
            return -1;
    }
    return 0;
}

/* --------------------------------------------------------------------------------------------------- operations */

typedef union description {
    heddle_attention attention;
    heddle_norm_linear norm_linear;
} description;

typedef union addresses {
    heddle_attention_data attention;
    heddle_norm_linear_data norm_linear;
} addresses;

/* "attention" or "norm_linear", and its description. */
static int describe(const char *operation, PyObject *dict, description *d, int *attention) {
    memset(d, 0, sizeof *d);
    *attention = strcmp(operation, "attention") == 0;
    if (!*attention && strcmp(operation, "norm_linear") != 0) {
        PyErr_Format(PyExc_ValueError, "there is no operation %s", operation);
        return -1;
    }
    if (*attention)
        d->attention.size = sizeof d->attention;
    else
        d->norm_linear.size = sizeof d->norm_linear;
    return set_fields(*attention ? attention_description : norm_linear_description, d, dict);
}

enum { PREPARE = 2 }; /* a third pass of norm-linear: its workspace is what is prepared */

static heddle_status query_workspace(const description *d, int attention, heddle_pass pass, size_t *bytes) {
    if (!attention && (int)pass == PREPARE)
        return heddle_norm_linear_prepared_size(&d->norm_linear, bytes);
    return attention ? heddle_attention_workspace(&d->attention, pass, bytes)
                     : heddle_norm_linear_workspace(&d->norm_linear, pass, bytes);
}

PyDoc_STRVAR(workspace_doc, "workspace(operation, pass, description) -> bytes that the pass needs as workspace");
static PyObject *workspace(PyObject *self, PyObject *args) {
    const char *operation;
    int pass, attention;
    PyObject *dict;
    description d;
    size_t bytes = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "siO!:workspace", &operation, &pass, &PyDict_Type, &dict) ||
        describe(operation, dict, &d, &attention) < 0)
        return NULL;
    heddle_status status = query_workspace(&d, attention, (heddle_pass)pass, &bytes);
    return status == HEDDLE_OK ? PyLong_FromSize_t(bytes) : raise_status(status);
}

PyDoc_STRVAR(wrong_list_doc,
             "wrong_list(description, block_rows, block_columns, columns) -> what is wrong with lists of blocks\n"
             "at these addresses of the CPU, or None");
static PyObject *wrong_list(PyObject *self, PyObject *args) {
    unsigned long long rows, columns;
    long long given;
    int attention;
    char why[160];
    PyObject *dict;
    description d;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!KKL:wrong_list", &PyDict_Type, &dict, &rows, &columns, &given) ||
        describe("attention", dict, &d, &attention) < 0)
        return NULL;
    if (find_wrong_list(&d.attention, (const int32_t *)(uintptr_t)rows, (const int32_t *)(uintptr_t)columns, given, why,
                        sizeof why))
        return PyUnicode_FromString(why);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(pack_doc, "pack(operation, description) -> bytes of the structure, for heddle.jax");
static PyObject *pack(PyObject *self, PyObject *args) {
    const char *operation;
    int attention;
    PyObject *dict;
    description d;
    (void)self;
    if (!PyArg_ParseTuple(args, "sO!:pack", &operation, &PyDict_Type, &dict) ||
        describe(operation, dict, &d, &attention) < 0)
        return NULL;
    return PyBytes_FromStringAndSize((const char *)&d,
                                     (Py_ssize_t)(attention ? sizeof d.attention : sizeof d.norm_linear));
}

PyDoc_STRVAR(kernel_doc, "kernel(operation, pass, description) -> name of the kernel that the plan picks");
static PyObject *kernel(PyObject *self, PyObject *args) {
    const char *operation;
    int pass, attention;
    PyObject *dict;
    description d;
    char name[128];
    (void)self;
    if (!PyArg_ParseTuple(args, "siO!:kernel", &operation, &pass, &PyDict_Type, &dict) ||
        describe(operation, dict, &d, &attention) < 0)
        return NULL;
    heddle_status status = attention ? heddle_attention_kernel(&d.attention, (heddle_pass)pass, name, sizeof name)
                                     : heddle_norm_linear_kernel(&d.norm_linear, (heddle_pass)pass, name, sizeof name);
    return status == HEDDLE_OK ? PyUnicode_FromString(name) : raise_status(status);
}

static heddle_status run_pass(const description *d, const addresses *t, int attention, heddle_pass pass, void *space,
                              size_t bytes, void *stream) {
    if (attention)
        return (pass == HEDDLE_FORWARD ? heddle_attention_forward
                                       : heddle_attention_backward)(&d->attention, &t->attention, space, bytes, stream);
    if ((int)pass == PREPARE)
        return heddle_norm_linear_prepare(&d->norm_linear, &t->norm_linear, space, bytes, stream);
    return (pass == HEDDLE_FORWARD ? heddle_norm_linear_forward : heddle_norm_linear_backward)(
        &d->norm_linear, &t->norm_linear, space, bytes, stream);
}

PyDoc_STRVAR(run_doc, "run(operation, pass, description, addresses, workspace=0, bytes=0, stream=0)\n"
                      "Runs a pass. On the CPU the workspace is made here when none is given.");
static PyObject *run(PyObject *self, PyObject *args) {
    const char *operation;
    int pass, attention;
    PyObject *dict, *data;
    unsigned long long space = 0, stream = 0;
    Py_ssize_t given = 0;
    description d;
    addresses t;
    (void)self;
    if (!PyArg_ParseTuple(args, "siO!O!|KnK:run", &operation, &pass, &PyDict_Type, &dict, &PyDict_Type, &data, &space,
                          &given, &stream) ||
        describe(operation, dict, &d, &attention) < 0)
        return NULL;
    memset(&t, 0, sizeof t);
    if (attention)
        t.attention.size = sizeof t.attention;
    else
        t.norm_linear.size = sizeof t.norm_linear;
    if (set_fields(attention ? attention_addresses : norm_linear_addresses, &t, data) < 0)
        return NULL;
    void *target = (void *)(uintptr_t)space, *own = NULL;
    size_t bytes = (size_t)given;
    heddle_device device = attention ? d.attention.device : d.norm_linear.device;
    heddle_status status = HEDDLE_OK;
    if (!target && device != HEDDLE_CUDA) {
        status = query_workspace(&d, attention, (heddle_pass)pass, &bytes);
        if (status == HEDDLE_OK && bytes) {
            target = own = heddle_system_memory(bytes);
            if (!own)
                return PyErr_NoMemory();
        }
    }
    if (status == HEDDLE_OK) {
        /* Another thread may run meanwhile; the message is this thread's own. */
        Py_BEGIN_ALLOW_THREADS status =
            run_pass(&d, &t, attention, (heddle_pass)pass, target, bytes, (void *)(uintptr_t)stream);
        Py_END_ALLOW_THREADS
    }
    heddle_system_free(own);
    if (status != HEDDLE_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

/* ----------------------------------------------------------------------------------------------------- DLPack */

typedef struct dl_versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct dl_versioned *);
    uint64_t flags;
    dl_tensor tensor;
} dl_versioned;

static PyObject *tuple_of(const int64_t *numbers, Py_ssize_t n) {
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t x = 0; tuple && x < n; x++) {
        PyObject *number = PyLong_FromLongLong(numbers[x]);
        if (!number || PyTuple_SetItem(tuple, x, number) < 0) {
            Py_DECREF(tuple);
            return NULL;
        }
    }
    return tuple;
}

enum { MOST_DIMENSIONS = 64 }; /* NumPy and PyTorch have no more: what says so has written something else there */

PyDoc_STRVAR(view_doc, "view(capsule) -> (address, device type, device id, type code, bits, shape, strides or None, "
                       "read only)\nOf a DLPack capsule, which stays its owner's: keep it while the address is used.");
static PyObject *view(PyObject *self, PyObject *capsule) {
    const dl_tensor *t = NULL;
    int read_only = 0;
    (void)self;
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        t = PyCapsule_GetPointer(capsule, "dltensor");
    } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        const dl_versioned *v = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (v->major != 1)
            return PyErr_Format(PyExc_BufferError, "DLPack version %u.%u is not known here", v->major, v->minor);
        t = &v->tensor;
        read_only = v->flags & 1;
    }
    if (!t)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "that is no unused DLPack capsule");
    if (t->lanes != 1)
        return PyErr_Format(PyExc_TypeError, "vector types of %d lanes are not known here", (int)t->lanes);
    if (t->ndim < 0 || t->ndim > MOST_DIMENSIONS || (t->ndim > 0 && !t->shape))
        return PyErr_Format(PyExc_BufferError, "a DLPack tensor of %d dimensions%s", (int)t->ndim,
                            t->ndim < 0 || t->ndim > MOST_DIMENSIONS ? "" : " without a shape");
    PyObject *shape = tuple_of(t->shape, t->ndim);
    PyObject *strides = t->strides ? tuple_of(t->strides, t->ndim) : Py_NewRef(Py_None);
    if (!shape || !strides) {
        Py_XDECREF(shape);
        Py_XDECREF(strides);
        return NULL;
    }
    return Py_BuildValue("KiiiiNNi", (unsigned long long)((uintptr_t)t->data + t->byte_offset), (int)t->device_type,
                         (int)t->device_id, (int)t->type_code, (int)t->type_bits, shape, strides, read_only);
}

/* ------------------------------------------------------------------------------------------------------- info */

PyDoc_STRVAR(device_doc, "device(number) -> (is it there, what it is or why it is absent)");
static PyObject *device(PyObject *self, PyObject *args) {
    int number;
    char text[512];
    (void)self;
    if (!PyArg_ParseTuple(args, "i:device", &number))
        return NULL;
    heddle_status status = heddle_device_available((heddle_device)number, text, sizeof text);
    if (status == HEDDLE_OK)
        heddle_device_describe((heddle_device)number, text, sizeof text);
    return Py_BuildValue("Ns", PyBool_FromLong(status == HEDDLE_OK), text);
}

PyDoc_STRVAR(version_doc, "version() -> version of the library that is loaded");
static PyObject *version(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return PyUnicode_FromString(heddle_version_string());
}

PyDoc_STRVAR(isas_doc, "isas() -> the instruction sets that this processor can run, best first; the one in use");
static PyObject *isas(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *list = PyList_New(0);
    const char *name;
    for (int x = 0; list && (name = heddle_cpu_isa_available(x)); x++) {
        PyObject *text = PyUnicode_FromString(name);
        if (!text || PyList_Append(list, text) < 0) {
            Py_XDECREF(text);
            Py_DECREF(list);
            return NULL;
        }
        Py_DECREF(text);
    }
    return list ? Py_BuildValue("Ns", list, heddle_cpu_isa()) : NULL;
}

/* Adds name: value to the dict and takes both over; false with an exception. */
static int put(PyObject *dict, const char *name, PyObject *value) {
    const int there = value && PyDict_SetItemString(dict, name, value) == 0;
    Py_XDECREF(value);
    return there;
}

PyDoc_STRVAR(features_doc, "features() -> bit by name of every feature of both operations");
static PyObject *features(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *dict = PyDict_New();
    int there = dict != NULL;
#define FEATURE(name, bit) there = there && put(dict, #name, PyLong_FromUnsignedLongLong(bit));
#include "../../src/attention_fields.def"
#define FEATURE(name, bit) there = there && put(dict, #name, PyLong_FromUnsignedLongLong(bit));
#include "../../src/norm_linear_fields.def"
    if (!there)
        Py_CLEAR(dict);
    return dict;
}

PyDoc_STRVAR(fields_doc,
             "fields(operation=\"attention\") -> (element, role, shape, feature, stride or None) by name of each "
             "tensor of it, in the list's order");
static PyObject *fields(PyObject *self, PyObject *args) {
    static const char *const elements[FIELD_ELEMENTS] = {"dtype", "float", "bool", "int32", "uint64", "e4m3", "bytes"};
    static const char *const roles[] = {"input", "output", "gradient in", "gradient out"};
    const char *operation = "attention";
    (void)self;
    if (!PyArg_ParseTuple(args, "|s:fields", &operation))
        return NULL;
    PyObject *dict = PyDict_New();
    int there = dict != NULL;
    const tensor_field *f = strcmp(operation, "attention") == 0 ? attention_fields : norm_linear_fields;
    for (; there && f->name; f++)
        there = put(dict, f->name,
                    Py_BuildValue("sssKz", elements[f->element], roles[f->role], f->shape,
                                  (unsigned long long)f->feature, f->stride ? f->stride_name : NULL));
    if (!there)
        Py_CLEAR(dict);
    return dict;
}

PyDoc_STRVAR(cuda_enter_doc, "cuda_enter(device): its primary context becomes the current one, until cuda_leave()");
PyDoc_STRVAR(cuda_leave_doc, "cuda_leave(): the context before cuda_enter is current again");
PyDoc_STRVAR(cuda_wait_doc, "cuda_wait(stream): returns when the stream's work is done");
PyDoc_STRVAR(cuda_memory_doc, "cuda_memory(device, bytes) -> zeros on the GPU, freed with their last holder");
PyDoc_STRVAR(cuda_address_doc, "cuda_address(memory) -> where it lies");
PyDoc_STRVAR(cuda_copy_doc,
             "cuda_copy(to, step, from, step, bytes, count, stream): so many runs of bytes, queued in the\n"
             "stream's context, by a copy engine where one can");
PyDoc_STRVAR(cuda_lend_doc, "cuda_lend(memory, shape, type code, bits) -> DLPack capsule, a further holder");

PyDoc_STRVAR(jax_handlers_doc, "jax_handlers() -> [(operation, platform, capsule)], for XLA");
PyDoc_STRVAR(
    shortcut_doc,
    "shortcut(parts) -> (torch.ops.heddle.attention, attention, attention_options) the short ways, see shortcut.c");
PyDoc_STRVAR(prover_doc, "prover(names) -> prove(proof, score_mod, block_mask), see proof.c");
PyDoc_STRVAR(recaller_doc, "recaller(parts) -> recall(query, key, value, score_mod, ...), see recall.c");

static PyMethodDef methods[] = {{"workspace", workspace, METH_VARARGS, workspace_doc},
                                {"wrong_list", wrong_list, METH_VARARGS, wrong_list_doc},
                                {"pack", pack, METH_VARARGS, pack_doc},
                                {"kernel", kernel, METH_VARARGS, kernel_doc},
                                {"run", run, METH_VARARGS, run_doc},
                                {"view", view, METH_O, view_doc},
                                {"device", device, METH_VARARGS, device_doc},
                                {"version", version, METH_NOARGS, version_doc},
                                {"isas", isas, METH_NOARGS, isas_doc},
                                {"features", features, METH_NOARGS, features_doc},
                                {"fields", fields, METH_VARARGS, fields_doc},
                                {"cuda_enter", heddle_cuda_enter, METH_VARARGS, cuda_enter_doc},
                                {"cuda_leave", heddle_cuda_leave, METH_NOARGS, cuda_leave_doc},
                                {"cuda_wait", heddle_cuda_wait, METH_VARARGS, cuda_wait_doc},
                                {"cuda_memory", heddle_cuda_memory, METH_VARARGS, cuda_memory_doc},
                                {"cuda_address", heddle_cuda_address, METH_O, cuda_address_doc},
                                {"cuda_copy", heddle_cuda_copy, METH_VARARGS, cuda_copy_doc},
                                {"cuda_lend", heddle_cuda_lend, METH_VARARGS, cuda_lend_doc},
                                {"jax_handlers", heddle_jax_handlers, METH_NOARGS, jax_handlers_doc},
                                {"shortcut", heddle_shortcut, METH_O, shortcut_doc},
                                {"prover", heddle_prover, METH_O, prover_doc},
                                {"recaller", heddle_recaller, METH_O, recaller_doc},
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "heddle._C", "The C library, see heddle.h.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void) {
    return PyModuleDef_Init(&definition);
}

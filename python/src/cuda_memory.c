/* SPDX-License-Identifier: Apache-2.0
 * See cuda_memory.h. The driver is opened by name when it is first needed, as the library does. */
#define _GNU_SOURCE
#include "cuda_memory.h"

#include "system.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* CUDA_MEMCPY2D of the driver's interface. */
typedef struct place {
    size_t x, y;
    int kind;
    const void *host;
    uint64_t address;
    void *array;
    size_t pitch;
} place;
typedef struct rectangle {
    place from, to;
    size_t width, height;
} rectangle;

enum { UNIFIED_MEMORY = 4, MOST_PITCH = INT32_MAX };

#define DRIVER_CALLS(X)                                                                                                \
    X(cuInit, "cuInit", (unsigned))                                                                                    \
    X(cuDeviceGet, "cuDeviceGet", (int *, int))                                                                        \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void **, int))                                            \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (void *))                                                               \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (void **))                                                                \
    X(cuMemAlloc, "cuMemAlloc_v2", (uint64_t *, size_t))                                                               \
    X(cuMemFree, "cuMemFree_v2", (uint64_t))                                                                           \
    X(cuMemsetD8, "cuMemsetD8_v2", (uint64_t, unsigned char, size_t))                                                  \
    X(cuMemsetD8Async, "cuMemsetD8Async", (uint64_t, unsigned char, size_t, void *))                                   \
    X(cuMemcpyAsync, "cuMemcpyAsync", (uint64_t, uint64_t, size_t, void *))                                            \
    X(cuMemcpy2DAsync, "cuMemcpy2DAsync_v2", (const rectangle *, void *))                                              \
    X(cuStreamSynchronize, "cuStreamSynchronize", (void *))                                                            \
    X(cuGetErrorString, "cuGetErrorString", (int, const char **))

enum { MOST_DEVICES = 64 };

#define MEMBER(name, symbol, arguments) int(*name) arguments;
static struct {
    DRIVER_CALLS(MEMBER)
    void *primary[MOST_DEVICES]; /* retained once, for the life of the process */
} cu;                            /* written with the GIL held */

static PyObject *raise_cuda(const char *what, int error) {
    const char *text = NULL;
    cu.cuGetErrorString(error, &text);
    return PyErr_Format(error == 2 ? PyExc_MemoryError : PyExc_RuntimeError, "%s: %s (CUDA's error %d)", what,
                        text ? text : "unknown", error);
}

static int open_driver(void) {
    if (cu.cuInit)
        return 0;
    void *library = heddle_system_library("libcuda.so.1", false);
    void *symbol;
#define LOOK(name, text, arguments)                                                                                    \
    symbol = library ? heddle_system_symbol(library, text) : NULL;                                                     \
    if (!symbol) {                                                                                                     \
        PyErr_Format(PyExc_RuntimeError, "libcuda.so.1 is not here or has no %s", text);                               \
        return -1;                                                                                                     \
    }                                                                                                                  \
    memcpy(&found.name, &symbol, sizeof symbol);
    struct {
        DRIVER_CALLS(MEMBER)
    } found;
    DRIVER_CALLS(LOOK)
    int error = found.cuInit(0);
    if (error) {
        PyErr_Format(PyExc_RuntimeError, "cuInit: CUDA's error %d", error);
        return -1;
    }
    memcpy(&cu, &found, sizeof found);
    return 0;
}

/* Makes the device's primary context, the one that JAX, CuPy and PyTorch use, current. */
static int push(int device) {
    if (open_driver() < 0)
        return -1;
    if (device < 0 || device >= MOST_DEVICES) {
        PyErr_Format(PyExc_ValueError, "device %d is outside 0 to %d", device, MOST_DEVICES - 1);
        return -1;
    }
    int error = 0, handle = 0;
    if (!cu.primary[device]) {
        error = cu.cuDeviceGet(&handle, device);
        error = error ? error : cu.cuDevicePrimaryCtxRetain(&cu.primary[device], handle);
    }
    error = error ? error : cu.cuCtxPushCurrent(cu.primary[device]);
    if (error)
        raise_cuda("the device's primary context", error);
    return error ? -1 : 0;
}

static void pop(void) {
    void *left;
    cu.cuCtxPopCurrent(&left);
}

PyObject *heddle_cuda_enter(PyObject *self, PyObject *args) {
    int device;
    (void)self;
    if (!PyArg_ParseTuple(args, "i:cuda_enter", &device) || push(device) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *heddle_cuda_leave(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    if (cu.cuInit)
        pop();
    Py_RETURN_NONE;
}

PyObject *heddle_cuda_wait(PyObject *self, PyObject *args) {
    unsigned long long stream;
    int error;
    (void)self;
    if (!PyArg_ParseTuple(args, "K:cuda_wait", &stream) || open_driver() < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS error = cu.cuStreamSynchronize((void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS if (error) return raise_cuda("waiting for the GPU", error);
    Py_RETURN_NONE;
}

/* ----------------------------------------------------------------------------------------------------- memory */

typedef struct block {
    atomic_int holders;
    int device;
    uint64_t address;
} block;

static const char block_name[] = "heddle.cuda_memory";

/* From any thread, without the GIL. cuMemFree waits for what still uses the memory; after the driver's end it does nothing. */
static void let_go(block *b) {
    if (atomic_fetch_sub(&b->holders, 1) != 1)
        return;
    if (b->address && cu.cuCtxPushCurrent(cu.primary[b->device]) == 0) {
        cu.cuMemFree(b->address);
        pop();
    }
    free(b);
}

static void end_of_block(PyObject *capsule) {
    let_go(PyCapsule_GetPointer(capsule, block_name));
}

/* Filled with zeros: what no kernel writes (rows of no sequence) is to be zero. */
static int allocate(block *b, size_t bytes) {
    if (bytes == 0)
        return 0;
    int error = cu.cuMemAlloc(&b->address, bytes);
    error = error ? error : cu.cuMemsetD8(b->address, 0, bytes);
    return error ? error : cu.cuStreamSynchronize(NULL); /* the kernels may run on a stream that waits for no other */
}

PyObject *heddle_cuda_memory(PyObject *self, PyObject *args) {
    int device;
    Py_ssize_t bytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "in:cuda_memory", &device, &bytes) || push(device) < 0)
        return NULL;
    block *b = calloc(1, sizeof *b);
    int error = b ? allocate(b, (size_t)bytes) : 0;
    pop();
    if (!b)
        return PyErr_NoMemory();
    b->holders = 1;
    b->device = device;
    PyObject *capsule = error ? raise_cuda("memory for a result", error) : PyCapsule_New(b, block_name, end_of_block);
    if (!capsule)
        let_go(b);
    return capsule;
}

PyObject *heddle_cuda_address(PyObject *self, PyObject *memory) {
    (void)self;
    const block *b = PyCapsule_GetPointer(memory, block_name);
    return b ? PyLong_FromUnsignedLongLong(b->address) : NULL;
}

PyObject *heddle_cuda_copy(PyObject *self, PyObject *args) {
    unsigned long long to, from, stream;
    Py_ssize_t to_step, from_step, size, count;
    int error = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnKnnnK:cuda_copy", &to, &to_step, &from, &from_step, &size, &count, &stream) ||
        open_driver() < 0)
        return NULL;
    if (size < 0 || count < 0 || to_step < size || from_step < size)
        return PyErr_Format(PyExc_ValueError, "no copy of %zd runs of %zd bytes, %zd and %zd bytes apart", count, size,
                            from_step, to_step);
    void *const on = (void *)(uintptr_t)stream;
    if (to_step == size && from_step == size) { /* no gaps: one run */
        size *= count;
        count = count > 0;
    }
    if (count > 1 && to_step <= MOST_PITCH && from_step <= MOST_PITCH) {
        const rectangle r = {.from = {.kind = UNIFIED_MEMORY, .address = from, .pitch = (size_t)from_step},
                             .to = {.kind = UNIFIED_MEMORY, .address = to, .pitch = (size_t)to_step},
                             .width = (size_t)size,
                             .height = (size_t)count};
        error = size ? cu.cuMemcpy2DAsync(&r, on) : 0;
    } else
        for (Py_ssize_t x = 0; x < count && size && !error; x++)
            error = cu.cuMemcpyAsync(to + (size_t)(x * to_step), from + (size_t)(x * from_step), (size_t)size, on);
    if (error)
        return raise_cuda("a copy", error);
    Py_RETURN_NONE;
}

void heddle_cuda_prepare(void) {
    if (open_driver() < 0)
        PyErr_Clear(); /* a machine without a GPU */
}

int heddle_cuda_clear(uint64_t address, size_t bytes, void *stream) {
    return cu.cuInit ? cu.cuMemsetD8Async(address, 0, bytes, stream) : -1;
}

/* ----------------------------------------------------------------------------------------------------- DLPack */

typedef struct lent {
    struct managed {
        dl_tensor tensor;
        void *context;
        void (*deleter)(struct managed *);
    } managed;
    block *memory;
    int64_t numbers[]; /* shape, then strides */
} lent;

static void end_of_loan(struct managed *m) {
    lent *l = m->context;
    let_go(l->memory);
    free(l);
}

/* Whoever takes the tensor renames the capsule and calls the deleter himself. */
static void end_of_offer(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor"))
        end_of_loan(PyCapsule_GetPointer(capsule, "dltensor"));
}

PyObject *heddle_cuda_lend(PyObject *self, PyObject *args) {
    PyObject *memory, *shape;
    int code, bits;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO!ii:cuda_lend", &memory, &PyTuple_Type, &shape, &code, &bits))
        return NULL;
    block *b = PyCapsule_GetPointer(memory, block_name);
    const Py_ssize_t rank = PyTuple_Size(shape);
    lent *l = b ? calloc(1, sizeof *l + 2 * (size_t)rank * sizeof *l->numbers) : NULL;
    if (!l)
        return b ? PyErr_NoMemory() : NULL;
    int64_t *sizes = l->numbers, *strides = sizes + rank, step = 1;
    for (Py_ssize_t x = rank; x-- > 0 && !PyErr_Occurred();) {
        sizes[x] = PyLong_AsLongLong(PyTuple_GetItem(shape, x));
        strides[x] = step;
        if (!PyErr_Occurred() && (sizes[x] < 0 || __builtin_mul_overflow(step, sizes[x] > 1 ? sizes[x] : 1, &step)))
            PyErr_Format(PyExc_ValueError, "no tensor has %lld as its dimension %zd here", (long long)sizes[x], x);
    }
    l->managed.tensor = (dl_tensor){.data = (void *)(uintptr_t)b->address,
                                    .device_type = 2,
                                    .device_id = b->device,
                                    .ndim = (int32_t)rank,
                                    .type_code = (uint8_t)code,
                                    .type_bits = (uint8_t)bits,
                                    .lanes = 1,
                                    .shape = sizes,
                                    .strides = strides};
    l->managed.context = l;
    l->managed.deleter = end_of_loan;
    PyObject *capsule = PyErr_Occurred() ? NULL : PyCapsule_New(&l->managed, "dltensor", end_of_offer);
    if (!capsule) {
        free(l);
        return NULL;
    }
    l->memory = b;
    atomic_fetch_add(&b->holders, 1);
    return capsule;
}

/* SPDX-License-Identifier: Apache-2.0
 * What every operator does around its own work: take its arguments off the stack, look at tensors, make tensors, and leave
 * with results or with an exception. Nothing is left to free in either case. */
#ifndef HEDDLE_TORCH_CALL_H
#define HEDDLE_TORCH_CALL_H

#include "heddle.h"
#include "torch_abi.h"

#define MAX_ARGUMENTS 48
#define MAX_RESULTS 9
#define MAX_RANK 8

typedef struct tensor {
    tensor_handle handle; /* NULL: an optional that was not given */
    void *data;
    int64_t rank;
    const int64_t *size, *stride;
    int32_t dtype, device_type, device_index;
} tensor;

typedef struct call {
    tensor tensor[MAX_ARGUMENTS]; /* by the argument's position; so are the next two */
    int64_t integer[MAX_ARGUMENTS];
    double number[MAX_ARGUMENTS];
    tensor_handle result[MAX_RESULTS];
    uint64_t results; /* that the operator has */
    tensor_handle workspace;
    guard_handle guard;
    void *stream;
    int32_t device_type, device_index;
    heddle_device device;
    heddle_dtype dtype;
    int saved_threads;
    char message[640]; /* "" as long as all is well */
} call;

/* Takes the arguments: of each, signature has T (tensor), U (tensor that may be undefined: as one not given), O (optional
 * tensor), I (int), B (bool), D (float), N (optional int: -1 if not given) or S (a scale: an optional float). */
void call_begin(call *c, stable_value *stack, uint64_t arguments, uint64_t results, const char *signature);
/* The same, with argument x kept at place[x]. */
void call_begin_at(call *c, stable_value *stack, uint64_t arguments, uint64_t results, const char *signature,
                   const int *place);

/* Frees everything and puts the results on the stack, or throws what the message says. */
void call_end(call *c, stable_value *stack);

/* Notes what is wrong, as "heddle <kind>: ...", where kind is the Python exception that fits. Returns false. */
__attribute__((format(printf, 3, 4))) bool call_fail(call *c, const char *kind, const char *format, ...);

/* The same for a status of the library, with its own message. True if it is HEDDLE_OK. */
bool call_status(call *c, heddle_status status);

/* Sets device, dtype, stream and threads after the tensor that leads, argument `lead`. */
bool call_device(call *c, int lead, const char *name);

/* Each tensor must lie on the device, have the dtype, end in a contiguous dimension (or be of one element there). */
bool call_check(call *c, const tensor *t, const char *name, int32_t dtype);
bool call_check_shape(call *c, const tensor *t, const char *name, int64_t rank, const int64_t *size);
/* For what has no strides in the description. True for an optional that was not given. */
bool call_check_contiguous(call *c, const tensor *t, const char *name);

/* torch's number of the dtype of the call's tensors, and of its "float" tensors. */
int32_t call_dtype(const call *c);
int32_t call_real(const call *c);

/* A new tensor as result x. Its data, NULL on failure or for no elements. */
void *call_make(call *c, int x, int64_t rank, const int64_t *size, const int64_t *stride, int32_t dtype);
/* Result x is None, if the operator has that many. */
bool call_make_none(call *c, int x);
/* Result x of a forward operator, if it has that many, is not asked for: a tensor of no elements, as what AOTInductor compiles
 * knows no None. */
bool call_make_empty(call *c, int x);
bool call_zero(call *c, int x);

/* Bytes of workspace, or what is wrong with the description. The answer for a description just like the thread's last is
 * kept: the layers of a model follow one another, and a plan costs more than the look at its description. */
bool call_attention_bytes(call *c, const heddle_attention *a, heddle_pass pass, size_t *bytes);
bool call_norm_linear_bytes(call *c, const heddle_norm_linear *a, heddle_pass pass, size_t *bytes);

/* A workspace of that many bytes. False on failure; *workspace stays NULL for none. */
bool call_workspace(call *c, size_t bytes, void **workspace);

/* Strides of a contiguous tensor. */
void contiguous_strides(int64_t rank, const int64_t *size, int64_t *stride);

void heddle_torch_attention(stable_value *stack, uint64_t arguments, uint64_t results);
void heddle_torch_attention_backward(stable_value *stack, uint64_t arguments, uint64_t results);
void heddle_torch_attention_plain(stable_value *stack, uint64_t arguments, uint64_t results);
void heddle_torch_attention_options(stable_value *stack, uint64_t arguments, uint64_t results);
void heddle_torch_attention_backward_plain(stable_value *stack, uint64_t arguments, uint64_t results);
void heddle_torch_attention_backward_heads(stable_value *stack, uint64_t arguments, uint64_t results);
void heddle_torch_attention_append(stable_value *stack, uint64_t arguments, uint64_t results);
void heddle_torch_norm_linear(stable_value *stack, uint64_t arguments, uint64_t results);
void heddle_torch_norm_linear_prepare(stable_value *stack, uint64_t arguments, uint64_t results);
void heddle_torch_norm_linear_backward(stable_value *stack, uint64_t arguments, uint64_t results);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * What the handlers of jax_call.c see of XLA's C interface for foreign functions (jaxlib's xla/ffi/api/c_api.h): written down here
 * from its layout, so that building needs no jaxlib, and one wheel serves every jaxlib and those that have none. That is sound because
 * the interface is a stable one: a structure begins with its size and grows at its end, a handler is asked for its version when it is
 * registered, and all that is here lies the same in versions 0.1 (JAX 0.6) to 0.5 (JAX 0.12), whatever XLA calls it.
 * tests/python/test_jax_abi.py holds every offset and value to the header that is installed. Names are XLA's without its prefix. */
#ifndef HEDDLE_XLA_FFI_H
#define HEDDLE_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

enum { XLA_MAJOR = 0, XLA_OLDEST_MINOR = 1, XLA_MINOR = 5 };
enum {
    XLA_PRED = 1,
    XLA_S32 = 4,
    XLA_S64 = 5,
    XLA_U8 = 6,
    XLA_U32 = 8,
    XLA_F16 = 10,
    XLA_F32 = 11,
    XLA_F64 = 12,
    XLA_BF16 = 16,
    XLA_F8E4M3FN = 20
};
enum {
    XLA_INVALID_ARGUMENT = 3,
    XLA_RESOURCE_EXHAUSTED = 8,
    XLA_UNIMPLEMENTED = 12,
    XLA_INTERNAL = 13,
    XLA_UNAVAILABLE = 14
};
enum { XLA_METADATA = 1, XLA_ATTRIBUTE_ARRAY = 1, XLA_BUFFER = 1, XLA_EXECUTE = 3 };

typedef struct xla_extension {
    size_t size;
    int type;
    struct xla_extension *next;
} xla_extension;

typedef struct xla_version {
    size_t size;
    xla_extension *extension;
    int major, minor;
} xla_version;

typedef struct xla_metadata {
    size_t size;
    xla_version version;
    uint32_t traits;
} xla_metadata;

/* In the frame of a call that only asks what the handler is. */
typedef struct xla_metadata_extension {
    xla_extension base;
    xla_metadata *metadata;
} xla_metadata_extension;

typedef struct xla_error xla_error;
typedef struct xla_context xla_context;

typedef struct xla_error_create {
    size_t size;
    xla_extension *extension;
    const char *message;
    int code;
} xla_error_create;

typedef struct xla_error_destroy {
    size_t size;
    xla_extension *extension;
    xla_error *error;
} xla_error_destroy;

typedef struct xla_stream_get {
    size_t size;
    xla_extension *extension;
    xla_context *context;
    void *stream;
} xla_stream_get;

typedef struct xla_memory_allocate {
    size_t size;
    xla_extension *extension;
    xla_context *context;
    size_t bytes, alignment;
    void *data;
} xla_memory_allocate;

typedef struct xla_memory_free {
    size_t size;
    xla_extension *extension;
    xla_context *context;
    size_t bytes;
    void *data;
} xla_memory_free;

/* Its functions to the last one that is called here. */
typedef struct xla_api {
    size_t size;
    xla_extension *extension;
    xla_version version;
    const void *internal;
    xla_error *(*error_create)(xla_error_create *);
    void (*error_get_message)(void *);
    void (*error_destroy)(xla_error_destroy *);
    xla_error *(*handler_register)(void *);
    xla_error *(*stream_get)(xla_stream_get *);
    xla_error *(*type_register)(void *);
    xla_error *(*context_get)(void *);
    xla_error *(*state_set)(void *);
    xla_error *(*state_get)(void *);
    xla_error *(*memory_allocate)(xla_memory_allocate *);
    xla_error *(*memory_free)(xla_memory_free *);
} xla_api;

typedef struct xla_buffer {
    size_t size;
    xla_extension *extension;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} xla_buffer;

/* Arguments; results are the same. */
typedef struct xla_values {
    size_t size;
    xla_extension *extension;
    int64_t count;
    int *types;
    void **values;
} xla_values;

typedef struct xla_span {
    const char *text;
    size_t length;
} xla_span;

typedef struct xla_array {
    int dtype;
    size_t count;
    void *data;
} xla_array;

typedef struct xla_attributes {
    size_t size;
    xla_extension *extension;
    int64_t count;
    int *types;
    xla_span **names;
    void **values;
} xla_attributes;

typedef struct xla_frame {
    size_t size;
    xla_extension *extension;
    const xla_api *api;
    xla_context *context;
    int stage;
    xla_values arguments, results;
    xla_attributes attributes;
} xla_frame;

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The tensors of both operations as tables, made of attention_fields.def and norm_linear_fields.def: for all who check, read, fill,
 * compare or print them in a loop. Needs nothing but heddle.h, so that the command and the Python extension have them, too. */
#ifndef HEDDLE_FIELDS_H
#define HEDDLE_FIELDS_H

#include "heddle.h"

/* The last value of each enum of options: one above is refused, and who draws values or goes through them ends here. */
enum { LAST_MASK = HEDDLE_CAUSAL_BOTTOM_RIGHT, LAST_NORM = HEDDLE_NO_NORM, LAST_ACTIVATION = HEDDLE_SWIGLU };

/* What a pointer's elements are. FLOAT is float32, or float64 when the dtype is; E4M3 is what k and v are with HEDDLE_E4M3;
 * BYTES, what only a backend can read. */
typedef enum field_element {
    OF_DTYPE,
    OF_FLOAT,
    OF_BOOL,
    OF_INT32,
    OF_UINT64,
    OF_E4M3,
    OF_BYTES,
    FIELD_ELEMENTS
} field_element;

/* An input of both passes; what forward writes and backward may read; what only backward reads, what only it writes. */
typedef enum field_role { ROLE_INPUT, ROLE_OUTPUT, ROLE_GRADIENT_IN, ROLE_GRADIENT_OUT } field_role;

/* When a pass must have the pointer, if its feature is set: the others may be NULL. UNUSED: the pass does not look at it. */
typedef enum field_need {
    NEED_UNUSED,
    NEED_OPTIONAL,
    NEED_ALWAYS,
    NEED_BATCH, /* attention: there are sequences, and of them queries, keys, both */
    NEED_QUERIES,
    NEED_KEYS,
    NEED_SCORES,
    NEED_LENGTHS,     /* there are sequences, and no seqlens_q */
    NEED_PACKED_KEYS, /* there are sequences, and their keys are not in pages */
    NEED_ROWS,        /* norm-linear: there are rows */
    NEED_PREPARED,    /* norm-linear: something is prepared */
    FIELD_NEEDS
} field_need;

typedef struct tensor_field {
    const char *name;
    uint64_t feature;         /* the bit without which it has no use; 0: it always has */
    uint16_t offset, stride;  /* in the structure of the data; of its stride in the description, 0: it is contiguous */
    uint8_t element, role;    /* field_element, field_role */
    uint8_t need[2];          /* field_need, by pass */
    const char *feature_name; /* "HEDDLE_BIAS" */
    const char *stride_name;  /* <stride_name>_stride is its stride */
    const char *shape;        /* a letter for each dimension */
    const char *packed;       /* the same with HEDDLE_VARLEN; NULL: no other */
    const char *option;       /* of the command; NULL: none */
} tensor_field;

#define FIELD_ROW(data, name, stride_at, stride_name, element, shape, packed, role, forward, backward, feature,        \
                  feature_name, option)                                                                                \
    {#name,                                                                                                            \
     feature,                                                                                                          \
     offsetof(data, name),                                                                                             \
     stride_at,                                                                                                        \
     OF_##element,                                                                                                     \
     ROLE_##role,                                                                                                      \
     {NEED_##forward, NEED_##backward},                                                                                \
     feature_name,                                                                                                     \
     stride_name,                                                                                                      \
     shape,                                                                                                            \
     packed,                                                                                                           \
     option},

#define DENSE(id, ...) FIELD_##id,
#define STRIDED(id, ...) FIELD_##id,
enum {
#include "attention_fields.def"
    ATTENTION_FIELDS
};

#define DENSE(id, name, element, shape, packed, role, forward, backward, feature, option)                              \
    FIELD_ROW(heddle_attention_data, name, 0, "", element, shape, packed, role, forward, backward, feature, #feature,  \
              option)
#define STRIDED(id, name, stride, element, shape, packed, role, forward, backward, feature, option)                    \
    FIELD_ROW(heddle_attention_data, name, offsetof(heddle_attention, stride##_stride), #stride, element, shape,       \
              packed, role, forward, backward, feature, #feature, option)
static const tensor_field attention_fields[ATTENTION_FIELDS + 1] = {/* ended by a field without a name */
#include "attention_fields.def"
                                                                    {0}};

#define DENSE(id, ...) FIELD_N_##id,
#define STRIDED(id, ...) FIELD_N_##id,
enum {
#include "norm_linear_fields.def"
    NORM_LINEAR_FIELDS
};

#define DENSE(id, name, element, shape, packed, role, forward, backward, feature, option)                              \
    FIELD_ROW(heddle_norm_linear_data, name, 0, "", element, shape, packed, role, forward, backward, feature,          \
              #feature, option)
#define STRIDED(id, name, stride, element, shape, packed, role, forward, backward, feature, option)                    \
    FIELD_ROW(heddle_norm_linear_data, name, offsetof(heddle_norm_linear, stride##_stride), #stride, element, shape,   \
              packed, role, forward, backward, feature, #feature, option)
static const tensor_field norm_linear_fields[NORM_LINEAR_FIELDS + 1] = {/* ended by a field without a name */
#include "norm_linear_fields.def"
                                                                        {0}};
#undef FIELD_ROW

/* The extent of a letter of a shape. */
static inline int64_t attention_extent(const heddle_attention *a, char letter) {
    switch (letter) {
    case 'b': return a->b;
    case 'n': return a->b + 1;
    case 'h': return a->h;
    case 'g': return a->hk ? a->hk : a->h;
    case 'q': return a->sq;
    case 'k': return a->sk;
    case 'd': return a->d;
    case 'v': return a->dv ? a->dv : a->d;
    case 'Q': return a->total_q;
    case 'K': return a->total_k;
    case 'P': return a->pages;
    case 'p': return a->page;
    case 'B': return a->blocks_of_b ? a->b : 1;
    case 'H': return a->blocks_of_h ? a->h : 1;
    case 'r': return a->block_q ? (a->sq + a->block_q - 1) / a->block_q + 1 : 0;
    case 'c': return 0; /* the last number of block_rows */
    case 't': return a->table ? a->table : a->page ? (a->sk + a->page - 1) / a->page : 0;
    default: return 2;
    }
}

/* k and v. */
static inline int is_of_keys(const tensor_field *t) {
    return t->role == ROLE_INPUT && t->shape[1] == 'g' && t->shape[2];
}

/* The shape of a tensor in a problem with these features. Whoever asks whether it is packed compares it with t->packed. */
static inline const char *attention_shape(const tensor_field *t, uint64_t features) {
    if ((features & HEDDLE_PAGES) && is_of_keys(t))
        return t->shape[3] == 'd' ? "Pgpd" : "Pgpv";
    const int of_pages = (features & HEDDLE_PAGES) && t->shape[1] == 'k'; /* numbered by sequence, packed or not */
    return (features & HEDDLE_VARLEN) && t->packed && !of_pages ? t->packed : t->shape;
}

/* Whether an activation is of two halves, gate and up; and what it is of the gate. */
static inline int is_gated(heddle_activation activation) {
    return activation >= HEDDLE_GEGLU;
}

static inline heddle_activation gate_activation(heddle_activation activation) {
    return is_gated(activation) ? (heddle_activation)(activation - HEDDLE_GEGLU + HEDDLE_GELU) : activation;
}

/* 'N': features of u, of which 'n' are y's; 'p': bytes that are prepared. */
static inline int64_t norm_linear_extent(const heddle_norm_linear *a, char letter) {
    switch (letter) {
    case 'm': return a->m;
    case 'k': return a->k;
    case 'p': return a->prepared_bytes;
    case 'N': return is_gated(a->activation) ? 2 * a->n : a->n;
    default: return a->n;
    }
}

/* Whether a problem has the tensor: without a norm there is none of its vectors, over rows or over features in. */
static inline int norm_linear_has(const heddle_norm_linear *a, const tensor_field *t) {
    const int of_norm = !t->feature && !t->shape[1] && t->shape[0] != 'N';
    return (!t->feature || (a->features & t->feature)) && !(of_norm && a->norm == HEDDLE_NO_NORM);
}

/* A row for each query and a column for each key: never packed, and as an input repeated where its stride is 0. */
static inline int is_of_scores(const char *shape) {
    return shape[0] == 'b' && shape[1] == 'h' && shape[2] == 'q' && shape[3] == 'k';
}

static inline int is_input(const tensor_field *t) {
    return t->role == ROLE_INPUT || t->role == ROLE_GRADIENT_IN;
}

static inline int is_output(const tensor_field *t) {
    return !is_input(t);
}

/* What its elements are in a problem with these features: with HEDDLE_ACCUMULATE o, dq, dk and dv are sums. */
static inline field_element element_in(const tensor_field *t, uint64_t features) {
    if ((features & HEDDLE_E4M3) && is_of_keys(t))
        return OF_E4M3;
    const int sums =
        (features & HEDDLE_ACCUMULATE) && t->element == OF_DTYPE && is_output(t) && !is_of_scores(t->shape);
    return sums ? OF_FLOAT : (field_element)t->element;
}

/* The gradient of what may be repeated. */
static inline int is_summed(const tensor_field *t) {
    return t->role == ROLE_GRADIENT_OUT && is_of_scores(t->shape);
}

static inline int is_output_of(const tensor_field *t, heddle_pass pass) {
    return t->role == (pass == HEDDLE_FORWARD ? ROLE_OUTPUT : ROLE_GRADIENT_OUT);
}

#endif

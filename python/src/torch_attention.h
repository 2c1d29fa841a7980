/* SPDX-License-Identifier: Apache-2.0
 * What the operators of attention share: the places of their arguments, and the way from tensors to a description. */
#ifndef HEDDLE_TORCH_ATTENTION_H
#define HEDDLE_TORCH_ATTENTION_H

#include "torch_call.h"

/* Where the arguments that both passes have begin, and their order from there. */
enum { FORWARD_BASE = 0, BACKWARD_BASE = 5 };
#define TENSOR(id, name, field) id,
#define NUMBER(id, schema, letter) id,
enum {
    Q,
    K,
    V,
#include "attention_arguments.def"
    NEEDS
};

/* What backward has in front of them. */
enum { DOUT, DLSE, DWEIGHTS, OUT, LSE };

typedef struct problem {
    heddle_attention a;
    heddle_attention_data t;
    bool varlen, paged;
    const tensor *in; /* the shared arguments */
} problem;

/* Strides of a [b, h, s, last] or packed [total, h, last] tensor. */
heddle_strides attention_strides(const int64_t *stride, bool varlen);

/* All that forward and backward have in common, from argument `base` on. */
bool attention_describe(call *c, int base, problem *p);
/* What backward has in addition. */
bool attention_take_gradients(call *c, problem *p);

/* Packed rows that belong to no sequence are written by nobody; on a GPU only the device knows if there are any. */
bool attention_has_loose_rows(const call *c, const int32_t *cu, int64_t b, int64_t total);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * What norm-linear's forward makes of the weight alone, kept by the caller: how it lies, and the launch that makes it. Pure.
 *
 * It is what the launch `prepare` would leave in the workspace, made by the same kernel, so that results have the same bits; a forward that
 * finds it there has no rows of W in that launch. */
#include "cuda/norm_linear/family.h"
#include "fields.h"

#include <string.h>

norm_rows heddle__cuda_rows_of_w(const norm_linear_call *c) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    const norm_linear_arrays *at = &c->at;
    return (norm_rows){.packs = 1,
                       .in = t->w,
                       .ld = a->w_stride,
                       .rows = c->is.n,
                       .cols = (int32_t)a->k,
                       .gamma = t->gamma,
                       .beta = t->beta,
                       .bias = t->bias,
                       .high = at->w,
                       .low = c->is.wide && !c->is.tf32 ? at->w_low : NULL,
                       .ldp = (int32_t)c->is.kp,
                       .sum = c->is.wide ? NULL : at->s,
                       .add = at->t,
                       .row_exponent = c->is.wide ? at->w_exponent : NULL};
}

/* Where float32 or raw x are multiplied, with any number of rows. */
static bool folds(const heddle_norm_linear *a, const norm_linear_facts *is) {
    return is->wide || (a->dtype == HEDDLE_BF16 && !is->plain && !is->gated && !(a->features & HEDDLE_Z));
}

/* Every array begins at a multiple of 256 bytes of the buffer, whose own beginning is a multiple of 64. */
static size_t lay_out(const heddle_norm_linear *a, const norm_linear_facts *is, unsigned char *memory,
                      norm_linear_arrays *at) {
    const bool two = is->wide && !is->tf32;
    const int64_t weights = folds(a, is) ? is->n * is->kp : 0;
    size_t used = 0;
#define A(type, name, elements)                                                                                        \
    at->name = memory ? (type *)(void *)(memory + used) : NULL;                                                        \
    used += ((size_t)(elements) * sizeof(type) + 255) / 256 * 256;
    NORM_LINEAR_PREPARED
#undef A
    return used;
}

size_t heddle__cuda_prepared_bytes(const heddle_norm_linear *a, const norm_linear_facts *is) {
    norm_linear_arrays unused;
    return lay_out(a, is, NULL, &unused);
}

void heddle__cuda_find_prepared(norm_linear_call *c, const void *prepared) {
    unsigned char *memory;
    memcpy(&memory, &prepared, sizeof memory); /* forward reads it alone */
    lay_out(c->a, &c->is, memory, &c->at);
}

int heddle__cuda_prepare_launches(const norm_linear_plan *plan, const cuda_facts *device,
                                  const heddle_norm_linear_data *data, void *prepared,
                                  norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES]) {
    const cuda_facts limited = limited_facts(device, plan->a.multiprocessors);
    norm_linear_call c = {.a = &plan->a,
                          .pass = HEDDLE_FORWARD,
                          .device = &limited,
                          .is = heddle__cuda_norm_linear_facts(plan, &limited),
                          .t = data,
                          .launches = launches};
    lay_out(&plan->a, &c.is, prepared, &c.at);
    heddle__cuda_add_prepare(&c, (norm_prepare){.job = {[1] = heddle__cuda_rows_of_w(&c)}});
    return c.count;
}

/* SPDX-License-Identifier: Apache-2.0
 * Powers of two that keep products of small weights out of the denormals, which cost Intel's cores many times a normal number: P
 * reaches down to 2^-126, and times a value, or a gradient, of common size it would be one of them. Forward takes 2^48·P, and divides by
 * the sum of those; backward takes 2·P, which is 0 or a normal number, and lift·dO, and what is linear in them, all gradients, is lowered
 * as it is written. Neither rounds anything. Where numbers are so large that a sum might leave float32's range, lift is 1, or half. */
#ifndef HEDDLE_CPU_ATTENTION_LIFT_H
#define HEDDLE_CPU_ATTENTION_LIFT_H

#include "pages.h"
#include "tile.h"

#include <float.h>

#define WEIGHT_LIFT 0x1p48f
/* A base may be so far behind a row's largest score, which then weighs 2^4. Beside values of any size weights are 2^-4 times that, at
 * most 1, so that their sum is no larger than a textbook's. */
#define BASE_LAG_LOG2 4
#define BASE_LAG 0x1p-4f
/* Values up to which 2^48·P·V, with what a base may lag behind and dropout multiplies, has room for 2^30 keys. */
#define LIFTED_VALUE 0x1p24f
/* The same of P·V. */
#define USUAL_VALUE 0x1p72f
#define MOST_LIFT 64

INLINE vf larger(vf most, vf x) {
    return vmax((vf)((vi)x & INT32_MAX), most);
}

/* Four at a time, since each maximum waits for the one before. */
INLINE float largest_as(int type, const char *p, int64_t stride, int64_t rows, int64_t n) {
    vf most[4] = {{0}};
    for (int64_t r = 0; r < rows; r++, p += stride * element_size(type)) {
        int64_t e = 0;
        for (; e + 4 * VL <= n; e += 4 * VL)
#pragma GCC unroll 4
            for (int x = 0; x < 4; x++)
                most[x] = larger(most[x], load_vector(type, element_at(p, e + x * VL, type)));
        for (; e < n; e += VL)
            most[0] = larger(most[0], load_some(type, element_at(p, e, type), n - e));
    }
    return max_of(vmax(vmax(most[0], most[1]), vmax(most[2], most[3])));
}

/* The largest magnitude of so many rows; of NaN there is no saying. */
static float largest_of(int type, const void *p, int64_t stride, int64_t rows, int64_t n) {
    if (type == HEDDLE_F16) /* its largest number is small enough for everyone */
        return 65504;
    return type == HEDDLE_F32 ? largest_as(HEDDLE_F32, p, stride, rows, n)
                              : largest_as(HEDDLE_BF16, p, stride, rows, n);
}

/* Of some queries of a unit. */
static float largest_query(const call *c, const unit *u, int type, const void *p, heddle_strides stride, range queries,
                           int64_t n) {
    float most = 0;
    for (int64_t x = 0; x < c->group; x++) {
        const int64_t row = u->s.first_q + queries.begin;
        const void *rows = element_at(p, row_offset(stride, u->n, u->first_head + x, row), type);
        most = fmaxf(most, largest_of(type, rows, stride.s, queries.end - queries.begin, n));
    }
    return most;
}

static float largest_key(const call *c, const unit *u, const void *p, heddle_strides stride, int64_t first,
                         int64_t count, int64_t n) {
    const void *rows = element_at(p, row_offset(stride, u->n, u->hk, u->s.first_k + first), TYPE(c));
    return largest_of(TYPE(c), rows, stride.s, count, n);
}

/* Products of bfloat16 in hardware, which tables of that type alone have, take denormals for zeros. */
#ifdef ISA_OTHERS
enum { MAY_LIFT = false };
#else
enum { MAY_LIFT = true };
#endif

/* The largest magnitudes of some queries and keys of a unit. */
typedef struct magnitudes {
    float q, k, v, dout, dlse;
} magnitudes;

static magnitudes magnitudes_of(const call *c, const unit *u, range queries, range keys) {
    const heddle_attention *a = c->a;
    const heddle_attention_data *t = c->t;
    const int64_t count = max64(0, keys.end - keys.begin);
    magnitudes m = {.q = largest_query(c, u, TYPE(c), t->q, a->q_stride, queries, a->d),
                    .k = largest_key(c, u, t->k, a->k_stride, keys.begin, count, a->d),
                    .v = largest_key(c, u, t->v, a->v_stride, keys.begin, count, a->dv),
                    .dout = largest_query(c, u, TYPE(c), t->dout, a->do_stride, queries, a->dv)};
    if (c->adds) /* o is of other keys, too, and D of o */
        m.v = fmaxf(m.v, largest_query(c, u, HEDDLE_F32, t->o, a->o_stride, queries, a->dv));
    for (int64_t x = 0; x < c->group && t->dlse; x++) {
        const float *dlse = (const float *)t->dlse + lse_offset(c, u, u->first_head + x, queries.begin);
        m.dlse = fmaxf(m.dlse, largest_of(HEDDLE_F32, dlse, 0, 1, queries.end - queries.begin));
    }
    return m;
}

static magnitudes larger_magnitudes(magnitudes x, magnitudes y) {
    return (magnitudes){fmaxf(x.q, y.q), fmaxf(x.k, y.k), fmaxf(x.v, y.v), fmaxf(x.dout, y.dout),
                        fmaxf(x.dlse, y.dlse)};
}

/* Whether dO is multiplied at all. */
static bool may_lift_gradients(const call *c, const unit *u) {
    const bool few = c->group * u->s.sq <= FEW_LANES; /* whose time goes into reading keys */
    return MAY_LIFT && !few && c->t->dout && !c->t->dweights && fabs(c->a->scale) >= 0x1p-40;
}

/* What dO of a unit is multiplied with, whose queries and keys have these magnitudes. */
static float gradient_lift(const call *c, const unit *u, const magnitudes *m) {
    const double ds_of_dp = 1 + 2 * (double)c->a->dv * (double)m->v * (double)(c->drops ? c->keep_factor : 1),
                 rows = (double)(c->group * u->s.sq);
    /* dP and D, hence dS; its products with K, and with Q and dO for all rows; sums over a tile's or a row's weights are no larger */
    const double ds = (double)m->dlse + (double)m->dout * ds_of_dp,
                 most = ds * fmax(fmax((double)m->k, 1), rows * fmax((double)m->q, 1));
    if (!(most < INFINITY))
        return 1;
    return ldexpf(1, (int)clamp64(124 - ilogb(fmax(most, 0x1p-120)), -1, MOST_LIFT));
}

/* What weights of a unit are multiplied with in forward. */
static float lift_of_weights(const call *c, const unit *u) {
    if (!MAY_LIFT || (gathers(c->a) && TYPE(c) != HEDDLE_F16))
        return BASE_LAG;
    const float most = largest_key(c, u, c->t->v, c->a->v_stride, 0, u->s.sk, c->a->dv);
    return most <= LIFTED_VALUE ? WEIGHT_LIFT : most <= USUAL_VALUE ? 1 : BASE_LAG;
}

#endif

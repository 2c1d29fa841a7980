/* SPDX-License-Identifier: Apache-2.0
 * From the gradients of a block of scores to what it adds to dk, dv, dq and dbias. */
#ifndef HEDDLE_CPU_ATTENTION_PRODUCTS_H
#define HEDDLE_CPU_ATTENTION_PRODUCTS_H

#include "attention_gradients.h"

/* dS -> dT: through the derivative of softcap's tanh. */
static void uncap(const call *c, const key_block *b, backward_space *w) {
    if (c->a->softcap > 0)
        for (int64_t x = 0; x < b->count * w->l.stride; x += VL) {
            vf th = load(w->tanhs + x), ds = load(w->dp + x);
            store(w->dp + x, select_float(ds == 0, splat(0), ds * (1 - th * th)));
        }
}

#ifdef HAVE_BF16_DOT
/* add_to_keys() with pairs of lanes for rows. */
static void add_lane_pairs(const lanes *l, const parts *r, const float *weights, int64_t count, float *scratch,
                           const float *rows, int64_t pad, float *out, bool add) {
    const int64_t stride = lane_pairs_stride(l->vectors);
    narrow_weights(weights, count, l->vectors, scratch);
    for (const part *p = r->p; p < r->p + r->count; p++) {
        const int64_t lane = p->begin * VL, pairs = (min64(l->count, p->end * VL) - lane + 1) / 2;
        const gemm_a a = {scratch + p->first * stride + lane / 2, stride, 1};
        if (pairs > 0)
            gemm_pairs((int)(pad / VL), p->count, pairs, a, rows + lane / 2 * pad, pad, out + p->first * pad, pad, add,
                       (gemm_ahead){(const char *)a.p, 0});
    }
}
#endif

/* The lanes of one chain of additions. Where a tile has several heads of few queries, who sums head by head has shorter chains than a
 * tile is wide; and of heads that have q and dO in common a chain would add the same numbers again and again, rounded to the same side. */
INLINE int64_t lanes_of_chain(const call *c, const unit *u) {
    return TYPE(c) == HEDDLE_F32 && c->group > 1 && u->s.sq < LANES ? clamp64(u->s.sq, 8, 32) : LANES;
}

/* out[j][e] (+)= sum over lanes of weights[j][lane]·rows[lane][e], in the parts that are seen. */
static void add_to_keys(const lanes *l, const parts *r, bool careful, int64_t chain, const float *weights,
                        int64_t count, float *scratch, const float *rows, const float *row_tiles, int64_t pad,
                        float *out, bool add) {
#ifdef HAVE_BF16_TILES
    if (!careful && uses_tiles(l)) {
        tile_weight_rows(weights, count, l->vectors, scratch);
        tile_add_rows(l, r, scratch, row_tiles, pad, out, add);
        return;
    }
#elif defined(HAVE_BF16_DOT)
    if (!careful && row_tiles && !l->few) {
        add_lane_pairs(l, r, weights, count, scratch, row_tiles, pad, out, add);
        return;
    }
#else
    (void)count, (void)scratch, (void)row_tiles;
#endif
    for (const part *p = r->p; p < r->p + r->count; p++) {
        const int64_t lane = p->begin * VL, lanes_used = min64(l->count, p->end * VL) - lane;
        const gemm_a a = {weights + p->first * l->stride + lane, l->stride, 1};
        float *dst = out + p->first * pad;
        if (careful)
            gemm_careful(true, (int)(pad / VL), p->count, lanes_used, min64(chain, chain_of(false, lanes_used)), a,
                         rows + lane * pad, pad, dst, pad);
        for (int64_t x = 0; !careful && x < lanes_used; x += chain)
            gemm((int)(pad / VL), p->count, min64(chain, lanes_used - x), (gemm_a){a.p + x, a.row, a.x},
                 rows + (lane + x) * pad, pad, dst, pad, add || x > 0);
    }
}

/* Whether products by whole tiles, or by pairs, meet keys behind the block: they have weights of zero, but nobody has masked them. */
INLINE bool partial_step(const lanes *l, const key_block *b) {
#ifdef HAVE_BF16_TILES
    return uses_tiles(l) && b->count % TILE_DEPTH != 0;
#elif defined(HAVE_BF16_DOT)
    (void)l;
    return b->t.k_columns && b->count % 2 != 0;
#else
    (void)l, (void)b;
    return false;
#endif
}

/* Whether dbias has an element for each score: then it is written where dS is made, else summed by a pass of its own. */
static bool writes_dbias(const call *c) {
    const heddle_attention *a = c->a;
    const heddle_strides s = a->dbias_stride;
    return c->t->dbias && !c->adds && (s.b || a->b == 1) && (s.h || a->h == 1) && (s.s || a->sq == 1);
}

static void write_dbias_block(const call *c, const unit *u, const key_block *b, const backward_space *w) {
    const void *rows[LANES];
    float lower[LANES];
    for (int64_t x = 0; x < LANES; x++)
        lower[x] = w->lower;
    lane_rows(c, u, &w->l, c->t->dbias, c->a->dbias_stride, 0, rows);
    unpack_transposed(TYPE(c), w->dp, w->l.stride, w->l.count, b->count, lower, false, (void *const *)rows, b->first);
}

_Static_assert(LANES <= AHEAD_ROWS, "a row for each lane");

static void dbias_ahead(const call *c, const unit *u, const key_block *b, backward_space *w) {
    const int64_t size = element_size(TYPE(c));
    const void *rows[LANES];
    if (!writes_dbias(c) || w->l.few)
        return;
    lane_rows(c, u, &w->l, c->t->dbias, c->a->dbias_stride, 0, rows);
    ahead_write(&w->next, (void *const *)rows, w->l.count, b->first * size, b->count * size,
                product_steps(c, b->count, 1, 0));
}

/* Whether a block whose weights are all 0 adds nothing: 0 times what is not finite would be NaN. Where V is not at hand as rows of floats
 * nobody looks. */
static bool adds_nothing(const call *c, const key_block *b, bool k_finite, const backward_space *w) {
    const lanes *l = &w->l;
    if (l->few || uses_tiles(l) || c->v_pairs || c->t->dweights || w->fresh || !weighs_nothing(c, b, w))
        return false;
    return k_finite && w->q_finite && w->dout_finite && all_finite(w->dsum, 1, LANES, l->stride) &&
           all_finite(b->v, b->count, b->v_stride, c->a->dv);
}

static void backward_block(const call *c, const unit *u, const key_block *b, bool k_finite, backward_space *w,
                           float *dk, float *dv) {
    const lanes *l = &w->l;
    dbias_ahead(c, u, b, w);
    const bool masked = known_scores(c, u, b, w);
    if (adds_nothing(c, b, k_finite, w)) {
        if (writes_dbias(c)) {
            memset(w->dp, 0, sizeof(float) * (size_t)(b->count * l->stride));
            write_dbias_block(c, u, b, w);
        }
        return;
    }
    score_gradients(c, u, b, masked, w);
    const bool hides =
        masked || (!w->fresh && partial_step(l, b)); /* with nothing but `fresh`, nobody reads such keys */
    const int64_t chain = lanes_of_chain(c, u);
    add_to_keys(l, &w->seen, hides && !w->dout_finite, chain, w->s, b->count, w->weights_a, w->dout, w->dout_tiles,
                c->dv_pad, dv, !w->fresh);
    if (writes_dbias(c))
        write_dbias_block(c, u, b, w);
    uncap(c, b, w);
    add_to_keys(l, &w->seen, hides && !w->q_finite, chain, w->dp, b->count, w->weights_a, w->q, w->q_tiles, c->d_pad,
                dk, !w->fresh);
    add_parts(l, &w->seen, (masked || partial_step(l, b)) && !k_finite, b->k, b->k_stride, c->a->d, &b->t,
              b->t.k_columns, w->weights_b, b->count, w->dp, w->dqt,
              rows_behind(c, u, c->t->k, c->a->k_stride, c->a->d, b->first + b->count, c->pairs), &w->next);
}

#endif

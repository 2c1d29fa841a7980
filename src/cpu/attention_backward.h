/* SPDX-License-Identifier: Apache-2.0
 * Attention backward (Dao 2023, algorithm 2), the same bits for any number of threads.
 *
 *   sizes     the largest magnitudes of a unit, a share with each chunk, for what its gradients are lifted by (attention_lift.h)
 *   prepare   D = rowsum(dO∘O) - dlse (+ rowsum(P∘dweights)), which main improves upon in rows whose weight lies in one block
 *             (settle_rows), or rowsum(P∘(dP + dweights)) - dlse where that would not do (surveys); dq = 0 where a tile sees
 *             nothing
 *   main      a task owns a chunk of the keys of one unit, or all of them (joins_chunks), and then the two passes before are a part of
 *             it: dK and dV stay with it while it walks over the queries, and in float32 S and dP that prepare has formed.
 *             dQ of a tile of queries is added to by several chunks, in the order of the chunks: each waits for its turn.
 *   dsinks, dbias   small sums of their own, each element by one task
 *
 * Tickets take the first chunk of as many units as there are threads, then their second: so nobody waits where there are many units,
 * and whom a task waits for is running already. */
#ifndef HEDDLE_CPU_ATTENTION_BACKWARD_H
#define HEDDLE_CPU_ATTENTION_BACKWARD_H

#include "attention_products.h"

/* ----------------------------------------------------------------------------------------------------- prepare */

static void clear_rows(const call *c, void *p, heddle_strides stride, int64_t n, int64_t head, int64_t first,
                       int64_t count, int64_t width) {
    if (p)
        for (int64_t i = first; i < first + count; i++)
            memset((char *)p + row_offset(stride, n, head, i) * element_size(TYPE(c)), 0,
                   (size_t)(width * element_size(TYPE(c))));
}

/* sum over dO∘O of one row, leaving out zeros of O: the row of a query that sees nothing may hold anything in dO. */
static float dot_row(const call *c, const void *o, const void *dout) {
    vf sum = splat(0);
    for (int64_t e = 0; e < c->a->dv; e += VL) {
        int64_t n = c->a->dv - e;
        vf x, y;
        if (TYPE(c) == HEDDLE_F32) {
            x = load_some(HEDDLE_F32, element_at(o, e, TYPE(c)), n);
            y = load_some(HEDDLE_F32, element_at(dout, e, TYPE(c)), n);
        } else {
            x = c->adds ? load_some(HEDDLE_F32, element_at(o, e, HEDDLE_F32), n)
                        : load_some(TYPE(c), element_at(o, e, TYPE(c)), n);
            y = load_some(TYPE(c), element_at(dout, e, TYPE(c)), n);
        }
        sum += select_float(x == 0, splat(0), x * y);
    }
    float r = 0;
    for (int x = 0; x < VL; x++)
        r += sum[x];
    return r;
}

/* Whether few of a row's `count` keys share its weight: more than their number makes lse large; where a mask or a bias may hide keys, few
 * make it small. It is of scores of common size that this is true, and of others it costs time alone. */
static bool is_sharp(const call *c, float log_count, float lse) {
    const bool hides = c->adjusts || c->masks;
    return lse > -INFINITY && (lse > log_count + 5 || (hides && lse < 2.75f)); /* 16 keys of score 0 */
}

/* Tiles whose D and lse are found by a pass of their own, where no block settles all rows (settle_rows): rows of few keys on both sides of
 * a chunk's end; float32, where a row is sharp; 16 bits, few queries and so many keys as stay near for what comes next. */
static bool surveys(const call *c, const unit *u, const lanes *l, int64_t chunk_k, bool sharp) {
    const range seen = l->keys;
    if (seen.end - seen.begin <= c->tile_k)
        return seen.begin < seen.end && (seen.end - 1) / chunk_k > seen.begin / chunk_k;
    if (TYPE(c) == HEDDLE_F32)
        return sharp;
    return c->group * u->s.sq <= FEW_LANES && u->s.sk <= 4 * c->tile_k;
}

/* Keys of the block that begins with key j, which ends where a chunk does. */
INLINE int64_t block_keys(const call *c, const backward_shared *g, int64_t j, range keys) {
    return min64(c->tile_k, min64(keys.end, (j / g->chunk_k + 1) * g->chunk_k) - j);
}

/* add_row_sums() of a block's scores, which stay as they are where they are kept. */
static void add_mixed_sums(const call *c, const unit *u, const key_block *b, bool whole, backward_space *w) {
    if (w->s != w->block_s)
        memcpy(w->block_s, w->s, sizeof(float) * (size_t)(b->count * w->l.stride));
    w->s = w->block_s;
    weigh_scores(false, false, NO_SUMS, c->factor, b->count, w);
    if (whole && c->drops)
        dropout_factors(c, u, &w->l, b, w->z);
    if (c->t->dweights)
        pack_dweights(c, u, b, w);
    add_row_sums(c, b, !whole, w);
}

/* D gets sum over all keys of P∘dweights, the scores once more; with `whole` D, which has that, becomes the sum of P∘(Z∘dP + dweights) and
 * lse what makes P sum to 1, in rows that lse says to be of these keys alone. */
static void add_key_sums(const call *c, const unit *u, bool whole, backward_space *w, const backward_shared *g) {
    const lanes *l = &w->l;
    const range keys = l->keys;
    const bool mixes = !whole || c->drops || c->t->dweights;
    double of_p[LANES] = {0}, of_ds[LANES] = {0};
    load_tile(c, u, w, g);
    for (int64_t j = keys.begin, n; j < keys.end; j += n) {
        n = block_keys(c, g, j, keys);
        if (!sees_some(c, u, l, j, n))
            continue;
        const key_block b = load_key_block(c, u, w, j, n, whole);
        if (w->has_kept)
            known_scores(c, u, &b, w);
        else
            new_scores(c, u, &b, w->kept != NULL, w);
        if (weighs_nothing(c, &b, w))
            continue;
        if (whole)
            weight_gradients(c, u, &b, w);
        if (whole && w->kept)
            w->has_dp[kept_block(&b, w)] = true;
        if (mixes)
            add_mixed_sums(c, u, &b, whole, w);
        else
            sum_weights(true, SUMS_OF_BOTH, c->factor, b.count, w);
        for (int64_t x = 0; x < l->stride; x++) {
            of_p[x] += (double)w->sum_p[x];
            of_ds[x] += (double)w->sum_ds[x];
        }
    }
    w->has_kept = w->kept != NULL;
    for (int64_t x = 0; x < l->stride; x++) {
        w->sum_p[x] = (float)of_p[x];
        w->sum_ds[x] = (float)of_ds[x];
    }
    for (int64_t x = 0; x < l->stride; x += VL) {
        const vf sum = load(w->sum_p + x) + load(w->sink + x), lacks = lacks_of(w, x, 1 / sum);
        const vi right = sums_to_one(c, sum, load(w->base + x), 0x1p-20f);
        for (int64_t y = x; y < min64(l->count, x + VL); y++) {
            const int64_t at = lse_offset(c, u, l->head[y], l->first + l->index[y]);
            const float d = g->dsum[at], more = (whole ? lacks[y - x] : w->sum_ds[y]) / w->lift;
            if (whole && !right[y - x])
                continue;
            g->dsum[at] = d + more;
            if (whole && g->dfix)
                g->dfix[at] = more - (g->dsum[at] - d);
            if (whole)
                g->rest[at] += (float)log2(of_p[y] + (double)w->sink[y]);
        }
    }
}

/* natural_lse() undone: base alone would cost P two roundings of lse. +inf makes P zero for a row that sees nothing. True if even
 * the rounding of lse itself, |lse|·2^-25 in all of a row's P, would be seen: in 16 bits from a 32nd of the type's unit roundoff on. */
static bool split_lse(const call *c, float lse, float *base, float *rest) {
    const double stored = lse == -INFINITY ? INFINITY : lse / c->unit;
    *base = (float)stored;
    *rest = isfinite(*base) ? (float)((stored - *base) * c->factor) : 0;
    const float seen = TYPE(c) == HEDDLE_F32 ? 32 : TYPE(c) == HEDDLE_BF16 ? 0x1p12f : 0x1p9f;
    return fabsf(lse) > seen && fabsf(lse) < INFINITY;
}

/* The log-sum-exp of a row, in units of log2 `rest` above a score as stored. Its whole part is a power of two of P, which rounds nothing: as
 * part of the exponent it would cost all scores of the row the bits that it is larger by. */
static void set_lse(const backward_shared *g, int64_t at, float base, double rest) {
    const double whole = fabs(rest) < 64 ? rint(rest) : 0;
    g->base[at] = base;
    g->rest[at] = (float)(rest - whole);
    g->whole[at] = (float)whole;
}

/* Whether P of a row of several blocks is to sum to 1: in float32 its lse is off by its own rounding, up to |lse|·2^-24, and all P of the
 * row with it. Long rows of q and k hide it in dk and dv, whose scores are off by more, unless so many keys make lse large and the queries
 * are too few for their roundings to even out, or d is short of what hides it then; of dq see measures(). */
static bool renews(const call *c, const unit *u, int64_t count) {
    const bool shows = c->a->d <= 32 || c->adjusts || c->a->features & HEDDLE_SINKS;
    const bool large = count >= MANY_KEYS && (c->a->d < 64 || c->group * u->s.sq <= 256);
    return TYPE(c) == HEDDLE_F32 && count > c->tile_k && (shows || large);
}

/* In float32, of rows of several blocks: exponents are taken from about their average score. All that are as far from it as lse is would be
 * rounded by that, and the factor's own rounding would be in all of them alike. It is a multiple of a step of about 1 in units of log2:
 * what a score is above a number of few bits is not rounded, and the largest scores have most of the weight. */
static void near_scores(const call *c, const backward_shared *g, int64_t at, double log_count, double step) {
    const double lse = (double)((const float *)c->t->lse)[at];
    const float base = (float)(rint((lse - log_count) / c->unit / step) * step);
    if (isfinite(base))
        set_lse(g, at, base, (lse - (double)base * c->unit) * LOG2E);
}

/* The largest score of a row of some keys becomes what its exponents are taken from, if it is larger than those before: most of the row's
 * weight is near it. What P sums to stays as it is. */
static void raise_bases(const call *c, const key_block *b, float *top, double *rest, backward_space *w) {
    const int64_t stride = w->l.stride;
    float largest[LANES];
    for (int64_t x = 0; x < stride; x += VL) {
        vf most = load(top + x);
        for (int64_t y = 0; y < b->count; y++)
            most = vmax(load(w->s + y * stride + x), most);
        store(largest + x, most);
    }
    for (int64_t x = 0; x < stride; x++) {
        const float most = largest[x];
        const double above = ((double)w->base[x] - (double)most) * (double)c->factor + rest[x];
        if (most > top[x] && fabs(above) < 64) {
            top[x] = w->base[x] = most;
            rest[x] = above;
            w->rest[x] = (float)(above - rint(above));
            w->whole[x] = (float)rint(above);
        }
    }
}

/* lse as it makes P sum to 1. Only where it agrees with the given one to its rounding: that may be of more keys than these. */
static void renew_lse(const call *c, const unit *u, range keys, backward_space *w, const backward_shared *g) {
    const lanes *l = &w->l;
    double sum[LANES] = {0}, rest[LANES];
    float top[LANES];
    load_q(c, u, w, g);
    for (int64_t x = 0; x < l->stride; x++) {
        top[x] = -INFINITY;
        rest[x] = (double)w->rest[x] + (double)w->whole[x];
    }
    for (int64_t j = keys.begin, n; j < keys.end; j += n) {
        n = block_keys(c, g, j, keys);
        if (!sees_some(c, u, l, j, n))
            continue;
        const key_block b = load_key_block(c, u, w, j, n, false);
        new_scores(c, u, &b, w->kept != NULL, w);
        if (weighs_nothing(c, &b, w))
            continue;
        raise_bases(c, &b, top, rest, w);
        sum_weights(false, SUM_OF_P, c->factor, b.count, w);
        for (int64_t x = 0; x < l->stride; x++)
            sum[x] += (double)w->sum_p[x];
    }
    for (int64_t x = 0; x < l->count; x++) {
        const int64_t at = lse_offset(c, u, l->head[x], l->first + l->index[x]);
        const float lse = ((const float *)c->t->lse)[at];
        sum[x] += (double)sink_weight(c, w, x);
        if (fabsf(lse) < INFINITY && fabs(1 - sum[x]) <= fabs((double)lse) * 0x1p-23 + 0x1p-20)
            set_lse(g, at, w->base[x], rest[x] + log2(sum[x]));
    }
    w->has_kept = w->kept != NULL;
}

/* The maximum of each row grows by a block's scores, and the sum of exponents from it. */
static void add_exponents(const call *c, int64_t count, float *top, float *sum, backward_space *w) {
    const int64_t stride = w->l.stride;
    for (int64_t x = 0; x < stride; x += VL) {
        const vf before = load(top + x);
        vf most = before;
        for (int64_t y = 0; y < count; y++)
            most = vmax(most, load(w->s + y * stride + x));
        const vf base = select_float(most == -INFINITY, splat(0), most);
        store(top + x, most);
        store(w->base + x, base);
        store(sum + x, load(sum + x) * vexp2_times(c->factor, before - base));
    }
    sum_weights(false, SUM_OF_P, c->factor, count, w);
    for (int64_t x = 0; x < stride; x += VL)
        store(sum + x, load(sum + x) + load(w->sum_p + x));
}

/* The softmax sums of a tile anew, for scores so large that a float32 lse is too coarse for P = exp(S - lse): the maximum is
 * subtracted exactly, the rest is the logarithm of the sum. Taken only where it agrees with the given lse to its rounding. */
static void refine_lse(const call *c, const unit *u, backward_space *w, const backward_shared *g) {
    const lanes *l = &w->l;
    range keys = l->keys;
    float sum[LANES] = {0}, top[LANES];
    load_q(c, u, w, g);
    for (int64_t x = 0; x < LANES; x++) {
        top[x] = -INFINITY;
        w->rest[x] = w->whole[x] = 0;
    }
    for (int64_t j = keys.begin, n; j < keys.end; j += n) {
        n = block_keys(c, g, j, keys);
        if (!sees_some(c, u, l, j, n))
            continue;
        const key_block b = load_key_block(c, u, w, j, n, false);
        new_scores(c, u, &b, w->kept != NULL, w);
        add_exponents(c, b.count, top, sum, w);
    }
    for (int64_t x = 0; x < l->count; x++) {
        int64_t at = lse_offset(c, u, l->head[x], l->first + l->index[x]);
        float base = top[x], lse = ((const float *)c->t->lse)[at];
        double rest = log2((double)sum[x]);
        if (c->a->features & HEDDLE_SINKS) {
            const float sink = ((const float *)c->t->sinks)[l->head[x]];
            if (sink_above(c, sink, base) > 0) { /* the largest of all */
                base = (float)(sink / c->unit);
                rest += ((double)top[x] - base) * c->factor;
            }
            const double other = sink_above(c, sink, base);
            rest = fmax(rest, other) + log2(1 + exp2(-fabs(rest - other)));
        }
        if (fabsf(natural_lse(c, base, rest) - lse) <= fabsf(lse) * 0x1p-20f)
            set_lse(g, at, base, rest);
    }
    w->has_kept = w->kept != NULL;
}

/* `lift` of the space is the unit's. */
static void prepare_task(const call *c, const unit *u, int64_t tile, backward_space *w, const backward_shared *g) {
    const heddle_attention *a = c->a;
    int64_t rows = c->group * u->s.sq;
    w->has_kept = false;
    if (tile * LANES >= rows)
        return;
    make_lanes(c, u, -1, tile * LANES, min64(LANES, rows - tile * LANES), &w->l);
    const range seen = w->l.keys;
    const int64_t count = seen.end - seen.begin;
    const bool near = TYPE(c) == HEDDLE_F32 && count > c->tile_k && !c->masks;
    const void *o[LANES], *dout[LANES];
    bool large = false, sharp = false, renewed = renews(c, u, count);
    const double log_count = log((double)count), step = exp2(-ceil(log2((double)c->factor)));
    lane_rows_of(c->out, u, &w->l, c->t->o, a->o_stride, u->s.first_q, o);
    if (c->t->dout)
        lane_rows(c, u, &w->l, c->t->dout, a->do_stride, u->s.first_q, dout);
    for (int64_t x = 0; x < w->l.count; x++) {
        int64_t at = lse_offset(c, u, w->l.head[x], w->l.first + w->l.index[x]);
        g->dsum[at] = (c->t->dout ? dot_row(c, o[x], dout[x]) : 0) - dlse_of(c, u, &w->l, x);
        if (g->dfix)
            g->dfix[at] = 0;
        g->whole[at] = 0;
        if (g->sum_p)
            g->sum_p[at] = 0;
        large |= split_lse(c, ((const float *)c->t->lse)[at], &g->base[at], &g->rest[at]);
        if (near)
            near_scores(c, g, at, log_count, step);
        sharp |= is_sharp(c, (float)log_count, ((const float *)c->t->lse)[at]);
        if (seen.begin >= seen.end && !c->adds) /* nobody else writes it */
            clear_rows(c, c->t->dq, a->dq_stride, u->n, w->l.head[x], u->s.first_q + w->l.first + w->l.index[x], 1,
                       a->d);
    }
    if (large)
        refine_lse(c, u, w, g);
    else if (renewed)
        renew_lse(c, u, seen, w, g);
    if (c->t->dweights)
        add_key_sums(c, u, false, w, g);
    if (surveys(c, u, &w->l, g->chunk_k, sharp))
        add_key_sums(c, u, true, w, g);
}

/* -------------------------------------------------------------------------------------------------------- main */

/* The chunks that tile's queries see keys of: begin .. end-1, all of them adding to its dQ. */
static range chunks_of_tile(const lanes *l, int64_t chunk_k) {
    range keys = l->keys;
    range r = {keys.begin / chunk_k, keys.begin < keys.end ? (keys.end - 1) / chunk_k + 1 : keys.begin / chunk_k};
    return r;
}

/* Whether P of a row is summed while dq is formed: in float32 all of a row is off by the rounding of its lse, and dq, which is a sum over
 * the row, by as much. dk and dv are of many rows, which are off by themselves. */
static bool measures(const call *c, const unit *u, int64_t count) {
    return TYPE(c) == HEDDLE_F32 && !c->adds && count > c->tile_k && !renews(c, u, count);
}

/* 1 over what P of a row sums to; 1 where it does not sum to 1 but for the rounding of lse, which may be of more keys than these. */
static float correction(const call *c, const unit *u, int64_t x, backward_space *w, const backward_shared *g) {
    const int64_t at = lse_offset(c, u, w->l.head[x], w->l.first + w->l.index[x]);
    const float lse = ((const float *)c->t->lse)[at], sum = g->sum_p[at] + w->row_p[x];
    g->sum_p[at] = sum;
    const bool agrees = fabsf(lse) < INFINITY && fabsf(1 - sum) <= fabsf(lse) * 0x1p-23f + 0x1p-20f;
    return agrees ? 1 / sum : 1;
}

/* dQ of the tile: added to dq itself (float32), or to the sums in float32, which the last chunk rounds into dq. */
static void add_dq(const call *c, const unit *u, backward_space *w, const backward_shared *g, float *sums, bool first,
                   bool last) {
    const lanes *l = &w->l;
    const void *rows[LANES];
    float scale[LANES], correct[LANES];
    for (int64_t x = 0; x < l->stride; x++)
        scale[x] = (float)c->a->scale * w->lower;
    for (int64_t x = 0; x < l->count && w->measured; x++) {
        correct[x] = correction(c, u, x, w, g);
        scale[x] *= first && last ? correct[x] : 1;
    }
    lane_rows_of(c->out, u, l, c->t->dq, c->a->dq_stride, u->s.first_q, rows);
    void *const *out = (void *const *)rows;
    if (c->out == HEDDLE_F32 || (first && last)) {
        unpack_transposed(c->out, w->dqt, l->stride, l->count, c->a->d, scale, c->adds || !first, out, 0);
        for (int64_t x = 0; x < l->count && w->measured && last && !first; x++)
            for (int64_t e = 0; e < c->a->d; e++)
                ((float *)out[x])[e] *= correct[x];
        return;
    }
    void *sum_rows[LANES];
    int64_t f0 = l->first * c->group + (l->head[0] - u->first_head);
    for (int64_t x = 0; x < l->count; x++)
        sum_rows[x] = sums + (f0 + x) * c->d_pad;
    unpack_transposed(HEDDLE_F32, w->dqt, l->stride, l->count, c->a->d, scale, !first, sum_rows, 0);
    if (last)
        for (int64_t x = 0; x < l->count; x++)
            narrow_row(TYPE(c), sum_rows[x], c->a->d, 1, out[x]);
}

/* A chunk of keys, and the sums of its dK and dV. */
typedef struct chunk {
    key_block keys;
    bool k_finite;
    float *dk, *dv, *dk_all, *dv_all;
    int64_t added; /* tiles */
} chunk;

static void fold_chunk(const call *c, bool first, chunk *p) {
    fold_sums(&p->dk_all, &p->dk, p->keys.count * c->d_pad, first);
    fold_sums(&p->dv_all, &p->dv, p->keys.count * c->dv_pad, first);
}

static void write_chunk(const call *c, const unit *u, chunk *p, bool folded, float lower) {
    const heddle_attention *a = c->a;
    if (folded)
        fold_chunk(c, false, p);
    const float *dk = folded ? p->dk_all : p->dk, *dv = folded ? p->dv_all : p->dv;
    const float scale = (float)a->scale * lower;
    for (int64_t j = 0; j < p->keys.count; j++) {
        int64_t row = u->s.first_k + p->keys.first + j;
        if (c->adds) {
            if (c->t->dk)
                add_row(dk + j * c->d_pad, a->d, scale, (float *)c->t->dk + row_offset(a->dk_stride, u->n, u->hk, row));
            if (c->t->dv)
                add_row(dv + j * c->dv_pad, a->dv, lower,
                        (float *)c->t->dv + row_offset(a->dv_stride, u->n, u->hk, row));
            continue;
        }
        if (c->t->dk)
            narrow_row(TYPE(c), dk + j * c->d_pad, a->d, scale,
                       (char *)c->t->dk + row_offset(a->dk_stride, u->n, u->hk, row) * element_size(TYPE(c)));
        if (c->t->dv)
            narrow_row(TYPE(c), dv + j * c->dv_pad, a->dv, lower,
                       (char *)c->t->dv + row_offset(a->dv_stride, u->n, u->hk, row) * element_size(TYPE(c)));
    }
}

/* A tile that has been loaded against a chunk. */
static void backward_tile(const call *c, const unit *u, const chunk *p, backward_space *w) {
    const range seen = w->l.keys;
    const key_block *all = &p->keys;
    int64_t begin = max64(seen.begin, all->first), end = min64(seen.end, all->first + all->count);
    memset(w->dqt, 0, sizeof(float) * (size_t)(c->a->d * w->l.stride));
    memset(w->row_p, 0, sizeof w->row_p);
    w->measured = c->t->dq && measures(c, u, seen.end - seen.begin);
    if (c->a->features & HEDDLE_BLOCKS) /* whole blocks of the lists; what is before `seen` is hidden */
        begin -= (begin - all->first) % c->tile_k;
    else if (uses_tiles(&w->l)) /* whole tiles */
        begin -= (begin - all->first) % 32;
    else if (all->t.k_columns)
        begin -= (begin - all->first) % 2;
    for (int64_t j = begin; j < end; j += c->tile_k) {
        int64_t at = j - all->first;
        key_block b = {j,
                       min64(c->tile_k, end - j),
                       all->k + at * all->k_stride,
                       all->v + at * all->v_stride,
                       all->k_stride,
                       all->v_stride,
                       all->t};
#ifdef HAVE_BF16_TILES
        if (uses_tiles(&w->l)) {
            b.t.k += at / 16 * b.t.k_step;
            b.t.v += at / 16 * b.t.v_step;
            b.t.k_columns += at / 32 * TILE_FLOATS;
        }
#else
        if (all->t.k_columns)
            b.t.k_columns += at / 2 * c->d_pad;
#endif
        b = mask_cut(c, u, &w->l, &b);
        if (b.count > 0 && sees_some(c, u, &w->l, b.first, b.count))
            backward_block(c, u, &b, p->k_finite, w, p->dk + at * c->d_pad, p->dv + at * c->dv_pad);
    }
}

/* K and V of the chunk. True if K is finite. */
static bool load_chunk(const call *c, const unit *u, backward_space *w, key_block *b) {
    const heddle_attention *a = c->a;
    const bool few = c->group * u->s.sq <= FEW_LANES; /* who read V where it is */
    b->v = w->v;
#ifdef HAVE_BF16_TILES
    if (!few) {
        load_key_tiles(c, u, &w->keys, b);
        if (halves_finite(b->t.k, (b->count + 15) / 16 * b->t.k_step)) { /* nobody reads rows then */
            b->k = w->k;
            return true;
        }
    }
#else
#ifdef HAVE_BF16_DOT
    if (!few && c->pairs) {
        const few_rows k = few_keys(c, u, c->t->k, a->k_stride, a->d, b->first);
        b->t.k_columns = w->keys.k_columns;
        pair_keys(k.p, k.stride, b->count, k.n, c->d_pad, b->t.k_columns);
        b->k = w->k;
    }
#endif
    if (!few && !c->v_pairs)
        b->v = key_rows(c, u, c->t->v, a->v_stride, a->dv, b->first, b->count, w->v, c->dv_pad, &b->v_stride);
#ifdef HAVE_BF16_DOT
    if (b->t.k_columns && c->k_pairs && halves_finite(b->t.k_columns, (b->count + 1) / 2 * c->d_pad))
        return true; /* nobody reads rows then */
#endif
#endif
    b->k = key_rows(c, u, c->t->k, a->k_stride, a->d, b->first, b->count, w->k, c->d_pad, &b->k_stride);
    return all_finite(b->k, b->count, b->k_stride, a->d);
}

/* Rows share·n/shares .. (share+1)·n/shares of one of K, V, dK and dV. */
static void ahead_share(const call *c, const unit *u, const void *p, heddle_strides stride, int64_t width,
                        int64_t first, int64_t n, int64_t share, int64_t shares, int64_t steps, ahead *a) {
    const int64_t size = element_size(TYPE(c)), begin = n * share / shares, count = n * (share + 1) / shares - begin;
    if (p && count > 0)
        ahead_add(a, element_at(p, row_offset(stride, u->n, u->hk, u->s.first_k + first + begin), TYPE(c)),
                  stride.s * size, width * size, count, steps);
}

typedef struct piece {
    int64_t at, unit, part;
} piece;

/* What a ticket is for. The last units of all are in one group with those before, so that a few need not be divided evenly. */
static piece piece_of(const backward_shared *g, int64_t at) {
    const int64_t groups = max64(1, g->units / g->together);
    const int64_t group = min64(at / (g->together * g->parts), groups - 1), first = group * g->together;
    const int64_t count = group == groups - 1 ? g->units - first : g->together, x = at - first * g->parts;
    return (piece){at, first + x % count, x / count};
}

/* Asks for what is needed next: rows of dq that this tile will write, q, dO, a bias and a mask of the next tile, and of what the next task
 * begins with a share for each tile: its keys, and what prepare_task() reads where that is a part of it. */
static void backward_ahead(const call *c, const unit *u, piece now, int64_t tile, int64_t tiles, int64_t keys,
                           backward_space *w, const backward_shared *g) {
    const heddle_attention *a = c->a;
    ahead *p = &w->next;
    ahead_begin(p);
    if (w->l.few)
        return;
    const int64_t steps = product_steps(c, keys, 2, a->d), f0 = tile * LANES, rows = c->group * u->s.sq;
    const int64_t share = tiles - 1 - tile;
    const int64_t at = next_of(now.at, g->per_ticket, c->threads);
    if (at < g->units * g->parts) {
        const piece next = piece_of(g, at);
        const unit v = next.unit == now.unit ? *u : make_unit(c, next.unit);
        const int64_t first = next.part * g->part_k, n = min64(g->part_k, v.s.sk - first);
        ahead_share(c, &v, c->t->v, a->v_stride, a->dv, first, n, share, tiles, steps, p);
        ahead_share(c, &v, c->t->k, a->k_stride, a->d, first, n, share, tiles, steps, p);
        if (g->parts == 1) {
            const int64_t all = c->group * v.s.sq, begin = all * share / tiles, end = all * (share + 1) / tiles;
            ahead_queries(c, &v, c->t->dout, a->do_stride, a->dv, begin, end, steps, p);
            ahead_queries(c, &v, c->t->o, a->o_stride, a->dv, begin, end, steps, p);
        }
        if (tile == 0) {
            const int64_t last = (c->group * v.s.sq - 1) / LANES * LANES;
            ahead_queries(c, &v, c->t->q, a->q_stride, a->d, last, c->group * v.s.sq, steps, p);
        }
    }
    if (tile > 0) {
        ahead_queries(c, u, c->t->q, a->q_stride, a->d, f0 - LANES, f0, steps, p);
        ahead_queries(c, u, c->t->dout, a->do_stride, a->dv, f0 - LANES, f0, steps, p);
        ahead_options(c, u, f0 - LANES, f0, (range){now.part * g->part_k, (now.part + 1) * g->part_k}, steps, p);
    }
    ahead_queries(c, u, c->t->dq, a->dq_stride, a->d, f0, min64(rows, f0 + LANES), steps, p);
}

/* Magnitudes of a share of a unit, for gradient_lift(). */
static void size_task(const call *c, const unit *u, int64_t unit_index, int64_t chunk_index, const backward_shared *g) {
    const int64_t rows = (u->s.sq + g->chunks - 1) / g->chunks, first = min64(u->s.sq, chunk_index * rows);
    const range queries = {first, min64(u->s.sq, first + rows)},
                keys = {chunk_index * g->chunk_k, min64(u->s.sk, (chunk_index + 1) * g->chunk_k)};
    if (may_lift_gradients(c, u))
        g->sizes[unit_index * g->chunks + chunk_index] = magnitudes_of(c, u, queries, keys);
}

/* What all gradients of a unit are lifted by, whoever has which of its chunks. */
static void set_lift(const call *c, const unit *u, int64_t unit_index, backward_space *w, const backward_shared *g) {
    w->lift = 1;
    if (may_lift_gradients(c, u)) {
        magnitudes m = {0};
        if (g->parts == 1)
            m = magnitudes_of(c, u, (range){0, u->s.sq}, (range){0, u->s.sk});
        for (int64_t x = 0; g->parts > 1 && x < g->chunks; x++)
            m = larger_magnitudes(m, g->sizes[unit_index * g->chunks + x]);
        w->lift = gradient_lift(c, u, &m);
    }
    w->lower = 0.5f / w->lift;
}

/* The chunks of a task, with sums of zero; returns how many there are. */
static int begin_chunks(const call *c, const unit *u, piece now, backward_space *w, const backward_shared *g,
                        chunk *chunks) {
    const int64_t begin = now.part * g->part_k, end = min64(u->s.sk, begin + g->part_k);
    int count = 0;
    for (int64_t first = begin; first < end; first += g->chunk_k) {
        const int64_t dk = (first - begin) * c->d_pad, dv = (first - begin) * c->dv_pad;
        chunk *p = &chunks[count++];
        *p = (chunk){.keys = {.first = first, .count = min64(g->chunk_k, end - first)},
                     .dk = w->dk + dk,
                     .dv = w->dv + dv,
                     .dk_all = w->dk_all ? w->dk_all + dk : NULL,
                     .dv_all = w->dv_all ? w->dv_all + dv : NULL};
        p->k_finite = load_chunk(c, u, w, &p->keys);
        if (!w->fresh) {
            memset(p->dk, 0, sizeof(float) * (size_t)(p->keys.count * c->d_pad));
            memset(p->dv, 0, sizeof(float) * (size_t)(p->keys.count * c->dv_pad));
        }
    }
    return count;
}

/* What a tile adds to a chunk, and the chunk to dQ of the tile, once it is its turn. True if the tile has been loaded. */
static bool tile_and_chunk(const call *c, const unit *u, int64_t unit_index, int64_t tile, bool loaded, chunk *p,
                           float *sums, backward_space *w, const backward_shared *g) {
    const range mine = chunks_of_tile(&w->l, g->chunk_k);
    const int64_t index = p->keys.first / g->chunk_k;
    _Atomic uint32_t *turn = &g->turn[unit_index * g->tiles + tile];
    if (index < mine.begin || index >= mine.end)
        return loaded;
    if (index > mine.begin && index < mine.end - 1 && !sees_some(c, u, &w->l, p->keys.first, p->keys.count)) {
        if (c->t->dq) { /* nothing to add, but others wait for their turn */
            wait_for_turn(turn, (uint32_t)index);
            atomic_store_explicit(turn, (uint32_t)index + 1, memory_order_release);
        }
        return loaded;
    }
    if (loaded) {
        load_terms(c, u, w, g);
    } else {
        load_tile(c, u, w, g);
        load_rows(c, u, w);
    }
    backward_tile(c, u, p, w);
    p->added++;
    for (int64_t x = 0; x < w->l.count && g->chunks == 1; x++) { /* for dsinks and dbias */
        const int64_t at = lse_offset(c, u, w->l.head[x], w->l.first + w->l.index[x]);
        g->dsum[at] = w->dsum[x] / w->lift;
        g->rest[at] = w->rest[x];
    }
    if (!c->t->dq)
        return true;
    if (index > mine.begin)
        wait_for_turn(turn, (uint32_t)index);
    add_dq(c, u, w, g, sums, index == mine.begin, index == mine.end - 1);
    atomic_store_explicit(turn, (uint32_t)index + 1, memory_order_release);
    return true;
}

static void backward_task(const call *c, const unit *u, piece now, backward_space *w, const backward_shared *g) {
    const heddle_attention *a = c->a;
    const int64_t rows = c->group * u->s.sq, tiles = (rows + LANES - 1) / LANES;
    set_lift(c, u, now.unit, w, g);
    for (int64_t tile = 0; g->parts == 1 && !w->kept && tile < tiles; tile++)
        prepare_task(c, u, tile, w, g);
    w->fresh = tiles == 1 && a->mask == HEDDLE_MASK_NONE && !(a->features & HEDDLE_WINDOW) && !c->masks;
    chunk chunks[MOST_CHUNKS];
    const int count = begin_chunks(c, u, now, w, g, chunks);
    const int64_t fold = folds(TYPE(c), rows) ? tiles_of_fold(tiles) : tiles;
    float *sums = g->slots ? g->dq + now.unit % g->slots * (c->group * a->sq * c->d_pad) : NULL;
    if (g->slots && now.unit >= g->slots) /* who used the slot before must be through */
        wait_for_turn(&g->done[now.unit - g->slots], (uint32_t)g->chunks);
    /* Downwards: the chunks of a causal mask all begin at the last queries and follow each other closely. */
    for (int64_t tile = tiles - 1; tile >= 0; tile--) {
        bool loaded = false;
        w->has_kept = false;
        if (w->kept)
            prepare_task(c, u, tile, w, g);
        make_lanes(c, u, -1, tile * LANES, min64(LANES, rows - tile * LANES), &w->l);
        backward_ahead(c, u, now, tile, tiles, min64(g->part_k, u->s.sk - now.part * g->part_k), w, g);
        for (chunk *p = chunks; p < chunks + count; p++) {
            const int64_t before = p->added;
            loaded = tile_and_chunk(c, u, now.unit, tile, loaded, p, sums, w, g);
            if (p->added > before && p->added % fold == 0 && fold < tiles)
                fold_chunk(c, p->added == fold, p);
        }
    }
    ahead_begin(&w->next);
    for (chunk *p = chunks; p < chunks + count; p++)
        write_chunk(c, u, p, fold < tiles && p->added >= fold, w->lower);
}

/* Gradients of the rows that the sequence owns but does not use, and of a bias where no block may write them. */
static void backward_unused_rows(const call *c, const unit *u) {
    const heddle_attention *a = c->a;
    if (c->adds)
        return;
    const bool hides =
        a->mask != HEDDLE_MASK_NONE || a->features & (HEDDLE_WINDOW | HEDDLE_VARLEN | HEDDLE_SEQLENS |
                                                      HEDDLE_BOOL_MASK | HEDDLE_SEGMENTS | HEDDLE_BLOCKS);
    for (int64_t x = 0; x < c->group && hides && writes_dbias(c); x++)
        clear_rows(c, c->t->dbias, a->dbias_stride, u->n, u->first_head + x, 0, a->sq, a->sk);
    sequence whole = sequence_of(a, c->t->cu_seqlens_q, c->t->cu_seqlens_k, NULL, NULL, u->n);
    for (int64_t head = u->first_head; head < u->first_head + c->group; head++)
        clear_rows(c, c->t->dq, a->dq_stride, u->n, head, u->s.first_q + u->s.sq, whole.sq - u->s.sq, a->d);
    clear_rows(c, c->t->dk, a->dk_stride, u->n, u->hk, u->s.first_k + u->s.sk, whole.sk - u->s.sk, a->d);
    clear_rows(c, c->t->dv, a->dv_stride, u->n, u->hk, u->s.first_k + u->s.sk, whole.sk - u->s.sk, a->dv);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Attention forward, a tile of queries and a block of keys: the online softmax over transposed tiles, what few queries do instead, and how
 * a tile ends. */
#ifndef HEDDLE_CPU_ATTENTION_BLOCK_H
#define HEDDLE_CPU_ATTENTION_BLOCK_H

#include "attention_lift.h"
#include "attention_scores.h"
#include "pages.h"
#include "threads.h"

typedef struct forward_tile {
    lanes l;
    float *qt, *ot;    /* Qᵀ [d][lanes], Oᵀ [dv][lanes]; with few lanes Q [lanes][d_pad], O [lanes][dv_pad] */
    float max[LANES];  /* of the scores as stored */
    float base[LANES]; /* what the exponents are taken from: a maximum of now or of before; 0 while max is -inf */
    float sum[LANES];
    float lift; /* of weights, and so of sum and O */
} forward_tile;

#define FINITE_BLOCKS 64

typedef struct forward_space {
    forward_tile *tiles;
    float *s, *z, *k, *v;
    ahead next;
    key_tiles keys;
    float *weights;    /* as tiles, or as pairs */
    int64_t finite;    /* so many keys of the block are known to have finite rows of V */
    int64_t finite_of; /* the unit of which finite_keys says the same of its blocks, from one task to the next */
    uint8_t finite_keys[FINITE_BLOCKS];
    int64_t lifted; /* the unit of whose weights `lift` is */
    float lift;
    paged_call pages;
} forward_space;

static forward_space carve_forward(const attention_plan *plan, carver *w) {
    const heddle_attention *a = &plan->a;
    int64_t tiles = plan->tile_q / LANES, pad_d = (a->d + VL - 1) / VL * VL, pad_dv = (a->dv + VL - 1) / VL * VL;
    bool widens = a->dtype != HEDDLE_F32;
    forward_space f = {.next = {0}, .lifted = -1};
    f.tiles = carve(w, sizeof(forward_tile) * (size_t)tiles);
    for (int64_t x = 0; x < tiles; x++) {
        float *qt = carve_floats(w, pad_d * LANES), *ot = carve_floats(w, pad_dv * LANES);
        if (f.tiles)
            f.tiles[x].qt = qt, f.tiles[x].ot = ot;
    }
    f.s = carve_floats(w, plan->tile_k * LANES);
    f.z = carve_floats(w, a->dropout > 0 ? plan->tile_k * LANES : 0);
    f.k = carve_floats(w, widens ? plan->tile_k * pad_d : 0);
    f.v = carve_floats(w, plan->tile_k * pad_dv);
    f.keys = carve_key_tiles(plan, plan->tile_k, false, false, true, w);
    f.weights = f.keys.k_step || pairs_exist((int)a->dtype) ? carve_floats(w, tile_weights(plan)) : NULL;
    f.pages = carve_pages(plan, w);
    return f;
}

/* What this unit's weights are lifted by, which a thread finds once for all of its tiles. */
static float unit_lift(const call *c, const unit *u, forward_space *w) {
    const int64_t of = u->n * c->a->hk + u->hk;
    if (w->lifted != of)
        w->lift = lift_of_weights(c, u);
    w->lifted = of;
    return w->lift;
}

static void begin_tile(const call *c, const unit *u, int64_t f0, int64_t count, forward_space *w, forward_tile *t) {
    const heddle_attention *a = c->a;
    make_lanes(c, u, -1, f0, count, &t->l);
    t->lift = t->l.few ? 1 : unit_lift(c, u, w);
    pack_q(c, u, &t->l, t->qt);
    memset(t->ot, 0, sizeof(float) * (size_t)(t->l.few ? (count + 1) * c->dv_pad : a->dv * t->l.stride));
    for (int64_t x = 0; x < t->l.stride; x++) {
        t->max[x] = -INFINITY;
        t->base[x] = t->sum[x] = 0;
    }
}

/* What is summed so far, of one vector of lanes, is scaled to a new base, if it needs one: as long as no maximum has grown by more
 * than a factor of 2^most, exponents are taken from the old base and reach up to `most`. Returns the base, which is a score as stored:
 * only what is left of a score without it is multiplied, so that the largest has the exponent 0 however large it is. */
static vf rescale(forward_tile *t, int v, float factor, float most, int64_t dv) {
    const vf top = load(t->max + v * VL), old_sum = load(t->sum + v * VL), old_base = load(t->base + v * VL);
    const vf wanted = select_float(top == -INFINITY, splat(0), top);
    const vi keeps = (wanted - old_base) * factor <= most,
             empty = old_sum == 0; /* with nothing summed there is nothing to scale */
    const vf base = select_float(keeps & ~empty, old_base, wanted);
    store(t->base + v * VL, base);
    const vi changed = ~empty & (base != old_base);
    int32_t any = 0;
    for (int x = 0; x < VL; x++)
        any |= changed[x];
    if (!any)
        return base;
    const vf shrink = select_float(empty, splat(1), vexp2_times(factor, old_base - base));
    store(t->sum + v * VL, old_sum * shrink);
    if (t->l.few) {
        const int64_t pad = (dv + VL - 1) / VL * VL;
        for (int64_t l = 0; l < VL && v * VL + l < t->l.count; l++)
            for (float *p = t->ot + (v * VL + l) * pad, *end = p + pad; p < end; p += VL)
                store(p, load(p) * shrink[l]);
        return base;
    }
    for (float *p = t->ot + v * VL, *end = p + dv * t->l.stride; p < end; p += t->l.stride)
        store(p, load(p) * shrink);
    return base;
}

/* Rows of scores that are turned into weights side by side: as many as the registers hold. */
#if VL == 16 || defined(__aarch64__)
#define ROWS_AT_ONCE(vectors) ((vectors) == 1 ? 4 : (vectors) <= 3 ? 2 : 1)
#else
#define ROWS_AT_ONCE(vectors) ((vectors) == 1 ? 2 : 1)
#endif

/* p = lift·exp2((p - base)·factor - lag), of `rows` rows of `vectors` vectors; `least` as vexp2_lifted() has it. */
INLINE void weights_of(int rows, int vectors, float factor, float least, float lift, float lag, const vf *base, vf *sum,
                       float *p) {
    vf e[EXP2_MOST];
#pragma GCC unroll 8
    for (int x = 0; x < rows * vectors; x++)
        e[x] = load(p + x * VL) - base[x % vectors];
    vexp2_lifted(rows * vectors, factor, least, lift, lag, e);
#pragma GCC unroll 8
    for (int x = 0; x < rows * vectors; x++) {
        store(p + x * VL, e[x]);
        sum[x % vectors] += e[x];
    }
}

/* Weights of a row that one chain of additions has. What is rounded in adding such chains up, the larger first (Dekker 1971), is kept in
 * `low`: of all that makes a weight, the row's sum is what all of its o has. */
#define SUM_KEYS 16

INLINE void add_chain(vf some, vf *sum, vf *low) {
    const vf all = *sum + some;
    *low += some - (all - *sum);
    *sum = all;
}

/* S -> P = lift·exp2((S - base)·factor) in place, with base from the new maximum. */
INLINE void online_softmax_of(int vectors, forward_tile *t, float factor, int64_t dv, int64_t count, float *s) {
    const int64_t stride = vectors * VL;
    const int rows = ROWS_AT_ONCE(vectors);
    const float by = t->lift, lag = by < 1 ? BASE_LAG_LOG2 : 0, lift = by < 1 ? 1 : by, least = (lag - 127) / factor;
    vf top[2 * TILE_VECTORS], base[TILE_VECTORS], sum[TILE_VECTORS], low[TILE_VECTORS];
    for (int v = 0; v < 2 * vectors; v++)
        top[v] = load(t->max + v % vectors * VL);
    int64_t j = 0;
    for (; j + 2 <= count; j += 2) /* two chains, since a maximum has to wait for the one before */
#pragma GCC unroll 8
        for (int v = 0; v < 2 * vectors; v++)
            top[v] = vmax(top[v], load(s + j * stride + v * VL));
    for (int v = 0; v < vectors; v++) {
        top[v] = vmax(top[v], top[vectors + v]);
        if (j < count)
            top[v] = vmax(top[v], load(s + j * stride + v * VL));
        store(t->max + v * VL, top[v]);
        base[v] = rescale(t, v, factor, BASE_LAG_LOG2, dv);
        sum[v] = low[v] = splat(0);
    }
    for (int64_t begin = 0; begin < count; begin += SUM_KEYS) { /* short chains: their roundings are o's, too */
        const int64_t end = min64(count, begin + SUM_KEYS);
        vf some[TILE_VECTORS];
        for (int v = 0; v < vectors; v++)
            some[v] = splat(0);
        for (j = begin; j + rows <= end; j += rows)
            weights_of(rows, vectors, factor, least, lift, lag, base, some, s + j * stride);
        for (; j < end; j++)
            weights_of(1, vectors, factor, least, lift, lag, base, some, s + j * stride);
        for (int v = 0; v < vectors; v++)
            add_chain(some[v], &sum[v], &low[v]);
    }
    for (int v = 0; v < vectors; v++)
        store(t->sum + v * VL, load(t->sum + v * VL) + (sum[v] + low[v]));
}

static __attribute__((noinline)) void online_softmax(forward_tile *t, float factor, int64_t dv, int64_t count,
                                                     float *s) {
    switch (t->l.vectors) {
    case 1: online_softmax_of(1, t, factor, dv, count, s); break;
    case 2: online_softmax_of(2, t, factor, dv, count, s); break;
    case 3: online_softmax_of(3, t, factor, dv, count, s); break;
#if TILE_VECTORS > 3
    default: online_softmax_of(4, t, factor, dv, count, s); break;
#endif
    }
}

/* Whether the block's rows of V are, which come as floats if they are not. */
static bool values_finite(const call *c, const unit *u, key_block *b, forward_space *w) {
#ifdef HAVE_BF16_DOT
    if (b->t.v_columns && halves_finite(b->t.v_columns, (b->count + 1) / 2 * c->dv_pad))
        return true;
#endif
    if (!b->v)
        b->v = key_rows(c, u, c->t->v, c->a->v_stride, c->a->dv, b->first, b->count, w->v, c->dv_pad, &b->v_stride);
    return all_finite(b->v, b->count, b->v_stride, c->a->dv);
}

/* What is known of the block that begins with key `first`; NULL where nothing is kept of it. */
static uint8_t *known_finite(const call *c, const unit *u, int64_t first, forward_space *w) {
    const int64_t of = u->n * c->a->hk + u->hk;
    if (w->finite_of != of)
        memset(w->finite_keys, 0, sizeof w->finite_keys);
    w->finite_of = of;
    return first % TILE_KEYS == 0 && first / TILE_KEYS < FINITE_BLOCKS ? &w->finite_keys[first / TILE_KEYS] : NULL;
}

static void forward_block(const call *c, const unit *u, const key_block *b, forward_tile *t, forward_space *w) {
    const int64_t dv = c->a->dv;
    parts seen;
    bool masked = scores(c, u, &t->l, b, t->qt, &seen, w->s, NULL, &w->next);
#ifdef HAVE_FLUSH
    const unsigned mode = flush_denormals();
    online_softmax(t, c->factor, dv, b->count, w->s); /* a call, across which nothing is moved */
    keep_denormals(mode);
#else
    online_softmax(t, c->factor, dv, b->count, w->s);
#endif
    if (c->drops)
        drop_weights(c, u, &t->l, b, w->s);
    key_block rows = *b;
    bool careful = false;
    if (masked && b->count > w->finite) {
        uint8_t *known = known_finite(c, u, b->first, w);
        careful = !values_finite(c, u, &rows, w);
        w->finite = careful ? 0 : b->count;
        if (known)
            *known = (uint8_t)w->finite;
    }
    add_parts(&t->l, &seen, careful, rows.v, rows.v_stride, dv, &b->t, b->t.v_columns, w->weights, b->count, w->s,
              t->ot, rows_behind(c, u, c->t->v, c->a->v_stride, dv, b->first + b->count, c->pairs), &w->next);
}

/* online_softmax() of scores [lane][key], of which `count` are filled up with -inf to whole vectors. */
static void few_softmax(forward_tile *t, float factor, int64_t dv, int64_t count, float *s) {
    const int64_t padded = (count + VL - 1) / VL * VL;
    const float least = -127 / factor;
    for (int64_t x = 0; x < t->l.count; x++) {
        float *p = s + x * FEW_KEYS;
        vf top = splat(t->max[x]);
        for (int64_t j = count; j < padded; j++)
            p[j] = -INFINITY;
        for (int64_t j = 0; j < padded; j += VL)
            top = vmax(top, load(p + j));
        t->max[x] = max_of(top);
    }
    for (int v = 0; v < t->l.vectors; v++)
        rescale(t, v, factor, 0, dv);
    for (int64_t x = 0; x < t->l.count; x++) {
        const float base = t->base[x];
        vf sum = splat(0);
        for (float *p = s + x * FEW_KEYS, *end = p + padded; p < end; p += VL) {
            vf e = load(p) - base;
            vexp2_each(1, factor, least, &e);
            store(p, e);
            sum += e;
        }
        t->sum[x] += sum_of(sum);
    }
}

/* s[lane][key], through the layout of tiles where something changes or hides scores. True as scores() is. */
static bool few_masked_scores(const call *c, const unit *u, const key_block *b, forward_tile *t, forward_space *w,
                              float *s) {
    const lanes *l = &t->l;
    parts seen;
    const bool masked = scores(c, u, l, b, t->qt, &seen, w->s, NULL, &w->next);
    for (int64_t x = 0; x < l->count; x++)
        for (int64_t j = 0; j < b->count; j++)
            s[x * FEW_KEYS + j] = w->s[j * l->stride + x];
    return masked;
}

/* O [lanes][dv_pad] += P·V where V may hold what is not finite. */
static void few_add_masked(const call *c, const lanes *l, few_rows v, int64_t count, const float *s, forward_space *w,
                           float *o) {
    for (int64_t j = 0; j < count; j++)
        few_widen(TYPE(c), v.p + j * v.stride, c->a->dv, 1, w->v + j * c->dv_pad);
    if (all_finite(w->v, count, c->dv_pad, c->dv_pad))
        few_add(TYPE(c), v, count, l->count, s, v, o, c->dv_pad);
    else
        gemm_careful(true, (int)(c->dv_pad / VL), l->count, count, chain_of(false, count), (gemm_a){s, FEW_KEYS, 1},
                     w->v, c->dv_pad, o, c->dv_pad);
}

/* While the scores are formed the block's rows of V are asked for, then the next block's rows of K. */
static void few_block(const call *c, const unit *u, const key_block *b, forward_tile *t, forward_space *w) {
    const heddle_attention *a = c->a;
    const lanes *l = &t->l;
    const few_rows v = few_keys(c, u, c->t->v, a->v_stride, a->dv, b->first),
                   next = few_keys(c, u, c->t->k, a->k_stride, a->d, b->first + b->count);
    float s[FEW_LANES * FEW_KEYS];
    bool masked = false;
    parts seen;
    map_mask(c, u, l, b, &seen);
    if (c->adjusts || c->hidden || seen.cut || is_divided(c, u, l, b) ||
        tile_of(u->m, l->first, l->last + 1, b->first, b->first + b->count) != TILE_FULL)
        masked = few_masked_scores(c, u, b, t, w, s);
    else {
        few_scores(c, u, l, b, t->qt, s);
        scale_scores(c, l->count * FEW_KEYS, s);
    }
    few_softmax(t, c->factor, a->dv, b->count, s);
    if (c->drops) {
        dropout_factors(c, u, l, b, w->z);
        for (int64_t x = 0; x < l->count; x++)
            for (int64_t j = 0; j < b->count; j++)
                s[x * FEW_KEYS + j] *= w->z[j * l->stride + x];
    }
    if (masked)
        few_add_masked(c, l, v, b->count, s, w, t->ot);
    else
        few_add(TYPE(c), v, b->count, l->count, s, next, t->ot, c->dv_pad);
}

/* The normalised weights, written when they are asked for: the scores once more. */
static void write_weights(const call *c, const unit *u, const key_block *b, forward_tile *t, forward_space *w,
                          const float *inverse) {
    const lanes *l = &t->l;
    const void *rows[LANES];
    parts seen;
    scores(c, u, l, b, t->qt, &seen, w->s, NULL, &w->next);
    for (int64_t j = 0; j < b->count; j++)
        for (int64_t x = 0; x < l->stride; x += VL) {
            float *s = w->s + j * l->stride + x;
            store(s, vexp2_times(c->factor, load(s) - load(t->base + x)));
        }
    lane_rows(c, u, l, c->t->weights, c->a->weights_stride, 0, rows);
    unpack_transposed(TYPE(c), w->s, l->stride, l->count, b->count, inverse, false, (void *const *)rows, b->first);
}

/* One more key, with this score and a value of zero. False if it leaves nothing to the others: its weight is 1 then, and theirs are
 * less than 2^-120. */
static bool add_sink(const call *c, forward_tile *t, int64_t x, float sink) {
    const double above = t->sum[x] == 0 ? INFINITY : sink_above(c, sink, t->base[x]);
    if (sink == -INFINITY)
        return true;
    if (above > 120)
        return false;
    t->sum[x] += (float)exp2(above);
    return true;
}

/* HEDDLE_ACCUMULATE: what is there of a row is scaled to be a part of all, and its lse becomes that of all. Returns what to multiply
 * with what has been found, whose log-sum-exp is `found`. */
static float merge_row(float *lse, float *o, int64_t dv, double found, float inverse) {
    const double there = (double)*lse;
    if (there == -INFINITY) {
        memset(o, 0, sizeof(float) * (size_t)dv);
        *lse = (float)found;
        return inverse;
    }
    if (found == -INFINITY)
        return 0;
    const double top = there > found ? there : found, before = exp(there - top), now = exp(found - top);
    const float keep = (float)(before / (before + now));
    for (int64_t e = 0; e < dv; e++)
        o[e] *= keep;
    *lse = (float)(top + log(before + now));
    return inverse * (float)(now / (before + now));
}

/* o += row·factor */
static void add_row(const float *row, int64_t n, float factor, float *o) {
    for (int64_t e = 0; e < n; e++)
        o[e] += row[e] * factor;
}

/* What a lane of Oᵀ, of lifted weights, is multiplied with to be o. A sink, or keys of another call, may have so much of the weight that
 * there is no such number: then the lane is lowered first. */
static float factor_of(forward_tile *t, int64_t lane, int64_t dv, float inverse, float v_scale) {
    const float by = inverse == 0 ? 0 : inverse * v_scale, lift = t->lift;
    if (lift <= 1 || !(fabsf(by) < 0x1p-60f))
        return by / lift;
    for (int64_t e = 0; e < dv; e++)
        t->ot[e * t->l.stride + lane] /= lift;
    return by;
}

/* o = Oᵀ / sum; inverse[lane] = 1 / sum, 0 where nobody that is seen has a weight. */
static void end_tile(const call *c, const unit *u, forward_tile *t, float *inverse) {
    const lanes *l = &t->l;
    const void *rows[LANES];
    lane_rows_of(c->out, u, l, c->t->o, c->a->o_stride, u->s.first_q, rows);
    void *const *out = (void *const *)rows;
    for (int64_t x = 0; x < l->stride; x++) {
        t->sum[x] /= t->lift;
        const float sink = c->a->features & HEDDLE_SINKS ? ((const float *)c->t->sinks)[l->head[x]] : -INFINITY;
        const bool counts = add_sink(c, t, x, sink) && t->sum[x] != 0;
        inverse[x] = counts ? 1 / t->sum[x] : 0;
        if (!c->t->lse || x >= l->count)
            continue;
        const double found = counts ? exact_lse(c, t->base[x], log2((double)t->sum[x])) : (double)sink;
        float *lse = (float *)c->t->lse + lse_offset(c, u, l->head[x], l->first + l->index[x]);
        if (c->adds)
            inverse[x] = merge_row(lse, out[x], c->a->dv, found, inverse[x]);
        else
            *lse = (float)found;
    }
    float by[LANES]; /* weights are not of values, o is */
    for (int64_t x = 0; x < l->stride; x++)
        by[x] = factor_of(t, x, c->a->dv, inverse[x], c->v_scale);
    if (l->few)
        for (int64_t x = 0; x < l->count; x++) {
            few_order(TYPE(c), c->a->dv, t->ot + x * c->dv_pad);
            if (c->adds)
                add_row(t->ot + x * c->dv_pad, c->a->dv, by[x], out[x]);
            else
                narrow_row(TYPE(c), t->ot + x * c->dv_pad, c->a->dv, by[x], out[x]);
        }
    else
        unpack_transposed(c->out, t->ot, l->stride, l->count, c->a->dv, by, c->adds, out, 0);
}

#endif

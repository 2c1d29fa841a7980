/* SPDX-License-Identifier: Apache-2.0
 * Attention forward: FlashAttention-2's online softmax (Dao 2023, algorithm 1) over transposed tiles.
 * A task is a unit and a few tiles of its query rows, which walk over the keys together, so that a block of keys is brought
 * near (and widened) once for all of them. */
#ifndef HEDDLE_CPU_ATTENTION_FORWARD_H
#define HEDDLE_CPU_ATTENTION_FORWARD_H

#include "attention_scores.h"
#include "threads.h"

typedef struct forward_tile {
    lanes l;
    float *qt, *ot;    /* Qᵀ [d][lanes], Oᵀ [dv][lanes]; with few lanes Q [lanes][d_pad], O [lanes][dv_pad] */
    float max[LANES];  /* of the scores as stored */
    float base[LANES]; /* what the exponents are taken from: a maximum of now or of before; 0 while max is -inf */
    float sum[LANES];
} forward_tile;

typedef struct forward_space {
    forward_tile *tiles;
    float *s, *z, *k, *v;
    ahead next;
    key_tiles keys;
    float *weights; /* as tiles, or as pairs */
    int64_t finite; /* so many keys of the block are known to have finite rows of V */
} forward_space;

/* Few queries against many keys: the keys of a unit are divided among tasks, and the last to end adds up what all have found, in
 * order. How they are divided depends on sk alone. */
typedef struct forward_shared {
    int64_t key_shares, keys; /* of a task */
    int64_t each;             /* floats of a share: max, base and sum of the lanes, then O */
    float *found;             /* [unit][key_share][each] */
    _Atomic uint32_t *done;   /* [unit]: shares that have ended */
} forward_shared;

#define SPLIT_KEYS 1024
#define MOST_SPLITS 16

static forward_shared carve_forward_shared(const attention_plan *plan, carver *w) {
    const heddle_attention *a = &plan->a;
    const int64_t lanes_used = a->h / a->hk * a->sq, units = a->b * a->hk,
                  wanted = min64(a->sk / SPLIT_KEYS, MOST_SPLITS);
    forward_shared g = {.key_shares = 1, .keys = a->sk};
    if (lanes_used > FEW_LANES || wanted < 2)
        return g;
    g.keys = (a->sk + wanted * FEW_KEYS - 1) / (wanted * FEW_KEYS) * FEW_KEYS;
    g.key_shares = (a->sk + g.keys - 1) / g.keys;
    g.each = 3 * FEW_LANES + lanes_used * ((a->dv + VL - 1) / VL * VL);
    g.found = carve_floats(w, units * g.key_shares * g.each);
    g.done = carve(w, sizeof(uint32_t) * (size_t)units);
    return g;
}

static forward_space carve_forward(const attention_plan *plan, carver *w) {
    const heddle_attention *a = &plan->a;
    int64_t tiles = plan->tile_q / LANES, pad_d = (a->d + VL - 1) / VL * VL, pad_dv = (a->dv + VL - 1) / VL * VL;
    bool widens = a->dtype != HEDDLE_F32;
    forward_space f = {.next = {0}};
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
    return f;
}

static void begin_tile(const call *c, const unit *u, int64_t f0, int64_t count, forward_tile *t) {
    const heddle_attention *a = c->a;
    make_lanes(c, u, -1, f0, count, &t->l);
    pack_q(c, u, &t->l, t->qt);
    memset(t->ot, 0, sizeof(float) * (size_t)(t->l.few ? (count + 1) * c->dv_pad : a->dv * t->l.stride));
    for (int64_t x = 0; x < t->l.stride; x++) {
        t->max[x] = -INFINITY;
        t->base[x] = t->sum[x] = 0;
    }
}

/* What is summed so far, of one vector of lanes, is scaled to a new base, if it needs one: as long as no maximum has grown by more
 * than a factor of 2^4, exponents are taken from the old base and reach up to 4. Returns the base, which is a score as stored: only
 * what is left of a score without it is multiplied, so that the largest has the exponent 0 however large it is. */
static vf rescale(forward_tile *t, int v, float factor, int64_t dv) {
    const vf top = load(t->max + v * VL), old_sum = load(t->sum + v * VL), old_base = load(t->base + v * VL);
    const vf wanted = select_float(top == -INFINITY, splat(0), top);
    const vi keeps = (wanted - old_base) * factor < 4,
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

/* p = exp2((p - base)·factor), of `rows` rows of `vectors` vectors; `least` as vexp2_each() has it. */
INLINE void weights_of(int rows, int vectors, float factor, float least, const vf *base, vf *sum, float *p) {
    vf e[EXP2_MOST];
#pragma GCC unroll 8
    for (int x = 0; x < rows * vectors; x++)
        e[x] = load(p + x * VL) - base[x % vectors];
    vexp2_each(rows * vectors, factor, least, e);
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

/* S -> P = exp2((S - base)·factor) in place, with base from the new maximum. */
INLINE void online_softmax_of(int vectors, forward_tile *t, float factor, int64_t dv, int64_t count, float *s) {
    const int64_t stride = vectors * VL;
    const int rows = ROWS_AT_ONCE(vectors);
    const float least = -127 / factor;
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
        base[v] = rescale(t, v, factor, dv);
        sum[v] = low[v] = splat(0);
    }
    for (int64_t begin = 0; begin < count; begin += SUM_KEYS) { /* short chains: their roundings are o's, too */
        const int64_t end = min64(count, begin + SUM_KEYS);
        vf some[TILE_VECTORS];
        for (int v = 0; v < vectors; v++)
            some[v] = splat(0);
        for (j = begin; j + rows <= end; j += rows)
            weights_of(rows, vectors, factor, least, base, some, s + j * stride);
        for (; j < end; j++)
            weights_of(1, vectors, factor, least, base, some, s + j * stride);
        for (int v = 0; v < vectors; v++)
            add_chain(some[v], &sum[v], &low[v]);
    }
    for (int v = 0; v < vectors; v++)
        store(t->sum + v * VL, load(t->sum + v * VL) + (sum[v] + low[v]));
}

static void online_softmax(forward_tile *t, float factor, int64_t dv, int64_t count, float *s) {
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

static void forward_block(const call *c, const unit *u, const key_block *b, forward_tile *t, forward_space *w) {
    const int64_t dv = c->a->dv;
    parts seen;
    bool masked = scores(c, u, &t->l, b, t->qt, &seen, w->s, NULL, &w->next);
    online_softmax(t, c->factor, dv, b->count, w->s);
    if (c->drops)
        drop_weights(c, u, &t->l, b, w->s);
    key_block rows = *b;
    bool careful = false;
    if (masked && b->count > w->finite) {
        careful = !values_finite(c, u, &rows, w);
        w->finite = careful ? 0 : b->count;
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
        rescale(t, v, factor, dv);
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
        gemm_careful(true, (int)(c->dv_pad / VL), l->count, count, (gemm_a){s, FEW_KEYS, 1}, w->v, c->dv_pad, o,
                     c->dv_pad);
}

/* While the scores are formed the block's rows of V are asked for, then the next block's rows of K. */
static void few_block(const call *c, const unit *u, const key_block *b, forward_tile *t, forward_space *w) {
    const heddle_attention *a = c->a;
    const lanes *l = &t->l;
    const few_rows v = few_keys(c, u, c->t->v, a->v_stride, a->dv, b->first),
                   next = few_keys(c, u, c->t->k, a->k_stride, a->d, b->first + b->count);
    float s[FEW_LANES * FEW_KEYS];
    bool masked = false;
    if (c->adjusts || mask_kind(c, u, l, b) != TILE_FULL ||
        tile_of(u->m, l->first, l->last + 1, b->first, b->first + b->count) != TILE_FULL)
        masked = few_masked_scores(c, u, b, t, w, s);
    else
        few_scores(c, u, l, b, t->qt, s);
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

/* o = Oᵀ / sum; inverse[lane] = 1 / sum, 0 where nobody that is seen has a weight. */
static void end_tile(const call *c, const unit *u, forward_tile *t, float *inverse) {
    const lanes *l = &t->l;
    const void *rows[LANES];
    lane_rows_of(c->out, u, l, c->t->o, c->a->o_stride, u->s.first_q, rows);
    void *const *out = (void *const *)rows;
    for (int64_t x = 0; x < l->stride; x++) {
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
    if (l->few)
        for (int64_t x = 0; x < l->count; x++) {
            few_order(TYPE(c), c->a->dv, t->ot + x * c->dv_pad);
            if (c->adds)
                add_row(t->ot + x * c->dv_pad, c->a->dv, inverse[x], out[x]);
            else
                narrow_row(TYPE(c), t->ot + x * c->dv_pad, c->a->dv, inverse[x], out[x]);
        }
    else
        unpack_transposed(c->out, t->ot, l->stride, l->count, c->a->dv, inverse, c->adds, out, 0);
}

/* Few queries read their keys themselves. */
static key_block get_block(const call *c, const unit *u, bool few, range keys, int64_t first, forward_space *w) {
    w->finite = 0;
    key_block b = {.first = first, .count = min64(few ? c->few_k : c->tile_k, keys.end - first)};
    if (few)
        return b;
    load_key_tiles(c, u, &w->keys, &b);
    if (uses_tiles(&w->tiles[0].l))
        return b;
    if (!c->k_pairs)
        b.k = key_rows(c, u, c->t->k, c->a->k_stride, c->a->d, first, b.count, w->k, c->d_pad, &b.k_stride);
#ifdef HAVE_BF16_DOT
    if (c->pairs) {
        const few_rows v = few_keys(c, u, c->t->v, c->a->v_stride, c->a->dv, first);
        pair_keys(v.p, v.stride, b.count, v.n, c->dv_pad, w->keys.v_columns);
        b.t.v_columns = w->keys.v_columns;
        return b;
    }
#endif
    b.v = key_rows(c, u, c->t->v, c->a->v_stride, c->a->dv, first, b.count, w->v, c->dv_pad, &b.v_stride);
    return b;
}

INLINE bool tile_is_empty(const unit *u, const lanes *l, const key_block *b) {
    return tile_of(u->m, l->first, l->last + 1, b->first, b->first + b->count) == TILE_EMPTY;
}

/* Without the keys behind the last that any of these lanes sees, but for what is left of a step of 32 (AMX takes so many together). */
INLINE key_block cut_block(const unit *u, const lanes *l, const key_block *b) {
    const range seen = keys_of_queries(u->m, l->first, l->last + 1, u->s.sk);
    key_block r = *b;
    r.count = min64(b->count, (seen.end - b->first + 31) / 32 * 32);
    return r;
}

/* Weights outside the band and outside the sequence are zero, too. */
static void clear_weights(const call *c, const unit *u, int64_t head, int64_t i) {
    const heddle_attention *a = c->a;
    const char *p = element_at(c->t->weights, row_offset(a->weights_stride, u->n, head, i), TYPE(c));
    memset((char *)(uintptr_t)p, 0, (size_t)(a->sk * element_size(TYPE(c))));
}

/* Asks for rows of K and V. */
static void ahead_keys(const call *c, const unit *u, int64_t first, int64_t count, int64_t steps, ahead *a) {
    const few_rows k = few_keys(c, u, c->t->k, c->a->k_stride, c->a->d, first),
                   v = few_keys(c, u, c->t->v, c->a->v_stride, c->a->dv, first);
    ahead_add(a, v.p, v.stride, v.n * element_size(TYPE(c)), count, steps);
    ahead_add(a, k.p, k.stride, k.n * element_size(TYPE(c)), count, steps);
}

/* Leaves what a share of the keys has found; true for the last one, which then has the sums of all in its tile. */
static bool few_join(const call *c, const forward_shared *g, int64_t unit_index, int64_t key_share, forward_tile *t) {
    const size_t lane_bytes = sizeof(float) * FEW_LANES, o_size = (size_t)(t->l.count * c->dv_pad);
    float *all = g->found + unit_index * g->key_shares * g->each, *mine = all + key_share * g->each;
    memcpy(mine, t->max, lane_bytes);
    memcpy(mine + FEW_LANES, t->base, lane_bytes);
    memcpy(mine + 2 * FEW_LANES, t->sum, lane_bytes);
    memcpy(mine + 3 * FEW_LANES, t->ot, sizeof(float) * o_size);
    if (atomic_fetch_add_explicit(&g->done[unit_index], 1, memory_order_acq_rel) + 1 < g->key_shares)
        return false;
    memset(t->ot, 0, sizeof(float) * o_size);
    for (int64_t x = 0; x < t->l.count; x++) {
        float top = -INFINITY, sum = 0;
        for (const float *p = all; p < all + g->key_shares * g->each; p += g->each)
            top = p[x] > top || p[x] != p[x] ? p[x] : top;
        t->base[x] = top == -INFINITY ? 0 : top;
        for (const float *p = all; p < all + g->key_shares * g->each; p += g->each) {
            const float weight = p[2 * FEW_LANES + x];
            if (weight == 0)
                continue;
            const vf shrink = vexp2_times(c->factor, splat(p[FEW_LANES + x] - t->base[x]));
            sum += weight * shrink[0];
            const float *from = p + 3 * FEW_LANES + x * c->dv_pad;
            for (int64_t e = 0; e < c->dv_pad; e += VL) {
                float *o = t->ot + x * c->dv_pad + e;
                store(o, load(o) + load(from + e) * shrink);
            }
        }
        t->sum[x] = sum;
    }
    return true;
}

static void forward_task(const call *c, const unit *u, const forward_shared *g, int64_t unit_index, int64_t key_share,
                         int64_t f0, int64_t f1, forward_space *w) {
    int count = 0;
    for (int64_t f = f0; f < f1; f += LANES)
        begin_tile(c, u, f, min64(LANES, f1 - f), &w->tiles[count++]);
    range keys = keys_of_queries(u->m, w->tiles[0].l.first, w->tiles[count - 1].l.last + 1, u->s.sk);
    const bool few = w->tiles[0].l.few;
    const range mine = {max64(keys.begin, key_share * g->keys), min64(keys.end, (key_share + 1) * g->keys)};
    for (int64_t j = mine.begin; j < mine.end; j += few ? c->few_k : c->tile_k) {
        key_block b = get_block(c, u, few, mine, j, w);
        for (int x = 0; x < count; x++)
            if (!tile_is_empty(u, &w->tiles[x].l, &b)) {
                const key_block cut = cut_block(u, &w->tiles[x].l, &b), seen = mask_cut(c, u, &w->tiles[x].l, &cut);
                if (seen.count > 0)
                    (few ? few_block : forward_block)(c, u, &seen, &w->tiles[x], w);
            }
    }
    if (g->key_shares > 1 && !few_join(c, g, unit_index, key_share, &w->tiles[0]))
        return;
    for (int x = 0; x < count; x++) {
        forward_tile *t = &w->tiles[x];
        float inverse[LANES];
        end_tile(c, u, t, inverse);
        if (!(c->a->features & HEDDLE_WEIGHTS))
            continue;
        for (int64_t y = 0; y < t->l.count; y++)
            clear_weights(c, u, t->l.head[y], t->l.first + t->l.index[y]);
        for (int64_t j = keys.begin; j < keys.end; j += few ? c->few_k : c->tile_k) {
            key_block b = get_block(c, u, few, keys, j, w);
            if (!tile_is_empty(u, &t->l, &b))
                write_weights(c, u, &b, t, w, inverse);
        }
    }
}

/* Rows of the tensors that this sequence owns but does not use: o = 0, lse = -inf, weights = 0. */
static void forward_unused_rows(const call *c, const unit *u) {
    const heddle_attention *a = c->a;
    sequence whole = sequence_of(a, c->t->cu_seqlens_q, c->t->cu_seqlens_k, NULL, NULL, u->n);
    for (int64_t head = u->first_head; head < u->first_head + c->group; head++) {
        for (int64_t i = u->s.sq; i < whole.sq; i++) {
            if (c->adds && ((const float *)c->t->lse)[lse_offset(c, u, head, i)] != -INFINITY)
                continue;
            const char *o = element_at(c->t->o, row_offset(a->o_stride, u->n, head, u->s.first_q + i), c->out);
            memset((char *)(uintptr_t)o, 0, (size_t)(a->dv * element_size(c->out)));
            if (c->t->lse)
                ((float *)c->t->lse)[lse_offset(c, u, head, i)] = -INFINITY;
        }
        if (a->features & HEDDLE_WEIGHTS)
            for (int64_t i = u->s.sq; i < a->sq; i++)
                clear_weights(c, u, head, i);
    }
}

/* The rows of one of the tensors of queries that rows f0 .. f1-1 of the unit's group have. */
static void ahead_queries(const call *c, const unit *u, const void *p, heddle_strides stride, int64_t n, int64_t f0,
                          int64_t f1, int64_t steps, ahead *a) {
    const int64_t size = element_size(TYPE(c)), i0 = f0 / c->group, i1 = (f1 + c->group - 1) / c->group;
    for (int64_t x = 0; p && x < c->group; x++)
        ahead_add(a, element_at(p, row_offset(stride, u->n, u->first_head + x, u->s.first_q + i0), TYPE(c)),
                  stride.s * size, n * size, min64(u->s.sq, i1) - i0, steps);
}

/* Whether a thread takes all tasks of a unit: where units are many, so that K and V come to one core and not to each. It changes no
 * result. */
static bool takes_units(const heddle_attention *a, int64_t threads) {
    return threads > 1 && a->b * a->hk >= 32 * threads;
}

/* Asks for what is needed next: the rows of o that this task will write, those of q of the task that this thread will probably take
 * next, and its share of the keys of the unit that it, or all threads, will take next. */
static void forward_ahead(const call *c, const attention_plan *plan, const unit *u, int64_t task, int64_t per_unit,
                          int64_t f0, int64_t f1, forward_space *w) {
    const heddle_attention *a = c->a;
    const bool whole = takes_units(a, plan->threads);
    const int64_t unit_now = task / per_unit, together = whole ? 1 : plan->threads,
                  unit_next = whole ? next_of(unit_now, units_together(a->b * a->hk, plan->threads), plan->threads)
                                    : unit_now + 1;
    const int64_t next = whole && (task + 1) % per_unit == 0 ? unit_next * per_unit : task + together;
    if (c->group * u->s.sq <= FEW_LANES) /* few.h asks for itself */
        return;
    const range seen = keys_of_queries(u->m, f0 / c->group, (f1 - 1) / c->group + 1, u->s.sk);
    const int64_t tiles = (f1 - f0 + LANES - 1) / LANES,
                  steps = tiles * product_steps(c, max64(0, seen.end - seen.begin), 1, a->dv);
    if (next < a->b * a->hk * per_unit) {
        const unit v = make_unit(c, next / per_unit);
        const int64_t g0 = (per_unit - 1 - next % per_unit) * plan->tile_q;
        ahead_queries(c, &v, c->t->q, a->q_stride, a->d, g0, g0 + plan->tile_q, steps, &w->next);
        if (unit_next < a->b * a->hk) {
            const int64_t shares = (per_unit + together - 1) / together, share = task % per_unit / together;
            const unit other = next / per_unit > unit_now ? v : make_unit(c, unit_next);
            const int64_t keys = min64(other.s.sk, 2 * c->tile_k), first = keys * share / shares;
            ahead_keys(c, &other, first, keys * (share + 1) / shares - first, steps, &w->next);
        }
    }
    ahead_queries(c, u, c->t->o, a->o_stride, a->dv, f0, f1, steps, &w->next);
}

static void forward_ticket(const call *c, const attention_plan *plan, const forward_shared *g, int64_t task,
                           int64_t per_unit, forward_space *space) {
    const unit u = make_unit(c, task / per_unit);
    ahead_begin(&space->next);
    /* The longest rows of a causal mask first: the last tasks to be taken are then short. */
    const int64_t key_share = g->key_shares > 1 ? task % per_unit : 0;
    const int64_t f0 = g->key_shares > 1 ? 0 : (per_unit - 1 - task % per_unit) * plan->tile_q;
    const int64_t f1 = min64(f0 + plan->tile_q, c->group * u.s.sq);
    if (f0 < f1 && g->key_shares == 1)
        forward_ahead(c, plan, &u, task, per_unit, f0, f1, space);
    if (f0 < f1)
        forward_task(c, &u, g, task / per_unit, key_share, f0, f1, space);
    if (f0 == 0 && key_share == 0)
        forward_unused_rows(c, &u);
}

static void attention_forward(const attention_plan *plan, const heddle_attention_data *data, void *workspace) {
    const heddle_attention *a = &plan->a;
    const call c = make_call(plan, data);
    carver shared = {workspace, 0};
    const forward_shared g = carve_forward_shared(plan, &shared);
    const int64_t units = a->b * a->hk, tiles = max64(1, (c.group * a->sq + plan->tile_q - 1) / plan->tile_q);
    const int64_t per_unit = tiles * g.key_shares; /* one of them is 1 */
    const int64_t per_ticket = takes_units(a, plan->threads) ? per_unit * units_together(units, plan->threads)
                               : plan->threads > 1           ? 1
                                                             : units * per_unit;
    const size_t each = (plan->workspace - shared.used) / (size_t)plan->threads;
    ticket next = {0};
    for (int64_t x = 0; x < units && g.key_shares > 1; x++)
        atomic_init(&g.done[x], 0);
#pragma omp parallel num_threads(plan->threads) if (plan->threads > 1)
    {
        carver w = {(char *)workspace + shared.used + (size_t)thread_index() * each, 0};
        forward_space space = carve_forward(plan, &w);
        begin_attention();
        for (int64_t first; (first = take_ticket(&next) * per_ticket) < units * per_unit;)
            for (int64_t task = first; task < min64(units * per_unit, first + per_ticket); task++)
                forward_ticket(&c, plan, &g, task, per_unit, &space);
        end_attention();
    }
}

#endif

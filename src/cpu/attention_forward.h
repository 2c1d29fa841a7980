/* SPDX-License-Identifier: Apache-2.0
 * Attention forward: FlashAttention-2's online softmax (Dao 2023, algorithm 1) over transposed tiles.
 * A task is a unit and a few tiles of its query rows, which walk over the keys together, so that a block of keys is brought
 * near (and widened) once for all of them. */
#ifndef HEDDLE_CPU_ATTENTION_FORWARD_H
#define HEDDLE_CPU_ATTENTION_FORWARD_H

#include "attention_block.h"

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

/* Few queries read their keys themselves. */
static key_block get_block(const call *c, const unit *u, bool few, range keys, int64_t first, forward_space *w) {
    const uint8_t *known = known_finite(c, u, first, w);
    w->finite = known ? *known : 0;
    key_block b = {.first = first, .count = min64(few ? c->few_k : c->tile_k, keys.end - first)};
    see_keys(c, u, first, b.count, &w->pages);
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

INLINE bool tile_is_empty(const call *c, const unit *u, const lanes *l, const key_block *b) {
    return tile_of(u->m, l->first, l->last + 1, b->first, b->first + b->count) == TILE_EMPTY ||
           !sees_some(c, u, l, b->first, b->count);
}

/* Without the keys behind the last that any of these lanes sees, but for what is left of a step of 32 (AMX takes so many together). */
INLINE key_block cut_block(const lanes *l, const key_block *b) {
    key_block r = *b;
    r.count = min64(b->count, (l->keys.end - b->first + 31) / 32 * 32);
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

/* The keys that some of the tiles may see. */
static range keys_of_tiles(const call *c, const unit *u, const forward_tile *t, int count) {
    range r = keys_of_queries(u->m, t[0].l.first, t[count - 1].l.last + 1, u->s.sk);
    if (!c->divides)
        return r;
    r = (range){r.end, r.begin};
    for (int x = 0; x < count; x++)
        if (t[x].l.keys.begin < t[x].l.keys.end)
            r = (range){min64(r.begin, t[x].l.keys.begin), max64(r.end, t[x].l.keys.end)};
    if (c->a->features & HEDDLE_BLOCKS) /* whole blocks of the lists */
        r.begin -= r.begin % c->tile_k;
    return r;
}

/* Whether none of the tiles sees so many keys from `first` on: then nobody reads them. */
static bool is_skipped(const call *c, const unit *u, const forward_tile *t, int count, int64_t first, int64_t keys) {
    const key_block b = {.first = first, .count = keys};
    for (int x = 0; x < count; x++)
        if (!c->divides || !tile_is_empty(c, u, &t[x].l, &b))
            return false;
    return true;
}

static void forward_task(const call *c, const unit *u, const forward_shared *g, int64_t unit_index, int64_t key_share,
                         int64_t f0, int64_t f1, forward_space *w) {
    int count = 0;
    for (int64_t f = f0; f < f1; f += LANES)
        begin_tile(c, u, f, min64(LANES, f1 - f), w, &w->tiles[count++]);
    const range keys = keys_of_tiles(c, u, w->tiles, count);
    const bool few = w->tiles[0].l.few;
    const int64_t step = few ? c->few_k : c->tile_k;
    const range mine = {max64(keys.begin, key_share * g->keys), min64(keys.end, (key_share + 1) * g->keys)};
    for (int64_t j = mine.begin; j < mine.end; j += step) {
        if (is_skipped(c, u, w->tiles, count, j, min64(step, mine.end - j)))
            continue;
        key_block b = get_block(c, u, few, mine, j, w);
        for (int x = 0; x < count; x++)
            if (!tile_is_empty(c, u, &w->tiles[x].l, &b)) {
                const key_block cut = cut_block(&w->tiles[x].l, &b), seen = mask_cut(c, u, &w->tiles[x].l, &cut);
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
        for (int64_t j = keys.begin; j < keys.end; j += step) {
            key_block b = get_block(c, u, few, keys, j, w);
            if (!tile_is_empty(c, u, &t->l, &b))
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

/* Of a tensor of scores with elements of `size` bytes what rows f0 .. f1-1 of the unit's group read with the first block of the keys that
 * they see of these. */
static void ahead_scores(const call *c, const unit *u, const void *p, heddle_strides stride, int64_t size, int64_t f0,
                         int64_t f1, range keys, int64_t steps, ahead *a) {
    const int64_t i0 = f0 / c->group, i1 = min64(u->s.sq, (f1 + c->group - 1) / c->group);
    if (i0 >= i1)
        return;
    const range seen = keys_of_queries(u->m, i0, i1, u->s.sk);
    const int64_t first = max64(seen.begin, keys.begin), end = min64(seen.end, keys.end);
    const int64_t rows = stride.s ? i1 - i0 : 1, heads = stride.h ? c->group : 1;
    for (int64_t x = 0; first < end && x < heads; x++)
        ahead_add(a, (const char *)p + (row_offset(stride, u->n, u->first_head + x, i0) + first) * size,
                  stride.s * size, min64(c->tile_k, end - first) * size, rows, steps);
}

/* That of a bias and of a mask; while they are read they ask for what the next block wants. */
static void ahead_options(const call *c, const unit *u, int64_t f0, int64_t f1, range keys, int64_t steps, ahead *p) {
    const heddle_attention *a = c->a;
    if (a->features & HEDDLE_BIAS)
        ahead_scores(c, u, c->t->bias, a->bias_stride, element_size(TYPE(c)), f0, f1, keys, steps, p);
    if (a->features & HEDDLE_BOOL_MASK)
        ahead_scores(c, u, c->t->bool_mask, a->bool_mask_stride, 1, f0, f1, keys, steps, p);
}

/* Whether a thread takes all tasks of a unit: where units are many, so that K and V come to one core and not to each. It changes no
 * result. */
static bool takes_units(const heddle_attention *a, int64_t threads) {
    return threads > 1 && a->b * a->hk >= 32 * threads;
}

/* Asks for what is needed next: the rows of o that this task will write, those of q, a bias and a mask of the task that this thread will
 * probably take next, and its share of the keys of the unit that it, or all threads, will take next. */
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
        if (unit_next < a->b * a->hk && !gathers(a)) {
            const int64_t shares = (per_unit + together - 1) / together, share = task % per_unit / together;
            const unit other = next / per_unit > unit_now ? v : make_unit(c, unit_next);
            const int64_t keys = min64(other.s.sk, 2 * c->tile_k), first = keys * share / shares;
            ahead_keys(c, &other, first, keys * (share + 1) / shares - first, steps, &w->next);
        }
        ahead_options(c, &v, g0, g0 + plan->tile_q, (range){0, v.s.sk}, steps, &w->next);
    }
    ahead_queries(c, u, c->t->o, a->o_stride, a->dv, f0, f1, steps, &w->next);
}

static void forward_ticket(const call *c, const attention_plan *plan, const forward_shared *g, int64_t task,
                           int64_t per_unit, forward_space *space) {
    const unit u = make_unit(c, task / per_unit);
    ahead_begin(&space->next);
    see_unit(&u, &space->pages);
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
    call c = make_call(plan, data);
    carver shared = {workspace, 0};
    const forward_shared g = carve_forward_shared(plan, &shared);
    carve_segments(plan, &c, &shared);
    const int64_t units = a->b * a->hk, tiles = max64(1, (c.group * a->sq + plan->tile_q - 1) / plan->tile_q);
    const int64_t per_unit = tiles * g.key_shares; /* one of them is 1 */
    const int64_t per_ticket = takes_units(a, plan->threads) ? per_unit * units_together(units, plan->threads)
                               : plan->threads > 1           ? 1
                                                             : units * per_unit;
    const size_t each = (plan->workspace - shared.used) / (size_t)plan->threads;
    ticket next = {0}, bounds = {0}, tiles_seen = {0};
    for (int64_t x = 0; x < units && g.key_shares > 1; x++)
        atomic_init(&g.done[x], 0);
#pragma omp parallel num_threads(plan->threads) if (plan->threads > 1)
    {
        carver w = {(char *)workspace + shared.used + (size_t)thread_index() * each, 0};
        forward_space space = carve_forward(plan, &w);
        const call *seen = begin_pages(&c, &space.pages);
        begin_attention();
        find_segments(&c, &bounds, &tiles_seen);
        for (int64_t first; (first = take_ticket(&next) * per_ticket) < units * per_unit;)
            for (int64_t task = first; task < min64(units * per_unit, first + per_ticket); task++)
                forward_ticket(seen, plan, &g, task, per_unit, &space);
        end_attention();
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The gradients that are sums over heads or batch entries, dsinks and dbias, each element by one task in a fixed order;
 * and the driver of the whole backward. */
#ifndef HEDDLE_CPU_ATTENTION_SUMS_H
#define HEDDLE_CPU_ATTENTION_SUMS_H

#include "attention_backward.h"

#include <stdio.h>

/* dsink[head] = -sum over queries of exp(sink - lse)·D, lse as P had it */
static void dsink_task(const call *c, int64_t head, const backward_shared *g) {
    const float sink = ((const float *)c->t->sinks)[head];
    double sum = 0;
    for (int64_t n = 0; n < c->a->b; n++) {
        unit u = make_unit(c, n * c->a->hk + head / c->group);
        for (int64_t i = 0; i < u.s.sq; i++) {
            int64_t at = lse_offset(c, &u, head, i);
            if (((const float *)c->t->lse)[at] != -INFINITY)
                sum -= exp2(sink_above(c, sink, g->base[at]) - (double)g->rest[at] - (double)g->whole[at]) *
                       (double)g->dsum[at];
        }
    }
    ((float *)c->t->dsinks)[head] = (float)sum;
}

/* The dimensions of dbias that are kept: how many tasks there are along each. */
typedef struct dbias_shape {
    int64_t b, h, key_blocks;
    bool keeps_queries;
} dbias_shape;

static dbias_shape shape_of_dbias(const call *c) {
    const heddle_attention *a = c->a;
    dbias_shape r = {a->dbias_stride.b ? a->b : 1, a->dbias_stride.h ? a->h : 1, (a->sk + c->tile_k - 1) / c->tile_k,
                     a->dbias_stride.s != 0 || a->sq == 1};
    return r;
}

/* acc[key][lane] += dS of queries i0 .. i0+count-1 of one head against one block of keys; nothing outside the sequence. */
static void add_dbias_tile(const call *c, const unit *u, int64_t head, int64_t i0, int64_t count, range keys,
                           backward_space *w, const backward_shared *g, float *acc, int64_t acc_stride) {
    int64_t queries = min64(count, u->s.sq - i0);
    if (queries <= 0)
        return;
    make_lanes(c, u, head, i0, queries, &w->l);
    int64_t begin = max64(w->l.keys.begin, keys.begin), end = min64(w->l.keys.end, keys.end);
    if (begin >= end)
        return;
    load_tile(c, u, w, g);
    const key_block b = load_key_block(c, u, w, begin, end - begin, true);
    const bool masked = new_scores(c, u, &b, false, w);
    score_gradients(c, u, &b, masked, w);
    for (int64_t j = 0; j < b.count; j++)
        for (int64_t x = 0; x < w->l.stride; x += VL) {
            float *p = acc + (begin - keys.begin + j) * acc_stride + x;
            store(p, load(p) + load(w->dp + j * w->l.stride + x));
        }
}

static void write_dbias(const call *c, int64_t n, int64_t head, int64_t i0, int64_t count, range keys,
                        const float *acc) {
    void *rows[LANES];
    float halves[LANES]; /* of 2·dS */
    for (int64_t x = 0; x < LANES; x++)
        halves[x] = 0.5f;
    for (int64_t x = 0; x < count; x++)
        rows[x] = (char *)c->t->dbias + row_offset(c->a->dbias_stride, n, head, i0 + x) * element_size(TYPE(c));
    unpack_transposed(TYPE(c), acc, LANES, count, keys.end - keys.begin, halves, false, rows, keys.begin);
}

/* dbias of one block of keys for one kept (batch entry, head): dS summed over the others, in order. */
static void dbias_task(const call *c, dbias_shape shape, int64_t task, backward_space *w, const backward_shared *g,
                       float *acc) {
    const heddle_attention *a = c->a;
    int64_t block = task % shape.key_blocks, x0 = task / shape.key_blocks % shape.h,
            n0 = task / shape.key_blocks / shape.h;
    int64_t n1 = shape.b > 1 ? n0 + 1 : a->b, x1 = shape.h > 1 ? x0 + 1 : a->h;
    range keys = {block * c->tile_k, min64(a->sk, (block + 1) * c->tile_k)};
    const size_t bytes = sizeof(float) * (size_t)(c->tile_k * LANES);
    memset(acc, 0, bytes);
    w->lift = 1;
    w->has_kept = false;
    for (int64_t i0 = 0; i0 < a->sq; i0 += LANES) {
        int64_t count = min64(LANES, a->sq - i0);
        for (int64_t n = n0; n < n1; n++)
            for (int64_t x = x0; x < x1; x++) {
                unit u = make_unit(c, n * a->hk + x / c->group);
                add_dbias_tile(c, &u, x, i0, count, keys, w, g, acc, LANES);
            }
        if (shape.keeps_queries) {
            write_dbias(c, n0, x0, i0, count, keys, acc);
            memset(acc, 0, bytes);
        }
    }
    if (shape.keeps_queries)
        return;
    for (int64_t j = 0; j < keys.end - keys.begin; j++) { /* one row for all queries: sum the lanes */
        float sum = 0;
        for (int64_t x = 0; x < LANES; x++)
            sum += acc[j * LANES + x];
        acc[j * LANES] = sum;
    }
    write_dbias(c, n0, x0, 0, 1, keys, acc);
}

/* ------------------------------------------------------------------------------------------------------- driver */

static float *carve_dbias(const attention_plan *plan, carver *w) {
    return carve_floats(w, plan->a.features & HEDDLE_BIAS ? plan->tile_k * LANES : 0);
}

static void attention_backward(const attention_plan *plan, const heddle_attention_data *data, void *workspace) {
    const heddle_attention *a = &plan->a;
    call c = make_call(plan, data);
    carver shared = {workspace, 0};
    const backward_shared g = carve_backward_shared(plan, &shared);
    carve_segments(plan, &c, &shared);
    const size_t each = (plan->workspace - shared.used) / (size_t)plan->threads / 64 * 64;
    const int64_t units = a->b * a->hk;
    const dbias_shape shape = shape_of_dbias(&c);
    const bool at_once = g.parts == 1;
    const int64_t pieces = units * g.parts;
    ticket sizes = {0}, prepare = {0}, main = {0}, sinks = {0}, bias = {0}, bounds = {0}, tiles_seen = {0};
    for (int64_t x = 0; x < units; x++)
        atomic_init(&g.done[x], 0);
    for (int64_t x = 0; x < units * g.tiles; x++)
        atomic_init(&g.turn[x], 0);
#pragma omp parallel num_threads(plan->threads) if (plan->threads > 1)
    {
        carver w = {(char *)workspace + shared.used + (size_t)thread_index() * each, 0};
        backward_space *space = carve_backward(plan, &w);
        float *acc = carve_dbias(plan, &w);
        begin_attention();
        find_segments(&c, &bounds, &tiles_seen);
        if (!at_once) {
            for (int64_t task; (task = take_ticket(&sizes)) < pieces;) {
                const unit u = make_unit(&c, task / g.chunks);
                size_task(&c, &u, task / g.chunks, task % g.chunks, &g);
            }
#pragma omp barrier
            for (int64_t task; (task = take_ticket(&prepare)) < units * max64(1, g.tiles);) {
                const unit u = make_unit(&c, task / max64(1, g.tiles));
                set_lift(&c, &u, task / max64(1, g.tiles), space, &g);
                prepare_task(&c, &u, task % max64(1, g.tiles), space, &g);
                if (task % max64(1, g.tiles) == 0)
                    backward_unused_rows(&c, &u);
            }
#pragma omp barrier
        }
        for (int64_t first; (first = take_ticket(&main) * g.per_ticket) < pieces;)
            for (int64_t x = first; x < min64(pieces, first + g.per_ticket); x++) {
                const piece now = piece_of(&g, x);
                const unit u = make_unit(&c, now.unit);
                if (at_once)
                    backward_unused_rows(&c, &u);
                if (at_once || now.part * g.part_k < u.s.sk)
                    backward_task(&c, &u, now, space, &g);
                if (g.slots)
                    atomic_fetch_add_explicit(&g.done[now.unit], 1, memory_order_release);
            }
        if (data->dsinks || data->dbias) { /* which need D of all; sum_d() may have changed it */
#pragma omp barrier
        }
        if (data->dsinks)
            for (int64_t head; (head = take_ticket(&sinks)) < a->h;)
                dsink_task(&c, head, &g);
        if (data->dbias && !writes_dbias(&c))
            for (int64_t task; (task = take_ticket(&bias)) < shape.b * shape.h * shape.key_blocks;)
                dbias_task(&c, shape, task, space, &g, acc);
        end_attention();
    }
}

/* -------------------------------------------------------------------------------------------------------- plan */

/* How much of a problem is one task's. Where that leaves few tasks they are made smaller, at the cost of some percent for one thread;
 * it must not depend on the number of threads, since the bits may depend on it. */
static void choose_pieces(attention_plan *plan) {
    const heddle_attention *a = &plan->a;
    const int64_t units = a->b * a->hk, rows = a->h / a->hk * a->sq;
    plan->tile_q = LANES * (a->dtype == HEDDLE_F32 && a->sk * (a->d + a->dv) <= 1 << 18 ? 1 : TILES_AT_ONCE);
    while (plan->tile_q > LANES &&
           units * ((rows + plan->tile_q - 1) / plan->tile_q) < (plan->tile_q > 4 * LANES ? 24 : 6))
        plan->tile_q /= 2;
    /* dK and dV of a chunk (and K and V, widened) are to stay in the second-level cache. */
    plan->chunk_k = max64(1, 65536 / (a->d + a->dv) / TILE_KEYS) * TILE_KEYS;
    if (rows <= FEW_LANES) /* then it is memory that takes the time, and the first-level cache helps */
        plan->chunk_k = min64(plan->chunk_k, 2 * TILE_KEYS);
    const int64_t least = a->mask == HEDDLE_MASK_NONE ? 2 : 4; /* a band's chunks differ in work */
    while (plan->chunk_k > TILE_KEYS && /* down to 256 keys it costs one thread 1 to 2%, to 128 6% */
           units * ((a->sk + plan->chunk_k - 1) / plan->chunk_k) < (plan->chunk_k > 2 * TILE_KEYS ? 2 * least : least))
        plan->chunk_k = (plan->chunk_k / TILE_KEYS + 1) / 2 * TILE_KEYS;
}

static size_t room_of(const attention_plan *plan) {
    carver each = {0}, shared = {0};
    call unused;
    if (plan->pass == HEDDLE_FORWARD) {
        carve_forward(plan, &each);
        carve_forward_shared(plan, &shared);
    } else {
        carve_backward(plan, &each);
        carve_dbias(plan, &each);
        carve_backward_shared(plan, &shared);
    }
    carve_segments(plan, &unused, &shared);
    return shared.used + each.used * (size_t)plan->threads;
}

static void plan_attention(attention_plan *plan) {
    const heddle_attention *a = &plan->a;
    static const char *const types[] = {"f32", "bf16", "f16", "f64"};
    snprintf(plan->kernel, sizeof plan->kernel, "heddle_attention_%s_%s_%s",
             plan->pass == HEDDLE_FORWARD ? "fwd" : "bwd", types[a->dtype], ISA_NAME);
    plan->tile_k = TILE_KEYS;
    choose_pieces(plan);
    plan->workspace = room_of(plan);
    /* Threads may become fewer before the call, and a task's share then all chunks of a unit. */
    attention_plan fewer = *plan;
    while (plan->pass == HEDDLE_BACKWARD && !joins_chunks(plan) && --fewer.threads > 0)
        if (joins_chunks(&fewer)) {
            const size_t room = room_of(&fewer);
            plan->workspace = room > plan->workspace ? room : plan->workspace;
            break;
        }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The gradients of one tile of queries against one block of keys, and the space that a thread has for them. */
#ifndef HEDDLE_CPU_ATTENTION_GRADIENTS_H
#define HEDDLE_CPU_ATTENTION_GRADIENTS_H

#include "attention_forward.h"
#include "attention_lift.h"

/* Scores and their gradients of so many keys at most are kept from one pass over a tile to the next. */
#define KEPT_KEYS 4096
#define KEPT_BLOCKS (KEPT_KEYS / TILE_KEYS + 1) /* the first may begin anywhere */

/* Numbers of K and V in a unit whose chunks one task may have. */
#define JOINED_NUMBERS (1 << 19)

/* Whether prepare_task() may form all of a unit's: float32, whose passes before the main one are many. Lists of blocks have steps of their
 * own in that. */
static bool may_keep(const heddle_attention *a) {
    return a->dtype == HEDDLE_F32 && a->sk > TILE_KEYS && a->sk <= KEPT_KEYS && !(a->features & HEDDLE_BLOCKS);
}

/* Whether a task has all chunks of a unit, so that what is kept of a tile is at hand for each: where units are enough for the threads, and
 * one's K, V, dK and dV for a core's share of the last cache. A task does then what one after the other would do for its chunk, so the
 * bits are the same. */
static bool joins_chunks(const attention_plan *plan) {
    const heddle_attention *a = &plan->a;
    const int64_t units = a->b * a->hk, threads = plan->threads;
    return a->sk > plan->chunk_k && may_keep(a) && a->h / a->hk * a->sq > FEW_LANES &&
           a->sk * (a->d + a->dv) <= JOINED_NUMBERS && (units % threads == 0 || units >= 4 * threads);
}

static bool keeps(const attention_plan *plan) {
    return may_keep(&plan->a) && (plan->a.sk <= plan->chunk_k || joins_chunks(plan));
}

/* The chunks of one task. */
#define MOST_CHUNKS (KEPT_KEYS / TILE_KEYS)

typedef struct backward_space {
    lanes l;
    float *qt, *dot, *q, *dout;          /* Qᵀ, dOᵀ [..][lanes]; Q, dO [lanes][..] */
    float *dqt;                          /* [d][lanes] */
    float *s, *dp, *tanhs, *z, *scratch; /* of the block at hand, by place_block(); Z; dweights */
    float *block_s, *block_dp, *block_tanhs;
    float *k, *v;                                 /* [chunk][..] */
    float *dk, *dv;                               /* of all keys of a task */
    float *dk_all, *dv_all;                       /* sums of what dk and dv have been (folds), or NULL */
    float base[LANES], rest[LANES], whole[LANES]; /* the log-sum-exp in units of log2 is base·factor + rest + whole */
    float lift, lower; /* gradient_lift(), in all that is linear in dO; half of 1 over it, for what P is in, too */
    float dsum[LANES];
    float dfix[LANES];                 /* what D has beside dsum, in tiles that have been surveyed */
    float dlse[LANES], sink[LANES];    /* the gradient of lse; the weight of the sink */
    float sum_p[LANES], sum_ds[LANES]; /* of a block */
    float row_p[LANES];                /* sum of P over the blocks of a chunk, where a tile is measured */
    bool q_finite, dout_finite;
    bool surveyed; /* surveys() */
    bool measured; /* measures() */
    bool fresh;    /* dk and dv hold nothing yet, and nothing is masked */
    parts seen;
    float *kept, *kept_tanhs, *kept_dp; /* S, tanh and dP of all keys of a tile for the passes that follow; or NULL */
    bool has_kept;                      /* whether they are there */
    bool kept_hides[KEPT_BLOCKS];       /* parts.hides of their blocks */
    bool has_dp[KEPT_BLOCKS];           /* whether dP has been formed, too */
    ahead next;
    key_tiles keys;                                      /* of the chunk */
    float *q_tiles, *dout_tiles, *weights_a, *weights_b; /* AMX, and pairs: rows of Q and dO, P and dS */
} backward_space;

typedef struct backward_shared {
    float *dsum, *dfix;         /* D in two parts, where lse is; in 16 bits dfix is NULL */
    float *base, *rest, *whole; /* the log-sum-exp in three */
    float *sum_p;               /* of rows that are measured, over the chunks until now; in 16 bits NULL */
    float *dq;                  /* sums of dQ [slot][group·sq][d_pad], for 16-bit types and several chunks */
    _Atomic uint32_t *turn;     /* [unit][tile]: the chunk that may add to dQ */
    _Atomic uint32_t *done;     /* [unit]: chunks that are finished, where there are slots */
    /* [unit][chunk], with an equal share of the unit's queries each, where a task has one of several chunks */
    magnitudes *sizes;
    int64_t slots, tiles, chunks, chunk_k;
    int64_t parts, part_k;   /* what of a unit is one task's: a chunk, or all of them */
    int64_t per_ticket;      /* pieces */
    int64_t units, together; /* units whose parts are worked on side by side: at least so many at a time */
} backward_shared;

static backward_shared carve_backward_shared(const attention_plan *plan, carver *w) {
    const heddle_attention *a = &plan->a;
    int64_t units = a->b * a->hk, rows = a->h / a->hk * a->sq;
    bool varlen = a->features & HEDDLE_VARLEN;
    backward_shared g = {.tiles = (rows + LANES - 1) / LANES,
                         .chunks = (a->sk + plan->chunk_k - 1) / plan->chunk_k,
                         .chunk_k = plan->chunk_k};
    const bool all = g.chunks == 1 || joins_chunks(plan);
    g.parts = all ? 1 : g.chunks;
    g.part_k = all ? g.chunks * g.chunk_k : g.chunk_k;
    /* With many chunks the threads all fit into one unit, and waiting for its last ones costs little. */
    g.units = units;
    g.together = g.parts >= 8 * plan->threads ? 1 : plan->threads;
    g.per_ticket = all ? units_together(units, plan->threads) : 1;
    g.sizes = carve(w, all ? 0 : sizeof *g.sizes * (size_t)(units * g.chunks));
    g.slots = a->dtype == HEDDLE_F32 || a->features & HEDDLE_ACCUMULATE || g.chunks <= 1
                  ? 0
                  : min64(units, 2 * g.together - 1);
    const int64_t all_rows = a->h * (varlen ? a->total_q : a->b * a->sq);
    g.dsum = carve_floats(w, all_rows);
    g.dfix = a->dtype == HEDDLE_F32 ? carve_floats(w, all_rows) : NULL;
    g.base = carve_floats(w, all_rows);
    g.rest = carve_floats(w, all_rows);
    g.whole = carve_floats(w, all_rows);
    g.sum_p = a->dtype == HEDDLE_F32 ? carve_floats(w, all_rows) : NULL;
    g.dq = carve_floats(w, g.slots * rows * ((a->d + VL - 1) / VL * VL));
    g.turn = carve(w, sizeof(uint32_t) * (size_t)(units * g.tiles));
    g.done = carve(w, sizeof(uint32_t) * (size_t)units);
    return g;
}

/* Of so many tiles at least dk and dv are one chain of additions. */
#define FOLD_TILES 8

/* Whether dk and dv of so many rows of queries are summed in two steps. One chain of additions over the tiles of a long sequence, or of
 * the many heads of a group, loses more and more; what is rounded to 16 bits does not show it. */
static bool folds(int type, int64_t rows) {
    return type == HEDDLE_F32 && rows > 2 * FOLD_TILES * LANES;
}

/* After how many tiles: rather many, as few of them may add to a key. */
static int64_t tiles_of_fold(int64_t tiles) {
    int64_t n = FOLD_TILES;
    while (n * n < 2 * tiles)
        n++;
    return n;
}

/* The first of a chunk's sums are taken as they are: what `all` held is not read. */
static void fold_sums(float **all, float **now, int64_t n, bool first) {
    if (first) {
        float *const sums = *now;
        *now = *all;
        *all = sums;
        memset(*now, 0, sizeof(float) * (size_t)n);
        return;
    }
    for (int64_t x = 0; x < n; x += VL) {
        store(*all + x, load(*all + x) + load(*now + x));
        store(*now + x, splat(0));
    }
}

static backward_space *carve_backward(const attention_plan *plan, carver *w) {
    const heddle_attention *a = &plan->a;
    int64_t pad_d = (a->d + VL - 1) / VL * VL, pad_dv = (a->dv + VL - 1) / VL * VL, tile = plan->tile_k * LANES;
    const int64_t owned = joins_chunks(plan) ? a->sk : plan->chunk_k;
    bool widens = a->dtype != HEDDLE_F32;
    backward_space *p = carve(w, sizeof *p), f = {.lift = 1, .lower = 0.5f};
    f.qt = carve_floats(w, pad_d * LANES);   /* or, with few lanes, [lanes][d_pad] */
    f.dot = carve_floats(w, pad_dv * LANES); /* or [lanes][dv_pad] */
    f.q = carve_floats(w, LANES * pad_d);
    f.dout = carve_floats(w, LANES * pad_dv);
    f.dqt = carve_floats(w, pad_d * LANES);
    f.block_s = carve_floats(w, tile);
    f.block_dp = carve_floats(w, tile);
    f.block_tanhs = carve_floats(w, a->softcap > 0 ? tile : 0);
    f.z = carve_floats(w, a->dropout > 0 ? tile : 0);
    f.scratch = carve_floats(w, a->features & HEDDLE_WEIGHTS ? tile : 0);
    f.kept = keeps(plan) ? carve_floats(w, a->sk * LANES) : NULL;
    f.kept_tanhs = keeps(plan) && a->softcap > 0 ? carve_floats(w, a->sk * LANES) : NULL;
    f.kept_dp = keeps(plan) ? carve_floats(w, a->sk * LANES) : NULL;
    f.k = carve_floats(w, widens ? plan->chunk_k * pad_d : 0);
    f.v = carve_floats(w, widens ? plan->chunk_k * pad_dv : 0);
    f.dk = carve_floats(w, owned * pad_d);
    f.dv = carve_floats(w, owned * pad_dv);
    if (folds((int)a->dtype, a->h / a->hk * a->sq)) {
        f.dk_all = carve_floats(w, owned * pad_d);
        f.dv_all = carve_floats(w, owned * pad_dv);
    }
    f.keys = carve_key_tiles(plan, plan->chunk_k, true, true, false, w);
    const bool tiled = f.keys.k_step > 0 || pairs_exist((int)a->dtype);
    f.q_tiles = tiled ? carve_floats(w, pad_d * LANES) : NULL;
    f.dout_tiles = tiled ? carve_floats(w, pad_dv * LANES) : NULL;
    f.weights_a = tiled ? carve_floats(w, tile_weights(plan)) : NULL;
    f.weights_b = tiled ? carve_floats(w, tile_weights(plan)) : NULL;
    if (p)
        *p = f;
    return p;
}

/* --------------------------------------------------------------------------------------- one tile of gradients */

/* What of lse and D belongs to the lanes. */
static void load_lse(const call *c, const unit *u, backward_space *w, const backward_shared *g) {
    const lanes *l = &w->l;
    for (int64_t x = 0; x < l->stride; x++) {
        int64_t at = lse_offset(c, u, l->head[x], l->first + l->index[x]);
        w->base[x] = x < l->count ? g->base[at] : INFINITY; /* the padding gets P = 0 */
        w->rest[x] = g->rest[at];
        w->whole[x] = g->whole[at];
        w->dsum[x] = w->lift * g->dsum[at];
    }
}

static float dlse_of(const call *c, const unit *u, const lanes *l, int64_t x) {
    return c->t->dlse ? ((const float *)c->t->dlse)[lse_offset(c, u, l->head[x], l->first + l->index[x])] : 0;
}

static float sink_weight(const call *c, const backward_space *w, int64_t x) {
    if (!(c->a->features & HEDDLE_SINKS))
        return 0;
    const double above = sink_above(c, ((const float *)c->t->sinks)[w->l.head[x]], w->base[x]);
    return (float)exp2(above - (double)w->rest[x] - (double)w->whole[x]);
}

static void load_q(const call *c, const unit *u, backward_space *w, const backward_shared *g) {
    pack_q(c, u, &w->l, w->qt);
    load_lse(c, u, w, g);
}

/* What a tile begins each chunk with. */
static void load_terms(const call *c, const unit *u, backward_space *w, const backward_shared *g) {
    load_lse(c, u, w, g);
    w->surveyed = w->measured = false;
    for (int64_t x = 0; x < w->l.stride; x++) {
        const int64_t at = lse_offset(c, u, w->l.head[x], w->l.first + w->l.index[x]);
        w->dfix[x] = g->dfix ? w->lift * g->dfix[at] : 0;
        w->surveyed |= w->dfix[x] != 0;
        w->dlse[x] = w->lift * dlse_of(c, u, &w->l, x);
        w->sink[x] = sink_weight(c, w, x);
    }
}

static void load_tile(const call *c, const unit *u, backward_space *w, const backward_shared *g) {
    pack_q(c, u, &w->l, w->qt);
    load_terms(c, u, w, g);
    if (c->t->dout && w->l.few)
        pack_few(c, u, &w->l, c->t->dout, c->a->do_stride, c->a->dv, w->lift, w->dot);
    else if (c->t->dout)
        pack_lanes(c, u, &w->l, c->t->dout, c->a->do_stride, c->a->dv, w->lift, c->v_pairs, w->dot);
    else
        memset(w->dot, 0, sizeof(float) * (size_t)(c->dv_pad * LANES));
}

#if defined(HAVE_BF16_TILES) || defined(HAVE_BF16_DOT)
/* The lanes' rows as tiles, or by pairs; whether all is finite. */
static bool make_lane_pairs(const void *const *rows, int64_t count, int64_t n, int64_t pad, float *out) {
#ifdef HAVE_BF16_TILES
    tile_lane_pairs(rows, count, n, out);
    return halves_finite(out, (count + 31) / 32 * 16 * pad);
#else
    pair_lanes(rows, count, n, pad, out);
    return halves_finite(out, (count + 1) / 2 * pad);
#endif
}

/* Q and dO of the tile for the products that sum over queries; rows of floats only where something in them is not finite. */
static void load_row_tiles(const call *c, const unit *u, backward_space *w) {
    const heddle_attention *a = c->a;
    const lanes *l = &w->l;
    const void *rows[LANES];
    lane_rows(c, u, l, c->t->q, a->q_stride, u->s.first_q, rows);
    w->q_finite = make_lane_pairs(rows, l->count, a->d, c->d_pad, w->q_tiles);
    for (int64_t x = 0; x < l->count && !w->q_finite; x++)
        widen_row(TYPE(c), rows[x], a->d, 1, w->q + x * c->d_pad);
    w->dout_finite = true;
    if (!c->t->dout) {
        memset(w->dout_tiles, 0, sizeof(float) * (size_t)(c->dv_pad * LANES));
        return;
    }
    lane_rows(c, u, l, c->t->dout, a->do_stride, u->s.first_q, rows);
    w->dout_finite = make_lane_pairs(rows, l->count, a->dv, c->dv_pad, w->dout_tiles);
    for (int64_t x = 0; x < l->count && !w->dout_finite; x++)
        widen_row(TYPE(c), rows[x], a->dv, 1, w->dout + x * c->dv_pad);
}
#endif

/* Q and dO of the tile as rows, for the products that sum over queries. */
static void load_rows(const call *c, const unit *u, backward_space *w) {
    const heddle_attention *a = c->a;
    const void *rows[LANES];
#if defined(HAVE_BF16_TILES) || defined(HAVE_BF16_DOT)
    if (uses_tiles(&w->l) || (c->pairs && !w->l.few)) {
        load_row_tiles(c, u, w);
        return;
    }
#endif
    lane_rows(c, u, &w->l, c->t->q, a->q_stride, u->s.first_q, rows);
    for (int64_t x = 0; x < w->l.count; x++)
        widen_row(TYPE(c), rows[x], a->d, 1, w->q + x * c->d_pad);
    if (c->t->dout) {
        lane_rows(c, u, &w->l, c->t->dout, a->do_stride, u->s.first_q, rows);
        for (int64_t x = 0; x < w->l.count; x++)
            widen_row(TYPE(c), rows[x], a->dv, w->lift, w->dout + x * c->dv_pad);
    } else {
        memset(w->dout, 0, sizeof(float) * (size_t)(w->l.count * c->dv_pad));
    }
    w->q_finite = all_finite(w->q, w->l.count, c->d_pad, a->d);
    w->dout_finite = all_finite(w->dout, w->l.count, c->dv_pad, a->dv);
}

/* A block as scores() wants it, or score_gradients(): with few lanes they read K and V where they are. */
static key_block load_key_block(const call *c, const unit *u, backward_space *w, int64_t first, int64_t count,
                                bool gradients) {
    key_block b = {.first = first, .count = count};
    if (w->l.few)
        return b;
    if (uses_tiles(&w->l)) {
        const key_tiles rows_only = {.k = w->keys.k, .v = gradients ? w->keys.v : NULL};
        load_key_tiles(c, u, &rows_only, &b);
        return b;
    }
    b.k = key_rows(c, u, c->t->k, c->a->k_stride, c->a->d, first, count, w->k, c->d_pad, &b.k_stride);
    if (gradients)
        b.v = key_rows(c, u, c->t->v, c->a->v_stride, c->a->dv, first, count, w->v, c->dv_pad, &b.v_stride);
    return b;
}

/* What weigh_scores() sums over a block's keys. */
enum { NO_SUMS, SUM_OF_P, SUMS_OF_BOTH };

/* What a tile's rows take from scores and from dP. */
typedef struct row_terms {
    vf base[TILE_VECTORS], dsum[TILE_VECTORS];
    exponent_rest less[TILE_VECTORS];
} row_terms;

/* s = 2·P, and with `gradients` dp = 2·dS = 2·P∘(dP - D), with exact zeros where masked, which it `stores`; they are added to the sums that
 * are wanted. `rows` rows of `vectors` vectors. */
INLINE void gradients_of(int rows, int vectors, bool gradients, bool masked, bool stores, int sums, float factor,
                         const row_terms *r, float *s, float *dp, vf *sum_p, vf *sum_ds) {
    vf e[EXP2_MOST];
#pragma GCC unroll 8
    for (int x = 0; x < rows * vectors; x++)
        e[x] = load(s + x * VL) - r->base[x % vectors];
    vexp2_twice(rows * vectors, factor, vectors, r->less, e);
#pragma GCC unroll 8
    for (int x = 0; x < rows * vectors; x++) {
        if (stores)
            store(s + x * VL, e[x]);
        if (sums >= SUM_OF_P)
            sum_p[x % vectors] += e[x];
        if (!gradients)
            continue;
        vf ds = e[x] * (load(dp + x * VL) - r->dsum[x % vectors]);
        ds = masked ? select_float(e[x] == 0, splat(0), ds) : ds;
        if (stores)
            store(dp + x * VL, ds);
        if (sums == SUMS_OF_BOTH)
            sum_ds[x % vectors] += ds;
    }
}

INLINE void all_gradients_of(int vectors, bool gradients, bool masked, bool stores, int sums, float factor,
                             int64_t count, backward_space *w) {
    const int rows = ROWS_AT_ONCE(vectors);
    const int64_t stride = vectors * VL;
    vf sum_p[TILE_VECTORS], low_p[TILE_VECTORS], sum_ds[TILE_VECTORS];
    row_terms r;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        sum_p[v] = low_p[v] = sum_ds[v] = splat(0);
        r.base[v] = load(w->base + v * VL);
        r.dsum[v] = load(w->dsum + v * VL);
        r.less[v] = rest_of_exponent(load(w->rest + v * VL), load(w->whole + v * VL));
    }
    for (int64_t begin = 0; begin < count; begin += SUM_KEYS) {
        const int64_t end = min64(count, begin + SUM_KEYS);
        vf some_p[TILE_VECTORS], some_ds[TILE_VECTORS];
        for (int v = 0; v < vectors; v++)
            some_p[v] = some_ds[v] = splat(0);
        int64_t j = begin;
        for (; j + rows <= end; j += rows)
            gradients_of(rows, vectors, gradients, masked, stores, sums, factor, &r, w->s + j * stride,
                         w->dp + j * stride, some_p, some_ds);
        for (; j < end; j++)
            gradients_of(1, vectors, gradients, masked, stores, sums, factor, &r, w->s + j * stride, w->dp + j * stride,
                         some_p, some_ds);
        for (int v = 0; v < vectors && sums; v++) {
            add_chain(some_p[v], &sum_p[v], &low_p[v]);
            sum_ds[v] += some_ds[v];
        }
    }
    for (int v = 0; v < vectors && sums; v++) {
        store(w->sum_p + v * VL, 0.5f * (sum_p[v] + low_p[v]));
        store(w->sum_ds + v * VL, 0.5f * sum_ds[v]);
    }
}

INLINE void weigh(bool gradients, bool masked, bool stores, int sums, float factor, int64_t count, backward_space *w) {
    switch (w->l.vectors) {
    case 1: all_gradients_of(1, gradients, masked, stores, sums, factor, count, w); break;
    case 2: all_gradients_of(2, gradients, masked, stores, sums, factor, count, w); break;
    case 3: all_gradients_of(3, gradients, masked, stores, sums, factor, count, w); break;
#if TILE_VECTORS > 3
    default: all_gradients_of(4, gradients, masked, stores, sums, factor, count, w); break;
#endif
    }
}

INLINE void weigh_scores(bool gradients, bool masked, int sums, float factor, int64_t count, backward_space *w) {
    weigh(gradients, masked, true, sums, factor, count, w);
}

/* The sums alone: S and dP stay. */
INLINE void sum_weights(bool gradients, int sums, float factor, int64_t count, backward_space *w) {
    weigh(gradients, true, false, sums, factor, count, w);
}

/* Where S, tanh and dP of a block are: in what is kept of the tile, if `keep`. */
static void place_block(const key_block *b, bool keep, backward_space *w) {
    const int64_t at = (b->first - w->l.keys.begin) * w->l.stride;
    w->s = keep ? w->kept + at : w->block_s;
    w->dp = keep ? w->kept_dp + at : w->block_dp;
    w->tanhs = keep && w->kept_tanhs ? w->kept_tanhs + at : w->block_tanhs;
}

/* Which of the blocks that are kept a block is. It ends with a chunk, so that they begin in different multiples of TILE_KEYS. */
INLINE int64_t kept_block(const key_block *b, const backward_space *w) {
    return b->first / TILE_KEYS - w->l.keys.begin / TILE_KEYS;
}

/* S of a block, and its tanh where uncap() wants it, formed anew; they are kept where there is room. True as scores() is. */
static bool new_scores(const call *c, const unit *u, const key_block *b, bool keep, backward_space *w) {
    place_block(b, keep, w);
    const bool masked = scores(c, u, &w->l, b, w->qt, &w->seen, w->s, w->tanhs, &w->next);
    if (keep) {
        w->kept_hides[kept_block(b, w)] = w->seen.hides;
        w->has_dp[kept_block(b, w)] = false;
    }
    return masked;
}

/* The same, of what has been kept where that is so. It may be overwritten. */
static bool known_scores(const call *c, const unit *u, const key_block *b, backward_space *w) {
    if (!w->has_kept)
        return new_scores(c, u, b, false, w);
    place_block(b, true, w);
    map_mask(c, u, &w->l, b, &w->seen);
    find_parts(u, &w->l, b, &w->seen);
    w->seen.hides = w->kept_hides[kept_block(b, w)];
    w->seen.divided = is_divided(c, u, &w->l, b);
    return hides_some(c, &w->seen);
}

/* Whether P of all of a block's scores is exactly 0, as weigh_scores() would make it: far behind ALiBi's slopes, and where a row is sharp.
 * Where it is not, the first rows tell as a rule. */
static bool weighs_nothing(const call *c, const key_block *b, const backward_space *w) {
    const lanes *l = &w->l;
    for (int64_t j = 0; j < b->count;) {
        vi weighs = splat_int(0);
        for (const int64_t end = min64(b->count, j + 8); j < end; j++)
            for (int v = 0; v < l->vectors; v++) {
                const vf above = load(w->s + j * l->stride + v * VL) - load(w->base + v * VL);
                weighs |= ~(above * c->factor - load(w->rest + v * VL) <= load(w->whole + v * VL) - 127);
            }
        if (any_lane(weighs))
            return false;
    }
    return true;
}

/* sum_ds = sum over the block's keys of P∘(Z∘dP + dweights - D), with `weights` of P∘dweights alone, and sum_p = sum of P, both in short
 * chains. */
static void add_row_sums(const call *c, const key_block *b, bool weights, backward_space *w) {
    const int64_t stride = w->l.stride;
    for (int64_t x = 0; x < stride; x += VL) {
        const vf d = weights ? splat(0) : load(w->dsum + x);
        vf sum = splat(0), sum_p = splat(0), low_p = splat(0);
        for (int64_t begin = 0; begin < b->count; begin += SUM_KEYS) {
            vf some = splat(0), some_p = splat(0);
            for (int64_t at = x + begin * stride; at < min64(b->count, begin + SUM_KEYS) * stride; at += stride) {
                vf p = load(w->s + at), dp = weights ? splat(0) : load(w->dp + at);
                if (!weights && c->drops)
                    dp *= load(w->z + at);
                if (c->t->dweights)
                    dp += load(w->scratch + at);
                some += select_float(p == 0, splat(0), p * (dp - d));
                some_p += p;
            }
            sum += some;
            add_chain(some_p, &sum_p, &low_p);
        }
        store(w->sum_ds + x, 0.5f * sum);
        store(w->sum_p + x, 0.5f * (sum_p + low_p));
    }
}

static void pack_dweights(const call *c, const unit *u, const key_block *b, backward_space *w) {
    const void *rows[LANES];
    lane_rows(c, u, &w->l, c->t->dweights, c->a->dweights_stride, 0, rows);
    pack_transposed(TYPE(c), rows, b->first, w->l.count, b->count, 1, w->scratch, w->l.stride);
}

/* dp = V·dOᵀ */
static void weight_gradients(const call *c, const unit *u, const key_block *b, backward_space *w) {
    const lanes *l = &w->l;
    if (!l->few && c->v_pairs) {
        multiply_pairs(c, u, l, &w->seen, b, c->t->v, c->a->v_stride, c->a->dv, w->dot, w->dp, &w->next);
        return;
    }
    if (!l->few) {
        multiply_parts(l, &w->seen, b->v, b->v_stride, c->a->dv, c->dv_chain, b->t.v, w->dot, w->dp,
                       rows_behind(c, u, c->t->v, c->a->v_stride, c->a->dv, b->first + b->count, false), &w->next);
        return;
    }
    const few_rows v = few_keys(c, u, c->t->v, c->a->v_stride, c->a->dv, b->first);
    float t[FEW_LANES * FEW_KEYS];
    few_dot(TYPE(c), v, b->count, l->count, w->dot, c->dv_pad, v, t);
    few_as_tile(l, t, b->count, w->dp);
}

static void known_weight_gradients(const call *c, const unit *u, const key_block *b, backward_space *w) {
    if (!w->has_kept || !w->has_dp[kept_block(b, w)])
        weight_gradients(c, u, b, w);
}

/* The same where dropout or the gradient of the weights have a part in dP. */
static void mixed_gradients(const call *c, const unit *u, const key_block *b, bool masked, backward_space *w) {
    const lanes *l = &w->l;
    weigh_scores(false, false, NO_SUMS, c->factor, b->count, w);
    if (c->drops)
        dropout_factors(c, u, l, b, w->z);
    if (c->t->dweights)
        pack_dweights(c, u, b, w);
    for (int v = 0; v < l->vectors; v++) {
        const vf dsum = load(w->dsum + v * VL);
        vf sum_p = splat(0), sum_ds = splat(0);
        for (int64_t x = v * VL; x < b->count * l->stride; x += l->stride) {
            vf p = load(w->s + x), dp = load(w->dp + x);
            if (c->drops)
                dp *= load(w->z + x);
            if (c->t->dweights)
                dp += load(w->scratch + x);
            vf ds = p * (dp - dsum);
            ds = masked ? select_float(p == 0, splat(0), ds) : ds;
            store(w->dp + x, ds);
            sum_p += p;
            sum_ds += ds;
        }
        store(w->sum_p + v * VL, 0.5f * sum_p);
        store(w->sum_ds + v * VL, 0.5f * sum_ds);
    }
}

/* Whether the block has all keys that the tile's queries see. */
static bool block_is_all(const lanes *l, const key_block *b) {
    return b->first <= l->keys.begin && l->keys.end <= b->first + b->count;
}

/* Whether rows may be settled by this block: in float32 and several blocks those alone of which a mask or a bias may leave few keys; what
 * large scores leave of a row has been surveyed. */
static bool may_settle(const call *c, const key_block *b, const backward_space *w) {
    return !w->surveyed && (TYPE(c) != HEDDLE_F32 || c->adjusts || c->masks || block_is_all(&w->l, b));
}

INLINE vf magnitude(vf x) {
    return (vf)((vi)x & 0x7fffffff);
}

/* Lanes whose sum of P and sink's weight is 1 but for `slack` and for what the rounding of a float32 lse does to it. */
INLINE vi sums_to_one(const call *c, vf sum, vf base, float slack) {
    const vf size = magnitude(base) * c->factor;
    return magnitude(1 - sum) <= select_float(size < 64, size, splat(64)) * 0x1p-23f + slack;
}

/* What D lacks, by the sums of a row, once P is multiplied by `scale`: a row of dS sums to the gradient of lse less the sink's share. */
INLINE vf lacks_of(const backward_space *w, int64_t at, vf scale) {
    return (load(w->sum_ds + at) - load(w->sink + at) * load(w->dsum + at)) * scale - load(w->dlse + at);
}

INLINE void shift_rows(const lanes *l, int64_t at, int64_t count, bool masked, vf scale, vf shift, backward_space *w) {
    for (int64_t x = at; x < count * l->stride; x += l->stride) {
        const vf p = load(w->s + x) * scale, ds = load(w->dp + x) * scale - p * shift;
        store(w->s + x, p);
        store(w->dp + x, masked ? select_float(p == 0, splat(0), ds) : ds);
    }
}

/* Rows whose weight lies in this block but for a rounding of the type get the D that their sums ask for. The one that o gives is off by
 * the rounding of o, and knows nothing of the rounding of dP, which cancels in dP - D where few keys share a row and little else is
 * left. And a float32 lse is off by its own rounding: where the block has all keys, float32's P is made to sum to 1. Where the sum
 * says that lse is of more keys than these (a part of a longer row), everything stays as it is. */
static void settle_rows(const call *c, const key_block *b, bool masked, backward_space *w) {
    const lanes *l = &w->l;
    const bool all = TYPE(c) == HEDDLE_F32 && block_is_all(l, b);
    const float slack = all ? 0x1p-20f : TYPE(c) == HEDDLE_F32 ? 0x1p-22f : TYPE(c) == HEDDLE_BF16 ? 0x1p-9f : 0x1p-12f;
    for (int64_t at = 0; at < l->stride; at += VL) {
        if (w->surveyed) {
            shift_rows(l, at, b->count, masked, splat(1), load(w->dfix + at), w);
            continue;
        }
        const vf sum = load(w->sum_p + at) + load(w->sink + at);
        const vi whole = sums_to_one(c, sum, load(w->base + at), slack);
        if (!any_lane(whole))
            continue;
        const vf scale = select_float(whole & (all ? -1 : 0), 1 / sum, splat(1));
        const vf shift = select_float(whole, lacks_of(w, at, scale), splat(0));
        store(w->dsum + at, load(w->dsum + at) + shift);
        store(w->rest + at, load(w->rest + at) - (scale - 1) * (float)LOG2E); /* log2(sum) */
        shift_rows(l, at, b->count, masked, scale, shift, w);
    }
}

/* From scores in s, which are `masked` as scores() says: s = 2·Z∘P, dp = 2·dS = 2·P∘(Z∘(V·dOᵀ) + dweights - D), with exact zeros
 * where masked. */
static void score_gradients(const call *c, const unit *u, const key_block *b, bool masked, backward_space *w) {
    const lanes *l = &w->l;
    const bool settles = may_settle(c, b, w);
    known_weight_gradients(c, u, b, w);
    if (c->drops || c->t->dweights)
        mixed_gradients(c, u, b, masked, w);
    else if (masked && settles)
        weigh_scores(true, true, SUMS_OF_BOTH, c->factor, b->count, w);
    else if (settles)
        weigh_scores(true, false, SUMS_OF_BOTH, c->factor, b->count, w);
    else if (masked && w->measured)
        weigh_scores(true, true, SUM_OF_P, c->factor, b->count, w);
    else if (w->measured)
        weigh_scores(true, false, SUM_OF_P, c->factor, b->count, w);
    else if (masked)
        weigh_scores(true, true, NO_SUMS, c->factor, b->count, w);
    else
        weigh_scores(true, false, NO_SUMS, c->factor, b->count, w);
    for (int64_t x = 0; w->measured && x < l->stride; x++)
        w->row_p[x] += w->sum_p[x];
    if (settles || w->surveyed)
        settle_rows(c, b, masked, w);
    for (int64_t x = 0; c->drops && x < b->count * l->stride; x += VL)
        store(w->s + x, load(w->s + x) * load(w->z + x));
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * One tile of attention scores: up to LANES queries, side by side in the lanes of vectors, against a block of keys, one key a
 * row. So S is held transposed, softmax's maximum and sum run down the rows without any shuffle, and the query heads that
 * share a key/value head fill the lanes together: query row f of a group is query f / group of head f % group. */
#ifndef HEDDLE_CPU_TILE_H
#define HEDDLE_CPU_TILE_H

#include "../mask.h"
#include "../plan.h"
#include "ahead.h"
#include "few.h"
#include "gemm.h"
#include "pack.h"
#include "segments.h"
#include "threads.h"
#include "vmath.h"

#ifndef TILE_VECTORS
#define TILE_VECTORS 3
#endif
#define LANES (TILE_VECTORS * VL)
/* Tiles of queries for which 16-bit keys are made ready together, at most. */
#ifdef HAVE_BF16_TILES
#define TILES_AT_ONCE 4
#else
#define TILES_AT_ONCE 8
#endif
#define LOG2E 1.44269504088896340736
/* From about so many keys on a log-sum-exp, of scores of deviation 1, is 8: the rounding of one in float32, which is in all P of a row, is
 * then more than what the sum over d rounds of a score. */
#define MANY_KEYS (14 * 128)
/* Of fewer keys than so many sums over a head dim are what is rounded most; who forms them as a vector's lanes loses less than one chain does. */
#define FEW_SCORES 12

/* What holds for the whole call. */
typedef struct call {
    const heddle_attention *a;
    const heddle_attention_data *t;
    int type, threads;
    int64_t group, tile_k;
    int64_t few_k;         /* keys of a block of few queries: its rows of K and V fill half of the first-level cache */
    int64_t d_pad, dv_pad; /* rounded up to whole vectors */
    bool pairs;            /* bfloat16: products by pairs (attention_pairs.h) */
    bool k_pairs,
        v_pairs;  /* those that sum along rows of K, of V in backward, too: they need aligned pairs in memory */
    bool adds;    /* HEDDLE_ACCUMULATE: o, dq, dk and dv are float32 and hold something */
    int out;      /* the type of those four */
    bool adjusts; /* softcap, ALiBi or bias change the scores */
    bool divides; /* HEDDLE_SEGMENTS or HEDDLE_BLOCKS: whole blocks of keys are seen by nobody */
    bool masks;   /* elements may be hidden one by one, whatever the band says */
    bool hidden;  /* HEDDLE_PAGES: some keys of the block are in no page */
    float k_scale, v_scale; /* HEDDLE_E4M3: of the unit that the thread is at */
    int64_t chain,
        dv_chain;       /* of the sums over d that scores are, and over dv that their gradients are: so many terms */
    double unit;        /* a score as stored (raw product of q_by·q and k, or adjusted) times unit is S, */
    float q_by, factor; /* and times factor it is in units of log2 */
    bool drops;
    uint32_t drop_below;
    float keep_factor;
    uint64_t seed, offset;
    id_bounds *key_bounds; /* HEDDLE_SEGMENTS: of BOUNDS_KEYS keys, [b][bounds] */
    range *tile_keys;      /* and the keys that LANES rows of a sequence may see, [b][tiles] */
    int64_t bounds, tiles;
} call;

/* One batch entry (or sequence) and one key/value head with the query heads of its group. */
typedef struct unit {
    int64_t n, hk, first_head;
    sequence s;
    band m;
    int64_t off;
    const int32_t *q_ids, *k_ids; /* HEDDLE_SEGMENTS; NULL: all are of one */
} unit;

typedef struct lanes {
    int vectors;           /* in use */
    int64_t stride, count; /* lanes in use with and without the padding of the last vector */
    bool few;             /* all rows of the unit: few.h forms the scores, and packed q is [lane][d_pad] in its order */
    int64_t first, last;  /* lowest and highest query index */
    range keys;           /* what they see is among these; empty when begin >= end */
    id_bounds ids;        /* of their segments */
    int64_t head0, heads; /* HEDDLE_BLOCKS: whose lists they have */
    int32_t index[LANES]; /* query index - first */
    uint32_t head[LANES]; /* query head */
} lanes;

/* The keys first .. first+count-1 of a block are seen by vectors begin .. end-1 of the lanes alone. */
typedef struct part {
    int64_t first, count;
    int begin, end;
} part;

#define TILE_KEYS 128
#define MAX_PARTS (TILE_KEYS / VL)

typedef struct parts {
    int count;
    bool partial; /* the band hides some */
    bool hides;   /* a bias hides some */
    bool divided; /* segments or lists of blocks hide some */
    bool cut;     /* a boolean mask hides some: kind[j][v] says for keys j·VL .. j·VL+VL-1 and vector v */
    uint8_t kind[MAX_PARTS][TILE_VECTORS]; /* tile_kind */
    uint32_t bits[TILE_KEYS / 32][LANES];  /* of a boolean mask: a lane's next 32 keys, 1 where it sees one */
    part p[MAX_PARTS];
} parts;

#ifdef HAVE_BF16_TILES
#include "attention_tiles.h"
#elif defined(HAVE_BF16_DOT)
#include "attention_pairs.h"
#endif

/* The same for AMX (attention_tiles.h): rows of K and V, and their columns, `down` floats from 16 of them to the next; where products
 * go by pairs (attention_pairs.h), `columns` are pairs of rows. */
typedef struct key_tiles {
    float *k, *v, *k_columns, *v_columns;
    int64_t k_step, v_step, down; /* floats to the next 16 keys of k and v */
} key_tiles;

/* A block of keys with their rows of K and V as floats. */
typedef struct key_block {
    int64_t first, count;
    const float *k, *v;
    int64_t k_stride, v_stride;
    key_tiles t;
} key_block;

INLINE bool pairs_exist(int type) {
#ifdef HAVE_BF16_DOT
    return type == HEDDLE_BF16;
#else
    (void)type;
    return false;
#endif
}

/* Whether two elements of rows of x and of y may be multiplied at once, where they are: as 32 bits that are aligned. */
static bool by_pairs(int type, int64_t n, const void *x, heddle_strides sx, const void *y, heddle_strides sy) {
    const int64_t odd = n | sx.b | sx.h | sx.s | sy.b | sy.h | sy.s;
    return pairs_exist(type) && odd % 2 == 0 && (((uintptr_t)x | (uintptr_t)y) & 3) == 0;
}

/* What q is multiplied with before k is: the sign of the scale, so that factor is positive and the largest score stays the largest
 * (adjusting has the scale itself); and as a usual scale is under 1, its power of two, so that q·k leaves float32's range where
 * scale·q·k does. Neither rounds anything that is not 0 beside the other numbers. */
static float query_factor(double scale, bool adjusts) {
    const float power = fabs(scale) >= 0x1p-12 && fabs(scale) < 1 ? ldexpf(1, ilogb(scale)) : 1;
    return !adjusts && scale < 0 ? -power : power;
}

static call make_call(const attention_plan *plan, const heddle_attention_data *t) {
    const heddle_attention *a = &plan->a;
    call c = {
        .a = a, .t = t, .type = (int)a->dtype, .threads = plan->threads, .group = a->h / a->hk, .tile_k = plan->tile_k};
    c.k_scale = c.v_scale = 1;
    c.d_pad = (a->d + VL - 1) / VL * VL;
    c.dv_pad = (a->dv + VL - 1) / VL * VL;
    c.few_k = clamp64(32768 / ((a->d + a->dv) * element_size(c.type)) / VL * VL, VL, FEW_KEYS);
    c.adjusts = a->softcap > 0 || (a->features & (HEDDLE_ALIBI | HEDDLE_BIAS));
    c.masks = a->features & (HEDDLE_BIAS | HEDDLE_BOOL_MASK | HEDDLE_SEGMENTS | HEDDLE_BLOCKS);
    c.divides = a->features & (HEDDLE_SEGMENTS | HEDDLE_BLOCKS);
    if (a->features & HEDDLE_BLOCKS)
        c.tile_k = a->block_k;
    c.q_by = query_factor(a->scale, c.adjusts);
    c.unit = c.adjusts ? 1 : a->scale / (double)c.q_by;
    c.factor = (float)(c.unit * LOG2E);
    const bool short_chains = plan->pass == HEDDLE_BACKWARD && c.type == HEDDLE_F32 && a->sk >= MANY_KEYS;
    const bool few_scores = c.type == HEDDLE_F32 && a->sk < FEW_SCORES;
    c.chain = few_scores ? even_chain(a->d, 16) : short_chains ? even_chain(a->d, 32) : chain_of(false, a->d);
    c.dv_chain = few_scores ? even_chain(a->dv, 16) : chain_of(false, a->dv);
    c.pairs = pairs_exist(c.type);
    c.adds = a->features & HEDDLE_ACCUMULATE;
    c.out = c.adds ? HEDDLE_F32 : c.type;
    c.k_pairs = by_pairs(c.type, a->d, t->q, a->q_stride, t->k, a->k_stride);
    c.v_pairs = by_pairs(c.type, a->dv, t->dout, a->do_stride, t->v, a->v_stride);
    c.drops = a->dropout > 0;
    c.drop_below = dropout_threshold(a->dropout);
    c.keep_factor = (float)dropout_scale(a->dropout);
    c.seed = a->features & HEDDLE_RNG_STATE ? t->rng_state[0] : a->seed;
    c.offset = a->features & HEDDLE_RNG_STATE ? t->rng_state[1] : a->offset;
    return c;
}

/* lse from the score as stored that exponents were taken from, and the logarithm of their sum to base 2. */
INLINE double exact_lse(const call *c, float base, double log2_sum) {
    return (double)base * c->unit + log2_sum * (c->unit / (double)c->factor);
}

INLINE float natural_lse(const call *c, float base, double log2_sum) {
    return (float)exact_lse(c, base, log2_sum);
}

/* How far a sink is above a score as stored, in units of log2: the factor takes from both alike, so that equal ones are. */
INLINE double sink_above(const call *c, float sink, float score) {
    return ((double)sink / c->unit - (double)score) * (double)c->factor;
}

static unit make_unit(const call *c, int64_t index) {
    const heddle_attention *a = c->a;
    unit u = {.n = index / a->hk, .hk = index % a->hk};
    u.first_head = u.hk * c->group;
    u.s = sequence_of(a, c->t->cu_seqlens_q, c->t->cu_seqlens_k, c->t->seqlens_q, c->t->seqlens_k, u.n);
    u.m = band_of(a, u.s);
    u.off = diagonal_offset(a, u.s);
    if (a->features & HEDDLE_SEGMENTS) {
        u.q_ids = query_segments(a, c->t->q_segments, u.s, u.n);
        u.k_ids = key_segments(a, c->t->k_segments, u.s, u.n);
    }
    return u;
}

/* Row `row` of sequence u.n in a tensor of query rows (head: a query head) or of key rows (a key/value head). */
INLINE int64_t row_offset(heddle_strides t, int64_t n, int64_t head, int64_t row) {
    return n * t.b + head * t.h + row * t.s;
}

/* Where lse (and D) of a query is. */
INLINE int64_t lse_offset(const call *c, const unit *u, int64_t head, int64_t i) {
    const heddle_attention *a = c->a;
    return a->features & HEDDLE_VARLEN ? head * a->total_q + u->s.first_q + i : (u->n * a->h + head) * a->sq + i;
}

/* Queries i0 .. i1-1. */
static range keys_by_segments(const call *c, const unit *u, int64_t i0, int64_t i1) {
    return narrow_keys(u->k_ids, c->key_bounds + u->n * c->bounds, bounds_of(u->q_ids + i0, i1 - i0),
                       keys_of_queries(u->m, i0, i1, u->s.sk));
}

/* HEDDLE_BLOCKS: which of n <= 32 blocks of keys from `from` on a list names. */
static uint32_t listed_bits(const call *c, const unit *u, int64_t head, int64_t r, int64_t from, int64_t n) {
    const int32_t *columns = c->t->block_columns;
    const range list = blocks_of(c->a, c->t->block_rows, columns, u->n, head, r);
    uint32_t bits = 0;
    for (int64_t x = list.begin; x < list.end; x++)
        if ((uint64_t)(columns[x] - from) < (uint64_t)n)
            bits |= UINT32_C(1) << (columns[x] - from);
    return bits;
}

/* `keys` without what is in front of the first block that a list of these lanes names, and behind the last. */
static range keys_by_blocks(const call *c, const unit *u, const lanes *l, range keys) {
    const heddle_attention *a = c->a;
    const int32_t *columns = c->t->block_columns;
    const int64_t most = (u->s.sk + a->block_k - 1) / a->block_k;
    range seen = {most, 0};
    for (int64_t head = l->head0; head < l->head0 + l->heads; head++)
        for (int64_t r = l->first / a->block_q; r <= l->last / a->block_q; r++) {
            const range list = blocks_of(a, c->t->block_rows, columns, u->n, head, r);
            for (int64_t x = list.begin; x < list.end; x++)
                if (columns[x] >= 0 && columns[x] < most)
                    seen = (range){min64(seen.begin, columns[x]), max64(seen.end, columns[x] + 1)};
        }
    return (range){max64(keys.begin, seen.begin * a->block_k), min64(keys.end, seen.end * a->block_k)};
}

/* Query rows f0 .. f0+count-1 of the unit's group; or of one head alone when head >= 0. */
static void make_lanes(const call *c, const unit *u, int64_t head, int64_t f0, int64_t count, lanes *l) {
    int64_t group = head >= 0 ? 1 : c->group, first_head = head >= 0 ? head : u->first_head;
    l->count = count;
    l->vectors = (int)((count + VL - 1) / VL);
    l->stride = l->vectors * VL;
    l->few = c->group * u->s.sq <= FEW_LANES;
    l->first = f0 / group;
    l->last = (f0 + count - 1) / group;
    if (!u->k_ids)
        l->keys = keys_of_queries(u->m, l->first, l->last + 1, u->s.sk);
    else if (head < 0)
        l->keys = c->tile_keys[u->n * c->tiles + f0 / LANES];
    else
        l->keys = keys_by_segments(c, u, l->first, l->last + 1);
    if (u->k_ids)
        l->ids = bounds_of(u->q_ids + l->first, l->last + 1 - l->first);
    l->head0 = first_head;
    l->heads = c->a->blocks_of_h ? group : 1;
    if (c->a->features & HEDDLE_BLOCKS && c->t->block_rows)
        l->keys = keys_by_blocks(c, u, l, l->keys);
    int64_t i = 0, member = f0 % group;
    for (int64_t x = 0; x < l->stride; x++) {
        l->index[x] = (int32_t)i;
        l->head[x] = (uint32_t)(first_head + member);
        if (x + 1 < count && ++member == group) { /* padding lanes repeat the last one; nobody reads them */
            member = 0;
            i++;
        }
    }
}

/* Addresses of the lanes' rows in a tensor of query rows of elements of a type. */
INLINE void lane_rows_of(int type, const unit *u, const lanes *l, const void *p, heddle_strides stride,
                         int64_t first_row, const void *rows[LANES]) {
    for (int64_t x = 0; x < l->count; x++)
        rows[x] = element_at(p, row_offset(stride, u->n, l->head[x], first_row + l->first + l->index[x]), type);
}

INLINE void lane_rows(const call *c, const unit *u, const lanes *l, const void *p, heddle_strides stride,
                      int64_t first_row, const void *rows[LANES]) {
    lane_rows_of(TYPE(c), u, l, p, stride, first_row, rows);
}

static void pack_lanes(const call *c, const unit *u, const lanes *l, const void *p, heddle_strides stride, int64_t n,
                       float factor, bool pairs, float *out) {
    const void *rows[LANES];
    lane_rows(c, u, l, p, stride, u->s.first_q, rows);
#ifdef HAVE_BF16_DOT
    if (pairs) {
        pack_pairs(rows, l->count, n, factor, out, l->stride);
        return;
    }
#else
    (void)pairs;
#endif
#ifdef HAVE_BF16_TILES
    tile_lanes(rows, l->count, l->vectors, n, factor, out);
#else
    pack_transposed(TYPE(c), rows, 0, l->count, n, factor, out, l->stride);
#endif
}

/* The same [lane][n], padded to whole vectors, in the order of few.h. */
static void pack_few(const call *c, const unit *u, const lanes *l, const void *p, heddle_strides stride, int64_t n,
                     float factor, float *out) {
    const int64_t pad = (n + VL - 1) / VL * VL;
    const void *rows[LANES];
    lane_rows(c, u, l, p, stride, u->s.first_q, rows);
    for (int64_t x = 0; x < l->count; x++)
        few_widen(TYPE(c), rows[x], n, factor, out + x * pad);
    if (l->count % 4 == 3)
        memset(out + l->count * pad, 0, sizeof(float) * (size_t)pad);
}

/* q of the lanes as the scores want it. Forward and backward must form the same scores, to the bit: P is exp(S - lse). */
static void pack_q(const call *c, const unit *u, const lanes *l, float *out) {
    if (l->few)
        pack_few(c, u, l, c->t->q, c->a->q_stride, c->a->d, c->q_by, out);
    else
        pack_lanes(c, u, l, c->t->q, c->a->q_stride, c->a->d, c->q_by, c->k_pairs, out);
}

/* Rows of K or V as floats: where they are, or widened into `buffer`. */
static const float *key_rows(const call *c, const unit *u, const void *p, heddle_strides stride, int64_t n,
                             int64_t first, int64_t count, float *buffer, int64_t pad, int64_t *row_stride) {
    const char *rows = element_at(p, row_offset(stride, u->n, u->hk, u->s.first_k + first), TYPE(c));
    if (TYPE(c) == HEDDLE_F32) {
        *row_stride = stride.s;
        return (const float *)(const void *)rows;
    }
    widen_rows(TYPE(c), rows, stride.s * element_size(TYPE(c)), count, n, buffer, pad);
    *row_stride = pad;
    return buffer;
}

/* HEDDLE_SEGMENTS: what find_segments() finds. Part of what all threads share. */
static void carve_segments(const attention_plan *plan, call *c, carver *w) {
    const heddle_attention *a = &plan->a;
    const bool any = a->features & HEDDLE_SEGMENTS;
    c->bounds = any ? a->sk / BOUNDS_KEYS + 1 : 0;
    c->tiles = any ? (a->h / a->hk * a->sq + LANES - 1) / LANES : 0;
    c->key_bounds = carve(w, sizeof(id_bounds) * (size_t)(a->b * c->bounds));
    c->tile_keys = carve(w, sizeof(range) * (size_t)(a->b * c->tiles));
}

/* By all threads together, before anything else; each waits for the others. */
static void find_segments(const call *c, ticket *of_bounds, ticket *of_tiles) {
    const int64_t b = c->a->b;
    if (!c->bounds)
        return;
    for (int64_t n; (n = take_ticket(of_bounds)) < b;) {
        const unit u = make_unit(c, n * c->a->hk);
        for (int64_t j = 0; u.k_ids && j < u.s.sk; j += BOUNDS_KEYS)
            c->key_bounds[n * c->bounds + j / BOUNDS_KEYS] = bounds_of(u.k_ids + j, min64(BOUNDS_KEYS, u.s.sk - j));
    }
#pragma omp barrier
    for (int64_t at; (at = take_ticket(of_tiles)) < b * c->tiles;) {
        const unit u = make_unit(c, at / c->tiles * c->a->hk);
        const int64_t f0 = at % c->tiles * LANES, f1 = min64(f0 + LANES, c->group * u.s.sq);
        if (u.k_ids && f0 < f1)
            c->tile_keys[at] = keys_by_segments(c, &u, f0 / c->group, (f1 - 1) / c->group + 1);
    }
#pragma omp barrier
}

/* Space for the tiles of up to `count` keys: rows of K, and what else a pass needs. Nothing where there are no tiles. */
static key_tiles carve_key_tiles(const attention_plan *plan, int64_t count, bool v, bool k_columns, bool v_columns,
                                 carver *w) {
    key_tiles t = {0};
#ifdef HAVE_BF16_TILES
    const heddle_attention *a = &plan->a;
    t.k = carve_floats(w, tile_space(count, a->d));
    t.v = v ? carve_floats(w, tile_space(count, a->dv)) : NULL;
    t.k_columns = k_columns ? carve_floats(w, tile_space(count, a->d)) : NULL;
    t.v_columns = v_columns ? carve_floats(w, tile_space(count, a->dv)) : NULL;
    t.k_step = (a->d + 31) / 32 * TILE_FLOATS;
    t.v_step = (a->dv + 31) / 32 * TILE_FLOATS;
    t.down = (count + 31) / 32 * TILE_FLOATS;
#elif defined(HAVE_BF16_DOT)
    const heddle_attention *a = &plan->a;
    const int64_t pairs = pairs_exist((int)a->dtype) ? (count + 1) / 2 : 0;
    (void)v;
    t.k_columns = k_columns && pairs ? carve_floats(w, pairs * ((a->d + VL - 1) / VL * VL)) : NULL;
    t.v_columns = v_columns && pairs ? carve_floats(w, pairs * ((a->dv + VL - 1) / VL * VL)) : NULL;
#else
    (void)plan, (void)count, (void)v, (void)k_columns, (void)v_columns, (void)w;
#endif
    return t;
}

/* Floats for the weights of a block as tiles. */
INLINE int64_t tile_weights(const attention_plan *plan) {
    return plan->tile_k * (LANES + 16) / 2;
}

/* Whether the products of these lanes read tiles, so that nobody needs rows of floats. */
INLINE bool uses_tiles(const lanes *l) {
#ifdef HAVE_BF16_TILES
    return !l->few;
#else
    (void)l;
    return false;
#endif
}

/* Around a thread's products. */
INLINE void begin_attention(void) {
#ifdef HAVE_BF16_TILES
    begin_tiles();
#endif
}

INLINE void end_attention(void) {
#ifdef HAVE_BF16_TILES
    end_tiles();
#endif
}

/* A block's keys as tiles, for whatever of `t` there is. */
static void load_key_tiles(const call *c, const unit *u, const key_tiles *t, key_block *b) {
    b->t = *t;
#ifdef HAVE_BF16_TILES
    const heddle_attention *a = c->a;
    const int64_t row = u->s.first_k + b->first;
    const char *k = element_at(c->t->k, row_offset(a->k_stride, u->n, u->hk, row), TYPE(c));
    tile_rows(k, a->k_stride.s * 2, b->count, a->d, t->k);
    if (t->k_columns)
        tile_columns(k, a->k_stride.s * 2, b->count, a->d, t->k_columns, t->down);
    if (!t->v && !t->v_columns)
        return;
    const char *v = element_at(c->t->v, row_offset(a->v_stride, u->n, u->hk, row), TYPE(c));
    if (t->v)
        tile_rows(v, a->v_stride.s * 2, b->count, a->dv, t->v);
    if (t->v_columns)
        tile_columns(v, a->v_stride.s * 2, b->count, a->dv, t->v_columns, t->down);
#else
    (void)c, (void)u;
#endif
}

#endif

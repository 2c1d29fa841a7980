/* SPDX-License-Identifier: Apache-2.0
 * The products of a tile, and the scores that they make: adjusted, masked (attention_masks.h), dropped. */
#ifndef HEDDLE_CPU_ATTENTION_SCORES_H
#define HEDDLE_CPU_ATTENTION_SCORES_H

#include "attention_masks.h"

/* VL keys of VL lanes of a tensor of scores, from rows[0][first] on, a key a row; `nobody` in lanes that have no row. */
INLINE void lanes_of_scores(int type, const void *const *rows, int64_t count, int64_t first, int64_t keys, float nobody,
                            vf *t) {
    if (count >= VL && keys >= VL)
        for (int l = 0; l < VL; l++) {
            const char *p = element_at(rows[l], first, type);
            t[l] = load_vector(type, p);
            __builtin_prefetch(p + TILE_KEYS * element_size(type), 0, 2); /* what the next block wants */
        }
    else
        for (int l = 0; l < VL; l++)
            t[l] = l < count ? load_some(type, element_at(rows[l], first, type), keys) : splat(nobody);
    transpose(t);
}

/* What makes a score of the product of a query and a key, beside the scale. */
typedef struct adjustment {
    float scale, cap;
    float slope[LANES], index[LANES]; /* of ALiBi */
    const void *bias[LANES];
} adjustment;

/* softcap·tanh(scale·s/softcap) - slope·|distance| + bias of `rows` keys of a vector of lanes, `stride` floats apart; the tanh goes to
 * `tanhs` if that is there. `away` is the distance of the first key. Lanes where a bias masks are set in `masked`. */
INLINE void adjust_rows(bool caps, bool slopes, bool biased, int rows, const adjustment *r, vf slope, vf away,
                        const vf *bias, float *s, int64_t stride, float *tanhs, vi *masked) {
    vf x[TANH_MOST];
#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)
    EACH x[i] = load(s + i * stride) * r->scale;
    if (caps) {
        vtanh_each(rows, x);
        if (tanhs) {
            EACH store(tanhs + i * stride, x[i]);
        }
        EACH x[i] *= r->cap;
    }
    EACH {
        if (slopes) { /* bits between the products leave the compiler one way to contract them, in forward and backward alike */
            const vi size = (vi)(slope * (away - (float)i)) & INT32_MAX;
            x[i] -= (vf)(size ^ ((vi)slope & INT32_MIN));
        }
        if (biased) {
            const vi hidden = bias[i] == splat(-INFINITY);
            x[i] = select_float(hidden, splat(-INFINITY), x[i] + bias[i]);
            *masked |= hidden;
        }
        store(s + i * stride, x[i]);
    }
#undef EACH
}

/* The same of all keys. True if a bias masks (mask.h), whatever the score beside it is. */
INLINE bool adjust_each(bool caps, bool slopes, int bias_type, const adjustment *r, const unit *u, const lanes *l,
                        const key_block *b, float *s, float *tanhs) {
    vi masked = splat_int(0);
    for (int v = 0; v < l->vectors; v++) {
        const vf slope = load(r->slope + v * VL), index = load(r->index + v * VL);
        for (int64_t j0 = 0; j0 < b->count; j0 += VL) {
            vf bias[VL];
            if (bias_type >= 0) /* a key that is NaN and masked must not reach the lanes of nobody */
                lanes_of_scores(bias_type, r->bias + v * VL, l->count - v * VL, b->first + j0, b->count - j0, -INFINITY,
                                bias);
            const int64_t n = min64(VL, b->count - j0);
#define ROWS_OF(count, x)                                                                                              \
    adjust_rows(caps, slopes, bias_type >= 0, count, r, slope,                                                         \
                index + (float)(l->first + u->off - b->first - j0 - (x)), bias + (x),                                  \
                s + (j0 + (x)) * l->stride + v * VL, l->stride,                                                        \
                tanhs ? tanhs + (j0 + (x)) * l->stride + v * VL : NULL, &masked)
            if (n == VL)
#pragma GCC unroll 4
                for (int x = 0; x < VL; x += TANH_MOST)
                    ROWS_OF(TANH_MOST, x);
            else
                for (int64_t x = 0; x < n; x++)
                    ROWS_OF(1, x);
#undef ROWS_OF
        }
    }
    return bias_type >= 0 && any_lane(masked);
}

static bool adjust_scores(const call *c, const unit *u, const lanes *l, const key_block *b, float *s, float *tanhs) {
    const heddle_attention *a = c->a;
    const bool caps = a->softcap > 0, slopes = a->features & HEDDLE_ALIBI;
    adjustment r = {.scale = (float)((caps ? a->scale / a->softcap : a->scale) / (double)c->q_by),
                    .cap = (float)a->softcap};
    for (int64_t x = 0; slopes && x < l->stride; x++) {
        r.index[x] = (float)l->index[x];
        r.slope[x] = ((const float *)c->t->alibi_slopes)[u->n * a->alibi_stride_b + l->head[x]];
    }
    if (!(a->features & HEDDLE_BIAS)) {
        if (caps && slopes)
            return adjust_each(true, true, -1, &r, u, l, b, s, tanhs);
        return caps ? adjust_each(true, false, -1, &r, u, l, b, s, tanhs)
                    : adjust_each(false, true, -1, &r, u, l, b, s, tanhs);
    }
    lane_rows(c, u, l, c->t->bias, a->bias_stride, 0, r.bias);
    switch (2 * TYPE(c) + (caps || slopes)) {
    case 2 * HEDDLE_F32: return adjust_each(false, false, HEDDLE_F32, &r, u, l, b, s, tanhs);
    case 2 * HEDDLE_BF16: return adjust_each(false, false, HEDDLE_BF16, &r, u, l, b, s, tanhs);
    case 2 * HEDDLE_F16: return adjust_each(false, false, HEDDLE_F16, &r, u, l, b, s, tanhs);
    case 2 * HEDDLE_F32 + 1: return adjust_each(caps, slopes, HEDDLE_F32, &r, u, l, b, s, tanhs);
    case 2 * HEDDLE_BF16 + 1: return adjust_each(caps, slopes, HEDDLE_BF16, &r, u, l, b, s, tanhs);
    default: return adjust_each(caps, slopes, HEDDLE_F16, &r, u, l, b, s, tanhs);
    }
}

/* gemm() for the lanes of a tile; after each block of registers a little of `next` is asked for. */
INLINE void tile_product_rows(bool pairs, int block, int vectors, int64_t rows, int64_t count, int64_t chain, gemm_a a,
                              const float *b, float *c, int64_t stride, bool add, gemm_ahead *soon, ahead *next) {
#define BLOCK_OF(n)                                                                                                    \
    for (; rows >= (n); rows -= (n), a.p += (n)*a.row, c += (n)*stride) {                                              \
        gemm_chains(pairs, n, vectors, count, chain, a, b, stride, c, stride, add, soon);                              \
        ahead_step(next);                                                                                              \
    }
    BLOCK_OF(block)
    if (block > 4)
        BLOCK_OF(4)
    BLOCK_OF(2)
    BLOCK_OF(1)
#undef BLOCK_OF
}

INLINE void tile_product_of(bool pairs, int vectors, int64_t rows, int64_t count, int64_t chain, gemm_a a,
                            const float *b, float *c, int64_t stride, bool add, gemm_ahead *soon, ahead *next) {
    switch (vectors) {
    case 1: tile_product_rows(pairs, GEMM_ROWS_1, 1, rows, count, chain, a, b, c, stride, add, soon, next); break;
    case 2: tile_product_rows(pairs, GEMM_ROWS_2, 2, rows, count, chain, a, b, c, stride, add, soon, next); break;
    case 3: tile_product_rows(pairs, GEMM_ROWS_3, 3, rows, count, chain, a, b, c, stride, add, soon, next); break;
#if TILE_VECTORS > 3
    case 4: tile_product_rows(pairs, GEMM_ROWS_4, 4, rows, count, chain, a, b, c, stride, add, soon, next); break;
#endif
    default: break; /* a part that nobody sees */
    }
}

static __attribute__((noinline)) void tile_product(int vectors, int64_t rows, int64_t count, int64_t chain, gemm_a a,
                                                   const float *b, float *c, int64_t stride, bool add, gemm_ahead soon,
                                                   ahead *next) {
    tile_product_of(false, vectors, rows, count, chain, a, b, c, stride, add, &soon, next);
}

#ifdef HAVE_BF16_DOT
static __attribute__((noinline, unused)) void tile_product_pairs(int vectors, int64_t rows, int64_t count, gemm_a a,
                                                                 const float *b, float *c, int64_t stride, bool add,
                                                                 gemm_ahead soon, ahead *next) {
    tile_product_of(true, vectors, rows, count, count, a, b, c, stride, add, &soon, next);
}
#endif

/* How many times a tile asks while it meets `keys` keys: in `products` products that have a row for each key, and in one of
 * `width` rows for each block of keys. */
INLINE int64_t product_steps(const call *c, int64_t keys, int products, int64_t width) {
    const int64_t blocks = (keys + c->tile_k - 1) / c->tile_k;
#ifdef HAVE_BF16_TILES
    (void)width;
    return max64(1, 2 * blocks * (products + 1));
#else
    return max64(1, products * keys / GEMM_ROWS_3 + blocks * (width / GEMM_ROWS_3));
#endif
}

/* Rows of K or V from `first` on, behind a block's, which will be wanted next: where they follow each other without gaps, as much with
 * every sum index of a product as asks for a block's rows in all. Products by pairs have half as many sum indices. */
INLINE gemm_ahead rows_behind(const call *c, const unit *u, const void *p, heddle_strides stride, int64_t width,
                              int64_t first, bool pairs) {
    const char *rows = element_at(p, row_offset(stride, u->n, u->hk, u->s.first_k + first), TYPE(c));
    const int64_t step = GEMM_ROWS_3 * element_size(TYPE(c));
    return (gemm_ahead){rows, stride.s != width ? 0 : pairs ? 2 * step : step};
}

/* out[j][lane] = sum over x of rows[j][x]·columns[x][lane], in chains, in the parts that are seen. With AMX, of their tiles instead. */
static void multiply_parts(const lanes *l, const parts *r, const float *rows, int64_t row_stride, int64_t depth,
                           int64_t chain, const float *row_tiles, const float *columns, float *out, gemm_ahead soon,
                           ahead *next) {
#ifdef HAVE_BF16_TILES
    (void)rows, (void)row_stride, (void)chain, (void)soon;
    ahead_step(next);
    tile_scores(l, r, row_tiles, depth, columns, out);
    ahead_step(next);
#else
    (void)row_tiles;
    for (const part *p = r->p; p < r->p + r->count; p++)
        tile_product(p->end - p->begin, p->count, depth, chain, (gemm_a){rows + p->first * row_stride, row_stride, 1},
                     columns + p->begin * VL, out + p->first * l->stride + p->begin * VL, l->stride, false, soon, next);
#endif
}

/* The same for bfloat16 rows of K or V as they lie in memory, from the block's first on. */
static void multiply_pairs(const call *c, const unit *u, const lanes *l, const parts *r, const key_block *b,
                           const void *p, heddle_strides stride, int64_t depth, const float *columns, float *out,
                           ahead *next) {
#ifdef HAVE_BF16_DOT
    const int64_t row_stride = stride.s / 2;
    const float *rows = (const void *)element_at(p, row_offset(stride, u->n, u->hk, u->s.first_k + b->first), TYPE(c));
    for (const part *q = r->p; q < r->p + r->count; q++)
        tile_product_pairs(q->end - q->begin, q->count, depth / 2,
                           (gemm_a){rows + q->first * row_stride, row_stride, 1}, columns + q->begin * VL,
                           out + q->first * l->stride + q->begin * VL, l->stride, false,
                           rows_behind(c, u, p, stride, depth, b->first + b->count, true), next);
#else
    (void)c, (void)u, (void)l, (void)r, (void)b, (void)p, (void)stride, (void)depth, (void)columns, (void)out,
        (void)next;
#endif
}

/* Rows of K or V of the unit as they lie in memory, for few queries. */
INLINE few_rows few_keys(const call *c, const unit *u, const void *p, heddle_strides stride, int64_t n, int64_t first) {
    return (few_rows){element_at(p, row_offset(stride, u->n, u->hk, u->s.first_k + first), TYPE(c)),
                      stride.s * element_size(TYPE(c)), n};
}

/* s[lane][key], as few.h has it; meanwhile the block's rows of V are asked for. */
INLINE void few_scores(const call *c, const unit *u, const lanes *l, const key_block *b, const float *q, float *s) {
    few_dot(TYPE(c), few_keys(c, u, c->t->k, c->a->k_stride, c->a->d, b->first), b->count, l->count, q, c->d_pad,
            few_keys(c, u, c->t->v, c->a->v_stride, c->a->dv, b->first), s);
}

/* t[lane][key] as a tile [key][lane]. */
static void few_as_tile(const lanes *l, const float *t, int64_t count, float *s) {
    _Static_assert(FEW_KEYS == TILE_KEYS, "a block of few queries is no larger than a tile's, nor is a tile's");
    for (int64_t x = 0; x < l->stride; x += VL)
        for (int64_t j = 0; j < count; j += VL) {
            vf rows[VL];
            for (int64_t y = 0; y < VL; y++)
                rows[y] = x + y < l->count ? load_some(HEDDLE_F32, t + (x + y) * FEW_KEYS + j, count - j) : splat(0);
            transpose(rows);
            for (int64_t y = 0; y < min64(VL, count - j); y++)
                store(s + (j + y) * l->stride + x, rows[y]);
        }
}

/* Whether some of a block may be masked: then zeros of P and dS may stand against operands that are not finite. */
INLINE bool hides_some(const call *c, const parts *r) {
    return r->hides || r->partial || r->cut || r->divided || c->hidden;
}

/* HEDDLE_E4M3: of `count` scores. */
static void scale_scores(const call *c, int64_t count, float *s) {
    for (int64_t x = 0; x < count && c->k_scale != 1; x += VL)
        store(s + x, c->k_scale * load(s + x));
}

/* s[j][lane] = the score (times call.factor in units of log2), -inf where masked. True as hides_some() is. */
static bool scores(const call *c, const unit *u, const lanes *l, const key_block *b, const float *qt, parts *r,
                   float *s, float *tanhs, ahead *next) {
    map_mask(c, u, l, b, r);
    find_parts(u, l, b, r);
    if (l->few) {
        float t[FEW_LANES * FEW_KEYS];
        few_scores(c, u, l, b, qt, t);
        few_as_tile(l, t, b->count, s);
    } else if (c->k_pairs) {
        multiply_pairs(c, u, l, r, b, c->t->k, c->a->k_stride, c->a->d, qt, s, next);
    } else {
        multiply_parts(l, r, b->k, b->k_stride, c->a->d, c->chain, b->t.k, qt, s,
                       rows_behind(c, u, c->t->k, c->a->k_stride, c->a->d, b->first + b->count, false), next);
    }
    scale_scores(c, b->count * l->stride, s);
    r->hides = c->adjusts && adjust_scores(c, u, l, b, s, tanhs);
    if (r->partial)
        mask_band(u, l, b, s); /* the parts that were left out, too */
    if (r->cut)
        mask_bool(l, b, r, s);
    r->divided = is_divided(c, u, l, b);
    if (r->divided && u->k_ids)
        mask_segments(u, l, b, s);
    if (r->divided && block_kind(c, u, l, b) != TILE_FULL)
        mask_blocks(c, u, l, b, s);
    if (c->hidden)
        mask_pages(c, u, l, b, s);
    return hides_some(c, r);
}

#ifdef HAVE_BF16_DOT
/* add_parts() with pairs of keys for rows. */
static void add_pairs(const lanes *l, const parts *r, int64_t width, const float *columns, float *scratch,
                      int64_t count, const float *weights, float *out, gemm_ahead soon, ahead *next) {
    const int64_t pad = (width + VL - 1) / VL * VL;
    pair_weights(weights, count, l->stride, scratch);
    for (const part *p = r->p; p < r->p + r->count; p++) {
        const gemm_a a = {columns + p->first / 2 * pad, 1, pad};
        tile_product_pairs(p->end - p->begin, width, (p->count + 1) / 2, a,
                           scratch + p->first / 2 * l->stride + p->begin * VL, out + p->begin * VL, l->stride, true,
                           soon, next);
    }
}
#endif

/* out[e][lane] += sum over the block's keys j of rows[j][e]·weights[j][lane], in the parts that are seen; a weight of zero
 * counts for nothing even against NaN when `careful`. */
static void add_parts(const lanes *l, const parts *r, bool careful, const float *rows, int64_t row_stride,
                      int64_t width, const key_tiles *t, const float *columns, float *scratch, int64_t count,
                      const float *weights, float *out, gemm_ahead soon, ahead *next) {
#ifdef HAVE_BF16_TILES
    (void)soon;
    if (!careful && uses_tiles(l)) {
        ahead_step(next);
        tile_weight_pairs(weights, count, l->vectors, scratch);
        tile_add_columns(l, r, columns, t->down, width, scratch, out);
        ahead_step(next);
        return;
    }
#elif defined(HAVE_BF16_DOT)
    if (!careful && columns) {
        add_pairs(l, r, width, columns, scratch, count, weights, out, soon, next);
        return;
    }
    (void)t;
#else
    (void)t, (void)columns, (void)scratch, (void)count;
#endif
    for (const part *p = r->p; p < r->p + r->count; p++) {
        const gemm_a a = {rows + p->first * row_stride, 1, row_stride};
        const float *w = weights + p->first * l->stride + p->begin * VL;
        if (careful)
            gemm_careful(false, p->end - p->begin, width, p->count, chain_of(false, p->count), a, w, l->stride,
                         out + p->begin * VL, l->stride);
        else
            tile_product(p->end - p->begin, width, p->count, chain_of(false, p->count), a, w, out + p->begin * VL,
                         l->stride, true, soon, next);
    }
}

/* What dropout multiplies a weight with, 0 or dropout_scale(p): to[j][lane], or what is there times it. */
INLINE void dropout_each(const call *c, const unit *u, const lanes *l, const key_block *b, bool multiplies, float *to) {
    const vi least = splat_int((int32_t)c->drop_below - 1), keep = (vi)splat(c->keep_factor);
    const heddle_attention *a = c->a;
    const int64_t first = a->k_offset + b->first, end = first + b->count;
    for (int v = 0; v < l->vectors; v++) {
        vu index = (vu)lane_index(l, v) + (uint32_t)(a->q_offset + l->first), bh;
        for (int x = 0; x < VL; x++)
            bh[x] = (uint32_t)(u->n * a->whole_h + a->h_offset) + l->head[v * VL + x];
        for (int64_t j = first / DROPOUT_KEYS * DROPOUT_KEYS; j < end; j += DROPOUT_KEYS) {
            vu words[4];
            vdropout_words(c->seed, c->offset, bh, index, (uint32_t)(j / DROPOUT_KEYS), words);
#pragma GCC unroll 8
            for (int x = 0; x < DROPOUT_KEYS; x++) {
                const vi number = (vi)(x % 2 ? words[x / 2] >> 16 : words[x / 2] & 0xffff);
                const vf factor = (vf)((vi)(number > least) & keep);
                float *at = to + (j + x - first) * l->stride + v * VL;
                if (j + x >= first && j + x < end)
                    store(at, multiplies ? load(at) * factor : factor);
            }
        }
    }
}

static void dropout_factors(const call *c, const unit *u, const lanes *l, const key_block *b, float *z) {
    dropout_each(c, u, l, b, false, z);
}

static void drop_weights(const call *c, const unit *u, const lanes *l, const key_block *b, float *s) {
    dropout_each(c, u, l, b, true, s);
}

#endif

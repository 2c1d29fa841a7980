/* SPDX-License-Identifier: Apache-2.0
 * The products of a tile, and the scores that they make: adjusted, masked, dropped. */
#ifndef HEDDLE_CPU_ATTENTION_SCORES_H
#define HEDDLE_CPU_ATTENTION_SCORES_H

#include "tile.h"

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
            const vi hidden = bias[i] < splat((float)LEAST_BIAS);
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
    adjustment r = {.scale = (float)(caps ? a->scale / a->softcap : a->scale), .cap = (float)a->softcap};
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

INLINE vi lane_index(const lanes *l, int v) {
    typedef vi vi_unaligned __attribute__((aligned(4), may_alias));
    return *(const vi_unaligned *)(l->index + v * VL);
}

INLINE tile_kind part_kind(const unit *u, const lanes *l, const key_block *b, int v, int64_t first, int64_t count) {
    return tile_of(u->m, l->first + l->index[v * VL], l->first + l->index[v * VL + VL - 1] + 1, b->first + first,
                   b->first + first + count);
}

/* Whether nobody in vector v sees any of VL keys of a block, or of all where nothing is hidden. */
INLINE bool part_hidden(const unit *u, const lanes *l, const key_block *b, const parts *r, const part *p, int v) {
    return (r->cut && r->kind[p->first / VL][v] == TILE_EMPTY) ||
           (r->partial && part_kind(u, l, b, v, p->first, p->count) == TILE_EMPTY);
}

/* Divides a block so that products need not be formed where the band or a mask hides all: VL keys at a time. */
static void find_parts(const unit *u, const lanes *l, const key_block *b, parts *r) {
    r->partial = tile_of(u->m, l->first, l->last + 1, b->first, b->first + b->count) != TILE_FULL;
    r->count = 0;
    const int64_t step = r->partial || r->cut ? VL : b->count;
    for (int64_t j = 0; j < b->count; j += step) {
        part p = {j, min64(step, b->count - j), 0, l->vectors};
        while (p.begin < p.end && part_hidden(u, l, b, r, &p, p.begin))
            p.begin++;
        while (p.begin < p.end && part_hidden(u, l, b, r, &p, p.end - 1))
            p.end--;
        part *last = r->count ? &r->p[r->count - 1] : NULL;
        if (last && last->begin == p.begin && last->end == p.end)
            last->count += p.count;
        else
            r->p[r->count++] = p;
    }
}

/* -inf where the band hides key j from a lane's query: it sees j when first + index >= j - hi and <= j - lo. */
static void mask_band(const unit *u, const lanes *l, const key_block *b, float *s) {
    for (int64_t j0 = 0; j0 < b->count; j0 += VL)
        for (int v = 0; v < l->vectors; v++) {
            const int64_t count = min64(VL, b->count - j0);
            if (part_kind(u, l, b, v, j0, count) == TILE_FULL)
                continue;
            const int64_t key =
                b->first + j0 - l->first; /* what is clamped is far from any lane's, and its neighbours, too */
            vi low = splat_int((int32_t)clamp64(key - u->m.hi, INT32_MIN / 2, INT32_MAX / 2));
            vi high = splat_int((int32_t)clamp64(key - u->m.lo, INT32_MIN / 2, INT32_MAX / 2));
            float *p = s + j0 * l->stride + v * VL;
            for (int64_t j = 0; j < count; j++, low += 1, high += 1, p += l->stride) {
                const vi hidden = (lane_index(l, v) < low) | (lane_index(l, v) > high);
                store(p, select_float(hidden, splat(-INFINITY), load(p)));
            }
        }
}

#define MASK_BYTES 32
typedef uint8_t mask_vector __attribute__((vector_size(MASK_BYTES)));

/* The bytes of 32 keys of a row, 0 behind the last. */
INLINE mask_vector load_mask(const uint8_t *p, int64_t keys) {
    mask_vector bytes = {0};
    if (keys >= MASK_BYTES)
        memcpy(&bytes, p, sizeof bytes);
    else
        memcpy(&bytes, p, (size_t)keys);
    return bytes;
}

INLINE bool any_word(const uint32_t *words, int count) {
    uint32_t any = 0;
    for (int x = 0; x < count; x++)
        any |= words[x];
    return any != 0;
}

static void mask_rows(const call *c, const unit *u, const lanes *l, const void *rows[LANES]) {
    for (int64_t x = 0; x < l->count; x++)
        rows[x] = c->t->bool_mask + row_offset(c->a->bool_mask_stride, u->n, l->head[x], l->first + l->index[x]);
}

/* What a boolean mask shows of up to 32 keys to the lanes of a vector: a byte of `seen`, or of `hidden`, is not 0 where one of them sees
 * the key, or does not see it. */
INLINE void gather_mask(const void *const *rows, int64_t count, int64_t first, int64_t keys, mask_vector *seen,
                        mask_vector *hidden) {
    mask_vector any = {0}, all = {0};
    all = ~all;
    for (int64_t x = 0; x < count; x++) {
        const uint8_t *p = (const uint8_t *)rows[x] + first;
        const mask_vector bytes = load_mask(p, keys);
        __builtin_prefetch(p + TILE_KEYS, 0, 2); /* what the next block wants */
        any |= bytes;
        all &= (mask_vector)(bytes != 0);
    }
    *seen = any;
    *hidden = ~all;
}

/* Which keys of a block a boolean mask hides from all lanes of a vector, from none, or from some: VL keys at a time. */
static void map_mask(const call *c, const unit *u, const lanes *l, const key_block *b, parts *r) {
    r->cut = false;
    if (!(c->a->features & HEDDLE_BOOL_MASK))
        return;
    const void *rows[LANES];
    mask_rows(c, u, l, rows);
    for (int v = 0; v < l->vectors; v++)
        for (int64_t j = 0; j < b->count; j += MASK_BYTES) {
            const int64_t keys = min64(MASK_BYTES, b->count - j), count = min64(VL, l->count - v * VL);
            uint32_t seen[MASK_BYTES / 4], hidden[MASK_BYTES / 4];
            mask_vector of_seen, of_hidden;
            if (keys == MASK_BYTES && count == VL) /* constants, which the compiler unrolls */
                gather_mask(rows + v * VL, VL, b->first + j, MASK_BYTES, &of_seen, &of_hidden);
            else
                gather_mask(rows + v * VL, count, b->first + j, keys, &of_seen, &of_hidden);
            memcpy(seen, &of_seen, sizeof seen);
            memcpy(hidden, &of_hidden, sizeof hidden);
            memset((char *)hidden + keys, 0, sizeof hidden - (size_t)keys);
            for (int64_t x = 0; x < keys; x += VL) {
                const bool sees = any_word(seen + x / 4, VL / 4), hides = any_word(hidden + x / 4, VL / 4);
                r->kind[(j + x) / VL][v] = (uint8_t)(!sees ? TILE_EMPTY : hides ? TILE_PARTIAL : TILE_FULL);
                r->cut |= hides;
            }
        }
}

/* The same block up to the last key that the mask shows to one of these lanes, as cut_block() leaves it. */
static key_block mask_cut(const call *c, const unit *u, const lanes *l, const key_block *b) {
    key_block r = *b;
    if (!(c->a->features & HEDDLE_BOOL_MASK))
        return r;
    const void *rows[LANES];
    mask_rows(c, u, l, rows);
    int64_t end = (b->count + MASK_BYTES - 1) / MASK_BYTES * MASK_BYTES;
    for (; end > 0; end -= MASK_BYTES) {
        const int64_t first = end - MASK_BYTES, keys = b->count - first;
        uint32_t words[MASK_BYTES / 4];
        mask_vector seen = {0};
        for (int64_t x = 0; x < l->count; x++)
            seen |= load_mask((const uint8_t *)rows[x] + b->first + first, keys);
        memcpy(words, &seen, sizeof words);
        if (any_word(words, MASK_BYTES / 4))
            break;
    }
    r.count = min64(b->count, end);
    return r;
}

/* The same of segments. */
static tile_kind segment_kind(const unit *u, const lanes *l, const key_block *b) {
    return u->k_ids ? kind_of_ids(l->ids, u->k_ids + b->first, b->count) : TILE_FULL;
}

/* And of lists of blocks. */
static tile_kind block_kind(const call *c, const unit *u, const lanes *l, const key_block *b) {
    const heddle_attention *a = c->a;
    if (!(a->features & HEDDLE_BLOCKS))
        return TILE_FULL;
    const int64_t from = b->first / a->block_k, all = (b->first + b->count - 1) / a->block_k + 1 - from;
    tile_kind kind = TILE_EMPTY;
    for (int64_t at = 0; at < all && kind != TILE_PARTIAL; at += 32) {
        const int64_t n = min64(32, all - at);
        uint32_t some = 0, each = UINT32_MAX;
        for (int64_t head = l->head0; head < l->head0 + l->heads; head++)
            for (int64_t r = l->first / a->block_q; r <= l->last / a->block_q; r++) {
                const uint32_t bits = listed_bits(c, u, head, r, from + at, n);
                some |= bits;
                each &= bits;
            }
        const tile_kind now = !some ? TILE_EMPTY : each == UINT32_MAX >> (32 - n) ? TILE_FULL : TILE_PARTIAL;
        kind = at == 0 || now == kind ? now : TILE_PARTIAL;
    }
    return kind;
}

/* Whether segments or lists of blocks hide some of a block. */
static bool is_divided(const call *c, const unit *u, const lanes *l, const key_block *b) {
    return c->divides && (segment_kind(u, l, b) != TILE_FULL || block_kind(c, u, l, b) != TILE_FULL);
}

/* Whether segments and lists of blocks let some of these lanes see some of so many keys from `first` on. */
static bool sees_some(const call *c, const unit *u, const lanes *l, int64_t first, int64_t count) {
    const key_block b = {.first = first, .count = count};
    return !c->divides || (segment_kind(u, l, &b) != TILE_EMPTY && block_kind(c, u, l, &b) != TILE_EMPTY);
}

/* -inf where a boolean mask hides one of so many keys from these lanes, four keys of a lane in 32 bits. */
INLINE void mask_keys(const void *const *rows, int64_t count, int64_t first, int64_t keys, float *s, int64_t stride) {
    for (int64_t j = 0; j < keys; j += 4) {
        vi four = splat_int(0); /* lanes of nobody see nothing */
        const size_t n = (size_t)min64(4, keys - j);
#pragma GCC unroll 16
        for (int x = 0; x < VL; x++) {
            int32_t bytes = 0;
            if (x < count)
                memcpy(&bytes, (const uint8_t *)rows[x] + first + j, n);
            four[x] = bytes;
        }
#pragma GCC unroll 4
        for (size_t y = 0; y < 4; y++) {
            uint8_t pick[4] = {0};
            int32_t bits;
            pick[y] = 255;
            memcpy(&bits, pick, sizeof bits);
            float *p = s + (j + (int64_t)y) * stride;
            if (y < n)
                store(p, select_float((four & bits) == 0, splat(-INFINITY), load(p)));
        }
    }
}

/* -inf where a boolean mask hides a key, by its map. */
static void mask_bool(const call *c, const unit *u, const lanes *l, const key_block *b, const parts *r, float *s) {
    const void *rows[LANES];
    mask_rows(c, u, l, rows);
    for (int64_t j0 = 0; j0 < b->count; j0 += VL)
        for (int v = 0; v < l->vectors; v++) {
            const uint8_t kind = r->kind[j0 / VL][v];
            const int64_t keys = min64(VL, b->count - j0), count = l->count - v * VL;
            float *p = s + j0 * l->stride + v * VL;
            for (int64_t j = 0; j < keys && kind == TILE_EMPTY; j++)
                store(p + j * l->stride, splat(-INFINITY));
            if (kind == TILE_PARTIAL && keys == VL && count >= VL) /* constants, which the compiler unrolls */
                mask_keys(rows + v * VL, VL, b->first + j0, VL, p, l->stride);
            else if (kind == TILE_PARTIAL)
                mask_keys(rows + v * VL, min64(VL, count), b->first + j0, keys, p, l->stride);
        }
}

/* -inf where a key is of another segment. */
static void mask_segments(const unit *u, const lanes *l, const key_block *b, float *s) {
    const int32_t *keys = u->k_ids + b->first;
    for (int v = 0; v < l->vectors; v++) {
        vi own;
        for (int x = 0; x < VL; x++)
            own[x] = u->q_ids[l->first + l->index[v * VL + x]];
        for (int64_t j = 0; j < b->count; j++) {
            float *p = s + j * l->stride + v * VL;
            store(p, select_float(own == keys[j], load(p), splat(-INFINITY)));
        }
    }
}

/* -inf where no list of a lane's query names the key's block. */
static void mask_blocks(const call *c, const unit *u, const lanes *l, const key_block *b, float *s) {
    const heddle_attention *a = c->a;
    const int64_t from = b->first / a->block_k, n = (b->first + b->count - 1) / a->block_k + 1 - from;
    for (int v = 0; v < l->vectors; v++) {
        vi bits = splat_int(0);
        for (int x = 0; x < VL; x++) {
            const int64_t lane = v * VL + x, r = (l->first + l->index[lane]) / a->block_q;
            const bool again = x && l->heads == 1 && r == (l->first + l->index[lane - 1]) / a->block_q;
            bits[x] = again ? bits[x - 1] : (int32_t)listed_bits(c, u, l->head[lane], r, from, n);
        }
        for (int64_t j = 0; j < b->count; j++) {
            float *p = s + j * l->stride + v * VL;
            const int32_t bit = (int32_t)(UINT32_C(1) << ((b->first + j) / a->block_k - from));
            store(p, select_float((bits & bit) == 0, splat(-INFINITY), load(p)));
        }
    }
}

/* -inf of keys that are in no page. */
static void mask_pages(const call *c, const unit *u, const lanes *l, const key_block *b, float *s) {
    for (int64_t j = 0; j < b->count; j++)
        if (page_of(c->a, c->t->block_table, u->n, b->first + j) < 0)
            for (int v = 0; v < l->vectors; v++)
                store(s + j * l->stride + v * VL, splat(-INFINITY));
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
    r->hides = c->adjusts && adjust_scores(c, u, l, b, s, tanhs);
    if (r->partial)
        mask_band(u, l, b, s); /* the parts that were left out, too */
    if (r->cut)
        mask_bool(c, u, l, b, r, s);
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
            gemm_careful(false, p->end - p->begin, width, p->count, a, w, l->stride, out + p->begin * VL, l->stride);
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

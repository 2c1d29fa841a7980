/* SPDX-License-Identifier: Apache-2.0
 * What a block of keys shows to the lanes of a tile: by the band, a boolean mask, segments, lists of blocks and pages.
 * Which parts of it are worth a product, and -inf in place of the scores that are not seen. */
#ifndef HEDDLE_CPU_ATTENTION_MASKS_H
#define HEDDLE_CPU_ATTENTION_MASKS_H

#include "tile.h"

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

#endif

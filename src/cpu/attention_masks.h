/* SPDX-License-Identifier: Apache-2.0
 * What a block of keys shows to the lanes of a tile: by the band, a boolean mask, segments, lists of blocks and pages.
 * Which parts of it are worth a product, and -inf in place of the scores that are not seen. */
#ifndef HEDDLE_CPU_ATTENTION_MASKS_H
#define HEDDLE_CPU_ATTENTION_MASKS_H

#include "tile.h"

INLINE vi lane_index(const lanes *l, int v) {
    return load_int(l->index + v * VL);
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

/* Bit j is set where byte j of `keys` <= 32 is not 0. */
INLINE uint32_t mask_bits(const uint8_t *p, int64_t keys) {
    uint8_t copy[32] = {0};
    if (keys >= 32)
        return byte_bits(p);
    memcpy(copy, p, (size_t)keys);
    return byte_bits(copy);
}

static void mask_rows(const call *c, const unit *u, const lanes *l, const void *rows[LANES]) {
    for (int64_t x = 0; x < l->count; x++)
        rows[x] = c->t->bool_mask + row_offset(c->a->bool_mask_stride, u->n, l->head[x], l->first + l->index[x]);
}

/* What a boolean mask shows of up to 32 keys to `count` lanes of a vector, a bit for each key: to every lane in `bits`, to one of them in
 * `seen`; and in `hidden`, from one of them. */
INLINE void gather_mask(const void *const *rows, int64_t count, int64_t first, int64_t keys, uint32_t *bits,
                        uint32_t *seen, uint32_t *hidden) {
    uint32_t any = 0, all = UINT32_MAX;
#pragma GCC unroll 16
    for (int64_t x = 0; x < count; x++) {
        const uint8_t *p = (const uint8_t *)rows[x] + first;
        const uint32_t own = mask_bits(p, keys);
        __builtin_prefetch(p + TILE_KEYS, 0, 2); /* what the next block wants */
        bits[x] = own;
        any |= own;
        all &= own;
    }
    *seen = any;
    *hidden = ~all & UINT32_MAX >> (32 - keys);
}

/* Which keys of a block a boolean mask hides from all lanes of a vector, from none, or from some: VL keys at a time. */
static void map_mask(const call *c, const unit *u, const lanes *l, const key_block *b, parts *r) {
    r->cut = false;
    if (!(c->a->features & HEDDLE_BOOL_MASK))
        return;
    const void *rows[LANES];
    mask_rows(c, u, l, rows);
    memset(r->bits, 0, sizeof r->bits); /* lanes of nobody see nothing */
    for (int v = 0; v < l->vectors; v++)
        for (int64_t j = 0; j < b->count; j += 32) {
            const int64_t keys = min64(32, b->count - j), count = min64(VL, l->count - v * VL);
            uint32_t *bits = r->bits[j / 32] + v * VL, seen, hidden;
            if (keys == 32 && count == VL) /* constants, which the compiler unrolls */
                gather_mask(rows + v * VL, VL, b->first + j, 32, bits, &seen, &hidden);
            else
                gather_mask(rows + v * VL, count, b->first + j, keys, bits, &seen, &hidden);
            for (int64_t x = 0; x < keys; x += VL) {
                const uint32_t these = ((UINT32_C(1) << VL) - 1) << x;
                r->kind[(j + x) / VL][v] = (uint8_t)(!(seen & these)  ? TILE_EMPTY
                                                     : hidden & these ? TILE_PARTIAL
                                                                      : TILE_FULL);
            }
            r->cut |= hidden != 0;
        }
}

/* The same block up to the last key that the mask shows to one of these lanes, as cut_block() leaves it. */
static key_block mask_cut(const call *c, const unit *u, const lanes *l, const key_block *b) {
    key_block r = *b;
    if (!(c->a->features & HEDDLE_BOOL_MASK))
        return r;
    const void *rows[LANES];
    mask_rows(c, u, l, rows);
    int64_t end = (b->count + 31) / 32 * 32;
    for (; end > 0; end -= 32) {
        const int64_t first = end - 32, keys = min64(32, b->count - first);
        uint32_t seen = 0;
        for (int64_t x = 0; x < l->count; x++)
            seen |= mask_bits((const uint8_t *)rows[x] + b->first + first, keys);
        if (seen)
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

/* -inf where a boolean mask hides a key, by its map. */
static void mask_bool(const lanes *l, const key_block *b, const parts *r, float *s) {
    for (int64_t j0 = 0; j0 < b->count; j0 += VL)
        for (int v = 0; v < l->vectors; v++) {
            const uint8_t kind = r->kind[j0 / VL][v];
            const vi bits = load_int((const int32_t *)r->bits[j0 / 32] + v * VL);
            float *p = s + j0 * l->stride + v * VL;
            for (int64_t j = 0; j < min64(VL, b->count - j0) && kind != TILE_FULL; j++, p += l->stride) {
                const vi hidden = (bits & (int32_t)(UINT32_C(1) << (j0 + j) % 32)) == 0;
                store(p, select_float(hidden, splat(-INFINITY), load(p))); /* of what was left out, too */
            }
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

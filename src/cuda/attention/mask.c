/* SPDX-License-Identifier: Apache-2.0
 * The map of a boolean mask, which mask.cu makes and families read: its shape, its place in the workspace, its launch. Pure. */
#include "cuda/attention/family.h"

int64_t heddle__cuda_count_maps(const heddle_attention *a) {
    return (a->bool_mask_stride.b ? a->b : 1) * (a->bool_mask_stride.h ? a->h : 1);
}

/* By its bytes a tile takes about four times as long as without a mask (limits.md), some microseconds; the pass takes a launch, and reads each
 * byte once. So it pays where each multiprocessor has a tile. Who stands in for another family has no room; and keys in pages are fetched
 * further ahead than the map is read. */
bool heddle__cuda_map_pays(const attention_problem *p) {
    const heddle_attention *a = p->a;
    if (!(a->features & HEDDLE_BOOL_MASK) || (a->features & HEDDLE_PAGES) || p->stands_in)
        return false;
    const int64_t tiles = ceil_div(a->sq, MASK_TILE) * ceil_div(a->sk, MASK_TILE) * a->h * a->b;
    return tiles >= p->device->multiprocessors && tiles <= INT32_MAX / 2; /* a grid holds both maps */
}

mask_map heddle__cuda_shape_map(const heddle_attention *a, int rows, int columns, bool keys) {
    const bool alike = a->bool_mask_stride.s == 0; /* all queries */
    const int64_t words_k = ceil_div(a->sk, 128) * 4, words_q = alike ? 4 : ceil_div(a->sq, 128) * 4;
    mask_map m = {.rows = rows, .columns = columns};
    m.tiles_down = (int32_t)(keys ? ceil_div(a->sk, rows) : alike ? 1 : ceil_div(a->sq, rows));
    m.tiles_across = (int32_t)(!keys ? ceil_div(a->sk, columns) : alike ? 1 : ceil_div(a->sq, columns));
    m.lines = (int32_t)(keys ? a->sk : alike ? 1 : a->sq);
    m.words = (int32_t)(keys ? words_q : words_k);
    m.line_step = !keys && alike ? 0 : m.words;
    m.word_step = !(keys && alike);
    m.of_h = a->bool_mask_stride.h ? 1 : 0;
    m.of_b = a->bool_mask_stride.b ? (int32_t)(m.of_h ? a->h : 1) : 0;
    return m;
}

void heddle__cuda_place_map(const attention_problem *p, int rows, int columns, bool keys, attention_choice *c) {
    const heddle_attention *a = p->a;
    if (!(a->features & HEDDLE_BOOL_MASK))
        return;
    const mask_map m = heddle__cuda_shape_map(a, rows, columns, keys);
    const size_t kinds = c->bytes ? align64(c->bytes) : 64; /* an offset of 0 is none */
    const size_t bits = kinds + align64((size_t)(heddle__cuda_count_maps(a) * m.tiles_down * m.tiles_across));
    c->bytes = bits + align64((size_t)(heddle__cuda_count_maps(a) * m.lines * m.words) * sizeof(uint32_t));
    *(keys ? &c->seen_of_keys : &c->seen_by_queries) = m;
    *(keys ? &c->kinds_k : &c->kinds_q) = kinds;
    *(keys ? &c->bits_k : &c->bits_q) = bits;
}

/* A block for each tile. What is made of ids and lists is there already. */
void heddle__cuda_add_mask(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const int64_t tiles = (int64_t)c->seen_by_queries.tiles_down * c->seen_by_queries.tiles_across +
                          (int64_t)c->seen_of_keys.tiles_down * c->seen_of_keys.tiles_across;
    if (tiles && !p->made)
        heddle__cuda_add_plain(p, job, PASS_mask, tiles * heddle__cuda_count_maps(p->a));
}

/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_SEGMENTS and HEDDLE_BLOCKS for the families, who know of boolean masks alone: the kernel `seen` makes of ids and lists what they
 * read of one, its map or its bytes. And so of a table, where keys have been collected from pages (collect.c). Pure. */
#include "cuda/attention/seen.h"
#include "cuda/attention/family.h"
#include "mask.h"
#include "status.h"

/* Elements from row to row of the mask's bytes. */
static int64_t row_of(const heddle_attention *a) {
    return max64(16, ceil_div(a->sk, 16) * 16);
}

const heddle_attention *heddle__cuda_with_mask(const heddle_attention *a, collected_as collected,
                                               heddle_attention *masked) {
    const uint64_t made = HEDDLE_SEGMENTS | HEDDLE_BLOCKS;
    const bool holes = collected == COLLECTED_ROWS; /* keys that are in no page */
    if (!(a->features & made) && !holes)
        return a;
    const heddle_strides mask = a->features & HEDDLE_BOOL_MASK ? a->bool_mask_stride : (heddle_strides){0, 0, 0};
    const bool lists = a->features & HEDDLE_BLOCKS;
    const bool of_b = holes || (a->features & HEDDLE_SEGMENTS) || (lists && a->blocks_of_b) || mask.b;
    const bool of_h = (lists && a->blocks_of_h) || mask.h, of_s = (a->features & made) || mask.s;
    const int64_t row = row_of(a), each = of_s ? max64(1, a->sq) * row : row;
    *masked = *a;
    masked->features = (a->features & ~made) | HEDDLE_BOOL_MASK;
    masked->bool_mask_stride.s = of_s ? row : 0;
    masked->bool_mask_stride.h = of_h && a->h > 1 ? each : 0;
    masked->bool_mask_stride.b = of_b && a->b > 1 ? (masked->bool_mask_stride.h ? a->h : 1) * each : 0;
    return masked;
}

/* Of a boolean mask, as far as it is not repeated. */
static bool has_countable_mask(const heddle_attention *a) {
    const heddle_strides s = a->bool_mask_stride;
    const int64_t tiles = (s.s ? max64(1, ceil_div(a->sq, 64)) : 1) * max64(1, ceil_div(a->sk, 64));
    return tiles <= INT32_MAX / 4 / (s.b ? max64(1, a->b) : 1) / (s.h ? max64(1, a->h) : 1);
}

heddle_status heddle__cuda_check_tiles(const heddle_attention *a) {
    if ((a->features & HEDDLE_BOOL_MASK) && !has_countable_mask(a))
        return fail(HEDDLE_UNSUPPORTED, "b·h·sq·sk = %lld·%lld·%lld·%lld: over 2^29 tiles of bool_mask",
                    (long long)a->b, (long long)a->h, (long long)a->sq, (long long)a->sk);
    if (!(a->features & (HEDDLE_SEGMENTS | HEDDLE_BLOCKS)))
        return HEDDLE_OK;
    const int64_t tiles = max64(1, ceil_div(a->sq, 64)) * max64(1, ceil_div(a->sk, 64));
    if (tiles > INT32_MAX / 4 / max64(1, a->b) / max64(1, a->h))
        return fail(HEDDLE_UNSUPPORTED, "b·h·sq·sk = %lld·%lld·%lld·%lld: over 2^29 tiles of what %s show",
                    (long long)a->b, (long long)a->h, (long long)a->sq, (long long)a->sk,
                    a->features & HEDDLE_SEGMENTS ? "segments" : "lists of blocks");
    return HEDDLE_OK;
}

/* Does one of the pass's kernels read bytes? Those of P and of a bias's gradient do, whose results have as many elements; and where they
 * have no map those of families that can do without. */
static bool reads_bytes(const attention_problem *p, const attention_choice *c, bool bytes) {
    if (bytes && !c->kinds_q && !c->kinds_k)
        return true;
    return p->pass == HEDDLE_FORWARD ? (p->a->features & HEDDLE_WEIGHTS) != 0 : c->dbias >= 0;
}

void heddle__cuda_place_seen(const attention_problem *p, bool bytes, attention_choice *c) {
    if (!p->made)
        return;
    const mask_map shape = heddle__cuda_shape_map(p->a, SEEN_QUERIES, SEEN_KEYS, false);
    if (reads_bytes(p, c, bytes)) {
        c->seen = c->bytes ? align64(c->bytes) : 64; /* an offset of 0 is none */
        c->bytes = c->seen + align64((size_t)(heddle__cuda_count_maps(p->a) * shape.lines * row_of(p->a)));
    } else if (!c->kinds_q && !c->kinds_k) {
        heddle__cuda_place_map(p, SEEN_QUERIES, SEEN_KEYS, false, c);
    }
}

void heddle__cuda_fill_seen(const attention_problem *p, const attention_choice *c, const heddle_attention_data *data,
                            char *workspace, attention_params *to) {
    if (!p->made)
        return;
    const uint64_t features = p->made->features;
    to->t.bool_mask = NULL;
    to->from = (seen_sources){.maps = (int32_t)heddle__cuda_count_maps(p->a)};
    if (features & HEDDLE_SEGMENTS) {
        to->from.q_segments = data->q_segments;
        to->from.k_segments = data->k_segments;
    }
    if (features & HEDDLE_BLOCKS) {
        to->from.block_rows = data->block_rows;
        to->from.block_columns = data->block_columns;
    }
    if (features & HEDDLE_BOOL_MASK) {
        to->from.bool_mask = data->bool_mask;
        to->from.bool_mask_stride = p->made->bool_mask_stride;
    }
    if (c->seen && workspace) {
        to->t.bool_mask = to->from.bytes = (uint8_t *)workspace + c->seen;
        to->from.shape = heddle__cuda_shape_map(p->a, SEEN_QUERIES, SEEN_KEYS, false);
        to->from.shape.line_step = (int32_t)row_of(p->a);
    }
}

void heddle__cuda_add_seen(const attention_problem *p, attention_job *job) {
    const attention_params *of = &job->params.p;
    const mask_map *const shapes[] = {&of->seen_by_queries, &of->seen_of_keys, &of->from.shape};
    const bool there[] = {of->seen_by_queries.kinds, of->seen_of_keys.kinds, of->from.bytes};
    int64_t tiles = 0;
    if (!p->made)
        return;
    for (int x = 0; x < 3; x++)
        tiles += there[x] ? (int64_t)shapes[x]->tiles_down * shapes[x]->tiles_across : 0;
    heddle__cuda_add_plain(p, job, PASS_seen, ceil_div(tiles * of->from.maps, SEEN_WARPS));
}

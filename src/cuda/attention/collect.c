/* SPDX-License-Identifier: Apache-2.0
 * Keys in pages with options that no kernel for pages has, and keys of 8 bits, where Hopper's kernels are worth a pass in front: the kernel
 * `collect` writes them to the workspace as those kernels read them, and the families know of that alone. Pure. */
#include "cuda/attention/collect.h"
#include "cuda/attention/family.h"
#include "dtype.h"
#include "mask.h"

/* Rows of a page where the caller's keys are in none. */
#define OWN_PAGE 64

static int64_t page_of_collected(const heddle_attention *a, collected_as as) {
    return as != COLLECTED_PAGES ? 1 : a->features & HEDDLE_PAGES ? a->page : OWN_PAGE;
}

/* That a sequence has room for. */
static int64_t rows_of(const heddle_attention *a, collected_as as) {
    const int64_t page = page_of_collected(a, as);
    return ceil_div(a->sk, page) * page;
}

/* Of K, or of V, of a width. */
static size_t bytes_of(const heddle_attention *a, collected_as as, int64_t width) {
    return (size_t)(a->hk * a->b * rows_of(a, as) * collect_units(width)) * 16;
}

/* Do K and V fit, and the map of what is in no page? */
static bool is_small(const heddle_attention *a, collected_as as) {
    const int64_t row = (int64_t)(collect_units(a->d) + collect_units(a->dv)) * 16, heads = a->b * a->hk;
    const int64_t tiles = ceil_div(a->sq, MASK_TILE) * ceil_div(a->sk, MASK_TILE);
    return heads <= MOST_COLLECTED / (row * rows_of(a, as)) && tiles <= INT32_MAX / 4 / (a->b * a->h);
}

collected_as heddle__cuda_how_collected(const heddle_attention *a, heddle_pass pass, const cuda_facts *device) {
    const bool bytes = a->features & HEDDLE_E4M3, in_pages = a->features & HEDDLE_PAGES;
    const collected_as as = bytes ? COLLECTED_PAGES : COLLECTED_ROWS;
    if (pass != HEDDLE_FORWARD || !device->sm90 || a->dtype == HEDDLE_F32 || !(bytes || in_pages) ||
        heddle__cuda_is_empty(a) || a->h / a->hk * a->sq < COLLECTED_QUERIES)
        return NOT_COLLECTED;
    if (bytes && (a->features & HEDDLE_WEIGHTS)) /* whose kernel knows of the scales as long as there are bytes */
        return NOT_COLLECTED;
    return is_small(a, as) ? as : NOT_COLLECTED;
}

const heddle_attention *heddle__cuda_with_collected(const heddle_attention *a, collected_as as,
                                                    heddle_attention *collected) {
    if (as == NOT_COLLECTED)
        return a;
    const bool packed = a->features & HEDDLE_VARLEN, in_pages = a->features & HEDDLE_PAGES;
    const int64_t rows = rows_of(a, as), k = collect_units(a->d) * COLLECT_UNIT,
                  v = collect_units(a->dv) * COLLECT_UNIT;
    const int64_t page = page_of_collected(a, as), part = as == COLLECTED_PAGES ? page : packed ? 0 : rows;
    *collected = *a;
    collected->features &= ~(HEDDLE_PAGES | HEDDLE_E4M3);
    collected->k_stride = (heddle_strides){part * k, a->b * rows * k, k};
    collected->v_stride = (heddle_strides){part * v, a->b * rows * v, v};
    if (as == COLLECTED_PAGES) {
        collected->features |= HEDDLE_PAGES | (packed && !in_pages ? HEDDLE_SEQLENS : 0);
        collected->page = page;
        collected->table = rows / page;
        collected->pages = a->b * collected->table;
        collected->total_k = 0;
    } else if (packed) {
        collected->total_k = a->b * rows;
    }
    return collected;
}

/* Room of so many bytes behind what the workspace has already; an offset of 0 is none. */
static size_t place(attention_choice *c, size_t bytes) {
    const size_t at = c->bytes ? align64(c->bytes) : 64;
    c->bytes = at + align64(bytes);
    return at;
}

void heddle__cuda_place_collected(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->given;
    c->collected = p->collected;
    if (p->collected == NOT_COLLECTED)
        return;
    c->collected_k = place(c, bytes_of(a, p->collected, a->d));
    c->collected_v = place(c, bytes_of(a, p->collected, a->dv));
    c->collected_table = p->collected == COLLECTED_PAGES ? place(c, (size_t)p->a->pages * sizeof(int32_t)) : 0;
    /* of packed queries keys need starts, where they are rows, or lengths, where they were packed, too */
    const bool packed = a->features & HEDDLE_VARLEN, knows = p->collected == COLLECTED_PAGES && a->page;
    c->collected_lengths = packed && !knows ? place(c, (size_t)(a->b + 1) * sizeof(int32_t)) : 0;
}

/* May units of 8 elements of e bytes be read at once? */
static bool is_in_units(size_t e, const void *p, heddle_strides s, int64_t width) {
    const size_t unit = COLLECT_UNIT * e;
    return ((uintptr_t)p | (size_t)(s.b | s.h | s.s | width) * e) % unit == 0;
}

/* Where what the kernel writes lies, and is read. */
static void find_collected(const attention_problem *p, const attention_choice *c, char *workspace, collect_params *to,
                           heddle_attention_data *data) {
    int32_t *const lengths = (int32_t *)(void *)(workspace + c->collected_lengths);
    data->k = to->k.to = workspace + c->collected_k;
    data->v = to->v.to = workspace + c->collected_v;
    if (p->collected == COLLECTED_PAGES)
        data->block_table = to->pages = (int32_t *)(void *)(workspace + c->collected_table);
    if (c->collected_lengths && p->collected == COLLECTED_ROWS)
        data->cu_seqlens_k = to->starts = lengths;
    else if (c->collected_lengths)
        data->seqlens_k = to->lengths = lengths;
}

void heddle__cuda_add_collect(const attention_problem *p, const attention_choice *c, char *workspace,
                              heddle_attention_data *data, attention_job *job) {
    const heddle_attention *a = p->given;
    const bool bytes = a->features & HEDDLE_E4M3;
    const size_t each = bytes ? 1 : heddle_dtype_size(a->dtype);
    const int64_t rows = rows_of(a, p->collected), chunks = ceil_div(rows, COLLECT_WARPS * COLLECT_ROWS);
    job->collect =
        (collect_params){.a = *a,
                         .k = {data->k, NULL, collect_units(a->d), is_in_units(each, data->k, a->k_stride, a->d)},
                         .v = {data->v, NULL, collect_units(a->dv), is_in_units(each, data->v, a->v_stride, a->dv)},
                         .cu_seqlens_q = data->cu_seqlens_q,
                         .cu_seqlens_k = data->cu_seqlens_k,
                         .seqlens_k = data->seqlens_k,
                         .block_table = data->block_table,
                         .rows = rows,
                         .page = (int32_t)page_of_collected(a, p->collected),
                         .chunks = (int32_t)chunks};
    find_collected(p, c, workspace, &job->collect, data);
    heddle__cuda_add_launch(
        job, heddle__cuda_find_attention(p, PASS_collect, bytes ? VARIANT_bytes : VARIANT_plain, FAMILY_sm80),
        a->b * a->hk * chunks);
}

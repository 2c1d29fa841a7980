/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_PAGES and HEDDLE_E4M3: a thread sees the keys of the block that it is at as rows of dtype that follow each other, so that whoever
 * reads keys knows nothing of pages or bytes: the page itself where it has the whole block, else a copy, in which bytes are widened. The
 * blocks are those of keys without pages, and so are the bits of the results. */
#ifndef HEDDLE_CPU_PAGES_H
#define HEDDLE_CPU_PAGES_H

#include "tile.h"

/* The call as a thread sees it, with K and V of one block in place of all. */
typedef struct paged_call {
    call c;
    heddle_attention a;
    heddle_attention_data t;
    const call *of;
    char *k, *v; /* [tile_k][d_pad], [tile_k][dv_pad]: rows as they lie in memory */
} paged_call;

/* Whether threads see something else than K and V as they lie. */
INLINE bool gathers(const heddle_attention *a) {
    return a->features & (HEDDLE_PAGES | HEDDLE_E4M3);
}

static paged_call carve_pages(const attention_plan *plan, carver *w) {
    const heddle_attention *a = &plan->a;
    const int64_t rows = gathers(a) ? plan->tile_k : 0, size = element_size((int)a->dtype);
    paged_call p = {.of = NULL};
    p.k = carve(w, (size_t)(rows * ((a->d + VL - 1) / VL * VL) * size));
    p.v = carve(w, (size_t)(rows * ((a->dv + VL - 1) / VL * VL) * size));
    return p;
}

/* What a thread takes for the call. */
static const call *begin_pages(const call *c, paged_call *p) {
    if (!gathers(c->a))
        return c;
    p->of = c;
    p->c = *c;
    p->a = *c->a;
    p->t = *c->t;
    p->c.a = &p->a;
    p->c.t = &p->t;
    p->c.k_pairs = c->k_pairs && !(p->a.features & HEDDLE_E4M3);
    return &p->c;
}

/* From here on the thread is at this unit. */
static void see_unit(const unit *u, paged_call *p) {
    if (!p->of || !(p->a.features & HEDDLE_E4M3))
        return;
    const float *k = p->t.k_scale, *v = p->t.v_scale;
    const int64_t at = u->n * p->a.hk + u->hk;
    p->c.k_scale = k ? k[at] : 1;
    p->c.v_scale = v ? v[at] : 1;
}

/* Keys from `first` on that lie in one page, at most `count`. */
INLINE int64_t keys_in_page(const heddle_attention *a, int64_t first, int64_t count) {
    return a->features & HEDDLE_PAGES ? min64(count, a->page - first % a->page) : count;
}

/* Key j of K or V: where it is, in elements; -1: in no page. */
static int64_t key_offset(const paged_call *p, const unit *u, heddle_strides stride, int64_t j) {
    const heddle_attention *a = p->of->a;
    if (!(a->features & HEDDLE_PAGES))
        return row_offset(stride, u->n, u->hk, u->s.first_k + j);
    const int64_t page = page_of(a, p->t.block_table, u->n, j);
    return page < 0 ? -1 : row_offset(stride, page, u->hk, j % a->page);
}

/* Rows first .. first+count-1 of K or V: where row 0 of the tensor would be, and from row to row. */
static const void *block_rows(const paged_call *p, const unit *u, const void *at, heddle_strides stride, int64_t n,
                              int64_t pad, int64_t first, int64_t count, char *copy, heddle_strides *to) {
    const heddle_attention *a = p->of->a;
    const int type = p->c.type;
    const int64_t size = element_size(type), offset = key_offset(p, u, stride, first);
    const bool bytes = a->features & HEDDLE_E4M3;
    first += u->s.first_k; /* as the caller counts; 0 of pages */
    if (!bytes && keys_in_page(a, first, count) == count && offset >= 0) {
        *to = (heddle_strides){0, 0, stride.s};
        return element_at(at, offset - first * stride.s, type);
    }
    *to = (heddle_strides){0, 0, pad};
    for (int64_t j = 0; j < count; j++) {
        const int64_t from = key_offset(p, u, stride, first - u->s.first_k + j);
        char *row = copy + j * pad * size;
        if (from < 0)
            memset(row, 0, (size_t)(pad * size));
        else if (bytes)
            widen_e4m3(type, (const uint8_t *)at + from, n, row);
        else
            memcpy(row, element_at(at, from, type), (size_t)(n * size));
    }
    return copy - first * pad * size;
}

/* From here on the thread sees these keys. */
static void see_keys(const call *c, const unit *u, int64_t first, int64_t count, paged_call *p) {
    if (!gathers(c->a))
        return;
    const heddle_attention *a = p->of->a;
    const heddle_attention_data *t = p->of->t;
    p->t.k = block_rows(p, u, t->k, a->k_stride, a->d, c->d_pad, first, count, p->k, &p->a.k_stride);
    p->t.v = block_rows(p, u, t->v, a->v_stride, a->dv, c->dv_pad, first, count, p->v, &p->a.v_stride);
    p->c.hidden = false;
    for (int64_t j = 0; a->features & HEDDLE_PAGES && j < count; j += keys_in_page(a, first + j, count))
        p->c.hidden |= page_of(a, t->block_table, u->n, first + j) < 0;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_PAGES: a thread sees the keys of the block that it is at as rows that follow each other, so that whoever reads keys knows
 * nothing of pages: the page itself where it has the whole block, else a copy. The blocks are those of keys without pages, and so are
 * the bits of the results. */
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

static paged_call carve_pages(const attention_plan *plan, carver *w) {
    const heddle_attention *a = &plan->a;
    const bool paged = a->features & HEDDLE_PAGES;
    const int64_t rows = paged ? plan->tile_k : 0, size = element_size((int)a->dtype);
    paged_call p = {.of = NULL};
    p.k = carve(w, (size_t)(rows * ((a->d + VL - 1) / VL * VL) * size));
    p.v = carve(w, (size_t)(rows * ((a->dv + VL - 1) / VL * VL) * size));
    return p;
}

/* What a thread takes for the call. */
static const call *begin_pages(const call *c, paged_call *p) {
    if (!(c->a->features & HEDDLE_PAGES))
        return c;
    p->of = c;
    p->c = *c;
    p->a = *c->a;
    p->t = *c->t;
    p->c.a = &p->a;
    p->c.t = &p->t;
    return &p->c;
}

/* Keys from `first` on that lie in one page, at most `count`. */
INLINE int64_t keys_in_page(const heddle_attention *a, int64_t first, int64_t count) {
    return min64(count, a->page - first % a->page);
}

/* Rows first .. first+count-1 of K or V: where row 0 would be, and from row to row. */
static const void *block_rows(const paged_call *p, const unit *u, const void *at, heddle_strides stride, int64_t n,
                              int64_t pad, int64_t first, int64_t count, char *copy, heddle_strides *to) {
    const heddle_attention *a = p->of->a;
    const int32_t *table = p->t.block_table;
    const int type = p->c.type;
    const int64_t size = element_size(type), page = page_of(a, table, u->n, first);
    if (keys_in_page(a, first, count) == count && page >= 0) {
        *to = (heddle_strides){0, 0, stride.s};
        return element_at(at, row_offset(stride, page, u->hk, first % a->page) - first * stride.s, type);
    }
    *to = (heddle_strides){0, 0, pad};
    for (int64_t j = 0, step; j < count; j += step) {
        const int64_t from = page_of(a, table, u->n, first + j);
        step = keys_in_page(a, first + j, count - j);
        if (from < 0) {
            memset(copy + j * pad * size, 0, (size_t)(step * pad * size));
            continue;
        }
        for (int64_t x = 0; x < step; x++)
            memcpy(copy + (j + x) * pad * size,
                   element_at(at, row_offset(stride, from, u->hk, (first + j + x) % a->page), type),
                   (size_t)(n * size));
    }
    return copy - first * pad * size;
}

/* From here on the thread sees these keys. */
static void see_keys(const call *c, const unit *u, int64_t first, int64_t count, paged_call *p) {
    if (!(c->a->features & HEDDLE_PAGES))
        return;
    const heddle_attention *a = p->of->a;
    const heddle_attention_data *t = p->of->t;
    p->t.k = block_rows(p, u, t->k, a->k_stride, a->d, c->d_pad, first, count, p->k, &p->a.k_stride);
    p->t.v = block_rows(p, u, t->v, a->v_stride, a->dv, c->dv_pad, first, count, p->v, &p->a.v_stride);
    p->c.hidden = false;
    for (int64_t j = 0; j < count; j += keys_in_page(a, first + j, count))
        p->c.hidden |= page_of(a, t->block_table, u->n, first + j) < 0;
}

#endif

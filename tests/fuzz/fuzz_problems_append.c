/* SPDX-License-Identifier: Apache-2.0
 * Bytes to a description of heddle_attention_append or heddle_attention_merge, sane or absurd: what the library accepts
 * runs, where it is small, in tensors without a byte to spare. */
#define _GNU_SOURCE
#include "problems.h"

/* Without pointers both say what they think of the description, and touch nothing. */
static int is_accepted(heddle_status status) {
    MUST(status < HEDDLE_NO_DEVICE);
    return status == HEDDLE_NULL_POINTER || status == HEDDLE_OK;
}

/* ------------------------------------------------------------------------------------------------------- append */

static int64_t even(int64_t x) {
    return x - x % 2;
}

static void options_of_append(bytes *b, heddle_append *a) {
    static const uint64_t features[] = {HEDDLE_VARLEN, HEDDLE_PAGES, HEDDLE_E4M3};
    const uint64_t bits = take_number(b, 1);
    a->dtype = (heddle_dtype)take_between(b, 0, 3);
    a->device = a->dtype != HEDDLE_F64 && take_between(b, 0, 3) ? HEDDLE_CPU : HEDDLE_REF;
    a->table_dtype = bits & 1 ? a->dtype : HEDDLE_F32;
    for (int i = 0; i < 3; i++)
        a->features |= bits >> (i + 1) & 1 ? features[i] : 0;
    if (bits & 64) {
        a->interleaved = (uint8_t)take_between(b, 0, 1);
        a->together = (uint8_t)take_between(b, 0, 1);
    }
}

static heddle_append small_append(bytes *b) {
    heddle_append a = {.size = sizeof a};
    options_of_append(b, &a);
    const int packed = (a.features & HEDDLE_VARLEN) != 0, paged = (a.features & HEDDLE_PAGES) != 0;
    a.b = take_between(b, 0, 3);
    a.hk = take_between(b, 1, 3);
    a.h = take_between(b, 0, 1) * a.hk * take_between(b, 1, 3);
    a.s = take_between(b, 0, 12);
    a.sq = a.h && !packed ? take_between(b, 0, 12) : 0;
    a.total = packed ? take_between(b, 0, 30) : 0;
    a.sk = take_between(b, 0, 70);
    a.d = take_between(b, 1, 40);
    a.dv = take_between(b, 0, 40);
    a.rotary = even(take_between(b, 0, a.d));
    if (a.rotary) {
        a.positions = a.sk + take_between(b, 0, 3);
        a.table_stride = take_bit(b) ? a.rotary / 2 + take_between(b, 0, 3) : 0;
    } else {
        a.interleaved = a.together = 0;
    }
    if (paged) {
        a.page = INT64_C(16) << take_between(b, 0, 4);
        a.pages = take_between(b, 0, 6);
        a.table = take_bit(b) * take_between(b, 0, 6);
    } else {
        a.caches = take_bit(b) * take_between(b, 0, 5);
    }
    const int64_t dv = a.dv ? a.dv : a.d, rows = packed ? a.total : a.s, queries = packed ? a.total : a.sq,
                  cached = paged ? a.page : a.sk;
    a.k_new_stride = small_strides(b, 1, packed, a.hk, rows, a.d);
    a.v_new_stride = small_strides(b, 1, packed, a.hk, rows, dv);
    a.k_stride = small_strides(b, 0, 0, a.hk, cached, a.d);
    a.v_stride = small_strides(b, 0, 0, a.hk, cached, dv);
    a.q_stride = small_strides(b, 1, packed, a.h, queries, a.d);
    a.q_out_stride = small_strides(b, 0, packed, a.h, queries, a.d);
    return a;
}

static heddle_append absurd_append(bytes *b) {
    heddle_append a = {.size = sizeof a};
    options_of_append(b, &a);
    int64_t *const size[] = {&a.b,    &a.h,     &a.hk,     &a.s,           &a.sq,    &a.sk,
                             &a.d,    &a.dv,    &a.rotary, &a.positions,   &a.total, &a.caches,
                             &a.page, &a.pages, &a.table,  &a.table_stride};
    const uint64_t absent = take_number(b, 2);
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        *size[i] = absent >> i & 1 ? 0 : any_size(b);
    heddle_strides *const strides[] = {&a.k_new_stride, &a.v_new_stride, &a.k_stride,
                                       &a.v_stride,     &a.q_stride,     &a.q_out_stride};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        if (take_bit(b))
            *strides[i] = (heddle_strides){any_size(b), any_size(b), any_size(b)};
    a.reserved[0] = (uint8_t)(take_number(b, 1) == 255);
    return a;
}

static int is_small_append(const heddle_append *a) {
    const int64_t sizes[] = {a->b,  a->h,     a->hk,     a->s,    a->sq,    a->d,     a->dv,
                             a->sk, a->total, a->caches, a->page, a->pages, a->table, a->positions};
    const heddle_strides strides[] = {a->k_new_stride, a->v_new_stride, a->k_stride,
                                      a->v_stride,     a->q_stride,     a->q_out_stride};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] > 300)
            return 0;
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        if (strides[i].b > 4096 || strides[i].h > 4096 || strides[i].s > 4096)
            return 0;
    return a->table_stride <= 4096 && (double)(a->b + 1) * (double)(a->hk + a->h) * (double)(a->sk + 1) *
                                              (double)(a->d + a->dv) * (double)(a->s + a->sq + 1) <
                                          (1 << 22);
}

static void *new_rows(memory *m, heddle_dtype dtype, heddle_strides s, int packed, int64_t b, int64_t h, int64_t rows,
                      int64_t last) {
    return new_floats(m, dtype, span(literal(s, packed, h, rows, last), packed ? 1 : b, h, rows, last));
}

/* Where sequences or their pages lie: no place twice, as the caller promises, and some that are none. */
static int32_t *new_places(memory *m, int64_t count, int64_t places) {
    int32_t *p = new_block(m, (size_t)count * sizeof *p);
    const int64_t first = take_between(m->source, 0, 3);
    for (int64_t i = 0; i < count; i++)
        switch (take_between(m->source, 0, 7)) {
        case 6: p[i] = -1; break;
        case 7: p[i] = (int32_t)(places + take_between(m->source, 0, 1000)); break;
        default: p[i] = (int32_t)(i + first);
        }
    return p;
}

static void run_append(memory *m, const heddle_append *a) {
    const heddle_dtype real = a->dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    const int packed = (a->features & HEDDLE_VARLEN) != 0, paged = (a->features & HEDDLE_PAGES) != 0,
              bytes_of_keys = (a->features & HEDDLE_E4M3) != 0;
    const int64_t dv = a->dv ? a->dv : a->d, rows = packed ? a->total : a->s, queries = packed ? a->total : a->sq,
                  parts = paged       ? a->pages
                          : a->caches ? a->caches
                                      : a->b,
                  cached = paged ? a->page : a->sk,
                  k_size = span(literal(a->k_stride, 0, a->hk, cached, a->d), parts, a->hk, cached, a->d),
                  v_size = span(literal(a->v_stride, 0, a->hk, cached, dv), parts, a->hk, cached, dv),
                  angles = a->positions ? (a->positions - 1) * (a->table_stride ? a->table_stride : a->rotary / 2) +
                                              a->rotary / 2
                                        : 0;
    const uint64_t left_out = take_number(m->source, 1);
    heddle_append_data t = {.size = sizeof t};
    t.k_new = new_rows(m, a->dtype, a->k_new_stride, packed, a->b, a->hk, rows, a->d);
    t.v_new = new_rows(m, a->dtype, a->v_new_stride, packed, a->b, a->hk, rows, dv);
    t.k = new_block(m, (size_t)k_size * (bytes_of_keys ? 1 : heddle_dtype_size(a->dtype)));
    t.v = new_block(m, (size_t)v_size * (bytes_of_keys ? 1 : heddle_dtype_size(a->dtype)));
    if (a->h) {
        void *q = new_rows(m, a->dtype, a->q_stride, packed, a->b, a->h, queries, a->d);
        t.q = q;
        t.q_out = memcmp(&a->q_stride, &a->q_out_stride, sizeof a->q_stride) == 0 && (left_out & 1)
                      ? q
                      : new_rows(m, a->dtype, a->q_out_stride, packed, a->b, a->h, queries, a->d);
    }
    if (a->rotary) {
        t.cos = new_floats(m, a->table_dtype, angles);
        t.sin = new_floats(m, a->table_dtype, angles);
    }
    t.seqlens_k = new_lengths(m, a->b, a->sk);
    t.cu_seqlens = packed ? new_lengths(m, a->b + 1, a->total) : NULL;
    t.block_table =
        paged ? new_places(m, a->b * (a->table ? a->table : (a->sk + a->page - 1) / a->page), a->pages) : NULL;
    t.cache_index = a->caches ? new_places(m, a->b, a->caches) : NULL;
    t.seqlens_out = left_out & 2 ? NULL : new_block(m, (size_t)a->b * sizeof *t.seqlens_out);
    if (bytes_of_keys) {
        t.k_scale = left_out & 4 ? NULL : new_floats(m, real, a->b * a->hk);
        t.v_scale = left_out & 8 ? NULL : new_floats(m, real, a->b * a->hk);
    }
    MUST(heddle_attention_append(a, &t, NULL) == HEDDLE_OK);
    for (int64_t n = 0; t.seqlens_out && n < a->b; n++)
        MUST(t.seqlens_out[n] >= 0 && t.seqlens_out[n] <= a->sk);
    free_blocks(m);
}

void fuzz_append(bytes *b) {
    memory m = {.source = b};
    const int absurd = take_bit(b);
    const heddle_append a = absurd ? absurd_append(b) : small_append(b);
    if (is_accepted(heddle_attention_append(&a, NULL, NULL)) && (!absurd || is_small_append(&a)))
        run_append(&m, &a);
}

/* -------------------------------------------------------------------------------------------------------- merge */

static heddle_merge some_merge(bytes *b, int absurd) {
    heddle_merge a = {.size = sizeof a};
    a.dtype = (heddle_dtype)take_between(b, 0, 3);
    a.device = a.dtype != HEDDLE_F64 && take_between(b, 0, 3) ? HEDDLE_CPU : HEDDLE_REF;
    a.b = absurd ? any_size(b) : take_between(b, 0, 3);
    a.h = absurd ? any_size(b) : take_between(b, 1, 4);
    a.s = absurd ? any_size(b) : take_between(b, 0, 40);
    a.dv = absurd ? any_size(b) : take_between(b, 1, 70);
    heddle_strides *const strides[] = {&a.o_stride, &a.other_stride};
    for (int i = 0; i < 2; i++)
        if (!absurd)
            *strides[i] = small_strides(b, i, 0, a.h, a.s, a.dv);
        else if (take_bit(b))
            *strides[i] = (heddle_strides){any_size(b), any_size(b), any_size(b)};
    return a;
}

static int is_small_merge(const heddle_merge *a) {
    const int64_t all[] = {a->o_stride.b,     a->o_stride.h,     a->o_stride.s,
                           a->other_stride.b, a->other_stride.h, a->other_stride.s};
    for (int i = 0; i < 6; i++)
        if (all[i] > 4096)
            return 0;
    return a->b <= 300 && a->h <= 300 && a->s <= 300 && (a->b + 1) * (a->s + 1) * a->h * a->dv < (1 << 17);
}

void fuzz_merge(bytes *b) {
    memory m = {.source = b};
    const int absurd = take_bit(b);
    const heddle_merge a = some_merge(b, absurd);
    const heddle_dtype real = a.dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    if (!is_accepted(heddle_attention_merge(&a, NULL, NULL, NULL, NULL, NULL)) || (absurd && !is_small_merge(&a)))
        return;
    void *o = new_rows(&m, real, a.o_stride, 0, a.b, a.h, a.s, a.dv);
    void *lse = new_floats(&m, real, a.b * a.h * a.s);
    const void *other = new_rows(&m, a.dtype, a.other_stride, 0, a.b, a.h, a.s, a.dv);
    const void *other_lse = new_floats(&m, real, a.b * a.h * a.s);
    MUST(heddle_attention_merge(&a, o, lse, other, other_lse, NULL) == HEDDLE_OK);
    free_blocks(&m);
}

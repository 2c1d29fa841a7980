/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_ACCUMULATE: a problem's keys in parts, one call after another. */
#include "parts.h"

#include "../tools/device_memory.h"
#include "dtype.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void copy(heddle_device device, void *to, const void *from, size_t bytes) {
    if (device == HEDDLE_CUDA && !device_memory_copy(to, from, bytes))
        fail_msg("%s", device_memory_error());
}

numbers numbers_new(heddle_device device, heddle_dtype type, int64_t n, double value) {
    const size_t bytes = (size_t)(n + 1) * heddle_dtype_size(type);
    numbers x = {device, bytes, malloc(bytes), NULL};
    assert_non_null(x.host);
    for (int64_t at = 0; at < n; at++)
        store_element(type, x.host, at, value);
    x.block = device == HEDDLE_CUDA ? workspace_new(device, bytes) : x.host;
    copy(device, x.block, x.host, bytes);
    return x;
}

void numbers_free(numbers *x) {
    if (x->device == HEDDLE_CUDA) {
        assert_true(workspace_intact(x->device, x->block, x->bytes));
        workspace_free(x->device, x->block, x->bytes);
    }
    free(x->host);
}

void numbers_upload(const numbers *x) {
    copy(x->device, x->block, x->host, x->bytes);
}

void numbers_download(const numbers *x) {
    copy(x->device, x->host, x->block, x->bytes);
}

sums sums_new(const heddle_attention *a, int64_t gap) {
    const heddle_dtype real = a->dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    const int64_t rows = a->b * a->h * a->sq, keys = a->b * a->hk * a->sk;
    return (sums){real,
                  gap,
                  numbers_new(a->device, real, rows * a->dv, (double)NAN),
                  numbers_new(a->device, real, rows, -(double)INFINITY),
                  numbers_new(a->device, real, rows * (a->d + gap), THERE),
                  numbers_new(a->device, real, keys * (a->d + gap), THERE),
                  numbers_new(a->device, real, keys * (a->dv + gap), THERE)};
}

bool sums_gaps_unchanged(const sums *s, const numbers *of, int64_t columns) {
    const int64_t row = columns + s->gap, count = (int64_t)(of->bytes / heddle_dtype_size(s->real)) - 1;
    for (int64_t at = 0; at < count; at++)
        if (at % row >= columns && load_element(s->real, of->host, at) != THERE)
            return false;
    return true;
}

void sums_free(sums *s) {
    numbers *all[] = {&s->o, &s->lse, &s->dq, &s->dk, &s->dv};
    for (size_t x = 0; x < COUNT(all); x++)
        numbers_free(all[x]);
}

/* The tensors' own strides, literally: those of a part are those of the whole. */
static void have_own_strides(const attention_problem *p, heddle_attention *a) {
    for (int x = 0; x < T_COUNT; x++) {
        const int64_t *s = p->t[x].stride;
        const heddle_strides literal =
            s[0] || s[1] || s[2] ? (heddle_strides){s[0], s[1], s[2]} : (heddle_strides){HEDDLE_BROADCAST, 0, 0};
        if (attention_fields[x].stride && p->t[x].host)
            memcpy((char *)a + attention_fields[x].stride, &literal, sizeof literal);
    }
}

static heddle_strides strides_of(int64_t heads, int64_t rows, int64_t row) {
    return (heddle_strides){heads * rows * row, rows * row, row};
}

static void have_strides_of_sums(const attention_problem *p, const sums *s, heddle_attention *a) {
    have_own_strides(p, a);
    a->o_stride = (heddle_strides){0};
    a->dq_stride = strides_of(p->a.h, p->a.sq, p->a.d + s->gap);
    a->dk_stride = strides_of(p->a.hk, p->a.sk, p->a.d + s->gap);
    a->dv_stride = strides_of(p->a.hk, p->a.sk, p->a.dv + s->gap);
}

static const void *behind(const void *p, int64_t elements, size_t size) {
    return p ? (const char *)p + elements * (int64_t)size : NULL;
}

/* Ids of the keys first .. end-1 of each sequence, of as many bits as a float has. */
static numbers part_of_segments(const attention_problem *p, int64_t first, int64_t end) {
    const tensor *t = &p->t[T_K_SEGMENTS];
    const int64_t keys = end - first;
    numbers ids = numbers_new(p->a.device, HEDDLE_F32, t->host ? p->a.b * keys + 1 : 1, 0);
    for (int64_t x = 0; t->host && x < p->a.b * keys; x++)
        ((int32_t *)ids.host)[x] = (int32_t)tensor_get(t, x / keys, 0, 0, first + x % keys);
    numbers_upload(&ids);
    return ids;
}

/* Says what went wrong. */
static bool run(const heddle_attention *a, const heddle_attention_data *t, heddle_pass pass) {
    size_t bytes = 0;
    heddle_status status = heddle_attention_workspace(a, pass, &bytes);
    void *workspace = workspace_new(a->device, bytes);
    if (status == HEDDLE_OK)
        status = (pass == HEDDLE_FORWARD ? heddle_attention_forward
                                         : heddle_attention_backward)(a, t, workspace, bytes, device_memory_stream());
    if (status != HEDDLE_OK)
        printf("  a part: %s: %s\n", heddle_status_string(status), heddle_last_message());
    const bool intact = workspace_intact(a->device, workspace, bytes);
    if (!intact)
        printf("  a part wrote outside its workspace of %zu bytes\n", bytes);
    workspace_free(a->device, workspace, bytes);
    return status == HEDDLE_OK && intact;
}

bool run_part(const attention_problem *p, const sums *s, heddle_pass pass, int64_t first, int64_t end) {
    heddle_attention a = p->a;
    heddle_attention_data t = attention_data(p, pass == HEDDLE_BACKWARD);
    const size_t size = heddle_dtype_size(a.dtype), real = heddle_dtype_size(s->real);
    const bool own_lengths = a.features & HEDDLE_SEQLENS;
    have_strides_of_sums(p, s, &a);
    a.features |= HEDDLE_ACCUMULATE;
    a.whole_sq = own_lengths ? 0 : a.whole_sq ? a.whole_sq : a.q_offset + a.sq;
    a.whole_sk = own_lengths ? 0 : a.whole_sk ? a.whole_sk : a.k_offset + a.sk;
    a.k_offset += first;
    a.sk = end - first;
    t.k = behind(t.k, first * p->t[T_K].stride[2], size);
    t.v = behind(t.v, first * p->t[T_V].stride[2], size);
    t.bias = behind(t.bias, first, size);
    t.bool_mask = behind(t.bool_mask, first, 1);
    numbers segments = part_of_segments(p, first, end);
    t.k_segments = a.features & HEDDLE_SEGMENTS ? segments.block : NULL;
    t.dbias = (void *)(uintptr_t)behind(t.dbias, first, size);
    if (first) {
        a.features &= ~HEDDLE_SINKS;
        t.sinks = NULL;
        t.dsinks = NULL;
    }
    t.o = s->o.block;
    t.lse = s->lse.block;
    if (pass == HEDDLE_BACKWARD) {
        t.dq = s->dq.block;
        t.dk = (void *)(uintptr_t)behind(s->dk.block, first * (a.d + s->gap), real);
        t.dv = (void *)(uintptr_t)behind(s->dv.block, first * (a.dv + s->gap), real);
    }
    const bool right = run(&a, &t, pass);
    numbers_free(&segments);
    return right;
}

bool run_share(const attention_problem *p, int64_t end) {
    heddle_attention a = p->a;
    const heddle_attention_data t = attention_data(p, true);
    have_own_strides(p, &a);
    a.whole_sq = a.sq;
    a.whole_sk = a.sk;
    a.sk = end;
    return run(&a, &t, HEDDLE_BACKWARD);
}

/* Sums as an output of p's problem has them, in its type; `there` is what they began with, gap lies behind each row. */
static void take_sums(const sums *s, const numbers *from, double there, int64_t gap, tensor *to) {
    int64_t at = 0;
    numbers_download(from);
    for (int64_t n = 0; n < to->dim[0]; n++)
        for (int64_t x = 0; x < to->dim[1]; x++)
            for (int64_t i = 0; i < to->dim[2]; i++, at += gap)
                for (int64_t e = 0; e < to->dim[3] && to->host; e++)
                    tensor_set(to, n, x, i, e, load_element(s->real, from->host, at++) - there);
    tensor_accept(to);
}

bool attention_fits_parts(const attention_case *c) {
    const heddle_attention *a = &c->a;
    const bool by_ends = a->mask == HEDDLE_CAUSAL_BOTTOM_RIGHT ||
                         (a->mask == HEDDLE_MASK_NONE && a->features & (HEDDLE_WINDOW | HEDDLE_ALIBI));
    if (a->features & HEDDLE_SEQLENS && (c->len_k || by_ends)) /* every part would have lengths of its own */
        return false;
    return !(a->features & (HEDDLE_VARLEN | HEDDLE_PAGES | HEDDLE_E4M3 | HEDDLE_WEIGHTS | HEDDLE_BLOCKS)) &&
           !(c->skip >> T_LSE & 1);
}

bool attention_in_parts(attention_problem *p, int64_t first, attention_problem *to) {
    static const int outputs[] = {T_O, T_LSE, T_DQ, T_DK, T_DV};
    sums s = sums_new(&p->a, (const int64_t[]){0, 1, 4}[first % 3]);
    const numbers *const from[] = {&s.o, &s.lse, &s.dq, &s.dk, &s.dv};
    bool right = true;
    for (int pass = 0; pass < 2; pass++) {
        right = right && run_part(p, &s, (heddle_pass)pass, 0, first);
        right = right && (first == p->a.sk || run_part(p, &s, (heddle_pass)pass, first, p->a.sk));
    }
    for (size_t x = 0; x < COUNT(outputs); x++) {
        take_sums(&s, from[x], x < 2 ? 0 : THERE, x < 2 ? 0 : s.gap, &to->t[outputs[x]]);
        const int64_t columns = outputs[x] == T_DV ? p->a.dv : p->a.d; /* the output itself may be left out */
        if (x >= 2 && !sums_gaps_unchanged(&s, from[x], columns)) {
            printf("  a part wrote between the rows of %s\n", attention_tensor_name[outputs[x]]);
            right = false;
        }
    }
    for (int x = T_DBIAS; x <= T_DSINKS; x++) /* which the parts have written over what the one call left */
        if (p->t[x].host) {
            tensor_download(&p->t[x]);
            if (!tensor_gaps_unchanged(&p->t[x])) {
                printf("  a part wrote around %s or between its rows\n", attention_tensor_name[x]);
                right = false;
            }
            tensor_convert(&to->t[x], &p->t[x]);
            tensor_accept(&to->t[x]);
        }
    sums_free(&s);
    return right;
}

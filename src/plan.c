/* SPDX-License-Identifier: Apache-2.0
 * The rules of a description of attention, and its defaults (norm-linear's: plan_norm_linear.c; append's: plan_append.c). Pure: no pointer to
 * data, no device, no environment.
 * What tiles and kernels follow from it is each backend's part (backend.h). */
#include "plan.h"

#include "fields.h"
#include "mask.h"
#include "rules.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

int64_t heddle__span(heddle_strides t, int64_t b, int64_t h, int64_t s, int64_t last) {
    if (b == 0 || h == 0 || s == 0 || last == 0)
        return 0;
    return multiply_add(b - 1, t.b, multiply_add(h - 1, t.h, multiply_add(s - 1, t.s, last)));
}

/* ---------------------------------------------------------------------------------------------------- strides */

typedef struct axis {
    int64_t stride, size;
} axis;

static void put_in_order(axis *low, axis *high) {
    if (low->stride > high->stride) {
        const axis other = *low;
        *low = *high;
        *high = other;
    }
}

/* Does the axis pass what the smaller ones span? Then it spans more. */
static bool passes(axis x, bool summed, int64_t *extent) {
    if (x.size <= 1 || (summed && x.stride == 0))
        return true;
    const bool fits = x.stride >= *extent;
    *extent += x.stride * (x.size - 1);
    return fits;
}

/* Elements of an output may not share memory. */
static bool overlaps_itself(const tensor_rule *t, const heddle_strides *stride) {
    axis x = {stride->s, t->s}, y = {stride->h, t->h}, z = {stride->b, t->packed ? 1 : t->b};
    int64_t extent = t->last;
    put_in_order(&x, &y);
    put_in_order(&y, &z);
    put_in_order(&x, &y);
    return !(passes(x, t->summed, &extent) && passes(y, t->summed, &extent) && passes(z, t->summed, &extent));
}

static heddle_strides contiguous_strides(const tensor_rule *t) {
    const int64_t head = multiply_add(t->packed ? t->h : t->s, t->last, 0);
    const heddle_strides batched = {multiply_add(head, t->h, 0), head, t->last}, packed = {0, t->last, head};
    return t->packed ? packed : batched;
}

/* Broadcast strides are 0; no others are negative. */
static heddle_status resolve_broadcast(const char *name, heddle_strides *stride) {
    int64_t *each[3] = {&stride->b, &stride->h, &stride->s};
    for (int x = 0; x < 3; x++) {
        if (*each[x] < 0 && *each[x] != HEDDLE_BROADCAST)
            return fail(HEDDLE_BAD_STRIDE, "%s_stride.%c = %lld is negative", name, "bhs"[x], (long long)*each[x]);
        if (*each[x] < 0)
            *each[x] = 0;
    }
    return HEDDLE_OK;
}

/* Sizes and strides of which no sum of products comes near 2^60: nearly always, and quickly seen. */
static bool surely_fits(const tensor_rule *t, const heddle_strides *stride) {
    return (uint64_t)(t->b | t->h | t->s | t->last) < UINT64_C(1) << 20 &&
           (uint64_t)(stride->b | stride->h | stride->s) < UINT64_C(1) << 38;
}

heddle_status heddle__resolve_tensor(const tensor_rule *t, heddle_strides *stride) {
    const bool contiguous = (stride->b | stride->h | stride->s) == 0;
    if (contiguous)
        *stride = contiguous_strides(t);
    else if ((stride->b | stride->h | stride->s) < 0)
        TRY(resolve_broadcast(t->name, stride));
    if (t->packed)
        stride->b = 0;
    const int64_t b = t->packed ? 1 : t->b;
    const bool empty = !t->b || !t->h || !t->s || !t->last;
    if (!surely_fits(t, stride) && !empty &&
        (stride->b < 0 || stride->h < 0 || stride->s < 0 || heddle__span(*stride, b, t->h, t->s, t->last) < 0))
        return fail(HEDDLE_OVERFLOW, "%s: [%lld, %lld, %lld, %lld] with strides %lld, %lld, %lld is over 2^60 elements",
                    t->name, (long long)b, (long long)t->h, (long long)t->s, (long long)t->last, (long long)stride->b,
                    (long long)stride->h, (long long)stride->s);
    if (t->written && !contiguous && !empty && overlaps_itself(t, stride))
        return fail(HEDDLE_BAD_STRIDE,
                    "%s is written, but with strides %lld, %lld, %lld for [%lld, %lld, %lld, %lld] it overlaps itself",
                    t->name, (long long)stride->b, (long long)stride->h, (long long)stride->s, (long long)b,
                    (long long)t->h, (long long)t->s, (long long)t->last);
    return HEDDLE_OK;
}

/* `t` is a constant where the list is unrolled, so that little is left of it. */
__attribute__((always_inline)) static inline heddle_status
resolve_field(const heddle_attention *a, const tensor_field *t, heddle_strides *stride) {
    const char *shape = attention_shape(t, a->features);
    const bool packed = shape == t->packed;
    const tensor_rule rule = {.name = t->stride_name,
                              .written = is_output(t),
                              .summed = is_summed(t),
                              .packed = packed,
                              .b = packed ? a->b : attention_extent(a, shape[0]),
                              .h = attention_extent(a, t->shape[1]),
                              .s = attention_extent(a, shape[packed ? 0 : 2]),
                              .last = attention_extent(a, t->shape[3])};
    return heddle__resolve_tensor(&rule, stride);
}

/* The tensors of options come last, and mostly there are none. */
static heddle_status resolve_option_strides(heddle_attention *a) {
#define STRIDED(id, name, stride, element, shape, packed, role, forward, backward, feature, option)                    \
    if (a->features & (feature))                                                                                       \
        TRY(resolve_field(a, &attention_fields[FIELD_##id], &a->stride##_stride));
#include "attention_fields.def"
    return HEDDLE_OK;
}

static heddle_status resolve_all_strides(heddle_attention *a) {
#define STRIDED(id, name, stride, element, shape, packed, role, forward, backward, feature, option)                    \
    if ((feature) == 0)                                                                                                \
        TRY(resolve_field(a, &attention_fields[FIELD_##id], &a->stride##_stride));
#include "attention_fields.def"
#define STRIDED(id, name, stride, element, shape, packed, role, forward, backward, feature, option) | (feature)
    const uint64_t options = 0
#include "attention_fields.def"
        ;
    return a->features & options ? resolve_option_strides(a) : HEDDLE_OK;
}

/* -------------------------------------------------------------------------------------------------- attention */

/* A sequence has no more rows than there are: a limit above that says nothing, but tiles, grids and workspaces would grow
 * with it. What keeps [b, h, sq, sk] and is written outside of the sequences, too, needs the limits as they are, and so do
 * lists of blocks, which go by them. */
static void tighten_limits(heddle_attention *a) {
    if (!(a->features & HEDDLE_VARLEN) || (a->features & (HEDDLE_BIAS | HEDDLE_WEIGHTS | HEDDLE_BLOCKS)))
        return;
    a->sq = min64(a->sq, a->total_q);
    if (!(a->features & HEDDLE_PAGES))
        a->sk = min64(a->sk, a->total_k);
}

static heddle_status check_products(const heddle_attention *a) {
    const double width = (double)(a->d + a->dv + 64), heads = (double)max64(1, a->b) * (double)a->h;
    const double rows = (double)max64(max64(1, a->sq), a->sk), packed = (double)max64(a->total_q, a->total_k);
    if (heads * rows * width > MAX_PRODUCT || (double)a->h * packed * width > MAX_PRODUCT)
        return fail(HEDDLE_OVERFLOW,
                    "b = %lld, h = %lld, sq = %lld, sk = %lld, d = %lld, dv = %lld%s: over 2^52 numbers to work on",
                    (long long)a->b, (long long)a->h, (long long)a->sq, (long long)a->sk, (long long)a->d,
                    (long long)a->dv, a->features & HEDDLE_VARLEN ? ", packed" : "");
    return HEDDLE_OK;
}

static heddle_status check_whole(const char *letter, int64_t whole, int64_t offset, int64_t part) {
    if (whole && whole - offset < part)
        return fail(HEDDLE_BAD_SIZE, "whole_s%s = %lld ends before %s_offset + s%s = %lld + %lld", letter,
                    (long long)whole, letter, letter, (long long)offset, (long long)part);
    return HEDDLE_OK;
}

/* What part of a larger problem this is. Afterwards whole_h is a number. */
static heddle_status check_part(heddle_attention *a) {
    if (!(a->q_offset | a->k_offset | a->h_offset | a->whole_sq | a->whole_sk | a->whole_h)) {
        a->whole_h = a->h;
        return HEDDLE_OK;
    }
    TRY(check_size("q_offset", a->q_offset, 0, MAX_SIZE));
    TRY(check_size("k_offset", a->k_offset, 0, MAX_SIZE));
    TRY(check_size("h_offset", a->h_offset, 0, MAX_SIZE));
    TRY(check_size("whole_sq", a->whole_sq, 0, MAX_SIZE));
    TRY(check_size("whole_sk", a->whole_sk, 0, MAX_SIZE));
    TRY(check_size("whole_h", a->whole_h, a->whole_h ? a->h : 0, MAX_SIZE));
    if ((a->features & (HEDDLE_VARLEN | HEDDLE_SEQLENS)) && (a->whole_sq || a->whole_sk))
        return fail(HEDDLE_BAD_COMBINATION,
                    "whole_sq = %lld, whole_sk = %lld, but with %s each sequence has its own length",
                    (long long)a->whole_sq, (long long)a->whole_sk,
                    a->features & HEDDLE_VARLEN ? "HEDDLE_VARLEN" : "HEDDLE_SEQLENS");
    TRY(check_whole("q", a->whole_sq, a->q_offset, a->sq));
    TRY(check_whole("k", a->whole_sk, a->k_offset, a->sk));
    if (a->h_offset && !a->whole_h)
        return fail(HEDDLE_BAD_COMBINATION, "h_offset = %lld, but whole_h is not set", (long long)a->h_offset);
    if (a->whole_h == 0)
        a->whole_h = a->h;
    if (multiply_add(a->b, a->whole_h, a->h_offset) < 0)
        return fail(HEDDLE_OVERFLOW, "b·whole_h + h_offset = %lld·%lld + %lld does not fit", (long long)a->b,
                    (long long)a->whole_h, (long long)a->h_offset);
    return HEDDLE_OK;
}

heddle_status heddle__check_pages(heddle_attention *a) {
    if (!(a->features & HEDDLE_PAGES)) {
        if (a->page | a->pages | a->table)
            return fail(HEDDLE_BAD_COMBINATION, "page = %lld, pages = %lld, table = %lld, but HEDDLE_PAGES is not set",
                        (long long)a->page, (long long)a->pages, (long long)a->table);
        return HEDDLE_OK;
    }
    if (a->page < 16 || a->page > 256 || (a->page & (a->page - 1)))
        return fail(HEDDLE_BAD_SIZE, "page = %lld is not 16, 32, 64, 128 or 256", (long long)a->page);
    TRY(check_size("pages", a->pages, 0, INT32_MAX));
    TRY(check_size("table", a->table, 0, MAX_SIZE));
    const int64_t needed = (a->sk + a->page - 1) / a->page;
    if (a->table && a->table < needed)
        return fail(HEDDLE_BAD_SIZE, "table = %lld: sk = %lld keys in pages of %lld need %lld", (long long)a->table,
                    (long long)a->sk, (long long)a->page, (long long)needed);
    if (!a->table)
        a->table = needed;
    if (multiply_add(a->b, a->table, 0) < 0)
        return fail(HEDDLE_OVERFLOW, "block_table: b·table = %lld·%lld does not fit", (long long)a->b,
                    (long long)a->table);
    if (a->total_k)
        return fail(HEDDLE_BAD_COMBINATION, "total_k = %lld, but with HEDDLE_PAGES keys are not packed",
                    (long long)a->total_k);
    return HEDDLE_OK;
}

static heddle_status check_blocks(const heddle_attention *a) {
    if (!(a->features & HEDDLE_BLOCKS)) {
        if (a->block_q | a->block_k | a->blocks_of_b | a->blocks_of_h)
            return fail(HEDDLE_BAD_COMBINATION,
                        "block_q = %d, block_k = %d, blocks_of_b = %d, blocks_of_h = %d, but HEDDLE_BLOCKS is not set",
                        a->block_q, a->block_k, a->blocks_of_b, a->blocks_of_h);
        return HEDDLE_OK;
    }
    if ((a->block_q != 64 && a->block_q != 128) || (a->block_k != 64 && a->block_k != 128))
        return fail(HEDDLE_BAD_SIZE, "block_q = %d, block_k = %d are not 64 or 128", a->block_q, a->block_k);
    if (a->blocks_of_b > 1 || a->blocks_of_h > 1)
        return fail(HEDDLE_BAD_VALUE, "blocks_of_b = %d, blocks_of_h = %d are not 0 or 1", a->blocks_of_b,
                    a->blocks_of_h);
    return HEDDLE_OK;
}

static heddle_status check_sizes(heddle_attention *a) {
    TRY(check_size("b", a->b, 0, MAX_SIZE));
    TRY(check_size("h", a->h, 1, MAX_SIZE));
    TRY(check_size("hk", a->hk, 0, MAX_SIZE));
    TRY(check_size("sq", a->sq, 0, MAX_SIZE));
    TRY(check_size("sk", a->sk, 0, MAX_SIZE));
    TRY(check_size("d", a->d, 1, MAX_HEAD_DIM));
    TRY(check_size("dv", a->dv, 0, MAX_HEAD_DIM));
    if (a->hk == 0)
        a->hk = a->h;
    if (a->dv == 0)
        a->dv = a->d;
    if (a->h % a->hk)
        return fail(HEDDLE_BAD_HEADS, "hk = %lld does not divide h = %lld", (long long)a->hk, (long long)a->h);
    if (multiply_add(a->b, a->h, 0) < 0)
        return fail(HEDDLE_OVERFLOW, "b·h = %lld·%lld does not fit", (long long)a->b, (long long)a->h);
    return HEDDLE_OK;
}

/* Factors of float32 scores: within this range they, their products with log2(e) and the reciprocal of softcap are normal numbers. */
#define LEAST_FACTOR 0x1p-100
#define MOST_FACTOR 0x1p100

static heddle_status check_factor(const char *name, double value) {
    if (!(fabs(value) >= LEAST_FACTOR && fabs(value) <= MOST_FACTOR))
        return fail(HEDDLE_BAD_VALUE,
                    "%s = %g is not from 2^-100 (%.3g) to 2^100 (%.3g) in magnitude, as float32 scores need", name,
                    value, LEAST_FACTOR, MOST_FACTOR);
    return HEDDLE_OK;
}

static heddle_status check_values(heddle_attention *a) {
    if (!isfinite(a->scale))
        return fail(HEDDLE_BAD_VALUE, "scale = %g is not a finite number", a->scale);
    if (!isfinite(a->softcap) || a->softcap < 0)
        return fail(HEDDLE_BAD_VALUE, "softcap = %g is not a finite number >= 0", a->softcap);
    if (!(a->dropout >= 0 && a->dropout < 1))
        return fail(HEDDLE_BAD_VALUE, "dropout = %g is not in [0, 1)", a->dropout);
    if (dropout_threshold(a->dropout) > 65535)
        return fail(HEDDLE_BAD_VALUE, "dropout = %.9g is 1 when rounded to a multiple of 1/65536", a->dropout);
    if (dropout_threshold(a->dropout) == 0)
        a->dropout = 0;
    const int64_t rows = a->q_offset + a->sq, keys = a->k_offset + a->sk, heads = a->h_offset + a->b * a->whole_h;
    if (a->dropout > 0 && (rows > UINT32_MAX || heads > UINT32_MAX || keys / DROPOUT_KEYS > UINT32_MAX))
        return fail(HEDDLE_BAD_SIZE,
                    "dropout counts rows, heads and eights of keys with 32 bits: sq = %lld, b·h = %lld, sk = %lld",
                    (long long)rows, (long long)heads, (long long)keys);
    if (a->scale == 0)
        a->scale = 1 / sqrt((double)a->d);
    if (a->dtype == HEDDLE_F64)
        return HEDDLE_OK;
    TRY(check_factor("scale", a->scale));
    if (a->softcap > 0) {
        TRY(check_factor("softcap", a->softcap));
        TRY(check_factor("scale / softcap", a->scale / a->softcap));
    }
    return HEDDLE_OK;
}

/* The union of the list's bits. */
#define FEATURE(name, bit) | (bit)
static const uint64_t attention_features = 0
#include "attention_fields.def"
    ;

static heddle_status check_features(heddle_attention *a) {
    if (a->features & ~attention_features)
        return fail(HEDDLE_BAD_ENUM, "features = 0x%llx has unknown bits 0x%llx", (unsigned long long)a->features,
                    (unsigned long long)(a->features & ~attention_features));
    if ((int)a->mask < 0 || (int)a->mask > LAST_MASK)
        return fail(HEDDLE_BAD_ENUM, "mask = %d is no heddle_mask (0 to %d)", (int)a->mask, LAST_MASK);
    if (!(a->features & HEDDLE_WINDOW) && (a->window_left || a->window_right))
        return fail(HEDDLE_BAD_COMBINATION, "window_left = %lld, window_right = %lld, but HEDDLE_WINDOW is not set",
                    (long long)a->window_left, (long long)a->window_right);
    if ((a->features & HEDDLE_ACCUMULATE) && (a->features & HEDDLE_WEIGHTS))
        return fail(HEDDLE_BAD_COMBINATION,
                    "HEDDLE_WEIGHTS are of all keys, but with HEDDLE_ACCUMULATE these are a part");
    if (!(a->features & HEDDLE_VARLEN) && (a->total_q || a->total_k))
        return fail(HEDDLE_BAD_COMBINATION, "total_q = %lld, total_k = %lld, but HEDDLE_VARLEN is not set",
                    (long long)a->total_q, (long long)a->total_k);
    TRY(check_size("total_q", a->total_q, 0, MAX_SIZE));
    TRY(check_size("total_k", a->total_k, 0, MAX_SIZE));
    if (!(a->features & HEDDLE_ALIBI) && a->alibi_stride_b)
        return fail(HEDDLE_BAD_COMBINATION, "alibi_stride_b = %lld, but HEDDLE_ALIBI is not set",
                    (long long)a->alibi_stride_b);
    if (a->alibi_stride_b < 0)
        return fail(HEDDLE_BAD_STRIDE, "alibi_stride_b = %lld is negative", (long long)a->alibi_stride_b);
    if (multiply_add(a->b, a->alibi_stride_b, a->h) < 0)
        return fail(HEDDLE_OVERFLOW, "alibi_slopes: b·alibi_stride_b = %lld·%lld does not fit", (long long)a->b,
                    (long long)a->alibi_stride_b);
    a->window_left = min64(a->window_left, MAX_SIZE); /* as good as unbounded, and sums of it fit */
    a->window_right = min64(a->window_right, MAX_SIZE);
    return HEDDLE_OK;
}

/* Also of programs that were built when it ended earlier: what is behind is 0 then. */
static heddle_status take_description(const heddle_attention *desc, heddle_attention *a) {
    const size_t before_parts = offsetof(heddle_attention, q_offset), before_pages = offsetof(heddle_attention, page),
                 before_limit = offsetof(heddle_attention, multiprocessors);
    if (!desc)
        return check_descriptor("heddle_attention", desc, 0, sizeof *desc);
    if (desc->size != before_parts && desc->size != before_pages && desc->size != before_limit) {
        TRY(check_descriptor("heddle_attention", desc, desc->size, sizeof *desc));
        *a = *desc;
        return HEDDLE_OK;
    }
    memset(a, 0, sizeof *a);
    memcpy(a, desc, desc->size);
    a->size = sizeof *a;
    return HEDDLE_OK;
}

heddle_status heddle__resolve_attention(const heddle_attention *desc, heddle_pass pass, attention_plan *plan) {
    TRY(take_description(desc, &plan->a));
    plan->pass = pass;
    heddle_attention *a = &plan->a;
    TRY(check_enums("heddle_attention", (int)a->dtype, (int)a->device, (int)pass));
    TRY(check_sizes(a));
    TRY(check_features(a));
    TRY(heddle__check_pages(a));
    TRY(check_blocks(a));
    TRY(check_part(a));
    TRY(check_size("multiprocessors", a->multiprocessors, 0, INT32_MAX));
    TRY(resolve_all_strides(a));
    tighten_limits(a);
    TRY(check_values(a));
    TRY(check_products(a));
    if ((a->features & HEDDLE_PAGES) && pass == HEDDLE_BACKWARD)
        return fail(HEDDLE_UNSUPPORTED, "HEDDLE_PAGES has no backward");
    if ((a->features & HEDDLE_E4M3) && pass == HEDDLE_BACKWARD)
        return fail(HEDDLE_UNSUPPORTED, "HEDDLE_E4M3 has no backward");
    if (a->dtype == HEDDLE_F64 && a->device != HEDDLE_REF)
        return fail(HEDDLE_UNSUPPORTED, "dtype float64 runs on HEDDLE_REF only, not on device %d", (int)a->device);
    return HEDDLE_OK;
}

heddle_status heddle__resolve_merge(const heddle_merge *desc, heddle_merge *m) {
    TRY(check_descriptor("heddle_merge", desc, desc ? desc->size : 0, sizeof *desc));
    *m = *desc;
    TRY(check_enums("heddle_merge", (int)m->dtype, (int)m->device, HEDDLE_FORWARD));
    TRY(check_size("b", m->b, 0, MAX_SIZE));
    TRY(check_size("h", m->h, 1, MAX_SIZE));
    TRY(check_size("s", m->s, 0, MAX_SIZE));
    TRY(check_size("dv", m->dv, 1, MAX_HEAD_DIM));
    tensor_rule rule = {.name = "o", .written = true, .b = m->b, .h = m->h, .s = m->s, .last = m->dv};
    TRY(heddle__resolve_tensor(&rule, &m->o_stride));
    rule.name = "other";
    rule.written = false;
    TRY(heddle__resolve_tensor(&rule, &m->other_stride));
    if ((double)max64(1, m->b) * (double)m->h * (double)m->s * (double)m->dv > MAX_PRODUCT)
        return fail(HEDDLE_OVERFLOW, "b = %lld, h = %lld, s = %lld, dv = %lld: over 2^52 numbers to work on",
                    (long long)m->b, (long long)m->h, (long long)m->s, (long long)m->dv);
    if (m->dtype == HEDDLE_F64 && m->device != HEDDLE_REF)
        return fail(HEDDLE_UNSUPPORTED, "dtype float64 runs on HEDDLE_REF only, not on device %d", (int)m->device);
    return HEDDLE_OK;
}

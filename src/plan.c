/* SPDX-License-Identifier: Apache-2.0
 * The rules of a description, and its defaults. Pure: no pointer to data, no device, no environment.
 * What tiles and kernels follow from it is each backend's part (backend.h). */
#include "plan.h"

#include "fields.h"
#include "mask.h"
#include "status.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define MAX_SIZE (INT64_C(1) << 40)
#define MAX_HEAD_DIM 512
#define MAX_ELEMENTS (INT64_MAX / 8)
/* Of the products of sizes that backends form, to which up to a thousand bytes of a workspace belong. */
#define MAX_PRODUCT 0x1p52

static heddle_status check_enums(const char *what, int dtype, int device, int pass) {
    if (dtype < HEDDLE_F32 || dtype > HEDDLE_F64)
        return fail(HEDDLE_BAD_ENUM, "%s.dtype = %d is no heddle_dtype (0 to 3)", what, dtype);
    if (device < HEDDLE_CPU || device > HEDDLE_CUDA)
        return fail(HEDDLE_BAD_ENUM, "%s.device = %d is no heddle_device (0 to 2)", what, device);
    if (pass < HEDDLE_FORWARD || pass > HEDDLE_BACKWARD)
        return fail(HEDDLE_BAD_ENUM, "pass = %d is no heddle_pass (0 or 1)", pass);
    return HEDDLE_OK;
}

static heddle_status check_descriptor(const char *what, const void *desc, size_t size, size_t known) {
    if (!desc)
        return fail(HEDDLE_NULL_POINTER, "the pointer to %s is NULL", what);
    if (size != known)
        return fail(HEDDLE_BAD_DESCRIPTOR_SIZE, "%s.size = %zu, but this library (%s) knows %zu bytes: %s", what, size,
                    heddle_version_string(), known,
                    size < known ? "was size set to sizeof?" : "it is older than the header you compiled with");
    return HEDDLE_OK;
}

static heddle_status check_size(const char *name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        return fail(HEDDLE_BAD_SIZE, "%s = %lld is outside %lld to %lld", name, (long long)value, (long long)low,
                    (long long)high);
    return HEDDLE_OK;
}

/* a·b + c of non-negative numbers, or -1 when it does not fit. */
static int64_t multiply_add(int64_t a, int64_t b, int64_t c) {
    int64_t r;
    if (a < 0 || c < 0 || __builtin_mul_overflow(a, b, &r) || __builtin_add_overflow(r, c, &r) || r > MAX_ELEMENTS)
        return -1;
    return r;
}

int64_t heddle__span(heddle_strides t, int64_t b, int64_t h, int64_t s, int64_t last) {
    if (b == 0 || h == 0 || s == 0 || last == 0)
        return 0;
    return multiply_add(b - 1, t.b, multiply_add(h - 1, t.h, multiply_add(s - 1, t.s, last)));
}

/* ---------------------------------------------------------------------------------------------------- strides */

typedef struct tensor_rule {
    const char *name;
    bool written, summed; /* summed where its stride is 0 */
    bool packed;          /* its rows are [total, h, last] */
    int64_t b, h, s, last;
} tensor_rule;

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

static heddle_status resolve_tensor(const tensor_rule *t, heddle_strides *stride) {
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
    return resolve_tensor(&rule, stride);
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

/* Afterwards table is a number. */
static heddle_status check_pages(heddle_attention *a) {
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
#define FEATURE(name, bit) | (bit)
static const uint64_t norm_linear_features = 0
#include "norm_linear_fields.def"
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
    TRY(check_pages(a));
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
    TRY(resolve_tensor(&rule, &m->o_stride));
    rule.name = "other";
    rule.written = false;
    TRY(resolve_tensor(&rule, &m->other_stride));
    if ((double)max64(1, m->b) * (double)m->h * (double)m->s * (double)m->dv > MAX_PRODUCT)
        return fail(HEDDLE_OVERFLOW, "b = %lld, h = %lld, s = %lld, dv = %lld: over 2^52 numbers to work on",
                    (long long)m->b, (long long)m->h, (long long)m->s, (long long)m->dv);
    if (m->dtype == HEDDLE_F64 && m->device != HEDDLE_REF)
        return fail(HEDDLE_UNSUPPORTED, "dtype float64 runs on HEDDLE_REF only, not on device %d", (int)m->device);
    return HEDDLE_OK;
}

/* ----------------------------------------------------------------------------------------------------- append */

/* The pages of a cache are those of attention. */
static heddle_status check_cache(heddle_append *a) {
    heddle_attention pages = {
        .features = a->features, .b = a->b, .sk = a->sk, .page = a->page, .pages = a->pages, .table = a->table};
    TRY(check_size("caches", a->caches, 0, INT32_MAX));
    TRY(check_pages(&pages));
    a->table = pages.table;
    if ((a->features & HEDDLE_PAGES) && a->caches)
        return fail(HEDDLE_BAD_COMBINATION, "caches = %lld, but with HEDDLE_PAGES block_table says where rows lie",
                    (long long)a->caches);
    return HEDDLE_OK;
}

static heddle_status check_append_sizes(heddle_append *a) {
    const uint64_t known = HEDDLE_VARLEN | HEDDLE_PAGES | HEDDLE_E4M3;
    const bool packed = a->features & HEDDLE_VARLEN;
    if (a->features & ~known)
        return fail(HEDDLE_BAD_ENUM, "features = 0x%llx has bits 0x%llx that append does not know",
                    (unsigned long long)a->features, (unsigned long long)(a->features & ~known));
    TRY(check_size("b", a->b, 0, INT32_MAX));
    TRY(check_size("h", a->h, 0, MAX_SIZE));
    TRY(check_size("hk", a->hk, 1, MAX_SIZE));
    TRY(check_size("s", a->s, 0, MAX_SIZE));
    TRY(check_size("sq", a->sq, 0, a->h && !packed ? MAX_SIZE : 0));
    TRY(check_size("sk", a->sk, 0, INT32_MAX));
    TRY(check_size("d", a->d, 1, MAX_HEAD_DIM));
    TRY(check_size("dv", a->dv, 0, MAX_HEAD_DIM));
    TRY(check_size("total", a->total, 0, packed ? INT32_MAX : 0));
    if (a->dv == 0)
        a->dv = a->d;
    return check_cache(a);
}

static heddle_status check_rotary(heddle_append *a) {
    if ((int)a->table_dtype != HEDDLE_F32 && a->table_dtype != a->dtype)
        return fail(HEDDLE_BAD_ENUM, "table_dtype = %d is neither float32 nor dtype = %d", (int)a->table_dtype,
                    (int)a->dtype);
    if (a->interleaved > 1 || a->together > 1 || a->reserved[0] || a->reserved[1])
        return fail(HEDDLE_BAD_VALUE, "interleaved = %d, together = %d, reserved = {%d, %d} are not 0 or 1, and 0",
                    a->interleaved, a->together, a->reserved[0], a->reserved[1]);
    TRY(check_size("rotary", a->rotary, 0, a->d));
    if (a->rotary % 2)
        return fail(HEDDLE_BAD_SIZE, "rotary = %lld is odd, but elements are rotated in pairs", (long long)a->rotary);
    if (!a->rotary && (a->positions | a->table_stride || a->interleaved || a->together))
        return fail(HEDDLE_BAD_COMBINATION,
                    "positions = %lld, table_stride = %lld, interleaved = %d, together = %d, but rotary is 0",
                    (long long)a->positions, (long long)a->table_stride, a->interleaved, a->together);
    if (!a->rotary)
        return HEDDLE_OK;
    TRY(check_size("positions", a->positions, a->sk, MAX_SIZE));
    if (!a->table_stride)
        a->table_stride = a->rotary / 2;
    if (a->table_stride < 0)
        return fail(HEDDLE_BAD_STRIDE, "table_stride = %lld is negative", (long long)a->table_stride);
    if (multiply_add(a->positions, a->table_stride, a->rotary) < 0)
        return fail(HEDDLE_OVERFLOW, "cos: positions·table_stride = %lld·%lld does not fit", (long long)a->positions,
                    (long long)a->table_stride);
    return HEDDLE_OK;
}

static heddle_status resolve_append_strides(heddle_append *a) {
    const bool packed = a->features & HEDDLE_VARLEN, in_pages = a->features & HEDDLE_PAGES;
    tensor_rule rule = {.name = "k_new", .packed = packed, .b = a->b, .h = a->hk, .s = packed ? a->total : a->s};
    rule.last = a->d;
    TRY(resolve_tensor(&rule, &a->k_new_stride));
    rule.name = "v_new";
    rule.last = a->dv;
    TRY(resolve_tensor(&rule, &a->v_new_stride));
    tensor_rule cache = {.name = "v", .written = true, .h = a->hk, .last = a->dv};
    cache.b = in_pages ? a->pages : a->caches ? a->caches : a->b;
    cache.s = in_pages ? a->page : a->sk;
    TRY(resolve_tensor(&cache, &a->v_stride));
    cache.name = "k";
    cache.last = a->d;
    TRY(resolve_tensor(&cache, &a->k_stride));
    rule.h = a->h;
    rule.last = a->d;
    rule.s = packed ? a->total : a->sq;
    rule.name = "q";
    TRY(resolve_tensor(&rule, &a->q_stride));
    rule.name = "q_out";
    rule.written = true;
    return resolve_tensor(&rule, &a->q_out_stride);
}

heddle_status heddle__resolve_append(const heddle_append *desc, heddle_append *a) {
    TRY(check_descriptor("heddle_append", desc, desc ? desc->size : 0, sizeof *desc));
    *a = *desc;
    TRY(check_enums("heddle_append", (int)a->dtype, (int)a->device, HEDDLE_FORWARD));
    TRY(check_append_sizes(a));
    TRY(check_rotary(a));
    TRY(resolve_append_strides(a));
    const double rows = fmax((double)max64(a->s, a->sq) * (double)a->b, (double)a->total);
    if (rows * ((double)a->hk * (double)(a->d + a->dv) + (double)a->h * (double)a->d) > MAX_PRODUCT)
        return fail(HEDDLE_OVERFLOW, "b = %lld, h = %lld, hk = %lld, s = %lld, sq = %lld: over 2^52 numbers to write",
                    (long long)a->b, (long long)a->h, (long long)a->hk, (long long)a->s, (long long)a->sq);
    if (a->dtype == HEDDLE_F64 && a->device != HEDDLE_REF)
        return fail(HEDDLE_UNSUPPORTED, "dtype float64 runs on HEDDLE_REF only, not on device %d", (int)a->device);
    return HEDDLE_OK;
}

/* ------------------------------------------------------------------------------------------------ norm-linear */

static heddle_status resolve_row_stride(const heddle_norm_linear *a, const tensor_field *t, int64_t *stride) {
    const char *name = t->stride_name;
    const int64_t rows = norm_linear_extent(a, t->shape[0]), last = norm_linear_extent(a, t->shape[1]);
    if (*stride < 0)
        return fail(HEDDLE_BAD_STRIDE, "%s_stride = %lld is negative", name, (long long)*stride);
    if (*stride == 0)
        *stride = last;
    if (is_output(t) && *stride < last && rows > 1)
        return fail(HEDDLE_BAD_STRIDE, "%s_stride = %lld is less than a row's %lld: %s would overlap itself", name,
                    (long long)*stride, (long long)last, name);
    if (rows > 0 && multiply_add(rows - 1, *stride, last) < 0)
        return fail(HEDDLE_OVERFLOW, "%s: %lld rows of %lld with stride %lld are over 2^60 elements", name,
                    (long long)rows, (long long)last, (long long)*stride);
    return HEDDLE_OK;
}

/* Also of programs that were built when it ended in front of the activation, of the residual, of z, of what is prepared or of the limit. */
static heddle_status take_norm_linear(const heddle_norm_linear *desc, heddle_norm_linear *a) {
    const size_t before_activation = offsetof(heddle_norm_linear, activation), size = desc ? desc->size : 0;
    if (size != before_activation && size != offsetof(heddle_norm_linear, residual_stride) &&
        size != offsetof(heddle_norm_linear, z_stride) && size != offsetof(heddle_norm_linear, prepared_bytes) &&
        size != offsetof(heddle_norm_linear, multiprocessors))
        TRY(check_descriptor("heddle_norm_linear", desc, size, sizeof *desc));
    memset(a, 0, sizeof *a);
    memcpy(a, desc, size);
    a->size = sizeof *a;
    return HEDDLE_OK;
}

static heddle_status check_activation(const heddle_norm_linear *a) {
    if ((int)a->activation < 0 || (int)a->activation > LAST_ACTIVATION)
        return fail(HEDDLE_BAD_ENUM, "activation = %d is no heddle_activation (0 to %d)", (int)a->activation,
                    LAST_ACTIVATION);
    if (a->reserved1)
        return fail(HEDDLE_BAD_ENUM, "reserved1 = %d, but must be 0", a->reserved1);
    if (!(a->features & HEDDLE_ACTIVATION) != !a->activation)
        return fail(HEDDLE_BAD_COMBINATION, "activation = %d, but HEDDLE_ACTIVATION is %s", (int)a->activation,
                    a->activation ? "not set" : "set");
    return HEDDLE_OK;
}

static heddle_status check_prepared(const heddle_norm_linear *a) {
    if (!(a->features & HEDDLE_PREPARED) && a->prepared_bytes)
        return fail(HEDDLE_BAD_COMBINATION, "prepared_bytes = %lld, but HEDDLE_PREPARED is not set",
                    (long long)a->prepared_bytes);
    return check_size("prepared_bytes", a->prepared_bytes, 0, INT64_MAX);
}

heddle_status heddle__resolve_norm_linear(const heddle_norm_linear *desc, heddle_pass pass, norm_linear_plan *plan) {
    TRY(take_norm_linear(desc, &plan->a));
    plan->pass = pass;
    plan->prepared = 0;
    plan->reads_prepared = false;
    heddle_norm_linear *a = &plan->a;
    TRY(check_enums("heddle_norm_linear", (int)a->dtype, (int)a->device, (int)pass));
    if ((int)a->norm < 0 || (int)a->norm > LAST_NORM)
        return fail(HEDDLE_BAD_ENUM, "norm = %d is no heddle_norm (0 to %d)", (int)a->norm, LAST_NORM);
    if (a->features & ~norm_linear_features)
        return fail(HEDDLE_BAD_ENUM, "features = 0x%llx has bits 0x%llx that norm-linear does not know",
                    (unsigned long long)a->features, (unsigned long long)(a->features & ~norm_linear_features));
    if (a->reserved0)
        return fail(HEDDLE_BAD_ENUM, "reserved0 = %d, but must be 0", a->reserved0);
    TRY(check_size("m", a->m, 0, MAX_SIZE));
    TRY(check_size("k", a->k, 1, MAX_SIZE));
    TRY(check_size("n", a->n, 1, MAX_SIZE));
    if (!isfinite(a->eps) || a->eps < 0)
        return fail(HEDDLE_BAD_VALUE, "eps = %g is not a finite number >= 0", a->eps);
    if (a->eps != 0 && a->norm == HEDDLE_NO_NORM)
        return fail(HEDDLE_BAD_COMBINATION, "eps = %g, but HEDDLE_NO_NORM has no variance to add it to", a->eps);
    if (a->norm == HEDDLE_NO_NORM && (a->features & HEDDLE_Z))
        return fail(HEDDLE_BAD_COMBINATION, "HEDDLE_Z is set, but with HEDDLE_NO_NORM z is x");
    if (a->eps == 0)
        a->eps = 1e-5;
    TRY(check_activation(a));
    TRY(check_prepared(a));
    TRY(check_size("multiprocessors", a->multiprocessors, 0, INT32_MAX));
#define STRIDED(id, name, stride, ...)                                                                                 \
    TRY(resolve_row_stride(a, &norm_linear_fields[FIELD_N_##id], &a->stride##_stride));
#include "norm_linear_fields.def"
    const double m = (double)a->m + 64, k = (double)a->k + 64, n = (double)norm_linear_extent(a, 'N') + 64;
    if (m * k > MAX_PRODUCT || m * n > MAX_PRODUCT || n * k > MAX_PRODUCT)
        return fail(HEDDLE_OVERFLOW, "m = %lld, k = %lld, n = %lld: over 2^52 numbers to work on", (long long)a->m,
                    (long long)a->k, (long long)a->n);
    if (a->dtype == HEDDLE_F64 && a->device != HEDDLE_REF)
        return fail(HEDDLE_UNSUPPORTED, "dtype float64 runs on HEDDLE_REF only, not on device %d", (int)a->device);
    return HEDDLE_OK;
}

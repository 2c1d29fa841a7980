/* SPDX-License-Identifier: Apache-2.0
 * The rules of a description of append, and its defaults. Pure. */
#include "mask.h"
#include "rules.h"

#include <math.h>

/* The pages of a cache are those of attention. */
static heddle_status check_cache(heddle_append *a) {
    heddle_attention pages = {
        .features = a->features, .b = a->b, .sk = a->sk, .page = a->page, .pages = a->pages, .table = a->table};
    TRY(check_size("caches", a->caches, 0, INT32_MAX));
    TRY(heddle__check_pages(&pages));
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
    TRY(heddle__resolve_tensor(&rule, &a->k_new_stride));
    rule.name = "v_new";
    rule.last = a->dv;
    TRY(heddle__resolve_tensor(&rule, &a->v_new_stride));
    tensor_rule cache = {.name = "v", .written = true, .h = a->hk, .last = a->dv};
    cache.b = in_pages ? a->pages : a->caches ? a->caches : a->b;
    cache.s = in_pages ? a->page : a->sk;
    TRY(heddle__resolve_tensor(&cache, &a->v_stride));
    cache.name = "k";
    cache.last = a->d;
    TRY(heddle__resolve_tensor(&cache, &a->k_stride));
    rule.h = a->h;
    rule.last = a->d;
    rule.s = packed ? a->total : a->sq;
    rule.name = "q";
    TRY(heddle__resolve_tensor(&rule, &a->q_stride));
    rule.name = "q_out";
    rule.written = true;
    return heddle__resolve_tensor(&rule, &a->q_out_stride);
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

/* SPDX-License-Identifier: Apache-2.0
 * CUDA's plans of sizes of every magnitude: what is accepted has a workspace that can be true and launches that a grid
 * holds. Pure: no driver is asked, and none is needed. */
#include "common.h"

#include "cuda/attention/attention.h"
#include "cuda/attention/kernels.h"
#include "cuda/attention/sm90/contract.h"
#include "cuda/norm_linear/contract.h"
#include "cuda/norm_linear/norm_linear.h"
#include "cuda/norm_linear/sm90/contract.h"
#include "mask.h"
#include "plan.h"

#include <stdlib.h>
#include <string.h>

enum { CASES = 100000 };

static int64_t any_size(rng *r) {
    return rng_chance(r, 0.3) ? rng_between(r, 0, 4) : (INT64_C(1) << rng_between(r, 0, 40)) - rng_between(r, 0, 1);
}

static heddle_attention any_attention(rng *r) {
    heddle_attention a = {.size = sizeof a, .device = HEDDLE_CUDA};
    a.dtype = (heddle_dtype)rng_between(r, 0, 2);
    a.b = any_size(r), a.h = any_size(r), a.sq = any_size(r), a.sk = any_size(r);
    a.d = rng_between(r, 1, 512), a.dv = rng_between(r, 0, 512);
    a.features = rng_next(r) & (rng_chance(r, 0.5) ? 0x7ff : 0xf7f); /* weights, or accumulation */
    if (rng_chance(r, 0.3)) {
        a.q_offset = any_size(r), a.k_offset = any_size(r);
        a.dropout = rng_chance(r, 0.3) ? 0.5 : 0;
    }
    a.mask = (heddle_mask)rng_between(r, 0, LAST_MASK);
    if (a.features & HEDDLE_VARLEN)
        a.total_q = any_size(r), a.total_k = any_size(r);
    if (rng_chance(r, 0.1)) {
        a.features |= HEDDLE_PAGES;
        a.page = INT64_C(16) << rng_between(r, 0, 4);
        a.pages = rng_between(r, 0, INT32_MAX);
        a.total_k = 0;
    }
    if (rng_chance(r, 0.1))
        a.features |= HEDDLE_E4M3;
    if (rng_chance(r, 0.2)) {
        a.features |= rng_chance(r, 0.5) ? HEDDLE_SEGMENTS : HEDDLE_BLOCKS;
        a.block_q = a.block_k = a.features & HEDDLE_BLOCKS ? 64 : 0;
        a.blocks_of_h = a.features & HEDDLE_BLOCKS && rng_chance(r, 0.5);
    }
    if (rng_chance(r, 0.5))
        a.bias_stride = a.dbias_stride = a.bool_mask_stride = (heddle_strides){HEDDLE_BROADCAST, 0, 0};
    a.multiprocessors = rng_chance(r, 0.5) ? rng_between(r, 1, 140) : 0;
    return a;
}

/* Addresses, which nobody looks at. */
static char *const aligned = (char *)4096, *const skewed = (char *)4104, *const space = (char *)(1 << 20);

/* What is made of segments and lists, which others than the planned family read where pointers lie as it cannot have them. */
static void check_seen(const attention_params *p, size_t workspace) {
    const mask_map *const maps[] = {&p->seen_by_queries, &p->seen_of_keys};
    const char *const end = space + workspace;
    int there = p->from.bytes != NULL;
    for (int x = 0; x < 2; x++)
        if (maps[x]->kinds) {
            assert_true((const char *)maps[x]->kinds >= space &&
                        (const char *)maps[x]->bits >= (const char *)maps[x]->kinds);
            assert_true((const char *)(maps[x]->bits + (int64_t)p->from.maps * maps[x]->lines * maps[x]->words) <= end);
            there++;
        }
    if (p->from.bytes)
        assert_true(
            (const char *)p->from.bytes + (int64_t)p->from.maps * p->from.shape.lines * p->from.shape.line_step <= end);
    assert_true(there && p->t.bool_mask == p->from.bytes);
}

/* Keys that are collected lie in the workspace, one behind the other, and are those that the next launches read. Are there such? */
static bool check_collected(const attention_job *job, size_t workspace) {
    const attention_params *p = &job->params.p;
    const collect_params *q = &job->collect;
    const char *const end = space + workspace;
    for (int x = 1; x < job->count; x++)
        assert_false(job->launches[x].collects);
    if (!job->count || !job->launches[0].collects)
        return false;
    const int64_t rows = q->a.hk * q->a.b * q->rows;
    const char *const k = q->k.to, *const v = q->v.to;
    assert_true(k >= space && k + rows * q->k.units * 16 <= v && v + rows * q->v.units * 16 <= end);
    assert_true(p->t.k == k && p->t.v == v && ((uintptr_t)k | (uintptr_t)v) % 16 == 0);
    assert_true(q->rows >= q->a.sk && rows * (q->k.units + q->v.units) * 16 <= MOST_COLLECTED);
    assert_int_equal(p->a.k_stride.h, q->a.b * q->rows * q->k.units * 8);
    if (q->pages)
        assert_true(p->t.block_table == q->pages && (const char *)(q->pages + q->a.b * (q->rows / q->page)) <= end &&
                    p->a.pages == q->a.b * p->a.table && p->a.table * q->page == q->rows);
    else
        assert_true(q->rows == q->a.sk && p->t.bool_mask == p->from.bytes && (p->a.features & HEDDLE_BOOL_MASK));
    if (q->starts)
        assert_true(p->t.cu_seqlens_k == q->starts && (const char *)(q->starts + q->a.b + 1) <= end &&
                    p->a.total_k == q->a.b * q->rows);
    if (q->lengths)
        assert_true(p->t.seqlens_k == q->lengths && (const char *)(q->lengths + q->a.b) <= end);
    const bool packed = q->a.features & HEDDLE_VARLEN;
    assert_int_equal(q->starts != NULL, packed && !q->pages);
    assert_int_equal(q->lengths != NULL, packed && q->pages && !(q->a.features & HEDDLE_PAGES));
    return true;
}

/* Blocks of these stay until the last tile is done: no more of them than those multiprocessors hold that are not others'. */
static int check_limit(const attention_launch *l, int64_t limit, const cuda_facts *device) {
    const kernel_row *k = &heddle__cuda_attention_kernels[l->kernel];
    const bool stays = k->family == FAMILY_sm90 && k->dtype != HEDDLE_F32 &&
                       (k->pass == PASS_fwd || k->pass == PASS_bwd || k->pass == PASS_dkdv || k->pass == PASS_dq);
    if (!limit || limit >= device->multiprocessors || !stays)
        return 0;
    assert_true(l->grid <= limit * ((device->shared_bytes + 1024) / (l->shared_bytes + 1024)));
    return 1;
}

/* Some blocks make dK, the others dV. */
static void check_both(const attention_job *job) {
    for (int x = 0; x < job->count; x++) {
        const attention_launch *l = &job->launches[x];
        const kernel_row *k = &heddle__cuda_attention_kernels[l->kernel];
        if (k->family == FAMILY_sm90 && k->dtype != HEDDLE_F32 && k->pass == PASS_dkdv && !sm90_makes_both(k->dim))
            assert_true(job->params.p.blocks_of_dk > 0 && job->params.p.blocks_of_dk < l->grid);
    }
}

static bool check_attention_plan(const heddle_attention *a, heddle_pass pass, const cuda_facts *device) {
    attention_plan plan = {.threads = 1};
    static attention_job job;
    if (heddle__resolve_attention(a, pass, &plan) != HEDDLE_OK ||
        heddle__cuda_plan_attention(&plan, device) != HEDDLE_OK)
        return false;
    const double rows = (double)plan.a.h * (double)(a->features & HEDDLE_VARLEN ? a->total_q : a->b * plan.a.sq);
    assert_true(plan.workspace < INT64_MAX && (pass == HEDDLE_FORWARD || (double)plan.workspace >= 12 * rows));
    heddle_attention_data t = {
        .size = sizeof t, .q = aligned, .k = aligned, .v = aligned, .o = aligned, .lse = aligned};
    t.dq = t.dk = t.dv = aligned;
    t.dout = plan.workspace % 128 ? aligned : skewed;
    t.dbias = a->features & HEDDLE_BIAS ? aligned : NULL;
    t.dsinks = a->features & HEDDLE_SINKS ? aligned : NULL;
    t.weights = a->features & HEDDLE_WEIGHTS && pass == HEDDLE_FORWARD ? aligned : NULL;
    heddle__cuda_attention_job(&plan, device, &t, space, &job);
    for (int x = 0; x < job.count; x++)
        assert_true(job.launches[x].grid > 0 && job.launches[x].grid <= INT32_MAX);
    check_both(&job);
    const bool collected = check_collected(&job, plan.workspace);
    if (a->features & (HEDDLE_SEGMENTS | HEDDLE_BLOCKS) || (collected && !job.collect.pages))
        check_seen(&job.params.p, plan.workspace);
    t.q = skewed; /* for which another may stand in */
    heddle__cuda_attention_job(&plan, device, &t, space, &job);
    check_collected(&job, plan.workspace);
    if (a->features & (HEDDLE_SEGMENTS | HEDDLE_BLOCKS))
        check_seen(&job.params.p, plan.workspace);
    return true;
}

/* A boolean mask of so many tiles that a grid would wrap is refused, and one that is repeated is not. */
static void test_masks_that_are_too_large(void **state) {
    (void)state;
    const cuda_facts device = {"a GPU", 132, 232448, true, SMALL_CHOSEN};
    for (int repeated = 0; repeated < 2; repeated++)
        for (int pass = 0; pass < 2; pass++) {
            heddle_attention a = {.size = sizeof a, .dtype = HEDDLE_BF16, .device = HEDDLE_CUDA, .b = 8, .h = 32};
            a.sq = a.sk = INT64_C(1) << 17;
            a.d = 64;
            a.features = HEDDLE_BOOL_MASK;
            a.bool_mask_stride = repeated ? (heddle_strides){0, 0, a.sk} : (heddle_strides){0};
            attention_plan plan = {.threads = 1};
            assert_int_equal(heddle__resolve_attention(&a, (heddle_pass)pass, &plan), HEDDLE_OK);
            assert_int_equal(heddle__cuda_plan_attention(&plan, &device), repeated ? HEDDLE_OK : HEDDLE_UNSUPPORTED);
            assert_true(repeated || strstr(heddle_last_message(), "bool_mask"));
        }
}

static void test_attention(void **state) {
    (void)state;
    rng r = {test_seed(3)};
    int accepted = 0;
    for (int x = 0; x < CASES; x++) {
        const cuda_facts device = {"a GPU", x % 3 ? 132 : 1, 232448, x % 2, (int)rng_between(&r, 0, 2)};
        const heddle_attention a = any_attention(&r);
        for (int pass = 0; pass < 2; pass++)
            accepted += check_attention_plan(&a, (heddle_pass)pass, &device);
    }
    assert_true(accepted > CASES / 10);
    /* Many rows of no sequence, and parts of them in each of 256 shares of the keys. */
    heddle_attention a = {.size = sizeof a, .dtype = HEDDLE_F16, .device = HEDDLE_CUDA, .b = 2, .h = 8191};
    a.sk = 32768, a.d = 66, a.dv = 319, a.total_q = UINT32_MAX, a.total_k = 262143;
    a.features = HEDDLE_VARLEN | HEDDLE_BIAS;
    a.bias_stride = a.dbias_stride = (heddle_strides){HEDDLE_BROADCAST, 0, 0};
    check_attention_plan(&a, HEDDLE_FORWARD, &(cuda_facts){"a GPU", 132, 232448, false, 0});
}

/* Problems that Hopper's kernels take, one option each, with a part of the device. */
static void test_limit(void **state) {
    (void)state;
    static const uint64_t options[] = {0,
                                       HEDDLE_VARLEN,
                                       HEDDLE_SEQLENS,
                                       HEDDLE_BOOL_MASK,
                                       HEDDLE_BLOCKS,
                                       HEDDLE_DETERMINISTIC,
                                       HEDDLE_ACCUMULATE,
                                       HEDDLE_ALIBI,
                                       HEDDLE_VARLEN | HEDDLE_BIAS};
    static const int64_t dims[] = {64, 96, 128, 192, 256, 512};
    const cuda_facts device = {"a GPU", 132, 232448, true, SMALL_NEVER};
    static attention_job job;
    rng r = {test_seed(5)};
    int checked = 0;
    for (int x = 0; x < 20000; x++) {
        const int64_t s = rng_between(&r, 1, rng_chance(&r, 0.5) ? 9000 : 600);
        heddle_attention a = attention_desc(rng_chance(&r, 0.5) ? HEDDLE_BF16 : HEDDLE_F16, rng_between(&r, 1, 30),
                                            rng_between(&r, 1, 20), 1, s, s, dims[rng_between(&r, 0, 5)], 0);
        a.device = HEDDLE_CUDA;
        a.features = options[rng_between(&r, 0, (int64_t)COUNT(options) - 1)];
        a.block_q = a.block_k = a.features & HEDDLE_BLOCKS ? 64 : 0;
        a.total_q = a.total_k = a.features & HEDDLE_VARLEN ? a.b * s : 0;
        a.multiprocessors = rng_chance(&r, 0.1) ? 1 : rng_between(&r, 1, 140);
        for (int pass = 0; pass < 2; pass++) {
            attention_plan plan = {.threads = 1};
            heddle_attention_data t = {.size = sizeof t, .q = aligned, .k = aligned, .v = aligned, .o = aligned};
            t.lse = t.dq = t.dk = t.dv = aligned;
            t.dout = aligned;
            assert_int_equal(heddle__resolve_attention(&a, (heddle_pass)pass, &plan), HEDDLE_OK);
            assert_int_equal(heddle__cuda_plan_attention(&plan, &device), HEDDLE_OK);
            heddle__cuda_attention_job(&plan, &device, &t, space, &job);
            for (int y = 0; y < job.count; y++)
                checked += check_limit(&job.launches[y], a.multiprocessors, &device);
            check_both(&job);
        }
    }
    assert_true(checked > 20000);
}

/* Keys in pages go to the families that can read them, whichever is asked for. */
static void test_pages(void **state) {
    (void)state;
    static const struct {
        heddle_dtype dtype;
        int64_t sq, d;
        size_t shared;
        const char *kernel;
        double softcap;
        uint64_t more;
    } cases[] = {{HEDDLE_BF16, 1, 128, 232448, "heddle_attention_fwd_bf16_d128_paged_sm80", 0, 0},
                 {HEDDLE_F16, 4, 40, 232448, "heddle_attention_fwd_f16_d64_paged_sm80", 0, 0},
                 {HEDDLE_BF16, 512, 128, 232448, "heddle_attention_fwd_bf16_d128_paged_sm90", 0, 0},
                 {HEDDLE_F16, 512, 96, 232448, "heddle_attention_fwd_f16_d128_paged_sm90", 0, 0},
                 {HEDDLE_BF16, 16, 128, 232448, "heddle_attention_fwd_bf16_d128_full_sm80", 0, 0},
                 {HEDDLE_F32, 1, 64, 232448, "heddle_attention_fwd_f32_d64_paged_sm80", 0, 0},
                 {HEDDLE_F32, 512, 64, 232448, "heddle_attention_fwd_f32_d512_plain_sm80", 0, 0},
                 {HEDDLE_F16, 1, 512, 232448, "heddle_attention_fwd_f16_d512_full_sm80", 0, 0},
                 {HEDDLE_BF16, 512, 128, 16384, "heddle_attention_fwd_bf16_d512_plain_sm80", 0, 0},
                 {HEDDLE_BF16, 512, 256, 232448, "heddle_attention_fwd_bf16_d256_cappages_sm90", 50, 0},
                 {HEDDLE_F16, 512, 80, 232448, "heddle_attention_fwd_f16_d128_cappages_sm90", 0, HEDDLE_ALIBI},
                 {HEDDLE_F16, 512, 64, 232448, "heddle_attention_fwd_f16_d64_full_sm80", 65, 0}};
    for (size_t x = 0; x < COUNT(cases); x++)
        for (int small = SMALL_NEVER; small <= SMALL_ALWAYS; small++) {
            heddle_attention a = {.size = sizeof a, .device = HEDDLE_CUDA, .dtype = cases[x].dtype, .b = 8, .h = 8};
            a.hk = 2, a.sq = cases[x].sq, a.sk = 4096, a.d = cases[x].d;
            a.features = HEDDLE_PAGES | cases[x].more, a.page = 16, a.pages = 4096;
            a.softcap = cases[x].softcap;
            attention_plan plan = {.threads = 1};
            assert_int_equal(heddle__resolve_attention(&a, HEDDLE_FORWARD, &plan), HEDDLE_OK);
            const cuda_facts device = {"a GPU", 132, cases[x].shared, true, small};
            assert_int_equal(heddle__cuda_plan_attention(&plan, &device), HEDDLE_OK);
            assert_string_equal(plan.kernel, cases[x].kernel);
            assert_int_equal(heddle__resolve_attention(&a, HEDDLE_BACKWARD, &plan), HEDDLE_UNSUPPORTED);
        }
}

/* On Hopper keys in pages with other options, and keys of 8 bits, are collected for its kernels where there are many queries and the workspace
 * is not too large for it; where q lies askew who stands in reads them where they are. */
static void test_collected(void **state) {
    (void)state;
    const uint64_t pages = HEDDLE_PAGES, bytes = HEDDLE_E4M3;
    static attention_job job;
    const struct {
        heddle_dtype dtype;
        uint64_t features;
        int64_t b, sq, sk, d;
        double softcap, dropout, scale;
        const char *kernel;
        bool collected;
    } cases[] = {
        {HEDDLE_BF16, pages | HEDDLE_BOOL_MASK, 8, 512, 4096, 64, 0, 0, 0, "bf16_d64_narrow_sm90", true},
        {HEDDLE_BF16, pages | HEDDLE_BOOL_MASK, 8, 512, 4096, 128, 50, 0, 0, "bf16_d128_full_sm90", true},
        {HEDDLE_F16, pages | HEDDLE_SEGMENTS, 8, 512, 4096, 128, 0, 0, 0, "f16_d128_masked_sm90", true},
        {HEDDLE_F16, pages | HEDDLE_BIAS, 8, 512, 4096, 256, 0, 0, 0, "f16_d256_full_sm90", true},
        {HEDDLE_BF16, pages, 8, 512, 4096, 80, 0, 0.1, 0, "bf16_d128_maskdrop_sm90", true},
        {HEDDLE_BF16, pages, 8, 512, 4096, 64, 0, 0, -1, "bf16_d64_full_sm90", true},
        {HEDDLE_BF16, pages | HEDDLE_ACCUMULATE, 8, 512, 4096, 64, 0, 0, 0, "bf16_d64_masked_sm90", true},
        {HEDDLE_BF16, pages | HEDDLE_BIAS | HEDDLE_VARLEN, 8, 512, 4096, 64, 0, 0, 0, "bf16_d64_full_sm90", true},
        {HEDDLE_BF16, pages, 8, 512, 4096, 64, 0, 0, 0, "bf16_d64_paged_sm90", false},
        {HEDDLE_BF16, pages | HEDDLE_BIAS, 8, 64, 4096, 64, 0, 0, 0, "bf16_d64_full_sm80", false},
        {HEDDLE_BF16, pages | HEDDLE_BIAS, 8, 512, 4096, 264, 0, 0, 0, "bf16_d512_full_sm80", false},
        {HEDDLE_F16, pages, 8, 512, 4096, 64, 65, 0.1, 0, "f16_d64_full_sm80", false},
        {HEDDLE_F32, pages | HEDDLE_BIAS, 8, 512, 4096, 64, 0, 0, 0, "f32_d512_plain_sm80", false},
        {HEDDLE_BF16, bytes, 8, 512, 4096, 64, 0, 0, 0, "bf16_d64_paged_sm90", true},
        {HEDDLE_F16, bytes | pages, 8, 512, 4096, 128, 0, 0, 0, "f16_d128_paged_sm90", true},
        {HEDDLE_BF16, bytes | pages | HEDDLE_ALIBI, 8, 512, 4096, 160, 0, 0, 0, "bf16_d256_cappages_sm90", true},
        {HEDDLE_BF16, bytes | HEDDLE_VARLEN, 8, 512, 4096, 128, 30, 0, 0, "bf16_d128_cappages_sm90", true},
        {HEDDLE_BF16, bytes | HEDDLE_VARLEN | pages, 8, 512, 4096, 128, 0, 0, 0, "bf16_d128_paged_sm90", true},
        {HEDDLE_BF16, bytes | HEDDLE_BIAS, 8, 512, 4096, 128, 0, 0, 0, "bf16_d128_bytefull_sm80", false},
        {HEDDLE_BF16, bytes | HEDDLE_WEIGHTS, 8, 512, 4096, 128, 0, 0, 0, "bf16_d128_bytefull_sm80", false},
        {HEDDLE_BF16, bytes | HEDDLE_ACCUMULATE, 8, 512, 4096, 128, 0, 0, 0, "bf16_d128_bytefull_sm80", false},
        {HEDDLE_BF16, bytes, 8, 64, 4096, 128, 0, 0, 0, "bf16_d128_bytefull_sm80", false},
        {HEDDLE_BF16, bytes | pages, 8, 1, 4096, 128, 0, 0, 0, "bf16_d128_bytepages_sm80", false},
        /* Hopper's kernels would have to be given 2 GiB, and more */
        {HEDDLE_BF16, bytes, 64, 512, 1 << 15, 128, 0, 0, 0, "bf16_d128_paged_sm90", true},
        {HEDDLE_BF16, bytes, 65, 512, 1 << 15, 128, 0, 0, 0, "bf16_d128_bytefull_sm80", false},
        {HEDDLE_BF16, pages | HEDDLE_BIAS, 65, 512, 1 << 15, 128, 0, 0, 0, "bf16_d128_full_sm80", false}};
    for (size_t x = 0; x < COUNT(cases); x++)
        for (int small = SMALL_NEVER; small <= SMALL_CHOSEN; small++) {
            heddle_attention a = {.size = sizeof a, .device = HEDDLE_CUDA, .dtype = cases[x].dtype, .h = 8, .hk = 2};
            a.b = cases[x].b, a.sq = cases[x].sq, a.sk = cases[x].sk, a.d = cases[x].d;
            a.features = cases[x].features;
            a.page = a.features & HEDDLE_PAGES ? 16 : 0, a.pages = a.page ? 4096 : 0;
            a.softcap = cases[x].softcap, a.dropout = cases[x].dropout, a.scale = cases[x].scale;
            a.total_q = a.features & HEDDLE_VARLEN ? 4000 : 0;
            a.total_k = a.features & HEDDLE_VARLEN && !a.page ? 30000 : 0;
            attention_plan plan = {.threads = 1};
            assert_int_equal(heddle__resolve_attention(&a, HEDDLE_FORWARD, &plan), HEDDLE_OK);
            const cuda_facts device = {"a GPU", 132, 232448, true, small};
            assert_int_equal(heddle__cuda_plan_attention(&plan, &device), HEDDLE_OK);
            assert_non_null(strstr(plan.kernel, cases[x].kernel));
            heddle_attention_data t = {.size = sizeof t, .q = aligned, .k = skewed, .v = skewed, .o = aligned};
            t.lse = aligned;
            for (int askew = 0; askew < 2; askew++) {
                heddle__cuda_attention_job(&plan, &device, &t, space, &job);
                assert_int_equal(check_collected(&job, plan.workspace), cases[x].collected && !askew);
                t.q = skewed;
            }
        }
}

/* What prepare is to write lies in the workspace, or is the caller's z. */
static void check_prepared(const norm_linear_launch *l, const norm_linear_plan *plan) {
    if (l->kernel < NORM_LINEAR_prepare_bf16_sm80 || l->kernel > NORM_LINEAR_prepare_f32_sm80 ||
        !strstr(heddle__cuda_kernels[l->kernel].symbol, "_prepare_"))
        return;
    for (int x = 0; x < 2; x++) {
        const norm_rows *r = &l->params.prepare.job[x];
        const char *high = r->high;
        assert_true(r->rows == 0 || !high || high == aligned ||
                    (high >= space && high + r->rows * r->ldp * 2 <= space + plan->workspace));
    }
}

/* The same of norm-linear: clusters of two for Hopper's products. */
static void check_linear_limit(const norm_linear_launch *l, int64_t limit, const cuda_facts *device) {
    const char *symbol = heddle__cuda_kernels[l->kernel].symbol;
    const bool wide = strstr(symbol, "_f32_");
    const int64_t resident = l->sm90                                                    ? 1
                             : strstr(symbol, "_prepare_")                              ? prepare_resident(wide ? 4 : 2)
                             : strstr(symbol, "_finish_")                               ? FINISH_RESIDENT
                             : strstr(symbol, "_z_") && !strstr(symbol, "_sums_")       ? Z_RESIDENT
                             : strstr(symbol, "_activate_") || strstr(symbol, "_gate_") ? ACTIVATE_RESIDENT
                             : strstr(symbol, "_few_")                                  ? 1
                                                                                        : 0;
    limit = limit == 1 ? 2 : limit;
    if (limit && limit < device->multiprocessors && resident)
        assert_true(l->grid <= limit * resident);
}

static uint32_t quotient(uint32_t x, divisor d) {
    return (uint32_t)(((uint64_t)x * d.factor >> 32) + x) >> d.shift;
}

/* Hopper's product for few rows: clusters are whole, no tile is nobody's, and no cluster is without one. */
static void check_few90(const norm_linear_launch *l) {
    static const struct {
        const char *name;
        uint32_t rows, blocks;
    } kinds[] = {
#define F(pass, rows, blocks) {"_" #pass "_", rows, blocks},
        FEW90_KINDS(F)
#undef F
    };
    const norm_gemm_sm90 *p = &l->params.gemm90;
    const int64_t width = p->gated ? FEW90_COLS / 2 : FEW90_COLS, tiles = (p->g.cols + width - 1) / width;
    size_t kind = COUNT(kinds); /* of two names of which one begins with the other, the longer */
    for (size_t x = 0; x < COUNT(kinds); x++)
        if (strstr(heddle__cuda_kernels[l->kernel].symbol, kinds[x].name) &&
            (kind == COUNT(kinds) || strlen(kinds[x].name) > strlen(kinds[kind].name)))
            kind = x;
    assert_true(kind < COUNT(kinds));
    const uint32_t blocks = kinds[kind].blocks;
    assert_int_equal(l->grid % (blocks * p->row_blocks), 0);
    assert_true(l->grid / (blocks * p->row_blocks) <= tiles);
    assert_int_equal(l->shapes[0].rows, kinds[kind].rows);
    assert_true(p->row_blocks <= 2 && kinds[kind].rows * p->row_blocks >= p->g.rows);
    assert_true(p->stages >= FEW90_LEAST_STAGES && l->shared <= FEW90_ROOM);
    assert_int_equal(l->shapes[1].rows, width);
}

/* Hopper's products: no moments but those that they form; and the order of tiles: its divisions without a division, at the ends of what
 * is divided and between. */
static void check_gemm90(const norm_linear_launch *l, rng *r) {
    const tile_order *o = &l->params.gemm90.g.tiles;
    if (!l->sm90)
        return;
    assert_null(l->params.gemm90.g.mean);
    if (strstr(heddle__cuda_kernels[l->kernel].symbol, "_few_")) {
        check_few90(l);
        return;
    }
    assert_int_equal(o->panels, (o->units - 1) / o->panel_units + 1);
    for (int x = 0; x < 20; x++) {
        const uint32_t end = o->units - 1, at = x == 0 ? 0 : x == 1 ? end : (uint32_t)rng_between(r, 0, end);
        const uint32_t of_panel = at / o->panel_units * o->panel_units, before = of_panel ? of_panel - 1 : 0;
        assert_int_equal(quotient(at, o->panel), at / o->panel_units);
        assert_int_equal(quotient(of_panel, o->panel), of_panel / o->panel_units);
        assert_int_equal(quotient(before, o->panel), before / o->panel_units);
        assert_int_equal(quotient(at % o->panel_units, o->last), at % o->panel_units / o->last_height);
    }
}

/* dW in shares: each has terms, all of them are on the GPU at once, what they leave lies in the workspace, and a launch in front of it has
 * cleared what they count with. */
static bool check_shares(const norm_linear_launch *launches, int x, const norm_linear_plan *plan,
                         const cuda_facts *device) {
    const norm_gemm_sm90 *p = &launches[x].params.gemm90;
    const norm_shares *s = &p->shares;
    const char *symbol = heddle__cuda_kernels[launches[x].kernel].symbol, *width = strstr(symbol, "_dw_n");
    if (!launches[x].sm90 || !width)
        return false;
    assert_in_range(s->count, 1, GEMM90_SHARES);
    if (s->count == 1)
        return false;
    const int64_t tiles = (p->g.row_tiles + 1) / 2 * 2 * p->g.col_tiles, units = p->g.tiles.units;
    const char *const end = space + plan->workspace, *const sums = (const char *)s->sums;
    const int64_t floats = tiles * s->count * gemm90_sums_of_tile(atoi(width + strlen("_dw_n")));
    assert_true(s->count * units <= device->multiprocessors / 2);
    assert_true(sums >= space && (uintptr_t)sums % 16 == 0 && sums + floats * 4 <= end);
    assert_true((const char *)s->arrived >= space && (const char *)(s->arrived + tiles) <= end);
    for (int share = 0; share < s->count; share++) {
        assert_true(gemm90_share(p->g.depth, s->count, share) < gemm90_share(p->g.depth, s->count, share + 1));
        assert_int_equal(quotient((uint32_t)(share * units), s->units), share);
        assert_int_equal(quotient((uint32_t)((share + 1) * units - 1), s->units), share);
    }
    bool cleared = false;
    for (int y = 0; y < x; y++)
        cleared |= strstr(heddle__cuda_kernels[launches[y].kernel].symbol, "_prepare_") &&
                   launches[y].params.prepare.clear == s->arrived && launches[y].params.prepare.zeros == tiles;
    assert_true(cleared);
    return true;
}

/* So does what `normalise` writes, unless it is z; and a row has no more warps than elements for them, or than a block. */
static void check_normalised(const norm_linear_launch *l, const norm_linear_plan *plan) {
    const norm_normalise *p = &l->params.normalise;
    const char *high = p->job.high;
    if (!strstr(heddle__cuda_kernels[l->kernel].symbol, "_normalise_"))
        return;
    assert_true(high == aligned || (high >= space && high + p->job.rows * p->job.ldp * 2 <= space + plan->workspace));
    assert_true(p->warps_log2 >= 0 && 32 << p->warps_log2 <= NORMALISE_THREADS);
    assert_true(p->warps_log2 == 0 || INT64_C(128) << p->warps_log2 < p->job.cols);
}

static int shares; /* plans that took dW in shares */

static bool check_norm_linear_plan(const heddle_norm_linear *a, heddle_pass pass, const cuda_facts *device,
                                   bool wants_dx, rng *r) {
    void *const of_norm = a->norm == HEDDLE_NO_NORM ? NULL : aligned;
    norm_linear_plan plan = {.threads = 1};
    static norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES];
    if (heddle__resolve_norm_linear(a, pass, &plan) != HEDDLE_OK ||
        heddle__cuda_plan_norm_linear(&plan, device) != HEDDLE_OK)
        return false;
    assert_true(plan.workspace < INT64_MAX);
    const heddle_norm_linear_data t = {.size = sizeof t,
                                       .x = aligned,
                                       .w = aligned,
                                       .gamma = of_norm,
                                       .y = rng_chance(r, 0.3) ? skewed : aligned,
                                       .dy = aligned,
                                       .dx = wants_dx ? aligned : NULL,
                                       .dw = aligned,
                                       .dgamma = of_norm,
                                       .dbeta = of_norm,
                                       .dbias = aligned,
                                       .z = a->features & HEDDLE_Z ? aligned : NULL,
                                       .dz = a->features & HEDDLE_Z ? aligned : NULL,
                                       .u = a->activation ? aligned : NULL};
    const int n = heddle__cuda_norm_linear_launches(&plan, device, &t, space, launches);
    /* Hopper's product is launched where it is named, unless a result lies askew. */
    const bool askew = t.y == skewed || plan.a.y_stride % 8 || (a->activation && (plan.a.u_stride | a->n) % 8);
    bool named = pass == HEDDLE_BACKWARD || askew || !strstr(plan.kernel, "_sm90");
    for (int x = 0; x < n; x++) {
        named |= !strcmp(heddle__cuda_kernels[launches[x].kernel].symbol, plan.kernel);
        assert_true(launches[x].grid > 0 && launches[x].grid <= INT32_MAX);
        check_prepared(&launches[x], &plan);
        check_linear_limit(&launches[x], a->multiprocessors, device);
        check_normalised(&launches[x], &plan);
        check_gemm90(&launches[x], r);
        shares += check_shares(launches, x, &plan, device);
    }
    assert_true(named);
    return true;
}

static void test_norm_linear(void **state) {
    (void)state;
    rng r = {test_seed(4)};
    int accepted = 0;
    for (int x = 0; x < CASES; x++) {
        const cuda_facts device = {"a GPU", x % 3 ? 132 : 1, 232448, x % 2, (int)rng_between(&r, 0, 2)};
        heddle_norm_linear a = {.size = sizeof a, .device = HEDDLE_CUDA, .m = any_size(&r), .k = any_size(&r)};
        a.n = any_size(&r);
        a.y_stride = a.n < INT32_MAX && rng_chance(&r, 0.5) ? (a.n + 7) / 8 * 8 : 0;
        a.dtype = (heddle_dtype)rng_between(&r, 0, 2);
        a.features = rng_chance(&r, 0.5) ? HEDDLE_TF32 : 0;
        a.norm = (heddle_norm)(x % 5 % 3);
        a.features |= a.norm != HEDDLE_NO_NORM && rng_chance(&r, 0.2) ? HEDDLE_Z : 0;
        a.activation = rng_chance(&r, 0.3) ? rng_chance(&r, 0.5) ? HEDDLE_SILU : HEDDLE_SWIGLU : HEDDLE_NO_ACTIVATION;
        a.features |= a.activation ? HEDDLE_ACTIVATION : 0;
        a.multiprocessors = rng_chance(&r, 0.5) ? rng_between(&r, 1, 140) : 0;
        for (int pass = 0; pass < 2; pass++)
            accepted += check_norm_linear_plan(&a, (heddle_pass)pass, &device, x % 7 % 2, &r);
        /* Many rows of few columns. */
        a = (heddle_norm_linear){.size = sizeof a, .device = HEDDLE_CUDA, .dtype = a.dtype, .norm = a.norm};
        a.m = rng_between(&r, 1000, 100000);
        a.k = 8 * rng_between(&r, 1, 200);
        a.n = 8 * rng_between(&r, 1, 200);
        a.multiprocessors = rng_chance(&r, 0.3) ? rng_between(&r, 1, 140) : 0;
        assert_true(check_norm_linear_plan(&a, HEDDLE_BACKWARD, &device, x % 7 % 2, &r));
    }
    assert_true(accepted > CASES / 10 && shares > CASES / 20);
}

/* Others than the planned family have room, too: of pointers that lie askew, and without a gradient of o. */
static void check_stand_in(const attention_plan *plan, const cuda_facts *device) {
    static attention_job job;
    for (int x = 0; x < 2; x++) {
        const heddle_attention_data t = {.size = sizeof t,
                                         .q = x ? aligned : skewed,
                                         .k = aligned,
                                         .v = aligned,
                                         .o = aligned,
                                         .lse = aligned,
                                         .dout = x ? NULL : aligned,
                                         .dq = aligned,
                                         .dbias = plan->a.features & HEDDLE_BIAS ? aligned : NULL,
                                         .weights = plan->a.features & HEDDLE_WEIGHTS ? aligned : NULL};
        heddle__cuda_attention_job(plan, device, &t, space, &job);
        assert_true(job.count > 1);
        check_seen(&job.params.p, plan->workspace);
    }
}

/* Segments and lists take bits of the workspace, where somebody reads those bytes, too; they are refused by name where there would be too many
 * tiles. */
static void test_segments(void **state) {
    (void)state;
    const cuda_facts device = {"a GPU", 132, 232448, 1, 0};
    heddle_attention a = {
        .size = sizeof a, .dtype = HEDDLE_F16, .device = HEDDLE_CUDA, .b = 2, .h = 4, .sq = 4096, .sk = 8192, .d = 64};
    for (int pass = 0; pass < 2; pass++)
        for (int lists = 0; lists < 2; lists++) {
            attention_plan plan = {.threads = 1};
            size_t bytes[3];
            a.features = lists ? HEDDLE_BLOCKS : HEDDLE_SEGMENTS;
            a.block_q = a.block_k = lists ? 64 : 0;
            for (int x = 0; x < 3;
                 x++) { /* Hopper's of both kinds, and by the third a bias's gradient or the weights */
                a.dtype = x ? HEDDLE_F32 : HEDDLE_F16;
                a.features |= x < 2 ? 0 : pass ? HEDDLE_BIAS : HEDDLE_WEIGHTS;
                assert_int_equal(heddle__resolve_attention(&a, (heddle_pass)pass, &plan), HEDDLE_OK);
                assert_int_equal(heddle__cuda_plan_attention(&plan, &device), HEDDLE_OK);
                check_stand_in(&plan, &device);
                attention_plan bare = plan;
                bare.a.features &= HEDDLE_BIAS | HEDDLE_WEIGHTS;
                assert_int_equal(heddle__cuda_plan_attention(&bare, &device), HEDDLE_OK);
                bytes[x] = plan.workspace - bare.workspace;
            }
            const size_t elements = (size_t)(a.sq * a.sk * (lists ? 1 : a.b));
            assert_true(bytes[0] > elements / 8 && bytes[0] < elements / 6);
            assert_true(bytes[1] > elements / 8 && bytes[1] < elements / 3);
            assert_true(bytes[2] > elements && bytes[2] < elements * 3 / 2);
            heddle_attention many = a;
            many.features &= HEDDLE_SEGMENTS | HEDDLE_BLOCKS;
            many.b = 1 << 10;
            many.sq = many.sk = 1 << 16;
            assert_int_equal(heddle__resolve_attention(&many, (heddle_pass)pass, &plan), HEDDLE_OK);
            assert_int_equal(heddle__cuda_plan_attention(&plan, &device), HEDDLE_UNSUPPORTED);
            assert_non_null(strstr(heddle_last_message(), lists ? "lists of blocks" : "segments"));
        }
}

/* Of an activation of two halves W has 2n rows, which is what limits go by, and u has a place where nobody asked for it. */
static void test_halves(void **state) {
    (void)state;
    const cuda_facts device = {"a GPU", 132, 232448, false, SMALL_CHOSEN};
    for (int activation = HEDDLE_SILU; activation <= LAST_ACTIVATION; activation++)
        for (int dtype = HEDDLE_F32; dtype <= HEDDLE_F16; dtype++) {
            norm_linear_plan plan = {.threads = 1};
            heddle_norm_linear a = {.size = sizeof a,
                                    .dtype = (heddle_dtype)dtype,
                                    .device = HEDDLE_CUDA,
                                    .norm = HEDDLE_NO_NORM,
                                    .m = 1000,
                                    .k = 8,
                                    .n = 300,
                                    .features = HEDDLE_ACTIVATION,
                                    .activation = (heddle_activation)activation};
            const bool two = activation != HEDDLE_SILU;
            const size_t u = 1000 * 600 * (dtype == HEDDLE_F32 ? 4 : 2);
            assert_int_equal(heddle__resolve_norm_linear(&a, HEDDLE_FORWARD, &plan), HEDDLE_OK);
            assert_int_equal(plan.a.u_stride, two ? 600 : 300);
            assert_int_equal(heddle__cuda_plan_norm_linear(&plan, &device), HEDDLE_OK);
            assert_int_equal(plan.workspace > u, two);
            a.m = 1;
            a.n = INT64_C(1) << 30;
            assert_int_equal(heddle__resolve_norm_linear(&a, HEDDLE_BACKWARD, &plan), HEDDLE_OK);
            assert_int_equal(heddle__cuda_plan_norm_linear(&plan, &device), two ? HEDDLE_UNSUPPORTED : HEDDLE_OK);
            if (two)
                assert_non_null(strstr(heddle_last_message(), "more blocks than a CUDA grid holds"));
        }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention), cmocka_unit_test(test_masks_that_are_too_large),
        cmocka_unit_test(test_limit),     cmocka_unit_test(test_segments),
        cmocka_unit_test(test_pages),     cmocka_unit_test(test_norm_linear),
        cmocka_unit_test(test_halves),    cmocka_unit_test(test_collected),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

/* SPDX-License-Identifier: Apache-2.0
 * Attention in float32 by Hopper's tensor cores: the tensors are split into two float16 parts first, as they lie. Pure. */
#include "cuda/attention/family.h"
#include "cuda/attention/sm80/contract.h"
#include "cuda/attention/sm90_f32/contract.h"
#include "dtype.h"
#include "mask.h"

static int find(const attention_problem *p, kernel_pass pass) {
    return heddle__cuda_find_attention(p, pass, p->rich ? VARIANT_full : VARIANT_lean, FAMILY_sm90);
}

static int find_sm80(const attention_problem *p, kernel_pass pass) {
    return heddle__cuda_find_attention(p, pass, VARIANT_full, FAMILY_sm80);
}

/* May a mask or a bias leave few keys to most rows? Of heads where it does, as the split finds out, sm80's kernels make all but dbias. */
static bool may_leave_few(const heddle_attention *a) {
    return (a->features & (HEDDLE_BIAS | HEDDLE_BOOL_MASK)) && !(a->features & HEDDLE_ACCUMULATE);
}

/* With dweights the backward is another family's, which would round the scores differently; and few blocks leave more undone than in 16
 * bits. */
static bool takes_forward(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const int64_t group = a->h / a->hk;
    c->fwd = find(p, PASS_fwd);
    if (c->fwd < 0 || (a->features & HEDDLE_WEIGHTS) || group * a->sq <= 16 || (group > 1 && a->sq <= 64))
        return false;
    const int64_t blocks = ceil_div(a->sq, heddle__cuda_attention_kernels[c->fwd].own) * a->h * a->b;
    return blocks * 8 >= p->device->multiprocessors || a->sk <= 1024;
}

/* With options rows of q and k of so few elements show what a product loses. */
#define SHORT_ROW 32

/* Where a query sees few keys, 22 bits of an operand and D from o would be seen in the results: sm80 has kernels that mind that. With
 * dweights the backward is sm80's, too. */
static bool takes(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    if (!p->device->sm90 || a->dtype != HEDDLE_F32 || (a->features & HEDDLE_TF32) || heddle__cuda_is_empty(a) ||
        heddle__cuda_attention_sees_few(a) || (p->rich && max64(a->d, a->dv) <= SHORT_ROW) ||
        (p->pass == HEDDLE_BACKWARD && (a->features & HEDDLE_WEIGHTS)))
        return false;
    c->split = find(p, PASS_split);
    if (c->split < 0)
        return false;
    if (p->pass == HEDDLE_FORWARD) {
        if (may_leave_few(a) && (c->few_fwd = find_sm80(p, PASS_fwd)) < 0)
            return false;
        return takes_forward(p, c);
    }
    if (may_leave_few(a)) {
        c->few_prep = find_sm80(p, PASS_prep);
        c->few_dkdv = find_sm80(p, PASS_dkdv);
        c->few_dq = find_sm80(p, PASS_dq);
        if (c->few_prep < 0 || c->few_dkdv < 0 || c->few_dq < 0)
            return false;
    }
    c->prep = find(p, PASS_prep);
    c->dkdv = find(p, PASS_dkdv);
    c->dq = find(p, PASS_dq);
    if (a->features & HEDDLE_BIAS)
        c->dbias = find(p, PASS_dbias);
    return c->prep >= 0 && c->dkdv >= 0 && c->dq >= 0;
}

/* The split tensors behind what the workspace has already: K and V, in backward also Q and dO, which many blocks read. */
static void place_splits(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const bool packed = a->features & HEDDLE_VARLEN;
    const int64_t heads_q = a->h * (packed ? 1 : a->b), heads_k = a->hk * (packed ? 1 : a->b);
    c->splits_queries = p->pass == HEDDLE_BACKWARD;
    c->split_tiles_q = packed ? packed_tiles64(a->total_q, a->b) : tiles64(a->sq);
    c->split_tiles_k = packed ? packed_tiles64(a->total_k, a->b) : tiles64(a->sk);
    for (int x = 0; x < SPLIT_TENSORS; x++) {
        const bool keys = x == SPLIT_K || x == SPLIT_V;
        if (!keys && !c->splits_queries)
            continue;
        const size_t tiles = (size_t)(keys ? heads_k * c->split_tiles_k : heads_q * c->split_tiles_q);
        const int dim = heddle__cuda_attention_kernels[c->split].dim;
        c->split_tiles[x] = align64(c->bytes);
        c->split_info[x] = c->split_tiles[x] + tiles * (size_t)split_tile_bytes(dim);
        c->bytes = align64(c->split_info[x] + tiles * sizeof(split_info));
    }
}

static void lay_out(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const bool backward = p->pass == HEDDLE_BACKWARD;
    c->tiles_q = ceil_div(a->sq, heddle__cuda_attention_kernels[backward ? c->dq : c->fwd].own);
    c->tiles_k = backward ? ceil_div(a->sk, heddle__cuda_attention_kernels[c->dkdv].own) : 0;
    c->blocks = c->tiles_q * a->h * a->b;
    c->blocks_dkdv = c->tiles_k * a->hk * a->b;
    place_splits(p, c);
    if (heddle__cuda_map_pays(p)) {
        heddle__cuda_place_map(p, MASK_TILE, MASK_TILE, false, c);
        if (backward)
            heddle__cuda_place_map(p, MASK_TILE, MASK_TILE, true, c);
    }
    if (may_leave_few(a)) {
        c->few = align64(c->bytes);
        c->bytes = c->few + align64((size_t)(a->b * a->hk) * sizeof(int32_t));
    }
}

/* A launch of one of sm80's kernels, with a block for each of its own tiles of rows of each of so many heads. */
static void add_few(const attention_problem *p, int kernel, int64_t rows, int64_t heads, attention_job *job) {
    heddle__cuda_add_launch(job, kernel, ceil_div(rows, heddle__cuda_attention_kernels[kernel].own) * heads * p->a->b);
}

static void add_few_backward(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const heddle_attention *a = p->a;
    const kernel_data *t = &job->params.p.t;
    const kernel_row *k = &heddle__cuda_attention_kernels[c->few_dkdv];
    const int tiles = sm80_tiles((int)heddle_dtype_size(a->dtype), k->dim, k->warps, k->own);
    add_few(p, c->few_prep, a->sq, a->h, job);
    if (t->dq || t->dsinks)
        add_few(p, c->few_dq, a->sq, a->h, job);
    if (t->dk || t->dv)
        add_few(p, c->few_dkdv, a->sk, a->hk * (sm80_makes_both(k->dim, tiles) ? 1 : 2), job);
}

/* The split: a block for each tile of K and V, in backward also of Q and dO. Then in backward, where D and the log-sum-exp come with the
 * split, prep looks after large scores, a block of it after several tiles. */
static void launch(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const heddle_attention *a = p->a;
    const int64_t tiles_q = c->splits_queries ? tiles64(a->sq) * a->h : 0, tiles_k = tiles64(a->sk) * a->hk;
    heddle__cuda_add_mask(p, c, job);
    heddle__cuda_add_launch(job, c->split, 2 * (tiles_k + tiles_q) * a->b);
    if (p->pass == HEDDLE_FORWARD) {
        heddle__cuda_add_launch(job, c->fwd, c->blocks);
        if (c->few_fwd >= 0)
            add_few(p, c->few_fwd, a->sq, a->h, job);
        return;
    }
    heddle__cuda_add_launch(job, c->prep,
                            ceil_div(c->blocks, clamp64(c->blocks / (2 * p->device->multiprocessors), 1, 12)));
    heddle__cuda_add_dkdv_and_dq(c, job);
    if (job->params.p.t.dbias && c->dbias >= 0)
        heddle__cuda_add_dbias(p, c, INT64_MAX, job);
    if (c->few_prep >= 0)
        add_few_backward(p, c, job);
}

const attention_family heddle__attention_sm90_f32 = {
    takes, heddle__cuda_tensor_core_time, lay_out, launch, NEEDS_DOUT, false, true};

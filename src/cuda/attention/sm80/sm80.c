/* SPDX-License-Identifier: Apache-2.0
 * Attention by the tensor cores of any GPU since Ampere: every option, head dims up to 512. Pure. */
#include "cuda/attention/family.h"
#include "cuda/attention/plain/contract.h"
#include "cuda/attention/sm80/contract.h"
#include "cuda/attention/sm80/given.h"
#include "dtype.h"
#include "mask.h"

/* ------------------------------------------------------------------------------------------------ what it takes */

static bool fits_twice(const attention_problem *p, const kernel_row *k) {
    return 2 * heddle__cuda_shared_bytes(k) <= p->device->shared_bytes;
}

/* Up to so many keys of a sequence, steps of twice as many are worth it that have one place each (at head dims up to 64). */
#define SHORT_KEYS 1024

/* Of two forward kernels of one head dim: is b the better one? It has one place for K and one for V, where a has two. */
static bool is_better(const attention_problem *p, const kernel_row *a, const kernel_row *b) {
    if (b->block > a->block)
        return p->a->sk <= SHORT_KEYS;
    return b->own == a->own && fits_twice(p, b) && !fits_twice(p, a);
}

/* The lean kernel of this pass in the largest tiles that fit into shared memory, or in what is better; -1: none. */
static int find_lean(const attention_problem *p, kernel_pass pass) {
    static const kernel_variant order[] = {VARIANT_lean, VARIANT_narrow, VARIANT_least};
    int best = heddle__cuda_find_attention(p, pass, VARIANT_lean, FAMILY_sm80);
    for (int x = 1; x < 3 && pass == PASS_fwd; x++) {
        const int other = heddle__cuda_find_attention(p, pass, order[x], FAMILY_sm80);
        const kernel_row *a = &heddle__cuda_attention_kernels[best < 0 ? 0 : best],
                         *b = &heddle__cuda_attention_kernels[other < 0 ? 0 : other];
        if (other >= 0 && (best < 0 || b->dim < a->dim || (b->dim == a->dim && is_better(p, a, b))))
            best = other;
    }
    return best;
}

/* The lean kernel if that will do, and if its blocks fit into shared memory; it knows nothing of pages (nor do the full ones of float32). */
static int find(const attention_problem *p, kernel_pass pass) {
    const bool full = p->rich || (p->a->features & HEDDLE_PAGES);
    const int lean = full ? -1 : find_lean(p, pass);
    return lean >= 0 ? lean : heddle__cuda_find_attention(p, pass, VARIANT_full, FAMILY_sm80);
}

/* The forward of 16 bits with options; -1: none fits, or it is for the full one. That has keys in pages, rows of several heads in a tile, and
 * masks without a map. */
static int find_rich(const attention_problem *p) {
    const heddle_attention *a = p->a;
    const int x = p->rich && a->dtype != HEDDLE_F32 && !(a->features & HEDDLE_PAGES)
                      ? heddle__cuda_find_attention(
                            p, PASS_fwd, a->features & HEDDLE_BIAS ? VARIANT_biased : VARIANT_rich, FAMILY_sm80)
                      : -1;
    const bool joins = x >= 0 && a->h > a->hk && a->sq * 2 <= heddle__cuda_attention_kernels[x].own;
    return joins || ((a->features & HEDDLE_BOOL_MASK) && !heddle__cuda_map_pays(p)) ? -1 : x;
}

/* From so many queries of a sequence on, wider steps are worth it where two such blocks fit into a multiprocessor (at head dims up to 64). */
#define LONG_QUERIES 2048

/* The kernel of this head dim that makes all three gradients, in the largest tiles that fit into shared memory; -1: none. */
static int find_bwd(const attention_problem *p, int dim) {
    static const kernel_variant plain[] = {VARIANT_long, VARIANT_lean, VARIANT_narrow, VARIANT_least},
                                full[] = {VARIANT_full, VARIANT_slim, VARIANT_slight};
    for (int x = 0; x < (p->rich ? 3 : 4); x++) {
        const kernel_variant variant = p->rich ? full[x] : plain[x];
        const int bwd = heddle__cuda_find_attention(p, PASS_bwd, variant, FAMILY_sm80);
        const kernel_row *k = &heddle__cuda_attention_kernels[bwd < 0 ? 0 : bwd];
        if (bwd < 0 || k->dim != dim)
            continue;
        if (variant != VARIANT_long ||
            (p->a->sq >= LONG_QUERIES && 2 * heddle__cuda_shared_bytes(k) <= p->device->shared_bytes))
            return bwd;
    }
    return -1;
}

/* Of the options the kernels of all three gradients know all but the gradient of the weights: tanh as they form it is off by 2^-22 of the cap, and
 * there are as many tiles of a mask as a grid may have blocks. */
#define MOST_CAP 256

static bool knows_options(const attention_problem *p) {
    const heddle_attention *a = p->a;
    const int64_t tiles = max64(1, ceil_div(a->sq, MASK_TILE)) * max64(1, ceil_div(a->sk, MASK_TILE));
    const bool few = tiles <= INT32_MAX / 4 / max64(1, a->b) / max64(1, a->h);
    return !(a->features & HEDDLE_WEIGHTS) && a->softcap <= MOST_CAP && (few || !(a->features & HEDDLE_BOOL_MASK));
}

/* All three gradients by one kernel, where their sums need no order; who stands in for another family has no room for them. The sums that
 * light clears and it adds to are read by gather: of as many columns. */
static bool takes_fused(const attention_problem *p, attention_choice *c) {
    const kernel_row *k = heddle__cuda_attention_kernels;
    const int light = heddle__cuda_find_attention(p, PASS_light, p->rich ? VARIANT_full : VARIANT_lean, FAMILY_sm80),
              gather = heddle__cuda_find_attention(p, PASS_gather, VARIANT_lean, FAMILY_sm80);
    if ((p->rich && !knows_options(p)) || p->stands_in || (p->a->features & HEDDLE_DETERMINISTIC) || c->prep < 0 ||
        light < 0 || gather < 0 || k[gather].dim != k[light].dim)
        return false;
    const int bwd = find_bwd(p, k[light].dim);
    if (bwd < 0)
        return false;
    c->bwd = bwd;
    c->light = light;
    c->gather = gather;
    return true;
}

static bool takes(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    if (p->pass == HEDDLE_FORWARD) {
        if (a->features & HEDDLE_E4M3) {
            const kernel_variant variant = a->h / a->hk * a->sq > 16    ? VARIANT_bytefull
                                           : a->features & HEDDLE_PAGES ? VARIANT_bytepages
                                                                        : VARIANT_bytes;
            c->fwd = heddle__cuda_find_attention(p, PASS_fwd, variant, FAMILY_sm80);
            return c->fwd >= 0;
        }
        if (a->h / a->hk * a->sq <= 16)
            c->fwd = heddle__cuda_find_attention(
                p, PASS_fwd, a->features & HEDDLE_PAGES ? VARIANT_paged : VARIANT_decode, FAMILY_sm80);
        if (c->fwd < 0)
            c->fwd = find_rich(p);
        if (c->fwd < 0 && (a->dtype != HEDDLE_F32 || !(a->features & HEDDLE_PAGES)))
            c->fwd = find(p, PASS_fwd);
        return c->fwd >= 0;
    }
    c->prep = heddle__cuda_find_attention(p, PASS_prep, VARIANT_full, FAMILY_sm80);
    if (a->features & HEDDLE_BIAS)
        c->dbias = heddle__cuda_find_attention(p, PASS_dbias, VARIANT_full, FAMILY_sm80);
    if (takes_fused(p, c))
        return true;
    c->dkdv = find(p, PASS_dkdv);
    c->dq = find(p, PASS_dq);
    return c->prep >= 0 && c->dkdv >= 0 && c->dq >= 0;
}

/* ------------------------------------------------------------------------------------------------ its workspace */

/* How many blocks share the keys of a unit. As many as the device holds at a time, in one wave; of more units than that, what ends the least after
 * the memory is done: half of the multiprocessors can keep it busy, a few that are left over at the end cannot. */
static int64_t shares_of(int64_t units, int64_t slots) {
    if (units <= slots)
        return slots / units;
    int64_t best = 1;
    double least = 0;
    for (int64_t s = 1; s <= 4; s++) {
        const int64_t waves = units * s / slots, rest = units * s % slots;
        const double last = rest ? (double)max64(2 * rest, slots) / (double)(2 * slots) : 0;
        const double time = ((double)waves + last) / (double)s * (s > 1 ? 1.03 : 1); /* combine */
        if (s == 1 || time < least) {
            best = s;
            least = time;
        }
    }
    return best;
}

/* One pass over the keys for all rows of a group. */
static void lay_out_decode(const attention_problem *p, const kernel_row *k, attention_choice *c) {
    const heddle_attention *a = p->a;
    const int64_t resident = (int64_t)((p->device->shared_bytes + 1024) / (heddle__cuda_shared_bytes(k) + 1024));
    const int64_t slots = p->device->multiprocessors * clamp64(resident, 1, 8), units = max64(1, a->hk * a->b);
    c->pack = a->h / a->hk;
    c->tiles_q = ceil_div(a->sq, k->own);
    c->key_shares = clamp64(min64(shares_of(units, slots), a->sk / (k->block * k->warps)), 1, MAX_KEY_SHARES);
    c->blocks = a->hk * a->b * c->key_shares;
}

/* Rows of a group's heads share a tile where one head has few. Too few blocks for the device: let several share the keys. */
static void lay_out_tiles(const attention_problem *p, const kernel_row *k, attention_choice *c) {
    const heddle_attention *a = p->a;
    if (a->sq * 2 <= k->own)
        c->pack = a->h / a->hk;
    c->tiles_q = ceil_div(a->sq * c->pack, k->own);
    const int64_t blocks = max64(1, c->tiles_q * (a->h / c->pack) * a->b), key_blocks = ceil_div(a->sk, k->block);
    const int64_t wanted = p->device->multiprocessors * 2;
    if (blocks * 2 <= wanted)
        c->key_shares = clamp64(min64(wanted / blocks, key_blocks / 4), 1, MAX_KEY_SHARES);
    c->blocks = c->tiles_q * (a->h / c->pack) * a->b * c->key_shares;
}

static void lay_out_forward(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const kernel_row *k = &heddle__cuda_attention_kernels[c->fwd];
    if (p->stands_in) { /* there is no workspace for shares of keys */
        c->tiles_q = ceil_div(a->sq, k->own);
        c->blocks = c->tiles_q * a->h * a->b;
    } else if (k->variant == VARIANT_decode || k->variant == VARIANT_paged || k->variant == VARIANT_bytes ||
               k->variant == VARIANT_bytepages) {
        lay_out_decode(p, k, c);
    } else {
        lay_out_tiles(p, k, c);
    }
    if (c->key_shares > 1) {
        c->part_lse = c->part_o + align64((size_t)(c->key_shares * c->lse_rows * a->dv) * sizeof(float));
        c->bytes = c->part_lse + align64(2 * (size_t)(c->key_shares * c->lse_rows) * sizeof(float));
    }
    const bool bytes = k->variant == VARIANT_bytefull;
    const bool reads_map =
        bytes || k->variant == VARIANT_full || k->variant == VARIANT_rich || k->variant == VARIANT_biased;
    if (reads_map && c->pack == 1 && heddle__cuda_map_pays(p)) /* a tile has rows of one head */
        heddle__cuda_place_map(p, bytes ? k->own : MASK_TILE, MASK_TILE, false, c);
}

static void lay_out_fused(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const kernel_row *k = &heddle__cuda_attention_kernels[c->bwd];
    const int64_t tiles = a->features & HEDDLE_VARLEN ? packed_tiles64(a->total_q, a->b) : tiles64(a->sq) * a->b;
    c->flags = c->bytes;
    c->bytes += align64((size_t)(tiles64(a->sq) * a->h * a->b) * sizeof(int32_t));
    c->sum = c->bytes;
    c->bytes += (size_t)(tiles * 64 * a->h * k->dim) * sizeof(float);
    c->tiles_q = ceil_div(a->sq, heddle__cuda_attention_kernels[c->gather].own);
    c->tiles_k = ceil_div(a->sk, k->own);
    c->blocks = c->tiles_q * a->h * a->b;
    c->blocks_dkdv = c->tiles_k * a->hk * a->b;
    if (p->rich) {
        c->dirty = c->bytes;
        c->bytes += align64((size_t)(tiles64(a->sq) * a->h * a->b) * sizeof(int32_t));
        heddle__cuda_place_map(p, k->own, MASK_TILE, true, c);
    }
}

static void lay_out(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    if (p->pass == HEDDLE_FORWARD) {
        lay_out_forward(p, c);
        return;
    }
    if (c->bwd >= 0) {
        lay_out_fused(p, c);
        return;
    }
    const kernel_row *dkdv = &heddle__cuda_attention_kernels[c->dkdv];
    c->tiles_q = ceil_div(a->sq, heddle__cuda_attention_kernels[c->dq].own);
    c->tiles_k = ceil_div(a->sk, dkdv->own);
    const int tiles = sm80_tiles((int)heddle_dtype_size(a->dtype), dkdv->dim, dkdv->warps, dkdv->own);
    c->blocks = c->tiles_q * a->h * a->b;
    c->blocks_dkdv = c->tiles_k * a->hk * a->b * (sm80_makes_both(dkdv->dim, tiles) ? 1 : 2);
    if (heddle__cuda_map_pays(p)) {
        heddle__cuda_place_map(p, MASK_TILE, MASK_TILE, true, c);
        heddle__cuda_place_map(p, MASK_TILE, MASK_TILE, false, c);
    }
}

/* ------------------------------------------------------------------------------------------------- its launches */

static void launch(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const heddle_attention *a = p->a;
    const int64_t rows = a->b * a->h * a->sq;
    heddle__cuda_add_mask(p, c, job);
    if (p->pass == HEDDLE_FORWARD) {
        heddle__cuda_add_launch(job, c->fwd, c->blocks);
        if (c->key_shares > 1)
            heddle__cuda_add_plain(p, job, PASS_combine, rows);
        return;
    }
    if (a->features & HEDDLE_WEIGHTS)
        heddle__cuda_add_plain(p, job, PASS_prep, ceil_div(rows, PLAIN_PREP_ROWS));
    heddle__cuda_add_prep(p, c, job);
    if (c->bwd < 0) {
        heddle__cuda_add_dkdv_and_dq(c, job);
        if (job->params.p.t.dbias && c->dbias >= 0)
            heddle__cuda_add_dbias(p, c, INT64_MAX, job);
        return;
    }
    const kernel_data *t = &job->params.p.t;
    const bool wanted = t->dk || t->dv || t->dq;
    if (wanted)
        heddle__cuda_add_launch(job, c->bwd, c->blocks_dkdv);
    if (t->dq)
        heddle__cuda_add_launch(job, c->gather, c->blocks);
    if (t->dbias && c->dbias >= 0 && !(wanted && sm80_gives_dbias(a, t->dbias)))
        heddle__cuda_add_dbias(p, c, INT64_MAX, job);
}

const attention_family heddle__attention_sm80 = {takes, heddle__cuda_tensor_core_time, lay_out, launch, 0, true, true};

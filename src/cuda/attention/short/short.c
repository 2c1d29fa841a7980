/* SPDX-License-Identifier: Apache-2.0
 * Attention backward of few keys, in 16 bits: by blocks that have whole rows. Pure. */
#include "cuda/attention/family.h"
#include "cuda/attention/short/contract.h"

/* A block walks over all queries of a head of keys, three times as fast as others that share them would take all together: with fewer blocks
 * than a third of the multiprocessors, no more steps than so many. */
#define MOST_STEPS 8

static int64_t units_of(const heddle_attention *a) {
    return a->hk * a->b;
}

static bool takes(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    if (p->pass != HEDDLE_BACKWARD || a->dtype == HEDDLE_F32 || p->rich || heddle__cuda_is_empty(a) ||
        a->sk > SHORT_KEYS || (a->features & HEDDLE_ACCUMULATE))
        return false;
    const int kernel = heddle__cuda_find_attention(p, PASS_bwd, VARIANT_lean, FAMILY_short);
    if (kernel < 0)
        return false;
    const int64_t steps = ceil_div(a->sq, heddle__cuda_attention_kernels[kernel].block) * (a->h / a->hk);
    if (3 * units_of(a) < p->device->multiprocessors && steps > MOST_STEPS)
        return false;
    c->bwd = kernel;
    return true;
}

static void lay_out(const attention_problem *p, attention_choice *c) {
    c->tiles_q = ceil_div(p->a->sq, heddle__cuda_attention_kernels[c->bwd].block);
    c->tiles_k = 1;
    c->blocks = units_of(p->a);
}

static void launch(const attention_problem *p, const attention_choice *c, attention_job *job) {
    (void)p;
    heddle__cuda_add_launch(job, c->bwd, c->blocks);
}

const attention_family heddle__attention_short = {takes, NULL, lay_out, launch, 0, false, false};

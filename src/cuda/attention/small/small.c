/* SPDX-License-Identifier: Apache-2.0
 * Attention by the family small, for a problem that cannot fill the device. Pure. */
#include "cuda/attention/family.h"
#include "cuda/attention/plain/contract.h"

/* Beyond so many rows nobody asks. */
#define MOST_ROWS 4096

/* Does its backward need D to be there? Of few keys, which in float32 a mask may leave, too, and of sums in float32. */
static bool needs_d(const heddle_attention *a) {
    return (a->features & HEDDLE_ACCUMULATE) || heddle__cuda_attention_has_few_keys(a) ||
           (a->dtype == HEDDLE_F32 && (a->features & (HEDDLE_BOOL_MASK | HEDDLE_BIAS)));
}

/* It has no backward with dweights; float32's forward follows suit: both passes or none, for the families round float32 scores
 * differently, and where few keys share a row, P = exp(S - lse) with the lse of another family is wrong by more than plain float32 would
 * be. A backward with few keys takes a launch more: in 16 bits nothing is gained then. */
static bool takes(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const bool backward = p->pass == HEDDLE_BACKWARD;
    if (p->device->small == SMALL_NEVER || ((backward || a->dtype == HEDDLE_F32) && (a->features & HEDDLE_WEIGHTS)))
        return false;
    if (p->device->small == SMALL_CHOSEN && (heddle__cuda_is_empty(a) || a->sq > MOST_ROWS || a->sk > MOST_ROWS ||
                                             (backward && a->dtype != HEDDLE_F32 && needs_d(a))))
        return false;
    const int kernel = heddle__cuda_find_attention(p, backward ? PASS_bwd : PASS_fwd, VARIANT_full, FAMILY_small);
    *(backward ? &c->bwd : &c->fwd) = kernel;
    return kernel >= 0;
}

static double time_of(const attention_problem *p) {
    return p->device->small == SMALL_ALWAYS ? 0 : heddle__cuda_small_time(p);
}

static void lay_out(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const bool backward = p->pass == HEDDLE_BACKWARD;
    const kernel_row *k = &heddle__cuda_attention_kernels[backward ? c->bwd : c->fwd];
    c->tiles_q = ceil_div(a->sq, k->own);
    c->tiles_k = backward ? ceil_div(a->sk, k->own) : 0;
    c->blocks = c->tiles_q * a->h * a->b;
}

/* Backward: blocks for keys, then blocks for queries: those that somebody waits for. Before them, D where there may be few keys. */
static void launch(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const heddle_attention *a = p->a;
    const kernel_data *t = &job->params.p.t;
    if (p->pass == HEDDLE_FORWARD) {
        heddle__cuda_add_launch(job, c->fwd, c->blocks);
        return;
    }
    if (needs_d(a))
        heddle__cuda_add_plain(p, job, PASS_prep, ceil_div(a->b * a->h * a->sq, PLAIN_PREP_ROWS));
    if (!t->dk && !t->dv)
        job->params.p.tiles_k = 0;
    if (!t->dq && !t->dbias && !t->dsinks)
        job->params.p.tiles_q = 0;
    heddle__cuda_add_launch(job, c->bwd, (job->params.p.tiles_k * a->hk + job->params.p.tiles_q * a->h) * a->b);
}

const attention_family heddle__attention_small = {takes, time_of, lay_out, launch, 0, false, false};

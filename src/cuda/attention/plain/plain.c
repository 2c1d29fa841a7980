/* SPDX-License-Identifier: Apache-2.0
 * Attention by the plain kernels, which take any problem on any GPU. Pure. */
#include "cuda/attention/family.h"
#include "cuda/attention/plain/contract.h"

static bool takes(const attention_problem *p, attention_choice *c) {
    if (p->pass == HEDDLE_FORWARD) {
        c->fwd = heddle__cuda_find_attention(p, PASS_fwd, VARIANT_plain, FAMILY_sm80);
    } else {
        c->dkdv = heddle__cuda_find_attention(p, PASS_dkdv, VARIANT_plain, FAMILY_sm80);
        c->dq = heddle__cuda_find_attention(p, PASS_dq, VARIANT_plain, FAMILY_sm80);
    }
    return true;
}

/* A block a row. */
static void lay_out(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    c->tiles_q = a->sq;
    c->tiles_k = p->pass == HEDDLE_BACKWARD ? a->sk : 0;
    c->blocks = c->tiles_q * a->h * a->b;
    c->blocks_dkdv = c->tiles_k * a->hk * a->b;
}

static void launch(const attention_problem *p, const attention_choice *c, attention_job *job) {
    if (p->pass == HEDDLE_FORWARD) {
        heddle__cuda_add_launch(job, c->fwd, c->blocks);
        return;
    }
    heddle__cuda_add_plain(p, job, PASS_prep, ceil_div(p->a->b * p->a->h * p->a->sq, PLAIN_PREP_ROWS));
    heddle__cuda_add_dkdv_and_dq(c, job);
}

const attention_family heddle__attention_plain = {takes, NULL, lay_out, launch, 0, true, false};

/* SPDX-License-Identifier: Apache-2.0
 * How far a kernel is from the truth, beside a textbook computation in the same type: what verify judges by, for the
 * smallest problem of a kind that takes the kernel that was timed. */
#include "bench.h"
#include "verify.h"

#include <math.h>
#include <string.h>

/* Forward; what the reference, one thread in double, does in half a second or so. */
static const double most_flops = 7e7;

static bool takes(const job *j, heddle_pass pass, const char *kernel) {
    char name[128] = "";
    if (j->linear)
        heddle_norm_linear_kernel(&j->l, pass, name, sizeof name);
    else
        heddle_attention_kernel(&j->a, pass, name, sizeof name);
    return !strcmp(name, kernel);
}

static bench_case smaller(const bench_case *c, int64_t s) {
    bench_case small = *c;
    const int64_t group = c->hk ? c->h / c->hk : 1;
    if (c->h == 0) {
        small.m = c->m < s ? c->m : s;
        small.n = c->n < 128 ? c->n : 128;
        return small;
    }
    small.b = 1;
    small.h = 2 * group;
    small.hk = 2;
    if (c->sq > 1)
        small.sq = c->sq < s ? c->sq : s;
    small.sk = c->sk < (c->sq > 1 ? s : 8 * s) ? c->sk : (c->sq > 1 ? s : 8 * s);
    return small;
}

static double worst(const problem *p, heddle_dtype dtype, const trial *t, heddle_pass pass) {
    double most = 0;
    for (int f = 0; job_fields(&p->j)[f].name; f++) {
        if (!t->ours.x[f] || !is_output_of(&job_fields(&p->j)[f], pass))
            continue;
        const judgement x = judge(p, f, dtype, t);
        /* Both may be exact, as gradients of one key are. */
        const double ratio = x.ours.largest == 0   ? 0
                             : x.plain.largest > 0 ? x.ours.largest / x.plain.largest
                                                   : INFINITY;
        most = fmax(most, x.ours.broken ? INFINITY : ratio);
    }
    return most;
}

static void run_small(const bench_case *c, const job *j, uint64_t seed, const bool *wanted, double *errors) {
    arena m = {0};
    random_state r = {seed};
    trial t = {0};
    problem p = j->linear ? norm_linear_problem() : attention_problem();
    p.j = *j;
    problem_fill(&p, &m, &r);
    if (c->forward_only)
        p.x[DOUT] = p.x[DLSE] = NULL;
    problem_round(&p, c->dtype);
    const bool ran = trial_run(&p, &m, j->linear ? j->l.device : j->a.device, c->dtype, &t);
    for (int pass = HEDDLE_FORWARD; pass <= HEDDLE_BACKWARD && ran; pass++)
        if (wanted[pass])
            errors[pass] = worst(&p, c->dtype, &t, (heddle_pass)pass);
    arena_free(&m);
}

void bench_errors(const bench_case *c, heddle_device device, char kernels[2][128], uint64_t seed, double errors[2]) {
    static const int64_t lengths[] = {64, 130, 260, 520};
    errors[0] = errors[1] = -1;
    if (job_features(&(job){.a = bench_job(c, device).a}) &
        (HEDDLE_ACCUMULATE | HEDDLE_PAGES | HEDDLE_E4M3 | HEDDLE_VARLEN | HEDDLE_BLOCKS))
        return; /* the textbook adds to nothing, and what pages and lists hide is of verify's own tables */
    bool missing[2] = {true, !c->forward_only};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths && (missing[0] || missing[1]); i++) {
        const bench_case small = smaller(c, lengths[i]);
        job j = bench_job(&small, device);
        if (!j.linear)
            j.a.window_left = j.a.features & HEDDLE_WINDOW ? lengths[i] / 3 : 0;
        bool wanted[2];
        for (int p = HEDDLE_FORWARD; p <= HEDDLE_BACKWARD; p++)
            wanted[p] = missing[p] && takes(&j, (heddle_pass)p, kernels[p]);
        if (!(wanted[0] || wanted[1]) || job_flops(&j, HEDDLE_FORWARD) > most_flops)
            continue;
        run_small(c, &j, seed, wanted, errors);
        missing[0] = missing[0] && !wanted[0];
        missing[1] = missing[1] && !wanted[1];
    }
}

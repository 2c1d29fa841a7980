/* SPDX-License-Identifier: Apache-2.0
 * The plan of attention on CUDA: which family takes a problem; its parameters; the launches that families share. Pure. */
#include "cuda/attention/dbias.h"
#include "cuda/attention/family.h"
#include "cuda/attention/plain/contract.h"
#include "dtype.h"
#include "mask.h"
#include "status.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

static_assert(sizeof(attention_choice) <= sizeof(plan_own), "it lies in the plan");
static_assert(_Alignof(attention_choice) <= _Alignof(plan_own), "it lies in the plan");

/* ------------------------------------------------------------------------------------------------------ choice */

/* In this order they are asked whether they take a problem. */
static const attention_family *const families[] = {&heddle__attention_small, &heddle__attention_short,
                                                   &heddle__attention_sm90,  &heddle__attention_sm90_f32,
                                                   &heddle__attention_sm80,  &heddle__attention_plain};

enum { FAMILIES = sizeof families / sizeof *families };

/* What the first must gain over the next that takes a problem, where both times are known. */
#define GAIN 0.85

/* More is asked for than the lean kernels can. */
static bool is_rich(const heddle_attention *a, heddle_pass pass) {
    const uint64_t rich = HEDDLE_ALIBI | HEDDLE_BIAS | HEDDLE_BOOL_MASK | (pass == HEDDLE_FORWARD ? 0 : HEDDLE_WEIGHTS);
    return (a->features & rich) || a->softcap > 0 || a->dropout > 0 || !(a->scale > 0);
}

bool heddle__cuda_is_empty(const heddle_attention *a) {
    const bool packed = a->features & HEDDLE_VARLEN, paged = a->features & HEDDLE_PAGES;
    return !a->b || !a->h || !a->sq || !a->sk || (packed && (!a->total_q || (!paged && !a->total_k)));
}

bool heddle__cuda_attention_sees_few(const heddle_attention *a) {
    const band seen = band_of(a, (sequence){.sq = a->sq, .sk = a->sk});
    return a->sk <= FEW_KEYS || seen.hi - seen.lo < FEW_KEYS;
}

bool heddle__cuda_attention_has_few_keys(const heddle_attention *a) {
    return heddle__cuda_attention_sees_few(a) || (a->features & (HEDDLE_VARLEN | HEDDLE_SEQLENS)) != 0;
}

/* Eights of keys, which dropout counts, do not begin with the part's: that is for the plain kernels, which ask for each element by itself. */
static bool counts_askew(const heddle_attention *a) {
    return a->dropout > 0 && a->k_offset % DROPOUT_KEYS;
}

/* The next family from `from` on that takes the problem; the last takes all. */
static int next_taker(const attention_problem *p, int from, attention_choice *c) {
    for (int x = from;; x++) {
        *c = (attention_choice){.family = x,
                                .fwd = -1,
                                .dkdv = -1,
                                .dq = -1,
                                .bwd = -1,
                                .prep = -1,
                                .light = -1,
                                .gather = -1,
                                .split = -1,
                                .few_fwd = -1,
                                .few_prep = -1,
                                .few_dkdv = -1,
                                .few_dq = -1,
                                .dbias = -1,
                                .pack = 1,
                                .key_shares = 1};
        if (x < FAMILIES - 1 && counts_askew(p->a))
            continue;
        if ((p->a->features & HEDDLE_PAGES) && !families[x]->pages)
            continue;
        if ((p->a->features & HEDDLE_E4M3) && x < FAMILIES - 1 && families[x] != &heddle__attention_sm80)
            continue;
        if (p->stands_in && p->made && families[x]->bytes) /* for which who it stands in for has no room */
            continue;
        if (!(p->stands_in && families[x]->needs) && families[x]->takes(p, c))
            return x;
    }
}

static void choose(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    int x = next_taker(p, 0, c);
    if (families[x]->time) {
        attention_choice other;
        const int y = x + 1 < FAMILIES ? next_taker(p, x + 1, &other) : x;
        if (families[y]->time && families[y]->time != families[x]->time &&
            !(families[x]->time(p) < GAIN * families[y]->time(p))) {
            x = y;
            *c = other;
        }
    }
    c->lse_rows = a->h * (a->features & HEDDLE_VARLEN ? a->total_q : a->b * a->sq);
    if (p->pass == HEDDLE_BACKWARD) { /* D, base and rest first: who stands in finds them there */
        const size_t each = align64((size_t)max64(1, c->lse_rows) * sizeof(float)); /* nothing else has offset 0 */
        c->base = each;
        c->rest = 2 * each;
        c->bytes = 3 * each;
    } else if (a->features & HEDDLE_ACCUMULATE) { /* lse of all, until nobody asks any more for that of what is there */
        c->part_o = c->bytes = align64((size_t)c->lse_rows * sizeof(float));
    }
    heddle__cuda_place_collected(p, c);
    families[x]->lay_out(p, c);
    heddle__cuda_place_seen(p, families[x]->bytes, c);
}

static attention_choice *choice_of(attention_plan *plan) {
    return (attention_choice *)(void *)&plan->own;
}

static const attention_choice *planned_choice(const attention_plan *plan) {
    return (const attention_choice *)(const void *)&plan->own;
}

void heddle__cuda_set_attention_device(attention_plan *plan, void *record, void *context) {
    choice_of(plan)->record = record;
    choice_of(plan)->context = context;
}

void *heddle__cuda_attention_device(const attention_plan *plan, void **context) {
    *context = planned_choice(plan)->context;
    return planned_choice(plan)->record;
}

static int64_t dbias_blocks(const heddle_attention *a) {
    const heddle_strides s = a->dbias_stride;
    return plain_key_blocks(a->sk) * (s.s ? a->sq : 1) * (s.h ? a->h : 1) * (s.b ? a->b : 1);
}

_Static_assert(sizeof(kernel_data) == offsetof(heddle_attention_data, q_segments), "kernels know what comes in front");

static heddle_status check_limits(const heddle_attention *a) {
    /* No launch has more blocks than rows, but where there are few: then up to two for K and two for Q. */
    const int64_t most_blocks = INT32_MAX, rows = max64(4, max64(a->sq, a->sk));
    const int64_t off = diagonal_offset(a, (sequence){.sq = a->sq, .sk = a->sk});
    if (a->sq >= INT64_C(1) << 30 || a->sk >= INT64_C(1) << 30)
        return fail(HEDDLE_UNSUPPORTED, "sq = %lld, sk = %lld: the CUDA kernels count rows up to 2^30",
                    (long long)a->sq, (long long)a->sk);
    if ((a->features & HEDDLE_ALIBI) && (off >= INT64_C(1) << 30 || off <= -(INT64_C(1) << 30)))
        return fail(HEDDLE_UNSUPPORTED,
                    "HEDDLE_ALIBI: the part is %lld keys off the diagonal, the CUDA kernels count up to 2^30",
                    (long long)off);
    if (a->h > most_blocks || a->b > most_blocks || max64(1, a->b) * a->h > most_blocks / rows ||
        ((a->features & HEDDLE_BIAS) && dbias_blocks(a) > most_blocks))
        return fail(HEDDLE_UNSUPPORTED, "b·h·sq = %lld·%lld·%lld, sk = %lld: over 2^31 blocks", (long long)a->b,
                    (long long)a->h, (long long)a->sq, (long long)a->sk);
    return heddle__cuda_check_tiles(a);
}

/* What of a problem is not as the caller has described it. */
typedef struct problem_room {
    heddle_attention collected, masked;
} problem_room;

/* Of a plan, as the families have it. */
static attention_problem problem_of(const attention_plan *plan, const cuda_facts *device, collected_as as,
                                    problem_room *room) {
    const heddle_attention *keys = heddle__cuda_with_collected(&plan->a, as, &room->collected);
    const heddle_attention *a = heddle__cuda_with_mask(keys, as, &room->masked);
    return (attention_problem){.a = a,
                               .made = a == keys ? NULL : keys,
                               .given = &plan->a,
                               .collected = as,
                               .device = device,
                               .pass = plan->pass,
                               .rich = is_rich(a, plan->pass)};
}

/* Who stands in for a family has the keys as the caller has them. */
static attention_problem standing_in(const attention_plan *plan, const cuda_facts *device, problem_room *room) {
    attention_problem p = problem_of(plan, device, NOT_COLLECTED, room);
    p.stands_in = true;
    return p;
}

/* The choice, of keys collected where Hopper's kernels take these alone. */
static attention_problem choose_keys(const attention_plan *plan, const cuda_facts *device, problem_room *room,
                                     attention_choice *c) {
    attention_problem p = problem_of(plan, device, NOT_COLLECTED, room);
    choose(&p, c);
    const collected_as as = families[c->family] == &heddle__attention_sm90
                                ? NOT_COLLECTED
                                : heddle__cuda_how_collected(&plan->a, plan->pass, device);
    attention_choice other;
    if (as == NOT_COLLECTED)
        return p;
    p = problem_of(plan, device, as, room);
    choose(&p, &other);
    if (families[other.family] == &heddle__attention_sm90)
        *c = other;
    else
        p = problem_of(plan, device, NOT_COLLECTED, room);
    return p;
}

/* What the workspace has room for: also for who may stand in, with a map of other tiles. */
static size_t workspace_of(const attention_plan *plan, const attention_problem *p, const attention_choice *c) {
    if ((!p->made && p->collected == NOT_COLLECTED) || !families[c->family]->needs)
        return c->bytes;
    problem_room room;
    attention_choice of_other;
    const attention_problem other = standing_in(plan, p->device, &room);
    choose(&other, &of_other);
    return of_other.bytes > c->bytes ? of_other.bytes : c->bytes;
}

heddle_status heddle__cuda_plan_attention(attention_plan *plan, const cuda_facts *device) {
    const heddle_status status = check_limits(&plan->a);
    if (status != HEDDLE_OK)
        return status;
    attention_choice *c = choice_of(plan);
    problem_room room;
    plan->a.multiprocessors = limit_of(device, plan->a.multiprocessors);
    const cuda_facts limited = limited_facts(device, plan->a.multiprocessors);
    const attention_problem p = choose_keys(plan, &limited, &room, c);
    const int kernel = plan->pass == HEDDLE_FORWARD ? c->fwd : c->bwd >= 0 ? c->bwd : c->dkdv;
    const kernel_row *k = &heddle__cuda_attention_kernels[kernel];
    const bool of_queries = k->pass == PASS_fwd || k->family == FAMILY_small;
    plan->threads = 1;
    plan->tile_q = of_queries ? k->own : k->block;
    plan->tile_k = of_queries ? k->block : k->own;
    plan->chunk_k = plan->tile_k;
    plan->workspace = workspace_of(plan, &p, c);
    heddle__copy_text(plan->kernel, sizeof plan->kernel, heddle__cuda_kernels[kernel].symbol);
    return HEDDLE_OK;
}

/* -------------------------------------------------------------------------------------------------- parameters */

/* Of elements of e bytes. */
static bool is_vector(size_t e, const void *p, heddle_strides s, int64_t last) {
    return ((uintptr_t)p | (size_t)s.b * e | (size_t)s.h * e | (size_t)s.s * e | (size_t)last * e) % 16 == 0;
}

/* Do the rows begin at multiples of two elements? */
static bool is_paired(heddle_dtype dtype, const void *p, heddle_strides s) {
    const size_t e = heddle_dtype_size(dtype);
    return ((uintptr_t)p | (size_t)(s.b | s.h | s.s) * e) % (2 * e) == 0;
}

/* Keys that are collected may lie anywhere. */
static bool is_aligned(const heddle_attention_data *t, collected_as as) {
    const uintptr_t keys = as == NOT_COLLECTED ? (uintptr_t)t->k | (uintptr_t)t->v : 0;
    return (((uintptr_t)t->q | keys | (uintptr_t)t->o | (uintptr_t)t->dout | (uintptr_t)t->dq | (uintptr_t)t->dk |
             (uintptr_t)t->dv) &
            15) == 0;
}

static bool is_plain(heddle_pass pass, const attention_choice *c) {
    return pass == HEDDLE_BACKWARD && c->bwd < 0 && c->dkdv >= 0 &&
           heddle__cuda_attention_kernels[c->dkdv].variant == VARIANT_plain;
}

/* The power of two in a positive number. */
static double power_below(double x) {
    int exponent;
    frexp(x, &exponent);
    return ldexp(1, exponent - 1);
}

/* Does this kernel take scores in units of the exponential's factor? What is put together of shares of keys is in natural ones. */
static bool scales_late(const attention_choice *c) {
    const kernel_row *k = &heddle__cuda_attention_kernels[c->fwd];
    return k->family == FAMILY_sm90 || (k->variant == VARIANT_rich && c->key_shares == 1);
}

/* The factor of scores that a forward leaves to the exponential, where nothing is added to them; 0: none. */
static double late_factor(const attention_problem *of, const attention_choice *c) {
    const heddle_attention *a = of->a;
    const double factor = a->softcap > 0 ? a->softcap : a->scale;
    const bool late = of->rich && of->pass == HEDDLE_FORWARD && c->fwd >= 0 && a->dtype != HEDDLE_F32 &&
                      scales_late(c) && !(a->features & (HEDDLE_ALIBI | HEDDLE_BIAS));
    return late && factor > 0 ? factor : 0;
}

/* What the formulas take. */
static void fill_numbers(const attention_problem *of, const attention_choice *c, attention_params *p) {
    const heddle_attention *a = of->a;
    const double log2e = 1.4426950408889634;
    p->rich = of->rich || is_plain(of->pass, c);
    const bool natural = p->rich || families[c->family] == &heddle__attention_small; /* are the kernels' scores */
    const double late = late_factor(of, c);
    p->scale = (float)a->scale;
    p->score_in = a->softcap > 0 ? (float)fmax(fmin(a->scale / a->softcap, FLT_MAX), -FLT_MAX) : 0;
    p->scale_log2 = (float)((late ? late : a->scale) * log2e);
    const double unit = late ? late : natural ? 1 : a->scale;
    /* P = exp2(f·(S - lse)): with the very factor of S, its rounding weighs on the difference alone. */
    const double factor = natural && !late ? (double)(float)log2e : (double)p->scale_log2 / unit;
    p->lse_factor = (float)factor;
    p->lse_factor_low = (float)(factor - (double)p->lse_factor);
    p->lse_unit = (float)(1 / factor);
    p->lse_unit_low = (float)(1 / factor - (double)p->lse_unit);
    p->lse_more = (float)(factor / log2e - 1);
    p->unit = (float)unit;
    p->lse_huge = (float)(power_below(natural && !late ? log2e : p->scale_log2) / unit);
    p->softcap = (float)a->softcap;
    p->inverse_softcap = a->softcap > 0 ? (float)(1 / a->softcap) : 0;
    p->keep_scale = (float)dropout_scale(a->dropout);
    p->drop_threshold = dropout_threshold(a->dropout);
    p->drops = a->dropout > 0;
    p->drop_row = (uint32_t)a->q_offset;
    p->drop_eight = (uint32_t)(a->k_offset / DROPOUT_KEYS);
    p->tf32 = (a->features & HEDDLE_TF32) != 0;
    p->score_out = late ? 1 : (float)(a->softcap > 0 ? a->softcap : a->scale);
    if (natural && !late)
        p->scale_log2 = (float)log2e;
    p->base_log2 = families[c->family] == &heddle__attention_sm90_f32
                       ? p->scale_log2 / (float)power_below(p->scale_log2)
                       : p->scale_log2;
}

/* How the work is divided. */
static void fill_blocks(const attention_problem *of, const attention_choice *c, const heddle_attention_data *data,
                        attention_params *p) {
    const heddle_attention *a = of->a;
    const bool adds = a->features & HEDDLE_ACCUMULATE;
    const size_t each = heddle_dtype_size(a->dtype), keys = a->features & HEDDLE_E4M3 ? 1 : each;
    p->lse_rows = c->lse_rows;
    p->group = (int32_t)(a->h / a->hk);
    p->pack = (int32_t)c->pack;
    p->tiles_q = (int32_t)c->tiles_q;
    p->tiles_k = (int32_t)c->tiles_k;
    p->key_shares = (int32_t)c->key_shares;
    const bool of_q = is_vector(each, data->q, a->q_stride, a->d); /* where no dO is, copies of nothing name Q */
    p->vectors = (of_q ? VECTOR_Q : 0) | (is_vector(keys, data->k, a->k_stride, a->d) ? VECTOR_K : 0) |
                 (is_vector(keys, data->v, a->v_stride, a->dv) ? VECTOR_V : 0) |
                 ((data->dout ? is_vector(each, data->dout, a->do_stride, a->dv) : of_q) ? VECTOR_DO : 0) |
                 (is_vector(adds ? sizeof(float) : each, data->o, a->o_stride, a->dv) ? VECTOR_O : 0) |
                 (is_paired(a->dtype, data->bias, a->bias_stride) ? VECTOR_BIAS : 0);
    p->k_scale = data->k_scale;
    p->v_scale = data->v_scale;
    p->split_tiles_q = c->split_tiles_q;
    p->split_tiles_k = c->split_tiles_k;
    p->blocks_of_dk = c->blocks_of_dk;
    const sequence longest = {.sq = a->sq, .sk = a->sk};
    p->off = diagonal_offset(a, longest) - own_offset(a, longest);
    const band seen = band_along(a, diagonal_offset(a, longest));
    p->lo = (int32_t)clamp64(seen.lo, -(INT64_C(1) << 30), INT64_C(1) << 30);
    p->hi = (int32_t)clamp64(seen.hi, -(INT64_C(1) << 30), INT64_C(1) << 30);
    p->adds = adds;
    p->page_bits = a->features & HEDDLE_PAGES ? __builtin_ctzll((uint64_t)a->page) : 0;
}

/* What lies there in the workspace; nothing lies at its begin that has an offset. */
static void *at(char *workspace, size_t offset) {
    return workspace && offset ? workspace + offset : NULL;
}

static void fill_workspace(const attention_problem *of, const attention_choice *c, char *workspace,
                           attention_params *p) {
    const bool backward = of->pass == HEDDLE_BACKWARD;
    for (int x = 0; x < SPLIT_TENSORS; x++)
        p->split[x] = c->split < 0 || !workspace
                          ? (split_tensor){NULL, NULL}
                          : (split_tensor){workspace + c->split_tiles[x], (split_info *)(workspace + c->split_info[x])};
    p->part_o = backward || !workspace ? NULL : (float *)(workspace + c->part_o);
    p->part_max = at(workspace, c->part_lse);
    p->part_sum = p->part_max ? p->part_max + c->key_shares * c->lse_rows : NULL;
    p->before = p->lse = NULL;
    if (p->adds && !backward) {
        p->before = p->lse = p->t.lse;
        p->t.lse = workspace;
    }
    p->dsum = backward ? (float *)workspace : NULL;
    p->base = at(workspace, c->base);
    p->rest = at(workspace, c->rest);
    p->flags = c->light >= 0 ? at(workspace, c->flags) : NULL;
    p->few = at(workspace, c->few);
    p->dq_sum = p->t.dq ? at(workspace, c->sum) : NULL;
    p->dirty = at(workspace, c->dirty);
    p->seen_by_queries = c->seen_by_queries;
    p->seen_by_queries.kinds = at(workspace, c->kinds_q);
    p->seen_by_queries.bits = at(workspace, c->bits_q);
    p->seen_by_queries.taken = backward ? NULL : at(workspace, c->taken);
    p->seen_of_keys = c->seen_of_keys;
    p->seen_of_keys.kinds = at(workspace, c->kinds_k);
    p->seen_of_keys.bits = at(workspace, c->bits_k);
}

/* ---------------------------------------------------------------------------------------------------- launches */

void heddle__cuda_add_launch(attention_job *job, int kernel, int64_t grid) {
    const kernel_row *k = &heddle__cuda_attention_kernels[kernel];
    if (grid > 0)
        job->launches[job->count++] =
            (attention_launch){(enum cuda_kernel)kernel, (uint32_t)grid, (uint32_t)heddle__cuda_shared_bytes(k),
                               k->family == FAMILY_sm90 && k->dtype != HEDDLE_F32, k->pass == PASS_collect};
}

void heddle__cuda_add_plain(const attention_problem *p, attention_job *job, kernel_pass pass, int64_t grid) {
    heddle__cuda_add_launch(job, heddle__cuda_find_attention(p, pass, VARIANT_plain, FAMILY_sm80), grid);
}

void heddle__cuda_add_prep(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const heddle_attention *a = p->a;
    const int64_t tiles = ceil_div(a->sq, heddle__cuda_attention_kernels[c->prep].own) * a->h * a->b;
    if (c->light >= 0)
        heddle__cuda_add_launch(job, c->light, tiles64(a->sq) * a->h * a->b);
    heddle__cuda_add_launch(job, c->prep, c->light < 0 ? tiles : min64(tiles, 2 * p->device->multiprocessors));
}

/* In float32 on tensor cores dq comes first: as it sums the weights of its rows, it knows what they lack to 1, and leaves that to dkdv and
 * dsinks. */
void heddle__cuda_add_dkdv_and_dq(const attention_choice *c, attention_job *job) {
    const kernel_data *t = &job->params.p.t;
    const bool settles =
        job->params.p.a.dtype == HEDDLE_F32 && heddle__cuda_attention_kernels[c->dq].variant != VARIANT_plain;
    const bool makes_dq = t->dq || (settles && t->dsinks);
    if (makes_dq && settles)
        heddle__cuda_add_launch(job, c->dq, c->blocks);
    if (t->dk || t->dv)
        heddle__cuda_add_launch(job, c->dkdv, c->blocks_dkdv);
    if (makes_dq && !settles)
        heddle__cuda_add_launch(job, c->dq, c->blocks);
}

void heddle__cuda_add_dbias(const attention_problem *p, const attention_choice *c, int64_t most, attention_job *job) {
    const kernel_row *k = &heddle__cuda_attention_kernels[c->dbias];
    heddle__cuda_add_launch(job, c->dbias, min64(dbias_tiles(p->a, k->own, k->block), most));
}

/* By tensor cores, whichever family has made o; from pages, and of keys of 8 bits, by the plain kernel. */
static void add_weights(const attention_problem *p, attention_job *job) {
    const heddle_attention *a = p->a;
    const int x = a->features & (HEDDLE_PAGES | HEDDLE_E4M3)
                      ? -1
                      : heddle__cuda_find_attention(p, PASS_weights, VARIANT_full, FAMILY_sm80);
    if (!a->sk)
        return;
    if (x >= 0)
        heddle__cuda_add_launch(job, x, ceil_div(a->sq, heddle__cuda_attention_kernels[x].own) * a->h * a->b);
    else
        heddle__cuda_add_plain(p, job, PASS_weights, a->b * a->h * a->sq);
}

/* What no family has kernels of its own for. */
static void add_the_rest(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const heddle_attention *a = p->a;
    const kernel_data *t = &job->params.p.t;
    if (p->pass == HEDDLE_FORWARD) {
        if (t->weights)
            add_weights(p, job);
        if (a->features & HEDDLE_ACCUMULATE)
            heddle__cuda_add_plain(p, job, PASS_lse, ceil_div(a->b * a->h * a->sq, PLAIN_THREADS));
        return;
    }
    if (t->dsinks) /* by the numbers that dq has left */
        heddle__cuda_add_plain(p, job, PASS_dsinks, a->h);
    if (t->dbias && c->dbias < 0) {
        /* In float32 tensor cores have formed other scores: D and the log-sum-exp of those that its kernel forms. */
        if (a->dtype == HEDDLE_F32 && c->bwd < 0 && heddle__cuda_attention_kernels[c->dkdv].variant != VARIANT_plain)
            heddle__cuda_add_plain(p, job, PASS_prep, ceil_div(a->b * a->h * a->sq, PLAIN_PREP_ROWS));
        heddle__cuda_add_plain(p, job, PASS_dbias, dbias_blocks(a));
    }
}

void heddle__cuda_attention_job(const attention_plan *plan, const cuda_facts *device, const heddle_attention_data *data,
                                void *workspace, attention_job *job) {
    problem_room room;
    const cuda_facts limited = limited_facts(device, plan->a.multiprocessors);
    const attention_choice *c = planned_choice(plan);
    attention_problem p = problem_of(plan, &limited, c->collected, &room);
    heddle_attention_data found = *data;
    const int needs = families[c->family]->needs;
    attention_choice other;
    if (((needs & NEEDS_ALIGNMENT) && !is_aligned(data, c->collected)) ||
        ((needs & NEEDS_DOUT) && p.pass == HEDDLE_BACKWARD && !data->dout)) {
        p = standing_in(plan, &limited, &room);
        choose(&p, &other);
        c = &other;
    }
    job->count = job->maps = 0;
    if (c->collected != NOT_COLLECTED)
        heddle__cuda_add_collect(&p, c, workspace, &found, job);
    job->params.p.a = *p.a;
    memcpy(&job->params.p.t, &found, sizeof job->params.p.t);
    fill_numbers(&p, c, &job->params.p);
    fill_blocks(&p, c, &found, &job->params.p);
    fill_workspace(&p, c, workspace, &job->params.p);
    heddle__cuda_fill_seen(&p, c, &found, workspace, &job->params.p);
    heddle__cuda_add_seen(&p, job);
    families[c->family]->launch(&p, c, job);
    add_the_rest(&p, c, job);
}

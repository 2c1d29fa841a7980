/* SPDX-License-Identifier: Apache-2.0
 * Attention in bfloat16 and float16 by Hopper's tensor cores and copy engine. Pure. */
#include "cuda/attention/family.h"
#include "cuda/attention/sm90/contract.h"
#include "mask.h"

/* ------------------------------------------------------------------------------------------------ what it takes */

/* Can the copy engine fetch this tensor? Extents over which a stride is 0 it cannot. */
static bool is_copyable(heddle_strides s, bool packed, int64_t b, int64_t h, int64_t rows) {
    const int64_t stride[] = {packed ? 8 : s.b, s.h, s.s}, extent[] = {packed ? 1 : b, h, rows};
    for (int x = 0; x < 3; x++)
        if (stride[x] % 8 || stride[x] >= INT64_C(1) << 38 || (extent[x] > 1 && stride[x] <= 0))
            return false;
    return true;
}

/* K or V. */
static bool are_keys_copyable(const heddle_attention *a, heddle_strides s) {
    const bool packed = a->features & HEDDLE_VARLEN;
    if (a->features & HEDDLE_PAGES)
        return a->pages > 0 && is_copyable(s, false, a->pages, a->hk, a->page);
    return is_copyable(s, packed, a->b, a->hk, packed ? a->total_k : a->sk);
}

/* Can it fetch the tensors, and are the rows of the results whole numbers of 16 bytes? */
static bool is_for_copies(const heddle_attention *a, bool backward) {
    const bool packed = a->features & HEDDLE_VARLEN;
    const int64_t rows_q = packed ? a->total_q : a->sq;
    return a->dv % 8 == 0 && (!backward || a->d % 8 == 0) && is_copyable(a->q_stride, packed, a->b, a->h, rows_q) &&
           are_keys_copyable(a, a->k_stride) && are_keys_copyable(a, a->v_stride) &&
           (!backward || is_copyable(a->do_stride, packed, a->b, a->h, rows_q)) && a->o_stride.b % 8 == 0 &&
           a->o_stride.h % 8 == 0 && a->o_stride.s % 8 == 0;
}

/* What hides elements one by one: whoever streams by has to be looked at before. */
static bool hides(const heddle_attention *a) {
    return (a->features & (HEDDLE_BIAS | HEDDLE_BOOL_MASK)) != 0;
}

/* The kernel of a pass that takes all that is asked for, of no fewer columns than dim. */
static int find_from(const attention_problem *p, kernel_pass pass, int dim) {
    const bool alike = pass == PASS_gather || (pass == PASS_light && !hides(p->a));
    return heddle__cuda_find_attention_from(p, pass, p->rich && !alike ? VARIANT_full : VARIANT_lean, FAMILY_sm90, dim);
}
static int find(const attention_problem *p, kernel_pass pass) {
    return find_from(p, pass, 0);
}

/* The variant that has what is asked for, and as little else as there is one without. */
static kernel_variant variant_of(const attention_problem *p, kernel_pass pass) {
    const heddle_attention *a = p->a;
    if (!p->rich)
        return pass == PASS_fwd && (a->features & HEDDLE_ACCUMULATE) ? VARIANT_adding : VARIANT_lean;
    const bool capped = a->softcap > 0 || (a->features & HEDDLE_ALIBI), biased = (a->features & HEDDLE_BIAS) != 0,
               masked = (a->features & HEDDLE_BOOL_MASK) != 0, dropped = a->dropout > 0;
    if (!(a->scale > 0))
        return VARIANT_full;
    if (capped + biased + (masked || dropped) != 1)
        return pass == PASS_bwd && !dropped ? VARIANT_undropped : VARIANT_full;
    if (dropped)
        return masked ? VARIANT_maskdrop : VARIANT_dropped;
    if (biased && pass == PASS_bwd && a->bias_stride.s == 0)
        return VARIANT_keyed;
    return capped ? VARIANT_capped : biased ? VARIANT_biased : VARIANT_masked;
}

/* Of these passes there are such variants; a full one does what they do, and others besides. */
static int find_own(const attention_problem *p, kernel_pass pass) {
    const int full = find(p, pass), own = heddle__cuda_find_attention(p, pass, variant_of(p, pass), FAMILY_sm90);
    const kernel_row *k = heddle__cuda_attention_kernels;
    return own >= 0 && (full < 0 || k[own].dim <= k[full].dim) ? own : full;
}

/* In backward tanh comes from P and the log-sum-exp, which hold it as long as the cap is not small beside their rounding and nothing has been
 * added to what was capped. */
static bool finds_tanh_again(const heddle_attention *a) {
    return !(a->softcap > 0) || (a->softcap >= 1 && !(a->features & (HEDDLE_ALIBI | HEDDLE_BIAS)));
}

/* No more than the full kernels can, or of keys in pages those that are for them. In float16 all elements have tanh_of. */
static bool takes_options(const attention_problem *p) {
    if (p->a->dtype == HEDDLE_F16 && p->a->softcap > SM90_MOST_CAP)
        return false;
    if (p->a->features & HEDDLE_PAGES)
        return !(p->a->features & HEDDLE_ACCUMULATE) && (!p->rich || variant_of(p, PASS_fwd) == VARIANT_capped);
    return !p->rich || p->pass == HEDDLE_FORWARD || (!(p->a->features & HEDDLE_WEIGHTS) && finds_tanh_again(p->a));
}

/* At d 64 a tile has 192 queries. Of masks that differ from query to query more tiles are empty where it has 128: worth more where there are
 * such than what it costs where there are none. */
static int find_forward(const attention_problem *p) {
    if (p->a->features & HEDDLE_PAGES)
        return heddle__cuda_find_attention(p, PASS_fwd, p->rich ? VARIANT_cappages : VARIANT_paged, FAMILY_sm90);
    const int usual = find_own(p, PASS_fwd),
              narrow = heddle__cuda_find_attention(p, PASS_fwd, VARIANT_narrow, FAMILY_sm90);
    const kernel_row *k = heddle__cuda_attention_kernels;
    const bool differ = usual >= 0 && k[usual].variant == VARIANT_masked && p->a->bool_mask_stride.s != 0;
    return differ && narrow >= 0 && k[narrow].dim <= k[usual].dim ? narrow : usual;
}

/* A whole tile for every multiprocessor matters less than its speed, as long as no blocks have to share the keys. */
static bool takes_forward(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const int64_t group = a->h / a->hk;
    c->fwd = find_forward(p);
    if (c->fwd < 0 || group * a->sq <= 16 || (group > 1 && a->sq <= 64))
        return false;
    const kernel_row *k = &heddle__cuda_attention_kernels[c->fwd];
    return ceil_div(a->sq, k->own) * a->h * a->b * sm90_forward_parts(k->dim, a->dv) * 2 >=
               p->device->multiprocessors ||
           a->sk < 8 * k->block;
}

/* Queries to a head of keys from which on the copy engine's sums of dQ are faster (docs/kernels/cuda-attention-sm90.md). */
#define LONG_QUERIES 8192

/* The kernel that makes all three gradients, where their sums need no order; -1: none. */
static int find_fused(const attention_problem *p) {
    const heddle_attention *a = p->a;
    const int x = a->features & HEDDLE_DETERMINISTIC ? -1 : find_own(p, PASS_bwd);
    if (x < 0)
        return x;
    const kernel_row *k = &heddle__cuda_attention_kernels[x];
    if (sm90_is_pair(k->dim, k->own) && p->device->multiprocessors < 2)
        return -1;
    if (p->rich || k->dim <= 64 || a->h / a->hk * a->sq < LONG_QUERIES)
        return x;
    const int is_long = heddle__cuda_find_attention(p, PASS_bwd, VARIANT_long, FAMILY_sm90);
    return is_long >= 0 ? is_long : x;
}

/* The sums that one kernel clears and another adds to are read by a third: of as many columns. */
static bool is_consistent(const attention_choice *c) {
    const int columns = sm90_columns(heddle__cuda_attention_kernels[c->bwd].dim);
    return sm90_columns(heddle__cuda_attention_kernels[c->light].dim) == columns &&
           sm90_columns(heddle__cuda_attention_kernels[c->gather].dim) == columns;
}

/* Are there blocks for dK and for dV, where one makes not both? */
static bool has_both(const attention_problem *p, const attention_choice *c) {
    return sm90_makes_both(heddle__cuda_attention_kernels[c->dkdv].dim) || p->device->multiprocessors >= 2;
}

static bool takes(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const bool backward = p->pass == HEDDLE_BACKWARD;
    if (!p->device->sm90 || a->dtype == HEDDLE_F32 || !takes_options(p) || heddle__cuda_is_empty(a) ||
        !is_for_copies(a, backward))
        return false;
    if (!backward)
        return takes_forward(p, c);
    c->prep = heddle__cuda_find_attention(p, PASS_prep, VARIANT_full, FAMILY_sm80);
    c->bwd = find_fused(p);
    const int dim = c->bwd < 0 ? 0 : heddle__cuda_attention_kernels[c->bwd].dim; /* the sums have its columns */
    c->light = find_from(p, PASS_light, dim);
    c->gather = c->bwd < 0 ? -1 : find_from(p, PASS_gather, dim);
    if (c->bwd >= 0 && (c->light < 0 || c->gather < 0 || !is_consistent(c)))
        c->bwd = c->gather = -1;
    c->dkdv = c->bwd < 0 ? find(p, PASS_dkdv) : -1;
    c->dq = c->bwd < 0 ? find(p, PASS_dq) : -1;
    if (c->dkdv >= 0 && !has_both(p, c))
        return false;
    c->dbias = a->features & HEDDLE_BIAS ? find(p, PASS_dbias) : -1;
    if (c->prep < 0 || c->light < 0)
        return false;
    return c->bwd >= 0 || (c->dkdv >= 0 && c->dq >= 0);
}

/* ------------------------------------------------------------------------------------------------ its workspace */

/* The map of a boolean mask that a kernel reads. */
static void place_map_of(const attention_problem *p, int kernel, bool keys, attention_choice *c) {
    const kernel_row *k = &heddle__cuda_attention_kernels[kernel];
    heddle__cuda_place_map(p, k->own, k->block, keys, c);
}

/* The count of tiles that blocks have taken, which the kernel mask clears. */
static void place_count(const attention_problem *p, attention_choice *c) {
    if (!(p->a->features & HEDDLE_BOOL_MASK))
        return;
    c->taken = c->bytes;
    c->bytes += align64(sizeof(uint32_t));
}

/* Where the lengths are known to the device alone, it has to see to it that the work is spread: more blocks than multiprocessors, of which
 * some find that nothing is left to do. */
static bool has_uneven_work(const heddle_attention *a) {
    return (a->features & (HEDDLE_VARLEN | HEDDLE_SEQLENS)) && !(a->features & HEDDLE_BOOL_MASK);
}

/* Of so few tiles a sequence a block's start costs as much as they do, so that up to d 128 there are no more blocks than so many a
 * multiprocessor. */
enum { FEW_TILES = 8, FORWARD_BLOCKS_EACH = 4, FUSED_BLOCKS_EACH = 3 };

/* A block for each multiprocessor, which takes tile after tile, of a boolean mask whichever is the next when it is free; of uneven work a
 * block for each pair of tiles, unless multiprocessors have to be left to others: then no more blocks than run. */
static int64_t persistent_blocks(const attention_problem *p, const kernel_row *k, int64_t tiles) {
    const heddle_attention *a = p->a;
    const int64_t units = a->h * a->b * sm90_forward_parts(k->dim, a->dv), all = p->device->multiprocessors;
    const int64_t pairs = sm90_forward_pairs((unsigned)units, (unsigned)tiles);
    const bool few = tiles <= FEW_TILES && k->dim <= 128;
    const int64_t most = few ? min64(pairs, FORWARD_BLOCKS_EACH * all) : pairs;
    return min64(tiles * units, has_uneven_work(a) && !a->multiprocessors ? max64(all, most) : all);
}

static void lay_out_forward(const attention_problem *p, attention_choice *c) {
    const kernel_row *k = &heddle__cuda_attention_kernels[c->fwd];
    c->tiles_q = ceil_div(p->a->sq, k->own);
    c->blocks = persistent_blocks(p, k, c->tiles_q);
    place_map_of(p, c->fwd, false, c);
    place_count(p, c);
}

/* The same of the fused backward, of so many tiles in all and in each sequence; by pairs both blocks of a pair are on one tile. */
static int64_t fused_blocks(const attention_problem *p, const kernel_row *k, int64_t all, int64_t each_has) {
    const int64_t multiprocessors = p->device->multiprocessors;
    if (sm90_is_pair(k->dim, k->own))
        return 2 * min64(all, multiprocessors / 2);
    const bool few = each_has <= FEW_TILES && k->dim > 64 && k->dim <= 128;
    return min64(all,
                 (has_uneven_work(p->a) && few && !p->a->multiprocessors ? FUSED_BLOCKS_EACH : 1) * multiprocessors);
}

static void lay_out_fused(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const kernel_row *k = &heddle__cuda_attention_kernels[c->bwd];
    const int64_t tiles = a->features & HEDDLE_VARLEN ? packed_tiles64(a->total_q, a->b) : tiles64(a->sq) * a->b;
    c->sum = c->bytes;
    c->bytes += (size_t)(tiles * SM90_SUM_ROWS * a->h * sm90_columns(k->dim)) * sizeof(float);
    c->tiles_q = ceil_div(a->sq, heddle__cuda_attention_kernels[c->gather].own);
    c->tiles_k = ceil_div(a->sk, k->own);
    c->blocks = c->tiles_q * a->h * a->b;
    c->blocks_dkdv = fused_blocks(p, k, c->tiles_k * a->hk * a->b, c->tiles_k);
    if ((a->features & HEDDLE_BOOL_MASK) && !a->multiprocessors)
        /* a block, or a pair of them, for each two tiles: what they cost is known to the device alone */
        c->blocks_dkdv =
            max64(c->blocks_dkdv, (sm90_is_pair(k->dim, k->own) ? 2 : 1) * ceil_div(c->tiles_k, 2) * a->hk * a->b);
    place_map_of(p, c->bwd, true, c);
}

/* Tile after tile; where the sums of dK and dV do not fit into registers together, some blocks make one of them. */
static void lay_out_apart(const attention_problem *p, attention_choice *c) {
    const heddle_attention *a = p->a;
    const kernel_row *k = &heddle__cuda_attention_kernels[c->dkdv];
    c->tiles_q = ceil_div(a->sq, heddle__cuda_attention_kernels[c->dq].own);
    c->tiles_k = ceil_div(a->sk, k->own);
    const int64_t tiles = c->tiles_k * a->hk * a->b;
    c->blocks = min64(c->tiles_q * a->h * a->b, p->device->multiprocessors);
    c->blocks_dkdv = min64(tiles * (sm90_makes_both(k->dim) ? 1 : 2), p->device->multiprocessors);
    c->blocks_of_dk = sm90_blocks_of_dk((unsigned)c->blocks_dkdv, (unsigned)tiles);
    place_map_of(p, c->dkdv, true, c);
    place_map_of(p, c->dq, false, c);
}

static void lay_out(const attention_problem *p, attention_choice *c) {
    if (p->pass == HEDDLE_FORWARD) {
        lay_out_forward(p, c);
        return;
    }
    c->flags = c->bytes;
    c->bytes += align64((size_t)(tiles64(p->a->sq) * p->a->h * p->a->b) * sizeof(int32_t));
    if (p->rich && hides(p->a)) {
        c->dirty = c->bytes;
        c->bytes += align64((size_t)(tiles64(p->a->sq) * p->a->h * p->a->b) * sizeof(int32_t));
    }
    if (c->bwd >= 0)
        lay_out_fused(p, c);
    else
        lay_out_apart(p, c);
}

/* ------------------------------------------------------------------------------------------------- its launches */

/* Columns, rows, heads, batch; of keys in pages the page. */
static tensor_shape shape_of(const heddle_attention *a, const void *at, heddle_strides s, int64_t width, bool keys,
                             uint32_t box) {
    const bool paged = keys && (a->features & HEDDLE_PAGES), packed = (a->features & HEDDLE_VARLEN) && !paged;
    const int64_t rows = paged ? a->page : keys ? (packed ? a->total_k : a->sk) : packed ? a->total_q : a->sq;
    tensor_shape r = {.at = at,
                      .extent = {(uint64_t)width, (uint64_t)rows, (uint64_t)(keys ? a->hk : a->h),
                                 packed ? 1 : (uint64_t)(paged ? a->pages : a->b)},
                      .stride = {(uint64_t)s.s * 2, (uint64_t)s.h * 2, packed ? 0 : (uint64_t)s.b * 2},
                      .rows = box};
    for (int x = 0; x < 3; x++)
        if (r.extent[x + 1] == 1)
            r.stride[x] = 16; /* any: it is never taken */
    return r;
}

/* Boxes of 64 x 64, where the copy engine can fetch them; what is alike has one row, head or batch. */
static tensor_shape shape_of_bias(const heddle_attention *a, const void *at) {
    const heddle_strides s = a->bias_stride;
    tensor_shape r = {
        .at = at,
        .extent = {(uint64_t)a->sk, s.s ? (uint64_t)a->sq : 1, s.h ? (uint64_t)a->h : 1, s.b ? (uint64_t)a->b : 1},
        .stride = {s.s ? (uint64_t)s.s * 2 : 16, s.h ? (uint64_t)s.h * 2 : 16, s.b ? (uint64_t)s.b * 2 : 16},
        .rows = 64};
    const int64_t stride[] = {s.s, s.h, s.b};
    if (!(a->features & HEDDLE_BIAS) || (uintptr_t)at % 16)
        r.at = NULL;
    for (int x = 0; x < 3; x++)
        if (stride[x] < 0 || stride[x] % 8 || stride[x] >= INT64_C(1) << 38)
            r.at = NULL;
    return r;
}

/* Boxes of 64 rows, but of K and V of all that forward works on together where that is no multiple, and of a smaller page all of it. */
static void add_maps(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const heddle_attention *a = p->a;
    const kernel_data *t = &job->params.p.t;
    const int block = p->pass == HEDDLE_FORWARD ? heddle__cuda_attention_kernels[c->fwd].block : 64;
    const uint32_t box = job->params.p.page_bits ? 1u << sm90_box_bits(job->params.p.page_bits)
                         : block % 64            ? (uint32_t)block
                                                 : 64;
    job->shapes[0] = shape_of(a, t->q, a->q_stride, a->d, false, 64);
    job->shapes[1] = shape_of(a, t->k, a->k_stride, a->d, true, box);
    job->shapes[2] = shape_of(a, t->v, a->v_stride, a->dv, true, box);
    job->shapes[3] = shape_of(a, t->dout, a->do_stride, a->dv, false, 64);
    job->shapes[4] = shape_of_bias(a, t->bias);
    if (job->shapes[4].at)
        job->params.p.vectors |= VECTOR_BIAS_BOXES;
    job->maps = 5;
}

/* biased takes boxes alone, but for backward over d 128, whose lanes read them: what the copy engine cannot fetch is the full kernel's, whose tiles are
 * the same. */
static int take_boxes(const attention_problem *p, const attention_job *job, int kernel) {
    const kernel_row *k = &heddle__cuda_attention_kernels[kernel];
    const bool boxes = k->variant == VARIANT_biased && !(k->pass == PASS_bwd && k->dim > 128);
    return boxes && !(job->params.p.vectors & VECTOR_BIAS_BOXES) ? find(p, k->pass) : kernel;
}

/* backward that writes dbias, too, where that is a sum over nothing and begins as pieces of 16 bytes do, in place of `kernel`, whose tiles are
 * the same; -1: none. */
static int find_giving(const attention_problem *p, const attention_job *job, int kernel) {
    const kernel_row *k = heddle__cuda_attention_kernels;
    const heddle_attention *a = p->a;
    const heddle_strides s = a->dbias_stride;
    const bool sums = !s.s || (!s.h && a->h > 1) || (!s.b && a->b > 1);
    const uintptr_t apart = (uintptr_t)job->params.p.t.dbias | (uintptr_t)((s.b | s.h | s.s) * 2);
    if (!job->params.p.t.dbias || sums || apart % 16 || !(job->params.p.vectors & VECTOR_BIAS_BOXES) ||
        (k[kernel].variant != VARIANT_biased && k[kernel].variant != VARIANT_keyed))
        return -1;
    const int x = heddle__cuda_find_attention(p, PASS_bwd, VARIANT_dbiased, FAMILY_sm90);
    return x >= 0 && k[x].dim == k[kernel].dim ? x : -1;
}

/* Backward of all in one, and the sums of dq to dq. Has it written dbias, too? */
static bool add_fused(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const kernel_data *t = &job->params.p.t;
    const bool wanted = t->dk || t->dv || t->dq;
    const int usual = take_boxes(p, job, c->bwd), giving = wanted ? find_giving(p, job, usual) : -1;
    if (wanted)
        heddle__cuda_add_launch(job, giving >= 0 ? giving : usual, c->blocks_dkdv);
    if (t->dq)
        heddle__cuda_add_launch(job, c->gather, c->blocks);
    return giving >= 0;
}

static void launch(const attention_problem *p, const attention_choice *c, attention_job *job) {
    const kernel_data *t = &job->params.p.t;
    add_maps(p, c, job);
    if (p->pass == HEDDLE_FORWARD) {
        heddle__cuda_add_mask(p, c, job);
        heddle__cuda_add_launch(job, take_boxes(p, job, c->fwd), c->blocks);
        return;
    }
    heddle__cuda_add_prep(p, c, job);
    if (t->dk || t->dv || t->dq || t->dbias)
        heddle__cuda_add_mask(p, c, job);
    bool given = false;
    if (c->bwd < 0)
        heddle__cuda_add_dkdv_and_dq(c, job);
    else
        given = add_fused(p, c, job);
    if (t->dbias && c->dbias >= 0 && !given)
        heddle__cuda_add_dbias(p, c, p->device->multiprocessors, job);
}

const attention_family heddle__attention_sm90 = {
    takes, heddle__cuda_tensor_core_time, lay_out, launch, NEEDS_ALIGNMENT | NEEDS_DOUT, true, false};

/* SPDX-License-Identifier: Apache-2.0
 * The plan of attention on CUDA: which kernels, how many blocks, what lies where in the workspace. No driver call:
 * pure. */
#include "cuda/attention/kernels.h"

#include "dtype.h"
#include "mask.h"
#include "status.h"

#include <stdbool.h>
#include <string.h>

static const kernel_row *const kernels = heddle__cuda_attention_kernels;

/* ----------------------------------------------------------------------------------------------- kernel choice */

/* More is asked for than the lean kernels can. */
static bool is_rich(const heddle_attention *a, heddle_pass pass) {
    const uint64_t rich = HEDDLE_ALIBI | HEDDLE_BIAS | HEDDLE_BOOL_MASK | (pass == HEDDLE_FORWARD ? 0 : HEDDLE_WEIGHTS);
    return (a->features & rich) || a->softcap > 0 || a->dropout > 0 || !(a->scale > 0);
}

static int choose_kernel(const heddle_attention *a, const attention_device *device, kernel_pass pass) {
    int x = -1;
    if (pass == PASS_fwd && a->h / a->hk * a->sq <= 16)
        x = heddle__cuda_find_attention(a, device, pass, VARIANT_decode, FAMILY_sm80);
    if (x < 0 && !is_rich(a, pass == PASS_fwd ? HEDDLE_FORWARD : HEDDLE_BACKWARD))
        x = heddle__cuda_find_attention(a, device, pass, VARIANT_lean, FAMILY_sm80);
    if (x < 0)
        x = heddle__cuda_find_attention(a, device, pass, VARIANT_full, FAMILY_sm80);
    return x < 0 ? heddle__cuda_find_attention(a, device, pass, VARIANT_plain, FAMILY_sm80) : x;
}

/* Can the copy engine fetch this tensor? Extents over which a stride is 0 it cannot. */
static bool is_copyable(heddle_strides s, bool packed, int64_t b, int64_t h, int64_t rows) {
    const int64_t stride[] = {packed ? 8 : s.b, s.h, s.s}, extent[] = {packed ? 1 : b, h, rows};
    for (int x = 0; x < 3; x++)
        if (stride[x] % 8 || stride[x] >= INT64_C(1) << 38 || (extent[x] > 1 && stride[x] <= 0))
            return false;
    return true;
}

/* Can the copy engine fetch the tensors, and are the rows of the results whole numbers of 16 bytes? */
static bool is_for_copies(const heddle_attention *a, kernel_pass pass) {
    const bool packed = a->features & HEDDLE_VARLEN;
    const int64_t rows_q = packed ? a->total_q : a->sq, rows_k = packed ? a->total_k : a->sk;
    return a->dv % 8 == 0 && (pass == PASS_fwd || a->d % 8 == 0) &&
           is_copyable(a->q_stride, packed, a->b, a->h, rows_q) &&
           is_copyable(a->k_stride, packed, a->b, a->hk, rows_k) &&
           is_copyable(a->v_stride, packed, a->b, a->hk, rows_k) &&
           (pass == PASS_fwd || is_copyable(a->do_stride, packed, a->b, a->h, rows_q)) && a->o_stride.b % 8 == 0 &&
           a->o_stride.h % 8 == 0 && a->o_stride.s % 8 == 0;
}

/* The kernel for Hopper that does this problem, if the pointers are aligned; -1: none. float32 is split first, as it lies. */
static int find_sm90(const heddle_attention *a, const attention_device *device, kernel_pass pass) {
    const bool packed = a->features & HEDDLE_VARLEN;
    if (!device->sm90 || is_rich(a, pass == PASS_fwd ? HEDDLE_FORWARD : HEDDLE_BACKWARD) || !a->b || !a->h || !a->sq ||
        !a->sk || (packed && (!a->total_q || !a->total_k)) ||
        (a->dtype == HEDDLE_F32 ? (a->features & HEDDLE_TF32) != 0 : !is_for_copies(a, pass)))
        return -1;
    return heddle__cuda_find_attention(a, device, pass, VARIANT_lean, FAMILY_sm90);
}

/* A whole tile for every multiprocessor matters less than its speed, as long as the keys need not be split. In float32 the
 * difference is larger; and with dweights its backward is another family's, which would round the scores differently. */
static int find_forward_sm90(const heddle_attention *a, const attention_device *device) {
    const int x = a->dtype == HEDDLE_F32 && (a->features & HEDDLE_WEIGHTS) ? -1 : find_sm90(a, device, PASS_fwd);
    const int64_t group = a->h / a->hk;
    if (x < 0 || group * a->sq <= 16 || (group > 1 && a->sq <= 64))
        return -1;
    const int64_t blocks = (a->sq + rows_of(&kernels[x]) - 1) / rows_of(&kernels[x]) * a->h * a->b;
    if (a->dtype == HEDDLE_F32)
        return blocks * 8 >= device->multiprocessors || a->sk <= 1024 ? x : -1;
    return blocks * 2 >= device->multiprocessors || a->sk < 8 * kernels[x].block ? x : -1;
}

/* The kernel of short latency, if this problem is one for it; -1: it is not. It has no backward with dweights; float32's forward
 * follows suit, for the reason that heddle__cuda_attention_is_small gives. */
static int find_small(const heddle_attention *a, const attention_device *device, kernel_pass pass) {
    if (device->small == SMALL_NEVER ||
        ((pass == PASS_bwd || a->dtype == HEDDLE_F32) && (a->features & HEDDLE_WEIGHTS)))
        return -1;
    const int x = heddle__cuda_find_attention(a, device, pass, VARIANT_full, FAMILY_small);
    if (x < 0 || device->small == SMALL_ALWAYS)
        return x;
    const heddle_pass of = pass == PASS_fwd ? HEDDLE_FORWARD : HEDDLE_BACKWARD;
    return heddle__cuda_attention_is_small(a, device, of, kernels[x].dim) ? x : -1;
}

/* ------------------------------------------------------------------------------------------------------ choice */

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static size_t align64(size_t n) {
    return (n + 63) / 64 * 64;
}

/* The split tensors of a pass, behind what the workspace has already: K and V, in backward also Q and dO, which many blocks read. */
static void place_splits(const heddle_attention *a, const attention_device *device, bool backward,
                         attention_choice *c) {
    const bool packed = a->features & HEDDLE_VARLEN;
    const int64_t heads_q = a->h * (packed ? 1 : a->b), heads_k = a->hk * (packed ? 1 : a->b);
    c->split = heddle__cuda_find_attention(a, device, PASS_split, VARIANT_lean, FAMILY_sm90);
    c->splits_queries = backward;
    c->split_tiles_q = packed ? a->total_q / 64 + a->b : ceil_div(a->sq, 64);
    c->split_tiles_k = packed ? a->total_k / 64 + a->b : ceil_div(a->sk, 64);
    for (int x = 0; x < SPLIT_TENSORS; x++) {
        const bool keys = x == SPLIT_K || x == SPLIT_V;
        if (!keys && !backward)
            continue;
        const size_t tiles = (size_t)(keys ? heads_k * c->split_tiles_k : heads_q * c->split_tiles_q);
        c->split_tiles[x] = align64(c->bytes);
        c->split_info[x] = c->split_tiles[x] + tiles * 64 * (size_t)kernels[c->split].dim * 4;
        c->bytes = align64(c->split_info[x] + tiles * sizeof(split_info));
    }
}

/* A block for each multiprocessor, which takes tile after tile; but a block for each pair of tiles where the lengths are known to the
 * device alone, and the device has to see to it that the work is spread. */
static int64_t persistent_blocks(const heddle_attention *a, const attention_device *device, int64_t tiles) {
    const int64_t units = a->h * a->b, pairs = units / 16 * 8 * tiles + (units % 16 * tiles + 1) / 2;
    const bool uneven = a->features & (HEDDLE_VARLEN | HEDDLE_SEQLENS);
    return min64(tiles * units, uneven ? max64(device->multiprocessors, pairs) : device->multiprocessors);
}

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
static void choose_decode(const heddle_attention *a, const attention_device *device, attention_choice *c) {
    const kernel_row *k = &kernels[c->fwd];
    const int64_t resident = (int64_t)((device->shared_bytes + 1024) / (heddle__cuda_shared_bytes(k) + 1024));
    const int64_t slots = device->multiprocessors * clamp64(resident, 1, 8), units = max64(1, a->hk * a->b);
    c->pack = a->h / a->hk;
    c->splits = clamp64(min64(shares_of(units, slots), a->sk / (k->block * k->warps)), 1, MAX_SPLITS);
    c->blocks = a->hk * a->b * c->splits;
}

/* Rows of a group's heads share a tile where one head has few. Too few blocks for the device: let several share the keys. */
static void choose_tiles(const heddle_attention *a, const attention_device *device, attention_choice *c) {
    const kernel_row *k = &kernels[c->fwd];
    if (a->sq * 2 <= rows_of(k))
        c->pack = a->h / a->hk;
    c->tiles_q = ceil_div(a->sq * c->pack, rows_of(k));
    const int64_t blocks = max64(1, c->tiles_q * (a->h / c->pack) * a->b), key_blocks = ceil_div(a->sk, k->block);
    const int64_t wanted = device->multiprocessors * 2;
    if (blocks * 2 <= wanted)
        c->splits = clamp64(min64(wanted / blocks, key_blocks / 4), 1, MAX_SPLITS);
    c->blocks = c->tiles_q * (a->h / c->pack) * a->b * c->splits;
}

/* Where the pointers turn out not to be aligned for Hopper's kernel, the other one does with the workspace of that: none. */
static void choose_forward(const heddle_attention *a, const attention_device *device, bool aligned,
                           attention_choice *c) {
    const int small = find_small(a, device, PASS_fwd), sm90 = small >= 0 ? -1 : find_forward_sm90(a, device);
    const bool usable = sm90 >= 0 && (aligned || a->dtype == HEDDLE_F32);
    c->fwd = small >= 0 ? small : usable ? sm90 : choose_kernel(a, device, PASS_fwd);
    const kernel_row *k = &kernels[c->fwd];
    c->tiles_q = ceil_div(a->sq, rows_of(k));
    c->blocks = c->tiles_q * a->h * a->b;
    if (k->family == FAMILY_sm90 && k->dtype == HEDDLE_F32)
        place_splits(a, device, false, c);
    else if (k->family == FAMILY_sm90)
        c->blocks = persistent_blocks(a, device, c->tiles_q);
    else if (k->variant == VARIANT_decode)
        choose_decode(a, device, c);
    else if (small < 0 && sm90 < 0 && k->variant != VARIANT_plain)
        choose_tiles(a, device, c);
    if (c->splits > 1) {
        c->part_lse = align64((size_t)(c->splits * c->rows * a->dv) * sizeof(float));
        c->bytes = c->part_lse + align64((size_t)(c->splits * c->rows) * sizeof(float));
    }
}

/* Queries to a head of keys from which on the copy engine's sums of dQ are the faster ones (docs/kernels/cuda-sm90.md). */
#define LONG_QUERIES 1024

/* The kernel for Hopper that makes all three gradients, where their sums need no order; -1: none. */
static int find_fused(const heddle_attention *a, const attention_device *device) {
    const int x = a->features & HEDDLE_DETERMINISTIC ? -1 : find_sm90(a, device, PASS_bwd);
    if (x < 0 || kernels[x].dim <= 64 || a->h / a->hk * a->sq < LONG_QUERIES)
        return x;
    return heddle__cuda_find_attention(a, device, PASS_bwd, VARIANT_long, FAMILY_sm90);
}

static void choose_fused(const heddle_attention *a, const attention_device *device, attention_choice *c, int bwd) {
    c->bwd = bwd;
    c->finish = find_sm90(a, device, PASS_finish);
    c->tiles_q = ceil_div(a->sq, rows_of(&kernels[c->finish]));
    c->tiles_k = ceil_div(a->sk, rows_of(&kernels[bwd]));
    c->blocks = c->tiles_q * a->h * a->b;
    c->blocks_dkdv = min64(c->tiles_k * a->hk * a->b, device->multiprocessors);
}

/* Whether the pointers are aligned for Hopper's kernels must not change the workspace. */
static void choose_backward(const heddle_attention *a, const attention_device *device, bool usable,
                            attention_choice *c) {
    const size_t each = align64((size_t)c->rows * sizeof(float));
    c->base = each;
    c->rest = 2 * each;
    c->bytes = 3 * each;
    c->bwd = find_small(a, device, PASS_bwd);
    if (c->bwd >= 0) {
        c->tiles_q = ceil_div(a->sq, rows_of(&kernels[c->bwd]));
        c->tiles_k = ceil_div(a->sk, rows_of(&kernels[c->bwd]));
        return;
    }
    const int fused = find_fused(a, device), rows = find_sm90(a, device, PASS_rows);
    if (rows >= 0) {
        c->flags = c->bytes;
        c->bytes += align64((size_t)(ceil_div(a->sq, 64) * a->h * a->b) * sizeof(int32_t));
        c->rows_first = usable ? rows : -1;
    }
    if (fused >= 0) {
        const int64_t tiles = a->features & HEDDLE_VARLEN ? a->total_q / 64 + a->b : ceil_div(a->sq, 64) * a->b;
        c->sum = c->bytes;
        c->bytes += (size_t)(tiles * 64 * a->h * kernels[fused].dim) * sizeof(float);
        if (usable) {
            choose_fused(a, device, c, fused);
            return;
        }
        c->sum = 0;
    }
    const int dkdv = find_sm90(a, device, PASS_dkdv), dq = find_sm90(a, device, PASS_dq);
    const bool sm90 = usable && dkdv >= 0 && dq >= 0;
    c->dkdv = sm90 ? dkdv : choose_kernel(a, device, PASS_dkdv);
    c->dq = sm90 ? dq : choose_kernel(a, device, PASS_dq);
    c->tiles_q = ceil_div(a->sq, rows_of(&kernels[c->dq]));
    c->tiles_k = ceil_div(a->sk, rows_of(&kernels[c->dkdv]));
    c->blocks = c->tiles_q * a->h * a->b;
    c->blocks_dkdv = c->tiles_k * a->hk * a->b;
    /* Where the sums of dK and dV do not fit into registers together, every second block makes one of them. */
    const kernel_row *k = &kernels[c->dkdv];
    if (k->dim * (sm90 ? 1 : k->tiles) > 128)
        c->blocks_dkdv *= 2;
    if (sm90 && a->dtype == HEDDLE_F32)
        place_splits(a, device, true, c);
    else if (sm90) { /* tile after tile */
        c->blocks = min64(c->blocks, device->multiprocessors);
        c->blocks_dkdv = min64(c->blocks_dkdv, device->multiprocessors);
    }
}

static void choose(const heddle_attention *a, heddle_pass pass, const attention_device *device, bool aligned,
                   attention_choice *c) {
    *c = (attention_choice){.pack = 1, .splits = 1, .bwd = -1, .split = -1, .finish = -1, .rows_first = -1};
    c->rows = a->h * (a->features & HEDDLE_VARLEN ? a->total_q : a->b * a->sq);
    if (pass == HEDDLE_FORWARD)
        choose_forward(a, device, aligned, c);
    else
        choose_backward(a, device, aligned, c);
}

heddle_status heddle__cuda_plan_attention(attention_plan *plan, const attention_device *device) {
    const heddle_attention *a = &plan->a;
    const int64_t most_blocks = INT32_MAX;
    if (a->sq >= INT64_C(1) << 30 || a->sk >= INT64_C(1) << 30)
        return fail(HEDDLE_UNSUPPORTED, "sq = %lld, sk = %lld: the CUDA kernels count rows up to 2^30",
                    (long long)a->sq, (long long)a->sk);
    if (a->h > most_blocks || a->b > most_blocks || (a->sq && a->b * a->h > most_blocks / a->sq) ||
        (a->sk && a->b * a->h > most_blocks / a->sk))
        return fail(HEDDLE_UNSUPPORTED, "b·h·sq = %lld·%lld·%lld, sk = %lld: over 2^31 blocks", (long long)a->b,
                    (long long)a->h, (long long)a->sq, (long long)a->sk);
    attention_choice *c = &plan->choice;
    choose(a, plan->pass, device, true, c);
    const bool of_queries = plan->pass == HEDDLE_FORWARD || (c->bwd >= 0 && c->finish < 0);
    const kernel_row *k = &kernels[plan->pass == HEDDLE_FORWARD ? c->fwd : c->bwd >= 0 ? c->bwd : c->dkdv];
    plan->threads = 1;
    plan->tile_q = of_queries ? rows_of(k) : k->block;
    plan->tile_k = of_queries ? k->block : rows_of(k);
    plan->chunk_k = plan->tile_k;
    plan->workspace = c->bytes;
    heddle__copy_text(plan->kernel, sizeof plan->kernel, k->symbol);
    return HEDDLE_OK;
}

/* ---------------------------------------------------------------------------------------------------- launches */

static bool is_vector(const heddle_attention *a, const void *p, heddle_strides s, int64_t last) {
    const size_t e = heddle_dtype_size(a->dtype);
    return ((uintptr_t)p | (size_t)s.b * e | (size_t)s.h * e | (size_t)s.s * e | (size_t)last * e) % 16 == 0;
}

static bool is_aligned(const heddle_attention_data *t) {
    return (((uintptr_t)t->q | (uintptr_t)t->k | (uintptr_t)t->v | (uintptr_t)t->o | (uintptr_t)t->dout |
             (uintptr_t)t->dq | (uintptr_t)t->dk | (uintptr_t)t->dv) &
            15) == 0;
}

static tensor_shape shape_of(const heddle_attention *a, const void *base, heddle_strides s, int64_t width, int64_t rows,
                             int64_t packed_rows, int64_t heads) {
    const bool packed = a->features & HEDDLE_VARLEN;
    tensor_shape r = {.base = base,
                      .extent = {(uint64_t)width, (uint64_t)(packed ? packed_rows : rows), (uint64_t)heads,
                                 packed ? 1 : (uint64_t)a->b},
                      .stride = {(uint64_t)s.s * 2, (uint64_t)s.h * 2, packed ? 0 : (uint64_t)s.b * 2},
                      .rows = 64};
    for (int x = 0; x < 3; x++)
        if (r.extent[x + 1] == 1)
            r.stride[x] = 16; /* any: it is never taken */
    return r;
}

void heddle__cuda_attention_shapes(const attention_plan *plan, const heddle_attention_data *t, tensor_shape shapes[4]) {
    const heddle_attention *a = &plan->a;
    shapes[0] = shape_of(a, t->q, a->q_stride, a->d, a->sq, a->total_q, a->h);
    shapes[1] = shape_of(a, t->k, a->k_stride, a->d, a->sk, a->total_k, a->hk);
    shapes[2] = shape_of(a, t->v, a->v_stride, a->dv, a->sk, a->total_k, a->hk);
    shapes[3] = shape_of(a, t->dout, a->do_stride, a->dv, a->sq, a->total_q, a->h);
    if (plan->pass == HEDDLE_FORWARD && plan->tile_k % 64)
        shapes[1].rows = shapes[2].rows = (uint32_t)plan->tile_k;
}

/* What lies there in the workspace; nothing lies at its begin that has an offset. */
static void *at(char *workspace, size_t offset) {
    return workspace && offset ? workspace + offset : NULL;
}

static void fill_params(const attention_plan *plan, const attention_choice *c, const heddle_attention_data *data,
                        char *workspace, attention_params *p) {
    const heddle_attention *a = &plan->a;
    const double log2e = 1.4426950408889634;
    p->a = *a;
    p->t = *data;
    p->rows = c->rows;
    p->rich = is_rich(a, plan->pass);
    p->scale = (float)a->scale;
    p->scale_log2 = (float)(a->scale * log2e);
    /* P = exp2(f·(S - lse)): with the very factor of S, its rounding weighs on the difference alone. */
    const double factor = p->rich ? (double)(float)log2e : (double)p->scale_log2 / a->scale;
    p->lse_factor = (float)factor;
    p->lse_factor_low = (float)(factor - (double)p->lse_factor);
    p->lse_unit = (float)(1 / factor);
    p->lse_unit_low = (float)(1 / factor - (double)p->lse_unit);
    p->softcap = (float)a->softcap;
    p->inverse_softcap = a->softcap > 0 ? (float)(1 / a->softcap) : 0;
    p->keep_scale = (float)(1 / (1 - a->dropout));
    p->drop_threshold = dropout_threshold(a->dropout);
    p->drops = a->dropout > 0;
    p->tf32 = (a->features & HEDDLE_TF32) != 0;
    p->group = (int32_t)(a->h / a->hk);
    p->pack = (int32_t)c->pack;
    p->tiles_q = (int32_t)c->tiles_q;
    p->tiles_k = (int32_t)c->tiles_k;
    p->splits = (int32_t)c->splits;
    p->vectors = (is_vector(a, data->q, a->q_stride, a->d) ? VECTOR_Q : 0) |
                 (is_vector(a, data->k, a->k_stride, a->d) ? VECTOR_K : 0) |
                 (is_vector(a, data->v, a->v_stride, a->dv) ? VECTOR_V : 0) |
                 (is_vector(a, data->dout, a->do_stride, a->dv) ? VECTOR_DO : 0) |
                 (is_vector(a, data->o, a->o_stride, a->dv) ? VECTOR_O : 0);
    p->split_tiles_q = c->split_tiles_q;
    p->split_tiles_k = c->split_tiles_k;
    for (int x = 0; x < SPLIT_TENSORS; x++)
        p->split[x] = c->split < 0 || !workspace
                          ? (split_tensor){NULL, NULL}
                          : (split_tensor){workspace + c->split_tiles[x], (split_info *)(workspace + c->split_info[x])};
    const bool backward = plan->pass == HEDDLE_BACKWARD;
    p->part_o = backward ? NULL : (float *)workspace;
    p->part_lse = at(workspace, c->part_lse);
    p->dsum = backward ? (float *)workspace : NULL;
    p->base = at(workspace, c->base);
    p->rest = at(workspace, c->rest);
    p->flags = c->rows_first >= 0 ? at(workspace, c->flags) : NULL;
    p->dq_sum = data->dq ? at(workspace, c->sum) : NULL;
}

static void add_launch(attention_launch *launches, int *count, int kernel, int64_t grid) {
    const kernel_row *k = &kernels[kernel];
    if (grid > 0)
        launches[(*count)++] = (attention_launch){(enum attention_kernel)kernel, (uint32_t)grid,
                                                  32u * (uint32_t)k->warps, (uint32_t)heddle__cuda_shared_bytes(k),
                                                  k->family == FAMILY_sm90 && k->dtype != HEDDLE_F32};
}

/* A block for each tile of K and V, in backward also of Q and dO. */
static void add_split(const heddle_attention *a, const attention_choice *c, attention_launch *launches, int *count) {
    const int64_t tiles_q = ceil_div(a->sq, 64) * a->h, tiles_k = ceil_div(a->sk, 64) * a->hk;
    add_launch(launches, count, c->split, 2 * (tiles_k + (c->splits_queries ? tiles_q : 0)) * a->b);
}

static void add_plain(const heddle_attention *a, const attention_device *device, attention_launch *launches, int *count,
                      kernel_pass pass, int64_t grid) {
    add_launch(launches, count, heddle__cuda_find_attention(a, device, pass, VARIANT_plain, FAMILY_sm80), grid);
}

/* Blocks for keys, then blocks for queries: those that somebody waits for. Before them, D where there may be few keys. */
static void add_small(const heddle_attention *a, const attention_device *device, const heddle_attention_data *t,
                      int kernel, attention_params *p, attention_launch *launches, int *count) {
    if (heddle__cuda_attention_has_few_keys(a))
        add_plain(a, device, launches, count, PASS_prep, ceil_div(a->b * a->h * a->sq, 4));
    if (!t->dk && !t->dv)
        p->tiles_k = 0;
    if (!t->dq && !t->dbias && !t->dsinks)
        p->tiles_q = 0;
    add_launch(launches, count, kernel, (p->tiles_k * a->hk + p->tiles_q * a->h) * a->b);
}

/* float32 on Hopper: D and the log-sum-exp come with the split; prep looks after large scores, a block of it after several tiles. */
static void add_split_prep(const heddle_attention *a, const attention_device *device, const attention_choice *c,
                           attention_launch *launches, int *count) {
    const int64_t tiles = clamp64(c->blocks / (2 * device->multiprocessors), 1, 12);
    add_split(a, c, launches, count);
    add_launch(launches, count, heddle__cuda_find_attention(a, device, PASS_prep, VARIANT_lean, FAMILY_sm90),
               ceil_div(c->blocks, tiles));
}

/* All of prep; where rows has been before, blocks that look for what is left. */
static void add_prep(const heddle_attention *a, const attention_device *device, const attention_choice *c,
                     attention_launch *launches, int *count) {
    const int prep = heddle__cuda_find_attention(a, device, PASS_prep, VARIANT_full, FAMILY_sm80);
    const int64_t tiles = ceil_div(a->sq, rows_of(&kernels[prep])) * a->h * a->b;
    if (c->rows_first >= 0)
        add_launch(launches, count, c->rows_first, ceil_div(a->sq, 64) * a->h * a->b);
    add_launch(launches, count, prep, c->rows_first < 0 ? tiles : min64(tiles, 2 * device->multiprocessors));
}

/* prep, bwd and finish. */
static void add_fused(const heddle_attention *a, const attention_device *device, const heddle_attention_data *data,
                      const attention_choice *c, attention_launch *launches, int *count) {
    add_prep(a, device, c, launches, count);
    if (data->dk || data->dv || data->dq)
        add_launch(launches, count, c->bwd, c->blocks_dkdv);
    if (data->dq)
        add_launch(launches, count, c->finish, c->blocks);
}

/* prep, dkdv and dq. */
static void add_gradients(const heddle_attention *a, const attention_device *device, const heddle_attention_data *data,
                          const attention_choice *c, attention_launch *launches, int *count) {
    const int prep = heddle__cuda_find_attention(a, device, PASS_prep, VARIANT_full, FAMILY_sm80);
    const bool split = c->split >= 0, plain = prep < 0 || kernels[c->dkdv].variant == VARIANT_plain;
    if (split)
        add_split_prep(a, device, c, launches, count);
    if (!split && (plain || (a->features & HEDDLE_WEIGHTS)))
        add_plain(a, device, launches, count, PASS_prep, ceil_div(a->b * a->h * a->sq, 4));
    if (!split && !plain)
        add_prep(a, device, c, launches, count);
    if (data->dk || data->dv)
        add_launch(launches, count, c->dkdv, c->blocks_dkdv);
    if (data->dq)
        add_launch(launches, count, c->dq, c->blocks);
}

int heddle__cuda_attention_launches(const attention_plan *plan, const attention_device *device,
                                    const heddle_attention_data *data, void *workspace, attention_params *params,
                                    attention_launch launches[ATTENTION_MAX_LAUNCHES]) {
    const heddle_attention *a = &plan->a;
    const bool usable = (is_aligned(data) || a->dtype == HEDDLE_F32) && (plan->pass == HEDDLE_FORWARD || data->dout);
    attention_choice other;
    const attention_choice *c = usable ? &plan->choice : &other;
    if (!usable)
        choose(a, plan->pass, device, false, &other);
    const int64_t rows = a->b * a->h * a->sq;
    int n = 0;
    fill_params(plan, c, data, workspace, params);
    if (plan->pass == HEDDLE_FORWARD) {
        if (c->split >= 0)
            add_split(a, c, launches, &n);
        add_launch(launches, &n, c->fwd, c->blocks);
        if (c->splits > 1)
            add_plain(a, device, launches, &n, PASS_combine, rows);
        if (data->weights)
            add_plain(a, device, launches, &n, PASS_weights, a->sk ? rows : 0);
        return n;
    }
    if (c->finish >= 0)
        add_fused(a, device, data, c, launches, &n);
    else if (c->bwd >= 0)
        add_small(a, device, data, c->bwd, params, launches, &n);
    else
        add_gradients(a, device, data, c, launches, &n);
    if (data->dbias)
        add_plain(a, device, launches, &n, PASS_dbias,
                  ceil_div(a->sk, 128) * (a->dbias_stride.s ? a->sq : 1) * (a->dbias_stride.h ? a->h : 1) *
                      (a->dbias_stride.b ? a->b : 1));
    if (data->dsinks)
        add_plain(a, device, launches, &n, PASS_dsinks, a->h);
    return n;
}

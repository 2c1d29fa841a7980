/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for Hopper, d and dv up to 128: five products.
 *
 *   bwd     a block owns 128 keys, 64 to a warpgroup, and walks over the queries that see them, head by head of the
 *           group: Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q; and dQ = dS·K over its keys, which is added to a
 *           sum in memory that blocks share.
 *   gather  the sums -> dq.
 *   light   the light part of prep, for these and for dkdv and dq.
 *
 * P and dS go from the accumulators of one product into the operand of the next without leaving the registers; for dQ,
 * where the sum goes over the keys of both warpgroups, dS goes through shared memory as well. A warpgroup makes 64 x 64
 * of dQ. The sums lie in memory as the accumulators lie in registers: pieces of 64 x 64, [8][128 threads][4]. One warp
 * fetches; Q and dO have a barrier each.
 *
 * The warpgroups take turns: one asks for all products between the weights of a step and those of the next while the other computes. dQ is
 * that of a step before, whose dS both have made by then. With a bias or dropout, or several options, they have no turns yet.
 *
 * lean adds to the sums from the registers, whose reading the next products wait for. long lays a piece down in shared memory,
 * and a thread of the first warpgroup has the copy engine add it: better where a tile of keys has many steps. */
#include "cuda/attention/sm90/bwd_layout.cuh"
#include "cuda/attention/sm90/light.cuh"

/* What a warpgroup carries through its steps. */
struct state {
    uint32_t smem, own;             /* shared memory; this warpgroup's rows of K there */
    int group, row0;                /* which warpgroup; this lane's first key */
    ring r;                         /* of stages */
    int turn;                       /* steps so far: which dS, and its parity */
    bool any_bad;                   /* one of the keys is not finite */
    float *numbers;                 /* of stage 0 */
    float *sum;                     /* lean: where query 0 of the head adds, for this thread */
    const key_options *steps, *now; /* full: of all, and of the one whose weights are made */
    int x;                          /* full: the head of `sum` */
};

/* A piece of dQ to its sum. */
INLINE void add_piece(float *to, float (*dq)[4]) {
    pin_all<8>(dq);
    if (to)
#pragma unroll
        for (int y = 0; y < 8; y++)
            add_global4(to + y * WARPGROUP * 4, make_float4(dq[y][0], dq[y][1], dq[y][2], dq[y][3]));
}

/* long: a piece of dQ to where another thread adds it from, once the one of the step before has been read. */
template <typename layout> INLINE void lay_down(const state &k, int turn, float (*dq)[4]) {
    pin_all<8>(dq);
    const uint32_t to = k.smem + layout::dq + k.group * PIECE * 4 + threadIdx.x % WARPGROUP * 16;
    mbarrier_wait(k.smem + layout::dq_empty + k.group * 8, (turn & 1) ^ 1);
#pragma unroll
    for (int y = 0; y < 8; y++)
        store_shared16(to + y * WARPGROUP * 16, make_uint4(__float_as_uint(dq[y][0]), __float_as_uint(dq[y][1]),
                                                           __float_as_uint(dq[y][2]), __float_as_uint(dq[y][3])));
    fence_async();
    release_each(k.smem + layout::dq_full + k.group * 8);
}

template <typename T, int D, int BLOCK, typename layout>
INLINE void await_tile(const state &k, int which, bool cut, int second) {
    const uint32_t bar = k.smem + layout::full + k.r.slot * 16 + which * 8;
    mbarrier_wait(bar, k.r.turn);
    if (cut && (!layout::is_full || (k.now->step & STEP_DIRTY)))
        clean_slot<T, D, BLOCK>(k.smem + layout::slots + (k.r.slot * 2 + which) * layout::slot_bytes,
                                k.numbers + k.r.slot * 3 * BLOCK, second);
}

/* Do weights take more than the numbers of a row? */
template <int BLOCK, typename layout> INLINE bool is_careful(const state &k, bool masked, const float *row) {
    return (layout::is_full ? (k.now->step & STEP_BAND) != 0 : masked) || has_rest<BLOCK>(row);
}

/* Where the bias of the count-th step is, for this warpgroup. */
template <typename layout> INLINE uint32_t boxes_of(const state &k, unsigned count) {
    return k.smem + layout::boxes + place_of<layout>(count) * layout::place_bytes + k.group * SM90_BIAS_BOX;
}

/* This warpgroup has no more use for the bias of the count-th step, or dS in its place. */
template <typename layout> INLINE void free_boxes(const state &k, unsigned count) {
    mbarrier_arrive(k.smem + layout::box_empty + place_of<layout>(count) * 16 + k.group * 8);
}

/* Sᵀ = Sᵀ·by + the bias of the count-th step. Does it mask? Then it is needed once more. */
template <typename T, int BLOCK, typename layout>
INLINE bool add_key_boxes(const attention_params &p, const state &k, unsigned count, float by, float (*s)[4]) {
    bool low = false;
    mbarrier_wait(k.smem + layout::box_full + place_of<layout>(count) * 16 + k.group * 8, parity_of<layout>(count));
#pragma unroll
    for (int y = 0; y < BLOCK; y += 64)
        low |=
            add_key_box<T>(boxes_of<layout>(k, count) + y / 64 * layout::strip, p.a.bias_stride.s == 0, by, s + y / 8);
    return low;
}

/* What it masks is hidden; then the place is free, where it is no other's. */
template <typename T, int BLOCK, typename layout>
INLINE void hide_boxes(const attention_params &p, const state &k, unsigned count, bool low, float (*s)[4]) {
    if (low)
#pragma unroll
        for (int y = 0; y < BLOCK; y += 64)
            hide_key_box<T>(boxes_of<layout>(k, count) + y / 64 * layout::strip, p.a.bias_stride.s == 0, s + y / 8);
    if (layout::shares_ds)
        barrier_sync(2 + k.group, WARPGROUP); /* all its warps have read what dS will overwrite */
    else
        free_boxes<layout>(k, count);
}

/* Sᵀ -> Pᵀ, of the count-th step. */
template <typename T, int BLOCK, typename layout>
INLINE void weigh(const attention_params &p, const span &w, const state &k, unsigned count, int i0, bool careful,
                  const float *row, const float *marks, float (*s)[4]) {
    pin_all<BLOCK / 8>(s);
    constexpr int WITH = layout::with;
    read_ahead<BLOCK> read;
    if (layout::is_full)
        read_key_options<BLOCK, WITH>(p, *k.now, k.row0, &read);
    const bool boxes = has_boxes<WITH>(p);
    bool low = false;
    float by = 1.0f; /* is left to be multiplied with */
    if (layout::is_full)
        by = cap_and_slope_keys<T, BLOCK, WITH>(p, *k.now, k.row0, s);
    if (has_bias<WITH>(p)) {
        low = boxes ? add_key_boxes<T, BLOCK, layout>(p, k, count, by, s)
                    : add_key_biases<T, BLOCK>(p, *k.now, k.row0, by, s);
        by = 1.0f;
    }
    if (!careful) {
        key_weights<false, BLOCK>(p.scale_log2, w, 0, i0, row, s, by);
        if (!layout::is_full)
            return;
    } else {
        key_weights<true, BLOCK>(p.scale_log2, w, k.row0, i0, row, s, by);
    }
    if (boxes)
        hide_boxes<T, BLOCK, layout>(p, k, count, low, s);
    if (layout::is_full)
        hide_keys<T, BLOCK, WITH>(p, *k.now, k.row0, low && !boxes, read, s);
    if (!k.any_bad)
        return;
    marks += k.group * 64 + fragment_row();
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = __float_as_int(s[y][e]) < 0 ? s[y][e] : s[y][e] + marks[e / 2 * 8];
}

/* lean: where this thread adds its part of dQ of the tile from i0 on; NULL: there is no such tile. */
template <int D, typename layout> INLINE float *find_sum(const state &k, const span &w, int i0) {
    return !layout::is_long && k.sum && (D > 64 ? i0 : i0 + k.group * 64) < w.end
               ? k.sum + (int64_t)i0 * sm90_columns(D)
               : NULL;
}

/* From P and dP to the operands of dV, dK and dQ, 16 queries at a time. For dS·K, dS lies in shared memory: rows are keys,
 * in strips of 64 queries. */
template <typename T, int BLOCK, int FULL>
INLINE void apply_weights(const attention_params &p, const state &k, bool masked, int x, const float *row,
                          const kept_bits<BLOCK> &kept, const char *ahead, float (*s)[4], float (*dp)[4]) {
    uint32_t made = 0;
    if (makes_ahead<FULL>()) {
        made = take_kept_columns<BLOCK>(ahead, k.group, x * 16);
        drop_columns(made, p.keep_scale, dp + 2 * x);
    } else if (has_dropout<FULL>(p)) {
        drop_elements<BLOCK, 2>(kept, p.keep_scale, dp + 2 * x, 2 * x);
    }
    if (masked)
        key_gradients<true, true, 16>(row + x * 16, row + 2 * BLOCK + x * 16, s + 2 * x, dp + 2 * x);
    else
        key_gradients<false, true, 16>(row + x * 16, row + 2 * BLOCK + x * 16, s + 2 * x, dp + 2 * x);
    if (has_cap<FULL>(p))
        cap_key_gradients<T, FULL>(p, *k.now, k.row0, x * 16, row + x * 16, row + BLOCK + x * 16, s + 2 * x,
                                   dp + 2 * x);
    if (makes_ahead<FULL>())
        drop_columns(made, 1.0f, s + 2 * x);
    else if (has_dropout<FULL>(p))
        drop_elements<BLOCK, 2>(kept, 1.0f, s + 2 * x, 2 * x);
}

template <typename T>
INLINE void put_operands(const state &k, uint32_t to, int x, const float (*s)[4], const float (*dp)[4],
                         uint32_t (*ps)[4], uint32_t (*ds)[4]) {
    const int lane = threadIdx.x % 32, key = k.group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
    pack_fragments<T, 16>(ps + x, s + 2 * x);
    pack_fragments<T, 16>(ds + x, dp + 2 * x);
    stmatrix4(to + key * 128 + x / 4 * OWN_ROWS * 128 + (((x % 4 * 2 + lane / 16) ^ (key & 7)) << 4), ds[x]);
}

template <typename T, int BLOCK, int FULL>
INLINE void make_fragments(const attention_params &p, const state &k, bool masked, uint32_t to, const float *row,
                           const kept_bits<BLOCK> &kept, const char *ahead, float (*s)[4], float (*dp)[4],
                           uint32_t (*ps)[4], uint32_t (*ds)[4]) {
#pragma unroll
    for (int x = 0; x < BLOCK / 16; x++) {
        apply_weights<T, BLOCK, FULL>(p, k, masked, x, row, kept, ahead, s, dp);
        put_operands<T>(k, to, x, s, dp, ps, ds);
    }
}

template <typename T, int BLOCK, typename layout>
INLINE void make_operands(const attention_params &p, state *k, bool masked, const float *row,
                          const kept_bits<BLOCK> &kept, float (*s)[4], float (*dp)[4], uint32_t (*ps)[4],
                          uint32_t (*ds)[4]) {
    const uint32_t to = k->smem + layout::ds + (k->turn & 1) * layout::ds_bytes;
    constexpr bool AHEAD = makes_ahead<layout::with>();
    const int slot = k->turn % KEPT_SLOTS;
    const char *ahead = (const char *)k->numbers + (layout::kept - layout::numbers) + slot * layout::kept_bytes;
    pin_all<BLOCK / 8>(dp);
    if (layout::takes_turns)
        mbarrier_wait(k->smem + layout::ds_empty + (k->turn & 1) * 8, (k->turn >> 1 & 1) ^ 1);
    if (AHEAD)
        mbarrier_wait(k->smem + layout::kept_full + slot * 8, k->turn / KEPT_SLOTS % 2);
    if (layout::with == WITH_ALL) /* so much code that it is there once */
        make_fragments<T, BLOCK, layout::with>(p, *k, masked, to, row, kept, ahead, s, dp, ps, ds);
    else if (masked)
        make_fragments<T, BLOCK, layout::with>(p, *k, true, to, row, kept, ahead, s, dp, ps, ds);
    else
        make_fragments<T, BLOCK, layout::with>(p, *k, false, to, row, kept, ahead, s, dp, ps, ds);
    if (AHEAD)
        mbarrier_arrive(k->smem + layout::kept_empty + slot * 8);
    fence_async();
    release(k->smem + layout::ds_full + (k->turn & 1) * 8);
}

template <typename T, int D, int BLOCK, typename layout>
INLINE void issue_dq(const state &k, int turn, float (*dq)[4], bool pending = true) {
    constexpr int STRIP = OWN_ROWS * 128;
    if (pending)
        mbarrier_wait(k.smem + layout::ds_full + (turn & 1) * 8, turn >> 1 & 1);
    wgmma_fence();
    warpgroup_both<T, 64, OWN_ROWS, OWN_ROWS>(
        dq, k.smem + layout::ds + (turn & 1) * layout::ds_bytes + (BLOCK > 64 ? k.group * STRIP : 0),
        k.smem + (D > 64 ? k.group * STRIP : 0));
    wgmma_commit();
}

/* full: the next step, once its queries are there: its first query, and by how many heads it is further. */
template <int D, typename layout>
INLINE int turn_to(const attention_params &p, state *k, unsigned count, bool *masked) {
    mbarrier_wait(k->smem + layout::full + k->r.slot * 16, k->r.turn);
    k->now = k->steps + count % KEY_STEPS;
    const int step = k->now->step;
    if (k->sum)
        k->sum += (k->now->x - k->x) * sum_tiles(p) * 64 * sm90_columns(D);
    k->x = k->now->x;
    *masked = (step & STEP_CUT) || k->any_bad; /* finite or not: dP of what is hidden may overflow, and -0·inf is NaN */
    return step & ~STEP_FLAGS;
}

/* The warpgroups take turns in asking for products: one computes while the other multiplies. */
INLINE void await_turn(const state &k) {
    barrier_sync(4 + k.group, CONSUMERS);
}
INLINE void pass_turn(const state &k) {
    barrier_arrive(5 - k.group, CONSUMERS);
}

/* A step whose P and dS are made, and the one after it, whose are to be made. */
struct step_pair {
    uint32_t at, done; /* Q of the first; the barriers that say that its places are free */
    float *to;         /* lean: where its dQ is added */
    uint32_t next_at;
    float *next_row; /* the numbers of the next, */
    int next_i0;     /* its first query, */
    bool masked;     /* and whether it is */
};

/* Sᵀ of the next step: issued, once Q is there. Do its weights take more than the numbers of a row? */
template <typename T, int D, int BLOCK, typename layout>
INLINE bool issue_scores(const state &k, const step_pair &w, float (*s)[4]) {
    await_tile<T, D, BLOCK, layout>(k, 0, w.masked, 2 * BLOCK);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k.own, w.next_at);
    wgmma_commit();
    return is_careful<BLOCK, layout>(k, w.masked, w.next_row);
}

/* dPᵀ of the next step likewise. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void issue_gradients(const state &k, const step_pair &w, float (*dp)[4]) {
    await_tile<T, D, BLOCK, layout>(k, 1, w.masked, 2 * BLOCK);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k.own + layout::own_bytes, w.next_at + layout::slot_bytes);
    wgmma_commit();
}

template <typename T, int D, int BLOCK, typename layout>
INLINE void issue_dv(const step_pair &w, const uint32_t (*ps)[4], float (*dv)[4]) {
    wgmma_fence();
    warpgroup_columns<T, D, BLOCK, BLOCK>(dv, ps, w.at + layout::slot_bytes);
    wgmma_commit();
}

template <typename T, int D, int BLOCK, typename layout>
INLINE void issue_dq_and_dk(const state &k, const step_pair &w, const uint32_t (*ds)[4], float (*dq)[4],
                            float (*dk)[4]) {
    issue_dq<T, D, BLOCK, layout>(k, k.turn, dq);
    warpgroup_columns<T, D, BLOCK, BLOCK>(dk, ds, w.at);
    wgmma_commit();
}

/* dQ of a step is there. */
template <typename layout> INLINE void take_dq(const attention_params &p, const state &k, float *to, float (*dq)[4]) {
    add_piece(to, dq);
    if (layout::shares_ds && has_boxes<layout::with>(p))
        free_boxes<layout>(k, k.turn);
}

/* While dV of a step adds up, Sᵀ of the next is made and turned into weights. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void turn_early(const attention_params &p, const span &seen, const state &k, const step_pair &w,
                       const float *marks, float (*s)[4], float (*dp)[4], float (*dq)[4], const uint32_t (*ps)[4],
                       const uint32_t (*ds)[4], float (*dk)[4], float (*dv)[4], kept_bits<BLOCK> *kept) {
    const bool careful = issue_scores<T, D, BLOCK, layout>(k, w, s);
    issue_dv<T, D, BLOCK, layout>(w, ps, dv);
    if (layout::is_full && !makes_ahead<layout::with>())
        *kept = keep_keys<BLOCK, layout::with>(p, *k.now, k.steps, k.row0);
    wgmma_wait<1>();
    weigh<T, BLOCK, layout>(p, seen, k, k.turn + 1, w.next_i0, careful, w.next_row, marks, s);
    issue_dq_and_dk<T, D, BLOCK, layout>(k, w, ds, dq, dk);
    wgmma_wait<1>();
    release(w.done + 8);
    take_dq<layout>(p, k, w.to, dq);
    issue_gradients<T, D, BLOCK, layout>(k, w, dp);
    wgmma_wait<1>();
    release_each(w.done);
}

/* For which fewer registers do: Sᵀ comes after all products of the step before, the weights beside dPᵀ. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void turn_late(const attention_params &p, const span &seen, const state &k, const step_pair &w,
                      const float *marks, float (*s)[4], float (*dp)[4], float (*dq)[4], const uint32_t (*ps)[4],
                      const uint32_t (*ds)[4], float (*dk)[4], float (*dv)[4], kept_bits<BLOCK> *kept) {
    issue_dv<T, D, BLOCK, layout>(w, ps, dv);
    issue_dq_and_dk<T, D, BLOCK, layout>(k, w, ds, dq, dk);
    wgmma_wait<2>();
    release(w.done + 8);
    const bool careful = issue_scores<T, D, BLOCK, layout>(k, w, s);
    wgmma_wait<2>();
    take_dq<layout>(p, k, w.to, dq);
    wgmma_wait<1>();
    release_each(w.done);
    issue_gradients<T, D, BLOCK, layout>(k, w, dp);
    if (layout::is_full && !makes_ahead<layout::with>())
        *kept = keep_keys<BLOCK, layout::with>(p, *k.now, k.steps, k.row0);
    wgmma_wait<1>();
    weigh<T, BLOCK, layout>(p, seen, k, k.turn + 1, w.next_i0, careful, w.next_row, marks, s);
}

/* dQ of a step is there: its dS may be overwritten, its sum is passed on. */
template <typename layout> INLINE void finish_dq(const state &k, int turn, float *to, float (*dq)[4]) {
    release(k.smem + layout::ds_empty + (turn & 1) * 8);
    if (layout::is_long)
        lay_down<layout>(k, turn, dq);
    else
        add_piece(to, dq);
}

/* All products between the weights of one step and those of the next, one behind the other: dQ of the step before, dV and dK of this, S
 * and dP of the next. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void take_turn(const attention_params &p, const span &seen, const state &k, const step_pair &w, bool pending,
                      float *before, const float *marks, float (*s)[4], float (*dp)[4], float (*dq)[4],
                      uint32_t (*ps)[4], uint32_t (*ds)[4], float (*dk)[4], float (*dv)[4], kept_bits<BLOCK> *kept) {
    await_tile<T, D, BLOCK, layout>(k, 0, w.masked, 2 * BLOCK);
    await_tile<T, D, BLOCK, layout>(k, 1, w.masked, 2 * BLOCK);
    const bool careful = is_careful<BLOCK, layout>(k, w.masked, w.next_row);
    await_turn(k);
    issue_dq<T, D, BLOCK, layout>(k, k.turn - 1, dq, pending); /* of no step: of what lies there, and not looked at */
    wgmma_fence();
    warpgroup_columns<T, D, BLOCK, BLOCK>(dv, ps, w.at + layout::slot_bytes);
    warpgroup_columns<T, D, BLOCK, BLOCK>(dk, ds, w.at);
    wgmma_commit();
    wgmma_wait<1>();
    pin_all<8>(dq);
    if (pending)
        finish_dq<layout>(k, k.turn - 1, before, dq);
    if (BLOCK > 64)
        wgmma_wait<0>(); /* registers are short */
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k.own, w.next_at);
    wgmma_commit();
    wgmma_wait<1>();
    release(w.done + 8);
    release_each(w.done);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k.own + layout::own_bytes, w.next_at + layout::slot_bytes);
    wgmma_commit();
    pass_turn(k);
    if (layout::is_full && !makes_ahead<layout::with>())
        *kept = keep_keys<BLOCK, layout::with>(p, *k.now, k.steps, k.row0);
    wgmma_wait<1>();
    weigh<T, BLOCK, layout>(p, seen, k, k.turn + 1, w.next_i0, careful, w.next_row, marks, s);
}

/* The next step, which the one at `i0` is followed by, and where both lie. */
template <int D, int BLOCK, int STAGES, typename layout>
INLINE step_pair next_pair(const attention_params &p, const span &seen, state *k, int i0, uint32_t at) {
    step_pair w;
    w.at = at;
    w.done = k->smem + layout::empty + k->r.slot * 16;
    w.to = find_sum<D, layout>(*k, seen, i0);
    if (layout::is_full) {
        advance<STAGES>(&k->r);
        w.next_i0 = turn_to<D, layout>(p, k, k->turn + 1, &w.masked);
    } else {
        if (i0 + BLOCK < seen.end) {
            w.next_i0 = i0 + BLOCK;
        } else { /* the next head */
            w.next_i0 = seen.begin;
            k->sum += !layout::is_long && k->sum ? sum_tiles(p) * 64 * sm90_columns(D) : 0;
        }
        w.masked = is_cut(seen, w.next_i0) || k->any_bad;
        advance<STAGES>(&k->r);
    }
    w.next_row = k->numbers + k->r.slot * 3 * BLOCK;
    w.next_at = k->smem + layout::slots + k->r.slot * 2 * layout::slot_bytes;
    return w;
}

/* All steps of a tile of keys. */
template <typename T, int D, int BLOCK, int STAGES, bool LATE, typename layout>
INLINE void sum_keys(const attention_params &p, const span &w, int steps, state *k, float (*dk)[4], float (*dv)[4]) {
    float s[BLOCK / 8][4], dp[BLOCK / 8][4], dq[8][4];
    uint32_t ps[BLOCK / 16][4], ds[BLOCK / 16][4];
    const float *const marks = k->numbers + (layout::marks - layout::numbers) / 4;
    int i0 = w.begin;
    bool masked = is_cut(w, i0) || k->any_bad;
    float *row = k->numbers + k->r.slot * 3 * BLOCK;
    uint32_t at = k->smem + layout::slots + k->r.slot * 2 * layout::slot_bytes;
    if (layout::is_full)
        i0 = turn_to<D, layout>(p, k, k->turn, &masked);
    await_tile<T, D, BLOCK, layout>(*k, 0, masked, 2 * BLOCK);
    await_tile<T, D, BLOCK, layout>(*k, 1, masked, 2 * BLOCK);
    const bool careful = is_careful<BLOCK, layout>(*k, masked, row);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, at);
    wgmma_commit();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k->own + layout::own_bytes, at + layout::slot_bytes);
    wgmma_commit();
    kept_bits<BLOCK> kept;
    if (layout::is_full && !makes_ahead<layout::with>())
        kept = keep_keys<BLOCK, layout::with>(p, *k->now, k->steps, k->row0);
    wgmma_wait<1>();
    weigh<T, BLOCK, layout>(p, w, *k, k->turn, i0, careful, row, marks, s);
    wgmma_wait<0>();
    make_operands<T, BLOCK, layout>(p, k, masked, row, kept, s, dp, ps, ds);
    bool pending = false;
    float *before = NULL;
#pragma unroll 1
    while (layout::is_full ? !(k->now->step & STEP_LAST) : --steps) {
        const step_pair pair = next_pair<D, BLOCK, STAGES, layout>(p, w, k, i0, at);
        if (layout::takes_turns) {
            take_turn<T, D, BLOCK, layout>(p, w, *k, pair, pending, before, marks, s, dp, dq, ps, ds, dk, dv, &kept);
            pending = true;
            before = pair.to;
            wgmma_wait<0>();
            k->turn++;
            make_operands<T, BLOCK, layout>(p, k, pair.masked, pair.next_row, kept, s, dp, ps, ds);
            i0 = pair.next_i0;
            at = pair.next_at;
            continue;
        }
        if (LATE)
            turn_late<T, D, BLOCK, layout>(p, w, *k, pair, marks, s, dp, dq, ps, ds, dk, dv, &kept);
        else
            turn_early<T, D, BLOCK, layout>(p, w, *k, pair, marks, s, dp, dq, ps, ds, dk, dv, &kept);
        wgmma_wait<0>();
        k->turn++;
        make_operands<T, BLOCK, layout>(p, k, pair.masked, pair.next_row, kept, s, dp, ps, ds);
        i0 = pair.next_i0;
        at = pair.next_at;
    }
    const step_pair last = {at, k->smem + layout::empty + k->r.slot * 16, find_sum<D, layout>(*k, w, i0)};
    if (layout::takes_turns) {
        issue_dq<T, D, BLOCK, layout>(*k, k->turn - 1, dq, pending);
        wgmma_fence();
        warpgroup_columns<T, D, BLOCK, BLOCK>(dv, ps, at + layout::slot_bytes);
        warpgroup_columns<T, D, BLOCK, BLOCK>(dk, ds, at);
        wgmma_commit();
        wgmma_wait<1>();
        pin_all<8>(dq);
        if (pending)
            finish_dq<layout>(*k, k->turn - 1, before, dq);
        issue_dq<T, D, BLOCK, layout>(*k, k->turn, dq);
        wgmma_wait<0>();
        finish_dq<layout>(*k, k->turn, last.to, dq);
        release(last.done + 8);
        release_each(last.done);
        advance<STAGES>(&k->r);
        k->turn++;
        return;
    }
    issue_dv<T, D, BLOCK, layout>(last, ps, dv);
    issue_dq_and_dk<T, D, BLOCK, layout>(*k, last, ds, dq, dk);
    wgmma_wait<1>();
    release(last.done + 8);
    take_dq<layout>(p, *k, last.to, dq);
    wgmma_wait<0>();
    release_each(last.done);
    advance<STAGES>(&k->r);
    k->turn++;
}

template <typename T, int D, int BLOCK, int STAGES, typename layout>
INLINE void work(const attention_params &p, const crew &crew, char *shared) {
    state k;
    k.smem = shared_address(shared);
    k.group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    k.own = k.smem + k.group * 64 * 128;
    k.numbers = (float *)(shared + layout::numbers);
    k.r = {0, 0};
    k.turn = 0;
    int own_turn = 0;
    if (layout::takes_turns && k.group == 1)
        pass_turn(k);
    k.steps = (const key_options *)(shared + layout::steps);
    key_work w;
    for (unsigned turn = 0; find_keys<BLOCK, layout::with>(p, crew, turn, &w); turn++) {
        float dk[D / 8][4], dv[D / 8][4];
        zero_all<D / 8>(dk);
        zero_all<D / 8>(dv);
        if (w.steps) {
            k.sum = !layout::is_long && p.dq_sum ? p.dq_sum + sum_tile(p, w.c, w.y * p.group) * 64 * sm90_columns(D) +
                                                       k.group * PIECE + threadIdx.x % WARPGROUP * 4
                                                 : NULL;
            k.row0 = w.key0 + k.group * 64 + fragment_row();
            k.x = w.y * p.group;
            mbarrier_wait(k.smem + layout::own_full, own_turn);
            own_turn ^= 1;
            k.any_bad = clean_keys<T, D, OWN_ROWS>(k.smem, (float *)(shared + layout::marks));
            sum_keys<T, D, BLOCK, STAGES, (D <= 64), layout>(p, w.s, w.steps, &k, dk, dv);
            release(k.smem + layout::own_empty);
        }
        pin_all<D / 8>(dk);
        pin_all<D / 8>(dv);
        key_work again; /* or its registers would be kept through the loop */
        find_keys<BLOCK, layout::with>(p, crew, opaque(turn), &again);
        const int row = k.group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16, rows = again.c.all_sk - again.key0;
        const int64_t key0 = again.c.first_k + again.key0;
        store_tile<T, D>(p.adds, p.t.dv, row_at(p.a.dv_stride, again.c.n, again.y, key0), p.a.dv_stride.s, row, rows,
                         (int)p.a.dv, layout::is_full ? p.keep_scale : 1.0f, dv);
        store_tile<T, D>(p.adds, p.t.dk, row_at(p.a.dk_stride, again.c.n, again.y, key0), p.a.dk_stride.s, row, rows,
                         (int)p.a.d, p.scale, dk);
    }
}

template <typename T, int D, int BLOCK, int STAGES, bool LONG, int FULL, bool TURNS>
INLINE void attention_bwd(const attention_params_sm90 &all) {
    typedef layout90<D, BLOCK, STAGES, LONG, FULL, TURNS> layout;
    extern __shared__ __align__(1024) char shared[];
    const crew crew = {blockIdx.x, gridDim.x};
    if (FULL)
        put_dropout(all.p, (key_options *)(shared + layout::steps) + KEY_STEPS);
    make_barriers<layout, STAGES>(shared_address(shared));
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 32)
            fetch_keys<T, D, BLOCK, FULL, layout, fused_places<D, BLOCK, STAGES, layout>>(
                all, crew, shared, (key_options *)(shared + layout::steps));
        else if (LONG && threadIdx.x < 96 && threadIdx.x % 32 == 0)
            add_pieces<T, D, BLOCK, layout>(all.p, crew, shared_address(shared), (int)threadIdx.x / 32 - 1);
        else if (makes_ahead<FULL>() && threadIdx.x >= 32)
            make_columns_ahead<BLOCK, layout>(
                all.p, crew, shared_address(shared), shared + layout::kept,
                *(const dropout_state *)((const key_options *)(shared + layout::steps) + KEY_STEPS));
    } else {
        registers_more<240>();
        work<T, D, BLOCK, STAGES, layout>(all.p, crew, shared);
    }
}

/* That run on a multiprocessor at a time. */
#define blocks_bwd(dim) 1
#define blocks_gather(dim) (dim > 128 ? 3 : 5)
#define blocks_light(dim) 8
#define is_lean false, 0, true
#define is_long true, 0, true
#define is_full false, WITH_ALL, false
#define is_capped false, (WITH_CAP | WITH_SLOPES), true
#define is_biased false, WITH_BIAS, false
#define is_masked false, WITH_MASK, true
#define is_dropped false, WITH_DROPOUT, false
#define pass_bwd(T, D, BLOCK, variant) attention_bwd<T, D, BLOCK, SM90_FUSED_STAGES, is_##variant>(all)
#define pass_gather(T, D, BLOCK, variant) attention_gather<T, D>(all.p)
#define pass_light(T, D, BLOCK, variant) light_##variant<T, sm90_columns(D)>(all.p)
#define light_lean attention_light
#define light_full full_light
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, blocks_##pass(dim))                                       \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        wait_for_earlier_grid();                                                                                       \
        pass_##pass(dtype, dim, block, variant);                                                                       \
    }

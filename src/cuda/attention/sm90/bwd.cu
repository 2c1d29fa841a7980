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
 * that of a step before, whose dS both have made by then. With several options and dropout they have no turns; nor where a bias lies in the
 * place of dS.
 *
 * dbiased: two of the warps beside the one that fetches bring dS to dbias, one writes zeros (give.cuh).
 *
 * lean adds to the sums from the registers, whose reading the next products wait for. long lays a piece down in shared memory,
 * and a thread of the first warpgroup has the copy engine add it: better where a tile of keys has many steps. */
#include "cuda/attention/sm90/bwd_step.cuh"
#include "cuda/attention/sm90/light.cuh"

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

/* Without turns, d 64 with a bias: Sᵀ comes after all products of the step before, the weights beside dPᵀ. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void step_apart(const attention_params &p, const span &seen, const state &k, const step_pair &w,
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

/* Products and weights one behind the other, so that the first step, which follows none, is the same code: it is so much with all options that
 * it is there once. The branch has to be seen to be uniform, or products wait for each other (C7520). */
template <typename T, int D, int BLOCK, typename layout>
INLINE void step_plainly(const attention_params &p, const span &seen, const state &k, const step_pair &w, bool follows,
                         const float *marks, float (*s)[4], float (*dp)[4], float (*dq)[4], const uint32_t (*ps)[4],
                         const uint32_t (*ds)[4], float (*dk)[4], float (*dv)[4], kept_bits<BLOCK> *kept) {
    if (follows) {
        issue_dv<T, D, BLOCK, layout>(w, ps, dv);
        issue_dq_and_dk<T, D, BLOCK, layout>(k, w, ds, dq, dk);
        wgmma_wait<0>();
        release(w.done + 8);
        take_dq<layout>(p, k, w.to, dq);
        release_each(w.done);
    }
    const bool careful = issue_scores<T, D, BLOCK, layout>(k, w, s);
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

/* The next step, which the one at `i0` is followed by, and where both lie. follows: there is that one. */
template <typename T, int D, int BLOCK, int STAGES, typename layout>
INLINE step_pair next_pair(const attention_params &p, const span &seen, state *k, int i0, uint32_t at, bool follows) {
    step_pair w;
    w.at = at;
    w.done = k->smem + layout::empty + k->r.slot * 16;
    w.to = find_sum<D, layout>(*k, seen, i0);
    if (layout::is_full) {
        if (follows)
            advance<STAGES>(&k->r);
        w.next_i0 = turn_to<T, D, layout>(p, k, k->turn + 1, &w.masked);
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
template <typename T, int D, int BLOCK, int STAGES, typename layout>
INLINE void sum_keys(const attention_params &p, const span &w, int steps, state *k, float (*dk)[4], float (*dv)[4]) {
    float s[BLOCK / 8][4], dp[BLOCK / 8][4], dq[8][4];
    uint32_t ps[BLOCK / 16][4], ds[BLOCK / 16][4];
    const float *const marks = k->numbers + (layout::marks - layout::numbers) / 4;
    int i0 = w.begin;
    bool masked = is_cut(w, i0) || k->any_bad;
    float *row = k->numbers + k->r.slot * 3 * BLOCK;
    uint32_t at = k->smem + layout::slots + k->r.slot * 2 * layout::slot_bytes;
    kept_bits<BLOCK> kept;
    bool first = true;
    if (layout::begins_apart) {
        if (layout::is_full)
            i0 = turn_to<T, D, layout>(p, k, k->turn, &masked);
        await_tile<T, D, BLOCK, layout>(*k, 0, masked, 2 * BLOCK);
        await_tile<T, D, BLOCK, layout>(*k, 1, masked, 2 * BLOCK);
        const bool careful = is_careful<BLOCK, layout>(*k, masked, row);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, at);
        wgmma_commit();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k->own + layout::own_bytes, at + layout::slot_bytes);
        wgmma_commit();
        if (layout::is_full && !makes_ahead<layout::with>())
            kept = keep_keys<BLOCK, layout::with>(p, *k->now, k->steps, k->row0);
        wgmma_wait<1>();
        weigh<T, BLOCK, layout>(p, w, *k, k->turn, i0, careful, row, marks, s);
        wgmma_wait<0>();
        make_operands<T, BLOCK, layout>(p, k, masked, row, kept, s, dp, ps, ds);
        first = false;
    } else {
        k->turn--;
    }
    bool pending = false;
    float *before = NULL;
#pragma unroll 1
    while (layout::is_full ? first || !(k->now->step & STEP_LAST) : --steps) {
        const bool follows = layout::begins_apart || __shfl_sync(ALL_LANES, (int)!first, 0);
        const step_pair pair = next_pair<T, D, BLOCK, STAGES, layout>(p, w, k, i0, at, follows);
        if (!layout::begins_apart)
            step_plainly<T, D, BLOCK, layout>(p, w, *k, pair, follows, marks, s, dp, dq, ps, ds, dk, dv, &kept);
        else if (layout::takes_turns)
            take_turn<T, D, BLOCK, layout>(p, w, *k, pair, pending, before, marks, s, dp, dq, ps, ds, dk, dv, &kept);
        else
            step_apart<T, D, BLOCK, layout>(p, w, *k, pair, marks, s, dp, dq, ps, ds, dk, dv, &kept);
        pending = true;
        before = pair.to;
        wgmma_wait<0>();
        k->turn++;
        make_operands<T, BLOCK, layout>(p, k, pair.masked, pair.next_row, kept, s, dp, ps, ds);
        i0 = pair.next_i0;
        at = pair.next_at;
        first = false;
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
        if (has_steps<T, layout::with>(p, w)) {
            k.sum = !layout::is_long && p.dq_sum ? p.dq_sum + sum_tile(p, w.c, w.y * p.group) * 64 * sm90_columns(D) +
                                                       k.group * PIECE + threadIdx.x % WARPGROUP * 4
                                                 : NULL;
            k.row0 = w.key0 + k.group * 64 + fragment_row();
            k.x = w.y * p.group;
            mbarrier_wait(k.smem + layout::own_full, own_turn);
            own_turn ^= 1;
            k.any_bad = clean_keys<T, D, OWN_ROWS>(k.smem, (float *)(shared + layout::marks));
            sum_keys<T, D, BLOCK, STAGES, layout>(p, w.s, w.steps, &k, dk, dv);
            release(k.smem + layout::own_empty);
        }
        pin_all<D / 8>(dk);
        pin_all<D / 8>(dv);
        key_work again; /* or its registers would be kept through the loop */
        find_keys<BLOCK, layout::with>(p, crew, opaque(turn), &again);
        const int row = k.group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16, rows = again.c.all_sk - again.key0;
        const int64_t key0 = again.c.first_k + again.key0;
        end_tile<T, D>(p.adds, p.t.dv, row_at(p.a.dv_stride, again.c.n, again.y, key0), p.a.dv_stride.s, row, rows,
                       (int)p.a.dv, layout::is_full ? p.keep_scale : 1.0f, dv);
        end_tile<T, D>(p.adds, p.t.dk, row_at(p.a.dk_stride, again.c.n, again.y, key0), p.a.dk_stride.s, row, rows,
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
    /* Behind branches that ptxas sees to be uniform it has uniform registers, for those that make bits; to the others it gives more spills, and
     * at d 128, where nobody waits for bits, it is slower. */
    const bool uniform = makes_ahead<FULL>() && !layout::ahead_has_more;
    const unsigned thread = uniform ? __shfl_sync(ALL_LANES, threadIdx.x, 0) : threadIdx.x;
    if (thread < WARPGROUP) {
        registers_fewer<layout::ahead_registers>();
        if (thread < 32)
            fetch_keys<T, D, BLOCK, FULL, layout, fused_places<D, BLOCK, STAGES, layout>>(
                all, crew, shared, (key_options *)(shared + layout::steps));
        else if (LONG && threadIdx.x < 96 && threadIdx.x % 32 == 0)
            add_pieces<T, D, BLOCK, layout>(all.p, crew, shared_address(shared), (int)threadIdx.x / 32 - 1);
        else if (layout::gives_ds && threadIdx.x < 96)
            give_steps<T, BLOCK, layout>(all.p, crew, shared);
        else if (layout::gives_ds)
            give_zeros<T, BLOCK, layout>(all.p, crew);
        else if (makes_ahead<FULL>())
            make_columns_ahead<BLOCK, OWN_ROWS, layout::ahead_has_more ? 4 : 2, layout>(
                all.p, crew, shared_address(shared), shared + layout::kept,
                *(const dropout_state *)((const key_options *)(shared + layout::steps) + KEY_STEPS));
    } else {
        registers_more<layout::work_registers>();
        work<T, D, BLOCK, STAGES, layout>(all.p, crew, shared);
    }
}

/* That run on a multiprocessor at a time. */
#define blocks_bwd(dim) 1
#define blocks_gather(dim) 8
#define blocks_light(dim) 8
#define is_lean false, 0, true
#define is_long true, 0, true
#define is_full false, WITH_ALL, false
#define is_undropped false, (WITH_ALL & ~WITH_DROPOUT), true
#define is_capped false, (WITH_CAP | WITH_SLOPES), true
#define is_biased false, WITH_BIAS, true
#define is_dbiased false, (WITH_BIAS | WITH_DBIAS), true
#define is_keyed false, WITH_KEY_BIAS, true
#define is_masked false, WITH_MASK, true
#define is_dropped false, WITH_DROPOUT, true
#define is_maskdrop false, (WITH_MASK | WITH_DROPOUT), true
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

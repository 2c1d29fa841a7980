/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for Hopper in two kernels and seven products: no atomics, the same bits every time; and the one for
 * d and dv over 128.
 *
 *   dkdv   a block owns 128 keys, 64 to a warpgroup, and walks over the queries that see them, head by head of the
 *          group, in order: Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q.
 *   dq     a block owns 128 queries of one head, 64 to a warpgroup: S = Q·Kᵀ, dP = dO·Vᵀ, dQ += dS·K.
 *
 * P and dS go from the accumulators of one product into the operand of the next without leaving the registers. One warp
 * fetches; tiles that stream lie in a ring of slots, Q and dO (K and V) in turn. */
#include "cuda/attention/sm90/dq.cuh"
#include "cuda/attention/sm90/fetch.cuh"

/* ---------------------------------------------------------------------------------------------------- dK and dV */

enum { MAKES_DK = 1, MAKES_DV = 2 };

/* Q, dO and the numbers of a step. */
template <int D, int BLOCK, int SLOTS, typename layout>
INLINE void fetch_step(const attention_params_sm90 &all, const key_work &w, int x, int i0, int64_t at, uint32_t smem,
                       int n, ring *r) {
    const int lane = threadIdx.x % 32, first_q = (int)w.c.first_q;
    const uint32_t bar = smem + layout::full + r->slot * 8;
    mbarrier_wait(smem + layout::empty + r->slot * 8, r->turn ^ 1);
    if (lane == 0) {
        mbarrier_expect(bar, layout::slot_bytes);
        load_boxes<D, BLOCK>(smem + layout::slots + r->slot * layout::slot_bytes, &all.q, bar, first_q + i0, x, n);
    }
    fetch_numbers<BLOCK>(all.p, at + i0, w.s.end - i0, smem + layout::numbers + r->slot * 3 * BLOCK * 4, bar);
    advance<SLOTS>(r);
    mbarrier_wait(smem + layout::empty + r->slot * 8, r->turn ^ 1);
    if (lane == 0) {
        mbarrier_expect(smem + layout::full + r->slot * 8, layout::slot_bytes);
        load_boxes<D, BLOCK>(smem + layout::slots + r->slot * layout::slot_bytes, &all.dout,
                             smem + layout::full + r->slot * 8, first_q + i0, x, n);
    }
    mbarrier_arrive(smem + layout::full + r->slot * 8); /* as with Q, every lane */
    advance<SLOTS>(r);
}

template <int D, int BLOCK, int SLOTS, int MAKES, typename layout> struct dkdv_places {
    static constexpr int own = MAKES & MAKES_DK ? 2 : 1, rows = OWN_ROWS;
    static constexpr bool has_boxes = false;
    static __device__ __forceinline__ uint32_t empty(uint32_t smem, const ring &r) {
        return smem + layout::empty + r.slot * 8;
    }
    static __device__ __forceinline__ void step(const attention_params_sm90 &all, const key_work &w, int x, int i0,
                                                int64_t at, uint32_t smem, int n, ring *r) {
        fetch_step<D, BLOCK, SLOTS, layout>(all, w, x, i0, at, smem, n, r);
    }
    static __device__ __forceinline__ void boxes(const attention_params_sm90 &, const key_work &, key_walk, key_walk,
                                                 uint32_t, unsigned) {
    }
};

/* full: k·q -> Sᵀ. Does a bias mask? */
template <typename T, int BLOCK>
INLINE bool make_scores(const attention_params &p, const key_state &k, read_ahead<BLOCK> *read, float (*s)[4]) {
    read_key_options<BLOCK>(p, *k.now, k.row0, read);
    const float by = cap_and_slope_keys<T, BLOCK>(p, *k.now, k.row0, s);
    if (p.a.features & HEDDLE_BIAS)
        return add_key_biases<T, BLOCK>(p, *k.now, k.row0, by, s);
    scale_scores<BLOCK>(by, s);
    return false;
}

/* full: dSᵀ -> dTᵀ. */
template <int BLOCK>
INLINE void cap_gradients(const attention_params &p, const float *numbers, const float (*s)[4], float (*dp)[4]) {
    if (p.softcap > 0.0f)
#pragma unroll
        for (int x = 0; x < BLOCK; x += 16)
            cap_key_gradients(p, numbers + x, numbers + BLOCK + x, s + x / 8, dp + x / 8);
}

/* full: the next step, once its queries are there: its first query, and whether it is cut. */
template <typename layout> INLINE int turn_to(key_state *k, bool *cut) {
    mbarrier_wait(k->smem + layout::full + k->r.slot * 8, k->r.turn);
    k->now = k->steps + k->count++ % KEY_STEPS;
    *cut = k->now->step & STEP_CUT;
    return k->now->step & ~STEP_FLAGS;
}

/* From Sᵀ, under way as the last but one group of products (the last but none of the first step), to Pᵀ and dSᵀ as operands. The
 * slots of the step before are released once its products, the last group, have ended. */
template <typename T, int D, int BLOCK, int SLOTS, int MAKES, bool FIRST, bool FULL, typename layout>
INLINE void key_step(const attention_params &p, const span &w, key_state *k, int i0, bool cut, float *numbers, int done,
                     bool first, float (*s)[4], uint32_t (*ps)[4], uint32_t (*ds)[4]) {
    const bool careful = (FULL ? (k->now->step & STEP_BAND) != 0 : cut) || has_rest<BLOCK>(numbers);
    float dp[BLOCK / 8][4];
    kept_bits<BLOCK> kept;
    if (FULL)
        kept = keep_keys<BLOCK>(p, *k->now, k->steps, k->row0);
    if (FIRST)
        wgmma_wait<0>();
    else
        wgmma_wait<1>();
    pin_all<BLOCK / 8>(s);
    read_ahead<BLOCK> read;
    const bool low = FULL && make_scores<T, BLOCK>(p, *k, &read, s);
    if (careful)
        key_weights<true, BLOCK>(p.scale_log2, w, k->row0, i0, numbers, s);
    else
        key_weights<false, BLOCK>(p.scale_log2, w, k->row0, i0, numbers, s);
    if (FULL)
        hide_keys<T, BLOCK>(p, *k->now, k->row0, low, read, s);
    if (!FIRST && !(FULL && first)) {
        wgmma_wait<0>();
        const int next = done + 1 == SLOTS ? 0 : done + 1;
        release_each(k->smem + layout::empty + done * 8);
        if (MAKES & MAKES_DV)
            release_each(k->smem + layout::empty + next * 8);
    }
    await_slot<T, D, BLOCK, layout>(k->smem, k->r, cut && (!FULL || (k->now->step & STEP_DIRTY)), numbers, 2 * BLOCK);
    if (MAKES & MAKES_DK) {
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k->own + layout::own_bytes,
                                                     k->smem + layout::slots + k->r.slot * layout::slot_bytes);
        wgmma_commit();
        wgmma_wait<0>();
        pin_all<BLOCK / 8>(dp);
        if (!(MAKES & MAKES_DV))
            release_each(k->smem + layout::empty + k->r.slot * 8);
        if (FULL && p.drops)
            drop_elements(kept, p.keep_scale, dp);
    }
    if (cut)
        key_gradients<true, (MAKES & MAKES_DK) != 0, BLOCK>(numbers, numbers + 2 * BLOCK, s, dp);
    else if (MAKES & MAKES_DK)
        key_gradients<false, true, BLOCK>(numbers, numbers + 2 * BLOCK, s, dp);
    if (FULL && (MAKES & MAKES_DK))
        cap_gradients<BLOCK>(p, numbers, s, dp);
    if (FULL && (MAKES & MAKES_DV) && p.drops)
        drop_elements(kept, 1.0f, s);
    if (MAKES & MAKES_DV)
        pack_fragments<T, BLOCK>(ps, s);
    if (MAKES & MAKES_DK)
        pack_fragments<T, BLOCK>(ds, dp);
}

template <typename T, int D, int BLOCK, int SLOTS, int MAKES, typename layout>
INLINE void key_products(uint32_t smem, int q_slot, const uint32_t (*ps)[4], const uint32_t (*ds)[4], float (*dk)[4],
                         float (*dv)[4]) {
    const int do_slot = q_slot + 1 == SLOTS ? 0 : q_slot + 1;
    if (MAKES & MAKES_DV)
        warpgroup_columns<T, D, BLOCK, BLOCK>(dv, ps, smem + layout::slots + do_slot * layout::slot_bytes);
    if (MAKES & MAKES_DK)
        warpgroup_columns<T, D, BLOCK, BLOCK>(dk, ds, smem + layout::slots + q_slot * layout::slot_bytes);
}

/* So many steps: while the products of one step add up, Sᵀ of the next is made and turned into weights. */
template <typename T, int D, int BLOCK, int SLOTS, int MAKES, bool FULL, typename layout>
INLINE void sum_keys(const attention_params &p, const span &w, key_state *k, float *numbers, int steps, float (*dk)[4],
                     float (*dv)[4]) {
    int i0 = w.begin;
    float s[BLOCK / 8][4];
    uint32_t ps[BLOCK / 16][4], ds[BLOCK / 16][4];
    int q_slot = k->r.slot;
    bool cut = is_cut(w, i0), first = true;
    if (!FULL) { /* by itself; full: so much code that it is there once */
        await_slot<T, D, BLOCK, layout>(k->smem, k->r, cut, numbers + q_slot * 3 * BLOCK, 2 * BLOCK);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->smem + layout::slots + q_slot * layout::slot_bytes);
        wgmma_commit();
        advance<SLOTS>(&k->r);
        key_step<T, D, BLOCK, SLOTS, MAKES, true, FULL, layout>(p, w, k, i0, cut, numbers + q_slot * 3 * BLOCK, 0, true,
                                                                s, ps, ds);
        advance<SLOTS>(&k->r);
        first = false;
    }
#pragma unroll 1
    while (FULL ? first || !(k->now->step & STEP_LAST) : --steps) {
        const int done = q_slot;
        i0 = i0 + BLOCK < w.end ? i0 + BLOCK : w.begin; /* the next head */
        cut = is_cut(w, i0);
        if (FULL)
            i0 = turn_to<layout>(k, &cut);
        q_slot = k->r.slot;
        await_slot<T, D, BLOCK, layout>(k->smem, k->r, cut && (!FULL || (k->now->step & STEP_DIRTY)),
                                        numbers + q_slot * 3 * BLOCK, 2 * BLOCK);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->smem + layout::slots + q_slot * layout::slot_bytes);
        wgmma_commit();
        if (!FULL ||
            __shfl_sync(ALL_LANES, (int)!first, 0)) { /* seen to be uniform, or products wait for each other (C7520) */
            if (FULL)
                wgmma_fence();
            key_products<T, D, BLOCK, SLOTS, MAKES, layout>(k->smem, done, ps, ds, dk, dv);
        }
        wgmma_commit();
        advance<SLOTS>(&k->r);
        key_step<T, D, BLOCK, SLOTS, MAKES, false, FULL, layout>(p, w, k, i0, cut, numbers + q_slot * 3 * BLOCK, done,
                                                                 first, s, ps, ds);
        advance<SLOTS>(&k->r);
        first = false;
    }
    wgmma_fence();
    key_products<T, D, BLOCK, SLOTS, MAKES, layout>(k->smem, q_slot, ps, ds, dk, dv);
    wgmma_commit();
    wgmma_wait<0>();
    release_each(k->smem + layout::empty + q_slot * 8);
    if (MAKES & MAKES_DV)
        release_each(k->smem + layout::empty + (q_slot + 1 == SLOTS ? 0 : q_slot + 1) * 8);
}

/* As sum_keys, step by step, where the registers do not hold what two steps need. */
template <typename T, int D, int BLOCK, int SLOTS, bool FULL, typename layout>
INLINE void sum_keys_plainly(const attention_params &p, const span &w, key_state *k, float *numbers, int steps,
                             float (*dk)[4], float (*dv)[4]) {
    int i0 = w.begin;
#pragma unroll 1
    for (bool more = true; FULL ? more : steps; steps--) {
        float s[BLOCK / 8][4], dp[BLOCK / 8][4];
        uint32_t ps[BLOCK / 16][4], ds[BLOCK / 16][4];
        const int q_slot = k->r.slot;
        bool cut = is_cut(w, i0);
        if (FULL) {
            i0 = turn_to<layout>(k, &cut);
            more = !(k->now->step & STEP_LAST);
        }
        float *row = numbers + q_slot * 3 * BLOCK;
        await_slot<T, D, BLOCK, layout>(k->smem, k->r, cut && (!FULL || (k->now->step & STEP_DIRTY)), row, 2 * BLOCK);
        advance<SLOTS>(&k->r);
        await_slot<T, D, BLOCK, layout>(k->smem, k->r, cut && (!FULL || (k->now->step & STEP_DIRTY)), row, 2 * BLOCK);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->smem + layout::slots + q_slot * layout::slot_bytes);
        wgmma_commit();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k->own + layout::own_bytes,
                                                     k->smem + layout::slots + k->r.slot * layout::slot_bytes);
        wgmma_commit();
        const bool careful = (FULL ? (k->now->step & STEP_BAND) != 0 : cut) || has_rest<BLOCK>(row);
        kept_bits<BLOCK> kept;
        if (FULL)
            kept = keep_keys<BLOCK>(p, *k->now, k->steps, k->row0);
        wgmma_wait<1>();
        pin_all<BLOCK / 8>(s);
        read_ahead<BLOCK> read;
        const bool low = FULL && make_scores<T, BLOCK>(p, *k, &read, s);
        if (careful)
            key_weights<true, BLOCK>(p.scale_log2, w, k->row0, i0, row, s);
        else
            key_weights<false, BLOCK>(p.scale_log2, w, k->row0, i0, row, s);
        if (FULL)
            hide_keys<T, BLOCK>(p, *k->now, k->row0, low, read, s);
        wgmma_wait<0>();
        pin_all<BLOCK / 8>(dp);
        if (FULL && p.drops)
            drop_elements(kept, p.keep_scale, dp);
        if (cut)
            key_gradients<true, true, BLOCK>(row, row + 2 * BLOCK, s, dp);
        else
            key_gradients<false, true, BLOCK>(row, row + 2 * BLOCK, s, dp);
        if (FULL)
            cap_gradients<BLOCK>(p, row, s, dp);
        if (FULL && p.drops)
            drop_elements(kept, 1.0f, s);
        pack_fragments<T, BLOCK>(ps, s);
        pack_fragments<T, BLOCK>(ds, dp);
        wgmma_fence();
        key_products<T, D, BLOCK, SLOTS, MAKES_DK | MAKES_DV, layout>(k->smem, q_slot, ps, ds, dk, dv);
        wgmma_commit();
        wgmma_wait<0>();
        release_each(k->smem + layout::empty + q_slot * 8);
        release_each(k->smem + layout::empty + k->r.slot * 8);
        advance<SLOTS>(&k->r);
        i0 = i0 + BLOCK < w.end ? i0 + BLOCK : w.begin;
    }
}

template <typename T, int D, int BLOCK, int SLOTS, int MAKES, bool PLAIN, bool FULL>
INLINE void work_dkdv(const attention_params &p, const crew &c, char *shared) {
    constexpr bool BOTH = MAKES == (MAKES_DK | MAKES_DV);
    typedef backward90<D, BLOCK, MAKES & MAKES_DK ? 2 : 1, SLOTS, 3> layout;
    float *const numbers = (float *)(shared + layout::numbers);
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    key_state k = {shared_address(shared), shared_address(shared) + group * 64 * 128, 0, {0, 0}};
    k.steps = (const key_options *)(shared + layout::options);
    int own_turn = 0;
    key_work w;
    for (unsigned turn = 0; find_keys < BLOCK, FULL ? WITH_ALL : 0 > (p, c, turn, &w); turn++) {
        float dk[BOTH || MAKES == MAKES_DK ? D / 8 : 1][4], dv[BOTH || MAKES == MAKES_DV ? D / 8 : 1][4];
        if (MAKES & MAKES_DK)
            zero_all<D / 8>(dk);
        if (MAKES & MAKES_DV)
            zero_all<D / 8>(dv);
        if (w.steps) {
            k.row0 = w.key0 + group * 64 + fragment_row();
            mbarrier_wait(k.smem + layout::own_full, own_turn);
            own_turn ^= 1;
            if (PLAIN)
                sum_keys_plainly<T, D, BLOCK, SLOTS, FULL, layout>(p, w.s, &k, numbers, w.steps, dk, dv);
            else
                sum_keys<T, D, BLOCK, SLOTS, MAKES, FULL, layout>(p, w.s, &k, numbers, w.steps, dk, dv);
            release(k.smem + layout::own_empty);
        }
        if (MAKES & MAKES_DK)
            pin_all<D / 8>(dk);
        if (MAKES & MAKES_DV)
            pin_all<D / 8>(dv);
        key_work again; /* or its registers would be kept through the loop */
        find_keys<BLOCK, FULL ? WITH_ALL : 0>(p, c, opaque(turn), &again);
        const int row = group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16, rows = again.c.all_sk - again.key0;
        const int64_t key0 = again.c.first_k + again.key0;
        if (MAKES & MAKES_DV)
            end_tile<T, D>(p.adds, p.t.dv, row_at(p.a.dv_stride, again.c.n, again.y, key0), p.a.dv_stride.s, row, rows,
                           (int)p.a.dv, FULL ? p.keep_scale : 1.0f, dv);
        if (MAKES & MAKES_DK)
            end_tile<T, D>(p.adds, p.t.dk, row_at(p.a.dk_stride, again.c.n, again.y, key0), p.a.dk_stride.s, row, rows,
                           (int)p.a.d, p.scale, dk);
    }
}

template <typename T, int D, int BLOCK, int SLOTS, int MAKES, bool PLAIN, bool FULL>
INLINE void run_dkdv(const attention_params_sm90 &all, const crew &c, char *shared) {
    typedef backward90<D, BLOCK, MAKES & MAKES_DK ? 2 : 1, SLOTS, 3> layout;
    if (FULL)
        put_dropout(all.p, (key_options *)(shared + layout::options) + KEY_STEPS);
    make_barriers<layout, SLOTS>(shared_address(shared));
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 32)
            fetch_keys<T, D, BLOCK, FULL ? WITH_ALL : 0, layout, dkdv_places<D, BLOCK, SLOTS, MAKES, layout>>(
                all, c, shared, (key_options *)(shared + layout::options));
    } else {
        registers_more<240>();
        work_dkdv<T, D, BLOCK, SLOTS, MAKES, PLAIN, FULL>(all.p, c, shared);
    }
}

/* Where dK and dV do not fit into the registers together, the first blocks make dK, the others dV. */
template <typename T, int D, int BLOCK, int SLOTS, bool PLAIN, bool FULL>
INLINE void attention_dkdv(const attention_params_sm90 &all) {
    extern __shared__ __align__(1024) char shared[];
    const unsigned first = all.p.blocks_of_dk;
    if (sm90_makes_both(D))
        run_dkdv<T, D, BLOCK, SLOTS, MAKES_DK | MAKES_DV, PLAIN, FULL>(all, {blockIdx.x, gridDim.x}, shared);
    else if (blockIdx.x < first)
        run_dkdv<T, D, BLOCK, SLOTS, MAKES_DK, false, FULL>(all, {blockIdx.x, first}, shared);
    else
        run_dkdv<T, D, BLOCK, SLOTS + 1, MAKES_DV, false, FULL>(all, {blockIdx.x - first, gridDim.x - first}, shared);
}

#define is_lean false
#define is_full true
#define pass_dkdv(T, D, BLOCK, FULL) attention_dkdv<T, D, BLOCK, sm90_backward_slots(D, BLOCK), (BLOCK > 64), FULL>(all)
#define pass_dq(T, D, BLOCK, FULL) attention_dq<T, D, BLOCK, sm90_backward_slots(D, BLOCK), FULL>(all)
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        wait_for_earlier_grid();                                                                                       \
        pass_##pass(dtype, dim, block, is_##variant);                                                                  \
    }

/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for Hopper, d or dv from 129 to 256: five products by pairs of blocks.
 *
 * The sums of dK and of dV of 64 keys fill the registers of a warpgroup each. So a cluster of two blocks owns 128 keys, and walks over the
 * queries that see them, 64 at a time, head by head of the group. Each block has both warpgroups on the same work, 64 keys each:
 *
 *   first   Sᵀ = K·Qᵀ -> Pᵀ, dV += Pᵀ·dO, and the first strips of 64 columns of dQ = dS·K
 *   second  dPᵀ = V·dOᵀ -> dSᵀ = Pᵀ∘(dPᵀ - D), dK += dSᵀ·Q, and the other strips
 *
 * P goes to the second block in 16 bits, from registers, to the lanes that have the same elements of dP; dS goes to where it was, as an operand,
 * and from there to the first, too. The warpgroups of a block take turns as in bwd.cu: one asks for all products between what it makes of one
 * step and of the next while the other computes; dQ is that of a step before, whose dS all have made by then. The sums of dQ lie in memory as
 * bwd.cu has them, and gather makes dq of them. */
#include "cuda/attention/sm90/pair_step.cuh"

/* ------------------------------------------------------------------------------------------ the first: S, P, dV */

/* Tiles come as they are used: Q, then dO of a step and Q of the next. A step that is cut needs both before its weights. */
template <typename T, typename layout> INLINE void clean_first(const state &k, ring q) {
    if (!k.dirty)
        return;
    float *const row = row_numbers<layout>(k, k.turn);
    clean_queries<T, layout>(k, q, row);
    clean_queries<T, layout>(k, after<layout>(q), row);
}

template <typename T, typename layout> INLINE void sum_values(const attention_params &p, state *k, float (*dv)[4]) {
    constexpr int COLUMNS = dq_columns<layout>();
    float s[BLOCK / 8][4], dq[COLUMNS / 8][4];
    uint32_t ps[BLOCK / 16][4];
    made_ahead ahead;
    await_tile<layout>(*k, k->r);
    begin_step<layout::with>(k);
    clean_first<T, layout>(*k, k->r);
    issue_scores<T, layout>(*k, k->r, s);
    make_ahead<T, layout>(p, *k, &ahead);
    wgmma_wait<0>();
    release_tile<layout>(*k, k->r);
    weigh<T, layout>(p, *k, is_careful<layout>(*k), ahead, s);
    put_weights<T, layout>(p, *k, ahead.kept, s, ps);
    bool pending = false;
#pragma unroll 1
    while (goes_on<layout::with>(k)) {
        const ring out = after<layout>(k->r), next = after<layout>(out);
        k->turn++;
        k->r = next;
        await_tile<layout>(*k, out);
        await_tile<layout>(*k, next);
        begin_step<layout::with>(k);
        clean_first<T, layout>(*k, next);
        await_turn(*k);
        pin_all<BLOCK / 16>(ps);
        if (pending)
            await_gradients<layout>(*k, k->turn - 2);
        issue_dq<T, layout>(*k, k->turn - 2, dq); /* of no step: of what lies there, and not looked at */
        issue_scores<T, layout>(*k, next, s);
        pass_turn(*k);
        issue_sum<T, layout>(*k, out, ps, dv);
        const bool careful = is_careful<layout>(*k);
        make_ahead<T, layout>(p, *k, &ahead);
        wgmma_wait<2>();
        float *const to = pending ? finish_dq<layout>(*k, k->turn - 2, dq) : NULL;
        wgmma_wait<1>();
        release_tile<layout>(*k, next);
        weigh<T, layout>(p, *k, careful, ahead, s);
        wgmma_wait<0>();
        release_tile<layout>(*k, out);
        pin_all<BLOCK / 16>(ps);
        put_weights<T, layout>(p, *k, ahead.kept, s, ps);
        hold_dq<layout>(to, dq);
        pending = true;
    }
    k->r = after<layout>(k->r);
    await_tile<layout>(*k, k->r);
    if (pending)
        await_gradients<layout>(*k, k->turn - 1);
    issue_dq<T, layout>(*k, k->turn - 1, dq);
    issue_sum<T, layout>(*k, k->r, ps, dv);
    wgmma_wait<0>();
    release_tile<layout>(*k, k->r);
    if (pending)
        finish_dq<layout>(*k, k->turn - 1, dq);
    k->r = after<layout>(k->r);
    await_gradients<layout>(*k, k->turn);
    issue_dq<T, layout>(*k, k->turn, dq);
    wgmma_wait<0>();
    finish_dq<layout>(*k, k->turn, dq);
    k->turn++;
}

/* --------------------------------------------------------------------------------------- the second: dP, dS, dK */

/* Tiles: dO, then Q of a step and dO of the next. */
template <typename T, typename layout> INLINE void clean_second(const state &k, ring r, unsigned turn) {
    if (k.dirty)
        clean_queries<T, layout>(k, r, row_numbers<layout>(k, turn));
}

template <typename T, typename layout> INLINE void sum_keys(const attention_params &p, state *k, float (*dk)[4]) {
    constexpr int COLUMNS = dq_columns<layout>();
    float dp[BLOCK / 8][4], dq[COLUMNS / 8][4], *to = NULL;
    uint32_t ds[BLOCK / 16][4];
    zero_all<COLUMNS / 8>(dq);
    await_tile<layout>(*k, k->r);
    begin_step<layout::with>(k);
    clean_second<T, layout>(*k, k->r, k->turn);
    issue_scores<T, layout>(*k, k->r, dp);
    wgmma_wait<0>();
    release_tile<layout>(*k, k->r);
    make_gradients<T, layout>(p, *k, dp, ds);
#pragma unroll 1
    while (goes_on<layout::with>(k)) {
        const ring q = after<layout>(k->r), next = after<layout>(q);
        clean_second<T, layout>(*k, q, k->turn);
        k->turn++;
        k->r = next;
        await_tile<layout>(*k, q);
        await_tile<layout>(*k, next);
        begin_step<layout::with>(k);
        clean_second<T, layout>(*k, next, k->turn);
        await_turn(*k);
        pin_all<BLOCK / 16>(ds);
        if (layout::slots > 3) {
            issue_scores<T, layout>(*k, next, dp);
            issue_sum<T, layout>(*k, q, ds, dk);
        } else { /* Q first: for its place dO of the next step waits */
            issue_sum<T, layout>(*k, q, ds, dk);
            issue_scores<T, layout>(*k, next, dp);
        }
        hold_dq<layout>(to, dq);
        await_both(*k, k->turn - 1);
        pass_turn(*k);
        issue_dq<T, layout>(*k, k->turn - 1, dq);
        if (layout::slots == 3) {
            wgmma_wait<2>();
            release_tile<layout>(*k, q);
        }
        wgmma_wait<1>();
        if (layout::slots > 3)
            release_tile<layout>(*k, q);
        release_tile<layout>(*k, next);
        pin_all<BLOCK / 16>(ds);
        make_gradients<T, layout>(p, *k, dp, ds);
        wgmma_wait<0>();
        to = finish_dq<layout>(*k, k->turn - 1, dq);
    }
    k->r = after<layout>(k->r);
    clean_second<T, layout>(*k, k->r, k->turn);
    await_tile<layout>(*k, k->r);
    await_both(*k, k->turn);
    issue_sum<T, layout>(*k, k->r, ds, dk);
    issue_dq<T, layout>(*k, k->turn, dq);
    wgmma_wait<0>();
    release_tile<layout>(*k, k->r);
    finish_dq<layout>(*k, k->turn, dq);
    k->r = after<layout>(k->r);
    k->turn++;
}

/* ------------------------------------------------------------------------------------------------------- the kernel */

/* dV (dK) of a tile of keys to memory. */
template <typename T, typename layout>
INLINE void store_keys(const attention_params &p, const state &k, const float (*sum)[4]) {
    constexpr bool IS_FIRST = layout::rank == FIRST;
    const key_work &w = *k.work;
    const heddle_strides &s = IS_FIRST ? p.a.dv_stride : p.a.dk_stride;
    end_tile<T, layout::dim>(p.adds, IS_FIRST ? p.t.dv : p.t.dk, row_at(s, w.c.n, w.y, w.c.first_k + w.key0), s.s,
                             k.group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16, w.c.all_sk - w.key0,
                             (int)(IS_FIRST ? p.a.dv : p.a.d), IS_FIRST ? layout::with ? p.keep_scale : 1.0f : p.scale,
                             sum);
}

/* A tile of keys after the other. */
template <typename T, typename layout> INLINE void work(const attention_params &p, char *shared) {
    constexpr int D = layout::dim;
    const uint32_t smem = shared_address(shared);
    const key_work *const works = (const key_work *)(shared + layout::works);
    state k = {smem, cluster_address(smem, layout::rank ^ 1)};
    k.group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    k.numbers = (float *)(shared + layout::numbers);
    k.marks = (float *)(shared + layout::marks);
    k.steps = (const told_step *)(shared + layout::steps);
    if (k.group == 1)
        pass_turn(k);
    for (unsigned tile = 0;; tile++) {
        float sum[D / 8][4];
        mbarrier_wait(smem + layout::own_full, (int)(tile & 1));
        k.work = works + (tile & 1);
        k.left = __shfl_sync(ALL_LANES, k.work->steps, 0);
        if (k.left < 0)
            break;
        zero_all<D / 8>(sum);
        if (k.left) {
            k.any_bad =
                clean_keys<T, layout::own_bytes / layout::strip_bytes * 64, OWN_ROWS>(smem + layout::own, k.marks);
            if (layout::rank == FIRST)
                sum_values<T, layout>(p, &k, sum);
            else
                sum_keys<T, layout>(p, &k, sum);
        }
        release_each(smem + layout::own_empty);
        pin_all<D / 8>(sum);
        store_keys<T, layout>(p, k, sum);
    }
}

template <typename T, typename layout> INLINE void run_pair(const attention_params_sm90 &all, char *shared) {
    const crew crew = {blockIdx.x / 2, gridDim.x / 2};
    if (layout::with & WITH_DROPOUT) {
        wait_for_earlier_grid();
        put_dropout(all.p, shared + layout::options + KEY_STEPS * sizeof(key_options));
    }
    make_barriers<layout>(shared_address(shared));
    wait_for_earlier_grid();
    if (__shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0) == 0) {
        registers_fewer<24>();
        const unsigned warp = threadIdx.x / 32;
        if (warp == 1)
            tell<T, layout>(all.p, crew, shared);
        else if (layout::with ? warp == 0 : threadIdx.x == 0)
            fetch_tiles<T, layout>(all, crew, shared_address(shared));
        __syncwarp();
    } else {
        registers_more<240>();
        work<T, layout>(all.p, shared);
    }
    /* Nobody leaves while the other block may still write here. */
    cluster_arrive();
    cluster_wait();
}

template <typename T, int D, int WITH> INLINE void attention_pair(const attention_params_sm90 &all) {
    extern __shared__ __align__(1024) char shared[];
    if (blockIdx.x % 2 == 0)
        run_pair<T, layout_pair<D, FIRST, WITH>>(all, shared);
    else
        run_pair<T, layout_pair<D, SECOND, WITH>>(all, shared);
}

#define with_lean 0
#define with_capped (WITH_CAP | WITH_SLOPES)
#define with_masked WITH_MASK
#define with_biased WITH_BIAS
#define with_keyed WITH_KEY_BIAS
#define with_full WITH_ALL
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(own == OWN_ROWS && block == BLOCK, "as the list has it");                                            \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(warps * 32, 1)                              \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        attention_pair<dtype, dim, with_##variant>(all);                                                               \
    }

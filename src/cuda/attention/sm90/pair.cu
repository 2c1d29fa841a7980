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
#include "cuda/attention/sm90/pair.cuh"

/* -------------------------------------------------------------------------------------------------- what both do */

/* Where a warpgroup is. */
struct state {
    uint32_t smem, there; /* shared memory of this block and of the other */
    int group;            /* which warpgroup */
    ring r;               /* the tile that is next */
    unsigned turn;        /* steps so far */
    int left;             /* of a tile of keys */
    bool any_bad, masked; /* one of the keys is not finite; that, or a mask or an end cuts the step */
    const key_work *work;
    float *numbers, *marks;
    const told_step *steps;
};

INLINE const told_step &step_of(const state &k, unsigned turn) {
    return k.steps[turn % SM90_PAIR_TOLD];
}

INLINE void await_turn(const state &k) {
    barrier_sync(4 + k.group, CONSUMERS);
}
INLINE void pass_turn(const state &k) {
    barrier_arrive(5 - k.group, CONSUMERS);
}

template <typename layout> INLINE ring after(ring r) {
    advance<layout::slots>(&r);
    return r;
}

/* opaque: what is made of it would be kept through the loop, for which there are no registers. */
template <typename layout> INLINE uint32_t tile_at(const state &k, ring r) {
    return opaque(k.smem) + layout::tiles + r.slot * layout::slot_bytes;
}

template <typename layout> INLINE void await_tile(const state &k, ring r) {
    mbarrier_wait(k.smem + layout::full + r.slot * 8, r.turn);
}

template <typename layout> INLINE void release_tile(const state &k, ring r) {
    release_each(k.smem + layout::empty + r.slot * 8);
}

template <typename layout> INLINE float *row_numbers(const state &k, unsigned turn) {
    return k.numbers + turn % SM90_PAIR_NUMBERS * 2 * BLOCK;
}

/* What a mask cuts: its rows that are not finite become zero, their numbers NaN. Both warpgroups. */
template <typename T, typename layout> INLINE void clean_queries(const state &k, ring r, float *numbers) {
    await_tile<layout>(k, r);
    clean_slot<T, layout::dim, BLOCK>(tile_at<layout>(k, r), numbers, BLOCK);
}

/* c = own·tileᵀ, issued: this warpgroup's keys and all columns. */
template <typename T, typename layout> INLINE void issue_scores(const state &k, ring r, float (*c)[4]) {
    wgmma_fence();
    warpgroup_rows<T, layout::dim, BLOCK, OWN_ROWS, BLOCK>(c, opaque(k.smem) + layout::own + k.group * 64 * 128,
                                                           tile_at<layout>(k, r));
    wgmma_commit();
}

/* sum += a·tile. */
template <typename T, typename layout>
INLINE void issue_sum(const state &k, ring r, const uint32_t (*a)[4], float (*sum)[4]) {
    wgmma_fence();
    warpgroup_columns<T, layout::dim, BLOCK, BLOCK>(sum, a, tile_at<layout>(k, r));
    wgmma_commit();
}

/* Columns of dQ that a warpgroup makes: a strip, or where the block has one alone its half. */
template <typename layout> INLINE constexpr int dq_columns(void) {
    return 32 * layout::dq_strips;
}

template <typename layout> INLINE uint32_t dq_keys(const state &k) {
    const int first = layout::rank == FIRST ? 0 : layout::strips;
    return opaque(k.smem) + layout::own + first * layout::strip_bytes +
           (layout::dq_strips == 1 ? k.group * 64 : k.group * layout::strip_bytes);
}

/* dS of a step is there, from both warpgroups. */
template <typename layout> INLINE void await_gradients(const state &k, unsigned turn) {
    mbarrier_wait(k.smem + layout::ds_full + (turn & 1) * 8, (int)(turn >> 1 & 1));
}

/* dQ of a step, issued. */
template <typename T, typename layout> INLINE void issue_dq(const state &k, unsigned turn, float (*dq)[4]) {
    wgmma_fence();
    warpgroup_both<T, dq_columns<layout>(), OWN_ROWS, OWN_ROWS>(dq, k.smem + (turn & 1) * layout::exchange_bytes,
                                                                dq_keys<layout>(k));
    wgmma_commit();
}

/* It is there: what the other block has written here may be overwritten. Returns where it has been added: whose registers took something
 * else soon would wait until the memory has taken all of it. */
template <typename layout> INLINE float *finish_dq(const state &k, unsigned turn, float (*dq)[4]) {
    float *to = step_of(k, turn).sum;
    pin_all<dq_columns<layout>() / 8>(dq);
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive_at(k.there + layout::there_empty + (turn & 1) * 8);
    if (!to)
        return to;
    to += k.group * SM90_PIECE / (layout::dq_strips == 1 ? 2 : 1) + threadIdx.x % WARPGROUP * 4;
#pragma unroll
    for (int y = 0; y < dq_columns<layout>() / 8; y++)
        add_global4(to + y * WARPGROUP * 4, make_float4(dq[y][0], dq[y][1], dq[y][2], dq[y][3]));
    return to;
}

/* The same of what has been added. */
template <typename layout> INLINE void hold_dq(const float *to, const float (*dq)[4]) {
    hold(to);
#pragma unroll
    for (int y = 0; y < dq_columns<layout>() / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            hold(dq[y][e]);
}

/* To the next step, whose first tile is there. */
INLINE void begin_step(state *k) {
    k->masked = k->any_bad || step_of(*k, k->turn).cut;
}

/* Where this warp's P or dS of a step lies, from the beginning of shared memory on: 16 keys. */
template <typename layout> INLINE uint32_t exchange_at(const state &k) {
    const int warp = (int)threadIdx.x % WARPGROUP / 32;
    return (k.turn & 1) * layout::exchange_bytes + (k.group * 64 + warp * 16) * BLOCK * 2;
}

/* And in that what a lane has of the x-th 16 queries: of dS the row that it tells stmatrix, of P the operand's registers, which lie where
 * their dS will. */
INLINE uint32_t lane_at(int x) {
    const int lane = threadIdx.x % 32;
    return lane % 16 * 128 + (((x * 2 + lane / 16) ^ (lane & 7)) << 4);
}

/* ------------------------------------------------------------------------------------------ the first: S, P, dV */

/* Do the weights of the step take more than the numbers of a row? */
template <typename layout> INLINE bool is_careful(const state &k) {
    return k.masked || has_rest<BLOCK>(row_numbers<layout>(k, k.turn));
}

/* Sᵀ -> Pᵀ. */
template <typename layout> INLINE void weigh(const attention_params &p, const state &k, bool careful, float (*s)[4]) {
    const span &w = k.work->s;
    const int row0 = k.work->key0 + k.group * 64 + fragment_row(), i0 = step_of(k, k.turn).i0;
    const float *row = row_numbers<layout>(k, k.turn);
    pin_all<BLOCK / 8>(s);
    if (careful)
        key_weights<true, BLOCK>(p.scale_log2, w, row0, i0, row, s);
    else
        key_weights<false, BLOCK>(p.scale_log2, w, 0, 0, row, s);
    if (k.any_bad) {
        const float *marks = k.marks + k.group * 64 + fragment_row();
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[y][e] = __float_as_int(s[y][e]) < 0 ? s[y][e] : s[y][e] + marks[e / 2 * 8];
    }
    pin_all<BLOCK / 8>(s); /* or it would be left for after a wait */
    hold_until(s[BLOCK / 8 - 1][3]);
}

/* Pᵀ as an operand, and to the other block. */
template <typename T, typename layout> INLINE void put_weights(const state &k, const float (*s)[4], uint32_t (*ps)[4]) {
    const uint32_t to = k.there + exchange_at<layout>(k),
                   bar = k.there + layout::p_full + (k.turn & 1) * 16 + k.group * 8;
    pack_fragments<T, BLOCK>(ps, s);
    mbarrier_wait(k.smem + layout::there_empty + (k.turn & 1) * 8, (int)(k.turn >> 1 & 1) ^ 1);
    if (threadIdx.x % 32 == 0)
        mbarrier_expect_at(bar, 16 * BLOCK * 2);
    __syncwarp();
#pragma unroll
    for (int x = 0; x < BLOCK / 16; x++)
        store_async16(to + lane_at(x), make_uint4(ps[x][0], ps[x][1], ps[x][2], ps[x][3]), bar);
}

/* Tiles come as they are used: Q, then dO of a step and Q of the next. A step that is cut needs both before its weights. */
template <typename T, typename layout> INLINE void clean_first(const state &k, ring q) {
    if (!k.masked)
        return;
    float *const row = row_numbers<layout>(k, k.turn);
    clean_queries<T, layout>(k, q, row);
    clean_queries<T, layout>(k, after<layout>(q), row);
}

template <typename T, typename layout> INLINE void sum_values(const attention_params &p, state *k, float (*dv)[4]) {
    constexpr int COLUMNS = dq_columns<layout>();
    float s[BLOCK / 8][4], dq[COLUMNS / 8][4];
    uint32_t ps[BLOCK / 16][4];
    await_tile<layout>(*k, k->r);
    begin_step(k);
    clean_first<T, layout>(*k, k->r);
    issue_scores<T, layout>(*k, k->r, s);
    wgmma_wait<0>();
    release_tile<layout>(*k, k->r);
    weigh<layout>(p, *k, is_careful<layout>(*k), s);
    put_weights<T, layout>(*k, s, ps);
    bool pending = false;
#pragma unroll 1
    while (--k->left) {
        const ring out = after<layout>(k->r), next = after<layout>(out);
        k->turn++;
        k->r = next;
        await_tile<layout>(*k, out);
        await_tile<layout>(*k, next);
        begin_step(k);
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
        wgmma_wait<2>();
        float *const to = pending ? finish_dq<layout>(*k, k->turn - 2, dq) : NULL;
        wgmma_wait<1>();
        release_tile<layout>(*k, next);
        weigh<layout>(p, *k, careful, s);
        wgmma_wait<0>();
        release_tile<layout>(*k, out);
        pin_all<BLOCK / 16>(ps);
        put_weights<T, layout>(*k, s, ps);
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

/* What dSᵀ of 16 queries is made of, beside dPᵀ: the other block's Pᵀ, and D. */
struct gradient_inputs {
    uint4 ps;
    float2 dsum[2];
};

INLINE gradient_inputs load_inputs(uint32_t at, const float *row, int x) {
    const float *const dsums = row + x * 16 + fragment_column();
    return {load_shared16(at + lane_at(x)), {*(const float2 *)dsums, *(const float2 *)(dsums + 8)}};
}

/* dPᵀ -> dSᵀ. MASKED: 0 where P says that a key is not seen, else NaN where something is not finite. */
template <typename T, bool MASKED>
INLINE void apply_weights(const state &k, const gradient_inputs &in, float (*dp)[4]) {
    const uint32_t pairs[4] = {in.ps.x, in.ps.y, in.ps.z, in.ps.w};
    const float *marks = k.marks + k.group * 64 + fragment_row();
#pragma unroll
    for (int y = 0; y < 4; y++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float *const t = &dp[y / 2][y % 2 * 2 + e];
            const float s = e ? high_float(pairs[y], T()) : low_float(pairs[y], T());
            const float d = e ? in.dsum[y / 2].y : in.dsum[y / 2].x;
            const bool seen = !MASKED || __float_as_int(s) >= 0;
            *t = seen ? s * (*t - d) : 0.0f;
            if (MASKED && k.any_bad && seen)
                *t += marks[y % 2 * 8];
        }
}

/* Of all 64, as an operand; and to where both warpgroups of both blocks read it: rows are keys, a strip of 64 queries. */
template <typename T, bool MASKED>
INLINE void put_gradients(const state &k, const float *row, uint32_t at, float (*dp)[4], uint32_t (*ds)[4]) {
#pragma unroll
    for (int x = 0; x < BLOCK / 16; x++) {
        apply_weights<T, MASKED>(k, load_inputs(at, row, x), dp + 2 * x);
        pack_fragments<T, 16>(ds + x, dp + 2 * x);
        __syncwarp(); /* P has been read */
        stmatrix4(at + lane_at(x), ds[x]);
    }
}

/* That the dS of the other warpgroup lies there, too. By barriers without a branch, as products are under way then (C7520). */
INLINE void tell_gradients(const state &k) {
    barrier_arrive(6 + k.group * 2 + (int)(k.turn & 1), CONSUMERS);
}
INLINE void await_both(const state &k, unsigned turn) {
    barrier_sync(8 - k.group * 2 + (int)(turn & 1), CONSUMERS);
}

/* The same, once P has come, and to the other block. */
template <typename T, typename layout> INLINE void make_gradients(const state &k, float (*dp)[4], uint32_t (*ds)[4]) {
    const uint32_t place = exchange_at<layout>(k), at = k.smem + place, which = (k.turn & 1) * 8;
    const float *row = row_numbers<layout>(k, k.turn);
    pin_all<BLOCK / 8>(dp);
    mbarrier_wait(k.smem + layout::p_full + which * 2 + k.group * 8, (int)(k.turn >> 1 & 1));
    if (k.masked)
        put_gradients<T, true>(k, row, at, dp, ds);
    else
        put_gradients<T, false>(k, row, at, dp, ds);
    fence_async();
    __syncwarp();
    tell_gradients(k);
    mbarrier_wait(k.smem + layout::there_empty + which, (int)(k.turn >> 1 & 1) ^ 1);
    if (threadIdx.x % 32 == 0) {
        const uint32_t bar = k.there + layout::ds_full + which;
        mbarrier_expect_at(bar, 16 * BLOCK * 2);
        copy_to_block(k.there + place, at, 16 * BLOCK * 2, bar);
    }
}

/* Tiles: dO, then Q of a step and dO of the next. */
template <typename T, typename layout> INLINE void clean_second(const state &k, ring r, unsigned turn) {
    if (k.masked)
        clean_queries<T, layout>(k, r, row_numbers<layout>(k, turn));
}

template <typename T, typename layout> INLINE void sum_keys(state *k, float (*dk)[4]) {
    constexpr int COLUMNS = dq_columns<layout>();
    float dp[BLOCK / 8][4], dq[COLUMNS / 8][4], *to = NULL;
    uint32_t ds[BLOCK / 16][4];
    zero_all<COLUMNS / 8>(dq);
    await_tile<layout>(*k, k->r);
    begin_step(k);
    clean_second<T, layout>(*k, k->r, k->turn);
    issue_scores<T, layout>(*k, k->r, dp);
    wgmma_wait<0>();
    release_tile<layout>(*k, k->r);
    make_gradients<T, layout>(*k, dp, ds);
#pragma unroll 1
    while (--k->left) {
        const ring q = after<layout>(k->r), next = after<layout>(q);
        clean_second<T, layout>(*k, q, k->turn);
        k->turn++;
        k->r = next;
        await_tile<layout>(*k, q);
        await_tile<layout>(*k, next);
        begin_step(k);
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
        make_gradients<T, layout>(*k, dp, ds);
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
    store_tile<T, layout::dim>(p.adds, IS_FIRST ? p.t.dv : p.t.dk, row_at(s, w.c.n, w.y, w.c.first_k + w.key0), s.s,
                               k.group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16, w.c.all_sk - w.key0,
                               (int)(IS_FIRST ? p.a.dv : p.a.d), IS_FIRST ? 1.0f : p.scale, sum);
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
                sum_keys<T, layout>(&k, sum);
        }
        release_each(smem + layout::own_empty);
        pin_all<D / 8>(sum);
        store_keys<T, layout>(p, k, sum);
    }
}

template <typename T, typename layout> INLINE void run_pair(const attention_params_sm90 &all, char *shared) {
    const crew crew = {blockIdx.x / 2, gridDim.x / 2};
    make_barriers<layout>(shared_address(shared));
    wait_for_earlier_grid();
    if (__shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0) == 0) {
        registers_fewer<24>();
        if (threadIdx.x == 0)
            fetch_tiles<layout>(all, crew, shared_address(shared));
        else if (threadIdx.x / 32 == 1)
            tell<layout>(all.p, crew, shared);
        __syncwarp();
    } else {
        registers_more<240>();
        work<T, layout>(all.p, shared);
    }
    /* Nobody leaves while the other block may still write here. */
    cluster_arrive();
    cluster_wait();
}

template <typename T, int D> INLINE void attention_pair(const attention_params_sm90 &all) {
    extern __shared__ __align__(1024) char shared[];
    if (blockIdx.x % 2 == 0)
        run_pair<T, layout_pair<D, FIRST>>(all, shared);
    else
        run_pair<T, layout_pair<D, SECOND>>(all, shared);
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(own == OWN_ROWS && block == BLOCK, "as the list has it");                                            \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(warps * 32, 1)                              \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        attention_pair<dtype, dim>(all);                                                                               \
    }

/* SPDX-License-Identifier: Apache-2.0
 * What a warpgroup of a pair of blocks (pair.cu) makes of a step: weights in the first block, their gradients in the second, and how they come
 * to the other. */
#ifndef HEDDLE_CUDA_ATTENTION_PAIR_STEP_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_PAIR_STEP_SM90_CUH

#include "cuda/attention/sm90/pair.cuh"

/* -------------------------------------------------------------------------------------------------- what both do */

/* Where a warpgroup is. */
struct state {
    uint32_t smem, there; /* shared memory of this block and of the other */
    int group;            /* which warpgroup */
    ring r;               /* the tile that is next */
    unsigned turn;        /* steps so far */
    int left;             /* of a tile of keys */
    bool any_bad, masked; /* one of the keys is not finite; that, or something is not seen in the step */
    bool dirty;           /* and something of its queries may be not finite */
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
template <int WITH> INLINE void begin_step(state *k) {
    const int flags = step_of(*k, k->turn).flags;
    k->masked = k->any_bad || (flags & STEP_CUT);
    k->dirty = WITH ? k->masked && (flags & STEP_DIRTY) : k->masked;
}

/* Is there another step? */
template <int WITH> INLINE bool goes_on(state *k) {
    return WITH & WITH_MASK ? !(step_of(*k, k->turn).flags & STEP_LAST) : --k->left != 0;
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
    const bool cut = layout::with ? (step_of(k, k.turn).flags & STEP_BAND) != 0 : k.masked;
    return cut || has_rest<BLOCK>(row_numbers<layout>(k, k.turn));
}

/* With options: what they need of a step; this lane's first key. */
template <typename layout> INLINE const key_options *all_options(const state &k) {
    return (const key_options *)((const char *)k.numbers + (layout::options - layout::numbers));
}
template <typename layout> INLINE const key_options &options_of(const state &k) {
    return all_options<layout>(k)[k.turn % SM90_PAIR_TOLD];
}
INLINE int first_key(const state &k) {
    return k.work->key0 + k.group * 64 + fragment_row();
}

/* k·q -> Sᵀ, but for a factor, which is returned, and what hides. *low: a bias hides an element of the warp's. */
template <typename T, typename layout>
INLINE float adjust(const attention_params &p, const state &k, const key_bias &keys, bool *low, float (*s)[4]) {
    constexpr int WITH = layout::with;
    const key_options &o = options_of<layout>(k);
    const float by = cap_and_slope_keys<T, BLOCK, WITH>(p, o, first_key(k), s);
    if (WITH & WITH_KEY_BIAS) {
        *low = masks_any(keys);
        add_bias_of_keys<BLOCK>(keys, by, s);
        return 1.0f;
    }
    if (!has_bias<WITH>(p))
        return by;
    *low = add_key_biases<T, BLOCK>(p, o, first_key(k), by, s);
    return 1.0f;
}

/* What options need for a step beside its scores, and have before them: bits of a mask, a bias that is the same for all queries, what
 * dropout keeps. */
struct made_ahead {
    read_ahead<BLOCK> bits;
    key_bias keys;
    kept_bits<BLOCK> kept;
};

template <typename T, typename layout>
INLINE void make_ahead(const attention_params &p, const state &k, made_ahead *r) {
    constexpr int WITH = layout::with;
    const key_options &o = options_of<layout>(k);
    if (WITH & WITH_KEY_BIAS)
        r->keys = read_bias_of_keys<T>(o, first_key(k));
    if (WITH & WITH_MASK)
        read_key_options<BLOCK, WITH>(p, o, first_key(k), &r->bits);
    if (WITH & WITH_DROPOUT)
        r->kept = keep_keys<BLOCK, WITH>(p, o, all_options<layout>(k), first_key(k));
}

/* Sᵀ -> Pᵀ. */
template <typename T, typename layout>
INLINE void weigh(const attention_params &p, const state &k, bool careful, const made_ahead &ahead, float (*s)[4]) {
    constexpr int WITH = layout::with;
    const span &w = k.work->s;
    const int i0 = step_of(k, k.turn).i0;
    const float *row = row_numbers<layout>(k, k.turn);
    bool low = false;
    pin_all<BLOCK / 8>(s);
    const float by = WITH ? adjust<T, layout>(p, k, ahead.keys, &low, s) : 1.0f;
    if (careful)
        key_weights<true, BLOCK>(p.scale_log2, w, first_key(k), i0, row, s, by);
    else
        key_weights<false, BLOCK>(p.scale_log2, w, 0, 0, row, s, by);
    if (WITH)
        hide_keys<T, BLOCK, WITH>(p, options_of<layout>(k), first_key(k), low, ahead.bits, s);
    if ((WITH & WITH_KEY_BIAS) && low)
        hide_bias_of_keys<BLOCK>(ahead.keys, s);
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

/* What the other block takes for Pᵀ of the x-th 16 queries, ps as an operand: with a softcap dSᵀ has its slope as a factor; what dropout does not
 * keep has a sign. */
template <typename T, typename layout>
INLINE uint4 find_given(const attention_params &p, const state &k, int x, const kept_bits<BLOCK> &kept,
                        const float (*s)[4], const uint32_t *ps) {
    constexpr int WITH = layout::with;
    uint32_t given[1][4] = {{ps[0], ps[1], ps[2], ps[3]}};
    if (has_cap<WITH>(p) || has_dropout<WITH>(p)) {
        const float *row = row_numbers<layout>(k, k.turn) + x * 16;
        float t[2][4];
#pragma unroll
        for (int y = 0; y < 8; y++)
            t[y / 4][y % 4] = s[2 * x + y / 4][y % 4];
        if (has_cap<WITH>(p))
            cap_key_gradients(p, row, row + BLOCK, s + 2 * x, t);
#pragma unroll
        for (int y = 0; y < 8; y++)
            if (has_dropout<WITH>(p) && !is_kept(kept, 2 * x + y / 4, y % 4))
                t[y / 4][y % 4] = -fabsf(t[y / 4][y % 4]);
        pack_fragments<T, 16>(given, t);
    }
    return make_uint4(given[0][0], given[0][1], given[0][2], given[0][3]);
}

/* Pᵀ of what is kept as an operand, and to the other block. */
template <typename T, typename layout>
INLINE void put_weights(const attention_params &p, const state &k, const kept_bits<BLOCK> &kept, float (*s)[4],
                        uint32_t (*ps)[4]) {
    const uint32_t to = k.there + exchange_at<layout>(k),
                   bar = k.there + layout::p_full + (k.turn & 1) * 16 + k.group * 8;
    pack_fragments<T, BLOCK>(ps, s);
    mbarrier_wait(k.smem + layout::there_empty + (k.turn & 1) * 8, (int)(k.turn >> 1 & 1) ^ 1);
    if (threadIdx.x % 32 == 0)
        mbarrier_expect_at(bar, 16 * BLOCK * 2);
    __syncwarp();
#pragma unroll
    for (int x = 0; x < BLOCK / 16; x++)
        store_async16(to + lane_at(x), find_given<T, layout>(p, k, x, kept, s, ps[x]), bar);
    if (has_dropout<layout::with>(p)) {
        drop_elements(kept, 1.0f, s);
        pack_fragments<T, BLOCK>(ps, s);
    }
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

/* dPᵀ -> dSᵀ. MASKED: 0 where P says that a key is not seen (-0), else NaN where something is not finite. */
template <typename T, typename layout, bool MASKED>
INLINE void apply_weights(const attention_params &p, const state &k, const gradient_inputs &in, float (*dp)[4]) {
    const uint32_t pairs[4] = {in.ps.x, in.ps.y, in.ps.z, in.ps.w};
    const float *marks = k.marks + k.group * 64 + fragment_row();
#pragma unroll
    for (int y = 0; y < 4; y++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float *const t = &dp[y / 2][y % 2 * 2 + e];
            const float s = e ? high_float(pairs[y], T()) : low_float(pairs[y], T());
            const float d = e ? in.dsum[y / 2].y : in.dsum[y / 2].x;
            const bool drops = has_dropout<layout::with>(p);
            const bool seen = !MASKED || (drops ? __float_as_uint(s) != 0x80000000u : __float_as_int(s) >= 0);
            const float part = __float_as_int(s) < 0 ? 0.0f : *t;
            *t = !seen ? 0.0f : drops ? fabsf(s) * fmaf(part, p.keep_scale, -d) : s * (*t - d);
            if (MASKED && k.any_bad && seen)
                *t += marks[y % 2 * 8];
        }
}

/* Of all 64, as an operand; and to where both warpgroups of both blocks read it: rows are keys, a strip of 64 queries. */
template <typename T, typename layout, bool MASKED>
INLINE void put_gradients(const attention_params &p, const state &k, const float *row, uint32_t at, float (*dp)[4],
                          uint32_t (*ds)[4]) {
#pragma unroll
    for (int x = 0; x < BLOCK / 16; x++) {
        apply_weights<T, layout, MASKED>(p, k, load_inputs(at, row, x), dp + 2 * x);
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
template <typename T, typename layout>
INLINE void make_gradients(const attention_params &p, const state &k, float (*dp)[4], uint32_t (*ds)[4]) {
    const uint32_t place = exchange_at<layout>(k), at = k.smem + place, which = (k.turn & 1) * 8;
    const float *row = row_numbers<layout>(k, k.turn);
    pin_all<BLOCK / 8>(dp);
    mbarrier_wait(k.smem + layout::p_full + which * 2 + k.group * 8, (int)(k.turn >> 1 & 1));
    if (k.masked)
        put_gradients<T, layout, true>(p, k, row, at, dp, ds);
    else
        put_gradients<T, layout, false>(p, k, row, at, dp, ds);
    fence_async();
    __syncwarp();
    tell_gradients(k);
    mbarrier_wait(k.smem + layout::there_empty + which, (int)(k.turn >> 1 & 1) ^ 1);
    __syncwarp(); /* or a late lane might see a phase too late */
    if (threadIdx.x % 32 == 0) {
        const uint32_t bar = k.there + layout::ds_full + which;
        mbarrier_expect_at(bar, 16 * BLOCK * 2);
        copy_to_block(k.there + place, at, 16 * BLOCK * 2, bar);
    }
}

#endif

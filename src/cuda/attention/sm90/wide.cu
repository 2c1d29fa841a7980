/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for Hopper with dropout and no other option, d or dv from 129 to 256: five products (all else: pair.cu).
 *
 * The sums of dK and dV of 64 keys fill the registers of a warpgroup each. So the first has S, P and dV, the second dP, dS and dK; of dQ
 * each makes half of the columns. A block owns 64 keys and walks over the queries that see them, 64 at a time, head by head of the
 * group:
 *
 *   first   Sᵀ = K·Qᵀ -> Pᵀ, which goes to the second in float32; dV += Pᵀ·dO; dQ = dS·K, columns 0 to 127
 *   second  dPᵀ = V·dOᵀ -> dSᵀ = Pᵀ∘(dPᵀ - D), which goes to the first; dK += dSᵀ·Q; dQ = dS·K, columns 128 to 255
 *
 * Of two neighbouring steps: while dV and dK of one add up, Sᵀ and dPᵀ of the next are made and turned into Pᵀ and dSᵀ. The sums of dQ lie in
 * memory as bwd.cu has them, and gather makes dq of them. */
#include "cuda/attention/sm90/fetch.cuh"

#define OWN 64   /* keys of a block */
#define BLOCK 64 /* queries of a step */
#define STAGES SM90_WIDE_STAGES

/* Shared memory: K, V; stages of Q and dO; P; dS twice; base, rest and D for each row of a stage; marks of keys. */
template <int COLUMNS> struct layout_wide {
    static constexpr int dim = COLUMNS, with = WITH_DROPOUT;
    static constexpr int slot_bytes = tile90<dim, BLOCK>::bytes, own_bytes = tile90<dim, OWN>::bytes;
    static constexpr int slots = 2 * own_bytes, weights = slots + STAGES * 2 * slot_bytes;
    static constexpr int ds = weights + OWN * BLOCK * 4, ds_bytes = OWN * BLOCK * 2;
    static constexpr int numbers = ds + 2 * ds_bytes, marks = numbers + STAGES * 3 * BLOCK * 4;
    static constexpr int full = marks + OWN * 4, empty = full + STAGES * 16; /* two for each stage: Q and dO */
    static constexpr int weights_full = empty + STAGES * 16, weights_empty = weights_full + 8;
    static constexpr int ds_full = weights_empty + 8, ds_empty = ds_full + 16;
    static constexpr int own_full = ds_empty + 16, own_empty = own_full + 8;
    static constexpr int kept_slots = 1, kept_bytes = kept_columns<BLOCK, OWN>::bytes; /* the bits of a step */
    static constexpr int kept_full = own_empty + 8, kept_empty = kept_full + 8;
    static constexpr int steps = kept_empty + 8, kept = steps + SM90_BACKWARD_OPTIONS, bytes = kept + kept_bytes;
    static_assert(bytes == sm90_wide_bytes(dim) + SM90_WIDE_OPTIONS, "as the plan counts");
    /* Of a thread, together no more than the block was launched with: 168. */
    static constexpr int ahead_registers = 40, work_registers = 232;
    static_assert(bytes <= 227 * 1024, "more than a multiprocessor has");
};

template <typename layout> INLINE void make_barriers(uint32_t smem) {
    if (threadIdx.x == 0) {
        for (int x = 0; x < 2 * STAGES; x++) {
            mbarrier_init(smem + layout::full + x * 8, x % 2 ? 1 : 33); /* with Q the numbers of its rows */
            mbarrier_init(smem + layout::empty + x * 8, x % 2 ? CONSUMERS / 32 : CONSUMERS);
        }
        mbarrier_init(smem + layout::weights_full, WARPGROUP);
        mbarrier_init(smem + layout::weights_empty, WARPGROUP);
        for (int x = 0; x < 16; x += 8) {
            mbarrier_init(smem + layout::ds_full + x, WARPGROUP / 32);
            mbarrier_init(smem + layout::ds_empty + x, WARPGROUP / 32);
        }
        mbarrier_init(smem + layout::kept_full, KEPT_WARPS * 32);
        mbarrier_init(smem + layout::kept_empty, CONSUMERS);
        mbarrier_init(smem + layout::own_full, 1);
        mbarrier_init(smem + layout::own_empty, CONSUMERS / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
}

template <typename layout> struct wide_places {
    static constexpr int own = 2, rows = OWN;
    static constexpr bool has_boxes = false;
    static __device__ __forceinline__ uint32_t empty(uint32_t smem, const ring &r) {
        return smem + layout::empty + r.slot * 16;
    }
    static __device__ __forceinline__ void step(const attention_params_sm90 &all, const key_work &w, int x, int i0,
                                                int64_t at, uint32_t smem, int n, ring *r) {
        fetch_stage<layout::dim, BLOCK, STAGES, layout>(all, w, x, i0, at, smem, n, r);
    }
    static __device__ __forceinline__ void boxes(const attention_params_sm90 &, const key_work &, key_walk, key_walk,
                                                 uint32_t, unsigned) {
    }
};

/* ------------------------------------------------------------------------------------------------------ arithmetic */

/* Where a warpgroup is. */
struct state {
    uint32_t smem;
    ring r;        /* of stages */
    unsigned turn; /* steps so far */
    int own_turn, row0;
    bool any_bad; /* one of the keys is not finite */
    float *numbers, *marks, *sum;
    int i0;                         /* first query of the step */
    const key_options *steps, *now; /* of all, and of this one */
    int x;                          /* the head of `sum` */
};

template <typename layout> INLINE uint32_t full_barrier(const state &k, int which) {
    return k.smem + layout::full + k.r.slot * 16 + which * 8;
}
template <typename layout> INLINE uint32_t empty_barrier(const state &k, int slot, int which) {
    return k.smem + layout::empty + slot * 16 + which * 8;
}
template <typename layout> INLINE uint32_t stage(const state &k, int slot, int which) {
    return k.smem + layout::slots + (slot * 2 + which) * layout::slot_bytes;
}
INLINE float *row_numbers(const state &k) {
    return k.numbers + k.r.slot * 3 * BLOCK;
}

/* Does a mask or an end cut the step, or is a key not finite? Then both warpgroups clean its queries, and all has come. */
template <typename T, typename layout> INLINE bool begin_step(const attention_params &p, state *k) {
    mbarrier_wait(full_barrier<layout>(*k, 0), k->r.turn);
    k->now = k->steps + k->turn % KEY_STEPS;
    k->i0 = k->now->step & ~STEP_FLAGS;
    k->sum += k->sum ? (k->now->x - k->x) * sum_tiles(p) * 64 * layout::dim : 0;
    k->x = k->now->x;
    const bool masked = k->any_bad || (k->now->step & STEP_CUT);
    if (masked && (k->now->step & STEP_DIRTY))
        for (int which = 0; which < 2; which++) {
            mbarrier_wait(full_barrier<layout>(*k, which), k->r.turn);
            clean_slot<T, layout::dim, BLOCK, true>(stage<layout>(*k, k->r.slot, which), row_numbers(*k), 2 * BLOCK);
        }
    return masked;
}

/* Is there another step? */
INLINE bool goes_on(const state &k) {
    return !(k.now->step & STEP_LAST);
}

/* To the next step. */
INLINE void next_step(state *k) {
    advance<STAGES>(&k->r);
    k->turn++;
}

/* Where this thread adds its part of the step's dQ. */
template <typename layout> INLINE float *find_sum(const state &k) {
    return k.sum ? k.sum + (int64_t)k.i0 * layout::dim : NULL;
}

/* A step's half of dQ: dS, of the keys as rows, times 128 columns of K, 64 at a time; to its sum. */
template <typename T, typename layout, int GROUP> INLINE void add_dq(const state &k, unsigned turn, float *to) {
    mbarrier_wait(k.smem + layout::ds_full + (turn & 1) * 8, turn >> 1 & 1);
#pragma unroll
    for (int x = GROUP * layout::dim / 128; x < (GROUP + 1) * layout::dim / 128; x++) {
        float dq[8][4];
        wgmma_fence();
        warpgroup_both<T, 64, OWN, OWN>(dq, k.smem + layout::ds + (turn & 1) * layout::ds_bytes,
                                        k.smem + x * OWN * 128);
        wgmma_commit();
        wgmma_wait<0>();
        pin_all<8>(dq);
        if (GROUP == 0 && x + 1 == layout::dim / 128)
            release(k.smem + layout::ds_empty + (turn & 1) * 8);
        if (to)
#pragma unroll
            for (int y = 0; y < 8; y++)
                add_global4(to + x * SM90_PIECE + y * WARPGROUP * 4,
                            make_float4(dq[y][0], dq[y][1], dq[y][2], dq[y][3]));
    }
}

/* ---------------------------------------------------------------------------------------- the first: S, P, dV */

template <typename T, typename layout> INLINE void issue_scores(const state &k, float (*s)[4]) {
    mbarrier_wait(full_barrier<layout>(k, 0), k.r.turn);
    wgmma_fence();
    warpgroup_rows<T, layout::dim, BLOCK, OWN, BLOCK>(s, k.smem, stage<layout>(k, k.r.slot, 0));
    wgmma_commit();
}

/* Sᵀ -> Pᵀ. */
template <typename T, typename layout>
INLINE void weigh(const attention_params &p, const span &w, const state &k, float (*s)[4]) {
    const float *row = row_numbers(k);
    pin_all<BLOCK / 8>(s);
    if ((k.now->step & STEP_BAND) || has_rest<BLOCK>(row))
        key_weights<true, BLOCK>(p.scale_log2, w, k.row0, k.i0, row, s, p.score_out);
    else
        key_weights<false, BLOCK>(p.scale_log2, w, k.row0, k.i0, row, s, p.score_out);
    if (k.any_bad) {
        const float *marks = k.marks + fragment_row();
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[y][e] = __float_as_int(s[y][e]) < 0 ? s[y][e] : s[y][e] + marks[e / 2 * 8];
    }
}

/* For the other warpgroup, too; this one has done with Q and the numbers of its rows. */
template <typename layout> INLINE void put_weights(const state &k, const float (*s)[4]) {
    release_each(empty_barrier<layout>(k, k.r.slot, 0));
    const uint32_t to = k.smem + layout::weights + threadIdx.x % WARPGROUP * 16;
    mbarrier_wait(k.smem + layout::weights_empty, (int)(k.turn & 1) ^ 1);
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
        store_shared16(to + y * WARPGROUP * 16, make_uint4(__float_as_uint(s[y][0]), __float_as_uint(s[y][1]),
                                                           __float_as_uint(s[y][2]), __float_as_uint(s[y][3])));
    release_each(k.smem + layout::weights_full);
}

/* The bits of the step's part x, of 16 queries; once they are there, and until all of them have been taken. */
template <typename layout> INLINE void await_kept(const state &k) {
    mbarrier_wait(k.smem + layout::kept_full, (int)(k.turn & 1));
}
template <typename layout> INLINE uint32_t take_kept(const state &k, int x) {
    const char *from = (const char *)k.numbers + (layout::kept - layout::numbers);
    return take_kept_columns<BLOCK>(from, 0, x * 16);
}
template <typename layout> INLINE void release_kept(const state &k) {
    mbarrier_arrive(k.smem + layout::kept_empty);
}

/* P of what is kept as an operand. */
template <typename T, typename layout> INLINE void pack_weights(const state &k, float (*s)[4], uint32_t (*ps)[4]) {
    await_kept<layout>(k);
    const float none = __uint_as_float(opaque(0)); /* as in dropped_key_gradients */
#pragma unroll
    for (int x = 0; x < BLOCK / 16; x++) {
        const uint32_t kept = take_kept<layout>(k, x);
#pragma unroll
        for (int y = 0; y < 2; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[2 * x + y][e] = was_kept(kept, y, e) ? s[2 * x + y][e] : none;
    }
    release_kept<layout>(k);
    pack_fragments<T, BLOCK>(ps, s);
}

template <typename T, typename layout>
INLINE void issue_dv(const state &k, int slot, int turn, uint32_t (*ps)[4], float (*dv)[4]) {
    mbarrier_wait(k.smem + layout::full + slot * 16 + 8, turn);
    wgmma_fence();
    warpgroup_columns<T, layout::dim, BLOCK, BLOCK>(dv, ps, stage<layout>(k, slot, 1));
    wgmma_commit();
}

template <typename T, typename layout>
INLINE void sum_values(const attention_params &p, const span &w, state *k, float (*dv)[4]) {
    float s[BLOCK / 8][4];
    uint32_t ps[BLOCK / 16][4];
    begin_step<T, layout>(p, k);
    issue_scores<T, layout>(*k, s);
    wgmma_wait<0>();
    weigh<T, layout>(p, w, *k, s);
    put_weights<layout>(*k, s);
    pack_weights<T, layout>(*k, s, ps);
#pragma unroll 1
    while (goes_on(*k)) {
        const ring last = k->r;
        float *const to = find_sum<layout>(*k);
        next_step(k);
        begin_step<T, layout>(p, k);
        pin_all<BLOCK / 16>(ps);
        issue_scores<T, layout>(*k, s);
        issue_dv<T, layout>(*k, last.slot, last.turn, ps, dv);
        wgmma_wait<1>();
        weigh<T, layout>(p, w, *k, s);
        put_weights<layout>(*k, s);
        wgmma_wait<0>();
        pin_all<BLOCK / 16>(ps);
        release(empty_barrier<layout>(*k, last.slot, 1));
        pack_weights<T, layout>(*k, s, ps);
        add_dq<T, layout, 0>(*k, k->turn - 1, to);
    }
    issue_dv<T, layout>(*k, k->r.slot, k->r.turn, ps, dv);
    wgmma_wait<0>();
    release(empty_barrier<layout>(*k, k->r.slot, 1));
    add_dq<T, layout, 0>(*k, k->turn, find_sum<layout>(*k));
}

/* -------------------------------------------------------------------------------------- the second: dP, dS, dK */

template <typename T, typename layout> INLINE void issue_dp(const state &k, float (*dp)[4]) {
    mbarrier_wait(full_barrier<layout>(k, 1), k.r.turn);
    wgmma_fence();
    warpgroup_rows<T, layout::dim, BLOCK, OWN, BLOCK>(dp, k.smem + layout::own_bytes, stage<layout>(k, k.r.slot, 1));
    wgmma_commit();
}

/* dPᵀ -> dSᵀ, 16 queries at a time. */
template <typename T, typename layout, bool MASKED>
INLINE void apply_weights(const attention_params &p, const state &k, float (*dp)[4]) {
    const uint32_t from = k.smem + layout::weights + threadIdx.x % WARPGROUP * 16;
    const float *row = row_numbers(k);
#pragma unroll
    for (int x = 0; x < BLOCK / 16; x++) {
        float s[2][4];
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const uint4 weight = load_shared16(from + (2 * x + y) * WARPGROUP * 16);
            s[y][0] = __uint_as_float(weight.x);
            s[y][1] = __uint_as_float(weight.y);
            s[y][2] = __uint_as_float(weight.z);
            s[y][3] = __uint_as_float(weight.w);
        }
        dropped_key_gradients<MASKED>(take_kept<layout>(k, x), p.keep_scale, row + x * 16, row + 2 * BLOCK + x * 16, s,
                                      dp + 2 * x);
    }
}

template <typename T, typename layout>
INLINE void make_gradients(const attention_params &p, const state &k, bool masked, float (*dp)[4]) {
    pin_all<BLOCK / 8>(dp);
    mbarrier_wait(full_barrier<layout>(k, 0), k.r.turn); /* D */
    mbarrier_wait(k.smem + layout::weights_full, (int)(k.turn & 1));
    await_kept<layout>(k);
    if (masked)
        apply_weights<T, layout, true>(p, k, dp);
    else
        apply_weights<T, layout, false>(p, k, dp);
    release_kept<layout>(k);
    release_each(k.smem + layout::weights_empty);
}

/* dS as an operand, and to where both warpgroups read it: rows are keys, a strip of 64 queries. */
template <typename T, typename layout>
INLINE void put_gradients(const state &k, const float (*dp)[4], uint32_t (*ds)[4]) {
    const int lane = threadIdx.x % 32, key = (int)threadIdx.x % WARPGROUP / 32 * 16 + lane % 16,
              which = (int)(k.turn & 1);
    const uint32_t to = k.smem + layout::ds + which * layout::ds_bytes + key * 128;
    pack_fragments<T, BLOCK>(ds, dp);
    mbarrier_wait(k.smem + layout::ds_empty + which * 8, (int)(k.turn >> 1 & 1) ^ 1);
#pragma unroll
    for (int x = 0; x < BLOCK / 16; x++)
        stmatrix4(to + (((x * 2 + lane / 16) ^ (key & 7)) << 4), ds[x]);
    fence_async();
    release(k.smem + layout::ds_full + which * 8);
}

template <typename T, typename layout>
INLINE void issue_dk(const state &k, int slot, uint32_t (*ds)[4], float (*dk)[4]) {
    wgmma_fence();
    warpgroup_columns<T, layout::dim, BLOCK, BLOCK>(dk, ds, stage<layout>(k, slot, 0));
    wgmma_commit();
}

template <typename T, typename layout> INLINE void sum_keys(const attention_params &p, state *k, float (*dk)[4]) {
    float dp[BLOCK / 8][4];
    uint32_t ds[BLOCK / 16][4];
    bool masked = begin_step<T, layout>(p, k);
    issue_dp<T, layout>(*k, dp);
    wgmma_wait<0>();
    release(empty_barrier<layout>(*k, k->r.slot, 1));
    make_gradients<T, layout>(p, *k, masked, dp);
    put_gradients<T, layout>(*k, dp, ds);
#pragma unroll 1
    while (goes_on(*k)) {
        const int last = k->r.slot;
        float *const to = find_sum<layout>(*k);
        next_step(k);
        masked = begin_step<T, layout>(p, k);
        pin_all<BLOCK / 16>(ds);
        issue_dp<T, layout>(*k, dp);
        issue_dk<T, layout>(*k, last, ds, dk);
        wgmma_wait<1>();
        release(empty_barrier<layout>(*k, k->r.slot, 1));
        make_gradients<T, layout>(p, *k, masked, dp);
        pin_all<BLOCK / 8>(dp); /* or dS would be left for after the wait */
        wgmma_wait<0>();
        pin_all<BLOCK / 16>(ds);
        release_each(empty_barrier<layout>(*k, last, 0));
        put_gradients<T, layout>(*k, dp, ds);
        add_dq<T, layout, 1>(*k, k->turn - 1, to);
    }
    issue_dk<T, layout>(*k, k->r.slot, ds, dk);
    wgmma_wait<0>();
    release_each(empty_barrier<layout>(*k, k->r.slot, 0));
    add_dq<T, layout, 1>(*k, k->turn, find_sum<layout>(*k));
}

/* ------------------------------------------------------------------------------------------------------- the kernel */

/* A tile of keys after the other: dV by the first warpgroup, dK by the second. One copy of what both do: they meet in clean_keys. */
template <typename T, typename layout>
INLINE void work(const attention_params &p, const crew &crew, char *shared, int group) {
    constexpr int D = layout::dim;
    state k = {shared_address(shared), {0, 0}};
    k.numbers = (float *)(shared + layout::numbers);
    k.marks = (float *)(shared + layout::marks);
    k.steps = (const key_options *)(shared + layout::steps);
    key_work w;
    for (unsigned turn = 0; find_keys<BLOCK, layout::with, OWN>(p, crew, turn, &w); turn++) {
        float sum[D / 8][4];
        zero_all<D / 8>(sum);
        if (w.steps) {
            k.sum = p.dq_sum ? p.dq_sum + sum_tile(p, w.c, w.y * p.group) * 64 * D + threadIdx.x % WARPGROUP * 4 : NULL;
            k.x = w.y * p.group;
            k.row0 = w.key0 + fragment_row();
            mbarrier_wait(k.smem + layout::own_full, k.own_turn);
            k.own_turn ^= 1;
            k.any_bad = clean_keys<T, D, OWN>(k.smem, k.marks);
            if (group == 0)
                sum_values<T, layout>(p, w.s, &k, sum);
            else
                sum_keys<T, layout>(p, &k, sum);
            advance<STAGES>(&k.r);
            k.turn++;
            release(k.smem + layout::own_empty);
        }
        pin_all<D / 8>(sum);
        key_work again; /* or its registers would be kept through the loop */
        find_keys<BLOCK, layout::with, OWN>(p, crew, opaque(turn), &again);
        const heddle_strides &s = group == 0 ? p.a.dv_stride : p.a.dk_stride;
        end_tile<T, D>(p.adds, group == 0 ? p.t.dv : p.t.dk,
                       row_at(s, again.c.n, again.y, again.c.first_k + again.key0), s.s,
                       (int)threadIdx.x % WARPGROUP / 32 * 16, again.c.all_sk - again.key0,
                       (int)(group == 0 ? p.a.dv : p.a.d), group == 0 ? p.keep_scale : p.scale, sum);
    }
}

template <typename T, int D> INLINE void attention_wide(const attention_params_sm90 &all) {
    typedef layout_wide<D> layout;
    extern __shared__ __align__(1024) char shared[];
    key_options *const steps = (key_options *)(shared + layout::steps);
    const uint32_t smem = shared_address(shared);
    const crew crew = {blockIdx.x, gridDim.x};
    put_dropout(all.p, steps + KEY_STEPS);
    make_barriers<layout>(smem);
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0);
    if (group == 0) {
        registers_fewer<layout::ahead_registers>();
        if (__shfl_sync(ALL_LANES, threadIdx.x, 0) < 32) /* as in attention_bwd */
            fetch_keys<T, D, BLOCK, layout::with, layout, wide_places<layout>>(all, crew, shared, steps);
        else
            make_columns_ahead<BLOCK, OWN, 4, layout>(all.p, crew, smem, shared + layout::kept,
                                                      *(const dropout_state *)(steps + KEY_STEPS));
    } else {
        registers_more<layout::work_registers>();
        work<T, layout>(all.p, crew, shared, group - 1);
    }
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(own == OWN && block == BLOCK, "as the list has it");                                                 \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        wait_for_earlier_grid();                                                                                       \
        attention_wide<dtype, dim>(all);                                                                               \
    }

/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for Hopper, d or dv from 257 to 512: no atomics, the same bits every time; eight products.
 *
 * The sums of 64 rows fill the registers of two warpgroups, each of which has half of their columns. So dQ, dK and dV are made by blocks
 * of their own, of one shape. A block owns 64 rows and walks over those of the other side, 64 at a time, head by head of the group:
 *
 *         own      streams   is kept
 *   dQ    Q, dO    V         K           dP = dO·Vᵀ,  S = Q·Kᵀ,  dQ += dS·K
 *   dK    K, V     dO        Q           dPᵀ = V·dOᵀ, Sᵀ = K·Qᵀ, dK += dSᵀ·Q
 *   dV    K        Q         dO          Sᵀ = K·Qᵀ,              dV += Pᵀ·dO
 *
 * What streams comes in strips of 64 columns, each of which is free as soon as its part of a product has been added; what is kept is there
 * for a step, as the last product reads it. Of the 64 x 64 numbers of a step a warpgroup makes 32 columns, from both products to P or dS, and
 * leaves them in shared memory in 16 bits, where both read all of them for the last product. That one adds up while the next step begins. */
#include "cuda/attention/sm90/dq.cuh"
#include "cuda/attention/sm90/fetch.cuh"

#define OWN SM90_LARGE_ROWS   /* rows of a block */
#define BLOCK SM90_LARGE_ROWS /* rows of a step */
#define HALF (BLOCK / 2)      /* of which a warpgroup has so many */

enum { MAKES_DQ, MAKES_DK, MAKES_DV };

/* Shared memory: the block's own; tiles that are kept; dS; strips that stream; base, rest and D (of keys a mark) of each row of a tile. */
template <int D, int MAKES> struct layout_large {
    static constexpr int tensors = MAKES == MAKES_DV ? 1 : 2;
    static constexpr int stages = sm90_large_stages(D, tensors), slots = sm90_large_slots(D, tensors);
    static constexpr int strips = tile90<D, BLOCK>::strips, tile_bytes = tile90<D, BLOCK>::bytes;
    static constexpr int kept = tensors * tile_bytes, ds = kept + stages * tile_bytes, strip = ds + SM90_STRIP;
    static constexpr int numbers = strip + slots * SM90_STRIP;
    static constexpr int full = numbers + stages * 3 * BLOCK * 4, empty = full + slots * 8;
    static constexpr int kept_full = empty + slots * 8, kept_empty = kept_full + stages * 8;
    static constexpr int own_full = kept_empty + stages * 8, own_empty = own_full + 8, bytes = own_empty + 8;
    /* Strips of the sums of a warpgroup, and the first of the second's; of an odd number both make the one in the middle. */
    static constexpr int part = (strips + 1) / 2, second = strips - part;
    static_assert(bytes == sm90_large_layout_bytes(D, tensors), "as the plan counts");
    static_assert(slots > 1 && bytes <= 227 * 1024, "more than a multiprocessor has");
};

/* Of the block's rows: head and first row; and of those that stream by heads from `first` on. */
struct large_work {
    place c;
    int x, row0, first, steps;
    span s;
};

template <int MAKES> INLINE bool find_work(const attention_params &p, const crew &crew, unsigned turn, large_work *w) {
    if (MAKES == MAKES_DQ) {
        query_work q;
        if (!find_queries<BLOCK, false, OWN>(p, turn, &q))
            return false;
        *w = {q.c, q.x, q.query0, q.x / p.group, (q.s.end - q.s.begin + BLOCK - 1) / BLOCK, q.s};
        return true;
    }
    key_work k;
    if (!find_keys<BLOCK, 0, OWN>(p, crew, turn, &k))
        return false;
    *w = {k.c, k.y, k.key0, k.y * p.group, k.steps, k.s};
    return true;
}

/* The step after, of the same head or of the next. */
INLINE void next_step(const span &s, int *x, int *at) {
    *at += BLOCK;
    if (*at >= s.end) {
        *at = s.begin;
        ++*x;
    }
}

/* -------------------------------------------------------------------------------------------------------- fetching */

/* Where the tensors of the block's side, and those of the other, have their rows. */
template <int MAKES> INLINE int own_first(const place &c) {
    return (int)(MAKES == MAKES_DQ ? c.first_q : c.first_k);
}
template <int MAKES> INLINE int other_first(const place &c) {
    return (int)(MAKES == MAKES_DQ ? c.first_k : c.first_q);
}

/* The block's own, and what streams. One thread. */
template <int D, int MAKES>
INLINE void fetch_strips(const attention_params_sm90 &all, const crew &crew, uint32_t smem) {
    typedef layout_large<D, MAKES> layout;
    const tensor_map *const map = MAKES == MAKES_DQ ? &all.v : MAKES == MAKES_DK ? &all.dout : &all.q;
    ring r = {0, 0};
    int own_turn = 0;
    large_work w;
    for (unsigned turn = 0; find_work<MAKES>(all.p, crew, turn, &w); turn++) {
        const int n = all.p.a.features & HEDDLE_VARLEN ? 0 : (int)w.c.n;
        if (!w.steps)
            continue;
        const int own = own_first<MAKES>(w.c) + w.row0;
        mbarrier_wait(smem + layout::own_empty, own_turn ^ 1);
        own_turn ^= 1;
        mbarrier_expect(smem + layout::own_full, layout::kept);
        load_boxes<D, OWN>(smem, MAKES == MAKES_DQ ? &all.q : &all.k, smem + layout::own_full, own, w.x, n);
        if (layout::tensors == 2)
            load_boxes<D, OWN>(smem + layout::tile_bytes, MAKES == MAKES_DQ ? &all.dout : &all.v,
                               smem + layout::own_full, own, w.x, n);
#pragma unroll 1
        for (int step = 0, x = w.first, at = w.s.begin; step < w.steps; step++, next_step(w.s, &x, &at))
#pragma unroll 1
            for (int c = 0; c < layout::strips; c++) {
                const uint32_t bar = smem + layout::full + r.slot * 8;
                mbarrier_wait(smem + layout::empty + r.slot * 8, r.turn ^ 1);
                mbarrier_expect(bar, SM90_STRIP);
                tma_load4(smem + layout::strip + r.slot * SM90_STRIP, map, bar, c * 64, other_first<MAKES>(w.c) + at, x,
                          n);
                advance<layout::slots>(&r);
            }
    }
}

/* What is kept for a step, and the numbers of its rows. A warp. */
template <int D, int MAKES> INLINE void fetch_kept(const attention_params_sm90 &all, const crew &crew, char *shared) {
    typedef layout_large<D, MAKES> layout;
    const uint32_t smem = shared_address(shared);
    const tensor_map *const map = MAKES == MAKES_DQ ? &all.k : MAKES == MAKES_DK ? &all.q : &all.dout;
    const int lane = threadIdx.x % 32;
    ring r = {0, 0};
    large_work w;
    for (unsigned turn = 0; find_work<MAKES>(all.p, crew, turn, &w); turn++) {
        const int n = all.p.a.features & HEDDLE_VARLEN ? 0 : (int)w.c.n;
#pragma unroll 1
        for (int step = 0, x = w.first, at = w.s.begin; step < w.steps; step++, next_step(w.s, &x, &at)) {
            const uint32_t bar = smem + layout::kept_full + r.slot * 8;
            const int numbers = layout::numbers + r.slot * 3 * BLOCK * 4;
            mbarrier_wait(smem + layout::kept_empty + r.slot * 8, r.turn ^ 1);
            if (lane == 0) {
                mbarrier_expect(bar, layout::tile_bytes);
                load_boxes<D, BLOCK>(smem + layout::kept + r.slot * layout::tile_bytes, map, bar,
                                     other_first<MAKES>(w.c) + at, x, n);
            }
            if (MAKES == MAKES_DQ) {
                for (int z = lane; z < BLOCK; z += 32)
                    ((float *)(shared + numbers))[z] = 0.0f;
                mbarrier_arrive(bar);
            } else {
                fetch_numbers<BLOCK>(all.p, lse_at(all.p, w.c, x, 0) + at, w.s.end - at, smem + numbers, bar);
            }
            advance<layout::stages>(&r);
        }
    }
}

/* A slot is filled by the copy engine, a tile that is kept by the 32 lanes that fetch its numbers, too, and given back by all who read these. */
template <typename layout> INLINE void make_large_barriers(uint32_t smem) {
    if (threadIdx.x == 0) {
        for (int x = 0; x < layout::slots; x++) {
            mbarrier_init(smem + layout::full + x * 8, 1);
            mbarrier_init(smem + layout::empty + x * 8, CONSUMERS / 32);
        }
        for (int x = 0; x < layout::stages; x++) {
            mbarrier_init(smem + layout::kept_full + x * 8, 1 + 32);
            mbarrier_init(smem + layout::kept_empty + x * 8, CONSUMERS);
        }
        mbarrier_init(smem + layout::own_full, 1);
        mbarrier_init(smem + layout::own_empty, CONSUMERS / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
}

/* ---------------------------------------------------------------------------------------------------------- working */

/* Where a warpgroup is. */
struct large_state {
    uint32_t smem;
    float *numbers;  /* of the stages */
    int group, row0; /* this lane's first row in the sequence */
    ring strips, kept;
    row_numbers row; /* dq */
};

/* The product of the block's own with what streams: all but its last strip has been added, whose slot is returned. What was kept for the step
 * before goes back as soon as the product that reads it has ended: it is the group of products in front of these. */
template <typename T, int D, int MAKES> INLINE int stream(large_state *k, bool has_before, int before, float (*c)[4]) {
    typedef layout_large<D, MAKES> layout;
    const uint32_t own = k->smem + (layout::tensors - 1) * layout::tile_bytes;
    int last = 0;
#pragma unroll
    for (int x = 0; x < layout::strips; x++) {
        mbarrier_wait(k->smem + layout::full + k->strips.slot * 8, k->strips.turn);
        wgmma_fence();
        warpgroup_rows<T, 64, HALF, OWN, BLOCK>(
            c, own + x * SM90_STRIP, k->smem + layout::strip + k->strips.slot * SM90_STRIP + k->group * HALF * 128,
            x > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (x > 0)
            release(k->smem + layout::empty + last * 8);
        else if (has_before)
            release_each(k->smem + layout::kept_empty + before * 8);
        last = k->strips.slot;
        advance<layout::slots>(&k->strips);
    }
    return last;
}

/* Sums of products that have ended, in registers of their own: what is made of them in one branch or another would else be moved while they
 * are under way (C7514). */
template <int COUNT> INLINE void take_all(float (*c)[4]) {
#pragma unroll
    for (int y = 0; y < COUNT; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            c[y][e] = moved(c[y][e]);
}

/* P (dV) or dS of this warpgroup's columns, from s and dp; rows are the block's. */
template <typename T, int MAKES, bool CUT>
INLINE void weigh(const attention_params &p, const span &w, const large_state &k, int at, const float *numbers,
                  float (*s)[4], float (*dp)[4]) {
    at += k.group * HALF;
    numbers += k.group * HALF;
    if (MAKES == MAKES_DQ) {
        query_weights<CUT, HALF>(p.scale_log2, w, k.row0, at, k.row, s);
        query_gradients<CUT, HALF>(k.row, numbers, s, dp);
        return;
    }
    if (CUT || has_rest<HALF, BLOCK>(numbers))
        key_weights<true, HALF, BLOCK>(p.scale_log2, w, k.row0, at, numbers, s);
    else
        key_weights<false, HALF, BLOCK>(p.scale_log2, w, k.row0, at, numbers, s);
    if (CUT || MAKES == MAKES_DK)
        key_gradients<CUT, MAKES == MAKES_DK, HALF>(numbers, numbers + 2 * BLOCK, s, dp);
}

/* To where both warpgroups read it, once both have done with what lies there: a strip of rows of the block. */
template <typename T, typename layout> INLINE void put(const large_state &k, const float (*c)[4]) {
    const int lane = threadIdx.x % 32, row = (int)threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
    uint32_t a[HALF / 16][4];
    pack_fragments<T, HALF>(a, c);
    barrier_sync(2, CONSUMERS);
#pragma unroll
    for (int x = 0; x < HALF / 16; x++)
        stmatrix4(k.smem + layout::ds + row * 128 + (((k.group * (HALF / 8) + x * 2 + lane / 16) ^ (row & 7)) << 4),
                  a[x]);
    fence_async();
    barrier_sync(3, CONSUMERS);
}

template <typename T, int D, int MAKES>
INLINE void sum_rows(const attention_params &p, const large_work &w, large_state *k, float (*sum)[4]) {
    typedef layout_large<D, MAKES> layout;
    int at = w.s.begin, before = 0;
#pragma unroll 1
    for (int step = 0; step < w.steps; step++) {
        float s[HALF / 8][4], dp[HALF / 8][4];
        const bool cut = is_cut(w.s, at);
        const int last = stream<T, D, MAKES>(k, step > 0, before, MAKES == MAKES_DV ? s : dp);
        const uint32_t kept = k->smem + layout::kept + k->kept.slot * layout::tile_bytes;
        float *const numbers = k->numbers + k->kept.slot * 3 * BLOCK;
        mbarrier_wait(k->smem + layout::kept_full + k->kept.slot * 8, k->kept.turn);
        if (cut)
            clean_slot<T, D, BLOCK>(kept, numbers, MAKES == MAKES_DQ ? 0 : 2 * BLOCK);
        if (MAKES != MAKES_DV) {
            wgmma_fence();
            warpgroup_rows<T, D, HALF, OWN, BLOCK>(s, k->smem, kept + k->group * HALF * 128);
            wgmma_commit();
            wgmma_wait<1>();
            release(k->smem + layout::empty + last * 8);
        }
        wgmma_wait<0>();
        if (MAKES == MAKES_DV)
            release(k->smem + layout::empty + last * 8);
        else
            take_all<HALF / 8>(dp);
        take_all<HALF / 8>(s);
        if (cut)
            weigh<T, MAKES, true>(p, w.s, *k, at, numbers, s, dp);
        else
            weigh<T, MAKES, false>(p, w.s, *k, at, numbers, s, dp);
        put<T, layout>(*k, MAKES == MAKES_DV ? s : dp);
        wgmma_fence();
        warpgroup_strips<T, layout::part * 64, BLOCK, BLOCK>(sum, k->smem + layout::ds,
                                                             kept + k->group * layout::second * SM90_STRIP, true);
        wgmma_commit();
        before = k->kept.slot;
        advance<layout::stages>(&k->kept);
        at = at + BLOCK < w.s.end ? at + BLOCK : w.s.begin; /* the next head */
    }
    wgmma_wait<0>();
    release_each(k->smem + layout::kept_empty + before * 8);
}

template <typename T, int D, int MAKES>
INLINE void work(const attention_params &p, const crew &crew, char *shared, int group) {
    typedef layout_large<D, MAKES> layout;
    constexpr int COLUMNS = layout::part * 64;
    large_state k = {shared_address(shared), (float *)(shared + layout::numbers), group, 0, {0, 0}, {0, 0}};
    int own_turn = 0;
    large_work w;
    for (unsigned turn = 0; find_work<MAKES>(p, crew, turn, &w); turn++) {
        float sum[COLUMNS / 8][4];
        zero_all<COLUMNS / 8>(sum);
        if (w.steps) {
            k.row0 = w.row0 + fragment_row();
            if (MAKES == MAKES_DQ) {
                const query_work q = {w.c, w.x, w.row0, w.s};
                load_numbers(p, q, k.row0, &k.row);
            }
            mbarrier_wait(k.smem + layout::own_full, own_turn);
            own_turn ^= 1;
            sum_rows<T, D, MAKES>(p, w, &k, sum);
            release(k.smem + layout::own_empty);
        }
        pin_all<COLUMNS / 8>(sum);
        large_work again; /* or its registers would be kept through the loop */
        find_work<MAKES>(p, crew, opaque(turn), &again);
        const heddle_strides &s = MAKES == MAKES_DQ ? p.a.dq_stride : MAKES == MAKES_DK ? p.a.dk_stride : p.a.dv_stride;
        const int first = group * layout::second * 64, width = (int)(MAKES == MAKES_DV ? p.a.dv : p.a.d);
        end_tile<T, COLUMNS>(
            p.adds,
            MAKES == MAKES_DQ   ? p.t.dq
            : MAKES == MAKES_DK ? p.t.dk
                                : p.t.dv,
            row_at(s, again.c.n, again.x, own_first<MAKES>(again.c) + again.row0) + first, s.s,
            (int)threadIdx.x % WARPGROUP / 32 * 16, (MAKES == MAKES_DQ ? again.c.all_sq : again.c.all_sk) - again.row0,
            group ? width - first : min(width, layout::second * 64), MAKES == MAKES_DV ? 1.0f : p.scale, sum);
    }
}

template <typename T, int D, int MAKES>
INLINE void run_large(const attention_params_sm90 &all, const crew &crew, char *shared) {
    make_large_barriers<layout_large<D, MAKES>>(shared_address(shared));
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0);
    if (group == 0) {
        registers_fewer<40>();
        if (threadIdx.x == 0)
            fetch_strips<D, MAKES>(all, crew, shared_address(shared));
        else if (threadIdx.x / 32 == 1)
            fetch_kept<D, MAKES>(all, crew, shared);
    } else {
        registers_more<232>();
        work<T, D, MAKES>(all.p, crew, shared, group - 1);
    }
}

/* The first blocks make dK, the others dV. */
template <typename T, int D> INLINE void large_dkdv(const attention_params_sm90 &all) {
    extern __shared__ __align__(1024) char shared[];
    const unsigned first = all.p.blocks_of_dk;
    if (blockIdx.x < first)
        run_large<T, D, MAKES_DK>(all, {blockIdx.x, first}, shared);
    else
        run_large<T, D, MAKES_DV>(all, {blockIdx.x - first, gridDim.x - first}, shared);
}

template <typename T, int D> INLINE void large_dq(const attention_params_sm90 &all) {
    extern __shared__ __align__(1024) char shared[];
    run_large<T, D, MAKES_DQ>(all, {blockIdx.x, gridDim.x}, shared);
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(own == OWN && block == BLOCK, "as the list has it");                                                 \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        wait_for_earlier_grid();                                                                                       \
        large_##pass<dtype, dim>(all);                                                                                 \
    }

/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for Hopper: no atomics, the same bits every time.
 *
 *   dkdv   a block owns 128 keys, 64 to a warpgroup, and walks over the queries that see them, head by head of the
 *          group, in order: Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q.
 *   dq     a block owns 128 queries of one head, 64 to a warpgroup: S = Q·Kᵀ, dP = dO·Vᵀ, dQ += dS·K.
 *
 * P and dS go from the accumulators of one product into the operand of the next without leaving the registers. One warp
 * fetches; tiles that stream lie in a ring of slots, Q and dO (K and V) in turn. */
#include "attention_sm90.cuh"

#define OWN_ROWS 128
#define CONSUMERS 256

/* Shared memory: OWN tiles of 128 rows that stay; slots of BLOCK rows; NUMBERS floats for each row of a slot. */
template <int D, int BLOCK, int OWN, int SLOTS, int NUMBERS> struct backward90 {
    static constexpr int own_bytes = OWN_ROWS * D * 2, slot_bytes = BLOCK * D * 2;
    static constexpr int slots = OWN * own_bytes;
    static constexpr int numbers = slots + SLOTS * slot_bytes;
    static constexpr int barriers = numbers + SLOTS * NUMBERS * BLOCK * 4;
    static constexpr int full = barriers, empty = full + SLOTS * 8, own_full = empty + SLOTS * 8,
                         own_empty = own_full + 8;
    static constexpr int bytes = own_empty + 8;
    static_assert(bytes <= 227 * 1024, "more than a multiprocessor has");
};

/* LANES: threads that copy into a slot beside the copy engine. */
template <typename layout, int SLOTS, int LANES> INLINE void make_barriers(uint32_t base) {
    if (threadIdx.x == 0) {
        for (int x = 0; x < SLOTS; x++) {
            mbarrier_init(base + layout::full + x * 8, 1 + LANES);
            mbarrier_init(base + layout::empty + x * 8, CONSUMERS / 32);
        }
        mbarrier_init(base + layout::own_full, 1);
        mbarrier_init(base + layout::own_empty, CONSUMERS / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
}

/* This warp has read all that it wanted. */
INLINE void release(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barrier);
}

/* Of the blocks that share a kind of work, which one this is. */
struct crew {
    unsigned block, blocks;
};

/* Which tile of which unit (a head of a sequence) a block takes in its step-th turn; false: there is none left. Tiles
 * come in pairs, the longest of a causal mask with the shortest, so that all pairs are alike; the middle of an odd number
 * has none: a tile past the end. 16 units at a time, whose tensors stay in the second-level cache. The pairs that do not
 * make a round are dealt out as single tiles. */
INLINE bool take_tile(unsigned step, const crew &c, unsigned tiles, unsigned units, bool last_first, int *tile,
                      unsigned *unit) {
    const unsigned each = (tiles + 1) / 2, pairs = each * units;
    unsigned pair = step / 2 * c.blocks + c.block, second = step % 2;
    if (step / 2 * c.blocks + c.blocks > pairs) {
        const unsigned left = pairs % c.blocks, at = second ? 2 * c.blocks - 1 - c.block : c.block;
        if (at >= 2 * left || step / 2 * c.blocks >= pairs)
            return false;
        second = at >= left;
        pair = pairs - left + at - second * left;
    }
    const unsigned section = pair / (16 * each) * 16, r = pair - section * each, count = min(16u, units - section);
    const unsigned t = r / count, other = tiles - 1 - t;
    *unit = section + r % count;
    *tile = (int)(second && other == t ? tiles : (second != 0) != last_first ? other : t);
    return true;
}

INLINE unsigned opaque(unsigned x) {
    pin(x);
    return x;
}

/* 0·NaN would leak through a product with what a mask leaves out: in a cut tile, chunks that are not finite become
 * zero, and their rows' numbers in mark[0] and mark[second] NaN, for those that see them. */
template <typename T, int D, int BLOCK> INLINE void clean_slot(uint32_t tile, float *mark, int second) {
    for (int x = threadIdx.x - WARPGROUP; x < BLOCK * D / 8; x += CONSUMERS)
        if (has_nonfinite(load_shared16(tile + x * 16), T())) {
            store_shared16(tile + x * 16, make_uint4(0, 0, 0, 0));
            mark[x / 8 % BLOCK] = mark[second + x / 8 % BLOCK] = CUDART_NAN_F;
        }
    fence_async();
    barrier_sync(1, CONSUMERS);
}

/* The 16 rows of a warp, of which `rows` from the block's first on are there, times `by`. */
template <typename T, int D>
INLINE void store_tile(void *to, int64_t at, int64_t stride, int warp_row, int rows, int width, float by,
                       const float (*c)[4]) {
    if (!to)
        return;
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp_row + half * 8 + lane / 4;
        const bool there = row < rows;
        T *line = (T *)to + at + row * stride;
        if (!__all_sync(ALL_LANES, ((size_t)line | (size_t)(width * 2)) % 16 == 0)) {
            if (there)
                store_row<T, D>(line, c, half, width, by);
            continue;
        }
#pragma unroll
        for (int y = 0; y < D / 8; y += 4) { /* of four chunks of 16 bytes, each of four lanes is given one */
            uint32_t v[4], t;
#pragma unroll
            for (int e = 0; e < 4; e++)
                v[e] = pack_pair(c[y + e][2 * half] * by, c[y + e][2 * half + 1] * by, T());
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                t = __shfl_xor_sync(ALL_LANES, odd ? v[e] : v[e + 1], 1);
                v[e] = odd ? t : v[e];
                v[e + 1] = odd ? v[e + 1] : t;
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                t = __shfl_xor_sync(ALL_LANES, upper ? v[e] : v[e + 2], 2);
                v[e] = upper ? t : v[e];
                v[e + 2] = upper ? v[e + 2] : t;
            }
            const int column = (y + lane % 4) * 8;
            if (there && column < width)
                *(uint4 *)(line + column) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- masks */

/* What streams by: positions begin .. end-1 count. Tiles that begin before whole_from or after whole_to are cut by a mask
 * or an end. A row of the block sees, or is seen by, positions row+low .. row+high if it is one of `rows`. */
struct span {
    int begin, end, whole_from, whole_to, low, high, rows;
};

INLINE bool is_cut(const span &w, int at) {
    return at < w.whole_from || at > w.whole_to;
}

/* Which positions a row sees, as columns of a lane in the tile from `at` on. */
INLINE void find_limits(const span &w, int row, int at, int *first, int *last) {
    at += fragment_column();
    *first = row + w.low - at;
    *last = (row < w.rows ? min(row + w.high, w.end - 1) : at - 1) - at;
}

/* ---------------------------------------------------------------------------------------------------- dK and dV */

enum { MAKES_DK = 1, MAKES_DV = 2 };

/* What a block has to do for one tile of keys. */
struct key_work {
    place c;
    int y, key0, steps; /* head; tiles of queries over all heads of the group */
    span s;             /* of queries */
};

/* The first keys of a causal mask are seen most. */
template <int BLOCK> INLINE bool find_keys(const attention_params &p, const crew &c, unsigned step, key_work *work) {
    key_work &w = *work;
    int tile;
    unsigned unit;
    const unsigned hk = (unsigned)p.a.hk;
    if (!take_tile(step, c, (unsigned)p.tiles_k, (unsigned)p.a.b * hk, false, &tile, &unit))
        return false;
    w.key0 = tile * OWN_ROWS;
    w.y = (int)(unit % hk);
    w.c = find_place(p, unit / hk);
    const int key1 = min(w.key0 + OWN_ROWS, w.c.sk);
    w.s = {0, 0, w.key0 + OWN_ROWS - 1 - w.c.hi, w.key0 - BLOCK + 1 - w.c.lo, -w.c.hi, -w.c.lo, w.c.sk};
    if (w.key0 < key1) {
        w.s.begin = max(0, min(w.key0 - w.c.hi, w.c.sq));
        w.s.end = max(w.s.begin, min(key1 - w.c.lo, w.c.sq));
    }
    w.s.whole_to = w.key0 + OWN_ROWS > w.c.sk ? -1 : min(w.s.whole_to, w.s.end - BLOCK);
    w.steps = (w.s.end - w.s.begin + BLOCK - 1) / BLOCK * p.group;
    return true;
}

/* One warp fetches all that the others work on. */
template <typename T, int D, int BLOCK, int SLOTS, int MAKES>
INLINE void fetch_dkdv(const attention_params_sm90 &all, const crew &c, uint32_t base) {
    typedef backward90<D, BLOCK, MAKES & MAKES_DK ? 2 : 1, SLOTS, 3> layout;
    const attention_params &p = all.p;
    const int lane = threadIdx.x % 32;
    ring r = {0, 0};
    int own_turn = 0;
    key_work w;
    for (unsigned turn = 0; find_keys<BLOCK>(p, c, turn, &w); turn++) {
        const int n = p.a.features & HEDDLE_VARLEN ? 0 : (int)w.c.n, first_q = (int)w.c.first_q;
        if (!w.steps)
            continue;
        if (lane == 0) {
            const int row = (int)w.c.first_k + w.key0;
            mbarrier_wait(base + layout::own_empty, own_turn ^ 1);
            mbarrier_expect(base + layout::own_full, layout::slots);
            load_boxes<D, OWN_ROWS>(base, &all.k, base + layout::own_full, row, w.y, n);
            if (MAKES & MAKES_DK)
                load_boxes<D, OWN_ROWS>(base + layout::own_bytes, &all.v, base + layout::own_full, row, w.y, n);
        }
        own_turn ^= 1;
        for (int x = w.y * p.group; x < (w.y + 1) * p.group; x++) {
            const int64_t at = lse_at(p, w.c, x, 0);
#pragma unroll 1
            for (int i0 = w.s.begin; i0 < w.s.end; i0 += BLOCK) {
                const uint32_t bar = base + layout::full + r.slot * 8;
                const uint32_t numbers = base + layout::numbers + r.slot * 3 * BLOCK * 4;
                mbarrier_wait(base + layout::empty + r.slot * 8, r.turn ^ 1);
                if (lane == 0) {
                    mbarrier_expect(bar, layout::slot_bytes);
                    load_boxes<D, BLOCK>(base + layout::slots + r.slot * layout::slot_bytes, &all.q, bar, first_q + i0,
                                         x, n);
                }
#pragma unroll 1
                for (int z = lane; z < BLOCK; z += 32) {
                    const int bytes = i0 + z < w.s.end ? 4 : 0;
                    const int64_t from = bytes ? at + i0 + z : 0;
                    cp_async4(numbers + z * 4, p.base + from, bytes);
                    cp_async4(numbers + (BLOCK + z) * 4, p.rest + from, bytes);
                    cp_async4(numbers + (2 * BLOCK + z) * 4, p.dsum + from, bytes);
                }
                cp_async_arrive(bar);
                advance<SLOTS>(&r);
                mbarrier_wait(base + layout::empty + r.slot * 8, r.turn ^ 1);
                if (lane == 0) {
                    mbarrier_expect(base + layout::full + r.slot * 8, layout::slot_bytes);
                    load_boxes<D, BLOCK>(base + layout::slots + r.slot * layout::slot_bytes, &all.dout,
                                         base + layout::full + r.slot * 8, first_q + i0, x, n);
                }
                cp_async_arrive(base + layout::full + r.slot * 8);
                advance<SLOTS>(&r);
            }
        }
    }
}

/* Sᵀ -> Pᵀ; in a cut tile -0 where the key is not seen. Rows are keys from row0, columns queries from i0. */
template <bool CUT, int BLOCK>
INLINE void key_weights(float scale, const span &w, int row0, int i0, const float *numbers, float (*s)[4]) {
    const int column0 = fragment_column();
    int first[2], last[2];
    for (int half = 0; half < 2; half++)
        find_limits(w, row0 + half * 8, i0, &first[half], &last[half]);
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++) {
        const int column = y * 8 + column0;
        const float2 base = *(const float2 *)(numbers + column), rest = *(const float2 *)(numbers + BLOCK + column);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[y][e] = exp2_approx(fmaf(s[y][e], scale, e % 2 ? -base.y : -base.x) - (e % 2 ? rest.y : rest.x));
            if (CUT && (y * 8 + e % 2 < first[e / 2] || y * 8 + e % 2 > last[e / 2]))
                s[y][e] = -0.0f;
        }
    }
}

/* dPᵀ -> dSᵀ, from Pᵀ; seen rows that were marked get NaN in both. */
template <bool CUT, bool MAKES_DS, int BLOCK>
INLINE void key_gradients(const float *numbers, float (*s)[4], float (*dp)[4]) {
    const int column0 = fragment_column();
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++) {
        const float2 dsum = *(const float2 *)(numbers + 2 * BLOCK + y * 8 + column0);
        const float2 base = CUT ? *(const float2 *)(numbers + y * 8 + column0) : dsum;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const bool seen = !CUT || __float_as_int(s[y][e]) >= 0;
            if (CUT && seen && isnan(e % 2 ? base.y : base.x))
                s[y][e] = CUDART_NAN_F;
            if (MAKES_DS)
                dp[y][e] = seen ? s[y][e] * (dp[y][e] - (e % 2 ? dsum.y : dsum.x)) : 0.0f;
        }
    }
}

/* Where a warpgroup is among its block's tiles of keys and of queries. */
struct key_state {
    uint32_t base, own; /* shared memory; this warpgroup's rows of K there */
    int row0;           /* this lane's first key */
    ring r;
};

template <typename T, int D, int BLOCK, typename layout>
INLINE void await_slot(uint32_t base, const ring &r, bool cut, float *mark, int second) {
    mbarrier_wait(base + layout::full + r.slot * 8, r.turn);
    if (cut)
        clean_slot<T, D, BLOCK>(base + layout::slots + r.slot * layout::slot_bytes, mark, second);
}

/* From Sᵀ, under way as the last but one group of products (the last but none if FIRST), to Pᵀ and dSᵀ as operands. The
 * slots of the step before are released once its products, the last group, have ended. */
template <typename T, int D, int BLOCK, int SLOTS, int MAKES, bool FIRST, typename layout>
INLINE void key_step(float scale, const span &w, key_state *k, int i0, bool cut, float *numbers, int done,
                     float (*s)[4], uint32_t (*ps)[4], uint32_t (*ds)[4]) {
    float dp[BLOCK / 8][4];
    if (FIRST)
        wgmma_wait<0>();
    else
        wgmma_wait<1>();
    pin_all<BLOCK / 8>(s);
    if (cut)
        key_weights<true, BLOCK>(scale, w, k->row0, i0, numbers, s);
    else
        key_weights<false, BLOCK>(scale, w, k->row0, i0, numbers, s);
    if (!FIRST) {
        wgmma_wait<0>();
        const int next = done + 1 == SLOTS ? 0 : done + 1;
        release(k->base + layout::empty + done * 8);
        if (MAKES & MAKES_DV)
            release(k->base + layout::empty + next * 8);
    }
    await_slot<T, D, BLOCK, layout>(k->base, k->r, cut, numbers, 2 * BLOCK);
    if (MAKES & MAKES_DK) {
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k->own + layout::own_bytes,
                                                     k->base + layout::slots + k->r.slot * layout::slot_bytes);
        wgmma_commit();
        wgmma_wait<0>();
        pin_all<BLOCK / 8>(dp);
        if (!(MAKES & MAKES_DV))
            release(k->base + layout::empty + k->r.slot * 8);
    }
    if (cut)
        key_gradients<true, (MAKES & MAKES_DK) != 0, BLOCK>(numbers, s, dp);
    else if (MAKES & MAKES_DK)
        key_gradients<false, true, BLOCK>(numbers, s, dp);
    if (MAKES & MAKES_DV)
        pack_fragments<T, BLOCK>(ps, s);
    if (MAKES & MAKES_DK)
        pack_fragments<T, BLOCK>(ds, dp);
}

template <typename T, int D, int BLOCK, int SLOTS, int MAKES, typename layout>
INLINE void key_products(uint32_t base, int q_slot, const uint32_t (*ps)[4], const uint32_t (*ds)[4], float (*dk)[4],
                         float (*dv)[4]) {
    const int do_slot = q_slot + 1 == SLOTS ? 0 : q_slot + 1;
    if (MAKES & MAKES_DV)
        warpgroup_columns<T, D, BLOCK, BLOCK>(dv, ps, base + layout::slots + do_slot * layout::slot_bytes);
    if (MAKES & MAKES_DK)
        warpgroup_columns<T, D, BLOCK, BLOCK>(dk, ds, base + layout::slots + q_slot * layout::slot_bytes);
}

/* Nothing of these steps is seen by this warpgroup, but the other one may want its help. */
template <typename T, int D, int BLOCK, int SLOTS, typename layout>
INLINE void skip_steps(const span &w, key_state *k, float *numbers, int i0, int steps) {
#pragma unroll 1
    for (; steps > 0; steps--, i0 += BLOCK) {
        const bool cut = is_cut(w, i0);
        float *mark = numbers + k->r.slot * 3 * BLOCK;
#pragma unroll 1
        for (int x = 0; x < 2; x++) {
            await_slot<T, D, BLOCK, layout>(k->base, k->r, cut, mark, 2 * BLOCK);
            release(k->base + layout::empty + k->r.slot * 8);
            advance<SLOTS>(&k->r);
        }
    }
}

/* So many steps, the first at query i0: while the products of one step add up, Sᵀ of the next is made and turned into weights. */
template <typename T, int D, int BLOCK, int SLOTS, int MAKES, typename layout>
INLINE void sum_keys(float scale, const span &w, key_state *k, float *numbers, int i0, int steps, float (*dk)[4],
                     float (*dv)[4]) {
    float s[BLOCK / 8][4];
    uint32_t ps[BLOCK / 16][4], ds[BLOCK / 16][4];
    int q_slot = k->r.slot;
    bool cut = is_cut(w, i0);
    await_slot<T, D, BLOCK, layout>(k->base, k->r, cut, numbers + q_slot * 3 * BLOCK, 2 * BLOCK);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->base + layout::slots + q_slot * layout::slot_bytes);
    wgmma_commit();
    advance<SLOTS>(&k->r);
    key_step<T, D, BLOCK, SLOTS, MAKES, true, layout>(scale, w, k, i0, cut, numbers + q_slot * 3 * BLOCK, 0, s, ps, ds);
    advance<SLOTS>(&k->r);
#pragma unroll 1
    while (--steps) {
        const int done = q_slot;
        i0 = i0 + BLOCK < w.end ? i0 + BLOCK : w.begin; /* the next head */
        cut = is_cut(w, i0);
        q_slot = k->r.slot;
        await_slot<T, D, BLOCK, layout>(k->base, k->r, cut, numbers + q_slot * 3 * BLOCK, 2 * BLOCK);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->base + layout::slots + q_slot * layout::slot_bytes);
        wgmma_commit();
        key_products<T, D, BLOCK, SLOTS, MAKES, layout>(k->base, done, ps, ds, dk, dv);
        wgmma_commit();
        advance<SLOTS>(&k->r);
        key_step<T, D, BLOCK, SLOTS, MAKES, false, layout>(scale, w, k, i0, cut, numbers + q_slot * 3 * BLOCK, done, s,
                                                           ps, ds);
        advance<SLOTS>(&k->r);
    }
    wgmma_fence();
    key_products<T, D, BLOCK, SLOTS, MAKES, layout>(k->base, q_slot, ps, ds, dk, dv);
    wgmma_commit();
    wgmma_wait<0>();
    release(k->base + layout::empty + q_slot * 8);
    if (MAKES & MAKES_DV)
        release(k->base + layout::empty + (q_slot + 1 == SLOTS ? 0 : q_slot + 1) * 8);
}

/* As sum_keys, step by step, where the registers do not hold what two steps need. */
template <typename T, int D, int BLOCK, int SLOTS, typename layout>
INLINE void sum_keys_plainly(float scale, const span &w, key_state *k, float *numbers, int i0, int steps,
                             float (*dk)[4], float (*dv)[4]) {
#pragma unroll 1
    for (; steps; steps--) {
        float s[BLOCK / 8][4], dp[BLOCK / 8][4];
        uint32_t ps[BLOCK / 16][4], ds[BLOCK / 16][4];
        const int q_slot = k->r.slot;
        const bool cut = is_cut(w, i0);
        float *row = numbers + q_slot * 3 * BLOCK;
        await_slot<T, D, BLOCK, layout>(k->base, k->r, cut, row, 2 * BLOCK);
        advance<SLOTS>(&k->r);
        await_slot<T, D, BLOCK, layout>(k->base, k->r, cut, row, 2 * BLOCK);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->base + layout::slots + q_slot * layout::slot_bytes);
        wgmma_commit();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k->own + layout::own_bytes,
                                                     k->base + layout::slots + k->r.slot * layout::slot_bytes);
        wgmma_commit();
        wgmma_wait<1>();
        pin_all<BLOCK / 8>(s);
        if (cut)
            key_weights<true, BLOCK>(scale, w, k->row0, i0, row, s);
        else
            key_weights<false, BLOCK>(scale, w, k->row0, i0, row, s);
        wgmma_wait<0>();
        pin_all<BLOCK / 8>(dp);
        if (cut)
            key_gradients<true, true, BLOCK>(row, s, dp);
        else
            key_gradients<false, true, BLOCK>(row, s, dp);
        pack_fragments<T, BLOCK>(ps, s);
        pack_fragments<T, BLOCK>(ds, dp);
        wgmma_fence();
        key_products<T, D, BLOCK, SLOTS, MAKES_DK | MAKES_DV, layout>(k->base, q_slot, ps, ds, dk, dv);
        wgmma_commit();
        wgmma_wait<0>();
        release(k->base + layout::empty + q_slot * 8);
        release(k->base + layout::empty + k->r.slot * 8);
        advance<SLOTS>(&k->r);
        i0 = i0 + BLOCK < w.end ? i0 + BLOCK : w.begin;
    }
}

template <typename T, int D, int BLOCK, int SLOTS, int MAKES, bool PLAIN>
INLINE void work_dkdv(const attention_params &p, const crew &c, char *shared) {
    constexpr bool BOTH = MAKES == (MAKES_DK | MAKES_DV);
    typedef backward90<D, BLOCK, MAKES & MAKES_DK ? 2 : 1, SLOTS, 3> layout;
    float *const numbers = (float *)(shared + layout::numbers);
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    key_state k = {shared_address(shared), shared_address(shared) + group * 64 * 128, 0, {0, 0}};
    int own_turn = 0;
    key_work w;
    for (unsigned turn = 0; find_keys<BLOCK>(p, c, turn, &w); turn++) {
        float dk[BOTH || MAKES == MAKES_DK ? D / 8 : 1][4], dv[BOTH || MAKES == MAKES_DV ? D / 8 : 1][4];
        if (MAKES & MAKES_DK)
            zero_all<D / 8>(dk);
        if (MAKES & MAKES_DV)
            zero_all<D / 8>(dv);
        if (w.steps) {
            const int key0 = w.key0 + group * 64, key1 = min(key0 + 64, w.c.sk);
            int from = 0, to = w.steps;
            if (p.group == 1) { /* what this half of the keys is seen by */
                from = max(0, (min(key0 - w.c.hi, w.s.end) - w.s.begin) / BLOCK);
                to = key0 < key1 ? (max(from * BLOCK, min(key1 - w.c.lo, w.s.end) - w.s.begin) + BLOCK - 1) / BLOCK
                                 : from;
            }
            k.row0 = key0 + fragment_row();
            mbarrier_wait(k.base + layout::own_full, own_turn);
            own_turn ^= 1;
            skip_steps<T, D, BLOCK, SLOTS, layout>(w.s, &k, numbers, w.s.begin, from);
            if (from < to) {
                const int i0 = w.s.begin + from * BLOCK;
                if (PLAIN)
                    sum_keys_plainly<T, D, BLOCK, SLOTS, layout>(p.scale_log2, w.s, &k, numbers, i0, to - from, dk, dv);
                else
                    sum_keys<T, D, BLOCK, SLOTS, MAKES, layout>(p.scale_log2, w.s, &k, numbers, i0, to - from, dk, dv);
            }
            skip_steps<T, D, BLOCK, SLOTS, layout>(w.s, &k, numbers, w.s.begin + to * BLOCK, w.steps - to);
            release(k.base + layout::own_empty);
        }
        if (MAKES & MAKES_DK)
            pin_all<D / 8>(dk);
        if (MAKES & MAKES_DV)
            pin_all<D / 8>(dv);
        key_work again; /* or its registers would be kept through the loop */
        find_keys<BLOCK>(p, c, opaque(turn), &again);
        const int row = group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16, rows = again.c.all_sk - again.key0;
        const int64_t key0 = again.c.first_k + again.key0;
        if (MAKES & MAKES_DV)
            store_tile<T, D>(p.t.dv, row_at(p.a.dv_stride, again.c.n, again.y, key0), p.a.dv_stride.s, row, rows,
                             (int)p.a.dv, 1.0f, dv);
        if (MAKES & MAKES_DK)
            store_tile<T, D>(p.t.dk, row_at(p.a.dk_stride, again.c.n, again.y, key0), p.a.dk_stride.s, row, rows,
                             (int)p.a.d, p.scale, dk);
    }
}

template <typename T, int D, int BLOCK, int SLOTS, int MAKES, bool PLAIN>
INLINE void run_dkdv(const attention_params_sm90 &all, const crew &c, char *shared) {
    typedef backward90<D, BLOCK, MAKES & MAKES_DK ? 2 : 1, SLOTS, 3> layout;
    make_barriers<layout, SLOTS, 32>(shared_address(shared));
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 32)
            fetch_dkdv<T, D, BLOCK, SLOTS, MAKES>(all, c, shared_address(shared));
    } else {
        registers_more<240>();
        work_dkdv<T, D, BLOCK, SLOTS, MAKES, PLAIN>(all.p, c, shared);
    }
}

/* Where dK and dV do not fit into the registers together, three blocks of five make dK, of three products, the others
 * dV, of two. */
template <typename T, int D, int BLOCK, int SLOTS, bool PLAIN>
INLINE void attention_dkdv(const attention_params_sm90 &all) {
    extern __shared__ __align__(1024) char shared[];
    const unsigned tiles = (unsigned)all.p.tiles_k * (unsigned)(all.p.a.hk * all.p.a.b);
    const unsigned first = gridDim.x >= 2 * tiles ? tiles : gridDim.x * 3 / 5;
    if (D <= 128)
        run_dkdv<T, D, BLOCK, SLOTS, MAKES_DK | MAKES_DV, PLAIN>(all, {blockIdx.x, gridDim.x}, shared);
    else if (blockIdx.x < first)
        run_dkdv<T, D, BLOCK, SLOTS, MAKES_DK, false>(all, {blockIdx.x, first}, shared);
    else
        run_dkdv<T, D, BLOCK, SLOTS + 1, MAKES_DV, false>(all, {blockIdx.x - first, gridDim.x - first}, shared);
}

/* ----------------------------------------------------------------------------------------------------------- dQ */

struct query_work {
    place c;
    int x, query0;
    span s; /* of keys */
};

template <int BLOCK> INLINE bool find_queries(const attention_params &p, unsigned step, query_work *work) {
    query_work &w = *work;
    int tile;
    unsigned unit;
    const unsigned h = (unsigned)p.a.h;
    if (!take_tile(step, {blockIdx.x, gridDim.x}, (unsigned)p.tiles_q, (unsigned)p.a.b * h, true, &tile, &unit))
        return false;
    w.query0 = tile * OWN_ROWS;
    w.x = (int)(unit % h);
    w.c = find_place(p, unit / h);
    const int query1 = min(w.query0 + OWN_ROWS, w.c.sq);
    w.s = {0, 0, w.query0 + OWN_ROWS - 1 + w.c.lo, w.query0 - BLOCK + 1 + w.c.hi, w.c.lo, w.c.hi, w.c.sq};
    if (w.query0 < query1) {
        w.s.begin = max(0, min(w.query0 + w.c.lo, w.c.sk));
        w.s.end = max(w.s.begin, min(query1 + w.c.hi, w.c.sk));
    }
    w.s.whole_to = w.query0 + OWN_ROWS > w.c.sq ? -1 : min(w.s.whole_to, w.s.end - BLOCK);
    return true;
}

template <typename T, int D, int BLOCK, int SLOTS>
INLINE void fetch_dq(const attention_params_sm90 &all, uint32_t base, float *marks) {
    typedef backward90<D, BLOCK, 2, SLOTS, 1> layout;
    const attention_params &p = all.p;
    const int lane = threadIdx.x % 32;
    ring r = {0, 0};
    int own_turn = 0;
    query_work w;
    for (unsigned turn = 0; find_queries<BLOCK>(p, turn, &w); turn++) {
        const int n = p.a.features & HEDDLE_VARLEN ? 0 : (int)w.c.n, y = w.x / p.group, first_k = (int)w.c.first_k;
        if (w.s.begin >= w.s.end)
            continue;
        if (lane == 0) {
            const int row = (int)w.c.first_q + w.query0;
            mbarrier_wait(base + layout::own_empty, own_turn ^ 1);
            mbarrier_expect(base + layout::own_full, layout::slots);
            load_boxes<D, OWN_ROWS>(base, &all.q, base + layout::own_full, row, w.x, n);
            load_boxes<D, OWN_ROWS>(base + layout::own_bytes, &all.dout, base + layout::own_full, row, w.x, n);
        }
        own_turn ^= 1;
#pragma unroll 1
        for (int j0 = w.s.begin; j0 < w.s.end; j0 += BLOCK)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const uint32_t bar = base + layout::full + r.slot * 8;
                mbarrier_wait(base + layout::empty + r.slot * 8, r.turn ^ 1);
                for (int z = lane; z < BLOCK && x == 0; z += 32)
                    marks[r.slot * BLOCK + z] = 0.0f;
                __syncwarp();
                if (lane == 0) {
                    mbarrier_expect(bar, layout::slot_bytes);
                    load_boxes<D, BLOCK>(base + layout::slots + r.slot * layout::slot_bytes, x ? &all.v : &all.k, bar,
                                         first_k + j0, y, n);
                }
                advance<SLOTS>(&r);
            }
    }
}

/* base, rest and D of the two rows of a lane. */
struct row_numbers {
    float base[2], rest[2], dsum[2];
};

INLINE void load_numbers(const attention_params &p, const query_work &w, int row0, row_numbers *row) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8;
        const int64_t at = i < w.c.sq ? lse_at(p, w.c, w.x, i) : 0;
        row->base[half] = i < w.c.sq ? p.base[at] : CUDART_INF_F;
        row->rest[half] = i < w.c.sq ? p.rest[at] : 0.0f;
        row->dsum[half] = i < w.c.sq ? p.dsum[at] : 0.0f;
    }
}

/* S -> P; in a cut tile -0 where the key is not seen. Rows are queries from row0, columns keys from j0. */
template <bool CUT, int BLOCK>
INLINE void query_weights(float scale, const span &w, int row0, int j0, const row_numbers &row, float (*s)[4]) {
    int first[2], last[2];
    for (int half = 0; half < 2; half++)
        find_limits(w, row0 + half * 8, j0, &first[half], &last[half]);
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[y][e] = exp2_approx(fmaf(s[y][e], scale, -row.base[e / 2]) - row.rest[e / 2]);
            if (CUT && (y * 8 + e % 2 < first[e / 2] || y * 8 + e % 2 > last[e / 2]))
                s[y][e] = -0.0f;
        }
}

/* dP -> dS, from P. marks: 0, or NaN. */
template <bool CUT, int BLOCK>
INLINE void query_gradients(const row_numbers &row, const float *marks, const float (*s)[4], float (*dp)[4]) {
    const int column0 = fragment_column();
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float t = dp[y][e] - row.dsum[e / 2];
            if (CUT)
                t += marks[y * 8 + column0 + e % 2];
            dp[y][e] = CUT && __float_as_int(s[y][e]) < 0 ? 0.0f : s[y][e] * t;
        }
}

/* From S, under way as key_step has it, to dS as an operand. */
template <typename T, int D, int BLOCK, int SLOTS, bool FIRST, typename layout>
INLINE void query_step(float scale, const span &w, key_state *k, int j0, bool cut, const float *marks,
                       const row_numbers &row, int done, float (*s)[4], uint32_t (*ds)[4]) {
    constexpr bool EARLY = D * BLOCK <= 128 * 64; /* registers for dP beside what the last step's product reads */
    float dp[BLOCK / 8][4];
    if (FIRST)
        wgmma_wait<0>();
    else
        wgmma_wait<1>();
    pin_all<BLOCK / 8>(s);
    if (cut)
        query_weights<true, BLOCK>(scale, w, k->row0, j0, row, s);
    else
        query_weights<false, BLOCK>(scale, w, k->row0, j0, row, s);
    if (!FIRST && !EARLY) {
        wgmma_wait<0>();
        release(k->base + layout::empty + done * 8);
    }
    mbarrier_wait(k->base + layout::full + k->r.slot * 8, k->r.turn);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k->own + layout::own_bytes,
                                                 k->base + layout::slots + k->r.slot * layout::slot_bytes);
    wgmma_commit();
    if (!FIRST && EARLY) {
        wgmma_wait<1>();
        release(k->base + layout::empty + done * 8);
    }
    wgmma_wait<0>();
    pin_all<BLOCK / 8>(dp);
    release(k->base + layout::empty + k->r.slot * 8);
    if (cut)
        query_gradients<true, BLOCK>(row, marks, s, dp);
    else
        query_gradients<false, BLOCK>(row, marks, s, dp);
    pack_fragments<T, BLOCK>(ds, dp);
}

template <typename T, int D, int BLOCK, int SLOTS, typename layout>
INLINE void skip_keys(const span &w, key_state *k, float *marks, int from, int to) {
#pragma unroll 1
    for (int j0 = from; j0 < to; j0 += BLOCK) {
        await_slot<T, D, BLOCK, layout>(k->base, k->r, is_cut(w, j0), marks + k->r.slot * BLOCK, 0);
        release(k->base + layout::empty + k->r.slot * 8);
        advance<SLOTS>(&k->r);
        mbarrier_wait(k->base + layout::full + k->r.slot * 8, k->r.turn);
        release(k->base + layout::empty + k->r.slot * 8);
        advance<SLOTS>(&k->r);
    }
}

/* dQ over the tiles of keys from `from` to `to`. */
template <typename T, int D, int BLOCK, int SLOTS, typename layout>
INLINE void sum_queries(float scale, const span &w, key_state *k, float *marks, int from, int to,
                        const row_numbers &row, float (*dq)[4]) {
    float s[BLOCK / 8][4];
    uint32_t ds[BLOCK / 16][4];
    int k_slot = k->r.slot;
    bool cut = is_cut(w, from);
    await_slot<T, D, BLOCK, layout>(k->base, k->r, cut, marks + k_slot * BLOCK, 0);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->base + layout::slots + k_slot * layout::slot_bytes);
    wgmma_commit();
    advance<SLOTS>(&k->r);
    query_step<T, D, BLOCK, SLOTS, true, layout>(scale, w, k, from, cut, marks + k_slot * BLOCK, row, 0, s, ds);
    advance<SLOTS>(&k->r);
#pragma unroll 1
    for (int j0 = from + BLOCK; j0 < to; j0 += BLOCK) {
        const int done = k_slot;
        k_slot = k->r.slot;
        cut = is_cut(w, j0);
        await_slot<T, D, BLOCK, layout>(k->base, k->r, cut, marks + k_slot * BLOCK, 0);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->base + layout::slots + k_slot * layout::slot_bytes);
        wgmma_commit();
        warpgroup_columns<T, D, BLOCK, BLOCK>(dq, ds, k->base + layout::slots + done * layout::slot_bytes);
        wgmma_commit();
        advance<SLOTS>(&k->r);
        query_step<T, D, BLOCK, SLOTS, false, layout>(scale, w, k, j0, cut, marks + k_slot * BLOCK, row, done, s, ds);
        advance<SLOTS>(&k->r);
    }
    wgmma_fence();
    warpgroup_columns<T, D, BLOCK, BLOCK>(dq, ds, k->base + layout::slots + k_slot * layout::slot_bytes);
    wgmma_commit();
    wgmma_wait<0>();
    release(k->base + layout::empty + k_slot * 8);
}

template <typename T, int D, int BLOCK, int SLOTS> INLINE void work_dq(const attention_params &p, char *shared) {
    typedef backward90<D, BLOCK, 2, SLOTS, 1> layout;
    float *const marks = (float *)(shared + layout::numbers);
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    key_state k = {shared_address(shared), shared_address(shared) + group * 64 * 128, 0, {0, 0}};
    int own_turn = 0;
    query_work w;
    for (unsigned turn = 0; find_queries<BLOCK>(p, turn, &w); turn++) {
        float dq[D / 8][4];
        zero_all<D / 8>(dq);
        if (w.s.begin < w.s.end) {
            const int query0 = w.query0 + group * 64, query1 = min(query0 + 64, w.c.sq);
            const int from = w.s.begin + max(0, (min(query0 + w.c.lo, w.s.end) - w.s.begin) / BLOCK) * BLOCK;
            const int to = query0 < query1 ? max(from, min(query1 + w.c.hi, w.s.end)) : from;
            row_numbers row;
            k.row0 = query0 + fragment_row();
            load_numbers(p, w, k.row0, &row);
            mbarrier_wait(k.base + layout::own_full, own_turn);
            own_turn ^= 1;
            skip_keys<T, D, BLOCK, SLOTS, layout>(w.s, &k, marks, w.s.begin, from);
            if (from < to)
                sum_queries<T, D, BLOCK, SLOTS, layout>(p.scale_log2, w.s, &k, marks, from, to, row, dq);
            skip_keys<T, D, BLOCK, SLOTS, layout>(w.s, &k, marks, from + (to - from + BLOCK - 1) / BLOCK * BLOCK,
                                                  w.s.end);
            release(k.base + layout::own_empty);
        }
        pin_all<D / 8>(dq);
        query_work again;
        find_queries<BLOCK>(p, opaque(turn), &again);
        store_tile<T, D>(p.t.dq, row_at(p.a.dq_stride, again.c.n, again.x, again.c.first_q + again.query0),
                         p.a.dq_stride.s, group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16,
                         again.c.all_sq - again.query0, (int)p.a.d, p.scale, dq);
    }
}

template <typename T, int D, int BLOCK, int SLOTS> INLINE void attention_dq(const attention_params_sm90 &all) {
    typedef backward90<D, BLOCK, 2, SLOTS, 1> layout;
    extern __shared__ __align__(1024) char shared[];
    make_barriers<layout, SLOTS, 0>(shared_address(shared));
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 32)
            fetch_dq<T, D, BLOCK, SLOTS>(all, shared_address(shared), (float *)(shared + layout::numbers));
    } else {
        registers_more<240>();
        work_dq<T, D, BLOCK, SLOTS>(all.p, shared);
    }
}

#define pass_dkdv(T, D, BLOCK) attention_dkdv<T, D, BLOCK, BACKWARD90_SLOTS(D, BLOCK), (BLOCK > 64)>(all)
#define pass_dq(T, D, BLOCK) attention_dq<T, D, BLOCK, BACKWARD90_SLOTS(D, BLOCK)>(all)
#define K(pass, dtype, dim, variant, family, warps, tiles, block)                                                      \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        pass_##pass(dtype, dim, block);                                                                                \
    }
#ifndef BWD_LIST
#define ATTENTION_BWD90_LIST
#include "attention.def"
#endif

#ifdef BWD_LIST
#define DKDV(name, T, D, BLOCK, SLOTS, PLAIN)                                                                          \
    extern "C" __global__ void __launch_bounds__(384, 1) name(const __grid_constant__ attention_params_sm90 all) {     \
        attention_dkdv<T, D, BLOCK, SLOTS, PLAIN>(all);                                                                \
    }
#define DQ(name, T, D, BLOCK, SLOTS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(384, 1) name(const __grid_constant__ attention_params_sm90 all) {     \
        attention_dq<T, D, BLOCK, SLOTS>(all);                                                                         \
    }
#include BWD_LIST
#endif

/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for Hopper: no atomics, the same bits every time.
 *
 *   dkdv   a block owns 128 keys, 64 to a warpgroup, and walks over the queries that see them, head by head of the
 *          group, in order: Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q.
 *   dq     a block owns 128 queries of one head, 64 to a warpgroup: S = Q·Kᵀ, dP = dO·Vᵀ, dQ += dS·K.
 *
 * P and dS go from the accumulators of one product into the operand of the next without leaving the registers. One warp
 * fetches the tiles that the others work on. */
#include "attention_dq_sm90.cuh"

/* ---------------------------------------------------------------------------------------------------- dK and dV */

/* What a block has to do for one tile of keys. */
struct key_work {
    place c;
    int64_t y; /* head */
    int key0, begin, end, blocks, steps;
};

template <int BLOCK> INLINE key_work find_keys(const attention_params &p, int64_t id) {
    key_work w;
    int tile;
    int64_t rest;
    split_block(id, p.tiles_k, p.a.b * p.a.hk, &tile, &rest); /* the first keys of a causal mask are seen most */
    w.key0 = tile * OWN_ROWS;
    w.y = rest % p.a.hk;
    w.c = find_place(p, rest / p.a.hk);
    const int key1 = min(w.key0 + OWN_ROWS, w.c.sk);
    w.begin = w.end = 0;
    if (w.key0 < key1) {
        w.begin = max(0, min(w.key0 - w.c.hi, w.c.sq));
        w.end = max(0, min(key1 - w.c.lo, w.c.sq));
    }
    w.blocks = w.begin < w.end ? (w.end - w.begin + BLOCK - 1) / BLOCK : 0;
    w.steps = w.blocks * p.group;
    return w;
}

/* The producer: one warp fetches all that the others work on. */
template <typename T, int D, int OWN, int BLOCK, int STAGES>
INLINE void fetch_dkdv(const attention_params_sm90 &all, uint32_t shared) {
    const attention_params &p = all.p;
    typedef backward90<D, OWN, BLOCK, STAGES, 3> layout;
    const int lane = threadIdx.x % 32;
    const bool packed = p.a.features & HEDDLE_VARLEN;
    ring r = {0, 1};
    ring o = {0, 1};
    const int64_t tiles = p.a.b * p.a.hk * p.tiles_k;
    for (int64_t id = blockIdx.x; id < tiles; id += gridDim.x) {
        const key_work w = find_keys<BLOCK>(p, id);
        const place &c = w.c;
        const int n = packed ? 0 : (int)c.n;
        if (!w.steps)
            continue;
        if (lane == 0) {
            const uint32_t to = shared + o.slot * 2 * layout::own_bytes, bar = shared + layout::own_full + o.slot * 8;
            mbarrier_wait(shared + layout::own_empty + o.slot * 8, o.turn);
            mbarrier_expect(bar, 2 * layout::own_bytes);
            load_boxes<D, OWN_ROWS>(to, &all.k, bar, (int)c.first_k + w.key0, (int)w.y, n);
            load_boxes<D, OWN_ROWS>(to + layout::own_bytes, &all.v, bar, (int)c.first_k + w.key0, (int)w.y, n);
        }
        advance<OWN>(&o);
        for (int step = 0; step < w.steps; step++, advance<STAGES>(&r)) {
            const int64_t x = w.y * p.group + step / w.blocks;
            const int i0 = w.begin + step % w.blocks * BLOCK;
            const uint32_t to = shared + layout::stages + r.slot * 2 * layout::block_bytes;
            const uint32_t bar = shared + layout::full + r.slot * 8;
            const uint32_t numbers = shared + layout::numbers + r.slot * 3 * BLOCK * 4;
            mbarrier_wait(shared + layout::empty + r.slot * 8, r.turn);
            if (lane == 0) {
                mbarrier_expect(bar, 2 * layout::block_bytes);
                load_boxes<D, BLOCK>(to, &all.q, bar, (int)c.first_q + i0, (int)x, n);
                load_boxes<D, BLOCK>(to + layout::block_bytes, &all.dout, bar, (int)c.first_q + i0, (int)x, n);
            }
            const int64_t at = lse_at(p, c, x, 0);
            for (int z = lane; z < BLOCK; z += 32) {
                const int i = i0 + z, bytes = i < w.end ? 4 : 0;
                const int64_t from = bytes ? at + i : 0;
                cp_async4(numbers + z * 4, p.base + from, bytes);
                cp_async4(numbers + (BLOCK + z) * 4, p.rest + from, bytes);
                cp_async4(numbers + (2 * BLOCK + z) * 4, p.dsum + from, bytes);
            }
            cp_async_arrive(bar);
        }
    }
}

/* Sᵀ -> Pᵀ; in a cut tile -0 where a query does not see the key. Rows are keys from row0, columns queries from i0. */
template <bool CUT, int BLOCK>
INLINE void key_weights(const attention_params &p, const place &c, int row0, int i0, const float *numbers,
                        float (*s)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++) {
        const int column = y * 8 + lane % 4 * 2;
        const float2 base = *(const float2 *)(numbers + column), rest = *(const float2 *)(numbers + BLOCK + column);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int i = i0 + column + e;
            const int first = max(i + c.lo, 0), last = i < c.sq ? min(i + c.hi, c.sk - 1) : -1;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int j = row0 + half * 8 + lane / 4;
                float *t = &s[y][2 * half + e];
                *t = exp2_approx(fmaf(*t, p.scale_log2, e ? -base.y : -base.x) - (e ? rest.y : rest.x));
                if (CUT && (j < first || j > last))
                    *t = -0.0f;
            }
        }
    }
}

/* dPᵀ -> dSᵀ, from Pᵀ. */
template <bool CUT, int BLOCK> INLINE void key_gradients(const float *numbers, const float (*s)[4], float (*dp)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++) {
        const float2 dsum = *(const float2 *)(numbers + 2 * BLOCK + y * 8 + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float t = s[y][e] * (dp[y][e] - (e % 2 ? dsum.y : dsum.x));
            dp[y][e] = CUT && __float_as_int(s[y][e]) < 0 ? 0.0f : t;
        }
    }
}

/* In a tile that a mask cuts, 0·NaN would leak through a product: what is not finite becomes zero, and who sees the
 * row gets a NaN from its numbers. */
template <typename T, int D, int BLOCK> INLINE void clean_queries(uint32_t at, float *numbers) {
    for (int x = threadIdx.x - WARPGROUP; x < 2 * BLOCK * D / 8; x += CONSUMERS)
        if (has_nonfinite(load_shared16(at + x * 16), T())) {
            const int row = x / 8 % BLOCK;
            store_shared16(at + x * 16, make_uint4(0, 0, 0, 0));
            numbers[row] = numbers[2 * BLOCK + row] = CUDART_NAN_F;
        }
    fence_async();
    barrier_sync(1, CONSUMERS);
}

/* Waits for a step's tiles; whether a mask cuts them. */
template <typename T, int D, int BLOCK>
INLINE bool begin_queries(const key_work &w, int step, const ring &r, uint32_t full, uint32_t sq, float *numbers) {
    const place &c = w.c;
    const int i0 = w.begin + step % w.blocks * BLOCK;
    const bool cut = i0 + BLOCK > w.end || w.key0 + OWN_ROWS > c.sk || w.key0 + OWN_ROWS - 1 > i0 + c.hi ||
                     w.key0 < min(i0 + BLOCK, c.sq) - 1 + c.lo;
    mbarrier_wait(full + r.slot * 8, r.turn);
    if (cut)
        clean_queries<T, D, BLOCK>(sq, numbers);
    return cut;
}

/* From Sᵀ to Pᵀ and dSᵀ, as operands. The stage of the step before is released where its products have ended. */
template <typename T, int D, int BLOCK, bool FIRST>
INLINE void key_step(const attention_params &p, const place &c, int row0, int i0, bool cut, const float *numbers,
                     uint32_t sv, uint32_t sdo, uint32_t done, float (*s)[4], uint32_t (*ps)[4], uint32_t (*ds)[4]) {
    float dp[BLOCK / 8][4];
    pin_all<BLOCK / 8>(s);
    if (cut)
        key_weights<true, BLOCK>(p, c, row0, i0, numbers, s);
    else
        key_weights<false, BLOCK>(p, c, row0, i0, numbers, s);
    if (D * BLOCK > 64 * 64 && !FIRST) { /* registers: no dP before the operands of the step before are read */
        wgmma_wait<0>();
        release(done);
    }
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, sv, sdo);
    wgmma_commit();
    if (D * BLOCK <= 64 * 64 && !FIRST) {
        wgmma_wait<1>();
        release(done);
    }
    wgmma_wait<0>();
    pin_all<BLOCK / 8>(dp);
    if (cut)
        key_gradients<true, BLOCK>(numbers, s, dp);
    else
        key_gradients<false, BLOCK>(numbers, s, dp);
    pack_fragments<T, BLOCK>(ps, s);
    pack_fragments<T, BLOCK>(ds, dp);
}

/* While the products of one step add up, Sᵀ of the next is made and turned into weights. */
template <typename T, int D, int BLOCK, int STAGES, typename layout>
INLINE void sum_keys(const attention_params &p, const key_work &w, uint32_t shared, int warp_row, uint32_t sk,
                     float *numbers, ring *at, float (*dk)[4], float (*dv)[4]) {
    ring &r = *at;
    const place &c = w.c;
    const uint32_t sv = sk + layout::own_bytes;
    float s[BLOCK / 8][4];
    uint32_t ps[BLOCK / 16][4], ds[BLOCK / 16][4];
    uint32_t sq = shared + layout::stages + r.slot * 2 * layout::block_bytes;
    bool cut = begin_queries<T, D, BLOCK>(w, 0, r, shared + layout::full, sq, numbers + r.slot * 3 * BLOCK);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, sk, sq);
    wgmma_commit();
    wgmma_wait<0>();
    key_step<T, D, BLOCK, true>(p, c, w.key0 + warp_row, w.begin, cut, numbers + r.slot * 3 * BLOCK, sv,
                                sq + layout::block_bytes, 0, s, ps, ds);
#pragma unroll 1
    for (int step = 1; step < w.steps; step++) {
        const uint32_t last = sq, done = shared + layout::empty + r.slot * 8;
        advance<STAGES>(&r);
        sq = shared + layout::stages + r.slot * 2 * layout::block_bytes;
        cut = begin_queries<T, D, BLOCK>(w, step, r, shared + layout::full, sq, numbers + r.slot * 3 * BLOCK);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, sk, sq);
        wgmma_commit();
        warpgroup_columns<T, D, BLOCK, BLOCK>(dv, ps, last + layout::block_bytes);
        warpgroup_columns<T, D, BLOCK, BLOCK>(dk, ds, last);
        wgmma_commit();
        wgmma_wait<1>();
        key_step<T, D, BLOCK, false>(p, c, w.key0 + warp_row, w.begin + step % w.blocks * BLOCK, cut,
                                     numbers + r.slot * 3 * BLOCK, sv, sq + layout::block_bytes, done, s, ps, ds);
    }
    wgmma_fence();
    warpgroup_columns<T, D, BLOCK, BLOCK>(dv, ps, sq + layout::block_bytes);
    warpgroup_columns<T, D, BLOCK, BLOCK>(dk, ds, sq);
    wgmma_commit();
    wgmma_wait<0>();
    release(shared + layout::empty + r.slot * 8);
    advance<STAGES>(&r);
}

/* The same, step by step. */
template <typename T, int D, int BLOCK, int STAGES, typename layout>
INLINE void sum_keys_plainly(const attention_params &p, const key_work &w, uint32_t shared, int warp_row, uint32_t sk,
                             float *numbers, ring *at, float (*dk)[4], float (*dv)[4]) {
    ring &r = *at;
    const place &c = w.c;
#pragma unroll 1
    for (int step = 0; step < w.steps; step++) {
        float s[BLOCK / 8][4], dp[BLOCK / 8][4];
        uint32_t ps[BLOCK / 16][4], ds[BLOCK / 16][4];
        const uint32_t sq = shared + layout::stages + r.slot * 2 * layout::block_bytes;
        float *const row = numbers + r.slot * 3 * BLOCK;
        const bool cut = begin_queries<T, D, BLOCK>(w, step, r, shared + layout::full, sq, row);
        const int i0 = w.begin + step % w.blocks * BLOCK;
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, sk, sq);
        wgmma_commit();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, sk + layout::own_bytes, sq + layout::block_bytes);
        wgmma_commit();
        wgmma_wait<1>();
        pin_all<BLOCK / 8>(s);
        if (cut)
            key_weights<true, BLOCK>(p, c, w.key0 + warp_row, i0, row, s);
        else
            key_weights<false, BLOCK>(p, c, w.key0 + warp_row, i0, row, s);
        wgmma_wait<0>();
        pin_all<BLOCK / 8>(dp);
        if (cut)
            key_gradients<true, BLOCK>(row, s, dp);
        else
            key_gradients<false, BLOCK>(row, s, dp);
        pack_fragments<T, BLOCK>(ps, s);
        pack_fragments<T, BLOCK>(ds, dp);
        wgmma_fence();
        warpgroup_columns<T, D, BLOCK, BLOCK>(dv, ps, sq + layout::block_bytes);
        warpgroup_columns<T, D, BLOCK, BLOCK>(dk, ds, sq);
        wgmma_commit();
        wgmma_wait<0>();
        release(shared + layout::empty + r.slot * 8);
        advance<STAGES>(&r);
    }
}

template <typename T, int D, int OWN, int BLOCK, int STAGES>
INLINE void work_dkdv(const attention_params &p, char *shared_at) {
    typedef backward90<D, OWN, BLOCK, STAGES, 3> layout;
    const uint32_t shared = shared_address(shared_at);
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    const int warp_row = group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16;
    ring r = {0, 0};
    ring o = {0, 0};
    const int64_t tiles = p.a.b * p.a.hk * p.tiles_k;
    for (int64_t id = blockIdx.x; id < tiles; id += gridDim.x) {
        const key_work w = find_keys<BLOCK>(p, id);
        float dk[D / 8][4], dv[D / 8][4];
        zero_all<D / 8>(dk);
        zero_all<D / 8>(dv);
        const uint32_t sk = shared + o.slot * 2 * layout::own_bytes + group * 64 * 128;
        float *const numbers = (float *)(shared_at + layout::numbers);
        if (w.steps) {
            mbarrier_wait(shared + layout::own_full + o.slot * 8, o.turn);
            if (BLOCK > 64) /* the registers do not hold what two steps need */
                sum_keys_plainly<T, D, BLOCK, STAGES, layout>(p, w, shared, warp_row, sk, numbers, &r, dk, dv);
            else
                sum_keys<T, D, BLOCK, STAGES, layout>(p, w, shared, warp_row, sk, numbers, &r, dk, dv);
            pin_all<D / 8>(dk);
            pin_all<D / 8>(dv);
            release(shared + layout::own_empty + o.slot * 8);
            advance<OWN>(&o);
        }
        const key_work again = find_keys<BLOCK>(p, opaque(id)); /* rather than registers kept through the loop */
        store_tile<T, D>(p.t.dv, row_at(p.a.dv_stride, again.c.n, again.y, again.c.first_k + again.key0),
                         p.a.dv_stride.s, warp_row, again.c.all_sk - again.key0, (int)p.a.dv, p.keep_scale, dv);
        store_tile<T, D>(p.t.dk, row_at(p.a.dk_stride, again.c.n, again.y, again.c.first_k + again.key0),
                         p.a.dk_stride.s, warp_row, again.c.all_sk - again.key0, (int)p.a.d, p.scale, dk);
    }
}

template <typename T, int D, int OWN, int BLOCK, int STAGES>
INLINE void attention_dkdv(const attention_params_sm90 &all) {
    typedef backward90<D, OWN, BLOCK, STAGES, 3> layout;
    extern __shared__ __align__(1024) char shared[];
    make_barriers<layout, OWN, STAGES, 32>(shared_address(shared));
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 32)
            fetch_dkdv<T, D, OWN, BLOCK, STAGES>(all, shared_address(shared));
    } else {
        registers_more<240>();
        work_dkdv<T, D, OWN, BLOCK, STAGES>(all.p, shared);
    }
}

#define pass_dkdv(T, D, BLOCK) attention_dkdv<T, D, BACKWARD90_OWN(true, D), BLOCK, BACKWARD90_STAGES(true, D)>(all)
#define pass_dq(T, D, BLOCK) attention_dq<T, D, BACKWARD90_OWN(false, D), BLOCK, BACKWARD90_STAGES(false, D)>(all)
#define K(pass, dtype, dim, variant, family, warps, tiles, block)                                                      \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        pass_##pass(dtype, dim, block);                                                                                \
    }
#define ATTENTION_BWD90_LIST
#include "attention.def"

/* SPDX-License-Identifier: Apache-2.0
 * dQ for Hopper: the second kernel of attention_bwd_sm90.cu. */
#ifndef HEDDLE_CUDA_ATTENTION_DQ_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_DQ_SM90_CUH

#include "attention_bwd_sm90.cuh"

struct query_work {
    place c;
    int64_t x;
    int query0, begin, end;
};

INLINE query_work find_queries(const attention_params &p, int64_t id) {
    query_work w;
    int tile;
    int64_t unit;
    split_block(id, p.tiles_q, p.a.b * p.a.h, &tile, &unit);
    w.query0 = (p.tiles_q - 1 - tile) * OWN_ROWS;
    w.x = unit % p.a.h;
    w.c = find_place(p, unit / p.a.h);
    const int query1 = min(w.query0 + OWN_ROWS, w.c.sq);
    w.begin = w.end = 0;
    if (w.query0 < query1) {
        w.begin = max(0, min(w.query0 + w.c.lo, w.c.sk));
        w.end = max(0, min(query1 + w.c.hi, w.c.sk));
    }
    return w;
}

template <typename T, int D, int OWN, int BLOCK, int STAGES>
INLINE void fetch_dq(const attention_params_sm90 &all, uint32_t shared, float *marks) {
    const attention_params &p = all.p;
    typedef backward90<D, OWN, BLOCK, STAGES, 1> layout;
    const int lane = threadIdx.x % 32;
    const bool packed = p.a.features & HEDDLE_VARLEN;
    ring r = {0, 1};
    ring o = {0, 1};
    const int64_t tiles = p.a.b * p.a.h * p.tiles_q;
    for (int64_t id = blockIdx.x; id < tiles; id += gridDim.x) {
        const query_work w = find_queries(p, id);
        const place &c = w.c;
        const int n = packed ? 0 : (int)c.n, y = (int)(w.x / p.group);
        if (w.begin >= w.end)
            continue;
        if (lane == 0) {
            const uint32_t to = shared + o.slot * 2 * layout::own_bytes, bar = shared + layout::own_full + o.slot * 8;
            mbarrier_wait(shared + layout::own_empty + o.slot * 8, o.turn);
            mbarrier_expect(bar, 2 * layout::own_bytes);
            load_boxes<D, OWN_ROWS>(to, &all.q, bar, (int)c.first_q + w.query0, (int)w.x, n);
            load_boxes<D, OWN_ROWS>(to + layout::own_bytes, &all.dout, bar, (int)c.first_q + w.query0, (int)w.x, n);
        }
        advance<OWN>(&o);
        for (int j0 = w.begin; j0 < w.end; j0 += BLOCK, advance<STAGES>(&r)) {
            const uint32_t to = shared + layout::stages + r.slot * 2 * layout::block_bytes;
            const uint32_t bar = shared + layout::full + r.slot * 8;
            mbarrier_wait(shared + layout::empty + r.slot * 8, r.turn);
            for (int z = lane; z < BLOCK; z += 32)
                marks[r.slot * BLOCK + z] = 0.0f;
            __syncwarp();
            if (lane == 0) {
                mbarrier_expect(bar, 2 * layout::block_bytes);
                load_boxes<D, BLOCK>(to, &all.k, bar, (int)c.first_k + j0, y, n);
                load_boxes<D, BLOCK>(to + layout::block_bytes, &all.v, bar, (int)c.first_k + j0, y, n);
            }
        }
    }
}

/* As clean_queries; V is in no product with a weight. */
template <typename T, int D, int BLOCK> INLINE void clean_keys(uint32_t at, float *marks) {
    for (int x = threadIdx.x - WARPGROUP; x < BLOCK * D / 8; x += CONSUMERS)
        if (has_nonfinite(load_shared16(at + x * 16), T())) {
            store_shared16(at + x * 16, make_uint4(0, 0, 0, 0));
            marks[x / 8 % BLOCK] = CUDART_NAN_F;
        }
    fence_async();
    barrier_sync(1, CONSUMERS);
}

/* base, rest and D of the two rows of a thread. */
struct row_numbers {
    float base[2], rest[2], dsum[2];
};

/* S -> P; in a cut tile -0 where the key is not seen. Rows are queries from row0, columns keys from j0. */
template <bool CUT, int BLOCK>
INLINE void query_weights(const attention_params &p, const place &c, int row0, int j0, const row_numbers &row,
                          float (*s)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8 + lane / 4;
        const int first = max(i + c.lo, 0) - j0, last = i < c.sq ? min(i + c.hi, c.sk - 1) - j0 : -1 - j0;
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int column = y * 8 + lane % 4 * 2 + e;
                float *t = &s[y][2 * half + e];
                *t = exp2_approx(fmaf(*t, p.scale_log2, -row.base[half]) - row.rest[half]);
                if (CUT && (column < first || column > last))
                    *t = -0.0f;
            }
    }
}

/* dP -> dS, from P. */
template <bool CUT, int BLOCK>
INLINE void query_gradients(const row_numbers &row, const float *marks, const float (*s)[4], float (*dp)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float t = dp[y][e] - row.dsum[e / 2];
            if (CUT)
                t += marks[y * 8 + lane % 4 * 2 + e % 2];
            dp[y][e] = CUT && __float_as_int(s[y][e]) < 0 ? 0.0f : s[y][e] * t;
        }
}

template <typename T, int D, int BLOCK>
INLINE bool begin_keys(const query_work &w, int j0, const ring &r, uint32_t full, uint32_t sk, float *marks) {
    const place &c = w.c;
    const bool cut = j0 + BLOCK > w.end || w.query0 + OWN_ROWS > c.sq || j0 + BLOCK - 1 > w.query0 + c.hi ||
                     j0 < min(w.query0 + OWN_ROWS, c.sq) - 1 + c.lo;
    mbarrier_wait(full + r.slot * 8, r.turn);
    if (cut)
        clean_keys<T, D, BLOCK>(sk, marks);
    return cut;
}

/* From S to dS, as an operand. */
template <typename T, int D, int BLOCK, bool FIRST>
INLINE void query_step(const attention_params &p, const place &c, int row0, int j0, bool cut, const row_numbers &row,
                       const float *marks, uint32_t sdo, uint32_t sv, uint32_t done, float (*s)[4], uint32_t (*ds)[4]) {
    float dp[BLOCK / 8][4];
    pin_all<BLOCK / 8>(s);
    if (cut)
        query_weights<true, BLOCK>(p, c, row0, j0, row, s);
    else
        query_weights<false, BLOCK>(p, c, row0, j0, row, s);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, sdo, sv);
    wgmma_commit();
    if (!FIRST) {
        wgmma_wait<1>();
        release(done);
    }
    wgmma_wait<0>();
    pin_all<BLOCK / 8>(dp);
    if (cut)
        query_gradients<true, BLOCK>(row, marks, s, dp);
    else
        query_gradients<false, BLOCK>(row, marks, s, dp);
    pack_fragments<T, BLOCK>(ds, dp);
}

/* dQ, in the manner of sum_keys. */
template <typename T, int D, int BLOCK, int STAGES, typename layout>
INLINE void sum_queries(const attention_params &p, const query_work &w, uint32_t shared, int warp_row, uint32_t sq,
                        float *marks, const row_numbers &row, ring *at, float (*dq)[4]) {
    ring &r = *at;
    const place &c = w.c;
    const uint32_t sdo = sq + layout::own_bytes;
    float s[BLOCK / 8][4];
    uint32_t ds[BLOCK / 16][4];
    uint32_t sk = shared + layout::stages + r.slot * 2 * layout::block_bytes;
    bool cut = begin_keys<T, D, BLOCK>(w, w.begin, r, shared + layout::full, sk, marks + r.slot * BLOCK);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, sq, sk);
    wgmma_commit();
    wgmma_wait<0>();
    query_step<T, D, BLOCK, true>(p, c, w.query0 + warp_row, w.begin, cut, row, marks + r.slot * BLOCK, sdo,
                                  sk + layout::block_bytes, 0, s, ds);
#pragma unroll 1
    for (int j0 = w.begin + BLOCK; j0 < w.end; j0 += BLOCK) {
        const uint32_t last = sk, done = shared + layout::empty + r.slot * 8;
        advance<STAGES>(&r);
        sk = shared + layout::stages + r.slot * 2 * layout::block_bytes;
        cut = begin_keys<T, D, BLOCK>(w, j0, r, shared + layout::full, sk, marks + r.slot * BLOCK);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, sq, sk);
        wgmma_commit();
        warpgroup_columns<T, D, BLOCK, BLOCK>(dq, ds, last);
        wgmma_commit();
        wgmma_wait<1>();
        query_step<T, D, BLOCK, false>(p, c, w.query0 + warp_row, j0, cut, row, marks + r.slot * BLOCK, sdo,
                                       sk + layout::block_bytes, done, s, ds);
    }
    wgmma_fence();
    warpgroup_columns<T, D, BLOCK, BLOCK>(dq, ds, sk);
    wgmma_commit();
    wgmma_wait<0>();
    release(shared + layout::empty + r.slot * 8);
    advance<STAGES>(&r);
}

template <typename T, int D, int OWN, int BLOCK, int STAGES>
INLINE void work_dq(const attention_params &p, char *shared_at) {
    typedef backward90<D, OWN, BLOCK, STAGES, 1> layout;
    const uint32_t shared = shared_address(shared_at);
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0), lane = threadIdx.x % 32;
    const int warp_row = group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16;
    ring r = {0, 0};
    ring o = {0, 0};
    const int64_t tiles = p.a.b * p.a.h * p.tiles_q;
    for (int64_t id = blockIdx.x; id < tiles; id += gridDim.x) {
        const query_work w = find_queries(p, id);
        const place &c = w.c;
        float dq[D / 8][4];
        row_numbers row;
        zero_all<D / 8>(dq);
        for (int half = 0; half < 2; half++) {
            const int i = w.query0 + warp_row + half * 8 + lane / 4;
            const int64_t at = i < c.sq ? lse_at(p, c, w.x, i) : 0;
            row.base[half] = i < c.sq ? p.base[at] : CUDART_INF_F;
            row.rest[half] = i < c.sq ? p.rest[at] : 0.0f;
            row.dsum[half] = i < c.sq ? p.dsum[at] : 0.0f;
        }
        const uint32_t sq = shared + o.slot * 2 * layout::own_bytes + group * 64 * 128;
        float *const marks = (float *)(shared_at + layout::numbers);
        if (w.begin < w.end) {
            mbarrier_wait(shared + layout::own_full + o.slot * 8, o.turn);
            sum_queries<T, D, BLOCK, STAGES, layout>(p, w, shared, warp_row, sq, marks, row, &r, dq);
            pin_all<D / 8>(dq);
            release(shared + layout::own_empty + o.slot * 8);
            advance<OWN>(&o);
        }
        const query_work again = find_queries(p, opaque(id));
        store_tile<T, D>(p.t.dq, row_at(p.a.dq_stride, again.c.n, again.x, again.c.first_q + again.query0),
                         p.a.dq_stride.s, warp_row, again.c.all_sq - again.query0, (int)p.a.d, p.scale, dq);
    }
}

template <typename T, int D, int OWN, int BLOCK, int STAGES>
INLINE void attention_dq(const attention_params_sm90 &all) {
    typedef backward90<D, OWN, BLOCK, STAGES, 1> layout;
    extern __shared__ __align__(1024) char shared[];
    make_barriers<layout, OWN, STAGES, 0>(shared_address(shared));
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 32)
            fetch_dq<T, D, OWN, BLOCK, STAGES>(all, shared_address(shared), (float *)(shared + layout::numbers));
    } else {
        registers_more<240>();
        work_dq<T, D, OWN, BLOCK, STAGES>(all.p, shared);
    }
}

#endif

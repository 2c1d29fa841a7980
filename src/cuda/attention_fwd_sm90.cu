/* SPDX-License-Identifier: Apache-2.0
 * Attention forward for Hopper, with the ideas of FlashAttention-3 (Shah et al. 2024).
 *
 * A block stays on its multiprocessor and takes one tile of 64·GROUPS queries after the other. One thread sends for Q and for
 * the tiles of K and V, two warps clean those tiles of V that a mask cuts, and GROUPS warpgroups of 64 queries each compute:
 * while the tensor cores add P·V of one tile, the softmax of the next one is on its way, and the warpgroups take turns in
 * giving the tensor cores work. */
#include "attention_sm90.cuh"

#define STAGES 2
#define CLEANERS 64

template <int D, int GROUPS, int BLOCK> struct forward90 {
    static constexpr int rows = GROUPS * 64;
    static constexpr int tile_bytes = BLOCK * D * 2;
    static constexpr int k = rows * D * 2;
    static constexpr int v = k + STAGES * tile_bytes;
    static constexpr int o_pitch = D * 2 + 16;
    static constexpr int o = v + STAGES * tile_bytes;
    static constexpr int bad = o + rows * o_pitch;
    static constexpr int barriers = bad + STAGES * BLOCK * 4;
    static constexpr int bytes = barriers + 8 * (2 + 5 * STAGES);
};

/* The barriers, by their place. Of K, V and of V cleaned one per slot. */
enum {
    Q_FULL,
    Q_EMPTY,
    K_FULL,
    K_EMPTY = K_FULL + STAGES,
    V_FULL = K_EMPTY + STAGES,
    V_CLEAN = V_FULL + STAGES,
    V_EMPTY = V_CLEAN + STAGES,
    BARRIERS = V_EMPTY + STAGES
};

/* ---------------------------------------------------------------------------------------------------------- work */

/* A tile of queries: row0 .. i1-1 count; keys begin .. end-1 are seen by some of them, i+lo .. i+hi by query i. */
struct forward_span {
    int row0, i1, begin, end, lo, hi, sk;
};
struct forward_work {
    place c;
    int x, n; /* head; batch as the tensor maps count */
    forward_span s;
};

/* The tile that this block takes in a round: the order goes back and forth over the blocks, so that none gets the longer
 * tile every time. */
INLINE unsigned work_id(int round) {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* False: the tile has no rows. */
template <int ROWS> INLINE bool find_work(const attention_params &p, unsigned id, forward_work *w) {
    const unsigned h = (unsigned)p.a.h, units = h * (unsigned)p.a.b, tiles = (unsigned)p.tiles_q;
    const unsigned section = id / (16 * tiles) * 16, r = id - section * tiles, count = min(16u, units - section);
    const unsigned unit = section + r % count;
    w->x = (int)(unit % h);
    w->c = find_place(p, unit / h);
    w->n = p.a.features & HEDDLE_VARLEN ? 0 : (int)w->c.n;
    const int row0 = (p.tiles_q - 1 - (int)(r / count)) * ROWS; /* the longest of a causal mask first */
    const int i1 = min(w->c.sq, row0 + ROWS);
    w->s = {row0, i1, 0, 0, w->c.lo, w->c.hi, w->c.sk};
    if (row0 < i1) {
        w->s.begin = max(0, min(row0 + w->c.lo, w->c.sk));
        w->s.end = max(w->s.begin, min(i1 + w->c.hi, w->c.sk));
    }
    return row0 < w->c.all_sq;
}

/* Some key of the tile from j0 on is unseen by some query. */
template <int BLOCK> INLINE bool is_cut(const forward_span &w, int j0) {
    return j0 + BLOCK > w.end || j0 + BLOCK - 1 > w.row0 + w.hi || j0 < w.i1 - 1 + w.lo;
}

/* ------------------------------------------------------------------------------------------------ loads, cleaning */

template <int D, int BLOCK>
INLINE void load_keys(uint32_t tiles, uint32_t full, uint32_t empty, const tensor_map *map, int row, int head, int n,
                      ring *r) {
    mbarrier_wait(empty + r->slot * 8, r->turn ^ 1);
    mbarrier_expect(full + r->slot * 8, BLOCK * D * 2);
    load_boxes<D, BLOCK>(tiles + r->slot * BLOCK * D * 2, map, full + r->slot * 8, row, head, n);
    advance<STAGES>(r);
}

/* One thread sends for everything, in the order in which it is used. */
template <typename T, int D, int GROUPS, int BLOCK>
INLINE void produce(const attention_params_sm90 &all, uint32_t base, uint32_t barriers) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const attention_params &p = all.p;
    const unsigned total = (unsigned)p.tiles_q * (unsigned)(p.a.h * p.a.b);
    ring rk = {0, 0}, rv = {0, 0};
    int q_turn = 0;
    for (int round = 0; round * gridDim.x < total; round++) {
        forward_work w;
        const unsigned id = work_id(round);
        if (id >= total || !find_work<layout::rows>(p, id, &w) || w.s.begin == w.s.end)
            continue;
        const int head = w.x / p.group, first = (int)w.c.first_k, end = first + w.s.end, n = w.n;
        int row = first + w.s.begin;
        load_keys<D, BLOCK>(base + layout::k, barriers + K_FULL * 8, barriers + K_EMPTY * 8, &all.k, row, head, n, &rk);
        mbarrier_wait(barriers + Q_EMPTY * 8, q_turn ^ 1);
        mbarrier_expect(barriers + Q_FULL * 8, layout::rows * D * 2);
        load_boxes<D, layout::rows>(base, &all.q, barriers + Q_FULL * 8, (int)w.c.first_q + w.s.row0, w.x, n);
        q_turn ^= 1;
#pragma unroll 1
        for (; row < end; row += BLOCK) {
            if (row + BLOCK < end)
                load_keys<D, BLOCK>(base + layout::k, barriers + K_FULL * 8, barriers + K_EMPTY * 8, &all.k,
                                    row + BLOCK, head, n, &rk);
            load_keys<D, BLOCK>(base + layout::v, barriers + V_FULL * 8, barriers + V_EMPTY * 8, &all.v, row, head, n,
                                &rv);
        }
    }
}

/* Two warps look at every tile of V in turn. */
template <typename T, int D, int GROUPS, int BLOCK>
INLINE void clean(const attention_params &p, uint32_t base, uint32_t barriers, int *bad) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const unsigned total = (unsigned)p.tiles_q * (unsigned)(p.a.h * p.a.b);
    const int thread = (int)threadIdx.x % CLEANERS;
    ring rv = {0, 0};
    for (int round = 0; round * gridDim.x < total; round++) {
        forward_work w;
        const unsigned id = work_id(round);
        if (id >= total || !find_work<layout::rows>(p, id, &w))
            continue;
#pragma unroll 1
        for (int j0 = w.s.begin; j0 < w.s.end; j0 += BLOCK) {
            mbarrier_wait(barriers + (V_FULL + rv.slot) * 8, rv.turn);
            if (is_cut<BLOCK>(w.s, j0)) {
                clean_rows<T, D, BLOCK, CLEANERS>(base + layout::v + rv.slot * layout::tile_bytes,
                                                  bad + rv.slot * BLOCK, thread);
                fence_async();
            }
            __syncwarp();
            if (thread % 32 == 0) {
                mbarrier_arrive(barriers + (V_CLEAN + rv.slot) * 8);
                mbarrier_arrive(barriers + (V_EMPTY + rv.slot) * 8);
            }
            advance<STAGES>(&rv);
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- softmax */

/* The running softmax of the two rows that a lane has a part of. */
struct softmax_state {
    float max[2], sum[2]; /* sum: this lane's part */
};

/* S -> P = exp2(S·c - max·c). What was summed before has to be multiplied by shrink; false: by ones. */
template <int N> INLINE bool online_softmax(softmax_state *state, float c, float (*s)[4], float shrink[2]) {
    float base[2];
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = state->max[half];
#pragma unroll
        for (int y = 0; y < N / 8; y++)
            top = fmaxf(top, fmaxf(s[y][2 * half], s[y][2 * half + 1]));
        top = quad_max(top);
        base[half] = top == -CUDART_INF_F ? 0.0f : top * c;
        shrink[half] = exp2_approx(state->max[half] * c - base[half]);
        grows |= top != state->max[half];
        state->max[half] = top;
        state->sum[half] *= shrink[half];
    }
#pragma unroll
    for (int y = 0; y < N / 8; y++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = exp2_approx(fmaf(s[y][e], c, -base[e / 2]));
        state->sum[0] += s[y][0] + s[y][1];
        state->sum[1] += s[y][2] + s[y][3];
    }
    return __any_sync(ALL_LANES, grows);
}

/* ------------------------------------------------------------------------------------------------------- the result */

/* What one row's sums are multiplied with, and its log-sum-exp in units of log2; the sink joins in. */
INLINE float finish_row(const attention_params &p, const forward_work &w, int i, float top, float sum, float *lse2) {
    float base = sum == 0.0f ? -CUDART_INF_F : top * p.scale_log2, shrink = 1.0f;
    if ((p.a.features & HEDDLE_SINKS) && i < w.c.sq) {
        const float sink = ((const float *)p.t.sinks)[w.x] * LOG2E, most = fmaxf(base, sink);
        if (sink != -CUDART_INF_F) {
            shrink = base == -CUDART_INF_F ? 0.0f : exp2_approx(base - most);
            sum = sum * shrink + exp2_approx(sink - most);
            base = most;
        }
    }
    if (i >= w.c.sq)
        sum = 0.0f;
    *lse2 = sum == 0.0f ? -CUDART_INF_F : base + log2f(sum);
    return sum == 0.0f ? 0.0f : shrink / sum;
}

/* o = O / sum, and lse. A warp's 16 rows go through shared memory, so that whole rows are written, 16 bytes a lane. */
template <typename T, int D>
INLINE void store_rows(const attention_params &p, const forward_work &w, const softmax_state &state, float (*o)[4],
                       uint32_t staging, int pitch) {
    const int lane = threadIdx.x % 32, warp_row = (int)threadIdx.x / 32 * 16 - WARPGROUP / 2;
    float by[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = w.s.row0 + warp_row + half * 8 + lane / 4;
        float lse2;
        by[half] = finish_row(p, w, i, state.max[half], quad_sum(state.sum[half]), &lse2);
        if (p.t.lse && lane % 4 == 0 && i < w.c.all_sq)
            ((float *)p.t.lse)[lse_at(p, w.c, w.x, i)] = lse2 * LN2;
#pragma unroll
        for (int y = 0; y < D / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                o[y][2 * half + e] = by[half] == 0.0f ? 0.0f : o[y][2 * half + e] * by[half];
    }
    const uint32_t to = staging + warp_row * pitch;
#pragma unroll
    for (int s = 0; s < D / 16; s++) {
        uint32_t a[1][4];
        pack_fragments<T, 16>(a, o + 2 * s);
        stmatrix4(to + (lane & 15) * pitch + s * 32 + (lane >> 4) * 16, a[0]);
    }
    __syncwarp();
    constexpr int CHUNKS = D / 8;
    const int chunk = lane % CHUNKS;
    T *from = (T *)p.t.o + row_at(p.a.o_stride, w.c.n, w.x, w.c.first_q + w.s.row0 + warp_row) + chunk * 8;
#pragma unroll
    for (int row = lane / CHUNKS; row < 16; row += 32 / CHUNKS) {
        const uint4 x = load_shared16(to + row * pitch + chunk * 16);
        if (w.s.row0 + warp_row + row < w.c.all_sq && chunk * 8 < (int)p.a.dv)
            *(uint4 *)(from + row * p.a.o_stride.s) = x;
    }
    __syncwarp();
}

/* ------------------------------------------------------------------------------------------------------ arithmetic */

INLINE void release(uint32_t barrier) {
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barrier);
}

/* The turns of the warpgroups to issue products. */
template <int GROUPS> INLINE void take_turn(int group) {
    if (GROUPS > 1)
        barrier_sync(1 + group, 2 * WARPGROUP);
}
template <int GROUPS> INLINE void pass_turn(int group) {
    if (GROUPS > 1)
        barrier_arrive(1 + (group + 1) % GROUPS, 2 * WARPGROUP);
}

/* O of one tile of queries: 64 of them are this warpgroup's. */
template <typename T, int D, int GROUPS, int BLOCK>
INLINE void compute(float c, const forward_span &w, int group, uint32_t base, uint32_t barriers, ring *rk, ring *rv,
                    softmax_state *state, float (*o)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const uint32_t q = base + group * 64 * 128;
    const int i0 = w.row0 + group * 64;
    const uint32_t bad = base + layout::bad;
    float s[BLOCK / 8][4], shrink[2];
    uint32_t a[BLOCK / 16][4];
    /* The first tile of keys: nothing to overlap with. */
    mbarrier_wait(barriers + (K_FULL + rk->slot) * 8, rk->turn);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, layout::rows, BLOCK>(s, q, base + layout::k + rk->slot * layout::tile_bytes);
    wgmma_commit();
    wgmma_wait<0>();
    pin_all<BLOCK / 8>(s);
    release(barriers + (K_EMPTY + rk->slot) * 8);
    advance<STAGES>(rk);
    if (is_cut<BLOCK>(w, w.begin)) {
        mbarrier_wait(barriers + (V_CLEAN + rv->slot) * 8, rv->turn);
        mask_scores<BLOCK>(w.lo, w.hi, w.sk, i0, w.begin, bad + rv->slot * BLOCK * 4, s);
    }
    online_softmax<BLOCK>(state, c, s, shrink);
    pack_fragments<T, BLOCK>(a, s);
#pragma unroll 1
    for (int j0 = w.begin + BLOCK; j0 < w.end; j0 += BLOCK) {
        mbarrier_wait(barriers + (K_FULL + rk->slot) * 8, rk->turn);
        take_turn<GROUPS>(group);
        pin_all<BLOCK / 16>(a);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, layout::rows, BLOCK>(s, q, base + layout::k + rk->slot * layout::tile_bytes);
        wgmma_commit();
        mbarrier_wait(barriers + (V_FULL + rv->slot) * 8, rv->turn);
        wgmma_fence();
        warpgroup_columns<T, D, BLOCK, BLOCK>(o, a, base + layout::v + rv->slot * layout::tile_bytes);
        wgmma_commit();
        pass_turn<GROUPS>(group);
        wgmma_wait<1>();
        pin_all<BLOCK / 8>(s);
        release(barriers + (K_EMPTY + rk->slot) * 8);
        advance<STAGES>(rk);
        ring next = *rv;
        advance<STAGES>(&next);
        if (is_cut<BLOCK>(w, j0)) {
            mbarrier_wait(barriers + (V_CLEAN + next.slot) * 8, next.turn);
            mask_scores<BLOCK>(w.lo, w.hi, w.sk, i0, j0, bad + next.slot * BLOCK * 4, s);
        }
        const bool grows = online_softmax<BLOCK>(state, c, s, shrink);
        pin_all<BLOCK / 8>(s); /* or the exponentials would be left for after the wait */
        hold_until(state->sum[0] + state->sum[1]);
        wgmma_wait<0>();
        pin_all<D / 8>(o);
        pin_all<BLOCK / 16>(a);
        release(barriers + (V_EMPTY + rv->slot) * 8);
        *rv = next;
        if (grows) {
#pragma unroll
            for (int y = 0; y < D / 8; y++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    o[y][e] *= shrink[e / 2];
        }
        pack_fragments<T, BLOCK>(a, s);
    }
    release(barriers + Q_EMPTY * 8);
    mbarrier_wait(barriers + (V_FULL + rv->slot) * 8, rv->turn);
    pin_all<BLOCK / 16>(a);
    wgmma_fence();
    warpgroup_columns<T, D, BLOCK, BLOCK>(o, a, base + layout::v + rv->slot * layout::tile_bytes);
    wgmma_commit();
    wgmma_wait<0>();
    pin_all<D / 8>(o);
    release(barriers + (V_EMPTY + rv->slot) * 8);
    advance<STAGES>(rv);
}

template <typename T, int D, int GROUPS, int BLOCK>
INLINE void consume(const attention_params &p, int group, uint32_t base, uint32_t barriers) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const unsigned total = (unsigned)p.tiles_q * (unsigned)(p.a.h * p.a.b);
    ring rk = {0, 0}, rv = {0, 0};
    int q_turn = 0;
    if (group == GROUPS - 1)
        pass_turn<GROUPS>(group);
    for (int round = 0; round * gridDim.x < total; round++) {
        forward_work w;
        unsigned id = work_id(round);
        if (id >= total || !find_work<layout::rows>(p, id, &w))
            continue;
        softmax_state state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
        float o[D / 8][4];
        zero_all<D / 8>(o);
        if (w.s.begin < w.s.end) {
            mbarrier_wait(barriers + Q_FULL * 8, q_turn);
            q_turn ^= 1;
            compute<T, D, GROUPS, BLOCK>(p.scale_log2, w.s, group, base, barriers, &rk, &rv, &state, o);
            pin(id); /* found out a second time: it must not live in registers all along */
            find_work<layout::rows>(p, id, &w);
        }
        store_rows<T, D>(p, w, state, o, base + layout::o, layout::o_pitch);
    }
}

template <typename T, int D, int GROUPS, int BLOCK> INLINE void attention_forward90(const attention_params_sm90 &all) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    extern __shared__ char shared[];
    const uint32_t base = align_tiles(shared_address(shared)), barriers = base + layout::barriers;
    int *bad = (int *)(shared + (base - shared_address(shared)) + layout::bad);
    if (threadIdx.x == 0) {
        mbarrier_init(barriers + Q_FULL * 8, 1);
        mbarrier_init(barriers + Q_EMPTY * 8, GROUPS * 4);
        for (int x = 0; x < STAGES; x++) {
            mbarrier_init(barriers + (K_FULL + x) * 8, 1);
            mbarrier_init(barriers + (K_EMPTY + x) * 8, GROUPS * 4);
            mbarrier_init(barriers + (V_FULL + x) * 8, 1);
            mbarrier_init(barriers + (V_CLEAN + x) * 8, CLEANERS / 32);
            mbarrier_init(barriers + (V_EMPTY + x) * 8, GROUPS * 4 + CLEANERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    if (warp < 4) {
        registers_fewer<GROUPS == 2 ? 40 : 32>();
        if (threadIdx.x == 0)
            produce<T, D, GROUPS, BLOCK>(all, base, barriers);
        else if (warp >= 2)
            clean<T, D, GROUPS, BLOCK>(all.p, base, barriers, bad);
    } else {
        registers_more<GROUPS == 2 ? 232 : 160>();
        consume<T, D, GROUPS, BLOCK>(all.p, warp / 4 - 1, base, barriers);
    }
}

#define K(pass, dtype, dim, variant, family, warps, tiles, block)                                                      \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm90(                                                 \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        attention_forward90<dtype, dim, tiles, block>(all);                                                            \
    }
#define ATTENTION_FWD90_LIST
#include "attention.def"

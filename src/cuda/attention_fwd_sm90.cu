/* SPDX-License-Identifier: Apache-2.0
 * Attention forward for Hopper, with the ideas of FlashAttention-3 (Shah et al. 2024).
 *
 * A block stays on its multiprocessor and takes one tile of 64·GROUPS queries after the other. One thread sends for Q and for
 * the tiles of K and V, two warps clean those tiles of V that a mask cuts, and GROUPS warpgroups of 64 queries each compute:
 * while the tensor cores add P·V of one tile, the softmax of the next one is on its way, and the warpgroups take turns in
 * giving the tensor cores work. The first scores of a tile of queries are formed while o of the one before is stored. The fourth
 * warp sees to the tiles that see no keys. */
#include "attention_fwd_sm90.cuh"

/* ------------------------------------------------------------------------------------------------ loads, cleaning */

/* The n-th tile of K or V. */
template <int D, int BLOCK>
INLINE void load_keys(uint32_t tiles, uint32_t full, uint32_t empty, const tensor_map *map, int row, int head,
                      int batch, unsigned n) {
    const unsigned slot = slot_of<STAGES>(n);
    mbarrier_wait(empty + slot * 8, turn_of<STAGES>(n) ^ 1);
    mbarrier_expect(full + slot * 8, BLOCK * D * 2);
    load_boxes<D, BLOCK, BLOCK % 64 ? BLOCK : 64>(tiles + slot * BLOCK * D * 2, map, full + slot * 8, row, head, batch);
}

/* The n-th tile of queries; w NULL: that there is none. */
template <int D, int GROUPS, int BLOCK>
INLINE void load_queries(const attention_params_sm90 &all, const forward_work *w, uint32_t base, forward_job *jobs,
                         unsigned n) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const unsigned slot = slot_of<layout::q_stages>(n);
    const uint32_t full = base + layout::barriers + Q_FULL + slot * 8;
    mbarrier_wait(full + Q_EMPTY - Q_FULL, turn_of<layout::q_stages>(n) ^ 1);
    if (!w) {
        jobs[slot_of<2>(n)].s.end = 0;
        mbarrier_arrive(full);
        return;
    }
    jobs[slot_of<2>(n)] = {target_of(all.p, *w), w->s};
    mbarrier_expect(full, layout::q_bytes);
    load_boxes<D, layout::rows>(base + slot * layout::q_bytes, &all.q, full, (int)w->c.first_q + w->row0, w->x, w->n);
}

/* One thread sends for everything, in the order in which it is used. */
template <typename T, int D, int GROUPS, int BLOCK>
INLINE void produce(const attention_params_sm90 &all, uint32_t base, uint32_t barriers, forward_job *jobs) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const attention_params &p = all.p;
    unsigned step = 0, nq = 0, n = 0;
    forward_work w;
    int v_row = 0, v_head = 0, v_batch = 0; /* V follows K of the next step, be that of the next tile */
    while (next_work<layout::rows>(p, &step, &w)) {
        if (w.s.begin == w.s.end)
            continue;
        if (layout::q_stages > 1)
            load_queries<D, GROUPS, BLOCK>(all, &w, base, jobs, nq);
        const int head = w.x / p.group, first = (int)w.c.first_k, end = first + w.s.end;
#pragma unroll 1
        for (int row = first + w.s.begin; row < end; row += BLOCK, n++) {
            load_keys<D, BLOCK>(base + layout::k, barriers + K_FULL, barriers + K_EMPTY, &all.k, row, head, w.n, n);
            if (n)
                load_keys<D, BLOCK>(base + layout::v, barriers + V_FULL, barriers + V_EMPTY, &all.v, v_row, v_head,
                                    v_batch, n - 1);
            if (layout::q_stages == 1 && row == first + w.s.begin) /* waits for the last scores of the tile before */
                load_queries<D, GROUPS, BLOCK>(all, &w, base, jobs, nq);
            v_row = row;
            v_head = head;
            v_batch = w.n;
        }
        nq++;
    }
    if (n)
        load_keys<D, BLOCK>(base + layout::v, barriers + V_FULL, barriers + V_EMPTY, &all.v, v_row, v_head, v_batch,
                            n - 1);
    load_queries<D, GROUPS, BLOCK>(all, NULL, base, jobs, nq);
}

/* Two warps look at every tile of V in turn. */
template <typename T, int D, int GROUPS, int BLOCK>
INLINE void clean(uint32_t base, uint32_t barriers, int *bad, const forward_job *jobs) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    constexpr int QS = layout::q_stages;
    const int thread = (int)threadIdx.x % CLEANERS;
    unsigned n = 0;
    for (unsigned nq = 0;; nq++) {
        mbarrier_wait(barriers + Q_FULL + slot_of<QS>(nq) * 8, turn_of<QS>(nq));
        const forward_span w = jobs[slot_of<2>(nq)].s;
        if (!w.end)
            return;
        __syncwarp();
        if (thread % 32 == 0)
            mbarrier_arrive(barriers + Q_EMPTY + slot_of<QS>(nq) * 8);
#pragma unroll 1
        for (int j0 = w.begin; j0 < w.end; j0 += BLOCK, n++) {
            const unsigned slot = slot_of<STAGES>(n);
            mbarrier_wait(barriers + V_FULL + slot * 8, turn_of<STAGES>(n));
            if (is_cut<BLOCK>(w, j0)) {
                const bool found = clean_rows<T, D, BLOCK, CLEANERS>(base + layout::v + slot * layout::tile_bytes,
                                                                     bad + slot * BLOCK, thread);
                const int any = __any_sync(ALL_LANES, found);
                if (thread % 32 == 0) /* by the thread that arrives: racecheck sees no other order */
                    bad[STAGES * BLOCK + slot * 2 + thread / 32] = any;
                fence_async();
            }
            __syncwarp();
            if (thread % 32 == 0) {
                mbarrier_arrive(barriers + V_CLEAN + slot * 8);
                mbarrier_arrive(barriers + V_EMPTY + slot * 8);
            }
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- softmax */

/* The running softmax of the two rows that a lane has a part of. */
struct softmax_state {
    float max[2], sum[2]; /* sum: this lane's part */
};

/* S -> P = exp2(S·c - max·c). The maximum is allowed to be out of date as long as P stays under 2^8: what counts in the end is
 * that all that is summed has the same. What was summed before has to be multiplied by shrink; false: by ones. */
template <int N> INLINE bool online_softmax(softmax_state *state, float c, float (*s)[4], float shrink[2]) {
    float base[2];
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
        for (int y = 1; y < N / 8; y++)
            top = fmaxf(top, fmaxf(s[y][2 * half], s[y][2 * half + 1]));
        top = quad_max(top);
        const float before = state->max[half];
        const bool more = (top - before) * c > 8.0f;
        state->max[half] = more ? top : before;
        base[half] = state->max[half] == -CUDART_INF_F ? 0.0f : __fmul_rn(state->max[half], c);
        /* not fused, or the rounding of what is subtracted would come in twice */
        shrink[half] = exp2_approx(__fmul_rn(before, c) - base[half]);
        grows |= more;
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

/* What the sums of a row are multiplied with; its log-sum-exp is stored. The sink joins in. */
INLINE float finish_row(const attention_params &p, const forward_target &t, int row, float top, float sum,
                        bool writes) {
    float base = sum == 0.0f ? -CUDART_INF_F : __fmul_rn(top, p.scale_log2), shrink = 1.0f;
    if ((p.a.features & HEDDLE_SINKS) && row < t.rows) {
        const float sink = ((const float *)p.t.sinks)[t.x] * LOG2E, most = fmaxf(base, sink);
        if (sink != -CUDART_INF_F) {
            shrink = base == -CUDART_INF_F ? 0.0f : exp2_approx(base - most);
            sum = sum * shrink + exp2_approx(sink - most);
            base = most;
        }
    }
    if (row >= t.rows)
        sum = 0.0f;
    if (p.t.lse && writes && row < t.all_rows)
        ((float *)p.t.lse)[t.lse + row] = sum == 0.0f ? -CUDART_INF_F : (base + log2f(sum)) * LN2;
    return sum == 0.0f ? 0.0f : shrink / sum;
}

/* 16 bytes of each of 16 rows from row0 on, as far as they are there: what `load` gives for row and chunk. */
template <typename T, int D, typename F>
INLINE void store_chunks(const attention_params &p, const forward_target &t, int row0, const F &load) {
    constexpr int CHUNKS = D / 8;
    const int lane = threadIdx.x % 32, chunk = lane % CHUNKS;
    T *to = (T *)p.t.o + t.o + row0 * p.a.o_stride.s + chunk * 8;
#pragma unroll
    for (int row = lane / CHUNKS; row < 16; row += 32 / CHUNKS) {
        const uint4 x = load(row, chunk);
        if (row0 + row < t.all_rows && chunk * 8 < (int)p.a.dv)
            *(uint4 *)(to + row * p.a.o_stride.s) = x;
    }
}

/* From registers: the four lanes of a row swap, so that each has 16 bytes in one place. */
template <typename T, int D>
INLINE void store_directly(const attention_params &p, const forward_target &t, int row, const float (*o)[4]) {
    const int quarter = threadIdx.x % 4;
    T *to = (T *)p.t.o + t.o + row * p.a.o_stride.s + quarter * 8;
#pragma unroll
    for (int half = 0; half < 2; half++, to += 8 * p.a.o_stride.s)
#pragma unroll
        for (int y = 0; y < D / 8; y += 4) {
            uint32_t r[4];
#pragma unroll
            for (int x = 0; x < 4; x++)
                r[x] = pack_pair(o[y + x][2 * half], o[y + x][2 * half + 1], T());
#pragma unroll
            for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
                for (int x = 0; x < 4; x++)
                    if (!(x & bit)) {
                        const uint32_t got = __shfl_xor_sync(ALL_LANES, quarter & bit ? r[x] : r[x | bit], bit);
                        r[x] = quarter & bit ? got : r[x];
                        r[x | bit] = quarter & bit ? r[x | bit] : got;
                    }
            if (row + half * 8 < t.all_rows && (y + quarter) * 8 < (int)p.a.dv)
                *(uint4 *)(to + y * 8) = make_uint4(r[0], r[1], r[2], r[3]);
        }
}

/* o = O / sum, and lse. A warp's rows go through shared memory, where its rows of Q were, so that whole rows are written. */
template <typename T, int D, int ROWS>
INLINE void store_rows(const attention_params &p, const forward_target &t, const softmax_state &state, float (*o)[4],
                       uint32_t staging) {
    const int lane = threadIdx.x % 32, row0 = (int)threadIdx.x / 32 * 16 - WARPGROUP / 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float by =
            finish_row(p, t, row0 + half * 8 + lane / 4, state.max[half], quad_sum(state.sum[half]), lane % 4 == 0);
#pragma unroll
        for (int y = 0; y < D / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                o[y][2 * half + e] = by == 0.0f ? 0.0f : o[y][2 * half + e] * by;
    }
    if (D > 128) {
        store_directly<T, D>(p, t, row0 + lane / 4, o);
        return;
    }
    staging += row0 * 128;
#pragma unroll
    for (int s = 0; s < D / 16; s++) {
        uint32_t a[1][4];
        pack_fragments<T, 16>(a, o + 2 * s);
        stmatrix4(staging + s / 4 * tile90<D, ROWS>::strip + (lane & 15) * 128 +
                      ((s % 4 * 2 + (lane >> 4)) ^ (lane & 7)) * 16,
                  a[0]);
    }
    __syncwarp();
    store_chunks<T, D>(p, t, row0, [=](int row, int chunk) {
        return load_shared16(staging + chunk / 8 * tile90<D, ROWS>::strip + row * 128 + ((chunk ^ row) & 7) * 16);
    });
}

/* One warp: the tiles that see no key at all. */
template <typename T, int D, int ROWS> INLINE void store_nothing(const attention_params &p) {
    unsigned step = 0;
    forward_work w;
    while (next_work<ROWS>(p, &step, &w)) {
        if (w.s.begin < w.s.end)
            continue;
        const forward_target t = target_of(p, w);
        for (int row0 = 0; row0 < ROWS; row0 += 16) {
            finish_row(p, t, row0 + (int)threadIdx.x % 32, -CUDART_INF_F, 0.0f, threadIdx.x % 32 < 16);
            store_chunks<T, D>(p, t, row0, [](int, int) { return make_uint4(0, 0, 0, 0); });
        }
    }
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

/* S = Q·Kᵀ of the n-th tile of keys: issued. */
template <typename T, int D, int GROUPS, int BLOCK>
INLINE void issue_scores(uint32_t q, uint32_t base, unsigned n, float (*s)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, layout::rows, BLOCK>(s, q, base + layout::k + slot_of<STAGES>(n) * layout::tile_bytes);
    wgmma_commit();
}

/* O += P·V: issued, once V is there. */
template <typename T, int D, int GROUPS, int BLOCK>
INLINE void issue_sums(uint32_t base, unsigned n, uint32_t (*a)[4], float (*o)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const unsigned slot = slot_of<STAGES>(n);
    mbarrier_wait(base + layout::barriers + V_FULL + slot * 8, turn_of<STAGES>(n));
    wgmma_fence();
    warpgroup_columns<T, D, BLOCK, BLOCK>(o, a, base + layout::v + slot * layout::tile_bytes);
    wgmma_commit();
}

/* The scores are there: K is free, and a single Q after its last; what is not seen is taken out of them. */
template <int D, int GROUPS, int BLOCK>
INLINE void receive_scores(const forward_span &w, int group, int j0, uint32_t base, unsigned n, float (*s)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const unsigned slot = slot_of<STAGES>(n);
    pin_all<BLOCK / 8>(s);
    release(base + layout::barriers + K_EMPTY + slot * 8);
    if (layout::q_stages == 1 && j0 + BLOCK >= w.end)
        release(base + layout::barriers + Q_EMPTY);
    if (is_cut<BLOCK>(w, j0)) {
        mbarrier_wait(base + layout::barriers + V_CLEAN + slot * 8, turn_of<STAGES>(n));
        if (load_shared4(base + layout::any + slot * 8) | load_shared4(base + layout::any + slot * 8 + 4))
            mark_scores<BLOCK>(base + layout::bad + slot * BLOCK * 4, s);
        if (is_cut_above<BLOCK>(w, j0))
            mask_above<BLOCK>(w.hi, w.sk, group * 64, j0, s);
        if (is_cut_below(w, j0))
            mask_below<BLOCK>(w.lo, group * 64, j0, s);
    }
}

/* From the first scores of a tile to its last P. *n: the tile of keys that P is of. */
template <typename T, int D, int GROUPS, int BLOCK>
INLINE void compute(float c, const forward_span &w, int group, uint32_t q, uint32_t base, unsigned *n,
                    softmax_state *state, float (*s)[4], uint32_t (*a)[4], float (*o)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const uint32_t barriers = base + layout::barriers;
    float shrink[2];
    receive_scores<D, GROUPS, BLOCK>(w, group, w.begin, base, *n, s);
    *state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    online_softmax<BLOCK>(state, c, s, shrink);
    pack_fragments<T, BLOCK>(a, s);
    zero_all<D / 8>(o);
#pragma unroll 1
    for (int j0 = w.begin + BLOCK; j0 < w.end; j0 += BLOCK, ++*n) {
        mbarrier_wait(barriers + K_FULL + slot_of<STAGES>(*n + 1) * 8, turn_of<STAGES>(*n + 1));
        take_turn<GROUPS>(group);
        pin_all<BLOCK / 16>(a);
        issue_scores<T, D, GROUPS, BLOCK>(q, base, *n + 1, s);
        issue_sums<T, D, GROUPS, BLOCK>(base, *n, a, o);
        pass_turn<GROUPS>(group);
        wgmma_wait<1>();
        receive_scores<D, GROUPS, BLOCK>(w, group, j0, base, *n + 1, s);
        const bool grows = online_softmax<BLOCK>(state, c, s, shrink);
        pin_all<BLOCK / 8>(s); /* or the exponentials would be left for after the wait */
        hold_until(state->sum[0] + state->sum[1]);
        wgmma_wait<0>();
        pin_all<D / 8>(o);
        pin_all<BLOCK / 16>(a);
        release(barriers + V_EMPTY + slot_of<STAGES>(*n) * 8);
        if (grows) {
#pragma unroll
            for (int y = 0; y < D / 8; y++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    o[y][e] *= shrink[e / 2];
        }
        pack_fragments<T, BLOCK>(a, s);
    }
}

template <typename T, int D, int GROUPS, int BLOCK>
INLINE void consume(const attention_params &p, int group, uint32_t base, const forward_job *jobs) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    constexpr int QS = layout::q_stages;
    const uint32_t barriers = base + layout::barriers, q0 = base + group * 64 * 128;
    unsigned nq = 0, n = 0;
    softmax_state state;
    float s[BLOCK / 8][4], o[D / 8][4];
    uint32_t a[BLOCK / 16][4];
    if (group == GROUPS - 1)
        pass_turn<GROUPS>(group);
    mbarrier_wait(barriers + Q_FULL, 0);
    forward_span w = jobs[0].s;
    if (!w.end)
        return;
    mbarrier_wait(barriers + K_FULL, 0);
    issue_scores<T, D, GROUPS, BLOCK>(q0, base, 0, s);
    wgmma_wait<0>();
    for (; w.end; n++, nq++) {
        compute<T, D, GROUPS, BLOCK>(p.scale_log2, w, group, q0 + slot_of<QS>(nq) * layout::q_bytes, base, &n, &state,
                                     s, a, o);
        pin_all<BLOCK / 16>(a);
        issue_sums<T, D, GROUPS, BLOCK>(base, n, a, o);
        mbarrier_wait(barriers + Q_FULL + slot_of<QS>(nq + 1) * 8, turn_of<QS>(nq + 1));
        w = jobs[slot_of<2>(nq + 1)].s;
        if (w.end)
            mbarrier_wait(barriers + K_FULL + slot_of<STAGES>(n + 1) * 8, turn_of<STAGES>(n + 1));
        /* After the last tile, a product of what lies there, which nobody looks at: a branch would make the compiler wait. */
        issue_scores<T, D, GROUPS, BLOCK>(q0 + slot_of<QS>(nq + 1) * layout::q_bytes, base, n + 1, s);
        wgmma_wait<1>();
        pin_all<D / 8>(o);
        release(barriers + V_EMPTY + slot_of<STAGES>(n) * 8);
        if (QS > 1)
            barrier_sync(1 + GROUPS + group, WARPGROUP); /* the other warps, too, have done with Q */
        store_rows<T, D, layout::rows>(p, jobs[slot_of<2>(nq)].t, state, o, base + slot_of<QS>(nq) * layout::q_bytes);
        if (QS > 1) {
            fence_async();
            __syncwarp();
            release(barriers + Q_EMPTY + slot_of<QS>(nq) * 8);
        }
        hold_until(state.sum[0]); /* what is stored is to overlap with the product */
        wgmma_wait<0>();
        pin_all<BLOCK / 8>(s);
    }
}

template <typename T, int D, int GROUPS, int BLOCK> INLINE void attention_forward90(const attention_params_sm90 &all) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    extern __shared__ char shared[];
    const uint32_t base = align_tiles(shared_address(shared)), barriers = base + layout::barriers;
    char *const from = shared + (base - shared_address(shared));
    int *bad = (int *)(from + layout::bad);
    forward_job *jobs = (forward_job *)(from + layout::jobs);
    static_assert(sizeof(forward_job) <= 64, "two of them fit");
    if (threadIdx.x == 0) {
        for (int x = 0; x < STAGES * 8; x += 8) {
            mbarrier_init(barriers + Q_FULL + x, 1);
            mbarrier_init(barriers + Q_EMPTY + x, GROUPS * 4 + CLEANERS / 32);
            mbarrier_init(barriers + K_FULL + x, 1);
            mbarrier_init(barriers + K_EMPTY + x, GROUPS * 4);
            mbarrier_init(barriers + V_FULL + x, 1);
            mbarrier_init(barriers + V_CLEAN + x, CLEANERS / 32);
            mbarrier_init(barriers + V_EMPTY + x, GROUPS * 4 + CLEANERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    /* Together no more registers than the block was launched with: 168 or 128 a thread. */
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    if (warp < 4) {
        registers_fewer<GROUPS == 2 ? 56 : 32>();
        if (threadIdx.x == 0)
            produce<T, D, GROUPS, BLOCK>(all, base, barriers, jobs);
        else if (warp == 1)
            store_nothing<T, D, layout::rows>(all.p);
        else if (warp >= 2)
            clean<T, D, GROUPS, BLOCK>(base, barriers, bad, jobs);
    } else {
        registers_more<GROUPS == 2 ? 224 : 160>();
        consume<T, D, GROUPS, BLOCK>(all.p, warp / 4 - 1, base, jobs);
    }
}

#define K(pass, dtype, dim, variant, family, warps, tiles, block)                                                      \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm90(                                                 \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        wait_for_earlier_grid();                                                                                       \
        attention_forward90<dtype, dim, tiles, block>(all);                                                            \
    }
#define ATTENTION_FWD90_LIST
#include "attention.def"

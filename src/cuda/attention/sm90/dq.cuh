/* SPDX-License-Identifier: Apache-2.0
 * dQ for Hopper without atomics, and what its kernel and that of dK and dV share: slots, barriers. */
#ifndef HEDDLE_CUDA_ATTENTION_DQ_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_DQ_SM90_CUH

#include "cuda/attention/sm90/bwd.cuh"

/* Shared memory: OWN tiles of 128 rows that stay; slots of BLOCK rows; NUMBERS floats for each row of a slot. */
template <int D, int BLOCK, int OWN, int SLOTS, int NUMBERS> struct backward90 {
    static constexpr int own_bytes = tile90<D, OWN_ROWS>::bytes, slot_bytes = tile90<D, BLOCK>::bytes;
    static constexpr int slots = OWN * own_bytes;
    static constexpr int numbers = slots + SLOTS * slot_bytes;
    static constexpr int barriers = numbers + SLOTS * NUMBERS * BLOCK * 4;
    static constexpr int full = barriers, empty = full + SLOTS * 8, own_full = empty + SLOTS * 8,
                         own_empty = own_full + 8;
    static constexpr int bytes = own_empty + 8;
    static_assert(bytes == sm90_backward_bytes(D, BLOCK, OWN, SLOTS, NUMBERS), "as the plan counts");
    static constexpr int options = bytes, steps = options + sizeof(query_options); /* full; steps: dq alone */
    static_assert(bytes + SM90_BACKWARD_OPTIONS <= 227 * 1024, "more than a multiprocessor has");
};

/* A slot is filled by the copy engine and the 32 lanes that fetch, and released by every lane. */
template <typename layout, int SLOTS> INLINE void make_barriers(uint32_t smem) {
    if (threadIdx.x == 0) {
        for (int x = 0; x < SLOTS; x++) {
            mbarrier_init(smem + layout::full + x * 8, 1 + 32);
            mbarrier_init(smem + layout::empty + x * 8, CONSUMERS);
        }
        mbarrier_init(smem + layout::own_full, 1);
        mbarrier_init(smem + layout::own_empty, CONSUMERS / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
}

/* Where a warpgroup is among its block's tiles of keys and of queries. */
struct key_state {
    uint32_t smem, own; /* shared memory; this warpgroup's rows of K there */
    int row0;           /* this lane's first key */
    ring r;
    /* full: of all steps, and of the one whose weights are made; how many there were */
    const key_options *steps, *now;
    unsigned count;
};

template <typename T, int D, int BLOCK, typename layout>
INLINE void await_slot(uint32_t smem, const ring &r, bool cut, float *mark, int second) {
    mbarrier_wait(smem + layout::full + r.slot * 8, r.turn);
    if (cut)
        clean_slot<T, D, BLOCK>(smem + layout::slots + r.slot * layout::slot_bytes, mark, second);
}

/* ----------------------------------------------------------------------------------------------------------- dQ */

struct query_work {
    place c;
    int x, query0;
    span s; /* of keys */
};

template <int BLOCK, bool FULL, int OWN = OWN_ROWS>
INLINE bool find_queries(const attention_params &p, unsigned step, query_work *work) {
    query_work &w = *work;
    int tile;
    unsigned unit;
    const unsigned h = (unsigned)p.a.h;
    if (!take_tile(step, {blockIdx.x, gridDim.x}, (unsigned)p.tiles_q, (unsigned)p.a.b * h, true, &tile, &unit))
        return false;
    w.query0 = tile * OWN;
    w.x = (int)(unit % h);
    w.c = find_place(p, unit / h);
    const int query1 = min(w.query0 + OWN, w.c.sq);
    w.s = {0, 0, w.query0 + OWN - 1 + w.c.lo, w.query0 - BLOCK + 1 + w.c.hi, w.c.lo, w.c.hi, w.c.sq};
    if (w.query0 < query1) {
        w.s.begin = max(0, min(w.query0 + w.c.lo, w.c.sk));
        w.s.end = max(w.s.begin, min(query1 + w.c.hi, w.c.sk));
        if (FULL)
            w.s.begin = w.s.begin < w.s.end ? w.s.begin / BLOCK * BLOCK : w.s.end; /* as tiles of the mask */
    }
    w.s.whole_to = w.query0 + OWN > w.c.sq ? -1 : min(w.s.whole_to, w.s.end - BLOCK);
    return true;
}

/* full: the next tile of keys from j0 on of which a key is seen; w.s.end or more: there is none. */
template <int BLOCK> INLINE int next_keys(const uint8_t *kinds, const span &w, int j0) {
    while (kinds && j0 < w.end && kinds[j0 / BLOCK] == TILE_EMPTY)
        j0 += BLOCK;
    return j0;
}

/* full: what is said of it. */
template <int BLOCK>
INLINE int tell_keys(const attention_params &p, const uint8_t *kinds, const span &w, int j0, int next) {
    const bool bits = kinds && kinds[j0 / BLOCK] != TILE_FULL;
    return j0 | (bits ? STEP_BITS : 0) | (next >= w.end ? STEP_LAST : 0) |
           (bits || is_cut(w, j0) || (p.a.features & HEDDLE_BIAS) ? STEP_CUT : 0);
}

template <typename T, int D, int BLOCK, int SLOTS, bool FULL>
INLINE void fetch_dq(const attention_params_sm90 &all, uint32_t smem, char *shared) {
    typedef backward90<D, BLOCK, 2, SLOTS, 1> layout;
    const attention_params &p = all.p;
    float *const marks = (float *)(shared + layout::numbers);
    const int lane = threadIdx.x % 32;
    ring r = {0, 0};
    int own_turn = 0;
    unsigned count = 0;
    query_work w;
    for (unsigned turn = 0; find_queries<BLOCK, FULL>(p, turn, &w); turn++) {
        const int n = p.a.features & HEDDLE_VARLEN ? 0 : (int)w.c.n, y = w.x / p.group, first_k = (int)w.c.first_k;
        if (w.s.begin >= w.s.end)
            continue;
        const uint8_t *kinds = NULL;
        int begin = w.s.begin;
        if (FULL) { /* where nothing is seen, one tile says so */
            kinds = find_kinds(p.seen_by_queries, w.c.n, w.x, w.query0 / OWN_ROWS);
            const int seen = next_keys<BLOCK>(kinds, w.s, begin);
            begin = seen < w.s.end ? seen : begin;
        }
        if (lane == 0) {
            const int row = (int)w.c.first_q + w.query0;
            mbarrier_wait(smem + layout::own_empty, own_turn ^ 1);
            if (FULL)
                *(query_options *)(shared + layout::options) = find_options(p, w.c, w.x, w.query0, sizeof(T));
            mbarrier_expect(smem + layout::own_full, layout::slots);
            load_boxes<D, OWN_ROWS>(smem, &all.q, smem + layout::own_full, row, w.x, n);
            load_boxes<D, OWN_ROWS>(smem + layout::own_bytes, &all.dout, smem + layout::own_full, row, w.x, n);
        }
        own_turn ^= 1;
#pragma unroll 1
        for (int j0 = begin, next; j0 < w.s.end; j0 = FULL ? next : j0 + BLOCK, count++) {
            next = FULL ? next_keys<BLOCK>(kinds, w.s, j0 + BLOCK) : j0 + BLOCK;
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const uint32_t bar = smem + layout::full + r.slot * 8;
                mbarrier_wait(smem + layout::empty + r.slot * 8, r.turn ^ 1);
                if (FULL && x == 0 && lane == 0)
                    ((int *)(shared + layout::steps))[count % STEPS] = tell_keys<BLOCK>(p, kinds, w.s, j0, next);
                for (int z = lane; z < BLOCK && x == 0; z += 32)
                    marks[r.slot * BLOCK + z] = 0.0f;
                mbarrier_arrive(bar);
                if (lane == 0) {
                    mbarrier_expect(bar, layout::slot_bytes);
                    load_boxes<D, BLOCK>(smem + layout::slots + r.slot * layout::slot_bytes, x ? &all.v : &all.k, bar,
                                         first_k + j0, y, n);
                }
                advance<SLOTS>(&r);
            }
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
            s[y][e] = weight_of<bf16>(s[y][e], scale, row.base[e / 2], row.rest[e / 2]);
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
template <typename T, int D, int BLOCK, int SLOTS, bool FIRST, bool FULL, typename layout>
INLINE void query_step(const attention_params &p, const query_options &o, const dropout_state &drop, int group,
                       int step, const span &w, key_state *k, int j0, bool cut, const float *marks,
                       const row_numbers &row, int done, bool first, float (*s)[4], uint32_t (*ds)[4]) {
    constexpr bool EARLY = D * BLOCK <= 128 * 64; /* registers for dP beside what the last step's product reads */
    const float scale = p.scale_log2;
    float dp[BLOCK / 8][4];
    read_ahead<BLOCK> read;
    bool low = false;
    if (FULL)
        read_options<BLOCK>(p, o, group * 64, step, &read);
    kept_bits<BLOCK> kept;
    if (FULL)
        kept = keep_queries<BLOCK>(p, o, drop, group * 64, step & ~STEP_FLAGS);
    if (FIRST)
        wgmma_wait<0>();
    else
        wgmma_wait<1>();
    pin_all<BLOCK / 8>(s);
    if (FULL)
        low = apply_options<T, BLOCK>(p, o, group * 64, step, w.end, s);
    if (cut)
        query_weights<true, BLOCK>(scale, w, k->row0, j0, row, s);
    else
        query_weights<false, BLOCK>(scale, w, k->row0, j0, row, s);
    if (FULL)
        hide_queries<T, BLOCK>(p, o, group * 64, step, w.end, low, read, s);
    if (!FIRST && !(FULL && first) && !EARLY) {
        wgmma_wait<0>();
        release_each(k->smem + layout::empty + done * 8);
    }
    mbarrier_wait(k->smem + layout::full + k->r.slot * 8, k->r.turn);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(dp, k->own + layout::own_bytes,
                                                 k->smem + layout::slots + k->r.slot * layout::slot_bytes);
    wgmma_commit();
    if (!FIRST && !(FULL && first) && EARLY) {
        wgmma_wait<1>();
        release_each(k->smem + layout::empty + done * 8);
    }
    wgmma_wait<0>();
    pin_all<BLOCK / 8>(dp);
    release_each(k->smem + layout::empty + k->r.slot * 8);
    if (FULL && p.drops)
        drop_elements(kept, p.keep_scale, dp);
    if (cut)
        query_gradients<true, BLOCK>(row, marks, s, dp);
    else
        query_gradients<false, BLOCK>(row, marks, s, dp);
    if (FULL && p.softcap > 0.0f)
        cap_query_gradients<BLOCK>(p, row.base, row.rest, s, dp);
    pack_fragments<T, BLOCK>(ds, dp);
}

/* dQ over all tiles of keys. */
template <typename T, int D, int BLOCK, int SLOTS, bool FULL, typename layout>
INLINE void sum_queries(const attention_params &p, const query_options &o, const int *steps, int group, const span &w,
                        key_state *k, float *marks, const row_numbers &row, float (*dq)[4]) {
    const dropout_state &drop = *(const dropout_state *)(steps + STEPS);
    float s[BLOCK / 8][4];
    uint32_t ds[BLOCK / 16][4];
    int k_slot = k->r.slot, step = 0, j0 = w.begin;
    bool cut = is_cut(w, w.begin), first = true;
    if (!FULL) { /* by itself; full: so much code that it is there once */
        await_slot<T, D, BLOCK, layout>(k->smem, k->r, cut, marks + k_slot * BLOCK, 0);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->smem + layout::slots + k_slot * layout::slot_bytes);
        wgmma_commit();
        advance<SLOTS>(&k->r);
        query_step<T, D, BLOCK, SLOTS, true, FULL, layout>(p, o, drop, group, step, w, k, j0, cut,
                                                           marks + k_slot * BLOCK, row, 0, true, s, ds);
        advance<SLOTS>(&k->r);
        j0 += BLOCK;
        first = false;
    }
#pragma unroll 1
    for (; FULL ? first || !(step & STEP_LAST) : j0 < w.end; j0 += BLOCK) {
        const int done = k_slot;
        k_slot = k->r.slot;
        if (FULL) {
            mbarrier_wait(k->smem + layout::full + k_slot * 8, k->r.turn);
            step = steps[k->count++ % STEPS];
            j0 = step & ~STEP_FLAGS;
        }
        cut = FULL ? step & STEP_CUT : is_cut(w, j0);
        await_slot<T, D, BLOCK, layout>(k->smem, k->r, cut, marks + k_slot * BLOCK, 0);
        wgmma_fence();
        warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(s, k->own, k->smem + layout::slots + k_slot * layout::slot_bytes);
        wgmma_commit();
        if (!FULL || __shfl_sync(ALL_LANES, (int)!first, 0)) { /* seen to be uniform (C7520) */
            if (FULL)
                wgmma_fence();
            warpgroup_columns<T, D, BLOCK, BLOCK>(dq, ds, k->smem + layout::slots + done * layout::slot_bytes);
        }
        wgmma_commit();
        advance<SLOTS>(&k->r);
        query_step<T, D, BLOCK, SLOTS, false, FULL, layout>(p, o, drop, group, step, w, k, j0, cut,
                                                            marks + k_slot * BLOCK, row, done, first, s, ds);
        advance<SLOTS>(&k->r);
        first = false;
    }
    wgmma_fence();
    warpgroup_columns<T, D, BLOCK, BLOCK>(dq, ds, k->smem + layout::slots + k_slot * layout::slot_bytes);
    wgmma_commit();
    wgmma_wait<0>();
    release_each(k->smem + layout::empty + k_slot * 8);
}

template <typename T, int D, int BLOCK, int SLOTS, bool FULL>
INLINE void work_dq(const attention_params &p, char *shared) {
    typedef backward90<D, BLOCK, 2, SLOTS, 1> layout;
    float *const marks = (float *)(shared + layout::numbers);
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    key_state k = {shared_address(shared), shared_address(shared) + group * 64 * 128, 0, {0, 0}};
    int own_turn = 0;
    query_work w;
    for (unsigned turn = 0; find_queries<BLOCK, FULL>(p, turn, &w); turn++) {
        float dq[D / 8][4];
        zero_all<D / 8>(dq);
        if (w.s.begin < w.s.end) {
            row_numbers row;
            k.row0 = w.query0 + group * 64 + fragment_row();
            load_numbers(p, w, k.row0, &row);
            mbarrier_wait(k.smem + layout::own_full, own_turn);
            own_turn ^= 1;
            sum_queries<T, D, BLOCK, SLOTS, FULL, layout>(p, *(const query_options *)(shared + layout::options),
                                                          (const int *)(shared + layout::steps), group, w.s, &k, marks,
                                                          row, dq);
            release(k.smem + layout::own_empty);
        }
        pin_all<D / 8>(dq);
        query_work again;
        find_queries<BLOCK, FULL>(p, opaque(turn), &again);
        end_tile<T, D>(p.adds, p.t.dq, row_at(p.a.dq_stride, again.c.n, again.x, again.c.first_q + again.query0),
                       p.a.dq_stride.s, group * 64 + (int)threadIdx.x % WARPGROUP / 32 * 16,
                       again.c.all_sq - again.query0, (int)p.a.d, p.scale, dq);
    }
}

template <typename T, int D, int BLOCK, int SLOTS, bool FULL>
INLINE void attention_dq(const attention_params_sm90 &all) {
    typedef backward90<D, BLOCK, 2, SLOTS, 1> layout;
    extern __shared__ __align__(1024) char shared[];
    if (FULL)
        put_dropout(all.p, (int *)(shared + layout::steps) + STEPS);
    make_barriers<layout, SLOTS>(shared_address(shared));
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 32)
            fetch_dq<T, D, BLOCK, SLOTS, FULL>(all, shared_address(shared), shared);
    } else {
        registers_more<240>();
        work_dq<T, D, BLOCK, SLOTS, FULL>(all.p, shared);
    }
}

#endif

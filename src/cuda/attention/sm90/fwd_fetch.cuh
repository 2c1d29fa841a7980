/* SPDX-License-Identifier: Apache-2.0
 * Of the forward for Hopper: the thread that sends for everything, and the warps that clean tiles of V. */
#ifndef HEDDLE_CUDA_ATTENTION_FWD_FETCH_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_FWD_FETCH_SM90_CUH

#include "cuda/attention/sm90/fwd.cuh"

/* full: what lies behind the barriers. */
template <typename layout> INLINE query_options *options_in(const forward_job *jobs) {
    return (query_options *)((char *)jobs + (layout::options - layout::jobs));
}
template <typename layout> INLINE int *steps_in(const forward_job *jobs) {
    return (int *)((char *)jobs + (layout::steps - layout::jobs));
}

/* ------------------------------------------------------------------------------------------------ loads, cleaning */

/* The n-th tile of K or V. */
template <int D, int BLOCK, typename layout>
INLINE void load_keys(uint32_t tiles, uint32_t full, uint32_t empty, const tensor_map *map, int row, int head,
                      int batch, unsigned n) {
    const unsigned slot = slot_of<layout::stages>(n);
    mbarrier_wait(empty + slot * 8, turn_of<layout::stages>(n) ^ 1);
    mbarrier_expect(full + slot * 8, tile90<D, BLOCK>::bytes);
    load_boxes<D, BLOCK, BLOCK % 64 ? BLOCK : 64>(tiles + slot * tile90<D, BLOCK>::bytes, map, full + slot * 8, row,
                                                  head, batch);
}

/* The n-th tile of queries; w NULL: that there is none. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL>
INLINE void load_queries(const attention_params_sm90 &all, const forward_work *w, uint32_t smem, forward_job *jobs,
                         unsigned n) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const unsigned slot = slot_of<layout::q_stages>(n);
    const uint32_t full = smem + layout::barriers + Q_FULL + slot * 8;
    mbarrier_wait(full + Q_EMPTY - Q_FULL, turn_of<layout::q_stages>(n) ^ 1);
    if (!w) {
        /* All of it: a warpgroup looks at what it would skip before it looks at `end`. */
        jobs[slot_of<2>(n)].s = {0, 0, 0, 0, 0, 0};
        mbarrier_arrive(full);
        return;
    }
    jobs[slot_of<2>(n)] = {target_of(all.p, *w), w->s};
    if (FULL)
        options_in<layout>(jobs)[slot_of<2>(n)] = find_options(all.p, w->c, w->x, w->row0, sizeof(T));
    mbarrier_expect(full, layout::q_bytes);
    load_boxes<D, layout::rows>(smem + slot * layout::q_bytes, &all.q, full, (int)w->c.first_q + w->row0, w->x, w->n);
}

/* full: the bias of the n-th tile of keys, for each warpgroup, and of the one after it as far as the second-level cache. */
template <int GROUPS, int BLOCK, typename layout>
INLINE void load_bias(const attention_params_sm90 &all, const forward_work &w, int j0, int next, uint32_t smem,
                      unsigned n) {
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        const uint32_t full = smem + layout::bias_full + group * 8,
                       to = smem + layout::bias + group * layout::bias_bytes;
        const bias_place from = find_box(all.p, j0, w.row0 + group * 64, w.x, w.c.n);
        mbarrier_wait(full + layout::bias_empty - layout::bias_full, turn_of<1>(n) ^ 1);
        mbarrier_expect(full, layout::bias_bytes);
        for (int x = 0; x < BLOCK; x += 64) {
            tma_load4(to + x / 64 * SM90_BIAS_BOX, &all.bias, full, from.key + x, from.row, from.x, from.n);
            if (next >= w.s.begin)
                tma_prefetch4(&all.bias, next + x, from.row, from.x, from.n);
        }
    }
}

/* One thread sends for everything, in the order in which it is used. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL>
INLINE void produce(const attention_params_sm90 &all, uint32_t smem, uint32_t barriers, forward_job *jobs) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const attention_params &p = all.p;
    unsigned step = 0, nq = 0, n = 0;
    forward_work w;
    int v_row = 0, v_head = 0, v_batch = 0; /* V follows K of the next step, be that of the next tile */
    const bool takes = (FULL & WITH_MASK) && p.seen_by_queries.taken;
    while (takes ? take_work<layout::rows>(p, &w) : next_work<layout::rows>(p, &step, &w)) {
        if (w.s.begin == w.s.end)
            continue;
        if (FULL)
            w.s.begin = w.s.begin / BLOCK * BLOCK; /* as tiles of the mask */
        if (layout::q_stages > 1)
            load_queries<T, D, GROUPS, BLOCK, FULL>(all, &w, smem, jobs, nq);
        const int head = w.x / p.group;
        int last = last_tile<BLOCK>(w.s);
        const uint8_t *kinds = NULL;
        if (FULL) { /* where nothing is seen, one tile says so */
            if (FULL & WITH_MASK)
                kinds = find_kinds(p.seen_by_queries, w.c.n, w.x, w.row0 / layout::rows);
            const int seen = next_seen<BLOCK>(kinds, w.s, last);
            last = seen < w.s.begin ? last : seen;
        }
#pragma unroll 1
        for (int j0 = last, next; j0 >= w.s.begin; j0 = next, n++) {
            const int row = (int)w.c.first_k + j0;
            next = FULL ? next_seen<BLOCK>(kinds, w.s, j0 - BLOCK) : j0 - BLOCK;
            if (FULL) /* nobody has use any more for what was told STEPS before */
                steps_in<layout>(jobs)[n % STEPS] = step_of<BLOCK, FULL>(p, kinds, w.s, j0, next);
            load_keys<D, BLOCK, layout>(smem + layout::k, barriers + K_FULL, barriers + K_EMPTY, &all.k, row, head, w.n,
                                        n);
            if (n)
                load_keys<D, BLOCK, layout>(smem + layout::v, barriers + V_FULL, barriers + V_EMPTY, &all.v, v_row,
                                            v_head, v_batch, n - 1);
            if (layout::q_stages == 1 && j0 == last) /* waits for the last scores of the tile before */
                load_queries<T, D, GROUPS, BLOCK, FULL>(all, &w, smem, jobs, nq);
            if (has_boxes<FULL>(p))
                load_bias<GROUPS, BLOCK, layout>(all, w, j0, next, smem, n);
            v_row = row;
            v_head = head;
            v_batch = w.n;
        }
        nq++;
    }
    if (n)
        load_keys<D, BLOCK, layout>(smem + layout::v, barriers + V_FULL, barriers + V_EMPTY, &all.v, v_row, v_head,
                                    v_batch, n - 1);
    load_queries<T, D, GROUPS, BLOCK, FULL>(all, NULL, smem, jobs, nq);
}

/* dropout alone: a warpgroup makes the bits of each tile, in the order in which the tiles are sent for. */
template <int D, int GROUPS, int BLOCK>
INLINE void make_rows_ahead(const attention_params &p, uint32_t smem, char *kept, const dropout_state &state) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const int warp = (int)threadIdx.x % WARPGROUP / 32;
    unsigned step = 0, n = 0;
    forward_work w;
    while (next_work<layout::rows>(p, &step, &w)) {
        if (w.s.begin == w.s.end)
            continue;
        const uint32_t head = dropout_head(p, w.c.n, w.x);
        const int begin = w.s.begin / BLOCK * BLOCK;
        w.s.begin = begin;
#pragma unroll 1
        for (int j0 = last_tile<BLOCK>(w.s); j0 >= begin; j0 -= BLOCK, n++) {
            const unsigned slot = slot_of<KEPT_SLOTS>(n);
            mbarrier_wait(smem + layout::kept_empty + slot * 8, turn_of<KEPT_SLOTS>(n) ^ 1);
            put_kept_rows<layout::rows, BLOCK>(p, state, head, w.row0, j0, kept + slot * layout::kept_bytes, warp, 4);
            mbarrier_arrive(smem + layout::kept_full + slot * 8);
        }
    }
}

/* Two warps look at every tile of V that is cut. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL>
INLINE void clean(const attention_params &p, uint32_t smem, uint32_t barriers, uint32_t *bad, const forward_job *jobs) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    constexpr int QS = layout::q_stages;
    const int thread = (int)threadIdx.x % CLEANERS;
    unsigned n = 0, cuts = 0;
    for (unsigned nq = 0;; nq++) {
        mbarrier_wait(barriers + Q_FULL + slot_of<QS>(nq) * 8, turn_of<QS>(nq));
        const forward_span w = jobs[slot_of<2>(nq)].s;
        if (!w.end)
            return;
        __syncwarp();
        if (thread % 32 == 0)
            mbarrier_arrive(barriers + Q_EMPTY + slot_of<QS>(nq) * 8);
        int step = 0;
#pragma unroll 1
        for (int j0 = last_tile<BLOCK>(w); FULL ? !(step & STEP_LAST) : j0 >= w.begin; j0 -= BLOCK, n++) {
            const unsigned slot = slot_of<layout::stages>(n);
            mbarrier_wait(barriers + V_FULL + slot * 8, turn_of<layout::stages>(n));
            if (FULL) {
                step = steps_in<layout>(jobs)[n % STEPS];
                if (has_bias<FULL>(p) && !has_boxes<FULL>(p) &&
                    !(step & STEP_LAST)) { /* of the next tile, whose K has been sent for */
                    const query_options &o = options_in<layout>(jobs)[slot_of<2>(nq)];
                    prefetch_bias<T>(p, o.bias, 0, o.last, layout::rows,
                                     steps_in<layout>(jobs)[(n + 1) % STEPS] & ~STEP_FLAGS, BLOCK, thread, CLEANERS);
                }
            }
            if (FULL ? step & STEP_CUT : is_cut<BLOCK>(w, j0)) {
                clean_rows<T, D, BLOCK, CLEANERS>(smem + layout::v + slot * layout::tile_bytes, bad + slot * 4, thread);
                fence_async();
                __syncwarp();
                if (thread % 32 == 0)
                    mbarrier_arrive(barriers + V_CLEAN + slot_of<layout::stages>(cuts) * 8);
                cuts++;
            }
            __syncwarp();
            if (thread % 32 == 0)
                mbarrier_arrive(barriers + V_EMPTY + slot * 8);
        }
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * What one warp fetches for the backward kernels for Hopper that own keys: these, and the queries that stream by. */
#ifndef HEDDLE_CUDA_ATTENTION_FETCH_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_FETCH_SM90_CUH

#include "cuda/attention/sm90/bwd.cuh"

/* A warp copies what is known of BLOCK rows from `at` on: base, rest and D; zeros after the first `count`. */
template <int BLOCK>
INLINE void fetch_numbers(const attention_params &p, int64_t at, int count, uint32_t to, uint32_t barrier) {
    const float *const from[] = {p.base, p.rest, p.dsum};
#pragma unroll
    for (int x = 0; x < 3; x++)
#pragma unroll
        for (int z = (int)threadIdx.x % 32; z < BLOCK; z += 32)
            cp_async4(to + (x * BLOCK + z) * 4, from[x] + (z < count ? at + z : 0), z < count ? 4 : 0);
    cp_async_arrive(barrier);
}

/* Q, dO and the numbers of a step, where Q and dO have a slot and a barrier each in a stage. */
template <int D, int BLOCK, int STAGES, typename layout>
INLINE void fetch_stage(const attention_params_sm90 &all, const key_work &w, int x, int i0, int64_t at, uint32_t smem,
                        int n, ring *r) {
    const int lane = threadIdx.x % 32, first_q = (int)w.c.first_q;
    const uint32_t bar = smem + layout::full + r->slot * 16,
                   to = smem + layout::slots + r->slot * 2 * layout::slot_bytes;
    mbarrier_wait(smem + layout::empty + r->slot * 16, r->turn ^ 1);
    if (lane == 0) {
        mbarrier_expect(bar, layout::slot_bytes);
        load_boxes<D, BLOCK>(to, &all.q, bar, first_q + i0, x, n);
    }
    fetch_numbers<BLOCK>(all.p, at + i0, w.s.end - i0, smem + layout::numbers + r->slot * 3 * BLOCK * 4, bar);
    if (lane ==
        0) { /* who waits is who sends: what comes next asks nothing of the others, who might see a phase too late */
        mbarrier_wait(smem + layout::empty + r->slot * 16 + 8, r->turn ^ 1);
        mbarrier_expect(bar + 8, layout::slot_bytes);
        load_boxes<D, BLOCK>(to + layout::slot_bytes, &all.dout, bar + 8, first_q + i0, x, n);
    }
    advance<STAGES>(r);
}

/* With options a lane of the warp has a step, as flags and kinds are asked of memory to tell of it: of 32 in a row of head x those that are
 * left of what somebody sees, a bit each, and what is to be said of this lane's. */
struct key_window {
    int x, i0;     /* head; the first query of lane 0's */
    uint32_t seen; /* 0: none are left in any head */
    int step;      /* as step_flags has it */
};

/* The window of `at`, whatever it shows. */
template <int BLOCK> INLINE key_window open_window(const attention_params &p, const key_work &w, int x, int i0) {
    const int at = i0 + (int)threadIdx.x % 32 * BLOCK;
    const bool there = at < w.s.end;
    const tile_kind kind = there ? kind_of_queries<BLOCK>(p, w.c, w.tile, x, at) : TILE_EMPTY;
    const int step = there ? step_flags<BLOCK>(p, w, x, at, kind) : 0;
    return {x, i0, __ballot_sync(ALL_LANES, kind != TILE_EMPTY), step};
}

/* From this one on, which has nothing left, the first that has. */
template <int BLOCK> INLINE key_window next_window(const attention_params &p, const key_work &w, key_window at) {
    while (!at.seen) {
        at.i0 += 32 * BLOCK;
        if (at.i0 >= w.s.end) {
            at.i0 = w.s.begin;
            if (++at.x >= (w.y + 1) * p.group)
                break;
        }
        at = open_window<BLOCK>(p, w, at.x, at.i0);
    }
    return at;
}

/* The first of a tile of keys; where nothing is seen, a step says so. */
template <int BLOCK> INLINE key_window first_window(const attention_params &p, const key_work &w) {
    const key_window none = {w.y * p.group - 1, w.s.end, 0, 0};
    key_window at = next_window<BLOCK>(p, w, none);
    if (!at.seen) {
        at = open_window<BLOCK>(p, w, w.y * p.group, w.s.begin);
        at.seen = 1;
    }
    return at;
}

template <int BLOCK> INLINE key_walk place_in(const key_window &at) {
    return {at.x, at.i0 + (__ffs((int)at.seen) - 1) * BLOCK};
}

/* The next step of a window that has one, which goes on behind it. Returns what is to be said of it. */
template <int BLOCK>
INLINE int take_step(const attention_params &p, const key_work &w, key_window *window, key_walk *at) {
    *at = place_in<BLOCK>(*window);
    const int step = __shfl_sync(ALL_LANES, window->step, __ffs((int)window->seen) - 1);
    window->seen &= window->seen - 1;
    if (!window->seen)
        *window = next_window<BLOCK>(p, w, *window);
    return step | (window->seen ? 0 : STEP_LAST);
}

/* full: the steps of a tile of keys, without those in which no query sees a key: told, and sent for. */
template <typename T, int D, int BLOCK, int FULL, typename places>
INLINE void fetch_seen(const attention_params_sm90 &all, const key_work &w, uint32_t smem, int n, key_options *steps,
                       unsigned *count, ring *r) {
    const attention_params &p = all.p;
    const int lane = threadIdx.x % 32;
    key_window window = first_window<BLOCK>(p, w);
#pragma unroll 1
    while (window.seen) {
        key_walk at;
        const int step = take_step<BLOCK>(p, w, &window, &at);
        const bool boxes = places::has_boxes && (p.vectors & VECTOR_BIAS_BOXES);
        if (lane == 0) /* nobody has use any more for what was told KEY_STEPS before, as the places are fewer */
            steps[*count % KEY_STEPS] = find_key_options<FULL>(p, w.c, at.x, step, sizeof(T));
        if (!boxes && (FULL & WITH_BIAS)) {
            mbarrier_wait(places::empty(smem, *r), r->turn ^ 1);
            prefetch_step<T, BLOCK>(p, w, at);
        }
        places::step(all, w, at.x, at.i0, lse_at(p, w.c, at.x, 0), smem, n, r);
        if (boxes && lane == 0) {
            const key_walk none = {(w.y + 1) * p.group, 0};
            places::boxes(all, w, at, window.seen ? place_in<BLOCK>(window) : none, smem, *count);
        }
        ++*count;
    }
}

/* All that the others work on. `places` is a type that knows the kernel's shared memory: how many tensors of keys lie there (own: K, or K and V)
 * and how many keys a block has (rows),
 * whether a bias comes in boxes (has_boxes), which barrier says that the next step's first tile has a place (empty), and how Q, dO and the
 * numbers of a step (step), and its boxes (boxes), are sent for. */
template <typename T, int D, int BLOCK, int FULL, typename layout, typename places>
INLINE void fetch_keys(const attention_params_sm90 &all, const crew &crew, char *shared, key_options *steps) {
    const attention_params &p = all.p;
    const uint32_t smem = shared_address(shared);
    const int lane = threadIdx.x % 32;
    ring r = {0, 0};
    int own_turn = 0;
    unsigned count = 0;
    key_work w;
    for (unsigned turn = 0; find_keys<BLOCK, FULL, places::rows>(p, crew, turn, &w); turn++) {
        const int n = p.a.features & HEDDLE_VARLEN ? 0 : (int)w.c.n;
        if (!has_steps<T, FULL, places::rows>(p, w))
            continue;
        if (lane == 0) {
            const int row = (int)w.c.first_k + w.key0;
            mbarrier_wait(smem + layout::own_empty, own_turn ^ 1);
            mbarrier_expect(smem + layout::own_full, layout::slots);
            load_boxes<D, places::rows>(smem, &all.k, smem + layout::own_full, row, w.y, n);
            if (places::own == 2)
                load_boxes<D, places::rows>(smem + layout::own_bytes, &all.v, smem + layout::own_full, row, w.y, n);
        }
        own_turn ^= 1;
        if (FULL)
            fetch_seen<T, D, BLOCK, FULL, places>(all, w, smem, n, steps, &count, &r);
        for (int x = w.y * p.group; !FULL && x < (w.y + 1) * p.group; x++) {
            const int64_t at = lse_at(p, w.c, x, 0);
#pragma unroll 1
            for (int i0 = w.s.begin; i0 < w.s.end; i0 += BLOCK)
                places::step(all, w, x, i0, at, smem, n, &r);
        }
    }
}

/* dropout alone: the warps beside the one that fetches make the bits of each step, in its order. */
template <int BLOCK, int OWN, int BATCH, typename layout>
INLINE void make_columns_ahead(const attention_params &p, const crew &crew, uint32_t smem, char *kept,
                               dropout_state state) {
    int unit = (int)threadIdx.x / 32 - 1;
    state.seed = __shfl_sync(ALL_LANES, state.seed, 0); /* as put_kept_rows says */
    state.offset = __shfl_sync(ALL_LANES, state.offset, 0);
    unsigned count = 0;
    key_work w;
    for (unsigned turn = 0; find_keys<BLOCK, layout::with, OWN>(p, crew, turn, &w); turn++) {
        if (!w.steps)
            continue;
        for (key_walk at = first_seen<BLOCK>(p, w); at.x < (w.y + 1) * p.group;
             at = step_after<BLOCK>(p, w, at), count++) {
            const unsigned slot = count % layout::kept_slots;
            mbarrier_wait(smem + layout::kept_empty + slot * 8, count / layout::kept_slots % 2 ^ 1);
            put_kept_columns<BLOCK, OWN, BATCH>(p, state, dropout_head(p, w.c.n, at.x), at.i0, w.key0,
                                                kept + slot * layout::kept_bytes, &unit);
            mbarrier_arrive(smem + layout::kept_full + slot * 8);
        }
    }
}

#endif

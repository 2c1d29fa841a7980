/* SPDX-License-Identifier: Apache-2.0
 * Of the forward for Hopper: the threads that send for everything, and the warps that clean tiles of V. */
#ifndef HEDDLE_CUDA_ATTENTION_FWD_FETCH_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_FWD_FETCH_SM90_CUH

#include "cuda/attention/sm90/fwd_result.cuh"

/* full: what lies behind the barriers. */
template <typename layout> INLINE query_options *options_in(const forward_job *jobs) {
    return (query_options *)((char *)jobs + (layout::options - layout::jobs));
}
template <typename layout> INLINE int *steps_in(const forward_job *jobs) {
    return (int *)((char *)jobs + (layout::steps - layout::jobs));
}

/* Over d 256: of a tile of queries and the next, which column of o is the first. */
template <typename layout> INLINE int *columns_in(const forward_job *jobs) {
    return (int *)((char *)jobs + (layout::columns - layout::jobs));
}

/* paged: what lies there in place of it, or where a bias would be. */
template <int FULL, typename layout> INLINE int *hidden_in(const forward_job *jobs) {
    return (int *)((char *)jobs + ((FULL ? layout::bias : layout::hidden) - layout::jobs));
}

INLINE key_scales *scales_in(const forward_job *jobs) {
    return (key_scales *)(jobs + 2);
}

/* Does a warp of its own send for V? With a mask it takes the thread that sends for K some time to find the next tile. By one thread, V of the
 * last tile of keys would wait for K of the next tile of queries; else it costs more than it gives. */
template <int FULL> INLINE constexpr bool sends_apart(void) {
    return (FULL & WITH_MASK) != 0;
}

/* ------------------------------------------------------------------------------------------------ loads, cleaning */

/* The n-th that goes around a ring of tiles of D columns, the first of them `column`. */
template <int D, int BLOCK, int SLOTS>
INLINE void load_tile(uint32_t tiles, uint32_t full, uint32_t empty, const tensor_map *map, int row, int head,
                      int batch, int column, unsigned n) {
    const unsigned slot = slot_of<SLOTS>(n);
    mbarrier_wait(empty + slot * 8, turn_of<SLOTS>(n) ^ 1);
    mbarrier_expect(full + slot * 8, tile90<D, BLOCK>::bytes);
    load_boxes<D, BLOCK, BLOCK % 64 ? BLOCK : 64>(tiles + slot * tile90<D, BLOCK>::bytes, map, full + slot * 8, row,
                                                  head, batch, column);
}

/* The n-th tile of K, in chunks; of V, the columns from `column` on. */
template <int BLOCK, typename layout>
INLINE void load_keys(uint32_t smem, uint32_t barriers, const tensor_map *map, int row, int head, int batch,
                      unsigned n) {
#pragma unroll
    for (unsigned c = 0; c < layout::chunks; c++)
        load_tile<layout::chunk, BLOCK, layout::slots>(smem + layout::k, barriers + layout::k_full,
                                                       barriers + layout::k_empty, map, row, head, batch,
                                                       (int)c * layout::chunk, n * layout::chunks + c);
}
template <int BLOCK, typename layout>
INLINE void load_values(uint32_t smem, uint32_t barriers, const tensor_map *map, int row, int head, int batch,
                        int column, unsigned n) {
    load_tile<layout::part, BLOCK, layout::stages>(smem + layout::v, barriers + V_FULL, barriers + V_EMPTY, map, row,
                                                   head, batch, column, n);
}

/* What the table says of the tile of keys from j0 on, up to key `end`: of group x%GROUPS of PAGE_ROWS keys in lane x. */
template <int BLOCK> INLINE int ask_pages(const attention_params &p, int64_t n, int j0, int end) {
    const int j = j0 + (int)threadIdx.x % (BLOCK / PAGE_ROWS) * PAGE_ROWS;
    return j0 >= 0 && j < end ? entry_at(p, n, j) : -1;
}

/* Of these groups those that are in no page, a bit each. */
template <int BLOCK> INLINE int find_hidden(const attention_params &p, int entry, int j0, int end) {
    const int group = (int)threadIdx.x % 32;
    return (int)__ballot_sync(ALL_LANES,
                              group < BLOCK / PAGE_ROWS && j0 + group * PAGE_ROWS < end && page_of(p, entry) < 0);
}

/* The n-th tile of K or V, keys from j0 on, by a warp: each lane sends for a box, which is in one page. Of a number that is no page the copy
 * engine makes zeros, as of all that a tensor does not have; of K the others are told which those are. */
template <int D, int BLOCK, typename layout>
INLINE void load_pages(uint32_t tiles, uint32_t full, uint32_t empty, const tensor_map *map, int j0, int head,
                       int entry, int page_bits, unsigned n, int *tells = NULL, int hidden = 0) {
    typedef tile90<D, BLOCK> t;
    const unsigned slot = slot_of<layout::stages>(n);
    const int lane = (int)threadIdx.x % 32, bits = sm90_box_bits(page_bits);
    const int boxes = BLOCK >> bits, x = lane / boxes, y = lane % boxes << bits;
    const int page = __shfl_sync(ALL_LANES, entry, y / PAGE_ROWS);
    static_assert(BLOCK % 64 == 0 && t::strips * (BLOCK / PAGE_ROWS) <= 32, "a lane for each box");
    mbarrier_wait(empty + slot * 8, turn_of<layout::stages>(n) ^ 1);
    if (lane == 0) {
        if (tells)
            tells[slot] = hidden;
        mbarrier_expect(full + slot * 8, t::bytes);
    }
    __syncwarp();
    if (x < t::strips)
        tma_load4(tiles + slot * t::bytes + x * t::strip + y * 128, map, full + slot * 8, x * 64,
                  (j0 + y) & ((1 << page_bits) - 1), head, page);
    __syncwarp();
}

/* The n-th tile of queries; w NULL: that there is none. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL, bool PAGED>
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
    jobs[slot_of<2>(n)] = {target_of<layout>(all.p, *w), w->s, (int)w->c.first_k, w->x / all.p.group, w->n};
    if (layout::is_wide)
        columns_in<layout>(jobs)[slot_of<2>(n)] = w->column0;
    if (PAGED)
        scales_in(jobs)[slot_of<2>(n)] = find_scales(all.p, (int)w->c.n, w->x / all.p.group);
    if (FULL)
        options_in<layout>(jobs)[slot_of<2>(n)] = find_options(all.p, w->c, w->x, w->row0, sizeof(T));
    mbarrier_expect(full, layout::q_bytes);
    load_boxes<D, layout::rows>(smem + slot * layout::q_bytes, &all.q, full, (int)w->c.first_q + w->row0, w->x, w->n);
}

/* full: the bias of the n-th tile of keys, for each warpgroup, and of the one after it as far as the second-level cache. A row that is the
 * same for all queries all blocks ask for at once, and the second-level cache has it once: they send for it once, for all warpgroups. */
template <int GROUPS, int BLOCK, typename layout>
INLINE void load_bias(const attention_params_sm90 &all, const forward_work &w, int j0, int next, uint32_t smem,
                      unsigned n) {
    const bool alike = is_alike(all.p);
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        mbarrier_wait(smem + layout::bias_empty + group * 8, turn_of<1>(n) ^ 1);
        if (alike && group < GROUPS - 1)
            continue;
        const uint32_t full = smem + layout::bias_full + (alike ? 0 : group * 8),
                       to = smem + layout::bias + (alike ? 0 : group * layout::bias_bytes);
        const bias_place from = find_box(all.p, j0, w.row0 + group * 64, w.x, w.c.n);
        mbarrier_expect(full, layout::bias_bytes);
        for (int x = 0; x < BLOCK; x += 64) {
            tma_load4(to + x / 64 * SM90_BIAS_BOX, &all.bias, full, from.key + x, from.row, from.x, from.n);
            if (!alike && next >= w.s.begin)
                tma_prefetch4(&all.bias, next + x, from.row, from.x, from.n);
        }
    }
}

/* One thread sends for Q, K and a bias, in the order in which they are used; where no other warp does it, for V, too. PAGED: a warp, whose
 * lanes have the pages: what the table says of a tile they ask while the one before it is waited for. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL, bool PAGED>
INLINE void produce(const attention_params_sm90 &all, uint32_t smem, uint32_t barriers, forward_job *jobs) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const attention_params &p = all.p;
    unsigned step = 0, nq = 0, n = 0;
    forward_work w;
    find_common<layout::rows>(p, &w);
    const bool sends = !PAGED || threadIdx.x == 0;
    int v_row = 0, v_head = 0, v_batch = 0, v_column = 0; /* V follows K of the next step, be that of the next tile */
    bool owes = false, alone = false; /* V is still to be sent for; of a tile of queries with one of keys */
    const auto load_owed = [&]() {
        if (PAGED && owes)
            load_pages<D, BLOCK, layout>(smem + layout::v, barriers + V_FULL, barriers + V_EMPTY, &all.v, v_row, v_head,
                                         v_batch, p.page_bits, n - 1);
        else if (owes)
            load_values<BLOCK, layout>(smem, barriers, &all.v, v_row, v_head, v_batch, v_column, n - 1);
        owes = false;
    };
    const bool takes = (FULL & WITH_MASK) && p.seen_by_queries.taken;
    while (takes ? take_work<layout>(p, &w) : next_work<layout>(p, &step, &w)) {
        if (w.s.begin == w.s.end)
            continue;
        if (FULL || PAGED)
            w.s.begin = w.s.begin / BLOCK * BLOCK; /* as tiles of the mask, or whole groups of a page */
        if (alone)                                 /* or it would wait for o of the tile before */
            load_owed();
        if (layout::q_stages > 1 && sends)
            load_queries<T, D, GROUPS, BLOCK, FULL, PAGED>(all, &w, smem, jobs, nq);
        const int head = w.x / p.group;
        int last = last_tile<BLOCK>(w.s);
        const uint8_t *kinds = NULL;
        if (FULL) { /* where nothing is seen, one tile says so */
            if (FULL & WITH_MASK)
                kinds = find_kinds(p.seen_by_queries, w.c.n, w.x, w.row0 / layout::rows);
            const int seen = next_seen<BLOCK>(kinds, w.s, last);
            last = seen < w.s.begin ? last : seen;
        }
        int ahead = PAGED ? ask_pages<BLOCK>(p, w.c.n, last, w.s.end) : 0;
#pragma unroll 1
        for (int j0 = last, next; j0 >= w.s.begin; j0 = next, n++) {
            const int row = PAGED ? j0 : (int)w.c.first_k + j0, batch = PAGED ? ahead : w.n;
            next = FULL ? next_seen<BLOCK>(kinds, w.s, j0 - BLOCK) : j0 - BLOCK;
            if (FULL) /* nobody has use any more for what was told STEPS before */
                steps_in<layout>(jobs)[n % STEPS] = step_of<BLOCK, FULL>(p, kinds, w.s, j0, next);
            if (PAGED) {
                const int hidden = find_hidden<BLOCK>(p, batch, j0, w.s.end);
                ahead = ask_pages<BLOCK>(p, w.c.n, next, w.s.end);
                load_pages<D, BLOCK, layout>(smem + layout::k, barriers + K_FULL, barriers + K_EMPTY, &all.k, row, head,
                                             batch, p.page_bits, n, hidden_in<FULL, layout>(jobs), hidden);
            } else {
                note(p, GROUPS, n, CLOCK_BEGIN);
                load_keys<BLOCK, layout>(smem, barriers, &all.k, row, head, batch, n);
                note(p, GROUPS, n, CLOCK_KEYS);
            }
            if (!sends_apart<FULL>()) {
                load_owed();
                note(p, GROUPS, n, CLOCK_TURN);
                v_row = row;
                v_head = head;
                v_batch = batch;
                v_column = layout::is_wide ? w.column0 : 0;
                owes = true;
                alone = j0 == last;
            }
            if (layout::q_stages == 1 && j0 == last && sends) /* waits for the last scores of the tile before */
                load_queries<T, D, GROUPS, BLOCK, FULL, PAGED>(all, &w, smem, jobs, nq);
            if (has_boxes<FULL>(p))
                load_bias<GROUPS, BLOCK, layout>(all, w, j0, next, smem, n);
        }
        nq++;
    }
    load_owed();
    if (sends)
        load_queries<T, D, GROUPS, BLOCK, FULL, PAGED>(all, NULL, smem, jobs, nq);
}

/* A warp: V, where another than that of K sends for it: as soon as it is told which tile comes, which is when K is there. Between tiles of
 * queries, those that see no key at all. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL, bool ADDS>
INLINE void produce_values(const attention_params_sm90 &all, uint32_t smem, uint32_t barriers,
                           const forward_job *jobs) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    constexpr int QS = layout::q_stages, STAGES = layout::stages;
    unsigned n = 0, nq = 0, step = 0;
    forward_work w;
    find_common<layout::rows>(all.p, &w);
    bool sends = sends_apart<FULL>(), stores = may_see_nothing(all.p);
    while (sends || stores) {
        if (sends) {
            mbarrier_wait(barriers + Q_FULL + slot_of<QS>(nq) * 8, turn_of<QS>(nq));
            const forward_job job = jobs[slot_of<2>(nq)];
            __syncwarp();
            sends = job.s.end != 0;
            if (sends && threadIdx.x % 32 == 0) {
                mbarrier_arrive(barriers + Q_EMPTY + slot_of<QS>(nq) * 8);
                for (int told = 0; !(told & STEP_LAST); n++) {
                    mbarrier_wait(barriers + K_FULL + slot_of<STAGES>(n) * 8, turn_of<STAGES>(n));
                    told = steps_in<layout>(jobs)[n % STEPS];
                    mbarrier_arrive(barriers + K_EMPTY + slot_of<STAGES>(n) * 8);
                    load_values<BLOCK, layout>(smem, barriers, &all.v, job.first_k + (told & ~STEP_FLAGS), job.head_k,
                                               job.n, 0, n);
                }
            }
            __syncwarp();
            nq++;
        }
        stores = stores && next_work<layout>(all.p, &step, &w);
        if (stores && w.s.begin == w.s.end)
            store_nothing<T, layout, ADDS>(all.p, w);
    }
}

/* Where a mask decides which tiles there are, the warps that make bits of dropout are told of them, as those are that send for V. */
template <int FULL> INLINE constexpr bool makes_as_told(void) {
    return makes_ahead<FULL>() && sends_apart<FULL>();
}
template <int FULL> INLINE constexpr int told_warps(void) {
    return sends_apart<FULL>() + (makes_as_told<FULL>() ? FORWARD_KEPT_WARPS : 0);
}

/* dropout alone: a warpgroup makes the bits of each tile, in the order in which the tiles are sent for. */
template <int D, int GROUPS, int BLOCK>
INLINE void make_rows_ahead(const attention_params &p, uint32_t smem, char *kept, dropout_state state) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    state.seed = __shfl_sync(ALL_LANES, state.seed, 0); /* as put_kept_rows says */
    state.offset = __shfl_sync(ALL_LANES, state.offset, 0);
    int unit = (int)threadIdx.x % WARPGROUP / 32;
    unsigned step = 0, n = 0;
    forward_work w;
    find_common<layout::rows>(p, &w);
    while (next_work<layout>(p, &step, &w)) {
        if (w.s.begin == w.s.end)
            continue;
        const uint32_t head = dropout_head(p, w.c.n, w.x);
        const int begin = w.s.begin / BLOCK * BLOCK;
        w.s.begin = begin;
#pragma unroll 1
        for (int j0 = last_tile<BLOCK>(w.s); j0 >= begin; j0 -= BLOCK, n++) {
            const unsigned slot = slot_of<FORWARD_KEPT_SLOTS>(n);
            mbarrier_wait(smem + layout::kept_empty + slot * 8, turn_of<FORWARD_KEPT_SLOTS>(n) ^ 1);
            put_kept_rows<layout::rows, BLOCK>(p, state, head, w.row0, j0, kept + slot * layout::kept_bytes, &unit);
            mbarrier_arrive(smem + layout::kept_full + slot * 8);
        }
    }
}

/* maskdrop: the same, of the tiles that it is told of. */
template <int D, int GROUPS, int BLOCK>
INLINE void make_rows_as_told(const attention_params &p, uint32_t smem, const forward_job *jobs, char *kept,
                              dropout_state state) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    constexpr int QS = layout::q_stages, STAGES = layout::stages;
    const uint32_t barriers = smem + layout::barriers;
    state.seed = __shfl_sync(ALL_LANES, state.seed, 0); /* as put_kept_rows says */
    state.offset = __shfl_sync(ALL_LANES, state.offset, 0);
    int unit = (int)threadIdx.x % WARPGROUP / 32;
    const bool tells = threadIdx.x % 32 == 0;
    unsigned n = 0;
    for (unsigned nq = 0;; nq++) {
        mbarrier_wait(barriers + Q_FULL + slot_of<QS>(nq) * 8, turn_of<QS>(nq));
        const query_options &o = options_in<layout>(jobs)[slot_of<2>(nq)];
        const uint32_t head = o.head;
        const int row0 = o.first, end = jobs[slot_of<2>(nq)].s.end;
        __syncwarp();
        if (!end)
            return;
        if (tells)
            mbarrier_arrive(barriers + Q_EMPTY + slot_of<QS>(nq) * 8);
#pragma unroll 1
        for (int told = 0; !(told & STEP_LAST); n++) {
            const unsigned slot = slot_of<FORWARD_KEPT_SLOTS>(n);
            mbarrier_wait(barriers + K_FULL + slot_of<STAGES>(n) * 8, turn_of<STAGES>(n));
            told = __shfl_sync(ALL_LANES, steps_in<layout>(jobs)[n % STEPS], 0);
            if (tells)
                mbarrier_arrive(barriers + K_EMPTY + slot_of<STAGES>(n) * 8);
            mbarrier_wait(smem + layout::kept_empty + slot * 8, turn_of<FORWARD_KEPT_SLOTS>(n) ^ 1);
            put_kept_rows<layout::rows, BLOCK>(p, state, head, row0, told & ~STEP_FLAGS,
                                               kept + slot * layout::kept_bytes, &unit);
            mbarrier_arrive(smem + layout::kept_full + slot * 8);
        }
    }
}

template <int D, int GROUPS, int BLOCK, int FULL>
INLINE void make_rows(const attention_params &p, uint32_t smem, const forward_job *jobs, char *kept) {
    const dropout_state state = *(const dropout_state *)(steps_in<forward90<D, GROUPS, BLOCK>>(jobs) + STEPS);
    if (makes_as_told<FULL>())
        make_rows_as_told<D, GROUPS, BLOCK>(p, smem, jobs, kept, state);
    else
        make_rows_ahead<D, GROUPS, BLOCK>(p, smem, kept, state);
}

/* Of the keys of a cut tile that this thread looks after: may one be hidden? Of a bias alone that is the same for all queries it is known. */
template <typename T, int BLOCK, int FULL, typename layout>
INLINE void may_hide(const attention_params &p, const forward_span &w, const forward_job *jobs, unsigned nq, int step,
                     int thread, bool *hidden) {
    const int j0 = step & ~STEP_FLAGS;
    const bool known = has_bias_alone<FULL>() && is_alike(p) && !is_cut<BLOCK>(w, j0);
    const T *const bias = known ? (const T *)options_in<layout>(jobs)[slot_of<2>(nq)].bias + j0 : NULL;
#pragma unroll
    for (int x = 0; x < BLOCK / CLEANERS; x++)
        hidden[x] = !known || to_float(bias[thread + x * CLEANERS]) < (float)LEAST_BIAS;
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
                    !(step & STEP_LAST)) { /* of the next tile, if a mask leaves none out */
                    const query_options &o = options_in<layout>(jobs)[slot_of<2>(nq)];
                    prefetch_bias<T>(p, o.bias, 0, o.last, layout::rows, max((step & ~STEP_FLAGS) - BLOCK, 0), BLOCK,
                                     thread, CLEANERS);
                }
            }
            if (FULL ? step & STEP_CUT : is_cut<BLOCK>(w, j0)) {
                bool hidden[BLOCK / CLEANERS];
                may_hide<T, BLOCK, FULL, layout>(p, w, jobs, nq, step, thread, hidden);
                clean_rows<T, layout::part, BLOCK, CLEANERS>(smem + layout::v + slot * layout::tile_bytes,
                                                             bad + slot * 4, thread, hidden);
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

/* SPDX-License-Identifier: Apache-2.0
 * Of the backward for Hopper in five products: what lies where in shared memory, the barriers, what of a step is sent for, and
 * who adds what comes of it. */
#ifndef HEDDLE_CUDA_ATTENTION_BWD_LAYOUT_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_BWD_LAYOUT_SM90_CUH

#include "cuda/attention/sm90/fetch.cuh"

#define PIECE SM90_PIECE

/* Those that store dS. */
#define DS_THREADS 64

/* Shared memory: K, V; stages of Q and dO; dS twice; of LONG a piece of dQ for each warpgroup; base, rest and D for each row of a
 * stage; marks of keys. */
template <int D, int BLOCK, int STAGES, bool LONG, int FULL, bool TURNS> struct layout90 {
    static constexpr int own_bytes = tile90<D, OWN_ROWS>::bytes, slot_bytes = tile90<D, BLOCK>::bytes;
    static constexpr int ds_bytes = OWN_ROWS * BLOCK * 2;
    static constexpr int slots = 2 * own_bytes;
    static constexpr int ds = slots + STAGES * 2 * slot_bytes;
    static constexpr bool is_long = LONG, is_full = FULL != 0;
    static constexpr bool begins_apart =
        !has_all<FULL>(); /* the first step: else it is in the loop, as it is so much code */
    static constexpr int with = FULL;
    /* Of a thread, together no more than the block was launched with: 168. Those that make dropout's bits need more than those that fetch. */
    static constexpr bool ahead_has_more = makes_ahead<FULL>() && D > 64;
    static constexpr int ahead_registers = ahead_has_more ? 40 : 24, work_registers = ahead_has_more ? 232 : 240;
    static constexpr bool gives_ds = (FULL & WITH_DBIAS) != 0; /* to dbias: other warps store it */
    /* A bias, in boxes: a place for a step's, or those of dS, where a warpgroup's boxes lie where its dS will. */
    static constexpr bool shares_ds = BLOCK > 64;
    /* A bias in the place of dS would come late: that is needed until the next turn. */
    static constexpr bool takes_turns = TURNS && !((FULL & WITH_BIAS) && shares_ds);
    static constexpr int ds_readers = (takes_turns ? CONSUMERS / 32 : 0) + (gives_ds ? DS_THREADS : 0);
    static constexpr int places = sm90_fused_bias_places(BLOCK), place_bytes = ds_bytes, strip = OWN_ROWS * 128;
    static constexpr int dq = ds + 2 * ds_bytes, behind = dq + (LONG ? 2 * PIECE * 4 : 0);
    static constexpr int boxes = shares_ds ? ds : behind;
    static constexpr int kept_slots = 2,
                         kept_bytes = kept_columns<BLOCK, OWN_ROWS>::bytes; /* dropout alone: the bits of a step */
    static constexpr int kept = behind;
    static constexpr int numbers = behind + (!FULL ? 0 : shares_ds ? kept_slots * kept_bytes : 2 * SM90_BIAS_BOX);
    static constexpr int marks = numbers + STAGES * 3 * BLOCK * 4;
    static constexpr int full = marks + OWN_ROWS * 4; /* two for each stage: Q and dO */
    static constexpr int empty = full + STAGES * 16;
    static constexpr int ds_full = empty + STAGES * 16, own_full = ds_full + 16, own_empty = own_full + 8;
    static constexpr int dq_full = own_empty + 8, dq_empty = dq_full + 16, ds_empty = dq_empty + 16;
    static constexpr int box_full = ds_empty + 16, box_empty = box_full + (FULL ? 16 * places : 0);
    static constexpr int kept_full = box_full, kept_empty = box_empty;
    static constexpr int steps = box_empty + (FULL ? 16 * places : 0);
    static constexpr int bytes = steps + (FULL ? SM90_BACKWARD_OPTIONS : 0);
    static_assert(bytes == sm90_fused_bytes(D, BLOCK, LONG) + (FULL ? sm90_fused_options(BLOCK) : 0),
                  "as the plan counts");
    static_assert(kept_slots * kept_bytes <= 2 * SM90_BIAS_BOX, "they fit in the place of a bias");
    static_assert(bytes <= 227 * 1024, "more than a multiprocessor has");
};

template <typename layout, int STAGES> INLINE void make_barriers(uint32_t smem) {
    if (threadIdx.x == 0) {
        for (int x = 0; x < 2 * STAGES; x++) {
            mbarrier_init(smem + layout::full + x * 8, x % 2 ? 1 : 33); /* with Q the numbers of its rows */
            mbarrier_init(smem + layout::empty + x * 8, x % 2 ? CONSUMERS / 32 : CONSUMERS);
        }
        mbarrier_init(smem + layout::ds_full, CONSUMERS / 32);
        mbarrier_init(smem + layout::ds_full + 8, CONSUMERS / 32);
        mbarrier_init(smem + layout::ds_empty, layout::gives_ds ? layout::ds_readers : CONSUMERS / 32);
        mbarrier_init(smem + layout::ds_empty + 8, layout::gives_ds ? layout::ds_readers : CONSUMERS / 32);
        for (int x = 0; layout::is_long && x < 2; x++) {
            mbarrier_init(smem + layout::dq_full + x * 8, WARPGROUP);
            mbarrier_init(smem + layout::dq_empty + x * 8, 1);
        }
        for (int x = 0; layout::is_full && x < 16 * layout::places; x += 8) {
            const bool ahead = makes_ahead<layout::with>();
            mbarrier_init(smem + layout::box_full + x, ahead ? KEPT_WARPS * 32 : 1);
            mbarrier_init(smem + layout::box_empty + x, ahead ? CONSUMERS : WARPGROUP);
        }
        mbarrier_init(smem + layout::own_full, 1);
        mbarrier_init(smem + layout::own_empty, CONSUMERS / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
}

/* Of the bias of the count-th step: its place; and the parity in which it is there. */
template <typename layout> INLINE int place_of(unsigned count) {
    return layout::places > 1 ? (int)count & 1 : 0;
}
template <typename layout> INLINE int parity_of(unsigned count) {
    return (int)(layout::places > 1 ? count >> 1 : count) & 1;
}

/* The bias of the count-th step, and of the next as far as the second-level cache. By one thread. */
template <int BLOCK, typename layout>
INLINE void fetch_boxes(const attention_params_sm90 &all, const key_work &w, key_walk at, key_walk next, uint32_t smem,
                        unsigned count) {
    const int which = place_of<layout>(count), turn = parity_of<layout>(count);
    const uint32_t full = smem + layout::box_full + which * 16;
    for (int group = 0; group < 2; group++)
        mbarrier_wait(full + layout::box_empty - layout::box_full + group * 8, turn ^ 1);
    if (layout::gives_ds && layout::shares_ds)
        mbarrier_wait(smem + layout::ds_empty + which * 8, turn ^ 1);
    for (int group = 0; group < 2; group++) {
        const uint32_t to = smem + layout::boxes + which * layout::place_bytes + group * SM90_BIAS_BOX;
        const int key = w.key0 + group * 64;
        mbarrier_expect(full + group * 8, BLOCK / 64 * SM90_BIAS_BOX);
        for (int y = 0; y < BLOCK; y += 64) {
            const bias_place from = find_box(all.p, key, at.i0 + y, at.x, w.c.n),
                             then = find_box(all.p, key, next.i0 + y, next.x, w.c.n);
            tma_load4(to + y / 64 * layout::strip, &all.bias, full + group * 8, from.key, from.row, from.x, from.n);
            if (next.x < (w.y + 1) * all.p.group)
                tma_prefetch4(&all.bias, then.key, then.row, then.x, then.n);
        }
    }
}

template <int D, int BLOCK, int STAGES, typename layout> struct fused_places {
    static constexpr int own = 2, rows = OWN_ROWS;
    static constexpr bool has_boxes = (layout::with & WITH_BIAS) != 0;
    static __device__ __forceinline__ uint32_t empty(uint32_t smem, const ring &r) {
        return smem + layout::empty + r.slot * 16;
    }
    static __device__ __forceinline__ void step(const attention_params_sm90 &all, const key_work &w, int x, int i0,
                                                int64_t at, uint32_t smem, int n, ring *r) {
        fetch_stage<D, BLOCK, STAGES, layout>(all, w, x, i0, at, smem, n, r);
    }
    static __device__ __forceinline__ void boxes(const attention_params_sm90 &all, const key_work &w, key_walk at,
                                                 key_walk next, uint32_t smem, unsigned count) {
        fetch_boxes<BLOCK, layout>(all, w, at, next, smem, count);
    }
};

/* long: one thread for each warpgroup adds that one's pieces of dQ to their sums; they are there when it comes back. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void add_pieces(const attention_params &p, const crew &crew, uint32_t smem, int group) {
    const uint32_t full = smem + layout::dq_full + group * 8, empty = smem + layout::dq_empty + group * 8;
    int parity = 0;
    key_work w;
    for (unsigned turn = 0; find_keys<BLOCK>(p, crew, turn, &w); turn++) {
        if (!w.steps)
            continue;
        for (int x = w.y * p.group; x < (w.y + 1) * p.group; x++) {
            float *sum = p.dq_sum + sum_tile(p, w.c, x) * 64 * sm90_columns(D) + group * PIECE;
#pragma unroll 1
            for (int i0 = w.s.begin; i0 < w.s.end; i0 += BLOCK) {
                mbarrier_wait(full, parity);
                parity ^= 1;
                if (p.dq_sum) {
                    add_bulk(sum + (int64_t)i0 * sm90_columns(D), smem + layout::dq + group * PIECE * 4, PIECE * 4);
                    bulk_commit();
                    bulk_wait_read();
                }
                mbarrier_arrive(empty);
            }
        }
    }
    bulk_wait();
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Of pairs of blocks (pair.cu): what lies where in either block, and the two warps that fetch for it. */
#ifndef HEDDLE_CUDA_ATTENTION_PAIR_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_PAIR_SM90_CUH

#include "cuda/attention/sm90/fetch.cuh"

#define BLOCK 64   /* queries of a step */
#define SECTION 4u /* heads at a time: of so many Q, dO and sums stay in the second-level cache */

enum { FIRST, SECOND }; /* of the two blocks: its rank in the cluster */

/* What the warp that fetches says of a step: its first query; is it cut? And where the block's dQ of it is added; NULL: nowhere. */
struct told_step {
    int i0, cut;
    float *sum;
};

/* What lies in shared memory; where the other block writes, and its barriers, are at the same place in both. */
template <int D, int RANK> struct layout_pair {
    static constexpr int dim = D, rank = RANK;
    static constexpr int strips = tile90<D, BLOCK>::strips, strip_bytes = tile90<D, OWN_ROWS>::strip;
    static constexpr int dq_first = RANK == FIRST ? 0 : sm90_pair_strips(D, FIRST),
                         dq_strips = sm90_pair_strips(D, RANK);
    static constexpr int slot_bytes = tile90<D, BLOCK>::bytes, slots = sm90_pair_slots(D, RANK);
    static constexpr int exchange_bytes = OWN_ROWS * BLOCK * 2; /* P (second), dS */
    static constexpr int own = 2 * exchange_bytes, own_bytes = sm90_pair_own_bytes(D, RANK);
    static constexpr int tiles = own + own_bytes;
    static constexpr int numbers = SM90_PAIR_TILES; /* base and rest, or D, of each row of a step */
    static constexpr int marks = numbers + SM90_PAIR_NUMBERS * 2 * BLOCK * 4;
    static constexpr int steps = marks + OWN_ROWS * 4, works = steps + SM90_PAIR_TOLD * SM90_PAIR_STEP_BYTES;
    static constexpr int full = works + 2 * SM90_PAIR_WORK_BYTES, empty = full + SM90_PAIR_MOST_SLOTS * 8;
    static constexpr int own_full = empty + SM90_PAIR_MOST_SLOTS * 8, own_empty = own_full + 8;
    static constexpr int ds_full = own_empty + 8;    /* first: of either place */
    static constexpr int there_empty = ds_full + 16; /* may what the other has there be overwritten? */
    static constexpr int p_full = there_empty + 16;  /* second: of either place, for each warpgroup */
    static constexpr int bytes = p_full + 32;
    static_assert(tiles + slots * slot_bytes <= SM90_PAIR_TILES, "more than there is");
    static_assert(slots >= 3, "two tiles in use, one on its way");
    static_assert(sizeof(told_step) == SM90_PAIR_STEP_BYTES && sizeof(key_work) == SM90_PAIR_WORK_BYTES,
                  "as the plan counts");
    static_assert(bytes == sm90_pair_bytes() && bytes <= 227 * 1024, "as the plan counts");
};

template <typename layout> INLINE void make_barriers(uint32_t smem) {
    if (threadIdx.x == 0) {
        for (int x = 0; x < layout::slots; x++) {
            mbarrier_init(smem + layout::full + x * 8, 34); /* tile; numbers from each lane of a warp; what is told */
            mbarrier_init(smem + layout::empty + x * 8, CONSUMERS);
        }
        mbarrier_init(smem + layout::own_full, 2); /* that; what is told */
        mbarrier_init(smem + layout::own_empty, CONSUMERS);
        for (int x = 0; x < 2; x++) {
            mbarrier_init(smem + layout::ds_full + x * 8, CONSUMERS / 32);
            mbarrier_init(smem + layout::there_empty + x * 8, CONSUMERS / 32);
        }
        for (int x = 0; x < 4; x++)
            mbarrier_init(smem + layout::p_full + x * 8, WARPGROUP / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();
    cluster_wait();
}

/* -------------------------------------------------------------------------------------------------------- fetching */

template <typename layout> INLINE void await_slot(uint32_t smem, const ring &r) {
    mbarrier_wait(smem + layout::empty + r.slot * 8, r.turn ^ 1);
}

/* Where a block is in its walk over tiles of keys, heads, and queries; both warps that fetch go the same way. */
INLINE bool find_work(const attention_params &p, const crew &crew, unsigned turn, key_work *w) {
    return find_keys<BLOCK, 0, OWN_ROWS, SECTION>(p, crew, turn, w);
}

/* What the block keeps of a tile of keys, and the tiles of all steps. One thread, which does nothing else: what it asks for late all wait for. */
template <typename layout> INLINE void fetch_tiles(const attention_params_sm90 &all, const crew &crew, uint32_t smem) {
    const attention_params &p = all.p;
    const tensor_map *const map[2] = {layout::rank == FIRST ? &all.q : &all.dout,
                                      layout::rank == FIRST ? &all.dout : &all.q};
    ring r = {0, 0};
    key_work w;
    for (unsigned turn = 0; find_work(p, crew, turn, &w); turn++) {
        const int n = p.a.features & HEDDLE_VARLEN ? 0 : (int)w.c.n, first_q = (int)w.c.first_q, begin = w.s.begin,
                  end = w.s.end;
        const uint32_t own_full = smem + layout::own_full;
        int x = w.y * p.group, left = w.steps;
        mbarrier_wait(smem + layout::own_empty, (int)(turn & 1) ^ 1);
        if (left) {
            const int row = (int)w.c.first_k + w.key0;
            mbarrier_expect(own_full, layout::own_bytes);
            load_boxes<layout::dim, OWN_ROWS>(smem + layout::own, layout::rank == FIRST ? &all.k : &all.v, own_full,
                                              row, w.y, n);
            if (layout::rank == SECOND)
                load_boxes<layout::dq_strips * 64, OWN_ROWS>(smem + layout::own + layout::strips * layout::strip_bytes,
                                                             &all.k, own_full, row, w.y, n, layout::dq_first * 64);
        } else {
            mbarrier_arrive(own_full);
        }
#pragma unroll 1
        for (int i0 = begin; left > 0; left--) {
#pragma unroll
            for (int which = 0; which < 2; which++) {
                const uint32_t bar = smem + layout::full + r.slot * 8;
                await_slot<layout>(smem, r);
                mbarrier_expect(bar, layout::slot_bytes);
                load_boxes<layout::dim, BLOCK>(smem + layout::tiles + r.slot * layout::slot_bytes, map[which], bar,
                                               first_q + i0, x, n);
                advance<layout::slots>(&r);
            }
            i0 += BLOCK;
            if (i0 >= end) { /* the next head */
                i0 = begin;
                x++;
            }
        }
    }
}

/* What there is to do for each tile of keys, and for each step, with the numbers of its rows, which come with its first tile; in the end that
 * there is no more. A warp. */
template <typename layout> INLINE void tell(const attention_params &p, const crew &crew, char *shared) {
    const uint32_t smem = shared_address(shared);
    const int lane = threadIdx.x % 32;
    key_work *const works = (key_work *)(shared + layout::works);
    ring r = {0, 0};
    unsigned step = 0;
    bool there = true;
    for (unsigned turn = 0; there; turn++) {
        key_work found;
        there = find_work(p, crew, turn, &found);
        if (!there)
            found.steps = -1;
        mbarrier_wait(smem + layout::own_empty, (int)(turn & 1) ^ 1);
        if (lane == 0) {
            works[turn & 1] = found;
            mbarrier_arrive(smem + layout::own_full);
            if (!there) /* in place of the other warp */
                mbarrier_arrive(smem + layout::own_full);
        }
        __syncwarp();
        const key_work &w = works[turn & 1]; /* there are few registers here */
        for (int x = w.y * p.group, left = w.steps; left > 0; x++) {
            int64_t at = lse_at(p, w.c, x, w.s.begin);
            float *sum = p.dq_sum ? p.dq_sum + (sum_tile(p, w.c, x) * 64 + w.s.begin) * layout::dim +
                                        layout::dq_first * SM90_PIECE
                                  : NULL;
#pragma unroll 1
            for (int i0 = w.s.begin; i0 < w.s.end; i0 += BLOCK, step++, left--) {
                const uint32_t to = smem + layout::numbers + step % SM90_PAIR_NUMBERS * 2 * BLOCK * 4;
                const int count = w.s.end - i0;
                await_slot<layout>(smem, r);
#pragma unroll
                for (int z = lane; z < BLOCK; z += 32) {
                    const int64_t from = z < count ? at + z : 0;
                    const int size = z < count ? 4 : 0;
                    cp_async4(to + z * 4, (layout::rank == FIRST ? p.base : p.dsum) + from, size);
                    if (layout::rank == FIRST)
                        cp_async4(to + (BLOCK + z) * 4, p.rest + from, size);
                }
                cp_async_arrive(smem + layout::full + r.slot * 8);
                if (lane == 0) {
                    ((told_step *)(shared + layout::steps))[step % SM90_PAIR_TOLD] = {i0, is_cut(w.s, i0), sum};
                    mbarrier_arrive(smem + layout::full + r.slot * 8);
                }
                at += BLOCK;
                sum += sum ? BLOCK * layout::dim : 0;
                advance<layout::slots>(&r);
                /* The other tile of the step has nothing with it. */
                await_slot<layout>(smem, r);
                mbarrier_arrive(smem + layout::full + r.slot * 8);
                if (lane == 0)
                    mbarrier_arrive(smem + layout::full + r.slot * 8);
                advance<layout::slots>(&r);
            }
        }
    }
}

#endif

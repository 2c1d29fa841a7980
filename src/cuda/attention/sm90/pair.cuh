/* SPDX-License-Identifier: Apache-2.0
 * Of pairs of blocks (pair.cu): what lies where in either block, and the two warps that fetch for it. */
#ifndef HEDDLE_CUDA_ATTENTION_PAIR_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_PAIR_SM90_CUH

#include "cuda/attention/sm90/fetch.cuh"

#define BLOCK 64   /* queries of a step */
#define SECTION 4u /* heads at a time: of so many Q, dO and sums stay in the second-level cache */

enum { FIRST, SECOND }; /* of the two blocks: its rank in the cluster */

/* What is told of a step: its first query; its flags; where the block's dQ of it is added; NULL: nowhere. */
struct told_step {
    int i0, flags;
    float *sum;
};

/* What lies in shared memory; where the other block writes, and its barriers, are at the same place in both. */
template <int D, int RANK, int WITH> struct layout_pair {
    static constexpr int dim = D, rank = RANK, with = WITH;
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
    static constexpr int options = p_full + 32;      /* first: of the steps that have been told of */
    static constexpr int bytes = options + (WITH ? SM90_BACKWARD_OPTIONS : 0);
    static_assert(SM90_PAIR_TOLD == KEY_STEPS, "of each step that is told of");
    static_assert(tiles + slots * slot_bytes <= SM90_PAIR_TILES, "more than there is");
    static_assert(slots >= 3, "two tiles in use, one on its way");
    static_assert(sizeof(told_step) == SM90_PAIR_STEP_BYTES && sizeof(key_work) == SM90_PAIR_WORK_BYTES,
                  "as the plan counts");
    static_assert(bytes == sm90_pair_bytes(WITH != 0) && bytes <= 227 * 1024, "as the plan counts");
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

/* Where a block is in its walk over tiles of keys, heads, and queries; both warps that fetch go the same way. With options by whole warps. */
template <typename T, typename layout>
INLINE bool find_work(const attention_params &p, const crew &crew, unsigned turn, key_work *w) {
    if (!find_keys<BLOCK, layout::with, OWN_ROWS, SECTION>(p, crew, turn, w))
        return false;
    if (!has_steps<T, layout::with>(p, *w))
        w->steps = 0;
    return true;
}

/* What the block keeps of a tile of keys. */
template <typename layout>
INLINE void fetch_own(const attention_params_sm90 &all, const key_work &w, uint32_t smem, int n, unsigned turn) {
    const uint32_t own_full = smem + layout::own_full;
    const int row = (int)w.c.first_k + w.key0;
    mbarrier_wait(smem + layout::own_empty, (int)(turn & 1) ^ 1);
    if (!w.steps) {
        mbarrier_arrive(own_full);
        return;
    }
    mbarrier_expect(own_full, layout::own_bytes);
    load_boxes<layout::dim, OWN_ROWS>(smem + layout::own, layout::rank == FIRST ? &all.k : &all.v, own_full, row, w.y,
                                      n);
    if (layout::rank == SECOND)
        load_boxes<layout::dq_strips * 64, OWN_ROWS>(smem + layout::own + layout::strips * layout::strip_bytes, &all.k,
                                                     own_full, row, w.y, n, layout::dq_first * 64);
}

/* The tiles of a step, from a row of head x on. */
template <typename layout>
INLINE void fetch_step(const attention_params_sm90 &all, uint32_t smem, int row, int x, int n, ring *r) {
    const tensor_map *const map[2] = {layout::rank == FIRST ? &all.q : &all.dout,
                                      layout::rank == FIRST ? &all.dout : &all.q};
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const uint32_t bar = smem + layout::full + r->slot * 8;
        await_slot<layout>(smem, *r);
        mbarrier_expect(bar, layout::slot_bytes);
        load_boxes<layout::dim, BLOCK>(smem + layout::tiles + r->slot * layout::slot_bytes, map[which], bar, row, x, n);
        advance<layout::slots>(r);
    }
}

/* Does a mask say which steps there are? Then a warp finds them; else all are. */
template <typename layout> INLINE constexpr bool seeks_steps(void) {
    return (layout::with & WITH_MASK) != 0;
}

/* The first of them; where nobody has to ask for any, none. */
INLINE key_window first_of(const attention_params &p, const key_work &w, bool asks) {
    const key_window none = {0, 0, 0, 0};
    return asks && w.steps > 0 ? first_window<BLOCK>(p, w) : none;
}

/* What the block keeps of each tile of keys, and the tiles of all steps. One thread, which does nothing else: what it asks for late all wait for;
 * or a warp that looks for steps, or prefetches a bias. */
template <typename T, typename layout>
INLINE void fetch_tiles(const attention_params_sm90 &all, const crew &crew, uint32_t smem) {
    constexpr bool SEEKS = seeks_steps<layout>(), PREFETCHES = layout::rank == FIRST && (layout::with & WITH_BIAS);
    const attention_params &p = all.p;
    const bool sends = !layout::with || threadIdx.x % 32 == 0;
    ring r = {0, 0};
    key_work w;
    for (unsigned turn = 0; find_work<T, layout>(p, crew, turn, &w); turn++) {
        const int n = p.a.features & HEDDLE_VARLEN ? 0 : (int)w.c.n;
        key_window window = first_of(p, w, SEEKS);
        key_walk at = {w.y * p.group, w.s.begin};
        if (sends)
            fetch_own<layout>(all, w, smem, n, turn);
#pragma unroll 1
        for (int left = w.steps; SEEKS ? window.seen != 0 : left > 0; left--) {
            if (SEEKS)
                take_step<BLOCK>(p, w, &window, &at);
            if (PREFETCHES)
                prefetch_step<T, BLOCK>(p, w, at);
            if (sends)
                fetch_step<layout>(all, smem, (int)w.c.first_q + at.i0, at.x, n, &r);
            if (PREFETCHES)
                __syncwarp(); /* or the others would be far ahead of the one that sends */
            at.i0 += BLOCK;
            if (at.i0 >= w.s.end) /* the next head */
                at = {at.x + 1, w.s.begin};
        }
    }
}

/* Where the block's dQ of head x is added, from query i0 on. */
template <typename layout> INLINE float *find_sum(const attention_params &p, const key_work &w, int x, int i0) {
    return p.dq_sum ? p.dq_sum + (sum_tile(p, w.c, x) * 64 + i0) * layout::dim + layout::dq_first * SM90_PIECE : NULL;
}

/* Of a step: the numbers of its rows, from `from` on, which come with its first tile; what is said of it, and what its options need. A warp. Nobody
 * has use any more for what was told so many steps before, as the slots are fewer. */
template <typename T, typename layout>
INLINE void tell_step(const attention_params &p, const key_work &w, char *shared, unsigned step, key_walk at, int flags,
                      int64_t from, float *sum, ring *r) {
    const uint32_t smem = shared_address(shared);
    const int lane = threadIdx.x % 32, count = w.s.end - at.i0;
    const uint32_t to = smem + layout::numbers + step % SM90_PAIR_NUMBERS * 2 * BLOCK * 4;
    await_slot<layout>(smem, *r);
#pragma unroll
    for (int z = lane; z < BLOCK; z += 32) {
        const int64_t row = z < count ? from + z : 0;
        const int size = z < count ? 4 : 0;
        cp_async4(to + z * 4, (layout::rank == FIRST ? p.base : p.dsum) + row, size);
        if (layout::rank == FIRST)
            cp_async4(to + (BLOCK + z) * 4, p.rest + row, size);
    }
    cp_async_arrive(smem + layout::full + r->slot * 8);
    if (lane == 0) {
        ((told_step *)(shared + layout::steps))[step % SM90_PAIR_TOLD] = {at.i0, flags, sum};
        if (layout::rank == FIRST && layout::with)
            ((key_options *)(shared + layout::options))[step % SM90_PAIR_TOLD] =
                find_key_options<layout::with>(p, w.c, at.x, at.i0 | flags, sizeof(T));
        mbarrier_arrive(smem + layout::full + r->slot * 8);
    }
    advance<layout::slots>(r);
    /* The other tile of the step has nothing with it. */
    await_slot<layout>(smem, *r);
    mbarrier_arrive(smem + layout::full + r->slot * 8);
    if (lane == 0)
        mbarrier_arrive(smem + layout::full + r->slot * 8);
    advance<layout::slots>(r);
}

/* All steps of a tile of keys, where a mask or a bias is asked of memory to tell of them. */
template <typename T, typename layout>
INLINE void tell_asked(const attention_params &p, const key_work &w, key_window window, char *shared, unsigned *step,
                       ring *r) {
    key_walk at;
    for (; window.seen; ++*step) {
        const int flags = take_step<BLOCK>(p, w, &window, &at) & STEP_FLAGS;
        tell_step<T, layout>(p, w, shared, *step, at, flags, lse_at(p, w.c, at.x, at.i0),
                             find_sum<layout>(p, w, at.x, at.i0), r);
    }
}

/* The same where the band alone tells. */
template <typename T, typename layout>
INLINE void tell_all(const attention_params &p, const key_work &w, char *shared, unsigned *step, ring *r) {
    for (int x = w.y * p.group, left = w.steps; left > 0; x++) {
        int64_t from = lse_at(p, w.c, x, w.s.begin);
        float *sum = find_sum<layout>(p, w, x, w.s.begin);
#pragma unroll 1
        for (int i0 = w.s.begin; i0 < w.s.end; i0 += BLOCK, ++*step, left--) {
            const int flags = is_cut(w.s, i0) ? STEP_CUT | STEP_DIRTY | STEP_BAND : 0;
            tell_step<T, layout>(p, w, shared, *step, {x, i0}, flags, from, sum, r);
            from += BLOCK;
            sum += sum ? BLOCK * layout::dim : 0;
        }
    }
}

/* What there is to do for each tile of keys, and for each step; in the end that there is no more. A warp. */
template <typename T, typename layout> INLINE void tell(const attention_params &p, const crew &crew, char *shared) {
    constexpr bool ASKS = (layout::with & (WITH_MASK | WITH_BIAS | WITH_KEY_BIAS)) != 0;
    const uint32_t smem = shared_address(shared);
    const int lane = threadIdx.x % 32;
    key_work *const works = (key_work *)(shared + layout::works);
    ring r = {0, 0};
    unsigned step = 0;
    bool there = true;
    for (unsigned turn = 0; there; turn++) {
        key_work found;
        there = find_work<T, layout>(p, crew, turn, &found);
        if (!there)
            found.steps = -1;
        const key_window window = first_of(p, found, ASKS);
        mbarrier_wait(smem + layout::own_empty, (int)(turn & 1) ^ 1);
        __syncwarp(); /* of a tile without steps the next phase may come before a lane has seen this one */
        if (lane == 0) {
            works[turn & 1] = found;
            mbarrier_arrive(smem + layout::own_full);
            if (!there) /* in place of the other warp */
                mbarrier_arrive(smem + layout::own_full);
        }
        __syncwarp();
        const key_work &w = works[turn & 1]; /* there are few registers here */
        if (ASKS)
            tell_asked<T, layout>(p, w, window, shared, &step, &r);
        else
            tell_all<T, layout>(p, w, shared, &step, &r);
    }
}

#endif

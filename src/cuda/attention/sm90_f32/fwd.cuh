/* SPDX-License-Identifier: Apache-2.0
 * Of the forward for Hopper in float32: what lies where in shared memory, which tiles a block has, and how they come there. */
#ifndef HEDDLE_CUDA_ATTENTION_FWD32_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_FWD32_SM90_CUH

#include "cuda/attention/sm90_f32/options.cuh"
#include "cuda/attention/sm90_f32/split.cuh"

#define PART_BYTES (SPLIT_ROWS * 128) /* from the high to the low part of a strip */
#define SHIFT 15                      /* P is at most 1, and 2^15 in float16 */

/* GROUPS: warpgroups; one for each 64 queries, or as many as a tile has parts. */
template <int D, int GROUPS> struct forward32 {
    static constexpr int parts = split_parts(D), sets = GROUPS / parts, sharers = parts * WARPGROUP;
    static constexpr int rows = sets * SPLIT_ROWS;
    static constexpr int columns = D / parts; /* of o that a warpgroup has */
    static constexpr int tile = split_tile_bytes(D), part = split_part_bytes(D);
    static constexpr int slots = forward32_slots(D);
    static constexpr int keys = sets * tile; /* K and V in turn */
    static constexpr int infos = keys + slots * part;
    static constexpr int marks = infos + 2 * slots * 16; /* of the queries, two words for each 64 */
    static constexpr int largest = marks + sets * 2 * 4; /* a word a warp */
    static constexpr int barriers = largest + GROUPS * 4 * 4;
    static constexpr int bytes = barriers + 8 * FORWARD32_BARRIERS, steps = bytes; /* with options */
    static_assert(bytes == forward32_layout_bytes(D, rows), "as the plan counts");
};

/* The barriers, by the place of their first, one per slot. */
enum { FULL_SLOT = 0, EMPTY = FULL_SLOT + 8 * 8 };

/* What a block does: tiles t0 .. t1-1 of keys; queries from row0 on. */
struct forward_work {
    place c;
    int x, row0, t0, t1; /* x: head */
};

/* The tiles of keys that queries i0 .. i1-1 see; none: t0 = t1 = 0. */
INLINE void find_keys(const place &c, int i0, int i1, int *t0, int *t1) {
    const int begin = max(0, min(i0 + c.lo, c.sk)), end = i0 < i1 ? max(0, min(i1 + c.hi, c.sk)) : 0;
    *t0 = begin < end ? begin / SPLIT_ROWS : 0;
    *t1 = begin < end ? (end + SPLIT_ROWS - 1) / SPLIT_ROWS : 0;
}

/* The longest tiles of a causal mask, the last ones, first. */
template <int ROWS> INLINE forward_work find_work(const attention_params &p) {
    forward_work w;
    int tile;
    int64_t unit;
    tile_of_block(blockIdx.x, p.tiles_q, p.a.h * p.a.b, &tile, &unit);
    w.x = (int)(unit % p.a.h);
    w.c = find_place(p, unit / p.a.h);
    w.row0 = (p.tiles_q - 1 - tile) * ROWS;
    find_keys(w.c, w.row0, min(w.c.sq, w.row0 + ROWS), &w.t0, &w.t1);
    return w;
}

/* ---------------------------------------------------------------------------------------------------------- loads */

/* Tile n of a tensor, each part once its slot is empty. steps: where to tell that it is `step`; NULL: nowhere. */
template <int D, int GROUPS>
INLINE void load_tile(const split_tensor &x, int64_t n, uint32_t smem, ring *r, const split_tensor *other,
                      uint32_t *steps = NULL, uint32_t step = 0) {
    typedef forward32<D, GROUPS> layout;
#pragma unroll
    for (int part = 0; part < layout::parts; part++) {
        const uint32_t full = smem + layout::barriers + FULL_SLOT + r->slot * 8;
        const uint32_t info = smem + layout::infos + r->slot * 32;
        const bool knows = other && part == 0;
        mbarrier_wait(full + EMPTY - FULL_SLOT, r->turn ^ 1);
        if (steps && part == 0)
            steps[r->slot] = step;
        mbarrier_expect(full, layout::part + (knows ? 32 : 0));
        copy_bulk(smem + layout::keys + r->slot * layout::part,
                  (const char *)x.tiles + n * layout::tile + part * layout::part, layout::part, full);
        if (knows) {
            copy_bulk(info, &x.info[n], 16, full);
            copy_bulk(info + 16, &other->info[n], 16, full);
        }
        advance<layout::slots>(r);
    }
}

/* One thread sends for everything, in the order of use. What is known of V's tile comes with that of K. */
template <int D, int GROUPS> INLINE void produce(const attention_params &p, const forward_work &w, uint32_t smem) {
    const int64_t k = split_tile(p, w.c, true, w.x / p.group, 0);
    ring r = {0, 0};
#pragma unroll 1
    for (int t = w.t0; t < w.t1; t++) {
        load_tile<D, GROUPS>(p.split[SPLIT_K], k + t, smem, &r, &p.split[SPLIT_V]);
        load_tile<D, GROUPS>(p.split[SPLIT_V], k + t, smem, &r, NULL);
    }
}

/* What the sets of a block see of tile t of keys. */
template <int SETS> INLINE uint32_t step_of(const attention_params &p, const forward_work &w, int t) {
    uint32_t step = (uint32_t)t << STEP_TILE;
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const int i0 = w.row0 + set * SPLIT_ROWS;
        const uint8_t *const kinds = find_kinds(p.seen_by_queries, w.c.n, w.x, i0 / MASK_TILE);
        int t0, t1;
        find_keys(w.c, i0, min(w.c.sq, i0 + SPLIT_ROWS), &t0, &t1);
        if (t >= t0 && t < t1)
            step = with_kind(step, set, kinds ? kinds[t] : TILE_FULL);
    }
    return step;
}

/* Of the first tile from t on that a set sees; without a kind: none. */
template <int SETS> INLINE uint32_t seek_tile(const attention_params &p, const forward_work &w, int t) {
    for (; t < w.t1; t++) {
        const uint32_t step = step_of<SETS>(p, w, t);
        if (step & STEP_SEEN)
            return step;
    }
    return 0;
}

/* As produce, with options. */
template <int D, int GROUPS>
INLINE void produce_seen(const attention_params &p, const forward_work &w, uint32_t smem, char *shared) {
    typedef forward32<D, GROUPS> layout;
    const int64_t k = split_tile(p, w.c, true, w.x / p.group, 0);
    uint32_t *const steps = (uint32_t *)(shared + layout::steps);
    ring r = {0, 0};
    uint32_t step = seek_tile<layout::sets>(p, w, w.t0);
    if (!step)
        step = (uint32_t)w.t0 << STEP_TILE;
#pragma unroll 1
    for (bool last = false; !last;) {
        const uint32_t next = seek_tile<layout::sets>(p, w, tile_in(step) + 1);
        const int t = tile_in(step);
        last = !next || !(step & STEP_SEEN);
        load_tile<D, GROUPS>(p.split[SPLIT_K], k + t, smem, &r, &p.split[SPLIT_V], steps, step | last);
        load_tile<D, GROUPS>(p.split[SPLIT_V], k + t, smem, &r, NULL);
        step = next;
    }
}

/* The sharers of 64 queries split them, those from row i0 on; *marks: of this thread's two rows, in bits 0 and 8. Their exponent. */
template <int D, int GROUPS, bool FULL>
INLINE int split_queries(const attention_params &p, const forward_work &w, int i0, int set, char *shared,
                         uint32_t *marks) {
    typedef forward32<D, GROUPS> layout;
    constexpr int CHUNKS = SPLIT_ROWS * D / 8 / layout::sharers, STEP = SPLIT_ROWS / CHUNKS;
    const int thread = (threadIdx.x - WARPGROUP) % layout::sharers, row = thread / (D / 8), chunk = thread % (D / 8);
    const float *from = (const float *)p.t.q + row_at(p.a.q_stride, w.c.n, w.x, w.c.first_q + i0 + row);
    uint32_t *marked = (uint32_t *)(shared + layout::marks) + set * 2;
    uint32_t *largest = (uint32_t *)(shared + layout::largest) + set * layout::sharers / 32, most = 0;
    char *to = shared + set * layout::tile + chunk / 8 * (2 * PART_BYTES);
    float x[CHUNKS][8];
    int begin, end;
    split_range(w.c, false, &begin, &end);
#pragma unroll
    for (int z = 0; z < CHUNKS; z++) {
        const int i = i0 + row + z * STEP;
        load_chunk(from + z * STEP * p.a.q_stride.s, chunk * 8, (int)p.a.d, p.vectors & VECTOR_Q, i >= begin && i < end,
                   x[z]);
    }
#pragma unroll
    for (int z = 0; z < CHUNKS; z++)
        if (clean_chunk(x[z], &most))
            atomicOr(&marked[(row + z * STEP) / 32], 1u << (row + z * STEP) % 32);
    if (FULL && (p.a.features & (HEDDLE_BIAS | HEDDLE_BOOL_MASK))) { /* the tile's own place is free still */
        float *const tile = (float *)(shared + set * layout::tile);
        drop_hidden<D, CHUNKS>(p, w.c, false, w.x, i0, row, STEP, thread / 32, layout::sharers / 32, x, tile, marked,
                               (uint32_t *)tile + SPLIT_ROWS, [=] { barrier_sync(1 + GROUPS + set, layout::sharers); });
        most = largest_of<CHUNKS>(x);
    }
    most = __reduce_max_sync(ALL_LANES, most);
    if (thread % 32 == 0)
        largest[thread / 32] = most;
    barrier_sync(1 + GROUPS + set, layout::sharers);
#pragma unroll
    for (int warp = 0; warp < layout::sharers / 32; warp++)
        most = max(most, largest[warp]);
    const int exponent = split_exponent(most);
#pragma unroll
    for (int z = 0; z < CHUNKS; z++) {
        const int r = row + z * STEP;
        store_chunk<false>(to + r * 128 + ((chunk ^ r) & 7) * 16, x[z], power_of_two(exponent), 0.0f);
    }
    fence_async();
    barrier_sync(1 + GROUPS + set, layout::sharers);
    *marks = marked[fragment_row() / 32] >> fragment_row() % 32;
    return exponent;
}

#endif

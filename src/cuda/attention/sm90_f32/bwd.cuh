/* SPDX-License-Identifier: Apache-2.0
 * The parts of the float32 backward for Hopper: what a block has to do, fetching, products of split tiles, and the units of sums. */
#ifndef HEDDLE_CUDA_ATTENTION_BWD32_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_BWD32_SM90_CUH

#include "cuda/attention/settle.cuh"
#include "cuda/attention/sm90_f32/options.cuh"
#include "cuda/attention/sm90_f32/split.cuh"

#define BLOCK SPLIT_ROWS
#define CONSUMERS 256
#define LOW_PART (SPLIT_ROWS * 128) /* bytes from a tile's high to its low part */
#define NUMBERS                                                                                                        \
    BACKWARD32_NUMBERS /* of a step: base, rest and D of queries that stream; the two tiles' exponents (of K: `given`) */

enum walk { WALK_SUMS, WALK_ROWS, WALK_KEYS, WALK_QUERIES }; /* prep, lean and full; dkdv, dq */

template <int D, int WALK> struct backward32 {
    static constexpr int streams = WALK == WALK_SUMS ? 1 : 2, SLOTS = backward32_slots(D);
    static constexpr int parts = split_parts(D), columns = D / parts; /* of sums, a warpgroup's */
    static constexpr int own = backward32_own(D), sets = own / SPLIT_ROWS;
    /* Parts of tiles that come in a step: dkdv has no room for all of a wide one's, and the first comes once more for dK. */
    static constexpr int loads = parts * (WALK == WALK_KEYS && parts > 1 ? 3 : streams);
    static constexpr int tile_bytes = split_tile_bytes(D), part_bytes = split_part_bytes(D);
    static constexpr int seconds = sets * tile_bytes, slots = sets * streams * tile_bytes;
    static constexpr int numbers = slots + SLOTS * part_bytes;
    static constexpr int full = numbers + SLOTS * NUMBERS * 4, empty = full + SLOTS * 8, own_full = empty + SLOTS * 8;
    static constexpr int bytes = own_full + 8;
    static_assert(bytes == backward32_bytes(D, streams), "as the plan counts");
    static_assert(bytes <= 227 * 1024, "more than a multiprocessor has");
};

/* This lane has read all that it wanted. One arrival a warp would do, but racecheck would not follow it (tests/gpu/racecheck.cu). */
INLINE void release(uint32_t barrier) {
    mbarrier_arrive(barrier);
}

/* ---------------------------------------------------------------------------------------------------- what to do */

/* Positions begin .. end-1 are seen; tiles that begin before whole_from or after whole_to are cut by a mask or an end. */
struct span {
    int begin, end, whole_from, whole_to;
};

/* A block's own rows are own0 .. of own_rows; row r sees, or is seen by, positions r+low .. r+high of `rows`. */
struct work {
    place c;
    int head, own0, own_rows, low, high, rows;
    int head0, head1; /* that stream by */
};

template <int D, int WALK> INLINE work find_work(const attention_params &p, uint32_t block) {
    constexpr bool KEYS = WALK == WALK_KEYS;
    constexpr int OWN = backward32_own(D);
    const int tiles = KEYS ? p.tiles_k : (int)((p.a.sq + OWN - 1) / OWN);
    const int64_t heads = KEYS ? p.a.hk : p.a.h;
    int tile;
    int64_t unit;
    tile_of_block(block, tiles, p.a.b * heads, &tile, &unit);
    work w;
    w.c = find_place(p, unit / heads);
    w.head = (int)(unit % heads);
    w.own0 = (KEYS ? tile : tiles - 1 - tile) * OWN; /* the longest of a causal mask first */
    w.own_rows = KEYS ? w.c.sk : w.c.sq;
    w.rows = KEYS ? w.c.sq : w.c.sk;
    w.low = KEYS ? -w.c.hi : w.c.lo;
    w.high = KEYS ? -w.c.lo : w.c.hi;
    w.head0 = KEYS ? w.head * p.group : w.head / p.group;
    w.head1 = w.head0 + (KEYS ? p.group : 1);
    return w;
}

/* What `count` rows from own0 on see; begins with a tile. */
INLINE span find_span(const work &w, int own0, int count) {
    const int own1 = min(own0 + count, w.own_rows);
    span s = {0, 0, own0 + count - 1 + w.low, own0 - BLOCK + 1 + w.high};
    if (own0 < own1) {
        s.begin = max(0, min(own0 + w.low, w.rows)) / BLOCK * BLOCK;
        s.end = max(s.begin, min(own1 + w.high, w.rows));
    }
    s.whole_to = own0 + count > w.own_rows ? -1 : min(s.whole_to, s.end - BLOCK);
    return s;
}

template <int WALK> INLINE int own_tensor(int z) {
    return WALK == WALK_KEYS ? (z ? SPLIT_V : SPLIT_K) : (z ? SPLIT_DO : SPLIT_Q);
}
template <int WALK> INLINE int stream_tensor(int z) {
    return WALK == WALK_KEYS ? (z ? SPLIT_DO : SPLIT_Q) : (z ? SPLIT_V : SPLIT_K);
}

/* ---------------------------------------------------------------------------------------------------------- fetching */

template <int D, int WALK> INLINE void fetch_own(const attention_params &p, const work &w, uint32_t smem) {
    typedef backward32<D, WALK> layout;
    const int count = min(layout::sets, (w.own_rows - w.own0 + BLOCK - 1) / BLOCK);
    const int64_t tile = split_tile(p, w.c, WALK == WALK_KEYS, w.head, w.own0 / BLOCK);
    mbarrier_expect(smem + layout::own_full, layout::streams * count * layout::tile_bytes);
    for (int z = 0; z < layout::streams; z++)
        copy_bulk(smem + z * layout::seconds,
                  (const char *)p.split[own_tensor<WALK>(z)].tiles + tile * layout::tile_bytes,
                  count * layout::tile_bytes, smem + layout::own_full);
}

/* Which tile of a step, first or second, has the part of its load y. Of dQ the second comes first, as it is done with first: with an odd
 * number of slots nobody waits. */
template <int D, int WALK> INLINE constexpr int load_stream(int y) {
    return WALK == WALK_QUERIES ? 1 - y / split_parts(D) : y / split_parts(D) % 2;
}

/* A step's tiles, from row i0 on of head x, tile number `tile`, at: where the head's numbers begin. With options it is told to the others. */
template <int D, int WALK, bool FULL>
INLINE void fetch_step(const attention_params &p, const work &w, int x, int i0, int64_t tile, int64_t at, uint32_t step,
                       char *shared, uint32_t smem, ring *r) {
    typedef backward32<D, WALK> layout;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int z = 0; z < layout::loads; z++) {
        const int tensor = stream_tensor<WALK>(load_stream<D, WALK>(z)), part = z % layout::parts;
        const uint32_t bar = smem + layout::full + r->slot * 8;
        mbarrier_wait(smem + layout::empty + r->slot * 8, r->turn ^ 1);
        if (FULL && z == 0 && lane == 0) {
            uint32_t *const told = (uint32_t *)(shared + layout::numbers) + r->slot * NUMBERS + 3 * BLOCK + 2;
            told[0] = step;
            told[1] = (uint32_t)x;
        }
        if (lane == 0) {
            mbarrier_expect(bar, layout::part_bytes);
            copy_bulk(smem + layout::slots + r->slot * layout::part_bytes,
                      (const char *)p.split[tensor].tiles + tile * layout::tile_bytes + part * layout::part_bytes,
                      layout::part_bytes, bar);
        }
        if (z == 0) {
            const uint32_t numbers = smem + layout::numbers + r->slot * NUMBERS * 4;
#pragma unroll
            for (int row = lane; row < BLOCK && WALK == WALK_KEYS; row += 32) {
                const int bytes = i0 + row < w.rows ? 4 : 0;
                const int64_t from = bytes ? at + i0 + row : 0;
                cp_async4(numbers + row * 4, p.base + from, bytes);
                cp_async4(numbers + (BLOCK + row) * 4, p.rest + from, bytes);
                cp_async4(numbers + (2 * BLOCK + row) * 4, p.dsum + from, bytes);
            }
            const split_info *const first = &p.split[stream_tensor<WALK>(0)].info[tile];
            if (lane == 0)
                cp_async4(numbers + 3 * BLOCK * 4, WALK == WALK_KEYS ? &first->exponent : &first->given, 4);
            else if (lane < layout::streams)
                cp_async4(numbers + (3 * BLOCK + 1) * 4, &p.split[stream_tensor<WALK>(1)].info[tile].exponent, 4);
        }
        cp_async_arrive(bar);
        advance<layout::SLOTS>(r);
    }
}

/* What the sets of a block see of what streams by from row i0 on of head x. */
template <int D, int WALK> INLINE uint32_t step_of(const attention_params &p, const work &w, int x, int i0) {
    const mask_map &m = WALK == WALK_KEYS ? p.seen_of_keys : p.seen_by_queries;
    uint32_t step = (uint32_t)(i0 / BLOCK) << STEP_TILE;
#pragma unroll
    for (int set = 0; set < backward32<D, WALK>::sets; set++) {
        const int own0 = w.own0 + set * BLOCK;
        const uint8_t *const kinds = find_kinds(m, w.c.n, WALK == WALK_KEYS ? x : w.head, own0 / MASK_TILE);
        const span s = find_span(w, own0, BLOCK);
        if (i0 + BLOCK > s.begin && i0 < s.end)
            step = with_kind(step, set, kinds ? kinds[m.tiles_across > 1 ? i0 / MASK_TILE : 0] : TILE_FULL);
    }
    return step;
}

/* From row *i0 on of head *x the next that a set sees, and what; 0: none. */
template <int D, int WALK>
INLINE uint32_t seek_step(const attention_params &p, const work &w, const span &s, int *x, int *i0) {
    while (*x < w.head1) {
        const uint32_t step = step_of<D, WALK>(p, w, *x, *i0);
        if (step & STEP_SEEN)
            return step;
        *i0 += BLOCK;
        if (*i0 >= s.end) {
            *i0 = s.begin;
            ++*x;
        }
    }
    return 0;
}

/* With options. */
template <int D, int WALK>
INLINE void fetch_seen(const attention_params &p, const work &w, const span &s, char *shared, uint32_t smem, ring *r) {
    int x = w.head0, i0 = s.begin;
    uint32_t step = seek_step<D, WALK>(p, w, s, &x, &i0);
    if (!step) {
        x = w.head0;
        i0 = s.begin;
        step = (uint32_t)(i0 / BLOCK) << STEP_TILE;
    }
#pragma unroll 1
    for (bool last = false; !last;) {
        const bool wraps = i0 + BLOCK >= s.end;
        int next_x = wraps ? x + 1 : x, next_i0 = wraps ? s.begin : i0 + BLOCK;
        const uint32_t next = seek_step<D, WALK>(p, w, s, &next_x, &next_i0);
        last = !next || !(step & STEP_SEEN);
        fetch_step<D, WALK, true>(p, w, x, i0, split_tile(p, w.c, WALK != WALK_KEYS, x, i0 / BLOCK),
                                  WALK == WALK_KEYS ? lse_at(p, w.c, x, 0) : 0, step | last, shared, smem, r);
        x = next_x;
        i0 = next_i0;
        step = next;
    }
}

template <int D, int WALK, bool FULL>
INLINE void fetch(const attention_params &p, const work &w, char *shared, ring *r) {
    typedef backward32<D, WALK> layout;
    const uint32_t smem = shared_address(shared);
    const span s = find_span(w, w.own0, layout::own);
    if (s.begin >= s.end)
        return;
    if (threadIdx.x % 32 == 0)
        fetch_own<D, WALK>(p, w, smem);
    if constexpr (FULL) {
        fetch_seen<D, WALK>(p, w, s, shared, smem, r);
    } else {
        for (int x = w.head0; x < w.head1; x++) {
            int64_t tile = split_tile(p, w.c, WALK != WALK_KEYS, x, s.begin / BLOCK);
            const int64_t at = WALK == WALK_KEYS ? lse_at(p, w.c, x, 0) : 0;
#pragma unroll 1
            for (int i0 = s.begin; i0 < s.end; i0 += BLOCK, tile++)
                fetch_step<D, WALK, false>(p, w, x, i0, tile, at, 0, shared, smem, r);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------- products */

/* c[8] = A·Bᵀ of two tiles, over D columns: 64 rows of each, by the addresses of their parts. Issued only. The low part of queries comes
 * first, whether they are A or B, as in the forward: all make the same scores. With `rest`, the second half of the large products is summed
 * there: less is cut off. */
template <int D, int WALK>
INLINE void tile_scores(float (*c)[4], float (*rest)[4], const uint32_t (&a)[split_parts(D)],
                        const uint32_t (&b)[split_parts(D)]) {
    constexpr int STEPS = D / split_parts(D) / 16; /* of a part */
#pragma unroll
    for (int x = 0; x < 2; x++) {
        const bool low_first = (WALK == WALK_KEYS) == x;
#pragma unroll
        for (int s = 0; s < D / 16; s++)
            wgmma<f16, 64, 0>::run(
                c, describe_rows(a[s / STEPS] + (low_first ? LOW_PART : 0)) + rows_step<2 * BLOCK>(s % STEPS),
                describe_rows(b[s / STEPS] + (low_first ? 0 : LOW_PART)) + rows_step<2 * BLOCK>(s % STEPS), x || s);
    }
#pragma unroll
    for (int s = 0; s < D / 16; s++)
        wgmma<f16, 64, 0>::run(rest && s >= D / 32 ? rest : c,
                               describe_rows(a[s / STEPS]) + rows_step<2 * BLOCK>(s % STEPS),
                               describe_rows(b[s / STEPS]) + rows_step<2 * BLOCK>(s % STEPS), !rest || s != D / 32);
}

/* What dP is multiplied with, before D is taken from it. */
template <int D> INLINE float dp_factor(const attention_params &p) {
    return 1.0f + split_cut_off(min((int)p.a.dv, D > 128 ? 128 : 64));
}

/* c += t. */
INLINE void add_strip(float (*c)[4], float (*t)[4]) {
    pin_all<8>(t);
#pragma unroll
    for (int y = 0; y < 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            c[y][e] += t[y][e];
}

/* c[D/8] += A·B over the 64 rows of a tile, A in two parts in registers; a strip of 64 columns at a time. */
template <int D>
INLINE void add_product(float (*c)[4], const uint32_t (*high)[4], const uint32_t (*low)[4], uint32_t tile) {
#pragma unroll
    for (int x = 0; x < D / 64; x++) {
        const uint64_t high_b = describe_columns<2 * LOW_PART>(tile + x * 2 * LOW_PART);
        const uint64_t low_b = describe_columns<2 * LOW_PART>(tile + x * 2 * LOW_PART + LOW_PART);
        float t[8][4];
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < BLOCK / 16; s++)
            wgmma<f16, 64, 1>::run(t, low[s], high_b + columns_step(s), s > 0);
#pragma unroll
        for (int s = 0; s < BLOCK / 16; s++)
            wgmma<f16, 64, 1>::run(t, high[s], low_b + columns_step(s), 1);
#pragma unroll
        for (int s = 0; s < BLOCK / 16; s++)
            wgmma<f16, 64, 1>::run(t, high[s], high_b + columns_step(s), 1);
        wgmma_commit();
        wgmma_wait<0>();
        add_strip(c + x * 8, t);
    }
}

/* 2^e, of any e: what is out of range is so far from 1 that the nearest will do. */
INLINE float power(int e) {
    return power_of_two(max(-126, min(e, 126)));
}

/* x, times 2^exponent, in the units of c's rows, which grow if they must: below 2^15, and when they have grown, below 2^9. back: 1 or nearly,
 * another factor. */
template <int D>
INLINE void fit_units(int exponent, float back, int unit[2], const float (*x)[4], float (*c)[4], float by[2]) {
    float most[2] = {0.0f, 0.0f}, factor[2];
    bool grows = false;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            most[e / 2] = fmaxf(most[e / 2], fabsf(x[y][e]));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int bits = __float_as_int(quad_max(most[half]));
        const int need = max((bits >> 23) - 127, -100) + exponent, old = unit[half];
        if (need > old + 14)
            unit[half] = need - 8;
        factor[half] = power(old - unit[half]);
        by[half] = power(exponent - unit[half]) * back;
        grows |= old != unit[half];
    }
    if (__any_sync(ALL_LANES, grows))
#pragma unroll
        for (int y = 0; y < D / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[y][e] *= factor[e / 2];
}

/* Accumulators of 64 columns, times `by`, as A operands. */
INLINE void split_fragments(const float by[2], const float (*x)[4], uint32_t (*high)[4], uint32_t (*low)[4]) {
#pragma unroll
    for (int s = 0; s < BLOCK / 16; s++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float *pair = &x[2 * s + e / 2][e % 2 * 2];
            split_pair(pair[0] * by[e % 2], pair[1] * by[e % 2], &high[s][e], &low[s][e]);
        }
}

#endif

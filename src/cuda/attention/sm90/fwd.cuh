/* SPDX-License-Identifier: Apache-2.0
 * Of the forward for Hopper: what lies where in shared memory, the barriers, and which tile comes when; the softmax of a
 * tile. */
#ifndef HEDDLE_CUDA_ATTENTION_FWD_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_FWD_SM90_CUH

#include "cuda/attention/sm90/clocks.cuh"

#define CLEANERS 64
/* Tiles of keys whose bits of dropout are there or being made: as many that the warpgroups do not wait for them at once, and then compute
 * at once. */
#define FORWARD_KEPT_SLOTS 4

/* The barriers, by the place of their first; one for each slot. */
enum {
    Q_FULL = 0,
    Q_EMPTY = Q_FULL + 8 * SM90_MOST_STAGES,
    K_FULL = Q_EMPTY + 8 * SM90_MOST_STAGES,
    K_EMPTY = K_FULL + 8 * SM90_MOST_STAGES,
    V_FULL = K_EMPTY + 8 * SM90_MOST_STAGES,
    V_CLEAN = V_FULL + 8 * SM90_MOST_STAGES,
    V_EMPTY = V_CLEAN + 8 * SM90_MOST_STAGES
};
static_assert(V_EMPTY == 8 * SM90_MOST_STAGES * (SM90_FORWARD_BARRIERS - 1), "as the plan counts");

template <int D, int GROUPS, int BLOCK> struct forward90 {
    static constexpr int dim = D, rows = GROUPS * 64;
    /* Columns of o, and of V, that a block makes; over d 256 they may be a part, and K comes in chunks, tile after tile around a ring. */
    static constexpr int part = sm90_forward_part(D);
    static constexpr bool is_wide = D > SM90_MOST_WHOLE;
    static constexpr int chunk = sm90_forward_chunk(D), chunks = D / chunk, chunk_bytes = tile90<chunk, BLOCK>::bytes;
    static_assert(chunks * chunk == D, "whole chunks");
    static constexpr int slots = sm90_forward_slots(D, rows, BLOCK);
    static constexpr int turns = is_wide ? 1 : GROUPS;            /* warpgroups that take turns in issuing products */
    static constexpr int tile_bytes = tile90<part, BLOCK>::bytes; /* of V */
    static constexpr int stages = sm90_forward_stages(D);
    static constexpr int q_stages = sm90_forward_q_stages(D);
    static constexpr int q_bytes = tile90<D, rows>::bytes;
    static constexpr int k = q_stages * q_bytes;
    static constexpr int v = k + slots * chunk_bytes;
    static constexpr int bad = v + stages * tile_bytes;
    static constexpr int jobs = bad + stages * 16; /* of a tile of V a bit for each key */
    static constexpr int barriers = jobs + 2 * SM90_JOB_BYTES;
    static constexpr int behind = barriers + 8 * SM90_FORWARD_BARRIERS * SM90_MOST_STAGES;
    /* of chunks of K the barriers, from `barriers` on; of each job the first column of o */
    static constexpr int k_full = is_wide ? behind - barriers : K_FULL;
    static constexpr int k_empty = k_full + 8 * (is_wide ? slots : SM90_MOST_STAGES);
    static constexpr int columns = behind + (is_wide ? 2 * 8 * slots : 0), bytes = columns + (is_wide ? 2 * 4 : 0);
    static_assert(bytes == sm90_forward_layout_bytes(D, rows, BLOCK), "as the plan counts");
    /* paged: of each tile of K, which groups of PAGE_ROWS keys are in no page */
    static constexpr int hidden = bytes;
    static_assert(1024 + hidden + stages * 4 == sm90_forward_paged_bytes(D, rows, BLOCK), "as the plan counts");
    /* full: of the tile of queries and the next; what the thread that sends tells of tiles of keys */
    static constexpr int options = bytes, steps = options + 2 * sizeof(query_options);
    /* of each warpgroup: its bias is there, and is not needed any more; the bias */
    static constexpr int bias_full = steps + STEPS * 4 + sizeof(dropout_state), bias_empty = bias_full + GROUPS * 8;
    static constexpr int bias = (options + SM90_FORWARD_OPTIONS + 1023) / 1024 * 1024;
    static constexpr int bias_bytes = BLOCK / 64 * SM90_BIAS_BOX; /* of a warpgroup */
    /* dropout alone: the bits of tiles in its place, and two barriers each */
    static constexpr int kept_bytes = kept_rows<rows, BLOCK>::bytes;
    static constexpr int kept = bias, kept_full = kept + FORWARD_KEPT_SLOTS * kept_bytes,
                         kept_empty = kept_full + FORWARD_KEPT_SLOTS * 8;
    static_assert(FORWARD_KEPT_SLOTS * (kept_bytes + 16) <= GROUPS * bias_bytes, "they fit");
    static_assert(bias_empty + GROUPS * 8 - options <= SM90_FORWARD_OPTIONS, "as the plan counts");
    static_assert(1024 + bias + GROUPS * bias_bytes == sm90_forward_full_bytes(D, rows, BLOCK), "as the plan counts");
};

/* ---------------------------------------------------------------------------------------------------------- work */

/* Keys begin .. end-1 are seen by some query of a tile, i+lo .. i+hi of the sk keys by its i-th, of 0 .. last. */
struct forward_span {
    int begin, end, lo, hi, sk, last;
};
/* Where a tile's results go, and how many of its rows count, and are there. */
struct forward_target {
    int64_t o, lse;
    int x, rows, all_rows; /* head */
};
/* What the thread that sends tells the others of a tile, through shared memory. first_k, head_k, n: where its keys are, as the tensor maps
 * count. */
struct forward_job {
    forward_target t;
    forward_span s;
    int first_k, head_k, n;
};
/* paged, behind the two jobs: of keys that had 8 bits, what they and their values are multiplied with; ones. */
struct key_scales {
    float k, v;
};
static_assert(sizeof(forward_job) + sizeof(key_scales) <= SM90_JOB_BYTES, "two of them fit, too");

/* A tile of queries. */
struct forward_work {
    place c;
    int x, n, row0; /* head; batch as the tensor maps count */
    int column0;    /* of o, where others make another part */
    forward_span s;
};

/* Tiles come in pairs of equal cost under a causal mask: the last and the first of a head, and so on inwards; what is left in the
 * middle of an odd number pairs with its like of the next head. 16 heads at a time, whose keys stay in the second-level cache.
 * A block takes every gridDim.x-th pair; the pairs that do not make a full round are dealt out as single tiles. */
template <typename layout> INLINE unsigned count_units(const attention_params &p) {
    return (unsigned)(p.a.h * p.a.b) * sm90_forward_parts(layout::dim, p.a.dv);
}
template <typename layout> INLINE unsigned count_pairs(const attention_params &p) {
    return sm90_forward_pairs(count_units<layout>(p), (unsigned)p.tiles_q);
}

/* Which tile of which unit: of a head, or of its parts, which come side by side. */
struct forward_tile {
    unsigned unit, tile;
};

/* The first or the second of a pair; false: there is none. */
template <typename layout>
INLINE bool tile_of_pair(const attention_params &p, unsigned pair, unsigned second, forward_tile *at) {
    const unsigned units = count_units<layout>(p), tiles = (unsigned)p.tiles_q;
    const unsigned section = pair / (8 * tiles), j = pair - section * 8 * tiles;
    const unsigned count = min(16u, units - section * 16), half = tiles / 2;
    const unsigned down = j / count;
    unsigned unit = j - down * count, tile = second ? down : tiles - 1 - down;
    if (j >= count * half) {
        unit = 2 * (j - count * half) + second;
        tile = half;
        if (unit >= count)
            return false;
    }
    *at = {section * 16 + unit, tile};
    return true;
}

/* Of one step of this block. */
template <typename layout> INLINE bool tile_of_step(const attention_params &p, unsigned step, forward_tile *of) {
    const unsigned pairs = count_pairs<layout>(p), grid = gridDim.x;
    unsigned pair = step / 2 * grid + blockIdx.x, second = step % 2;
    if (step / 2 * grid + grid > pairs) {
        const unsigned left = pairs % grid, at = second ? 2 * grid - 1 - blockIdx.x : blockIdx.x;
        if (at >= 2 * left)
            return false;
        second = at >= left;
        pair = pairs - left + at - second * left;
    }
    return tile_of_pair<layout>(p, pair, second, of);
}

/* Has each sequence a length of its own? Else all lie alike. */
INLINE bool has_lengths(const attention_params &p) {
    return (p.a.features & (HEDDLE_VARLEN | HEDDLE_SEQLENS)) != 0;
}

/* Where all sequences lie alike, their place is found once; but the warps of blocks of three computing warpgroups have no registers to keep
 * it in. */
template <int ROWS> INLINE bool finds_each(const attention_params &p) {
    return ROWS > 128 || has_lengths(p);
}
template <int ROWS> INLINE void find_common(const attention_params &p, forward_work *w) {
    if (!finds_each<ROWS>(p))
        w->c = find_place(p, 0);
}

/* False: the tile has no rows. w: after find_common. */
template <typename layout> INLINE bool find_work(const attention_params &p, const forward_tile &at, forward_work *w) {
    constexpr int ROWS = layout::rows;
    const unsigned parts = sm90_forward_parts(layout::dim, p.a.dv), head = at.unit / parts;
    const unsigned h = (unsigned)p.a.h, n = head / h;
    w->x = (int)(head - n * h);
    w->column0 = (int)(at.unit - head * parts) * layout::part;
    if (finds_each<ROWS>(p))
        w->c = find_place(p, n);
    else
        w->c.n = n;
    w->n = p.a.features & HEDDLE_VARLEN ? 0 : (int)w->c.n;
    const int row0 = (int)at.tile * ROWS, i1 = min(w->c.sq, row0 + ROWS);
    w->row0 = row0;
    w->s = {0, 0, row0 + w->c.lo, row0 + w->c.hi, w->c.sk, i1 - 1 - row0};
    if (row0 < i1) {
        w->s.begin = max(0, min(row0 + w->c.lo, w->c.sk));
        w->s.end = max(w->s.begin, min(i1 + w->c.hi, w->c.sk));
    }
    return row0 < w->c.all_sq;
}

template <typename layout> INLINE forward_target target_of(const attention_params &p, const forward_work &w) {
    const int column0 = layout::is_wide ? w.column0 : 0;
    return {row_at(p.a.o_stride, w.c.n, w.x, w.c.first_q + w.row0) + column0, lse_at(p, w.c, w.x, w.row0), w.x,
            w.c.sq - w.row0, w.c.all_sq - w.row0};
}

/* paged: of a head of keys of sequence n. */
INLINE key_scales find_scales(const attention_params &p, int n, int head) {
    const int at = n * (int)p.a.hk + head;
    return {p.k_scale ? p.k_scale[at] : 1.0f, p.v_scale ? p.v_scale[at] : 1.0f};
}

/* lean: is a scale of keys a part of the units, as it costs nothing there? Else scores are multiplied one by one: by what is not positive, or
 * so far from one that the units might be no numbers any more. */
INLINE bool is_unit(const attention_params &p, float k_scale) {
    const float log2 = k_scale * p.scale_log2, natural = k_scale * p.unit;
    return fminf(log2, natural) > 0x1p-60f && fmaxf(log2, natural) < 0x1p60f;
}

/* What takes scores to exponents, and to natural units; scales NULL: they are no part of that. */
INLINE float log2_unit(const attention_params &p, const key_scales *scales) {
    return scales && is_unit(p, scales->k) ? p.scale_log2 * scales->k : p.scale_log2;
}
INLINE float natural_unit(const attention_params &p, const key_scales *scales) {
    return scales && is_unit(p, scales->k) ? p.unit * scales->k : p.unit;
}

/* This block's next tile that has rows. */
template <typename layout> INLINE bool next_work(const attention_params &p, unsigned *step, forward_work *w) {
    while (*step / 2 * gridDim.x < count_pairs<layout>(p)) {
        forward_tile at;
        const bool there = tile_of_step<layout>(p, *step, &at);
        ++*step;
        if (there && find_work<layout>(p, at, w))
            return true;
    }
    return false;
}

/* Where a mask decides what tiles cost: the next that no block has taken, the longest of a causal mask first. */
template <typename layout> INLINE bool take_work(const attention_params &p, forward_work *w) {
    const unsigned pairs = count_pairs<layout>(p);
    forward_tile at;
    unsigned x;
    while ((x = atomicAdd(p.seen_by_queries.taken, 1u)) < 2 * pairs)
        if (tile_of_pair<layout>(p, x < pairs ? x : 2 * pairs - 1 - x, x >= pairs, &at) && find_work<layout>(p, at, w))
            return true;
    return false;
}

/* The n-th tile of its kind: its slot, and the parity of the phase in which it is there. */
template <int SLOTS> INLINE unsigned slot_of(unsigned n) {
    return n % SLOTS;
}
template <int SLOTS> INLINE unsigned turn_of(unsigned n) {
    return n / SLOTS % 2;
}

/* Some key of the tile from j0 on is unseen by some query: the last ones, the first ones. */
template <int BLOCK> INLINE bool is_cut_above(const forward_span &w, int j0) {
    return j0 + BLOCK > w.end || j0 + BLOCK - 1 > w.hi;
}
INLINE bool is_cut_below(const forward_span &w, int j0) {
    return j0 < w.last + w.lo;
}
template <int BLOCK> INLINE bool is_cut(const forward_span &w, int j0) {
    return is_cut_above<BLOCK>(w, j0) || is_cut_below(w, j0);
}

/* Keys are taken from the last tile to the first. */
template <int BLOCK> INLINE int last_tile(const forward_span &w) {
    return w.begin + (w.end - 1 - w.begin) / BLOCK * BLOCK;
}

/* What a warpgroup does with a tile of queries of which it has the 64 from `row` on. It begins with the tile of keys from `first` on: it
 * skips the last one if it sees others, but none there. That is one at most, as its queries are less than BLOCK from the tile's last.
 * half: it sees the first half at most of where it begins; idle: it has no queries, and only keeps in step. */
struct group_work {
    int first;
    bool skips, half, idle;
};

template <int BLOCK, int FULL>
INLINE group_work find_group_work(const attention_params &p, const forward_span &w, int row) {
    if ((FULL & WITH_MASK) && p.seen_by_queries.kinds) /* the mask decides which tiles there are */
        return {0, false, false, row > w.last};
    const int top = last_tile<BLOCK>(w), last = min(min(row + 63, w.last) + w.hi, w.end - 1);
    const bool idle = row > w.last, skips = !idle && last < top && last >= w.begin;
    const int first = skips ? top - BLOCK : top;
    return {first, skips, !idle && last < first + BLOCK / 2, idle};
}

/* Of the tiles of keys from j0 down, the first that somebody sees a key of; under w.begin: there is none. A word tells of eight tiles; the map
 * begins and ends with whole ones. */
template <int BLOCK> INLINE int next_seen(const uint8_t *kinds, const forward_span &w, int j0) {
    static_assert(TILE_EMPTY == 0, "a word of them is 0");
    while (kinds && j0 >= w.begin) {
        const uint8_t *const at = kinds + j0 / BLOCK;
        const int before = (int)((size_t)at % 8);
        const uint64_t word = *(const uint64_t *)(at - before) << (7 - before) * 8; /* that of `at` comes last in it */
        const uint32_t high = (uint32_t)(word >> 32);
        if (word)
            return j0 - (high ? __clz((int)high) : 32 + __clz((int)word)) / 8 * BLOCK;
        j0 -= (before + 1) * BLOCK;
    }
    return j0;
}

/* By its band, or for the end, one of the queries sees few keys: of these the first or the last sees the fewest. */
INLINE bool shows_each(const forward_span &w) {
    const int first = min(w.hi + 1, w.sk) - max(w.lo, 0), last = min(w.last + w.hi + 1, w.sk) - max(w.last + w.lo, 0);
    return min(first, last) <= FEW_SHOWN;
}

/* full: what is to be said of the tile from j0 on, if the next is from `next` on. Any element may have a bias that masks it. */
template <int BLOCK, int WITH>
INLINE int step_of(const attention_params &p, const uint8_t *kinds, const forward_span &w, int j0, int next) {
    const bool bits = kinds && kinds[j0 / BLOCK] != TILE_FULL, last = next < w.begin;
    const bool cut = bits || is_cut<BLOCK>(w, j0) || has_bias<WITH>(p);
    const bool whole = !cut && !last && !is_cut<BLOCK>(w, next) && !(kinds && kinds[next / BLOCK] != TILE_FULL);
    const bool few =
        has_cap<WITH>(p) && cut && (bits || has_bias<WITH>(p) || shows_each(w)); /* whole tiles leave many */
    return j0 | (few ? STEP_FEW : 0) | (bits ? STEP_BITS : 0) | (last ? STEP_LAST : 0) | (cut ? STEP_CUT : 0) |
           (whole ? STEP_WHOLE : 0);
}

/* Rows i0 + 0 .. 63 and keys from j0 on: what a row does not see becomes -inf. A bit says whether it is seen; eight bits of a byte become
 * predicates at once. */
template <int N> INLINE void mask_band(const forward_span &w, int i0, int j0, float (*s)[4]) {
    static_assert(N <= 128, "two bytes");
    const int i = i0 + fragment_row(), column0 = j0 + fragment_column();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int last = min(i + half * 8 + w.hi, w.sk - 1) - column0, first = i + half * 8 + w.lo - column0;
#pragma unroll
        for (
            int e = 0; e < 2;
            e++) { /* columns 8y + e of this lane: as many from the first as are not behind the last; not seen before */
            const uint32_t to = (1u << min(max((last - e + 8) >> 3, 0), 16)) - 1,
                           from = (1u << min(max((first - e + 7) >> 3, 0), 16)) - 1, seen = to & ~from;
#pragma unroll
            for (int y = 0; y < N / 8; y++)
                if (!(seen & 1u << y))
                    s[y][2 * half + e] = -CUDART_INF_F;
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- softmax */

/* The running softmax of the two rows that a lane has a part of. */
struct softmax_state {
    float max[2], sum[2]; /* sum: this lane's part */
    int bad;              /* bits: the row sees a value that is not finite */
};

/* The largest score of each row in tiles of keys whose tanh was tanh.approx's; where ALiBi is added to that, also what it was before. */
struct cap_state {
    float most[2], capped[2];
    bool counts; /* this tile is one */
};

/* ALiBi of a tile, as add_slopes takes it. adds: its part of the largest score is to be known. */
struct lane_slopes {
    float slope, distance;
    bool adds;
};

/* The largest scores of a tile, of this lane and of its rows. What ALiBi has added is looked for where there is a new one: special
 * functions have more to do, but not so much that every element could have two of them in place of tanh. */
template <int N>
INLINE void note_largest(cap_state *cap, const lane_slopes &l, const float own[2], const float top[2],
                         const float (*s)[4]) {
    const bool more[2] = {top[0] > cap->most[0], top[1] > cap->most[1]};
    if (l.adds && __any_sync(ALL_LANES, more[0] || more[1]))
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int at = 0;
#pragma unroll
            for (int y = 0; y < N / 8; y++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    at = s[y][2 * half + e] == own[half] ? y * 8 + e : at;
            const float added = l.slope * fabsf(l.distance + (float)(8 * half - at));
            const float capped = quad_max(own[half] == top[half] ? own[half] + added : -CUDART_INF_F);
            cap->capped[half] = more[half] ? capped : cap->capped[half];
        }
#pragma unroll
    for (int half = 0; half < 2; half++)
        cap->most[half] = more[half] ? top[half] : cap->most[half];
}

/* S -> P = exp2(S·c - max·c). The maximum is allowed to be out of date as long as P stays under 2^8: what counts in the end is
 * that all that is summed has the same. What was summed before has to be multiplied by shrink; false: by ones. */
template <int N>
INLINE bool online_softmax(softmax_state *state, float c, float (*s)[4], float shrink[2], cap_state *cap,
                           const lane_slopes &slopes) {
    row_scale row[2];
    float before[2], own[2], tops[2];
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
        for (int y = 1; y < N / 8; y++)
            top = fmaxf(top, fmaxf(s[y][2 * half], s[y][2 * half + 1]));
        own[half] = top;
        top = tops[half] = quad_max(top);
        before[half] = state->max[half];
        const bool more = (top - before[half]) * c > 8.0f;
        state->max[half] = more ? top : before[half];
        row[half] = scale_row(before[half], state->max[half], c);
        grows |= more;
    }
    if (cap && cap->counts)
        note_largest<N>(cap, slopes, own, tops, s);
    if (__any_sync(ALL_LANES, is_alone<bf16>(row[0]) || is_alone<bf16>(row[1])))
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (is_alone<bf16>(row[half]))
                scale_alone(before[half], state->max[half], &row[half]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        shrink[half] = row[half].shrink;
        state->sum[half] *= shrink[half];
    }
#pragma unroll
    for (int y = 0; y < N / 8; y++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = exp2_approx(fmaf(s[y][e], row[e / 2].factor, -row[e / 2].base));
        state->sum[0] += s[y][0] + s[y][1];
        state->sum[1] += s[y][2] + s[y][3];
    }
    return __any_sync(ALL_LANES, grows);
}

#endif

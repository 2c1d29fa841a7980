/* SPDX-License-Identifier: Apache-2.0
 * What the backward kernels for Hopper share: the order of tiles, the cleaning of what a mask cuts, weights and their
 * gradients in registers, storing. */
#ifndef HEDDLE_CUDA_ATTENTION_BWD_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_BWD_SM90_CUH

#include "cuda/attention/sm90/kept.cuh"
#include "cuda/attention/sm90/key_options.cuh"

#define OWN_ROWS SM90_OWN_ROWS
#define CONSUMERS 256

/* This warp has read all that it wanted. */
INLINE void release(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barrier);
}

/* The same, where lanes have read or written shared memory themselves: every lane arrives. One for all of them after __syncwarp() would
 * do, but racecheck takes an arrival for an order of what the arriving thread did, and no other (tests/gpu/racecheck.cu). */
INLINE void release_each(uint32_t barrier) {
    mbarrier_arrive(barrier);
}

/* Of the blocks that share a kind of work, which one this is. */
struct crew {
    unsigned block, blocks;
};

/* Which tile of which unit (a head of a sequence) a block takes in its step-th turn; false: there is none left. Tiles
 * come in pairs, the longest of a causal mask with the shortest, so that all pairs are alike; the middle of an odd number
 * has none: a tile past the end. SECTION units at a time, whose tensors stay in the second-level cache. The pairs that do not
 * make a round are dealt out as single tiles. */
template <unsigned SECTION = 16>
INLINE bool take_tile(unsigned step, const crew &c, unsigned tiles, unsigned units, bool last_first, int *tile,
                      unsigned *unit) {
    const unsigned each = (tiles + 1) / 2, pairs = each * units;
    unsigned pair = step / 2 * c.blocks + c.block, second = step % 2;
    if (step / 2 * c.blocks + c.blocks > pairs) {
        const unsigned left = pairs % c.blocks, at = second ? 2 * c.blocks - 1 - c.block : c.block;
        if (at >= 2 * left || step / 2 * c.blocks >= pairs)
            return false;
        second = at >= left;
        pair = pairs - left + at - second * left;
    }
    const unsigned section = pair / (SECTION * each) * SECTION, r = pair - section * each,
                   count = min(SECTION, units - section);
    const unsigned t = r / count, other = tiles - 1 - t;
    *unit = section + r % count;
    *tile = (int)(second && other == t ? tiles : (second != 0) != last_first ? other : t);
    return true;
}

/* 0·NaN would leak through a product with what a mask leaves out: in a cut tile, chunks that are not finite become
 * zero, and their rows' numbers in mark[0] and mark[second] NaN, for those that see them. APART: the warpgroups come from code of their own. */
template <typename T, int D, int BLOCK, bool APART = false>
INLINE void clean_slot(uint32_t tile, float *mark, int second) {
    const int thread = threadIdx.x - WARPGROUP;
    constexpr int CHUNKS = tile90<D, BLOCK>::bytes / 16;
    if (is_bad_part<T, CHUNKS, CONSUMERS>(tile, thread))
#pragma unroll 1
        for (int x = thread; x < CHUNKS; x += CONSUMERS)
            if (has_nonfinite(load_shared16(tile + x * 16), T())) {
                store_shared16(tile + x * 16, make_uint4(0, 0, 0, 0));
                mark[x / 8 % BLOCK] = mark[second + x / 8 % BLOCK] = CUDART_NAN_F;
            }
    fence_async();
    if (APART)
        barrier_sync_apart(1, CONSUMERS);
    else
        barrier_sync(1, CONSUMERS);
}

/* dS·K reads K of rows that a mask may have left out: what is not finite becomes zero, and who sees the key gets NaN by its mark. Is
 * there one? */
template <typename T, int D, int ROWS> INLINE bool clean_keys(uint32_t keys, float *marks) {
    const int thread = threadIdx.x - WARPGROUP;
    constexpr int CHUNKS = tile90<D, ROWS>::bytes / 16;
    bool found = false;
    if (thread < ROWS)
        marks[thread] = 0.0f;
    barrier_sync(1, CONSUMERS);
    if (is_bad_part<T, CHUNKS, CONSUMERS>(keys, thread)) {
        found = true;
#pragma unroll 1
        for (int x = thread; x < CHUNKS; x += CONSUMERS)
            if (has_nonfinite(load_shared16(keys + x * 16), T())) {
                store_shared16(keys + x * 16, make_uint4(0, 0, 0, 0));
                marks[x / 8 % ROWS] = CUDART_NAN_F;
            }
        fence_async();
    }
    return barrier_or(1, CONSUMERS, found);
}

/* ------------------------------------------------------------------------------------------------------- masks */

/* What streams by: positions begin .. end-1 count. Tiles that begin before whole_from or after whole_to are cut by a mask
 * or an end. A row of the block sees, or is seen by, positions row+low .. row+high if it is one of `rows`. */
struct span {
    int begin, end, whole_from, whole_to, low, high, rows;
};

INLINE bool is_cut(const span &w, int at) {
    return at < w.whole_from || at > w.whole_to;
}

/* Which positions a row sees, as columns of a lane in the tile from `at` on. */
INLINE void find_limits(const span &w, int row, int at, int *first, int *last) {
    at += fragment_column();
    *first = row + w.low - at;
    *last = (row < w.rows ? min(row + w.high, w.end - 1) : at - 1) - at;
}
/* --------------------------------------------------------------------------------------------------------- keys */

/* What a block has to do for one tile of keys. */
struct key_work {
    place c;
    int y, tile, key0, steps; /* head; tile of keys, its first; tiles of queries over all heads of the group */
    span s;                   /* of queries */
};

/* Of a boolean mask that is the same for all queries: is a tile of keys hidden from all heads that share them? */
INLINE bool is_hidden(const attention_params &p, const place &c, int y, int tile) {
    const mask_map &m = p.seen_of_keys;
    if (!m.kinds || m.tiles_across > 1)
        return false;
    for (int x = y * p.group; x < (m.of_h ? (y + 1) * p.group : y * p.group + 1); x++)
        if (*find_kinds(m, c.n, x, tile) != TILE_EMPTY)
            return false;
    return true;
}

/* The first keys of a causal mask are seen most. */
template <int BLOCK, int FULL = 0, int OWN = OWN_ROWS, unsigned SECTION = 16>
INLINE bool find_keys(const attention_params &p, const crew &c, unsigned step, key_work *work) {
    key_work &w = *work;
    int tile;
    unsigned unit;
    const unsigned hk = (unsigned)p.a.hk;
    if (!take_tile<SECTION>(step, c, (unsigned)p.tiles_k, (unsigned)p.a.b * hk, false, &tile, &unit))
        return false;
    w.tile = tile;
    w.key0 = tile * OWN;
    w.y = (int)(unit % hk);
    w.c = find_place(p, unit / hk);
    const int key1 = min(w.key0 + OWN, w.c.sk);
    w.s = {0, 0, w.key0 + OWN - 1 - w.c.hi, w.key0 - BLOCK + 1 - w.c.lo, -w.c.hi, -w.c.lo, w.c.sk};
    if (w.key0 < key1) {
        w.s.begin = max(0, min(w.key0 - w.c.hi, w.c.sq)) / 64 * 64; /* tiles of the sums of dQ */
        w.s.end = max(w.s.begin, min(key1 - w.c.lo, w.c.sq));
        if (FULL)
            w.s.begin = w.s.begin < w.s.end ? w.s.begin / BLOCK * BLOCK : w.s.end; /* and of the mask */
    }
    w.s.whole_to = w.key0 + OWN > w.c.sk ? -1 : min(w.s.whole_to, w.s.end - BLOCK);
    w.steps = (w.s.end - w.s.begin + BLOCK - 1) / BLOCK * p.group;
    if ((FULL & WITH_MASK) && w.key0 < key1 && is_hidden(p, w.c, w.y, tile))
        w.steps = 0;
    return true;
}

/* Does a bias that is the same for all queries mask a tile of keys for all heads that share them? By whole warps. */
template <typename T, int OWN> INLINE bool masks_all(const attention_params &p, const key_work &w) {
    const int heads = p.a.bias_stride.h ? p.group : 1;
    bool all = true;
    for (int x = w.y * p.group; all && x < w.y * p.group + heads; x++) {
        const T *const bias = (const T *)p.t.bias + row_at(p.a.bias_stride, w.c.n, x, 0);
#pragma unroll
        for (int z = (int)threadIdx.x % 32; z < OWN; z += 32)
            all &= to_float(bias[min(w.key0 + z, w.c.sk - 1)]) < (float)LEAST_BIAS;
        all = __all_sync(ALL_LANES, all);
    }
    return all;
}

/* Is there anything to do for a tile of keys but zeros? By whole warps, all of which find the same. */
template <typename T, int FULL, int OWN = OWN_ROWS>
INLINE bool has_steps(const attention_params &p, const key_work &w) {
    return w.steps && !((FULL & WITH_KEY_BIAS) && masks_all<T, OWN>(p, w));
}

/* full: the steps of a tile of keys, in order, without those in which no query sees a key. */
struct key_walk {
    int x, i0; /* head, first query; x past the last: there is none */
};

template <int BLOCK> INLINE key_walk next_seen(const attention_params &p, const key_work &w, key_walk at) {
    const int last = (w.y + 1) * p.group;
    while (at.x < last && kind_of_queries<BLOCK>(p, w.c, w.tile, at.x, at.i0) == TILE_EMPTY) {
        at.i0 += BLOCK;
        if (at.i0 >= w.s.end)
            at = {at.x + 1, w.s.begin};
    }
    return at;
}

/* The first; where nothing is seen, a step says so. */
template <int BLOCK> INLINE key_walk first_seen(const attention_params &p, const key_work &w) {
    const key_walk begin = {w.y * p.group, w.s.begin}, at = next_seen<BLOCK>(p, w, begin);
    return at.x < (w.y + 1) * p.group ? at : begin;
}

template <int BLOCK> INLINE key_walk step_after(const attention_params &p, const key_work &w, key_walk at) {
    at.i0 += BLOCK;
    if (at.i0 >= w.s.end)
        at = {at.x + 1, w.s.begin};
    return next_seen<BLOCK>(p, w, at);
}

/* full: the bias of a step on its way to the second-level cache. */
template <typename T, int BLOCK> INLINE void prefetch_step(const attention_params &p, const key_work &w, key_walk at) {
    if (p.a.features & HEDDLE_BIAS)
        prefetch_bias<T>(p, (const T *)p.t.bias + row_at(p.a.bias_stride, w.c.n, at.x, 0), at.i0, w.c.sq - 1, BLOCK,
                         w.key0, OWN_ROWS, threadIdx.x % 32, 32);
}

/* What is to be said of a step, but whether it is the last. Any element may have a bias that masks it. */
template <int BLOCK>
INLINE int step_flags(const attention_params &p, const key_work &w, int x, int i0, tile_kind kind) {
    const bool bits = kind != TILE_FULL;
    const bool band = is_cut(w.s, i0), cut = bits || band || (p.a.features & HEDDLE_BIAS);
    bool dirty = true;
    if (p.a.features & (HEDDLE_BIAS | HEDDLE_BOOL_MASK)) { /* light has had a look */
        const int32_t *flags = p.dirty + (w.c.n * p.a.h + x) * ((p.a.sq + 63) / 64) + i0 / 64;
        const bool second =
            i0 + 64 < p.a.sq ? flags[1] != 0 : (p.a.features & HEDDLE_VARLEN) != 0; /* a neighbour's rows */
        dirty = flags[0] || (BLOCK > 64 && second);
    }
    return i0 | (bits ? STEP_BITS : 0) | (cut ? STEP_CUT : 0) | (dirty ? STEP_DIRTY : 0) | (band ? STEP_BAND : 0);
}

/* Has one of the rows a second part of its log-sum-exp? The same for all warps. APART: from one kind of number to the next. */
template <int BLOCK, int APART = BLOCK> INLINE bool has_rest(const float *numbers) {
    float any = numbers[APART + threadIdx.x % 32];
#pragma unroll
    for (int x = 32; x < BLOCK; x += 32)
        any = fmaxf(fabsf(any), fabsf(numbers[APART + threadIdx.x % 32 + x]));
    return __any_sync(ALL_LANES, any != 0.0f);
}

/* Sᵀ -> Pᵀ. Rows are keys from row0, columns queries from i0. CAREFUL: tiles with numbers that have a rest, and cut ones, where
 * keys that are not seen become -0. Sᵀ lacks the factor `by`: in other tiles no score is so large that the rounding of by·scale is seen. */
template <bool CAREFUL, int BLOCK, int APART = BLOCK>
INLINE void key_weights(float scale, const span &w, int row0, int i0, const float *numbers, float (*s)[4],
                        float by = 1.0f) {
    const int column0 = fragment_column();
    int first[2], last[2];
    for (int half = 0; half < 2; half++)
        find_limits(w, row0 + half * 8, i0, &first[half], &last[half]);
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++) {
        const int column = y * 8 + column0;
        const float2 base = *(const float2 *)(numbers + column);
        const float2 rest = CAREFUL ? *(const float2 *)(numbers + APART + column) : base;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[y][e] = CAREFUL ? weight_of<bf16>(s[y][e] * by, scale, e % 2 ? base.y : base.x, e % 2 ? rest.y : rest.x)
                              : exp2_approx(fmaf(s[y][e], scale * by, e % 2 ? -base.y : -base.x));
            if (CAREFUL && (y * 8 + e % 2 < first[e / 2] || y * 8 + e % 2 > last[e / 2]))
                s[y][e] = -0.0f;
        }
    }
}

/* dPᵀ -> dSᵀ, from Pᵀ; seen rows that were marked get NaN in both. */
template <bool CUT, bool MAKES_DS, int BLOCK>
INLINE void key_gradients(const float *bases, const float *dsums, float (*s)[4], float (*dp)[4]) {
    const int column0 = fragment_column();
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++) {
        const float2 dsum = *(const float2 *)(dsums + y * 8 + column0);
        const float2 base = CUT ? *(const float2 *)(bases + y * 8 + column0) : dsum;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const bool seen = !CUT || __float_as_int(s[y][e]) >= 0;
            if (CUT && seen && isnan(e % 2 ? base.y : base.x))
                s[y][e] = CUDART_NAN_F;
            if (MAKES_DS)
                dp[y][e] = seen ? s[y][e] * (dp[y][e] - (e % 2 ? dsum.y : dsum.x)) : 0.0f;
        }
    }
}

/* key_gradients of 16 queries with dropout alone: dSᵀ = Pᵀ∘(Z∘dPᵀ - D), where Z is `by` for what is kept, and 0; then Pᵀ of what is kept. */
template <bool CUT>
INLINE void dropped_key_gradients(uint32_t kept, float by, const float *bases, const float *dsums, float (*s)[4],
                                  float (*dp)[4]) {
    const int column0 = fragment_column();
    const float none = __uint_as_float(opaque(0)); /* or P would be masked by three operations on integers */
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float2 dsum = *(const float2 *)(dsums + y * 8 + column0);
        const float2 base = CUT ? *(const float2 *)(bases + y * 8 + column0) : dsum;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const bool seen = !CUT || __float_as_int(s[y][e]) >= 0;
            if (CUT && seen && isnan(e % 2 ? base.y : base.x))
                s[y][e] = CUDART_NAN_F;
            const float part = was_kept(kept, y, e) ? dp[y][e] : 0.0f;
            dp[y][e] = seen ? s[y][e] * fmaf(part, by, -(e % 2 ? dsum.y : dsum.x)) : 0.0f;
            s[y][e] = was_kept(kept, y, e) ? s[y][e] : none;
        }
    }
}

#endif

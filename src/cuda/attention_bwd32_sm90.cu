/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for Hopper in float32: no atomics, the same bits every time. Every product is three of float16 parts
 * (attention_split_sm90.cuh).
 *
 *   prep   of large scores: the log-sum-exp anew, as maximum and logarithm of the sum, from the very scores of dkdv and dq
 *   dkdv   a block owns 128 keys, 64 to a warpgroup, and walks over the queries that see them, head by head of the group:
 *          Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q.
 *   dq     a block owns 128 queries of one head, 64 to a warpgroup: S = Q·Kᵀ, dP = dO·Vᵀ, dQ += dS·K.
 *
 * All are one walk: of what the block owns there is a first (K; Q) and a second (V; dO) tensor, and so there is of what streams
 * by (Q, dO; K, V). S is made of the firsts, dP of the seconds. One warp fetches, into a ring of tiles of 64 rows.
 *
 * The tensor cores cut off when they add to an accumulator. So the small products come first, sums over a tile begin at zero, and are
 * added to those of the tiles before by rounding additions. P and dS are scaled, row by row, by powers of two that float16 can
 * hold: a row's sums are in units of 2^unit, and the unit grows with what is met. */
#include "attention_sm90.cuh"
#include "attention_split_sm90.cuh"

#define OWN_ROWS 128
#define BLOCK SPLIT_ROWS
#define CONSUMERS 256
#define LOW_PART (SPLIT_ROWS * 128) /* bytes from a tile's high to its low part */
#define NUMBERS (3 * BLOCK + 4)     /* of a step: base, rest and D of queries that stream; the two tiles' exponents */

enum walk { WALK_SUMS, WALK_KEYS, WALK_QUERIES }; /* prep, dkdv, dq */

template <int D, int WALK> struct backward32 {
    static constexpr int streams = WALK == WALK_SUMS ? 1 : 2, SLOTS = BACKWARD32_SLOTS(D);
    static constexpr int tile_bytes = BLOCK * D * 4;
    static constexpr int slots = 2 * streams * tile_bytes;
    static constexpr int numbers = slots + SLOTS * tile_bytes;
    static constexpr int full = numbers + SLOTS * NUMBERS * 4, empty = full + SLOTS * 8, own_full = empty + SLOTS * 8;
    static constexpr int bytes = own_full + 8;
    static_assert(bytes <= 227 * 1024, "more than a multiprocessor has");
};

/* This warp has read all that it wanted. */
INLINE void release(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
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

template <int WALK> INLINE work find_work(const attention_params &p, uint32_t block) {
    constexpr bool KEYS = WALK == WALK_KEYS;
    const int tiles = KEYS ? p.tiles_k : (int)((p.a.sq + OWN_ROWS - 1) / OWN_ROWS);
    const int64_t heads = KEYS ? p.a.hk : p.a.h;
    int tile;
    int64_t unit;
    split_block(block, tiles, p.a.b * heads, &tile, &unit);
    work w;
    w.c = find_place(p, unit / heads);
    w.head = (int)(unit % heads);
    w.own0 = (KEYS ? tile : tiles - 1 - tile) * OWN_ROWS; /* the longest of a causal mask first */
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

template <int D, int WALK> INLINE void fetch_own(const attention_params &p, const work &w, uint32_t base) {
    typedef backward32<D, WALK> layout;
    const int count = min(2, (w.own_rows - w.own0 + BLOCK - 1) / BLOCK);
    const int64_t tile = split_tile(p, w.c, WALK == WALK_KEYS, w.head, w.own0 / BLOCK);
    mbarrier_expect(base + layout::own_full, layout::streams * count * layout::tile_bytes);
    for (int z = 0; z < layout::streams; z++)
        copy_bulk(base + 2 * z * layout::tile_bytes,
                  (const char *)p.split[own_tensor<WALK>(z)].tiles + tile * layout::tile_bytes,
                  count * layout::tile_bytes, base + layout::own_full);
}

/* Of dQ the second tile of a step comes first, as it is done with first: with an odd number of slots nobody waits. */
template <int D, int WALK> INLINE void fetch(const attention_params &p, const work &w, uint32_t base) {
    typedef backward32<D, WALK> layout;
    const int lane = threadIdx.x % 32;
    const span s = find_span(w, w.own0, OWN_ROWS);
    ring r = {0, 0};
    if (s.begin >= s.end)
        return;
    if (lane == 0)
        fetch_own<D, WALK>(p, w, base);
    for (int x = w.head0; x < w.head1; x++) {
        int64_t tile = split_tile(p, w.c, WALK != WALK_KEYS, x, s.begin / BLOCK);
        const int64_t at = WALK == WALK_KEYS ? lse_at(p, w.c, x, 0) : 0;
#pragma unroll 1
        for (int i0 = s.begin; i0 < s.end; i0 += BLOCK, tile++)
#pragma unroll
            for (int z = 0; z < layout::streams; z++) {
                const int tensor = stream_tensor<WALK>(WALK == WALK_QUERIES ? 1 - z : z);
                const uint32_t bar = base + layout::full + r.slot * 8;
                mbarrier_wait(base + layout::empty + r.slot * 8, r.turn ^ 1);
                if (lane == 0) {
                    mbarrier_expect(bar, layout::tile_bytes);
                    copy_bulk(base + layout::slots + r.slot * layout::tile_bytes,
                              (const char *)p.split[tensor].tiles + tile * layout::tile_bytes, layout::tile_bytes, bar);
                }
                if (z == 0) {
                    const uint32_t numbers = base + layout::numbers + r.slot * NUMBERS * 4;
#pragma unroll
                    for (int row = lane; row < BLOCK && WALK == WALK_KEYS; row += 32) {
                        const int bytes = i0 + row < w.rows ? 4 : 0;
                        const int64_t from = bytes ? at + i0 + row : 0;
                        cp_async4(numbers + row * 4, p.base + from, bytes);
                        cp_async4(numbers + (BLOCK + row) * 4, p.rest + from, bytes);
                        cp_async4(numbers + (2 * BLOCK + row) * 4, p.dsum + from, bytes);
                    }
                    if (lane < layout::streams)
                        cp_async4(numbers + (3 * BLOCK + lane) * 4,
                                  &p.split[lane ? stream_tensor<WALK>(1) : stream_tensor<WALK>(0)].info[tile].exponent,
                                  4);
                }
                cp_async_arrive(bar);
                advance<layout::SLOTS>(&r);
            }
    }
}

/* ---------------------------------------------------------------------------------------------------------- products */

/* c[8] = A·Bᵀ of two tiles, over D columns: 64 rows of each. Issued only. */
template <int D> INLINE void tile_scores(float (*c)[4], uint32_t a, uint32_t b) {
    const uint64_t high_a = describe_rows(a), low_a = describe_rows(a + LOW_PART);
    const uint64_t high_b = describe_rows(b), low_b = describe_rows(b + LOW_PART);
#pragma unroll
    for (int s = 0; s < D / 16; s++)
        wgmma<f16, 64, 0>::run(c, low_a + rows_step<2 * BLOCK>(s), high_b + rows_step<2 * BLOCK>(s), s > 0);
#pragma unroll
    for (int s = 0; s < D / 16; s++)
        wgmma<f16, 64, 0>::run(c, high_a + rows_step<2 * BLOCK>(s), low_b + rows_step<2 * BLOCK>(s), 1);
#pragma unroll
    for (int s = 0; s < D / 16; s++)
        wgmma<f16, 64, 0>::run(c, high_a + rows_step<2 * BLOCK>(s), high_b + rows_step<2 * BLOCK>(s), 1);
}

/* c[D/8] += A·B over the 64 rows of a tile, A in two parts in registers; 64 columns at a time. */
template <int D>
INLINE void add_product(float (*c)[4], const uint32_t (*high)[4], const uint32_t (*low)[4], uint32_t tile) {
#pragma unroll
    for (int x = 0; x < D / 64; x++) {
        const uint64_t high_b = describe_columns<2 * BLOCK * 128>(tile + x * 2 * BLOCK * 128);
        const uint64_t low_b = describe_columns<2 * BLOCK * 128>(tile + x * 2 * BLOCK * 128 + LOW_PART);
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
        pin_all<8>(t);
#pragma unroll
        for (int y = 0; y < 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[x * 8 + y][e] += t[y][e];
    }
}

/* 2^e, of any e: what is out of range is so far from 1 that the nearest will do. */
INLINE float power(int e) {
    return power_of_two(max(-126, min(e, 126)));
}

/* x, times 2^exponent, in the units of c's rows, which grow if they must: below 2^15, and when they have grown, below 2^9. */
template <int D> INLINE void fit_units(int exponent, int unit[2], const float (*x)[4], float (*c)[4], float by[2]) {
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
        by[half] = power(exponent - unit[half]);
        grows |= old != unit[half];
    }
    if (__any_sync(ALL_LANES, grows))
#pragma unroll
        for (int y = 0; y < D / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[y][e] *= factor[e / 2];
}

INLINE void split_pair(float a, float b, uint32_t *high, uint32_t *low) {
    *high = pack_f16(a, b);
    *low = pack_f16(a - f16_to_float((uint16_t)*high), b - f16_to_float((uint16_t)(*high >> 16)));
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

/* ---------------------------------------------------------------------------------------------------------- a step */

/* What a warpgroup knows of its rows. */
template <int D, int WALK> struct state {
    uint32_t base, own; /* shared memory; this warpgroup's first tile there */
    float factor[2];    /* what S and dP are to be multiplied with for the sake of the own tiles */
    int first,
        last[2]; /* positions that this lane's first row sees from, and both see to, less the lane's first column */
    float base2[2], rest[2], dsum[2]; /* WALK_QUERIES: of the two rows; WALK_SUMS: maximum and sum */
    int unit[2], unit2[2];
};

/* Does a lane's row see its column x of the tile at i0? */
template <typename S> INLINE bool is_seen(const S &k, int i0, int half, int x) {
    return x >= k.first + half * 8 - i0 && x <= k.last[half] - i0;
}

/* S -> P; in a cut tile -0 where it is not seen. */
template <int WALK, bool CUT, typename S>
INLINE void make_weights(float factor, const S &k, int i0, const float *numbers, float (*s)[4]) {
    const int column0 = fragment_column();
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++) {
        float base[4] = {k.base2[0], k.base2[0], k.base2[1], k.base2[1]},
              rest[4] = {k.rest[0], k.rest[0], k.rest[1], k.rest[1]};
        if (WALK == WALK_KEYS) {
            const float2 b = *(const float2 *)(numbers + y * 8 + column0),
                         r = *(const float2 *)(numbers + BLOCK + y * 8 + column0);
            base[0] = base[2] = b.x;
            base[1] = base[3] = b.y;
            rest[0] = rest[2] = r.x;
            rest[1] = rest[3] = r.y;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[y][e] = exp2_approx(fmaf(s[y][e], factor, -base[e]) - rest[e]);
            if (CUT && !is_seen(k, i0, e / 2, y * 8 + e % 2))
                s[y][e] = -0.0f;
        }
    }
}

/* dP, times `factor`, and P -> dS. */
template <int WALK, bool CUT, typename S>
INLINE void make_gradients(float factor, const S &k, const float *numbers, const float (*s)[4], float (*dp)[4]) {
    const int column0 = fragment_column();
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++) {
        float dsum[4] = {k.dsum[0], k.dsum[0], k.dsum[1], k.dsum[1]};
        if (WALK == WALK_KEYS) {
            const float2 d = *(const float2 *)(numbers + 2 * BLOCK + y * 8 + column0);
            dsum[0] = dsum[2] = d.x;
            dsum[1] = dsum[3] = d.y;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float t = fmaf(dp[y][e], factor, -dsum[e]);
            dp[y][e] = CUT && __float_as_int(s[y][e]) < 0 ? 0.0f : s[y][e] * t;
        }
    }
}

/* One tile of what streams by: `first` and `second` lie in these slots. Releases them. */
template <int D, int WALK>
INLINE void add_tile(state<D, WALK> *k, int i0, bool cut, const float *numbers, int first, int second, float (*c)[4],
                     float (*c2)[4]) {
    typedef backward32<D, WALK> layout;
    const int exponent[] = {((const int *)numbers)[3 * BLOCK], ((const int *)numbers)[3 * BLOCK + 1]};
    const uint32_t at = k->base + layout::slots + first * layout::tile_bytes,
                   at2 = k->base + layout::slots + second * layout::tile_bytes;
    float s[8][4], dp[8][4], by[2];
    uint32_t high[4][4], low[4][4];
    wgmma_fence();
    tile_scores<D>(s, k->own, at);
    wgmma_commit();
    tile_scores<D>(dp, k->own + 2 * layout::tile_bytes, at2);
    wgmma_commit();
    const float factor = k->factor[0] * power(-exponent[0]), factor2 = k->factor[1] * power(-exponent[1]);
    wgmma_wait<1>();
    pin_all<8>(s);
    if (cut)
        make_weights<WALK, true>(factor, *k, i0, numbers, s);
    else
        make_weights<WALK, false>(factor, *k, i0, numbers, s);
    wgmma_wait<0>();
    pin_all<8>(dp);
    if (WALK == WALK_QUERIES)
        release(k->base + layout::empty + second * 8);
    if (cut)
        make_gradients<WALK, true>(factor2, *k, numbers, s, dp);
    else
        make_gradients<WALK, false>(factor2, *k, numbers, s, dp);
    fit_units<D>(-exponent[0], k->unit, dp, c, by);
    split_fragments(by, dp, high, low);
    add_product<D>(c, high, low, at);
    if (WALK == WALK_KEYS) {
        release(k->base + layout::empty + first * 8);
        fit_units<D>(-exponent[1], k->unit2, s, c2, by);
        split_fragments(by, s, high, low);
        add_product<D>(c2, high, low, at2);
        release(k->base + layout::empty + second * 8);
    } else
        release(k->base + layout::empty + first * 8);
}

/* Every lane has its own maximum and sum of a row until the end. */
template <int D> INLINE void add_scores(state<D, WALK_SUMS> *k, int i0, const float *numbers, int slot) {
    typedef backward32<D, WALK_SUMS> layout;
    float s[8][4];
    wgmma_fence();
    tile_scores<D>(s, k->own, k->base + layout::slots + slot * layout::tile_bytes);
    wgmma_commit();
    const float factor = k->factor[0] * power(-((const int *)numbers)[3 * BLOCK]);
    wgmma_wait<0>();
    pin_all<8>(s);
    release(k->base + layout::empty + slot * 8);
    for (int half = 0; half < 2; half++) {
        float top = k->base2[half], sum = 0.0f;
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (is_seen(*k, i0, half, y * 8 + e))
                    top = fmaxf(top, s[y][2 * half + e] * factor);
        const float base = top == -CUDART_INF_F ? 0.0f : top;
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (is_seen(*k, i0, half, y * 8 + e))
                    sum += exp2_approx(fmaf(s[y][2 * half + e], factor, -base));
        k->rest[half] = fmaf(k->rest[half], exp2_approx(k->base2[half] - base), sum);
        k->base2[half] = top;
    }
}

/* ------------------------------------------------------------------------------------------------------- beginning, end */

/* prep has been here: the rows' numbers, or nothing yet. */
template <int D, int WALK>
INLINE state<D, WALK> begin_state(const attention_params &p, const work &w, int group, char *shared) {
    typedef backward32<D, WALK> layout;
    state<D, WALK> k;
    const int own0 = w.own0 + group * BLOCK;
    k.base = shared_address(shared);
    k.own = k.base + group * layout::tile_bytes;
    const int row0 = own0 + fragment_row();
    k.first = row0 + w.low - fragment_column();
    const int64_t tile = own0 < w.own_rows ? split_tile(p, w.c, WALK == WALK_KEYS, w.head, own0 / BLOCK) : 0;
    for (int z = 0; z < layout::streams; z++)
        k.factor[z] = power(own0 < w.own_rows ? -p.split[own_tensor<WALK>(z)].info[tile].exponent : 0);
    k.factor[0] *= p.scale_log2;
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8;
        k.last[half] = (i < w.own_rows ? min(i + w.high, w.rows - 1) : -1) - fragment_column();
        k.unit[half] = k.unit2[half] = -1000;
        if (WALK == WALK_SUMS) {
            k.base2[half] = -CUDART_INF_F;
            k.rest[half] = 0.0f;
        } else if (WALK == WALK_QUERIES) {
            const int64_t at = i < w.own_rows ? lse_at(p, w.c, w.head, i) : 0;
            k.base2[half] = i < w.own_rows ? p.base[at] : CUDART_INF_F;
            k.rest[half] = i < w.own_rows ? p.rest[at] : 0.0f;
            k.dsum[half] = i < w.own_rows ? p.dsum[at] : 0.0f;
        }
    }
    return k;
}

/* The warp's 16 rows, of which `rows` from own0 on are there. */
template <int D>
INLINE void store_sums(void *to, int64_t at, int64_t stride, int row0, int rows, int width, float by, const int unit[2],
                       float (*c)[4]) {
    if (!to)
        return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float one = power(unit[half] / 2), other = power(unit[half] - unit[half] / 2);
#pragma unroll
        for (int y = 0; y < D / 8; y++)
            for (int e = 2 * half; e < 2 * half + 2; e++)
                c[y][e] = c[y][e] * one * other;
        if (row0 + half * 8 < rows)
            store_row<float, D>((float *)to + at + (row0 + half * 8) * stride, c, half, width, by);
    }
}

/* Large log-sum-exps in two parts, where they agree with those that were given; NaN where dO is not finite. */
template <int D>
INLINE void store_numbers(const attention_params &p, const work &w, int row0, const state<D, WALK_SUMS> *k,
                          bool walked) {
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8;
        const float top = quad_max(k->base2[half]), base = top == -CUDART_INF_F ? 0.0f : top;
        float sum = quad_sum(k->rest[half] * exp2_approx(k->base2[half] - base));
        if (i >= w.own_rows || threadIdx.x % 4)
            continue;
        const int64_t at = lse_at(p, w.c, w.head, i);
        const split_info dout = load_info(p.split[SPLIT_DO], split_tile(p, w.c, false, w.head, i / BLOCK));
        if (dout.marks[i % BLOCK / 32] >> i % 32 & 1)
            p.base[at] = CUDART_NAN_F;
        else if (walked && top != -CUDART_INF_F) {
            const float lse = ((const float *)p.t.lse)[at];
            if (p.a.features & HEDDLE_SINKS)
                sum += exp2f(((const float *)p.t.sinks)[w.head] * LOG2E - base);
            const float rest = log2f(sum);
            if (fabsf(lse) > 12.0f && fabsf((base + rest) * LN2 - lse) <= fabsf(lse) * 0x1p-20f) {
                p.base[at] = base;
                p.rest[at] = rest;
            }
        }
    }
}

template <int D, int WALK> INLINE void consume(const attention_params &p, const work &w, bool walks, char *shared) {
    typedef backward32<D, WALK> layout;
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    const span all = find_span(w, w.own0, OWN_ROWS), mine = find_span(w, w.own0 + group * BLOCK, BLOCK);
    state<D, WALK> k = begin_state<D, WALK>(p, w, group, shared);
    float c[WALK == WALK_SUMS ? 1 : D / 8][4], c2[WALK == WALK_KEYS ? D / 8 : 1][4];
    zero_all<WALK == WALK_SUMS ? 1 : D / 8>(c);
    zero_all<WALK == WALK_KEYS ? D / 8 : 1>(c2);
    ring r = {0, 0};
    if (walks && all.begin < all.end)
        mbarrier_wait(k.base + layout::own_full, 0);
    const int steps = walks ? (all.end - all.begin + BLOCK - 1) / BLOCK * (w.head1 - w.head0) : 0;
    int i0 = all.begin;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const int a = r.slot, b = layout::streams == 1 || a + 1 < layout::SLOTS ? a + 1 : 0;
        const float *numbers = (const float *)(shared + layout::numbers) + a * NUMBERS;
        const bool seen = i0 + BLOCK > mine.begin && i0 < mine.end, cut = i0 < mine.whole_from || i0 > mine.whole_to;
        mbarrier_wait(k.base + layout::full + a * 8, r.turn);
        advance<layout::SLOTS>(&r);
        if (layout::streams == 2) {
            mbarrier_wait(k.base + layout::full + b * 8, r.turn);
            advance<layout::SLOTS>(&r);
        }
        if (!seen) {
            release(k.base + layout::empty + a * 8);
            if (layout::streams == 2)
                release(k.base + layout::empty + b * 8);
        } else if constexpr (WALK == WALK_SUMS)
            add_scores<D>(&k, i0, numbers, a);
        else
            add_tile<D, WALK>(&k, i0, cut, numbers, WALK == WALK_QUERIES ? b : a, WALK == WALK_QUERIES ? a : b, c, c2);
        i0 = i0 + BLOCK < all.end ? i0 + BLOCK : all.begin; /* the next head */
    }
    uint32_t block = blockIdx.x;
    pin(block); /* or what is needed from here on would have been kept through the loop */
    const work again = find_work<WALK>(p, block);
    const place &o = again.c;
    const int row0 = group * BLOCK + fragment_row();
    if constexpr (WALK == WALK_SUMS)
        store_numbers<D>(p, again, again.own0 + row0, &k, walks);
    else if (WALK == WALK_QUERIES)
        store_sums<D>(p.t.dq, row_at(p.a.dq_stride, o.n, again.head, o.first_q + again.own0), p.a.dq_stride.s, row0,
                      o.all_sq - again.own0, (int)p.a.d, p.scale, k.unit, c);
    else {
        const int64_t row = o.first_k + again.own0;
        store_sums<D>(p.t.dk, row_at(p.a.dk_stride, o.n, again.head, row), p.a.dk_stride.s, row0, o.all_sk - again.own0,
                      (int)p.a.d, p.scale, k.unit, c);
        store_sums<D>(p.t.dv, row_at(p.a.dv_stride, o.n, again.head, row), p.a.dv_stride.s, row0, o.all_sk - again.own0,
                      (int)p.a.dv, 1.0f, k.unit2, c2);
    }
}

/* Has the block a row whose log-sum-exp is too coarse? */
INLINE bool is_large(const attention_params &p, const work &w) {
    const int i = w.own0 + (int)threadIdx.x;
    const float lse =
        threadIdx.x < OWN_ROWS && i < w.own_rows ? fabsf(((const float *)p.t.lse)[lse_at(p, w.c, w.head, i)]) : 0.0f;
    return __syncthreads_or(lse > 12.0f && lse < CUDART_INF_F);
}

template <int D, int WALK> INLINE void attention_backward(const attention_params &p) {
    typedef backward32<D, WALK> layout;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared);
    const work w = find_work<WALK>(p, blockIdx.x);
    const bool walks = WALK != WALK_SUMS || is_large(p, w);
    if (threadIdx.x == 0) {
        for (int x = 0; x < layout::SLOTS; x++) {
            mbarrier_init(base + layout::full + x * 8, 1 + 32);
            mbarrier_init(base + layout::empty + x * 8, CONSUMERS / 32);
        }
        mbarrier_init(base + layout::own_full, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 32 && walks)
            fetch<D, WALK>(p, w, base);
    } else {
        registers_more<240>();
        consume<D, WALK>(p, w, walks, shared);
    }
}

#define WALK_prep WALK_SUMS
#define WALK_dkdv WALK_KEYS
#define WALK_dq WALK_QUERIES
#define K(pass, dtype, dim, variant, family, warps, tiles, block)                                                      \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        attention_backward<dim, WALK_##pass>(p);                                                                       \
    }
#define ATTENTION_BWD32_90_LIST
#include "attention.def"

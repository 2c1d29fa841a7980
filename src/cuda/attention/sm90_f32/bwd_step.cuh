/* SPDX-License-Identifier: Apache-2.0
 * A step of the float32 backward for Hopper: what a warpgroup knows of its rows, weights and gradients of a tile, with and without
 * options, and what it adds to sums. */
#ifndef HEDDLE_CUDA_ATTENTION_BWD_STEP32_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_BWD_STEP32_SM90_CUH

#include "cuda/attention/sm90_f32/bwd.cuh"
#include "cuda/attention/sm90_f32/options.cuh"

/* What a warpgroup knows of its rows. */
template <int D, int WALK> struct state {
    uint32_t smem, own; /* shared memory; this warpgroup's first tile there */
    int part;           /* whose columns this warpgroup sums */
    int own0;           /* its first row */
    float factor;       /* what dP is to be multiplied with for the sake of the own tile */
    int exponent; /* S likewise, with the scale's: by 2^exponent, and by the scale's mantissa. Together they need not be */
                  /* normal numbers until the other tile's exponent joins in */
    int first,
        last[2]; /* positions that this lane's first row sees from, and both see to, less the lane's first column */
    float base[2], rest[2],
        dsum[2];     /* of the two rows; WALK_SUMS, WALK_ROWS: maximum, in the units that tiles share, and sum; D */
    float weight[2]; /* WALK_QUERIES: this lane's part of the sum of a row's P */
    int unit[2], unit2[2];
};

/* Does a lane's row see its column x of the tile at i0? */
template <typename S> INLINE bool is_seen(const S &k, int i0, int half, int x) {
    return x >= k.first + half * 8 - i0 && x <= k.last[half] - i0;
}

/* S -> P; CUT: in a tile that is cut, -0 where it is not seen. factor: its power of two brings S to the units of base. */
template <int WALK, bool CUT, typename S>
INLINE void make_weights(float factor, const S &k, int i0, const float *numbers, float (*s)[4]) {
    const int column0 = fragment_column();
    const float power = power_of(factor), by = mantissa_of(factor);
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++) {
        float base[4] = {k.base[0], k.base[0], k.base[1], k.base[1]},
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
            s[y][e] = exp2_approx(fmaf(s[y][e], power, -base[e]) * by) * rest[e];
            if (CUT && !is_seen(k, i0, e / 2, y * 8 + e % 2))
                s[y][e] = -0.0f;
        }
    }
}

/* The weights of a tile join their rows' sums. */
template <typename S> INLINE void add_weights(S *k, const float (*s)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0.0f;
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
            sum += s[y][2 * half] + s[y][2 * half + 1];
        k->weight[half] += sum;
    }
}

/* S -> P of a tile without options, and in dq what its rows sum to. */
template <int WALK, typename S>
INLINE void weigh_tile(float factor, S *k, int i0, bool cut, const float *numbers, float (*s)[4]) {
    if (cut)
        make_weights<WALK, true>(factor, *k, i0, numbers, s);
    else
        make_weights<WALK, false>(factor, *k, i0, numbers, s);
    if (WALK == WALK_QUERIES)
        add_weights(k, s);
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

/* Which elements of a tile does the band show? As make_scores takes them. */
template <typename S> INLINE uint32_t find_seen(const S &k, int i0, bool cut) {
    uint32_t seen = ALL_LANES;
    if (cut)
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!is_seen(k, i0, e / 2, y * 8 + e % 2))
                    seen &= ~(1u << (4 * y + e));
    return seen;
}

/* Eights of columns whose bias is asked for together. */
#define EIGHTS 1

/* What the map shows of this lane's rows and the tile at i0 of head x; all where that is not cut. */
template <int WALK, typename S>
INLINE uint32_t find_shown_rows(const attention_params &p, const place &c, int64_t x, const S &k, int i0, int kind) {
    const mask_map &m = WALK == WALK_KEYS ? p.seen_of_keys : p.seen_by_queries;
    if (kind == TILE_FULL || !m.kinds)
        return ALL_LANES;
    return find_shown<BLOCK>(m, find_bits(m, c.n, x), k.own0 + fragment_row(), (WALK == WALK_KEYS ? c.sk : c.sq) - 1,
                             i0);
}

/* q·k, times `by`, and dP, times `factor`, of head x -> P where it is kept, and dS. sums: of a tile's P of the two rows, kept or not. */
template <int WALK, typename S>
INLINE void make_all(const attention_params &p, const place &c, int64_t x, float by, float factor, const S &k, int i0,
                     bool cut, uint32_t shown, const float *numbers, float (*s)[4], float (*dp)[4], float sums[2]) {
    constexpr bool KEYS = WALK == WALK_KEYS;
    const int column0 = fragment_column(), warp_row = k.own0 + (int)threadIdx.x % WARPGROUP / 32 * 16;
    const int row = k.own0 + fragment_row(), column = i0 + column0;
    lane_options<float> o[2];
    find_options<float, KEYS>(p, c, x, KEYS ? column : row, KEYS ? row : column, o);
    uint32_t seen = find_seen(k, i0, cut) & shown;
    kept_bits<BLOCK> kept = keep_all<BLOCK>();
    if (p.drops)
        kept =
            find_kept<KEYS, BLOCK>(p, make_dropout(p), dropout_head(p, c.n, x), warp_row + (KEYS ? 0 : duty_row()), i0);
#pragma unroll
    for (int y0 = 0; y0 < BLOCK / 8; y0 += EIGHTS) {
        float slack[EIGHTS][4];
        make_scores<float, KEYS, EIGHTS>(p, o, by, !cut, y0, &seen, s + y0, slack,
                                         !(KEYS ? p.seen_of_keys : p.seen_by_queries).kinds);
#pragma unroll
        for (int y = y0; y < y0 + EIGHTS; y++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float *at = numbers + y * 8 + column0 + e % 2;
                const float base = KEYS ? at[0] : k.base[e / 2], rest = KEYS ? at[BLOCK] : k.rest[e / 2];
                const float dsum = KEYS ? at[2 * BLOCK] : k.dsum[e / 2];
                const float weight = weight_of<float>(s[y][e], LOG2E, base, rest);
                const bool there = seen >> (4 * y + e) & 1, stays = is_kept(kept, y, e);
                const float t = stays ? dp[y][e] * factor : 0.0f;
                dp[y][e] = there ? weight * (t - dsum) * slack[y - y0][e] : 0.0f;
                if (!KEYS)
                    sums[e / 2] += there ? weight : 0.0f;
                s[y][e] = there && stays ? weight : 0.0f;
            }
    }
}

/* What P and dP of a tile add: dS in the place of dP, and with options, where s is q·k still, P. */
template <int D, int WALK, bool FULL>
INLINE void make_sums(const attention_params &p, const place &of, int64_t x, float factor, int exponent,
                      state<D, WALK> *k, int i0, bool cut, uint32_t shown, const float *numbers, float (*s)[4],
                      float (*dp)[4]) {
    if (FULL) {
        float sums[2] = {0.0f, 0.0f};
        make_all<WALK>(p, of, x, scale_by(front_factor(p), k->exponent - exponent), factor * p.keep_scale, *k, i0, cut,
                       shown, numbers, s, dp, sums);
        for (int half = 0; half < 2 && WALK == WALK_QUERIES; half++)
            k->weight[half] += sums[half];
    } else if (cut)
        make_gradients<WALK, true>(factor, *k, numbers, s, dp);
    else
        make_gradients<WALK, false>(factor, *k, numbers, s, dp);
}

/* The parts of this warpgroup's own tile, first or second. */
template <int D, int WALK> INLINE void find_own(const state<D, WALK> &k, int z, uint32_t (&at)[split_parts(D)]) {
    typedef backward32<D, WALK> layout;
#pragma unroll
    for (int part = 0; part < layout::parts; part++)
        at[part] = k.own + z * layout::seconds + part * layout::part_bytes;
}

/* The exponent of the first of a step's tiles, by what is told of it. */
template <int WALK> INLINE int first_exponent(int told) {
    return WALK == WALK_KEYS ? told : told >> 1;
}

/* What dS is multiplied with before it meets that tile: K has something for the sake of S alone. */
template <int WALK> INLINE float taken_back(const attention_params &p, int told) {
    return WALK == WALK_QUERIES && told & 1 ? 1.0f - score_cut_off(p) : 1.0f;
}

/* One tile of what streams by, of head x: `first` and `second` lie in these slots. Releases them. */
template <int D, int WALK, bool FULL>
INLINE void add_tile(const attention_params &p, const place &of, int64_t x, state<D, WALK> *k, int i0, bool cut,
                     int kind, const float *numbers, int first, int second, float (*c)[4], float (*c2)[4]) {
    typedef backward32<D, WALK> layout;
    const int told = ((const int *)numbers)[3 * BLOCK];
    const int exponent[] = {first_exponent<WALK>(told), ((const int *)numbers)[3 * BLOCK + 1]};
    const uint32_t at[] = {k->smem + layout::slots + first * layout::tile_bytes},
                   at2[] = {k->smem + layout::slots + second * layout::tile_bytes};
    float s[8][4], dp[8][4], dp2[8][4], by[2];
    uint32_t high[4][4], low[4][4], own[1], own2[1];
    find_own(*k, 0, own);
    find_own(*k, 1, own2);
    if (FULL)
        prefetch_bias(p, of, x, WALK == WALK_KEYS ? i0 : k->own0, WALK == WALK_KEYS ? k->own0 : i0);
    wgmma_fence();
    tile_scores<D, WALK>(s, NULL, own, at);
    wgmma_commit();
    tile_scores<D, WALK>(dp, D > 64 ? dp2 : NULL, own2, at2);
    wgmma_commit();
    const float factor = mantissa_of(p.scale_log2) * power(k->exponent - exponent[0]),
                factor2 = k->factor * power(-exponent[1]);
    const uint32_t shown = FULL ? find_shown_rows<WALK>(p, of, x, *k, i0, kind) : ALL_LANES;
    wgmma_wait<1>();
    pin_all<8>(s);
    if (!FULL)
        weigh_tile<WALK>(factor, k, i0, cut, numbers, s);
    wgmma_wait<0>();
    pin_all<8>(dp);
    if (D > 64)
        add_strip(dp, dp2);
    if (WALK == WALK_QUERIES)
        release(k->smem + layout::empty + second * 8);
    make_sums<D, WALK, FULL>(p, of, x, factor2, exponent[0], k, i0, cut, shown, numbers, s, dp);
    fit_units<D>(-exponent[0], taken_back<WALK>(p, told), k->unit, dp, c, by);
    split_fragments(by, dp, high, low);
    add_product<D>(c, high, low, at[0]);
    release(k->smem + layout::empty + first * 8);
    if (WALK == WALK_KEYS) {
        fit_units<D>(-exponent[1], 1.0f, k->unit2, s, c2, by);
        split_fragments(by, s, high, low);
        add_product<D>(c2, high, low, at2[0]);
        release(k->smem + layout::empty + second * 8);
    }
}

/* Every lane has its own maximum and sum of a row until the end. */
template <typename S> INLINE void add_scores(S *k, int i0, float factor, const float (*s)[4]) {
    for (int half = 0; half < 2; half++) {
        float top = k->base[half], sum = 0.0f;
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (is_seen(*k, i0, half, y * 8 + e))
                    top = fmaxf(top, s[y][2 * half + e] * power_of(factor));
        const float base = top == -CUDART_INF_F ? 0.0f : top;
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (is_seen(*k, i0, half, y * 8 + e))
                    sum += exp2_approx((s[y][2 * half + e] * power_of(factor) - base) * mantissa_of(factor));
        k->rest[half] = fmaf(k->rest[half], exp2_approx((k->base[half] - base) * mantissa_of(factor)), sum);
        k->base[half] = top;
    }
}

/* A row's maximum and sum over its scores, -inf where hidden. */
INLINE void add_row(const float (*s)[4], int half, float *base, float *rest) {
    float top = *base, sum = 0.0f;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
        top = fmaxf(top, fmaxf(s[y][2 * half], s[y][2 * half + 1]));
    const float from = top == -CUDART_INF_F ? 0.0f : top;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
        sum += exp2_approx((s[y][2 * half] - from) * LOG2E) + exp2_approx((s[y][2 * half + 1] - from) * LOG2E);
    *rest = fmaf(*rest, exp2_approx((*base - from) * LOG2E), sum);
    *base = top;
}

/* The same with all options, of head x; or, once the log-sum-exp is there, D, of the very P and dP of dkdv and dq. */
template <typename S>
INLINE void add_options(const attention_params &p, const place &c, int64_t x, S *k, int i0, bool cut, int kind,
                        bool sums_d, float by, float factor, float (*s)[4], const float (*dp)[4]) {
    const int row = k->own0 + fragment_row(), column = i0 + fragment_column();
    float slack[EIGHTS][4];
    lane_options<float> o[2];
    find_options<float, false>(p, c, x, row, column, o);
    uint32_t seen = find_seen(*k, i0, cut) & find_shown_rows<WALK_ROWS>(p, c, x, *k, i0, kind);
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y += EIGHTS)
        make_scores<float, false, EIGHTS>(p, o, by, !cut, y, &seen, s + y, slack, !p.seen_by_queries.kinds);
    hide_scores<BLOCK / 8>(seen, s);
    if (!sums_d) {
        for (int half = 0; half < 2; half++)
            add_row(s, half, &k->base[half], &k->rest[half]);
        return;
    }
    kept_bits<BLOCK> kept = keep_all<BLOCK>();
    if (p.drops)
        kept = find_kept<false, BLOCK>(p, make_dropout(p), dropout_head(p, c.n, x),
                                       k->own0 + (int)threadIdx.x % WARPGROUP / 32 * 16 + duty_row(), i0);
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (s[y][e] != -CUDART_INF_F && is_kept(kept, y, e)) {
                const float weight = weight_of<float>(s[y][e], LOG2E, k->base[e / 2], k->rest[e / 2]);
                k->dsum[e / 2] = fmaf(weight, dp[y][e] * factor, k->dsum[e / 2]);
            }
}

/* prep: what scores, and dP, of a tile are for. */
template <int D, int WALK>
INLINE void join_rows(const attention_params &p, const place &c, int64_t x, state<D, WALK> *k, int i0, bool cut,
                      int kind, bool sums_d, const int exponent[2], float (*s)[4], const float (*dp)[4]) {
    if constexpr (WALK == WALK_SUMS)
        add_scores(k, i0, mantissa_of(p.scale_log2) * power(k->exponent - exponent[0]), s);
    else
        add_options(p, c, x, k, i0, cut, kind, sums_d, scale_by(front_factor(p), k->exponent - exponent[0]),
                    k->factor * power(-exponent[1]) * p.keep_scale, s, dp);
}

/* prep: one tile of what streams by, all of it in these slots, which are released; without options only the first is wanted. */
template <int D, int WALK>
INLINE void add_rows(const attention_params &p, const place &c, int64_t x, state<D, WALK> *k, int i0, bool cut,
                     int kind, bool sums_d, const float *numbers, int first, int second) {
    typedef backward32<D, WALK> layout;
    const int told = ((const int *)numbers)[3 * BLOCK];
    const int exponent[] = {first_exponent<WALK>(told), ((const int *)numbers)[3 * BLOCK + 1]};
    const uint32_t at[] = {k->smem + layout::slots + first * layout::tile_bytes},
                   at2[] = {k->smem + layout::slots + second * layout::tile_bytes};
    float s[8][4], dp[8][4], dp2[8][4];
    uint32_t own[1], own2[1];
    find_own(*k, 0, own);
    find_own(*k, 1, own2);
    wgmma_fence();
    tile_scores<D, WALK>(s, NULL, own, at);
    if (WALK == WALK_ROWS)
        tile_scores<D, WALK>(dp, D > 64 ? dp2 : NULL, own2, at2);
    wgmma_commit();
    wgmma_wait<0>();
    pin_all<8>(s);
    release(k->smem + layout::empty + first * 8);
    if (WALK == WALK_ROWS) {
        pin_all<8>(dp);
        if (D > 64)
            add_strip(dp, dp2);
        release(k->smem + layout::empty + second * 8);
    }
    join_rows<D, WALK>(p, c, x, k, i0, cut, kind, sums_d, exponent, s, dp);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for Hopper in float32: no atomics, the same bits every time. Every product is three of float16 parts
 * (attention/sm90_f32/split.cuh).
 *
 *   prep   of large scores: the log-sum-exp anew, as maximum and logarithm of the sum, from the very scores of dkdv and dq; and where
 *          a mask or a bias leaves few keys to a row, that and D, from the scores and dP that dS will be made of
 *   dkdv   a block owns 128 keys, 64 to a warpgroup (over d 128, 64 keys, shared), and walks over the queries that see them, head by head of the group:
 *          Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q.
 *   dq     a block owns as many queries of one head: S = Q·Kᵀ, dP = dO·Vᵀ, dQ += dS·K.
 *
 * All are one walk: of what the block owns there is a first (K; Q) and a second (V; dO) tensor, and so there is of what streams
 * by (Q, dO; K, V). S is made of the firsts, dP of the seconds. One warp fetches, into a ring of tiles of 64 rows.
 *
 * The tensor cores cut off when they add to an accumulator. So the small products come first, sums over a tile begin at zero, and are
 * added to those of the tiles before by rounding additions. P and dS are scaled, row by row, by powers of two that float16 can
 * hold: a row's sums are in units of 2^unit, and the unit grows with what is met. */
#include "cuda/attention/sm90_f32/bwd_wide.cuh"

/* ------------------------------------------------------------------------------------------------------- beginning, end */

/* prep has been here: the rows' numbers, or nothing yet. sums_d: the same within prep. */
template <int D, int WALK>
INLINE state<D, WALK> begin_state(const attention_params &p, const work &w, int group, bool sums_d, char *shared) {
    typedef backward32<D, WALK> layout;
    state<D, WALK> k;
    const int set = group / layout::parts, own0 = w.own0 + set * BLOCK;
    k.smem = shared_address(shared);
    k.own = k.smem + set * layout::tile_bytes;
    k.part = group % layout::parts;
    k.own0 = own0;
    const int row0 = own0 + fragment_row();
    k.first = row0 + w.low - fragment_column();
    const int64_t tile = own0 < w.own_rows ? split_tile(p, w.c, WALK == WALK_KEYS, w.head, own0 / BLOCK) : 0;
    const bool there = own0 < w.own_rows;
    k.exponent = exponent_of(p.scale_log2) - (there ? p.split[own_tensor<WALK>(0)].info[tile].exponent : 0);
    if (layout::streams == 2)
        k.factor = dp_factor<D>(p) * power(there ? -p.split[own_tensor<WALK>(1)].info[tile].exponent : 0);
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8;
        k.last[half] = (i < w.own_rows ? min(i + w.high, w.rows - 1) : -1) - fragment_column();
        k.unit[half] = k.unit2[half] = -1000;
        if (WALK == WALK_SUMS || (WALK == WALK_ROWS && !sums_d)) {
            k.base[half] = -CUDART_INF_F;
            k.rest[half] = 0.0f;
        } else if (WALK != WALK_KEYS) {
            const int64_t at = i < w.own_rows ? lse_at(p, w.c, w.head, i) : 0;
            k.base[half] = i < w.own_rows ? p.base[at] : CUDART_INF_F;
            k.rest[half] = i < w.own_rows ? p.rest[at] : 0.0f;
            k.dsum[half] = i < w.own_rows && WALK == WALK_QUERIES ? p.dsum[at] : 0.0f;
            k.weight[half] = 0.0f;
        }
    }
    return k;
}

/* The warp's 16 rows, of which `rows` from own0 on are there, times row_by. adds: to what is there. */
template <int D>
INLINE void store_sums(bool adds, void *to, int64_t at, int64_t stride, int row0, int rows, int width, float by,
                       const float row_by[2], const int unit[2], float (*c)[4]) {
    if (!to)
        return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float one = power(unit[half] / 2) * row_by[half], other = power(unit[half] - unit[half] / 2);
#pragma unroll
        for (int y = 0; y < D / 8; y++)
            for (int e = 2 * half; e < 2 * half + 2; e++)
                c[y][e] = c[y][e] * one * other;
        float *const row = (float *)to + at + (row0 + half * 8) * stride;
        if (row0 + half * 8 >= rows)
            continue;
        if (adds)
            add_sums<D>(row, c, half, width, by);
        else
            store_row<float, D>(row, c, half, width, by);
    }
}

/* Large log-sum-exps in two parts, where they agree with those that were given. split has made those of rows of dO that are not finite
 * NaN, and so they stay. few: of all rows, as a mask leaves few keys to some. */
template <int D, int WALK>
INLINE void store_numbers(const attention_params &p, const work &w, int row0, bool few, const state<D, WALK> *k) {
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8;
        const float top = quad_max(k->base[half]), base = top == -CUDART_INF_F ? 0.0f : top;
        const float sum = quad_sum(k->rest[half] * exp2_approx((k->base[half] - base) * mantissa_of(p.scale_log2)));
        if (i >= w.own_rows || threadIdx.x % 4 || top == -CUDART_INF_F)
            continue;
        const int64_t at = lse_at(p, w.c, w.head, i);
        const float lse = ((const float *)p.t.lse)[at];
        const float c = mantissa_of(p.scale_log2), unit = p.unit / power_of(p.scale_log2);
        if ((few || is_coarse<float>(p, w.c, lse)) && !isnan(p.base[at]))
            put_row_sum<float>(p, top, c, unit, sum, sink_of(p, w.head, true), lse, 0.0f, &p.base[at], &p.rest[at]);
    }
}

/* D of the rows that see a key. */
template <int D>
INLINE void store_dsums(const attention_params &p, const work &w, int row0, const state<D, WALK_ROWS> *k) {
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8;
        const float sum = quad_sum(k->dsum[half]);
        if (i >= w.own_rows || threadIdx.x % 4)
            continue;
        const int64_t at = lse_at(p, w.c, w.head, i);
        if (isfinite(((const float *)p.t.lse)[at]) && !isnan(p.base[at]))
            p.dsum[at] = sum - (p.t.dlse ? ((const float *)p.t.dlse)[at] : 0.0f);
    }
}

/* few: of prep, as store_numbers; sums_d: it has been here, and D is left. */
template <int D, int WALK, bool FULL>
INLINE void consume(const attention_params &p, const work &w, uint32_t block, char *shared, ring *r, int turn,
                    bool few = false, bool sums_d = false) {
    typedef backward32<D, WALK> layout;
    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    const span all = find_span(w, w.own0, layout::own);
    const span mine = find_span(w, w.own0 + group / layout::parts * BLOCK, BLOCK);
    state<D, WALK> k = begin_state<D, WALK>(p, w, group, sums_d, shared);
    constexpr bool PREP = WALK == WALK_SUMS || WALK == WALK_ROWS;
    constexpr int COLUMNS = layout::columns;
    float c[PREP ? 1 : COLUMNS / 8][4], c2[WALK == WALK_KEYS ? COLUMNS / 8 : 1][4];
    zero_all<PREP ? 1 : COLUMNS / 8>(c);
    zero_all<WALK == WALK_KEYS ? COLUMNS / 8 : 1>(c2);
    if (all.begin < all.end)
        mbarrier_wait(k.smem + layout::own_full, turn);
    const int steps = (all.end - all.begin + BLOCK - 1) / BLOCK * (w.head1 - w.head0);
    int i0 = all.begin, x = w.head0; /* of what streams by: where it is, and its head */
    bool last = steps == 0;
#pragma unroll 1
    for (int step = 0; FULL ? !last : step < steps; step++) {
        const int a = r->slot, b = layout::streams == 1 || a + 1 < layout::SLOTS ? a + 1 : 0;
        const float *numbers = (const float *)(shared + layout::numbers) + a * NUMBERS;
        int kind = TILE_FULL;
        if (FULL) {
            mbarrier_wait(k.smem + layout::full + a * 8, r->turn);
            const uint32_t *const told = (const uint32_t *)numbers + 3 * BLOCK + 2, now = told[0];
            i0 = tile_in(now) * BLOCK;
            x = (int)told[1];
            kind = kind_in(now, group / layout::parts);
            last = now & STEP_LAST;
        }
        const bool seen = FULL ? kind != TILE_EMPTY : i0 + BLOCK > mine.begin && i0 < mine.end,
                   cut = i0 < mine.whole_from || i0 > mine.whole_to;
        if constexpr (layout::parts > 1) { /* of all warpgroups' rows */
            if constexpr (PREP)
                add_wide_rows<D, WALK>(p, w.c, w.head, &k, i0, cut, kind, sums_d, numbers, r);
            else
                add_wide_tile<D, WALK, FULL>(p, w.c, WALK == WALK_KEYS ? x : w.head, &k, i0, cut, kind, numbers, r, c,
                                             c2);
        } else {
            mbarrier_wait(k.smem + layout::full + a * 8, r->turn);
            advance<layout::SLOTS>(r);
            if (layout::streams == 2) {
                mbarrier_wait(k.smem + layout::full + b * 8, r->turn);
                advance<layout::SLOTS>(r);
            }
            if (!seen) {
                release(k.smem + layout::empty + a * 8);
                if (layout::streams == 2)
                    release(k.smem + layout::empty + b * 8);
            } else if constexpr (PREP)
                add_rows<D, WALK>(p, w.c, w.head, &k, i0, cut, kind, sums_d, numbers, a, b);
            else
                add_tile<D, WALK, FULL>(p, w.c, WALK == WALK_KEYS ? x : w.head, &k, i0, cut, kind, numbers,
                                        WALK == WALK_QUERIES ? b : a, WALK == WALK_QUERIES ? a : b, c, c2);
        }
        i0 += BLOCK;
        if (i0 >= all.end) {
            i0 = all.begin;
            x++;
        }
    }
    pin(block); /* or what is needed from here on would have been kept through the loop */
    const work again = find_work<D, WALK>(p, block);
    const place &o = again.c;
    const int row0 = group / layout::parts * BLOCK + fragment_row(), column0 = k.part * COLUMNS;
    if (PREP && k.part)
        return;
    if constexpr (WALK == WALK_ROWS)
        if (sums_d) {
            store_dsums<D>(p, again, again.own0 + row0, &k);
            return;
        }
    float row_by[2] = {SPLIT_GIVES_BACK, SPLIT_GIVES_BACK};
    /* dkdv, behind it, will have weights of the same sums */
    for (int half = 0; half < 2 && WALK == WALK_QUERIES; half++) {
        const int i = again.own0 + row0 + half * 8;
        row_by[half] *= settle_row(p, again.head, quad_sum(k.weight[half]), k.base[half], &k.rest[half]);
        if (i < again.own_rows && threadIdx.x % 4 == 0 && !k.part)
            p.rest[lse_at(p, o, again.head, i)] = k.rest[half];
    }
    if constexpr (PREP)
        store_numbers<D, WALK>(p, again, again.own0 + row0, few, &k);
    else if (WALK == WALK_QUERIES)
        store_sums<COLUMNS>(p.adds, p.t.dq, row_at(p.a.dq_stride, o.n, again.head, o.first_q + again.own0) + column0,
                            p.a.dq_stride.s, row0, o.all_sq - again.own0, (int)p.a.d - column0, p.scale, row_by, k.unit,
                            c);
    else {
        const int64_t row = o.first_k + again.own0;
        store_sums<COLUMNS>(p.adds, p.t.dk, row_at(p.a.dk_stride, o.n, again.head, row) + column0, p.a.dk_stride.s,
                            row0, o.all_sk - again.own0, (int)p.a.d - column0, p.scale, row_by, k.unit, c);
        store_sums<COLUMNS>(p.adds, p.t.dv, row_at(p.a.dv_stride, o.n, again.head, row) + column0, p.a.dv_stride.s,
                            row0, o.all_sk - again.own0, (int)p.a.dv - column0, FULL ? p.keep_scale : 1.0f, row_by,
                            k.unit2, c2);
    }
}

/* Of the tiles that a block of prep looks after, a warp each, those with a row whose log-sum-exp is too coarse: a bit each. */
template <int D>
INLINE uint32_t find_large(const attention_params &p, uint32_t first, uint32_t count, uint32_t all, uint32_t *flags) {
    const uint32_t warp = threadIdx.x / 32;
    bool large = false;
    if (warp < count && first + warp < all) {
        const work w = find_work<D, WALK_SUMS>(p, first + warp);
        for (int i = w.own0 + (int)threadIdx.x % 32; i < min(w.own0 + backward32_own(D), w.own_rows); i += 32) {
            large |= is_coarse<float>(p, w.c, ((const float *)p.t.lse)[lse_at(p, w.c, w.head, i)]);
        }
    }
    large = __any_sync(ALL_LANES, large);
    if (threadIdx.x % 32 == 0)
        flags[warp] = large;
    __syncthreads();
    uint32_t bits = 0;
    for (uint32_t x = 0; x < count; x++)
        bits |= flags[x] << x;
    __syncthreads();
    return bits;
}

/* Does a mask or a bias leave few keys to a row of the tile, but some? By all threads. */
template <int D> INLINE bool leaves_few(const attention_params &p, uint32_t block) {
    const work w = find_work<D, WALK_ROWS>(p, block);
    const int last = min(w.own0 + backward32_own(D), w.own_rows);
    bool few = false;
    if (map_shows_many(p, w.c, w.head, w.own0, last))
        return false;
    for (int i = w.own0 + (int)threadIdx.x / 32; i < last && !few; i += (int)blockDim.x / 32) {
        const int count = count_seen<float>(p, w.c, w.head, i);
        few = count > 0 && count <= FEW_KEYS;
    }
    return __syncthreads_or(few);
}

template <typename layout> INLINE void make_barriers(uint32_t smem) {
    if (threadIdx.x == 0) {
        for (int x = 0; x < layout::SLOTS; x++) {
            mbarrier_init(smem + layout::full + x * 8, 1 + 32);
            mbarrier_init(smem + layout::empty + x * 8, CONSUMERS);
        }
        mbarrier_init(smem + layout::own_full, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
}

/* dkdv, dq: a block a tile. */
template <int D, int WALK, bool FULL> INLINE void attention_backward(const attention_params &p) {
    extern __shared__ __align__(1024) char shared[];
    const work w = find_work<D, WALK>(p, blockIdx.x);
    ring r = {0, 0};
    if (FULL && has_few(p, w.c, WALK == WALK_KEYS ? w.head : w.head / p.group))
        return;
    make_barriers<backward32<D, WALK>>(shared_address(shared));
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 32)
            fetch<D, WALK, FULL>(p, w, shared, &r);
    } else {
        registers_more<240>();
        consume<D, WALK, FULL>(p, w, blockIdx.x, shared, &r, 0);
    }
}

/* prep: a block looks at several tiles, and mostly at nothing more. */
template <int D, bool FULL> INLINE void attention_sums(const attention_params &p) {
    constexpr int WALK = FULL ? WALK_ROWS : WALK_SUMS, OWN = backward32_own(D);
    extern __shared__ __align__(1024) char shared[];
    const uint32_t all = (uint32_t)((p.a.sq + OWN - 1) / OWN * p.a.h * p.a.b);
    const uint32_t each = (all + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each;
    uint32_t todo = find_large<D>(p, first, each, all, (uint32_t *)(shared + backward32<D, WALK>::numbers));
    uint32_t few = 0;
    int turn = 0;
    ring r = {0, 0};
    if (FULL && hides<float>(p))
        for (uint32_t x = 0; x < each && first + x < all; x++)
            few |= (uint32_t)leaves_few<D>(p, first + x) << x;
    todo |= few;
    if (!todo)
        return;
    make_barriers<backward32<D, WALK>>(shared_address(shared));
    while (todo) {
        const int x = __ffs((int)todo) - 1;
        const bool is_few = few >> x & 1;
        const work w = find_work<D, WALK>(p, first + (uint32_t)x);
#pragma unroll 1
        for (int again = 0; again <= (int)is_few; again++) { /* the log-sum-exp, and D by that */
            if (threadIdx.x < 32)
                fetch<D, WALK, FULL>(p, w, shared, &r);
            else if (threadIdx.x >= WARPGROUP)
                consume<D, WALK, FULL>(p, w, first + (uint32_t)x, shared, &r, turn, is_few, again);
            const span s = find_span(w, w.own0, OWN);
            turn ^= s.begin < s.end;
            __syncthreads(); /* the own tiles are free */
        }
        todo &= todo - 1;
    }
}

#define variant_lean false
#define variant_full true
#define pass_prep(D, FULL) attention_sums<D, FULL>(p)
#define pass_dkdv(D, FULL) attention_backward<D, WALK_KEYS, FULL>(p)
#define pass_dq(D, FULL) attention_backward<D, WALK_QUERIES, FULL>(p)
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        wait_for_earlier_grid();                                                                                       \
        pass_##pass(dim, variant_##variant);                                                                           \
    }

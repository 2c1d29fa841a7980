/* SPDX-License-Identifier: Apache-2.0
 * A step of the float32 backward for Hopper over d 128: two warpgroups share a block's 64 rows. Each makes all of S and dP, from two parts
 * of tiles that come and go, and sums the columns of one part: to share S and dP out they would have to meet, and there is no room. */
#ifndef HEDDLE_CUDA_ATTENTION_BWD_WIDE32_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_BWD_WIDE32_SM90_CUH

#include "cuda/attention/sm90_f32/bwd_step.cuh"

/* The places of a tile's parts in the ring, which goes on. */
template <typename layout> struct passing_tile { ring part[layout::parts]; };
template <typename layout> INLINE passing_tile<layout> next_tile(ring *r) {
    passing_tile<layout> t;
#pragma unroll
    for (int x = 0; x < layout::parts; x++) {
        t.part[x] = *r;
        advance<layout::SLOTS>(r);
    }
    return t;
}

template <typename layout> INLINE void await_part(uint32_t smem, const ring &x) {
    mbarrier_wait(smem + layout::full + x.slot * 8, x.turn);
}
template <typename layout> INLINE void release_tile(uint32_t smem, const passing_tile<layout> &t) {
#pragma unroll
    for (int x = 0; x < layout::parts; x++)
        release(smem + layout::empty + t.part[x].slot * 8);
}

/* The part that has this warpgroup's columns, or the other. */
template <typename layout> INLINE ring part_of(const passing_tile<layout> &t, int part) {
    return part ? t.part[layout::parts - 1] : t.part[0];
}
template <typename layout> INLINE uint32_t place_of(uint32_t smem, const ring &x) {
    return smem + layout::slots + x.slot * layout::part_bytes;
}

/* c = the own tile, first or second, times that which passes, once it is there: issued. */
template <int D, int WALK>
INLINE void multiply_tile(const state<D, WALK> &k, int z, const passing_tile<backward32<D, WALK>> &t, float (*c)[4],
                          float (*rest)[4]) {
    typedef backward32<D, WALK> layout;
    uint32_t own[layout::parts], at[layout::parts];
    find_own(k, z, own);
#pragma unroll
    for (int x = 0; x < layout::parts; x++) {
        await_part<layout>(k.smem, t.part[x]);
        at[x] = place_of<layout>(k.smem, t.part[x]);
    }
    wgmma_fence();
    tile_scores<D, WALK>(c, rest, own, at);
    wgmma_commit();
}

/* A product is there, and its rest with it. */
INLINE void join(float (*c)[4], float (*rest)[4]) {
    pin_all<8>(c);
    add_strip(c, rest);
}

/* sums += x·(the part with this warpgroup's columns), once that is there; x, times 2^exponent and `back`. */
template <int D, int WALK>
INLINE void add_part(const state<D, WALK> &k, const passing_tile<backward32<D, WALK>> &t, int exponent, float back,
                     int unit[2], const float (*x)[4], float (*sums)[4]) {
    typedef backward32<D, WALK> layout;
    uint32_t high[4][4], low[4][4];
    float by[2];
    const ring mine = part_of<layout>(t, k.part);
    fit_units<layout::columns>(exponent, back, unit, x, sums, by);
    split_fragments(by, x, high, low);
    await_part<layout>(k.smem, mine);
    add_product<layout::columns>(sums, high, low, place_of<layout>(k.smem, mine));
}

/* As add_tile. dkdv has dO in shared memory when it has P, and Q comes a second time for dK. */
template <int D, int WALK, bool FULL>
INLINE void add_wide_tile(const attention_params &p, const place &of, int64_t x, state<D, WALK> *k, int i0, bool cut,
                          int kind, const float *numbers, ring *r, float (*c)[4], float (*c2)[4]) {
    typedef backward32<D, WALK> layout;
    passing_tile<layout> t = next_tile<layout>(r);
    float s[8][4], dp[8][4], rest[8][4];
    if (FULL)
        prefetch_bias(p, of, x, WALK == WALK_KEYS ? i0 : k->own0, WALK == WALK_KEYS ? k->own0 : i0);
    if (WALK == WALK_QUERIES)
        multiply_tile(*k, 1, t, dp, rest);
    else
        multiply_tile(*k, 0, t, s, rest);
    const int told = ((const int *)numbers)[3 * BLOCK];
    const int exponent[] = {first_exponent<WALK>(told), ((const int *)numbers)[3 * BLOCK + 1]};
    const float factor = mantissa_of(p.scale_log2) * power(k->exponent - exponent[0]),
                factor2 = k->factor * power(-exponent[1]);
    const uint32_t shown = FULL ? find_shown_rows<WALK>(p, of, x, *k, i0, kind) : ALL_LANES;
    wgmma_wait<0>();
    join(WALK == WALK_QUERIES ? dp : s, rest);
    release_tile<layout>(k->smem, t);
    t = next_tile<layout>(r);
    if (WALK == WALK_QUERIES) {
        multiply_tile(*k, 0, t, s, rest);
        wgmma_wait<0>();
        join(s, rest);
    } else {
        multiply_tile(*k, 1, t, dp, rest);
    }
    if (!FULL)
        weigh_tile<WALK>(factor, k, i0, cut, numbers, s);
    if (WALK == WALK_KEYS) {
        wgmma_wait<0>();
        join(dp, rest);
    }
    make_sums<D, WALK, FULL>(p, of, x, factor2, exponent[0], k, i0, cut, shown, numbers, s, dp);
    if (WALK == WALK_KEYS) {
        add_part(*k, t, -exponent[1], 1.0f, k->unit2, s, c2);
        release_tile<layout>(k->smem, t); /* numbers are done with, too */
        t = next_tile<layout>(r);
    }
    add_part(*k, t, -exponent[0], taken_back<WALK>(p, told), k->unit, dp, c);
    await_part<layout>(k->smem, part_of<layout>(t, 1 - k->part));
    release_tile<layout>(k->smem, t);
}

/* As add_rows. */
template <int D, int WALK>
INLINE void add_wide_rows(const attention_params &p, const place &c, int64_t x, state<D, WALK> *k, int i0, bool cut,
                          int kind, bool sums_d, const float *numbers, ring *r) {
    typedef backward32<D, WALK> layout;
    passing_tile<layout> t = next_tile<layout>(r);
    float s[8][4], dp[8][4], rest[8][4];
    multiply_tile(*k, 0, t, s, rest);
    const int told = ((const int *)numbers)[3 * BLOCK];
    const int exponent[] = {first_exponent<WALK>(told), ((const int *)numbers)[3 * BLOCK + 1]};
    wgmma_wait<0>();
    join(s, rest);
    release_tile<layout>(k->smem, t);
    if (WALK == WALK_ROWS) {
        t = next_tile<layout>(r);
        multiply_tile(*k, 1, t, dp, rest);
        wgmma_wait<0>();
        join(dp, rest);
        release_tile<layout>(k->smem, t);
    }
    join_rows<D, WALK>(p, c, x, k, i0, cut, kind, sums_d, exponent, s, dp);
}

#endif

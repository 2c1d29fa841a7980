/* SPDX-License-Identifier: Apache-2.0
 * The gradients of a tile's elements by all options, for the full kernels of the backward. */
#ifndef HEDDLE_CUDA_ATTENTION_SM80_FULL_CUH
#define HEDDLE_CUDA_ATTENTION_SM80_FULL_CUH

#include "cuda/attention/scores.cuh"

/* Eights of columns whose bias is asked for together. */
#define EIGHTS 2

/* Of query i and key j of head x, which sees it. */
template <typename T> INLINE float dweight_at(const attention_params &p, const place &c, int64_t x, int i, int j) {
    return to_float(((const T *)p.t.dweights)[row_at(p.a.dweights_stride, c.n, x, i) + j]);
}

/* dS -> dT. */
INLINE void apply_slack(const float (*slack)[4], float (*ds)[4]) {
#pragma unroll
    for (int y = 0; y < EIGHTS; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            ds[y][e] *= slack[y][e];
}

/* s, dp: Sᵀ, dPᵀ of 16 keys from key0 on and queries from i0 on -> Pᵀ where kept, dTᵀ. numbers: of the queries. whole: all are seen by the
 * band; cut: some may not be seen, or are marked; shown: by the map of the mask. */
template <typename T, int BLOCK, int APART>
INLINE void full_gradients_of_keys(const attention_params &p, const place &c, const dropout_state &state, int64_t x,
                                   bool whole, bool cut, uint32_t shown, int key0, int i0, const float *numbers,
                                   float (*s)[4], float (*dp)[4]) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2, j = key0 + lane / 4;
    kept_bits<BLOCK> kept = keep_all<BLOCK>();
    if (p.drops)
        kept = find_kept<true, BLOCK>(p, state, dropout_head(p, c.n, x), key0, i0);
    lane_options<T> o[2];
    find_options<T, true>(p, c, x, i0 + column, j, o);
    uint32_t seen = whole ? ALL_LANES : find_seen_by<BLOCK>(c, j, i0 + column);
    seen &= shown;
#pragma unroll
    for (int y0 = 0; y0 < BLOCK / 8; y0 += EIGHTS) {
        float slack[EIGHTS][4];
        make_scores<T, true, EIGHTS>(p, o, front_factor(p), whole, y0, &seen, s + y0, slack, !p.seen_of_keys.kinds);
        if (p.drops)
            drop_elements<BLOCK, EIGHTS>(kept, p.keep_scale, dp + y0, y0);
        if (p.t.dweights)
#pragma unroll
            for (int y = y0; y < y0 + EIGHTS; y++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (seen >> (4 * y + e) & 1)
                        dp[y][e] += dweight_at<T>(p, c, x, i0 + y * 8 + column + e % 2, j + e / 2 * 8);
#pragma unroll
        for (int y = y0; y < y0 + EIGHTS; y++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float4 of = numbers_of<BLOCK, APART>(numbers, y * 8 + column + e % 2);
                s[y][e] = weight_of<T>(s[y][e], LOG2E, of.x, of.y);
                dp[y][e] = s[y][e] * (dp[y][e] - of.z);
            }
        if (p.softcap > 0.0f)
            apply_slack(slack, dp + y0);
        if (p.drops)
            drop_elements<BLOCK, EIGHTS>(kept, 1.0f, s + y0, y0);
        if (cut)
#pragma unroll
            for (int y = y0; y < y0 + EIGHTS; y++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float4 of = numbers_of<BLOCK, APART>(numbers, y * 8 + column + e % 2);
                    const bool there = seen >> (4 * y + e) & 1 && of.x != CUDART_INF_F, bad = __float_as_int(of.w);
                    s[y][e] = !there ? 0.0f : bad ? CUDART_NAN_F : s[y][e];
                    dp[y][e] = !there ? 0.0f : bad ? CUDART_NAN_F : dp[y][e];
                }
    }
}

/* s, dp: S, dP of 16 queries from i0 on and keys from j0 on -> dp: dT. numbers: base, rest, D of this lane's two.
 * sums: what it has of P, kept or not, in float32. whole, cut, shown: as above. */
template <typename T, int BLOCK, int APART>
INLINE void full_gradients_of_queries(const attention_params &p, const place &c, const dropout_state &state, int64_t x,
                                      bool whole, bool cut, uint32_t shown, int i0, int j0, const float (*numbers)[3],
                                      const int *bad, float (*s)[4], float (*dp)[4], float sums[2]) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2, i = i0 + lane / 4;
    kept_bits<BLOCK> kept = keep_all<BLOCK>();
    if (p.drops)
        kept = find_kept<false, BLOCK>(p, state, dropout_head(p, c.n, x), i0 + duty_row(), j0);
    lane_options<T> o[2];
    find_options<T, false>(p, c, x, i, j0 + column, o);
    uint32_t seen = whole ? ALL_LANES : find_seen<BLOCK>(c, i, i + 8, j0 + column);
    seen &= shown;
#pragma unroll
    for (int y0 = 0; y0 < BLOCK / 8; y0 += EIGHTS) {
        float slack[EIGHTS][4];
        make_scores<T, false, EIGHTS>(p, o, front_factor(p), whole, y0, &seen, s + y0, slack, !p.seen_by_queries.kinds);
        if (p.drops)
            drop_elements<BLOCK, EIGHTS>(kept, p.keep_scale, dp + y0, y0);
        if (p.t.dweights)
#pragma unroll
            for (int y = y0; y < y0 + EIGHTS; y++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (seen >> (4 * y + e) & 1)
                        dp[y][e] += dweight_at<T>(p, c, x, i + e / 2 * 8, j0 + y * 8 + column + e % 2);
#pragma unroll
        for (int y = y0; y < y0 + EIGHTS; y++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[y][e] = weight_of<T>(s[y][e], LOG2E, numbers[e / 2][0], numbers[e / 2][1]);
                dp[y][e] = s[y][e] * (dp[y][e] - numbers[e / 2][2]);
            }
        if (p.softcap > 0.0f)
            apply_slack(slack, dp + y0);
        if (cut)
#pragma unroll
            for (int y = y0; y < y0 + EIGHTS; y++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const bool there = seen >> (4 * y + e) & 1 && numbers[e / 2][0] != CUDART_INF_F;
                    s[y][e] = there ? s[y][e] : 0.0f;
                    dp[y][e] = !there ? 0.0f : bad[(y * 8 + column + e % 2) * APART] ? CUDART_NAN_F : dp[y][e];
                }
#pragma unroll
        for (int y = y0; y < y0 + EIGHTS && sizeof(T) == 4; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[e / 2] += s[y][e];
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The options that scores have, on a warp's accumulators of 16 rows: softcap, ALiBi, bias, boolean mask. Rows are queries or, KEYS, keys.
 * Which options there are is the same for all threads, and asked once for several elements. */
#ifndef HEDDLE_CUDA_ATTENTION_SCORES_CUH
#define HEDDLE_CUDA_ATTENTION_SCORES_CUH

#include "cuda/attention/common.cuh"

/* x·2^e, never infinite, which would make a NaN of 0. */
INLINE float scale_by(float x, int e) {
    return fminf(fmaxf(scalbnf(x, e), -0x1p127f), 0x1p127f);
}

/* What q·k is multiplied with: tanh of that is to be capped, if there is a cap. */
INLINE float front_factor(const attention_params &p) {
    return p.softcap > 0.0f ? p.score_in : p.scale;
}

/* What a lane needs for one of its two rows, from its first column on. */
template <typename T> struct lane_options {
    const T *bias;
    const uint8_t *mask;
    float slope, distance;
};

/* Of query i and key j of head x. */
template <typename T>
INLINE lane_options<T> find_row_options(const attention_params &p, const place &c, int64_t x, int i, int j) {
    lane_options<T> r = {NULL, NULL, 0.0f, (float)(i + c.off - j)};
    if (p.a.features & HEDDLE_BIAS)
        r.bias = (const T *)p.t.bias + row_at(p.a.bias_stride, c.n, x, i) + j;
    if (p.a.features & HEDDLE_BOOL_MASK)
        r.mask = p.t.bool_mask + row_at(p.a.bool_mask_stride, c.n, x, i) + j;
    if (p.a.features & HEDDLE_ALIBI)
        r.slope = ((const float *)p.t.alibi_slopes)[c.n * p.a.alibi_stride_b + x];
    return r;
}

/* Of both, the second of which is 8 below the first, query i or key j. */
template <typename T, bool KEYS>
INLINE void find_options(const attention_params &p, const place &c, int64_t x, int i, int j, lane_options<T> o[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
        o[half] = find_row_options<T>(p, c, x, i + (KEYS ? 0 : half * 8), j + (KEYS ? half * 8 : 0));
}

/* From a row's first element to that of another column. */
template <bool KEYS> INLINE int64_t column_at(const heddle_strides &s, int column) {
    return KEYS ? column * s.s : column;
}

/* Two neighbours. */
INLINE void load_two(const float *from, float to[2]) {
    const float2 two = *(const float2 *)from;
    to[0] = two.x;
    to[1] = two.y;
}
template <typename T> INLINE void load_two(const T *from, float to[2]) {
    const uint32_t two = *(const uint32_t *)from;
    to[0] = low_float(two, T());
    to[1] = high_float(two, T());
}

/* seen: a bit for each element of a lane, the e-th of the y-th eight columns at 4·y + e. Of COUNT eights from the y0-th on: s, times `by`,
 * becomes S; of what is hidden anything, and its bits are cleared. slack: dS/dT. whole: all are seen by the band. bytes: the boolean mask's
 * are read, as it has no map. */
template <typename T, bool KEYS, int COUNT>
INLINE void make_scores(const attention_params &p, const lane_options<T> o[2], float by, bool whole, int y0,
                        uint32_t *seen, float (*s)[4], float (*slack)[4], bool bytes = true) {
    float bias[COUNT][4];
    if (p.a.features & HEDDLE_BIAS) {
        if (!KEYS && whole && (p.vectors & VECTOR_BIAS)) {
#pragma unroll
            for (int y = 0; y < COUNT; y++)
#pragma unroll
                for (int e = 0; e < 4; e += 2)
                    load_two(o[e / 2].bias + (y0 + y) * 8, &bias[y][e]);
        } else {
#pragma unroll
            for (int y = 0; y < COUNT; y++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    bias[y][e] = *seen >> (4 * (y0 + y) + e) & 1
                                     ? to_float(o[e / 2].bias[column_at<KEYS>(p.a.bias_stride, (y0 + y) * 8 + e % 2)])
                                     : 0.0f;
        }
    }
    if (bytes && (p.a.features & HEDDLE_BOOL_MASK)) {
        uint32_t shown = 0;
#pragma unroll
        for (int y = 0; y < COUNT; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (*seen >> (4 * (y0 + y) + e) & 1)
                    shown |= o[e / 2].mask[column_at<KEYS>(p.a.bool_mask_stride, (y0 + y) * 8 + e % 2)]
                                 ? 1u << (4 * (y0 + y) + e)
                                 : 0;
        *seen &= shown | ~((COUNT == 8 ? 0xffffffffu : (1u << COUNT % 8 * 4) - 1) << 4 * y0);
    }
#pragma unroll
    for (int y = 0; y < COUNT; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[y][e] = __fmul_rn(s[y][e], by); /* not fused with a bias in one kernel and apart in another */
            slack[y][e] = 1.0f;
        }
    if (p.softcap > 0.0f)
#pragma unroll
        for (int y = 0; y < COUNT; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[y][e] = p.softcap * tanh_with_slack<T>(s[y][e], &slack[y][e]);
    if (p.a.features & HEDDLE_ALIBI)
#pragma unroll
        for (int y = 0; y < COUNT; y++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float column = (float)((y0 + y) * 8 + e % 2);
                s[y][e] = fmaf(-o[e / 2].slope, fabsf(o[e / 2].distance + (KEYS ? column : -column)), s[y][e]);
            }
    if (p.a.features & HEDDLE_BIAS)
#pragma unroll
        for (int y = 0; y < COUNT; y++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (bias[y][e] == -CUDART_INF_F)
                    *seen &= ~(1u << (4 * (y0 + y) + e));
                s[y][e] += counted_bias(bias[y][e]);
            }
}

/* Of a lane's row, the first or the second, columns first .. last of N are seen. */
template <int N> INLINE void hide_outside(int first, int last, int half, uint32_t *seen) {
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (y * 8 + e < first || y * 8 + e > last)
                *seen &= ~(1u << (4 * y + 2 * half + e));
}

/* Which of N columns the band shows, as make_scores takes it; of the lane's two queries, and its first key j. */
template <int N> INLINE uint32_t find_seen(const place &c, int i0, int i1, int j) {
    uint32_t seen = ALL_LANES;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = half ? i1 : i0, first = i + c.lo - j, last = (i < c.sq ? min(i + c.hi, c.sk - 1) : j - 1) - j;
        hide_outside<N>(first, last, half, &seen);
    }
    return seen;
}

/* The same where rows are keys: of the lane's first key j, the other is 8 below, and its first query i. */
template <int N> INLINE uint32_t find_seen_by(const place &c, int j, int i) {
    uint32_t seen = ALL_LANES;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int key = j + half * 8, first = key - c.hi - i,
                  last = (key < c.sk ? min(key - c.lo, c.sq - 1) : i - 1) - i;
        hide_outside<N>(first, last, half, &seen);
    }
    return seen;
}

/* What is hidden becomes -inf. */
template <int COUNT> INLINE void hide_scores(uint32_t seen, float (*s)[4]) {
#pragma unroll
    for (int y = 0; y < COUNT; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = seen >> (4 * y + e) & 1 ? s[y][e] : -CUDART_INF_F;
}

#endif

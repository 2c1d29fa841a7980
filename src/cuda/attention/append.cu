/* SPDX-License-Identifier: Apache-2.0
 * heddle_attention_append: new keys, values and queries of a token are rotated and written by APPEND_UNITS units of APPEND_UNIT elements a
 * block, at the speed of memory. What a token is, and where its rows go, each thread finds for itself: all of a block read the same
 * few numbers. */
#include "cuda/attention/append.h"
#include "cuda/element.cuh"
#include "tokens.h"

#include <math_constants.h>

#define ALL_LANES 0xffffffffu
#define THREADS (APPEND_WARPS * 32)

/* N numbers as they lie in memory. */
template <typename T, int N> struct __align__(N * sizeof(T) < 16 ? N * sizeof(T) : 16) numbers {
    T x[N];
};

/* p[e .. e+N-1], of which there are those below `end`. */
template <int N, typename T> INLINE numbers<T, N> take(const T *p, int e, int end, bool vector) {
    if (vector)
        return *(const numbers<T, N> *)(p + e);
    numbers<T, N> some = {};
#pragma unroll
    for (int x = 0; x < N; x++)
        if (e + x < end)
            some.x[x] = p[e + x];
    return some;
}

template <int N, typename T> INLINE void put(T *p, int e, int end, bool vector, const numbers<T, N> &some) {
    if (vector) {
        *(numbers<T, N> *)(p + e) = some;
        return;
    }
#pragma unroll
    for (int x = 0; x < N; x++)
        if (e + x < end)
            p[e + x] = some.x[x];
}

/* A token: row `row` of tensor b (sequence, or 0 where they are packed) is row i of sequence n. */
struct append_token {
    int64_t b, row, n, i, length;
    bool keys, queries; /* has a new row, has a query */
};

/* The last sequence that begins at or before a packed row; 32 are looked at at a time. */
INLINE int64_t find_sequence(const int32_t *cu_seqlens, int64_t b, int64_t row) {
    int64_t low = 0, n = b;
    while (n > 1) {
        const int64_t step = (n + 31) / 32, at = threadIdx.x % 32 * step;
        const uint32_t before = __ballot_sync(ALL_LANES, at < n && cu_seqlens[low + (at < n ? at : 0)] <= row);
        const int64_t last = before ? (31 - __clz((int)before)) * step : 0;
        low += last;
        n = min64(step, n - last);
    }
    return low;
}

INLINE append_token find_token(const append_params &p, int64_t token) {
    append_token c;
    if (p.a.features & HEDDLE_VARLEN) {
        int64_t first;
        c.n = find_sequence(p.t.cu_seqlens, p.a.b, token);
        const int64_t rows = append_packed(&p.a, &p.t, c.n, &first);
        c.b = 0;
        c.row = token;
        c.i = token - first;
        c.keys = c.i >= 0 && c.i < rows;
        c.queries = c.keys && p.a.h > 0;
    } else {
        const int64_t each = max64(p.a.s, p.a.h ? p.a.sq : 0);
        c.b = c.n = token / each;
        c.row = c.i = token - c.n * each;
        c.keys = c.i < p.a.s;
        c.queries = p.a.h > 0 && c.i < p.a.sq;
    }
    c.length = append_length(&p.a, &p.t, c.n);
    return c;
}

/* cos and sin of N pairs from `first` on at a position. */
template <int N, typename C>
INLINE void take_angles(const append_params &p, int64_t position, int first, float c[N], float s[N]) {
    const int64_t at = position * p.a.table_stride;
    const int end = (int)p.a.rotary / 2;
    const numbers<C, N> cosines = take<N>((const C *)p.t.cos + at, first, end, p.vector),
                        sines = take<N>((const C *)p.t.sin + at, first, end, p.vector);
#pragma unroll
    for (int x = 0; x < N; x++) {
        c[x] = to_float(cosines.x[x]);
        s[x] = to_float(sines.x[x]);
    }
}

template <int N, typename T>
INLINE void find_angles(const append_params &p, int64_t position, int first, float c[N], float s[N]) {
    if (position >= p.a.positions) {
#pragma unroll
        for (int x = 0; x < N; x++)
            c[x] = s[x] = CUDART_NAN_F;
    } else if (p.a.table_dtype == HEDDLE_F32)
        take_angles<N, float>(p, position, first, c, s);
    else
        take_angles<N, T>(p, position, first, c, s);
}

INLINE void turn(float *y, float *z, float c, float s) {
    const float before = *y;
    *y = fmaf(before, c, -(*z * s));
    *z = fmaf(before, s, *z * c);
}

/* Unit x of a row: elements e and their fellows half a rotation further. */
template <typename T> INLINE void rotate_halves(const append_params &p, int64_t position, int e, const T *from, T *to) {
    const int half = (int)p.a.rotary / 2;
    float c[APPEND_UNIT], s[APPEND_UNIT];
    numbers<T, APPEND_UNIT> low = take<APPEND_UNIT>(from, e, half, p.vector),
                            high = take<APPEND_UNIT>(from + half, e, half, p.vector);
    find_angles<APPEND_UNIT, T>(p, position, e, c, s);
#pragma unroll
    for (int x = 0; x < APPEND_UNIT; x++) {
        float y = to_float(low.x[x]), z = to_float(high.x[x]);
        turn(&y, &z, c[x], s[x]);
        low.x[x] = from_float<T>(y);
        high.x[x] = from_float<T>(z);
    }
    put<APPEND_UNIT>(to, e, half, p.vector, low);
    put<APPEND_UNIT>(to + half, e, half, p.vector, high);
}

template <typename T> INLINE void rotate_pairs(const append_params &p, int64_t position, int e, const T *from, T *to) {
    const int end = (int)p.a.rotary;
    float c[APPEND_UNIT / 2], s[APPEND_UNIT / 2];
    numbers<T, APPEND_UNIT> some = take<APPEND_UNIT>(from, e, end, p.vector);
    find_angles<APPEND_UNIT / 2, T>(p, position, e / 2, c, s);
#pragma unroll
    for (int x = 0; x < APPEND_UNIT; x += 2) {
        float y = to_float(some.x[x]), z = to_float(some.x[x + 1]);
        turn(&y, &z, c[x / 2], s[x / 2]);
        some.x[x] = from_float<T>(y);
        some.x[x + 1] = from_float<T>(z);
    }
    put<APPEND_UNIT>(to, e, end, p.vector, some);
}

/* Unit x of a row of which the first `rotary` elements are turned. */
template <typename T>
INLINE void append_unit(const append_params &p, int64_t position, int x, int rotary, int width, const T *from, T *to) {
    const int turned = append_turned(rotary, p.a.interleaved);
    if (x >= turned) {
        const int e = rotary + (x - turned) * APPEND_UNIT;
        put<APPEND_UNIT>(to, e, width, p.vector, take<APPEND_UNIT>(from, e, width, p.vector));
    } else if (p.a.interleaved)
        rotate_pairs(p, position, x * APPEND_UNIT, from, to);
    else
        rotate_halves(p, position, x * APPEND_UNIT, from, to);
}

INLINE int64_t offset(heddle_strides stride, int64_t b, int64_t h, int64_t s) {
    return b * stride.b + h * stride.h + s * stride.s;
}

template <typename T> INLINE void append_rows(const append_params &p, const append_token &c, uint32_t first) {
    const heddle_append &a = p.a;
    const uint32_t each = (uint32_t)append_units(a.d, a.rotary, a.interleaved), of_v = (uint32_t)append_units_of(a.dv);
    const uint32_t k = (uint32_t)a.hk * each, v = k + (uint32_t)a.hk * of_v, q = v + (uint32_t)a.h * each;
    int64_t part = 0, row = 0;
    const bool placed = c.keys && append_place(&a, &p.t, c.n, c.length + c.i, &part, &row);
    for (uint32_t u = first + threadIdx.x; u < q && u < first + APPEND_UNITS; u += THREADS) {
        const bool is_v = u >= k && u < v, is_q = u >= v;
        const uint32_t at = is_q ? u - v : is_v ? u - k : u, units = is_v ? of_v : each, x = at / units;
        if (is_q ? !c.queries : !placed)
            continue;
        const T *from = (const T *)(is_q ? p.t.q : is_v ? p.t.v_new : p.t.k_new);
        T *to = (T *)(is_q ? p.t.q_out : is_v ? p.t.v : p.t.k);
        from += offset(is_q ? a.q_stride : is_v ? a.v_new_stride : a.k_new_stride, c.b, x, c.row);
        to += is_q ? offset(a.q_out_stride, c.b, x, c.row) : offset(is_v ? a.v_stride : a.k_stride, part, x, row);
        append_unit<T>(p, c.length + (is_q && a.together ? 0 : c.i), (int)(at - x * units), is_v ? 0 : (int)a.rotary,
                       (int)(is_v ? a.dv : a.d), from, to);
    }
}

template <typename T> INLINE void attention_append(const append_params &p) {
    const int64_t token = blockIdx.x / p.parts;
    if (p.t.seqlens_out)
        for (int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x; n < p.a.b; n += (int64_t)gridDim.x * THREADS)
            p.t.seqlens_out[n] = (int32_t)append_length_after(&p.a, &p.t, n);
    if (token < p.tokens)
        append_rows<T>(p, find_token(p, token), blockIdx.x % p.parts * APPEND_UNITS);
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(warps == APPEND_WARPS && own == APPEND_UNITS, "as the host counts");                                 \
    extern "C" __global__ void __launch_bounds__(warps * 32, 8)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ append_params p) {       \
        wait_for_earlier_grid();                                                                                       \
        attention_append<dtype>(p);                                                                                    \
    }

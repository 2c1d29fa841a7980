/* SPDX-License-Identifier: Apache-2.0
 * heddle_attention_append: new keys, values and queries of a token are rotated and written by APPEND_UNITS units of APPEND_UNIT elements a
 * block, at the speed of memory. What a token is, and where its rows go, each thread finds for itself: all of a block read the same
 * few numbers. With HEDDLE_E4M3 keys and values are divided by their scales and stored as bytes. */
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

/* As float_to_e4m3 of dtype.h, which says how. */
INLINE uint8_t to_e4m3(float x) {
    const uint32_t u = __float_as_uint(x), sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint8_t)(sign | 0x7fu);
    if (a >= 0x43e00000u) /* 448 */
        return (uint8_t)(sign | 0x7eu);
    if (a < 0x3c800000u) /* 2^-6 */
        return (uint8_t)(sign | (__float_as_uint(__fadd_rn(__fmul_rn(__uint_as_float(a), 512.0f), 0x1p23f)) & 0xfu));
    return (uint8_t)(sign | (((a + 0x7ffffu + (a >> 20 & 1u)) >> 20) - (120u << 3)));
}

/* Where a row goes: elements of its type, or bytes of what is divided by the scale. */
template <typename T> struct row_target {
    T *at;
    uint8_t *bytes; /* NULL: elements */
    float scale;
};

/* Of numbers in float32. */
template <int N, bool BYTES, typename T>
INLINE void put_floats(const row_target<T> &to, int e, int end, bool vector, const float x[N]) {
    if (BYTES && to.bytes) {
        numbers<uint8_t, N> some;
#pragma unroll
        for (int i = 0; i < N; i++)
            some.x[i] = to_e4m3(x[i] / to.scale);
        put<N>(to.bytes, e, end, vector, some);
        return;
    }
    numbers<T, N> some;
#pragma unroll
    for (int i = 0; i < N; i++)
        some.x[i] = from_float<T>(x[i]);
    put<N>(to.at, e, end, vector, some);
}

/* As they are. */
template <int N, bool BYTES, typename T>
INLINE void put_numbers(const row_target<T> &to, int e, int end, bool vector, const numbers<T, N> &some) {
    if (BYTES && to.bytes) {
        float x[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = to_float(some.x[i]);
        put_floats<N, BYTES>(to, e, end, vector, x);
    } else {
        put<N>(to.at, e, end, vector, some);
    }
}

/* The row of which elements from `e` on are the first. */
template <typename T> INLINE row_target<T> from_element(row_target<T> to, int e) {
    return {to.at + e, to.bytes ? to.bytes + e : NULL, to.scale};
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
template <bool BYTES, typename T>
INLINE void rotate_halves(const append_params &p, int64_t position, int e, const T *from, const row_target<T> &to) {
    const int half = (int)p.a.rotary / 2;
    float c[APPEND_UNIT], s[APPEND_UNIT], y[APPEND_UNIT], z[APPEND_UNIT];
    const numbers<T, APPEND_UNIT> low = take<APPEND_UNIT>(from, e, half, p.vector),
                                  high = take<APPEND_UNIT>(from + half, e, half, p.vector);
    find_angles<APPEND_UNIT, T>(p, position, e, c, s);
#pragma unroll
    for (int x = 0; x < APPEND_UNIT; x++) {
        y[x] = to_float(low.x[x]), z[x] = to_float(high.x[x]);
        turn(&y[x], &z[x], c[x], s[x]);
    }
    put_floats<APPEND_UNIT, BYTES>(to, e, half, p.vector, y);
    put_floats<APPEND_UNIT, BYTES>(from_element(to, half), e, half, p.vector, z);
}

template <bool BYTES, typename T>
INLINE void rotate_pairs(const append_params &p, int64_t position, int e, const T *from, const row_target<T> &to) {
    const int end = (int)p.a.rotary;
    float c[APPEND_UNIT / 2], s[APPEND_UNIT / 2], both[APPEND_UNIT];
    const numbers<T, APPEND_UNIT> some = take<APPEND_UNIT>(from, e, end, p.vector);
    find_angles<APPEND_UNIT / 2, T>(p, position, e / 2, c, s);
#pragma unroll
    for (int x = 0; x < APPEND_UNIT; x += 2) {
        both[x] = to_float(some.x[x]), both[x + 1] = to_float(some.x[x + 1]);
        turn(&both[x], &both[x + 1], c[x / 2], s[x / 2]);
    }
    put_floats<APPEND_UNIT, BYTES>(to, e, end, p.vector, both);
}

/* Unit x of a row of which the first `rotary` elements are turned. */
template <bool BYTES, typename T>
INLINE void append_unit(const append_params &p, int64_t position, int x, int rotary, int width, const T *from,
                        const row_target<T> &to) {
    const int turned = append_turned(rotary, p.a.interleaved);
    if (x >= turned) {
        const int e = rotary + (x - turned) * APPEND_UNIT;
        put_numbers<APPEND_UNIT, BYTES>(to, e, width, p.vector, take<APPEND_UNIT>(from, e, width, p.vector));
    } else if (p.a.interleaved)
        rotate_pairs<BYTES>(p, position, x * APPEND_UNIT, from, to);
    else
        rotate_halves<BYTES>(p, position, x * APPEND_UNIT, from, to);
}

INLINE int64_t offset(heddle_strides stride, int64_t b, int64_t h, int64_t s) {
    return b * stride.b + h * stride.h + s * stride.s;
}

template <bool BYTES, typename T>
INLINE void append_rows(const append_params &p, const append_token &c, uint32_t first) {
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
        from += offset(is_q ? a.q_stride : is_v ? a.v_new_stride : a.k_new_stride, c.b, x, c.row);
        void *const tensor = is_q ? p.t.q_out : is_v ? p.t.v : p.t.k;
        const int64_t there =
            is_q ? offset(a.q_out_stride, c.b, x, c.row) : offset(is_v ? a.v_stride : a.k_stride, part, x, row);
        row_target<T> to = {(T *)tensor + there, NULL, 1.0f};
        if (BYTES && !is_q) {
            const float *const scales = (const float *)(is_v ? p.t.v_scale : p.t.k_scale);
            to.bytes = (uint8_t *)tensor + there;
            to.scale = scales ? scales[c.n * a.hk + x] : 1.0f;
        }
        append_unit<BYTES>(p, c.length + (is_q && a.together ? 0 : c.i), (int)(at - x * units),
                           is_v ? 0 : (int)a.rotary, (int)(is_v ? a.dv : a.d), from, to);
    }
}

template <bool BYTES, typename T> INLINE void attention_append(const append_params &p) {
    const int64_t token = blockIdx.x / p.parts;
    if (p.t.seqlens_out)
        for (int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x; n < p.a.b; n += (int64_t)gridDim.x * THREADS)
            p.t.seqlens_out[n] = (int32_t)append_length_after(&p.a, &p.t, n);
    if (token < p.tokens)
        append_rows<BYTES, T>(p, find_token(p, token), blockIdx.x % p.parts * APPEND_UNITS);
}

#define is_plain false
#define is_bytes true
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(warps == APPEND_WARPS && own == APPEND_UNITS, "as the host counts");                                 \
    extern "C" __global__ void __launch_bounds__(warps * 32, is_##variant ? 6 : 8)                                     \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ append_params p) {       \
        wait_for_earlier_grid();                                                                                       \
        attention_append<is_##variant, dtype>(p);                                                                      \
    }

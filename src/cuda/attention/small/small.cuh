/* SPDX-License-Identifier: Apache-2.0
 * What both passes of the small family share: rows into shared memory, scores, sums. */
#ifndef HEDDLE_CUDA_ATTENTION_SMALL_CUH
#define HEDDLE_CUDA_ATTENTION_SMALL_CUH

#include "cuda/attention/common.cuh"
#include "cuda/attention/small/contract.h"

#define WARPS 8
#define THREADS (WARPS * 32)
#define ROWS SMALL_OWN_ROWS
#define HALF (ROWS / 2)
#define STREAM SMALL_BLOCK

template <int D> struct small_shared {
    static constexpr int pitch = small_pitch(D);
    static constexpr int stream = 2 * ROWS * pitch;
    static constexpr int weights = stream + 2 * STREAM * pitch; /* [2][STREAM][ROWS] */
    static constexpr int numbers = weights + 2 * STREAM * ROWS; /* [4][STREAM], or what the forward keeps of its rows */
    static constexpr int merge = stream;                        /* [2][WARPS][ROWS][D], when the rows are done with */
    static constexpr int bytes = (numbers + 4 * STREAM) * 4;
    static_assert(bytes == small_bytes(D) && STREAM == THREADS / 2, "as the plan counts");
    static_assert(2 * WARPS * ROWS * D <= 2 * STREAM * pitch, "the sums fit where the rows were");
};

/* ------------------------------------------------------------------------------------------------------ dropout */

/* Which of HALF rows from i on, with this lane's key as one of a warp's 32 from `first` on, a multiple of 8, are kept: bit r for row r.
 * Each lane asks for eight keys of a row. */
INLINE uint32_t kept_rows(const attention_params &p, const dropout_state &s, uint32_t bh, int i, int first) {
    const uint32_t lane = threadIdx.x % 32, row = (uint32_t)i + lane % HALF, eight = lane / HALF % 4;
    const uint32_t mine = kept_keys(
        dropout_words(s.seed, s.offset, bh, p.drop_row + row, p.drop_eight + (uint32_t)first / DROPOUT_KEYS + eight),
        p.drop_threshold);
    uint32_t r = 0;
#pragma unroll
    for (int x = 0; x < HALF; x++)
        r |= (__shfl_sync(ALL_LANES, mine, lane / DROPOUT_KEYS * HALF + x) >> lane % DROPOUT_KEYS & 1u) << x;
    return r;
}

/* ------------------------------------------------------------------------------------------------------ loading */

/* The rows of one head of one sequence. */
template <typename T> struct matrix {
    const T *at;
    int64_t stride;
    int width, end; /* zeros from these on */
    bool vector;
};

template <typename T>
INLINE matrix<T> make_matrix(const attention_params &p, const void *at, const heddle_strides &s, const place &c,
                             int64_t head, int64_t first, int64_t width, int end, int vector) {
    matrix<T> m;
    m.at = (const T *)at + row_at(s, c.n, head, first);
    m.stride = s.s;
    m.width = (int)width;
    m.end = at ? end : 0;
    m.vector = p.vectors & vector;
    return m;
}

template <typename T> INLINE matrix<T> matrix_q(const attention_params &p, const place &c, int64_t x) {
    return make_matrix<T>(p, p.t.q, p.a.q_stride, c, x, c.first_q, p.a.d, c.sq, VECTOR_Q);
}
template <typename T> INLINE matrix<T> matrix_k(const attention_params &p, const place &c, int64_t y) {
    return make_matrix<T>(p, p.t.k, p.a.k_stride, c, y, c.first_k, p.a.d, c.sk, VECTOR_K);
}
template <typename T> INLINE matrix<T> matrix_v(const attention_params &p, const place &c, int64_t y) {
    return make_matrix<T>(p, p.t.v, p.a.v_stride, c, y, c.first_k, p.a.dv, c.sk, VECTOR_V);
}
template <typename T> INLINE matrix<T> matrix_dout(const attention_params &p, const place &c, int64_t x) {
    return make_matrix<T>(p, p.t.dout, p.a.do_stride, c, x, c.first_q, p.a.dv, c.sq, VECTOR_DO);
}
template <typename T> INLINE matrix<T> matrix_o(const attention_params &p, const place &c, int64_t x) {
    return make_matrix<T>(p, p.t.dout ? p.t.o : NULL, p.a.o_stride, c, x, c.first_q, p.a.dv, c.sq, VECTOR_O);
}

/* Four numbers as they lie in memory. */
template <typename T> struct __align__(4 * sizeof(T)) four {
    T x[4];
};

template <typename T> INLINE float4 to_floats(const four<T> &raw) {
    return make_float4(to_float(raw.x[0]), to_float(raw.x[1]), to_float(raw.x[2]), to_float(raw.x[3]));
}

/* Columns e .. e+3 of a row. Nothing is done with them here, so that many loads can be under way. */
template <typename T, bool VECTOR> INLINE four<T> fetch(const matrix<T> &m, int row, int e) {
    four<T> raw = {};
    const T *from = m.at + row * m.stride + e;
    if (VECTOR) {
        if (row < m.end && e < m.width)
            raw = *(const four<T> *)from;
    } else {
#pragma unroll
        for (int z = 0; z < 4; z++)
            if (row < m.end && e + z < m.width)
                raw.x[z] = from[z];
    }
    return raw;
}

template <typename T> INLINE four<T> fetch_any(const matrix<T> &m, int row, int e) {
    return m.vector ? fetch<T, true>(m, row, e) : fetch<T, false>(m, row, e);
}

/* 0, or NaN if one of the numbers is not finite. */
INLINE float probe(float4 x) {
    return (x.x * 0.0f + x.y * 0.0f) + (x.z * 0.0f + x.w * 0.0f);
}

/* The sum of dO∘O over a row, of which D/4 lanes have four numbers each. Zeros of O are left out: a query that sees
 * nothing may hold anything in dO. */
template <int D> INLINE float row_dot(float4 o, float4 dout) {
    float sum = o.x != 0.0f ? o.x * dout.x : 0.0f;
    sum = o.y != 0.0f ? fmaf(o.y, dout.y, sum) : sum;
    sum = o.z != 0.0f ? fmaf(o.z, dout.z, sum) : sum;
    sum = o.w != 0.0f ? fmaf(o.w, dout.w, sum) : sum;
#pragma unroll
    for (int step = D / 8; step; step >>= 1)
        sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
}

/* STREAM rows of two matrices to shared memory; with SUMS also what row_dot says of o and b, to dots. True if this
 * thread met a number that is not finite. The block waits after the first loads until the place is free. */
template <typename T, int D, bool SUMS, bool VECTOR>
INLINE bool load_rows(float *to, const matrix<T> &a, const matrix<T> &b, const matrix<T> &o, float *dots, int first) {
    constexpr int all = STREAM * D / 4 / THREADS, most = !VECTOR ? 4 : sizeof(T) == 2 && !SUMS ? 16 : 8;
    constexpr int batch = all < most ? all : most, step = THREADS / (D / 4), pitch = small_shared<D>::pitch;
    const int row0 = threadIdx.x / (D / 4), e = threadIdx.x % (D / 4) * 4;
    float bad = 0.0f;
#pragma unroll 1
    for (int z0 = 0; z0 < all; z0 += batch) {
        four<T> x[batch], y[batch], w[batch];
#pragma unroll
        for (int z = 0; z < batch; z++) {
            const int row = first + row0 + (z0 + z) * step;
            x[z] = fetch<T, VECTOR>(a, row, e);
            y[z] = fetch<T, VECTOR>(b, row, e);
            if (SUMS)
                w[z] = fetch<T, VECTOR>(o, row, e);
        }
        if (z0 == 0)
            __syncthreads();
#pragma unroll
        for (int z = 0; z < batch; z++) {
            const int row = row0 + (z0 + z) * step;
            const float4 xs = to_floats(x[z]), ys = to_floats(y[z]);
            *(float4 *)(to + row * pitch + e) = xs;
            *(float4 *)(to + (STREAM + row) * pitch + e) = ys;
            bad += probe(xs) + probe(ys);
            if (SUMS) {
                const float dot = row_dot<D>(to_floats(w[z]), ys);
                if (e == 0)
                    dots[row] = dot;
            }
        }
    }
    return bad != 0.0f;
}

template <typename T, int D, bool SUMS>
INLINE bool load_stream(float *to, const matrix<T> &a, const matrix<T> &b, const matrix<T> &o, float *dots, int first) {
    return a.vector && b.vector && o.vector ? load_rows<T, D, SUMS, true>(to, a, b, o, dots, first)
                                            : load_rows<T, D, SUMS, false>(to, a, b, o, dots, first);
}

/* ----------------------------------------------------------------------------------------------- scores and sums */

/* S; -inf where masked. */
template <typename T>
INLINE float score(const attention_params &p, const place &c, int64_t x, int i, int j, float qk, float *slack) {
    if (p.rich)
        return full_score<T>(p, c, make_score_row(p, c, x, i), j, qk, slack);
    *slack = 1.0f;
    return j < i + c.lo || j > i + c.hi || i >= c.sq || j >= c.sk ? -CUDART_INF_F : qk * p.scale;
}

INLINE float dot_four(float4 x, float4 y, float sum) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

/* Four chains of a sum. */
INLINE float4 add_four(float4 x, float4 y, float4 sum) {
    return {fmaf(x.x, y.x, sum.x), fmaf(x.y, y.y, sum.y), fmaf(x.z, y.z, sum.z), fmaf(x.w, y.w, sum.w)};
}

INLINE float join_four(float4 x) {
    return (x.x + x.y) + (x.z + x.w);
}

/* One row against half of the block's own. Always in this order, so that all who form a score see the same one: in float32 in four
 * chains, as the plain kernels have it, whose prep finds D of these scores. */
template <typename T, int D> struct row_products {
    static __device__ __forceinline__ void run(const float *own, const float *row, float sum[HALF]) {
#pragma unroll
        for (int r = 0; r < HALF; r++)
            sum[r] = 0.0f;
#pragma unroll 8
        for (int e = 0; e < D; e += 4) {
            const float4 y = *(const float4 *)(row + e);
#pragma unroll
            for (int r = 0; r < HALF; r++)
                sum[r] = dot_four(*(const float4 *)(own + r * small_shared<D>::pitch + e), y, sum[r]);
        }
    }
};
template <int D> struct row_products<float, D> {
    static __device__ __forceinline__ void run(const float *own, const float *row, float sum[HALF]) {
        float4 of[HALF] = {};
#pragma unroll 4
        for (int e = 0; e < D; e += 4) {
            const float4 y = *(const float4 *)(row + e);
#pragma unroll
            for (int r = 0; r < HALF; r++)
                of[r] = add_four(*(const float4 *)(own + r * small_shared<D>::pitch + e), y, of[r]);
        }
#pragma unroll
        for (int r = 0; r < HALF; r++)
            sum[r] = join_four(of[r]);
    }
};

/* sum += the rows times their weights; with ODD, rows of weight `unseen` are left out. */
template <int D, bool ODD>
INLINE void add_rows(float (*sum)[D / 32], const float *weights, const float *rows, int count, float unseen) {
#pragma unroll 4
    for (int s = threadIdx.x / 32; s < count; s += WARPS) {
        const float4 low = *(const float4 *)(weights + s * ROWS), high = *(const float4 *)(weights + s * ROWS + 4);
        const float w[ROWS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int z = 0; z < D / 32; z++) {
            const float y = rows[s * small_shared<D>::pitch + z * 32 + threadIdx.x % 32];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (!ODD || w[r] != unseen)
                    sum[r][z] = fmaf(w[r], y, sum[r][z]);
        }
    }
}

/* Where there are numbers that are not finite, 0 times them must not come in. */
template <int D>
INLINE void accumulate(float (*sum)[D / 32], const float *weights, const float *rows, int count, bool odd,
                       float unseen) {
    if (odd)
        add_rows<D, true>(sum, weights, rows, count, unseen);
    else
        add_rows<D, false>(sum, weights, rows, count, unseen);
}

/* This warp's sums to where the others find them. */
template <int D> INLINE void put_sums(float *to, float (*sum)[D / 32]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int z = 0; z < D / 32; z++)
            to[(threadIdx.x / 32 * ROWS + r) * D + z * 32 + threadIdx.x % 32] = sum[r][z];
}

/* Number x of [ROWS][D], over all warps. */
template <int D> INLINE float take_sum(const float *from, int x) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        sum += from[w * ROWS * D + x];
    return sum;
}

INLINE void put_half(float *to, int row, const float x[HALF]) {
    *(float4 *)(to + row * ROWS + threadIdx.x / STREAM * HALF) = {x[0], x[1], x[2], x[3]};
}

#endif

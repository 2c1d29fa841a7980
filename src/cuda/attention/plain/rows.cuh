/* SPDX-License-Identifier: Apache-2.0
 * Rows of the plain kernels: which is whose, dot products, the score of an element. */
#ifndef HEDDLE_CUDA_ATTENTION_PLAIN_ROWS_CUH
#define HEDDLE_CUDA_ATTENTION_PLAIN_ROWS_CUH

#include "cuda/attention/common.cuh"
#include "cuda/attention/plain/contract.h"

#define THREADS PLAIN_THREADS
#define MAX_DIM PLAIN_MAX_DIM

/* Row `index` of [b, h, sq] (or [b, hk, sk]): i of head x of sequence n. */
struct row_index {
    int64_t n, x;
    int i;
};

INLINE row_index find_row(int64_t index, int64_t heads, int64_t rows) {
    row_index r;
    r.i = (int)(index % rows);
    r.x = index / rows % heads;
    r.n = index / rows / heads;
    return r;
}

INLINE float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
    return scratch[0] + scratch[1] + scratch[2] + scratch[3];
}

INLINE float block_max(float x, float *scratch) {
    for (int step = 16; step; step >>= 1)
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
    return fmaxf(fmaxf(scratch[0], scratch[1]), fmaxf(scratch[2], scratch[3]));
}

template <typename T> INLINE void load_floats(float *to, const T *from, int n) {
    for (int e = threadIdx.x; e < n; e += THREADS)
        to[e] = to_float(from[e]);
}

template <typename T> INLINE float dot_row(const float *x, const T *y, int n) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int e = 0;
    for (; e + 4 <= n; e += 4)
#pragma unroll
        for (int z = 0; z < 4; z++)
            sum[z] = fmaf(x[e + z], to_float(y[e + z]), sum[z]);
    for (; e < n; e++) /* in float32 as the family small has it, whose rows end with zeros */
        sum[sizeof(T) == 4 ? e % 4 : 0] = fmaf(x[e], to_float(y[e]), sum[sizeof(T) == 4 ? e % 4 : 0]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <typename T> INLINE const T *query_row(const attention_params &p, const place &c, int64_t x, int i) {
    return (const T *)p.t.q + row_at(p.a.q_stride, c.n, x, c.first_q + i);
}
template <typename T> INLINE const T *dout_row(const attention_params &p, const place &c, int64_t x, int i) {
    return (const T *)p.t.dout + row_at(p.a.do_stride, c.n, x, c.first_q + i);
}
/* Key j of head y in k or v. FORWARD: it may be in a page, and is in one. */
template <bool FORWARD>
INLINE int64_t key_at(const attention_params &p, const heddle_strides &s, const place &c, int64_t y, int j) {
    if (FORWARD && p.page_bits)
        return row_at(s, page_at(p, c.n, j), y, j & ((1 << p.page_bits) - 1));
    return row_at(s, c.n, y, c.first_k + j);
}
template <typename T, bool FORWARD = false>
INLINE const T *key_row(const attention_params &p, const place &c, int64_t y, int j) {
    return (const T *)p.t.k + key_at<FORWARD>(p, p.a.k_stride, c, y, j);
}
template <typename T, bool FORWARD = false>
INLINE const T *value_row(const attention_params &p, const place &c, int64_t y, int j) {
    return (const T *)p.t.v + key_at<FORWARD>(p, p.a.v_stride, c, y, j);
}

/* HEDDLE_E4M3: a number as e4m3_to_float of dtype.h makes it. */
struct e4m3 {
    uint8_t bits;
};
INLINE float to_float(e4m3 x) {
    const uint32_t sign = (uint32_t)(x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
    const float value = __uint_as_float((magnitude << 20) + (magnitude < 8 ? 121u << 23 : 120u << 23)) -
                        (magnitude < 8 ? 0x1p-6f : 0.0f);
    return magnitude == 0x7f ? CUDART_NAN_F : __uint_as_float(__float_as_uint(value) | sign);
}
INLINE bool has_bytes(const attention_params &p) {
    return (p.a.features & HEDDLE_E4M3) != 0;
}
INLINE float scale_of_keys(const attention_params &p, const float *scales, const place &c, int64_t y) {
    return has_bytes(p) && scales ? scales[c.n * p.a.hk + y] : 1.0f;
}

/* q·k of key j of head y. */
template <typename T, bool FORWARD>
INLINE float dot_key(const attention_params &p, const place &c, int64_t y, int j, const float *q) {
    if (FORWARD && has_bytes(p))
        return scale_of_keys(p, p.k_scale, c, y) *
               dot_row(q, (const e4m3 *)p.t.k + key_at<FORWARD>(p, p.a.k_stride, c, y, j), (int)p.a.d);
    return dot_row(q, key_row<T, FORWARD>(p, c, y, j), (int)p.a.d);
}

/* Element e of the value of key j, before its scale. */
template <typename T> INLINE float value_at(const attention_params &p, const place &c, int64_t y, int j, int e) {
    if (has_bytes(p))
        return to_float(((const e4m3 *)p.t.v + key_at<true>(p, p.a.v_stride, c, y, j))[e]);
    return to_float(value_row<T, true>(p, c, y, j)[e]);
}

/* Is the element seen, whatever its key holds? */
template <typename T> INLINE bool sees(const attention_params &p, const place &c, const score_row &r, int j) {
    float slack;
    return full_score<T>(p, c, r, j, 0.0f, &slack) != -CUDART_INF_F;
}

/* S; -inf where masked. q: the row in float32. Nothing here is fast: what is long is there once for all kernels, as it takes its time to
 * compile. */
template <typename T, bool FORWARD = false>
__device__ __noinline__ float plain_score(const attention_params &p, const place &c, const score_row &r, int64_t y,
                                          int j, const float *q, float *slack) {
    *slack = 1.0f;
    if (!sees<T>(p, c, r, j) || (FORWARD && p.page_bits && page_at(p, c.n, j) < 0))
        return -CUDART_INF_F;
    return full_score<T>(p, c, r, j, dot_key<T, FORWARD>(p, c, y, j, q), slack);
}

INLINE int first_key(const place &c, int i) {
    return max(0, min(i + c.lo, c.sk));
}
INLINE int last_key(const place &c, int i) { /* one past it */
    return i < c.sq ? max(0, min(i + 1 + c.hi, c.sk)) : 0;
}

/* A block's row of queries, and what its scores depend on. */
struct own_row {
    row_index at;
    place c;
    int64_t y; /* the head of its keys */
    score_row row;
    dropout_state dropout;
};

INLINE own_row find_own_row(const attention_params &p) {
    own_row w;
    w.at = find_row(blockIdx.x, p.a.h, p.a.sq);
    w.c = find_place(p, w.at.n);
    w.y = w.at.x / p.group;
    w.row = make_score_row(p, w.c, w.at.x, w.at.i);
    w.dropout = make_dropout(p);
    return w;
}

#endif

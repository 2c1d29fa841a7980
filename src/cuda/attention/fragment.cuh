/* SPDX-License-Identifier: Apache-2.0
 * What the tensor cores of Ampere take: fragments of tiles and of accumulators, float32 as the sum of two TF32 numbers. */
#ifndef HEDDLE_CUDA_ATTENTION_FRAGMENT_CUH
#define HEDDLE_CUDA_ATTENTION_FRAGMENT_CUH

#include "cuda/attention/tile.cuh"

template <typename T> struct a_fragment { uint32_t r[4]; };
template <typename T> struct b_fragment { uint32_t r[2]; };
/* float32 as the sum of two TF32 numbers. */
template <> struct a_fragment<float> { uint32_t r[4], low[4]; };
template <> struct b_fragment<float> { uint32_t r[2], low[2]; };

/* The tensor cores take the first 11 bits of a number and leave the others out. */
#define TF32_BITS 0xffffe000u

/* high: x rounded to 11 bits, or cut off where that would be infinite (or no longer a NaN); low: the rest, 12 bits, of which the tensor
 * cores leave the last one out. */
INLINE void split_tf32(uint32_t bits, uint32_t *high, uint32_t *low) {
    const float x = __uint_as_float(bits);
    *high = (fabsf(x) < 0x1.ffep127f ? bits + 0x1000u : bits) & TF32_BITS;
    *low = __float_as_uint(__fsub_rn(x, __uint_as_float(*high)));
}

/* What the tensor cores leave out of the low parts. */
template <int N> INLINE void last_bits(uint32_t (&rest)[N], const uint32_t (&low)[N]) {
#pragma unroll
    for (int x = 0; x < N; x++)
        rest[x] = __float_as_uint(__fsub_rn(__uint_as_float(low[x]), __uint_as_float(low[x] & TF32_BITS)));
}

INLINE void complete(a_fragment<bf16> *) {
}
INLINE void complete(a_fragment<float> *a) {
#pragma unroll
    for (int x = 0; x < 4; x++)
        split_tf32(a->r[x], &a->r[x], &a->low[x]);
}
template <typename T> INLINE void set_b(b_fragment<T> *b, uint32_t r0, uint32_t r1) {
    b->r[0] = r0;
    b->r[1] = r1;
}
template <> __device__ __forceinline__ void set_b(b_fragment<float> *b, uint32_t r0, uint32_t r1) {
    split_tf32(r0, &b->r[0], &b->low[0]);
    split_tf32(r1, &b->r[1], &b->low[1]);
}

INLINE void multiply(float c[4], const a_fragment<bf16> &a, const b_fragment<bf16> &b) {
    mma_bf16(c, a.r, b.r);
}
/* c += the main part of a float32 product, low += the two small ones. */
INLINE void multiply_parts(float c[4], float low[4], const a_fragment<float> &a, const b_fragment<float> &b,
                           bool tf32) {
    if (!tf32) {
        mma_tf32(low, a.low, b.r);
        mma_tf32(low, a.r, b.low);
    }
    mma_tf32(c, a.r, b.r);
}

/* c += all of it: what the sum of the large products was cut off by is what it lacks of them. */
INLINE void multiply_whole(float c[4], const a_fragment<float> &a, const b_fragment<float> &b) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, rest[4];
    uint32_t of_a[4], of_b[2];
    last_bits(of_a, a.low);
    last_bits(of_b, b.low);
    mma_tf32(sum, a.r, b.r);
#pragma unroll
    for (int e = 0; e < 4; e++)
        rest[e] = -sum[e];
    mma_tf32(rest, a.r, b.r);
    mma_tf32(rest, of_a, b.r);
    mma_tf32(rest, a.r, of_b);
    mma_tf32(rest, a.low, b.low);
    mma_tf32(rest, a.low, b.r);
    mma_tf32(rest, a.r, b.low);
#pragma unroll
    for (int e = 0; e < 4; e++)
        c[e] += sum[e] + rest[e];
}

/* A from 16 rows of a tile, at the lane's address (a_lane) of this step. */
template <typename T> INLINE void load_a(a_fragment<T> *a, uint32_t at) {
    ldmatrix4(a->r, at);
    complete(a);
}

template <typename T, int D> INLINE uint32_t a_lane(int lane) {
    return (lane & 15) * tile<T, D>::pitch + (lane >> 4) * 16;
}

/* B from 16 rows of a tile whose rows are B's columns: two fragments. */
template <typename T> INLINE void load_b_rows(b_fragment<T> b[2], uint32_t at) {
    uint32_t r[4];
    ldmatrix4(r, at);
    set_b(&b[0], r[0], r[1]);
    set_b(&b[1], r[2], r[3]);
}

/* B from a tile whose rows are B's rows: two fragments of one step, 16 columns. float32 takes row 2t as B's row t
 * and row 2t+1 as B's row t+4, to fit the accumulators that A is made from. */
template <typename T, int D> INLINE void load_b_columns(b_fragment<T> b[2], uint32_t at) {
    uint32_t r[4];
    ldmatrix4_trans(r, at);
    set_b(&b[0], r[0], r[1]);
    set_b(&b[1], r[2], r[3]);
}

template <int D> struct f32_columns {
    static __device__ __forceinline__ void load(b_fragment<float> b[2], uint32_t at) {
        const int pitch = tile<float, D>::pitch;
        set_b(&b[0], load_shared4(at), load_shared4(at + pitch));
        set_b(&b[1], load_shared4(at + 32), load_shared4(at + pitch + 32));
    }
};

/* A of step x of a product over the columns of accumulators c[..][4], each of 16 rows and 8 columns. */
INLINE void a_from_accumulators(a_fragment<bf16> *a, const float (*c)[4], int x) {
    a->r[0] = pack_bf16(c[2 * x][0], c[2 * x][1]);
    a->r[1] = pack_bf16(c[2 * x][2], c[2 * x][3]);
    a->r[2] = pack_bf16(c[2 * x + 1][0], c[2 * x + 1][1]);
    a->r[3] = pack_bf16(c[2 * x + 1][2], c[2 * x + 1][3]);
}
INLINE void a_from_accumulators(a_fragment<float> *a, const float (*c)[4], int x) {
    a->r[0] = __float_as_uint(c[x][0]);
    a->r[1] = __float_as_uint(c[x][2]);
    a->r[2] = __float_as_uint(c[x][1]);
    a->r[3] = __float_as_uint(c[x][3]);
    complete(a);
}

#endif

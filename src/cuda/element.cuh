/* SPDX-License-Identifier: Apache-2.0
 * The element types: conversions, and rows read and written eight elements at a time. */
#ifndef HEDDLE_CUDA_ELEMENT_CUH
#define HEDDLE_CUDA_ELEMENT_CUH

#include "cuda/ptx.cuh"

#define INLINE static __device__ __forceinline__

/* Kernels of attention are compiled for bf16, and their PTX is made into that of float16 (modules.def): so what depends on the type is said
 * in instructions (ptx.cuh), not in numbers. */
struct bf16 {
    uint16_t bits;
};

struct f16 {
    uint16_t bits;
};

typedef float f32;

INLINE float to_float(float x) {
    return x;
}

INLINE float to_float(bf16 x) {
    return bf16_to_float(x.bits);
}

INLINE float to_float(f16 x) {
    return f16_to_float(x.bits);
}

template <typename T> INLINE T from_float(float x);

template <> __device__ __forceinline__ float from_float<float>(float x) {
    return x;
}

template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return bf16{float_to_bf16(x)};
}

template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    return f16{float_to_f16(x)};
}

template <typename T> INLINE void from_float(T *to, float x) {
    *to = from_float<T>(x);
}

/* a + b, and what the sum was rounded by. */
INLINE float add_exactly(float a, float b, float *low) {
    const float sum = __fadd_rn(a, b), part = __fsub_rn(sum, a);
    *low = __fadd_rn(__fsub_rn(a, __fsub_rn(sum, part)), __fsub_rn(b, part));
    return sum;
}

/* a + b, and to *low what the sum was rounded by, beside what was left of both before. */
INLINE float add_low(float a, float b, float before, float *low) {
    float rest;
    const float sum = add_exactly(a, b, &rest);
    *low = before + rest;
    return sum;
}

/* p[e .. e+7], zeros from `end` on; `vector`: p is aligned to 16 bytes. */
INLINE void load8(const float *p, int64_t e, int64_t end, bool vector, float v[8]) {
    if (vector && e + 8 <= end) {
        *(float4 *)v = *(const float4 *)(p + e);
        *(float4 *)(v + 4) = *(const float4 *)(p + e + 4);
        return;
    }
#pragma unroll
    for (int x = 0; x < 8; x++)
        v[x] = e + x < end ? p[e + x] : 0;
}

template <typename T> INLINE void load8(const T *p, int64_t e, int64_t end, bool vector, float v[8]) {
    if (vector && e + 8 <= end) {
        T h[8];
        *(uint4 *)h = *(const uint4 *)(p + e);
#pragma unroll
        for (int x = 0; x < 8; x++)
            v[x] = to_float(h[x]);
        return;
    }
#pragma unroll
    for (int x = 0; x < 8; x++)
        v[x] = e + x < end ? to_float(p[e + x]) : 0;
}

INLINE void store8(float *p, int64_t e, int64_t end, bool vector, const float v[8]) {
    if (vector && e + 8 <= end) {
        *(float4 *)(p + e) = *(const float4 *)v;
        *(float4 *)(p + e + 4) = *(const float4 *)(v + 4);
        return;
    }
#pragma unroll
    for (int x = 0; x < 8; x++)
        if (e + x < end)
            p[e + x] = v[x];
}

/* As they are. */
template <typename T> INLINE void store8(T *p, int64_t e, int64_t end, bool vector, const T h[8]) {
    if (vector && e + 8 <= end) {
        *(uint4 *)(p + e) = *(const uint4 *)h;
        return;
    }
#pragma unroll
    for (int x = 0; x < 8; x++)
        if (e + x < end)
            p[e + x] = h[x];
}

template <typename T> INLINE void store8(T *p, int64_t e, int64_t end, bool vector, const float v[8]) {
    T h[8];
#pragma unroll
    for (int x = 0; x < 8; x++)
        h[x] = from_float<T>(v[x]);
    store8<T>(p, e, end, vector, (const T *)h);
}

/* Two numbers of 16 bits in one register, the first in the low half; and back. */
INLINE uint32_t pack_pair(float low, float high, bf16) {
    return pack_bf16(low, high);
}
INLINE uint32_t pack_pair(float low, float high, f16) {
    return pack_f16(low, high);
}
INLINE float low_float(uint32_t pair, bf16) {
    return low_bf16_to_float(pair);
}
INLINE float high_float(uint32_t pair, bf16) {
    return high_bf16_to_float(pair);
}
INLINE float low_float(uint32_t pair, f16) {
    return f16_to_float((uint16_t)pair);
}
INLINE float high_float(uint32_t pair, f16) {
    return f16_to_float((uint16_t)(pair >> 16));
}

/* The bits of both exponents of a pair, all of which are set where a number is infinite or NaN. */
INLINE uint32_t exponent_bits(bf16) {
    return exponent_bits_bf16();
}
INLINE uint32_t exponent_bits(f16) {
    return 0x7c007c00u;
}

/* Is one of 16 bytes' elements infinite or NaN? One more in such an exponent is the sign. */
template <typename T> INLINE bool has_nonfinite(uint4 x, T) {
    const uint32_t bits = exponent_bits(T()), one = 0x80008000u - bits;
    const uint32_t low = ((x.x & bits) + one) | ((x.y & bits) + one),
                   high = ((x.z & bits) + one) | ((x.w & bits) + one);
    return ((low | high) & 0x80008000u) != 0;
}
INLINE bool has_nonfinite(uint4 x, float) {
    const uint32_t bits = 0x7f800000u, w[4] = {x.x, x.y, x.z, x.w};
    bool bad = false;
    for (int i = 0; i < 4; i++)
        bad |= (w[i] & bits) == bits;
    return bad;
}

/* Two floats as pairs of float16: what is rounded, and what that leaves. */
INLINE void split_pair(float x, float y, uint32_t *high, uint32_t *low) {
    *high = pack_f16(x, y);
    *low = pack_f16(x - low_float(*high, f16()), y - high_float(*high, f16()));
}

/* 2^e for |e| <= 126. */
INLINE float power_of_two(int e) {
    return __int_as_float((127 + e) << 23);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The words of CUDA C that the kernels use, in C++: what they do is the processor's own, or asked of emulator.h. */
#ifndef HEDDLE_TESTS_CUDA_LANGUAGE_H
#define HEDDLE_TESTS_CUDA_LANGUAGE_H

#include "emulator.h"

#include <math.h>
#include <string.h>

/* The sources ask for it; what of the system's headers does, too, was included before. */
#define __CUDACC__ 1
#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(x, y, z) EMULATOR_CLUSTERS(x)
#define EMULATOR_CLUSTERS(x) __attribute__((section("emulator_clusters_of_" #x)))
#define __align__(n) __attribute__((aligned(n)))
/* The word for memory that is neither a function's own nor declared `static`; a launch has one host thread. */
#define __shared__ thread_local

#define threadIdx (emulator_now.thread)
#define blockIdx (emulator_now.block)
#define blockDim (emulator_now.threads)
#define gridDim (emulator_now.blocks)

/* ------------------------------------------------------------------------------------------------------ vectors */

#define VECTOR2(name, type)                                                                                            \
    struct __align__(8) name {                                                                                         \
        type x, y;                                                                                                     \
    };                                                                                                                 \
    static inline name make_##name(type x, type y) {                                                                   \
        return {x, y};                                                                                                 \
    }
#define VECTOR4(name, type)                                                                                            \
    struct __align__(16) name {                                                                                        \
        type x, y, z, w;                                                                                               \
    };                                                                                                                 \
    static inline name make_##name(type x, type y, type z, type w) {                                                   \
        return {x, y, z, w};                                                                                           \
    }
struct float3 {
    float x, y, z;
};
static inline float3 make_float3(float x, float y, float z) {
    return {x, y, z};
}
VECTOR2(float2, float)
VECTOR2(int2, int)
VECTOR2(uint2, unsigned)
VECTOR4(float4, float)
VECTOR4(int4, int)
VECTOR4(uint4, unsigned)
#undef VECTOR2
#undef VECTOR4

/* ------------------------------------------------------------------------------------------------------ numbers */

template <typename To, typename From> static inline To emulator_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static inline float __int_as_float(int x) {
    return emulator_bits<float>(x);
}
static inline float __uint_as_float(unsigned x) {
    return emulator_bits<float>(x);
}
static inline int __float_as_int(float x) {
    return emulator_bits<int>(x);
}
static inline unsigned __float_as_uint(float x) {
    return emulator_bits<unsigned>(x);
}

/* Rounded by themselves, never a part of a fused multiply-add. */
static inline float emulator_rounded(float x) {
    asm("" : "+m"(x));
    return x;
}
static inline float __fadd_rn(float a, float b) {
    return emulator_rounded(a + b);
}
static inline float __fsub_rn(float a, float b) {
    return emulator_rounded(a - b);
}
static inline float __fmul_rn(float a, float b) {
    return emulator_rounded(a * b);
}
/* Towards minus infinity. */
static inline float __fmul_rd(float a, float b) {
    const float x = emulator_rounded(a * b);
    return isfinite(a) && isfinite(b) && (double)x > (double)a * b ? nextafterf(x, -INFINITY) : x;
}
static inline float __fdividef(float a, float b) {
    return a / b;
}
static inline float rsqrtf(float x) {
    return (float)(1.0 / sqrt((double)x));
}

static inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
static inline int __ffs(int x) {
    return __builtin_ffs(x);
}
static inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned order) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned r = 0;
    for (int x = 0; x < 4; x++) {
        r |= ((unsigned)(bytes >> (order >> 4 * x & 7) * 8) & 0xff) << 8 * x;
    }
    return r;
}
static inline unsigned __vcmpne4(unsigned a, unsigned b) {
    unsigned r = 0;
    for (int x = 0; x < 32; x += 8)
        r |= (a >> x & 0xff) != (b >> x & 0xff) ? 0xffu << x : 0;
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}

#define EMULATOR_LEAST(type)                                                                                           \
    static inline type min(type a, type b) {                                                                           \
        return b < a ? b : a;                                                                                          \
    }                                                                                                                  \
    static inline type max(type a, type b) {                                                                           \
        return a < b ? b : a;                                                                                          \
    }
EMULATOR_LEAST(int)
EMULATOR_LEAST(unsigned)
EMULATOR_LEAST(long)
EMULATOR_LEAST(unsigned long)
EMULATOR_LEAST(float)
#undef EMULATOR_LEAST

/* ------------------------------------------------------------------------------------------------------- memory */

template <typename T> static inline T __ldg(const T *p) {
    return *p;
}
template <typename T> static inline void __stcg(T *p, T v) {
    *p = v;
}
template <typename T> static inline T __ldcg(const T *p) {
    return *p;
}
static inline void __threadfence(void) {
}
static inline void __nanosleep(unsigned) {
    emulator_give_way();
}

/* Fibers change only where they wait. */
template <typename T> static inline T atomicAdd(T *p, T x) {
    const T before = *p;
    *p += x;
    return before;
}
template <typename T> static inline T atomicOr(T *p, T x) {
    const T before = *p;
    *p |= x;
    return before;
}

/* ------------------------------------------------------------------------------------------- blocks and warps */

static inline void __syncthreads(void) {
    emulator_barrier(0, 0, false);
}
static inline int __syncthreads_or(int yes) {
    return emulator_barrier(0, 0, yes != 0);
}
static inline int __syncthreads_and(int yes) {
    return !emulator_barrier(0, 0, yes == 0);
}

/* Every operation of a warp is one of all its lanes: the kernels have no other. */
static inline void emulator_all(unsigned mask) {
    if (mask != ~0u)
        emulator_fail("a warp-wide operation of the lanes %08x alone", mask);
}
static inline void __syncwarp(unsigned mask = ~0u) {
    emulator_all(mask);
    emulator_meet([](void *const *) {}, nullptr);
}

/* What each lane gives, from which it takes, and what it gets. */
struct emulator_exchange {
    uint64_t mine;
    unsigned from;
    uint64_t got;
};
static inline uint64_t emulator_shuffle(uint64_t mine, unsigned from) {
    emulator_exchange e = {mine, from, 0};
    emulator_meet(
        [](void *const *lanes) {
            for (int x = 0; x < EMULATOR_LANES; x++) {
                emulator_exchange *to = (emulator_exchange *)lanes[x];
                to->got = ((const emulator_exchange *)lanes[to->from % EMULATOR_LANES])->mine;
            }
        },
        &e);
    return e.got;
}
template <typename T> static inline T __shfl_sync(unsigned mask, T x, int lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "as shuffles are defined");
    uint64_t bits = 0;
    emulator_all(mask);
    memcpy(&bits, &x, sizeof x);
    bits = emulator_shuffle(bits, (unsigned)lane);
    memcpy(&x, &bits, sizeof x);
    return x;
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T x, int other) {
    return __shfl_sync(mask, x, (int)(threadIdx.x % EMULATOR_LANES) ^ other);
}

/* One number of all the lanes' numbers, each with its lane. */
template <uint64_t (*add)(uint64_t all, uint64_t x, int lane)> static inline uint64_t emulator_reduce(uint64_t mine) {
    emulator_exchange e = {mine, 0, 0};
    emulator_meet(
        [](void *const *lanes) {
            uint64_t all = ((const emulator_exchange *)lanes[0])->mine;
            for (int x = 1; x < EMULATOR_LANES; x++)
                all = add(all, ((const emulator_exchange *)lanes[x])->mine, x);
            for (int x = 0; x < EMULATOR_LANES; x++)
                ((emulator_exchange *)lanes[x])->got = all;
        },
        &e);
    return e.got;
}
static inline uint64_t emulator_add_bit(uint64_t all, uint64_t x, int lane) {
    return all | x << lane;
}
template <typename T> static inline uint64_t emulator_larger(uint64_t all, uint64_t x, int) {
    return (uint64_t)max((T)all, (T)x);
}
template <typename T> static inline uint64_t emulator_smaller(uint64_t all, uint64_t x, int) {
    return (uint64_t)min((T)all, (T)x);
}
static inline unsigned __ballot_sync(unsigned mask, int yes) {
    emulator_all(mask);
    return (unsigned)emulator_reduce<emulator_add_bit>(yes != 0);
}
static inline int __any_sync(unsigned mask, int yes) {
    return __ballot_sync(mask, yes) != 0;
}
static inline int __all_sync(unsigned mask, int yes) {
    return __ballot_sync(mask, yes) == ~0u;
}
template <typename T> static inline T __reduce_max_sync(unsigned mask, T x) {
    emulator_all(mask);
    return (T)emulator_reduce<emulator_larger<T>>((uint64_t)x);
}
template <typename T> static inline T __reduce_min_sync(unsigned mask, T x) {
    emulator_all(mask);
    return (T)emulator_reduce<emulator_smaller<T>>((uint64_t)x);
}

/* ----------------------------------------------------------------------------------------- a module's kernels */

template <typename P> P emulator_parameter(void (*)(P));
template <auto kernel> static void emulator_call(const void *parameters) {
    kernel(*(const decltype(emulator_parameter(kernel)) *)parameters);
}

/* A row of a module's list, whose last is EMULATOR_LAST. */
#define EMULATOR_KERNEL(symbol, function)                                                                              \
    { symbol, emulator_together<function>(), emulator_call<function> }
#define EMULATOR_LAST                                                                                                  \
    { nullptr, 0, nullptr }

/* Where the linker has put the kernels whose blocks run two and two, or four and four. */
extern "C" __attribute__((weak, visibility("hidden"))) const char __start_emulator_clusters_of_2[],
    __stop_emulator_clusters_of_2[], __start_emulator_clusters_of_4[], __stop_emulator_clusters_of_4[];
template <auto kernel> static unsigned emulator_together(void) {
    const char *at = (const char *)kernel;
    const bool two = __start_emulator_clusters_of_2 <= at && at < __stop_emulator_clusters_of_2,
               four = __start_emulator_clusters_of_4 <= at && at < __stop_emulator_clusters_of_4;
    return two ? 2 : four ? 4 : 1;
}

#endif

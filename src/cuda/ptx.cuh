/* SPDX-License-Identifier: Apache-2.0
 * Every inline asm statement, one instruction per function. */
#ifndef HEDDLE_CUDA_PTX_CUH
#define HEDDLE_CUDA_PTX_CUH

#include <stdint.h>

#define PTX static __device__ __forceinline__

PTX uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes from global to shared memory, of which the first `bytes` are read and the rest become zero. */
PTX void cp_async16(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* By way of the first-level cache: for threads that copy every other 16 bytes. */
PTX void cp_async16_cached(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

PTX void cp_async4(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

PTX void store_shared16(uint32_t to, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

PTX void store_shared4(uint32_t to, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

PTX uint4 load_shared16(uint32_t at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}

/* Each byte is the sign of one of the eight of low and high, eight times: of the one that a digit of `order` names, which is 8 and more.
 * (__byte_perm knows bytes alone.) */
PTX uint32_t spread_signs(uint32_t low, uint32_t high, uint32_t order) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(order));
    return r;
}

/* The line is wanted in the second-level cache. */
PTX void prefetch_global(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

/* As one instruction; the compiler would rather store by fours than move registers. */
PTX void store_global16(void *to, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

PTX uint32_t load_shared4(uint32_t at) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

PTX void cp_async_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Wait until at most N of the groups committed by this thread are under way. */
template <int N> PTX void cp_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Four matrices of 8 rows of 16 bytes; lane l gives the address of row l%8 of matrix l/8. */
PTX void ldmatrix4(uint32_t r[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

PTX void ldmatrix4_trans(uint32_t r[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

/* c += a·b, 16x8x16 and 16x8x8. */
PTX void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

PTX void mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

PTX void mma_tf32(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Two floats to two 16-bit numbers in one register, low in the low half. */
PTX uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

PTX uint32_t pack_f16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/* PTX of bfloat16 is made into PTX of float16, with f16 for bf16 in each name; where that does not do, this is the line's rest in its
 * place (HeddleFatbin.cmake). */
#define IN_F16(instruction) " //f16 " instruction

PTX float bf16_to_float(uint16_t x) {
    float r;
    asm("{.reg .b32 w; cvt.u32.u16 w, %1; shl.b32 %0, w, 16;}" IN_F16("cvt.f32.f16 %0, %1;") : "=f"(r) : "h"(x));
    return r;
}

/* Of two numbers in a register, the one in the low half, and that in the high half. */
PTX float low_bf16_to_float(uint32_t pair) {
    float r;
    asm("shl.b32 %0, %1, 16;" IN_F16("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}") : "=f"(r) : "r"(pair));
    return r;
}

PTX float high_bf16_to_float(uint32_t pair) {
    float r;
    asm("and.b32 %0, %1, 0xffff0000;" IN_F16("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}")
        : "=f"(r)
        : "r"(pair));
    return r;
}

/* The bits of both exponents of a pair. */
PTX uint32_t exponent_bits_bf16(void) {
    uint32_t r;
    asm("mov.b32 %0, 0x7f807f80;" IN_F16("mov.b32 %0, 0x7c007c00;") : "=r"(r));
    return r;
}

PTX float f16_to_float(uint16_t x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}

PTX uint16_t float_to_f16(float x) {
    uint16_t r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

PTX uint16_t float_to_bf16(float x) {
    uint16_t r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

/* a·b + c, of two 16-bit numbers each. */
PTX uint32_t fma2_bf16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

/* A pair of e4m3, the upper bytes of the halves, without their signs: exponent and fraction where a 16-bit type has its lowest bits of one
 * and the highest of the other; and a pair of what that is then to be multiplied with, 2^120 or 2^8. */
PTX uint32_t e4m3_shifted_bf16(uint32_t pair) {
    uint32_t r;
    asm("shr.b32 %0, %1, 4;" IN_F16("shr.b32 %0, %1, 1;") : "=r"(r) : "r"(pair));
    return r;
}

PTX uint32_t e4m3_factor_bf16(void) {
    uint32_t r;
    asm("mov.b32 %0, 0x7b807b80;" IN_F16("mov.b32 %0, 0x5c005c00;") : "=r"(r));
    return r;
}

/* The smaller ones of two pairs; a NaN loses. */
PTX uint32_t min2_bf16(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* The larger one; NaN if one is. */
PTX float max_or_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

/* tanh within 2^-11 of itself, for bfloat16; float16 needs it better: 1 - 2/(1 + 2^(x·2·log2(e))), within 2^-23. */
PTX float tanh_approx(float x) {
    float r;
    asm("tanh.approx.f32 %0, %1;" IN_F16(
            "{.reg .f32 t; mul.f32 t, %1, 0f4038AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 t, t; fma.rn.f32 %0, t, 0fC0000000, 0f3F800000;}")
        : "=f"(r)
        : "f"(x));
    return r;
}

/* log2 within 2^-22; of 0 -inf. */
PTX float log2_approx(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* 1/x within 1 ulp. */
PTX float reciprocal_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* An 8x8 matrix of 16 bits, row l/4 and columns l%4·2 + 0, 1 in lane l, the other way round. */
PTX uint32_t transpose8x8(uint32_t x) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

/* 2^x within 2 ulp; results under 2^-126 become zero. */
PTX float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* Named barriers, 1 to 15, for so many threads, those that only arrive among them. */
PTX void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* A float32 sum, added to what lies in global memory. */
PTX void add_global(float *to, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

/* ------------------------------------------------------------------------- Hopper: a kernel behind another one */

/* In PTX that serves older GPUs, too, an instruction of Hopper is a comment; HeddleFatbin.cmake takes it out for sm_90. */
#if __CUDA_ARCH__ >= 900
#define LATER_GPU(instruction) instruction
#else
#define LATER_GPU(instruction) "//sm_90 " instruction
#endif

/* All blocks have said this, or have ended: the blocks of a kernel that was launched to overlap may start. */
PTX void let_next_grid_start(void) {
    asm volatile(LATER_GPU("griddepcontrol.launch_dependents;")::: "memory");
}

/* The kernel in front has ended, and what it wrote is there. Older GPUs start no kernel before that. */
PTX void wait_for_earlier_grid(void) {
    asm volatile(LATER_GPU("griddepcontrol.wait;")::: "memory");
}

#endif

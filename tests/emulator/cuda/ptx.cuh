/* SPDX-License-Identifier: Apache-2.0
 * In place of src/cuda/ptx.cuh: the same functions for the processor, each as its instruction is documented. With emulator_f16
 * the functions of bfloat16 are float16's, as HeddleFatbin.cmake makes them. */
#ifndef HEDDLE_CUDA_PTX_CUH
#define HEDDLE_CUDA_PTX_CUH

#include "cuda_language.h"
#include "heddle.h"

#include <stdint.h>

namespace host {
#include "dtype.h"
}

#define PTX static inline

PTX uint32_t spread_signs(uint32_t low, uint32_t high, uint32_t order) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    uint32_t r = 0;
    for (int x = 0; x < 4; x++)
        r |= (bytes >> (order >> 4 * x & 7) * 8 & 0x80 ? 0xffu : 0) << 8 * x;
    return r;
}

/* ------------------------------------------------------------------------------------------------------- memory */

PTX uint32_t shared_address(const void *p) {
    return emulator_address(p);
}

PTX void cp_async16(uint32_t to, const void *from, int bytes) {
    emulator_copy(to, from, (unsigned)bytes, 16);
}
PTX void cp_async16_cached(uint32_t to, const void *from, int bytes) {
    emulator_copy(to, from, (unsigned)bytes, 16);
}
PTX void cp_async4(uint32_t to, const void *from, int bytes) {
    emulator_copy(to, from, (unsigned)bytes, 4);
}
PTX void cp_async_commit(void) {
    emulator_commit();
}
template <int N> PTX void cp_async_wait(void) {
    emulator_wait(N);
}

PTX void store_shared16(uint32_t to, uint4 x) {
    memcpy(emulator_shared(to, 16), &x, 16);
}
PTX void store_shared4(uint32_t to, uint32_t x) {
    memcpy(emulator_shared(to, 4), &x, 4);
}
PTX uint4 load_shared16(uint32_t at) {
    uint4 x;
    memcpy(&x, emulator_shared(at, 16), 16);
    return x;
}
PTX uint32_t load_shared4(uint32_t at) {
    uint32_t x;
    memcpy(&x, emulator_shared(at, 4), 4);
    return x;
}
PTX void prefetch_global(const void *) {
}
PTX void store_global16(void *to, uint4 x) {
    if ((uintptr_t)to % 16)
        emulator_fail("16 bytes stored at %p", to);
    memcpy(to, &x, 16);
}
PTX void add_global(float *to, float x) {
    *to += x;
}

/* ------------------------------------------------------------------------------------------------- 16-bit types */

PTX float f16_to_float(uint16_t x) {
    return host::f16_to_float(x);
}
PTX uint16_t float_to_f16(float x) {
    return host::double_to_f16(x);
}
PTX float bf16_to_float(uint16_t x) {
    return emulator_f16 ? host::f16_to_float(x) : host::bf16_to_float(x);
}
PTX uint16_t double_to_bf16(double x) {
    return emulator_f16 ? host::double_to_f16(x) : host::double_to_bf16(x);
}
PTX uint32_t exponent_bits_bf16(void) {
    return emulator_f16 ? 0x7c007c00u : 0x7f807f80u;
}
/* As far off as an H100's, which has all bits of a curve in pieces: up to 2^-16.5 of itself, and where it is off by so much, its neighbours
 * are, too. In float16 the formula that the comment of it has, of which each part is rounded. */
PTX float tanh_approx(float x) {
    if (!(fabsf(x) <= 10))
        return isnan(x) ? x : copysignf(1, x);
    if (!emulator_f16) {
        const double exact = tanh((double)x), far = fabs((double)x) > 2 ? 0.25 : 1;
        return (float)fmax(-1, fmin(1, exact * (1 + 0x1p-16 * 0.7 * far * sin(90 * fabs((double)x)))));
    }
    const float power = (float)exp2(emulator_rounded(x * 0x1.715476p+1f));
    return fmaf(1.0f / emulator_rounded(power + 1.0f), -2.0f, 1.0f);
}

PTX uint16_t float_to_bf16(float x) {
    return double_to_bf16(x);
}
PTX uint32_t pack_bf16(float low, float high) {
    return (uint32_t)float_to_bf16(high) << 16 | float_to_bf16(low);
}
PTX uint32_t pack_f16(float low, float high) {
    return (uint32_t)float_to_f16(high) << 16 | float_to_f16(low);
}
PTX float low_bf16_to_float(uint32_t pair) {
    return bf16_to_float((uint16_t)pair);
}
PTX float high_bf16_to_float(uint32_t pair) {
    return bf16_to_float((uint16_t)(pair >> 16));
}
PTX uint32_t fma2_bf16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r = 0;
    for (int x = 0; x < 32; x += 16) {
        const double product = (double)bf16_to_float((uint16_t)(a >> x)) * bf16_to_float((uint16_t)(b >> x));
        r |= (uint32_t)double_to_bf16(product + bf16_to_float((uint16_t)(c >> x))) << x;
    }
    return r;
}
PTX uint32_t e4m3_shifted_bf16(uint32_t pair) {
    return pair >> (emulator_f16 ? 1 : 4);
}
PTX uint32_t e4m3_factor_bf16(void) {
    return emulator_f16 ? 0x5c005c00u : 0x7b807b80u;
}
PTX float max_or_nan(float a, float b) {
    return a != a || b != b ? NAN : a > b ? a : b;
}

PTX uint32_t min2_bf16(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int x = 0; x < 32; x += 16)
        r |= (uint32_t)float_to_bf16(fminf(bf16_to_float((uint16_t)(a >> x)), bf16_to_float((uint16_t)(b >> x)))) << x;
    return r;
}

/* ------------------------------------------------------------------------------------------------- single numbers */

/* Of next to nothing: 0, as in .ftz. */
PTX float without_subnormals(float x) {
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}
PTX float exp2_approx(float x) {
    return without_subnormals((float)exp2((double)without_subnormals(x)));
}
PTX float log2_approx(float x) {
    return (float)log2((double)without_subnormals(x));
}
PTX float reciprocal_approx(float x) {
    return without_subnormals(1.0f / without_subnormals(x));
}

/* -------------------------------------------------------------------------------------------------------- warps */

/* A lane's row, read when it arrives: what other lanes write is there only behind a __syncwarp() of all. */
struct emulator_matrix {
    uint16_t row[8];
    uint32_t *r;
};

/* Lane l gives row l%8 of matrix l/8, and gets two numbers of each: of row l/4, or of column l/4. */
template <bool TRANSPOSED> PTX void emulator_turn(void *const *lanes) {
    for (int matrix = 0; matrix < 4; matrix++)
        for (int lane = 0; lane < EMULATOR_LANES; lane++) {
            uint32_t pair = 0;
            for (int z = 0; z < 2; z++) {
                const int own = lane / 4, other = lane % 4 * 2 + z, row = TRANSPOSED ? other : own;
                const emulator_matrix *from = (const emulator_matrix *)lanes[matrix * 8 + row];
                pair |= (uint32_t)from->row[TRANSPOSED ? own : other] << z * 16;
            }
            ((const emulator_matrix *)lanes[lane])->r[matrix] = pair;
        }
}
template <bool TRANSPOSED> PTX void emulator_ldmatrix(uint32_t r[4], uint32_t at) {
    emulator_matrix m;
    memcpy(m.row, emulator_shared(at, 16), 16);
    m.r = r;
    emulator_meet(emulator_turn<TRANSPOSED>, &m);
}
PTX void ldmatrix4(uint32_t r[4], uint32_t at) {
    emulator_ldmatrix<false>(r, at);
}
PTX void ldmatrix4_trans(uint32_t r[4], uint32_t at) {
    emulator_ldmatrix<true>(r, at);
}

/* Row l/4 and columns l%4·2 + 0, 1 in lane l. */
PTX uint32_t transpose8x8(uint32_t x) {
    emulator_exchange e = {x, 0, 0};
    emulator_meet(
        [](void *const *lanes) {
            for (unsigned l = 0; l < EMULATOR_LANES; l++) {
                uint32_t pair = 0;
                for (unsigned z = 0; z < 2; z++) {
                    const unsigned row = l % 4 * 2 + z, column = l / 4;
                    const emulator_exchange *from = (const emulator_exchange *)lanes[row * 4 + column / 2];
                    pair |= ((uint32_t)from->mine >> column % 2 * 16 & 0xffffu) << z * 16;
                }
                ((emulator_exchange *)lanes[l])->got = pair;
            }
        },
        &e);
    return (uint32_t)e.got;
}

struct emulator_product {
    float *c;
    const uint32_t *a, *b;
};

/* Lane l has of c the rows l/4 and l/4 + 8, columns l%4·2 + 0, 1. A register of a or b is two numbers of 16 bits or one of TF32, in the
 * columns (of b: rows) l%4 and l%4 + 4 of registers: a's are rows l/4, l/4 + 8, l/4, l/4 + 8; b's are column l/4. */
template <emulator_type TYPE> PTX void emulator_mma(void *const *lanes) {
    float c[16][8];
    uint32_t a[16][8], b[8][8];
    for (int l = 0; l < EMULATOR_LANES; l++) {
        const emulator_product *p = (const emulator_product *)lanes[l];
        for (int x = 0; x < 4; x++) {
            c[l / 4 + x / 2 * 8][l % 4 * 2 + x % 2] = p->c[x];
            a[l / 4 + x % 2 * 8][l % 4 + x / 2 * 4] = p->a[x];
        }
        for (int x = 0; x < 2; x++)
            b[l / 4][l % 4 + x * 4] = p->b[x];
    }
    emulator_multiply(TYPE, c, a[0], b[0]);
    for (int l = 0; l < EMULATOR_LANES; l++)
        for (int x = 0; x < 4; x++)
            ((const emulator_product *)lanes[l])->c[x] = c[l / 4 + x / 2 * 8][l % 4 * 2 + x % 2];
}
PTX void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    emulator_product p = {c, a, b};
    emulator_meet(emulator_f16 ? emulator_mma<EMULATOR_FP16> : emulator_mma<EMULATOR_BF16>, &p);
}
PTX void mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    emulator_product p = {c, a, b};
    emulator_meet(emulator_mma<EMULATOR_FP16>, &p);
}
PTX void mma_tf32(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    emulator_product p = {c, a, b};
    emulator_meet(emulator_mma<EMULATOR_TF32>, &p);
}

/* ------------------------------------------------------------------------------------------------------- blocks */

PTX void barrier_sync(int id, int threads) {
    emulator_barrier(id, threads, false);
}

/* A kernel begins when the one in front has ended. */
PTX void let_next_grid_start(void) {
}
PTX void wait_for_earlier_grid(void) {
}

#endif

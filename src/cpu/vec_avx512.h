/* SPDX-License-Identifier: Apache-2.0
 * What vector C cannot say, for AVX-512 (F, BW, DQ, VL). */
#include <immintrin.h>

#define HAVE_VMAX
#define HAVE_BF16_CONVERT
#define HAVE_F16_CONVERT
#define HAVE_LONG_PRODUCT
#define HAVE_PARTIAL
#define HAVE_BYTE_BITS
#define HAVE_E4M3_TABLE
#define HAVE_STREAM
#include "vec.h"

INLINE vf vmax(vf a, vf b) {
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}

INLINE uint32_t byte_bits(const uint8_t *p) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i_u *)p);
    return _mm256_test_epi8_mask(bytes, bytes);
}

INLINE vl long_product(vl a, uint32_t b) {
    return (vl)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi32((int)b));
}

/* gcc 12 makes four instructions of __builtin_convertvector() here, by halves. */
INLINE vf bf16_widen(vh h) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
}

INLINE vh bf16_narrow(vf x) {
    const vu u = (vu)x, rounded = u + 0x7fffu + (u >> 16 & 1), quiet = u | 0x400000;
    const __mmask16 nan = _mm512_cmpunord_ps_mask((__m512)x, (__m512)x);
    const __m512i r = _mm512_mask_blend_epi32(nan, (__m512i)rounded, (__m512i)quiet);
    return (vh)_mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}

INLINE vf f16_widen(vh h) {
    return (vf)_mm512_cvtph_ps((__m256i)h);
}

INLINE vh f16_narrow(vf x) {
    return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* All numbers without a sign are in tables of 64, which the compiler makes. */
INLINE vh_two e4m3_halves(int mantissa, int bias, vb_two bytes) {
    const vb_two first = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    __m512i table[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++)
        table[t] = (__m512i)e4m3_by_bits(mantissa, bias, first + (uint8_t)(32 * t));
    const __m512i u = _mm512_cvtepu8_epi16((__m256i)bytes);
    const __m512i low = _mm512_permutex2var_epi16(table[0], u, table[1]),
                  high = _mm512_permutex2var_epi16(table[2], u, table[3]);
    const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(u, _mm512_set1_epi16(0x40)), low, high);
    return (vh_two)magnitude | ((vh_two)u & 0x80) << 8;
}

/* The first n < VL elements, and zeros. */
INLINE vf load_floats(const float *p, int64_t n) {
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}

INLINE vh load_halves(const void *p, int64_t n) {
    return (vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
}

INLINE void store_floats(float *p, vf x, int64_t n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
}

INLINE void store_halves(void *p, vh x, int64_t n) {
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)x);
}

/* A whole line that goes past the caches, and the end of such: other threads see them all. */
INLINE void stream(void *line, vf x) {
    _mm512_stream_ps((float *)line, (__m512)x);
}

INLINE void end_streams(void) {
    _mm_sfence();
}

#ifdef __AVX512BF16__
#define HAVE_FLUSH
/* Denormals are zeros from here on, as they are to products of bfloat16, until what this returns is given back. */
INLINE unsigned flush_denormals(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* FTZ, DAZ */
    return before;
}

INLINE void keep_denormals(unsigned before) {
    _mm_setcsr(before);
}

/* even[l] | odd[l] << 16, both rounded to bfloat16. (Denormals become zero, as the products take them.) */
INLINE vf narrow_pairs(vf even, vf odd) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vf)_mm512_permutexvar_epi16(order, both);
}

/* Both numbers of each pair times a power of two; what becomes denormal is cut. */
INLINE vf scale_pair(vf pair, float factor) {
    const vu low = (vu)(factor * (vf)((vu)pair << 16)), high = (vu)(factor * (vf)((vu)pair & 0xffff0000u));
    return (vf)(low >> 16 | (high & 0xffff0000u));
}

/* first[0..15], second[0..15], rounded to bfloat16. */
INLINE vf narrow_two(vf first, vf second) {
    return (vf)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
#endif

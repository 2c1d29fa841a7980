/* SPDX-License-Identifier: Apache-2.0
 * What vector C cannot say, for AVX2 + FMA + F16C. */
#include <immintrin.h>

#define HAVE_VMAX
#define HAVE_F16_CONVERT
#define HAVE_LONG_PRODUCT
#define HAVE_ANY_LANE
#define HAVE_BYTE_BITS
#define HAVE_TRANSPOSE
#include "vec.h"

INLINE vf vmax(vf a, vf b) {
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
}

INLINE bool any_lane(vi mask) {
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
}

INLINE uint32_t byte_bits(const uint8_t *p) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i_u *)p);
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256()));
}

/* Halves first, and then each half by itself: 24 shuffles, where three rounds of zip_round() are 48. */
INLINE void transpose(vf *rows) {
    __m256 h[8], z[8];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        h[r] = _mm256_insertf128_ps((__m256)rows[r], _mm256_castps256_ps128((__m256)rows[r + 4]), 1);
        h[r + 4] = _mm256_permute2f128_ps((__m256)rows[r], (__m256)rows[r + 4], 0x31);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4) {
        z[r] = _mm256_unpacklo_ps(h[r], h[r + 1]);
        z[r + 1] = _mm256_unpackhi_ps(h[r], h[r + 1]);
        z[r + 2] = _mm256_unpacklo_ps(h[r + 2], h[r + 3]);
        z[r + 3] = _mm256_unpackhi_ps(h[r + 2], h[r + 3]);
        rows[r] = (vf)_mm256_shuffle_ps(z[r], z[r + 2], 0x44);
        rows[r + 1] = (vf)_mm256_shuffle_ps(z[r], z[r + 2], 0xee);
        rows[r + 2] = (vf)_mm256_shuffle_ps(z[r + 1], z[r + 3], 0x44);
        rows[r + 3] = (vf)_mm256_shuffle_ps(z[r + 1], z[r + 3], 0xee);
    }
}

INLINE vl long_product(vl a, uint32_t b) {
    return (vl)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi32((int)b));
}

INLINE vf f16_widen(vh h) {
    return (vf)_mm256_cvtph_ps((__m128i)h);
}

INLINE vh f16_narrow(vf x) {
    return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* SPDX-License-Identifier: Apache-2.0
 * What vector C cannot say, for AVX2 + FMA + F16C. */
#include <immintrin.h>

#define HAVE_VMAX
#define HAVE_F16_CONVERT
#define HAVE_LONG_PRODUCT
#include "vec.h"

INLINE vf vmax(vf a, vf b) {
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
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

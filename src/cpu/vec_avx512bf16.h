/* SPDX-License-Identifier: Apache-2.0
 * AVX-512 with its products of bfloat16 pairs. */
#define HAVE_BF16_DOT
#include "vec_avx512.h"

/* sum + a₀b₀ + a₁b₁ in every lane. */
INLINE vf dot_pairs(vf sum, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

/* even[l] | odd[l] << 16, both rounded to bfloat16. (Denormals become zero, as the products take them.) */
INLINE vf narrow_pairs(vf even, vf odd) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vf)_mm512_permutexvar_epi16(order, both);
}

/* first[0..15], second[0..15], rounded to bfloat16. */
INLINE vf narrow_two(vf first, vf second) {
    return (vf)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

/* SPDX-License-Identifier: Apache-2.0
 * AVX-512 with its products of bfloat16 pairs. */
#define HAVE_BF16_DOT
#include "vec_avx512.h"

/* sum + a₀b₀ + a₁b₁ in every lane. */
INLINE vf dot_pairs(vf sum, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

/* SPDX-License-Identifier: Apache-2.0
 * What vector C cannot say, for AVX-512 (F, BW, DQ, VL). */
#include <immintrin.h>

#define HAVE_VMAX
#define HAVE_F16_CONVERT
#include "vec.h"

INLINE vf vmax(vf a, vf b) {
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}

INLINE vf f16_widen(vh h) {
    return (vf)_mm512_cvtph_ps((__m256i)h);
}

INLINE vh f16_narrow(vf x) {
    return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

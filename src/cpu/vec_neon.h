/* SPDX-License-Identifier: Apache-2.0
 * What vector C cannot say, for NEON (AArch64, where it is part of the base). */
#include <arm_neon.h>

#define HAVE_VMAX
#define HAVE_BF16_CONVERT
#define HAVE_F16_CONVERT
#include "vec.h"

/* NaN when either is NaN: more than vec.h promises, never less. (FMAXNM would lose the NaN.) */
INLINE vf vmax(vf a, vf b) {
    return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
}

INLINE vf bf16_widen(vh h) {
    return (vf)vshll_n_u16((uint16x4_t)h, 16);
}

/* ADDHN adds and keeps the high half, which is the rounding and the narrowing in one. */
INLINE vh bf16_narrow(vf x) {
    uint32x4_t u = (uint32x4_t)x;
    uint16x4_t rounded = vaddhn_u32(u, (uint32x4_t)(0x7fffu + ((vu)u >> 16 & 1)));
    uint16x4_t quiet = vorr_u16(vshrn_n_u32(u, 16), vdup_n_u16(0x40));
    uint16x4_t number = vmovn_u32(vceqq_f32((float32x4_t)x, (float32x4_t)x));
    return (vh)vbsl_u16(number, rounded, quiet);
}

INLINE vf f16_widen(vh h) {
    return (vf)vcvt_f32_f16((float16x4_t)h);
}

INLINE vh f16_narrow(vf x) {
    return (vh)vcvt_f16_f32((float32x4_t)x);
}

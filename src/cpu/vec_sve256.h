/* SPDX-License-Identifier: Apache-2.0
 * What vector C cannot say, for SVE whose vectors have 256 bits. */
#include <arm_sve.h>

#define HAVE_VMAX
#include "vec.h"

typedef svfloat32_t sve_floats __attribute__((arm_sve_vector_bits(256)));

/* NaN when either is NaN, as with NEON. */
INLINE vf vmax(vf a, vf b) {
    const sve_floats largest = svmax_f32_x(svptrue_b32(), (sve_floats)a, (sve_floats)b);
    return (vf)largest;
}

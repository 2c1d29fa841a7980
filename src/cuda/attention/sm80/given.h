/* SPDX-License-Identifier: Apache-2.0
 * Which gradient of a bias the backward of five products writes itself. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_SM80_GIVEN_H
#define HEDDLE_CUDA_ATTENTION_SM80_GIVEN_H

#include "philox.h" /* HEDDLE_SHARED_INLINE */

#include "heddle.h"

/* One that is a sum over nothing, of scores that no softcap bends (it is dS then, as dq and dk have it), and begins as pieces of 16 bytes do. */
HEDDLE_SHARED_INLINE int sm80_gives_dbias(const heddle_attention *a, const void *dbias) {
    const heddle_strides s = a->dbias_stride;
    const int sums = !s.s || (!s.h && a->h > 1) || (!s.b && a->b > 1);
    return dbias && !sums && !(a->softcap > 0) && !(a->features & (HEDDLE_VARLEN | HEDDLE_SEQLENS)) &&
           (((size_t)dbias | (size_t)((s.b | s.h | s.s) * 2)) & 15) == 0;
}

#endif

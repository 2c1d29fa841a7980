/* SPDX-License-Identifier: Apache-2.0
 * Whether queries are finite, for backwards that look before they clean tiles. */
#ifndef HEDDLE_CUDA_ATTENTION_DIRTY_CUH
#define HEDDLE_CUDA_ATTENTION_DIRTY_CUH

#include "cuda/attention/prep.cuh"

/* Is Q or dO not finite somewhere in 64 rows of the tensor? */
template <typename T, int D>
INLINE bool is_dirty(const attention_params &p, const place &c, int64_t x, int row0, int count) {
    const T *const q = (const T *)p.t.q + row_at(p.a.q_stride, c.n, x, c.first_q + row0);
    const T *const dout = (const T *)p.t.dout + row_at(p.a.do_stride, c.n, x, c.first_q + row0);
    bool bad = false;
#pragma unroll
    for (int z = threadIdx.x; z < 64 * D / 8; z += 128) {
        const int row = z / (D / 8), column = z % (D / 8) * 8;
        if (row < count && column < (int)p.a.d)
            bad |= has_nonfinite(*(const uint4 *)(q + row * p.a.q_stride.s + column), T());
        if (row < count && column < (int)p.a.dv)
            bad |= has_nonfinite(*(const uint4 *)(dout + row * p.a.do_stride.s + column), T());
    }
    return __syncthreads_or(bad);
}

#endif

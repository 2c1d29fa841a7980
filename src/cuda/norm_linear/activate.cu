/* SPDX-License-Identifier: Apache-2.0
 * Activations as a pass of their own: y = act(u) + residual behind products that do not form it themselves, and du = dy∘act'(u) before backward;
 * and the same of two halves. */
#include "cuda/norm_linear/activation.cuh"
#include "cuda/norm_linear/contract.h"
#include "cuda/norm_linear/rows.cuh"

/* A thread has eight elements of a row at a time. */
template <typename T> INLINE void activate_kernel(const norm_activate &p) {
    const int64_t chunks = (p.cols + 7) / 8, step = (int64_t)gridDim.x * ACTIVATE_THREADS;
    for (int64_t at = (int64_t)blockIdx.x * ACTIVATE_THREADS + threadIdx.x; at < p.rows * chunks; at += step) {
        const int64_t row = at / chunks, col = at % chunks * 8;
        float v[8];
        load8((const T *)p.u + row * p.ldu, col, p.cols, p.vector, v);
        if (p.dy) {
            float dy[8];
            load8((const T *)p.dy + row * p.ldd, col, p.cols, p.vector, dy);
            activate<8, true>(p.activation, v);
#pragma unroll
            for (int x = 0; x < 8; x++)
                v[x] *= dy[x];
        } else {
            activate<8, false>(p.activation, v);
            if (p.residual) {
                float more[8];
                load8((const T *)p.residual + row * p.ldr, col, p.cols, p.vector, more);
#pragma unroll
                for (int x = 0; x < 8; x++)
                    v[x] += more[x];
            }
        }
        store8((T *)p.out + row * p.ldo, col, p.cols, p.vector, v);
    }
}

/* The same of eight elements of the gate and of those of up that they weigh. */
template <typename T> INLINE void gate_kernel(const norm_activate &p) {
    const int64_t chunks = (p.cols + 7) / 8, step = (int64_t)gridDim.x * ACTIVATE_THREADS;
    for (int64_t at = (int64_t)blockIdx.x * ACTIVATE_THREADS + threadIdx.x; at < p.rows * chunks; at += step) {
        const int64_t row = at / chunks, col = at % chunks * 8;
        const T *const u = (const T *)p.u + row * p.ldu;
        T *const out = (T *)p.out + row * p.ldo;
        float gate[8], up[8];
        load8(u, col, p.cols, p.vector, gate);
        load8(u + p.cols, col, p.cols, p.vector, up);
        if (p.dy) {
            float dy[8], slope[8];
            load8((const T *)p.dy + row * p.ldd, col, p.cols, p.vector, dy);
            activate8_both(p.activation, gate, slope);
#pragma unroll
            for (int x = 0; x < 8; x++) {
                slope[x] *= dy[x] * up[x];
                gate[x] *= dy[x];
            }
            store8(out, col, p.cols, p.vector, slope);
            store8(out + p.cols, col, p.cols, p.vector, gate);
            continue;
        }
        activate<8, false>(p.activation, gate);
        float more[8] = {0};
        if (p.residual)
            load8((const T *)p.residual + row * p.ldr, col, p.cols, p.vector, more);
#pragma unroll
        for (int x = 0; x < 8; x++) /* rounded as where the product is stored */
            gate[x] = fmaf(gate[x], up[x], more[x]);
        store8(out, col, p.cols, p.vector, gate);
    }
}

#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == ACTIVATE_THREADS, "as the kernel counts");                                                \
    ROW_KERNEL(pass, dtype, norm_activate, threads, 4)

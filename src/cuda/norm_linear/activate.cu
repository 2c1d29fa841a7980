/* SPDX-License-Identifier: Apache-2.0
 * Activations as a pass of their own: y = act(u) + residual behind products that do not form it themselves, and du = dy∘act'(u) before backward,
 * with the sums over its rows; and the same of two halves. */
#include "cuda/norm_linear/activation.cuh"
#include "cuda/norm_linear/contract.h"
#include "cuda/norm_linear/rows.cuh"

/* Eight elements of a row as they lie in memory. */
template <typename T> struct chunk { uint4 piece[sizeof(T) / 2]; };

/* Zeros past the end. */
template <typename T> INLINE void load_chunk(const T *row, int col, int cols, bool vector, chunk<T> *c) {
    if (vector && col + 8 <= cols) {
#pragma unroll
        for (int x = 0; x < (int)sizeof(T) / 2; x++)
            c->piece[x] = ((const uint4 *)(row + col))[x];
        return;
    }
    T *const h = (T *)c;
#pragma unroll
    for (int x = 0; x < 8; x++)
        h[x] = col + x < cols ? row[col + x] : from_float<T>(0);
}

template <typename T> INLINE void unpack(const chunk<T> &c, float v[8]) {
#pragma unroll
    for (int x = 0; x < 8; x++)
        v[x] = to_float(((const T *)&c)[x]);
}

/* A thread's columns, and which row of the block's it begins with. */
struct thread_place {
    int64_t row, end;
    int col, step;
};

/* What the gradient's sums are of: du, or the halves of it. */
template <bool GATED> struct activated_sums { float of[GATED ? 2 : 1][8]; };

/* Of one chunk: act(u) + more, or du, added to the sums. more: the residual, or dy. */
template <typename T>
INLINE void activate_chunk(const norm_activate &p, const thread_place &at, int64_t row, const chunk<T> *in,
                           activated_sums<false> *sums) {
    float v[8], more[8];
    unpack(in[0], v);
    unpack(in[1], more);
    if (p.dy) {
        activate<T, 8, true>(p.activation, v);
#pragma unroll
        for (int x = 0; x < 8; x++)
            sums->of[0][x] += v[x] *= more[x];
    } else {
        activate<T, 8, false>(p.activation, v);
#pragma unroll
        for (int x = 0; x < 8; x++)
            v[x] += more[x];
    }
    store8((T *)p.out + row * p.ldo, at.col, p.cols, p.vector, v);
}

/* The same of the gate, and of those of up that it weighs. */
template <typename T>
INLINE void activate_chunk(const norm_activate &p, const thread_place &at, int64_t row, const chunk<T> *in,
                           activated_sums<true> *sums) {
    T *const out = (T *)p.out + row * p.ldo, result[2][8];
#pragma unroll
    for (int first = 0; first < 8; first += 4) { /* all eight at a time have no room in registers */
        float gate[4], up[4], more[4], slope[4];
#pragma unroll
        for (int x = 0; x < 4; x++) {
            gate[x] = to_float(((const T *)&in[0])[first + x]);
            more[x] = to_float(((const T *)&in[1])[first + x]);
            up[x] = to_float(((const T *)&in[2])[first + x]);
        }
        activate_both<T, 4>(p.activation, gate, slope);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            float du[2] = {fmaf(gate[x], up[x], more[x]), 0}; /* rounded as where the product is stored */
            if (p.dy) {
                sums->of[0][first + x] += du[0] = slope[x] * (more[x] * up[x]);
                sums->of[1][first + x] += du[1] = gate[x] * more[x];
            }
            result[0][first + x] = from_float<T>(du[0]);
            result[1][first + x] = from_float<T>(du[1]);
        }
    }
    store8(out, at.col, p.cols, p.vector, (const T *)result[0]);
    if (p.dy)
        store8(out + p.cols, at.col, p.cols, p.vector, (const T *)result[1]);
}

/* Rows of one share: so many are on their way before the first is used. */
template <typename T, bool GATED>
INLINE void activate_share(const norm_activate &p, const thread_place &at, activated_sums<GATED> *sums) {
    constexpr int AHEAD = GATED || sizeof(T) == 4 ? 1 : 2;
    const T *const more = (const T *)(p.dy ? p.dy : p.residual);
    const int64_t ldm = p.dy ? p.ldd : p.ldr;
#pragma unroll 1
    for (int64_t row = at.row; row < at.end; row += AHEAD * at.step) {
        chunk<T> in[AHEAD][GATED ? 3 : 2] = {};
#pragma unroll
        for (int x = 0; x < AHEAD; x++) {
            const int64_t other = row + x * at.step;
            if (other >= at.end)
                continue;
            load_chunk((const T *)p.u + other * p.ldu, at.col, p.cols, p.vector, &in[x][0]);
            if (more)
                load_chunk(more + other * ldm, at.col, p.cols, p.vector, &in[x][1]);
            if constexpr (GATED)
                load_chunk((const T *)p.u + other * p.ldu + p.cols, at.col, p.cols, p.vector, &in[x][2]);
        }
#pragma unroll
        for (int x = 0; x < AHEAD; x++)
            if (row + x * at.step < at.end)
                activate_chunk<T>(p, at, row + x * at.step, in[x], sums);
    }
}

/* The sums of all threads that have the same columns, to part[share]. */
template <bool GATED>
INLINE void store_share(const norm_activate &p, int64_t share, int col0, const activated_sums<GATED> &sums) {
    __shared__ float all[GATED ? 2 : 1][ACTIVATE_THREADS][8 + 1]; /* one bank further a thread */
    const int lanes = 1 << p.lanes_log2, col = (int)threadIdx.x;
    float *const to = p.part + share * (GATED ? 2 : 1) * p.cols + col0 + col;
    __syncwarp();
    __syncthreads(); /* of the share before nobody reads any more */
#pragma unroll
    for (int half = 0; half < (GATED ? 2 : 1); half++)
#pragma unroll
        for (int x = 0; x < 8; x++)
            all[half][threadIdx.x][x] = sums.of[half][x];
    __syncwarp();
    __syncthreads();
    if (col >= lanes * 8 || col0 + col >= p.cols)
        return;
#pragma unroll 1
    for (int half = 0; half < (GATED ? 2 : 1); half++) {
        float sum = 0;
#pragma unroll 8
        for (int thread = col / 8; thread < ACTIVATE_THREADS; thread += lanes)
            sum += all[half][thread][col % 8];
        to[half * p.cols] = sum;
    }
}

/* A unit is as many columns as a row's lanes have, and one share of the rows. */
template <typename T, bool GATED> INLINE void activate_units(const norm_activate &p) {
    const int lanes_log2 = p.lanes_log2, width = 8 << lanes_log2;
    const uint32_t across = (uint32_t)((p.cols + width - 1) / width), units = across * (uint32_t)p.parts;
#pragma unroll 1
    for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int64_t share = unit / across, begin = p.rows * share / p.parts;
        const int col0 = (int)(unit % across) * width;
        activated_sums<GATED> sums = {};
        thread_place at;
        at.row = begin + (threadIdx.x >> lanes_log2);
        at.end = p.rows * (share + 1) / p.parts;
        at.step = ACTIVATE_THREADS >> lanes_log2;
        at.col = col0 + (int)(threadIdx.x & ((1u << lanes_log2) - 1)) * 8;
        if (at.col < p.cols)
            activate_share<T, GATED>(p, at, &sums);
        if (p.part)
            store_share<GATED>(p, share, col0, sums);
    }
}

template <typename T> INLINE void activate_kernel(const norm_activate &p) {
    activate_units<T, false>(p);
}

template <typename T> INLINE void gate_kernel(const norm_activate &p) {
    activate_units<T, true>(p);
}

#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == ACTIVATE_THREADS, "as the kernel counts");                                                \
    ROW_KERNEL(pass, dtype, norm_activate, threads, ACTIVATE_RESIDENT)

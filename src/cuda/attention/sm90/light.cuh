/* SPDX-License-Identifier: Apache-2.0
 * What goes before the backward for Hopper, and after it: the light part of prep; the sums of dQ -> dq. */
#ifndef HEDDLE_CUDA_ATTENTION_LIGHT_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_LIGHT_SM90_CUH

#include "cuda/attention/dirty.cuh"
#include "cuda/attention/sm90/bwd.cuh"

/* The same as attention_light; and is Q or dO not finite somewhere? Then a tile that a mask cuts has to be cleaned. What has seen a key and
 * has a finite log-sum-exp is finite, unless a sink or a softcap made it so: Q is read only where that does not tell. */
template <typename T, int D> INLINE void full_light(const attention_params &p) {
    const unsigned tiles = (unsigned)((p.a.sq + 63) / 64);
    const int64_t unit = blockIdx.x / tiles, x = unit % p.a.h;
    const int row0 = (int)(blockIdx.x % tiles) * 64;
    const place c = find_place(p, unit / p.a.h);
    const int count = (int)min64(64, (p.a.features & HEDDLE_VARLEN ? p.a.total_q - c.first_q : p.a.sq) - row0);
    bool open = attention_light<T, D, true>(p);
    open |= (p.a.features & HEDDLE_SINKS) || p.softcap > 0.0f || row0 + count > c.sq;
    const bool dirty = __syncthreads_or(open) && is_dirty<T, D>(p, c, x, row0, count);
    if (threadIdx.x == 0)
        p.dirty[blockIdx.x] = dirty;
}

/* A block has 64 queries. */
template <typename T, int D> INLINE void attention_gather(const attention_params &p) {
    const unsigned tiles = (unsigned)p.tiles_q, unit = blockIdx.x / tiles;
    const int x = (int)(unit % (unsigned)p.a.h), tile = (int)(blockIdx.x % tiles);
    const place c = find_place(p, unit / (unsigned)p.a.h);
    if (tile * 64 >= c.all_sq)
        return;
    const float *from = p.dq_sum + (sum_tile(p, c, x) + tile) * 64 * sm90_columns(D) + threadIdx.x * 4;
    float dq[D / 8][4];
#pragma unroll
    for (int y = 0; y < D / 8; y++)
        *(float4 *)dq[y] = *(const float4 *)(from + y * WARPGROUP * 4);
    store_tile<T, D>(p.adds, p.t.dq, row_at(p.a.dq_stride, c.n, x, c.first_q + tile * 64), p.a.dq_stride.s,
                     (int)threadIdx.x / 32 * 16, c.all_sq - tile * 64, (int)p.a.d, p.scale, dq);
}

#endif

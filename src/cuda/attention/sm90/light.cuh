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

/* A block has 64 queries, of which it takes 32 columns after the other: so there is room for many blocks, and what is there is on its way
 * for all of them at once. */
template <typename T, int D> INLINE void attention_gather(const attention_params &p) {
    const unsigned tiles = (unsigned)p.tiles_q, unit = blockIdx.x / tiles;
    const int x = (int)(unit % (unsigned)p.a.h), tile = (int)(blockIdx.x % tiles),
              warp_row = (int)threadIdx.x / 32 * 16;
    const place c = find_place(p, unit / (unsigned)p.a.h);
    const int rows = c.all_sq - tile * 64;
    if (rows <= 0)
        return;
    const float *from = p.dq_sum + (sum_tile(p, c, x) + tile) * 64 * sm90_columns(D) + threadIdx.x * 4;
    const int64_t to = row_at(p.a.dq_stride, c.n, x, c.first_q + tile * 64), stride = p.a.dq_stride.s;
    float *const there = (float *)p.t.dq + to + (warp_row + four_row()) * stride + four_column();
    const bool joins = p.adds && __all_sync(ALL_LANES, ((size_t)there | (size_t)(p.a.d * 4)) % 16 == 0);
#pragma unroll 1
    for (int column = 0; column < D; column += 32) {
        const int width = (int)p.a.d - column, end = warp_row + four_row() < rows ? width - four_column() : 0;
        float dq[4][4];
#pragma unroll
        for (int y = 0; y < 4; y++)
            *(float4 *)dq[y] = *(const float4 *)(from + (column / 8 + y) * WARPGROUP * 4);
        if (!joins) {
            end_tile<T, 32>(p.adds, p.t.dq, to + column, stride, warp_row, rows, width, p.scale, dq);
            continue;
        }
        float4 was[4];
#pragma unroll
        for (int y = 0; y < 4; y++)
            if (y * 8 < end)
                was[y] = *(const float4 *)(there + column + y * 8);
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const float4 x = take_four(dq[y], p.scale);
            if (y * 8 < end)
                *(float4 *)(there + column + y * 8) =
                    make_float4(was[y].x + x.x, was[y].y + x.y, was[y].z + x.z, was[y].w + x.w);
        }
    }
}

#endif

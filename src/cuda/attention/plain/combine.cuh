/* SPDX-License-Identifier: Apache-2.0
 * The parts of o and lse that blocks made of a share of the keys each, put together: a block for each row. */
#ifndef HEDDLE_CUDA_ATTENTION_COMBINE_CUH
#define HEDDLE_CUDA_ATTENTION_COMBINE_CUH

#include "cuda/attention/common.cuh"
#include "cuda/attention/plain/contract.h"

#define COMBINE_WARPS 4
#define COMBINE_AT_ONCE 8 /* parts whose loads a warp has under way */

/* Four columns of the parts first, first + COMBINE_WARPS, ... */
INLINE void load_parts(float4 *v, const float *part, int64_t step, int first, int shares, int left, bool vector) {
#pragma unroll
    for (int x = 0; x < COMBINE_AT_ONCE; x++) {
        const int s = first + x * COMBINE_WARPS;
        const float *from = part + s * step;
        v[x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (s < shares && left > 0) {
            if (vector) {
                v[x] = *(const float4 *)from;
            } else {
                v[x].x = from[0];
                v[x].y = left > 1 ? from[1] : 0.0f;
                v[x].z = left > 2 ? from[2] : 0.0f;
                v[x].w = left > 3 ? from[3] : 0.0f;
            }
        }
    }
}

/* The share of each part in the sum, and lse, -inf where nothing is seen. */
template <typename T>
INLINE float weigh_parts(const attention_params &p, int64_t row, bool counts, float sink, float *weight) {
    __shared__ float scratch[2][COMBINE_WARPS];
    const float c = p.rich ? LOG2E : p.scale_log2;
    float top = -CUDART_INF_F, sum = 0.0f;
    const int warp = threadIdx.x / 32;
    for (int s = threadIdx.x; s < p.key_shares; s += COMBINE_WARPS * 32) {
        weight[s] = counts ? p.part_sum[s * p.lse_rows + row] : 0.0f;
        top = fmaxf(top, weight[s] == 0.0f ? -CUDART_INF_F : p.part_max[s * p.lse_rows + row]);
    }
    for (int step = 16; step; step >>= 1)
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    scratch[0][warp] = top;
    __syncthreads();
    for (int x = 0; x < COMBINE_WARPS; x++)
        top = fmaxf(top, scratch[0][x]);
    for (int s = threadIdx.x; s < p.key_shares; s += COMBINE_WARPS * 32) {
        if (weight[s] != 0.0f)
            weight[s] *= exp2_approx((p.part_max[s * p.lse_rows + row] - top) * c);
        sum += weight[s];
    }
    sum = warp_sum(sum);
    scratch[1][warp] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int x = 0; x < COMBINE_WARPS; x++)
        sum += scratch[1][x];
    const float above = sink_above(sink, p.unit, top, 0.0f), shrink = add_sink(above, &sum), by = shrink / sum;
    for (int s = threadIdx.x; s < p.key_shares; s += COMBINE_WARPS * 32)
        weight[s] *= by;
    __syncthreads();
    return above > 0.0f ? add_log<T>(sink, sum) : sum == 0.0f ? -CUDART_INF_F : natural_lse<T>(p, top, c, p.unit, sum);
}

/* The warps take parts in turn, a lane four columns; their sums meet in shared memory. The loads of the first parts are under way
 * while the weights are made. */
template <typename T> INLINE void combine_row(const attention_params &p, int64_t n, int64_t x, int i) {
    __shared__ float weight[MAX_KEY_SHARES];
    __shared__ float4 sums[COMBINE_WARPS][32];
    const place c = find_place(p, n);
    if (i >= c.all_sq)
        return;
    const int64_t row = lse_at(p, c, x, i), step = p.lse_rows * p.a.dv;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = (int)p.a.dv;
    const bool counts = i < c.sq, vector = width % 4 == 0;
    const float sink = sink_of(p, x, counts);
    const int64_t to = row_at(p.a.o_stride, c.n, x, c.first_q + i);
    float lse = 0.0f;
    float4 v[COMBINE_AT_ONCE];
    for (int column = 4 * lane, first = 1; column - 4 * lane < width; column += 128, first = 0) {
        const float *part = p.part_o + row * width + column;
        float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        load_parts(v, part, step, warp, p.key_shares, width - column, vector);
        if (first)
            lse = weigh_parts<T>(p, row, counts, sink, weight);
        for (int s0 = warp; s0 < p.key_shares; s0 += COMBINE_WARPS * COMBINE_AT_ONCE) {
#pragma unroll
            for (int y = 0; y < COMBINE_AT_ONCE; y++) {
                const int s = s0 + y * COMBINE_WARPS;
                const float by = s < p.key_shares ? weight[s] : 0.0f;
                if (by != 0.0f && lse != -CUDART_INF_F) { /* a share without keys has written no o */
                    all.x = fmaf(by, v[y].x, all.x);
                    all.y = fmaf(by, v[y].y, all.y);
                    all.z = fmaf(by, v[y].z, all.z);
                    all.w = fmaf(by, v[y].w, all.w);
                }
            }
            load_parts(v, part, step, s0 + COMBINE_WARPS * COMBINE_AT_ONCE, p.key_shares, width - column, vector);
        }
        sums[warp][lane] = all;
        __syncthreads();
        /* column of the thread, among the 128 that are at hand */
        const int mine = column - 4 * lane + threadIdx.x;
        if (mine < width) {
            float o1 = 0.0f;
            for (int y = 0; y < COMBINE_WARPS; y++)
                o1 += ((const float *)sums[y])[threadIdx.x];
            store_number<T>(p, row, lse, to + mine, o1);
        }
        __syncthreads();
    }
    if (p.adds)
        join_before(p, row, &lse);
    if (p.t.lse && threadIdx.x == 0)
        ((float *)p.t.lse)[row] = lse;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The plain forward: o and lse, the combination of parts, the weights. */
#ifndef HEDDLE_CUDA_ATTENTION_PLAIN_FWD_CUH
#define HEDDLE_CUDA_ATTENTION_PLAIN_FWD_CUH

#include "cuda/attention/plain/combine.cuh"
#include "cuda/attention/plain/rows.cuh"

/* Keys whose values are summed by themselves: one chain over all of a row's would be wrong by as many roundings. */
enum { TOGETHER = 16 };

template <typename T> INLINE void plain_fwd(const attention_params &p) {
    __shared__ float q[MAX_DIM], weight[THREADS], scratch[4];
    const own_row w = find_own_row(p);
    const row_index &at = w.at;
    const place &c = w.c;
    if (at.i >= c.all_sq)
        return;
    float o[MAX_DIM / THREADS] = {0.0f}, top = -CUDART_INF_F, sum = 0.0f, slack;
    if (at.i < c.sq)
        load_floats(q, query_row<T>(p, c, at.x, at.i), (int)p.a.d);
    for (int j0 = first_key(c, at.i); j0 < last_key(c, at.i); j0 += THREADS) {
        const int j = j0 + threadIdx.x;
        __syncthreads();
        const float s = j < last_key(c, at.i) ? plain_score<T, true>(p, c, w.row, w.y, j, q, &slack) : -CUDART_INF_F;
        const float new_top = fmaxf(top, block_max(s, scratch)), base = new_top == -CUDART_INF_F ? 0.0f : new_top;
        const float shrink = exp2_approx((top - base) * LOG2E), e = exp2_approx((s - base) * LOG2E);
        sum = sum * shrink + block_sum(e, scratch);
        top = new_top;
        /* a negative weight stands for "not seen" */
        weight[threadIdx.x] = s == -CUDART_INF_F ? -1.0f
                              : p.drops          ? e * dropout_factor(p, w.dropout, c.n, at.x, at.i, j)
                                                 : e;
        __syncthreads();
#pragma unroll
        for (int z = 0; z < MAX_DIM / THREADS; z++) {
            const int e1 = z * THREADS + threadIdx.x;
            o[z] *= shrink;
            float part = 0.0f;
            for (int t = 0; e1 < p.a.dv && t < min(THREADS, last_key(c, at.i) - j0); t++) {
                if (!(weight[t] < 0.0f))
                    part = fmaf(weight[t], value_at<T>(p, c, w.y, j0 + t, e1), part);
                if (t % TOGETHER == TOGETHER - 1) {
                    o[z] += part;
                    part = 0.0f;
                }
            }
            o[z] += part;
        }
    }
    float shrink = 1.0f;
    if (p.a.features & HEDDLE_SINKS) {
        const float sink = sink_of(p, at.x, at.i < c.sq), above = sink_above(sink, 1.0f, top, 0.0f);
        shrink = add_sink(above, &sum);
        top = above > 0.0f ? sink : top;
    }
    float lse = sum == 0.0f ? -CUDART_INF_F : (float)((double)top + (double)log2f(sum) / (double)LOG2E);
    const int64_t lse_row = lse_at(p, c, at.x, at.i);
    const float v_scale = scale_of_keys(p, p.v_scale, c, w.y);
    for (int z = 0; z < MAX_DIM / THREADS; z++) {
        const int e = z * THREADS + threadIdx.x;
        if (e < p.a.dv)
            store_number<T>(p, lse_row, lse, row_at(p.a.o_stride, c.n, at.x, c.first_q + at.i) + e,
                            sum == 0.0f ? 0.0f : o[z] * (shrink / sum) * v_scale);
    }
    if (p.adds)
        join_before(p, lse_row, &lse);
    if (p.t.lse && threadIdx.x == 0)
        ((float *)p.t.lse)[lse_row] = lse;
}

/* HEDDLE_ACCUMULATE: lse of all goes to where that of what was there has been read. A thread a row. */
template <typename T> INLINE void plain_lse(const attention_params &p) {
    const int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (index >= p.a.b * p.a.h * p.a.sq)
        return;
    const row_index at = find_row(index, p.a.h, p.a.sq);
    const place c = find_place(p, at.n);
    if (at.i < c.all_sq)
        p.lse[lse_at(p, c, at.x, at.i)] = ((const float *)p.t.lse)[lse_at(p, c, at.x, at.i)];
}

template <typename T> INLINE void plain_combine(const attention_params &p) {
    const row_index at = find_row(blockIdx.x, p.a.h, p.a.sq);
    combine_row<T>(p, at.n, at.x, at.i);
}

/* P of one row; its rows outside the sequence are zeros. */
template <typename T> INLINE void plain_weights(const attention_params &p) {
    __shared__ float q[MAX_DIM], scratch[4];
    const own_row w = find_own_row(p);
    const row_index &at = w.at;
    const place &c = w.c;
    T *to = (T *)p.t.weights + row_at(p.a.weights_stride, c.n, at.x, at.i);
    const int begin = first_key(c, at.i), end = last_key(c, at.i);
    float top = -CUDART_INF_F, sum = 0.0f, slack;
    if (at.i < c.sq)
        load_floats(q, query_row<T>(p, c, at.x, at.i), (int)p.a.d);
    __syncthreads();
    for (int j = begin + threadIdx.x; j < end; j += THREADS) {
        const float s = plain_score<T, true>(p, c, w.row, w.y, j, q, &slack), new_top = fmaxf(top, s);
        if (s == -CUDART_INF_F)
            continue;
        sum = sum * (top == -CUDART_INF_F ? 0.0f : exp2_approx((top - new_top) * LOG2E)) +
              exp2_approx((s - new_top) * LOG2E);
        top = new_top;
    }
    float all_top = block_max(top, scratch);
    if ((p.a.features & HEDDLE_SINKS) && at.i < c.sq)
        all_top = fmaxf(all_top, ((const float *)p.t.sinks)[at.x]);
    sum = block_sum(top == -CUDART_INF_F ? sum : sum * exp2_approx((top - all_top) * LOG2E), scratch);
    if ((p.a.features & HEDDLE_SINKS) && at.i < c.sq && all_top != -CUDART_INF_F)
        sum += exp2_approx((((const float *)p.t.sinks)[at.x] - all_top) * LOG2E);
    for (int j = threadIdx.x; j < p.a.sk; j += THREADS) {
        float weight = 0.0f;
        if (j >= begin && j < end) {
            const float s = plain_score<T, true>(p, c, w.row, w.y, j, q, &slack);
            weight = s == -CUDART_INF_F ? 0.0f : exp2_approx((s - all_top) * LOG2E) / sum;
        }
        from_float(to + j, weight);
    }
}

#endif

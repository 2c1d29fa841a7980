/* SPDX-License-Identifier: Apache-2.0
 * The backward of the small family: one launch of blocks of keys and blocks of queries. */
#ifndef HEDDLE_CUDA_ATTENTION_SMALL_BWD_CUH
#define HEDDLE_CUDA_ATTENTION_SMALL_BWD_CUH

#include "cuda/attention/small/small.cuh"

/* The log-sum-exp of a row anew: the maximum is subtracted exactly, the rest is the logarithm of the sum, of the very scores
 * that its gradients come from. Taken where it agrees with the given lse to its rounding. By one warp; q in float32. */
template <typename T>
INLINE void refine_row(const attention_params &p, const place &c, int64_t x, int i, const float *q, float *numbers) {
    const float lse = ((const float *)p.t.lse)[lse_at(p, c, x, i)];
    if (!is_coarse<T>(c, lse))
        return;
    const matrix<T> k = matrix_k<T>(p, c, x / p.group);
    const int end = max(0, min(i + 1 + c.hi, c.sk));
    float top = -CUDART_INF_F, sum = 0.0f;
    for (int j = max(0, min(i + c.lo, c.sk)) + (int)threadIdx.x % 32; j < end; j += 32) {
        float qk = 0.0f, slack;
        for (int e = 0; e < p.a.d; e += 4)
            qk = dot_four(*(const float4 *)(q + e), to_floats(fetch_any(k, j, e)), qk);
        const float s = score<T>(p, c, x, i, j, qk, &slack), more = fmaxf(top, s);
        if (s == -CUDART_INF_F)
            continue;
        sum = sum * exp2_approx((top - more) * LOG2E) + exp2_approx((s - more) * LOG2E);
        top = more;
    }
    const float most = warp_max(top);
    if (most == -CUDART_INF_F)
        return;
    sum = warp_sum(sum * exp2_approx((top - most) * LOG2E));
    if (p.a.features & HEDDLE_SINKS)
        sum += exp2f((((const float *)p.t.sinks)[x] - most) * LOG2E);
    const float rest = log2f(sum) * LN2;
    if (threadIdx.x % 32 == 0 && is_same_lse(most + rest, lse)) {
        numbers[0] = most;
        numbers[STREAM] = rest;
    }
}

/* For the plain kernels that come after: dsinks has other units of huge scores where the problem is lean. */
INLINE void put_small_sum(const attention_params &p, float top, float log2, float *base, float *rest) {
    const bool other = !p.rich && fabsf(top) * LOG2E >= HUGE_BASE;
    put_log_sum(other ? top / p.unit : top, other ? p.scale_log2 : LOG2E, log2, base, rest);
}

/* Where a block stands, and the queries whose numbers it has: its own, or those that it walks over. */
struct position {
    int own, other; /* first rows */
    int64_t x;      /* query head */
};

/* P·Z and dT of half of the own rows with row `at` of the others. */
template <typename T, bool KEYS>
INLINE void gradients(const attention_params &p, const place &c, const position &w, const float *numbers,
                      const dropout_state &dropout, int at, int half, const float qk[HALF], const float dov[HALF],
                      bool few, float pz[HALF], float ds[HALF]) {
#pragma unroll
    for (int r = 0; r < HALF; r++) {
        const int mine = half * HALF + r, i = KEYS ? w.other + at : w.own + mine,
                  j = KEYS ? w.own + mine : w.other + at;
        const float *number = numbers + (KEYS ? at : mine);
        float slack;
        const float s = score<T>(p, c, w.x, i, j, qk[r], &slack);
        pz[r] = ds[r] = 0.0f;
        if (s == -CUDART_INF_F || number[0] == CUDART_INF_F)
            continue;
        const float weight = exp2_approx((s - number[0] - number[STREAM]) * LOG2E);
        const float z = p.drops ? dropout_factor(p, dropout, c.n, w.x, i, j) : 1.0f;
        pz[r] = weight * z;
        ds[r] = weight * ((z == 0.0f ? 0.0f : dov[r] * z) - ((few ? 0.0f : number[2 * STREAM]) - number[3 * STREAM])) *
                slack;
    }
}

template <typename T, int D>
INLINE void store_gradient(void *to, const heddle_strides &s, const place &c, int64_t head, int64_t first, int rows,
                           int64_t width, const float *merge, float factor) {
    if (to)
        for (int at = threadIdx.x; at < rows * D; at += THREADS)
            if (at % D < width)
                from_float((T *)to + row_at(s, c.n, head, first + at / D) + at % D, take_sum<D>(merge, at) * factor);
}

/* KEYS: dK and dV of ROWS keys, over the queries of all heads of the group. Else dQ of ROWS queries, over the keys; and
 * what is known of these queries goes to the workspace, for dbias and dsinks. numbers[4][STREAM] of the queries:
 * the log-sum-exp as the sum of two (+inf: it sees nothing), rowsum(dO∘O), dlse; where there are few keys the plain
 * prep has found D, and -D takes the place of dlse. */
template <typename T, int D, bool KEYS> INLINE void small_gradients(const attention_params &p, uint32_t id) {
    typedef small_shared<D> layout;
    extern __shared__ __align__(16) float shared[];
    float *stream = shared + layout::stream, *weights = shared + layout::weights, *numbers = shared + layout::numbers;
    const uint32_t tiles = (uint32_t)(KEYS ? p.tiles_k : p.tiles_q), heads = (uint32_t)(KEYS ? p.a.hk : p.a.h);
    const uint32_t unit = id / tiles, head = unit % heads;
    const place c = find_place(p, unit / heads);
    position w = {(int)(id - unit * tiles) * ROWS, 0, KEYS ? head * (uint32_t)p.group : head};
    if (w.own >= (KEYS ? c.all_sk : c.all_sq))
        return;
    const int at = threadIdx.x % STREAM, half = threadIdx.x / STREAM;
    const int last = min(w.own + ROWS, KEYS ? c.sk : c.sq), others = KEYS ? c.sq : c.sk;
    const int begin = max(0, min(w.own + (KEYS ? -c.hi : c.lo), others));
    const int end = w.own < last ? max(begin, min(last + (KEYS ? -c.lo : c.hi), others)) : begin;
    const uint32_t y = KEYS ? head : head / (uint32_t)p.group;
    const matrix<T> k = matrix_k<T>(p, c, y), v = matrix_v<T>(p, c, y);
    matrix<T> q = matrix_q<T>(p, c, w.x), dout = matrix_dout<T>(p, c, w.x), o = matrix_o<T>(p, c, w.x);
    const dropout_state dropout = make_dropout(p);
    const bool few = sees_few(c);
    const int mine = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4;
    const int own_row = mine < ROWS ? w.own + mine : KEYS ? c.sk : c.sq;
    const four<T> own_a = fetch_any(KEYS ? k : q, own_row, column), own_b = fetch_any(KEYS ? v : dout, own_row, column);
    const four<T> own_o = fetch_any(o, KEYS ? o.end : own_row, column);
    float a[ROWS][D / 32] = {}, b[ROWS][D / 32] = {};
    w.other = begin;
    for (bool fresh = true; w.x < (KEYS ? (int64_t)(head + 1) * p.group : head + 1); fresh = false) {
        /* A thread for each query whose numbers are to be found. */
        const int i = (KEYS ? w.other : w.own) + (int)threadIdx.x;
        const bool holds = threadIdx.x < (KEYS ? STREAM : ROWS) && (KEYS || fresh);
        float lse = -CUDART_INF_F, dlse = 0.0f;
        if (holds && i < c.sq) {
            lse = ((const float *)p.t.lse)[lse_at(p, c, w.x, i)];
            dlse = few        ? -p.dsum[lse_at(p, c, w.x, i)]
                   : p.t.dlse ? ((const float *)p.t.dlse)[lse_at(p, c, w.x, i)]
                              : 0.0f;
        }
        bool odd =
            load_stream<T, D, KEYS>(stream, KEYS ? q : k, KEYS ? dout : v, KEYS ? o : v, numbers + 2 * STREAM, w.other);
        if (fresh && mine < ROWS) {
            *(float4 *)(shared + mine * layout::pitch + column) = to_floats(own_a);
            *(float4 *)(shared + (ROWS + mine) * layout::pitch + column) = to_floats(own_b);
            if (!KEYS) {
                const float dot = row_dot<D>(to_floats(own_o), to_floats(own_b));
                if (column == 0)
                    numbers[2 * STREAM + mine] = dot;
            }
        }
        if (holds) {
            numbers[threadIdx.x] = lse == -CUDART_INF_F ? CUDART_INF_F : lse;
            numbers[STREAM + threadIdx.x] = 0.0f;
            numbers[3 * STREAM + threadIdx.x] = dlse;
        }
        const bool large = is_coarse<T>(c, lse);
        if (__syncthreads_or(odd || large)) {
            odd = __syncthreads_or(odd);
            for (int r = threadIdx.x / 32; r < (KEYS ? STREAM : ROWS) && (KEYS || fresh); r += WARPS) {
                const int row = (KEYS ? w.other : w.own) + r;
                if (row < c.sq)
                    refine_row<T>(p, c, w.x, row, (KEYS ? stream : shared) + r * layout::pitch, numbers + r);
            }
            __syncthreads();
        }
        float qk[HALF], dov[HALF], pz[HALF], ds[HALF];
        dots<D>(shared + half * HALF * layout::pitch, stream + at * layout::pitch, qk);
        dots<D>(shared + (ROWS + half * HALF) * layout::pitch, stream + (STREAM + at) * layout::pitch, dov);
        gradients<T, KEYS>(p, c, w, numbers, dropout, at, half, qk, dov, few, pz, ds);
        put_half(weights, at, ds);
        if (KEYS)
            put_half(weights + STREAM * ROWS, at, pz);
        __syncthreads();
        const int count = min(STREAM, end - w.other);
        accumulate<D>(a, weights, stream, count, odd, 0.0f);
        if (KEYS)
            accumulate<D>(b, weights + STREAM * ROWS, stream + STREAM * layout::pitch, count, odd, 0.0f);
        w.other += STREAM;
        if (w.other < end)
            continue;
        w.other = begin;
        w.x++;
        q.at += p.a.q_stride.h;
        if (p.t.dout) {
            dout.at += p.a.do_stride.h;
            o.at += p.a.o_stride.h;
        }
    }
    __syncthreads();
    float *merge = shared + layout::merge;
    put_sums<D>(merge, a);
    if (KEYS)
        put_sums<D>(merge + WARPS * ROWS * D, b);
    __syncthreads();
    const int rows = min(ROWS, (KEYS ? c.all_sk : c.all_sq) - w.own);
    if (KEYS) {
        store_gradient<T, D>(p.t.dk, p.a.dk_stride, c, head, c.first_k + w.own, rows, p.a.d, merge, p.scale);
        store_gradient<T, D>(p.t.dv, p.a.dv_stride, c, head, c.first_k + w.own, rows, p.a.dv, merge + WARPS * ROWS * D,
                             1.0f);
    } else {
        store_gradient<T, D>(p.t.dq, p.a.dq_stride, c, head, c.first_q + w.own, rows, p.a.d, merge, p.scale);
        const int i = w.own + (int)threadIdx.x;
        if (threadIdx.x < ROWS && i < c.sq && !few) {
            const int64_t to = lse_at(p, c, head, i);
            const float top = numbers[threadIdx.x];
            p.base[to] = top; /* +inf, or as the plain kernels take it */
            p.rest[to] = 0.0f;
            if (top != CUDART_INF_F)
                put_small_sum(p, top, numbers[STREAM + threadIdx.x] * LOG2E, &p.base[to], &p.rest[to]);
            p.dsum[to] =
                top == CUDART_INF_F ? 0.0f : numbers[2 * STREAM + threadIdx.x] - numbers[3 * STREAM + threadIdx.x];
        }
    }
}

template <typename T, int D> INLINE void small_bwd(const attention_params &p) {
    const uint32_t blocks_k = (uint32_t)(p.tiles_k * p.a.hk * p.a.b);
    if (blockIdx.x < blocks_k)
        small_gradients<T, D, true>(p, blockIdx.x);
    else
        small_gradients<T, D, false>(p, blockIdx.x - blocks_k);
}

#endif

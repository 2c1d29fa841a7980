/* SPDX-License-Identifier: Apache-2.0
 * The plain backward: D and the log-sum-exp, dQ, dK and dV, dbias, dsinks. */
#ifndef HEDDLE_CUDA_ATTENTION_PLAIN_BWD_CUH
#define HEDDLE_CUDA_ATTENTION_PLAIN_BWD_CUH

#include "cuda/attention/plain/rows.cuh"
#include "cuda/attention/whole_row.cuh"

/* The log-sum-exp anew, for scores so large that a float32 lse is too coarse for P = exp(S - lse): the maximum is
 * subtracted exactly, the rest is the logarithm of the sum. Taken where it agrees with the given lse to its
 * rounding. By one warp. */
template <typename T>
INLINE void refine_lse(const attention_params &p, const place &c, const row_index &at, const float *q, float lse,
                       float *base, float *rest) {
    const score_row row = make_score_row(p, c, at.x, at.i);
    const int64_t y = at.x / p.group;
    float mine = -CUDART_INF_F, sum = 0.0f, noise = 0.0f, slack;
    int largest = 0;
    for (int j = first_key(c, at.i) + threadIdx.x % 32; j < last_key(c, at.i); j += 32) {
        const float s = plain_score<T>(p, c, row, y, j, q, &slack);
        largest = s > mine ? j : largest;
        mine = fmaxf(mine, s);
    }
    const float top = warp_max(mine);
    if (top == -CUDART_INF_F)
        return;
    for (int j = first_key(c, at.i) + threadIdx.x % 32; j < last_key(c, at.i); j += 32)
        sum += exp2_approx((plain_score<T>(p, c, row, y, j, q, &slack) - top) * LOG2E);
    sum = warp_sum(sum);
    largest = (int)warp_max(mine == top ? (float)largest : -1.0f); /* one of them, or one near it */
    for (int e = threadIdx.x % 32; e < p.a.d && sizeof(T) == 4; e += 32)
        noise += fabsf(q[e] * to_float(key_row<T>(p, c, y, largest)[e]));
    noise = warp_sum(noise) * fabsf(p.scale) * 0x1p-22f;
    put_row_sum<T>(p, top, LOG2E, 1.0f, sum, sink_of(p, at.x, true), lse, noise, base, rest);
}

/* dP of element (i, j): Z·(dO·v) + dweights. */
template <typename T>
INLINE float weight_gradient(const attention_params &p, const place &c, const score_row &row,
                             const dropout_state &dropout, int64_t x, int j, float dov, float *z) {
    *z = p.drops ? dropout_factor(p, dropout, c.n, x, row.i, j) : 1.0f;
    float dp = *z == 0.0f ? 0.0f : dov * *z;
    if (p.t.dweights)
        dp += to_float(((const T *)p.t.dweights)[row.dweights + j]);
    return dp;
}

/* sum over j of P∘dweights of one row, by one warp: this lane's part. */
template <typename T>
INLINE float weight_sum(const attention_params &p, const place &c, const row_index &at, const float *q, float base,
                        float rest) {
    const score_row row = make_score_row(p, c, at.x, at.i);
    float sum = 0.0f, slack;
    for (int j = first_key(c, at.i) + threadIdx.x % 32; j < last_key(c, at.i); j += 32) {
        const float s = plain_score<T>(p, c, row, at.x / p.group, j, q, &slack);
        if (s != -CUDART_INF_F)
            sum = fmaf(weight_of<T>(s, LOG2E, base, rest), to_float(((const T *)p.t.dweights)[row.dweights + j]), sum);
    }
    return sum;
}

/* sum over j of P∘dP of one row, and of P, by one warp: this lane's part. */
template <typename T>
INLINE float gradient_sum(const attention_params &p, const place &c, const row_index &at, const float *q, float base,
                          float rest, float *weights) {
    const score_row row = make_score_row(p, c, at.x, at.i);
    const dropout_state dropout = make_dropout(p);
    const T *dout = dout_row<T>(p, c, at.x, at.i);
    float sum = 0.0f, slack, z;
    for (int j = first_key(c, at.i) + threadIdx.x % 32; j < last_key(c, at.i); j += 32) {
        const float s = plain_score<T>(p, c, row, at.x / p.group, j, q, &slack);
        if (s == -CUDART_INF_F)
            continue;
        const T *v = (const T *)p.t.v + row_at(p.a.v_stride, c.n, at.x / p.group, c.first_k + j);
        float dov = 0.0f;
        if constexpr (sizeof(T) == 4) /* the very products that D is taken from */
            dov = dot_row((const float *)dout, v, (int)p.a.dv);
        else
            for (int e = 0; e < p.a.dv; e++)
                dov = fmaf(to_float(dout[e]), to_float(v[e]), dov);
        const float weight = weight_of<T>(s, LOG2E, base, rest);
        sum = fmaf(weight, weight_gradient<T>(p, c, row, dropout, at.x, j, dov, &z), sum);
        *weights += weight;
    }
    return sum;
}

/* How many keys may have a weight in a row, by one warp. */
template <typename T> INLINE int count_keys(const attention_params &p, const place &c, const row_index &at) {
    int count = 0;
    for (int j = first_key(c, at.i) + threadIdx.x % 32; j < last_key(c, at.i); j += 32)
        count += is_shown<T>(p, c, at.x, at.i, j);
    return (int)warp_sum((float)count);
}

/* D, base and rest. A warp per row. */
template <typename T> INLINE void plain_prep(const attention_params &p) {
    __shared__ float rows[THREADS / 32][MAX_DIM];
    const int lane = threadIdx.x % 32;
    const int64_t index = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (index >= p.a.b * p.a.h * p.a.sq)
        return;
    const row_index at = find_row(index, p.a.h, p.a.sq);
    const place c = find_place(p, at.n);
    if (at.i >= c.sq)
        return;
    float *q = rows[threadIdx.x / 32], base = CUDART_INF_F, rest = 0.0f, sum = 0.0f;
    const int64_t to = lse_at(p, c, at.x, at.i);
    const float lse = ((const float *)p.t.lse)[to];
    if (lse != -CUDART_INF_F) {
        if (sizeof(T) == 4)
            split_lse32(p, lse, c.sk, &base, &rest);
        else
            split_lse(p, lse, &base, &rest);
        bool few = p.t.dout && (sees_few(p, c) || (sizeof(T) == 2 && p.t.dweights));
        bool large = is_coarse<T>(p, c, lse);
        if constexpr (sizeof(T) == 4)
            if (hides<T>(p) && p.t.dout && !few) {
                few = count_keys<T>(p, c, at) <= FEW_KEYS;
                large |= few && isfinite(lse);
            }
        if (large || few || p.t.dweights) {
            for (int e = lane; e < p.a.d; e += 32)
                q[e] = to_float(query_row<T>(p, c, at.x, at.i)[e]);
            __syncwarp();
        }
        if (large)
            refine_lse<T>(p, c, at, q, lse, &base, &rest);
        const int64_t o_row = row_at(p.a.o_stride, c.n, at.x, c.first_q + at.i);
        if (p.t.dout)
            for (int e = lane; e < p.a.dv; e += 32) {
                const float x = p.adds ? ((const float *)p.t.o)[o_row + e] : to_float(((const T *)p.t.o)[o_row + e]);
                if (x != 0.0f) /* a query that sees nothing may hold anything in dO */
                    sum = fmaf(x, to_float(dout_row<T>(p, c, at.x, at.i)[e]), sum);
            }
        if (few) {
            float weights = 0.0f;
            const float of_keys = gradient_sum<T>(p, c, at, q, base, rest, &weights);
            few = has_all_keys<T>(p, at.x, warp_sum(weights), lse);
            sum = few ? of_keys : sum;
        }
        if (!few && p.t.dweights)
            sum += weight_sum<T>(p, c, at, q, base, rest);
        sum = warp_sum(sum);
        if (p.t.dlse)
            sum -= ((const float *)p.t.dlse)[to];
    }
    if (lane == 0) {
        p.dsum[to] = sum;
        p.base[to] = base;
        p.rest[to] = rest;
    }
}

/* P·Z and dT of element (i, j), q and dout in float32; both 0 where it is not seen. True if it is. */
template <typename T>
INLINE bool gradient(const attention_params &p, const place &c, const score_row &row, const dropout_state &dropout,
                     int64_t x, int j, const float *q, const float *dout, bool uncapped, float *pz, float *ds) {
    const int64_t at = lse_at(p, c, x, row.i), y = x / p.group;
    float slack, z;
    *pz = *ds = 0.0f;
    const float s = plain_score<T>(p, c, row, y, j, q, &slack);
    if (s == -CUDART_INF_F || p.base[at] == CUDART_INF_F)
        return false;
    const float weight = weight_of<T>(s, LOG2E, p.base[at], p.rest[at]);
    const float dov = p.t.dout ? dot_row(dout, value_row<T>(p, c, y, j), (int)p.a.dv) : 0.0f;
    const float dp = weight_gradient<T>(p, c, row, dropout, x, j, dov, &z);
    *pz = weight * z;
    *ds = weight * (dp - p.dsum[at]) * (uncapped ? 1.0f : slack);
    return true;
}

template <typename T>
INLINE void load_query(const attention_params &p, const place &c, int64_t x, int i, float *q, float *dout) {
    load_floats(q, query_row<T>(p, c, x, i), (int)p.a.d);
    if (p.t.dout)
        load_floats(dout, dout_row<T>(p, c, x, i), (int)p.a.dv);
}

template <typename T> INLINE void plain_dq(const attention_params &p) {
    __shared__ float q[MAX_DIM], dout[MAX_DIM], ds[THREADS];
    const own_row w = find_own_row(p);
    const row_index &at = w.at;
    const place &c = w.c;
    if (at.i >= c.all_sq)
        return;
    const int end = last_key(c, at.i);
    float dq[MAX_DIM / THREADS] = {0.0f}, pz;
    if (at.i < c.sq)
        load_query<T>(p, c, at.x, at.i, q, dout);
    for (int j0 = first_key(c, at.i); j0 < end; j0 += THREADS) {
        const int j = j0 + threadIdx.x;
        float x = 0.0f;
        __syncthreads();
        if (j < end)
            gradient<T>(p, c, w.row, w.dropout, at.x, j, q, dout, false, &pz, &x);
        ds[threadIdx.x] = x;
        __syncthreads();
#pragma unroll
        for (int z = 0; z < MAX_DIM / THREADS; z++) {
            const int e = z * THREADS + threadIdx.x;
            float part = 0.0f;
            for (int t = 0; e < p.a.d && t < min(THREADS, end - j0); t++)
                if (ds[t] != 0.0f)
                    part = fmaf(ds[t], to_float(key_row<T>(p, c, w.y, j0 + t)[e]), part);
            dq[z] += part;
        }
    }
    for (int z = 0; z < MAX_DIM / THREADS; z++) {
        const int e = z * THREADS + threadIdx.x;
        if (e < p.a.d)
            add_number<T>(p.adds, p.t.dq, row_at(p.a.dq_stride, c.n, at.x, c.first_q + at.i) + e, dq[z] * p.scale);
    }
}

/* One key; a thread takes a query. */
template <typename T> INLINE void plain_dkdv(const attention_params &p) {
    __shared__ float k[MAX_DIM], v[MAX_DIM], pz[THREADS], ds[THREADS];
    const row_index at = find_row(blockIdx.x, p.a.hk, p.a.sk);
    const place c = find_place(p, at.n);
    const int j = at.i;
    if (j >= c.all_sk)
        return;
    const dropout_state dropout = make_dropout(p);
    float dk[MAX_DIM / THREADS] = {0.0f}, dv[MAX_DIM / THREADS] = {0.0f};
    int begin = 0, end = 0;
    if (j < c.sk) {
        begin = max(0, min(j - c.hi, c.sq));
        end = max(0, min(j + 1 - c.lo, c.sq));
        load_floats(k, key_row<T>(p, c, at.x, j), (int)p.a.d);
        load_floats(v, value_row<T>(p, c, at.x, j), (int)p.a.dv);
    }
    for (int64_t x = at.x * p.group; x < (at.x + 1) * p.group; x++)
        for (int i0 = begin; i0 < end; i0 += THREADS) {
            const int i = i0 + threadIdx.x;
            float a = 0.0f, b = 0.0f, slack, z;
            __syncthreads();
            if (i < end) {
                const score_row row = make_score_row(p, c, x, i);
                const int64_t number = lse_at(p, c, x, i);
                if (sees<T>(p, c, row, j) && p.base[number] != CUDART_INF_F) {
                    const float qk = dot_row(k, query_row<T>(p, c, x, i), (int)p.a.d);
                    const float s = full_score<T>(p, c, row, j, qk, &slack);
                    const float dov = p.t.dout ? dot_row(v, dout_row<T>(p, c, x, i), (int)p.a.dv) : 0.0f;
                    const float weight = weight_of<T>(s, LOG2E, p.base[number], p.rest[number]);
                    const float dp = weight_gradient<T>(p, c, row, dropout, x, j, dov, &z);
                    a = weight * z;
                    b = weight * (dp - p.dsum[number]) * slack;
                }
            }
            pz[threadIdx.x] = a;
            ds[threadIdx.x] = b;
            __syncthreads();
#pragma unroll
            for (int w = 0; w < MAX_DIM / THREADS; w++) {
                const int e = w * THREADS + threadIdx.x;
                float of_k = 0.0f, of_v = 0.0f; /* by themselves: all heads in one chain would lose as many roundings */
                for (int t = 0; t < min(THREADS, end - i0); t++) {
                    if (e < p.a.d && ds[t] != 0.0f)
                        of_k = fmaf(ds[t], to_float(query_row<T>(p, c, x, i0 + t)[e]), of_k);
                    if (e < p.a.dv && pz[t] != 0.0f && p.t.dout)
                        of_v = fmaf(pz[t], to_float(dout_row<T>(p, c, x, i0 + t)[e]), of_v);
                }
                dk[w] += of_k;
                dv[w] += of_v;
            }
        }
    for (int w = 0; w < MAX_DIM / THREADS; w++) {
        const int e = w * THREADS + threadIdx.x;
        if (p.t.dk && e < p.a.d)
            add_number<T>(p.adds, p.t.dk, row_at(p.a.dk_stride, c.n, at.x, c.first_k + j) + e, dk[w] * p.scale);
        if (p.t.dv && e < p.a.dv)
            add_number<T>(p.adds, p.t.dv, row_at(p.a.dv_stride, c.n, at.x, c.first_k + j) + e, dv[w]);
    }
}

/* A block of keys of one kept row of dbias: dS summed over what is not kept, in order. */
template <typename T> INLINE void plain_dbias(const attention_params &p) {
    __shared__ float q[MAX_DIM], dout[MAX_DIM];
    const heddle_strides &stride = p.a.dbias_stride;
    const int64_t key_blocks = plain_key_blocks(p.a.sk), rows = stride.s ? p.a.sq : 1, heads = stride.h ? p.a.h : 1;
    const int j = (int)(blockIdx.x % key_blocks) * THREADS + threadIdx.x;
    const row_index at = find_row(blockIdx.x / key_blocks, heads, rows);
    const dropout_state dropout = make_dropout(p);
    float sum = 0.0f, low = 0.0f, pz, ds;
    for (int64_t n = stride.b ? at.n : 0; n < (stride.b ? at.n + 1 : p.a.b); n++) {
        const place c = find_place(p, n);
        for (int64_t x = stride.h ? at.x : 0; x < (stride.h ? at.x + 1 : p.a.h); x++)
            for (int i = stride.s ? at.i : 0; i < min(stride.s ? at.i + 1 : (int)p.a.sq, c.sq); i++) {
                __syncthreads();
                load_query<T>(p, c, x, i, q, dout);
                __syncthreads();
                if (j < c.sk && gradient<T>(p, c, make_score_row(p, c, x, i), dropout, x, j, q, dout, true, &pz, &ds))
                    sum = add_low(sum, ds, low, &low);
            }
    }
    if (j < p.a.sk)
        from_float((T *)p.t.dbias + row_at(stride, at.n, at.x, at.i) + j, sum + low);
}

/* dsink of one head: -sum over its rows of exp(sink - lse)·D. In double: so many products are rounded but once, and of what is far from 0
 * float32 is too coarse. */
template <typename T> INLINE void plain_dsinks(const attention_params &p) {
    __shared__ double scratch[THREADS / 32];
    const int64_t x = blockIdx.x;
    const float sink = ((const float *)p.t.sinks)[x], c2 = p.rich ? LOG2E : p.scale_log2;
    const double factor = (double)p.lse_factor + (double)p.lse_factor_low, unit = 1.4426950408889634 / factor;
    double sum = 0;
    for (int64_t n = 0; n < p.a.b; n++) {
        const place c = find_place(p, n);
        for (int i = threadIdx.x; i < c.sq; i += THREADS) {
            const int64_t at = lse_at(p, c, x, i);
            const float base = p.base[at], rest = p.rest[at];
            if (base == CUDART_INF_F)
                continue;
            double weight;
            if (sizeof(T) == 4) {
                weight = exp2((sink * factor - (double)base * (double)p.base_log2) * unit) * (double)rest;
            } else {
                const bool huge = rest < 0.0f;
                const double above =
                    huge ? (double)(fmaf(-base, p.unit / power_of(c2), sink) * LOG2E) : (sink * factor - base) * unit;
                weight = exp2(above - fabsf(rest) * (huge ? 1.0 : unit));
            }
            sum -= weight * (double)p.dsum[at];
        }
    }
    for (int step = 16; step; step >>= 1)
        sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        ((float *)p.t.dsinks)[x] = (float)((scratch[0] + scratch[1]) + (scratch[2] + scratch[3]));
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Attention for problems too small to fill the device with tensor core tiles: multiplications of single numbers, blocks of
 * few rows, and as short a chain of latencies as can be. Every option but dweights; backward is one launch.
 *
 * A block owns ROWS rows (queries; in backward also keys) and walks over the rows of the other operand that they meet,
 * STREAM at a time, in shared memory and float32. Scores: a thread has one of these and half of the block's own. Sums: a
 * warp takes every eighth row, all own rows and all columns; at the end the warps' sums are added in order. */
#include "attention_common.cuh"

#define WARPS 8
#define THREADS (WARPS * 32)
#define ROWS 8
#define HALF (ROWS / 2)
#define STREAM (THREADS / 2)

template <int D> struct small_shared {
    static constexpr int pitch = D + 4; /* floats: 16 bytes of eight rows meet no bank conflict */
    static constexpr int stream = 2 * ROWS * pitch;
    static constexpr int weights = stream + 2 * STREAM * pitch; /* [2][STREAM][ROWS] */
    static constexpr int numbers = weights + 2 * STREAM * ROWS; /* [4][STREAM], or what the forward keeps of its rows */
    static constexpr int merge = stream;                        /* [2][WARPS][ROWS][D], when the rows are done with */
    static_assert(2 * WARPS * ROWS * D <= 2 * STREAM * pitch, "the sums fit where the rows were");
};

/* ------------------------------------------------------------------------------------------------------ loading */

/* The rows of one head of one sequence. */
template <typename T> struct matrix {
    const T *at;
    int64_t stride;
    int width, end; /* zeros from these on */
    bool vector;
};

template <typename T>
INLINE matrix<T> make_matrix(const attention_params &p, const void *at, const heddle_strides &s, const place &c,
                             int64_t head, int64_t first, int64_t width, int end, int vector) {
    matrix<T> m;
    m.at = (const T *)at + row_at(s, c.n, head, first);
    m.stride = s.s;
    m.width = (int)width;
    m.end = at ? end : 0;
    m.vector = p.vectors & vector;
    return m;
}

template <typename T> INLINE matrix<T> matrix_q(const attention_params &p, const place &c, int64_t x) {
    return make_matrix<T>(p, p.t.q, p.a.q_stride, c, x, c.first_q, p.a.d, c.sq, VECTOR_Q);
}
template <typename T> INLINE matrix<T> matrix_k(const attention_params &p, const place &c, int64_t y) {
    return make_matrix<T>(p, p.t.k, p.a.k_stride, c, y, c.first_k, p.a.d, c.sk, VECTOR_K);
}
template <typename T> INLINE matrix<T> matrix_v(const attention_params &p, const place &c, int64_t y) {
    return make_matrix<T>(p, p.t.v, p.a.v_stride, c, y, c.first_k, p.a.dv, c.sk, VECTOR_V);
}
template <typename T> INLINE matrix<T> matrix_dout(const attention_params &p, const place &c, int64_t x) {
    return make_matrix<T>(p, p.t.dout, p.a.do_stride, c, x, c.first_q, p.a.dv, c.sq, VECTOR_DO);
}
template <typename T> INLINE matrix<T> matrix_o(const attention_params &p, const place &c, int64_t x) {
    return make_matrix<T>(p, p.t.dout ? p.t.o : NULL, p.a.o_stride, c, x, c.first_q, p.a.dv, c.sq, VECTOR_O);
}

/* Four numbers as they lie in memory. */
template <typename T> struct __align__(4 * sizeof(T)) four {
    T x[4];
};

template <typename T> INLINE float4 to_floats(const four<T> &raw) {
    return make_float4(to_float(raw.x[0]), to_float(raw.x[1]), to_float(raw.x[2]), to_float(raw.x[3]));
}

/* Columns e .. e+3 of a row. Nothing is done with them here, so that many loads can be under way. */
template <typename T, bool VECTOR> INLINE four<T> fetch(const matrix<T> &m, int row, int e) {
    four<T> raw = {};
    const T *from = m.at + row * m.stride + e;
    if (VECTOR) {
        if (row < m.end && e < m.width)
            raw = *(const four<T> *)from;
    } else {
#pragma unroll
        for (int z = 0; z < 4; z++)
            if (row < m.end && e + z < m.width)
                raw.x[z] = from[z];
    }
    return raw;
}

template <typename T> INLINE four<T> fetch_any(const matrix<T> &m, int row, int e) {
    return m.vector ? fetch<T, true>(m, row, e) : fetch<T, false>(m, row, e);
}

/* 0, or NaN if one of the numbers is not finite. */
INLINE float probe(float4 x) {
    return (x.x * 0.0f + x.y * 0.0f) + (x.z * 0.0f + x.w * 0.0f);
}

/* The sum of dO∘O over a row, of which D/4 lanes have four numbers each. Zeros of O are left out: a query that sees
 * nothing may hold anything in dO. */
template <int D> INLINE float row_dot(float4 o, float4 dout) {
    float sum = o.x != 0.0f ? o.x * dout.x : 0.0f;
    sum = o.y != 0.0f ? fmaf(o.y, dout.y, sum) : sum;
    sum = o.z != 0.0f ? fmaf(o.z, dout.z, sum) : sum;
    sum = o.w != 0.0f ? fmaf(o.w, dout.w, sum) : sum;
#pragma unroll
    for (int step = D / 8; step; step >>= 1)
        sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
}

/* STREAM rows of two matrices to shared memory; with SUMS also what row_dot says of o and b, to dots. True if this
 * thread met a number that is not finite. The block waits after the first loads until the place is free. */
template <typename T, int D, bool SUMS, bool VECTOR>
INLINE bool load_rows(float *to, const matrix<T> &a, const matrix<T> &b, const matrix<T> &o, float *dots, int first) {
    constexpr int all = STREAM * D / 4 / THREADS, most = !VECTOR ? 4 : sizeof(T) == 2 && !SUMS ? 16 : 8;
    constexpr int batch = all < most ? all : most, step = THREADS / (D / 4), pitch = small_shared<D>::pitch;
    const int row0 = threadIdx.x / (D / 4), e = threadIdx.x % (D / 4) * 4;
    float bad = 0.0f;
#pragma unroll 1
    for (int z0 = 0; z0 < all; z0 += batch) {
        four<T> x[batch], y[batch], w[batch];
#pragma unroll
        for (int z = 0; z < batch; z++) {
            const int row = first + row0 + (z0 + z) * step;
            x[z] = fetch<T, VECTOR>(a, row, e);
            y[z] = fetch<T, VECTOR>(b, row, e);
            if (SUMS)
                w[z] = fetch<T, VECTOR>(o, row, e);
        }
        if (z0 == 0)
            __syncthreads();
#pragma unroll
        for (int z = 0; z < batch; z++) {
            const int row = row0 + (z0 + z) * step;
            const float4 xs = to_floats(x[z]), ys = to_floats(y[z]);
            *(float4 *)(to + row * pitch + e) = xs;
            *(float4 *)(to + (STREAM + row) * pitch + e) = ys;
            bad += probe(xs) + probe(ys);
            if (SUMS) {
                const float dot = row_dot<D>(to_floats(w[z]), ys);
                if (e == 0)
                    dots[row] = dot;
            }
        }
    }
    return bad != 0.0f;
}

template <typename T, int D, bool SUMS>
INLINE bool load_stream(float *to, const matrix<T> &a, const matrix<T> &b, const matrix<T> &o, float *dots, int first) {
    return a.vector && b.vector && o.vector ? load_rows<T, D, SUMS, true>(to, a, b, o, dots, first)
                                            : load_rows<T, D, SUMS, false>(to, a, b, o, dots, first);
}

/* ----------------------------------------------------------------------------------------------- scores and sums */

/* S; -inf where masked. */
template <typename T>
INLINE float score(const attention_params &p, const place &c, int64_t x, int i, int j, float qk, float *slack) {
    if (p.rich)
        return full_score<T>(p, c, make_score_row(p, c, x, i), j, qk, slack);
    *slack = 1.0f;
    return j < i + c.lo || j > i + c.hi || i >= c.sq || j >= c.sk ? -CUDART_INF_F : qk * p.scale;
}

INLINE float dot_four(float4 x, float4 y, float sum) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

/* One row against half of the block's own. Always in this order, so that all who form a score see the same one. */
template <int D> INLINE void dots(const float *own, const float *row, float sum[HALF]) {
#pragma unroll
    for (int r = 0; r < HALF; r++)
        sum[r] = 0.0f;
#pragma unroll 8
    for (int e = 0; e < D; e += 4) {
        const float4 y = *(const float4 *)(row + e);
#pragma unroll
        for (int r = 0; r < HALF; r++)
            sum[r] = dot_four(*(const float4 *)(own + r * small_shared<D>::pitch + e), y, sum[r]);
    }
}

/* sum += the rows times their weights; with ODD, rows of weight `unseen` are left out. */
template <int D, bool ODD>
INLINE void add_rows(float (*sum)[D / 32], const float *weights, const float *rows, int count, float unseen) {
#pragma unroll 4
    for (int s = threadIdx.x / 32; s < count; s += WARPS) {
        const float4 low = *(const float4 *)(weights + s * ROWS), high = *(const float4 *)(weights + s * ROWS + 4);
        const float w[ROWS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int z = 0; z < D / 32; z++) {
            const float y = rows[s * small_shared<D>::pitch + z * 32 + threadIdx.x % 32];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (!ODD || w[r] != unseen)
                    sum[r][z] = fmaf(w[r], y, sum[r][z]);
        }
    }
}

/* Where there are numbers that are not finite, 0 times them must not come in. */
template <int D>
INLINE void accumulate(float (*sum)[D / 32], const float *weights, const float *rows, int count, bool odd,
                       float unseen) {
    if (odd)
        add_rows<D, true>(sum, weights, rows, count, unseen);
    else
        add_rows<D, false>(sum, weights, rows, count, unseen);
}

/* This warp's sums to where the others find them. */
template <int D> INLINE void put_sums(float *to, float (*sum)[D / 32]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int z = 0; z < D / 32; z++)
            to[(threadIdx.x / 32 * ROWS + r) * D + z * 32 + threadIdx.x % 32] = sum[r][z];
}

/* Number x of [ROWS][D], over all warps. */
template <int D> INLINE float take_sum(const float *from, int x) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        sum += from[w * ROWS * D + x];
    return sum;
}

INLINE void put_half(float *to, int row, const float x[HALF]) {
    *(float4 *)(to + row * ROWS + threadIdx.x / STREAM * HALF) = {x[0], x[1], x[2], x[3]};
}

INLINE float warp_max(float x) {
    for (int step = 16; step; step >>= 1)
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

/* ------------------------------------------------------------------------------------------------------ forward */

/* The new maximum of every row from those of the four warps that share it, and what earlier sums shrink by. */
INLINE void grow_tops(const float *maxima, float top[ROWS], float shrink[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float4 m = *(const float4 *)(maxima + r * 4);
        const float more = fmaxf(fmaxf(top[r], fmaxf(m.x, m.y)), fmaxf(m.z, m.w));
        shrink[r] = exp2_approx(__fmul_rn(top[r], LOG2E) - (more == -CUDART_INF_F ? 0.0f : __fmul_rn(more, LOG2E)));
        top[r] = more;
    }
}

/* o and lse of the block's rows; numbers: the sums of the four warps that share a row, then the maxima. */
template <typename T, int D>
INLINE void store_rows(const attention_params &p, const place &c, int64_t x, int i0, const float *merge,
                       const float *numbers) {
    for (int at = threadIdx.x; at < ROWS * D; at += THREADS) {
        const int row = at / D, e = at % D, i = i0 + row;
        if (i >= c.all_sq)
            return;
        const float4 parts = *(const float4 *)(numbers + row * 4);
        float sum = i < c.sq ? (parts.x + parts.y) + (parts.z + parts.w) : 0.0f, shrink = 1.0f;
        float base = sum == 0.0f ? -CUDART_INF_F : __fmul_rn(numbers[ROWS * 4 + row], LOG2E);
        if ((p.a.features & HEDDLE_SINKS) && i < c.sq) {
            const float sink = ((const float *)p.t.sinks)[x] * LOG2E, top = fmaxf(base, sink);
            if (sink != -CUDART_INF_F) {
                shrink = base == -CUDART_INF_F ? 0.0f : exp2_approx(base - top);
                sum = sum * shrink + exp2_approx(sink - top);
                base = top;
            }
        }
        if (e < p.a.dv)
            from_float((T *)p.t.o + row_at(p.a.o_stride, c.n, x, c.first_q + i) + e,
                       sum == 0.0f ? 0.0f : take_sum<D>(merge, at) * (shrink / sum));
        if (e == 0 && p.t.lse)
            ((float *)p.t.lse)[lse_at(p, c, x, i)] = sum == 0.0f ? -CUDART_INF_F : (base + log2f(sum)) * LN2;
    }
}

template <typename T, int D> INLINE void small_fwd(const attention_params &p) {
    typedef small_shared<D> layout;
    extern __shared__ __align__(16) float shared[];
    float *stream = shared + layout::stream, *weights = shared + layout::weights, *numbers = shared + layout::numbers;
    const uint32_t unit = blockIdx.x / (uint32_t)p.tiles_q, x = unit % (uint32_t)p.a.h;
    const int i0 = (int)(blockIdx.x - unit * (uint32_t)p.tiles_q) * ROWS;
    const place c = find_place(p, unit / (uint32_t)p.a.h);
    if (i0 >= c.all_sq)
        return;
    const int at = threadIdx.x % STREAM, half = threadIdx.x / STREAM, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int i1 = min(i0 + ROWS, c.sq), begin = max(0, min(i0 + c.lo, c.sk));
    const int end = i0 < i1 ? max(begin, min(i1 + c.hi, c.sk)) : begin;
    const matrix<T> q = matrix_q<T>(p, c, x), k = matrix_k<T>(p, c, x / (uint32_t)p.group),
                    v = matrix_v<T>(p, c, x / (uint32_t)p.group);
    const dropout_state dropout = make_dropout(p);
    /* Own rows: four numbers a thread, on their way together with the first keys. */
    const int mine = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4;
    const four<T> own = fetch_any(q, mine < ROWS ? i0 + mine : q.end, column);
    float top[ROWS], shrink[ROWS], sum[HALF], o[ROWS][D / 32];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        top[r] = -CUDART_INF_F;
        sum[r % HALF] = 0.0f;
#pragma unroll
        for (int z = 0; z < D / 32; z++)
            o[r][z] = 0.0f;
    }
    for (int j0 = begin; j0 == begin || j0 < end; j0 += STREAM) { /* once, even for no keys */
        bool odd = load_stream<T, D, false>(stream, k, v, v, NULL, j0);
        if (j0 == begin && mine < ROWS)
            *(float4 *)(shared + mine * layout::pitch + column) = to_floats(own);
        odd = __syncthreads_or(odd);
        float s[HALF], e[HALF], slack;
        dots<D>(shared + half * HALF * layout::pitch, stream + at * layout::pitch, s);
#pragma unroll
        for (int r = 0; r < HALF; r++) {
            s[r] = score<T>(p, c, x, i0 + half * HALF + r, j0 + at, s[r], &slack);
            const float most = warp_max(s[r]);
            if (lane == 0)
                numbers[(half * HALF + r) * 4 + warp % 4] = most;
        }
        __syncthreads();
        grow_tops(numbers, top, shrink);
#pragma unroll
        for (int r = 0; r < HALF; r++) {
            const float most = half ? top[HALF + r] : top[r];
            e[r] = exp2_approx(fmaf(s[r], LOG2E, most == -CUDART_INF_F ? 0.0f : -(most * LOG2E)));
            sum[r] = sum[r] * (half ? shrink[HALF + r] : shrink[r]) + e[r];
            if (p.drops)
                e[r] *= dropout_factor(p, dropout, c.n, x, i0 + half * HALF + r, j0 + at);
            if (odd && s[r] == -CUDART_INF_F)
                e[r] = -1.0f;
        }
        put_half(weights, at, e);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int z = 0; z < D / 32; z++)
                o[r][z] *= shrink[r];
        __syncthreads();
        accumulate<D>(o, weights, stream + STREAM * layout::pitch, min(STREAM, end - j0), odd, -1.0f);
    }
    __syncthreads();
    put_sums<D>(shared + layout::merge, o);
#pragma unroll
    for (int r = 0; r < HALF; r++) {
        const float all = warp_sum(sum[r]);
        if (lane == 0)
            numbers[(half * HALF + r) * 4 + warp % 4] = all;
    }
    if (threadIdx.x == 0)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            numbers[ROWS * 4 + r] = top[r];
    __syncthreads();
    store_rows<T, D>(p, c, x, i0, shared + layout::merge, numbers);
}

/* ----------------------------------------------------------------------------------------------------- backward */

/* Is a float32 log-sum-exp too coarse for P = exp(S - lse)? */
template <typename T> INLINE bool is_large(float lse) {
    return fabsf(lse) > (sizeof(T) == 4 ? 12.0f : 1024.0f) && fabsf(lse) < CUDART_INF_F;
}

/* The log-sum-exp of a row anew: the maximum is subtracted exactly, the rest is the logarithm of the sum, of the very scores
 * that its gradients come from. Taken where it agrees with the given lse to its rounding. By one warp; q in float32. */
template <typename T>
INLINE void refine_row(const attention_params &p, const place &c, int64_t x, int i, const float *q, float *numbers) {
    const float lse = ((const float *)p.t.lse)[lse_at(p, c, x, i)];
    if (!is_large<T>(lse))
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
        /* Not fused, or the rounding of what is subtracted would come in twice. */
        const float base = __fmul_rn(more, LOG2E);
        sum = sum * exp2_approx(__fmul_rn(top, LOG2E) - base) + exp2_approx(fmaf(s, LOG2E, -base));
        top = more;
    }
    const float most = warp_max(top), base = __fmul_rn(most, LOG2E);
    if (most == -CUDART_INF_F)
        return;
    sum = warp_sum(sum * exp2_approx(__fmul_rn(top, LOG2E) - base));
    if (p.a.features & HEDDLE_SINKS)
        sum += exp2f(((const float *)p.t.sinks)[x] * LOG2E - base);
    const float rest = log2f(sum);
    if (threadIdx.x % 32 == 0 && fabsf((base + rest) * LN2 - lse) <= fabsf(lse) * 0x1p-20f) {
        numbers[0] = base;
        numbers[STREAM] = rest;
    }
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
        const float weight = exp2_approx(fmaf(s, LOG2E, -number[0]) - number[STREAM]);
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
 * the log-sum-exp in units of log2 as the sum of two (+inf: it sees nothing), rowsum(dO∘O), dlse; of 16-bit types with few
 * keys the plain prep has found D, and -D takes the place of dlse. */
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
    const bool few = sizeof(T) == 2 && c.sk <= FEW_KEYS;
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
            const float base = lse * LOG2E;
            numbers[threadIdx.x] = lse == -CUDART_INF_F ? CUDART_INF_F : base;
            numbers[STREAM + threadIdx.x] = isfinite(base) ? fmaf(lse, LOG2E, -base) : 0.0f;
            numbers[3 * STREAM + threadIdx.x] = dlse;
        }
        const bool large = is_large<T>(lse);
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
            const float base = numbers[threadIdx.x];
            p.base[to] = base;
            p.rest[to] = numbers[STREAM + threadIdx.x];
            p.dsum[to] =
                base == CUDART_INF_F ? 0.0f : numbers[2 * STREAM + threadIdx.x] - numbers[3 * STREAM + threadIdx.x];
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

/* That run on a multiprocessor at a time. */
#define blocks_fwd(dim) (dim <= 64 ? 2 : 1)
#define blocks_bwd(dim) 1
#define K(pass, dtype, dim, variant, family, warps, tiles, block)                                                      \
    static_assert(warps == WARPS && tiles == ROWS && block == STREAM, "the plan knows these numbers, too");            \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks_##pass(dim))                                          \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        small_##pass<dtype, dim>(p);                                                                                   \
    }
#define ATTENTION_SMALL_LIST
#include "attention.def"

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
    uint32_t kept = 0xffffffffu;
    if (p.drops && KEYS)
        kept = kept_keys(dropout_words(dropout.seed, dropout.offset, dropout_head(p, c.n, w.x),
                                       (uint32_t)(w.other + at), (uint32_t)w.own / DROPOUT_KEYS),
                         p.drop_threshold) >>
               half * HALF;
    else if (p.drops)
        kept = kept_rows(p, dropout, dropout_head(p, c.n, w.x), w.own + half * HALF, w.other + at / 32 * 32);
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
        const bool stays = kept >> r & 1u;
        pz[r] = stays ? weight * p.keep_scale : 0.0f;
        ds[r] = weight *
                ((stays ? dov[r] * p.keep_scale : 0.0f) - ((few ? 0.0f : number[2 * STREAM]) - number[3 * STREAM])) *
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

/* A block's own rows (keys: K and V; queries: Q and dO, with O), and those that it walks over (the others). */
template <typename T> struct small_work {
    place c;
    position w;
    uint32_t head; /* of keys or of queries */
    int own_rows, all_own, begin, end;
    matrix<T> own[2], own_o, other[2], other_o;
};

/* False: there are no such rows. */
template <typename T, bool KEYS> INLINE bool find_small_work(const attention_params &p, uint32_t id, small_work<T> *b) {
    const uint32_t tiles = (uint32_t)(KEYS ? p.tiles_k : p.tiles_q), heads = (uint32_t)(KEYS ? p.a.hk : p.a.h);
    const uint32_t unit = id / tiles;
    b->head = unit % heads;
    b->c = find_place(p, unit / heads);
    b->w = {(int)(id - unit * tiles) * ROWS, 0, KEYS ? b->head * (uint32_t)p.group : b->head};
    b->all_own = KEYS ? b->c.all_sk : b->c.all_sq;
    if (b->w.own >= b->all_own)
        return false;
    b->own_rows = KEYS ? b->c.sk : b->c.sq;
    const int last = min(b->w.own + ROWS, b->own_rows), others = KEYS ? b->c.sq : b->c.sk;
    b->begin = max(0, min(b->w.own + (KEYS ? -b->c.hi : b->c.lo), others)) / DROPOUT_KEYS * DROPOUT_KEYS;
    b->end = b->w.own < last ? max(b->begin, min(last + (KEYS ? -b->c.lo : b->c.hi), others)) : b->begin;
    const uint32_t y = KEYS ? b->head : b->head / (uint32_t)p.group;
    const matrix<T> k = matrix_k<T>(p, b->c, y), v = matrix_v<T>(p, b->c, y), q = matrix_q<T>(p, b->c, b->w.x),
                    dout = matrix_dout<T>(p, b->c, b->w.x), o = matrix_o<T>(p, b->c, b->w.x);
    b->own[0] = KEYS ? k : q;
    b->own[1] = KEYS ? v : dout;
    b->other[0] = KEYS ? q : k;
    b->other[1] = KEYS ? dout : v;
    b->own_o = o; /* of queries alone */
    b->other_o = KEYS ? o : v;
    b->w.other = b->begin;
    return true;
}

/* The next STREAM of the others; after the last of a head the first of the next. */
template <typename T, bool KEYS> INLINE void walk_on(const attention_params &p, small_work<T> *b) {
    b->w.other += STREAM;
    if (b->w.other < b->end)
        return;
    b->w.other = b->begin;
    b->w.x++;
    if (!KEYS) /* there is no other */
        return;
    b->other[0].at += p.a.q_stride.h;
    if (p.t.dout) {
        b->other[1].at += p.a.do_stride.h;
        b->other_o.at += p.a.o_stride.h;
    }
}

/* What is known of a query. */
struct query_numbers {
    float lse, dlse;
};

INLINE query_numbers read_numbers(const attention_params &p, const place &c, int64_t x, int i, bool few) {
    query_numbers r;
    r.lse = ((const float *)p.t.lse)[lse_at(p, c, x, i)];
    r.dlse = few ? -p.dsum[lse_at(p, c, x, i)] : p.t.dlse ? ((const float *)p.t.dlse)[lse_at(p, c, x, i)] : 0.0f;
    return r;
}

INLINE void put_numbers(float *numbers, query_numbers q) {
    numbers[threadIdx.x] = q.lse == -CUDART_INF_F ? CUDART_INF_F : q.lse;
    numbers[STREAM + threadIdx.x] = 0.0f;
    numbers[3 * STREAM + threadIdx.x] = q.dlse;
}

/* The block's queries leave what is known of them, for dbias and dsinks. */
INLINE void leave_numbers(const attention_params &p, const place &c, int64_t x, int i, const float *numbers) {
    const int64_t to = lse_at(p, c, x, i);
    const float top = numbers[threadIdx.x];
    p.base[to] = top; /* +inf, or as the plain kernels take it */
    p.rest[to] = 0.0f;
    if (top != CUDART_INF_F)
        put_small_sum(p, top, numbers[STREAM + threadIdx.x] * LOG2E, &p.base[to], &p.rest[to]);
    p.dsum[to] = top == CUDART_INF_F ? 0.0f : numbers[2 * STREAM + threadIdx.x] - numbers[3 * STREAM + threadIdx.x];
}

/* KEYS: dK and dV of ROWS keys, over the queries of all heads of the group. Else dQ of ROWS queries, over the keys; and
 * what is known of these queries goes to the workspace, for dbias and dsinks. numbers[4][STREAM] of the queries:
 * the log-sum-exp as the sum of two (+inf: it sees nothing), rowsum(dO∘O), dlse; where there are few keys the plain
 * prep has found D, and -D takes the place of dlse. */
template <typename T, int D, bool KEYS> INLINE void small_gradients(const attention_params &p, uint32_t id) {
    typedef small_shared<D> layout;
    constexpr int QUERIES = KEYS ? STREAM : ROWS; /* whose numbers are there */
    extern __shared__ __align__(16) float shared[];
    float *stream = shared + layout::stream, *weights = shared + layout::weights, *numbers = shared + layout::numbers;
    small_work<T> b;
    if (!find_small_work<T, KEYS>(p, id, &b))
        return;
    const int rows = min(ROWS, b.all_own - b.w.own), at = threadIdx.x % STREAM, half = threadIdx.x / STREAM;
    const dropout_state dropout = make_dropout(p);
    const bool few = sees_few(b.c);
    const int mine = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4;
    const int own_row = mine < ROWS ? b.w.own + mine : b.own_rows;
    const four<T> own_a = fetch_any(b.own[0], own_row, column), own_b = fetch_any(b.own[1], own_row, column);
    const four<T> own_o = fetch_any(b.own_o, KEYS ? b.own_o.end : own_row, column);
    float sum[ROWS][D / 32] = {}, other_sum[ROWS][D / 32] = {};
    for (bool fresh = true; b.w.x < (KEYS ? (int64_t)(b.head + 1) * p.group : b.head + 1); fresh = false) {
        const bool anew = KEYS || fresh; /* the queries are others than before */
        const int query0 = KEYS ? b.w.other : b.w.own, i = query0 + (int)threadIdx.x;
        const bool holds = threadIdx.x < QUERIES && anew;
        query_numbers q = {-CUDART_INF_F, 0.0f};
        if (holds && i < b.c.sq)
            q = read_numbers(p, b.c, b.w.x, i, few);
        bool odd = load_stream<T, D, KEYS>(stream, b.other[0], b.other[1], b.other_o, numbers + 2 * STREAM, b.w.other);
        if (fresh && mine < ROWS) {
            *(float4 *)(shared + mine * layout::pitch + column) = to_floats(own_a);
            *(float4 *)(shared + (ROWS + mine) * layout::pitch + column) = to_floats(own_b);
            if (!KEYS) {
                const float dot = row_dot<D>(to_floats(own_o), to_floats(own_b));
                if (column == 0)
                    numbers[2 * STREAM + mine] = dot;
            }
        }
        if (holds)
            put_numbers(numbers, q);
        const bool large = is_coarse<T>(b.c, q.lse);
        if (__syncthreads_or(odd || large)) {
            odd = __syncthreads_or(odd);
            for (int r = threadIdx.x / 32; r < QUERIES && anew; r += WARPS)
                if (query0 + r < b.c.sq)
                    refine_row<T>(p, b.c, b.w.x, query0 + r, (KEYS ? stream : shared) + r * layout::pitch, numbers + r);
            __syncthreads();
        }
        float qk[HALF], dov[HALF], pz[HALF], ds[HALF];
        dots<D>(shared + half * HALF * layout::pitch, stream + at * layout::pitch, qk);
        dots<D>(shared + (ROWS + half * HALF) * layout::pitch, stream + (STREAM + at) * layout::pitch, dov);
        gradients<T, KEYS>(p, b.c, b.w, numbers, dropout, at, half, qk, dov, few, pz, ds);
        put_half(weights, at, ds);
        if (KEYS)
            put_half(weights + STREAM * ROWS, at, pz);
        __syncthreads();
        const int count = min(STREAM, b.end - b.w.other);
        accumulate<D>(sum, weights, stream, count, odd, 0.0f);
        if (KEYS)
            accumulate<D>(other_sum, weights + STREAM * ROWS, stream + STREAM * layout::pitch, count, odd, 0.0f);
        walk_on<T, KEYS>(p, &b);
    }
    __syncthreads();
    float *merge = shared + layout::merge;
    put_sums<D>(merge, sum);
    if (KEYS)
        put_sums<D>(merge + WARPS * ROWS * D, other_sum);
    __syncthreads();
    if (KEYS) {
        const int64_t first = b.c.first_k + b.w.own;
        store_gradient<T, D>(p.t.dk, p.a.dk_stride, b.c, b.head, first, rows, p.a.d, merge, p.scale);
        store_gradient<T, D>(p.t.dv, p.a.dv_stride, b.c, b.head, first, rows, p.a.dv, merge + WARPS * ROWS * D, 1.0f);
        return;
    }
    store_gradient<T, D>(p.t.dq, p.a.dq_stride, b.c, b.head, b.c.first_q + b.w.own, rows, p.a.d, merge, p.scale);
    const int i = b.w.own + (int)threadIdx.x;
    if (threadIdx.x < ROWS && i < b.c.sq && !few)
        leave_numbers(p, b.c, b.head, i, numbers);
}

template <typename T, int D> INLINE void small_bwd(const attention_params &p) {
    const uint32_t blocks_k = (uint32_t)(p.tiles_k * p.a.hk * p.a.b);
    if (blockIdx.x < blocks_k)
        small_gradients<T, D, true>(p, blockIdx.x);
    else
        small_gradients<T, D, false>(p, blockIdx.x - blocks_k);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The backward of the small family: one launch of blocks of keys and blocks of queries. */
#ifndef HEDDLE_CUDA_ATTENTION_SMALL_BWD_CUH
#define HEDDLE_CUDA_ATTENTION_SMALL_BWD_CUH

#include "cuda/attention/settle.cuh"
#include "cuda/attention/small/small.cuh"

/* Has the plain prep been here, for rows that see few keys or, where gradients are added, some of all? */
template <typename T> INLINE bool has_prep(const attention_params &p, const place &c) {
    return p.adds || sees_few(p, c) || hides<T>(p);
}

/* The log-sum-exp of a row, as weigh() takes it, anew: the maximum is subtracted exactly, the rest is the logarithm of the sum, of the very scores
 * that its gradients come from. Taken where it agrees with the given lse to its rounding. By one warp; q in float32. */
template <typename T>
INLINE void refine_row(const attention_params &p, const place &c, int64_t x, int i, const float *q, float *numbers) {
    const float lse = ((const float *)p.t.lse)[lse_at(p, c, x, i)];
    if ((sizeof(T) == 4 && has_prep<T>(p, c)) || !is_coarse<T>(p, c, lse))
        return;
    const matrix<T> k = matrix_k<T>(p, c, x / p.group);
    const int end = max(0, min(i + 1 + c.hi, c.sk));
    float top = -CUDART_INF_F, sum = 0.0f;
    for (int j = max(0, min(i + c.lo, c.sk)) + (int)threadIdx.x % 32; j < end; j += 32) {
        float qk = 0.0f, slack;
        if constexpr (sizeof(T) == 4) {
            float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
            for (int e = 0; e < p.a.d; e += 4)
                four = add_four(*(const float4 *)(q + e), to_floats(fetch_any(k, j, e)), four);
            qk = join_four(four);
        } else {
            for (int e = 0; e < p.a.d; e += 4)
                qk = dot_four(*(const float4 *)(q + e), to_floats(fetch_any(k, j, e)), qk);
        }
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
    const float sink = sink_of(p, x, true);
    if constexpr (sizeof(T) == 4) {
        if (threadIdx.x % 32 == 0) /* nobody else reads them before all have come to a barrier */
            put_row_sum<T>(p, most, LOG2E, 1.0f, sum, sink, lse, 0.0f, numbers, numbers + STREAM);
    } else {
        sum += exp2f((sink - most) * LOG2E);
        const float rest = log2f(sum) * LN2;
        if (threadIdx.x % 32 == 0 && is_same_lse(most + rest, lse)) {
            numbers[0] = most;
            numbers[STREAM] = rest;
        }
    }
}

/* P from a row's numbers: the log-sum-exp as the sum of two, or in float32 base and rest of units of log2, as prep has them. */
template <typename T> INLINE float weigh(float s, const float *number) {
    if constexpr (sizeof(T) == 4)
        return weight_of<T>(s, LOG2E, number[0], number[STREAM]);
    else
        return exp2_approx((s - number[0] - number[STREAM]) * LOG2E);
}

/* K and V of a head, or Q, dO and O. */
template <typename T> struct operands { matrix<T> a, b, o; };

template <typename T> INLINE operands<T> key_operands(const attention_params &p, const place &c, int64_t y) {
    const matrix<T> v = matrix_v<T>(p, c, y);
    return {matrix_k<T>(p, c, y), v, v}; /* nobody asks for their O */
}
template <typename T> INLINE operands<T> query_operands(const attention_params &p, const place &c, int64_t x) {
    return {matrix_q<T>(p, c, x), matrix_dout<T>(p, c, x), matrix_o<T>(p, c, x)};
}

/* Where a block stands: the first of its own rows and of those that it walks over at the moment, and the query head. */
struct position {
    int own, other;
    int64_t x;
};

template <typename T> struct small_work {
    place c;
    position w;
    uint32_t head;         /* of the block's own rows */
    int own_rows, all_own; /* that count; that there are */
    int begin, end;        /* of the others: those that the block's own meet */
    int64_t last_x;        /* query head */
    operands<T> own, other;
};

/* A block's own rows among `heads` heads of `tiles` blocks each, and their sequence. */
template <typename T>
INLINE void find_own(const attention_params &p, uint32_t id, uint32_t tiles, uint32_t heads, small_work<T> *b) {
    const uint32_t unit = id / tiles;
    b->head = unit % heads;
    b->c = find_place(p, unit / heads);
    b->w.own = (int)(id - unit * tiles) * ROWS;
}

/* Own row r meets rows r+lo .. r+hi of `others`. */
template <typename T> INLINE void find_others(small_work<T> *b, int lo, int hi, int others) {
    const int last = min(b->w.own + ROWS, b->own_rows);
    b->begin = max(0, min(b->w.own + lo, others)) / DROPOUT_KEYS * DROPOUT_KEYS;
    b->end = b->w.own < last ? max(b->begin, min(last + hi, others)) : b->begin;
    b->w.other = b->begin;
}

/* A query, a key, and where the numbers of the query are. */
struct pair {
    int i, j, number;
};

template <typename T, int D>
INLINE void store_gradient(bool adds, void *to, const heddle_strides &s, const place &c, int64_t head, int64_t first,
                           int rows, int64_t width, const float *merge, float factor) {
    if (to)
        for (int at = threadIdx.x; at < rows * D; at += THREADS)
            if (at % D < width)
                add_number<T>(adds, to, row_at(s, c.n, head, first + at / D) + at % D, take_sum<D>(merge, at) * factor);
}

/* The block's queries leave what is known of them, for dbias and dsinks. */
template <typename T>
INLINE void leave_numbers(const attention_params &p, const place &c, int64_t x, int i, const float *numbers) {
    const int64_t to = lse_at(p, c, x, i);
    const float top = numbers[threadIdx.x];
    p.base[to] = top; /* +inf, or as the plain kernels take it */
    p.rest[to] = 0.0f;
    if constexpr (sizeof(T) == 4) {
        p.rest[to] = numbers[STREAM + threadIdx.x];
    } else if (top != CUDART_INF_F)
        put_log_sum(top, LOG2E, {0.0f, numbers[STREAM + threadIdx.x] * LOG2E}, &p.base[to], &p.rest[to]);
    p.dsum[to] = top == CUDART_INF_F ? 0.0f : numbers[2 * STREAM + threadIdx.x] - numbers[3 * STREAM + threadIdx.x];
}

/* ------------------------------------------------------------------------------- what keys and queries do otherwise */

/* dK and dV of ROWS keys, over the queries of all heads of the group. */
struct key_blocks {
    static constexpr bool walks_queries = true;
    static constexpr int queries = STREAM; /* whose numbers are there */
    static constexpr int gradients = 2;

    /* False: there are no such rows. */
    template <typename T> INLINE bool find(const attention_params &p, uint32_t id, small_work<T> *b) {
        find_own(p, id, (uint32_t)p.tiles_k, (uint32_t)p.a.hk, b);
        b->w.x = b->head * (uint32_t)p.group;
        b->last_x = b->w.x + p.group - 1;
        b->all_own = b->c.all_sk;
        if (b->w.own >= b->all_own)
            return false;
        b->own_rows = b->c.sk;
        find_others(b, -b->c.hi, -b->c.lo, b->c.sq);
        b->own = key_operands<T>(p, b->c, b->head);
        b->other = query_operands<T>(p, b->c, b->w.x);
        return true;
    }

    template <typename T> INLINE void next_head(const attention_params &p, small_work<T> *b) {
        b->other.a.at += p.a.q_stride.h;
        if (p.t.dout) {
            b->other.b.at += p.a.do_stride.h;
            b->other.o.at += p.a.o_stride.h;
        }
    }

    INLINE int first_query(const position &w) {
        return w.other;
    }
    INLINE const float *rows_of_q(const float *, const float *stream) {
        return stream;
    }
    INLINE pair pair_of(const position &w, int own, int other) {
        return {w.other + other, w.own + own, other};
    }

    /* Of half of the own rows and row `other`, with bit r for row r. */
    INLINE uint32_t kept(const attention_params &p, const place &c, const position &w, const dropout_state &s, int half,
                         int other) {
        return kept_keys(dropout_words(s.seed, s.offset, dropout_head(p, c.n, w.x),
                                       p.drop_row + (uint32_t)(w.other + other),
                                       p.drop_eight + (uint32_t)w.own / DROPOUT_KEYS),
                         p.drop_threshold) >>
               half * HALF;
    }

    /* rowsum(dO∘O) comes with the rows that stream. */
    template <typename T, int D> INLINE void put_dots(float *, int, int, const four<T> &, const four<T> &) {
    }

    INLINE void settle(const attention_params &, int64_t, float *, float *) {
    }

    template <typename T, int D>
    INLINE void store(const attention_params &p, const small_work<T> &b, bool adds, int rows, const float *merge,
                      const float *) {
        const int64_t first = b.c.first_k + b.w.own;
        store_gradient<T, D>(adds, p.t.dk, p.a.dk_stride, b.c, b.head, first, rows, p.a.d, merge, p.scale);
        store_gradient<T, D>(adds, p.t.dv, p.a.dv_stride, b.c, b.head, first, rows, p.a.dv, merge + WARPS * ROWS * D,
                             1.0f);
    }

    /* Others leave what is known of queries. */
    template <typename T> INLINE void end(const attention_params &, const small_work<T> &, const float *, bool) {
    }
};

/* dQ of ROWS queries, over the keys; and what is known of these queries goes to the workspace, for dbias and dsinks. */
struct query_blocks {
    static constexpr bool walks_queries = false;
    static constexpr int queries = ROWS;
    static constexpr int gradients = 1;

    template <typename T> INLINE bool find(const attention_params &p, uint32_t id, small_work<T> *b) {
        find_own(p, id, (uint32_t)p.tiles_q, (uint32_t)p.a.h, b);
        b->w.x = b->last_x = b->head;
        b->all_own = b->c.all_sq;
        if (b->w.own >= b->all_own)
            return false;
        b->own_rows = b->c.sq;
        find_others(b, b->c.lo, b->c.hi, b->c.sk);
        b->own = query_operands<T>(p, b->c, b->head);
        b->other = key_operands<T>(p, b->c, b->head / (uint32_t)p.group);
        return true;
    }

    /* There is none. */
    template <typename T> INLINE void next_head(const attention_params &, small_work<T> *) {
    }

    INLINE int first_query(const position &w) {
        return w.own;
    }
    INLINE const float *rows_of_q(const float *own, const float *) {
        return own;
    }
    INLINE pair pair_of(const position &w, int own, int other) {
        return {w.own + own, w.other + other, own};
    }

    INLINE uint32_t kept(const attention_params &p, const place &c, const position &w, const dropout_state &s, int half,
                         int other) {
        return kept_rows(p, s, dropout_head(p, c.n, w.x), w.own + half * HALF, w.other + other / 32 * 32);
    }

    template <typename T, int D>
    INLINE void put_dots(float *dots, int row, int column, const four<T> &dout, const four<T> &o) {
        const float dot = row_dot<D>(to_floats(o), to_floats(dout));
        if (column == 0)
            dots[row] = dot;
    }

    /* of_p: of each row sums of its P by WARPS/2 warps -> the first: what the row of dQ is multiplied with. */
    INLINE void settle(const attention_params &p, int64_t x, float *numbers, float *of_p) {
        if (threadIdx.x >= ROWS)
            return;
        float *of_row = of_p + threadIdx.x / HALF * (WARPS / 2 * HALF) + threadIdx.x % HALF, sum = 0.0f;
        for (int w = 0; w < WARPS / 2; w++)
            sum += of_row[w * HALF];
        *of_row = settle_row(p, x, sum, numbers[threadIdx.x], &numbers[STREAM + threadIdx.x]);
    }

    /* of_p: at the end, in float32, as settle has left it. */
    template <typename T, int D>
    INLINE void store(const attention_params &p, const small_work<T> &b, bool adds, int rows, const float *merge,
                      const float *of_p) {
        const int64_t first = b.c.first_q + b.w.own;
        if (sizeof(T) == 4 && of_p)
            for (int at = threadIdx.x; p.t.dq && at < rows * D; at += THREADS) {
                const float *of_row = of_p + at / D / HALF * (WARPS / 2 * HALF) + at / D % HALF;
                float *to = (float *)p.t.dq + row_at(p.a.dq_stride, b.c.n, b.head, first + at / D) + at % D;
                if (at % D < p.a.d)
                    *to = fmaf(take_sum<D>(merge, at), p.scale, adds ? *to : 0.0f) * *of_row;
            }
        else
            store_gradient<T, D>(adds, p.t.dq, p.a.dq_stride, b.c, b.head, first, rows, p.a.d, merge, p.scale);
    }

    template <typename T>
    INLINE void end(const attention_params &p, const small_work<T> &b, const float *numbers, bool few) {
        const int i = b.w.own + (int)threadIdx.x;
        if (threadIdx.x < ROWS && i < b.c.sq && !few)
            leave_numbers<T>(p, b.c, b.head, i, numbers);
    }
};

/* -------------------------------------------------------------------------------------------------------- the walk */

/* The next STREAM of the others; after the last of a head the first of the next. */
template <typename T, typename blocks> INLINE void walk_on(const attention_params &p, small_work<T> *b) {
    b->w.other += STREAM;
    if (b->w.other < b->end)
        return;
    b->w.other = b->begin;
    b->w.x++;
    blocks::next_head(p, b);
}

/* What is known of a query. */
struct query_numbers {
    float lse, rest, dlse; /* lse and rest as weigh() takes them */
    bool large;            /* float32: lse is to be found anew */
};

template <typename T>
INLINE query_numbers read_numbers(const attention_params &p, const place &c, int64_t x, int i, bool few) {
    query_numbers r;
    r.lse = ((const float *)p.t.lse)[lse_at(p, c, x, i)];
    if constexpr (sizeof(T) == 4) {
        r.rest = 0.0f;
        r.large = !few && is_coarse<T>(p, c, r.lse);
        if (few && r.lse != -CUDART_INF_F) {
            r.lse = p.base[lse_at(p, c, x, i)];
            r.rest = p.rest[lse_at(p, c, x, i)];
        } else if (r.lse != -CUDART_INF_F) {
            split_lse32(p, r.lse, c.sk, &r.lse, &r.rest);
        }
    }
    r.dlse = few ? -p.dsum[lse_at(p, c, x, i)] : p.t.dlse ? ((const float *)p.t.dlse)[lse_at(p, c, x, i)] : 0.0f;
    return r;
}

template <typename T> INLINE void put_numbers(float *numbers, query_numbers q) {
    numbers[threadIdx.x] = q.lse == -CUDART_INF_F ? CUDART_INF_F : q.lse;
    numbers[STREAM + threadIdx.x] = sizeof(T) == 4 ? q.rest : 0.0f;
    numbers[3 * STREAM + threadIdx.x] = q.dlse;
}

/* dT and P·Z of half of the own rows with row `at` of the others: what the rows of Q (K) and of dO that stream count with. P joins of_p, in
 * float32, where queries are the block's own. */
template <typename T, typename blocks>
INLINE void gradients(const attention_params &p, const place &c, const position &w, const float *numbers,
                      const dropout_state &dropout, int at, int half, const float qk[HALF], const float dov[HALF],
                      bool few, float weights[2][HALF], float of_p[HALF]) {
    const uint32_t kept = p.drops ? blocks::kept(p, c, w, dropout, half, at) : 0xffffffffu;
#pragma unroll
    for (int r = 0; r < HALF; r++) {
        const pair e = blocks::pair_of(w, half * HALF + r, at);
        const float *number = numbers + e.number;
        float slack;
        const float s = score<T>(p, c, w.x, e.i, e.j, qk[r], &slack);
        weights[0][r] = weights[1][r] = 0.0f;
        if (s == -CUDART_INF_F || number[0] == CUDART_INF_F)
            continue;
        const float weight = weigh<T>(s, number);
        const bool stays = kept >> r & 1u;
        if (sizeof(T) == 4 && !blocks::walks_queries)
            of_p[r] += weight;
        weights[1][r] = stays ? weight * p.keep_scale : 0.0f;
        weights[0][r] =
            weight *
            ((stays ? dov[r] * p.keep_scale : 0.0f) - ((few ? 0.0f : number[2 * STREAM]) - number[3 * STREAM])) * slack;
    }
}

/* In float32 so many steps are summed up at a time, 16 rows of each by a warp: one chain over thousands of rows loses more than it may. */
#define SUM_STEPS 8

template <int D> INLINE void clear_sums(float (*sum)[D / 32]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int z = 0; z < D / 32; z++)
            sum[r][z] = 0.0f;
}

/* numbers[4][STREAM] of the queries: the log-sum-exp as weigh() takes it (+inf: it sees nothing), rowsum(dO∘O), dlse; where there are few
 * keys the plain prep has found D (in float32 the log-sum-exp, too), and -D takes the place of dlse. */
template <typename T, int D, typename blocks> INLINE void small_gradients(const attention_params &p, uint32_t id) {
    typedef small_shared<D> layout;
    constexpr int QUERIES = blocks::queries, GRADIENTS = blocks::gradients;
    extern __shared__ __align__(16) float shared[];
    float *stream = shared + layout::stream, *weights = shared + layout::weights, *numbers = shared + layout::numbers;
    small_work<T> b;
    if (!blocks::find(p, id, &b))
        return;
    const int rows = min(ROWS, b.all_own - b.w.own), at = threadIdx.x % STREAM, half = threadIdx.x / STREAM;
    const dropout_state dropout = make_dropout(p);
    const bool few = has_prep<T>(p, b.c);
    const int mine = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4;
    const int own_row = mine < ROWS ? b.w.own + mine : b.own_rows;
    const four<T> own_a = fetch_any(b.own.a, own_row, column), own_b = fetch_any(b.own.b, own_row, column);
    const four<T> own_o = fetch_any(b.own.o, own_row, column);
    float sum[GRADIENTS][ROWS][D / 32] = {}, of_p[HALF] = {};
    int step = 0;
    for (bool fresh = true; b.w.x <= b.last_x; fresh = false) {
        const bool anew = blocks::walks_queries || fresh; /* the queries are others than before */
        const int query0 = blocks::first_query(b.w), i = query0 + (int)threadIdx.x;
        const bool holds = threadIdx.x < QUERIES && anew;
        query_numbers q = {-CUDART_INF_F, 0.0f, 0.0f, false};
        if (holds && i < b.c.sq)
            q = read_numbers<T>(p, b.c, b.w.x, i, few);
        bool odd = load_stream<T, D, blocks::walks_queries>(stream, b.other.a, b.other.b, b.other.o,
                                                            numbers + 2 * STREAM, b.w.other);
        if (fresh && mine < ROWS) {
            *(float4 *)(shared + mine * layout::pitch + column) = to_floats(own_a);
            *(float4 *)(shared + (ROWS + mine) * layout::pitch + column) = to_floats(own_b);
            blocks::template put_dots<T, D>(numbers + 2 * STREAM, mine, column, own_b, own_o);
        }
        if (holds)
            put_numbers<T>(numbers, q);
        const bool large = sizeof(T) == 4 ? q.large : is_coarse<T>(p, b.c, q.lse);
        if (__syncthreads_or(odd || large)) {
            odd = __syncthreads_or(odd);
            const float *rows_of_q = blocks::rows_of_q(shared, stream);
            for (int r = threadIdx.x / 32; r < QUERIES && anew; r += WARPS)
                if (query0 + r < b.c.sq)
                    refine_row<T>(p, b.c, b.w.x, query0 + r, rows_of_q + r * layout::pitch, numbers + r);
            __syncthreads();
        }
        float qk[HALF], dov[HALF], weight[2][HALF];
        row_products<T, D>::run(shared + half * HALF * layout::pitch, stream + at * layout::pitch, qk);
        row_products<T, D>::run(shared + (ROWS + half * HALF) * layout::pitch, stream + (STREAM + at) * layout::pitch,
                                dov);
        gradients<T, blocks>(p, b.c, b.w, numbers, dropout, at, half, qk, dov, few, weight, of_p);
#pragma unroll
        for (int g = 0; g < GRADIENTS; g++)
            put_half(weights + g * STREAM * ROWS, at, weight[g]);
        __syncthreads();
#pragma unroll
        for (int g = 0; g < GRADIENTS; g++)
            accumulate<D>(sum[g], weights + g * STREAM * ROWS, stream + g * STREAM * layout::pitch,
                          min(STREAM, b.end - b.w.other), odd, 0.0f);
        walk_on<T, blocks>(p, &b);
        step++;
        if (b.w.x <= b.last_x && (sizeof(T) == 2 || step % SUM_STEPS))
            continue;
        __syncthreads();
        float *merge = shared + layout::merge;
#pragma unroll
        for (int g = 0; g < GRADIENTS; g++) {
            put_sums<D>(merge + g * WARPS * ROWS * D, sum[g]);
            clear_sums<D>(sum[g]);
        }
        float *const sums_p =
            sizeof(T) == 4 && !blocks::walks_queries && b.w.x > b.last_x ? weights + STREAM * ROWS : NULL;
        if (sizeof(T) == 4 && !blocks::walks_queries && sums_p)
#pragma unroll
            for (int r = 0; r < HALF; r++)
                sums_p[threadIdx.x / 32 * HALF + r] = warp_sum(of_p[r]);
        __syncthreads();
        if (sizeof(T) == 4 && !blocks::walks_queries && sums_p) {
            blocks::settle(p, b.head, numbers, sums_p);
            __syncthreads();
        }
        blocks::template store<T, D>(p, b, p.adds || (sizeof(T) == 4 && step > SUM_STEPS), rows, merge, sums_p);
        if (sizeof(T) == 4) /* what is read here lies where the next steps write */
            __syncthreads();
    }
    blocks::template end<T>(p, b, numbers, few);
}

template <typename T, int D> INLINE void small_bwd(const attention_params &p) {
    const uint32_t blocks_k = (uint32_t)(p.tiles_k * p.a.hk * p.a.b);
    if (blockIdx.x < blocks_k)
        small_gradients<T, D, key_blocks>(p, blockIdx.x);
    else
        small_gradients<T, D, query_blocks>(p, blockIdx.x - blocks_k);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The attention weights by the tensor cores of Ampere and later. A block owns queries of one head and walks over their keys twice: for the
 * maximum and the sum of each row, then for P, which it writes. What is not finite meets its own query and its own key alone. */
#include "cuda/attention/product.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/store.cuh"

template <typename T, int D, int WARPS, int BLOCK> struct weights_shared {
    static constexpr int rows = WARPS / share<T, D>::count * 16;
    static constexpr int keys = rows * tile<T, D>::pitch, joins = keys + BLOCK * tile<T, D>::pitch;
    static constexpr int bytes = joins + share<T, D>::bytes(WARPS, 1, BLOCK);
    static_assert(bytes == sm80_weights_bytes(sizeof(T), D, rows, BLOCK), "as the plan counts");
};

/* Eights of columns whose bias is asked for together. */
#define EIGHTS 2

/* S of a warp's 16 queries from i0 on of head x and the keys at j0, which are fetched; -inf where one is hidden. */
template <typename T, int D, int WARPS, int BLOCK>
INLINE void make_tile(const attention_params &p, const place &c, int64_t x, int i0, int j0, uint32_t shared,
                      float (*s)[BLOCK / 8][4]) {
    typedef weights_shared<T, D, WARPS, BLOCK> layout;
    constexpr int THREADS = WARPS * 32;
    const int lane = threadIdx.x % 32, i = i0 + lane / 4, j = j0 + lane % 4 * 2;
    const T *k = (const T *)p.t.k + row_at(p.a.k_stride, c.n, x / p.group, c.first_k);
    __syncthreads();
    load_tile<T, D, BLOCK, THREADS>(shared + layout::keys, k, p.a.k_stride.s, j0, 0, c.sk, (int)p.a.d,
                                    p.vectors & VECTOR_K);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    product_rows<T, D, 1, BLOCK>(s, shared + share<T, D>::group() * 16 * tile<T, D>::pitch, shared + layout::keys,
                                 p.tf32, whole_steps<T, D>(p, c), shared + layout::joins);
    lane_options<T> o[2];
    find_options<T, false>(p, c, x, i, j, o);
    uint32_t seen = find_seen<BLOCK>(c, i, i + 8, j);
    float slack[EIGHTS][4];
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y += EIGHTS)
        make_scores<T, false, EIGHTS>(p, o, front_factor(p), false, y, &seen, s[0] + y, slack);
    hide_scores<BLOCK / 8>(seen, s[0]);
}

/* Of a row so far, by one lane: its maximum, and its sum over exp(S - maximum). */
struct row_sums {
    float top, sum;
};

template <int BLOCK> INLINE void add_scores(row_sums *r, int half, const float (*s)[4]) {
    float top = r->top, sum = 0.0f;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
        top = fmaxf(top, fmaxf(s[y][2 * half], s[y][2 * half + 1]));
    if (top == -CUDART_INF_F)
        return;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
        sum += exp2_approx((s[y][2 * half] - top) * LOG2E) + exp2_approx((s[y][2 * half + 1] - top) * LOG2E);
    r->sum = r->sum * exp2_approx((r->top - top) * LOG2E) + sum;
    r->top = top;
}

/* Of all lanes of the row, and its sink. */
INLINE row_sums join_sums(row_sums r, float sink) {
    const float top = fmaxf(quad_max(r.top), sink), base = top == -CUDART_INF_F ? 0.0f : top;
    const float sum = quad_sum(r.sum * exp2_approx((r.top - base) * LOG2E));
    return {base, sum + exp2_approx((sink - base) * LOG2E)};
}

template <typename T, int D, int WARPS, int BLOCK> INLINE void attention_weights(const attention_params &p) {
    typedef weights_shared<T, D, WARPS, BLOCK> layout;
    constexpr int ROWS = layout::rows;
    extern __shared__ __align__(16) char shared[];
    const uint32_t at = shared_address(shared);
    const unsigned tiles = (unsigned)((p.a.sq + ROWS - 1) / ROWS);
    const int64_t unit = blockIdx.x / tiles, x = unit % p.a.h;
    const place c = find_place(p, unit / p.a.h);
    const int query0 = (int)(blockIdx.x % tiles) * ROWS, lane = threadIdx.x % 32;
    const int i0 = query0 + share<T, D>::group() * 16, query1 = min(query0 + ROWS, c.sq);
    int begin = 0, end = 0;
    if (query0 < query1) {
        begin = max(0, min(query0 + c.lo, c.sk)) / BLOCK * BLOCK;
        end = max(0, min(query1 + c.hi, c.sk));
    }
    row_sums sums[2] = {{-CUDART_INF_F, 0.0f}, {-CUDART_INF_F, 0.0f}};
    float s[1][BLOCK / 8][4];
    load_tile<T, D, ROWS, WARPS * 32>(at, (const T *)p.t.q + row_at(p.a.q_stride, c.n, x, c.first_q), p.a.q_stride.s,
                                      query0, 0, c.sq, (int)p.a.d, p.vectors & VECTOR_Q);
#pragma unroll 1
    for (int j0 = begin; j0 < end; j0 += BLOCK) {
        make_tile<T, D, WARPS, BLOCK>(p, c, x, i0, j0, at, s);
        for (int half = 0; half < 2; half++)
            add_scores<BLOCK>(&sums[half], half, s[0]);
    }
    for (int half = 0; half < 2; half++)
        sums[half] = join_sums(sums[half], sink_of(p, x, i0 + half * 8 + lane / 4 < c.sq));
#pragma unroll 1
    for (int j0 = 0; j0 < p.a.sk; j0 += BLOCK) {
        const bool seen = j0 >= begin && j0 < end;
        if (seen)
            make_tile<T, D, WARPS, BLOCK>(p, c, x, i0, j0, at, s);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = i0 + half * 8 + lane / 4;
#pragma unroll
            for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++)
                    s[0][y][e] = seen && s[0][y][e] != -CUDART_INF_F
                                     ? exp2_approx((s[0][y][e] - sums[half].top) * LOG2E) / sums[half].sum
                                     : 0.0f;
            T *const to = (T *)p.t.weights + row_at(p.a.weights_stride, c.n, x, i) + j0;
            if (i < p.a.sq && !share<T, D>::part())
                store_row<T, BLOCK>(to, s[0], half, (int)p.a.sk - j0, 1.0f);
        }
    }
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ attention_params p) {    \
        wait_for_earlier_grid();                                                                                       \
        static_assert(sm80_tiles(sizeof(dtype), dim, warps, own) == 1, "a warp has 16 rows");                          \
        attention_weights<dtype, dim, warps, block>(p);                                                                \
    }

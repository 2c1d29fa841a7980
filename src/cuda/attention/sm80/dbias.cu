/* SPDX-License-Identifier: Apache-2.0
 * The gradient of a bias by the tensor cores of Ampere and later: dS, summed over what the bias is repeated along.
 *
 * A block owns queries and BLOCK keys of a head of a batch, or of all that share their bias, and makes S = Q·Kᵀ and dP = dO·Vᵀ for one
 * after the other, a warp its 16 queries. The sums stay in registers: no atomics, the same bits every time, no workspace. There is one
 * buffer for each tensor: several blocks on a multiprocessor wait in turn. Nobody looks for what is not finite, since in these two products
 * it meets its own query and its own key alone. */
#include "cuda/attention/dbias.cuh"
#include "cuda/attention/prep.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/store.cuh"

/* In float32 so many steps are summed up by themselves. */
#define SUM_STEPS 32

template <typename T, int D, int WARPS, int BLOCK> struct dbias_shared {
    static constexpr int rows = WARPS / share<T, D>::count * 16;
    static constexpr int douts = rows * tile<T, D>::pitch, keys = 2 * douts;
    static constexpr int values = keys + BLOCK * tile<T, D>::pitch, joins = values + BLOCK * tile<T, D>::pitch;
    static constexpr int join_bytes = share<T, D>::bytes(WARPS, 1, BLOCK);
    static constexpr int bytes = joins + 2 * join_bytes;
    static_assert(bytes == sm80_dbias_bytes(sizeof(T), D, rows, BLOCK), "as the plan counts");
    static_assert(WARPS * BLOCK * 4 <= joins, "the warps' sums lie there in the end");
};

/* What a step takes; K and V where they are others than the step's before. */
template <typename T, int D, int WARPS, int BLOCK>
INLINE void load_step(const attention_params &p, const dbias_work &w, bool with_keys, uint32_t shared) {
    typedef dbias_shared<T, D, WARPS, BLOCK> layout;
    constexpr int THREADS = WARPS * 32, ROWS = layout::rows;
    const place &c = w.c;
    const int64_t y = w.x / p.group;
    const T *q = (const T *)p.t.q + row_at(p.a.q_stride, c.n, w.x, c.first_q);
    const T *dout = p.t.dout ? (const T *)p.t.dout + row_at(p.a.do_stride, c.n, w.x, c.first_q) : q;
    load_tile<T, D, ROWS, THREADS>(shared, q, p.a.q_stride.s, w.row0, 0, c.sq, (int)p.a.d, p.vectors & VECTOR_Q);
    load_tile<T, D, ROWS, THREADS>(shared + layout::douts, dout, p.a.do_stride.s, w.row0, 0, p.t.dout ? c.sq : 0,
                                   (int)p.a.dv, p.vectors & VECTOR_DO);
    if (with_keys) {
        const T *k = (const T *)p.t.k + row_at(p.a.k_stride, c.n, y, c.first_k);
        const T *v = (const T *)p.t.v + row_at(p.a.v_stride, c.n, y, c.first_k);
        load_tile<T, D, BLOCK, THREADS>(shared + layout::keys, k, p.a.k_stride.s, w.key0, 0, c.sk, (int)p.a.d,
                                        p.vectors & VECTOR_K);
        load_tile<T, D, BLOCK, THREADS>(shared + layout::values, v, p.a.v_stride.s, w.key0, 0, c.sk, (int)p.a.dv,
                                        p.vectors & VECTOR_V);
    }
    cp_async_commit();
}

/* Do all of these queries see all of these keys, by the band? */
template <int ROWS, int BLOCK> INLINE bool is_whole(const dbias_work &w) {
    return w.row0 + ROWS <= w.c.sq && w.key0 + BLOCK <= w.c.sk && w.key0 >= w.row0 + ROWS - 1 + w.c.lo &&
           w.key0 + BLOCK - 1 <= w.row0 + w.c.hi;
}

/* Eights of columns whose bias is asked for together. */
#define EIGHTS 2

/* sum += dS, before a softcap, of a warp's rows. */
template <typename T, int D, int WARPS, int BLOCK>
INLINE void add_step(const attention_params &p, const dbias_work &w, const dropout_state &dropout, uint32_t shared,
                     float (*sum)[4]) {
    typedef dbias_shared<T, D, WARPS, BLOCK> layout;
    const place &c = w.c;
    const int warp_row = share<T, D>::group() * 16, row0 = w.row0 + warp_row, lane = threadIdx.x % 32;
    const uint32_t own = shared + warp_row * tile<T, D>::pitch, joins = shared + layout::joins;
    float s[1][BLOCK / 8][4], dp[1][BLOCK / 8][4], base[2], rest[2], dsum[2];
    product_rows<T, D, 1, BLOCK>(s, own, shared + layout::keys, p.tf32, whole_steps<T, D>(p, c), joins);
    product_rows<T, D, 1, BLOCK>(dp, own + layout::douts, shared + layout::values, p.tf32, whole_steps<T, D>(p, c),
                                 joins + layout::join_bytes);
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8 + lane / 4;
        const int64_t at = i < c.sq ? lse_at(p, c, w.x, i) : 0;
        base[half] = i < c.sq ? p.base[at] : CUDART_INF_F;
        rest[half] = i < c.sq ? p.rest[at] : 0.0f;
        dsum[half] = i < c.sq ? p.dsum[at] : 0.0f;
    }
    const int i0 = row0 + lane / 4, j0 = w.key0 + lane % 4 * 2;
    lane_options<T> o[2];
    find_options<T, false>(p, c, w.x, i0, j0, o);
    const bool whole = is_whole<layout::rows, BLOCK>(w);
    uint32_t seen = whole ? ALL_LANES : find_seen<BLOCK>(c, i0, i0 + 8, j0);
    float slack[EIGHTS][4];
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y += EIGHTS)
        make_scores<T, false, EIGHTS>(p, o, front_factor(p), whole, y, &seen, s[0] + y, slack);
    if (p.drops)
        drop_elements(find_kept<false, BLOCK>(p, dropout, dropout_head(p, c.n, w.x), row0 + duty_row(), w.key0),
                      p.keep_scale, dp[0]);
    if (p.t.dweights) {
        hide_scores<BLOCK / 8>(seen, s[0]);
        add_dweights<T, BLOCK>(p, c, w.x, row0, w.key0, s[0], dp[0]);
    }
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float weight = weight_of<T>(s[0][y][e], LOG2E, base[e / 2], rest[e / 2]);
            const bool there = seen >> (4 * y + e) & 1 && base[e / 2] != CUDART_INF_F;
            sum[y][e] += there ? weight * (dp[0][y][e] - dsum[e / 2]) : 0.0f;
        }
}

/* Each element, or sums over all queries. */
template <typename T, int D, int WARPS, int BLOCK>
INLINE void store_dbias(const attention_params &p, const dbias_work &first, float *sums, float (*sum)[4]) {
    const int lane = threadIdx.x % 32, row0 = first.first_row + share<T, D>::group() * 16 + lane / 4;
    T *const to = (T *)p.t.dbias + row_at(p.a.dbias_stride, first.first_n, first.first_x, 0) + first.key0;
    const int keys = (int)p.a.sk - first.key0;
    if (p.a.dbias_stride.s) {
        for (int half = 0; half < 2 && !share<T, D>::part(); half++)
            if (row0 + half * 8 < p.a.sq)
                store_row<T, BLOCK>(to + (row0 + half * 8) * p.a.dbias_stride.s, sum, half, keys, 1.0f);
        return;
    }
    __syncthreads();
    fold_rows<BLOCK>(sums + threadIdx.x / 32 * BLOCK, sum);
    __syncthreads();
    const int key = threadIdx.x;
    float x = 0.0f;
    for (int z = 0; z < WARPS && key < BLOCK; z += share<T, D>::count)
        x += sums[z * BLOCK + key];
    if (key < min(BLOCK, keys))
        from_float(to + key, x);
}

template <typename T, int D, int WARPS, int BLOCK> INLINE void attention_dbias(const attention_params &p) {
    typedef dbias_shared<T, D, WARPS, BLOCK> layout;
    constexpr bool APART = sizeof(T) == 4;
    extern __shared__ __align__(16) char shared[];
    const uint32_t at = shared_address(shared);
    const dbias_work first = find_sums<layout::rows, BLOCK>(p, blockIdx.x);
    const dropout_state dropout = make_dropout(p);
    dbias_work w = first;
    float sum[BLOCK / 8][4] = {}, total[APART ? BLOCK / 8 : 1][4] = {};
    int n = -1, step = 0;
    int64_t y = -1;
    for (bool more = seek<layout::rows, BLOCK>(p, &w, false); more; more = seek<layout::rows, BLOCK>(p, &w, true)) {
        const int64_t y_now = w.x / p.group;
        load_step<T, D, WARPS, BLOCK>(p, w, n != w.n || y != y_now, at);
        n = w.n;
        y = y_now;
        cp_async_wait<0>();
        __syncthreads();
        add_step<T, D, WARPS, BLOCK>(p, w, dropout, at, sum);
        __syncthreads(); /* the tiles are free */
        if (APART && ++step % SUM_STEPS == 0) {
            add<1, BLOCK / 8>((float(*)[BLOCK / 8][4]) total, (const float(*)[BLOCK / 8][4]) sum);
            clear<1, BLOCK / 8>((float(*)[BLOCK / 8][4]) sum);
        }
    }
    if (APART)
        add<1, BLOCK / 8>((float(*)[BLOCK / 8][4]) sum, (const float(*)[BLOCK / 8][4]) total);
    store_dbias<T, D, WARPS, BLOCK>(p, first, (float *)shared, sum);
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ attention_params p) {    \
        wait_for_earlier_grid();                                                                                       \
        static_assert(sm80_tiles(sizeof(dtype), dim, warps, own) == 1, "a warp has 16 rows");                          \
        attention_dbias<dtype, dim, warps, block>(p);                                                                  \
    }

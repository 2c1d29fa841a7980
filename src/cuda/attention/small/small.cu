/* SPDX-License-Identifier: Apache-2.0
 * Attention for problems too small to fill the device with tensor core tiles: multiplications of single numbers, blocks of
 * few rows, and as short a chain of latencies as can be. Every option but dweights; backward is one launch.
 *
 * A block owns ROWS rows (queries; in backward also keys) and walks over the rows of the other operand that they meet,
 * STREAM at a time, in shared memory and float32. Scores: a thread has one of these and half of the block's own. Sums: a
 * warp takes every eighth row, all own rows and all columns; at the end the warps' sums are added in order. */
#include "cuda/attention/small/bwd.cuh"

/* ------------------------------------------------------------------------------------------------------ forward */

/* The new maximum of every row from those of the four warps that share it, and what earlier sums shrink by. */
INLINE void grow_tops(const float *maxima, float top[ROWS], float shrink[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float4 m = *(const float4 *)(maxima + r * 4);
        const float more = fmaxf(fmaxf(top[r], fmaxf(m.x, m.y)), fmaxf(m.z, m.w));
        shrink[r] = more == -CUDART_INF_F ? 0.0f : exp2_approx((top[r] - more) * LOG2E);
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
        float sum = i < c.sq ? (parts.x + parts.y) + (parts.z + parts.w) : 0.0f, lse;
        const float top = sum == 0.0f ? -CUDART_INF_F : numbers[ROWS * 4 + row];
        const float shrink = end_row<T>(p, true, 1.0f, top, 0.0f, 0.0f, sink_of(p, x, i < c.sq), &sum, &lse);
        if (e < p.a.dv)
            store_number<T>(p, lse_at(p, c, x, i), lse, row_at(p.a.o_stride, c.n, x, c.first_q + i) + e,
                            sum == 0.0f ? 0.0f : take_sum<D>(merge, at) * (shrink / sum));
        if (e == 0 && p.adds)
            join_before(p, lse_at(p, c, x, i), &lse);
        if (e == 0 && p.t.lse)
            ((float *)p.t.lse)[lse_at(p, c, x, i)] = lse;
    }
}

/* O += P·V of a step: in float32 summed up by itself first, as a longer chain would lose more than it may. */
template <typename T, int D>
INLINE void accumulate_step(float (*o)[D / 32], const float *weights, const float *rows, int count, bool odd) {
    if constexpr (sizeof(T) == 2) {
        accumulate<D>(o, weights, rows, count, odd, -1.0f);
    } else {
        float part[ROWS][D / 32] = {};
        accumulate<D>(part, weights, rows, count, odd, -1.0f);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int z = 0; z < D / 32; z++)
                o[r][z] += part[r][z];
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
    const int i1 = min(i0 + ROWS, c.sq), begin = max(0, min(i0 + c.lo, c.sk)) / DROPOUT_KEYS * DROPOUT_KEYS;
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
        row_products<T, D>::run(shared + half * HALF * layout::pitch, stream + at * layout::pitch, s);
#pragma unroll
        for (int r = 0; r < HALF; r++) {
            s[r] = score<T>(p, c, x, i0 + half * HALF + r, j0 + at, s[r], &slack);
            const float most = warp_max(s[r]);
            if (lane == 0)
                numbers[(half * HALF + r) * 4 + warp % 4] = most;
        }
        __syncthreads();
        grow_tops(numbers, top, shrink);
        uint32_t kept = 0;
        if (p.drops)
            kept = kept_rows(p, dropout, dropout_head(p, c.n, x), i0 + half * HALF, j0 + at - lane);
#pragma unroll
        for (int r = 0; r < HALF; r++) {
            const float most = half ? top[HALF + r] : top[r];
            e[r] = exp2_approx((s[r] - (most == -CUDART_INF_F ? 0.0f : most)) * LOG2E);
            sum[r] = sum[r] * (half ? shrink[HALF + r] : shrink[r]) + e[r];
            if (p.drops)
                e[r] = kept >> r & 1u ? e[r] * p.keep_scale : 0.0f;
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
        accumulate_step<T, D>(o, weights, stream + STREAM * layout::pitch, min(STREAM, end - j0), odd);
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

/* That run on a multiprocessor at a time. */
#define blocks_fwd(dim) (dim <= 64 ? 2 : 1)
#define blocks_bwd(dim) 1
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(warps == WARPS && own == ROWS && block == STREAM, "as the contract has it");                         \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks_##pass(dim))                                          \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        wait_for_earlier_grid();                                                                                       \
        small_##pass<dtype, dim>(p);                                                                                   \
    }

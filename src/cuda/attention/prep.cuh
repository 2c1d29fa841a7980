/* SPDX-License-Identifier: Apache-2.0
 * What the backward needs of each row before it begins: D, and the log-sum-exp. */
#ifndef HEDDLE_CUDA_ATTENTION_PREP_CUH
#define HEDDLE_CUDA_ATTENTION_PREP_CUH

#include "cuda/attention/mask.cuh"
#include "cuda/attention/product.cuh"
#include "cuda/attention/whole_row.cuh"

/* Shared memory of the kernels of the backward. */
template <typename T, int D, int WARPS, int TILES, int BLOCK> struct backward_shared {
    static constexpr int rows = WARPS / share<T, D>::count * TILES * 16;
    static constexpr int second = rows * tile<T, D>::pitch; /* K, V or Q, dO: the block's own */
    static constexpr int stages = 2 * second;               /* twice two tiles that stream */
    static constexpr int stage_bytes = 2 * BLOCK * tile<T, D>::pitch;
    /* base, rest, D and the mark of each row of a stage: behind the rows of its first tile, or behind all. */
    static constexpr bool within = sm80_numbers_within(sizeof(T), D);
    static constexpr int numbers = stages + (within ? D * (int)sizeof(T) : 2 * stage_bytes);
    static constexpr int numbers_bytes = within ? stage_bytes : 4 * BLOCK * 4;
    static constexpr int apart = within ? tile<T, D>::pitch / 4 : 1, number_step = within ? 1 : BLOCK;
    static constexpr int joins = stages + 2 * stage_bytes + (within ? 0 : 2 * 4 * BLOCK * 4); /* of S, then of dP */
    static constexpr int join_bytes = share<T, D>::bytes(WARPS, TILES, BLOCK);
    static constexpr int bytes = joins + 2 * join_bytes;
    static_assert(bytes == sm80_backward_bytes(sizeof(T), D, rows, BLOCK), "as the plan counts");
};

/* S of rows row0 .. and keys j0 ..: as the forward takes it, -inf where masked. */
template <typename T, int TILES, int BLOCK>
INLINE void mask_scores(const attention_params &p, const place &c, int64_t x, int row0, int j0,
                        float (*s)[BLOCK / 8][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int z = 0; z < TILES; z++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row0 + z * 16 + half * 8 + lane / 4;
            const int first = max(i + c.lo, 0), last = i < c.sq ? min(i + c.hi, c.sk - 1) : -1;
            const score_row row = make_score_row(p, c, x, min(i, c.sq - 1));
#pragma unroll
            for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int j = j0 + y * 8 + lane % 4 * 2 + e;
                    float slack, *t = &s[z][y][2 * half + e];
                    if (j < first || j > last)
                        *t = -CUDART_INF_F;
                    else if (p.rich)
                        *t = full_score<T>(p, c, row, j, *t, &slack);
                }
        }
}

/* sum over 16 bytes of dO∘O, leaving out zeros of O: a query that sees nothing may hold anything in dO. */
template <typename T> INLINE float dot_chunk(uint4 o, uint4 dout) {
    const T *x = (const T *)&o, *y = (const T *)&dout;
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 16 / (int)sizeof(T); e++)
        sum = to_float(x[e]) != 0.0f ? fmaf(to_float(x[e]), to_float(y[e]), sum) : sum;
    return sum;
}

/* Of float32 sums, dv of them, of which this lane has every eighth chunk. */
template <typename T> INLINE float dot_sums(const float *o, const T *dout, int dv, int part, bool vector) {
    float sum = 0.0f;
    if (vector) {
#pragma unroll 1
        for (int e = part * 8; e < dv; e += 64) {
            const uint4 chunk = *(const uint4 *)(dout + e);
            const float4 low = *(const float4 *)(o + e), high = *(const float4 *)(o + e + 4);
            const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int z = 0; z < 8; z++)
                sum = x[z] != 0.0f ? fmaf(x[z], to_float(((const T *)&chunk)[z]), sum) : sum;
        }
    } else {
        for (int e = part; e < dv; e += 8)
            sum = o[e] != 0.0f ? fmaf(o[e], to_float(dout[e]), sum) : sum;
    }
    return sum;
}

/* Is the rounding of lse·log2(e) of weight? Of less than 256 it is half a unit of 2^-16: 5e-6 in P. */
template <typename T> INLINE bool needs_rest(float base) {
    return fabsf(base) >= 256.0f;
}

/* D, base and rest of the 16 rows of a warp, eight lanes to a row. LOOKS: true where it has not seen that all there is of dO, and by the
 * log-sum-exp of Q, is finite. */
template <typename T, bool LOOKS = false>
INLINE bool prep_rows(const attention_params &p, const place &c, int64_t x, int row0) {
    const int part = threadIdx.x % 8;
    bool open = false;
#pragma unroll 1
    for (int i = row0 + (int)threadIdx.x % 32 / 8; i < row0 + 16; i += 4) {
        float base = CUDART_INF_F, rest = 0.0f, sum = 0.0f;
        const int64_t at = i < c.sq ? lse_at(p, c, x, i) : 0;
        const float lse = i < c.sq ? ((const float *)p.t.lse)[at] : -CUDART_INF_F;
        if (LOOKS)
            open |= i < c.sq && !isfinite(lse);
        if (lse != -CUDART_INF_F) {
            base = lse * p.lse_factor;
            if (sizeof(T) == 4)
                split_lse32(p, lse, c.sk, &base, &rest);
            else if (needs_rest<T>(base))
                split_lse(p, lse, &base, &rest);
            const int64_t o_row = row_at(p.a.o_stride, c.n, x, c.first_q + i);
            const T *o = (const T *)p.t.o + o_row;
            const T *dout = (const T *)p.t.dout + row_at(p.a.do_stride, c.n, x, c.first_q + i);
            const int dv = p.t.dout ? (int)p.a.dv : 0;
            const bool vector = (p.vectors & VECTOR_O) && (p.vectors & VECTOR_DO);
            if (sizeof(T) == 2 && p.adds) {
                sum = dot_sums((const float *)p.t.o + o_row, dout, dv, part, vector);
            } else if (vector) {
#pragma unroll 4
                for (int e = part * (16 / (int)sizeof(T)); e < dv; e += 8 * (16 / (int)sizeof(T))) {
                    const uint4 chunk = *(const uint4 *)(dout + e);
                    if (LOOKS)
                        open |= has_nonfinite(chunk, T());
                    sum += dot_chunk<T>(*(const uint4 *)(o + e), chunk);
                }
            } else {
                for (int e = part; e < dv; e += 8)
                    sum = to_float(o[e]) != 0.0f ? fmaf(to_float(o[e]), to_float(dout[e]), sum) : sum;
            }
        }
        for (int step = 4; step; step >>= 1)
            sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (part || i >= c.sq)
            continue;
        p.base[at] = base;
        p.rest[at] = rest;
        p.dsum[at] = lse == -CUDART_INF_F ? 0.0f : sum - (p.t.dlse ? ((const float *)p.t.dlse)[at] : 0.0f);
    }
    return open || (LOOKS && (p.adds || !(p.vectors & VECTOR_O) || !(p.vectors & VECTOR_DO)));
}

/* To dP of 16 rows from row0 on and keys from j0 on, where S says that a key is seen. */
template <typename T, int BLOCK>
INLINE void add_dweights(const attention_params &p, const place &c, int64_t x, int row0, int j0, const float (*s)[4],
                         float (*dp)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int z = 0; z < BLOCK / 8; z++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = row0 + e / 2 * 8 + lane / 4, j = j0 + z * 8 + lane % 4 * 2 + e % 2;
            if (s[z][e] != -CUDART_INF_F)
                dp[z][e] += to_float(((const T *)p.t.dweights)[row_at(p.a.dweights_stride, c.n, x, i) + j]);
        }
}

/* D = rowsum(P∘dP) of a warp's rows, where there are few keys, and these are all that lse is of; else D stays what dO∘O has made it. */
template <typename T, int D, int WARPS, int BLOCK>
INLINE void sum_gradients(const attention_params &p, const place &c, int64_t x, int query0, uint32_t shared) {
    typedef backward_shared<T, D, WARPS, 1, BLOCK> layout;
    constexpr int THREADS = WARPS * 32, ROWS = layout::rows;
    const int warp_row = share<T, D>::group() * 16, lane = threadIdx.x % 32;
    const uint32_t sk = shared + layout::stages, sv = sk + layout::stage_bytes / 2;
    const int64_t y = x / p.group;
    const T *k = (const T *)p.t.k + row_at(p.a.k_stride, c.n, y, c.first_k);
    const T *v = (const T *)p.t.v + row_at(p.a.v_stride, c.n, y, c.first_k);
    const float factor = p.rich ? LOG2E : p.scale_log2;
    const int begin = max(0, min(query0 + c.lo, c.sk)) / DROPOUT_KEYS * DROPOUT_KEYS;
    const int end = max(0, min(min(query0 + ROWS, c.sq) + c.hi, c.sk));
    const dropout_state dropout = make_dropout(p);
    float base[2], rest[2], sum[2] = {0.0f, 0.0f}, weights[2] = {0.0f, 0.0f};
    __syncthreads(); /* base and rest are there, shared memory is free */
    for (int half = 0; half < 2; half++) {
        const int i = query0 + warp_row + half * 8 + lane / 4;
        base[half] = i < c.sq ? p.base[lse_at(p, c, x, i)] : CUDART_INF_F;
        rest[half] = i < c.sq ? p.rest[lse_at(p, c, x, i)] : 0.0f;
    }
    load_tile<T, D, ROWS, THREADS>(shared, (const T *)p.t.q + row_at(p.a.q_stride, c.n, x, c.first_q), p.a.q_stride.s,
                                   query0, 0, c.sq, (int)p.a.d, p.vectors & VECTOR_Q);
    load_tile<T, D, ROWS, THREADS>(shared + layout::second,
                                   (const T *)p.t.dout + row_at(p.a.do_stride, c.n, x, c.first_q), p.a.do_stride.s,
                                   query0, 0, c.sq, (int)p.a.dv, p.vectors & VECTOR_DO);
#pragma unroll 1
    for (int j0 = begin; j0 < end; j0 += BLOCK) {
        float s[1][BLOCK / 8][4], dp[1][BLOCK / 8][4];
        __syncthreads();
        load_tile<T, D, BLOCK, THREADS>(sk, k, p.a.k_stride.s, j0, 0, c.sk, (int)p.a.d, p.vectors & VECTOR_K);
        load_tile<T, D, BLOCK, THREADS>(sv, v, p.a.v_stride.s, j0, 0, c.sk, (int)p.a.dv, p.vectors & VECTOR_V);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        product_rows<T, D, 1, BLOCK>(s, shared + warp_row * tile<T, D>::pitch, sk, p.tf32, whole_steps<T, D>(p, c),
                                     shared + layout::joins);
        product_rows<T, D, 1, BLOCK>(dp, shared + layout::second + warp_row * tile<T, D>::pitch, sv, p.tf32,
                                     whole_steps<T, D>(p, c), shared + layout::joins + layout::join_bytes);
        mask_scores<T, 1, BLOCK>(p, c, x, query0 + warp_row, j0, s);
        if (p.drops)
            drop_elements(
                find_kept<false, BLOCK>(p, dropout, dropout_head(p, c.n, x), query0 + warp_row + duty_row(), j0),
                p.keep_scale, dp[0]);
        if (sizeof(T) == 4 && p.t.dweights)
            add_dweights<T, BLOCK>(p, c, x, query0 + warp_row, j0, s[0], dp[0]);
#pragma unroll
        for (int z = 0; z < BLOCK / 8; z++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (s[0][z][e] == -CUDART_INF_F || base[e / 2] == CUDART_INF_F)
                    continue;
                const float weight = weight_of<T>(s[0][z][e], factor, base[e / 2], rest[e / 2]);
                sum[e / 2] = fmaf(weight, dp[0][z][e], sum[e / 2]);
                weights[e / 2] += weight;
            }
    }
    for (int half = 0; half < 2; half++) {
        const int i = query0 + warp_row + half * 8 + lane / 4;
        const float all = quad_sum(sum[half]), weight = quad_sum(weights[half]);
        const int64_t at = i < c.sq ? lse_at(p, c, x, i) : 0;
        if (i < c.sq && lane % 4 == 0 &&
            (base[half] == CUDART_INF_F || has_all_keys<T>(p, x, weight, ((const float *)p.t.lse)[at])))
            p.dsum[at] = base[half] == CUDART_INF_F ? 0.0f : all - (p.t.dlse ? ((const float *)p.t.dlse)[at] : 0.0f);
    }
}

/* The log-sum-exp of large scores anew, for which a float32 lse is too coarse in P = exp(S - lse): the maximum is subtracted
 * exactly, the rest is the logarithm of the sum, of the very scores that dkdv and dq will see. Taken where it agrees with
 * the given lse to its rounding. */
template <typename T, int D, int WARPS, int BLOCK>
INLINE void refine_rows(const attention_params &p, const place &c, int64_t x, int query0, const bool large[2],
                        uint32_t shared) {
    typedef backward_shared<T, D, WARPS, 1, BLOCK> layout;
    constexpr int THREADS = WARPS * 32, ROWS = layout::rows;
    const uint32_t sq = shared, sk = sq + layout::second;
    const int warp_row = share<T, D>::group() * 16, lane = threadIdx.x % 32;
    const int64_t y = x / p.group;
    const T *k = (const T *)p.t.k + row_at(p.a.k_stride, c.n, y, c.first_k);
    const T *q = (const T *)p.t.q + row_at(p.a.q_stride, c.n, x, c.first_q);
    const int begin = max(0, min(query0 + c.lo, c.sk)), end = max(0, min(min(query0 + ROWS, c.sq) + c.hi, c.sk));
    const float factor = p.rich ? LOG2E : p.scale_log2;
    float top[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {0.0f, 0.0f};
    load_tile<T, D, ROWS, THREADS>(sq, q, p.a.q_stride.s, query0, 0, c.sq, (int)p.a.d, p.vectors & VECTOR_Q);
    for (int j0 = begin; j0 < end; j0 += BLOCK) {
        float s[1][BLOCK / 8][4];
        __syncthreads();
        load_tile<T, D, BLOCK, THREADS>(sk, k, p.a.k_stride.s, j0, begin, end, (int)p.a.d, p.vectors & VECTOR_K);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        product_rows<T, D, 1, BLOCK>(s, sq + warp_row * tile<T, D>::pitch, sk, p.tf32, whole_steps<T, D>(p, c),
                                     shared + layout::joins);
        mask_scores<T, 1, BLOCK>(p, c, x, query0 + warp_row, j0, s);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float new_top = top[half];
#pragma unroll
            for (int z = 0; z < BLOCK / 8; z++)
                new_top = fmaxf(new_top, fmaxf(s[0][z][2 * half], s[0][z][2 * half + 1]));
            new_top = quad_max(new_top);
            const float base = new_top == -CUDART_INF_F ? 0.0f : new_top;
            sum[half] *= exp2_approx((top[half] - base) * factor);
            top[half] = new_top;
#pragma unroll
            for (int z = 0; z < BLOCK / 8; z++)
                sum[half] += exp2_approx((s[0][z][2 * half] - base) * factor) +
                             exp2_approx((s[0][z][2 * half + 1] - base) * factor);
        }
    }
    for (int half = 0; half < 2; half++) {
        const int i = query0 + warp_row + half * 8 + lane / 4;
        const float all = quad_sum(sum[half]);
        if (!large[half] || top[half] == -CUDART_INF_F || lane % 4)
            continue;
        const int64_t at = lse_at(p, c, x, i);
        put_row_sum<T>(p, top[half], factor, p.unit, all, sink_of(p, x, true), ((const float *)p.t.lse)[at], 0.0f,
                       &p.base[at], &p.rest[at]);
    }
}

/* In float32: does a mask leave few keys to one of the 16 rows of a warp from row0 on? */
template <typename T> INLINE bool masks_leave_few(const attention_params &p, const place &c, int64_t x, int row0) {
    const int last = min(row0 + 16, c.sq);
    if (map_shows_many(p, c, x, row0, last))
        return false;
    for (int i = row0; i < last; i++)
        if (count_seen<T>(p, c, x, i) <= FEW_KEYS)
            return true;
    return false;
}

/* One tile of queries; all: nobody has been at it. With dweights the plain prep has been here, and has seen to D; in float32 where there are
 * few keys, D is to be of the very products that dS is made of. */
template <typename T, int D, int WARPS, int BLOCK>
INLINE void prep_tile(const attention_params &p, unsigned id, bool all, uint32_t shared) {
    typedef backward_shared<T, D, WARPS, 1, BLOCK> layout;
    const unsigned tiles = (unsigned)((p.a.sq + layout::rows - 1) / layout::rows);
    const int64_t unit = id / tiles, x = unit % p.a.h;
    const int query0 = (int)(id % tiles) * layout::rows, warp_row = share<T, D>::group() * 16;
    const place c = find_place(p, unit / p.a.h);
    if (is_left_out<T>(p, c, x / p.group))
        return;
    bool large[2];
    if (all && !share<T, D>::part())
        prep_rows<T>(p, c, x, query0 + warp_row);
    for (int half = 0; half < 2; half++) {
        const int i = query0 + warp_row + half * 8 + (int)threadIdx.x % 32 / 4;
        large[half] = i < c.sq && is_coarse<T>(p, c, ((const float *)p.t.lse)[lse_at(p, c, x, i)]);
    }
    bool left = false; /* by a mask, few keys are */
    if constexpr (sizeof(T) == 4) {
        if (hides<T>(p) && !sees_few(p, c))
            left = __syncthreads_or(masks_leave_few<T>(p, c, x, query0 + warp_row));
        for (int half = 0; half < 2; half++) {
            const int i = query0 + warp_row + half * 8 + (int)threadIdx.x % 32 / 4;
            large[half] |= left && i < c.sq && isfinite(((const float *)p.t.lse)[lse_at(p, c, x, i)]);
        }
    }
    if (__syncthreads_or(large[0] || large[1]))
        refine_rows<T, D, WARPS, BLOCK>(p, c, x, query0, large, shared);
    if ((left || sees_few(p, c)) && query0 < c.sq && p.t.dout && (sizeof(T) == 4 || !(p.a.features & HEDDLE_WEIGHTS)))
        sum_gradients<T, D, WARPS, BLOCK>(p, c, x, query0, shared);
}

/* D and the log-sum-exp in two parts. With flags the rows of all tiles are done, and those flagged need more. */
template <typename T, int D, int WARPS, int TILES, int BLOCK> INLINE void attention_prep(const attention_params &p) {
    typedef backward_shared<T, D, WARPS, TILES, BLOCK> layout;
    static_assert(TILES == 1, "a warp has 16 rows");
    extern __shared__ __align__(16) char shared[];
    const bool flagged = p.flags != NULL;
    const unsigned tiles = (unsigned)((p.a.sq + layout::rows - 1) / layout::rows * p.a.h * p.a.b);
    unsigned id = blockIdx.x;
    if (flagged) {
        bool any = false;
        for (unsigned x = id + threadIdx.x * gridDim.x; x < tiles; x += gridDim.x * WARPS * 32)
            any |= p.flags[x] != 0;
        if (!__syncthreads_or(any))
            return;
    }
    for (; id < tiles; id += gridDim.x) /* all of it is there once: it is most of the kernel, and rarely run */
        if (!flagged || p.flags[id]) {
            __syncthreads();
            prep_tile<T, D, WARPS, BLOCK>(p, id, !flagged && !(p.a.features & HEDDLE_WEIGHTS), shared_address(shared));
        }
}

/* What prep begins with, for 64 queries, in a kernel that has no shared memory and so has many blocks on a
 * multiprocessor; flags of what is left to do; zeros where dq is summed, in tiles of so many columns. LOOKS: as prep_rows. */
template <typename T, int COLUMNS, bool LOOKS = false> INLINE bool attention_light(const attention_params &p) {
    const unsigned tiles = (unsigned)((p.a.sq + 63) / 64);
    const int64_t unit = blockIdx.x / tiles, x = unit % p.a.h;
    const int tile = (int)(blockIdx.x % tiles), i = tile * 64 + (int)threadIdx.x;
    const place c = find_place(p, unit / p.a.h);
    if (p.dq_sum && tile * 64 < c.all_sq)
#pragma unroll
        for (int e = 0; e < 64 * COLUMNS / 4; e += 128)
            ((float4 *)(p.dq_sum + (sum_tile(p, c, x) + tile) * 64 * COLUMNS))[e + threadIdx.x] =
                make_float4(0, 0, 0, 0);
    const bool open = prep_rows<T, LOOKS>(p, c, x, tile * 64 + (int)threadIdx.x / 32 * 16);
    const bool large = threadIdx.x < 64 && i < c.sq && is_coarse<T>(p, c, ((const float *)p.t.lse)[lse_at(p, c, x, i)]);
    const bool any = __syncthreads_or(large) || sees_few(p, c);
    if (threadIdx.x == 0)
        p.flags[blockIdx.x] = any && tile * 64 < c.sq;
    return open;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Attention backward of few keys, in 16 bits, for the tensor cores of any GPU since Ampere. A block owns all keys of a head and walks over
 * the queries of the heads that share them. So it has whole rows, and makes of them itself what other families have kernels of their own
 * for: D = rowsum(P∘dP) (docs/design.md, section 4), the log-sum-exp anew where it is large, and dQ, of which nobody else has a part. Nothing
 * is written but the results, and the bits do not depend on the order of blocks.
 *
 * A step has 64 queries. Of two warps with the same 16 of them each has half of the keys: S = Q·Kᵀ, dP = dO·Vᵀ, P, their parts of D; dS. P and
 * dS go through shared memory, and of these all warps make dV += Pᵀ·dO, dK += dSᵀ·Q and dQ = dS·K. */
#include "cuda/attention/short/contract.h"
#include "cuda/attention/sm80/fused.cuh"
#include "cuda/attention/whole_row.cuh"

template <typename T, int D> struct short_shared {
    static constexpr int threads = SHORT_WARPS * 32, keys = SHORT_KEYS, queries = SHORT_QUERIES, half = keys / 2;
    static constexpr int row = tile<T, D>::pitch, pitch = sm80_pitch(sizeof(T), keys); /* of P and dS */
    static constexpr int values = keys * row, stages = 2 * values, stage_bytes = 2 * queries * row;
    static constexpr int ps = stages + 2 * stage_bytes, ds = ps + queries * pitch;
    static constexpr int parts = ds + queries * pitch; /* D; maximum; sum; P's: of each half of the keys, each row */
    static constexpr int bad = parts + 4 * 2 * queries * 4, marks = bad + 2 * queries * 4;
    static_assert(marks + keys * 4 == short_bytes(D), "as the plan counts");
    /* the warp's part of a step: 16 queries, half of the keys; of dQ 16 queries, of dK and dV 32 keys, half of the columns of each */
    static constexpr int width = D / 2;
    static __device__ __forceinline__ int group(void) {
        return (int)threadIdx.x / 32 / 2;
    }
    static __device__ __forceinline__ int side(void) {
        return (int)threadIdx.x / 32 % 2;
    }
};

/* The two rows that a lane has parts of. base: infinite where nothing is seen. Their lse is read again where it is needed: registers are scarce. */
struct short_rows {
    float base[2], rest[2];
    bool coarse[2];
};

INLINE float short_lse(const attention_params &p, const place &c, int64_t x, int i) {
    return i < c.sq ? ((const float *)p.t.lse)[lse_at(p, c, x, i)] : -CUDART_INF_F;
}

template <typename T>
INLINE short_rows find_short_rows(const attention_params &p, const place &c, int64_t x, int row0) {
    short_rows r;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8 + (int)threadIdx.x % 32 / 4;
        const float lse = short_lse(p, c, x, i);
        r.base[half] = lse == -CUDART_INF_F ? CUDART_INF_F : lse * p.lse_factor;
        r.rest[half] = 0.0f;
        if (lse != -CUDART_INF_F && needs_rest<T>(r.base[half]))
            split_lse(p, lse, &r.base[half], &r.rest[half]);
        r.coarse[half] = i < c.sq && is_coarse<T>(p, c, lse);
    }
    return r;
}

/* S -> -inf and dP -> 0 where a key is not seen; CAREFUL: marks (0 or NaN) are added to what is. */
template <int KEYS, weighing HOW>
INLINE void mask_short(const place &c, int row0, int j0, const float *bad, const float *marks, float (*s)[4],
                       float (*dp)[4]) {
    const int lane = threadIdx.x % 32, column = j0 + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane / 4, i = row0 + row;
        const int first = max(i + c.lo, 0) - column, last = (i < c.sq ? min(i + c.hi, c.sk - 1) : -1) - column;
        const float mark = HOW == CAREFUL ? bad[row] : 0.0f;
#pragma unroll
        for (int y = 0; y < KEYS / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const bool seen = y * 8 + e >= first && y * 8 + e <= last;
                float *const t = &s[y][2 * half + e], *const dt = &dp[y][2 * half + e];
                if (HOW == CAREFUL)
                    *t += mark + marks[column + y * 8 + e];
                *t = seen ? *t : -CUDART_INF_F;
                *dt = seen ? *dt : 0.0f;
            }
    }
}

/* The log-sum-exp of large scores anew, as refine_rows of prep.cuh. parts: two numbers of each half of the keys and row. */
template <typename T, int D>
INLINE void refine_short(const attention_params &p, const place &c, int64_t x, int row0, float *parts,
                         const float (*s)[4], short_rows *r) {
    typedef short_shared<T, D> layout;
    const int lane = threadIdx.x % 32, row = layout::group() * 16 + lane / 4;
    float top[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        top[half] = -CUDART_INF_F;
#pragma unroll
        for (int y = 0; y < layout::half / 8; y++)
            top[half] = fmaxf(top[half], fmaxf(s[y][2 * half], s[y][2 * half + 1]));
        top[half] = quad_max(top[half]);
        const float base = top[half] == -CUDART_INF_F ? 0.0f : top[half];
#pragma unroll
        for (int y = 0; y < layout::half / 8; y++)
            sum[half] += exp2_approx((s[y][2 * half] - base) * p.scale_log2) +
                         exp2_approx((s[y][2 * half + 1] - base) * p.scale_log2);
        sum[half] = quad_sum(sum[half]);
        if (lane % 4 == 0) {
            parts[layout::side() * layout::queries + row + half * 8] = top[half];
            parts[(2 + layout::side()) * layout::queries + row + half * 8] = sum[half];
        }
    }
    barrier_sync(1 + layout::group(), 64);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float *const of = parts + row + half * 8;
        const float other[2] = {of[0], of[layout::queries]}, all = fmaxf(other[0], other[1]);
        if (!r->coarse[half] || all == -CUDART_INF_F)
            continue;
        const float total = of[2 * layout::queries] * exp2_approx((other[0] - all) * p.scale_log2) +
                            of[3 * layout::queries] * exp2_approx((other[1] - all) * p.scale_log2);
        put_row_sum<T>(p, all, p.scale_log2, p.unit, total, sink_of(p, x, true),
                       short_lse(p, c, x, row0 + half * 8 + lane / 4), 0.0f, &r->base[half], &r->rest[half]);
    }
}

/* dS -> 0 where a key is not seen. */
template <int KEYS> INLINE void clear_unseen(const place &c, int row0, int j0, float (*ds)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int y = 0; y < KEYS / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = row0 + e / 2 * 8 + lane / 4, j = j0 + y * 8 + lane % 4 * 2 + e % 2;
            if (i >= c.sq || j < i + c.lo || j > i + c.hi || j >= c.sk)
                ds[y][e] = 0.0f;
        }
}

/* D of a row of which there are more keys than these, from dO∘O; the four lanes of the row. */
template <typename T> INLINE float dot_of_row(const attention_params &p, const place &c, int64_t x, int i) {
    const T *const o = (const T *)p.t.o + row_at(p.a.o_stride, c.n, x, c.first_q + i);
    const T *const dout = (const T *)p.t.dout + row_at(p.a.do_stride, c.n, x, c.first_q + i);
    float sum = 0.0f;
#pragma unroll 1
    for (int e = threadIdx.x % 4; e < p.a.dv && i < c.sq; e += 4)
        sum = to_float(o[e]) != 0.0f ? fmaf(to_float(o[e]), to_float(dout[e]), sum) : sum;
    return quad_sum(sum);
}

/* S, dP -> P, dS of a warp's rows and keys, D of them; what dsinks needs is left in memory. What is not seen has an exponent of -inf, and so
 * a P of 0; but 0 times a D that is not finite is not. */
template <typename T, int D, weighing HOW>
INLINE void weigh_short(const attention_params &p, const place &c, int64_t x, int row0, const short_rows &r,
                        float *parts, float (*s)[4], float (*dp)[4]) {
    typedef short_shared<T, D> layout;
    const int lane = threadIdx.x % 32, row = layout::group() * 16 + lane / 4;
    float sum[2] = {0.0f, 0.0f}, weights[2] = {0.0f, 0.0f}, dsum[2];
#pragma unroll
    for (int y = 0; y < layout::half / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float *const t = &s[y][e];
            if (HOW == CAREFUL)
                *t = *t == -CUDART_INF_F || r.base[e / 2] == CUDART_INF_F
                         ? 0.0f
                         : weight_of<T>(*t, p.scale_log2, r.base[e / 2], r.rest[e / 2]);
            else
                *t = exp2_approx(fmaf(*t, p.scale_log2, -r.base[e / 2]));
            weights[e / 2] += *t;
        }
    for (int half = 0; half < 2; half++) {
        weights[half] = quad_sum(weights[half]);
        if (lane % 4 == 0)
            parts[(6 + layout::side()) * layout::queries + row + half * 8] = weights[half];
    }
#pragma unroll
    for (int y = 0; y < layout::half / 8; y++) /* apart from P's: fewer registers at a time */
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[e / 2] = fmaf(s[y][e], dp[y][e], sum[e / 2]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] = quad_sum(sum[half]);
        if (lane % 4 == 0)
            parts[layout::side() * layout::queries + row + half * 8] = sum[half];
    }
    barrier_sync(1 + layout::group(), 64);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row0 + half * 8 + lane / 4;
        const bool there = i < c.sq && (p.t.dlse || p.t.dsinks);
        const int64_t at = there ? lse_at(p, c, x, i) : 0;
        const float *const of = parts + row + half * 8;
        float d = of[0] + of[layout::queries];
        const bool all =
            r.base[half] == CUDART_INF_F ||
            has_all_keys<T>(p, x, of[6 * layout::queries] + of[7 * layout::queries], short_lse(p, c, x, i));
        if (!__all_sync(ALL_LANES, all)) {
            const float of_o = dot_of_row<T>(p, c, x, i);
            d = all ? d : of_o;
        }
        dsum[half] =
            r.base[half] == CUDART_INF_F ? 0.0f : d - (there && p.t.dlse ? ((const float *)p.t.dlse)[at] : 0.0f);
        if (there && p.t.dsinks && layout::side() == 0 && lane % 4 == 0) {
            p.base[at] = r.base[half];
            p.rest[at] = r.rest[half];
            p.dsum[at] = dsum[half];
        }
    }
    const bool finite = HOW == WHOLE || __all_sync(ALL_LANES, isfinite(dsum[0]) && isfinite(dsum[1]));
#pragma unroll
    for (int y = 0; y < layout::half / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            dp[y][e] = s[y][e] * (dp[y][e] - dsum[e / 2]);
    if (!finite)
        clear_unseen<layout::half>(c, row0, layout::side() * layout::half, dp);
}

/* A warp's part of P or dS, at its first row and key, in 16 bits. */
template <typename T, int KEYS, int PITCH> INLINE void lay_down_rows(uint32_t to, const float (*c)[4]) {
    const int lane = threadIdx.x % 32;
    to += lane / 4 * PITCH + lane % 4 * 4;
#pragma unroll
    for (int y = 0; y < KEYS / 8; y++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            store_shared4(to + half * 8 * PITCH + y * 16, pack_pair(c[y][2 * half], c[y][2 * half + 1], T()));
}

/* dQ of 16 queries and half of the columns, from dS and the first `keys` of K, to memory: of all rows that there are. */
template <typename T, int D>
INLINE void store_queries(const attention_params &p, const place &c, int64_t x, int i0, int keys, uint32_t shared) {
    typedef short_shared<T, D> layout;
    const int lane = threadIdx.x % 32, row = layout::group() * 16, column = layout::side() * layout::width;
    const uint32_t a = shared + layout::ds + row * layout::pitch + operand_lane<false>(lane, layout::pitch);
    const uint32_t b = shared + column * (int)sizeof(T) + columns<T, D, 0>::lane_at(lane);
    float dq[1][layout::width / 8][4];
    clear<1, layout::width / 8>(dq);
#pragma unroll
    for (int s = 0; s < layout::keys / 16; s++) {
        if (s * 16 >= keys)
            break;
        a_fragment<T> fa;
        ldmatrix4(fa.r, a + s * 32);
#pragma unroll
        for (int y = 0; y < layout::width / 16; y++) {
            b_fragment<T> fb[2];
            load_b_columns<T, D>(fb, b + s * 16 * layout::row + y * 32);
            multiply(dq[0][2 * y], fa, fb[0]);
            multiply(dq[0][2 * y + 1], fa, fb[1]);
        }
    }
    store_tile<T, layout::width>(false, p.t.dq, row_at(p.a.dq_stride, c.n, x, c.first_q + i0) + column, p.a.dq_stride.s,
                                 row, c.all_sq - i0, (int)p.a.d - column, p.scale, dq[0]);
}

/* The sums of dK or dV of 32 keys and half of the columns. */
template <typename T, int D>
INLINE void store_keys(const attention_params &p, const place &c, int64_t y, void *to, const heddle_strides &stride,
                       int width, float by, const float (*sum)[short_shared<T, D>::width / 8][4]) {
    typedef short_shared<T, D> layout;
    const int column = layout::side() * layout::width;
    const int64_t at = row_at(stride, c.n, y, c.first_k) + column;
#pragma unroll
    for (int z = 0; z < 2; z++)
        store_tile<T, layout::width>(false, to, at, stride.s, layout::group() * 32 + z * 16, c.all_sk, width - column,
                                     by, sum[z]);
}

/* S and dP of a warp's rows and keys, P and dS of them to shared memory. */
template <typename T, int D, weighing HOW>
INLINE void find_weights(const attention_params &p, const place &c, int64_t x, int i0, const float *bad, char *shared,
                         uint32_t own, uint32_t sq, short_rows r) {
    typedef short_shared<T, D> layout;
    constexpr int KEYS = layout::half;
    const int row = layout::group() * 16, key = layout::side() * KEYS;
    const uint32_t sdo = sq + layout::queries * layout::row, to = own + row * layout::pitch + key * (int)sizeof(T);
    float *const parts = (float *)(shared + layout::parts);
    float s[1][KEYS / 8][4], dp[1][KEYS / 8][4];
    product_rows<T, D, 1, KEYS>(s, sq + row * layout::row, own + key * layout::row, false, 0);
    product_rows<T, D, 1, KEYS>(dp, sdo + row * layout::row, own + layout::values + key * layout::row, false, 0);
    if (HOW != WHOLE)
        mask_short<KEYS, HOW>(c, i0 + row, key, bad + row, (const float *)(shared + layout::marks), s[0], dp[0]);
    if (HOW == CAREFUL && __syncthreads_or(r.coarse[0] || r.coarse[1]))
        refine_short<T, D>(p, c, x, i0 + row, parts + 2 * layout::queries, s[0], &r);
    weigh_short<T, D, HOW>(p, c, x, i0 + row, r, parts, s[0], dp[0]);
    lay_down_rows<T, KEYS, layout::pitch>(to + layout::ps, s[0]);
    lay_down_rows<T, KEYS, layout::pitch>(to + layout::ds, dp[0]);
}

/* One step: queries i0 .. of head x, which lie in this stage. */
template <typename T, int D>
INLINE void take_short_step(const attention_params &p, const place &c, int64_t x, int i0, weighing how,
                            const float *bad, char *shared, uint32_t own, uint32_t sq, const short_rows &r,
                            float (*dk)[short_shared<T, D>::width / 8][4],
                            float (*dv)[short_shared<T, D>::width / 8][4]) {
    typedef short_shared<T, D> layout;
    const int lane = threadIdx.x % 32, key = layout::group() * 32;
    const int keys = how == WHOLE ? layout::keys : min(min(i0 + layout::queries, c.sq) + c.hi, c.sk);
    if (how == WHOLE)
        find_weights<T, D, WHOLE>(p, c, x, i0, bad, shared, own, sq, r);
    else if (how == CUT)
        find_weights<T, D, CUT>(p, c, x, i0, bad, shared, own, sq, r);
    else
        find_weights<T, D, CAREFUL>(p, c, x, i0, bad, shared, own, sq, r);
    __syncthreads();
    const uint32_t a = own + key * (int)sizeof(T) + operand_lane<true>(lane, layout::pitch);
    const uint32_t b = sq + layout::side() * layout::width * (int)sizeof(T) + columns<T, D, 0>::lane_at(lane);
    if (key < keys) {
        multiply_shared<T, D, layout::queries / 16, layout::width, layout::pitch, true>(
            dv, a + layout::ps, b + layout::queries * layout::row);
        multiply_shared<T, D, layout::queries / 16, layout::width, layout::pitch, true>(dk, a + layout::ds, b);
    }
    if (p.t.dq)
        store_queries<T, D>(p, c, x, i0, keys, own);
}

template <typename T, int D> INLINE void attention_short(const attention_params &p) {
    typedef short_shared<T, D> layout;
    constexpr int THREADS = layout::threads, QUERIES = layout::queries;
    extern __shared__ __align__(16) char shared[];
    const uint32_t own = shared_address(shared);
    const int64_t y = blockIdx.x % (unsigned)p.a.hk;
    const place c = find_place(p, blockIdx.x / (unsigned)p.a.hk);
    int *const marks = (int *)(shared + layout::marks), *const bad = (int *)(shared + layout::bad);
    const int tiles = (c.all_sq + QUERIES - 1) / QUERIES, steps = tiles * p.group;
    float dk[2][layout::width / 8][4], dv[2][layout::width / 8][4];
    clear<2, layout::width / 8>(dk);
    clear<2, layout::width / 8>(dv);
    for (int z = threadIdx.x; z < 2 * QUERIES; z += THREADS)
        bad[z] = 0;
    for (int z = threadIdx.x; z < layout::keys; z += THREADS)
        marks[z] = 0;
    load_key_tiles<T, D, layout::keys, THREADS>(p, keys_of<T>(p, c, y), values_of<T>(p, c, y), 0, 0, c.sk, own,
                                                own + layout::values);
    int64_t x = y * p.group;
    int i0 = 0;
    bool any_bad = false;
    if (steps)
        load_query_tiles<T, D, QUERIES, THREADS>(p, c, x, i0, 0, c.sq, own + layout::stages,
                                                 own + layout::stages + layout::stage_bytes / 2);
    cp_async_commit();
    __syncthreads(); /* the marks are clear */
    cp_async_wait<0>();
    if (steps)
        any_bad = __syncthreads_or(clean_tile<T, D, layout::keys, THREADS>(own, marks)); /* or dS·K would read it */
    for (int step = 0; step < steps; step++) {
        const uint32_t sq = own + layout::stages + (step & 1) * layout::stage_bytes;
        int *const marked = bad + (step & 1) * QUERIES;
        const bool cut = any_bad || i0 + QUERIES > c.sq || c.sk < layout::keys ||
                         meets_edge(c, i0, min(i0 + QUERIES, c.sq), 0, c.sk);
        const short_rows r = find_short_rows<T>(p, c, x, i0 + layout::group() * 16);
        bool careful = any_bad || r.coarse[0] || r.coarse[1] || r.rest[0] != 0.0f || r.rest[1] != 0.0f;
        cp_async_wait<0>();
        if (cut) {
            careful |= clean_tile<T, D, QUERIES, THREADS>(sq, marked);
            careful |= clean_tile<T, D, QUERIES, THREADS>(sq + QUERIES * layout::row, marked);
        }
        careful = __syncthreads_or(careful);
        const int64_t here_x = x;
        const int here = i0;
        i0 += QUERIES;
        if (i0 >= c.all_sq) {
            i0 = 0;
            x++;
        }
        if (step + 1 < steps) {
            const uint32_t next = own + layout::stages + (~step & 1) * layout::stage_bytes;
            load_query_tiles<T, D, QUERIES, THREADS>(p, c, x, i0, 0, c.sq, next, next + layout::stage_bytes / 2);
        }
        cp_async_commit();
        take_short_step<T, D>(p, c, here_x, here,
                              careful ? CAREFUL
                              : cut   ? CUT
                                      : WHOLE,
                              (const float *)marked, shared, own, sq, r, dk, dv);
        if (careful) /* marked again two steps on, with a barrier between */
            for (int z = threadIdx.x; z < QUERIES; z += THREADS)
                marked[z] = 0;
    }
    cp_async_wait<0>();
    store_keys<T, D>(p, c, y, p.t.dv, p.a.dv_stride, (int)p.a.dv, 1.0f, dv);
    store_keys<T, D>(p, c, y, p.t.dk, p.a.dk_stride, (int)p.a.d, p.scale, dk);
}

/* That run on a multiprocessor at a time: at d 64 a second one is worth the half of a kilobyte that a thread then spills. */
#define blocks_of(dim) (dim > 64 ? 1 : 2)
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(warps == SHORT_WARPS && own == SHORT_KEYS && block == SHORT_QUERIES, "as the contract has it");      \
    extern "C" __global__ void __launch_bounds__(warps * 32, blocks_of(dim))                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        wait_for_earlier_grid();                                                                                       \
        attention_short<dtype, dim>(p);                                                                                \
    }

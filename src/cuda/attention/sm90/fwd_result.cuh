/* SPDX-License-Identifier: Apache-2.0
 * The end of a tile of queries in Hopper's forward: the log-sum-exp of its rows, and how O goes to memory. */
#ifndef HEDDLE_CUDA_ATTENTION_FWD_RESULT_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_FWD_RESULT_SM90_CUH

#include "cuda/attention/sm90/fwd.cuh"

/* This warp has done with what the barrier is for. */
INLINE void release(uint32_t barrier) {
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barrier);
}

/* 2^-23 of itself. */
INLINE float atanh_of(float x) {
    const float y = x * x, near = fmaf(fmaf(fmaf(y, 1.0f / 9, 1.0f / 7), y, 0.2f), y, 1.0f / 3);
    return y < 0.0625f ? fmaf(x * y, near, x) : log2f((1.0f + x) / (1.0f - x)) * (0.5f * LN2);
}

/* What the log-sum-exp lacks of tanh.approx in a row's largest score: where that has most of the weight nothing averages it out. So much as
 * tanh.approx is off where tanh is what it was there, which is next to it. most, capped: as cap_state, of the row; base: of the exponents;
 * by: 1 over their sum. */
INLINE float cap_error(const attention_params &p, float most, float capped, float base, float by) {
    const bool adds = p.a.features & HEDDLE_ALIBI;
    const float unit = adds ? p.score_out : 1.0f, was = adds ? __fdividef(capped, unit) : most;
    const float tanh =
        fmaxf(-1.0f, fminf(was, 1.0f)); /* which what was added and taken away again may have rounded past */
    const float error = (tanh - tanh_approx(atanh_of(tanh))) * unit;
    return most != -CUDART_INF_F ? exp2_approx(fmaf(most, p.scale_log2, -base)) * by * error * p.unit : 0.0f;
}

/* What the sums of a row are multiplied with; its log-sum-exp. The sink joins in. ADDS: o may be one that is added to; *keep: as add_row
 * takes it. most, capped: as cap_state, of the row. scales: of keys, where they are a part of the units of scores. */
template <int FULL, bool ADDS>
INLINE float end_query(const attention_params &p, const forward_target &t, int row, float top, float sum, float most,
                       float capped, float *lse, float *keep, const key_scales *scales = NULL) {
    const float sink = sink_of(p, t.x, row < t.rows);
    if (row >= t.rows)
        sum = 0.0f;
    const bool far = sum != 0.0f && is_far(top, log2_unit(p, scales), alone_from<bf16>());
    const float base = __fmul_rn(top, log2_unit(p, scales));
    float shrink = end_row<bf16>(p, far, natural_unit(p, scales), top, log2_unit(p, scales), base, sink, &sum, lse);
    if (has_cap<FULL>(p) && shows_tanh(p) && sum != 0.0f && !far)
        *lse += cap_error(p, most, capped, base, __fdividef(shrink, sum));
    if (ADDS && p.adds && row < t.all_rows) {
        const row_shares s = join_before(p, t.lse + row, lse);
        shrink *= s.take;
        *keep = s.keep;
    }
    return sum != 0.0f ? __fdividef(shrink, sum) : 0.0f;
}

/* Where lse of a row goes; NULL: nowhere. */
INLINE float *lse_of(const attention_params &p, const forward_target &t, int row) {
#ifdef HEDDLE_CLOCKS
    return NULL;
#endif
    return p.t.lse && row < t.all_rows ? (float *)p.t.lse + t.lse + row : NULL;
}

/* Of 16 rows, how many has a lane 16 bytes of? A row of more than 256 columns is stored in pieces of 64. */
template <int D> INLINE constexpr int piece_columns(void) {
    return D > 256 ? 64 : sm90_columns(D);
}
template <int D> INLINE constexpr int chunk_rows(void) {
    return 16 / (32 / (piece_columns<D>() / 8));
}

/* Where a lane's 16 bytes of each of 16 rows go: of the first `count` of them, ROWS after the other. */
template <typename T, int D> struct row_chunks {
    static constexpr int chunks = piece_columns<D>() / 8, rows = 32 / chunks;
    T *to;
    int64_t step;
    int count;
};

/* 16 rows from row0 on, as far as they are there; t.o is at column `column0`. */
template <typename T, int D>
INLINE row_chunks<T, D> find_chunks(const attention_params &p, const forward_target &t, int row0, int column0) {
    typedef row_chunks<T, D> r;
    const int lane = threadIdx.x % 32, row = lane / r::chunks, column = lane % r::chunks * 8;
    return {(T *)p.t.o + t.o + (row0 + row) * p.a.o_stride.s + column, r::rows * p.a.o_stride.s,
            column < (int)p.a.dv - column0 ? min(t.all_rows - row0, 16) - row : 0};
}
template <typename T, int D> INLINE void store_chunks(row_chunks<T, D> r, const uint4 (&x)[chunk_rows<D>()]) {
#pragma unroll
    for (int z = 0; z < chunk_rows<D>(); z++, r.to += r.step)
        if (z * r.rows < r.count)
            store_global16(r.to, x[z]);
}

/* From registers: the four lanes of a row swap, so that each has 16 bytes in one place. */
template <typename T, int D>
INLINE void store_directly(const attention_params &p, const forward_target &t, int row, int column0,
                           const float (*o)[4]) {
    const int quarter = threadIdx.x % 4;
    T *to = (T *)p.t.o + t.o + row * p.a.o_stride.s + quarter * 8;
#pragma unroll
    for (int half = 0; half < 2; half++, to += 8 * p.a.o_stride.s)
#pragma unroll
        for (int y = 0; y < D / 8; y += 4) {
            uint32_t r[4];
#pragma unroll
            for (int x = 0; x < 4; x++)
                r[x] = pack_pair(o[y + x][2 * half], o[y + x][2 * half + 1], T());
            const uint4 chunk = swap_pairs(r);
            if (row + half * 8 < t.all_rows && (y + quarter) * 8 < (int)p.a.dv - column0)
                store_global16(to + y * 8, chunk);
        }
}

/* The end of a lane's two rows: what O is multiplied with and, where it is added to, what is there. The lanes of a row have all the same
 * numbers, so that each works on one of the two: the one of its number that is odd or even, of which it has lse. */
template <int FULL, bool ADDS>
INLINE float end_rows(const attention_params &p, const forward_target &t, const softmax_state &state,
                      const cap_state &cap, int row0, float by[2], float keep[2], const key_scales *scales) {
    const int odd = threadIdx.x % 2;
    const float send = odd ? state.sum[0] : state.sum[1];
    float sum = odd ? state.sum[1] : state.sum[0], lse, mine_keep = 0.0f;
    sum += __shfl_xor_sync(ALL_LANES, send, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    float mine = end_query<FULL, ADDS>(p, t, row0 + odd * 8, odd ? state.max[1] : state.max[0], sum,
                                       odd ? cap.most[1] : cap.most[0], odd ? cap.capped[1] : cap.capped[0], &lse,
                                       &mine_keep, scales);
    mine *= FULL & WITH_DROPOUT ? p.keep_scale : 1.0f;
    if ((state.bad >> odd & 1) && mine != 0.0f)
        mine = CUDART_NAN_F;
    const float other = __shfl_xor_sync(ALL_LANES, mine, 1);
    by[0] = odd ? other : mine;
    by[1] = odd ? mine : other;
    if (ADDS) {
        const float other_keep = __shfl_xor_sync(ALL_LANES, mine_keep, 1);
        keep[0] = odd ? other_keep : mine_keep;
        keep[1] = odd ? mine_keep : other_keep;
    }
    return lse;
}

/* o = O / sum, and lse. A warp's rows go through shared memory, where its rows of Q were, so that whole rows are written; q_empty: says
 * that Q is free, and t another's. It is said before the stores to memory: the fence would wait for them. Who makes the first columns
 * stores lse. */
template <typename T, int D, int ROWS, int FULL, bool ADDS>
INLINE void store_rows(const attention_params &p, const forward_target &t, int column0, const softmax_state &state,
                       const cap_state &cap, float (*o)[4], uint32_t staging, uint32_t q_empty,
                       const key_scales *scales) {
    const int lane = threadIdx.x % 32, row0 = (int)threadIdx.x / 32 * 16 - WARPGROUP / 2;
    float by[2], keep[2];
    const float lse = end_rows<FULL, ADDS>(p, t, state, cap, row0 + lane / 4, by, keep, scales);
    if (__any_sync(ALL_LANES, by[0] == 0.0f || by[1] == 0.0f)) /* what was summed there may be anything */
#pragma unroll
        for (int y = 0; y < D / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[y][e] = by[e / 2] == 0.0f ? 0.0f : o[y][e];
#pragma unroll
    for (int y = 0; y < D / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            o[y][e] *= by[e / 2];
    float *const lse_to = lane % 4 < 2 && !column0 ? lse_of(p, t, row0 + lane / 4 + lane % 2 * 8) : NULL;
    if ((D > 128 || (ADDS && p.adds)) && lse_to)
        *lse_to = lse;
    if (ADDS && p.adds) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row0 + half * 8 + lane / 4;
            if (row < t.all_rows)
                add_row<D, true>((float *)p.t.o + t.o + row * p.a.o_stride.s, o, half, (int)p.a.dv - column0, 1.0f,
                                 keep[half]);
        }
        __syncwarp();
        if (D <= 128)
            release(q_empty);
        return;
    }
    if (D > 128) {
        store_directly<T, D>(p, t, row0 + lane / 4, column0, o);
        return;
    }
    typedef row_chunks<T, D> chunks;
    const chunks to = find_chunks<T, D>(p, t, row0, column0);
    staging += row0 * 128;
#pragma unroll
    for (int s = 0; s < D / 16; s++) {
        uint32_t a[1][4];
        pack_fragments<T, 16>(a, o + 2 * s);
        stmatrix4(staging + s / 4 * tile90<D, ROWS>::strip + (lane & 15) * 128 +
                      ((s % 4 * 2 + (lane >> 4)) ^ (lane & 7)) * 16,
                  a[0]);
    }
    __syncwarp();
    uint4 x[chunk_rows<D>()];
#pragma unroll
    for (int z = 0; z < chunk_rows<D>(); z++) {
        const int row = lane / chunks::chunks + z * chunks::rows, chunk = lane % chunks::chunks;
        x[z] = load_shared16(staging + chunk / 8 * tile90<D, ROWS>::strip + row * 128 + ((chunk ^ row) & 7) * 16);
    }
    fence_async();
    __syncwarp();
    release(q_empty);
    if (lse_to)
        *lse_to = lse;
    store_chunks<T, D>(to, x);
}

/* One warp: a tile that sees no key at all. */
template <typename T, typename layout, bool ADDS>
INLINE void store_nothing(const attention_params &p, const forward_work &w) {
    constexpr int D = layout::part;
    const int column0 = layout::is_wide ? w.column0 : 0;
    const forward_target t = target_of<layout>(p, w);
    for (int row0 = 0; row0 < layout::rows; row0 += 16) {
        const int row = row0 + (int)threadIdx.x % 32;
        float keep = 0.0f, lse, *const lse_to = threadIdx.x % 32 < 16 && !column0 ? lse_of(p, t, row) : NULL;
        end_query<0, ADDS>(p, t, row, -CUDART_INF_F, 0.0f, -CUDART_INF_F, 0.0f, &lse, &keep);
        if (lse_to)
            *lse_to = lse;
        if (ADDS && p.adds) {
            if (threadIdx.x % 32 < 16 && keep < 0.0f) /* nor was there anything before */
                for (int e = 0; e < p.a.dv - column0 && (!layout::is_wide || e < D); e++)
                    ((float *)p.t.o)[t.o + row * p.a.o_stride.s + e] = 0.0f;
            continue;
        }
        const uint4 nothing[chunk_rows<D>()] = {};
        if (D <= 256)
            store_chunks<T, D>(find_chunks<T, D>(p, t, row0, column0), nothing);
        for (int column = 0; D > 256 && column < D; column += 64) {
            forward_target piece = t;
            piece.o += column;
            store_chunks<T, D>(find_chunks<T, D>(p, piece, row0, column), nothing);
        }
    }
}

/* May there be such tiles? The first row sees a key if any does, and so does the last. */
INLINE bool may_see_nothing(const attention_params &p) {
    if (has_lengths(p))
        return true;
    const place c = find_place(p, 0);
    return c.hi < 0 || c.lo > c.sk - c.sq || !c.sk;
}

#endif

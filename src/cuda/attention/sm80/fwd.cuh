/* SPDX-License-Identifier: Apache-2.0
 * What the forward kernels of the family sm80 share: a block's work, and what its rows come to. */
#ifndef HEDDLE_CUDA_ATTENTION_SM80_FWD_CUH
#define HEDDLE_CUDA_ATTENTION_SM80_FWD_CUH

#include "cuda/attention/product.cuh"
#include "cuda/attention/store.cuh"

/* The running softmax of the rows that a lane has a part of. */
template <int TILES> struct softmax_state { float max[TILES][2], sum[TILES][2]; /* sum: this lane's part */ };

template <typename T, int D, int WARPS, int TILES, int BLOCK> struct forward_shared {
    static constexpr int rows = WARPS / share<T, D>::count * TILES * 16;
    static constexpr int keys = rows * tile<T, D>::pitch; /* K, V; twice */
    static constexpr int step_bytes = BLOCK * tile<T, D>::pitch, stage_bytes = 2 * step_bytes;
    static constexpr int values = keys + stage_bytes; /* of who keeps K and V apart: twice */
    static constexpr int joins = keys + 2 * stage_bytes;
    static constexpr int marks = D * (int)sizeof(T),
                         apart = tile<T, D>::pitch / 4; /* behind the rows of Q, two to a row */
    static constexpr int bytes = joins + share<T, D>::bytes(WARPS, TILES, BLOCK);
    static_assert(BLOCK <= rows, "a row for each key");
    static_assert(bytes == sm80_forward_bytes(sizeof(T), D, rows, BLOCK), "as the plan counts");
};

/* What a block works on. */
struct forward_work {
    place c;
    int64_t y;           /* first head is y·pack */
    int key_share, row0; /* of sq·pack rows */
    int keys_begin, keys_end, begin, end;
};

/* The query of a row of the block's tile. */
INLINE int query_of(const attention_params &p, int row) {
    return p.pack == 1 ? row : row / p.pack;
}

/* tile_of_block in 32 bits, which hold a grid: who waits for its first keys should not wait for divisions, too. */
INLINE void tile_in_grid(uint32_t tiles, uint32_t *tile, uint32_t *unit) {
    const uint32_t section = blockIdx.x / (16 * tiles), from = section * 16 * tiles, left = gridDim.x - from;
    const uint32_t count = left >= 16 * tiles ? 16 : left / tiles, r = blockIdx.x - from;
    *tile = count == 16 ? r / 16 : r / count;
    *unit = section * 16 + r - *tile * count;
}

/* Sequence n; where all are as long as the tensors the plan knows their band. */
INLINE place find_sequence(const attention_params &p, uint32_t n) {
    if ((p.a.features & HEDDLE_VARLEN) || p.t.seqlens_q || p.t.seqlens_k)
        return find_place(p, n);
    const int sq = (int)p.a.sq, sk = (int)p.a.sk;
    return {n, 0, 0, sq, sk, sq, sk, p.lo, p.hi, (int)(p.off + own_offset(&p.a, {0, sq, 0, sk}))};
}

template <int ROWS, int BLOCK> INLINE forward_work find_work(const attention_params &p, int tiles) {
    forward_work w;
    uint32_t tile_index, rest;
    tile_in_grid((uint32_t)tiles, &tile_index, &rest);
    tile_index = (uint32_t)tiles - 1 - tile_index; /* the longest of a causal mask first */
    w.key_share = 0;
    if (p.key_shares > 1) {
        w.key_share = (int)(rest % (uint32_t)p.key_shares);
        rest /= (uint32_t)p.key_shares;
    }
    const uint32_t heads = (uint32_t)(p.pack == 1 ? p.a.h : p.a.hk), n = rest / heads;
    w.y = rest - n * heads;
    w.c = find_sequence(p, n);
    w.row0 = (int)tile_index * ROWS;
    const int i0 = query_of(p, w.row0), i1 = min(w.c.sq, query_of(p, w.row0 + ROWS - 1) + 1);
    w.keys_begin = w.keys_end = 0;
    if (i0 < i1) {
        w.keys_begin = max(0, min(i0 + w.c.lo, w.c.sk));
        w.keys_end = max(0, min(i1 + w.c.hi, w.c.sk));
    }
    const int first = w.keys_begin / BLOCK, blocks = max(0, (w.keys_end + BLOCK - 1) / BLOCK - first);
    const int each = p.key_shares > 1 ? (blocks + p.key_shares - 1) / p.key_shares : blocks;
    w.begin = (first + w.key_share * each) * BLOCK;
    w.end = min(w.keys_end, w.begin + each * BLOCK);
    return w;
}

/* What a row's sums come to: the factor of O; lse; for the combination the sum over exp2((S - max)·c). The sink counts where nobody
 * combines. */
struct row_end {
    float by, lse, part;
};

/* *sum is 0 where nothing is seen. */
template <typename T>
INLINE row_end end_query(const attention_params &p, const forward_work &w, int64_t head, int i, float max, float c,
                         float *sum) {
    const bool far = *sum != 0.0f && is_far(max, c, alone_from<T>());
    const float sink = sink_of(p, head, p.key_shares == 1 && i < w.c.sq);
    if (i >= w.c.sq)
        *sum = 0.0f;
    const float base = __fmul_rn(max, c);
    const float more = far ? 0.0f : -fmaf(max, c, -base); /* mostly next to nothing */
    const float part = fabsf(more) < 0x1p-10f ? fmaf(*sum, more * LN2, *sum) : *sum * exp2f(more);
    float lse;
    const float shrink = end_row<T>(p, far && *sum != 0.0f, p.unit, max, c, base, sink, sum, &lse);
    return {*sum == 0.0f ? 0.0f : shrink * p.keep_scale / *sum, lse, *sum == 0.0f ? 0.0f : part};
}

/* o = O / sum and lse; or what this share of the keys gives of both, of the columns from `first` on. A row that saw nothing has o = 0,
 * lse = -inf (or the sink). */
template <typename T, int WIDTH, int TILES>
INLINE void store_rows(const attention_params &p, const forward_work &w, float c, const softmax_state<TILES> &state,
                       float (*o)[WIDTH / 8][4], int row0, int first) {
    const int lane = threadIdx.x % 32, width = (int)p.a.dv - first;
    const bool tells = lane % 4 == 0 && first == 0;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = quad_sum(state.sum[x][half]);
            const int row = row0 + x * 16 + half * 8 + lane / 4, i = query_of(p, row);
            const int64_t head = w.y * p.pack + (row - i * p.pack);
            if (i >= w.c.all_sq)
                continue;
            row_end end = end_query<T>(p, w, head, i, state.max[x][half], c, &sum);
            const int64_t at = lse_at(p, w.c, head, i);
            const int64_t to = row_at(p.a.o_stride, w.c.n, head, w.c.first_q + i) + first;
#pragma unroll
            for (int y = 0; y < WIDTH / 8; y++)
                if (sum == 0.0f)
                    o[x][y][2 * half] = o[x][y][2 * half + 1] = 0.0f;
            if (p.key_shares > 1) {
                if (tells)
                    store_part(p, w.key_share, at, state.max[x][half], end.part);
                store_row<float, WIDTH>(p.part_o + (w.key_share * p.lse_rows + at) * p.a.dv + first, o[x], half, width,
                                        end.by);
                continue;
            }
            if (p.adds) {
                const row_shares s = join_before(p, at, &end.lse);
                add_row<WIDTH, false>((float *)p.t.o + to, o[x], half, width, end.by * s.take, s.keep);
            } else {
                store_row<T, WIDTH>((T *)p.t.o + to, o[x], half, width, end.by);
            }
            if (p.t.lse && tells)
                ((float *)p.t.lse)[at] = end.lse;
        }
}

#endif

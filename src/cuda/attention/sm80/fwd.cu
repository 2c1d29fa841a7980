/* SPDX-License-Identifier: Apache-2.0
 * Attention forward for the tensor cores of Ampere and later: FlashAttention-2 (Dao 2023, algorithm 1).
 *
 * A block owns WARPS·TILES·16 rows (query i of head y·pack + row%pack, i = row/pack) and walks over the keys that
 * they see, or over its share of them. K and V of the next step are on their way during a step. */
#include "cuda/attention/mask.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/sm80/fwd.cuh"

/* Masks S where the block of keys j0 .. is cut; a visible key whose value is not finite gives NaN, one in no page -inf (tile.cuh). */
template <int TILES, int BLOCK, int APART = 1>
INLINE void mask_lean(const attention_params &p, const forward_work &w, int row0, int j0, const int *bad,
                      float (*s)[BLOCK / 8][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = (row0 + x * 16 + half * 8 + lane / 4) / p.pack;
            const int first = max(i + w.c.lo, 0), last = min(i + w.c.hi, w.c.sk - 1);
#pragma unroll
            for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = y * 8 + lane % 4 * 2 + e, j = j0 + column, mark = bad[column * APART];
                    float *t = &s[x][y][2 * half + e];
                    *t = j < first || j > last ? -CUDART_INF_F : mark ? __int_as_float(mark) : *t;
                }
        }
}

/* Eights of columns whose bias is asked for together. */
#define EIGHTS 2

/* q·k -> S by all options. whole: all are seen by the band; cut: some may not be seen, or are marked; shown: by the map of the mask. */
template <typename T, int TILES, int BLOCK, int APART = 1>
INLINE void score_full(const attention_params &p, const forward_work &w, bool whole, bool cut, const uint32_t *shown,
                       int row0, int j0, const int *bad, float (*s)[BLOCK / 8][4]) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
#pragma unroll
    for (int x = 0; x < TILES; x++) {
        lane_options<T> o[2];
        int i[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row0 + x * 16 + half * 8 + lane / 4;
            i[half] = row / p.pack;
            o[half] = find_row_options<T>(p, w.c, w.y * p.pack + row % p.pack, i[half], j0 + column);
        }
        uint32_t seen = whole ? ALL_LANES : find_seen<BLOCK>(w.c, i[0], i[1], j0 + column);
        seen &= shown[x];
        float slack[EIGHTS][4];
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y += EIGHTS)
            make_scores<T, false, EIGHTS>(p, o, front_factor(p), whole, y, &seen, s[x] + y, slack,
                                          !p.seen_by_queries.kinds);
        if (cut)
#pragma unroll
            for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int mark = bad[(y * 8 + column + e % 2) * APART];
                    s[x][y][e] = !(seen >> (4 * y + e) & 1) ? -CUDART_INF_F : mark ? __int_as_float(mark) : s[x][y][e];
                }
    }
}

/* What the map shows of a step, with which it is asked for before its scores are made; all where `partial` is false. */
template <int TILES, int BLOCK>
INLINE void find_shown_rows(const attention_params &p, const forward_work &w, bool partial, int row0, int j0,
                            uint32_t *shown) {
#pragma unroll
    for (int x = 0; x < TILES; x++)
        shown[x] = partial ? find_shown<BLOCK>(p.seen_by_queries, find_bits(p.seen_by_queries, w.c.n, w.y),
                                               row0 + x * 16 + (int)threadIdx.x % 32 / 4, w.c.sq - 1, j0)
                           : ALL_LANES;
}

/* S -> P = exp2(S·c - max·c); what was summed before is scaled to the new maximum. */
template <typename T, int WIDTH, int TILES, int BLOCK>
INLINE void online_softmax(softmax_state<TILES> *state, float c, float (*s)[BLOCK / 8][4], float (*o)[WIDTH / 8][4]) {
    row_scale row[TILES][2];
    float before[TILES][2];
    bool grows = false, alone = false;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = state->max[x][half];
#pragma unroll
            for (int y = 0; y < BLOCK / 8; y++)
                top = fmaxf(top, fmaxf(s[x][y][2 * half], s[x][y][2 * half + 1]));
            top = quad_max(top);
            before[x][half] = state->max[x][half];
            row[x][half] = scale_row(before[x][half], top, c);
            alone |= is_alone<T>(row[x][half]);
            grows |= top != before[x][half];
            state->max[x][half] = top;
        }
    if (__any_sync(ALL_LANES, alone))
#pragma unroll
        for (int x = 0; x < TILES; x++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (is_alone<T>(row[x][half]))
                    scale_alone(before[x][half], state->max[x][half], &row[x][half]);
    if (__any_sync(ALL_LANES, grows)) {
#pragma unroll
        for (int x = 0; x < TILES; x++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                state->sum[x][half] *= row[x][half].shrink;
#pragma unroll
                for (int y = 0; y < WIDTH / 8; y++) {
                    o[x][y][2 * half] *= row[x][half].shrink;
                    o[x][y][2 * half + 1] *= row[x][half].shrink;
                }
            }
    }
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int x = 0; x < TILES; x++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[x][y][e] = exp2_approx(fmaf(s[x][y][e], row[x][e / 2].factor, -row[x][e / 2].base));
    float sum[TILES][2] = {}; /* float32: of a step by itself, as a longer chain would be seen in lse */
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int x = 0; x < TILES; x++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                (sizeof(T) == 4 ? sum : state->sum)[x][half] += s[x][y][2 * half] + s[x][y][2 * half + 1];
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2 && sizeof(T) == 4; half++)
            state->sum[x][half] += sum[x][half];
}

/* P -> 0 where dropped. What is kept is multiplied by keep_scale at the end: P rounds to 16 bits better
 * without. */
template <int TILES, int BLOCK>
INLINE void drop(const attention_params &p, const forward_work &w, const dropout_state &state, int row0, int j0,
                 float (*s)[BLOCK / 8][4]) {
#pragma unroll
    for (int x = 0; x < TILES; x++) {
        const int row = row0 + x * 16 + duty_row();
        const uint32_t bh = dropout_head(p, w.c.n, w.y * p.pack + row % p.pack);
        drop_elements(find_kept<false, BLOCK>(p, state, bh, row / p.pack, j0), 1.0f, s[x]);
    }
}

/* Can a kernel read keys from pages? In float32 that takes registers of which there are no more. */
template <typename T, bool FULL> INLINE constexpr bool takes_pages(void) {
    return FULL && sizeof(T) == 2;
}

/* pages: of these keys, where they are in pages. */
template <typename T, int D, bool FULL, int WARPS, int TILES, int BLOCK>
INLINE void load_keys(const attention_params &p, const forward_work &w, const T *k, const T *v, int j0, int pages,
                      uint32_t shared, int stage) {
    typedef forward_shared<T, D, WARPS, TILES, BLOCK> layout;
    const uint32_t to = shared + layout::keys + stage * layout::stage_bytes;
    if constexpr (takes_pages<T, FULL>())
        if (p.page_bits) {
            load_pages<T, D, BLOCK, WARPS * 32>(p, to, k, p.a.k_stride, pages, j0, w.keys_begin, w.keys_end, (int)p.a.d,
                                                p.vectors & VECTOR_K);
            load_pages<T, D, BLOCK, WARPS * 32>(p, to + BLOCK * tile<T, D>::pitch, v, p.a.v_stride, pages, j0,
                                                w.keys_begin, w.keys_end, (int)p.a.dv, p.vectors & VECTOR_V);
            return;
        }
    load_tile<T, D, BLOCK, WARPS * 32>(to, k, p.a.k_stride.s, j0, w.keys_begin, w.keys_end, (int)p.a.d,
                                       p.vectors & VECTOR_K);
    load_tile<T, D, BLOCK, WARPS * 32>(to + BLOCK * tile<T, D>::pitch, v, p.a.v_stride.s, j0, w.keys_begin, w.keys_end,
                                       (int)p.a.dv, p.vectors & VECTOR_V);
}

template <typename T, int D, bool FULL, int WARPS, int TILES, int BLOCK>
INLINE void attention_forward(const attention_params &p) {
    typedef forward_shared<T, D, WARPS, TILES, BLOCK> layout;
    typedef tile<T, D> t;
    constexpr int THREADS = WARPS * 32, ROWS = layout::rows, WIDTH = share<T, D>::width;
    extern __shared__ __align__(128) char shared[];
    const uint32_t sq = shared_address(shared);
    constexpr int APART = layout::apart;
    int *bad = (int *)(shared + layout::marks);
    const forward_work w = find_work<ROWS, BLOCK>(p, own_tiles<T, FULL, ROWS>(p, p.a.sq, p.tiles_q));
    if (w.row0 >= w.c.all_sq * p.pack)
        return;
    const int64_t head_k = w.y * p.pack / p.group;
    if (FULL && is_left_out<T>(p, w.c, head_k))
        return;
    const bool paged = takes_pages<T, FULL>() && p.page_bits;
    const T *k = (const T *)p.t.k + row_at(p.a.k_stride, paged ? 0 : w.c.n, head_k, w.c.first_k);
    const T *v = (const T *)p.t.v + row_at(p.a.v_stride, paged ? 0 : w.c.n, head_k, w.c.first_k);
    const T *q = (const T *)p.t.q + row_at(p.a.q_stride, w.c.n, w.y * p.pack, w.c.first_q);
    const int d = (int)p.a.d, warp_row = share<T, D>::group() * TILES * 16;
    const bool tf32 = p.tf32, few = few_keys<T>(w.c, w.row0 / p.pack, min(w.c.sq, (w.row0 + ROWS - 1) / p.pack + 1));

    for (int x = threadIdx.x; x < ROWS * t::chunks; x += THREADS) {
        const int row = x / t::chunks, r = w.row0 + row, i = r / p.pack;
        const bool there = i < w.c.sq;
        const T *from = there ? q + (r - i * p.pack) * p.a.q_stride.h + i * p.a.q_stride.s : q;
        load_chunk(sq + row * t::pitch + x % t::chunks * 16, from, x % t::chunks, d, there, p.vectors & VECTOR_Q);
    }
    softmax_state<TILES> state;
    float o[TILES][WIDTH / 8][4];
#pragma unroll
    for (int x = 0; x < TILES; x++) {
        state.max[x][0] = state.max[x][1] = -CUDART_INF_F;
        state.sum[x][0] = state.sum[x][1] = 0.0f;
#pragma unroll
        for (int y = 0; y < WIDTH / 8; y++)
            o[x][y][0] = o[x][y][1] = o[x][y][2] = o[x][y][3] = 0.0f;
    }
    for (int x = threadIdx.x; x < 2 * BLOCK; x += THREADS)
        bad[x / 2 * APART + x % 2] = 0;
    const dropout_state dropout = make_dropout(p);
    const bool rich = FULL && p.rich;
    const float c = rich ? LOG2E : p.scale_log2;
    const uint8_t *const kinds = FULL ? find_kinds(p.seen_by_queries, w.c.n, w.y, w.row0 / MASK_TILE) : NULL;
    const bool hides_some = rich && hides_elements(p, p.seen_by_queries);
    const int i0 = w.row0 / p.pack, i1 = min(w.c.sq, (w.row0 + ROWS - 1) / p.pack + 1);
    int pages = 0, next_pages = 0; /* of this step, and of the next */
    if (paged) {
        pages = find_pages<BLOCK>(p, w.c.n, w.begin, w.keys_end);
        next_pages = find_pages<BLOCK>(p, w.c.n, w.begin + BLOCK, w.keys_end);
    }
    const int first = seek_column(kinds, w.begin, w.end);
    if (first < w.end)
        load_keys<T, D, FULL, WARPS, TILES, BLOCK>(p, w, k, v, first, pages, sq, 0);
    cp_async_commit();
    __syncthreads();
    int stage = 0, next;
    for (int j0 = first; j0 < w.end; j0 = next, stage ^= 1) {
        next = seek_column(kinds, j0 + BLOCK, w.end);
        const uint32_t sk = sq + layout::keys + stage * layout::stage_bytes, sv = sk + BLOCK * t::pitch;
        const bool hidden = paged && __any_sync(ALL_LANES, pages < 0);
        const bool at_edge = hidden || j0 < w.keys_begin || j0 + BLOCK > w.keys_end || j0 + BLOCK - 1 > i0 + w.c.hi ||
                             j0 < i1 - 1 + w.c.lo;
        const bool partial = kinds && kinds[j0 / MASK_TILE] != TILE_FULL, cut = hides_some || partial || at_edge;
        uint32_t shown[TILES];
        if (FULL)
            find_shown_rows<TILES, BLOCK>(p, w, partial, w.row0 + warp_row, j0, shown);
        cp_async_wait<0>();
        if (cut)
            clean_tile<T, D, BLOCK, THREADS, APART>(sv, bad + stage);
        if (hidden && threadIdx.x < 32)
            mark_hidden<BLOCK, APART>(pages, bad + stage);
        __syncthreads();
        if (next < w.end)
            load_keys<T, D, FULL, WARPS, TILES, BLOCK>(p, w, k, v, next, next_pages, sq, stage ^ 1);
        cp_async_commit();
        if (paged) {
            pages = next_pages;
            next_pages = find_pages<BLOCK>(p, w.c.n, j0 + 2 * BLOCK, w.keys_end);
        }
        float s[TILES][BLOCK / 8][4];
        product_rows<T, D, TILES, BLOCK>(s, sq + warp_row * t::pitch, sk, tf32, whole_steps<T, D>(p, w.c),
                                         sq + layout::joins);
        if (rich)
            score_full<T, TILES, BLOCK, APART>(p, w, !at_edge && w.row0 + ROWS <= w.c.sq * p.pack, cut, shown,
                                               w.row0 + warp_row, j0, bad + stage, s);
        else if (cut)
            mask_lean<TILES, BLOCK, APART>(p, w, w.row0 + warp_row, j0, bad + stage, s);
        online_softmax<T, WIDTH, TILES, BLOCK>(&state, c, s, o);
        if (FULL && p.drops)
            drop<TILES, BLOCK>(p, w, dropout, w.row0 + warp_row, j0, s);
        product_columns<T, D, TILES, BLOCK>(o, s, sv, tf32,
                                            few || (FULL && cut && few_are_left<T, TILES, BLOCK>(p, s)));
        if (cut) {
            __syncthreads();
            for (int x = threadIdx.x; x < BLOCK; x += THREADS)
                bad[x * APART + stage] = 0; /* marked again two steps on, with a barrier between */
        }
    }
    cp_async_wait<0>();
    store_rows<T, WIDTH, TILES>(p, w, c, state, o, w.row0 + warp_row, share<T, D>::part() * WIDTH);
}

#include "cuda/attention/sm80/decode.cuh"

#include "cuda/attention/sm80/byte_tiles.cuh"

#define run_lean(T, D, WARPS, OWN, BLOCK)                                                                              \
    attention_forward<T, D, false, WARPS, sm80_tiles(sizeof(T), D, WARPS, OWN), BLOCK>(p)
#define run_full(T, D, WARPS, OWN, BLOCK)                                                                              \
    attention_forward<T, D, true, WARPS, sm80_tiles(sizeof(T), D, WARPS, OWN), BLOCK>(p)
#define run_decode(T, D, WARPS, OWN, BLOCK)                                                                            \
    attention_decode<T, D, WARPS, sm80_decode_stages(sizeof(T), D), BLOCK, false>(p)
#define run_paged(T, D, WARPS, OWN, BLOCK)                                                                             \
    attention_decode<T, D, WARPS, sm80_decode_stages(sizeof(T), D), BLOCK, true>(p)
#define run_bytes(T, D, WARPS, OWN, BLOCK) attention_bytes<T, D, WARPS, BLOCK, false>(p)
#define run_bytefull(T, D, WARPS, OWN, BLOCK) attention_byte_tiles<T, D, WARPS, BLOCK>(p)
#define run_bytepages(T, D, WARPS, OWN, BLOCK) attention_bytes<T, D, WARPS, BLOCK, true>(p)
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ attention_params p) {    \
        wait_for_earlier_grid();                                                                                       \
        run_##variant(dtype, dim, warps, own, block);                                                                  \
    }

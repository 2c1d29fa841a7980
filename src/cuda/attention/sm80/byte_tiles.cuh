/* SPDX-License-Identifier: Apache-2.0
 * Attention forward for many queries of keys of 8 bits (HEDDLE_E4M3), with every option, in pages or not. Part of attention/sm80/fwd.cu.
 *
 * As attention_forward there, but for how a step's keys come to be tiles of 16 bits: each thread has places of its own for the bytes that it
 * sends for. It takes them back, widens them into rows of the tiles and sends for the next step's at once, as nobody else looks at these
 * places; so they need be there once. Every e4m3 is a number of 16 bits: nothing is rounded, and the scales come to scores and sums in
 * float32. */
#ifndef HEDDLE_CUDA_ATTENTION_BYTE_TILES_CUH
#define HEDDLE_CUDA_ATTENTION_BYTE_TILES_CUH

#include "cuda/attention/sm80/bytes.cuh"

template <typename T, int D, int WARPS, int BLOCK> struct byte_tiles {
    static constexpr int threads = WARPS * 32, rows = WARPS * 16;
    static constexpr int chunks = D / 16, step = threads / chunks,
                         each = BLOCK / step; /* of 16 bytes: in a row; of a thread */
    static constexpr int k = rows * tile<T, D>::pitch, v = k + BLOCK * tile<T, D>::pitch;
    static constexpr int bytes_k = v + BLOCK * tile<T, D>::pitch, bytes_v = bytes_k + BLOCK * D;
    static constexpr int bytes = bytes_v + BLOCK * D;
    static_assert(bytes == sm80_byte_tiles_bytes(D, rows, BLOCK), "as the plan counts");
    static_assert(threads % chunks == 0 && BLOCK % step == 0 && BLOCK <= rows, "threads fill whole rows");
};

/* This thread's bytes of the keys from j0 on; those outside of begin .. end-1, and in no page, are zeros. pages: as find_pages has them. */
template <typename layout, int D>
INLINE void send_for_bytes(const attention_params &p, uint32_t to, const uint8_t *tensor, const heddle_strides &s,
                           int j0, int pages, const forward_work &w, int width, bool vector) {
    const int row = threadIdx.x / layout::chunks, column = threadIdx.x % layout::chunks * 16;
    to += threadIdx.x * 16;
#pragma unroll
    for (int x = 0; x < layout::each; x++) {
        const int at = row + x * layout::step, j = j0 + at;
        int page = 0;
        const uint8_t *from = tensor + j * s.s;
        if (p.page_bits) {
            page = __shfl_sync(ALL_LANES, pages, at / PAGE_ROWS);
            from = row_in_page(p, tensor, s, page, j);
        }
        const bool there = page >= 0 && j >= w.keys_begin && j < w.keys_end && column < width;
        if (vector)
            cp_async16(to + x * layout::threads * 16, there ? from + column : tensor, there ? 16 : 0);
        else
            store_shared16(to + x * layout::threads * 16,
                           load_elements(there ? from + column : tensor, there ? width - column : 0));
    }
}

/* The bytes that have come, as rows of a tile. Of eight lanes side by side four store the second half of a chunk first, so that all banks
 * are used. */
template <typename T, int D, typename layout> INLINE void widen_own(uint32_t from, uint32_t to) {
    const int row = threadIdx.x / layout::chunks, chunk = threadIdx.x % layout::chunks;
    const uint32_t swap = chunk & 4 ? 16 : 0;
    from += threadIdx.x * 16;
    to += row * tile<T, D>::pitch + chunk * 32;
#pragma unroll
    for (int x = 0; x < layout::each; x++) {
        const uint4 bytes = load_shared16(from + x * layout::threads * 16);
        const bool nan = has_nan_bytes(bytes);
        uint4 low = widen_bytes(bytes.x, bytes.y, false), high = widen_bytes(bytes.z, bytes.w, false);
        if (nan) {
            low = widen_bytes(bytes.x, bytes.y, true);
            high = widen_bytes(bytes.z, bytes.w, true);
        }
        const uint32_t at = to + x * layout::step * tile<T, D>::pitch;
        store_shared16(at + swap, swap ? high : low);
        store_shared16(at + (16 - swap), swap ? low : high);
    }
}

template <typename T, int D, int WARPS, int BLOCK> INLINE void attention_byte_tiles(const attention_params &p) {
    typedef byte_tiles<T, D, WARPS, BLOCK> layout;
    typedef tile<T, D> t;
    constexpr int THREADS = layout::threads, ROWS = layout::rows, APART = t::pitch / 4;
    extern __shared__ __align__(128) char shared[];
    const uint32_t sq = shared_address(shared), sk = sq + layout::k, sv = sq + layout::v;
    int *bad = (int *)(shared + D * (int)sizeof(T)); /* behind the rows of Q, two to a row */
    const forward_work w = find_work<ROWS, BLOCK>(p, p.tiles_q);
    if (w.row0 >= w.c.all_sq * p.pack)
        return;
    const int64_t head_k = w.y * p.pack / p.group, scale_at = w.c.n * p.a.hk + head_k;
    const bool paged = p.page_bits;
    const uint8_t *k =
        (const uint8_t *)p.t.k + row_at(p.a.k_stride, paged ? 0 : w.c.n, head_k, paged ? 0 : w.c.first_k);
    const uint8_t *v =
        (const uint8_t *)p.t.v + row_at(p.a.v_stride, paged ? 0 : w.c.n, head_k, paged ? 0 : w.c.first_k);
    const T *q = (const T *)p.t.q + row_at(p.a.q_stride, w.c.n, w.y * p.pack, w.c.first_q);
    const float k_scale = p.k_scale ? p.k_scale[scale_at] : 1.0f, v_scale = p.v_scale ? p.v_scale[scale_at] : 1.0f;
    const int d = (int)p.a.d, own_row = w.row0 + threadIdx.x / 32 * 16;
    const uint32_t own_q = sq + threadIdx.x / 32 * 16 * t::pitch;
    auto send = [&](int j0, int pages) {
        send_for_bytes<layout, D>(p, sq + layout::bytes_k, k, p.a.k_stride, j0, pages, w, d, p.vectors & VECTOR_K);
        send_for_bytes<layout, D>(p, sq + layout::bytes_v, v, p.a.v_stride, j0, pages, w, (int)p.a.dv,
                                  p.vectors & VECTOR_V);
        cp_async_commit();
    };

    for (int x = threadIdx.x; x < ROWS * t::chunks; x += THREADS) {
        const int row = x / t::chunks, r = w.row0 + row, i = r / p.pack;
        const bool there = i < w.c.sq;
        const T *from = there ? q + (r - i * p.pack) * p.a.q_stride.h + i * p.a.q_stride.s : q;
        load_chunk(sq + row * t::pitch + x % t::chunks * 16, from, x % t::chunks, d, there, p.vectors & VECTOR_Q);
    }
    softmax_state<1> state;
    float o[1][D / 8][4];
    state.max[0][0] = state.max[0][1] = -CUDART_INF_F;
    state.sum[0][0] = state.sum[0][1] = 0.0f;
    clear<1, D / 8>(o);
    for (int x = threadIdx.x; x < 2 * BLOCK; x += THREADS)
        bad[x / 2 * APART + x % 2] = 0;
    const dropout_state dropout = make_dropout(p);
    const bool rich = p.rich, hides_some = rich && hides_elements(p, p.seen_by_queries);
    const float c = rich ? LOG2E : p.scale_log2;
    const uint8_t *const kinds = find_kinds(p.seen_by_queries, w.c.n, w.y, w.row0 / ROWS);
    const int i0 = w.row0 / p.pack, i1 = min(w.c.sq, (w.row0 + ROWS - 1) / p.pack + 1);
    int pages = 0, next_pages = 0; /* of this step, and of the next */
    const int first = seek_column(kinds, w.begin, w.end);
    if (paged) {
        pages = find_pages<BLOCK>(p, w.c.n, first, w.keys_end);
        next_pages = find_pages<BLOCK>(p, w.c.n, first + BLOCK, w.keys_end);
    }
    if (first < w.end)
        send(first, pages);
    int stage = 0, next;
    for (int j0 = first; j0 < w.end; j0 = next, stage ^= 1) {
        next = seek_column(kinds, j0 + BLOCK, w.end);
        const bool hidden = paged && __any_sync(ALL_LANES, pages < 0);
        const bool at_edge = hidden || j0 < w.keys_begin || j0 + BLOCK > w.keys_end || j0 + BLOCK - 1 > i0 + w.c.hi ||
                             j0 < i1 - 1 + w.c.lo;
        const bool partial = kinds && kinds[j0 / MASK_TILE] != TILE_FULL, cut = hides_some || partial || at_edge;
        uint32_t shown[1];
        find_shown_rows<1, BLOCK>(p, w, partial, own_row, j0, shown);
        cp_async_wait<0>();
        __syncthreads(); /* nobody reads the tiles of the step before */
        widen_own<T, D, layout>(sq + layout::bytes_k, sk);
        widen_own<T, D, layout>(sq + layout::bytes_v, sv);
        if (next < w.end)
            send(next, next_pages);
        __syncthreads();
        if (cut) {
            clean_tile<T, D, BLOCK, THREADS, APART>(sv, bad + stage);
            if (hidden && threadIdx.x < 32)
                mark_hidden<BLOCK, APART>(pages, bad + stage);
            __syncthreads();
        }
        if (paged) {
            pages = next_pages;
            next_pages = find_pages<BLOCK>(p, w.c.n, j0 + 2 * BLOCK, w.keys_end);
        }
        float s[1][BLOCK / 8][4];
        product_rows<T, D, 1, BLOCK>(s, own_q, sk, false, 0, 0);
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[0][y][e] *= k_scale;
        if (rich)
            score_full<T, 1, BLOCK, APART>(p, w, !at_edge && w.row0 + ROWS <= w.c.sq * p.pack, cut, shown, own_row, j0,
                                           bad + stage, s);
        else if (cut)
            mask_lean<1, BLOCK, APART>(p, w, own_row, j0, bad + stage, s);
        online_softmax<T, D, 1, BLOCK>(&state, c, s, o);
        if (p.drops)
            drop<1, BLOCK>(p, w, dropout, own_row, j0, s);
        product_columns<T, D, 1, BLOCK>(o, s, sv, false, false);
        if (cut) {
            __syncthreads();
            for (int x = threadIdx.x; x < BLOCK; x += THREADS)
                bad[x * APART + stage] = 0; /* marked again two steps on, with a barrier between */
        }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int y = 0; y < D / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            o[0][y][e] *= v_scale;
    store_rows<T, D, 1>(p, w, c, state, o, own_row, 0);
}

#endif

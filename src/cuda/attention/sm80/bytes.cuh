/* SPDX-License-Identifier: Apache-2.0
 * Attention forward for few queries of keys of 8 bits (HEDDLE_E4M3). Part of attention/sm80/fwd.cu.
 *
 * As decode.cuh, whose blocks, merge and results these are: a warp has its own tiles. What differs is how a tile gets to the tensor cores. The
 * ring holds bytes; each lane takes those back that it has sent for, widens them, and stores them as rows of a tile of 16 bits, which K and
 * V use in turn and from which the products read. So the ring's place is free again before the product, and no other lane has to have
 * finished with it. Every e4m3 is a number of 16 bits: nothing is rounded, and the scales come to scores and sums in float32. */
#ifndef HEDDLE_CUDA_ATTENTION_BYTES_CUH
#define HEDDLE_CUDA_ATTENTION_BYTES_CUH

#include "cuda/attention/sm80/decode.cuh"
#include "cuda/attention/widen.cuh"

#define BYTE_ROWS 8 /* of a tile that a lane has a column of 16 bytes of */

template <int D, int WARPS, int BLOCK> struct bytes_shared {
    static constexpr int chunks = D / 16; /* of 16 bytes in a row */
    static constexpr int tile_bytes = BLOCK * D;
    static constexpr int stages = SM80_BYTES_STAGES;
    static constexpr int wide = 2 * stages * tile_bytes; /* behind the ring: K, V, K, V ... */
    static constexpr int warp_bytes = wide + BLOCK * D * 2;
    static constexpr int ring = 16 * tile<bf16, D>::pitch;
    static constexpr int bad = ring + WARPS * warp_bytes;
    static constexpr int bytes = bad + WARPS * BLOCK * 4;
    static_assert(bytes == sm80_bytes_bytes(D, WARPS, 16, BLOCK), "as the plan counts");
    static_assert(BLOCK == BYTE_ROWS * (32 / chunks) && BLOCK % PAGE_ROWS == 0, "a lane has rows of one group");
    static constexpr int sums = WARPS * 16 * (D + 4) * 4;
    static_assert(sums + 2 * WARPS * 16 * 4 <= WARPS * warp_bytes, "the rings hold the sums");
};

/* The lane's column of chunks, and the first of its rows, every second one of a group of 16. Eight lanes side by side have four columns of two
 * rows that follow each other: as chunks of 16 bits, of which each makes two, they lie in all banks (b_tile). */
template <int D> INLINE int byte_chunk(int lane) {
    return (lane & 3) | (lane >> 3 & (D / 64 - 1)) << 2;
}
template <int D> INLINE int byte_row(int lane) {
    const int group = lane / (D / 8);
    return group * PAGE_ROWS + (lane >> 2 & 1);
}

/* This lane's part of a tile. Of its rows the first `count` of the group's 16 are there, the others become zero; `from`: the first of them. */
template <int D>
INLINE void load_bytes(uint32_t to, const uint8_t *from, int64_t stride, int count, int width, bool vector) {
    const int lane = threadIdx.x % 32, odd = lane >> 2 & 1;
    const int there = width > 0 ? count - odd : 0;
    to += lane * 16;
    if (vector) {
#pragma unroll
        for (int x = 0; x < BYTE_ROWS; x++)
            cp_async16(to + x * 512, from + 2 * x * stride, 2 * x < there ? 16 : 0);
    } else {
#pragma unroll 1
        for (int x = 0; x < BYTE_ROWS; x++)
            store_shared16(to + x * 512, load_elements(from + 2 * x * stride, 2 * x < there ? width : 0));
    }
}

/* The lane's part of a tile of the ring as rows of 16 bits. */
template <int D> INLINE void widen_tile(uint32_t from, uint32_t to) {
    const int lane = threadIdx.x % 32, chunk = 2 * byte_chunk<D>(lane), first = byte_row<D>(lane);
    to += chunk / 8 * 128;
#pragma unroll
    for (int x = 0; x < BYTE_ROWS; x++) {
        const int row = first + 2 * x;
        const uint4 bytes = load_shared16(from + x * 512 + lane * 16);
        const uint32_t at = to + row * (2 * D);
        const bool nan = has_nan_bytes(bytes);
        uint4 low = widen_bytes(bytes.x, bytes.y, false), high = widen_bytes(bytes.z, bytes.w, false);
        if (nan) {
            low = widen_bytes(bytes.x, bytes.y, true);
            high = widen_bytes(bytes.z, bytes.w, true);
        }
        store_shared16(at + ((chunk ^ row) & 7) * 16, low);
        store_shared16(at + (((chunk + 1) ^ row) & 7) * 16, high);
    }
}

template <typename T, int D, int WARPS, int BLOCK, bool PAGED> INLINE void attention_bytes(const attention_params &p) {
    typedef bytes_shared<D, WARPS, BLOCK> layout;
    typedef tile<T, D> t;
    constexpr int STAGES = layout::stages;
    extern __shared__ __align__(128) char shared[];
    const forward_work w = find_decode_work(p, BLOCK);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = min(16, w.c.all_sq * p.pack);
    if (rows == 0)
        return;
    if (p.key_shares > 1 && w.begin >= w.end) {
        store_nothing(p, w);
        return;
    }
    const int64_t head_k = w.y * p.pack / p.group, scale_at = w.c.n * p.a.hk + head_k;
    const int column = byte_chunk<D>(lane) * 16, group = byte_row<D>(lane) / PAGE_ROWS * PAGE_ROWS, odd = lane >> 2 & 1;
    const int64_t n = PAGED ? 0 : w.c.n, first_k = PAGED ? 0 : w.c.first_k;
    const uint8_t *k = (const uint8_t *)p.t.k + row_at(p.a.k_stride, n, head_k, first_k) + column,
                  *v = (const uint8_t *)p.t.v + row_at(p.a.v_stride, n, head_k, first_k) + column;
    const T *q = (const T *)p.t.q + row_at(p.a.q_stride, w.c.n, w.y * p.pack, w.c.first_q);
    const float k_scale = p.k_scale ? p.k_scale[scale_at] : 1.0f, v_scale = p.v_scale ? p.v_scale[scale_at] : 1.0f;
    const uint32_t sq = shared_address(shared), ring = sq + layout::ring + warp * layout::warp_bytes,
                   wide = ring + layout::wide;
    int *bad = (int *)(shared + layout::bad) + warp * BLOCK;
    auto ask = [&](int j0) {
        const int j = j0 + group;
        return PAGED && j < w.keys_end ? entry_at(p, w.c.n, j) : -1;
    };
    auto load = [&](uint32_t to, const uint8_t *from, int width, bool vector, const heddle_strides &s, int j0,
                    int entry) {
        const int j = j0 + group, page = page_of(p, entry);
        if (j0 < w.end && PAGED)
            load_bytes<D>(to, from + (page * s.b + ((j & ((1 << p.page_bits) - 1)) + odd) * s.s), s.s,
                          page < 0 ? 0 : w.keys_end - j, width, vector);
        else if (j0 < w.end)
            load_bytes<D>(to, from + (j + odd) * s.s, s.s, w.keys_end - j, width, vector);
        cp_async_commit();
    };
    auto load_k = [&](int j0, int stage, int entry, bool vector) {
        load(ring + 2 * stage * layout::tile_bytes, k, (int)p.a.d - column, vector || (p.vectors & VECTOR_K),
             p.a.k_stride, j0, entry);
    };
    auto load_v = [&](int j0, int stage, int entry, bool vector) {
        load(ring + (2 * stage + 1) * layout::tile_bytes, v, (int)p.a.dv - column, vector || (p.vectors & VECTOR_V),
             p.a.v_stride, j0, entry);
    };

    for (int x = threadIdx.x; x < 16 * t::chunks; x += WARPS * 32) {
        const int row = x / t::chunks, i = row / p.pack;
        const bool there = i < w.c.sq;
        const T *from = there ? q + (row - i * p.pack) * p.a.q_stride.h + i * p.a.q_stride.s : q;
        load_chunk(sq + row * t::pitch + x % t::chunks * 16, from, x % t::chunks, (int)p.a.d, there,
                   p.vectors & VECTOR_Q);
    }
    const int first = w.begin + warp * BLOCK;
    int entry = ask(first), hides = 0; /* a bit for each tile under way: keys of it are in no page */
    auto note_hidden = [&](int j0, int entry) {
        const bool hidden = PAGED && j0 + group < w.keys_end && page_of(p, entry) < 0;
        hides = hides >> 1 | (__any_sync(ALL_LANES, hidden) ? 1 << (STAGES - 1) : 0);
    };
#pragma unroll 1
    for (int x = 0; x < STAGES; x++) {
        const int j0 = first + x * WARPS * BLOCK, now = entry;
        entry = ask(j0 + WARPS * BLOCK);
        load_k(j0, x, now, false);
        load_v(j0, x, now, false);
        if (PAGED)
            note_hidden(j0, now);
    }
    softmax_state<1> state;
    float o[1][D / 8][4];
    state.max[0][0] = state.max[0][1] = -CUDART_INF_F;
    state.sum[0][0] = state.sum[0][1] = 0.0f;
    clear<1, D / 8>(o);
    const dropout_state dropout = make_dropout(p);
    const bool rich = p.rich;
    const float c = rich ? LOG2E : p.scale_log2;
    const int last_row = (rows - 1) / p.pack;
    let_next_grid_start();
    cp_async_wait<2 * STAGES - 1>(); /* Q and the first K */
    __syncthreads();
    /* The tile in a stage; the next one takes its place. whole, a constant: all see all of it, and nothing is asked for but that. */
    auto take = [&](int j0, int stage, bool hidden, bool whole) {
        const uint32_t at = ring + 2 * stage * layout::tile_bytes;
        const int next = j0 + STAGES * WARPS * BLOCK, next_entry = entry;
        entry = ask(next + WARPS * BLOCK);
        float s[1][BLOCK / 8][4];
        cp_async_wait<2 * STAGES - 1>();
        __syncwarp(); /* all have read V of the tile before */
        widen_tile<D>(at, wide);
        load_k(next, stage, next_entry, whole);
        __syncwarp();
        product_rows<T, D, 1, BLOCK, 1>(s, sq, wide, false, 0);
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[0][y][e] *= k_scale;
        cp_async_wait<2 * STAGES - 1>();
        __syncwarp(); /* and K of this one */
        widen_tile<D>(at + layout::tile_bytes, wide);
        load_v(next, stage, next_entry, whole);
        __syncwarp();
        if (!whole) {
            clean_tile_warp<T, D, BLOCK>(wide, bad);
            __syncwarp();
            if (hidden)
                mark_hidden<BLOCK>(find_pages<BLOCK>(p, w.c.n, j0, w.keys_end), bad);
            __syncwarp();
            const uint32_t all[1] = {ALL_LANES}; /* a mask has no map here */
            if (rich)
                score_full<T, 1, BLOCK>(p, w, false, true, all, 0, j0, bad, s);
            else
                mask_lean<1, BLOCK>(p, w, 0, j0, bad, s);
        }
        online_softmax<T, D, 1, BLOCK>(&state, c, s, o);
        if (!whole && p.drops)
            drop<1, BLOCK>(p, w, dropout, 0, j0, s);
        product_columns<T, D, 1, BLOCK, 1>(o, s, wide, false, false);
        if (PAGED)
            note_hidden(next, next_entry);
    };
    const bool lean = !rich && (p.vectors & VECTOR_K) && (p.vectors & VECTOR_V);
    int stage = 0;
    for (int j0 = first; j0 < w.end; j0 += WARPS * BLOCK, stage = stage + 1 == STAGES ? 0 : stage + 1) {
        const bool hidden = PAGED && (hides & 1);
        if (lean && !hidden && j0 >= w.keys_begin && j0 + BLOCK <= w.keys_end && j0 + BLOCK - 1 <= w.c.hi &&
            j0 >= last_row + w.c.lo)
            take(j0, stage, false, true);
        else
            take(j0, stage, hidden, false);
    }
    cp_async_wait<0>();
#pragma unroll
    for (int y = 0; y < D / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            o[0][y][e] *= v_scale;
    merge_warps<T, D, WARPS>(p, w, c, state, o[0], (float *)(shared + layout::ring),
                             (float *)(shared + layout::ring + layout::sums));
}

#endif

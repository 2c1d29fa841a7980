/* SPDX-License-Identifier: Apache-2.0
 * Attention forward for few queries (decoding): K and V are read once, at the memory's speed. Part of attention/sm80/fwd.cu.
 *
 * A block owns the at most 16 rows of a group of heads (query i of head y·pack + row%pack, i = row/pack) and a share of the keys. Its
 * warps take tiles of BLOCK keys in turn, each through a ring of its own, STAGES tiles of K and of V: nobody waits for anybody until
 * the warps' sums are merged at the end. A slot is filled again as soon as it has been read, so that nearly all of the shared memory
 * is on its way all the time. Rows of the ring are swizzled (along_row in attention/product.cuh). */
#ifndef HEDDLE_CUDA_ATTENTION_DECODE_CUH
#define HEDDLE_CUDA_ATTENTION_DECODE_CUH

#include "cuda/attention/product.cuh"
#include "cuda/attention/store.cuh"

template <typename T, int D, int WARPS, int STAGES, int BLOCK> struct decode_shared {
    static constexpr int rows = 16;
    static constexpr int tile_bytes = BLOCK * D * (int)sizeof(T);
    static constexpr int ring_bytes = 2 * STAGES * tile_bytes; /* K, V, K, V ... */
    static constexpr int ring = rows * tile<T, D>::pitch;
    static constexpr int bad = ring + WARPS * ring_bytes; /* of the warp's tile: keys whose value is not finite */
    static constexpr int bytes = bad + WARPS * BLOCK * 4;
    static_assert(bytes == sm80_decode_bytes(sizeof(T), D, WARPS, rows, BLOCK), "as the plan counts");
    /* At the end the rings hold o of each warp and, behind it, its maxima and sums. */
    static constexpr int sums = WARPS * rows * (D + 4) * 4;
    static_assert(sums + 2 * WARPS * rows * 4 <= WARPS * ring_bytes, "the rings hold the sums");
};

/* The keys of one block, and all that the sequence shows its rows. */
INLINE forward_work find_decode_work(const attention_params &p, int block) {
    forward_work w;
    const int64_t units = p.a.h / p.pack, unit = blockIdx.x / units;
    w.y = blockIdx.x % units; /* heads that lie side by side are read at the same time */
    w.key_share = (int)(unit % p.key_shares);
    w.c = find_place(p, unit / p.key_shares);
    w.row0 = 0;
    w.keys_begin = w.keys_end = 0;
    if (w.c.sq > 0) {
        w.keys_begin = max(0, min(w.c.lo, w.c.sk));
        w.keys_end = max(0, min(w.c.sq + w.c.hi, w.c.sk));
    }
    const int first = w.keys_begin / block, blocks = max(0, (w.keys_end + block - 1) / block - first);
    const int64_t each = w.key_share;
    w.begin = (first + (int)(blocks * each / p.key_shares)) * block;
    w.end = min(w.keys_end, (first + (int)(blocks * (each + 1) / p.key_shares)) * block);
    return w;
}

/* A lane's part of tiles of K or V: a column of chunks of PAGE_ROWS rows, which are in one page where keys are in pages. */
template <typename T, int D, int ROWS> struct lane_rows {
    static constexpr int chunks = tile<T, D>::chunks < 32 ? tile<T, D>::chunks : 32; /* that a warp has side by side */
    static_assert(ROWS == PAGE_ROWS * (32 / chunks), "a lane has whole groups of rows");
    const T *tensor; /* the first row, and the lane's first column */
    int width;       /* columns from there on */
};

/* The first of its rows in a tile. */
template <typename T, int D, int ROWS> INLINE int first_row(void) {
    return (int)threadIdx.x % 32 / lane_rows<T, D, ROWS>::chunks * PAGE_ROWS;
}

template <typename T, int D, int ROWS>
INLINE lane_rows<T, D, ROWS> find_rows(const void *tensor, int64_t first, int64_t width) {
    const int column = (int)threadIdx.x % lane_rows<T, D, ROWS>::chunks * (16 / (int)sizeof(T));
    return {(const T *)tensor + first + column, (int)width - column};
}

/* A tile by a warp: of this lane's rows, which begin `at` elements into the tensor, the first `count` are there; the others become zero. */
template <typename T, int D, int ROWS>
INLINE void load_rows(uint32_t to, const lane_rows<T, D, ROWS> &r, bool vector, int64_t at, int64_t stride, int count) {
    constexpr int CHUNKS = lane_rows<T, D, ROWS>::chunks, EACH = 16 / (int)sizeof(T), PITCH = D * (int)sizeof(T);
    to += first_row<T, D, ROWS>() * PITCH + (int)threadIdx.x % CHUNKS * 16;
#pragma unroll
    for (int y = 0; y < tile<T, D>::chunks; y += CHUNKS) {
        const T *from = r.tensor + at + y * EACH;
        const int width = r.width - y * EACH, rows = width > 0 ? count : 0;
        if (vector) {
#pragma unroll
            for (int x = 0; x < PAGE_ROWS; x++, from += stride)
                cp_async16((to ^ x % 8 * 16) + y * 16 + x * PITCH, from, x < rows ? 16 : 0);
        } else {
#pragma unroll 1
            for (int x = 0; x < PAGE_ROWS; x++, from += stride)
                store_shared16((to ^ x % 8 * 16) + y * 16 + x * PITCH, load_elements(from, x < rows ? width : 0));
        }
    }
}

/* As clean_tile, for a warp's tile. */
template <typename T, int D, int ROWS> INLINE void clean_tile_warp(uint32_t at, int *bad) {
    typedef tile<T, D> t;
    const int lane = threadIdx.x % 32;
    for (int x = lane; x < ROWS; x += 32)
        bad[x] = 0;
    __syncwarp();
    for (int x = lane; x < ROWS * t::chunks; x += 32) {
        const int row = x / t::chunks;
        const uint32_t to = at + x * 16;
        if (has_nonfinite(load_shared16(to), T())) {
            store_shared16(to, make_uint4(0, 0, 0, 0));
            bad[row] = MARK_NAN;
        }
    }
}

/* One row of o and lse, or of this share's part of them: four columns from `column` on, and lse where that is 0. */
template <typename T>
INLINE void store_decoded(const attention_params &p, const forward_work &w, int row, int column, float4 o, float max,
                          float c, float sum) {
    const int i = row / p.pack;
    const int64_t head = w.y * p.pack + row % p.pack, at = lse_at(p, w.c, head, i);
    if (i >= w.c.all_sq)
        return;
    row_end end = end_query<T>(p, w, head, i, max, c, &sum);
    if (sum == 0.0f)
        o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int width = (int)p.a.dv;
    if (p.key_shares > 1) {
        if (column == 0)
            store_part(p, w.key_share, at, max, end.part);
        float *to = p.part_o + (w.key_share * p.lse_rows + at) * p.a.dv;
        const bool aligned = (size_t)to % 8 == 0;
        pair_store<float>::run(to, column, width, o.x * end.by, o.y * end.by, aligned);
        pair_store<float>::run(to, column + 2, width, o.z * end.by, o.w * end.by, aligned);
        return;
    }
    const int64_t to = row_at(p.a.o_stride, w.c.n, head, w.c.first_q + i);
    if (p.adds) {
        const row_shares s = join_before(p, at, &end.lse);
        const float found[4] = {o.x, o.y, o.z, o.w};
        float *sum_of = (float *)p.t.o + to + column;
        for (int e = 0; e < min(4, width - column); e++)
            sum_of[e] = fmaf(s.keep >= 0.0f ? sum_of[e] : 0.0f, s.keep, found[e] * (end.by * s.take));
    } else {
        T *row_of = (T *)p.t.o + to;
        const bool aligned = (size_t)row_of % (2 * sizeof(T)) == 0;
        pair_store<T>::run(row_of, column, width, o.x * end.by, o.y * end.by, aligned);
        pair_store<T>::run(row_of, column + 2, width, o.z * end.by, o.w * end.by, aligned);
    }
    if (p.t.lse && column == 0)
        ((float *)p.t.lse)[at] = end.lse;
}

/* The warps' sums through shared memory, always in the same order. c: what S takes to units of log2. */
template <typename T, int D, int WARPS>
INLINE void merge_warps(const attention_params &p, const forward_work &w, float c, const softmax_state<1> &state,
                        float (*o)[4], float *parts, float *sums) {
    constexpr int PITCH = D + 4;
    float *tops = sums + WARPS * 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = min(16, w.c.all_sq * p.pack);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane / 4;
        const float sum = quad_sum(state.sum[0][half]);
        if (lane % 4 == 0) {
            sums[warp * 16 + row] = sum;
            tops[warp * 16 + row] = sum == 0.0f ? -CUDART_INF_F : state.max[0][half];
        }
        if (row < rows)
#pragma unroll
            for (int y = 0; y < D / 8; y++)
                *(float2 *)(parts + (warp * 16 + row) * PITCH + y * 8 + lane % 4 * 2) =
                    make_float2(o[y][2 * half], o[y][2 * half + 1]);
    }
    __syncthreads();
    for (int x = threadIdx.x; x < rows * (D / 4); x += WARPS * 32) {
        const int row = x / (D / 4), column = x % (D / 4) * 4;
        float top = -CUDART_INF_F, sum = 0.0f;
        float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int y = 0; y < WARPS; y++)
            top = fmaxf(top, tops[y * 16 + row]);
#pragma unroll
        for (int y = 0; y < WARPS; y++) {
            const float own = tops[y * 16 + row];
            row_scale r = scale_row(own, top, c);
            if (is_alone<T>(r))
                scale_alone(own, top, &r);
            const float by = own == -CUDART_INF_F ? 0.0f : r.shrink;
            const float4 part = *(const float4 *)(parts + (y * 16 + row) * PITCH + column);
            sum += sums[y * 16 + row] * by;
            all.x += part.x * by;
            all.y += part.y * by;
            all.z += part.z * by;
            all.w += part.w * by;
        }
        store_decoded<T>(p, w, row, column, all, top, c, sum);
    }
}

/* A share without keys: the combination leaves it out. */
INLINE void store_nothing(const attention_params &p, const forward_work &w) {
    for (int row = threadIdx.x; row < w.c.all_sq * p.pack; row += blockDim.x)
        store_part(p, w.key_share, lse_at(p, w.c, w.y * p.pack + row % p.pack, row / p.pack), -CUDART_INF_F, 0.0f);
}

/* PAGED: each lane has the page of its rows of a tile. What the table says of a tile is asked for when the one in front of it is sent for: the
 * address of a row waits for it. */
template <typename T, int D, int WARPS, int STAGES, int BLOCK, bool PAGED>
INLINE void attention_decode(const attention_params &p) {
    typedef decode_shared<T, D, WARPS, STAGES, BLOCK> layout;
    typedef tile<T, D> t;
    extern __shared__ __align__(128) char shared[];
    const forward_work w = find_decode_work(p, BLOCK);
    const int warp = threadIdx.x / 32, rows = min(16, w.c.all_sq * p.pack);
    if (rows == 0)
        return;
    if (p.key_shares > 1 && w.begin >= w.end) {
        store_nothing(p, w);
        return;
    }
    const int64_t head_k = w.y * p.pack / p.group;
    const lane_rows<T, D, BLOCK> k =
        find_rows<T, D, BLOCK>(p.t.k, row_at(p.a.k_stride, PAGED ? 0 : w.c.n, head_k, PAGED ? 0 : w.c.first_k), p.a.d);
    const lane_rows<T, D, BLOCK> v =
        find_rows<T, D, BLOCK>(p.t.v, row_at(p.a.v_stride, PAGED ? 0 : w.c.n, head_k, PAGED ? 0 : w.c.first_k), p.a.dv);
    const T *q = (const T *)p.t.q + row_at(p.a.q_stride, w.c.n, w.y * p.pack, w.c.first_q);
    const uint32_t sq = shared_address(shared), ring = sq + layout::ring + warp * layout::ring_bytes;
    int *bad = (int *)(shared + layout::bad) + warp * BLOCK;
    const bool tf32 = p.tf32, few = few_keys<T>(w.c, 0, w.c.sq);
    auto ask = [&](int j0) {
        const int j = j0 + first_row<T, D, BLOCK>();
        return PAGED && j < w.keys_end ? entry_at(p, w.c.n, j) : -1;
    };
    auto load = [&](uint32_t to, const lane_rows<T, D, BLOCK> &r, bool vector, const heddle_strides &s, int j0,
                    int entry) {
        const int j = j0 + first_row<T, D, BLOCK>(), page = page_of(p, entry);
        if (j0 < w.end && PAGED)
            load_rows<T, D, BLOCK>(to, r, vector, page * s.b + (j & ((1 << p.page_bits) - 1)) * s.s, s.s,
                                   page < 0 ? 0 : w.keys_end - j);
        else if (j0 < w.end)
            load_rows<T, D, BLOCK>(to, r, vector, j * s.s, s.s, w.keys_end - j);
        cp_async_commit();
    };
    auto load_k = [&](int j0, int stage, int entry, bool vector) {
        load(ring + 2 * stage * layout::tile_bytes, k, vector || (p.vectors & VECTOR_K), p.a.k_stride, j0, entry);
    };
    auto load_v = [&](int j0, int stage, int entry, bool vector) {
        load(ring + (2 * stage + 1) * layout::tile_bytes, v, vector || (p.vectors & VECTOR_V), p.a.v_stride, j0, entry);
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
        const bool hidden = PAGED && j0 + first_row<T, D, BLOCK>() < w.keys_end && page_of(p, entry) < 0;
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
        const uint32_t sk = ring + 2 * stage * layout::tile_bytes, sv = sk + layout::tile_bytes;
        const int next = j0 + STAGES * WARPS * BLOCK, next_entry = entry;
        entry = ask(next + WARPS * BLOCK);
        float s[1][BLOCK / 8][4];
        cp_async_wait<2 * STAGES - 1>();
        __syncwarp();
        product_rows<T, D, 1, BLOCK, 1>(s, sq, sk, tf32, whole_steps<T, D>(p, w.c));
        __syncwarp();
        load_k(next, stage, next_entry, whole);
        if (!whole) {
            /* V is needed before the scores are known */
            cp_async_wait<2 * STAGES - 1>();
            __syncwarp();
            clean_tile_warp<T, D, BLOCK>(sv, bad);
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
        cp_async_wait<2 * STAGES - 1>();
        __syncwarp();
        product_columns<T, D, 1, BLOCK, 1>(o, s, sv, tf32, few || (!whole && few_are_left<T, 1, BLOCK>(p, s)));
        __syncwarp();
        load_v(next, stage, next_entry, whole);
        if (PAGED)
            note_hidden(next, next_entry);
    };
    /* What whole tiles run lies in one piece: a warp alone on its scheduler waits for each jump. Rows over 512 bytes spill as it is. */
    const bool lean = layout::tile_bytes <= BLOCK * 512 && !rich && (p.vectors & VECTOR_K) && (p.vectors & VECTOR_V);
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
    merge_warps<T, D, WARPS>(p, w, c, state, o[0], (float *)(shared + layout::ring),
                             (float *)(shared + layout::ring + layout::sums));
}

#endif

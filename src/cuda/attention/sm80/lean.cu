/* SPDX-License-Identifier: Apache-2.0
 * Attention forward of 16 bits without options, for the tensor cores of Ampere and later: FlashAttention-2 (Dao 2023, algorithm 1).
 *
 * A block owns WARPS·TILES·16 rows (query i of head y·pack + row%pack, i = row/pack) and walks over the keys that they see, or over its
 * share of them. K and V of the next step are on their way during a step. */
#include "cuda/attention/sm80/lean.cuh"

template <typename T, int D, int WARPS, int TILES, int BLOCK, int PLACES>
INLINE void attention_lean(const attention_params &p) {
    typedef lean_shared<T, D, WARPS, TILES, BLOCK, PLACES> layout;
    constexpr int THREADS = WARPS * 32, ROWS = layout::rows, APART = layout::apart;
    extern __shared__ __align__(128) char shared[];
    const uint32_t sq = shared_address(shared);
    int *const bad = (int *)(shared + layout::marks);
    const forward_work w = find_work<ROWS, BLOCK>(p, p.tiles_q);
    if (w.row0 >= w.c.all_sq * p.pack)
        return;
    const int64_t head_k = p.pack == 1 && p.group > 1 ? (uint32_t)w.y / (uint32_t)p.group : w.y;
    const T *const k = (const T *)p.t.k + row_at(p.a.k_stride, w.c.n, head_k, w.c.first_k);
    const T *const v = (const T *)p.t.v + row_at(p.a.v_stride, w.c.n, head_k, w.c.first_k);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * TILES * 16, row0 = w.row0 + warp_row;
    if (w.begin < w.end) {
        load_rows<T, D, ROWS, THREADS>(p, w, sq);
        load_step<T, D, BLOCK, THREADS>(sq + layout::keys, k, p.a.k_stride.s, w.begin, w.keys_begin, w.keys_end,
                                        (int)p.a.d, p.vectors & VECTOR_K);
        if (PLACES > 1)
            load_step<T, D, BLOCK, THREADS>(sq + layout::values, v, p.a.v_stride.s, w.begin, w.keys_begin, w.keys_end,
                                            (int)p.a.dv, p.vectors & VECTOR_V);
    }
    cp_async_commit();
    softmax_state<TILES> state;
    float o[TILES][D / 8][4];
#pragma unroll
    for (int x = 0; x < TILES; x++) {
        state.max[x][0] = state.max[x][1] = -CUDART_INF_F;
        state.sum[x][0] = state.sum[x][1] = 0.0f;
    }
    clear<TILES, D / 8>(o);

    const sight block = find_sight(p, w, w.row0, min(ROWS, w.c.sq * p.pack - w.row0)),
                own = find_sight(p, w, row0, TILES * 16);
    const uint32_t q_at = sq + warp_row * tile<T, D>::pitch + a_lane<T, D>(lane);
    const uint32_t k_at = sq + layout::keys + b_tile<T, D, is_dense(D)>::rows_lane(lane);
    const uint32_t v_at = sq + layout::values + b_tile<T, D, is_dense(D)>::columns_lane(lane);
    int place = 0;
    for (int j0 = w.begin; j0 < w.end; j0 += BLOCK, place ^= PLACES - 1) {
        const bool cut = j0 < block.first || j0 + BLOCK - 1 > block.last, more = j0 + BLOCK < w.end;
        const bool now = !cut || (j0 + BLOCK > own.begin && j0 < own.end);
        const uint32_t here = place * layout::step_bytes, next = (place ^ (PLACES - 1)) * layout::step_bytes;
        bool marked = false;
        float s[TILES][BLOCK / 8][4];
        cp_async_wait<0>();
        if (PLACES == 1) { /* V comes while S is formed */
            __syncthreads();
            load_step<T, D, BLOCK, THREADS>(sq + layout::values, v, p.a.v_stride.s, j0, w.keys_begin, w.keys_end,
                                            (int)p.a.dv, p.vectors & VECTOR_V);
            cp_async_commit();
            if (now)
                form_scores<T, D, TILES, BLOCK>(s, q_at, k_at);
            cp_async_wait<0>();
        }
        if (cut)
            marked = __syncthreads_or(is_unclean<T, D, BLOCK, THREADS>(sq + layout::values + here));
        else
            __syncthreads();
        if (marked)
            clean_step<T, D, BLOCK, THREADS, APART>(sq + layout::values + here, bad);
        if (more) {
            load_step<T, D, BLOCK, THREADS>(sq + layout::keys + next, k, p.a.k_stride.s, j0 + BLOCK, w.keys_begin,
                                            w.keys_end, (int)p.a.d, p.vectors & VECTOR_K);
            if (PLACES > 1)
                load_step<T, D, BLOCK, THREADS>(sq + layout::values + next, v, p.a.v_stride.s, j0 + BLOCK, w.keys_begin,
                                                w.keys_end, (int)p.a.dv, p.vectors & VECTOR_V);
        }
        cp_async_commit();
        if (!cut) { /* without a branch in it */
            if (PLACES > 1)
                form_scores<T, D, TILES, BLOCK>(s, q_at, k_at + here);
            add_step<T, D, TILES, BLOCK>(p, s, &state, o, v_at + here);
        } else if (now) {
            if (PLACES > 1)
                form_scores<T, D, TILES, BLOCK>(s, q_at, k_at + here);
            if (marked || j0 < own.first || j0 + BLOCK - 1 > own.last)
                mask_step<TILES, BLOCK, APART>(p, w.c, row0, j0, marked, bad, s);
            add_step<T, D, TILES, BLOCK>(p, s, &state, o, v_at + here);
        }
    }
    cp_async_wait<0>();
    if (p.key_shares > 1 || p.adds || !(p.vectors & VECTOR_O))
        store_rows<T, D, TILES>(p, w, p.scale_log2, state, o, row0, 0);
    else
        store_whole<T, D, TILES>(p, w, state, o, row0);
}

#define PLACES_lean 2
#define PLACES_narrow 1
#define PLACES_least 1
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ attention_params p) {    \
        wait_for_earlier_grid();                                                                                       \
        attention_lean<dtype, dim, warps, sm80_tiles(sizeof(dtype), dim, warps, own), block, PLACES_##variant>(p);     \
    }

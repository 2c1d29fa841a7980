/* SPDX-License-Identifier: Apache-2.0
 * Of the forward for Hopper: the products S = Q·Kᵀ and P·V of a tile of keys, and the turns in which they are issued. Over d 256 K comes in
 * chunks of its columns, and each is free as soon as its part of S has been added. */
#ifndef HEDDLE_CUDA_ATTENTION_FWD_SCORES_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_FWD_SCORES_SM90_CUH

#include "cuda/attention/sm90/fwd_fetch.cuh"

/* The turns of the warpgroups to issue products. */
template <int GROUPS> INLINE void take_turn(int group) {
    if (GROUPS > 1)
        barrier_sync(1 + group, 2 * WARPGROUP);
}
template <int GROUPS> INLINE void pass_turn(int group) {
    if (GROUPS > 1)
        barrier_arrive(1 + (group + 1) % GROUPS, 2 * WARPGROUP);
}

/* A chunk of K of the n-th tile of keys is there; is not needed any more. */
template <typename layout> INLINE void await_chunk(uint32_t smem, unsigned n, unsigned c) {
    const unsigned m = n * layout::chunks + c;
    mbarrier_wait(smem + layout::barriers + layout::k_full + slot_of<layout::slots>(m) * 8, turn_of<layout::slots>(m));
}
template <typename layout> INLINE void release_chunk(uint32_t smem, unsigned n, unsigned c) {
    release(smem + layout::barriers + layout::k_empty + slot_of<layout::slots>(n * layout::chunks + c) * 8);
}
template <typename layout> INLINE void await_keys(uint32_t smem, unsigned n) {
#pragma unroll
    for (unsigned c = 0; c < layout::chunks; c++)
        await_chunk<layout>(smem, n, c);
}
template <typename layout> INLINE void release_keys(uint32_t smem, unsigned n) {
#pragma unroll
    for (unsigned c = 0; c < layout::chunks; c++)
        release_chunk<layout>(smem, n, c);
}

/* S = Q·Kᵀ of the n-th tile of keys, whose first chunk is there: issued. APART: the others may not be, and each is a product by itself. */
template <typename T, int D, int GROUPS, int BLOCK, bool APART>
INLINE void issue_scores(uint32_t q, uint32_t smem, unsigned n, float (*s)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    wgmma_fence();
#pragma unroll
    for (unsigned c = 0; c < layout::chunks; c++) {
        if (APART && c > 0) {
            await_chunk<layout>(smem, n, c);
            wgmma_fence();
        }
        warpgroup_rows<T, layout::chunk, BLOCK, layout::rows, BLOCK>(
            s, q + c * (layout::chunk / 64) * tile90<D, layout::rows>::strip,
            smem + layout::k + slot_of<layout::slots>(n * layout::chunks + c) * layout::chunk_bytes, c > 0);
        if (APART || c + 1 == layout::chunks)
            wgmma_commit();
    }
}

/* They are there, where P·V is the only product that was issued behind them. Chunks of K are free one by one. */
template <typename layout, int C = 0> INLINE void await_scores(uint32_t smem, unsigned n) {
    wgmma_wait<layout::chunks - C>();
    if (layout::is_wide)
        release_chunk<layout>(smem, n, C);
    if constexpr (C + 1 < layout::chunks)
        await_scores<layout, C + 1>(smem, n);
}

/* V of the n-th tile of keys is there; of a tile that is cut, it is clean. With one place for V, a warpgroup that has passed by the tile
 * before may be here while that is being cleaned, whose phase has the other parity: V of this one is not there then. */
template <typename layout> INLINE void await_values(uint32_t smem, unsigned n, bool cut, unsigned *cuts) {
    constexpr int STAGES = layout::stages;
    if (layout::is_wide)
        mbarrier_wait(smem + layout::barriers + V_FULL + slot_of<STAGES>(n) * 8, turn_of<STAGES>(n));
    mbarrier_wait(smem + layout::barriers +
                      (cut ? V_CLEAN + slot_of<STAGES>(*cuts) * 8 : V_FULL + slot_of<STAGES>(n) * 8),
                  turn_of<STAGES>(cut ? *cuts : n));
    *cuts += cut;
}

/* O += P·V of the n-th tile: issued. Of a kernel of 128 registers a thread ptxas takes no product of 256 columns. */
template <typename T, int BLOCK, int FULL, typename layout>
INLINE void issue_sums(uint32_t smem, unsigned n, uint32_t (*a)[4], float (*o)[4]) {
    wgmma_fence();
    warpgroup_columns<T, layout::part, BLOCK, BLOCK, makes_ahead<FULL>() ? 192 : 256>(
        o, a, smem + layout::v + slot_of<layout::stages>(n) * layout::tile_bytes);
    wgmma_commit();
}

/* The same, of the first half of the keys if half. The branch has to be seen to be uniform, or products are taken one by one (C7520), and
 * between products it counts as one more of them, for which a wait for what was issued before waits, too: full has none. */
template <typename T, int BLOCK, typename layout>
INLINE void issue_half_sums(uint32_t smem, unsigned n, bool half, uint32_t (*a)[4], float (*o)[4]) {
    constexpr int D = layout::part;
    const uint32_t v = smem + layout::v + slot_of<layout::stages>(n) * layout::tile_bytes;
    wgmma_fence();
    warpgroup_columns<T, D, BLOCK / 2, BLOCK>(o, a, v);
    if (BLOCK <= 64 || __shfl_sync(ALL_LANES, (int)!half, 0))
        warpgroup_columns<T, D, BLOCK / 2, BLOCK>(o, a + BLOCK / 32, v + BLOCK / 2 * 128);
    wgmma_commit();
}

#endif

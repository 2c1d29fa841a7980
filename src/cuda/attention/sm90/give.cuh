/* SPDX-License-Identifier: Apache-2.0
 * The gradient of a bias that is not summed over anything, from Hopper's backward in five products: dS of a step lies in shared memory for
 * dQ, as rows of queries, and warps beside the one that fetches bring it to memory. */
#ifndef HEDDLE_CUDA_ATTENTION_SM90_GIVE_CUH
#define HEDDLE_CUDA_ATTENTION_SM90_GIVE_CUH

#include "cuda/attention/give.cuh"
#include "cuda/attention/sm90/bwd_layout.cuh"

/* dbias of a head of a batch: query 0 and this tile's first key. */
template <typename T> INLINE T *find_dbias(const attention_params &p, const key_work &w, int x) {
    return (T *)p.t.dbias + row_at(p.a.dbias_stride, w.c.n, x, 0) + w.key0;
}

/* dS of all steps, by DS_THREADS threads of warps 1 and 2. */
template <typename T, int BLOCK, typename layout>
INLINE void give_steps(const attention_params &p, const crew &crew, char *shared) {
    const uint32_t smem = shared_address(shared);
    const key_options *const steps = (const key_options *)(shared + layout::steps);
    const int thread = (int)threadIdx.x - 32, chunk = thread % 16;
    unsigned count = 0;
    key_work w;
    for (unsigned turn = 0; find_keys<BLOCK, layout::with>(p, crew, turn, &w); turn++) {
        const int left = (int)p.a.sk - w.key0 - chunk * 8;
        for (bool more = w.steps > 0; more; count++) {
            const unsigned which = count & 1;
            mbarrier_wait(smem + layout::ds_full + which * 8, count >> 1 & 1);
            const key_options *const o = steps + count % KEY_STEPS;
            const int i0 = o->step & ~STEP_FLAGS, rows = min(BLOCK, (int)p.a.sq - i0);
            T *const to = find_dbias<T>(p, w, o->x) + i0 * p.a.dbias_stride.s + chunk * 8;
            const uint32_t from = smem + layout::ds + which * layout::ds_bytes + chunk / 8 * SM90_BIAS_BOX;
            more = !(o->step & STEP_LAST);
#pragma unroll 2
            for (int row = thread / 16; row < rows; row += DS_THREADS / 16)
                give_chunk(
                    to + row * p.a.dbias_stride.s, left,
                    load_shared16(from + row / 64 * layout::strip + row % 64 * 128 + ((chunk % 8 ^ (row & 7)) << 4)));
            release_each(smem + layout::ds_empty + which * 8);
        }
    }
}

/* Zeros in all rows that no step has, by warp 3. */
template <typename T, int BLOCK, typename layout> INLINE void give_zeros(const attention_params &p, const crew &crew) {
    const int lane = threadIdx.x % 32, chunk = lane % 16;
    key_work w;
    for (unsigned turn = 0; find_keys<BLOCK, layout::with>(p, crew, turn, &w); turn++) {
        const int left = (int)p.a.sk - w.key0 - chunk * 8, last = (w.y + 1) * p.group;
        key_walk at = {last, 0};
        if (w.steps)
            at = first_seen<BLOCK>(p, w);
        for (int x = w.y * p.group, from = 0; x < last;) {
            const bool here = at.x == x;
            const int to = here ? at.i0 : (int)p.a.sq;
#pragma unroll 1
            for (int row = from + lane / 16; row < to; row += 2)
                give_chunk(find_dbias<T>(p, w, x) + row * p.a.dbias_stride.s + chunk * 8, left, make_uint4(0, 0, 0, 0));
            from = here ? at.i0 + BLOCK : 0;
            if (here)
                at = step_after<BLOCK>(p, w, at);
            else
                x++;
        }
    }
}

#endif

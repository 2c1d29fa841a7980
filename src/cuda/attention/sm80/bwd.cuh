/* SPDX-License-Identifier: Apache-2.0
 * What the backward kernels of the family sm80 share: the tiles of a block and of a step, one element's gradient. */
#ifndef HEDDLE_CUDA_ATTENTION_SM80_BWD_CUH
#define HEDDLE_CUDA_ATTENTION_SM80_BWD_CUH

#include "cuda/attention/mask.cuh"
#include "cuda/attention/prep.cuh"
#include "cuda/attention/settle.cuh"
#include "cuda/attention/store.cuh"

/* The first rows of a head of keys. */
template <typename T> INLINE const T *keys_of(const attention_params &p, const place &c, int64_t y) {
    return (const T *)p.t.k + row_at(p.a.k_stride, c.n, y, c.first_k);
}
template <typename T> INLINE const T *values_of(const attention_params &p, const place &c, int64_t y) {
    return (const T *)p.t.v + row_at(p.a.v_stride, c.n, y, c.first_k);
}

/* Rows i0 .. i0+ROWS-1 of Q and dO of head x to two tiles; those outside begin .. end-1 are zero, and so is dO where there is none. */
template <typename T, int D, int ROWS, int THREADS>
INLINE void load_query_tiles(const attention_params &p, const place &c, int64_t x, int i0, int begin, int end,
                             uint32_t to_q, uint32_t to_do) {
    const T *q = (const T *)p.t.q + row_at(p.a.q_stride, c.n, x, c.first_q);
    const T *dout = p.t.dout ? (const T *)p.t.dout + row_at(p.a.do_stride, c.n, x, c.first_q) : q;
    load_tile<T, D, ROWS, THREADS>(to_q, q, p.a.q_stride.s, i0, begin, end, (int)p.a.d, p.vectors & VECTOR_Q);
    load_tile<T, D, ROWS, THREADS>(to_do, dout, p.a.do_stride.s, i0, begin, p.t.dout ? end : begin, (int)p.a.dv,
                                   p.vectors & VECTOR_DO);
}

/* The same of K and V, whose first row of the head at hand is at k and v. */
template <typename T, int D, int ROWS, int THREADS>
INLINE void load_key_tiles(const attention_params &p, const T *k, const T *v, int j0, int begin, int end, uint32_t to_k,
                           uint32_t to_v) {
    load_tile<T, D, ROWS, THREADS>(to_k, k, p.a.k_stride.s, j0, begin, end, (int)p.a.d, p.vectors & VECTOR_K);
    load_tile<T, D, ROWS, THREADS>(to_v, v, p.a.v_stride.s, j0, begin, end, (int)p.a.dv, p.vectors & VECTOR_V);
}

/* ---------------------------------------------------------------------------------------- one element's gradient */

struct element {
    float p, ds; /* P where it is kept, else 0; dT */
    bool seen;
};

/* From q·k and dO·v of a lean problem. */
template <typename T>
INLINE element lean_element(const attention_params &p, bool seen, float qk, float dp, float base, float rest,
                            float dsum) {
    element r;
    r.seen = seen;
    r.p = weight_of<T>(qk, p.scale_log2, base, rest);
    r.ds = r.p * (dp - dsum);
    if (!seen)
        r.p = r.ds = 0.0f;
    return r;
}

/* ------------------------------------------------------------------------------------------- keys that a block owns */

/* A block owns keys key0 .. of a head, and walks over queries begin .. end-1, which see them. */
struct key_work {
    place c;
    int64_t y; /* head */
    int key0, begin, end;
};

/* False: there are no such keys. The first keys of a causal mask are seen most. */
template <int ROWS> INLINE bool find_keys(const attention_params &p, int tiles, int64_t id, key_work *w) {
    int tile;
    int64_t unit;
    tile_of_block(id, tiles, p.a.b * p.a.hk, &tile, &unit);
    w->key0 = tile * ROWS;
    w->y = unit % p.a.hk;
    w->c = find_place(p, unit / p.a.hk);
    if (w->key0 >= w->c.all_sk)
        return false;
    const int key1 = min(w->key0 + ROWS, w->c.sk);
    w->begin = w->end = 0;
    if (w->key0 < key1) {
        w->begin = max(0, min(w->key0 - w->c.hi, w->c.sq));
        w->end = max(0, min(key1 - w->c.lo, w->c.sq));
    }
    return true;
}

/* Q and dO of queries i0 .., and what belongs to their rows, into a stage. */
template <typename T, int D, int THREADS, int BLOCK, typename layout>
INLINE void load_queries(const attention_params &p, const place &c, int64_t x, int i0, int begin, int end,
                         uint32_t shared, int stage) {
    const uint32_t to = shared + layout::stages + stage * layout::stage_bytes;
    const uint32_t numbers = shared + layout::numbers + stage * layout::numbers_bytes;
    load_query_tiles<T, D, BLOCK, THREADS>(p, c, x, i0, begin, end, to, to + layout::stage_bytes / 2);
    const float *const from[3] = {p.base, p.rest, p.dsum};
#pragma unroll
    for (int y = 0; y < 3; y++)
        for (int z = threadIdx.x; z < BLOCK; z += THREADS) {
            const bool there = i0 + z >= begin && i0 + z < end;
            cp_async4(numbers + (z * layout::apart + y * layout::number_step) * 4,
                      from[y] + (there ? lse_at(p, c, x, i0 + z) : 0), there ? 4 : 0);
        }
    cp_async_commit();
}

/* Does a mask or a window hide one of keys j0 .. j1-1 from one of queries i0 .. i1-1? */
INLINE bool meets_edge(const place &c, int i0, int i1, int j0, int j1) {
    return j1 - 1 > i0 + c.hi || j0 < i1 - 1 + c.lo;
}

/* base, rest, D and the mark of a row of a stage. */
template <int BLOCK, int APART> INLINE float4 numbers_of(const float *numbers, int row) {
    if (APART > 1)
        return *(const float4 *)(numbers + row * APART);
    return make_float4(numbers[row], numbers[BLOCK + row], numbers[2 * BLOCK + row], numbers[3 * BLOCK + row]);
}

/* The marks of a stage that was cut, which is marked again two steps on, with a barrier between. */
template <int BLOCK, int THREADS, int APART = 1> INLINE void clear_marks(int *bad) {
    __syncthreads();
    for (int z = threadIdx.x; z < BLOCK; z += THREADS)
        bad[z * APART] = 0;
}

#endif

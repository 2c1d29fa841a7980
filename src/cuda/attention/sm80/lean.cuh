/* SPDX-License-Identifier: Apache-2.0
 * A step of the forward of 16 bits, what comes in front of it and behind it: for lean.cu and rich.cu.
 *
 * Over a head dim of 64 tiles of K and V have no bytes between rows, since a line of global memory that does not fall on one line of shared
 * memory is fetched in two parts: chunk c of row r lies at c ^ r%8 (along_row). Up to there that takes longer than it saves. */
#ifndef HEDDLE_CUDA_ATTENTION_SM80_LEAN_CUH
#define HEDDLE_CUDA_ATTENTION_SM80_LEAN_CUH

#include "cuda/attention/sm80/fwd.cuh"

/* Is a tile of K or V without bytes between rows? */
INLINE constexpr int is_dense(int dim) {
    return sm80_lean_pitch(dim) == 2 * dim;
}

/* Where chunk `chunk` of such a row lies. */
template <int D> INLINE int chunk_at(int row, int chunk) {
    return row * sm80_lean_pitch(D) + (is_dense(D) ? chunk ^ (row & 7) : chunk) * 16;
}

/* PLACES: of a step of K, and of V. */
template <typename T, int D, int WARPS, int TILES, int BLOCK, int PLACES> struct lean_shared {
    static constexpr int rows = WARPS * TILES * 16, keys = rows * tile<T, D>::pitch;
    static constexpr int step_bytes = BLOCK * sm80_lean_pitch(D), values = keys + PLACES * step_bytes;
    static constexpr int marks = D * (int)sizeof(T), apart = tile<T, D>::pitch / 4; /* behind rows of Q */
    static_assert(BLOCK <= rows, "a row for each key");
    static_assert(values + PLACES * step_bytes == sm80_lean_bytes(D, rows, BLOCK, PLACES), "as the plan counts");
};

/* ------------------------------------------------------------------------------------------------------ to shared memory */

/* Keys j0 .. of K or V to a tile; those outside begin .. end-1 are zero. What all steps but the first and the last do is a few instructions,
 * since nobody multiplies meanwhile: the compiler must not join it with the rest. */
template <typename T, int D, int ROWS, int THREADS>
INLINE void load_step(uint32_t to, const T *tensor, int64_t stride, int j0, int begin, int end, int width,
                      bool vector) {
    typedef tile<T, D> t;
    constexpr int STEP = THREADS / t::chunks;
    static_assert(THREADS % t::chunks == 0 && ROWS % STEP == 0, "threads fill whole rows");
    const int row = threadIdx.x / t::chunks, chunk = threadIdx.x % t::chunks;
    if (vector && j0 >= begin && j0 + ROWS <= end) {
        const int bytes = chunk * 16 < width * (int)sizeof(T) ? 16 : 0;
        const T *from = tensor + (j0 + row) * stride + (bytes ? chunk * (16 / (int)sizeof(T)) : 0);
#pragma unroll
        for (int x = 0; x < ROWS; x += STEP, from += STEP * stride)
            cp_async16(to + chunk_at<D>(row + x, chunk), from, bytes);
        return;
    }
#pragma unroll 1
    for (int x = row; x < ROWS; x += STEP) {
        const bool there = j0 + x >= begin && j0 + x < end;
        load_chunk(to + chunk_at<D>(x, chunk), there ? tensor + (j0 + x) * stride : tensor, chunk, width, there,
                   vector);
    }
}

/* Is something that this thread has loaded into a tile by load_step not finite? EACH chunks are read at a time. */
template <typename T, int D, int ROWS, int THREADS, int EACH = 1> INLINE bool is_unclean(uint32_t at) {
    typedef tile<T, D> t;
    bool found = false;
#pragma unroll EACH
    for (int row = threadIdx.x / t::chunks; row < ROWS; row += THREADS / t::chunks)
        found |= has_nonfinite(load_shared16(at + chunk_at<D>(row, threadIdx.x % t::chunks)), T());
    return found;
}

/* Then, between two barriers, as clean_tile. */
template <typename T, int D, int ROWS, int THREADS, int APART> INLINE void clean_step(uint32_t at, int *bad) {
    typedef tile<T, D> t;
    for (int row = threadIdx.x; row < ROWS; row += THREADS)
        bad[row * APART] = 0;
    __syncthreads();
#pragma unroll 1
    for (int row = threadIdx.x / t::chunks; row < ROWS; row += THREADS / t::chunks) {
        const uint32_t to = at + chunk_at<D>(row, threadIdx.x % t::chunks);
        if (has_nonfinite(load_shared16(to), T())) {
            store_shared16(to, make_uint4(0, 0, 0, 0));
            bad[row * APART] = MARK_NAN;
        }
    }
    __syncthreads();
}

/* The block's rows of Q, several heads' if they share the tile. */
template <typename T, int D, int ROWS, int THREADS>
INLINE void load_rows(const attention_params &p, const forward_work &w, uint32_t to) {
    typedef tile<T, D> t;
    const T *const q = (const T *)p.t.q + row_at(p.a.q_stride, w.c.n, w.y * p.pack, w.c.first_q);
    if (p.pack == 1) {
        load_tile<T, D, ROWS, THREADS>(to, q, p.a.q_stride.s, w.row0, 0, w.c.sq, (int)p.a.d, p.vectors & VECTOR_Q);
        return;
    }
#pragma unroll 1
    for (int x = threadIdx.x; x < ROWS * t::chunks; x += THREADS) {
        const int row = x / t::chunks, r = w.row0 + row, i = r / p.pack;
        const bool there = i < w.c.sq;
        const T *from = there ? q + (r - i * p.pack) * p.a.q_stride.h + i * p.a.q_stride.s : q;
        load_chunk(to + row * t::pitch + x % t::chunks * 16, from, x % t::chunks, (int)p.a.d, there,
                   p.vectors & VECTOR_Q);
    }
}

/* ------------------------------------------------------------------------------------------------------ a step */

/* S = Q·Kᵀ, in one basic block, from the lane's addresses on. */
template <typename T, int D, int TILES, int BLOCK>
INLINE void form_scores(float (*s)[BLOCK / 8][4], uint32_t q, uint32_t k) {
    clear<TILES, BLOCK / 8>(s);
#pragma unroll
    for (int step = 0; step < tile<T, D>::steps; step++) {
        a_fragment<T> fa[TILES];
#pragma unroll
        for (int x = 0; x < TILES; x++)
            load_a(&fa[x], q + x * 16 * tile<T, D>::pitch + step * 32);
#pragma unroll
        for (int y = 0; y < BLOCK / 16; y++) {
            b_fragment<T> fb[2];
            load_b_rows(fb, along_row<is_dense(D)>(k, step * 32) + y * 16 * sm80_lean_pitch(D));
#pragma unroll
            for (int x = 0; x < TILES; x++) {
                multiply(s[x][2 * y], fa[x], fb[0]);
                multiply(s[x][2 * y + 1], fa[x], fb[1]);
            }
        }
    }
}

/* S -> -inf where a row does not see a key of j0 ..; marked: keys that are not finite are marked, and give NaN to who sees them. */
template <int TILES, int BLOCK, int APART>
INLINE void mask_step(const attention_params &p, const place &c, int row0, int j0, bool marked, const int *bad,
                      float (*s)[BLOCK / 8][4]) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
    if (marked)
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (bad[(y * 8 + column + e) * APART])
#pragma unroll
                    for (int x = 0; x < TILES; x++)
                        s[x][y][e] = s[x][y][2 + e] = CUDART_NAN_F;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = query_of(p, row0 + x * 16 + half * 8 + lane / 4);
            const int first = max(i + c.lo, 0) - j0 - column, last = min(i + c.hi, c.sk - 1) - j0 - column;
#pragma unroll
            for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (y * 8 + e < first || y * 8 + e > last)
                        s[x][y][2 * half + e] = -CUDART_INF_F;
        }
}

/* The largest of a row of S and of the rows before it; what was summed until now is scaled to it. row: what takes S to weights. */
template <int D, int TILES, int BLOCK>
INLINE void follow_maxima(float c, const float (*s)[BLOCK / 8][4], softmax_state<TILES> *state, row_scale (*row)[2],
                          float (*o)[D / 8][4]) {
    float top[TILES][2];
    bool rare = false;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float t = state->max[x][half];
#pragma unroll
            for (int y = 0; y < BLOCK / 8; y++)
                t = fmaxf(t, fmaxf(s[x][y][2 * half], s[x][y][2 * half + 1]));
            top[x][half] = quad_max(t);
            row[x][half] = scale_row(state->max[x][half], top[x][half], c);
            rare |= top[x][half] != state->max[x][half] || is_alone<bf16>(row[x][half]);
        }
    if (!__any_sync(ALL_LANES, rare))
        return;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            row_scale *r = &row[x][half];
            if (is_alone<bf16>(*r))
                scale_alone(state->max[x][half], top[x][half], r);
            state->max[x][half] = top[x][half];
            state->sum[x][half] *= r->shrink;
#pragma unroll
            for (int y = 0; y < D / 8; y++) {
                o[x][y][2 * half] *= r->shrink;
                o[x][y][2 * half + 1] *= r->shrink;
            }
        }
}

/* S of 16 keys -> their weights, P = exp2(S·c - max·c). */
template <typename T, int TILES, int BLOCK>
INLINE void weigh(softmax_state<TILES> *state, const row_scale (*row)[2], float (*s)[BLOCK / 8][4], int step,
                  a_fragment<T> *fa) {
#pragma unroll
    for (int x = 0; x < TILES; x++) {
#pragma unroll
        for (int y = 2 * step; y < 2 * step + 2; y++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float *e = &s[x][y][2 * half];
                e[0] = exp2_approx(fmaf(e[0], row[x][half].factor, -row[x][half].base));
                e[1] = exp2_approx(fmaf(e[1], row[x][half].factor, -row[x][half].base));
                state->sum[x][half] += e[0] + e[1];
            }
        a_from_accumulators(&fa[x], s[x], step);
    }
}

/* O += P·V of 16 keys from row `row` of the tile on. */
template <typename T, int D, int TILES>
INLINE void add_values(float (*o)[D / 8][4], const a_fragment<T> *fa, uint32_t v, int row) {
#pragma unroll
    for (int y = 0; y < D / 16; y++) {
        b_fragment<T> fb[2];
        load_b_columns<T, D>(fb, along_row<is_dense(D)>(v, y * 32) + row * sm80_lean_pitch(D));
#pragma unroll
        for (int x = 0; x < TILES; x++) {
            multiply(o[x][2 * y], fa[x], fb[0]);
            multiply(o[x][2 * y + 1], fa[x], fb[1]);
        }
    }
}

/* O += P·V of a step, P of its scores. */
template <typename T, int D, int TILES, int BLOCK>
INLINE void add_step(const attention_params &p, float (*s)[BLOCK / 8][4], softmax_state<TILES> *state,
                     float (*o)[D / 8][4], uint32_t v) {
    row_scale row[TILES][2];
    follow_maxima<D, TILES, BLOCK>(p.scale_log2, s, state, row, o);
#pragma unroll
    for (int step = 0; step < BLOCK / 16; step++) {
        a_fragment<T> fa[TILES];
        weigh<T, TILES, BLOCK>(state, row, s, step, fa);
        add_values<T, D, TILES>(o, fa, v, step * 16);
    }
}

/* ------------------------------------------------------------------------------------------------------ the end */

/* o = O / sum and lse, as store_rows, 16 bytes at a time. Each lane of a row has the end of one of the rows that its four lanes have. */
template <typename T, int D, int TILES>
INLINE void store_whole(const attention_params &p, const forward_work &w, const softmax_state<TILES> &state,
                        float (*o)[D / 8][4], int row0) {
    const int lane = threadIdx.x % 32, mine = lane % 4 % (2 * TILES);
    float sum = 0.0f, max = 0.0f;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float all = quad_sum(state.sum[x][half]);
            sum = mine == 2 * x + half ? all : sum;
            max = mine == 2 * x + half ? state.max[x][half] : max;
        }
    const int own = row0 + mine * 8 + lane / 4, own_i = query_of(p, own);
    const int64_t own_head = w.y * p.pack + (own - own_i * p.pack);
    row_end end = {0.0f, 0.0f, 0.0f};
    if (own_i < w.c.all_sq) {
        end = end_query<T>(p, w, own_head, own_i, max, p.scale_log2, &sum);
        if (p.t.lse && lane % 4 < 2 * TILES)
            ((float *)p.t.lse)[lse_at(p, w.c, own_head, own_i)] = end.lse;
    }
    const uint32_t empty = __ballot_sync(ALL_LANES, sum == 0.0f);
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int from = (lane & ~3) + 2 * x + half, row = row0 + x * 16 + half * 8 + lane / 4;
            const int i = query_of(p, row), column = lane % 4 * 8;
            const float by = __shfl_sync(ALL_LANES, end.by, from);
            const bool none = empty >> from & 1;
            const int64_t head = w.y * p.pack + (row - i * p.pack);
            T *const to = (T *)p.t.o + row_at(p.a.o_stride, w.c.n, head, w.c.first_q + i) + column;
            const int width = i < w.c.all_sq ? (int)p.a.dv - column : 0;
#pragma unroll
            for (int y = 0; y < D / 8; y += 4) { /* of four chunks of 16 bytes, each of four lanes is given one */
                uint32_t v[4];
#pragma unroll
                for (int e = 0; e < 4; e++)
                    v[e] = none ? 0 : pack_pair(o[x][y + e][2 * half] * by, o[x][y + e][2 * half + 1] * by, T());
                const uint4 chunk = swap_pairs(v);
                if (y * 8 < width)
                    store_global16(to + y * 8, chunk);
            }
        }
}

/* ------------------------------------------------------------------------------------------------------ what is seen */

/* Keys first .. last are seen by all rows; those outside begin .. end-1 by none. */
struct sight {
    int first, last, begin, end;
};

INLINE sight find_sight(const attention_params &p, const forward_work &w, int row0, int rows) {
    const int i0 = query_of(p, row0), i1 = query_of(p, row0 + rows - 1);
    return {max(w.keys_begin, i1 + w.c.lo), min(w.keys_end - 1, i0 + w.c.hi), max(w.begin, i0 + w.c.lo),
            i0 < w.c.sq ? min(w.end, i1 + w.c.hi + 1) : 0};
}

#endif

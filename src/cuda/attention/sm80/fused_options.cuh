/* SPDX-License-Identifier: Apache-2.0
 * The options of scores in the backward of five products: which steps the map of a mask leaves, a step's bias and what is kept of it,
 * scores to weights. Which options there are is the same for all threads, and asked once a step. */
#ifndef HEDDLE_CUDA_ATTENTION_SM80_FUSED_OPTIONS_CUH
#define HEDDLE_CUDA_ATTENTION_SM80_FUSED_OPTIONS_CUH

#include "cuda/attention/dirty.cuh"
#include "cuda/attention/give.cuh"
#include "cuda/attention/mask.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/sm80/fused.cuh"
#include "cuda/attention/sm80/given.h"

/* What is known of a step before its scores are made. */
struct step_options {
    int64_t x;    /* head */
    bool at_edge; /* the band or an end hides some */
    bool bits;    /* the mask does */
    bool careful; /* something is not finite, or a row has a rest */
};

/* ------------------------------------------------------------------------------------------------------ the walk
 * Kinds of 32 tiles of MASK_TILE queries at a time, a bit for each. */

struct tile_window {
    uint32_t open, whole;
};

#define WINDOW_QUERIES (32 * MASK_TILE)

/* The window that query i0 lies in, of the block's keys and head x. */
INLINE tile_window read_window(const attention_params &p, const key_work &w, int64_t x, int i0) {
    const mask_map &m = p.seen_of_keys;
    const uint8_t *const kinds = find_kinds(m, w.c.n, x, w.key0 / m.rows);
    const int tile = i0 / WINDOW_QUERIES * 32 + (int)threadIdx.x % 32;
    const int kind = tile * MASK_TILE < w.c.sq ? kinds[m.tiles_across > 1 ? tile : 0] : TILE_EMPTY;
    return {__ballot_sync(ALL_LANES, kind != TILE_EMPTY), __ballot_sync(ALL_LANES, kind == TILE_FULL)};
}

/* Is the step at query i0, of a window that has been read, not empty? */
INLINE bool is_open(const tile_window &window, int i0) {
    return window.open >> ((unsigned)i0 / MASK_TILE % 32) & 1;
}

/* From i0 of head x on, where `fresh` says that the window is another one, the first step that the map does not empty; false: there is none. */
INLINE bool seek_step(const attention_params &p, const key_work &w, int begin, bool fresh, int64_t *x, int *i0,
                      tile_window *window) {
    for (;; fresh = true) {
        while (*i0 < w.end) {
            if (!p.seen_of_keys.kinds)
                return true;
            if (fresh || (unsigned)*i0 % WINDOW_QUERIES == 0)
                *window = read_window(p, w, *x, *i0);
            fresh = false;
            if (is_open(*window, *i0))
                return true;
            const uint32_t left = window->open >> ((unsigned)*i0 / MASK_TILE % 32);
            *i0 = left ? (*i0 / MASK_TILE + __ffs((int)left) - 1) * MASK_TILE
                       : (*i0 / WINDOW_QUERIES + 1) * WINDOW_QUERIES;
        }
        *i0 = begin;
        if (++*x == (w.y + 1) * p.group)
            return false;
    }
}

/* Does the map cut the step at query i0? */
INLINE bool is_partial(const attention_params &p, const tile_window &window, int i0) {
    return p.seen_of_keys.kinds && !(window.whole >> ((unsigned)i0 / MASK_TILE % 32) & 1);
}

/* The same as attention_light; and may Q or dO not be finite somewhere? Then a step has to be cleaned. What has seen a key and has a finite
 * log-sum-exp is finite, unless a sink or a softcap made it so. */
template <typename T, int D> INLINE void full_light(const attention_params &p) {
    const unsigned tiles = (unsigned)((p.a.sq + 63) / 64);
    const int64_t unit = blockIdx.x / tiles, x = unit % p.a.h;
    const int row0 = (int)(blockIdx.x % tiles) * 64, vectors = VECTOR_Q | VECTOR_DO;
    const place c = find_place(p, unit / p.a.h);
    const bool open = attention_light<T, D, true>(p) || (p.a.features & HEDDLE_SINKS) || p.softcap > 0.0f;
    const bool dirty = __syncthreads_or(open) && ((p.vectors & vectors) != vectors || !p.t.dout ||
                                                  is_dirty<T, D>(p, c, x, row0, (int)min64(64, c.sq - row0)));
    if (threadIdx.x == 0)
        p.dirty[blockIdx.x] = dirty;
}

/* What it has said of the step at query i0. */
INLINE int dirty_mark(const attention_params &p, const place &c, int64_t x, int i0) {
    const unsigned tiles = (unsigned)(p.a.sq + MASK_TILE - 1) / MASK_TILE;
    return p.dirty[((unsigned)c.n * (unsigned)p.a.h + (unsigned)x) * tiles + (unsigned)i0 / MASK_TILE];
}

/* -------------------------------------------------------------------------------------------------------- the bias
 * Of a warp's 32 keys and COLUMNS queries, in the place where its dS will lie, as rows of queries: 64 bytes, in one row of PITCH bytes or,
 * of 16 queries, in two. */

template <int COLUMNS, int PITCH> INLINE uint32_t bias_place(int query, int chunk) {
    return COLUMNS == 32 ? query * PITCH + chunk * 16 : (query * 2 + chunk / 2) * PITCH + chunk % 2 * 16;
}

/* Keys from j0, queries from i0 on. What is not there is zero. */
template <typename T, int COLUMNS, int PITCH>
INLINE void fetch_bias(const attention_params &p, const place &c, int64_t x, int j0, int i0, uint32_t to) {
    const heddle_strides &s = p.a.bias_stride;
    const int lane = threadIdx.x % 32, chunk = lane % 4, count = (int)p.a.sk - j0 - chunk * 8;
    const T *const from = (const T *)p.t.bias + row_at(s, c.n, x, i0 + lane / 4) + j0 + chunk * 8;
    const bool aligned = (((size_t)p.t.bias | (size_t)(s.b | s.h | s.s) * sizeof(T)) & 15) == 0;
    if (aligned) {
#pragma unroll
        for (int y = 0; y < COLUMNS; y += 8) {
            const int bytes = i0 + y + lane / 4 < c.sq ? max(0, min(count, 8)) * (int)sizeof(T) : 0;
            cp_async16(to + bias_place<COLUMNS, PITCH>(y + lane / 4, chunk), bytes ? from + y * s.s : p.t.bias, bytes);
        }
        return;
    }
#pragma unroll 1
    for (int y = 0; y < COLUMNS; y += 8)
        store_shared16(to + bias_place<COLUMNS, PITCH>(y + lane / 4, chunk),
                       load_elements(from + y * s.s, i0 + y + lane / 4 < c.sq ? count : 0));
}

/* Eight queries, the y-th, as Sᵀ lies in registers: pairs for keys lane/4, and 8, 16 and 24 more. */
template <int COLUMNS, int PITCH> INLINE void read_bias(uint32_t from, int y, uint32_t pairs[4]) {
    const int lane = threadIdx.x % 32;
    ldmatrix4_trans(pairs, from + bias_place<COLUMNS, PITCH>(y * 8 + lane % 8, lane / 8));
}

/* S += bias. Does one of them mask? */
template <typename T, int COLUMNS, int PITCH> INLINE bool add_bias(uint32_t from, float (*s)[COLUMNS / 8][4]) {
    bool low = false;
#pragma unroll
    for (int y = 0; y < COLUMNS / 8; y++) {
        uint32_t pairs[4];
        read_bias<COLUMNS, PITCH>(from, y, pairs);
#pragma unroll
        for (int z = 0; z < 4; z++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float bias = e ? high_float(pairs[z], T()) : low_float(pairs[z], T());
                low |= bias == -CUDART_INF_F;
                s[z / 2][y][z % 2 * 2 + e] += counted_bias(bias);
            }
    }
    return __any_sync(ALL_LANES, low);
}

/* Those that one masks are not seen. */
template <typename T, int COLUMNS, int PITCH> INLINE void hide_by_bias(uint32_t from, uint32_t seen[2]) {
#pragma unroll
    for (int y = 0; y < COLUMNS / 8; y++) {
        uint32_t pairs[4];
        read_bias<COLUMNS, PITCH>(from, y, pairs);
#pragma unroll
        for (int z = 0; z < 4; z++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if ((e ? high_float(pairs[z], T()) : low_float(pairs[z], T())) == -CUDART_INF_F)
                    seen[z / 2] &= ~(1u << (4 * y + z % 2 * 2 + e));
    }
}

/* ------------------------------------------------------------------------------------------------- its gradient
 * Where that is a sum over nothing it is dS as it is. */

INLINE bool gives_dbias(const attention_params &p) {
    return sm80_gives_dbias(&p.a, p.t.dbias);
}

/* Of a warp's 32 keys from j0 and COLUMNS queries from i0 on; pairs: dSᵀ as pack_pairs makes it. */
template <typename T, int COLUMNS>
INLINE void give_dbias(const attention_params &p, const place &c, int64_t x, int j0, int i0,
                       const uint32_t (*pairs)[COLUMNS / 8][2]) {
    const heddle_strides &s = p.a.dbias_stride;
    const int lane = threadIdx.x % 32, row = i0 + lane / 4, key = j0 + lane % 4 * 8;
    T *const to = (T *)p.t.dbias + row_at(s, c.n, x, row) + key;
#pragma unroll
    for (int y = 0; y < COLUMNS / 8; y++) {
        uint32_t v[4];
#pragma unroll
        for (int z = 0; z < 4; z++)
            v[z] = transpose8x8(pairs[z / 2][y][z % 2]);
        const uint4 chunk = swap_pairs(v);
        if (row + y * 8 < p.a.sq)
            give_chunk(to + y * 8 * s.s, (int)p.a.sk - key, chunk);
    }
}

/* Zeros for the block's keys and queries first .. last-1 of head x. */
template <typename T, int OWN, int THREADS>
INLINE void give_zeros(const attention_params &p, const key_work &w, int64_t x, int first, int last) {
    constexpr int CHUNKS = OWN / 8;
    const int key = w.key0 + (int)threadIdx.x % CHUNKS * 8;
    T *const to = (T *)p.t.dbias + row_at(p.a.dbias_stride, w.c.n, x, 0) + key;
    for (int row = first + (int)threadIdx.x / CHUNKS; row < last; row += THREADS / CHUNKS)
        give_chunk(to + row * p.a.dbias_stride.s, (int)p.a.sk - key, make_uint4(0, 0, 0, 0));
}

/* Zeros where no step is: from query i0 of head x on up to where the next one begins. */
template <typename T, int OWN, int THREADS>
INLINE void give_until(const attention_params &p, const key_work &w, int64_t x, int i0, int64_t next_x, int next_i0) {
    for (; x <= next_x && x < (w.y + 1) * p.group; x++, i0 = 0)
        give_zeros<T, OWN, THREADS>(p, w, x, i0, x == next_x ? next_i0 : (int)p.a.sq);
}

/* ----------------------------------------------------------------------------------------------- what is seen, kept */

/* What a warp needs of its 32 keys and a step's queries. */
template <int COLUMNS> struct turn_options {
    kept_bits<COLUMNS> kept[2];
    uint32_t seen[2]; /* as make_scores has them */
    bool cut;         /* some may not be seen */
    float slope;
};

/* Keys from j0, queries from i0 on; state: of dropout, in shared memory. */
template <int COLUMNS>
INLINE turn_options<COLUMNS> find_turn(const attention_params &p, const place &c, const step_options &o, int j0, int i0,
                                       const dropout_state *state) {
    const int lane = threadIdx.x % 32, j = j0 + lane / 4;
    turn_options<COLUMNS> r;
    r.cut = o.at_edge || o.bits;
    r.slope = p.a.features & HEDDLE_ALIBI ? ((const float *)p.t.alibi_slopes)[c.n * p.a.alibi_stride_b + o.x] : 0.0f;
#pragma unroll
    for (int z = 0; z < 2; z++)
        r.seen[z] =
            o.bits ? find_shown<COLUMNS>(p.seen_of_keys, find_bits(p.seen_of_keys, c.n, o.x), j + z * 16, c.sk - 1, i0)
                   : ALL_LANES;
    if (o.at_edge)
#pragma unroll
        for (int z = 0; z < 2; z++)
            r.seen[z] &= find_seen_by<COLUMNS>(c, j + z * 16, i0 + lane % 4 * 2);
    if (p.drops)
#pragma unroll
        for (int z = 0; z < 2; z++)
            r.kept[z] = find_kept<true, COLUMNS>(p, *state, dropout_head(p, c.n, o.x), j0 + z * 16, i0);
    return r;
}

/* ---------------------------------------------------------------------------------------------- scores to weights */

/* q·k -> cap·tanh; dP - D becomes what that leaves of it. tanh(x) = 1 - 2r with r = 1/(1 + exp(2x)), and 1 - tanh² = 4(r - r²). */
template <int COLUMNS>
INLINE void cap_turn(const attention_params &p, float (*s)[COLUMNS / 8][4], float (*dp)[COLUMNS / 8][4]) {
    const float in = p.score_in * (2.0f * LOG2E), out = -2.0f * p.softcap;
#pragma unroll
    for (int z = 0; z < 2; z++)
#pragma unroll
        for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float r = reciprocal_approx(exp2_approx(s[z][y][e] * in) + 1.0f), four = 4.0f * r;
                s[z][y][e] = fmaf(out, r, p.softcap);
                dp[z][y][e] *= fmaf(-four, r, four);
            }
}

/* s, dp: Sᵀ, dPᵀ of 32 keys from j0 and COLUMNS queries from i0 on -> Pᵀ where kept, dTᵀ. numbers, marks: of these; bias: where it lies. */
template <typename T, int BLOCK, int COLUMNS, int PITCH, int MARK_STEP>
INLINE void weigh_by_options(const attention_params &p, const place &c, const step_options &o,
                             turn_options<COLUMNS> &turn, int j0, int i0, const float *numbers, const float *marks,
                             uint32_t bias, float (*s)[COLUMNS / 8][4], float (*dp)[COLUMNS / 8][4]) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
    bool low = false;
    numbers += column;
    if (o.careful)
#pragma unroll
        for (int z = 0; z < 4; z++) {
            const float mark = marks[(z * 8 + lane / 4) * MARK_STEP];
#pragma unroll
            for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    s[z / 2][y][z % 2 * 2 + e] += mark + numbers[3 * BLOCK + y * 8 + e];
        }
    if (p.drops)
#pragma unroll
        for (int z = 0; z < 2; z++)
            drop_elements<COLUMNS>(turn.kept[z], p.keep_scale, dp[z]);
#pragma unroll
    for (int y = 0; y < COLUMNS / 8; y++) {
        const float2 dsum = *(const float2 *)(numbers + 2 * BLOCK + y * 8);
#pragma unroll
        for (int z = 0; z < 2; z++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[z][y][e] -= e % 2 ? dsum.y : dsum.x;
    }
    if (p.softcap > 0.0f)
        cap_turn<COLUMNS>(p, s, dp);
    else
#pragma unroll
        for (int z = 0; z < 2; z++)
#pragma unroll
            for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[z][y][e] = __fmul_rn(s[z][y][e], p.scale); /* as prep has it */
    if (p.a.features & HEDDLE_ALIBI)
#pragma unroll
        for (int z = 0; z < 4; z++) {
            const float distance = (float)(i0 + column + c.off - j0 - z * 8 - lane / 4);
#pragma unroll
            for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float *const t = &s[z / 2][y][z % 2 * 2 + e];
                    *t = fmaf(-turn.slope, fabsf(distance + (float)(y * 8 + e)), *t);
                }
        }
    if (p.a.features & HEDDLE_BIAS)
        low = add_bias<T, COLUMNS, PITCH>(bias, s);
#pragma unroll
    for (int y = 0; y < COLUMNS / 8; y++) {
        const float2 base = *(const float2 *)(numbers + y * 8);
        float2 rest = make_float2(0.0f, 0.0f);
        if (o.careful)
            rest = *(const float2 *)(numbers + BLOCK + y * 8);
#pragma unroll
        for (int z = 0; z < 2; z++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float *const t = &s[z][y][e];
                *t = o.careful ? weight_of<T>(*t, LOG2E, e % 2 ? base.y : base.x, e % 2 ? rest.y : rest.x)
                               : exp2_approx(fmaf(*t, LOG2E, -(e % 2 ? base.y : base.x)));
                dp[z][y][e] *= *t;
            }
    }
    if (low)
        hide_by_bias<T, COLUMNS, PITCH>(bias, turn.seen);
    if (turn.cut || low)
#pragma unroll
        for (int z = 0; z < 2; z++)
#pragma unroll
            for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const bool there = turn.seen[z] >> (4 * y + e) & 1;
                    s[z][y][e] = there ? s[z][y][e] : 0.0f;
                    dp[z][y][e] = there ? dp[z][y][e] : 0.0f;
                }
    if (p.drops)
#pragma unroll
        for (int z = 0; z < 2; z++)
            drop_elements<COLUMNS>(turn.kept[z], 1.0f, s[z]);
}

#endif

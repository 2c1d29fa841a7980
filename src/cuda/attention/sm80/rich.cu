/* SPDX-License-Identifier: Apache-2.0
 * Attention forward of 16 bits with options: softcap, ALiBi, boolean mask, dropout; `biased`: and a bias. A block walks as that of lean.cu
 * does, over tiles of keys that the mask's map does not empty. Which options there are is the same for all threads, and asked once a step.
 *
 * What memory has of a step, the map's bits and the bias, is asked for before its products. A warp has the bias of its rows in a tile of its
 * own: rows of 128 bytes, chunk c of row r at c ^ r%8. No tile has rows of several heads. */
#include "cuda/attention/adjust.cuh"
#include "cuda/attention/mask.cuh"
#include "cuda/attention/sm80/lean.cuh"

template <typename T, int D, int WARPS, int TILES, int BLOCK, int PLACES, bool BIASED> struct rich_shared {
    typedef lean_shared<T, D, WARPS, TILES, BLOCK, PLACES> lean;
    static constexpr int bias = lean::values + PLACES * lean::step_bytes,
                         bias_bytes = TILES * 16 * BLOCK * 2; /* a warp's */
    static_assert(BLOCK == MASK_TILE && MASK_TILE % (TILES * 16) == 0,
                  "a warp's rows and a step lie in one tile of the map");
    static_assert(bias + (BIASED ? WARPS * bias_bytes : 0) == sm80_rich_bytes(D, lean::rows, BLOCK, PLACES, BIASED),
                  "as the plan counts");
};

/* ------------------------------------------------------------------------------------------------------ the map */

/* The kinds of the row of tiles that a block's first rows lie in, NULL: there is no map; how far behind them those of its last rows are, and
 * of a warp's. */
struct rich_kinds {
    const uint8_t *first;
    int last, own;
};

template <int ROWS> INLINE rich_kinds find_rich_kinds(const attention_params &p, const forward_work &w, int row0) {
    const mask_map &m = p.seen_by_queries;
    const int tile = w.row0 / MASK_TILE;
    const bool two = m.tiles_down > 1 && ROWS > MASK_TILE && w.row0 + MASK_TILE < w.c.sq;
    return {find_kinds(m, w.c.n, w.y, tile), two ? m.tiles_across : 0,
            two && row0 / MASK_TILE > tile ? m.tiles_across : 0};
}

/* Are both of a step of this kind? */
INLINE bool are_kinds(const rich_kinds &k, int j0, int kind) {
    const uint8_t *const at = k.first + j0 / MASK_TILE;
    return at[0] == kind && at[k.last] == kind;
}

/* The first step from `at` on that the map does not empty; at least `end`: none. */
INLINE int seek_step(const rich_kinds &k, int at, int end) {
    while (k.first && at < end && are_kinds(k, at, TILE_EMPTY))
        at += MASK_TILE;
    return at;
}

/* For the lane's rows, a bit for each of a step's keys from its first column on. */
template <int TILES> struct shown_rows { uint2 of[TILES][2]; };

template <int TILES>
INLINE void load_shown(const attention_params &p, const forward_work &w, int row0, int j0, shown_rows<TILES> *shown) {
    const mask_map &m = p.seen_by_queries;
    const uint32_t *const from = find_bits(m, w.c.n, w.y) + j0 / 32;
    const int row = row0 + (int)threadIdx.x % 32 / 4;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            shown->of[x][half] =
                *(const uint2 *)(from + (int64_t)min(row + x * 16 + half * 8, w.c.sq - 1) * m.line_step);
}

template <int TILES> INLINE void turn_shown(shown_rows<TILES> *shown) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint2 *of = &shown->of[x][half];
            *of = make_uint2(of->x >> column, of->y >> column);
        }
}

template <int TILES> INLINE void show_all(shown_rows<TILES> *shown) {
#pragma unroll
    for (int x = 0; x < TILES; x++)
        shown->of[x][0] = shown->of[x][1] = make_uint2(ALL_LANES, ALL_LANES);
}

/* Element e of the y-th eight columns, as accumulators have them; both known to the compiler. */
INLINE uint32_t shown_bit(int y, int e) {
    return 1u << (y % 4 * 8 + e % 2);
}

/* S -> -inf where it is not shown. */
template <int TILES, int BLOCK> INLINE void hide_rows(const shown_rows<TILES> &shown, float (*s)[BLOCK / 8][4]) {
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const uint2 of = shown.of[x][e / 2];
                s[x][y][e] = (y < 4 ? of.x : of.y) & shown_bit(y, e) ? s[x][y][e] : -CUDART_INF_F;
            }
}

/* ------------------------------------------------------------------------------------------------------ the bias */

/* Are its rows 16 bytes apart? */
INLINE bool is_bias_vector(const attention_params &p) {
    const heddle_strides &s = p.a.bias_stride;
    return (((size_t)p.t.bias | (size_t)(s.b | s.h | s.s) * 2) & 15) == 0;
}

/* Keys j0 .. of a warp's rows from row0 on; what is not there is 0. */
template <typename T, int TILES, int BLOCK>
INLINE void load_bias(const attention_params &p, const forward_work &w, uint32_t to, int row0, int j0, bool vector) {
    const int lane = threadIdx.x % 32, row = lane / 8, chunk = lane % 8;
    const int there = min(max(w.c.sk - j0 - chunk * 8, 0), 8), rows = w.c.sq - row0;
    const T *const bias = (const T *)p.t.bias + row_at(p.a.bias_stride, w.c.n, w.y, row0) + j0 + chunk * 8;
    static_assert(BLOCK == 64, "eight chunks a row");
    if (vector) {
#pragma unroll
        for (int x = row; x < TILES * 16; x += 4) {
            const int bytes = x < rows ? there * 2 : 0;
            cp_async16(to + x * 128 + ((chunk ^ (x & 7)) << 4),
                       bytes ? (const void *)(bias + x * p.a.bias_stride.s) : p.t.bias, bytes);
        }
        return;
    }
#pragma unroll 1
    for (int x = row; x < TILES * 16; x += 4)
        store_shared16(to + x * 128 + ((chunk ^ (x & 7)) << 4),
                       load_elements(bias + x * p.a.bias_stride.s, x < rows ? there : 0));
}

/* Columns whose bias is read at a time. */
#define BIAS_COLUMNS 32

/* S = S·by + bias; of what a bias masks the bits are cleared. Is there such? By a warp. */
template <typename T, int TILES, int BLOCK>
INLINE bool add_bias(uint32_t at, float by, shown_rows<TILES> *shown, float (*s)[BLOCK / 8][4]) {
    const int lane = threadIdx.x % 32, row = lane % 16;
    bool masks = false;
#pragma unroll
    for (int z = 0; z < TILES * BLOCK / BIAS_COLUMNS; z++) {
        const int x = z / (BLOCK / BIAS_COLUMNS), y0 = z % (BLOCK / BIAS_COLUMNS) * (BIAS_COLUMNS / 8);
        uint32_t bias[BIAS_COLUMNS / 8][2], least = 0;
#pragma unroll
        for (int y = 0; y < BIAS_COLUMNS / 8; y += 2)
            ldmatrix4(&bias[0][0] + 2 * y, at + (x * 16 + row) * 128 + (((y0 + y + lane / 16) ^ (row & 7)) << 4));
#pragma unroll
        for (int y = 0; y < BIAS_COLUMNS / 8; y++) {
            least = min2_bf16(min2_bf16(least, bias[y][0]), bias[y][1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const uint32_t two = bias[y][e / 2];
                float *const of = &s[x][y0 + y][e];
                *of = fmaf(*of, by, e % 2 ? high_float(two, T()) : low_float(two, T()));
            }
        }
        if (!__any_sync(ALL_LANES, fminf(low_float(least, T()), high_float(least, T())) < (float)LEAST_BIAS))
            continue;
        masks = true;
#pragma unroll
        for (int y = 0; y < BIAS_COLUMNS / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const uint32_t two = bias[y][e / 2];
                uint2 *const of = &shown->of[x][e / 2];
                const float b = e % 2 ? high_float(two, T()) : low_float(two, T());
                float *const score = &s[x][y0 + y][e];
                *score = b < (float)LEAST_BIAS ? b : *score;
                if (b == -CUDART_INF_F)
                    *(y0 ? &of->y : &of->x) &= ~shown_bit(y, e);
            }
    }
    return masks;
}

/* ------------------------------------------------------------------------------------------------------ a step */

/* Where a warp's rows, the first of which is at `place` from the first key, are beside all of a step: 1 behind it, -1 in front; 0: neither. */
template <int TILES, int BLOCK> INLINE int lies_beside(int place) {
    return place >= BLOCK - 1 ? 1 : place + TILES * 16 - 1 <= 0 ? -1 : 0;
}

/* S = S·by - slope·|distance|; left: lies_beside. */
template <int TILES, int BLOCK>
INLINE void slope_step(float slope, int place, int left, float by, float (*s)[BLOCK / 8][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int x = 0; x < TILES; x++)
        add_slopes<BLOCK>(slope, (float)(place + x * 16 + lane / 4 - lane % 4 * 2), left, by, s[x]);
}

/* q·k -> S but for what is added by a bias, and a factor, which is returned. */
template <int TILES, int BLOCK>
INLINE float adjust_step(const attention_params &p, const place &c, float slope, int row0, int j0,
                         float (*s)[BLOCK / 8][4]) {
    if (p.softcap > 0.0f)
        cap_scores_well<TILES * BLOCK>(p.score_in, p.softcap > SM90_MOST_CAP, s[0]);
    if (!(p.a.features & HEDDLE_ALIBI))
        return p.score_out;
    const int at = c.off + row0 - j0;
    slope_step<TILES, BLOCK>(slope, at, lies_beside<TILES, BLOCK>(at), p.score_out, s);
    return 1.0f;
}

/* What alone a step that nothing cuts has. Such steps have a path each where two places leave them without a wait: without a branch the
 * compiler has the weights of some keys beside the products of others. */
enum { ALONE_NOTHING, ALONE_CAP, ALONE_SLOPES, ALONE_NONE };

INLINE int find_alone(const attention_params &p) {
    const bool slopes = p.a.features & HEDDLE_ALIBI, caps = p.softcap > 0.0f;
    if (slopes)
        return caps ? ALONE_NONE : ALONE_SLOPES;
    return p.score_out != 1.0f || p.softcap > SM90_MOST_CAP ? ALONE_NONE : caps ? ALONE_CAP : ALONE_NOTHING;
}

/* Nothing is summed yet. */
template <int TILES> INLINE void begin_rows(softmax_state<TILES> *state) {
#pragma unroll
    for (int x = 0; x < TILES; x++) {
        state->max[x][0] = state->max[x][1] = -CUDART_INF_F;
        state->sum[x][0] = state->sum[x][1] = 0.0f;
    }
}

/* The weights that dropout takes, of the 16 keys of a step, to 0. */
template <typename T, int TILES, int BLOCK>
INLINE void drop_weights(const kept_bits<BLOCK> *kept, int step, const float (*s)[BLOCK / 8][4], a_fragment<T> *fa) {
#pragma unroll
    for (int x = 0; x < TILES; x++) {
        float left[2][4];
#pragma unroll
        for (int y = 0; y < 2; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                left[y][e] = is_kept(kept[x], 2 * step + y, e) ? s[x][2 * step + y][e] : 0.0f;
        a_from_accumulators(&fa[x], left, 0);
    }
}

/* As add_step, where dropout takes weights. What is kept is multiplied by keep_scale at the end: P rounds to 16 bits better without. */
template <typename T, int D, int TILES, int BLOCK>
INLINE void add_step_kept(const attention_params &p, const kept_bits<BLOCK> *kept, float (*s)[BLOCK / 8][4],
                          softmax_state<TILES> *state, float (*o)[D / 8][4], uint32_t v) {
    row_scale row[TILES][2];
    follow_maxima<D, TILES, BLOCK>(p.scale_log2, s, state, row, o);
#pragma unroll
    for (int step = 0; step < BLOCK / 16; step++) {
        a_fragment<T> fa[TILES];
        weigh<T, TILES, BLOCK>(state, row, s, step, fa);
        drop_weights<T, TILES, BLOCK>(kept, step, s, fa);
        add_values<T, D, TILES>(o, fa, v, step * 16);
    }
}

template <int TILES, int BLOCK>
INLINE void find_kept_rows(const attention_params &p, const forward_work &w, int row0, int j0, kept_bits<BLOCK> *kept) {
    const dropout_state state = make_dropout(p);
#pragma unroll
    for (int x = 0; x < TILES; x++)
        kept[x] = find_kept<false, BLOCK>(p, state, dropout_head(p, w.c.n, w.y), row0 + x * 16 + duty_row(), j0);
}

/* ------------------------------------------------------------------------------------------------------ the kernel */

template <typename T, int D, int WARPS, int TILES, int BLOCK, int PLACES, bool BIASED>
INLINE void attention_rich(const attention_params &p) {
    typedef rich_shared<T, D, WARPS, TILES, BLOCK, PLACES, BIASED> layout;
    typedef typename layout::lean lean;
    constexpr int THREADS = WARPS * 32, ROWS = lean::rows, APART = lean::apart;
    extern __shared__ __align__(128) char shared[];
    const uint32_t sq = shared_address(shared);
    int *const bad = (int *)(shared + lean::marks);
    const forward_work w = find_work<ROWS, BLOCK>(p, p.tiles_q);
    if (w.row0 >= w.c.all_sq)
        return;
    const int64_t head_k = p.group > 1 ? (uint32_t)w.y / (uint32_t)p.group : w.y;
    const T *const k = (const T *)p.t.k + row_at(p.a.k_stride, w.c.n, head_k, w.c.first_k);
    const T *const v = (const T *)p.t.v + row_at(p.a.v_stride, w.c.n, head_k, w.c.first_k);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp * TILES * 16, row0 = w.row0 + warp_row;
    const rich_kinds kinds = find_rich_kinds<ROWS>(p, w, row0);
    const uint32_t bias_at = sq + layout::bias + warp * layout::bias_bytes;
    const bool vector = BIASED && is_bias_vector(p);
    const int begin = seek_step(kinds, w.begin, w.end);
    if (begin < w.end) {
        load_rows<T, D, ROWS, THREADS>(p, w, sq);
        load_step<T, D, BLOCK, THREADS>(sq + lean::keys, k, p.a.k_stride.s, begin, w.keys_begin, w.keys_end, (int)p.a.d,
                                        p.vectors & VECTOR_K);
        if (PLACES > 1)
            load_step<T, D, BLOCK, THREADS>(sq + lean::values, v, p.a.v_stride.s, begin, w.keys_begin, w.keys_end,
                                            (int)p.a.dv, p.vectors & VECTOR_V);
        if (BIASED)
            load_bias<T, TILES, BLOCK>(p, w, bias_at, row0, begin, vector);
    }
    cp_async_commit();
    softmax_state<TILES> state;
    float o[TILES][D / 8][4];
    begin_rows(&state);
    clear<TILES, D / 8>(o);

    const sight block = find_sight(p, w, w.row0, min(ROWS, w.c.sq - w.row0)), own = find_sight(p, w, row0, TILES * 16);
    const float slope =
        p.a.features & HEDDLE_ALIBI ? ((const float *)p.t.alibi_slopes)[w.c.n * p.a.alibi_stride_b + w.y] : 0.0f;
    const uint32_t q_at = sq + warp_row * tile<T, D>::pitch + a_lane<T, D>(lane);
    const uint32_t k_at = sq + lean::keys + b_tile<T, D, is_dense(D)>::rows_lane(lane);
    const uint32_t v_at = sq + lean::values + b_tile<T, D, is_dense(D)>::columns_lane(lane);
    const int alone = find_alone(p);
    int place = 0, next;
    for (int j0 = begin; j0 < w.end; j0 = next, place ^= PLACES - 1) {
        next = seek_step(kinds, j0 + BLOCK, w.end);
        const int kind = kinds.first ? kinds.first[kinds.own + j0 / MASK_TILE] : TILE_FULL;
        const bool band = j0 < block.first || j0 + BLOCK - 1 > block.last, more = next < w.end;
        const bool cut = BIASED || band || p.drops || (kinds.first && !are_kinds(kinds, j0, TILE_FULL));
        const bool now = kind != TILE_EMPTY && (!band || (j0 + BLOCK > own.begin && j0 < own.end));
        const uint32_t here = place * lean::step_bytes, there = (place ^ (PLACES - 1)) * lean::step_bytes;
        bool marked = false, hides = kind == TILE_PARTIAL;
        shown_rows<TILES> shown;
        kept_bits<BLOCK> kept[TILES];
        float s[TILES][BLOCK / 8][4];
        if (hides)
            load_shown<TILES>(p, w, row0, j0, &shown);
        else if (BIASED)
            show_all<TILES>(&shown);
        cp_async_wait<0>();
        if (PLACES == 1) { /* V comes while S is formed */
            __syncthreads();
            load_step<T, D, BLOCK, THREADS>(sq + lean::values, v, p.a.v_stride.s, j0, w.keys_begin, w.keys_end,
                                            (int)p.a.dv, p.vectors & VECTOR_V);
            cp_async_commit();
            if (now) {
                if (p.drops)
                    find_kept_rows<TILES, BLOCK>(p, w, row0, j0, kept);
                form_scores<T, D, TILES, BLOCK>(s, q_at, k_at);
                if (hides)
                    turn_shown<TILES>(&shown);
                const float by = adjust_step<TILES, BLOCK>(p, w.c, slope, row0, j0, s);
                if (BIASED)
                    hides |= add_bias<T, TILES, BLOCK>(bias_at, by, &shown, s);
                else
                    scale_scores<TILES * BLOCK>(by, s[0]);
            }
            cp_async_wait<0>();
        }
        if (cut)
            marked = __syncthreads_or(is_unclean<T, D, BLOCK, THREADS, 4>(sq + lean::values + here));
        else
            __syncthreads();
        if (marked)
            clean_step<T, D, BLOCK, THREADS, APART>(sq + lean::values + here, bad);
        if (more) {
            load_step<T, D, BLOCK, THREADS>(sq + lean::keys + there, k, p.a.k_stride.s, next, w.keys_begin, w.keys_end,
                                            (int)p.a.d, p.vectors & VECTOR_K);
            if (PLACES > 1)
                load_step<T, D, BLOCK, THREADS>(sq + lean::values + there, v, p.a.v_stride.s, next, w.keys_begin,
                                                w.keys_end, (int)p.a.dv, p.vectors & VECTOR_V);
            if (BIASED && PLACES == 1)
                load_bias<T, TILES, BLOCK>(p, w, bias_at, row0, next, vector);
        }
        cp_async_commit();
        if (!BIASED && PLACES > 1 && !cut) { /* without a branch in it */
            const int at = w.c.off + row0 - j0, left = lies_beside<TILES, BLOCK>(at);
            if (alone == ALONE_NOTHING) {
                form_scores<T, D, TILES, BLOCK>(s, q_at, k_at + here);
                add_step<T, D, TILES, BLOCK>(p, s, &state, o, v_at + here);
                continue;
            }
            if (alone == ALONE_CAP) {
                form_scores<T, D, TILES, BLOCK>(s, q_at, k_at + here);
                cap_scores_well<TILES * BLOCK>(p.score_in, false, s[0]);
                add_step<T, D, TILES, BLOCK>(p, s, &state, o, v_at + here);
                continue;
            }
            if (alone == ALONE_SLOPES && left) {
                form_scores<T, D, TILES, BLOCK>(s, q_at, k_at + here);
                slope_step<TILES, BLOCK>(slope, at, left > 0 ? 1 : -1, p.score_out, s);
                add_step<T, D, TILES, BLOCK>(p, s, &state, o, v_at + here);
                continue;
            }
        }
        if (PLACES > 1 && now) {
            if (p.drops)
                find_kept_rows<TILES, BLOCK>(p, w, row0, j0, kept);
            form_scores<T, D, TILES, BLOCK>(s, q_at, k_at + here);
            if (hides)
                turn_shown<TILES>(&shown);
            const float by = adjust_step<TILES, BLOCK>(p, w.c, slope, row0, j0, s);
            if (BIASED)
                hides |= add_bias<T, TILES, BLOCK>(bias_at, by, &shown, s);
            else
                scale_scores<TILES * BLOCK>(by, s[0]);
        }
        if (BIASED && PLACES > 1) { /* its place is the warp's own */
            __syncwarp();
            if (more)
                load_bias<T, TILES, BLOCK>(p, w, bias_at, row0, next, vector);
            cp_async_commit();
        }
        if (!now)
            continue;
        if (marked || (band && (j0 < own.first || j0 + BLOCK - 1 > own.last)))
            mask_step<TILES, BLOCK, APART>(p, w.c, row0, j0, marked, bad, s);
        if (hides)
            hide_rows<TILES, BLOCK>(shown, s);
        if (p.drops)
            add_step_kept<T, D, TILES, BLOCK>(p, kept, s, &state, o, v_at + here);
        else
            add_step<T, D, TILES, BLOCK>(p, s, &state, o, v_at + here);
    }
    cp_async_wait<0>();
    if (p.key_shares > 1 || p.adds || !(p.vectors & VECTOR_O))
        store_rows<T, D, TILES>(p, w, p.scale_log2, state, o, row0, 0);
    else
        store_whole<T, D, TILES>(p, w, state, o, row0);
}

#define BIASED_rich false
#define BIASED_biased true
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ attention_params p) {    \
        wait_for_earlier_grid();                                                                                       \
        attention_rich<dtype, dim, warps, sm80_tiles(sizeof(dtype), dim, warps, own), block, sm80_rich_places(dim),    \
                       BIASED_##variant>(p);                                                                           \
    }

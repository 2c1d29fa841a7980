/* SPDX-License-Identifier: Apache-2.0
 * The options of the full kernels for Hopper where rows are keys. */
#ifndef HEDDLE_CUDA_ATTENTION_SM90_KEY_OPTIONS_CUH
#define HEDDLE_CUDA_ATTENTION_SM90_KEY_OPTIONS_CUH

#include "cuda/attention/sm90/options.cuh"

/* A step of a tile of keys, in shared memory: queries of one head, with what the options need of it. */
struct key_options {
    int step, x;          /* first query and flags; head */
    const void *bias;     /* of query 0 and key 0 */
    const uint32_t *bits; /* of key 0 and query 0 */
    float slope;
    int off, sq, sk;
    uint32_t head; /* as dropout counts */
};
#define KEY_STEPS 8 /* of them that are remembered */
static_assert(KEY_STEPS * sizeof(key_options) + sizeof(dropout_state) == SM90_BACKWARD_OPTIONS, "as the plan counts");

template <int WITH = WITH_ALL>
INLINE key_options find_key_options(const attention_params &p, const place &c, int x, int step, int element) {
    key_options r = {step, x, NULL, NULL, 0.0f, c.off, c.sq, c.sk, WITH & WITH_DROPOUT ? dropout_head(p, c.n, x) : 0};
    if ((WITH & (WITH_BIAS | WITH_KEY_BIAS)) && (p.a.features & HEDDLE_BIAS))
        r.bias = (const char *)p.t.bias + row_at(p.a.bias_stride, c.n, x, 0) * element;
    if ((WITH & WITH_MASK) && p.seen_of_keys.kinds)
        r.bits = find_bits(p.seen_of_keys, c.n, x);
    if ((WITH & WITH_SLOPES) && (p.a.features & HEDDLE_ALIBI))
        r.slope = ((const float *)p.t.alibi_slopes)[c.n * p.a.alibi_stride_b + x];
    return r;
}

/* Where a step is in the maps, by its head and first query. */
template <int BLOCK>
INLINE tile_kind kind_of_queries(const attention_params &p, const place &c, int tile, int x, int i0) {
    const mask_map &m = p.seen_of_keys;
    return m.kinds ? (tile_kind)find_kinds(m, c.n, x, tile)[m.tiles_across > 1 ? i0 / BLOCK : 0] : TILE_FULL;
}

/* The bias of 16 keys of a warp, from `key` on, and N queries from i0 on, as Sᵀ lies in registers: read with queries as rows, and each 8 x 8 turned. */
template <typename T, int N>
INLINE void read_key_bias(const attention_params &p, const key_options &o, int key, int i0, uint32_t (*bias)[2]) {
    const int lane = threadIdx.x % 32, count = o.sk - key - lane % 4 * 2;
    const bool paired = p.vectors & VECTOR_BIAS;
    const T *const from = (const T *)o.bias + key + lane % 4 * 2;
#pragma unroll
    for (int y = 0; y < N / 8; y++) {
        const T *row = from + min(i0 + y * 8 + lane / 4, o.sq - 1) * p.a.bias_stride.s;
        if (paired && count >= 10) {
            bias[y][0] = *(const uint32_t *)row;
            bias[y][1] = *(const uint32_t *)(row + 8);
        } else {
            bias[y][0] = load_two(row, count, false); /* rare, and shorter */
            bias[y][1] = load_two(row + 8, count - 8, false);
        }
    }
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            bias[y][half] = transpose8x8(bias[y][half]);
}

/* Columns are queries from i0 on: the distance of this lane's key to them. */
INLINE float key_distance(const key_options &o, int key, int i0) {
    return (float)(key - o.off - i0 - fragment_column());
}

/* k·q -> Sᵀ, but for what masks, a bias and a factor, which is returned; key: this lane's first. */
template <typename T, int N, int WITH = WITH_ALL>
INLINE float cap_and_slope_keys(const attention_params &p, const key_options &o, int key, float (*s)[4]) {
    const int i0 = o.step & ~STEP_FLAGS;
    float by = p.score_out;
    if (has_cap<WITH>(p))
        cap_scores<T, N>(p.score_in, s);
    if (has_slopes<WITH>(p)) {
        const int first = key - fragment_row() - o.off - i0; /* of the warpgroup */
        add_slopes<N>(o.slope, key_distance(o, key, i0), first >= N - 1 ? 1 : first + 63 <= 0 ? -1 : 0, by, s);
        by = 1.0f;
    }
    return by;
}

/* Sᵀ = Sᵀ·by + bias; -inf where a bias masks. Is there such a one? */
template <typename T, int N>
INLINE bool add_key_biases(const attention_params &p, const key_options &o, int key, float by, float (*s)[4]) {
    const int first = key - (int)threadIdx.x % 32 / 4; /* of the warp */
    bool low = false;
#pragma unroll
    for (int x = 0; x < N; x += BIAS_COLUMNS) {
        uint32_t bias[BIAS_COLUMNS / 8][2];
        read_key_bias<T, BIAS_COLUMNS>(p, o, first, (o.step & ~STEP_FLAGS) + x, bias);
        low |= add_bias<T, BIAS_COLUMNS>(bias, by, s + x / 8);
    }
    return low;
}

/* A bias that is the same for all queries: what this lane's two keys have, the first of which is `key`. Read anew for each step, without a branch
 * that ptxas would have to see to be uniform: after the first they lie in the first-level cache. */
struct key_bias {
    float of[2];
};

template <typename T> INLINE key_bias read_bias_of_keys(const key_options &o, int key) {
    key_bias r;
#pragma unroll
    for (int half = 0; half < 2; half++)
        r.of[half] = to_float(((const T *)o.bias)[min(key + half * 8, o.sk - 1)]);
    return r;
}

/* Does it mask one of the warp's keys? */
INLINE bool masks_any(const key_bias &b) {
    return __any_sync(ALL_LANES, fminf(b.of[0], b.of[1]) < (float)LEAST_BIAS);
}

/* Sᵀ = Sᵀ·by + that bias. */
template <int N> INLINE void add_bias_of_keys(const key_bias &b, float by, float (*s)[4]) {
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = fmaf(s[y][e], by, b.of[e / 2]);
}

/* Pᵀ: -0 where it masks, whatever S was. */
template <int N> INLINE void hide_bias_of_keys(const key_bias &b, float (*s)[4]) {
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = b.of[e / 2] < (float)LEAST_BIAS ? -0.0f : s[y][e];
}

/* The bias of a warpgroup's 64 keys and 32 of 64 queries, from column x on, as Sᵀ lies in registers; alike: all queries have the first's. */
INLINE void read_key_box(uint32_t box, bool alike, int x, uint32_t (*bias)[2]) {
    const int lane = (int)threadIdx.x % 32, chunk = (int)threadIdx.x % WARPGROUP / 32 * 2 + lane / 8 % 2;
#pragma unroll
    for (int y = 0; y < BIAS_COLUMNS; y += 16) {
        const int row = alike ? 0 : x + y + lane / 16 * 8 + lane % 8;
        ldmatrix4_trans(&bias[0][0] + y / 4, box + row * 128 + ((chunk ^ (row & 7)) << 4));
    }
}

/* Sᵀ = Sᵀ·by + bias, of 64 queries. Does a bias mask? */
template <typename T> INLINE bool add_key_box(uint32_t box, bool alike, float by, float (*s)[4]) {
    bool low = false;
#pragma unroll
    for (int x = 0; x < 64; x += BIAS_COLUMNS) {
        uint32_t bias[BIAS_COLUMNS / 8][2];
        read_key_box(box, alike, x, bias);
        low |= add_bias<T, BIAS_COLUMNS>(bias, by, s + x / 8);
    }
    return low;
}

/* Pᵀ: -0 where that bias masks. */
template <typename T> INLINE void hide_key_box(uint32_t box, bool alike, float (*s)[4]) {
#pragma unroll
    for (int x = 0; x < 64; x += BIAS_COLUMNS) {
        uint32_t bias[BIAS_COLUMNS / 8][2];
        read_key_box(box, alike, x, bias);
        hide_low<T, BIAS_COLUMNS>(bias, s + x / 8);
    }
}

/* What dropout keeps of a warp's keys, of which this lane's first is `key`, and the queries of a step, which is one of `steps`. */
template <int N, int WITH = WITH_ALL>
INLINE kept_bits<N> keep_keys(const attention_params &p, const key_options &o, const key_options *steps, int key) {
    const dropout_state &state = *(const dropout_state *)(steps + KEY_STEPS);
    key -= (int)threadIdx.x % 32 / 4;
    return has_dropout<WITH>(p) ? find_kept<true, N>(p, state, o.head, key, o.step & ~STEP_FLAGS) : keep_all<N>();
}

/* The bits of this lane's keys. */
template <int N, int WITH = WITH_ALL>
INLINE void read_key_options(const attention_params &p, const key_options &o, int key, read_ahead<N> *r) {
    if (has_bits<WITH>(o.step))
#pragma unroll
        for (int half = 0; half < 2; half++)
            load_bits<N>(o.bits + (int64_t)min(key + half * 8, o.sk - 1) * p.seen_of_keys.line_step +
                             (o.step & ~STEP_FLAGS) / 32 * p.seen_of_keys.word_step,
                         r->bits[half]);
}

/* Pᵀ, likewise. */
template <typename T, int N, int WITH = WITH_ALL>
INLINE void hide_keys(const attention_params &p, const key_options &o, int key, bool low, const read_ahead<N> &r,
                      float (*s)[4]) {
    if ((WITH & WITH_BIAS) && low)
#pragma unroll
        for (int x = 0; x < N; x += BIAS_COLUMNS) {
            uint32_t bias[BIAS_COLUMNS / 8][2];
            read_key_bias<T, BIAS_COLUMNS>(p, o, key - (int)threadIdx.x % 32 / 4, (o.step & ~STEP_FLAGS) + x, bias);
            hide_low<T, BIAS_COLUMNS>(bias, s + x / 8);
        }
    if (has_bits<WITH>(o.step))
        apply_bits<N>(r.bits, -0.0f, s);
}

/* The same as cap_query_gradients, of 16 queries of a step, whose numbers lie at `bases` and `rests`. */
INLINE void cap_key_gradients(const attention_params &p, const float *bases, const float *rests, const float (*s)[4],
                              float (*ds)[4]) {
    const int column = fragment_column();
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float2 base = *(const float2 *)(bases + y * 8 + column), rest = *(const float2 *)(rests + y * 8 + column);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float t = score_of(log2_approx(s[y][e]), e % 2 ? base.y : base.x, e % 2 ? rest.y : rest.x);
            ds[y][e] *= slack_of(t * p.inverse_softcap);
        }
    }
}

#endif

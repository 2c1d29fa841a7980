/* SPDX-License-Identifier: Apache-2.0
 * The options of the full kernels for Hopper, on scores in registers: softcap, ALiBi, bias, boolean mask. Which of them there are is
 * the same for all threads, and decided once a tile. */
#ifndef HEDDLE_CUDA_ATTENTION_SM90_OPTIONS_CUH
#define HEDDLE_CUDA_ATTENTION_SM90_OPTIONS_CUH

#include "cuda/attention/adjust.cuh"
#include "cuda/attention/mask.cuh"
#include "cuda/attention/sm90/sm90.cuh"

/* -------------------------------------------------------------------------------------------------- maps of masks */

/* What the thread that fetches tells the others of a step, beside its first row or column, a multiple of 64. */
enum {
    STEP_LAST = 1,   /* no other follows for this tile */
    STEP_CUT = 2,    /* some elements are not seen */
    STEP_BITS = 4,   /* by what bits of the mask say */
    STEP_DIRTY = 8,  /* what streams by is not finite somewhere */
    STEP_WHOLE = 16, /* forward: neither this nor the next is cut */
    STEP_BAND = 32,  /* backward, rows are keys: by a band or an end */
    STEP_FEW = 32,   /* forward: a row may see few keys */
    STEP_FLAGS = 63
};
#define STEPS 16 /* of them that are remembered */

/* What a kernel's code has; the other options it is never asked for. A lean kernel has none, a full one all. Beside them, in backward: the
 * gradient of the bias; of the bias no more than one that is the same for all queries. */
enum {
    WITH_CAP = 1,
    WITH_SLOPES = 2,
    WITH_BIAS = 4,
    WITH_MASK = 8,
    WITH_DROPOUT = 16,
    WITH_ALL = 31,
    WITH_DBIAS = 32,
    WITH_KEY_BIAS = 64
};

template <int WITH> INLINE constexpr bool has_bias_alone(void) {
    return (WITH & WITH_ALL) == WITH_BIAS;
}
template <int WITH> INLINE constexpr bool has_all(void) {
    return (WITH & WITH_ALL) == WITH_ALL;
}

/* Dropout, and no more than a mask beside it: warps that have nothing else to do make its bits ahead (kept.cuh). */
template <int WITH> INLINE constexpr bool makes_ahead(void) {
    return (WITH & ~WITH_MASK) == WITH_DROPOUT;
}
/* A mask, and no more than dropout beside it. */
template <int WITH> INLINE constexpr bool hides_by_bits(void) {
    return (WITH & ~WITH_DROPOUT) == WITH_MASK;
}

template <int WITH> INLINE bool has_cap(const attention_params &p) {
    return (WITH & WITH_CAP) && p.softcap > 0.0f;
}
template <int WITH> INLINE bool has_slopes(const attention_params &p) {
    return (WITH & WITH_SLOPES) && (p.a.features & HEDDLE_ALIBI);
}
template <int WITH> INLINE bool has_bias(const attention_params &p) {
    return has_bias_alone<WITH>() || ((WITH & WITH_BIAS) && (p.a.features & HEDDLE_BIAS));
}
template <int WITH> INLINE bool has_boxes(const attention_params &p) {
    return has_bias_alone<WITH>() || ((WITH & WITH_BIAS) && (p.vectors & VECTOR_BIAS_BOXES));
}
template <int WITH> INLINE bool has_bits(int step) {
    return (WITH & WITH_MASK) && (step & STEP_BITS);
}
template <int WITH> INLINE bool has_dropout(const attention_params &p) {
    return makes_ahead<WITH>() || ((WITH & WITH_DROPOUT) && p.drops);
}

/* Behind them lies what dropout begins with, from the start of the kernel on. */
template <typename S> INLINE void put_dropout(const attention_params &p, S *behind) {
    if (threadIdx.x == 0)
        *(dropout_state *)behind = make_dropout(p);
}

/* `away` where the bit says that an element is not seen. */
template <int N> INLINE void apply_bits(const uint32_t (*bits)[N / 32], float away, float (*s)[4]) {
    uint32_t mine[2][N / 32];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int z = 0; z < N / 32; z++)
            mine[half][z] = bits[half][z] >> fragment_column();
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = mine[e / 2][y / 4] & 1u << (y % 4 * 8 + e % 2) ? s[y][e] : away;
}

/* ----------------------------------------------------------------------------------------------------------- bias */

/* Two elements from `from` on, of which `count` are there. */
template <typename T> INLINE uint32_t load_two(const T *from, int count, bool paired) {
    if (paired && count >= 2)
        return *(const uint32_t *)from;
    const uint32_t low = count > 0 ? from[0].bits : 0, high = count > 1 ? from[1].bits : 0;
    return low | high << 16;
}

/* Columns whose bias is read at a time. */
#define BIAS_COLUMNS 32

/* S = S·by + bias in N columns, of which one is -inf, whatever S is there: is there such a one? */
template <typename T, int N> INLINE bool add_bias(const uint32_t (*bias)[2], float by, float (*s)[4]) {
    uint32_t least = bias[0][0];
#pragma unroll
    for (int y = 0; y < N / 8; y++) {
        least = min2_bf16(min2_bf16(least, bias[y][0]), bias[y][1]);
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = fmaf(s[y][e], by, e % 2 ? high_float(bias[y][e / 2], T()) : low_float(bias[y][e / 2], T()));
    }
    if (!__any_sync(ALL_LANES, fminf(low_float(least, T()), high_float(least, T())) < (float)LEAST_BIAS))
        return false;
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float b = e % 2 ? high_float(bias[y][e / 2], T()) : low_float(bias[y][e / 2], T());
            s[y][e] = b < (float)LEAST_BIAS ? b : s[y][e];
        }
    return true;
}

/* A box of 64 queries and 64 keys from the first of each on; what is alike has one row, head or batch. */
struct bias_place {
    int key, row, x, n;
};

INLINE bias_place find_box(const attention_params &p, int key, int row, int64_t x, int64_t n) {
    const heddle_strides &s = p.a.bias_stride;
    return {key, s.s ? row : 0, s.h ? (int)x : 0, s.b ? (int)n : 0};
}

/* Is a row of the bias the same for all queries? */
INLINE bool is_alike(const attention_params &p) {
    return p.a.bias_stride.s == 0;
}

/* Is the first row of boxes 0 in N keys? What marks padding is, but for the ends. */
template <int N> INLINE bool is_nothing(uint32_t boxes) {
    uint32_t any = 0;
#pragma unroll
    for (int x = 0; x < N; x += 64)
        any |= load_shared4(boxes + x / 64 * SM90_BIAS_BOX + threadIdx.x % 32 * 4);
    return !__any_sync(ALL_LANES, any);
}

/* S = S·by + bias, of the 64 queries and N keys of a warpgroup, in boxes. alike: all rows are the first. Does a bias mask? */
template <typename T, int N> INLINE bool add_boxes(uint32_t boxes, bool alike, float by, float (*s)[4]) {
    const int lane = (int)threadIdx.x % 32, row = alike ? 0 : (int)threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
    bool low = false;
    boxes += row * 128;
#pragma unroll
    for (int x = 0; x < N; x += BIAS_COLUMNS) {
        uint32_t bias[BIAS_COLUMNS / 8][2];
#pragma unroll
        for (int y = 0; y < BIAS_COLUMNS / 8; y += 2)
            ldmatrix4(&bias[0][0] + 2 * y,
                      boxes + x / 64 * SM90_BIAS_BOX + (((x % 64 / 8 + y + lane / 16) ^ (row & 7)) << 4));
        low |= add_bias<T, BIAS_COLUMNS>(bias, by, s + x / 8);
    }
    return low;
}

/* -------------------------------------------------------------------------------------------------- rows are queries */

/* What the options need of a tile of queries, from its first row on, in shared memory. */
struct query_options {
    const void *bias;     /* of its first row and key 0 */
    const uint32_t *bits; /* likewise */
    float slope;
    int first, place, last; /* the first row: its query, where its diagonal is; the last row that there is */
    uint32_t head;          /* as dropout counts */
};

INLINE query_options find_options(const attention_params &p, const place &c, int64_t x, int row0, int element) {
    query_options r = {NULL, NULL, 0.0f, row0, row0 + c.off, max(c.sq - 1 - row0, 0), dropout_head(p, c.n, x)};
    if (p.a.features & HEDDLE_BIAS)
        r.bias = (const char *)p.t.bias + row_at(p.a.bias_stride, c.n, x, row0) * element;
    if (p.seen_by_queries.kinds)
        r.bits = find_bits(p.seen_by_queries, c.n, x) + (int64_t)row0 * p.seen_by_queries.line_step;
    if (p.a.features & HEDDLE_ALIBI)
        r.slope = ((const float *)p.t.alibi_slopes)[c.n * p.a.alibi_stride_b + x];
    return r;
}

/* Keys j0 .. of `rows` rows of bias on their way to the second-level cache, by `threads` threads. */
template <typename T>
INLINE void prefetch_bias(const attention_params &p, const void *bias, int first, int last, int rows, int j0, int keys,
                          int thread, int threads) {
    for (int row = thread; row < rows; row += threads)
        if (first + row <= last) {
            const T *from = (const T *)bias + (first + row) * p.a.bias_stride.s + j0;
            for (int x = 0; x < min(keys, (int)p.a.sk - j0); x += 64) /* lines of 128 bytes */
                prefetch_global(from + x);
        }
}

/* What is read of memory for a tile of N keys before its scores are there. */
template <int N> struct read_ahead { uint32_t bits[2][N / 32]; };

/* The bias of two rows, which begin at from[], in N columns, of which `count` from this lane's first on are there. */
template <typename T, int N>
INLINE void read_bias(const T *const from[2], int count, bool paired, uint32_t (*bias)[2]) {
    if (paired && count >= N) {
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                bias[y][half] = *(const uint32_t *)(from[half] + y * 8);
    } else {
#pragma unroll
        for (int y = 0; y < N / 8; y++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                bias[y][half] = load_two(from[half] + y * 8, count - y * 8, paired);
    }
}

/* Where the bias of this lane's rows begins, at a column. */
template <typename T>
INLINE void find_bias(const attention_params &p, const query_options &o, int row, int column, const T **from) {
#pragma unroll
    for (int half = 0; half < 2; half++)
        from[half] = (const T *)o.bias + min(row + fragment_row() + half * 8, o.last) * p.a.bias_stride.s + column;
}

/* S = S·by + bias. Rows row .. of a warpgroup, keys from j0 on, of sk. Does a bias mask? */
template <typename T, int N>
INLINE bool add_biases(const attention_params &p, const query_options &o, int row, int j0, int sk, float by,
                       float (*s)[4]) {
    const T *from[2];
    uint32_t bias[2][BIAS_COLUMNS / 8][2];
    const int column = j0 + fragment_column();
    const bool paired = p.vectors & VECTOR_BIAS;
    bool low = false;
    find_bias<T>(p, o, row, column, from);
    read_bias<T, BIAS_COLUMNS>(from, sk - column, paired, bias[0]);
#pragma unroll
    for (int x = 0; x < N; x += BIAS_COLUMNS) {
        from[0] += BIAS_COLUMNS;
        from[1] += BIAS_COLUMNS;
        if (x + BIAS_COLUMNS < N)
            read_bias<T, BIAS_COLUMNS>(from, sk - column - x - BIAS_COLUMNS, paired, bias[(x / BIAS_COLUMNS + 1) % 2]);
        low |= add_bias<T, BIAS_COLUMNS>(bias[x / BIAS_COLUMNS % 2], by, s + x / 8);
    }
    return low;
}

/* Rows row .. of a warpgroup, keys as `step` says. */
template <int N, int WITH = WITH_ALL>
INLINE void read_options(const attention_params &p, const query_options &o, int row, int step, read_ahead<N> *r) {
    if (has_bits<WITH>(step))
#pragma unroll
        for (int half = 0; half < 2; half++)
            load_bits<N>(o.bits + (int64_t)min(row + fragment_row() + half * 8, o.last) * p.seen_by_queries.line_step +
                             (step & ~STEP_FLAGS) / 32,
                         r->bits[half]);
}

/* Is tanh off by so much that the log-sum-exp shows it? With a bias all of it is right. */
INLINE bool shows_tanh(const attention_params &p) {
    return p.a.dtype == HEDDLE_BF16 && !(p.a.features & HEDDLE_BIAS);
}

/* Where rows row .. of a warpgroup are, from column j0 of this lane on. */
INLINE float row_distance(const query_options &o, int row, int j0) {
    return (float)(o.place + row - j0 + fragment_row() - fragment_column());
}

/* q·k -> S, but for what masks, a bias and a factor, which is returned. */
template <typename T, int N, int WITH = WITH_ALL>
INLINE float cap_and_slope(const attention_params &p, const query_options &o, int row, int j0, float (*s)[4],
                           bool exact = false) {
    float by = p.score_out;
    if (has_cap<WITH>(p))
        cap_scores<T, N>(p.score_in, s, exact, p.softcap > SM90_MOST_CAP);
    if (has_slopes<WITH>(p)) {
        const int first = o.place + row - j0; /* of the warpgroup's first row, to the first key */
        add_slopes<N>(o.slope, row_distance(o, row, j0), first >= N - 1 ? 1 : first + 63 <= 0 ? -1 : 0, by, s);
        by = 1.0f;
    }
    return by;
}

/* q·k -> S, but for what masks. Does a bias mask? Then there is -inf. */
template <typename T, int N>
INLINE bool apply_options(const attention_params &p, const query_options &o, int row, int step, int sk, float (*s)[4]) {
    const int j0 = step & ~STEP_FLAGS;
    const float by = cap_and_slope<T, N>(p, o, row, j0, s);
    if (p.a.features & HEDDLE_BIAS)
        return add_biases<T, N>(p, o, row, j0, sk, by, s);
    scale_scores<N>(by, s);
    return false;
}

/* P: -0 where a bias masks. */
template <typename T, int N> INLINE void hide_low(const uint32_t (*bias)[2], float (*s)[4]) {
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float b = e % 2 ? high_float(bias[y][e / 2], T()) : low_float(bias[y][e / 2], T());
            s[y][e] = b == -CUDART_INF_F ? -0.0f : s[y][e];
        }
}

/* P: -0 where a bias or the mask says that a key is not seen. */
template <typename T, int N>
INLINE void hide_queries(const attention_params &p, const query_options &o, int row, int step, int sk, bool low,
                         const read_ahead<N> &r, float (*s)[4]) {
    if (low) {
        const int column = (step & ~STEP_FLAGS) + fragment_column();
#pragma unroll
        for (int x = 0; x < N; x += BIAS_COLUMNS) {
            const T *from[2];
            uint32_t bias[BIAS_COLUMNS / 8][2];
            find_bias<T>(p, o, row, column + x, from);
            read_bias<T, BIAS_COLUMNS>(from, sk - column - x, p.vectors & VECTOR_BIAS, bias);
            hide_low<T, BIAS_COLUMNS>(bias, s + x / 8);
        }
    }
    if (step & STEP_BITS)
        apply_bits<N>(r.bits, -0.0f, s);
}

/* S once more, from the logarithm of P and the log-sum-exp, which may be that of a huge one. */
INLINE float score_of(float log2, float base, float rest) {
    const float unit = __float_as_int(rest) < 0 ? 1.0f / power_of(LOG2E) : LN2;
    return fmaf(log2, unit, (base + fabsf(rest)) * unit);
}

INLINE float slack_of(float tanh) {
    return fmaxf(fmaf(-tanh, tanh, 1.0f), 0.0f); /* -inf, of P = 0, gives 0 */
}

/* dS -> dT = dS·(1 - tanh²): tanh comes from P and the log-sum-exp once more, which costs less than to keep it. So nothing may have been
 * added to what was capped (finds_tanh_again of sm90.c). */
template <int N>
INLINE void cap_query_gradients(const attention_params &p, const float base[2], const float rest[2],
                                const float (*s)[4], float (*ds)[4]) {
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float t = score_of(log2_approx(s[y][e]), base[e / 2], rest[e / 2]);
            ds[y][e] *= slack_of(t * p.inverse_softcap);
        }
}

/* What dropout keeps of rows row .. of a warpgroup and keys from j0 on. */
template <int N, int WITH = WITH_ALL>
INLINE kept_bits<N> keep_queries(const attention_params &p, const query_options &o, const dropout_state &state, int row,
                                 int j0) {
    row += o.first + (int)threadIdx.x % WARPGROUP / 32 * 16 + duty_row();
    return has_dropout<WITH>(p) ? find_kept<false, N>(p, state, o.head, row, j0) : keep_all<N>();
}

/* Does row `row` of the tile see one of the marked keys of the 128 from j0 on, first .. last of them in its band? Rarely asked. */
template <typename T, int WITH = WITH_ALL>
INLINE bool sees_marked(const attention_params &p, const query_options &o, int row, int step, uint4 marks, int first,
                        int last) {
    const uint32_t words[4] = {marks.x, marks.y, marks.z, marks.w};
    const int j0 = step & ~STEP_FLAGS;
    row = min(row, o.last);
    bool sees = false;
#pragma unroll 1
    for (int j = max(first, 0); j <= min(last, 127); j++) {
        const uint32_t word = j < 64 ? (j < 32 ? words[0] : words[1]) : j < 96 ? words[2] : words[3];
        bool seen = word >> j % 32 & 1;
        if (seen && has_bits<WITH>(step))
            seen = o.bits[(int64_t)row * p.seen_by_queries.line_step + (j0 + j) / 32] >> (j0 + j) % 32 & 1;
        if (seen && has_bias<WITH>(p))
            seen = to_float(((const T *)o.bias)[row * p.a.bias_stride.s + j0 + j]) != -CUDART_INF_F;
        sees |= seen;
    }
    return sees;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for the tensor cores of Ampere and later where the bits may depend on the order of sums: all three gradients of
 * 16-bit types in one kernel, of five products where bwd.cu has seven.
 *
 *   bwd      a block owns keys and walks over the queries that see them. Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ give Pᵀ and dSᵀ, and these
 *            dV += Pᵀ·dO, dK += dSᵀ·Q and dQ = dS·K, whose sum over the keys of all blocks is added up in memory.
 *   light    before all that: zeros for that sum, D and the log-sum-exp of most rows (prep.cuh).
 *   gather   after it: that sum -> dq.
 *
 * dS goes through shared memory, where every warp of the block reads it: into one of two places, so that dQ of a step is made beside
 * the scores of the next, and one barrier a step is enough. */
#include "cuda/attention/sm80/bwd.cuh"

/* -------------------------------------------------------------------------------------------------- the layout
 * Each warp has 32 keys; `share` warps side by side have the same ones, and each of them forms the scores of some of a step's
 * queries and sums up some of the columns of dK and dV. */

template <typename T, int D, int WARPS, int OWN, int BLOCK> struct fused_shared {
    static constexpr int threads = WARPS * 32, share = sm80_fused_share(WARPS, OWN), groups = OWN / 32;
    static constexpr int turns = share == 1 ? BLOCK / 32 : 1;  /* in which a warp forms its scores */
    static constexpr int columns = BLOCK / share / turns;      /* queries of a turn */
    static constexpr int width = D / share;                    /* columns of dK and dV */
    static constexpr int pitch = sm80_pitch(sizeof(T), BLOCK); /* from key to key of P and dS */
    static constexpr int second = OWN * tile<T, D>::pitch;     /* K, V */
    static constexpr int stages = 2 * second;
    static constexpr int stage_bytes = 2 * BLOCK * tile<T, D>::pitch;
    static constexpr int ds = stages + 2 * stage_bytes, ds_bytes = OWN * pitch;
    static constexpr int ps = ds + 2 * ds_bytes;
    static constexpr int numbers = ps + (share > 1 ? ds_bytes : 0); /* per stage: base, rest, D, bad */
    static constexpr int numbers_bytes = 4 * BLOCK * 4, apart = 1, number_step = BLOCK;
    static constexpr int marks = ds + BLOCK * (int)sizeof(T),
                         mark_step = pitch / 4; /* of keys, beside dS: not finite */
    static_assert(numbers + 2 * 4 * BLOCK * 4 == sm80_fused_bytes(sizeof(T), D, WARPS, OWN, BLOCK),
                  "as the plan counts");
    /* dQ of a step: a warp has 32 queries, and these columns */
    static constexpr int beside = WARPS / (BLOCK / 32), sum_width = D / beside;
    static __device__ __forceinline__ int part(void) {
        return share > 1 ? (int)threadIdx.x / 32 % share : 0;
    }
    static __device__ __forceinline__ int group(void) {
        return (int)threadIdx.x / 32 / share;
    }
};

/* ------------------------------------------------------------------------------------------------------ products */

/* c += A·B: 32 rows of A, 16 of B with D elements, from the lane's address on. */
template <typename T, int D, int COLUMNS>
INLINE void multiply_rows(float (*c)[COLUMNS / 8][4], const a_fragment<T> fa[2], uint32_t b) {
#pragma unroll
    for (int y = 0; y < COLUMNS / 16; y++) {
        b_fragment<T> fb[2];
        load_b_columns<T, D>(fb, b + y * 32);
#pragma unroll
        for (int x = 0; x < 2; x++) {
            multiply(c[x][2 * y], fa[x], fb[0]);
            multiply(c[x][2 * y + 1], fa[x], fb[1]);
        }
    }
}

/* The same of 16·STEPS rows of B, A from pairs as pack_pairs makes them. */
template <typename T, int D, int STEPS, int COLUMNS>
INLINE void multiply_pairs(float (*c)[COLUMNS / 8][4], const uint32_t (*a)[2 * STEPS][2], uint32_t b) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        a_fragment<T> fa[2];
#pragma unroll
        for (int x = 0; x < 2; x++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                fa[x].r[e] = a[x][2 * s + e / 2][e % 2];
        multiply_rows<T, D, COLUMNS>(c, fa, b + s * 16 * tile<T, D>::pitch);
    }
}

/* The same, A from shared memory: 32 rows of PITCH bytes; TURNED: 32 columns. From the lane's address on. */
template <bool TURNED> INLINE uint32_t operand_lane(int lane, int pitch) {
    return TURNED ? ((lane & 7) + (lane >> 4 & 1) * 8) * pitch + (lane >> 3 & 1) * 16
                  : (lane & 15) * pitch + (lane >> 4) * 16;
}
template <typename T, int D, int STEPS, int COLUMNS, int PITCH, bool TURNED>
INLINE void multiply_shared(float (*c)[COLUMNS / 8][4], uint32_t a, uint32_t b) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        a_fragment<T> fa[2];
#pragma unroll
        for (int x = 0; x < 2; x++)
            if (TURNED)
                ldmatrix4_trans(fa[x].r, a + s * 16 * PITCH + x * 32);
            else
                ldmatrix4(fa[x].r, a + x * 16 * PITCH + s * 32);
        multiply_rows<T, D, COLUMNS>(c, fa, b + s * 16 * tile<T, D>::pitch);
    }
}

/* ------------------------------------------------------------------------------------------- weights and gradients */

/* Has one of a step's rows a second part of its log-sum-exp? The same for all warps. */
template <int BLOCK> INLINE bool has_rest(const float *numbers) {
    bool any = false;
#pragma unroll
    for (int z = 0; z < BLOCK; z += 32)
        any |= numbers[BLOCK + z + threadIdx.x % 32] != 0.0f;
    return __any_sync(ALL_LANES, any);
}

/* How a step's scores become weights: all are seen; a mask cuts some; and besides there are rows with a rest, or marks. */
enum weighing { WHOLE, CUT, CAREFUL };

/* s, dp: Sᵀ, dPᵀ -> Pᵀ, dSᵀ. Rows are keys from row0, columns queries from i0. Marks are added to what is seen: 0 or NaN. */
template <typename T, weighing HOW, int BLOCK, int COLUMNS, int MARK_STEP>
INLINE void weigh(const attention_params &p, const place &c, int row0, int i0, const float *numbers, const float *marks,
                  float (*s)[COLUMNS / 8][4], float (*dp)[COLUMNS / 8][4]) {
    const int lane = threadIdx.x % 32;
    float mark[2][2];
#pragma unroll
    for (int z = 0; HOW == CAREFUL && z < 4; z++)
        mark[z / 2][z % 2] = marks[(z * 8 + lane / 4) * MARK_STEP];
#pragma unroll
    for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = y * 8 + lane % 4 * 2 + e, i = i0 + column;
            const float base = numbers[column], dsum = numbers[2 * BLOCK + column];
            const float rest = HOW == CAREFUL ? numbers[BLOCK + column] : 0.0f;
            const float bad = HOW == CAREFUL ? numbers[3 * BLOCK + column] : 0.0f;
            const int first = max(i + c.lo, 0), last = i < c.sq ? min(i + c.hi, c.sk - 1) : -1;
#pragma unroll
            for (int z = 0; z < 2; z++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int j = row0 + z * 16 + half * 8 + lane / 4;
                    float *t = &s[z][y][2 * half + e], *dt = &dp[z][y][2 * half + e];
                    const bool seen = HOW == WHOLE || (j >= first && j <= last);
                    if (HOW == CAREFUL) {
                        const element r = lean_element<T>(p, seen, *t + (bad + mark[z][half]), *dt, base, rest, dsum);
                        *t = r.p;
                        *dt = r.ds;
                    } else {
                        const float weight = exp2_approx(fmaf(*t, p.scale_log2, -base));
                        *t = seen ? weight : 0.0f;
                        *dt = seen ? weight * (*dt - dsum) : 0.0f;
                    }
                }
        }
}

/* Neighbouring columns in one register, as A operands and shared memory take them. */
template <typename T, int COLUMNS>
INLINE void pack_pairs(uint32_t (*to)[COLUMNS / 8][2], const float (*c)[COLUMNS / 8][4]) {
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                to[x][y][half] = pack_pair(c[x][y][2 * half], c[x][y][2 * half + 1], T());
}

template <int COLUMNS, int PITCH> INLINE void lay_down(uint32_t to, const uint32_t (*c)[COLUMNS / 8][2]) {
    const int lane = threadIdx.x % 32;
    to += lane / 4 * PITCH + lane % 4 * 4;
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_shared4(to + (x * 16 + half * 8) * PITCH + y * 16, c[x][y][half]);
}

/* -------------------------------------------------------------------------------------------------------- dQ
 * Sums are held in tiles of 64 queries, in pieces of 16 rows and 8 columns: the four numbers that a lane has of one. */

/* Where queries from i0 on, a multiple of 32, begin in a head's sums. */
template <int D> INLINE int64_t sum_of_step(int i0) {
    return (int64_t)((unsigned)i0 / 64) * 64 * D + (unsigned)i0 % 64 / 16 * 128;
}

/* dS·K of a step, whose dS lies at ds, added to the sum. */
template <typename T, int D, int OWN, int BLOCK, typename layout>
INLINE void add_query_sums(float *to, uint32_t ds, uint32_t keys) {
    constexpr int COLUMNS = layout::sum_width;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int down = warp / layout::beside, column = warp % layout::beside * COLUMNS;
    float dq[2][COLUMNS / 8][4];
    clear<2, COLUMNS / 8>(dq);
    multiply_shared<T, D, OWN / 16, COLUMNS, layout::pitch, true>(
        dq, ds + down * 64 + operand_lane<true>(lane, layout::pitch),
        keys + column * (int)sizeof(T) + columns<T, D, 0>::lane_at(lane));
    to += column / 8 * 512 + down * 256 + lane;
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                add_global(to + y * 512 + x * 128 + e * 32, dq[x][y][e]);
}

/* A block has 64 queries. */
template <typename T, int D> INLINE void attention_gather(const attention_params &p) {
    const unsigned tiles = (unsigned)p.tiles_q, unit = blockIdx.x / tiles;
    const int x = (int)(unit % (unsigned)p.a.h), tile = (int)(blockIdx.x % tiles);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const place c = find_place(p, unit / (unsigned)p.a.h);
    if (tile * 64 >= c.all_sq)
        return;
    const float *from = p.dq_sum + (sum_tile(p, c, x) + tile) * 64 * D + warp * 128 + lane;
    float dq[D / 8][4];
#pragma unroll
    for (int y = 0; y < D / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            dq[y][e] = from[y * 512 + e * 32];
    store_tile<T, D>(p.adds, p.t.dq, row_at(p.a.dq_stride, c.n, x, c.first_q + tile * 64), p.a.dq_stride.s, warp * 16,
                     c.all_sq - tile * 64, (int)p.a.d, p.scale, dq);
}

/* ------------------------------------------------------------------------------------------------------ the walk */

/* A warp's rows and columns of dK or dV, if that is wanted. */
template <typename T, typename layout>
INLINE void store_share(const attention_params &p, const key_work &w, void *to, const heddle_strides &stride, int width,
                        float by, const float (*sum)[layout::width / 8][4]) {
    const int from = layout::part() * layout::width;
    const int64_t at = row_at(stride, w.c.n, w.y, w.c.first_k + w.key0) + from;
#pragma unroll
    for (int x = 0; x < 2; x++)
        store_tile<T, layout::width>(p.adds, to, at, stride.s, layout::group() * 32 + x * 16, w.c.all_sk - w.key0,
                                     width - from, by, sum[x]);
}

/* Where this thread finds its parts of the next step: of its first row of Q and dO, and of the numbers of a row. */
template <typename T> struct query_source {
    const T *q, *dout;
    const float *number;
};

template <typename T, int D, int BLOCK, typename layout>
INLINE query_source<T> find_source(const attention_params &p, const place &c, int64_t x, int i0) {
    constexpr int CHUNKS = tile<T, D>::chunks, EACH = 16 / (int)sizeof(T);
    const int64_t row = i0 + (int)threadIdx.x / CHUNKS;
    const int column = (int)threadIdx.x % CHUNKS * EACH, kind = (int)threadIdx.x / BLOCK;
    query_source<T> r;
    r.q = (const T *)p.t.q + row_at(p.a.q_stride, c.n, x, c.first_q + row) + (column < (int)p.a.d ? column : 0);
    r.dout = (const T *)p.t.dout + row_at(p.a.do_stride, c.n, x, c.first_q + row) + (column < (int)p.a.dv ? column : 0);
    r.number = (kind == 0 ? p.base : kind == 1 ? p.rest : p.dsum) + lse_at(p, c, x, i0 + (int)threadIdx.x % BLOCK);
    return r;
}

/* The next step, whose rows all are there and may be read 16 bytes at a time. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void fetch_whole(const attention_params &p, const query_source<T> &from, uint32_t shared, int stage) {
    constexpr int CHUNKS = tile<T, D>::chunks, STEP = layout::threads / CHUNKS, EACH = 16 / (int)sizeof(T);
    constexpr int PITCH = tile<T, D>::pitch;
    const int column = (int)threadIdx.x % CHUNKS * EACH;
    const uint32_t to = shared + layout::stages + stage * layout::stage_bytes + (int)threadIdx.x / CHUNKS * PITCH +
                        column * (int)sizeof(T);
#pragma unroll
    for (int x = 0; x < BLOCK; x += STEP)
        cp_async16(to + x * PITCH, from.q + x * p.a.q_stride.s, column < (int)p.a.d ? 16 : 0);
#pragma unroll
    for (int x = 0; x < BLOCK; x += STEP)
        cp_async16(to + (BLOCK + x) * PITCH, from.dout + x * p.a.do_stride.s, column < (int)p.a.dv ? 16 : 0);
    if (threadIdx.x < 3 * BLOCK)
        cp_async4(shared + layout::numbers + (stage * 4 * BLOCK + threadIdx.x) * 4, from.number, 4);
    cp_async_commit();
}

/* Does nobody of `count` queries from i0 on see a key of this warp's? */
template <typename layout> INLINE bool sees_none(const key_work &w, int i0, int count) {
    const int j0 = w.key0 + layout::group() * 32;
    return j0 >= w.c.sk || j0 - w.c.hi > i0 + count - 1 || min(j0 + 31, w.c.sk - 1) - w.c.lo < i0;
}

/* Scores of a step, a turn of them; dV and dK of them where a warp has all columns of these. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void take_turn(const attention_params &p, const key_work &w, int turn, int i0, weighing how,
                      const float *numbers, const float *marks, uint32_t own, uint32_t sq, uint32_t ds, uint32_t ps,
                      float (*dk)[layout::width / 8][4], float (*dv)[layout::width / 8][4]) {
    constexpr int COLUMNS = layout::columns, PITCH = tile<T, D>::pitch, MARK_STEP = layout::mark_step;
    const int from = (turn * layout::share + layout::part()) * COLUMNS, row = layout::group() * 32;
    const uint32_t sdo = sq + BLOCK * PITCH, at = row * layout::pitch + from * (int)sizeof(T);
    uint32_t pairs_p[2][COLUMNS / 8][2], pairs_ds[2][COLUMNS / 8][2];
    if (how != WHOLE && sees_none<layout>(w, i0 + turn * layout::share * COLUMNS, layout::share * COLUMNS)) {
        memset(pairs_ds, 0, sizeof pairs_ds);
        lay_down<COLUMNS, layout::pitch>(ds + at, pairs_ds);
        return;
    }
    float s[2][COLUMNS / 8][4], dp[2][COLUMNS / 8][4];
    product_rows<T, D, 2, COLUMNS>(s, own + row * PITCH, sq + from * PITCH, false, 0);
    product_rows<T, D, 2, COLUMNS>(dp, own + layout::second + row * PITCH, sdo + from * PITCH, false, 0);
    if (how == WHOLE)
        weigh<T, WHOLE, BLOCK, COLUMNS, MARK_STEP>(p, w.c, w.key0 + row, i0 + from, numbers + from, NULL, s, dp);
    else if (how == CUT)
        weigh<T, CUT, BLOCK, COLUMNS, MARK_STEP>(p, w.c, w.key0 + row, i0 + from, numbers + from, NULL, s, dp);
    else
        weigh<T, CAREFUL, BLOCK, COLUMNS, MARK_STEP>(p, w.c, w.key0 + row, i0 + from, numbers + from,
                                                     marks + row * MARK_STEP, s, dp);
    pack_pairs<T, COLUMNS>(pairs_p, s);
    pack_pairs<T, COLUMNS>(pairs_ds, dp);
    lay_down<COLUMNS, layout::pitch>(ds + at, pairs_ds);
    if constexpr (layout::share == 1) {
        const uint32_t lane_at = from * PITCH + columns<T, D, 0>::lane_at(threadIdx.x % 32);
        multiply_pairs<T, D, COLUMNS / 16, D>(dv, pairs_p, sdo + lane_at);
        multiply_pairs<T, D, COLUMNS / 16, D>(dk, pairs_ds, sq + lane_at);
    } else {
        lay_down<COLUMNS, layout::pitch>(ps + at, pairs_p);
    }
}

/* dV and dK of a step where warps side by side share its scores, which all of them have laid down. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void sum_shared(uint32_t sq, uint32_t ds, uint32_t ps, float (*dk)[layout::width / 8][4],
                       float (*dv)[layout::width / 8][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t a = layout::group() * 32 * layout::pitch + operand_lane<false>(lane, layout::pitch);
    const uint32_t b = sq + layout::part() * layout::width * (int)sizeof(T) + columns<T, D, 0>::lane_at(lane);
    multiply_shared<T, D, BLOCK / 16, layout::width, layout::pitch, false>(dv, ps + a, b + BLOCK * tile<T, D>::pitch);
    multiply_shared<T, D, BLOCK / 16, layout::width, layout::pitch, false>(dk, ds + a, b);
}

/* Half of the warps make dQ of the step before ahead of the scores, the others after them: while some have weights to find, the tensor
 * cores have products of others (322 TFLOP/s for 291 at d 128). */
template <typename T, int D, int WARPS, int OWN, int BLOCK> INLINE void attention_fused(const attention_params &p) {
    typedef fused_shared<T, D, WARPS, OWN, BLOCK> layout;
    constexpr int THREADS = layout::threads;
    extern __shared__ __align__(16) char shared[];
    const uint32_t own = shared_address(shared);
    int *const marks = (int *)(shared + layout::marks);
    key_work w;
    if (!find_keys<OWN>(p, p.tiles_k, blockIdx.x, &w))
        return;
    const place &c = w.c;
    const int end = w.end, begin = w.begin < end ? w.begin / BLOCK * BLOCK : end; /* tiles of the sums of dQ */
    const int steps = (end - begin + BLOCK - 1) / BLOCK * p.group;
    const bool early = layout::share > 1 && layout::group() < layout::groups / 2;
    float dk[2][layout::width / 8][4], dv[2][layout::width / 8][4];
    clear<2, layout::width / 8>(dk);
    clear<2, layout::width / 8>(dv);
    for (int z = threadIdx.x; z < 2 * BLOCK; z += THREADS)
        ((int *)(shared + layout::numbers))[(z / BLOCK * 4 + 3) * BLOCK + z % BLOCK] = 0;
    for (int z = threadIdx.x; z < OWN; z += THREADS)
        marks[z * layout::mark_step] = 0;
    int64_t x = w.y * p.group;
    int i0 = begin;
    float *sum = p.dq_sum ? p.dq_sum + sum_tile(p, c, x) * 64 * D : NULL; /* of head x */
    const int vectors = VECTOR_Q | VECTOR_DO;
    const bool fast = (p.vectors & vectors) == vectors && p.t.dout && 3 * BLOCK <= THREADS;
    query_source<T> source = find_source<T, D, BLOCK, layout>(p, c, x, i0 + BLOCK);
    bool any_bad = false;
    if (steps) {
        load_key_tiles<T, D, OWN, THREADS>(p, keys_of<T>(p, c, w.y), values_of<T>(p, c, w.y), w.key0, 0, c.sk, own,
                                           own + layout::second);
        load_queries<T, D, THREADS, BLOCK, layout>(p, c, x, i0, begin, end, own, 0);
        __syncthreads();
        cp_async_wait<0>();
        any_bad =
            __syncthreads_or(clean_tile<T, D, OWN, THREADS, layout::mark_step>(own, marks)); /* or dS·K would read it */
    }
    float *before = NULL;
    for (int step = 0; step < steps; step++) {
        const int stage = step & 1;
        const uint32_t sq = own + layout::stages + stage * layout::stage_bytes;
        const uint32_t ds = own + layout::ds + stage * layout::ds_bytes,
                       other = own + layout::ds + (stage ^ 1) * layout::ds_bytes;
        float *numbers = (float *)(shared + layout::numbers) + stage * 4 * BLOCK;
        const bool cut = any_bad || i0 + BLOCK > end || w.key0 + OWN > c.sk ||
                         meets_edge(c, i0, min(i0 + BLOCK, c.sq), w.key0, w.key0 + OWN);
        bool bad = false;
        cp_async_wait<0>();
        if (cut) {
            bad |= clean_tile<T, D, BLOCK, THREADS>(sq, (int *)numbers + 3 * BLOCK);
            bad |= clean_tile<T, D, BLOCK, THREADS>(sq + BLOCK * tile<T, D>::pitch, (int *)numbers + 3 * BLOCK);
        }
        bad = __syncthreads_or(bad);
        const int here = i0;
        float *const to = sum ? sum + sum_of_step<D>(i0) : NULL;
        i0 += BLOCK;
        if (i0 >= end) {
            i0 = begin;
            x++;
            sum += p.dq_sum ? sum_tiles(p) * 64 * D : 0;
        }
        if (early && before)
            add_query_sums<T, D, OWN, BLOCK, layout>(before, other, own);
        if (step + 1 < steps) {
            if (i0 == begin)
                source = find_source<T, D, BLOCK, layout>(p, c, x, i0);
            if (fast && i0 + BLOCK <= end)
                fetch_whole<T, D, BLOCK, layout>(p, source, own, stage ^ 1);
            else
                load_queries<T, D, THREADS, BLOCK, layout>(p, c, x, i0, begin, end, own, stage ^ 1);
            source.q += BLOCK * p.a.q_stride.s;
            source.dout += BLOCK * p.a.do_stride.s;
            source.number += BLOCK;
        }
        const weighing how = bad || any_bad || has_rest<BLOCK>(numbers) ? CAREFUL : cut ? CUT : WHOLE;
#pragma unroll
        for (int turn = 0; turn < layout::turns; turn++)
            take_turn<T, D, BLOCK, layout>(p, w, turn, here, how, numbers, (const float *)marks, own, sq, ds,
                                           own + layout::ps, dk, dv);
        if constexpr (layout::share > 1) {
            barrier_sync(1 + layout::group(), layout::share * 32); /* of those that see none, too: racecheck counts */
            if (how == WHOLE || !sees_none<layout>(w, here, BLOCK))
                sum_shared<T, D, BLOCK, layout>(sq, ds, own + layout::ps, dk, dv);
        }
        if (!early && before)
            add_query_sums<T, D, OWN, BLOCK, layout>(before, other, own);
        if (bad)
            clear_marks<BLOCK, THREADS>((int *)numbers + 3 * BLOCK);
        before = to;
    }
    if (before) {
        __syncthreads();
        add_query_sums<T, D, OWN, BLOCK, layout>(before, own + layout::ds + (steps - 1 & 1) * layout::ds_bytes, own);
    }
    store_share<T, layout>(p, w, p.t.dv, p.a.dv_stride, (int)p.a.dv, p.keep_scale, dv);
    store_share<T, layout>(p, w, p.t.dk, p.a.dk_stride, (int)p.a.d, p.scale, dk);
}

#define pass_bwd(T, D, WARPS, OWN, BLOCK) attention_fused<T, D, WARPS, OWN, BLOCK>(p)
#define pass_light(T, D, WARPS, OWN, BLOCK) attention_light<T, D>(p)
#define pass_gather(T, D, WARPS, OWN, BLOCK) attention_gather<T, D>(p)
/* That run on a multiprocessor at a time. */
#define blocks_bwd(warps, dim) (8 / (warps))
#define blocks_light(warps, dim) 8
#define blocks_gather(warps, dim) (dim > 128 ? 3 : 5)
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, blocks_##pass(warps, dim))                                \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ attention_params p) {    \
        wait_for_earlier_grid();                                                                                       \
        pass_##pass(dtype, dim, warps, own, block);                                                                    \
    }

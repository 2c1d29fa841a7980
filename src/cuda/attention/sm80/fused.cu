/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for the tensor cores of Ampere and later where the bits may depend on the order of sums: all three gradients of
 * 16-bit types in one kernel, of five products where bwd.cu has seven.
 *
 *   bwd      a block owns keys and walks over the queries that see them. Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ give Pᵀ and dSᵀ, and these
 *            dV += Pᵀ·dO, dK += dSᵀ·Q and dQ = dS·K, whose sum over the keys of all blocks is added up in memory.
 *   light    before all that: zeros for that sum, D and the log-sum-exp of most rows (prep.cuh).
 *   gather   after it: that sum -> dq.
 *
 * FULL: with every option of scores (fused_options.cuh).
 *
 * dS goes through shared memory, where every warp of the block reads it: into one of two places, so that dQ of a step is made beside
 * the scores of the next, and one barrier a step is enough. */
#include "cuda/attention/sm80/fused_options.cuh"

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

/* The same with options, where a step is one turn. */
template <typename T, int D, int BLOCK, typename layout>
INLINE void take_turn_with_options(const attention_params &p, const key_work &w, int i0, const step_options &o,
                                   const float *numbers, const float *marks, const dropout_state *dropout, uint32_t own,
                                   uint32_t sq, uint32_t ds, uint32_t ps, float (*dk)[layout::width / 8][4],
                                   float (*dv)[layout::width / 8][4]) {
    constexpr int COLUMNS = layout::columns, PITCH = tile<T, D>::pitch, MARK_STEP = layout::mark_step;
    static_assert(layout::turns == 1, "a warp's bias lies where its dS will");
    const int from = layout::part() * COLUMNS, row = layout::group() * 32, j0 = w.key0 + row;
    const uint32_t sdo = sq + BLOCK * PITCH, at = row * layout::pitch + from * (int)sizeof(T);
    uint32_t pairs_p[2][COLUMNS / 8][2], pairs_ds[2][COLUMNS / 8][2];
    if (o.at_edge && sees_none<layout>(w, i0, BLOCK)) {
        memset(pairs_ds, 0, sizeof pairs_ds);
        lay_down<COLUMNS, layout::pitch>(ds + at, pairs_ds);
        if (gives_dbias(p))
            give_dbias<T, COLUMNS>(p, w.c, o.x, j0, i0 + from, pairs_ds);
        return;
    }
    float s[2][COLUMNS / 8][4], dp[2][COLUMNS / 8][4];
    product_rows<T, D, 2, COLUMNS>(s, own + row * PITCH, sq + from * PITCH, false, 0);
    product_rows<T, D, 2, COLUMNS>(dp, own + layout::second + row * PITCH, sdo + from * PITCH, false, 0);
    turn_options<COLUMNS> turn = find_turn<COLUMNS>(p, w.c, o, j0, i0 + from, dropout);
    if (p.a.features & HEDDLE_BIAS) {
        cp_async_wait<1>(); /* all but the next step */
        __syncwarp();
    }
    weigh_by_options<T, BLOCK, COLUMNS, layout::pitch, MARK_STEP>(p, w.c, o, turn, j0, i0 + from, numbers + from,
                                                                  marks + row * MARK_STEP, ds + at, s, dp);
    if (p.a.features & HEDDLE_BIAS)
        __syncwarp(); /* its place is dS's now */
    pack_pairs<T, COLUMNS>(pairs_p, s);
    pack_pairs<T, COLUMNS>(pairs_ds, dp);
    lay_down<COLUMNS, layout::pitch>(ds + at, pairs_ds);
    if (gives_dbias(p))
        give_dbias<T, COLUMNS>(p, w.c, o.x, j0, i0 + from, pairs_ds);
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

/* The bias of a step, which a warp sees, to where its dS will lie, which nobody reads any more. */
template <typename T, int BLOCK, typename layout>
INLINE void fetch_step_bias(const attention_params &p, const key_work &w, const step_options &o, int i0, uint32_t ds) {
    const int from = layout::part() * layout::columns, row = layout::group() * 32;
    if (!(p.a.features & HEDDLE_BIAS) || (o.at_edge && sees_none<layout>(w, i0, BLOCK)))
        return;
    fetch_bias<T, layout::columns, layout::pitch>(p, w.c, o.x, w.key0 + row, i0 + from,
                                                  ds + row * layout::pitch + from * (int)sizeof(T));
    cp_async_commit();
}

/* Half of the warps make dQ of the step before ahead of the scores, the others after them: while some have weights to find, the tensor
 * cores have products of others (322 TFLOP/s for 291 at d 128). */
template <typename T, int D, bool FULL, int WARPS, int OWN, int BLOCK>
INLINE void attention_fused(const attention_params &p) {
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
    int steps = (end - begin + BLOCK - 1) / BLOCK * p.group;                      /* FULL: at most */
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
    tile_window window;
    bool bits = false; /* of the step at hand, FULL */
    int dirty = 0;     /* likewise; looked at a step after it is asked for */
    if constexpr (FULL) {
        if (steps && !seek_step(p, w, begin, true, &x, &i0, &window))
            steps = 0;
        if (steps) {
            bits = is_partial(p, window, i0);
            dirty = dirty_mark(p, c, x, i0);
        }
        if (p.drops && threadIdx.x == 0)
            *(dropout_state *)(shared + layout::dropout) = make_dropout(p);
        if (gives_dbias(p))
            give_until<T, OWN, THREADS>(p, w, w.y * p.group, 0, steps ? x : (w.y + 1) * p.group, i0);
    }
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
        const bool cut = (!FULL && any_bad) || i0 + BLOCK > end || w.key0 + OWN > c.sk ||
                         meets_edge(c, i0, min(i0 + BLOCK, c.sq), w.key0, w.key0 + OWN);
        bool bad = false;
        cp_async_wait<0>();
        if (FULL ? dirty != 0 : cut) {
            bad |= clean_tile<T, D, BLOCK, THREADS>(sq, (int *)numbers + 3 * BLOCK);
            bad |= clean_tile<T, D, BLOCK, THREADS>(sq + BLOCK * tile<T, D>::pitch, (int *)numbers + 3 * BLOCK);
        }
        bad = __syncthreads_or(bad);
        const int here = i0;
        float *const to = sum ? sum + sum_of_step<D>(i0) : NULL;
        i0 += BLOCK;
        step_options o = {}; /* of which the lean kernels ask nothing */
        if constexpr (FULL) {
            o = {x, cut, bits, bad || any_bad};
            fetch_step_bias<T, BLOCK, layout>(p, w, o, here, ds);
            const bool next =
                i0 < end && (!p.seen_of_keys.kinds || ((unsigned)i0 % WINDOW_QUERIES && is_open(window, i0)));
            if (!next && !seek_step(p, w, begin, false, &x, &i0, &window)) /* mostly the next is next */
                steps = step + 1;
            if (step + 1 < steps) {
                bits = is_partial(p, window, i0);
                dirty = dirty_mark(p, c, x, i0);
            }
            if (x != o.x)
                sum += p.dq_sum ? (x - o.x) * sum_tiles(p) * 64 * D : 0;
            if (gives_dbias(p))
                give_until<T, OWN, THREADS>(p, w, o.x, here + BLOCK, x, i0);
        } else if (i0 >= end) {
            i0 = begin;
            x++;
            sum += p.dq_sum ? sum_tiles(p) * 64 * D : 0;
        }
        if (early && before)
            add_query_sums<T, D, OWN, BLOCK, layout>(before, other, own);
        if (step + 1 < steps) {
            if (FULL ? x != o.x || i0 != here + BLOCK : i0 == begin)
                source = find_source<T, D, BLOCK, layout>(p, c, x, i0);
            if (fast && i0 + BLOCK <= end)
                fetch_whole<T, D, BLOCK, layout>(p, source, own, stage ^ 1);
            else
                load_queries<T, D, THREADS, BLOCK, layout>(p, c, x, i0, begin, end, own, stage ^ 1);
            source.q += BLOCK * p.a.q_stride.s;
            source.dout += BLOCK * p.a.do_stride.s;
            source.number += BLOCK;
        } else if (FULL) {
            cp_async_commit(); /* of nothing, behind the bias */
        }
        const weighing how = FULL                                         ? (cut ? CUT : WHOLE)
                             : bad || any_bad || has_rest<BLOCK>(numbers) ? CAREFUL
                             : cut                                        ? CUT
                                                                          : WHOLE;
        if constexpr (FULL) {
            o.careful |= has_rest<BLOCK>(numbers);
            take_turn_with_options<T, D, BLOCK, layout>(p, w, here, o, numbers, (const float *)marks,
                                                        (const dropout_state *)(shared + layout::dropout), own, sq, ds,
                                                        own + layout::ps, dk, dv);
        }
#pragma unroll
        for (int turn = 0; !FULL && turn < layout::turns; turn++)
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

template <typename T, int D, bool FULL> INLINE void light_of(const attention_params &p) {
    if constexpr (FULL)
        full_light<T, D>(p);
    else
        attention_light<T, D>(p);
}

#define is_lean false
#define is_long false
#define is_narrow false
#define is_least false
#define is_full true
#define is_slim true
#define is_slight true
#define pass_bwd(T, D, FULL, WARPS, OWN, BLOCK) attention_fused<T, D, FULL, WARPS, OWN, BLOCK>(p)
#define pass_light(T, D, FULL, WARPS, OWN, BLOCK) light_of<T, D, FULL>(p)
#define pass_gather(T, D, FULL, WARPS, OWN, BLOCK) attention_gather<T, D>(p)
/* That run on a multiprocessor at a time. */
#define blocks_bwd(warps, dim) (8 / (warps))
#define blocks_light(warps, dim) 8
#define blocks_gather(warps, dim) (dim > 128 ? 3 : 5)
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, blocks_##pass(warps, dim))                                \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ attention_params p) {    \
        wait_for_earlier_grid();                                                                                       \
        pass_##pass(dtype, dim, is_##variant, warps, own, block);                                                      \
    }

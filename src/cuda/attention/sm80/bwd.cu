/* SPDX-License-Identifier: Apache-2.0
 * Attention backward for the tensor cores of Ampere and later, without atomics: the same bits every time.
 *
 *   dkdv   a block owns keys and walks over the queries that see them, head by head of the group, in order. It works
 *          on the transposed scores Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, whose accumulators are the A operands of
 *          dV += Pᵀ·dO and dK += dSᵀ·Q.
 *   dq     a block owns queries of one head and walks over their keys: S = Q·Kᵀ, dP = dO·Vᵀ, dQ += dS·K.
 *
 * Both compute P from S and the log-sum-exp that the prep kernel has laid down in two floats, base and rest: weight_of. */
#include "cuda/attention/sm80/bwd.cuh"
#include "cuda/attention/sm80/full.cuh"

/* ------------------------------------------------------------------------------------ what both passes are made of */

/* S = Q·Kᵀ and dP = dO·Vᵀ, or both transposed: of a warp's rows of two tiles of the block's own and a stage of two that stream. */
template <typename T, int D, int WARPS, int TILES, int BLOCK>
INLINE void form_products(const attention_params &p, const place &c, uint32_t shared, int warp_row, uint32_t stage,
                          bool makes_dp, float (*s)[BLOCK / 8][4], float (*dp)[BLOCK / 8][4]) {
    typedef backward_shared<T, D, WARPS, TILES, BLOCK> layout;
    const uint32_t own = shared + warp_row * tile<T, D>::pitch, joins = shared + layout::joins;
    product_rows<T, D, TILES, BLOCK>(s, own, stage, p.tf32, whole_steps<T, D>(p, c), joins);
    if (makes_dp)
        product_rows<T, D, TILES, BLOCK>(dp, own + layout::second, stage + BLOCK * tile<T, D>::pitch, p.tf32,
                                         whole_steps<T, D>(p, c), joins + layout::join_bytes);
    else
        clear<TILES, BLOCK / 8>(dp);
}

/* -------------------------------------------------------------------------------------------------- dK and dV */

/* s, dp: Sᵀ, dPᵀ -> Pᵀ where kept, dTᵀ. Rows are keys, columns queries. */
template <typename T, bool CUT, int TILES, int BLOCK, int APART>
INLINE void gradients_of_keys(const attention_params &p, const place &c, int row0, int i0, const float *numbers,
                              float (*s)[BLOCK / 8][4], float (*dp)[BLOCK / 8][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = y * 8 + lane % 4 * 2 + e, i = i0 + column;
            const float4 of = numbers_of<BLOCK, APART>(numbers, column);
            const float base = of.x, rest = of.y, dsum = of.z;
            const int first = max(i + c.lo, 0), last = i < c.sq ? min(i + c.hi, c.sk - 1) : -1;
#pragma unroll
            for (int z = 0; z < TILES; z++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int j = row0 + z * 16 + half * 8 + lane / 4;
                    float *t = &s[z][y][2 * half + e], *dt = &dp[z][y][2 * half + e];
                    const bool seen = !CUT || (j >= first && j <= last);
                    element r = lean_element<T>(p, seen, *t, *dt, base, rest, dsum);
                    if (CUT && r.seen && __float_as_int(of.w))
                        r.p = r.ds = CUDART_NAN_F;
                    *t = r.p;
                    *dt = r.ds;
                }
        }
}

/* Rows row0 .. of a gradient, if it is wanted, of which `count` are the sequence's, from row `first` of the tensor on: sums times `by`. adds:
 * to what is there. */
template <typename T, int D, int TILES>
INLINE void store_sums(bool adds, void *to, const heddle_strides &stride, int64_t n, int64_t head, int64_t first,
                       int count, int width, float by, int row0, const float (*sum)[share<T, D>::width / 8][4]) {
    if (!to)
        return;
    constexpr int WIDTH = share<T, D>::width;
    const int from = share<T, D>::part() * WIDTH;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row0 + x * 16 + half * 8 + (int)threadIdx.x % 32 / 4;
            const int64_t at = row_at(stride, n, head, first + i) + from;
            if (i >= count)
                continue;
            if (adds)
                add_sums<WIDTH>((float *)to + at, sum[x], half, width - from, by);
            else
                store_row<T, WIDTH>((T *)to + at, sum[x], half, width - from, by);
        }
}

/* In float32 so many steps are summed up at a time: one chain over thousands of queries loses more than it may. */
#define SUM_STEPS 32

/* dV, where both are made, and dK or dV; adds: to what is there. */
template <typename T, int D, bool BOTH, int TILES>
INLINE void store_key_sums(const attention_params &p, const key_work &w, bool adds, bool makes_dk, int warp_row,
                           const float (*dk)[share<T, D>::width / 8][4],
                           const float (*dv)[BOTH ? share<T, D>::width / 8 : 1][4]) {
    constexpr int WIDTH = share<T, D>::width;
    if (BOTH)
        store_sums<T, D, BOTH ? TILES : 1>(adds, p.t.dv, p.a.dv_stride, w.c.n, w.y, w.c.first_k, w.c.all_sk,
                                           (int)p.a.dv, p.keep_scale, w.key0 + warp_row,
                                           (const float(*)[WIDTH / 8][4]) dv);
    store_sums<T, D, TILES>(adds, makes_dk ? p.t.dk : p.t.dv, makes_dk ? p.a.dk_stride : p.a.dv_stride, w.c.n, w.y,
                            w.c.first_k, w.c.all_sk, (int)(makes_dk ? p.a.d : p.a.dv),
                            makes_dk ? p.scale : p.keep_scale, w.key0 + warp_row, dk);
}

/* What the map says of the tile of a step, of which there are so many for each head; without one all is seen. */
template <int BLOCK> INLINE int kind_of_step(const attention_params &p, const key_work &w, int blocks, int step) {
    const mask_map &m = p.seen_of_keys;
    const uint8_t *kinds = find_kinds(m, w.c.n, w.y * p.group + step / blocks, w.key0 / MASK_TILE);
    return kinds ? kinds[m.tiles_across > 1 ? (w.begin + step % blocks * BLOCK) / MASK_TILE : 0] : TILE_FULL;
}

/* The first step from `step` on that the mask does not empty; at least `steps`: none. */
template <int BLOCK>
INLINE int seek_step(const attention_params &p, const key_work &w, int blocks, int step, int steps) {
    while (p.seen_of_keys.kinds && step < steps && kind_of_step<BLOCK>(p, w, blocks, step) == TILE_EMPTY)
        step++;
    return step;
}

/* BOTH: dK and dV together; else (the accumulators of both do not fit) every second block makes dK, the others dV. */
template <typename T, int D, bool FULL, bool BOTH, int WARPS, int TILES, int BLOCK>
INLINE void attention_dkdv(const attention_params &p) {
    typedef backward_shared<T, D, WARPS, TILES, BLOCK> layout;
    typedef tile<T, D> t;
    constexpr int THREADS = WARPS * 32, ROWS = layout::rows, WIDTH = share<T, D>::width, APART = layout::apart,
                  MARK = 3 * layout::number_step;
    extern __shared__ __align__(16) char shared[];
    const uint32_t sk = shared_address(shared);
    const bool makes_dk = BOTH || blockIdx.x % 2;
    key_work w;
    if (!find_keys<ROWS>(p, own_tiles<T, FULL, ROWS>(p, p.a.sk, p.tiles_k), BOTH ? blockIdx.x : blockIdx.x / 2, &w) ||
        (FULL && is_left_out<T>(p, w.c, w.y)))
        return;
    if (FULL && p.seen_of_keys.kinds)
        w.begin -= w.begin % BLOCK;
    const int warp_row = share<T, D>::group() * TILES * 16, key0 = w.key0, begin = w.begin, end = w.end;
    const int64_t y = w.y;
    const place &c = w.c;
    const int blocks = begin < end ? (end - begin + BLOCK - 1) / BLOCK : 0, steps = blocks * p.group;
    const int first = FULL ? seek_step<BLOCK>(p, w, blocks, 0, steps) : 0;
    const bool rich = FULL && p.rich, hides_some = rich && hides_elements(p, p.seen_of_keys);
    const bool tf32 = p.tf32, few = few_queries<T>(c, key0, min(key0 + ROWS, c.sk));
    const dropout_state dropout = make_dropout(p);
    float dk[TILES][WIDTH / 8][4], dv[BOTH ? TILES : 1][BOTH ? WIDTH / 8 : 1][4];
    clear<TILES, WIDTH / 8>(dk);
    clear<BOTH ? TILES : 1, BOTH ? WIDTH / 8 : 1>(dv);
    if (FULL ? first < steps : steps != 0) {
        load_key_tiles<T, D, ROWS, THREADS>(p, keys_of<T>(p, c, y), values_of<T>(p, c, y), key0, 0, c.sk, sk,
                                            sk + layout::second);
        load_queries<T, D, THREADS, BLOCK, layout>(p, c, y * p.group + (FULL ? first / blocks : 0),
                                                   begin + (FULL ? first % blocks * BLOCK : 0), begin, end, sk, 0);
    }
    for (int z = threadIdx.x; z < 2 * BLOCK; z += THREADS)
        ((int *)(shared + layout::numbers + z / BLOCK * layout::numbers_bytes))[z % BLOCK * APART + MARK] = 0;
    __syncthreads();
    int done = 0, after = 0; /* steps, with options */
    for (int step = first; step < steps; step = FULL ? after : step + 1, done++) {
        if (FULL)
            after = seek_step<BLOCK>(p, w, blocks, step + 1, steps);
        const int64_t x = y * p.group + step / blocks;
        const int i0 = begin + step % blocks * BLOCK, past = FULL ? done : step, stage = past & 1;
        const uint32_t sq = sk + layout::stages + stage * layout::stage_bytes, sdo = sq + BLOCK * t::pitch;
        float *numbers = (float *)(shared + layout::numbers + stage * layout::numbers_bytes);
        const bool at_edge =
            i0 + BLOCK > end || key0 + ROWS > c.sk || meets_edge(c, i0, min(i0 + BLOCK, c.sq), key0, key0 + ROWS);
        const bool partial = FULL && p.seen_of_keys.kinds && kind_of_step<BLOCK>(p, w, blocks, step) != TILE_FULL;
        const bool cut = hides_some || partial || at_edge;
        uint32_t shown[TILES];
#pragma unroll
        for (int z = 0; z < TILES && FULL; z++)
            shown[z] = partial ? find_shown<BLOCK>(p.seen_of_keys, find_bits(p.seen_of_keys, c.n, x),
                                                   key0 + warp_row + z * 16 + (int)threadIdx.x % 32 / 4, c.sk - 1, i0)
                               : ALL_LANES;
        cp_async_wait<0>();
        if (cut) {
            clean_tile<T, D, BLOCK, THREADS, APART>(sq, (int *)numbers + MARK);
            clean_tile<T, D, BLOCK, THREADS, APART>(sdo, (int *)numbers + MARK);
        }
        __syncthreads();
        const int next = FULL ? after : step + 1;
        if (next < steps)
            load_queries<T, D, THREADS, BLOCK, layout>(p, c, y * p.group + next / blocks, begin + next % blocks * BLOCK,
                                                       begin, end, sk, stage ^ 1);
        float s[TILES][BLOCK / 8][4], dp[TILES][BLOCK / 8][4];
        form_products<T, D, WARPS, TILES, BLOCK>(p, c, sk, warp_row, sq, makes_dk, s, dp);
        if (rich)
#pragma unroll
            for (int z = 0; z < TILES; z++)
                full_gradients_of_keys<T, BLOCK, APART>(p, c, dropout, x, !at_edge, cut, shown[z],
                                                        key0 + warp_row + z * 16, i0, numbers, s[z], dp[z]);
        else if (cut)
            gradients_of_keys<T, true, TILES, BLOCK, APART>(p, c, key0 + warp_row, i0, numbers, s, dp);
        else
            gradients_of_keys<T, false, TILES, BLOCK, APART>(p, c, key0 + warp_row, i0, numbers, s, dp);
        const bool whole = few || (FULL && cut && few_are_left<T, TILES, BLOCK>(p, s));
        if (BOTH)
            product_columns<T, D, BOTH ? TILES : 1, BLOCK>((float(*)[WIDTH / 8][4]) dv, s, sdo, tf32, whole);
        if (makes_dk)
            product_columns<T, D, TILES, BLOCK>(dk, dp, sq, tf32, whole);
        else
            product_columns<T, D, TILES, BLOCK>(dk, s, sdo, tf32, whole);
        if (cut)
            clear_marks<BLOCK, THREADS, APART>((int *)numbers + MARK);
        if (sizeof(T) == 4 && past % SUM_STEPS == SUM_STEPS - 1 && next < steps) {
            store_key_sums<T, D, BOTH, TILES>(p, w, p.adds || past > SUM_STEPS, makes_dk, warp_row, dk, dv);
            clear<TILES, WIDTH / 8>(dk);
            clear<BOTH ? TILES : 1, BOTH ? WIDTH / 8 : 1>(dv);
        }
    }
    cp_async_wait<0>();
    store_key_sums<T, D, BOTH, TILES>(p, w, p.adds || (sizeof(T) == 4 && (FULL ? done : steps) > SUM_STEPS), makes_dk,
                                      warp_row, dk, dv);
}

/* -------------------------------------------------------------------------------------------------------- dQ */

/* s, dp: S, dP -> dp: dT. Rows are queries, columns keys. sums: what a lane has of the step's P, in float32. */
template <typename T, bool CUT, int TILES, int BLOCK, int APART>
INLINE void gradients_of_queries(const attention_params &p, const place &c, int row0, int j0,
                                 const float (*numbers)[2][3], const int *bad, float (*s)[BLOCK / 8][4],
                                 float (*dp)[BLOCK / 8][4], float (*sums)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int z = 0; z < TILES; z++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row0 + z * 16 + half * 8 + lane / 4;
            const float base = numbers[z][half][0], rest = numbers[z][half][1], dsum = numbers[z][half][2];
            const int first = max(i + c.lo, 0), last = i < c.sq ? min(i + c.hi, c.sk - 1) : -1;
#pragma unroll
            for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = y * 8 + lane % 4 * 2 + e, j = j0 + column;
                    float *dt = &dp[z][y][2 * half + e];
                    const bool seen = !CUT || (j >= first && j <= last);
                    const element r = lean_element<T>(p, seen, s[z][y][2 * half + e], *dt, base, rest, dsum);
                    *dt = CUT && r.seen && bad[column * APART] ? CUDART_NAN_F : r.ds;
                    if (sizeof(T) == 4)
                        sums[z][half] += r.p;
                }
        }
    }
}

/* A block owns queries query0 .. query1-1 of a head, and walks over keys begin .. end-1, which they see. */
struct query_work {
    place c;
    int64_t x, y; /* heads: its own, and that of its keys */
    int query0, query1, begin, end;
};

/* False: there are no such queries. The last queries of a causal mask see most. Dropout asks for keys by eights. */
template <int ROWS, bool FULL> INLINE bool find_queries(const attention_params &p, int tiles, query_work *w) {
    int tile;
    int64_t unit;
    tile_of_block(blockIdx.x, tiles, p.a.b * p.a.h, &tile, &unit);
    w->query0 = (tiles - 1 - tile) * ROWS;
    w->x = unit % p.a.h;
    w->y = w->x / p.group;
    w->c = find_place(p, unit / p.a.h);
    if (w->query0 >= w->c.all_sq)
        return false;
    w->query1 = min(w->query0 + ROWS, w->c.sq);
    w->begin = w->end = 0;
    if (w->query0 < w->query1) {
        w->begin = max(0, min(w->query0 + w->c.lo, w->c.sk));
        w->begin -= FULL ? w->begin % (p.seen_by_queries.kinds ? MASK_TILE : DROPOUT_KEYS) : 0;
        w->end = max(0, min(w->query1 + w->c.hi, w->c.sk));
    }
    return true;
}

/* base, rest and D of this thread's rows. */
template <int TILES>
INLINE void load_numbers(const attention_params &p, const place &c, int64_t x, int row0, float (*numbers)[2][3]) {
#pragma unroll
    for (int z = 0; z < TILES; z++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row0 + z * 16 + half * 8 + (int)threadIdx.x % 32 / 4;
            const int64_t at = i < c.sq ? lse_at(p, c, x, i) : 0;
            numbers[z][half][0] = i < c.sq ? p.base[at] : CUDART_INF_F;
            numbers[z][half][1] = i < c.sq ? p.rest[at] : 0.0f;
            numbers[z][half][2] = i < c.sq ? p.dsum[at] : 0.0f;
        }
}

/* K and V of keys j0 .. into a stage. */
template <typename T, int D, int WARPS, int TILES, int BLOCK>
INLINE void load_keys(const attention_params &p, const query_work &w, const T *k, const T *v, int j0, uint32_t shared,
                      int stage) {
    typedef backward_shared<T, D, WARPS, TILES, BLOCK> layout;
    const uint32_t to = shared + layout::stages + stage * layout::stage_bytes;
    load_key_tiles<T, D, BLOCK, WARPS * 32>(p, k, v, j0, w.begin, w.end, to, to + layout::stage_bytes / 2);
    cp_async_commit();
}

/* dQ, where it is wanted; adds: to what is there. */
template <typename T, int D, int TILES>
INLINE void store_query_sums(const attention_params &p, const query_work &w, bool adds, int row0,
                             const float (*dq)[share<T, D>::width / 8][4]) {
    store_sums<T, D, TILES>(adds, p.t.dq, p.a.dq_stride, w.c.n, w.x, w.c.first_q, w.c.all_sq, (int)p.a.d, p.scale, row0,
                            dq);
}

/* The last of them, in float32: with what the steps before have left, every row times what makes its weights sum to 1, which dkdv, behind it,
 * finds in rest. */
template <int D, int TILES>
INLINE void end_query_sums(const attention_params &p, const query_work &w, bool more, int row0,
                           const float (*weights)[2], const float (*numbers)[2][3],
                           const float (*dq)[share<float, D>::width / 8][4]) {
    constexpr int WIDTH = share<float, D>::width;
    const int from = share<float, D>::part() * WIDTH;
#pragma unroll
    for (int z = 0; z < TILES; z++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float rest = numbers[z][half][1];
            const float by = settle_row(p, w.x, quad_sum(weights[z][half]), numbers[z][half][0], &rest);
            const int i = row0 + z * 16 + half * 8 + (int)threadIdx.x % 32 / 4;
            if (i < w.c.sq && threadIdx.x % 4 == 0 && !from)
                p.rest[lse_at(p, w.c, w.x, i)] = rest;
            if (p.t.dq && i < w.c.all_sq)
                add_row<WIDTH, false>((float *)p.t.dq + row_at(p.a.dq_stride, w.c.n, w.x, w.c.first_q + i) + from,
                                      dq[z], half, (int)p.a.d - from, p.scale * by, more ? by : -1.0f);
        }
}

template <typename T, int D, bool FULL, int WARPS, int TILES, int BLOCK>
INLINE void attention_dq(const attention_params &p) {
    typedef backward_shared<T, D, WARPS, TILES, BLOCK> layout;
    constexpr int THREADS = WARPS * 32, ROWS = layout::rows, WIDTH = share<T, D>::width, APART = layout::apart;
    extern __shared__ __align__(16) char shared[];
    const uint32_t sq = shared_address(shared);
    query_work w;
    if (!find_queries<ROWS, FULL>(p, own_tiles<T, FULL, ROWS>(p, p.a.sq, p.tiles_q), &w) ||
        (FULL && is_left_out<T>(p, w.c, w.y)))
        return;
    const int warp_row = share<T, D>::group() * TILES * 16, row0 = w.query0 + warp_row;
    const place c = w.c;
    const int64_t x = w.x;
    const T *k = keys_of<T>(p, c, w.y), *v = values_of<T>(p, c, w.y);
    const dropout_state dropout = make_dropout(p);
    const bool few = few_keys<T>(c, w.query0, w.query1);
    const uint8_t *const kinds = FULL ? find_kinds(p.seen_by_queries, c.n, x, w.query0 / MASK_TILE) : NULL;
    const bool rich = FULL && p.rich, hides_some = rich && hides_elements(p, p.seen_by_queries);
    const int first = seek_column(kinds, w.begin, w.end);
    float dq[TILES][WIDTH / 8][4], numbers[TILES][2][3], weights[TILES][2] = {};
    load_numbers<TILES>(p, c, x, row0, numbers);
    clear<TILES, WIDTH / 8>(dq);
    for (int z = threadIdx.x; z < 2 * BLOCK; z += THREADS)
        ((int *)(shared + layout::numbers + z / BLOCK * layout::numbers_bytes))[z % BLOCK * APART] = 0;
    if (first < w.end) {
        load_query_tiles<T, D, ROWS, THREADS>(p, c, x, w.query0, 0, c.sq, sq, sq + layout::second);
        load_keys<T, D, WARPS, TILES, BLOCK>(p, w, k, v, first, sq, 0);
    }
    __syncthreads();
    int stage = 0, step = 0, next;
    for (int j0 = first; j0 < w.end; j0 = next, stage ^= 1) {
        next = seek_column(kinds, j0 + BLOCK, w.end);
        const uint32_t sk = sq + layout::stages + stage * layout::stage_bytes;
        int *marks = (int *)(shared + layout::numbers + stage * layout::numbers_bytes);
        const bool at_edge =
            j0 + BLOCK > w.end || w.query0 + ROWS > c.sq || meets_edge(c, w.query0, w.query1, j0, j0 + BLOCK);
        const bool partial = kinds && kinds[j0 / MASK_TILE] != TILE_FULL, cut = hides_some || partial || at_edge;
        uint32_t shown[TILES];
#pragma unroll
        for (int z = 0; z < TILES && FULL; z++)
            shown[z] = partial ? find_shown<BLOCK>(p.seen_by_queries, find_bits(p.seen_by_queries, c.n, x),
                                                   row0 + z * 16 + (int)threadIdx.x % 32 / 4, c.sq - 1, j0)
                               : ALL_LANES;
        cp_async_wait<0>();
        if (cut)
            clean_tile<T, D, BLOCK, THREADS, APART>(sk, marks);
        __syncthreads();
        if (next < w.end)
            load_keys<T, D, WARPS, TILES, BLOCK>(p, w, k, v, next, sq, stage ^ 1);
        float s[TILES][BLOCK / 8][4], dp[TILES][BLOCK / 8][4], sums[TILES][2] = {};
        form_products<T, D, WARPS, TILES, BLOCK>(p, c, sq, warp_row, sk, true, s, dp);
        if (rich)
#pragma unroll
            for (int z = 0; z < TILES; z++)
                full_gradients_of_queries<T, BLOCK, APART>(p, c, dropout, x, !at_edge, cut, shown[z], row0 + z * 16, j0,
                                                           numbers[z], marks, s[z], dp[z], sums[z]);
        else if (cut)
            gradients_of_queries<T, true, TILES, BLOCK, APART>(p, c, row0, j0, numbers, marks, s, dp, sums);
        else
            gradients_of_queries<T, false, TILES, BLOCK, APART>(p, c, row0, j0, numbers, marks, s, dp, sums);
        for (int z = 0; z < 2 * TILES; z++)
            weights[z / 2][z % 2] += sums[z / 2][z % 2];
        product_columns<T, D, TILES, BLOCK>(dq, dp, sk, p.tf32,
                                            few || (FULL && cut && few_are_left<T, TILES, BLOCK>(p, dp)));
        if (cut)
            clear_marks<BLOCK, THREADS, APART>(marks);
        if (sizeof(T) == 4 && ++step % SUM_STEPS == 0 && next < w.end) {
            store_query_sums<T, D, TILES>(p, w, p.adds || step > SUM_STEPS, row0, dq);
            clear<TILES, WIDTH / 8>(dq);
        }
    }
    cp_async_wait<0>();
    if constexpr (sizeof(T) == 4)
        end_query_sums<D, TILES>(p, w, p.adds || step > SUM_STEPS, row0, weights, numbers, dq);
    else
        store_query_sums<T, D, TILES>(p, w, p.adds, row0, dq);
}

#define pass_prep(T, D, FULL, WARPS, TILES, BLOCK) attention_prep<T, D, WARPS, TILES, BLOCK>(p)
#define variant_lean false
#define variant_full true
#define pass_dkdv(T, D, FULL, WARPS, TILES, BLOCK)                                                                     \
    attention_dkdv<T, D, FULL, sm80_makes_both(D, TILES), WARPS, TILES, BLOCK>(p)
#define pass_dq(T, D, FULL, WARPS, TILES, BLOCK) attention_dq<T, D, FULL, WARPS, TILES, BLOCK>(p)
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ attention_params p) {    \
        wait_for_earlier_grid();                                                                                       \
        pass_##pass(dtype, dim, variant_##variant, warps, sm80_tiles(sizeof(dtype), dim, warps, own), block);          \
    }

/* SPDX-License-Identifier: Apache-2.0
 * Attention forward for Hopper in float32: each product is three of float16 (attention/sm90_f32/split.cuh), high·low + low·high +
 * high·high, so that the error is that of float32.
 *
 * A block has a warpgroup for each 64 queries, which splits them itself; over d 128 two warpgroups share 64, and each makes all scores and
 * half of o's columns. One thread sends for the tiles of K and V, which lie ready; the warpgroups take turns in giving the tensor cores
 * work, P·V of one tile and the scores of the next, so that one computes the softmax while another multiplies. The tensor cores cut off when they add to an accumulator: each tile's P·V begins from zero, and is
 * added to o by a rounding addition, where the tiles' different powers of two cost nothing. */
#include "cuda/attention/sm90_f32/fwd_softmax.cuh"
#include "cuda/attention/sm90_f32/options.cuh"

/* ------------------------------------------------------------------------------------------------------- products */

/* S = Q·Kᵀ, the small parts first: issued. K's parts lie in slots of their own; the large products of the second are summed in `rest`, so
 * that less is cut off. */
template <int D>
INLINE void issue_scores(uint32_t q, const uint32_t (&k)[split_parts(D)], float (*s)[4], float (*rest)[4]) {
    const uint64_t q_high = describe_rows(q), q_low = describe_rows(q + PART_BYTES);
    constexpr int ROWS = 2 * SPLIT_ROWS, STEPS = D / split_parts(D) / 16; /* of a part */
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < D / 16; x++)
        wgmma<f16, 64, 0>::run(s, q_low + rows_step<ROWS>(x), describe_rows(k[x / STEPS]) + rows_step<ROWS>(x % STEPS),
                               x > 0);
#pragma unroll
    for (int x = 0; x < D / 16; x++)
        wgmma<f16, 64, 0>::run(s, q_high + rows_step<ROWS>(x),
                               describe_rows(k[x / STEPS] + PART_BYTES) + rows_step<ROWS>(x % STEPS), 1);
#pragma unroll
    for (int x = 0; x < D / 16; x++)
        wgmma<f16, 64, 0>::run(x < STEPS ? s : rest, q_high + rows_step<ROWS>(x),
                               describe_rows(k[x / STEPS]) + rows_step<ROWS>(x % STEPS), x != STEPS);
    wgmma_commit();
}

/* P in two parts, as A operands. */
struct split_weights {
    uint32_t high[SPLIT_ROWS / 16][4], low[SPLIT_ROWS / 16][4];
};

/* part = P·V, of D columns: issued. */
template <int D> INLINE void issue_sums(const split_weights &a, uint32_t v, float (*part)[4]) {
    const uint64_t high = describe_columns<2 * PART_BYTES>(v), low = describe_columns<2 * PART_BYTES>(v + PART_BYTES);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < SPLIT_ROWS / 16; x++)
        wgmma<f16, D, 1>::run(part, a.low[x], high + columns_step(x), x > 0);
#pragma unroll
    for (int x = 0; x < SPLIT_ROWS / 16; x++)
        wgmma<f16, D, 1>::run(part, a.high[x], low + columns_step(x), 1);
#pragma unroll
    for (int x = 0; x < SPLIT_ROWS / 16; x++)
        wgmma<f16, D, 1>::run(part, a.high[x], high + columns_step(x), 1);
    wgmma_commit();
}

INLINE void split_scores(const float (*s)[4], split_weights *a) {
#pragma unroll
    for (int x = 0; x < SPLIT_ROWS / 16; x++)
#pragma unroll
        for (int y = 0; y < 4; y++)
            split_pair(s[2 * x + y / 2][y % 2 * 2], s[2 * x + y / 2][y % 2 * 2 + 1], &a->high[x][y], &a->low[x][y]);
}

/* ------------------------------------------------------------------------------------------------------ arithmetic */

INLINE split_info read_info(uint32_t at) {
    const uint4 r = load_shared16(at);
    return {(int)r.x, (int)r.y, {r.z, r.w}};
}

/* Every lane arrives: each has read the tile's info. */
INLINE void release(uint32_t barrier) {
    mbarrier_arrive(barrier);
}

/* The turns of the warpgroups to issue products. */
template <int GROUPS> INLINE void take_turn(int group) {
    barrier_sync(1 + group, 2 * WARPGROUP);
}
template <int GROUPS> INLINE void pass_turn(int group) {
    barrier_arrive(1 + (group + 1) % GROUPS, 2 * WARPGROUP);
}

/* A warpgroup's 64 queries: what does not change from tile to tile. */
struct forward_rows {
    int i0, last;   /* first row, and last that there is */
    int lo, hi, sk; /* row i sees keys i+lo .. i+hi of sk */
    float mantissa; /* of scale·log2(e) */
    int exponent;   /* the power of two that is left of it, divided by Q's */
    uint32_t marks; /* of the thread's two rows, in bits 0 and 8 */
};

/* Eights of columns whose bias is asked for together. */
#define EIGHTS 2

/* What the map shows of this lane's rows in tile t; all where that is not cut. */
INLINE uint32_t find_shown_rows(const attention_params &p, const forward_work &f, const forward_rows &w, int t,
                                bool partial) {
    if (!partial || !p.seen_by_queries.kinds)
        return ALL_LANES;
    return find_shown<SPLIT_ROWS>(p.seen_by_queries, find_bits(p.seen_by_queries, f.c.n, f.x), w.i0 + fragment_row(),
                                  f.c.sq - 1, t * SPLIT_ROWS);
}

/* q·k -> S by all options, of tile t, of which the map shows what is `shown`; what a mark says comes in front of what hides. */
INLINE void apply_options(const attention_params &p, const forward_work &f, const forward_rows &w, int t, bool partial,
                          uint32_t shown, int exponent, const uint32_t marks[2], float (*s)[4]) {
    const int j0 = t * SPLIT_ROWS, row = w.i0 + fragment_row(), column = j0 + fragment_column();
    const bool whole = j0 + SPLIT_ROWS <= w.sk && j0 + SPLIT_ROWS - 1 <= w.i0 + w.hi && j0 >= w.last + w.lo &&
                       w.i0 + SPLIT_ROWS - 1 == w.last;
    lane_options<float> o[2];
    find_options<float, false>(p, f.c, f.x, row, column, o);
    uint32_t seen = whole ? ALL_LANES : find_seen<SPLIT_ROWS>(f.c, row, row + 8, column);
    seen &= shown;
    float slack[EIGHTS][4];
    const float by = scale_by(front_factor(p), w.exponent - exponent);
#pragma unroll
    for (int y = 0; y < SPLIT_ROWS / 8; y += EIGHTS)
        make_scores<float, false, EIGHTS>(p, o, by, whole, y, &seen, s + y, slack, !p.seen_by_queries.kinds);
    if (w.marks | marks[0] | marks[1])
        mark_scores(w.marks, marks, s);
    if (!whole || partial || hides_elements(p, p.seen_by_queries))
        hide_scores<SPLIT_ROWS / 8>(seen, s);
}

/* P of tile t -> 0 where it is dropped. */
INLINE void drop(const attention_params &p, const forward_work &f, const forward_rows &w, int t, float (*s)[4]) {
    const int warp_row = (int)threadIdx.x % WARPGROUP / 32 * 16;
    drop_elements(find_kept<false, SPLIT_ROWS>(p, make_dropout(p), dropout_head(p, f.c.n, f.x),
                                               w.i0 + warp_row + duty_row(), t * SPLIT_ROWS),
                  1.0f, s);
}

/* The scores of tile t are there: marks and masks, softmax, then `finish` of the tile before, the two parts of P. o and *unit: of which
 * power of two V is. */
template <int D, bool FULL, typename F>
INLINE void receive_scores(const attention_params &p, const forward_work &f, const forward_rows &w, int t, bool partial,
                           uint32_t shown, uint32_t info, softmax_state *state, float (*s)[4], split_weights *a,
                           float (*o)[4], float *unit, F finish) {
    const split_info k = read_info(info), v = read_info(info + 16);
    const float c = FULL ? LOG2E : w.mantissa * power_of_two(max(-126, min(w.exponent - k.exponent, 125)));
    const uint32_t marks[2] = {k.marks[0] | v.marks[0], k.marks[1] | v.marks[1]};
    const int j0 = t * SPLIT_ROWS;
    float shrink[2];
    if (FULL) {
        apply_options(p, f, w, t, partial, shown, k.exponent, marks, s);
    } else {
        if (w.marks | marks[0] | marks[1])
            mark_scores(w.marks, marks, s);
        if (j0 + SPLIT_ROWS > w.sk || j0 + SPLIT_ROWS - 1 > w.i0 + w.hi)
            mask_above<SPLIT_ROWS>(w.hi, w.sk, w.i0, j0, s);
        if (j0 < w.last + w.lo)
            mask_below<SPLIT_ROWS>(w.lo, w.i0, j0, s);
    }
    const bool grows = online_softmax(state, c, s, shrink);
    if (FULL && p.drops)
        drop(p, f, w, t, s);
    finish();
    if (grows)
#pragma unroll
        for (int y = 0; y < D / split_parts(D) / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[y][e] *= shrink[e / 2];
    split_scores(s, a);
    *unit = SPLIT_GIVES_BACK * power_of_two(-SHIFT - v.exponent);
}

/* The tile whose first part is at r: waits for all of it; addresses of its parts. The next tile's place is returned. */
template <typename layout> INLINE ring await_tile(uint32_t smem, ring r, uint32_t (&at)[layout::parts]) {
#pragma unroll
    for (int part = 0; part < layout::parts; part++) {
        mbarrier_wait(smem + layout::barriers + FULL_SLOT + r.slot * 8, r.turn);
        at[part] = smem + layout::keys + r.slot * layout::part;
        advance<layout::slots>(&r);
    }
    return r;
}

/* All of the tile is done with, and r goes on to the next. */
template <typename layout> INLINE void release_tile(uint32_t smem, ring *r) {
#pragma unroll
    for (int part = 0; part < layout::parts; part++) {
        release(smem + layout::barriers + EMPTY + r->slot * 8);
        advance<layout::slots>(r);
    }
}

/* The part that has a warpgroup's columns. */
template <typename layout> INLINE uint32_t part_of(const uint32_t (&at)[layout::parts], int group) {
    return at[layout::parts == 1 || group % layout::parts == 0 ? 0 : layout::parts - 1];
}

/* A tile of K and one of V that this warpgroup does not see. */
template <int D, int GROUPS> INLINE void pass_by(uint32_t smem, ring *r, int tiles, int group) {
    typedef forward32<D, GROUPS> layout;
    for (int x = 0; x < tiles; x++) {
        take_turn<GROUPS>(group);
        pass_turn<GROUPS>(group);
        for (int y = 0; y < 2 * layout::parts; y++) {
            const uint32_t full = smem + layout::barriers + FULL_SLOT + r->slot * 8;
            mbarrier_wait(full, r->turn);
            release(full + EMPTY - FULL_SLOT);
            advance<layout::slots>(r);
        }
    }
}

/* o += part·unit. */
template <int COLUMNS> INLINE void add_sums(const float (*part)[4], float unit, float (*o)[4]) {
#pragma unroll
    for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            o[y][e] = fmaf(part[y][e], unit, o[y][e]);
    pin_all<COLUMNS / 8>(o);
}

/* The scores are there, and their rest with them. */
template <int PARTS> INLINE void join_scores(float (*s)[4], float (*rest)[4]) {
    pin_all<SPLIT_ROWS / 8>(s);
    if (PARTS == 1)
        return;
    pin_all<SPLIT_ROWS / 8>(rest);
#pragma unroll
    for (int y = 0; y < SPLIT_ROWS / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] += rest[y][e];
}

/* Tiles t0 .. t1-1. The warpgroup's part of V is that of its columns of o. Where scores take twice the registers, P·V is made in two strips
 * of columns, the second behind the scores of the next tile. With options tiles as `steps` has them, up to the last or one that this
 * warpgroup does not see; what the last of them was is returned. */
template <int D, int GROUPS, bool FULL>
INLINE uint32_t compute(const attention_params &p, const forward_work &f, const forward_rows &w, int t0, int t1,
                        int group, uint32_t smem, const uint32_t *steps, ring *r, softmax_state *state, float (*o)[4]) {
    typedef forward32<D, GROUPS> layout;
    constexpr int PARTS = layout::parts, COLUMNS = layout::columns, STRIP = COLUMNS / PARTS;
    constexpr int STRIP_BYTES = STRIP / 64 * 2 * PART_BYTES;
    const uint32_t q = smem + group / PARTS * layout::tile;
    split_weights a;
    uint32_t k[PARTS], v[PARTS];
    float s[SPLIT_ROWS / 8][4], rest[SPLIT_ROWS / 8][4], part[STRIP / 8][4], unit;
    await_tile<layout>(smem, *r, k);
    uint32_t step = FULL ? steps[r->slot] : 0, shown = ALL_LANES;
    bool partial = FULL && kind_in(step, group / PARTS) == TILE_PARTIAL;
    if (FULL)
        t0 = tile_in(step);
    take_turn<GROUPS>(group);
    if (FULL)
        prefetch_bias(p, f.c, f.x, w.i0, t0 * SPLIT_ROWS);
    issue_scores<D>(q, k, s, rest);
    pass_turn<GROUPS>(group);
    if (FULL)
        shown = find_shown_rows(p, f, w, t0, partial);
    wgmma_wait<0>();
    join_scores<PARTS>(s, rest);
    receive_scores<D, FULL>(p, f, w, t0, partial, shown, smem + layout::infos + r->slot * 32, state, s, &a, o, &unit,
                            [] {});
    release_tile<layout>(smem, r);
#pragma unroll 1
    for (int t = t0 + 1; FULL ? !(step & STEP_LAST) : t < t1; t++) {
        ring next = await_tile<layout>(smem, *r, v);
        await_tile<layout>(smem, next, k);
        if (FULL) {
            const uint32_t next_step = steps[next.slot];
            if (kind_in(next_step, group / PARTS) == TILE_EMPTY)
                break;
            step = next_step;
            t = tile_in(step);
            partial = kind_in(step, group / PARTS) == TILE_PARTIAL;
        }
        const uint32_t mine = part_of<layout>(v, group);
        take_turn<GROUPS>(group);
        pin_all<4>(a.high);
        pin_all<4>(a.low);
        if (FULL)
            prefetch_bias(p, f.c, f.x, w.i0, t * SPLIT_ROWS);
        issue_sums<STRIP>(a, mine, part);
        issue_scores<D>(q, k, s, rest);
        pass_turn<GROUPS>(group);
        if (FULL)
            shown = find_shown_rows(p, f, w, t, partial);
        wgmma_wait<1>();
        pin_all<STRIP / 8>(part);
        if (PARTS == 1)
            release_tile<layout>(smem, r);
        add_sums<STRIP>(part, unit, o);
        if (PARTS > 1) {
            issue_sums<STRIP>(a, mine + STRIP_BYTES, part);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        join_scores<PARTS>(s, rest);
        receive_scores<D, FULL>(p, f, w, t, partial, shown, smem + layout::infos + next.slot * 32, state, s, &a, o,
                                &unit, [&] {
                                    if (PARTS == 1)
                                        return;
                                    wgmma_wait<0>();
                                    pin_all<STRIP / 8>(part);
                                    release_tile<layout>(smem, r);
                                    add_sums<STRIP>(part, unit, o + STRIP / 8);
                                });
        release_tile<layout>(smem, r);
    }
    await_tile<layout>(smem, *r, v);
    pin_all<4>(a.high);
    pin_all<4>(a.low);
#pragma unroll
    for (int strip = 0; strip < PARTS; strip++) {
        issue_sums<STRIP>(a, part_of<layout>(v, group) + strip * STRIP_BYTES, part);
        wgmma_wait<0>();
        pin_all<STRIP / 8>(part);
        if (strip == PARTS - 1)
            release_tile<layout>(smem, r);
        add_sums<STRIP>(part, unit, o + strip * STRIP / 8);
    }
    return step;
}

/* ------------------------------------------------------------------------------------------------------- the result */

/* What the sums of a row are multiplied with; its log-sum-exp is stored, by the first of its sharers, when all have read what was there.
 * The sink joins in. *keep: as add_row takes it. */
template <typename layout>
INLINE float end_query(const attention_params &p, const forward_work &w, int group, int i, float max, float offset,
                       float sum, float *keep) {
    const float mantissa = mantissa_of(p.scale_log2), unit = p.unit / power_of(p.scale_log2);
    const float sink = sink_of(p, w.x, i < w.c.sq);
    float lse;
    sum = i < w.c.sq ? sum * power_of_two(-SHIFT) : 0.0f;
    const bool far = sum != 0.0f && is_far(max, mantissa);
    float shrink = end_row<float>(p, far, unit, max, mantissa, SHIFT - offset, sink, &sum, &lse);
    if (p.adds && i < w.c.all_sq) {
        const row_shares s = join_before(p, lse_at(p, w.c, w.x, i), &lse);
        shrink *= s.take;
        *keep = s.keep;
    }
    if (layout::parts > 1 && p.adds)
        barrier_sync(1 + layout::sets * layout::parts + group / layout::parts, layout::sharers);
    if (p.t.lse && threadIdx.x % 4 == 0 && i < w.c.all_sq && group % layout::parts == 0)
        ((float *)p.t.lse)[lse_at(p, w.c, w.x, i)] = lse;
    return sum == 0.0f ? 0.0f : shrink / sum;
}

/* o = O / sum, and lse. The four lanes of a row write 32 bytes. */
template <typename layout, bool FULL>
INLINE void store_rows(const attention_params &p, const forward_work &w, int i0, int group, const softmax_state &state,
                       const float (*o)[4]) {
    const int column = group % layout::parts * layout::columns + fragment_column();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = i0 + fragment_row() + half * 8;
        float keep = 0.0f;
        const float by =
            end_query<layout>(p, w, group, i, state.max[half], state.offset[half], quad_sum(state.sum[half]), &keep) *
            (FULL ? p.keep_scale : 1.0f);
        float *to = (float *)p.t.o + row_at(p.a.o_stride, w.c.n, w.x, w.c.first_q + i);
        if (i >= w.c.all_sq)
            continue;
#pragma unroll
        for (int y = 0; y < layout::columns / 8; y++) {
            const int e = y * 8 + column;
            float x0 = by == 0.0f ? 0.0f : o[y][2 * half] * by, x1 = by == 0.0f ? 0.0f : o[y][2 * half + 1] * by;
            if (p.adds && keep >= 0.0f) {
                x0 = e < (int)p.a.dv ? fmaf(to[e], keep, x0) : x0;
                x1 = e + 1 < (int)p.a.dv ? fmaf(to[e + 1], keep, x1) : x1;
            }
            if (p.vectors & VECTOR_O) {
                if (e < (int)p.a.dv)
                    *(float2 *)(to + e) = make_float2(x0, x1);
            } else {
                if (e < (int)p.a.dv)
                    to[e] = x0;
                if (e + 1 < (int)p.a.dv)
                    to[e + 1] = x1;
            }
        }
    }
}

template <int D, int GROUPS, bool FULL>
INLINE void consume(const attention_params &p, const forward_work &w, int group, uint32_t smem, char *shared) {
    typedef forward32<D, GROUPS> layout;
    forward_rows rows;
    softmax_state state;
    float o[layout::columns / 8][4];
    int t0, t1;
    ring r = {0, 0};
    const int set = group / layout::parts;
    rows.i0 = w.row0 + set * SPLIT_ROWS;
    rows.last = min(w.c.sq, rows.i0 + SPLIT_ROWS) - 1;
    rows.lo = w.c.lo;
    rows.hi = w.c.hi;
    rows.sk = w.c.sk;
    find_keys(w.c, rows.i0, rows.last + 1, &t0, &t1);
    zero_all<layout::columns / 8>(o);
    state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    if (group == GROUPS - 1)
        pass_turn<GROUPS>(group);
    if (t0 == t1)
        t0 = t1 = w.t1;
    if (t0 < t1) {
        rows.mantissa = mantissa_of(p.scale_log2);
        rows.exponent =
            exponent_of(p.scale_log2) - split_queries<D, GROUPS, FULL>(p, w, rows.i0, set, shared, &rows.marks);
    }
    if constexpr (FULL) {
        const uint32_t *const steps = (const uint32_t *)(shared + layout::steps);
        uint32_t step = w.t0 < w.t1 ? 0 : STEP_LAST;
#pragma unroll 1
        while (!(step & STEP_LAST)) {
            mbarrier_wait(smem + layout::barriers + FULL_SLOT + r.slot * 8, r.turn);
            step = steps[r.slot];
            if (kind_in(step, set) == TILE_EMPTY)
                pass_by<D, GROUPS>(smem, &r, 1, group);
            else
                step = compute<D, GROUPS, FULL>(p, w, rows, 0, 0, group, smem, steps, &r, &state, o);
        }
    } else {
        pass_by<D, GROUPS>(smem, &r, t0 - w.t0, group);
        if (t0 < t1) {
            compute<D, GROUPS, FULL>(p, w, rows, t0, t1, group, smem, NULL, &r, &state, o);
        }
        pass_by<D, GROUPS>(smem, &r, w.t1 - t1, group);
    }
    store_rows<layout, FULL>(p, w, rows.i0, group, state, o);
}

template <int D, int GROUPS, bool FULL> INLINE void attention_forward32(const attention_params &p) {
    typedef forward32<D, GROUPS> layout;
    extern __shared__ char shared[];
    const uint32_t smem = align_tiles(shared_address(shared)), barriers = smem + layout::barriers;
    char *const from = shared + (smem - shared_address(shared));
    const forward_work w = find_work<layout::rows>(p);
    if (w.row0 >= w.c.all_sq || (FULL && has_few(p, w.c, w.x / p.group)))
        return;
    if (threadIdx.x == 0) {
        for (int x = 0; x < layout::slots; x++) {
            mbarrier_init(barriers + FULL_SLOT + x * 8, 1);
            mbarrier_init(barriers + EMPTY + x * 8, GROUPS * WARPGROUP);
        }
        mbarrier_init_fence();
    }
    if (threadIdx.x < 2 * layout::sets)
        ((uint32_t *)(from + layout::marks))[threadIdx.x] = 0;
    __syncthreads();
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    if (warp < 4) {
        registers_fewer<GROUPS == 2 ? 40 : 32>();
        if (threadIdx.x == 0 && w.t0 < w.t1) {
            if constexpr (FULL)
                produce_seen<D, GROUPS>(p, w, smem, from);
            else
                produce<D, GROUPS>(p, w, smem);
        }
    } else {
        registers_more<GROUPS == 2 ? 232 : 160>();
        consume<D, GROUPS, FULL>(p, w, warp / 4 - 1, smem, from);
    }
}

#define variant_lean false
#define variant_full true
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        wait_for_earlier_grid();                                                                                       \
        attention_forward32<dim, warps / 4 - 1, variant_##variant>(p);                                                 \
    }

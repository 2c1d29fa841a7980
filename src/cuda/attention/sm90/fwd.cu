/* SPDX-License-Identifier: Apache-2.0
 * Attention forward for Hopper, with the ideas of FlashAttention-3 (Shah et al. 2024).
 *
 * A block stays on its multiprocessor and takes one tile of 64·GROUPS queries after the other. One thread sends for Q and for
 * the tiles of K and V, two warps clean those tiles of V that a mask cuts, and GROUPS warpgroups of 64 queries each compute:
 * while the tensor cores add P·V of one tile, the softmax of the next one is on its way, and the warpgroups take turns in
 * giving the tensor cores work. The first scores of a tile of queries are formed while o of the one before is stored. The fourth
 * warp sees to the tiles that see no keys, and with a mask it sends for V. */
#include "cuda/attention/sm90/fwd_scores.cuh"

/* ------------------------------------------------------------------------------------------------------ arithmetic */

/* full: what the options need beside the scores. */
struct option_view {
    const attention_params *p;
    const query_options *o;
    const int *steps;
    const int *hidden;        /* paged: of each tile of K, which groups of PAGE_ROWS keys are in no page */
    const key_scales *scales; /* paged: of the keys of this tile of queries */
};

/* paged: the groups of keys of the n-th tile that are in no page, a bit each; TIMES: its scores are multiplied by the scale of the keys. */
#define TIMES (1 << 30)
template <int FULL, bool PAGED, typename layout> INLINE int find_hidden_in(const option_view &v, unsigned n) {
    if (!PAGED)
        return 0;
    const bool times = FULL ? v.scales->k != 1.0f : !is_unit(*v.p, v.scales->k);
    return __shfl_sync(ALL_LANES, v.hidden[slot_of<layout::stages>(n)] | (times ? TIMES : 0), 0);
}
template <int BLOCK> INLINE void hide(int hidden, float (*s)[4]) {
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (hidden >> (y * 8 / PAGE_ROWS) & 1)
                s[y][e] = -CUDART_INF_F;
}

/* full: what is told of the n-th tile of keys. The compiler has to see that all lanes have the same, or what depends on it, such as which
 * tile comes next, is held in vector registers. */
INLINE int find_step(const option_view &v, unsigned n) {
    return __shfl_sync(ALL_LANES, v.steps[n % STEPS], 0);
}

/* O is added up: V of a cut tile is free. Rows that see a key whose V was cleaned are to be NaN. The lane that arrives reads the marks. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL>
INLINE void receive_marks(const forward_span &w, const option_view &v, int group, int step, uint32_t smem, unsigned n,
                          int *bad) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (threadIdx.x % 32 == 0)
        x = load_shared16(smem + layout::bad + slot_of<layout::stages>(n) * 16);
    if (!__any_sync(ALL_LANES, (x.x | x.y | (BLOCK > 64 ? x.z | x.w : 0)) != 0))
        return;
    x.x = __shfl_sync(ALL_LANES, x.x, 0);
    x.y = __shfl_sync(ALL_LANES, x.y, 0);
    x.z = BLOCK > 64 ? __shfl_sync(ALL_LANES, x.z, 0) : 0;
    x.w = BLOCK > 64 ? __shfl_sync(ALL_LANES, x.w, 0) : 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = group * 64 + fragment_row() + half * 8, j0 = FULL ? step & ~STEP_FLAGS : step, i = row - j0;
        const int first = i + w.lo, last = min(i + w.hi, w.sk - 1 - j0);
        if (has_bit(x, first, last) && (!FULL || sees_marked<T, FULL>(*v.p, *v.o, row, step, x, first, last)))
            *bad |= 1 << half;
    }
}

/* What dropout keeps of the n-th tile of keys, as the warps have made it that make it ahead; once for each tile. */
template <int BLOCK, typename layout>
INLINE kept_pair take_kept(const option_view &v, int group, uint32_t smem, unsigned n) {
    const unsigned slot = slot_of<FORWARD_KEPT_SLOTS>(n);
    const char *from = (const char *)v.steps + (layout::kept - layout::steps) + slot * layout::kept_bytes;
    mbarrier_wait(smem + layout::kept_full + slot * 8, turn_of<FORWARD_KEPT_SLOTS>(n));
    const kept_pair kept = take_kept_rows<layout::rows, BLOCK>(from, group * 64);
    mbarrier_arrive(smem + layout::kept_empty + slot * 8); /* each lane: racecheck sees no other order */
    return kept;
}

/* q·k -> S, but for what a band or bits mask. A tile with a bias counts as cut. */
template <typename T, int BLOCK, bool CUT, int FULL, typename layout>
INLINE void apply_all(const option_view &v, int group, int step, int sk, uint32_t smem, unsigned n, float (*s)[4]) {
    const attention_params &p = *v.p;
    const int j0 = step & ~STEP_FLAGS;
    const float by = cap_and_slope<T, BLOCK, FULL>(p, *v.o, group * 64, j0, s, CUT && (step & STEP_FEW));
    if (CUT && has_boxes<FULL>(p)) {
        const bool alike = is_alike(p); /* then the first warpgroup's is that of all */
        const int place = alike ? 0 : group;
        mbarrier_wait(smem + layout::bias_full + place * 8, turn_of<1>(n));
        const uint32_t boxes = smem + layout::bias + place * layout::bias_bytes;
        if (layout::dim <= 128 && alike && is_nothing<BLOCK>(boxes)) /* at 256 it costs other biases as much */
            scale_scores<BLOCK>(by, s);
        else
            add_boxes<T, BLOCK>(boxes, alike, by, s);
        mbarrier_arrive(smem + layout::bias_empty + group * 8);
    } else if (CUT && has_bias<FULL>(p)) {
        add_biases<T, BLOCK>(p, *v.o, group * 64, j0, sk, by, s);
    } else if (FULL & (WITH_SLOPES | WITH_BIAS)) { /* else the factor is in the exponent */
        scale_scores<BLOCK>(by, s);
    }
}

/* The scores are there: K is free, and a single Q after its last; what is not seen of a cut tile is taken out of them. */
template <typename T, int D, int GROUPS, int BLOCK, bool CUT, int FULL, bool PAGED>
INLINE void receive_scores(const forward_span &w, const option_view &v, int group, int step, uint32_t smem, unsigned n,
                           const read_ahead<BLOCK> &read, int hidden, float (*s)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const int j0 = FULL ? step & ~STEP_FLAGS : step;
    pin_all<BLOCK / 8>(s);
    if (!layout::is_wide) /* else chunk by chunk */
        release_keys<layout>(smem, n);
    if (layout::q_stages == 1 && (FULL ? step & STEP_LAST : j0 == w.begin))
        release(smem + layout::barriers + Q_EMPTY);
    if (PAGED && (hidden & TIMES))
        scale_scores<BLOCK>(v.scales->k, s);
    if (FULL)
        apply_all<T, BLOCK, CUT, FULL, layout>(v, group, step, w.sk, smem, n, s);
    if (CUT && has_bits<FULL>(step))
        apply_bits<BLOCK>(read.bits, -CUDART_INF_F, s);
    if (CUT && (j0 + BLOCK > w.end || j0 + BLOCK - 1 > group * 64 + w.hi || j0 < group * 64 + 63 + w.lo))
        mask_band<BLOCK>(w, group * 64, j0, s);
    if (hidden)
        hide<BLOCK>(hidden, s);
}

/* A tile of keys that this warpgroup passes by, and its bias. */
template <int D, int GROUPS, int BLOCK, int FULL>
INLINE void pass_by_keys(const attention_params &p, uint32_t smem, int group, unsigned n) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    await_keys<layout>(smem, n);
    release_keys<layout>(smem, n);
    if (has_boxes<FULL>(p)) {
        mbarrier_wait(smem + layout::bias_full + (is_alike(p) ? 0 : group * 8), turn_of<1>(n));
        mbarrier_arrive(smem + layout::bias_empty + group * 8);
    }
    if (makes_ahead<FULL>()) {
        mbarrier_wait(smem + layout::kept_full + slot_of<FORWARD_KEPT_SLOTS>(n) * 8, turn_of<FORWARD_KEPT_SLOTS>(n));
        mbarrier_arrive(smem + layout::kept_empty + slot_of<FORWARD_KEPT_SLOTS>(n) * 8);
    }
}
template <int D, int GROUPS, int BLOCK> INLINE void pass_by_values(uint32_t smem, int group, unsigned n) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const unsigned slot = slot_of<layout::stages>(n);
    take_turn<layout::turns>(group);
    pass_turn<layout::turns>(group);
    mbarrier_wait(smem + layout::barriers + V_FULL + slot * 8, turn_of<layout::stages>(n));
    release(smem + layout::barriers + V_EMPTY + slot * 8);
}

/* Where a warpgroup is: the tile of keys that P is of, how many cut ones there were before it, and of its rows the softmax. */
struct group_state {
    unsigned n, cuts;
    softmax_state rows;
    int step;      /* full: what is said of that tile */
    cap_state cap; /* under a softcap */
};

/* online_softmax of the tile that k->step is about. */
template <int BLOCK, bool CUT, int FULL>
INLINE bool weigh_scores(float c, const option_view &v, int group, group_state *k, float (*s)[4], float shrink[2]) {
    lane_slopes slopes = {0.0f, 0.0f, false};
    k->cap.counts = !CUT || !(k->step & STEP_FEW);
    if (FULL & WITH_CAP && has_slopes<FULL>(*v.p))
        slopes = {v.o->slope, row_distance(*v.o, group * 64, k->step & ~STEP_FLAGS), shows_tanh(*v.p)};
    return online_softmax<BLOCK>(&k->rows, c, s, shrink, FULL & WITH_CAP ? &k->cap : NULL, slopes);
}

/* While P·V of a tile of keys adds up, S of the one before it in memory, from j0 on, is made and turned into P. CUT: one of them may be
 * cut. half: lean, of the first half of the keys alone. */
template <typename T, int D, int GROUPS, int BLOCK, bool CUT, int FULL, bool PAGED>
INLINE void step(float c, const forward_span &w, const option_view &v, bool half, int j0, int group, uint32_t q,
                 uint32_t smem, group_state *k, float (*s)[4], uint32_t (*a)[4], float (*o)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    const uint32_t barriers = smem + layout::barriers;
    const unsigned n = k->n++;
    const int old = FULL ? k->step : j0 + BLOCK;
    const bool cut = CUT && (FULL ? (old & STEP_CUT) != 0 : is_cut<BLOCK>(w, old));
    float shrink[2];
    read_ahead<BLOCK> read;
    note(*v.p, group, n, CLOCK_BEGIN);
    await_chunk<layout>(smem, n + 1, 0);
    note(*v.p, group, n, CLOCK_KEYS);
    if (FULL) {
        j0 = k->step = find_step(v, n + 1);
        if (CUT)
            read_options<BLOCK, FULL>(*v.p, *v.o, group * 64, j0, &read);
    }
    take_turn<layout::turns>(group);
    note(*v.p, group, n, CLOCK_TURN);
    pin_all<BLOCK / 16>(a);
    issue_scores<T, D, GROUPS, BLOCK, layout::is_wide>(q, smem, n + 1, s);
    await_values<layout>(smem, n, cut, &k->cuts);
    if (CUT && !FULL)
        issue_half_sums<T, BLOCK, layout>(smem, n, half, a, o);
    else
        issue_sums<T, BLOCK, FULL, layout>(smem, n, a, o);
    note(*v.p, group, n, CLOCK_ISSUED);
    pass_turn<layout::turns>(group);
    kept_bits<BLOCK> kept;
    if (FULL && !makes_ahead<FULL>())
        kept = keep_queries<BLOCK, FULL>(*v.p, *v.o, *(const dropout_state *)(v.steps + STEPS), group * 64,
                                         j0 & ~STEP_FLAGS);
    const int hidden = find_hidden_in<FULL, PAGED, layout>(v, n + 1);
    await_scores<layout>(smem, n + 1);
    note(*v.p, group, n, CLOCK_SCORES);
    receive_scores<T, D, GROUPS, BLOCK, CUT, FULL, PAGED>(w, v, group, j0, smem, n + 1, read, hidden, s);
    const bool grows = weigh_scores<BLOCK, CUT, FULL>(c, v, group, k, s, shrink);
    if (makes_ahead<FULL>()) /* as late as they are needed */
        drop_rows<BLOCK>(take_kept<BLOCK, layout>(v, group, smem, n + 1), s);
    else if (has_dropout<FULL>(*v.p))
        drop_elements(kept, 1.0f, s);
    pin_all<BLOCK / 8>(s); /* or the exponentials would be left for after the wait */
    hold_until(k->rows.sum[0] + k->rows.sum[1]);
    note(*v.p, group, n, CLOCK_SOFTMAX);
    wgmma_wait<0>();
    note(*v.p, group, n, CLOCK_SUMS);
    pin_all<layout::part / 8>(o);
    pin_all<BLOCK / 16>(a);
    if (cut)
        receive_marks<T, D, GROUPS, BLOCK, FULL>(w, v, group, old, smem, n, &k->rows.bad);
    release(barriers + V_EMPTY + slot_of<layout::stages>(n) * 8);
    if (grows) {
#pragma unroll
        for (int y = 0; y < layout::part / 8; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[y][e] *= shrink[e / 2];
    }
    pack_fragments<T, BLOCK>(a, s);
    note(*v.p, group, n, CLOCK_END);
}

/* full: the rest of a tile of queries, as the thread that sends tells. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL, bool PAGED>
INLINE void sum_full(float c, const forward_span &w, const option_view &v, const group_work &g, int group, uint32_t q,
                     uint32_t smem, group_state *k, float (*s)[4], uint32_t (*a)[4], float (*o)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    if (g.idle) { /* and back: else ptxas holds what the loop below counts with in vector registers */
#pragma unroll 1
        while (!(k->step & STEP_LAST)) {
            pass_by_keys<D, GROUPS, BLOCK, FULL>(*v.p, smem, group, k->n + 1);
            k->cuts += k->step & STEP_CUT ? 1 : 0;
            k->step = find_step(v, k->n + 1);
            if (layout::q_stages == 1 && (k->step & STEP_LAST))
                release(smem + layout::barriers + Q_EMPTY);
            pass_by_values<D, GROUPS, BLOCK>(smem, group, k->n++);
        }
        return;
    }
#pragma unroll 1
    while (!(k->step & STEP_LAST)) {
        step<T, D, GROUPS, BLOCK, true, FULL, PAGED>(c, w, v, false, 0, group, q, smem, k, s, a, o);
#pragma unroll 1
        while (FULL != WITH_BIAS && (k->step & STEP_WHOLE)) /* with a bias none is whole */
            step<T, D, GROUPS, BLOCK, false, FULL, PAGED>(c, w, v, false, 0, group, q, smem, k, s, a, o);
    }
}

/* From the first scores of a tile of queries to its last P. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL, bool PAGED>
INLINE void compute(float c, const forward_span &w, const option_view &v, const group_work &g, int group, uint32_t q,
                    uint32_t smem, group_state *k, float (*s)[4], uint32_t (*a)[4], float (*o)[4]) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    float shrink[2];
    read_ahead<BLOCK> read;
    if (FULL)
        read_options<BLOCK, FULL>(*v.p, *v.o, group * 64, k->step, &read);
    if (layout::is_wide)
        release_keys<layout>(smem, k->n);
    receive_scores<T, D, GROUPS, BLOCK, true, FULL, PAGED>(w, v, group, FULL ? k->step : g.first, smem, k->n, read,
                                                           find_hidden_in<FULL, PAGED, layout>(v, k->n), s);
    k->rows = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}, 0};
    k->cap.most[0] = k->cap.most[1] = -CUDART_INF_F;
    k->cap.capped[0] = k->cap.capped[1] = 0.0f;
    weigh_scores<BLOCK, true, FULL>(c, v, group, k, s, shrink);
    if (makes_ahead<FULL>())
        drop_rows<BLOCK>(take_kept<BLOCK, layout>(v, group, smem, k->n), s);
    else if (has_dropout<FULL>(*v.p))
        drop_elements(keep_queries<BLOCK, FULL>(*v.p, *v.o, *(const dropout_state *)(v.steps + STEPS), group * 64,
                                                k->step & ~STEP_FLAGS),
                      1.0f, s);
    pack_fragments<T, BLOCK>(a, s);
    zero_all<layout::part / 8>(o);
    if (FULL) {
        sum_full<T, D, GROUPS, BLOCK, FULL, PAGED>(c, w, v, g, group, q, smem, k, s, a, o);
        return;
    }
    const int whole = max(w.begin, w.last + w.lo); /* tiles before this are cut below */
    int j0 = g.first - BLOCK;
    for (; g.idle && j0 >= w.begin; j0 -= BLOCK, k->n++) {
        pass_by_keys<D, GROUPS, BLOCK, FULL>(*v.p, smem, group, k->n + 1);
        if (layout::q_stages == 1 && j0 == w.begin)
            release(smem + layout::barriers + Q_EMPTY);
        pass_by_values<D, GROUPS, BLOCK>(smem, group, k->n);
        k->cuts += is_cut<BLOCK>(w, j0 + BLOCK);
    }
#pragma unroll 1
    while (j0 >= w.begin) {
        if (is_cut<BLOCK>(w, j0 + BLOCK) || j0 < whole) {
            step<T, D, GROUPS, BLOCK, true, FULL, PAGED>(c, w, v, g.half && j0 + BLOCK == g.first, j0, group, q, smem,
                                                         k, s, a, o);
            j0 -= BLOCK;
            continue;
        }
#pragma unroll 1
        for (; j0 >= whole; j0 -= BLOCK)
            step<T, D, GROUPS, BLOCK, false, FULL, PAGED>(c, w, v, false, j0, group, q, smem, k, s, a, o);
    }
}

/* paged: before a row that sees nothing is made zeros, and 0 times what is not finite is NaN. */
template <int D> INLINE void scale_sums(float by, float (*o)[4]) {
#pragma unroll
    for (int y = 0; y < D / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            o[y][e] *= by;
}

/* A tile of queries after the other. */
template <typename T, int D, int GROUPS, int BLOCK, int FULL, bool ADDS, bool PAGED>
INLINE void consume(const attention_params &p, int group, uint32_t smem, const forward_job *jobs) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    constexpr int QS = layout::q_stages, KS = layout::stages;
    constexpr bool in_units = PAGED && !FULL; /* may the keys' scale be there? */
    const uint32_t barriers = smem + layout::barriers, q0 = smem + group * 64 * 128;
    unsigned nq = 0;
    group_state k = {0, 0};
    float s[BLOCK / 8][4], o[layout::part / 8][4];
    uint32_t a[BLOCK / 16][4];
    option_view v = {&p, NULL, steps_in<layout>(jobs), hidden_in<FULL, layout>(jobs), NULL};
    if (group == GROUPS - 1)
        pass_turn<layout::turns>(group);
    mbarrier_wait(barriers + Q_FULL, 0);
    forward_span w = jobs[0].s;
    if (!w.end)
        return;
    group_work g = find_group_work<BLOCK, FULL>(p, w, group * 64);
    if (g.skips) {
        pass_by_keys<D, GROUPS, BLOCK, FULL>(p, smem, group, 0);
        pass_by_values<D, GROUPS, BLOCK>(smem, group, 0);
        k = {1, 1};
    }
    if (layout::is_wide)
        await_keys<layout>(smem, k.n);
    else
        mbarrier_wait(barriers + K_FULL + k.n * 8, 0);
    if (FULL)
        k.step = find_step(v, k.n);
    issue_scores<T, D, GROUPS, BLOCK, false>(q0, smem, k.n, s);
    wgmma_wait<0>();
    for (; w.end; nq++) {
        v.o = options_in<layout>(jobs) + slot_of<2>(nq);
        if (PAGED)
            v.scales = scales_in(jobs) + slot_of<2>(nq);
        compute<T, D, GROUPS, BLOCK, FULL, PAGED>(log2_unit(p, in_units ? v.scales : NULL), w, v, g, group,
                                                  q0 + slot_of<QS>(nq) * layout::q_bytes, smem, &k, s, a, o);
        const forward_span old = w;
        const unsigned n = k.n;
        const int last = FULL ? k.step : w.begin;
        const bool cut = FULL ? last & STEP_CUT : is_cut<BLOCK>(w, last);
        pin_all<BLOCK / 16>(a);
        await_values<layout>(smem, n, cut, &k.cuts);
        if (FULL)
            issue_sums<T, BLOCK, FULL, layout>(smem, n, a, o);
        else
            issue_half_sums<T, BLOCK, layout>(smem, n, g.half && g.first == last, a, o);
        mbarrier_wait(barriers + Q_FULL + slot_of<QS>(nq + 1) * 8, turn_of<QS>(nq + 1));
        w = jobs[slot_of<2>(nq + 1)].s;
        g = find_group_work<BLOCK, FULL>(p, w, group * 64);
        k.n += 1 + g.skips;
        k.cuts += g.skips; /* what is skipped is cut */
        if (g.skips)
            pass_by_keys<D, GROUPS, BLOCK, FULL>(p, smem, group, n + 1);
        if (w.end)
            await_keys<layout>(smem, k.n);
        if (FULL)
            k.step = find_step(v, k.n);
        /* After the last tile, a product of what lies there, which nobody looks at: a branch would make the compiler wait. */
        issue_scores<T, D, GROUPS, BLOCK, false>(q0 + slot_of<QS>(nq + 1) * layout::q_bytes, smem, k.n, s);
        wgmma_wait<1>();
        pin_all<layout::part / 8>(o);
        if (cut)
            receive_marks<T, D, GROUPS, BLOCK, FULL>(old, v, group, last, smem, n, &k.rows.bad);
        release(barriers + V_EMPTY + slot_of<KS>(n) * 8);
        if (QS > 1)
            barrier_sync(1 + GROUPS + group, WARPGROUP); /* the other warps, too, have done with Q */
        if (PAGED && p.v_scale)
            scale_sums<layout::part>(v.scales->v, o);
        store_rows<T, layout::part, layout::rows, FULL, ADDS>(
            p, jobs[slot_of<2>(nq)].t, layout::is_wide ? columns_in<layout>(jobs)[slot_of<2>(nq)] : 0, k.rows, k.cap, o,
            smem + slot_of<QS>(nq) * layout::q_bytes, barriers + Q_EMPTY + slot_of<QS>(nq) * 8,
            in_units ? v.scales : NULL);
        if (g.skips)
            pass_by_values<D, GROUPS, BLOCK>(smem, group, n + 1);
        hold_until(k.rows.sum[0]); /* what is stored is to overlap with the product */
        wgmma_wait<0>();
        pin_all<BLOCK / 8>(s);
    }
}

template <typename T, int D, int GROUPS, int BLOCK, int FULL, bool ADDS, bool PAGED>
INLINE void attention_forward90(const attention_params_sm90 &all) {
    typedef forward90<D, GROUPS, BLOCK> layout;
    extern __shared__ char shared[];
    const uint32_t smem = align_tiles(shared_address(shared)), barriers = smem + layout::barriers;
    char *const from = shared + (smem - shared_address(shared));
    uint32_t *bad = (uint32_t *)(from + layout::bad);
    forward_job *jobs = (forward_job *)(from + layout::jobs);
    static_assert(sizeof(forward_job) <= SM90_JOB_BYTES, "two of them fit");
    if (FULL)
        put_dropout(all.p, steps_in<layout>(jobs) + STEPS);
    if (threadIdx.x == 0) {
        for (int x = 0; x < SM90_MOST_STAGES * 8; x += 8) {
            mbarrier_init(barriers + Q_FULL + x, 1);
            mbarrier_init(barriers + Q_EMPTY + x, GROUPS * 4 + CLEANERS / 32 + told_warps<FULL>());
            mbarrier_init(barriers + K_FULL + x, 1);
            mbarrier_init(barriers + K_EMPTY + x, GROUPS * 4 + told_warps<FULL>());
            mbarrier_init(barriers + V_FULL + x, 1);
            mbarrier_init(barriers + V_CLEAN + x, CLEANERS / 32);
            mbarrier_init(barriers + V_EMPTY + x, GROUPS * 4 + CLEANERS / 32);
        }
        for (int x = 0; layout::is_wide && x < layout::slots * 8; x += 8) {
            mbarrier_init(barriers + layout::k_full + x, 1);
            mbarrier_init(barriers + layout::k_empty + x, GROUPS * 4);
        }
        for (int x = 0; FULL && x < GROUPS * 8; x += 8) {
            mbarrier_init(smem + layout::bias_full + x, 1);
            mbarrier_init(smem + layout::bias_empty + x, WARPGROUP);
        }
        for (int x = 0; makes_ahead<FULL>() && x < FORWARD_KEPT_SLOTS * 8; x += 8) {
            mbarrier_init(smem + layout::kept_full + x, WARPGROUP);
            mbarrier_init(smem + layout::kept_empty + x, GROUPS * WARPGROUP);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    /* Together no more registers than the block was launched with: 168 or 128 a thread. */
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    if (warp <
        4) { /* the one thread last: behind a branch that is not uniform ptxas has no uniform registers, but spills */
        registers_fewer<(layout::part > 256) ? 24 : makes_ahead<FULL>() ? 40 : GROUPS == 2 ? 56 : 32>();
        if (warp == 1)
            produce_values<T, D, GROUPS, BLOCK, FULL, ADDS>(all, smem, barriers, jobs);
        else if (warp > 1)
            clean<T, D, GROUPS, BLOCK, FULL>(all.p, smem, barriers, bad, jobs);
        else if (PAGED || threadIdx.x == 0)
            produce<T, D, GROUPS, BLOCK, FULL, PAGED>(all, smem, barriers, jobs);
    } else if (makes_ahead<FULL>() && warp / 4 > GROUPS) {
        registers_fewer<56>();
        make_rows<D, GROUPS, BLOCK, FULL>(all.p, smem, jobs, from + layout::kept);
    } else {
        registers_more<(layout::part > 256) ? 240 : makes_ahead<FULL>() ? 208 : GROUPS == 2 ? 224 : 160>();
        consume<T, D, GROUPS, BLOCK, FULL, ADDS, PAGED>(all.p, warp / 4 - 1, smem, jobs);
    }
}

/* May o be added to? In lean it is code for nothing. */
#define adds_lean false
#define adds_adding true
#define adds_paged false
#define adds_cappages false
#define adds_full true
#define adds_capped true
#define adds_biased true
#define adds_masked true
#define adds_narrow true
#define adds_dropped true
#define adds_maskdrop true
#define is_lean 0
#define is_adding 0
#define is_paged 0
#define is_cappages is_capped
#define is_full WITH_ALL
#define is_capped (WITH_CAP | WITH_SLOPES)
#define is_biased WITH_BIAS
#define is_masked WITH_MASK
#define is_narrow WITH_MASK
#define is_dropped WITH_DROPOUT
#define is_maskdrop (WITH_MASK | WITH_DROPOUT)
/* Are keys in pages? */
#define pages_lean false
#define pages_adding false
#define pages_paged true
#define pages_cappages true
#define pages_full false
#define pages_capped false
#define pages_biased false
#define pages_masked false
#define pages_narrow false
#define pages_dropped false
#define pages_maskdrop false
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm90(                                                 \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        wait_for_earlier_grid();                                                                                       \
        attention_forward90<dtype, dim, own / 64, block, is_##variant, adds_##variant, pages_##variant>(all);          \
    }

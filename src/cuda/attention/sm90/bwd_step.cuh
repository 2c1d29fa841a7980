/* SPDX-License-Identifier: Apache-2.0
 * What a warpgroup of Hopper's backward makes of a step: the weights of its scores, their gradients, and what both are as operands. */
#ifndef HEDDLE_CUDA_ATTENTION_BWD_STEP_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_BWD_STEP_SM90_CUH

#include "cuda/attention/sm90/give.cuh"

/* What a warpgroup carries through its steps. */
struct state {
    uint32_t smem, own;             /* shared memory; this warpgroup's rows of K there */
    int group, row0;                /* which warpgroup; this lane's first key */
    ring r;                         /* of stages */
    int turn;                       /* steps so far: which dS, and its parity */
    bool any_bad;                   /* one of the keys is not finite */
    float *numbers;                 /* of stage 0 */
    float *sum;                     /* lean: where query 0 of the head adds, for this thread */
    const key_options *steps, *now; /* full: of all, and of the one whose weights are made */
    int x;                          /* full: the head of `sum` */
    mutable bool low;               /* with a bias: it masks an element of this warp's part of the step */
    key_bias bias;                  /* the same for all queries: of this lane's keys, in the step `now` */
    mutable bool late;              /* a mask alone: what it hides of the step is left to the operands, */
    mutable uint32_t shown[2][4];   /* by these bits of this lane's two keys */
};

/* Can what the mask hides of a step wait until P and dS are operands? There it costs an instruction an element and a half, and nobody waits for
 * the bits. Where a band cuts as well, or something is not finite, it is known by the sign of P. */
template <int WITH> INLINE bool hides_late(const state &k) {
    return hides_by_bits<WITH>() && !k.any_bad && (k.now->step & (STEP_BITS | STEP_BAND | STEP_DIRTY)) == STEP_BITS;
}

/* A piece of dQ to its sum. */
INLINE void add_piece(float *to, float (*dq)[4]) {
    pin_all<8>(dq);
    if (to)
#pragma unroll
        for (int y = 0; y < 8; y++)
            add_global4(to + y * WARPGROUP * 4, make_float4(dq[y][0], dq[y][1], dq[y][2], dq[y][3]));
}

/* long: a piece of dQ to where another thread adds it from, once the one of the step before has been read. */
template <typename layout> INLINE void lay_down(const state &k, int turn, float (*dq)[4]) {
    pin_all<8>(dq);
    const uint32_t to = k.smem + layout::dq + k.group * PIECE * 4 + threadIdx.x % WARPGROUP * 16;
    mbarrier_wait(k.smem + layout::dq_empty + k.group * 8, (turn & 1) ^ 1);
#pragma unroll
    for (int y = 0; y < 8; y++)
        store_shared16(to + y * WARPGROUP * 16, make_uint4(__float_as_uint(dq[y][0]), __float_as_uint(dq[y][1]),
                                                           __float_as_uint(dq[y][2]), __float_as_uint(dq[y][3])));
    fence_async();
    release_each(k.smem + layout::dq_full + k.group * 8);
}

template <typename T, int D, int BLOCK, typename layout>
INLINE void await_tile(const state &k, int which, bool cut, int second) {
    const uint32_t bar = k.smem + layout::full + k.r.slot * 16 + which * 8;
    mbarrier_wait(bar, k.r.turn);
    if (cut && (!layout::is_full || (k.now->step & STEP_DIRTY)))
        clean_slot<T, D, BLOCK>(k.smem + layout::slots + (k.r.slot * 2 + which) * layout::slot_bytes,
                                k.numbers + k.r.slot * 3 * BLOCK, second);
}

/* Do weights take more than the numbers of a row? */
template <int BLOCK, typename layout> INLINE bool is_careful(const state &k, bool masked, const float *row) {
    return (layout::is_full ? (k.now->step & STEP_BAND) != 0 : masked) || has_rest<BLOCK>(row);
}

/* Where the bias of the count-th step is, for this warpgroup. */
template <typename layout> INLINE uint32_t boxes_of(const state &k, unsigned count) {
    return k.smem + layout::boxes + place_of<layout>(count) * layout::place_bytes + k.group * SM90_BIAS_BOX;
}

/* This warpgroup has no more use for the bias of the count-th step, or dS in its place. */
template <typename layout> INLINE void free_boxes(const state &k, unsigned count) {
    mbarrier_arrive(k.smem + layout::box_empty + place_of<layout>(count) * 16 + k.group * 8);
}

/* Sᵀ = Sᵀ·by + the bias of the count-th step. Does it mask? Then it is needed once more. */
template <typename T, int BLOCK, typename layout>
INLINE bool add_key_boxes(const attention_params &p, const state &k, unsigned count, float by, float (*s)[4]) {
    bool low = false;
    mbarrier_wait(k.smem + layout::box_full + place_of<layout>(count) * 16 + k.group * 8, parity_of<layout>(count));
#pragma unroll
    for (int y = 0; y < BLOCK; y += 64)
        low |= add_key_box<T>(boxes_of<layout>(k, count) + y / 64 * layout::strip, is_alike(p), by, s + y / 8);
    return low;
}

/* What it masks is hidden; then the place is free, where it is no other's. */
template <typename T, int BLOCK, typename layout>
INLINE void hide_boxes(const attention_params &p, const state &k, unsigned count, bool low, float (*s)[4]) {
    if (low)
#pragma unroll
        for (int y = 0; y < BLOCK; y += 64)
            hide_key_box<T>(boxes_of<layout>(k, count) + y / 64 * layout::strip, is_alike(p), s + y / 8);
    if (layout::shares_ds && layout::gives_ds) /* each warp has its own keys' dS in the place of their bias */
        __syncwarp();
    else if (layout::shares_ds)
        barrier_sync(2 + k.group, WARPGROUP); /* all its warps have read what dS will overwrite */
    else
        free_boxes<layout>(k, count);
}

/* Sᵀ -> Pᵀ, of the count-th step. */
template <typename T, int BLOCK, typename layout>
INLINE void weigh(const attention_params &p, const span &w, const state &k, unsigned count, int i0, bool careful,
                  const float *row, const float *marks, float (*s)[4]) {
    pin_all<BLOCK / 8>(s);
    constexpr int WITH = layout::with;
    read_ahead<BLOCK> read;
    if (layout::is_full)
        read_key_options<BLOCK, WITH>(p, *k.now, k.row0, &read);
    const bool boxes = has_boxes<WITH>(p);
    bool low = false;
    float by = 1.0f; /* is left to be multiplied with */
    if (layout::is_full)
        by = cap_and_slope_keys<T, BLOCK, WITH>(p, *k.now, k.row0, s);
    if (has_bias<WITH>(p)) {
        low = boxes ? add_key_boxes<T, BLOCK, layout>(p, k, count, by, s)
                    : add_key_biases<T, BLOCK>(p, *k.now, k.row0, by, s);
        by = 1.0f;
        if (has_bias_alone<WITH>())
            k.low = low;
    }
    if (WITH & WITH_KEY_BIAS) {
        k.low = masks_any(k.bias);
        add_bias_of_keys<BLOCK>(k.bias, by, s);
        by = 1.0f;
    }
    if (!careful) {
        key_weights<false, BLOCK>(p.scale_log2, w, 0, i0, row, s, by);
        if (!layout::is_full)
            return;
    } else {
        key_weights<true, BLOCK>(p.scale_log2, w, k.row0, i0, row, s, by);
    }
    if (boxes)
        hide_boxes<T, BLOCK, layout>(p, k, count, low, s);
    if ((WITH & WITH_KEY_BIAS) && k.low)
        hide_bias_of_keys<BLOCK>(k.bias, s);
    if (hides_by_bits<WITH>()) {
        k.late = hides_late<WITH>(k);
#pragma unroll
        for (int x = 0; x < 2 * (BLOCK / 32); x++)
            k.shown[x / (BLOCK / 32)][x % (BLOCK / 32)] = read.bits[x / (BLOCK / 32)][x % (BLOCK / 32)];
    }
    if (layout::is_full && !(hides_by_bits<WITH>() && k.late))
        hide_keys<T, BLOCK, WITH>(p, *k.now, k.row0, low && !boxes, read, s);
    if (!k.any_bad)
        return;
    marks += k.group * 64 + fragment_row();
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = __float_as_int(s[y][e]) < 0 ? s[y][e] : s[y][e] + marks[e / 2 * 8];
}

/* lean: where this thread adds its part of dQ of the tile from i0 on; NULL: there is no such tile. */
template <int D, typename layout> INLINE float *find_sum(const state &k, const span &w, int i0) {
    return !layout::is_long && k.sum && (D > 64 ? i0 : i0 + k.group * 64) < w.end
               ? k.sum + (int64_t)i0 * sm90_columns(D)
               : NULL;
}

/* From P and dP to the operands of dV, dK and dQ, 16 queries at a time. For dS·K, dS lies in shared memory: rows are keys,
 * in strips of 64 queries; or, where it goes to memory as well, rows are queries, in boxes as the bias has them. */
template <typename T, int BLOCK, int FULL>
INLINE void apply_weights(const attention_params &p, const state &k, bool masked, int x, const float *row,
                          const kept_bits<BLOCK> &kept, const char *ahead, float (*s)[4], float (*dp)[4]) {
    if (makes_ahead<FULL>()) {
        const uint32_t made = take_kept_columns<BLOCK>(ahead, k.group, x * 16);
        const float *bases = row + x * 16, *dsums = row + 2 * BLOCK + x * 16;
        if (masked)
            dropped_key_gradients<true>(made, p.keep_scale, bases, dsums, s + 2 * x, dp + 2 * x);
        else
            dropped_key_gradients<false>(made, p.keep_scale, bases, dsums, s + 2 * x, dp + 2 * x);
        return;
    }
    if (has_dropout<FULL>(p))
        drop_elements<BLOCK, 2>(kept, p.keep_scale, dp + 2 * x, 2 * x);
    if (masked)
        key_gradients<true, true, 16>(row + x * 16, row + 2 * BLOCK + x * 16, s + 2 * x, dp + 2 * x);
    else
        key_gradients<false, true, 16>(row + x * 16, row + 2 * BLOCK + x * 16, s + 2 * x, dp + 2 * x);
    if (has_cap<FULL>(p))
        cap_key_gradients(p, row + x * 16, row + BLOCK + x * 16, s + 2 * x, dp + 2 * x);
    if (has_dropout<FULL>(p))
        drop_elements<BLOCK, 2>(kept, 1.0f, s + 2 * x, 2 * x);
}

/* Operands of 16 queries, the x-th of a step: 0 where the bits say that a key is not seen. */
INLINE void hide_operands(const uint32_t (*shown)[4], int x, uint32_t *ps, uint32_t *ds) {
    const int column = fragment_column();
#pragma unroll
    for (int z = 0; z < 4; z++) {
        const uint32_t word = shown[z % 2][x / 2];
        const int byte =
            x % 2 * 2 + z / 2; /* of the word: this lane's bits come first in it, then in a word one less to the left */
        const uint32_t order = (8 + byte) * 0x0011u | (12 + byte) * 0x1100u; /* the sign of a byte, twice */
        const uint32_t seen = spread_signs(word << (7 - column), word << (6 - column), order);
        ps[z] &= seen;
        ds[z] &= seen;
    }
}

template <typename T, bool GIVES, bool LATE = false>
INLINE void put_operands(const state &k, uint32_t to, int x, const float (*s)[4], const float (*dp)[4],
                         uint32_t (*ps)[4], uint32_t (*ds)[4]) {
    const int lane = threadIdx.x % 32, warp = (int)threadIdx.x % WARPGROUP / 32;
    const int key = k.group * 64 + warp * 16 + lane % 16, query = x % 4 * 16 + lane / 16 * 8 + lane % 8;
    pack_fragments<T, 16>(ps + x, s + 2 * x);
    pack_fragments<T, 16>(ds + x, dp + 2 * x);
    if (LATE)
        hide_operands(k.shown, x, ps[x], ds[x]);
    if (GIVES)
        stmatrix4_trans(to + x / 4 * OWN_ROWS * 128 + k.group * SM90_BIAS_BOX + query * 128 +
                            (((warp * 2 + lane / 8 % 2) ^ (query & 7)) << 4),
                        ds[x]);
    else
        stmatrix4(to + key * 128 + x / 4 * OWN_ROWS * 128 + (((x % 4 * 2 + lane / 16) ^ (key & 7)) << 4), ds[x]);
}

template <typename T, int BLOCK, int FULL, bool LATE = false>
INLINE void make_fragments(const attention_params &p, const state &k, bool masked, uint32_t to, const float *row,
                           const kept_bits<BLOCK> &kept, const char *ahead, float (*s)[4], float (*dp)[4],
                           uint32_t (*ps)[4], uint32_t (*ds)[4]) {
#pragma unroll
    for (int x = 0; x < BLOCK / 16; x++) {
        apply_weights<T, BLOCK, FULL>(p, k, masked, x, row, kept, ahead, s, dp);
        put_operands<T, (FULL & WITH_DBIAS) != 0, LATE>(k, to, x, s, dp, ps, ds);
    }
}

template <typename T, int BLOCK, typename layout>
INLINE void make_operands(const attention_params &p, state *k, bool masked, const float *row,
                          const kept_bits<BLOCK> &kept, float (*s)[4], float (*dp)[4], uint32_t (*ps)[4],
                          uint32_t (*ds)[4]) {
    if (has_bias_alone<layout::with>() || (layout::with & WITH_KEY_BIAS)) /* that hides nothing costs nothing more */
        masked = k->low || k->any_bad || (k->now->step & (STEP_BAND | STEP_DIRTY));
    const uint32_t to = k->smem + layout::ds + (k->turn & 1) * layout::ds_bytes;
    constexpr bool AHEAD = makes_ahead<layout::with>();
    const int slot = k->turn % layout::kept_slots;
    const char *ahead = (const char *)k->numbers + (layout::kept - layout::numbers) + slot * layout::kept_bytes;
    pin_all<BLOCK / 8>(dp);
    if (layout::ds_readers)
        mbarrier_wait(k->smem + layout::ds_empty + (k->turn & 1) * 8, (k->turn >> 1 & 1) ^ 1);
    if (AHEAD)
        mbarrier_wait(k->smem + layout::kept_full + slot * 8, k->turn / layout::kept_slots % 2);
    if (has_all<layout::with>()) /* so much code that it is there once */
        make_fragments<T, BLOCK, layout::with>(p, *k, masked, to, row, kept, ahead, s, dp, ps, ds);
    else if (hides_by_bits<layout::with>() && k->late)
        make_fragments<T, BLOCK, layout::with, true>(p, *k, false, to, row, kept, ahead, s, dp, ps, ds);
    else if (masked)
        make_fragments<T, BLOCK, layout::with>(p, *k, true, to, row, kept, ahead, s, dp, ps, ds);
    else
        make_fragments<T, BLOCK, layout::with>(p, *k, false, to, row, kept, ahead, s, dp, ps, ds);
    if (AHEAD)
        mbarrier_arrive(k->smem + layout::kept_empty + slot * 8);
    fence_async();
    release(k->smem + layout::ds_full + (k->turn & 1) * 8);
}

template <typename T, int D, int BLOCK, typename layout>
INLINE void issue_dq(const state &k, int turn, float (*dq)[4], bool pending = true) {
    constexpr int STRIP = OWN_ROWS * 128;
    if (pending)
        mbarrier_wait(k.smem + layout::ds_full + (turn & 1) * 8, turn >> 1 & 1);
    wgmma_fence();
    const uint32_t ds = k.smem + layout::ds + (turn & 1) * layout::ds_bytes + (BLOCK > 64 ? k.group * STRIP : 0),
                   keys = k.smem + (D > 64 ? k.group * STRIP : 0);
    if (layout::gives_ds)
        warpgroup_strips<T, 64, OWN_ROWS, OWN_ROWS>(dq, ds, keys);
    else
        warpgroup_both<T, 64, OWN_ROWS, OWN_ROWS>(dq, ds, keys);
    wgmma_commit();
}

/* full: the next step, once its queries are there: its first query, and by how many heads it is further. */
template <typename T, int D, typename layout>
INLINE int turn_to(const attention_params &p, state *k, unsigned count, bool *masked) {
    mbarrier_wait(k->smem + layout::full + k->r.slot * 16, k->r.turn);
    k->now = k->steps + count % KEY_STEPS;
    const int step = k->now->step;
    if (k->sum)
        k->sum += (k->now->x - k->x) * sum_tiles(p) * 64 * sm90_columns(D);
    if (layout::with & WITH_KEY_BIAS)
        k->bias = read_bias_of_keys<T>(*k->now, k->row0);
    k->x = k->now->x;
    *masked = (step & STEP_CUT) || k->any_bad; /* finite or not: dP of what is hidden may overflow, and -0·inf is NaN */
    return step & ~STEP_FLAGS;
}

#endif

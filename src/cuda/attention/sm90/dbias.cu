/* SPDX-License-Identifier: Apache-2.0
 * The gradient of a bias for Hopper: dS, summed over what the bias is repeated along.
 *
 * A block takes tile after tile of dbias: 128 queries and BLOCK keys of a head of a batch, or of all that share their bias, and makes S = Q·Kᵀ
 * and dP = dO·Vᵀ for one after the other, 64 queries to a warpgroup. The sums stay in registers: no atomics, the same bits every time, no
 * workspace. One thread fetches; Q and K, dO and V lie in a ring of slots in turn, and in boxes the bias, as long as it is the same. A warp
 * tells of each step, so that those that compute count nothing. */
#include "cuda/attention/dbias.cuh"
#include "cuda/attention/sm90/bwd.cuh"

template <int D, int BLOCK> struct layout_dbias {
    static constexpr int rows_bytes = OWN_ROWS * D * 2, slot_bytes = rows_bytes + BLOCK * D * 2;
    static constexpr int slots = sm90_dbias_slots(D, BLOCK);
    static constexpr int group_bytes = BLOCK / 64 * SM90_BIAS_BOX; /* of the bias of a warpgroup's queries */
    static constexpr int boxes = slots * slot_bytes, sums = boxes; /* when it has been read: of a warp, for each key */
    static constexpr int numbers = boxes + 2 * group_bytes;        /* base, rest and D of the queries of a step */
    static constexpr int told = numbers + 3 * OWN_ROWS * 4;
    static constexpr int full = told + SM90_DBIAS_TOLD * SM90_DBIAS_TOLD_BYTES, empty = full + slots * 8;
    static constexpr int told_full = empty + slots * 8, told_empty = told_full + SM90_DBIAS_TOLD * 8;
    static constexpr int numbers_empty = told_empty + SM90_DBIAS_TOLD * 8;
    static constexpr int box_full = numbers_empty + 8, box_empty = box_full + 8, bytes = box_empty + 8;
    static_assert(8 * BLOCK * 4 <= 2 * group_bytes, "sums lie where the bias did");
    static_assert(bytes == sm90_dbias_bytes(D, BLOCK), "as the plan counts");
    static_assert(bytes <= 227 * 1024, "more than a multiprocessor has");
};

/* What a boolean mask shows of a step, as far as its map says. */
template <int BLOCK> INLINE tile_kind kind_of_step(const attention_params &p, const dbias_work &w) {
    const mask_map &m = p.seen_of_keys;
    if (!(p.a.features & HEDDLE_BOOL_MASK))
        return TILE_FULL;
    if (!m.kinds || m.rows < BLOCK)
        return TILE_PARTIAL;
    const uint8_t *const kinds = find_kinds(m, w.n, w.x, w.key0 / m.rows);
    const tile_kind first = (tile_kind)kinds[m.tiles_across > 1 ? w.row0 / m.columns : 0];
    for (int i0 = w.row0 + m.columns; m.tiles_across > 1 && i0 < min(w.row0 + OWN_ROWS, w.c.sq); i0 += m.columns)
        if (kinds[i0 / m.columns] != first)
            return TILE_PARTIAL;
    return first;
}

/* seek, over steps of which a mask shows nothing. */
template <int BLOCK> INLINE bool seek_shown(const attention_params &p, dbias_work *w, bool next) {
    while (seek<OWN_ROWS, BLOCK>(p, w, next)) {
        if (kind_of_step<BLOCK>(p, *w) != TILE_EMPTY)
            return true;
        next = true;
    }
    return false;
}

/* Of a step: nothing of its tile is seen; there is no tile; it is the tile's last; a mask hides some; its bias is not that of the step before;
 * nobody needs it after this one. */
enum { SUMS_NONE = 1, SUMS_END = 2, SUMS_LAST = 4, SUMS_CUT = 8, SUMS_ANOTHER = 16, SUMS_LEAVES = 32 };

/* What is told of a step. */
struct told_sums {
    dbias_work w;
    query_options o; /* if anything but a bias in boxes asks for it */
    int flags;
};
static_assert(sizeof(told_sums) <= SM90_DBIAS_TOLD_BYTES, "as the plan counts");

INLINE bool comes_in_boxes(const attention_params &p) {
    return p.vectors & VECTOR_BIAS_BOXES;
}

/* Have two steps of a tile the same bias? */
INLINE bool share_bias(const attention_params &p, const dbias_work &a, const dbias_work &b) {
    const bias_place x = find_box(p, a.key0, a.row0, a.x, a.n), y = find_box(p, b.key0, b.row0, b.x, b.n);
    return x.row == y.row && x.x == y.x && x.n == y.n;
}

/* The bias of a step, the count-th that comes. */
template <int D, int BLOCK>
INLINE void fetch_boxes(const attention_params_sm90 &all, const dbias_work &w, uint32_t smem, unsigned count) {
    typedef layout_dbias<D, BLOCK> layout;
    const uint32_t bar = smem + layout::box_full;
    mbarrier_wait(smem + layout::box_empty, (int)(count & 1) ^ 1);
    mbarrier_expect(bar, 2 * layout::group_bytes);
#pragma unroll 1
    for (int x = 0; x < 2 * (BLOCK / 64); x++) {
        const bias_place at = find_box(all.p, w.key0 + x % (BLOCK / 64) * 64, w.row0 + x / (BLOCK / 64) * 64, w.x, w.n);
        tma_load4(smem + layout::boxes + x * SM90_BIAS_BOX, &all.bias, bar, at.key, at.row, at.x, at.n);
    }
}

/* The tiles of all steps. One thread. */
template <int D, int BLOCK> INLINE void fetch_dbias(const attention_params_sm90 &all, uint32_t smem) {
    typedef layout_dbias<D, BLOCK> layout;
    const attention_params &p = all.p;
    const unsigned tiles = (unsigned)dbias_tiles(&p.a, OWN_ROWS, BLOCK);
    ring r = {0, 0};
    unsigned count = 0;
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        dbias_work w = find_sums<OWN_ROWS, BLOCK>(p, tile), last = w;
        bool first = true;
        for (bool more = seek_shown<BLOCK>(p, &w, false); more; more = seek_shown<BLOCK>(p, &w, true)) {
            const int n = p.a.features & HEDDLE_VARLEN ? 0 : w.n, row = (int)w.c.first_q + w.row0;
            const int key = (int)w.c.first_k + w.key0, y = p.group == 1 ? w.x : w.x / p.group;
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const uint32_t bar = smem + layout::full + r.slot * 8, to = smem + r.slot * layout::slot_bytes;
                mbarrier_wait(smem + layout::empty + r.slot * 8, r.turn ^ 1);
                mbarrier_expect(bar, layout::slot_bytes);
                load_boxes<D, OWN_ROWS>(to, part ? &all.dout : &all.q, bar, row, w.x, n);
                load_boxes<D, BLOCK>(to + layout::rows_bytes, part ? &all.v : &all.k, bar, key, y, n);
                advance<layout::slots>(&r);
                if (part == 0 && comes_in_boxes(p) && (first || !share_bias(p, w, last)))
                    fetch_boxes<D, BLOCK>(all, w, smem, count++);
            }
            first = false;
            last = w;
        }
    }
}

/* Of a step: the numbers of its queries, and what is told. A warp. */
template <typename T, typename layout>
INLINE void tell_step(const attention_params &p, char *shared, const dbias_work &w, int flags, unsigned step) {
    const uint32_t smem = shared_address(shared), full = smem + layout::told_full + step % SM90_DBIAS_TOLD * 8;
    const int lane = threadIdx.x % 32, count = flags & (SUMS_NONE | SUMS_END) ? 0 : w.c.sq - w.row0;
    const int64_t from = count ? lse_at(p, w.c, w.x, w.row0) : 0;
    const float *const numbers[] = {p.base, p.rest, p.dsum};
    told_sums *const told = (told_sums *)(shared + layout::told + step % SM90_DBIAS_TOLD * SM90_DBIAS_TOLD_BYTES);
    mbarrier_wait(smem + layout::told_empty + step % SM90_DBIAS_TOLD * 8, (int)(step / SM90_DBIAS_TOLD & 1) ^ 1);
    if (lane == 0) {
        told->w = w;
        told->flags = flags;
        if (count && (!comes_in_boxes(p) || p.drops || (p.a.features & HEDDLE_ALIBI)))
            told->o = find_options(p, w.c, w.x, w.row0, sizeof(T));
    }
    mbarrier_wait(smem + layout::numbers_empty, (int)(step & 1) ^ 1);
#pragma unroll
    for (int x = 0; x < 3; x++)
#pragma unroll
        for (int z = lane; z < OWN_ROWS; z += 32)
            cp_async4(smem + layout::numbers + (x * OWN_ROWS + z) * 4, numbers[x] + (z < count ? from + z : 0),
                      z < count ? 4 : 0);
    cp_async_arrive(full);
    if (lane == 0)
        mbarrier_arrive(full);
}

/* All steps of all tiles, and that there are no more. A warp. */
template <typename T, int D, int BLOCK> INLINE void tell_dbias(const attention_params &p, char *shared) {
    typedef layout_dbias<D, BLOCK> layout;
    const unsigned tiles = (unsigned)dbias_tiles(&p.a, OWN_ROWS, BLOCK);
    unsigned step = 0;
    dbias_work w;
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        w = find_sums<OWN_ROWS, BLOCK>(p, tile);
        bool more = seek_shown<BLOCK>(p, &w, false);
        int flags = more ? SUMS_ANOTHER : SUMS_NONE;
        do {
            const dbias_work now = w;
            if (more) {
                flags |= kind_of_step<BLOCK>(p, now) == TILE_FULL ? 0 : SUMS_CUT;
                more = seek_shown<BLOCK>(p, &w, true);
            }
            const bool other = more && !share_bias(p, now, w);
            /* sums over all queries lie in its place in the end */
            flags |= (more ? 0 : SUMS_LAST) | (other || (!more && p.a.dbias_stride.s) ? SUMS_LEAVES : 0);
            tell_step<T, layout>(p, shared, now, flags, step++);
            flags = other ? SUMS_ANOTHER : 0;
        } while (more);
    }
    tell_step<T, layout>(p, shared, w, SUMS_END, step);
}

/* A product of a warpgroup's rows, once its slot is there. */
template <typename T, int D, int BLOCK>
INLINE void multiply_slot(uint32_t smem, int group, const ring &r, float (*c)[4]) {
    typedef layout_dbias<D, BLOCK> layout;
    const uint32_t at = smem + r.slot * layout::slot_bytes;
    mbarrier_wait(smem + layout::full + r.slot * 8, r.turn);
    wgmma_fence();
    warpgroup_rows<T, D, BLOCK, OWN_ROWS, BLOCK>(c, at + group * 64 * 128, at + layout::rows_bytes);
    wgmma_commit();
}

/* Do all of a warpgroup's queries from `row` on see all keys of the step, but for what a mask or a bias may hide? */
template <int BLOCK> INLINE bool see_all(const dbias_work &w, int row) {
    return row + 64 <= w.c.sq && w.key0 + BLOCK <= w.c.sk && w.key0 >= row + 63 + w.c.lo &&
           w.key0 + BLOCK - 1 <= row + w.c.hi;
}

/* sum += dS where all is seen and no row's log-sum-exp has a rest. */
template <int BLOCK>
INLINE void add_all_gradients(const attention_params &p, const float base[2], const float dsum[2], const float (*s)[4],
                              const float (*dp)[4], float (*sum)[4]) {
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[y][e] = fmaf(exp2_approx(fmaf(s[y][e], p.scale_log2, -base[e / 2])), dp[y][e] - dsum[e / 2], sum[y][e]);
}

/* sum += dS of what is seen; cut: by a mask, too. */
template <typename T, int BLOCK>
INLINE void add_gradients(const attention_params &p, const dbias_work &w, int row, bool cut, const float base[2],
                          const float rest[2], const float dsum[2], const float (*s)[4], const float (*dp)[4],
                          float (*sum)[4]) {
    const int key = w.key0 + fragment_column();
    int first[2], last[2];
    const uint8_t *mask[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + half * 8;
        first[half] = i + w.c.lo - key;
        last[half] = (i < w.c.sq ? min(i + w.c.hi, w.c.sk - 1) : key - 1) - key;
        mask[half] = cut ? p.t.bool_mask + row_at(p.a.bool_mask_stride, w.n, w.x, min(i, w.c.sq - 1)) + key : NULL;
    }
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = y * 8 + e % 2, half = e / 2;
            bool seen = column >= first[half] && column <= last[half] && s[y][e] != -CUDART_INF_F;
            if (seen && mask[half])
                seen = mask[half][column] != 0;
            const float weight = weight_of<bf16>(s[y][e], p.scale_log2, base[half], rest[half]);
            sum[y][e] += seen ? weight * (dp[y][e] - dsum[half]) : 0.0f;
        }
}

/* What the warps that compute have of a step. */
struct sums_state {
    uint32_t smem;
    const char *shared;
    int group;
    ring r;
    unsigned step, boxes; /* so far; biases that have come in boxes */
};

template <typename layout> INLINE const told_sums &told_of(const sums_state &k) {
    return *(const told_sums *)(k.shared + layout::told + k.step % SM90_DBIAS_TOLD * SM90_DBIAS_TOLD_BYTES);
}

/* k·q -> S, with all that is added. Does the bias mask? */
template <typename T, int D, int BLOCK>
INLINE bool adjust(const attention_params &p, const sums_state &k, const told_sums &told, float (*s)[4]) {
    typedef layout_dbias<D, BLOCK> layout;
    if (!comes_in_boxes(p))
        return apply_options<T, BLOCK>(p, told.o, k.group * 64, told.w.key0, told.w.c.sk, s);
    const float by = cap_and_slope<T, BLOCK>(p, told.o, k.group * 64, told.w.key0, s);
    mbarrier_wait(k.smem + layout::box_full, (int)(k.boxes & 1) ^ 1);
    return add_boxes<T, BLOCK>(k.smem + layout::boxes + k.group * layout::group_bytes, is_alike(p), by, s);
}

/* A step. */
template <typename T, int D, int BLOCK>
INLINE void sum_step(const attention_params &p, sums_state *k, const told_sums &told, int flags, float (*sum)[4]) {
    typedef layout_dbias<D, BLOCK> layout;
    const int row = k->group * 64 + fragment_row();
    float s[BLOCK / 8][4], dp[BLOCK / 8][4], bases[2], rests[2], dsum[2];
    const float *const numbers = (const float *)(k->shared + layout::numbers) + row;
    multiply_slot<T, D, BLOCK>(k->smem, k->group, k->r, s);
    const uint32_t empty = k->smem + layout::empty + k->r.slot * 8;
    advance<layout::slots>(&k->r);
    multiply_slot<T, D, BLOCK>(k->smem, k->group, k->r, dp);
    k->boxes += flags & SUMS_ANOTHER ? 1 : 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bases[half] = numbers[half * 8];
        rests[half] = numbers[OWN_ROWS + half * 8];
        dsum[half] = numbers[2 * OWN_ROWS + half * 8];
    }
    release_each(k->smem + layout::numbers_empty);
    wgmma_wait<1>();
    pin_all<BLOCK / 8>(s);
    release(empty);
    const bool low = adjust<T, D, BLOCK>(p, *k, told, s),
               rest = __any_sync(ALL_LANES, rests[0] != 0.0f || rests[1] != 0.0f);
    if (comes_in_boxes(p) && (flags & SUMS_LEAVES))
        release(k->smem + layout::box_empty);
    wgmma_wait<0>();
    pin_all<BLOCK / 8>(dp);
    release(k->smem + layout::empty + k->r.slot * 8);
    advance<layout::slots>(&k->r);
    if (p.drops)
        drop_elements(keep_queries<BLOCK>(p, told.o, make_dropout(p), k->group * 64, told.w.key0), p.keep_scale, dp);
    if (see_all<BLOCK>(told.w, told.w.row0 + k->group * 64) && !(flags & SUMS_CUT) && !low && !rest)
        add_all_gradients<BLOCK>(p, bases, dsum, s, dp, sum);
    else
        add_gradients<T, BLOCK>(p, told.w, told.w.row0 + row, flags & SUMS_CUT, bases, rests, dsum, s, dp, sum);
}

/* Each element, or sums over all queries, which go through `sums` where there are any. */
template <typename T, int BLOCK>
INLINE void store_dbias(const attention_params &p, const dbias_work &w, int group, bool any, float *sums,
                        float (*sum)[4]) {
    T *const to = (T *)p.t.dbias + row_at(p.a.dbias_stride, w.first_n, w.first_x, 0) + w.key0;
    const int keys = (int)p.a.sk - w.key0;
    if (p.a.dbias_stride.s) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = w.first_row + group * 64 + fragment_row() + half * 8;
            if (i < p.a.sq)
                store_row<T, BLOCK>(to + i * p.a.dbias_stride.s, sum, half, keys, 1.0f);
        }
        return;
    }
    if (any) {
        barrier_sync(1, CONSUMERS); /* all have read the bias */
        fold_rows<BLOCK>(sums + ((int)threadIdx.x / 32 - 4) * BLOCK, sum);
        barrier_sync(1, CONSUMERS);
    }
    const int key = threadIdx.x - WARPGROUP;
    float x = 0.0f;
    for (int z = 0; z < 8 && any && key < BLOCK; z++)
        x += sums[z * BLOCK + key];
    if (key < min(BLOCK, keys))
        from_float(to + key, x);
}

/* All tiles, as they are told of. */
template <typename T, int D, int BLOCK> INLINE void sum_tiles(const attention_params &p, char *shared) {
    typedef layout_dbias<D, BLOCK> layout;
    sums_state k = {shared_address(shared), shared};
    k.group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
    float sum[BLOCK / 8][4];
    zero_all<BLOCK / 8>(sum);
    for (;; k.step++) {
        const told_sums &told = told_of<layout>(k);
        const uint32_t empty = k.smem + layout::told_empty + k.step % SM90_DBIAS_TOLD * 8;
        mbarrier_wait(empty + layout::told_full - layout::told_empty, (int)(k.step / SM90_DBIAS_TOLD & 1));
        const int flags = __shfl_sync(ALL_LANES, told.flags, 0);
        const bool any = !(flags & SUMS_NONE);
        if (flags & SUMS_END)
            break;
        if (any)
            sum_step<T, D, BLOCK>(p, &k, told, flags, sum);
        else
            release_each(k.smem + layout::numbers_empty);
        if (flags & SUMS_LAST) {
            store_dbias<T, BLOCK>(p, told.w, k.group, any, (float *)(shared + layout::sums), sum);
            if (any && comes_in_boxes(p) && !p.a.dbias_stride.s) {
                fence_async();
                release(k.smem + layout::box_empty);
            }
            zero_all<BLOCK / 8>(sum);
        }
        release_each(empty);
    }
}

template <typename T, int D, int BLOCK> INLINE void attention_dbias(const attention_params_sm90 &all) {
    typedef layout_dbias<D, BLOCK> layout;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t smem = shared_address(shared);
    if (threadIdx.x == 0) {
        for (int x = 0; x < layout::slots; x++) {
            mbarrier_init(smem + layout::full + x * 8, 1);
            mbarrier_init(smem + layout::empty + x * 8, CONSUMERS / 32);
        }
        for (int x = 0; x < SM90_DBIAS_TOLD; x++) {
            mbarrier_init(smem + layout::told_full + x * 8, 33); /* numbers from each lane of a warp; what is told */
            mbarrier_init(smem + layout::told_empty + x * 8, CONSUMERS);
        }
        mbarrier_init(smem + layout::numbers_empty, CONSUMERS);
        mbarrier_init(smem + layout::box_full, 1);
        mbarrier_init(smem + layout::box_empty, CONSUMERS / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (__shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0) == 0) {
        registers_fewer<56>();
        if (threadIdx.x / 32 == 1)
            tell_dbias<T, D, BLOCK>(all.p, shared);
        else if (threadIdx.x == 0)
            fetch_dbias<D, BLOCK>(all, smem);
    } else {
        registers_more<224>();
        sum_tiles<T, D, BLOCK>(all.p, shared);
    }
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        wait_for_earlier_grid();                                                                                       \
        attention_dbias<dtype, dim, block>(all);                                                                       \
    }

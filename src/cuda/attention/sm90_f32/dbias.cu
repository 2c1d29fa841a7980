/* SPDX-License-Identifier: Apache-2.0
 * The gradient of a bias for Hopper in float32: dS, summed over what the bias is repeated along.
 *
 * A block owns 128 queries and 64 keys of a head of a batch, or of all that share their bias, and makes S = Q·Kᵀ and dP = dO·Vᵀ of their
 * split tiles for one after the other, 64 queries to a warpgroup. The sums stay in registers: no atomics, the same bits every time. One
 * thread fetches; Q and K, dO and V lie in slots in turn. */
#include "cuda/attention/dbias.cuh"
#include "cuda/attention/sm90_f32/bwd.cuh"
#include "cuda/attention/sm90_f32/options.cuh"
#include "cuda/attention/store.cuh"

/* So many steps are summed up by themselves. */
#define SUM_STEPS 32

#define OWN_ROWS DBIAS32_OWN_ROWS

template <int D> struct layout_dbias {
    static constexpr int parts = split_parts(D), tile_bytes = split_tile_bytes(D), part_bytes = split_part_bytes(D);
    static constexpr int slot_bytes = 3 * part_bytes, slots = dbias32_slots(D);
    static constexpr int infos = slots * slot_bytes; /* of a slot's tiles */
    static constexpr int sums = infos + slots * 3 * (int)sizeof(split_info);
    static constexpr int full = sums + 8 * BLOCK * 4, empty = full + slots * 8, bytes = empty + slots * 8;
    static_assert(bytes == dbias32_bytes(D), "as the plan counts");
    static_assert(bytes <= 227 * 1024, "more than a multiprocessor has");
};

template <int D> INLINE void fetch_dbias(const attention_params &p, uint32_t smem) {
    typedef layout_dbias<D> layout;
    ring r = {0, 0};
    dbias_work w = find_sums<OWN_ROWS, BLOCK>(p, blockIdx.x);
    for (bool more = seek<OWN_ROWS, BLOCK>(p, &w, false); more; more = seek<OWN_ROWS, BLOCK>(p, &w, true)) {
        const int count = min(2, (w.c.sq - w.row0 + BLOCK - 1) / BLOCK);
        const int64_t own = split_tile(p, w.c, false, w.x, w.row0 / BLOCK);
        const int64_t key = split_tile(p, w.c, true, w.x / p.group, w.key0 / BLOCK);
#pragma unroll
        for (int load = 0; load < 2 * layout::parts; load++) {
            const bool second = load >= layout::parts;
            const int64_t column = load % layout::parts * layout::part_bytes;
            const split_tensor &a = p.split[second ? SPLIT_DO : SPLIT_Q], &b = p.split[second ? SPLIT_V : SPLIT_K];
            const uint32_t bar = smem + layout::full + r.slot * 8, to = smem + r.slot * layout::slot_bytes;
            const uint32_t info = smem + layout::infos + r.slot * 48;
            mbarrier_wait(smem + layout::empty + r.slot * 8, r.turn ^ 1);
            mbarrier_expect(bar, (count + 1) * (layout::part_bytes + 16));
            if (layout::parts == 1)
                copy_bulk(to, (const char *)a.tiles + own * layout::tile_bytes, count * layout::tile_bytes, bar);
            else
                for (int z = 0; z < count; z++)
                    copy_bulk(to + z * layout::part_bytes,
                              (const char *)a.tiles + (own + z) * layout::tile_bytes + column, layout::part_bytes, bar);
            copy_bulk(to + 2 * layout::part_bytes, (const char *)b.tiles + key * layout::tile_bytes + column,
                      layout::part_bytes, bar);
            copy_bulk(info, &a.info[own], count * 16, bar);
            copy_bulk(info + 32, &b.info[key], 16, bar);
            advance<layout::slots>(&r);
        }
    }
}

/* A product of a warpgroup's rows, once the slots of its parts are there, from r on, which goes on: issued. Returns the exponent of what
 * comes of it. */
template <int D> INLINE int multiply_slots(uint32_t smem, int group, ring *r, float (*c)[4], float (*rest)[4]) {
    typedef layout_dbias<D> layout;
    const uint32_t info = smem + layout::infos + r->slot * 48;
    uint32_t a[layout::parts], b[layout::parts];
#pragma unroll
    for (int part = 0; part < layout::parts; part++) {
        const uint32_t at = smem + r->slot * layout::slot_bytes;
        a[part] = at + group * layout::part_bytes;
        b[part] = at + 2 * layout::part_bytes;
        mbarrier_wait(smem + layout::full + r->slot * 8, r->turn);
        advance<layout::slots>(r);
    }
    wgmma_fence();
    tile_scores<D, WALK_QUERIES>(c, rest, a, b);
    wgmma_commit();
    return -(int)(load_shared4(info + group * 16) + load_shared4(info + 32));
}

/* The slots of a product's parts, from r on, are done with; there: they were waited for. */
template <int D> INLINE void release_slots(uint32_t smem, bool there, ring *r) {
    typedef layout_dbias<D> layout;
#pragma unroll
    for (int part = 0; part < layout::parts; part++) {
        if (!there)
            mbarrier_wait(smem + layout::full + r->slot * 8, r->turn);
        release(smem + layout::empty + r->slot * 8);
        advance<layout::slots>(r);
    }
}

/* sum += dS, before a softcap, of what is seen; s, times 2^exponent, is q·k, and dp, times `by`, Z∘dP. */
template <int D>
INLINE void add_gradients(const attention_params &p, const dbias_work &w, int row0, int exponent, float by,
                          const float (*numbers)[2], float (*s)[4], const float (*dp)[4], float (*sum)[4]) {
    const int warp_row = row0 + (int)threadIdx.x % WARPGROUP / 32 * 16, row = row0 + fragment_row();
    const int key = w.key0 + fragment_column();
    const bool whole = row0 + BLOCK <= w.c.sq && w.key0 + BLOCK <= w.c.sk && w.key0 >= row0 + BLOCK - 1 + w.c.lo &&
                       w.key0 + BLOCK - 1 <= row0 + w.c.hi;
    lane_options<float> o[2];
    find_options<float, false>(p, w.c, w.x, row, key, o);
    uint32_t seen = whole ? ALL_LANES : find_seen<BLOCK>(w.c, row, row + 8, key);
    kept_bits<BLOCK> kept = keep_all<BLOCK>();
    if (p.drops)
        kept = find_kept<false, BLOCK>(p, make_dropout(p), dropout_head(p, w.c.n, w.x), warp_row + duty_row(), w.key0);
#pragma unroll
    for (int y0 = 0; y0 < BLOCK / 8; y0 += 2) {
        float slack[2][4];
        make_scores<float, false, 2>(p, o, scale_by(front_factor(p), exponent), whole, y0, &seen, s + y0, slack);
#pragma unroll
        for (int y = y0; y < y0 + 2; y++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float weight = weight_of<float>(s[y][e], LOG2E, numbers[0][e / 2], numbers[1][e / 2]);
                const float t = is_kept(kept, y, e) ? dp[y][e] * by : 0.0f;
                sum[y][e] += seen >> (4 * y + e) & 1 ? weight * (t - numbers[2][e / 2]) : 0.0f;
            }
    }
}

template <int D> INLINE void sum_dbias(const attention_params &p, uint32_t smem, int group, float (*sum)[4]) {
    typedef layout_dbias<D> layout;
    ring r = {0, 0};
    dbias_work w = find_sums<OWN_ROWS, BLOCK>(p, blockIdx.x);
    float part[BLOCK / 8][4];
    int step = 0;
    zero_all<BLOCK / 8>(part);
    for (bool more = seek<OWN_ROWS, BLOCK>(p, &w, false); more; more = seek<OWN_ROWS, BLOCK>(p, &w, true)) {
        float s[BLOCK / 8][4], dp[BLOCK / 8][4], dp2[BLOCK / 8][4], numbers[3][2];
        const int row0 = w.row0 + group * BLOCK;
        const bool there = row0 < w.c.sq;
        ring next = r;
        if (there) {
            prefetch_bias(p, w.c, w.x, row0, w.key0);
            const int exponent = multiply_slots<D>(smem, group, &next, s, layout::parts > 1 ? dp2 : NULL);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t at = lse_at(p, w.c, w.x, min(row0 + fragment_row() + half * 8, w.c.sq - 1));
                numbers[0][half] = p.base[at];
                numbers[1][half] = p.rest[at];
                numbers[2][half] = p.dsum[at];
            }
            if (layout::parts > 1) { /* there are no slots for more than one product */
                wgmma_wait<0>();
                pin_all<BLOCK / 8>(s);
                add_strip(s, dp2);
                release_slots<D>(smem, true, &r);
            }
            const int exponent2 = multiply_slots<D>(smem, group, &next, dp, D > 64 ? dp2 : NULL);
            wgmma_wait<0>();
            pin_all<BLOCK / 8>(s);
            pin_all<BLOCK / 8>(dp);
            if (D > 64)
                add_strip(dp, dp2);
            add_gradients<D>(p, w, row0, exponent, scale_by(p.keep_scale * dp_factor<D>(p), exponent2), numbers, s, dp,
                             part);
        } else if (layout::parts > 1)
            release_slots<D>(smem, false, &r);
        if (layout::parts == 1)
            release_slots<D>(smem, there, &r);
        release_slots<D>(smem, there, &r);
        if (++step % SUM_STEPS == 0) {
            add_strip(sum, part);
            zero_all<BLOCK / 8>(part);
        }
    }
    add_strip(sum, part);
}

/* Each element, or sums over all queries. */
INLINE void store_dbias(const attention_params &p, int group, float *sums, float (*sum)[4]) {
    const dbias_work w = find_sums<OWN_ROWS, BLOCK>(p, blockIdx.x);
    float *const to = (float *)p.t.dbias + row_at(p.a.dbias_stride, w.first_n, w.first_x, 0) + w.key0;
    const int keys = (int)p.a.sk - w.key0;
    if (p.a.dbias_stride.s) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = w.first_row + group * BLOCK + fragment_row() + half * 8;
            if (i < p.a.sq)
                store_row<float, BLOCK>(to + i * p.a.dbias_stride.s, sum, half, keys, 1.0f);
        }
        return;
    }
    fold_rows<BLOCK>(sums + ((int)threadIdx.x / 32 - 4) * BLOCK, sum);
    barrier_sync(1, CONSUMERS);
    const int key = threadIdx.x - WARPGROUP;
    float x = 0.0f;
    for (int z = 0; z < 8 && key < BLOCK; z++)
        x += sums[z * BLOCK + key];
    if (key < min(BLOCK, keys))
        to[key] = x;
}

template <int D> INLINE void attention_dbias(const attention_params &p) {
    typedef layout_dbias<D> layout;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t smem = shared_address(shared);
    if (threadIdx.x == 0) {
        for (int x = 0; x < layout::slots; x++) {
            mbarrier_init(smem + layout::full + x * 8, 1);
            mbarrier_init(smem + layout::empty + x * 8, CONSUMERS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<40>();
        if (threadIdx.x == 0)
            fetch_dbias<D>(p, smem);
    } else {
        registers_more<232>();
        const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
        float sum[BLOCK / 8][4];
        zero_all<BLOCK / 8>(sum);
        sum_dbias<D>(p, smem, group, sum);
        store_dbias(p, group, (float *)(shared + layout::sums), sum);
    }
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        wait_for_earlier_grid();                                                                                       \
        static_assert(own == OWN_ROWS && block == BLOCK, "as find_sums divides");                                      \
        attention_dbias<dim>(p);                                                                                       \
    }

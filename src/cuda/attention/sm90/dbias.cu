/* SPDX-License-Identifier: Apache-2.0
 * The gradient of a bias for Hopper: dS, summed over what the bias is repeated along.
 *
 * A block owns 128 queries and BLOCK keys of a head of a batch, or of all that share their bias, and makes S = Q·Kᵀ and dP = dO·Vᵀ for one
 * after the other, 64 queries to a warpgroup. The sums stay in registers: no atomics, the same bits every time, no workspace. One thread
 * fetches; Q and K, dO and V lie in a ring of slots in turn. */
#include "cuda/attention/dbias.cuh"
#include "cuda/attention/sm90/bwd.cuh"

template <int D, int BLOCK> struct layout_dbias {
    static constexpr int rows_bytes = OWN_ROWS * D * 2, slot_bytes = rows_bytes + BLOCK * D * 2;
    static constexpr int slots = sm90_dbias_slots(D, BLOCK);
    static constexpr int sums = slots * slot_bytes; /* of a warp, for each key */
    static constexpr int full = sums + 8 * BLOCK * 4, empty = full + slots * 8, bytes = empty + slots * 8;
    static_assert(bytes == sm90_dbias_bytes(D, BLOCK), "as the plan counts");
    static_assert(bytes <= 227 * 1024, "more than a multiprocessor has");
};

template <int D, int BLOCK> INLINE void fetch_dbias(const attention_params_sm90 &all, uint32_t smem) {
    typedef layout_dbias<D, BLOCK> layout;
    const attention_params &p = all.p;
    ring r = {0, 0};
    dbias_work w = find_sums<OWN_ROWS, BLOCK>(p);
    for (bool more = seek<OWN_ROWS, BLOCK>(p, &w, false); more; more = seek<OWN_ROWS, BLOCK>(p, &w, true)) {
        const int n = p.a.features & HEDDLE_VARLEN ? 0 : w.n, row = (int)w.c.first_q + w.row0;
        const int key = (int)w.c.first_k + w.key0, y = w.x / p.group;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const uint32_t bar = smem + layout::full + r.slot * 8, to = smem + r.slot * layout::slot_bytes;
            mbarrier_wait(smem + layout::empty + r.slot * 8, r.turn ^ 1);
            mbarrier_expect(bar, layout::slot_bytes);
            load_boxes<D, OWN_ROWS>(to, part ? &all.dout : &all.q, bar, row, w.x, n);
            load_boxes<D, BLOCK>(to + layout::rows_bytes, part ? &all.v : &all.k, bar, key, y, n);
            advance<layout::slots>(&r);
        }
    }
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

/* Do all of a warpgroup's queries from `row` on see all keys of the step, but for what a bias may mask? */
template <int BLOCK> INLINE bool see_all(const attention_params &p, const dbias_work &w, int row) {
    return !(p.a.features & HEDDLE_BOOL_MASK) && row + 64 <= w.c.sq && w.key0 + BLOCK <= w.c.sk &&
           w.key0 >= row + 63 + w.c.lo && w.key0 + BLOCK - 1 <= row + w.c.hi;
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

/* sum += dS of what is seen. */
template <typename T, int BLOCK>
INLINE void add_gradients(const attention_params &p, const dbias_work &w, int row, const float base[2],
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
        mask[half] = p.a.features & HEDDLE_BOOL_MASK
                         ? p.t.bool_mask + row_at(p.a.bool_mask_stride, w.n, w.x, min(i, w.c.sq - 1)) + key
                         : NULL;
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

template <typename T, int D, int BLOCK>
INLINE void sum_dbias(const attention_params &p, uint32_t smem, int group, float (*sum)[4]) {
    typedef layout_dbias<D, BLOCK> layout;
    ring r = {0, 0};
    dbias_work w = find_sums<OWN_ROWS, BLOCK>(p);
    for (bool more = seek<OWN_ROWS, BLOCK>(p, &w, false); more; more = seek<OWN_ROWS, BLOCK>(p, &w, true)) {
        float s[BLOCK / 8][4], dp[BLOCK / 8][4], bases[2], rests[2], dsum[2];
        const query_options o = find_options(p, w.c, w.x, w.row0, sizeof(T));
        const int row = w.row0 + group * 64 + fragment_row();
        multiply_slot<T, D, BLOCK>(smem, group, r, s);
        const uint32_t first = smem + layout::empty + r.slot * 8;
        advance<layout::slots>(&r);
        multiply_slot<T, D, BLOCK>(smem, group, r, dp);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t at = lse_at(p, w.c, w.x, min(row + half * 8, w.c.sq - 1));
            bases[half] = p.base[at];
            rests[half] = p.rest[at];
            dsum[half] = p.dsum[at];
        }
        wgmma_wait<1>();
        pin_all<BLOCK / 8>(s);
        release(first);
        const bool low = apply_options<T, BLOCK>(p, o, group * 64, w.key0, w.c.sk, s),
                   rest = __any_sync(ALL_LANES, rests[0] != 0.0f || rests[1] != 0.0f);
        wgmma_wait<0>();
        pin_all<BLOCK / 8>(dp);
        release(smem + layout::empty + r.slot * 8);
        advance<layout::slots>(&r);
        if (p.drops)
            drop_elements(keep_queries<BLOCK>(p, o, make_dropout(p), group * 64, w.key0), p.keep_scale, dp);
        if (see_all<BLOCK>(p, w, w.row0 + group * 64) && !low && !rest)
            add_all_gradients<BLOCK>(p, bases, dsum, s, dp, sum);
        else
            add_gradients<T, BLOCK>(p, w, row, bases, rests, dsum, s, dp, sum);
    }
}

/* Each element, or sums over all queries. */
template <typename T, int BLOCK>
INLINE void store_dbias(const attention_params &p, int group, float *sums, float (*sum)[4]) {
    const dbias_work w = find_sums<OWN_ROWS, BLOCK>(p);
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
    fold_rows<BLOCK>(sums + ((int)threadIdx.x / 32 - 4) * BLOCK, sum);
    barrier_sync(1, CONSUMERS);
    const int key = threadIdx.x - WARPGROUP;
    float x = 0.0f;
    for (int z = 0; z < 8 && key < BLOCK; z++)
        x += sums[z * BLOCK + key];
    if (key < min(BLOCK, keys))
        from_float(to + key, x);
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
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_fewer<40>();
        if (threadIdx.x == 0)
            fetch_dbias<D, BLOCK>(all, smem);
    } else {
        registers_more<232>();
        const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP - 1, 0);
        float sum[BLOCK / 8][4];
        zero_all<BLOCK / 8>(sum);
        sum_dbias<T, D, BLOCK>(all.p, smem, group, sum);
        store_dbias<T, BLOCK>(all.p, group, (float *)(shared + layout::sums), sum);
    }
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params_sm90 all) {                                                       \
        wait_for_earlier_grid();                                                                                       \
        attention_dbias<dtype, dim, block>(all);                                                                       \
    }

/* SPDX-License-Identifier: Apache-2.0
 * heddle_attention_merge: two results of the same queries become one, at the speed of memory. A warp has MERGE_ROWS rows: the shares of
 * each are found by a lane, in float64 as on the CPU, and its numbers are scaled by all lanes. */
#include "cuda/attention/merge.h"
#include "cuda/element.cuh"

#include <math_constants.h>

#define ALL_LANES 0xffffffffu

/* What a lane knows of a row: where it lies, its shares, and whether there is anything to do. */
struct merge_row {
    int64_t to, from;
    float keep, take;
    bool there, other; /* o is to be read; other_o is */
};

/* Row `row` of all; lse becomes that of both. */
INLINE merge_row find_merge_row(const merge_params &p, int64_t row) {
    const heddle_merge &m = p.m;
    const int64_t n = row / m.s / m.h, x = row / m.s % m.h, i = row % m.s;
    merge_row r;
    r.to = n * m.o_stride.b + x * m.o_stride.h + i * m.o_stride.s;
    r.from = n * m.other_stride.b + x * m.other_stride.h + i * m.other_stride.s;
    const float lse = p.lse[row], other = p.other_lse[row];
    r.there = lse != -CUDART_INF_F;
    r.other = other != -CUDART_INF_F;
    r.keep = 1.0f;
    r.take = 0.0f;
    if (r.other) {
        const double top = lse > other ? (double)lse : (double)other;
        const double before = exp((double)lse - top), now = exp((double)other - top), all = before + now;
        p.lse[row] = (float)(top + log(all));
        r.keep = (float)(before / all);
        r.take = (float)(now / all);
    }
    return r;
}

/* What of it concerns all lanes, from the one that knows. */
INLINE merge_row row_of_lane(const merge_row &mine, int lane) {
    merge_row r;
    r.to = __shfl_sync(ALL_LANES, mine.to, lane);
    r.from = __shfl_sync(ALL_LANES, mine.from, lane);
    r.keep = __shfl_sync(ALL_LANES, mine.keep, lane);
    r.take = __shfl_sync(ALL_LANES, mine.take, lane);
    r.there = __shfl_sync(ALL_LANES, mine.there, lane);
    r.other = __shfl_sync(ALL_LANES, mine.other, lane);
    return r;
}

/* Four numbers as they lie in memory. */
template <typename T> struct __align__(4 * sizeof(T)) four {
    T x[4];
};

template <typename T> INLINE void merge_four(const merge_row &r, float *to, const T *from) {
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    four<T> other = {};
    if (r.there)
        o = *(const float4 *)to;
    if (r.other)
        other = *(const four<T> *)from;
    *(float4 *)to =
        make_float4(fmaf(to_float(other.x[0]), r.take, o.x * r.keep), fmaf(to_float(other.x[1]), r.take, o.y * r.keep),
                    fmaf(to_float(other.x[2]), r.take, o.z * r.keep), fmaf(to_float(other.x[3]), r.take, o.w * r.keep));
}

template <typename T> INLINE void merge_one(const merge_row &r, float *to, const T *from) {
    const float o = r.there ? *to : 0.0f, other = r.other ? to_float(*from) : 0.0f;
    *to = fmaf(other, r.take, o * r.keep);
}

template <typename T> INLINE void attention_merge(const merge_params &p) {
    const int lane = threadIdx.x % 32, dv = (int)p.m.dv;
    const int64_t first = ((int64_t)blockIdx.x * MERGE_WARPS + threadIdx.x / 32) * MERGE_ROWS;
    merge_row mine = {0, 0, 1.0f, 0.0f, true, false};
    if (lane < MERGE_ROWS && first + lane < p.rows)
        mine = find_merge_row(p, first + lane);
    for (int x = 0; x < MERGE_ROWS && first + x < p.rows; x++) {
        const merge_row r = row_of_lane(mine, x);
        float *const to = p.o + r.to;
        const T *const from = (const T *)p.other_o + r.from;
        if (r.there && !r.other)
            continue;
        if (p.vector)
            for (int e = lane * 4; e < dv; e += 128)
                merge_four(r, to + e, from + e);
        else
            for (int e = lane; e < dv; e += 32)
                merge_one(r, to + e, from + e);
    }
}

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(warps == MERGE_WARPS && own == MERGE_WARPS * MERGE_ROWS, "as the host counts");                      \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ merge_params p) {        \
        wait_for_earlier_grid();                                                                                       \
        attention_merge<dtype>(p);                                                                                     \
    }

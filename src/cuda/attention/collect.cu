/* SPDX-License-Identifier: Apache-2.0
 * Keys and values that Hopper's kernels cannot read where they lie, in pages or of 8 bits, -> rows of 16 bits, at the speed of memory
 * (collect.c says when). Each row is written as it is, or widened, which rounds nothing; those behind a sequence's end are not, as nobody
 * looks at them. Where the rows are to be pages again, a table of them is written; else rows of no page become zeros, which a mask hides, so
 * that nobody finds what is not finite there and has to look whose it is. */
#include "cuda/attention/collect.h"
#include "cuda/attention/widen.cuh"
#include "mask.h"

#define AHEAD 8 /* units that a thread has on their way */

/* A unit as it lies in memory, of 16 bits or of bytes, and as it is written. */
struct of_numbers {
    typedef uint16_t element;
    typedef uint4 unit;
};
struct of_bytes {
    typedef uint8_t element;
    typedef uint2 unit;
};
INLINE uint4 wide(uint4 x) {
    return x;
}
INLINE uint4 wide(uint2 x) {
    return has_nan_bytes(make_uint4(x.x, x.y, 0, 0)) ? widen_bytes(x.x, x.y, true) : widen_bytes(x.x, x.y, false);
}

/* The elements of which there are `count`; the others are zeros. */
template <typename OF> INLINE typename OF::unit load_unit(const typename OF::element *from, int count, bool vector) {
    if (vector)
        return *(const typename OF::unit *)from;
    typename OF::unit r = {};
#pragma unroll
    for (int e = 0; e < COLLECT_UNIT; e++)
        if (e < count)
            ((typename OF::element *)&r)[e] = from[e];
    return r;
}

/* `count` rows from the one at `from` on, by a warp; NULL: zeros. */
template <typename OF>
INLINE void collect_rows(const typename OF::element *from, int64_t stride, int width, int count,
                         const collect_tensor &t, int64_t to_row) {
    const int all = count * t.units;
    uint4 *const to = (uint4 *)t.to + to_row * t.units;
    for (int first = (int)threadIdx.x % 32; first < all; first += 32 * AHEAD) {
        typename OF::unit x[AHEAD];
#pragma unroll
        for (int z = 0; z < AHEAD; z++) {
            const int u = first + 32 * z, row = u / t.units, column = (u - row * t.units) * COLLECT_UNIT;
            const bool there = from && u < all;
            x[z] = load_unit<OF>(from + (there ? row * stride + column : 0), there ? width - column : 0,
                                 there && t.vector);
        }
#pragma unroll
        for (int z = 0; z < AHEAD; z++)
            if (first + 32 * z < all)
                to[first + 32 * z] = wide(x[z]);
    }
}

/* Where the rows of a head are: of a page, or of a sequence. */
INLINE int64_t row_of(const heddle_strides &s, int64_t part, int64_t head, int64_t row) {
    return part * s.b + head * s.h + row * s.s;
}

/* A warp: 16 rows of a head of a sequence. Heads come side by side, as their rows may lie so. */
template <typename OF> INLINE void attention_collect(const collect_params &p) {
    const heddle_attention &a = p.a;
    const unsigned heads = (unsigned)a.hk, y = blockIdx.x % heads, unit = blockIdx.x / heads;
    const int64_t n = unit / (unsigned)p.chunks, chunk = unit % (unsigned)p.chunks;
    const sequence s = sequence_of(&a, p.cu_seqlens_q, p.cu_seqlens_k, NULL, p.seqlens_k, n);
    const int64_t j = (chunk * COLLECT_WARPS + threadIdx.x / 32) * COLLECT_ROWS, to_row = n * p.rows + j;
    if (y == 0 && chunk == 0 && threadIdx.x == 0) {
        if (p.starts)
            p.starts[n] = (int32_t)(n * p.rows);
        if (p.starts && n == a.b - 1)
            p.starts[a.b] = (int32_t)(a.b * p.rows);
        if (p.lengths)
            p.lengths[n] = (int32_t)s.sk;
    }
    if (j >= p.rows)
        return;
    const bool in_pages = a.features & HEDDLE_PAGES, packed = (a.features & HEDDLE_VARLEN) && !in_pages;
    const int count = (int)clamp64(s.sk - j, 0, COLLECT_ROWS);
    const int64_t page = in_pages && count ? page_of(&a, p.block_table, n, j) : 0;
    if (p.pages && y == 0 && threadIdx.x % 32 == 0 && j % p.page == 0)
        p.pages[to_row / p.page] = page < 0 ? -1 : (int32_t)(to_row / p.page);
    if (!count || (p.pages && page < 0))
        return;
    const int64_t part = in_pages ? page : packed ? 0 : n, row = in_pages ? j % a.page : s.first_k + j;
    const int64_t to = y * (a.b * p.rows) + to_row;
    typedef typename OF::element element;
    const element *const k = (const element *)p.k.from + row_of(a.k_stride, part, y, row),
                         *const v = (const element *)p.v.from + row_of(a.v_stride, part, y, row);
    collect_rows<OF>(page < 0 ? NULL : k, a.k_stride.s, (int)a.d, count, p.k, to);
    collect_rows<OF>(page < 0 ? NULL : v, a.v_stride.s, (int)a.dv, count, p.v, to);
}

#define collects_plain of_numbers
#define collects_bytes of_bytes
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(warps == COLLECT_WARPS && own == COLLECT_ROWS, "as the host counts");                                \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(const __grid_constant__ collect_params p) {  \
        wait_for_earlier_grid();                                                                                       \
        let_next_grid_start();                                                                                         \
        attention_collect<collects_##variant>(p);                                                                      \
    }

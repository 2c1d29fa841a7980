/* SPDX-License-Identifier: Apache-2.0
 * What the attention kernels for Hopper share: tiles as the copy engine lays them down, products of a warpgroup over them,
 * rings of tiles behind mbarriers, and the cleaning of tiles that a mask cuts.
 *
 * A tile of ROWS rows and D columns of 16 bits is strips of 64 columns, one behind the other, the last filled up with zeros; a row of a
 * strip is 128 bytes, whose 16-byte chunk x lies at x ^ (row % 8) (the swizzle of 128 bytes). Tiles begin at multiples of 1024. */
#ifndef HEDDLE_CUDA_ATTENTION_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_SM90_CUH

#include "cuda/attention/sm90/contract.h"
#include "cuda/attention/store.cuh"
#include "cuda/wgmma.cuh"

template <int D, int ROWS> struct tile90 {
    static constexpr int strip = ROWS * 128; /* bytes */
    static constexpr int strips = sm90_columns(D) / 64;
    static constexpr int bytes = strips * strip;
};

/* Of the 16 rows of a warp a lane's four numbers side by side, times `by`: of two lanes one has those of a row of the upper half, the
 * other those of the lower one. */
INLINE int four_row(void) {
    return (int)(threadIdx.x % 2 * 8 + threadIdx.x % 32 / 4);
}
INLINE int four_column(void) {
    return (int)(threadIdx.x % 4 / 2 * 4);
}
INLINE float4 take_four(const float *c, float by) {
    const bool odd = threadIdx.x % 2;
    const float a = __shfl_xor_sync(ALL_LANES, odd ? c[0] : c[2], 1),
                b = __shfl_xor_sync(ALL_LANES, odd ? c[1] : c[3], 1);
    return odd ? make_float4(a * by, b * by, c[2] * by, c[3] * by) : make_float4(c[0] * by, c[1] * by, a * by, b * by);
}

/* The 16 rows of a warp, added to float32 sums by the only one who does. Nothing is read, so that no register waits. */
template <int D>
INLINE void add_tile(float *to, int64_t stride, int warp_row, int rows, int width, float by, const float (*c)[4]) {
    const int row = warp_row + four_row();
    float *const line = to + row * stride + four_column();
    const bool whole = __all_sync(ALL_LANES, ((size_t)line | (size_t)(width * 4)) % 16 == 0);
    const int end = row < rows ? width - four_column() : 0;
#pragma unroll
    for (int y = 0; y < D / 8; y++) {
        const float4 x = take_four(c[y], by);
        const float each[4] = {x.x, x.y, x.z, x.w};
        if (whole && y * 8 < end)
            add_global4(line + y * 8, x);
#pragma unroll
        for (int e = 0; !whole && e < 4; e++)
            if (y * 8 + e < end)
                add_global(line + y * 8 + e, each[e]);
    }
}

/* A tile's rows as store_tile has them. */
template <typename T, int D>
INLINE void end_tile(bool adds, void *to, int64_t at, int64_t stride, int warp_row, int rows, int width, float by,
                     const float (*c)[4]) {
    if (adds && to)
        add_tile<D>((float *)to + at, stride, warp_row, rows, width, by, c);
    else
        store_tile<T, D>(false, to, at, stride, warp_row, rows, width, by, c);
}

/* Shared memory of a block begins where it likes, tiles do not. */
INLINE uint32_t align_tiles(uint32_t at) {
    return (at + SM90_TILE_ALIGNMENT - 1) & ~(SM90_TILE_ALIGNMENT - 1u);
}

/* ------------------------------------------------------------------------------------------------------- products */

/* Rows of a tile as rows of A or columns of B: the sum runs along them. Step s is 16 columns. */
INLINE uint64_t describe_rows(uint32_t at) {
    return describe(at, 16, 1024);
}
template <int ROWS> INLINE constexpr uint64_t rows_step(int s) {
    return (uint64_t)((s / 4 * ROWS * 128 + s % 4 * 32) >> 4);
}

/* Rows of a tile as rows of B: the sum runs over them. Step s is 16 rows. STRIP: bytes from strip to strip. */
template <int STRIP> INLINE uint64_t describe_columns(uint32_t at) {
    return describe(at, STRIP, 1024);
}
INLINE constexpr uint64_t columns_step(int s) {
    return (uint64_t)(s * 16 * 128 >> 4);
}

/* c[N/8] = A·Bᵀ (+ c, if adds) over D columns, issued only: the caller fences before, commits and waits. A: 64 rows of a tile of A_ROWS
 * from address a on (a multiple of 8 rows into it), B: N rows of a tile of B_ROWS. */
template <typename T, int D, int N, int A_ROWS, int B_ROWS>
INLINE void warpgroup_rows(float (*c)[4], uint32_t a, uint32_t b, bool adds = false) {
    const uint64_t da = describe_rows(a), db = describe_rows(b);
#pragma unroll
    for (int s = 0; s < D / 16; s++)
        wgmma<T, N, 0>::run(c, da + rows_step<A_ROWS>(s), db + rows_step<B_ROWS>(s), adds || s > 0);
}

/* c[N/8] += A·B over ROWS rows: A in registers, as pack_fragments gives it; B: N columns of a tile of B_ROWS rows, the first of
 * the ROWS at address b. A product has up to MOST columns. Issued only. */
template <typename T, int N, int ROWS, int B_ROWS, int MOST = 256>
INLINE void warpgroup_columns(float (*c)[4], const uint32_t (*a)[4], uint32_t b) {
    constexpr int FIRST = N > MOST ? 192 : N, REST = N > MOST ? N - FIRST : N;
    const uint64_t db = describe_columns<B_ROWS * 128>(b);
#pragma unroll
    for (int s = 0; s < ROWS / 16; s++) {
        wgmma<T, FIRST, 1>::run(c, a[s], db + columns_step(s), 1);
        if (N > MOST)
            wgmma<T, REST, 1>::run(c + FIRST / 8, a[s], db + (FIRST / 64 * B_ROWS * 128 >> 4) + columns_step(s), 1);
    }
}

/* c[N/8] = A·B (+ c, if adds) over ROWS rows of B: A: 64 rows of strips of 64; B: N columns of a tile of B_ROWS rows. Issued only. */
template <typename T, int N, int ROWS, int B_ROWS>
INLINE void warpgroup_strips(float (*c)[4], uint32_t a, uint32_t b, bool adds = false) {
    const uint64_t da = describe_rows(a), db = describe_columns<B_ROWS * 128>(b);
#pragma unroll
    for (int s = 0; s < ROWS / 16; s++)
        wgmma<T, N, 1>::run(c, da + rows_step<64>(s), db + columns_step(s), adds || s > 0);
}

/* c[N/8] = Aᵀ·B over ROWS rows of both: A: 64 columns, a strip; B: N columns of a tile of B_ROWS rows. Issued only. */
template <typename T, int N, int ROWS, int B_ROWS> INLINE void warpgroup_both(float (*c)[4], uint32_t a, uint32_t b) {
    const uint64_t da = describe_columns<ROWS * 128>(a), db = describe_columns<B_ROWS * 128>(b);
#pragma unroll
    for (int s = 0; s < ROWS / 16; s++)
        wgmma<T, N, 1>::run_both(c, da + columns_step(s), db + columns_step(s), s > 0);
}

/* Accumulators of 64 rows and N columns -> A operands of the N/16 steps of a product over those columns. */
template <typename T, int N> INLINE void pack_fragments(uint32_t (*a)[4], const float (*c)[4]) {
#pragma unroll
    for (int s = 0; s < N / 16; s++) {
        a[s][0] = pack_pair(c[2 * s][0], c[2 * s][1], T());
        a[s][1] = pack_pair(c[2 * s][2], c[2 * s][3], T());
        a[s][2] = pack_pair(c[2 * s + 1][0], c[2 * s + 1][1], T());
        a[s][3] = pack_pair(c[2 * s + 1][2], c[2 * s + 1][3], T());
    }
}

template <int COUNT> INLINE void pin_all(float (*c)[4]) {
#pragma unroll
    for (int y = 0; y < COUNT; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            pin(c[y][e]);
}
template <int COUNT> INLINE void pin_all(uint32_t (*a)[4]) {
#pragma unroll
    for (int y = 0; y < COUNT; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            pin(a[y][e]);
}

template <int COUNT> INLINE void zero_all(float (*c)[4]) {
#pragma unroll
    for (int y = 0; y < COUNT; y++)
        c[y][0] = c[y][1] = c[y][2] = c[y][3] = 0.0f;
}

/* ---------------------------------------------------------------------------------------------------------- rings */

/* ROWS x D from row `row` and column `column` of head `head` of batch `n`: boxes of BOX rows and 64 columns. One thread. Rows and columns that the
 * tensor does not have become zero, and count as copied. */
template <int D, int ROWS, int BOX = 64>
INLINE void load_boxes(uint32_t to, const tensor_map *map, uint32_t barrier, int row, int head, int n, int column = 0) {
#pragma unroll
    for (int x = 0; x < tile90<D, ROWS>::strips; x++)
#pragma unroll
        for (int y = 0; y < ROWS / BOX; y++)
            tma_load4(to + x * tile90<D, ROWS>::strip + y * BOX * 128, map, barrier, column + x * 64, row + y * BOX,
                      head, n);
}

/* sum + 0·x for eight numbers: 0 as long as all are finite, then NaN. */
INLINE uint32_t add_zeros(uint32_t sum, uint4 x) {
    return fma2_bf16(x.w, 0, fma2_bf16(x.z, 0, fma2_bf16(x.y, 0, fma2_bf16(x.x, 0, sum))));
}

/* Is one of the numbers not finite in every THREADS-th of so many chunks of 16 bytes? */
template <typename T, int CHUNKS, int THREADS> INLINE bool is_bad_part(uint32_t at, int thread) {
    uint32_t sum[2] = {0, 0};
#pragma unroll
    for (int x = 0; x < CHUNKS / THREADS; x++)
        sum[x % 2] = add_zeros(sum[x % 2], load_shared16(at + (x * THREADS + thread) * 16));
    return ((sum[0] | sum[1]) & 0x7fff7fffu) != 0;
}

/* Is one of the numbers in a row not finite? */
template <typename T, int D, int ROWS> INLINE bool is_bad_row(uint32_t tile, int row) {
    uint32_t sum[2] = {0, 0};
#pragma unroll 1
    for (int x = 0; x < tile90<D, ROWS>::strips; x++) {
        const uint32_t at = tile + x * tile90<D, ROWS>::strip + row * 128;
#pragma unroll
        for (int y = 0; y < 8; y++) /* lanes begin in different banks */
            sum[y % 2] = add_zeros(sum[y % 2], load_shared16(at + (y ^ (row & 7)) * 16));
    }
    return ((sum[0] | sum[1]) & 0x7fff7fffu) != 0;
}

/* In a tile that a mask cuts, 0·NaN would leak through a product: rows that are not finite become zero where they are not, and
 * their bits in bad[row / 32] are set. A thread looks after every THREADS-th row, where `asked` says so; fence_async() and a barrier have to
 * follow. */
template <typename T, int D, int ROWS, int THREADS>
INLINE void clean_rows(uint32_t tile, uint32_t *bad, int thread, const bool *asked) {
#pragma unroll
    for (int x = 0; x < ROWS / THREADS; x++) {
        const int row = thread + x * THREADS;
        const bool found = asked[x] && is_bad_row<T, D, ROWS>(tile, row);
        const uint32_t all = __ballot_sync(ALL_LANES, found);
        if (thread % 32 == 0) /* by the thread that arrives: racecheck sees no other order */
            bad[row / 32] = all;
#pragma unroll 1
        for (int z = 0; found && z < tile90<D, ROWS>::strips * 8; z++) { /* swizzled: of the last strip, too, all */
            const uint32_t chunk = tile + z / 8 * tile90<D, ROWS>::strip + row * 128 + z % 8 * 16;
            if (has_nonfinite(load_shared16(chunk), T()))
                store_shared16(chunk, make_uint4(0, 0, 0, 0));
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------- masks */

/* Where this thread's part of accumulators lies: its first row in the warpgroup (the other is 8 below), and the first of its
 * pairs of columns. */
INLINE int fragment_row(void) {
    return (int)threadIdx.x % WARPGROUP / 32 * 16 + (int)threadIdx.x % 32 / 4;
}
INLINE int fragment_column(void) {
    return (int)threadIdx.x % 4 * 2;
}

/* Is one of the bits first .. last of 128 set? */
INLINE bool has_bit(uint4 bits, int first, int last) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    uint32_t any = 0;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        const int from = max(first - x * 32, 0), to = min(last - x * 32, 31);
        if (from <= to)
            any |= words[x] & ALL_LANES << from & ALL_LANES >> (31 - to);
    }
    return any != 0;
}

/* Rows i0 + 0 .. 63 of which the i-th sees keys up to i + hi and below sk; keys from j0 on. What is not seen becomes -inf. */
template <int N> INLINE void mask_above(int hi, int sk, int i0, int j0, float (*s)[4]) {
    const int i = i0 + fragment_row(), column0 = j0 + fragment_column();
    const int last[2] = {min(i + hi, sk - 1) - column0, min(i + 8 + hi, sk - 1) - column0};
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = y * 8 + e % 2 > last[e / 2] ? -CUDART_INF_F : s[y][e];
}

/* The i-th sees keys from i + lo on. */
template <int N> INLINE void mask_below(int lo, int i0, int j0, float (*s)[4]) {
    const int first = i0 + fragment_row() + lo - j0 - fragment_column();
#pragma unroll
    for (int y = 0; y < N / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[y][e] = y * 8 + e % 2 < first + e / 2 * 8 ? -CUDART_INF_F : s[y][e];
}

#endif

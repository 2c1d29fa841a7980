/* SPDX-License-Identifier: Apache-2.0
 * The two products that attention is made of, of tiles and accumulators. */
#ifndef HEDDLE_CUDA_ATTENTION_PRODUCT_CUH
#define HEDDLE_CUDA_ATTENTION_PRODUCT_CUH

#include "cuda/attention/fragment.cuh"

/* -------------------------------------------------------------------------------------- float32: when all products
 * A sum of few terms has nothing to hide the last bit of an operand in: a plain computation rounds but once or twice there. */
#define FEW_TERMS 16

/* How many steps of 8 a product of rows then has: of rows that long, and where a row of weights has no more. The same for all tiles of a
 * sequence, as both passes are to form the same scores; 0 elsewhere. */
template <typename T, int D> INLINE int whole_steps(const attention_params &p, const place &c) {
    return sizeof(T) != 4                      ? 0
           : max64(p.a.d, p.a.dv) <= FEW_TERMS ? FEW_TERMS / 8
           : c.sk <= FEW_TERMS                 ? share<T, D>::steps
                                               : 0;
}

/* Does a query of i0 .. i1-1 see few keys? Of a band the first or the last sees the fewest. */
template <typename T> INLINE bool few_keys(const place &c, int i0, int i1) {
    const int first = min(i0 + c.hi + 1, c.sk) - max(i0 + c.lo, 0), last = min(i1 + c.hi, c.sk) - max(i1 - 1 + c.lo, 0);
    return sizeof(T) == 4 && min(first, last) <= FEW_TERMS;
}

/* Is a key of j0 .. j1-1 seen by few queries of a head? */
template <typename T> INLINE bool few_queries(const place &c, int j0, int j1) {
    const int first = min(j0 - c.lo + 1, c.sq) - max(j0 - c.hi, 0), last = min(j1 - c.lo, c.sq) - max(j1 - 1 - c.hi, 0);
    return sizeof(T) == 4 && min(first, last) <= FEW_TERMS;
}

/* Has a row of these weights no more than four that are not 0? By a warp. */
template <typename T, int TILES, int COLUMNS>
INLINE bool few_are_left(const attention_params &p, const float (*s)[COLUMNS / 8][4]) {
    if (!hides<T>(p))
        return false;
    bool few = false;
#pragma unroll
    for (int x = 0; x < TILES; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float count = 0.0f;
#pragma unroll
            for (int y = 0; y < COLUMNS / 8; y++)
                count += (s[x][y][2 * half] != 0.0f ? 1.0f : 0.0f) + (s[x][y][2 * half + 1] != 0.0f ? 1.0f : 0.0f);
            count = quad_sum(count);
            few |= count > 0.0f && count <= 4.0f;
        }
    return __any_sync(ALL_LANES, few);
}

/* ------------------------------------------------------------------------------------------------------ products */

/* `bytes` (a constant) further along a row of B. SWIZZLED: rows without the 16 bytes more, chunk c of row r at c ^ r%8 of its 128 bytes, as
 * cp.async likes it: a line of global memory that does not fall on one line of shared memory is fetched in two parts. */
template <int SWIZZLED> INLINE uint32_t along_row(uint32_t at, int bytes) {
    return SWIZZLED ? (at ^ (bytes & 127)) + (bytes & ~127) : at + bytes; /* what is added last costs nothing */
}

template <typename T, int D, int SWIZZLED> struct b_tile {
    static constexpr int pitch = SWIZZLED ? D * (int)sizeof(T) : tile<T, D>::pitch;
    static __device__ __forceinline__ uint32_t rows_lane(int lane) {
        const int row = (lane & 7) + (lane >> 4 & 1) * 8, chunk = lane >> 3 & 1;
        return row * pitch + (SWIZZLED ? chunk ^ (lane & 7) : chunk) * 16;
    }
    static __device__ __forceinline__ uint32_t columns_lane(int lane) {
        const int row = (lane & 7) + (lane >> 3 & 1) * 8, chunk = lane >> 4 & 1;
        return row * pitch + (SWIZZLED ? chunk ^ (lane & 7) : chunk) * 16;
    }
};

template <int ROWS, int COLUMNS> INLINE void clear(float (*c)[COLUMNS][4]) {
#pragma unroll
    for (int x = 0; x < ROWS; x++)
#pragma unroll
        for (int y = 0; y < COLUMNS; y++)
            c[x][y][0] = c[x][y][1] = c[x][y][2] = c[x][y][3] = 0.0f;
}

template <int ROWS, int COLUMNS> INLINE void add(float (*c)[COLUMNS][4], const float (*t)[COLUMNS][4]) {
#pragma unroll
    for (int x = 0; x < ROWS; x++)
#pragma unroll
        for (int y = 0; y < COLUMNS; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[x][y][e] += t[x][y][e];
}

/* c[TILES][COLUMNS/8] = A·Bᵀ over D: A has 16·TILES rows at a, B has COLUMNS rows at b. */
template <typename T, int D, int TILES, int COLUMNS, int SWIZZLED> struct rows_product {
    static __device__ __forceinline__ void run(float (*c)[COLUMNS / 8][4], uint32_t a, uint32_t b, bool, int) {
        typedef tile<T, D> t;
        clear<TILES, COLUMNS / 8>(c);
#pragma unroll(D > 128 ? 4 : 8)
        for (int s = 0; s < share<T, D>::steps; s++) {
            a_fragment<T> fa[TILES];
#pragma unroll
            for (int x = 0; x < TILES; x++)
                load_a(&fa[x], a + x * 16 * t::pitch + s * 32);
#pragma unroll
            for (int y = 0; y < COLUMNS / 16; y++) {
                b_fragment<T> fb[2];
                load_b_rows(fb, along_row<SWIZZLED>(b + y * 16 * b_tile<T, D, SWIZZLED>::pitch, s * 32));
#pragma unroll
                for (int x = 0; x < TILES; x++) {
                    multiply(c[x][2 * y], fa[x], fb[0]);
                    multiply(c[x][2 * y + 1], fa[x], fb[1]);
                }
            }
        }
    }
};

/* The tensor cores cut off when they add to an accumulator: so much of itself a sum of so many steps lacks on average, half a unit of its
 * last place for each of them (of one that grows), where a unit is 0.72 of 2^-23 on average. */
INLINE constexpr float cut_off(int steps) {
    return 0.36f * 0x1p-23f * (float)(steps + 1) / 2;
}

/* Of rows that know nothing of each other, in groups of four steps, as measured. */
#define ROWS_CUT_OFF (0.71f * 0x1p-23f)

/* In float32 the small products are therefore summed
 * apart, and the large ones from zero over a few steps, to be added by a rounding addition (after Ootomo and Yokota,
 * 2022). */
template <int D, int TILES, int COLUMNS, int SWIZZLED> struct rows_product<float, D, TILES, COLUMNS, SWIZZLED> {
    static __device__ __forceinline__ void run_whole(float (*c)[COLUMNS / 8][4], uint32_t a, uint32_t b, int steps) {
#pragma unroll 1
        for (int s = 0; s < steps; s++) {
            a_fragment<float> fa[TILES];
#pragma unroll
            for (int x = 0; x < TILES; x++)
                load_a(&fa[x], a + x * 16 * tile<float, D>::pitch + s * 32);
#pragma unroll
            for (int y = 0; y < COLUMNS / 16; y++) {
                b_fragment<float> fb[2];
                load_b_rows(fb, along_row<SWIZZLED>(b + y * 16 * b_tile<float, D, SWIZZLED>::pitch, s * 32));
#pragma unroll
                for (int x = 0; x < TILES; x++)
#pragma unroll
                    for (int z = 0; z < 2; z++)
                        multiply_whole(c[x][2 * y + z], fa[x], fb[z]);
            }
        }
    }
    static __device__ __forceinline__ void run(float (*c)[COLUMNS / 8][4], uint32_t a, uint32_t b, bool tf32,
                                               int whole) {
        typedef tile<float, D> t;
        float part[TILES][COLUMNS / 8][4], low[TILES][COLUMNS / 8][4];
        clear<TILES, COLUMNS / 8>(c);
        if (whole && !tf32) {
            run_whole(c, a, b, whole);
            return;
        }
        clear<TILES, COLUMNS / 8>(low);
#pragma unroll 1
        for (int group = 0; group < share<float, D>::steps; group += 4) {
            clear<TILES, COLUMNS / 8>(part);
#pragma unroll
            for (int s = 0; s < 4; s++) {
                a_fragment<float> fa[TILES];
#pragma unroll
                for (int x = 0; x < TILES; x++)
                    load_a(&fa[x], a + x * 16 * t::pitch + (group + s) * 32);
#pragma unroll
                for (int y = 0; y < COLUMNS / 16; y++) {
                    b_fragment<float> fb[2];
                    load_b_rows(fb,
                                along_row<SWIZZLED>(b + y * 16 * b_tile<float, D, SWIZZLED>::pitch, (group + s) * 32));
#pragma unroll
                    for (int x = 0; x < TILES; x++)
#pragma unroll
                        for (int z = 0; z < 2; z++)
                            multiply_parts(part[x][2 * y + z], low[x][2 * y + z], fa[x], fb[z], tf32);
                }
            }
            add<TILES, COLUMNS / 8>(c, part);
        }
#pragma unroll
        for (int x = 0; x < TILES; x++)
#pragma unroll
            for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
                for (int e = 0; e < 4; e++) /* numbers of 11 bits have exact sums, which nothing was cut off */
                    c[x][y][e] += low[x][y][e] != 0.0f ? fmaf(c[x][y][e], ROWS_CUT_OFF, low[x][y][e]) : 0.0f;
    }
};

/* joins: where parts are joined, if D is that wide. whole: so many steps (whole_steps) by multiply_whole. */
template <typename T, int D, int TILES, int COLUMNS, int SWIZZLED = 0>
INLINE void product_rows(float (*c)[COLUMNS / 8][4], uint32_t a, uint32_t b, bool tf32, int whole, uint32_t joins = 0) {
    const int lane = threadIdx.x % 32, from = share<T, D>::part() * share<T, D>::width * (int)sizeof(T);
    static_assert(!SWIZZLED || share<T, D>::count == 1, "a share begins anywhere in a row");
    rows_product<T, D, TILES, COLUMNS, SWIZZLED>::run(c, a + from + a_lane<T, D>(lane),
                                                      b + from + b_tile<T, D, SWIZZLED>::rows_lane(lane), tf32, whole);
    if (share<T, D>::count > 1)
        join_parts<share<T, D>::count, TILES, COLUMNS>(c, joins);
}

template <typename T, int D, int SWIZZLED> struct columns {
    static __device__ __forceinline__ uint32_t lane_at(int lane) {
        return b_tile<T, D, SWIZZLED>::columns_lane(lane);
    }
    static __device__ __forceinline__ void load(b_fragment<T> b[2], uint32_t at) {
        load_b_columns<T, D>(b, at);
    }
};
template <int D, int SWIZZLED> struct columns<float, D, SWIZZLED> {
    static __device__ __forceinline__ uint32_t lane_at(int lane) {
        const int row = lane % 4 * 2, chunk = lane / 16;
        return row * b_tile<float, D, SWIZZLED>::pitch + (SWIZZLED ? chunk ^ row : chunk) * 16 + lane / 4 % 4 * 4;
    }
    static __device__ __forceinline__ void load(b_fragment<float> b[2], uint32_t at) {
        if (SWIZZLED) {
            const uint32_t below = (at + b_tile<float, D, SWIZZLED>::pitch) ^ 16; /* from an even row */
            set_b(&b[0], load_shared4(at), load_shared4(below));
            set_b(&b[1], load_shared4(at ^ 32), load_shared4(below ^ 32));
        } else {
            f32_columns<D>::load(b, at);
        }
    }
};

/* c[TILES][D/8] += A·B: A in accumulators of ROWS columns, B has ROWS rows at b. Of a wide D, this warp's share of the columns. */
template <typename T, int D, int TILES, int ROWS, int SWIZZLED> struct columns_product {
    static __device__ __forceinline__ void run(float (*c)[share<T, D>::width / 8][4], const float (*a)[ROWS / 8][4],
                                               uint32_t b, bool, bool) {
#pragma unroll
        for (int s = 0; s < ROWS / 16; s++) {
            a_fragment<T> fa[TILES];
#pragma unroll
            for (int x = 0; x < TILES; x++)
                a_from_accumulators(&fa[x], a[x], s);
#pragma unroll
            for (int y = 0; y < share<T, D>::width / 16; y++) {
                b_fragment<T> fb[2];
                columns<T, D, SWIZZLED>::load(fb,
                                              along_row<SWIZZLED>(b + s * 16 * b_tile<T, D, SWIZZLED>::pitch, y * 32));
#pragma unroll
                for (int x = 0; x < TILES; x++) {
                    multiply(c[x][2 * y], fa[x], fb[0]);
                    multiply(c[x][2 * y + 1], fa[x], fb[1]);
                }
            }
        }
    }
};

template <int D, int TILES, int ROWS, int SWIZZLED> struct columns_product<float, D, TILES, ROWS, SWIZZLED> {
    static __device__ __forceinline__ void run_whole(float (*c)[share<float, D>::width / 8][4],
                                                     const float (*a)[ROWS / 8][4], uint32_t b) {
#pragma unroll
        for (int y = 0; y < share<float, D>::width / 16; y++)
#pragma unroll
            for (int s = 0; s < ROWS / 8; s++) {
                b_fragment<float> fb[2];
                columns<float, D, SWIZZLED>::load(
                    fb, along_row<SWIZZLED>(b + s * 8 * b_tile<float, D, SWIZZLED>::pitch, y * 64));
#pragma unroll
                for (int x = 0; x < TILES; x++) {
                    a_fragment<float> fa;
                    a_from_accumulators(&fa, a[x], s);
                    multiply_whole(c[x][2 * y], fa, fb[0]);
                    multiply_whole(c[x][2 * y + 1], fa, fb[1]);
                }
            }
    }
    static __device__ __forceinline__ void run(float (*c)[share<float, D>::width / 8][4], const float (*a)[ROWS / 8][4],
                                               uint32_t b, bool tf32, bool whole) {
        if (whole && !tf32) {
            run_whole(c, a, b);
            return;
        }
        a_fragment<float> fa[TILES][ROWS / 8];
#pragma unroll
        for (int x = 0; x < TILES; x++)
#pragma unroll
            for (int s = 0; s < ROWS / 8; s++)
                a_from_accumulators(&fa[x][s], a[x], s);
#pragma unroll
        for (int y = 0; y < share<float, D>::width / 16; y++) {
            float part[TILES][2][4], low[TILES][2][4];
            clear<TILES, 2>(part);
            clear<TILES, 2>(low);
#pragma unroll
            for (int s = 0; s < ROWS / 8; s++) {
                b_fragment<float> fb[2];
                columns<float, D, SWIZZLED>::load(
                    fb, along_row<SWIZZLED>(b + s * 8 * b_tile<float, D, SWIZZLED>::pitch, y * 64));
#pragma unroll
                for (int x = 0; x < TILES; x++)
#pragma unroll
                    for (int z = 0; z < 2; z++)
                        multiply_parts(part[x][z], low[x][z], fa[x][s], fb[z], tf32);
            }
#pragma unroll
            for (int x = 0; x < TILES; x++)
#pragma unroll
                for (int z = 0; z < 8; z++)
                    c[x][2 * y + z / 4][z % 4] +=
                        part[x][z / 4][z % 4] + fmaf(part[x][z / 4][z % 4], cut_off(ROWS / 8), low[x][z / 4][z % 4]);
        }
    }
};

template <typename T, int D, int TILES, int ROWS, int SWIZZLED = 0>
INLINE void product_columns(float (*c)[share<T, D>::width / 8][4], const float (*a)[ROWS / 8][4], uint32_t b, bool tf32,
                            bool whole) {
    const int from = share<T, D>::part() * share<T, D>::width * (int)sizeof(T);
    columns_product<T, D, TILES, ROWS, SWIZZLED>::run(
        c, a, b + from + columns<T, D, SWIZZLED>::lane_at(threadIdx.x % 32), tf32, whole);
}

#endif

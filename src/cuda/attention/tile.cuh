/* SPDX-License-Identifier: Apache-2.0
 * Tiles in shared memory, fragments of the tensor cores, and the two products that attention is made of.
 *
 * A tile has rows of D elements and 16 bytes more, so that the eight rows of one ldmatrix matrix lie in different
 * banks. In bytes, all element types look alike: a step of a product takes 32 bytes of a row, 16 elements of 16 bits
 * or 8 of 32. */
#ifndef HEDDLE_CUDA_ATTENTION_TILE_CUH
#define HEDDLE_CUDA_ATTENTION_TILE_CUH

#include "cuda/attention/share.cuh"

template <typename T, int D> struct tile {
    static constexpr int pitch = sm80_pitch(sizeof(T), D); /* bytes from row to row */
    static constexpr int chunks = D * (int)sizeof(T) / 16; /* of 16 bytes in a row */
    static constexpr int steps = D * (int)sizeof(T) / 32;  /* of a product over a row */
};

/* ------------------------------------------------------------------------------------------------------- loading */

/* 16 bytes, of which n elements are there, one by one. */
template <typename T> INLINE uint4 load_elements(const T *from, int n) {
    uint4 r = make_uint4(0, 0, 0, 0);
    T *x = (T *)&r;
#pragma unroll
    for (int e = 0; e < 16 / (int)sizeof(T); e++)
        if (e < n)
            x[e] = from[e];
    return r;
}

/* One chunk of a row that may not be there. */
template <typename T> INLINE void load_chunk(uint32_t to, const T *row, int chunk, int width, bool there, bool vector) {
    const int e = chunk * (16 / (int)sizeof(T)), n = there ? width - e : 0;
    if (vector) {
        cp_async16(to, n > 0 ? row + e : row, n > 0 ? 16 : 0);
    } else {
        const uint4 x = load_elements(row + e, n);
        store_shared16(to, x);
    }
}

/* Rows `first` .. first+ROWS-1 of a tensor whose row 0 is at `tensor`; rows outside begin .. end-1 are not read, but
 * zero. A thread keeps to one column of chunks. */
template <typename T, int D, int ROWS, int THREADS>
INLINE void load_tile(uint32_t to, const T *tensor, int64_t stride, int first, int begin, int end, int width,
                      bool vector) {
    typedef tile<T, D> t;
    static_assert(THREADS % t::chunks == 0 && ROWS % (THREADS / t::chunks) == 0, "threads fill whole rows");
    constexpr int STEP = THREADS / t::chunks;
    const int row = threadIdx.x / t::chunks, chunk = threadIdx.x % t::chunks;
    to += row * t::pitch + chunk * 16;
    const unsigned count = max(end - begin, 0);
    if (vector) {
        const int bytes = chunk * 16 < width * (int)sizeof(T) ? 16 : 0;
        const T *from = tensor + (first + row) * stride + chunk * (16 / (int)sizeof(T));
#pragma unroll
        for (int x = 0; x < ROWS; x += STEP, from += STEP * stride) {
            const bool there = (unsigned)(first + row + x - begin) < count;
            cp_async16(to + x * t::pitch, there && bytes ? from : tensor, there ? bytes : 0);
        }
    } else {
#pragma unroll 1
        for (int x = 0; x < ROWS; x += STEP) {
            const bool there = (unsigned)(first + row + x - begin) < count;
            const T *from = there ? tensor + (first + row + x) * stride : tensor;
            load_chunk(to + x * t::pitch, from, chunk, width, there, false);
        }
    }
}

INLINE bool has_nonfinite(uint4 x, bf16) {
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
    bool bad = false;
    for (int i = 0; i < 4; i++)
        bad |= (w[i] & 0x7f80u) == 0x7f80u || (w[i] & 0x7f800000u) == 0x7f800000u;
    return bad;
}
INLINE bool has_nonfinite(uint4 x, f16) {
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
    bool bad = false;
    for (int i = 0; i < 4; i++)
        bad |= (w[i] & 0x7c00u) == 0x7c00u || (w[i] & 0x7c000000u) == 0x7c000000u;
    return bad;
}
INLINE bool has_nonfinite(uint4 x, float) {
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
    bool bad = false;
    for (int i = 0; i < 4; i++)
        bad |= (w[i] & 0x7f800000u) == 0x7f800000u;
    return bad;
}

/* In a tile that a mask cuts, 0·NaN would leak through a product. Each thread looks at what it has loaded itself:
 * chunks that are not finite become zero and their rows are marked; whoever sees a marked row is given a NaN. */
template <typename T, int D, int ROWS, int THREADS> INLINE void clean_tile(uint32_t at, int *bad) {
    typedef tile<T, D> t;
    for (int x = threadIdx.x; x < ROWS * t::chunks; x += THREADS) {
        const int row = x / t::chunks, chunk = x % t::chunks;
        const uint32_t to = at + row * t::pitch + chunk * 16;
        if (has_nonfinite(load_shared16(to), T())) {
            store_shared16(to, make_uint4(0, 0, 0, 0));
            bad[row] = 1;
        }
    }
}

/* ----------------------------------------------------------------------------------------------------- fragments */

template <typename T> struct a_fragment { uint32_t r[4]; };
template <typename T> struct b_fragment { uint32_t r[2]; };
/* float32 as the sum of two TF32 numbers. */
template <> struct a_fragment<float> { uint32_t r[4], low[4]; };
template <> struct b_fragment<float> { uint32_t r[2], low[2]; };

/* The tensor cores take the first 11 bits of a number and leave the others out. */
#define TF32_BITS 0xffffe000u

/* high: x rounded to 11 bits, or cut off where that would be infinite (or no longer a NaN); low: the rest, 12 bits, of which the tensor
 * cores leave the last one out. */
INLINE void split_tf32(uint32_t bits, uint32_t *high, uint32_t *low) {
    const float x = __uint_as_float(bits);
    *high = (fabsf(x) < 0x1.ffep127f ? bits + 0x1000u : bits) & TF32_BITS;
    *low = __float_as_uint(__fsub_rn(x, __uint_as_float(*high)));
}

/* What the tensor cores leave out of the low parts. */
template <int N> INLINE void last_bits(uint32_t (&rest)[N], const uint32_t (&low)[N]) {
#pragma unroll
    for (int x = 0; x < N; x++)
        rest[x] = __float_as_uint(__fsub_rn(__uint_as_float(low[x]), __uint_as_float(low[x] & TF32_BITS)));
}

INLINE void complete(a_fragment<bf16> *) {
}
INLINE void complete(a_fragment<f16> *) {
}
INLINE void complete(a_fragment<float> *a) {
#pragma unroll
    for (int x = 0; x < 4; x++)
        split_tf32(a->r[x], &a->r[x], &a->low[x]);
}
template <typename T> INLINE void set_b(b_fragment<T> *b, uint32_t r0, uint32_t r1) {
    b->r[0] = r0;
    b->r[1] = r1;
}
template <> __device__ __forceinline__ void set_b(b_fragment<float> *b, uint32_t r0, uint32_t r1) {
    split_tf32(r0, &b->r[0], &b->low[0]);
    split_tf32(r1, &b->r[1], &b->low[1]);
}

INLINE void multiply(float c[4], const a_fragment<bf16> &a, const b_fragment<bf16> &b) {
    mma_bf16(c, a.r, b.r);
}
INLINE void multiply(float c[4], const a_fragment<f16> &a, const b_fragment<f16> &b) {
    mma_f16(c, a.r, b.r);
}
/* c += the main part of a float32 product, low += the two small ones. */
INLINE void multiply_parts(float c[4], float low[4], const a_fragment<float> &a, const b_fragment<float> &b,
                           bool tf32) {
    if (!tf32) {
        mma_tf32(low, a.low, b.r);
        mma_tf32(low, a.r, b.low);
    }
    mma_tf32(c, a.r, b.r);
}

/* c += all of it: what the sum of the large products was cut off by is what it lacks of them. */
INLINE void multiply_whole(float c[4], const a_fragment<float> &a, const b_fragment<float> &b) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, rest[4];
    uint32_t of_a[4], of_b[2];
    last_bits(of_a, a.low);
    last_bits(of_b, b.low);
    mma_tf32(sum, a.r, b.r);
#pragma unroll
    for (int e = 0; e < 4; e++)
        rest[e] = -sum[e];
    mma_tf32(rest, a.r, b.r);
    mma_tf32(rest, of_a, b.r);
    mma_tf32(rest, a.r, of_b);
    mma_tf32(rest, a.low, b.low);
    mma_tf32(rest, a.low, b.r);
    mma_tf32(rest, a.r, b.low);
#pragma unroll
    for (int e = 0; e < 4; e++)
        c[e] += sum[e] + rest[e];
}

/* A from 16 rows of a tile, at the lane's address (a_lane) of this step. */
template <typename T> INLINE void load_a(a_fragment<T> *a, uint32_t at) {
    ldmatrix4(a->r, at);
    complete(a);
}

template <typename T, int D> INLINE uint32_t a_lane(int lane) {
    return (lane & 15) * tile<T, D>::pitch + (lane >> 4) * 16;
}

/* B from 16 rows of a tile whose rows are B's columns: two fragments. */
template <typename T> INLINE void load_b_rows(b_fragment<T> b[2], uint32_t at) {
    uint32_t r[4];
    ldmatrix4(r, at);
    set_b(&b[0], r[0], r[1]);
    set_b(&b[1], r[2], r[3]);
}

/* B from a tile whose rows are B's rows: two fragments of one step, 16 columns. float32 takes row 2t as B's row t
 * and row 2t+1 as B's row t+4, to fit the accumulators that A is made from. */
template <typename T, int D> INLINE void load_b_columns(b_fragment<T> b[2], uint32_t at) {
    uint32_t r[4];
    ldmatrix4_trans(r, at);
    set_b(&b[0], r[0], r[1]);
    set_b(&b[1], r[2], r[3]);
}

template <int D> struct f32_columns {
    static __device__ __forceinline__ void load(b_fragment<float> b[2], uint32_t at) {
        const int pitch = tile<float, D>::pitch;
        set_b(&b[0], load_shared4(at), load_shared4(at + pitch));
        set_b(&b[1], load_shared4(at + 32), load_shared4(at + pitch + 32));
    }
};

/* A of step x of a product over the columns of accumulators c[..][4], each of 16 rows and 8 columns. */
INLINE void a_from_accumulators(a_fragment<bf16> *a, const float (*c)[4], int x) {
    a->r[0] = pack_bf16(c[2 * x][0], c[2 * x][1]);
    a->r[1] = pack_bf16(c[2 * x][2], c[2 * x][3]);
    a->r[2] = pack_bf16(c[2 * x + 1][0], c[2 * x + 1][1]);
    a->r[3] = pack_bf16(c[2 * x + 1][2], c[2 * x + 1][3]);
}
INLINE void a_from_accumulators(a_fragment<f16> *a, const float (*c)[4], int x) {
    a->r[0] = pack_f16(c[2 * x][0], c[2 * x][1]);
    a->r[1] = pack_f16(c[2 * x][2], c[2 * x][3]);
    a->r[2] = pack_f16(c[2 * x + 1][0], c[2 * x + 1][1]);
    a->r[3] = pack_f16(c[2 * x + 1][2], c[2 * x + 1][3]);
}
INLINE void a_from_accumulators(a_fragment<float> *a, const float (*c)[4], int x) {
    a->r[0] = __float_as_uint(c[x][0]);
    a->r[1] = __float_as_uint(c[x][2]);
    a->r[2] = __float_as_uint(c[x][1]);
    a->r[3] = __float_as_uint(c[x][3]);
    complete(a);
}

/* -------------------------------------------------------------------------------------- float32: when all products
 * A sum of few terms has nothing to hide the last bit of an operand in: a plain computation rounds but once or twice there. */
#define FEW_TERMS 16

/* Of rows that long. */
template <typename T> INLINE bool short_rows(const attention_params &p) {
    return sizeof(T) == 4 && max64(p.a.d, p.a.dv) <= FEW_TERMS;
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
    return SWIZZLED ? (at + (bytes & ~127)) ^ (bytes & 127) : at + bytes;
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
    static __device__ __forceinline__ void run(float (*c)[COLUMNS / 8][4], uint32_t a, uint32_t b, bool, bool) {
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

/* In float32 the small products are therefore summed
 * apart, and the large ones from zero over a few steps, to be added by a rounding addition (after Ootomo and Yokota,
 * 2022). */
template <int D, int TILES, int COLUMNS, int SWIZZLED> struct rows_product<float, D, TILES, COLUMNS, SWIZZLED> {
    /* Of rows of FEW_TERMS. */
    static __device__ __forceinline__ void run_whole(float (*c)[COLUMNS / 8][4], uint32_t a, uint32_t b) {
#pragma unroll 1
        for (int s = 0; s < FEW_TERMS / 8; s++) {
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
                                               bool whole) {
        typedef tile<float, D> t;
        float part[TILES][COLUMNS / 8][4], low[TILES][COLUMNS / 8][4];
        clear<TILES, COLUMNS / 8>(c);
        if (whole && !tf32) {
            run_whole(c, a, b);
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
        add<TILES, COLUMNS / 8>(c, low);
    }
};

/* joins: where parts are joined, if D is that wide. whole: in float32, by multiply_whole. */
template <typename T, int D, int TILES, int COLUMNS, int SWIZZLED = 0>
INLINE void product_rows(float (*c)[COLUMNS / 8][4], uint32_t a, uint32_t b, bool tf32, bool whole,
                         uint32_t joins = 0) {
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

/* ------------------------------------------------------------------------------------------------------- storing */

/* Two neighbours of a row of `width`, times `by`. */
template <typename T> INLINE void store_pair(T *row, int e, int width, float x, float y) {
    if (e < width)
        from_float(&row[e], x);
    if (e + 1 < width)
        from_float(&row[e + 1], y);
}

template <typename T> struct pair_store {
    static __device__ __forceinline__ void run(T *row, int e, int width, float x, float y, bool aligned) {
        if (aligned && e + 1 < width)
            *(uint32_t *)(row + e) = pack_pair(x, y, T());
        else
            store_pair(row, e, width, x, y);
    }
};
template <> struct pair_store<float> {
    static __device__ __forceinline__ void run(float *row, int e, int width, float x, float y, bool aligned) {
        if (aligned && e + 1 < width)
            *(float2 *)(row + e) = make_float2(x, y);
        else
            store_pair(row, e, width, x, y);
    }
};

/* One row's part of accumulators (half 0: row lane/4, half 1: row lane/4 + 8), times `by`: N columns. */
template <typename T, int N> INLINE void store_row(T *row, const float (*c)[4], int half, int width, float by) {
    const bool aligned = (size_t)row % (2 * sizeof(T)) == 0;
#pragma unroll
    for (int y = 0; y < N / 8; y++)
        pair_store<T>::run(row, y * 8 + threadIdx.x % 4 * 2, width, c[y][2 * half] * by, c[y][2 * half + 1] * by,
                           aligned);
}

/* The same added to float32 sums, by the only one who does. Nothing is read, so that no register waits; two numbers at a time would
 * take 128 bytes of spills more in the backward for Hopper. */
template <int N> INLINE void add_sums(float *row, const float (*c)[4], int half, int width, float by) {
    row += threadIdx.x % 4 * 2;
    width -= (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int y = 0; y < N / 8; y++) {
        if (y * 8 < width)
            add_global(row + y * 8, c[y][2 * half] * by);
        if (y * 8 + 1 < width)
            add_global(row + y * 8 + 1, c[y][2 * half + 1] * by);
    }
}

/* Stored, where there is something: `keep` of it stays, or if that is negative it is not even read. PAIRS: two numbers at a time, which
 * then are in their place. */
template <int N, bool PAIRS>
INLINE void add_row(float *row, const float (*c)[4], int half, int width, float by, float keep) {
    row += threadIdx.x % 4 * 2;
    width -= (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int y = 0; y < N / 8; y++) {
        float2 sum = make_float2(0.0f, 0.0f);
        if (PAIRS && y * 8 < width) {
            if (keep >= 0.0f)
                sum = *(const float2 *)(row + y * 8);
            *(float2 *)(row + y * 8) =
                make_float2(fmaf(sum.x, keep, c[y][2 * half] * by), fmaf(sum.y, keep, c[y][2 * half + 1] * by));
        }
#pragma unroll
        for (int e = 0; !PAIRS && e < 2; e++)
            if (y * 8 + e < width)
                row[y * 8 + e] = fmaf(keep >= 0.0f ? row[y * 8 + e] : 0.0f, keep, c[y][2 * half + e] * by);
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The products of norm-linear: tiles of 128x128, four warps of 64x64, mma.sync m16n8k16, a ring of three stages of
 * cp.async; two blocks on a multiprocessor, so that one computes while the other writes its results.
 *
 * A is [rows, depth] or, transposed, [depth, rows]; B is [cols, depth] or, transposed, [depth, cols]. Shared memory keeps
 * a tile as it lies in memory, 16-byte chunks swizzled so that ldmatrix meets no bank twice. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_GEMM_CUH
#define HEDDLE_CUDA_NORM_LINEAR_GEMM_CUH

#include "cuda/element.cuh"
#include "cuda/norm_linear/coarse.cuh"
#include "cuda/norm_linear/params.h"
#include "cuda/norm_linear/sm80/contract.h"

enum { STAGES = GEMM80_STAGES, GEMM_THREADS = 128, PANEL = 16 /* row tiles that share the columns in L2 */ };

/* One operand: how a thread copies its chunks of a [SIDE, DEPTH] tile, and where ldmatrix finds them. */
template <bool TRANSPOSED, bool ALIGNED, int DEPTH, int SIDE> struct operand {
    static constexpr int BYTES = SIDE * DEPTH * 2;
    static constexpr int CHUNKS = TRANSPOSED ? SIDE / 8 : DEPTH / 8; /* of a row in shared memory */
    static constexpr int STEP = GEMM_THREADS / CHUNKS;               /* rows that one round of copies covers */
    static constexpr int ROUNDS = BYTES / 16 / GEMM_THREADS;

    const uint16_t *plane[2];        /* at this thread's chunk of the tile at depth 0 */
    int64_t ld, first, limit, depth; /* first: of this thread's row (or, transposed, column) in the tile */
    int row, chunk;

    static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
        int swizzle = !TRANSPOSED && DEPTH == 32 ? row >> 1 & 3 : row & 7;
        return (uint32_t)(row * CHUNKS + (chunk ^ swizzle)) * 16;
    }

    __device__ __forceinline__ operand(const void *high, const void *low, int64_t ld, int64_t origin, int64_t limit,
                                       int64_t depth)
        : ld(ld), limit(limit), depth(depth) {
        row = (int)threadIdx.x / CHUNKS;
        chunk = (int)threadIdx.x % CHUNKS;
        first = origin + (TRANSPOSED ? chunk * 8 : row);
        int64_t at = TRANSPOSED ? row * ld + first : first * ld + chunk * 8;
        plane[0] = (const uint16_t *)high + at;
        plane[1] = (const uint16_t *)low + at;
    }

    static __device__ __forceinline__ int bytes_of(int64_t elements) {
        return elements >= 8 ? 16 : elements > 0 ? (int)elements * 2 : 0;
    }

    /* Up to eight elements from any address. */
    static __device__ __forceinline__ uint4 gather(const uint16_t *from, int count) {
        uint32_t h[8];
#pragma unroll
        for (int x = 0; x < 8; x++)
            h[x] = x < count ? from[x] : 0;
        return make_uint4(h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16, h[6] | h[7] << 16);
    }

    /* The tile from depth k on to shared memory at `stage`; what lies outside becomes zero. */
    template <int PLANES> __device__ __forceinline__ void copy(uint32_t stage, int64_t k) const {
        int inner = TRANSPOSED ? bytes_of(limit - first) : bytes_of(depth - k - chunk * 8);
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            int64_t outer = TRANSPOSED ? k + row + r * STEP : first + r * STEP;
            int bytes = outer < (TRANSPOSED ? depth : limit) ? inner : 0;
            int64_t at =
                r * STEP * ld + (TRANSPOSED ? k * ld : k); /* no matter where, when there are no bytes to read */
            if (!ALIGNED)
                store_shared16(stage + offset(row + r * STEP, chunk), gather(plane[0] + at, bytes / 2));
#pragma unroll
            for (int p = 0; ALIGNED && p < PLANES; p++)
                cp_async16(stage + p * BYTES + offset(row + r * STEP, chunk), plane[p] + at, bytes);
        }
    }

    /* The 16x16 fragment of A at (row, k) of the tile. */
    static __device__ __forceinline__ void load_a(uint32_t r[4], uint32_t tile, int row, int k) {
        int lane = threadIdx.x % 32;
        if (TRANSPOSED)
            ldmatrix4_trans(r, tile + offset(k + (lane & 7) + (lane >> 4) * 8, row / 8 + (lane >> 3 & 1)));
        else
            ldmatrix4(r, tile + offset(row + (lane & 15), k / 8 + (lane >> 4)));
    }

    /* Two 8x16 fragments of B at (col, k) of the tile. */
    static __device__ __forceinline__ void load_b(uint32_t r[4], uint32_t tile, int col, int k) {
        int lane = threadIdx.x % 32;
        if (TRANSPOSED)
            ldmatrix4_trans(r, tile + offset(k + (lane & 15), col / 8 + (lane >> 4)));
        else
            ldmatrix4(r, tile + offset(col + (lane & 7) + (lane >> 4) * 8, k / 8 + (lane >> 3 & 1)));
    }
};

/* acc += A·B for one stage; the fragments of the next sixteen terms are fetched while those of these are multiplied. */
template <typename T, class A, class B, int DEPTH>
static __device__ __forceinline__ void multiply(float acc[4][8][4], uint32_t a_tile, uint32_t b_tile, int row,
                                                int col) {
    uint32_t a[2][4][4], b[2][4][4];
#pragma unroll
    for (int k = -16; k < DEPTH; k += 16) {
        const int now = k / 16 & 1, next = now ^ 1;
#pragma unroll
        for (int i = 0; i < 4 && k + 16 < DEPTH; i++) {
            A::load_a(a[next][i], a_tile, row + i * 16, k + 16);
            B::load_b(b[next][i], b_tile, col + i * 16, k + 16);
        }
        if (k < 0)
            continue;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                multiply_pairs(acc[i][j], a[now][i], b[now][j / 2] + j % 2 * 2, T());
    }
}

/* The same with both operands in two planes: high·high + high·low + low·high. Tensor cores cut off low bits when they
 * add, so every sixteen terms are added up on their own and then, rounded to nearest, to acc. */
template <class A, class B, int DEPTH>
static __device__ __forceinline__ void multiply_planes(float acc[4][8][4], uint32_t a_tile, uint32_t b_tile, int row,
                                                       int col) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t high[4][4], low[4][4], b_high[2][4], b_low[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            A::load_a(high[i], a_tile, row + i * 16, k);
            A::load_a(low[i], a_tile + A::BYTES, row + i * 16, k);
        }
        B::load_b(b_high[0], b_tile, col, k);
        B::load_b(b_low[0], b_tile + B::BYTES, col, k);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int now = j / 2 & 1, half = j % 2 * 2;
            if (half == 0 && j < 6) {
                B::load_b(b_high[now ^ 1], b_tile, col + j * 8 + 16, k);
                B::load_b(b_low[now ^ 1], b_tile + B::BYTES, col + j * 8 + 16, k);
            }
            float part[4][4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++)
                multiply_pairs(part[i], low[i], b_high[now] + half, f16());
#pragma unroll
            for (int i = 0; i < 4; i++)
                multiply_pairs(part[i], high[i], b_low[now] + half, f16());
#pragma unroll
            for (int i = 0; i < 4; i++)
                multiply_pairs(part[i], high[i], b_high[now] + half, f16());
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int x = 0; x < 4; x++)
                    acc[i][j][x] += part[i][x];
        }
    }
}

/* Which tile this block computes: PANEL tiles of rows at a time, so that blocks of one moment share operands in L2. */
static __device__ __forceinline__ void tile_of_block(const norm_gemm &p, int64_t *row_tile, int64_t *col_tile) {
    int64_t panel = blockIdx.x / (PANEL * p.col_tiles), rest = blockIdx.x % (PANEL * p.col_tiles);
    int64_t height = p.row_tiles - panel * PANEL < PANEL ? p.row_tiles - panel * PANEL : PANEL;
    *row_tile = panel * PANEL + rest % height;
    *col_tile = rest / height;
}

/* The product of this block's tile. T: of the operands' elements; TERMS: 1, or 3 for two planes each. */
template <typename T, int TERMS, bool ALIGNED, bool A_TRANSPOSED, bool B_TRANSPOSED>
static __device__ __forceinline__ void product(const norm_gemm &p, int64_t row0, int64_t col0, float acc[4][8][4]) {
    constexpr int PLANES = TERMS == 3 ? 2 : 1, DEPTH = gemm80_depth(PLANES);
    typedef operand<A_TRANSPOSED, ALIGNED, DEPTH, GEMM_TILE> A;
    typedef operand<B_TRANSPOSED, ALIGNED, DEPTH, GEMM_TILE> B;
    static_assert(PLANES * (A::BYTES + B::BYTES) == GEMM80_STAGE_BYTES, "as the plan counts");
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t begin = shared_address(shared), end = begin + STAGES * GEMM80_STAGE_BYTES;
    const A a(p.a, p.a_low, p.lda, row0, p.rows, p.depth);
    const B b(p.b, p.b_low, p.ldb, col0, p.cols, p.depth);
    const int warp = threadIdx.x / 32, row = warp / 2 * 64, col = warp % 2 * 64, ahead = STAGES - 1;
    uint32_t write = begin, read = begin;
    /* One turn copies the stage `ahead` of the one that it multiplies; the first `ahead` only copy. */
    for (int64_t k = -ahead * DEPTH; k < p.depth; k += DEPTH) {
        if (k >= 0) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
        }
        if (k + ahead * DEPTH < p.depth) {
            a.template copy<PLANES>(write, k + ahead * DEPTH);
            b.template copy<PLANES>(write + PLANES * A::BYTES, k + ahead * DEPTH);
        }
        cp_async_commit();
        write = write + GEMM80_STAGE_BYTES == end ? begin : write + GEMM80_STAGE_BYTES;
        if (k < 0)
            continue;
        if (TERMS == 3)
            multiply_planes<A, B, DEPTH>(acc, read, read + PLANES * A::BYTES, row, col);
        else
            multiply<T, A, B, DEPTH>(acc, read, read + PLANES * A::BYTES, row, col);
        read = read + GEMM80_STAGE_BYTES == end ? begin : read + GEMM80_STAGE_BYTES;
    }
    cp_async_wait<0>();
}

/* ---------------------------------------------------------------------------------------------------- epilogues */

/* Two neighbours of a row, the second where it is inside. */
static __device__ __forceinline__ void store2(float *p, bool pair, bool second, float v0, float v1) {
    if (pair && second) {
        *(float2 *)p = make_float2(v0, v1);
        return;
    }
    p[0] = v0;
    if (second)
        p[1] = v1;
}

template <typename T> static __device__ __forceinline__ void store2(T *p, bool pair, bool second, float v0, float v1) {
    uint32_t both = pack_pair(v0, v1, T());
    if (pair && second) {
        *(uint32_t *)p = both;
        return;
    }
    p[0].bits = (uint16_t)both;
    if (second)
        p[1].bits = (uint16_t)(both >> 16);
}

/* Two neighbours of a row; what is not inside is 0. */
static __device__ __forceinline__ float2 load2(const float *p, bool pair, bool first, bool second) {
    if (pair && second)
        return *(const float2 *)p;
    return make_float2(first ? p[0] : 0, second ? p[1] : 0);
}

template <typename T> static __device__ __forceinline__ float2 load2(const T *p, bool pair, bool first, bool second) {
    if (pair && second) {
        const uint32_t both = *(const uint32_t *)p;
        return make_float2(low_float(both, T()), high_float(both, T()));
    }
    return make_float2(first ? to_float(p[0]) : 0, second ? to_float(p[1]) : 0);
}

/* value·2^-exponent, in two steps: the exponent may be twice as large as a float's. */
static __device__ __forceinline__ float unscale(float value, int exponent) {
    int half = exponent / 2;
    return value * power_of_two(-half) * power_of_two(half - exponent);
}

/* The exponents of scaled planes, where there are any. */
struct scaling {
    const int32_t *row_exponent, *col_exponent;
    int common;

    __device__ __forceinline__ explicit scaling(const norm_gemm &p)
        : row_exponent(p.row_exponent), col_exponent(p.col_exponent),
          common(p.exponent + (p.shared_exponent ? *p.shared_exponent : 0)) {
    }

    __device__ __forceinline__ float operator()(float value, int64_t row, int64_t col) const {
        return unscale(value, common + (row_exponent ? row_exponent[row] : 0) + (col_exponent ? col_exponent[col] : 0));
    }
};

/* y = rstd·(acc - mean·s) + t + residual, of which AHEAD pairs are on their way at a time */
template <typename T, bool SCALED>
static __device__ __forceinline__ void epilogue_fwd(const norm_gemm &p, int64_t row0, int64_t col0,
                                                    float acc[4][8][4]) {
    constexpr int AHEAD = SCALED ? 4 : 8;
    const scaling unscaled(p);
    const T *bias = (const T *)p.bias, *residual = (const T *)p.residual;
    float s[8][2], t[8][2];
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int x = 0; x < 2; x++) {
            int64_t col = col0 + j * 8 + x;
            bool inside = col < p.cols;
            s[j][x] = inside && p.mean ? p.col_sum[col] : 0;
            t[j][x] = !inside ? 0 : p.col_add ? p.col_add[col] : bias ? to_float(bias[col]) : 0;
        }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int64_t row = row0 + i * 8;
        if (row >= p.rows)
            continue;
        float mean = p.mean ? p.mean[row] : 0, rstd = p.mean ? p.rstd[row] : 1;
        T *out = (T *)p.out + row * p.ldo;
        float2 more[AHEAD] = {};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int64_t col = col0 + j * 8;
            float v[2];
            if (j % AHEAD == 0 && residual)
#pragma unroll
                for (int x = 0; x < AHEAD; x++)
                    more[x] = load2(residual + row * p.ldr + col + x * 8, p.residual_pairs, col + x * 8 < p.cols,
                                    col + x * 8 + 1 < p.cols);
#pragma unroll
            for (int x = 0; x < 2; x++) {
                v[x] = acc[i / 2][j][i % 2 * 2 + x];
                if (SCALED && col + x < p.cols)
                    v[x] = unscaled(v[x], row, col + x);
                v[x] = rstd * (v[x] - mean * s[j][x]) + t[j][x];
            }
            if (col < p.cols)
                store2(out + col, p.pairs, col + 1 < p.cols, v[0] + more[j % AHEAD].x, v[1] + more[j % AHEAD].y);
        }
    }
}

/* h = acc to out. */
template <typename T, bool SCALED>
static __device__ __forceinline__ void epilogue_dx(const norm_gemm &p, int64_t row0, int64_t col0, float acc[4][8][4]) {
    const scaling unscaled(p);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int64_t row = row0 + i * 8;
        if (row >= p.rows)
            continue;
        T *out = (T *)p.out + row * p.ldo;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int64_t col = col0 + j * 8;
            float v[2] = {acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]};
            if (col >= p.cols)
                continue;
#pragma unroll
            for (int e = 0; e < 2 && SCALED; e++)
                v[e] = unscaled(v[e], row, col); /* dx's exponents are the row's alone */
            store2(out + col, p.pairs, col + 1 < p.cols, v[0], v[1]);
        }
    }
}

/* dw = acc∘gamma + dbias·betaᵀ to out, the column sums of W∘acc to part. */
template <typename T, bool SCALED>
static __device__ __forceinline__ void epilogue_dw(const norm_gemm &p, int64_t row0, int64_t col0, int64_t part,
                                                   float acc[4][8][4]) {
    const scaling unscaled(p);
    const T *gamma = (const T *)p.gamma, *beta = (const T *)p.beta, *w = (const T *)p.w;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int64_t col = col0 + j * 8;
        float scale[2], shift[2], sum[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            scale[e] = col + e < p.cols && gamma ? to_float(gamma[col + e]) : 1;
            shift[e] = col + e < p.cols && beta ? to_float(beta[col + e]) : 0;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int64_t row = row0 + i * 8;
            if (row >= p.rows || col >= p.cols)
                continue;
            float v[2], dbias = p.row_bias ? p.row_bias[row] : 0;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                v[e] = acc[i / 2][j][i % 2 * 2 + e];
                if (SCALED)
                    v[e] = unscaled(v[e], row, col);
                if (p.part && col + e < p.cols)
                    sum[e] += to_float(w[row * p.ldx + col + e]) * v[e];
                v[e] = v[e] * scale[e] + dbias * shift[e];
            }
            if (p.out)
                store2((T *)p.out + row * p.ldo + col, p.pairs, col + 1 < p.cols, v[0], v[1]);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                sum[e] += __shfl_xor_sync(~0u, sum[e], step);
            if (p.part && threadIdx.x % 32 < 4 && col + e < p.cols)
                p.part[part * p.cols + col + e] = sum[e];
        }
    }
}

/* The three kernels. T: of the tensors; OPERAND: of the planes. */
template <typename T, typename OPERAND, int TERMS, bool ALIGNED>
static __device__ __forceinline__ void gemm_fwd(const norm_gemm &p) {
    int64_t row_tile, col_tile;
    tile_of_block(p, &row_tile, &col_tile);
    float acc[4][8][4] = {};
    product<OPERAND, TERMS, ALIGNED, false, false>(p, row_tile * GEMM_TILE, col_tile * GEMM_TILE, acc);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row0 = row_tile * GEMM_TILE + warp / 2 * 64, col0 = col_tile * GEMM_TILE + warp % 2 * 64;
    epilogue_fwd<T, sizeof(T) == 4>(p, row0 + lane / 4, col0 + lane % 4 * 2, acc);
    if constexpr (sizeof(T) == 2) {
#pragma unroll 1
        for (int64_t row = row0; p.mean && row < row0 + 64 && row < p.rows; row += 16) {
            float2 both[2] = {};
            for (int half = 0; half < 2; half++)
                if (row + lane / 4 + half * 8 < p.rows)
                    both[half] = make_float2(p.mean[row + lane / 4 + half * 8], p.rstd[row + lane / 4 + half * 8]);
            if (any_coarse(both))
                remake_coarse<T>(p, both, row, col0, col0 + 64, ALIGNED);
        }
    }
}

template <typename T, typename OPERAND, int TERMS, bool ALIGNED>
static __device__ __forceinline__ void gemm_dx(const norm_gemm &p) {
    int64_t row_tile, col_tile;
    tile_of_block(p, &row_tile, &col_tile);
    float acc[4][8][4] = {};
    product<OPERAND, TERMS, ALIGNED, false, true>(p, row_tile * GEMM_TILE, col_tile * GEMM_TILE, acc);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    epilogue_dx<T, sizeof(T) == 4>(p, row_tile * GEMM_TILE + warp / 2 * 64 + lane / 4,
                                   col_tile * GEMM_TILE + warp % 2 * 64 + lane % 4 * 2, acc);
}

template <typename T, typename OPERAND, int TERMS, bool ALIGNED>
static __device__ __forceinline__ void gemm_dw(const norm_gemm &p) {
    int64_t row_tile, col_tile;
    tile_of_block(p, &row_tile, &col_tile);
    float acc[4][8][4] = {};
    product<OPERAND, TERMS, ALIGNED, true, true>(p, row_tile * GEMM_TILE, col_tile * GEMM_TILE, acc);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    epilogue_dw<T, sizeof(T) == 4>(p, row_tile * GEMM_TILE + warp / 2 * 64 + lane / 4,
                                   col_tile * GEMM_TILE + warp % 2 * 64 + lane % 4 * 2,
                                   gemm80_sums(row_tile) + warp / 2, acc);
}

#define GEMM_KERNEL(pass, name, T, OPERAND, TERMS, ALIGNED)                                                            \
    extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 2)                                                      \
        heddle_norm_linear_##name##_sm80(const __grid_constant__ norm_gemm p) {                                        \
        wait_for_earlier_grid();                                                                                       \
        gemm_##pass<T, OPERAND, TERMS, ALIGNED>(p);                                                                    \
    }

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Of the products of norm-linear on Hopper, what becomes of the sums: the epilogue of each pass, whole rows stored, and
 * the columns of W∘G added up. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_EPILOGUE_SM90_CUH
#define HEDDLE_CUDA_NORM_LINEAR_EPILOGUE_SM90_CUH

#include "cuda/norm_linear/activation.cuh"
#include "cuda/norm_linear/sm90/tile.cuh"

/* Two neighbouring results of one row. c: both columns' pairs. */
template <int PASS> INLINE void epilogue_pair(const float4 &c, const float2 &row, float *v0, float *v1) {
    if (PASS == FWD) {
        *v0 = row.y * (*v0 - row.x * c.x) + c.y;
        *v1 = row.y * (*v1 - row.x * c.z) + c.w;
    } else if (PASS == DW) {
        *v0 = *v0 * c.x + row.x * c.y;
        *v1 = *v1 * c.z + row.x * c.w;
    }
}

/* Eight results side by side, of which so many are inside. One instruction: the compiler would rather make four. */
INLINE void store_eight(void *to, int64_t inside, const uint4 &eight) {
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
    if (inside >= 8) {
        store_global16(to, eight);
        return;
    }
#pragma unroll
    for (int x = 0; x < 8; x++)
        if (x < inside)
            ((uint16_t *)to)[x] = (uint16_t)(words[x / 2] >> x % 2 * 16);
}

/* The same of what is added; what is not inside is 0. */
INLINE uint4 load_eight(const void *from, int64_t inside) {
    uint32_t words[4] = {};
    if (inside >= 8)
        return *(const uint4 *)from;
#pragma unroll
    for (int x = 0; x < 8; x++)
        if (x < inside)
            words[x / 2] |= (uint32_t)((const uint16_t *)from)[x] << x % 2 * 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T> INLINE uint32_t add_pairs(uint32_t a, uint32_t b, T) {
    return pack_pair(low_float(a, T()) + low_float(b, T()), high_float(a, T()) + high_float(b, T()), T());
}

template <typename T> INLINE uint4 add_eight(const uint4 &a, const uint4 &b) {
    return make_uint4(add_pairs(a.x, b.x, T()), add_pairs(a.y, b.y, T()), add_pairs(a.z, b.z, T()),
                      add_pairs(a.w, b.w, T()));
}

/* What of a row of a warp's results is another lane's. */
INLINE uint4 staged_eight(uint32_t staging, int line) {
    return load_shared16(staging + line * 128 + ((threadIdx.x % 8 ^ line) & 7) * 16);
}

/* Rows that are staged as u: those to u, act of them, and the residual's lines if there is one, to out. */
template <typename T>
INLINE void store_activated(const norm_gemm &p, int64_t row, int64_t col, int chunks, uint32_t staging,
                            uint4 residual[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int line = lane / 8; line < 16; line += 4) {
        const int64_t at = row + line;
        const uint4 more = residual[0]; /* a number that the compiler does not know would send them to memory */
#pragma unroll
        for (int x = 0; x < 3; x++)
            residual[x] = residual[x + 1];
        if (lane % 8 >= chunks || at >= p.rows)
            continue;
        const uint4 u = staged_eight(staging, line);
        const uint32_t words[4] = {u.x, u.y, u.z, u.w};
        float v[8];
        if (p.u)
            store_eight((T *)p.u + at * p.ldu + col, p.cols - col, u);
#pragma unroll
        for (int x = 0; x < 8; x++)
            v[x] = x % 2 ? high_float(words[x / 2], T()) : low_float(words[x / 2], T());
        activate8<false>(p.activation, v);
        if (p.residual) {
            const uint32_t added[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
            for (int x = 0; x < 8; x++)
                v[x] += x % 2 ? high_float(added[x / 2], T()) : low_float(added[x / 2], T());
        }
        store_eight((T *)p.out + at * p.ldo + col, p.cols - col,
                    make_uint4(pack_pair(v[0], v[1], T()), pack_pair(v[2], v[3], T()), pack_pair(v[4], v[5], T()),
                               pack_pair(v[6], v[7], T())));
    }
}

/* Results of a warp, 16 rows, 64 columns at a time: through shared memory, so that whole rows of 128 bytes are
 * written. */
template <typename T, int WIDTH, int PASS>
INLINE void store_tile(const norm_gemm &p, const gemm_tile &t, int row0, const float2 *columns, const float2 row[2],
                       uint32_t staging, float (*acc)[4]) {
    const int lane = threadIdx.x % 32;
    const int64_t first = t.row0 + row0 + lane / 8;
    const bool whole = t.row0 + GEMM_TILE <= p.rows && t.col0 + WIDTH <= p.cols;
#pragma unroll
    for (int y = 0; y < WIDTH / 8; y += 8) {
        const int chunks = WIDTH / 8 - y < 8 ? WIDTH / 8 - y : 8;
        const int64_t col = t.col0 + y * 8 + lane % 8 * 8;
        uint4 residual[4] = {};
        if (PASS == FWD && p.residual)
#pragma unroll
            for (int x = 0; x < 4; x++)
                if (lane % 8 < chunks && first + x * 4 < p.rows)
                    residual[x] = load_eight((const T *)p.residual + (first + x * 4) * p.ldr + col, p.cols - col);
        float4 c[8] = {};
#pragma unroll
        for (int x = 0; x < 8; x++)
            if (x < chunks && PASS != DX)
                c[x] = *(const float4 *)(columns + (y + x) * 8 + lane % 4 * 2);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            if (2 * x >= chunks)
                continue;
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float *v = acc[y + 2 * x + e];
                epilogue_pair<PASS>(c[2 * x + e], row[0], v, v + 1);
                epilogue_pair<PASS>(c[2 * x + e], row[1], v + 2, v + 3);
                r[2 * e] = pack_pair(v[0], v[1], T());
                r[2 * e + 1] = pack_pair(v[2], v[3], T());
            }
            stmatrix4(staging + (lane & 15) * 128 + ((2 * x + (lane >> 4)) ^ (lane & 7)) * 16, r);
        }
        __syncwarp();
        if (PASS == FWD && p.activation) {
            store_activated<T>(p, t.row0 + row0, col, chunks, staging, residual);
            __syncwarp();
            continue;
        }
        uint4 eight[4];
#pragma unroll
        for (int x = 0; x < 4; x++)
            eight[x] = staged_eight(staging, x * 4 + lane / 8);
        __syncwarp();
        if (PASS == FWD && p.residual)
#pragma unroll
            for (int x = 0; x < 4; x++)
                eight[x] = add_eight<T>(eight[x], residual[x]);
        T *const to = (T *)p.out + first * p.ldo + col;
#pragma unroll
        for (int x = 0; x < 4; x++)
            if (whole && lane % 8 < chunks)
                store_global16(to + x * 4 * p.ldo, eight[x]);
#pragma unroll
        for (int x = 0; x < 4; x++)
            if (!whole && lane % 8 < chunks && first + x * 4 < p.rows)
                store_eight(to + x * 4 * p.ldo, p.cols - col, eight[x]);
    }
}

/* What 16 rows of a warp have in so many chunks of eight columns, made u and rounded: two pairs a chunk, of rows that are eight
 * apart. */
template <typename T, int CHUNKS>
INLINE void round_chunks(const float2 *columns, const float2 row[2], const float (*acc)[4], uint32_t words[][2]) {
#pragma unroll
    for (int x = 0; x < CHUNKS; x++) {
        const float4 c = *(const float4 *)(columns + x * 8 + threadIdx.x % 4 * 2);
        float v[4] = {acc[x][0], acc[x][1], acc[x][2], acc[x][3]};
        epilogue_pair<FWD>(c, row[0], v, v + 1);
        epilogue_pair<FWD>(c, row[1], v + 2, v + 3);
        words[x][0] = pack_pair(v[0], v[1], T());
        words[x][1] = pack_pair(v[2], v[3], T());
    }
}

/* Where a lane finds two chunks of 16 staged rows, or puts them. */
INLINE uint32_t staged_chunks(uint32_t staging, int x) {
    const int lane = threadIdx.x % 32;
    return staging + (lane & 15) * 128 + ((x + (lane >> 4)) ^ (lane & 7)) * 16;
}

/* Such chunks to memory by way of shared memory, where this lane's first eight are to be at `to`, column `col`. */
template <typename T, int CHUNKS>
INLINE void store_chunks(const norm_gemm &p, int64_t first, int64_t col, T *to, int64_t ld, uint32_t staging,
                         const uint32_t words[][2]) {
    const int lane = threadIdx.x % 32;
    uint4 eight[4];
#pragma unroll
    for (int x = 0; x < CHUNKS; x += 2) {
        const uint32_t r[4] = {words[x][0], words[x][1], words[x + 1][0], words[x + 1][1]};
        stmatrix4(staged_chunks(staging, x), r);
    }
    __syncwarp();
#pragma unroll
    for (int x = 0; x < 4; x++)
        eight[x] = staged_eight(staging, x * 4 + lane / 8);
    __syncwarp();
#pragma unroll
    for (int x = 0; x < 4; x++)
        if (lane % 8 < CHUNKS && first + x * 4 < p.rows)
            store_eight(to + x * 4 * ld, p.cols - col, eight[x]);
}

/* The residual's chunks, as a thread has those of u. */
template <typename T, int CHUNKS>
INLINE void load_chunks(const norm_gemm &p, int64_t first, int64_t col, uint32_t staging, uint32_t words[][2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (lane % 8 < CHUNKS && first + x * 4 < p.rows)
            eight = load_eight((const T *)p.residual + (first + x * 4) * p.ldr + col, p.cols - col);
        store_shared16(staging + (x * 4 + lane / 8) * 128 + ((lane % 8 ^ (x * 4 + lane / 8)) & 7) * 16, eight);
    }
    __syncwarp();
#pragma unroll
    for (int x = 0; x < CHUNKS; x += 2) {
        uint32_t r[4];
        ldmatrix4(r, staged_chunks(staging, x));
        words[x][0] = r[0];
        words[x][1] = r[1];
        words[x + 1][0] = r[2];
        words[x + 1][1] = r[3];
    }
    __syncwarp();
}

/* gate = act(gate)·up + more, of two chunks. */
template <typename T>
INLINE void weigh_chunks(int activation, uint32_t gate[2][2], const uint32_t up[2][2], const uint32_t more[2][2]) {
    float v[8];
#pragma unroll
    for (int x = 0; x < 4; x++) {
        v[2 * x] = low_float(gate[x / 2][x % 2], T());
        v[2 * x + 1] = high_float(gate[x / 2][x % 2], T());
    }
    activate8<false>(activation, v);
#pragma unroll
    for (int x = 0; x < 4; x++) {
        const uint32_t of_up = up[x / 2][x % 2], added = more[x / 2][x % 2];
        gate[x / 2][x % 2] = pack_pair(fmaf(v[2 * x], low_float(of_up, T()), low_float(added, T())),
                                       fmaf(v[2 * x + 1], high_float(of_up, T()), high_float(added, T())), T());
    }
}

/* 64 columns of y, or those that are left, whose gate and up begin at chunk y of the tile's halves; u, where it is wanted, first. */
template <typename T, int WIDTH, int CHUNKS>
INLINE void store_weighed(const norm_gemm &p, const gemm_tile &t, int row0, int y, const float2 *columns,
                          const float2 row[2], uint32_t staging, const float (*acc)[4]) {
    constexpr int HALF = WIDTH / 16;
    const int lane = threadIdx.x % 32;
    const int64_t first = t.row0 + row0 + lane / 8, col = t.col0 + y * 8 + lane % 8 * 8;
    uint32_t gate[CHUNKS][2], up[CHUNKS][2], more[CHUNKS][2] = {};
    round_chunks<T, CHUNKS>(columns + y * 8, row, acc + y, gate);
    round_chunks<T, CHUNKS>(columns + (HALF + y) * 8, row, acc + HALF + y, up);
    if (p.u) {
        T *const u = (T *)p.u + first * p.ldu + col;
        store_chunks<T, CHUNKS>(p, first, col, u, p.ldu, staging, gate);
        store_chunks<T, CHUNKS>(p, first, col, u + p.cols, p.ldu, staging, up);
    }
    if (p.residual)
        load_chunks<T, CHUNKS>(p, first, col, staging, more);
#pragma unroll
    for (int x = 0; x < CHUNKS; x += 2)
        weigh_chunks<T>(p.activation, gate + x, up + x, more + x);
    store_chunks<T, CHUNKS>(p, first, col, (T *)p.out + first * p.ldo + col, p.ldo, staging, gate);
}

/* Results of a warp of GATE: a thread has of each column of y that it has sums of what is in the gate and in up. */
template <typename T, int WIDTH>
INLINE void store_gated(const norm_gemm &p, const gemm_tile &t, int row0, const float2 *columns, const float2 row[2],
                        uint32_t staging, const float (*acc)[4]) {
    constexpr int HALF = WIDTH / 16, REST = HALF % 8;
#pragma unroll
    for (int y = 0; y + 8 <= HALF; y += 8)
        store_weighed<T, WIDTH, 8>(p, t, row0, y, columns, row, staging, acc);
    if constexpr (REST > 0)
        store_weighed<T, WIDTH, REST>(p, t, row0, HALF - REST, columns, row, staging, acc);
}

/* The eight sums over the eight lanes that differ in lane/4; this lane gets that of v[lane/4]. */
INLINE float scatter_sums(float v[8]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        const bool upper = lane & 4 * half;
#pragma unroll
        for (int x = 0; x < half; x++) {
            const float mine = upper ? v[x + half] : v[x], other = upper ? v[x] : v[x + half];
            v[x] = mine + __shfl_xor_sync(~0u, other, 4 * half);
        }
    }
    return v[0];
}

/* Columns y·8 + lane%4·2 + 0, 1 of W, in two rows; zeros outside. */
INLINE void load_w(const norm_gemm &p, const gemm_tile &t, int64_t row, int y, uint32_t two[2]) {
    const int64_t col = t.col0 + y * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++, row += 8) {
        const uint16_t *w = (const uint16_t *)p.w + row * p.ldx + col;
        two[half] = 0;
        if (row < p.rows && col + 1 < p.cols)
            two[half] = *(const uint32_t *)w;
        else if (row < p.rows && col < p.cols)
            two[half] = *w;
    }
}

/* dw: the sums over the tile's rows of W∘G to part; by way of the staging area. The next columns of W are on their way
 * meanwhile. */
template <typename T, int WIDTH>
INLINE void sum_columns(const norm_gemm &p, const gemm_tile &t, int row0, char *from, const float (*acc)[4]) {
    typedef gemm90<WIDTH> layout;
    const int lane = threadIdx.x % 32, thread = (int)threadIdx.x - WARPGROUP;
    constexpr int OWN = STAGING / 4; /* floats: where the warp's own results are staged; another's may not be out yet */
    float *sums = (float *)(from + layout::staging);
    const int64_t row = t.row0 + row0 + lane / 4;
    uint32_t w[2][4][2];
#pragma unroll
    for (int y = -4; y < WIDTH / 8; y += 4) {
        const int now = y / 4 & 1;
#pragma unroll
        for (int x = 0; x < 4 && y + 4 < WIDTH / 8; x++)
            load_w(p, t, row, y + 4 + x, w[now ^ 1][x]);
        if (y < 0)
            continue;
        float v[8];
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const uint32_t upper = w[now][x][0], lower = w[now][x][1];
            v[2 * x] = low_float(upper, T()) * acc[y + x][0] + low_float(lower, T()) * acc[y + x][2];
            v[2 * x + 1] = high_float(upper, T()) * acc[y + x][1] + high_float(lower, T()) * acc[y + x][3];
        }
        const int value = lane / 4;
        sums[thread / 32 * OWN + (y + value / 2) * 8 + lane % 4 * 2 + value % 2] = scatter_sums(v);
    }
    barrier_sync(1, CONSUMERS);
    if (thread < WIDTH && t.row0 < p.rows && t.col0 + thread < p.cols) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < CONSUMERS / 32; warp++)
            sum += sums[warp * OWN + thread];
        p.part[t.row_tile * p.cols + t.col0 + thread] = sum;
    }
    barrier_sync(1, CONSUMERS);
}

#endif

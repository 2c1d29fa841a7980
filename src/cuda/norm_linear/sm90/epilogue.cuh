/* SPDX-License-Identifier: Apache-2.0
 * Of the products of norm-linear on Hopper, what becomes of the sums: the epilogue of each pass, whole rows stored, and
 * the columns of W∘G added up. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_EPILOGUE_SM90_CUH
#define HEDDLE_CUDA_NORM_LINEAR_EPILOGUE_SM90_CUH

#include "cuda/norm_linear/activation.cuh"
#include "cuda/norm_linear/sm90/tile.cuh"

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

/* Where chunk c of row `line` of what a warp has staged lies: 16 rows of 128 bytes, as a box that the copy engine takes. */
INLINE uint32_t staged(uint32_t staging, int line, int c) {
    return staging + line * 128 + ((c ^ line) & 7) * 16;
}

template <typename T> INLINE void unpack_eight(const uint4 &eight, float v[8]) {
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int x = 0; x < 8; x++)
        v[x] = x % 2 ? high_float(words[x / 2], T()) : low_float(words[x / 2], T());
}

template <typename T> INLINE uint4 pack_eight(const float v[8]) {
    return make_uint4(pack_pair(v[0], v[1], T()), pack_pair(v[2], v[3], T()), pack_pair(v[4], v[5], T()),
                      pack_pair(v[6], v[7], T()));
}

/* Eight columns of rows lane/4 and 8 more, as two pairs. columns: of these (helpers.cuh); rows: of the 16. */
template <typename T, int PASS>
INLINE void round_chunk(const char *columns, const char *rows, const float v[4], uint32_t pairs[2]) {
    const int lane = threadIdx.x % 32;
    float out[4] = {v[0], v[1], v[2], v[3]};
    if (PASS == FWD || PASS == GATE) {
        const float2 c = *((const float2 *)columns + lane % 4);
        out[0] += c.x;
        out[1] += c.y;
        out[2] += c.x;
        out[3] += c.y;
    } else if (PASS == RAW) {
        const float4 c = *((const float4 *)columns + lane % 4);
        const float2 upper = ((const float2 *)rows)[lane / 4], lower = ((const float2 *)rows)[lane / 4 + 8];
        out[0] = upper.y * (out[0] - upper.x * c.x) + c.y;
        out[1] = upper.y * (out[1] - upper.x * c.z) + c.w;
        out[2] = lower.y * (out[2] - lower.x * c.x) + c.y;
        out[3] = lower.y * (out[3] - lower.x * c.z) + c.w;
    } else if (PASS == DW) {
        const float4 c = *((const float4 *)columns + lane % 4);
        const float upper = ((const float *)rows)[lane / 4], lower = ((const float *)rows)[lane / 4 + 8];
        out[0] = out[0] * c.x + upper * c.y;
        out[1] = out[1] * c.z + upper * c.w;
        out[2] = out[2] * c.x + lower * c.y;
        out[3] = out[3] * c.z + lower * c.w;
    }
    pairs[0] = pack_pair(out[0], out[1], T());
    pairs[1] = pack_pair(out[2], out[3], T());
}

/* Bytes of a column's and of a row's numbers. */
template <int PASS> constexpr int column_bytes = PASS == RAW || PASS == DW ? 8 : 4;
template <int PASS> constexpr int row_bytes = PASS == RAW ? 8 : 4;

/* What 16 rows of a warp have in so many chunks of eight columns, from `place` on. */
template <typename T, int PASS, int CHUNKS>
INLINE void stage_chunks(const char *columns, const char *rows, const float (*acc)[4], uint32_t staging, int place) {
    const uint32_t to = staged(staging, threadIdx.x & 15, place + (threadIdx.x % 32 >> 4));
#pragma unroll
    for (int x = 0; x < CHUNKS; x += 2) {
        uint32_t r[4];
        round_chunk<T, PASS>(columns + x * 8 * column_bytes<PASS>, rows, acc[x], r);
        round_chunk<T, PASS>(columns + (x + 1) * 8 * column_bytes<PASS>, rows, acc[x + 1], r + 2);
        stmatrix4(to ^ x * 16, r); /* x chunks further: both are even */
    }
}

/* Staged rows as u: those to u, act of them, and the residual if there is one, to out; two rows at a time, for no other warp
 * may have anything to do meanwhile. */
template <typename T> INLINE void store_lines(const norm_gemm &p, int row, int col0, int chunks, uint32_t staging) {
    const int lane = threadIdx.x % 32;
    const int64_t col = col0 + lane % 8 * 8, inside = lane % 8 < chunks ? p.cols - col : 0;
    uint4 more[4] = {};
#pragma unroll
    for (int x = 0; x < 4; x++) {
        const int64_t at = (int64_t)row + lane / 8 + x * 4;
        if (p.residual && at < p.rows)
            more[x] = load_eight((const T *)p.residual + at * p.ldr + col, inside);
    }
#pragma unroll 1
    for (int line = lane / 8; line < 16; line += 8) {
        uint4 out[2];
        float v[16];
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const int64_t at = (int64_t)row + line + x * 4;
            out[x] = load_shared16(staged(staging, line + x * 4, lane % 8));
            unpack_eight<T>(out[x], v + 8 * x);
            if (p.u && at < p.rows)
                store_eight((T *)p.u + at * p.ldu + col, inside, out[x]);
        }
        if (p.activation)
            activate<T, 16, false>(p.activation, v);
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const int64_t at = (int64_t)row + line + x * 4;
            float added[8];
            unpack_eight<T>(more[x], added);
#pragma unroll
            for (int e = 0; e < 8 && p.residual; e++)
                v[8 * x + e] += added[e];
            if (p.activation || p.residual)
                out[x] = pack_eight<T>(v + 8 * x);
            if (at < p.rows)
                store_eight((T *)p.out + at * p.ldo + col, inside, out[x]);
            more[x] = more[x + 2]; /* a number that the compiler does not know would send them to memory */
        }
    }
}

/* Staged rows as u, 16 of 64 columns: act of them to where they are, 16 numbers a lane at a time, whichever these are. The copy engine may
 * still be reading u. */
template <typename T> INLINE void activate_staged(int activation, uint32_t staging) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
        const uint32_t at = staging + part * 1024 + lane * 16;
        float v[16];
#pragma unroll
        for (int x = 0; x < 2; x++)
            unpack_eight<T>(load_shared16(at + x * 512), v + 8 * x);
        activate<T, 16, false>(activation, v);
        if (lane == 0)
            bulk_wait_read();
        __syncwarp();
#pragma unroll
        for (int x = 0; x < 2; x++)
            store_shared16(at + x * 512, pack_eight<T>(v + 8 * x));
    }
}

/* Staged rows as they are, by the warp itself. */
INLINE void store_as_staged(const norm_gemm &p, int row, int col0, int chunks, uint32_t staging) {
    const int lane = threadIdx.x % 32;
    const int64_t first = (int64_t)row + lane / 8, col = col0 + lane % 8 * 8;
    const bool whole = row + GEMM90_STORED_ROWS <= p.rows && col0 + chunks * 8 <= p.cols;
    uint16_t *const to = (uint16_t *)p.out + first * p.ldo + col;
    uint4 eight[4];
#pragma unroll
    for (int x = 0; x < 4; x++)
        eight[x] = load_shared16(staged(staging, lane / 8 + x * 4, lane % 8));
    __syncwarp();
#pragma unroll
    for (int x = 0; x < 4; x++)
        if (whole && lane % 8 < chunks)
            store_global16(to + x * 4 * p.ldo, eight[x]);
#pragma unroll
    for (int x = 0; x < 4; x++)
        if (!whole && lane % 8 < chunks && first + x * 4 < p.rows)
            store_eight(to + x * 4 * p.ldo, p.cols - col, eight[x]);
}

/* A warp's results, 16 rows, 64 columns at a time, through shared memory. In forward the copy engine takes whole ones from there
 * while the warp goes on, unless there is more to do; of the last columns only multiples of eight, for it stores 16 bytes of which
 * some are outside, too. row0: of its rows, or the first 16 of two halves. Registers have no
 * numbers to be known later, so which of them are staged is decided by branches; the rest of the code is there once. An activation is
 * formed where its u is staged, which the engine takes, too. */
template <typename T, int WIDTH, int PASS>
INLINE void store_tile(const norm_gemm_sm90 &all, const gemm_tile &t, int row0, const char *columns, uint32_t staging,
                       const float (*acc)[WIDTH / 8][4]) {
    typedef gemm90<WIDTH, PASS> layout;
    constexpr int GROUPS = (WIDTH + 63) / 64, LAST = WIDTH / 8 % 8 ? WIDTH / 8 % 8 : 8;
    const norm_gemm &p = all.g;
    const bool leads = threadIdx.x % 32 == 0, acts = layout::adds && p.activation, adds = layout::adds && p.residual;
#pragma unroll 1
    for (int now = 0; now < layout::halves * GROUPS; now++) {
        const int half = now / GROUPS, group = now % GROUPS, row = t.row0 + row0 + half * 64, col = t.col0 + group * 64;
        const int chunks = group == GROUPS - 1 ? LAST : 8;
        const char *const rows = columns + WIDTH * 8 + (row0 + half * 64) * row_bytes<PASS>;
        if (is_forward<PASS> && leads)
            bulk_wait_read();
        __syncwarp();
#pragma unroll
        for (int x = 0; x < layout::halves * GROUPS; x++)
            if (x == now) {
                const char *const of = columns + x % GROUPS * 64 * column_bytes<PASS>;
                if (x % GROUPS == GROUPS - 1)
                    stage_chunks<T, PASS, LAST>(of, rows, acc[x / GROUPS] + x % GROUPS * 8, staging, 0);
                else
                    stage_chunks<T, PASS, 8>(of, rows, acc[x / GROUPS] + x % GROUPS * 8, staging, 0);
            }
        if (is_forward<PASS> && chunks == 8 && !adds && (p.cols % 8 == 0 || col + 64 <= p.cols)) {
            fence_async();
            __syncwarp();
            if (acts) {
                if (leads && p.u) {
                    tma_store2(&all.u, staging, col, row);
                    bulk_commit();
                }
                activate_staged<T>(p.activation, staging);
                fence_async();
                __syncwarp();
            }
            if (leads) {
                tma_store2(&all.out, staging, col, row);
                bulk_commit();
            }
            continue;
        }
        __syncwarp();
        if (acts || adds)
            store_lines<T>(p, row, col, chunks, staging);
        else
            store_as_staged(p, row, col, chunks, staging);
    }
}

/* 32 columns of y, or the 16 that are left, whose gate and up are staged: u, where it is wanted, and act(gate)·up + residual. */
template <typename T> INLINE void store_weighed(const norm_gemm &p, int row, int col0, int chunks, uint32_t staging) {
    const int lane = threadIdx.x % 32, c = lane % 4;
    const int64_t col = col0 + c * 8, inside = c < chunks ? p.cols - col : 0;
    uint4 gate[2], up[2], more[2] = {};
    float v[16], of_up[8], added[8];
#pragma unroll
    for (int x = 0; x < 2; x++) {
        const int line = lane / 4 + x * 8;
        const int64_t at = (int64_t)row + line;
        gate[x] = load_shared16(staged(staging, line, c));
        up[x] = load_shared16(staged(staging, line, 4 + c));
        if (p.residual && at < p.rows)
            more[x] = load_eight((const T *)p.residual + at * p.ldr + col, inside);
        if (p.u && at < p.rows) {
            store_eight((T *)p.u + at * p.ldu + col, inside, gate[x]);
            store_eight((T *)p.u + at * p.ldu + p.cols + col, inside, up[x]);
        }
        unpack_eight<T>(gate[x], v + 8 * x);
    }
    activate<T, 16, false>(p.activation, v);
#pragma unroll
    for (int x = 0; x < 2; x++) {
        const int64_t at = (int64_t)row + lane / 4 + x * 8;
        unpack_eight<T>(up[x], of_up);
        unpack_eight<T>(more[x], added);
#pragma unroll
        for (int e = 0; e < 8; e++)
            v[8 * x + e] = fmaf(v[8 * x + e], of_up[e], added[e]);
        if (at < p.rows)
            store_eight((T *)p.out + at * p.ldo + col, inside, pack_eight<T>(v + 8 * x));
    }
}

/* A warp's results of GATE: a thread has of each column of y that it has sums of what is in the gate and in up. */
template <typename T, int WIDTH>
INLINE void store_gated(const norm_gemm &p, const gemm_tile &t, int row0, const char *columns, uint32_t staging,
                        const float (*acc)[4]) {
    constexpr int HALF = WIDTH / 16, GROUPS = (HALF + 3) / 4, LAST = HALF % 4 ? HALF % 4 : 4;
#pragma unroll 1
    for (int now = 0; now < GROUPS; now++) {
        __syncwarp();
#pragma unroll
        for (int x = 0; x < GROUPS; x++)
            if (x == now) {
                const char *const of_gate = columns + x * 32 * 4, *const of_up = columns + (HALF * 8 + x * 32) * 4;
                if (x == GROUPS - 1) {
                    stage_chunks<T, GATE, LAST>(of_gate, NULL, acc + x * 4, staging, 0);
                    stage_chunks<T, GATE, LAST>(of_up, NULL, acc + HALF + x * 4, staging, 4);
                } else {
                    stage_chunks<T, GATE, 4>(of_gate, NULL, acc + x * 4, staging, 0);
                    stage_chunks<T, GATE, 4>(of_up, NULL, acc + HALF + x * 4, staging, 4);
                }
            }
        __syncwarp();
        store_weighed<T>(p, t.row0 + row0, t.col0 + now * 32, now == GROUPS - 1 ? LAST : 4, staging);
    }
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
INLINE void sum_columns(const norm_gemm &p, const gemm_tile &t, char *from, const float (*acc)[4]) {
    typedef gemm90<WIDTH, DW> layout;
    const int lane = threadIdx.x % 32, thread = (int)threadIdx.x - WARPGROUP;
    constexpr int OWN = STAGING / 4; /* floats: where the warp's own results are staged; another's may not be out yet */
    float *sums = (float *)(from + layout::staging);
    const int64_t row = t.row0 + thread / 32 * 16 + lane / 4;
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

/* dw: a share's sums to memory. Once all shares of the tile are there, which its last one sees, acc becomes their sum. */
template <int WIDTH>
INLINE bool add_shares(const norm_gemm_sm90 &all, const gemm_tile &t, char *from, float (*acc)[4]) {
    typedef gemm90<WIDTH, DW> layout;
    constexpr int AT_ONCE = 8, EACH = gemm90_sums_of_tile(WIDTH) / 4;
    const norm_shares &s = all.shares;
    const int thread = (int)threadIdx.x - WARPGROUP;
    const int64_t tile = (int64_t)t.row_tile * all.g.col_tiles + t.col0 / WIDTH;
    float4 *const sums = (float4 *)s.sums + tile * s.count * EACH + thread;
    int *const arrived = (int *)(from + layout::staging); /* every warp has stored what it has had there */
#pragma unroll
    for (int y = 0; y < WIDTH / 8; y++)
        __stcg(sums + t.share * EACH + y * CONSUMERS, make_float4(acc[y][0], acc[y][1], acc[y][2], acc[y][3]));
    __threadfence();
    barrier_sync(1, CONSUMERS);
    if (thread == 0)
        *arrived = atomicAdd(s.arrived + tile, 1);
    barrier_sync(1, CONSUMERS);
    const bool last = *arrived == s.count - 1;
    barrier_sync(1, CONSUMERS);
    if (!last)
        return false;
    __threadfence();
#pragma unroll
    for (int y = 0; y < WIDTH / 8; y++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[y][e] = 0;
#pragma unroll 1
    for (int share = 0; share < s.count; share++)
#pragma unroll
        for (int y = 0; y < WIDTH / 8; y += AT_ONCE) {
            float4 more[AT_ONCE];
#pragma unroll
            for (int x = 0; x < AT_ONCE && y + x < WIDTH / 8; x++)
                more[x] = __ldcg(sums + share * EACH + (y + x) * CONSUMERS);
#pragma unroll
            for (int x = 0; x < AT_ONCE && y + x < WIDTH / 8; x++) {
                acc[y + x][0] += more[x].x;
                acc[y + x][1] += more[x].y;
                acc[y + x][2] += more[x].z;
                acc[y + x][3] += more[x].w;
            }
        }
    return true;
}

#endif

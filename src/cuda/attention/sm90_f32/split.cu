/* SPDX-License-Identifier: Apache-2.0
 * float32 tensors to two float16 parts for the attention kernels for Hopper: a block a tile of 64 rows, read once. */
#include "cuda/attention/sm90_f32/split.cuh"
#include "cuda/ptx90.cuh"

#define CHUNKS SPLIT_CHUNKS

template <int D> struct split_shape {
    static constexpr int row_chunks = D / 8;
    static constexpr int threads = split_threads(D);
    static constexpr int step = threads / row_chunks; /* rows from one of a thread's chunks to the next */
};

/* Which tile of which tensor a block has. */
struct split_work {
    const float *from;
    heddle_strides stride;
    int tensor, vectors, columns, head, tile;
    int64_t n;
    bool keys;
};

/* Blocks for K, V and, in backward, Q and dO: tiles of a head, heads, batch. */
INLINE split_work find_split_work(const attention_params &p) {
    const void *const tensors[] = {p.t.q, p.t.k, p.t.v, p.t.dout};
    const int flags[] = {VECTOR_Q, VECTOR_K, VECTOR_V, VECTOR_DO};
    const heddle_strides strides[] = {p.a.q_stride, p.a.k_stride, p.a.v_stride, p.a.do_stride};
    const unsigned tiles_q = (unsigned)(p.a.sq + SPLIT_ROWS - 1) / SPLIT_ROWS;
    const unsigned tiles_k = (unsigned)(p.a.sk + SPLIT_ROWS - 1) / SPLIT_ROWS;
    const unsigned blocks_q = tiles_q * (unsigned)(p.a.h * p.a.b), blocks_k = tiles_k * (unsigned)(p.a.hk * p.a.b);
    unsigned id = blockIdx.x;
    split_work w;
    w.keys = id < 2 * blocks_k;
    id -= w.keys ? 0 : 2 * blocks_k;
    const bool second = id >= (w.keys ? blocks_k : blocks_q);
    id -= !second ? 0 : w.keys ? blocks_k : blocks_q;
    w.tensor = w.keys ? (second ? SPLIT_V : SPLIT_K) : second ? SPLIT_DO : SPLIT_Q;
    const unsigned tiles = w.keys ? tiles_k : tiles_q, heads = (unsigned)(w.keys ? p.a.hk : p.a.h);
    w.tile = (int)(id % tiles);
    w.head = (int)(id / tiles % heads);
    w.n = id / tiles / heads;
#pragma unroll
    for (int x = 0; x < SPLIT_TENSORS; x++)
        if (w.tensor == x) {
            w.from = (const float *)tensors[x];
            w.vectors = p.vectors & flags[x];
            w.stride = strides[x];
        }
    w.columns = (int)(second ? p.a.dv : p.a.d);
    return w;
}

/* The largest of all threads, for all threads; and whether one has the flag. */
template <int THREADS> INLINE uint32_t block_largest(uint32_t x, uint32_t *slots, bool *flag) {
    x = __reduce_max_sync(ALL_LANES, x);
    if (threadIdx.x % 32 == 0)
        slots[threadIdx.x / 32] = x;
    *flag = __syncthreads_or(*flag);
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++)
        x = max(x, slots[w]);
    return x;
}

/* With dO, x, come D and the log-sum-exp in units of log2, in two parts, of its rows: from `row` on, every step-th. Zeros of O are left
 * out: a query that sees nothing may hold anything in dO. */
template <int D>
INLINE void prep_rows(const attention_params &p, const place &c, int64_t head, int row, const uint32_t marks[2],
                      const float (*x)[8]) {
    typedef split_shape<D> shape;
    const int chunk = (int)threadIdx.x % shape::row_chunks;
#pragma unroll
    for (int z = 0; z < CHUNKS; z++) {
        const int i = row + z * shape::step;
        const float *from = (const float *)p.t.o + row_at(p.a.o_stride, c.n, head, c.first_q + i);
        float o[8], sum = 0.0f, base = CUDART_INF_F, rest = 0.0f;
        load_chunk(from, chunk * 8, (int)p.a.dv, p.vectors & VECTOR_O, i < c.sq, o);
#pragma unroll
        for (int y = 0; y < 8; y++)
            sum = o[y] != 0.0f ? fmaf(o[y], x[z][y], sum) : sum;
#pragma unroll
        for (int step = shape::row_chunks / 2; step; step /= 2)
            sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (chunk || i >= c.sq)
            continue;
        const int64_t at = lse_at(p, c, head, i);
        const float lse = ((const float *)p.t.lse)[at];
        if (lse != -CUDART_INF_F) {
            split_lse32(p, lse, c.sk, &base, &rest);
            sum -= p.t.dlse ? ((const float *)p.t.dlse)[at] : 0.0f;
        }
        const bool bad = marks[i % SPLIT_ROWS / 32] >> i % 32 & 1; /* whoever sees the row gets NaN, in dV, too */
        p.base[at] = bad && lse != -CUDART_INF_F ? CUDART_NAN_F : base;
        p.rest[at] = rest;
        p.dsum[at] = lse == -CUDART_INF_F ? 0.0f : sum;
    }
}

/* Rows of a head of keys that are looked at. */
#define SAMPLES 64

/* Do most of the rows that see a key see few, as far as SAMPLES of them tell? Then for all of them sm80's kernels are asked, whose products
 * lose less (design.md, section 4). counts: two zeros. By all threads. */
INLINE void find_few(const attention_params &p, const place &c, int64_t y, int *counts) {
    const int64_t rows = (int64_t)p.group * c.sq, samples = min64(rows, SAMPLES), step = rows / max64(samples, 1);
    for (int64_t z = threadIdx.x / 32; z < samples; z += blockDim.x / 32) {
        const int64_t at = z * step + z * 37 % step; /* not in step with what a mask repeats */
        const int count = count_seen<float>(p, c, y * p.group + at / c.sq, (int)(at % c.sq));
        if (threadIdx.x % 32 == 0 && count > 0)
            atomicAdd(&counts[count <= FEW_KEYS], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        p.few[c.n * p.a.hk + y] = counts[1] > counts[0];
}

/* Is all of a tile, times `by`, whole, which leaves it 15 bits? Then its scores are whole where the queries are, and nothing is cut off
 * them, as long as they have 24 bits. By all threads. */
INLINE bool holds_whole(const float (*x)[8], float by) {
    const float unit = 0x1.8p23f; /* rounds what is added to it to whole numbers */
    bool whole = true;
#pragma unroll
    for (int z = 0; z < CHUNKS; z++)
#pragma unroll
        for (int y = 0; y < 8; y++)
            whole &= __fsub_rn(__fadd_rn(__fmul_rn(x[z][y], by), unit), unit) == __fmul_rn(x[z][y], by);
    return __syncthreads_and(whole);
}

/* Has a number more than 15 bits? Then they are not, and nobody has to ask. */
INLINE bool holds_fine(const float (*x)[8]) {
    uint32_t bits = 0;
#pragma unroll
    for (int z = 0; z < CHUNKS; z++)
#pragma unroll
        for (int y = 0; y < 8; y++)
            bits |= __float_as_uint(x[z][y]);
    return bits & 0x1ff;
}

/* A thread's chunks of a tile, from `row` on; `to`: its first row's place in its strip. */
template <int D, bool MORE> INLINE void store_chunks(char *to, int row, const float (*x)[8], float by, float more) {
    typedef split_shape<D> shape;
    const int chunk = (int)threadIdx.x % shape::row_chunks;
#pragma unroll
    for (int z = 0; z < CHUNKS; z++) {
        const int r = row + z * shape::step;
        store_chunk<MORE>(to + r * 128 + ((chunk ^ r) & 7) * 16, x[z], by, more);
    }
}

template <int D, bool FULL> INLINE void attention_split(const attention_params &p) {
    typedef split_shape<D> shape;
    __shared__ uint32_t slots[shape::threads / 32], marks[2], hidden[2];
    __shared__ float largest[SPLIT_ROWS];
    __shared__ int counts[2];
    const split_work w = find_split_work(p);
    const place c = find_place(p, w.n);
    const int row0 = w.tile * SPLIT_ROWS;
    if (FULL && p.few && w.tensor == SPLIT_K && w.tile == 0) {
        if (threadIdx.x < 2)
            counts[threadIdx.x] = 0;
        __syncthreads();
        find_few(p, c, w.head, counts);
    }
    if (row0 >= (w.keys ? c.sk : c.sq))
        return;
    int begin, end;
    split_range(c, w.keys, &begin, &end);
    const int row = row0 + (int)threadIdx.x / shape::row_chunks, chunk = (int)threadIdx.x % shape::row_chunks;
    const float *from = w.from + row_at(w.stride, c.n, w.head, (w.keys ? c.first_k : c.first_q) + row);
    float x[CHUNKS][8];
#pragma unroll
    for (int z = 0; z < CHUNKS; z++) {
        const int r = row + z * shape::step;
        load_chunk(from + z * shape::step * w.stride.s, chunk * 8, w.columns, w.vectors, r >= begin && r < end, x[z]);
    }
    if (threadIdx.x < 2)
        marks[threadIdx.x] = 0;
    __syncthreads();
    uint32_t most = 0;
#pragma unroll
    for (int z = 0; z < CHUNKS; z++) {
        const int r = row - row0 + z * shape::step;
        if (clean_chunk(x[z], &most))
            atomicOr(&marks[r / 32], 1u << r % 32);
    }
    if (FULL && (p.a.features & (HEDDLE_BIAS | HEDDLE_BOOL_MASK))) {
        drop_hidden<D, CHUNKS>(p, c, w.keys, w.head, row0, row - row0, shape::step, (int)threadIdx.x / 32,
                               shape::threads / 32, x, largest, marks, hidden, [] { __syncthreads(); });
        most = largest_of<CHUNKS>(x);
    }
    bool fine = w.tensor == SPLIT_K && holds_fine(x);
    const int exponent = split_exponent(block_largest<shape::threads>(most, slots, &fine));
    float by = power_of_two(exponent);
    const float more = w.tensor == SPLIT_K && (fine || !holds_whole(x, by)) ? score_cut_off(p) : 0.0f;
    pin(by); /* or all products of that are kept */
    const int64_t tile = split_tile(p, c, w.keys, w.head, w.tile);
    char *to = (char *)p.split[w.tensor].tiles + tile * (SPLIT_ROWS * D * 4) + chunk / 8 * (SPLIT_ROWS * 256);
    if (more > 0.0f)
        store_chunks<D, true>(to, row - row0, x, by, more);
    else
        store_chunks<D, false>(to, row - row0, x, by, more);
    if (threadIdx.x == 0)
        *(int4 *)&p.split[w.tensor].info[tile] =
            make_int4(exponent, 2 * exponent + (more > 0.0f), (int)marks[0], (int)marks[1]);
    if (w.tensor == SPLIT_DO)
        prep_rows<D>(p, c, w.head, row, marks, x);
}

#define variant_lean false
#define variant_full true
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    extern "C" __global__ void __launch_bounds__(warps * 32)                                                           \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_##family(                                             \
            const __grid_constant__ attention_params p) {                                                              \
        wait_for_earlier_grid();                                                                                       \
        static_assert(warps * 32 == split_shape<dim>::threads, "a tile a block");                                      \
        attention_split<dim, variant_##variant>(p);                                                                    \
    }

/* SPDX-License-Identifier: Apache-2.0
 * What norm-linear does before its products: the moments of rows, rows normalised, and matrices packed for a product. */
#include "cuda/norm_linear/moments.cuh"
#include "cuda/norm_linear/rows.cuh"

#define LARGEST_EXPONENT 126 /* 2^126 is a normal float */

/* The c-th chunk, of those that are held and whole. */
template <typename T, int HELD> INLINE void get_held(const row_of<T, HELD> &r, int c, float v[8]) {
    unpack8((const uint4 *)r.at + c * row_of<T, HELD>::PIECES * ROW_THREADS, v, T());
}

/* f(v, e, inside) for each of this thread's chunks of a row, eight elements from column e on, of which `inside` are inside; what is not
 * is zero. */
template <int TEAM, typename T, int HELD, typename F>
INLINE void each_chunk(const row_of<T, HELD> &r, int cols, const F &f) {
    const int rounds = r.vector ? min(r.cols / (TEAM * 8), (int)HELD) : 0;
    int e = threadIdx.x % TEAM * 8, c = 0;
    float v[8];
#pragma unroll 2
    for (; c < rounds; c++, e += TEAM * 8) {
        get_held(r, c, v);
        f(v, e, 8);
    }
#pragma unroll 1
    for (; e < cols; c++, e += TEAM * 8) {
        get(r, c, e, v);
        f(v, e, r.cols - e);
    }
}

template <int TEAM> INLINE float team_max(float x, meeting *m, int *turn) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    if constexpr (TEAM > 32) {
        float2 *slots = m->slots[ *turn ^= 1] + threadIdx.x / TEAM * (TEAM / 32);
        if (threadIdx.x % 32 == 0)
            slots[threadIdx.x % TEAM / 32].x = x;
        barrier_sync(1 + threadIdx.x / TEAM, TEAM);
        x = 0;
#pragma unroll
        for (int w = 0; w < TEAM / 32; w++)
            x = fmaxf(x, slots[w].x);
    }
    return x;
}

/* v[8] to the planes at column e: one of T, or for float32 high and, where it is wanted, low of float16. Columns from cols
 * to ldp become zero. */
INLINE void store_planes(const norm_rows &p, int64_t row, int64_t e, const float v[8], float) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int x = 0; x < 4; x++)
        split_pair(v[2 * x], v[2 * x + 1], &high[x], &low[x]);
    *(uint4 *)((uint16_t *)p.high + row * p.ldp + e) = *(uint4 *)high;
    if (p.low)
        *(uint4 *)((uint16_t *)p.low + row * p.ldp + e) = *(uint4 *)low;
}

template <typename T> INLINE void store_planes(const norm_rows &p, int64_t row, int64_t e, const float v[8], T) {
    store8((T *)p.high + row * p.ldp, e, p.ldp, true, v);
}

typedef float4 row_moments; /* mean, what rounding left in it, rstd */

/* Of a row. The mean, in float32 of what is left after its first element (sums of 16-bit numbers are all but exact, and need no such
 * care), then the squares around the mean, corrected for what rounding left in it: xhat = (x - mean - residual)·rstd. That is summed by
 * eights whose sum loses nothing more: a chain would lose more than the plain computation's tree does. What x - mean is rounded by is
 * summed, too: numbers of like size are all rounded alike. */
template <typename T, int TEAM, int HELD>
INLINE row_moments moments(const norm_rows &p, const row_of<T, HELD> &in, float first, meeting *m, int *turn) {
    constexpr bool EXACT = sizeof(T) == 4;
    float sum = 0, low = 0, squares = 0, mean = 0;
    const float n = (float)p.cols;
    if (!p.rms) {
        each_chunk<TEAM>(in, p.cols, [&](float *v, int e, int inside) {
#pragma unroll
            for (int x = 0; x < 8; x++)
                sum += sizeof(T) == 2 ? v[x] : x < inside ? v[x] - first : 0;
        });
        sum = team_sum<TEAM>(sum, 0, m, turn).x;
        mean = sizeof(T) == 4 ? first + sum * p.inverse : sum / n;
        sum = 0;
    }
    each_chunk<TEAM>(in, p.cols, [&](float *v, int e, int inside) {
#pragma unroll
        for (int x = 0; x < 8; x++) {
            float d = x < inside ? v[x] - mean : 0;
            if (EXACT) {
                float rest;
                v[x] = d = x < inside ? add_exactly(v[x], -mean, &rest) : 0;
                low += x < inside ? rest : 0;
            } else {
                sum += d;
            }
            squares += d * d;
        }
        if (EXACT && !p.rms)
            sum = add_low(sum, ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])), low, &low);
    });
    const float2 both = team_sum<TEAM, EXACT>(sum, squares, m, turn, low);
    const float residual = p.rms ? 0 : both.x * p.inverse;
    return make_float4(mean, residual, inverse_deviation(both.y, n, p.inverse, residual, p.eps), 0);
}

/* Mean, rstd, and xhat∘gamma + beta to planes. shared: of dy's rows, or 0. */
template <typename T, int TEAM, int HELD>
INLINE void normalise_row(const norm_rows &p, int64_t row, const row_of<T, HELD> &in, float first, int shared,
                          meeting *m, int *turn) {
    const T *gamma = (const T *)p.gamma, *beta = (const T *)p.beta;
    row_moments all = make_float4(0, 0, 0, 0);
    if (p.given) {
        all.x = p.rms ? 0 : p.mean[row];
        all.z = p.rstd ? p.rstd[row] : 1;
    } else {
        all = moments<T, TEAM, HELD>(p, in, first, m, turn);
        if (threadIdx.x % TEAM == 0) {
            p.mean[row] = saved_mean<T>(all.x, all.y);
            p.rstd[row] = all.z;
        }
    }
    if (!p.high)
        return;
    float weight = 1;
    if (sizeof(T) == 4) {
        const int exponent = p.exponent + shared - (p.row_exponent ? p.row_exponent[row] : 0);
        /* A row of tiny dy counts for as little as its weight here. */
        weight = power_of_two(exponent < -LARGEST_EXPONENT ? -LARGEST_EXPONENT : exponent);
    }
    each_chunk<TEAM>(in, p.ldp, [&](float *v, int e, int inside) {
        float other[8];
#pragma unroll
        for (int x = 0; x < 8; x++)
            v[x] = sizeof(T) == 4 ? (v[x] - all.x - all.y) * all.z : (v[x] - (all.x + all.y)) * all.z;
        if (gamma) {
            load8(gamma, e, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                v[x] *= other[x];
        }
        if (beta) {
            load8(beta, e, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                v[x] += other[x];
        }
#pragma unroll
        for (int x = 0; x < 8; x++) {
            v[x] = sizeof(T) == 4 ? v[x] * weight : v[x];
            v[x] = x < inside ? v[x] : 0;
        }
        store_planes(p, row, e, v, T());
    });
}

/* The e with largest·2^e in [2^14, 2^15), as far as 2^e is a normal float. */
INLINE int exponent_for(float largest) {
    if (largest == 0)
        return LARGEST_EXPONENT;
    int biased = __float_as_int(largest) >> 23 & 255;
    if (biased == 255)
        return 0; /* infinite or NaN: it comes out as that */
    int e = 14 - (biased - 127);
    return e > LARGEST_EXPONENT ? LARGEST_EXPONENT : e;
}

INLINE float rounded(float x, float) {
    return x;
}

template <typename T> INLINE float rounded(float x, T) {
    return to_float(from_float<T>(x));
}

/* in∘gamma to planes, with the sums that the epilogue of forward needs. shared: the exponent of all rows, where p.shares. Returns
 * that of the row, where there is one, and where another matrix's count with it their sum. */
template <typename T, int TEAM, int HELD>
INLINE int pack_row(const norm_rows &p, int64_t row, const row_of<T, HELD> &in, int shared, meeting *m, int *turn) {
    const T *gamma = (const T *)p.gamma, *beta = (const T *)p.beta;
    int exponent = p.shares ? shared : 0;
    if (sizeof(T) == 4 && p.row_exponent) {
        float largest = 0;
        each_chunk<TEAM>(in, p.cols, [&](float *v, int e, int inside) {
            float other[8];
            if (gamma)
                load8(gamma, e, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                largest = fmaxf(largest, fabsf(gamma ? v[x] * other[x] : v[x]));
        });
        exponent = exponent_for(team_max<TEAM>(largest, m, turn));
        if (threadIdx.x % TEAM == 0)
            p.row_exponent[row] = exponent;
    }
    if (!p.high && !p.sum && !p.add)
        return exponent + (p.with ? p.with[row] : 0);
    const float scale = power_of_two(exponent);
    float sum = 0, dot = 0;
    each_chunk<TEAM>(in, p.high ? p.ldp : p.cols, [&](float *v, int e, int inside) {
        float other[8];
        if (beta) {
            load8(beta, e, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                dot += v[x] * other[x];
        }
        if (gamma) {
            load8(gamma, e, p.cols, p.vector, other);
#pragma unroll
            for (int x = 0; x < 8; x++)
                v[x] *= other[x];
        }
#pragma unroll
        for (int x = 0; x < 8; x++) {
            sum += rounded(v[x], T());
            v[x] = sizeof(T) == 4 ? v[x] * scale : v[x];
        }
        if (p.high)
            store_planes(p, row, e, v, T());
    });
    if (p.sum || (p.add && beta)) {
        const float2 both = team_sum<TEAM>(sum, dot, m, turn);
        sum = both.x;
        dot = both.y;
    }
    if (p.sum && threadIdx.x % TEAM == 0)
        p.sum[row] = sum;
    if (p.add && threadIdx.x % TEAM == 0)
        p.add[row] = dot + (p.bias ? to_float(((const T *)p.bias)[row]) : 0);
    return exponent;
}

/* The least of `count` exponents, and of each thread's `least`, to every thread of the block. */
INLINE int block_least(const int32_t *of, int count, int least, int *slots) {
    for (int x = threadIdx.x; x < count; x += ROW_THREADS)
        least = min(least, of[x]);
    least = __reduce_min_sync(~0u, least);
    if (threadIdx.x % 32 == 0)
        slots[threadIdx.x / 32] = least;
    __syncthreads();
    for (int w = 0; w < ROW_THREADS / 32; w++)
        least = min(least, slots[w]);
    __syncthreads();
    return least;
}

/* The rows of one job. Returns the least exponent of this thread's rows. */
template <typename T, int TEAM>
INLINE int prepare_rows(const norm_rows &p, bool packs, uint32_t *unit, int shared, char *held, meeting *m, int *turn) {
    constexpr int HELD = PREPARE_HELD, STAGE = prepare_stage_bytes(sizeof(T)), STAGES = prepare_stages(sizeof(T));
    constexpr int HEADS = row_of<T, HELD>::BYTES;
    static_assert(HEADS + ROW_THREADS * 4 == STAGE, "as the plan counts");
    char *const own = held + threadIdx.x * 16, *const head = held + HEADS + threadIdx.x * 4;
    int least = 2 * LARGEST_EXPONENT; /* no row has more, nor two together */
    const auto row_at = [&](int64_t row, int stage) {
        return row_of<T, HELD>{(const T *)p.in + row * p.ld, own + stage * STAGE, p.cols, (bool)p.vector};
    };
    const auto fetch_row = [&](int64_t row, int stage) {
        const row_of<T, HELD> r = row_at(row, stage);
        fetch<TEAM>(r);
        if (sizeof(T) == 4 && r.vector && !packs)
            cp_async4(shared_address(head + stage * STAGE), r.p, 4);
    };
    if (packs)
        each_row<TEAM, STAGES>(unit, p.rows, fetch_row, [&](int64_t row, int stage) {
            least = min(least, pack_row<T, TEAM, HELD>(p, row, row_at(row, stage), shared, m, turn));
        });
    else
        each_row<TEAM, STAGES>(unit, p.rows, fetch_row, [&](int64_t row, int stage) {
            const row_of<T, HELD> r = row_at(row, stage);
            const float first = r.vector ? *(const float *)(head + stage * STAGE) : to_float(r.p[0]);
            normalise_row<T, TEAM, HELD>(p, row, r, first, shared, m, turn);
        });
    return least;
}

/* Number x of the two. Known to the compiler, so that the job stays where parameters are, not in registers. */
template <typename T>
INLINE void prepare_job(const norm_prepare &p, int x, bool packs, uint32_t *unit, char *held, meeting *m, int *turn) {
    const norm_rows &job = p.job[x];
    int shared = 0, least;
    if (sizeof(T) == 4 && p.of[x]) {
        shared = block_least(p.of[x], p.of_blocks[x], job.rows > 0 ? 2 * LARGEST_EXPONENT : LARGEST_EXPONENT, m->least);
        if (blockIdx.x == 0 && threadIdx.x == 0)
            p.shared[x] = shared;
    }
    if (prepare_team(job.cols) == PREPARE_SHORT_TEAM)
        least = prepare_rows<T, PREPARE_SHORT_TEAM>(job, packs, unit, shared, held, m, turn);
    else
        least = prepare_rows<T, PREPARE_TEAM>(job, packs, unit, shared, held, m, turn);
    if (sizeof(T) == 4 && p.least) {
        least = block_least(NULL, 0, least, m->least);
        if (threadIdx.x == 0)
            p.least[x * gridDim.x + blockIdx.x] = least;
    }
}

template <typename T> INLINE void prepare_kernel(const norm_prepare &p) {
    extern __shared__ __align__(16) char held[];
    meeting *const m = (meeting *)(held + prepare_stages(sizeof(T)) * prepare_stage_bytes(sizeof(T)));
    int turn = 0;
    uint32_t unit = blockIdx.x;
    for (int x = (int)(blockIdx.x * ROW_THREADS + threadIdx.x); x < p.zeros; x += (int)gridDim.x * ROW_THREADS)
        p.clear[x] = 0;
    prepare_job<T>(p, 0, p.job[0].packs, &unit, held, m, &turn);
    prepare_job<T>(p, 1, true, &unit, held, m, &turn);
}

#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == ROW_THREADS, "as the kernel counts");                                                     \
    ROW_KERNEL(pass, dtype, norm_prepare, threads, prepare_resident(sizeof(dtype)))

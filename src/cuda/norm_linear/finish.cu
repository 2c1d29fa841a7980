/* SPDX-License-Identifier: Apache-2.0
 * What norm-linear does after the product for dx: dx itself, and sums of columns, in two steps; every one in a fixed order. */
#include "cuda/norm_linear/rows.cuh"

enum { SUM_WARPS = ROW_THREADS / 32 };

/* f(c, e) for each of this thread's chunks, the c-th at column e; c is known to the compiler, and HELD for all that are not held. */
template <int TEAM, int HELD, typename F> INLINE void each_held(int cols, const F &f) {
    int e = threadIdx.x % TEAM * 8;
#pragma unroll
    for (int c = 0; c < HELD; c++, e += TEAM * 8)
        if (e < cols)
            f(c, e);
#pragma unroll 1
    for (; e < cols; e += TEAM * 8)
        f(HELD, e);
}

template <typename T> struct finish_piece {
    row_of<T, FINISH_HELD> h, x;
    float shift, rstd;
};

/* What this thread's rows add to dgamma and dbeta, of the columns that it holds. */
template <int HELD> struct column_sums { float gamma[HELD][8], beta[HELD][8]; };

/* f(c, e, h, g, xhat) sees eight elements at a time, column e on. */
template <typename T, int TEAM, typename F>
INLINE void each_gradient(const norm_finish &p, const finish_piece<T> &r, const F &f) {
    each_held<TEAM, FINISH_HELD>(p.cols, [&](int c, int e) {
        float h[8], g[8], v[8];
        get(r.h, c, e, h);
        get(r.x, c, e, v);
        if (p.gamma)
            load8((const T *)p.gamma, e, p.cols, p.vector, g);
#pragma unroll
        for (int x = 0; x < 8; x++) {
            g[x] = p.gamma ? h[x] * g[x] : h[x];
            v[x] = (v[x] - r.shift) * r.rstd;
        }
        f(c, e, h, g, v);
    });
}

/* In place. */
template <typename T, int TEAM>
INLINE void finish_row(const norm_finish &p, int64_t row, const finish_piece<T> &r, column_sums<FINISH_HELD> *s,
                       meeting *m, int *turn) {
    T *dx = (T *)p.dx + row * p.ldd;
    float sum = 0, dot = 0;
    each_gradient<T, TEAM>(p, r, [&](int c, int e, const float *h, const float *g, const float *v) {
#pragma unroll
        for (int x = 0; x < 8; x++) {
            sum += g[x]; /* zeros past the end */
            dot += g[x] * v[x];
            if (sizeof(T) == 2 && c < FINISH_HELD) {
                s->gamma[c][x] += h[x] * v[x];
                s->beta[c][x] += h[x];
            }
        }
    });
    const float2 both = team_sum<TEAM>(sum, dot, m, turn);
    const float c1 = p.centred ? both.x / (float)p.cols : 0, c2 = both.y / (float)p.cols;
    each_gradient<T, TEAM>(p, r, [&](int c, int e, const float *h, const float *g, const float *v) {
        float d[8];
#pragma unroll
        for (int x = 0; x < 8; x++)
            d[x] = r.rstd * (g[x] - c1 - v[x] * c2);
        store8(dx, e, p.cols, p.vector, d);
        if (p.z)
            store8((T *)p.z + row * p.ldz, e, p.cols, true, v);
    });
}

/* The teams' sums, added up, to part[block][2][cols]; by way of shared memory that nobody needs any more. */
template <int TEAM, int HELD> INLINE void store_sums(const norm_finish &p, const column_sums<HELD> &s, float *shared) {
    float *part = p.part + (int64_t)blockIdx.x * 2 * p.cols;
    float *own = TEAM < ROW_THREADS ? shared + threadIdx.x / TEAM * 2 * p.cols : part;
    __syncwarp(); /* as racecheck wants it, to which half a warp at a barrier is none */
    __syncthreads();
    each_held<TEAM, HELD>(p.cols, [&](int c, int e) {
#pragma unroll
        for (int x = 0; x < 8 && c < HELD; x++)
            if (e + x < p.cols) {
                own[e + x] = s.gamma[c][x];
                own[p.cols + e + x] = s.beta[c][x];
            }
    });
    if (TEAM == ROW_THREADS)
        return;
    __syncwarp();
    __syncthreads();
    for (int x = threadIdx.x; x < 2 * p.cols; x += ROW_THREADS) {
        float sum = 0;
        for (int team = 0; team < ROW_THREADS / TEAM; team++)
            sum += shared[team * 2 * p.cols + x];
        part[x] = sum;
    }
}

template <typename T, int TEAM> INLINE void finish_rows(const norm_finish &p, uint32_t *unit, char *held, meeting *m) {
    constexpr int STAGE = finish_stage_bytes(sizeof(T)), STAGES = finish_stages(sizeof(T)),
                  HEADS = 2 * row_of<T, FINISH_HELD>::BYTES;
    static_assert(HEADS + ROW_THREADS * 8 <= STAGE, "as the plan counts");
    char *const own = held + threadIdx.x * 16, *const head = held + HEADS + threadIdx.x * 8;
    int turn = 0;
    column_sums<FINISH_HELD> s = {};
    const auto row_at = [&](int64_t row, int stage) {
        char *const at = own + stage * STAGE;
        const bool vector = p.vector;
        return finish_piece<T>{{(const T *)p.dx + row * p.ldd, at, p.cols, vector},
                               {(const T *)p.x + row * p.ldx, at + row_of<T, FINISH_HELD>::BYTES, p.cols, vector},
                               0,
                               0};
    };
    const auto fetch_row = [&](int64_t row, int stage) {
        const finish_piece<T> r = row_at(row, stage);
        fetch<TEAM>(r.h);
        fetch<TEAM>(r.x);
        cp_async4(shared_address(head + stage * STAGE), p.mean + row, 4);
        cp_async4(shared_address(head + stage * STAGE + 4), p.rstd + row, 4);
    };
    each_row<TEAM, STAGES>(unit, p.rows, fetch_row, [&](int64_t row, int stage) {
        finish_piece<T> r = row_at(row, stage);
        const float2 moments = *(const float2 *)(head + stage * STAGE);
        r.shift = p.centred ? moments.x : 0;
        r.rstd = moments.y;
        finish_row<T, TEAM>(p, row, r, &s, m, &turn);
    });
    if (sizeof(T) == 2 && p.part)
        store_sums<TEAM, FINISH_HELD>(p, s, (float *)held);
}

/* ------------------------------------------------------------------------------------------------------- whole rows
 * Rows in 16 bits that the team holds, in chunks of 16 aligned bytes: the same, without a question for an element. */

/* The columns of a thread: chunks TEAM apart, of which so many are there; gamma, as it lies in memory. */
template <int HELD> struct whole_columns {
    int count;
    float inverse; /* 1/cols */
    uint4 gamma[HELD];
};

template <typename T, int TEAM, int HELD> INLINE whole_columns<HELD> find_columns(const norm_finish &p) {
    const int first = (int)threadIdx.x % TEAM * 8;
    whole_columns<HELD> w;
    w.inverse = 1.0f / (float)p.cols;
    w.count = first < p.cols ? (p.cols - first + TEAM * 8 - 1) / (TEAM * 8) : 0;
#pragma unroll
    for (int c = 0; c < HELD; c++) {
        const uint32_t ones = pack_pair(1.0f, 1.0f, T());
        w.gamma[c] = make_uint4(ones, ones, ones, ones);
        if (p.gamma && c < w.count)
            w.gamma[c] = *(const uint4 *)((const T *)p.gamma + first + c * TEAM * 8);
    }
    return w;
}

/* f(x, g, xhat, h) of the x-th number of a row's c-th chunk; `at`: where the row's lie in shared memory. They are read for each pass: there are
 * no registers for them beside the sums. */
template <typename T, int HELD, typename F>
INLINE void each_of_chunk(const char *at, int c, const uint4 &gamma, const float2 &moments, const F &f) {
    const uint4 h = *(const uint4 *)(at + c * ROW_THREADS * 16),
                x = *(const uint4 *)(at + (HELD + c) * ROW_THREADS * 16);
    const uint32_t hs[4] = {h.x, h.y, h.z, h.w}, xs[4] = {x.x, x.y, x.z, x.w},
                   gs[4] = {gamma.x, gamma.y, gamma.z, gamma.w};
#pragma unroll
    for (int y = 0; y < 4; y++) {
        const float low = low_float(hs[y], T()), high = high_float(hs[y], T());
        f(2 * y, low * low_float(gs[y], T()), (low_float(xs[y], T()) - moments.x) * moments.y, low);
        f(2 * y + 1, high * high_float(gs[y], T()), (high_float(xs[y], T()) - moments.x) * moments.y, high);
    }
}

template <typename T> INLINE uint4 pack_chunk(const float v[8]) {
    return make_uint4(pack_pair(v[0], v[1], T()), pack_pair(v[2], v[3], T()), pack_pair(v[4], v[5], T()),
                      pack_pair(v[6], v[7], T()));
}

/* In place. moments: what is subtracted, and rstd. at: the row's chunks in shared memory. */
template <typename T, int TEAM, int HELD>
INLINE void finish_whole_row(const norm_finish &p, int64_t row, const char *at, const float2 &moments,
                             const whole_columns<HELD> &w, column_sums<HELD> *s, meeting *m, int *turn) {
    const int first = (int)threadIdx.x % TEAM * 8;
    float sum = 0, dot = 0;
#pragma unroll
    for (int c = 0; c < HELD; c++)
        if (c < w.count)
            each_of_chunk<T, HELD>(at, c, w.gamma[c], moments, [&](int x, float g, float v, float h) {
                sum += g;
                dot = fmaf(g, v, dot);
                s->gamma[c][x] = fmaf(h, v, s->gamma[c][x]);
                s->beta[c][x] += h;
            });
    const float2 both = team_sum<TEAM>(sum, dot, m, turn);
    const float c1 = p.centred ? -moments.y * (both.x * w.inverse) : 0, c2 = -moments.y * (both.y * w.inverse);
    T *const dx = (T *)p.dx + row * p.ldd + first, *const z = (T *)p.z + row * p.ldz + first;
#pragma unroll
    for (int c = 0; c < HELD; c++)
        if (c < w.count) {
            float d[8], xhat[8];
            each_of_chunk<T, HELD>(at, c, w.gamma[c], moments, [&](int x, float g, float v, float) {
                d[x] = fmaf(g, moments.y, fmaf(v, c2, c1));
                xhat[x] = v;
            });
            store_global16(dx + c * TEAM * 8, pack_chunk<T>(d));
            if (p.z)
                store_global16(z + c * TEAM * 8, pack_chunk<T>(xhat));
        }
}

template <typename T, int TEAM, int HELD>
INLINE void finish_whole(const norm_finish &p, uint32_t *unit, char *held, meeting *m) {
    constexpr int STAGE = finish_stage_bytes(sizeof(T)), STAGES = finish_stages(sizeof(T)), PIECE = ROW_THREADS * 16;
    static_assert(2 * HELD * PIECE + ROW_THREADS * 8 <= STAGE, "as the plan counts");
    const int first = (int)threadIdx.x % TEAM * 8;
    char *const own = held + threadIdx.x * 16, *const head = held + 2 * HELD * PIECE + threadIdx.x * 8;
    const whole_columns<HELD> w = find_columns<T, TEAM, HELD>(p);
    column_sums<HELD> s = {};
    int turn = 0;
    const auto fetch_row = [&](int64_t row, int stage) {
        const uint32_t to = shared_address(own) + stage * STAGE, to_head = shared_address(head) + stage * STAGE;
        const T *const dx = (const T *)p.dx + row * p.ldd + first, *const x = (const T *)p.x + row * p.ldx + first;
#pragma unroll
        for (int c = 0; c < HELD; c++)
            if (c < w.count) {
                cp_async16(to + c * PIECE, dx + c * TEAM * 8, 16);
                cp_async16(to + (HELD + c) * PIECE, x + c * TEAM * 8, 16);
            }
        cp_async4(to_head, p.mean + row, 4);
        cp_async4(to_head + 4, p.rstd + row, 4);
    };
    each_row<TEAM, STAGES>(unit, p.rows, fetch_row, [&](int64_t row, int stage) {
        float2 moments = *(const float2 *)(head + stage * STAGE);
        moments.x = p.centred ? moments.x : 0;
        finish_whole_row<T, TEAM, HELD>(p, row, own + stage * STAGE, moments, w, &s, m, &turn);
    });
    if (p.part)
        store_sums<TEAM, HELD>(p, s, (float *)held);
}

/* Eight columns of AT_ONCE rows, all of them on their way before the first is used. */
enum { AT_ONCE = 8 };
template <typename T> INLINE void add_rows(const T *from, int64_t step, float sum[8]) {
    uint4 held[AT_ONCE][sizeof(T) / 2];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
        for (int x = 0; x < (int)sizeof(T) / 2; x++)
            held[r][x] = ((const uint4 *)(from + r * step))[x];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
        for (int x = 0; x < 8; x++)
            sum[x] += to_float(((const T *)held[r])[x]);
}

/* A unit is SUM_COLS columns and one share of the rows; the warps take rows in turn. */
template <typename T> INLINE void partial_sums(const norm_sums &p, uint32_t unit, float sums[][SUM_COLS]) {
    const uint32_t blocks = (uint32_t)sum_units(p.cols);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (; unit < blocks * p.parts; unit += gridDim.x) {
        const int64_t part = unit / blocks, col0 = (int64_t)(unit % blocks) * SUM_COLS, col = col0 + lane * 8;
        const int64_t begin = p.rows * part / p.parts, end = p.rows * (part + 1) / p.parts;
        float sum[8] = {};
        int64_t row = begin + warp;
        if (p.vector && col + 8 <= p.cols)
            for (; row + (AT_ONCE - 1) * SUM_WARPS < end; row += AT_ONCE * SUM_WARPS)
                add_rows((const T *)p.a + row * p.ld + col, SUM_WARPS * p.ld, sum);
        for (; row < end; row += SUM_WARPS) {
            float v[8];
            load8((const T *)p.a + row * p.ld, col, p.cols, p.vector, v);
#pragma unroll
            for (int x = 0; x < 8; x++)
                sum[x] += v[x];
        }
        __syncwarp();
        __syncthreads();
#pragma unroll
        for (int x = 0; x < 8; x++)
            sums[warp][lane * 8 + x] = sum[x];
        __syncwarp();
        __syncthreads();
        const int64_t mine = col0 + threadIdx.x;
        float all = 0;
#pragma unroll
        for (int w = 0; w < SUM_WARPS; w++)
            all += sums[w][threadIdx.x];
        if (mine < p.cols)
            p.part[part * p.cols + mine] = all;
    }
}

template <typename T> INLINE void finish_kernel(const norm_finish &p) {
    extern __shared__ __align__(16) char held[];
    meeting *const m = (meeting *)(held + finish_stages(sizeof(T)) * finish_stage_bytes(sizeof(T)));
    uint32_t unit = blockIdx.x;
    const int team = finish_team(p.cols, p.whole);
    if constexpr (sizeof(T) == 2)
        if (p.whole) {
            if (team == FINISH_WARP)
                finish_whole<T, FINISH_WARP, FINISH_MOST_HELD>(p, &unit, held, m);
            else if (team == FINISH_SHORT_TEAM)
                finish_whole<T, FINISH_SHORT_TEAM, FINISH_HELD>(p, &unit, held, m);
            else if (team == FINISH_MIDDLE_TEAM)
                finish_whole<T, FINISH_MIDDLE_TEAM, FINISH_HELD>(p, &unit, held, m);
            else
                finish_whole<T, FINISH_TEAM, FINISH_HELD>(p, &unit, held, m);
        }
    if (!p.whole) {
        if (team == FINISH_WARP)
            finish_rows<T, FINISH_WARP>(p, &unit, held, m);
        else if (team == FINISH_SHORT_TEAM)
            finish_rows<T, FINISH_SHORT_TEAM>(p, &unit, held, m);
        else if (team == FINISH_MIDDLE_TEAM)
            finish_rows<T, FINISH_MIDDLE_TEAM>(p, &unit, held, m);
        else
            finish_rows<T, FINISH_TEAM>(p, &unit, held, m);
    }
    __syncwarp();
    __syncthreads(); /* the stages become the sums' */
    partial_sums<T>(p.sums, unit, (float(*)[SUM_COLS])held);
}

/* ------------------------------------------------------------------------------------------------------------- total */

/* The sum over this thread's `count` rows of one column, eight of them on their way at a time. */
template <typename E> INLINE float column_sum(const E *from, int64_t ld, const float *factor, int64_t count) {
    float sum = 0;
#pragma unroll 8
    for (int64_t row = threadIdx.x / 32; row < count; row += TOTAL_WARPS)
        sum += to_float(from[row * ld]) * (factor ? factor[row] : 1);
    return sum;
}

/* A block has 32 columns of one of the jobs. */
template <typename T> INLINE void total_kernel(const norm_totals &all) {
    __shared__ float sums[TOTAL_WARPS][TOTAL_COLS];
    uint32_t unit = blockIdx.x, job = 0;
    while (job < 2 && unit >= (uint32_t)total_units(all.job[job].cols)) {
        unit -= (uint32_t)total_units(all.job[job].cols);
        job++;
    }
    const norm_sums &p = all.job[job];
    const int64_t col = (int64_t)unit * TOTAL_COLS + threadIdx.x % 32;
    float sum = 0;
    if (col < p.cols && p.a)
        sum = column_sum((const T *)p.a + col, p.ld, p.factor, p.rows);
    if (col < p.cols && p.part)
        sum += column_sum((const float *)p.part + col, p.a ? p.cols : p.ld, NULL, p.parts);
    sums[threadIdx.x / 32][threadIdx.x % 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || col >= p.cols)
        return;
    sum = 0;
#pragma unroll
    for (int w = 0; w < TOTAL_WARPS; w++)
        sum += sums[w][threadIdx.x];
    if (p.out)
        ((T *)p.out)[col] = from_float<T>(sum);
    if (p.sum)
        p.sum[col] = sum;
}

#define threads_finish ROW_THREADS
#define threads_total (TOTAL_WARPS * 32)
#define parameter_finish norm_finish
#define parameter_total norm_totals
#define blocks_finish FINISH_RESIDENT
#define blocks_total 1
#define K(pass, dtype, family, threads, module)                                                                        \
    static_assert(threads == threads_##pass, "as the kernel counts");                                                  \
    ROW_KERNEL(pass, dtype, parameter_##pass, threads, blocks_##pass)

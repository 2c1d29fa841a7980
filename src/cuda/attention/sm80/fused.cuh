/* SPDX-License-Identifier: Apache-2.0
 * The backward of five products: where things lie in shared memory, the products, weights and gradients without options. */
#ifndef HEDDLE_CUDA_ATTENTION_SM80_FUSED_CUH
#define HEDDLE_CUDA_ATTENTION_SM80_FUSED_CUH

#include "cuda/attention/sm80/bwd.cuh"

/* -------------------------------------------------------------------------------------------------- the layout
 * Each warp has 32 keys; `share` warps side by side have the same ones, and each of them forms the scores of some of a step's
 * queries and sums up some of the columns of dK and dV. */

template <typename T, int D, int WARPS, int OWN, int BLOCK> struct fused_shared {
    static constexpr int threads = WARPS * 32, share = sm80_fused_share(WARPS, OWN), groups = OWN / 32;
    static constexpr int turns = share == 1 ? BLOCK / 32 : 1;  /* in which a warp forms its scores */
    static constexpr int columns = BLOCK / share / turns;      /* queries of a turn */
    static constexpr int width = D / share;                    /* columns of dK and dV */
    static constexpr int pitch = sm80_pitch(sizeof(T), BLOCK); /* from key to key of P and dS */
    static constexpr int second = OWN * tile<T, D>::pitch;     /* K, V */
    static constexpr int stages = 2 * second;
    static constexpr int stage_bytes = 2 * BLOCK * tile<T, D>::pitch;
    static constexpr int ds = stages + 2 * stage_bytes, ds_bytes = OWN * pitch;
    static constexpr int ps = ds + 2 * ds_bytes;
    static constexpr int numbers = ps + (share > 1 ? ds_bytes : 0); /* per stage: base, rest, D, bad */
    static constexpr int numbers_bytes = 4 * BLOCK * 4, apart = 1, number_step = BLOCK;
    static constexpr int marks = ds + BLOCK * (int)sizeof(T),
                         mark_step = pitch / 4;      /* of keys, beside dS: not finite */
    static constexpr int dropout = marks + ds_bytes; /* beside the other dS */
    static_assert(numbers + 2 * 4 * BLOCK * 4 == sm80_fused_bytes(sizeof(T), D, WARPS, OWN, BLOCK),
                  "as the plan counts");
    /* dQ of a step: a warp has 32 queries, and these columns */
    static constexpr int beside = WARPS / (BLOCK / 32), sum_width = D / beside;
    static __device__ __forceinline__ int part(void) {
        return share > 1 ? (int)threadIdx.x / 32 % share : 0;
    }
    static __device__ __forceinline__ int group(void) {
        return (int)threadIdx.x / 32 / share;
    }
};

/* ------------------------------------------------------------------------------------------------------ products */

/* c += A·B: 32 rows of A, 16 of B with D elements, from the lane's address on. */
template <typename T, int D, int COLUMNS>
INLINE void multiply_rows(float (*c)[COLUMNS / 8][4], const a_fragment<T> fa[2], uint32_t b) {
#pragma unroll
    for (int y = 0; y < COLUMNS / 16; y++) {
        b_fragment<T> fb[2];
        load_b_columns<T, D>(fb, b + y * 32);
#pragma unroll
        for (int x = 0; x < 2; x++) {
            multiply(c[x][2 * y], fa[x], fb[0]);
            multiply(c[x][2 * y + 1], fa[x], fb[1]);
        }
    }
}

/* The same of 16·STEPS rows of B, A from pairs as pack_pairs makes them. */
template <typename T, int D, int STEPS, int COLUMNS>
INLINE void multiply_pairs(float (*c)[COLUMNS / 8][4], const uint32_t (*a)[2 * STEPS][2], uint32_t b) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        a_fragment<T> fa[2];
#pragma unroll
        for (int x = 0; x < 2; x++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                fa[x].r[e] = a[x][2 * s + e / 2][e % 2];
        multiply_rows<T, D, COLUMNS>(c, fa, b + s * 16 * tile<T, D>::pitch);
    }
}

/* The same, A from shared memory: 32 rows of PITCH bytes; TURNED: 32 columns. From the lane's address on. */
template <bool TURNED> INLINE uint32_t operand_lane(int lane, int pitch) {
    return TURNED ? ((lane & 7) + (lane >> 4 & 1) * 8) * pitch + (lane >> 3 & 1) * 16
                  : (lane & 15) * pitch + (lane >> 4) * 16;
}
template <typename T, int D, int STEPS, int COLUMNS, int PITCH, bool TURNED>
INLINE void multiply_shared(float (*c)[COLUMNS / 8][4], uint32_t a, uint32_t b) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        a_fragment<T> fa[2];
#pragma unroll
        for (int x = 0; x < 2; x++)
            if (TURNED)
                ldmatrix4_trans(fa[x].r, a + s * 16 * PITCH + x * 32);
            else
                ldmatrix4(fa[x].r, a + x * 16 * PITCH + s * 32);
        multiply_rows<T, D, COLUMNS>(c, fa, b + s * 16 * tile<T, D>::pitch);
    }
}

/* ------------------------------------------------------------------------------------------- weights and gradients */

/* Has one of a step's rows a second part of its log-sum-exp? The same for all warps. */
template <int BLOCK> INLINE bool has_rest(const float *numbers) {
    bool any = false;
#pragma unroll
    for (int z = 0; z < BLOCK; z += 32)
        any |= numbers[BLOCK + z + threadIdx.x % 32] != 0.0f;
    return __any_sync(ALL_LANES, any);
}

/* How a step's scores become weights: all are seen; a mask cuts some; and besides there are rows with a rest, or marks. */
enum weighing { WHOLE, CUT, CAREFUL };

/* s, dp: Sᵀ, dPᵀ -> Pᵀ, dSᵀ. Rows are keys from row0, columns queries from i0. Marks are added to what is seen: 0 or NaN. */
template <typename T, weighing HOW, int BLOCK, int COLUMNS, int MARK_STEP>
INLINE void weigh(const attention_params &p, const place &c, int row0, int i0, const float *numbers, const float *marks,
                  float (*s)[COLUMNS / 8][4], float (*dp)[COLUMNS / 8][4]) {
    const int lane = threadIdx.x % 32;
    float mark[2][2];
#pragma unroll
    for (int z = 0; HOW == CAREFUL && z < 4; z++)
        mark[z / 2][z % 2] = marks[(z * 8 + lane / 4) * MARK_STEP];
#pragma unroll
    for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = y * 8 + lane % 4 * 2 + e, i = i0 + column;
            const float base = numbers[column], dsum = numbers[2 * BLOCK + column];
            const float rest = HOW == CAREFUL ? numbers[BLOCK + column] : 0.0f;
            const float bad = HOW == CAREFUL ? numbers[3 * BLOCK + column] : 0.0f;
            const int first = max(i + c.lo, 0), last = i < c.sq ? min(i + c.hi, c.sk - 1) : -1;
#pragma unroll
            for (int z = 0; z < 2; z++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int j = row0 + z * 16 + half * 8 + lane / 4;
                    float *t = &s[z][y][2 * half + e], *dt = &dp[z][y][2 * half + e];
                    const bool seen = HOW == WHOLE || (j >= first && j <= last);
                    if (HOW == CAREFUL) {
                        const element r = lean_element<T>(p, seen, *t + (bad + mark[z][half]), *dt, base, rest, dsum);
                        *t = r.p;
                        *dt = r.ds;
                    } else {
                        const float weight = exp2_approx(fmaf(*t, p.scale_log2, -base));
                        *t = seen ? weight : 0.0f;
                        *dt = seen ? weight * (*dt - dsum) : 0.0f;
                    }
                }
        }
}

/* Neighbouring columns in one register, as A operands and shared memory take them. */
template <typename T, int COLUMNS>
INLINE void pack_pairs(uint32_t (*to)[COLUMNS / 8][2], const float (*c)[COLUMNS / 8][4]) {
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                to[x][y][half] = pack_pair(c[x][y][2 * half], c[x][y][2 * half + 1], T());
}

template <int COLUMNS, int PITCH> INLINE void lay_down(uint32_t to, const uint32_t (*c)[COLUMNS / 8][2]) {
    const int lane = threadIdx.x % 32;
    to += lane / 4 * PITCH + lane % 4 * 4;
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int y = 0; y < COLUMNS / 8; y++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_shared4(to + (x * 16 + half * 8) * PITCH + y * 16, c[x][y][half]);
}

#endif

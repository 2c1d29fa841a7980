/* SPDX-License-Identifier: Apache-2.0
 * A row of 16-bit numbers whose every 32nd chunk of eight elements is a lane's, and its moments. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_LANES_CUH
#define HEDDLE_CUDA_NORM_LINEAR_LANES_CUH

#include "cuda/element.cuh"
#include "cuda/norm_linear/moments.cuh"

INLINE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

template <typename T> INLINE void unpack_chunk(const uint4 &held, float v[8]) {
    const uint32_t pairs[4] = {held.x, held.y, held.z, held.w};
#pragma unroll
    for (int x = 0; x < 4; x++) {
        v[2 * x] = low_float(pairs[x], T());
        v[2 * x + 1] = high_float(pairs[x], T());
    }
}

/* Eight elements from e on; zeros past the end. */
template <typename T> INLINE void chunk8(const void *row, int e, int depth, float v[8]) {
    const uint4 held = e < depth ? __ldg((const uint4 *)((const T *)row + e)) : make_uint4(0, 0, 0, 0);
    unpack_chunk<T>(held, v);
}

/* A lane's part of a row: its elements' sum, and the squares of their distance from the mean of its first eight: a shift that neither a large
 * mean nor a single large feature spoils. */
struct lane_moments {
    float shift, sum, squares;
};

template <typename T> INLINE void add_chunk(lane_moments *m, const uint4 &held, bool first, bool shifted) {
    float v[8];
    unpack_chunk<T>(held, v);
    const float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    if (first)
        *m = {shifted ? sum * 0.125f : 0, 0, 0};
    m->sum += sum;
#pragma unroll
    for (int x = 0; x < 8; x++)
        m->squares += (v[x] - m->shift) * (v[x] - m->shift);
}

/* Mean and rstd of a row of so many elements, a multiple of 8, from those of its lanes, of which this is one of so many: their squares around
 * their own means, and those of their means around the row's. sum: over all of them, to each. */
template <typename F>
INLINE float2 moments_of_lanes(const lane_moments &m, int lane, int lanes, int cols, bool rms, float inverse, float eps,
                               const F &sum) {
    const int chunks = cols / 8;
    const float n = (float)cols, own = (float)((chunks - lane + lanes - 1) / lanes * 8);
    const float mean = rms ? 0 : sum(m.sum) / n;
    float squares = m.squares;
    if (!rms && lane < chunks) {
        const float apart = fmaf(-own, m.shift, m.sum), from = m.sum / own - mean;
        squares += own * from * from - apart * apart / own;
    }
    return make_float2(mean, inverse_deviation(sum(squares), n, inverse, 0, eps));
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Tiles in shared memory, and how rows of a tensor get there.
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

/* ------------------------------------------------------------------------------------------------------- pages
 * HEDDLE_PAGES: a tile of keys in groups of PAGE_ROWS rows, which a page does not divide. Each warp holds the pages of a tile, group x%GROUPS in lane
 * x; it asks for them a tile ahead. */
template <int ROWS> INLINE int find_pages(const attention_params &p, int64_t n, int first, int end) {
    const int j = first + threadIdx.x % (ROWS / PAGE_ROWS) * PAGE_ROWS;
    return j < end ? page_at(p, n, j) : -1;
}

/* Where row `row` of a group begins. */
template <typename T>
INLINE const T *row_in_page(const attention_params &p, const T *tensor, const heddle_strides &s, int page, int j) {
    return tensor + page * s.b + (j & ((1 << p.page_bits) - 1)) * s.s;
}

/* As load_tile, of keys in pages; tensor: row 0 of the head in page 0. What is in no page is zero. */
template <typename T, int D, int ROWS, int THREADS>
INLINE void load_pages(const attention_params &p, uint32_t to, const T *tensor, const heddle_strides &s, int pages,
                       int first, int begin, int end, int width, bool vector) {
    typedef tile<T, D> t;
    constexpr int STEP = THREADS / t::chunks, EACH = 16 / (int)sizeof(T);
    static_assert(PAGE_ROWS % STEP == 0 && ROWS % PAGE_ROWS == 0, "threads fill whole groups");
    const int row = threadIdx.x / t::chunks, chunk = threadIdx.x % t::chunks;
    const int bytes = chunk * EACH < width ? 16 : 0;
    to += row * t::pitch + chunk * 16;
    const unsigned count = max(end - begin, 0);
#pragma unroll
    for (int g = 0; g < ROWS; g += PAGE_ROWS) {
        const int page = __shfl_sync(ALL_LANES, pages, g / PAGE_ROWS), j = first + g + row;
        const T *from = row_in_page(p, tensor, s, page, j);
        if (vector) {
#pragma unroll
            for (int x = 0; x < PAGE_ROWS; x += STEP, from += STEP * s.s) {
                const bool there = page >= 0 && (unsigned)(j + x - begin) < count;
                cp_async16(to + (g + x) * t::pitch, there && bytes ? from + chunk * EACH : tensor, there ? bytes : 0);
            }
        } else {
#pragma unroll 1
            for (int x = 0; x < PAGE_ROWS; x += STEP, from += STEP * s.s) {
                const bool there = page >= 0 && (unsigned)(j + x - begin) < count;
                load_chunk(to + (g + x) * t::pitch, there ? from : tensor, chunk, width, there, false);
            }
        }
    }
}

/* What a mark makes of the score of whoever sees its key; 0: nothing. */
enum { MARK_NAN = 0x7fffffff, MARK_HIDDEN = (int)0xff800000u };

/* Marks the keys that are in no page, by the first warp (or the only one). */
template <int ROWS, int STEP = 1> INLINE void mark_hidden(int pages, int *marks) {
#pragma unroll
    for (int g = 0; g < ROWS; g += PAGE_ROWS)
        if (__shfl_sync(ALL_LANES, pages, g / PAGE_ROWS) < 0 && threadIdx.x % 32 < PAGE_ROWS)
            marks[(g + threadIdx.x % 32) * STEP] = MARK_HIDDEN;
}

/* In a tile that a mask cuts, 0·NaN would leak through a product. Each thread looks at what it has loaded itself:
 * chunks that are not finite become zero and their rows are marked, the marks STEP numbers apart; whoever sees a marked row is given a NaN.
 * Has this thread found one? */
template <typename T, int D, int ROWS, int THREADS, int STEP = 1> INLINE bool clean_tile(uint32_t at, int *bad) {
    typedef tile<T, D> t;
    bool found = false;
    for (int x = threadIdx.x; x < ROWS * t::chunks; x += THREADS) {
        const int row = x / t::chunks, chunk = x % t::chunks;
        const uint32_t to = at + row * t::pitch + chunk * 16;
        if (has_nonfinite(load_shared16(to), T())) {
            store_shared16(to, make_uint4(0, 0, 0, 0));
            bad[row * STEP] = MARK_NAN;
            found = true;
        }
    }
    return found;
}

#endif

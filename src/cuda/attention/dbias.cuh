/* SPDX-License-Identifier: Apache-2.0
 * What kernels for the gradient of a bias share: a block owns ROWS queries and BLOCK keys of dbias, and walks over all that is summed there,
 * always in the same order. */
#ifndef HEDDLE_CUDA_ATTENTION_DBIAS_CUH
#define HEDDLE_CUDA_ATTENTION_DBIAS_CUH

#include "cuda/attention/common.cuh"
#include "cuda/attention/dbias.h"

/* What a block owns, and where it is in what it sums over. */
struct dbias_work {
    int n, x, row0, key0;                                      /* batch, head, first query, first key */
    int first_n, first_x, first_row, last_n, last_x, last_row; /* from where to where they go */
    place c;
};

/* The index-th of all tiles. */
template <int ROWS, int BLOCK> INLINE dbias_work find_sums(const attention_params &p, unsigned index) {
    const heddle_strides &s = p.a.dbias_stride;
    const unsigned across = (unsigned)((p.a.sk + BLOCK - 1) / BLOCK);
    const unsigned down = s.s ? (unsigned)((p.a.sq + ROWS - 1) / ROWS) : 1, heads = s.h ? (unsigned)p.a.h : 1;
    const unsigned tile = index / across % down, unit = index / across / down;
    dbias_work w;
    w.key0 = (int)(index % across) * BLOCK;
    w.first_row = s.s ? (int)tile * ROWS : 0;
    w.last_row = s.s ? w.first_row + 1 : (int)p.a.sq;
    w.first_x = s.h ? (int)(unit % heads) : 0;
    w.last_x = s.h ? w.first_x + 1 : (int)p.a.h;
    w.first_n = s.b ? (int)(unit / heads) : 0;
    w.last_n = s.b ? w.first_n + 1 : (int)p.a.b;
    w.n = w.first_n;
    w.x = w.first_x;
    w.row0 = w.first_row;
    w.c = find_place(p, w.n);
    return w;
}

/* Does a query of these see a key of these? */
template <int ROWS, int BLOCK> INLINE bool is_seen(const dbias_work &w) {
    const int last = min(w.row0 + ROWS, w.c.sq) - 1, last_key = min(w.key0 + BLOCK, w.c.sk) - 1;
    return last >= w.row0 && last_key >= w.key0 && w.key0 <= last + w.c.hi && last_key >= w.row0 + w.c.lo;
}

/* To sequence n; much less is to be done where all have the same lengths. */
INLINE void move_to(const attention_params &p, int n, place *c) {
    if (p.a.features & (HEDDLE_VARLEN | HEDDLE_SEQLENS))
        *c = find_place(p, n);
    else
        c->n = n;
}

/* The next that is not empty, or this one; false: there is none. */
template <int ROWS, int BLOCK> INLINE bool seek(const attention_params &p, dbias_work *w, bool next) {
    for (;; next = true) {
        if (next) {
            w->row0 += ROWS;
            if (w->row0 >= w->last_row) {
                w->row0 = w->first_row;
                if (++w->x == w->last_x) {
                    w->x = w->first_x;
                    if (++w->n == w->last_n)
                        return false;
                    move_to(p, w->n, &w->c);
                }
            }
        }
        if (is_seen<ROWS, BLOCK>(*w))
            return true;
    }
}

/* A warp's 16 rows to one: a number for each key. */
template <int BLOCK> INLINE void fold_rows(float *to, const float (*sum)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int y = 0; y < BLOCK / 8; y++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float x = sum[y][e] + sum[y][e + 2];
            for (int step = 4; step < 32; step *= 2)
                x += __shfl_xor_sync(ALL_LANES, x, step);
            if (lane < 4)
                to[y * 8 + lane * 2 + e] = x;
        }
}

#endif

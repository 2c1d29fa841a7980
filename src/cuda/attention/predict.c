/* SPDX-License-Identifier: Apache-2.0
 * Times predicted for attention by the family `small` and by the tensor cores. Pure. */
#include "cuda/attention/family.h"

#include "dtype.h"
#include "mask.h"

/* Microseconds, fitted to what an H200 takes (docs/kernels/cuda-attention-small.md). A block of `small` takes `block`, and
 * `step` for every 128 rows that it walks over. The tensor cores take `start` and `row` for every row that a block walks
 * over, up to `rows`, as forward then shares the keys: not less than that, as waves of blocks are left out. */
typedef struct times {
    double block, step, start, row, rows;
} times;

/* [backward][16 bits][32, 64, 128 columns]. Hopper's own kernels of 16 bits are the faster ones. */
static const times measured[2][2][3] = {
    {{{1.7, 2.55, 6.6, 0.124, 128}, {2.2, 3.8, 6.6, 0.124, 128}, {2.8, 6.5, 13.3, 0.127, 128}},
     {{1.7, 3.7, 6.9, 0, 0}, {2.0, 6.1, 6.9, 0, 0}, {2.5, 11, 6.9, 0, 0}}},
    {{{1.6, 3.9, 16, 0.22, 1e9}, {2.2, 6.2, 16, 0.22, 1e9}, {8.1, 10.6, 16, 0.28, 1e9}},
     {{1.9, 5.7, 12, 0.015, 1e9}, {2.3, 9.6, 12, 0.015, 1e9}, {6.5, 17.2, 12, 0.015, 1e9}}},
};

enum { STEP = 128, TILE = 8 };

/* Steps over so many rows; one that is cut takes half of its time whatever is in it. */
static double steps_over(int64_t rows) {
    const int64_t whole = rows / STEP, rest = rows % STEP;
    return (double)whole + (rest ? 0.5 + 0.5 * (double)rest / STEP : 0);
}

static int64_t tiles_of(int64_t rows) {
    return (rows + TILE - 1) / TILE;
}

/* A block at a time on every multiprocessor; the longest begin first. */
static double time_of(double longest, double sum, int64_t blocks, const cuda_facts *device) {
    const int64_t waves = (blocks + device->multiprocessors - 1) / device->multiprocessors;
    return 1.2 + sum / (double)blocks * (double)(waves - 1) + longest;
}

static double small_forward(const heddle_attention *a, const cuda_facts *device, const times *t) {
    const int64_t blocks = tiles_of(a->sq) * a->h * a->b;
    const double each = t->block + t->step * steps_over(a->sk);
    return time_of(each, each * (double)blocks, blocks, device);
}

static double small_backward(const heddle_attention *a, const cuda_facts *device, const times *t, int dim) {
    const int64_t heads = a->h / a->hk;
    const double group = (double)heads;
    const int64_t blocks_k = tiles_of(a->sk) * a->hk * a->b, blocks_q = tiles_of(a->sq) * a->h * a->b;
    /* Where the scores of float32 are large, a block of keys finds the log-sum-exp of all its queries anew, a key a lane
     * (estimated). That is rare: a quarter of it counts. */
    const double anew = a->dtype == HEDDLE_F32 ? 0.25 * 2.2e-5 * (double)a->sq * (double)a->sk * group * dim : 0;
    const double of_keys = t->block + t->step * steps_over(a->sq) * group + anew;
    const double of_queries = t->block + t->step * steps_over(a->sk);
    const double sum = of_keys * (double)blocks_k + of_queries * (double)blocks_q;
    return time_of(of_keys > of_queries ? of_keys : of_queries, sum, blocks_k + blocks_q, device);
}

/* Where in `measured` a problem is; the columns that the kernels of `small` have for it. */
static int columns_of(const heddle_attention *a) {
    const int64_t width = max64(a->d, a->dv);
    return width <= 32 ? 32 : width <= 64 ? 64 : 128;
}

static const times *times_of(const heddle_attention *a, bool backward) {
    return &measured[backward][heddle_dtype_size(a->dtype) == 2][columns_of(a) / 64];
}

static double small_time(const attention_problem *p, bool backward) {
    const times *t = times_of(p->a, backward);
    return backward ? small_backward(p->a, p->device, t, columns_of(p->a)) : small_forward(p->a, p->device, t);
}

static double tensor_core_time(const attention_problem *p, bool backward) {
    const heddle_attention *a = p->a;
    const times *t = times_of(a, backward);
    const int64_t walked = backward ? a->sq * (a->h / a->hk) + a->sk : a->sk;
    const double time = t->start + t->row * ((double)walked < t->rows ? (double)walked : t->rows);
    return !backward && a->sq <= 64 && time < 8.6 ? 8.6 : time; /* not for Hopper's own */
}

/* float32: of both passes, since they go to the same family (small.c says why). */
double heddle__cuda_small_time(const attention_problem *p) {
    const bool backward = p->pass == HEDDLE_BACKWARD;
    return small_time(p, backward) + (p->a->dtype == HEDDLE_F32 ? small_time(p, !backward) : 0);
}

double heddle__cuda_tensor_core_time(const attention_problem *p) {
    const bool backward = p->pass == HEDDLE_BACKWARD;
    return tensor_core_time(p, backward) + (p->a->dtype == HEDDLE_F32 ? tensor_core_time(p, !backward) : 0);
}

/* SPDX-License-Identifier: Apache-2.0
 * When attention is better done by the family `small`: times predicted for it and for the tensor cores. No driver call:
 * pure. */
#include "cuda/attention/params.h"

#include "dtype.h"

/* Microseconds, fitted to what an H200 takes (docs/kernels/cuda-small.md). A block of `small` takes `block`, and `step` for
 * every 128 rows that it walks over. The tensor cores take `start` and `row` for every row that a block walks over, up to
 * `rows`, as forward then splits the keys: not less than that, as waves of blocks are left out. */
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
static double time_of(double longest, double sum, int64_t blocks, const attention_device *device) {
    const int64_t waves = (blocks + device->multiprocessors - 1) / device->multiprocessors;
    return 1.2 + sum / (double)blocks * (double)(waves - 1) + longest;
}

static double small_forward(const heddle_attention *a, const attention_device *device, const times *t) {
    const int64_t blocks = tiles_of(a->sq) * a->h * a->b;
    const double each = t->block + t->step * steps_over(a->sk);
    return time_of(each, each * (double)blocks, blocks, device);
}

static double small_backward(const heddle_attention *a, const attention_device *device, const times *t, int dim) {
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

bool heddle__cuda_attention_has_few_keys(const heddle_attention *a) {
    return heddle_dtype_size(a->dtype) == 2 &&
           (a->sk <= FEW_KEYS || (a->features & (HEDDLE_VARLEN | HEDDLE_SEQLENS)) != 0);
}

/* Of this family, and of the others. */
typedef struct prediction {
    double small, large;
} prediction;

static prediction predict(const heddle_attention *a, const attention_device *device, heddle_pass pass, int dim) {
    const bool backward = pass == HEDDLE_BACKWARD;
    const times *t = &measured[backward][heddle_dtype_size(a->dtype) == 2][dim <= 32 ? 0 : dim <= 64 ? 1 : 2];
    const int64_t walked = backward ? a->sq * (a->h / a->hk) + a->sk : a->sk;
    double large = t->start + t->row * ((double)walked < t->rows ? (double)walked : t->rows);
    if (!backward && a->sq <= 64 && large < 8.6)
        large = 8.6; /* not for Hopper's own */
    return (prediction){backward ? small_backward(a, device, t, dim) : small_forward(a, device, t), large};
}

bool heddle__cuda_attention_is_small(const heddle_attention *a, const attention_device *device, heddle_pass pass,
                                     int dim) {
    if (!a->b || !a->sq || !a->sk || ((a->features & HEDDLE_VARLEN) && (!a->total_q || !a->total_k)) || a->sq > 4096 ||
        a->sk > 4096)
        return false;
    if (pass == HEDDLE_BACKWARD && heddle__cuda_attention_has_few_keys(a)) /* a launch more: nothing is gained */
        return false;
    prediction of = predict(a, device, pass, dim);
    if (heddle_dtype_size(a->dtype) == 4) {
        /* Both passes or none: the families round float32 scores differently, and where few keys share a row, P = exp(S - lse)
         * with the lse of another family is wrong by more than plain float32 would be. */
        const prediction other = predict(a, device, pass == HEDDLE_FORWARD ? HEDDLE_BACKWARD : HEDDLE_FORWARD, dim);
        of = (prediction){of.small + other.small, of.large + other.large};
    }
    return of.small < 0.85 * of.large;
}

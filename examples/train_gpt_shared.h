/* SPDX-License-Identifier: Apache-2.0
 *
 * What the two models of train_gpt.c, in float and in double, have in common. */
#ifndef TRAIN_GPT_SHARED
#define TRAIN_GPT_SHARED

#include "heddle.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>
#include <time.h>

typedef struct gpt_config {
    int layers, width, heads, context, batch, vocabulary;
    heddle_device device;
} gpt_config;

/* One parameter tensor and where it begins in the flat arrays of values, gradients and moments. */
typedef struct gpt_tensor {
    const char *name;
    int layer; /* -1: of the whole model */
    bool matrix;
    int64_t rows, cols, at;
} gpt_tensor;

/* The order of the tensors: those of the model, then those of each layer. A norm-linear's four follow each other. */
enum { TOKEN, POSITION, NORM_VOCAB, MODEL_TENSORS = NORM_VOCAB + 4 };
enum { NORM_QKV, W_PROJ = NORM_QKV + 4, B_PROJ, NORM_UP, W_DOWN = NORM_UP + 4, B_DOWN, LAYER_TENSORS };
enum { GAMMA, BETA, WEIGHT, BIAS };

static int layer_tensor(int layer, int which) {
    return MODEL_TENSORS + layer * LAYER_TENSORS + which;
}

static int tensor_count(const gpt_config *c) {
    return layer_tensor(c->layers, 0);
}

/* Fills table[tensor_count(c)] and returns the number of parameters. */
static int64_t lay_out_tensors(const gpt_config *c, gpt_tensor *table) {
    const int64_t w = c->width, v = c->vocabulary;
    const gpt_tensor model[MODEL_TENSORS] = {
        {"token", -1, true, v, w, 0},   {"position", -1, true, c->context, w, 0}, {"gamma_f", -1, false, 1, w, 0},
        {"beta_f", -1, false, 1, w, 0}, {"w_vocab", -1, true, v, w, 0},           {"b_vocab", -1, false, 1, v, 0},
    };
    const gpt_tensor layer[LAYER_TENSORS] = {
        {"gamma_1", 0, false, 1, w, 0},   {"beta_1", 0, false, 1, w, 0},    {"w_qkv", 0, true, 3 * w, w, 0},
        {"b_qkv", 0, false, 1, 3 * w, 0}, {"w_proj", 0, true, w, w, 0},     {"b_proj", 0, false, 1, w, 0},
        {"gamma_2", 0, false, 1, w, 0},   {"beta_2", 0, false, 1, w, 0},    {"w_up", 0, true, 4 * w, w, 0},
        {"b_up", 0, false, 1, 4 * w, 0},  {"w_down", 0, true, w, 4 * w, 0}, {"b_down", 0, false, 1, w, 0},
    };
    int64_t at = 0;
    for (int i = 0; i < tensor_count(c); i++) {
        int l = i < MODEL_TENSORS ? -1 : (i - MODEL_TENSORS) / LAYER_TENSORS;
        table[i] = l < 0 ? model[i] : layer[(i - MODEL_TENSORS) % LAYER_TENSORS];
        table[i].layer = l;
        table[i].at = at;
        at += table[i].rows * table[i].cols;
    }
    return at;
}

/* Aligned to heddle's 64 bytes and zeroed; the program ends here if there is no memory. */
static void *allocate(size_t bytes) {
    size_t rounded = (bytes + 63) / 64 * 64;
    void *p = bytes > SIZE_MAX - 63 ? NULL : aligned_alloc(64, rounded ? rounded : 64);
    if (!p) {
        fprintf(stderr, "train_gpt: out of memory: %zu bytes more were wanted\n", bytes);
        exit(2);
    }
    return memset(p, 0, rounded);
}

static void must(heddle_status status, const char *what) {
    if (status == HEDDLE_OK)
        return;
    fprintf(stderr, "train_gpt: %s: %s (%s)\n", what, heddle_last_message(), heddle_status_string(status));
    exit(2);
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. */
static uint64_t random_bits(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* In (0, 1]. */
static double random_uniform(uint64_t *state) {
    return (double)((random_bits(state) >> 11) + 1) * 0x1p-53;
}

static double random_normal(uint64_t *state) {
    const double radius = sqrt(-2 * log(random_uniform(state)));
    return radius * cos(6.283185307179586 * random_uniform(state));
}

/* Tile and block of the matrix product, block of GELU. */
enum { TILE = 8, BLOCK = 128, GELU_BLOCK = 1024 };

/* The loader picks the version that suits the processor. Sanitizers cannot start before it does. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PER_PROCESSOR __attribute__((target_clones("fma", "default")))
#else
#define PER_PROCESSOR
#endif

static int64_t at_most(int64_t x, int64_t limit) {
    return x < limit ? x : limit;
}

#endif

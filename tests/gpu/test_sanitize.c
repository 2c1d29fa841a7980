/* SPDX-License-Identifier: Apache-2.0
 * A small sweep over every kernel, for compute-sanitizer. Results are compared elsewhere. */
#include "common.h"

#include <stdlib.h>
#include <string.h>

/* Of n rows so many that nothing is left out: the kernels of `small` have no rings and no tiles to fill more than once, and a check of
 * what one of their blocks does in shared memory takes as long as it has keys. */
static int64_t rows(int64_t n) {
    const char *family = getenv("HEDDLE_CUDA_FAMILY");
    return family && strcmp(family, "small") == 0 ? n / 4 : n;
}

static void test_norm_linear(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{5, 17, 3}, {260, 72, 136}};
    for (int x = 0; x < 12; x++) { /* a seed that three divides moves the tensors off their alignment */
        norm_linear_case c = {.a = norm_linear_desc(test_dtypes[x % 3], (heddle_norm)(x / 3 % 2), sizes[x / 6][0],
                                                    sizes[x / 6][1], sizes[x / 6][2]),
                              .seed = (uint64_t)x / 3 + 1};
        c.a.features = x % 4 == 0 ? HEDDLE_TF32 : 0;
        norm_linear_problem p = norm_linear_new(&c);
        norm_linear_run(&p, HEDDLE_FORWARD);
        norm_linear_run(&p, HEDDLE_BACKWARD);
        norm_linear_free(&p);
    }
}

/* On Hopper: so many tiles of a product that the plan takes them wide; of fwd, dx and dw in turn. dW of the first is taken in shares. */
static void test_wide_tiles(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{2040, 72, 1152}, {2040, 1152, 72}, {72, 1152, 2040}};
    for (int x = 0; x < 6; x++) {
        const int64_t *s = sizes[x % 3];
        norm_linear_case c = {.a = norm_linear_desc(test_dtypes[1 + x % 2], (heddle_norm)(x % 2), s[0], s[1], s[2]),
                              .seed = 1};
        norm_linear_problem p = norm_linear_new(&c);
        norm_linear_run(&p, HEDDLE_FORWARD);
        norm_linear_run(&p, HEDDLE_BACKWARD);
        norm_linear_free(&p);
    }
}

static void run_attention(const attention_case *c) {
    attention_problem p = attention_new(c);
    attention_run(&p, HEDDLE_FORWARD);
    attention_run(&p, HEDDLE_BACKWARD);
    attention_free(&p);
}

static void test_attention(void **state) {
    (void)state;
    static const int64_t dims[] = {20, 64, 128, 200, 260};
    for (size_t x = 0; x < COUNT(dims); x++)
        for (size_t y = 0; y < TEST_DTYPES; y++) {
            attention_case c = {.a = attention_desc(test_dtypes[y], 1, 2, 1, 70, 90, dims[x], dims[x]),
                                .seed = x * 3 + y};
            c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
            c.a.features = HEDDLE_DETERMINISTIC;
            run_attention(&c);
            c.v_magnitude = INFINITY; /* what is not finite is marked, by one thread for all */
            run_attention(&c);
            c.v_magnitude = 0;
            c.a.features |= HEDDLE_ALIBI | HEDDLE_BIAS | HEDDLE_BOOL_MASK | HEDDLE_SINKS | HEDDLE_WEIGHTS;
            c.a.softcap = 8;
            c.a.dropout = 0.2;
            run_attention(&c);
            c.a = attention_desc(test_dtypes[y], 1, 4, 1, 1, 1000, dims[x], dims[x]);
            run_attention(&c);
        }
}

/* So many keys and queries that places in shared memory are filled more than once. */
static void test_many_tiles(void **state) {
    (void)state;
    static const int64_t dims[] = {64, 128, 256};
    for (size_t x = 0; x < COUNT(dims); x++)
        for (size_t y = 0; y < TEST_DTYPES; y++)
            for (int z = 0; z < (dims[x] == 128 ? 3 : 2); z++) { /* the third has many queries to a head of keys */
                attention_case c = {.a = attention_desc(test_dtypes[y], 1, z == 2 ? 64 : 2, 1, z == 2 ? 128 : rows(200),
                                                        z == 2 ? 130 : rows(700), dims[x], dims[x]),
                                    .seed = x * 3 + y};
                c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
                c.a.features = z == 1 ? HEDDLE_DETERMINISTIC : 0;
                run_attention(&c);
            }
}

/* The options that change scores and no others: on Hopper the full kernels, in backward of both kinds. */
static void test_scores(void **state) {
    (void)state;
    static const int64_t dims[] = {64, 128, 256};
    static const int options_of_float32[] = {8, 9, 10, 1, 9, 8};
    for (int z = 0; z < 18; z++) {
        const int x = z < 12 ? z : options_of_float32[z - 12];
        const int64_t d = z < 12 ? dims[x % 3] : dims[z % 2];
        attention_case c = {
            .a = attention_desc(z < 12 ? test_dtypes[1 + x % 2] : HEDDLE_F32, 2, 2, 1, rows(200), rows(392), d, d),
            .seed = 1,
            .mask_tiles = 128};
        c.a.mask = (heddle_mask)(x % 3);
        c.a.softcap = x < 6 ? 20 : 0;
        const uint64_t added = x < 6       ? 0
                               : x % 4 < 2 ? HEDDLE_BIAS
                                           : HEDDLE_ALIBI; /* to capped scores: sm80's backward */
        c.a.features = HEDDLE_BOOL_MASK | added | (x % 2 ? HEDDLE_DETERMINISTIC : 0);
        c.a.dbias_stride =
            added & HEDDLE_BIAS && x % 4 == 0 ? (heddle_strides){0, 0, rows(392)} : (heddle_strides){0, 0, 0};
        run_attention(&c);
    }
}

/* Each option by itself and with the next, over tiles enough that sm80 has kernels of its own for them. */
static void test_options(void **state) {
    (void)state;
    static const int64_t dims[] = {64, 128, 256};
    for (int x = 0; x < 15; x++) {
        const int64_t d = dims[x % 3];
        attention_case c = {.a = attention_desc(test_dtypes[1 + x % 2], 1, 2, 1, rows(200), rows(260), d, d),
                            .seed = 1,
                            .mask_tiles = 128};
        c.a.mask = x % 2 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        for (int y = x / 3; y <= x / 3 + (x % 3 == 2); y++)
            switch (y % 5) {
            case 0: c.a.softcap = 20; break;
            case 1: c.a.features |= HEDDLE_ALIBI; break;
            case 2: c.a.features |= HEDDLE_BOOL_MASK; break;
            case 3: c.a.features |= HEDDLE_BIAS; break;
            default: c.a.dropout = 0.2;
            }
        run_attention(&c);
    }
}

/* Each option by itself over d 128, for which Hopper has kernels of their own; a bias that is the same for all queries; from 12 on dropout
 * with a mask. */
static void test_one_option(void **state) {
    (void)state;
    static const int64_t dims[] = {64, 128, 192, 256};
    for (int x = 0; x < 16; x++) {
        const int64_t d = x < 4 || x >= 12 ? dims[x % 4] : dims[2 + (x + x / 8) % 2];
        attention_case c = {.a = attention_desc(test_dtypes[1 + x % 2], 1, 2, 1, rows(200), rows(260), d, d),
                            .seed = 1,
                            .mask_tiles = 128};
        c.a.mask = x % 3 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        const int option = x < 4 ? 3 : x >= 12 ? 2 : x % 4;
        c.a.features = option == 3 ? HEDDLE_BIAS : option == 1 || x >= 12 ? HEDDLE_BOOL_MASK : 0;
        c.a.bias_stride.h = x < 4 ? rows(260) : 0; /* 0, 0, 0: as tensors usually lie */
        c.a.softcap = option == 0 ? 20 : 0;
        c.a.dropout = option == 2 ? 0.2 : 0;
        c.huge_bias = x % 2 ? -INFINITY : 0;
        run_attention(&c);
    }
}

/* Head dims over 256, of which Hopper has kernels for 320, 384 and 512. */
static void test_wide_heads(void **state) {
    (void)state;
    static const int64_t dims[] = {320, 384, 512};
    for (int x = 0; x < 6; x++) {
        attention_case c = {.a = attention_desc(test_dtypes[1 + x % 2], 1, 1, 1, 70, 140, dims[x % 3], dims[x % 3]),
                            .seed = 1};
        c.a.mask = x < 3 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        run_attention(&c);
    }
}

/* Keys in pages, of 8 bits, and both: of one query and of a chunk of them. */
static void test_pages_and_bytes(void **state) {
    (void)state;
    static const int32_t lengths[] = {203, 130};
    for (int x = 0; x < 12; x++) {
        attention_case c = {.a = attention_desc(test_dtypes[x % TEST_DTYPES], 2, 4, 2, x % 2 ? 1 : 37, 203, 128, 128),
                            .seed = 1};
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.len_k = lengths;
        c.a.features = HEDDLE_SEQLENS | (x < 8 ? HEDDLE_PAGES : 0) | (x < 4 ? 0 : HEDDLE_E4M3);
        if (x < 8) {
            c.a.page = x % 4 < 2 ? 16 : 64;
            c.a.pages = c.a.b * ((c.a.sk + c.a.page - 1) / c.a.page);
        }
        if (heddle_attention_supported(&c.a, NULL, 0) != HEDDLE_OK)
            continue; /* small has none of 8 bits */
        attention_problem p = attention_new(&c);
        attention_run(&p, HEDDLE_FORWARD);
        attention_free(&p);
    }
}

/* What is made a boolean mask there: its map of tiles, and its bits and bytes, are kernels' of their own. */
static void test_segments_and_blocks(void **state) {
    (void)state;
    static const int64_t dims[] = {64, 128, 256};
    for (int x = 0; x < 12; x++) {
        const int64_t d = dims[x % 3];
        attention_case c = {.a = attention_desc(test_dtypes[x % 4 % TEST_DTYPES], 2, 2, 1, rows(200), rows(390), d, d),
                            .seed = 1,
                            .segments = 1 + x % 4,
                            .block_density = 0.5};
        c.a.mask = x % 2 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        c.a.features = x < 6 ? HEDDLE_SEGMENTS : HEDDLE_BLOCKS;
        if (x >= 6) {
            c.a.block_q = x % 2 ? 128 : 64;
            c.a.block_k = x % 3 ? 64 : 128;
            c.a.blocks_of_b = (uint8_t)(x & 1);
            c.a.blocks_of_h = (uint8_t)(x >> 1 & 1);
        }
        if (x % 3 == 0) /* which read bytes */
            c.a.features |= HEDDLE_WEIGHTS;
        run_attention(&c);
    }
}

/* dbias of a bias of [b, h, sq, sk], a sum over nothing: on Hopper in 16 bits backward writes it. */
static void test_own_dbias(void **state) {
    (void)state;
    for (int x = 0; x < 6; x++) {
        const int64_t d = x % 2 ? 128 : 64;
        attention_case c = {.a = attention_desc(test_dtypes[x % TEST_DTYPES], 2, 2, 1, rows(200), rows(392), d, d),
                            .seed = 1};
        c.a.features = HEDDLE_BIAS | (x < 3 ? 0 : HEDDLE_DETERMINISTIC);
        run_attention(&c);
    }
}

/* Activations of two halves, which Hopper forms in its products where rows begin at multiples of 16 bytes; a wide tile; few rows. */
static void test_halves(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{8, 64, 20}, {70, 96, 48}, {260, 72, 136}, {2040, 72, 576}};
    for (int x = 0; x < 16; x++) {
        const int64_t *s = sizes[x % 4];
        norm_linear_case c = {
            .a = norm_linear_desc(test_dtypes[x / 4 % TEST_DTYPES], (heddle_norm)(x % 3), s[0], s[1], s[2]),
            .seed = (uint64_t)x / 4 + 1};
        c.a.activation = (heddle_activation)(HEDDLE_GEGLU + x % 3);
        c.a.features = HEDDLE_ACTIVATION | (x % 2 ? HEDDLE_RESIDUAL : 0);
        norm_linear_problem p = norm_linear_new(&c);
        norm_linear_run(&p, HEDDLE_FORWARD);
        norm_linear_run(&p, HEDDLE_BACKWARD);
        norm_linear_free(&p);
    }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm_linear),     cmocka_unit_test(test_wide_tiles),
        cmocka_unit_test(test_attention),       cmocka_unit_test(test_many_tiles),
        cmocka_unit_test(test_scores),          cmocka_unit_test(test_options),
        cmocka_unit_test(test_one_option),      cmocka_unit_test(test_wide_heads),
        cmocka_unit_test(test_pages_and_bytes), cmocka_unit_test(test_segments_and_blocks),
        cmocka_unit_test(test_own_dbias),       cmocka_unit_test(test_halves)};
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

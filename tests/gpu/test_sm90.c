/* SPDX-License-Identifier: Apache-2.0
 * Attention in the sizes of the kernels for Hopper: several tiles, cut in every way. On another GPU, or with HEDDLE_CUDA_FAMILY=sm80, the
 * same problems go to the other kernels. */
#define _POSIX_C_SOURCE 200809L
#include "common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The state of a test: does it run in float32, or in turn in the types of 16 bits? */
static bool float32 = true;

static heddle_dtype type_of(void **state, size_t x) {
    return *state ? HEDDLE_F32 : x % 2 ? HEDDLE_F16 : HEDDLE_BF16;
}

/* Seeds that three divides would move the tensors off their alignment. */
static attention_case make_case(heddle_dtype dtype, int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d,
                                int64_t dv) {
    return (attention_case){.a = attention_desc(dtype, b, h, hk, sq, sk, d, dv),
                            .seed = (uint64_t)((sq * 7 + sk + d + dv) * 3 + 1),
                            .poison_masked = true};
}

static void expect_family_of(const attention_case *c, heddle_pass pass, const char *family) {
    char name[128] = "";
    heddle_attention a = c->a;
    const char *wanted = getenv("HEDDLE_CUDA_FAMILY");
    a.size = sizeof a;
    a.device = HEDDLE_CUDA;
    a.hk = a.hk ? a.hk : a.h;
    a.dv = a.dv ? a.dv : a.d;
    char device[160] = "";
    heddle_device_describe(HEDDLE_CUDA, device, sizeof device);
    if (!strstr(device, "sm_90") || (wanted && strcmp(wanted, "sm80") == 0))
        family = "sm80";
    assert_int_equal(heddle_attention_kernel(&a, pass, name, sizeof name), HEDDLE_OK);
    if (!strstr(name, family)) {
        attention_print(c);
        fail_msg("the plan chose %s, expected was %s", name, family);
    }
}

static void expect_family(const attention_case *c, const char *family) {
    expect_family_of(c, HEDDLE_FORWARD, family);
    expect_family_of(c, HEDDLE_BACKWARD, family);
}

#define FEW_KEYS 128 /* of a query, up to which float32 is sm80's */

/* Every other problem asks for the same bits every time, which the backward has kernels of their own for. */
static void check(attention_case *c) {
    static int count;
    if (count++ % 2)
        c->a.features |= HEDDLE_DETERMINISTIC;
    const int64_t right =
        c->a.mask != HEDDLE_MASK_NONE && (c->a.window_right < 0 || c->a.window_right > 0) ? 0 : c->a.window_right;
    const bool few = c->a.sk <= FEW_KEYS || ((c->a.features & HEDDLE_WINDOW) && c->a.window_left >= 0 && right >= 0 &&
                                             c->a.window_left + right < FEW_KEYS);
    const bool other = c->a.dtype == HEDDLE_F32 && few;
    expect_family(c, other ? "sm80" : "sm90");
    check_attention(c);
}

static void test_masks(void **state) {
    static const int64_t lengths[][2] = {{200, 333}, {333, 200}, {130, 130}, {193, 257}}, dims[] = {64, 128, 96, 72};
    for (size_t x = 0; x < COUNT(lengths); x++)
        for (int mask = 0; mask <= LAST_MASK; mask++) {
            attention_case c =
                make_case(type_of(state, x + (size_t)mask), 1, 2, 2, lengths[x][0], lengths[x][1], dims[x], 0);
            c.a.mask = (heddle_mask)mask;
            check(&c);
        }
}

static void test_windows(void **state) {
    static const int64_t windows[][2] = {{0, 0}, {40, 0}, {150, 9}, {-1, 33}, {70, -1}, {300, 300}};
    for (size_t x = 0; x < COUNT(windows); x++) {
        attention_case c = make_case(type_of(state, x), 1, 1, 1, x % 2 ? 260 : 330, 290,
                                     x % 3 == 0   ? 64
                                     : x % 3 == 1 ? 128
                                                  : 200,
                                     0);
        c.a.features = HEDDLE_WINDOW;
        c.a.window_left = windows[x][0];
        c.a.window_right = windows[x][1];
        c.a.mask = (heddle_mask)(x % 3);
        check(&c);
    }
}

/* Head dims that do not fill a tile, and dv that is not d. */
static void test_head_dims(void **state) {
    static const int64_t dims[][2] = {{8, 8},   {40, 64},  {72, 24},   {64, 128},  {128, 40},  {96, 96},
                                      {88, 96}, {104, 96}, {120, 120}, {192, 128}, {256, 256}, {136, 64}};
    for (size_t x = 0; x < COUNT(dims); x++) {
        attention_case c = make_case(type_of(state, x), 1, 2, 1, 150, 170, dims[x][0], dims[x][1]);
        c.a.mask = (heddle_mask)(x % 3);
        check(&c);
    }
}

/* Head dims over 256: where dv is, too, blocks of forward make a half of the columns of o; backward has kernels without atomics alone. In
 * the end more tiles than multiprocessors. */
static void test_wide(void **state) {
    static const int64_t dims[][2] = {{512, 512}, {320, 320}, {384, 384}, {264, 264}, {504, 512}, {512, 128},
                                      {64, 400},  {392, 264}, {304, 344}, {384, 384}, {320, 320}, {512, 512}};
    static const int32_t cu_q[] = {0, 150, 150, 413, 470}, cu_k[] = {0, 200, 231, 231, 501};
    static const int32_t len_q[] = {0, 170, 211, 1}, len_k[] = {130, 0, 190, 129};
    for (size_t x = 0; x < COUNT(dims); x++) {
        const bool many = x == COUNT(dims) - 1;
        const int kind = many ? 0 : (int)(x % 4);
        attention_case c = make_case(type_of(state, x), kind > 1 ? 4 : 1, many ? 71 : 4,
                                     many    ? 71
                                     : x % 3 ? 4
                                             : 2,
                                     many ? 140 : 270, many ? 90 : 280, dims[x][0], dims[x][1]);
        c.a.mask = (heddle_mask)((x + 2) % 3);
        c.a.features = kind == 0   ? HEDDLE_SINKS
                       : kind == 1 ? HEDDLE_WINDOW
                       : kind == 2 ? HEDDLE_VARLEN
                                   : HEDDLE_SEQLENS;
        c.a.window_left = kind == 1 ? 90 : 0;
        c.a.window_right = kind == 1 ? 20 : 0;
        c.a.total_q = kind == 2 ? 480 : 0; /* rows past the last sequence belong to none */
        c.a.total_k = kind == 2 ? 510 : 0;
        c.cu_q = kind == 2 ? cu_q : NULL;
        c.cu_k = kind == 2 ? cu_k : NULL;
        c.len_q = kind == 3 && x % 3 ? len_q : NULL;
        c.len_k = kind == 3 && x % 3 != 1 ? len_k : NULL;
        c.first_part = kind == 0 && !many ? 100 : 0; /* o is added to */
        c.poison_masked = !many;
        c.skip = many ? 1u << T_LSE : 0;
        expect_family_of(&c, HEDDLE_FORWARD, "sm90");
        expect_family_of(&c, HEDDLE_BACKWARD, "sm90");
        check_attention(&c);
    }
}

/* More pairs of tiles than multiprocessors, tiles even and odd in number: blocks take several. */
static void test_many_tiles(void **state) {
    static const int64_t sizes[][3] = {{200, 140, 16}, {300, 150, 80}, {450, 140, 8}, {130, 136, 72}, {260, 140, 136}};
    for (size_t x = 0; x < COUNT(sizes); x++) {
        attention_case c = make_case(type_of(state, x), x == 3 ? 7 : 3, x % 3 == 1 ? 33 : 47, x % 3 == 1 ? 11 : 47,
                                     sizes[x][0], sizes[x][1], sizes[x][2], 0);
        c.a.mask = x % 2 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        c.a.features = HEDDLE_SINKS;
        c.poison_masked = false; /* too slow for so many heads */
        c.skip = 1u << T_LSE;
        check(&c);
    }
}

/* Many short tiles of queries to a block, whose threads tell each other where the results go: the same bits each time. */
static void test_same_bits(void **state) {
    for (size_t x = 0; x < 2; x++) {
        attention_case c = make_case(type_of(state, x), 9, 47, 47, 300, 300, x ? 64 : 128, 0);
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        attention_problem p = attention_new(&c);
        const tensor *o = &p.t[T_O];
        const size_t bytes = (size_t)o->span * element_size(o->element);
        unsigned char *first = malloc(bytes);
        assert_non_null(first);
        for (int run = 0; run < 12; run++) {
            attention_run(&p, HEDDLE_FORWARD);
            if (run == 0)
                memcpy(first, o->host, bytes);
            assert_int_equal(memcmp(first, o->host, bytes), 0);
        }
        free(first);
        attention_free(&p);
    }
}

/* Many tiles in the backward, whose blocks share the sums of dQ: three or four steps to a tile of keys. The third has
 * many steps to some tiles. */
static void test_many_tiles_backward(void **state) {
    static const int64_t sizes[][5] = {{45, 45, 130, 140, 72},
                                       {45, 45, 66, 140, 64},
                                       {12, 12, 1030, 1024, 72},
                                       {12, 4, 200, 290, 256},
                                       {15, 15, 130, 200, 136}};
    for (size_t x = 0; x < COUNT(sizes); x++) {
        const int64_t *s = sizes[x];
        attention_case c = make_case(type_of(state, x), 3, s[0], s[1], s[2], s[3], s[4], 0);
        c.a.mask = x ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        if (x == 2) {
            c.a.features = HEDDLE_WINDOW;
            c.a.window_left = 100;
        }
        c.poison_masked = false;
        expect_family(&c, "sm90");
        check_attention(&c);
    }
}

/* Many queries to a head of keys, in every way that their rows are cut. */
static void test_many_queries(void **state) {
    static const int32_t cu_q[] = {0, 150, 150, 150, 413, 414, 470}, cu_k[] = {0, 200, 200, 231, 500, 501, 501};
    static const int32_t len_q[] = {0, 170, 211, 1}, len_k[] = {130, 0, 190, 129};
    for (int x = 0; x < 4; x++) {
        attention_case c = make_case(type_of(state, (size_t)x), 1, 60, 1, 140 + x, 150, x % 3 ? 128 : 80, 0);
        c.a.mask = (heddle_mask)(x % 3);
        c.skip = x == 3 ? 1u << T_DQ : 0;
        expect_family(&c, "sm90");
        check_attention(&c);
        c = make_case(type_of(state, (size_t)x), 6, 31, 1, 270, 280, 128, 0);
        c.a.mask = (heddle_mask)(x % 3);
        c.a.features = HEDDLE_VARLEN;
        c.a.total_q = 480; /* rows past the last sequence belong to none */
        c.a.total_k = 510;
        c.cu_q = cu_q;
        c.cu_k = cu_k;
        check_attention(&c);
        c = make_case(type_of(state, (size_t)x), 4, 39, 1, 211, 190, 128, 0);
        c.a.mask = (heddle_mask)(x % 3);
        c.a.features = HEDDLE_SEQLENS;
        c.len_q = x % 3 == 1 ? NULL : len_q;
        c.len_k = x % 3 == 2 ? NULL : len_k;
        check_attention(&c);
    }
}

static void test_groups_and_sinks(void **state) {
    static const int64_t heads[][2] = {{6, 2}, {4, 1}};
    for (size_t x = 0; x < COUNT(heads); x++) {
        attention_case c = make_case(type_of(state, x), 2, heads[x][0], heads[x][1], 140, 150, x ? 64 : 128, 0);
        c.a.features = HEDDLE_SINKS;
        c.a.mask = (heddle_mask)(2 - x);
        check(&c);
    }
}

static void test_packed(void **state) {
    static const int32_t cu_q[] = {0, 150, 150, 150, 413, 414, 470}, cu_k[] = {0, 200, 200, 231, 500, 501, 501};
    static const int64_t dims[] = {64, 96, 192, 128, 256};
    for (int x = 0; x < 5; x++) {
        attention_case c = make_case(type_of(state, x), 6, 2, 1, 270, 280, dims[x], 0);
        c.a.features = HEDDLE_VARLEN | (x == 3 ? HEDDLE_WINDOW : 0);
        c.a.total_q = 480; /* rows past the last sequence belong to none */
        c.a.total_k = 510;
        c.cu_q = cu_q;
        c.cu_k = cu_k;
        c.a.mask = (heddle_mask)(x % 3);
        if (x == 3) {
            c.a.window_left = 100;
            c.a.window_right = 50;
        }
        check(&c);
    }
}

static void test_lengths(void **state) {
    static const int32_t len_q[] = {0, 170, 211, 1}, len_k[] = {130, 0, 190, 129};
    static const int64_t dims[] = {64, 128, 72, 160, 256, 96};
    for (int x = 0; x < 6; x++) {
        attention_case c = make_case(type_of(state, x), 4, 2, 1, 211, 190, dims[x], 0);
        c.a.features = HEDDLE_SEQLENS;
        c.len_q = x % 3 == 1 ? NULL : len_q;
        c.len_k = x % 3 == 2 ? NULL : len_k;
        c.a.mask = (heddle_mask)(x % 3);
        check(&c);
    }
}

/* The options that change scores: the family's kernels, with one option or all; but in 16 bits the backward is another family's where
 * something is added to capped scores. */
static void check_full(attention_case *c) {
    static int count;
    if (count++ % 4 == 1) /* not in step with their head dims */
        c->a.features |= HEDDLE_DETERMINISTIC;
    const bool mixed = c->a.dtype != HEDDLE_F32 && c->a.softcap > 0 && c->a.features & (HEDDLE_ALIBI | HEDDLE_BIAS);
    expect_family_of(c, HEDDLE_FORWARD, "sm90");
    expect_family_of(c, HEDDLE_BACKWARD, mixed ? "sm80" : "sm90");
    check_attention(c);
}

static void test_scores(void **state) {
    static const int64_t sizes[][4] = {
        {200, 333, 64, 64}, {333, 200, 128, 128}, {130, 290, 256, 256}, {300, 257, 96, 40}};
    for (int x = 0; x < 16; x++) {
        const int64_t *s = sizes[x % 4];
        attention_case c = make_case(type_of(state, (size_t)(x / 2)), 2, 4, x % 3 ? 4 : 2, s[0], s[1], s[2], s[3]);
        c.a.mask = (heddle_mask)(x % 3);
        c.a.softcap = x % 4 == 1 ? 0 : x % 5 ? 20 : 3;
        c.a.features = (x / 4 % 2 ? HEDDLE_ALIBI : 0) | (x % 7 == 3 ? HEDDLE_SINKS : 0);
        c.a.alibi_stride_b = x % 8 > 4 && c.a.features & HEDDLE_ALIBI ? 4 : 0;
        if (c.a.softcap == 0 && !(c.a.features & HEDDLE_ALIBI))
            c.a.scale = -0.1;
        check_full(&c);
    }
}

/* Of every shape that repeats, in rows that begin at odd places, too; what is masked by a bias may be anything. */
static void test_biases(void **state) {
    const int64_t b = 2, h = 4;
    static const int64_t sizes[][3] = {{200, 333, 64}, {140, 264, 128}, {131, 290, 256}};
    for (int x = 0; x < 15; x++) {
        const int64_t sq = sizes[x % 3][0], sk = sizes[x % 3][1], row = x % 2 ? (sk + 7) / 8 * 8 : sk,
                      d = x % 9 == 5 ? 160 : sizes[x % 3][2];
        const heddle_strides shapes[] = {
            {h * sq * row, sq * row, row}, {0, sq * row, row}, {sq * row, 0, row}, {0, row, 0}, {h * row, row, 0}};
        attention_case c = make_case(type_of(state, (size_t)(x / 2)), b, h, x % 4 ? 4 : 1, sq, sk, d, 0);
        c.a.features = HEDDLE_BIAS | (x % 5 == 2 ? HEDDLE_ALIBI : 0);
        c.a.bias_stride = c.a.dbias_stride = shapes[x % 5];
        c.a.softcap = x % 4 == 3 ? 10 : 0;
        c.a.mask = (heddle_mask)(x / 3 % 3);
        c.huge_bias = x % 2 ? -INFINITY : 0;
        check_full(&c);
    }
}

/* The gradient of a bias with a mask; of each head in more tiles than there are multiprocessors, which take one after the other; alone, too. */
static void test_dbias(void **state) {
    const int64_t b = 2, h = 16;
    static const int64_t sizes[][3] = {{300, 520, 64}, {260, 390, 128}, {330, 450, 256}, {140, 270, 160}};
    for (int x = 0; x < 12; x++) {
        const int64_t sq = sizes[x % 4][0], sk = (sizes[x % 4][1] + 7) / 8 * 8, shapes = x % 3;
        attention_case c = make_case(type_of(state, (size_t)(x / 2)), b, h, x % 5 ? h : 4, sq, sk, sizes[x % 4][2], 0);
        c.a.features = HEDDLE_BIAS | (x % 6 ? HEDDLE_BOOL_MASK : 0);
        c.a.bias_stride = c.a.dbias_stride = shapes == 0   ? (heddle_strides){0, sq * sk, sk}
                                             : shapes == 1 ? (heddle_strides){h * sk, sk, 0}
                                                           : (heddle_strides){sq * sk, 0, sk};
        c.a.bool_mask_stride = x % 2 ? (heddle_strides){sk, 0, 0} : (heddle_strides){sq * sk, 0, sk};
        c.mask_tiles = x % 4 == 3 ? 0 : 128;
        c.a.mask = (heddle_mask)(x / 2 % 3);
        c.skip = x % 3 == 1 ? 0 : 1u << T_DQ | 1u << T_DK | 1u << T_DV;
        expect_family(&c, "sm90");
        check_attention(&c);
    }
}

/* Padding, tiles, single elements; for all queries, heads or batches the same, or not; from 20 on with dropout. */
static void test_bool_masks(void **state) {
    const int64_t b = 2, h = 4;
    static const int64_t sizes[][3] = {{300, 520, 64}, {420, 390, 128}, {330, 450, 256}};
    for (int x = 0; x < 40; x++) {
        const int64_t sq = sizes[x % 3][0], sk = sizes[x % 3][1], row = x % 2 ? (sk + 15) / 16 * 16 : sk,
                      d = x % 9 == 5 ? 192 : sizes[x % 3][2];
        const heddle_strides shapes[] = {
            {h * sq * row, sq * row, row}, {0, sq * row, row}, {sq * row, 0, row}, {row, 0, 0}};
        attention_case c = make_case(type_of(state, (size_t)(x / 2)), b, h, x % 4 ? 4 : 2, sq, sk, d, 0);
        c.a.features = HEDDLE_BOOL_MASK | (x % 6 == 5 ? HEDDLE_ALIBI : 0);
        c.a.dropout = x < 20 ? 0 : 0.3;
        c.a.bool_mask_stride = shapes[x % 4];
        c.a.mask = (heddle_mask)(x / 4 % 3);
        c.mask_tiles = x % 5 == 4 ? 0 : x % 5 == 3 ? 50 : 128;
        c.mask_rows = x % 7 == 3;
        c.mask_density = x % 7 == 6 ? 1e-9 : 0.9; /* nothing is seen at all, where tiles do not say so */
        check_full(&c);
    }
}

/* Alone, and with what else changes the scores; the bits themselves are tests/test_dropout.c's. */
static void test_dropout(void **state) {
    static const int64_t dims[] = {64, 128, 256, 96, 200, 160, 192};
    for (size_t x = 0; x < 3 * COUNT(dims); x++) {
        attention_case c =
            make_case(type_of(state, x), 2, 4, x % 2 ? 2 : 4, x % 3 ? 333 : 200, 290, dims[x % COUNT(dims)], 0);
        c.a.dropout = x % 2 ? 0.1 : 0.5;
        c.a.seed = x;
        c.a.offset = UINT64_C(1) << x * 3;
        c.a.mask = (heddle_mask)(x % 3);
        if (x >= COUNT(dims))
            c.a.features = x % 3 == 0   ? HEDDLE_ALIBI | HEDDLE_RNG_STATE
                           : x % 3 == 1 ? HEDDLE_BIAS | HEDDLE_SINKS
                                        : HEDDLE_BOOL_MASK;
        if (x >= COUNT(dims) && x % 2 && !(c.a.features & (HEDDLE_ALIBI | HEDDLE_BIAS)))
            c.a.softcap = 5;
        check(&c);
    }
}

static void test_layouts(void **state) {
    const int64_t b = 2, h = 4, hk = 2, sq = 140, sk = 150, d = 64;
    const char *const other = *state ? "sm90" : "sm80"; /* float32 is split as it lies */
    attention_case c = make_case(type_of(state, 0), b, h, hk, sq, sk, d, 0);
    c.a.q_stride = c.a.o_stride = c.a.do_stride = c.a.dq_stride = (heddle_strides){sq * h * d, d, h * d};
    c.a.k_stride = c.a.v_stride = c.a.dk_stride = c.a.dv_stride = (heddle_strides){sk * hk * d, d, hk * d};
    check(&c);
    c = make_case(type_of(state, 1), b, h, h, sq, sq, d, 0); /* rows of a packed [b, s, 3, h, d] */
    c.a.q_stride = c.a.k_stride = c.a.v_stride = c.a.dq_stride = c.a.dk_stride = c.a.dv_stride =
        (heddle_strides){sq * 3 * h * d, d, 3 * h * d};
    check(&c);
    c = make_case(type_of(state, 0), b, h, hk, sq, sk, d, 0); /* padded rows */
    c.a.q_stride = (heddle_strides){h * sq * 72 + 8, sq * 72, 72};
    c.a.k_stride = (heddle_strides){hk * sk * 80, sk * 80, 80};
    c.a.v_stride = (heddle_strides){80, b * 80, b * hk * 80};
    c.a.o_stride = (heddle_strides){h * sq * 88, sq * 88, 88};
    check(&c);
    /* What the copy engine cannot fetch falls back, but for float32: rows that are no multiple of 16 bytes, one set of keys for all. */
    c = make_case(type_of(state, 0), b, h, hk, sq, sk, d, 0);
    c.a.k_stride = (heddle_strides){hk * sk * 65, sk * 65, 65};
    expect_family(&c, other);
    check_attention(&c);
    c = make_case(type_of(state, 1), b, h, hk, sq, sk, d, 0);
    c.a.k_stride = (heddle_strides){0, sk * d, d};
    expect_family(&c, other);
    check_attention(&c);
    c = make_case(type_of(state, 1), b, h, hk, sq, sk, d, 0);
    c.seed = 3; /* pointers that are not aligned: known only when it runs */
    check(&c);
}

/* A value that some queries see is NaN or infinite: they are lost, the others are not. */
static void test_nan_value(void **state) {
    for (int x = 0; x < (*state ? 6 : 8); x++) {
        attention_case c = make_case(type_of(state, x), 1, 1, 1, 290, 290, 64 << x / 2, 0);
        c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
        attention_problem p = attention_new(&c);
        for (int64_t e = 0; e < c.a.d; e++) {
            tensor_set(&p.t[T_K], 0, 0, 200, e, x % 2 ? NAN : 0.5);
            tensor_set(&p.t[T_V], 0, 0, 200, e, x % 2 ? NAN : INFINITY);
        }
        tensor_upload(&p.t[T_K]);
        tensor_upload(&p.t[T_V]);
        attention_run(&p, HEDDLE_FORWARD);
        for (int64_t i = 0; i < 290; i++)
            for (int64_t e = 0; e < c.a.d; e++)
                assert_int_equal(!isfinite(tensor_get(&p.t[T_O], 0, 0, i, e)), i >= 200);
        attention_free(&p);
    }
}

/* The gradient of one row is NaN: the row's own gradient is lost, and those of the keys that it sees. */
static void test_nan_gradient(void **state) {
    static const int gradients[] = {T_DQ, T_DK, T_DV};
    for (int x = 0; x < 6; x++) {
        attention_case c = make_case(type_of(state, x), 1, 1, 1, 290, 290, 64 << x / 2, 0);
        c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
        attention_problem p = attention_new(&c);
        attention_run(&p, HEDDLE_FORWARD);
        tensor_set(&p.t[T_DOUT], 0, 0, 200, 5, NAN);
        tensor_upload(&p.t[T_DOUT]);
        attention_run(&p, HEDDLE_BACKWARD);
        for (size_t y = 0; y < COUNT(gradients); y++)
            for (int64_t i = 0; i < 290; i++) {
                int lost = 0;
                for (int64_t e = 0; e < c.a.d; e++)
                    lost += !isfinite(tensor_get(&p.t[gradients[y]], 0, 0, i, e));
                if (i == 200 || (y > 0 && i < 200))
                    assert_true(lost > 0);
                else
                    assert_int_equal(lost, 0);
            }
        attention_free(&p);
    }
}

/* o and lse alone. */
static void check_forward(const attention_case *c) {
    static const int outputs[] = {T_O, T_LSE};
    attention_problem p = attention_new(c);
    attention_problem ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
    attention_problem plain = attention_copy(&p, p.a.dtype, HEDDLE_REF);
    double natural[T_COUNT], unused[T_COUNT];
    expect_family(c, "sm90");
    attention_run(&p, HEDDLE_FORWARD);
    attention_run(&ref, HEDDLE_FORWARD);
    plain_attention(&plain, PLAIN_FORWARD, natural, unused);
    for (size_t x = 0; x < COUNT(outputs); x++) {
        const int t = outputs[x];
        if (!compare_tensor(attention_tensor_name[t], p.a.dtype, &p.t[t], &ref.t[t], &plain.t[t], natural[t], 0, 1)) {
            attention_print(c);
            fail_msg("the forward is wrong, see above");
        }
    }
    attention_free(&p);
    attention_free(&ref);
    attention_free(&plain);
}

/* Head dims and magnitudes that only float32 takes. */
static void test_odd_dims_and_magnitudes(void **state) {
    static const int64_t dims[][2] = {{3, 2}, {33, 57}, {101, 126}, {200, 3}, {256, 256}};
    static const double magnitudes[][3] = {
        {1, 1, 1e-30}, {1e-3, 1e3, 1e30}, {1e-25, 1e24, 1}, {3, 3, 1}, {1e-30, 1e-30, 1}};
    for (size_t x = 0; x < COUNT(magnitudes); x++) {
        attention_case c =
            make_case(type_of(state, 0), 2, 2, 1, 140, 260, dims[x % COUNT(dims)][0], dims[x % COUNT(dims)][1]);
        c.a.mask = (heddle_mask)(x % 3);
        c.q_magnitude = magnitudes[x][0];
        c.k_magnitude = magnitudes[x][1];
        c.v_magnitude = magnitudes[x][2];
        check_forward(&c);
    }
}

/* Each tile of V has a magnitude of its own, growing from tile to tile: what a row does not see does not spoil it. */
static void test_tiles_of_all_magnitudes(void **state) {
    for (int x = 0; x < 4; x++) {
        attention_case c = make_case(type_of(state, 0), 1, 1, 1, 400, 400, x % 2 ? 128 : 64, 0);
        c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
        attention_problem p = attention_new(&c);
        for (int64_t i = 0; i < 400; i++)
            for (int64_t e = 0; e < c.a.d; e++) {
                const int64_t tile = i / 64;
                const double by = pow(2, (x / 2 ? 13 : -7) * (double)tile);
                tensor_set(&p.t[T_V], 0, 0, i, e, tensor_get(&p.t[T_V], 0, 0, i, e) * by);
            }
        tensor_upload(&p.t[T_V]);
        attention_problem ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&ref, HEDDLE_FORWARD);
        for (int64_t i = 0; i < 400; i++) {
            double most = 0, worst = 0;
            for (int64_t e = 0; e < c.a.d; e++) {
                const double o = tensor_get(&ref.t[T_O], 0, 0, i, e);
                most = fmax(most, fabs(o));
                worst = fmax(worst, fabs(o - tensor_get(&p.t[T_O], 0, 0, i, e)));
            }
            if (!(worst <= 3e-6 * most))
                fail_msg("row %d: error %g of %g", (int)i, worst, most);
        }
        attention_free(&p);
        attention_free(&ref);
    }
}

#define IN(type, test)                                                                                                 \
    { #test ", " #type, test, NULL, NULL, type }
#define bits16 NULL
#define binary32 &float32

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
#define BOTH(test) IN(bits16, test), IN(binary32, test)
        BOTH(test_masks),
        BOTH(test_windows),
        BOTH(test_head_dims),
        IN(bits16, test_wide),
        BOTH(test_many_tiles),
        IN(bits16, test_same_bits),
        IN(bits16, test_many_tiles_backward),
        IN(bits16, test_many_queries),
        BOTH(test_groups_and_sinks),
        BOTH(test_packed),
        BOTH(test_lengths),
        BOTH(test_scores),
        BOTH(test_biases),
        BOTH(test_dbias),
        BOTH(test_bool_masks),
        IN(bits16, test_dropout),
        BOTH(test_layouts),
        BOTH(test_nan_value),
        BOTH(test_nan_gradient),
        IN(binary32, test_odd_dims_and_magnitudes),
        IN(binary32, test_tiles_of_all_magnitudes),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

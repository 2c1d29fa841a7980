/* SPDX-License-Identifier: Apache-2.0
 * Attention, forward and backward, against the reference in three types: every option, and what a mask hides. */
#include "common.h"

#include <math.h>

static void test_causal(void **state) {
    (void)state;
    static const int64_t lengths[][2] = {{33, 33}, {5, 64}, {64, 5}, {1, 113}, {113, 1}, {129, 128}, {70, 203}};
    for (size_t x = 0; x < COUNT(lengths); x++)
        for (heddle_mask mask = HEDDLE_CAUSAL_TOP_LEFT; (int)mask <= LAST_MASK; mask++) {
            attention_case c = attention_case_of(1, 2, 0, lengths[x][0], lengths[x][1], 16, 0);
            c.a.mask = mask;
            c.poison_masked = true;
            check_attention_dtypes(c);
        }
}

static void test_window(void **state) {
    (void)state;
    static const int64_t windows[][2] = {{0, 0},  {3, 0},   {0, 5},   {17, 2},     {-1, 4},
                                         {6, -1}, {-1, -1}, {64, 64}, {1000, 1000}};
    static const int64_t lengths[][2] = {{33, 33}, {7, 113}, {113, 7}, {150, 140}};
    for (size_t x = 0; x < COUNT(windows); x++)
        for (size_t y = 0; y < COUNT(lengths); y++) {
            attention_case c = attention_case_of(1, 1, 0, lengths[y][0], lengths[y][1], 16, 0);
            c.a.features = HEDDLE_WINDOW;
            c.a.window_left = windows[x][0];
            c.a.window_right = windows[x][1];
            c.a.mask = (heddle_mask)((x + y) % 3);
            c.a.dtype = test_dtypes[(x + 2 * y) % 3];
            c.poison_masked = true;
            check_attention(&c);
        }
}

static void test_softcap(void **state) {
    (void)state;
    static const double caps[] = {1000, 50, 2, 0.5};
    static const int32_t len_k[] = {140};
    for (size_t x = 0; x < COUNT(caps); x++) {
        attention_case c = attention_case_of(1, 2, 0, 40, 53, 32, 0);
        c.a.softcap = caps[x];
        c.q_magnitude = 2;
        check_attention_dtypes(c);
        c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
        c.q_magnitude = 30; /* saturated, but for the largest cap */
        c.ill_conditioned = true;
        check_attention(&c);
        c.a.features = HEDDLE_ALIBI | HEDDLE_SEQLENS; /* far away: more than the cap is added, and taken away for lse */
        c.a.mask = HEDDLE_MASK_NONE;
        c.len_k = len_k;
        c.a.sq = 270;
        c.a.sk = 200;
        for (int y = 1; y < TEST_DTYPES; y++) {
            c.a.dtype = test_dtypes[y];
            check_attention(&c);
        }
    }
}

static void test_alibi(void **state) {
    (void)state;
    for (int per_batch = 0; per_batch < 2; per_batch++)
        for (heddle_mask mask = HEDDLE_MASK_NONE; (int)mask <= LAST_MASK; mask++) {
            attention_case c = attention_case_of(3, 4, 2, 37, 50, 16, 0);
            c.a.features = HEDDLE_ALIBI;
            c.a.alibi_stride_b = per_batch ? 4 : 0;
            c.a.mask = mask;
            check_attention_dtypes(c);
        }
}

/* Steep slopes over many keys: whole blocks weigh nothing, and are seen all the same where a gradient is not finite. */
static void test_alibi_far_away(void **state) {
    (void)state;
    const int64_t sq = 90, sk = 700;
    for (int x = 0; x < 4; x++) {
        attention_case c = attention_case_of(1, 4, 2, sq, sk, x % 2 ? 16 : 64, 0);
        c.a.features = HEDDLE_ALIBI | (x == 1 ? HEDDLE_BIAS : 0) | (x == 2 ? HEDDLE_WEIGHTS : 0);
        c.a.dbias_stride = (heddle_strides){0, sq * sk, sk};
        c.a.softcap = x == 3 ? 5 : 0;
        c.a.mask = x % 2 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        c.seed += (uint64_t)x;
        check_attention_dtypes(c);
    }
    attention_case c = attention_case_of(1, 1, 0, sq, sk, 16, 0);
    c.a.features = HEDDLE_ALIBI;
    if (c.a.device == HEDDLE_CUDA)
        return;
    attention_problem p = attention_new(&c);
    tensor_raw_set(&p.t[T_ALIBI], 0, 1);
    tensor_set(&p.t[T_DOUT], 0, 0, 0, 3, INFINITY);
    tensor_upload(&p.t[T_ALIBI]);
    tensor_upload(&p.t[T_DOUT]);
    attention_run(&p, HEDDLE_FORWARD);
    attention_run(&p, HEDDLE_BACKWARD);
    for (int64_t j = 0; j < sk; j++) {
        assert_false(isfinite(tensor_get(&p.t[T_DV], 0, 0, j, 3)));
        assert_true(isfinite(tensor_get(&p.t[T_DV], 0, 0, j, 2)));
    }
    attention_free(&p);
}

static void test_bias(void **state) {
    (void)state;
    const int64_t b = 2, h = 2, sq = 35, sk = 67;
    const heddle_strides bias[] = {{0, 0, 0},
                                   {h * sq * sk, 0, sk},
                                   {0, sq * sk, sk},
                                   {0, 0, sk},
                                   {h * sk, sk, 0},
                                   {0, sq * (sk + 3), (sk + 3)},
                                   {HEDDLE_BROADCAST, HEDDLE_BROADCAST, HEDDLE_BROADCAST}};
    for (size_t x = 0; x < COUNT(bias); x++) {
        attention_case c = attention_case_of(b, h, 1, sq, sk, 16, 0);
        c.a.features = HEDDLE_BIAS;
        c.a.bias_stride = bias[x];
        c.a.dbias_stride = bias[x];
        c.a.mask = (heddle_mask)(x % 3);
        c.poison_masked = true;
        check_attention_dtypes(c);
        c.a.dbias_stride = bias[(x + 3) % COUNT(bias)]; /* dbias need not have bias's shape */
        check_attention(&c);
    }
}

/* dbias that is a sum over nothing, in rows of whole pieces of 16 bytes: on Hopper the kernel that makes dk writes it. Elements that nobody
 * sees are 0; with odd rows, a sum, or dbias alone, another kernel does. */
static void test_dbias_of_each(void **state) {
    (void)state;
    static const int32_t len_q[] = {0, 90, 160}, len_k[] = {70, 0, 261}, cu_q[] = {0, 0, 160, 230},
                         cu_k[] = {0, 50, 261, 300};
    enum { ALIKE = 1, ODD = 2, SUMMED = 4, ALONE = 8, PACKED = 16, HUGE_BIAS = 32 };
    static const struct {
        int64_t b, h, hk, sq, sk, d;
        uint64_t features;
        int mask, how;
    } rows[] = {{1, 2, 2, 200, 333, 64, 0, 0, 0},
                {2, 4, 2, 140, 264, 128, 0, 2, 0},
                {1, 1, 1, 330, 300, 128, HEDDLE_WINDOW, 1, HUGE_BIAS},
                {3, 2, 1, 160, 261, 64, HEDDLE_SEQLENS, 2, 0},
                {3, 2, 2, 160, 261, 128, HEDDLE_VARLEN, 1, 0},
                {1, 4, 1, 65, 129, 64, HEDDLE_SINKS, 0, ALIKE},
                {2, 2, 2, 300, 520, 64, HEDDLE_WINDOW, 2, HUGE_BIAS},
                {2, 2, 2, 130, 140, 72, 0, 0, SUMMED},
                {1, 2, 1, 130, 131, 64, 0, 1, ODD},
                {1, 2, 1, 70, 130, 128, 0, 0, PACKED},
                {1, 4, 2, 140, 261, 256, 0, 1, ODD},
                {2, 2, 1, 150, 264, 160, HEDDLE_WINDOW, 2, HUGE_BIAS},
                {1, 1, 1, 100, 200, 128, 0, 0, ALONE}};
    for (size_t x = 0; x < 2 * COUNT(rows); x++) {
        const size_t at = x % COUNT(rows);
        const int64_t sq = rows[at].sq, sk = rows[at].sk, h = rows[at].h, row = (sk + 7) / 8 * 8;
        attention_case c = attention_case_of(rows[at].b, h, rows[at].hk, sq, sk, rows[at].d, 0);
        c.a.dtype = test_dtypes[1 + x / COUNT(rows)];
        c.a.mask = (heddle_mask)rows[at].mask;
        c.a.features = HEDDLE_BIAS | rows[at].features;
        c.seed = 3 * (uint64_t)x + 1; /* tensors begin at multiples of 16 bytes */
        if (c.a.features & HEDDLE_WINDOW)
            c.a.window_left = 37, c.a.window_right = at % 2 ? 5 : -1;
        c.a.bias_stride = c.a.dbias_stride = (heddle_strides){h * sq * row, sq * row, row};
        if (rows[at].how & ALIKE)
            c.a.bias_stride = (heddle_strides){0, row, 0};
        if (rows[at].how & ODD)
            c.a.dbias_stride = (heddle_strides){0, sq * sk, sk};
        if (rows[at].how & SUMMED)
            c.a.dbias_stride.b = 0;
        if (rows[at].how & PACKED) /* rows of all heads in turn */
            c.a.dbias_stride = (heddle_strides){0, row, h * row};
        if (rows[at].how & ALONE)
            c.skip = 1u << T_DQ | 1u << T_DK | 1u << T_DV;
        c.len_q = c.a.features & HEDDLE_SEQLENS ? len_q : NULL;
        c.len_k = c.a.features & HEDDLE_SEQLENS ? len_k : NULL;
        if (c.a.features & HEDDLE_VARLEN) {
            c.a.total_q = 230, c.a.total_k = 300;
            c.cu_q = cu_q, c.cu_k = cu_k;
        }
        c.huge_bias = rows[at].how & HUGE_BIAS ? -INFINITY : 0;
        c.poison_masked = true;
        check_attention(&c);
    }
}

/* A bias that is the same for all queries, as padding is that is written in numbers: on Hopper backward has kernels for it. Some keys of a tile
 * have the least number, or -inf, and whole tiles; heads that share keys have biases of their own, or one. */
static void test_bias_of_keys(void **state) {
    (void)state;
    static const int32_t len_q[] = {90, 139}, len_k[] = {270, 333};
    static const struct {
        int64_t h, hk, sq, sk, d, huge_from;
        double huge;
        uint64_t features;
        int mask, how; /* 1: a row for each batch, 2: for each head */
    } rows[] = {{2, 2, 139, 333, 64, 0, 0, 0, 0, 1},
                {2, 1, 139, 333, 64, 100, -INFINITY, 0, 0, 1},
                {4, 2, 139, 333, 128, 130, -INFINITY, 0, 1, 2},
                {4, 1, 139, 333, 128, 128, -3.38e38, 0, 0, 3},
                {2, 2, 139, 333, 40, 40, -3.38e38, HEDDLE_SINKS, 2, 0},
                {2, 1, 139, 333, 160, 70, -INFINITY, 0, 0, 2},
                {2, 2, 139, 333, 192, 250, -3.38e38, HEDDLE_WINDOW, 1, 3},
                {2, 1, 139, 333, 256, 64, -INFINITY, HEDDLE_SEQLENS, 2, 1},
                {2, 1, 139, 333, 200, 0, 0, 0, 0, 2},
                {3, 3, 139, 333, 96, 128, -INFINITY, HEDDLE_SEQLENS, 1, 3}};
    for (size_t x = 0; x < 2 * COUNT(rows); x++) {
        const size_t at = x % COUNT(rows);
        const int64_t h = rows[at].h, sk = rows[at].sk;
        attention_case c = attention_case_of(2, h, rows[at].hk, rows[at].sq, sk, rows[at].d, 0);
        c.seed = 3 * (uint64_t)x + 1;
        c.a.dtype = test_dtypes[1 + x / COUNT(rows)];
        c.a.mask = (heddle_mask)rows[at].mask;
        c.a.features = HEDDLE_BIAS | rows[at].features;
        c.a.bias_stride = (heddle_strides){rows[at].how & 1 ? h * sk : 0, rows[at].how & 2 ? sk : 0, 0};
        c.a.dbias_stride = c.a.bias_stride;
        c.skip = x % 3 ? 1u << T_DBIAS : 0;
        c.a.window_left = c.a.features & HEDDLE_WINDOW ? 100 : 0;
        c.a.window_right = c.a.features & HEDDLE_WINDOW ? -1 : 0;
        c.len_q = c.a.features & HEDDLE_SEQLENS ? len_q : NULL;
        c.len_k = c.a.features & HEDDLE_SEQLENS ? len_k : NULL;
        c.huge_bias = c.a.dtype == HEDDLE_F16 && rows[at].huge < 0 ? -INFINITY : rows[at].huge;
        c.huge_from = rows[at].huge_from;
        c.poison_masked = isinf(c.huge_bias) || c.huge_bias == 0;
        check_attention(&c);
    }
}

/* A bias of -inf masks, whatever keys and values hold that nobody else sees; any other is a number. */
static void test_huge_bias(void **state) {
    (void)state;
    static const double huge[] = {-INFINITY, -3.38e38, -1e30, -0x1.8p126, -0x1p126};
    static const int64_t sizes[][4] = {
        {35, 67, 16, 16}, {3, 5, 64, 64}, {140, 260, 128, 128}, {1, 300, 64, 64}, {20, 33, 320, 320}};
    for (size_t x = 0; x < COUNT(huge) * COUNT(sizes); x++) {
        const int64_t *s = sizes[x % COUNT(sizes)];
        attention_case c = attention_case_of(2, 2, x % 2 ? 1 : 2, s[0], s[1], s[2], s[3]);
        c.a.features = HEDDLE_BIAS | (x % 3 == 2 ? HEDDLE_SINKS : 0);
        c.a.mask = (heddle_mask)(x % 4 % 3);
        c.a.softcap = x % 5 == 3 ? 5 : 0;
        c.huge_bias = huge[x / COUNT(sizes)];
        c.poison_masked = isinf(c.huge_bias);
        for (size_t y = 0; y < TEST_DTYPES; y++) {
            c.a.dtype = test_dtypes[y];
            if (c.a.dtype == HEDDLE_F16)
                c.huge_bias = -INFINITY; /* all else that it holds is a bias */
            check_attention(&c);
        }
    }
}

static void test_bool_mask(void **state) {
    (void)state;
    const int64_t b = 2, h = 2, sq = 35, sk = 67;
    const heddle_strides stride[] = {{0, 0, 0}, {sq * sk, 0, sk}, {0, 0, sk}, {sk, 0, 0}, {0, 2 * sq * sk, 2 * sk}};
    for (size_t x = 0; x < COUNT(stride); x++)
        for (int rows = 0; rows < 2; rows++) {
            attention_case c = attention_case_of(b, h, 1, sq, sk, 16, 0);
            c.a.features = HEDDLE_BOOL_MASK;
            c.a.bool_mask_stride = stride[x];
            c.mask_rows = rows;
            c.poison_masked = true;
            c.a.mask = rows ? HEDDLE_CAUSAL_TOP_LEFT : HEDDLE_MASK_NONE;
            check_attention_dtypes(c);
        }
}

/* Blocks of keys that a mask hides, or shows, as a whole: what nobody sees may be NaN, and its dbias is zero. */
static void test_mask_of_tiles(void **state) {
    (void)state;
    const int64_t h = 2, sq = 100, sk = 300;
    const heddle_strides stride[] = {{0, 0, sk}, {0, 0, 0}, {0, sq * sk, sk}, {sk, 0, 0}};
    const int64_t tiles[] = {128, 50, 64, 33};
    for (size_t x = 0; x < COUNT(stride); x++) {
        attention_case c = attention_case_of(2, h, 1, sq, sk, x % 2 ? 64 : 16, 0);
        c.a.features = HEDDLE_BOOL_MASK | HEDDLE_BIAS;
        c.a.bool_mask_stride = stride[x];
        c.mask_tiles = tiles[x];
        c.poison_masked = true;
        check_attention_dtypes(c);
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.a.dtype = test_dtypes[x % 3];
        check_attention(&c);
        c.a.features = HEDDLE_BOOL_MASK | HEDDLE_WEIGHTS;
        c.a.sq = 3; /* few queries */
        c.a.bool_mask_stride = c.a.bool_mask_stride.h ? (heddle_strides){0, 0, 0} : stride[x];
        check_attention(&c);
    }
}

/* Tiles that are empty, full or cut, alone and beside options that look at elements; lengths that end within a tile, heads that share keys,
 * every broadcast. On a GPU there are enough tiles for the mask to get a map. */
static void test_map_of_mask(void **state) {
    (void)state;
    const int64_t b = 2, h = 4, sq = 139, sk = 331;
    const heddle_strides stride[] = {
        {0, 0, sk}, {0, 0, 0}, {sk, 0, 0}, {0, sq * (sk + 5), sk + 5}, {h * sq * sk, sq * sk, sk}, {0, sk, 0}};
    static const int64_t tiles[] = {64, 128, 192, 50, 64, 100}, dims[] = {64, 16, 64, 120, 40, 64};
    static const int32_t len_q[] = {139, 70}, len_k[] = {300, 331};
    for (size_t x = 0; x < COUNT(stride); x++) {
        attention_case c = attention_case_of(b, h, x % 2 ? 2 : 1, sq, sk, dims[x], 0);
        c.a.features = HEDDLE_BOOL_MASK;
        c.a.bool_mask_stride = stride[x];
        c.mask_tiles = tiles[x];
        c.poison_masked = true;
        check_attention_dtypes(c);
        c.a.dtype = test_dtypes[x % 3];
        c.a.mask = x % 2 ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_CAUSAL_TOP_LEFT;
        c.a.softcap = x % 2 ? 0 : 20;
        c.a.dropout = x % 2 ? 0.2 : 0;
        check_attention(&c);
        c.a.features |= HEDDLE_WINDOW | HEDDLE_SEQLENS | HEDDLE_DETERMINISTIC;
        c.a.window_left = 150;
        c.a.window_right = 90;
        c.a.mask = HEDDLE_MASK_NONE;
        c.len_q = len_q;
        c.len_k = len_k;
        c.a.dtype = test_dtypes[(x + 1) % 3];
        check_attention(&c);
    }
}

static void test_masked_out(void **state) {
    (void)state;
    for (int sinks = 0; sinks < 2; sinks++) {
        attention_case c = attention_case_of(1, 2, 0, 20, 33, 16, 0);
        c.a.features = HEDDLE_BOOL_MASK | HEDDLE_WEIGHTS | (sinks ? HEDDLE_SINKS : 0);
        c.mask_density = 1e-9; /* nothing is seen at all */
        c.poison_masked = true;
        check_attention_dtypes(c);
        c.mask_density = 0.03; /* most rows have no key or one */
        check_attention_dtypes(c);
        c = attention_case_of(1, 2, 0, 90, 20, 16, 0); /* the first 70 queries see nothing */
        c.a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        c.a.features = sinks ? HEDDLE_SINKS : 0;
        c.poison_masked = true;
        check_attention_dtypes(c);
    }
}

/* A NaN key that some queries see: they are lost, the others are not. */
static void test_nan_key(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        attention_case c = attention_case_of(1, 1, 0, 24, 24, 16, 0);
        c.a.dtype = test_dtypes[x];
        c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
        attention_problem p = attention_new(&c);
        for (int64_t e = 0; e < 16; e++) {
            tensor_set(&p.t[T_K], 0, 0, 20, e, NAN);
            tensor_set(&p.t[T_V], 0, 0, 20, e, NAN);
        }
        attention_problem ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
        tensor_upload(&p.t[T_K]);
        tensor_upload(&p.t[T_V]);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&ref, HEDDLE_FORWARD);
        for (int64_t i = 0; i < 24; i++)
            for (int64_t e = 0; e < 16; e++) {
                assert_int_equal(isnan(tensor_get(&ref.t[T_O], 0, 0, i, e)), i >= 20);
                assert_int_equal(isnan(tensor_get(&p.t[T_O], 0, 0, i, e)), i >= 20);
            }
        attention_free(&p);
        attention_free(&ref);
    }
}

/* Lanes that are all of one query see an odd number of keys, none of them masked; the next key is not finite. */
static void test_nan_key_behind(void **state) {
    (void)state;
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        attention_case c = attention_case_of(1, 48, 1, 4, 4, 16, 0);
        c.a.dtype = test_dtypes[x];
        c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
        attention_problem p = attention_new(&c);
        for (int64_t e = 0; e < 16; e++) {
            tensor_set(&p.t[T_K], 0, 0, 3, e, NAN);
            tensor_set(&p.t[T_V], 0, 0, 3, e, NAN);
        }
        tensor_upload(&p.t[T_K]);
        tensor_upload(&p.t[T_V]);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&p, HEDDLE_BACKWARD);
        for (int64_t h = 0; h < 48; h++)
            for (int64_t i = 0; i < 4; i++)
                for (int64_t e = 0; e < 16; e++) {
                    assert_int_equal(isnan(tensor_get(&p.t[T_O], 0, h, i, e)), i == 3);
                    assert_int_equal(isnan(tensor_get(&p.t[T_DQ], 0, h, i, e)), i == 3);
                }
        attention_free(&p);
    }
}

/* A query that is not finite, in a tile of its own: keys that it does not see keep their gradients. */
static void test_nan_query(void **state) {
    (void)state;
    static const int64_t queries[] = {17, 33, 49, 65, 97};
    for (size_t x = 0; x < TEST_DTYPES * COUNT(queries); x++) {
        const int64_t last = queries[x % COUNT(queries)] - 1, keys = last + 40;
        attention_case c = attention_case_of(1, 1, 0, last + 1, keys, 16, 0);
        c.a.dtype = test_dtypes[x / COUNT(queries)];
        c.a.mask = HEDDLE_CAUSAL_TOP_LEFT;
        attention_problem p = attention_new(&c);
        for (int64_t e = 0; e < 16; e++) {
            tensor_set(&p.t[T_Q], 0, 0, last, e, NAN);
            tensor_set(&p.t[T_DOUT], 0, 0, last, e, NAN);
        }
        tensor_upload(&p.t[T_Q]);
        tensor_upload(&p.t[T_DOUT]);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&p, HEDDLE_BACKWARD);
        for (int64_t j = 0; j < keys; j++)
            for (int64_t e = 0; e < 16; e++) {
                assert_int_equal(isnan(tensor_get(&p.t[T_DK], 0, 0, j, e)), j <= last);
                assert_int_equal(isnan(tensor_get(&p.t[T_DV], 0, 0, j, e)), j <= last);
            }
        attention_free(&p);
    }
}

static void test_sinks(void **state) {
    (void)state;
    for (heddle_mask mask = HEDDLE_MASK_NONE; (int)mask <= LAST_MASK; mask++) {
        attention_case c = attention_case_of(2, 4, 2, 37, 29, 16, 0);
        c.a.features = HEDDLE_SINKS;
        c.a.mask = mask;
        check_attention_dtypes(c);
    }
}

static void test_dropout(void **state) {
    (void)state;
    static const double rates[] = {0.1, 0.5, 0.95};
    for (size_t x = 0; x < COUNT(rates); x++) {
        attention_case c = attention_case_of(2, 4, 2, 37, 50, 16, 0);
        c.a.dropout = rates[x];
        c.a.seed = UINT64_C(0x123456789abcdef0) + x;
        c.a.offset = UINT64_C(0xfedcba9876543210) * x;
        c.a.mask = (heddle_mask)x;
        check_attention_dtypes(c);
        c.a.features = HEDDLE_RNG_STATE | HEDDLE_WEIGHTS;
        check_attention_dtypes(c);
    }
}

/* By itself, of more queries than a GPU's tile of them and a cut last tile of keys, at each head dim that Hopper has kernels for. */
static void test_dropout_alone(void **state) {
    (void)state;
    static const int64_t dims[] = {64, 128, 160, 256};
    for (size_t x = 0; x < COUNT(dims); x++) {
        attention_case c = attention_case_of(1, 2, 1 + x % 2, 150, 261, dims[x], 0);
        c.a.dropout = x % 2 ? 0.5 : 0.1;
        c.a.seed = x;
        c.a.mask = x ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        check_attention_dtypes(c);
    }
}

/* With v = 1 and uniform weights, o is the share of kept keys over (1 - p): its mean is 1, its variance p / ((1 -
 * p) sk). */
static void test_dropout_statistics(void **state) {
    (void)state;
    const int64_t sq = 128, sk = 256;
    const double rate = 0.3;
    attention_case c = attention_case_of(1, 4, 0, sq, sk, 1, 0);
    c.a.dropout = rate;
    attention_problem p = attention_new(&c);
    for (int64_t x = 0; x < 4; x++) {
        for (int64_t i = 0; i < sq; i++)
            tensor_set(&p.t[T_Q], 0, x, i, 0, 0);
        for (int64_t j = 0; j < sk; j++)
            tensor_set(&p.t[T_V], 0, x, j, 0, 1);
    }
    tensor_upload(&p.t[T_Q]);
    tensor_upload(&p.t[T_V]);
    attention_run(&p, HEDDLE_FORWARD);
    double sum = 0, squares = 0, n = (double)(4 * sq);
    for (int64_t x = 0; x < 4; x++)
        for (int64_t i = 0; i < sq; i++) {
            double o = tensor_get(&p.t[T_O], 0, x, i, 0);
            sum += o;
            squares += o * o;
        }
    double mean = sum / n, variance = squares / n - mean * mean, expected = rate / (1 - rate) / (double)sk;
    assert_true(fabs(mean - 1) < 4 * sqrt(expected / n));
    assert_true(fabs(variance / expected - 1) < 4 * sqrt(2 / n));
    attention_free(&p);
}

static void test_weights(void **state) {
    (void)state;
    const int64_t sq = 21, sk = 45;
    for (int strided = 0; strided < 2; strided++) {
        attention_case c = attention_case_of(2, 4, 2, sq, sk, 16, 0);
        c.a.features = HEDDLE_WEIGHTS;
        c.a.mask = strided ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE;
        if (strided) {
            c.a.weights_stride = (heddle_strides){5 * sq * (sk + 5), sq * (sk + 5), sk + 5};
            c.a.dweights_stride = (heddle_strides){0, sq * sk, sk};
        }
        check_attention_dtypes(c);
        c.skip = 1u << T_DOUT; /* the gradient of the weights alone */
        check_attention_dtypes(c);
    }
}

/* Rows of which few of many keys have most of the weight: by sums over all keys, whether lse is what these keys make or off by a little more
 * than its rounding, as it is in some of many. */
static void test_weights_of_sharp_rows(void **state) {
    (void)state;
    for (int x = 0; x < 6; x++) {
        attention_case c = attention_case_of(1, 6, 3, x % 2 ? 5 : 40, x < 3 ? 800 : 1900, 72, 64);
        c.seed = 7 + (uint64_t)x;
        c.a.features = HEDDLE_WEIGHTS | (x % 3 == 1 ? HEDDLE_SINKS : 0);
        c.q_magnitude = x % 3 == 2 ? 8 : 5;
        c.ill_conditioned = true; /* a row of 1900 such scores is 2e-5 off in float32 */
        check_attention_dtypes(c);
    }
}

static void test_optional_tensors(void **state) {
    (void)state;
    static const int optional[] = {T_DOUT, T_DLSE, T_DWEIGHTS, T_DQ, T_DK, T_DV, T_DBIAS, T_DSINKS};
    for (unsigned bits = 0; bits < 1u << COUNT(optional); bits++) {
        unsigned count = (unsigned)__builtin_popcount(bits);
        if (count > 1 && count < COUNT(optional) - 1 && bits % 11)
            continue;
        attention_case c = attention_case_of(1, 2, 1, 18, 21, 8, 0);
        c.a.features = HEDDLE_WEIGHTS | HEDDLE_BIAS | HEDDLE_SINKS;
        for (size_t x = 0; x < COUNT(optional); x++)
            c.skip |= (bits >> x & 1) << optional[x];
        c.a.dtype = test_dtypes[bits % 3];
        check_attention(&c);
    }
    attention_case c = attention_case_of(1, 2, 1, 18, 21, 8, 0);
    c.skip = 1u << T_LSE; /* forward alone */
    check_attention_dtypes(c);
}

/* Every option at once, and each with a different mask. */
static void test_everything(void **state) {
    (void)state;
    static const int32_t len_q[] = {40, 17}, len_k[] = {50, 51};
    for (heddle_mask mask = HEDDLE_MASK_NONE; (int)mask <= LAST_MASK; mask++) {
        attention_case c = attention_case_of(2, 4, 2, 40, 51, 24, 40);
        c.a.features = HEDDLE_WINDOW | HEDDLE_ALIBI | HEDDLE_BIAS | HEDDLE_BOOL_MASK | HEDDLE_SINKS | HEDDLE_SEQLENS |
                       HEDDLE_WEIGHTS | HEDDLE_RNG_STATE | HEDDLE_DETERMINISTIC;
        c.a.window_left = 30;
        c.a.window_right = 20;
        c.a.softcap = 5;
        c.a.scale = 0.3;
        c.a.dropout = 0.2;
        c.a.mask = mask;
        c.a.bias_stride = c.a.dbias_stride = (heddle_strides){0, 40 * 51, 51};
        c.len_q = len_q;
        c.len_k = len_k;
        c.mask_rows = true;
        c.poison_masked = true;
        check_attention_dtypes(c);
    }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_causal),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_softcap),
        cmocka_unit_test(test_alibi),
        UNIT_TEST_OF_EACH_ISA(test_alibi_far_away),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_dbias_of_each),
        cmocka_unit_test(test_bias_of_keys),
        cmocka_unit_test(test_huge_bias),
        cmocka_unit_test(test_bool_mask),
        cmocka_unit_test(test_mask_of_tiles),
        cmocka_unit_test(test_map_of_mask),
        cmocka_unit_test(test_masked_out),
        UNIT_TEST_OF_EACH_ISA(test_nan_key),
        UNIT_TEST_OF_EACH_ISA(test_nan_key_behind),
        UNIT_TEST_OF_EACH_ISA(test_nan_query),
        cmocka_unit_test(test_sinks),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_dropout_alone),
        UNIT_TEST_OF_EACH_ISA(test_dropout_statistics),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_weights_of_sharp_rows),
        cmocka_unit_test(test_optional_tensors),
        cmocka_unit_test(test_everything),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

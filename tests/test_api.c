/* SPDX-License-Identifier: Apache-2.0
 * Bad input to attention: every rule has its status and a message with the numbers, and no output byte is touched. */
#include "api.h"

#include <math.h>
#include <stdio.h>

static attention_case full_case(void) {
    static const int32_t cu[] = {0, 8, 20}, lens[] = {8, 11};
    attention_case c = {.a = attention_desc(HEDDLE_F32, 2, 8, 4, 12, 12, 16, 24),
                        .seed = 5,
                        .cu_q = cu,
                        .cu_k = cu,
                        .len_q = lens,
                        .len_k = lens};
    c.a.features = HEDDLE_ALIBI | HEDDLE_BIAS | HEDDLE_BOOL_MASK | HEDDLE_SINKS | HEDDLE_VARLEN | HEDDLE_SEQLENS |
                   HEDDLE_WEIGHTS | HEDDLE_RNG_STATE | HEDDLE_SEGMENTS | HEDDLE_BLOCKS;
    c.a.block_q = 64;
    c.a.block_k = 128;
    c.a.total_q = c.a.total_k = 20;
    return c;
}

static attention_case simple_case(void) {
    return (attention_case){.a = attention_desc(HEDDLE_F32, 2, 8, 4, 12, 14, 16, 24), .seed = 5};
}

static void expect_untouched(attention_problem *p) {
    for (int x = 0; x < T_COUNT; x++) {
        tensor_download(&p->t[x]);
        assert_true(tensor_unchanged(&p->t[x]));
    }
}

static heddle_status call(const attention_problem *p, const heddle_attention *a, const heddle_attention_data *data,
                          heddle_pass pass, void *workspace, size_t bytes) {
    (void)p;
    return pass == HEDDLE_FORWARD ? heddle_attention_forward(a, data, workspace, bytes, NULL)
                                  : heddle_attention_backward(a, data, workspace, bytes, NULL);
}

/* A description that is refused: by both passes, and in the same words by all queries. */
static void refuse(const heddle_attention *a, heddle_status expected, const char *part) {
    attention_case c = simple_case();
    attention_problem p = attention_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    char why[256] = "", name[256] = "";
    for (int pass = 0; pass < 2; pass++) {
        heddle_attention_data data = attention_data(&p, pass);
        expect_status(call(&p, a, &data, (heddle_pass)pass, workspace, ENOUGH), expected, part);
        size_t bytes = 12345;
        expect_status(heddle_attention_workspace(a, (heddle_pass)pass, &bytes), expected, part);
        assert_int_equal(bytes, 12345);
        expect_status(heddle_attention_kernel(a, (heddle_pass)pass, name, sizeof name), expected, part);
    }
    expect_status(heddle_attention_supported(a, why, sizeof why), expected, part);
    assert_non_null(strstr(why, part));
    assert_true(workspace_intact(p.a.device, workspace, 0)); /* untouched at its head, too */
    expect_untouched(&p);
    workspace_free(p.a.device, workspace, ENOUGH);
    attention_free(&p);
}

#define REFUSE(change, status, part)                                                                                   \
    do {                                                                                                               \
        attention_case c_ = simple_case();                                                                             \
        heddle_attention *a = &c_.a;                                                                                   \
        change;                                                                                                        \
        refuse(a, status, part);                                                                                       \
    } while (0)

static void test_descriptor_size(void **state) {
    (void)state;
    refuse(NULL, HEDDLE_NULL_POINTER, "NULL");
    REFUSE(a->size = 0, HEDDLE_BAD_DESCRIPTOR_SIZE, "size = 0");
    REFUSE(a->size -= 4, HEDDLE_BAD_DESCRIPTOR_SIZE, "size");
    REFUSE(a->size += 8, HEDDLE_BAD_DESCRIPTOR_SIZE, "size");
    attention_case c = simple_case();
    attention_problem p = attention_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    for (int pass = 0; pass < 2; pass++) {
        expect_status(call(&p, &p.a, NULL, (heddle_pass)pass, workspace, ENOUGH), HEDDLE_NULL_POINTER, "NULL");
        heddle_attention_data data = attention_data(&p, pass);
        data.size -= 4;
        expect_status(call(&p, &p.a, &data, (heddle_pass)pass, workspace, ENOUGH), HEDDLE_BAD_DESCRIPTOR_SIZE, "size");
        data.size += 12;
        expect_status(call(&p, &p.a, &data, (heddle_pass)pass, workspace, ENOUGH), HEDDLE_BAD_DESCRIPTOR_SIZE, "size");
        expect_status(heddle_attention_workspace(&p.a, (heddle_pass)pass, NULL), HEDDLE_NULL_POINTER, "bytes");
    }
    expect_untouched(&p);
    workspace_free(p.a.device, workspace, ENOUGH);
    attention_free(&p);
}

static void test_enums(void **state) {
    (void)state;
    REFUSE(a->dtype = (heddle_dtype)7, HEDDLE_BAD_ENUM, "dtype = 7");
    REFUSE(a->dtype = (heddle_dtype)-1, HEDDLE_BAD_ENUM, "dtype");
    REFUSE(a->device = (heddle_device)9, HEDDLE_BAD_ENUM, "device = 9");
    REFUSE(a->mask = (heddle_mask)3, HEDDLE_BAD_ENUM, "mask = 3");
    REFUSE(a->mask = (heddle_mask)-1, HEDDLE_BAD_ENUM, "mask");
    REFUSE(a->features = UINT64_C(1) << 16, HEDDLE_BAD_ENUM, "0x10000");
    REFUSE(a->features = UINT64_C(1) << 63, HEDDLE_BAD_ENUM, "0x8000000000000000");
    REFUSE(a->block_q = 64, HEDDLE_BAD_COMBINATION, "block_q = 64");
    REFUSE(a->blocks_of_h = 1, HEDDLE_BAD_COMBINATION, "blocks_of_h = 1");
    REFUSE((a->features = HEDDLE_BLOCKS, a->block_q = 64), HEDDLE_BAD_SIZE, "block_k = 0");
    REFUSE((a->features = HEDDLE_BLOCKS, a->block_q = 32, a->block_k = 64), HEDDLE_BAD_SIZE, "block_q = 32");
    REFUSE((a->features = HEDDLE_BLOCKS, a->block_q = a->block_k = 128, a->blocks_of_b = 2), HEDDLE_BAD_VALUE,
           "blocks_of_b = 2");
    heddle_attention a = simple_case().a;
    size_t bytes;
    char name[8];
    expect_status(heddle_attention_workspace(&a, (heddle_pass)2, &bytes), HEDDLE_BAD_ENUM, "pass = 2");
    expect_status(heddle_attention_kernel(&a, (heddle_pass)-1, name, sizeof name), HEDDLE_BAD_ENUM, "pass");
}

static void test_sizes(void **state) {
    (void)state;
    REFUSE(a->b = -1, HEDDLE_BAD_SIZE, "b = -1");
    REFUSE(a->h = 0, HEDDLE_BAD_SIZE, "h = 0");
    REFUSE(a->h = -2, HEDDLE_BAD_SIZE, "h = -2");
    REFUSE(a->hk = -4, HEDDLE_BAD_SIZE, "hk = -4");
    REFUSE(a->sq = -1, HEDDLE_BAD_SIZE, "sq = -1");
    REFUSE(a->sk = -1, HEDDLE_BAD_SIZE, "sk = -1");
    REFUSE(a->d = 0, HEDDLE_BAD_SIZE, "d = 0");
    REFUSE(a->d = 513, HEDDLE_BAD_SIZE, "d = 513");
    REFUSE(a->dv = -1, HEDDLE_BAD_SIZE, "dv = -1");
    REFUSE(a->dv = 513, HEDDLE_BAD_SIZE, "dv = 513");
    REFUSE(a->hk = 3, HEDDLE_BAD_HEADS, "hk = 3 does not divide h = 8");
    REFUSE(a->hk = 16, HEDDLE_BAD_HEADS, "16");
    REFUSE((a->features = HEDDLE_VARLEN, a->total_q = -1), HEDDLE_BAD_SIZE, "total_q = -1");
    REFUSE((a->features = HEDDLE_VARLEN, a->total_k = -5), HEDDLE_BAD_SIZE, "total_k = -5");
}

static void test_parts(void **state) {
    (void)state;
    REFUSE(a->q_offset = -1, HEDDLE_BAD_SIZE, "q_offset = -1");
    REFUSE(a->k_offset = (INT64_C(1) << 40) + 1, HEDDLE_BAD_SIZE, "k_offset = 1099511627777");
    REFUSE(a->q_offset = INT64_MAX, HEDDLE_BAD_SIZE, "q_offset = 9223372036854775807");
    REFUSE(a->h_offset = INT64_MIN, HEDDLE_BAD_SIZE, "h_offset = -9223372036854775808");
    REFUSE(a->whole_sk = -7, HEDDLE_BAD_SIZE, "whole_sk = -7");
    REFUSE((a->q_offset = 3, a->whole_sq = 14), HEDDLE_BAD_SIZE, "whole_sq = 14 ends before q_offset + sq = 3 + 12");
    REFUSE((a->k_offset = 3, a->whole_sk = 16), HEDDLE_BAD_SIZE, "whole_sk = 16 ends before k_offset + sk = 3 + 14");
    REFUSE(a->whole_h = 7, HEDDLE_BAD_SIZE, "whole_h = 7");
    REFUSE(a->h_offset = 8, HEDDLE_BAD_COMBINATION, "h_offset = 8, but whole_h is not set");
    REFUSE((a->features = HEDDLE_SEQLENS, a->whole_sk = 90), HEDDLE_BAD_COMBINATION, "HEDDLE_SEQLENS");
    REFUSE((a->features = HEDDLE_VARLEN, a->whole_sq = 90), HEDDLE_BAD_COMBINATION, "HEDDLE_VARLEN");
    REFUSE((a->b = INT64_C(1) << 30, a->whole_h = INT64_C(1) << 40), HEDDLE_OVERFLOW, "whole_h");
    REFUSE((a->dropout = 0.5, a->q_offset = INT64_C(1) << 32), HEDDLE_BAD_SIZE, "sq = 4294967308");
    REFUSE((a->dropout = 0.5, a->h_offset = INT64_C(1) << 32, a->whole_h = 8), HEDDLE_BAD_SIZE, "b·h = 42949673");
    char why[256];
    heddle_attention a = simple_case().a;
    a.q_offset = a.k_offset = INT64_C(1) << 40;
    expect_status(heddle_attention_supported(&a, why, sizeof why), HEDDLE_OK, "");
    a.features |= HEDDLE_ALIBI;
    expect_status(heddle_attention_supported(&a, why, sizeof why), HEDDLE_OK, "");
    a.k_offset = 0; /* so far off the diagonal int32 does not reach */
    a.mask = HEDDLE_CAUSAL_TOP_LEFT;
    expect_status(heddle_attention_supported(&a, why, sizeof why),
                  a.device == HEDDLE_CUDA ? HEDDLE_UNSUPPORTED : HEDDLE_OK, a.device == HEDDLE_CUDA ? "diagonal" : "");
}

static void test_accumulate(void **state) {
    (void)state;
    REFUSE(a->features = HEDDLE_ACCUMULATE | HEDDLE_WEIGHTS, HEDDLE_BAD_COMBINATION, "HEDDLE_WEIGHTS");
    attention_case c = simple_case();
    attention_problem p = attention_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    heddle_attention a = p.a;
    heddle_attention_data data = attention_data(&p, false);
    a.features |= HEDDLE_ACCUMULATE;
    data.lse = NULL;
    expect_status(call(&p, &a, &data, HEDDLE_FORWARD, workspace, ENOUGH), HEDDLE_NULL_POINTER, "lse is NULL");
    a.dtype = HEDDLE_BF16; /* whose o is float now */
    data = attention_data(&p, false);
    data.o = (char *)data.o + 2;
    expect_status(call(&p, &a, &data, HEDDLE_FORWARD, workspace, ENOUGH), HEDDLE_MISALIGNED, "its element's 4 bytes");
    expect_untouched(&p);
    workspace_free(p.a.device, workspace, ENOUGH);
    attention_free(&p);
}

/* The description of programs that were built when parts, pages or the limit had no fields. */
static void test_older_description(void **state) {
    (void)state;
    static const size_t sizes[] = {offsetof(heddle_attention, q_offset), offsetof(heddle_attention, page),
                                   offsetof(heddle_attention, multiprocessors)};
    attention_case c = simple_case();
    attention_problem p = attention_new(&c);
    attention_run(&p, HEDDLE_FORWARD);
    for (size_t x = 0; x < COUNT(sizes); x++) {
        attention_problem q = attention_copy(&p, p.a.dtype, p.a.device);
        q.a.size = sizes[x];
        memset((char *)&q.a + sizes[x], 0xff, sizeof q.a - sizes[x]); /* nobody looks at it */
        attention_run(&q, HEDDLE_FORWARD);
        assert_true(tensor_equal(&p.t[T_O], &q.t[T_O]));
        attention_free(&q);
    }
    attention_free(&p);
}

static void test_values(void **state) {
    (void)state;
    REFUSE(a->scale = (double)NAN, HEDDLE_BAD_VALUE, "scale = ");
    REFUSE(a->scale = (double)INFINITY, HEDDLE_BAD_VALUE, "scale = inf");
    REFUSE(a->scale = -(double)INFINITY, HEDDLE_BAD_VALUE, "scale = -inf");
    REFUSE(a->softcap = -1, HEDDLE_BAD_VALUE, "softcap = -1");
    REFUSE(a->softcap = (double)NAN, HEDDLE_BAD_VALUE, "softcap = ");
    REFUSE(a->softcap = (double)INFINITY, HEDDLE_BAD_VALUE, "softcap = inf");
    REFUSE(a->scale = 1e-40, HEDDLE_BAD_VALUE, "scale = 1e-40");
    REFUSE(a->scale = -3.4e38, HEDDLE_BAD_VALUE, "scale = -3.4e+38");
    REFUSE(a->scale = 0x1.001p100, HEDDLE_BAD_VALUE, "scale = 1.26");
    REFUSE(a->softcap = 1e-50, HEDDLE_BAD_VALUE, "softcap = 1e-50");
    REFUSE(a->softcap = 1e39, HEDDLE_BAD_VALUE, "softcap = 1e+39");
    REFUSE((a->scale = 1e20, a->softcap = 1e-20), HEDDLE_BAD_VALUE, "scale / softcap = 1e+40");
    REFUSE(a->dropout = 1, HEDDLE_BAD_VALUE, "dropout = 1");
    REFUSE(a->dropout = -0.1, HEDDLE_BAD_VALUE, "dropout = -0.1");
    REFUSE(a->dropout = (double)NAN, HEDDLE_BAD_VALUE, "dropout = ");
    REFUSE(a->dropout = 1 - 0x1p-17, HEDDLE_BAD_VALUE, "dropout = 0.999992371 is 1 when rounded");
    REFUSE(a->window_left = 3, HEDDLE_BAD_COMBINATION, "window_left = 3");
    REFUSE(a->window_right = 3, HEDDLE_BAD_COMBINATION, "window_right = 3");
    REFUSE(a->total_q = 3, HEDDLE_BAD_COMBINATION, "total_q = 3");
    REFUSE(a->multiprocessors = -1, HEDDLE_BAD_SIZE, "multiprocessors = -1");
    REFUSE(a->multiprocessors = INT64_C(1) << 31, HEDDLE_BAD_SIZE, "multiprocessors = 2147483648");
    REFUSE(a->alibi_stride_b = 8, HEDDLE_BAD_COMBINATION, "alibi_stride_b = 8");
    REFUSE((a->features = HEDDLE_ALIBI, a->alibi_stride_b = -8), HEDDLE_BAD_STRIDE, "alibi_stride_b = -8");
}

static void test_strides(void **state) {
    (void)state;
    REFUSE((a->q_stride = (heddle_strides){-1, 16, 16}), HEDDLE_BAD_STRIDE, "-1");
    REFUSE((a->k_stride = (heddle_strides){900, -16, 16}), HEDDLE_BAD_STRIDE, "-16");
    REFUSE((a->v_stride = (heddle_strides){900, 24, -24}), HEDDLE_BAD_STRIDE, "-24");
    REFUSE((a->do_stride = (heddle_strides){900, 24, -24}), HEDDLE_BAD_STRIDE, "-24");
    REFUSE((a->features = HEDDLE_BIAS, a->bias_stride.s = -3), HEDDLE_BAD_STRIDE, "-3");
    REFUSE((a->features = HEDDLE_BOOL_MASK, a->bool_mask_stride.s = -3), HEDDLE_BAD_STRIDE, "-3");
    REFUSE((a->features = HEDDLE_WEIGHTS, a->dweights_stride.s = -3), HEDDLE_BAD_STRIDE, "-3");
    /* outputs that overlap themselves */
    REFUSE((a->o_stride = (heddle_strides){HEDDLE_BROADCAST, HEDDLE_BROADCAST, HEDDLE_BROADCAST}), HEDDLE_BAD_STRIDE,
           "o is");
    REFUSE((a->o_stride = (heddle_strides){0, 24 * 12, 24}), HEDDLE_BAD_STRIDE, "o is");
    REFUSE((a->o_stride = (heddle_strides){8 * 12 * 24, 12 * 24, 23}), HEDDLE_BAD_STRIDE, "23");
    REFUSE((a->dq_stride = (heddle_strides){8 * 12 * 16, 11 * 16, 16}), HEDDLE_BAD_STRIDE, "dq");
    REFUSE((a->dk_stride = (heddle_strides){4 * 14 * 16, 0, 16}), HEDDLE_BAD_STRIDE, "dk");
    REFUSE((a->dv_stride = (heddle_strides){4 * 14 * 24 - 1, 14 * 24, 24}), HEDDLE_BAD_STRIDE, "dv");
    REFUSE((a->features = HEDDLE_WEIGHTS, a->weights_stride = (heddle_strides){0, 0, 14}), HEDDLE_BAD_STRIDE,
           "weights");
    REFUSE((a->features = HEDDLE_BIAS, a->dbias_stride = (heddle_strides){0, 14 * 12, 13}), HEDDLE_BAD_STRIDE, "dbias");
}

static void test_overflow(void **state) {
    (void)state;
    REFUSE((a->q_stride = (heddle_strides){INT64_MAX, 16, 16}), HEDDLE_OVERFLOW, "q");
    REFUSE((a->k_stride = (heddle_strides){16, INT64_MAX / 2, 16}), HEDDLE_OVERFLOW, "k");
    REFUSE((a->v_stride = (heddle_strides){16, 16, INT64_MAX / 4}), HEDDLE_OVERFLOW, "v");
    REFUSE((a->dv_stride = (heddle_strides){INT64_MAX / 2, INT64_MAX / 2, INT64_MAX / 2}), HEDDLE_OVERFLOW, "dv");
    REFUSE((a->sq = INT64_C(1) << 40, a->h = a->hk = INT64_C(1) << 30), HEDDLE_OVERFLOW, "");
    REFUSE(a->sq = INT64_MAX, HEDDLE_BAD_SIZE, "9223372036854775807");
    REFUSE(a->b = INT64_MAX, HEDDLE_BAD_SIZE, "9223372036854775807");
    REFUSE((a->b = INT64_C(1) << 39, a->h = a->hk = INT64_C(1) << 39), HEDDLE_OVERFLOW, "");
    REFUSE((a->features = HEDDLE_BIAS, a->bias_stride = (heddle_strides){0, 0, INT64_MAX}), HEDDLE_OVERFLOW, "bias");
    REFUSE((a->features = HEDDLE_ALIBI, a->alibi_stride_b = INT64_MAX / 2), HEDDLE_OVERFLOW, "alibi");
}

/* What has no elements has none to share, whatever its strides. */
static void test_empty_outputs(void **state) {
    (void)state;
    heddle_attention a = attention_desc(HEDDLE_F32, 2, 3, 0, 4, 0, 8, 0);
    char why[256];
    a.features = HEDDLE_WEIGHTS | HEDDLE_BIAS;
    a.weights_stride = a.dbias_stride = a.dk_stride = a.dv_stride = (heddle_strides){2, 1, 3};
    expect_status(heddle_attention_supported(&a, why, sizeof why), HEDDLE_OK, "");
    a.sk = 1; /* one element a row: these do overlap */
    expect_status(heddle_attention_supported(&a, why, sizeof why), HEDDLE_BAD_STRIDE, "overlaps itself");
}

/* Where dbias is summed over queries, heads or sequences of which there are none, it is there, and the sum is zero. */
static void test_empty_sums(void **state) {
    (void)state;
    const heddle_strides rows = {HEDDLE_BROADCAST, HEDDLE_BROADCAST, HEDDLE_BROADCAST};
    for (int on_ref = 0; on_ref < 2; on_ref++)
        for (int empty_b = 0; empty_b < 2; empty_b++) {
            const int64_t b = empty_b ? 0 : 2, sq = empty_b ? 2 : 0;
            attention_case c = {.a = attention_desc(HEDDLE_F32, b, 3, 0, sq, 5, 8, 0)};
            c.a.device = on_ref ? HEDDLE_REF : test_device();
            c.a.features = HEDDLE_BIAS;
            c.a.dbias_stride = empty_b ? (heddle_strides){0, 0, 5} : rows;
            c.a.bias_stride = rows;
            attention_problem p = attention_new(&c);
            const int64_t count = empty_b ? 10 : 5;
            assert_int_equal(p.t[T_DBIAS].span, count);
            attention_run(&p, HEDDLE_BACKWARD);
            for (int64_t x = 0; x < count; x++)
                assert_true(tensor_raw(&p.t[T_DBIAS], x) == 0);
            attention_free(&p);
        }
}

static void test_unsupported(void **state) {
    (void)state;
    REFUSE(a->dtype = HEDDLE_F64, HEDDLE_UNSUPPORTED, "float64");
    char why[200] = "";
    if (heddle_device_available(HEDDLE_CUDA, why, sizeof why) != HEDDLE_OK) {
        assert_true(strlen(why) > 8);
        REFUSE(a->device = HEDDLE_CUDA, HEDDLE_NO_DEVICE, "cuda");
    }
}

/* What the pointer tests do to each. */
#define FAULT(field, ...)                                                                                              \
    { #field, offsetof(heddle_attention_data, field), __VA_ARGS__ }
static const pointer_fault faults[] = {
    FAULT(q, 0, true, true, false),
    FAULT(k, 0, true, true, false),
    FAULT(v, 0, true, true, false),
    FAULT(alibi_slopes, HEDDLE_ALIBI, true, true, false),
    FAULT(bias, HEDDLE_BIAS, true, true, false),
    FAULT(bool_mask, HEDDLE_BOOL_MASK, true, true, true),
    FAULT(sinks, HEDDLE_SINKS, true, true, false),
    FAULT(cu_seqlens_q, HEDDLE_VARLEN, true, true, false),
    FAULT(cu_seqlens_k, HEDDLE_VARLEN, true, true, false),
    FAULT(seqlens_q, HEDDLE_SEQLENS, false, false, false),
    FAULT(seqlens_k, HEDDLE_SEQLENS, false, false, false),
    FAULT(rng_state, HEDDLE_RNG_STATE, true, true, false),
    FAULT(o, 0, true, true, false),
    FAULT(lse, 0, false, true, false),
    FAULT(weights, HEDDLE_WEIGHTS, true, false, false),
    FAULT(dout, 0, false, false, false),
    FAULT(dlse, 0, false, false, false),
    FAULT(dweights, HEDDLE_WEIGHTS, false, false, false),
    FAULT(dq, 0, false, false, false),
    FAULT(dk, 0, false, false, false),
    FAULT(dv, 0, false, false, false),
    FAULT(dbias, HEDDLE_BIAS, false, false, false),
    FAULT(dsinks, HEDDLE_SINKS, false, false, false),
    FAULT(block_rows, HEDDLE_BLOCKS, true, true, false),
    FAULT(block_columns, HEDDLE_BLOCKS, false, false, false),
    FAULT(q_segments, HEDDLE_SEGMENTS, true, true, false),
    FAULT(k_segments, HEDDLE_SEGMENTS, true, true, false),
    FAULT(k_scale, HEDDLE_E4M3, false, false, false), /* by test_e4m3, as backward refuses these keys */
    FAULT(v_scale, HEDDLE_E4M3, false, false, false),
    FAULT(block_table, HEDDLE_PAGES, true, false, false), /* by test_paged_keys, since these keys are packed */
};
_Static_assert(COUNT(faults) == T_COUNT, "a tensor is tested by nobody");

static void test_pointers(void **state) {
    (void)state;
    attention_case c = full_case();
    attention_problem p = attention_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    for (int pass = 0; pass < 2; pass++)
        for (size_t x = 0; x < COUNT(faults); x++) {
            const pointer_fault *f = &faults[x];
            heddle_attention_data data = attention_data(&p, pass);
            char *pointer = pointer_in(&data, f);
            if (!pointer)
                continue; /* not of this pass */
            if (pass ? f->needed_backward : f->needed_forward) {
                set_pointer(&data, f, NULL);
                expect_status(call(&p, &p.a, &data, (heddle_pass)pass, workspace, ENOUGH), HEDDLE_NULL_POINTER,
                              f->name);
            }
            if (!f->bytes) {
                set_pointer(&data, f, pointer + 1);
                expect_status(call(&p, &p.a, &data, (heddle_pass)pass, workspace, ENOUGH), HEDDLE_MISALIGNED, f->name);
            }
            if (f->feature && f->feature != HEDDLE_VARLEN) {
                heddle_attention a = p.a;
                a.features &= ~f->feature;
                if (f->feature == HEDDLE_BLOCKS)
                    a.block_q = a.block_k = 0;
                set_pointer(&data, f, pointer);
                for (size_t y = 0; y < COUNT(faults); y++) /* the feature's other pointers are not to blame */
                    if (y != x && faults[y].feature == f->feature)
                        set_pointer(&data, &faults[y], NULL);
                expect_status(call(&p, &a, &data, (heddle_pass)pass, workspace, ENOUGH), HEDDLE_BAD_COMBINATION,
                              f->name);
            }
            expect_untouched(&p);
        }
    heddle_attention_data data = attention_data(&p, false);
    data.seqlens_q = data.seqlens_k = NULL;
    expect_status(call(&p, &p.a, &data, HEDDLE_FORWARD, workspace, ENOUGH), HEDDLE_NULL_POINTER, "seqlens");
    heddle_attention a = simple_case().a; /* cu_seqlens without HEDDLE_VARLEN */
    data = attention_data(&p, false);
    heddle_attention_data few = {
        .size = sizeof few, .q = data.q, .k = data.k, .v = data.v, .o = data.o, .cu_seqlens_q = data.cu_seqlens_q};
    expect_status(call(&p, &a, &few, HEDDLE_FORWARD, workspace, ENOUGH), HEDDLE_BAD_COMBINATION, "cu_seqlens_q");
    expect_untouched(&p);
    workspace_free(p.a.device, workspace, ENOUGH);
    attention_free(&p);
}

static void test_workspace(void **state) {
    (void)state;
    attention_case c = simple_case();
    attention_problem p = attention_new(&c);
    void *workspace = workspace_new(p.a.device, ENOUGH);
    for (int pass = 0; pass < 2; pass++) {
        heddle_attention_data data = attention_data(&p, pass);
        size_t bytes = 0;
        char numbers[64];
        assert_int_equal(heddle_attention_workspace(&p.a, (heddle_pass)pass, &bytes), HEDDLE_OK);
        if (!bytes)
            continue;
        snprintf(numbers, sizeof numbers, "%zu", bytes - 1);
        expect_status(call(&p, &p.a, &data, (heddle_pass)pass, workspace, bytes - 1), HEDDLE_WORKSPACE_TOO_SMALL,
                      numbers);
        snprintf(numbers, sizeof numbers, "%zu", bytes);
        expect_status(call(&p, &p.a, &data, (heddle_pass)pass, workspace, 0), HEDDLE_WORKSPACE_TOO_SMALL, numbers);
        expect_status(call(&p, &p.a, &data, (heddle_pass)pass, NULL, ENOUGH), HEDDLE_NULL_POINTER, "workspace");
        expect_status(call(&p, &p.a, &data, (heddle_pass)pass, (char *)workspace + 32, ENOUGH), HEDDLE_MISALIGNED,
                      "workspace");
    }
    expect_untouched(&p);
    workspace_free(p.a.device, workspace, ENOUGH);
    attention_free(&p);
}

/* What `supported` says is what forward says, on descriptions drawn at random, good and bad. */
static void test_supported_agrees(void **state) {
    (void)state;
    rng r = {test_seed(11)};
    for (int x = 0; x < 300; x++) {
        attention_case c = {.a = attention_desc((heddle_dtype)rng_between(&r, 0, 3), rng_between(&r, 0, 2),
                                                rng_between(&r, 1, 4), rng_between(&r, 0, 4), rng_between(&r, 0, 9),
                                                rng_between(&r, 0, 9), rng_between(&r, 1, 20), rng_between(&r, 0, 20)),
                            .seed = rng_next(&r)};
        heddle_status said = heddle_attention_supported(&c.a, NULL, 0);
        if (said == HEDDLE_BAD_HEADS || said == HEDDLE_UNSUPPORTED) {
            heddle_attention_data data = {.size = sizeof data};
            assert_int_equal(heddle_attention_forward(&c.a, &data, NULL, 0, NULL), said);
            continue;
        }
        assert_int_equal(said, HEDDLE_OK);
        attention_problem p = attention_new(&c);
        attention_run(&p, HEDDLE_FORWARD);
        attention_run(&p, HEDDLE_BACKWARD);
        attention_free(&p);
    }
}

/* Forward does not look at what only backward uses, and the other way round. */
static void test_the_other_pass(void **state) {
    (void)state;
    attention_case c = full_case();
    attention_problem p = attention_new(&c);
    void *const wrong = (char *)p.t[T_Q].host + 1, *workspace = workspace_new(p.a.device, ENOUGH);
    heddle_attention_data data = attention_data(&p, false);
    data.dout = data.dlse = data.dweights = data.dq = data.dk = data.dv = data.dbias = data.dsinks = wrong;
    expect_status(call(&p, &p.a, &data, HEDDLE_FORWARD, workspace, ENOUGH), HEDDLE_OK, "");
    data = attention_data(&p, true);
    data.weights = wrong;
    expect_status(call(&p, &p.a, &data, HEDDLE_BACKWARD, workspace, ENOUGH), HEDDLE_OK, "");
    workspace_free(p.a.device, workspace, ENOUGH);
    attention_free(&p);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_descriptor_size),
        cmocka_unit_test(test_enums),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_older_description),
        cmocka_unit_test(test_accumulate),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_strides),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_empty_outputs),
        cmocka_unit_test(test_empty_sums),
        cmocka_unit_test(test_unsupported),
        cmocka_unit_test(test_pointers),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_supported_agrees),
        cmocka_unit_test(test_the_other_pass),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

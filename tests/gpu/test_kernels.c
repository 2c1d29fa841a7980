/* SPDX-License-Identifier: Apache-2.0
 * Which kernels a problem takes: on every kind of GPU only what fits is launched, few rows and head dims have theirs, and every kernel
 * has a problem that reaches it. Needs no GPU. */
#define _POSIX_C_SOURCE 200809L
#include "cuda/attention/attention.h"
#include "cuda/attention/kernels.h"
#include "scenario.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

/* ------------------------------------------------------------------------------------------- all sizes and options */

static const uint64_t option_sets[] = {0,
                                       HEDDLE_WINDOW,
                                       HEDDLE_VARLEN,
                                       HEDDLE_SEQLENS,
                                       HEDDLE_SINKS,
                                       HEDDLE_BIAS,
                                       HEDDLE_ALIBI,
                                       HEDDLE_BOOL_MASK,
                                       HEDDLE_WEIGHTS,
                                       HEDDLE_RNG_STATE,
                                       HEDDLE_TF32,
                                       HEDDLE_ALIBI | HEDDLE_BIAS,
                                       HEDDLE_DETERMINISTIC | HEDDLE_WINDOW,
                                       HEDDLE_DETERMINISTIC | HEDDLE_SINKS | HEDDLE_BIAS,
                                       HEDDLE_ACCUMULATE,
                                       HEDDLE_ACCUMULATE | HEDDLE_VARLEN | HEDDLE_SINKS,
                                       HEDDLE_ACCUMULATE | HEDDLE_DETERMINISTIC | HEDDLE_ALIBI,
                                       HEDDLE_PAGES,
                                       HEDDLE_PAGES | HEDDLE_VARLEN | HEDDLE_ALIBI,
                                       HEDDLE_PAGES | HEDDLE_ACCUMULATE,
                                       HEDDLE_SEGMENTS | HEDDLE_PAGES,
                                       HEDDLE_E4M3,
                                       HEDDLE_BOOL_MASK | HEDDLE_RNG_STATE,
                                       HEDDLE_E4M3 | HEDDLE_PAGES,
                                       HEDDLE_SEGMENTS | HEDDLE_BIAS | HEDDLE_SINKS,
                                       HEDDLE_BLOCKS | HEDDLE_BOOL_MASK,
                                       HEDDLE_BLOCKS | HEDDLE_SEGMENTS | HEDDLE_VARLEN | HEDDLE_WEIGHTS};

/* Head dims: those of all kernels, the least, and one between two. */
static bool is_swept(int64_t d) {
    bool has = d == 1 || d == 300;
    for (int x = 0; x < ATTENTION_KERNELS; x++)
        has |= heddle__cuda_attention_kernels[x].dim == d;
    return has;
}

static void sweep_attention(heddle_dtype dtype) {
    static const int64_t lengths[][2] = {{1, 8192}, {3, 70}, {130, 257}, {1024, 1024}, {4096, 4096}};
    for (int64_t d = 1; d <= 512; d++)
        for (size_t s = 0; is_swept(d) && s < COUNT(lengths); s++)
            for (size_t o = 0; o < COUNT(option_sets); o++)
                for (int variant = 0; variant < 4; variant++) {
                    heddle_attention a = attention_desc(dtype, 3, 8, variant % 2 ? 2 : 8, lengths[s][0], lengths[s][1],
                                                        d, variant / 2 ? d : 24);
                    a.features = option_sets[o];
                    a.dropout = a.features & HEDDLE_RNG_STATE ? 0.25 : 0;
                    a.window_left = a.features & HEDDLE_WINDOW ? 100 : 0;
                    if (variant % 2) /* a mask of keys alone */
                        a.bool_mask_stride.b = a.features & HEDDLE_BOOL_MASK ? a.sk : 0;
                    if (variant == 2 && a.features & HEDDLE_BIAS) /* of keys alone */
                        a.bias_stride.b = a.sk;
                    if (variant % 2 && a.features & HEDDLE_BIAS) /* a sum */
                        a.dbias_stride = (heddle_strides){0, a.sq * a.sk, a.sk};
                    if (a.features & HEDDLE_VARLEN) {
                        a.total_q = 2 * a.sq;
                        a.total_k = a.features & HEDDLE_PAGES ? 0 : 2 * a.sk;
                    }
                    if (a.features & HEDDLE_PAGES) {
                        a.page = variant % 2 ? 16 : 256;
                        a.pages = 1000;
                    }
                    a.block_q = a.block_k = a.features & HEDDLE_BLOCKS ? 64 : 0;
                    a.device = HEDDLE_CUDA;
                    for (int pass = 0; pass < (a.features & (HEDDLE_PAGES | HEDDLE_E4M3) ? 1 : 2); pass++)
                        for (int skew = 0; skew < 8; skew += 4)
                            MUST(run_attention(a, (heddle_pass)pass, skew, NULL) == HEDDLE_OK);
                }
}

static void sweep_norm_linear(heddle_dtype dtype) {
    static const int64_t sizes[][3] = {{1, 1, 1},           {7, 33, 65},       {128, 64, 128},     {1000, 512, 768},
                                       {16384, 1024, 4096}, {2040, 744, 2040}, {2040, 1000, 2040}, {2040, 1272, 2040},
                                       {2040, 1480, 2040},  {2040, 72, 744},   {2040, 72, 1000},   {2040, 72, 1272},
                                       {2040, 72, 1480},    {5, 264, 100},     {25, 264, 100},     {40, 5000, 64},
                                       {2040, 72, 368},     {2040, 72, 504},   {2040, 72, 640},    {2040, 72, 736},
                                       {17000, 1032, 40},   {520, 1416, 4224}, {300, 8200, 64},    {520, 1416, 3520},
                                       {50, 1032, 4096},    {20, 8136, 64}};
    /* from the sixth on: tiles of every width for Hopper; a few rows; rows whose sums no block holds; the widths of two halves;
     * raw x on Hopper, tiles of 192 and 160 columns in turn; a few rows more, and of long sums */
    for (size_t x = 0; x < COUNT(sizes); x++)
        for (int norm = 0; norm < 3; norm++)
            for (int tf32 = 0; tf32 < 2; tf32++)
                for (int pass = 0; pass < 2; pass++)
                    for (int skew = 0; skew < 8; skew += 4) {
                        heddle_norm_linear a =
                            norm_linear_desc(dtype, (heddle_norm)norm, sizes[x][0], sizes[x][1], sizes[x][2]);
                        a.features = tf32 ? HEDDLE_TF32 : 0;
                        if (norm) {
                            a.features |= HEDDLE_ACTIVATION;
                            a.activation = (x + (size_t)tf32) % 2 ? HEDDLE_SWIGLU : HEDDLE_SILU;
                        }
                        if ((int)(x % 2) == norm % 2)
                            a.features |= HEDDLE_RESIDUAL;
                        if (norm != HEDDLE_NO_NORM && (x + (size_t)tf32) % 2)
                            a.features |= HEDDLE_Z;
                        heddle_status status = run_norm_linear(a, (heddle_pass)pass, skew, NULL);
                        MUST(status == HEDDLE_OK ||
                             (status == HEDDLE_UNSUPPORTED && strstr(heddle_last_message(), "shared memory") &&
                              strstr(heddle_last_message(), "Fake GPU")));
                    }
}

static heddle_status run_merge(heddle_dtype dtype, int skew, void *stream) {
    const heddle_merge m = {
        .size = sizeof m, .dtype = dtype, .device = HEDDLE_CUDA, .b = 3, .h = 8, .s = 130, .dv = 100};
    return heddle_attention_merge(&m, address(0, 1, skew), address(0, 2, skew), address(0, 3, skew),
                                  address(0, 4, skew), stream);
}

static heddle_status run_append(heddle_dtype dtype, uint64_t features, int skew, void *stream) {
    const heddle_append a = {.size = sizeof a,
                             .dtype = dtype,
                             .device = HEDDLE_CUDA,
                             .features = features,
                             .b = 3,
                             .h = 8,
                             .hk = 2,
                             .s = 5,
                             .sq = 5,
                             .sk = 90,
                             .d = 128,
                             .rotary = 64,
                             .positions = 90};
    const heddle_append_data t = {.size = sizeof t,
                                  .k_new = address(0, 1, skew),
                                  .v_new = address(0, 2, skew),
                                  .k = address(0, 3, skew),
                                  .v = address(0, 4, skew),
                                  .q = address(0, 5, skew),
                                  .q_out = address(0, 5, skew),
                                  .cos = address(0, 6, skew),
                                  .sin = address(0, 7, skew),
                                  .seqlens_k = address(0, 8, skew)};
    return heddle_attention_append(&a, &t, stream);
}

static void sweep_merge_and_append(heddle_dtype dtype) {
    for (int skew = 0; skew < 8; skew += 4)
        MUST(run_merge(dtype, skew, NULL) == HEDDLE_OK && run_append(dtype, 0, skew, NULL) == HEDDLE_OK &&
             run_append(dtype, HEDDLE_E4M3, skew, NULL) == HEDDLE_OK);
}

/* Memory of the host in place of one of a GPU's; a grid that is none; and lengths alone, which are a launch, or nothing. */
static void refuse_append(float *host) {
    heddle_append a = {.size = sizeof a, .device = HEDDLE_CUDA, .b = 1, .hk = 1, .s = 1, .sk = 8, .d = 4};
    heddle_append_data t = {.size = sizeof t, .k_new = address(0, 1, 0), .v_new = address(0, 2, 0)};
    t.k = address(0, 3, 0);
    t.v = host;
    t.seqlens_k = address(0, 8, 0);
    MUST(heddle_attention_append(&a, &t, NULL) == HEDDLE_WRONG_DEVICE);
    MUST(strstr(heddle_last_message(), "v = "));
    t.v = address(0, 4, 0);
    a.hk = INT64_C(1) << 30;
    MUST(heddle_attention_append(&a, &t, NULL) == HEDDLE_UNSUPPORTED);
    MUST(strstr(heddle_last_message(), "2^31 pieces"));
    a.hk = INT64_C(1) << 20;
    a.b = INT64_C(1) << 22;
    MUST(heddle_attention_append(&a, &t, NULL) == HEDDLE_UNSUPPORTED);
    MUST(strstr(heddle_last_message(), "2^31 blocks"));
    const int before = fake_launches("heddle_attention_append_f32_d512_plain_sm80");
    a.hk = a.b = 1;
    a.s = 0;
    MUST(heddle_attention_append(&a, &t, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_append_f32_d512_plain_sm80") == before);
    t.seqlens_out = address(0, 9, 0);
    MUST(heddle_attention_append(&a, &t, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_append_f32_d512_plain_sm80") == before + 1);
}

/* The limits of real cards: a block's shared memory, and multiprocessors. The fake launches nothing that asks for more. */
static void on_card(const char *cc, const char *shared, const char *multiprocessors) {
    set("FAKE_CC", cc);
    set("FAKE_SHARED", shared);
    set("FAKE_MULTIPROCESSORS", multiprocessors);
    for (int dtype = HEDDLE_F32; dtype <= HEDDLE_F16; dtype++) {
        sweep_attention((heddle_dtype)dtype);
        sweep_norm_linear((heddle_dtype)dtype);
        sweep_merge_and_append((heddle_dtype)dtype);
    }
    MUST(fake_launches(NULL) > 1000);
}
static void on_a100(void) {
    on_card("80", "166912", "108");
}
static void on_rtx3090(void) {
    on_card("86", "101376", "82");
}
static void on_orin(void) {
    on_card("87", "166912", "16");
}
static void on_rtx4090(void) {
    on_card("89", "101376", "128");
}
static void on_rtx5090(void) {
    on_card("120", "101376", "170");
}
static void on_l40s(void) {
    on_card("89", "101376", "142");
}
static void on_b200(void) {
    on_card("100", "232448", "148");
}
static void with_little_shared_memory(void) {
    on_card("86", "49152", "82");
}

/* On Hopper, where the sm90 family is chosen, without it, and with the small family everywhere, and on a card that has too little shared
 * memory for the tensor cores' kernels: together they launch every kernel that exists. */
static void on_h200(void) {
    on_card("90", "232448", "132");
}

static const char *kernel_of(heddle_attention a, heddle_pass pass) {
    static char name[128];
    a.device = HEDDLE_CUDA;
    MUST(heddle_attention_kernel(&a, pass, name, sizeof name) == HEDDLE_OK);
    return name;
}

/* One launch for the smallest problems; the tensor cores for large ones, and for what the small kernels cannot. */
static void few_rows(void) {
    heddle_attention a = attention_desc(HEDDLE_F32, 1, 1, 1, 128, 128, 32, 32);
    MUST(!strcmp(kernel_of(a, HEDDLE_FORWARD), "heddle_attention_fwd_f32_d32_full_small"));
    MUST(!strcmp(kernel_of(a, HEDDLE_BACKWARD), "heddle_attention_bwd_f32_d32_full_small"));
    for (int pass = 0; pass < 2; pass++) {
        const int before = fake_launches(NULL);
        MUST(run_attention(a, (heddle_pass)pass, 4, NULL) == HEDDLE_OK);
        MUST(fake_launches(NULL) == before + 1 + pass); /* D of few keys before the backward */
    }
    a.sk = 200;
    const int more = fake_launches(NULL);
    MUST(run_attention(a, HEDDLE_BACKWARD, 4, NULL) == HEDDLE_OK);
    MUST(fake_launches(NULL) == more + 1);
    a.features = HEDDLE_WEIGHTS;
    MUST(!strstr(kernel_of(a, HEDDLE_BACKWARD), "small"));
    a.features = HEDDLE_SINKS |
                 HEDDLE_BIAS; /* dbias and dsinks have launches of their own, and so has D: a bias may leave few keys */
    const int before = fake_launches(NULL);
    MUST(run_attention(a, HEDDLE_BACKWARD, 0, NULL) == HEDDLE_OK);
    MUST(fake_launches(NULL) == before + 4);
    for (int dtype = HEDDLE_F32; dtype <= HEDDLE_F16; dtype++)
        for (int pass = 0; pass < 2; pass++) {
            a = attention_desc((heddle_dtype)dtype, 4, 16, 16, 1024, 1024, 64, 64);
            MUST(!strstr(kernel_of(a, (heddle_pass)pass), "small"));
            a.b = 0;
            MUST(!strstr(kernel_of(a, (heddle_pass)pass), "small"));
        }
    /* float32: both passes or none, whatever the size; few queries have kernels of their own. */
    for (int64_t d = 32; d <= 128; d *= 2)
        for (int64_t s = 70; s < 3000; s = s * 7 / 5)
            for (int64_t h = 1; h <= 64; h *= 4) {
                a = attention_desc(HEDDLE_F32, 2, h, 1, s, s * 2, d, d);
                MUST(!strstr(kernel_of(a, HEDDLE_FORWARD), "small") == !strstr(kernel_of(a, HEDDLE_BACKWARD), "small"));
            }
}

/* Few queries: one launch where there are enough heads, two where blocks share their keys; drivers whose graphs do not know it
 * are asked for no overlap. */
static void decoding(void) {
    heddle_attention a = attention_desc(HEDDLE_BF16, 1, 32, 8, 1, 8192, 128, 128);
    MUST(!strcmp(kernel_of(a, HEDDLE_FORWARD), "heddle_attention_fwd_bf16_d128_decode_sm80"));
    int before = fake_launches(NULL);
    MUST(run_attention(a, HEDDLE_FORWARD, 0, NULL) == HEDDLE_OK);
    MUST(fake_launches(NULL) == before + 2);
    a.b = 64;
    before = fake_launches(NULL);
    MUST(run_attention(a, HEDDLE_FORWARD, 0, NULL) == HEDDLE_OK);
    MUST(fake_launches(NULL) == before + 1);
}

static void decoding_on_blackwell(void) {
    set("FAKE_CC", "100");
    decoding();
}

static void decoding_by_an_old_driver(void) {
    set("FAKE_VERSION", "12020");
    decoding();
}

static void small_left_out(void) {
    set("HEDDLE_CUDA_FAMILY", "sm90");
    MUST(!strstr(kernel_of(attention_desc(HEDDLE_F32, 1, 1, 1, 128, 128, 32, 32), HEDDLE_FORWARD), "small"));
}

/* float32 on Hopper is split first, however it lies; the workspace grows with the length. Not for TF32, wide heads, few queries. */
static void float32_on_hopper(void) {
    set("FAKE_CC", "90");
    set("FAKE_SHARED", "232448");
    set("FAKE_MULTIPROCESSORS", "132");
    heddle_attention a = attention_desc(HEDDLE_F32, 2, 16, 4, 2000, 2000, 128, 70);
    size_t bytes[2] = {0, 0};
    a.k_stride = (heddle_strides){0, 2000 * 131, 131};
    MUST(run_attention(a, HEDDLE_FORWARD, 4, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_split_f32_d128_lean_sm90") == 1);
    MUST(fake_launches("heddle_attention_fwd_f32_d128_lean_sm90") == 1 && fake_launches(NULL) == 2);
    a.device = HEDDLE_CUDA;
    for (int x = 0; x < 2; x++, a.sq *= 2, a.sk *= 2)
        MUST(heddle_attention_workspace(&a, HEDDLE_FORWARD, &bytes[x]) == HEDDLE_OK);
    MUST(bytes[0] >= (size_t)2 * (4 + 4) * 2000 * 128 * 4 && bytes[1] <= 2 * bytes[0]);
    a = attention_desc(HEDDLE_F32, 2, 16, 4, 2000, 2000, 64, 33);
    a.device = HEDDLE_CUDA;
    const int before = fake_launches(NULL);
    MUST(run_attention(a, HEDDLE_BACKWARD, 4, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_split_f32_d64_lean_sm90") == 1);
    MUST(fake_launches("heddle_attention_prep_f32_d64_lean_sm90") == 1);
    MUST(fake_launches("heddle_attention_dkdv_f32_d64_lean_sm90") == 1);
    MUST(fake_launches("heddle_attention_dq_f32_d64_lean_sm90") == 1 && fake_launches(NULL) == before + 4);
    for (int x = 0; x < 2; x++, a.sq *= 2, a.sk *= 2)
        MUST(heddle_attention_workspace(&a, HEDDLE_BACKWARD, &bytes[x]) == HEDDLE_OK);
    MUST(bytes[0] >= (size_t)2 * (16 + 4 + 4 + 16) * 2000 * 64 * 4 && bytes[1] <= 2 * bytes[0]);
    heddle_attention_data t = attention_pointers(&a, HEDDLE_BACKWARD, 0);
    t.dout = NULL; /* nothing to split */
    t.dlse = t.lse;
    MUST(heddle_attention_backward(&a, &t, address(0, 60, 0), 2 * bytes[1], NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_split_f32_d64_lean_sm90") == 1);
    a = attention_desc(HEDDLE_F32, 2, 16, 4, 2000, 2000, 128, 0);
    a.features = HEDDLE_TF32;
    MUST(strstr(kernel_of(a, HEDDLE_FORWARD), "sm80"));
    MUST(strstr(kernel_of(attention_desc(HEDDLE_F32, 2, 16, 4, 2000, 2000, 130, 0), HEDDLE_FORWARD),
                "f32_d256_lean_sm90"));
    MUST(strstr(kernel_of(attention_desc(HEDDLE_F32, 2, 16, 4, 2000, 2000, 40, 256), HEDDLE_BACKWARD),
                "f32_d256_lean_sm90"));
    MUST(strstr(kernel_of(attention_desc(HEDDLE_F32, 2, 16, 4, 2000, 2000, 260, 0), HEDDLE_FORWARD), "sm80"));
    MUST(strstr(kernel_of(attention_desc(HEDDLE_F32, 2, 16, 4, 4, 20000, 128, 0), HEDDLE_FORWARD), "sm80"));
}

/* The narrowest kernel that will do, in each pass for itself. */
static void head_dims_on_hopper(void) {
    set("FAKE_CC", "90");
    set("FAKE_SHARED", "232448");
    set("FAKE_MULTIPROCESSORS", "132");
    static const struct {
        int64_t d, dv;
        const char *forward, *backward, *in_order;
    } rows[] = {{64, 64, "fwd_bf16_d64_lean_sm90", "bwd_bf16_d64_lean_sm90", "dkdv_bf16_d64_lean_sm90"},
                {72, 96, "fwd_bf16_d96_lean_sm90", "bwd_bf16_d96_long_sm90", "dkdv_bf16_d128_lean_sm90"},
                {96, 96, "fwd_bf16_d96_lean_sm90", "bwd_bf16_d96_long_sm90", "dkdv_bf16_d128_lean_sm90"},
                {96, 104, "fwd_bf16_d128_lean_sm90", "bwd_bf16_d128_long_sm90", "dkdv_bf16_d128_lean_sm90"},
                {136, 64, "fwd_bf16_d192_lean_sm90", "bwd_bf16_d192_lean_sm90", "dkdv_bf16_d256_lean_sm90"},
                {200, 64, "fwd_bf16_d256_lean_sm90", "bwd_bf16_d256_lean_sm90", "dkdv_bf16_d256_lean_sm90"},
                {264, 264, "fwd_bf16_d320_lean_sm90", "dkdv_bf16_d320_lean_sm90", "dkdv_bf16_d320_lean_sm90"},
                {328, 64, "fwd_bf16_d384_lean_sm90", "dkdv_bf16_d384_lean_sm90", "dkdv_bf16_d384_lean_sm90"},
                {64, 392, "fwd_bf16_d512_lean_sm90", "dkdv_bf16_d512_lean_sm90", "dkdv_bf16_d512_lean_sm90"}};
    for (size_t x = 0; x < COUNT(rows); x++) {
        heddle_attention a = attention_desc(HEDDLE_BF16, 2, 16, 16, 8192, 8192, rows[x].d, rows[x].dv);
        a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        MUST(strstr(kernel_of(a, HEDDLE_FORWARD), rows[x].forward));
        MUST(strstr(kernel_of(a, HEDDLE_BACKWARD), rows[x].backward));
        MUST(run_attention(a, HEDDLE_FORWARD, 16, NULL) == HEDDLE_OK);
        MUST(run_attention(a, HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
        a.features = HEDDLE_DETERMINISTIC;
        MUST(strstr(kernel_of(a, HEDDLE_BACKWARD), rows[x].in_order));
        a.dtype = HEDDLE_F16;
        MUST(run_attention(a, HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
        a.softcap = 30; /* over 256 the older kernels have it */
        MUST((strstr(kernel_of(a, HEDDLE_BACKWARD), "sm80") != NULL) == (rows[x].d > 256 || rows[x].dv > 256));
    }
    MUST(fake_launches("heddle_attention_light_f16_d512_lean_sm90") == 3);
    MUST(fake_launches("heddle_attention_bwd_bf16_d96_long_sm90") == 2);
    MUST(fake_launches("heddle_attention_gather_bf16_d128_lean_sm90") == 3);
    MUST(strstr(kernel_of(attention_desc(HEDDLE_F16, 2, 64, 64, 1000, 1000, 80, 0), HEDDLE_BACKWARD), "d96_lean_sm90"));
}

/* A part takes the kernels of the whole; with dropout the plain ones, where an eighth key is not the first of the part. What adds to what is
 * there takes a launch more in forward, and D from a launch of its own in the family small. */
static void parts(void) {
    set("FAKE_CC", "90");
    set("FAKE_SHARED", "232448");
    set("FAKE_MULTIPROCESSORS", "132");
    heddle_attention a = attention_desc(HEDDLE_BF16, 2, 16, 16, 8192, 8192, 128, 128);
    a.mask = HEDDLE_CAUSAL_TOP_LEFT;
    for (int adds = 0; adds < 2; adds++) {
        const int before = fake_launches(NULL);
        a.q_offset = a.k_offset = 5;
        a.features = adds ? HEDDLE_ACCUMULATE : 0;
        MUST(strstr(kernel_of(a, HEDDLE_FORWARD), adds ? "fwd_bf16_d128_adding_sm90" : "fwd_bf16_d128_lean_sm90"));
        MUST(strstr(kernel_of(a, HEDDLE_BACKWARD), "bwd_bf16_d128_long_sm90"));
        MUST(run_attention(a, HEDDLE_FORWARD, 0, NULL) == HEDDLE_OK);
        MUST(fake_launches(NULL) == before + 1 + adds);
        MUST(run_attention(a, HEDDLE_BACKWARD, 0, NULL) == HEDDLE_OK);
        MUST(fake_launches("heddle_attention_lse_bf16_d512_plain_sm80") == adds);
    }
    a.dropout = 0.25;
    MUST(strstr(kernel_of(a, HEDDLE_FORWARD), "plain") && strstr(kernel_of(a, HEDDLE_BACKWARD), "plain"));
    a.k_offset = 16;
    MUST(strstr(kernel_of(a, HEDDLE_FORWARD), "dropped_sm90"));
    MUST(strstr(kernel_of(a, HEDDLE_BACKWARD), "dropped_sm90"));
    a = attention_desc(HEDDLE_F32, 1, 1, 1, 128, 128, 32, 32);
    a.q_offset = 1000;
    MUST(strstr(kernel_of(a, HEDDLE_FORWARD), "small") && strstr(kernel_of(a, HEDDLE_BACKWARD), "small"));
    a.features = HEDDLE_ACCUMULATE;
    MUST(strstr(kernel_of(a, HEDDLE_FORWARD), "small") && strstr(kernel_of(a, HEDDLE_BACKWARD), "small"));
    const int before = fake_launches("heddle_attention_prep_f32_d512_plain_sm80");
    a.sk = 200; /* not so few that they would need it */
    MUST(run_attention(a, HEDDLE_BACKWARD, 0, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_prep_f32_d512_plain_sm80") == before + 1);
    MUST(run_merge(HEDDLE_F16, 0, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_merge_f16_d512_plain_sm80") == 1);
    MUST(run_merge(HEDDLE_F16, 0, (void *)0x2000) == HEDDLE_WRONG_DEVICE);
    float host[4];
    const heddle_merge m = {.size = sizeof m, .device = HEDDLE_CUDA, .b = 1, .h = 1, .s = 1, .dv = 4};
    MUST(heddle_attention_merge(&m, address(0, 1, 0), address(0, 2, 0), host, address(0, 4, 0), NULL) ==
         HEDDLE_WRONG_DEVICE);
    MUST(strstr(heddle_last_message(), "other_o = "));
    MUST(run_append(HEDDLE_BF16, 0, 0, NULL) == HEDDLE_OK && run_append(HEDDLE_BF16, 0, 4, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_append_bf16_d512_plain_sm80") == 2);
    MUST(run_append(HEDDLE_BF16, 0, 0, (void *)0x2000) == HEDDLE_WRONG_DEVICE);
    refuse_append(host);
    set("FAKE_CONTEXT", "0");
    MUST(run_merge(HEDDLE_F16, 0, NULL) == HEDDLE_OK && fake_depth() == 0);
    MUST(run_append(HEDDLE_F16, 0, 0, NULL) == HEDDLE_OK && fake_depth() == 0);
}

/* The largest launch of a problem with so many multiprocessors. */
static int blocks_of(heddle_attention a, heddle_pass pass, int64_t multiprocessors, const char *symbol) {
    a.multiprocessors = multiprocessors;
    MUST(run_attention(a, pass, 0, NULL) == HEDDLE_OK);
    return fake_blocks(symbol);
}

/* Some multiprocessors are left to others: of blocks that stay there are no more than the rest holds, first of which few, as the fake
 * remembers the most. A limit that leaves none is none. */
static void limited(void) {
    set("FAKE_CC", "90");
    set("FAKE_SHARED", "232448");
    set("FAKE_MULTIPROCESSORS", "132");
    static const struct {
        uint64_t features;
        heddle_pass pass;
        int all;
        const char *symbol;
    } rows[] = {{0, HEDDLE_FORWARD, 132, "heddle_attention_fwd_bf16_d128_lean_sm90"},
                {HEDDLE_ACCUMULATE, HEDDLE_FORWARD, 132, "heddle_attention_fwd_bf16_d128_adding_sm90"},
                {HEDDLE_BOOL_MASK, HEDDLE_FORWARD, 132, "heddle_attention_fwd_bf16_d128_masked_sm90"},
                {HEDDLE_VARLEN | HEDDLE_ALIBI, HEDDLE_FORWARD, 512, "heddle_attention_fwd_bf16_d128_capped_sm90"},
                {0, HEDDLE_BACKWARD, 132, "heddle_attention_bwd_bf16_d128_long_sm90"},
                {HEDDLE_BOOL_MASK, HEDDLE_BACKWARD, 512, "heddle_attention_bwd_bf16_d128_masked_sm90"},
                {HEDDLE_DETERMINISTIC, HEDDLE_BACKWARD, 132, "heddle_attention_dkdv_bf16_d128_lean_sm90"},
                {HEDDLE_DETERMINISTIC | HEDDLE_ALIBI, HEDDLE_BACKWARD, 132, "heddle_attention_dq_bf16_d128_full_sm90"}};
    for (size_t x = 0; x < COUNT(rows); x++) {
        heddle_attention a = attention_desc(HEDDLE_BF16, 2, 16, 16, 4096, 4096, 128, 128);
        a.features = rows[x].features;
        a.total_q = a.total_k = a.features & HEDDLE_VARLEN ? 2 * 4096 : 0;
        if (!a.features)
            a.sq = a.sk = 8192;
        MUST(blocks_of(a, rows[x].pass, 1, rows[x].symbol) == 1);
        MUST(blocks_of(a, rows[x].pass, 101, rows[x].symbol) == 101);
        MUST(blocks_of(a, rows[x].pass, 132, rows[x].symbol) == rows[x].all);
        MUST(blocks_of(a, rows[x].pass, INT32_MAX, rows[x].symbol) == rows[x].all);
        MUST(blocks_of(a, rows[x].pass, 0, rows[x].symbol) == rows[x].all);
    }
    static const int limits[][2] = {{1, 2}, {101, 100}, {132, 132}, {0, 132}}; /* of blocks in pairs */
    const heddle_attention pairs = attention_desc(HEDDLE_BF16, 2, 16, 16, 4096, 4096, 256, 256);
    for (size_t x = 1; x < COUNT(limits); x++)
        MUST(blocks_of(pairs, HEDDLE_BACKWARD, limits[x][0], "heddle_attention_bwd_bf16_d256_lean_sm90") ==
             limits[x][1]);
    heddle_attention hidden = pairs; /* what tiles cost is known to the device alone: a pair of blocks for each two */
    hidden.features = HEDDLE_BOOL_MASK;
    MUST(blocks_of(hidden, HEDDLE_BACKWARD, 101, "heddle_attention_bwd_bf16_d256_masked_sm90") == 100);
    MUST(blocks_of(hidden, HEDDLE_BACKWARD, 0, "heddle_attention_bwd_bf16_d256_masked_sm90") == 2 * 2 * 16 * 16);
    /* One block cannot make dK and dV where each has blocks of its own. */
    MUST(blocks_of(pairs, HEDDLE_BACKWARD, 1, "heddle_attention_bwd_bf16_d256_lean_sm80") > 0);
    MUST(blocks_of(attention_desc(HEDDLE_BF16, 1, 3, 3, 200, 300, 160, 0), HEDDLE_BACKWARD, 0,
                   "heddle_attention_bwd_bf16_d192_lean_sm90") == 2 * 3 * 3);
    heddle_norm_linear l = norm_linear_desc(HEDDLE_BF16, HEDDLE_LAYER_NORM, 16384, 4096, 4096);
    for (size_t x = 0; x < COUNT(limits); x++) {
        l.multiprocessors = limits[x][0];
        MUST(run_norm_linear(l, HEDDLE_FORWARD, 0, NULL) == HEDDLE_OK);
        MUST(fake_blocks("heddle_norm_linear_fwd_raw_n256_bf16_sm90") == limits[x][1]);
    }
}

/* One option alone has a kernel of its own, and dropout with a mask; several have the full one, but in backward up to d 128 without
 * dropout undropped; the full one has a bias that the copy engine cannot fetch, too. */
static void options_on_hopper(void) {
    set("FAKE_CC", "90");
    set("FAKE_SHARED", "232448");
    set("FAKE_MULTIPROCESSORS", "132");
    static const struct {
        uint64_t features;
        double softcap, dropout, scale;
        const char *variant, *backward; /* up to d 128 */
    } rows[] = {{0, 20, 0, 0, "capped", "capped"},
                {HEDDLE_ALIBI, 0, 0, 0, "capped", "capped"},
                {HEDDLE_BIAS, 0, 0, 0, "biased", "biased"},
                {HEDDLE_BOOL_MASK, 0, 0, 0, "masked", "masked"},
                {HEDDLE_SEGMENTS, 0, 0, 0, "masked", "masked"},
                {0, 0, 0.1, 0, "dropped", "dropped"},
                {HEDDLE_BOOL_MASK, 0, 0.1, 0, "maskdrop", "maskdrop"},
                {HEDDLE_SEGMENTS, 0, 0.1, 0, "maskdrop", "maskdrop"},
                {HEDDLE_BOOL_MASK, 20, 0.1, 0, "full", "full"},
                {HEDDLE_ALIBI | HEDDLE_BIAS, 0, 0, 0, "full", "undropped"},
                {HEDDLE_BOOL_MASK, 20, 0, 0, "full", "undropped"},
                {HEDDLE_BOOL_MASK, 0, 0, -1, "full", "full"}};
    for (size_t x = 0; x < COUNT(rows); x++)
        for (int d = 64; d <= 256; d += 64) {
            char name[64];
            heddle_attention a = attention_desc(HEDDLE_F16, 2, 16, 4, 4096, 4096, d, 0);
            a.features = rows[x].features;
            a.softcap = rows[x].softcap;
            a.dropout = rows[x].dropout;
            a.scale = rows[x].scale;
            const char *variant = rows[x].variant;
            const bool narrow = d == 64 && !strcmp(variant, "masked");         /* queries have masks of their own */
            const int columns = d > 128 && !strcmp(variant, "full") ? 256 : d; /* forward's full has no 192 */
            snprintf(name, sizeof name, "fwd_f16_d%d_%s_sm90", columns, narrow ? "narrow" : variant);
            MUST(strstr(kernel_of(a, HEDDLE_FORWARD), name));
            const bool several = !strcmp(variant, "full") || !strcmp(variant, "maskdrop"); /* in backward */
            snprintf(name, sizeof name, "bwd_f16_d%d_%s_sm90", d, d > 128 && several ? "full" : rows[x].backward);
            MUST(strstr(kernel_of(a, HEDDLE_BACKWARD), name));
            MUST(run_attention(a, HEDDLE_FORWARD, 16, NULL) == HEDDLE_OK);
            MUST(run_attention(a, HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
            a.features |= HEDDLE_DETERMINISTIC;
            snprintf(name, sizeof name, "dkdv_f16_d%d_full_sm90", d > 128 ? 256 : d);
            MUST(strstr(kernel_of(a, HEDDLE_BACKWARD), name));
            MUST(run_attention(a, HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
        }
    /* dbias has an element for each score */
    MUST(fake_launches("heddle_attention_bwd_f16_d128_dbiased_sm90") == 1);
    MUST(fake_launches("heddle_attention_bwd_f16_d128_biased_sm90") == 0);
    MUST(fake_launches("heddle_attention_seen_f16_d512_plain_sm80") == 24);
    for (int x = 0; x < 4; x++) { /* of float16's tanh little is left far below a cap */
        heddle_attention a = attention_desc(x < 2 ? HEDDLE_F16 : HEDDLE_BF16, 2, 16, 4, 4096, 4096, 128, 0);
        a.softcap = x % 2 ? 65 : 64;
        MUST(!strstr(kernel_of(a, HEDDLE_FORWARD), "sm90") == (x == 1));
        MUST(!strstr(kernel_of(a, HEDDLE_BACKWARD), "sm90") == (x == 1));
    }
    heddle_attention a = attention_desc(HEDDLE_F16, 2, 16, 16, 4096, 4096, 64, 0);
    a.features = HEDDLE_BOOL_MASK;
    a.bool_mask_stride.b = a.sk; /* padding */
    MUST(strstr(kernel_of(a, HEDDLE_FORWARD), "masked_sm90"));
    for (int d = 64; d <= 256; d += 64) {
        char name[64];
        a = attention_desc(HEDDLE_BF16, 2, 16, 4, 1000, 1001, d, 0);
        a.features = HEDDLE_BOOL_MASK;
        snprintf(name, sizeof name, "heddle_attention_bwd_bf16_d%d_masked_sm90", d);
        MUST(strstr(kernel_of(a, HEDDLE_BACKWARD), name));
        a.features = HEDDLE_BIAS;
        a.bias_stride.b = a.sk; /* padding in numbers, in rows that the copy engine cannot fetch */
        snprintf(name, sizeof name, "heddle_attention_bwd_bf16_d%d_keyed_sm90", d);
        MUST(strstr(kernel_of(a, HEDDLE_BACKWARD), name));
        MUST(run_attention(a, HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
        MUST(fake_launches(name) == 1);
    }
    a = attention_desc(HEDDLE_F16, 2, 16, 16, 1000, 1001, 128, 0); /* odd rows of bias */
    a.features = HEDDLE_BIAS;
    for (int pass = 0; pass < 2; pass++)
        MUST(run_attention(a, (heddle_pass)pass, 16, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_bwd_f16_d128_dbiased_sm90") == 1);
    MUST(fake_launches("heddle_attention_bwd_f16_d128_biased_sm90") == 0);
    MUST(fake_launches("heddle_attention_fwd_f16_d128_biased_sm90") == 1);
}

/* Gradients of a bias, and whether each is a sum over nothing whose rows are whole pieces of 16 bytes. */
static const struct {
    int64_t b;
    heddle_strides stride;
    bool given;
} dbias_rows[] = {{2, {0, 0, 0}, true},
                  {1, {0, 1024 * 1024, 1024}, true},
                  {2, {0, 1024 * 1024, 1024}, false},
                  {2, {1024 * 1024, 0, 1024}, false},
                  {2, {16 * 1024, 1024, 0}, false},
                  {2, {16 * 1024 * 1028, 1024 * 1028, 1028}, false},
                  {2, {16 * 1024 * 1032, 1024 * 1032, 1032}, true}};

static heddle_attention with_dbias(size_t row) {
    const int64_t s = 1024;
    heddle_attention a = attention_desc(HEDDLE_BF16, dbias_rows[row].b, 16, 4, s, s, 64, 0);
    a.features = HEDDLE_BIAS;
    a.bias_stride = (heddle_strides){0, s * s, s};
    a.dbias_stride = dbias_rows[row].stride;
    return a;
}

/* Who writes dbias: the kernel that makes dk, where it can; else one of its own. */
static void dbias_on_hopper(void) {
    set("FAKE_CC", "90");
    set("FAKE_SHARED", "232448");
    set("FAKE_MULTIPROCESSORS", "132");
    int given = 0, own = 0;
    for (size_t x = 0; x < COUNT(dbias_rows); x++) {
        MUST(run_attention(with_dbias(x), HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
        given += dbias_rows[x].given, own += !dbias_rows[x].given;
        MUST(fake_launches("heddle_attention_bwd_bf16_d64_dbiased_sm90") == given);
        MUST(fake_launches("heddle_attention_bwd_bf16_d64_biased_sm90") == own);
        MUST(fake_launches("heddle_attention_dbias_bf16_d64_full_sm90") == own);
    }
}

/* The same on older GPUs, where one kernel has every option; a softcap bends dS, and who wants the same bits has other kernels. */
static void dbias_on_ampere(void) {
    set("FAKE_CC", "80");
    set("FAKE_SHARED", "166912");
    set("FAKE_MULTIPROCESSORS", "108");
    int own = 0;
    for (size_t x = 0; x < COUNT(dbias_rows); x++) {
        MUST(run_attention(with_dbias(x), HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
        own += !dbias_rows[x].given;
        MUST(fake_launches("heddle_attention_bwd_bf16_d64_full_sm80") == (int)x + 1);
        MUST(fake_launches("heddle_attention_dbias_bf16_d64_full_sm80") == own);
    }
    const int all = (int)COUNT(dbias_rows);
    heddle_attention a = with_dbias(0);
    a.softcap = 256;
    MUST(run_attention(a, HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_bwd_bf16_d64_full_sm80") == all + 1);
    MUST(fake_launches("heddle_attention_dbias_bf16_d64_full_sm80") == own + 1);
    a.softcap = 257;
    MUST(run_attention(a, HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_dkdv_bf16_d64_full_sm80") == 1);
    a.softcap = 0;
    a.features |= HEDDLE_DETERMINISTIC;
    MUST(run_attention(a, HEDDLE_BACKWARD, 16, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_dkdv_bf16_d64_full_sm80") == 2);
    MUST(fake_launches("heddle_attention_bwd_bf16_d64_full_sm80") == all + 1);
}

/* --------------------------------------------------------------------------------------------------------- tests */

SCENARIO(on_a100)
SCENARIO(on_rtx3090)
SCENARIO(on_orin)
SCENARIO(on_rtx4090)
SCENARIO(on_l40s)
SCENARIO(on_rtx5090)
SCENARIO(on_b200)
SCENARIO(with_little_shared_memory)
SCENARIO(on_h200)
SCENARIO(few_rows)
SCENARIO(decoding)
SCENARIO(decoding_on_blackwell)
SCENARIO(decoding_by_an_old_driver)
SCENARIO(small_left_out)
SCENARIO(float32_on_hopper)
SCENARIO(head_dims_on_hopper)
SCENARIO(parts)
SCENARIO(limited)
SCENARIO(options_on_hopper)
SCENARIO(dbias_on_hopper)
SCENARIO(dbias_on_ampere)

enum { KERNELS = CUDA_KERNELS };

static const char *symbol_of(int kernel) {
    return heddle__cuda_kernels[kernel].symbol;
}

/* Which kernels were launched, from the child back to the parent. */
static void every_kernel(const char *family, void (*on_a_card)(void), bool *seen) {
    int ends[2];
    unsigned char was[KERNELS];
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        set("HEDDLE_CUDA_FAMILY", family);
        on_a_card();
        for (int x = 0; x < KERNELS; x++)
            was[x] = fake_launches(symbol_of(x)) > 0;
        _exit(write(ends[1], was, sizeof was) == sizeof was ? 0 : 1);
    }
    close(ends[1]);
    int status = 1;
    assert_int_equal(read(ends[0], was, sizeof was), sizeof was);
    assert_true(waitpid(child, &status, 0) == child && status == 0);
    close(ends[0]);
    for (int x = 0; x < KERNELS; x++)
        seen[x] |= was[x];
}

static void test_no_kernel_is_dead(void **state) {
    (void)state;
    bool seen[KERNELS] = {false};
    every_kernel(NULL, on_h200, seen);
    every_kernel("sm80", on_h200, seen);
    every_kernel("small", on_h200, seen);
    every_kernel("sm80", on_a100, seen);                 /* smaller tiles */
    every_kernel("sm80", on_rtx4090, seen);              /* the least */
    every_kernel(NULL, with_little_shared_memory, seen); /* plain ones */
    int dead = 0;
    for (int x = 0; x < KERNELS; x++)
        if (!seen[x]) {
            printf("never launched: %s\n", symbol_of(x));
            dead++;
        }
    assert_int_equal(dead, 0);
}

int main(void) {
    if (!is_fake_driver())
        return 77;
    unsetenv("HEDDLE_CUDA_FAMILY");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_on_a100),
        cmocka_unit_test(test_on_rtx3090),
        cmocka_unit_test(test_on_orin),
        cmocka_unit_test(test_on_rtx4090),
        cmocka_unit_test(test_on_l40s),
        cmocka_unit_test(test_on_rtx5090),
        cmocka_unit_test(test_on_b200),
        cmocka_unit_test(test_with_little_shared_memory),
        cmocka_unit_test(test_on_h200),
        cmocka_unit_test(test_few_rows),
        cmocka_unit_test(test_decoding),
        cmocka_unit_test(test_decoding_on_blackwell),
        cmocka_unit_test(test_decoding_by_an_old_driver),
        cmocka_unit_test(test_small_left_out),
        cmocka_unit_test(test_float32_on_hopper),
        cmocka_unit_test(test_head_dims_on_hopper),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_limited),
        cmocka_unit_test(test_options_on_hopper),
        cmocka_unit_test(test_dbias_on_hopper),
        cmocka_unit_test(test_dbias_on_ampere),
        cmocka_unit_test(test_no_kernel_is_dead),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

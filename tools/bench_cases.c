/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"
#include "device_memory.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define FULL HEDDLE_MASK_NONE
#define CAUSAL HEDDLE_CAUSAL_TOP_LEFT
#define SELF(dtype, b, h, s, d, mask)                                                                                  \
    { dtype, b, h, h, s, s, d, mask, 0, 0, 0, false, NULL }
#define DECODE(dtype, b, h, hk, sk, d)                                                                                 \
    { dtype, b, h, hk, 1, sk, d, FULL, 0, 0, 0, true, NULL }
#define LINEAR(dtype, m, k, n)                                                                                         \
    { dtype, 0, 0, 0, 0, 0, 0, FULL, m, k, n, false, NULL }

static const bench_case cpu_cases[] = {
    SELF(HEDDLE_F32, 1, 8, 1024, 64, FULL),    SELF(HEDDLE_F32, 1, 8, 1024, 64, CAUSAL),
    SELF(HEDDLE_F32, 1, 8, 1024, 128, FULL),   SELF(HEDDLE_F32, 1, 8, 1024, 128, CAUSAL),
    SELF(HEDDLE_F32, 1, 1, 8192, 64, FULL),    SELF(HEDDLE_F32, 1, 1, 8192, 64, CAUSAL),
    SELF(HEDDLE_F32, 8, 12, 197, 64, FULL),    SELF(HEDDLE_F32, 1, 1, 64, 64, FULL),
    SELF(HEDDLE_F32, 1, 8, 1000, 100, CAUSAL), SELF(HEDDLE_F32, 1, 4, 1024, 256, FULL),
    SELF(HEDDLE_BF16, 1, 8, 1024, 64, FULL),   SELF(HEDDLE_BF16, 1, 8, 1024, 128, CAUSAL),
    SELF(HEDDLE_F16, 1, 8, 1024, 64, FULL),    SELF(HEDDLE_F16, 1, 8, 1024, 128, CAUSAL),
    DECODE(HEDDLE_F32, 1, 32, 8, 8192, 128),   DECODE(HEDDLE_BF16, 1, 32, 8, 8192, 128),
    DECODE(HEDDLE_F16, 1, 32, 8, 8192, 128),   LINEAR(HEDDLE_F32, 2048, 768, 3072),
    LINEAR(HEDDLE_BF16, 2048, 768, 3072),      LINEAR(HEDDLE_F16, 2048, 768, 3072),
    LINEAR(HEDDLE_F32, 1, 768, 3072),
};

/* What an option adds to a problem of the GPU. */
static const struct option_kind {
    const char *name;
    uint64_t features;
    bool causal, shared; /* shared: one bias for all of the batch */
} kinds[] = {
    {"softcap", 0, true, false},
    {"alibi", HEDDLE_ALIBI, true, false},
    {"window 512", HEDDLE_WINDOW, true, false},
    {"sinks", HEDDLE_SINKS, true, false},
    {"dropout", 0, true, false},
    {"dense", HEDDLE_BOOL_MASK, false, true},
    {"padding", HEDDLE_BOOL_MASK, false, false},
    {"bias shared", HEDDLE_BIAS, false, true},
    {"dbias shared", HEDDLE_BIAS, false, true},
    {"dbias", HEDDLE_BIAS, false, false}, /* an element for each score */
    {"bias of keys", HEDDLE_BIAS, false,
     false}, /* the same for all queries, as padding is that is written in numbers */
    {"softcap alibi", HEDDLE_ALIBI, true, false},
    {"softcap dropout", 0, true, false},
    {"deterministic", HEDDLE_DETERMINISTIC, true, false},
    {"deterministic softcap alibi", HEDDLE_DETERMINISTIC | HEDDLE_ALIBI, true, false},
    {"dense softcap", HEDDLE_BOOL_MASK, false, true},
    {"deterministic dense softcap", HEDDLE_DETERMINISTIC | HEDDLE_BOOL_MASK, false, true},
    {"dense dropout", HEDDLE_BOOL_MASK, false, true},
    {"accumulate", HEDDLE_ACCUMULATE, true, false},
    {"tf32", HEDDLE_TF32, true, false},
    {"pages", HEDDLE_PAGES, false, false},
    {"odd part", 0, true,
     false}, /* with dropout, and no multiple of eight keys in front of it: what none but the plain kernels take */
    {"e4m3", HEDDLE_E4M3, false, false},
    {"pages e4m3", HEDDLE_PAGES | HEDDLE_E4M3, false, false},
    {"rms", 0, false, false}, /* of norm-linear */
    {"pages softcap", HEDDLE_PAGES, false, false},
    {"pages alibi", HEDDLE_PAGES | HEDDLE_ALIBI, false, false},
    {"pages window 512", HEDDLE_PAGES | HEDDLE_WINDOW, false, false},
    {"pages sinks", HEDDLE_PAGES | HEDDLE_SINKS, false, false},
    {"pages padding", HEDDLE_PAGES | HEDDLE_BOOL_MASK, false, false},
    {"pages dropout", HEDDLE_PAGES, false, false},
    {"pages bias shared", HEDDLE_PAGES | HEDDLE_BIAS, false, true},
    {"segments", HEDDLE_SEGMENTS, false, false}, /* documents of 500, */
    {"packed", HEDDLE_VARLEN, false, false},     /* and the same packed */
    {"blocks of 64", HEDDLE_BLOCKS, false, false},
    {"blocks of 128", HEDDLE_BLOCKS, false, false},
    {"gelu", HEDDLE_ACTIVATION, false, false}, /* of norm-linear, as all that follow */
    {"gelu by tanh", HEDDLE_ACTIVATION, false, false},
    {"silu", HEDDLE_ACTIVATION, false, false},
    {"residual", HEDDLE_RESIDUAL, false, false},
    {"no norm", 0, false, false},
    {"no norm residual", HEDDLE_RESIDUAL, false, false},
    {"z", HEDDLE_Z, false, false},
    {"prepared", 0, false, false}, /* a forward that finds what it makes of the weight: bench_prepare() */
    {"swiglu", HEDDLE_ACTIVATION, false, false},
};
enum {
    KINDS = sizeof kinds / sizeof *kinds,
    OF_LINEAR = 9,
    OF_LONG = 4,
    OF_PAGES = 7,
    ON_ALL_DIMS = KINDS - OF_LINEAR - OF_LONG - OF_PAGES - 5
};

static bool is_prepared(const bench_case *c) {
    return c->option && !strcmp(c->option, "prepared");
}

/* A row with an option of norm-linear. */
static bench_case linear_with(heddle_dtype dtype, const int64_t mkn[3], const char *option) {
    bench_case c = LINEAR(dtype, mkn[0], mkn[1], mkn[2]);
    c.option = option;
    c.forward_only = is_prepared(&c);
    return c;
}

static const struct option_kind *kind_of(const bench_case *c) {
    for (int i = 0; i < KINDS && c->option; i++)
        if (!strcmp(kinds[i].name, c->option))
            return &kinds[i];
    return NULL;
}

/* 16 384 tokens of a width of 2 048, as bench/gpu_attention.py has them. */
static bench_case gpu_case(heddle_dtype dtype, int64_t s, int64_t d, heddle_mask mask) {
    static const int64_t heads[][2] = {{32, 64}, {64, 32}, {96, 20}, {128, 16}, {192, 10}, {256, 8}};
    int64_t h = 4;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        if (heads[i][0] == d)
            h = heads[i][1];
    return (bench_case)SELF(dtype, 16384 / s, h, s, d, mask);
}

/* A token of each sequence and a whole prompt into a cache, and two results of 4096 queries. */
static int gpu_alone(heddle_dtype dtype, bench_case *out) {
    static const char *const options[] = {"append", "append pages", "append e4m3", "append pages e4m3"};
    int n = 0;
    for (int x = 0; x < 8; x++) {
        out[n] = (bench_case)DECODE(dtype, x % 2 ? 1 : 64, 32, 8, 8192, 128);
        out[n].sq = x % 2 ? 8192 : 1;
        out[n++].option = options[x / 2];
    }
    out[n] = (bench_case)SELF(dtype, 4, 16, 4096, 128, FULL);
    out[n].forward_only = true;
    out[n++].option = "merge";
    return n;
}

/* An option each, and two, at the head dim between those whose forward has a kernel for all. */
static int gpu_between(heddle_dtype dtype, bench_case *out) {
    static const char *const options[] = {"softcap",      "dropout",       "padding",      "bias shared",
                                          "bias of keys", "dense softcap", "dense dropout"};
    int n = 0;
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        out[n] = gpu_case(dtype, 4096, 192, CAUSAL);
        out[n].option = options[i];
        if (!kind_of(&out[n])->causal)
            out[n].mask = FULL;
        n++;
    }
    return n;
}

static int gpu_attention(heddle_dtype dtype, bench_case *out) {
    static const int64_t dims[] = {32, 64, 96, 128, 192, 256, 320, 384, 512}, adding[] = {96, 192, 320, 384, 512};
    int n = 0;
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        out[n++] = gpu_case(dtype, 4096, dims[i], CAUSAL);
    for (int64_t d = 64; d <= 256; d *= 2) {
        out[n++] = gpu_case(dtype, 4096, d, FULL);
        for (int i = 0; i < ON_ALL_DIMS; i++) {
            if ((kinds[i].features == HEDDLE_TF32) != (dtype == HEDDLE_F32) && kinds[i].features == HEDDLE_TF32)
                continue;
            if (dtype == HEDDLE_F32 && d != 128)
                continue;
            out[n] = gpu_case(dtype, 4096, d, kinds[i].causal ? CAUSAL : FULL);
            out[n++].option = kinds[i].name;
        }
    }
    if (dtype != HEDDLE_F32)
        n += gpu_between(dtype, out + n);
    out[n] = gpu_case(dtype, 4096, 128, CAUSAL);
    out[n].h = 32;
    out[n++].hk = 8;
    out[n++] = gpu_case(dtype, 512, 128, CAUSAL);
    out[n++] = gpu_case(dtype, 16384, 96, CAUSAL); /* a kernel of its own for long ones */
    out[n++] = (bench_case)SELF(dtype, 1, 16, 16384, 128, FULL);
    for (int x = 0; x < OF_LONG; x++) {
        out[n] = out[n - 1];
        out[n++].option = kinds[KINDS - OF_LINEAR - OF_LONG + x].name;
    }
    for (size_t i = 0; i < sizeof adding / sizeof *adding && dtype != HEDDLE_F32; i++) {
        out[n] = gpu_case(dtype, 4096, adding[i], CAUSAL);
        out[n++].option = "accumulate";
    }
    for (int64_t d = 64; d <= 256 && dtype == HEDDLE_F32; d *= 4) {
        out[n] = gpu_case(dtype, 4096, d, CAUSAL);
        out[n++].option = "alibi";
    }
    out[n] = (bench_case)SELF(dtype, 1, 16, 512, 128, CAUSAL);
    out[n++].option = "odd part";
    out[n++] = (bench_case)SELF(dtype, 1, 1, 128, 32, FULL);
    out[n++] = (bench_case)SELF(dtype, 1, 4, 128, 64, CAUSAL);
    out[n++] = (bench_case)SELF(dtype, 1, 4, 128, 128, CAUSAL);
    for (int64_t d = 64; d <= 256; d *= 2)
        out[n++] = (bench_case)DECODE(dtype, 32, 32, 8, 8192, d);
    for (int64_t d = 64; d <= 256; d *= 2)
        for (int64_t sq = 1; sq <= 512 && (sq == 1 || dtype != HEDDLE_F32); sq += 511) {
            out[n] = (bench_case)DECODE(dtype, 32, 32, 8, 8192, d);
            out[n].sq = sq;
            out[n++].option = "pages";
        }
    for (int64_t d = 64; d <= 256 && dtype != HEDDLE_F32; d *= 2)
        for (int x = 0; x < 4; x++) {
            out[n] = (bench_case)DECODE(dtype, 32, 32, 8, 8192, d);
            out[n].sq = x < 2 ? 1 : 512;
            out[n++].option = x % 2 ? "pages e4m3" : "e4m3";
        }
    for (int64_t d = 64; d <= 256 && dtype != HEDDLE_F32; d *= 2) {
        if (dtype == HEDDLE_BF16 && d == 128) /* among those below */
            continue;
        out[n] = (bench_case)DECODE(dtype, 32, 32, 8, 8192, d);
        out[n].sq = 512;
        out[n++].option = "pages softcap";
    }
    for (int x = 0; x < 2 * OF_PAGES && dtype == HEDDLE_BF16; x++) { /* decoding, and a chunk of a prompt */
        out[n] = (bench_case)DECODE(dtype, 32, 32, 8, 8192, 128);
        out[n].sq = x % 2 ? 512 : 1;
        out[n++].option = kinds[KINDS - OF_LINEAR - OF_LONG - OF_PAGES + x / 2].name;
    }
    return n + gpu_alone(dtype, out + n);
}

static int gpu_cases(bench_case *out) {
    static const heddle_dtype dtypes[] = {HEDDLE_BF16, HEDDLE_F16, HEDDLE_F32};
    /* Behind the first two: raw x; fewer rows of it; of each width of Hopper's tiles, forward by n and backward by k; rows that
     * nothing is aligned to; few of them. */
    static const int64_t sizes[][3] = {{16384, 1024, 4096}, {2048, 768, 3072},  {16384, 2048, 2048}, {4096, 2048, 2048},
                                       {2040, 4096, 744},   {2040, 1000, 1032}, {2040, 72, 1000},    {2040, 1000, 2040},
                                       {2040, 1272, 2040},  {2040, 1480, 2040}, {2048, 765, 3071},   {16, 768, 3072},
                                       {4, 4096, 4096},     {64, 4096, 4096},   {16, 8192, 8192},    {64, 8192, 8192},
                                       {128, 1024, 4096}};
    static const int64_t few[3] = {16, 768, 3072};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    int n = 0;
    for (int i = 0; i < 3; i++)
        n += gpu_attention(dtypes[i], out + n);
    for (int i = 0; i < 3; i++)
        for (int x = 0; x < SIZES; x++)
            out[n++] = (bench_case)LINEAR(dtypes[i], sizes[x][0], sizes[x][1], sizes[x][2]);
    for (int x = 0; x < 2; x++) {
        out[n] = (bench_case)LINEAR(HEDDLE_F32, sizes[x][0], sizes[x][1], sizes[x][2]);
        out[n++].option = "tf32";
    }
    for (int i = 0; i < 3; i++)
        for (int x = 0; x < OF_LINEAR; x++)
            out[n++] = linear_with(dtypes[i], sizes[0], kinds[KINDS - OF_LINEAR + x].name);
    for (int i = 0; i < 3; i += 2)
        out[n++] = linear_with(dtypes[i], few, "prepared");
    static const int64_t halves[] = {368, 504, 640, 736}; /* those widths, of two halves */
    for (int i = 0; i < 2; i++)
        for (int x = 0; x < 4; x++) {
            out[n] = (bench_case)LINEAR(dtypes[i], 2040, 72, halves[x]);
            out[n++].option = kinds[KINDS - 1].name;
        }
    return n;
}

/* An option each, beside the rows without; decoding in 16 bits, which e4m3 is for. */
static int cpu_options(bench_case *out) {
    static const char *const causal[] = {"softcap", "alibi", "window 512", "sinks", "dropout"};
    static const char *const full[] = {"dense", "bias shared", "dbias shared"};
    static const char *const decoding[] = {"pages", "e4m3", "pages e4m3"};
    int n = 0;
    for (size_t i = 0; i < sizeof causal / sizeof *causal; i++) {
        out[n] = (bench_case)SELF(HEDDLE_F32, 1, 8, 1024, 64, CAUSAL);
        out[n++].option = causal[i];
    }
    for (size_t i = 0; i < sizeof full / sizeof *full; i++) {
        out[n] = (bench_case)SELF(HEDDLE_F32, 1, 8, 1024, 64, FULL);
        out[n++].option = full[i];
    }
    for (size_t i = 0; i < sizeof decoding / sizeof *decoding; i++) {
        out[n] = (bench_case)DECODE(HEDDLE_BF16, 1, 32, 8, 8192, 128);
        out[n++].option = decoding[i];
    }
    return n;
}

int bench_cases(heddle_device device, bench_case out[BENCH_MOST_CASES]) {
    if (device == HEDDLE_CUDA)
        return gpu_cases(out);
    int n = (int)(sizeof cpu_cases / sizeof *cpu_cases);
    memcpy(out, cpu_cases, sizeof cpu_cases);
    n += cpu_options(out + n);
    for (int x = 0; x < OF_LONG; x++) {
        out[n] = (bench_case)SELF(HEDDLE_F32, 1, 4, 4096, 64, FULL);
        out[n++].option = kinds[KINDS - OF_LINEAR - OF_LONG + x].name;
    }
    static const int64_t many[3] = {2048, 768, 3072}, few[3] = {16, 768, 3072};
    for (int x = 0; x < OF_LINEAR; x++)
        out[n++] = linear_with(HEDDLE_F32, many, kinds[KINDS - OF_LINEAR + x].name);
    out[n++] = linear_with(HEDDLE_F32, many, "rms");
    out[n++] = linear_with(HEDDLE_F32, few, "prepared");
    out[n++] = linear_with(HEDDLE_BF16, few, "prepared");
    return n;
}

static const char *long_name(heddle_dtype dtype) {
    return dtype == HEDDLE_BF16 ? "bfloat16" : dtype == HEDDLE_F16 ? "float16" : "float32";
}

static void gpu_name(const bench_case *c, char *text, size_t n) {
    char rows[48];
    if (c->h == 0) {
        snprintf(text, n, "m%lld k%lld n%lld %s%s%s", (long long)c->m, (long long)c->k, (long long)c->n,
                 long_name(c->dtype), c->option ? " " : "", c->option ? c->option : "");
        return;
    }
    snprintf(rows, sizeof rows, c->sq == c->sk ? "S%lld" : "S%lldx%lld", (long long)c->sq, (long long)c->sk);
    snprintf(text, n, "B%lldH%lld/%lld%sD%lld%c-%s%s%s", (long long)c->b, (long long)c->h, (long long)c->hk, rows,
             (long long)c->d, c->mask == FULL ? 'f' : 'c', long_name(c->dtype), c->option ? " " : "",
             c->option ? c->option : "");
}

void bench_name(const bench_case *c, heddle_device device, char *text, size_t n) {
    char rows[64];
    if (device == HEDDLE_CUDA) {
        gpu_name(c, text, n);
        return;
    }
    if (c->h == 0) {
        snprintf(text, n, "norm-linear [%lld,%lld] -> %lld%s%s", (long long)c->m, (long long)c->k, (long long)c->n,
                 c->option ? " " : "", c->option ? c->option : "");
        return;
    }
    snprintf(rows, sizeof rows, c->sq == c->sk ? "s%lld" : "sq%lld sk%lld", (long long)c->sq, (long long)c->sk);
    char heads[32] = "";
    if (c->h != c->hk)
        snprintf(heads, sizeof heads, " hk%lld", (long long)c->hk);
    snprintf(text, n, "attention b%lld h%lld%s %s d%lld%s%s%s", (long long)c->b, (long long)c->h, heads, rows,
             (long long)c->d, c->mask == FULL ? "" : " causal", c->option ? " " : "", c->option ? c->option : "");
}

enum { DOCUMENT = 500, DENSITY = 4 }; /* rows of a document; of so many blocks a list names one */

static int64_t blocks_of_keys(const job *j) {
    return (j->a.sk + j->a.block_k - 1) / j->a.block_k;
}

static int64_t blocks_named(const job *j) {
    return blocks_of_keys(j) < DENSITY ? 1 : blocks_of_keys(j) / DENSITY;
}

/* Documents in a row, or lists of blocks. */
static void make_long(const struct option_kind *kind, job *j) {
    heddle_attention *a = &j->a;
    if (kind->features & HEDDLE_VARLEN) {
        a->total_q = a->total_k = a->sk;
        a->b = (a->sk + DOCUMENT - 1) / DOCUMENT;
        a->sq = a->sk = a->sk < DOCUMENT ? a->sk : DOCUMENT;
    }
    if (kind->features & HEDDLE_BLOCKS) {
        a->block_q = a->block_k = strstr(kind->name, "128") ? 128 : 64;
        j->columns = (a->sq + a->block_q - 1) / a->block_q * blocks_named(j);
    }
}

job bench_job(const bench_case *c, heddle_device device) {
    job j = {.linear = c->h == 0};
    const struct option_kind *kind = kind_of(c);
    j.a =
        (heddle_attention){.size = sizeof j.a, .b = c->b, .h = c->h, .hk = c->hk, .sq = c->sq, .sk = c->sk, .d = c->d};
    j.a.mask = c->mask;
    j.l = (heddle_norm_linear){.size = sizeof j.l, .m = c->m, .k = c->k, .n = c->n};
    job_set_dtype(&j, c->dtype);
    job_set_device(&j, device);
    if (!kind)
        return j;
    j.a.features = j.l.features = kind->features;
    if (kind->features & HEDDLE_ACTIVATION)
        j.l.activation = !strcmp(kind->name, "swiglu")
                             ? HEDDLE_SWIGLU
                             : (heddle_activation)(kind - kinds - (KINDS - OF_LINEAR) + HEDDLE_GELU);
    j.l.norm = strstr(kind->name, "no norm") ? HEDDLE_NO_NORM
               : !strcmp(kind->name, "rms")  ? HEDDLE_RMS_NORM
                                             : HEDDLE_LAYER_NORM;
    j.a.window_left = kind->features & HEDDLE_WINDOW ? 512 : 0;
    j.a.softcap = strstr(kind->name, "softcap") ? 30 : 0;
    j.a.dropout = strstr(kind->name, "dropout") || !strcmp(kind->name, "odd part") ? 0.1 : 0;
    j.a.k_offset = !strcmp(kind->name, "odd part") ? 5 : 0;
    if (kind->features & HEDDLE_PAGES) {
        j.a.page = 64;
        j.a.pages = c->b * ((c->sk + 63) / 64);
    }
    make_long(kind, &j);
    if ((kind->features & HEDDLE_BOOL_MASK) && !kind->shared)
        j.a.bool_mask_stride = (heddle_strides){c->sk, 0, 0};
    if (!strcmp(kind->name, "bias of keys"))
        j.a.bias_stride = (heddle_strides){c->sk, 0, 0};
    if (!strcmp(kind->name, "dbias"))
        j.a.dbias_stride = (heddle_strides){c->h * c->sq * c->sk, c->sq * c->sk, c->sk};
    if (kind->shared) {
        const heddle_strides one = {0, c->sq * c->sk, c->sk};
        if (kind->features & HEDDLE_BOOL_MASK)
            j.a.bool_mask_stride = (heddle_strides){c->sq * c->sk, 0, c->sk};
        else
            j.a.bias_stride = one;
        if (kind->name[0] == 'd' && kind->features & HEDDLE_BIAS)
            j.a.dbias_stride = one; /* which says that its gradient is wanted */
    }
    return j;
}

/* Of b batches of documents that begin with each. */
static double documents_flops(const bench_case *c, const job *j, heddle_pass pass) {
    const double s = (double)c->sk, each = DOCUMENT, rest = fmod(s, each);
    job all = *j;
    all.a.b = c->b;
    all.a.sq = all.a.sk = c->sk;
    all.a.features = 0;
    return ((s - rest) / s * (each / s) + rest / s * (rest / s)) * job_flops(&all, pass);
}

/* Pairs of the first so many queries, of which query i is at key i. */
static double seen_in_window(const job *j, double queries) {
    const double left = fmin(queries, (double)j->a.window_left);
    return queries * left - left * left / 2;
}

double bench_flops(const bench_case *c, const job *j, heddle_pass pass) {
    const double s = (double)c->sk;
    if (!j->linear && j->a.features & (HEDDLE_SEGMENTS | HEDDLE_VARLEN))
        return documents_flops(c, j, pass);
    if (!j->linear && j->a.features & HEDDLE_BLOCKS)
        return (double)blocks_named(j) / (double)blocks_of_keys(j) * job_flops(j, pass);
    if (j->linear || !(j->a.features & HEDDLE_WINDOW))
        return job_flops(j, pass);
    const double pairs = (double)c->b * (double)c->h * (seen_in_window(j, s) - seen_in_window(j, s - (double)c->sq));
    return 4.0 * (double)c->d * pairs * (pass == HEDDLE_BACKWARD ? 2.5 : 1);
}

/* --------------------------------------------------------------------------------------------------------- data */

enum { PERIOD = 8191 };

/* Numbers as attention and training have them: normal ones. A period of them is enough, and quick to make. */
static double number(const job *j, int f, int64_t i, random_state *r) {
    if (!j->linear && f == ALIBI)
        return exp2(-8.0 * (double)(i + 1) / (double)j->a.h);
    if (!j->linear && (f == Q_SEGMENTS || f == K_SEGMENTS))
        return (double)(i / DOCUMENT);
    if (!j->linear && (f == CU_Q || f == CU_K))
        return fmin((double)i * DOCUMENT, (double)j->a.total_q);
    if (!j->linear && f == BLOCK_ROWS)
        return (double)(i * blocks_named(j));
    if (!j->linear && f == BLOCK_COLUMNS) /* one of every four in a row, another in each list */
        return fmin((double)(i % blocks_named(j) * DENSITY) + random_uniform(r) * DENSITY,
                    (double)(blocks_of_keys(j) - 1));
    if (!j->linear && !strcmp(job_fields(j)[f].name, "block_table"))
        return (double)(i % j->a.pages);
    if (job_fields(j)[f].element == OF_BOOL)
        return random_uniform(r) > 0.1;
    return random_normal(r);
}

static bool repeat(const bench_data *to, int f, size_t first, size_t size) {
    char *p = to->data[f];
    for (size_t have = first; have < size;) {
        size_t n = size - have < have ? size - have : have;
        if (!to->on_gpu)
            memcpy(p + have, p, n);
        else if (!device_memory_copy(p + have, p, n))
            return false;
        have += n;
    }
    return true;
}

static bool fill(const job *j, const bench_data *to, int f, random_state *r) {
    unsigned char period[PERIOD * 8];
    int64_t count = field_count(j, f), n = count < PERIOD ? count : PERIOD, at = 0;
    size_t bytes = field_bytes(j, f) ? field_bytes(j, f) : 1;
    do { /* of whole numbers, which say where something is, all */
        n = n < count - at ? n : count - at;
        for (int64_t i = 0; i < n; i++)
            store_value(j, f, period, i, number(j, f, at + i, r));
        if (!to->on_gpu)
            memcpy((char *)to->data[f] + (size_t)at * bytes, period, (size_t)n * bytes);
        else if (!device_memory_copy((char *)to->data[f] + (size_t)at * bytes, period, (size_t)n * bytes))
            return false;
        at += n;
    } while (job_fields(j)[f].element == OF_INT32 && at < count);
    return repeat(to, f, (size_t)at * bytes, (size_t)count * bytes);
}

static bool wanted(const job *j, int f, bool backward) {
    const tensor_field *t = &job_fields(j)[f];
    if (!job_has(j, f))
        return false;
    if (!j->linear && (f == DLSE || (f == DBIAS && !j->a.dbias_stride.s)))
        return false;
    return backward || t->role < ROLE_GRADIENT_IN;
}

/* What is added to has to be there, too. */
static bool has_contents(const job *j, int f) {
    return is_input(&job_fields(j)[f]) || (!j->linear && (j->a.features & HEDDLE_ACCUMULATE) && (f == O || f == LSE));
}

static bool get(job *j, arena *m, int f, bench_data *out) {
    const size_t bytes = field_bytes(j, f);
    if (!out->on_gpu)
        j->data[f] = out->data[f] = arena_array(m, field_count(j, f), bytes);
    else
        out->data[f] = device_memory_new((size_t)field_count(j, f) * bytes);
    return out->data[f];
}

bool bench_fill(job *j, arena *m, bool backward, uint64_t seed, bench_data *out) {
    const tensor_field *t = job_fields(j);
    const heddle_device device = j->linear ? j->l.device : j->a.device;
    random_state r = {seed};
    *out = (bench_data){.on_gpu = device == HEDDLE_CUDA};
    if (!job_sizes(j, backward))
        return false;
    const size_t forward = j->workspace_bytes[HEDDLE_FORWARD],
                 back = backward ? j->workspace_bytes[HEDDLE_BACKWARD] : 0;
    const size_t bytes = forward > back ? forward : back;
    out->workspace = out->on_gpu ? device_memory_new(bytes) : arena_alloc(m, bytes);
    bool ok = out->workspace;
    for (int f = 0; ok && t[f].name; f++)
        if (wanted(j, f, backward))
            ok = get(j, m, f, out) && (!has_contents(j, f) || fill(j, out, f, &r));
    if (!ok)
        complain("the GPU's memory: %s", device_memory_error());
    return ok;
}

bool bench_prepare(const bench_case *c, job *j, arena *m, bench_data *data) {
    heddle_norm_linear_data t = {.size = sizeof t,
                                 .w = data->data[W],
                                 .gamma = data->data[GAMMA],
                                 .beta = data->data[BETA],
                                 .bias = data->data[C]};
    size_t bytes = 0;
    void *at = NULL;
    if (!is_prepared(c))
        return true;
    if (heddle_norm_linear_prepared_size(&j->l, &bytes) != HEDDLE_OK)
        return complain("%s", heddle_last_message()), false;
    if (bytes)
        at = data->on_gpu ? device_memory_new(bytes) : arena_alloc(m, bytes);
    data->data[PREPARED] = at;
    if (bytes && !at)
        return complain("the GPU's memory: %s", device_memory_error()), false;
    if (bytes && heddle_norm_linear_prepare(&j->l, &t, at, bytes, NULL) != HEDDLE_OK)
        return complain("%s", heddle_last_message()), false;
    j->l.features |= HEDDLE_PREPARED;
    j->l.prepared_bytes = (int64_t)bytes;
    return true;
}

void bench_release(const job *j, bench_data *data) {
    for (int f = 0; data->on_gpu && job_fields(j)[f].name; f++)
        device_memory_free(data->data[f]);
    if (data->on_gpu)
        device_memory_free(data->workspace);
}

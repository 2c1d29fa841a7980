/* SPDX-License-Identifier: Apache-2.0 */
#include "job.h"
#include "peak.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

static const char usage[] =
    "Usage: heddle bench [options]\n"
    "\n"
    "Times attention and norm-linear over a list of shapes, beside what this machine can do at most, measured in\n"
    "between: the rate of float32 multiply-adds of the instruction set in use, and for decoding that of reading\n"
    "memory. A line is the median of several calls on outputs that are there already. With one thread, time is the\n"
    "thread's own, so that other programs disturb less; with more, it is the wall clock's.\n"
    "FLOPs are counted as usual: attention 2·(d + dv) a score, halved if causal, backward 2.5 times forward;\n"
    "norm-linear 2·m·n·k, backward twice.\n"
    "\n"
    "Options\n"
    "  --op OP               attention, norm-linear, all (default)\n"
    "  --device cpu          the only one yet; the programs in bench/ time a GPU\n"
    "  --dtype TYPE          f32, bf16, f16: only this type\n"
    "  --seconds S           time for each line; default 0.5\n"
    "  --json                a JSON object a line in place of the table\n"
    "\n"
    "HEDDLE_CPU=avx2 forces an instruction set and OMP_NUM_THREADS=n sets the number of threads; see heddle info.\n"
    "./dev bench --cpu puts PyTorch beside it.\n"
    "\n"
    "Example\n"
    "  OMP_NUM_THREADS=1 heddle bench --op attention --dtype f32\n";

/* A shape of attention, or of norm-linear as m, k, n when h is 0. */
typedef struct bench_case {
    heddle_dtype dtype;
    int64_t b, h, hk, sq, sk, d;
    heddle_mask mask;
    int64_t m, k, n;
    bool forward_only;
} bench_case;

#define FULL HEDDLE_MASK_NONE
#define CAUSAL HEDDLE_CAUSAL_TOP_LEFT
#define SELF(dtype, b, h, s, d, mask)                                                                                  \
    { dtype, b, h, h, s, s, d, mask, 0, 0, 0, false }
#define DECODE(dtype, h, hk, sk, d)                                                                                    \
    { dtype, 1, h, hk, 1, sk, d, FULL, 0, 0, 0, true }
#define LINEAR(dtype, m, k, n)                                                                                         \
    { dtype, 0, 0, 0, 0, 0, 0, FULL, m, k, n, false }

static const bench_case cases[] = {
    SELF(HEDDLE_F32, 1, 8, 1024, 64, FULL),    SELF(HEDDLE_F32, 1, 8, 1024, 64, CAUSAL),
    SELF(HEDDLE_F32, 1, 8, 1024, 128, FULL),   SELF(HEDDLE_F32, 1, 8, 1024, 128, CAUSAL),
    SELF(HEDDLE_F32, 1, 1, 8192, 64, FULL),    SELF(HEDDLE_F32, 1, 1, 8192, 64, CAUSAL),
    SELF(HEDDLE_F32, 8, 12, 197, 64, FULL),    SELF(HEDDLE_F32, 1, 1, 64, 64, FULL),
    SELF(HEDDLE_F32, 1, 8, 1000, 100, CAUSAL), SELF(HEDDLE_F32, 1, 4, 1024, 256, FULL),
    SELF(HEDDLE_BF16, 1, 8, 1024, 64, FULL),   SELF(HEDDLE_BF16, 1, 8, 1024, 128, CAUSAL),
    SELF(HEDDLE_F16, 1, 8, 1024, 64, FULL),    SELF(HEDDLE_F16, 1, 8, 1024, 128, CAUSAL),
    DECODE(HEDDLE_F32, 32, 8, 8192, 128),      DECODE(HEDDLE_BF16, 32, 8, 8192, 128),
    DECODE(HEDDLE_F16, 32, 8, 8192, 128),      LINEAR(HEDDLE_F32, 2048, 768, 3072),
    LINEAR(HEDDLE_BF16, 2048, 768, 3072),      LINEAR(HEDDLE_F16, 2048, 768, 3072),
    LINEAR(HEDDLE_F32, 1, 768, 3072),
};

typedef struct request {
    int op; /* 0 attention, 1 norm-linear, 2 all */
    heddle_device device;
    int dtype; /* negative: all */
    double seconds;
    bool json;
    int threads;
} request;

typedef struct result {
    double seconds, peak, fraction; /* of FLOP/s, or of bytes/s when decoding */
} result;

static job job_of(const bench_case *c, heddle_device device) {
    job j = {.linear = c->h == 0};
    j.a =
        (heddle_attention){.size = sizeof j.a, .b = c->b, .h = c->h, .hk = c->hk, .sq = c->sq, .sk = c->sk, .d = c->d};
    j.a.mask = c->mask;
    j.l = (heddle_norm_linear){.size = sizeof j.l, .m = c->m, .k = c->k, .n = c->n};
    job_set_dtype(&j, c->dtype);
    job_set_device(&j, device);
    return j;
}

/* Numbers as attention and training have them: normal ones. A period of them is enough, and quick to make. */
static void fill(const job *j, int f, random_state *r) {
    enum { PERIOD = 8191 };
    int64_t count = field_count(j, f), bytes = (int64_t)field_bytes(j, f);
    for (int64_t i = 0; i < count && i < PERIOD; i++)
        store_value(j, f, j->data[f], i, random_normal(r));
    for (int64_t i = PERIOD; i < count; i += PERIOD) {
        int64_t rest = count - i < PERIOD ? count - i : PERIOD;
        memcpy((char *)j->data[f] + i * bytes, j->data[f], (size_t)(rest * bytes));
    }
}

static bool set_up(job *j, arena *m, bool backward) {
    random_state r = {1};
    const tensor_field *t = job_fields(j);
    for (int f = 0; t[f].name; f++) {
        if (t[f].feature || (!j->linear && f == DLSE) || (!backward && t[f].role >= ROLE_GRADIENT_IN))
            continue;
        j->data[f] = arena_array(m, field_count(j, f), field_bytes(j, f));
        if (is_input(&t[f]))
            fill(j, f, &r);
    }
    return job_prepare(j, m, backward);
}

/* Bytes of k and v, which is what decoding waits for. */
static double cache_bytes(const job *j) {
    return (double)(field_count(j, K) + field_count(j, V)) * (double)field_bytes(j, K);
}

static double peak_now(const job *j, const request *r, bool decode) {
    if (!decode)
        return peak_flops(heddle_cpu_isa(), r->threads, 2e-3);
    const void *k = j->data[K];
    const void *v = j->data[V];
    size_t bytes = (size_t)field_count(j, K) * field_bytes(j, K);
    return 2 / (1 / peak_read(k, bytes, r->threads) + 1 / peak_read(v, bytes, r->threads));
}

/* Calls and peaks in turn; each call is compared with the peak measured right after it. Negative seconds: refused. */
static result time_pass(const job *j, const request *r, heddle_pass pass, bool decode) {
    enum { MOST = 201 };
    double seconds[MOST], peaks[MOST], fractions[MOST];
    double work = decode ? cache_bytes(j) : job_flops(j, pass);
    double (*clock_of)(void) = r->threads == 1 ? thread_seconds : now;
    int n = 0;
    if (!job_run(j, HEDDLE_FORWARD) || !job_run(j, pass))
        return (result){-1, 0, 0};
    double once = clock_of();
    job_run(j, pass);
    once = clock_of() - once;
    int calls = once < 2e-3 ? (int)(2e-3 / (once + 1e-7)) + 1 : 1; /* a sample outlasts the clock's steps */
    for (double begin = now(); n < MOST && (n < 3 || now() - begin < r->seconds); n++) {
        double start = clock_of();
        for (int i = 0; i < calls; i++)
            job_run(j, pass);
        seconds[n] = (clock_of() - start) / calls;
        peaks[n] = peak_now(j, r, decode);
        fractions[n] = peaks[n] > 0 ? work / seconds[n] / peaks[n] : 0;
    }
    return (result){median(seconds, n), median(peaks, n), median(fractions, n)};
}

static void print_json(const job *j, const request *r, heddle_pass pass, bool decode, const char *kernel, result x) {
    const char *pass_name = pass == HEDDLE_FORWARD ? "forward" : "backward";
    printf("{\"op\": \"%s\", \"pass\": \"%s\", \"dtype\": \"%s\", ", j->linear ? "norm-linear" : "attention", pass_name,
           dtype_name(job_dtype(j)));
    if (j->linear)
        printf("\"m\": %lld, \"k\": %lld, \"n\": %lld, ", (long long)j->l.m, (long long)j->l.k, (long long)j->l.n);
    else
        printf("\"b\": %lld, \"h\": %lld, \"hk\": %lld, \"sq\": %lld, \"sk\": %lld, \"d\": %lld, \"causal\": %s, ",
               (long long)j->a.b, (long long)j->a.h, (long long)j->a.hk, (long long)j->a.sq, (long long)j->a.sk,
               (long long)j->a.d, j->a.mask == FULL ? "false" : "true");
    printf("\"kernel\": \"%s\", \"isa\": \"%s\", \"threads\": %d, \"ms\": %.6g, \"gflops\": %.5g, ", kernel,
           heddle_cpu_isa(), r->threads, 1e3 * x.seconds, 1e-9 * job_flops(j, pass) / x.seconds);
    if (decode)
        printf("\"gbytes\": %.5g, \"read_gbytes\": %.5g, ", 1e-9 * cache_bytes(j) / x.seconds, 1e-9 * x.peak);
    else
        printf("\"peak_gflops\": %.5g, ", 1e-9 * x.peak);
    printf("\"fraction\": %.4f}\n", x.fraction);
}

static void print_line(const job *j, heddle_pass pass, bool decode, result x) {
    char shape[96];
    if (j->linear)
        snprintf(shape, sizeof shape, "norm-linear [%lld,%lld] -> %lld", (long long)j->l.m, (long long)j->l.k,
                 (long long)j->l.n);
    else if (decode)
        snprintf(shape, sizeof shape, "decode b%lld h%lld hk%lld sk%lld d%lld", (long long)j->a.b, (long long)j->a.h,
                 (long long)j->a.hk, (long long)j->a.sk, (long long)j->a.d);
    else
        snprintf(shape, sizeof shape, "attention b%lld h%lld s%lld d%lld%s", (long long)j->a.b, (long long)j->a.h,
                 (long long)j->a.sq, (long long)j->a.d, j->a.mask == FULL ? "" : " causal");
    double rate = (decode ? cache_bytes(j) : job_flops(j, pass)) / x.seconds;
    printf("%-36s %-4s %-8s %10.3f %9.1f %6s %9.1f", shape, dtype_name(job_dtype(j)), pass ? "backward" : "forward",
           1e3 * x.seconds, 1e-9 * rate, decode ? "GB/s" : "GF/s", 1e-9 * x.peak);
    if (x.peak > 0)
        printf(" %7.1f%%\n", 100 * x.fraction);
    else
        printf(" %8s\n", "-");
}

static bool run_case(const bench_case *c, const request *r) {
    arena m = {0};
    job j = job_of(c, r->device);
    bool decode = !j.linear && c->sq == 1, good = set_up(&j, &m, !c->forward_only);
    for (int p = HEDDLE_FORWARD; good && p <= (c->forward_only ? HEDDLE_FORWARD : HEDDLE_BACKWARD); p++) {
        heddle_pass pass = (heddle_pass)p;
        char kernel[128] = "";
        result x = time_pass(&j, r, pass, decode);
        good = x.seconds > 0;
        if (!good)
            break;
        if (j.linear)
            heddle_norm_linear_kernel(&j.l, pass, kernel, sizeof kernel);
        else
            heddle_attention_kernel(&j.a, pass, kernel, sizeof kernel);
        if (r->json)
            print_json(&j, r, pass, decode, kernel, x);
        else
            print_line(&j, pass, decode, x);
        fflush(stdout);
    }
    arena_free(&m);
    return good;
}

static int run(const request *r) {
    if (!r->json) {
        char text[256] = "";
        heddle_device_describe(r->device, text, sizeof text);
        printf("heddle %s on %s: %s\n\n%-36s %-4s %-8s %10s %9s %6s %9s %8s\n", heddle_version_string(),
               device_name(r->device), text, "", "type", "pass", "ms", "rate", "", "peak", "of peak");
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const bench_case *c = &cases[i];
        bool linear = c->h == 0;
        if ((r->op == 0 && linear) || (r->op == 1 && !linear) || (r->dtype >= 0 && (int)c->dtype != r->dtype))
            continue;
        if (!run_case(c, r))
            return EXIT_TROUBLE;
    }
    return 0;
}

static bool set_option(request *r, int option, const char *text) {
    static const char *const ops[] = {"attention", "norm-linear", "all", NULL};
    static const char *const dtypes[] = {"f32", "bf16", "f16", NULL}; /* in heddle_dtype's order */
    switch (option) {
    case 'o': return parse_choice("--op", text, ops, &r->op);
    case 'd': return parse_device("--device", text, &r->device);
    case 't': return parse_choice("--dtype", text, dtypes, &r->dtype);
    case 's':
        if (!parse_real("--seconds", text, &r->seconds))
            return false;
        if (!(r->seconds >= 0 && r->seconds <= 3600))
            return complain("--seconds: %s is not between 0 and 3600", text), false;
        return true;
    case 'j': r->json = true; return true;
    default: return false;
    }
}

int cmd_bench(int argc, char **argv) {
    static const struct option options[] = {
        {"op", required_argument, NULL, 'o'},
        {"device", required_argument, NULL, 'd'},
        {"dtype", required_argument, NULL, 't'},
        {"seconds", required_argument, NULL, 's'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    request r = {.op = 2, .device = HEDDLE_CPU, .dtype = -1, .seconds = 0.5, .threads = 1};
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'h') {
            fputs(usage, stdout);
            return 0;
        }
        if (!set_option(&r, option, optarg))
            return EXIT_TROUBLE;
    }
    if (optind < argc)
        return complain("'%s' is not an option; see heddle bench --help", argv[optind]);
    if (r.device != HEDDLE_CPU)
        return complain("--device %s: this command times the CPU; see heddle bench --help", device_name(r.device));
#ifdef _OPENMP
    r.threads = omp_get_max_threads();
#endif
    return run(&r);
}

/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "bench.h"
#include "device_memory.h"
#include "npy.h"
#include "peak.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "Usage: heddle bench [options]\n"
    "\n"
    "Times attention and norm-linear over a list of shapes, beside a peak of this machine, measured in between.\n"
    "A line is the median of several calls on outputs that are there already.\n"
    "On the CPU the peak is the rate of float32 multiply-adds of the instruction set in use, of rows in 16 bits, too:\n"
    "with products of bfloat16 (AMX, AVX-512 BF16) they may be over 100% of it. For decoding it is the rate of\n"
    "reading memory. With one thread, time is the thread's own, so that other programs disturb less; with more, it\n"
    "is the wall clock's.\n"
    "On a GPU, every head dim, type and option that has kernels, timed by the device's events behind an overwritten\n"
    "cache; the peak is the rate of bfloat16 products on its tensor cores (a third of it for float32, which is three\n"
    "products), and for decoding that of a copy. The lines at the end name the kernels that no row took.\n"
    "FLOPs are counted as usual: attention 2·(d + dv) a score, halved if causal, backward 2.5 times forward;\n"
    "norm-linear 2·m·n·k, backward twice. The error is the largest of a small problem of the kind, where one takes "
    "the\n"
    "same kernel, over that of a textbook computation in the same type: see heddle verify.\n"
    "\n"
    "Options\n"
    "  --op OP               attention, norm-linear, all (default)\n"
    "  --device DEVICE       cpu (default) or cuda\n"
    "  --dtype TYPE          f32, bf16, f16: only this type\n"
    "  --filter TEXT         only rows whose name or kernel holds this\n"
    "  --seconds S           time for each line; default 0.5, on a GPU 0.1\n"
    "  --seed N              of the random inputs; default 1\n"
    "  --no-error            times alone\n"
    "  --json                a JSON object a line in place of the table\n"
    "  --html FILE           one page with everything in it, too: tables to sort, plots, this machine, peers\n"
    "  --peers FILE          rows of bench/results for that page; may be given several times\n"
    "\n"
    "HEDDLE_CPU=avx2 forces an instruction set, HEDDLE_CUDA_FAMILY=sm80 a family of kernels, and OMP_NUM_THREADS=n "
    "sets\n"
    "the number of threads; see heddle info. ./dev bench --cpu and --gpu put PyTorch beside it, ./dev report makes "
    "the\n"
    "page with the peers that were recorded.\n"
    "\n"
    "Example\n"
    "  OMP_NUM_THREADS=1 heddle bench --op attention --dtype f32\n";

enum { MOST_PEERS = 8 };

typedef struct request {
    int op;    /* 0 attention, 1 norm-linear, 2 all */
    int dtype; /* negative: all */
    double seconds;
    bool json, error;
    uint64_t seed;
    const char *filter, *html;
    char *peer[MOST_PEERS];
    int peers;
    bench_machine machine;
    gpu_clock clock;
} request;

/* ------------------------------------------------------------------------------------------------------ one pass */

static double cpu_peak(const job *j, const request *r, bool decode) {
    if (!decode)
        return peak_flops(heddle_cpu_isa(), r->machine.threads, 2e-3);
    const void *k = j->data[K];
    const void *v = j->data[V];
    size_t bytes = (size_t)field_count(j, K) * field_bytes(j, K);
    return 2 / (1 / peak_read(k, bytes, r->machine.threads) + 1 / peak_read(v, bytes, r->machine.threads));
}

typedef struct sample {
    double seconds, peak;
} sample;

static bool call_once(const job *j, heddle_pass pass, const bench_data *data) {
    return data->alone ? bench_alone_call(data->alone) : job_call(j, pass, data->data, data->workspace);
}

/* A sample outlasts the clock's steps: so many calls. */
static int calls_for(const job *j, const bench_data *data, heddle_pass pass, double (*clock_of)(void)) {
    double once = clock_of();
    if (!call_once(j, pass, data))
        return 0;
    once = clock_of() - once;
    return once < 2e-3 ? (int)(2e-3 / (once + 1e-7)) + 1 : 1;
}

static bool cpu_sample(const job *j, const request *r, const bench_data *data, const bench_row *row, int calls,
                       sample *out) {
    double (*clock_of)(void) = r->machine.threads == 1 ? thread_seconds : now;
    double start = clock_of();
    for (int i = 0; i < calls; i++)
        if (!job_call(j, row->pass, data->data, data->workspace))
            return false;
    out->seconds = (clock_of() - start) / calls;
    out->peak = cpu_peak(j, r, row->decode);
    return true;
}

static bool gpu_sample(const job *j, const request *r, const bench_data *data, const bench_row *row, sample *out) {
    const double parts = job_dtype(j) == HEDDLE_F32 && !((j->linear ? j->l.features : j->a.features) & HEDDLE_TF32) ? 3
                         : job_dtype(j) == HEDDLE_F32                                                               ? 2
                                                                                                                    : 1;
    bool ok = gpu_clock_begin(&r->clock);
    if (ok && !call_once(j, row->pass, data))
        return false;
    ok = ok && gpu_clock_end(&r->clock, &out->seconds);
    ok = ok && (row->decode ? gpu_clock_copy(&r->clock, &out->peak) : gpu_clock_products(&r->clock, &out->peak));
    if (!row->decode)
        out->peak /= parts;
    return ok || (complain("the GPU: %s", device_memory_error()), false);
}

/* Calls and peaks in turn; each call is compared with the peak measured right after it. */
static bool time_pass(const job *j, const request *r, const bench_data *data, bench_row *row) {
    enum { MOST = 201 };
    double seconds[MOST], peaks[MOST], fractions[MOST];
    const bool gpu = data->on_gpu;
    int n = 0, calls = calls_for(j, data, row->pass, r->machine.threads == 1 && !gpu ? thread_seconds : now);
    if (!calls)
        return false;
    for (double begin = now(); n < MOST && (n < 3 || now() - begin < r->seconds); n++) {
        sample s = {0, 0};
        if (!(gpu ? gpu_sample(j, r, data, row, &s) : cpu_sample(j, r, data, row, calls, &s)))
            return false;
        seconds[n] = s.seconds;
        peaks[n] = s.peak;
        fractions[n] = s.peak > 0 && s.seconds > 0 ? row->work / s.seconds / s.peak : 0;
    }
    row->seconds = median(seconds, n); /* and sorted */
    row->low = seconds[n / 4];
    row->high = seconds[n - 1 - n / 4];
    row->peak = median(peaks, n);
    row->fraction = median(fractions, n);
    row->peak_of = row->decode ? (gpu ? "a copy" : "reading") : gpu ? "tensor" : "float32";
    return true;
}

/* -------------------------------------------------------------------------------------------------------- output */

static void print_head(const request *r) {
    printf("heddle %s on %s: %s\n", heddle_version_string(), device_name(r->machine.device), r->machine.text);
    printf("\n%-42s %-4s %-8s %10s %9s %6s %9s %8s %-10s %8s\n", "", "type", "pass", "ms", "rate", "", "peak",
           "of peak", "", r->error ? "error" : "");
}

static void print_line(const bench_row *row) {
    double rate = row->work / row->seconds;
    printf("%-42s %-4s %-8s %10.4f %9.1f %6s %9.1f", row->name, dtype_name(row->c->dtype),
           row->pass ? "backward" : "forward", 1e3 * row->seconds, 1e-9 * rate, row->decode ? "GB/s" : "GF/s",
           1e-9 * row->peak);
    if (row->peak > 0)
        printf(" %7.1f%% %-10s", 100 * row->fraction, row->peak_of);
    else
        printf(" %8s %-10s", "-", "");
    if (row->error >= 0)
        printf(" %7.2f×", row->error);
    putchar('\n');
}

/* ------------------------------------------------------------------------------------------------------ all rows */

static void name_kernels(const bench_case *c, const job *j, char kernels[2][128]) {
    kernels[HEDDLE_BACKWARD][0] = 0;
    if (bench_is_alone(c)) {
        bench_alone_kernel(c, kernels[HEDDLE_FORWARD], 128);
        return;
    }
    for (int p = HEDDLE_FORWARD; p <= HEDDLE_BACKWARD; p++) {
        kernels[p][0] = 0;
        if (j->linear)
            heddle_norm_linear_kernel(&j->l, (heddle_pass)p, kernels[p], 128);
        else
            heddle_attention_kernel(&j->a, (heddle_pass)p, kernels[p], 128);
    }
}

static bool asked_for(const request *r, const bench_case *c) {
    const bool linear = c->h == 0;
    char name[96], kernels[2][128];
    if ((r->op == 0 && linear) || (r->op == 1 && !linear) || (r->dtype >= 0 && (int)c->dtype != r->dtype))
        return false;
    if (!r->filter)
        return true;
    bench_name(c, r->machine.device, name, sizeof name);
    bool found = strstr(name, r->filter);
    job j = bench_job(c, r->machine.device);
    name_kernels(c, &j, kernels);
    found = found || strstr(kernels[0], r->filter) || strstr(kernels[1], r->filter);
    return found;
}

static double work_of(const bench_case *c, const job *j, const bench_row *row) {
    if (row->decode) { /* bytes of k and v, which is what decoding waits for */
        const bool part = j->a.features & HEDDLE_WINDOW && j->a.window_left < c->sk;
        const double seen = part ? (double)(j->a.window_left + 1) / (double)c->sk : 1;
        return seen * (double)(field_count(j, K) + field_count(j, V)) * (double)field_bytes(j, K);
    }
    return bench_flops(c, j, row->pass);
}

static void put_row(const request *r, const bench_row *row, memory_file *rows) {
    hide_progress();
    if (r->json) {
        bench_row_json(stdout, row, &r->machine);
        putchar('\n');
    } else {
        print_line(row);
    }
    fflush(stdout);
    if (rows->n > 0)
        fputs(",\n", rows->file);
    bench_row_json(rows->file, row, &r->machine);
    fflush(rows->file);
}

/* Append or merge. */
static bool run_alone(const bench_case *c, const request *r, memory_file *rows) {
    bench_alone alone;
    const bench_data data = {.on_gpu = true, .alone = &alone};
    const job j = bench_job(c, r->machine.device);
    bench_row row = {.c = c, .decode = true, .error = -1};
    bool good = bench_alone_open(c, &alone);
    bench_name(c, r->machine.device, row.name, sizeof row.name);
    bench_alone_kernel(c, row.kernel, sizeof row.kernel);
    row.work = alone.bytes;
    good = good && time_pass(&j, r, &data, &row);
    if (good)
        put_row(r, &row, rows);
    bench_alone_close(&alone);
    return good;
}

static bool run_case(const bench_case *c, const request *r, memory_file *rows) {
    if (bench_is_alone(c))
        return run_alone(c, r, rows);
    arena m = {0};
    job j = bench_job(c, r->machine.device);
    bench_data data = {0};
    char kernels[2][128];
    double errors[2] = {-1, -1};
    bool good = bench_fill(&j, &m, !c->forward_only, r->seed, &data) && bench_prepare(c, &j, &m, &data);
    name_kernels(c, &j, kernels);
    if (good && r->error)
        bench_errors(c, r->machine.device, kernels, r->seed, errors);
    for (int p = HEDDLE_FORWARD; good && p <= (c->forward_only ? HEDDLE_FORWARD : HEDDLE_BACKWARD); p++) {
        bench_row row = {.c = c, .pass = (heddle_pass)p, .decode = !j.linear && c->sq == 1, .error = errors[p]};
        bench_name(c, r->machine.device, row.name, sizeof row.name);
        memcpy(row.kernel, kernels[p], sizeof row.kernel);
        row.work = work_of(c, &j, &row);
        row.prepared_bytes = j.l.prepared_bytes;
        good = time_pass(&j, r, &data, &row);
        if (good)
            put_row(r, &row, rows);
    }
    bench_release(&j, &data);
    arena_free(&m);
    return good;
}

/* How many there are; 0 is an error. */
static int choose_cases(const request *r, bench_case *all) {
    const int n = bench_cases(r->machine.device, all);
    int wanted = 0;
    for (int i = 0; i < n; i++)
        if (asked_for(r, &all[i]))
            all[wanted++] = all[i];
    if (!wanted)
        complain("no row is called %s", r->filter ? r->filter : "so");
    return wanted;
}

static bool run_cases(const request *r, const bench_case *all, int wanted, memory_file *rows) {
    const double begin = now();
    for (int done = 0; done < wanted; done++) {
        show_progress(done, wanted, begin);
        if (!run_case(&all[done], r, rows))
            return false;
    }
    hide_progress();
    return true;
}

static bool measure(request *r, memory_file *rows) {
    static bench_case all[BENCH_MOST_CASES];
    const int wanted = choose_cases(r, all);
    if (!wanted)
        return false;
    bool good = true;
    if (r->machine.device == HEDDLE_CUDA) {
        good = gpu_clock_open(&r->clock) && gpu_clock_copy(&r->clock, &r->machine.copy);
        if (!good)
            complain("the GPU: %s", device_memory_error());
    }
    if (good && !r->json)
        print_head(r);
    good = good && run_cases(r, all, wanted, rows) && memory_flush(rows);
    if (r->machine.device == HEDDLE_CUDA)
        gpu_clock_close(&r->clock);
    if (good && r->machine.device == HEDDLE_CUDA && !r->json && !r->filter && r->op == 2 && r->dtype < 0)
        bench_untaken(rows->text);
    return good;
}

static int run(request *r) {
    memory_file rows = {0}, peers = {0};
    bool good = memory_open(&rows) && memory_open(&peers);
    good = good && (!r->html || npy_can_write(r->html)); /* first, as what follows takes its time */
    for (int i = 0; i < r->peers && good; i++)
        good = bench_peers(&peers, r->peer[i]);
    good = good && memory_flush(&peers) && measure(r, &rows);
    if (good && r->html)
        good = bench_report(r->html, &r->machine, rows.text, peers.text);
    memory_close(&rows);
    memory_close(&peers);
    return good ? 0 : EXIT_TROUBLE;
}

static bool set_option(void *to, int option, char *text) {
    request *r = to;
    static const char *const ops[] = {"attention", "norm-linear", "all", NULL};
    static const char *const dtypes[] = {"f32", "bf16", "f16", NULL}; /* in heddle_dtype's order */
    switch (option) {
    case 'o': return parse_choice("--op", text, ops, &r->op);
    case 'd': return parse_device("--device", text, &r->machine.device);
    case 't': return parse_choice("--dtype", text, dtypes, &r->dtype);
    case 's':
        if (!parse_real("--seconds", text, &r->seconds))
            return false;
        if (!(r->seconds >= 0 && r->seconds <= 3600))
            return complain("--seconds: %s is not between 0 and 3600", text), false;
        return true;
    case 'n': return parse_seed("--seed", text, &r->seed);
    case 'f': r->filter = text; return true;
    case 'e': r->error = false; return true;
    case 'j': r->json = true; return true;
    case 'w': r->html = text; return true;
    case 'p':
        if (r->peers == MOST_PEERS)
            return complain("--peers: at most %d files", MOST_PEERS), false;
        r->peer[r->peers++] = text;
        return true;
    default: return false;
    }
}

int cmd_bench(int argc, char **argv) {
    static const struct option options[] = {
        {"op", required_argument, NULL, 'o'},      {"device", required_argument, NULL, 'd'},
        {"dtype", required_argument, NULL, 't'},   {"filter", required_argument, NULL, 'f'},
        {"seconds", required_argument, NULL, 's'}, {"seed", required_argument, NULL, 'n'},
        {"no-error", no_argument, NULL, 'e'},      {"json", no_argument, NULL, 'j'},
        {"html", required_argument, NULL, 'w'},    {"peers", required_argument, NULL, 'p'},
        {"help", no_argument, NULL, 'h'},          {0},
    };
    static const line_rules rules = {
        .command = "bench", .usage = usage, .options = options, .take = set_option, .repeats = 'p'};
    request r = {.op = 2, .dtype = -1, .seconds = -1, .error = true, .seed = 1};
    r.machine.device = HEDDLE_CPU;
    const int status = read_options(&rules, argc, argv, &r);
    if (status != NEXT)
        return status;
    if (r.machine.device == HEDDLE_REF)
        return complain("--device ref: the reference is never fast; this command times cpu and cuda");
    if (r.peers && !r.html)
        return complain("--peers is for the page of --html");
    if (!device_ready(r.machine.device))
        return EXIT_TROUBLE;
    if (r.seconds < 0)
        r.seconds = r.machine.device == HEDDLE_CUDA ? 0.1 : 0.5;
    bench_describe(&r.machine);
    return run(&r);
}

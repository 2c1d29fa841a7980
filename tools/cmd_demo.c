/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "verify.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "Usage: heddle demo [options] [-- options of train_gpt]\n"
    "\n"
    "First the report of a FlashAttention program (N = 128, d = 32): its matrices, what it once printed, the right\n"
    "values and heddle's, its latencies and heddle's. Then the real job: the program train_gpt trains a small\n"
    "transformer on text, character by character, for about a minute, with every attention and norm-linear of it\n"
    "by heddle.\n"
    "\n"
    "Options\n"
    "  --device DEVICE       cpu (default), cuda, or ref (slow)\n"
    "  --text DIR            the text to train on; default: heddle's own source\n"
    "  --quick               the report alone, without the training and its options\n"
    "\n"
    "Example: the report, then a check of the transformer's gradients\n"
    "  heddle demo -- --check\n";

/* ------------------------------------------------------------------------------------------------------- report */

typedef struct slice {
    int f;
    const char *name;
    double printed[9]; /* rows of three; of a wrong matrix */
    bool wrong;
} slice;

static void print_row(const double *x, int stride) {
    for (int j = 0; j < 3; j++)
        printf(" %12.6g", x[j * stride]);
    printf("  ");
}

/* The matrices' first three rows and columns: ours, float64's, and what the program printed where that was wrong. */
static void print_slices(const problem *p, const trial *t) {
    static const slice slices[] = {
        {Q, "Query", {0}, false},
        {K, "Key", {0}, false},
        {V, "Value", {0}, false},
        {O,
         "Output",
         {0.00981674, 0.013525, 0.0224509, 0.000579609, 0.0185876, 0.0159275, 0.0158678, 0.0192494, 0.0114489},
         true},
        {DQ,
         "dQ",
         {0.00846144, 0.00487566, 0.00132402, -0.00142898, -0.00505878, -0.0172243, -0.0118888, 0.0134579, 0.0207399},
         true},
        {DK,
         "dK",
         {0.00725392, -0.0102753, -0.00365077, 0.012385, 0.0102099, 0.0236704, 0.0076368, 0.0120091, 0.0135568},
         true},
        {DV, "dV", {0}, false},
    };
    printf("%-8s %-39s  %-39s  %s\n", "", " heddle", " float64", " once printed, and wrong");
    for (size_t s = 0; s < sizeof slices / sizeof *slices; s++)
        for (int i = 0; i < 3; i++) {
            int f = slices[s].f;
            printf("%-8s", i ? "" : slices[s].name);
            print_row((p->x[f] ? p->x[f] : t->ours.x[f]) + 32 * i, 1);
            print_row((p->x[f] ? p->x[f] : t->truth.x[f]) + 32 * i, 1);
            if (slices[s].wrong)
                print_row(slices[s].printed + 3 * i, 1);
            printf("\n");
        }
}

static bool print_latencies(const problem *p, arena *m, heddle_device device) {
    job j = p->j;
    double ms[2];
    job_set_device(&j, device);
    for (int f = 0; job_fields(&j)[f].name; f++) {
        int64_t n = field_count(&j, f);
        if (job_fields(&j)[f].feature || (f == DLSE))
            continue;
        j.data[f] = arena_array(m, n, field_bytes(&j, f));
        for (int64_t i = 0; p->x[f] && i < n; i++)
            store_value(&j, f, j.data[f], i, p->x[f][i]);
    }
    if (!job_prepare(&j, m, true))
        return false;
    for (int pass = HEDDLE_FORWARD; pass <= HEDDLE_BACKWARD; pass++) {
        double seconds = job_seconds(&j, (heddle_pass)pass);
        if (seconds < 0)
            return false;
        ms[pass] = 1e3 * seconds;
    }
    printf("\n%-24s %12s %14s\n", "latency, ms", "heddle", "once printed");
    printf("%-24s %12.5f %14.5f\n", "  forward", ms[0], 0.6992);
    printf("%-24s %12.5f %14.5f\n", "  backward", ms[1], 0.68608);
    printf("%-24s %12.5f %14.5f\n", "  total", ms[0] + ms[1], 1.38528);
    return true;
}

static int report(heddle_device device) {
    arena m = {0};
    trial t;
    verify count = {.device = device};
    char text[256] = "";
    problem p = day55_problem(&m);
    heddle_device_describe(device, text, sizeof text);
    printf("FlashAttention, forward and backward: N = 128, d = 32, scale 1/√32, Q, K, V, dO from rand(), seed 1\n");
    printf("heddle %s on %s: %s\n\n", heddle_version_string(), device_name(device), text);
    bool ran = trial_run(&p, &m, device, HEDDLE_F32, &t);
    if (ran) {
        print_slices(&p, &t);
        printf("\nthe whole matrices against float64\n");
        report_tensors(&count, &p, HEDDLE_F32, &t, NULL);
        ran = print_latencies(&p, &m, device);
    }
    arena_free(&m);
    return !ran ? EXIT_TROUBLE : count.failed ? EXIT_CHECK_FAILED : 0;
}

/* ----------------------------------------------------------------------------------------------------- training */

/* The first of the places that has `part` and lets it be used so, into path[n]. Relative ones begin where this program is. */
static bool find_place(const char *const *places, const char *part, int mode, char *path, size_t n) {
    char directory[PATH_MAX], file[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", directory, sizeof directory - 1);
    char *slash = NULL;
    if (length >= 0) {
        directory[length] = 0;
        slash = strrchr(directory, '/');
    }
    for (; *places; places++) {
        const bool absolute = **places == '/';
        if (!slash && !absolute)
            continue;
        const int way = absolute ? 0 : (int)(slash - directory) + 1;
        if ((size_t)snprintf(path, n, "%.*s%s", way, directory, *places) < n &&
            (size_t)snprintf(file, sizeof file, "%s/%s", path, part) < sizeof file && access(file, mode) == 0)
            return true;
    }
    return false;
}

static bool find_program(char *path, size_t n) {
    static const char *const places[] = {PROGRAM_DIR, ".", "examples", "../examples", NULL};
    char directory[PATH_MAX];
    return find_place(places, "train_gpt", X_OK, directory, sizeof directory) &&
           (size_t)snprintf(path, n, "%s/train_gpt", directory) < n;
}

/* heddle's own source: as it was installed, the tree that holds this program's directory, or where it was built. */
static bool find_text(char *path, size_t n) {
    static const char *const places[] = {TEXT_DIR, ".", "..", "../..", SOURCE_DIR, NULL};
    return find_place(places, "src/api.c", R_OK, path, n);
}

/* Becomes train_gpt; comes back only with trouble. */
static int train(const char *text, heddle_device device, int argc, char **argv) {
    enum { OWN = 5, MOST = 64 };
    char program[PATH_MAX], found[PATH_MAX];
    if (!find_program(program, sizeof program))
        return complain("the program train_gpt is not where it is installed (" PROGRAM_DIR
                        " from heddle), beside heddle or in examples; --quick does without");
    if (!text && !find_text(found, sizeof found))
        return complain("heddle's source is not here to train on; name a directory of text with --text DIR");
    if (!text)
        text = found;
    if (argc > MOST)
        return complain("more than %d options after --", MOST);
    char device_text[8];
    snprintf(device_text, sizeof device_text, "%s", device_name(device));
    char *args[OWN + MOST + 1] = {program, (char *)"--text", (char *)text, (char *)"--device", device_text};
    memcpy(args + OWN, argv, (size_t)argc * sizeof *argv);
    printf("\nthe real job: %s --text %s --device %s\n\n", program, text, device_text);
    fflush(stdout);
    execv(program, args);
    return complain("%s: %s", program, strerror(errno));
}

typedef struct request {
    heddle_device device;
    const char *text;
    bool quick;
} request;

static bool set_option(void *to, int option, char *text) {
    request *r = to;
    switch (option) {
    case 'd': return parse_device("--device", text, &r->device);
    case 't': r->text = text; return true;
    case 'q': return r->quick = true;
    default: return false;
    }
}

/* An option, its end and its argument may be left out, as getopt_long has it. */
static bool is_called(const char *word, const char *option) {
    const size_t n = strcspn(word, "=");
    return n > 2 && strncmp(word, option, n) == 0;
}

/* What is for train_gpt is passed over nowhere, and says nothing else than what is in front of it. */
static bool check_training(const request *r, char **rest) {
    if (r->quick && (r->text || *rest))
        return complain("%s is for the training, which --quick leaves out", r->text ? "--text" : *rest), false;
    for (; *rest; rest++)
        if (is_called(*rest, "--text") || is_called(*rest, "--device"))
            return complain("%s is for heddle demo, too: it has its place in front of --", *rest), false;
    return true;
}

int cmd_demo(int argc, char **argv) {
    static const struct option options[] = {
        {"device", required_argument, NULL, 'd'},
        {"text", required_argument, NULL, 't'},
        {"quick", no_argument, NULL, 'q'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    static const line_rules rules = {
        .command = "demo", .usage = usage, .options = options, .take = set_option, .passes_on = true};
    request r = {.device = HEDDLE_CPU};
    int status = read_options(&rules, argc, argv, &r);
    if (status != NEXT)
        return status;
    if (!check_training(&r, argv + optind) || !device_ready(r.device))
        return EXIT_TROUBLE;
    status = report(r.device);
    return r.quick || status ? status : train(r.text, r.device, argc - optind, argv + optind);
}

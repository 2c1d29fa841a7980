/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "verify.h"
#ifndef _WIN32
#include "memory_file.h"
#include "npy.h"
#endif

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char usage[] =
    "Usage: heddle verify [options]\n"
    "\n"
    "Checks what this machine computes, forward and backward, against the formulas in float64 on the same inputs. An "
    "error\n"
    "is the largest difference, and relative to the largest magnitude of the tensor; it may be twice that of a "
    "textbook\n"
    "computation in the same type (column plain), plus a few roundings. Outputs and workspace are full of NaN before.\n"
    "Exit status 1 if a check fails.\n"
    "\n"
    "Options\n"
    "  --device DEVICE       cpu, ref or cuda; default: each that is there and computes fast (cpu, cuda)\n"
    "  --case CASE           one report, or the sweep, alone:\n"
    "      p22               LayerNorm + Linear, the GPU puzzle's inputs, with its true values\n"
    "      fa2-warps         FlashAttention-2 backward, 4×4 and 128×64\n"
    "      day19             self-attention forward: shapes, scales, values of size 1000\n"
    "      day50             self-attention backward: square or not, its invariants\n"
    "      day55             FlashAttention, N = 128, d = 32, with its true values\n"
    "      sweep             every option alone and combined, odd sizes, in f32, bf16 and f16\n"
    "  --filter TEXT         only problems whose name has this; one is \"sweep: attention, softcap\", the others are\n"
    "                        called as their reports and tables are headed: \"fa2-warps: test 1: 4×4...\"\n"
    "  --seed N              of the random inputs and combinations; default 1\n"
    "  --random N            how many random combinations; default 24\n"
    "  --bins                random attention alone, without a line for each: what fails, and the averages of our "
    "error "
    "over\n"
    "                        plain's by type, head dim, keys seen and tensor, each at most 1.1\n"
    "  --json FILE           a line of JSON for each check: its names, the instruction set or family of the kernel, "
    "the\n"
    "                        type, the error, that over plain's, and whether it passed; of the sweep three lines a "
    "case,\n"
    "                        of the tensor that comes nearest to what is allowed. With --bins the averages, which are\n"
    "                        added to what is there\n"
    "  --verbose             the sweep prints every tensor\n"
    "\n"
    "Example\n"
    "  heddle verify --case p22\n";

typedef struct report {
    const char *name;
    bool (*run)(verify *v);
    bool seeded; /* something of it is random */
} report;

static const report reports[] = {
    {"p22", verify_p22, true},     {"fa2-warps", verify_fa2_warps, false}, {"day19", verify_day19, true},
    {"day50", verify_day50, true}, {"day55", verify_day55, false},         {"sweep", verify_sweep, true},
};
enum { REPORTS = sizeof reports / sizeof *reports };

static bool verify_device(verify *v, heddle_device device, int chosen) {
    char text[256] = "";
    v->device = device;
    if (!device_ready(device))
        return false;
    heddle_device_describe(device, text, sizeof text);
    v->problems = v->done = 0;
    v->begin = now();
    for (int counts = v->bins ? 0 : 1; counts >= 0; counts--) {
        v->counts = counts;
        if (!counts && (v->problems || !v->filter))
            printf("heddle %s on %s: %s\n", heddle_version_string(), device_name(device), text);
        if (v->bins)
            return verify_bins(v);
        for (int i = 0; i < REPORTS; i++)
            if ((chosen < 0 || chosen == i) && !reports[i].run(v))
                return false;
    }
    hide_progress();
    return true;
}

static int run(verify *v, bool device_given, int chosen) {
    bool ran = true;
    if (device_given)
        ran = verify_device(v, v->device, chosen);
    else
        for (int d = HEDDLE_CPU; d <= HEDDLE_CUDA && ran; d++)
            if (d != HEDDLE_REF && heddle_device_available((heddle_device)d, NULL, 0) == HEDDLE_OK)
                ran = verify_device(v, (heddle_device)d, chosen);
    if (!ran)
        return EXIT_TROUBLE;
    if (v->checked == 0)
        return v->filter ? complain("no problem is called %s", v->filter)
                         : complain("no device to verify is there; see heddle info");
    printf("\noverall: %s, %d checks, %d failed\n", v->failed ? "FAILED" : "ok", v->checked, v->failed);
    return v->failed ? EXIT_CHECK_FAILED : 0;
}

/* Where the checks go; with `add` behind what is there. */
typedef struct json_file {
    const char *path;
    bool add;
#ifndef _WIN32
    memory_file text; /* until all of it is there */
#endif
} json_file;

#ifdef _WIN32 /* which has no place of memory to write to like a file */
static bool open_json(json_file *f, FILE **to) {
    *to = fopen(f->path, f->add ? "a" : "w");
    return *to || (complain("%s: %s", f->path, strerror(errno)), false);
}

static bool close_json(json_file *f, FILE *from, bool ran) {
    (void)ran;
    return fclose(from) == 0 || (complain("%s: %s", f->path, strerror(errno)), false);
}
#else
/* What is there goes to `to`; where that is NULL, whether it can be read is all that is asked. */
static bool copy_old(const json_file *f, FILE *to) {
    char part[4096];
    struct stat st;
    if (!f->add || stat(f->path, &st) != 0 || !S_ISREG(st.st_mode))
        return true;
    FILE *old = fopen(f->path, "r");
    for (size_t n; old && (n = fread(part, 1, sizeof part, old)) > 0;)
        if (to)
            fwrite(part, 1, n, to);
    const bool good = (old && !ferror(old)) || (complain("%s: %s", f->path, strerror(errno)), false);
    if (old)
        fclose(old);
    return good;
}

static bool open_json(json_file *f, FILE **to) {
    const bool good = npy_can_write(f->path) && copy_old(f, NULL) && memory_open(&f->text);
    *to = f->text.file;
    return good;
}

/* The old lines are read again now, as another process may have added some meanwhile. */
static bool write_json(json_file *f) {
    npy_outputs out = {0};
    memory_file all;
    bool good = memory_open(&all) && copy_old(f, all.file);
    if (good)
        fwrite(f->text.text, 1, f->text.n, all.file);
    good = good && memory_flush(&all) && npy_stage_bytes(&out, f->path, all.text, all.n) && npy_commit(&out);
    npy_abandon(&out);
    memory_close(&all);
    return good;
}

static bool close_json(json_file *f, FILE *from, bool ran) {
    (void)from;
    const bool good = memory_flush(&f->text) && (!ran || write_json(f));
    memory_close(&f->text);
    return good;
}
#endif

typedef struct request {
    verify v;
    json_file json;
    bool device_given, seed_given, random_given;
    int chosen;
} request;

static bool set_option(void *to, int option, char *text) {
    request *r = to;
    const char *names[REPORTS + 1] = {NULL};
    for (int i = 0; i < REPORTS; i++)
        names[i] = reports[i].name;
    switch (option) {
    case 'd': r->device_given = true; return parse_device("--device", text, &r->v.device);
    case 'c': return parse_choice("--case", text, names, &r->chosen);
    case 's': r->seed_given = true; return parse_seed("--seed", text, &r->v.seed);
    case 'r': r->random_given = true; return parse_int("--random", text, 0, INT32_MAX, &r->v.random_cases);
    case 'b': return r->v.bins = true;
    case 'j': r->json.path = text; return true;
    case 'f': r->v.filter = text; return true;
    case 'v': return r->v.verbose = true;
    default: return false;
    }
}

/* Whether each option that is given says something of what is run. */
static bool check_choice(const request *r) {
    const report *one = r->chosen < 0 ? NULL : &reports[r->chosen];
    if (r->v.bins && (one || r->v.filter))
        return complain("--bins has its own cases: without --case and --filter"), false;
    if (r->v.bins && r->v.verbose)
        return complain("--verbose is for the sweep, which --bins leaves out"), false;
    if (r->v.bins && !r->v.random_cases)
        return complain("--random: with 0 of them --bins has nothing to check"), false;
    if (one && one->run != verify_sweep && (r->random_given || r->v.verbose))
        return complain("--%s is for the sweep, which --case %s leaves out", r->random_given ? "random" : "verbose",
                        one->name),
               false;
    if (one && !one->seeded && r->seed_given)
        return complain("--seed is given, but nothing of --case %s is random", one->name), false;
    return true;
}

int cmd_verify(int argc, char **argv) {
    static const struct option options[] = {
        {"device", required_argument, NULL, 'd'}, {"case", required_argument, NULL, 'c'},
        {"filter", required_argument, NULL, 'f'}, {"seed", required_argument, NULL, 's'},
        {"random", required_argument, NULL, 'r'}, {"bins", no_argument, NULL, 'b'},
        {"json", required_argument, NULL, 'j'},   {"verbose", no_argument, NULL, 'v'},
        {"help", no_argument, NULL, 'h'},         {0},
    };
    static const line_rules rules = {.command = "verify", .usage = usage, .options = options, .take = set_option};
    request r = {.v = {.seed = 1, .random_cases = 24}, .chosen = -1};
    const int status = read_options(&rules, argc, argv, &r);
    if (status != NEXT)
        return status;
    if (!check_choice(&r))
        return EXIT_TROUBLE;
    r.json.add = r.v.bins;
    if (r.json.path && !open_json(&r.json, &r.v.json))
        return EXIT_TROUBLE;
    const int result = run(&r.v, r.device_given, r.chosen);
    if (r.v.json && !close_json(&r.json, r.v.json, result != EXIT_TROUBLE))
        return EXIT_TROUBLE;
    return result;
}

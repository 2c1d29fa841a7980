/* SPDX-License-Identifier: Apache-2.0 */
#include "verify.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>

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
    "  --seed N              of the random inputs and combinations; default 1\n"
    "  --random N            how many random combinations; default 24\n"
    "  --bins                random attention alone, without a line for each: what fails, and the averages of our "
    "error "
    "over\n"
    "                        plain's by type, head dim, keys seen and tensor, each at most 1.1\n"
    "  --json FILE           those averages as lines of JSON, too\n"
    "  --verbose             the sweep prints every tensor\n"
    "\n"
    "Example\n"
    "  heddle verify --case p22\n";

typedef struct report {
    const char *name;
    bool (*run)(verify *v);
} report;

static const report reports[] = {
    {"p22", verify_p22},     {"fa2-warps", verify_fa2_warps}, {"day19", verify_day19},
    {"day50", verify_day50}, {"day55", verify_day55},         {"sweep", verify_sweep},
};
enum { REPORTS = sizeof reports / sizeof *reports };

static bool verify_device(verify *v, heddle_device device, int chosen) {
    char text[256] = "";
    v->device = device;
    if (!device_ready(device))
        return false;
    heddle_device_describe(device, text, sizeof text);
    printf("heddle %s on %s: %s\n", heddle_version_string(), device_name(device), text);
    if (v->bins)
        return verify_bins(v);
    for (int i = 0; i < REPORTS; i++)
        if ((chosen < 0 || chosen == i) && !reports[i].run(v))
            return false;
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
        return complain("no device to verify is there; see heddle info");
    printf("\noverall: %s, %d checks, %d failed\n", v->failed ? "FAILED" : "ok", v->checked, v->failed);
    return v->failed ? EXIT_CHECK_FAILED : 0;
}

typedef struct request {
    verify v;
    bool device_given;
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
    case 's': return parse_seed("--seed", text, &r->v.seed);
    case 'r': return parse_int("--random", text, 0, INT32_MAX, &r->v.random_cases);
    case 'b': return r->v.bins = true;
    case 'j': r->v.json = text; return true;
    case 'v': return r->v.verbose = true;
    default: return false;
    }
}

int cmd_verify(int argc, char **argv) {
    static const struct option options[] = {
        {"device", required_argument, NULL, 'd'},
        {"case", required_argument, NULL, 'c'},
        {"seed", required_argument, NULL, 's'},
        {"random", required_argument, NULL, 'r'},
        {"bins", no_argument, NULL, 'b'},
        {"json", required_argument, NULL, 'j'},
        {"verbose", no_argument, NULL, 'v'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    request r = {.v = {.seed = 1, .random_cases = 24}, .chosen = -1};
    const int status = read_options("verify", usage, options, argc, argv, set_option, &r);
    if (status != NEXT)
        return status;
    if (r.v.json && !r.v.bins)
        return complain("--json is for --bins");
    if (r.v.bins && r.chosen >= 0)
        return complain("--bins has its own cases: without --case");
    return run(&r.v, r.device_given, r.chosen);
}

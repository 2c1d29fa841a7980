/* SPDX-License-Identifier: Apache-2.0
 * Random attention by the thousand: each case by the rule for one, and by type, head dim, keys seen and tensor the average of our error
 * over the plain computation's. One case may be off by luck; an average of many is not. */
#include "verify.h"

#include <math.h>
#include <stdio.h>

#define MOST 1.1
#define ENOUGH 100 /* cases, for an average to be held to that */
#define FIELDS 8

static const int64_t dim_limits[] = {32, 64, 128, 512};
static const double key_limits[] = {2.5, 16, 128, INFINITY};
enum { TYPES = 3, DIMS = sizeof dim_limits / sizeof *dim_limits, KEYS = sizeof key_limits / sizeof *key_limits };
static const heddle_dtype dtypes[TYPES] = {HEDDLE_F32, HEDDLE_BF16, HEDDLE_F16};
static const int fields[FIELDS] = {O, LSE, WEIGHTS, DQ, DK, DV, DBIAS, DSINKS};

typedef struct bin {
    int64_t count;
    double log_ratio, largest; /* sum; the largest error as a fraction of what is allowed */
} bin;

typedef struct bins {
    bin at[TYPES][DIMS][KEYS][FIELDS];
    int64_t cases;
} bins;

static void report_failure(const problem *p, heddle_dtype dtype, uint64_t seed, const trial *t) {
    verify count = {0};
    hide_progress();
    printf("  FAILED: --seed %llu --random 1, %s\n", (unsigned long long)seed, dtype_name(dtype));
    report_tensors(&count, p, dtype, t, NULL);
    fflush(stdout);
}

static bool count_case(verify *v, uint64_t seed, bins *all) {
    const int type = (int)(seed % TYPES);
    arena m = {0};
    random_state r = {seed};
    trial t;
    const heddle_attention a = random_attention(&r);
    r.state = seed;
    problem p = make_attention(&a, &m, &r);
    const double keys = keys_seen(&p);
    int dim = 0, key = 0;
    while (p.j.a.d > dim_limits[dim])
        dim++;
    while (keys > key_limits[key])
        key++;
    problem_round(&p, dtypes[type]);
    bool ran = trial_run(&p, &m, v->device, dtypes[type], &t), ok = true;
    for (int x = 0; x < FIELDS && ran; x++) {
        if (!t.ours.x[fields[x]])
            continue;
        const judgement g = judge(&p, fields[x], dtypes[type], &t);
        bin *b = &all->at[type][dim][key][x];
        ok &= g.ok;
        b->count++;
        b->largest = fmax(b->largest, g.ratio);
        b->log_ratio += log_ratio(&p, fields[x], dtypes[type], &t);
    }
    if (ran && !ok)
        report_failure(&p, dtypes[type], seed, &t);
    verdict(v, ran && ok);
    arena_free(&m);
    return ran;
}

static void print_bin(verify *v, const bin *b, int type, int dim, int key, int x) {
    const problem any = attention_problem();
    const char *name = job_fields(&any.j)[fields[x]].name;
    const double ratio = exp(b->log_ratio / (double)b->count);
    char keys[24] = "more";
    if (isfinite(key_limits[key]))
        snprintf(keys, sizeof keys, "%g", key_limits[key]);
    const bool held = b->count >= ENOUGH;
    printf("  %-5s %4lld %6s  %-8s %8lld %8.3f %8.3f  %s\n", dtype_name(dtypes[type]), (long long)dim_limits[dim], keys,
           name, (long long)b->count, ratio, b->largest, held ? verdict(v, ratio <= MOST) : "");
    if (v->json)
        fprintf(
            v->json,
            "{\"device\": \"%s\", \"dtype\": \"%s\", \"d_up_to\": %lld, \"keys_up_to\": \"%s\", \"tensor\": \"%s\", "
            "\"count\": %lld, \"average\": %.4f, \"largest\": %.4f}\n",
            device_name(v->device), dtype_name(dtypes[type]), (long long)dim_limits[dim], keys, name,
            (long long)b->count, ratio, b->largest);
}

static void print_bins(verify *v, const bins *all) {
    printf("  %-5s %4s %6s  %-8s %8s %8s %8s\n", "type", "d <=", "keys <=", "tensor", "cases", "average", "largest");
    for (int type = 0; type < TYPES; type++)
        for (int dim = 0; dim < DIMS; dim++)
            for (int key = 0; key < KEYS; key++)
                for (int x = 0; x < FIELDS; x++)
                    if (all->at[type][dim][key][x].count)
                        print_bin(v, &all->at[type][dim][key][x], type, dim, key, x);
}

bool verify_bins(verify *v) {
    static bins all;
    const double begin = now();
    double last = begin;
    all = (bins){0};
    printf("\nbins: error over that of the plain computation (its sums in blocks of 128), the geometric average of "
           "cases; and the\n"
           "largest error as a fraction of what one case is allowed\n");
    for (all.cases = 0; all.cases < v->random_cases; all.cases++) {
        show_progress(all.cases, v->random_cases, begin);
        if (!count_case(v, v->seed + (uint64_t)all.cases, &all))
            return false;
        if (now() - last >= 60) {
            last = now();
            hide_progress();
            fprintf(stderr, "%lld of %lld cases, %.1f a second, %d failed\n", (long long)all.cases + 1,
                    (long long)v->random_cases, (double)(all.cases + 1) / (last - begin), v->failed);
        }
    }
    hide_progress();
    print_bins(v, &all);
    return true;
}

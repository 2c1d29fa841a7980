/* SPDX-License-Identifier: Apache-2.0
 * Every kernel that a plan can name has a row of `heddle bench --device cuda`, on Hopper as it comes or with a family asked for,
 * or on a card with less shared memory; and the rows of the CPU are what they say.
 * Pure: no driver is asked, and none is needed. */
#include "common.h"

#include "../../tools/bench.h"
#include "cuda/attention/attention.h"
#include "cuda/norm_linear/norm_linear.h"
#include "plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What HEDDLE_CUDA_FAMILY makes of an H200: nothing, sm80, small; and cards whose shared memory takes smaller tiles. */
static const cuda_facts devices[] = {{"an H200", 132, 232448, true, SMALL_CHOSEN},
                                     {"sm80", 132, 232448, false, SMALL_NEVER},
                                     {"small", 132, 232448, false, SMALL_ALWAYS},
                                     {"an A100", 108, 166912, false, SMALL_CHOSEN},
                                     {"an RTX 4090", 128, 101376, false, SMALL_CHOSEN}};

/* The kernel's name. */
static const char *name_of(const job *j, heddle_pass pass, const cuda_facts *device) {
    static char name[128];
    if (j->linear) {
        norm_linear_plan plan = {.threads = 1};
        assert_int_equal(heddle__resolve_norm_linear(&j->l, pass, &plan), HEDDLE_OK);
        assert_int_equal(heddle__cuda_plan_norm_linear(&plan, device), HEDDLE_OK);
        snprintf(name, sizeof name, "%s", plan.kernel);
    } else {
        attention_plan plan = {.threads = 1};
        assert_int_equal(heddle__resolve_attention(&j->a, pass, &plan), HEDDLE_OK);
        assert_int_equal(heddle__cuda_plan_attention(&plan, device), HEDDLE_OK);
        snprintf(name, sizeof name, "%s", plan.kernel);
    }
    return name;
}

enum { MOST_KERNELS = 1000 };

static void test_every_kernel_has_a_row(void **state) {
    (void)state;
    static bench_case cases[BENCH_MOST_CASES];
    static bool taken[MOST_KERNELS];
    static const char *kernels[MOST_KERNELS];
    int all = 0;
    const int n = bench_cases(HEDDLE_CUDA, cases);
    assert_true(n > 0 && n <= BENCH_MOST_CASES);
    for (const char *kernel; (kernel = bench_kernel(all)); all++) {
        assert_true(all < MOST_KERNELS);
        kernels[all] = kernel;
    }
    for (size_t d = 0; d < COUNT(devices); d++)
        for (int x = 0; x < n; x++) {
            if (bench_is_alone(&cases[x])) /* append and merge, which no plan names */
                continue;
            const job j = bench_job(&cases[x], HEDDLE_CUDA);
            for (int pass = 0; pass < 2 - cases[x].forward_only; pass++) {
                const char *name = name_of(&j, (heddle_pass)pass, &devices[d]);
                int i = 0;
                while (i < all && strcmp(kernels[i], name) != 0)
                    i++;
                if (i == all)
                    fail_msg("%s is none of the kernels that a plan can name", name);
                taken[i] = true;
            }
        }
    int missing = 0;
    for (int i = 0; i < all; i++) {
        if (!taken[i])
            printf("no row takes %s\n", kernels[i]);
        missing += !taken[i];
    }
    printf("%d rows, %d kernels, %d of them without a row\n", n, all, missing);
    assert_true(all > 150);
    assert_int_equal(missing, 0);
}

/* By counting. */
static void test_window(void **state) {
    (void)state;
    static bench_case cases[BENCH_MOST_CASES];
    const int n = bench_cases(HEDDLE_CUDA, cases);
    int counted = 0;
    for (int x = 0; x < n; x++) {
        const bench_case *c = &cases[x];
        const job j = bench_job(c, HEDDLE_CUDA);
        if (j.linear || !(j.a.features & HEDDLE_WINDOW))
            continue;
        int64_t pairs = 0;
        for (int64_t q = c->sk - c->sq; q < c->sk; q++)
            pairs += q < j.a.window_left ? q + 1 : j.a.window_left + 1;
        const double flops = 4.0 * (double)(c->b * c->h * c->d * pairs);
        if (fabs(bench_flops(c, &j, HEDDLE_FORWARD) - flops) > 3e-3 * flops)
            fail_msg("%s: %g operations, counted are %g", c->option, bench_flops(c, &j, HEDDLE_FORWARD), flops);
        counted++;
    }
    assert_true(counted > 2);
}

/* Whether the row is of this option, and the problem has it. */
static bool is_of(const bench_case *c, const char *option) {
    if (!c->option || strcmp(c->option, option) != 0)
        return false;
    const job j = bench_job(c, HEDDLE_CPU);
    const uint64_t has = j.linear ? j.l.features : j.a.features;
    const struct {
        const char *name;
        bool has;
    } options[] = {
        {"alibi", has & HEDDLE_ALIBI},     {"sinks", has & HEDDLE_SINKS},
        {"dense", has & HEDDLE_BOOL_MASK}, {"bias", has & HEDDLE_BIAS},
        {"pages", has & HEDDLE_PAGES},     {"e4m3", has & HEDDLE_E4M3},
        {"softcap", j.a.softcap > 0},      {"dropout", j.a.dropout > 0},
        {"gelu", has & HEDDLE_ACTIVATION}, {"rms", j.linear && j.l.norm == HEDDLE_RMS_NORM},
    };
    for (size_t i = 0; i < COUNT(options); i++)
        if (options[i].has != (strstr(option, options[i].name) != NULL))
            return false;
    return true;
}

/* Each kind of option is timed, each problem is one, and no two rows are called the same. */
static void test_cpu_rows(void **state) {
    (void)state;
    static const char *const options[] = {"softcap",     "alibi",        "sinks",   "dropout", "dense",
                                          "bias shared", "dbias shared", "pages",   "e4m3",    "pages e4m3",
                                          "gelu",        "rms",          "prepared"};
    static bench_case cases[BENCH_MOST_CASES];
    static char names[BENCH_MOST_CASES][96];
    const int n = bench_cases(HEDDLE_CPU, cases);
    assert_true(n > 0 && n <= BENCH_MOST_CASES);
    for (int x = 0; x < n; x++) {
        const job j = bench_job(&cases[x], HEDDLE_CPU);
        bench_name(&cases[x], HEDDLE_CPU, names[x], sizeof names[x]);
        attention_plan attention = {.threads = 1};
        norm_linear_plan linear = {.threads = 1};
        for (int pass = 0; pass < 2 - cases[x].forward_only; pass++)
            if ((j.linear ? heddle__resolve_norm_linear(&j.l, (heddle_pass)pass, &linear)
                          : heddle__resolve_attention(&j.a, (heddle_pass)pass, &attention)) != HEDDLE_OK)
                fail_msg("%s is no problem: %s", names[x], heddle_last_message());
        for (int y = 0; y < x; y++)
            if (cases[x].dtype == cases[y].dtype && !strcmp(names[x], names[y]))
                fail_msg("two rows are called %s", names[x]);
    }
    for (size_t o = 0; o < COUNT(options); o++) {
        int rows = 0;
        for (int x = 0; x < n; x++)
            rows += is_of(&cases[x], options[o]);
        if (!rows)
            fail_msg("no row has %s", options[o]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_kernel_has_a_row), cmocka_unit_test(test_window),
                                       cmocka_unit_test(test_cpu_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0
 * A child of fork() computes as its parent did, with several threads before and after. */
#include "common.h"

#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum { B = 2, H = 4, S = 128, D = 32, ELEMENTS = B * H * S * D };

static _Alignas(64) char workspace[1 << 23];
static float q[ELEMENTS], out[ELEMENTS], again[ELEMENTS];

static void compute(float *o) {
    heddle_attention a = {.size = sizeof a, .dtype = HEDDLE_F32, .device = HEDDLE_CPU, .b = B, .h = H, .hk = H};
    a.sq = a.sk = S;
    a.d = a.dv = D;
    const heddle_attention_data t = {.size = sizeof t, .q = q, .k = q, .v = q, .o = o};
    size_t bytes;
    assert_int_equal(heddle_attention_workspace(&a, HEDDLE_FORWARD, &bytes), HEDDLE_OK);
    assert_true(bytes <= sizeof workspace);
    assert_int_equal(heddle_attention_forward(&a, &t, workspace, bytes, NULL), HEDDLE_OK);
}

static void in_a_child(void) {
    memset(again, 0, sizeof again);
    const pid_t child = fork();
    if (child == 0) {
        alarm(20); /* a child that hangs is killed, and seen */
        compute(again);
        _exit(memcmp(out, again, sizeof out) == 0 ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_child(void **state) {
    (void)state;
#ifdef _OPENMP
    omp_set_num_threads(3);
#endif
    for (int x = 0; x < ELEMENTS; x++)
        q[x] = (float)((x * 7919) % 1009) / 1009 - 0.5f;
    compute(out);
    in_a_child();
    in_a_child(); /* the first left the parent's threads behind */
    compute(again);
    assert_memory_equal(out, again, sizeof out);
}

#ifdef _OPENMP
static void test_child_of_a_parallel_region(void **state) {
    (void)state;
    omp_set_num_threads(3);
    compute(out);
#pragma omp parallel num_threads(2)
    {
#pragma omp single
        in_a_child();
    }
}
#endif

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_child),
#ifdef _OPENMP
        cmocka_unit_test(test_child_of_a_parallel_region),
#endif
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

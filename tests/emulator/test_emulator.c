/* SPDX-License-Identifier: Apache-2.0
 * Does the emulator see what is wrong with a kernel? The same kernel with one mistake after the other (faults.cpp), each under several
 * seeds: a launch fails, or a result is not what it should be. */
#define _POSIX_C_SOURCE 200809L
#include "common.h"
#include "gpu/fake_driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define THREADS 256
#define BLOCKS 2
#define SEEDS 8

cu_result cuLibraryLoadData(cu_library *library, const void *code, void *jit, void *jit_values, unsigned jit_count,
                            void *options, void *option_values, unsigned option_count);
cu_result cuLibraryGetKernel(cu_kernel *kernel, cu_library library, const char *name);
cu_result cuLaunchKernelEx(const cu_launch *launch, cu_kernel kernel, void **parameters, void **extra);

enum { RIGHT, WRONG, FAILED };

/* What comes of a launch. */
static int launch(const char *name, int seed) {
    static float from[BLOCKS * THREADS], to[BLOCKS * THREADS];
    char text[16];
    cu_library library;
    cu_kernel kernel;
    struct {
        const float *from;
        float *to;
    } p = {from, to};
    void *parameters[] = {&p};
    const cu_launch l = {{BLOCKS, 1, 1}, {THREADS, 1, 1}, THREADS * sizeof(float), NULL, NULL, 0};
    snprintf(text, sizeof text, "%d", seed);
    assert_int_equal(setenv("EMULATOR_SEED", text, 1), 0);
    for (int x = 0; x < BLOCKS * THREADS; x++) {
        from[x] = (float)(x + 1);
        to[x] = 0;
    }
    assert_int_equal(cuLibraryLoadData(&library, "faults", NULL, NULL, 0, NULL, NULL, 0), CU_SUCCESS);
    assert_int_equal(cuLibraryGetKernel(&kernel, library, name), CU_SUCCESS);
    if (cuLaunchKernelEx(&l, kernel, parameters, NULL) != CU_SUCCESS)
        return FAILED;
    for (int x = 0; x < BLOCKS * THREADS; x++)
        if (!(to[x] == from[x / THREADS * THREADS + THREADS - 1 - x % THREADS]))
            return WRONG;
    return RIGHT;
}

static void test_right(void **state) {
    (void)state;
    for (int seed = 0; seed < SEEDS; seed++)
        assert_int_equal(launch("NONE", seed), RIGHT);
}

/* What only another order of the threads shows, any of several seeds shows. */
static void test_wrong(void **state) {
    (void)state;
    static const char *const names[] = {"NO_BARRIER", "NO_WAIT", "SHORT_WAIT", "NO_COPY"};
    for (size_t x = 0; x < COUNT(names); x++) {
        int wrong = 0;
        for (int seed = 0; seed < SEEDS; seed++)
            wrong += launch(names[x], seed) == WRONG;
        printf("%s: seen by %d seeds of %d\n", names[x], wrong, SEEDS);
        assert_true(wrong > 0);
    }
}

static void test_failed(void **state) {
    (void)state;
    static const char *const names[] = {"OVERRUN", "WRONG_ADDRESS", "LONELY_LANE", "TWO_PLACES", "LONELY_WARP"};
    for (size_t x = 0; x < COUNT(names); x++)
        for (int seed = 0; seed < SEEDS; seed++)
            assert_int_equal(launch(names[x], seed), FAILED);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_right), cmocka_unit_test(test_wrong),
                                       cmocka_unit_test(test_failed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

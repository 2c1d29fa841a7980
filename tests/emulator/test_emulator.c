/* SPDX-License-Identifier: Apache-2.0
 * Does the emulator see what is wrong with a kernel? The same kernel with one mistake after the other (faults.cpp, and for Hopper
 * faults90.cpp), each under several seeds: a launch fails, or a result is not what it should be. */
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
static int launch(const char *module, const char *name, int seed, unsigned blocks, unsigned threads, unsigned bytes,
                  const void *from, void *to) {
    char text[16];
    cu_library library;
    cu_kernel kernel;
    struct {
        const void *from;
        void *to;
    } p = {from, to};
    void *parameters[] = {&p};
    const cu_launch l = {{blocks, 1, 1}, {threads, 1, 1}, bytes, NULL, NULL, 0};
    snprintf(text, sizeof text, "%d", seed);
    assert_int_equal(setenv("EMULATOR_SEED", text, 1), 0);
    assert_int_equal(cuLibraryLoadData(&library, module, NULL, NULL, 0, NULL, NULL, 0), CU_SUCCESS);
    assert_int_equal(cuLibraryGetKernel(&kernel, library, name), CU_SUCCESS);
    return cuLaunchKernelEx(&l, kernel, parameters, NULL) == CU_SUCCESS ? RIGHT : FAILED;
}

static int turn_round(const char *name, int seed) {
    static float from[BLOCKS * THREADS], to[BLOCKS * THREADS];
    for (int x = 0; x < BLOCKS * THREADS; x++) {
        from[x] = (float)(x + 1);
        to[x] = 0;
    }
    if (launch("faults", name, seed, BLOCKS, THREADS, THREADS * sizeof(float), from, to) == FAILED)
        return FAILED;
    for (int x = 0; x < BLOCKS * THREADS; x++)
        if (!(to[x] == from[x / THREADS * THREADS + THREADS - 1 - x % THREADS]))
            return WRONG;
    return RIGHT;
}

#define TILE 64
/* Row n of the first tile is 64 times n + 1, of the second twice that: a column of the sums is 192 times n + 1. */
static int add_products(const char *name, int seed) {
    static const uint16_t two = 0x4000;
    static _Alignas(16) uint16_t from[2][TILE][TILE];
    static float to[TILE * TILE];
    for (int n = 0; n < TILE; n++)
        for (int k = 0; k < TILE; k++) {
            const float x = (float)(n + 1);
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            from[0][n][k] = (uint16_t)(bits >> 16);
            from[1][n][k] = (uint16_t)(from[0][n][k] + two - 0x3f80);
        }
    memset(to, 0, sizeof to);
    if (launch("faults90", name, seed, 1, 128, TILE * TILE * 2 + 16, from, to) == FAILED)
        return FAILED;
    for (int x = 0; x < TILE * TILE; x++)
        if (!(to[x] == 192.0f * (float)(x % TILE + 1)))
            return WRONG;
    return RIGHT;
}

static int add_numbers(const char *name, int seed) {
    static _Alignas(16) float to[2 * 128];
    memset(to, 0, sizeof to);
    if (launch("faults90", name, seed, 1, 128, 128 * sizeof(float), NULL, to) == FAILED)
        return FAILED;
    for (int x = 0; x < 128; x++)
        if (!(to[x] == (float)(x + 1) && to[128 + x] == (float)(x + 2)))
            return WRONG;
    return RIGHT;
}

static void test_right(void **state) {
    (void)state;
    for (int seed = 0; seed < SEEDS; seed++) {
        assert_int_equal(turn_round("NONE", seed), RIGHT);
        assert_int_equal(add_products("NONE_90", seed), RIGHT);
        assert_int_equal(add_numbers("ADDED_90", seed), RIGHT);
    }
}

/* What only another order of the threads shows, any of several seeds shows: as wrong numbers, or a barrier does not get what it waits for. */
static void see_wrong(int run(const char *, int), const char *name) {
    int wrong = 0;
    for (int seed = 0; seed < SEEDS; seed++)
        wrong += run(name, seed) != RIGHT;
    printf("%s: seen by %d seeds of %d\n", name, wrong, SEEDS);
    assert_true(wrong > 0);
}

static void test_wrong(void **state) {
    (void)state;
    static const char *const names[] = {"NO_BARRIER", "NO_WAIT", "SHORT_WAIT", "NO_COPY"}, *const names90[] = {
                                                                                               "NO_PHASE_90",
                                                                                               "OTHER_PHASE_90",
                                                                                               "NO_PRODUCTS_90",
                                                                                               "SOON_90"};
    for (size_t x = 0; x < COUNT(names); x++)
        see_wrong(turn_round, names[x]);
    for (size_t x = 0; x < COUNT(names90); x++)
        see_wrong(add_products, names90[x]);
    see_wrong(add_numbers, "TOO_SOON_90");
    see_wrong(add_numbers, "NOT_THERE_90");
    see_wrong(add_numbers, "LEFT_90");
}

static void test_failed(void **state) {
    (void)state;
    static const char *const names[] = {"OVERRUN",     "WRONG_ADDRESS", "ODD_SOURCE",
                                        "LONELY_LANE", "TWO_PLACES",    "LONELY_WARP"};
    for (int seed = 0; seed < SEEDS; seed++) {
        for (size_t x = 0; x < COUNT(names); x++)
            assert_int_equal(turn_round(names[x], seed), FAILED);
        assert_int_equal(add_products("MORE_BYTES_90", seed), FAILED);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_right), cmocka_unit_test(test_wrong),
                                       cmocka_unit_test(test_failed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0
 * What the environment asks of a test program. */
#define _POSIX_C_SOURCE 200809L
#include "common.h"
#include "cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

/* A test allocates the same sizes again and again: to give them back each time costs more than what is computed. */
static void keep_memory(void) {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
}

static bool takes_all(void) {
    const char *isa = getenv("HEDDLE_CPU");
    return isa && !strcmp(isa, "all") && test_device() == HEDDLE_CPU;
}

static bool one_is_taken; /* by test_by_each_isa */

int test_isas(void) {
    int count = 0;
    while (takes_all() && !one_is_taken && count < TEST_ISAS && heddle_cpu_isa_available(count))
        count++;
    return count ? count : 1;
}

const char *test_take_isa(int i) {
    if (takes_all() && !one_is_taken)
        heddle__cpu_choose(heddle_cpu_isa_available(i));
    return test_device() == HEDDLE_CPU ? heddle_cpu_isa() : "";
}

void test_by_each_isa(void **state) {
    const test_body *body = *state;
    one_is_taken = false; /* after a test that failed */
    for (int x = 0, isas = test_isas(); x < isas; x++) {
        if (isas > 1)
            printf("  by %s\n", test_take_isa(x));
        one_is_taken = isas > 1;
        body->run(NULL);
        one_is_taken = false;
    }
}

void test_begin(void) {
    const char *isa = getenv("HEDDLE_CPU");
    if (isa && *isa && !takes_all() && strcmp(isa, heddle_cpu_isa()) != 0) {
        printf("skipped: HEDDLE_CPU=%s, but this processor gives %s\n", isa, heddle_cpu_isa());
        exit(77);
    }
    char why[256];
    if (heddle_device_available(test_device(), why, sizeof why) != HEDDLE_OK) {
        printf("skipped: %s\n", why);
        exit(77);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    keep_memory();
    if (getenv("HEDDLE_ONLY"))
        cmocka_set_test_filter(getenv("HEDDLE_ONLY"));
}

const heddle_dtype test_dtypes[TEST_DTYPES] = {HEDDLE_F32, HEDDLE_BF16, HEDDLE_F16};

heddle_device test_device(void) {
    const char *name = getenv("HEDDLE_TEST_DEVICE");
    if (!name || !*name || !strcmp(name, "cpu"))
        return HEDDLE_CPU;
    if (!strcmp(name, "cuda"))
        return HEDDLE_CUDA;
    printf("HEDDLE_TEST_DEVICE=%s is neither cpu nor cuda\n", name);
    exit(2);
}

static bool is_set(const char *name) {
    const char *value = getenv(name);
    return value && *value && *value != '0';
}

bool test_long(void) {
    return is_set("HEDDLE_LONG");
}

bool test_emulated(void) {
    return is_set("HEDDLE_EMULATED") && !test_long();
}

uint64_t test_seed(uint64_t standard) {
    const char *value = getenv("HEDDLE_SEED");
    return value && *value ? strtoull(value, NULL, 0) : standard;
}

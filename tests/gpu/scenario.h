/* SPDX-License-Identifier: Apache-2.0
 * Problems for the host side of the CUDA backend on a driver that is none (fake_driver.c), and scenarios, each in a process of its own,
 * since the driver is opened once. */
#ifndef HEDDLE_TESTS_SCENARIO_H
#define HEDDLE_TESTS_SCENARIO_H

#include "common.h"
#include "fake_driver.h"

#include <stdio.h>
#include <unistd.h>

/* The n-th tensor's address on a device: 2 MiB aligned and far from the others. `skew` bytes off. */
void *address(int device, int n, int skew);

/* What a pass needs, `skew` bytes off. */
heddle_attention_data attention_pointers(const heddle_attention *a, heddle_pass pass, int skew);

/* A pass with such pointers, and its workspace. */
heddle_status run_attention(heddle_attention a, heddle_pass pass, int skew, void *stream);
heddle_status run_norm_linear(heddle_norm_linear a, heddle_pass pass, int skew, void *stream);

/* An environment variable; NULL: none. */
void set(const char *name, const char *value);

/* In a scenario, where cmocka's assertions would end the wrong process. */
#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("%s:%d: %s; the last message: %s\n", __FILE__, __LINE__, #condition, heddle_last_message());        \
            fflush(stdout);                                                                                            \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Its exit status, -1 if it has none. */
int child_status(void (*scenario)(void));

#define SCENARIO(name)                                                                                                 \
    static void test_##name(void **state) {                                                                            \
        (void)state;                                                                                                   \
        assert_int_equal(child_status(name), 0);                                                                       \
    }

/* Is libcuda.so.1 the fake one? If not it says so, and the program has to end with 77. */
bool is_fake_driver(void);

#endif

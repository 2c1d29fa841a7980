/* SPDX-License-Identifier: Apache-2.0
 * What test_driver.c asks the fake driver. */
#ifndef HEDDLE_TESTS_FAKE_DRIVER_H
#define HEDDLE_TESTS_FAKE_DRIVER_H

#include <stdbool.h>
#include <stdint.h>

/* How often a kernel was launched; NULL: all together. */
int fake_launches(const char *symbol);
/* Contexts pushed and not popped. */
int fake_depth(void);

#endif

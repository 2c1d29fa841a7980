/* SPDX-License-Identifier: Apache-2.0
 * What test_driver.c asks the fake driver; and what that asks tests/emulator, where it is linked with it. */
#ifndef HEDDLE_TESTS_FAKE_DRIVER_H
#define HEDDLE_TESTS_FAKE_DRIVER_H

#include "cuda/host/driver.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How often a kernel was launched; NULL: all together. */
int fake_launches(const char *symbol);
/* The most blocks that it had in a launch. */
int fake_blocks(const char *symbol);
/* Contexts pushed and not popped. */
int fake_depth(void);

#define EMULATOR __attribute__((weak))

/* A kernel of an image by its symbol; NULL: the image has none of that name. */
EMULATOR const void *emulator_find(const void *image, const char *symbol);
EMULATOR bool emulator_run(const void *kernel, const cu_launch *launch, const void *parameters);
EMULATOR void emulator_encode(void *map, unsigned rank, void *base, const uint64_t *extents, const uint64_t *strides,
                              const uint32_t *box);
EMULATOR void emulator_move(void *map, void *base);

#ifdef __cplusplus
}
#endif

#endif

/* SPDX-License-Identifier: Apache-2.0
 * What the driver (driver.cpp) asks of run.cpp, and run.cpp of the driver. */
#ifndef HEDDLE_TESTS_EMULATOR_RUN_H
#define HEDDLE_TESTS_EMULATOR_RUN_H

#include "emulator.h"

struct emulator_module;

/* One kernel, to its end. False: it was not right, which has been said. */
bool emulator_launch(const emulator_module *module, const emulator_kernel *kernel, const void *parameters,
                     unsigned blocks, unsigned threads, unsigned bytes);

/* Every byte of the shared memory that a module's functions declare. */
void emulator_unset(const emulator_module *module, int byte);

#endif

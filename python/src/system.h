/* SPDX-License-Identifier: Apache-2.0
 * What Windows has by other names: libraries that are loaded by name, their symbols, and memory on a boundary. */
#ifndef HEDDLE_SYSTEM_H
#define HEDDLE_SYSTEM_H

#include <stdbool.h>
#include <stddef.h>

/* NULL where there is none; `loaded`: only one that this process has already. It stays for the life of the process. */
void *heddle_system_library(const char *name, bool loaded);
void *heddle_system_symbol(void *library, const char *name);

/* On a boundary of 64 bytes; NULL where there is no more. */
void *heddle_system_memory(size_t bytes);
void heddle_system_free(void *memory);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Memory of the GPU for the command, the tests and the examples, by libcuda opened at run time: like the library itself,
 * they build without CUDA and run without a GPU. Each call works in the current context, device 0's where there is none. */
#ifndef HEDDLE_TOOLS_DEVICE_MEMORY_H
#define HEDDLE_TOOLS_DEVICE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

/* Each returns NULL or false when something is wrong; the reason is then in device_memory_error(). */
void *device_memory_new(size_t bytes);
void device_memory_free(void *p);
/* In any direction; waits for what the default stream was given before. */
bool device_memory_copy(void *to, const void *from, size_t bytes);
bool device_memory_fill(void *p, unsigned char byte, size_t bytes);
/* Memory of the host, never freed, that the device writes to while the host goes on: after device_memory_wait() what was
 * fetched is there. */
void *device_memory_staging(size_t bytes);
bool device_memory_fetch(void *staging, const void *from, size_t bytes);
/* Waits for all work of the context; an error of a kernel comes out here. */
bool device_memory_wait(void);
/* A stream of this thread's own, which its copies, fills, fetches and waits are in from now on, so that threads keep out
 * of each other's way. And the one that they are in; NULL is the default one. */
void *device_memory_own_stream(void);
void *device_memory_stream(void);
const char *device_memory_error(void);

/* A driver function, for what else a test needs; NULL if there is none of that name. */
void *device_memory_driver(const char *symbol);

#endif

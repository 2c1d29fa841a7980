/* SPDX-License-Identifier: Apache-2.0
 * Times of the GPU alone, by events of the driver, and what it can do at most, measured: a loop of products on its tensor
 * cores, written in PTX, and a copy of its memory. In the current context, on the default stream. */
#ifndef HEDDLE_TOOLS_GPU_CLOCK_H
#define HEDDLE_TOOLS_GPU_CLOCK_H

#include <stdbool.h>

typedef struct gpu_clock {
    void *begin, *end;     /* events */
    void *flush;           /* memory that is larger than the second-level cache */
    void *kernel, *module; /* the loop; NULL where the GPU has no tensor cores that it knows */
    unsigned blocks;
    double flops; /* of a step of the loop, in all blocks */
} gpu_clock;

/* False when something is wrong; the reason is then in device_memory_error(). */
bool gpu_clock_open(gpu_clock *c);
void gpu_clock_close(gpu_clock *c);

/* What is enqueued between the two is timed. First the second-level cache is overwritten, so that nothing is warm, and the
 * device is busy for long enough that the host's time to enqueue is not in it. */
bool gpu_clock_begin(const gpu_clock *c);
bool gpu_clock_end(const gpu_clock *c, double *seconds);

/* FLOP/s of products in bfloat16 with sums in float32, operands in shared memory or registers; 0: unknown. */
bool gpu_clock_products(const gpu_clock *c, double *flops);
/* Bytes/s of a copy within the device, those read and those written. */
bool gpu_clock_copy(const gpu_clock *c, double *bytes);

#endif

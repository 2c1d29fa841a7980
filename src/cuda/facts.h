/* SPDX-License-Identifier: Apache-2.0
 * What a plan must know of a device. C only. */
#ifndef HEDDLE_CUDA_FACTS_H
#define HEDDLE_CUDA_FACTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* When the family `small` is taken. */
enum { SMALL_NEVER, SMALL_CHOSEN, SMALL_ALWAYS };

typedef struct cuda_facts {
    const char *name;
    int multiprocessors;
    size_t shared_bytes; /* that a block can have, opted in */
    bool sm90;           /* has Hopper's instructions, and they are to be used */
    int small;           /* SMALL_CHOSEN, unless somebody asks for a family */
} cuda_facts;

/* What a description's limit is here: 0 where it leaves nothing to others. */
static inline int64_t limit_of(const cuda_facts *device, int64_t multiprocessors) {
    return multiprocessors < device->multiprocessors ? multiprocessors : 0;
}

/* The device as a call with this limit_of has it. */
static inline cuda_facts limited_facts(const cuda_facts *device, int64_t limit) {
    cuda_facts r = *device;
    if (limit)
        r.multiprocessors = (int)limit;
    return r;
}

#endif

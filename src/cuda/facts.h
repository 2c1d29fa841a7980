/* SPDX-License-Identifier: Apache-2.0
 * What a plan must know of a device. C only. */
#ifndef HEDDLE_CUDA_FACTS_H
#define HEDDLE_CUDA_FACTS_H

#include <stdbool.h>
#include <stddef.h>

/* When the family `small` is taken. */
enum { SMALL_NEVER, SMALL_CHOSEN, SMALL_ALWAYS };

typedef struct cuda_facts {
    const char *name;
    int multiprocessors;
    size_t shared_bytes; /* that a block can have, opted in */
    bool sm90;           /* has Hopper's instructions, and they are to be used */
    int small;           /* SMALL_CHOSEN, unless somebody asks for a family */
} cuda_facts;

#endif

/* SPDX-License-Identifier: Apache-2.0
 * What the tests of bad input share, of both operations. */
#ifndef HEDDLE_TESTS_API_H
#define HEDDLE_TESTS_API_H

#include "common.h"

#include <string.h>

#define ENOUGH ((size_t)1 << 22) /* bytes of workspace for any of their problems */

/* Fails unless this is what a call gave, and its message has this part. */
static inline void expect_status(heddle_status got, heddle_status expected, const char *part) {
    if (got != expected)
        fail_msg("%s in place of %s (%s): %s", heddle_status_string(got), heddle_status_string(expected), part,
                 heddle_last_message());
    if (expected != HEDDLE_OK && !strstr(heddle_last_message(), part))
        fail_msg("the message \"%s\" does not say \"%s\"", heddle_last_message(), part);
}

/* Each pointer that a pass needs, missing; each pointer, misaligned; each pointer of a feature, without it. */
typedef struct pointer_fault {
    const char *name;
    size_t offset;
    uint64_t feature;
    bool needed_forward, needed_backward, bytes;
} pointer_fault;

static inline char *pointer_in(const void *data, const pointer_fault *f) {
    char *p;
    memcpy(&p, (const char *)data + f->offset, sizeof p);
    return p;
}

static inline void set_pointer(void *data, const pointer_fault *f, const void *p) {
    memcpy((char *)data + f->offset, &p, sizeof p);
}

#endif

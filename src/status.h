/* SPDX-License-Identifier: Apache-2.0
 * The thread's last message. */
#ifndef HEDDLE_STATUS_H
#define HEDDLE_STATUS_H

#include "heddle.h"

/* Formats the message that heddle_last_message() returns and gives back `status`: `return fail(HEDDLE_BAD_SIZE, ...)`. */
__attribute__((cold, format(printf, 2, 3))) heddle_status heddle__fail(heddle_status status, const char *format, ...);
#define fail heddle__fail

/* Leaves the function with the status of `call` unless that is HEDDLE_OK. */
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        heddle_status status_ = (call);                                                                                \
        if (status_ != HEDDLE_OK)                                                                                      \
            return status_;                                                                                            \
    } while (0)

/* Copies text into out[n], cut to fit and always ended by zero; out may be NULL. */
void heddle__copy_text(char *out, size_t n, const char *text);

#endif

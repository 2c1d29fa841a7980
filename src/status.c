/* SPDX-License-Identifier: Apache-2.0
 * Status -> string, and the thread's last message: with the table of a device, the only state there is. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_message[384];

heddle_status heddle__fail(heddle_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_message, sizeof last_message, format, args);
    va_end(args);
    return status;
}

void heddle__copy_text(char *out, size_t n, const char *text) {
    if (!out || !n)
        return;
    size_t length = strlen(text);
    if (length >= n)
        length = n - 1;
    memcpy(out, text, length);
    out[length] = '\0';
}

const char *heddle_last_message(void) {
    return last_message;
}

const char *heddle_status_string(heddle_status status) {
    switch (status) {
#define NAME(s)                                                                                                        \
    case s: return #s;
        NAME(HEDDLE_OK)
        NAME(HEDDLE_NULL_POINTER)
        NAME(HEDDLE_BAD_DESCRIPTOR_SIZE)
        NAME(HEDDLE_BAD_ENUM)
        NAME(HEDDLE_BAD_SIZE)
        NAME(HEDDLE_BAD_HEADS)
        NAME(HEDDLE_BAD_STRIDE)
        NAME(HEDDLE_OVERFLOW)
        NAME(HEDDLE_BAD_VALUE)
        NAME(HEDDLE_WORKSPACE_TOO_SMALL)
        NAME(HEDDLE_MISALIGNED)
        NAME(HEDDLE_BAD_COMBINATION)
        NAME(HEDDLE_UNSUPPORTED)
        NAME(HEDDLE_NO_DEVICE)
        NAME(HEDDLE_WRONG_DEVICE)
        NAME(HEDDLE_CUDA_ERROR)
        NAME(HEDDLE_EARLIER_CUDA_ERROR)
#undef NAME
    }
    return "unknown status";
}

/* SPDX-License-Identifier: Apache-2.0
 * What the rules of all descriptions have in common: limits, checks with their sentences, strides. Of plan.c and the files beside it. */
#ifndef HEDDLE_RULES_H
#define HEDDLE_RULES_H

#include "plan.h"
#include "status.h"

#define MAX_SIZE (INT64_C(1) << 40)
#define MAX_HEAD_DIM 512
#define MAX_ELEMENTS (INT64_MAX / 8)
/* Of the products of sizes that backends form, to which up to a thousand bytes of a workspace belong. */
#define MAX_PRODUCT 0x1p52

static inline heddle_status check_enums(const char *what, int dtype, int device, int pass) {
    if (dtype < HEDDLE_F32 || dtype > HEDDLE_F64)
        return fail(HEDDLE_BAD_ENUM, "%s.dtype = %d is no heddle_dtype (0 to 3)", what, dtype);
    if (device < HEDDLE_CPU || device > HEDDLE_CUDA)
        return fail(HEDDLE_BAD_ENUM, "%s.device = %d is no heddle_device (0 to 2)", what, device);
    if (pass < HEDDLE_FORWARD || pass > HEDDLE_BACKWARD)
        return fail(HEDDLE_BAD_ENUM, "pass = %d is no heddle_pass (0 or 1)", pass);
    return HEDDLE_OK;
}

static inline heddle_status check_descriptor(const char *what, const void *desc, size_t size, size_t known) {
    if (!desc)
        return fail(HEDDLE_NULL_POINTER, "the pointer to %s is NULL", what);
    if (size != known)
        return fail(HEDDLE_BAD_DESCRIPTOR_SIZE, "%s.size = %zu, but this library (%s) knows %zu bytes: %s", what, size,
                    heddle_version_string(), known,
                    size < known ? "was size set to sizeof?" : "it is older than the header you compiled with");
    return HEDDLE_OK;
}

static inline heddle_status check_size(const char *name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        return fail(HEDDLE_BAD_SIZE, "%s = %lld is outside %lld to %lld", name, (long long)value, (long long)low,
                    (long long)high);
    return HEDDLE_OK;
}

/* a·b + c of non-negative numbers, or -1 when it does not fit. */
static inline int64_t multiply_add(int64_t a, int64_t b, int64_t c) {
    int64_t r;
    if (a < 0 || c < 0 || __builtin_mul_overflow(a, b, &r) || __builtin_add_overflow(r, c, &r) || r > MAX_ELEMENTS)
        return -1;
    return r;
}

typedef struct tensor_rule {
    const char *name;
    bool written, summed; /* summed where its stride is 0 */
    bool packed;          /* its rows are [total, h, last] */
    int64_t b, h, s, last;
} tensor_rule;

/* Fills in strides that are left to the library, and refuses those that do not fit or overlap. */
heddle_status heddle__resolve_tensor(const tensor_rule *t, heddle_strides *stride);

/* Afterwards table is a number. */
heddle_status heddle__check_pages(heddle_attention *a);

#endif

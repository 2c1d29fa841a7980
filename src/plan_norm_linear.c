/* SPDX-License-Identifier: Apache-2.0
 * The rules of a description of norm-linear, and its defaults. Pure. */
#include "fields.h"
#include "rules.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* The union of the list's bits. */
#define FEATURE(name, bit) | (bit)
static const uint64_t norm_linear_features = 0
#include "norm_linear_fields.def"
    ;

static heddle_status resolve_row_stride(const heddle_norm_linear *a, const tensor_field *t, int64_t *stride) {
    const char *name = t->stride_name;
    const int64_t rows = norm_linear_extent(a, t->shape[0]), last = norm_linear_extent(a, t->shape[1]);
    if (*stride < 0)
        return fail(HEDDLE_BAD_STRIDE, "%s_stride = %lld is negative", name, (long long)*stride);
    if (*stride == 0)
        *stride = last;
    if (is_output(t) && *stride < last && rows > 1)
        return fail(HEDDLE_BAD_STRIDE, "%s_stride = %lld is less than a row's %lld: %s would overlap itself", name,
                    (long long)*stride, (long long)last, name);
    if (rows > 0 && multiply_add(rows - 1, *stride, last) < 0)
        return fail(HEDDLE_OVERFLOW, "%s: %lld rows of %lld with stride %lld are over 2^60 elements", name,
                    (long long)rows, (long long)last, (long long)*stride);
    return HEDDLE_OK;
}

/* Also of programs that were built when it ended in front of the activation, of the residual, of z, of what is prepared or of the limit. */
static heddle_status take_norm_linear(const heddle_norm_linear *desc, heddle_norm_linear *a) {
    const size_t before_activation = offsetof(heddle_norm_linear, activation), size = desc ? desc->size : 0;
    if (size != before_activation && size != offsetof(heddle_norm_linear, residual_stride) &&
        size != offsetof(heddle_norm_linear, z_stride) && size != offsetof(heddle_norm_linear, prepared_bytes) &&
        size != offsetof(heddle_norm_linear, multiprocessors))
        TRY(check_descriptor("heddle_norm_linear", desc, size, sizeof *desc));
    memset(a, 0, sizeof *a);
    memcpy(a, desc, size);
    a->size = sizeof *a;
    return HEDDLE_OK;
}

static heddle_status check_activation(const heddle_norm_linear *a) {
    if ((int)a->activation < 0 || (int)a->activation > LAST_ACTIVATION)
        return fail(HEDDLE_BAD_ENUM, "activation = %d is no heddle_activation (0 to %d)", (int)a->activation,
                    LAST_ACTIVATION);
    if (a->reserved1)
        return fail(HEDDLE_BAD_ENUM, "reserved1 = %d, but must be 0", a->reserved1);
    if (!(a->features & HEDDLE_ACTIVATION) != !a->activation)
        return fail(HEDDLE_BAD_COMBINATION, "activation = %d, but HEDDLE_ACTIVATION is %s", (int)a->activation,
                    a->activation ? "not set" : "set");
    return HEDDLE_OK;
}

static heddle_status check_prepared(const heddle_norm_linear *a) {
    if (!(a->features & HEDDLE_PREPARED) && a->prepared_bytes)
        return fail(HEDDLE_BAD_COMBINATION, "prepared_bytes = %lld, but HEDDLE_PREPARED is not set",
                    (long long)a->prepared_bytes);
    return check_size("prepared_bytes", a->prepared_bytes, 0, INT64_MAX);
}

heddle_status heddle__resolve_norm_linear(const heddle_norm_linear *desc, heddle_pass pass, norm_linear_plan *plan) {
    TRY(take_norm_linear(desc, &plan->a));
    plan->pass = pass;
    plan->prepared = 0;
    plan->reads_prepared = false;
    heddle_norm_linear *a = &plan->a;
    TRY(check_enums("heddle_norm_linear", (int)a->dtype, (int)a->device, (int)pass));
    if ((int)a->norm < 0 || (int)a->norm > LAST_NORM)
        return fail(HEDDLE_BAD_ENUM, "norm = %d is no heddle_norm (0 to %d)", (int)a->norm, LAST_NORM);
    if (a->features & ~norm_linear_features)
        return fail(HEDDLE_BAD_ENUM, "features = 0x%llx has bits 0x%llx that norm-linear does not know",
                    (unsigned long long)a->features, (unsigned long long)(a->features & ~norm_linear_features));
    if (a->reserved0)
        return fail(HEDDLE_BAD_ENUM, "reserved0 = %d, but must be 0", a->reserved0);
    TRY(check_size("m", a->m, 0, MAX_SIZE));
    TRY(check_size("k", a->k, 1, MAX_SIZE));
    TRY(check_size("n", a->n, 1, MAX_SIZE));
    if (!isfinite(a->eps) || a->eps < 0)
        return fail(HEDDLE_BAD_VALUE, "eps = %g is not a finite number >= 0", a->eps);
    if (a->eps != 0 && a->norm == HEDDLE_NO_NORM)
        return fail(HEDDLE_BAD_COMBINATION, "eps = %g, but HEDDLE_NO_NORM has no variance to add it to", a->eps);
    if (a->norm == HEDDLE_NO_NORM && (a->features & HEDDLE_Z))
        return fail(HEDDLE_BAD_COMBINATION, "HEDDLE_Z is set, but with HEDDLE_NO_NORM z is x");
    if (a->eps == 0)
        a->eps = 1e-5;
    TRY(check_activation(a));
    TRY(check_prepared(a));
    TRY(check_size("multiprocessors", a->multiprocessors, 0, INT32_MAX));
#define STRIDED(id, name, stride, ...)                                                                                 \
    TRY(resolve_row_stride(a, &norm_linear_fields[FIELD_N_##id], &a->stride##_stride));
#include "norm_linear_fields.def"
    const double m = (double)a->m + 64, k = (double)a->k + 64, n = (double)norm_linear_extent(a, 'N') + 64;
    if (m * k > MAX_PRODUCT || m * n > MAX_PRODUCT || n * k > MAX_PRODUCT)
        return fail(HEDDLE_OVERFLOW, "m = %lld, k = %lld, n = %lld: over 2^52 numbers to work on", (long long)a->m,
                    (long long)a->k, (long long)a->n);
    if (a->dtype == HEDDLE_F64 && a->device != HEDDLE_REF)
        return fail(HEDDLE_UNSUPPORTED, "dtype float64 runs on HEDDLE_REF only, not on device %d", (int)a->device);
    return HEDDLE_OK;
}

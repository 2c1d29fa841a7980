/* SPDX-License-Identifier: Apache-2.0
 * Guarded tensors and workspaces. All memory that the library sees is allocated, filled and read back here: another
 * device needs changes in block_new, block_free and block_copy only. What is done to every element is done in loops
 * that choose by type outside. */
#include "tensor.h"

#include "common.h"

#include "../tools/device_memory.h"

#include <stdlib.h>

enum { CHUNK = 256 };

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ------------------------------------------------------------------------------------------------ device memory */

/* Free blocks of a GPU's memory, by the logarithm of their size. */
static _Thread_local struct {
    bool keep;
    int count[64];
    void *block[64][32];
} pool;

void device_blocks_keep(void) {
    pool.keep = true;
}

static int size_class(size_t bytes) {
    int class = 9;
    while (((size_t)1 << class) < bytes)
        class ++;
    return class;
}

static void *device_block(size_t bytes) {
    const int class = size_class(bytes);
    if (!pool.keep)
        return device_memory_new(bytes);
    return pool.count[class] ? pool.block[class][--pool.count[class]] : device_memory_new((size_t)1 << class);
}

static void *block_new(heddle_device device, size_t bytes) {
    void *p = device == HEDDLE_CUDA ? device_block(bytes) : aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!p)
        fail_msg("no memory: %s", device == HEDDLE_CUDA ? device_memory_error() : "the host's is full");
    return p;
}

static void block_free(heddle_device device, void *p, size_t bytes) {
    const int class = size_class(bytes);
    if (device != HEDDLE_CUDA)
        free(p);
    else if (pool.keep && pool.count[class] < (int)COUNT(pool.block[class]))
        pool.block[class][pool.count[class]++] = p;
    else
        device_memory_free(p);
}

static void block_copy(heddle_device device, void *to, const void *from, size_t bytes) {
    if (device != HEDDLE_CUDA)
        memcpy(to, from, bytes);
    else if (!device_memory_copy(to, from, bytes))
        fail_msg("%s", device_memory_error());
}

/* What was asked for and has not been waited for: many small copies for the price of one wait. */
static _Thread_local struct {
    unsigned char *at;
    size_t used;
    int count;
    struct {
        void *to;
        size_t bytes;
    } copy[128];
} staging;

enum { STAGING_BYTES = 4 << 20 };

void device_fetched(void) {
    if (staging.count && !device_memory_wait())
        fail_msg("%s", device_memory_error());
    const unsigned char *from = staging.at;
    for (int x = 0; x < staging.count; x++) {
        memcpy(staging.copy[x].to, from, staging.copy[x].bytes);
        from += (staging.copy[x].bytes + 15) / 16 * 16;
    }
    staging.count = 0;
    staging.used = 0;
}

/* block_copy of a device's memory, complete after device_fetched(). */
static void block_fetch(heddle_device device, void *to, const void *from, size_t bytes) {
    if (device != HEDDLE_CUDA || bytes > STAGING_BYTES) {
        block_copy(device, to, from, bytes);
        return;
    }
    if (staging.used + bytes > STAGING_BYTES || staging.count == COUNT(staging.copy))
        device_fetched();
    if (!staging.at && !(staging.at = device_memory_staging(STAGING_BYTES)))
        fail_msg("no memory: %s", device_memory_error());
    if (!device_memory_fetch(staging.at + staging.used, from, bytes))
        fail_msg("%s", device_memory_error());
    staging.copy[staging.count].to = to;
    staging.copy[staging.count++].bytes = bytes;
    staging.used += (bytes + 15) / 16 * 16;
}

#define WORKSPACE_GUARD 256
#define WORKSPACE_CANARY 0xff /* NaN in every float type */

void *workspace_new(heddle_device device, size_t bytes) {
    const size_t all = bytes + 2 * WORKSPACE_GUARD;
    unsigned char *block = block_new(device, all);
    if (device != HEDDLE_CUDA)
        memset(block, WORKSPACE_CANARY, all);
    else if (!device_memory_fill(block, WORKSPACE_CANARY, all))
        fail_msg("%s", device_memory_error());
    return block + WORKSPACE_GUARD;
}

bool workspace_intact(heddle_device device, const void *workspace, size_t bytes) {
    unsigned char guard[2 * WORKSPACE_GUARD];
    block_fetch(device, guard, (const unsigned char *)workspace - WORKSPACE_GUARD, WORKSPACE_GUARD);
    block_fetch(device, guard + WORKSPACE_GUARD, (const unsigned char *)workspace + bytes, WORKSPACE_GUARD);
    device_fetched();
    for (size_t x = 0; x < sizeof guard; x++)
        if (guard[x] != WORKSPACE_CANARY)
            return false;
    return true;
}

void workspace_free(heddle_device device, void *workspace, size_t bytes) {
    block_free(device, (unsigned char *)workspace - WORKSPACE_GUARD, bytes + 2 * WORKSPACE_GUARD);
}

/* ----------------------------------------------------------------------------------------- one and all elements */

int element_of(const tensor_field *f, heddle_dtype dtype, uint64_t features) {
    if (features & HEDDLE_E4M3 && is_of_keys(f))
        return ELEMENT_E4M3;
    switch (f->element) {
    case OF_DTYPE: return (int)dtype;
    case OF_FLOAT: return dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    case OF_BOOL:
    case OF_BYTES: return ELEMENT_U8;
    case OF_INT32: return ELEMENT_I32;
    default: return ELEMENT_U64;
    }
}

/* The bits of a NaN that no arithmetic makes; of integers a value that leads astray. */
static uint64_t poison_of(int element) {
    switch (element) {
    case HEDDLE_F32: return 0x7fc0dead;
    case HEDDLE_BF16: return 0x7fcd;
    case HEDDLE_F16: return 0x7ead;
    case HEDDLE_F64: return UINT64_C(0x7ff8dead0000beef);
    case ELEMENT_U8: return 0xa5;
    case ELEMENT_E4M3: return 0xff;
    default: return UINT64_C(0x5b5b5b5b5b5b5b5b);
    }
}

static void poison_all(int element, void *image, int64_t n) {
    const uint64_t bits = poison_of(element);
    switch (element_size(element)) {
    case 1: memset(image, (int)bits, (size_t)n); break;
    case 2:
        for (int64_t x = 0; x < n; x++)
            ((uint16_t *)image)[x] = (uint16_t)bits;
        break;
    case 4:
        for (int64_t x = 0; x < n; x++)
            ((uint32_t *)image)[x] = (uint32_t)bits;
        break;
    default:
        for (int64_t x = 0; x < n; x++)
            ((uint64_t *)image)[x] = bits;
    }
}

bool tensor_is_poison(const tensor *t, int64_t at) {
    const uint64_t bits = poison_of(t->element);
    const void *image = t->host;
    at += t->guard;
    switch (element_size(t->element)) {
    case 1: return ((const uint8_t *)image)[at] == (uint8_t)bits;
    case 2: return ((const uint16_t *)image)[at] == (uint16_t)bits;
    case 4: return ((const uint32_t *)image)[at] == (uint32_t)bits;
    default: return ((const uint64_t *)image)[at] == bits;
    }
}

static void *image_at(const tensor *t, int64_t at) {
    return t->host + (size_t)(t->guard + at) * element_size(t->element);
}

/* One loop for each type, in which `expression` has the element p[x]. */
#define EACH(type, expression)                                                                                         \
    do {                                                                                                               \
        const type *p = image_at(t, at);                                                                               \
        for (int64_t i = 0; i < n; i++)                                                                                \
            x[i] = expression;                                                                                         \
    } while (0)

FOR_WIDE_VECTORS void tensor_read(const tensor *t, int64_t at, int64_t n, double *restrict x) {
    switch (t->element) {
    case HEDDLE_F32: EACH(float, (double)p[i]); break;
    case HEDDLE_BF16: EACH(uint16_t, (double)bf16_to_float(p[i])); break;
    case HEDDLE_F16: EACH(uint16_t, (double)f16_to_float(p[i])); break;
    case HEDDLE_F64: memcpy(x, image_at(t, at), (size_t)n * sizeof *x); break;
    case ELEMENT_U8: EACH(uint8_t, p[i]); break;
    case ELEMENT_E4M3: EACH(uint8_t, e4m3_value(p[i])); break;
    case ELEMENT_I32: EACH(int32_t, p[i]); break;
    default: EACH(uint64_t, (double)p[i]);
    }
}

FOR_WIDE_VECTORS void tensor_read_floats(const tensor *t, int64_t at, int64_t n, float *restrict x) {
    switch (t->element) {
    case HEDDLE_F32: memcpy(x, image_at(t, at), (size_t)n * sizeof *x); break;
    case HEDDLE_BF16: EACH(uint16_t, bf16_to_float(p[i])); break;
    case HEDDLE_F16: EACH(uint16_t, f16_to_float(p[i])); break;
    case HEDDLE_F64: EACH(double, (float)p[i]); break;
    case ELEMENT_U8: EACH(uint8_t, p[i]); break;
    case ELEMENT_E4M3: EACH(uint8_t, (float)e4m3_value(p[i])); break;
    default: fail_msg("elements of type %d are no floats", t->element);
    }
}

FOR_WIDE_VECTORS void tensor_write(tensor *t, int64_t at, int64_t n, const double *restrict x) {
    void *image = image_at(t, at);
    switch (t->element) {
    case HEDDLE_F32:
        for (int64_t i = 0; i < n; i++)
            ((float *)image)[i] = (float)x[i];
        break;
    case HEDDLE_F64: memcpy(image, x, (size_t)n * sizeof *x); break;
    default:
        for (int64_t i = 0; i < n; i++)
            tensor_raw_set(t, at + i, x[i]);
    }
}

/* The bits of what round_to_f16 has rounded. */
static uint16_t f16_bits(float x) {
    const uint32_t sign = float_bits(x) >> 16 & 0x8000u, u = float_bits(x) & 0x7fffffffu;
    const uint32_t small = (uint32_t)(int32_t)((u < 0x38800000u ? fabsf(x) : 0) * 0x1p24f);
    uint32_t y = (u >> 13) - (112 << 10);
    y = u < 0x38800000u ? small : y;
    y = u >= 0x7f800000u ? 0x7c00u | (u >> 13 & 0x3ff) : y;
    return (uint16_t)(sign | y);
}

FOR_WIDE_VECTORS void tensor_write_floats(tensor *t, int64_t at, int64_t n, const float *restrict x) {
    uint16_t *half = image_at(t, at);
    switch (t->element) {
    case HEDDLE_F32: memcpy(half, x, (size_t)n * sizeof *x); break;
    case HEDDLE_BF16:
        for (int64_t i = 0; i < n; i++)
            half[i] = float_to_bf16(x[i]);
        break;
    case HEDDLE_F16:
        for (int64_t i = 0; i < n; i++)
            half[i] = f16_bits(round_to_f16(x[i]));
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            tensor_raw_set(t, at + i, (double)x[i]);
    }
}

FOR_WIDE_VECTORS void round_all(int precision, int64_t n, float *x) {
    switch (precision) {
    case PRECISION_TF32:
        for (int64_t i = 0; i < n; i++)
            x[i] = round_to_tf32(x[i]);
        break;
    case HEDDLE_BF16:
        for (int64_t i = 0; i < n; i++)
            x[i] = bf16_to_float(float_to_bf16(x[i]));
        break;
    case HEDDLE_F16:
        for (int64_t i = 0; i < n; i++)
            x[i] = round_to_f16(x[i]);
        break;
    }
}

/* ----------------------------------------------------------------------------------------------------- tensors */

static int64_t tensor_elements(const tensor *t) {
    return t->span + 2 * t->guard;
}

static size_t tensor_bytes(const tensor *t) {
    return (size_t)tensor_elements(t) * element_size(t->element);
}

static void find_reached(tensor *t) {
    t->reached = calloc((size_t)t->span + 1, 1);
    assert_non_null(t->reached);
    for (int64_t i = 0; i < t->dim[0] && t->span; i++)
        for (int64_t j = 0; j < t->dim[1]; j++)
            for (int64_t k = 0; k < t->dim[2]; k++) {
                unsigned char *row = t->reached + tensor_at(t, i, j, k, 0);
                if (t->stride[3] == 1)
                    memset(row, 1, (size_t)t->dim[3]);
                for (int64_t l = 0; l < t->dim[3] && t->stride[3] != 1; l++)
                    row[l * t->stride[3]] = 1;
            }
    t->gaps = memchr(t->reached, 0, (size_t)t->span) != NULL;
}

tensor tensor_new(heddle_device device, int element, const int64_t dim[4], const int64_t stride[4], bool skew) {
    tensor t = {.element = element, .device = device, .guard = skew ? 67 : 64};
    const bool empty = !dim[0] || !dim[1] || !dim[2] || !dim[3];
    memcpy(t.dim, dim, sizeof t.dim);
    memcpy(t.stride, stride, sizeof t.stride);
    t.span = empty ? 0 : 1 + tensor_at(&t, dim[0] - 1, dim[1] - 1, dim[2] - 1, dim[3] - 1);
    find_reached(&t);
    t.host = block_new(HEDDLE_REF, tensor_bytes(&t));
    t.old = block_new(HEDDLE_REF, tensor_bytes(&t));
    t.block = device == HEDDLE_CUDA ? block_new(device, tensor_bytes(&t)) : t.host;
    poison_all(element, t.host, tensor_elements(&t));
    return t;
}

tensor tensor_vector(heddle_device device, int element, int64_t n) {
    return tensor_new(device, element, (int64_t[]){1, 1, 1, n}, (int64_t[]){0, 0, 0, 1}, true);
}

void tensor_free(tensor *t) {
    if (t->host && !t->borrowed) {
        if (t->block != t->host)
            block_free(t->device, t->block, tensor_bytes(t));
        free(t->host);
        free(t->old);
        free(t->reached);
    }
    *t = (tensor){0};
}

int64_t tensor_run(const tensor *t, int64_t *at, int64_t most) {
    if (!t->gaps)
        return smaller(most, t->span - *at);
    const unsigned char *begin = memchr(t->reached + *at, 1, (size_t)(t->span - *at)), *end;
    if (!begin)
        return 0;
    *at = begin - t->reached;
    most = smaller(most, t->span - *at);
    end = memchr(begin, 0, (size_t)most);
    return end ? end - begin : most;
}

void tensor_fill_normal(tensor *t, rng *r, double magnitude) {
    double x[CHUNK];
    for (int64_t at = 0, n; (n = tensor_run(t, &at, CHUNK)) > 0; at += n) {
        rng_normals(r, n, x);
        for (int64_t i = 0; i < n; i++)
            x[i] *= magnitude;
        tensor_write(t, at, n, x);
    }
}

void tensor_convert(tensor *to, const tensor *from) {
    double x[CHUNK];
    assert_int_equal(to->span, from->span);
    const int64_t most = to->element == from->element ? INT64_MAX : CHUNK;
    for (int64_t at = 0, n; (n = tensor_run(from, &at, most)) > 0; at += n) {
        if (to->element == from->element) {
            memcpy(image_at(to, at), image_at(from, at), (size_t)n * element_size(to->element));
        } else {
            tensor_read(from, at, n, x);
            tensor_write(to, at, n, x);
        }
    }
}

void tensor_keep_worse(tensor *x, const tensor *other, const tensor *ref) {
    double r[CHUNK], a[CHUNK], b[CHUNK];
    for (int64_t at = 0, n; x->host && at < x->span; at += n) {
        n = smaller(CHUNK, x->span - at);
        tensor_read(ref, at, n, r);
        tensor_read(x, at, n, a);
        tensor_read(other, at, n, b);
        for (int64_t i = 0; i < n; i++)
            if (fabs(b[i] - r[i]) > fabs(a[i] - r[i]))
                tensor_raw_set(x, at + i, b[i]);
    }
}

void *tensor_pointer(const tensor *t) {
    return t->host ? t->block + (size_t)t->guard * element_size(t->element) : NULL;
}

void tensor_accept(tensor *t) {
    if (t->host)
        memcpy(t->old, t->host, tensor_bytes(t));
}

void tensor_upload(tensor *t) {
    tensor_accept(t);
    if (t->block != t->host)
        block_copy(t->device, t->block, t->host, tensor_bytes(t));
}

void tensor_fetch(tensor *t) {
    if (t->block != t->host)
        block_fetch(t->device, t->host, t->block, tensor_bytes(t));
}

void tensor_download(tensor *t) {
    tensor_fetch(t);
    device_fetched();
}

bool tensor_unchanged(const tensor *t) {
    return !t->host || !memcmp(t->host, t->old, tensor_bytes(t));
}

bool tensor_gaps_unchanged(const tensor *t) {
    if (!t->host)
        return true;
    const size_t size = element_size(t->element);
    int64_t before = -t->guard, at = 0, n;
    do { /* what lies between two runs, or a run and the end */
        n = tensor_run(t, &at, INT64_MAX);
        const int64_t end = n > 0 ? at : t->span + t->guard;
        const size_t begin = (size_t)(before + t->guard) * size;
        if (memcmp(t->host + begin, t->old + begin, (size_t)(end - before) * size))
            return false;
        at += n;
        before = at;
    } while (n > 0);
    return true;
}

bool tensor_equal(const tensor *a, const tensor *b) {
    if (!a->host || !b->host)
        return !a->host && !b->host;
    if (a->span != b->span)
        return false;
    for (int64_t at = 0, n; (n = tensor_run(a, &at, INT64_MAX)) > 0; at += n)
        if (memcmp(image_at(a, at), image_at(b, at), (size_t)n * element_size(a->element)))
            return false;
    return true;
}

/* SPDX-License-Identifier: Apache-2.0
 * Environment, random numbers, guarded tensors, workspaces and the comparison. All memory that the library sees is
 * allocated, filled and read back here: another device needs changes in block_new, block_free and block_copy only. */
#define _POSIX_C_SOURCE 200809L
#include "common.h"

#include "../tools/device_memory.h"
#include "dtype.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* ------------------------------------------------------------------------------------------------- environment */

/* Of all comparisons of one tensor in one dtype: the mean of log(error / plain's error). */
typedef struct tally {
    const char *name;
    heddle_dtype dtype;
    long count;
    double log_ratio;
} tally;

static struct {
    double ratio;
    char where[64];
    long compared;
    tally all[96];
} worst;

/* What one comparison may be off by luck, many may not: kernels lose about what the plain computation does. */
#define TALLY_LIMIT 1.5
#define TALLY_COUNT 50

void test_begin(void) {
    const char *isa = getenv("HEDDLE_CPU");
    if (isa && *isa && strcmp(isa, heddle_cpu_isa()) != 0) {
        printf("skipped: HEDDLE_CPU=%s, but this processor gives %s\n", isa, heddle_cpu_isa());
        exit(77);
    }
    char why[256];
    if (heddle_device_available(test_device(), why, sizeof why) != HEDDLE_OK) {
        printf("skipped: %s\n", why);
        exit(77);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
}

const heddle_dtype test_dtypes[TEST_DTYPES] = {HEDDLE_F32, HEDDLE_BF16, HEDDLE_F16};

static const char *dtype_name(heddle_dtype dtype) {
    static const char *const names[] = {"f32", "bf16", "f16", "f64"};
    return names[dtype & 3];
}

int test_end(int failed) {
    const tally *most = NULL;
    for (tally *t = worst.all; t < worst.all + COUNT(worst.all) && t->name; t++) {
        double ratio = exp(t->log_ratio / (double)t->count);
        if (getenv("HEDDLE_RATIOS"))
            printf("%8s %4s: error / plain's error %.2f on average of %ld\n", t->name, dtype_name(t->dtype), ratio,
                   t->count);
        if (t->count < TALLY_COUNT)
            continue;
        if (ratio > TALLY_LIMIT) {
            printf("%s, %s: %.2f times the plain computation's error on average\n", t->name, dtype_name(t->dtype),
                   ratio);
            failed++;
        }
        if (!most || ratio > exp(most->log_ratio / (double)most->count))
            most = t;
    }
    if (worst.compared)
        printf("%ld tensors compared, worst error / tolerance %.3f (%s)\n", worst.compared, worst.ratio, worst.where);
    if (most)
        printf("error / plain's error, on average: worst %.3f (%s, %s)\n", exp(most->log_ratio / (double)most->count),
               most->name, dtype_name(most->dtype));
    return failed;
}

/* Both errors count as no less than `least`. */
static void count_ratio(const char *name, heddle_dtype dtype, double error, double plain, double least) {
    tally *t = worst.all;
    while (t < worst.all + COUNT(worst.all) && t->name && (t->name != name || t->dtype != dtype))
        t++;
    if (t == worst.all + COUNT(worst.all) || !isfinite(plain) || least <= 0)
        return;
    t->name = name;
    t->dtype = dtype;
    t->count++;
    t->log_ratio += log(fmax(error, least) / fmax(plain, least));
}

heddle_device test_device(void) {
    const char *name = getenv("HEDDLE_TEST_DEVICE");
    if (!name || !*name || !strcmp(name, "cpu"))
        return HEDDLE_CPU;
    if (!strcmp(name, "cuda"))
        return HEDDLE_CUDA;
    printf("HEDDLE_TEST_DEVICE=%s is neither cpu nor cuda\n", name);
    exit(2);
}

static bool is_set(const char *name) {
    const char *value = getenv(name);
    return value && *value && *value != '0';
}

bool test_long(void) {
    return is_set("HEDDLE_LONG");
}

bool test_emulated(void) {
    return is_set("HEDDLE_EMULATED") && !test_long();
}

uint64_t test_seed(uint64_t standard) {
    const char *value = getenv("HEDDLE_SEED");
    return value && *value ? strtoull(value, NULL, 0) : standard;
}

/* ---------------------------------------------------------------------------------------------- random numbers */

/* splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. */
uint64_t rng_next(rng *r) {
    uint64_t z = r->state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

double rng_uniform(rng *r) {
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

double rng_normal(rng *r) {
    double u = 1 - rng_uniform(r), v = rng_uniform(r);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

int64_t rng_between(rng *r, int64_t low, int64_t high) {
    return low + (int64_t)(rng_next(r) % (uint64_t)(high - low + 1));
}

bool rng_chance(rng *r, double p) {
    return rng_uniform(r) < p;
}

/* ------------------------------------------------------------------------------------------------ device memory */

static void *block_new(heddle_device device, size_t bytes) {
    void *p = device == HEDDLE_CUDA ? device_memory_new(bytes) : aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!p)
        fail_msg("no memory: %s", device == HEDDLE_CUDA ? device_memory_error() : "the host's is full");
    return p;
}

static void block_free(heddle_device device, void *p) {
    if (device == HEDDLE_CUDA)
        device_memory_free(p);
    else
        free(p);
}

static void block_copy(heddle_device device, void *to, const void *from, size_t bytes) {
    if (device != HEDDLE_CUDA)
        memcpy(to, from, bytes);
    else if (!device_memory_copy(to, from, bytes))
        fail_msg("%s", device_memory_error());
}

#define WORKSPACE_GUARD 256
#define WORKSPACE_CANARY 0xff /* NaN in every float type */

void *workspace_new(heddle_device device, size_t bytes) {
    size_t all = bytes + 2 * WORKSPACE_GUARD;
    unsigned char *image = malloc(all), *block = block_new(device, all);
    assert_non_null(image);
    memset(image, WORKSPACE_CANARY, all);
    block_copy(device, block, image, all);
    free(image);
    return block + WORKSPACE_GUARD;
}

bool workspace_intact(heddle_device device, const void *workspace, size_t bytes) {
    unsigned char guard[WORKSPACE_GUARD];
    for (int side = 0; side < 2; side++) {
        const unsigned char *from =
            side ? (const unsigned char *)workspace + bytes : (const unsigned char *)workspace - sizeof guard;
        block_copy(device, guard, from, sizeof guard);
        for (size_t x = 0; x < sizeof guard; x++)
            if (guard[x] != WORKSPACE_CANARY)
                return false;
    }
    return true;
}

void workspace_free(heddle_device device, void *workspace) {
    block_free(device, (unsigned char *)workspace - WORKSPACE_GUARD);
}

/* ----------------------------------------------------------------------------------------------------- tensors */

size_t element_size(int element) {
    switch (element) {
    case ELEMENT_U8: return 1;
    case ELEMENT_I32: return 4;
    case ELEMENT_U64: return 8;
    default: return heddle_dtype_size((heddle_dtype)element);
    }
}

int element_of(const tensor_field *f, heddle_dtype dtype) {
    switch (f->element) {
    case OF_DTYPE: return (int)dtype;
    case OF_FLOAT: return dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    case OF_BOOL: return ELEMENT_U8;
    case OF_INT32: return ELEMENT_I32;
    default: return ELEMENT_U64;
    }
}

/* A NaN that no arithmetic makes; for integers a value that leads astray. */
static void poison(int element, void *p) {
    switch (element) {
    case HEDDLE_F32: memcpy(p, &(uint32_t){0x7fc0dead}, 4); break;
    case HEDDLE_BF16: memcpy(p, &(uint16_t){0x7fcd}, 2); break;
    case HEDDLE_F16: memcpy(p, &(uint16_t){0x7ead}, 2); break;
    case HEDDLE_F64: memcpy(p, &(uint64_t){UINT64_C(0x7ff8dead0000beef)}, 8); break;
    case ELEMENT_U8: memset(p, 0xa5, 1); break;
    case ELEMENT_I32: memset(p, 0x5b, 4); break;
    case ELEMENT_U64: memset(p, 0x5b, 8); break;
    }
}

static int64_t tensor_elements(const tensor *t) {
    return t->span + 2 * t->guard;
}

static int64_t tensor_at(const tensor *t, int64_t i, int64_t j, int64_t k, int64_t l) {
    return i * t->stride[0] + j * t->stride[1] + k * t->stride[2] + l * t->stride[3];
}

static bool tensor_empty(const tensor *t) {
    return !t->dim[0] || !t->dim[1] || !t->dim[2] || !t->dim[3];
}

tensor tensor_new(heddle_device device, int element, const int64_t dim[4], const int64_t stride[4], bool skew) {
    tensor t = {.element = element, .device = device, .guard = skew ? 67 : 64};
    memcpy(t.dim, dim, sizeof t.dim);
    memcpy(t.stride, stride, sizeof t.stride);
    t.span = tensor_empty(&t) ? 0 : 1 + tensor_at(&t, dim[0] - 1, dim[1] - 1, dim[2] - 1, dim[3] - 1);
    size_t size = element_size(element), bytes = (size_t)tensor_elements(&t) * size;
    t.host = malloc(bytes);
    t.old = malloc(bytes);
    t.block = block_new(device, bytes);
    assert_non_null(t.host);
    assert_non_null(t.old);
    for (int64_t x = 0; x < tensor_elements(&t); x++)
        poison(element, t.host + (size_t)x * size);
    return t;
}

tensor tensor_vector(heddle_device device, int element, int64_t n) {
    return tensor_new(device, element, (int64_t[]){1, 1, 1, n}, (int64_t[]){0, 0, 0, 1}, true);
}

void tensor_free(tensor *t) {
    if (t->host) {
        free(t->host);
        free(t->old);
        block_free(t->device, t->block);
    }
    *t = (tensor){0};
}

double tensor_raw(const tensor *t, int64_t at) {
    const void *p = t->host + (size_t)(t->guard + at) * element_size(t->element);
    int32_t word;
    uint64_t wide;
    switch (t->element) {
    case ELEMENT_U8: return *(const uint8_t *)p;
    case ELEMENT_I32: memcpy(&word, p, sizeof word); return word;
    case ELEMENT_U64: memcpy(&wide, p, sizeof wide); return (double)wide;
    default: return load_element((heddle_dtype)t->element, p, 0);
    }
}

void tensor_raw_set(tensor *t, int64_t at, double x) {
    void *p = t->host + (size_t)(t->guard + at) * element_size(t->element);
    switch (t->element) {
    case ELEMENT_U8: *(uint8_t *)p = (uint8_t)x; break;
    case ELEMENT_I32: memcpy(p, &(int32_t){(int32_t)x}, 4); break;
    case ELEMENT_U64: memcpy(p, &(uint64_t){(uint64_t)x}, 8); break;
    default: store_element((heddle_dtype)t->element, p, 0, x);
    }
}

double tensor_get(const tensor *t, int64_t i, int64_t j, int64_t k, int64_t l) {
    return tensor_raw(t, tensor_at(t, i, j, k, l));
}

void tensor_set(tensor *t, int64_t i, int64_t j, int64_t k, int64_t l, double x) {
    tensor_raw_set(t, tensor_at(t, i, j, k, l), x);
}

/* Whether the element holds the bits of poison(): of constant size, as it is asked for every element. */
bool tensor_is_poison(const tensor *t, int64_t at) {
    const size_t size = element_size(t->element);
    const unsigned char *p = t->host + (size_t)(t->guard + at) * size;
    unsigned char expected[8];
    poison(t->element, expected);
    switch (size) {
    case 1: return *p == *expected;
    case 2: return !memcmp(p, expected, 2);
    case 4: return !memcmp(p, expected, 4);
    default: return !memcmp(p, expected, 8);
    }
}

unsigned char *tensor_reached(const tensor *t) {
    unsigned char *reached = calloc((size_t)t->span + 1, 1);
    assert_non_null(reached);
    if (tensor_empty(t))
        return reached;
    for (int64_t i = 0; i < t->dim[0]; i++)
        for (int64_t j = 0; j < t->dim[1]; j++)
            for (int64_t k = 0; k < t->dim[2]; k++)
                for (int64_t l = 0; l < t->dim[3]; l++)
                    reached[tensor_at(t, i, j, k, l)] = 1;
    return reached;
}

void tensor_fill_normal(tensor *t, rng *r, double magnitude) {
    unsigned char *reached = tensor_reached(t);
    for (int64_t at = 0; at < t->span; at++)
        if (reached[at])
            tensor_raw_set(t, at, magnitude * rng_normal(r));
    free(reached);
}

void tensor_convert(tensor *to, const tensor *from) {
    unsigned char *reached = tensor_reached(from);
    assert_int_equal(to->span, from->span);
    for (int64_t at = 0; at < to->span; at++)
        if (reached[at])
            tensor_raw_set(to, at, tensor_raw(from, at));
    free(reached);
}

void tensor_keep_worse(tensor *x, const tensor *other, const tensor *ref) {
    for (int64_t at = 0; x->host && at < x->span; at++) {
        double r = tensor_raw(ref, at);
        if (fabs(tensor_raw(other, at) - r) > fabs(tensor_raw(x, at) - r))
            tensor_raw_set(x, at, tensor_raw(other, at));
    }
}

void *tensor_pointer(const tensor *t) {
    return t->host ? t->block + (size_t)t->guard * element_size(t->element) : NULL;
}

void tensor_upload(tensor *t) {
    if (!t->host)
        return;
    size_t bytes = (size_t)tensor_elements(t) * element_size(t->element);
    memcpy(t->old, t->host, bytes);
    block_copy(t->device, t->block, t->host, bytes);
}

void tensor_download(tensor *t) {
    if (t->host)
        block_copy(t->device, t->host, t->block, (size_t)tensor_elements(t) * element_size(t->element));
}

bool tensor_unchanged(const tensor *t) {
    return !t->host || !memcmp(t->host, t->old, (size_t)tensor_elements(t) * element_size(t->element));
}

bool tensor_gaps_unchanged(const tensor *t) {
    if (!t->host)
        return true;
    size_t size = element_size(t->element), guard = (size_t)t->guard * size, span = (size_t)t->span * size;
    if (memcmp(t->host, t->old, guard) || memcmp(t->host + guard + span, t->old + guard + span, guard))
        return false;
    unsigned char *reached = tensor_reached(t);
    bool same = true;
    for (size_t at = 0; at < (size_t)t->span; at++)
        if (!reached[at] && memcmp(t->host + guard + at * size, t->old + guard + at * size, size))
            same = false;
    free(reached);
    return same;
}

bool tensor_equal(const tensor *a, const tensor *b) {
    if (!a->host || !b->host)
        return !a->host && !b->host;
    size_t size = element_size(a->element), shift_a = (size_t)a->guard * size, shift_b = (size_t)b->guard * size;
    unsigned char *reached = tensor_reached(a);
    bool same = a->span == b->span;
    for (size_t at = 0; same && at < (size_t)a->span; at++)
        if (reached[at] && memcmp(a->host + shift_a + at * size, b->host + shift_b + at * size, size))
            same = false;
    free(reached);
    return same;
}

/* -------------------------------------------------------------------------------------------------- comparison */

int precision_of(heddle_dtype dtype, uint64_t features) {
    return dtype == HEDDLE_F32 && (features & HEDDLE_TF32) && test_device() == HEDDLE_CUDA ? PRECISION_TF32
                                                                                           : (int)dtype;
}

/* 10 bits behind the point, to nearest. */
static float round_to_tf32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isfinite(x))
        bits = (bits + 0xfff + (bits >> 13 & 1)) & ~UINT32_C(0x1fff);
    memcpy(&x, &bits, sizeof bits);
    return x;
}

float round_to(int precision, float x) {
    switch (precision) {
    case PRECISION_TF32: return round_to_tf32(x);
    case HEDDLE_BF16: return bf16_to_float(float_to_bf16(x));
    case HEDDLE_F16: return f16_to_float(double_to_f16((double)x));
    default: return x;
    }
}

typedef struct errors {
    double ref, x, plain; /* largest magnitude of ref, largest errors of x and of plain */
    int64_t at;           /* where x is worst; or where it is wrong whatever the tolerance */
    const char *wrong;
} errors;

static errors measure(const tensor *x, const tensor *ref, const tensor *plain, const unsigned char *reached) {
    errors e = {0};
    for (int64_t at = 0; at < x->span; at++) {
        if (!reached[at])
            continue;
        double r = tensor_raw(ref, at), y = tensor_raw(x, at), p = tensor_raw(plain, at);
        if (tensor_is_poison(ref, at) != tensor_is_poison(x, at))
            return (errors){.at = at, .wrong = tensor_is_poison(x, at) ? "not written" : "written, but not by ref"};
        if (tensor_is_poison(ref, at) != tensor_is_poison(plain, at))
            return (errors){.at = at, .wrong = "written by both or neither of ref and plain"};
        if (tensor_is_poison(ref, at))
            continue;
        if (isnan(r) || isnan(y))
            return (errors){.at = at, .wrong = isnan(r) ? "ref is NaN" : "NaN"};
        if (isinf(r) || isinf(y)) {
            if (r != y)
                return (errors){.at = at, .wrong = "infinite where it should not be, or finite where it should"};
            continue;
        }
        e.ref = fmax(e.ref, fabs(r));
        if (fabs(y - r) > e.x) {
            e.x = fabs(y - r);
            e.at = at;
        }
        e.plain = fmax(e.plain, isfinite(p) ? fabs(p - r) : INFINITY);
    }
    return e;
}

/* Half a unit in the last place of 1: the relative error of one rounding. */
static double unit_roundoff(int element) {
    return element == HEDDLE_BF16                               ? 0x1p-8
           : element == HEDDLE_F16 || element == PRECISION_TF32 ? 0x1p-11
           : element == HEDDLE_F64                              ? 0x1p-53
                                                                : 0x1p-24;
}

bool compare_tensor(const char *name, int precision, const tensor *x, const tensor *ref, const tensor *plain,
                    double natural, double noise, double condition) {
    if (!x->host)
        return true;
    unsigned char *reached = tensor_reached(x);
    errors e = measure(x, ref, plain, reached);
    free(reached);
    if (!e.wrong && !tensor_gaps_unchanged(x))
        e.wrong = "memory around it or between its rows was written";
    if (e.wrong) {
        printf("  %s: %s (element %" PRId64 " of the span: %g, ref %g)\n", name, e.wrong, e.at,
               x->span ? tensor_raw(x, e.at) : 0, x->span ? tensor_raw(ref, e.at) : 0);
        return false;
    }
    /* A few roundings, of a result and of the float32 lse that P is made from, are never held against x. */
    double u = unit_roundoff(x->element), scale = fmax(e.ref, natural);
    double floor = fmax((x->element == HEDDLE_F32 ? 16 : 2) * u * e.ref, 4 * 0x1p-24 * scale);
    floor = fmax(floor, noise) + (x->element == HEDDLE_F16 ? 0x1p-24 : 0);
    /* In float32, sums of 16-bit numbers are often exact by luck of the format. */
    if (precision != PRECISION_TF32)
        count_ratio(name, (heddle_dtype)precision, e.x, e.plain, (x->element != precision ? 4 : 0.5) * u * e.ref);
    /* What the plain computation loses bounds what may be lost; where it disagrees altogether, ref itself is in
     * doubt. */
    double sane = 64 * unit_roundoff(precision) * scale * condition + floor;
    if (isfinite(condition) && !(e.plain <= sane)) {
        printf("  %s: ref and the plain computation disagree by %g of %g\n", name, e.plain, e.ref);
        return false;
    }
    double tolerance = isfinite(e.plain) ? fmax(2 * e.plain, floor) : floor;
    const bool exact = precision == HEDDLE_F32 || precision == PRECISION_TF32;
    if (x->element == HEDDLE_F32 && !exact && noise == 0) /* lse, mean, rstd: float32, whatever the dtype */
        tolerance = fmin(tolerance, 32 * 0x1p-24 * scale);
    /* No bound may be so wide that zeros pass; who is right to a quarter is no such case. */
    bool vacuous = e.ref > fmax(0x1p-10 * natural, 4 * noise) && tolerance >= 0.5 * e.ref && isfinite(condition) &&
                   e.x > 0.25 * e.ref;
    if (e.x > 0 && tolerance > 0 && e.x / tolerance > worst.ratio) {
        worst.ratio = e.x / tolerance;
        snprintf(worst.where, sizeof worst.where, "%s, %s", name,
                 precision == PRECISION_TF32 ? "tf32" : dtype_name((heddle_dtype)precision));
    }
    worst.compared++;
    if (e.x > tolerance || vacuous)
        printf("  %s: error %.3g of %.3g (element %" PRId64 ": %.9g, ref %.9g), tolerance %.3g, plain %.3g%s\n", name,
               e.x, e.ref, e.at, tensor_raw(x, e.at), tensor_raw(ref, e.at), tolerance, e.plain,
               vacuous ? ": all zeros would pass" : "");
    return e.x <= tolerance && !vacuous;
}

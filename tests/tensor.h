/* SPDX-License-Identifier: Apache-2.0
 * Random numbers and guarded tensors: what the tests read, write and draw element by element is inline. */
#ifndef HEDDLE_TESTS_TENSOR_H
#define HEDDLE_TESTS_TENSOR_H

#include "dtype.h"
#include "fields.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where the compiler can, a function is compiled for AVX2, too, and chosen at run time; without sanitizers, which are not
 * there yet when that is done. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&                           \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOR_WIDE_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define FOR_WIDE_VECTORS
#endif

/* ---------------------------------------------------------------------------------------------- random numbers */

typedef struct rng {
    uint64_t state;
} rng;

/* splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. */
static inline uint64_t rng_next(rng *r) {
    uint64_t z = r->state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

/* [0, 1) */
static inline double rng_uniform(rng *r) {
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

/* low .. high */
static inline int64_t rng_between(rng *r, int64_t low, int64_t high) {
    return low + (int64_t)(rng_next(r) % (uint64_t)(high - low + 1));
}

static inline bool rng_chance(rng *r, double p) {
    return rng_uniform(r) < p;
}

/* Mean 0, deviation 1. */
void rng_normals(rng *r, int64_t n, double *x);
double rng_normal(rng *r);

/* ---------------------------------------------------------------------------------------------------- rounding */

/* What the plain computation rounds to: the dtype, or TF32 (HEDDLE_F32 with HEDDLE_TF32, on a GPU). */
enum { PRECISION_TF32 = 32 };

/* Through float16 and back, without a branch. */
static inline float round_to_f16(float x) {
    const uint32_t sign = float_bits(x) & 0x80000000u, u = float_bits(x) & 0x7fffffffu;
    const uint32_t small = float_bits((float_from_bits(u) + 0.5f) - 0.5f); /* to multiples of 2^-24 */
    uint32_t y = (u + 0xfff + (u >> 13 & 1)) & 0xffffe000u;
    y = u < 0x38800000u ? small : y;       /* 2^-14 */
    y = u >= 0x477ff000u ? 0x7f800000 : y; /* 65520 */
    y = u > 0x7f800000u ? 0x7fc00000 : y;
    return float_from_bits(sign | y);
}

/* 10 bits behind the point, to nearest. */
static inline float round_to_tf32(float x) {
    const uint32_t u = float_bits(x);
    return float_from_bits((u & 0x7f800000u) == 0x7f800000u ? u : (u + 0xfff + (u >> 13 & 1)) & 0xffffe000u);
}

/* Rounds as a store in that precision and a load do. */
static inline float round_to(int precision, float x) {
    switch (precision) {
    case PRECISION_TF32: return round_to_tf32(x);
    case HEDDLE_BF16: return bf16_to_float(float_to_bf16(x));
    case HEDDLE_F16: return round_to_f16(x);
    default: return x;
    }
}

void round_all(int precision, int64_t n, float *x);

/* ----------------------------------------------------------------------------------------------------- tensors */

/* Element types beyond heddle_dtype. */
enum { ELEMENT_U8 = 16, ELEMENT_I32, ELEMENT_U64, ELEMENT_E4M3 };

/* Up to four dimensions with any strides, inside a guarded block whose gaps and guards hold NaN (or garbage).
 * `host` is the image that the accessors use; `block` is where the library sees it, which without a GPU is the same.
 * `old` is the image at upload. A tensor of zeros is one that is not there. */
typedef struct tensor {
    int element;
    heddle_device device;
    int64_t dim[4], stride[4];
    int64_t guard, span;    /* elements before and after, and between */
    unsigned char *reached; /* a byte per element of the span: 1 where an index reaches it */
    bool gaps;              /* some are not reached */
    bool borrowed;          /* all memory is another tensor's */
    unsigned char *host, *old, *block;
} tensor;

static inline size_t element_size(int element) {
    switch (element) {
    case ELEMENT_U8:
    case ELEMENT_E4M3: return 1;
    case HEDDLE_BF16:
    case HEDDLE_F16: return 2;
    case HEDDLE_F64:
    case ELEMENT_U64: return 8;
    default: return 4;
    }
}

/* Of a field of a problem in `dtype`. */
int element_of(const tensor_field *f, heddle_dtype dtype, uint64_t features);

/* By the words of the specification, not by dtype.h. */
static inline double e4m3_value(uint8_t x) {
    static const double last_place[16] = {0x1p-9, 0x1p-9, 0x1p-8, 0x1p-7, 0x1p-6, 0x1p-5, 0x1p-4, 0x1p-3,
                                          0x1p-2, 0x1p-1, 0x1p0,  0x1p1,  0x1p2,  0x1p3,  0x1p4,  0x1p5};
    const int exponent = x >> 3 & 15, fraction = x & 7;
    const double size = (exponent ? 8 + fraction : fraction) * last_place[exponent];
    return (x & 0x7f) == 0x7f ? (double)NAN : x & 0x80 ? -size : size;
}

/* The nearest, of two the even one. */
static inline uint8_t e4m3_nearest(double x) {
    int low = 0, high = 0x7e;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        *(e4m3_value((uint8_t)middle) <= fabs(x) ? &low : &high) = middle;
    }
    const double below = fabs(x) - e4m3_value((uint8_t)low), above = e4m3_value((uint8_t)high) - fabs(x);
    const int nearest = below < above || (below == above && low % 2 == 0) ? low : high;
    return (uint8_t)((isnan(x) ? 0x7f : nearest) | (signbit(x) ? 0x80 : 0));
}

static inline int64_t tensor_at(const tensor *t, int64_t i, int64_t j, int64_t k, int64_t l) {
    return i * t->stride[0] + j * t->stride[1] + k * t->stride[2] + l * t->stride[3];
}

/* Element number `at` of the span, whatever its place in the dimensions. */
static inline double tensor_raw(const tensor *t, int64_t at) {
    const void *p = t->host + (size_t)(t->guard + at) * element_size(t->element);
    int32_t word;
    uint64_t wide;
    switch (t->element) {
    case ELEMENT_U8: return *(const uint8_t *)p;
    case ELEMENT_I32: memcpy(&word, p, sizeof word); return word;
    case ELEMENT_U64: memcpy(&wide, p, sizeof wide); return (double)wide;
    case ELEMENT_E4M3: return e4m3_value(*(const uint8_t *)p);
    default: return load_element((heddle_dtype)t->element, p, 0);
    }
}

static inline void tensor_raw_set(tensor *t, int64_t at, double x) {
    void *p = t->host + (size_t)(t->guard + at) * element_size(t->element);
    switch (t->element) {
    case ELEMENT_U8: *(uint8_t *)p = (uint8_t)x; break;
    case ELEMENT_I32: memcpy(p, &(int32_t){(int32_t)x}, 4); break;
    case ELEMENT_U64: memcpy(p, &(uint64_t){(uint64_t)x}, 8); break;
    case ELEMENT_E4M3: *(uint8_t *)p = e4m3_nearest(x); break;
    default: store_element((heddle_dtype)t->element, p, 0, x);
    }
}

static inline double tensor_get(const tensor *t, int64_t i, int64_t j, int64_t k, int64_t l) {
    return tensor_raw(t, tensor_at(t, i, j, k, l));
}

static inline void tensor_set(tensor *t, int64_t i, int64_t j, int64_t k, int64_t l, double x) {
    tensor_raw_set(t, tensor_at(t, i, j, k, l), x);
}

/* A poisoned tensor. Strides may be 0 (repeated). `skew` moves the data off the alignment of vectors. */
tensor tensor_new(heddle_device device, int element, const int64_t dim[4], const int64_t stride[4], bool skew);
tensor tensor_vector(heddle_device device, int element, int64_t n);
void tensor_free(tensor *t);
/* n elements of the span from `at` on; as floats no integers but bytes. */
void tensor_read(const tensor *t, int64_t at, int64_t n, double *x);
void tensor_read_floats(const tensor *t, int64_t at, int64_t n, float *x);
void tensor_write(tensor *t, int64_t at, int64_t n, const double *x);
void tensor_write_floats(tensor *t, int64_t at, int64_t n, const float *x);
/* The next run of at most `most` elements that an index reaches: moves `at` there and returns its length; 0 behind the
 * last. */
int64_t tensor_run(const tensor *t, int64_t *at, int64_t most);
bool tensor_is_poison(const tensor *t, int64_t at);
void tensor_fill_normal(tensor *t, rng *r, double magnitude);
/* Values of a tensor of the same shape and strides, whatever its element type. */
void tensor_convert(tensor *to, const tensor *from);
/* Of x and other, element by element, what is farther from ref. */
void tensor_keep_worse(tensor *x, const tensor *other, const tensor *ref);
void *tensor_pointer(const tensor *t); /* what the library is given; NULL for no tensor */
void tensor_upload(tensor *t);
void tensor_download(tensor *t);
/* tensor_download for many: complete after device_fetched() or workspace_intact(). */
void tensor_fetch(tensor *t);
void device_fetched(void);
/* What was downloaded is as it should be from now on. */
void tensor_accept(tensor *t);
/* After a run and tensor_download: an input is as it was; an output's guards and gaps are. */
bool tensor_unchanged(const tensor *t);
bool tensor_gaps_unchanged(const tensor *t);
/* Same reached bytes. */
bool tensor_equal(const tensor *a, const tensor *b);

/* A workspace full of NaN between guards, and whether the guards have survived. */
void *workspace_new(heddle_device device, size_t bytes);
bool workspace_intact(heddle_device device, const void *workspace, size_t bytes);
void workspace_free(heddle_device device, void *workspace, size_t bytes);

/* Memory of a GPU that this thread gives back is kept for its next tensor of that size: quicker, but memcheck then knows
 * less of a tensor's end. */
void device_blocks_keep(void);

#endif

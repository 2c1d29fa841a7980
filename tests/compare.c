/* SPDX-License-Identifier: Apache-2.0
 * The comparison with the reference, and what all comparisons of a program come to. */
#include "common.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { CHUNK = 256 };

/* Of two numbers; a NaN counts for nothing. */
static double larger(double a, double b) {
    return b > a ? b : a;
}

/* Of all comparisons of one tensor in one dtype: the mean of log(error / plain's error). */
typedef struct tally {
    const char *name;
    heddle_dtype dtype;
    long count;
    double log_ratio;
} tally;

static struct {
    double ratio;
    char where[WORST_NAME];
    long compared, silent;
    tally all[96];
} worst;
static pthread_mutex_t worst_lock = PTHREAD_MUTEX_INITIALIZER;

/* What one comparison may be off by luck, many may not: kernels lose about what the plain computation does. */
#define TALLY_LIMIT 1.5
#define TALLY_COUNT 50

static const char *dtype_name(heddle_dtype dtype) {
    static const char *const names[] = {"f32", "bf16", "f16", "f64"};
    return names[dtype & 3];
}

/* Both errors count as no less than `least`. */
static void count_ratio(const char *name, heddle_dtype dtype, double error, double plain, double least) {
    tally *t = worst.all;
    pthread_mutex_lock(&worst_lock);
    while (t < worst.all + COUNT(worst.all) && t->name && (t->name != name || t->dtype != dtype))
        t++;
    if (t < worst.all + COUNT(worst.all) && isfinite(plain) && least > 0) {
        t->name = name;
        t->dtype = dtype;
        t->count++;
        t->log_ratio += log(fmax(error, least) / fmax(plain, least));
    }
    pthread_mutex_unlock(&worst_lock);
}

/* `silent`: zeros would pass, and rightly. */
static void count_worst(const char *name, int precision, double ratio, bool silent) {
    pthread_mutex_lock(&worst_lock);
    worst.compared++;
    worst.silent += silent;
    if (ratio > worst.ratio) {
        worst.ratio = ratio;
        snprintf(worst.where, sizeof worst.where, "%s, %s", name,
                 precision == PRECISION_TF32 ? "tf32" : dtype_name((heddle_dtype)precision));
    }
    pthread_mutex_unlock(&worst_lock);
}

int precision_of(heddle_dtype dtype, uint64_t features) {
    return dtype == HEDDLE_F32 && (features & HEDDLE_TF32) && test_device() == HEDDLE_CUDA ? PRECISION_TF32
                                                                                           : (int)dtype;
}

typedef struct errors {
    double ref, x, plain; /* largest magnitude of ref, largest errors of x and of plain */
    int64_t at;           /* where x is worst; or where it is wrong whatever the tolerance */
    const char *wrong;
} errors;

/* One element by itself, of a run where something is no plain number; false where x is wrong. */
static bool measure_odd(const tensor *x, const tensor *ref, const tensor *plain, int64_t at, errors *e) {
    const double r = tensor_raw(ref, at), y = tensor_raw(x, at), p = tensor_raw(plain, at);
    const bool unwritten = tensor_is_poison(ref, at);
    if (unwritten != tensor_is_poison(x, at))
        e->wrong = unwritten ? "written, but not by ref" : "not written";
    else if (unwritten != tensor_is_poison(plain, at))
        e->wrong = "written by both or neither of ref and plain";
    else if (!unwritten && (isnan(r) || isnan(y)))
        e->wrong = isnan(r) ? "ref is NaN" : "NaN";
    else if (!unwritten && (isinf(r) || isinf(y)) && r != y)
        e->wrong = "infinite where it should not be, or finite where it should";
    if (e->wrong || unwritten || isinf(r)) {
        e->at = e->wrong ? at : e->at;
        return !e->wrong;
    }
    e->ref = larger(e->ref, fabs(r));
    if (fabs(y - r) > e->x) {
        e->x = fabs(y - r);
        e->at = at;
    }
    e->plain = larger(e->plain, isfinite(p) ? fabs(p - r) : INFINITY);
    return true;
}

static errors measure(const tensor *x, const tensor *ref, const tensor *plain) {
    double r[CHUNK], y[CHUNK], p[CHUNK];
    errors e = {0};
    for (int64_t at = 0, n; (n = tensor_run(x, &at, CHUNK)) > 0; at += n) {
        double odd = 0; /* NaN as soon as one of them is not finite; so poison is */
        tensor_read(ref, at, n, r);
        tensor_read(x, at, n, y);
        tensor_read(plain, at, n, p);
        for (int64_t i = 0; i < n; i++)
            odd += 0 * r[i] + 0 * y[i] + 0 * p[i];
        for (int64_t i = 0; i < n && odd != 0; i++)
            if (!measure_odd(x, ref, plain, at + i, &e))
                return e;
        for (int64_t i = 0; i < n && odd == 0; i++) {
            const double error = fabs(y[i] - r[i]);
            e.ref = larger(e.ref, fabs(r[i]));
            e.plain = larger(e.plain, fabs(p[i] - r[i]));
            if (error > e.x) {
                e.x = error;
                e.at = at + i;
            }
        }
    }
    return e;
}

double tensor_error(const tensor *x, const tensor *ref, double *magnitude) {
    double r[CHUNK], y[CHUNK], most = 0;
    *magnitude = 0;
    for (int64_t at = 0, n; at < x->span; at += n) {
        n = x->span - at < CHUNK ? x->span - at : CHUNK;
        tensor_read(ref, at, n, r);
        tensor_read(x, at, n, y);
        for (int64_t i = 0; i < n; i++) {
            const double error = !isfinite(r[i]) ? 0
                                 : isnan(y[i])   ? INFINITY
                                                 : fabs(y[i] - r[i]),
                         size = isfinite(r[i]) ? fabs(r[i]) : 0;
            most = larger(most, error);
            *magnitude = larger(*magnitude, size);
        }
    }
    return most;
}

double unit_roundoff(int element) {
    return element == HEDDLE_BF16                               ? 0x1p-8
           : element == HEDDLE_F16 || element == PRECISION_TF32 ? 0x1p-11
           : element == HEDDLE_F64                              ? 0x1p-53
                                                                : 0x1p-24;
}

/* The smallest number of a type that is not 0; bfloat16 and float64 are computed in float32. */
static double least(int element) {
    return element == HEDDLE_F16 ? 0x1p-24 : 0x1p-149;
}

bool compare_tensor(const char *name, int precision, const tensor *x, const tensor *ref, const tensor *plain,
                    double natural, double noise, double condition) {
    if (!x->host)
        return true;
    errors e = measure(x, ref, plain);
    if (!e.wrong && !tensor_gaps_unchanged(x))
        e.wrong = "memory around it or between its rows was written";
    if (e.wrong) {
        printf("  %s: %s (element %" PRId64 " of the span: %g, ref %g)\n", name, e.wrong, e.at,
               x->span ? tensor_raw(x, e.at) : 0, x->span ? tensor_raw(ref, e.at) : 0);
        return false;
    }
    /* A few roundings, of a result and of the float32 lse that P is made from, are never held against x. */
    const int few = x->element != HEDDLE_F32 ? 2 : test_device() == HEDDLE_CUDA ? 16 : 4;
    double u = unit_roundoff(x->element), scale = fmax(e.ref, natural);
    double floor = fmax(few * u * e.ref, 4 * 0x1p-24 * scale);
    floor = fmax(floor, noise) + least(x->element);
    /* In float32, sums of 16-bit numbers are often exact by luck of the format. */
    if (precision != PRECISION_TF32)
        count_ratio(name, (heddle_dtype)precision, e.x, e.plain, (x->element != precision ? 4 : 0.5) * u * e.ref);
    /* What the plain computation loses bounds what may be lost; where it disagrees altogether, ref itself is in
     * doubt. What float16 rounds below 2^-14 is off as what is 2^-14. */
    const double terms = precision == HEDDLE_F16 ? fmax(scale, 0x1p-14) : scale;
    double sane = 64 * unit_roundoff(precision) * terms * condition + floor;
    if (isfinite(condition) && !(e.plain <= sane)) {
        printf("  %s: ref and the plain computation disagree by %g of %g\n", name, e.plain, e.ref);
        return false;
    }
    double tolerance = isfinite(e.plain) ? fmax(2 * e.plain, floor) : floor;
    const bool exact = precision == HEDDLE_F32 || precision == PRECISION_TF32;
    if (x->element == HEDDLE_F32 && !exact && noise == 0) /* lse, mean, rstd: float32, whatever the dtype */
        tolerance = fmin(tolerance, 32 * 0x1p-24 * scale);
    /* No bound may be so wide that zeros pass; who is right to a quarter is no such case. Nor is what terms that are rounded to the type,
     * or the type itself, cannot tell from 0: such comparisons say nothing, and are counted. */
    const double shows = fmax(fmax(0x1p-10, 4 * unit_roundoff(precision)) * natural, 4 * least(x->element));
    const bool blind = e.ref > 0 && tolerance >= 0.5 * e.ref && isfinite(condition) && e.x > 0.25 * e.ref;
    const bool vacuous = blind && e.ref > fmax(shows, 4 * noise);
    count_worst(name, precision, e.x > 0 && tolerance > 0 ? e.x / tolerance : 0, blind && !vacuous);
    if (e.x > tolerance || vacuous)
        printf("  %s: error %.3g of %.3g (element %" PRId64 ": %.9g, ref %.9g), tolerance %.3g, plain %.3g%s\n", name,
               e.x, e.ref, e.at, tensor_raw(x, e.at), tensor_raw(ref, e.at), tolerance, e.plain,
               vacuous ? ": all zeros would pass" : "");
    return e.x <= tolerance && !vacuous;
}

comparisons all_comparisons(void) {
    comparisons r;
    pthread_mutex_lock(&worst_lock);
    r = (comparisons){.count = worst.compared, .silent = worst.silent, .worst = worst.ratio};
    memcpy(r.where, worst.where, sizeof worst.where);
    pthread_mutex_unlock(&worst_lock);
    return r;
}

/* Errors of half a rounding to the element's type are the least that either may count as. */
static double least_error(int element) {
    return element == HEDDLE_BF16 ? 0x1p-10 : element == HEDDLE_F16 ? 0x1p-13 : 0x1p-24;
}

void bin_count(error_bin *bin, const tensor *x, const tensor *ref, const tensor *plain, double natural) {
    double magnitude;
    const double ours = tensor_error(x, ref, &magnitude), theirs = tensor_error(plain, ref, &magnitude);
    const double scale = magnitude < 0x1p-16 * natural ? 0x1p-24 * natural : least_error(x->element) * magnitude;
    if (!isfinite(theirs)) /* the plain computation overflows: there is nothing to compare with */
        return;
    bin->log_ratio += scale > 0 ? log(fmax(ours, scale) / fmax(theirs, scale)) : 0;
    bin->count++;
}

double bin_ratio(const error_bin *bin) {
    return bin->count ? exp(bin->log_ratio / (double)bin->count) : 0;
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

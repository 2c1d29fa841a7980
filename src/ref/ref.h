/* SPDX-License-Identifier: Apache-2.0
 * What the files of the reference share: rows in float64, whatever the element type. */
#ifndef HEDDLE_REF_H
#define HEDDLE_REF_H

#include "../dtype.h"
#include "../plan.h"

heddle_status heddle__ref_plan_attention(attention_plan *plan);
heddle_status heddle__ref_run_attention(const attention_plan *plan, const heddle_attention_data *data, void *workspace,
                                        void *stream);
heddle_status heddle__ref_plan_norm_linear(norm_linear_plan *plan);
heddle_status heddle__ref_run_norm_linear(const norm_linear_plan *plan, const heddle_norm_linear_data *data,
                                          void *workspace, void *stream);

heddle_status heddle__ref_merge(const heddle_merge *m, void *o, void *lse, const void *other_o, const void *other_lse,
                                void *stream);

heddle_status heddle__ref_append(const heddle_append *a, const heddle_append_data *t, void *stream);

/* "fwd_f32" and so on: the middle of a kernel's name. */
const char *heddle__ref_variant(heddle_dtype dtype, heddle_pass pass);

/* What heddle.h calls "float": the type of lse, slopes, sinks, mean and rstd. */
static inline heddle_dtype float_type(heddle_dtype dtype) {
    return dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
}

/* The log-sum-exp of two parts' keys, and how much of their results is the first one's and the second's. */
static inline double merged_lse(double x, double y, double share[2]) {
    const double top = x > y || isnan(x) ? x : y;
    if (top == -INFINITY) {
        share[0] = share[1] = 0;
        return top;
    }
    const double all = top + log(exp(x - top) + exp(y - top));
    share[0] = exp(x - all);
    share[1] = exp(y - all);
    return all;
}

/* The next n doubles of a workspace; with base NULL they are only counted. */
static inline double *take(double *base, int64_t *used, int64_t n) {
    double *p = base ? base + *used : NULL;
    *used += n;
    return p;
}

static inline void load_row(heddle_dtype dtype, const void *p, int64_t at, int64_t n, double *row) {
    for (int64_t e = 0; e < n; e++)
        row[e] = load_element(dtype, p, at + e);
}

static inline void store_row(heddle_dtype dtype, void *p, int64_t at, int64_t n, const double *row) {
    for (int64_t e = 0; e < n; e++)
        store_element(dtype, p, at + e, row[e]);
}

static inline void fill(double *x, int64_t n, double value) {
    for (int64_t e = 0; e < n; e++)
        x[e] = value;
}

/* sum_e x[e] y[e], in eight partial sums so that compilers may use vectors. */
static inline double dot(const double *x, const double *y, int64_t n) {
    double sum[8] = {0};
    int64_t e = 0;
    for (; e + 8 <= n; e += 8)
        for (int lane = 0; lane < 8; lane++)
            sum[lane] += x[e + lane] * y[e + lane];
    for (; e < n; e++)
        sum[0] += x[e] * y[e];
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* y += factor x */
static inline void add_scaled(double *restrict y, double factor, const double *restrict x, int64_t n) {
    for (int64_t e = 0; e < n; e++)
        y[e] += factor * x[e];
}

#endif

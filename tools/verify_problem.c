/* SPDX-License-Identifier: Apache-2.0 */
#include "verify.h"

#include "../src/dtype.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

problem attention_problem(void) {
    return (problem){.j = {.a = {.size = sizeof(heddle_attention)}}};
}

problem norm_linear_problem(void) {
    return (problem){.j = {.linear = true, .l = {.size = sizeof(heddle_norm_linear)}}};
}

double *problem_input(problem *p, arena *m, int f) {
    return p->x[f] = arena_array(m, field_count(&p->j, f), sizeof(double));
}

/* lse and mean pass no gradient of their own to inputs that have none, so every float input is filled. */
void problem_fill(problem *p, arena *m, random_state *r) {
    const tensor_field *t = job_fields(&p->j);
    uint64_t features = job_features(&p->j);
    for (int f = 0; t[f].name; f++) {
        const bool ids = !p->j.linear && (f == Q_SEGMENTS || f == K_SEGMENTS);
        bool number = t[f].element == OF_DTYPE || t[f].element == OF_FLOAT || t[f].element == OF_BOOL || ids;
        if (is_output(&t[f]) || !number || p->x[f] || !job_has(&p->j, f))
            continue;
        if ((features & (HEDDLE_PAGES | HEDDLE_E4M3)) && t[f].role == ROLE_GRADIENT_IN) /* forward is all there is */
            continue;
        double *x = problem_input(p, m, f);
        int64_t n = field_count(&p->j, f);
        for (int64_t i = 0; i < n; i++)
            x[i] = ids ? (double)(i / 20) : t[f].element == OF_BOOL ? random_uniform(r) < 0.7 : random_normal(r);
        for (int64_t i = 0; i < n && !p->j.linear && f == ALIBI; i++)
            x[i] = fabs(x[i]) / 8;
    }
}

void problem_round(problem *p, heddle_dtype dtype) {
    job_set_dtype(&p->j, dtype);
    for (int f = 0; job_fields(&p->j)[f].name; f++)
        for (int64_t i = 0, n = p->x[f] ? field_count(&p->j, f) : 0; i < n; i++) {
            double element;
            store_value(&p->j, f, &element, 0, p->x[f][i]);
            p->x[f][i] = load_value(&p->j, f, &element, 0);
        }
}

static bool has_gradient(const problem *p) {
    for (int f = 0; job_fields(&p->j)[f].name; f++)
        if (p->x[f] && job_fields(&p->j)[f].role == ROLE_GRADIENT_IN)
            return true;
    return false;
}

/* Whether output f is one of this problem. */
static bool produces(const problem *p, int f, bool backward) {
    const tensor_field *t = &job_fields(&p->j)[f];
    return (t->role == ROLE_OUTPUT || (t->role == ROLE_GRADIENT_OUT && backward)) && job_has(&p->j, f);
}

bool problem_run(const problem *p, arena *m, heddle_device device, heddle_dtype dtype, outcome *out) {
    job j = p->j;
    bool backward = has_gradient(p);
    job_set_dtype(&j, dtype);
    job_set_device(&j, device);
    *out = (outcome){{0}};
    for (int f = 0; job_fields(&j)[f].name; f++) {
        int64_t n = field_count(&j, f);
        if (!p->x[f] && !produces(p, f, backward))
            continue;
        j.data[f] = arena_array(m, n, field_bytes(&j, f));
        for (int64_t i = 0; p->x[f] && i < n; i++)
            store_value(&j, f, j.data[f], i, p->x[f][i]);
    }
    const bool parts = p->first_part > 0 && dtype != HEDDLE_F64; /* the truth is of all at once */
    if (parts && !run_parts(&j, m, p->first_part, backward))
        return false;
    if (!parts &&
        (!job_prepare(&j, m, backward) || !job_run(&j, HEDDLE_FORWARD) || (backward && !job_run(&j, HEDDLE_BACKWARD))))
        return false;
    for (int f = 0; job_fields(&j)[f].name; f++) {
        int64_t n = field_count(&j, f);
        if (!produces(p, f, backward))
            continue;
        out->x[f] = arena_array(m, n, sizeof(double));
        for (int64_t i = 0; i < n; i++)
            out->x[f][i] = load_value(&j, f, j.data[f], i);
    }
    return true;
}

/* Whether a result is farther from the truth than twice the plain computation. */
static bool asks_for_more(const problem *p, const trial *t) {
    for (int f = 0; job_fields(&p->j)[f].name; f++) {
        double most = 0;
        for (int x = 0; x < t->orders && t->ours.x[f]; x++)
            most = fmax(most, compare(t->plain[x].x[f], t->truth.x[f], field_count(&p->j, f)).largest);
        if (t->ours.x[f] && compare(t->ours.x[f], t->truth.x[f], field_count(&p->j, f)).largest > 2 * most)
            return true;
    }
    return false;
}

bool trial_run(const problem *p, arena *m, heddle_device device, heddle_dtype dtype, trial *t) {
    if (!problem_run(p, m, device, dtype, &t->ours) || !problem_run(p, m, HEDDLE_REF, HEDDLE_F64, &t->truth))
        return false;
    const int orders = p->j.linear ? 1 : PLAIN_ORDERS;
    for (t->orders = 0; t->orders < orders && (t->orders < 2 || asks_for_more(p, t)); t->orders++)
        plain_run(p, m, dtype, (plain_order)t->orders, &t->plain[t->orders], &t->terms);
    return true;
}

/* -------------------------------------------------------------------------------------------------- comparison */

/* NaN in both is an element that neither may write: a gap between rows, a row of no sequence. */
difference compare(const double *x, const double *truth, int64_t n) {
    difference d = {0, 0, false};
    double magnitude = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i]) || !isfinite(truth[i])) {
            d.broken |= !(x[i] == truth[i] || (isnan(x[i]) && isnan(truth[i])));
            continue;
        }
        d.largest = fmax(d.largest, fabs(x[i] - truth[i]));
        magnitude = fmax(magnitude, fabs(truth[i]));
    }
    d.relative = d.largest == 0 ? 0 : magnitude > 0 ? d.largest / magnitude : INFINITY;
    return d;
}

/* The relative error of one rounding. */
static double rounding(heddle_dtype dtype) {
    return dtype == HEDDLE_BF16 ? 0x1p-8 : dtype == HEDDLE_F16 ? 0x1p-11 : dtype == HEDDLE_F64 ? 0x1p-53 : 0x1p-24;
}

static double largest_finite(const double *x, int64_t n) {
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        most = isfinite(x[i]) ? fmax(most, fabs(x[i])) : most;
    return most;
}

/* How many float32 roundings of the root of the sum of its squared terms a sum may lose. The errors of a chain of n additions deviate by
 * 0.41·√n of them; six deviations, as a run of a million cases has 10⁹ numbers. Short sums have other roundings. */
static double sum_roundings(const problem *p, int f) {
    const heddle_attention *a = &p->j.a;
    if (p->j.linear)
        return 16;
    const bool over_queries = f == DK || f == DV || f == DBIAS || f == DSINKS;
    const int64_t n = over_queries ? (f == DK || f == DV ? a->h / job_extent(&p->j, 'g') : a->h) * a->sq : a->sk;
    return fmax(16, 2.5 * sqrt((double)n));
}

/* The same, of gradients of keys in two parts: their lse, which is that of both, is rounded twice, and what it is off by is in all weights
 * of its row (docs/limits.md). */
static double lse_roundings(const problem *p, int f, const trial *t) {
    if (p->j.linear || p->first_part <= 0 || f == O || f == LSE || !t->truth.x[LSE])
        return 0;
    return 2 * largest_finite(t->truth.x[LSE], field_count(&p->j, LSE));
}

/* Twice the plain computation's error, the largest over its orders; but what two roundings of the result, or some of its terms, can do
 * is never held against a kernel. Where the plain computation and float64 disagree altogether one of them computes something else, and
 * nothing is proven. */
judgement judge(const problem *p, int f, heddle_dtype dtype, const trial *t) {
    int64_t n = field_count(&p->j, f);
    double magnitude = largest_finite(t->truth.x[f], n), terms = largest_finite(t->terms.x[f], n);
    bool wide =
        job_fields(&p->j)[f].element == OF_FLOAT && (p->j.linear || f != DSINKS); /* dsinks comes from a stored o */
    heddle_dtype stored = wide && dtype != HEDDLE_F64 ? HEDDLE_F32 : dtype;
    judgement g = {.ours = compare(t->ours.x[f], t->truth.x[f], n)};
    for (int x = 0; x < t->orders; x++) {
        const difference d = compare(t->plain[x].x[f], t->truth.x[f], n);
        g.plain = x == 0 || d.largest > g.plain.largest ? d : g.plain;
    }
    double noise = (sum_roundings(p, f) + lse_roundings(p, f, t)) * 0x1p-24 * terms,
           sane = fmin(0x1p14 * rounding(dtype), 0x1p-4) * magnitude;
    double allowed = fmax(fmax(2 * g.plain.largest, 2 * rounding(stored) * magnitude), noise);
    g.allowed = magnitude > 0 ? allowed / magnitude : 0;
    g.doubtful = g.plain.largest > sane + 64 * rounding(dtype) * terms;
    g.ratio = g.ours.largest == 0 ? 0 : g.ours.largest / allowed;
    if (g.ours.broken || g.doubtful || !(g.ratio < 999))
        g.ratio = 999;
    g.ok = g.ratio <= 1;
    return g;
}

double log_ratio(const problem *p, int f, heddle_dtype dtype, const trial *t) {
    int64_t n = field_count(&p->j, f);
    const bool wide = job_fields(&p->j)[f].element == OF_FLOAT;
    const double least = rounding(wide ? HEDDLE_F32 : dtype) * largest_finite(t->truth.x[f], n);
    const double ours = compare(t->ours.x[f], t->truth.x[f], n).largest,
                 plain = compare(t->plain[PLAIN_BLOCKED].x[f], t->truth.x[f], n).largest;
    return least > 0 ? log(fmax(ours, least) / fmax(plain, least)) : 0;
}

/* ------------------------------------------------------------------------------------------------------- reports */

const char *verdict(verify *v, bool ok) {
    v->checked++;
    v->failed += !ok;
    return ok ? "ok" : "FAILED";
}

void report_tensors(verify *v, const problem *p, heddle_dtype dtype, const trial *t, const double *once) {
    printf("  %-10s %12s %12s %12s %12s%s\n", "", "max diff", "relative", "plain", "allowed",
           once ? "  once printed" : "");
    for (int f = 0; job_fields(&p->j)[f].name; f++) {
        if (!t->ours.x[f])
            continue;
        judgement g = judge(p, f, dtype, t);
        printf("  %-10s %12.3g %12.3g %12.3g %12.3g", job_fields(&p->j)[f].name, g.ours.largest, g.ours.relative,
               g.plain.relative, g.allowed);
        if (once && once[f] >= 0)
            printf("  %12.3g", once[f]);
        else if (once)
            printf("  %12s", "");
        record(v, job_fields(&p->j)[f].name, g.ours.broken ? INFINITY : g.ours.relative, g.plain.relative, g.ok);
        printf("  %s%s\n", verdict(v, g.ok),
               g.ours.broken ? " (NaN or infinity)"
               : g.doubtful  ? " (plain and float64 disagree)"
                             : "");
    }
}

void report_bound(verify *v, const char *what, double value, double most) {
    record(v, what, value, 0, value <= most);
    printf("  %-52s %10.3g  of %8.2g  %s\n", what, value, most, verdict(v, value <= most));
}

static int decimals_of(double known, int digits) {
    return digits > 0 ? digits : -digits - 1 - (int)floor(log10(fabs(known)));
}

static void print_known(const double *known, int n, int digits) {
    for (int i = 0; i < n; i++)
        printf(" %12.*f", decimals_of(known[i], digits), known[i]);
}

double known_slack(const problem *p, int f, const trial *t) {
    return judge(p, f, HEDDLE_F32, t).allowed * largest_finite(t->truth.x[f], field_count(&p->j, f));
}

void report_known(verify *v, const char *what, const double *x, const double *known, int n, int columns, int digits,
                  double slack) {
    bool ok = true;
    double most = 0;
    for (int i = 0; i < n; i++) {
        ok &= fabs(x[i] - known[i]) <= 0.5000001 * pow(10, -decimals_of(known[i], digits)) + slack;
        most = isfinite(x[i]) ? fmax(most, fabs(x[i] - known[i])) : INFINITY;
    }
    record(v, what, most, 0, ok);
    for (int row = 0; row < n; row += columns) {
        printf("  %-7s", row ? "" : what);
        for (int i = row; i < row + columns; i++)
            printf(" %12.*g", digits < 0 ? -digits : 8, x[i]);
        printf("%s", columns > 4 ? "\n  true   " : "   true");
        print_known(known + row, columns, digits);
        printf("%s%s\n", row + columns < n ? "" : "  ", row + columns < n ? "" : verdict(v, ok));
    }
}

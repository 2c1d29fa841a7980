/* SPDX-License-Identifier: Apache-2.0
 * The numbers of docs/math.md: every formula there written out in loops over doubles, beside central differences and
 * beside what heddle computes. Ends with 1 where they are not alike. */
#include "derivation.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int unlike;

void section(const char *name, const char *title) {
    printf("\n%s  %s\n", name, title);
}

void line(const char *what, double formula, double differences, double heddle) {
    if (isnan(differences))
        printf("    %-26s formula %14.9f                            heddle %14.9f\n", what, formula, heddle);
    else
        printf("    %-26s formula %14.9f  differences %14.7f  heddle %14.9f\n", what, formula, differences, heddle);
    expect(what, &formula, &heddle, 1, ALIKE);
    if (!isnan(differences))
        expect(what, &differences, &formula, 1, ALIKE_DIFFERENCES);
}

void slope(const char *what, double formula, double differences) {
    printf("    %-26s formula %14.9f  differences %14.7f\n", what, formula, differences);
    expect(what, &differences, &formula, 1, ALIKE_DIFFERENCES);
}

void forms(const char *what, double formula, double other, double heddle) {
    printf("    %-26s formula %14.9f  folded      %14.9f  heddle %14.9f\n", what, formula, other, heddle);
    expect(what, &formula, &heddle, 1, ALIKE);
    expect(what, &other, &heddle, 1, ALIKE);
}

void number(const char *what, double value) {
    printf("    %-42s %14.9f\n", what, value);
}

double largest(const double *x, int64_t n) {
    double most = 0;
    for (int64_t at = 0; at < n; at++)
        most = fmax(most, fabs(x[at]));
    return most;
}

double relative_error(const double *x, const double *y, int64_t n) {
    double error = 0, all = 0;
    for (int64_t at = 0; at < n; at++) {
        error += (x[at] - y[at]) * (x[at] - y[at]);
        all += y[at] * y[at];
    }
    return sqrt(error / all);
}

void expect(const char *what, const double *x, const double *y, int64_t n, double tolerance) {
    double allowed = 0;
    for (int64_t at = 0; at < n; at++)
        if (isfinite(y[at]))
            allowed = fmax(allowed, fabs(y[at]));
    allowed = tolerance * fmax(1, allowed);
    for (int64_t at = 0; at < n; at++)
        if (!(x[at] == y[at] || fabs(x[at] - y[at]) <= allowed)) { /* equal: -inf */
            printf("    %s: element %lld is %.17g here and %.17g there\n", what, (long long)at, x[at], y[at]);
            unlike++;
        }
}

void must_be_ok(heddle_status status) {
    if (status == HEDDLE_OK)
        return;
    fprintf(stderr, "derivation: %s\n", heddle_last_message());
    exit(1);
}

static void *workspace_of(size_t bytes) {
    void *workspace = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (workspace)
        return workspace;
    fprintf(stderr, "derivation: no memory for %zu bytes\n", bytes);
    exit(1);
}

void run_attention(const heddle_attention *a, const heddle_attention_data *t, heddle_pass pass) {
    size_t bytes = 0;
    must_be_ok(heddle_attention_workspace(a, pass, &bytes));
    void *workspace = workspace_of(bytes);
    must_be_ok(pass == HEDDLE_FORWARD ? heddle_attention_forward(a, t, workspace, bytes, NULL)
                                      : heddle_attention_backward(a, t, workspace, bytes, NULL));
    free(workspace);
}

void run_norm_linear(const heddle_norm_linear *a, const heddle_norm_linear_data *t, heddle_pass pass) {
    size_t bytes = 0;
    must_be_ok(heddle_norm_linear_workspace(a, pass, &bytes));
    void *workspace = workspace_of(bytes);
    must_be_ok(pass == HEDDLE_FORWARD ? heddle_norm_linear_forward(a, t, workspace, bytes, NULL)
                                      : heddle_norm_linear_backward(a, t, workspace, bytes, NULL));
    free(workspace);
}

int main(void) {
    printf("docs/math.md explains these lines; \"differences\" are central ones of heddle's own forward in float64\n");
    derive_attention();
    derive_keys();
    derive_norm_linear();
    derive_activations();
    show_mistakes();
    if (unlike)
        fprintf(stderr, "derivation: %d numbers are not alike\n", unlike);
    return unlike != 0;
}

/* SPDX-License-Identifier: Apache-2.0
 * Runs the plain computation of a problem (verify_plain.h). */
#include "verify_plain.h"

#include "../src/dtype.h"

#include <math.h>

float plain_rounded(heddle_dtype dtype, double x) {
    double element; /* room for any type */
    if (dtype == HEDDLE_F32 || dtype == HEDDLE_F64)
        return (float)x;
    store_element(dtype, &element, 0, x);
    return (float)load_element(dtype, &element, 0);
}

/* Zero in every element that is added to or that no query reaches; where float64 leaves one alone, compare() decides.
 * */
static void allocate_outcome(const problem *p, arena *m, outcome *out) {
    *out = (outcome){{0}};
    for (int f = 0; job_fields(&p->j)[f].name; f++) {
        const tensor_field *t = &job_fields(&p->j)[f];
        if (!is_output(t) || !job_has(&p->j, f))
            continue;
        int64_t n = field_count(&p->j, f);
        out->x[f] = arena_array(m, n, sizeof(double));
        for (int64_t i = 0; i < n; i++)
            out->x[f][i] = 0;
    }
}

void plain_run(const problem *p, arena *m, heddle_dtype dtype, plain_order order, outcome *out, outcome *terms) {
    allocate_outcome(p, m, out);
    allocate_outcome(p, m, terms);
    if (p->j.linear)
        plain_norm_linear(p, m, dtype, out, terms);
    else
        plain_attention(p, m, dtype, order, out, terms);
    for (int f = 0; job_fields(&p->j)[f].name; f++)
        for (int64_t i = 0, n = terms->x[f] ? field_count(&p->j, f) : 0; i < n; i++)
            terms->x[f][i] = sqrt(terms->x[f][i]);
}

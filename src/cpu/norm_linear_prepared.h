/* SPDX-License-Identifier: Apache-2.0
 * norm-linear forward's panels of Wᵀ, kept by the caller while W does not change (heddle_norm_linear_prepare). They are those that forward
 * would pack itself, so that its results have the same bits. */
#ifndef HEDDLE_CPU_NORM_LINEAR_PREPARED_H
#define HEDDLE_CPU_NORM_LINEAR_PREPARED_H

#include "cpu.h"
#include "norm_linear_direct.h"

/* With few features out, and on AMX with long sums, W is read where it lies, whatever m is. */
static size_t panel_bytes(const heddle_norm_linear *a) {
    const int64_t panels = (is_gated(a->activation) ? 2 : 1) * ((a->n + PANEL - 1) / PANEL);
    heddle_norm_linear many = *a;
    many.m = INT64_MAX;
    return has_few_columns(&many) || goes_direct(&many) ? 0 : (size_t)(panels * b_panel(a->k)) * sizeof(float);
}

static bool goes_by_panels(const heddle_norm_linear *a) {
    return a->m > 0 && !has_few_rows(a) && !has_few_columns(a) && !goes_direct(a);
}

static void fill_panels(const norm_linear_plan *plan, const heddle_norm_linear_data *t, float *panels) {
    const heddle_norm_linear *a = &plan->a;
    const norm_call c = {.a = a,
                         .t = t,
                         .type = (int)a->dtype,
                         .halves = is_gated(a->activation) ? 2 : 1,
                         .n_panels = (a->n + PANEL - 1) / PANEL};
    const int64_t step = b_panel(a->k);
#pragma omp parallel for schedule(dynamic) num_threads(plan->threads) if (plan->threads > 1)
    for (int64_t p = 0; p < c.halves * c.n_panels; p++)
        pack_w_transposed(&c, p, panels + p * step);
}

/* Where they lie behind the header; NULL: this forward packs its own. */
INLINE const float *prepared_panels(const norm_linear_plan *plan, const heddle_norm_linear_data *t) {
    return plan->reads_prepared && t
               ? (const float *)(const void *)((const char *)t->prepared + sizeof(prepared_header))
               : NULL;
}

#endif

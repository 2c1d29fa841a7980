/* SPDX-License-Identifier: Apache-2.0
 * The table that each ISA's compilation of the kernels fills. */
#ifndef HEDDLE_CPU_H
#define HEDDLE_CPU_H

#include "../plan.h"

#include <stdbool.h>

typedef struct cpu_kernels {
    const char *isa;
    const struct cpu_kernels *others; /* for what is not bfloat16 or has few results, unless NULL */
    bool widens;                      /* backward of norm-linear takes care of few results itself */
    /* Choose tiles (never by the number of threads: the bits must not depend on it) and compute the workspace. */
    void (*plan_attention)(attention_plan *plan);
    void (*plan_norm_linear)(norm_linear_plan *plan);
    void (*attention_forward)(const attention_plan *plan, const heddle_attention_data *t, void *workspace);
    void (*attention_backward)(const attention_plan *plan, const heddle_attention_data *t, void *workspace);
    void (*norm_linear_forward)(const norm_linear_plan *plan, const heddle_norm_linear_data *t, void *workspace);
    void (*norm_linear_backward)(const norm_linear_plan *plan, const heddle_norm_linear_data *t, void *workspace);
} cpu_kernels;

/* Of a tensor with few elements the largest error is a matter of luck: a chain of additions as long as the plain computation's, or
 * operands rounded as often, would now and then leave twice its error. Then chains are short, and bfloat16 is widened. */
static inline bool few_results(const norm_linear_plan *plan) {
    return (plan->pass == HEDDLE_FORWARD ? plan->a.m * plan->a.n : plan->a.k) < 64;
}

void heddle__cpu_merge(const heddle_merge *m, void *o, void *lse, const void *other_o, const void *other_lse,
                       int threads);
void heddle__cpu_append(const heddle_append *a, const heddle_append_data *t, int threads);

extern const cpu_kernels heddle__cpu_baseline, heddle__cpu_avx2, heddle__cpu_avx512, heddle__cpu_avx512bf16,
    heddle__cpu_amx, heddle__cpu_neon, heddle__cpu_sve256;

#endif

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
    /* Of what norm-linear prepares: bytes of the panels of W, 0 where forward never has them; whether this forward goes by panels; and to
     * fill them. */
    size_t (*panel_bytes)(const heddle_norm_linear *a);
    bool (*goes_by_panels)(const heddle_norm_linear *a);
    void (*fill_panels)(const norm_linear_plan *plan, const heddle_norm_linear_data *t, float *panels);
    void (*norm_linear_forward)(const norm_linear_plan *plan, const heddle_norm_linear_data *t, void *workspace);
    void (*norm_linear_backward)(const norm_linear_plan *plan, const heddle_norm_linear_data *t, void *workspace);
} cpu_kernels;

/* Elements of W by which a buffer is found to be older than the weight. */
#define PREPARED_SAMPLES 64

/* What heddle_norm_linear_prepare writes in front of the panels of W: what they are of. */
typedef struct prepared_header {
    char library[16], isa[16];
    int32_t dtype, halves;
    int64_t k, n, bytes;
    uint32_t sample[PREPARED_SAMPLES]; /* their bits */
} prepared_header;
_Static_assert(sizeof(prepared_header) % 64 == 0, "panels begin at a multiple of 64");

/* Of a tensor with few elements the largest error is a matter of luck: a chain of additions as long as the plain computation's, or
 * operands rounded as often, would now and then leave twice its error. Then chains are short, and bfloat16 is widened. */
static inline bool few_results(const norm_linear_plan *plan) {
    return (plan->pass == HEDDLE_FORWARD ? plan->a.m * plan->a.n : plan->a.k) < 64;
}

/* Takes the instruction set of that name, or the best where the processor has no such: at the first call, and between calls in tests. */
const cpu_kernels *heddle__cpu_choose(const char *wanted);

void heddle__cpu_merge(const heddle_merge *m, void *o, void *lse, const void *other_o, const void *other_lse,
                       int threads);
void heddle__cpu_append(const heddle_append *a, const heddle_append_data *t, int threads);

extern const cpu_kernels heddle__cpu_baseline, heddle__cpu_avx2, heddle__cpu_avx512, heddle__cpu_avx512bf16,
    heddle__cpu_amx, heddle__cpu_neon, heddle__cpu_sve256;

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The plan of norm-linear on CUDA: which family takes a problem. Pure. */
#include "cuda/norm_linear/family.h"
#include "fields.h"
#include "status.h"

#include <assert.h>

static_assert(sizeof(norm_linear_choice) <= sizeof(plan_own), "it lies in the plan");
static_assert(_Alignof(norm_linear_choice) <= _Alignof(plan_own), "it lies in the plan");

#define GRID_LIMIT INT64_C(0x7fffffff)

/* Blocks of Hopper's products come in clusters of so many, of a multiprocessor each. */
#define CLUSTER 2

/* In this order they are asked whether they take a problem; the last takes all. */
static const norm_linear_family *const families[] = {&heddle__norm_linear_small, &heddle__norm_linear_products};

static norm_linear_choice *choice_of(norm_linear_plan *plan) {
    return (norm_linear_choice *)(void *)&plan->own;
}

static const norm_linear_choice *planned_choice(const norm_linear_plan *plan) {
    return (const norm_linear_choice *)(const void *)&plan->own;
}

void heddle__cuda_set_norm_linear_device(norm_linear_plan *plan, void *record, void *context) {
    choice_of(plan)->record = record;
    choice_of(plan)->context = context;
}

void *heddle__cuda_norm_linear_device(const norm_linear_plan *plan, void **context) {
    *context = planned_choice(plan)->context;
    return planned_choice(plan)->record;
}

heddle_status heddle__cuda_plan_norm_linear(norm_linear_plan *plan, const cuda_facts *device) {
    heddle_norm_linear *a = &plan->a;
    if (device->shared_bytes < GEMM80_BYTES)
        return fail(HEDDLE_UNSUPPORTED,
                    "%s: norm-linear needs blocks with %d bytes of shared memory, a block can have %zu", device->name,
                    GEMM80_BYTES, device->shared_bytes);
    const int64_t rows = norm_linear_extent(a, 'N');
    const int64_t m = blocks(a->m, GEMM_TILE), k = blocks(a->k, GEMM_TILE), n = blocks(rows, GEMM_TILE);
    if (a->m > GRID_LIMIT || a->k > GRID_LIMIT - 8 || rows > GRID_LIMIT - 8 || m * n > GRID_LIMIT ||
        m * k > GRID_LIMIT || n * k > GRID_LIMIT)
        return fail(HEDDLE_UNSUPPORTED, "m = %lld, k = %lld, n = %lld: more blocks than a CUDA grid holds",
                    (long long)a->m, (long long)a->k, (long long)a->n);
    a->multiprocessors = limit_of(device, a->multiprocessors == 1 ? CLUSTER : a->multiprocessors);
    const cuda_facts limited = limited_facts(device, a->multiprocessors);
    norm_linear_choice *c = choice_of(plan);
    c->family = 0;
    while (!families[c->family]->takes(a, plan->pass, &limited))
        c->family++;
    families[c->family]->plan(plan, &limited, c);
    const norm_linear_facts is = heddle__cuda_norm_linear_facts(plan, &limited);
    plan->prepared = heddle__cuda_prepared_bytes(a, &is);
    return HEDDLE_OK;
}

int heddle__cuda_norm_linear_launches(const norm_linear_plan *plan, const cuda_facts *device,
                                      const heddle_norm_linear_data *data, void *workspace,
                                      norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES]) {
    const norm_linear_choice *choice = planned_choice(plan);
    const cuda_facts limited = limited_facts(device, plan->a.multiprocessors);
    norm_linear_call c = {.a = &plan->a,
                          .pass = plan->pass,
                          .device = &limited,
                          .is = choice->is,
                          .t = data,
                          .workspace = workspace,
                          .launches = launches};
    families[choice->family]->launch(choice, &c);
    return c.count;
}

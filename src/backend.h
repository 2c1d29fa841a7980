/* SPDX-License-Identifier: Apache-2.0
 * What a backend supplies. The table of backends is in api.c; a backend that is not built has no entry there. */
#ifndef HEDDLE_BACKEND_H
#define HEDDLE_BACKEND_H

#include "plan.h"

typedef struct backend {
    /* HEDDLE_OK, or the status and message (status.h) that say why it cannot run here. */
    heddle_status (*available)(void);
    /* One line for people, without the backend's name. */
    void (*describe)(char *text, size_t n);
    /* Fill kernel, tiles and workspace of a plan whose description is valid and resolved; or say, as `available` does, why it cannot run here.
     * Pure but for the machine's facts. */
    heddle_status (*plan_attention)(attention_plan *plan);
    heddle_status (*plan_norm_linear)(norm_linear_plan *plan);
    /* Check what only this backend can (the device of a pointer), then do the work. */
    heddle_status (*run_attention)(const attention_plan *plan, const heddle_attention_data *data, void *workspace,
                                   void *stream);
    heddle_status (*run_norm_linear)(const norm_linear_plan *plan, const heddle_norm_linear_data *data, void *workspace,
                                     void *stream);
    /* Write plan->prepared bytes, of a forward without rows. */
    heddle_status (*prepare_norm_linear)(const norm_linear_plan *plan, const heddle_norm_linear_data *data,
                                         void *prepared, void *stream);
    /* Of a resolved description; with rows to merge there are pointers. */
    heddle_status (*merge)(const heddle_merge *m, void *o, void *lse, const void *other_o, const void *other_lse,
                           void *stream);
    heddle_status (*append)(const heddle_append *a, const heddle_append_data *t, void *stream);
} backend;

extern const backend heddle_ref_backend;
extern const backend heddle_cpu_backend;
extern const backend heddle_cuda_backend;

#endif

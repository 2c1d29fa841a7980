/* SPDX-License-Identifier: Apache-2.0
 * When the family small takes a norm-linear, and how. Pure. */
#include "cuda/norm_linear/family.h"
#include "cuda/norm_linear/small/contract.h"
#include "fields.h"
#include "status.h"

static int64_t forward_blocks(const norm_linear_call *c) {
    return blocks(c->a->m, SMALL_ROWS) * norm_small_tiles((int)c->is.n);
}

/* Whatever is asked for; what is not is not launched. */
static int64_t row_blocks(const heddle_norm_linear *a) {
    return blocks(a->m, SMALL_GRADS);
}

static int64_t weight_blocks(const heddle_norm_linear *a) {
    return norm_small_strips((int)a->k) * blocks(a->n, SMALL_SIDE);
}

/* Forward, in two launches of 6.4 microseconds for the least problem, is not slower than this in one (m 16, k 64, n 64 on an H200: 9.1). Backward
 * takes 10.2 there, in two launches; the tensor cores took 16.8. It grows with the rows of W, 21 with n 256, where they take less. */
static bool takes(const heddle_norm_linear *a, heddle_pass pass, const cuda_facts *device) {
    const int64_t together = 2 * (int64_t)device->multiprocessors;
    if (device->small == SMALL_NEVER || (pass == HEDDLE_BACKWARD && a->activation) || !a->m || a->k > SMALL_K ||
        a->features & HEDDLE_Z || a->m > 65536 || norm_linear_extent(a, 'N') > 65536)
        return false;
    if (device->small == SMALL_ALWAYS)
        return true;
    return pass == HEDDLE_BACKWARD && row_blocks(a) + weight_blocks(a) <= together && a->n * blocks(a->k, 256) <= 128 &&
           a->m <= 1024;
}

static enum cuda_kernel kernel_of(const heddle_norm_linear *a, heddle_pass pass) {
    static const enum cuda_kernel kernels[2][3] = {[HEDDLE_FORWARD] = {[HEDDLE_BF16] = NORM_LINEAR_fwd_bf16_small,
                                                                       [HEDDLE_F16] = NORM_LINEAR_fwd_f16_small,
                                                                       [HEDDLE_F32] = NORM_LINEAR_fwd_f32_small},
                                                   [HEDDLE_BACKWARD] = {[HEDDLE_BF16] = NORM_LINEAR_bwd_bf16_small,
                                                                        [HEDDLE_F16] = NORM_LINEAR_bwd_f16_small,
                                                                        [HEDDLE_F32] = NORM_LINEAR_bwd_f32_small}};
    return kernels[pass][a->dtype];
}

/* The workspace: of forward u, where an activation of two halves is formed of it; of backward shares of dgamma and dbeta. */
static void plan_small(norm_linear_plan *plan, const cuda_facts *device, norm_linear_choice *c) {
    const heddle_norm_linear *a = &plan->a;
    const bool forward = plan->pass == HEDDLE_FORWARD;
    const enum cuda_kernel kernel = kernel_of(a, plan->pass);
    (void)device;
    c->is = (norm_linear_facts){.n = norm_linear_extent(a, 'N'),
                                .gated = is_gated(a->activation),
                                .wide = a->dtype == HEDDLE_F32,
                                .dtype = a->dtype == HEDDLE_BF16  ? 0
                                         : a->dtype == HEDDLE_F16 ? 1
                                                                  : 2};
    c->is.np = (c->is.n + 7) / 8 * 8;
    plan->threads = (int)heddle__cuda_kernels[kernel].threads;
    plan->tile_m = forward ? SMALL_ROWS : SMALL_GRADS;
    plan->tile_n = SMALL_COLS;
    plan->tile_k = SMALL_CHUNK;
    const size_t bytes = !forward      ? (size_t)(row_blocks(a) * 2 * a->k) * sizeof(float)
                         : c->is.gated ? (size_t)(a->m * c->is.np) * size_of(&c->is)
                                       : 0;
    plan->workspace = (bytes + 63) / 64 * 64; /* one may end where its memory does, and begins at a multiple of 64 */
    heddle__copy_text(plan->kernel, sizeof plan->kernel, heddle__cuda_kernels[kernel].symbol);
}

static norm_small params_of(const norm_linear_call *c) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    return (norm_small){.x = t->x,
                        .gamma = t->gamma,
                        .beta = t->beta,
                        .w = t->w,
                        .bias = t->bias,
                        .dy = t->dy,
                        .residual = a->activation ? NULL : t->residual,
                        .y = t->y,
                        .dx = t->dx,
                        .dgamma = t->dgamma,
                        .dbeta = t->dbeta,
                        .dw = t->dw,
                        .dbias = t->dbias,
                        .mean = t->mean,
                        .rstd = t->rstd,
                        .x_stride = a->x_stride,
                        .w_stride = a->w_stride,
                        .y_stride = a->y_stride,
                        .dy_stride = a->dy_stride,
                        .dx_stride = a->dx_stride,
                        .dw_stride = a->dw_stride,
                        .residual_stride = a->residual_stride,
                        .m = a->m,
                        .k = (int32_t)a->k,
                        .n = (int32_t)c->is.n,
                        .rms = a->norm == HEDDLE_RMS_NORM,
                        .given = t->mean && t->rstd,
                        .plain = a->norm == HEDDLE_NO_NORM,
                        .eps = (float)a->eps};
}

static void backward(norm_linear_call *c, norm_small p, float *part) {
    const heddle_norm_linear_data *t = c->t;
    const int64_t k = c->a->k, strips = t->dw ? norm_small_strips((int)k) : 1;
    const bool sums = t->dgamma || t->dbeta;
    p.row_blocks = t->dx || sums ? (int32_t)row_blocks(c->a) : 0;
    p.part = sums && p.row_blocks > 1 ? part : NULL;
    heddle__cuda_add(c, kernel_of(c->a, HEDDLE_BACKWARD),
                     p.row_blocks + (t->dw || t->dbias ? strips * blocks(c->a->n, SMALL_SIDE) : 0), 0,
                     &(norm_linear_params){.small = p});
    if (!p.part)
        return;
    const norm_sums sum = {.ld = 2 * k, .cols = k, .parts = p.row_blocks};
    norm_totals totals = {.job = {sum, sum}};
    totals.job[0].part = part;
    totals.job[0].out = t->dgamma;
    totals.job[1].part = part + k;
    totals.job[1].out = t->dbeta;
    heddle__cuda_add_totals(c, totals);
}

static void launch(const norm_linear_choice *choice, norm_linear_call *c) {
    (void)choice;
    const heddle_norm_linear *a = c->a;
    norm_small p = params_of(c);
    if (c->pass == HEDDLE_BACKWARD) {
        backward(c, p, c->workspace);
        return;
    }
    if (c->t->u || c->is.gated) {
        p.y = c->t->u ? c->t->u : c->workspace;
        p.y_stride = c->t->u ? a->u_stride : c->is.np;
    }
    heddle__cuda_add(c, kernel_of(a, c->pass), forward_blocks(c), (uint32_t)norm_small_bytes((int)a->k),
                     &(norm_linear_params){.small = p});
    if (a->activation)
        heddle__cuda_add_activate(c, (norm_activate){.u = p.y,
                                                     .ldu = p.y_stride,
                                                     .out = c->t->y,
                                                     .ldo = a->y_stride,
                                                     .residual = c->t->residual,
                                                     .ldr = a->residual_stride});
}

const norm_linear_family heddle__norm_linear_small = {takes, plan_small, launch};

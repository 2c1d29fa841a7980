/* SPDX-License-Identifier: Apache-2.0
 * Which norm-linear kernels run, with which parameters. Pure.
 *
 * bfloat16 with many rows multiplies the raw x and applies the norm in the epilogue (docs/design.md, section 4): raw x is exact, xhat
 * rounded is not, and the 8 bits of the result hide what a large mean costs. With few rows there are fewer bytes in x normalised than in
 * W∘gamma. float16 and float32 have more bits and normalise first. */
#include "cuda/norm_linear/launches.h"
#include "status.h"

#define GRID_LIMIT INT64_C(0x7fffffff)

/* Space for `elements` of `size` bytes from the workspace, or only counted where there is none yet. */
static void *take(unsigned char *base, size_t *used, int64_t elements, size_t size) {
    void *p = base ? base + *used : NULL;
    *used += ((size_t)elements * size + 255) / 256 * 256;
    return p;
}

static size_t lay_out(norm_linear_call *c, heddle_pass pass, unsigned char *base) {
    const heddle_norm_linear *a = c->a;
    size_t used = 0;
    const bool backward = pass == HEDDLE_BACKWARD, two = c->wide && !c->tf32, raw = !backward && c->raw;
    const int64_t matrix = a->m * c->kp, weights = a->n * c->kp;
    norm_linear_arrays *at = &c->at;
    at->mean = take(base, &used, a->m, 4);
    at->rstd = take(base, &used, a->m, 4);
    at->z = take(base, &used, raw ? 0 : matrix, 2);
    at->z_low = take(base, &used, two ? matrix : 0, 2);
    at->w = take(base, &used, c->wide || raw ? weights : 0, 2);
    at->w_low = take(base, &used, two ? weights : 0, 2);
    at->w_exponent = take(base, &used, c->wide ? a->n : 0, 4);
    at->s = take(base, &used, backward ? 0 : a->n, 4);
    at->t = take(base, &used, backward ? 0 : a->n, 4);
    if (!backward)
        return used;
    at->dy = take(base, &used, c->wide ? a->m * c->np : 0, 2);
    at->dy_low = take(base, &used, two ? a->m * c->np : 0, 2);
    at->dy_exponent = take(base, &used, c->wide ? a->m : 0, 4);
    at->least = take(base, &used, c->wide ? 2 * prepare_blocks(c) : 0, 4);
    at->shared = take(base, &used, c->wide ? 2 : 0, 4);
    at->dgamma_part = take(base, &used, 2 * blocks(a->n, GEMM_TILE) * a->k, 4);
    at->finish_part = take(base, &used, c->wide || a->k > SUMMED_ROW ? 0 : 2 * finish_blocks(c) * a->k, 4);
    at->dbias_part = take(base, &used, parts_of(a->m) * a->n, 4);
    at->dbias = take(base, &used, a->n, 4);
    return used;
}

/* The copy engine reads rows that begin at multiples of 16 bytes, and there must be some. */
static bool takes_sm90(const norm_linear_plan *plan, const norm_linear_device *device) {
    const heddle_norm_linear *a = &plan->a;
    const bool backward = plan->pass == HEDDLE_BACKWARD;
    const int64_t strides =
        backward ? a->w_stride | a->dy_stride | a->dx_stride | a->dw_stride : a->x_stride | a->w_stride | a->y_stride;
    return device->sm90 && device->shared_bytes >= GEMM90_SHARED && device->multiprocessors > 1 &&
           a->dtype != HEDDLE_F32 && strides % 8 == 0 && a->m > 0;
}

static norm_linear_call call_of(const norm_linear_plan *plan, const norm_linear_device *device) {
    const heddle_norm_linear *a = &plan->a;
    return (norm_linear_call){.a = a,
                              .device = device,
                              .raw = a->dtype == HEDDLE_BF16 && 2 * a->n < a->m,
                              .sm90 = takes_sm90(plan, device),
                              .kp = (a->k + 7) / 8 * 8,
                              .np = (a->n + 7) / 8 * 8,
                              .wide = a->dtype == HEDDLE_F32,
                              .tf32 = a->dtype == HEDDLE_F32 && (a->features & HEDDLE_TF32),
                              .dtype = a->dtype == HEDDLE_BF16  ? 0
                                       : a->dtype == HEDDLE_F16 ? 1
                                                                : 2};
}

static const char *const symbols[] = {
#define K(pass, dtype, family, module, threads) "heddle_norm_linear_" #pass "_" #dtype "_" #family,
#include "cuda/norm_linear/norm_linear.def"
#undef K
};

/* The kernel that names the plan: the first product's. */
static enum norm_linear_kernel describe(norm_linear_plan *plan, const norm_linear_call *c) {
    const heddle_norm_linear *a = c->a;
    const bool forward = plan->pass == HEDDLE_FORWARD;
    if (heddle__cuda_norm_linear_is_small(a, c->device, plan->pass)) {
        plan->threads = ROW_THREADS;
        plan->tile_m = forward ? SMALL_ROWS : SMALL_GRADS;
        plan->tile_n = SMALL_COLS;
        plan->tile_k = SMALL_CHUNK;
        return heddle__cuda_norm_linear_small_kernel(c, plan->pass);
    }
    const gemm_kernels *kernels = forward ? GEMMS(fwd) : GEMMS(dx);
    plan->threads = c->sm90 ? 384 : 128;
    plan->tile_m = plan->tile_n = GEMM_TILE;
    plan->tile_k = c->wide && !c->tf32 ? 32 : 64;
    if (c->sm90)
        return heddle__cuda_gemm90(c, kernels, a->m, forward ? a->n : a->k, forward ? a->k : a->n, &plan->tile_n);
    return c->tf32 ? kernels->tf32 : kernels->sm80[c->dtype];
}

heddle_status heddle__cuda_plan_norm_linear(norm_linear_plan *plan, const norm_linear_device *device) {
    const heddle_norm_linear *a = &plan->a;
    norm_linear_call c = call_of(plan, device);
    if (device->shared_bytes < GEMM_SHARED)
        return fail(HEDDLE_UNSUPPORTED,
                    "%s: norm-linear needs blocks with %d bytes of shared memory, a block can have %zu", device->name,
                    GEMM_SHARED, device->shared_bytes);
    const int64_t m = blocks(a->m, GEMM_TILE), k = blocks(a->k, GEMM_TILE), n = blocks(a->n, GEMM_TILE);
    if (a->m > GRID_LIMIT || a->k > GRID_LIMIT - 8 || a->n > GRID_LIMIT - 8 || m * n > GRID_LIMIT ||
        m * k > GRID_LIMIT || n * k > GRID_LIMIT)
        return fail(HEDDLE_UNSUPPORTED, "m = %lld, k = %lld, n = %lld: more blocks than a CUDA grid holds",
                    (long long)a->m, (long long)a->k, (long long)a->n);
    heddle__copy_text(plan->kernel, sizeof plan->kernel, symbols[describe(plan, &c)]);
    plan->workspace = heddle__cuda_norm_linear_is_small(a, device, plan->pass)
                          ? heddle__cuda_norm_linear_small_workspace(a, plan->pass)
                          : lay_out(&c, plan->pass, NULL);
    return HEDDLE_OK;
}

/* ------------------------------------------------------------------------------------------------------ launches */

static void forward(norm_linear_call *c) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    norm_linear_arrays *at = &c->at;
    at->mean = t->mean ? t->mean : at->mean;
    at->rstd = t->rstd ? t->rstd : at->rstd;
    norm_gemm g = {.rows = a->m,
                   .cols = a->n,
                   .depth = a->k,
                   .a = at->z,
                   .a_low = at->z_low,
                   .lda = c->kp,
                   .b = at->w,
                   .b_low = at->w_low,
                   .ldb = c->kp,
                   .out = t->y,
                   .ldo = a->y_stride};
    norm_rows pack = {.packs = 1,
                      .in = t->w,
                      .ld = a->w_stride,
                      .rows = a->n,
                      .cols = (int32_t)a->k,
                      .gamma = t->gamma,
                      .beta = t->beta,
                      .bias = t->bias,
                      .high = at->w,
                      .low = c->wide && !c->tf32 ? at->w_low : NULL,
                      .ldp = (int32_t)c->kp,
                      .add = at->t};
    if (c->raw) {
        pack.sum = at->s;
        if (!t->gamma) /* W itself will do */
            pack.high = NULL;
        heddle__cuda_add_prepare(c, (norm_prepare){.job = {heddle__cuda_rows_of_x(c, (norm_rows){0}), pack}});
        g.a = t->x;
        g.lda = a->x_stride;
        g.b = t->gamma ? at->w : t->w;
        g.ldb = t->gamma ? c->kp : a->w_stride;
        g.mean = at->mean;
        g.rstd = at->rstd;
        g.col_sum = at->s;
        g.col_add = at->t;
    } else if (!c->wide) {
        const norm_rows x = heddle__cuda_rows_of_x(c, (norm_rows){.high = at->z, .gamma = t->gamma, .beta = t->beta});
        heddle__cuda_add_prepare(c, (norm_prepare){.job = {x}});
        g.b = t->w;
        g.ldb = a->w_stride;
        g.bias = t->bias;
    } else {
        pack.row_exponent = at->w_exponent;
        heddle__cuda_add_prepare(c,
                                 (norm_prepare){.job = {heddle__cuda_rows_of_x(c, (norm_rows){.high = at->z}), pack}});
        g.exponent = xhat_exponent(a->k);
        g.col_exponent = at->w_exponent;
        g.col_add = at->t;
    }
    heddle__cuda_add_gemm(c, GEMMS(fwd), &g, false, false);
}

int heddle__cuda_norm_linear_launches(const norm_linear_plan *plan, const norm_linear_device *device,
                                      const heddle_norm_linear_data *data, void *workspace,
                                      norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES]) {
    norm_linear_call c = call_of(plan, device);
    c.t = data;
    c.launches = launches;
    if (heddle__cuda_norm_linear_is_small(c.a, device, plan->pass)) {
        heddle__cuda_norm_linear_small(&c, plan->pass, workspace);
        return c.count;
    }
    lay_out(&c, plan->pass, workspace);
    if (plan->pass == HEDDLE_BACKWARD)
        heddle__cuda_norm_linear_backward(&c);
    else if (c.a->m > 0)
        forward(&c);
    return c.count;
}

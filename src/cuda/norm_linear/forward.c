/* SPDX-License-Identifier: Apache-2.0
 * Norm-linear by products on the tensor cores: what they take, their workspace, the launches of forward. Pure.
 *
 * bfloat16 with many rows multiplies the raw x and applies the norm in the epilogue (docs/design.md, section 4): raw x is exact, xhat
 * rounded is not, and the 8 bits of the result hide what a large mean costs. With few rows there are fewer bytes in x normalised than in
 * W∘gamma, and Hopper normalises short rows in less time than it packs W. float16 and float32 have more bits and normalise first. Without a
 * norm 16-bit operands are as they lie: one launch. */
#include "cuda/norm_linear/family.h"

#include "fields.h"
#include "status.h"

/* What a tile of Hopper's may lie over the end of rows and columns, which it counts in 32 bits. */
#define OVER_THE_END 512

/* Hopper, in 16 bits, and there are rows. */
static bool is_for_sm90(const norm_linear_plan *plan, const cuda_facts *device) {
    const heddle_norm_linear *a = &plan->a;
    return device->sm90 && device->shared_bytes >= GEMM90_ROOM && a->dtype != HEDDLE_F32 && a->m > 0 &&
           (a->m | a->k | norm_linear_extent(a, 'N')) <= INT32_MAX - OVER_THE_END;
}

/* The copy engine reads and writes rows that begin at multiples of 16 bytes. */
static bool takes_sm90(const norm_linear_plan *plan, const cuda_facts *device) {
    const heddle_norm_linear *a = &plan->a;
    const bool backward = plan->pass == HEDDLE_BACKWARD;
    const int64_t strides = backward ? a->w_stride | (a->activation ? 0 : a->dy_stride) | a->dx_stride | a->dw_stride
                                     : a->x_stride | a->w_stride | (is_gated(a->activation) ? 0 : a->y_stride);
    return is_for_sm90(plan, device) && device->multiprocessors > 1 && strides % 8 == 0;
}

/* Of few rows the engine reads what is multiplied alone: W, and x unless it is normalised first. */
static bool takes_few90(const norm_linear_plan *plan, const cuda_facts *device) {
    const heddle_norm_linear *a = &plan->a;
    const norm_linear_call call = {.a = a, .device = device};
    int64_t rows;
    heddle__cuda_few90(&call, &rows);
    return plan->pass == HEDDLE_FORWARD && is_for_sm90(plan, device) && rows && a->n > 0 && a->w_stride % 8 == 0 &&
           (a->norm != HEDDLE_NO_NORM || a->x_stride % 8 == 0);
}

/* A family that somebody asks for takes what it can. */
static bool asks_for_sm90(const cuda_facts *device) {
    return device->sm90 && device->small == SMALL_NEVER;
}

/* Rows of x that the kernel for a few has. */
static int few_rows(const heddle_norm_linear *a) {
    return a->m <= FEW_ROWS / 2 ? FEW_ROWS / 2 : FEW_ROWS;
}

static enum cuda_kernel few_kernel(const heddle_norm_linear *a) {
    static const enum cuda_kernel kernels[2][2] = {{NORM_LINEAR_few_r8_bf16_sm80, NORM_LINEAR_few_r16_bf16_sm80},
                                                   {NORM_LINEAR_few_r8_f16_sm80, NORM_LINEAR_few_r16_f16_sm80}};
    return kernels[a->dtype == HEDDLE_F16][few_rows(a) == FEW_ROWS];
}

static bool takes_few(const norm_linear_plan *plan, const cuda_facts *device) {
    const heddle_norm_linear *a = &plan->a;
    return plan->pass == HEDDLE_FORWARD && !asks_for_sm90(device) && a->dtype != HEDDLE_F32 && a->m > 0 &&
           a->m <= FEW_LIMIT && a->k % 8 == 0 && device->shared_bytes >= (size_t)few_bytes(few_rows(a), a->k) &&
           device->multiprocessors >= FEW_LIMIT / FEW_ROWS;
}

/* On Hopper, terms of a short row. */
#define SHORT_SUM 1024

/* Whether bfloat16 multiplies raw x, of m rows, by n of W. Hopper normalises short rows, and few, in less time than it packs W and gathers
 * their moments (docs/kernels/cuda-norm-linear.md); and its product takes no others. */
static bool takes_raw(const heddle_norm_linear *a, const cuda_facts *device, bool sm90, int64_t n) {
    if (!sm90)
        return 2 * n < a->m;
    const bool many = a->m * a->k > INT64_C(1) << 24, narrow = 4 * n < a->m && a->m * a->k > INT64_C(1) << 22;
    return a->k % 8 == 0 && a->k > SHORT_SUM && n < a->m && (many || narrow) && heddle__cuda_fills90(device, a->m, n);
}

norm_linear_facts heddle__cuda_norm_linear_facts(const norm_linear_plan *plan, const cuda_facts *device) {
    const heddle_norm_linear *a = &plan->a;
    const bool sm90 = takes_sm90(plan, device), plain = a->norm == HEDDLE_NO_NORM;
    const bool z = a->features & HEDDLE_Z; /* is there then in any case */
    const int64_t n = norm_linear_extent(a, 'N');
    const bool gated =
        is_gated(a->activation); /* its gradients have up's errors whole, which the slope of others hides */
    const bool few90 = takes_few90(plan, device), wide = a->dtype == HEDDLE_F32,
               raw = a->dtype == HEDDLE_BF16 && !plain && !z && !gated && !few90 && takes_raw(a, device, sm90, n);
    const bool dw = sm90 && plan->pass == HEDDLE_BACKWARD;
    return (norm_linear_facts){.raw = raw,
                               .dw = dw ? heddle__cuda_shape90(device, GEMM90_dw, n, a->k, a->m, false)
                                        : (gemm90_shape){.shares = 1},
                               .kept = plan->pass == HEDDLE_FORWARD && (a->features & HEDDLE_PREPARED) && (raw || wide),
                               .plain = plain,
                               .gated = gated,
                               .gathers = raw && sm90,
                               .few = !z && !few90 && takes_few(plan, device),
                               .few90 = few90,
                               .sm90 = sm90,
                               .n = n,
                               .kp = (a->k + 7) / 8 * 8,
                               .np = (n + 7) / 8 * 8,
                               .wide = wide,
                               .tf32 = wide && (a->features & HEDDLE_TF32),
                               .dtype = a->dtype == HEDDLE_BF16  ? 0
                                        : a->dtype == HEDDLE_F16 ? 1
                                                                 : 2};
}

static bool takes(const heddle_norm_linear *a, heddle_pass pass, const cuda_facts *device) {
    (void)a, (void)pass, (void)device;
    return true;
}

/* Every array begins at a multiple of 256 bytes. */
static size_t lay_out(const norm_linear_plan *plan, const cuda_facts *device, norm_linear_choice *c) {
    const heddle_norm_linear *a = &plan->a;
    const norm_linear_facts *is = &c->is;
    const bool backward = plan->pass == HEDDLE_BACKWARD, two = is->wide && !is->tf32, raw = !backward && is->raw,
               own = !is->kept;
    const int64_t matrix = a->m * is->kp, weights = is->n * is->kp;
    size_t used = 0;
#define A(type, name, elements)                                                                                        \
    c->at.name = used;                                                                                                 \
    used += ((size_t)(elements) * sizeof(type) + 255) / 256 * 256;
    NORM_LINEAR_ARRAYS
#undef A
    return used;
}

/* The first product names the plan. */
static void plan_products(norm_linear_plan *plan, const cuda_facts *device, norm_linear_choice *c) {
    const heddle_norm_linear *a = &plan->a;
    const bool forward_pass = plan->pass == HEDDLE_FORWARD;
    c->is = heddle__cuda_norm_linear_facts(plan, device);
    plan->reads_prepared = c->is.kept;
    const bool gated = forward_pass && c->is.gated && c->is.sm90 && a->y_stride % 8 == 0;
    const bool raw = forward_pass && c->is.gathers;
    const bool adds = gated || (!c->is.gated && (a->activation || (a->features & HEDDLE_RESIDUAL)));
    const gemm_kernels *kernels = gated ? GATED : raw ? OF_RAW : forward_pass ? GEMMS(fwd) : GEMMS(dx);
    plan->tile_m = plan->tile_n = GEMM_TILE;
    plan->tile_k = gemm80_depth(c->is.wide && !c->is.tf32 ? 2 : 1);
    const norm_linear_call call = {.a = a, .device = device, .is = c->is};
    enum cuda_kernel kernel = c->is.sm90   ? heddle__cuda_gemm90(&call, kernels, a->m, forward_pass ? c->is.n : a->k,
                                                               forward_pass ? a->k : c->is.n, adds, &plan->tile_n)
                              : c->is.tf32 ? kernels->tf32
                                           : kernels->sm80[c->is.dtype];
    if (c->is.few90) {
        kernel = heddle__cuda_few90(&call, &plan->tile_m);
        plan->tile_n = FEW90_COLS;
        plan->tile_k = GEMM90_DEPTH;
    } else if (c->is.few) {
        kernel = few_kernel(a);
        plan->tile_m = few_rows(a);
        plan->tile_n = FEW_COLS;
        plan->tile_k = 64;
    }
    plan->threads = (int)heddle__cuda_kernels[kernel].threads;
    plan->workspace = lay_out(plan, device, c);
    heddle__copy_text(plan->kernel, sizeof plan->kernel, heddle__cuda_kernels[kernel].symbol);
}

/* ------------------------------------------------------------------------------------------------------ launches */

/* y = x·Wᵀ of what was made ready. */
static norm_gemm product_of(const norm_linear_call *c) {
    const heddle_norm_linear *a = c->a;
    return (norm_gemm){.rows = a->m,
                       .cols = c->is.n,
                       .depth = a->k,
                       .a = c->at.z,
                       .a_low = c->at.z_low,
                       .lda = c->is.kp,
                       .b = c->at.w,
                       .b_low = c->at.w_low,
                       .ldb = c->is.kp,
                       .out = c->t->y,
                       .ldo = a->y_stride,
                       .activation = (int32_t)gate_activation(a->activation),
                       .u = c->t->u,
                       .ldu = a->u_stride,
                       .residual = c->t->residual,
                       .ldr = a->residual_stride};
}

/* The activation as a pass behind the product, and where that leaves u: where the caller wants it; else where y will be or, as two halves
 * have no room there, in the workspace. */
static norm_activate activation_apart(const norm_linear_call *c) {
    const heddle_norm_linear_data *t = c->t;
    const bool in_y = !t->u && !c->is.gated;
    return (norm_activate){.u = t->u   ? t->u
                                : in_y ? t->y
                                       : c->at.u,
                           .ldu = t->u   ? c->a->u_stride
                                  : in_y ? c->a->y_stride
                                         : c->is.np,
                           .out = t->y,
                           .ldo = c->a->y_stride,
                           .residual = t->residual,
                           .ldr = c->a->residual_stride};
}

/* The product; behind one that does not form the activation itself a pass of its own. */
static void add_product(norm_linear_call *c, norm_gemm g) {
    const bool fits = heddle__cuda_fits90(c, &g) && !(c->is.gated && g.u && c->a->n % 8), apart = g.activation && !fits;
    const norm_activate behind = activation_apart(c);
    if (heddle__cuda_fits_few90(c, &g)) {
        if (c->is.gated)
            g.cols = c->a->n;
        heddle__cuda_add_few90(c, &g, c->is.gated);
        return;
    }
    if (c->is.gated && fits) {
        g.cols = c->a->n;
        heddle__cuda_add_gated(c, &g);
        return;
    }
    if (g.turns) {
        heddle__cuda_add_gemm(c, OF_RAW, &g, false, false);
        return;
    }
    if (apart) {
        g.activation = 0;
        g.ldo = behind.ldu;
        g.out = (void *)behind.u;
        g.u = NULL;
        g.residual = NULL;
    }
    heddle__cuda_add_gemm(c, GEMMS(fwd), &g, false, false);
    if (apart)
        heddle__cuda_add_activate(c, behind);
}

static bool lets_few(const norm_linear_call *c) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    return c->is.few && aligned16(t->x, a->x_stride, 2) && aligned16(t->w, a->w_stride, 2) &&
           aligned16(t->gamma, 0, 2) && aligned16(t->beta, 0, 2);
}

/* The product's rows are u, which the pass behind it reads. */
static void leave_u(norm_few *p, const norm_activate *behind) {
    p->y = (void *)behind->u;
    p->y_stride = behind->ldu;
    p->u = NULL;
    p->residual = NULL;
    p->activation = 0;
}

/* All in one launch, where a few rows fit into a block, but for an activation of two halves. False: they do not, or the pointers do not
 * allow it. */
static bool add_few(norm_linear_call *c) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    if (!lets_few(c))
        return false;
    const norm_activate behind = activation_apart(c);
    norm_few p = {.x = t->x,
                  .gamma = t->gamma,
                  .beta = t->beta,
                  .w = t->w,
                  .bias = t->bias,
                  .y = t->y,
                  .u = t->u,
                  .residual = t->residual,
                  .mean = t->mean,
                  .rstd = t->rstd,
                  .x_stride = a->x_stride,
                  .w_stride = a->w_stride,
                  .y_stride = a->y_stride,
                  .u_stride = a->u_stride,
                  .residual_stride = a->residual_stride,
                  .m = (int32_t)a->m,
                  .k = (int32_t)a->k,
                  .n = (int32_t)c->is.n,
                  .rms = a->norm == HEDDLE_RMS_NORM,
                  .plain = c->is.plain,
                  .activation = (int32_t)a->activation,
                  .row_blocks = (int32_t)blocks(a->m, FEW_ROWS),
                  .eps = (float)a->eps,
                  .inverse = 1 / (float)a->k};
    if (c->is.gated)
        leave_u(&p, &behind);
    p.vector = aligned16(p.y, p.y_stride, 2) && none_or_aligned16(p.u, p.u_stride, 2) &&
               none_or_aligned16(p.residual, p.residual_stride, 2);
    const int64_t count = p.row_blocks * least_of(few_tiles(p.n), c->device->multiprocessors / p.row_blocks);
    heddle__cuda_add(c, few_kernel(a), count, (uint32_t)few_bytes(few_rows(a), a->k), &(norm_linear_params){.few = p});
    if (c->is.gated)
        heddle__cuda_add_activate(c, behind);
    return true;
}

/* x as it is; the norm is applied where the product is stored. */
static norm_gemm prepare_raw(norm_linear_call *c, norm_rows w) {
    const heddle_norm_linear_data *t = c->t;
    norm_gemm g = product_of(c);
    norm_rows x = heddle__cuda_rows_of_x(c, (norm_rows){0});
    norm_prepare p = {0};
    if (!t->gamma) /* W itself will do */
        w.high = NULL;
    if (c->is.kept)
        w.rows = 0;
    g.a = t->x;
    g.lda = c->a->x_stride;
    g.b = t->gamma ? c->at.w : t->w;
    g.ldb = t->gamma ? c->is.kp : c->a->w_stride;
    g.col_sum = c->at.s;
    g.col_add = c->at.t;
    if (c->is.gathers && heddle__cuda_fits90(c, &g)) {
        g.saved_mean = c->at.mean;
        g.saved_rstd = c->at.rstd;
        g.turns = p.clear = c->at.turns;
        p.zeros = (int32_t)(2 * (blocks(c->a->m, GEMM_TILE) + 1));
        g.rms = x.rms;
        g.eps = x.eps;
        g.inverse = x.inverse;
        x.rows = 0;
    } else {
        g.mean = c->at.mean;
        g.rstd = c->at.rstd;
    }
    p.job[0] = x;
    p.job[1] = w;
    heddle__cuda_add_prepare(c, p);
    return g;
}

/* Whether the z that is multiplied can be the caller's: without columns behind its own. */
static bool multiplies_z(const norm_linear_call *c) {
    return c->t->z && !c->is.wide && c->a->k == c->is.kp && c->a->z_stride == c->a->k && aligned16(c->t->z, c->a->k, 2);
}

/* What `normalise` is for: rows that begin at multiples of 16 bytes, and that a whole block can hold. */
static bool lets_normalise(const norm_linear_call *c, const norm_rows *x) {
    return c->a->k % 8 == 0 && c->a->k <= NORMALISE_THREADS / 32 * NORMALISE_HELD && aligned16(x->in, x->ld, 2) &&
           aligned16(x->high, x->ldp, 2) && aligned16(x->gamma, 0, 2) && aligned16(x->beta, 0, 2);
}

/* z, and W as it is. */
static norm_gemm prepare_normalised(norm_linear_call *c) {
    const heddle_norm_linear_data *t = c->t;
    norm_gemm g = product_of(c);
    void *const z = multiplies_z(c) ? t->z : c->at.z;
    const norm_rows x = heddle__cuda_rows_of_x(c, (norm_rows){.high = z, .gamma = t->gamma, .beta = t->beta});
    g.a = z;
    g.b = t->w;
    g.ldb = c->a->w_stride;
    g.bias = t->bias;
    if ((heddle__cuda_fits90(c, &g) || heddle__cuda_fits_few90(c, &g)) && lets_normalise(c, &x))
        heddle__cuda_add_normalise(c, &x);
    else
        heddle__cuda_add_prepare(c, (norm_prepare){.job = {x}});
    return g;
}

/* x and W as they are. */
static norm_gemm take_plain(const norm_linear_call *c) {
    norm_gemm g = product_of(c);
    g.a = c->t->x;
    g.lda = c->a->x_stride;
    g.b = c->t->w;
    g.ldb = c->a->w_stride;
    g.bias = c->t->bias;
    return g;
}

/* float32: planes of xhat, or of x, and of W∘gamma, scaled. */
static norm_gemm prepare_planes(norm_linear_call *c, norm_rows w) {
    norm_gemm g = product_of(c);
    norm_rows x = heddle__cuda_rows_of_x(c, (norm_rows){.high = c->at.z});
    if (c->is.kept)
        w.rows = 0;
    g.exponent = x.exponent;
    if (c->is.plain) {
        x.packs = 1;
        x.row_exponent = c->at.x_exponent;
        g.row_exponent = c->at.x_exponent;
    }
    heddle__cuda_add_prepare(c, (norm_prepare){.job = {x, w}});
    g.col_exponent = c->at.w_exponent;
    g.col_add = c->at.t;
    return g;
}

static void forward(norm_linear_call *c) {
    c->at.mean = c->t->mean ? c->t->mean : c->at.mean;
    c->at.rstd = c->t->rstd ? c->t->rstd : c->at.rstd;
    if (add_few(c))
        return;
    const norm_gemm g = c->is.raw     ? prepare_raw(c, heddle__cuda_rows_of_w(c))
                        : c->is.wide  ? prepare_planes(c, heddle__cuda_rows_of_w(c))
                        : c->is.plain ? take_plain(c)
                                      : prepare_normalised(c);
    if (c->t->z && !multiplies_z(c))
        heddle__cuda_add_z(c, (norm_z){.x = c->t->x,
                                       .ldx = c->a->x_stride,
                                       .gamma = c->t->gamma,
                                       .beta = c->t->beta,
                                       .mean = c->at.mean,
                                       .rstd = c->at.rstd,
                                       .centred = c->a->norm == HEDDLE_LAYER_NORM,
                                       .out = c->t->z,
                                       .ldo = c->a->z_stride});
    add_product(c, g);
}

static void launch(const norm_linear_choice *choice, norm_linear_call *c) {
    unsigned char *const memory = c->workspace;
#define A(type, name, elements) c->at.name = memory ? (type *)(void *)(memory + choice->at.name) : NULL;
    NORM_LINEAR_ARRAYS
#undef A
    if (c->is.kept)
        heddle__cuda_find_prepared(c, c->t->prepared);
    if (c->pass == HEDDLE_BACKWARD)
        heddle__cuda_products_backward(c);
    else if (c->a->m > 0)
        forward(c);
}

const norm_linear_family heddle__norm_linear_products = {takes, plan_products, launch};

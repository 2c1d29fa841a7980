/* SPDX-License-Identifier: Apache-2.0
 * The launches of norm-linear's backward pass. Pure. */
#include "cuda/norm_linear/family.h"

/* x's rows have scales that are their own, and those of dy's that they meet are taken out of them: the largest product of a row of x and one
 * of dy decides on what is left. Returns the blocks. */
static int32_t scale_of_products(norm_linear_call *c, int32_t *least) {
    norm_rows x = heddle__cuda_rows_of_x(c, (norm_rows){.packs = 1});
    x.row_exponent = c->at.x_exponent;
    x.with = c->at.dy_exponent;
    return (int32_t)heddle__cuda_add_prepare(c, (norm_prepare){.job = {x}, .least = least});
}

/* In float32: the planes of dy, of which every row has its own scale, and W's, as they are measured. */
static norm_rows planes_of_dy(const norm_linear_call *c) {
    const norm_linear_arrays *at = &c->at;
    return (norm_rows){.packs = 1,
                       .in = c->t->dy,
                       .ld = c->a->dy_stride,
                       .rows = c->a->m,
                       .cols = (int32_t)c->is.n,
                       .high = at->dy,
                       .low = c->is.tf32 ? NULL : at->dy_low,
                       .ldp = (int32_t)c->is.np,
                       .row_exponent = at->dy_exponent};
}

static norm_rows planes_of_w(const norm_linear_call *c) {
    return (norm_rows){.packs = 1,
                       .in = c->t->w,
                       .ld = c->a->w_stride,
                       .rows = c->is.n,
                       .cols = (int32_t)c->a->k,
                       .ldp = (int32_t)c->is.kp,
                       .row_exponent = c->at.w_exponent};
}

/* xhat for dw and dgamma, unless dx's last launch can leave it, or the moments alone for dx. In float32 dy and, for dx, W go into
 * planes too: every row of dy has its own scale, which xhat takes out again for dw; W has one for the whole matrix. Without a norm float32
 * alone has something to do, and x stands for xhat. */
static void prepare_backward(norm_linear_call *c, bool product_w, bool given) {
    const norm_linear_arrays *at = &c->at;
    const bool xhat = product_w && (c->is.wide || !(c->t->dx || c->is.plain));
    norm_rows x = heddle__cuda_rows_of_x(c, (norm_rows){.given = given, .high = xhat ? at->z : NULL}), w = {0};
    norm_prepare p = {0};
    if (!xhat && (given || !c->t->dx || c->is.plain))
        x.rows = 0;
    if (c->is.wide && (product_w || c->t->dx)) {
        const norm_rows dy = planes_of_dy(c);
        if (c->t->dx)
            w = planes_of_w(c);
        const int32_t n = (int32_t)heddle__cuda_add_prepare(c, (norm_prepare){.job = {dy, w}, .least = at->least});
        p.of[0] = at->least;
        p.of[1] = at->least + n;
        p.of_blocks[0] = p.of_blocks[1] = n;
        if (c->is.plain && product_w) {
            p.of[0] = at->least + 2 * n;
            p.of_blocks[0] = scale_of_products(c, at->least + 2 * n);
        }
        p.shared = at->shared;
        w.row_exponent = NULL;
        w.shares = 1;
        w.high = at->w;
        w.low = c->is.tf32 ? NULL : at->w_low;
        x.row_exponent = at->dy_exponent;
    }
    if (product_w && c->is.dw.shares > 1) {
        p.clear = at->dw_arrived;
        p.zeros = (int32_t)c->is.dw.tiles;
    }
    p.job[0] = x;
    p.job[1] = w;
    heddle__cuda_add_prepare(c, p);
}

static norm_finish finish_of_x(const norm_linear_call *c, bool product_w) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    norm_finish f = {.dx = t->dx,
                     .z = product_w && !c->is.wide ? c->at.z : NULL,
                     .ldz = c->is.kp,
                     .x = t->x,
                     .gamma = t->gamma,
                     .ldd = a->dx_stride,
                     .ldx = a->x_stride,
                     .rows = a->m,
                     .cols = (int32_t)a->k,
                     .mean = c->at.mean,
                     .rstd = c->at.rstd,
                     .centred = a->norm == HEDDLE_LAYER_NORM};
    f.vector = none_or_aligned16(f.dx, f.ldd, size_of(&c->is)) && aligned16(f.x, f.ldx, size_of(&c->is)) &&
               aligned16(f.gamma, 0, 2);
    f.whole = finish_is_whole((int)size_of(&c->is), f.cols, f.vector);
    return f;
}

/* h = dy·W + dz, to dx. */
static void add_dx(norm_linear_call *c) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    const norm_linear_arrays *at = &c->at;
    norm_gemm g = {.rows = a->m,
                   .cols = a->k,
                   .depth = c->is.n,
                   .a = t->dy,
                   .lda = a->dy_stride,
                   .b = t->w,
                   .ldb = a->w_stride,
                   .out = t->dx,
                   .ldo = a->dx_stride};
    if (c->is.wide) {
        g.a = at->dy;
        g.a_low = at->dy_low;
        g.lda = c->is.np;
        g.b = at->w;
        g.b_low = at->w_low;
        g.ldb = c->is.kp;
        g.row_exponent = at->dy_exponent;
        g.shared_exponent = at->shared + W_SHARED;
    }
    heddle__cuda_add_gemm(c, GEMMS(dx), &g, false, true);
    if (t->dz)
        heddle__cuda_add_z(c, (norm_z){.dz = t->dz, .ldz = a->dz_stride, .out = t->dx, .ldo = a->dx_stride});
}

/* Where dgamma and dbeta are not summed up with dx, the shares that dz has of them, behind so many of dgamma's. Returns how many. */
static int32_t add_z_sums(norm_linear_call *c, bool dgamma, bool dbeta, int32_t in_front) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    if (!t->dz || !(dgamma || dbeta) || a->m == 0)
        return 0;
    const norm_z_sums p = {.x = t->x,
                           .ldx = a->x_stride,
                           .dz = t->dz,
                           .ldz = a->dz_stride,
                           .mean = c->at.mean,
                           .rstd = c->at.rstd,
                           .gamma_part = dgamma ? c->at.dgamma_part + in_front * a->k : NULL,
                           .beta_part = dbeta ? c->at.dbeta_part : NULL,
                           .rows = a->m,
                           .cols = a->k,
                           .parts = z_parts(a),
                           .centred = a->norm == HEDDLE_LAYER_NORM,
                           .vector = aligned16(t->x, a->x_stride, size_of(&c->is)) &&
                                     aligned16(t->dz, a->dz_stride, size_of(&c->is))};
    heddle__cuda_add(c, OF_DTYPE(z_sums)[c->is.dtype], sum_units(a->k) * p.parts, 0,
                     &(norm_linear_params){.z_sums = p});
    return p.parts;
}

/* What backward has to do. */
typedef struct needs {
    bool sums;    /* dgamma and dbeta come with dx, from its rows */
    bool product; /* G = dyᵀ·xhat */
    bool dbias;   /* for its own sake or others' */
} needs;

static needs find_needs(const norm_linear_call *c) {
    const heddle_norm_linear_data *t = c->t;
    needs need = {.sums = !c->is.wide && t->dx && (t->dgamma || t->dbeta) && c->a->k <= SUMMED_ROW};
    need.product = t->dw || (t->dgamma && !need.sums);
    need.dbias = t->dbias || (t->dbeta && !need.sums) || (t->dw && t->beta);
    return need;
}

/* The shares of dbias. */
static norm_sums sums_of_dy(const norm_linear_call *c) {
    return (norm_sums){.a = c->t->dy,
                       .ld = c->a->dy_stride,
                       .rows = c->a->m,
                       .cols = c->is.n,
                       .part = c->at.dbias_part,
                       .parts = (int32_t)sum_parts(c->a->m),
                       .vector = aligned16(c->t->dy, c->a->dy_stride, size_of(&c->is))};
}

/* dx from h, and the shares of dbias, dgamma and dbeta in one launch, and those gradients in the next. summed: the shares of dbias are there. */
static void add_finish(norm_linear_call *c, needs need, bool summed) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    norm_finish f = {0};
    norm_totals totals = {0};
    int64_t units = 0;
    if (t->dx && !c->is.plain) {
        f = finish_of_x(c, need.product);
        f.part = need.sums ? c->at.finish_part : NULL;
        units = row_units(f.rows, finish_team(f.cols, f.whole));
    }
    if (need.dbias && !summed) {
        f.sums = sums_of_dy(c);
        units += sum_units(c->is.n) * f.sums.parts;
    }
    if (need.dbias)
        totals.job[0] = (norm_sums){.ld = c->is.n,
                                    .cols = c->is.n,
                                    .part = c->at.dbias_part,
                                    .parts = (int32_t)sum_parts(a->m),
                                    .out = t->dbias,
                                    .sum = c->at.dbias};
    units = least_of(units, finish_blocks(c->device));
    heddle__cuda_add(c, OF_DTYPE(finish)[c->is.dtype], units, (uint32_t)finish_bytes((int)size_of(&c->is)),
                     &(norm_linear_params){.finish = f});
    norm_sums sum = {.ld = 2 * a->k, .cols = a->k, .part = f.part, .parts = (int32_t)units, .out = t->dgamma};
    if (f.part && t->dgamma)
        totals.job[1] = sum;
    if (f.part && t->dbeta) {
        sum.part = f.part + a->k;
        sum.out = t->dbeta;
        totals.job[2] = sum;
    }
    heddle__cuda_add_totals(c, totals);
}

/* G = dyᵀ·xhat, and from it dw and the shares of dgamma, of which this returns the number. */
static int32_t add_dw(norm_linear_call *c, bool dgamma) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    const norm_linear_arrays *at = &c->at;
    const bool as_it_lies = c->is.plain && !c->is.wide;
    norm_gemm g = {.rows = c->is.n,
                   .cols = a->k,
                   .depth = a->m,
                   .a = t->dy,
                   .lda = a->dy_stride,
                   .b = as_it_lies ? t->x : at->z,
                   .b_low = at->z_low,
                   .ldb = as_it_lies ? a->x_stride : c->is.kp,
                   .out = t->dw,
                   .ldo = a->dw_stride,
                   .gamma = t->gamma,
                   .beta = t->beta,
                   .row_bias = t->dw && t->beta ? at->dbias : NULL,
                   .w = dgamma ? t->w : NULL,
                   .ldx = a->w_stride,
                   .part = dgamma ? at->dgamma_part : NULL};
    if (c->is.wide) {
        g.a = at->dy;
        g.a_low = at->dy_low;
        g.lda = c->is.np;
        g.exponent = c->is.plain ? 0 : xhat_exponent(a->k);
        g.shared_exponent = at->shared + DY_SHARED;
    }
    const bool sm90 = heddle__cuda_add_gemm(c, GEMMS(dw), &g, true, true);
    return (int32_t)(sm90 ? gemm90_sums(blocks(c->is.n, GEMM_TILE)) : gemm80_sums(blocks(c->is.n, GEMM_TILE)));
}

static void linear_backward(norm_linear_call *c, needs need, bool summed) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    norm_linear_arrays *at = &c->at;
    const bool given = t->mean && t->rstd;
    norm_totals last = {0};
    at->mean = given ? t->mean : at->mean;
    at->rstd = given ? t->rstd : at->rstd;
    prepare_backward(c, need.product, given);
    if (t->dx)
        add_dx(c);
    if ((t->dx && !c->is.plain) || need.dbias)
        add_finish(c, need, summed);
    const bool dgamma = t->dgamma && !need.sums, dbeta = t->dbeta && !need.sums;
    const int32_t parts = need.product ? add_dw(c, dgamma) : 0, of_z = add_z_sums(c, dgamma, dbeta, parts);
    if (dgamma)
        last.job[0] =
            (norm_sums){.parts = parts + of_z, .part = at->dgamma_part, .ld = a->k, .cols = a->k, .out = t->dgamma};
    /* dbeta = Wᵀ·dbias + sum_m dz */
    if (dbeta)
        last.job[1] = (norm_sums){.a = t->w,
                                  .ld = a->w_stride,
                                  .rows = c->is.n,
                                  .cols = a->k,
                                  .factor = at->dbias,
                                  .part = of_z ? at->dbeta_part : NULL,
                                  .parts = of_z,
                                  .out = t->dbeta};
    heddle__cuda_add_totals(c, last);
}

/* Where there is an activation, du comes first and takes the place of dy. */
void heddle__cuda_products_backward(norm_linear_call *c) {
    heddle_norm_linear own = *c->a;
    heddle_norm_linear_data t = *c->t;
    const needs need = find_needs(c);
    if (own.activation) {
        const norm_activate p = {.u = t.u,
                                 .ldu = own.u_stride,
                                 .dy = t.dy,
                                 .ldd = own.dy_stride,
                                 .out = c->at.du,
                                 .ldo = c->is.np,
                                 .part = need.dbias ? c->at.dbias_part : NULL};
        heddle__cuda_add_activate(c, p);
        own.dy_stride = c->is.np;
        t.dy = c->at.du;
        c->a = &own;
        c->t = &t;
    }
    linear_backward(c, need, own.activation != 0);
}

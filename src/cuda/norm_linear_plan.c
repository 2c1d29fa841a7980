/* SPDX-License-Identifier: Apache-2.0
 * Which norm-linear kernels run, with which parameters. Pure.
 *
 * bfloat16 multiplies the raw x and applies the norm in the epilogue (docs/design.md, section 4): raw x is exact, xhat rounded
 * is not, and the 8 bits of the result hide what a large mean costs. float16 and float32 have more bits and normalise first. */
#include "../status.h"
#include "device.h"

#include <stdbool.h>
#include <stdio.h>

#define GRID_LIMIT INT64_C(0x7fffffff)

typedef struct arrays {
    uint16_t *z, *z_low;   /* [m, kp]: xhat (or z) for a product */
    uint16_t *w, *w_low;   /* [n, kp] */
    uint16_t *dy, *dy_low; /* [m, np] */
    float *mean, *rstd;    /* [m] */
    float *s, *t;          /* [n] */
    int32_t *dy_exponent, *w_exponent, *shared;
    float *dx_part, *dgamma_part, *dbias_part, *dbeta_part, *dbias;
} arrays;

typedef struct call {
    const heddle_norm_linear *a;
    const norm_linear_device *device;
    const heddle_norm_linear_data *t;
    arrays at;
    int64_t kp, np;
    bool wide, tf32; /* float32; one product */
    int dtype;       /* 0 bf16, 1 f16, 2 f32 */
    bool sm90;       /* the products are Hopper's, as far as the pointers allow */
    norm_linear_launch *launches;
    int count;
} call;

enum { W_SHARED, DY_SHARED }; /* places in arrays.shared */

static int64_t blocks(int64_t n, int64_t each) {
    return (n + each - 1) / each;
}

/* In how many shares the rows of a column sum are taken: by the size alone, so that the bits are always the same. */
static int32_t parts_of(int64_t rows) {
    int64_t parts = (rows + 63) / 64;
    return parts < 1 ? 1 : parts > 64 ? 64 : (int32_t)parts;
}

/* Space for `elements` of `size` bytes from the workspace, or only counted where there is none yet. */
static void *take(unsigned char *base, size_t *used, int64_t elements, size_t size) {
    void *p = base ? base + *used : NULL;
    *used += ((size_t)elements * size + 255) / 256 * 256;
    return p;
}

static size_t lay_out(call *c, heddle_pass pass, unsigned char *base) {
    const heddle_norm_linear *a = c->a;
    size_t used = 0;
    const bool backward = pass == HEDDLE_BACKWARD, two = c->wide && !c->tf32, raw = !backward && c->dtype == 0;
    const int64_t matrix = a->m * c->kp, weights = a->n * c->kp;
    arrays *at = &c->at;
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
    at->shared = take(base, &used, c->wide ? 2 : 0, 4);
    at->dx_part = take(base, &used, 4 * blocks(a->k, GEMM_TILE) * a->m, 4);
    at->dgamma_part = take(base, &used, 2 * blocks(a->n, GEMM_TILE) * a->k, 4);
    at->dbias_part = take(base, &used, parts_of(a->m) * a->n, 4);
    at->dbeta_part = take(base, &used, parts_of(a->n) * a->k, 4);
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

static call call_of(const norm_linear_plan *plan, const norm_linear_device *device) {
    const heddle_norm_linear *a = &plan->a;
    return (call){.a = a,
                  .device = device,
                  .sm90 = takes_sm90(plan, device),
                  .kp = (a->k + 7) / 8 * 8,
                  .np = (a->n + 7) / 8 * 8,
                  .wide = a->dtype == HEDDLE_F32,
                  .tf32 = a->dtype == HEDDLE_F32 && (a->features & HEDDLE_TF32),
                  .dtype = a->dtype == HEDDLE_BF16  ? 0
                           : a->dtype == HEDDLE_F16 ? 1
                                                    : 2};
}

/* Columns of a tile on Hopper: 256, but 128 where so many pairs of tiles fit more evenly into rounds of all clusters; a round of
 * narrow tiles takes a little more than half the time. */
static int64_t width90(const norm_linear_device *device, int64_t rows, int64_t cols) {
    const int64_t clusters = device->multiprocessors / 2, pairs = blocks(rows, 2 * GEMM_TILE);
    const int64_t wide = blocks(pairs * blocks(cols, 256), clusters);
    const int64_t narrow = blocks(pairs * blocks(cols, 128), clusters);
    return 9 * narrow < 16 * wide ? 128 : 256;
}

heddle_status heddle__cuda_plan_norm_linear(norm_linear_plan *plan, const norm_linear_device *device) {
    const heddle_norm_linear *a = &plan->a;
    call c = call_of(plan, device);
    if (device->shared_bytes < GEMM_SHARED)
        return fail(HEDDLE_UNSUPPORTED,
                    "%s: norm-linear needs blocks with %d bytes of shared memory, a block can have %zu", device->name,
                    GEMM_SHARED, device->shared_bytes);
    const int64_t m = blocks(a->m, GEMM_TILE), k = blocks(a->k, GEMM_TILE), n = blocks(a->n, GEMM_TILE);
    if (a->m > GRID_LIMIT || a->n > GRID_LIMIT || m * n > GRID_LIMIT || m * k > GRID_LIMIT || n * k > GRID_LIMIT)
        return fail(HEDDLE_UNSUPPORTED, "m = %lld, k = %lld, n = %lld: more blocks than a CUDA grid holds",
                    (long long)a->m, (long long)a->k, (long long)a->n);
    const bool forward = plan->pass == HEDDLE_FORWARD;
    plan->threads = c.sm90 ? 384 : 128;
    plan->tile_m = GEMM_TILE;
    plan->tile_n = c.sm90 ? width90(device, a->m, forward ? a->n : a->k) : GEMM_TILE;
    plan->tile_k = c.wide && !c.tf32 ? 32 : 64;
    plan->workspace = lay_out(&c, plan->pass, NULL);
    static const char *const dtype[] = {"bf16", "f16", "f32"};
    snprintf(plan->kernel, sizeof plan->kernel, "heddle_norm_linear_%s%s_%s_%s", forward ? "fwd" : "dx",
             c.sm90 && plan->tile_n == 128 ? "_n128" : "", c.tf32 ? "tf32" : dtype[c.dtype], c.sm90 ? "sm90" : "sm80");
    return HEDDLE_OK;
}

/* ------------------------------------------------------------------------------------------------------ launches */

static bool aligned16(const void *p, int64_t ld, size_t size) {
    return (uintptr_t)p % 16 == 0 && (size_t)ld * size % 16 == 0;
}

static void add(call *c, enum norm_linear_kernel kernel, int64_t grid, uint32_t shared,
                const norm_linear_params *params) {
    if (grid > 0)
        c->launches[c->count++] =
            (norm_linear_launch){.kernel = kernel, .grid = (uint32_t)grid, .shared = shared, .params = *params};
}

/* The same kernel of each dtype. */
#define OF_DTYPE(pass)                                                                                                 \
    ((const enum norm_linear_kernel[]){NORM_LINEAR_##pass##_bf16_sm80, NORM_LINEAR_##pass##_f16_sm80,                  \
                                       NORM_LINEAR_##pass##_f32_sm80})

static size_t size_of(const call *c) {
    return c->wide ? 4 : 2;
}

/* xhat is at most sqrt(k): with this exponent it stays below 2^15, and every power of two is exact. */
static int32_t xhat_exponent(int64_t k) {
    int e = 0;
    while (e < 31 && INT64_C(1) << 2 * e < k)
        e++;
    return 14 - e;
}

/* The job of normalising x, with what differs from one use to the other in p. */
static norm_rows rows_of_x(const call *c, norm_rows p) {
    const heddle_norm_linear *a = c->a;
    p.in = c->t->x;
    p.ld = a->x_stride;
    p.rows = a->m;
    p.cols = a->k;
    p.ldp = c->kp;
    p.low = p.high && c->wide && !c->tf32 ? c->at.z_low : NULL;
    p.mean = c->at.mean;
    p.rstd = c->at.rstd;
    p.exponent = c->wide ? xhat_exponent(a->k) : 0;
    p.rms = a->norm == HEDDLE_RMS_NORM;
    p.eps = (float)a->eps;
    return p;
}

/* Blocks that go over rows of so many columns. */
static int64_t row_blocks(int64_t rows, int64_t cols) {
    return cols <= SHORT_ROW ? blocks(rows, SHORT_ROWS) : rows;
}

static void add_prepare(call *c, norm_rows first, norm_rows second) {
    norm_prepare p = {.job = {first, second}, .first_blocks = row_blocks(first.rows, first.cols)};
    for (int x = 0; x < 2; x++) {
        norm_rows *job = &p.job[x];
        job->vector =
            aligned16(job->in, job->ld, size_of(c)) && aligned16(job->gamma, 0, 2) && aligned16(job->beta, 0, 2);
    }
    add(c, OF_DTYPE(prepare)[c->dtype], p.first_blocks + row_blocks(second.rows, second.cols), 0,
        &(norm_linear_params){.prepare = p});
}

/* A product on Hopper: whether it can be, where its operands and its result lie. */
static bool fits90(const call *c, const norm_gemm *p) {
    return c->sm90 && aligned16(p->a, p->lda, 2) && aligned16(p->b, p->ldb, 2) && aligned16(p->out, p->ldo, 2) &&
           (uintptr_t)p->w % 4 == 0;
}

static void add_gemm90(call *c, const enum norm_linear_kernel kernels[11], const norm_gemm *p, bool a_transposed,
                       bool b_transposed) {
    const int64_t width = width90(c->device, p->rows, p->cols), lda = p->lda * 2, ldb = p->ldb * 2;
    norm_linear_launch *l = &c->launches[c->count++];
    *l = (norm_linear_launch){.kernel = kernels[7 + c->dtype + (width == 128 ? 2 : 0)],
                              .shared = GEMM90_SHARED,
                              .sm90 = 1,
                              .params.gemm90.g = *p};
    norm_gemm *g = &l->params.gemm90.g;
    g->row_tiles = blocks(p->rows, GEMM_TILE);
    g->col_tiles = blocks(p->cols, width);
    const int64_t pairs = blocks(g->row_tiles, 2) * g->col_tiles, clusters = c->device->multiprocessors / 2;
    l->grid = (uint32_t)(2 * (pairs < clusters ? pairs : clusters));
    const uint64_t rows = (uint64_t)p->rows, cols = (uint64_t)p->cols, depth = (uint64_t)p->depth;
    l->shapes[0] =
        (tensor_shape){p->a, {a_transposed ? rows : depth, a_transposed ? depth : rows}, {(uint64_t)lda}, 64};
    l->shapes[1] =
        (tensor_shape){p->b, {b_transposed ? cols : depth, b_transposed ? depth : cols}, {(uint64_t)ldb}, 64};
}

static void add_gemm(call *c, const enum norm_linear_kernel kernels[11], norm_gemm p) {
    const bool aligned = aligned16(p.a, p.lda, 2) && aligned16(p.b, p.ldb, 2);
    p.row_tiles = blocks(p.rows, GEMM_TILE);
    p.col_tiles = blocks(p.cols, GEMM_TILE);
    p.pairs = (uintptr_t)p.out % (2 * size_of(c)) == 0 && p.ldo % 2 == 0;
    enum norm_linear_kernel kernel = kernels[c->dtype];
    if (c->tf32)
        kernel = kernels[3];
    else if (!aligned)
        kernel = kernels[4 + c->dtype];
    add(c, kernel, p.row_tiles * p.col_tiles, GEMM_SHARED, &(norm_linear_params){.gemm = p});
}

/* The kernels of one product, for add_gemm. The planes of float32 are always aligned. */
#define GEMMS(pass)                                                                                                    \
    ((const enum norm_linear_kernel[]){                                                                                \
        NORM_LINEAR_##pass##_bf16_sm80, NORM_LINEAR_##pass##_f16_sm80, NORM_LINEAR_##pass##_f32_sm80,                  \
        NORM_LINEAR_##pass##_tf32_sm80, NORM_LINEAR_##pass##_any_bf16_sm80, NORM_LINEAR_##pass##_any_f16_sm80,         \
        NORM_LINEAR_##pass##_f32_sm80, NORM_LINEAR_##pass##_bf16_sm90, NORM_LINEAR_##pass##_f16_sm90,                  \
        NORM_LINEAR_##pass##_n128_bf16_sm90, NORM_LINEAR_##pass##_n128_f16_sm90})

/* out[x] = the sum of `parts` rows of part[x], for one or two x. */
static void add_totals(call *c, norm_sums first, norm_sums second) {
    const norm_totals p = {.job = {first, second}};
    add(c, OF_DTYPE(total)[c->dtype], blocks(first.cols, TOTAL_COLS) + blocks(second.cols, TOTAL_COLS), 0,
        &(norm_linear_params){.totals = p});
}

static void add_sums(call *c, norm_sums p) {
    p.vector = aligned16(p.a, p.ld, size_of(c));
    add(c, OF_DTYPE(partial)[c->dtype], blocks(p.cols, SUM_COLS) * p.parts, 0, &(norm_linear_params){.sums = p});
    add_totals(c, p, (norm_sums){0});
}

static void forward(call *c) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    arrays *at = &c->at;
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
                      .cols = a->k,
                      .gamma = t->gamma,
                      .beta = t->beta,
                      .bias = t->bias,
                      .high = at->w,
                      .low = c->wide && !c->tf32 ? at->w_low : NULL,
                      .ldp = c->kp,
                      .add = at->t};
    if (c->dtype == 0) {
        pack.sum = at->s;
        if (!t->gamma) /* W itself will do */
            pack.high = NULL;
        add_prepare(c, rows_of_x(c, (norm_rows){0}), pack);
        g.a = t->x;
        g.lda = a->x_stride;
        g.b = t->gamma ? at->w : t->w;
        g.ldb = t->gamma ? c->kp : a->w_stride;
        g.mean = at->mean;
        g.rstd = at->rstd;
        g.col_sum = at->s;
        g.col_add = at->t;
    } else if (c->dtype == 1) {
        add_prepare(c, rows_of_x(c, (norm_rows){.high = at->z, .gamma = t->gamma, .beta = t->beta}), (norm_rows){0});
        g.b = t->w;
        g.ldb = a->w_stride;
        g.bias = t->bias;
    } else {
        pack.row_exponent = at->w_exponent;
        add_prepare(c, rows_of_x(c, (norm_rows){.high = at->z}), pack);
        g.exponent = xhat_exponent(a->k);
        g.col_exponent = at->w_exponent;
        g.col_add = at->t;
    }
    if (fits90(c, &g))
        add_gemm90(c, GEMMS(fwd), &g, false, false);
    else
        add_gemm(c, GEMMS(fwd), g);
}

/* xhat for dw and dgamma, unless dx's last launch can leave it, or the moments alone for dx. In float32 dy and, for dx, W go into planes too: every row of dy has
 * its own scale, which xhat takes out again for dw; W has one for the whole matrix. */
static void prepare_backward(call *c, bool product_w, bool given) {
    const heddle_norm_linear *a = c->a;
    const arrays *at = &c->at;
    const bool xhat = product_w && (c->wide || !c->t->dx);
    norm_rows x = rows_of_x(c, (norm_rows){.given = given, .high = xhat ? at->z : NULL}), w = {0};
    if (!xhat && (given || !c->t->dx))
        x.rows = 0;
    if (c->wide && (product_w || c->t->dx)) {
        norm_rows dy = {.packs = 1,
                        .in = c->t->dy,
                        .ld = a->dy_stride,
                        .rows = a->m,
                        .cols = a->n,
                        .high = at->dy,
                        .low = c->tf32 ? NULL : at->dy_low,
                        .ldp = c->np,
                        .row_exponent = at->dy_exponent};
        if (c->t->dx)
            w = (norm_rows){.packs = 1,
                            .in = c->t->w,
                            .ld = a->w_stride,
                            .rows = a->n,
                            .cols = a->k,
                            .ldp = c->kp,
                            .row_exponent = at->w_exponent};
        add_prepare(c, dy, w);
        norm_exponents e = {.of = {at->w_exponent, at->dy_exponent}, .count = {w.rows, a->m}, .shared = at->shared};
        add(c, NORM_LINEAR_exponents_f32_sm80, 2, 0, &(norm_linear_params){.exponents = e});
        w.row_exponent = NULL;
        w.shared_exponent = at->shared + W_SHARED;
        w.high = at->w;
        w.low = c->tf32 ? NULL : at->w_low;
        x.row_exponent = at->dy_exponent;
        x.shared_exponent = at->shared + DY_SHARED;
    }
    add_prepare(c, x, w);
}

static void backward_x(call *c, bool product_w) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    const arrays *at = &c->at;
    const bool centred = a->norm == HEDDLE_LAYER_NORM;
    norm_gemm g = {.rows = a->m,
                   .cols = a->k,
                   .depth = a->n,
                   .a = t->dy,
                   .lda = a->dy_stride,
                   .b = t->w,
                   .ldb = a->w_stride,
                   .out = t->dx,
                   .ldo = a->dx_stride,
                   .mean = at->mean,
                   .rstd = at->rstd,
                   .gamma = t->gamma,
                   .x = t->x,
                   .ldx = a->x_stride,
                   .centred = centred,
                   .part = at->dx_part};
    if (c->wide) {
        g.a = at->dy;
        g.a_low = at->dy_low;
        g.lda = c->np;
        g.b = at->w;
        g.b_low = at->w_low;
        g.ldb = c->kp;
        g.row_exponent = at->dy_exponent;
        g.shared_exponent = at->shared + W_SHARED;
    }
    const bool sm90 = fits90(c, &g);
    if (sm90)
        add_gemm90(c, GEMMS(dx), &g, false, true);
    else
        add_gemm(c, GEMMS(dx), g);
    norm_finish f = {.dx = t->dx,
                     .z = product_w && !c->wide ? at->z : NULL,
                     .ldz = c->kp,
                     .x = t->x,
                     .ldd = a->dx_stride,
                     .ldx = a->x_stride,
                     .rows = a->m,
                     .cols = a->k,
                     .mean = at->mean,
                     .rstd = at->rstd,
                     .part = at->dx_part,
                     .parts = sm90 ? 0 : (int32_t)(2 * blocks(a->k, GEMM_TILE)),
                     .centred = centred};
    f.vector = aligned16(f.dx, f.ldd, size_of(c)) && aligned16(f.x, f.ldx, size_of(c));
    add(c, OF_DTYPE(finish)[c->dtype], row_blocks(a->m, a->k), 0, &(norm_linear_params){.finish = f});
}

/* dbias, for its own sake or others': from dy alone. */
static void add_dbias(call *c) {
    const heddle_norm_linear *a = c->a;
    if (c->t->dbias || c->t->dbeta || (c->t->dw && c->t->beta))
        add_sums(c, (norm_sums){.a = c->t->dy,
                                .ld = a->dy_stride,
                                .rows = a->m,
                                .cols = a->n,
                                .part = c->at.dbias_part,
                                .parts = parts_of(a->m),
                                .out = c->t->dbias,
                                .sum = c->at.dbias});
}

static void add_dbeta(call *c) {
    const heddle_norm_linear *a = c->a;
    if (c->t->dbeta)
        add_sums(c, (norm_sums){.a = c->t->w,
                                .ld = a->w_stride,
                                .rows = a->n,
                                .cols = a->k,
                                .factor = c->at.dbias,
                                .part = c->at.dbeta_part,
                                .parts = parts_of(a->n),
                                .out = c->t->dbeta});
}

/* On Hopper the sums for dbeta, too, come out of dw's tiles. */
static void backward_w90(call *c, norm_gemm *g) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    const int64_t parts = blocks(a->n, GEMM_TILE);
    g->part_beta = t->dbeta ? c->at.dgamma_part + parts * a->k : NULL;
    if (!t->dbeta && !(t->dw && t->beta))
        g->row_bias = NULL;
    add_gemm90(c, GEMMS(dw), g, true, true);
    const norm_sums total = {.parts = (int32_t)parts};
    norm_sums gamma = total, beta = total;
    gamma.cols = t->dgamma ? a->k : 0;
    gamma.part = g->part;
    gamma.out = t->dgamma;
    beta.cols = t->dbeta ? a->k : 0;
    beta.part = g->part_beta;
    beta.out = t->dbeta;
    add_totals(c, gamma, beta);
}

/* G = dyᵀ·xhat, and from it dw and dgamma. */
static void backward_w(call *c) {
    const heddle_norm_linear *a = c->a;
    const heddle_norm_linear_data *t = c->t;
    const arrays *at = &c->at;
    norm_gemm g = {.rows = a->n,
                   .cols = a->k,
                   .depth = a->m,
                   .a = t->dy,
                   .lda = a->dy_stride,
                   .b = at->z,
                   .b_low = at->z_low,
                   .ldb = c->kp,
                   .out = t->dw,
                   .ldo = a->dw_stride,
                   .gamma = t->gamma,
                   .beta = t->beta,
                   .row_bias = at->dbias,
                   .w = t->w,
                   .ldx = a->w_stride,
                   .part = t->dgamma ? at->dgamma_part : NULL};
    if (c->wide) {
        g.a = at->dy;
        g.a_low = at->dy_low;
        g.lda = c->np;
        g.exponent = xhat_exponent(a->k);
        g.shared_exponent = at->shared + DY_SHARED;
    }
    add_dbias(c);
    if (fits90(c, &g)) {
        backward_w90(c, &g);
        return;
    }
    add_gemm(c, GEMMS(dw), g);
    if (t->dgamma)
        add_totals(c,
                   (norm_sums){.cols = a->k,
                               .part = at->dgamma_part,
                               .parts = (int32_t)(2 * blocks(a->n, GEMM_TILE)),
                               .out = t->dgamma},
                   (norm_sums){0});
    add_dbeta(c);
}

static void backward(call *c) {
    const heddle_norm_linear_data *t = c->t;
    arrays *at = &c->at;
    const bool product_w = t->dw || t->dgamma, given = t->mean && t->rstd;
    at->mean = given ? t->mean : at->mean;
    at->rstd = given ? t->rstd : at->rstd;
    prepare_backward(c, product_w, given);
    if (t->dx)
        backward_x(c, product_w);
    if (product_w) {
        backward_w(c);
    } else {
        add_dbias(c);
        add_dbeta(c);
    }
}

int heddle__cuda_norm_linear_launches(const norm_linear_plan *plan, const norm_linear_device *device,
                                      const heddle_norm_linear_data *data, void *workspace,
                                      norm_linear_launch launches[NORM_LINEAR_MAX_LAUNCHES]) {
    call c = call_of(plan, device);
    c.t = data;
    c.launches = launches;
    lay_out(&c, plan->pass, workspace);
    if (plan->pass == HEDDLE_BACKWARD)
        backward(&c);
    else if (c.a->m > 0)
        forward(&c);
    return c.count;
}

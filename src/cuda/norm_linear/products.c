/* SPDX-License-Identifier: Apache-2.0
 * The launches that norm-linear's passes are made of, each with its grid. Pure. */
#include "cuda/norm_linear/family.h"
#include "fields.h"

void heddle__cuda_add(norm_linear_call *c, enum cuda_kernel kernel, int64_t grid, uint32_t shared,
                      const norm_linear_params *params) {
    if (grid > 0)
        c->launches[c->count++] =
            (norm_linear_launch){.kernel = kernel, .grid = (uint32_t)grid, .shared = shared, .params = *params};
}

norm_rows heddle__cuda_rows_of_x(const norm_linear_call *c, norm_rows p) {
    const heddle_norm_linear *a = c->a;
    p.in = c->t->x;
    p.ld = a->x_stride;
    p.rows = a->m;
    p.cols = (int32_t)a->k;
    p.ldp = (int32_t)c->is.kp;
    p.low = p.high && c->is.wide && !c->is.tf32 ? c->at.z_low : NULL;
    p.mean = c->at.mean;
    p.rstd = c->is.plain ? NULL : c->at.rstd;
    p.given |= c->is.plain;
    p.exponent = c->is.wide && !c->is.plain ? xhat_exponent(a->k) : 0;
    p.rms = a->norm != HEDDLE_LAYER_NORM;
    p.eps = (float)a->eps;
    p.inverse = 1 / (float)a->k;
    return p;
}

/* Columns of a tile on Hopper. */
static const int64_t widths90[WIDTHS] = {GEMM90_WIDTHS(WIDTH_OF, )};

/* Of forward, in cycles, as they were measured on an H100 (docs/kernels/cuda-norm-linear.md): a step of 64 terms, where narrow tiles wait for
 * the second-level cache; a tile's results, those of the widest after every tile, of tiles in turn after the last alone; and those with an
 * activation or a residual, of a warpgroup that has them for itself. */
static const int64_t steps90[WIDTHS] = {1030, 770, 692, 565, 549}, results90[WIDTHS] = {1700, 6900, 5500, 3300, 4000};
enum { RICH_RESULTS = 8500, RICH_IN_TURN = 15000 };

static int64_t clusters90(const cuda_facts *device) {
    return device->multiprocessors / 2;
}

static int64_t units90(int64_t rows, int64_t cols, int64_t width) {
    return blocks(rows, 2 * GEMM_TILE) * blocks(cols, width);
}

bool heddle__cuda_fills90(const cuda_facts *device, int64_t rows, int64_t cols) {
    return units90(rows, cols, GEMM90_WIDEST) >= clusters90(device);
}

/* What all clusters take with tiles of the x-th width; of dw in so many shares, of which each leaves its sums and the last of a tile adds
 * them up. */
static int64_t cycles90(const cuda_facts *device, enum gemm90_pass pass, int64_t rows, int64_t cols, int64_t depth,
                        bool adds, int x, int shares) {
    const int64_t width = widths90[x], rounds = blocks(shares * units90(rows, cols, width), clusters90(device)),
                  steps = blocks(blocks(depth, GEMM90_DEPTH), shares);
    if (pass != GEMM90_fwd)
        return rounds * (steps * (4 * width + 60) + 6 * width + 600) +
               (shares > 1 ? rounds * 13 * width + 10 * shares * width + 2000 : 0);
    const int64_t sums = steps * steps90[x], both = (sums + RICH_IN_TURN) / 2;
    if (!gemm90_in_turn(pass, (int)width))
        return rounds * (sums + results90[x] + (adds ? RICH_RESULTS : 0));
    return rounds * (adds && both > sums ? both : sums) + results90[x];
}

gemm90_shape heddle__cuda_shape90(const cuda_facts *device, enum gemm90_pass pass, int64_t rows, int64_t cols,
                                  int64_t depth, bool adds) {
    gemm90_shape best = {.shares = 1};
    int64_t least = INT64_MAX;
    for (int x = 0; x < (pass == GEMM90_raw ? 1 : WIDTHS); x++) {
        if (x > 0 && adds && !gemm90_adds(pass, (int)widths90[x]))
            continue;
        const int64_t units = units90(rows, cols, widths90[x]), rest = units > 0 ? clusters90(device) / units : 1;
        const int64_t most = gemm90_is_shared(pass, (int)widths90[x])
                                 ? least_of(least_of(rest, GEMM90_SHARES), blocks(depth, GEMM90_DEPTH))
                                 : 1;
        for (int shares = 1; shares == 1 || shares <= most; shares++) {
            const int64_t cycles = cycles90(device, pass, rows, cols, depth, adds, x, shares);
            if (cycles >= least)
                continue;
            least = cycles;
            best = (gemm90_shape){.width = x, .shares = shares};
            if (shares > 1) {
                best.tiles = 2 * units;
                best.floats = best.tiles * shares * gemm90_sums_of_tile((int)widths90[x]);
            }
        }
    }
    return best;
}

enum cuda_kernel heddle__cuda_gemm90(const norm_linear_call *c, const gemm_kernels *kernels, int64_t rows, int64_t cols,
                                     int64_t depth, bool adds, int64_t *width) {
    const bool forward = kernels->pass <= GEMM90_gate;
    const int x = heddle__cuda_shape90(c->device, kernels->pass, rows, cols, depth, forward && adds).width;
    *width = widths90[x];
    return kernels->sm90[x][c->is.dtype];
}

static divisor divisor_of(int64_t d) {
    divisor by = {0, 0};
    while (INT64_C(1) << by.shift < d)
        by.shift++;
    by.factor = (uint32_t)((((UINT64_C(1) << by.shift) - (uint64_t)d) << 32) / (uint64_t)d + 1);
    return by;
}

static tile_order order_of(int64_t pairs, int64_t cols) {
    const int64_t panels = blocks(pairs, GEMM90_PANEL), last = pairs - (panels - 1) * GEMM90_PANEL;
    return (tile_order){.units = (uint32_t)(pairs * cols),
                        .panels = (uint32_t)panels,
                        .panel_units = (uint32_t)(GEMM90_PANEL * cols),
                        .last_height = (uint32_t)last,
                        .panel = divisor_of(GEMM90_PANEL * cols),
                        .last = divisor_of(last)};
}

void heddle__cuda_add_normalise(norm_linear_call *c, const norm_rows *x) {
    const int64_t warps = NORMALISE_THREADS / 32, resident = NORMALISE_RESIDENT * c->device->multiprocessors;
    norm_normalise p = {.job = *x};
    while (1 << p.warps_log2 < warps && x->rows << p.warps_log2 < resident * warps / 2 &&
           INT64_C(256) << p.warps_log2 < x->cols)
        p.warps_log2++;
    p.lanes = x->rows < resident * warps ? 32 : normalise_lanes(x->cols);
    heddle__cuda_add(c, c->is.dtype == 0 ? NORM_LINEAR_normalise_bf16_sm90 : NORM_LINEAR_normalise_f16_sm90,
                     least_of(blocks(x->rows << p.warps_log2, warps * (32 / p.lanes)), resident), 0,
                     &(norm_linear_params){.normalise = p});
    c->b_is_there = true;
}

int64_t heddle__cuda_add_prepare(norm_linear_call *c, norm_prepare p) {
    int64_t units = 0;
    for (int x = 0; x < 2; x++) {
        norm_rows *job = &p.job[x];
        job->vector =
            aligned16(job->in, job->ld, size_of(&c->is)) && aligned16(job->gamma, 0, 2) && aligned16(job->beta, 0, 2);
        units += row_units(job->rows, prepare_team(job->cols));
    }
    if (!units) /* neither has rows */
        units = blocks(p.zeros, ROW_THREADS);
    units = least_of(units, prepare_blocks(c->device, &c->is));
    heddle__cuda_add(c, OF_DTYPE(prepare)[c->is.dtype], units, (uint32_t)prepare_bytes((int)size_of(&c->is)),
                     &(norm_linear_params){.prepare = p});
    return units;
}

void heddle__cuda_add_activate(norm_linear_call *c, norm_activate p) {
    const size_t size = size_of(&c->is);
    p.activation = (int32_t)gate_activation(c->a->activation);
    p.rows = c->a->m;
    p.cols = (int32_t)c->a->n;
    p.vector = aligned16(p.u, p.ldu, size) && none_or_aligned16(p.dy, p.ldd, size) && aligned16(p.out, p.ldo, size) &&
               none_or_aligned16(p.residual, p.ldr, size) && (!c->is.gated || aligned16(NULL, c->a->n, size));
    p.parts = (int32_t)sum_parts(p.rows);
    p.lanes_log2 = activate_lanes_log2(p.cols);
    heddle__cuda_add(c, (c->is.gated ? OF_DTYPE(gate) : OF_DTYPE(activate))[c->is.dtype],
                     least_of(activate_blocks(p.rows, p.cols), passing_blocks(c, ACTIVATE_RESIDENT)), 0,
                     &(norm_linear_params){.activate = p});
}

void heddle__cuda_add_z(norm_linear_call *c, norm_z p) {
    const size_t size = size_of(&c->is);
    p.rows = c->a->m;
    p.cols = (int32_t)c->a->k;
    p.vector = aligned16(p.x, p.ldx, size) && aligned16(p.gamma, 0, size) && aligned16(p.beta, 0, size) &&
               none_or_aligned16(p.dz, p.ldz, size) && aligned16(p.out, p.ldo, size);
    heddle__cuda_add(c, OF_DTYPE(z)[c->is.dtype], least_of(z_units(p.rows, p.cols), passing_blocks(c, Z_RESIDENT)), 0,
                     &(norm_linear_params){.z = p});
}

/* A product on Hopper: whether it can be, where its operands and its result lie, and without moments of rows that others have formed. */
bool heddle__cuda_fits90(const norm_linear_call *c, const norm_gemm *p) {
    return c->is.sm90 && !p->mean && aligned16(p->a, p->lda, 2) && aligned16(p->b, p->ldb, 2) &&
           aligned16(p->out, p->ldo, 2) && none_or_aligned16(p->u, p->ldu, 2) &&
           none_or_aligned16(p->residual, p->ldr, 2) && (uintptr_t)p->w % 4 == 0;
}

/* ------------------------------------------------------------------------------------------------------ few rows */

/* Forward of few rows on Hopper. */
typedef struct few90_kind {
    enum cuda_kernel kernels[2];
    int rows, blocks;
} few90_kind;

static const few90_kind few90_kinds[] = {
#define F(pass, rows, blocks) {{NORM_LINEAR_##pass##_bf16_sm90, NORM_LINEAR_##pass##_f16_sm90}, rows, blocks},
    FEW90_KINDS(F)
#undef F
};

/* Terms from which on two clusters with half of the rows each, which read W twice, take less time than tiles of as many rows. */
#define LONG_SUM 2048

/* Does the kind take the rows in so many parts? Each block needs terms, and room to keep the memory busy. */
static bool takes_in_parts(const norm_linear_call *c, const few90_kind *k, int64_t parts) {
    const heddle_norm_linear *a = c->a;
    const int64_t depth = a->k;
    const bool idle = depth >= LONG_SUM && !heddle__cuda_fills90(c->device, a->m, norm_linear_extent(a, 'N'));
    return blocks(a->m, k->rows) == parts && (parts == 1 || idle) && few90_boxes(depth, k->blocks, k->blocks - 1) > 0 &&
           few90_stages(k->rows, k->blocks, depth) >= FEW90_LEAST_STAGES &&
           few90_clusters(c->device->multiprocessors, k->blocks) >= parts;
}

/* The first that takes all rows, or else half of them; NULL: none. */
static const few90_kind *few90_of(const norm_linear_call *c) {
    const size_t kinds = sizeof few90_kinds / sizeof *few90_kinds;
    for (size_t x = 0; x < 2 * kinds; x++)
        if (takes_in_parts(c, &few90_kinds[x % kinds], 1 + (int64_t)(x / kinds)))
            return &few90_kinds[x % kinds];
    return NULL;
}

enum cuda_kernel heddle__cuda_few90(const norm_linear_call *c, int64_t *rows) {
    const few90_kind *k = few90_of(c);
    *rows = k ? k->rows : 0;
    return k ? k->kernels[c->is.dtype] : (enum cuda_kernel)0;
}

bool heddle__cuda_fits_few90(const norm_linear_call *c, const norm_gemm *p) {
    return c->is.few90 && !p->mean && !p->col_sum && aligned16(p->a, p->lda, 2) && aligned16(p->b, p->ldb, 2);
}

/* Of a gated activation cols are those of the result. As many rounds for all clusters as fewest need. */
void heddle__cuda_add_few90(norm_linear_call *c, const norm_gemm *p, bool gated) {
    const few90_kind *k = few90_of(c);
    const int64_t width = gated ? FEW90_COLS / 2 : FEW90_COLS, tiles = blocks(p->cols, width),
                  parts = blocks(p->rows, k->rows),
                  most = few90_clusters(c->device->multiprocessors, k->blocks) / parts,
                  clusters = blocks(tiles, blocks(tiles, most));
    norm_linear_launch *l = &c->launches[c->count++];
    *l = (norm_linear_launch){.kernel = k->kernels[c->is.dtype],
                              .grid = (uint32_t)(k->blocks * parts * clusters),
                              .shared = (uint32_t)few90_bytes(k->rows, k->blocks, p->depth),
                              .sm90 = true,
                              .params.gemm90 = {.g = *p,
                                                .b_is_there = c->b_is_there,
                                                .gated = gated,
                                                .row_blocks = (int32_t)parts,
                                                .stages = few90_stages(k->rows, k->blocks, p->depth)}};
    const uint64_t depth = (uint64_t)p->depth, rows = (uint64_t)p->rows, of_b = (uint64_t)(gated ? 2 : 1) * p->cols;
    l->shapes[0] = (tensor_shape){p->a, {depth, rows}, {(uint64_t)p->lda * 2}, (uint32_t)k->rows};
    l->shapes[1] = (tensor_shape){p->b, {depth, of_b}, {(uint64_t)p->ldb * 2}, (uint32_t)width};
}

/* ---------------------------------------------------------------------------------------------------------- tiles */

/* halves: 2 where B has as many columns again behind those of the result. */
static void add_gemm90(norm_linear_call *c, const gemm_kernels *kernels, const norm_gemm *p, bool a_transposed,
                       bool b_transposed, int halves) {
    int64_t width;
    const enum cuda_kernel kernel =
        heddle__cuda_gemm90(c, kernels, p->rows, halves * p->cols, p->depth, p->activation || p->residual, &width);
    const int64_t lda = p->lda * 2, ldb = p->ldb * 2;
    norm_linear_launch *l = &c->launches[c->count++];
    *l = (norm_linear_launch){
        .kernel = kernel, .shared = (uint32_t)gemm90_bytes((int)width), .sm90 = 1, .params.gemm90.g = *p};
    l->params.gemm90.b_is_there = c->b_is_there;
    norm_gemm *g = &l->params.gemm90.g;
    g->row_tiles = blocks(p->rows, GEMM_TILE);
    g->col_tiles = blocks(p->cols, width / halves);
    g->tiles = order_of(blocks(g->row_tiles, 2), g->col_tiles);
    const int shares = kernels->pass == GEMM90_dw ? c->is.dw.shares : 1;
    if (kernels->pass == GEMM90_dw)
        l->params.gemm90.shares = (norm_shares){
            .count = shares, .units = divisor_of(g->tiles.units), .sums = c->at.dw_sums, .arrived = c->at.dw_arrived};
    l->grid = (uint32_t)(2 * least_of(shares * g->tiles.units, clusters90(c->device)));
    const uint64_t rows = (uint64_t)p->rows, cols = (uint64_t)(halves * p->cols), depth = (uint64_t)p->depth;
    l->shapes[0] =
        (tensor_shape){p->a, {a_transposed ? rows : depth, a_transposed ? depth : rows}, {(uint64_t)lda}, 64};
    l->shapes[1] = (tensor_shape){p->b,
                                  {b_transposed ? cols : depth, b_transposed ? depth : cols},
                                  {(uint64_t)ldb},
                                  (uint32_t)gemm90_b_rows((int)width, b_transposed)};
    if (kernels->pass == GEMM90_fwd || kernels->pass == GEMM90_raw) {
        l->shapes[2] = (tensor_shape){p->out, {cols, rows}, {(uint64_t)p->ldo * 2}, GEMM90_STORED_ROWS};
        l->shapes[3] = (tensor_shape){p->u, {cols, rows}, {(uint64_t)p->ldu * 2}, GEMM90_STORED_ROWS};
    }
}

static void add_gemm80(norm_linear_call *c, const gemm_kernels *kernels, norm_gemm p) {
    const bool aligned = aligned16(p.a, p.lda, 2) && aligned16(p.b, p.ldb, 2); /* so are the planes of float32 */
    p.row_tiles = blocks(p.rows, GEMM_TILE);
    p.col_tiles = blocks(p.cols, GEMM_TILE);
    p.pairs = (uintptr_t)p.out % (2 * size_of(&c->is)) == 0 && p.ldo % 2 == 0;
    p.residual_pairs = (uintptr_t)p.residual % (2 * size_of(&c->is)) == 0 && p.ldr % 2 == 0;
    const enum cuda_kernel kernel = c->is.tf32              ? kernels->tf32
                                    : aligned || c->is.wide ? kernels->sm80[c->is.dtype]
                                                            : kernels->any[c->is.dtype];
    heddle__cuda_add(c, kernel, p.row_tiles * p.col_tiles, GEMM80_BYTES, &(norm_linear_params){.gemm = p});
}

bool heddle__cuda_add_gemm(norm_linear_call *c, const gemm_kernels *kernels, const norm_gemm *p, bool a_transposed,
                           bool b_transposed) {
    const bool sm90 = heddle__cuda_fits90(c, p);
    if (sm90)
        add_gemm90(c, kernels, p, a_transposed, b_transposed, 1);
    else
        add_gemm80(c, kernels, *p);
    return sm90;
}

void heddle__cuda_add_gated(norm_linear_call *c, const norm_gemm *p) {
    add_gemm90(c, GATED, p, false, false, 2);
}

void heddle__cuda_add_totals(norm_linear_call *c, norm_totals p) {
    int64_t units = 0;
    for (int x = 0; x < 3; x++)
        units += total_units(p.job[x].cols);
    heddle__cuda_add(c, OF_DTYPE(total)[c->is.dtype], units, 0, &(norm_linear_params){.totals = p});
}

/* SPDX-License-Identifier: Apache-2.0
 * norm-linear: the normalisation happens while a block of x is packed for the product, so it costs no pass of its own.
 *
 *   forward    y = z·Wᵀ + bias            z in panels of VL rows, Wᵀ in panels of PANEL columns
 *   dx         g = dy·W, whole rows, then dx = rstd·(g∘gamma - mean(g∘gamma) - xhat·mean(g∘gamma∘xhat)) row by row
 *   dw         G = dyᵀ·xhat; dw = G∘gamma + dbias·betaᵀ, dgamma = colsum(W∘G), dbeta = Wᵀ·dbias: no pass over x for
 *              dgamma and dbeta, and no sum that depends on the number of threads
 *
 * How elements lie inside a panel, norm_linear_panels.h and norm_linear_tiles.h say, one of which is used. */
#ifndef HEDDLE_CPU_NORM_LINEAR_H
#define HEDDLE_CPU_NORM_LINEAR_H

#include "norm_linear_strips.h"

#include "norm_linear_direct.h"
#include "norm_linear_prepared.h"

#include <stdio.h>

/* So few rows are one block of forward, where there are panels of W for all threads: each is met once, and packed just before, so that it
 * does not go to memory. */
#if defined(__AVX2__) && VL == 8
#define ONE_BLOCK 192
#elif VL == 16 && !defined(HAVE_BF16_TILES)
#define ONE_BLOCK 1024
#else
#define ONE_BLOCK 0 /* not measured */
#endif

INLINE bool is_one_block(const norm_linear_plan *plan) {
    const heddle_norm_linear *a = &plan->a;
    return plan->pass == HEDDLE_FORWARD && a->m <= ONE_BLOCK && a->n >= 2 * GROUP * PANEL * plan->threads &&
           !has_few_rows(a) && !has_few_columns(a);
}

#define GROUP_SUMS (BLOCK_ROWS * GROUP * PANEL) /* of a product of forward */

static norm_call carve_norm_call(const norm_linear_plan *plan, const heddle_norm_linear_data *t, carver *w) {
    const heddle_norm_linear *a = &plan->a;
    norm_call c = {.a = a, .t = t, .type = (int)a->dtype, .chain = plan->tile_k};
    c.halves = is_gated(a->activation) ? 2 : 1;
    c.k_panels = (a->k + PANEL - 1) / PANEL;
    c.n_panels = (a->n + PANEL - 1) / PANEL;
    c.row_panels = (a->n + VL - 1) / VL;
    c.k_pad = c.k_panels * PANEL;
    const bool backward = plan->pass == HEDDLE_BACKWARD, strips = backward && goes_in_strips(a);
    c.strip_panels = strips ? strip_panels(a, plan->threads) : 0;
    c.streams = STREAMS(c.type) && !backward && a->m * a->n * element_size(c.type) >= STREAM_BYTES;
    c.prepared = prepared_panels(plan, t);
    c.mean = carve_floats(w, a->m + VL);
    c.rstd = carve_floats(w, a->m + VL);
    c.gamma = carve_floats(w, c.k_pad);
    c.beta = carve_floats(w, c.k_pad);
    c.w = carve_floats(w, strips                 ? (a->n + STRIP - 1) / STRIP * strip_of_dy(a->m)
                          : backward             ? c.k_panels * b_panel(a->n)
                          : has_few_rows(a)      ? a->m * c.k_pad
                          : has_few_columns(a)   ? a->n * c.k_pad
                          : goes_direct(a)       ? direct_z(a)
                          : is_one_block(plan)   ? plan->tile_m / VL * a_panel(a->k)
                          : plan->reads_prepared ? 0
                                                 : c.halves * c.n_panels * b_panel(a->k));
    c.sums = carve_floats(w, strips ? (a->m + VL - 1) / VL * VL * c.k_pad : backward ? c.row_panels * VL * c.k_pad : 0);
    c.dbias = carve_floats(w, backward ? c.row_panels * VL : 0);
    c.x_panels = carve_floats(w, backward ? c.k_panels * b_panel(min64(CHUNK_M, a->m)) : 0);
    return c;
}

static norm_space carve_norm_space(const norm_linear_plan *plan, carver *w) {
    bool backward = plan->pass == HEDDLE_BACKWARD;
    int64_t k_pad = (plan->a.k + PANEL - 1) / PANEL * PANEL;
    norm_space s;
    if (backward && goes_in_strips(&plan->a)) {
        const int64_t columns = strip_panels(&plan->a, plan->threads) * PANEL;
        s.a = carve_floats(w, STRIP * columns);
        s.c = carve_floats(w, 2 * columns + STRIP * PANEL);
        s.row = carve_floats(w, k_pad);
        return s;
    }
    const int64_t of_dy = DY_TOGETHER * a_panel(min64(plan->a.m, CHUNK_M));
    const int64_t of_rows = plan->tile_m / VL * a_panel(backward ? min64(plan->a.n, SLICE) : plan->a.k);
    const bool columns = !backward && has_few_columns(&plan->a), few = columns || (!backward && has_few_rows(&plan->a));
    const bool direct = !backward && goes_direct(&plan->a);
    s.a = carve_floats(w, backward                    ? max64(of_rows, of_dy)
                          : few || is_one_block(plan) ? 0
                          : direct                    ? (is_gated(plan->a.activation) ? 2 : 1) * direct_sums(&plan->a)
                                                      : of_rows);
    s.c = carve_floats(w, backward ? plan->tile_m * k_pad
                          : few    ? 0
                                   : (is_gated(plan->a.activation) ? 2 : 1) * GROUP_SUMS);
    s.w = carve_floats(w, is_one_block(plan) && !plan->reads_prepared
                              ? (is_gated(plan->a.activation) ? 2 : 1) * GROUP * b_panel(plan->a.k)
                              : 0);
    s.row = carve_floats(w, columns ? FEW_Z_ROWS * k_pad : k_pad);
    return s;
}

/* ------------------------------------------------------------------------------------------------- statistics */

/* Statistics of all rows (or the caller's; or none yet; without a norm those that change nothing), gamma and beta as floats. Every thread of the team calls it. */
static void prepare_norm(const norm_call *c, const norm_space *s, bool given, bool later) {
    const heddle_norm_linear *a = c->a;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < (later ? 0 : a->m); row++)
        if (given) {
            c->mean[row] = a->norm == HEDDLE_LAYER_NORM ? ((const float *)c->t->mean)[row] : 0;
            c->rstd[row] = a->norm == HEDDLE_NO_NORM ? 1 : ((const float *)c->t->rstd)[row];
        } else {
            row_statistics(c, row, s->row);
        }
#pragma omp single
    {
        for (int64_t e = 0; e < c->k_pad; e++) {
            c->gamma[e] = e < a->k ? 1 : 0;
            c->beta[e] = 0;
        }
        if (c->t->gamma)
            widen_row(TYPE(c), c->t->gamma, a->k, 1, c->gamma);
        if (c->t->beta)
            widen_row(TYPE(c), c->t->beta, a->k, 1, c->beta);
    }
}

/* ---------------------------------------------------------------------------------------------------- forward */

/* One panel of G. */
INLINE float *sums_of(const norm_call *c, int64_t panel) {
    return c->sums + panel * c->row_panels * VL * PANEL;
}

/* Asks for rows that will soon be written (or read and written), so that stores and loads need not wait for the lines. */
INLINE void prefetch_rows(const char *p, int64_t rows, int64_t row_bytes, int64_t bytes) {
    for (int64_t r = 0; r < rows; r++, p += row_bytes)
        for (int64_t x = 0; x < bytes; x += 64)
            __builtin_prefetch(p + x, 1);
}

/* A block of rows times some panels of B. */
typedef struct product {
    const float *a;
    int64_t a_next; /* floats to the next VL rows */
    const float *b, *next;
    int64_t b_next,
        c_next; /* floats to the next panel of B and of C; after these panels of B those at `next` will be needed */
    int64_t c_stride, depth, columns;
    bool add;
} product;

/* C (+)= A·B for rows r .. r+BLOCK_ROWS-1 of a block and a few panels. */
static void multiply_group(const norm_call *c, const product *g, int64_t r, int64_t rows, int64_t panels, float *out) {
    for (int64_t x = 0; x < g->depth; x += c->chain)
        for (int64_t p = 0; p < panels; p++)
            multiply_panels(c, vectors_of(g->columns - p * PANEL), min64(BLOCK_ROWS, rows - r), x,
                            min64(c->chain, g->depth - x), g->a + r / VL * g->a_next, g->a_next, g->b + p * g->b_next,
                            out + p * g->c_next, g->c_stride, g->add || x > 0,
                            next_share(c, g->next + p * g->b_next, g->depth, x, r, rows));
}

/* Row `row` of y from column n0 on, of its sums in each half of W. */
static void finish_row(const norm_call *c, int64_t row, int64_t n0, int64_t columns, float *sums, const float *bias) {
    const heddle_norm_linear *a = c->a;
    char *y = (char *)c->t->y + (row * a->y_stride + n0) * element_size(TYPE(c));
    static const float none[GROUP * PANEL];
    if (!a->activation && !c->t->residual) {
        store_y(c, y, sums, bias, columns);
        return;
    }
    for (int64_t half = 0; half < c->halves; half++)
        for (int64_t e = 0; e < columns; e += VL)
            store(sums + half * GROUP_SUMS + e,
                  load(sums + half * GROUP_SUMS + e) + load(bias + half * GROUP * PANEL + e));
    activate(c, row, n0, sums, sums + GROUP_SUMS, columns);
    if (c->t->residual)
        add_residual(c, row, n0, sums, columns);
    store_y(c, y, sums, none, columns);
}

/* y of a block of rows (z in panels of VL of them) and up to GROUP panels of columns, in each half of W, which lie in w, `apart` floats
 * from each other; written as soon as each few rows are done, so that the writing hides behind the products. */
static void forward_group(const norm_call *c, const float *z, float *sums, const float *w, int64_t apart, int64_t first,
                          int64_t rows, int64_t p0, int64_t panels) {
    const heddle_norm_linear *a = c->a;
    const int64_t n0 = p0 * PANEL, columns = min64(panels * PANEL, a->n - n0), bytes = element_size(TYPE(c));
    const int64_t step = b_panel(a->k);
    float bias[2 * GROUP * PANEL] = {0};
    product g[2];
    for (int64_t half = 0; half < c->halves; half++) {
        if (c->t->bias)
            widen_row(TYPE(c), element_at(c->t->bias, half * a->n + n0, TYPE(c)), columns, 1,
                      bias + half * GROUP * PANEL);
        g[half] = (product){.a = z,
                            .a_next = a_panel(a->k),
                            .b = w + half * apart,
                            .next = half + 1 == c->halves ? w + panels * step : w + (half + 1) * apart,
                            .b_next = step,
                            .c_next = PANEL,
                            .c_stride = GROUP * PANEL,
                            .depth = a->k,
                            .columns = columns};
    }
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
        const int64_t count = min64(BLOCK_ROWS, rows - r);
        if (GROUP == 1 && !c->streams)
            prefetch_rows((const char *)c->t->y + ((first + r) * a->y_stride + n0) * bytes, count, a->y_stride * bytes,
                          columns * bytes);
        if (c->t->residual)
            prefetch_rows((const char *)c->t->residual + ((first + r) * a->residual_stride + n0) * bytes, count,
                          a->residual_stride * bytes, columns * bytes);
        for (int64_t half = 0; half < c->halves; half++)
            multiply_group(c, &g[half], r, rows, panels, sums + half * GROUP_SUMS);
        for (int64_t x = 0; x < count; x++)
            finish_row(c, first + r + x, n0, columns, sums + x * GROUP * PANEL, bias);
    }
}

/* z of one row, for who asked for it: by a pass of its own, which is 1/n of the product's work. */
static void store_z(const norm_call *c, int64_t row, float *buffer) {
    const heddle_norm_linear *a = c->a;
    const float mean = c->mean[row], rstd = c->rstd[row];
    widen_row(TYPE(c), row_of(c->t->x, row, a->x_stride, TYPE(c)), a->k, 1, buffer);
    for (int64_t e = 0; e < a->k; e += VL)
        store(buffer + e, (load(buffer + e) - mean) * rstd * load(c->gamma + e) + load(c->beta + e));
    narrow_row(TYPE(c), buffer, a->k, 1, (char *)c->t->z + row * a->z_stride * element_size(TYPE(c)));
}

/* Every thread of the team calls it. */
static void many_rows_forward(const norm_linear_plan *plan, const norm_call *c, const norm_space *s) {
    const int64_t m = plan->a.m, blocks = (m + plan->tile_m - 1) / plan->tile_m;
    const int64_t groups = (c->n_panels + plan->tile_n - 1) / plan->tile_n, step = b_panel(plan->a.k);
    const float *w = c->prepared ? c->prepared : c->w;
#pragma omp for schedule(dynamic)
    for (int64_t p = 0; p < (c->prepared ? 0 : c->halves * c->n_panels); p++)
        pack_w_transposed(c, p, c->w + p * step);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < blocks * groups; task++) {
        int64_t first = task / groups * plan->tile_m, rows = min64(plan->tile_m, m - first);
        int64_t p0 = task % groups * plan->tile_n, p1 = min64(c->n_panels, p0 + plan->tile_n);
        pack_z(c, first, rows, s->a);
        for (int64_t p = p0; p < p1; p += GROUP)
            forward_group(c, s->a, s->c, w + p * step, c->n_panels * step, first, rows, p, min64(GROUP, p1 - p));
    }
}

/* The same of one block. */
static void one_block_forward(const norm_call *c, const norm_space *s) {
    const int64_t step = b_panel(c->a->k), m = c->a->m;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < m; r += VL)
        pack_z(c, r, min64(VL, m - r), c->w + r / VL * a_panel(c->a->k));
#pragma omp for schedule(dynamic)
    for (int64_t p = 0; p < c->n_panels; p += GROUP) {
        const int64_t panels = min64(GROUP, c->n_panels - p);
        const float *w = c->prepared ? c->prepared + p * step : s->w;
        for (int64_t x = 0; x < c->halves * panels && !c->prepared; x++)
            pack_w_transposed(c, x / panels * c->n_panels + p + x % panels,
                              s->w + (x / panels * GROUP + x % panels) * step);
        forward_group(c, c->w, s->c, w, (c->prepared ? c->n_panels : GROUP) * step, 0, m, p, panels);
    }
}

#ifdef HAVE_BF16_TILES
/* Columns n0 on of y, of a block of W's rows. The last block begins so that all of its rows are there; what it has in common with the one
 * in front is that one's. */
static void direct_block(const norm_call *c, const norm_space *s, int64_t first, int64_t n0) {
    const heddle_norm_linear *a = c->a;
    const int64_t begin = min64(n0, a->n - DIRECT_W), columns = min64(DIRECT_W, a->n - n0);
    const int64_t stride = direct_rows(a), rows = min64(stride, a->m - first);
    float bias[2 * GROUP * PANEL] = {0};
    for (int64_t half = 0; half < c->halves; half++) {
        direct_products(c, row_of(c->t->w, half * a->n + begin, a->w_stride, HEDDLE_BF16), first, rows,
                        s->a + half * direct_sums(a));
        if (c->t->bias)
            widen_row(HEDDLE_BF16, element_at(c->t->bias, half * a->n + n0, HEDDLE_BF16), columns, 1,
                      bias + half * GROUP * PANEL);
    }
    for (int64_t r = 0; r < rows; r += VL) {
        for (int64_t half = 0; half < c->halves; half++)
            direct_turn(s->a + half * direct_sums(a) + r, stride, s->c + half * GROUP_SUMS, DIRECT_W);
        for (int64_t x = 0; x < min64(VL, rows - r); x++) {
            float *sums = s->c + x * DIRECT_W;
            for (int64_t half = 0; half < c->halves && begin < n0; half++)
                memmove(sums + half * GROUP_SUMS, sums + half * GROUP_SUMS + n0 - begin,
                        (size_t)columns * sizeof *sums);
            finish_row(c, first + r + x, n0, columns, sums, bias);
        }
    }
}

/* Every thread of the team calls it. */
static void direct_forward(const norm_call *c, const norm_space *s) {
    const int64_t slices = tile_depths(c->a->k), groups = (c->a->m + VL - 1) / VL;
    const int64_t blocks = (c->a->m + direct_rows(c->a) - 1) / direct_rows(c->a);
    const int64_t columns = (c->a->n + DIRECT_W - 1) / DIRECT_W;
#pragma omp for schedule(static)
    for (int64_t x = 0; x < groups * slices; x++)
        direct_pack_z(c, x / slices * VL, x % slices * TILE_DEPTH);
#pragma omp for schedule(dynamic)
    for (int64_t x = 0; x < blocks * columns; x++)
        direct_block(c, s, x / columns * direct_rows(c->a), x % columns * DIRECT_W);
}
#else
static void direct_forward(const norm_call *c, const norm_space *s) {
    (void)c, (void)s;
}
#endif

static void norm_linear_forward(const norm_linear_plan *plan, const heddle_norm_linear_data *data, void *workspace) {
    const heddle_norm_linear *a = &plan->a;
    carver shared = {workspace, 0};
    const norm_call c = carve_norm_call(plan, data, &shared);
    const size_t each = (plan->workspace - shared.used) / (size_t)plan->threads;
#pragma omp parallel num_threads(plan->threads) if (plan->threads > 1)
    {
        carver w = {(char *)workspace + shared.used + (size_t)thread_index() * each, 0};
        const norm_space s = carve_norm_space(plan, &w);
        begin_products();
        prepare_norm(&c, &s, a->norm == HEDDLE_NO_NORM, has_few_columns(a));
        if (has_few_rows(a))
            few_rows_forward(&c);
        else if (has_few_columns(a))
            few_columns_forward(&c, s.row);
        else if (goes_direct(a))
            direct_forward(&c, &s);
        else if (is_one_block(plan))
            one_block_forward(&c, &s);
        else
            many_rows_forward(plan, &c, &s);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->m; row++) {
            if (data->mean)
                ((float *)data->mean)[row] = c.mean[row];
            if (data->rstd)
                ((float *)data->rstd)[row] = c.rstd[row];
            if (data->z)
                store_z(&c, row, s.row);
        }
        end_streams();
        end_products();
    }
}

/* ---------------------------------------------------------------------------------------------------- backward */

/* g [k] += dz of a row. */
static void add_dz(const norm_call *c, int64_t row, float *g, float *buffer) {
    widen_row(TYPE(c), row_of(c->t->dz, row, c->a->dz_stride, TYPE(c)), c->a->k, 1, buffer);
    for (int64_t e = 0; e < c->a->k; e += VL)
        store(g + e, load(g + e) + load(buffer + e));
}

static void dx_row(const norm_call *c, int64_t row, float *g, float *xhat) {
    const heddle_norm_linear *a = c->a;
    const float mean = c->mean[row], rstd = c->rstd[row];
    const double inverse = 1 / (double)a->k;
    char *dx = (char *)c->t->dx + row * a->dx_stride * element_size(TYPE(c));
    if (a->norm == HEDDLE_NO_NORM) {
        narrow_row(TYPE(c), g, a->k, 1, dx);
        return;
    }
    if (c->t->dz)
        add_dz(c, row, g, xhat);
    widen_row(TYPE(c), row_of(c->t->x, row, a->x_stride, TYPE(c)), a->k, 1, xhat);
    vf s1 = splat(0), s2 = splat(0);
    for (int64_t e = 0; e < a->k; e += VL) {
        vf x = (load(xhat + e) - mean) * rstd, t = load(g + e) * load(c->gamma + e); /* gamma is 0 in the padding */
        if (a->k - e < VL)
            for (int l = (int)(a->k - e); l < VL; l++)
                x[l] = t[l] = 0;
        store(xhat + e, x);
        store(g + e, t);
        s1 += t;
        s2 += t * x;
    }
    const float c1 = a->norm == HEDDLE_RMS_NORM ? 0 : (float)(sum_lanes(s1) * inverse);
    const float c2 = (float)(sum_lanes(s2) * inverse);
    for (int64_t e = 0; e < a->k; e += VL)
        store(g + e, rstd * (load(g + e) - c1 - load(xhat + e) * c2));
    narrow_row(TYPE(c), g, a->k, 1, dx);
}

/* g [rows][k_pad] (+)= dy·W over the columns x .. x+depth-1 of dy. */
static void add_slice(const norm_call *c, const norm_space *s, int64_t first, int64_t rows, int64_t x, int64_t depth) {
    pack_dy_slice(c, first, rows, x, depth, s->a);
    for (int64_t p = 0; p < c->k_panels; p += GROUP) {
        const int64_t panels = min64(GROUP, c->k_panels - p);
        const float *next = p + panels < c->k_panels ? slice_of_w(c, p + panels, x) : slice_of_w(c, 0, x + depth);
        const product g = {.a = s->a,
                           .a_next = a_panel(depth),
                           .b = slice_of_w(c, p, x),
                           .next = next,
                           .b_next = b_panel(c->a->n),
                           .c_next = PANEL,
                           .c_stride = c->k_pad,
                           .depth = depth,
                           .columns = c->a->k - p * PANEL,
                           .add = x > 0};
        for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
            float *out = s->c + r * c->k_pad + p * PANEL;
            if (GROUP == 1 && x > 0)
                prefetch_rows((const char *)out, min64(BLOCK_ROWS, rows - r), c->k_pad * 4, 4 * PANEL * panels);
            multiply_group(c, &g, r, rows, panels, out);
        }
    }
}

static void dx_task(const norm_call *c, const norm_space *s, int64_t first, int64_t rows) {
    for (int64_t x = 0; x < c->a->n; x += SLICE)
        add_slice(c, s, first, rows, x, min64(SLICE, c->a->n - x));
    for (int64_t r = 0; r < rows; r++)
        dx_row(c, first + r, s->c + r * c->k_pad, s->row);
}

/* G += dyᵀ·xhat over one chunk of rows, for the rows of G from row panel r0 to r1 (those of dyᵀ are packed) and a few panels of its
 * columns from kp on. */
static void add_to_sums(const norm_call *c, const float *dy, int64_t rows, int64_t r0, int64_t r1, int64_t kp,
                        int64_t panels, bool add) {
    const int64_t g_rows = min64(r1 * VL, c->a->n) - r0 * VL;
    const float *x = c->x_panels + kp * b_panel(rows);
    const product g = {.a = dy,
                       .a_next = a_panel(rows),
                       .b = x,
                       .next = x + panels * b_panel(rows),
                       .b_next = b_panel(rows),
                       .c_next = sums_of(c, 1) - sums_of(c, 0),
                       .c_stride = PANEL,
                       .depth = rows,
                       .columns = c->a->k - kp * PANEL,
                       .add = add};
    for (int64_t r = 0; r < g_rows; r += BLOCK_ROWS) {
        float *sums = sums_of(c, kp) + (r0 * VL + r) * PANEL;
        if (GROUP == 1)
            prefetch_rows((const char *)sums, 1, 0, 4 * PANEL * min64(BLOCK_ROWS, g_rows - r));
        multiply_group(c, &g, r, g_rows, panels, sums);
    }
}

/* G += dyᵀ·xhat over one chunk of rows. Every thread of the team calls it. */
static void add_chunk(const norm_call *c, const norm_space *s, int64_t threads, int64_t first, int64_t rows) {
#pragma omp for schedule(dynamic)
    for (int64_t p = 0; p < c->k_panels; p++)
        pack_xhat(c, first, rows, p);
    /* A few row panels of dy stay in the second-level cache while all of xhat streams past them. */
    const int64_t wanted = threads > 1 ? 4 * threads : 1,
                  per_task = clamp64((c->row_panels + wanted - 1) / wanted, 1, DY_TOGETHER);
    const int64_t groups = (c->row_panels + per_task - 1) / per_task;
    const int64_t divisions = clamp64((wanted + groups - 1) / groups, 1, c->k_panels);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < groups * divisions; task++) {
        const int64_t r0 = task / divisions * per_task, r1 = min64(c->row_panels, r0 + per_task), x = task % divisions;
        const int64_t end = c->k_panels * (x + 1) / divisions;
        pack_dy(c, first, rows, r0, r1 - r0, x == 0, s->a);
        for (int64_t kp = c->k_panels * x / divisions; kp < end; kp += GROUP)
            add_to_sums(c, s->a, rows, r0, r1, kp, min64(GROUP, end - kp), first > 0);
    }
}

/* dw, dgamma and dbeta of one panel of columns. */
static void finish_weights(const norm_call *c, int64_t panel) {
    const heddle_norm_linear *a = c->a;
    const int64_t k0 = panel * PANEL, columns = min64(PANEL, a->k - k0), bytes = element_size(TYPE(c));
    column_sums dgamma = {{0}, {0}}, dbeta = {{0}, {0}};
    const int64_t together = sum_rows(a->n);
    float dw[PANEL];
    for (int64_t r = 0; r < a->n; r++) {
        const float *g = sums_of(c, panel) + r * PANEL;
        for (int64_t x = 0; x < columns; x += VL) {
            const vf w = load_w(c, panel, r, x);
            store(dgamma.part + x, load(dgamma.part + x) + w * load(g + x));
            store(dbeta.part + x, load(dbeta.part + x) + w * c->dbias[r]);
            store(dw + x, load(g + x) * load(c->gamma + k0 + x) + c->dbias[r] * load(c->beta + k0 + x));
        }
        if (c->t->dw) {
            char *out = (char *)c->t->dw + (r * a->dw_stride + k0) * bytes;
            prefetch_rows(out + 8 * a->dw_stride * bytes, 1, 0, columns * bytes);
            narrow_row(TYPE(c), dw, columns, 1, out);
        }
        if (r % together == together - 1) {
            flush_sums(&dgamma);
            flush_sums(&dbeta);
        }
    }
    flush_sums(&dgamma);
    flush_sums(&dbeta);
    if (c->t->dz)
        sum_dz(c, k0, columns, &dgamma, &dbeta);
    if (c->t->dgamma)
        narrow_row(TYPE(c), dgamma.all, columns, 1, (char *)c->t->dgamma + k0 * element_size(TYPE(c)));
    if (c->t->dbeta)
        narrow_row(TYPE(c), dbeta.all, columns, 1, (char *)c->t->dbeta + k0 * element_size(TYPE(c)));
}

/* Every thread of the team calls it, or the next one. */
static void panels_backward(const norm_linear_plan *plan, const norm_call *c, bool weights, const norm_space *s) {
    const int64_t m = plan->a.m, blocks = (m + plan->tile_m - 1) / plan->tile_m;
#pragma omp for schedule(dynamic)
    for (int64_t p = 0; p < c->k_panels; p++)
        pack_w(c, p);
    if (c->t->dx) {
#pragma omp for schedule(dynamic)
        for (int64_t x = 0; x < blocks; x++)
            dx_task(c, s, x * plan->tile_m, min64(plan->tile_m, m - x * plan->tile_m));
    }
    if (weights) {
        norm_call wide = *c; /* xhat would be rounded */
        wide.widens = few_results(plan);
        for (int64_t first = 0; first < m; first += CHUNK_M)
            add_chunk(&wide, s, plan->threads, first, min64(CHUNK_M, m - first));
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < c->k_panels; p++)
            finish_weights(c, p);
    }
}

static void strips_backward(const norm_call *c, bool weights, const norm_space *s) {
    add_strips(c, weights, s);
    if (!c->t->dx)
        return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < c->a->m; row++)
        dx_row(c, row, c->sums + row * c->k_pad, s->row);
}

static void linear_backward(const norm_linear_plan *plan, const heddle_norm_linear_data *data, void *workspace) {
    const heddle_norm_linear *a = &plan->a;
    carver shared = {workspace, 0};
    const norm_call c = carve_norm_call(plan, data, &shared);
    const size_t each = (plan->workspace - shared.used) / (size_t)plan->threads;
    const bool weights = data->dw || data->dgamma || data->dbeta || data->dbias;
    if (a->m == 0) {
        memset(c.sums, 0, sizeof(float) * (size_t)(c.row_panels * VL * c.k_pad));
        memset(c.dbias, 0, sizeof(float) * (size_t)(c.row_panels * VL));
    }
#pragma omp parallel num_threads(plan->threads) if (plan->threads > 1)
    {
        carver w = {(char *)workspace + shared.used + (size_t)thread_index() * each, 0};
        const norm_space s = carve_norm_space(plan, &w);
        begin_products();
        prepare_norm(&c, &s, data->mean || a->norm == HEDDLE_NO_NORM, false);
        if (c.strip_panels)
            strips_backward(&c, weights, &s);
        else
            panels_backward(plan, &c, weights, &s);
        end_products();
    }
    if (data->dbias)
        narrow_row(c.type, c.dbias, a->n, 1, data->dbias);
}

/* Bytes of du, which then stands for dy. */
static size_t du_bytes(const heddle_norm_linear *a) {
    const size_t bytes = (size_t)(a->m * norm_linear_extent(a, 'N') * element_size((int)a->dtype));
    return a->activation ? (bytes + 63) / 64 * 64 : 0;
}

/* The problem that du makes of one with an activation. */
static heddle_norm_linear before_activation(const heddle_norm_linear *a) {
    heddle_norm_linear own = *a;
    own.dy_stride = own.n = norm_linear_extent(a, 'N');
    own.activation = HEDDLE_NO_ACTIVATION;
    return own;
}

static void norm_linear_backward(const norm_linear_plan *plan, const heddle_norm_linear_data *data, void *workspace) {
    norm_linear_plan own = *plan;
    heddle_norm_linear_data t = *data;
    const size_t bytes = du_bytes(&plan->a);
    if (!plan->a.activation) {
        linear_backward(plan, data, workspace);
        return;
    }
    form_du(&plan->a, data, plan->threads, workspace);
    own.workspace -= bytes;
    own.a = before_activation(&plan->a);
    t.dy = workspace;
    linear_backward(&own, &t, (char *)workspace + bytes);
}

/* -------------------------------------------------------------------------------------------------------- plan */

/* Rows of a block: at most `most`, at least half of them, so that the thread with the most blocks has the fewest rows. */
static int64_t rows_to_share(int64_t m, int64_t most, int64_t threads) {
    int64_t best = most / VL * VL, least = INT64_MAX;
    for (int64_t rows = best, half = best / 2; rows > half; rows -= VL) {
        const int64_t blocks = (m + rows - 1) / rows, load = min64(m, (blocks + threads - 1) / threads * rows);
        if (load < least) {
            least = load;
            best = rows;
        }
    }
    return best;
}

static void plan_product(norm_linear_plan *plan) {
    const heddle_norm_linear *a = &plan->a;
    const bool backward = plan->pass == HEDDLE_BACKWARD;
    static const char *const types[] = {"f32", "bf16", "f16", "f64"};
    snprintf(plan->kernel, sizeof plan->kernel, "heddle_norm_linear_%s_%s_%s", backward ? "bwd" : "fwd",
             types[a->dtype], ISA_NAME);
    /* There should be a few blocks for every thread. */
    const int64_t share = a->m / (2 * plan->threads) + 1, fits = max64(rows_that_fit(a->k, backward), VL);
    plan->tile_m = rows_to_share(a->m, min64(fits, share + VL - 1), plan->threads);
    if (is_one_block(plan))
        plan->tile_m = (a->m + VL - 1) / VL * VL;
    int64_t blocks = (a->m + plan->tile_m - 1) / plan->tile_m, panels = (a->n + PANEL - 1) / PANEL;
    int64_t groups = clamp64(4 * plan->threads / max64(1, blocks), 1, panels);
    plan->tile_n = (panels + groups - 1) / groups;
    const int64_t depth[] = {DEPTH, DEPTH_BACK}; /* the same on some instruction sets */
    /* In float32 the rounding of a long chain is all of the error; of 16-bit results it is nothing. */
    const int64_t few[] = {SHORT_CHAIN, SHORT_BACK};
    plan->tile_k = few_results(plan) || a->dtype == HEDDLE_F32 ? few[backward] : depth[backward];
    carver shared = {0}, each = {0};
    carve_norm_call(plan, NULL, &shared);
    carve_norm_space(plan, &each);
    plan->workspace = shared.used + each.used * (size_t)plan->threads;
}

static void plan_norm_linear(norm_linear_plan *plan) {
    const heddle_norm_linear given = plan->a;
    if (plan->pass == HEDDLE_FORWARD || !given.activation) {
        plan_product(plan);
        return;
    }
    plan->a = before_activation(&given);
    plan_product(plan);
    plan->a = given;
    plan->workspace += du_bytes(&given);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * norm-linear: the normalisation happens while a block of x is packed for the product, so it costs no pass of its own.
 *
 *   forward    y = z·Wᵀ + bias            z in panels of VL rows, Wᵀ in panels of LANES columns
 *   dx         g = dy·W, whole rows, then dx = rstd·(g∘gamma - mean(g∘gamma) - xhat·mean(g∘gamma∘xhat)) row by row
 *   dw         G = dyᵀ·xhat; dw = G∘gamma + dbias·betaᵀ, dgamma = colsum(W∘G), dbeta = Wᵀ·dbias: no pass over x for
 *              dgamma and dbeta, and no sum that depends on the number of threads
 *
 * Inside a panel the elements lie [sum index][VL or LANES], in the order in which the product reads them. */
#ifndef HEDDLE_CPU_NORM_LINEAR_H
#define HEDDLE_CPU_NORM_LINEAR_H

#include "threads.h"
#include "tile.h"

#include <stdio.h>

#define DEPTH 1024  /* sum indices per product: a panel of B then stays in the second-level cache */
#define SLICE 512   /* the same for dx, where a slice of dy for a whole block of rows stays there, too */
#define CHUNK_M 512 /* rows of x and dy that are packed at a time for dw */

typedef struct norm_call {
    const heddle_norm_linear *a;
    const heddle_norm_linear_data *t;
    int type;
    int64_t k_panels, n_panels, k_pad; /* panels of LANES columns */
    int64_t row_panels;                /* of n in panels of VL */
    float *mean, *rstd, *gamma, *beta; /* float copies; gamma and beta padded with zeros */
    float *w;                          /* panels of W or Wᵀ */
    float *sums, *dbias;               /* backward: G in panels [n][LANES], [row_panels·VL] */
    float *x_panels, *dy_panels;       /* backward: a chunk of rows */
} norm_call;

typedef struct norm_space {
    float *a; /* panels of z or dy */
    float *c; /* forward: [tile_m][LANES]; backward: [tile_m][k_pad] */
    float *row;
} norm_space;

static norm_call carve_norm_call(const norm_linear_plan *plan, const heddle_norm_linear_data *t, carver *w) {
    const heddle_norm_linear *a = &plan->a;
    norm_call c = {.a = a, .t = t, .type = (int)a->dtype};
    c.k_panels = (a->k + LANES - 1) / LANES;
    c.n_panels = (a->n + LANES - 1) / LANES;
    c.row_panels = (a->n + VL - 1) / VL;
    c.k_pad = c.k_panels * LANES;
    bool backward = plan->pass == HEDDLE_BACKWARD;
    c.mean = carve_floats(w, a->m + VL);
    c.rstd = carve_floats(w, a->m + VL);
    c.gamma = carve_floats(w, c.k_pad);
    c.beta = carve_floats(w, c.k_pad);
    c.w = carve_floats(w, backward ? c.k_panels * a->n * LANES : c.n_panels * a->k * LANES);
    c.sums = carve_floats(w, backward ? a->n * c.k_pad : 0);
    c.dbias = carve_floats(w, backward ? c.row_panels * VL : 0);
    c.x_panels = carve_floats(w, backward ? min64(CHUNK_M, a->m) * c.k_pad : 0);
    c.dy_panels = carve_floats(w, backward ? min64(CHUNK_M, a->m) * c.row_panels * VL : 0);
    return c;
}

static norm_space carve_norm_space(const norm_linear_plan *plan, carver *w) {
    bool backward = plan->pass == HEDDLE_BACKWARD;
    int64_t k_pad = (plan->a.k + LANES - 1) / LANES * LANES;
    norm_space s;
    s.a = carve_floats(w, plan->tile_m * (backward ? min64(plan->a.n, SLICE) : plan->a.k));
    s.c = carve_floats(w, plan->tile_m * (backward ? k_pad : LANES));
    s.row = carve_floats(w, k_pad);
    return s;
}

/* Where the ISA multiplies pairs of bfloat16 (twice as many a second), panels are turned into pairs of sum indices. */
#ifdef HAVE_BF16_DOT
INLINE bool uses_pairs(const norm_call *c) {
    return c->type == HEDDLE_BF16;
}
#else
INLINE bool uses_pairs(const norm_call *c) {
    (void)c;
    return false;
}
#define gemm_pairs gemm_streaming /* never called */
#endif

/* [depth][width] floats -> [(depth + 1)/2][width] pairs of bfloat16, the even index in the low half; in place. */
static void make_pairs(const norm_call *c, float *panel, int64_t depth, int64_t width) {
    if (!uses_pairs(c))
        return;
    for (int64_t x = 0; x < depth; x += 2)
        for (int64_t w = 0; w < width; w += VL) {
            const float *p = panel + x * width + w;
            const vu low = __builtin_convertvector(bf16_narrow(load(p)), vu);
            const vu high = __builtin_convertvector(bf16_narrow(x + 1 < depth ? load(p + width) : splat(0)), vu);
            store(panel + x / 2 * width + w, (vf)(low | high << 16));
        }
}

/* Part `share` of `shares` of the panel that is needed next, to be asked for during products of `steps` blocks of rows times sum
 * indices. A panel that there is not may be asked for: that has no effect. */
INLINE gemm_ahead share_of(const float *next, int64_t floats, int64_t share, int64_t shares, int64_t steps) {
    const int64_t bytes = (floats * 4 + shares - 1) / shares;
    return (gemm_ahead){(const char *)next + share * bytes, (bytes + steps - 1) / steps};
}

/* C (+)= A·B over sum indices first .. first+depth-1 of two panels; `first` is even. */
static void multiply_panels(const norm_call *c, int vectors, int64_t rows, int64_t first, int64_t depth, const float *a,
                            const float *b, float *out, int64_t out_stride, bool add, gemm_ahead ahead) {
    if (uses_pairs(c))
        gemm_pairs(vectors, rows, (depth + 1) / 2, (gemm_a){a + first / 2 * VL, 1, VL}, b + first / 2 * LANES, LANES,
                   out, out_stride, add, ahead);
    else
        gemm_streaming(vectors, rows, depth, (gemm_a){a + first * VL, 1, VL}, b + first * LANES, LANES, out, out_stride,
                       add, ahead);
}

INLINE const char *row_of(const void *p, int64_t row, int64_t stride, int type) {
    return element_at(p, row * stride, type);
}

INLINE float sum_lanes(vf x) {
    float r = 0;
    for (int l = 0; l < VL; l++)
        r += x[l];
    return r;
}

/* ------------------------------------------------------------------------------------------------- statistics */

/* Mean, then the mean square of what is left: nothing cancels. Sums are taken from the row's first element, so that a mean
 * that is large beside the deviation keeps its low bits. */
static void row_statistics(const norm_call *c, int64_t row, float *buffer) {
    const int64_t k = c->a->k;
    widen_row(c->type, row_of(c->t->x, row, c->a->x_stride, c->type), k, 1, buffer);
    const float inverse = 1 / (float)k;
    float mean = 0, rest = 0;
    if (c->a->norm == HEDDLE_LAYER_NORM) {
        vf sum = splat(0);
        for (int64_t e = 0; e < k; e += VL) {
            vf x = load(buffer + e) - buffer[0];
            if (k - e < VL)
                for (int l = (int)(k - e); l < VL; l++)
                    x[l] = 0;
            sum += x;
        }
        mean = buffer[0] + sum_lanes(sum) * inverse;
    }
    vf squares = splat(0), sum = splat(0);
    for (int64_t e = 0; e < k; e += VL) {
        vf x = load(buffer + e) - mean;
        if (k - e < VL)
            for (int l = (int)(k - e); l < VL; l++)
                x[l] = 0;
        sum += x;
        squares += x * x;
    }
    if (c->a->norm == HEDDLE_LAYER_NORM)
        rest = sum_lanes(sum) * inverse; /* what rounding left of the mean */
    float variance = sum_lanes(squares) * inverse - rest * rest;
    c->mean[row] = mean + rest;
    c->rstd[row] = (float)(1 / sqrt((double)variance + c->a->eps));
}

/* Statistics of all rows (or the caller's), gamma and beta as floats. Every thread of the team calls it. */
static void prepare_norm(const norm_call *c, const norm_space *s, bool given) {
    const heddle_norm_linear *a = c->a;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->m; row++)
        if (given) {
            c->mean[row] = a->norm == HEDDLE_RMS_NORM ? 0 : ((const float *)c->t->mean)[row];
            c->rstd[row] = ((const float *)c->t->rstd)[row];
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
            widen_row(c->type, c->t->gamma, a->k, 1, c->gamma);
        if (c->t->beta)
            widen_row(c->type, c->t->beta, a->k, 1, c->beta);
    }
}

/* ---------------------------------------------------------------------------------------------------- forward */

static void pack_w_transposed(const norm_call *c, int64_t panel) {
    const void *rows[LANES];
    int64_t count = min64(LANES, c->a->n - panel * LANES);
    for (int64_t x = 0; x < count; x++)
        rows[x] = row_of(c->t->w, panel * LANES + x, c->a->w_stride, c->type);
    pack_transposed(c->type, rows, 0, count, c->a->k, 1, c->w + panel * LANES * c->a->k, LANES);
    make_pairs(c, c->w + panel * LANES * c->a->k, c->a->k, LANES);
}

/* Rows first .. first+count-1 of x, normalised, as panels [k][VL]. */
static void pack_z(const norm_call *c, int64_t first, int64_t count, float *out) {
    const int64_t k = c->a->k;
    for (int64_t p = 0; p < count; p += VL, out += k * VL) {
        const void *rows[VL];
        int64_t lanes_used = min64(VL, count - p);
        for (int64_t x = 0; x < lanes_used; x++)
            rows[x] = row_of(c->t->x, first + p + x, c->a->x_stride, c->type);
        pack_transposed(c->type, rows, 0, lanes_used, k, 1, out, VL);
        const vf mean = load(c->mean + first + p), rstd = load(c->rstd + first + p);
        for (int64_t e = 0; e < k; e++)
            store(out + e * VL, (load(out + e * VL) - mean) * rstd * c->gamma[e] + c->beta[e]);
        make_pairs(c, out, k, VL);
    }
}

/* For the products of rows r .. r+VL-1 of a block with a panel that is `depth` deep: their share of the next panel. */
INLINE gemm_ahead next_share(const norm_call *c, const float *next, int64_t depth, int64_t r, int64_t rows) {
    const int64_t floats = LANES * (uses_pairs(c) ? depth / 2 : depth);
    return share_of(next, floats, r / VL, (rows + VL - 1) / VL, max64(1, floats / LANES) * (VL / GEMM_ROWS_3));
}

INLINE int vectors_of(int64_t columns) {
    return (int)((min64(LANES, columns) + VL - 1) / VL);
}

/* One panel of G. */
INLINE float *sums_of(const norm_call *c, int64_t panel) {
    return c->sums + panel * c->a->n * LANES;
}

/* Asks for rows that will soon be written, so that the stores need not wait for the lines. */
INLINE void prefetch_rows(const char *p, int64_t rows, int64_t row_bytes, int64_t bytes) {
    for (int64_t r = 0; r < rows; r++, p += row_bytes)
        for (int64_t x = 0; x < bytes; x += 64)
            __builtin_prefetch(p + x, 1);
}

/* y of a few rows of one panel: block [rows][LANES] + bias. */
static void write_y(const norm_call *c, int64_t first, int64_t rows, int64_t n0, int64_t columns, const float *bias,
                    float *block) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t x = 0; x < columns; x += VL)
            store(block + r * LANES + x, load(block + r * LANES + x) + load(bias + x));
        narrow_row(c->type, block + r * LANES, columns, 1,
                   (char *)c->t->y + ((first + r) * c->a->y_stride + n0) * element_size(c->type));
    }
}

/* y of a block of rows (z in panels of VL of them) and one panel of columns; written as soon as each few rows are done, so that
 * the writing hides behind the products. */
static void forward_panel(const norm_call *c, const norm_space *s, int64_t first, int64_t rows, int64_t panel) {
    const heddle_norm_linear *a = c->a;
    const int64_t n0 = panel * LANES, columns = min64(LANES, a->n - n0);
    const float *w = c->w + n0 * a->k;
    float bias[LANES] = {0};
    if (c->t->bias)
        widen_row(c->type, element_at(c->t->bias, n0, c->type), columns, 1, bias);
    for (int64_t x = 0; x < a->k; x += DEPTH)
        for (int64_t r = 0; r < rows; r += VL) {
            const int64_t count = min64(VL, rows - r), bytes = element_size(c->type);
            prefetch_rows((const char *)c->t->y + ((first + r) * a->y_stride + n0) * bytes, count, a->y_stride * bytes,
                          columns * bytes);
            multiply_panels(c, vectors_of(columns), count, x, min64(DEPTH, a->k - x), s->a + r * a->k, w,
                            s->c + r * LANES, LANES, x > 0, next_share(c, w + LANES * a->k, a->k, r, rows));
            if (x + DEPTH >= a->k)
                write_y(c, first + r, count, n0, columns, bias, s->c + r * LANES);
        }
}

static void norm_linear_forward(const norm_linear_plan *plan, const heddle_norm_linear_data *data, void *workspace) {
    const heddle_norm_linear *a = &plan->a;
    carver shared = {workspace, 0};
    const norm_call c = carve_norm_call(plan, data, &shared);
    const size_t each = (plan->workspace - shared.used) / (size_t)plan->threads;
    const int64_t blocks = (a->m + plan->tile_m - 1) / plan->tile_m,
                  groups = (c.n_panels + plan->tile_n - 1) / plan->tile_n;
#pragma omp parallel num_threads(plan->threads) if (plan->threads > 1)
    {
        carver w = {(char *)workspace + shared.used + (size_t)thread_index() * each, 0};
        const norm_space s = carve_norm_space(plan, &w);
        prepare_norm(&c, &s, false);
        if (a->m > 0) {
#pragma omp for schedule(dynamic)
            for (int64_t p = 0; p < c.n_panels; p++)
                pack_w_transposed(&c, p);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * groups; task++) {
            int64_t first = task / groups * plan->tile_m, rows = min64(plan->tile_m, a->m - first);
            int64_t p0 = task % groups * plan->tile_n, p1 = min64(c.n_panels, p0 + plan->tile_n);
            pack_z(&c, first, rows, s.a);
            for (int64_t p = p0; p < p1; p++)
                forward_panel(&c, &s, first, rows, p);
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->m; row++) {
            if (data->mean)
                ((float *)data->mean)[row] = c.mean[row];
            if (data->rstd)
                ((float *)data->rstd)[row] = c.rstd[row];
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- backward */

/* Panel of LANES columns of W: [n][LANES]. */
static void pack_w(const norm_call *c, int64_t panel) {
    int64_t columns = min64(LANES, c->a->k - panel * LANES);
    for (int64_t r = 0; r < c->a->n; r++)
        widen_row(c->type, element_at(c->t->w, r * c->a->w_stride + panel * LANES, c->type), columns, 1,
                  c->w + (panel * c->a->n + r) * LANES);
    make_pairs(c, c->w + panel * c->a->n * LANES, c->a->n, LANES);
}

static void dx_row(const norm_call *c, int64_t row, float *g, float *xhat) {
    const heddle_norm_linear *a = c->a;
    const float mean = c->mean[row], rstd = c->rstd[row], inverse = 1 / (float)a->k;
    widen_row(c->type, row_of(c->t->x, row, a->x_stride, c->type), a->k, 1, xhat);
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
    const float c1 = a->norm == HEDDLE_RMS_NORM ? 0 : sum_lanes(s1) * inverse, c2 = sum_lanes(s2) * inverse;
    for (int64_t e = 0; e < a->k; e += VL)
        store(g + e, rstd * (load(g + e) - c1 - load(xhat + e) * c2));
    narrow_row(c->type, g, a->k, 1, (char *)c->t->dx + row * a->dx_stride * element_size(c->type));
}

/* Panel p of W from row x on; x is even. */
INLINE const float *slice_of_w(const norm_call *c, int64_t p, int64_t x) {
    return c->w + p * c->a->n * LANES + (uses_pairs(c) ? x / 2 : x) * LANES;
}

/* Elements of row r of W in panel p. */
INLINE vf load_w(const norm_call *c, int64_t p, int64_t r, int64_t column) {
    const vf x = load(slice_of_w(c, p, uses_pairs(c) ? r / 2 * 2 : r) + column);
    if (!uses_pairs(c))
        return x;
    return r % 2 ? (vf)((vu)x & 0xffff0000u) : (vf)((vu)x << 16);
}

/* g [rows][k_pad] (+)= dy·W over the columns x .. x+depth-1 of dy. */
static void add_slice(const norm_call *c, const norm_space *s, int64_t first, int64_t rows, int64_t x, int64_t depth) {
    for (int64_t r = 0; r < rows; r += VL) {
        const void *p[VL];
        int64_t count = min64(VL, rows - r);
        for (int64_t y = 0; y < count; y++)
            p[y] = row_of(c->t->dy, first + r + y, c->a->dy_stride, c->type);
        pack_transposed(c->type, p, x, count, depth, 1, s->a + r * depth, VL);
        make_pairs(c, s->a + r * depth, depth, VL);
    }
    for (int64_t p = 0; p < c->k_panels; p++)
        for (int64_t r = 0; r < rows; r += VL)
            multiply_panels(c, vectors_of(c->a->k - p * LANES), min64(VL, rows - r), 0, depth, s->a + r * depth,
                            slice_of_w(c, p, x), s->c + r * c->k_pad + p * LANES, c->k_pad, x > 0,
                            next_share(c, p + 1 < c->k_panels ? slice_of_w(c, p + 1, x) : slice_of_w(c, 0, x + depth),
                                       depth, r, rows));
}

static void dx_task(const norm_call *c, const norm_space *s, int64_t first, int64_t rows) {
    for (int64_t x = 0; x < c->a->n; x += SLICE)
        add_slice(c, s, first, rows, x, min64(SLICE, c->a->n - x));
    for (int64_t r = 0; r < rows; r++)
        dx_row(c, first + r, s->c + r * c->k_pad, s->row);
}

/* Rows that lie far apart are asked for some rows ahead: no hardware prefetcher follows them. */
INLINE void prefetch_ahead(const char *row, int64_t row_bytes, int64_t bytes) {
    for (int64_t x = 0; x < bytes; x += 64)
        __builtin_prefetch(row + 8 * row_bytes + x);
}

/* xhat of a chunk of rows, panels [rows][LANES] */
static void pack_xhat(const norm_call *c, int64_t first, int64_t rows, int64_t panel) {
    const int64_t k0 = panel * LANES, columns = min64(LANES, c->a->k - k0), bytes = element_size(c->type);
    for (int64_t r = 0; r < rows; r++) {
        float *out = c->x_panels + (panel * rows + r) * LANES;
        const char *in = element_at(c->t->x, (first + r) * c->a->x_stride + k0, c->type);
        prefetch_ahead(in, c->a->x_stride * bytes, columns * bytes);
        widen_row(c->type, in, columns, 1, out);
        for (int64_t x = 0; x < columns; x += VL)
            store(out + x, (load(out + x) - c->mean[first + r]) * c->rstd[first + r]);
    }
    make_pairs(c, c->x_panels + panel * rows * LANES, rows, LANES);
}

#define DY_PANELS 8 /* packed together, so that more than one line of a row is read */

/* dy of a chunk of rows, panels [rows][VL], and its column sums into dbias. */
static void pack_dy(const norm_call *c, int64_t first, int64_t rows, int64_t panel) {
    const int64_t n0 = panel * VL, columns = min64(DY_PANELS * VL, c->a->n - n0), bytes = element_size(c->type);
    vf sum[DY_PANELS];
    for (int64_t x = 0; x * VL < columns; x++)
        sum[x] = first ? load(c->dbias + n0 + x * VL) : splat(0);
    for (int64_t r = 0; r < rows; r++) {
        const char *in = element_at(c->t->dy, (first + r) * c->a->dy_stride + n0, c->type);
        prefetch_ahead(in, c->a->dy_stride * bytes, columns * bytes);
        for (int64_t x = 0; x * VL < columns; x++) {
            float *out = c->dy_panels + ((panel + x) * rows + r) * VL;
            widen_row(c->type, in + x * VL * bytes, min64(VL, columns - x * VL), 1, out);
            sum[x] += load(out);
        }
    }
    for (int64_t x = 0; x * VL < columns; x++) {
        store(c->dbias + n0 + x * VL, sum[x]);
        make_pairs(c, c->dy_panels + (panel + x) * rows * VL, rows, VL);
    }
}

/* G += dyᵀ·xhat over one chunk of rows, for one panel of rows of G and one of its columns. */
static void add_to_sums(const norm_call *c, int64_t rows, int64_t r, int64_t kp, bool add, gemm_ahead ahead) {
    float *out = sums_of(c, kp) + r * VL * LANES;
    multiply_panels(c, vectors_of(c->a->k - kp * LANES), min64(VL, c->a->n - r * VL), 0, rows,
                    c->dy_panels + r * rows * VL, c->x_panels + kp * rows * LANES, out, LANES, add, ahead);
}

/* G += dyᵀ·xhat over one chunk of rows. Every thread of the team calls it. */
static void add_chunk(const norm_call *c, int64_t threads, int64_t first, int64_t rows) {
#pragma omp for schedule(dynamic)
    for (int64_t p = 0; p < c->k_panels; p++)
        pack_xhat(c, first, rows, p);
#pragma omp for schedule(dynamic)
    for (int64_t p = 0; p < c->row_panels; p += DY_PANELS)
        pack_dy(c, first, rows, p);
    /* A few row panels of dy stay in the second-level cache while all of xhat streams past them. */
    const int64_t wanted = 4 * threads, per_task = clamp64((c->row_panels + wanted - 1) / wanted, 1, 16);
    const int64_t groups = (c->row_panels + per_task - 1) / per_task;
    const int64_t divisions = clamp64((wanted + groups - 1) / groups, 1, c->k_panels);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < groups * divisions; task++) {
        const int64_t r0 = task / divisions * per_task, r1 = min64(c->row_panels, r0 + per_task), x = task % divisions;
        for (int64_t kp = c->k_panels * x / divisions; kp < c->k_panels * (x + 1) / divisions; kp++)
            for (int64_t r = r0; r < r1; r++)
                add_to_sums(c, rows, r, kp, first > 0,
                            next_share(c, c->x_panels + (kp + 1) * rows * LANES, rows, (r - r0) * VL, (r1 - r0) * VL));
    }
}

/* Two-level sums of one panel's columns: rounding then grows with the square root of the rows at most. */
typedef struct column_sums {
    float part[LANES], all[LANES];
} column_sums;

INLINE void flush_sums(column_sums *s) {
    for (int64_t x = 0; x < LANES; x += VL) {
        store(s->all + x, load(s->all + x) + load(s->part + x));
        store(s->part + x, splat(0));
    }
}

/* dw, dgamma and dbeta of one panel of columns. */
static void finish_weights(const norm_call *c, int64_t panel) {
    const heddle_norm_linear *a = c->a;
    const int64_t k0 = panel * LANES, columns = min64(LANES, a->k - k0);
    column_sums dgamma = {{0}, {0}}, dbeta = {{0}, {0}};
    float dw[LANES];
    for (int64_t r = 0; r < a->n; r++) {
        const float *g = sums_of(c, panel) + r * LANES;
        for (int64_t x = 0; x < columns; x += VL) {
            const vf w = load_w(c, panel, r, x);
            store(dgamma.part + x, load(dgamma.part + x) + w * load(g + x));
            store(dbeta.part + x, load(dbeta.part + x) + w * c->dbias[r]);
            store(dw + x, load(g + x) * load(c->gamma + k0 + x) + c->dbias[r] * load(c->beta + k0 + x));
        }
        if (c->t->dw)
            narrow_row(c->type, dw, columns, 1, (char *)c->t->dw + (r * a->dw_stride + k0) * element_size(c->type));
        if (r % 64 == 63) {
            flush_sums(&dgamma);
            flush_sums(&dbeta);
        }
    }
    flush_sums(&dgamma);
    flush_sums(&dbeta);
    if (c->t->dgamma)
        narrow_row(c->type, dgamma.all, columns, 1, (char *)c->t->dgamma + k0 * element_size(c->type));
    if (c->t->dbeta)
        narrow_row(c->type, dbeta.all, columns, 1, (char *)c->t->dbeta + k0 * element_size(c->type));
}

static void norm_linear_backward(const norm_linear_plan *plan, const heddle_norm_linear_data *data, void *workspace) {
    const heddle_norm_linear *a = &plan->a;
    carver shared = {workspace, 0};
    const norm_call c = carve_norm_call(plan, data, &shared);
    const size_t each = (plan->workspace - shared.used) / (size_t)plan->threads;
    const int64_t blocks = (a->m + plan->tile_m - 1) / plan->tile_m;
    const bool weights = data->dw || data->dgamma || data->dbeta || data->dbias;
    if (a->m == 0) {
        memset(c.sums, 0, sizeof(float) * (size_t)(a->n * c.k_pad));
        memset(c.dbias, 0, sizeof(float) * (size_t)(c.row_panels * VL));
    }
#pragma omp parallel num_threads(plan->threads) if (plan->threads > 1)
    {
        carver w = {(char *)workspace + shared.used + (size_t)thread_index() * each, 0};
        const norm_space s = carve_norm_space(plan, &w);
        prepare_norm(&c, &s, data->mean);
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < c.k_panels; p++)
            pack_w(&c, p);
        if (data->dx) {
#pragma omp for schedule(dynamic)
            for (int64_t x = 0; x < blocks; x++)
                dx_task(&c, &s, x * plan->tile_m, min64(plan->tile_m, a->m - x * plan->tile_m));
        }
        if (weights) {
            for (int64_t first = 0; first < a->m; first += CHUNK_M)
                add_chunk(&c, plan->threads, first, min64(CHUNK_M, a->m - first));
#pragma omp for schedule(dynamic)
            for (int64_t p = 0; p < c.k_panels; p++)
                finish_weights(&c, p);
        }
    }
    if (data->dbias)
        narrow_row(c.type, c.dbias, a->n, 1, data->dbias);
}

/* -------------------------------------------------------------------------------------------------------- plan */

static void plan_norm_linear(norm_linear_plan *plan) {
    const heddle_norm_linear *a = &plan->a;
    const bool backward = plan->pass == HEDDLE_BACKWARD;
    static const char *const types[] = {"f32", "bf16", "f16", "f64"};
    snprintf(plan->kernel, sizeof plan->kernel, "heddle_norm_linear_%s_%s_%s", backward ? "bwd" : "fwd",
             types[a->dtype], ISA_NAME);
    /* A block of rows stays in the second-level cache; there should be a few blocks for every thread. */
    int64_t fits = 262144 / a->k, share = a->m / (2 * plan->threads) + 1;
    plan->tile_m = clamp64((min64(fits, share) + VL - 1) / VL * VL, VL, 192);
    int64_t blocks = (a->m + plan->tile_m - 1) / plan->tile_m, panels = (a->n + LANES - 1) / LANES;
    int64_t groups = clamp64(4 * plan->threads / max64(1, blocks), 1, panels);
    plan->tile_n = (panels + groups - 1) / groups;
    plan->tile_k = DEPTH;
    carver shared = {0}, each = {0};
    carve_norm_call(plan, NULL, &shared);
    carve_norm_space(plan, &each);
    plan->workspace = shared.used + each.used * (size_t)plan->threads;
}

#endif

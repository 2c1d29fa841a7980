/* SPDX-License-Identifier: Apache-2.0
 * Norm-linear as a textbook has it: a row of x after the other (verify_plain.h). */
#include "verify_plain.h"

#include <math.h>

static const double *linear_row(const problem *p, const double *x, int64_t stride, int64_t i, char last) {
    return x + i * (stride ? stride : job_extent(&p->j, last));
}

/* Mean and rstd of a row, in two passes; without a norm what changes nothing. */
static void plain_moments(const heddle_norm_linear *l, const double *x, float *mean, float *rstd) {
    float sum = 0, squares = 0;
    *mean = 0;
    *rstd = 1;
    if (l->norm == HEDDLE_NO_NORM)
        return;
    for (int64_t i = 0; i < l->k && l->norm == HEDDLE_LAYER_NORM; i++)
        sum += (float)x[i];
    *mean = sum / (float)l->k;
    for (int64_t i = 0; i < l->k; i++)
        squares += ((float)x[i] - *mean) * ((float)x[i] - *mean);
    *rstd = 1 / sqrtf(squares / (float)l->k + (float)(l->eps == 0 ? 1e-5 : l->eps));
}

/* A row of the norm: z = xhat∘gamma + beta. du: dy, or its product with the activation's derivative, rounded; du_terms: its squares, with
 * those of what a rounding of u changes in it. */
typedef struct norm_row {
    int64_t i;
    float *xhat, *z, *dz, *u, *du; /* of u and du as many as W has rows */
    double *dz_terms, *u_terms, *du_terms;
} norm_row;

/* act(u) by the formulas of heddle.h, in float32, and its derivative. */
static float plain_activation(heddle_activation activation, float u, float *slope) {
    const float inner = sqrtf(2 / 3.14159265f) * (u + 0.044715f * u * u * u), t = tanhf(inner);
    const float logistic = 1 / (1 + expf(-u)), normal = 0.5f + 0.5f * erff(u / sqrtf(2));
    switch (activation) {
    case HEDDLE_GELU: *slope = normal + u * expf(-u * u / 2) / sqrtf(2 * 3.14159265f); return u * normal;
    case HEDDLE_GELU_TANH:
        *slope = (1 + t) / 2 + u / 2 * (1 - t * t) * sqrtf(2 / 3.14159265f) * (1 + 3 * 0.044715f * u * u);
        return u * (1 + t) / 2;
    case HEDDLE_SILU: *slope = logistic + u * logistic * (1 - logistic); return u * logistic;
    default: *slope = 1; return u;
    }
}

/* What the row adds to the sums over rows. */
static void add_linear_sums(const problem *p, outcome *out, outcome *terms, const norm_row *r) {
    const heddle_norm_linear *l = &p->j.l;
    for (int64_t e = 0; e < l->k && out->x[DGAMMA]; e++) {
        out->x[DGAMMA][e] = (float)out->x[DGAMMA][e] + r->dz[e] * r->xhat[e];
        out->x[DBETA][e] = (float)out->x[DBETA][e] + r->dz[e];
        terms->x[DGAMMA][e] += r->dz_terms[e] * square(r->xhat[e]);
        terms->x[DBETA][e] += r->dz_terms[e];
    }
    for (int64_t o = 0; o < job_extent(&p->j, 'N'); o++) {
        double *dw = (double *)linear_row(p, out->x[DW], l->dw_stride, o, 'k');
        double *dw_terms = (double *)linear_row(p, terms->x[DW], l->dw_stride, o, 'k');
        out->x[DC][o] = (float)out->x[DC][o] + r->du[o];
        terms->x[DC][o] += r->du_terms[o];
        for (int64_t e = 0; e < l->k; e++) {
            dw[e] = (float)dw[e] + r->du[o] * r->z[e];
            dw_terms[e] += r->du_terms[o] * square(r->z[e]);
        }
    }
}

static void plain_gradient_row(const problem *p, heddle_dtype dtype, outcome *out, outcome *terms, const norm_row *r) {
    const heddle_norm_linear *l = &p->j.l;
    double *dx = (double *)linear_row(p, out->x[DX], l->dx_stride, r->i, 'k');
    double *dx_terms = (double *)linear_row(p, terms->x[DX], l->dx_stride, r->i, 'k'), mean_terms = 0, mean_x_terms = 0;
    float mean_g = 0, mean_gx = 0, rstd = out->x[RSTD] ? (float)out->x[RSTD][r->i] : 1;
    for (int64_t e = 0; e < l->k; e++) {
        float dz = 0, gamma = p->x[GAMMA] ? (float)p->x[GAMMA][e] : 1;
        r->dz_terms[e] = 0;
        for (int64_t o = 0; o < job_extent(&p->j, 'N'); o++) {
            const float w = (float)linear_row(p, p->x[W], l->w_stride, o, 'k')[e];
            dz += r->du[o] * w;
            r->dz_terms[e] += r->du_terms[o] * square(w);
        }
        r->dz[e] = plain_rounded(dtype, dz);
        if (p->x[DZ])
            r->dz[e] = plain_rounded(dtype, r->dz[e] + (float)linear_row(p, p->x[DZ], l->dz_stride, r->i, 'k')[e]);
        dx[e] = r->dz[e] * gamma;
        dx_terms[e] = r->dz_terms[e] * square(gamma);
        mean_g += l->norm == HEDDLE_LAYER_NORM ? (float)dx[e] / (float)l->k : 0;
        mean_gx += l->norm != HEDDLE_NO_NORM ? (float)dx[e] * r->xhat[e] / (float)l->k : 0;
        mean_terms += l->norm == HEDDLE_LAYER_NORM ? dx_terms[e] / square((double)l->k) : 0;
        mean_x_terms += l->norm != HEDDLE_NO_NORM ? dx_terms[e] * square(r->xhat[e] / (float)l->k) : 0;
    }
    for (int64_t e = 0; e < l->k; e++) {
        dx[e] = plain_rounded(dtype, rstd * ((float)dx[e] - mean_g - r->xhat[e] * mean_gx));
        dx_terms[e] = square(rstd) * (dx_terms[e] + mean_terms + square(r->xhat[e]) * mean_x_terms);
    }
    add_linear_sums(p, out, terms, r);
}

static void plain_forward_row(const problem *p, heddle_dtype dtype, outcome *out, outcome *terms, const norm_row *r) {
    const heddle_norm_linear *l = &p->j.l;
    const double *x = linear_row(p, p->x[X], l->x_stride, r->i, 'k');
    float mean, rstd;
    plain_moments(l, x, &mean, &rstd);
    if (out->x[MEAN]) {
        out->x[MEAN][r->i] = mean;
        out->x[RSTD][r->i] = rstd;
    }
    for (int64_t e = 0; e < l->k; e++) { /* a mean may be counted from one element, which is then a term */
        double shift = l->norm == HEDDLE_LAYER_NORM ? square(x[e]) : 0;
        if (out->x[MEAN])
            terms->x[MEAN][r->i] = fmax(terms->x[MEAN][r->i], shift);
        r->xhat[e] = ((float)x[e] - mean) * rstd;
        r->z[e] = r->xhat[e] * (p->x[GAMMA] ? (float)p->x[GAMMA][e] : 1) + (p->x[BETA] ? (float)p->x[BETA][e] : 0);
        r->z[e] = plain_rounded(dtype, r->z[e]);
        if (out->x[Z]) {
            ((double *)linear_row(p, out->x[Z], l->z_stride, r->i, 'k'))[e] = r->z[e];
            ((double *)linear_row(p, terms->x[Z], l->z_stride, r->i, 'k'))[e] =
                shift * square(rstd * (p->x[GAMMA] ? (float)p->x[GAMMA][e] : 1));
        }
    }
    for (int64_t o = 0; o < job_extent(&p->j, 'N'); o++) {
        const double *w = linear_row(p, p->x[W], l->w_stride, o, 'k');
        float sum = 0;
        r->u_terms[o] = p->x[C] ? square(p->x[C][o]) : 0;
        for (int64_t e = 0; e < l->k; e++) {
            sum += r->z[e] * (float)w[e];
            r->u_terms[o] += square(r->z[e] * w[e]);
        }
        r->u[o] = plain_rounded(dtype, sum + (p->x[C] ? (float)p->x[C][o] : 0));
    }
}

/* Element o of a row of two halves, of which act(gate) and its derivative are known, there and at `next`, a step further. */
typedef struct gated_element {
    int64_t o;
    float act, slope, next, step;
    double dy;
} gated_element;

/* y, and du of both halves. */
static float plain_gated(const problem *p, heddle_dtype dtype, const norm_row *r, const gated_element *e,
                         double *y_terms) {
    const int64_t o = e->o, other = p->j.l.n + o;
    const float gate = r->u[o], up = r->u[other];
    const double of_gate = square(gate) + r->u_terms[o], of_up = square(up) + r->u_terms[other];
    *y_terms = square(up) * r->u_terms[o] + square(e->act) * r->u_terms[other];
    r->du[o] = plain_rounded(dtype, (float)e->dy * up * e->slope);
    r->du[other] = plain_rounded(dtype, (float)e->dy * e->act);
    r->du_terms[o] = square(e->dy * up * e->slope) + square(e->dy * e->slope) * of_up;
    if (e->next != e->slope)
        r->du_terms[o] += square(e->dy * up * (e->next - e->slope) / e->step) * of_gate;
    r->du_terms[other] = square(e->dy * e->act) + square(e->dy * e->slope) * of_gate;
    return e->act * up;
}

/* y of the row from u; dy to du. */
static void plain_activation_row(const problem *p, heddle_dtype dtype, outcome *out, outcome *terms,
                                 const norm_row *r) {
    const heddle_norm_linear *l = &p->j.l;
    const double *dy = p->x[DY] ? linear_row(p, p->x[DY], l->dy_stride, r->i, 'n') : NULL;
    double *y = (double *)linear_row(p, out->x[Y], l->y_stride, r->i, 'n');
    double *y_terms = (double *)linear_row(p, terms->x[Y], l->y_stride, r->i, 'n');
    for (int64_t o = 0; o < l->n; o++) {
        const float u = r->u[o], step = 0x1p-8f * fmaxf(fabsf(u), 1);
        float slope, next;
        plain_activation(gate_activation(l->activation), u + step, &next);
        float act = plain_activation(gate_activation(l->activation), u, &slope);
        y_terms[o] = r->u_terms[o];
        r->du[o] = dy ? plain_rounded(dtype, (float)dy[o] * slope) : 0;
        r->du_terms[o] = dy ? square(dy[o] * slope) : 0;
        if (dy && next != slope) /* u, and the sum that it is */
            r->du_terms[o] += square(dy[o] * (next - slope) / step) * (square(u) + y_terms[o]);
        if (is_gated(l->activation))
            act = plain_gated(p, dtype, r, &(gated_element){o, act, slope, next, step, dy ? dy[o] : 0}, &y_terms[o]);
        y[o] = plain_rounded(dtype, act);
        if (p->x[RESIDUAL])
            y[o] = plain_rounded(dtype,
                                 (float)y[o] + (float)linear_row(p, p->x[RESIDUAL], l->residual_stride, r->i, 'n')[o]);
    }
    for (int64_t o = 0; l->activation && o < job_extent(&p->j, 'N'); o++) {
        ((double *)linear_row(p, out->x[U], l->u_stride, r->i, 'N'))[o] = r->u[o];
        ((double *)linear_row(p, terms->x[U], l->u_stride, r->i, 'N'))[o] = r->u_terms[o];
    }
}

void plain_norm_linear(const problem *p, arena *m, heddle_dtype dtype, outcome *out, outcome *terms) {
    const heddle_norm_linear *l = &p->j.l;
    const int64_t of_u = job_extent(&p->j, 'N');
    norm_row r = {.xhat = arena_array(m, l->k, sizeof(float)),
                  .z = arena_array(m, l->k, sizeof(float)),
                  .dz = arena_array(m, l->k, sizeof(float)),
                  .u = arena_array(m, of_u, sizeof(float)),
                  .du = arena_array(m, of_u, sizeof(float)),
                  .dz_terms = arena_array(m, l->k, sizeof(double)),
                  .u_terms = arena_array(m, of_u, sizeof(double)),
                  .du_terms = arena_array(m, of_u, sizeof(double))};
    for (r.i = 0; r.i < l->m; r.i++) {
        plain_forward_row(p, dtype, out, terms, &r);
        plain_activation_row(p, dtype, out, terms, &r);
        if (p->x[DY])
            plain_gradient_row(p, dtype, out, terms, &r);
    }
    for (int f = DGAMMA; f <= DC; f++)
        for (int64_t i = 0, n = out->x[f] ? field_count(&p->j, f) : 0; i < n; i++)
            out->x[f][i] = plain_rounded(dtype, out->x[f][i]);
}

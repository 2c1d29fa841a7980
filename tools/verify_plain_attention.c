/* SPDX-License-Identifier: Apache-2.0
 * Attention as a textbook has it: whole matrices, one head after the other (verify_plain.h). */
#include "verify_plain.h"

#include "../src/philox.h"

#include <math.h>
#include <stdlib.h>

typedef struct sequence {
    int64_t first_q, sq, first_k, sk;
} sequence;

/* One query head of one sequence. Matrices are [sq, sk] of the sequence. */
typedef struct head {
    const problem *p;
    outcome *out, *terms;
    heddle_dtype dtype;
    sequence s;
    plain_order order;
    int64_t n, x, g; /* batch, query head, key head */
    float scale;
    float *part, *part_keys; /* of a block: a row of o or dq; rows of dk and dv */
    float *p_matrix, *p_terms, *z, *tanh, *ds, *ds_terms;
} head;

/* Of key j; -1: none. */
static int64_t page(const head *h, int64_t j) {
    const heddle_attention *a = &h->p->j.a;
    const double at = h->p->x[TABLE] ? h->p->x[TABLE][h->n * job_extent(&h->p->j, 't') + j / a->page] : 0;
    return at >= 0 && at < (double)a->pages ? (int64_t)at : -1;
}

static double *row(const head *h, double *x, int f, int64_t head_index, int64_t i) {
    heddle_strides s = field_strides(&h->p->j, f);
    int64_t first = f == K || f == V || f == DK || f == DV ? h->s.first_k : h->s.first_q;
    const char first_letter = field_shape(&h->p->j, f)[0];
    const bool packed = first_letter != 'b';
    if (first_letter == 'P') {
        const int64_t at = page(h, i);
        return at < 0 ? NULL : x + at * s.b + i % h->p->j.a.page * s.s + head_index * s.h;
    }
    return x ? x + (packed ? (first + i) * s.s : h->n * s.b + i * s.s) + head_index * s.h : NULL;
}

static double *input_row(const head *h, int f, int64_t i) {
    return row(h, h->p->x[f], f, f == K || f == V ? h->g : h->x, i);
}

static double *output_row(const head *h, int f, int64_t i) {
    return row(h, h->out->x[f], f, f == DK || f == DV ? h->g : h->x, i);
}

static double *terms_row(const head *h, int f, int64_t i) {
    return row(h, h->terms->x[f], f, f == DK || f == DV ? h->g : h->x, i);
}

/* Index into lse [b, h, sq] or [h, total_q]. */
static int64_t lse_index(const head *h, int64_t i) {
    const heddle_attention *a = &h->p->j.a;
    return a->features & HEDDLE_VARLEN ? h->x * a->total_q + h->s.first_q + i : (h->n * a->h + h->x) * a->sq + i;
}

/* The term that comes at place x of n. */
static int64_t term_at(int64_t x, int64_t n, plain_order order) {
    switch (order) {
    case PLAIN_REVERSED: return n - 1 - x;
    case PLAIN_ENDS: return x % 2 ? n - 1 - x / 2 : x / 2;
    default: return x;
    }
}

/* Whether the block that ends with place x is added to the sum. */
static bool ends_block(int64_t x, int64_t n, plain_order order) {
    return x + 1 == n || (order == PLAIN_BLOCKED && x % 128 == 127);
}

static float dot(const double *x, const double *y, int64_t n, plain_order order) {
    float sum = 0, part = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t e = term_at(i, n, order);
        part += (float)x[e] * (float)y[e];
        if (ends_block(i, n, order)) {
            sum += part;
            part = 0;
        }
    }
    return sum;
}

/* Adds what a block has summed up, and begins the next. */
static void add_block(double *sum, float *part, int64_t n) {
    for (int64_t e = 0; e < n && sum; e++) {
        sum[e] = (float)sum[e] + part[e];
        part[e] = 0;
    }
}

/* The header's rules, once more: this is also a check of src/mask.h, which the library's backends share. */
static int64_t diagonal(const head *h) {
    const heddle_attention *a = &h->p->j.a;
    int64_t corner = 0;
    if (a->mask != HEDDLE_CAUSAL_TOP_LEFT)
        corner =
            (a->whole_sk ? a->whole_sk : a->k_offset + h->s.sk) - (a->whole_sq ? a->whole_sq : a->q_offset + h->s.sq);
    return corner + a->q_offset - a->k_offset;
}

static bool sees(const head *h, int64_t i, int64_t j) {
    const heddle_attention *a = &h->p->j.a;
    int64_t distance = j - i - diagonal(h);
    bool window = a->features & HEDDLE_WINDOW;
    if (a->mask != HEDDLE_MASK_NONE && distance > 0)
        return false;
    if (window && a->window_left >= 0 && -distance > a->window_left)
        return false;
    return !window || a->window_right < 0 || distance <= a->window_right;
}

static sequence sequence_at(const problem *p, int64_t n) {
    const double *cu_q = p->x[CU_Q], *cu_k = p->x[CU_K], *len_q = p->x[LEN_Q], *len_k = p->x[LEN_K];
    sequence s = {0, p->j.a.sq, 0, p->j.a.sk};
    if (cu_q)
        s.first_q = (int64_t)cu_q[n], s.sq = (int64_t)(cu_q[n + 1] - cu_q[n]);
    if (cu_k)
        s.first_k = (int64_t)cu_k[n], s.sk = (int64_t)(cu_k[n + 1] - cu_k[n]);
    if (len_q && len_q[n] < (double)s.sq)
        s.sq = (int64_t)len_q[n];
    if (len_k && len_k[n] < (double)s.sk)
        s.sk = (int64_t)len_k[n];
    return s;
}

static double dot_terms(const double *x, const double *y, int64_t n) {
    double sum = 0;
    for (int64_t e = 0; e < n; e++)
        sum += square(x[e] * y[e]);
    return sum;
}

/* HEDDLE_SEGMENTS: the id of row i in f, which is packed with the rows or has a row for each sequence. */
static double segment(const head *h, int f, int64_t first, int64_t i) {
    const char *shape = field_shape(&h->p->j, f);
    return h->p->x[f] ? h->p->x[f][shape[0] == 'b' ? h->n * job_extent(&h->p->j, shape[1]) + i : first + i] : 0;
}

/* HEDDLE_BLOCKS: whether the list of block r of the queries has a block of keys. */
static bool lists(const head *h, int64_t r, int64_t column) {
    const job *j = &h->p->j;
    const double *rows = h->p->x[BLOCK_ROWS], *columns = h->p->x[BLOCK_COLUMNS];
    const int64_t heads = job_extent(j, 'H'), each = job_extent(j, 'r');
    const int64_t at = ((j->a.blocks_of_b ? h->n : 0) * heads + (j->a.blocks_of_h ? h->x : 0)) * each + r;
    for (int64_t y = (int64_t)rows[at]; y < (int64_t)rows[at + 1]; y++)
        if ((int64_t)columns[y] == column)
            return true;
    return false;
}

static bool is_hidden(const head *h, int64_t i, int64_t j) {
    const heddle_attention *a = &h->p->j.a;
    if (a->features & HEDDLE_BLOCKS && !lists(h, i / a->block_q, j / a->block_k))
        return true;
    const double *mask = input_row(h, BOOL_MASK, i), *bias = input_row(h, BIAS, i);
    const bool paged = h->p->j.a.features & HEDDLE_PAGES;
    if (segment(h, Q_SEGMENTS, h->s.first_q, i) != segment(h, K_SEGMENTS, h->s.first_k, j))
        return true;
    return !sees(h, i, j) || (mask && mask[j] == 0) || (bias && bias[j] < -0x1p24) || (paged && page(h, j) < 0);
}

/* HEDDLE_E4M3: of k or v. */
static float scale_of(const head *h, int f) {
    const int64_t hk = job_extent(&h->p->j, 'g');
    return h->p->x[f] ? (float)h->p->x[f][h->n * hk + h->x / (h->p->j.a.h / hk)] : 1;
}

/* The score after all that changes it, or -inf; tanh is kept for backward. */
static float score(const head *h, int64_t i, int64_t j, float *tanh_out, float *terms) {
    const heddle_attention *a = &h->p->j.a;
    const double *bias = input_row(h, BIAS, i);
    *tanh_out = *terms = 0;
    if (is_hidden(h, i, j))
        return -INFINITY;
    const float k_scale = scale_of(h, K_SCALE);
    float t = plain_rounded(h->dtype, dot(input_row(h, Q, i), input_row(h, K, j), a->d, h->order) * k_scale);
    t = plain_rounded(h->dtype, t * h->scale);
    *terms = h->scale * h->scale * k_scale * k_scale * (float)dot_terms(input_row(h, Q, i), input_row(h, K, j), a->d);
    if (a->softcap > 0) {
        *tanh_out = plain_rounded(h->dtype, tanhf(t / (float)a->softcap));
        t = plain_rounded(h->dtype, (float)a->softcap * *tanh_out);
    }
    float distance = (float)llabs(i + diagonal(h) - j);
    float slope = h->p->x[ALIBI] ? (float)h->p->x[ALIBI][h->n * a->alibi_stride_b + h->x] : 0;
    t = plain_rounded(h->dtype, t - slope * distance);
    t = plain_rounded(h->dtype, t + (bias ? (float)bias[j] : 0));
    *terms += (float)(square(slope * distance) + square(t));
    return t;
}

static float dropout_factor(const head *h, int64_t i, int64_t j) {
    const heddle_attention *a = &h->p->j.a;
    const double *rng = h->p->x[RNG];
    if (a->dropout == 0)
        return 1;
    philox4 words = dropout_words(rng ? (uint64_t)rng[0] : a->seed, rng ? (uint64_t)rng[1] : a->offset,
                                  (uint32_t)(h->n * (a->whole_h ? a->whole_h : a->h) + a->h_offset + h->x),
                                  (uint32_t)(a->q_offset + i), (uint32_t)((a->k_offset + j) / DROPOUT_KEYS));
    return dropout_number(words, (uint32_t)(a->k_offset + j)) >= dropout_threshold(a->dropout)
               ? (float)dropout_scale(a->dropout)
               : 0;
}

/* A score that is off by x makes its weight off by P(1 - P)x: p_terms has P's own terms and the score's. */
static void softmax_row(const head *h, int64_t i) {
    const double *sink = h->p->x[SINKS];
    float *p = h->p_matrix + i * h->s.sk, *terms = h->p_terms + i * h->s.sk;
    float largest = sink ? (float)sink[h->x] : -INFINITY, sum = 0;
    for (int64_t j = 0; j < h->s.sk; j++)
        largest = fmaxf(largest, p[j] = score(h, i, j, &h->tanh[i * h->s.sk + j], &terms[j]));
    if (sink)
        sum = expf((float)sink[h->x] - largest);
    for (int64_t j = 0; j < h->s.sk; j++)
        sum += p[j] = p[j] == -INFINITY ? 0 : expf(p[j] - largest);
    for (int64_t j = 0; j < h->s.sk; j++) {
        p[j] = sum > 0 ? plain_rounded(h->dtype, p[j] / sum) : 0;
        terms[j] = p[j] * p[j] * (1 + (1 - p[j]) * (1 - p[j]) * terms[j]);
    }
    h->out->x[LSE][lse_index(h, i)] = sum > 0 ? largest + logf(sum) : -INFINITY;
    h->terms->x[LSE][lse_index(h, i)] = sum > 0 ? square(fabsf(largest) + 1) : 0;
}

static void forward_head(const head *h) {
    const heddle_attention *a = &h->p->j.a;
    int64_t sk = h->s.sk, dv = job_extent(&h->p->j, 'v');
    for (int64_t i = 0; i < h->s.sq; i++) {
        float *p = h->p_matrix + i * sk, *z = h->z + i * sk;
        double *o = output_row(h, O, i), *weights = output_row(h, WEIGHTS, i), *terms = terms_row(h, O, i);
        const float v_scale = scale_of(h, V_SCALE);
        softmax_row(h, i);
        for (int64_t j = 0; j < a->sk && weights; j++) {
            weights[j] = j < sk ? p[j] : 0;
            terms_row(h, WEIGHTS, i)[j] = j < sk ? h->p_terms[i * sk + j] : 0;
        }
        for (int64_t place = 0; place < sk; place++) {
            const int64_t j = term_at(place, sk, h->order);
            const double *v = input_row(h, V, j);
            z[j] = dropout_factor(h, i, j);
            for (int64_t e = 0; e < dv && p[j] != 0; e++) {
                h->part[e] += plain_rounded(h->dtype, p[j] * z[j]) * (v_scale * (float)v[e]);
                terms[e] += h->p_terms[i * sk + j] * square(z[j] * v_scale * v[e]);
            }
            if (ends_block(place, sk, h->order))
                add_block(o, h->part, dv);
        }
        for (int64_t e = 0; e < dv; e++)
            o[e] = plain_rounded(h->dtype, o[e]);
    }
}

/* What the rounding of o to the type does to D = rowsum(dO∘O); a rounding of terms is one of float32. */
static double stored_output_terms(const head *h, const double *dout, const double *o) {
    double unit = h->dtype == HEDDLE_BF16 ? 0x1p-8 : h->dtype == HEDDLE_F16 ? 0x1p-11 : 0x1p-24;
    return square(0.25 * unit / 0x1p-24) * dot_terms(dout, o, job_extent(&h->p->j, 'v'));
}

/* dP of row i into ds, and D; the terms of P∘dP into ds_terms, and those of D as the result. */
static double weight_gradient(const head *h, int64_t i, float *d) {
    int64_t sk = h->s.sk, dv = job_extent(&h->p->j, 'v');
    const float *p = h->p_matrix + i * sk, *z = h->z + i * sk;
    const double *dout = input_row(h, DOUT, i), *dweights = input_row(h, DWEIGHTS, i);
    float *ds = h->ds + i * sk, *terms = h->ds_terms + i * sk;
    double dlse = h->p->x[DLSE] ? h->p->x[DLSE][lse_index(h, i)] : 0, total = square(dlse);
    if (dout)
        total += stored_output_terms(h, dout, output_row(h, O, i));
    *d = -(float)dlse;
    for (int64_t j = 0; j < sk; j++) {
        ds[j] = terms[j] = 0;
        if (p[j] == 0)
            continue;
        if (dout) {
            ds[j] =
                plain_rounded(h->dtype, plain_rounded(h->dtype, dot(dout, input_row(h, V, j), dv, h->order)) * z[j]);
            terms[j] = (float)dot_terms(dout, input_row(h, V, j), dv) * z[j] * z[j];
        }
        if (dweights) {
            ds[j] = plain_rounded(h->dtype, ds[j] + (float)dweights[j]);
            terms[j] += (float)square(dweights[j]);
        }
        terms[j] *= h->p_terms[i * sk + j];
        *d += p[j] * ds[j];
        total += terms[j];
    }
    return total;
}

/* dS of row i, and what it adds to dbias and dsinks. */
static void score_gradient(const head *h, int64_t i) {
    int64_t sk = h->s.sk;
    const float *p = h->p_matrix + i * sk;
    float *ds = h->ds + i * sk, *terms = h->ds_terms + i * sk, d;
    double *dbias = output_row(h, DBIAS, i), *dbias_terms = terms_row(h, DBIAS, i);
    double total = weight_gradient(h, i, &d), lse = h->out->x[LSE][lse_index(h, i)];
    for (int64_t j = 0; j < sk; j++) {
        ds[j] = p[j] == 0 ? 0 : plain_rounded(h->dtype, p[j] * (ds[j] - d));
        terms[j] += h->p_terms[i * sk + j] * (float)total;
        if (dbias) {
            dbias[j] = (float)(dbias[j] + ds[j]);
            dbias_terms[j] += terms[j];
        }
    }
    if (h->out->x[DSINKS] && isfinite(lse)) {
        float share = expf((float)(h->p->x[SINKS][h->x] - lse));
        h->out->x[DSINKS][h->x] = (float)(h->out->x[DSINKS][h->x] - share * d);
        h->terms->x[DSINKS][h->x] += share * share * total;
    }
}

/* What score (i, j) adds to dq, dk and dv. */
static void add_gradients(const head *h, int64_t i, int64_t j) {
    const heddle_attention *a = &h->p->j.a;
    int64_t at = i * h->s.sk + j, dv_extent = job_extent(&h->p->j, 'v');
    const double *q = input_row(h, Q, i), *k = input_row(h, K, j), *dout = input_row(h, DOUT, i);
    float *dq = h->part, *dk = h->part_keys + j * (a->d + dv_extent), *dv = dk + a->d;
    double *dq_terms = terms_row(h, DQ, i), *dk_terms = terms_row(h, DK, j), *dv_terms = terms_row(h, DV, j);
    float slope = a->softcap > 0 ? 1 - h->tanh[at] * h->tanh[at] : 1;
    float dt = plain_rounded(h->dtype, plain_rounded(h->dtype, h->ds[at] * slope) * h->scale);
    float pz = plain_rounded(h->dtype, h->p_matrix[at] * h->z[at]);
    double terms =
        (h->ds_terms[at] * square(slope) + square(h->ds[at] * (1 - slope))) * square(h->scale); /* 1 - tanh² */
    for (int64_t e = 0; e < a->d; e++) {
        dq[e] += dt * (float)k[e];
        dk[e] += dt * (float)q[e];
        dq_terms[e] += terms * square(k[e]);
        dk_terms[e] += terms * square(q[e]);
    }
    for (int64_t e = 0; e < dv_extent && dout; e++) {
        dv[e] += pz * (float)dout[e];
        dv_terms[e] += h->p_terms[at] * square(h->z[at] * dout[e]);
    }
}

static void backward_head(const head *h) {
    const int64_t d = h->p->j.a.d, dv = job_extent(&h->p->j, 'v'), sk = h->s.sk;
    for (int64_t place = 0; place < h->s.sq; place++) {
        const int64_t i = term_at(place, h->s.sq, h->order);
        score_gradient(h, i);
        for (int64_t x = 0; x < sk; x++) {
            const int64_t j = term_at(x, sk, h->order);
            if (h->p_matrix[i * sk + j] != 0)
                add_gradients(h, i, j);
            if (ends_block(x, sk, h->order))
                add_block(output_row(h, DQ, i), h->part, d);
        }
        for (int64_t j = 0; j < sk && ends_block(place, h->s.sq, h->order); j++) {
            add_block(output_row(h, DK, j), h->part_keys + j * (d + dv), d);
            add_block(output_row(h, DV, j), h->part_keys + j * (d + dv) + d, dv);
        }
    }
}

static float *zeros(arena *m, int64_t n) {
    float *p = arena_array(m, n, sizeof *p);
    for (int64_t i = 0; i < n; i++)
        p[i] = 0;
    return p;
}

void plain_attention(const problem *p, arena *m, heddle_dtype dtype, plain_order order, outcome *out, outcome *terms) {
    const heddle_attention *a = &p->j.a;
    int64_t hk = job_extent(&p->j, 'g'), width = a->d + job_extent(&p->j, 'v');
    float *part = zeros(m, width), *part_keys = zeros(m, a->sk * width);
    float *matrix[6];
    for (int x = 0; x < 6; x++)
        matrix[x] = arena_array(m, a->sq * a->sk, sizeof(float));
    for (int64_t i = 0, n = field_count(&p->j, LSE); i < n; i++)
        out->x[LSE][i] = -INFINITY;
    for (int64_t n = 0; n < a->b; n++)
        for (int64_t x = 0; x < a->h; x++) {
            head h = {.p = p, .out = out, .terms = terms, .dtype = dtype, .n = n, .x = x, .g = x / (a->h / hk)};
            h.order = order, h.part = part, h.part_keys = part_keys;
            h.s = sequence_at(p, n);
            h.scale = (float)(a->scale == 0 ? 1 / sqrt((double)a->d) : a->scale);
            h.p_matrix = matrix[0], h.z = matrix[1], h.tanh = matrix[2], h.ds = matrix[3], h.ds_terms = matrix[4],
            h.p_terms = matrix[5];
            forward_head(&h);
            if (!(a->features & (HEDDLE_PAGES | HEDDLE_E4M3)))
                backward_head(&h);
        }
    for (int f = DQ; f <= DBIAS && !(a->features & (HEDDLE_PAGES | HEDDLE_E4M3)); f++)
        for (int64_t i = 0, n = out->x[f] ? field_count(&p->j, f) : 0; i < n; i++)
            out->x[f][i] = plain_rounded(dtype, out->x[f][i]);
}

double keys_seen(const problem *p) {
    const heddle_attention *a = &p->j.a;
    double keys = 0, rows = 0;
    for (int64_t n = 0; n < a->b; n++)
        for (int64_t x = 0; x < a->h; x++) {
            head h = {.p = p, .n = n, .x = x, .g = x / (a->h / job_extent(&p->j, 'g'))};
            h.s = sequence_at(p, n);
            for (int64_t i = 0; i < h.s.sq; i++) {
                int64_t count = 0;
                for (int64_t j = 0; j < h.s.sk; j++)
                    count += !is_hidden(&h, i, j);
                keys += (double)count;
                rows += count > 0;
            }
        }
    return rows > 0 ? keys / rows : 0;
}

/* SPDX-License-Identifier: Apache-2.0
 * Attention, one query row at a time, in the letters and by the formulas of heddle.h.
 *
 * An element that is not seen has S = -inf and is skipped, never multiplied by zero: its key, value, bias and dweights
 * may be NaN. Backward computes S, lse and P anew from q and k, so that it does not inherit the rounding of the stored
 * o and lse. */
#include "../mask.h"
#include "ref.h"

#include <stdio.h>

/* One call: what it is given, and its arrays in the workspace. */
typedef struct work {
    const heddle_attention *a;
    const heddle_attention_data *data;
    uint64_t seed, offset;
    double *k, *v;                    /* [sk, d], [sk, dv]: the key/value head in use */
    int64_t loaded;                   /* which one that is: n*hk + y */
    double *q, *o;                    /* [d], [dv]: the row in use */
    double *t, *s, *p, *z;            /* [sk]: T, S, P, Z of the row; s[j] and p[j] for every j */
    double lse, p_sink;               /* of the row; P of the sink */
    double *dout, *dp, *ds, *dq;      /* [dv], [sk], [sk], [d]: of the row */
    double big_d;                     /* D of the row */
    double *dk, *dv, *dbias, *dsinks; /* [sk, d], [sk, dv], [sk], [h]: sums over rows */
} work;

/* One query head of one sequence. */
typedef struct head {
    int64_t n, x;
    sequence all, used; /* all its rows; those that count */
    band sees;
    int64_t off;
    double slope, sink;
    const int32_t *q_segments, *k_segments; /* NULL: all are of one */
} head;

static int64_t lay_out(work *w, const heddle_attention *a, heddle_pass pass, double *base) {
    int64_t used = 0;
    w->a = a;
    w->loaded = -1;
    w->k = take(base, &used, a->sk * a->d);
    w->v = take(base, &used, a->sk * a->dv);
    w->q = take(base, &used, a->d);
    w->o = take(base, &used, a->dv);
    w->t = take(base, &used, a->sk);
    w->s = take(base, &used, a->sk);
    w->p = take(base, &used, a->sk);
    w->z = take(base, &used, a->sk);
    if (pass == HEDDLE_FORWARD)
        return used;
    w->dout = take(base, &used, a->dv);
    w->dp = take(base, &used, a->sk);
    w->ds = take(base, &used, a->sk);
    w->dq = take(base, &used, a->d);
    w->dk = take(base, &used, a->sk * a->d);
    w->dv = take(base, &used, a->sk * a->dv);
    w->dbias = take(base, &used, a->sk);
    w->dsinks = take(base, &used, a->h);
    return used;
}

heddle_status heddle__ref_plan_attention(attention_plan *plan) {
    const heddle_attention *a = &plan->a;
    work w;
    /* plan.c keeps every size under 2^40 and d and dv under 2^10: this fits. */
    plan->workspace = (size_t)lay_out(&w, a, plan->pass, NULL) * sizeof(double);
    plan->threads = 1;
    plan->tile_q = 1;
    plan->tile_k = plan->chunk_k = a->sk;
    snprintf(plan->kernel, sizeof plan->kernel, "heddle_attention_%s_ref", heddle__ref_variant(a->dtype, plan->pass));
    return HEDDLE_OK;
}

static int64_t row_at(heddle_strides stride, int64_t n, int64_t x, int64_t i) {
    return n * stride.b + x * stride.h + i * stride.s;
}

/* Where key j of head y is in k or v; -1: in no page. */
static int64_t key_at(const work *w, heddle_strides stride, const head *c, int64_t y, int64_t j) {
    const heddle_attention *a = w->a;
    if (!(a->features & HEDDLE_PAGES))
        return row_at(stride, c->n, y, c->all.first_k + j);
    const int64_t page = page_of(a, w->data->block_table, c->n, j);
    return page < 0 ? -1 : row_at(stride, page, y, j % a->page);
}

static int64_t lse_at(const heddle_attention *a, const head *c, int64_t i) {
    if (a->features & HEDDLE_VARLEN)
        return c->x * a->total_q + c->all.first_q + i;
    return (c->n * a->h + c->x) * a->sq + i;
}

/* Row j of k or v of head y of keys, times its scale. */
static void load_keys(const work *w, const void *p, const void *scales, heddle_strides stride, const head *c, int64_t y,
                      int64_t j, int64_t n, double *row) {
    const heddle_attention *a = w->a;
    const int64_t at = key_at(w, stride, c, y, j);
    if (!(a->features & HEDDLE_E4M3)) {
        load_row(a->dtype, p, at, n, row);
        return;
    }
    const double scale = scales ? load_element(float_type(a->dtype), scales, c->n * a->hk + y) : 1;
    for (int64_t e = 0; e < n; e++)
        row[e] = scale * (double)e4m3_to_float(((const uint8_t *)p)[at + e]);
}

/* Query head x of sequence n, with its keys and values in w->k and w->v. */
static head load_head(work *w, int64_t n, int64_t x) {
    const heddle_attention *a = w->a;
    const heddle_attention_data *data = w->data;
    heddle_dtype type = float_type(a->dtype);
    head c = {.n = n, .x = x, .sink = -INFINITY};
    c.all = sequence_of(a, data->cu_seqlens_q, data->cu_seqlens_k, NULL, NULL, n);
    c.used = sequence_of(a, data->cu_seqlens_q, data->cu_seqlens_k, data->seqlens_q, data->seqlens_k, n);
    c.sees = band_of(a, c.used);
    c.off = diagonal_offset(a, c.used);
    if (data->alibi_slopes)
        c.slope = load_element(type, data->alibi_slopes, n * a->alibi_stride_b + x);
    if (a->features & HEDDLE_SEGMENTS) {
        c.q_segments = query_segments(a, data->q_segments, c.all, n);
        c.k_segments = key_segments(a, data->k_segments, c.all, n);
    }
    if (data->sinks)
        c.sink = load_element(type, data->sinks, x);
    int64_t y = x / (a->h / a->hk);
    if (w->loaded == n * a->hk + y)
        return c;
    w->loaded = n * a->hk + y;
    for (int64_t j = 0; j < c.used.sk; j++) {
        if (key_at(w, a->k_stride, &c, y, j) < 0)
            continue;
        load_keys(w, data->k, data->k_scale, a->k_stride, &c, y, j, a->d, w->k + j * a->d);
        load_keys(w, data->v, data->v_scale, a->v_stride, &c, y, j, a->dv, w->v + j * a->dv);
    }
    return c;
}

/* Whether a block of queries sees a block of keys. */
static int is_listed(const work *w, const head *c, int64_t of_queries, int64_t of_keys) {
    const range list = blocks_of(w->a, w->data->block_rows, w->data->block_columns, c->n, c->x, of_queries);
    for (int64_t y = list.begin; y < list.end; y++)
        if (w->data->block_columns[y] == of_keys)
            return 1;
    return 0;
}

/* S[i,j], and T[i,j] in w->t[j], for the query in w->q. */
static double score(work *w, const head *c, int64_t i, int64_t j) {
    const heddle_attention *a = w->a;
    const heddle_attention_data *data = w->data;
    double bias = 0;
    if (!band_sees(c->sees, i, j) || key_at(w, a->k_stride, c, 0, j) < 0)
        return -INFINITY;
    if ((a->features & HEDDLE_BLOCKS) && !is_listed(w, c, i / a->block_q, j / a->block_k))
        return -INFINITY;
    if (c->k_segments && c->q_segments[i] != c->k_segments[j])
        return -INFINITY;
    if (data->bool_mask && !data->bool_mask[row_at(a->bool_mask_stride, c->n, c->x, i) + j])
        return -INFINITY;
    if (data->bias)
        bias = load_element(a->dtype, data->bias, row_at(a->bias_stride, c->n, c->x, i) + j);
    if (bias == -INFINITY) /* a mask too: whatever the key holds, it is not seen */
        return -INFINITY;
    double t = w->t[j] = a->scale * dot(w->q, w->k + j * a->d, a->d);
    double capped = a->softcap > 0 ? a->softcap * tanh(t / a->softcap) : t;
    return capped - c->slope * fabs((double)(i + c->off - j)) + bias;
}

/* T, S, P and lse of row i; a row that does not count sees nothing, the sink neither. */
static void probabilities(work *w, const head *c, int64_t i) {
    const heddle_attention *a = w->a;
    int counts = i < c->used.sq;
    double max = counts ? c->sink : -INFINITY, sum = 0;
    fill(w->s, a->sk, -INFINITY);
    fill(w->p, a->sk, 0);
    w->lse = -INFINITY;
    w->p_sink = 0;
    if (counts)
        load_row(a->dtype, w->data->q, row_at(a->q_stride, c->n, c->x, c->all.first_q + i), a->d, w->q);
    for (int64_t j = 0; counts && j < c->used.sk; j++) {
        w->s[j] = score(w, c, i, j);
        if (w->s[j] > max || isnan(w->s[j]))
            max = w->s[j];
    }
    if (max == -INFINITY)
        return;
    sum = exp(c->sink - max);
    for (int64_t j = 0; j < c->used.sk; j++)
        sum += w->p[j] = exp(w->s[j] - max);
    for (int64_t j = 0; j < c->used.sk; j++)
        w->p[j] /= sum;
    w->p_sink = exp(c->sink - max) / sum; /* not from lse, which is rounded */
    w->lse = max + log(sum);
}

/* Of the type that results have. */
static heddle_dtype result_type(const heddle_attention *a) {
    return a->features & HEDDLE_ACCUMULATE ? float_type(a->dtype) : a->dtype;
}

/* A row of a result, or what is added to it. */
static void store_result(const heddle_attention *a, void *p, int64_t at, int64_t n, double *row) {
    const heddle_dtype type = result_type(a);
    for (int64_t e = 0; e < n && (a->features & HEDDLE_ACCUMULATE); e++)
        row[e] += load_element(type, p, at + e);
    store_row(type, p, at, n, row);
}

static double given_lse(const work *w, const head *c, int64_t i) {
    return load_element(float_type(w->a->dtype), w->data->lse, lse_at(w->a, c, i));
}

/* Whether the lse that backward is given is no rounding of row i's own: then it is of more keys, which other calls have. */
static bool is_of_more(const work *w, const head *c, int64_t i) {
    const double rounding = w->a->dtype == HEDDLE_F64 ? 0x1p-40 : 0x1p-14;
    return w->lse != -INFINITY && fabs(given_lse(w, c, i) - w->lse) > rounding * fmax(1, fabs(w->lse));
}

/* Backward of a part of the keys: P of the log-sum-exp of all. */
static void weigh_among_all(work *w, const head *c, int64_t i) {
    if (w->lse == -INFINITY)
        return;
    const double lse = given_lse(w, c, i);
    const double share = lse == -INFINITY ? 0 : exp(w->lse - lse);
    for (int64_t j = 0; j < c->used.sk; j++)
        w->p[j] *= share;
    w->p_sink *= share;
    w->lse = lse;
}

static void dropout(work *w, const head *c, int64_t i) {
    const heddle_attention *a = w->a;
    uint32_t threshold = dropout_threshold(a->dropout), bh = (uint32_t)(c->n * a->whole_h + a->h_offset + c->x),
             row = (uint32_t)(a->q_offset + i);
    philox4 words = {{0}};
    fill(w->z, c->used.sk, 1);
    for (int64_t j = 0; a->dropout > 0 && j < c->used.sk; j++) {
        const int64_t key = a->k_offset + j;
        if (j == 0 || key % DROPOUT_KEYS == 0)
            words = dropout_words(w->seed, w->offset, bh, row, (uint32_t)(key / DROPOUT_KEYS));
        w->z[j] = dropout_number(words, (uint32_t)(key % DROPOUT_KEYS)) >= threshold ? dropout_scale(a->dropout) : 0;
    }
}

/* What has been found of a row, and what is there, become one. */
static void merge_row(const work *w, int64_t at, int64_t lse) {
    const heddle_dtype type = float_type(w->a->dtype);
    const double there = load_element(type, w->data->lse, lse);
    double share[2];
    store_element(type, w->data->lse, lse, merged_lse(there, w->lse, share));
    for (int64_t e = 0; e < w->a->dv; e++) {
        const double old = there == -INFINITY ? 0 : share[0] * load_element(type, w->data->o, at + e);
        store_element(type, w->data->o, at + e, old + share[1] * w->o[e]);
    }
}

/* Rows of o and lse that belong to no sequence are left alone; weights has all of its rows. */
static void forward_row(work *w, const head *c, int64_t i) {
    const heddle_attention *a = w->a;
    const heddle_attention_data *data = w->data;
    probabilities(w, c, i);
    if (data->weights)
        store_row(a->dtype, data->weights, row_at(a->weights_stride, c->n, c->x, i), a->sk, w->p);
    if (i >= c->all.sq)
        return;
    dropout(w, c, i);
    fill(w->o, a->dv, 0);
    for (int64_t j = 0; j < c->used.sk; j++)
        if (w->s[j] != -INFINITY)
            add_scaled(w->o, w->p[j] * w->z[j], w->v + j * a->dv, a->dv);
    const int64_t at = row_at(a->o_stride, c->n, c->x, c->all.first_q + i);
    if (a->features & HEDDLE_ACCUMULATE) {
        merge_row(w, at, lse_at(a, c, i));
        return;
    }
    store_row(a->dtype, data->o, at, a->dv, w->o);
    if (data->lse)
        store_element(float_type(a->dtype), data->lse, lse_at(a, c, i), w->lse);
}

static void forward(work *w) {
    for (int64_t n = 0; n < w->a->b; n++)
        for (int64_t x = 0; x < w->a->h; x++) {
            head c = load_head(w, n, x);
            for (int64_t i = 0; i < (w->data->weights ? w->a->sq : c.all.sq); i++)
                forward_row(w, &c, i);
        }
}

/* dP, D and dS of row i, after its probabilities. */
static void row_gradient(work *w, const head *c, int64_t i) {
    const heddle_attention *a = w->a;
    const heddle_attention_data *data = w->data;
    probabilities(w, c, i);
    const bool part = a->features & HEDDLE_ACCUMULATE || is_of_more(w, c, i);
    if (part)
        weigh_among_all(w, c, i);
    dropout(w, c, i);
    w->big_d = 0;
    fill(w->dout, a->dv, 0);
    if (w->lse == -INFINITY)
        return;
    if (data->dout)
        load_row(a->dtype, data->dout, row_at(a->do_stride, c->n, c->x, c->all.first_q + i), a->dv, w->dout);
    for (int64_t e = 0; e < a->dv && part && data->dout; e++)
        w->big_d +=
            w->dout[e] * load_element(result_type(a), data->o, row_at(a->o_stride, c->n, c->x, c->all.first_q + i) + e);
    if (data->dlse)
        w->big_d -= load_element(float_type(a->dtype), data->dlse, lse_at(a, c, i));
    for (int64_t j = 0; j < c->used.sk; j++) {
        if (w->s[j] == -INFINITY)
            continue;
        w->dp[j] = data->dout ? w->z[j] * dot(w->dout, w->v + j * a->dv, a->dv) : 0;
        if (data->dweights)
            w->dp[j] += load_element(a->dtype, data->dweights, row_at(a->dweights_stride, c->n, c->x, i) + j);
        if (!part)
            w->big_d += w->p[j] * w->dp[j];
    }
    for (int64_t j = 0; j < c->used.sk; j++)
        w->ds[j] = w->s[j] == -INFINITY ? 0 : w->p[j] * (w->dp[j] - w->big_d);
}

/* dq of row i, and what the row adds to dk, dv and dsinks. */
static void backward_row(work *w, const head *c, int64_t i) {
    const heddle_attention *a = w->a;
    const heddle_attention_data *data = w->data;
    row_gradient(w, c, i);
    if (data->sinks && w->lse != -INFINITY)
        w->dsinks[c->x] -= w->p_sink * w->big_d;
    fill(w->dq, a->d, 0);
    for (int64_t j = 0; j < c->used.sk; j++) {
        if (w->s[j] == -INFINITY)
            continue;
        double tanh_t = a->softcap > 0 ? tanh(w->t[j] / a->softcap) : 0, dt = w->ds[j] * (1 - tanh_t * tanh_t);
        add_scaled(w->dq, a->scale * dt, w->k + j * a->d, a->d);
        add_scaled(w->dk + j * a->d, a->scale * dt, w->q, a->d);
        add_scaled(w->dv + j * a->dv, w->z[j] * w->p[j], w->dout, a->dv);
    }
    if (data->dq)
        store_result(a, data->dq, row_at(a->dq_stride, c->n, c->x, c->all.first_q + i), a->d, w->dq);
}

/* dq of a group of query heads, dk and dv of their key/value head y. */
static void backward_group(work *w, int64_t n, int64_t y) {
    const heddle_attention *a = w->a;
    const heddle_attention_data *data = w->data;
    int64_t group = a->h / a->hk;
    head c = load_head(w, n, y * group);
    fill(w->dk, a->sk * a->d, 0);
    fill(w->dv, a->sk * a->dv, 0);
    for (int64_t x = y * group; x < (y + 1) * group; x++) {
        c = load_head(w, n, x);
        for (int64_t i = 0; i < c.all.sq; i++)
            backward_row(w, &c, i);
    }
    for (int64_t j = 0; j < c.all.sk; j++) {
        if (data->dk)
            store_result(a, data->dk, row_at(a->dk_stride, n, y, c.all.first_k + j), a->d, w->dk + j * a->d);
        if (data->dv)
            store_result(a, data->dv, row_at(a->dv_stride, n, y, c.all.first_k + j), a->dv, w->dv + j * a->dv);
    }
}

/* What index `at` of dbias takes in along a dimension of n: itself, or with stride 0 everything. */
static range summed(int64_t stride, int64_t at, int64_t n) {
    return stride ? (range){at, at + 1} : (range){0, n};
}

/* dbias[n0, x0, i0, :]. Its rows are the outermost loop, so that one row of sums is enough however dbias is reduced. */
static void dbias_row(work *w, int64_t n0, int64_t x0, int64_t i0) {
    const heddle_attention *a = w->a;
    heddle_strides stride = a->dbias_stride;
    range ns = summed(stride.b, n0, a->b), xs = summed(stride.h, x0, a->h), is = summed(stride.s, i0, a->sq);
    fill(w->dbias, a->sk, 0);
    for (int64_t n = ns.begin; n < ns.end; n++)
        for (int64_t x = xs.begin; x < xs.end; x++) {
            head c = load_head(w, n, x);
            for (int64_t i = is.begin; i < min64(is.end, c.used.sq); i++) {
                row_gradient(w, &c, i);
                for (int64_t j = 0; j < c.used.sk; j++)
                    w->dbias[j] += w->s[j] == -INFINITY ? 0 : w->ds[j];
            }
        }
    store_row(a->dtype, w->data->dbias, row_at(stride, n0, x0, i0), a->sk, w->dbias);
}

static void backward(work *w) {
    const heddle_attention *a = w->a;
    const heddle_attention_data *data = w->data;
    fill(w->dsinks, a->h, 0);
    for (int64_t n = 0; n < a->b && (data->dq || data->dk || data->dv || data->dsinks); n++)
        for (int64_t y = 0; y < a->hk; y++)
            backward_group(w, n, y);
    if (data->dsinks)
        store_row(float_type(a->dtype), data->dsinks, 0, a->h, w->dsinks);
    if (!data->dbias)
        return;
    for (int64_t n = 0; n < (a->dbias_stride.b ? a->b : 1); n++)
        for (int64_t x = 0; x < (a->dbias_stride.h ? a->h : 1); x++)
            for (int64_t i = 0; i < (a->dbias_stride.s ? a->sq : 1); i++)
                dbias_row(w, n, x, i);
}

heddle_status heddle__ref_run_attention(const attention_plan *plan, const heddle_attention_data *data, void *workspace,
                                        void *stream) {
    (void)stream;
    work w = {.data = data, .seed = plan->a.seed, .offset = plan->a.offset};
    if (data->rng_state) {
        w.seed = data->rng_state[0];
        w.offset = data->rng_state[1];
    }
    lay_out(&w, &plan->a, plan->pass, workspace);
    if (plan->pass == HEDDLE_FORWARD)
        forward(&w);
    else
        backward(&w);
    return HEDDLE_OK;
}

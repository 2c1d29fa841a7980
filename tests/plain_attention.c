/* SPDX-License-Identifier: Apache-2.0
 * Plain attention: unblocked loops in float32, every intermediate rounded to the dtype, as PyTorch's math path does
 * it. Its error sets the tolerance of the kernels; and as it is written from heddle.h alone, it checks ref too. */
#include "common.h"

#include "philox.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void attention_lengths(const attention_problem *p, int64_t n, int64_t length[4]) {
    const heddle_attention *a = &p->a;
    int64_t first[2] = {0, 0}, rows[2] = {a->sq, a->sk};
    for (int side = 0; side < 2; side++) {
        const tensor *cu = &p->t[side ? T_CU_K : T_CU_Q], *len = &p->t[side ? T_LEN_K : T_LEN_Q];
        if (cu->host) {
            first[side] = (int64_t)tensor_raw(cu, n);
            rows[side] = (int64_t)tensor_raw(cu, n + 1) - first[side];
        }
        if (len->host && (int64_t)tensor_raw(len, n) < rows[side])
            rows[side] = (int64_t)tensor_raw(len, n);
    }
    memcpy(length, (int64_t[]){first[0], rows[0], first[1], rows[1]}, 4 * sizeof *length);
}

bool attention_sees(const attention_problem *p, int64_t n, int64_t x, int64_t i, int64_t j) {
    const heddle_attention *a = &p->a;
    int64_t length[4];
    attention_lengths(p, n, length);
    int64_t off = a->mask == HEDDLE_CAUSAL_TOP_LEFT ? 0 : length[3] - length[1];
    if (i >= length[1] || j >= length[3])
        return false;
    if (a->mask != HEDDLE_MASK_NONE && j > i + off)
        return false;
    if (a->features & HEDDLE_WINDOW) {
        if (a->window_left >= 0 && i + off - j > a->window_left)
            return false;
        if (a->window_right >= 0 && j - (i + off) > a->window_right)
            return false;
    }
    if ((a->features & HEDDLE_BIAS) && tensor_get(&p->t[T_BIAS], n, x, i, j) < -0x1p24)
        return false;
    return !(a->features & HEDDLE_BOOL_MASK) || tensor_get(&p->t[T_BOOL_MASK], n, x, i, j) != 0;
}

/* One query head of one sequence. */
typedef struct head {
    int64_t n, x, y, first_q, sq, first_k, sk, pack; /* pack: 0 when rows are packed, else n */
    plain_order order;
    bool *sees;                    /* [sq, sk] */
    float *q, *k, *v, *dout;       /* [s, d] */
    float *p, *z, *pz, *tanh, *dp; /* [sq, sk] */
    float *lse, *sink, *sum;       /* [sq] */
    double *k_norm, *v_norm;       /* [sk] */
} head;

static void *zeros(int64_t n, size_t size) {
    void *p = calloc((size_t)n + 1, size);
    assert_non_null(p);
    return p;
}

static double norm_of(const float *a, int64_t n) {
    double sum = 0;
    for (int64_t e = 0; e < n; e++)
        sum += (double)a[e] * (double)a[e];
    return sqrt(sum);
}

static double *norms_of(const float *rows, int64_t count, int64_t width) {
    double *norms = zeros(count, sizeof *norms);
    for (int64_t x = 0; x < count; x++)
        norms[x] = norm_of(rows + x * width, width);
    return norms;
}

/* As the products take them: in TF32, rounded. */
static float *rows_of(const attention_problem *problem, int which, int64_t pack, int64_t x, int64_t first,
                      int64_t rows) {
    const tensor *t = &problem->t[which];
    const int precision = precision_of(problem->a.dtype, problem->a.features);
    int64_t last = t->dim[3];
    float *p = zeros(rows * last, sizeof *p);
    for (int64_t i = 0; i < rows && t->host; i++)
        for (int64_t e = 0; e < last; e++)
            p[i * last + e] = round_to(precision, (float)tensor_get(t, pack, x, first + i, e));
    return p;
}

static head head_new(const attention_problem *p, int64_t n, int64_t x, plain_order order) {
    const heddle_attention *a = &p->a;
    int64_t length[4];
    attention_lengths(p, n, length);
    head h = {.order = order,
              .n = n,
              .x = x,
              .y = x / (a->h / a->hk),
              .first_q = length[0],
              .sq = length[1],
              .first_k = length[2],
              .sk = length[3],
              .pack = a->features & HEDDLE_VARLEN ? 0 : n};
    h.q = rows_of(p, T_Q, h.pack, x, h.first_q, h.sq);
    h.k = rows_of(p, T_K, h.pack, h.y, h.first_k, h.sk);
    h.v = rows_of(p, T_V, h.pack, h.y, h.first_k, h.sk);
    h.dout = rows_of(p, T_DOUT, h.pack, x, h.first_q, p->t[T_DOUT].host ? h.sq : 0);
    h.k_norm = norms_of(h.k, h.sk, a->d);
    h.v_norm = norms_of(h.v, h.sk, a->dv);
    h.sees = zeros(h.sq * h.sk, sizeof *h.sees);
    float **square[] = {&h.p, &h.z, &h.pz, &h.tanh, &h.dp}, **row[] = {&h.lse, &h.sink, &h.sum};
    for (size_t s = 0; s < COUNT(square); s++)
        *square[s] = zeros(h.sq * h.sk, sizeof(float));
    for (size_t s = 0; s < COUNT(row); s++)
        *row[s] = zeros(h.sq, sizeof(float));
    for (int64_t i = 0; i < h.sq; i++)
        for (int64_t j = 0; j < h.sk; j++)
            h.sees[i * h.sk + j] = attention_sees(p, n, x, i, j);
    return h;
}

static void head_free(head *h) {
    void *all[] = {h->q,    h->k,  h->v,   h->dout, h->sees, h->p,      h->z,     h->pz,
                   h->tanh, h->dp, h->lse, h->sink, h->sum,  h->k_norm, h->v_norm};
    for (size_t s = 0; s < COUNT(all); s++)
        free(all[s]);
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
    return x + 1 == n || (order == PLAIN_BLOCKED && x % PLAIN_BLOCK == PLAIN_BLOCK - 1);
}

static float dot(const float *a, const float *b, int64_t n, plain_order order) {
    float sum = 0, part = 0;
    for (int64_t x = 0; x < n; x++) {
        const int64_t e = term_at(x, n, order);
        part += a[e] * b[e];
        if (ends_block(x, n, order)) {
            sum += part;
            part = 0;
        }
    }
    return sum;
}

/* sum over x of weight[x]·rows[x], and of the magnitudes size[x]·|rows[x]| (without sizes: |weight[x]|), where seen. */
typedef struct sum_terms {
    int64_t count, stride;
    const float *weight;
    const double *size;
    const bool *sees;
} sum_terms;

static void sum_rows(const sum_terms *t, const float *rows, int64_t width, plain_order order, float *sum,
                     double *most) {
    float part[512] = {0};
    assert_true(width <= (int64_t)COUNT(part));
    memset(sum, 0, (size_t)width * sizeof *sum);
    memset(most, 0, (size_t)width * sizeof *most);
    for (int64_t y = 0; y < t->count; y++) {
        const int64_t x = term_at(y, t->count, order), at = x * t->stride;
        const float *row = rows + x * width, weight = t->weight[at];
        const double size = t->size ? t->size[at] : fabs((double)weight);
        for (int64_t e = 0; e < width && t->sees[at]; e++)
            part[e] += weight * row[e];
        for (int64_t e = 0; e < width && t->sees[at] && order == PLAIN_FORWARD; e++) /* one of the runs measures */
            most[e] += size * fabs((double)row[e]);
        for (int64_t e = 0; e < width && ends_block(y, t->count, order); e++) {
            sum[e] += part[e];
            part[e] = 0;
        }
    }
}

static float keep_factor(const attention_problem *p, const head *h, int64_t i, int64_t j) {
    const heddle_attention *a = &p->a;
    if (a->dropout == 0)
        return 1;
    uint64_t seed = a->seed, offset = a->offset;
    const tensor *state = &p->t[T_RNG];
    if (state->host) {
        memcpy(&seed, state->host + (size_t)state->guard * 8, sizeof seed);
        memcpy(&offset, state->host + (size_t)(state->guard + 1) * 8, sizeof offset);
    }
    philox4 words = dropout_words(seed, offset, (uint32_t)(h->n * a->h + h->x), (uint32_t)i, (uint32_t)(j / 4));
    return words.w[j % 4] >= (uint32_t)floor(a->dropout * 0x1p32) ? (float)(1 / (1 - a->dropout)) : 0;
}

static float score(const attention_problem *p, const head *h, int64_t i, int64_t j, float *tanh_out) {
    const heddle_attention *a = &p->a;
    const int t = precision_of(a->dtype, a->features);
    float product = dot(h->q + i * a->d, h->k + j * a->d, a->d, h->order);
    float s = round_to(t, (float)a->scale * round_to(t, product));
    if (!isfinite(s)) /* float16 cannot hold it; what follows is float32's */
        s = (float)a->scale * product;
    *tanh_out = 0;
    if (a->softcap > 0) {
        *tanh_out = round_to(t, tanhf(round_to(t, s / (float)a->softcap)));
        s = round_to(t, (float)a->softcap * *tanh_out);
    }
    if (a->features & HEDDLE_ALIBI) {
        int64_t off = a->mask == HEDDLE_CAUSAL_TOP_LEFT ? 0 : h->sk - h->sq;
        float slope = (float)tensor_get(&p->t[T_ALIBI], h->n, 0, 0, h->x);
        s = round_to(t, s - slope * (float)llabs(i + off - j));
    }
    if (a->features & HEDDLE_BIAS)
        s = round_to(t, s + (float)tensor_get(&p->t[T_BIAS], h->n, h->x, i, j));
    return s;
}

static void plain_forward(attention_problem *p, head *h, double natural[T_COUNT]) {
    const heddle_attention *a = &p->a;
    const int t = precision_of(a->dtype, a->features);
    float sink = a->features & HEDDLE_SINKS ? (float)tensor_raw(&p->t[T_SINKS], h->x) : -INFINITY;
    for (int64_t i = 0; i < h->sq; i++) {
        float *s = h->p + i * h->sk, top = sink, sum = 0;
        const bool *sees = h->sees + i * h->sk;
        double largest = 0;
        const double q_norm = a->scale * norm_of(h->q + i * a->d, a->d);
        for (int64_t j = 0; j < h->sk; j++) {
            if (!sees[j])
                continue;
            s[j] = score(p, h, i, j, &h->tanh[i * h->sk + j]);
            top = fmaxf(top, s[j]);
            largest = fmax(largest, fabs((double)s[j]) + q_norm * h->k_norm[j]);
        }
        for (int64_t j = 0; j < h->sk; j++)
            sum += sees[j] ? expf(s[j] - top) : 0;
        h->sink[i] = isinf(sink) ? 0 : expf(sink - top);
        sum += h->sink[i];
        for (int64_t j = 0; j < h->sk; j++) {
            s[j] = sees[j] ? round_to(t, expf(s[j] - top) / sum) : 0;
            h->z[i * h->sk + j] = keep_factor(p, h, i, j);
        }
        h->sink[i] = sum > 0 ? round_to(t, h->sink[i] / sum) : 0;
        h->lse[i] = sum > 0 ? top + logf(sum) : -INFINITY;
        natural[T_LSE] = fmax(natural[T_LSE], largest + 1);
        natural[T_WEIGHTS] = 1;
    }
    float *o = zeros(a->dv, sizeof *o);
    double *most = zeros(a->dv, sizeof *most);
    for (int64_t i = 0; i < h->sq; i++) {
        for (int64_t j = 0; j < h->sk; j++)
            h->pz[i * h->sk + j] = round_to(t, h->p[i * h->sk + j] * h->z[i * h->sk + j]);
        if (p->t[T_LSE].host)
            tensor_set(&p->t[T_LSE], h->pack, h->x, h->first_q + i, 0, (double)h->lse[i]);
        for (int64_t j = 0; j < h->sk && p->t[T_WEIGHTS].host; j++)
            tensor_set(&p->t[T_WEIGHTS], h->n, h->x, i, j, (double)h->p[i * h->sk + j]);
        const sum_terms terms = {h->sk, 1, h->pz + i * h->sk, NULL, h->sees + i * h->sk};
        sum_rows(&terms, h->v, a->dv, h->order, o, most);
        for (int64_t e = 0; e < a->dv; e++) {
            tensor_set(&p->t[T_O], h->pack, h->x, h->first_q + i, e, (double)o[e]);
            natural[T_O] = fmax(natural[T_O], most[e]);
        }
    }
    free(o);
    free(most);
}

/* dS of one head into h->dp (before the softcap's factor), D into h->sum, and the magnitude of dS's terms into
 * `size`. */
static void plain_scores_backward(attention_problem *p, head *h, double *size, double natural[T_COUNT]) {
    const heddle_attention *a = &p->a;
    const int t = precision_of(a->dtype, a->features);
    float unused;
    /* As heddle.h says: P anew, from S and the float32 lse. In blocks all is as PyTorch has it, who keeps P. */
    for (int64_t i = 0; i < h->sq && h->order != PLAIN_BLOCKED; i++)
        for (int64_t j = 0; j < h->sk; j++)
            if (h->sees[i * h->sk + j]) {
                float *weight = &h->p[i * h->sk + j];
                *weight = round_to(t, expf(score(p, h, i, j, &unused) - h->lse[i]));
                h->pz[i * h->sk + j] = round_to(t, *weight * h->z[i * h->sk + j]);
            }
    for (int64_t i = 0; i < h->sq; i++) {
        float *dp = h->dp + i * h->sk, *weight = h->p + i * h->sk, sum = 0, of_weights = 0;
        double *most = size + i * h->sk, total = 0;
        const double dout_norm = p->t[T_DOUT].host ? norm_of(h->dout + i * a->dv, a->dv) : 0;
        for (int64_t j = 0; j < h->sk; j++) {
            if (!h->sees[i * h->sk + j])
                continue;
            if (p->t[T_DOUT].host) {
                dp[j] = round_to(t, round_to(t, dot(h->dout + i * a->dv, h->v + j * a->dv, a->dv, h->order)) *
                                        h->z[i * h->sk + j]);
                most[j] = dout_norm * h->v_norm[j] * (double)h->z[i * h->sk + j];
            }
            if (p->t[T_DWEIGHTS].host) {
                float dw = (float)tensor_get(&p->t[T_DWEIGHTS], h->n, h->x, i, j);
                dp[j] = round_to(t, dp[j] + dw);
                of_weights += weight[j] * dw;
                most[j] += fabs((double)dw);
            }
            most[j] *= (double)weight[j];
            total += most[j];
            sum += weight[j] * dp[j];
        }
        float dlse = p->t[T_DLSE].host ? (float)tensor_get(&p->t[T_DLSE], h->pack, h->x, h->first_q + i, 0) : 0;
        total += fabs((double)dlse);
        if (h->order == PLAIN_REVERSED && p->t[T_DOUT].host) {
            sum = of_weights;
            for (int64_t e = 0; e < a->dv; e++)
                sum += h->dout[i * a->dv + e] * (float)tensor_get(&p->t[T_O], h->pack, h->x, h->first_q + i, e);
        }
        h->sum[i] = sum - dlse;
        for (int64_t j = 0; j < h->sk; j++) {
            dp[j] = h->sees[i * h->sk + j] ? round_to(t, weight[j] * (dp[j] - h->sum[i])) : 0;
            most[j] += (double)weight[j] * total;
        }
        natural[T_DSINKS] += (double)h->sink[i] * total;
    }
}

typedef struct sums {
    double *dk, *dv, *dbias, *dsinks;                         /* by place in the span */
    double *natural_dk, *natural_dv, *natural_dbias, largest; /* the same, of magnitudes */
} sums;

/* sum_j ds[i,j] k[j] (or the transposed sum), each head's share rounded to the dtype like a tensor of its own. */
static void plain_gradients(attention_problem *p, head *h, const double *size, sums *s, double natural[T_COUNT]) {
    const heddle_attention *a = &p->a;
    const int t = precision_of(a->dtype, a->features);
    tensor *dq = &p->t[T_DQ], *dk = &p->t[T_DK], *dv = &p->t[T_DV], *db = &p->t[T_DBIAS];
    for (int64_t i = 0; i < h->sq; i++)
        for (int64_t j = 0; j < h->sk; j++) {
            float *ds = &h->dp[i * h->sk + j], th = h->tanh[i * h->sk + j];
            if (db->host) {
                int64_t at = h->n * db->stride[0] + h->x * db->stride[1] + i * db->stride[2] + j;
                s->dbias[at] += (double)*ds;
                s->natural_dbias[at] += size[i * h->sk + j];
            }
            if (a->softcap > 0)
                *ds = round_to(t, *ds * (1 - th * th));
        }
    float *sum = zeros(a->d + a->dv, sizeof *sum);
    double *most = zeros(a->d + a->dv, sizeof *most);
    for (int64_t i = 0; i < h->sq; i++) {
        const sum_terms terms = {h->sk, 1, h->dp + i * h->sk, size + i * h->sk, h->sees + i * h->sk};
        sum_rows(&terms, h->k, a->d, h->order, sum, most);
        for (int64_t e = 0; e < a->d; e++) {
            if (dq->host)
                tensor_set(dq, h->pack, h->x, h->first_q + i, e, (double)((float)a->scale * sum[e]));
            natural[T_DQ] = fmax(natural[T_DQ], fabs(a->scale) * most[e]);
        }
    }
    for (int64_t j = 0; j < h->sk; j++) {
        sum_terms terms = {h->sq, h->sk, h->dp + j, size + j, h->sees + j};
        int64_t row = h->pack * dk->stride[0] + h->y * dk->stride[1] + (h->first_k + j) * dk->stride[2];
        if (dk->host)
            sum_rows(&terms, h->q, a->d, h->order, sum, most);
        for (int64_t e = 0; e < a->d && dk->host; e++) {
            s->dk[row + e] += (double)round_to(t, (float)a->scale * sum[e]);
            s->natural_dk[row + e] += fabs(a->scale) * most[e];
        }
        row = h->pack * dv->stride[0] + h->y * dv->stride[1] + (h->first_k + j) * dv->stride[2];
        terms.weight = h->pz + j;
        terms.size = NULL;
        if (dv->host && p->t[T_DOUT].host)
            sum_rows(&terms, h->dout, a->dv, h->order, sum, most);
        for (int64_t e = 0; e < a->dv && dv->host && p->t[T_DOUT].host; e++) {
            s->dv[row + e] += (double)round_to(t, sum[e]);
            s->natural_dv[row + e] += most[e];
        }
    }
    free(sum);
    free(most);
    for (int64_t i = 0; i < h->sq && p->t[T_DSINKS].host; i++)
        s->dsinks[h->x] -= (double)round_to(t, h->sink[i] * h->sum[i]);
}

/* What every row of every sequence gets before anything is computed: the values of a row that sees nothing. Of
 * packed tensors only rows of sequences are written; elsewhere everything is. */
static void plain_blank(attention_problem *p, enum attention_tensor which, bool keys, double value) {
    tensor *t = &p->t[which];
    if (!t->host)
        return;
    bool packed = (p->a.features & HEDDLE_VARLEN) && which != T_WEIGHTS && which != T_DBIAS && which != T_DSINKS;
    int64_t sequences = packed ? p->a.b : 1;
    for (int64_t n = 0; n < sequences; n++) {
        int64_t begin = packed ? (int64_t)tensor_raw(&p->t[keys ? T_CU_K : T_CU_Q], n) : 0;
        int64_t end = packed ? (int64_t)tensor_raw(&p->t[keys ? T_CU_K : T_CU_Q], n + 1) : t->dim[2];
        for (int64_t m = 0; m < t->dim[0]; m++)
            for (int64_t x = 0; x < t->dim[1]; x++)
                for (int64_t i = begin; i < end; i++)
                    for (int64_t e = 0; e < t->dim[3]; e++)
                        tensor_set(t, m, x, i, e, value);
    }
}

static double store_sums(tensor *t, const double *sum, const double *size) {
    double most = 0;
    for (int64_t at = 0; t->host && at < t->span; at++) {
        if (!tensor_is_poison(t, at))
            tensor_raw_set(t, at, sum[at]);
        most = fmax(most, size ? size[at] : 0);
    }
    return most;
}

void plain_attention(attention_problem *p, plain_order order, double natural[T_COUNT]) {
    memset(natural, 0, T_COUNT * sizeof *natural);
    for (int which = 0; which < T_COUNT; which++)
        if (is_output(&attention_fields[which]))
            plain_blank(p, which, which == T_DK || which == T_DV, which == T_LSE ? -INFINITY : 0);
    sums s = {.dk = zeros(p->t[T_DK].span, 8),
              .dv = zeros(p->t[T_DV].span, 8),
              .dbias = zeros(p->t[T_DBIAS].span, 8),
              .dsinks = zeros(p->a.h, 8),
              .natural_dk = zeros(p->t[T_DK].span, 8),
              .natural_dv = zeros(p->t[T_DV].span, 8),
              .natural_dbias = zeros(p->t[T_DBIAS].span, 8)};
    for (int64_t n = 0; n < p->a.b; n++)
        for (int64_t x = 0; x < p->a.h; x++) {
            head h = head_new(p, n, x, order);
            double *size = zeros(h.sq * h.sk, sizeof *size);
            plain_forward(p, &h, natural);
            plain_scores_backward(p, &h, size, natural);
            plain_gradients(p, &h, size, &s, natural);
            free(size);
            head_free(&h);
        }
    natural[T_DK] = store_sums(&p->t[T_DK], s.dk, s.natural_dk);
    natural[T_DV] = store_sums(&p->t[T_DV], s.dv, s.natural_dv);
    natural[T_DBIAS] = store_sums(&p->t[T_DBIAS], s.dbias, s.natural_dbias);
    store_sums(&p->t[T_DSINKS], s.dsinks, NULL);
    double *all[] = {s.dk, s.dv, s.dbias, s.dsinks, s.natural_dk, s.natural_dv, s.natural_dbias};
    for (size_t x = 0; x < COUNT(all); x++)
        free(all[x]);
}

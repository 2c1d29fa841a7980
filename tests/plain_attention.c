/* SPDX-License-Identifier: Apache-2.0
 * Plain attention: unblocked loops in float32, every intermediate rounded to the dtype, as PyTorch's math path does
 * it. Its error sets the tolerance of the kernels; and as it is written from heddle.h alone, it checks ref too. */
#include "plain_sums.h"

#include "random123.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One query head of one sequence, in room that all heads share. Rows of elements are padded with zeros to a multiple of
 * PAD. Of what has [sq, sk] only the columns of a row's `seen` are there, and there is 0 where sees is false. */
typedef struct head {
    int64_t n, x, y, first_q, sq, first_k, sk, pack; /* pack: 0 when rows are packed, else n */
    int64_t d, dv;                                   /* padded */
    int precision;
    plain_order order;
    bool spreads;                      /* are squares wanted? */
    seen_keys *seen;                   /* [sq] */
    bool *sees;                        /* [sq, sk] */
    float *q, *k, *v, *dout, *kt, *vt; /* [s, d], the last two transposed */
    float *s, *p, *z, *pz, *tanh, *dp; /* [sq, sk] */
    float *lse, *sink, *sum;           /* [sq] */
    float *row, *part;                 /* [max(sk, d, dv)] */
    double *most;                      /* the same */
    double *size;                      /* [sq, sk] */
    double *of_s;                      /* [sq, sk]: squares of what a score is rounded from */
    double *of_p, *of_ds;              /* [sq, sk]: what the rounding of P goes with; of dS, and of D */
    double *k_norm, *v_norm;           /* [sk] */
} head;

enum { PAD = 8 };

static int64_t padded(int64_t n) {
    return (n + PAD - 1) / PAD * PAD;
}

/* [rows, width], of which n columns count, as the products take them (in TF32, rounded); and transposed. */
static void take_rows(const head *h, int64_t n, int64_t rows, int64_t width, float *to, float *transposed) {
    round_all(h->precision, rows * width, to);
    for (int64_t e = 0; e < n && transposed; e++)
        for (int64_t i = 0; i < rows; i++)
            transposed[e * rows + i] = to[i * width + e];
}

static void read_rows(const head *h, const tensor *t, int64_t x, int64_t first, int64_t rows, int64_t width, float *to,
                      float *transposed) {
    if (!t->host)
        return;
    for (int64_t i = 0; i < rows; i++)
        tensor_read_floats(t, tensor_at(t, h->pack, x, first + i, 0), t->dim[3], to + i * width);
    take_rows(h, t->dim[3], rows, width, to, transposed);
}

/* Rows of keys or values, from wherever they are, times their scale; what is hidden is of no account. */
static void read_keys(const attention_problem *p, const head *h, const tensor *t, const tensor *scales, int64_t width,
                      float *to, float *transposed) {
    const bool paged = p->a.features & HEDDLE_PAGES;
    const float scale = scales->host ? (float)tensor_get(scales, h->n, 0, 0, h->y) : 1;
    if (!t->host)
        return;
    for (int64_t j = 0; j < h->sk; j++) {
        const int64_t page = paged ? attention_page(p, h->n, j) : h->pack;
        memset(to + j * width, 0, (size_t)width * sizeof *to);
        if (page >= 0)
            tensor_read_floats(t, tensor_at(t, page, h->y, paged ? j % p->a.page : h->first_k + j, 0), t->dim[3],
                               to + j * width);
        for (int64_t e = 0; e < width && scales->host; e++)
            to[j * width + e] *= scale;
    }
    take_rows(h, t->dim[3], h->sk, width, to, transposed);
}

static head head_new(const attention_problem *p, plain_order order) {
    const heddle_attention *a = &p->a;
    const int64_t d = padded(a->d), dv = padded(a->dv), all = a->sq * a->sk;
    const int64_t longest = a->sk + d + dv;
    head h = {.order = order, .d = d, .dv = dv, .precision = precision_of(a->dtype, a->features)};
    float **const floats[] = {&h.q,  &h.k,    &h.v,  &h.dout, &h.kt,   &h.vt,  &h.s,   &h.p,   &h.z,
                              &h.pz, &h.tanh, &h.dp, &h.lse,  &h.sink, &h.sum, &h.row, &h.part};
    const int64_t sizes[] = {a->sq * d, a->sk * d, a->sk * dv, a->sq * dv, a->sk * d, a->sk * dv, all,     all,    all,
                             all,       all,       all,        a->sq,      a->sq,     a->sq,      longest, longest};
    for (size_t x = 0; x < COUNT(floats); x++)
        *floats[x] = plain_zeros(sizes[x], sizeof(float));
    h.seen = plain_zeros(a->sq, sizeof *h.seen);
    h.sees = plain_zeros(all, sizeof *h.sees);
    h.most = plain_zeros(longest, sizeof *h.most);
    h.size = plain_zeros(all, sizeof *h.size);
    h.of_s = plain_zeros(all, sizeof *h.of_s);
    h.of_p = plain_zeros(all, sizeof *h.of_p);
    h.of_ds = plain_zeros(all, sizeof *h.of_ds);
    h.k_norm = plain_zeros(a->sk, sizeof *h.k_norm);
    h.v_norm = plain_zeros(a->sk, sizeof *h.v_norm);
    return h;
}

static void head_free(head *h) {
    void *all[] = {h->q,    h->k,    h->v,    h->dout,   h->kt,     h->vt,   h->s,    h->p,    h->z,
                   h->pz,   h->tanh, h->dp,   h->lse,    h->sink,   h->sum,  h->row,  h->part, h->seen,
                   h->sees, h->most, h->size, h->k_norm, h->v_norm, h->of_s, h->of_p, h->of_ds};
    for (size_t s = 0; s < COUNT(all); s++)
        free(all[s]);
}

static void head_begin(const attention_problem *p, head *h, int64_t n, int64_t x) {
    const heddle_attention *a = &p->a;
    int64_t length[4];
    attention_lengths(p, n, length);
    h->n = n;
    h->x = x;
    h->y = x / (a->h / a->hk);
    h->first_q = length[0];
    h->sq = length[1];
    h->first_k = length[2];
    h->sk = length[3];
    h->pack = a->features & HEDDLE_VARLEN ? 0 : n;
    assert_true(h->sq <= a->sq && h->sk <= a->sk);
    read_rows(h, &p->t[T_Q], x, h->first_q, h->sq, h->d, h->q, NULL);
    read_keys(p, h, &p->t[T_K], &p->t[T_K_SCALE], h->d, h->k, h->kt);
    read_keys(p, h, &p->t[T_V], &p->t[T_V_SCALE], h->dv, h->v, h->vt);
    read_rows(h, &p->t[T_DOUT], x, h->first_q, h->sq, h->dv, h->dout, NULL);
    for (int64_t j = 0; j < h->sk; j++) {
        h->k_norm[j] = plain_norm(h->k + j * h->d, a->d);
        h->v_norm[j] = plain_norm(h->v + j * h->dv, a->dv);
    }
    for (int64_t i = 0; i < h->sq; i++)
        h->seen[i] = attention_sees(p, length, n, x, i, h->sees + i * h->sk);
}

/* Dropout's factor of the keys of row i. */
static void keep_factors(const attention_problem *p, const head *h, int64_t i, float *z) {
    const heddle_attention *a = &p->a;
    const double dropped = floor(65536 * a->dropout + 0.5);
    const float kept = (float)(65536 / (65536 - dropped));
    uint64_t seed = a->seed, offset = a->offset;
    const tensor *state = &p->t[T_RNG];
    philox4x32_ctr_t words = {{0}};
    if (state->host) {
        memcpy(&seed, state->host + (size_t)state->guard * 8, sizeof seed);
        memcpy(&offset, state->host + (size_t)(state->guard + 1) * 8, sizeof offset);
    }
    const int64_t heads = a->whole_h ? a->whole_h : a->h;
    for (int64_t j = h->seen[i].from; j < h->seen[i].to; j++) {
        const int64_t key = a->k_offset + j;
        if (a->dropout != 0 && (key % 8 == 0 || j == h->seen[i].from)) {
            const philox4x32_ctr_t counter = {{(uint32_t)(key / 8), (uint32_t)(h->n * heads + a->h_offset + h->x),
                                               (uint32_t)(a->q_offset + i) ^ (uint32_t)(offset >> 32),
                                               (uint32_t)offset}};
            words = philox4x32_R(7, counter, (philox4x32_key_t){{(uint32_t)seed, (uint32_t)(seed >> 32)}});
        }
        z[j] = a->dropout == 0 || (words.v[key % 8 / 2] >> key % 2 * 16 & 0xffff) >= dropped ? kept : 0;
    }
}

/* Are the operands of the device's float32 products rounded, to 22 bits in two parts? Then scores are off, too, by their terms. */
static bool splits_products(const head *h) {
    return h->precision == HEDDLE_F32 && test_device() == HEDDLE_CUDA;
}

/* Has nothing fewer bits than float32? */
static bool exact_products(const head *h) {
    return h->precision == HEDDLE_F32 && !splits_products(h);
}

/* Squares of what float32 rounds, beside those of what the device's products round: 1 in 24 bits of 1 in 22. */
static double share_of_float32(const head *h) {
    return h->precision != HEDDLE_F32 ? 0 : splits_products(h) ? 0x1p-4 : 1;
}

/* plain_squares(): in float32 the sums' roundings, too; elsewhere those are far below those of their terms. */
static void squares_of_sums(const head *h, const plain_terms *terms, const double *of, int64_t width) {
    const double share = share_of_float32(h);
    plain_squares(terms, of, width, share > 0 ? h->part : NULL, share, h->most);
}

/* A value on the way to a score was rounded, `times` times: P is off by as much of itself. */
static void count_rounding(head *h, int64_t i, int times) {
    const int64_t first = i * h->sk + h->seen[i].from, n = h->seen[i].to - h->seen[i].from;
    for (int64_t j = 0; j < n && h->spreads; j++)
        h->of_s[first + j] += times * (double)h->s[first + j] * (double)h->s[first + j];
}

/* The scores of row i where it may see keys; what they are where it does not is of no account. */
static void scores(const attention_problem *p, head *h, int64_t i) {
    const heddle_attention *a = &p->a;
    const int t = h->precision;
    const int64_t from = h->seen[i].from, n = h->seen[i].to - from;
    const float scale = (float)a->scale, cap = (float)a->softcap;
    float *s = h->s + i * h->sk + from, *tanh_out = h->tanh + i * h->sk + from, *product = h->row;
    const plain_terms terms = {a->d, 1, h->q + i * h->d, NULL, h->kt + from, h->sk};
    plain_sum(&terms, n, h->order, h->part, product);
    memcpy(s, product, (size_t)n * sizeof *s);
    round_all(t, n, s);
    for (int64_t j = 0; j < n; j++)
        s[j] *= scale;
    round_all(t, n, s);
    for (int64_t j = 0; j < n; j++) /* where float16 cannot hold it; what follows is float32's */
        s[j] = isfinite(s[j]) ? s[j] : scale * product[j];
    if (h->spreads && h->precision == HEDDLE_F32) { /* the product's terms, and its sums as they grow */
        plain_squares(&terms, NULL, n, h->part, 1, h->most);
        for (int64_t j = 0; j < n; j++)
            h->of_s[i * h->sk + from + j] = a->scale * a->scale * h->most[j];
    }
    count_rounding(h, i, 2);
    for (int64_t j = 0; j < n && a->softcap > 0; j++) {
        tanh_out[j] = round_to(t, tanhf(round_to(t, s[j] / cap)));
        s[j] = round_to(t, cap * tanh_out[j]);
        if (h->spreads)
            h->of_s[i * h->sk + from + j] *= pow(1 - (double)tanh_out[j] * (double)tanh_out[j], 2);
    }
    count_rounding(h, i, a->softcap > 0 ? 2 : 0);
    if (a->features & HEDDLE_ALIBI) {
        const int64_t at = i + attention_diagonal(a, h->sq, h->sk) - from;
        const float slope = (float)tensor_get(&p->t[T_ALIBI], h->n, 0, 0, h->x);
        for (int64_t j = 0; j < n; j++)
            s[j] -= slope * (float)llabs(at - j);
        round_all(t, n, s);
        count_rounding(h, i, 1);
    }
    if (a->features & HEDDLE_BIAS) {
        tensor_read_floats(&p->t[T_BIAS], tensor_at(&p->t[T_BIAS], h->n, h->x, i, from), n, h->row);
        for (int64_t j = 0; j < n; j++)
            s[j] += h->row[j];
        round_all(t, n, s);
        count_rounding(h, i, 1);
    }
}

/* P, its dropout's factors and lse of row i. */
static void probabilities(attention_problem *p, head *h, int64_t i, float sink, double natural[T_COUNT]) {
    const int64_t from = h->seen[i].from, to = h->seen[i].to;
    const bool *sees = h->sees + i * h->sk;
    float *s = h->s + i * h->sk, *weight = h->p + i * h->sk, *z = h->z + i * h->sk, *pz = h->pz + i * h->sk;
    float top = sink, sum;
    plain_row total = {0};
    double largest = 0;
    const double q_norm = p->a.scale * plain_norm(h->q + i * h->d, p->a.d);
    scores(p, h, i);
    for (int64_t j = from; j < to; j++) {
        if (!sees[j])
            continue;
        const double size = fabs((double)s[j]) + q_norm * h->k_norm[j];
        top = s[j] > top ? s[j] : top;
        largest = size > largest ? size : largest;
    }
    for (int64_t j = from; j < to; j++) {
        weight[j] = sees[j] ? expf(s[j] - top) : 0;
        plain_add(&total, j, weight[j]);
        if (h->spreads && sees[j]) /* the exponent is rounded, and the factor that makes it one of 2 */
            h->of_s[i * h->sk + j] += 2 * pow((double)s[j] - (double)top, 2);
    }
    sum = plain_total(&total, h->order);
    h->sink[i] = isinf(sink) ? 0 : expf(sink - top);
    sum += h->sink[i];
    for (int64_t j = from; j < to; j++)
        weight[j] = sees[j] ? weight[j] / sum : 0;
    round_all(h->precision, to - from, weight + from);
    keep_factors(p, h, i, z);
    for (int64_t j = from; j < to; j++)
        pz[j] = weight[j] * z[j];
    round_all(h->precision, to - from, pz + from);
    h->sink[i] = sum > 0 ? round_to(h->precision, h->sink[i] / sum) : 0;
    h->lse[i] = sum > 0 ? top + logf(sum) : -INFINITY;
    natural[T_LSE] = fmax(natural[T_LSE], largest + 1);
    natural[T_WEIGHTS] = 1;
}

/* Sum of (x·y)² over n elements. */
static double squares_of(const float *x, const float *y, int64_t n) {
    double sum = 0;
    for (int64_t e = 0; e < n; e++)
        sum += (double)x[e] * (double)y[e] * (double)x[e] * (double)y[e];
    return sum;
}

/* The squares of what a score is rounded from, in float32; elsewhere P's own rounding is far larger. */
static double squares_of_score(const attention_problem *p, const head *h, int64_t i, int64_t j) {
    const double of_float32 = share_of_float32(h);
    double sum = of_float32 > 0 ? of_float32 * h->of_s[i * h->sk + j] : 0;
    if (splits_products(h))
        sum += p->a.scale * p->a.scale * squares_of(h->q + i * h->d, h->k + j * h->d, h->d);
    return sum;
}

/* Of the weights of row i; returns the largest, before dropout. */
static double measure_weights(const attention_problem *p, head *h, int64_t i) {
    const int64_t row = i * h->sk;
    double most = 0;
    for (int64_t j = h->seen[i].from; j < h->seen[i].to; j++) {
        const double of_score = sqrt(1 + squares_of_score(p, h, i, j));
        h->of_p[row + j] = (double)h->pz[row + j] * of_score;
        most = fmax(most, (double)h->p[row + j] * of_score);
    }
    return most;
}

static void plain_forward(attention_problem *p, head *h, double natural[T_COUNT], double spread[T_COUNT]) {
    const heddle_attention *a = &p->a;
    const float sink = a->features & HEDDLE_SINKS ? (float)tensor_raw(&p->t[T_SINKS], h->x) : -INFINITY;
    for (int64_t i = 0; i < h->sq; i++) {
        const int64_t from = h->seen[i].from, n = h->seen[i].to - from, row = i * h->sk;
        const plain_terms terms = {h->sk, 1, h->pz + row, h->sees + row, h->v, h->dv};
        probabilities(p, h, i, sink, natural);
        if (p->t[T_LSE].host)
            tensor_set(&p->t[T_LSE], h->pack, h->x, h->first_q + i, 0, (double)h->lse[i]);
        if (p->t[T_WEIGHTS].host)
            tensor_write_floats(&p->t[T_WEIGHTS], tensor_at(&p->t[T_WEIGHTS], h->n, h->x, i, from), n,
                                h->p + row + from);
        plain_sum(&terms, h->dv, h->order, h->part, h->row);
        tensor_write_floats(&p->t[T_O], tensor_at(&p->t[T_O], h->pack, h->x, h->first_q + i, 0), a->dv, h->row);
        if (h->order == PLAIN_FORWARD) { /* one of the runs measures */
            plain_sizes(&terms, NULL, h->dv, h->most);
            natural[T_O] = fmax(natural[T_O], plain_largest(h->most, a->dv));
        }
        if (!h->spreads)
            continue;
        spread[T_WEIGHTS] = fmax(spread[T_WEIGHTS], measure_weights(p, h, i));
        squares_of_sums(h, &terms, h->of_p + row, h->dv);
        spread[T_O] = fmax(spread[T_O], sqrt(plain_largest(h->most, a->dv)));
    }
}

/* dP of row i into h->dp, and the magnitude of its terms into h->size. */
static void products_backward(attention_problem *p, head *h, int64_t i) {
    const heddle_attention *a = &p->a;
    const int64_t from = h->seen[i].from, n = h->seen[i].to - from, first = i * h->sk + from;
    float *dp = h->dp + first, *dout = h->dout + i * h->dv;
    double *most = h->size + first;
    const double norm = p->t[T_DOUT].host ? plain_norm(dout, a->dv) : 0;
    const plain_terms terms = {a->dv, 1, dout, NULL, h->vt + from, h->sk};
    memset(dp, 0, (size_t)n * sizeof *dp);
    memset(most, 0, (size_t)n * sizeof *most);
    if (p->t[T_DOUT].host) {
        plain_sum(&terms, n, h->order, h->part, dp);
        round_all(h->precision, n, dp);
        for (int64_t j = 0; j < n; j++) {
            dp[j] *= h->z[first + j];
            most[j] = norm * h->v_norm[from + j] * (double)h->z[first + j];
        }
        round_all(h->precision, n, dp);
    }
    if (p->t[T_DWEIGHTS].host) {
        tensor_read_floats(&p->t[T_DWEIGHTS], tensor_at(&p->t[T_DWEIGHTS], h->n, h->x, i, from), n, h->row);
        for (int64_t j = 0; j < n; j++) {
            dp[j] += h->row[j];
            most[j] += fabs((double)h->row[j]);
        }
        round_all(h->precision, n, dp);
    }
}

/* dS of row i into h->dp (before the softcap's factor), D into h->sum, and the magnitude of dS's terms into h->size. */
static void scores_backward(attention_problem *p, head *h, int64_t i, double natural[T_COUNT]) {
    const heddle_attention *a = &p->a;
    const int64_t from = h->seen[i].from, n = h->seen[i].to - from, first = i * h->sk + from;
    const bool *sees = h->sees + first;
    float *dp = h->dp + first, *weight = h->p + first, sum, of_weights = 0;
    double *most = h->size + first, total = 0;
    plain_row of_row = {0};
    products_backward(p, h, i); /* which leaves dweights in h->row */
    for (int64_t j = 0; j < n; j++) {
        if (!sees[j])
            continue;
        if (p->t[T_DWEIGHTS].host)
            of_weights += weight[j] * h->row[j];
        most[j] *= (double)weight[j];
        total += most[j];
        plain_add(&of_row, j, weight[j] * dp[j]);
    }
    sum = plain_total(&of_row, h->order);
    const float dlse = p->t[T_DLSE].host ? (float)tensor_get(&p->t[T_DLSE], h->pack, h->x, h->first_q + i, 0) : 0;
    total += fabs((double)dlse);
    if (h->order == PLAIN_REVERSED && p->t[T_DOUT].host) {
        tensor_read_floats(&p->t[T_O], tensor_at(&p->t[T_O], h->pack, h->x, h->first_q + i, 0), a->dv, h->row);
        sum = of_weights;
        for (int64_t e = 0; e < a->dv; e++)
            sum += h->dout[i * h->dv + e] * h->row[e];
    }
    h->sum[i] = sum - dlse;
    for (int64_t j = 0; j < n; j++) {
        dp[j] = sees[j] ? weight[j] * (dp[j] - h->sum[i]) : 0;
        most[j] = sees[j] ? most[j] + (double)weight[j] * total : 0;
    }
    round_all(h->precision, n, dp);
    natural[T_DSINKS] += (double)h->sink[i] * total;
}

static void plain_scores_backward(attention_problem *p, head *h, double natural[T_COUNT]) {
    for (int64_t i = 0; i < h->sq; i++) {
        const int64_t from = h->seen[i].from, n = h->seen[i].to - from, first = i * h->sk + from;
        float *weight = h->p + first, *pz = h->pz + first;
        /* As heddle.h says: P anew, from S and the float32 lse. In blocks all is as PyTorch has it, who keeps P. */
        if (h->order != PLAIN_BLOCKED) {
            for (int64_t j = 0; j < n; j++)
                weight[j] = h->sees[first + j] ? expf(h->s[first + j] - h->lse[i]) : 0;
            round_all(h->precision, n, weight);
            for (int64_t j = 0; j < n; j++)
                pz[j] = weight[j] * h->z[first + j];
            round_all(h->precision, n, pz);
        }
        scores_backward(p, h, i, natural);
    }
}

typedef struct sums {
    double *dk, *dv, *dbias, *dsinks;                /* by place in the span */
    double *natural_dk, *natural_dv, *natural_dbias; /* the same, of magnitudes */
    double *spread_dk, *spread_dv, *spread_dbias;    /* and of squares */
    double *spread_dsinks;
} sums;

/* Of dS of row i, and of D from a rounded o, the part of each key; returns that of the sink, whose weight is as far off as the
 * log-sum-exp, and whose D is a sum over all keys. */
static double measure_row(const attention_problem *p, head *h, int64_t i) {
    const heddle_attention *a = &p->a;
    const int64_t from = h->seen[i].from, to = h->seen[i].to, row = i * h->sk;
    const double share = share_of_float32(h);
    const double lse = share > 0 ? sqrt(share) * (double)h->lse[i] : 0; /* in float32, as backward gets it */
    /* In 16 bits the float32 lse, which all P of the row are off by alike, shows in D alone; on a GPU with it the powers and the logarithm
     * of 2, approximate to 2^-22 each. */
    const double approximate = test_device() == HEDDLE_CUDA ? 4 * sqrt(2) : 0;
    const double lse_in_d =
        share > 0 ? 0 : 0x1p-24 / unit_roundoff(h->precision) * hypot((double)h->lse[i], approximate);
    double of_d = 0, of_lse = 1 + lse * lse, of_sum = 0;
    if (p->t[T_DOUT].host)
        tensor_read_floats(&p->t[T_O], tensor_at(&p->t[T_O], h->pack, h->x, h->first_q + i, 0), a->dv, h->row);
    for (int64_t e = 0; e < a->dv && p->t[T_DOUT].host; e++)
        if (h->row[e] != 0) /* dO of a row that sees nothing may be NaN */
            of_d += pow((double)h->row[e] * (double)h->dout[i * h->dv + e], 2);
    of_d += isfinite(lse_in_d) ? pow(lse_in_d * (double)h->sum[i], 2) : 0;
    for (int64_t j = row + from; j < row + to; j++) {
        const double ds = (double)h->dp[j], weight = (double)h->p[j], of_s = squares_of_score(p, h, i, j - row),
                     of_v =
                         h->precision == HEDDLE_F32 ? weight * (double)h->z[j] : 0; /* float32's dP is rounded, too */
        const double of_dp = of_v * of_v * squares_of(h->dout + i * h->dv, h->v + (j - row) * h->dv, h->dv);
        h->of_p[j] = hypot(h->of_p[j], lse * (double)h->pz[j]);
        h->of_ds[j] = 0;
        if (!h->sees[j])
            continue;
        h->of_ds[j] = sqrt(ds * ds * (1 + lse * lse + of_s) + weight * weight * of_d + of_dp);
        of_lse += weight * weight * of_s;
        of_sum += pow(ds + weight * (double)h->sum[i], 2) * (1 + lse * lse + of_s) + of_dp;
    }
    return pow((double)h->sink[i], 2) * (pow((double)h->sum[i], 2) * of_lse + of_sum + of_d);
}

/* What row i gives to dbias, and what the softcap leaves of its dS. */
static void gradients_of_scores(const attention_problem *p, head *h, int64_t i, const sums *s) {
    const int64_t from = h->seen[i].from, n = h->seen[i].to - from, first = i * h->sk + from;
    const tensor *db = &p->t[T_DBIAS];
    float *ds = h->dp + first, *th = h->tanh + first;
    const int64_t at = db->host ? tensor_at(db, h->n, h->x, i, from) : 0;
    if (h->spreads)
        s->spread_dsinks[h->x] += measure_row(p, h, i);
    for (int64_t j = 0; j < n && db->host; j++) {
        s->dbias[at + j] += (double)ds[j];
        s->natural_dbias[at + j] += h->size[first + j];
    }
    for (int64_t j = 0; j < n && db->host && h->spreads; j++)
        s->spread_dbias[at + j] += h->of_ds[first + j] * h->of_ds[first + j];
    if (p->a.softcap > 0) {
        for (int64_t j = 0; j < n; j++)
            ds[j] = h->sees[first + j] ? ds[j] * (1 - th[j] * th[j]) : 0;
        round_all(h->precision, n, ds);
        for (int64_t j = 0; j < n && h->spreads && exact_products(h); j++)
            h->of_ds[first + j] *= (double)(1 - th[j] * th[j]);
    }
}

/* A head's share of dk or dv, rounded to the dtype like a tensor of its own. */
static void add_key_sums(const head *h, const plain_terms *terms, const double *size, const double *of, int64_t width,
                         int64_t padded_width, double scale, double *sum, double *natural, double *spread) {
    plain_sum(terms, padded_width, h->order, h->part, h->row);
    for (int64_t e = 0; e < width; e++)
        h->row[e] *= (float)scale;
    round_all(h->precision, width, h->row);
    /* PyTorch adds the heads' shares up in float32 (or what that is rounded to). */
    const bool rounds = h->order == PLAIN_BLOCKED && h->precision == HEDDLE_F32;
    for (int64_t e = 0; e < width; e++)
        sum[e] = rounds ? (double)((float)sum[e] + h->row[e]) : sum[e] + (double)h->row[e];
    if (h->order == PLAIN_FORWARD) {
        plain_sizes(terms, size, padded_width, h->most);
        for (int64_t e = 0; e < width; e++)
            natural[e] += fabs(scale) * h->most[e];
    }
    if (!h->spreads)
        return;
    squares_of_sums(h, terms, of, padded_width);
    for (int64_t e = 0; e < width; e++)
        spread[e] += scale * scale * h->most[e];
}

static void plain_gradients(attention_problem *p, head *h, sums *s, double natural[T_COUNT], double spread[T_COUNT]) {
    const heddle_attention *a = &p->a;
    tensor *dq = &p->t[T_DQ], *dk = &p->t[T_DK], *dv = &p->t[T_DV];
    for (int64_t i = 0; i < h->sq; i++) {
        const int64_t row = i * h->sk;
        const plain_terms terms = {h->sk, 1, h->dp + row, h->sees + row, h->k, h->d};
        gradients_of_scores(p, h, i, s);
        if (!dq->host)
            continue;
        plain_sum(&terms, h->d, h->order, h->part, h->row);
        for (int64_t e = 0; e < a->d; e++)
            h->row[e] *= (float)a->scale;
        tensor_write_floats(dq, tensor_at(dq, h->pack, h->x, h->first_q + i, 0), a->d, h->row);
        if (h->order == PLAIN_FORWARD) {
            plain_sizes(&terms, h->size + row, h->d, h->most);
            natural[T_DQ] = fmax(natural[T_DQ], fabs(a->scale) * plain_largest(h->most, a->d));
        }
        if (h->spreads) {
            squares_of_sums(h, &terms, h->of_ds + row, h->d);
            spread[T_DQ] = fmax(spread[T_DQ], fabs(a->scale) * sqrt(plain_largest(h->most, a->d)));
        }
    }
    for (int64_t j = 0; j < h->sk; j++) {
        const plain_terms of_k = {h->sq, h->sk, h->dp + j, h->sees + j, h->q, h->d};
        const plain_terms of_v = {h->sq, h->sk, h->pz + j, h->sees + j, h->dout, h->dv};
        const int64_t at_k = dk->host ? tensor_at(dk, h->pack, h->y, h->first_k + j, 0) : 0;
        const int64_t at_v = dv->host ? tensor_at(dv, h->pack, h->y, h->first_k + j, 0) : 0;
        if (dk->host)
            add_key_sums(h, &of_k, h->size + j, h->of_ds + j, a->d, h->d, a->scale, s->dk + at_k, s->natural_dk + at_k,
                         s->spread_dk + at_k);
        if (dv->host && p->t[T_DOUT].host)
            add_key_sums(h, &of_v, NULL, h->of_p + j, a->dv, h->dv, 1, s->dv + at_v, s->natural_dv + at_v,
                         s->spread_dv + at_v);
    }
    for (int64_t i = 0; i < h->sq && p->t[T_DSINKS].host; i++)
        s->dsinks[h->x] -= (double)round_to(h->precision, h->sink[i] * h->sum[i]);
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
                    for (int64_t e = 0, at = tensor_at(t, m, x, i, 0); e < t->dim[3]; e++)
                        tensor_raw_set(t, at + e, value);
    }
}

static void store_sums(tensor *t, const double *sum) {
    for (int64_t at = 0; t->host && at < t->span; at++)
        if (!tensor_is_poison(t, at))
            tensor_raw_set(t, at, sum[at]);
}

void plain_attention(attention_problem *p, plain_order order, double natural[T_COUNT], double spread[T_COUNT]) {
    memset(natural, 0, T_COUNT * sizeof *natural);
    for (int which = 0; which < T_COUNT; which++)
        if (is_output(&attention_fields[which]))
            plain_blank(p, which, which == T_DK || which == T_DV, which == T_LSE ? -INFINITY : 0);
    sums s = {.dk = plain_zeros(p->t[T_DK].span, 8),
              .dv = plain_zeros(p->t[T_DV].span, 8),
              .dbias = plain_zeros(p->t[T_DBIAS].span, 8),
              .dsinks = plain_zeros(p->a.h, 8),
              .natural_dk = plain_zeros(p->t[T_DK].span, 8),
              .natural_dv = plain_zeros(p->t[T_DV].span, 8),
              .natural_dbias = plain_zeros(p->t[T_DBIAS].span, 8),
              .spread_dk = plain_zeros(p->t[T_DK].span, 8),
              .spread_dv = plain_zeros(p->t[T_DV].span, 8),
              .spread_dbias = plain_zeros(p->t[T_DBIAS].span, 8),
              .spread_dsinks = plain_zeros(p->a.h, 8)};
    head h = head_new(p, order);
    double spread_here[T_COUNT] = {0};
    h.spreads = spread != NULL;
    for (int64_t n = 0; n < p->a.b; n++)
        for (int64_t x = 0; x < p->a.h; x++) {
            head_begin(p, &h, n, x);
            plain_forward(p, &h, natural, spread_here);
            plain_scores_backward(p, &h, natural);
            plain_gradients(p, &h, &s, natural, spread_here);
        }
    head_free(&h);
    const struct {
        int which;
        double *sum, *natural, *spread;
    } stored[] = {{T_DK, s.dk, s.natural_dk, s.spread_dk},
                  {T_DV, s.dv, s.natural_dv, s.spread_dv},
                  {T_DBIAS, s.dbias, s.natural_dbias, s.spread_dbias}};
    for (size_t x = 0; x < COUNT(stored); x++) {
        const tensor *t = &p->t[stored[x].which];
        store_sums(&p->t[stored[x].which], stored[x].sum);
        natural[stored[x].which] = t->host ? plain_largest(stored[x].natural, t->span) : 0;
        spread_here[stored[x].which] = t->host ? sqrt(plain_largest(stored[x].spread, t->span)) : 0;
    }
    store_sums(&p->t[T_DSINKS], s.dsinks);
    spread_here[T_DSINKS] = sqrt(plain_largest(s.spread_dsinks, p->a.h));
    double *all[] = {s.dk,        s.dv,        s.dbias,        s.dsinks,        s.natural_dk,   s.natural_dv,
                     s.spread_dk, s.spread_dv, s.spread_dbias, s.spread_dsinks, s.natural_dbias};
    for (size_t x = 0; x < COUNT(all); x++)
        free(all[x]);
    if (spread)
        memcpy(spread, spread_here, sizeof spread_here);
}

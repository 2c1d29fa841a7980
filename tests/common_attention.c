/* SPDX-License-Identifier: Apache-2.0
 * Attention problems: build the tensors that a description asks for, run, compare. */
#include "common.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const attention_tensor_name[T_COUNT] = {"q",
                                                    "k",
                                                    "v",
                                                    "alibi_slopes",
                                                    "bias",
                                                    "bool_mask",
                                                    "sinks",
                                                    "cu_seqlens_q",
                                                    "cu_seqlens_k",
                                                    "seqlens_q",
                                                    "seqlens_k",
                                                    "rng_state",
                                                    "o",
                                                    "lse",
                                                    "weights",
                                                    "dout",
                                                    "dlse",
                                                    "dweights",
                                                    "dq",
                                                    "dk",
                                                    "dv",
                                                    "dbias",
                                                    "dsinks"};

heddle_attention attention_desc(heddle_dtype dtype, int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d,
                                int64_t dv) {
    return (heddle_attention){.size = sizeof(heddle_attention),
                              .dtype = dtype,
                              .device = test_device(),
                              .b = b,
                              .h = h,
                              .hk = hk,
                              .sq = sq,
                              .sk = sk,
                              .d = d,
                              .dv = dv};
}

attention_case attention_case_of(int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d, int64_t dv) {
    return (attention_case){.a = attention_desc(HEDDLE_F32, b, h, hk, sq, sk, d, dv),
                            .seed = (uint64_t)(sq * 7 + sk + d)};
}

/* The public description keeps its defaults; the problem's own copy is literal. */
static void literal(heddle_strides *s, bool packed, int64_t h, int64_t rows, int64_t last) {
    if (!s->b && !s->h && !s->s)
        *s = packed ? (heddle_strides){0, last, h * last} : (heddle_strides){h * rows * last, rows * last, last};
    if (s->b == HEDDLE_BROADCAST || packed)
        s->b = 0;
    if (s->h == HEDDLE_BROADCAST)
        s->h = 0;
    if (s->s == HEDDLE_BROADCAST)
        s->s = 0;
}

/* dbias has one element along what it is summed over, be it nothing. */
static tensor dbias_tensor(const attention_problem *p, bool skew) {
    const heddle_attention *a = &p->a;
    heddle_strides s = a->dbias_stride;
    literal(&s, false, a->h, a->sq, a->sk);
    return tensor_new(a->device, (int)a->dtype,
                      (int64_t[]){a->b || s.b ? a->b : 1, a->h, a->sq || s.s ? a->sq : 1, a->sk},
                      (int64_t[]){s.b, s.h, s.s, 1}, skew);
}

static tensor data_tensor(const attention_problem *p, int element, heddle_strides s, bool per_sequence, int64_t h,
                          int64_t rows, int64_t last, bool skew) {
    bool packed = (p->a.features & HEDDLE_VARLEN) && !per_sequence;
    literal(&s, packed, h, rows, last);
    return tensor_new(p->a.device, element, (int64_t[]){packed ? 1 : p->a.b, h, rows, last},
                      (int64_t[]){s.b, s.h, s.s, 1}, skew);
}

/* All tensors that the description has, poisoned; `skip` leaves optional ones out. */
static void make_tensors(attention_problem *p, uint32_t skip, bool skew, bool len_q, bool len_k) {
    const heddle_attention *a = &p->a;
    heddle_device device = a->device;
    int type = (int)a->dtype, real = type == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    uint64_t f = a->features;
    int64_t h = a->h, hk = a->hk, rq = f & HEDDLE_VARLEN ? a->total_q : a->sq,
            rk = f & HEDDLE_VARLEN ? a->total_k : a->sk;
    heddle_strides contiguous = {0};
    heddle_strides rows = f & HEDDLE_VARLEN ? (heddle_strides){0, rq, 1} : (heddle_strides){h * rq, rq, 1};
    tensor *t = p->t;
    t[T_Q] = data_tensor(p, type, a->q_stride, false, h, rq, a->d, skew);
    t[T_K] = data_tensor(p, type, a->k_stride, false, hk, rk, a->d, skew);
    t[T_V] = data_tensor(p, type, a->v_stride, false, hk, rk, a->dv, skew);
    t[T_O] = data_tensor(p, type, a->o_stride, false, h, rq, a->dv, skew);
    t[T_DOUT] = data_tensor(p, type, a->do_stride, false, h, rq, a->dv, skew);
    t[T_DQ] = data_tensor(p, type, a->dq_stride, false, h, rq, a->d, skew);
    t[T_DK] = data_tensor(p, type, a->dk_stride, false, hk, rk, a->d, skew);
    t[T_DV] = data_tensor(p, type, a->dv_stride, false, hk, rk, a->dv, skew);
    t[T_LSE] = data_tensor(p, real, rows, false, h, rq, 1, skew);
    t[T_DLSE] = data_tensor(p, real, rows, false, h, rq, 1, skew);
    if (f & HEDDLE_ALIBI)
        t[T_ALIBI] =
            tensor_new(device, real, (int64_t[]){a->b, 1, 1, h}, (int64_t[]){a->alibi_stride_b, 0, 0, 1}, skew);
    if (f & HEDDLE_BIAS) {
        t[T_BIAS] = data_tensor(p, type, a->bias_stride, true, h, a->sq, a->sk, skew);
        t[T_DBIAS] = dbias_tensor(p, skew);
    }
    if (f & HEDDLE_BOOL_MASK)
        t[T_BOOL_MASK] = data_tensor(p, ELEMENT_U8, a->bool_mask_stride, true, h, a->sq, a->sk, skew);
    if (f & HEDDLE_SINKS) {
        t[T_SINKS] = tensor_vector(device, real, h);
        t[T_DSINKS] = tensor_vector(device, real, h);
    }
    if (f & HEDDLE_VARLEN) {
        t[T_CU_Q] = tensor_vector(device, ELEMENT_I32, a->b + 1);
        t[T_CU_K] = tensor_vector(device, ELEMENT_I32, a->b + 1);
    }
    if (len_q)
        t[T_LEN_Q] = tensor_vector(device, ELEMENT_I32, a->b);
    if (len_k)
        t[T_LEN_K] = tensor_vector(device, ELEMENT_I32, a->b);
    if (f & HEDDLE_RNG_STATE)
        t[T_RNG] = tensor_vector(device, ELEMENT_U64, 2);
    if (f & HEDDLE_WEIGHTS) {
        t[T_WEIGHTS] = data_tensor(p, type, a->weights_stride, true, h, a->sq, a->sk, skew);
        t[T_DWEIGHTS] = data_tensor(p, type, a->dweights_stride, true, h, a->sq, a->sk, skew);
    }
    (void)contiguous;
    for (int x = 0; x < T_COUNT; x++)
        if (skip >> x & 1)
            tensor_free(&t[x]);
}

static bool is_input(int which) {
    return which < T_O || (which > T_WEIGHTS && which < T_DQ);
}

static void fill_vector(tensor *t, const int32_t *values, int64_t n) {
    for (int64_t x = 0; x < n; x++)
        tensor_raw_set(t, x, values[x]);
}

static void fill_huge_bias(attention_problem *p, double huge) {
    tensor *t = &p->t[T_BIAS];
    for (int64_t n = 0; n < t->dim[0]; n++)
        for (int64_t x = 0; x < t->dim[1]; x++)
            for (int64_t i = 0; i < t->dim[2]; i++)
                for (int64_t j = 0; j < t->dim[3]; j++)
                    if ((i % 3 == 1 && t->stride[2] != 0) || j % 4 == 2)
                        tensor_set(t, n, x, i, j, huge);
}

static void fill_mask(attention_problem *p, const attention_case *c, rng *r) {
    tensor *t = &p->t[T_BOOL_MASK];
    double density = c->mask_density > 0 ? c->mask_density : 0.7;
    unsigned char *reached = tensor_reached(t);
    for (int64_t at = 0; at < t->span; at++)
        if (reached[at])
            tensor_raw_set(t, at, rng_chance(r, density) ? (double)rng_between(r, 1, 255) : 0);
    for (int64_t i = 0; i < t->dim[2] && c->mask_rows; i++)
        for (int64_t n = 0; i % 3 == 1 && n < t->dim[0]; n++)
            for (int64_t x = 0; x < t->dim[1]; x++)
                for (int64_t j = 0; j < t->dim[3]; j++)
                    tensor_set(t, n, x, i, j, 0);
    free(reached);
}

/* NaN wherever no query looks: keys and values that none sees, queries that see none, rows outside every sequence, bias
 * that is masked out unless it is what masks. */
static void poison_unseen(attention_problem *p, bool bias_masks) {
    static const int whole_rows[] = {T_Q, T_DOUT, T_DLSE, T_K, T_V, T_BIAS, T_DWEIGHTS};
    const heddle_attention *a = &p->a;
    unsigned char *used[COUNT(whole_rows)];
    for (size_t x = 0; x < COUNT(whole_rows); x++)
        used[x] = calloc((size_t)p->t[whole_rows[x]].span + 1, 1);
    for (int64_t n = 0; n < a->b; n++)
        for (int64_t x = 0; x < a->h; x++) {
            int64_t length[4], pack = a->features & HEDDLE_VARLEN ? 0 : n, y = x / (a->h / a->hk);
            attention_lengths(p, n, length);
            for (int64_t i = 0; i < length[1]; i++) {
                bool sees_any = false;
                for (int64_t j = 0; j < length[3]; j++)
                    sees_any = sees_any || attention_sees(p, n, x, i, j);
                for (int z = sees_any ? 0 : 2; z < 3; z++) { /* dlse still goes to the sinks */
                    const int64_t *s = p->t[whole_rows[z]].stride;
                    for (int64_t e = 0; e < p->t[whole_rows[z]].dim[3]; e++)
                        used[z][pack * s[0] + x * s[1] + (length[0] + i) * s[2] + e] = 1;
                }
                for (int64_t j = 0; j < length[3]; j++) {
                    bool sees = attention_sees(p, n, x, i, j);
                    for (int z = 3; z < 5 && sees; z++) {
                        const int64_t *s = p->t[whole_rows[z]].stride;
                        for (int64_t e = 0; e < p->t[whole_rows[z]].dim[3]; e++)
                            used[z][pack * s[0] + y * s[1] + (length[2] + j) * s[2] + e] = 1;
                    }
                    for (int z = 5; z < 7; z++) {
                        const tensor *t = &p->t[whole_rows[z]];
                        if (t->host && (sees || z == 6))
                            used[z][n * t->stride[0] + x * t->stride[1] + i * t->stride[2] + j] = 1;
                    }
                }
            }
        }
    for (size_t x = 0; x < COUNT(whole_rows); x++) {
        tensor *t = &p->t[whole_rows[x]];
        unsigned char *reached = t->host ? tensor_reached(t) : NULL;
        const bool stays = bias_masks && whole_rows[x] == T_BIAS;
        for (int64_t at = 0; t->host && !stays && at < t->span; at++)
            if (reached[at] && !used[x][at])
                tensor_raw_set(t, at, NAN);
        free(reached);
        free(used[x]);
    }
}

static void fill_inputs(attention_problem *p, const attention_case *c) {
    rng r = {c->seed * 0x9E3779B97F4A7C15u + 17};
    tensor *t = p->t;
    for (int x = 0; x < T_COUNT; x++) {
        double magnitude = x == T_Q ? c->q_magnitude : x == T_K ? c->k_magnitude : x == T_V ? c->v_magnitude : 1;
        if (!t[x].host || !is_input(x))
            continue;
        switch (x) {
        case T_BOOL_MASK: fill_mask(p, c, &r); break;
        case T_CU_Q: fill_vector(&t[x], c->cu_q, p->a.b + 1); break;
        case T_CU_K: fill_vector(&t[x], c->cu_k, p->a.b + 1); break;
        case T_LEN_Q: fill_vector(&t[x], c->len_q, p->a.b); break;
        case T_LEN_K: fill_vector(&t[x], c->len_k, p->a.b); break;
        case T_RNG:
            for (int64_t y = 0; y < 2; y++)
                memcpy(t[x].host + (size_t)(t[x].guard + y) * 8, &(uint64_t){rng_next(&r)}, 8);
            break;
        case T_ALIBI:
            for (int64_t at = 0; at < t[x].span; at++)
                tensor_raw_set(&t[x], at, exp2(-8 * rng_uniform(&r)));
            break;
        default: tensor_fill_normal(&t[x], &r, magnitude == 0 ? 1 : magnitude);
        }
    }
    if (c->same_input) {
        tensor_convert(&t[T_K], &t[T_Q]);
        tensor_convert(&t[T_V], &t[T_Q]);
    }
    if (c->huge_bias != 0)
        fill_huge_bias(p, c->huge_bias);
    if (c->poison_masked)
        poison_unseen(p, c->huge_bias != 0);
}

static void upload_all(attention_problem *p) {
    for (int x = 0; x < T_COUNT; x++)
        tensor_upload(&p->t[x]);
}

/* The description's defaults for sizes and scale, which the plain computation and the tensors need as numbers. */
static void fill_defaults(heddle_attention *a) {
    a->size = sizeof *a;
    a->hk = a->hk ? a->hk : a->h;
    a->dv = a->dv ? a->dv : a->d;
    a->scale = a->scale != 0 ? a->scale : 1 / sqrt((double)a->d);
}

attention_problem attention_new(const attention_case *c) {
    attention_problem p = {.a = c->a};
    fill_defaults(&p.a);
    p.a.device = test_device();
    make_tensors(&p, c->skip, c->seed % 3 == 0, c->len_q != NULL, c->len_k != NULL);
    fill_inputs(&p, c);
    upload_all(&p);
    return p;
}

attention_problem attention_copy(const attention_problem *p, heddle_dtype dtype, heddle_device device) {
    attention_problem q = {.a = p->a};
    q.a.dtype = dtype;
    q.a.device = device;
    uint32_t skip = 0;
    for (int x = 0; x < T_COUNT; x++)
        skip |= p->t[x].host ? 0 : UINT32_C(1) << x;
    make_tensors(&q, skip, p->t[T_Q].guard != 64, p->t[T_LEN_Q].host != NULL, p->t[T_LEN_K].host != NULL);
    for (int x = 0; x < T_COUNT; x++) {
        if (!is_input(x) || !p->t[x].host)
            continue;
        if (x == T_RNG)
            memcpy(q.t[x].host, p->t[x].host, (size_t)(q.t[x].span + 2 * q.t[x].guard) * 8);
        else
            tensor_convert(&q.t[x], &p->t[x]);
    }
    upload_all(&q);
    return q;
}

void attention_free(attention_problem *p) {
    for (int x = 0; x < T_COUNT; x++)
        tensor_free(&p->t[x]);
}

heddle_attention_data attention_data(const attention_problem *p, bool backward) {
    const tensor *t = p->t;
    heddle_attention_data data = {.size = sizeof data,
                                  .q = tensor_pointer(&t[T_Q]),
                                  .k = tensor_pointer(&t[T_K]),
                                  .v = tensor_pointer(&t[T_V]),
                                  .alibi_slopes = tensor_pointer(&t[T_ALIBI]),
                                  .bias = tensor_pointer(&t[T_BIAS]),
                                  .bool_mask = tensor_pointer(&t[T_BOOL_MASK]),
                                  .sinks = tensor_pointer(&t[T_SINKS]),
                                  .cu_seqlens_q = tensor_pointer(&t[T_CU_Q]),
                                  .cu_seqlens_k = tensor_pointer(&t[T_CU_K]),
                                  .seqlens_q = tensor_pointer(&t[T_LEN_Q]),
                                  .seqlens_k = tensor_pointer(&t[T_LEN_K]),
                                  .rng_state = tensor_pointer(&t[T_RNG]),
                                  .o = tensor_pointer(&t[T_O]),
                                  .lse = tensor_pointer(&t[T_LSE])};
    if (!backward) {
        data.weights = tensor_pointer(&t[T_WEIGHTS]);
        return data;
    }
    data.dout = tensor_pointer(&t[T_DOUT]);
    data.dlse = tensor_pointer(&t[T_DLSE]);
    data.dweights = tensor_pointer(&t[T_DWEIGHTS]);
    data.dq = tensor_pointer(&t[T_DQ]);
    data.dk = tensor_pointer(&t[T_DK]);
    data.dv = tensor_pointer(&t[T_DV]);
    data.dbias = tensor_pointer(&t[T_DBIAS]);
    data.dsinks = tensor_pointer(&t[T_DSINKS]);
    return data;
}

static bool is_output_of(int which, heddle_pass pass) {
    return pass == HEDDLE_FORWARD ? which >= T_O && which <= T_WEIGHTS : which >= T_DQ;
}

/* Prints what went wrong and returns false. */
static bool run_pass(attention_problem *p, heddle_pass pass) {
    const char *side = p->a.device == HEDDLE_REF ? "ref" : "device",
               *name = pass == HEDDLE_FORWARD ? "forward" : "backward";
    size_t bytes = SIZE_MAX;
    heddle_status status = heddle_attention_workspace(&p->a, pass, &bytes);
    if (status != HEDDLE_OK) {
        printf("  %s %s: workspace query: %s: %s\n", side, name, heddle_status_string(status), heddle_last_message());
        return false;
    }
    void *workspace = workspace_new(p->a.device, bytes);
    heddle_attention_data data = attention_data(p, pass == HEDDLE_BACKWARD);
    status = pass == HEDDLE_FORWARD ? heddle_attention_forward(&p->a, &data, workspace, bytes, NULL)
                                    : heddle_attention_backward(&p->a, &data, workspace, bytes, NULL);
    bool right = status == HEDDLE_OK;
    if (!right)
        printf("  %s %s: %s: %s\n", side, name, heddle_status_string(status), heddle_last_message());
    if (!workspace_intact(p->a.device, workspace, bytes)) {
        printf("  %s %s: wrote outside its workspace of %zu bytes\n", side, name, bytes);
        right = false;
    }
    workspace_free(p->a.device, workspace);
    for (int x = 0; x < T_COUNT; x++) {
        tensor_download(&p->t[x]);
        if (!is_output_of(x, pass) && !tensor_unchanged(&p->t[x])) {
            printf("  %s %s: changed %s, which it does not write\n", side, name, attention_tensor_name[x]);
            right = false;
        }
        if (is_output_of(x, pass) && !tensor_gaps_unchanged(&p->t[x])) {
            printf("  %s %s: wrote around %s or between its rows\n", side, name, attention_tensor_name[x]);
            right = false;
        }
    }
    upload_all(p); /* the outputs are the backward's inputs: they are as they should be from now on */
    return right;
}

void attention_run(attention_problem *p, heddle_pass pass) {
    assert_true(run_pass(p, pass));
}

/* Zeros that follow from the masks alone are exact, and so are the rows that nobody writes. */
static bool check_exact_zeros(const attention_problem *p, const attention_problem *ref) {
    for (int x = T_O; x <= T_WEIGHTS; x += T_WEIGHTS - T_O)
        for (int64_t at = 0; p->t[x].host && at < p->t[x].span; at++)
            if (tensor_raw(&ref->t[x], at) == 0 && tensor_raw(&p->t[x], at) != 0) {
                printf("  %s: %g at element %" PRId64 " where an exact 0 belongs\n", attention_tensor_name[x],
                       tensor_raw(&p->t[x], at), at);
                return false;
            }
    return true;
}

bool attention_is_right(const attention_case *c) {
    attention_problem p = attention_new(c);
    attention_problem ref = attention_copy(&p, HEDDLE_F64, HEDDLE_REF),
                      plain = attention_copy(&p, p.a.dtype, HEDDLE_REF);
    attention_problem other = attention_copy(&p, p.a.dtype, HEDDLE_REF);
    double natural[T_COUNT];
    bool backward = !(c->skip >> T_LSE & 1);
    bool right = run_pass(&p, HEDDLE_FORWARD);
    right = run_pass(&ref, HEDDLE_FORWARD) && right;
    if (right && backward) {
        right = run_pass(&p, HEDDLE_BACKWARD);
        right = run_pass(&ref, HEDDLE_BACKWARD) && right;
    }
    plain_attention(&other, true, natural);
    plain_attention(&plain, false, natural);
    /* What rounding takes from large scores (ALiBi's, far away) is a relative error of P, in proportion to them. */
    const double condition = c->ill_conditioned ? INFINITY : fmax(1, natural[T_LSE] / 64);
    for (int x = T_O; right && x < T_COUNT; x++) {
        if (!is_output_of(x, HEDDLE_FORWARD) && !(backward && is_output_of(x, HEDDLE_BACKWARD)))
            continue;
        tensor_keep_worse(&plain.t[x], &other.t[x], &ref.t[x]);
        /* D of a row is made from the rounded o: in a sum of D alone that is not small, though it averages out. */
        double rows = (double)(p.a.b * p.a.sq);
        const int precision = precision_of(p.a.dtype, p.a.features);
        double rounding = precision == HEDDLE_BF16 ? 0x1p-8 : 0x1p-11;
        double noise = x == T_DSINKS && precision != HEDDLE_F32 ? rounding * natural[x] / sqrt(rows) : 0;
        right = compare_tensor(attention_tensor_name[x], precision, &p.t[x], &ref.t[x], &plain.t[x], natural[x], noise,
                               condition);
    }
    right = right && check_exact_zeros(&p, &ref);
    attention_free(&p);
    attention_free(&ref);
    attention_free(&plain);
    attention_free(&other);
    return right;
}

void attention_print(const attention_case *c) {
    static const char *const dtype[] = {"f32", "bf16", "f16", "f64"}, *const mask[] = {"none", "top-left",
                                                                                       "bottom-right"};
    static const char *const feature[] = {"window",  "alibi",   "bias",      "bool_mask",     "sinks", "varlen",
                                          "seqlens", "weights", "rng_state", "deterministic", "tf32"};
    const heddle_attention *a = &c->a;
    printf("  case: %s b %" PRId64 " h %" PRId64 "/%" PRId64 " s %" PRId64 "x%" PRId64 " d %" PRId64 "/%" PRId64
           " mask %s scale %g softcap %g dropout %g seed %" PRIu64 " skip 0x%x",
           dtype[a->dtype & 3], a->b, a->h, a->hk, a->sq, a->sk, a->d, a->dv, mask[a->mask], a->scale, a->softcap,
           a->dropout, c->seed, (unsigned)c->skip);
    for (size_t x = 0; x < COUNT(feature); x++)
        if (a->features >> x & 1)
            printf(" %s", feature[x]);
    if (a->features & HEDDLE_WINDOW)
        printf(" (%" PRId64 ", %" PRId64 ")", a->window_left, a->window_right);
    if (a->features & HEDDLE_VARLEN)
        printf(" total %" PRId64 " %" PRId64, a->total_q, a->total_k);
    const struct {
        const char *name;
        heddle_strides s;
    } stride[] = {{"q", a->q_stride}, {"k", a->k_stride},       {"v", a->v_stride},
                  {"o", a->o_stride}, {"bias", a->bias_stride}, {"dbias", a->dbias_stride}};
    for (size_t x = 0; x < COUNT(stride); x++)
        if (stride[x].s.b || stride[x].s.h || stride[x].s.s)
            printf(" %s[%" PRId64 ",%" PRId64 ",%" PRId64 "]", stride[x].name, stride[x].s.b, stride[x].s.h,
                   stride[x].s.s);
    printf("%s%s\n", c->same_input ? " q=k=v" : "", c->poison_masked ? " poisoned" : "");
}

void check_attention(const attention_case *c) {
    if (attention_is_right(c))
        return;
    attention_print(c);
    fail_msg("attention is wrong, see above");
}

void check_attention_dtypes(attention_case c) {
    for (size_t x = 0; x < TEST_DTYPES; x++) {
        c.a.dtype = test_dtypes[x];
        c.seed = c.seed * 3 + x + 1;
        check_attention(&c);
    }
}

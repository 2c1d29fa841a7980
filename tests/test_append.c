/* SPDX-License-Identifier: Apache-2.0
 * heddle_attention_append: random caches against the formula of heddle.h in float64, and every byte that no new row has as it was. */
#include "common.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { K_NEW, V_NEW, KEYS, VALUES, Q, Q_OUT, COS, SIN, K_SCALE, V_SCALE, SEQLENS, CU, TABLE, INDEX, LENGTHS, TENSORS };
enum { MOST_B = 5 };

typedef struct append_problem {
    heddle_append a; /* with literal strides */
    bool default_strides, in_place, scaled;
    tensor t[TENSORS], given_q; /* as q was before it was rotated in place */
} append_problem;

/* ------------------------------------------------------------------------------------------------------ problems */

/* Contiguous in either order of heads and rows, or with gaps; one that is packed has the stride 0 of b. */
static heddle_strides draw_strides(rng *r, bool packed, int64_t h, int64_t s, int64_t last, bool odd, bool plain) {
    const int64_t gap = plain || rng_chance(r, 0.5) ? 0 : odd ? rng_between(r, 1, 5) : 8;
    const bool rows_first = plain ? packed : rng_chance(r, 0.5);
    const int64_t row = last + gap;
    return (heddle_strides){packed ? 0 : h * s * row, rows_first ? row : s * row, rows_first ? h * row : row};
}

static tensor new_rows(heddle_device device, int type, int64_t b, int64_t h, int64_t s, int64_t last,
                       heddle_strides stride, bool skew) {
    return tensor_new(device, type, (int64_t[]){b, h, s, last}, (int64_t[]){stride.b, stride.h, stride.s, 1}, skew);
}

/* Sizes and options; `odd`: nothing is a multiple of anything. */
static heddle_append draw_sizes(rng *r, heddle_dtype type, heddle_device device, bool odd) {
    heddle_append a = {.size = sizeof a, .dtype = type, .device = device};
    a.b = rng_between(r, 1, MOST_B);
    a.hk = rng_between(r, 1, 4);
    a.h = rng_chance(r, 0.6) ? a.hk * rng_between(r, 1, 3) : 0;
    a.s = rng_between(r, rng_chance(r, 0.1) ? 0 : 1, rng_chance(r, 0.5) ? 1 : 37);
    a.sk = rng_between(r, a.s, 90);
    a.d = odd ? rng_between(r, 1, 75) : 8 * rng_between(r, 1, 17);
    a.dv = rng_chance(r, 0.5) ? 0 : odd ? rng_between(r, 1, 75) : 8 * rng_between(r, 1, 9);
    if (rng_chance(r, 0.8) && a.d > 1) {
        a.rotary = rng_chance(r, 0.5) ? a.d / 2 * 2 : 2 * rng_between(r, 1, a.d / 2);
        if (!odd)
            a.rotary = a.rotary > 16 ? a.rotary / 16 * 16 : 8;
        a.positions = a.sk + rng_between(r, 0, 3);
        a.table_stride = a.rotary / 2 + (rng_chance(r, 0.3) ? odd ? rng_between(r, 1, 5) : 8 : 0);
        a.interleaved = rng_chance(r, 0.5);
        a.together = rng_chance(r, 0.3);
        a.table_dtype = rng_chance(r, 0.5) ? type : HEDDLE_F32;
    }
    if (rng_chance(r, 0.4)) {
        a.features |= HEDDLE_VARLEN;
        a.total = rng_between(r, 0, a.b * a.s + 4);
    } else
        a.sq = a.h ? rng_between(r, 0, a.s + 3) : 0;
    if (rng_chance(r, 0.5)) {
        a.features |= HEDDLE_PAGES;
        a.page = INT64_C(16) << rng_between(r, 0, 2);
        a.table = (a.sk + a.page - 1) / a.page + rng_between(r, 0, 2);
        a.pages = a.b * a.table + 2; /* the last one is shared by all, and the one before nobody's */
    } else if (rng_chance(r, 0.4))
        a.caches = a.b + rng_between(r, 0, 3);
    a.features |= rng_chance(r, 0.4) ? HEDDLE_E4M3 : 0;
    return a;
}

static void make_tensors(append_problem *p, rng *r, bool odd) {
    heddle_append *a = &p->a;
    const bool packed = a->features & HEDDLE_VARLEN, paged = a->features & HEDDLE_PAGES;
    const int64_t dv = a->dv ? a->dv : a->d, b = packed ? 1 : a->b, s = packed ? a->total : a->s;
    const int64_t parts = paged ? a->pages : a->caches ? a->caches : a->b, rows = paged ? a->page : a->sk;
    const int64_t queries = !a->h ? 0 : packed ? a->total : a->sq;
    a->k_new_stride = draw_strides(r, packed, a->hk, s, a->d, odd, p->default_strides);
    a->v_new_stride = draw_strides(r, packed, a->hk, s, dv, odd, p->default_strides);
    a->k_stride = draw_strides(r, false, a->hk, rows, a->d, odd, p->default_strides);
    a->v_stride = draw_strides(r, false, a->hk, rows, dv, odd, p->default_strides);
    a->q_stride = draw_strides(r, packed, a->h, queries, a->d, odd, p->default_strides);
    a->q_out_stride = p->in_place ? a->q_stride : draw_strides(r, packed, a->h, queries, a->d, odd, p->default_strides);
    p->t[K_NEW] = new_rows(a->device, a->dtype, b, a->hk, s, a->d, a->k_new_stride, odd);
    p->t[V_NEW] = new_rows(a->device, a->dtype, b, a->hk, s, dv, a->v_new_stride, odd);
    const int cached = a->features & HEDDLE_E4M3 ? ELEMENT_E4M3 : (int)a->dtype,
              real = a->dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    p->t[KEYS] = new_rows(a->device, cached, parts, a->hk, rows, a->d, a->k_stride, odd);
    p->t[VALUES] = new_rows(a->device, cached, parts, a->hk, rows, dv, a->v_stride, odd);
    p->t[Q] = new_rows(a->device, a->dtype, b, a->h, queries, a->d, a->q_stride, odd);
    p->t[Q_OUT] = new_rows(a->device, a->dtype, b, a->h, queries, a->d, a->q_out_stride, odd);
    const heddle_strides angles = {0, 0, a->table_stride};
    p->t[COS] = new_rows(a->device, a->table_dtype, 1, 1, a->positions, a->rotary / 2, angles, odd);
    p->t[SIN] = new_rows(a->device, a->table_dtype, 1, 1, a->positions, a->rotary / 2, angles, odd);
    for (int x = K_SCALE; x <= V_SCALE; x++)
        p->t[x] = new_rows(a->device, real, 1, 1, p->scaled ? a->b : 0, a->hk, (heddle_strides){0, 0, a->hk}, false);
    for (int x = SEQLENS; x < TENSORS; x++) {
        const int64_t n = x == CU      ? packed * (a->b + 1)
                          : x == TABLE ? paged * a->b * a->table
                          : x == INDEX ? (a->caches > 0) * a->b
                                       : a->b;
        p->t[x] = tensor_vector(a->device, ELEMENT_I32, n);
    }
}

static void set(append_problem *p, int x, int64_t at, double value) {
    tensor_set(&p->t[x], 0, 0, 0, at, value);
}

static int64_t get(const append_problem *p, int x, int64_t at) {
    return (int64_t)tensor_get(&p->t[x], 0, 0, 0, at);
}

static int64_t clamped(int64_t x, int64_t high) {
    return x < 0 ? 0 : x > high ? high : x;
}

static double garbage(rng *r, double limit) {
    const double all[] = {-1, limit, INT32_MIN, INT32_MAX, limit + 1};
    return all[rng_between(r, 0, 4)];
}

/* Numbers that are read where the work is done: mostly as they should be, and some that are not. */
static void fill_integers(append_problem *p, rng *r) {
    const heddle_append *a = &p->a;
    int64_t row = rng_chance(r, 0.3) ? rng_between(r, 0, 2) : 0;
    const int64_t turn = a->caches ? rng_between(r, 0, a->caches - 1) : 0;
    for (int64_t n = 0; n < a->b; n++) {
        const int64_t room = a->sk - a->s, length = rng_between(r, 0, room);
        set(p, SEQLENS, n,
            rng_chance(r, 0.1) ? garbage(r, (double)a->sk) : (double)(rng_chance(r, 0.2) ? a->sk - 1 : length));
        if (a->features & HEDDLE_VARLEN) {
            set(p, CU, n, (double)row);
            row += rng_chance(r, 0.2) ? 0 : rng_between(r, 0, a->s + 1); /* one more than there may be */
        }
        if (a->caches)
            set(p, INDEX, n, rng_chance(r, 0.1) ? garbage(r, (double)a->caches) : (double)((n + turn) % a->caches));
        const int64_t full = clamped(get(p, SEQLENS, n), a->sk) / (a->page ? a->page : 1);
        for (int64_t x = 0; x < (a->features & HEDDLE_PAGES ? a->table : 0); x++)
            set(p, TABLE, n * a->table + x,
                x < full              ? (double)(a->pages - 1)
                : rng_chance(r, 0.15) ? garbage(r, (double)a->pages)
                                      : (double)(x * a->b + n));
    }
    if (a->features & HEDDLE_VARLEN)
        set(p, CU, a->b, (double)row);
}

static append_problem problem_new(rng *r, heddle_dtype type, heddle_device device, bool odd) {
    append_problem p = {.a = draw_sizes(r, type, device, odd)};
    p.default_strides = rng_chance(r, 0.3);
    p.in_place = rng_chance(r, 0.3);
    p.scaled = (p.a.features & HEDDLE_E4M3) && rng_chance(r, 0.7);
    make_tensors(&p, r, odd);
    tensor_fill_normal(&p.t[K_NEW], r, 1);
    tensor_fill_normal(&p.t[V_NEW], r, 1);
    tensor_fill_normal(&p.t[Q], r, 1);
    for (int64_t j = 0; j < p.a.positions; j++)
        for (int64_t e = 0; e < p.a.rotary / 2; e++) {
            const double angle = (double)j * pow(10000, -2 * (double)e / (double)p.a.rotary);
            tensor_set(&p.t[COS], 0, 0, j, e, cos(angle));
            tensor_set(&p.t[SIN], 0, 0, j, e, sin(angle));
        }
    for (int x = K_SCALE; x <= V_SCALE; x++) /* of some all are too large, of some all next to nothing */
        for (int64_t n = 0; n < (p.scaled ? p.a.b : 0); n++)
            for (int64_t y = 0; y < p.a.hk; y++)
                tensor_set(&p.t[x], 0, 0, n, y, ldexp(1 + rng_uniform(r), (int)rng_between(r, -12, 8)));
    fill_integers(&p, r);
    for (int x = 0; x < TENSORS; x++)
        tensor_upload(&p.t[x]);
    return p;
}

static void problem_free(append_problem *p) {
    for (int x = 0; x < TENSORS; x++)
        tensor_free(&p->t[x]);
}

/* --------------------------------------------------------------------------------------------------------- checks */

static bool same_bits(const tensor *x, int64_t at, const unsigned char *other, const tensor *of, int64_t there) {
    const size_t size = element_size(x->element);
    return !memcmp(x->host + (size_t)(x->guard + at) * size, other + (size_t)(of->guard + there) * size, size);
}

/* Is x what a number becomes in 8 bits? `off`: by so much the number may be another. */
static void check_byte(double x, double right, double off) {
    const double size = fmin(fabs(right), 448);
    int exponent = -6;
    while (size >= ldexp(2, exponent))
        exponent++;
    if (fabs(right) - off >= 448)
        assert_true(x == copysign(448, right));
    else
        assert_true(fabs(x - copysign(size, right)) <= ldexp(0.5, exponent - 3) * (1 + 0x1p-20) + off);
}

/* The same of a row of a cache of 8 bits, whose scale this is. */
static void check_byte_row(const append_problem *p, const tensor *to, int64_t b, int64_t h, int64_t s,
                           const tensor *from, int64_t b0, int64_t s0, int64_t position, int64_t rotary, double scale) {
    const heddle_append *a = &p->a;
    tensor old = *from;
    old.host = from->old;
    for (int64_t e = rotary; e < to->dim[3]; e++)
        check_byte(tensor_get(to, b, h, s, e), tensor_get(&old, b0, h, s0, e) / scale, 0);
    for (int64_t e = 0; e < rotary / 2; e++) {
        const int64_t one = a->interleaved ? 2 * e : e, other = a->interleaved ? one + 1 : e + rotary / 2;
        const double x = tensor_get(to, b, h, s, one), y = tensor_get(to, b, h, s, other);
        if (position >= a->positions) {
            assert_true(isnan(x) && isnan(y));
            continue;
        }
        const double u = tensor_get(&old, b0, h, s0, one), w = tensor_get(&old, b0, h, s0, other);
        const double c = tensor_get(&p->t[COS], 0, 0, position, e), d = tensor_get(&p->t[SIN], 0, 0, position, e);
        const double off = 0x1p-22 / scale;
        check_byte(x, (u * c - w * d) / scale, off * (fabs(u * c) + fabs(w * d)));
        check_byte(y, (u * d + w * c) / scale, off * (fabs(u * d) + fabs(w * c)));
    }
}

/* Is row (b, h, s) of `to` row (b0, h, s0) of `from`, as its first `rotary` elements are at `position`? */
static void check_row(const append_problem *p, const tensor *to, int64_t b, int64_t h, int64_t s, const tensor *from,
                      int64_t b0, int64_t s0, int64_t position, int64_t rotary) {
    static const double units[] = {[HEDDLE_F32] = 0x1p-24, [HEDDLE_BF16] = 0x1p-8, [HEDDLE_F16] = 0x1p-11, 0x1p-52};
    const heddle_append *a = &p->a;
    const double unit = units[a->dtype], sum_unit = a->dtype == HEDDLE_F64 ? 0x1p-50 : 0x1p-22;
    for (int64_t e = rotary; e < to->dim[3]; e++)
        assert_true(same_bits(to, tensor_at(to, b, h, s, e), from->old, from, tensor_at(from, b0, h, s0, e)));
    for (int64_t e = 0; e < rotary / 2; e++) {
        const int64_t one = a->interleaved ? 2 * e : e, other = a->interleaved ? one + 1 : e + rotary / 2;
        const double x = tensor_get(to, b, h, s, one), y = tensor_get(to, b, h, s, other);
        if (position >= a->positions) {
            assert_true(isnan(x) && isnan(y));
            continue;
        }
        tensor before = *from;
        before.host = from->old;
        const double u = tensor_get(&before, b0, h, s0, one), w = tensor_get(&before, b0, h, s0, other);
        const double c = tensor_get(&p->t[COS], 0, 0, position, e), d = tensor_get(&p->t[SIN], 0, 0, position, e);
        const double right_x = u * c - w * d, right_y = u * d + w * c, least = a->dtype == HEDDLE_F16 ? 0x1p-25 : 0;
        assert_true(fabs(x - right_x) <= unit * fabs(right_x) + sum_unit * (fabs(u * c) + fabs(w * d)) + least);
        assert_true(fabs(y - right_y) <= unit * fabs(right_y) + sum_unit * (fabs(u * d) + fabs(w * c)) + least);
    }
}

static void check_untouched(const tensor *t, int64_t b, int64_t h, int64_t s) {
    for (int64_t e = 0; e < t->dim[3]; e++)
        assert_true(same_bits(t, tensor_at(t, b, h, s, e), t->old, t, tensor_at(t, b, h, s, e)));
}

/* Which part and row of the cache row j of sequence n is; false: none. */
static bool find_place(const append_problem *p, int64_t n, int64_t j, int64_t place[2]) {
    const heddle_append *a = &p->a;
    const bool paged = a->features & HEDDLE_PAGES;
    if (j >= a->sk)
        return false;
    place[0] = paged ? get(p, TABLE, n * a->table + j / a->page) : a->caches ? get(p, INDEX, n) : n;
    place[1] = paged ? j % a->page : j;
    return place[0] >= 0 && place[0] < p->t[KEYS].dim[0];
}

/* Checks what sequence n has become, and notes the rows of the cache that it has. Returns how many of its rows are new. */
static int64_t check_sequence(const append_problem *p, int64_t n, bool *written, bool *asked) {
    const heddle_append *a = &p->a;
    const bool packed = a->features & HEDDLE_VARLEN;
    const int64_t length = clamped(get(p, SEQLENS, n), a->sk);
    int64_t first = 0, rows = a->s, queries = a->h ? a->sq : 0, b = n, place[2];
    if (packed) {
        first = clamped(get(p, CU, n), a->total);
        rows = clamped(clamped(get(p, CU, n + 1), a->total) - first, a->s);
        queries = a->h ? rows : 0;
        b = 0;
    }
    for (int64_t i = 0; i < rows; i++)
        if (find_place(p, n, length + i, place)) {
            assert_false(written[place[0] * p->t[KEYS].dim[2] + place[1]]); /* or the test is wrong */
            written[place[0] * p->t[KEYS].dim[2] + place[1]] = true;
            for (int64_t h = 0; h < a->hk; h++) {
                if (a->features & HEDDLE_E4M3) {
                    const double of_k = p->scaled ? tensor_get(&p->t[K_SCALE], 0, 0, n, h) : 1,
                                 of_v = p->scaled ? tensor_get(&p->t[V_SCALE], 0, 0, n, h) : 1;
                    check_byte_row(p, &p->t[KEYS], place[0], h, place[1], &p->t[K_NEW], b, first + i, length + i,
                                   a->rotary, of_k);
                    check_byte_row(p, &p->t[VALUES], place[0], h, place[1], &p->t[V_NEW], b, first + i, 0, 0, of_v);
                    continue;
                }
                check_row(p, &p->t[KEYS], place[0], h, place[1], &p->t[K_NEW], b, first + i, length + i, a->rotary);
                check_row(p, &p->t[VALUES], place[0], h, place[1], &p->t[V_NEW], b, first + i, 0, 0);
            }
        }
    const tensor *q_out = &p->t[p->in_place ? Q : Q_OUT];
    for (int64_t i = 0; i < queries; i++) {
        asked[b * q_out->dim[2] + first + i] = true;
        for (int64_t h = 0; h < a->h; h++)
            check_row(p, q_out, b, h, first + i, &p->t[Q], b, first + i, length + (a->together ? 0 : i), a->rotary);
    }
    assert_int_equal(get(p, LENGTHS, n), length + rows < a->sk ? length + rows : a->sk);
    return rows;
}

static void check_rest(const tensor *t, const bool *written) {
    assert_true(tensor_gaps_unchanged(t));
    for (int64_t b = 0; b < t->dim[0]; b++)
        for (int64_t h = 0; h < t->dim[1]; h++)
            for (int64_t s = 0; s < t->dim[2]; s++)
                if (!written[b * t->dim[2] + s])
                    check_untouched(t, b, h, s);
}

static void check_problem(append_problem *p) {
    static bool written[4096], asked[4096];
    memset(written, 0, sizeof written);
    memset(asked, 0, sizeof asked);
    assert_true(p->t[KEYS].dim[0] * p->t[KEYS].dim[2] <= 4096 && p->t[Q].dim[0] * p->t[Q].dim[2] <= 4096);
    for (int x = 0; x < TENSORS; x++)
        tensor_download(&p->t[x]);
    for (int64_t n = 0; n < p->a.b; n++)
        check_sequence(p, n, written, asked);
    check_rest(&p->t[KEYS], written);
    check_rest(&p->t[VALUES], written);
    check_rest(&p->t[p->in_place ? Q : Q_OUT], asked);
    assert_true(tensor_gaps_unchanged(&p->t[LENGTHS]));
    for (int x = 0; x < LENGTHS; x++)
        if (x != KEYS && x != VALUES && x != Q_OUT && !(x == Q && p->in_place))
            assert_true(tensor_unchanged(&p->t[x]));
}

static heddle_append_data data_of(const append_problem *p) {
    void *at[TENSORS];
    for (int x = 0; x < TENSORS; x++)
        at[x] = p->t[x].dim[3] ? tensor_pointer(&p->t[x]) : NULL;
    const bool asks = p->a.h > 0, turns = p->a.rotary > 0;
    return (heddle_append_data){.size = sizeof(heddle_append_data),
                                .k_new = at[K_NEW],
                                .v_new = at[V_NEW],
                                .k = at[KEYS],
                                .v = at[VALUES],
                                .q = asks ? at[Q] : NULL,
                                .q_out = asks ? at[p->in_place ? Q : Q_OUT] : NULL,
                                .cos = turns ? at[COS] : NULL,
                                .sin = turns ? at[SIN] : NULL,
                                .seqlens_k = at[SEQLENS],
                                .cu_seqlens = at[CU],
                                .block_table = at[TABLE],
                                .cache_index = at[INDEX],
                                .seqlens_out = at[LENGTHS],
                                .k_scale = p->scaled ? at[K_SCALE] : NULL,
                                .v_scale = p->scaled ? at[V_SCALE] : NULL};
}

static heddle_append described(const append_problem *p) {
    heddle_append a = p->a;
    if (p->default_strides)
        a.k_new_stride = a.v_new_stride = a.k_stride = a.v_stride = a.q_stride = a.q_out_stride = (heddle_strides){0};
    if (a.table_stride == a.rotary / 2)
        a.table_stride = 0;
    return a;
}

static void check_one(uint64_t seed, heddle_dtype type, heddle_device device) {
    rng r = {seed};
    append_problem p = problem_new(&r, type, device, seed % 2);
    const heddle_append a = described(&p);
    const heddle_append_data t = data_of(&p);
    if (heddle_attention_append(&a, &t, NULL) != HEDDLE_OK)
        fail_msg("seed %llu: %s", (unsigned long long)seed, heddle_last_message());
    check_problem(&p);
    problem_free(&p);
}

static void test_random(void **state) {
    (void)state;
    const uint64_t first = test_seed(1), count = test_long() ? 20000 : test_device() == HEDDLE_CUDA ? 150 : 400;
    for (uint64_t seed = first; seed < first + count; seed++) {
        for (int x = 0; x < TEST_DTYPES; x++) {
            check_one(seed, test_dtypes[x], test_device());
            if (test_device() != HEDDLE_CUDA)
                check_one(seed, test_dtypes[x], HEDDLE_REF);
        }
        if (test_device() != HEDDLE_CUDA)
            check_one(seed, HEDDLE_F64, HEDDLE_REF);
    }
}

/* So many sequences that they are looked for in several steps, most of them empty, and so many heads that a token has several blocks. */
static void test_many(void **state) {
    (void)state;
    enum { B = 1500, HK = 70, D = 64, SK = 4 };
    heddle_append a = {.size = sizeof a, .device = test_device(), .features = HEDDLE_VARLEN, .b = B, .hk = HK, .s = 2};
    a.sk = SK;
    a.d = D;
    a.total = 0;
    tensor cu = tensor_vector(a.device, ELEMENT_I32, B + 1), lengths = tensor_vector(a.device, ELEMENT_I32, B),
           after = tensor_vector(a.device, ELEMENT_I32, B);
    for (int64_t n = 0; n < B; n++) {
        tensor_set(&cu, 0, 0, 0, n, (double)a.total);
        tensor_set(&lengths, 0, 0, 0, n, (double)(n % 3));
        a.total += n % 37 == 5 ? 1 : n % 61 == 7 ? 2 : 0;
    }
    tensor_set(&cu, 0, 0, 0, B, (double)a.total);
    const heddle_strides packed = {0, D, HK * D}, whole = {HK * SK * D, SK * D, D};
    tensor from[2], to[2];
    rng r = {test_seed(3)};
    for (int x = 0; x < 2; x++) {
        from[x] = new_rows(a.device, HEDDLE_F32, 1, HK, a.total, D, packed, false);
        to[x] = new_rows(a.device, HEDDLE_F32, B, HK, SK, D, whole, false);
        tensor_fill_normal(&from[x], &r, 1);
    }
    tensor *all[] = {&cu, &lengths, &after, &from[0], &from[1], &to[0], &to[1]};
    for (size_t x = 0; x < COUNT(all); x++)
        tensor_upload(all[x]);
    const heddle_append_data t = {.size = sizeof t,
                                  .k_new = tensor_pointer(&from[0]),
                                  .v_new = tensor_pointer(&from[1]),
                                  .k = tensor_pointer(&to[0]),
                                  .v = tensor_pointer(&to[1]),
                                  .seqlens_k = tensor_pointer(&lengths),
                                  .cu_seqlens = tensor_pointer(&cu),
                                  .seqlens_out = tensor_pointer(&after)};
    assert_int_equal(heddle_attention_append(&a, &t, NULL), HEDDLE_OK);
    for (size_t x = 0; x < COUNT(all); x++)
        tensor_download(all[x]);
    for (int64_t n = 0; n < B; n++) {
        const int64_t first = (int64_t)tensor_get(&cu, 0, 0, 0, n), length = n % 3,
                      rows = (int64_t)tensor_get(&cu, 0, 0, 0, n + 1) - first;
        assert_true(tensor_get(&after, 0, 0, 0, n) == (double)(length + rows));
        for (int x = 0; x < 2; x++)
            for (int64_t h = 0; h < HK; h++)
                for (int64_t s = 0; s < SK; s++) {
                    if (s < length || s >= length + rows) {
                        check_untouched(&to[x], n, h, s);
                        continue;
                    }
                    for (int64_t e = 0; e < D; e++)
                        assert_true(tensor_get(&to[x], n, h, s, e) ==
                                    tensor_get(&from[x], 0, h, first + s - length, e));
                }
    }
    for (size_t x = 0; x < COUNT(all); x++)
        tensor_free(all[x]);
}

/* ------------------------------------------------------------------------------------------------------- refusals */

static void refuse(const heddle_append *a, const heddle_append_data *t, heddle_status status, const char *part) {
    assert_int_equal(heddle_attention_append(a, t, NULL), status);
    if (!strstr(heddle_last_message(), part))
        fail_msg("'%s' is not in '%s'", part, heddle_last_message());
}

#define REFUSE(change, status, part)                                                                                   \
    do {                                                                                                               \
        heddle_append a = *of;                                                                                         \
        heddle_append_data t = *with;                                                                                  \
        change;                                                                                                        \
        refuse(&a, &t, status, part);                                                                                  \
    } while (0)

static void refuse_descriptions(const heddle_append *of, const heddle_append_data *with) {
    refuse(NULL, with, HEDDLE_NULL_POINTER, "heddle_append");
    refuse(of, NULL, HEDDLE_NULL_POINTER, "heddle_append_data");
    REFUSE(a.size -= 8, HEDDLE_BAD_DESCRIPTOR_SIZE, "heddle_append.size");
    REFUSE(t.size -= 8, HEDDLE_BAD_DESCRIPTOR_SIZE, "heddle_append_data.size");
    REFUSE(t.size += 8, HEDDLE_BAD_DESCRIPTOR_SIZE, "heddle_append_data.size");
    REFUSE(a.dtype = (heddle_dtype)9, HEDDLE_BAD_ENUM, "dtype = 9");
    REFUSE(a.device = (heddle_device)9, HEDDLE_BAD_ENUM, "device = 9");
    REFUSE(a.dtype = HEDDLE_F64, HEDDLE_UNSUPPORTED, "float64");
    REFUSE(a.table_dtype = HEDDLE_F16, HEDDLE_BAD_ENUM, "table_dtype = 2");
    REFUSE(a.features = HEDDLE_ALIBI, HEDDLE_BAD_ENUM, "0x2");
    REFUSE(a.b = -1, HEDDLE_BAD_SIZE, "b = -1");
    REFUSE(a.hk = 0, HEDDLE_BAD_SIZE, "hk = 0");
    REFUSE(a.h = -1, HEDDLE_BAD_SIZE, "h = -1");
    REFUSE(a.h = 0, HEDDLE_BAD_SIZE, "sq = 2");
    REFUSE(a.s = -1, HEDDLE_BAD_SIZE, "s = -1");
    REFUSE(a.sk = INT64_C(1) << 31, HEDDLE_BAD_SIZE, "sk = 2147483648");
    REFUSE(a.d = 513, HEDDLE_BAD_SIZE, "d = 513");
    REFUSE(a.dv = -1, HEDDLE_BAD_SIZE, "dv = -1");
    REFUSE(a.total = 1, HEDDLE_BAD_SIZE, "total = 1");
    REFUSE(a.caches = -1, HEDDLE_BAD_SIZE, "caches = -1");
    REFUSE(a.rotary = 3, HEDDLE_BAD_SIZE, "rotary = 3 is odd");
    REFUSE(a.rotary = 10, HEDDLE_BAD_SIZE, "rotary = 10");
    REFUSE(a.positions = 7, HEDDLE_BAD_SIZE, "positions = 7");
    REFUSE(a.rotary = 0, HEDDLE_BAD_COMBINATION, "rotary is 0");
    REFUSE(a.table_stride = -2, HEDDLE_BAD_STRIDE, "table_stride = -2");
    REFUSE(a.positions = a.table_stride = INT64_C(1) << 40, HEDDLE_OVERFLOW, "cos");
    REFUSE(a.interleaved = 2, HEDDLE_BAD_VALUE, "interleaved = 2");
    REFUSE(a.together = 2, HEDDLE_BAD_VALUE, "together = 2");
    REFUSE(a.reserved[1] = 1, HEDDLE_BAD_VALUE, "reserved");
    REFUSE(a.page = 16, HEDDLE_BAD_COMBINATION, "HEDDLE_PAGES is not set");
    REFUSE((a.features = HEDDLE_PAGES, a.page = 17), HEDDLE_BAD_SIZE, "page = 17");
    REFUSE((a.features = HEDDLE_PAGES, a.page = 16, a.caches = 2), HEDDLE_BAD_COMBINATION, "caches = 2");
    REFUSE((a.b = INT32_MAX, a.s = INT64_C(1) << 30), HEDDLE_OVERFLOW, "k_new");
    REFUSE(a.k_stride = ((heddle_strides){0, 1, 8}), HEDDLE_BAD_STRIDE, "k is written");
    REFUSE(a.v_stride = ((heddle_strides){64, 1, 8}), HEDDLE_BAD_STRIDE, "v is written");
    REFUSE(a.q_out_stride = ((heddle_strides){0, 1, 8}), HEDDLE_BAD_STRIDE, "q_out is written");
    REFUSE(a.q_stride.s = -8, HEDDLE_BAD_STRIDE, "q_stride.s = -8");
}

static void refuse_pointers(const heddle_append *of, const heddle_append_data *with) {
    REFUSE(t.k_new = NULL, HEDDLE_NULL_POINTER, "k_new is NULL");
    REFUSE(t.v_new = NULL, HEDDLE_NULL_POINTER, "v_new is NULL");
    REFUSE(t.k = NULL, HEDDLE_NULL_POINTER, "k is NULL");
    REFUSE(t.v = NULL, HEDDLE_NULL_POINTER, "v is NULL");
    REFUSE(t.q = NULL, HEDDLE_NULL_POINTER, "q is NULL");
    REFUSE(t.q_out = NULL, HEDDLE_NULL_POINTER, "q_out is NULL");
    REFUSE(t.cos = NULL, HEDDLE_NULL_POINTER, "cos is NULL");
    REFUSE(t.sin = NULL, HEDDLE_NULL_POINTER, "sin is NULL");
    REFUSE(t.seqlens_k = NULL, HEDDLE_NULL_POINTER, "seqlens_k is NULL");
    REFUSE(t.k = (char *)t.k + 2, HEDDLE_MISALIGNED, "k = ");
    REFUSE(t.seqlens_out = (int32_t *)((char *)t.seqlens_out + 2), HEDDLE_MISALIGNED, "seqlens_out");
    REFUSE(t.cu_seqlens = t.seqlens_k, HEDDLE_BAD_COMBINATION, "cu_seqlens is given, but HEDDLE_VARLEN");
    REFUSE(t.block_table = t.seqlens_k, HEDDLE_BAD_COMBINATION, "block_table is given, but HEDDLE_PAGES");
    REFUSE(t.cache_index = t.seqlens_k, HEDDLE_BAD_COMBINATION, "cache_index is given, but caches");
    REFUSE((a.h = a.sq = 0, t.q = NULL), HEDDLE_BAD_COMBINATION, "q_out is given, but h is 0");
    REFUSE((a.rotary = a.positions = 0, t.cos = NULL), HEDDLE_BAD_COMBINATION, "sin is given, but rotary is 0");
    REFUSE(a.caches = 2, HEDDLE_NULL_POINTER, "cache_index is NULL");
    REFUSE(t.k_scale = t.cos, HEDDLE_BAD_COMBINATION, "k_scale is given, but HEDDLE_E4M3 is not set");
    REFUSE((a.features = HEDDLE_E4M3, t.v_scale = (const char *)t.cos + 2), HEDDLE_MISALIGNED, "v_scale");
    REFUSE((a.features = HEDDLE_PAGES, a.page = 16), HEDDLE_NULL_POINTER, "block_table is NULL");
    REFUSE((a.features = HEDDLE_VARLEN, a.sq = 0, a.total = 2), HEDDLE_NULL_POINTER, "cu_seqlens is NULL");
    REFUSE((t.q_out = (void *)(uintptr_t)t.q, a.q_stride = ((heddle_strides){32, 8, 16})), HEDDLE_BAD_STRIDE,
           "q_out is q");
}

static void test_refusals(void **state) {
    (void)state;
    float k_new[64] = {1}, v_new[64] = {1}, k[256] = {0}, v[256] = {0}, q[64] = {1}, q_out[64] = {0}, angles[64] = {0};
    int32_t lengths[2] = {0}, after[2] = {0};
    const heddle_append a = {
        .size = sizeof a, .b = 2, .h = 2, .hk = 2, .s = 2, .sq = 2, .sk = 8, .d = 8, .rotary = 8, .positions = 16};
    const heddle_append_data t = {.size = sizeof t,
                                  .k_new = k_new,
                                  .v_new = v_new,
                                  .k = k,
                                  .v = v,
                                  .q = q,
                                  .q_out = q_out,
                                  .cos = angles,
                                  .sin = angles,
                                  .seqlens_k = lengths,
                                  .seqlens_out = after};
    refuse_descriptions(&a, &t);
    refuse_pointers(&a, &t);
    for (size_t x = 0; x < COUNT(k); x++)
        assert_true(k[x] == 0 && v[x] == 0 && (x >= COUNT(q_out) || q_out[x] == 0));
    assert_true(after[0] == 0 && after[1] == 0);
    assert_int_equal(heddle_attention_append(&a, &t, NULL), HEDDLE_OK);
    assert_true(after[0] == 2 && v[0] == 1);
    heddle_append_data older = t; /* of a program that was built when it ended in front of the scales */
    older.size = offsetof(heddle_append_data, k_scale);
    older.k_scale = older.v_scale = (const char *)angles + 1;
    after[0] = 0;
    assert_int_equal(heddle_attention_append(&a, &older, NULL), HEDDLE_OK);
    assert_true(after[0] == 2);
}

/* Nothing to write, and no pointers to it. */
static void test_empty(void **state) {
    (void)state;
    const heddle_append_data t = {.size = sizeof t};
    heddle_append a = {.size = sizeof a, .device = test_device(), .hk = 1, .s = 3, .sk = 8, .d = 4};
    assert_int_equal(heddle_attention_append(&a, &t, NULL), HEDDLE_OK);
    a.features = HEDDLE_VARLEN;
    assert_int_equal(heddle_attention_append(&a, &t, NULL), HEDDLE_OK);
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_empty),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

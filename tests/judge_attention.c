/* SPDX-License-Identifier: Apache-2.0
 * Judges attention: the rule for errors (docs/design.md, section 4) over the outputs of a case, in one call and in two parts. */
#include "common.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

static bool is_exact_zero(enum attention_tensor which, double x, int64_t at) {
    if (x != 0)
        printf("  %s: %g at element %" PRId64 " where an exact 0 belongs\n", attention_tensor_name[which], x, at);
    return x == 0;
}

/* Zeros that follow from the masks alone are exact: weights of hidden keys, and rows of o that nothing goes into. One element of a row may
 * cancel by chance, of like weights; where rows have no more, those are asked of which lse says that they see nothing. */
static bool check_exact_zeros(const attention_problem *p, const attention_problem *ref) {
    const tensor *o = &ref->t[T_O], *weights = &ref->t[T_WEIGHTS], *lse = &ref->t[T_LSE];
    double r[512], x[512];
    for (int64_t at = 0; weights->host && at < weights->span; at++)
        if (tensor_raw(weights, at) == 0 && !is_exact_zero(T_WEIGHTS, tensor_raw(&p->t[T_WEIGHTS], at), at))
            return false;
    for (int64_t row = 0; row < o->dim[0] * o->dim[1] * o->dim[2]; row++) {
        const int64_t at = tensor_at(o, row / o->dim[2] / o->dim[1], row / o->dim[2] % o->dim[1], row % o->dim[2], 0);
        bool zero =
            o->dim[3] > 1 || (lse->host && tensor_get(lse, row / o->dim[2] / o->dim[1], row / o->dim[2] % o->dim[1],
                                                      row % o->dim[2], 0) == -INFINITY);
        tensor_read(o, at, o->dim[3], r);
        tensor_read(&p->t[T_O], at, o->dim[3], x);
        for (int64_t e = 0; e < o->dim[3]; e++)
            zero &= r[e] == 0;
        for (int64_t e = 0; e < o->dim[3] && zero; e++)
            if (!is_exact_zero(T_O, x[e], at + e))
                return false;
    }
    return true;
}

/* Is one of p's errors beyond what the plain computation's error alone allows it? */
static bool is_far(const attention_problem *p, const attention_problem *ref, const attention_problem *plain) {
    for (int x = T_O; x < T_COUNT; x++) {
        double magnitude;
        if (!p->t[x].host || !is_output(&attention_fields[x]))
            continue;
        const double ours = tensor_error(&p->t[x], &ref->t[x], &magnitude);
        const double theirs = tensor_error(&plain->t[x], &ref->t[x], &magnitude);
        if (!isfinite(theirs) || ours > 2 * theirs || ours > 0.25 * magnitude)
            return true;
    }
    return false;
}

/* Adds the errors of a case to its bin; the plain computation's sums are those of a BLAS. */
static void count_errors(const attention_problem *p, const attention_problem *ref, const attention_problem *blocked,
                         const double natural[T_COUNT], error_bin bin[T_COUNT]) {
    for (int x = T_O; x < T_COUNT; x++)
        if (p->t[x].host && is_output(&attention_fields[x]))
            bin_count(&bin[x], &p->t[x], &ref->t[x], &blocked->t[x], natural[x]);
}

/* What the plain computation comes to: of each element the worst of several orders, and see plain_attention. */
typedef struct plain_results {
    attention_problem worst;
    int orders; /* asked until now, and, last of all, the spread */
    double natural[T_COUNT], spread[T_COUNT];
} plain_results;

static void ask_order(const attention_problem *p, const attention_problem *ref, plain_results *plain, error_bin *bin) {
    static const plain_order orders[] = {PLAIN_FORWARD, PLAIN_BLOCKED, PLAIN_REVERSED, PLAIN_ENDS, PLAIN_FORWARD};
    const plain_order order = orders[plain->orders];
    const bool first = plain->orders == 0, last = plain->orders == PLAIN_ORDERS;
    double unused[T_COUNT];
    attention_problem other = attention_borrow(p);
    plain_attention(&other, order, first ? plain->natural : unused, last ? plain->spread : NULL);
    plain->orders++;
    if (first) {
        plain->worst = other;
        return;
    }
    if (bin && order == PLAIN_BLOCKED)
        count_errors(p, ref, &other, plain->natural, bin);
    for (int x = T_O; x < T_COUNT && !last; x++)
        if (p->t[x].host && is_output(&attention_fields[x]))
            tensor_keep_worse(&plain->worst.t[x], &other.t[x], &ref->t[x]);
    attention_free(&other);
}

/* The plain computation's error is the largest over the orders of its sums. Two of them are enough for nearly all cases; only where
 * one of the errors of x, which are p's outputs or others in their place, is more than twice theirs the others are asked, too, and the
 * spread measured: elsewhere it is 0. */
static void ask_plain(const attention_problem *p, const attention_problem *x, const attention_problem *ref,
                      plain_results *plain, error_bin *bin) {
    while (plain->orders < 2 || (plain->orders <= PLAIN_ORDERS && is_far(x, ref, &plain->worst)))
        ask_order(p, ref, plain, bin);
}

/* Has that tensor the same rows for all heads? */
static bool repeats_heads(heddle_strides s) {
    return s.h == 0 && (s.b != 0 || s.s != 0);
}

/* Of the heads of a group: have they nothing of their own but what is summed? */
static bool share_scores(const heddle_attention *a, int x) {
    const uint64_t own = HEDDLE_ALIBI | HEDDLE_SINKS | (x == T_DK ? HEDDLE_WEIGHTS : 0);
    const bool masks = a->features & HEDDLE_BOOL_MASK && a->bool_mask_stride.h != 0,
               adds = a->features & HEDDLE_BIAS && a->bias_stride.h != 0;
    return repeats_heads(a->q_stride) && !(a->features & own) && !masks && !adds && a->dropout == 0;
}

/* Heads of a group that have q and dO in common and nothing of their own have the very same P and dS: what is rounded in one of them is in
 * all, and adds up in dk and dv. In dv dO in common is enough: rows of few keys have the same P, 1 of one key, whatever q is. */
static double alike_heads(const heddle_attention *a, int x) {
    const bool alike = repeats_heads(a->do_stride) && (x == T_DV || (x == T_DK && share_scores(a, x)));
    return alike ? (double)(a->h / a->hk) : 1;
}

static double largest_of(const tensor *t) {
    double most = 0;
    if (t->host)
        tensor_error(t, t, &most);
    return most;
}

/* A weight under 2^-126, beside a larger one or a sink, may be 0, in forward on the CPU sometimes from 2^-122 down (docs/limits.md): what
 * that comes to in tensor x, were it all of them. */
static double lost_weights(const attention_problem *p, int x) {
    const heddle_attention *a = &p->a;
    const double least = 0x1p-126 / (1 - a->dropout), v = largest_of(&p->t[T_V]), grad = largest_of(&p->t[T_DOUT]);
    const bool lowered =
        a->device == HEDDLE_CPU && (a->dtype == HEDDLE_BF16 || a->features & HEDDLE_PAGES || v > 0x1p72);
    const double of_row = least * (double)a->sk, of_column = least * (double)a->sq * (double)(a->h / a->hk);
    const double ds = 2 * v * grad * (double)a->dv, scale = a->scale != 0 ? fabs(a->scale) : 1;
    switch (x) {
    case T_WEIGHTS: return least;
    case T_O: return (lowered ? 16 : 1) * of_row * v;
    case T_DQ: return of_row * ds * scale * largest_of(&p->t[T_K]);
    case T_DK: return of_column * ds * scale * largest_of(&p->t[T_Q]);
    case T_DV: return of_column * grad;
    case T_DBIAS:
    case T_DSINKS: return least * ds * (double)(a->b * a->h * a->sq);
    default: return 0;
    }
}

/* Of tensor x: what roundings are off by that no order of sums changes. */
static double noise_of(const heddle_attention *a, int x, const double natural[T_COUNT], const double spread[T_COUNT]) {
    const int precision = precision_of(a->dtype, a->features);
    const double rounding = unit_roundoff(precision);
    if (precision == HEDDLE_F32) /* of which tensor cores have 22 bits */
        return ROUNDINGS * (test_device() == HEDDLE_CUDA ? 0x1p-22 : 0x1p-24) * spread[x] * sqrt(alike_heads(a, x));
    /* D of a row is made from the rounded o: in a sum of D alone that is not small, though it averages out. */
    return x == T_DSINKS ? rounding * natural[x] / sqrt((double)(a->b * a->sq)) : ROUNDINGS * rounding * spread[x];
}

/* The same problem in two parts (HEDDLE_ACCUMULATE). Backward has nothing but the float32 lse and o of all keys there, and nobody settles a
 * row. So P is off by the two roundings of lse, that of the first part's and that of all, and by two of the score; D by o's. */
static bool judge_parts(attention_problem *p, const attention_problem *ref, plain_results *plain, int64_t first,
                        double condition) {
    static const struct {
        int which;
        const char *name;
    } outputs[] = {{T_O, "o, in parts"},          {T_LSE, "lse, in parts"}, {T_DQ, "dq, in parts"},
                   {T_DK, "dk, in parts"},        {T_DV, "dv, in parts"},   {T_DBIAS, "dbias, in parts"},
                   {T_DSINKS, "dsinks, in parts"}};
    attention_problem sums = attention_borrow(p);
    bool right = attention_in_parts(p, first, &sums);
    ask_plain(p, &sums, ref, plain, NULL);
    for (size_t x = 0; right && x < COUNT(outputs); x++) {
        const int t = outputs[x].which;
        const double natural = plain->natural[t], of_lse = 4 + 4 * plain->natural[T_LSE];
        const double of_parts = t == T_LSE ? 0 : of_lse * 0x1p-24 * natural + 0x1p-24;
        right = compare_tensor(
            outputs[x].name, precision_of(p->a.dtype, p->a.features), &sums.t[t], &ref->t[t], &plain->worst.t[t],
            natural, noise_of(&p->a, t, plain->natural, plain->spread) + lost_weights(p, t) + of_parts, condition);
    }
    attention_free(&sums);
    return right;
}

static bool has_backward(const attention_case *c) {
    return !(c->skip >> T_LSE & 1) && !(c->a.features & (HEDDLE_PAGES | HEDDLE_E4M3));
}

static bool run_both(const attention_case *c, attention_problem *p) {
    return attention_pass(p, HEDDLE_FORWARD) && (!has_backward(c) || attention_pass(p, HEDDLE_BACKWARD));
}

/* Of a problem that has been run, by the instruction set that is taken. */
static bool judge_problem(const attention_case *c, attention_problem *p, const attention_problem *ref,
                          plain_results *plain, error_bin *bin) {
    bool right = true;
    ask_plain(p, p, ref, plain, bin);
    /* What rounding takes from large scores (ALiBi's, far away) is a relative error of P, in proportion to them: once for the score, and
     * for ALiBi's product, what it is taken from and the sum with a bias. */
    const int roundings = 1 + (p->a.features & HEDDLE_ALIBI ? 2 : 0) + (p->a.features & HEDDLE_BIAS ? 1 : 0);
    const double condition = c->ill_conditioned ? INFINITY : fmax(1, roundings * plain->natural[T_LSE] / 64);
    for (int x = 0; right && x < T_COUNT; x++) {
        if (!is_output_of(&attention_fields[x], HEDDLE_FORWARD) &&
            !(has_backward(c) && is_output_of(&attention_fields[x], HEDDLE_BACKWARD)))
            continue;
        const double noise = noise_of(&p->a, x, plain->natural, plain->spread);
        right = compare_tensor(attention_tensor_name[x], precision_of(p->a.dtype, p->a.features), &p->t[x], &ref->t[x],
                               &plain->worst.t[x], plain->natural[x], noise + lost_weights(p, x), condition);
    }
    right = right && check_exact_zeros(p, ref);
    return right && c->first_part ? judge_parts(p, ref, plain, c->first_part, condition) : right;
}

bool attention_judge(const attention_case *c, error_bin bin[T_COUNT], double *keys) {
    attention_problem inputs = attention_new(c);
    attention_problem ref = attention_copy(&inputs, HEDDLE_F64, HEDDLE_REF);
    plain_results plain = {.orders = 0};
    bool right = run_both(c, &ref);
    for (int x = 0; x < test_isas() && right; x++) {
        const char *isa = test_take_isa(x);
        attention_problem copy, *p = &inputs;
        if (x) {
            copy = attention_copy(&inputs, inputs.a.dtype, inputs.a.device);
            p = &copy;
        }
        right = run_both(c, p) && judge_problem(c, p, &ref, &plain, bin);
        if (!right && *isa)
            printf("  this was %s\n", isa);
        if (bin && right)
            *keys = attention_keys_seen(p);
        if (x)
            attention_free(&copy);
    }
    attention_free(&plain.worst);
    attention_free(&ref);
    attention_free(&inputs);
    return right;
}

bool attention_is_right(const attention_case *c) {
    return attention_judge(c, NULL, NULL);
}

void attention_count(const attention_case *c, error_bin bin[TEST_ISAS][T_COUNT]) {
    attention_problem inputs = attention_new(c), ref = attention_copy(&inputs, HEDDLE_F64, HEDDLE_REF);
    double natural[T_COUNT], unused[T_COUNT];
    assert_true(run_both(c, &ref));
    attention_problem plain = attention_borrow(&inputs);
    plain_attention(&plain, PLAIN_FORWARD, natural, NULL);
    attention_free(&plain);
    plain = attention_borrow(&inputs);
    plain_attention(&plain, PLAIN_BLOCKED, unused, NULL);
    for (int x = 0; x < test_isas(); x++) {
        test_take_isa(x);
        attention_problem copy, *p = &inputs;
        if (x) {
            copy = attention_copy(&inputs, inputs.a.dtype, inputs.a.device);
            p = &copy;
        }
        assert_true(run_both(c, p));
        count_errors(p, &ref, &plain, natural, bin[x]);
        if (x)
            attention_free(&copy);
    }
    attention_free(&plain);
    attention_free(&ref);
    attention_free(&inputs);
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

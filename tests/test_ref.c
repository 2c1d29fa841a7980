/* SPDX-License-Identifier: Apache-2.0
 * The reference against central differences in float64: every gradient of both operations, every option alone and
 * all together, with random gradients of every output. Its forward is checked by the plain computation in the other
 * tests. */
#include "common.h"

#include <math.h>

#define STEP 1e-5
#define TOLERANCE 2e-8

/* sum over all elements of gradient times output */
static double inner(const tensor *gradient, const tensor *output) {
    double sum = 0;
    if (!gradient->host || !output->host)
        return 0;
    for (int64_t i = 0; i < output->dim[0]; i++)
        for (int64_t j = 0; j < output->dim[1]; j++)
            for (int64_t k = 0; k < output->dim[2]; k++)
                for (int64_t l = 0; l < output->dim[3]; l++) {
                    double y = tensor_get(output, i, j, k, l);
                    if (isfinite(y)) /* lse of a row that sees nothing; rows of no sequence */
                        sum += y * tensor_get(gradient, i, j, k, l);
                }
    return sum;
}

static double attention_loss(attention_problem *p) {
    attention_run(p, HEDDLE_FORWARD);
    return inner(&p->t[T_DOUT], &p->t[T_O]) + inner(&p->t[T_DLSE], &p->t[T_LSE]) +
           inner(&p->t[T_DWEIGHTS], &p->t[T_WEIGHTS]);
}

/* What every element of `gradient` should be, by moving the same element of `input`. */
static void compare_gradient(const char *name, void *problem, double (*loss)(void *), tensor *input,
                             const tensor *gradient) {
    double worst = 0, largest = 0;
    for (int64_t at = 0; at < input->span; at++) {
        if (tensor_is_poison(gradient, at))
            continue; /* no row of a sequence, or a gap */
        double x = tensor_raw(input, at), side[2];
        for (int s = 0; s < 2; s++) {
            tensor_raw_set(input, at, s ? x + STEP : x - STEP);
            tensor_upload(input);
            side[s] = loss(problem);
        }
        tensor_raw_set(input, at, x);
        tensor_upload(input);
        double numeric = (side[1] - side[0]) / (2 * STEP);
        assert_false(isnan(tensor_raw(gradient, at)));
        worst = fmax(worst, fabs(numeric - tensor_raw(gradient, at)));
        largest = fmax(largest, fabs(numeric));
    }
    if (worst > TOLERANCE * (1 + largest))
        fail_msg("%s: off by %g of %g", name, worst, largest);
}

static double attention_loss_of(void *p) {
    return attention_loss(p);
}

static const int attention_gradients[][2] = {
    {T_Q, T_DQ}, {T_K, T_DK}, {T_V, T_DV}, {T_BIAS, T_DBIAS}, {T_SINKS, T_DSINKS}};

static void check_attention_gradients(const attention_case *c) {
    attention_problem made = attention_new(c), p = attention_copy(&made, HEDDLE_F64, HEDDLE_REF);
    attention_run(&p, HEDDLE_FORWARD);
    attention_run(&p, HEDDLE_BACKWARD);
    for (size_t x = 0; x < COUNT(attention_gradients); x++) {
        tensor *input = &p.t[attention_gradients[x][0]], *gradient = &p.t[attention_gradients[x][1]];
        if (input->host && gradient->host && input->span == gradient->span)
            compare_gradient(attention_tensor_name[attention_gradients[x][1]], &p, attention_loss_of, input, gradient);
    }
    attention_free(&p);
    attention_free(&made);
}

static const int32_t cu_q[] = {0, 2, 2, 7}, cu_k[] = {0, 3, 5, 11}, len_q[] = {3, 0, 5}, len_k[] = {4, 6, 1};

/* Option number `x` of the case; what the numbers mean is in the table below. */
static void set_option(attention_case *c, int x) {
    heddle_attention *a = &c->a;
    switch (x) {
    case 0: a->scale = -0.7; break;
    case 1: a->mask = HEDDLE_CAUSAL_TOP_LEFT; break;
    case 2: a->mask = HEDDLE_CAUSAL_BOTTOM_RIGHT; break;
    case 3:
        a->features |= HEDDLE_WINDOW;
        a->window_left = 2;
        a->window_right = 1;
        break;
    case 4: a->softcap = 1.5; break;
    case 5:
        a->features |= HEDDLE_ALIBI;
        a->alibi_stride_b = a->h;
        break;
    case 6: a->features |= HEDDLE_BIAS; break;
    case 7:
        a->features |= HEDDLE_BIAS;
        a->bias_stride = a->dbias_stride = (heddle_strides){0, 0, a->sk};
        break;
    case 8:
        a->features |= HEDDLE_BOOL_MASK;
        c->mask_rows = true;
        break;
    case 9: a->features |= HEDDLE_SINKS; break;
    case 10:
        a->dropout = 0.3;
        a->seed = 77;
        a->offset = UINT64_C(1) << 40 | 5;
        break;
    case 11: a->features |= HEDDLE_WEIGHTS; break;
    case 12:
        a->features |= HEDDLE_VARLEN;
        c->cu_q = cu_q;
        c->cu_k = cu_k;
        a->total_q = 7;
        a->total_k = 11;
        break;
    case 13:
        a->features |= HEDDLE_SEQLENS;
        c->len_q = len_q;
        c->len_k = len_k;
        break;
    case 14:
        a->k_stride = a->dk_stride = (heddle_strides){4, 3 * 6 * 4, 3 * 4};
        a->dv_stride = a->v_stride = (heddle_strides){2 * 6 * 3, 3, 2 * 3};
        break;
    }
}

static attention_case base_case(uint64_t seed) {
    attention_case c = {.a = attention_desc(HEDDLE_F32, 3, 4, 2, 5, 6, 3, 2), .seed = seed};
    return c;
}

static void test_attention_each_option(void **state) {
    (void)state;
    attention_case c = base_case(1);
    check_attention_gradients(&c);
    for (int x = 0; x < 15; x++) {
        c = base_case((uint64_t)x + 2);
        set_option(&c, x);
        check_attention_gradients(&c);
    }
}

static void test_attention_pairs(void **state) {
    (void)state;
    for (int x = 0; x < 15; x++)
        for (int y = x + 1; y < 15; y++) {
            if ((x * 15 + y) % (test_long() ? 1 : 3) != 0 || (x == 12 && y == 14))
                continue;
            attention_case c = base_case((uint64_t)(x * 15 + y));
            set_option(&c, x);
            set_option(&c, y);
            check_attention_gradients(&c);
        }
}

static void test_attention_all_options(void **state) {
    (void)state;
    for (int mask = 0; mask <= LAST_MASK; mask++)
        for (int packed = 0; packed < 2; packed++)
            for (int summed = 0; summed < 2; summed++) {
                attention_case c = base_case((uint64_t)mask + 40);
                for (int x = 3; x < 14; x++)
                    if ((packed || x != 12) && x != (summed ? 6 : 7))
                        set_option(&c, x);
                c.a.mask = (heddle_mask)mask;
                c.a.scale = 0.8;
                check_attention_gradients(&c);
            }
}

static void test_attention_shapes(void **state) {
    (void)state;
    static const int64_t shape[][7] = {
        {1, 1, 1, 1, 1, 1, 1}, {1, 2, 1, 1, 7, 5, 3}, {1, 6, 3, 7, 1, 2, 9}, {2, 2, 2, 9, 4, 1, 1}};
    for (size_t x = 0; x < COUNT(shape); x++)
        for (int mask = 0; mask <= LAST_MASK; mask++) {
            const int64_t *s = shape[x];
            attention_case c = {.a = attention_desc(HEDDLE_F32, s[0], s[1], s[2], s[3], s[4], s[5], s[6]),
                                .seed = x + 60};
            c.a.mask = (heddle_mask)mask;
            check_attention_gradients(&c);
        }
}

static double norm_linear_loss_of(void *problem) {
    norm_linear_problem *p = problem;
    norm_linear_run(p, HEDDLE_FORWARD);
    return inner(&p->t[N_DY], &p->t[N_Y]) + (p->t[N_DZ].host ? inner(&p->t[N_DZ], &p->t[N_Z]) : 0);
}

static void check_norm_linear_gradients(const norm_linear_case *c) {
    static const int gradients[][2] = {{N_X, N_DX}, {N_GAMMA, N_DGAMMA}, {N_BETA, N_DBETA}, {N_W, N_DW}, {N_C, N_DC}};
    norm_linear_problem made = norm_linear_new(c), p = norm_linear_copy(&made, HEDDLE_F64, HEDDLE_REF);
    norm_linear_run(&p, HEDDLE_FORWARD);
    norm_linear_run(&p, HEDDLE_BACKWARD);
    for (size_t x = 0; x < COUNT(gradients); x++) {
        tensor *input = &p.t[gradients[x][0]], *gradient = &p.t[gradients[x][1]];
        if (input->host && gradient->host)
            compare_gradient(norm_linear_tensor_name[gradients[x][1]], &p, norm_linear_loss_of, input, gradient);
    }
    norm_linear_free(&p);
    norm_linear_free(&made);
}

static void test_norm_linear(void **state) {
    (void)state;
    static const uint32_t skips[] = {0,
                                     1u << N_GAMMA,
                                     1u << N_BETA,
                                     1u << N_C,
                                     1u << N_GAMMA | 1u << N_BETA | 1u << N_C,
                                     1u << N_MEAN | 1u << N_RSTD};
    static const int64_t shape[][3] = {{4, 5, 6}, {1, 1, 1}, {1, 7, 2}, {3, 2, 9}, {5, 9, 1}};
    for (int norm = 0; norm < 3; norm++)
        for (size_t x = 0; x < COUNT(skips); x++)
            for (size_t y = 0; y < COUNT(shape); y++) {
                norm_linear_case c = {
                    .a = norm_linear_desc(HEDDLE_F32, (heddle_norm)norm, shape[y][0], shape[y][1], shape[y][2]),
                    .seed = x * 10 + y,
                    .skip = skips[x]};
                c.a.eps = norm == HEDDLE_NO_NORM ? 0 : 0.1;
                c.mean = x % 2 ? 3 : 0;
                c.a.activation = (heddle_activation)((x + y) % (LAST_ACTIVATION + 1));
                c.a.features = (c.a.activation ? HEDDLE_ACTIVATION : 0) | (y % 2 ? HEDDLE_RESIDUAL : 0);
                c.a.features |= norm == HEDDLE_NO_NORM || x % 3 == 1 ? 0 : HEDDLE_Z;
                check_norm_linear_gradients(&c);
            }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_each_option), cmocka_unit_test(test_attention_pairs),
        cmocka_unit_test(test_attention_all_options), cmocka_unit_test(test_attention_shapes),
        cmocka_unit_test(test_norm_linear),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

/* SPDX-License-Identifier: Apache-2.0
 * The five systems that heddle takes the place of: their inputs, made as they made them, the true values of their
 * reports (to the digits that are known), and the invariants that their faults break. Run by the reference in
 * float64 and by the device in float32. */
#define _DEFAULT_SOURCE /* random_r: glibc's rand() without its state */
#include "common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Half a unit of the last printed digit, and what the arithmetic may add. */
static void expect_near(const char *what, double got, double expected, double tolerance) {
    if (!(fabs(got - expected) <= tolerance))
        fail_msg("%s: %.9g, should be %.9g", what, got, expected);
}

static attention_problem single_head(heddle_dtype dtype, heddle_device device, int64_t s, int64_t d, double scale,
                                     uint64_t features) {
    attention_case c = {.a = attention_desc(HEDDLE_F32, 1, 1, 1, s, s, d, d), .seed = 1};
    c.a.scale = scale;
    c.a.features = features;
    c.skip = 1u << T_DLSE | 1u << T_DWEIGHTS;
    attention_problem made = attention_new(&c), p = attention_copy(&made, dtype, device);
    attention_free(&made);
    return p;
}

static void run_both(attention_problem *p) {
    for (int x = 0; x < T_COUNT; x++)
        tensor_upload(&p->t[x]);
    attention_run(p, HEDDLE_FORWARD);
    attention_run(p, HEDDLE_BACKWARD);
}

static double sum_of(const tensor *t) {
    double sum = 0;
    for (int64_t at = 0; at < t->span; at++)
        sum += tensor_raw(t, at);
    return sum;
}

typedef struct glibc_rand {
    struct random_data data;
    char state[128];
} glibc_rand;

static void seed_rand(glibc_rand *r, unsigned seed) {
    memset(r, 0, sizeof *r);
    initstate_r(seed, r->state, sizeof r->state, &r->data);
}

static int next_rand(glibc_rand *r) {
    int32_t x;
    random_r(&r->data, &x);
    return x;
}

/* ----------------------------------------------------------------------------- A and B: Day 19, 50 */

/* torch.manual_seed and torch.randn on the CPU, for a multiple of 16 elements: MT19937 (Matsumoto and Nishimura,
 * 1998), 24 bits a number, Box and Muller on halves of 16. */
typedef struct mersenne {
    uint32_t state[624];
    int at;
} mersenne;

static void seed_mersenne(mersenne *m, uint32_t seed) {
    m->state[0] = seed;
    for (uint32_t x = 1; x < 624; x++)
        m->state[x] = 1812433253u * (m->state[x - 1] ^ m->state[x - 1] >> 30) + x;
    m->at = 624;
}

static uint32_t next_mersenne(mersenne *m) {
    if (m->at == 624) {
        for (int x = 0; x < 624; x++) {
            uint32_t y = (m->state[x] & 0x80000000u) | (m->state[(x + 1) % 624] & 0x7fffffffu);
            m->state[x] = m->state[(x + 397) % 624] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
        }
        m->at = 0;
    }
    uint32_t y = m->state[m->at++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

static void torch_randn(mersenne *m, float *x, int64_t n) {
    assert_int_equal(n % 16, 0);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)(next_mersenne(m) & 0xffffff) * 0x1p-24f;
    for (int64_t i = 0; i < n; i += 16)
        for (int64_t j = i; j < i + 8; j++) {
            float radius = sqrtf(-2 * logf(1 - x[j])), angle = 6.2831855f * x[j + 8];
            x[j] = radius * cosf(angle);
            x[j + 8] = radius * sinf(angle);
        }
}

/* x = randn(32, 64), Q = K = V = x: weights whose rows sum to 1, values times 1000, any rows and columns. */
static void test_day19(void **state) {
    (void)state;
    static const int64_t shape[][2] = {{32, 64}, {100, 16}, {64, 32}, {257, 24}}; /* the second broke its grid */
    for (size_t x = 0; x < COUNT(shape); x++)
        for (int large = 0; large < 2; large++) {
            attention_case c = {
                .a = attention_desc(HEDDLE_F32, 1, 1, 1, shape[x][0], shape[x][0], shape[x][1], shape[x][1]),
                .seed = x + 1,
                .same_input = true,
                .q_magnitude = large ? 1000 : 1,
                .ill_conditioned = large};
            c.a.features = HEDDLE_WEIGHTS;
            c.skip = 1u << T_DLSE | 1u << T_DWEIGHTS;
            check_attention(&c);
            c.a.scale = 0.25; /* its d = 16 on 64 columns */
            check_attention(&c);
            attention_problem p = attention_new(&c);
            attention_run(&p, HEDDLE_FORWARD);
            for (int64_t i = 0; i < shape[x][0]; i++) {
                double sum = 0;
                for (int64_t j = 0; j < shape[x][0]; j++)
                    sum += tensor_get(&p.t[T_WEIGHTS], 0, 0, i, j);
                expect_near("sum of a row of weights", sum, 1, 1e-5);
            }
            attention_free(&p);
        }
}

/* dS summed over the keys is 0 (seen through dbias), and for one shared x, dx = dQ + dK + dV by central differences. */
static void test_day50(void **state) {
    (void)state;
    static const heddle_device devices[] = {HEDDLE_REF, HEDDLE_CPU};
    for (size_t which = 0; which < COUNT(devices); which++) {
        bool ref = devices[which] == HEDDLE_REF;
        attention_problem p =
            single_head(ref ? HEDDLE_F64 : HEDDLE_F32, ref ? HEDDLE_REF : test_device(), 32, 64, 0, HEDDLE_BIAS);
        mersenne m;
        float x[32 * 64];
        seed_mersenne(&m, 0);
        torch_randn(&m, x, COUNT(x));
        for (int64_t at = 0; at < (int64_t)COUNT(x); at++)
            for (int t = T_Q; t <= T_V; t++)
                tensor_set(&p.t[t], 0, 0, at / 64, at % 64, (double)x[at]);
        for (int64_t at = 0; at < p.t[T_BIAS].span; at++)
            tensor_raw_set(&p.t[T_BIAS], at, 0);
        run_both(&p);
        for (int64_t i = 0; i < 32; i++) {
            double sum = 0;
            for (int64_t j = 0; j < 32; j++)
                sum += tensor_get(&p.t[T_DBIAS], 0, 0, i, j);
            expect_near("sum of a row of dS", sum, 0, ref ? 1e-13 : 1e-5);
        }
        for (int64_t at = 5; ref && at < (int64_t)COUNT(x); at += 97) {
            double side[2], dx = 0;
            for (int s = 0; s < 2; s++) {
                attention_problem q = attention_copy(&p, HEDDLE_F64, HEDDLE_REF);
                for (int t = T_Q; t <= T_V; t++) {
                    tensor_set(&q.t[t], 0, 0, at / 64, at % 64, (double)x[at] + (s ? 1e-5 : -1e-5));
                    tensor_upload(&q.t[t]);
                }
                attention_run(&q, HEDDLE_FORWARD);
                side[s] = 0;
                for (int64_t y = 0; y < 32 * 64; y++)
                    side[s] +=
                        tensor_get(&q.t[T_O], 0, 0, y / 64, y % 64) * tensor_get(&q.t[T_DOUT], 0, 0, y / 64, y % 64);
                attention_free(&q);
            }
            for (int t = T_DQ; t <= T_DV; t++)
                dx += tensor_get(&p.t[t], 0, 0, at / 64, at % 64);
            expect_near("dx of one shared input", dx, (side[1] - side[0]) / 2e-5, 1e-8);
        }
        attention_free(&p);
    }
}

/* ---------------------------------------------------------------------------------------------------- C: Day 55 */

static void test_day55(void **state) {
    (void)state;
    static const struct {
        int tensor;
        double value[9];
    } truth[] = {
        {T_Q, {0.680375, 0.823295, -0.444451, 0.499542, 0.168977, -0.74905, 0.461459, 0.841829, 0.0648819}},
        {T_K, {-0.211234, -0.604897, 0.10794, -0.262673, -0.511175, 0.586941, -0.343251, 0.369513, -0.824713}},
        {T_V, {0.566198, -0.329554, -0.0452059, -0.411679, -0.69522, -0.671796, 0.480877, 0.306261, -0.479006}},
        {T_DOUT, {0.59688, 0.536459, 0.257742, -0.535477, 0.464297, 0.490143, -0.595574, -0.485469, 0.754768}},
        {T_O, {0.016065, -0.0290427, -0.027025, 0.011394, -0.00482534, -0.03082, 0.0286616, -0.0218805, -0.0718517}},
        {T_DQ,
         {0.00946975, 0.00569055, 0.0007855, -0.00670553, -0.00763953, -0.0156887, -0.00887811, 0.0160615, 0.0198677}},
        {T_DK,
         {0.00480869, -0.00776059, -0.00402077, 0.0102126, 0.0126519, 0.0243553, 0.00513837, 0.0136316, 0.0141893}},
        {T_DV,
         {-0.0712795, -0.0072766, -0.00910687, -0.0345493, -0.0283635, 0.00945967, -0.0471181, 0.000656005, -0.015904}},
    };
    static const double lse[] = {4.93071, 4.90332, 4.90676};
    static const struct {
        int tensor;
        double sum;
    } sums[] = {{T_Q, -52.5536096}, {T_K, -16.5570838}, {T_V, -3.37172943}, {T_DOUT, -24.2776159}};
    for (int ref = 0; ref < 2; ref++) {
        attention_problem p =
            single_head(ref ? HEDDLE_F64 : HEDDLE_F32, ref ? HEDDLE_REF : test_device(), 128, 32, 0, 0);
        glibc_rand r;
        seed_rand(&r, 1);
        for (int64_t at = 0; at < 128 * 32; at++)
            for (size_t t = 0; t < 4; t++)
                tensor_set(&p.t[truth[t].tensor], 0, 0, at / 32, at % 32,
                           (double)(2 * (float)next_rand(&r) / (float)RAND_MAX - 1));
        for (size_t x = 0; x < COUNT(sums); x++)
            expect_near("sum", sum_of(&p.t[sums[x].tensor]), sums[x].sum, 1e-5);
        run_both(&p);
        for (size_t x = 0; x < COUNT(truth); x++)
            for (int64_t y = 0; y < 9; y++)
                expect_near(attention_tensor_name[truth[x].tensor],
                            tensor_get(&p.t[truth[x].tensor], 0, 0, y / 3, y % 3), truth[x].value[y],
                            1e-7 + 6e-6 * fabs(truth[x].value[y]));
        for (int64_t i = 0; i < 3; i++)
            expect_near("lse", tensor_get(&p.t[T_LSE], 0, 0, i, 0), lse[i], 6e-6);
        attention_free(&p);
    }
}

/* ------------------------------------------------------------------------------------------------------- D: p22 */

static void test_p22(void **state) {
    (void)state;
    static const double x0[] = {1.9269153,  1.4872841,  0.9007172,   -2.1055212,
                                0.67841846, -1.2345449, -0.04306748, -1.604667};
    static const double y0[] = {0.046287, -0.055208, -0.024811, -0.05856};
    static const double dx0[] = {0.024315, 0.086069, -0.091481, -0.037464, -0.072742, -0.005885, 0.017093, 0.080095};
    static const double dgamma[] = {0.026468, 0.376851, 0.356475, 0.07166, 0.040088, 0.199426, -0.169157, 0.193167};
    static const double dbeta[] = {-0.063771, 1.513258, -2.214776, 0.306764, -1.697501, 0.635861, 0.63235, 2.726165};
    static const double dw[] = {-6.640759, 3.984529, -2.575246, 3.737612, -0.377858, 5.018097, -4.280079, 1.133704};
    mersenne m;
    float x[128], w[128];
    seed_mersenne(&m, 42);
    torch_randn(&m, x, 128);
    torch_randn(&m, w, 128);
    for (int ref = 0; ref < 2; ref++) {
        norm_linear_case c = {.a = norm_linear_desc(HEDDLE_F32, HEDDLE_LAYER_NORM, 16, 8, 16), .seed = 1};
        norm_linear_problem made = norm_linear_new(&c);
        norm_linear_problem p =
            norm_linear_copy(&made, ref ? HEDDLE_F64 : HEDDLE_F32, ref ? HEDDLE_REF : test_device());
        for (int64_t at = 0; at < 128; at++) {
            tensor_set(&p.t[N_X], 0, 0, at / 8, at % 8, (double)x[at]);
            tensor_set(&p.t[N_W], 0, 0, at / 8, at % 8, (double)(0.02f * w[at]));
        }
        for (int64_t at = 0; at < 16; at++) {
            tensor_set(&p.t[N_C], 0, 0, 0, at, 0);
            for (int64_t row = 0; row < 16; row++)
                tensor_set(&p.t[N_DY], 0, 0, row, at, 1);
        }
        for (int64_t e = 0; e < 8; e++) {
            tensor_set(&p.t[N_GAMMA], 0, 0, 0, e, 1);
            tensor_set(&p.t[N_BETA], 0, 0, 0, e, 0);
            expect_near("x", (double)x[e], x0[e], 2e-6);
        }
        for (int t = 0; t < N_COUNT; t++)
            tensor_upload(&p.t[t]);
        norm_linear_run(&p, HEDDLE_FORWARD);
        norm_linear_run(&p, HEDDLE_BACKWARD);
        for (int64_t f = 0; f < 4; f++)
            expect_near("y", tensor_get(&p.t[N_Y], 0, 0, 0, f), y0[f], 1e-6);
        for (int64_t e = 0; e < 8; e++) {
            expect_near("dx", tensor_get(&p.t[N_DX], 0, 0, 0, e), dx0[e], 1e-6);
            expect_near("dgamma", tensor_raw(&p.t[N_DGAMMA], e), dgamma[e], 2e-6);
            expect_near("dbeta", tensor_raw(&p.t[N_DBETA], e), dbeta[e], 2e-6);
            for (int64_t f = 0; f < 16; f++)
                expect_near("dw", tensor_get(&p.t[N_DW], 0, 0, f, e), dw[e], 4e-6);
        }
        for (int64_t f = 0; f < 16; f++)
            expect_near("dbias", tensor_raw(&p.t[N_DC], f), 16, 1e-6);
        for (int64_t i = 0; i < 16; i++) {
            double sum = 0;
            for (int64_t e = 0; e < 8; e++)
                sum += tensor_get(&p.t[N_DX], 0, 0, i, e);
            expect_near("sum of a row of dx", sum, 0, ref ? 1e-15 : 2e-7);
        }
        norm_linear_free(&p);
        norm_linear_free(&made);
    }
}

/* A LayerNorm's dx sums to 0 over each row, with random dy, gamma, beta and W too; an RMSNorm's does not. */
static void test_dx_sums_to_zero(void **state) {
    (void)state;
    for (int norm = 0; norm < 2; norm++) {
        norm_linear_case c = {.a = norm_linear_desc(HEDDLE_F32, (heddle_norm)norm, 12, 50, 30), .seed = 3};
        norm_linear_problem p = norm_linear_new(&c);
        norm_linear_run(&p, HEDDLE_FORWARD);
        norm_linear_run(&p, HEDDLE_BACKWARD);
        double worst = 0;
        for (int64_t i = 0; i < 12; i++) {
            double sum = 0;
            for (int64_t e = 0; e < 50; e++)
                sum += tensor_get(&p.t[N_DX], 0, 0, i, e);
            worst = fmax(worst, fabs(sum));
        }
        assert_true(norm == HEDDLE_LAYER_NORM ? worst < 1e-5 : worst > 0.1);
        norm_linear_free(&p);
    }
}

/* ----------------------------------------------------------------------- E: FlashAttention-2, warps */

static void test_warps_small(void **state) {
    (void)state;
    static const double o[] = {2.04926623, 2.34975541, 2.65024459, 2.95073377};
    static const double dq[] = {-0.49878642, -0.00861556, 0.16626214,  0.34113984,  -0.23604213, -0.16626214,
                                0.11371328,  0.28859099,  -0.28859099, -0.11371328, 0.16626214,  0.23604213,
                                -0.34113984, -0.16626214, 0.00861556,  0.49878642};
    for (int ref = 0; ref < 2; ref++) {
        attention_problem p = single_head(ref ? HEDDLE_F64 : HEDDLE_F32, ref ? HEDDLE_REF : test_device(), 4, 4, 1, 0);
        for (int64_t i = 0; i < 4; i++)
            for (int64_t e = 0; e < 4; e++) {
                tensor_set(&p.t[T_Q], 0, 0, i, e, i == e);
                tensor_set(&p.t[T_K], 0, 0, i, e, i == e);
                tensor_set(&p.t[T_V], 0, 0, i, e, (double)(i + 1));
                tensor_set(&p.t[T_DOUT], 0, 0, i, e, i == e);
            }
        run_both(&p);
        for (int64_t i = 0; i < 4; i++)
            for (int64_t e = 0; e < 4; e++) {
                double tolerance = ref ? 6e-9 : 4e-7;
                expect_near("o", tensor_get(&p.t[T_O], 0, 0, i, e), o[i], tolerance);
                expect_near("dq", tensor_get(&p.t[T_DQ], 0, 0, i, e), dq[i * 4 + e], tolerance);
                expect_near("dk", tensor_get(&p.t[T_DK], 0, 0, i, e), dq[e * 4 + i], tolerance);
                expect_near("dv", tensor_get(&p.t[T_DV], 0, 0, i, e), i == e ? 0.47536689 : 0.17487770, tolerance);
                expect_near("lse", tensor_get(&p.t[T_LSE], 0, 0, i, 0), 1.74366838, tolerance);
            }
        attention_free(&p);
    }
}

static void test_warps_large(void **state) {
    (void)state;
    static const struct {
        int tensor;
        double value[6];
    } truth[] = {
        {T_O, {0.01448059, 0.01490998, 0.01063442, -0.01918492, -0.00117553, 0.03076510}},
        {T_DQ, {-0.00014141, 0.00074560, -0.00067117, 0.00058201, 0.00006656, -0.00086821}},
        {T_DK, {0.00021943, -0.00081654, -0.00036720, -0.00052905, 0.00102442, 0.00067394}},
        {T_DV, {-0.00407865, 0.00951492, -0.01067890, -0.00017840, 0.00608360, -0.01255997}},
    };
    static const double lse[] = {4.86486499, 4.86351985, 4.83370423};
    for (int ref = 0; ref < 2; ref++) {
        attention_problem p =
            single_head(ref ? HEDDLE_F64 : HEDDLE_F32, ref ? HEDDLE_REF : test_device(), 128, 64, 0.125, 0);
        glibc_rand r;
        seed_rand(&r, 42);
        static const int order[] = {T_Q, T_K, T_V, T_DOUT};
        for (int64_t at = 0; at < 128 * 64; at++)
            for (size_t t = 0; t < COUNT(order); t++)
                tensor_set(
                    &p.t[order[t]], 0, 0, at / 64, at % 64,
                    (double)(((float)(next_rand(&r) % 2000) / 1000.0f - 1.0f) * (order[t] == T_DOUT ? 0.2f : 0.5f)));
        run_both(&p);
        for (size_t x = 0; x < COUNT(truth); x++)
            for (int64_t e = 0; e < 6; e++)
                expect_near(attention_tensor_name[truth[x].tensor], tensor_get(&p.t[truth[x].tensor], 0, 0, 0, e),
                            truth[x].value[e], 2e-8);
        for (int64_t i = 0; i < 3; i++)
            expect_near("lse", tensor_get(&p.t[T_LSE], 0, 0, i, 0), lse[i], ref ? 6e-9 : 1e-6);
        attention_free(&p);
    }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_day19),       cmocka_unit_test(test_day50),           cmocka_unit_test(test_day55),
        cmocka_unit_test(test_p22),         cmocka_unit_test(test_dx_sums_to_zero), cmocka_unit_test(test_warps_small),
        cmocka_unit_test(test_warps_large),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

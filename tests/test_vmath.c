/* SPDX-License-Identifier: Apache-2.0
 * What the kernels are made of, compiled as one ISA compiles it: exp2, tanh, 16-bit conversions, transposition, Philox and
 * the small matrix product. CMake builds this file once per ISA, with VL and VEC_HEADER taken from its isa_<name>.c. */
#include "common.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include VEC_HEADER
#include "cpu/gemm.h"
#include "cpu/vmath.h"
#pragma GCC diagnostic pop

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

/* Steps between bit patterns. Where long double is emulated, it costs a hundred times as much. */
static uint32_t stride_of(uint32_t quick, uint32_t thorough) {
    return test_long() ? thorough : quick * (LDBL_MANT_DIG > 64 ? 61 : 1);
}

static float nan_with(uint32_t payload) {
    return float_from_bits(0x7fc00000u | payload);
}

/* -------------------------------------------------------------------------------------------- functions of a float */

typedef struct function {
    const char *name;
    vf (*vector)(vf);
    long double (*exact)(long double);
    double limit, worst; /* in ulp */
    float worst_at;
    long points;
} function;

static vf call_vexp2(vf x) {
    return vexp2(x);
}

#define REST 0.3f
#define WHOLE 7

static vf call_vexp2_twice(vf x) {
    const exponent_rest less = rest_of_exponent(splat(REST), splat(WHOLE));
    vexp2_twice(1, 1, 1, &less, &x);
    return x;
}

static long double exp2_twice(long double x) {
    return 2 * exp2l(x - (long double)REST - WHOLE);
}

static vf call_vtanh(vf x) {
    return vtanh(x);
}

/* Units in the last place of a float that is the exact value rounded. */
static double ulps(float got, long double exact) {
    int e;
    frexpl(exact, &e);
    long double ulp = ldexpl(1, (e - 1 < -126 ? -126 : e - 1) - 23);
    return (double)(fabsl((long double)got - exact) / ulp);
}

/* Every `stride`-th float from the pattern `first` to `last`. */
static void measure(function *f, uint32_t first, uint32_t last, uint32_t stride) {
    for (uint64_t u = first; u <= last;) {
        float x[VL], y[VL];
        int n = 0;
        for (; n < VL && u <= last; u += stride)
            x[n++] = float_from_bits((uint32_t)u);
        for (int l = n; l < VL; l++)
            x[l] = x[0];
        store(y, f->vector(load(x)));
        for (int l = 0; l < n; l++) {
            double error = ulps(y[l], f->exact((long double)x[l]));
            if (!(error <= f->worst)) {
                f->worst = error;
                f->worst_at = x[l];
            }
        }
        f->points += n;
    }
}

static void report(const function *f) {
    printf("%s: at most %.3f ulp off in %ld points (at %a)\n", f->name, f->worst, f->points, (double)f->worst_at);
    if (!(f->worst <= f->limit))
        fail_msg("%s is off by %g ulp at %a, more than %g", f->name, f->worst, (double)f->worst_at, f->limit);
}

/* What softmax asks for lies in [-126, 1]; below 2^-30 all is 1. The rest, up to 127, with wider steps. */
static void test_exp2(void **state) {
    (void)state;
    function f = {.name = "vexp2", .vector = call_vexp2, .exact = exp2l, .limit = 1};
    const uint32_t negative = 0x80000000u, stride = stride_of(557, 53);
    measure(&f, negative | float_bits(0x1p-30f), negative | float_bits(126.0f), stride);
    measure(&f, float_bits(0x1p-30f), float_bits(1.0f), stride);
    measure(&f, 0, float_bits(0x1p-30f), 1000 * stride);
    measure(&f, negative, negative | float_bits(0x1p-30f), 1000 * stride);
    measure(&f, float_bits(1.0f), float_bits(127.0f), 10 * stride);
    report(&f);
    for (int n = -126; n <= 127; n++)
        assert_true(vexp2(splat((float)n))[0] == ldexpf(1, n));
}

static void test_exp2_zeros(void **state) {
    (void)state;
    const uint32_t first = float_bits(-127.0f), last = float_bits(-INFINITY);
    for (uint32_t u = first; u < last; u += stride_of(9973, 97))
        assert_int_equal(float_bits(vexp2(splat(float_from_bits(u)))[0]), 0);
    const float masked[] = {-127, nextafterf(-127, -128), -1e4f, -1e30f, -FLT_MAX, -INFINITY};
    for (size_t x = 0; x < COUNT(masked); x++)
        for (int l = 0; l < VL; l++) {
            vf v = splat(0);
            v[l] = masked[x];
            v = vexp2(v);
            for (int other = 0; other < VL; other++)
                assert_int_equal(float_bits(v[other]), other == l ? 0 : float_bits(1));
        }
    /* In between, where the result is no normal float: nothing large, nothing negative. */
    for (int x = 0; x < 10000; x++) {
        float y = vexp2(splat(-126 - (float)x * 1e-4f))[0];
        assert_true(y >= 0 && y <= 0x1p-126f);
    }
}

/* With a rest behind the whole part, which only this function takes away. */
static void test_exp2_twice(void **state) {
    (void)state;
    function f = {.name = "vexp2_twice", .vector = call_vexp2_twice, .exact = exp2_twice, .limit = 1};
    const uint32_t negative = 0x80000000u, stride = stride_of(5557, 557);
    measure(&f, negative | float_bits(0x1p-30f), negative | float_bits(118.0f), stride);
    measure(&f, float_bits(0x1p-30f), float_bits(127.0f), stride);
    report(&f);
    const float masked[] = {-127, -128, -1e4f, -1e30f, -FLT_MAX, -INFINITY}, rests[] = {-0.5f, 0, 0.5f, 30},
                wholes[] = {-20, 0, 1, 64};
    for (size_t x = 0; x < COUNT(masked); x++)
        for (size_t y = 0; y < COUNT(rests) * COUNT(wholes); y++)
            for (int l = 0; l < VL; l++) {
                const float rest = rests[y % COUNT(rests)], whole = wholes[y / COUNT(rests)];
                const exponent_rest less = rest_of_exponent(splat(rest), splat(whole));
                vf v = splat(rest + whole + 1);
                v[l] = masked[x] + rest + whole;
                vexp2_twice(1, 1, 1, &less, &v);
                for (int other = 0; other < VL; other++)
                    assert_true(v[other] == (other == l ? 0 : 4));
            }
    for (int n = 0; n < 1500; n++) { /* no denormal, which the function above gives here */
        const float y = call_vexp2_twice(splat(-126 - (float)n * 0.001f + REST + WHOLE))[0];
        assert_true(y == 0 || y >= 0x1p-126f);
    }
    vf x = splat(NAN);
    assert_true(isnan(call_vexp2_twice(x)[0]));
}

/* A power of two more, and nothing else. */
static void test_exp2_lifted(void **state) {
    (void)state;
    for (int n = 0; n < 5000; n++) {
        const float x = -127.5f + (float)n * 0.0371f;
        vf lifted = splat(x);
        vexp2_lifted(1, 1, -127, 0x1p48f, 0, &lifted);
        assert_true(lifted[0] == vexp2(splat(x))[0] * 0x1p48f || (x < -126 && lifted[0] <= 0x1.000002p-78f));
        vf lowered = splat(x);
        vexp2_lifted(1, 1, 4 - 127, 1, 4, &lowered);
        assert_true(x < -122 ? lowered[0] >= 0 && lowered[0] <= 0x1.000002p-126f
                             : lowered[0] == vexp2(splat(x))[0] * 0x1p-4f);
        assert_true(x > -123 || lowered[0] == 0);
    }
    vf hidden = splat(-INFINITY), low = hidden;
    vexp2_lifted(1, 1, -127, 0x1p48f, 0, &hidden);
    vexp2_lifted(1, 1, 4 - 127, 1, 4, &low);
    assert_true(hidden[0] == 0 && low[0] == 0);
}

/* All of e4m3, in 16 bits and as floats, beside dtype.h. */
static void test_e4m3(void **state) {
    (void)state;
    for (int x = 0; x < 256; x++)
        for (int l = 0; l < 2 * VL; l++) {
            vb_two bytes = {0};
            bytes[l] = (uint8_t)x;
            const vh_two bf16 = e4m3_halves(7, 127, bytes), f16 = e4m3_halves(10, 15, bytes);
            const float right = e4m3_to_float((uint8_t)x);
            for (int other = 0; other < 2 * VL; other++) {
                const float of[] = {bf16_to_float(bf16[other]), f16_to_float(f16[other])};
                for (int y = 0; y < 2; y++)
                    assert_true(other != l     ? of[y] == 0
                                : isnan(right) ? isnan(of[y])
                                               : float_bits(of[y]) == float_bits(right));
            }
        }
}

static const uint32_t payloads[] = {0, 1, 2, 0x80, 0x100, 0x1ff, 0x12345, 0x3fffff};

static void test_nan(void **state) {
    (void)state;
    for (size_t x = 0; x < COUNT(payloads); x++)
        for (int l = 0; l < 2 * VL; l++) {
            vf v = splat(0);
            v[l % VL] = l < VL ? nan_with(payloads[x]) : -nan_with(payloads[x]);
            vf e = vexp2(v), t = vtanh(v), m = vmax(splat(1), v);
            for (int other = 0; other < VL; other++) {
                assert_int_equal(isnan(e[other]), other == l % VL);
                assert_int_equal(isnan(t[other]), other == l % VL);
                assert_int_equal(isnan(m[other]), other == l % VL);
            }
        }
}

static void test_max(void **state) {
    (void)state;
    const float x[] = {-INFINITY, -FLT_MAX, -1, -FLT_MIN, 0, FLT_MIN, 1, FLT_MAX, INFINITY};
    for (size_t a = 0; a < COUNT(x); a++)
        for (size_t b = 0; b < COUNT(x); b++)
            assert_true(vmax(splat(x[a]), splat(x[b]))[VL - 1] == x[a > b ? a : b]);
}

static void test_tanh(void **state) {
    (void)state;
    function f = {.name = "vtanh", .vector = call_vtanh, .exact = tanhl, .limit = 2};
    const uint32_t negative = 0x80000000u, stride = stride_of(557, 53);
    const uint32_t tiny = float_bits(0x1p-40f), some = float_bits(0.0625f), most = float_bits(45.0f);
    measure(&f, float_bits(FLT_MIN), tiny, 100 * stride);
    measure(&f, tiny, some, stride);
    measure(&f, some, most, stride / 3);
    measure(&f, most, float_bits(FLT_MAX), 100 * stride);
    measure(&f, negative | some, negative | most, stride);
    report(&f);
    assert_true(vtanh(splat(INFINITY))[0] == 1 && vtanh(splat(-INFINITY))[0] == -1 && vtanh(splat(0))[0] == 0);
}

/* Vectors side by side, of which none, some or all have lanes beyond the polynomial's reach, are as each by itself. */
static void test_tanh_each(void **state) {
    (void)state;
    for (int wide = 0; wide < 1 << TANH_MOST; wide++)
        for (int lane = 0; lane < VL; lane++) {
            vf x[TANH_MOST], each[TANH_MOST];
            for (int v = 0; v < TANH_MOST; v++) {
                for (int l = 0; l < VL; l++) {
                    const int from_middle = l - VL / 2;
                    x[v][l] = (float)(v + 1) * (float)from_middle * 0.015625f;
                }
                x[v][lane] = wide >> v & 1 ? 0.75f + (float)v : 0.5f;
                each[v] = vtanh(x[v]);
            }
            vtanh_each(TANH_MOST, x);
            assert_memory_equal(x, each, sizeof x);
        }
}

static void test_any_lane(void **state) {
    (void)state;
    assert_false(any_lane(splat_int(0)));
    for (int l = 0; l < VL; l++)
        for (int bit = 0; bit < 32; bit++) {
            vi mask = splat_int(0);
            mask[l] = (int32_t)(UINT32_C(1) << bit);
            assert_true(any_lane(mask));
        }
}

/* ------------------------------------------------------------------------------------------------ 16-bit elements */

typedef struct half {
    const char *name;
    vf (*widen)(vh);
    vh (*narrow)(vf);
    float (*to_float)(uint16_t);
    uint16_t (*from_float)(float);
} half;

static vf call_bf16_widen(vh h) {
    return bf16_widen(h);
}

static vh call_bf16_narrow(vf x) {
    return bf16_narrow(x);
}

static vf call_f16_widen(vh h) {
    return f16_widen(h);
}

static vh call_f16_narrow(vf x) {
    return f16_narrow(x);
}

static uint16_t float_to_f16(float x) {
    return double_to_f16((double)x);
}

static const half halves[] = {{"bf16", call_bf16_widen, call_bf16_narrow, bf16_to_float, float_to_bf16},
                              {"f16", call_f16_widen, call_f16_narrow, f16_to_float, float_to_f16}};

static void test_widen(void **state) {
    (void)state;
    for (const half *t = halves; t < halves + COUNT(halves); t++)
        for (uint32_t first = 0; first < 65536; first += VL) {
            vh h = {0};
            for (int l = 0; l < VL; l++)
                h[l] = (uint16_t)(first + (uint32_t)l);
            vf wide = t->widen(h);
            for (int l = 0; l < VL; l++) {
                float right = t->to_float(h[l]);
                if (isnan(right) ? !isnan(wide[l]) : float_bits(right) != float_bits(wide[l]))
                    fail_msg("%s 0x%04x widens to %a, not %a", t->name, h[l], (double)wide[l], (double)right);
            }
        }
}

static void check_narrow(const half *t, const float *x) {
    vh got = t->narrow(load(x));
    for (int l = 0; l < VL; l++) {
        uint16_t right = t->from_float(x[l]);
        if (isnan(x[l]) ? !isnan(t->to_float(got[l])) : right != got[l])
            fail_msg("%s: %a (0x%08x) narrows to 0x%04x, not 0x%04x", t->name, (double)x[l], float_bits(x[l]), got[l],
                     right);
    }
}

/* Each value, the tie above it and both neighbours of the tie; then floats of every size, NaN among them. */
static void test_narrow(void **state) {
    (void)state;
    const uint32_t stride = stride_of(4099, 97);
    for (const half *t = halves; t < halves + COUNT(halves); t++) {
        for (uint32_t h = 0; h < 65536; h++) {
            float low = t->to_float((uint16_t)h), high = t->to_float((uint16_t)(h + 1));
            if (!isfinite(low))
                continue;
            if (!isfinite(high) || h == 0x7fff) /* what follows if the exponent went on: overflow begins at the tie */
                high = low + (low - t->to_float((uint16_t)(h - 1)));
            float tie = isfinite(high) ? low + (high - low) / 2 : low;
            float x[16] = {low, tie, nextafterf(tie, 0), nextafterf(tie, tie < 0 ? -INFINITY : INFINITY)};
            for (int l = 4; l < 16; l++)
                x[l] = x[l % 4];
            check_narrow(t, x);
        }
        for (uint64_t u = 0; u <= UINT32_MAX; u += VL * (uint64_t)stride) {
            float x[VL];
            for (int l = 0; l < VL; l++)
                x[l] = float_from_bits((uint32_t)u + (uint32_t)l * stride);
            check_narrow(t, x);
        }
        for (size_t p = 0; p < COUNT(payloads); p++) {
            const float nan[2] = {nan_with(payloads[p]), -nan_with(payloads[p])};
            for (int sign = 0; sign < 2; sign++)
                for (int l = 0; l < VL; l++)
                    assert_true(isnan(t->to_float(t->narrow(splat(nan[sign]))[l])));
        }
    }
}

/* ------------------------------------------------------------------------------------------- lanes and random words */

static void test_transpose(void **state) {
    (void)state;
    vf rows[VL];
    for (int r = 0; r < VL; r++)
        for (int l = 0; l < VL; l++)
            rows[r][l] = (float)(r * VL + l);
    transpose(rows);
    for (int r = 0; r < VL; r++)
        for (int l = 0; l < VL; l++)
            assert_true(rows[r][l] == (float)(l * VL + r));
}

static void test_dropout_words(void **state) {
    (void)state;
    rng r = {test_seed(19)};
    for (int trial = 0; trial < (test_long() ? 100000 : 2000); trial++) {
        uint64_t seed = rng_next(&r), offset = rng_next(&r);
        uint32_t j8 = (uint32_t)rng_next(&r);
        vu bh, i, words[4];
        for (int l = 0; l < VL; l++) {
            bh[l] = (uint32_t)rng_next(&r);
            i[l] = (uint32_t)rng_next(&r);
        }
        vdropout_words(seed, offset, bh, i, j8, words);
        for (int l = 0; l < VL; l++) {
            philox4 right = dropout_words(seed, offset, bh[l], i[l], j8);
            for (int w = 0; w < 4; w++)
                assert_int_equal(words[w][l], right.w[w]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ matrix product */

enum { MOST_ROWS = 17, MOST_VECTORS = 9, MOST_COUNT = 19, WIDTH = MOST_VECTORS * VL, GUARD = 777 };

typedef struct product {
    float a[MOST_ROWS * MOST_COUNT], b[MOST_COUNT * (WIDTH + 3)], c[MOST_ROWS * (WIDTH + 5)];
    float right[MOST_ROWS * (WIDTH + 5)];
    int64_t a_row, a_x, b_stride, c_stride;
} product;

/* Small whole numbers: every order of summation gives the same. Not the strides of a full vector, and A either way. */
static void fill(product *p, rng *r, int rows, int vectors, int count, bool transposed) {
    p->a_row = transposed ? 1 : count;
    p->a_x = transposed ? rows : 1;
    p->b_stride = vectors * VL + 3;
    p->c_stride = vectors * VL + 5;
    for (size_t x = 0; x < COUNT(p->a); x++)
        p->a[x] = (float)rng_between(r, -9, 9);
    for (size_t x = 0; x < COUNT(p->b); x++)
        p->b[x] = (float)rng_between(r, -9, 9);
    for (size_t x = 0; x < COUNT(p->c); x++)
        p->c[x] = p->right[x] = GUARD;
}

static void compare(const product *p, const char *what, int rows, int vectors, int count) {
    for (size_t x = 0; x < COUNT(p->c); x++)
        if (!(p->c[x] == p->right[x]))
            fail_msg("%s, %d rows, %d vectors, %d terms: c[%zu] is %g, not %g", what, rows, vectors, count, x,
                     (double)p->c[x], (double)p->right[x]);
}

static void check_gemm(product *p, rng *r, int rows, int vectors, int count, int options) {
    const bool transposed = options & 1, add = options & 2;
    fill(p, r, rows, vectors, count, transposed);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors * VL; j++) {
            float sum = add ? GUARD : 0;
            for (int x = 0; x < count; x++)
                sum += p->a[i * p->a_row + x * p->a_x] * p->b[x * p->b_stride + j];
            p->right[i * p->c_stride + j] = sum;
        }
    gemm_a a = {p->a, p->a_row, p->a_x};
    gemm(vectors, rows, count, a, p->b, p->b_stride, p->c, p->c_stride, add);
    compare(p, "gemm", rows, vectors, count);
}

/* About half of A (or of B) is zero, and each term of such a zero has an infinity or a NaN for its other factor. */
static void check_careful(product *p, rng *r, int rows, int vectors, int count, bool masked_a) {
    static const float cut_off[] = {INFINITY, -INFINITY, NAN};
    fill(p, r, rows, vectors, count, false);
    for (int x = 0; x < count; x++) {
        const bool cut = rng_chance(r, 0.5);
        float *const row = p->b + x * p->b_stride;
        for (int j = 0; cut && j < vectors * VL; j++)
            row[j] = masked_a ? cut_off[j % 3] : 0;
        for (int i = 0; cut && i < rows; i++)
            p->a[i * p->a_row + x] = masked_a ? 0 : cut_off[i % 3];
        for (int i = 0; !cut && i < rows; i++)
            for (int j = 0; j < vectors * VL; j++) {
                float *right = p->right + i * p->c_stride + j;
                *right += p->a[i * p->a_row + x] * row[j];
            }
    }
    gemm_a a = {p->a, p->a_row, p->a_x};
    gemm_careful(masked_a, vectors, rows, count, rng_between(r, 1, 40), a, p->b, p->b_stride, p->c, p->c_stride);
    compare(p, "gemm_careful", rows, vectors, count);
}

static void test_gemm(void **state) {
    (void)state;
    static product p;
    static const int counts[] = {0, 1, 2, 5, MOST_COUNT};
    rng r = {test_seed(50)};
    for (int rows = 1; rows <= MOST_ROWS; rows++)
        for (int vectors = 1; vectors <= MOST_VECTORS; vectors++)
            for (size_t n = 0; n < COUNT(counts); n++) {
                for (int options = 0; options < 4; options++)
                    check_gemm(&p, &r, rows, vectors, counts[n], options);
                check_careful(&p, &r, rows, vectors, counts[n], true);
                check_careful(&p, &r, rows, vectors, counts[n], false);
            }
}

static void test_all_finite(void **state) {
    (void)state;
    enum { ROWS = 3, STRIDE = 2 * VL + 3 };
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    float p[ROWS * STRIDE];
    for (int columns = 1; columns <= STRIDE; columns++)
        for (int at = 0; at < ROWS * STRIDE; at++)
            for (size_t x = 0; x < COUNT(bad); x++) {
                for (int y = 0; y < ROWS * STRIDE; y++)
                    p[y] = y % 2 ? FLT_MAX : -FLT_MIN;
                p[at] = bad[x];
                assert_int_equal(all_finite(p, ROWS, STRIDE, columns), at % STRIDE >= columns);
            }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp2),        cmocka_unit_test(test_exp2_zeros),    cmocka_unit_test(test_exp2_twice),
        cmocka_unit_test(test_exp2_lifted), cmocka_unit_test(test_e4m3),          cmocka_unit_test(test_nan),
        cmocka_unit_test(test_max),         cmocka_unit_test(test_tanh),          cmocka_unit_test(test_tanh_each),
        cmocka_unit_test(test_any_lane),    cmocka_unit_test(test_widen),         cmocka_unit_test(test_narrow),
        cmocka_unit_test(test_transpose),   cmocka_unit_test(test_dropout_words), cmocka_unit_test(test_gemm),
        cmocka_unit_test(test_all_finite),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

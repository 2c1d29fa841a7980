/* SPDX-License-Identifier: Apache-2.0
 * Conversions, bit by bit, and Philox against Random123; and what the tests themselves convert and draw by the row. */
#include "common.h"

#include "dtype.h"
#include "philox.h"
#include "random123.h"

#include <math.h>
#include <stdio.h>

/* A pattern's value from the definition of the format: `bits` of mantissa, `bias` of the exponent. */
static double value_of(uint16_t h, int bits, int bias, int top) {
    int exponent = (h & 0x7fff) >> bits, mantissa = h & ((1 << bits) - 1);
    double sign = h >> 15 ? -1 : 1;
    if (exponent == top)
        return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - bias - bits);
    return sign * ldexp(mantissa + (1 << bits), exponent - bias - bits);
}

typedef struct format {
    heddle_dtype dtype;
    int bits, bias, top;
    double largest;
} format;

static const format formats[] = {{HEDDLE_BF16, 7, 127, 255, 0x1.fep127}, {HEDDLE_F16, 10, 15, 31, 65504}};

/* As large as the largest element, so that the compiler does not warn of the branches for others. */
typedef union cell {
    uint16_t half;
    double wide;
} cell;

static double load(const format *f, uint16_t h) {
    cell c = {.half = h};
    return load_element(f->dtype, &c, 0);
}

static uint16_t store(const format *f, double x) {
    cell c = {.half = 0xbeef};
    store_element(f->dtype, &c, 0, x);
    return c.half;
}

static void test_patterns(void **state) {
    (void)state;
    for (size_t x = 0; x < COUNT(formats); x++)
        for (uint32_t h = 0; h < 65536; h++) {
            const format *f = &formats[x];
            double expected = value_of((uint16_t)h, f->bits, f->bias, f->top), got = load(f, (uint16_t)h);
            if (isnan(expected)) {
                assert_true(isnan(got));
                assert_true(isnan(load(f, store(f, got))));
                continue;
            }
            assert_true(got == expected && signbit(got) == signbit(expected));
            assert_int_equal(store(f, got), h);
            if (f->dtype == HEDDLE_BF16)
                assert_int_equal(float_to_bf16((float)got), h);
        }
}

/* Between each two neighbours: the middle goes to the even one, anything else to the nearer one. */
static void test_rounding(void **state) {
    (void)state;
    for (size_t x = 0; x < COUNT(formats); x++)
        for (uint32_t h = 0; h < 0x7fff; h++) {
            const format *f = &formats[x];
            if (h >= (uint32_t)f->top << f->bits)
                break;
            bool last = h + 1 == (uint32_t)f->top << f->bits; /* the neighbour is infinity, at one step further */
            double low = load(f, (uint16_t)h),
                   step = last ? low - load(f, (uint16_t)(h - 1)) : load(f, (uint16_t)(h + 1)) - low;
            uint16_t even = h & 1 ? (uint16_t)(h + 1) : (uint16_t)h;
            double middle = low + step / 2;
            for (int sign = 0; sign < 2; sign++) {
                uint16_t bit = sign ? 0x8000 : 0;
                double s = sign ? -1 : 1;
                assert_int_equal(store(f, s * middle), even | bit);
                assert_int_equal(store(f, s * nextafter(middle, 0)),
                                 h | bit); /* a float32 on the way would lose this */
                assert_int_equal(store(f, s * nextafter(middle, INFINITY)), (h + 1) | bit);
                assert_int_equal(store(f, s * (low + step * 0.25)), h | bit);
                assert_int_equal(store(f, s * (low + step * 0.75)), (h + 1) | bit);
                if (f->dtype == HEDDLE_BF16 && (double)(float)middle == middle)
                    assert_int_equal(float_to_bf16((float)(s * middle)), even | bit);
            }
        }
}

static void test_special(void **state) {
    (void)state;
    for (size_t x = 0; x < COUNT(formats); x++) {
        const format *f = &formats[x];
        assert_true(load(f, store(f, INFINITY)) == (double)INFINITY &&
                    load(f, store(f, -INFINITY)) == (double)-INFINITY);
        assert_true(isnan(load(f, store(f, NAN))) && isnan(load(f, store(f, -NAN))));
        assert_true(load(f, store(f, f->largest)) == f->largest);
        assert_true(isinf(load(f, store(f, 1e300))) && load(f, store(f, -1e300)) < 0);
        assert_int_equal(store(f, 0.0), 0);
        assert_int_equal(store(f, -0.0), 0x8000);
        assert_int_equal(store(f, 1e-300), 0);
        assert_int_equal(store(f, -1e-300), 0x8000);
        assert_int_equal(store(f, load(f, 1)), 1); /* the smallest subnormal */
        assert_int_equal(store(f, load(f, 1) / 2), 0);
        assert_int_equal(store(f, load(f, 1) * 0.50001), 1);
    }
    for (uint32_t payload = 1; payload < 0x800000; payload += 997) /* no NaN may turn into infinity */
        assert_true(isnan(bf16_to_float(float_to_bf16(float_from_bits(0x7f800000u | payload)))));
    float single[2] = {0};
    double wide = 0;
    store_element(HEDDLE_F32, single, 1, 0.1);
    store_element(HEDDLE_F64, &wide, 0, 0.1);
    assert_true(single[1] == 0.1f && wide == 0.1 && load_element(HEDDLE_F64, &wide, 0) == 0.1);
}

static void test_sizes(void **state) {
    (void)state;
    assert_int_equal(heddle_dtype_size(HEDDLE_F32), 4);
    assert_int_equal(heddle_dtype_size(HEDDLE_BF16), 2);
    assert_int_equal(heddle_dtype_size(HEDDLE_F16), 2);
    assert_int_equal(heddle_dtype_size(HEDDLE_F64), 8);
    assert_int_equal(heddle_dtype_size((heddle_dtype)99), 0);
    assert_int_equal(heddle_dtype_size((heddle_dtype)-1), 0);
}

/* Random123's own known answers (kat_vectors, philox4x32 7). */
static void test_philox_known(void **state) {
    (void)state;
    static const uint32_t kat[][10] = {{0, 0, 0, 0, 0, 0, 0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48},
                                       {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff,
                                        0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662},
                                       {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0,
                                        0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}};
    for (size_t x = 0; x < COUNT(kat); x++) {
        philox4 got = heddle_philox4x32((philox4){{kat[x][0], kat[x][1], kat[x][2], kat[x][3]}}, kat[x][4], kat[x][5]);
        assert_memory_equal(got.w, &kat[x][6], sizeof got.w);
    }
}

static void test_philox_random123(void **state) {
    (void)state;
    rng r = {test_seed(1)};
    for (int x = 0; x < 20000; x++) {
        uint64_t a = rng_next(&r), b = rng_next(&r), key = rng_next(&r);
        philox4x32_ctr_t counter = {{(uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32)}};
        philox4x32_key_t k = {{(uint32_t)key, (uint32_t)(key >> 32)}};
        philox4x32_ctr_t expected = philox4x32_R(PHILOX_ROUNDS, counter, k);
        philox4 got =
            heddle_philox4x32((philox4){{counter.v[0], counter.v[1], counter.v[2], counter.v[3]}}, k.v[0], k.v[1]);
        assert_memory_equal(got.w, expected.v, sizeof got.w);
    }
}

/* heddle.h: counter = {j/8, n*h + x, i, offset}, key = seed, offset's high half exclusive-ored into i's word. */
static void test_dropout_words(void **state) {
    (void)state;
    rng r = {test_seed(2)};
    for (int x = 0; x < 1000; x++) {
        uint64_t seed = rng_next(&r), offset = rng_next(&r);
        uint32_t bh = (uint32_t)rng_next(&r), i = (uint32_t)rng_next(&r), j8 = (uint32_t)rng_next(&r);
        philox4x32_ctr_t counter = {{j8, bh, i ^ (uint32_t)(offset >> 32), (uint32_t)offset}};
        philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
        philox4x32_ctr_t expected = philox4x32_R(7, counter, key);
        philox4 got = dropout_words(seed, offset, bh, i, j8);
        assert_memory_equal(got.w, expected.v, sizeof got.w);
        for (uint32_t j = 0; j < 8; j++) {
            const uint32_t word = expected.v[j / 2];
            assert_int_equal(dropout_number(got, 8 * j8 + j), j % 2 ? word >> 16 : word & 0xffff);
        }
    }
    static const double half = 0x1p-17;
    assert_int_equal(dropout_threshold(0.5), 32768);
    assert_int_equal(dropout_threshold(0), 0);
    assert_int_equal(dropout_threshold(half * 0.999), 0);
    assert_int_equal(dropout_threshold(half), 1);
    assert_int_equal(dropout_threshold(0x1p-16), 1);
    assert_int_equal(dropout_threshold(1 - half * 1.001), 65535);
    assert_int_equal(dropout_threshold(1 - half), 65536);
    assert_int_equal(dropout_threshold(0.1), 6554);
    assert_true(dropout_scale(0) == 1 && dropout_scale(0.5) == 2 && dropout_scale(0.1) == 65536.0 / (65536 - 6554));
    assert_true(dropout_scale(1 - 0x1p-16) == 65536);
}

static bool same_double(double a, double b) {
    return a == b ? signbit(a) == signbit(b) : isnan(a) && isnan(b);
}

/* Rows of floats, whatever bits they have, are written, rounded and read as single elements are. */
static void test_rows(void **state) {
    (void)state;
    enum { ROW = 251 };
    float x[ROW], rounded[ROW], floats[ROW];
    double doubles[ROW];
    for (size_t d = 0; d < TEST_DTYPES; d++) {
        const heddle_dtype dtype = test_dtypes[d];
        tensor t = tensor_vector(HEDDLE_REF, (int)dtype, ROW);
        for (uint64_t bits = 0; bits < UINT64_C(1) << 32; bits += UINT64_C(977) * ROW) {
            for (uint32_t i = 0; i < ROW; i++)
                x[i] = float_from_bits((uint32_t)bits + 977 * i);
            memcpy(rounded, x, sizeof x);
            round_all((int)dtype, ROW, rounded);
            tensor_write_floats(&t, 0, ROW, x);
            tensor_read_floats(&t, 0, ROW, floats);
            tensor_read(&t, 0, ROW, doubles);
            for (int i = 0; i < ROW; i++) {
                double bytes; /* room for any element */
                store_element(dtype, &bytes, 0, (double)x[i]);
                const double expected = load_element(dtype, &bytes, 0);
                assert_true(same_double(tensor_raw(&t, i), expected));
                assert_true(same_double((double)floats[i], expected));
                assert_true(same_double(doubles[i], expected));
                assert_true(same_double((double)rounded[i], expected));
                assert_true(same_double((double)round_to((int)dtype, x[i]), expected));
            }
        }
        tensor_free(&t);
    }
}

/* The tests' normal numbers are those of libm's functions, but for the last bits. */
static void test_normals(void **state) {
    (void)state;
    enum { ROW = 100000 };
    static double x[ROW];
    rng r = {test_seed(3)}, again = r;
    rng_normals(&r, ROW, x);
    for (int i = 0; i < ROW; i++) {
        const double u = 1 - rng_uniform(&again), v = rng_uniform(&again), radius = sqrt(-2 * log(u));
        assert_true(fabs(x[i] - radius * cos(6.283185307179586 * v)) <= 0x1p-50 * radius);
    }
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_patterns),      cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_special),       cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_philox_known),  cmocka_unit_test(test_philox_random123),
        cmocka_unit_test(test_dropout_words), cmocka_unit_test(test_rows),
        cmocka_unit_test(test_normals),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}

/* SPDX-License-Identifier: Apache-2.0
 * A product of matrices as the tensor cores of an H200 form it. Products are exact. All products of a step, 16 of 16 bits or 8 of TF32, and
 * the accumulator are aligned to the largest exponent among them, and what is then below the 25th bit behind that exponent's is cut off each
 * of them; the sum is exact, and cut off to 24 bits. */
#include "emulator.h"

#include <math.h>
#include <string.h>

#define ROWS 16
#define COLUMNS 8
#define BEHIND 25    /* bits behind the largest exponent: float32's 23 and two more */
#define NONE (-2000) /* the exponent of 0 */

/* A number of up to 11 bits: (magnitude ^ sign) - sign, times 2^(exponent - 10). */
struct number {
    int magnitude, sign, exponent;
};

/* One of each column. */
typedef int columns __attribute__((vector_size(COLUMNS * sizeof(int))));
struct number_row {
    columns magnitude, sign, exponent;
};

/* Number k of a row of registers, its bits. */
template <emulator_type TYPE> static inline uint32_t bits_of(const uint32_t *row, int k) {
    return TYPE == EMULATOR_TF32 ? row[k] >> 13 : row[k / 2] >> k % 2 * 16 & 0xffff;
}

/* *odd: the number is infinite or NaN. */
template <emulator_type TYPE> static inline number unpack(uint32_t bits, bool *odd) {
    const int exponent_bits = TYPE == EMULATOR_FP16 ? 5 : 8, fraction_bits = TYPE == EMULATOR_BF16 ? 7 : 10;
    const int all = (1 << exponent_bits) - 1, bias = all / 2;
    const int exponent = (int)(bits >> fraction_bits) & all, fraction = (int)bits & ((1 << fraction_bits) - 1);
    const int magnitude = fraction | (exponent != 0) << fraction_bits;
    *odd |= exponent == all;
    return {magnitude << (10 - fraction_bits), -(int)(bits >> (exponent_bits + fraction_bits) & 1),
            magnitude ? exponent + (exponent == 0) - bias : NONE};
}

/* 2^e, for e of -1022 to 1023. */
static inline double power(int e) {
    const uint64_t bits = (uint64_t)(e + 1023) << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

template <emulator_type TYPE> static double value(uint32_t bits) {
    bool odd = false;
    const number n = unpack<TYPE>(bits, &odd);
    const double size = !odd                  ? n.magnitude * power(n.magnitude ? n.exponent - 10 : 0)
                        : n.magnitude & 0x3ff ? (double)NAN
                                              : (double)INFINITY;
    return n.sign ? -size : size;
}

/* The first 24 bits of a number of 53. */
static inline float cut(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= ~UINT64_C(0x1fffffff);
    memcpy(&x, &bits, sizeof x);
    return (float)x;
}

/* Where a number is infinite or NaN, what becomes of that. */
template <emulator_type TYPE, int STEP>
static void multiply_any(float c[ROWS][COLUMNS], const uint32_t *a, const uint32_t *b) {
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++) {
            double sum = c[i][j];
            for (int k = 0; k < STEP; k++)
                sum += value<TYPE>(bits_of<TYPE>(a + i * 8, k)) * value<TYPE>(bits_of<TYPE>(b + j * 8, k));
            c[i][j] = (float)sum;
        }
}

/* magnitude·2^-by of a sign, cut off. */
static inline columns shift(columns magnitude, columns by, columns sign) {
    return ((magnitude >> (by > 31 ? 31 : by)) ^ sign) - sign;
}

template <int STEP> static inline void multiply_row(float c[COLUMNS], const number *a, const number_row *b) {
    columns bits, most, added[2] = {};
    memcpy(&bits, c, sizeof bits);
    const columns e = bits >> 23 & 0xff, normal = (e != 0) & 1, magnitude = (bits & 0x7fffff) | normal << 23;
    const columns exponent = magnitude != 0 ? e + 1 - normal - 127 : NONE;
    most = exponent < -500 ? -500 : exponent;
    for (int k = 0; k < STEP; k++) {
        const columns with = a[k].exponent + b[k].exponent;
        most = most < with ? with : most;
    }
    /* A product has 20 bits behind its exponent's. Each half of the sum has room in 32 bits. */
    for (int k = 0; k < STEP; k++)
        added[k / (STEP / 2)] += shift(a[k].magnitude * b[k].magnitude << (BEHIND - 20),
                                       most - (a[k].exponent + b[k].exponent), a[k].sign ^ b[k].sign);
    const columns own = shift(magnitude << (BEHIND - 23), most - exponent, bits >> 31);
    for (int j = 0; j < COLUMNS; j++)
        c[j] = cut(((double)added[0][j] + added[1][j] + own[j]) * power(most[j] - BEHIND));
}

template <emulator_type TYPE, int STEP>
static void multiply(float c[ROWS][COLUMNS], const uint32_t *a, const uint32_t *b) {
    number rows[ROWS][STEP];
    number_row other[STEP];
    bool odd = false;
    for (int k = 0; k < STEP; k++) {
        for (int i = 0; i < ROWS; i++)
            rows[i][k] = unpack<TYPE>(bits_of<TYPE>(a + i * 8, k), &odd);
        for (int j = 0; j < COLUMNS; j++) {
            const number n = unpack<TYPE>(bits_of<TYPE>(b + j * 8, k), &odd);
            other[k].magnitude[j] = n.magnitude;
            other[k].sign[j] = n.sign;
            other[k].exponent[j] = n.exponent;
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++)
            odd |= c[i][j] - c[i][j] != 0.0f;
    if (odd)
        multiply_any<TYPE, STEP>(c, a, b);
    else
        for (int i = 0; i < ROWS; i++)
            multiply_row<STEP>(c[i], rows[i], other);
}

/* a: of each row eight registers; b: of each column. */
void emulator_multiply(emulator_type type, float c[ROWS][COLUMNS], const uint32_t *a, const uint32_t *b) {
    switch (type) {
    case EMULATOR_BF16: multiply<EMULATOR_BF16, 16>(c, a, b); break;
    case EMULATOR_FP16: multiply<EMULATOR_FP16, 16>(c, a, b); break;
    case EMULATOR_TF32: multiply<EMULATOR_TF32, 8>(c, a, b); break;
    }
}

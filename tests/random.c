/* SPDX-License-Identifier: Apache-2.0
 * Normal random numbers by Box and Muller. The logarithm and the cosine are written so that the compiler makes vectors
 * of them: half of a case's time were libm's. They are right to about a unit in the last place of a double. */
#include "tensor.h"

enum { CHUNK = 256 };

static inline double from_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* log(x) of a normal x: x = 2^e·m with m around 1, and log(m) = 2 atanh((m - 1) / (m + 1)). */
static inline double log_of(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    double e = from_bits(u >> 52 | UINT64_C(0x4330000000000000)) - (0x1p52 + 1023);
    double m = from_bits((u & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x3ff0000000000000));
    e += m > 1.4142135623730951 ? 1.0 : 0.0;
    m *= m > 1.4142135623730951 ? 0.5 : 1.0;
    const double s = (m - 1) / (m + 1), z = s * s;
    double sum = 1.0 / 23;
    sum = sum * z + 1.0 / 21;
    sum = sum * z + 1.0 / 19;
    sum = sum * z + 1.0 / 17;
    sum = sum * z + 1.0 / 15;
    sum = sum * z + 1.0 / 13;
    sum = sum * z + 1.0 / 11;
    sum = sum * z + 1.0 / 9;
    sum = sum * z + 1.0 / 7;
    sum = sum * z + 1.0 / 5;
    sum = sum * z + 1.0 / 3;
    /* ln 2 in two parts, of which the first is exact times e */
    return e * 0x1.62e42feep-1 + (2 * s + (2 * s * z * sum + e * 0x1.a39ef35793c76p-33));
}

/* cos(x), 0 <= x < 7: the distance from a multiple of pi/2, then Taylor's series of the sine or the cosine. */
static inline double cos_of(double x) {
    const double quarter = (x * 0.6366197723675814 + 0x1.8p52) - 0x1.8p52;
    const double y = (x - quarter * 0x1.921fb544p+0) - quarter * 0x1.0b4611a626331p-34, z = y * y;
    double c = 1.0 / 20922789888000, s = -1.0 / 1307674368000;
    c = c * z - 1.0 / 87178291200;
    c = c * z + 1.0 / 479001600;
    c = c * z - 1.0 / 3628800;
    c = c * z + 1.0 / 40320;
    c = c * z - 1.0 / 720;
    c = c * z + 1.0 / 24;
    c = 1 - z / 2 + z * z * c;
    s = s * z + 1.0 / 6227020800;
    s = s * z - 1.0 / 39916800;
    s = s * z + 1.0 / 362880;
    s = s * z - 1.0 / 5040;
    s = s * z + 1.0 / 120;
    s = s * z - 1.0 / 6;
    s = y + y * z * s;
    const double either = (quarter == 1 || quarter == 3) ? s : c;
    return (quarter == 1 || quarter == 2) ? -either : either;
}

FOR_WIDE_VECTORS void rng_normals(rng *r, int64_t n, double *x) {
    double u[CHUNK], v[CHUNK];
    for (; n > 0; n -= CHUNK, x += CHUNK) {
        const int count = n < CHUNK ? (int)n : CHUNK;
        for (int i = 0; i < count; i++) {
            u[i] = 1 - rng_uniform(r);
            v[i] = rng_uniform(r);
        }
        for (int i = 0; i < count; i++)
            x[i] = sqrt(-2 * log_of(u[i])) * cos_of(6.283185307179586 * v[i]);
    }
}

double rng_normal(rng *r) {
    double x;
    rng_normals(r, 1, &x);
    return x;
}

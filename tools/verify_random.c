/* SPDX-License-Identifier: Apache-2.0
 * The generators that the origins drew their inputs from. */
#include "verify.h"

#include <math.h>

/* r[i] = r[i-3] + r[i-31] over a table seeded by the minimal standard generator; the first 310 are thrown away. */
glibc_random glibc_srand(uint32_t seed) {
    glibc_random g = {.at = 3};
    int64_t word = seed ? seed : 1;
    for (int i = 0; i < 31; i++) {
        g.r[i] = (uint32_t)word;
        word = 16807 * word % 2147483647;
    }
    for (int i = 0; i < 310; i++)
        glibc_rand(&g);
    return g;
}

/* The table holds the last 31 words as a ring: r[at] is 31 steps old, r[at + 28] three. */
int32_t glibc_rand(glibc_random *g) {
    uint32_t word = g->r[g->at] += g->r[(g->at + 28) % 31];
    g->at = (g->at + 1) % 31;
    return (int32_t)(word >> 1);
}

/* Matsumoto and Nishimura, "Mersenne Twister", 1998: MT19937. */
torch_random torch_manual_seed(uint32_t seed) {
    torch_random t = {.at = 624};
    t.state[0] = seed;
    for (uint32_t i = 1; i < 624; i++)
        t.state[i] = 1812433253u * (t.state[i - 1] ^ t.state[i - 1] >> 30) + i;
    return t;
}

static uint32_t next_word(torch_random *t) {
    if (t->at == 624) {
        for (int i = 0; i < 624; i++) {
            uint32_t y = (t->state[i] & 0x80000000u) | (t->state[(i + 1) % 624] & 0x7fffffffu);
            t->state[i] = t->state[(i + 397) % 624] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
        }
        t->at = 0;
    }
    uint32_t y = t->state[t->at++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

static float uniform(torch_random *t) {
    return (float)(next_word(t) & 0xffffff) * 0x1p-24f;
}

/* Box and Muller over 16 uniforms: the first eight are radii, the others angles. */
static void normal_block(float u[16]) {
    for (int j = 0; j < 8; j++) {
        float radius = sqrtf(-2 * logf(1 - u[j])), angle = 2 * 3.14159265358979323846f * u[j + 8];
        u[j] = radius * cosf(angle);
        u[j + 8] = radius * sinf(angle);
    }
}

void torch_randn(torch_random *t, double *x, int64_t n) {
    float block[16];
    for (int64_t i = 0; i < n; i++)
        x[i] = uniform(t);
    for (int64_t i = 0; i < n; i += 16) {
        int64_t at = i + 16 <= n ? i : n - 16;
        for (int j = 0; j < 16; j++) /* the last block of an odd size is drawn anew */
            block[j] = at == i ? (float)x[at + j] : uniform(t);
        normal_block(block);
        for (int j = 0; j < 16; j++)
            x[at + j] = block[j];
    }
}

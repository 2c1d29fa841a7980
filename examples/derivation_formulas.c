/* SPDX-License-Identifier: Apache-2.0
 * The formulas of attention, line by line as docs/math.md has them. */
#include "derivation_attention.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Of element (x, i, j): Philox4x32-7, half j % 2 of word j % 8 / 2. */
static double dropout_factor(const heddle_attention *a, uint32_t x, uint32_t i, uint32_t j) {
    const uint32_t t = (uint32_t)floor(65536 * a->dropout + 0.5);
    uint32_t c[4] = {j / 8, x, i ^ (uint32_t)(a->offset >> 32), (uint32_t)a->offset};
    uint32_t key[2] = {(uint32_t)a->seed, (uint32_t)(a->seed >> 32)};
    for (int round = 0; round < 7; round++) {
        const uint64_t left = UINT64_C(0xD2511F53) * c[0], right = UINT64_C(0xCD9E8D57) * c[2];
        const uint32_t next[4] = {(uint32_t)(right >> 32) ^ c[1] ^ key[0], (uint32_t)right,
                                  (uint32_t)(left >> 32) ^ c[3] ^ key[1], (uint32_t)left};
        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    const uint32_t half = c[j % 8 / 2] >> j % 2 * 16 & 0xffff;
    return half >= t ? 65536.0 / (65536.0 - t) : 0;
}

static int offset_of(const heddle_attention *a) {
    return a->mask == HEDDLE_CAUSAL_TOP_LEFT ? 0 : SK - SQ;
}

static bool sees(const heddle_attention *a, const inputs *in, int x, int i, int j) {
    const int at = (x * SQ + i) * SK + j, off = offset_of(a);
    if (a->mask != HEDDLE_MASK_NONE && j > i + off)
        return false;
    if (has(a, HEDDLE_WINDOW) && a->window_left >= 0 && j < i + off - a->window_left)
        return false;
    if (has(a, HEDDLE_WINDOW) && a->window_right >= 0 && j > i + off + a->window_right)
        return false;
    return !has(a, HEDDLE_BOOL_MASK) || in->mask[at];
}

void formula_forward(const heddle_attention *a, const inputs *in, outputs *out, between *b) {
    memset(out->o, 0, sizeof out->o);
    for (int x = 0; x < H; x++)
        for (int i = 0; i < SQ; i++) {
            const int row = x * SQ + i;
            double sum = has(a, HEDDLE_SINKS) ? exp(in->sinks[x]) : 0;
            for (int j = 0; j < SK; j++) {
                const int at = row * SK + j;
                double t = 0;
                for (int e = 0; e < D; e++)
                    t += in->q[row * D + e] * in->k[j * D + e];
                t *= a->scale;
                double s = a->softcap > 0 ? a->softcap * tanh(t / a->softcap) : t;
                if (has(a, HEDDLE_ALIBI))
                    s -= in->slopes[x] * abs(i + offset_of(a) - j);
                if (has(a, HEDDLE_BIAS))
                    s += in->bias[at];
                b->t[at] = t;
                b->s[at] = sees(a, in, x, i, j) ? s : -INFINITY;
                sum += exp(b->s[at]);
            }
            out->lse[row] = log(sum);
            for (int j = 0; j < SK; j++) {
                const int at = row * SK + j;
                const bool seen = b->s[at] != -INFINITY;
                out->p[at] = seen ? exp(b->s[at] - out->lse[row]) : 0;
                b->z[at] = a->dropout > 0 ? dropout_factor(a, (uint32_t)x, (uint32_t)i, (uint32_t)j) : 1;
                for (int e = 0; seen && e < DV; e++)
                    out->o[row * DV + e] += out->p[at] * b->z[at] * in->v[j * DV + e];
            }
        }
}

void formula_backward(const heddle_attention *a, const inputs *in, outputs *out, between *b) {
    memset(out->dq, 0, sizeof out->dq);
    memset(out->dk, 0, sizeof out->dk);
    memset(out->dv, 0, sizeof out->dv);
    memset(out->dsinks, 0, sizeof out->dsinks);
    for (int row = 0; row < H * SQ; row++) {
        b->d[row] = b->d_of_o[row] = -in->dlse[row];
        for (int e = 0; e < DV; e++)
            b->d_of_o[row] += in->dout[row * DV + e] * out->o[row * DV + e];
        for (int j = 0; j < SK; j++) {
            const int at = row * SK + j;
            b->dp[at] = has(a, HEDDLE_WEIGHTS) ? in->dweights[at] : 0;
            for (int e = 0; e < DV; e++) {
                b->dp[at] += b->z[at] * in->dout[row * DV + e] * in->v[j * DV + e];
                out->dv[j * DV + e] += b->z[at] * out->p[at] * in->dout[row * DV + e];
            }
            b->d[row] += out->p[at] * b->dp[at];
        }
        if (has(a, HEDDLE_SINKS))
            out->dsinks[row / SQ] -= exp(in->sinks[row / SQ] - out->lse[row]) * b->d[row];
        for (int j = 0; j < SK; j++) {
            const int at = row * SK + j;
            const double tanh_t = a->softcap > 0 ? tanh(b->t[at] / a->softcap) : 0;
            out->ds[at] = out->p[at] * (b->dp[at] - b->d[row]);
            const double dt = out->ds[at] * (1 - tanh_t * tanh_t);
            for (int e = 0; e < D; e++) {
                out->dq[row * D + e] += a->scale * dt * in->k[j * D + e];
                out->dk[j * D + e] += a->scale * dt * in->q[row * D + e];
            }
        }
    }
}

/* SPDX-License-Identifier: Apache-2.0
 * The problem of the sections A: its tensors, and the formulas written out. */
#ifndef DERIVATION_ATTENTION_H
#define DERIVATION_ATTENTION_H

#include "derivation.h"

#include <stdbool.h>

/* Two query heads share one head of keys and values. */
enum { H = 2, SQ = 3, SK = 4, D = 2, DV = 3, SCORES = H * SQ * SK };

/* All that a gradient is asked of, and the gradients of the outputs. */
typedef struct inputs {
    double q[H * SQ * D], k[SK * D], v[SK * DV], bias[SCORES], sinks[H];
    double slopes[H];
    double dout[H * SQ * DV], dlse[H * SQ], dweights[SCORES];
    uint8_t mask[SCORES];
} inputs;

typedef struct outputs {
    double o[H * SQ * DV], lse[H * SQ], p[SCORES];
    double dq[H * SQ * D], dk[SK * D], dv[SK * DV], ds[SCORES], dsinks[H];
} outputs;

/* Between the two: T, S, Z, dP, and D in its two forms. */
typedef struct between {
    double t[SCORES], s[SCORES], z[SCORES], dp[SCORES], d[H * SQ], d_of_o[H * SQ];
} between;

static inline bool has(const heddle_attention *a, uint64_t feature) {
    return (a->features & feature) != 0;
}

/* (1) to (6) and (7) to (15) of the page. */
void formula_forward(const heddle_attention *a, const inputs *in, outputs *out, between *b);
void formula_backward(const heddle_attention *a, const inputs *in, outputs *out, between *b);

#endif

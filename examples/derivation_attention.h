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
    int32_t q_segments[SQ], k_segments[SK];
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

/* A problem computed in all ways, after every element of every tensor has been compared. */
typedef struct solved {
    outputs formula, differences, heddle;
    between b;
} solved;

inputs make_inputs(void);
heddle_attention make_problem(uint64_t features);
solved solve(const heddle_attention *a, inputs *in);

/* Row i of head x begins here in a tensor of rows of n. */
static inline int at_row(int x, int i, int n) {
    return (x * SQ + i) * n;
}

/* (1) to (6) and (7) to (15) of the page. */
void formula_forward(const heddle_attention *a, const inputs *in, outputs *out, between *b);
void formula_backward(const heddle_attention *a, const inputs *in, outputs *out, between *b);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The numbers of docs/algorithm.md: four queries and four keys, tile by tile, beside what heddle has for the same keys.
 * Q, K and dO are the identity, every element of row i of V is i + 1, and the scale is 1. Ends with 1 where the two
 * differ. */
#include <heddle.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { S = 4, TILE = 2 };

typedef struct problem {
    double q[S * S], k[S * S], v[S * S], dout[S * S];
    double o[S * S], lse[S], weights[S * S], dq[S * S], dk[S * S], dv[S * S];
} problem;

static int unlike;

static void expect(double here, double there) {
    unlike += !(fabs(here - there) < 1e-12);
}

static void check(heddle_status status) {
    if (status == HEDDLE_OK)
        return;
    fprintf(stderr, "online_softmax: %s\n", heddle_last_message());
    exit(1);
}

/* One pass over the first `keys` keys. */
static void run(problem *p, int keys, heddle_pass pass) {
    const heddle_attention a = {.size = sizeof a,
                                .dtype = HEDDLE_F64,
                                .device = HEDDLE_REF,
                                .b = 1,
                                .h = 1,
                                .sq = S,
                                .sk = keys,
                                .d = S,
                                .scale = 1,
                                .features = HEDDLE_WEIGHTS};
    const heddle_attention_data t = {.size = sizeof t,
                                     .q = p->q,
                                     .k = p->k,
                                     .v = p->v,
                                     .o = p->o,
                                     .lse = p->lse,
                                     .weights = p->weights,
                                     .dout = p->dout,
                                     .dq = p->dq,
                                     .dk = p->dk,
                                     .dv = p->dv};
    size_t bytes = 0;
    check(heddle_attention_workspace(&a, pass, &bytes));
    void *workspace = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (pass == HEDDLE_FORWARD)
        check(heddle_attention_forward(&a, &t, workspace, bytes, NULL));
    else
        check(heddle_attention_backward(&a, &t, workspace, bytes, NULL));
    free(workspace);
}

static double dot(const double *x, const double *y) {
    double sum = 0;
    for (int e = 0; e < S; e++)
        sum += x[e] * y[e];
    return sum;
}

static void print_matrix(const char *name, const double *x, int columns) {
    for (int i = 0; i < S; i++) {
        printf("    %-9s", i == 0 ? name : "");
        for (int j = 0; j < columns; j++)
            printf(" %11.6f", x[i * S + j]);
        printf("\n");
    }
}

/* The softmax of a row as it is defined, with all scores at hand. */
static void whole(problem *p) {
    double scores[S * S];
    run(p, S, HEDDLE_FORWARD);
    for (int at = 0; at < S * S; at++) {
        scores[at] = dot(p->q + at / S * S, p->k + at % S * S);
        expect(exp(scores[at] - p->lse[at / S]), p->weights[at]);
    }
    printf("T1  all at once\n");
    print_matrix("S", scores, S);
    print_matrix("P", p->weights, S);
    printf("    lse       %11.6f  in every row\n", p->lse[0]);
    print_matrix("o[:,0]", p->o, 1);
}

/* One query: after each tile the same is known as heddle finds out about the keys so far. */
static void tile_by_tile(problem *p, int i) {
    double m = -INFINITY, l = 0, sum = 0;
    for (int first = 0; first < S; first += TILE) {
        double top = m;
        for (int j = first; j < first + TILE; j++)
            top = fmax(top, dot(p->q + i * S, p->k + j * S));
        const double c = exp(m - top);
        l *= c;
        sum *= c;
        for (int j = first; j < first + TILE; j++) {
            const double weight = exp(dot(p->q + i * S, p->k + j * S) - top);
            l += weight;
            sum += weight * p->v[j * S];
        }
        m = top;
        run(p, first + TILE, HEDDLE_FORWARD);
        expect(sum / l, p->o[i * S]);
        expect(m + log(l), p->lse[i]);
        printf("    query %d, keys %d and %d:  m %.6f  c %.6f  L %.6f  O %.6f  O/L %.6f  heddle %.6f\n", i, first,
               first + 1, m, c, l, sum, sum / l, p->o[i * S]);
    }
}

/* The gradients, a tile of keys at a time; P comes back from lse. */
static void backward(problem *p) {
    double dk[S * S] = {0}, dv[S * S] = {0}, dq[S * S] = {0}, big_d[S];
    run(p, S, HEDDLE_FORWARD);
    run(p, S, HEDDLE_BACKWARD);
    for (int i = 0; i < S; i++)
        big_d[i] = dot(p->dout + i * S, p->o + i * S);
    for (int first = 0; first < S; first += TILE)
        for (int i = 0; i < S; i++)
            for (int j = first; j < first + TILE; j++) {
                const double weight = exp(dot(p->q + i * S, p->k + j * S) - p->lse[i]);
                const double ds = weight * (dot(p->dout + i * S, p->v + j * S) - big_d[i]);
                if (i == 0 && first == 0)
                    printf("    key %d for query 0:  P %.6f  dP %.6f  D %.6f  dS %.6f\n", j, weight,
                           dot(p->dout + i * S, p->v + j * S), big_d[i], ds);
                for (int e = 0; e < S; e++) {
                    dv[j * S + e] += weight * p->dout[i * S + e];
                    dk[j * S + e] += ds * p->q[i * S + e];
                    dq[i * S + e] += ds * p->k[j * S + e];
                }
            }
    for (int at = 0; at < S * S; at++) {
        expect(dq[at], p->dq[at]);
        expect(dk[at], p->dk[at]);
        expect(dv[at], p->dv[at]);
    }
    print_matrix("dq", p->dq, S);
    print_matrix("dv", p->dv, S);
}

int main(void) {
    problem p = {.lse = {0}};
    for (int at = 0; at < S * S; at++) {
        p.q[at] = p.k[at] = p.dout[at] = at / S == at % S;
        const int row = at / S;
        p.v[at] = row + 1;
    }
    whole(&p);
    printf("\nT2  two keys at a time\n");
    tile_by_tile(&p, 0);
    tile_by_tile(&p, 2);
    printf("\nT3  backward\n");
    backward(&p);
    if (unlike)
        fprintf(stderr, "online_softmax: %d numbers are not heddle's\n", unlike);
    return unlike != 0;
}

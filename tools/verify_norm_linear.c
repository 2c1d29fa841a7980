/* SPDX-License-Identifier: Apache-2.0
 * The report of p22, the GPU puzzle of fused LayerNorm + Linear that heddle replaces. */
#include "verify.h"

#include <math.h>
#include <stdio.h>

/* B = 4, S = 4, H = 8, O = 16. */
static problem p22_problem(arena *m) {
    problem p = norm_linear_problem();
    torch_random t = torch_manual_seed(42);
    p.j.l.m = 16;
    p.j.l.k = 8;
    p.j.l.n = 16;
    torch_randn(&t, problem_input(&p, m, X), 128);
    torch_randn(&t, problem_input(&p, m, W), 128);
    for (int f = GAMMA; f <= DY; f++)
        if (f == GAMMA || f == BETA || f == C || f == DY) {
            problem_input(&p, m, f);
            for (int64_t i = 0; i < field_count(&p.j, f); i++)
                p.x[f][i] = f == GAMMA || f == DY;
        }
    for (int64_t i = 0; i < 128; i++)
        p.x[W][i] = 0.02f * (float)p.x[W][i];
    return p;
}

static bool p22_ones(verify *v) {
    static const double x[] = {1.9269153,  1.4872841,  0.9007172,   -2.1055212,
                               0.67841846, -1.2345449, -0.04306748, -1.604667};
    static const double y[] = {0.046287, -0.055208, -0.024811, -0.05856};
    static const double dx[] = {0.024315, 0.086069, -0.091481, -0.037464, -0.072742, -0.005885, 0.017093, 0.080095};
    static const double dgamma[] = {0.026468, 0.376851, 0.356475, 0.07166, 0.040088, 0.199426, -0.169157, 0.193167};
    static const double dbeta[] = {-0.063771, 1.513258, -2.214776, 0.306764, -1.697501, 0.635861, 0.63235, 2.726165};
    static const double dw[] = {-6.640759, 3.984529, -2.575246, 3.737612, -0.377858, 5.018097, -4.280079, 1.133704};
    static const double once[JOB_FIELDS] = {[Y] = 1.49e-8,      [MEAN] = -1,       [RSTD] = -1,    [DX] = 2.98e-8,
                                            [DGAMMA] = 5.96e-8, [DBETA] = 2.38e-7, [DW] = 9.54e-7, [DC] = 0};
    arena m = {0};
    trial t;
    if (!begin_problem(v, "dY = 1, gamma = 1, beta = 0, bias = 0 (as the puzzle has it)"))
        return true;
    problem p = p22_problem(&m);
    bool ran = verify_trial(v, &p, &m, HEDDLE_F32, &t);
    if (ran) {
        double spread = 0, from16 = 0;
        report_tensors(v, &p, HEDDLE_F32, &t, once);
        /* PyTorch's logarithm and cosine are an ulp or two away from the C library's. */
        report_known(v, "x[0,0]", p.x[X], x, 8, 8, -7, 4e-7);
        report_known(v, "y[0,0]", t.ours.x[Y], y, 4, 4, 6, known_slack(&p, Y, &t));
        report_known(v, "dx[0,0]", t.ours.x[DX], dx, 8, 8, 6, known_slack(&p, DX, &t));
        report_known(v, "dgamma", t.ours.x[DGAMMA], dgamma, 8, 8, 6, known_slack(&p, DGAMMA, &t));
        report_known(v, "dbeta", t.ours.x[DBETA], dbeta, 8, 8, 6, known_slack(&p, DBETA, &t));
        report_known(v, "dW[0]", t.ours.x[DW], dw, 8, 8, 6, known_slack(&p, DW, &t));
        for (int i = 0; i < 128; i++)
            spread = fmax(spread, fabs(t.ours.x[DW][i] - t.ours.x[DW][i % 8]));
        for (int i = 0; i < 16; i++)
            from16 = fmax(from16, fabs(t.ours.x[DC][i] - 16));
        report_bound(v, "dW, largest difference between its rows", spread, 4e-6);
        report_bound(v, "db, largest |db - 16|", from16, 0);
    }
    arena_free(&m);
    return ran;
}

/* The largest |sum of a row| of dx [16, 8]: it is 0, since a shift of a row changes nothing. */
static double largest_row_sum(const double *dx) {
    double most = 0;
    for (int i = 0; i < 16; i++) {
        double sum = 0;
        for (int e = 0; e < 8; e++)
            sum += dx[i * 8 + e];
        most = fmax(most, fabs(sum));
    }
    return most;
}

/* With dY = 1 and gamma = 1 half of the faults of a backward pass hide. */
static bool p22_random(verify *v, double mean) {
    arena m = {0};
    trial t;
    random_state r = {v->seed};
    if (!begin_problem(v, "random dY, gamma, beta and bias; x around %g", mean))
        return true;
    problem p = p22_problem(&m);
    for (int64_t i = 0; i < 128; i++)
        p.x[X][i] += mean;
    p.x[GAMMA] = p.x[BETA] = p.x[C] = p.x[DY] = NULL;
    problem_fill(&p, &m, &r);
    problem_round(&p, HEDDLE_F32);
    bool ran = verify_trial(v, &p, &m, HEDDLE_F32, &t);
    if (ran) {
        report_tensors(v, &p, HEDDLE_F32, &t, NULL);
        report_bound(v, "dx, largest |sum of a row|; allowed: twice plain's", largest_row_sum(t.ours.x[DX]),
                     fmax(2 * largest_row_sum(t.plain[PLAIN_FORWARD].x[DX]), 4e-6));
    }
    arena_free(&m);
    return ran;
}

bool verify_p22(verify *v) {
    begin_report(v, "p22", "\np22: LayerNorm + Linear, B = 4, S = 4, H = 8, O = 16, torch.manual_seed(42)\n");
    return p22_ones(v) && p22_random(v, 0) && p22_random(v, 100);
}

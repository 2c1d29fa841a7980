/* SPDX-License-Identifier: Apache-2.0
 * The reports of the attention programs that heddle replaces. The true values are those of float64, checked by finite
 * differences when they were taken down. */
#include "verify.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

problem one_head(arena *m, int64_t sq, int64_t sk, int64_t d) {
    problem p = attention_problem();
    p.j.a.b = p.j.a.h = 1;
    p.j.a.sq = sq;
    p.j.a.sk = sk;
    p.j.a.d = d;
    problem_input(&p, m, Q);
    problem_input(&p, m, K);
    problem_input(&p, m, V);
    problem_input(&p, m, DOUT);
    return p;
}

static void fill_normal(problem *p, int f, random_state *r, double scale) {
    for (int64_t i = 0; i < field_count(&p->j, f); i++)
        p->x[f][i] = scale * random_normal(r);
}

static double largest(const double *x, int64_t n) {
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fmax(most, fabs(x[i]));
    return most;
}

/* The largest |sum over a row - target| of a [rows, columns] matrix. */
static double row_sum_error(const double *x, int64_t rows, int64_t columns, double target) {
    double most = 0;
    for (int64_t i = 0; i < rows; i++) {
        double sum = 0;
        for (int64_t j = 0; j < columns; j++)
            sum += x[i * columns + j];
        most = fmax(most, fabs(sum - target));
    }
    return most;
}

/* ------------------------------------------------------------------------------------------------------- day 19 */

typedef struct day19_case {
    int64_t rows, columns;
    double scale, magnitude;
    bool shared; /* Q = K = V */
} day19_case;

static bool day19_one(verify *v, const day19_case *c, uint64_t seed) {
    random_state r = {seed};
    arena m = {0};
    trial t;
    problem p = one_head(&m, c->rows, c->rows, c->columns);
    p.x[DOUT] = NULL;
    p.j.a.scale = c->scale;
    p.j.a.features = HEDDLE_WEIGHTS;
    for (int f = Q; f <= V; f++)
        fill_normal(&p, f, &r, c->magnitude);
    if (c->shared)
        p.x[K] = p.x[V] = p.x[Q];
    problem_round(&p, HEDDLE_F32);
    bool ran = verify_trial(v, &p, &m, HEDDLE_F32, &t);
    if (ran) {
        report_tensors(v, &p, HEDDLE_F32, &t, NULL);
        printf("  Maximum difference: %.3g of a maximum %.3g\n",
               compare(t.ours.x[O], t.truth.x[O], field_count(&p.j, O)).largest,
               largest(t.truth.x[O], field_count(&p.j, O)));
        report_bound(v, "rows of weights, largest |sum - 1|", row_sum_error(t.ours.x[WEIGHTS], c->rows, c->rows, 1),
                     2e-6);
    }
    arena_free(&m);
    return ran;
}

bool verify_day19(verify *v) {
    static const day19_case cases[] = {
        {32, 64, 0.125, 1, true},  /* the original test */
        {32, 64, 0.25, 1, true},   /* d = 16 on 64 columns: d is the scale only */
        {129, 64, 0.125, 1, true}, /* more rows than the original's grid covered */
        {203, 3, 0.125, 1, true},     {32, 64, 0.125, 1000, true},
        {32, 64, 0.125, 1000, false}, {113, 33, 0.125, 1, false},
    };
    begin_report(v, "day19", "\nday19: self-attention forward, softmax(x·xᵀ/√d)·x\n");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const day19_case *c = &cases[i];
        if (begin_problem(v, "x (%lld, %lld)%s, scale %.4g, values of size %g", (long long)c->rows,
                          (long long)c->columns, c->shared ? ", Q = K = V = x" : ", independent Q, K, V", c->scale,
                          c->magnitude) &&
            !day19_one(v, c, v->seed + i))
            return false;
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------- day 50 */

static bool day50_one(verify *v, int64_t sq, int64_t sk, int64_t d, uint64_t seed) {
    random_state r = {seed};
    arena m = {0};
    trial t;
    problem p = one_head(&m, sq, sk, d);
    p.j.a.features = HEDDLE_WEIGHTS | HEDDLE_BIAS; /* a bias of zero: its gradient is dS */
    double *bias = problem_input(&p, &m, BIAS);
    for (int64_t i = 0; i < sq * sk; i++)
        bias[i] = 0;
    for (int f = Q; f <= DOUT; f++)
        if (p.x[f] && f != BIAS)
            fill_normal(&p, f, &r, 1);
    problem_round(&p, HEDDLE_F32);
    bool ran = verify_trial(v, &p, &m, HEDDLE_F32, &t);
    if (ran) {
        static const struct {
            int f;
            const char *name;
        } grads[] = {{DQ, "Query"}, {DK, "Key"}, {DV, "Value"}};
        report_tensors(v, &p, HEDDLE_F32, &t, NULL);
        for (int i = 0; i < 3; i++)
            printf("  %s grad max diff: %.3g\n", grads[i].name,
                   compare(t.ours.x[grads[i].f], t.truth.x[grads[i].f], field_count(&p.j, grads[i].f)).largest);
        report_bound(v, "dS, largest |sum of a row|, of the largest |dS|",
                     row_sum_error(t.ours.x[DBIAS], sq, sk, 0) / largest(t.truth.x[DBIAS], sq * sk), 4e-6);
        report_bound(v, "rows of weights, largest |sum - 1|", row_sum_error(t.ours.x[WEIGHTS], sq, sk, 1), 2e-6);
    }
    arena_free(&m);
    return ran;
}

/* <dO, O> in float64 at x + step·u, where Q = K = V = x. */
static bool loss_at(const problem *p, arena *m, const double *u, double step, double *loss) {
    problem moved = *p;
    outcome out;
    int64_t n = field_count(&p->j, Q);
    moved.x[Q] = problem_input(&moved, m, Q);
    for (int64_t i = 0; i < n; i++)
        moved.x[Q][i] = p->x[Q][i] + step * u[i];
    moved.x[K] = moved.x[V] = moved.x[Q];
    if (!problem_run(&moved, m, HEDDLE_REF, HEDDLE_F64, &out))
        return false;
    *loss = 0;
    for (int64_t i = 0; i < n; i++)
        *loss += p->x[DOUT][i] * out.x[O][i];
    return true;
}

/* With one x in all three places its gradient is the sum of the three: its slope along a random direction. */
static bool day50_shared(verify *v, uint64_t seed) {
    random_state r = {seed};
    arena m = {0};
    problem p = one_head(&m, 32, 32, 64);
    int64_t n = field_count(&p.j, Q);
    double *u = arena_array(&m, n, sizeof *u), slope = 0, size = 0, above, below;
    outcome ours;
    fill_normal(&p, Q, &r, 1);
    fill_normal(&p, DOUT, &r, 1);
    p.x[K] = p.x[V] = p.x[Q];
    problem_round(&p, HEDDLE_F32);
    for (int64_t i = 0; i < n; i++)
        u[i] = random_normal(&r);
    const double step = 1e-5;
    bool ran = problem_run(&p, &m, v->device, HEDDLE_F32, &ours) && loss_at(&p, &m, u, step, &above) &&
               loss_at(&p, &m, u, -step, &below);
    for (int64_t i = 0; ran && i < n; i++) {
        double dx = ours.x[DQ][i] + ours.x[DK][i] + ours.x[DV][i];
        slope += dx * u[i];
        size += fabs(dx * u[i]);
    }
    if (ran) {
        double central = (above - below) / (2 * step);
        about_problem(v, &p, HEDDLE_F32);
        begin_lines(v);
        printf(" %s\n", v->name);
        printf("  slope along a random direction %.8g, by central differences in float64 %.8g\n", slope, central);
        report_bound(v, "difference, of the sum of |dx·u|", fabs(slope - central) / size, 1e-7);
    }
    arena_free(&m);
    return ran;
}

bool verify_day50(verify *v) {
    static const int64_t sizes[][3] = {{32, 32, 64}, {40, 72, 64}, {203, 33, 31}};
    begin_report(v, "day50", "\nday50: self-attention backward, given the weights' matrix\n");
    for (uint64_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const long long sq = sizes[i][0], sk = sizes[i][1], d = sizes[i][2];
        if (begin_problem(v, "query (%lld, %lld), key and value (%lld, %lld)", sq, d, sk, d) &&
            !day50_one(v, sq, sk, d, v->seed + i))
            return false;
    }
    return !begin_problem(v, "one shared x (32, 64): dx = dQ + dK + dV") || day50_shared(v, v->seed + 3);
}

/* ------------------------------------------------------------------------------------------------------- day 55 */

problem day55_problem(arena *m) {
    static const int order[] = {Q, K, V, DOUT};
    problem p = one_head(m, 128, 128, 32);
    glibc_random g = glibc_srand(1);
    for (int64_t i = 0; i < 128 * 32; i++)
        for (int x = 0; x < 4; x++)
            p.x[order[x]][i] = 2 * ((float)glibc_rand(&g) / (float)GLIBC_RAND_MAX) - 1;
    return p;
}

bool verify_day55(verify *v) {
    static const struct {
        int f;
        const char *name;
        double known[9];
    } slices[] = {
        {Q, "Query", {0.680375, 0.823295, -0.444451, 0.499542, 0.168977, -0.74905, 0.461459, 0.841829, 0.0648819}},
        {K, "Key", {-0.211234, -0.604897, 0.10794, -0.262673, -0.511175, 0.586941, -0.343251, 0.369513, -0.824713}},
        {V, "Value", {0.566198, -0.329554, -0.0452059, -0.411679, -0.69522, -0.671796, 0.480877, 0.306261, -0.479006}},
        {DOUT, "dO", {0.59688, 0.536459, 0.257742, -0.535477, 0.464297, 0.490143, -0.595574, -0.485469, 0.754768}},
        {O,
         "Output",
         {0.016065, -0.0290427, -0.027025, 0.011394, -0.00482534, -0.03082, 0.0286616, -0.0218805, -0.0718517}},
        {DQ,
         "dQ",
         {0.00946975, 0.00569055, 0.0007855, -0.00670553, -0.00763953, -0.0156887, -0.00887811, 0.0160615, 0.0198677}},
        {DK,
         "dK",
         {0.00480869, -0.00776059, -0.00402077, 0.0102126, 0.0126519, 0.0243553, 0.00513837, 0.0136316, 0.0141893}},
        {DV,
         "dV",
         {-0.0712795, -0.0072766, -0.00910687, -0.0345493, -0.0283635, 0.00945967, -0.0471181, 0.000656005, -0.015904}},
    };
    static const double lse[] = {4.93071, 4.90332, 4.90676};
    static const double sums[] = {-52.5536096, -16.5570838, -3.37172943, -24.2776159};
    arena m = {0};
    trial t;
    begin_report(v, "day55", "\nday55: FlashAttention forward and backward\n");
    if (!begin_problem(v, "N = 128, d = 32, rand() from seed 1"))
        return true;
    problem p = day55_problem(&m);
    bool ran = verify_trial(v, &p, &m, HEDDLE_F32, &t);
    if (ran) {
        double sum[4] = {0, 0, 0, 0};
        report_tensors(v, &p, HEDDLE_F32, &t, NULL);
        for (size_t s = 0; s < sizeof slices / sizeof *slices; s++) {
            double corner[9];
            const double *x = p.x[slices[s].f] ? p.x[slices[s].f] : t.ours.x[slices[s].f];
            for (int i = 0; i < 9; i++)
                corner[i] = x[i / 3 * 32 + i % 3];
            double slack = p.x[slices[s].f] ? 0 : known_slack(&p, slices[s].f, &t);
            report_known(v, slices[s].name, corner, slices[s].known, 9, 3, -6, slack);
        }
        report_known(v, "lse", t.ours.x[LSE], lse, 3, 3, -6, known_slack(&p, LSE, &t));
        for (int64_t i = 0; i < 128 * 32; i++)
            for (int x = 0; x < 4; x++)
                sum[x] += p.x[slices[x].f][i];
        report_known(v, "sums", sum, sums, 4, 4, -9, 0);
    }
    arena_free(&m);
    return ran;
}

/* ---------------------------------------------------------------------------------------------------- fa2-warps */

static void errors_once_printed(double *once, double dq, double dk, double dv) {
    for (int f = 0; f < JOB_FIELDS; f++)
        once[f] = -1;
    once[DQ] = dq;
    once[DK] = dk;
    once[DV] = dv;
}

static bool fa2_test1(verify *v) {
    static const double o[] = {2.04926623, 2.34975541, 2.65024459, 2.95073377};
    static const double lse[] = {1.74366838, 1.74366838, 1.74366838, 1.74366838};
    static const double dq[] = {-0.49878642, -0.00861556, 0.16626214,  0.34113984,  -0.23604213, -0.16626214,
                                0.11371328,  0.28859099,  -0.28859099, -0.11371328, 0.16626214,  0.23604213,
                                -0.34113984, -0.16626214, 0.00861556,  0.49878642};
    arena m = {0};
    trial t;
    double once[JOB_FIELDS], o_rows[4], dk[16], dv[16];
    if (!begin_problem(v, "test 1: 4×4, scale 1, Q = K = dO = I, row i of V = i + 1"))
        return true;
    problem p = one_head(&m, 4, 4, 4);
    p.j.a.scale = 1;
    for (int i = 0; i < 16; i++) {
        p.x[Q][i] = p.x[K][i] = p.x[DOUT][i] = i % 5 == 0;
        const int row = i / 4;
        p.x[V][i] = row + 1;
        dk[i] = dq[i % 4 * 4 + i / 4];
        dv[i] = i % 5 == 0 ? 0.47536689 : 0.17487770;
    }
    bool ran = verify_trial(v, &p, &m, HEDDLE_F32, &t);
    if (ran) {
        errors_once_printed(once, 8.94e-8, 8.94e-8, 2.98e-8);
        report_tensors(v, &p, HEDDLE_F32, &t, once);
        for (int i = 0; i < 4; i++)
            o_rows[i] = t.ours.x[O][i * 4];
        report_known(v, "O rows", o_rows, o, 4, 4, 8, known_slack(&p, O, &t));
        report_known(v, "lse", t.ours.x[LSE], lse, 4, 4, 8, known_slack(&p, LSE, &t));
        report_known(v, "dQ", t.ours.x[DQ], dq, 16, 4, 8, known_slack(&p, DQ, &t));
        report_known(v, "dK", t.ours.x[DK], dk, 16, 4, 8, known_slack(&p, DK, &t));
        report_known(v, "dV", t.ours.x[DV], dv, 16, 4, 8, known_slack(&p, DV, &t));
    }
    arena_free(&m);
    return ran;
}

static bool fa2_test2(verify *v) {
    static const int order[] = {Q, K, V, DOUT};
    static const double o[] = {0.01448059, 0.01490998, 0.01063442, -0.01918492, -0.00117553, 0.03076510};
    static const double lse[] = {4.86486499, 4.86351985, 4.83370423};
    static const double dq[] = {-0.00014141, 0.00074560, -0.00067117, 0.00058201, 0.00006656, -0.00086821};
    static const double dk[] = {0.00021943, -0.00081654, -0.00036720, -0.00052905, 0.00102442, 0.00067394};
    static const double dv[] = {-0.00407865, 0.00951492, -0.01067890, -0.00017840, 0.00608360, -0.01255997};
    arena m = {0};
    trial t;
    double once[JOB_FIELDS];
    if (!begin_problem(v, "test 2: 128×64, scale 0.125, rand() from seed 42"))
        return true;
    glibc_random g = glibc_srand(42);
    problem p = one_head(&m, 128, 128, 64);
    p.j.a.scale = 0.125;
    for (int64_t i = 0; i < 128 * 64; i++)
        for (int x = 0; x < 4; x++)
            p.x[order[x]][i] = ((float)(glibc_rand(&g) % 2000) / 1000 - 1) * (order[x] == DOUT ? 0.2f : 0.5f);
    bool ran = verify_trial(v, &p, &m, HEDDLE_F32, &t);
    if (ran) {
        errors_once_printed(once, 1.86e-9, 1.63e-9, 1.68e-8);
        report_tensors(v, &p, HEDDLE_F32, &t, once);
        report_known(v, "O", t.ours.x[O], o, 6, 3, 8, known_slack(&p, O, &t));
        report_known(v, "lse", t.ours.x[LSE], lse, 3, 3, 8, known_slack(&p, LSE, &t));
        report_known(v, "dQ", t.ours.x[DQ], dq, 6, 3, 8, known_slack(&p, DQ, &t));
        report_known(v, "dK", t.ours.x[DK], dk, 6, 3, 8, known_slack(&p, DK, &t));
        report_known(v, "dV", t.ours.x[DV], dv, 6, 3, 8, known_slack(&p, DV, &t));
    }
    arena_free(&m);
    return ran;
}

bool verify_fa2_warps(verify *v) {
    begin_report(v, "fa2-warps", "\nfa2-warps: FlashAttention-2 backward\n");
    return fa2_test1(v) && fa2_test2(v);
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * train_gpt --check: every gradient against central differences, and float32 against float64. */
#ifndef TRAIN_GPT_CHECK_H
#define TRAIN_GPT_CHECK_H

/* Of one tensor: the largest magnitude expected and the largest difference from it. */
typedef struct comparison {
    double top, difference;
} comparison;

static void compare(comparison *c, double got, double expected) {
    const double difference = fabs(got - expected);
    c->top = fmax(c->top, fabs(expected));
    c->difference = difference <= c->difference ? c->difference : difference; /* keeps a NaN */
}

static bool report(const gpt_tensor *t, const comparison *c, double limit) {
    const double error = c->difference / c->top;
    const bool good = error <= limit;
    char name[40];
    snprintf(name, sizeof name, t->layer < 0 ? "%s" : "%s of layer %d", t->name, t->layer);
    printf("  %-20s [%4lld, %4lld]  largest gradient %9.2e  error %8.1e  %s\n", name, (long long)t->rows,
           (long long)t->cols, c->top, error, good ? "ok" : "FAIL");
    return good;
}

/* Values with nothing at rest: norms near one, biases too, weights that make attention and GELU work. */
static void fill_for_check(gpt_f64 *g, uint64_t *state) {
    for (int n = 0; n < tensor_count(&g->c); n++)
        for (int64_t i = 0; i < g->table[n].rows * g->table[n].cols; i++) {
            const double x = random_normal(state);
            const bool gamma = strncmp(g->table[n].name, "gamma", 5) == 0;
            value_of_f64(g, n)[i] = gamma ? 1 + 0.3 * x : g->table[n].matrix ? x / sqrt((double)g->c.width) : 0.2 * x;
        }
}

static double loss_of(gpt_f64 *g, const uint8_t *in, const uint8_t *out) {
    gpt_forward_f64(g, in, g->c.batch, 0, g->c.context);
    return gpt_loss_f64(g, out, (int64_t)g->c.batch * g->c.context);
}

static void fill_tokens(const gpt_config *c, uint8_t *in, uint8_t *out, uint64_t *state) {
    for (int i = 0; i < c->batch * c->context; i++) {
        in[i] = (uint8_t)(random_bits(state) % (uint64_t)c->vocabulary);
        out[i] = (uint8_t)(random_bits(state) % (uint64_t)c->vocabulary);
    }
}

/* Every parameter of a very small model: (loss(p + h) - loss(p - h)) / 2h against the backward pass, all in float64. */
static int check_differences(uint64_t seed) {
    const double h = 1e-5, limit = 1e-6;
    const gpt_config c = {
        .layers = 2, .width = 12, .heads = 3, .context = 7, .batch = 2, .vocabulary = 11, .device = HEDDLE_REF};
    uint8_t in[14], out[14];
    uint64_t state = seed;
    int failures = 0;
    gpt_f64 g = gpt_create_f64(&c);
    fill_for_check(&g, &state);
    fill_tokens(&c, in, out, &state);
    loss_of(&g, in, out);
    gpt_backward_f64(&g, in, c.batch, c.context);
    printf("gradients in float64 against central differences of the loss (limit %.0e of the largest):\n", limit);
    for (int n = 0; n < tensor_count(&c); n++) {
        comparison worst = {0, 0};
        double *value = value_of_f64(&g, n);
        for (int64_t i = 0; i < g.table[n].rows * g.table[n].cols; i++) {
            const double kept = value[i];
            value[i] = kept + h;
            const double above = loss_of(&g, in, out);
            value[i] = kept - h;
            const double below = loss_of(&g, in, out);
            value[i] = kept;
            compare(&worst, gradient_of_f64(&g, n)[i], (above - below) / (2 * h));
        }
        failures += !report(&g.table[n], &worst, limit);
    }
    gpt_destroy_f64(&g);
    return failures;
}

/* The model that would be trained, in float32 on its device, against the same in float64 on the reference. */
static int check_float32(const gpt_config *model, uint64_t seed) {
    const double limit = 5e-6;
    gpt_config c = *model;
    c.batch = (int)at_most(c.batch, 2);
    c.vocabulary = 97;
    uint64_t state = seed;
    int failures = 0;
    const size_t tokens = (size_t)c.batch * (size_t)c.context;
    uint8_t *in = allocate(tokens), *out = allocate(tokens);
    gpt g = gpt_create(&c);
    c.device = HEDDLE_REF;
    gpt_f64 exact = gpt_create_f64(&c);
    fill_for_check(&exact, &state);
    fill_tokens(&c, in, out, &state);
    for (int64_t i = 0; i < exact.parameters; i++)
        exact.value[i] = g.value[i] = (float)exact.value[i];
    const double expected = loss_of(&exact, in, out);
    gpt_backward_f64(&exact, in, c.batch, c.context);
    gpt_forward(&g, in, c.batch, 0, c.context);
    const double loss = gpt_loss(&g, out, (int64_t)tokens);
    gpt_backward(&g, in, c.batch, c.context);
    printf("\ngradients in float32 (heddle's %s) against float64 (limit %.0e of the largest):\n",
           g.c.device == HEDDLE_CPU    ? "cpu"
           : g.c.device == HEDDLE_CUDA ? "cuda"
                                       : "ref",
           limit);
    printf("  loss %.7f and %.7f\n", loss, expected);
    for (int n = 0; n < tensor_count(&c); n++) {
        comparison worst = {0, 0};
        for (int64_t i = 0; i < g.table[n].rows * g.table[n].cols; i++)
            compare(&worst, (double)gradient_of(&g, n)[i], gradient_of_f64(&exact, n)[i]);
        failures += !report(&g.table[n], &worst, limit);
    }
    gpt_destroy(&g);
    gpt_destroy_f64(&exact);
    free(in);
    free(out);
    return failures;
}

static int run_check(const gpt_config *model, uint64_t seed) {
    const int failures = check_differences(seed) + check_float32(model, seed);
    if (failures)
        printf("\nFAIL: %d gradients are off\n", failures);
    else
        printf("\npass: every gradient is right\n");
    return failures ? 1 : 0;
}

#endif

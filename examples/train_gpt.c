/* SPDX-License-Identifier: Apache-2.0
 *
 * Trains a small character-level transformer on source text. Every attention and every LayerNorm+Linear of it, forward
 * and backward, is a call of heddle's public API (see train_gpt_model.h); the rest is plain C. `train_gpt --help` says
 * more. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* lstat, setenv, clock_gettime */
#endif

#include "heddle.h"

#include "train_gpt_text.h"

#include <getopt.h>
#include <unistd.h>

/* The model twice: in double for --check, and in float, whose names go without a suffix from here on. */
#define REAL double
#define REAL_DTYPE HEDDLE_F64
#define NAME(x) x##_f64
#include "train_gpt_model.h"
#undef REAL
#undef REAL_DTYPE
#undef NAME
#define REAL float
#define REAL_DTYPE HEDDLE_F32
#define NAME(x) x##_f32
#include "train_gpt_model.h"

#include "train_gpt_check.h"

/* A run of this length must bring the validation loss under this goal. */
#define FULL_SECONDS 60.0
#define FULL_STEPS 800
#define GOAL 2.0

typedef struct options {
    const char *text;
    gpt_config c;
    int64_t steps;  /* 0: as many as fit into seconds */
    double seconds; /* 0: no limit */
    bool unhurried; /* go on after the seconds until FULL_STEPS are done */
    double rate;
    uint64_t seed;
    bool check;
} options;

/* ----------------------------------------------------------------------------------------------------- training */

/* Positions start as sines and cosines of geometric wavelengths, so that "the character before" is soon found. */
static double first_position(int64_t position, int64_t i, int64_t width) {
    const int64_t even = i / 2 * 2;
    const double angle = (double)position * pow(1e-2, (double)even / (double)width);
    return sqrt(2.0) * (i % 2 ? cos(angle) : sin(angle));
}

static double first_value(const gpt *g, int tensor, int64_t i, uint64_t *state) {
    const gpt_tensor *t = &g->table[tensor];
    const double spread = 0.5 / sqrt((double)g->c.width);
    const int in_layer = t->layer < 0 ? -1 : (tensor - MODEL_TENSORS) % LAYER_TENSORS;
    if (tensor == POSITION)
        return spread * first_position(i / t->cols, i % t->cols, t->cols);
    if (!t->matrix)
        return strncmp(t->name, "gamma", 5) == 0 ? 1 : 0;
    if (in_layer == W_PROJ || in_layer == W_DOWN) /* what adds up over the layers starts smaller */
        return spread / sqrt(2.0 * g->c.layers) * random_normal(state);
    return spread * random_normal(state);
}

static void initialise(gpt *g, uint64_t *state) {
    for (int n = 0; n < tensor_count(&g->c); n++)
        for (int64_t i = 0; i < g->table[n].rows * g->table[n].cols; i++)
            value_of(g, n)[i] = (float)first_value(g, n, i, state);
}

/* One step of AdamW with the gradient clipped to norm 1; `step` counts from 1. */
static void update(gpt *g, int64_t step, double rate) {
    const double beta1 = 0.9, beta2 = 0.99, decay = 0.1, eps = 1e-8, clip = 1.0;
    double norm = 0;
    for (int64_t i = 0; i < g->parameters; i++)
        norm += (double)g->gradient[i] * (double)g->gradient[i];
    norm = sqrt(norm);
    const float b1 = (float)beta1, b2 = (float)beta2, shrink = (float)(norm > clip ? clip / norm : 1);
    const float unbias1 = (float)(1 / (1 - pow(beta1, (double)step))),
                unbias2 = (float)(1 / (1 - pow(beta2, (double)step)));
    for (int n = 0; n < tensor_count(&g->c); n++) {
        const gpt_tensor *t = &g->table[n];
        const float keep = (float)(1 - (t->matrix ? rate * decay : 0));
#pragma omp parallel for schedule(static)
        for (int64_t i = t->at; i < t->at + t->rows * t->cols; i++) {
            const float d = g->gradient[i] * shrink;
            g->moment1[i] = b1 * g->moment1[i] + (1 - b1) * d;
            g->moment2[i] = b2 * g->moment2[i] + (1 - b2) * d * d;
            const float slope = g->moment1[i] * unbias1 / (sqrt(g->moment2[i] * unbias2) + (float)eps);
            g->value[i] = keep * g->value[i] - (float)rate * slope;
        }
    }
}

/* Mean loss over windows of the held-out text: all of it if it is short, else 256 at even distances. */
static double validate(gpt *g, const byte_list *text) {
    const int s = g->c.context;
    const int64_t all = (int64_t)(text->n - 1) / s, windows = at_most(all, 256);
    uint8_t *in = allocate((size_t)(g->c.batch * s)), *out = allocate((size_t)(g->c.batch * s));
    double total = 0;
    for (int64_t first = 0; first < windows; first += g->c.batch) {
        const int64_t b = at_most(windows - first, g->c.batch);
        for (int64_t i = 0; i < b; i++) {
            const uint8_t *from = text->data + (first + i) * all / windows * s;
            memcpy(in + i * s, from, (size_t)s);
            memcpy(out + i * s, from + 1, (size_t)s);
        }
        gpt_forward(g, in, (int)b, 0, s);
        total += gpt_loss(g, out, b * s) * (double)b;
    }
    free(in);
    free(out);
    return total / (double)windows;
}

/* One step on a batch of windows from random places; the loss before the step. */
static double train_step(gpt *g, const byte_list *text, uint8_t *in, uint8_t *out, uint64_t *state, int64_t step,
                         double rate) {
    const int b = g->c.batch, s = g->c.context;
    for (int i = 0; i < b; i++) {
        const size_t at = random_bits(state) % (text->n - (size_t)s);
        memcpy(in + (int64_t)i * s, text->data + at, (size_t)s);
        memcpy(out + (int64_t)i * s, text->data + at + 1, (size_t)s);
    }
    gpt_forward(g, in, b, 0, s);
    const double loss = gpt_loss(g, out, (int64_t)b * s);
    gpt_backward(g, in, b, s);
    update(g, step, rate);
    return loss;
}

/* `done` of the whole run: up in a line over the first tenth, then down half a cosine to a twentieth of the peak. */
static double learning_rate(double peak, double done) {
    const double warm_up = 0.1, last = 0.05;
    if (done < warm_up)
        return peak * (0.02 + 0.98 * done / warm_up);
    return peak * (last + (1 - last) * 0.5 * (1 + cos(3.141592653589793 * (done - warm_up) / (1 - warm_up))));
}

/* The progress line: rewritten in place on a terminal, else a new one every five seconds. */
static void show_progress(int64_t step, double loss, double tokens_per_second, double left, bool last) {
    static const char text[] = "step %5lld   loss %.3f   %6.1fk tokens/s   %d:%02d left";
    static double shown = 0;
    const bool terminal = isatty(STDOUT_FILENO);
    const double now = seconds_now();
    if (!last && now - shown < (terminal ? 0.1 : 5.0))
        return;
    shown = now;
    printf(terminal ? "\r" : "  ");
    printf(text, (long long)step, loss, tokens_per_second / 1000, (int)left / 60, (int)left % 60);
    printf(terminal ? last ? "   \n" : "   " : "\n");
    fflush(stdout);
}

/* Trains until the steps or the seconds are used up; returns the steps. */
static int64_t train(gpt *g, const gpt_text *text, const options *o, double seconds, uint64_t *state) {
    const size_t tokens = (size_t)g->c.batch * (size_t)g->c.context;
    const double start = seconds_now();
    uint8_t *in = allocate(tokens), *out = allocate(tokens);
    double smooth = 0, done = 0;
    int64_t step = 0;
    while (done < 1) {
        const double loss = train_step(g, &text->train, in, out, state, step + 1, learning_rate(o->rate, done));
        if (!(loss < 1e3)) {
            fprintf(stderr, "train_gpt: the loss became %g at step %lld; try a smaller --rate\n", loss,
                    (long long)step);
            exit(1);
        }
        smooth = step ? 0.95 * smooth + 0.05 * loss : loss;
        step++;
        const double elapsed = seconds_now() - start;
        done = o->steps ? (double)step / (double)o->steps : 0;
        if (seconds > 0)
            done = fmax(done, elapsed / seconds);
        if (o->unhurried)
            done = fmin(done, (double)step / FULL_STEPS);
        show_progress(step, smooth, (double)step * (double)tokens / elapsed, fmax(0, elapsed / done - elapsed),
                      done >= 1);
    }
    free(in);
    free(out);
    return step;
}

/* Goes on from a few words for `count` characters that the model makes up. Each is a forward of one row, as the earlier
 * keys and values are kept; when the context is full, its second half starts a new one. */
static void write_sample(gpt *g, const gpt_text *text, int count, double temperature, uint64_t *state) {
    const int s = g->c.context, v = g->c.vocabulary;
    uint8_t *window = allocate((size_t)s);
    double *weight = allocate((size_t)v * sizeof *weight);
    int past = 0, known = 0;
    for (const char *c = "static void "; *c && known < s - 1; c++) {
        window[known++] = text->symbol[(int)*c];
        putchar(*c);
    }
    for (int i = 0; i < count; i++) {
        if (known == s) {
            memmove(window, window + s - s / 2, (size_t)(s / 2));
            past = 0;
            known = s / 2;
        }
        gpt_forward(g, window + past, 1, past, known - past);
        past = known;
        const float *logit = g->logits + (int64_t)(known - 1) * v;
        double sum = 0;
        for (int j = 0; j < v; j++)
            sum += weight[j] = exp((double)logit[j] / temperature);
        double rest = random_uniform(state) * sum;
        int pick = 0;
        while (pick < v - 1 && (rest -= weight[pick]) > 0)
            pick++;
        window[known++] = (uint8_t)pick;
        putchar(text->letter[pick]);
    }
    putchar('\n');
    free(window);
    free(weight);
}

static int run_training(const options *o) {
    const double start = seconds_now();
    gpt_text text = read_text(o->text, (size_t)o->c.context + 1);
    gpt_config c = o->c;
    c.vocabulary = text.vocabulary;
    gpt g = gpt_create(&c);
    uint64_t state = o->seed;
    initialise(&g, &state);

    char device[160];
    must(heddle_device_describe(c.device, device, sizeof device), "device");
    printf("text    %zu files below %s: %zu characters to train on, %zu held out, vocabulary %d\n", text.files, o->text,
           text.train.n, text.held_out.n, text.vocabulary);
    printf("model   %d layers, width %d, %d heads, context %d, batch %d: %.2f million parameters\n", c.layers, c.width,
           c.heads, c.context, c.batch, 1e-6 * (double)g.parameters);
    printf("device  %s\n", device);
    fflush(stdout);

    const double before_first = seconds_now();
    const double first = validate(&g, &text.held_out), uniform = log((double)c.vocabulary);
    const double validation_seconds = seconds_now() - before_first;
    printf("held-out text before: %.3f nats a character; ln(%d) = %.3f\n", first, c.vocabulary, uniform);
    fflush(stdout);

    g.attention_seconds = g.norm_linear_seconds = 0;
    const double train_start = seconds_now();
    /* Leaves time for the last validation and the sample, but not all of it on a very busy machine. */
    const double left = fmax(o->seconds - (train_start - start) - validation_seconds - 0.5, 0.7 * o->seconds);
    const int64_t steps = train(&g, &text, o, o->seconds > 0 ? left : 0, &state);
    const double spent = seconds_now() - train_start;
    printf("%lld steps, %.1f s: attention %.0f%%, norm-linear %.0f%%, the rest %.0f%%\n", (long long)steps, spent,
           100 * g.attention_seconds / spent, 100 * g.norm_linear_seconds / spent,
           100 * (spent - g.attention_seconds - g.norm_linear_seconds) / spent);

    const double last = validate(&g, &text.held_out);
    printf("held-out text after: %.3f nats a character, from %.3f\n\n--- a sample\n", last, first);
    state = o->seed + 1;
    write_sample(&g, &text, 400, 0.8, &state);
    printf("---\n\n");
    gpt_destroy(&g);
    free(text.train.data);
    free(text.held_out.data);

    const bool full = steps >= FULL_STEPS || (o->seconds >= FULL_SECONDS && !o->steps);
    if (!full) {
        printf("validation loss %.2f, not judged: a full run is %d steps or %.0f seconds\n", last, FULL_STEPS,
               FULL_SECONDS);
        return 0;
    }
    const bool good = last < GOAL;
    printf("%s: validation loss %.2f %s %.2f, on text it has not seen (%.1f s in all)\n", good ? "pass" : "FAIL", last,
           good ? "<" : "is not below", GOAL, seconds_now() - start);
    return good ? 0 : 1;
}

/* ------------------------------------------------------------------------------------------------------ options */

static const char help[] =
    "usage: train_gpt [options]\n"
    "\n"
    "Trains a small character-level transformer on source text and prints what it then writes. Each of its attentions\n"
    "and LayerNorm+Linears, forward and backward, runs in heddle; a tenth of the text is held out to judge it.\n"
    "\n"
    "    train_gpt --text .                    a minute on this repository\n"
    "    train_gpt --text ~/linux/kernel --seconds 600 --layers 6 --width 256 --heads 8 --context 256\n"
    "    train_gpt --steps 200 --seed 7        always the same losses, whatever the time and the number of threads\n"
    "    train_gpt --check                     its gradients against central differences, a few seconds\n"
    "\n"
    "What to do\n"
    "  --text DIR       learn from the .c .h .md .sh .txt .py .cu .cuh .def .cmake files below DIR (default .), "
    "without\n"
    "                   hidden and build* directories and files over 1 MB\n"
    "  --seconds S      stop after S seconds in all (default: after 60, but not before 800 steps)\n"
    "  --steps N        stop after N steps, however long they take\n"
    "  --check          check the gradients in place of training\n"
    "  --seed N         of the first weights, the batches and the sample (default 1)\n"
    "  --device NAME    cpu (default), cuda, or ref: float64 sums in one thread, about a hundred times slower\n"
    "\n"
    "The model\n"
    "  --layers N       (default 3)\n"
    "  --width N        features of a token, a multiple of --heads (default 128)\n"
    "  --heads N        (default 4)\n"
    "  --context N      characters that it looks back (default 128)\n"
    "  --batch N        windows in a step (default 8)\n"
    "  --rate X         peak of the learning rate (default 0.003)\n"
    "\n"
    "The threads are OpenMP's: OMP_NUM_THREADS=1 train_gpt\n"
    "Exit status: 0 if the validation loss of a full run is under 2 nats, or all gradients are right; 1 if not;\n"
    "2 if it could not be tried.\n";

_Noreturn static void refuse(const char *option, const char *text, const char *wanted) {
    fprintf(stderr, "train_gpt: --%s %s: %s\n", option, text, wanted);
    exit(2);
}

static double number(const char *option, const char *text, double low, double high, bool whole) {
    char *end, wanted[80];
    errno = 0;
    const double x = strtod(text, &end);
    snprintf(wanted, sizeof wanted, "%s from %g to %g is wanted", whole ? "a whole number" : "a number", low, high);
    if (end == text || *end || errno || !(x >= low && x <= high) || (whole && x != floor(x)))
        refuse(option, text, wanted);
    return x;
}

static heddle_device read_device(const char *text) {
    char why[256];
    if (strcmp(text, "cpu") == 0)
        return HEDDLE_CPU;
    if (strcmp(text, "ref") == 0)
        return HEDDLE_REF;
    if (strcmp(text, "cuda") != 0)
        refuse("device", text, "cpu, cuda or ref is wanted");
    if (heddle_device_available(HEDDLE_CUDA, why, sizeof why) != HEDDLE_OK)
        refuse("device", text, why);
    return HEDDLE_CUDA;
}

static void parse(int argc, char **argv, options *o) {
    static const struct option known[] = {
        {"text", required_argument, NULL, 't'},    {"steps", required_argument, NULL, 'n'},
        {"seconds", required_argument, NULL, 's'}, {"seed", required_argument, NULL, 'r'},
        {"device", required_argument, NULL, 'd'},  {"layers", required_argument, NULL, 'l'},
        {"width", required_argument, NULL, 'w'},   {"heads", required_argument, NULL, 'a'},
        {"context", required_argument, NULL, 'c'}, {"batch", required_argument, NULL, 'b'},
        {"rate", required_argument, NULL, 'e'},    {"check", no_argument, NULL, 'k'},
        {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0},
    };
    bool timed = false;
    for (int c, which = 0; (c = getopt_long(argc, argv, "h", known, &which)) != -1;) {
        switch (c) {
        case 't': o->text = optarg; break;
        case 'n': o->steps = (int64_t)number("steps", optarg, 1, 1e9, true); break;
        case 's': o->seconds = number("seconds", optarg, 1, 1e7, false), timed = true; break;
        case 'r': o->seed = (uint64_t)number("seed", optarg, 0, 0x1p53, true); break;
        case 'd': o->c.device = read_device(optarg); break;
        case 'l': o->c.layers = (int)number("layers", optarg, 1, 1000, true); break;
        case 'w': o->c.width = (int)number("width", optarg, 1, 16384, true); break;
        case 'a': o->c.heads = (int)number("heads", optarg, 1, 1024, true); break;
        case 'c': o->c.context = (int)number("context", optarg, 2, 65536, true); break;
        case 'b': o->c.batch = (int)number("batch", optarg, 1, 4096, true); break;
        case 'e': o->rate = number("rate", optarg, 1e-9, 10, false); break;
        case 'k': o->check = true; break;
        case 'h': fputs(help, stdout); exit(0);
        default: fputs("train_gpt: --help lists the options\n", stderr); exit(2);
        }
    }
    if (optind < argc) {
        fprintf(stderr, "train_gpt: what is %s? --help lists the options\n", argv[optind]);
        exit(2);
    }
    if (o->c.width % o->c.heads) {
        fprintf(stderr, "train_gpt: --width %d is not a multiple of --heads %d\n", o->c.width, o->c.heads);
        exit(2);
    }
    if (!timed && o->steps)
        o->seconds = 0;
    o->unhurried = !timed && !o->steps;
}

/* Threads that spin while they wait make a training of many short loops ten times slower where other programs want the
 * cores too. OpenMP reads this variable before main, hence the second start; without /proc all goes on as it was. */
static void let_threads_sleep(char **argv) {
    if (!getenv("OMP_WAIT_POLICY") && setenv("OMP_WAIT_POLICY", "passive", 1) == 0)
        execv("/proc/self/exe", argv);
}

int main(int argc, char **argv) {
    let_threads_sleep(argv);
    options o = {.text = ".",
                 .c = {.layers = 3, .width = 128, .heads = 4, .context = 128, .batch = 8, .device = HEDDLE_CPU},
                 .seconds = FULL_SECONDS,
                 .rate = 3e-3,
                 .seed = 1};
    parse(argc, argv, &o);
    const int status = o.check ? run_check(&o.c, o.seed) : run_training(&o);
    if (fflush(stdout) || ferror(stdout)) {
        fprintf(stderr, "train_gpt: cannot write: %s\n", strerror(errno));
        return 2;
    }
    return status;
}

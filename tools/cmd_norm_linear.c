/* SPDX-License-Identifier: Apache-2.0 */
#include "file_job.h"

#include <stdio.h>

static const char usage[] =
    "Usage: heddle norm-linear --x FILE --w FILE --out FILE [options]\n"
    "\n"
    "Computes y = act(z·Wᵀ + bias) + residual as one operation, where each row of z is the LayerNorm of a row of x,\n"
    "z = (x - mean)/sqrt(variance + eps)·gamma + beta; and, given the gradient of y, those of the inputs.\n"
    "The arrays are NumPy files (.npy) of float16, float32 or float64; results have the type of --x.\n"
    "\n"
    "Shapes: x [..., k], w [n, k] (as PyTorch's Linear keeps it), gamma [k], beta [k], bias [n], out and residual "
    "[..., n]\n"
    "\n"
    "Options\n"
    "  --gamma FILE          default: ones\n"
    "  --beta FILE           default: zeros\n"
    "  --bias FILE           default: zeros\n"
    "  --norm NORM           layer (default), rms: no mean is subtracted, or none: z is x, without gamma, beta and "
    "eps\n"
    "  --eps E               default 1e-5\n"
    "  --activation NAME     gelu, gelu-tanh or silu, of u = z·Wᵀ + bias; default: none. geglu, geglu-tanh or swiglu: "
    "that\n"
    "                        of u's first half, times the second; w is [2n, k], u [..., 2n], bias [2n]\n"
    "  --residual FILE       added to out behind the activation; its gradient is --dout's\n"
    "  --u FILE              with an activation: write what it is of, z·Wᵀ + bias\n"
    "  --z FILE              write z, too\n"
    "  --dz FILE             what else than out has for z's gradient; default: zeros\n"
    "  --mean FILE --rstd FILE\n"
    "                        write each row's mean and 1/sqrt(variance + eps); float32, or float64 for float64 input\n"
    "\n"
    "Gradients: any of these, with --dout given\n"
    "  --dout FILE           gradient of out, its shape\n"
    "  --dx FILE --dgamma FILE --dbeta FILE --dw FILE --dbias FILE\n"
    "                        write the gradients of x, gamma, beta, w and bias\n"
    "\n"
    "How\n"
    "  --dtype TYPE          compute in f32, bf16, f16 or f64; default: the type of --x\n"
    "  --device DEVICE       cpu (default), cuda, or ref: the formulas in float64, slow; f64 needs it\n"
    "  --deterministic       gradients with the same bits every time (the CPU's always are)\n"
    "  --multiprocessors N   of --device cuda take no more than N, where blocks stay; default: all\n"
    "  --time                print milliseconds and GFLOP/s of each pass (median of a second of runs)\n"
    "\n"
    "Example: 12 rows of 64 features to 48\n"
    "  heddle random --shape 12,64 --seed 1 --out x.npy\n"
    "  heddle random --shape 48,64 --seed 2 --std 0.02 --out w.npy\n"
    "  heddle norm-linear --x x.npy --w w.npy --out y.npy --time\n";

enum { OPTION_NORM = OPTION_OWN, OPTION_EPS, OPTION_ACTIVATION };

static const struct option own_options[] = {
    {"norm", required_argument, NULL, OPTION_NORM},
    {"eps", required_argument, NULL, OPTION_EPS},
    {"activation", required_argument, NULL, OPTION_ACTIVATION},
    {0},
};

static bool set_option(job *j, int option, const char *text) {
    heddle_norm_linear *l = &j->l;
    static const char *const norms[] = {"layer", "rms", "none", NULL};
    static const char *const activations[] = {"none",  "gelu",       "gelu-tanh", "silu",
                                              "geglu", "geglu-tanh", "swiglu",    NULL};
    int norm, activation;
    switch (option) {
    case OPTION_NORM:
        if (!parse_choice("--norm", text, norms, &norm))
            return false;
        l->norm = (heddle_norm)norm;
        return true;
    case OPTION_ACTIVATION:
        if (!parse_choice("--activation", text, activations, &activation))
            return false;
        l->activation = (heddle_activation)activation;
        l->features = activation ? l->features | HEDDLE_ACTIVATION : l->features & ~HEDDLE_ACTIVATION;
        return true;
    case OPTION_EPS:
        if (!parse_real("--eps", text, &l->eps))
            return false;
        if (l->eps <= 0)
            complain("--eps: %s is not above 0", text);
        return l->eps > 0;
    default: return false;
    }
}

static bool set_dimensions(file_job *w) {
    const npy_array *x = &w->file[X], *weight = &w->file[W];
    if (x->rank < 1 || weight->rank != 2) {
        char shape[128];
        const npy_array *wrong = x->rank < 1 ? x : weight;
        npy_shape_text(wrong->rank, wrong->shape, shape, sizeof shape);
        complain("--%s %s has shape %s, but %s is expected", x->rank < 1 ? "x" : "w", w->path[x->rank < 1 ? X : W],
                 shape, x->rank < 1 ? "[..., k]" : "[n, k]");
        return false;
    }
    w->j.l.k = x->shape[x->rank - 1];
    w->j.l.n = weight->shape[0];
    if (is_gated(w->j.l.activation)) {
        w->j.l.n /= 2;
        if (weight->shape[0] % 2) {
            complain("--w %s has %lld rows, but a gate and what it gates have as many each", w->path[W],
                     (long long)weight->shape[0]);
            return false;
        }
    }
    w->j.l.m = 1;
    for (int i = 0; i + 1 < x->rank; i++)
        w->j.l.m *= x->shape[i]; /* fits: the file has no more elements than memory */
    return true;
}

static int run(file_job *w) {
    if (!w->path[X] || !w->path[W])
        return complain("--%s FILE is missing; see heddle norm-linear --help", w->path[X] ? "w" : "x");
    w->j.l.features |= file_job_features(w) & ~HEDDLE_ACTIVATION; /* which goes by --activation */
    if (!file_job_read(w, X) || !set_dimensions(w) || !file_job_check_shapes(w, X, 0) || !file_job_choose_dtype(w, X) ||
        !device_ready(w->device))
        return EXIT_TROUBLE;
    return file_job_finish(w, X);
}

int cmd_norm_linear(int argc, char **argv) {
    static const file_command command = {"norm-linear", usage, own_options, set_option, run};
    file_job w = {.j = {.linear = true, .a = {.size = sizeof w.j.a}, .l = {.size = sizeof w.j.l}}};
    return file_job_main(&command, &w, argc, argv);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "../src/dtype.h"
#include "npy.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char usage[] = "Usage: heddle random --shape N,N,... --out FILE [options]\n"
                            "\n"
                            "Writes an array of random numbers as a NumPy file (.npy): input for the other commands. "
                            "The same options give the same\n"
                            "numbers.\n"
                            "\n"
                            "Options\n"
                            "  --shape N,N,...       the dimensions\n"
                            "  --out FILE\n"
                            "  --seed N              default 0\n"
                            "  --dtype TYPE          f16, f32 (default), f64; bool: True with probability --p\n"
                            "  --mean M --std S      of the normal distribution; default 0 and 1. What the type has no "
                            "room for is an error,\n"
                            "                        and so it is of a number that is drawn\n"
                            "  --p P                 of bool, from 0 to 1; default 0.5\n"
                            "\n"
                            "Example\n"
                            "  heddle random --shape 1,2,33,16 --seed 3 --dtype f32 --out q.npy\n";

typedef struct request {
    npy_array array;
    const char *path;
    random_state random;
    double mean, std, p;
    const char *normal; /* an option of the normal distribution that is given, or NULL */
    bool p_given;
} request;

static const char *const type_names[] = {"f16", "f32", "f64", "bool", NULL}; /* in npy_type's order */

static bool set_shape(npy_array *a, const char *text) {
    a->rank = parse_list("--shape", text, NPY_MAX_RANK, a->shape);
    bool empty = false, fits = true;
    a->count = 1;
    for (int i = 0; i < a->rank; i++) {
        if (a->shape[i] < 0)
            return complain("--shape: %lld is below 0", (long long)a->shape[i]), false;
        empty |= a->shape[i] == 0;
        fits = fits && !__builtin_mul_overflow(a->count, a->shape[i], &a->count);
    }
    if (!empty && !fits)
        return complain("--shape: '%s' is too large", text), false;
    a->count = empty ? 0 : a->count;
    return a->rank > 0;
}

static bool set_p(request *r, const char *text) {
    r->p_given = true;
    if (!parse_real("--p", text, &r->p))
        return false;
    if (!(r->p >= 0 && r->p <= 1))
        return complain("--p: %s is outside 0 to 1", text), false;
    return true;
}

static bool set_option(void *to, int option, char *text) {
    request *r = to;
    int type;
    switch (option) {
    case 's': return set_shape(&r->array, text);
    case 'o': r->path = text; return true;
    case 'r': return parse_seed("--seed", text, &r->random.state);
    case 'd':
        if (!parse_choice("--dtype", text, type_names, &type))
            return false;
        r->array.type = (npy_type)type;
        return true;
    case 'm': r->normal = "--mean"; return parse_real(r->normal, text, &r->mean);
    case 'v': r->normal = "--std"; return parse_real(r->normal, text, &r->std);
    case 'p': return set_p(r, text);
    default: return false;
    }
}

static bool has_room(npy_type type, const char *option, double x) {
    double stored;
    store_element(npy_dtype(type), &stored, 0, x);
    if (!isfinite(load_element(npy_dtype(type), &stored, 0)))
        return complain("%s: %g is infinite in %s", option, x, type_names[type]), false;
    return true;
}

/* What is given is what the type has, and a number of it. */
static bool check_distribution(const request *r) {
    const npy_type type = r->array.type;
    if (type == NPY_BOOL && r->normal)
        return complain("%s is given, but --dtype bool has no normal distribution", r->normal), false;
    if (type != NPY_BOOL && r->p_given)
        return complain("--p is given, but only --dtype bool has a probability, and this is %s", type_names[type]),
               false;
    if (r->std < 0)
        return complain("--std: %g is below 0", r->std), false;
    return type == NPY_BOOL || (has_room(type, "--mean", r->mean) && has_room(type, "--std", r->std));
}

static bool draw(request *r) {
    const npy_array *a = &r->array;
    const heddle_dtype dtype = a->type == NPY_BOOL ? HEDDLE_F32 : npy_dtype(a->type);
    for (int64_t i = 0; i < a->count; i++) {
        if (a->type == NPY_BOOL) {
            ((uint8_t *)a->data)[i] = random_uniform(&r->random) < r->p;
            continue;
        }
        store_element(dtype, a->data, i, r->mean + r->std * random_normal(&r->random));
        if (!isfinite(load_element(dtype, a->data, i)))
            return complain("--mean %g, --std %g: element %lld is infinite in %s", r->mean, r->std, (long long)i,
                            type_names[a->type]),
                   false;
    }
    return true;
}

static int run(request *r, arena *m) {
    npy_array *a = &r->array;
    npy_outputs outputs = {0};
    a->data = arena_array(m, a->count, npy_type_size(a->type));
    if (!draw(r))
        return EXIT_TROUBLE;
    if (npy_stage(&outputs, r->path, a))
        return npy_commit(&outputs) ? 0 : EXIT_TROUBLE;
    npy_abandon(&outputs);
    return EXIT_TROUBLE;
}

int cmd_random(int argc, char **argv) {
    static const struct option options[] = {
        {"shape", required_argument, NULL, 's'},
        {"out", required_argument, NULL, 'o'},
        {"seed", required_argument, NULL, 'r'},
        {"dtype", required_argument, NULL, 'd'},
        {"mean", required_argument, NULL, 'm'},
        {"std", required_argument, NULL, 'v'},
        {"p", required_argument, NULL, 'p'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    static const line_rules rules = {.command = "random", .usage = usage, .options = options, .take = set_option};
    request r = {.array = {.type = NPY_F32}, .std = 1, .p = 0.5};
    arena m = {0};
    int status = read_options(&rules, argc, argv, &r);
    if (status != NEXT)
        return status;
    if (!r.array.rank || !r.path)
        return complain("--%s is missing; see heddle random --help", r.path ? "shape" : "out");
    if (!check_distribution(&r))
        return EXIT_TROUBLE;
    status = run(&r, &m);
    arena_free(&m);
    return status;
}

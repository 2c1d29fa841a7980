/* SPDX-License-Identifier: Apache-2.0 */
#include "file_job.h"

#include "../src/dtype.h"

#include <stdio.h>
#include <string.h>

#define MAX_OPTIONS 64

static void list_options(const job *j, const struct option *own, struct option out[MAX_OPTIONS]) {
    static const struct option shared[] = {
        {"dtype", required_argument, NULL, OPTION_DTYPE},
        {"device", required_argument, NULL, OPTION_DEVICE},
        {"deterministic", no_argument, NULL, OPTION_DETERMINISTIC},
        {"multiprocessors", required_argument, NULL, OPTION_MULTIPROCESSORS},
        {"time", no_argument, NULL, OPTION_TIME},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    int n = 0;
    for (int f = 0; job_fields(j)[f].name; f++)
        if (job_fields(j)[f].option)
            out[n++] = (struct option){job_fields(j)[f].option, required_argument, NULL, OPTION_FIELD + f};
    for (int i = 0; shared[i].name; i++)
        out[n++] = shared[i];
    for (int i = 0; own[i].name; i++)
        out[n++] = own[i];
    out[n] = (struct option){0};
}

/* One of the shared options: 1 if it was one, 0 if it is the command's own, -1 after a complaint. */
static int take_shared(file_job *w, int value, const char *argument) {
    switch (value) {
    case OPTION_DTYPE: w->dtype_given = true; return parse_dtype("--dtype", argument, &w->dtype) ? 1 : -1;
    case OPTION_DEVICE: return parse_device("--device", argument, &w->device) ? 1 : -1;
    case OPTION_DETERMINISTIC:
        w->j.a.features |= HEDDLE_DETERMINISTIC;
        w->j.l.features |= HEDDLE_DETERMINISTIC;
        return 1;
    case OPTION_MULTIPROCESSORS:
        if (!parse_int("--multiprocessors", argument, 1, INT32_MAX, &w->j.a.multiprocessors))
            return -1;
        w->j.l.multiprocessors = w->j.a.multiprocessors;
        return 1;
    case OPTION_TIME: w->timed = true; return 1;
    default: break;
    }
    if (value < OPTION_FIELD)
        return 0;
    w->path[value - OPTION_FIELD] = argument;
    return 1;
}

typedef struct reader {
    const file_command *command;
    file_job *w;
} reader;

static bool take(void *to, int option, char *text) {
    const reader *r = to;
    const int taken = take_shared(r->w, option, text);
    return taken > 0 || (taken == 0 && r->command->set_option(&r->w->j, option, text));
}

int file_job_main(const file_command *command, file_job *w, int argc, char **argv) {
    struct option options[MAX_OPTIONS];
    list_options(&w->j, command->own, options);
    const line_rules rules = {.command = command->name, .usage = command->usage, .options = options, .take = take};
    int status = read_options(&rules, argc, argv, &(reader){command, w});
    if (status != NEXT)
        return status;
    if (w->j.a.multiprocessors && w->device != HEDDLE_CUDA)
        return complain("--multiprocessors is for --device cuda, but this is %s", device_name(w->device));
    status = command->run(w);
    arena_free(&w->m);
    return status;
}

uint64_t file_job_features(const file_job *w) {
    uint64_t features = 0;
    for (int f = 0; job_fields(&w->j)[f].name; f++)
        features |= w->path[f] ? job_fields(&w->j)[f].feature : 0;
    return features;
}

/* --------------------------------------------------------------------------------------------------------- input */

static bool check_type(const file_job *w, int f, int main) {
    const tensor_field *t = &job_fields(&w->j)[f];
    const npy_array *a = &w->file[f];
    const char *expected = t->element == OF_BOOL    ? "bool"
                           : t->element == OF_INT32 ? "int32"
                                                    : "float16, float32 or float64";
    bool right = t->element == OF_BOOL    ? a->type == NPY_BOOL
                 : t->element == OF_INT32 ? a->type == NPY_I32
                                          : npy_is_float(a->type);
    if (!right)
        complain("--%s %s: it is %s, but %s is expected", t->option, w->path[f], npy_type_name(a->type), expected);
    else if (t->element == OF_DTYPE && a->type != w->file[main].type) {
        complain("--%s %s is %s, but --%s %s is %s: they must have one type", t->option, w->path[f],
                 npy_type_name(a->type), job_fields(&w->j)[main].option, w->path[main],
                 npy_type_name(w->file[main].type));
        right = false;
    }
    return right;
}

bool file_job_read(file_job *w, int main) {
    for (int pass = 0; pass < 2; pass++) /* all are read before they are compared with the main one */
        for (int f = 0; job_fields(&w->j)[f].name; f++) {
            if (!w->path[f] || !is_input(&job_fields(&w->j)[f]))
                continue;
            if (!(pass ? check_type(w, f, main) : npy_read(&w->m, w->path[f], &w->file[f])))
                return false;
        }
    return true;
}

bool file_job_choose_dtype(file_job *w, int main) {
    const char *path = w->path[main];
    heddle_dtype dtype = w->dtype_given ? w->dtype : npy_dtype(w->file[main].type);
    if (dtype == HEDDLE_F64 && w->device != HEDDLE_REF) {
        if (w->dtype_given)
            complain("--dtype f64 needs --device ref, the only device that computes in float64");
        else
            complain(
                "%s is float64, which only --device ref computes in: add that, or --dtype f32 to compute in float32",
                path);
        return false;
    }
    job_set_dtype(&w->j, dtype);
    job_set_device(&w->j, w->device);
    return true;
}

/* How many dimensions the main array lacks, which the others of batches then lack, too. */
static int left_out(const file_job *w, const char *letters, int main) {
    const bool batches = !w->j.linear && !(w->j.a.features & (HEDDLE_VARLEN | HEDDLE_PAGES));
    const int leading = letters[0] != 'b' || !letters[1] ? 0 : letters[1] == 'h' || letters[1] == 'g' ? 2 : 1;
    const int missing = 4 - w->file[main].rank;
    return batches ? (missing < leading ? missing : leading) : 0;
}

int file_job_shape(const file_job *w, int f, int main, int64_t shape[NPY_MAX_RANK]) {
    const npy_array *first = &w->file[main];
    const char *letters = field_shape(&w->j, f);
    int rank = 0, dropped = left_out(w, letters, main);
    if (!w->j.linear && (f == BIAS || f == DBIAS) && w->file[BIAS].data) { /* any shape that broadcasts */
        memcpy(shape, w->file[BIAS].shape, sizeof w->file[BIAS].shape);
        return w->file[BIAS].rank;
    }
    for (const char *letter = letters + dropped; *letter; letter++) {
        if (w->j.linear && *letter == 'm')
            for (int i = 0; i + 1 < first->rank; i++)
                shape[rank++] = first->shape[i];
        else
            shape[rank++] = job_extent(&w->j, *letter);
    }
    return rank;
}

/* "[b, hk, sk, d]" of the letters. */
static void letters_text(const file_job *w, int f, int main, char *text, size_t n) {
    const char *letters = field_shape(&w->j, f);
    size_t used = (size_t)snprintf(text, n, "[");
    int skip = left_out(w, letters, main);
    for (const char *c = letters + skip; *c && used < n; c++) {
        const char *name = w->j.linear ? (*c == 'm'   ? "..."
                                          : *c == 'N' ? (is_gated(w->j.l.activation) ? "2n" : "n")
                                                      : NULL)
                           : *c == 'g' ? "hk"
                           : *c == 'q' ? "sq"
                           : *c == 'k' ? "sk"
                           : *c == 'v' ? "dv"
                           : *c == 'Q' ? "total_q"
                           : *c == 'K' ? "total_k"
                           : *c == 'B' ? "b or 1"
                           : *c == 'H' ? "h or 1"
                           : *c == 'r' ? "blocks of queries + 1"
                           : *c == 'c' ? "columns"
                           : *c == 'n' ? "sequences + 1"
                           : *c == 'P' ? "pages"
                           : *c == 'p' ? "page"
                           : *c == 't' ? "pages of a sequence"
                                       : NULL;
        const char one[2] = {*c, 0};
        used += (size_t)snprintf(text + used, n - used, "%s%s", c == letters + skip ? "" : ", ", name ? name : one);
    }
    if (used < n)
        snprintf(text + used, n - used, "]");
}

bool file_job_check_shapes(const file_job *w, int main, uint64_t skip) {
    for (int f = 0; job_fields(&w->j)[f].name; f++) {
        const npy_array *a = &w->file[f];
        int64_t shape[NPY_MAX_RANK] = {0};
        char letters[64], expected[128], found[128];
        if (!a->data || skip >> f & 1)
            continue;
        int rank = file_job_shape(w, f, main, shape);
        if (rank == a->rank && !memcmp(shape, a->shape, (size_t)rank * sizeof *shape))
            continue;
        letters_text(w, f, main, letters, sizeof letters);
        npy_shape_text(rank, shape, expected, sizeof expected);
        npy_shape_text(a->rank, a->shape, found, sizeof found);
        complain("--%s %s has shape %s, but %s = %s is expected", job_fields(&w->j)[f].option, w->path[f], found,
                 letters, expected);
        return false;
    }
    return true;
}

/* ----------------------------------------------------------------------------------------------------- run, write */

/* The file's elements in the compute type; the file's own memory where they are the same. */
static void *to_compute(file_job *w, int f) {
    const npy_array *a = &w->file[f];
    const field_element element = job_fields(&w->j)[f].element;
    heddle_dtype compute = job_dtype(&w->j);
    if (element == OF_FLOAT && compute != HEDDLE_F64)
        compute = HEDDLE_F32;
    if (!npy_is_float(a->type) || npy_dtype(a->type) == compute)
        return a->data;
    void *p = arena_array(&w->m, a->count, field_bytes(&w->j, f));
    for (int64_t i = 0; i < a->count; i++)
        store_value(&w->j, f, p, i, load_element(npy_dtype(a->type), a->data, i));
    return p;
}

/* The result as a file: in the type of the input, but a float32 quantity (lse, mean) never in float16. */
static void to_file(file_job *w, int f, int main, npy_array *out) {
    const tensor_field *t = &job_fields(&w->j)[f];
    out->type = w->file[main].type;
    if (t->element == OF_FLOAT && out->type == NPY_F16)
        out->type = NPY_F32;
    out->rank = file_job_shape(w, f, main, out->shape);
    out->count = field_count(&w->j, f);
    heddle_dtype from = job_dtype(&w->j), to = npy_dtype(out->type);
    if (t->element == OF_FLOAT && from != HEDDLE_F64)
        from = HEDDLE_F32;
    out->data = w->j.data[f];
    if (from == to)
        return;
    out->data = arena_array(&w->m, out->count, npy_type_size(out->type));
    for (int64_t i = 0; i < out->count; i++)
        store_element(to, out->data, i, load_value(&w->j, f, w->j.data[f], i));
}

static bool report_time(const file_job *w, bool backward) {
    for (int pass = HEDDLE_FORWARD; pass <= (backward ? HEDDLE_BACKWARD : HEDDLE_FORWARD); pass++) {
        char kernel[96] = "";
        double seconds = job_seconds(&w->j, (heddle_pass)pass);
        if (seconds < 0)
            return false;
        if (w->j.linear)
            heddle_norm_linear_kernel(&w->j.l, (heddle_pass)pass, kernel, sizeof kernel);
        else
            heddle_attention_kernel(&w->j.a, (heddle_pass)pass, kernel, sizeof kernel);
        printf("%-8s %12.4f ms %10.2f GFLOP/s   %s\n", pass == HEDDLE_FORWARD ? "forward" : "backward", 1e3 * seconds,
               1e-9 * job_flops(&w->j, (heddle_pass)pass) / seconds, kernel);
    }
    return true;
}

/* --time's runs come first: what is written is then one more run's result. */
static bool compute(file_job *w, bool backward) {
    job *j = &w->j;
    for (int f = 0; job_fields(j)[f].name; f++) {
        const tensor_field *t = &job_fields(j)[f];
        if (w->file[f].data)
            j->data[f] = to_compute(w, f);
        else if (w->path[f] || (t->role == ROLE_OUTPUT && job_has(j, f)))
            j->data[f] = arena_array(&w->m, field_count(j, f), field_bytes(j, f));
    }
    return job_prepare(j, &w->m, backward) && (!w->timed || report_time(w, backward)) && job_run(j, HEDDLE_FORWARD) &&
           (!backward || job_run(j, HEDDLE_BACKWARD));
}

static int save(file_job *w, int main) {
    npy_outputs outputs = {0};
    for (int f = 0; job_fields(&w->j)[f].name; f++) {
        npy_array a;
        if (!w->path[f] || is_input(&job_fields(&w->j)[f]))
            continue;
        to_file(w, f, main, &a);
        if (!npy_stage(&outputs, w->path[f], &a)) {
            npy_abandon(&outputs);
            return EXIT_TROUBLE;
        }
    }
    return npy_commit(&outputs) ? 0 : EXIT_TROUBLE;
}

/* Which outputs are asked for, and whether that makes sense. -1 after a complaint, else 1 if gradients are. */
static int needs_backward(const file_job *w) {
    int count[ROLE_GRADIENT_OUT + 1] = {0}, last[ROLE_GRADIENT_OUT + 1] = {0};
    const tensor_field *t = job_fields(&w->j);
    for (int f = 0; t[f].name; f++)
        if (w->path[f]) {
            count[t[f].role]++;
            last[t[f].role] = f;
        }
    if (count[ROLE_GRADIENT_OUT] && !count[ROLE_GRADIENT_IN])
        complain("--%s needs --dout, the gradient that comes in", t[last[ROLE_GRADIENT_OUT]].option);
    else if (count[ROLE_GRADIENT_IN] && w->j.linear && !w->path[DY])
        complain("--%s needs --dout, the gradient of out", t[last[ROLE_GRADIENT_IN]].option);
    else if (count[ROLE_GRADIENT_IN] && !count[ROLE_GRADIENT_OUT])
        complain("--%s is given, but no gradient is asked for (such as --%s FILE)", t[last[ROLE_GRADIENT_IN]].option,
                 w->j.linear ? "dx" : "dq");
    else if (!count[ROLE_OUTPUT] && !count[ROLE_GRADIENT_OUT] && !w->timed)
        complain("nothing is asked for: name an output (--out FILE) or give --time");
    else
        return count[ROLE_GRADIENT_OUT] > 0;
    return -1;
}

int file_job_finish(file_job *w, int main) {
    int backward = needs_backward(w);
    if (backward < 0 || !compute(w, backward))
        return EXIT_TROUBLE;
    return save(w, main);
}

/* SPDX-License-Identifier: Apache-2.0
 * Which problems `heddle verify` runs, what stands over them, and a line of JSON for each check. */
#include "verify.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void begin_report(verify *v, const char *name, const char *heading, ...) {
    va_list list;
    va_start(list, heading);
    vsnprintf(v->heading, sizeof v->heading, heading, list);
    va_end(list);
    v->report = name;
}

bool begin_problem(verify *v, const char *format, ...) {
    char whole[sizeof v->name + 32];
    va_list list;
    va_start(list, format);
    vsnprintf(v->name, sizeof v->name, format, list);
    va_end(list);
    snprintf(whole, sizeof whole, "%s: %s", v->report, v->name);
    if (v->filter && !strstr(whole, v->filter))
        return false;
    if (v->counts) {
        v->problems++;
        return false;
    }
    show_progress(v->done++, v->problems, v->begin);
    return true;
}

void begin_lines(verify *v) {
    hide_progress();
    fputs(v->heading, stdout);
    v->heading[0] = 0;
}

bool verify_trial(verify *v, const problem *p, arena *m, heddle_dtype dtype, trial *t) {
    if (!trial_run(p, m, v->device, dtype, t))
        return false;
    about_problem(v, p, dtype);
    begin_lines(v);
    printf(" %s\n", v->name);
    return true;
}

/* The instruction set, or the family, of a pass's kernel: the end of its name. */
static void name_family(const problem *p, heddle_device device, heddle_dtype dtype, heddle_pass pass, char *text,
                        size_t n) {
    char kernel[128] = "";
    job j = p->j;
    job_set_dtype(&j, dtype);
    job_set_device(&j, device);
    if (j.linear)
        heddle_norm_linear_kernel(&j.l, pass, kernel, sizeof kernel);
    else
        heddle_attention_kernel(&j.a, pass, kernel, sizeof kernel);
    const char *in_two = strstr(kernel, "_sm90_f32"), *at = in_two ? in_two : strrchr(kernel, '_');
    snprintf(text, n, "%s", at ? at + 1 : "");
}

void about_problem(verify *v, const problem *p, heddle_dtype dtype) {
    v->dtype = dtype;
    for (int pass = HEDDLE_FORWARD; pass <= HEDDLE_BACKWARD && v->json; pass++)
        name_family(p, v->device, dtype, (heddle_pass)pass, v->family[pass], sizeof v->family[pass]);
}

static void put_number(FILE *to, const char *key, double x) {
    if (isfinite(x))
        fprintf(to, ", \"%s\": %.4g", key, x);
    else
        fprintf(to, ", \"%s\": null", key);
}

/* A gradient is d and the name of what it is of. */
void record(verify *v, const char *what, double error, double plain, bool passed) {
    FILE *to = v->json;
    if (!to)
        return;
    fputs("{\"case\": ", to);
    put_json_string(to, v->report);
    fputs(", \"name\": ", to);
    put_json_string(to, v->name);
    fputs(", \"check\": ", to);
    put_json_string(to, what);
    fprintf(to, ", \"device\": \"%s\", \"family\": ", device_name(v->device));
    put_json_string(to, v->family[what[0] == 'd' ? HEDDLE_BACKWARD : HEDDLE_FORWARD]);
    fprintf(to, ", \"dtype\": \"%s\"", dtype_name(v->dtype));
    put_number(to, "error", error);
    put_number(to, "over_plain", plain > 0 ? error / plain : NAN);
    fprintf(to, ", \"passed\": %s}\n", passed ? "true" : "false");
}

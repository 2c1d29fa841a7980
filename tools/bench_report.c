/* SPDX-License-Identifier: Apache-2.0
 * Rows as JSON, and the page: report.html, which is in this object, with the rows put in its marked places. */
#define _POSIX_C_SOURCE 200809L
#include "bench.h"
#include "npy.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef __APPLE__
#define READ_ONLY ".section __TEXT,__const\n_"
#define AS_BEFORE ".text\n"
#else
#define READ_ONLY ".section .rodata\n"
#define AS_BEFORE ".previous\n"
#endif
__asm__(READ_ONLY "report_html:\n"
                  ".incbin \"" REPORT_HTML "\"\n"
                  ".byte 0\n" AS_BEFORE);
extern const char report_html[];

/* How bench/cpu.py calls the same problem; of norm-linear it has none with these options. */
static void put_key(FILE *to, const bench_row *row) {
    const bench_case *c = row->c;
    const char *pass = row->pass == HEDDLE_FORWARD ? "forward" : "backward";
    char text[96];
    if (c->option && c->h == 0)
        snprintf(text, sizeof text, "%s", c->option);
    else if (c->h == 0)
        snprintf(text, sizeof text, c->m == 2048 ? "%s %s" : "other %s %s", dtype_name(c->dtype), pass);
    else
        snprintf(text, sizeof text, "%s%sb%lld h%lld s%lld d%lld%s%s%s %s",
                 c->dtype == HEDDLE_F32 ? "" : dtype_name(c->dtype), c->dtype == HEDDLE_F32 ? "" : " ", (long long)c->b,
                 (long long)c->h, (long long)c->sk, (long long)c->d, c->mask == HEDDLE_MASK_NONE ? "" : " causal",
                 c->option ? " " : "", c->option ? c->option : "", pass);
    put_json_string(to, text);
}

void bench_row_json(FILE *to, const bench_row *row, const bench_machine *machine) {
    const bench_case *c = row->c;
    fprintf(to, "{\"op\": \"%s\", \"pass\": \"%s\", \"dtype\": \"%s\", \"device\": \"%s\", \"name\": ",
            c->h ? "attention" : "norm-linear", row->pass == HEDDLE_FORWARD ? "forward" : "backward",
            dtype_name(c->dtype), device_name(machine->device));
    put_json_string(to, row->name);
    fputs(", \"key\": ", to);
    put_key(to, row);
    if (c->h == 0)
        fprintf(to, ", \"m\": %lld, \"k\": %lld, \"n\": %lld, \"prepared_bytes\": %lld", (long long)c->m,
                (long long)c->k, (long long)c->n, (long long)row->prepared_bytes);
    else
        fprintf(to, ", \"b\": %lld, \"h\": %lld, \"hk\": %lld, \"sq\": %lld, \"sk\": %lld, \"d\": %lld, \"causal\": %s",
                (long long)c->b, (long long)c->h, (long long)c->hk, (long long)c->sq, (long long)c->sk, (long long)c->d,
                c->mask == HEDDLE_MASK_NONE ? "false" : "true");
    fputs(", \"option\": ", to);
    put_json_string(to, c->option ? c->option : "");
    fputs(", \"kernel\": ", to);
    put_json_string(to, row->kernel);
    fprintf(to, ", \"isa\": \"%s\", \"threads\": %d, \"ms\": %.6g, \"ms_low\": %.6g, \"ms_high\": %.6g", machine->isa,
            machine->threads, 1e3 * row->seconds, 1e3 * row->low, 1e3 * row->high);
    const double rate = row->seconds > 0 ? 1e-9 * row->work / row->seconds : 0;
    if (row->decode)
        fprintf(to, ", \"gbytes\": %.5g, \"read_gbytes\": %.5g", rate, 1e-9 * row->peak);
    else
        fprintf(to, ", \"gflops\": %.5g, \"peak_gflops\": %.5g", rate, 1e-9 * row->peak);
    fprintf(to, ", \"rate\": %.5g, \"unit\": \"%s\", \"fraction\": %.4f, \"peak_of\": \"%s\", \"error\": ", rate,
            row->decode ? "GB/s" : "GFLOP/s", row->fraction, row->peak_of);
    if (row->error >= 0 && isfinite(row->error))
        fprintf(to, "%.4g}", row->error);
    else
        fputs("null}", to);
}

/* -------------------------------------------------------------------------------------------------------- the page */

static void put_machine(FILE *to, const bench_machine *m) {
    char number[64];
    fputs("{\"heddle\": ", to);
    put_json_string(to, heddle_version_string());
    fputs(", \"device\": ", to);
    put_json_string(to, device_name(m->device));
    snprintf(number, sizeof number, "%s, %d thread%s", m->isa, m->threads, m->threads == 1 ? "" : "s");
    if (strcmp(m->text, number) != 0) { /* a CPU is told of by these alone */
        fputs(", \"what it is\": ", to);
        put_json_string(to, m->text);
    }
    fputs(", \"processor\": ", to);
    put_json_string(to, m->cpu);
    fputs(", \"instruction set\": ", to);
    put_json_string(to, number);
    if (m->cores > 0)
        fprintf(to, ", \"cores\": \"%ld\"", m->cores);
    if (m->memory > 0)
        fprintf(to, ", \"memory\": \"%.1f GiB\"", m->memory / (1 << 30));
    fputs(", \"system\": ", to);
    put_json_string(to, m->os);
    if (m->copy > 0) {
        snprintf(number, sizeof number, "%.2f TB/s, read plus written", 1e-12 * m->copy);
        fputs(", \"a copy within the device\": ", to);
        put_json_string(to, number);
    }
    fputs(", \"measured at\": ", to);
    put_json_string(to, m->date);
    fputs("}", to);
}

/* The lines of a file of bench/results that have a rate of the kind that is compared here. */
bool bench_peers(memory_file *to, const char *path) {
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    bool good = true;
    FILE *from = fopen(path, "r");
    if (!from)
        return complain("%s: %s", path, strerror(errno)), false;
    while (good && (n = getline(&line, &room, from)) > 0) {
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            line[--n] = 0;
        good = n == 0 || (line[0] == '{' && line[n - 1] == '}');
        if (!good)
            complain("%s: a line is no row of bench/results", path);
        if (!good || n == 0 || !(strstr(line, "_rest\"") || strstr(line, "\"section\"")))
            continue;
        fputs(to->n > 0 ? ",\n" : "", to->file);
        for (const char *at = line; *at; at++) /* which only strings hold, and the script must not */
            *at == '<' ? fputs("\\u003c", to->file) : putc(*at, to->file);
        fflush(to->file);
    }
    if (good && !feof(from)) {
        complain("%s: %s", path, strerror(errno));
        good = false;
    }
    fclose(from);
    free(line);
    return good;
}

/* The template up to a mark; what is behind it is next. */
static const char *put_until(FILE *to, const char *from, const char *mark) {
    const char *at = strstr(from, mark);
    fwrite(from, 1, (size_t)(at - from), to);
    return at + strlen(mark);
}

bool bench_report(const char *path, const bench_machine *machine, const char *rows, const char *peers) {
    memory_file page;
    npy_outputs out = {0};
    if (!memory_open(&page))
        return false;
    const char *rest = put_until(page.file, report_html, "/*MACHINE*/ null");
    put_machine(page.file, machine);
    rest = put_until(page.file, rest, "/*ROWS*/");
    fputs(rows, page.file);
    rest = put_until(page.file, rest, "/*PEERS*/");
    fputs(peers, page.file);
    fputs(rest, page.file);
    const bool good = memory_flush(&page) && npy_stage_bytes(&out, path, page.text, page.n) && npy_commit(&out);
    npy_abandon(&out);
    memory_close(&page);
    return good;
}

/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "common.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Windows has aligned memory, but of another kind than what free() takes. */
#ifdef _WIN32
#include <malloc.h>
#define aligned_alloc(alignment, bytes) _aligned_malloc(bytes, alignment)
#define aligned_free _aligned_free
#else
#define aligned_free free
#endif

typedef struct arena_block {
    struct arena_block *next;
    void *p;
    void (*release)(void *);
} arena_block;

int complain(const char *format, ...) {
    va_list args;
    hide_progress();
    fflush(stdout);
    fputs("heddle: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return EXIT_TROUBLE;
}

int read_options(const line_rules *rules, int argc, char **argv, void *to) {
    uint64_t given = 0; /* a bit for each row of the options */
    bool help = false;
    int option, row, other = -1;
    while ((option = getopt_long(argc, argv, rules->passes_on ? "+" : "", rules->options, &row)) != -1) {
        if (option == '?') /* getopt_long has complained */
            return EXIT_TROUBLE;
        if (given >> row & 1 && option != rules->repeats)
            return complain("--%s is given twice; see heddle %s --help", rules->options[row].name, rules->command);
        given |= UINT64_C(1) << row;
        if (option == 'h')
            help = true;
        else if (rules->take(to, option, optarg))
            other = row;
        else
            return EXIT_TROUBLE;
    }
    const bool passed_on = rules->passes_on && optind < argc && strcmp(argv[optind - 1], "--") == 0;
    if (optind < argc && (help || !passed_on))
        return complain("'%s' is not an option; see heddle %s --help", argv[optind], rules->command);
    if (help && other >= 0)
        return complain("--%s is given beside --help, which stands alone", rules->options[other].name);
    if (help)
        fputs(rules->usage, stdout);
    return help ? 0 : NEXT;
}

static void adopt(arena *m, void *p, void (*release)(void *)) {
    arena_block *block = malloc(sizeof *block);
    if (!block)
        exit(complain("out of memory"));
    *block = (arena_block){m->blocks, p, release};
    m->blocks = block;
}

void arena_adopt(arena *m, void *p) {
    adopt(m, p, free);
}

void *arena_alloc(arena *m, size_t bytes) {
    size_t rounded = bytes > SIZE_MAX - 64 ? 0 : (bytes + 64) / 64 * 64; /* never 0: a pointer to nothing is not NULL */
    void *p = rounded ? aligned_alloc(64, rounded) : NULL;
    if (!p)
        exit(complain("out of memory: %zu bytes were asked for", bytes));
    memset(p, 0xff, rounded);
    adopt(m, p, aligned_free);
    return p;
}

void *arena_array(arena *m, int64_t count, size_t size) {
    if (count < 0 || (uint64_t)count > SIZE_MAX / size)
        exit(complain("out of memory: %lld elements of %zu bytes were asked for", (long long)count, size));
    return arena_alloc(m, (size_t)count * size);
}

void arena_free(arena *m) {
    while (m->blocks) {
        arena_block *block = m->blocks;
        m->blocks = block->next;
        block->release(block->p);
        free(block);
    }
}

bool parse_int(const char *option, const char *text, int64_t least, int64_t most, int64_t *out) {
    char *end;
    errno = 0;
    long long x = strtoll(text, &end, 10);
    if (end == text || *end) {
        complain("%s: '%s' is not a whole number", option, text);
        return false;
    }
    if (errno == ERANGE || x < least || x > most) {
        complain("%s: %s is outside %lld to %lld", option, text, (long long)least, (long long)most);
        return false;
    }
    *out = x;
    return true;
}

bool parse_seed(const char *option, const char *text, uint64_t *out) {
    char *end;
    errno = 0;
    unsigned long long x = strtoull(text, &end, 0);
    if (end == text || *end || errno || strchr(text, '-')) {
        complain("%s: '%s' is not a whole number from 0 to 2^64-1", option, text);
        return false;
    }
    *out = x;
    return true;
}

bool parse_real(const char *option, const char *text, double *out) {
    char *end;
    double x = strtod(text, &end);
    if (end == text || *end || !isfinite(x)) {
        complain("%s: '%s' is not a finite number", option, text);
        return false;
    }
    *out = x;
    return true;
}

int parse_list(const char *option, const char *text, int most, int64_t *out) {
    char *copy = strdup(text), *item = copy;
    int count = 0;
    bool ok = true;
    if (!copy)
        exit(complain("out of memory"));
    for (char *comma = copy; ok && comma; count++) {
        comma = strchr(item, ',');
        if (comma)
            *comma = 0;
        if (count == most) {
            complain("%s: '%s' has more than %d numbers", option, text, most);
            ok = false;
        } else {
            ok = parse_int(option, item, INT64_MIN, INT64_MAX, &out[count]);
        }
        item = comma ? comma + 1 : item;
    }
    free(copy);
    return ok ? count : 0;
}

bool parse_choice(const char *option, const char *text, const char *const *names, int *out) {
    char list[256] = "";
    for (int i = 0; names[i]; i++) {
        if (!strcmp(text, names[i])) {
            *out = i;
            return true;
        }
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", names[i]);
    }
    complain("%s: '%s' is none of %s", option, text, list);
    return false;
}

static const char *const dtype_names[] = {"f32", "bf16", "f16", "f64", NULL};
static const char *const device_names[] = {"cpu", "ref", "cuda", NULL};

bool parse_dtype(const char *option, const char *text, heddle_dtype *out) {
    int i;
    if (!parse_choice(option, text, dtype_names, &i))
        return false;
    *out = (heddle_dtype)i;
    return true;
}

bool parse_device(const char *option, const char *text, heddle_device *out) {
    int i;
    if (!parse_choice(option, text, device_names, &i))
        return false;
    *out = (heddle_device)i;
    return true;
}

const char *dtype_name(heddle_dtype dtype) {
    return dtype_names[dtype];
}

const char *device_name(heddle_device device) {
    return device_names[device];
}

bool device_ready(heddle_device device) {
    char why[256] = "";
    if (heddle_device_available(device, why, sizeof why) != HEDDLE_OK) {
        complain("--device %s: %s", device_name(device), why);
        return false;
    }
    return true;
}

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static bool progress_is_shown;

/* Not for every part, where there are thousands a second. */
void show_progress(int64_t done, int64_t all, double begin) {
    static double last;
    const double at = now(), left = done ? (at - begin) / (double)done * (double)(all - done) : 0;
    if (!isatty(STDERR_FILENO) || (progress_is_shown && at - last < 0.1))
        return;
    last = at;
    hide_progress();
    fflush(stdout);
    fprintf(stderr, "%lld of %lld", (long long)done, (long long)all);
    if (done)
        fprintf(stderr, ", %lld:%02d left", (long long)left / 60, (int)((long long)left % 60));
    fflush(stderr);
    progress_is_shown = true;
}

void hide_progress(void) {
    if (progress_is_shown)
        fputs("\r\033[K", stderr);
    progress_is_shown = false;
}

void put_json_string(FILE *to, const char *text) {
    putc('"', to);
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '"' || *p == '\\')
            fprintf(to, "\\%c", *p);
        else if (*p < 0x20 || *p == '<')
            fprintf(to, "\\u%04x", *p);
        else
            putc(*p, to);
    }
    putc('"', to);
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

/* Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. */
uint64_t random_bits(random_state *r) {
    uint64_t z = r->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

double random_uniform(random_state *r) {
    return (double)(random_bits(r) >> 11) * 0x1p-53;
}

double random_normal(random_state *r) {
    double radius = sqrt(-2.0 * log(1.0 - random_uniform(r)));
    return radius * cos(6.283185307179586 * random_uniform(r));
}

int64_t random_between(random_state *r, int64_t low, int64_t high) {
    return low + (int64_t)(random_bits(r) % (uint64_t)(high - low + 1));
}

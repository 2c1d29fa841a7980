/* SPDX-License-Identifier: Apache-2.0
 * Bytes to a command line of `heddle`, words from its own vocabulary and free ones, run to the end on small files.
 * Everything that it allocates or opens is counted: nothing may be left, but where it ends by exit(), which only memory
 * that is not to be had is a reason for. */
#define _GNU_SOURCE
#define main heddle_main
int heddle_main(int argc, char **argv);
#include "../../tools/heddle.c"
#undef main

#include "../../tools/job.h"
#include "../../tools/npy.h"
#include "../../tools/verify.h"
#include "bytes.h"

#include <dirent.h>
#include <getopt.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

/* ------------------------------------------------------- what the command takes is given back (linked with --wrap) */

enum { MOST_BLOCKS = 4096, MOST_FILES = 32, MOST_BYTES = 1 << 21 };
static void *blocks[MOST_BLOCKS];
static FILE *files[MOST_FILES];
static int ours, running, exited; /* `ours`: what is called is the command */
static jmp_buf at_exit;
static void (*leaving)(void); /* what the command gave to atexit() */

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *p, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
char *__real_strdup(const char *text);
char *__real_realpath(const char *path, char *resolved);
void __real_free(void *p);
FILE *__real_fopen(const char *path, const char *mode);
int __real_fclose(FILE *file);
void __real_exit(int status) __attribute__((noreturn));
int __real_atexit(void (*f)(void));
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
char *__wrap_strdup(const char *text);
char *__wrap_realpath(const char *path, char *resolved);
void __wrap_free(void *p);
FILE *__wrap_fopen(const char *path, const char *mode);
int __wrap_fclose(FILE *f);
void __wrap_exit(int status);
int __wrap_atexit(void (*f)(void));

static void *counted(void *p) {
    for (int i = 0; p && running && i < MOST_BLOCKS; i++)
        if (!blocks[i]) {
            blocks[i] = p;
            return p;
        }
    MUST(!p || !running);
    return p;
}

static void given_back(const void *p) {
    for (int i = 0; p && running && i < MOST_BLOCKS; i++)
        if (blocks[i] == p) {
            blocks[i] = NULL;
            return;
        }
}

void *__wrap_malloc(size_t size) {
    return size > MOST_BYTES ? NULL : counted(__real_malloc(size));
}

void *__wrap_calloc(size_t count, size_t size) {
    return size && count > MOST_BYTES / size ? NULL : counted(__real_calloc(count, size));
}

void *__wrap_realloc(void *p, size_t size) {
    if (size > MOST_BYTES)
        return NULL;
    given_back(p);
    return counted(__real_realloc(p, size));
}

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return size > MOST_BYTES ? NULL : counted(__real_aligned_alloc(alignment, size));
}

char *__wrap_strdup(const char *text) {
    return counted(__real_strdup(text));
}

char *__wrap_realpath(const char *path, char *resolved) {
    char *p = __real_realpath(path, resolved);
    return resolved ? p : counted(p);
}

void __wrap_free(void *p) {
    given_back(p);
    __real_free(p);
}

FILE *__wrap_fopen(const char *path, const char *mode) {
    FILE *f = __real_fopen(path, mode);
    for (int i = 0; f && running && i < MOST_FILES; i++)
        if (!files[i]) {
            files[i] = f;
            break;
        }
    return f;
}

int __wrap_fclose(FILE *f) {
    for (int i = 0; i < MOST_FILES; i++)
        if (files[i] == f)
            files[i] = NULL;
    return __real_fclose(f);
}

int __wrap_atexit(void (*f)(void)) {
    if (!ours)
        return __real_atexit(f);
    MUST(!leaving || leaving == f);
    leaving = f;
    return 0;
}

void __wrap_exit(int status) {
    if (!running)
        __real_exit(status);
    MUST(status == EXIT_TROUBLE);
    exited = 1;
    if (leaving)
        leaving();
    longjmp(at_exit, 1);
}

/* After exit() the system takes it all. */
static int left(void) {
    int count = 0;
    for (int i = 0; i < MOST_BLOCKS; i++)
        if (blocks[i]) {
            count++;
            __real_free(blocks[i]);
            blocks[i] = NULL;
        }
    for (int i = 0; i < MOST_FILES; i++)
        if (files[i]) {
            count++;
            __real_fclose(files[i]);
            files[i] = NULL;
        }
    return count;
}

/* ------------------------------------------------------------------- what takes long is left out, and so is exec */

int __wrap_execv(const char *path, char *const argv[]);
double __wrap_job_seconds(const job *j, heddle_pass pass);
bool __wrap_trial_run(const problem *p, arena *m, heddle_device device, heddle_dtype dtype, trial *t);

int __wrap_execv(const char *path, char *const argv[]) {
    (void)path;
    (void)argv;
    errno = ENOEXEC;
    return -1;
}

double __wrap_job_seconds(const job *j, heddle_pass pass) {
    if (pass == HEDDLE_BACKWARD && !job_run(j, HEDDLE_FORWARD))
        return -1;
    return job_run(j, pass) ? 1e-3 : -1;
}

bool __wrap_trial_run(const problem *p, arena *m, heddle_device device, heddle_dtype dtype, trial *t) {
    (void)p, (void)m, (void)device, (void)dtype, (void)t;
    return false;
}

#define NO_REPORT(name)                                                                                                \
    bool __wrap_##name(verify *v);                                                                                     \
    bool __wrap_##name(verify *v) {                                                                                    \
        v->checked++;                                                                                                  \
        return true;                                                                                                   \
    }
NO_REPORT(verify_day19)
NO_REPORT(verify_day50)
NO_REPORT(verify_day55)
NO_REPORT(verify_p22)
NO_REPORT(verify_fa2_warps)
NO_REPORT(verify_sweep)

/* --------------------------------------------------------------------------------------------------- command lines */

static const char *const words[] = {
    "attention", "norm-linear", "random", "info", "verify", "demo", "--help", "--version", "--", "help",
    /* files */
    "q.npy", "k.npy", "v.npy", "do.npy", "bias.npy", "row.npy", "mask.npy", "heads.npy", "cu.npy", "len.npy", "p.npy",
    "q0.npy", "h16.npy", "f64.npy", "x.npy", "w.npy", "g.npy", "c.npy", "dy.npy", "input.npy", "missing.npy",
    "link.npy", "o.npy", "a.npy", "b.npy", "no/where.npy",
    /* options */
    "--q", "--k", "--v", "--bias", "--bool-mask", "--alibi", "--sinks", "--cu-seqlens-q", "--cu-seqlens-k",
    "--seqlens-q", "--seqlens-k", "--out", "--lse", "--weights", "--dout", "--dlse", "--dweights", "--dq", "--dk",
    "--dv", "--dbias", "--dsinks", "--dtype", "--device", "--deterministic", "--time", "--scale", "--mask", "--window",
    "--softcap", "--dropout", "--seed", "--x", "--w", "--gamma", "--beta", "--mean", "--rstd", "--dx", "--dgamma",
    "--dbeta", "--dw", "--eps", "--norm", "--shape", "--std", "--p", "--case", "--random", "--verbose", "--quick",
    "--text",
    /* values */
    "f32", "bf16", "f16", "f64", "bool", "i32", "cpu", "ref", "cuda", "none", "causal-top-left", "causal-bottom-right",
    "layer", "rms", "0", "1", "-1", "0.5", "3,4", "1,2,5,8", "2,-1", "nan", "1e300", "99999999999999999999", "p22",
    "--filter", "--bins", "--json"};
enum { WORDS = sizeof words / sizeof *words };

/* Options that belong together, so that runs are frequent. */
static const char *const lines[][16] = {
    {"attention", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "o.npy", NULL},
    {"attention", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--dout", "do.npy", "--dq", "a.npy", "--dk", "b.npy",
     NULL},
    {"attention", "--q", "p.npy", "--k", "p.npy", "--v", "p.npy", "--cu-seqlens-q", "cu.npy", "--cu-seqlens-k",
     "cu.npy", "--out", "o.npy", NULL},
    {"norm-linear", "--x", "x.npy", "--w", "w.npy", "--out", "o.npy", NULL},
    {"norm-linear", "--x", "x.npy", "--w", "w.npy", "--dout", "dy.npy", "--dx", "a.npy", "--dw", "b.npy", NULL},
    {"random", "--shape", "3,4", "--out", "o.npy", NULL},
    {"attention", "--q", "input.npy", "--k", "input.npy", "--v", "input.npy", "--out", "o.npy", NULL},
};
enum { LINES = sizeof lines / sizeof *lines, MOST_WORDS = 48, LONGEST = 32 };

typedef struct command_line {
    char word[MOST_WORDS][LONGEST];
    char *argv[MOST_WORDS + 1];
    int argc;
} command_line;

static void add_word(command_line *l, const char *word) {
    if (l->argc == MOST_WORDS)
        return;
    snprintf(l->word[l->argc], LONGEST, "%s", word);
    l->argv[l->argc] = l->word[l->argc];
    l->argv[++l->argc] = NULL;
}

/* Letters that lead out of this directory are no part of it. */
static void free_word(bytes *b, char word[LONGEST]) {
    static const char letters[] = "0123456789,.-=+eEnaifqkvdopxyzXL_ N:%'\"";
    int n = (int)take_between(b, 0, 12);
    for (int i = 0; i < n; i++)
        word[i] = letters[take_between(b, 0, (int)sizeof letters - 2)];
    word[n] = 0;
}

static void read_line(bytes *b, command_line *l) {
    char word[LONGEST];
    add_word(l, "heddle");
    const int64_t line = take_between(b, 0, LINES + 1);
    for (int i = 0; line < LINES && lines[line][i]; i++)
        add_word(l, lines[line][i]);
    for (int n = (int)take_between(b, 0, 12); n > 0; n--) {
        const int64_t which = take_between(b, 0, WORDS + 10);
        if (which < WORDS)
            snprintf(word, sizeof word, "%s", words[which]);
        else
            free_word(b, word);
        if (take_number(b, 1) < 16 && l->argc > 1) { /* in place of one */
            snprintf(l->word[take_between(b, 1, l->argc - 1)], LONGEST, "%s", word);
            continue;
        }
        add_word(l, word);
    }
}

/* --------------------------------------------------------------------------------------------------------- files */

static char directory[64];
static char kept[64][32];
static int kept_count;

static void make(const char *line) {
    char copy[256], *argv[20], *rest = copy;
    int argc = 0;
    snprintf(copy, sizeof copy, "heddle random %s", line);
    for (char *word; (word = strsep(&rest, " "));)
        argv[argc++] = word;
    argv[argc] = NULL;
    optind = 0;
    ours = 1;
    MUST(run(argc, argv) == 0);
    ours = 0;
}

static void make_lengths(const char *path, const int32_t *x, int64_t n) {
    npy_outputs outputs = {0};
    int32_t copy[8];
    memcpy(copy, x, (size_t)n * sizeof *x);
    const npy_array a = {.type = NPY_I32, .rank = 1, .shape = {n}, .count = n, .data = copy};
    MUST(npy_stage(&outputs, path, &a) && npy_commit(&outputs));
}

static int is_kept(const char *name) {
    for (int i = 0; i < kept_count; i++)
        if (!strcmp(kept[i], name))
            return 1;
    return 0;
}

/* Calls f with each name in the directory. */
static void each_file(void (*f)(const char *name)) {
    DIR *d = opendir(".");
    MUST(d);
    for (struct dirent *entry; (entry = readdir(d));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            f(entry->d_name);
    closedir(d);
}

static void keep(const char *name) {
    MUST(kept_count < 64 && strlen(name) < sizeof *kept);
    strcpy(kept[kept_count++], name);
}

static void remove_other(const char *name) {
    MUST(strncmp(name, ".heddle", 7) != 0); /* the command cleans up */
    if (!is_kept(name))
        unlink(name);
}

static void remove_any(const char *name) {
    unlink(name);
}

static void remove_all(void) {
    running = 0;
    each_file(remove_any);
    rmdir("folder");
    if (chdir("/") == 0)
        rmdir(directory);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    static const char *const made[] = {"--shape 1,2,5,8 --out q.npy",
                                       "--shape 1,1,7,8 --out k.npy",
                                       "--shape 1,1,7,4 --out v.npy",
                                       "--shape 1,2,5,4 --out do.npy",
                                       "--shape 5,7 --out bias.npy",
                                       "--shape 1,7 --out row.npy",
                                       "--shape 1,7 --dtype bool --out mask.npy",
                                       "--shape 2 --out heads.npy",
                                       "--shape 6,2,8 --out p.npy",
                                       "--shape 1,2,0,8 --out q0.npy",
                                       "--shape 3,7,8 --dtype f16 --out h16.npy",
                                       "--shape 3,7,8 --dtype f64 --out f64.npy",
                                       "--shape 2,3,8 --out x.npy",
                                       "--shape 5,8 --out w.npy",
                                       "--shape 8 --out g.npy",
                                       "--shape 5 --out c.npy",
                                       "--shape 2,3,5 --out dy.npy"};
    (void)argc;
    (void)argv;
    const char *place = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(directory, sizeof directory, "%s/heddle-fuzz-XXXXXX", place);
    MUST(mkdtemp(directory) && chdir(directory) == 0 && __real_atexit(remove_all) == 0);
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        make(made[i]);
    make_lengths("cu.npy", (const int32_t[]){0, 2, 2, 6}, 4);
    make_lengths("len.npy", (const int32_t[]){3}, 1);
    MUST(symlink("far.npy", "link.npy") == 0 && mkdir("folder", 0777) == 0);
    each_file(keep);
    MUST(freopen("/dev/null", "w", stdout));
    return 0;
}

/* What is left of the input is a file that the line may name. */
static void write_input(const bytes *b) {
    FILE *out = __real_fopen("input.npy", "wb");
    MUST(out && fwrite(b->at, 1, (size_t)(b->end - b->at), out) == (size_t)(b->end - b->at));
    MUST(__real_fclose(out) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static command_line l;
    bytes b = {data, data + size};
    l.argc = 0;
    read_line(&b, &l);
    write_input(&b);
    optind = 0; /* glibc: getopt begins anew */
    exited = 0;
    ours = running = 1;
    if (setjmp(at_exit) == 0) {
        const int status = heddle_main(l.argc, l.argv);
        MUST(status == 0 || status == EXIT_TROUBLE || status == EXIT_CHECK_FAILED);
    }
    ours = running = 0;
    const int count = left();
    MUST(exited || count == 0);
    each_file(remove_other);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0
 * What every command of the tool uses: memory, messages, numbers from text, time, random numbers. */
#ifndef HEDDLE_TOOLS_COMMON_H
#define HEDDLE_TOOLS_COMMON_H

#include "heddle.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Exit statuses: 0 success, 1 a check failed, 2 the command could not be carried out. */
enum { EXIT_CHECK_FAILED = 1, EXIT_TROUBLE = 2 };

/* The commands. argv[0] is the name of the subcommand. */
int cmd_info(int argc, char **argv);
int cmd_attention(int argc, char **argv);
int cmd_norm_linear(int argc, char **argv);
int cmd_random(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_demo(int argc, char **argv);

/* Prints "heddle: ..." as one line on stderr and returns EXIT_TROUBLE. */
__attribute__((format(printf, 1, 2))) int complain(const char *format, ...);

/* How a command's line is read. 'h' is the help's option, at most 64 there are. */
struct option;
typedef struct line_rules {
    const char *command, *usage;
    const struct option *options;
    bool (*take)(void *to, int option, char *text); /* complains and returns false where it is not as it should be */
    int repeats;                                    /* the option that may be given several times; 0: none */
    bool passes_on;                                 /* behind "--" stands what is another program's, from optind on */
} line_rules;

/* Each option goes to `take`; --help prints the usage. What is given twice is refused, and so is what --help would pass over. NEXT: go
 * on; else the command's exit status. */
enum { NEXT = -1 };
int read_options(const line_rules *rules, int argc, char **argv, void *to);

/* Memory that is freed all at once. */
typedef struct arena {
    struct arena_block *blocks;
} arena;

/* Aligned to 64 bytes and filled with 0xff, which is NaN in every floating-point type: what a kernel forgets to write,
 * or reads without having written it, shows. Ends the program if there is no memory. */
void *arena_alloc(arena *m, size_t bytes);
/* count elements of `size` bytes, with the product checked. */
void *arena_array(arena *m, int64_t count, size_t size);
/* Makes `p`, which came from malloc, the arena's. */
void arena_adopt(arena *m, void *p);
void arena_free(arena *m);

/* Each parses all of `text` as the argument of `option`, or complains and returns false. */
bool parse_int(const char *option, const char *text, int64_t least, int64_t most, int64_t *out);
bool parse_seed(const char *option, const char *text, uint64_t *out);
bool parse_real(const char *option, const char *text, double *out);
/* Whole numbers separated by commas; the count, or 0 after a complaint. */
int parse_list(const char *option, const char *text, int most, int64_t *out);
/* One of names[0], names[1], ..., NULL. */
bool parse_choice(const char *option, const char *text, const char *const *names, int *out);
bool parse_dtype(const char *option, const char *text, heddle_dtype *out);
bool parse_device(const char *option, const char *text, heddle_device *out);

const char *dtype_name(heddle_dtype dtype);
const char *device_name(heddle_device device);

/* Whether the device can run; complains with the library's reason if not. */
bool device_ready(heddle_device device);

/* Seconds on a clock that only goes forward. */
double now(void);

/* On a terminal a line on stderr: how many parts of a job are done, and how long the rest will take at the pace since
 * `begin`. It has to be hidden before anything is printed. */
void show_progress(int64_t done, int64_t all, double begin);
void hide_progress(void);

/* A string of JSON that may also stand in a script of a page. */
void put_json_string(FILE *to, const char *text);

/* The middle one; sorts x. */
double median(double *x, int n);

/* A small generator (splitmix64) for inputs; the same numbers everywhere. */
typedef struct random_state {
    uint64_t state;
} random_state;

uint64_t random_bits(random_state *r);
double random_uniform(random_state *r);                             /* in [0, 1) */
double random_normal(random_state *r);                              /* mean 0, deviation 1 */
int64_t random_between(random_state *r, int64_t low, int64_t high); /* both included */

#endif

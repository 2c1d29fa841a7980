/* SPDX-License-Identifier: Apache-2.0
 * The command `heddle`: main and its table of subcommands. */
#include "common.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *what;
} commands[] = {
    {"info", cmd_info, "the version, the devices that are there (or why not), instruction sets, threads"},
    {"verify", cmd_verify, "check every kernel on this machine against float64"},
#ifndef _WIN32 /* outputs without a name until they are whole, and what ends a process, are POSIX's */
    {"attention", cmd_attention, "attention of .npy files, forward and backward"},
    {"norm-linear", cmd_norm_linear, "LayerNorm + Linear of .npy files, forward and backward"},
    {"bench", cmd_bench, "time every kernel, beside a peak of this machine that is measured with it"},
    {"demo", cmd_demo, "a FlashAttention program's report, then a small transformer trained on real text"},
    {"random", cmd_random, "make a .npy file of random numbers"},
#endif
};

static void print_usage(FILE *to) {
    fputs("Usage: heddle COMMAND [options]\n\n"
          "Exact attention and fused LayerNorm+Linear, forward and backward.\n\n"
          "Commands\n",
          to);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(to, "  %-12s %s\n", commands[i].name, commands[i].what);
    fputs("\n"
          "heddle COMMAND --help explains one. heddle --version prints the version.\n"
          "An argument without a use is an error that names it, and so is an option that is given twice.\n"
          "Exit status: 0 success, 1 a check failed, 2 the command could not be carried out (and one line says why).\n"
          "Files that a command writes take the places of old ones whole, each in one step; where anything fails, or a "
          "signal\n"
          "ends the command, none does. Only SIGKILL while several take their places may leave some new and others "
          "old.\n\n"
          "Example\n"
          "  n=0; for x in q k v; do n=$((n+1)); heddle random --shape 1,2,33,16 --seed $n --out $x.npy; done\n"
          "  heddle attention --q q.npy --k k.npy --v v.npy --mask causal-top-left --out o.npy\n",
          to);
}

static int run(int argc, char **argv) {
    if (argc < 2) {
        print_usage(stderr);
        return EXIT_TROUBLE;
    }
    const bool help = !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help");
    if (help || !strcmp(argv[1], "--version")) {
        if (argc > 2)
            return complain("'%s' is given beside %s, which stands alone; see heddle --help", argv[2], argv[1]);
        if (help)
            print_usage(stdout);
        else
            printf("heddle %s\n", heddle_version_string());
        return 0;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(argv[1], commands[i].name)) {
            static char name[] = "heddle"; /* getopt_long begins its messages with it, as complain does */
            argv[1] = name;
            return commands[i].run(argc - 1, argv + 1);
        }
    return complain("'%s' is no command; see heddle --help", argv[1]);
}

int main(int argc, char **argv) {
    int status = run(argc, argv);
    if (fflush(stdout) != 0 || ferror(stdout)) /* what was printed may not have arrived: the disk is full */
        return complain("standard output: %s", strerror(errno));
    return status;
}

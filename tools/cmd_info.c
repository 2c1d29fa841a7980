/* SPDX-License-Identifier: Apache-2.0 */
#include "common.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "Usage: heddle info\n"
    "\n"
    "Prints the library's version, each device that it can compute on (or why it cannot), and the instruction sets of\n"
    "the processor, best first. The environment has a say, and of the last three lines it is told what changes\n"
    "nothing:\n"
    "  OMP_NUM_THREADS=n            so many threads\n"
    "  HEDDLE_CPU=avx2              this instruction set, or another that is listed\n"
    "  HEDDLE_CUDA_FAMILY=sm80      on a GPU this family of kernels (sm80, sm90 or small) wherever it can\n"
    "  HEDDLE_CUDA_SHARED=99        on a GPU no more KiB of a block's shared memory, as if it were a smaller one\n";

int cmd_info(int argc, char **argv) {
    static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};
    static const line_rules rules = {.command = "info", .usage = usage, .options = options};
    const int status = read_options(&rules, argc, argv, NULL);
    if (status != NEXT)
        return status;
    printf("heddle %s", heddle_version_string());
    if (heddle_version() != HEDDLE_VERSION)
        printf(" (this command was built for %d.%d.%d)", HEDDLE_VERSION_MAJOR, HEDDLE_VERSION_MINOR,
               HEDDLE_VERSION_PATCH);
    printf("\n\ndevices\n");
    for (int d = HEDDLE_CPU; d <= HEDDLE_CUDA; d++) {
        char text[512] = "";
        bool there = heddle_device_available((heddle_device)d, text, sizeof text) == HEDDLE_OK;
        if (there)
            heddle_device_describe((heddle_device)d, text, sizeof text);
        printf("  %-6s %s%s\n", device_name((heddle_device)d), there ? "" : "absent: ", text);
    }
    printf("\ncpu instruction sets\n");
    for (int i = 0; heddle_cpu_isa_available(i); i++)
        printf("  %s\n", heddle_cpu_isa_available(i));
    const char *wanted = getenv("HEDDLE_CPU");
    printf("  in use: %s", heddle_cpu_isa());
    if (wanted && *wanted && strcmp(wanted, heddle_cpu_isa()) != 0)
        printf(" (HEDDLE_CPU=%s changes nothing)", wanted);
    putchar('\n');
    return 0;
}

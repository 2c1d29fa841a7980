/* SPDX-License-Identifier: Apache-2.0 */
#include "common.h"

#include <getopt.h>
#include <stdio.h>

static const char usage[] =
    "Usage: heddle info\n"
    "\n"
    "Prints the library's version, each device that it can compute on (or why it cannot), and the instruction sets of "
    "the CPU,\n"
    "best first. HEDDLE_CPU=avx2 (or any of those) forces one; OMP_NUM_THREADS=n sets the number of threads.\n"
    "On a GPU HEDDLE_CUDA_FAMILY=sm80, sm90 or small takes that family of kernels wherever it can, and\n"
    "HEDDLE_CUDA_SHARED=99 no more KiB of a block's shared memory, as if the GPU were a smaller one; behind the "
    "device\n"
    "stands what of the environment changes nothing.\n";

int cmd_info(int argc, char **argv) {
    static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};
    const int status = read_options("info", usage, options, argc, argv, NULL, NULL);
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
    printf("  in use: %s\n", heddle_cpu_isa());
    return 0;
}

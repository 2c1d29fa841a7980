/* SPDX-License-Identifier: Apache-2.0
 * Which of the kernels that a plan can name no row has taken: every row of the lists, by family. */
#include "bench.h"

#include <string.h>

typedef struct listed {
    const char *symbol, *pass, *family;
} listed;

static const listed kernels[] = {
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    {"heddle_attention_" #pass "_" #dtype "_d" #dim "_" #variant "_" #family, #pass, #family},
#include "../src/cuda/attention/attention.def"
#undef K
#define K(pass, dtype, family, threads, module) {"heddle_norm_linear_" #pass "_" #dtype "_" #family, #pass, #family},
#include "../src/cuda/norm_linear/norm_linear.def"
#undef K
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

/* What else a call launches goes by the name of one of these; that operands lie as they like (any), or that a bias's gradient is wanted,
 * shows when it runs. */
static bool is_named(const listed *k) {
    if (strstr(k->pass, "_any") || strstr(k->symbol, "_dbiased_"))
        return false;
    return !strncmp(k->pass, "fwd", 3) || !strncmp(k->pass, "few", 3) || !strncmp(k->pass, "dx", 2) ||
           !strcmp(k->pass, "bwd") || !strcmp(k->pass, "dkdv");
}

const char *bench_kernel(int i) {
    for (int x = 0; x < KERNELS; x++)
        if (is_named(&kernels[x]) && i-- == 0)
            return kernels[x].symbol;
    return NULL;
}

static bool was_taken(const char *symbol, const char *rows) {
    char quoted[160];
    snprintf(quoted, sizeof quoted, "\"kernel\": \"%s\"", symbol);
    return strstr(rows, quoted);
}

void bench_untaken(const char *rows) {
    static const char *const families[] = {"sm90", "sm80", "small"};
    printf("\nkernels that a row took, of those that a plan can name:");
    for (int f = 0; f < 3; f++) {
        int all = 0, taken = 0;
        for (int i = 0; i < KERNELS; i++)
            if (is_named(&kernels[i]) && !strcmp(kernels[i].family, families[f])) {
                all++;
                taken += was_taken(kernels[i].symbol, rows);
            }
        printf(" %s %d of %d%s", families[f], taken, all, f < 2 ? "," : "\n");
    }
    printf(
        "HEDDLE_CUDA_FAMILY asks for a family; those of the family that this GPU takes first and that had no row:\n");
    for (int i = 0; i < KERNELS; i++)
        if (is_named(&kernels[i]) && !strcmp(kernels[i].family, families[strstr(rows, "_sm90\"") == NULL]) &&
            !was_taken(kernels[i].symbol, rows))
            printf("  %s\n", kernels[i].symbol);
}

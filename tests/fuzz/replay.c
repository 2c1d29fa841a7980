/* SPDX-License-Identifier: Apache-2.0
 * A main for the fuzz targets where there is no libFuzzer: each file of the directories that are named once, and then as
 * many inputs of random bytes as --random says. Any compiler builds it, and the build's sanitizers look on. */
#define _GNU_SOURCE
#include "bytes.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 1 << 16 };

static int replay_file(const char *path) {
    static uint8_t data[LONGEST];
    FILE *in = fopen(path, "rb");
    if (!in) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(2);
    }
    const size_t n = fread(data, 1, sizeof data, in);
    fclose(in);
    uint8_t *exact = malloc(n ? n : 1); /* AddressSanitizer sees where it ends */
    MUST(exact);
    memcpy(exact, data, n);
    LLVMFuzzerTestOneInput(exact, n);
    free(exact);
    return 1;
}

static int replay_directory(const char *path) {
    DIR *directory = opendir(path);
    int count = 0;
    if (!directory) {
        fprintf(stderr, "%s is no directory\n", path);
        exit(2);
    }
    for (struct dirent *entry; (entry = readdir(directory));) {
        char file[4096];
        if (entry->d_name[0] == '.' || (size_t)snprintf(file, sizeof file, "%s/%s", path, entry->d_name) >= sizeof file)
            continue;
        count += replay_file(file);
    }
    closedir(directory);
    return count;
}

/* Bytes that are more often small than not: they decide between a few things. */
static void replay_random(uint64_t seed) {
    uint8_t data[512];
    uint64_t state = seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
    for (size_t i = 0; i < sizeof data; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        data[i] = (uint8_t)(state >> 32 & (state & 1 ? 0xff : 0x0f));
    }
    LLVMFuzzerTestOneInput(data, 16 + seed % (sizeof data - 16));
}

int main(int argc, char **argv) {
    int count = 0, random = 0;
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], "--random=", 9) == 0)
            random = atoi(argv[i] + 9);
        else
            count += replay_directory(argv[i]);
    for (int i = 0; i < random; i++)
        replay_random((uint64_t)i);
    fprintf(stderr, "%d inputs of the corpus, %d random ones\n", count, random);
    return count + random ? 0 : 1;
}

/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "bench.h"

#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* What stands behind the colon of a line of /proc/cpuinfo that begins so: the first one's. */
static void take(const char *line, const char *name, char *to, size_t n) {
    const size_t length = strlen(name);
    const char *colon = strchr(line, ':');
    if (*to || !colon || strncmp(line, name, length) != 0 || !strchr("\t :", line[length]))
        return;
    snprintf(to, n, "%s", colon + strspn(colon, ": \t"));
    to[strcspn(to, "\n")] = 0;
}

/* As bench/cpu.py records it, which compares by all three: names of virtual machines' processors are of many kinds. */
static void name_processor(char *to, size_t n) {
    char line[512], name[80] = "", family[16] = "", model[16] = "";
    FILE *info = fopen("/proc/cpuinfo", "r");
    while (info && fgets(line, sizeof line, info)) {
        take(line, "model name", name, sizeof name);
        take(line, "cpu family", family, sizeof family);
        if (strncmp(line, "model name", 10) != 0)
            take(line, "model", model, sizeof model);
    }
    if (info)
        fclose(info);
    if (family[0] && model[0])
        snprintf(to, n, "%s, family %s, model %s", name, family, model);
    else
        snprintf(to, n, "%s", name);
}

void bench_describe(bench_machine *machine) {
    struct utsname os;
    struct tm utc;
    time_t t = time(NULL);
    machine->threads = 1;
#ifdef _OPENMP
    machine->threads = omp_get_max_threads();
#endif
    name_processor(machine->cpu, sizeof machine->cpu);
#ifdef _SC_NPROCESSORS_ONLN
    machine->cores = sysconf(_SC_NPROCESSORS_ONLN);
#endif
#ifdef _SC_PHYS_PAGES
    machine->memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
#endif
    if (uname(&os) == 0)
        snprintf(machine->os, sizeof machine->os, "%.30s %.60s, %.30s", os.sysname, os.release, os.machine);
    machine->isa = heddle_cpu_isa();
    heddle_device_describe(machine->device, machine->text, sizeof machine->text);
    if (gmtime_r(&t, &utc))
        strftime(machine->date, sizeof machine->date, "%Y-%m-%dT%H:%MZ", &utc);
}

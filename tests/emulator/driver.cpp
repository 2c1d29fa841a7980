/* SPDX-License-Identifier: Apache-2.0
 * What the fake driver (tests/gpu/fake_driver.c) asks for: images that are libraries, and their kernels. An image's text is a module's line
 * of modules.def, its name and what it is made of; the library lies beside this one. A module that is made of another one is that one's
 * library, whose kernels then work in float16. */
#include "gpu/fake_driver.h"
#include "hopper.h"
#include "run.h"

#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define MOST_MODULES 256

struct emulator_module {
    const char *name;
    void *library;
    const emulator_kernel *kernels;
};

static emulator_module modules[MOST_MODULES];

/* What emulator_find gives out. */
struct found_kernel {
    const emulator_module *module;
    const emulator_kernel *kernel;
    bool f16;
};

static emulator_module *load(const char *name) {
    int x = 0;
    while (x < MOST_MODULES && modules[x].name && strcmp(modules[x].name, name))
        x++;
    if (x == MOST_MODULES || modules[x].name)
        return x < MOST_MODULES ? &modules[x] : NULL;
    Dl_info own;
    char path[4096];
    if (!dladdr((void *)load, &own))
        return NULL;
    const char *end = strrchr(own.dli_fname, '/');
    snprintf(path, sizeof path, "%.*s/%s.so", end ? (int)(end - own.dli_fname) : 1, end ? own.dli_fname : ".", name);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "emulator: %s\n", dlerror());
        return NULL;
    }
    modules[x] = {strdup(name), library, (const emulator_kernel *)dlsym(library, "emulator_kernels")};
    return &modules[x];
}

const void *emulator_find(const void *image, const char *symbol) {
    char name[128], source[128] = "", kernel[128];
    if (sscanf((const char *)image, "%127s %127s", name, source) < 1)
        return NULL;
    const bool twin = source[0] && !strchr(source, '/');
    const emulator_module *module = load(twin ? source : name);
    const char *type = strstr(symbol, "_f16_");
    if (!module || (twin && !type))
        return NULL;
    snprintf(kernel, sizeof kernel, "%.*s%s%s", twin ? (int)(type - symbol) : 0, symbol, twin ? "_bf16_" : "",
             twin ? type + strlen("_f16_") : symbol);
    for (const emulator_kernel *k = module->kernels; k->symbol; k++)
        if (!strcmp(k->symbol, kernel))
            return new found_kernel{module, k, twin};
    return NULL;
}

/* Where the thread's own variables of a library lie: what its functions have in shared memory. */
void emulator_unset(const emulator_module *module, int byte) {
    struct search {
        const char *path;
        int byte;
    } s = {NULL, byte};
    link_map *map;
    if (dlinfo(module->library, RTLD_DI_LINKMAP, &map))
        return;
    s.path = map->l_name;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *data) {
            const search *wanted = (const search *)data;
            if (strcmp(info->dlpi_name, wanted->path))
                return 0;
            for (int x = 0; x < info->dlpi_phnum; x++)
                if (info->dlpi_phdr[x].p_type == PT_TLS && info->dlpi_tls_data)
                    memset(info->dlpi_tls_data, wanted->byte, info->dlpi_phdr[x].p_memsz);
            return 1;
        },
        &s);
}

/* A stray access to memory: by whom. */
static void tell_signal(int number) {
    static char text[] = "emulator: a kernel has touched memory that is nobody's; in gdb `backtrace` shows where\n";
    if (write(2, text, sizeof text - 1) < 0)
        _exit(1);
    signal(number, SIG_DFL);
    raise(number);
}

bool emulator_run(const void *kernel, const cu_launch *launch, const void *parameters) {
    const found_kernel *f = (const found_kernel *)kernel;
    alignas(16) static char stack[64 * 1024];
    stack_t other = {}, before;
    struct sigaction action = {}, was;
    other.ss_sp = stack;
    other.ss_size = sizeof stack;
    action.sa_handler = tell_signal;
    action.sa_flags = SA_ONSTACK;
    sigaltstack(&other, &before);
    sigaction(SIGSEGV, &action, &was);
    emulator_f16 = f->f16;
    const bool right =
        emulator_launch(f->module, f->kernel, parameters, launch->grid[0], launch->block[0], launch->shared);
    sigaction(SIGSEGV, &was, NULL);
    sigaltstack(&before, NULL);
    return right;
}

void emulator_encode(void *map, unsigned rank, void *base, const uint64_t *extents, const uint64_t *strides,
                     const uint32_t *box) {
    hopper_encode(map, rank, base, extents, strides, box);
}

void emulator_move(void *map, void *base) {
    hopper_move(map, base);
}

/* SPDX-License-Identifier: Apache-2.0
 * See system.h. */
#define _GNU_SOURCE
#include "system.h"

#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#include <malloc.h>
#include <windows.h>

void *heddle_system_library(const char *name, bool loaded) {
    return loaded ? GetModuleHandleA(name) : LoadLibraryA(name);
}

void *heddle_system_symbol(void *library, const char *name) {
    const FARPROC found = GetProcAddress(library, name);
    void *symbol;
    memcpy(&symbol, &found, sizeof symbol);
    return symbol;
}

void *heddle_system_memory(size_t bytes) {
    return _aligned_malloc(bytes, 64);
}

void heddle_system_free(void *memory) {
    _aligned_free(memory);
}
#else
#include <dlfcn.h>

void *heddle_system_library(const char *name, bool loaded) {
    return dlopen(name, loaded ? RTLD_LAZY | RTLD_NOLOAD : RTLD_NOW | RTLD_LOCAL);
}

void *heddle_system_symbol(void *library, const char *name) {
    return dlsym(library, name);
}

void *heddle_system_memory(size_t bytes) {
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

void heddle_system_free(void *memory) {
    free(memory);
}
#endif

/* SPDX-License-Identifier: Apache-2.0
 * See scenario.h. */
#define _POSIX_C_SOURCE 200809L
#include "scenario.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

void *address(int device, int n, int skew) {
    return (void *)(((uintptr_t)(device + 1) << 36) + ((uintptr_t)n << 30) + (uintptr_t)skew); /* NOLINT */
}

/* Every pointer that the pass looks at and that its features, or its norm, allow, in `data`. Numbers are never skewed off their size. */
static void set_pointers(const tensor_field *fields, uint64_t features, const heddle_norm_linear *linear,
                         heddle_pass pass, int skew, void *data) {
    int n = 0;
    for (const tensor_field *t = fields; t->name; t++) {
        void *p = address(0, ++n, t->element == OF_UINT64 ? 0 : skew);
        const bool has = linear ? norm_linear_has(linear, t) : !t->feature || features & t->feature;
        if (t->need[pass] != NEED_UNUSED && has)
            memcpy((char *)data + t->offset, &p, sizeof p);
    }
}

heddle_attention_data attention_pointers(const heddle_attention *a, heddle_pass pass, int skew) {
    heddle_attention_data t = {.size = sizeof t};
    set_pointers(attention_fields, a->features, NULL, pass, skew, &t);
    t.seqlens_q = NULL; /* the keys' alone */
    if (a->features & HEDDLE_PAGES)
        t.cu_seqlens_k = NULL;
    return t;
}

heddle_status run_attention(heddle_attention a, heddle_pass pass, int skew, void *stream) {
    size_t bytes = 0;
    a.device = HEDDLE_CUDA;
    heddle_status status = heddle_attention_workspace(&a, pass, &bytes);
    if (status != HEDDLE_OK)
        return status;
    const heddle_attention_data t = attention_pointers(&a, pass, skew);
    void *workspace = address(0, 60, 0);
    return pass == HEDDLE_FORWARD ? heddle_attention_forward(&a, &t, workspace, bytes, stream)
                                  : heddle_attention_backward(&a, &t, workspace, bytes, stream);
}

heddle_status run_norm_linear(heddle_norm_linear a, heddle_pass pass, int skew, void *stream) {
    size_t bytes = 0;
    a.device = HEDDLE_CUDA;
    heddle_status status = heddle_norm_linear_workspace(&a, pass, &bytes);
    if (status != HEDDLE_OK)
        return status;
    const bool back = pass == HEDDLE_BACKWARD;
    heddle_norm_linear_data t = {.size = sizeof t};
    set_pointers(norm_linear_fields, 0, &a, pass, skew, &t);
    if (back)
        t.bias = NULL, t.y = NULL; /* computed anew */
    void *workspace = address(0, 60, 0);
    return back ? heddle_norm_linear_backward(&a, &t, workspace, bytes, stream)
                : heddle_norm_linear_forward(&a, &t, workspace, bytes, stream);
}

void set(const char *name, const char *value) {
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
}

int child_status(void (*scenario)(void)) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        scenario();
        fflush(stdout);
        _exit(0);
    }
    int status = 1;
    return child > 0 && waitpid(child, &status, 0) == child ? status : -1;
}

bool is_fake_driver(void) {
    void *fake = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (fake && dlsym(fake, "fake_launches"))
        return true;
    puts("skipped: libcuda.so.1 is not the fake one; ctest sets LD_LIBRARY_PATH");
    return false;
}

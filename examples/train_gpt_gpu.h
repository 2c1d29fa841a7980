/* SPDX-License-Identifier: Apache-2.0
 *
 * With --device cuda the model stays in host memory, and each call of heddle works on copies of its tensors on the GPU. A
 * program that cares for speed keeps all of it there; here the GPU shows that it computes the same. */
#ifndef TRAIN_GPT_GPU
#define TRAIN_GPT_GPU

#include "../tools/device_memory.h"
#include "train_gpt_shared.h"

enum { GPU_TENSORS = 16 };

/* The tensors of one call: where the host has them, and whether they come back. */
typedef struct gpu_call {
    bool copies;
    int count;
    struct {
        void *host;
        size_t bytes;
        bool back;
    } tensor[GPU_TENSORS];
} gpu_call;

/* Memory on the GPU, used anew by every call, made larger where it is too small. */
static struct {
    void *p;
    size_t bytes;
} gpu_block[GPU_TENSORS];

static gpu_call gpu_begin(heddle_device device) {
    gpu_call c = {.copies = device == HEDDLE_CUDA};
    return c;
}

static void gpu_must(bool ok) {
    if (!ok) {
        fprintf(stderr, "train_gpt: the GPU: %s\n", device_memory_error());
        exit(2);
    }
}

/* Where heddle finds `bytes` bytes of `host`; with `back`, gpu_end() brings what it wrote there. NULL stays NULL. */
static void *gpu_tensor(gpu_call *c, const void *host, size_t bytes, bool back) {
    if (!c->copies || !host)
        return (void *)(uintptr_t)host;
    const int n = c->count++;
    if (bytes > gpu_block[n].bytes) {
        device_memory_free(gpu_block[n].p);
        gpu_block[n].p = device_memory_new(bytes);
        gpu_block[n].bytes = bytes;
        gpu_must(gpu_block[n].p != NULL);
    }
    c->tensor[n].host = (void *)(uintptr_t)host;
    c->tensor[n].bytes = bytes;
    c->tensor[n].back = back;
    gpu_must(device_memory_copy(gpu_block[n].p, host, bytes));
    return gpu_block[n].p;
}

static void gpu_end(const gpu_call *c) {
    gpu_must(!c->copies || device_memory_wait());
    for (int n = 0; n < c->count; n++)
        if (c->tensor[n].back)
            gpu_must(device_memory_copy(c->tensor[n].host, gpu_block[n].p, c->tensor[n].bytes));
}

#endif

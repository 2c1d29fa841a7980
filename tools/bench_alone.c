/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"
#include "device_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 64 };

bool bench_is_alone(const bench_case *c) {
    return c->option && (!strncmp(c->option, "append", 6) || !strcmp(c->option, "merge"));
}

static bool has(const bench_case *c, const char *word) {
    return strstr(c->option, word) != NULL;
}

void bench_alone_kernel(const bench_case *c, char *name, size_t n) {
    static const char *const types[] = {"f32", "bf16", "f16"};
    snprintf(name, n, "heddle_attention_%s_%s_d512_%s_sm80", has(c, "merge") ? "merge" : "append", types[c->dtype],
             has(c, "e4m3") ? "bytes" : "plain");
}

/* So many bytes, all of them 0. */
static void *new_memory(bench_alone *x, int64_t bytes) {
    void *p = x->count < BENCH_ALONE_TENSORS && bytes > 0 ? device_memory_new((size_t)bytes) : NULL;
    if (!p || !device_memory_fill(p, 0, (size_t)bytes))
        x->failed = true;
    if (p)
        x->memory[x->count++] = p;
    return p;
}

/* first + n·step, n = 0 to count-1. */
static int32_t *new_numbers(bench_alone *x, int64_t count, int64_t first, int64_t step) {
    int32_t *host = malloc((size_t)count * sizeof *host), *p = new_memory(x, count * (int64_t)sizeof *host);
    for (int64_t n = 0; host && n < count; n++)
        host[n] = (int32_t)(first + n * step);
    if (!host || !p || !device_memory_copy(p, host, (size_t)count * sizeof *host))
        x->failed = true;
    free(host);
    return p;
}

/* New rows at the end of each sequence, rotated in halves by tables of float32, with their queries. */
static void make_append(const bench_case *c, bench_alone *x) {
    const int64_t size = (int64_t)heddle_dtype_size(c->dtype), cached = has(c, "e4m3") ? 1 : size;
    const int64_t new_rows = c->b * c->hk * c->sq * c->d, queries = c->b * c->h * c->sq * c->d;
    const int64_t kept = c->b * c->hk * c->sk * c->d, each = (c->sk + PAGE - 1) / PAGE;
    heddle_append *a = &x->append;
    *a =
        (heddle_append){.size = sizeof *a, .dtype = c->dtype, .device = HEDDLE_CUDA, .b = c->b, .h = c->h, .hk = c->hk};
    a->s = a->sq = c->sq;
    a->sk = a->positions = c->sk;
    a->d = a->rotary = c->d;
    a->features = (has(c, "pages") ? HEDDLE_PAGES : 0) | (has(c, "e4m3") ? HEDDLE_E4M3 : 0);
    heddle_append_data *t = &x->data;
    *t = (heddle_append_data){.size = sizeof *t};
    t->k_new = new_memory(x, new_rows * size);
    t->v_new = new_memory(x, new_rows * size);
    t->q = t->q_out = new_memory(x, queries * size);
    t->k = new_memory(x, kept * cached);
    t->v = new_memory(x, kept * cached);
    t->cos = new_memory(x, c->sk * c->d / 2 * (int64_t)sizeof(float));
    t->sin = new_memory(x, c->sk * c->d / 2 * (int64_t)sizeof(float));
    t->seqlens_k = new_numbers(x, c->b, c->sk - c->sq, 0);
    t->seqlens_out = new_memory(x, c->b * (int64_t)sizeof(int32_t));
    if (a->features & HEDDLE_PAGES) {
        a->page = PAGE;
        a->pages = c->b * each;
        t->block_table = new_numbers(x, c->b * each, c->b * each - 1, -1);
    }
    x->bytes = 2.0 * (double)new_rows * (double)(size + cached) + 2.0 * (double)queries * (double)size;
}

static void make_merge(const bench_case *c, bench_alone *x) {
    const int64_t rows = c->b * c->h * c->sq, size = (int64_t)heddle_dtype_size(c->dtype);
    x->merge = (heddle_merge){.size = sizeof x->merge, .dtype = c->dtype, .device = HEDDLE_CUDA, .b = c->b, .h = c->h};
    x->merge.s = c->sq;
    x->merge.dv = c->d;
    x->merged[0] = new_memory(x, rows * c->d * (int64_t)sizeof(float));
    x->merged[1] = new_memory(x, rows * (int64_t)sizeof(float));
    x->merged[2] = new_memory(x, rows * c->d * size);
    x->merged[3] = new_memory(x, rows * (int64_t)sizeof(float));
    x->bytes = (double)rows * ((double)c->d * (double)(2 * sizeof(float) + (size_t)size) + 3 * sizeof(float));
}

bool bench_alone_open(const bench_case *c, bench_alone *x) {
    *x = (bench_alone){.merges = has(c, "merge")};
    if (x->merges)
        make_merge(c, x);
    else
        make_append(c, x);
    if (x->failed)
        complain("the GPU: %s", device_memory_error());
    return !x->failed;
}

bool bench_alone_call(const bench_alone *x) {
    void *const *at = x->merged;
    const heddle_status status = x->merges ? heddle_attention_merge(&x->merge, at[0], at[1], at[2], at[3], NULL)
                                           : heddle_attention_append(&x->append, &x->data, NULL);
    if (status != HEDDLE_OK)
        complain("%s (%s)", heddle_last_message(), heddle_status_string(status));
    return status == HEDDLE_OK;
}

void bench_alone_close(bench_alone *x) {
    while (x->count > 0)
        device_memory_free(x->memory[--x->count]);
}

/* SPDX-License-Identifier: Apache-2.0
 * What a call costs the host, and what it takes on the device: one GPU, no framework.
 *
 *   cc -std=c11 -O2 -Iinclude bench/gpu_calls.c tools/device_memory.c -Lbuild -lheddle -ldl -o build/gpu_calls
 *   LD_LIBRARY_PATH=build build/gpu_calls [TEXT]      only the problems whose name holds TEXT
 *
 * call: microseconds that a call keeps the host; launches: kernels that it comes to; bare: microseconds to launch the very same kernels with
 * the same parameters from a graph that the call was captured into, and nothing else; ours: the difference. Bursts short enough never to fill
 * the GPU's queue, calls and bare launches in turn; the least and the median of the bursts. device: microseconds a call takes on the GPU in a replay of a
 * graph of several calls in a row; of decoding, also the rate at which K and V are read. */
#define _POSIX_C_SOURCE 200809L
#include "../tools/device_memory.h"
#include "heddle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ------------------------------------------------------------------------------------------------------- the driver */

typedef struct node_params { /* CUDA_KERNEL_NODE_PARAMS_v2 */
    void *function;
    unsigned grid[3], block[3], shared;
    void **parameters, **extra;
    void *kernel, *context;
} node_params;

#define CALLS                                                                                                          \
    D(cuStreamCreate, (void **stream, unsigned flags))                                                                 \
    D(cuStreamSynchronize, (void *stream))                                                                             \
    D(cuStreamBeginCapture_v2, (void *stream, int mode))                                                               \
    D(cuStreamEndCapture, (void *stream, void **graph))                                                                \
    D(cuGraphGetNodes, (void *graph, void **nodes, size_t *n))                                                         \
    D(cuGraphNodeGetType, (void *node, int *type))                                                                     \
    D(cuGraphKernelNodeGetParams_v2, (void *node, node_params *params))                                                \
    D(cuGraphInstantiateWithFlags, (void **exec, void *graph, unsigned long long flags))                               \
    D(cuGraphLaunch, (void *exec, void *stream))                                                                       \
    D(cuGraphExecDestroy, (void *exec))                                                                                \
    D(cuGraphDestroy, (void *graph))                                                                                   \
    D(cuEventCreate, (void **event, unsigned flags))                                                                   \
    D(cuEventRecord, (void *event, void *stream))                                                                      \
    D(cuEventSynchronize, (void *event))                                                                               \
    D(cuEventElapsedTime, (float *ms, void *begin, void *end))                                                         \
    D(cuMemsetD32_v2, (uint64_t p, unsigned value, size_t n))                                                          \
    D(cuLaunchKernel, (void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,     \
                       unsigned shared, void *stream, void **parameters, void **extra))

static struct {
#define D(symbol, parameters) int(*symbol) parameters;
    CALLS
#undef D
} cu;

static void die(const char *what, int status) {
    fprintf(stderr, "gpu_calls: %s: %d (%s)\n", what, status, heddle_last_message());
    exit(1);
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int status_ = (call);                                                                                          \
        if (status_)                                                                                                   \
            die(#call, status_);                                                                                       \
    } while (0)

static void open_driver(void) {
    void *at;
#define D(symbol, parameters)                                                                                          \
    at = device_memory_driver(#symbol);                                                                                \
    memcpy(&cu.symbol, &at, sizeof at);                                                                                \
    if (!at)                                                                                                           \
        die(#symbol, -1);
    CALLS
#undef D
}

static void *memory(size_t bytes) {
    void *p = device_memory_new(bytes);
    if (!p)
        die(device_memory_error(), (int)(bytes >> 20));
    /* 0.0156 in bfloat16 and float16 alike, and in float32, too */
    TRY(cu.cuMemsetD32_v2((uint64_t)(uintptr_t)p, 0x3c803c80, bytes / 4));
    return p;
}

/* ------------------------------------------------------------------------------------------------------ problems */

enum { BURST = 50, ROUNDS = 40, MAX_NODES = 64, COPIES = 8 };

typedef struct problem {
    heddle_attention a;
    heddle_norm_linear l;
    heddle_attention_data ad[COPIES];
    heddle_norm_linear_data ld;
    heddle_pass pass;
    int linear, copies, turn; /* copies: of K and V, taken in turn, so that they are not in the cache */
    double read;              /* bytes of K and V */
    void *space;
    size_t bytes;
} problem;

static void call(problem *p, void *stream) {
    const heddle_attention_data *t = &p->ad[p->turn++ % p->copies];
    if (p->linear && p->pass == HEDDLE_FORWARD)
        TRY(heddle_norm_linear_forward(&p->l, &p->ld, p->space, p->bytes, stream));
    else if (p->linear)
        TRY(heddle_norm_linear_backward(&p->l, &p->ld, p->space, p->bytes, stream));
    else if (p->pass == HEDDLE_FORWARD)
        TRY(heddle_attention_forward(&p->a, t, p->space, p->bytes, stream));
    else
        TRY(heddle_attention_backward(&p->a, t, p->space, p->bytes, stream));
}

static void attention(problem *p, heddle_dtype dtype, heddle_pass pass, int b, int h, int hk, int sq, int sk, int d) {
    memset(p, 0, sizeof *p);
    p->a = (heddle_attention){.size = sizeof p->a,
                              .dtype = dtype,
                              .device = HEDDLE_CUDA,
                              .b = b,
                              .h = h,
                              .hk = hk,
                              .sq = sq,
                              .sk = sk,
                              .d = d};
    const heddle_strides q = {(int64_t)sq * h * d, d, (int64_t)h * d}, k = {(int64_t)sk * hk * d, d, (int64_t)hk * d};
    p->a.q_stride = p->a.o_stride = p->a.do_stride = p->a.dq_stride = q;
    p->a.k_stride = p->a.v_stride = p->a.dk_stride = p->a.dv_stride = k;
    p->pass = pass;
    const size_t e = dtype == HEDDLE_F32 ? 4 : 2, of_q = (size_t)(b * q.b) * e, of_k = (size_t)(b * k.b) * e;
    p->copies = of_k < ((size_t)100 << 20) && sq == 1 ? COPIES : 1;
    p->read = 2.0 * (double)of_k;
    for (int x = 0; x < p->copies; x++) {
        heddle_attention_data *t = &p->ad[x];
        *t = (heddle_attention_data){.size = sizeof *t, .q = memory(of_q), .k = memory(of_k), .v = memory(of_k)};
        t->o = memory(of_q);
        t->lse = memory((size_t)b * (size_t)h * (size_t)sq * 4);
        if (pass == HEDDLE_BACKWARD) {
            t->dout = memory(of_q);
            t->dq = memory(of_q);
            t->dk = memory(of_k);
            t->dv = memory(of_k);
        }
    }
    TRY(heddle_attention_workspace(&p->a, pass, &p->bytes));
    p->space = memory(p->bytes);
}

static void linear(problem *p, heddle_dtype dtype, heddle_pass pass, int m, int k, int n) {
    memset(p, 0, sizeof *p);
    p->l = (heddle_norm_linear){
        .size = sizeof p->l, .dtype = dtype, .device = HEDDLE_CUDA, .norm = HEDDLE_LAYER_NORM, .m = m, .k = k, .n = n};
    p->linear = p->copies = 1;
    p->pass = pass;
    const size_t e = dtype == HEDDLE_F32 ? 4 : 2, x = (size_t)m * (size_t)k * e, y = (size_t)m * (size_t)n * e,
                 w = (size_t)n * (size_t)k * e;
    heddle_norm_linear_data *t = &p->ld;
    *t = (heddle_norm_linear_data){.size = sizeof *t, .x = memory(x), .w = memory(w)};
    t->gamma = memory((size_t)k * e);
    t->beta = memory((size_t)k * e);
    t->bias = memory((size_t)n * e);
    t->mean = memory((size_t)m * 4);
    t->rstd = memory((size_t)m * 4);
    t->y = memory(y);
    if (pass == HEDDLE_BACKWARD) {
        t->dy = memory(y);
        t->dx = memory(x);
        t->dw = memory(w);
        t->dgamma = memory((size_t)k * e);
        t->dbeta = memory((size_t)k * e);
        t->dbias = memory((size_t)n * e);
    }
    TRY(heddle_norm_linear_workspace(&p->l, pass, &p->bytes));
    p->space = memory(p->bytes);
}

static void release(problem *p) {
    for (int x = 0; x < p->copies; x++) {
        const heddle_attention_data *t = &p->ad[x];
        const void *all[] = {t->q, t->k, t->v, t->o, t->lse, t->dout, t->dq, t->dk, t->dv};
        for (size_t y = 0; y < sizeof all / sizeof *all; y++)
            device_memory_free((void *)(uintptr_t)all[y]);
    }
    const heddle_norm_linear_data *l = &p->ld;
    const void *all[] = {l->x,  l->gamma, l->beta,   l->w,     l->bias, l->y,     l->mean, l->rstd,
                         l->dy, l->dx,    l->dgamma, l->dbeta, l->dw,   l->dbias, p->space};
    for (size_t y = 0; y < sizeof all / sizeof *all; y++)
        device_memory_free((void *)(uintptr_t)all[y]);
}

/* ------------------------------------------------------------------------------------------------------- measuring */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static void *capture(problem *p, void *stream, int calls) {
    void *graph;
    TRY(cu.cuStreamBeginCapture_v2(stream, 2));
    for (int x = 0; x < calls; x++)
        call(p, stream);
    TRY(cu.cuStreamEndCapture(stream, &graph));
    return graph;
}

static int kernels_of(void *graph, node_params *params) {
    void *nodes[MAX_NODES];
    size_t n = MAX_NODES;
    int count = 0, type;
    TRY(cu.cuGraphGetNodes(graph, nodes, &n));
    for (size_t x = 0; x < n; x++) {
        TRY(cu.cuGraphNodeGetType(nodes[x], &type));
        if (type == 0)
            TRY(cu.cuGraphKernelNodeGetParams_v2(nodes[x], &params[count++]));
    }
    return count;
}

static int by_value(const void *x, const void *y) {
    const double a = *(const double *)x, b = *(const double *)y;
    return a < b ? -1 : a > b;
}

static double device_time(problem *p, void *stream) {
    void *exec, *begin, *end;
    const int calls = p->read > 5e8 ? 4 : 16, times = 5;
    void *graph = capture(p, stream, calls);
    double best = 1e30;
    TRY(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    TRY(cu.cuEventCreate(&begin, 0));
    TRY(cu.cuEventCreate(&end, 0));
    for (int x = 0; x < times; x++) {
        float ms;
        TRY(cu.cuEventRecord(begin, stream));
        TRY(cu.cuGraphLaunch(exec, stream));
        TRY(cu.cuEventRecord(end, stream));
        TRY(cu.cuEventSynchronize(end));
        TRY(cu.cuEventElapsedTime(&ms, begin, end));
        if (1e3 * (double)ms / calls < best)
            best = 1e3 * (double)ms / calls;
    }
    cu.cuGraphExecDestroy(exec);
    cu.cuGraphDestroy(graph);
    return best;
}

static void measure(problem *p, const char *name, void *stream) {
    node_params params[MAX_NODES];
    double calls[ROUNDS], bare[ROUNDS];
    char kernel[64] = "";
    if (p->linear)
        TRY(heddle_norm_linear_kernel(&p->l, p->pass, kernel, sizeof kernel));
    else
        TRY(heddle_attention_kernel(&p->a, p->pass, kernel, sizeof kernel));
    call(p, stream);
    call(p, stream);
    void *graph = capture(p, stream, 1);
    const int launches = kernels_of(graph, params), burst = BURST * launches > 400 ? 400 / launches : BURST;
    for (int x = 0; x < ROUNDS; x++) {
        TRY(cu.cuStreamSynchronize(stream));
        double begin = now();
        for (int y = 0; y < burst; y++)
            call(p, stream);
        calls[x] = (now() - begin) / burst;
        TRY(cu.cuStreamSynchronize(stream));
        begin = now();
        for (int y = 0; y < burst; y++)
            for (int z = 0; z < launches; z++) {
                const node_params *k = &params[z];
                TRY(cu.cuLaunchKernel(k->kernel ? k->kernel : k->function, k->grid[0], k->grid[1], k->grid[2],
                                      k->block[0], k->block[1], k->block[2], k->shared, stream, k->parameters, NULL));
            }
        bare[x] = (now() - begin) / burst;
    }
    TRY(cu.cuStreamSynchronize(stream));
    qsort(calls, ROUNDS, sizeof *calls, by_value);
    qsort(bare, ROUNDS, sizeof *bare, by_value);
    const double device = device_time(p, stream);
    printf("%-34s %2d  call %6.2f %6.2f  bare %6.2f %6.2f  ours %5.2f %5.2f  device %8.2f", name, launches, calls[0],
           calls[ROUNDS / 2], bare[0], bare[ROUNDS / 2], calls[0] - bare[0], calls[ROUNDS / 2] - bare[ROUNDS / 2],
           device);
    if (!p->linear && p->a.sq <= 16)
        printf("  %.3f TB/s", p->read / device * 1e-6);
    printf("  %s\n", kernel);
    fflush(stdout);
    cu.cuGraphDestroy(graph);
}

static int wanted(const char *name, const char *filter) {
    return !filter || strstr(name, filter);
}

int main(int argc, char **argv) {
    static problem p;
    const char *filter = argc > 1 ? argv[1] : NULL;
    void *stream;
    device_memory_free(device_memory_new(64)); /* a context */
    open_driver();
    TRY(cu.cuStreamCreate(&stream, 1));
    printf("microseconds, least and median: problem, launches, call, bare launches, difference; on the device\n");
    static const struct {
        const char *name;
        heddle_dtype dtype;
        int b, h, hk, sq, sk, d, backward;
    } of_attention[] = {{"attention b1 h1 s128 d64 bf16", HEDDLE_BF16, 1, 1, 1, 128, 128, 64, 1},
                        {"attention b1 h16 s1024 d128 bf16", HEDDLE_BF16, 1, 16, 16, 1024, 1024, 128, 1},
                        {"attention b1 h16 s256 d128 f32", HEDDLE_F32, 1, 16, 16, 256, 256, 128, 1},
                        {"decode b1 sk1024", HEDDLE_BF16, 1, 32, 8, 1, 1024, 128, 0},
                        {"decode b1 sk8192", HEDDLE_BF16, 1, 32, 8, 1, 8192, 128, 0},
                        {"decode b1 sk131072", HEDDLE_BF16, 1, 32, 8, 1, 131072, 128, 0},
                        {"decode b8 sk8192", HEDDLE_BF16, 8, 32, 8, 1, 8192, 128, 0},
                        {"decode b32 sk8192", HEDDLE_BF16, 32, 32, 8, 1, 8192, 128, 0},
                        {"decode b64 sk4096", HEDDLE_BF16, 64, 32, 8, 1, 4096, 128, 0},
                        {"decode b64 sk4000", HEDDLE_BF16, 64, 32, 8, 1, 4000, 128, 0},
                        {"decode b32 sk8192 sq4", HEDDLE_BF16, 32, 32, 8, 4, 8192, 128, 0},
                        {"decode b32 sk8192 d64", HEDDLE_BF16, 32, 32, 8, 1, 8192, 64, 0},
                        {"decode b32 sk8192 d256", HEDDLE_BF16, 32, 32, 8, 1, 8192, 256, 0},
                        {"decode b32 sk8192 f32", HEDDLE_F32, 32, 32, 8, 1, 8192, 128, 0},
                        {"decode b32 h32 hk32 sk2048", HEDDLE_BF16, 32, 32, 32, 1, 2048, 128, 0}};
    char name[64];
    for (size_t x = 0; x < sizeof of_attention / sizeof *of_attention; x++)
        for (int pass = 0; pass <= of_attention[x].backward; pass++) {
            snprintf(name, sizeof name, "%s %s", of_attention[x].name, pass ? "bwd" : "fwd");
            if (!wanted(name, filter))
                continue;
            attention(&p, of_attention[x].dtype, (heddle_pass)pass, of_attention[x].b, of_attention[x].h,
                      of_attention[x].hk, of_attention[x].sq, of_attention[x].sk, of_attention[x].d);
            measure(&p, name, stream);
            release(&p);
        }
    static const struct {
        heddle_dtype dtype;
        int m, k, n;
    } of_linear[] = {{HEDDLE_BF16, 16, 64, 64}, {HEDDLE_BF16, 512, 1024, 1024}, {HEDDLE_F32, 512, 1024, 1024}};
    for (size_t x = 0; x < sizeof of_linear / sizeof *of_linear; x++)
        for (int pass = 0; pass < 2; pass++) {
            snprintf(name, sizeof name, "linear m%d k%d n%d %s %s", of_linear[x].m, of_linear[x].k, of_linear[x].n,
                     of_linear[x].dtype == HEDDLE_F32 ? "f32" : "bf16", pass ? "bwd" : "fwd");
            if (!wanted(name, filter))
                continue;
            linear(&p, of_linear[x].dtype, (heddle_pass)pass, of_linear[x].m, of_linear[x].k, of_linear[x].n);
            measure(&p, name, stream);
            release(&p);
        }
    return 0;
}

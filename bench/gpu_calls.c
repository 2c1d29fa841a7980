/* SPDX-License-Identifier: Apache-2.0
 * What a call costs the host, and what it takes on the device: one GPU, no framework.
 *
 *   cc -std=c11 -O2 -Iinclude bench/gpu_calls.c tools/device_memory.c -Lbuild -lheddle -ldl -o build/gpu_calls
 *   LD_LIBRARY_PATH=build build/gpu_calls [TEXT]      only the problems whose name holds TEXT
 *
 * launches: kernels that a call comes to; call: microseconds that it keeps the host; bare: microseconds to launch the very same kernels with the
 * same parameters, taken from a graph that the call was captured into, and nothing else; own: the difference. Bursts short enough never to fill
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

typedef struct launch_attribute { /* CUlaunchAttribute */
    uint64_t id;
    int32_t value[16];
} launch_attribute;

typedef struct launch_config { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void *stream;
    const launch_attribute *attributes;
    unsigned count;
} launch_config;

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
    D(cuLaunchKernelEx, (const launch_config *launch, void *kernel, void **parameters, void **extra))

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

/* ------------------------------------------------------------------------------------------------------ problems */

enum { BURST = 50, ROUNDS = 40, MAX_NODES = 64, COPIES = 8, MAX_TENSORS = 9 * COPIES + 1 };

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
    void *owned[MAX_TENSORS];
    int tensors;
} problem;

static void *memory(problem *p, size_t bytes) {
    void *m = p->owned[p->tensors++] = device_memory_new(bytes);
    if (!m)
        die(device_memory_error(), (int)(bytes >> 20));
    /* 0.0156 in bfloat16 and float16 alike, and in float32, too */
    TRY(cu.cuMemsetD32_v2((uint64_t)(uintptr_t)m, 0x3c803c80, bytes / 4));
    return m;
}

static void release(problem *p) {
    while (p->tensors)
        device_memory_free(p->owned[--p->tensors]);
}

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

typedef struct attention_row {
    const char *name;
    heddle_dtype dtype;
    int b, h, hk, sq, sk, d, passes;
} attention_row;

static const attention_row attentions[] = {
    {"attention b1 h1 s128 d64 bf16", HEDDLE_BF16, 1, 1, 1, 128, 128, 64, 2},
    {"attention b1 h16 s1024 d128 bf16", HEDDLE_BF16, 1, 16, 16, 1024, 1024, 128, 2},
    {"attention b1 h16 s256 d128 f32", HEDDLE_F32, 1, 16, 16, 256, 256, 128, 2},
    {"decode b1 sk1024", HEDDLE_BF16, 1, 32, 8, 1, 1024, 128, 1},
    {"decode b1 sk8192", HEDDLE_BF16, 1, 32, 8, 1, 8192, 128, 1},
    {"decode b1 sk131072", HEDDLE_BF16, 1, 32, 8, 1, 131072, 128, 1},
    {"decode b8 sk8192", HEDDLE_BF16, 8, 32, 8, 1, 8192, 128, 1},
    {"decode b32 sk8192", HEDDLE_BF16, 32, 32, 8, 1, 8192, 128, 1},
    {"decode b64 sk4096", HEDDLE_BF16, 64, 32, 8, 1, 4096, 128, 1},
    {"decode b64 sk4000", HEDDLE_BF16, 64, 32, 8, 1, 4000, 128, 1},
    {"decode b32 sk8192 sq4", HEDDLE_BF16, 32, 32, 8, 4, 8192, 128, 1},
    {"decode b32 sk8192 d64", HEDDLE_BF16, 32, 32, 8, 1, 8192, 64, 1},
    {"decode b32 sk8192 d256", HEDDLE_BF16, 32, 32, 8, 1, 8192, 256, 1},
    {"decode b32 sk8192 f32", HEDDLE_F32, 32, 32, 8, 1, 8192, 128, 1},
    {"decode b32 h32 hk32 sk2048", HEDDLE_BF16, 32, 32, 32, 1, 2048, 128, 1}};

typedef struct linear_row {
    const char *name;
    heddle_dtype dtype;
    int m, k, n;
} linear_row;

static const linear_row linears[] = {{"linear m16 k64 n64 bf16", HEDDLE_BF16, 16, 64, 64},
                                     {"linear m512 k1024 n1024 bf16", HEDDLE_BF16, 512, 1024, 1024},
                                     {"linear m512 k1024 n1024 f32", HEDDLE_F32, 512, 1024, 1024}};

static void new_attention(problem *p, const attention_row *r, heddle_pass pass) {
    const int64_t b = r->b, h = r->h, hk = r->hk, sq = r->sq, sk = r->sk, d = r->d;
    const heddle_strides q = {sq * h * d, d, h * d}, k = {sk * hk * d, d, hk * d};
    memset(p, 0, sizeof *p);
    p->pass = pass;
    p->a = (heddle_attention){.size = sizeof p->a, .dtype = r->dtype, .device = HEDDLE_CUDA};
    p->a.b = b, p->a.h = h, p->a.hk = hk, p->a.sq = sq, p->a.sk = sk, p->a.d = d;
    p->a.q_stride = p->a.o_stride = p->a.do_stride = p->a.dq_stride = q;
    p->a.k_stride = p->a.v_stride = p->a.dk_stride = p->a.dv_stride = k;
    const size_t e = heddle_dtype_size(r->dtype), of_q = (size_t)(b * q.b) * e, of_k = (size_t)(b * k.b) * e;
    p->copies = of_k < ((size_t)100 << 20) && sq == 1 ? COPIES : 1;
    p->read = 2.0 * (double)of_k;
    for (int x = 0; x < p->copies; x++) {
        heddle_attention_data *t = &p->ad[x];
        *t = (heddle_attention_data){
            .size = sizeof *t, .q = memory(p, of_q), .k = memory(p, of_k), .v = memory(p, of_k)};
        t->o = memory(p, of_q);
        t->lse = memory(p, (size_t)(b * h * sq) * 4);
        if (pass == HEDDLE_BACKWARD) {
            t->dout = memory(p, of_q);
            t->dq = memory(p, of_q);
            t->dk = memory(p, of_k);
            t->dv = memory(p, of_k);
        }
    }
    TRY(heddle_attention_workspace(&p->a, pass, &p->bytes));
    p->space = memory(p, p->bytes);
}

static void new_linear(problem *p, const linear_row *r, heddle_pass pass) {
    memset(p, 0, sizeof *p);
    p->linear = p->copies = 1;
    p->pass = pass;
    p->l = (heddle_norm_linear){.size = sizeof p->l, .dtype = r->dtype, .device = HEDDLE_CUDA};
    p->l.m = r->m, p->l.k = r->k, p->l.n = r->n;
    const size_t e = heddle_dtype_size(r->dtype), m = (size_t)r->m, k = (size_t)r->k, n = (size_t)r->n;
    heddle_norm_linear_data *t = &p->ld;
    *t = (heddle_norm_linear_data){.size = sizeof *t, .x = memory(p, m * k * e), .w = memory(p, n * k * e)};
    t->gamma = memory(p, k * e);
    t->beta = memory(p, k * e);
    t->bias = memory(p, n * e);
    t->mean = memory(p, m * 4);
    t->rstd = memory(p, m * 4);
    t->y = memory(p, m * n * e);
    if (pass == HEDDLE_BACKWARD) {
        t->dy = memory(p, m * n * e);
        t->dx = memory(p, m * k * e);
        t->dw = memory(p, n * k * e);
        t->dgamma = memory(p, k * e);
        t->dbeta = memory(p, k * e);
        t->dbias = memory(p, n * e);
    }
    TRY(heddle_norm_linear_workspace(&p->l, pass, &p->bytes));
    p->space = memory(p, p->bytes);
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

/* As the library launches: on Hopper each may overlap the one in front. */
static void launch(const node_params *k, void *stream) {
    static const launch_attribute overlaps = {6, {1}};
    static int hopper = -1;
    char device[128];
    if (hopper < 0)
        hopper = heddle_device_describe(HEDDLE_CUDA, device, sizeof device) == HEDDLE_OK && strstr(device, "sm_90");
    launch_config l = {.shared = k->shared, .stream = stream, .attributes = &overlaps, .count = (unsigned)hopper};
    memcpy(l.grid, k->grid, sizeof l.grid);
    memcpy(l.block, k->block, sizeof l.block);
    TRY(cu.cuLaunchKernelEx(&l, k->kernel ? k->kernel : k->function, k->parameters, NULL));
}

/* Calls and bare launches in turn: microseconds of each, in order. */
static void host_time(problem *p, void *stream, const node_params *params, int launches, double *calls, double *bare) {
    const int burst = BURST * launches > 400 ? 400 / launches : BURST;
    for (int x = 0; x < ROUNDS; x++) {
        TRY(cu.cuStreamSynchronize(stream));
        double begin = now();
        for (int y = 0; y < burst; y++)
            call(p, stream);
        calls[x] = (now() - begin) / burst;
        TRY(cu.cuStreamSynchronize(stream));
        begin = now();
        for (int y = 0; y < burst; y++)
            for (int z = 0; z < launches; z++)
                launch(&params[z], stream);
        bare[x] = (now() - begin) / burst;
    }
    TRY(cu.cuStreamSynchronize(stream));
    qsort(calls, ROUNDS, sizeof *calls, by_value);
    qsort(bare, ROUNDS, sizeof *bare, by_value);
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
    const int launches = kernels_of(graph, params), middle = ROUNDS / 2;
    host_time(p, stream, params, launches, calls, bare);
    const double device = device_time(p, stream);
    printf("%-36s %8d %6.2f %6.2f  %6.2f %6.2f  %5.2f %5.2f %9.2f", name, launches, calls[0], calls[middle], bare[0],
           bare[middle], calls[0] - bare[0], calls[middle] - bare[middle], device);
    if (!p->linear && p->a.sq <= 16)
        printf("  %.3f TB/s", p->read / device * 1e-6);
    printf("  %s\n", kernel);
    fflush(stdout);
    cu.cuGraphDestroy(graph);
    release(p);
}

/* The name with its pass, if it is among those that are wanted. */
static int is_wanted(const char *problem, int pass, const char *filter, char name[64]) {
    snprintf(name, 64, "%s %s", problem, pass ? "bwd" : "fwd");
    return !filter || strstr(name, filter);
}

int main(int argc, char **argv) {
    static problem p;
    const char *filter = argc > 1 ? argv[1] : NULL;
    char name[64];
    void *stream;
    device_memory_free(device_memory_new(64)); /* a context */
    open_driver();
    TRY(cu.cuStreamCreate(&stream, 1));
    printf("microseconds, least and median\n%-36s launches %13s  %13s  %11s %9s\n", "", "call", "bare", "own",
           "device");
    for (size_t x = 0; x < sizeof attentions / sizeof *attentions; x++)
        for (int pass = 0; pass < attentions[x].passes; pass++)
            if (is_wanted(attentions[x].name, pass, filter, name)) {
                new_attention(&p, &attentions[x], (heddle_pass)pass);
                measure(&p, name, stream);
            }
    for (size_t x = 0; x < sizeof linears / sizeof *linears; x++)
        for (int pass = 0; pass < 2; pass++)
            if (is_wanted(linears[x].name, pass, filter, name)) {
                new_linear(&p, &linears[x], (heddle_pass)pass);
                measure(&p, name, stream);
            }
    return 0;
}

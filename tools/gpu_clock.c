/* SPDX-License-Identifier: Apache-2.0
 * The loops of products have operands that are random numbers of size 1 to 2, since zeros take less power and a GPU at its
 * power limit would run faster with them. The driver compiles them. */
#include "gpu_clock.h"

#include "driver_call.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>

enum { FLUSH_BYTES = 512 << 20, THREADS = 256, UNROLLED = 16, PTX_BYTES = 1 << 16 };
enum { ATTRIBUTE_MULTIPROCESSORS = 16, ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76 };

typedef struct text {
    char *p;
    size_t n;
} text;

__attribute__((format(printf, 2, 3))) static void add(text *t, const char *format, ...) {
    va_list list;
    va_start(list, format);
    t->n += (size_t)vsnprintf(t->p + t->n, PTX_BYTES - t->n, format, list);
    va_end(list);
}

/* Registers name0 to name<n-1>. */
static void add_list(text *t, const char *name, int first, int n) {
    add(t, "{");
    for (int i = 0; i < n; i++)
        add(t, "%s%%%s%d", i ? "," : "", name, first + i);
    add(t, "}");
}

static void add_head(text *t, const char *target, int sums) {
    add(t,
        ".version 8.0\n.target %s\n.address_size 64\n"
        ".visible .entry products(.param .u64 out, .param .u32 steps) {\n"
        ".reg .pred %%p<3>;\n.reg .b32 %%r<24>;\n.reg .b64 %%d<8>;\n.reg .f32 %%f<%d>;\n"
        ".shared .align 128 .b8 tile[16384];\n"
        "ld.param.u64 %%d0, [out];\nld.param.u32 %%r0, [steps];\nmov.u32 %%r1, %%tid.x;\n",
        target, sums);
    for (int i = 0; i < sums; i++)
        add(t, "mov.f32 %%f%d, 0f00000000;\n", i);
}

/* %r<to>: two numbers of bfloat16 from a hash of %r<from>. */
static void add_random(text *t, int to, int from) {
    add(t,
        "mad.lo.u32 %%r%d, %%r%d, 747796405, 277803737;\nshr.u32 %%r23, %%r%d, 15;\nxor.b32 %%r%d, %%r%d, %%r23;\n"
        "mul.lo.u32 %%r%d, %%r%d, 739982445;\nand.b32 %%r%d, %%r%d, 0x807f807f;\nor.b32 %%r%d, %%r%d, 0x3f803f80;\n",
        to, from, to, to, to, to, to, to, to, to, to);
}

/* The sums are stored, or nobody would compute them. */
static void add_tail(text *t, int sums) {
    for (int i = 1; i < sums; i++)
        add(t, "add.f32 %%f0, %%f0, %%f%d;\n", i);
    add(t, "mul.wide.u32 %%d1, %%r1, 4;\nadd.s64 %%d0, %%d0, %%d1;\nst.global.f32 [%%d0], %%f0;\nret;\n}\n");
}

/* Hopper: two warpgroups of a block, each [64, 16] by [16, 256] from shared memory, in core matrices of 8 rows of 16 bytes. */
static double hopper_products(text *t) {
    add_head(t, "sm_90a", 128);
    add(t, "mov.u32 %%r2, tile;\nshl.b32 %%r3, %%r1, 2;\nadd.u32 %%r3, %%r2, %%r3;\nmov.u32 %%r5, %%r1;\n");
    for (int i = 0; i < 16384 / 4 / THREADS; i++) {
        add_random(t, 4, 5);
        add(t, "st.shared.b32 [%%r3], %%r4;\nadd.u32 %%r3, %%r3, %d;\nadd.u32 %%r5, %%r5, %d;\n", 4 * THREADS, THREADS);
    }
    add(t, "fence.proxy.async;\nbar.sync 0;\n");
    /* Descriptors: address, 128 bytes between core matrices along k, 256 along rows, all in units of 16 bytes. */
    add(t, "shr.u32 %%r4, %%r2, 4;\nand.b32 %%r4, %%r4, 0x3fff;\ncvt.u64.u32 %%d2, %%r4;\n"
           "or.b64 %%d2, %%d2, 0x0000001000080000;\nadd.s64 %%d3, %%d2, 128;\n"
           "setp.eq.u32 %%p1, %%r2, %%r2;\nsetp.eq.u32 %%p2, %%r0, 0;\n@%%p2 bra done;\n"
           "next:\nwgmma.fence.sync.aligned;\n");
    for (int i = 0; i < UNROLLED; i++) {
        add(t, "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 ");
        add_list(t, "f", 0, 128);
        add(t, ", %%d2, %%d3, %%p1, 1, 1, 0, 0;\n");
    }
    add(t, "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
           "sub.u32 %%r0, %%r0, 1;\nsetp.ne.u32 %%p0, %%r0, 0;\n@%%p0 bra next;\ndone:\n");
    add_tail(t, 128);
    return 2.0 * UNROLLED * 2 * 64 * 256 * 16;
}

/* Any GPU since Ampere: eight warps of a block, each [16, 16] by [16, 8] from registers, eight sums side by side. */
static double ampere_products(text *t) {
    add_head(t, "sm_80", 32);
    add(t, "mov.u32 %%r5, %%r1;\n");
    for (int i = 0; i < 6; i++) {
        add_random(t, 6 + i, 5);
        add(t, "add.u32 %%r5, %%r5, %d;\n", THREADS);
    }
    add(t, "setp.eq.u32 %%p2, %%r0, 0;\n@%%p2 bra done;\nnext:\n");
    for (int i = 0; i < UNROLLED; i++) {
        add(t, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 ");
        add_list(t, "f", i % 8 * 4, 4);
        add(t, ", {%%r6,%%r7,%%r8,%%r9}, {%%r10,%%r11}, ");
        add_list(t, "f", i % 8 * 4, 4);
        add(t, ";\n");
    }
    add(t, "sub.u32 %%r0, %%r0, 1;\nsetp.ne.u32 %%p0, %%r0, 0;\n@%%p0 bra next;\ndone:\n");
    add_tail(t, 32);
    return THREADS / 32 * UNROLLED * 2.0 * 16 * 8 * 16;
}

size_t gpu_clock_ptx(char *p, bool hopper, double *flops) {
    text t = {p, 0};
    *flops = hopper ? hopper_products(&t) : ampere_products(&t);
    return t.n;
}

static bool load_products(gpu_clock *c) {
    static char ptx[PTX_BYTES];
    int major = 0, minor = 0, multiprocessors = 0;
    CALL("cuDeviceGetAttribute", (int *, int, int), (&major, ATTRIBUTE_MAJOR, 0));
    CALL("cuDeviceGetAttribute", (int *, int, int), (&minor, ATTRIBUTE_MINOR, 0));
    CALL("cuDeviceGetAttribute", (int *, int, int), (&multiprocessors, ATTRIBUTE_MULTIPROCESSORS, 0));
    if (major < 8)
        return true;
    const bool hopper = major == 9 && minor == 0;
    if (gpu_clock_ptx(ptx, hopper, &c->flops) >= PTX_BYTES)
        return device_memory_failed("PTX of the products", true, PTX_BYTES), false;
    c->blocks = (unsigned)multiprocessors * (hopper ? 1 : 2);
    c->flops *= c->blocks;
    CALL("cuModuleLoadData", (void **, const void *), (&c->module, ptx));
    CALL("cuModuleGetFunction", (void **, void *, const char *), (&c->kernel, c->module, "products"));
    return true;
}

bool gpu_clock_open(gpu_clock *c) {
    *c = (gpu_clock){0};
    if (!device_memory_enter() || !load_products(c))
        return false;
    CALL("cuEventCreate", (void **, unsigned), (&c->begin, 0));
    CALL("cuEventCreate", (void **, unsigned), (&c->end, 0));
    c->flush = device_memory_new(FLUSH_BYTES);
    return c->flush;
}

static bool release(gpu_clock *c) {
    if (c->begin)
        CALL("cuEventDestroy_v2", (void *), (c->begin));
    if (c->end)
        CALL("cuEventDestroy_v2", (void *), (c->end));
    if (c->module)
        CALL("cuModuleUnload", (void *), (c->module));
    return true;
}

void gpu_clock_close(gpu_clock *c) {
    device_memory_free(c->flush);
    release(c);
    *c = (gpu_clock){0};
}

bool gpu_clock_begin(const gpu_clock *c) {
    CALL("cuMemsetD32Async", (uint64_t, unsigned, size_t, void *), ((uintptr_t)c->flush, 0, FLUSH_BYTES / 4, NULL));
    CALL("cuEventRecord", (void *, void *), (c->begin, NULL));
    return true;
}

bool gpu_clock_end(const gpu_clock *c, double *seconds) {
    float milliseconds = 0;
    CALL("cuEventRecord", (void *, void *), (c->end, NULL));
    CALL("cuEventSynchronize", (void *), (c->end));
    CALL("cuEventElapsedTime", (float *, void *, void *), (&milliseconds, c->begin, c->end));
    *seconds = 1e-3 * milliseconds;
    return true;
}

/* Of the loop, on a device that is busy when it is enqueued. */
bool gpu_clock_products(const gpu_clock *c, double *flops) {
    unsigned steps = 512;
    uint64_t out = (uintptr_t)c->flush;
    void *parameters[] = {&out, &steps};
    double seconds = 0;
    *flops = 0;
    if (!c->kernel)
        return true;
    if (!gpu_clock_begin(c))
        return false;
    CALL("cuLaunchKernel",
         (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **),
         (c->kernel, c->blocks, 1, 1, THREADS, 1, 1, 0, NULL, parameters, NULL));
    if (!gpu_clock_end(c, &seconds))
        return false;
    *flops = seconds > 0 ? steps * c->flops / seconds : 0;
    return true;
}

bool gpu_clock_copy(const gpu_clock *c, double *bytes) {
    const uint64_t half = FLUSH_BYTES / 2, from = (uintptr_t)c->flush;
    double seconds = 0;
    if (!gpu_clock_begin(c))
        return false;
    CALL("cuMemcpyDtoDAsync_v2", (uint64_t, uint64_t, size_t, void *), (from + half, from, half, NULL));
    if (!gpu_clock_end(c, &seconds))
        return false;
    *bytes = seconds > 0 ? 2.0 * (double)half / seconds : 0;
    return true;
}

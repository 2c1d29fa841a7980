/* SPDX-License-Identifier: Apache-2.0
 * The peak loops are assembly, so that no compiler makes them better or worse: independent chains, more of them than the
 * latency times the width of any processor so far, and numbers that are neither zero nor denormal nor infinite. */
#define _POSIX_C_SOURCE 200809L
#include "peak.h"

#include <stdint.h>
#include <string.h>
#include <time.h>

static double clock_seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double thread_seconds(void) {
    return clock_seconds(CLOCK_THREAD_CPUTIME_ID);
}

static double seconds_for(int threads) {
    return threads == 1 ? thread_seconds() : clock_seconds(CLOCK_MONOTONIC);
}

typedef struct peak_loop {
    const char *isa;
    void (*run)(int64_t turns);
    double flops; /* of a turn */
} peak_loop;

#define FOURTEEN(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11) op(12) op(13)

#if defined(__x86_64__)

#define CLOBBERS                                                                                                       \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",         \
        "xmm13", "xmm14", "xmm15", "cc"

static const float half = 0.5F, one = 1.0F;

/* Without FMA the most there is is as many products as sums. */
#define SSE_SET(i) "movaps %%xmm15, %%xmm" #i "\n\t"
#define SSE_PRODUCT(i) "mulps %%xmm15, %%xmm" #i "\n\t"
#define SSE_SUM(i) "addps %%xmm14, %%xmm" #i "\n\t"
#define SEVEN_PAIRS(a, b) a(0) b(1) a(2) b(3) a(4) b(5) a(6) b(7) a(8) b(9) a(10) b(11) a(12) b(13)

static void run_sse(int64_t turns) {
    __asm__ volatile("movss %1, %%xmm14\n\tshufps $0, %%xmm14, %%xmm14\n\t"
                     "movss %2, %%xmm15\n\tshufps $0, %%xmm15, %%xmm15\n\t" FOURTEEN(SSE_SET)     //
                     "1:\n\t" SEVEN_PAIRS(SSE_PRODUCT, SSE_SUM) SEVEN_PAIRS(SSE_PRODUCT, SSE_SUM) //
                     "dec %0\n\tjnz 1b"
                     : "+r"(turns)
                     : "m"(half), "m"(one)
                     : CLOBBERS);
}

#define FMA_SET(v, i) "vmovaps %%" v "15, %%" v #i "\n\t"
#define FMA_ADD(v, i) "vfmadd231ps %%" v "14, %%" v "15, %%" v #i "\n\t"
#define YMM_SET(i) FMA_SET("ymm", i)
#define YMM_ADD(i) FMA_ADD("ymm", i)
#define ZMM_SET(i) FMA_SET("zmm", i)
#define ZMM_ADD(i) FMA_ADD("zmm", i)
#define FMA_LOOP(v, set, add)                                                                                          \
    __asm__ volatile("vbroadcastss %1, %%" v "14\n\tvbroadcastss %2, %%" v                                             \
                     "15\n\t" FOURTEEN(set) "1:\n\t" FOURTEEN(add) FOURTEEN(add) "dec %0\n\tjnz 1b\n\tvzeroupper"      \
                     : "+r"(turns)                                                                                     \
                     : "m"(half), "m"(one)                                                                             \
                     : CLOBBERS)

static void run_avx2(int64_t turns) {
    FMA_LOOP("ymm", YMM_SET, YMM_ADD);
}

static void run_avx512(int64_t turns) {
    FMA_LOOP("zmm", ZMM_SET, ZMM_ADD);
}

static const peak_loop loops[] = {
    {"baseline", run_sse, 28 * 4}, {"avx2", run_avx2, 28 * 16}, {"avx512", run_avx512, 28 * 32}};

#elif defined(__aarch64__)

#define NEON_SET(i) "movi v" #i ".4s, #0\n\t"
#define NEON_ADD(i) "fmla v" #i ".4s, v30.4s, v31.4s\n\t"
#define MORE(op) op(14) op(15) op(16) op(17) op(18) op(19) op(20) op(21) op(22) op(23)

static void run_neon(int64_t turns) {
    __asm__ volatile("fmov v30.4s, #0.5\n\tfmov v31.4s, #1.0\n\t" FOURTEEN(NEON_SET) MORE(NEON_SET) //
                     "1:\n\t" FOURTEEN(NEON_ADD) MORE(NEON_ADD) "subs %0, %0, #1\n\tb.ne 1b"
                     : "+r"(turns)
                     :
                     : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14",
                       "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v30", "v31", "cc");
}

static const peak_loop loops[] = {{"neon", run_neon, 24 * 8}, {"baseline", run_neon, 24 * 8}};

#else

static const peak_loop loops[] = {{NULL, NULL, 0}};

#endif

/* The rate of one thread, by the clock that seconds_for(threads) reads. */
static double rate(const peak_loop *loop, int threads, double seconds) {
    const int64_t chunk = 20000; /* some 70 microseconds */
    double start = seconds_for(threads), taken = 0;
    int64_t turns = 0;
    do {
        loop->run(chunk);
        turns += chunk;
        taken = seconds_for(threads) - start;
    } while (taken < seconds);
    return (double)turns * loop->flops / taken;
}

double peak_flops(const char *isa, int threads, double seconds) {
    double sum = 0;
    if (strcmp(isa, "amx") == 0) /* has the float32 multiply-adds of avx512, as avx512bf16 has */
        isa = "avx512";
    for (size_t i = 0; i < sizeof loops / sizeof *loops; i++) {
        const peak_loop *loop = &loops[i];
        if (!loop->isa || strncmp(loop->isa, isa, strlen(loop->isa)) != 0)
            continue;
        if (threads == 1)
            return rate(loop, 1, seconds);
#pragma omp parallel num_threads(threads) reduction(+ : sum)
        sum += rate(loop, threads, seconds);
        break;
    }
    return sum;
}

/* Four streams at a time, each asked for a page ahead: of what was tried, the fastest. */
static uint64_t read_part(const uint64_t *p, size_t count) {
    typedef uint64_t lanes __attribute__((vector_size(64), may_alias, aligned(8)));
    size_t quarter = count / 32 * 8;
    lanes sum[4] = {{0}, {0}, {0}, {0}};
    for (size_t i = 0; i < quarter; i += 8)
        for (size_t s = 0; s < 4; s++) {
            __builtin_prefetch(p + s * quarter + i + 512);
            sum[s] ^= *(const lanes *)(p + s * quarter + i);
        }
    uint64_t all = 0;
    for (int s = 0; s < 4; s++)
        for (int i = 0; i < 8; i++)
            all ^= sum[s][i];
    return all;
}

double peak_read(const void *p, size_t bytes, int threads) {
    size_t part = bytes / (size_t)threads / 256 * 256;
    uint64_t all = 0;
    double start = seconds_for(threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(^ : all) if (threads > 1)
    for (int t = 0; t < threads; t++)
        all ^= read_part((const uint64_t *)(const void *)((const char *)p + (size_t)t * part), part / 8);
    double taken = seconds_for(threads) - start;
    __asm__ volatile("" : : "r"(all)); /* so that reading is not left out */
    return (double)part * threads / taken;
}

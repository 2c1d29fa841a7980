/* SPDX-License-Identifier: Apache-2.0
 * The CPU backend: which ISA's kernels to use, how many threads, and the calls into them. */
#define _GNU_SOURCE /* syscall() */
#include "cpu.h"
#include "../backend.h"
#include "../fields.h"
#include "../mask.h"
#include "../status.h"
#include "../tokens.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#ifndef _WIN32
#include <pthread.h>
#endif
#endif
#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef HEDDLE_HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef HEDDLE_HAVE_SVE256
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

typedef struct isa {
    const cpu_kernels *kernels;
    int (*runs_here)(void);
} isa;

static int always(void) {
    return 1;
}

#if defined(HEDDLE_HAVE_AVX2) || defined(HEDDLE_HAVE_AVX512)
static int has_f16c(void) { /* __builtin_cpu_supports has no word for it in every compiler */
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#ifdef HEDDLE_HAVE_AVX2
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
#endif

#ifdef HEDDLE_HAVE_AVX512
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") &&
           has_f16c();
}
#endif

#ifdef HEDDLE_HAVE_AVX512BF16
/* AMD's instruction does twice the multiply-adds of float32's, Intel's half of them: there float32 products are faster. No
 * feature bit tells, but SSE4A does: only AMD's processors have it. */
static int has_fast_avx512bf16(void) {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("sse4a");
}
#endif

#ifdef HEDDLE_HAVE_AMX
/* Linux gives a process the tiles' 8 KB of state in every thread when it asks: once, for good. */
static int has_amx(void) {
    const long arch_req_xcomp_perm = 0x1023, xfeature_xtiledata = 18;
    const unsigned tile_and_bf16 = 1u << 24 | 1u << 22;
    unsigned a, b, c, d = 0;
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d & tile_and_bf16) == tile_and_bf16 &&
           syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
}
#endif

#ifdef HEDDLE_HAVE_SVE256
/* The kernels are compiled for this length of vectors alone. */
static int has_sve256(void) {
    const unsigned long hwcap_sve = 1ul << 22;
    const int pr_sve_get_vl = 51, length = 0xffff;
    return (getauxval(AT_HWCAP) & hwcap_sve) && (prctl(pr_sve_get_vl) & length) == 32;
}
#endif

/* Best first. By features, never by model names: hypervisors hide those. */
static const isa isas[] = {
#ifdef HEDDLE_HAVE_AMX
    {&heddle__cpu_amx, has_amx},
#endif
#ifdef HEDDLE_HAVE_AVX512BF16
    {&heddle__cpu_avx512bf16, has_fast_avx512bf16},
#endif
#ifdef HEDDLE_HAVE_AVX512
    {&heddle__cpu_avx512, has_avx512},
#endif
#ifdef HEDDLE_HAVE_AVX2
    {&heddle__cpu_avx2, has_avx2},
#endif
#ifdef HEDDLE_HAVE_SVE256
    {&heddle__cpu_sve256, has_sve256},
#endif
#ifdef HEDDLE_HAVE_NEON
    {&heddle__cpu_neon, always},
#endif
    {&heddle__cpu_baseline, always},
};

const char *heddle_cpu_isa_available(int i) {
    for (size_t x = 0; i >= 0 && x < sizeof isas / sizeof *isas; x++)
        if (isas[x].runs_here() && i-- == 0)
            return isas[x].kernels->isa;
    return NULL;
}

/* The record of this device: chosen at the first call, the same ever after. */
static _Atomic(const cpu_kernels *) chosen;

const cpu_kernels *heddle__cpu_choose(const char *wanted) {
    const cpu_kernels *k = NULL;
    for (size_t x = sizeof isas / sizeof *isas; x-- > 0;)
        if (isas[x].runs_here()) {
            k = isas[x].kernels;
            if (wanted && strcmp(wanted, k->isa) == 0)
                break;
        }
    atomic_store_explicit(&chosen, k, memory_order_release);
    return k;
}

static const cpu_kernels *kernels(void) {
    const cpu_kernels *k = atomic_load_explicit(&chosen, memory_order_acquire);
    return k ? k : heddle__cpu_choose(getenv("HEDDLE_CPU"));
}

const char *heddle_cpu_isa(void) {
    return kernels()->isa;
}

/* OpenMP's number, but one inside a parallel region (no oversubscription), and one when the work is not worth waking others: a
 * core does 2^21 multiply-adds in some 20 microseconds, and a thread that must wait for its turn on a busy machine can cost
 * milliseconds. */
static int threads_for(double multiply_adds) {
#ifdef _OPENMP
    if (omp_in_parallel() || multiply_adds < 0x1p21)
        return 1;
    return omp_get_max_threads();
#else
    (void)multiply_adds;
    return 1;
#endif
}

#if defined(_OPENMP) && defined(__GNUC__) && !defined(__clang__) && !defined(_WIN32)
/* fork() gives its child one thread, but libgomp there would wait for ever for the others that the forking thread had. So it lets
 * them go before it forks, and each process starts its own again when it needs them (libomp does so by itself). A child of a
 * parallel region is still in it, and uses one thread. */
static void end_threads(void) {
    (void)omp_pause_resource_all(omp_pause_soft); /* refused in a parallel region */
}

__attribute__((constructor)) static void prepare_for_forks(void) {
    (void)pthread_atfork(end_threads, NULL, NULL); /* out of memory: a child may hang, as without it */
}
#endif

static const cpu_kernels *kernels_for(heddle_dtype type, bool few) {
    const cpu_kernels *k = kernels();
    return k->others && (type != HEDDLE_BF16 || few) ? k->others : k;
}

static const cpu_kernels *attention_kernels(const attention_plan *plan) {
    return kernels_for(plan->a.dtype, false);
}

static const cpu_kernels *norm_linear_kernels(const norm_linear_plan *plan) {
    const bool widens = plan->pass == HEDDLE_BACKWARD && kernels()->widens;
    return kernels_for(plan->a.dtype, few_results(plan) && !widens);
}

static heddle_status available(void) {
    return HEDDLE_OK;
}

static void describe(char *text, size_t n) {
    int threads = threads_for(1e18);
    snprintf(text, n, "%s, %d thread%s", kernels()->isa, threads, threads == 1 ? "" : "s");
}

static heddle_status plan_attention(attention_plan *plan) {
    const heddle_attention *a = &plan->a;
    plan->threads = threads_for((double)a->b * (double)a->h * (double)a->sq * (double)a->sk * (double)(a->d + a->dv));
    attention_kernels(plan)->plan_attention(plan);
    return HEDDLE_OK;
}

/* What is prepared is for the kernels that a problem has but for few results: those pack their own. */
static const cpu_kernels *weight_kernels(const norm_linear_plan *plan) {
    return kernels_for(plan->a.dtype, false);
}

static heddle_status plan_norm_linear(norm_linear_plan *plan) {
    const heddle_norm_linear *a = &plan->a;
    const cpu_kernels *k = norm_linear_kernels(plan), *weight = weight_kernels(plan);
    const size_t bytes = weight->panel_bytes(a);
    plan->threads = threads_for((double)a->m * (double)a->n * (double)a->k);
    plan->prepared = bytes ? sizeof(prepared_header) + bytes : 0;
    plan->reads_prepared =
        plan->pass == HEDDLE_FORWARD && (a->features & HEDDLE_PREPARED) && bytes && k == weight && k->goes_by_panels(a);
    k->plan_norm_linear(plan);
    return HEDDLE_OK;
}

/* Bits of elements all over W: reading all of it would cost what the panels save. The places are multiples of the golden ratio, so that they
 * are in all rows and columns alike. */
static void take_samples(const heddle_norm_linear *a, const void *w, uint32_t sample[PREPARED_SAMPLES]) {
    const int64_t rows = norm_linear_extent(a, 'N'), bytes = (int64_t)heddle_dtype_size(a->dtype);
    for (int64_t x = 0; x < PREPARED_SAMPLES; x++) {
        const uint64_t place = (uint64_t)(x + 1) * UINT64_C(0x9E3779B97F4A7C15) % (uint64_t)(rows * a->k);
        const int64_t row = (int64_t)place / a->k, column = (int64_t)place % a->k;
        sample[x] = 0;
        memcpy(&sample[x], (const char *)w + (row * a->w_stride + column) * bytes, (size_t)bytes);
    }
}

static prepared_header header_of(const norm_linear_plan *plan, const void *w) {
    const heddle_norm_linear *a = &plan->a;
    prepared_header h = {.dtype = (int32_t)a->dtype,
                         .halves = is_gated(a->activation) ? 2 : 1,
                         .k = a->k,
                         .n = a->n,
                         .bytes = (int64_t)plan->prepared};
    snprintf(h.library, sizeof h.library, "heddle %s", heddle_version_string());
    snprintf(h.isa, sizeof h.isa, "%s", weight_kernels(plan)->isa);
    take_samples(a, w, h.sample);
    return h;
}

/* Also where this forward does not read it: whoever hands in another problem's has mistaken it. */
static heddle_status check_prepared(const norm_linear_plan *plan, const heddle_norm_linear_data *data) {
    prepared_header found;
    if (!data->prepared)
        return HEDDLE_OK;
    const prepared_header wanted = header_of(plan, data->w);
    memcpy(&found, data->prepared, sizeof found);
    if (memcmp(&found, &wanted, sizeof found) == 0)
        return HEDDLE_OK;
    if (memcmp(&found, &wanted, offsetof(prepared_header, sample)) == 0)
        return fail(HEDDLE_BAD_VALUE, "prepared is of another weight than w: it has changed since, or is not this one");
    found.library[sizeof found.library - 1] = found.isa[sizeof found.isa - 1] = 0;
    if (memcmp(found.library, "heddle ", 7) != 0)
        return fail(HEDDLE_BAD_VALUE, "prepared = %p is nothing that heddle_norm_linear_prepare has written",
                    data->prepared);
    return fail(
        HEDDLE_BAD_VALUE,
        "prepared is of k = %lld, n = %lld, dtype %d, %d half or halves, by %s, %s; this problem has k = %lld, n = "
        "%lld, dtype %d, %d, by %s, %s",
        (long long)found.k, (long long)found.n, found.dtype, found.halves, found.library, found.isa,
        (long long)wanted.k, (long long)wanted.n, wanted.dtype, wanted.halves, wanted.library, wanted.isa);
}

static heddle_status prepare_norm_linear(const norm_linear_plan *plan, const heddle_norm_linear_data *data,
                                         void *prepared, void *stream) {
    (void)stream;
    norm_linear_plan own = *plan;
    const prepared_header header = header_of(plan, data->w);
    own.threads = threads_for((double)plan->prepared);
    memset(prepared, 0, (size_t)plan->prepared); /* columns of a panel that W has not, and the same bytes every time */
    memcpy(prepared, &header, sizeof header);
    weight_kernels(plan)->fill_panels(&own, data, (float *)(void *)((char *)prepared + sizeof header));
    return HEDDLE_OK;
}

static heddle_status run_attention(const attention_plan *plan, const heddle_attention_data *data, void *workspace,
                                   void *stream) {
    (void)stream;
    if (plan->pass == HEDDLE_FORWARD)
        attention_kernels(plan)->attention_forward(plan, data, workspace);
    else
        attention_kernels(plan)->attention_backward(plan, data, workspace);
    return HEDDLE_OK;
}

static heddle_status run_norm_linear(const norm_linear_plan *plan, const heddle_norm_linear_data *data, void *workspace,
                                     void *stream) {
    (void)stream;
    if (plan->pass == HEDDLE_FORWARD)
        TRY(check_prepared(plan, data));
    if (plan->pass == HEDDLE_FORWARD)
        norm_linear_kernels(plan)->norm_linear_forward(plan, data, workspace);
    else
        norm_linear_kernels(plan)->norm_linear_backward(plan, data, workspace);
    return HEDDLE_OK;
}

static heddle_status merge(const heddle_merge *m, void *o, void *lse, const void *other_o, const void *other_lse,
                           void *stream) {
    (void)stream;
    heddle__cpu_merge(m, o, lse, other_o, other_lse,
                      threads_for(8 * (double)m->b * (double)m->h * (double)m->s * (double)m->dv));
    return HEDDLE_OK;
}

static heddle_status append(const heddle_append *a, const heddle_append_data *t, void *stream) {
    (void)stream;
    const double width = (double)a->hk * (double)(a->d + a->dv) + (double)a->h * (double)a->d;
    heddle__cpu_append(a, t, threads_for(8 * (double)append_tokens(a) * width));
    return HEDDLE_OK;
}

const backend heddle_cpu_backend = {available,           describe,      plan_attention,
                                    plan_norm_linear,    run_attention, run_norm_linear,
                                    prepare_norm_linear, merge,         append};

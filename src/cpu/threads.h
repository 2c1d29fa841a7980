/* SPDX-License-Identifier: Apache-2.0
 * Dividing work among OpenMP's threads, and a workspace among the parts that need it.
 * Tasks are handed out in order, one at a time, and what a task computes never depends on who runs it. */
#ifndef HEDDLE_CPU_THREADS_H
#define HEDDLE_CPU_THREADS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct ticket {
    _Atomic int64_t next;
} ticket;

static inline int64_t take_ticket(ticket *t) {
    return atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed);
}

/* How many of very many small things a ticket is for: drawing one waits for all stores before it. */
static inline int64_t units_together(int64_t units, int64_t threads) {
    const int64_t share = threads > 1 ? units / (64 * threads) : units;
    return share > 1 ? share : 1;
}

/* The thing after `now` that the thread will probably have. */
static inline int64_t next_of(int64_t now, int64_t together, int64_t threads) {
    return now + 1 + ((now + 1) % together ? 0 : (threads - 1) * together);
}

static inline int thread_index(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Waits until *turn is `value`. Whoever must set it holds a lower ticket and is running, so this ends. */
static inline void wait_for_turn(_Atomic uint32_t *turn, uint32_t value) {
    while (atomic_load_explicit(turn, memory_order_acquire) != value) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

/* Carves a workspace: with a NULL base it only counts. Every part starts at a cache line. */
typedef struct carver {
    char *base;
    size_t used;
} carver;

static inline void *carve(carver *c, size_t bytes) {
    void *p = c->base ? c->base + c->used : NULL;
    c->used += (bytes + 63) / 64 * 64;
    return p;
}

static inline float *carve_floats(carver *c, int64_t count) {
    return carve(c, (size_t)count * sizeof(float));
}

#endif

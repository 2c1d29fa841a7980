/* SPDX-License-Identifier: Apache-2.0
 * Launches of kernels on the processor: blocks one after another, the threads of a block as fibers.
 *
 * A fiber runs until it waits at a barrier or for its warp; then others run, in an order that is drawn anew for each block (EMULATOR_SEED).
 * Warps have ranks: the first that can run does, so that some are far ahead of others; now and then one becomes the last. Shared memory
 * holds NaN at first, and so does what a copy has not yet brought. */
#include "run.h"
#include "emulator.h"

#include "fiber.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector>

#define MOST_THREADS 1024
#define MOST_WARPS (MOST_THREADS / EMULATOR_LANES)
#define STACK (256 * 1024)
#define PAGE 4096
#define MARGIN 1024        /* behind a block's shared memory, that nobody may write */
#define UNSET 0xff         /* of which float32 and both 16-bit types are made NaN */
#define PATIENCE (1 << 22) /* turns given away in vain until nobody is waited for any more */

struct copy {
    uint32_t to;
    const void *from;
    unsigned bytes, all;
    int group;
};

struct fiber {
    fiber_context context;
    std::vector<copy> copies;
    int committed;
    bool answer; /* of the barrier that it came from */
};

struct warp {
    uint32_t ready, ended, arrived, rank;
    emulator_operation *operation; /* that those who have arrived are at */
    void *mine[EMULATOR_LANES];
};

struct barrier {
    int arrived, wanted;
    bool any;
    uint32_t waiting[MOST_WARPS];
};

/* As kernels declare it, whatever they call it. */
alignas(PAGE) thread_local char shared[EMULATOR_SHARED + MARGIN];
extern thread_local char held[sizeof shared] __attribute__((alias("shared")));
extern thread_local char z[sizeof shared] __attribute__((alias("shared")));

emulator_place emulator_now;

static struct {
    const emulator_kernel *kernel;
    const void *parameters;
    unsigned threads, bytes; /* of a block */
    fiber_context host;
    bool failed;
    /* The block that runs. */
    unsigned running, live, last_rank, in_vain;
    int turns; /* until another warp is to run */
    uint64_t random;
    warp warps[MOST_WARPS];
    barrier barriers[EMULATOR_BARRIERS];
} run;
static fiber fibers[MOST_THREADS];
static char *stacks;

static uint32_t random_bits(void) {
    run.random = run.random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(run.random >> 33);
}

static void describe(const char *what, va_list list) {
    char text[256];
    vsnprintf(text, sizeof text, what, list);
    fprintf(stderr, "emulator: %s, block %u, thread %u: %s\n", run.kernel->symbol, emulator_now.block.x,
            emulator_now.thread.x, text);
}

void emulator_fail(const char *what, ...) {
    va_list list;
    va_start(list, what);
    describe(what, list);
    va_end(list);
    run.failed = true;
    fiber_switch(&fibers[run.running].context, &run.host);
    abort(); /* nobody comes back */
}

/* ----------------------------------------------------------------------------------------------- who runs next */

static void resume(unsigned next) {
    fiber *from = &fibers[run.running];
    if (next == run.running)
        return;
    run.running = next;
    emulator_now.thread.x = next;
    fiber_switch(&from->context, &fibers[next].context);
}

/* What the fibers of a block that are not ready wait for. */
[[noreturn]] static void tell_stuck(void) {
    for (int x = 0; x < EMULATOR_BARRIERS; x++)
        if (run.barriers[x].arrived)
            fprintf(stderr, "emulator: barrier %d: %d threads of %d have arrived\n", x, run.barriers[x].arrived,
                    run.barriers[x].wanted);
    for (unsigned w = 0; w * EMULATOR_LANES < run.threads; w++)
        if (run.warps[w].arrived)
            fprintf(stderr, "emulator: warp %u: lanes %08x wait for all others, of which %08x have ended\n", w,
                    run.warps[w].arrived, run.warps[w].ended);
    emulator_fail("all %u threads that have not ended wait", run.live);
}

/* Another one runs; returns when this one is to. */
static void go_on(void) {
    unsigned w = run.running / EMULATOR_LANES;
    const unsigned warps = run.threads / EMULATOR_LANES;
    if (--run.turns < 0 || !run.warps[w].ready) {
        if (run.turns < 0) {
            run.turns = (int)(random_bits() % (16 * EMULATOR_LANES));
            run.warps[w].rank = --run.last_rank;
        }
        w = 0;
        for (unsigned x = 1; x < warps; x++)
            if (run.warps[x].ready && (!run.warps[w].ready || run.warps[x].rank > run.warps[w].rank))
                w = x;
        if (!run.warps[w].ready)
            tell_stuck();
    }
    /* Of its lanes the next one; from here around. */
    const unsigned lane = run.running % EMULATOR_LANES;
    const uint32_t behind = run.warps[w].ready & ~((2u << lane) - 1u);
    resume(w * EMULATOR_LANES + (unsigned)__builtin_ctz(behind ? behind : run.warps[w].ready));
}

static void wait_here(void) {
    run.warps[run.running / EMULATOR_LANES].ready &= ~(1u << run.running % EMULATOR_LANES);
    run.in_vain = 0;
    go_on();
}

void emulator_give_way(void) {
    if (++run.in_vain > PATIENCE)
        emulator_fail("what it looks at does not change");
    run.turns = 0;
    go_on();
}

/* ---------------------------------------------------------------------------------------------- where they meet */

void emulator_meet(emulator_operation *all, void *mine) {
    warp *w = &run.warps[run.running / EMULATOR_LANES];
    const unsigned lane = run.running % EMULATOR_LANES;
    if (w->arrived && w->operation != all)
        emulator_fail("its lane is at another warp-wide operation than the lanes %08x", w->arrived);
    w->operation = all;
    w->mine[lane] = mine;
    w->arrived |= 1u << lane;
    if (w->arrived != ~0u) {
        wait_here();
        return;
    }
    all(w->mine);
    w->arrived = 0;
    w->ready = ~0u;
}

static void end_barrier(barrier *b) {
    for (unsigned w = 0; w * EMULATOR_LANES < run.threads; w++) {
        for (uint32_t left = b->waiting[w]; left; left &= left - 1)
            fibers[w * EMULATOR_LANES + (unsigned)__builtin_ctz(left)].answer = b->any;
        run.warps[w].ready |= b->waiting[w];
        b->waiting[w] = 0;
    }
    b->arrived = 0;
    b->any = false;
}

bool emulator_barrier(int barrier, int threads, bool yes, bool waits) {
    struct barrier *b = &run.barriers[barrier];
    const bool of_all = !threads;
    if (of_all)
        threads = (int)run.live;
    if (b->arrived && b->wanted != threads && !(of_all && b->wanted > threads))
        emulator_fail("barrier %d is one of %d threads here, and of %d elsewhere", barrier, threads, b->wanted);
    b->wanted = threads;
    b->any |= yes;
    if (waits)
        b->waiting[run.running / EMULATOR_LANES] |= 1u << run.running % EMULATOR_LANES;
    if (++b->arrived == threads)
        end_barrier(b);
    else if (waits)
        wait_here();
    return fibers[run.running].answer;
}

/* A thread that has ended is waited for no longer. */
static void end_thread(void) {
    warp *w = &run.warps[run.running / EMULATOR_LANES];
    barrier *b = &run.barriers[0];
    w->ended |= 1u << run.running % EMULATOR_LANES;
    const int wanted = (int)run.live--;
    if (b->arrived && b->wanted == wanted) {
        b->wanted--;
        if (b->arrived == b->wanted)
            end_barrier(b);
    }
    if (run.live)
        wait_here();
    fiber_switch(&fibers[run.running].context, &run.host);
}

static void begin_thread(void) {
    run.kernel->call(run.parameters);
    end_thread();
}

/* ------------------------------------------------------------------------------------------------ shared memory */

char *emulator_shared(uint32_t address, unsigned bytes) {
    const uint32_t at = address - EMULATOR_FIRST_ADDRESS;
    if (at + (uint64_t)bytes > run.bytes || address % bytes)
        emulator_fail("%u bytes of shared memory at %#x: a block has %u from %#x on", bytes, address, run.bytes,
                      EMULATOR_FIRST_ADDRESS);
    return shared + at;
}

uint32_t emulator_address(const void *p) {
    const uintptr_t at = (uintptr_t)p - (uintptr_t)shared;
    if (at > run.bytes)
        emulator_fail("the address of what is not in its dynamic shared memory");
    return (uint32_t)at + EMULATOR_FIRST_ADDRESS;
}

void emulator_copy(uint32_t to, const void *from, unsigned bytes, unsigned all) {
    if (bytes > all || (bytes && (uintptr_t)from % all))
        emulator_fail("a copy of %u bytes, of which %u are read at %p", all, bytes, from);
    memset(emulator_shared(to, all), UNSET, all);
    fibers[run.running].copies.push_back({to, from, bytes, all, fibers[run.running].committed});
}

void emulator_commit(void) {
    fibers[run.running].committed++;
}

void emulator_wait(int groups) {
    fiber *f = &fibers[run.running];
    size_t left = 0;
    for (const copy &c : f->copies) {
        if (c.group >= f->committed - groups) {
            f->copies[left++] = c;
            continue;
        }
        char *to = emulator_shared(c.to, c.all);
        if (c.bytes)
            memcpy(to, c.from, c.bytes);
        memset(to + c.bytes, 0, c.all - c.bytes);
    }
    f->copies.resize(left);
}

/* ------------------------------------------------------------------------------------------------------- launch */

static void begin_block(unsigned block, const emulator_module *module) {
    emulator_now.block.x = block;
    memset(shared, UNSET, run.bytes + MARGIN);
    emulator_unset(module, UNSET);
    memset(run.warps, 0, sizeof run.warps);
    memset(run.barriers, 0, sizeof run.barriers);
    run.live = run.threads;
    run.last_rank = 1u << 31;
    run.in_vain = 0;
    run.turns = (int)(random_bits() % (16 * EMULATOR_LANES));
    for (unsigned w = 0; w * EMULATOR_LANES < run.threads; w++) {
        run.warps[w].ready = ~0u;
        run.warps[w].rank = (1u << 31) + random_bits() % 1024;
    }
    for (unsigned x = 0; x < run.threads; x++) {
        fibers[x].copies.clear();
        fibers[x].committed = 0;
        /* Not all tops in the same lines of the cache. */
        fiber_begin(&fibers[x].context, stacks + (size_t)x * STACK, STACK - x % 64 * 1088, begin_thread);
    }
}

/* A page that nobody may touch lies below each stack. */
static bool make_stacks(void) {
    if (stacks)
        return true;
    void *at = mmap(NULL, (size_t)MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return false;
    stacks = (char *)at;
    for (size_t x = 0; x < MOST_THREADS; x++)
        mprotect(stacks + x * STACK, PAGE, PROT_NONE);
    return true;
}

bool emulator_launch(const emulator_module *module, const emulator_kernel *kernel, const void *parameters,
                     unsigned blocks, unsigned threads, unsigned bytes) {
    static uint64_t launches;
    const char *seed = getenv("EMULATOR_SEED");
    if (!make_stacks() || threads > MOST_THREADS || threads % EMULATOR_LANES || bytes > EMULATOR_SHARED)
        return false;
    run.kernel = kernel;
    run.parameters = parameters;
    run.threads = threads;
    run.bytes = bytes;
    run.failed = false;
    run.random = (seed ? strtoull(seed, NULL, 10) : 1) * 1000003u + ++launches;
    if (getenv("EMULATOR_TRACE"))
        fprintf(stderr, "emulator: %s, %u blocks of %u threads and %u bytes\n", kernel->symbol, blocks, threads, bytes);
    emulator_now.threads = {threads, 1, 1};
    emulator_now.blocks = {blocks, 1, 1};
    for (unsigned block = 0; block < blocks && !run.failed; block++) {
        begin_block(block, module);
        run.running = random_bits() % run.threads;
        emulator_now.thread = {run.running, 0, 0};
        fiber_switch(&run.host, &fibers[run.running].context);
        for (unsigned x = 0; x < MARGIN && !run.failed; x++)
            if ((unsigned char)shared[run.bytes + x] != UNSET) {
                fprintf(stderr, "emulator: %s, block %u: something was written behind its %u bytes of shared memory\n",
                        kernel->symbol, block, bytes);
                run.failed = true;
            }
    }
    return !run.failed;
}

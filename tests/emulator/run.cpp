/* SPDX-License-Identifier: Apache-2.0
 * Launches of kernels on the processor: blocks one after another, the threads of a block as fibers.
 *
 * A fiber runs until it waits at a barrier or for its warp; then others run, in an order that is drawn anew for each block (EMULATOR_SEED).
 * Warps have ranks: the first that can run does, so that some are far ahead of others; now and then one becomes the last. Shared memory
 * holds NaN at first, and so does what a copy has not yet brought. */
#include "run.h"
#include "emulator.h"

#include "fiber.h"
#include "hopper.h"

#include <pthread.h>
#include <semaphore.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector>

#define MOST_THREADS 2048
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
    bool answer;        /* of the barrier that it came from */
    const void *sleeps; /* until somebody changes that */
    unsigned phase;     /* of the cluster's barrier, when it arrived there */
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
bool emulator_f16;

/* A block of a cluster. Kernels know shared memory by a name of each thread of the host, so a block runs on a thread of its own; one of them
 * runs at a time. */
struct block {
    char *memory;
    unsigned live; /* threads that have not ended */
    barrier barriers[EMULATOR_BARRIERS];
    fiber_context host;
    sem_t go;
    unsigned next; /* fiber to run when this block goes on, or HOST */
};
#define HOST (~0u)

static struct {
    const emulator_kernel *kernel;
    const void *parameters;
    const emulator_module *module;
    unsigned threads, bytes; /* of a block */
    unsigned together;       /* blocks of a cluster */
    bool failed;
    /* The cluster that runs. */
    unsigned first, running, last_rank, in_vain, arrived, phase;
    int turns; /* until another warp is to run */
    uint64_t random;
    warp warps[MOST_WARPS];
    block blocks[EMULATOR_CLUSTER];
} run;
static fiber fibers[MOST_THREADS];
static char *stacks;

static block *own_block(void) {
    return &run.blocks[run.running / run.threads];
}

static unsigned all_warps(void) {
    return run.threads * run.together / EMULATOR_LANES;
}

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

/* The cluster has ended. */
[[noreturn]] static void leave(void) {
    block *own = own_block();
    for (unsigned x = 0; x < run.together; x++)
        if (&run.blocks[x] != own) {
            run.blocks[x].next = HOST;
            sem_post(&run.blocks[x].go);
        }
    fiber_switch(&fibers[run.running].context, &own->host);
    abort(); /* nobody comes back */
}

void emulator_fail(const char *what, ...) {
    va_list list;
    va_start(list, what);
    describe(what, list);
    va_end(list);
    run.failed = true;
    leave();
}

unsigned emulator_random(void) {
    return random_bits();
}

unsigned emulator_fiber(void) {
    return run.running;
}

/* ----------------------------------------------------------------------------------------------- who runs next */

static void resume(unsigned next) {
    const unsigned from = run.running;
    block *own = own_block();
    if (next == from)
        return;
    run.running = next;
    emulator_now.thread.x = next % run.threads;
    emulator_now.block.x = run.first + next / run.threads;
    if (own_block() != own) {
        own_block()->next = next;
        sem_post(&own_block()->go);
        sem_wait(&own->go);
        if (own->next == HOST)
            fiber_switch(&fibers[from].context, &own->host);
        next = own->next;
    }
    if (next != from)
        fiber_switch(&fibers[from].context, &fibers[next].context);
}

/* What the fibers of a block that are not ready wait for. */
[[noreturn]] static void tell_stuck(void) {
    for (unsigned b = 0; b < run.together; b++)
        for (int x = 0; x < EMULATOR_BARRIERS; x++)
            if (run.blocks[b].barriers[x].arrived)
                fprintf(stderr, "emulator: barrier %d: %d threads of %d have arrived\n", x,
                        run.blocks[b].barriers[x].arrived, run.blocks[b].barriers[x].wanted);
    for (unsigned w = 0; w < all_warps(); w++) {
        if (run.warps[w].arrived)
            fprintf(stderr, "emulator: warp %u: lanes %08x wait for all others, of which %08x have ended\n", w,
                    run.warps[w].arrived, run.warps[w].ended);
        uint32_t lanes = 0;
        const void *what = NULL;
        for (unsigned lane = 0; lane < EMULATOR_LANES; lane++)
            if (fibers[w * EMULATOR_LANES + lane].sleeps) {
                lanes |= 1u << lane;
                what = fibers[w * EMULATOR_LANES + lane].sleeps;
            }
        if (lanes && what != &run.phase)
            fprintf(stderr, "emulator: warp %u: lanes %08x wait for the phase of a barrier, the last one at %#x\n", w,
                    lanes,
                    (unsigned)((const char *)what - run.blocks[w * EMULATOR_LANES / run.threads].memory) +
                        EMULATOR_FIRST_ADDRESS);
        else if (lanes)
            fprintf(stderr, "emulator: warp %u: lanes %08x wait for the cluster\n", w, lanes);
    }
    emulator_fail("all threads that have not ended wait");
}

static unsigned most_urgent(void) {
    unsigned w = 0;
    for (unsigned x = 1; x < all_warps(); x++)
        if (run.warps[x].ready && (!run.warps[w].ready || run.warps[x].rank > run.warps[w].rank))
            w = x;
    return w;
}

/* Another one runs; returns when this one is to. */
static void go_on(void) {
    unsigned w = run.running / EMULATOR_LANES;
    if (--run.turns < 0 || !run.warps[w].ready) {
        if (run.turns < 0) {
            run.turns = (int)(random_bits() % (16 * EMULATOR_LANES));
            run.warps[w].rank = --run.last_rank;
        }
        w = most_urgent();
        while (!run.warps[w].ready) {
            if (!hopper_go_on())
                tell_stuck();
            w = most_urgent();
        }
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

void emulator_sleep(const void *what) {
    fibers[run.running].sleeps = what;
    wait_here();
}

void emulator_wake(const void *what) {
    for (unsigned x = 0; x < run.threads * run.together; x++)
        if (fibers[x].sleeps == what) {
            fibers[x].sleeps = NULL;
            run.warps[x / EMULATOR_LANES].ready |= 1u << x % EMULATOR_LANES;
        }
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
    for (unsigned w = 0; w < all_warps(); w++) {
        for (uint32_t left = b->waiting[w]; left; left &= left - 1)
            fibers[w * EMULATOR_LANES + (unsigned)__builtin_ctz(left)].answer = b->any;
        run.warps[w].ready |= b->waiting[w];
        b->waiting[w] = 0;
    }
    b->arrived = 0;
    b->any = false;
}

bool emulator_barrier(int barrier, int threads, bool yes, bool waits) {
    struct barrier *b = &own_block()->barriers[barrier];
    const bool of_all = !threads;
    if (of_all)
        threads = (int)own_block()->live;
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

void emulator_cluster_arrive(void) {
    fibers[run.running].phase = run.phase;
    if (++run.arrived < run.threads * run.together)
        return;
    run.arrived = 0;
    run.phase++;
    emulator_wake(&run.phase);
}

void emulator_cluster_wait(void) {
    if (fibers[run.running].phase == run.phase)
        emulator_sleep(&run.phase);
}

/* A thread that has ended is waited for no longer. */
static void end_thread(void) {
    warp *w = &run.warps[run.running / EMULATOR_LANES];
    barrier *b = &own_block()->barriers[0];
    w->ended |= 1u << run.running % EMULATOR_LANES;
    const int wanted = (int)own_block()->live--;
    if (b->arrived && b->wanted == wanted) {
        b->wanted--;
        if (b->arrived == b->wanted)
            end_barrier(b);
    }
    for (unsigned x = 0; x < run.together; x++)
        if (run.blocks[x].live)
            wait_here();
    leave();
}

static void begin_thread(void) {
    run.kernel->call(run.parameters);
    end_thread();
}

/* ------------------------------------------------------------------------------------------------ shared memory */

char *emulator_shared(uint32_t address, unsigned bytes) {
    const uint32_t at = address % EMULATOR_BLOCK - EMULATOR_FIRST_ADDRESS, block = address / EMULATOR_BLOCK;
    if (at + (uint64_t)bytes > run.bytes || address % bytes || block > run.together)
        emulator_fail("%u bytes of shared memory at %#x: a block has %u from %#x on", bytes, address, run.bytes,
                      EMULATOR_FIRST_ADDRESS);
    return (block ? run.blocks[block - 1].memory : own_block()->memory) + at;
}

uint32_t emulator_address_in(uint32_t address, int block) {
    return address % EMULATOR_BLOCK + EMULATOR_BLOCK * (uint32_t)(block + 1);
}

uint32_t emulator_address(const void *p) {
    const uintptr_t at = (uintptr_t)p - (uintptr_t)shared;
    if (at > run.bytes)
        emulator_fail("the address of what is not in its dynamic shared memory");
    return (uint32_t)at + EMULATOR_FIRST_ADDRESS;
}

void emulator_copy(uint32_t to, const void *from, unsigned bytes, unsigned all) {
    if (bytes > all || (uintptr_t)from % all) /* also where nothing is read */
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

static void begin_threads(unsigned block) {
    struct block *b = &run.blocks[block];
    memset(b->barriers, 0, sizeof b->barriers);
    b->live = run.threads;
    for (unsigned x = block * run.threads; x < (block + 1) * run.threads; x++) {
        fibers[x].copies.clear();
        fibers[x].committed = 0;
        fibers[x].sleeps = NULL;
        /* Not all tops in the same lines of the cache. */
        fiber_begin(&fibers[x].context, stacks + (size_t)x * STACK, STACK - x % 64 * 1088, begin_thread);
    }
}

static void begin_cluster(unsigned first) {
    run.first = first;
    run.last_rank = 1u << 31;
    run.in_vain = run.arrived = run.phase = 0;
    run.turns = (int)(random_bits() % (16 * EMULATOR_LANES));
    memset(run.warps, 0, sizeof run.warps);
    for (unsigned w = 0; w < all_warps(); w++) {
        run.warps[w].ready = ~0u;
        run.warps[w].rank = (1u << 31) + random_bits() % 1024;
    }
    for (unsigned x = 0; x < run.together; x++)
        begin_threads(x);
    hopper_begin();
}

static void check_margin(const block *b) {
    for (unsigned x = 0; x < MARGIN && !run.failed; x++)
        if ((unsigned char)b->memory[run.bytes + x] != UNSET) {
            fprintf(stderr, "emulator: %s, block %u: something was written behind its %u bytes of shared memory\n",
                    run.kernel->symbol, run.first + (unsigned)(b - run.blocks), run.bytes);
            run.failed = true;
        }
}

/* On the host's thread of that block. */
static void run_block(block *b) {
    b->memory = shared;
    memset(shared, UNSET, run.bytes + MARGIN);
    emulator_unset(run.module, UNSET);
    if (b > run.blocks) {
        sem_post(&run.blocks[0].go); /* its memory is there */
        sem_wait(&b->go);
        if (b->next == HOST)
            return;
    } else {
        for (unsigned x = 1; x < run.together; x++)
            sem_wait(&b->go);
        b->next = run.running = random_bits() % run.threads;
        emulator_now.thread = {run.running, 0, 0};
        emulator_now.block.x = run.first;
    }
    fiber_switch(&b->host, &fibers[b->next].context);
    check_margin(b);
}

static void *run_other_block(void *b) {
    run_block((block *)b);
    return NULL;
}

static void run_cluster(unsigned first) {
    pthread_t threads[EMULATOR_CLUSTER];
    begin_cluster(first);
    for (unsigned x = 0; x < run.together; x++)
        sem_init(&run.blocks[x].go, 0, 0);
    for (unsigned x = 1; x < run.together; x++)
        if (pthread_create(&threads[x], NULL, run_other_block, &run.blocks[x]))
            abort();
    run_block(&run.blocks[0]);
    for (unsigned x = 1; x < run.together; x++)
        pthread_join(threads[x], NULL);
    for (unsigned x = 0; x < run.together; x++)
        sem_destroy(&run.blocks[x].go);
    const char *const wrong = run.failed ? NULL : hopper_end();
    if (wrong) {
        fprintf(stderr, "emulator: %s, cluster of block %u: %s\n", run.kernel->symbol, run.first, wrong);
        run.failed = true;
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
    if (!make_stacks() || threads * kernel->together > MOST_THREADS || threads % EMULATOR_LANES ||
        bytes > EMULATOR_SHARED || blocks % kernel->together)
        return false;
    run.module = module;
    run.kernel = kernel;
    run.parameters = parameters;
    run.threads = threads;
    run.bytes = bytes;
    run.together = kernel->together;
    run.failed = false;
    run.random = (seed ? strtoull(seed, NULL, 10) : 1) * 1000003u + ++launches;
    if (getenv("EMULATOR_TRACE"))
        fprintf(stderr, "emulator: %s, %u blocks of %u threads and %u bytes\n", kernel->symbol, blocks, threads, bytes);
    emulator_now.threads = {threads, 1, 1};
    emulator_now.blocks = {blocks, 1, 1};
    for (unsigned first = 0; first < blocks && !run.failed; first += run.together)
        run_cluster(first);
    return !run.failed;
}

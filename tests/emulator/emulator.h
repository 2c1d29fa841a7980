/* SPDX-License-Identifier: Apache-2.0
 * What kernels that are compiled for the processor ask of who runs them (run.cpp). A thread of a block is a fiber: it runs until it waits
 * for others, and then another one does. */
#ifndef HEDDLE_TESTS_EMULATOR_H
#define HEDDLE_TESTS_EMULATOR_H

#include <stdint.h>

#define EMULATOR_LANES 32
#define EMULATOR_BARRIERS 16
#define EMULATOR_SHARED (228 * 1024) /* of a block, at most */
#define EMULATOR_CLUSTER 4           /* blocks, at most */
#define EMULATOR_BLOCK (1u << 24)    /* from the addresses of a block of the cluster to those of the next */
#define EMULATOR_FIRST_ADDRESS 1024u /* of shared memory; on Hopper, too */

struct emulator_index {
    unsigned x, y, z;
};

/* Of the fiber that runs. */
struct emulator_place {
    emulator_index thread, block, threads, blocks;
};
extern emulator_place emulator_now;

/* The kernel is a twin in float16: what the sources say of bfloat16 is of float16, as HeddleFatbin.cmake makes it. */
extern bool emulator_f16;

/* All lanes of the warp bring what is theirs; the last one does it for all of them. */
typedef void emulator_operation(void *const lanes[EMULATOR_LANES]);
void emulator_meet(emulator_operation *all, void *mine);

/* So many threads (0: all of the block that have not ended) arrive at one of the block's barriers. Returns whether one said yes. */
bool emulator_barrier(int barrier, int threads, bool yes, bool waits = true);

/* What this thread looks at in a loop may be changed by others alone. */
void emulator_give_way(void);

/* This thread waits until another one says so; what is not looked at. */
void emulator_sleep(const void *what);
void emulator_wake(const void *what);

/* All threads of the cluster. */
void emulator_cluster_arrive(void);
void emulator_cluster_wait(void);

/* Which fiber runs, of all of the cluster's; and something that EMULATOR_SEED decides. */
unsigned emulator_fiber(void);
unsigned emulator_random(void);

/* Where such an address of shared memory lies, for so many bytes: nobody's, or one that is not aligned, ends the launch. */
char *emulator_shared(uint32_t address, unsigned bytes);
uint32_t emulator_address(const void *shared);
/* The same address of another block of the cluster. */
uint32_t emulator_address_in(uint32_t address, int block);

/* A copy that nobody sees before the wait for its group: until then the place holds NaN. What is behind `bytes` of `all` becomes 0. */
void emulator_copy(uint32_t to, const void *from, unsigned bytes, unsigned all);
void emulator_commit(void);
void emulator_wait(int groups);

/* c += a·b, rows by columns, by the tensor cores' arithmetic (tensor_core.cpp): 16 x 8, sums over 16 numbers of 16 bits or 8 of TF32. */
enum emulator_type { EMULATOR_BF16, EMULATOR_FP16, EMULATOR_TF32 };
void emulator_multiply(emulator_type type, float c[16][8], const uint32_t *a, const uint32_t *b);

/* Says what is wrong and where, and ends the launch. */
[[noreturn]] void emulator_fail(const char *what, ...) __attribute__((format(printf, 1, 2)));

/* What a module has: a kernel by its symbol, and a function that calls it. */
struct emulator_kernel {
    const char *symbol;
    unsigned together; /* blocks of a cluster */
    void (*call)(const void *parameters);
};

#endif

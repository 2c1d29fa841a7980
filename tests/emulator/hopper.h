/* SPDX-License-Identifier: Apache-2.0
 * What Hopper has beside: barriers in shared memory, copies by an engine of its own, products of a warpgroup that go on while threads do
 * something else. hopper.cpp; cuda/ptx90.cuh asks for it. */
#ifndef HEDDLE_TESTS_HOPPER_H
#define HEDDLE_TESTS_HOPPER_H

#include "emulator.h"

/* An mbarrier: so many arrivals end a phase, once all the bytes are there that it was told of. */
void hopper_barrier(uint32_t at, int arrivals);
void hopper_arrive(uint32_t at, int bytes);
void hopper_wait(uint32_t at, int parity);

/* Until the engine has brought them, a place of copies holds NaN. A box's x: columns, rows, ...; blocks: those of the cluster that get it,
 * a bit each; 0: this one. */
void hopper_copy_box(uint32_t to, const void *map, uint32_t barrier, const int *x, unsigned rank, unsigned blocks);
void hopper_copy(uint32_t to, const void *from, int bytes, uint32_t barrier);
/* From registers: read at once. */
void hopper_send(uint32_t to, const void *from, int bytes, uint32_t barrier);
/* This thread's copies by emulator_copy, and its arrival behind them. */
void hopper_arrive_behind_copies(uint32_t at);

/* What lies in shared memory is added to float32 sums, or stored as a box: read now or at either wait, there now or at the second, or when all
 * blocks have ended. */
void hopper_add(float *to, uint32_t from, int bytes);
void hopper_store_box(const void *map, uint32_t from, const int *x, unsigned rank);
void hopper_wait_for_reads(void);
void hopper_wait_for_stores(void);

/* A warp's part of c = a·b (+ c), 64 x N x 16: of warp w of a warpgroup the rows 16w on. Until it is waited for c is NaN; what is in shared
 * memory is read now or then. */
struct hopper_product {
    emulator_type type;
    int columns; /* N */
    float (*c)[4];
    const uint32_t *a;   /* registers, or NULL: a_at describes it */
    uint64_t a_at, b_at; /* where it is in shared memory, as describe() of wgmma.cuh has it */
    bool a_transposed, b_transposed, add;
};
void hopper_multiply(const hopper_product *p);
void hopper_commit(void);
void hopper_wait_for_products(int groups);

/* For driver.cpp: what a map of 128 bytes holds here. */
void hopper_encode(void *map, unsigned rank, void *base, const uint64_t *extents, const uint64_t *strides,
                   const uint32_t *box);
void hopper_move(void *map, void *base);

/* For run.cpp: the blocks of a cluster begin; one thing that the engine has been told is done (false: there is none); they have ended,
 * and what is wrong then. */
void hopper_begin(void);
bool hopper_go_on(void);
const char *hopper_end(void);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * In place of src/cuda/ptx90.cuh: the same functions for the processor. */
#ifndef HEDDLE_CUDA_PTX90_CUH
#define HEDDLE_CUDA_PTX90_CUH

#include "cuda/ptx.cuh"
#include "hopper.h"

/* --------------------------------------------------------------------------------------------- barriers, copies */

PTX void mbarrier_init(uint32_t at, int arrivals) {
    hopper_barrier(at, arrivals);
}
PTX void mbarrier_arrive(uint32_t at) {
    hopper_arrive(at, 0);
}
PTX void mbarrier_expect(uint32_t at, int bytes) {
    hopper_arrive(at, bytes);
}
PTX void mbarrier_wait(uint32_t at, int parity) {
    hopper_wait(at, parity);
}
PTX void mbarrier_arrive_at(uint32_t there) {
    hopper_arrive(there, 0);
}
PTX void mbarrier_expect_at(uint32_t there, int bytes) {
    hopper_arrive(there, bytes);
}
PTX void store_async16(uint32_t there, uint4 x, uint32_t barrier_there) {
    hopper_send(there, &x, sizeof x, barrier_there);
}
PTX void copy_to_block(uint32_t there, uint32_t from, int bytes, uint32_t barrier_there) {
    hopper_copy(there, emulator_shared(from, 16), bytes, barrier_there);
}
PTX uint32_t cluster_address(uint32_t at, int rank) {
    return emulator_address_in(at, rank);
}
PTX void cp_async_arrive(uint32_t at) {
    hopper_arrive_behind_copies(at);
}

/* Everybody sees everything at once here: a fence that is missing is not found. */
PTX void mbarrier_init_fence(void) {
}
PTX void fence_async(void) {
}
PTX void wgmma_fence(void) {
}

PTX void tma_load4(uint32_t to, const void *map, uint32_t barrier, int x0, int x1, int x2, int x3) {
    const int x[] = {x0, x1, x2, x3};
    hopper_copy_box(to, map, barrier, x, 4, 0);
}
PTX void tma_load2(uint32_t to, const void *map, uint32_t barrier, int x0, int x1) {
    const int x[] = {x0, x1};
    hopper_copy_box(to, map, barrier, x, 2, 0);
}
PTX void tma_load2_all(uint32_t to, const void *map, uint32_t barrier, int x0, int x1, uint16_t blocks) {
    const int x[] = {x0, x1};
    hopper_copy_box(to, map, barrier, x, 2, blocks);
}
PTX void tma_store2(const void *map, uint32_t from, int x0, int x1) {
    const int x[] = {x0, x1};
    hopper_store_box(map, from, x, 2);
}
PTX void tma_prefetch4(const void *, int, int, int, int) {
}
PTX void tma_prefetch_map(const void *) {
}
PTX void copy_bulk(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    hopper_copy(to, from, bytes, barrier);
}

PTX void add_global4(float *to, float4 x) {
    if ((uintptr_t)to % 16)
        emulator_fail("16 bytes added at %p", to);
    to[0] += x.x;
    to[1] += x.y;
    to[2] += x.z;
    to[3] += x.w;
}
PTX void add_global4_if(float *to, float4 x) {
    if (to)
        add_global4(to, x);
}
PTX void add_bulk(float *to, uint32_t from, int bytes) {
    hopper_add(to, from, bytes);
}
PTX void bulk_commit(void) {
}
PTX void bulk_wait_read(void) {
    hopper_wait_for_reads();
}
PTX void bulk_wait(void) {
    hopper_wait_for_stores();
}

/* ------------------------------------------------------------------------------------------------------- blocks */

PTX void cluster_arrive(void) {
    emulator_cluster_arrive();
}
PTX void cluster_arrive_relaxed(void) {
    emulator_cluster_arrive();
}
PTX void cluster_wait(void) {
    emulator_cluster_wait();
}
PTX void barrier_sync_apart(int id, int threads) {
    emulator_barrier(id, threads, false);
}
PTX bool barrier_or(int id, int threads, bool yes) {
    return emulator_barrier(id, threads, yes);
}
PTX void barrier_arrive(int id, int threads) {
    emulator_barrier(id, threads, false, false);
}
template <int REGISTERS> PTX void registers_more(void) {
}
template <int REGISTERS> PTX void registers_fewer(void) {
}

struct emulator_stored {
    char *row;
    const uint32_t *r;
};

/* The other way round than ldmatrix4. */
PTX void stmatrix4(uint32_t to, const uint32_t r[4]) {
    emulator_stored m = {emulator_shared(to, 16), r};
    emulator_meet(
        [](void *const *lanes) {
            for (int matrix = 0; matrix < 4; matrix++)
                for (int lane = 0; lane < EMULATOR_LANES; lane++)
                    memcpy(((const emulator_stored *)lanes[matrix * 8 + lane / 4])->row + lane % 4 * 4,
                           &((const emulator_stored *)lanes[lane])->r[matrix], 4);
        },
        &m);
}

/* And turned: lane l has rows 2(l%4) and one more of column l/4. */
PTX void stmatrix4_trans(uint32_t to, const uint32_t r[4]) {
    emulator_stored m = {emulator_shared(to, 16), r};
    emulator_meet(
        [](void *const *lanes) {
            for (int matrix = 0; matrix < 4; matrix++)
                for (int lane = 0; lane < EMULATOR_LANES; lane++)
                    for (int half = 0; half < 2; half++) {
                        const uint16_t x = (uint16_t)(((const emulator_stored *)lanes[lane])->r[matrix] >> half * 16);
                        const int row = lane % 4 * 2 + half;
                        memcpy(((const emulator_stored *)lanes[matrix * 8 + row])->row + lane / 4 * 2, &x, 2);
                    }
        },
        &m);
}

/* ----------------------------------------------------------------------------------------------------- products */

PTX void wgmma_commit(void) {
    hopper_commit();
}
template <int N> PTX void wgmma_wait(void) {
    hopper_wait_for_products(N);
}
template <typename T> PTX void pin(T &) {
}
PTX void hold_until(float) {
}
PTX void hold(const void *) {
}
PTX void hold(float) {
}
PTX float moved(float x) {
    return x;
}
PTX uint32_t opaque(uint32_t x) {
    return x;
}

#define EMULATOR_OF_bf16 (emulator_f16 ? EMULATOR_FP16 : EMULATOR_BF16)
#define EMULATOR_OF_f16 EMULATOR_FP16
#define WGMMA(type, N)                                                                                                 \
    template <int TRANSPOSED, int A_TRANSPOSED = 0>                                                                    \
    PTX void wgmma_##type##_n##N(float(*c)[4], uint64_t a, uint64_t b, int add) {                                      \
        const hopper_product p = {EMULATOR_OF_##type, N,       c, nullptr, a, b, A_TRANSPOSED != 0,                    \
                                  TRANSPOSED != 0,    add != 0};                                                       \
        hopper_multiply(&p);                                                                                           \
    }                                                                                                                  \
    template <int TRANSPOSED> PTX void wgmma_##type##_n##N(float(*c)[4], const uint32_t a[4], uint64_t b, int add) {   \
        const hopper_product p = {EMULATOR_OF_##type, N, c, a, 0, b, false, TRANSPOSED != 0, add != 0};                \
        hopper_multiply(&p);                                                                                           \
    }
#define WGMMA_OF(type)                                                                                                 \
    WGMMA(type, 32)                                                                                                    \
    WGMMA(type, 64)                                                                                                    \
    WGMMA(type, 96)                                                                                                    \
    WGMMA(type, 128)                                                                                                   \
    WGMMA(type, 160)                                                                                                   \
    WGMMA(type, 192)                                                                                                   \
    WGMMA(type, 256)
WGMMA_OF(bf16)
WGMMA_OF(f16)
#undef WGMMA_OF
#undef WGMMA

#endif

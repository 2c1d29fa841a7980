/* SPDX-License-Identifier: Apache-2.0
 * Instructions of Hopper alone: barriers in shared memory, the copy engine, clusters, products of a warpgroup. As in ptx.cuh a
 * function is one instruction. */
#ifndef HEDDLE_CUDA_PTX90_CUH
#define HEDDLE_CUDA_PTX90_CUH

#include "cuda/ptx.cuh"

/* ------------------------------------------------------------------------------------------ Hopper: barriers, copies */

PTX void mbarrier_init(uint32_t at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

/* What was initialised is seen by the copy engine. */
PTX void mbarrier_init_fence(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

PTX void mbarrier_arrive(uint32_t at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

/* Arrive, and let the phase wait for so many bytes of bulk copies, too. */
PTX void mbarrier_expect(uint32_t at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

/* Has the phase of this parity ended? May wait a while before it says no. */
PTX bool mbarrier_try(uint32_t at, int parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
    return done;
}

/* This thread arrives once all that it has copied by cp_async so far is there. */
PTX void cp_async_arrive(uint32_t at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

PTX void mbarrier_wait(uint32_t at, int parity) {
    while (!mbarrier_try(at, parity))
        ;
}

/* Shared memory that this thread has written is seen by the tensor cores and the copy engine. */
PTX void fence_async(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* A box of a four-dimensional tensor into shared memory; completes on an mbarrier. */
PTX void tma_load4(uint32_t to, const void *map, uint32_t barrier, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}

/* The same box, on its way to the second-level cache. */
PTX void tma_prefetch4(const void *map, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x0), "r"(x1),
                 "r"(x2), "r"(x3)
                 : "memory");
}

/* So many bytes, a multiple of 16, as they lie; completes on an mbarrier. */
PTX void copy_bulk(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Four float32 sums, added to what lies in global memory. */
PTX void add_global4(float *to, float4 x) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

/* The same without a branch; NULL: to nothing. */
PTX void add_global4_if(float *to, float4 x) {
    asm volatile("{\n.reg .pred p;\n"
                 "setp.ne.u64 p, %0, 0;\n"
                 "@p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

/* So many bytes of float32 in shared memory, a multiple of 16, added to what lies in global memory. */
PTX void add_bulk(float *to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

PTX void bulk_commit(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* What this thread's bulk operations read has been read. */
PTX void bulk_wait_read(void) {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* They are done. */
PTX void bulk_wait(void) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* A box of a matrix; with _all into every block of the cluster that has a bit in `blocks`, to the same place and on the same
 * mbarrier of each. */
PTX void tma_load2(uint32_t to, const void *map, uint32_t barrier, int x0, int x1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x0), "r"(x1)
                 : "memory");
}

PTX void tma_load2_all(uint32_t to, const void *map, uint32_t barrier, int x0, int x1, uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x0), "r"(x1), "h"(blocks)
                 : "memory");
}

/* A box from shared memory to a matrix; what lies outside of it is left alone. */
PTX void tma_store2(const void *map, uint32_t from, int x0, int x1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(from), "r"(x0), "r"(x1)
                 : "memory");
}

PTX void tma_prefetch_map(const void *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* What has this address here, in block `rank` of the cluster: for mbarrier_arrive_at. */
PTX uint32_t cluster_address(uint32_t at, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

/* Releases what tensor cores have read, no writes: with a release for the cluster each would be a fence for the whole GPU. */
PTX void mbarrier_arrive_at(uint32_t there) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

/* mbarrier_expect at a barrier of another block. */
PTX void mbarrier_expect_at(uint32_t there, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(there), "r"(bytes) : "memory");
}

/* Registers, and bytes of shared memory (a multiple of 16), to shared memory of another block; they complete on an mbarrier there. */
PTX void store_async16(uint32_t there, uint4 x, uint32_t barrier_there) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier_there)
        : "memory");
}

PTX void copy_to_block(uint32_t there, uint32_t from, int bytes, uint32_t barrier_there) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(there),
        "r"(from), "r"(bytes), "r"(barrier_there)
        : "memory");
}

/* All threads of all blocks of the cluster arrive, and wait. */
PTX void cluster_arrive(void) {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

/* Without waiting until all that a thread has written is seen by others. */
PTX void cluster_arrive_relaxed(void) {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

PTX void cluster_wait(void) {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/* The same for warps that meet from different places of the code, which synccheck takes bar.sync amiss for. */
PTX void barrier_sync_apart(int id, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* barrier_sync, and whether any of the threads has said yes. */
PTX bool barrier_or(int id, int threads, bool yes) {
    uint32_t any;
    asm volatile("{\n.reg .pred p, q;\n"
                 "setp.ne.u32 p, %3, 0;\n"
                 "bar.red.or.pred q, %1, %2, p;\n"
                 "selp.b32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"((uint32_t)yes)
                 : "memory");
    return any;
}

PTX void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The registers of a thread of this warpgroup from now on. */
template <int REGISTERS> PTX void registers_more(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> PTX void registers_fewer(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* Four matrices of 8 rows of 16 bytes; lane l gives the address of row l%8 of matrix l/8. */
PTX void stmatrix4(uint32_t to, const uint32_t r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* The same, each matrix turned: what lanes have as rows become columns. */
PTX void stmatrix4_trans(uint32_t to, const uint32_t r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* --------------------------------------------------------------------------------- Hopper: products of a warpgroup */

/* Before the first product, and after registers that one reads were written. */
PTX void wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

PTX void wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Wait until at most N committed groups are under way. */
template <int N> PTX void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* The compiler takes an asynchronous product for done where it is issued: reads of x stay below this line. */
PTX void pin(float &x) {
    asm volatile("" : "+f"(x)::"memory");
}

/* The assembler moves waits up, past arithmetic that they are to overlap with, but not past a branch: this one is never taken (x is
 * not negative) and needs x, and so what x is made of. */
PTX void hold_until(float x) {
    if (x < 0.0f)
        asm volatile("nanosleep.u32 1;" ::: "memory");
}

PTX void pin(uint32_t &x) {
    asm volatile("" : "+r"(x)::"memory");
}

/* Its registers are not another's until here. */
PTX void hold(const void *x) {
    asm volatile("" ::"l"(x) : "memory");
}
PTX void hold(float x) {
    asm volatile("" ::"f"(x) : "memory");
}

/* The same number in another register, once all in front of this has been waited for. */
PTX float moved(float x) {
    float r;
    asm volatile("mov.f32 %0, %1;" : "=f"(r) : "f"(x) : "memory");
    return r;
}

/* The same number, which the compiler takes for another. */
PTX uint32_t opaque(uint32_t x) {
    pin(x);
    return x;
}

/* wgmma_<type>_n<N>(c, a, b, add): c = a·b (+ c), 64 x N x 16. c[N/8][4] holds, of warp w of the warpgroup, rows 16w + lane/4
 * (elements 0, 1) and 8 more (2, 3), columns 8y + lane%4·2 + 0, 1. b, and a in shared memory, are descriptors; a in registers
 * is what the accumulators' layout gives when pairs are packed. TRANSPOSED: b's columns are contiguous, not its rows;
 * A_TRANSPOSED: so are a's. */
#define WGMMA_0_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_0_32                                                                                                     \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"               \
    "%27,%28,%29,%30,%31"
#define WGMMA_32_64                                                                                                    \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"             \
    "%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_64_128                                                                                                   \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,"             \
    "%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,"              \
    "%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_64_80 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_80_96 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_TEXT_32 WGMMA_0_16
#define WGMMA_TEXT_64 WGMMA_0_32
#define WGMMA_TEXT_96 WGMMA_0_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_TEXT_128 WGMMA_0_32 "," WGMMA_32_64
#define WGMMA_TEXT_160 WGMMA_TEXT_128 "," WGMMA_64_80
#define WGMMA_TEXT_192 WGMMA_TEXT_160 "," WGMMA_80_96
#define WGMMA_TEXT_256 WGMMA_0_32 "," WGMMA_32_64 "," WGMMA_64_128
#define WGMMA_4(c, y) "+f"((c)[y][0]), "+f"((c)[y][1]), "+f"((c)[y][2]), "+f"((c)[y][3])
#define WGMMA_16(c, y) WGMMA_4(c, y), WGMMA_4(c, (y) + 1), WGMMA_4(c, (y) + 2), WGMMA_4(c, (y) + 3)
#define WGMMA_C_32(c, y) WGMMA_16(c, y)
#define WGMMA_C_64(c, y) WGMMA_16(c, y), WGMMA_16(c, (y) + 4)
#define WGMMA_C_96(c, y) WGMMA_C_64(c, y), WGMMA_16(c, (y) + 8)
#define WGMMA_C_128(c, y) WGMMA_C_64(c, y), WGMMA_C_64(c, (y) + 8)
#define WGMMA_C_160(c, y) WGMMA_C_128(c, y), WGMMA_16(c, (y) + 16)
#define WGMMA_C_192(c, y) WGMMA_C_128(c, y), WGMMA_C_64(c, (y) + 16)
#define WGMMA_C_256(c, y) WGMMA_C_128(c, y), WGMMA_C_128(c, (y) + 16)
#define WGMMA(type, N, x0, x1, x2, x3, x4, x5, x6)                                                                     \
    template <int TRANSPOSED, int A_TRANSPOSED = 0>                                                                    \
    PTX void wgmma_##type##_n##N(float(*c)[4], uint64_t a, uint64_t b, int add) {                                      \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x2 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type "." #type " {" WGMMA_TEXT_##N             \
                     "}, %" #x0 ", %" #x1 ", p, 1, 1, %" #x4 ", %" #x3 ";\n}"                                          \
                     : WGMMA_C_##N(c, 0)                                                                               \
                     : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(A_TRANSPOSED));                                  \
    }                                                                                                                  \
    template <int TRANSPOSED> PTX void wgmma_##type##_n##N(float(*c)[4], const uint32_t a[4], uint64_t b, int add) {   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x5 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type "." #type " {" WGMMA_TEXT_##N             \
                     "}, {%" #x0 ",%" #x1 ",%" #x2 ",%" #x3 "}, %" #x4 ", p, 1, 1, %" #x6 ";\n}"                       \
                     : WGMMA_C_##N(c, 0)                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));                 \
    }
WGMMA(bf16, 32, 16, 17, 18, 19, 20, 21, 22)
WGMMA(f16, 32, 16, 17, 18, 19, 20, 21, 22)
WGMMA(bf16, 64, 32, 33, 34, 35, 36, 37, 38)
WGMMA(f16, 64, 32, 33, 34, 35, 36, 37, 38)
WGMMA(bf16, 96, 48, 49, 50, 51, 52, 53, 54)
WGMMA(f16, 96, 48, 49, 50, 51, 52, 53, 54)
WGMMA(bf16, 128, 64, 65, 66, 67, 68, 69, 70)
WGMMA(f16, 128, 64, 65, 66, 67, 68, 69, 70)
WGMMA(bf16, 160, 80, 81, 82, 83, 84, 85, 86)
WGMMA(f16, 160, 80, 81, 82, 83, 84, 85, 86)
WGMMA(bf16, 192, 96, 97, 98, 99, 100, 101, 102)
WGMMA(f16, 192, 96, 97, 98, 99, 100, 101, 102)
WGMMA(bf16, 256, 128, 129, 130, 131, 132, 133, 134)
WGMMA(f16, 256, 128, 129, 130, 131, 132, 133, 134)
#undef WGMMA

#endif

/* SPDX-License-Identifier: Apache-2.0
 * ptx.cuh's products of a warpgroup in more widths, both operands in shared memory. */
#ifndef HEDDLE_CUDA_PTX_WGMMA_CUH
#define HEDDLE_CUDA_PTX_WGMMA_CUH

#include "ptx.cuh"

#define WGMMA_64_80 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_80_96 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_TEXT_96 WGMMA_0_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_TEXT_160 WGMMA_TEXT_128 "," WGMMA_64_80
#define WGMMA_TEXT_192 WGMMA_TEXT_160 "," WGMMA_80_96
#define WGMMA_C_96(c, y) WGMMA_C_64(c, y), WGMMA_16(c, (y) + 8)
#define WGMMA_C_160(c, y) WGMMA_C_128(c, y), WGMMA_16(c, (y) + 16)
#define WGMMA_C_192(c, y) WGMMA_C_128(c, y), WGMMA_C_64(c, (y) + 16)
#define WGMMA(type, N, x0, x1, x2, x3, x4)                                                                             \
    template <int TRANSPOSED, int A_TRANSPOSED>                                                                        \
    PTX void wgmma_##type##_n##N(float(*c)[4], uint64_t a, uint64_t b, int add) {                                      \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x2 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type "." #type " {" WGMMA_TEXT_##N             \
                     "}, %" #x0 ", %" #x1 ", p, 1, 1, %" #x4 ", %" #x3 ";\n}"                                          \
                     : WGMMA_C_##N(c, 0)                                                                               \
                     : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(A_TRANSPOSED));                                  \
    }
WGMMA(bf16, 96, 48, 49, 50, 51, 52)
WGMMA(f16, 96, 48, 49, 50, 51, 52)
WGMMA(bf16, 160, 80, 81, 82, 83, 84)
WGMMA(f16, 160, 80, 81, 82, 83, 84)
WGMMA(bf16, 192, 96, 97, 98, 99, 100)
WGMMA(f16, 192, 96, 97, 98, 99, 100)
#undef WGMMA

#endif

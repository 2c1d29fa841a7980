/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_E4M3: bytes -> numbers of 16 bits, each of which is what its byte is. */
#ifndef HEDDLE_CUDA_ATTENTION_WIDEN_CUH
#define HEDDLE_CUDA_ATTENTION_WIDEN_CUH

#include "cuda/element.cuh"

INLINE bool has_nan_bytes(uint4 x) {
    const uint32_t low = ((x.x & 0x7f7f7f7fu) + 0x01010101u) | ((x.y & 0x7f7f7f7fu) + 0x01010101u),
                   high = ((x.z & 0x7f7f7f7fu) + 0x01010101u) | ((x.w & 0x7f7f7f7fu) + 0x01010101u);
    return ((low | high) & 0x80808080u) != 0;
}

/* Two numbers, each the upper byte of a half, in 16 bits: the exponent's bits where the wider one has its lowest, times what its bias is more.
 * checks: of a NaN, too. */
INLINE uint32_t widen_pair(uint32_t halves, bool checks) {
    const uint32_t wide =
        fma2_bf16(e4m3_shifted_bf16(halves & 0x7f007f00u) | (halves & 0x80008000u), e4m3_factor_bf16(), 0x80008000u);
    if (!checks)
        return wide;
    return wide | ((halves & 0x7f00u) == 0x7f00u ? 0x7fffu : 0u) |
           ((halves & 0x7f000000u) == 0x7f000000u ? 0x7fff0000u : 0u);
}

/* 8 of 16 bytes. */
INLINE uint4 widen_bytes(uint32_t low, uint32_t high, bool checks) {
    return make_uint4(widen_pair(__byte_perm(low, 0, 0x1404), checks), widen_pair(__byte_perm(low, 0, 0x3424), checks),
                      widen_pair(__byte_perm(high, 0, 0x1404), checks),
                      widen_pair(__byte_perm(high, 0, 0x3424), checks));
}

#endif

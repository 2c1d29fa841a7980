/* SPDX-License-Identifier: Apache-2.0
 * The plain attention kernels: one block per row, any d and dv, every option. They do what the tensor core kernels
 * cannot (d over 256, too little shared memory) and the sums around them: combine, weights, dbias, dsinks. */
#include "cuda/attention/plain/bwd.cuh"
#include "cuda/attention/plain/fwd.cuh"

#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    static_assert(warps * 32 == THREADS, "as the contract has it");                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        heddle_attention_##pass##_##dtype##_d##dim##_##variant##_sm80(const __grid_constant__ attention_params p) {    \
        wait_for_earlier_grid();                                                                                       \
        plain_##pass<dtype>(p);                                                                                        \
    }

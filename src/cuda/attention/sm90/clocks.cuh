/* SPDX-License-Identifier: Apache-2.0
 * When the parts of Hopper's forward are where, on block 0: in a build of its own (-DHEDDLE_CLOCKS=ON), whose lean forward writes clocks in
 * place of the log-sum-exp. bench/gpu_clocks.py reads them. In any other build there is nothing of it. */
#ifndef HEDDLE_CUDA_ATTENTION_CLOCKS_SM90_CUH
#define HEDDLE_CUDA_ATTENTION_CLOCKS_SM90_CUH

#include "cuda/attention/sm90/kept.cuh"

/* Of a warpgroup with a tile of keys, and of the thread that sends for it; gpu_clocks.py has the same. */
enum {
    CLOCK_BEGIN, /* of the step; before K or V is sent for: its place may not be free */
    CLOCK_KEYS,  /* K is there; K is sent for */
    CLOCK_TURN,  /* products may be issued; V is sent for */
    CLOCK_ISSUED,
    CLOCK_SCORES,  /* S is there */
    CLOCK_SOFTMAX, /* and P of it */
    CLOCK_SUMS,    /* P·V of the tile before is added up */
    CLOCK_END,
    CLOCKS
};
#define CLOCK_TILES 64 /* of keys, per role */

#ifdef HEDDLE_CLOCKS
INLINE void note(const attention_params &p, int role, unsigned n, int what) {
    if (blockIdx.x == 0 && threadIdx.x % WARPGROUP == 0 && n < CLOCK_TILES)
        ((volatile uint32_t *)p.t.lse)[(role * CLOCK_TILES + n) * CLOCKS + what] = (uint32_t)clock64();
}
#else
INLINE void note(const attention_params &, int, unsigned, int) {
}
#endif
#endif

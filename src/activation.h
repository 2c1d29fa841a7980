/* SPDX-License-Identifier: Apache-2.0
 * The numbers by which float32 computes activations, on the CPU and on CUDA.
 *
 * All are act(u) = u·share, and act'(u) = share + u·share'. With e = exp(-v) for v = u (SiLU) or v = 2 sqrt(2/pi)(u + 0.044715 u³)
 * (GELU by tanh): share = 1/(1 + e), share' = share·e·share·v'. GELU: share(-a) = exp(-a²/2)·t·P(t) with t = 1/(1 + p·a) for a >= 0, as
 * Abramowitz and Stegun, 7.1.26, have it; P of degree 8, fitted for the least relative error up to a = 14.5: 3.2e-8. So the tails are as
 * exact as the rest. For what is rounded to 16 bits, GELU16: p and P of degree 5, 4.2e-6. Beyond a limit share is 0, or 1, to the last bit,
 * and u is held at it there, so that nothing overflows. */
#ifndef HEDDLE_ACTIVATION_H
#define HEDDLE_ACTIVATION_H

#define GELU_LIMIT 20.f
#define GELU_P 0.35f
/* Of P, the highest power first. */
#define GELU_TERMS(P)                                                                                                  \
    P(-0x1.ddb90ap-6f)                                                                                                 \
    P(0x1.26f9aep-3f)                                                                                                  \
    P(-0x1.05faa8p-2f)                                                                                                 \
    P(0x1.464968p-3f)                                                                                                  \
    P(-0x1.7c4faap-6f)                                                                                                 \
    P(0x1.b057d2p-4f)                                                                                                  \
    P(0x1.eac9bap-4f)                                                                                                  \
    P(0x1.1e70c4p-3f)                                                                                                  \
    P(0x1.1df1c6p-3f)
#define GELU16_P 0.309f
#define GELU16_TERMS(P)                                                                                                \
    P(-0x1.32107ap-4f)                                                                                                 \
    P(0x1.7b2004p-3f)                                                                                                  \
    P(0x1.7721eep-7f)                                                                                                  \
    P(0x1.147bfcp-3f)                                                                                                  \
    P(0x1.ea1fa8p-4f)                                                                                                  \
    P(0x1.f9d25ep-4f)
#define HALF_LOG2_E 0x1.715476p-1f /* log2(e)/2 */
#define NORMAL_AT_0 0x1.988454p-2f /* 1/sqrt(2 pi) */

/* v = u·(LINEAR + CUBIC·u²), to base 2 */
#define LOG2_E 0x1.715476p+0f
#define SILU_LIMIT 87.f
#define TANH_LIMIT 10.f
#define TANH_LINEAR 0x1.988454p+0f /* 2 sqrt(2/pi) */
#define TANH_CUBIC 0x1.2444f2p-4f  /* 0.044715 of it */

#endif

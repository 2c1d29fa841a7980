/* SPDX-License-Identifier: Apache-2.0
 * Peaks of this machine, measured: multiply-adds in float32 (of bfloat16 some have faster ones) and reading memory. Also compiled into a shared
 * library for bench/cpu.py. */
#ifndef HEDDLE_TOOLS_PEAK_H
#define HEDDLE_TOOLS_PEAK_H

#include <stddef.h>

/* Seconds of processor time that this thread has used: other programs on the machine do not count. */
double thread_seconds(void);

/* FLOP/s of float32 multiply-adds (two each) with the vectors of this instruction set, in registers, on so many
 * threads, measured for about `seconds`. One thread: per processor time; several: per second on the wall. 0 if the
 * instruction set is none that is known here. The instruction set must be one that the processor has. */
double peak_flops(const char *isa, int threads, double seconds);

/* Bytes/s of reading p[bytes] once, in `threads` parts. The same clocks. */
double peak_read(const void *p, size_t bytes, int threads);

#endif

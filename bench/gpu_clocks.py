#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A time line of Hopper's lean forward, by the multiprocessor's own clock: when each warpgroup of block 0 is where.

    cmake -S . -B build/clocks -DHEDDLE_CLOCKS=ON -DHEDDLE_CUDA_IMAGES=$PWD/build/cuda && cmake --build build/clocks
    python3 bench/gpu_clocks.py --library build/clocks/libheddle.so [--plain build/libheddle.so] [--json FILE]

src/cuda/attention/sm90/clocks.cuh says what is noted; the notes lie in place of the log-sum-exp. Printed are the steps of the second tile
of queries in one call, and for each warpgroup the medians of their parts over many. With --plain also what the notes themselves cost.
"""
import argparse
import json
import statistics

import torch

from gpu_timing import REST, Clock, need_gpu
from heddle_c import Library

TILES, CLOCKS, GROUPS = 64, 8, 2  # clocks.cuh's, and the warpgroups at a head dim of 128
BEGIN, KEYS, TURN, ISSUED, SCORES, SOFTMAX, SUMS, END = range(CLOCKS)
FIRST, LAST = 36, 60  # steps of the second tile of queries: 32 tiles of 128 keys each
PARTS = [("waits for K", BEGIN, KEYS), ("waits for its turn", KEYS, TURN), ("issues products", TURN, ISSUED),
         ("waits for S", ISSUED, SCORES), ("softmax", SCORES, SOFTMAX), ("waits for P·V", SOFTMAX, SUMS),
         ("rescales, packs P", SUMS, END)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--plain", help="a library without clocks, to compare with")
    parser.add_argument("--json")
    a = parser.parse_args()
    need_gpu(parser)
    torch.manual_seed(1)
    q, k, v = (torch.randn(4, 16, 4096, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    job = Library(a.library).attention(q, k, v)
    runs = []
    for _ in range(40):
        job.tensors["lse"].zero_()
        job.forward()
        torch.cuda.synchronize()
        notes = job.tensors["lse"].view(torch.int32).flatten()[: (GROUPS + 1) * TILES * CLOCKS].cpu()
        runs.append(notes.view(GROUPS + 1, TILES, CLOCKS).tolist())
    if not all(runs[-1][0][FIRST]):
        raise SystemExit(f"{a.library} notes no clocks (-DHEDDLE_CLOCKS=ON), or {job.kernels[0]} is another kernel")
    runs = runs[20:]

    def between(g, begin, end):
        return [(r[g][n][end] - r[g][n][begin]) & 0xFFFFFFFF for r in runs for n in range(FIRST, LAST)]

    medians = {name: [statistics.median(between(g, begin, end)) for g in range(GROUPS)] for name, begin, end in PARTS}
    step = statistics.median(
        ((r[g][LAST][BEGIN] - r[g][FIRST][BEGIN]) & 0xFFFFFFFF) / (LAST - FIRST) for r in runs for g in range(GROUPS)
    )
    print(f"{job.kernels[0]}: a step takes {step:.0f} cycles; medians of its parts, for each warpgroup:")
    for name, cycles in medians.items():
        print(f"    {name:20}", *(f"{x:6.0f}" for x in cycles))
    zero = runs[-1][0][FIRST][BEGIN]
    line = [[[(x - zero + 2**31) % 2**32 - 2**31 for x in runs[-1][g][n]] for n in range(FIRST, FIRST + 5)]
            for g in range(GROUPS + 1)]
    for g, steps in enumerate(line):
        for n, step_of in enumerate(steps):
            print("sends" if g == GROUPS else f"warpgroup {g}", FIRST + n, *step_of)
    row = {"table": "clocks", "case": "B4H16/16S4096D128f-bfloat16", "gpu": torch.cuda.get_device_name(),
           "kernel": job.kernels[0], "step": step, "parts": medians, "first": FIRST, "line": line}
    if a.plain:
        without = Library(a.plain).attention(q, k, v)
        seconds = Clock().measure(REST, [job.forward, without.forward])
        row["cost"] = seconds[0] / seconds[1]
        print(f"with notes it takes {row['cost']:.3f} times as long")
    if a.json:
        with open(a.json, "w") as f:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

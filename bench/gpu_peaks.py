#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What this card does at most, for the roofs of docs/measuring.md: a bfloat16 product of 8192³ by PyTorch, at rest and at the
power limit (gpu_timing.py); and back to back the bytes a second of a kernel that only reads 4 GiB, with the loads a block that
suit the card best, and of a copy of as much, read and written.
"""
import argparse
import json
import statistics

import torch

from gpu_timing import Clock, need_gpu

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for a CPU comes without
    triton = None

SIDE, BYTES = 8192, 1 << 32
BLOCKS = [(size, warps) for size in (1024, 2048, 4096, 8192, 16384) for warps in (4, 8)]  # of 32 bits


if triton:
    @triton.jit
    def read(source, sums, block: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        tl.store(sums + tl.program_id(0), tl.sum(tl.load(source + at), 0))


def rates(rest, power, copy, reads):
    """What the row says, and which of BLOCKS reads fastest: of seconds, a product's at rest and at the power limit, a copy's, and
    those of reading by each of BLOCKS."""
    best = min(range(len(BLOCKS)), key=lambda n: reads[n])
    flops = 2 * SIDE**3 * 1e-12
    return {"product_tflops": {"rest": round(flops / rest), "power": round(flops / power)},
            "read_tbs": round(BYTES / reads[best] * 1e-12, 2), "copy_tbs": round(2 * BYTES / copy * 1e-12, 2)}, BLOCKS[best]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="append a line to this file")
    a = parser.parse_args()
    need_gpu(parser)
    if not triton:
        parser.exit(1, f"{parser.prog}: no Triton, which compiles the kernel that reads\n")
    torch.manual_seed(1)
    x, y = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(x)
    source = torch.randint(100, (BYTES // 4,), dtype=torch.int32, device="cuda")
    copied, sums = torch.empty_like(source), torch.empty(BYTES // 4 // 1024, dtype=torch.int32, device="cuda")

    def reads(size, warps):
        return lambda: read[(BYTES // 4 // size,)](source, sums, size, num_warps=warps)

    for size, warps in BLOCKS:
        reads(size, warps)()
        if not torch.equal(sums[: BYTES // 4 // size], source.view(-1, size).sum(1, dtype=torch.int32)):
            raise SystemExit("the kernel that reads has not read")
    clock = Clock()
    rest = statistics.median(clock.rest([lambda: torch.mm(x, y, out=product)], 15)[0])
    calls = [lambda: torch.mm(x, y, out=product), lambda: copied.copy_(source), *(reads(*block) for block in BLOCKS)]
    power, copy, *of_reads = [statistics.median(each) for each in clock.power(calls)]
    found, block = rates(rest, power, copy, of_reads)
    row = {"table": "peaks", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **found}
    print("{gpu}, torch {torch}: a bfloat16 product of {side}³ {product_tflops[rest]} TFLOP/s at rest, "
          "{product_tflops[power]} at the power limit; reading 4 GiB {read_tbs} TB/s ({block}), copying it {copy_tbs}"
          .format(**row, side=SIDE, block=block))
    if a.json:
        with open(a.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What this card does at most, for the roofs of docs/measuring.md: a bfloat16 product of 8192³ by PyTorch, at rest and at the
power limit (gpu_timing.py), and bytes a second of a kernel that only reads 1 GiB, and of a copy of as much, both counted.
"""
import argparse
import json
import statistics

import torch
import triton
import triton.language as tl

from gpu_timing import Clock

SIDE, BYTES = 8192, 1 << 30
BLOCK = 8192  # of 32 bits: of each of 256 threads eight loads of 16 bytes


@triton.jit
def read(source, sums, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(source + at), 0))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="append a line to this file")
    a = parser.parse_args()
    torch.manual_seed(1)
    x, y = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(x)
    source = torch.randint(100, (BYTES // 4,), dtype=torch.int32, device="cuda")
    copied, blocks = torch.empty_like(source), BYTES // 4 // BLOCK
    sums = torch.empty(blocks, dtype=torch.int32, device="cuda")
    calls = [
        lambda: torch.mm(x, y, out=product),
        lambda: read[(blocks,)](source, sums, BLOCK, num_warps=8),
        lambda: copied.copy_(source),
    ]
    calls[1]()
    if not torch.equal(sums.long(), source.view(blocks, BLOCK).sum(1)):
        raise SystemExit("the kernel that reads has not read")
    clock, work = Clock(), (2 * SIDE**3, BYTES, 2 * BYTES)
    rest, power = ([each / statistics.median(t) * 1e-12 for each, t in zip(work, times)]
                   for times in (clock.rest(calls, 15), clock.power(calls)))
    row = {"table": "peaks", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
           "product_tflops": {"rest": round(rest[0]), "power": round(power[0])},
           "read_tbs": round(rest[1], 2), "copy_tbs": round(rest[2], 2)}
    print(f"{row['gpu']}, torch {row['torch']}: a bfloat16 product of {SIDE}³ {rest[0]:.0f} TFLOP/s at rest, {power[0]:.0f} at "
          f"the power limit; reading 1 GiB {rest[1]:.2f} TB/s, copying it {rest[2]:.2f}")
    if a.json:
        with open(a.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

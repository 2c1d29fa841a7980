#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keys in pages beside the same keys without, on one GPU, in turn in one process: device time alone (bench/gpu_timing.py).

    python3 bench/gpu_pages.py [--library build/libheddle.so] [--json FILE]

A row: microseconds and TB/s of K and V without pages, and how fast pages of 16, 64 and 256 are beside that; rows of a page side
by side ([pages, page, hk, d]) and head by head ([pages, hk, page, d]), in random order. decode: a query for each sequence; chunk: 512
queries at the end of a sequence. Results are compared.
"""
import argparse
import json

import torch

from gpu_timing import REST, Clock, need_gpu
from heddle_c import Library

ROWS = [("decode", 64, 32, 8, 1, 8192, 128), ("decode", 64, 8, 8, 1, 8192, 128), ("decode", 8, 32, 8, 1, 8192, 128),
        ("decode", 64, 32, 8, 1, 8192, 64), ("decode", 64, 32, 8, 1, 8192, 256), ("decode", 1, 32, 8, 1, 131072, 128),
        ("decode", 1, 32, 8, 1, 8192, 128), ("chunk", 8, 32, 8, 512, 8192, 64), ("chunk", 8, 32, 8, 512, 8192, 128),
        ("chunk", 8, 32, 8, 512, 8192, 256)]


def paged(x, page, rows):
    """x [b, s, hk, d] as pages in random order, [pages, hk, page, d], and the table."""
    b, s, hk, d = x.shape
    order = torch.randperm(b * s // page, device=x.device)
    pages = torch.empty(b * s // page, page, hk, d, dtype=x.dtype, device=x.device)
    pages[order] = x.reshape(-1, page, hk, d)
    pages = pages if rows else pages.transpose(1, 2).contiguous().transpose(1, 2)
    return pages.transpose(1, 2), order.reshape(b, -1).int()


def measure(lib, clock, name, b, h, hk, sq, sk, d):
    q, k, v = (torch.randn(b, s, x, d, dtype=torch.bfloat16, device="cuda") for s, x in ((sq, h), (sk, hk), (sk, hk)))
    causal = "bottom right" if sq > 1 else False
    jobs = {"without": lib.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)}
    for page in (16, 64, 256):
        for rows in (True, False):
            torch.manual_seed(page)
            pk, table = paged(k, page, rows)
            torch.manual_seed(page)
            pv, _ = paged(v, page, rows)
            jobs[f"{page} {'rows' if rows else 'heads'}"] = lib.attention(q.transpose(1, 2), pk, pv, causal=causal,
                                                                        block_table=table)
    for job in jobs.values():
        job.forward()
    torch.cuda.synchronize()
    base = jobs["without"].tensors["o"].float()
    apart = {n: (j.tensors["o"].float() - base).abs().max().item() for n, j in jobs.items()}
    seconds = dict(zip(jobs, clock.measure(REST, [j.forward for j in jobs.values()])))
    row = {"name": f"{name} B{b}H{h}/{hk}S{sq}x{sk}D{d}", "us": seconds["without"] * 1e6,
           "TB/s": 4 * b * hk * sk * d / seconds["without"] * 1e-12, "kernel": jobs["without"].kernels[0],
           "paged kernel": jobs["64 rows"].kernels[0],
           **{n: seconds["without"] / s for n, s in seconds.items() if n != "without"}, "apart": max(apart.values())}
    print("  ".join(f"{n} {x:.3f}" if isinstance(x, float) else f"{n} {x}" for n, x in row.items()), flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/libheddle.so")
    parser.add_argument("--json")
    a = parser.parse_args()
    need_gpu(parser)
    lib, clock = Library(a.library), Clock()
    rows = [measure(lib, clock, *row) for row in ROWS]
    if a.json:
        with open(a.json, "w") as f:
            f.writelines(json.dumps({"gpu": torch.cuda.get_device_name(), **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()

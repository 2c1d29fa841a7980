#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences that are divided among GPUs: heddle.parallel's ring beside one GPU alone and beside PyTorch.

    python3 bench/parallel.py [--gpus N] [--tokens 8192 32768 131072] [--method ring heads] [--transport auto messages]
        [--leave 0 16] [--samples 5] [--json FILE]

Causal, b 1, h 16, d 128, bfloat16. A row: TFLOP/s a GPU, forward and forward with backward, of one GPU that has a sequence of so
many tokens for itself; of N GPUs with a sequence of N times as many, zigzag; and of PyTorch's context_parallel with cuDNN's
kernels, which is taken where it runs. Operations: 4·h·d for each query and key that see each other, backward 2.5 times
as many. A sample is some calls back to back, as in training; of the processes the slowest counts, of samples the
median. Needs the package (HEDDLE_PYTHON) on PYTHONPATH, and NCCL.
"""
import argparse
import contextlib
import datetime
import json
import math
import os
import socket
import statistics
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

H, D = 16, 128
LONG = 65536  # tokens a GPU from which on a call is a sample


def operations(tokens, world, backward):
    """Of one GPU."""
    whole = tokens * world
    return 4 * H * D * whole * (whole + 1) / 2 / world * (3.5 if backward else 1)


def seconds(call, samples, count):
    """Of the slowest process, for each call."""
    for _ in range(2):
        call()
    taken = []
    for _ in range(samples):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        mine = torch.tensor(begin.elapsed_time(end) * 1e-3 / count, device="cuda")
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        taken.append(mine.item())
    return statistics.median(taken)


def rates(attend, q, k, v, tokens, world, samples):
    """TFLOP/s of forward, and of forward with backward; attend(q, k, v) -> out."""
    count = 1 if tokens >= LONG else 8 if tokens > 16384 else 20
    dout = torch.randn_like(v)
    found = []
    for backward in (False, True):
        leaves = [t.detach().requires_grad_(backward) for t in (q, k, v)]

        def call():
            out = attend(*leaves)
            if backward:
                torch.autograd.grad(out, leaves, dout)

        taken = seconds(call, samples if tokens < LONG else min(samples, 3), count)
        found.append(operations(tokens, world, backward) / taken * 1e-12)
    return found


def inputs(tokens):
    torch.manual_seed(dist.get_rank())
    return [torch.randn(1, H, tokens, D, dtype=torch.bfloat16, device="cuda") for _ in range(3)]


def alone(tokens, world, options):
    import heddle

    return rates(lambda q, k, v: heddle.attention(q, k, v, causal=True), *inputs(tokens), tokens, 1, options.samples)


def divided(method, compare, transport, leave, tokens, world, options):
    from heddle.parallel import ContextParallel

    parallel = ContextParallel(dist.group.WORLD, method=method, compare=compare, transport=transport, leave=leave)
    attend = lambda q, k, v: parallel.attention(q, k, v, causal=True)  # noqa: E731
    return rates(attend, *inputs(tokens), tokens, world, options.samples)


def pytorch(tokens, world, options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (world,))
    buffers = inputs(tokens * world)
    with (
        sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]),
    ):
        shards = [t.detach().clone() for t in buffers]
        # Looked up at each call: what context_parallel puts in its place is that of the module.
        attend = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        return rates(attend, *shards, tokens, world, options.samples)


def measure(what, *arguments):
    """Both rates, or why there are none. A failure is every process's."""
    try:
        return what(*arguments), ""
    except Exception as error:  # what a peer cannot do is told, and the rest goes on
        return [math.nan, math.nan], f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    finally:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def work(rank, world, port, options):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120), device_id=torch.device("cuda", rank)
    )
    name = torch.cuda.get_device_name()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(options.json, "w")) if options.json and rank == 0 else None
        for tokens in options.tokens:
            whats = [("one GPU alone", alone, ())] + [
                (f"heddle {m}, {c}, {t}" + (f", {n} left" if n else ""), divided, (m, c, t, n))
                for m in options.method
                for c in options.compare
                for t in options.transport
                for n in options.leave
            ]
            whats += [] if options.no_peer else [("PyTorch cuDNN", pytorch, ())]
            base = None
            for label, what, more in whats:
                found, why = measure(what, *more, tokens, world, options)
                base = base or found
                if rank:
                    continue
                parts = [x / y for x, y in zip(found, base, strict=True)]
                print(
                    f"{tokens:7} tokens a GPU  {label:27} {found[0]:6.0f} / {found[1]:4.0f} TFLOP/s a GPU"
                    f"   {parts[0]:.2f} / {parts[1]:.2f} of one GPU  {why}",
                    flush=True,
                )
                if file:
                    row = {"gpu": name, "gpus": world, "torch": torch.__version__, "tokens": tokens, "what": label}
                    row |= {"forward": found[0], "forward_backward": found[1], "of_one": parts, "why": why}
                    print(json.dumps(row), file=file, flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--method", nargs="+", choices=["ring", "heads"], default=["ring", "heads"])
    parser.add_argument("--compare", nargs="+", choices=["once", "always"], default=["once"], help="ContextParallel's")
    parser.add_argument(
        "--transport", nargs="+", choices=["auto", "messages"], default=["auto"], help="ContextParallel's"
    )
    parser.add_argument("--leave", nargs="+", type=int, default=[0], help="ContextParallel's: multiprocessors for NCCL")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true", help="without PyTorch's context_parallel")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.gpus < 2 or options.gpus > torch.cuda.device_count():
        sys.exit(f"parallel.py: {options.gpus} GPUs, of {torch.cuda.device_count()} that are here; two at least")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (options.gpus, port, options), nprocs=options.gpus)


if __name__ == "__main__":
    main()

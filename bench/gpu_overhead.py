#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call costs the host, and what the smallest problem costs in a CUDA graph; heddle beside PyTorch on one GPU, or on
the CPU.

    PYTHONPATH=build/python python3 bench/gpu_overhead.py [--device cuda|cpu] [--json FILE]

Host: microseconds a call of b1 h1 s128 d64 bfloat16, from Python, the least of many bursts of 100 calls, short enough
never to fill the GPU's queue (the GPU is waited for between bursts, outside the clock), PyTorch's FLASH_ATTENTION in
turn with it. Graph: microseconds a replay of b1 h1 s128 d32 float32 takes, from replays in a row between two events: of
a graph of one call, so that launching the graph counts too, and of a graph of 50 calls.
"""
import argparse
import json
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from gpu_timing import need_gpu
import heddle

BURST, ROUNDS = 100, 60


def burst(call, device="cuda"):
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device == "cuda" else time.thread_time
    begin = clock()
    for _ in range(BURST):
        call()
    return (clock() - begin) / BURST * 1e6


def in_turn(rows, device="cuda"):
    times = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, call in rows.items():
            times[name].append(burst(call, device))
    return [{"what": name, "us": min(t), "median_us": statistics.median(t)} for name, t in times.items()]


def host_rows():
    q, k, v = (torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    grad = [t.clone().requires_grad_() for t in (q, k, v)]
    op, backward = torch.ops.heddle.attention, torch.ops.heddle.attention_backward
    out, lse, _ = op(q, k, v)
    x, w = (torch.randn(m, 64, device="cuda", dtype=torch.bfloat16) for m in (16, 64))

    def inferring(call):
        def run():
            with torch.inference_mode():
                call()

        return run

    with torch.inference_mode():
        qi, ki, vi = (t.clone() for t in (q, k, v))

    def without_gradients(call):
        def run():
            with torch.no_grad():
                call()

        return run

    def both(function, tensors):
        def run():
            function(*tensors).backward(q)
            for t in tensors:
                t.grad = None

        return run

    rows = {
        "torch.ops.heddle.attention, no gradient (goal 12)": lambda: op(q, k, v),
        "PyTorch's SDPA (flash), no gradient": lambda: sdpa(q, k, v),
        "torch.ops.heddle.attention, no_grad": without_gradients(lambda: op(q, k, v)),
        "PyTorch's SDPA (flash), no_grad": without_gradients(lambda: sdpa(q, k, v)),
        "torch.ops.heddle.attention, inference_mode": inferring(lambda: op(qi, ki, vi)),
        "PyTorch's SDPA (flash), inference_mode": inferring(lambda: sdpa(qi, ki, vi)),
        "heddle.attention, no gradient": lambda: heddle.attention(q, k, v),
        "heddle.attention, causal, no gradient": lambda: heddle.attention(q, k, v, causal=True),
        "heddle.scaled_dot_product_attention, no gradient": lambda: heddle.scaled_dot_product_attention(q, k, v),
        "torch.ops.heddle.attention, recording a gradient (goal 30)": lambda: op(*grad),
        "heddle.attention, recording a gradient": lambda: heddle.attention(*grad),
        "PyTorch's SDPA (flash), recording a gradient": lambda: sdpa(*grad),
        "torch.ops.heddle.attention_backward": lambda: backward(q, None, None, out, lse, q, k, v, needs=7),
        "torch.ops.heddle.attention, forward and backward": both(lambda *t: op(*t)[0], grad),
        "heddle.attention, forward and backward": both(heddle.attention, grad),
        "PyTorch's SDPA (flash), forward and backward": both(sdpa, grad),
        "torch.ops.heddle.norm_linear, no gradient": lambda: torch.ops.heddle.norm_linear(x, w),
        "PyTorch's layer_norm + linear, no gradient": lambda: torch.nn.functional.linear(
            torch.nn.functional.layer_norm(x, (64,)), w),
    }
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return in_turn(rows)


def option_rows(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, dout = (torch.randn(1, 1, 1, 8, device=device, dtype=dtype) for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    mask = torch.ones(1, 1, 1, 1, device=device, dtype=torch.bool)
    bias = torch.zeros(1, 1, 1, 1, device=device, dtype=dtype)
    of_two, wanted = mask[0, 0], bias.clone().requires_grad_()
    one = torch.ones(1, device=device)
    ours = {
        "no option": {},
        "causal": {"causal": True},
        "mask": {"mask": mask},
        "mask [sq, sk]": {"mask": of_two},
        "bias": {"bias": bias},
        "bias with its gradient": {"bias": wanted},
        "softcap": {"softcap": 30.0},
        "dropout": {"dropout": 0.1},
        "ALiBi": {"alibi_slopes": one},
        "window": {"window": (1, 1)},
        "lengths": {"seqlens_k": torch.ones(1, device=device, dtype=torch.int32)},
        "sinks": {"sinks": one},
        "lse": {"return_lse": True},
    }
    both = {"no option": {}, "mask [sq, sk]": {"attn_mask": of_two}, "bias": {"attn_mask": bias},
            "bias with its gradient": {"attn_mask": wanted}, "dropout": {"dropout_p": 0.1}}
    calls = [("heddle.attention", heddle.attention, ours),
             ("heddle.scaled_dot_product_attention", heddle.scaled_dot_product_attention, both),
             ("PyTorch's scaled_dot_product_attention", sdpa, both)]
    rows = {}
    for name, function, options in calls:
        for option, given in options.items():
            def forward(function=function, given=given):
                with torch.no_grad():
                    function(q, k, v, **given)

            def backward(function=function, given=given):
                out = function(*leaves, **given)
                (out[0] if isinstance(out, tuple) else out).backward(dout)
                for t in (*leaves, wanted):
                    t.grad = None

            rows[f"{name}, {option}, no_grad"] = forward
            rows[f"{name}, {option}, forward and backward"] = backward
    for call in rows.values():
        call()
    return in_turn(rows, device)


def graph_of(call, times):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def replay(graph, times):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times * 1e3


def graph_rows():
    q, k, v, g = (torch.randn(1, 1, 128, 32, device="cuda") for _ in range(4))
    op, backward = torch.ops.heddle.attention, torch.ops.heddle.attention_backward
    out, lse, _ = op(q, k, v)
    calls = {"forward": lambda: op(q, k, v), "backward": lambda: backward(g, None, None, out, lse, q, k, v, needs=7)}
    rows = []
    for name, call in calls.items():
        for count in (1, 50):
            graph = graph_of(call, count)
            us = statistics.median(replay(graph, 200 // count + 4) for _ in range(30)) / count
            rows.append({"what": f"b1 h1 s128 d32 float32 {name}, graph of {count} (goal 10)", "us": us})
    return rows


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", help="append a line for each row to this file")
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = arguments.parse_args()
    if given.device == "cuda":
        need_gpu(arguments)
    torch.set_num_threads(1)
    rows = host_rows() + graph_rows() if given.device == "cuda" else []
    rows += option_rows(given.device)
    for row in rows:
        median = f"  median {row['median_us']:8.2f} us" if "median_us" in row else ""
        print(f"{row['what']:<84} {row['us']:8.2f} us{median}", flush=True)
    if given.json:
        with open(given.json, "a") as file:
            for row in rows:
                file.write(json.dumps({"bench": "overhead", "device": given.device, **row, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()

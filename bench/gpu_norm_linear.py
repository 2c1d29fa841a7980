#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""norm-linear on a GPU beside PyTorch's layer_norm + linear, in one process: speed, and the error of both against float64.

    python3 bench/gpu_norm_linear.py [--library build/libheddle.so] [--quick] [--json FILE]

Each line: the median of CUDA graph replays, forward and backward (all five gradients), and PyTorch's over heddle's time.
"""
import argparse
import ctypes
import json
import statistics
import time

import torch
import torch.nn.functional as F

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
HEDDLE_CUDA, HEDDLE_TF32 = 2, 1 << 10
I64, PTR = ctypes.c_int64, ctypes.c_void_p


class Description(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("dtype", ctypes.c_int), ("device", ctypes.c_int), ("norm", ctypes.c_int),
                ("reserved0", ctypes.c_int32), ("features", ctypes.c_uint64), ("m", I64), ("k", I64), ("n", I64),
                ("eps", ctypes.c_double)] + [(s + "_stride", I64) for s in ("x", "w", "y", "dy", "dx", "dw")]


class Data(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [(p, PTR) for p in (
        "x", "gamma", "beta", "w", "bias", "y", "mean", "rstd", "dy", "dx", "dgamma", "dbeta", "dw", "dbias")]


class Heddle:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.heddle_last_message.restype = ctypes.c_char_p

    def check(self, status):
        if status:
            raise RuntimeError(f"heddle: status {status}: {self.lib.heddle_last_message().decode()}")

    def calls(self, t, tf32):
        """A forward and a backward call on the tensors t, each ready to be made."""
        m, k = t["x"].shape
        desc = Description(size=ctypes.sizeof(Description), dtype=DTYPES[t["x"].dtype], device=HEDDLE_CUDA, m=m, k=k,
                           n=t["w"].shape[0], features=HEDDLE_TF32 if tf32 else 0)
        data = Data(size=ctypes.sizeof(Data), **{name: x.data_ptr() for name, x in t.items()})
        result = []
        for which, run in enumerate((self.lib.heddle_norm_linear_forward, self.lib.heddle_norm_linear_backward)):
            size = ctypes.c_size_t()
            self.check(self.lib.heddle_norm_linear_workspace(ctypes.byref(desc), which, ctypes.byref(size)))
            space = torch.empty(size.value, dtype=torch.uint8, device="cuda")

            def call(run=run, space=space, size=size):
                stream = PTR(torch.cuda.current_stream().cuda_stream)
                self.check(run(ctypes.byref(desc), ctypes.byref(data), PTR(space.data_ptr()), size, stream))

            result.append(call)
        return result


def graph_of(call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def seconds(graphs, budget):
    """Medians of graphs that take turns, in seconds."""
    samples = [[] for _ in graphs]
    end = time.monotonic() + budget
    while time.monotonic() < end or len(samples[0]) < 5:
        for graph, list_ in zip(graphs, samples):
            begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            list_.append(begin.elapsed_time(stop) * 1e-3)
    return [statistics.median(x) for x in samples]


def tensors(m, k, n, dtype, mean):
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float32)
    t = {"x": make(m, k) + mean, "gamma": 1 + 0.2 * make(k), "beta": 0.2 * make(k), "w": make(n, k) / k**0.5,
         "bias": make(n), "dy": make(m, n)}
    t = {name: x.to(dtype) for name, x in t.items()}
    for out, like in (("y", "dy"), ("dx", "x"), ("dgamma", "gamma"), ("dbeta", "beta"), ("dw", "w"), ("dbias", "bias")):
        t[out] = torch.full_like(t[like], float("nan"))
    t["mean"], t["rstd"] = (torch.full((m,), float("nan"), device="cuda") for _ in range(2))
    return t


NAMES = ("y", "dx", "dgamma", "dbeta", "dw", "dbias")


def torch_all(t, dtype):
    x, gamma, beta, w, bias = (t[i].to(dtype).requires_grad_() for i in ("x", "gamma", "beta", "w", "bias"))
    y = F.linear(F.layer_norm(x, (x.shape[1],), gamma, beta), w, bias)
    grads = torch.autograd.grad(y, (x, gamma, beta, w, bias), t["dy"].to(dtype))
    return dict(zip(NAMES, (y.detach(), *grads)))


def errors(t, got, truth):
    """Of each result the largest error over the largest magnitude."""
    return {i: ((got[i].double() - truth[i]).abs().max() / truth[i].abs().max()).item() for i in NAMES}


def compare(heddle, m, k, n, dtype, tf32, mean):
    t = tensors(m, k, n, dtype, mean)
    for call in heddle.calls(t, tf32):
        call()
    torch.cuda.synchronize()
    truth = torch_all(t, torch.float64)
    ours, theirs = errors(t, t, truth), errors(t, torch_all(t, dtype), truth)
    print(f"  error m{m} k{k} n{n} {dtype} tf32={tf32} mean {mean}: " +
          ", ".join(f"{i} {ours[i]:.2g} ({ours[i] / max(theirs[i], 1e-30):.2f}x)" for i in NAMES), flush=True)


def measure(heddle, m, k, n, dtype, tf32, budget):
    t = tensors(m, k, n, dtype, 0)
    forward, backward = heddle.calls(t, tf32)
    x, gamma, beta, w, bias = (t[i].detach().requires_grad_() for i in ("x", "gamma", "beta", "w", "bias"))
    plain = lambda: F.linear(F.layer_norm(x, (k,), gamma, beta), w, bias)
    with torch.no_grad():
        fwd = graph_of(plain)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(plain(), (x, gamma, beta, w, bias), t["dy"])
        stream.synchronize()
        y = plain()
        bwd = torch.cuda.CUDAGraph()
        with torch.cuda.graph(bwd, stream=stream):
            torch.autograd.grad(y, (x, gamma, beta, w, bias), t["dy"], retain_graph=True)
    torch.cuda.synchronize()
    ours_f, theirs_f = seconds((graph_of(forward), fwd), budget)
    ours_b, theirs_b = seconds((graph_of(backward), bwd), budget)
    flops = 2.0 * m * k * n
    name = f"m{m} k{k} n{n} {str(dtype)[6:]}{' tf32' if tf32 else ''}"
    print(f"{name:36} fwd {ours_f * 1e3:7.3f} ms {flops / ours_f * 1e-12:5.0f} TFLOP/s {theirs_f / ours_f:5.2f}x torch | "
          f"bwd {ours_b * 1e3:7.3f} ms {2 * flops / ours_b * 1e-12:5.0f} TFLOP/s {theirs_b / ours_b:5.2f}x torch", flush=True)
    return {"case": name, "fwd_ms": ours_f * 1e3, "torch_fwd_ms": theirs_f * 1e3, "bwd_ms": ours_b * 1e3,
            "torch_bwd_ms": theirs_b * 1e3}


def host_cost(heddle):
    """Microseconds that a forward call takes the host, with little for the GPU to do."""
    t = tensors(128, 128, 128, torch.bfloat16, 0)
    for name, call in zip(("forward", "backward"), heddle.calls(t, False)):
        best = 1e9
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(50):
                call()
            best = min(best, (time.perf_counter() - begin) / 50)
        print(f"host cost of a {name} call, ctypes included: {best * 1e6:.2f} us", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/libheddle.so")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter runs")
    parser.add_argument("--json", help="append the results to this file, a line each")
    a = parser.parse_args()
    heddle = Heddle(a.library)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}")
    cases = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, False)]
    for dtype, tf32 in cases:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for mean in (0, 100, 1000):
            compare(heddle, 2048, 4096, 1024, dtype, tf32, mean)
    host_cost(heddle)
    shapes = [(16384, 1024, 4096)] if a.quick else [(16384, 1024, 4096), (16384, 4096, 4096), (8192, 4096, 12288),
                                                   (2048, 768, 3072)]
    for shape in shapes:
        for dtype, tf32 in cases:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            row = measure(heddle, *shape, dtype, tf32, 0.3 if a.quick else 1.0)
            if a.json:
                with open(a.json, "a") as f:
                    f.write(json.dumps({"gpu": name, "torch": torch.__version__, **row}) + "\n")


if __name__ == "__main__":
    main()

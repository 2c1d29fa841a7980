#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention on one GPU, heddle beside PyTorch's kernels, pair by pair in one process.

    python3 bench/gpu_attention.py --library path/to/libheddle.so [--filter TEXT] [--json FILE]

For every case the two sides run in turn, many times, timed by CUDA events; what is printed is the median of each and the
median of the paired ratios (over 1: heddle is faster). In float32 the errors of both against float64 are printed, too (over 1:
heddle's is smaller). Inputs are normal numbers in layout [b, s, h, d]. Forward counts
4·b·h·sq·sk·d operations, half of them if causal, backward 2.5 times as many; decoding counts the bytes of K and V.
"""
import argparse
import ctypes
import json
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

I32, I64, U64, F64, PTR, SIZE = (ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p,
                                 ctypes.c_size_t)
CUDA, FORWARD, BACKWARD = 2, 0, 1
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Strides(ctypes.Structure):
    _fields_ = [(name, I64) for name in "bhs"]


class Attention(ctypes.Structure):
    _fields_ = ([("size", SIZE), ("dtype", I32), ("device", I32)]
                + [(name, I64) for name in ("b", "h", "hk", "sq", "sk", "d", "dv")]
                + [("mask", I32), ("reserved0", I32), ("features", U64), ("window_left", I64), ("window_right", I64)]
                + [(name, F64) for name in ("scale", "softcap", "dropout")]
                + [("seed", U64), ("offset", U64), ("total_q", I64), ("total_k", I64)]
                + [(name + "_stride", Strides) for name in (
                    "q", "k", "v", "o", "do", "dq", "dk", "dv", "bias", "bool_mask", "dbias", "weights", "dweights")]
                + [("alibi_stride_b", I64)])


class Data(ctypes.Structure):
    _fields_ = [("size", SIZE)] + [(name, PTR) for name in (
        "q", "k", "v", "alibi_slopes", "bias", "bool_mask", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqlens_q",
        "seqlens_k", "rng_state", "o", "lse", "weights", "dout", "dlse", "dweights", "dq", "dk", "dv", "dbias", "dsinks")]


class Heddle:
    """One problem: buffers, workspace, and the two passes as functions without arguments."""

    def __init__(self, lib, q, k, v, dout, causal):
        b, h, sq, d = q.shape
        hk, sk = k.shape[1], k.shape[2]
        self.lib = lib
        self.desc = Attention(size=ctypes.sizeof(Attention), dtype=TYPES[q.dtype], device=CUDA, b=b, h=h, hk=hk, sq=sq,
                              sk=sk, d=d, mask=2 if causal else 0)
        self.o, self.dq, self.dk, self.dv = (torch.empty_like(x) for x in (q, q, k, v))
        self.lse = torch.empty(b, h, sq, device="cuda")
        tensors = dict(q=q, k=k, v=v, o=self.o, dq=self.dq, dk=self.dk, dv=self.dv)
        for name, x in {**tensors, "do": dout}.items():
            setattr(self.desc, name + "_stride", Strides(*x.stride()[:3]))
        self.data = Data(size=ctypes.sizeof(Data), lse=self.lse.data_ptr(),
                         **{name: tensors[name].data_ptr() for name in "qkvo"})
        self.back = Data(size=ctypes.sizeof(Data), lse=self.lse.data_ptr(), dout=dout.data_ptr(),
                         **{name: x.data_ptr() for name, x in tensors.items()})
        self.workspace = [self.make_workspace(p) for p in (FORWARD, BACKWARD)]

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.heddle_last_message().decode())

    def make_workspace(self, which):
        size = SIZE()
        self.check(self.lib.heddle_attention_workspace(ctypes.byref(self.desc), which, ctypes.byref(size)))
        return torch.empty(size.value + 64, dtype=torch.uint8, device="cuda"), size.value

    def run(self, which):
        space, size = self.workspace[which]
        function = (self.lib.heddle_attention_forward, self.lib.heddle_attention_backward)[which]
        self.check(function(ctypes.byref(self.desc), ctypes.byref((self.data, self.back)[which]), PTR(space.data_ptr()),
                            SIZE(size), PTR(torch.cuda.current_stream().cuda_stream)))

    def forward(self):
        self.run(FORWARD)

    def backward(self):
        self.run(BACKWARD)

    def kernel(self, which):
        name = ctypes.create_string_buffer(64)
        self.check(self.lib.heddle_attention_kernel(ctypes.byref(self.desc), which, name, 64))
        return name.value.decode()


def milliseconds(run):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def pair(ours, theirs, repeats):
    """Medians of both and of theirs over ours, run in turn."""
    for _ in range(3):
        ours()
        theirs()
    times = [(milliseconds(ours), milliseconds(theirs)) for _ in range(repeats)]
    return (statistics.median(x for x, _ in times), statistics.median(y for _, y in times),
            statistics.median(y / x for x, y in times))


def error(x, ref):
    return ((x.double() - ref.double()).norm() / ref.double().norm()).item()


def exact(q, k, v, dout, causal):
    """o, dq, dk, dv of the first head in float64."""
    q, k, v, dout = (x[:1, :1].double() for x in (q, k, v, dout))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    s = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    o = s.softmax(-1) @ v
    return o.detach(), *torch.autograd.grad(o, (q, k, v), dout)


def worst(x, ref):
    """The largest error relative to the largest magnitude, and the root mean square of both."""
    difference = x[:1, :1].double() - ref
    return difference.abs().max().item() / ref.abs().max().item(), (difference.norm() / ref.norm()).item()


def errors(ours, theirs, refs):
    """Both sides' errors against float64: heddle's is to be no larger."""
    row = {}
    for name, x, y, ref in zip(("o", "dq", "dk", "dv"), ours, theirs, refs):
        (x_max, x_rms), (y_max, y_rms) = worst(x, ref), worst(y, ref)
        row["error_" + name] = [x_max, y_max, x_rms, y_rms]
        print(f"    {name:3s} error against float64: largest {x_max:.2e} {y_max:.2e}  rms {x_rms:.2e} {y_rms:.2e}  "
              f"ratio {y_max / x_max:.2f} {y_rms / x_rms:.2f}", flush=True)
    return row


def compare(lib, case, backends, repeats):
    dtype, b, h, hk, sq, sk, d, causal = case
    make = lambda heads, rows: torch.randn(b, rows, heads, d, device="cuda", dtype=dtype).transpose(1, 2)
    q, k, v, dout = make(h, sq), make(hk, sk), make(hk, sk), make(h, sq)
    ours = Heddle(lib, q, k, v, dout, causal)
    flops = 4.0 * b * h * sq * sk * d * (0.5 if causal else 1)
    name = f"B{b}H{h}/{hk}S{sq}x{sk}D{d}{'c' if causal else 'f'}-{str(dtype)[6:]}"
    for backend in backends:
        leaves = [x.detach().requires_grad_(sq > 1) for x in (q, k, v)]
        row = {"case": name, "peer": backend.name.lower()}
        with sdpa_kernel(backend):
            forward = lambda: sdpa(*leaves, is_causal=causal, enable_gqa=h != hk)
            try:
                theirs = forward()
            except RuntimeError as e:
                print(f"{name:44s} {row['peer']}: {str(e).splitlines()[0][:80]}")
                continue
            ours.forward()
            row["difference"] = error(ours.o, theirs)
            passes = [("fwd", FORWARD, ours.forward, forward, flops)]
            if sq > 1:
                ours.backward()
                grads = torch.autograd.grad(theirs, leaves, dout, retain_graph=True)
                row["difference_bwd"] = max(error(x, y) for x, y in zip((ours.dq, ours.dk, ours.dv), grads))
                if dtype == torch.float32 and h == hk:
                    row.update(errors((ours.o, ours.dq, ours.dk, ours.dv), (theirs, *grads),
                                      exact(q, k, v, dout, causal)))
                passes.append(("bwd", BACKWARD, ours.backward,
                               lambda: torch.autograd.grad(theirs, leaves, dout, retain_graph=True), 2.5 * flops))
            for label, which, run, peer, work in passes:
                x, y, ratio = pair(run, peer, repeats)
                unit = 2.0 * b * hk * sk * d * q.element_size() if sq == 1 else work
                row.update({label + "_ms": x, label + "_peer_ms": y, label + "_ratio": ratio, label + "_kernel": ours.kernel(which)})
                what = f"{unit / x / 1e9:7.2f} {unit / y / 1e9:7.2f} {'TB/s' if sq == 1 else 'TFLOP/s'}".replace("  ", " ")
                print(f"{name:44s} {row['peer']:20s} {label} {x:8.4f} {y:8.4f} ms  {what}  ratio {ratio:.2f}", flush=True)
        yield row


def cases():
    bf16, flash, cudnn = torch.bfloat16, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for d, h in ((64, 32), (128, 16), (256, 8)):
        for causal in (False, True):
            for s in (512, 1024, 2048, 4096, 8192, 16384):
                yield (bf16, 16384 // s, h, h, s, s, d, causal), [flash]
    yield (bf16, 4, 32, 8, 4096, 4096, 128, True), [flash]
    yield (torch.float16, 4, 16, 16, 4096, 4096, 128, True), [flash]
    for d, h in ((64, 32), (128, 16)):
        for causal in (True, False):
            for s in (4096, 512, 1024, 16384):
                yield (torch.float32, 16384 // s, h, h, s, s, d, causal), [SDPBackend.EFFICIENT_ATTENTION]
    for b, sk in ((1, 8192), (1, 131072), (32, 8192), (64, 4096)):
        yield (bf16, b, 32, 8, 1, sk, 128, False), [cudnn, flash]
    yield (torch.float32, 1, 1, 1, 128, 128, 32, False), [SDPBackend.EFFICIENT_ATTENTION]
    yield (bf16, 1, 1, 1, 128, 128, 64, False), [flash]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libheddle.so")
    parser.add_argument("--filter", default="", help="only cases whose name holds this")
    parser.add_argument("--json", help="append a line per case to this file")
    parser.add_argument("--repeats", type=int, default=15)
    a = parser.parse_args()
    lib = ctypes.CDLL(a.library)
    lib.heddle_last_message.restype = ctypes.c_char_p
    torch.manual_seed(1)
    print("case, peer, pass, heddle, peer, rates of both, peer's time over heddle's")
    for case, backends in cases():
        if a.filter not in f"{case[0]} S{case[4]}x{case[5]}D{case[6]}":
            continue
        for row in compare(lib, case, backends, a.repeats):
            if a.json:
                with open(a.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

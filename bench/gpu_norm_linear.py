#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""norm-linear on a GPU beside PyTorch, in turn in one process: device time alone (bench/gpu_timing.py), and errors.

    python3 bench/gpu_norm_linear.py [--library build/libheddle.so] [--filter TEXT] [--regime rest|power] [--errors]
                                     [--compiled] [--json FILE]

A row: the time of a forward, and of a backward with all gradients, over PyTorch's `F.linear` alone (its backward: dx, dw and
dbias), of heddle and of PyTorch's layer_norm + linear (eager). Under 1: faster than the product without any norm. Rows
"no norm": a Linear alone, of both; "residual": a tensor added to y, of both, and not of what they are compared with; "z":
norm(x) is a result, too, and has a gradient of its own; "gelu", "silu": y = act(u), and forward keeps u for backward;
"swiglu": y = silu(gate)·up of both halves of the n columns, which forward keeps ("geglu": gelu); "swiglu y": the same
forward where y alone is wanted; "prepared": a forward that finds what it makes of the weight
(heddle_norm_linear_prepare), in turn with the one that does not, whose time over its own is "gain".
--compiled: PyTorch's layer_norm + linear by torch.compile, too, where that works.
--errors: of each result the largest error against float64 over the largest magnitude, and that over PyTorch's, with rows whose
means are 0, 100 and 1000 deviations.
"""
import argparse
import json
import time

import torch
import torch._functorch.config
import torch.nn.functional as F

from gpu_timing import POWER, REST, Clock, need_gpu
from heddle_c import LAYER_NORM, NO_NORM, Library

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = ((16384, 1024, 4096), (16384, 4096, 4096), (8192, 4096, 12288), (4096, 4096, 22016), (4096, 2048, 2048),
          (2048, 768, 3072), (1000, 1536, 6144))
# Weights of few tiles, of which dW has the sum over m to divide.
SMALL_WEIGHTS = ((16384, 768, 768), (16384, 768, 2304), (16384, 768, 3072), (16384, 1024, 1024), (32768, 512, 512),
                 (65536, 256, 256))
GATED = ((16384, 1024, 8192), (4096, 4096, 22016))
FEW_ROWS = (*((m, 4096, n) for n in (4096, 12288) for m in (1, 4, 16, 32, 64, 128)),
            (16, 8192, 8192), (64, 8192, 8192), (128, 1024, 4096))
# And what the library is told; a residual is a tensor for each shape.
OPTIONS = {"": {}, "no norm": {"norm": NO_NORM}, "residual": {"residual": True},
           "no norm residual": {"norm": NO_NORM, "residual": True}, "z": {"dz": True}, "gelu": {"activation": "gelu"},
           "silu": {"activation": "silu"}, "swiglu": {"activation": "swiglu"},
           "swiglu y": {"activation": "swiglu"}, "geglu": {"activation": "geglu"}, "prepared": {}}
ALONE, GATES = {"gelu": F.gelu, "silu": F.silu}, {"swiglu": F.silu, "geglu": F.gelu}
TYPES = ((BF16, False), (F16, False), (F32, False), (F32, True))  # and whether float32 may be TF32
DEVICE = "cuda"
INPUTS, NAMES = ("x", "gamma", "beta", "w", "bias"), ("y", "dx", "dgamma", "dbeta", "dw", "dbias")


def tensors(m, k, n, dtype, mean=0.0):
    make = lambda *shape: torch.randn(*shape, device=DEVICE)
    t = {"x": make(m, k) + mean, "gamma": 1 + 0.2 * make(k), "beta": 0.2 * make(k), "w": make(n, k) / k**0.5,
         "bias": make(n), "dy": make(m, n)}
    return {name: x.to(dtype) for name, x in t.items()}


def in_pytorch(x, gamma, beta, w, bias, norm=LAYER_NORM, residual=None, dz=None, activation=None):
    z = x if norm == NO_NORM else F.layer_norm(x, (x.shape[1],), gamma, beta)
    y = F.linear(z, w, bias)
    if activation in ALONE:
        y = ALONE[activation](y)
    elif activation:
        gate, up = y.chunk(2, -1)
        y = GATES[activation](gate) * up
    return (y, z) if dz is not None else y if residual is None else y + residual


def by_inductor():
    """in_pytorch by torch.compile; None where that does not work: it needs triton and a C compiler."""
    torch._functorch.config.donated_buffer = False  # backward runs again and again
    try:
        torch.compile(lambda x: 2 * x + 1)(torch.ones(8, device="cuda"))
        return torch.compile(in_pytorch, dynamic=False)
    except Exception as error:  # whatever it raises
        print(f"torch.compile does not work here: {type(error).__name__}: {str(error)[:200]}")
        return None


def eager(t, dtype=None, run=in_pytorch, **options):
    """PyTorch's y and the leaves of its gradients."""
    leaves = {i: t[i].detach().to(dtype or t[i].dtype).requires_grad_() for i in INPUTS}
    used = [x for i, x in leaves.items() if options.get("norm") != NO_NORM or i not in ("gamma", "beta")]
    return run(**leaves, **options), used


def eager_all(t, dtype):
    y, leaves = eager(t, dtype)
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, t["dy"].to(dtype)))))


def errors(lib, m, k, n, dtype, tf32, mean):
    t = tensors(m, k, n, dtype, mean)
    job = lib.norm_linear(*(t[i] for i in INPUTS), t["dy"], tf32=tf32)
    job.forward()
    job.backward()
    truth, plain = eager_all(t, torch.float64), eager_all(t, dtype)
    of = lambda got: {i: ((got[i].double() - truth[i]).abs().max() / truth[i].abs().max()).item() for i in NAMES}
    ours, theirs = of(job.tensors), of(plain)
    print(f"  error m{m} k{k} n{n} {dtype} tf32={tf32} mean {mean}: " +
          ", ".join(f"{i} {ours[i]:.2g} ({ours[i] / max(theirs[i], 1e-30):.2f}x)" for i in NAMES), flush=True)


def backward_of(y, leaves, dy):
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def name_of(m, k, n, dtype, tf32, option):
    return f"m{m} k{k} n{n} {str(dtype)[6:]}{' tf32' * tf32}{' ' * bool(option)}{option}"


def cases():
    """m, k, n, dtype, tf32 and option of every row."""
    rows = [(*shape, BF16, False, "") for shape in SHAPES + FEW_ROWS + SMALL_WEIGHTS]
    rows += [(*shape, *kind, "") for shape in (SHAPES[0], SHAPES[4]) for kind in TYPES[1:]]
    rows += [(*shape, BF16, False, option) for option in list(OPTIONS)[1:] for shape in SHAPES]
    rows += [(*shape, BF16, False, "no norm") for shape in SMALL_WEIGHTS]
    rows += [(*SMALL_WEIGHTS[2], BF16, False, "gelu")]
    rows += [(*GATED[0], BF16, False, option) for option in GATES]
    rows += [(*SHAPES[4], *kind, option) for option in list(OPTIONS)[1:] for kind in TYPES[1:]]
    rows += [(*shape, *kind, "prepared") for kind in TYPES[:3:2] for shape in (*FEW_ROWS, (1024, 4096, 4096))]
    return rows


def measure(lib, clock, m, k, n, dtype, tf32, option, regimes, compiled=None):
    torch._dynamo.reset()  # else, after eight shapes, the ninth is not compiled
    t, options = tensors(m, k, n, dtype), dict(OPTIONS[option])
    if "residual" in options:
        options["residual"] = torch.randn_like(t["dy"])
    if "dz" in options:
        options["dz"] = torch.randn_like(t["x"])
    if options.get("activation") in GATES:
        t["dy"], of_u = t["dy"][:, : n // 2].contiguous(), t["dy"]
    else:
        of_u = t["dy"]
    dy = t["dy"] if "dz" not in options else (t["dy"], options["dz"])
    forward_alone = option in ("swiglu y", "prepared")
    given, dy_of_job = [t[i] for i in INPUTS], None if forward_alone else t["dy"]
    job = lib.norm_linear(*given, dy_of_job, tf32=tf32, prepared=option == "prepared", **options)
    y, leaves = eager(t, **options)
    x, w, bias = (t[i].detach().requires_grad_() for i in ("x", "w", "bias"))
    line = F.linear(x, w, bias)

    def plain():
        with torch.no_grad():
            in_pytorch(*(t[i] for i in INPUTS), **options)

    def linear():
        with torch.no_grad():
            F.linear(t["x"], t["w"], t["bias"])

    def of_inductor():
        with torch.no_grad():
            compiled(*(t[i] for i in INPUTS), **options)

    passes = {"fwd": [job.forward, plain, linear]}
    if not forward_alone:
        passes["bwd"] = [job.backward, backward_of(y, leaves, dy), backward_of(line, (x, w, bias), of_u)]
    others = []
    if option == "prepared":
        others.append("unprepared")
        passes["fwd"].append(lib.norm_linear(*given, None, tf32=tf32, **options).forward)
    if compiled:
        others.append("compiled")
        passes["fwd"].append(of_inductor)
        if not forward_alone:
            passes["bwd"].append(backward_of(*eager(t, run=compiled, **options), dy))
    name = name_of(m, k, n, dtype, tf32, option)
    row = {"case": name, "kernels": job.kernels}
    for regime in regimes:
        cells = []
        for index, (label, calls) in enumerate(passes.items()):
            ours, theirs, alone, *more = clock.measure(regime, calls)
            rate = 2.0 * (index + 1) * m * k * n / ours * 1e-12
            row[f"{label}_{regime}"] = {"us": ours * 1e6, "eager_us": theirs * 1e6, "linear_us": alone * 1e6, "tflops": rate,
                                        "over_linear": ours / alone, "eager_over_linear": theirs / alone}
            row[f"{label}_{regime}"].update({f"{other}_us": each * 1e6 for other, each in zip(others, more)})
            if "unprepared" in others:
                row[f"{label}_{regime}"]["gain"] = more[0] / ours
            beside = "".join(f", {other} {each / alone:.2f}" for other, each in zip(others, more))
            gain = f", gain {more[0] / ours:.3f}" if "unprepared" in others else ""
            cells.append(f"{label} {ours * 1e6:8.1f} us {rate:4.0f} TFLOP/s, over linear {ours / alone:.2f} "
                         f"(eager {theirs / alone:.2f}{beside}){gain}")
        print(f"{name:40s} {regime:5s} {' | '.join(cells)}", flush=True)
    return row


def host_cost(lib):
    """Microseconds that a call takes the host, with little for the GPU to do."""
    t = tensors(128, 128, 128, BF16)
    job = lib.norm_linear(*(t[i] for i in INPUTS), t["dy"])
    for name, call in (("forward", job.forward), ("backward", job.backward)):
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
    parser.add_argument("--filter", action="append", default=[], help="only cases whose name holds one of these")
    parser.add_argument("--regime", action="append", choices=[REST, POWER], help="default: both")
    parser.add_argument("--errors", action="store_true", help="errors against float64 first")
    parser.add_argument("--compiled", action="store_true", help="PyTorch by torch.compile, too")
    parser.add_argument("--json", help="append the results to this file, a line each")
    a = parser.parse_args()
    need_gpu(parser)
    lib, clock, gpu = Library(a.library), Clock(), torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}")
    if a.errors:
        for dtype, tf32 in TYPES:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            for mean in (0, 100, 1000):
                errors(lib, 2048, 4096, 1024, dtype, tf32, mean)
    host_cost(lib)
    compiled = by_inductor() if a.compiled else None
    for case in cases():
        name = name_of(*case)
        if a.filter and not any(x in name for x in a.filter):
            continue
        torch.backends.cuda.matmul.allow_tf32 = case[4]
        row = measure(lib, clock, *case, a.regime or [REST, POWER], compiled)
        torch.cuda.empty_cache()
        if a.json:
            with open(a.json, "a", encoding="utf-8") as file:
                file.write(json.dumps({"table": "norm-linear", "gpu": gpu, "torch": torch.__version__, **row}) + "\n")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators for so many seconds, forward and backward with options, and the memory of the process stays flat.

    python tests/python/soak.py SECONDS [--leak]

Between two rounds of the same problems as much is resident in the last quarter of the time as in the second, but for a
megabyte, which in two minutes is some hundred bytes of each call. --leak keeps a little of each round, which must be
found."""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time

import torch

import heddle

torch.manual_seed(0)
torch.set_num_threads(2)
kept = []


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def attention(dtype, h, hk, sq, sk, d, **options):
    q, k, v = tensors((2, h, sq, d), (2, hk, sk, d), (2, hk, sk, d), dtype=dtype)
    out = heddle.attention(q, k, v, **options)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def packed(dtype):
    q, k, v = tensors(*[(40, 2, 16)] * 3, dtype=dtype)
    cu = torch.tensor([0, 7, 40], dtype=torch.int32)
    heddle.flash_attn_varlen_func(q, k, v, cu, cu, 33, 33, causal=True).sum().backward()


def decode(dtype, keys, **options):
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in ((2, 4, 1, 16), *[(8, 2, 16, 16)] * 2))
    table, lengths = torch.arange(8, dtype=torch.int32).reshape(2, 4), torch.tensor([17, 60], dtype=torch.int32)
    heddle.attention(q, k.to(keys), v.to(keys), block_table=table, seqlens_k=lengths, **options)


def linear(dtype, m, **options):
    x, w, c = tensors((m, 24), (32, 24), (32,), dtype=dtype)
    heddle.norm_linear(x, w, c, **options).sum().backward()


def prepared(dtype):
    x, w = torch.randn(3, 24, dtype=dtype), torch.randn(32, 24, dtype=dtype)
    heddle.norm_linear(x, w, prepared=heddle.norm_linear_prepare(w))


def flex(dtype):
    q, k, v = tensors(*[(1, 2, 40, 16)] * 3, dtype=dtype)
    heddle.flex_attention(q, k, v, relative).sum().backward()


def relative(score, b, h, i, j):
    return score + (i - j)


def refused():
    """An error is no leak, either."""
    q = torch.randn(1, 2, 8, 16)
    try:
        heddle.attention(q, q[..., :8], q)
    except ValueError:
        return
    raise AssertionError("a call that is none was taken")


def round_of_all():
    """Each problem once: how many calls there are."""
    n = 0
    for dtype in (torch.float32, torch.bfloat16):
        bias, sinks = torch.randn(1, 4, 33, 40, dtype=dtype).requires_grad_(), torch.randn(4).requires_grad_()
        for options in (
            {},
            {"causal": "top_left", "softcap": 5.0},
            {"causal": "bottom_right", "alibi_slopes": torch.full((4,), 0.5)},
            {"window": (8, 3), "sinks": sinks},
            {"bias": bias},
            {"mask": torch.ones(2, 1, 33, 40, dtype=torch.bool).tril()},
            {"dropout": 0.2},
            {"return_lse": True, "return_weights": True},
            {"seqlens_q": [33, 5], "seqlens_k": [40, 9]},
        ):
            attention(dtype, 4, 2, 33, 40, 16, **options)
            n += 2
        packed(dtype)
        decode(dtype, dtype)
        for options in ({}, {"norm": "rms"}, {"activation": "gelu"}, {"norm": "none", "activation": "silu"}):
            linear(dtype, 17, **options)
            linear(dtype, 1, **options)
            n += 4
        prepared(dtype)
        flex(dtype)
        refused()
        n += 9
    decode(torch.bfloat16, torch.float8_e4m3fn, k_scale=torch.ones(2, 2), v_scale=torch.ones(2, 2))
    return n + 1


def resident():
    """Bytes, without what Python and the C library keep for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--leak", action="store_true")
    options = parser.parse_args()
    begin, calls, samples = time.monotonic(), 0, []
    while (at := time.monotonic() - begin) < options.seconds:
        calls = round_of_all()
        samples.append((at / options.seconds, resident()))
        if options.leak:
            kept.append(bytearray(100000))
    quarters = [[bytes for at, bytes in samples if quarter <= 4 * at < quarter + 1] for quarter in range(4)]
    if min(map(len, quarters)) < 3:
        sys.exit(f"only {len(samples)} rounds")
    before, after = min(quarters[1]), min(quarters[3])
    print(f"{len(samples)} rounds of {calls} calls, {before} bytes, then {after}")
    sys.exit(after - before > 1e6)


if __name__ == "__main__":
    main()

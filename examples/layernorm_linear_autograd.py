#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fused LayerNorm + Linear with autograd: the report of a GPU puzzle (p22), with right formulas behind it.

    python examples/layernorm_linear_autograd.py [--device cpu]

For the CPU, and for the GPU where there is one, or for one device alone: the forward's maximum difference from PyTorch
in float64 and that of the five gradients, first with the puzzle's input (dY = 1, gamma = 1, beta = bias = 0), then with
random ones, where its faults could not hide; then torch.compile. Exit status 1 if something is off.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

import heddle

B, S, H, OUT, EPS = 4, 4, 8, 16, 1e-5
NAMES = ("grad_input", "grad_ln_weight", "grad_ln_bias", "grad_linear_weight", "grad_linear_bias")
LIMIT = 2e-6  # of the largest value of each


def fused(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What is tested."""
    y: Tensor = heddle.norm_linear(x, weight, bias, gamma, beta, EPS)
    return y


def unfused(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What it is compared with."""
    return F.linear(F.layer_norm(x, (H,), gamma, beta, EPS), weight, bias)


def verdict(name: str, got: Tensor, want: Tensor) -> bool:
    """One line of the report."""
    difference = (got.double().cpu() - want).abs().max().item()
    good = difference <= LIMIT * max(want.abs().max().item(), 1.0)
    print(f"    {name:<20} {difference:9.2e}   {'ok' if good else 'FAILED'}")
    return good


def compare(title: str, device: str, function: object, inputs: list[Tensor], dy: Tensor) -> bool:
    """Forward and backward of `function` on the device against float64 on the CPU."""
    print(f"  {title}")
    leaves = [t.to(device).requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    y = function(*leaves)  # type: ignore[operator]
    want = unfused(*exact)
    good = verdict("forward", y.detach(), want.detach())
    grads = torch.autograd.grad(y, leaves, dy.to(device))
    wants = torch.autograd.grad(want, exact, dy.double())
    for name, a, b in zip(NAMES, grads, wants, strict=True):
        good = verdict(name, a, b) and good
    return good


def main() -> int:
    """Runs the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; default: both, where there is a GPU")
    only = parser.parse_args().device
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    torch.manual_seed(42)
    x, weight = torch.randn(B, S, H), 0.02 * torch.randn(OUT, H)
    puzzle = [x, torch.ones(H), torch.zeros(H), weight, torch.zeros(OUT)]
    hard = [100 + torch.randn(B, S, H), torch.randn(H), torch.randn(H), torch.randn(OUT, H), torch.randn(OUT)]
    easy = [torch.randn_like(t) for t in hard]
    good = True
    for device in [only] if only else there:
        print(f"{device.upper()}:")
        good = compare("the puzzle's input, dY = 1", device, fused, puzzle, torch.ones(B, S, OUT)) and good
        good = compare("random dY, gamma, beta, bias", device, fused, easy, torch.randn(B, S, OUT)) and good
        good = (
            compare(
                "torch.compile(fullgraph=True)",
                device,
                torch.compile(fused, fullgraph=True),
                easy,
                torch.randn(B, S, OUT),
            )
            and good
        )
        with torch.no_grad():
            y = fused(*(t.to(device) for t in hard)).double().cpu()
            off = (y - unfused(*(t.double() for t in hard))).abs().max().item()
        print(f"  a mean of 100 deviations: forward differs by {off:.1e} (a one-pass variance: 4e-02)")
        good = good and off < 1e-3
    print("Overall result: " + ("PASSED" if good else "FAILED"))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

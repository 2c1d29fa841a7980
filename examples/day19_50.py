#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tests of "Day 19" and "Day 50" through heddle.compat.gpu_kernels, and what those tests did not look at.

    python examples/day19_50.py [--device cuda]

Exit status 1 if something is off.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from heddle.compat import gpu_kernels

failed = 0


def report(what: str, difference: float, limit: float) -> None:
    """One line: the difference, the limit, the verdict."""
    global failed
    good = difference <= limit  # false for NaN
    failed += not good
    print(f"  {what:<44} {difference:9.2e}   limit {limit:.1e}   {'ok' if good else 'FAILED'}")


def largest(a: Tensor, b: Tensor) -> float:
    """The maximum difference."""
    return (a.double() - b.double()).abs().max().item()


def truth(query: Tensor, key: Tensor, value: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Output and weights in float64."""
    weights = torch.softmax(query.double() @ key.double().T / math.sqrt(d), -1)
    return weights @ value.double(), weights


def day19(device: str) -> None:
    """Self-attention forward."""
    print("Day 19: self_attention(input, output, d)")
    for rows, columns, d, factor in (
        (32, 64, 64, 1),
        (32, 64, 16, 1),
        (1000, 64, 64, 1),
        (7, 33, 5, 1),
        (32, 64, 64, 1000),
    ):
        x = torch.randn(rows, columns, device=device) * factor
        output = torch.full_like(x, math.nan)
        gpu_kernels.self_attention(x, output, d)
        want, _ = truth(x, x, x, d)
        limit = 2e-6 * want.abs().max().item()
        name = f"Maximum difference, {rows}x{columns}, d = {d}" + (f", times {factor}" if factor != 1 else "")
        report(name, largest(output, want), limit)


def day50(device: str) -> None:
    """Self-attention backward, and autograd beside it."""
    print("Day 50: self_attention_backward(grad_output, query, key, value, attn_weights, grad_query, ..., d)")
    for sq, sk, columns, d in ((32, 32, 64, 64), (50, 7, 24, 24)):
        query, grad_output = (torch.randn(sq, columns, device=device) for _ in range(2))
        key, value = (torch.randn(sk, columns, device=device) for _ in range(2))
        leaves = [t.double().requires_grad_() for t in (query, key, value)]
        output, weights = truth(leaves[0], leaves[1], leaves[2], d)
        wants = torch.autograd.grad(output, leaves, grad_output.double())
        grads = [torch.full_like(t, math.nan) for t in (query, key, value)]
        gpu_kernels.self_attention_backward(
            grad_output, query, key, value, weights.detach().float(), grads[0], grads[1], grads[2], d
        )
        for name, got, want in zip(("Query", "Key", "Value"), grads, wants, strict=True):
            report(f"{name} grad max diff, {sq} queries, {sk} keys", largest(got, want), 4e-6 * want.abs().max().item())


def main() -> int:
    """Runs both days."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    device = parser.parse_args().device
    torch.manual_seed(0)
    day19(device)
    day50(device)
    print(f"{failed} FAILED" if failed else "All tests passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

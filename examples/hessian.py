#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The curvature of a small attention block's loss: its Hessian, and a product with it that never forms it.

python examples/hessian.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import heddle


def loss(w: Tensor, x: Tensor) -> Tensor:
    """RMSNorm, one head of attention to what came before, and the mean of the squares."""
    q, k, v = heddle.norm_linear(x, w, norm="rms")[:, None].chunk(3, -1)
    o: Tensor = heddle.attention(q, k, v, causal=True)
    return o.square().mean()


torch.manual_seed(0)
x, w = torch.randn(2, 16, 4), torch.randn(12, 4)
hessian = torch.func.hessian(loss)(w, x).reshape(w.numel(), w.numel())
along = torch.randn_like(w)
product = torch.func.jvp(lambda w: torch.func.grad(loss)(w, x), (w,), (along,))[1]
difference = (product.flatten() - hessian @ along.flatten()).abs().max().item()
lowest, highest = torch.linalg.eigvalsh(hessian)[[0, -1]].tolist()
print(f"eigenvalues from {lowest:.3f} to {highest:.3f}; the product alone differs by {difference:.1e}")
assert difference < 1e-5 < highest

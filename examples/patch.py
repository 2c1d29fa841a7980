#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A program that calls PyTorch's F.scaled_dot_product_attention, on heddle for as long as a block lasts.

python examples/patch.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import heddle

torch.manual_seed(0)
q, k, v = (torch.randn(2, 8, 256, 64, requires_grad=True) for _ in range(3))
bias = torch.randn(1, 8, 256, 256, requires_grad=True)


def gradients() -> torch.Tensor:
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return torch.cat([g.flatten() for g in torch.autograd.grad(o.square().sum(), (q, k, v, bias))])


theirs = gradients()
with heddle.patch():  # what heddle does not take goes on to PyTorch
    ours = gradients()
difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
print(f"gradients of q, k, v and the bias: largest difference over largest element {difference:.0e}")
assert not torch.equal(ours, theirs) and difference < 1e-4 and torch.equal(gradients(), theirs)
